//! Large folios in guest RAM that is populated already.
//!
//! Shared-memory THP has to be off when a guest is taken over (see `host`). But a guest that was
//! started while it was on may hold large folios from then, and punching one page of such a folio
//! would zero it in place. Where the kernel's counters say that there is none on the whole host,
//! nothing is looked at; else the flags of every mapped page that the file has are (`/proc/PID/pagemap`,
//! `/proc/kpageflags`; Documentation/admin-guide/mm/pagemap.rst).

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::{RamBlock, Refusal, unreadable};
use crate::holes::data_in;

const PAGE: u64 = 4096;
const KPAGEFLAGS: &str = "/proc/kpageflags";
const THP_DIRECTORY: &str = "/sys/kernel/mm/transparent_hugepage";

/// `COMPOUND_HEAD`, `COMPOUND_TAIL`, `HUGE` and `THP` in `/proc/kpageflags`.
const LARGE: u64 = 1 << 15 | 1 << 16 | 1 << 17 | 1 << 22;

/// In `/proc/PID/pagemap`: the page is in memory; its frame's number.
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// Entries read at once.
const CHUNK: usize = 8192;

/// Refuses guest RAM with large folios in it.
pub(super) fn check(pid: i32, blocks: &[RamBlock]) -> Result<(), Refusal> {
    if none_on_host() {
        return Ok(());
    }
    let plain = blocks
        .iter()
        .filter(|block| block.huge_page_bytes.is_none());
    for block in plain {
        let start = block.file_offset;
        let data = data_in(&block.memfd, start..start + block.length);
        for data in data.map_err(|source| unreadable(block.name.as_ref(), source))? {
            let address = block.hva + (data.start - start);
            if let Some(found) = find(pid, address, data.end - data.start)? {
                return Err(Refusal::LargeFolio {
                    name: block.name.clone(),
                    offset: found - block.hva,
                });
            }
        }
    }
    Ok(())
}

/// Whether the host has shared memory in folios of the size of a PMD, in doubt too.
pub(super) fn are_on_host() -> bool {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    info.lines()
        .find_map(|line| line.strip_prefix("ShmemHugePages:"))
        .is_none_or(|rest| rest.split_whitespace().next() != Some("0"))
}

/// Whether the host has no large folio of shared memory: none of the size of a PMD now, none of
/// another ever. (Kernels without counters for other sizes have no such sizes.)
fn none_on_host() -> bool {
    let Ok(sizes) = fs::read_dir(THP_DIRECTORY) else {
        return true;
    };
    !are_on_host()
        && sizes.flatten().all(|size| {
            let count = fs::read_to_string(size.path().join("stats/shmem_alloc"));
            match count {
                Ok(count) => count.trim() == "0",
                Err(_) => !size.path().join("shmem_enabled").exists(),
            }
        })
}

/// The first address of a range of process `pid` that a large folio is mapped at.
fn find(pid: i32, start: u64, length: u64) -> Result<Option<u64>, Refusal> {
    let path = PathBuf::from(format!("/proc/{pid}/pagemap"));
    let pagemap = File::open(&path).map_err(|source| unreadable(&path, source))?;
    let flags = File::open(KPAGEFLAGS).map_err(|source| unreadable(KPAGEFLAGS.as_ref(), source))?;
    let mut entries = vec![0; CHUNK * 8];
    let (mut page, end) = (start / PAGE, (start + length) / PAGE);
    while page < end {
        let count = (end - page).min(CHUNK as u64) as usize;
        let chunk = &mut entries[..count * 8];
        pagemap
            .read_exact_at(chunk, page * 8)
            .map_err(|source| unreadable(&path, source))?;
        for (number, entry) in (page..).zip(chunk.chunks_exact(8)) {
            let mut entry = word(entry);
            while entry & PRESENT != 0 {
                let mut of_frame = [0; 8];
                flags
                    .read_exact_at(&mut of_frame, (entry & FRAME) * 8)
                    .map_err(|source| unreadable(KPAGEFLAGS.as_ref(), source))?;
                if word(&of_frame) & LARGE == 0 {
                    break;
                }
                // The frame may have gone to somebody else since.
                let mut again = [0; 8];
                pagemap
                    .read_exact_at(&mut again, number * 8)
                    .map_err(|source| unreadable(&path, source))?;
                if word(&again) == entry {
                    return Ok(Some(number * PAGE));
                }
                entry = word(&again);
            }
        }
        page += count as u64;
    }
    Ok(None)
}

fn word(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use std::io;

    use vm_memory::{Bytes, MmapRegion, VolatileMemory};

    use super::*;

    /// Anonymous memory stands in for shared memory: the flags are the same.
    #[test]
    fn a_large_folio_is_found_and_single_pages_are_not() {
        const BYTES: usize = 8 << 20;
        let pid = std::process::id() as i32;
        let region: MmapRegion = MmapRegion::new(BYTES).expect("memory");
        let start = region.as_ptr() as u64;
        let advise = |how| {
            advise_range(start, BYTES, how);
        };
        advise(libc::MADV_NOHUGEPAGE);
        let whole = region.as_volatile_slice();
        for offset in (0..BYTES).step_by(PAGE as usize) {
            whole.write_obj(1u8, offset).expect("within it");
        }
        assert!(matches!(find(pid, start, BYTES as u64), Ok(None)));
        advise(libc::MADV_DONTNEED);
        advise(libc::MADV_HUGEPAGE);
        for offset in (0..BYTES).step_by(PAGE as usize) {
            whole.write_obj(1u8, offset).expect("within it");
        }
        let smaps = fs::read_to_string("/proc/self/smaps_rollup").expect("our own");
        let has_huge = smaps
            .lines()
            .find_map(|line| line.strip_prefix("AnonHugePages:"))
            .is_some_and(|rest| !rest.trim().starts_with("0 "));
        if !has_huge {
            return crate::skip_test("this host gives no huge pages");
        }
        assert!(matches!(find(pid, start, BYTES as u64), Ok(Some(_))));
    }

    #[allow(unsafe_code)]
    fn advise_range(start: u64, length: usize, how: i32) {
        // SAFETY: the range is a whole mapping of the caller's, whose bytes no reference is to.
        let result = unsafe { libc::madvise(start as *mut libc::c_void, length, how) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
    }
}
