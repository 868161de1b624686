//! What outlives the process: the page table and the staging area, on a size-limited tmpfs of the
//! guest's own, mounted at `/run/outram/<uuid>/state`.
//!
//! Both are files mapped into memory. Invariants: the table's mapping lies within a file of its
//! size, the tmpfs is large enough for all of both files, and a staging slot is backed before it
//! is used, so that no access raises SIGBUS. Guest bytes in staging are only ever seen as slices
//! of one slot, by whoever holds that slot's ticket.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use outram_wire::units::VmId;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::mount::{MountFlags, UnmountFlags};

use crate::engine::table::{ENTRY_WORDS, TABLE_VERSION, Words};
use crate::engine::{PageSize, StagingSlot};

/// First bytes of a table: what it is, before its version.
const TABLE_MAGIC: &[u8; 8] = b"OUTRAMPT";

/// The table's header takes a page, so that entries are aligned to cache lines and pages.
const HEADER_BYTES: u64 = PageSize::BASE.bytes();

/// Bytes of an entry.
const ENTRY_BYTES: u64 = (ENTRY_WORDS * 8) as u64;

/// Beyond the files: inodes and directory entries of the tmpfs.
const TMPFS_SLACK_BYTES: u64 = 1 << 20;

/// Why the state directory could not be made.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The tmpfs could not be mounted.
    #[error("cannot mount a tmpfs of {bytes} bytes at {path}: the backend has to run as root, outside a container that forbids mounts", path = .path.display())]
    Mount {
        /// Where.
        path: PathBuf,
        /// How large.
        bytes: u64,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A file could not be made or mapped.
    #[error("cannot prepare {path}", path = .path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
}

/// The mounted directory; unmounted when dropped.
#[derive(Debug)]
pub(super) struct StateDir {
    path: PathBuf,
}

impl StateDir {
    /// Mounts a tmpfs for a table of `pages` pages and `staging_bytes` of staging area. What an
    /// earlier backend of the same guest left there is removed.
    pub(super) fn create(path: &Path, pages: u32, staging_bytes: u64) -> Result<Self, StateError> {
        let table = HEADER_BYTES + u64::from(pages) * ENTRY_BYTES;
        let bytes = table + staging_bytes + TMPFS_SLACK_BYTES;
        let failed = |source: io::Error| StateError::Mount {
            path: path.to_owned(),
            bytes,
            source,
        };
        match std::fs::DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(error));
            }
            _ => {}
        }
        while rustix::mount::unmount(path, UnmountFlags::DETACH).is_ok() {}
        let mount = |options: String| {
            let options = std::ffi::CString::new(options).map_err(io::Error::other)?;
            let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
            Ok(rustix::mount::mount(
                "outram",
                path,
                "tmpfs",
                flags,
                Some(options.as_c_str()),
            )?)
        };
        // Swapping staged pages out would answer memory pressure with more I/O; kernels before
        // 6.4 do not know the option.
        mount(format!("size={bytes},mode=0700,noswap"))
            .or_else(|_: io::Error| mount(format!("size={bytes},mode=0700")))
            .map_err(failed)?;
        Ok(Self {
            path: path.to_owned(),
        })
    }

    /// Makes the page table's file and maps it. All pages are absent.
    pub(super) fn create_table(&self, vm: VmId, pages: u32) -> Result<TableFile, StateError> {
        let path = self.path.join("table");
        let make = || {
            let file = open(&path)?;
            let length = HEADER_BYTES + u64::from(pages) * ENTRY_BYTES;
            file.set_len(length)?;
            let mut header = Vec::with_capacity(64);
            header.extend_from_slice(TABLE_MAGIC);
            header.extend_from_slice(&TABLE_VERSION.to_le_bytes());
            header.extend_from_slice(&(ENTRY_BYTES as u32).to_le_bytes());
            header.extend_from_slice(&u64::from(pages).to_le_bytes());
            header.extend_from_slice(vm.0.as_bytes());
            file.write_all_at(&header, 0)?;
            let mapping = Mapping::new(&file, length)?;
            Ok(TableFile {
                file,
                mapping,
                entries: pages as usize,
            })
        };
        make().map_err(|source| StateError::File {
            path: path.clone(),
            source,
        })
    }

    /// Makes the staging area's file and maps it: room for `slots` pages, none of them backed yet.
    pub(super) fn create_staging(
        &self,
        slots: u32,
        size: PageSize,
    ) -> Result<StagingArea, StateError> {
        let path = self.path.join("staging");
        let make = || {
            let file = open(&path)?;
            let length = u64::from(slots) * size.bytes();
            file.set_len(length)?;
            let mapping = Mapping::new(&file, length)?;
            Ok(StagingArea {
                file,
                mapping,
                slots,
                size,
            })
        };
        make().map_err(|source| StateError::File {
            path: path.clone(),
            source,
        })
    }
}

