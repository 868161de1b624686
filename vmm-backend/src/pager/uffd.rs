//! Fence around userfaultfd: turns errno into meanings, and adds the calls that the `userfaultfd`
//! crate lacks (the API handshake on a descriptor made elsewhere, write-protected COPY, partial
//! results of ZEROPAGE, WRITEPROTECT with its errno, POISON).
//!
//! Knows nothing of states: addresses are the VMM's, lengths are bytes. Source:
//! `linux/userfaultfd.h` and Documentation/admin-guide/mm/userfaultfd.rst.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use outram_wire::logging::Seldom;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use userfaultfd::{EventBuffer, RegisterMode};

use crate::engine::{Install, PageSize};

pub(super) use userfaultfd::{Event, FaultKind, ReadWrite};

/// Messages taken by one read.
pub(super) const MESSAGES_PER_READ: usize = 64;

const API: u64 = 0xaa;
const MODE_PROTECTED_COPY: u64 = 1 << 1;
const MODE_PROTECT: u64 = 1 << 0;
const MODE_UNPROTECT_ASLEEP: u64 = 1 << 1;

/// Features asked for: write-protect faults and events of discarded and unmapped ranges, on shared
/// memory of this page size.
fn features(size: PageSize) -> u64 {
    let missing = match size.is_huge() {
        true => FEATURE_HUGETLBFS,
        false => FEATURE_SHMEM,
    };
    FEATURE_WP | FEATURE_REMOVE | missing | FEATURE_UNMAP | FEATURE_WP_SHMEM
}
const FEATURE_WP: u64 = 1 << 0;
const FEATURE_REMOVE: u64 = 1 << 3;
const FEATURE_HUGETLBFS: u64 = 1 << 4;
const FEATURE_SHMEM: u64 = 1 << 5;
const FEATURE_UNMAP: u64 = 1 << 6;
/// Of hugetlbfs too.
const FEATURE_WP_SHMEM: u64 = 1 << 12;

#[repr(C)]
struct ApiHandshake {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Copy {
    destination: u64,
    source: u64,
    length: u64,
    mode: u64,
    copied: i64,
}

#[repr(C)]
struct Zeropage {
    start: u64,
    length: u64,
    mode: u64,
    zeroed: i64,
}

#[repr(C)]
struct Continue {
    start: u64,
    length: u64,
    mode: u64,
    mapped: i64,
}

#[repr(C)]
struct Poison {
    start: u64,
    length: u64,
    mode: u64,
    poisoned: i64,
}

#[repr(C)]
struct WriteProtect {
    start: u64,
    length: u64,
    mode: u64,
}

/// `_IOWR(0xAA, number, T)`.
const fn request<T>(number: u64) -> libc::c_ulong {
    0xc000_0000 | (std::mem::size_of::<T>() as u64) << 16 | API << 8 | number
}

const UFFDIO_API: libc::c_ulong = request::<ApiHandshake>(0x3f);
const UFFDIO_COPY: libc::c_ulong = request::<Copy>(0x03);
const UFFDIO_ZEROPAGE: libc::c_ulong = request::<Zeropage>(0x04);
const UFFDIO_WRITEPROTECT: libc::c_ulong = request::<WriteProtect>(0x06);
const UFFDIO_CONTINUE: libc::c_ulong = request::<Continue>(0x07);
const UFFDIO_POISON: libc::c_ulong = request::<Poison>(0x08);

// The numbers as the kernel's header makes them: a struct of another size would change them.
const _: () = assert!(UFFDIO_API == 0xc018_aa3f);
const _: () = assert!(UFFDIO_COPY == 0xc028_aa03);
const _: () = assert!(UFFDIO_ZEROPAGE == 0xc020_aa04);
const _: () = assert!(UFFDIO_WRITEPROTECT == 0xc018_aa06);
const _: () = assert!(UFFDIO_CONTINUE == 0xc020_aa07);
const _: () = assert!(UFFDIO_POISON == 0xc020_aa08);

/// A userfaultfd of the VMM, ready for use.
#[derive(Debug)]
pub(super) struct Uffd {
    inner: userfaultfd::Uffd,
    size: PageSize,
    /// A huge page of zeros: ZEROPAGE knows none. Never written, so that it costs no memory.
    zeros: Option<Box<[u8]>>,
}

impl Uffd {
    /// Shakes hands on a fresh descriptor, for memory of this page size.
    pub(super) fn adopt(fd: OwnedFd, size: PageSize) -> io::Result<Self> {
        let needed = features(size);
        let mut handshake = ApiHandshake {
            api: API,
            features: needed,
            ioctls: 0,
        };
        // SAFETY: the argument is a live struct of the size that the request's number names.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, &raw mut handshake) })?;
        Self::greeted(fd, size, handshake.features)
    }

