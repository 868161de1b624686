//! What outlives the process: the small files of [`Records`], the page table, the staging area and the
//! far-memory disk's table, on a size-limited tmpfs of the guest's own, mounted at
//! `/run/outram/<uuid>/state`.
//!
//! The last three are mapped into memory. Invariants: the table's mapping lies within a file of its
//! size, the tmpfs is large enough for all files, and a staging slot is backed before it
//! is used, so that no access raises SIGBUS. Guest bytes in staging are only ever seen as slices
//! of one slot, by whoever holds that slot's ticket.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard};

use outram_wire::server::control::MIN_SLAB_BYTES;
use outram_wire::units::VmId;
use rustix::fs::{FallocateFlags, FlockOperation};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::mount::{MountFlags, UnmountFlags};

use super::record::Records;
use crate::engine::recovery::StagedBytes;
use crate::engine::staging::StagingPool;
use crate::engine::table::{ENTRY_WORDS, TABLE_VERSION, Words};
use crate::engine::{PageIndex, PageRun, PageSize, StagingSlot};
use crate::holes::data_in;

/// First bytes of a table: what it is, before its version.
const TABLE_MAGIC: &[u8; 8] = b"OUTRAMPT";

/// The table's header takes a page, so that entries are aligned to cache lines and pages.
const HEADER_BYTES: u64 = PageSize::BASE.bytes();

/// Bytes of an entry.
const ENTRY_BYTES: u64 = (ENTRY_WORDS * 8) as u64;

/// Beyond the files: inodes and directory entries of the tmpfs, and the small files.
const TMPFS_SLACK_BYTES: u64 = 1 << 20;

/// Name of the file of the disk's table.
pub(crate) const DISK_TABLE: &str = "disk-table";

/// What the list of groups takes at most of each slab, in its old and its new form together.
const GROUP_BYTES: u64 = 128;

