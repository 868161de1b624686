//! Guest RAM: memfds, mapped shared, named as QEMU names them. Fence around memfd and madvise.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, RwLock};

use anyhow::{Context, Result, ensure};
use outram_wire::units::{PAGE_SIZE, PageSize};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory, VolatileSlice};
use vmm_sys_util::fallocate::{FallocateMode, fallocate};
use vmm_sys_util::seek_hole::SeekHole;

const PAGE: u64 = PAGE_SIZE as u64;
/// In an entry of a page map.
const PRESENT: u64 = 1 << 63;

/// One block of RAM.
pub(super) struct Block {
    pub guest_address: u64,
    pub size: u64,
    pub file: Arc<File>,
    /// Size of its pages in the kernel; those that are numbered are base pages always.
    pub page: PageSize,
    region: MmapRegion,
}

impl Block {
    pub(super) fn vmm_address(&self) -> u64 {
        self.region.as_ptr() as u64
    }

    /// Base pages that are discarded together, at least.
    pub(super) fn discard_pages(&self) -> u64 {
        self.page.bytes() / PAGE
    }

    /// Whether the kernel has the page of this index: as the memfd says, or for huge pages, of
    /// which it does not, our own page table.
    pub(super) fn has_page(&self, index: u64) -> Result<bool> {
        if !self.page.is_huge() {
            let data = self.file.try_clone()?.seek_data(index * PAGE)?;
            return Ok(data == Some(index * PAGE));
        }
        let mut entry = [0; 8];
        let at = (self.vmm_address() / PAGE + index) * 8;
        File::open("/proc/self/pagemap")?.read_exact_at(&mut entry, at)?;
        Ok(u64::from_ne_bytes(entry) & PRESENT != 0)
    }
}

/// The guest's RAM: blocks that follow each other from guest address 0. Blocks can be added.
#[derive(Default)]
pub(super) struct Ram {
    blocks: RwLock<Vec<Arc<Block>>>,
    /// Held by who uses RAM as one slice.
    alone: Mutex<()>,
}

impl Ram {
    /// Adds a block behind the others; mapped privately if `private`, which no other process sees.
    pub(super) fn plug(&self, size: u64, private: bool) -> Result<Arc<Block>> {
        self.plug_pages(size, PageSize::BASE, private)
    }

    /// Adds a block with pages of a size behind the others.
    pub(super) fn plug_pages(
        &self,
        size: u64,
        page: PageSize,
        private: bool,
    ) -> Result<Arc<Block>> {
        let mut blocks = self.blocks.write().expect("no holder panics");
        let guest_address = blocks
            .last()
            .map_or(0, |last| last.guest_address + last.size);
        let file = Arc::new(memfd(size, page).context("making a memfd")?);
        let offset = FileOffset::from_arc(Arc::clone(&file), 0);
        let sharing = if private {
            libc::MAP_PRIVATE
        } else {
            libc::MAP_SHARED
        };
        let region = MmapRegion::build(
            Some(offset),
            usize::try_from(size)?,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_NORESERVE | sharing,
        )?;
        let block = Arc::new(Block {
            guest_address,
            size,
            file,
            page,
            region,
        });
        blocks.push(Arc::clone(&block));
        Ok(block)
    }

    /// Takes the last block out. It is unmapped once nobody uses it.
    pub(super) fn unplug(&self) -> Result<Arc<Block>> {
        let mut blocks = self.blocks.write().expect("no holder panics");
        ensure!(blocks.len() > 1, "the first block stays");
        blocks.pop().context("there is no block")
    }

    pub(super) fn blocks(&self) -> Vec<Arc<Block>> {
        self.blocks.read().expect("no holder panics").clone()
    }

    /// Pages in all blocks together.
    pub(super) fn pages(&self) -> u64 {
        self.blocks().iter().map(|block| block.size / PAGE).sum()
    }

    /// The block that holds a range, and where in it.
    pub(super) fn find(&self, address: u64, length: u64) -> Result<(Arc<Block>, u64)> {
        let found = self.blocks().into_iter().find_map(|block| {
            let offset = address.checked_sub(block.guest_address)?;
            let end = offset.checked_add(length)?;
            (end <= block.size).then_some((block, offset))
        });
        found.with_context(|| format!("no RAM at {address:#x} with {length} bytes"))
    }

    /// Address in this process of a range of guest addresses.
    pub(super) fn vmm_address(&self, address: u64, length: u64) -> Result<u64> {
        let (block, offset) = self.find(address, length)?;
        Ok(block.vmm_address() + offset)
    }

