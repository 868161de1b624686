//! Fence around this process's own mappings of guest RAM.
//!
//! Every mapping is watched by a userfaultfd of our own with `UFFD_FEATURE_SIGBUS`: an access to a
//! page that is not there makes no zero page in the guest's memory, it fails. How it fails:
//!
//! - Buffers are copied by `process_vm_readv` and `process_vm_writev` on ourselves: the kernel
//!   resolves the pages and answers `EFAULT`. No signal, nothing to recover from.
//! - Rings need atomic accesses, so they are mapped by themselves ([`RingMapping`]) and accessed
//!   directly. There a stray access is a SIGBUS; its handler puts a private page of zeros under
//!   the access and marks the mapping as strayed, and the queue is given up. The guest's memory is
//!   not touched. A SIGBUS anywhere else keeps its default action.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use outram_wire::units::PageSize;
use userfaultfd::{FeatureFlags, RegisterMode, Uffd, UffdBuilder};
use vm_memory::{FileOffset, MmapRegion};

/// Most ring mappings at once: three a queue, for as many queues as a front end may use.
const MAX_RING_MAPPINGS: usize = 1024;

/// The userfaultfd that watches this process's mappings of guest RAM.
#[derive(Clone)]
pub(super) struct Guard(Arc<Uffd>);

impl Guard {
    /// Prepares the net under all mappings to come.
    pub(super) fn new() -> io::Result<Self> {
        install_handler()?;
        let uffd = UffdBuilder::new()
            .close_on_exec(true)
            .non_blocking(true)
            // With SIGBUS as the outcome, faults by the kernel fail as well.
            .user_mode_only(true)
            .require_features(FeatureFlags::SIGBUS | FeatureFlags::MISSING_SHMEM)
            .create()
            .map_err(io::Error::other)?;
        Ok(Self(Arc::new(uffd)))
    }

    /// Maps a range of a memfd, watched. Offset and length are whole pages.
    ///
    /// No access is allowed until it is watched. Otherwise the kernel itself would make all pages
    /// that are missing, of zeros, where pages are huge: this process locks its memory as it is
    /// touched (`MCL_ONFAULT`), of which hugetlbfs heeds the first half and forgets the second.
    pub(super) fn map(&self, file: &Arc<File>, range: Range<u64>) -> io::Result<GuardedMapping> {
        let length = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
        let offset = FileOffset::from_arc(Arc::clone(file), range.start);
        // No reservation: the host's pool of huge pages need not hold what is missing.
        let flags = libc::MAP_NORESERVE | libc::MAP_SHARED;
        let region = MmapRegion::build(Some(offset), length, libc::PROT_NONE, flags)
            .map_err(io::Error::other)?;
        self.0
            .register_with_mode(region.as_ptr().cast(), length, RegisterMode::MISSING)
            .map_err(io::Error::other)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is the mapping made above, which nobody else knows of yet.
        if unsafe { libc::mprotect(region.as_ptr().cast(), length, access) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(GuardedMapping {
            region,
            _uffd: Arc::clone(&self.0),
        })
    }
}

/// A watched mapping of guest RAM.
pub(super) struct GuardedMapping {
    region: MmapRegion,
    /// Closing the last descriptor would end the watch.
    _uffd: Arc<Uffd>,
}

/// A pinned page was not there.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stray;

impl GuardedMapping {
    /// Copies out of the mapping.
    pub(super) fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), Stray> {
        let remote = self.remote(offset, into.len())?;
        let local = libc::iovec {
            iov_base: into.as_mut_ptr().cast(),
            iov_len: into.len(),
        };
        let us = std::process::id() as libc::pid_t;
        // SAFETY: local is a live buffer of the stated length that is ours to write; the kernel
        // checks remote, and touches nothing where a page of it is missing.
        let copied = unsafe { libc::process_vm_readv(us, &local, 1, &remote, 1, 0) };
        whole(copied, into.len())
    }