    /// Takes over a descriptor of a former process, which may have died before it shook hands.
    pub(super) fn adopt_again(fd: OwnedFd, size: PageSize) -> io::Result<Self> {
        let needed = features(size);
        let mut handshake = ApiHandshake {
            api: API,
            features: needed,
            ioctls: 0,
        };
        // SAFETY: as in `adopt`.
        match check(unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, &raw mut handshake) }) {
            Ok(()) => Self::greeted(fd, size, handshake.features),
            // Hands are shaken once; ours were found to be enough then.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                Self::greeted(fd, size, needed)
            }
            Err(error) => Err(error),
        }
    }

    fn greeted(fd: OwnedFd, size: PageSize, has: u64) -> io::Result<Self> {
        let needed = features(size);
        if has & needed != needed {
            return Err(io::Error::other(format!(
                "the kernel lacks userfaultfd features (has {has:#x}, needed {needed:#x}): Linux 6.1 or newer is needed"
            )));
        }
        // SAFETY: ownership of a userfaultfd goes from one owner to the other.
        let inner = unsafe { userfaultfd::Uffd::from_raw_fd(fd.into_raw_fd()) };
        Ok(Self {
            inner,
            size,
            zeros: size.is_huge().then(|| vec![0; size.length()].into()),
        })
    }

    /// Catches missing and write-protected faults in the range.
    pub(super) fn register(&self, start: u64, length: u64) -> io::Result<()> {
        let mode = RegisterMode::MISSING | RegisterMode::WRITE_PROTECT;
        let range = (start as *mut libc::c_void, length as usize);
        self.inner
            .register_with_mode(range.0, range.1, mode)
            .map(drop)
            .map_err(io_error)
    }

    /// Lets the range go: whoever waits in it gets what the memory holds.
    ///
    /// The kernel wakes them before it takes the registration off, and since faults are handled
    /// under the mapping's own lock (Linux 6.8) one that began before may still start to wait in
    /// between, for good (seen on 6.18). Nobody can any more once the registration is off: those
    /// are woken then.
    pub(super) fn unregister(&self, start: u64, length: u64) -> io::Result<()> {
        self.inner
            .unregister(start as *mut libc::c_void, length as usize)
            .map_err(io_error)?;
        self.wake(start, length)
    }

    /// Makes the range zero; returns the bytes made, and how the attempt on the rest ended.
    pub(super) fn zero(&self, start: u64, length: u64) -> (u64, Install) {
        match &self.zeros {
            Some(zeros) => self.copy_zeros(start, length, zeros),
            None => self.zeropage(start, length),
        }
    }

    fn copy_zeros(&self, start: u64, length: u64, zeros: &[u8]) -> (u64, Install) {
        for made in (0..length).step_by(zeros.len()) {
            match self.copy(start + made, zeros, false) {
                Install::Done => {}
                how => return (made, how),
            }
        }
        (length, Install::Done)
    }

    fn zeropage(&self, start: u64, length: u64) -> (u64, Install) {
        let mut zeropage = Zeropage {
            start,
            length,
            mode: 0,
            zeroed: 0,
        };
        // SAFETY: as in `adopt`; the kernel writes to the VMM's registered range only.
        let result = check(unsafe {
            libc::ioctl(self.inner.as_raw_fd(), UFFDIO_ZEROPAGE, &raw mut zeropage)
        });
        self.made_of(length, zeropage.zeroed, result)
    }

    /// The bytes that were made of those asked for, and how the attempt on the rest ended.
    fn made_of(&self, length: u64, made: i64, result: io::Result<()>) -> (u64, Install) {
        let made = u64::try_from(made).unwrap_or(0);
        match result {
            Ok(()) => (length, Install::Done),
            // A partial result comes back as EAGAIN; what stopped it shows at the next attempt.
            Err(_) if made > 0 => (made, Install::Again),
            Err(error) => (0, self.install_outcome(&error)),
        }
    }

    /// Puts one page in place, write-protected if `protect`.
    pub(super) fn copy(&self, destination: u64, bytes: &[u8], protect: bool) -> Install {
        let mode = if protect { MODE_PROTECTED_COPY } else { 0 };
        match self.copy_all(destination, bytes, mode).1 {
            Install::Exists if self.size.is_huge() => self.map_existing(destination),
            how => how,
        }
    }

    /// Puts small pages in place from the bytes of all of them; returns the bytes that are, and how the attempt
    /// on the rest ended.
    pub(super) fn copy_row(&self, destination: u64, bytes: &[u8]) -> (u64, Install) {
        self.copy_all(destination, bytes, 0)
    }

    fn copy_all(&self, destination: u64, bytes: &[u8], mode: u64) -> (u64, Install) {
        let mut copy = Copy {
            destination,
            source: bytes.as_ptr() as u64,
            length: bytes.len() as u64,
            mode,
            copied: 0,
        };
        // SAFETY: as in `zero`; the source is a live slice of `length` bytes.
        let result =
            check(unsafe { libc::ioctl(self.inner.as_raw_fd(), UFFDIO_COPY, &raw mut copy) });
        self.made_of(copy.length, copy.copied, result)
    }

    /// COPY of a huge page says EEXIST also where the pool is empty (Linux 6.18, of which the
    /// page table of the range stands). Mapping what exists tells which it is.
    fn map_existing(&self, start: u64) -> Install {
        let mut existing = Continue {
            start,
            length: self.size.bytes(),
            mode: 0,
            mapped: 0,
        };
        // SAFETY: as in `adopt`; the kernel maps a page that the file has, or nothing.
        let mapped = check(unsafe {
            libc::ioctl(self.inner.as_raw_fd(), UFFDIO_CONTINUE, &raw mut existing)
        });
        match mapped {
            Ok(()) => Install::Exists,
            // The file has no such page.
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) => Install::PoolEmpty,
            Err(error) => self.install_outcome(&error),
        }
    }

    /// Whether the kernel has POISON (Linux 6.6). Nothing is registered yet.
    pub(super) fn can_poison(&self) -> bool {
        // Any address that a process may have (not one below `vm.mmap_min_addr`): a kernel that knows
        // the request finds nothing of ours there, any other does not know the request.
        match self.mark_poisoned(1 << 30, self.size.bytes()) {
            Ok(()) => true,
            Err(error) => error.raw_os_error() == Some(libc::ENOENT),
        }
    }

    /// Makes accesses to one page, which is not there, memory errors, and wakes its waiters.
    pub(super) fn poison(&self, start: u64, length: u64) -> Install {
        // An evicted page's protection has left a mark in the page table, which counts as a page.
        let bare = self.write_protect(start, length, MODE_UNPROTECT_ASLEEP);
        match bare.and_then(|()| self.mark_poisoned(start, length)) {
            Ok(()) => Install::Done,
            Err(error) => self.install_outcome(&error),
        }
    }

    fn mark_poisoned(&self, start: u64, length: u64) -> io::Result<()> {
        let mut poison = Poison {
            start,
            length,
            mode: 0,
            poisoned: 0,
        };
        // SAFETY: as in `adopt`.
        check(unsafe { libc::ioctl(self.inner.as_raw_fd(), UFFDIO_POISON, &raw mut poison) })
    }

    /// Write-protects a range.
    pub(super) fn protect(&self, start: u64, length: u64) -> io::Result<()> {
        self.write_protect(start, length, MODE_PROTECT)
    }

    /// Lifts the protection of a range and wakes its waiters.
    pub(super) fn unprotect(&self, start: u64, length: u64) -> Install {
        match self.write_protect(start, length, 0) {
            Ok(()) => Install::Done,
            Err(error) => self.install_outcome(&error),
        }
    }

    fn install_outcome(&self, error: &io::Error) -> Install {
        match error.raw_os_error() {
            Some(libc::EEXIST) => Install::Exists,
            // The pool, or the VMM's share of it by a hugetlb cgroup.
            Some(libc::ENOMEM) if self.size.is_huge() => Install::PoolEmpty,
            // ENOMEM passes too: the VMM's memory cgroup reclaims or its owner raises the limit.
            Some(libc::EAGAIN | libc::ENOMEM | libc::EINTR | libc::EBUSY) => Install::Again,
            Some(libc::ESRCH | libc::ENOENT) => Install::Gone,
            _ => {
                // EINVAL and EFAULT would be mistakes of ours: nothing was changed, so the guest
                // stands still rather than goes on with wrong bytes.
                report_refusal(error);
                Install::Again
            }
        }
    }

    fn write_protect(&self, start: u64, length: u64, mode: u64) -> io::Result<()> {
        let mut protect = WriteProtect {
            start,
            length,
            mode,
        };
        // SAFETY: as in `adopt`.
        check(unsafe {
            libc::ioctl(
                self.inner.as_raw_fd(),
                UFFDIO_WRITEPROTECT,
                &raw mut protect,
            )
        })
    }

    /// Wakes whoever waits in the range.
    pub(super) fn wake(&self, start: u64, length: u64) -> io::Result<()> {
        self.inner
            .wake(start as *mut libc::c_void, length as usize)
            .map_err(io_error)
    }

    /// Whether something has come.
    pub(super) fn has_messages(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.as_fd(), PollFlags::IN)];
        // A failure shows at the next read.
        !matches!(poll(&mut fds, Some(&Timespec::default())), Ok(0))
    }

    /// Whether there is anything to [`read`](Self::read), an error among it. What has come is taken, so that it
    /// costs no more to know than to read.
    pub(super) fn look(&self, events: &mut Events) -> bool {
        if events.looked.is_none() {
            let read = self.read(events);
            let is_nothing = read.as_ref().is_ok_and(Vec::is_empty);
            events.looked = Some(read).filter(|_| !is_nothing);
        }
        events.looked.is_some()
    }

    /// Reads what has come, at most one buffer full.
    pub(super) fn read(&self, events: &mut Events) -> io::Result<Vec<Event>> {
        if let Some(looked) = events.looked.take() {
            return looked;
        }
        let read = self.inner.read_events(&mut events.buffer);
        let read = read.map_err(io_error)?;
        read.collect::<Result<_, _>>().map_err(io_error)
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

/// A buffer for messages, of one userfaultfd.
pub(super) struct Events {
    buffer: EventBuffer,
    /// What a look has taken.
    looked: Option<io::Result<Vec<Event>>>,
}

impl Events {
    /// An empty buffer.
    pub(super) fn new() -> Self {
        Self {
            buffer: EventBuffer::new(MESSAGES_PER_READ),
            looked: None,
        }
    }
}

impl Default for Events {
    fn default() -> Self {
        Self::new()
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn report_refusal(error: &io::Error) {
    // What is refused is tried again at once.
    static REFUSED: Seldom = Seldom::new();
    if REFUSED.is_due() {
        tracing::error!(%error, "userfaultfd refuses to install a page: the guest waits for it");
    }
}

fn io_error(error: userfaultfd::Error) -> io::Error {
    match error {
        userfaultfd::Error::SystemError(errno) => io::Error::from_raw_os_error(errno as i32),
        other => io::Error::other(other),
    }
}