/// A tmpfs, as statfs(2) says.
const TMPFS_MAGIC: i64 = 0x0102_1994;

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
    /// A file of a former process is not as it has to be.
    #[error("{path} cannot be taken over: {why}; the guest is left as it is: 'virsh destroy' ends it", path = .path.display())]
    Unusable {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A file of a former process cannot be parsed.
    #[error("{path} is not understood", path = .path.display())]
    NotUnderstood {
        /// Which.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: serde_json::Error,
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

/// What the files of a directory may grow to.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileSizes {
    /// Pages of the page table.
    pub(super) pages: u32,
    pub(super) page_size: PageSize,
    pub(super) staging_bytes: u64,
    pub(super) disk_table_bytes: u64,
}

/// The mounted directory; unmounted when dropped, unless it is only looked at or a guest depends on it.
#[derive(Debug)]
pub(super) struct StateDir {
    path: PathBuf,
    is_ours: bool,
}

impl StateDir {
    /// A tmpfs for files of these sizes: one that was mounted for this, or a new one. What an earlier
    /// backend of the same guest left there is removed.
    pub(super) fn create(path: &Path, sizes: FileSizes) -> Result<Self, StateError> {
        Self::mount_unless_unused(path, sizes)?;
        Ok(Self {
            path: path.to_owned(),
            is_ours: true,
        })
    }

    /// Mounts it, unless that was done and nobody has used it.
    pub(super) fn mount_unless_unused(path: &Path, sizes: FileSizes) -> Result<(), StateError> {
        match is_unused(path, tmpfs_bytes(sizes)) {
            true => Ok(()),
            false => Self::mount(path, sizes),
        }
    }

    /// Mounts it, in place of whatever is mounted there.
    fn mount(path: &Path, sizes: FileSizes) -> Result<(), StateError> {
        let bytes = tmpfs_bytes(sizes);
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
            .map_err(failed)
    }

    /// Looks at the directory of a former process; it stays mounted whatever comes of that.
    pub(super) fn open(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            is_ours: false,
        }
    }

    /// From here on a guest depends on it: it stays, for whoever takes that guest over, whatever becomes of this
    /// process.
    pub(super) fn keep(&mut self) {
        self.is_ours = false;
    }

    /// Its guest has ended: it goes when this is dropped.
    pub(super) fn adopt(&mut self) {
        self.is_ours = true;
    }

    /// Its small files.
    pub(super) fn records(&self) -> Records {
        Records::of(&self.path)
    }

    /// Maps the page table of a former process, if nobody else has it.
    pub(super) fn open_table(&self, vm: VmId) -> Result<TableFile, StateError> {
        let path = self.path.join("table");
        let read = || {
            let file = OpenOptions::new().read(true).write(true).open(&path)?;
            lock(&file)?;
            let mut header = [0; 40];
            file.read_exact_at(&mut header, 0)?;
            Ok((file.metadata()?.len(), file, header))
        };
        let failed = |source| StateError::File {
            path: path.clone(),
            source,
        };
        let (length, file, header) = read().map_err(failed)?;
        let records = self.records();
        let version = u32::from_le_bytes(part(&header, 8));
        if header[..8] != TABLE_MAGIC[..] {
            return Err(records.unusable("table", "it is no page table"));
        }
        if version != TABLE_VERSION {
            return Err(records.other_version("table", version));
        }
        let pages = u64::from_le_bytes(part(&header, 16));
        let expected = u32::try_from(pages).ok().filter(|pages| {
            u32::from_le_bytes(part(&header, 12)) == ENTRY_BYTES as u32
                && header[24..] == vm.0.as_bytes()[..]
                && length == table_bytes(*pages)
        });
        let Some(pages) = expected else {
            return Err(records.unusable("table", "its header is not that of this guest's"));
        };
        let mapping = Mapping::new(&file, length).map_err(failed)?;
        Ok(TableFile {
            file,
            mapping,
            entries: pages as usize,
        })
    }

    /// Maps the staging area of a former process.
    pub(super) fn open_staging(&self, size: PageSize) -> Result<StagingArea, StateError> {
        let path = self.path.join("staging");
        let map = || {
            let file = OpenOptions::new().read(true).write(true).open(&path)?;
            let length = file.metadata()?.len();
            let slots = u32::try_from(length / size.bytes()).map_err(io::Error::other)?;
            let mapping = Mapping::new(&file, u64::from(slots) * size.bytes())?;
            Ok(StagingArea {
                file,
                mapping,
                slots,
                size,
                backing: Mutex::default(),
            })
        };
        map().map_err(|source| StateError::File {
            path: path.clone(),
            source,
        })
    }

    /// Makes the page table's file and maps it. All pages are absent.
    pub(super) fn create_table(&self, vm: VmId, pages: u32) -> Result<TableFile, StateError> {
        let path = self.path.join("table");
        let make = || {
            let file = open(&path)?;
            lock(&file)?;
            let length = table_bytes(pages);
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

    /// Makes the file of the disk's table and maps it: zeros.
    pub(super) fn create_disk_table(&self, bytes: u64) -> Result<DiskWords, StateError> {
        let path = self.path.join(DISK_TABLE);
        let make = || {
            let file = open(&path)?;
            file.set_len(bytes)?;
            DiskWords::map(&file)
        };
        make().map_err(|source| StateError::File {
            path: path.clone(),
            source,
        })
    }

    /// Maps the disk's table of a former process.
    pub(super) fn open_disk_table(&self) -> Result<DiskWords, StateError> {
        let path = self.path.join(DISK_TABLE);
        let file = OpenOptions::new().read(true).write(true).open(&path);
        file.and_then(|file| DiskWords::map(&file))
            .map_err(|source| StateError::File { path, source })
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
                backing: Mutex::default(),
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
        // What a panic leaves is for the next process, as what a kill leaves.
        if !self.is_ours || std::thread::panicking() {
            return;
        }
        if let Err(error) = self.records().wipe_keys() {
            tracing::warn!(path = %self.path.display(), %error, "the guest's keys were not overwritten");
        }
        let records = self.records();
        if let Err(error) = records.remove_record()
            && records.path("record").exists()
        {
            tracing::warn!(%error, "the guest's record stays");
        }
        match rustix::mount::unmount(&self.path, UnmountFlags::DETACH) {
            Ok(()) => {}
            // A pager has no right to: its supervisor does so next.
            Err(Errno::PERM) => {}
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "the state directory stays mounted")
            }
        }
    }
}

/// What all files take together, in whole pages.
fn tmpfs_bytes(sizes: FileSizes) -> u64 {
    let pages_a_slab = sizes.page_size.pages_in(MIN_SLAB_BYTES, 1);
    let groups = u64::from(sizes.pages).div_ceil(pages_a_slab) * GROUP_BYTES;
    let mapped = table_bytes(sizes.pages) + sizes.staging_bytes + sizes.disk_table_bytes;
    let bytes = mapped + groups + TMPFS_SLACK_BYTES;
    bytes.next_multiple_of(PageSize::BASE.bytes())
}

/// Whether a tmpfs of this size is mounted there, and nothing lies in it.
fn is_unused(path: &Path, bytes: u64) -> bool {
    let device = |path: &Path| std::fs::metadata(path).map(|found| found.dev());
    let is_mounted = || Some(device(path).ok()? != device(path.parent()?).ok()?);
    let is_empty = || std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
    let has_size = || {
        rustix::fs::statfs(path).is_ok_and(|found| {
            found.f_type == TMPFS_MAGIC && found.f_blocks * found.f_bsize as u64 == bytes
        })
    };
    is_mounted() == Some(true) && has_size() && is_empty()
}

