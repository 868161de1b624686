//! Guest RAM, found in the VMM's own `/proc` entries: before the guest's first instruction, and
//! again whenever memory is plugged.
//!
//! What is taken: shared mappings of the memfds behind `<memory>`, DIMMs and virtio-mem devices.
//! What is never taken, since evicting would destroy others' data: ivshmem, NVDIMM, virtio-pmem,
//! CXL memory. What is refused is a [`Refusal`] that names the cure.
//!
//! QEMU gives every such memfd the same name. Backends of foreign data that are memfds (libvirt
//! makes files of those) are told apart by their size; where that fails the guest is refused.

mod cmdline;
mod folios;
mod host;
mod maps;
mod others;
mod refusal;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use outram_wire::units::{PageSize, format_size};

use super::{MemfdId, Vmm, kernel};
use cmdline::{CommandLine, MemoryBackend};

pub use maps::Mapping;
pub use refusal::Refusal;

/// The kind of memory backend that can be paged.
const MEMFD_BACKEND: &str = "memory-backend-memfd";

/// A block of guest RAM: one mapping of one memfd.
#[derive(Debug)]
pub struct RamBlock {
    /// The memory backend's id, such as `pc.ram`, `ram-node0` or `memdimm0`; hot-plugged blocks
    /// are named by their inode.
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

fn unreadable(path: &Path, source: io::Error) -> Refusal {
    Refusal::Unreadable {
        path: path.to_owned(),
        source,
    }
}

/// Start time of a process.
pub(super) fn start_time(pid: i32) -> io::Result<u64> {
    stat_field(pid, 22)
}

/// A number of a process's `stat`; fields are counted from 1, as proc(5) does, and from 3 on.
fn stat_field<T: FromStr>(pid: i32, field: usize) -> io::Result<T> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the name in parentheses, which may itself hold spaces and parentheses.
    stat.rsplit_once(')')
        .and_then(|(_, rest)| rest.split_whitespace().nth(field - 3))
        .and_then(|field| field.parse().ok())
        .ok_or_else(|| {
            let text = format!("no field {field} in stat");
            io::Error::new(io::ErrorKind::InvalidData, text)
        })
}

/// The guest's RAM, ordered by its address in the VMM; or why it must not be paged. To be called
/// again whenever memory may have been plugged.
pub fn guest_ram(vmm: &Vmm) -> Result<Vec<RamBlock>, Refusal> {
    let found = find_ram(vmm);
    match found {
        // Whatever else was wrong, it was because of this.
        Err(_) if vmm.ends_within(super::ENDING) => Err(Refusal::Gone { pid: vmm.pid }),
        found => found,
    }
}

fn find_ram(vmm: &Vmm) -> Result<Vec<RamBlock>, Refusal> {
    let line = CommandLine::parse(&read(&proc_path(vmm.pid, "cmdline"))?);
    let backends = line.memory_backends();
    check_backends(&line, &backends)?;
    others::check_devices(&line)?;
    others::check_open_files(vmm.pid)?;
    let mappings = parse_mappings(&read(&proc_path(vmm.pid, "maps"))?);
    let blocks = open_blocks(vmm.pid, mappings, &line, &backends)?;
    check_page_sizes(&blocks)?;
    check_locked(vmm.pid, &line)?;
    let memfds: Vec<MemfdId> = blocks.iter().map(|block| block.id).collect();
    others::check_other_mappers(vmm.pid, None, &memfds)?;
    check_preallocated(&blocks, &backends)?;
    folios::check(vmm.pid, &blocks)?;
    Ok(blocks)
}

/// The mappings of memory backends' memfds in the text of a `/proc/PID/maps`.
pub(super) fn parse_mappings(maps: &[u8]) -> Vec<Mapping> {
    maps::of_backends(&String::from_utf8_lossy(maps))
}

/// Refuses what the VMM has open that reaches past its page tables into guest RAM: disks and devices that
/// were plugged since the hand-over, perhaps.
pub(crate) fn open_files(pid: i32) -> Result<(), Refusal> {
    others::check_open_files(pid)
}

