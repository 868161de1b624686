//! A memfd whose faults this process answers itself: the fence around userfaultfd and around memory
//! that workloads use as a slice.
//!
//! No part of Outram: floors are measured on it, and the plain pager that Outram is compared with
//! serves it.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use userfaultfd::{
    Error, Event, EventBuffer, FaultKind, ReadWrite, RegisterMode, Uffd, UffdBuilder,
};
use vm_memory::{FileOffset, MmapRegion};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// Messages taken by one read.
const MESSAGES_PER_READ: usize = 64;

/// How long a look for faults lasts before its caller may look at something else.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};

/// A page of memory, aligned as COPY wants its source to be for speed.
#[repr(align(4096))]
#[derive(Clone)]
pub struct Page(pub [u8; PAGE_BYTES]);

/// `UFFDIO_COPY`, whose `mode` the library has no way to set: `_IOWR(0xAA, 0x03, struct uffdio_copy)`,
/// include/uapi/linux/userfaultfd.h.
const UFFDIO_COPY: u32 = 0xc028_aa03;
/// `UFFDIO_COPY_MODE_WP` of its `mode`: the page is write-protected from the first.
const COPY_MODE_WP: u64 = 1 << 1;

/// `struct uffdio_copy`.
#[repr(C)]
struct Copying {
    destination: u64,
    source: u64,
    length: u64,
    mode: u64,
    copied: i64,
}

const _: () = assert!(size_of::<Copying>() == 0x28);

/// What a thread that used the memory waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A page that is not there.
    Missing(usize),
    /// The same, for who is to write to it.
    MissingToWrite(usize),
    /// The right to write a page that is write-protected.
    Protected(usize),
    /// A page that is there, but not mapped.
    Unmapped(usize),
}

/// Memory of this process that nobody pages, mapped at once: see [`as_words`].
pub fn anonymous(bytes: usize) -> Result<MmapRegion> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    MmapRegion::build(None, bytes, protection, flags).context("mapping anonymous memory")
}

/// Shared memory of this process, and its memfd.
pub fn shared(bytes: usize) -> Result<(MmapRegion, Arc<File>)> {
    let file = File::from(memfd_create("watched", MemfdFlags::CLOEXEC)?);
    ftruncate(&file, bytes as u64)?;
    let file = Arc::new(file);
    let offset = FileOffset::from_arc(Arc::clone(&file), 0);
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let region = MmapRegion::build(Some(offset), bytes, protection, flags)?;
    Ok((region, file))
}

/// Asks for huge pages, or for none, in this memory.
pub fn advise_huge(region: &MmapRegion, huge: bool) -> Result<()> {
    let advice = match huge {
        true => rustix::mm::Advice::LinuxHugepage,
        false => rustix::mm::Advice::LinuxNoHugepage,
    };
    // SAFETY: the range is a mapping of ours, and the advice changes none of its bytes.
    unsafe { rustix::mm::madvise(region.as_ptr().cast(), region.size(), advice) }
        .context("advising about huge pages")
}

/// The whole of a mapping as words. Nobody but the caller may use the memory meanwhile; a pager may
/// take pages out of it and put them back as they were, which no reader can tell.
pub fn as_words(region: &mut MmapRegion) -> &mut [u64] {
    // SAFETY: the mapping is of this length, page-aligned, and readable and writable as long as the
    // region lives, which the result borrows for itself alone; any bits are a u64.
    unsafe { std::slice::from_raw_parts_mut(region.as_ptr().cast(), region.size() / 8) }
}

/// A memfd with its userfaultfd.
#[derive(Debug)]
pub struct Watch {
    file: Arc<File>,
    uffd: Uffd,
    start: usize,
    length: usize,
}

impl Watch {
    /// Watches all of a shared mapping for pages that are missing or write-protected. It is to outlive this.
    pub fn new(region: &MmapRegion, file: Arc<File>) -> Result<Self> {
        let mode = RegisterMode::MISSING | RegisterMode::WRITE_PROTECT;
        Self::with_mode(region, file, mode)
    }

    /// The same for pages that are not mapped. From now on all of them are there.
    pub fn of_mapping(region: &MmapRegion, file: Arc<File>) -> Result<Self> {
        fallocate(&file, FallocateFlags::empty(), 0, region.size() as u64)
            .context("allocating a memfd's pages")?;
        Self::with_mode(region, file, RegisterMode::MINOR)
    }

    fn with_mode(region: &MmapRegion, file: Arc<File>, mode: RegisterMode) -> Result<Self> {
        let uffd = UffdBuilder::new()
            .close_on_exec(true)
            .non_blocking(true)
            .user_mode_only(false)
            .create()
            .context("making a userfaultfd")?;
        uffd.register_with_mode(region.as_ptr().cast(), region.size(), mode)
            .context("registering memory with a userfaultfd")?;
        Ok(Self {
            file,
            uffd,
            start: region.as_ptr() as usize,
            length: region.size(),
        })
    }

    fn range(&self, page: usize, pages: usize) -> (*mut libc::c_void, usize) {
        let offset = page * PAGE_BYTES;
        assert!(offset + pages * PAGE_BYTES <= self.length, "page {page}");
        (
            (self.start + offset) as *mut libc::c_void,
            pages * PAGE_BYTES,
        )
    }