    /// Copies into the mapping.
    pub(super) fn write(&self, offset: usize, from: &[u8]) -> Result<(), Stray> {
        let remote = self.remote(offset, from.len())?;
        let local = libc::iovec {
            iov_base: from.as_ptr().cast_mut().cast(),
            iov_len: from.len(),
        };
        let us = std::process::id() as libc::pid_t;
        // SAFETY: local is a live buffer of the stated length, which is only read; remote lies
        // within our shared mapping of guest memory, which no Rust reference ever points to.
        let copied = unsafe { libc::process_vm_writev(us, &local, 1, &remote, 1, 0) };
        whole(copied, from.len())
    }

    fn remote(&self, offset: usize, length: usize) -> Result<libc::iovec, Stray> {
        let within = offset
            .checked_add(length)
            .is_some_and(|end| end <= self.region.size());
        if !within {
            return Err(Stray);
        }
        Ok(libc::iovec {
            iov_base: self.region.as_ptr().wrapping_add(offset).cast(),
            iov_len: length,
        })
    }
}

fn whole(copied: isize, expected: usize) -> Result<(), Stray> {
    if usize::try_from(copied) == Ok(expected) {
        Ok(())
    } else {
        Err(Stray)
    }
}

/// A watched mapping of ring pages that may be accessed directly.
pub(super) struct RingMapping {
    region: Arc<MmapRegion>,
    _uffd: Arc<Uffd>,
    slot: &'static Slot,
}

impl Guard {
    /// Maps ring pages of a size, watched, so that a stray access is caught by the signal handler.
    pub(super) fn map_ring(
        &self,
        file: &Arc<File>,
        range: Range<u64>,
        size: PageSize,
    ) -> io::Result<RingMapping> {
        let GuardedMapping { region, _uffd } = self.map(file, range)?;
        let start = region.as_ptr() as usize;
        let slot = SLOTS
            .iter()
            .find(|slot| slot.claim(start, region.size(), size))
            .ok_or_else(|| io::Error::other("more rings than can be watched"))?;
        Ok(RingMapping {
            region: Arc::new(region),
            _uffd,
            slot,
        })
    }
}

impl RingMapping {
    /// The mapping, for vm-memory.
    pub(super) fn region(&self) -> Arc<MmapRegion> {
        Arc::clone(&self.region)
    }

    /// Whether an access found its page missing. What was read since then is not the guest's.
    pub(super) fn has_strayed(&self) -> bool {
        self.slot.strayed.load(Ordering::Acquire)
    }
}

impl Drop for RingMapping {
    fn drop(&mut self) {
        self.slot.release();
    }
}

/// A ring mapping as the signal handler sees it. Claimed while `start` is not 0.
struct Slot {
    start: AtomicUsize,
    length: AtomicUsize,
    page_bytes: AtomicUsize,
    strayed: AtomicBool,
}

static SLOTS: [Slot; MAX_RING_MAPPINGS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        length: AtomicUsize::new(0),
        page_bytes: AtomicUsize::new(0),
        strayed: AtomicBool::new(false),
    }
}; MAX_RING_MAPPINGS];

impl Slot {
    fn claim(&self, start: usize, length: usize, size: PageSize) -> bool {
        let claimed = self
            .start
            .compare_exchange(0, start, Ordering::AcqRel, Ordering::Acquire)
            .is_ok();
        if claimed {
            self.strayed.store(false, Ordering::Release);
            self.page_bytes.store(size.length(), Ordering::Release);
            self.length.store(length, Ordering::Release);
        }
        claimed
    }

    fn release(&self) {
        self.length.store(0, Ordering::Release);
        self.start.store(0, Ordering::Release);
    }

    fn holds(&self, address: usize) -> bool {
        let start = self.start.load(Ordering::Acquire);
        let length = self.length.load(Ordering::Acquire);
        start != 0 && address.wrapping_sub(start) < length
    }
}

/// Installs the handler, once a process.
fn install_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    INSTALLED
        .get_or_init(|| set_action(handle_bus_error as *const () as usize, libc::SA_SIGINFO))
        .map_err(io::Error::from_raw_os_error)
}

/// Sets what SIGBUS does; on failure the error number. Async-signal-safe.
fn set_action(handler: usize, flags: libc::c_int) -> Result<(), i32> {
    // SAFETY: all zeros make a valid sigaction: empty mask, default action.
    let mut action = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
    action.sa_sigaction = handler;
    action.sa_flags = flags | libc::SA_ONSTACK;
    // SAFETY: action is live and initialised; the old one is not asked for. The handler below is
    // async-signal-safe.
    let result = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }
}