/// Refuses large folios in what the VMM has mapped of memory backends' memfds: shared-memory THP was on for a while.
pub(crate) fn large_folios(pid: i32) -> Result<(), Refusal> {
    for mapping in parse_mappings(&read(&proc_path(pid, "maps"))?) {
        match known_block(pid, &mapping) {
            Ok(block) => folios::check(pid, &[block])?,
            // What is no whole memfd is no block of ours.
            Err(Refusal::UnknownLayout(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The block behind a mapping that appeared after the hand-over, or why it must not be paged. The
/// process `pager` may have it mapped already.
pub(crate) fn plugged_block(
    pid: i32,
    pager: Option<i32>,
    mapping: &Mapping,
) -> Result<RamBlock, Refusal> {
    if !mapping.shared {
        let text = format!("a block of {} bytes is mapped privately", mapping.length());
        return Err(Refusal::PrivateMemory(text));
    }
    let descriptors = memfds_of(pid)?;
    let Some((path, _, size)) = descriptors.iter().find(|(_, id, _)| *id == mapping.id) else {
        let text = format!("no open descriptor for {}", mapping.id);
        return Err(Refusal::UnknownLayout(text));
    };
    if mapping.offset != 0 || mapping.length() != *size {
        // Seen halfway through a change, perhaps.
        let length = mapping.length();
        let text = format!("{length} bytes of a memfd of {size} bytes are mapped");
        return Err(Refusal::UnknownLayout(text));
    }
    let block = open_block(path, mapping, format!("memfd-{}", mapping.id.inode))?;
    check_seen_locked(pid)?;
    others::check_other_mappers(pid, pager, &[block.id])?;
    if block.huge_page_bytes.is_none() {
        host::check_shmem_thp()?;
        folios::check(pid, std::slice::from_ref(&block))?;
    }
    Ok(block)
}

/// The block behind a mapping that an earlier process of ours had taken over already: nothing is
/// refused any longer but what is no whole memfd.
pub(crate) fn known_block(pid: i32, mapping: &Mapping) -> Result<RamBlock, Refusal> {
    let descriptors = memfds_of(pid)?;
    let found = descriptors.iter().find(|(_, id, _)| *id == mapping.id);
    let Some((path, ..)) = found.filter(|_| mapping.shared) else {
        let text = format!("no open descriptor for {}", mapping.id);
        return Err(Refusal::UnknownLayout(text));
    };
    open_block(path, mapping, format!("memfd-{}", mapping.id.inode))
}

/// Refuses a guest that is not one of KVM, where what is lost is to be poisoned.
pub fn demand_kvm(pid: i32) -> Result<(), Refusal> {
    let line = CommandLine::parse(&read(&proc_path(pid, "cmdline"))?);
    line.is_under_kvm().then_some(()).ok_or(Refusal::NotKvm)
}

/// Whether shared memory of this host, anybody's, is in large folios now.
pub fn has_large_folios() -> bool {
    folios::are_on_host()
}

/// Whether this host's settings allow paging: shared-memory THP off.
pub fn host_requirements() -> Result<(), Refusal> {
    host::check_shmem_thp()
}

fn proc_path(pid: i32, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/{name}"))
}

fn read(path: &Path) -> Result<Vec<u8>, Refusal> {
    fs::read(path).map_err(|source| unreadable(path, source))
}

/// Refuses backends that are no memfd and not known to be foreign data.
fn check_backends(line: &CommandLine, backends: &[MemoryBackend]) -> Result<(), Refusal> {
    let foreign = line.foreign_backends();
    let private = backends
        .iter()
        .find(|backend| backend.kind != MEMFD_BACKEND && !foreign.contains(&backend.id));
    match private {
        Some(backend) => Err(Refusal::PrivateMemory(format!(
            "backend '{}' is a {}",
            backend.id, backend.kind
        ))),
        None => Ok(()),
    }
}

/// Refuses locked memory: asked for, or seen.
fn check_locked(pid: i32, line: &CommandLine) -> Result<(), Refusal> {
    if line
        .all("overcommit")
        .any(|option| option.is_on("mem-lock"))
    {
        return Err(Refusal::Locked);
    }
    check_seen_locked(pid)
}

/// Refuses memory that the kernel says is locked.
fn check_seen_locked(pid: i32) -> Result<(), Refusal> {
    let status = read(&proc_path(pid, "status"))?;
    let status = String::from_utf8_lossy(&status);
    let locked_kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmLck:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
        .unwrap_or(0);
    // Reading smaps walks every page table: only where there is something to find.
    if locked_kib > 0 && backend_is_locked(&read(&proc_path(pid, "smaps"))?) {
        return Err(Refusal::Locked);
    }
    Ok(())
}

/// Whether a memory backend's mapping has the flag `lo` in `smaps`.
fn backend_is_locked(smaps: &[u8]) -> bool {
    let mut in_backend = false;
    String::from_utf8_lossy(smaps).lines().any(|line| {
        let first = line.split(' ').next().unwrap_or("");
        if !first.ends_with(':') {
            in_backend = line.contains("/memfd:memory-backend-memfd");
        }
        let flags = line.strip_prefix("VmFlags:").filter(|_| in_backend);
        flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "lo"))
    })
}

/// Refuses huge pages of another size than 2 MiB, several sizes at once, and base pages where the
/// host's settings may turn them into large ones.
fn check_page_sizes(blocks: &[RamBlock]) -> Result<(), Refusal> {
    let huge = PageSize::HUGE.bytes();
    for block in blocks {
        if let Some(bytes) = block.huge_page_bytes.filter(|bytes| *bytes != huge) {
            return Err(Refusal::HugePages(block.name.clone(), format_size(bytes)));
        }
    }
    let is_huge = |block: &RamBlock| block.huge_page_bytes.is_some();
    let Some(base) = blocks.iter().find(|block| !is_huge(block)) else {
        return Ok(());
    };
    match blocks.iter().find(|block| is_huge(block)) {
        Some(other) => Err(Refusal::MixedPages(other.name.clone(), base.name.clone())),
        None => host::check_shmem_thp(),
    }
}

/// Refuses preallocated RAM, except of huge pages, whose pool libvirt fills by itself.
fn check_preallocated(blocks: &[RamBlock], backends: &[MemoryBackend]) -> Result<(), Refusal> {
    for block in blocks
        .iter()
        .filter(|block| block.huge_page_bytes.is_none())
    {
        let backend = backends.iter().find(|backend| backend.id == block.name);
        if let Some(backend) = backend.filter(|backend| backend.prealloc) {
            return Err(Refusal::Preallocated(backend.id.clone()));
        }
    }
    Ok(())
}

/// Opens the memfds behind the mappings and names them; drops those of foreign data.
fn open_blocks(
    pid: i32,
    mappings: Vec<Mapping>,
    line: &CommandLine,
    backends: &[MemoryBackend],
) -> Result<Vec<RamBlock>, Refusal> {
    if mappings.is_empty() {
        let text = "no shared memfd of a memory backend is mapped";
        return Err(Refusal::PrivateMemory(text.into()));
    }
    let foreign = foreign_sizes(line, backends)?;
    let descriptors = memfds_of(pid)?;
    let mut names = Names::new(backends);
    let mut blocks = Vec::new();
    // In the order of the descriptors, which is that of the backends on the command line.
    for (path, id, size) in descriptors {
        let mut of_file = mappings.iter().filter(|mapping| mapping.id == id);
        let Some(mapping) = of_file.next() else {
            continue;
        };
        if foreign.contains(&size) || blocks.iter().any(|block: &RamBlock| block.id == id) {
            continue;
        }
        if !mapping.shared {
            let text = format!("a memfd of {size} bytes is mapped privately");
            return Err(Refusal::PrivateMemory(text));
        }
        if of_file.next().is_some() {
            let text = format!("a memfd of {size} bytes is mapped twice");
            return Err(Refusal::UnknownLayout(text));
        }
        blocks.push(open_block(&path, mapping, names.of(size, id))?);
    }
    if let Some(lost) = mappings.iter().find(|mapping| {
        let length = mapping.end - mapping.start;
        !foreign.contains(&length) && blocks.iter().all(|block| block.id != mapping.id)
    }) {
        let text = format!("no open descriptor for {}", lost.id);
        return Err(Refusal::UnknownLayout(text));
    }
    blocks.sort_by_key(|block| block.hva);
    Ok(blocks)
}

fn open_block(path: &Path, mapping: &Mapping, name: String) -> Result<RamBlock, Refusal> {
    let unreadable = |source| unreadable(path, source);
    let memfd = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(unreadable)?;
    // The descriptor may have been closed and its number reused since.
    if MemfdId::of(&memfd).map_err(unreadable)? != mapping.id {
        let text = format!("{} changed while it was looked at", path.display());
        return Err(Refusal::UnknownLayout(text));
    }
    let huge_page_bytes = kernel::huge_page_bytes(memfd.as_fd()).map_err(unreadable)?;
    Ok(RamBlock {
        name,
        memfd,
        id: mapping.id,
        file_offset: mapping.offset,
        hva: mapping.start,
        length: mapping.end - mapping.start,
        huge_page_bytes,
    })
}

/// Sizes of memfds that hold foreign data; refuses where RAM has the same.
fn foreign_sizes(line: &CommandLine, backends: &[MemoryBackend]) -> Result<Vec<u64>, Refusal> {
    let foreign = line.foreign_backends();
    let (theirs, ours): (Vec<_>, Vec<_>) = backends
        .iter()
        .filter(|backend| backend.kind == MEMFD_BACKEND)
        .partition(|backend| foreign.contains(&backend.id));
    let mut sizes = Vec::new();
    for backend in theirs {
        let unique = backend
            .size
            .filter(|_| ours.iter().all(|ram| ram.size != backend.size));
        let Some(size) = unique else {
            return Err(Refusal::AmbiguousBackend(backend.id.clone()));
        };
        sizes.push(size);
    }
    Ok(sizes)
}

/// The VMM's open memfds by ascending descriptor: path, identity, size.
fn memfds_of(pid: i32) -> Result<Vec<(PathBuf, MemfdId, u64)>, Refusal> {
    let directory = proc_path(pid, "fd");
    let entries = fs::read_dir(&directory).map_err(|source| unreadable(&directory, source))?;
    let mut found = BTreeMap::new();
    for entry in entries {
        let entry = entry.map_err(|source| unreadable(&directory, source))?;
        let unreadable = |source| unreadable(&entry.path(), source);
        let number: Option<u32> = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        let target = others::unless_closed(fs::read_link(entry.path())).map_err(unreadable)?;
        let (Some(number), Some(target)) = (number, target) else {
            continue;
        };
        if !target
            .as_os_str()
            .as_encoded_bytes()
            .starts_with(b"/memfd:")
        {
            continue;
        }
        let metadata = others::unless_closed(fs::metadata(entry.path())).map_err(unreadable)?;
        if let Some(metadata) = metadata {
            let id = MemfdId {
                device: metadata.dev(),
                inode: metadata.ino(),
            };
            found.insert(number, (entry.path(), id, metadata.size()));
        }
    }
    Ok(found.into_values().collect())
}

/// Gives each block the id of a backend of its size, in their order.
struct Names<'a> {
    free: Vec<&'a MemoryBackend>,
}

impl<'a> Names<'a> {
    fn new(backends: &'a [MemoryBackend]) -> Self {
        let is_memfd = |backend: &&MemoryBackend| backend.kind == MEMFD_BACKEND;
        Self {
            free: backends.iter().filter(is_memfd).collect(),
        }
    }

    fn of(&mut self, size: u64, id: MemfdId) -> String {
        let found = self
            .free
            .iter()
            .position(|backend| backend.size == Some(size));
        match found {
            Some(index) => self.free.remove(index).id.clone(),
            None => format!("memfd-{}", id.inode),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_backends_lock_counts() {
        let smaps = |name: &str, flags: &str| {
            format!(
                "7f00-7f01 rw-s 00000000 00:01 9    {name}\nSize: 4 kB\nVmFlags: rd {flags} \n\
                 7f02-7f03 rw-p 00000000 00:00 0\nSize: 4 kB\nVmFlags: rd lo \n"
            )
        };
        let memfd = "/memfd:memory-backend-memfd (deleted)";
        assert!(backend_is_locked(smaps(memfd, "lo").as_bytes()));
        assert!(!backend_is_locked(smaps(memfd, "wr").as_bytes()));
        assert!(!backend_is_locked(smaps("/memfd:else", "lo").as_bytes()));
    }

    #[test]
    fn a_foreign_backend_needs_a_size_of_its_own() {
        let line = |shm_mib: u32| {
            let text = format!(
                "qemu\0-object\0memory-backend-memfd,id=pc.ram,size=64M\0\
                 -object\0memory-backend-memfd,id=shm,size={shm_mib}M\0\
                 -device\0ivshmem-plain,memdev=shm\0"
            );
            CommandLine::parse(text.as_bytes())
        };
        let sizes = |line: CommandLine| foreign_sizes(&line, &line.memory_backends());
        assert_eq!(sizes(line(1)).expect("told apart"), [1 << 20]);
        assert!(matches!(
            sizes(line(64)),
            Err(Refusal::AmbiguousBackend(id)) if id == "shm"
        ));
    }

    #[test]
    fn only_one_size_of_pages_is_paged() {
        let block = |name: &str, huge_page_bytes| RamBlock {
            name: name.to_owned(),
            memfd: tempfile::tempfile().expect("a file"),
            id: MemfdId {
                device: 0,
                inode: 0,
            },
            file_offset: 0,
            hva: 0,
            length: 1 << 30,
            huge_page_bytes,
        };
        let refusal = |sizes: [Option<u64>; 2]| {
            let blocks = [block("one", sizes[0]), block("two", sizes[1])];
            check_page_sizes(&blocks)
                .err()
                .map(|error| error.to_string())
        };
        assert_eq!(refusal([Some(2 << 20); 2]), None);
        let giga = refusal([Some(2 << 20), Some(1 << 30)]).expect("refused");
        assert!(giga.contains("two") && giga.contains("1 GiB"), "{giga}");
        let mixed = refusal([Some(2 << 20), None]).expect("refused");
        assert!(mixed.contains("one") && mixed.contains("two"), "{mixed}");
    }

    #[test]
    fn our_own_start_time_is_found() {
        let pid = std::process::id() as i32;
        assert!(start_time(pid).expect("we run") > 0);
    }
}