    /// Stores bytes, as a driver would.
    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        let (block, offset) = self.find(address, bytes.len() as u64)?;
        let slice = block.region.get_slice(offset as usize, bytes.len())?;
        slice.copy_from(bytes);
        Ok(())
    }

    /// Loads bytes.
    pub(super) fn read(&self, address: u64, length: u64) -> Result<Vec<u8>> {
        ensure!(length <= 16 << 20, "more than 16 MiB are asked for at once");
        let (block, offset) = self.find(address, length)?;
        let mut bytes = vec![0; length as usize];
        let slice = block.region.get_slice(offset as usize, bytes.len())?;
        slice.copy_to(&mut bytes);
        Ok(bytes)
    }

    /// Has a function use the first block as words. No other vCPU may use that block meanwhile; that
    /// a pager takes pages out and puts them back as they were is nothing that it could see.
    pub(super) fn with_words<T>(&self, use_them: impl FnOnce(&mut [u64]) -> T) -> Result<T> {
        let (block, _) = self.find(0, PAGE)?;
        let _alone = self
            .alone
            .try_lock()
            .ok()
            .context("another vCPU uses all of RAM")?;
        let words = usize::try_from(block.size / 8)?;
        // SAFETY: the block's mapping is page-aligned, readable, writable and of this length, and
        // `block` keeps it; whoever else would use it as a slice is kept out by the lock, and other
        // commands by whoever commands this machine; any bits are a u64.
        let memory = unsafe { std::slice::from_raw_parts_mut(block.region.as_ptr().cast(), words) };
        Ok(use_them(memory))
    }

    /// Stores 16 bits at once, after everything stored before.
    pub(super) fn store_u16(&self, address: u64, value: u16) -> Result<()> {
        let (block, offset) = self.find(address, 2)?;
        let slice = block.region.get_slice(offset as usize, 2)?;
        Ok(slice.store(value, 0, Ordering::SeqCst)?)
    }

    /// Loads 16 bits at once, before everything loaded later.
    pub(super) fn load_u16(&self, address: u64) -> Result<u16> {
        let (block, offset) = self.find(address, 2)?;
        let slice = block.region.get_slice(offset as usize, 2)?;
        Ok(slice.load(0, Ordering::SeqCst)?)
    }

    /// Gives pages back as QEMU's balloon does it: punched out of the file first, then dropped
    /// from the mapping, unless they are huge.
    pub(super) fn discard(&self, first_page: u64, pages: u64) -> Result<()> {
        let (block, offset) = self.find(first_page * PAGE, pages * PAGE)?;
        let length = pages * PAGE;
        fallocate(
            &block.file.as_raw_fd(),
            FallocateMode::PunchHole,
            true,
            offset,
            length,
        )
        .context("punching a hole")?;
        match block.page.is_huge() {
            true => Ok(()),
            false => self.drop_mapping(first_page, pages),
        }
    }

    /// Takes pages out of the address space; nothing else comes to lie there.
    pub(super) fn unmap(&self, first_page: u64, pages: u64) -> Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        self.map_over(first_page, pages, libc::PROT_NONE, flags, |_, _| (-1, 0))
    }

    /// Maps pages of the file anew where they are mapped: how QEMU replaces pages with memory errors
    /// when the guest is reset.
    pub(super) fn remap(&self, first_page: u64, pages: u64) -> Result<()> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        self.map_over(first_page, pages, protection, flags, |block, offset| {
            (block.file.as_raw_fd(), offset as libc::off_t)
        })
    }

    /// Puts another mapping in place of pages; `backing` is its descriptor and offset.
    fn map_over(
        &self,
        first_page: u64,
        pages: u64,
        protection: libc::c_int,
        flags: libc::c_int,
        backing: impl FnOnce(&Block, u64) -> (libc::c_int, libc::off_t),
    ) -> Result<()> {
        let (block, offset) = self.find(first_page * PAGE, pages * PAGE)?;
        let start = block.region.as_ptr().wrapping_add(offset as usize);
        let length = (pages * PAGE) as usize;
        let (fd, at) = backing(&block, offset);
        let flags = flags | libc::MAP_FIXED;
        // SAFETY: the range lies within the block's own mapping of guest memory, which no Rust
        // reference points to; find() checked its borders. The block unmaps it with the rest.
        let mapped = unsafe { libc::mmap(start.cast(), length, protection, flags, fd, at) };
        ensure!(
            mapped != libc::MAP_FAILED,
            "mmap: {}",
            io::Error::last_os_error()
        );
        Ok(())
    }

    /// Drops pages from the mapping; what the file holds of them stays.
    pub(super) fn drop_mapping(&self, first_page: u64, pages: u64) -> Result<()> {
        let (block, offset) = self.find(first_page * PAGE, pages * PAGE)?;
        let length = pages * PAGE;
        let start = block.region.as_ptr().wrapping_add(offset as usize);
        // SAFETY: the range lies within the block's own mapping of guest memory, which no Rust
        // reference points to; find() checked its borders.
        let result = unsafe { libc::madvise(start.cast(), length as usize, libc::MADV_DONTNEED) };
        ensure!(result == 0, "madvise: {}", io::Error::last_os_error());
        Ok(())
    }
}

impl Block {
    /// Unmaps it though others may be using it: whoever accesses it then is refused (`EFAULT`, or
    /// SIGSEGV). Its addresses stay taken until it is dropped.
    pub(super) fn yank(&self) -> Result<()> {
        let length = usize::try_from(self.size)?;
        // SAFETY: the range is the block's own mapping, which no Rust reference points to; what is
        // put in its place is unmapped with it when it is dropped.
        let put = unsafe {
            libc::mmap(
                self.region.as_ptr().cast(),
                length,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        ensure!(
            put != libc::MAP_FAILED,
            "mmap: {}",
            io::Error::last_os_error()
        );
        Ok(())
    }

    /// One page of it.
    pub(super) fn page(&self, index: u64) -> Result<VolatileSlice<'_>> {
        let offset = usize::try_from(index * PAGE)?;
        Ok(self.region.get_slice(offset, PAGE_SIZE)?)
    }
}

/// A memfd of this size, with pages of that.
fn memfd(size: u64, page: PageSize) -> io::Result<File> {
    let flags = match page.is_huge() {
        true => libc::MFD_CLOEXEC | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB,
        false => libc::MFD_CLOEXEC,
    };
    // SAFETY: the name is a valid C string.
    let number = unsafe { libc::memfd_create(c"memory-backend-memfd".as_ptr(), flags) };
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel returned this descriptor to us a moment ago; nobody else owns it.
    let file = unsafe { File::from_raw_fd(number) };
    file.set_len(size)?;
    Ok(file)
}
