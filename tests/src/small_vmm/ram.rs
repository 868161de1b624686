//! Guest RAM: memfds, mapped shared, named as QEMU names them. Fence around memfd and madvise.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, RwLock};

use anyhow::{Context, Result, ensure};
use outram_wire::units::PAGE_SIZE;
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory, VolatileSlice};
use vmm_sys_util::fallocate::{FallocateMode, fallocate};

const PAGE: u64 = PAGE_SIZE as u64;

/// One block of RAM.
pub(super) struct Block {
    pub guest_address: u64,
    pub size: u64,
    pub file: Arc<File>,
    region: MmapRegion,
}

impl Block {
    pub(super) fn vmm_address(&self) -> u64 {
        self.region.as_ptr() as u64
    }
}

/// The guest's RAM: blocks that follow each other from guest address 0. Blocks can be added.
#[derive(Default)]
pub(super) struct Ram {
    blocks: RwLock<Vec<Arc<Block>>>,
}

impl Ram {
    /// Adds a block behind the others.
    pub(super) fn plug(&self, size: u64) -> Result<Arc<Block>> {
        let mut blocks = self.blocks.write().expect("no holder panics");
        let guest_address = blocks
            .last()
            .map_or(0, |last| last.guest_address + last.size);
        let file = Arc::new(memfd(size).context("making a memfd")?);
        let offset = FileOffset::from_arc(Arc::clone(&file), 0);
        let region = MmapRegion::from_file(offset, usize::try_from(size)?)?;
        let block = Arc::new(Block {
            guest_address,
            size,
            file,
            region,
        });
        blocks.push(Arc::clone(&block));
        Ok(block)
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
    /// from the mapping.
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
        self.drop_mapping(first_page, pages)
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
    /// One page of it.
    pub(super) fn page(&self, index: u64) -> Result<VolatileSlice<'_>> {
        let offset = usize::try_from(index * PAGE)?;
        Ok(self.region.get_slice(offset, PAGE_SIZE)?)
    }
}

/// A memfd of this size.
fn memfd(size: u64) -> io::Result<File> {
    // SAFETY: the name is a valid C string.
    let number = unsafe { libc::memfd_create(c"memory-backend-memfd".as_ptr(), libc::MFD_CLOEXEC) };
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel returned this descriptor to us a moment ago; nobody else owns it.
    let file = unsafe { File::from_raw_fd(number) };
    file.set_len(size)?;
    Ok(file)
}