/// Runs on the thread that made the access. Only atomics and two system calls.
extern "C" fn handle_bus_error(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid siginfo to a handler installed with SA_SIGINFO.
    let info = unsafe { &*info };
    // SAFETY: a SIGBUS's siginfo has an address.
    let address = unsafe { info.si_addr() } as usize;
    let slot = SLOTS.iter().find(|slot| slot.holds(address));
    let caught = slot.is_some_and(|slot| {
        slot.strayed.store(true, Ordering::Release);
        put_private_page(address, slot.page_bytes.load(Ordering::Acquire))
    });
    if !caught {
        // Not ours: with the default action the access repeats itself and ends the process.
        let _ = set_action(libc::SIG_DFL, 0);
    }
}

/// Replaces the page of ring mapping at an address by a private one of zeros.
fn put_private_page(address: usize, page: usize) -> bool {
    let start = (address & !(page - 1)) as *mut libc::c_void;
    // SAFETY: the page belongs to a RingMapping, which lives as long as its slot is claimed and is
    // accessed by this thread only; nothing but a raw pointer refers to it.
    let mapped = unsafe {
        libc::mmap(
            start,
            page,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    mapped == start
}

/// Makes sure that SIGBUS reaches the handler on this thread, whatever its parent blocked: a
/// blocked one would end the process.
pub(super) fn accept_bus_errors() {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the pointer is to a live local, which this initialises.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: initialised by the line above; SIGBUS is a valid signal.
    unsafe { libc::sigaddset(set.as_mut_ptr(), libc::SIGBUS) };
    // SAFETY: the set is initialised; the old one is not asked for. It cannot fail with these
    // arguments.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use vm_memory::{Bytes, VolatileMemory};

    const PAGE: u64 = 4096;

    /// A memfd of four pages, of which only page 1 is there.
    fn sparse_memfd() -> Arc<File> {
        let file = tempfile::tempfile_in("/dev/shm").expect("a tmpfs");
        file.set_len(4 * PAGE).expect("room");
        file.write_all_at(&[7; PAGE as usize], PAGE).expect("room");
        Arc::new(file)
    }

    fn blocks(file: &File) -> u64 {
        use std::os::unix::fs::MetadataExt;
        file.metadata().expect("open").blocks() * 512
    }

    #[test]
    fn a_stray_copy_is_an_error_and_makes_no_page() {
        let file = sparse_memfd();
        let guard = Guard::new().expect("userfaultfd");
        let mapping = guard.map(&file, 0..4 * PAGE).expect("mapped");
        let mut byte = [0; 16];
        assert_eq!(mapping.read(4096, &mut byte), Ok(()));
        assert_eq!(byte, [7; 16]);
        assert_eq!(mapping.read(0, &mut byte), Err(Stray));
        assert_eq!(mapping.write(8192, &[1]), Err(Stray));
        // Across the border of a page that is there and one that is not.
        assert_eq!(mapping.read(8184, &mut byte), Err(Stray));
        assert_eq!(mapping.write(4 * 4096 - 1, &[1, 2]), Err(Stray));
        assert_eq!(blocks(&file), PAGE);
        assert_eq!(mapping.write(4096, &[9]), Ok(()));
    }

    #[test]
    fn a_stray_ring_access_is_marked_and_makes_no_page() {
        let file = sparse_memfd();
        let guard = Guard::new().expect("userfaultfd");
        let ring = guard
            .map_ring(&file, PAGE..3 * PAGE, PageSize::BASE)
            .expect("mapped");
        accept_bus_errors();
        let region = ring.region();
        let slice = region.get_slice(0, 2 * PAGE as usize).expect("within");
        assert_eq!(slice.read_obj::<u16>(0).expect("within"), 0x0707);
        assert!(!ring.has_strayed());
        assert_eq!(slice.read_obj::<u16>(4096).expect("within"), 0);
        assert!(ring.has_strayed());
        slice.write_obj(5u16, 4096).expect("within");
        assert_eq!(blocks(&file), PAGE);
    }
}