/// Bytes of a table's file.
fn table_bytes(pages: u32) -> u64 {
    HEADER_BYTES + u64::from(pages) * ENTRY_BYTES
}

/// The pages whose entries were ever written in a table, and some of their neighbours: looking at
/// others would fill the table with pages of its own.
pub(super) fn written_pages(table: &File) -> io::Result<Vec<PageRun>> {
    let end = table.metadata()?.len();
    let page = |offset: u64| ((offset - HEADER_BYTES) / ENTRY_BYTES) as u32;
    let runs = data_in(table, HEADER_BYTES..end)?.into_iter();
    let runs = runs.map(|data| PageRun {
        first: PageIndex(page(data.start)),
        count: page(data.end) - page(data.start),
    });
    Ok(runs.collect())
}

/// Some bytes of a header.
fn part<const N: usize>(header: &[u8], start: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&header[start..start + N]);
    part
}

/// Keeps other processes from using the same table, for as long as this one has it open.
fn lock(file: &File) -> io::Result<()> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => {
            let text = "another backend of this guest is at work";
            Err(io::Error::new(io::ErrorKind::WouldBlock, text))
        }
        locked => Ok(locked?),
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

/// The mapped table of the disk.
pub(super) struct DiskWords(Mapping);

impl DiskWords {
    fn map(file: &File) -> io::Result<Self> {
        Mapping::new(file, file.metadata()?.len()).map(Self)
    }
}

impl Words for DiskWords {
    fn words(&self) -> &[AtomicU64] {
        let words = self.0.length / size_of::<AtomicU64>();
        // SAFETY: page-aligned memory of the mapping's length, which the file has, that lives as long as
        // `self`; atomics may be shared, and any bits make one.
        unsafe { std::slice::from_raw_parts(self.0.start.cast().as_ptr(), words) }
    }
}

/// The mapped staging area.
#[derive(Debug)]
pub(super) struct StagingArea {
    file: File,
    mapping: Mapping,
    slots: u32,
    size: PageSize,
    backing: Mutex<()>,
}

/// Leave to give slots memory and to take it from them, which one at a time has: whoever has found slots
/// to be unused gives their memory back before another has them used, and whoever has given them memory
/// has them used before another finds them to be unused.
#[derive(Debug)]
pub(super) struct Backing<'a> {
    area: &'a StagingArea,
    _held: MutexGuard<'a, ()>,
}

impl Backing<'_> {
    /// Backs slots with memory, so that using them cannot fail.
    pub(super) fn back(&self, first: u32, count: u32) -> io::Result<()> {
        if count == 0 {
            return Ok(());
        }
        let (offset, length) = self.area.range(first, count);
        let flags = FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(
            &self.area.file,
            flags,
            offset,
            length,
        )?)
    }

    /// Gives back the memory of slots that were retired since the last time; whether there were any.
    pub(super) fn give_back_retired(&self, pool: &StagingPool) -> bool {
        let mut retired = pool.drain_retired();
        retired.sort_unstable();
        for run in retired.chunk_by(|slot, next| slot.0 + 1 == next.0) {
            if let Err(error) = self.give_back(run[0], run.len() as u32) {
                tracing::warn!(%error, "memory of staging slots is not given back");
            }
        }
        !retired.is_empty()
    }

    /// Gives the memory of unused slots back.
    pub(super) fn give_back(&self, first: StagingSlot, count: u32) -> io::Result<()> {
        let (offset, length) = self.area.range(first.0, count);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(
            &self.area.file,
            flags,
            offset,
            length,
        )?)
    }
}

impl StagingArea {
    /// Waits for leave to give slots memory or to take it from them.
    pub(super) fn backing(&self) -> Backing<'_> {
        Backing {
            area: self,
            _held: super::lock(&self.backing),
        }
    }

    /// Slots there is room for, backed or not.
    pub(super) fn slots(&self) -> u32 {
        self.slots
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

    /// Has a slot's bytes changed in place; the caller holds it exclusively.
    pub(super) fn change(&self, slot: StagingSlot, change: impl FnOnce(&mut [u8])) {
        // SAFETY: `place` is the start of a whole page of the mapping, which nobody else looks at.
        change(unsafe {
            std::slice::from_raw_parts_mut(self.place(slot).as_ptr(), self.size.length())
        });
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

impl StagedBytes for StagingArea {
    fn staged(&self, slot: StagingSlot) -> Option<&[u8]> {
        (slot.0 < self.slots).then(|| self.page(slot))
    }
}