    /// Takes the faults that wait into `faults`, sleeping for a moment where there are none.
    pub fn wait(&self, buffer: &mut EventBuffer, faults: &mut Vec<Fault>) -> Result<()> {
        let fd = self.uffd.as_fd();
        let mut polled = [PollFd::new(&fd, PollFlags::IN)];
        match poll(&mut polled, Some(&LOOK)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("polling a userfaultfd"),
        }
        self.take(buffer, faults)
    }

    /// Takes the faults that wait into `faults`, without sleeping.
    pub fn take(&self, buffer: &mut EventBuffer, faults: &mut Vec<Fault>) -> Result<()> {
        let events = match self.uffd.read_events(buffer) {
            Ok(events) => events,
            Err(Error::SystemError(errno)) if errno as i32 == libc::EAGAIN => return Ok(()),
            Err(error) => return Err(error).context("reading a userfaultfd"),
        };
        for event in events {
            match event? {
                Event::Pagefault { kind, rw, addr, .. } => {
                    let page = (addr as usize - self.start) / PAGE_BYTES;
                    let to_write = rw == ReadWrite::Write;
                    faults.push(match kind {
                        FaultKind::Missing if to_write => Fault::MissingToWrite(page),
                        FaultKind::Missing => Fault::Missing(page),
                        FaultKind::WriteProtected => Fault::Protected(page),
                        FaultKind::Minor => Fault::Unmapped(page),
                    });
                }
                other => bail!("an event that nobody asked for: {other:?}"),
            }
        }
        Ok(())
    }

    /// Room for messages.
    pub fn buffer() -> EventBuffer {
        EventBuffer::new(MESSAGES_PER_READ)
    }

    /// Puts pages in place, from the first of them on, and wakes who waits for them.
    pub fn copy(&self, page: usize, pages: &[Page]) -> Result<()> {
        let (start, length) = self.range(page, pages.len());
        // SAFETY: the source is of this length, and the destination within the registered range.
        let copied = unsafe { self.uffd.copy(pages.as_ptr().cast(), start, length, true) };
        copied
            .map(drop)
            .with_context(|| format!("COPY to page {page}"))
    }

    /// Puts a page in place that nobody may write yet, and wakes who waits for it.
    pub fn copy_protected(&self, page: usize, from: &Page) -> Result<()> {
        let (start, length) = self.range(page, 1);
        let mut copying = Copying {
            destination: start as u64,
            source: from.0.as_ptr() as u64,
            length: length as u64,
            mode: COPY_MODE_WP,
            copied: 0,
        };
        let request = libc::c_ulong::from(UFFDIO_COPY);
        // SAFETY: the structure is the request's, the source of this length, and the destination within the
        // registered range.
        let done = unsafe { libc::ioctl(self.uffd.as_raw_fd(), request, &raw mut copying) };
        ensure!(
            done == 0,
            "COPY to page {page}: {}",
            std::io::Error::last_os_error()
        );
        Ok(())
    }

    /// Lets a page be written, and wakes who waits for that.
    pub fn unprotect(&self, page: usize) -> Result<()> {
        let (start, length) = self.range(page, 1);
        let done = self.uffd.remove_write_protection(start, length, true);
        done.with_context(|| format!("letting page {page} be written"))
    }

    /// Makes a page zero and wakes who waits for it.
    pub fn zero(&self, page: usize) -> Result<()> {
        let (start, length) = self.range(page, 1);
        // SAFETY: the page is within the registered range.
        let zeroed = unsafe { self.uffd.zeropage(start, length, true) };
        zeroed
            .map(drop)
            .with_context(|| format!("ZEROPAGE of page {page}"))
    }

    /// Write-protects pages.
    pub fn protect(&self, page: usize, pages: usize) -> Result<()> {
        let (start, length) = self.range(page, pages);
        self.uffd
            .write_protect(start, length)
            .context("write-protecting")
    }

    /// Has who waits for pages try again.
    pub fn wake(&self, page: usize, pages: usize) -> Result<()> {
        let (start, length) = self.range(page, pages);
        self.uffd.wake(start, length).context("waking")
    }

    /// Maps a page that is there and wakes who waits for it.
    pub fn map(&self, page: usize) -> Result<()> {
        let (start, length) = self.range(page, 1);
        let mapped = self.uffd.r#continue(start, length, true);
        mapped
            .map(drop)
            .with_context(|| format!("CONTINUE of page {page}"))
    }

    /// Takes a page out of the mapping alone; whoever uses it next waits.
    pub fn unmap(&self, page: usize) -> Result<()> {
        let (start, length) = self.range(page, 1);
        // SAFETY: the range is within a shared mapping, and its bytes stay in the memfd.
        unsafe { rustix::mm::madvise(start, length, rustix::mm::Advice::LinuxDontNeed) }
            .context("unmapping a page")
    }

    /// Takes pages out of the memory; whoever uses them next waits.
    pub fn punch(&self, page: usize, pages: usize) -> Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (offset, length) = (page * PAGE_BYTES, pages * PAGE_BYTES);
        fallocate(&self.file, flags, offset as u64, length as u64).context("punching a hole")
    }

    /// Reads a page without making one where there is none.
    pub fn read(&self, page: usize, into: &mut Page) -> Result<()> {
        let offset = (page * PAGE_BYTES) as u64;
        self.file
            .read_exact_at(&mut into.0, offset)
            .context("reading a memfd")
    }
}

/// Says that a test cannot run here, past what keeps the output of tests that pass: it is counted as skipped.
#[cfg(test)]
pub fn skip_without_userfaultfd() {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "\nSKIPPED TEST: no userfaultfd here");
}