impl Drop for StateDir {
    fn drop(&mut self) {
        if let Err(error) = rustix::mount::unmount(&self.path, UnmountFlags::DETACH) {
            tracing::warn!(path = %self.path.display(), %error, "the state directory stays mounted");
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
}

/// A file mapped shared, readable and writable, for as long as it lives.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is plain memory that lives as long as the struct; who may touch which part
// is ruled by the types that own one (atomics in the table, tickets in staging).
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &File, length: u64) -> io::Result<Self> {
        let length = usize::try_from(length).map_err(io::Error::other)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice; nothing else is touched.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { start, length })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the one that was mapped, and no borrow outlives its owner.
        if let Err(error) = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) } {
            tracing::warn!(%error, "a mapping stays");
        }
    }
}

/// The mapped page table.
#[derive(Debug)]
pub(super) struct TableFile {
    file: File,
    mapping: Mapping,
    entries: usize,
}

impl TableFile {
    /// A handle on the file, for the kernel's count of its bytes.
    pub(super) fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }
}

impl Words for TableFile {
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is as long as the header and all entries together (`create_table`).
        let start = unsafe { self.mapping.start.add(HEADER_BYTES as usize) };
        // SAFETY: page-aligned memory that lives as long as `self`; atomics may be shared, and any
        // bits make one.
        unsafe { std::slice::from_raw_parts(start.cast().as_ptr(), self.entries * ENTRY_WORDS) }
    }
}

/// The mapped staging area.
#[derive(Debug)]
pub(super) struct StagingArea {
    file: File,
    mapping: Mapping,
    slots: u32,
    size: PageSize,
}

impl StagingArea {
    /// Backs slots with memory, so that using them cannot fail.
    pub(super) fn back(&self, first: u32, count: u32) -> io::Result<()> {
        if count == 0 {
            return Ok(());
        }
        let (offset, length) = self.range(first, count);
        Ok(rustix::fs::fallocate(
            &self.file,
            FallocateFlags::KEEP_SIZE,
            offset,
            length,
        )?)
    }

    /// Gives the memory of unused slots back.
    pub(super) fn give_back(&self, slot: StagingSlot) -> io::Result<()> {
        let (offset, length) = self.range(slot.0, 1);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, flags, offset, length)?)
    }

    fn range(&self, first: u32, count: u32) -> (u64, u64) {
        (
            u64::from(first) * self.size.bytes(),
            u64::from(count) * self.size.bytes(),
        )
    }

    /// Bytes that the area takes, by the kernel's own count.
    pub(super) fn kernel_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.blocks() * 512)
    }

    fn place(&self, slot: StagingSlot) -> NonNull<u8> {
        assert!(
            slot.0 < self.slots,
            "staging slot {} of {}",
            slot.0,
            self.slots
        );
        // SAFETY: within the mapping, which is `slots` pages long.
        unsafe { self.mapping.start.add(slot.0 as usize * self.size.length()) }
    }

    /// The bytes of a slot, which the caller holds (so that nobody writes to it meanwhile).
    pub(super) fn page(&self, slot: StagingSlot) -> &[u8] {
        // SAFETY: `place` is the start of a whole page of the mapping; only its holder writes to it.
        unsafe { std::slice::from_raw_parts(self.place(slot).as_ptr(), self.size.length()) }
    }

    /// Writes a page's bytes into a slot, which the caller holds exclusively.
    pub(super) fn write(&self, slot: StagingSlot, bytes: &[u8]) {
        let length = self.size.length();
        assert_eq!(bytes.len(), length, "a slot holds a page");
        // SAFETY: both are whole pages; the slot is the caller's alone, and `bytes` lies elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.place(slot).as_ptr(), length) };
    }

    /// Reads neighbouring pages of `file` into slots, in order. The caller holds them, and nobody
    /// looks at them before this returns.
    pub(super) fn read_from(
        &self,
        file: &File,
        offset: u64,
        slots: impl Iterator<Item = StagingSlot>,
    ) -> io::Result<()> {
        let page = self.size.length();
        let vectors = slots.map(|slot| libc::iovec {
            iov_base: self.place(slot).as_ptr().cast(),
            iov_len: page,
        });
        let vectors: Vec<_> = vectors.collect();
        let expected = vectors.len() * page;
        let mut done = 0;
        while done < expected {
            let rest = &vectors[done / page..];
            use std::os::fd::AsRawFd;
            // SAFETY: each vector is a page of the mapping that the caller holds exclusively.
            let read = unsafe {
                libc::preadv(
                    file.as_raw_fd(),
                    rest.as_ptr(),
                    rest.len() as libc::c_int,
                    (offset as usize + done) as libc::off_t,
                )
            };
            match read {
                // Whole pages or nothing: the memfd ends where guest RAM ends.
                read if read >= page as isize => done += read as usize / page * page,
                read if read >= 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }
}
