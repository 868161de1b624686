//! Guest RAM as files and addresses: which page lies where, and the file operations on it.
//!
//! Blocks come and go while the guest runs. Each is cut into one region a shard (at multiples of
//! 2 MiB, as hugetlbfs wants it), so that every shard has its part of every block, and each region
//! gets a place in its shard's range of the page table for as long as it is there. Where no place of
//! that range is large enough, as blocks came and went, a shard's part is several regions. What looks
//! a page up that has left meanwhile is told so.
//!
//! Guest memory is read with `preadv` on the memfd, never through a mapping: a read of a hole
//! through a mapping would make a page of zeros there. The lock guards the list alone, never an
//! operation on a file.
//!
//! Which pages are there says the memfd itself, or for huge pages, of whose holes hugetlbfs does
//! not tell, the VMM's page table. That one may lack a page that the file has (dropped from the
//! mapping): who takes such a page for a hole and puts one there is told that it exists.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use rustix::fs::{FallocateFlags, SeekFrom};

use super::record::{BlockRecord, RegionRecord};
use crate::engine::{PageIndex, PageRun, PageSize};
use crate::handover::MemfdId;
use crate::handover::Vmm;
use crate::handover::discover::RamBlock;
use crate::holes::data_in;

/// Regions start at multiples of this many bytes in the page table, as shards do, with at least one
/// page that is nobody's behind them: so that no run of pages crosses from one region into the
/// next, which lies elsewhere in the VMM's address space.
const ALIGN_BYTES: u64 = 2 << 20;

/// [`ALIGN_BYTES`] in pages.
fn align_pages(size: PageSize) -> u32 {
    size.pages_in(ALIGN_BYTES, 1) as u32
}

/// A page of the VMM's is there (Documentation/admin-guide/mm/pagemap.rst).
const PAGEMAP_PRESENT: u64 = 1 << 63;

/// Entries of a page map read at once.
const PAGEMAP_ENTRIES: usize = 8192;

/// A block of guest RAM.
#[derive(Debug)]
pub(super) struct Block {
    /// The memfd. Closed when the last region of the block has left.
    memfd: File,
    /// Its identity.
    pub(super) id: MemfdId,
    /// Where the block starts in the memfd.
    file_offset: u64,
    /// Where the VMM has mapped it.
    pub(super) hva: u64,
    /// Its pages.
    pub(super) pages: u32,
    /// Their size.
    size: PageSize,
}

impl Block {
    /// Bytes of it.
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.pages) * self.size.bytes()
    }
}

/// One shard's part of a block, or some of it, with its place in the page table.
#[derive(Debug)]
pub(super) struct Region {
    /// The block.
    pub(super) block: Arc<Block>,
    /// Its place in the page table.
    pub(super) pages: PageRun,
    /// Pages of the block before it.
    skipped: u32,
}

impl Region {
    fn page_bytes(&self) -> u64 {
        self.block.size.bytes()
    }

    /// First address in the VMM.
    fn hva(&self) -> u64 {
        self.block.hva + u64::from(self.skipped) * self.page_bytes()
    }

    /// Bytes from here on in the VMM and in the memfd.
    fn bytes(&self) -> u64 {
        u64::from(self.pages.count) * self.page_bytes()
    }

    fn file_offset(&self) -> u64 {
        self.block.file_offset + u64::from(self.skipped) * self.page_bytes()
    }

    /// The pages at `bytes` bytes from `offset` bytes into the region, as far as it reaches.
    fn run(&self, offset: u64, bytes: u64) -> PageRun {
        let page = self.page_bytes();
        let first = (offset / page) as u32;
        let end = (offset + bytes).min(self.bytes()).div_ceil(page) as u32;
        PageRun {
            first: PageIndex(self.pages.first.0 + first),
            count: end - first,
        }
    }
}

/// The page table has no room for another block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the guest would have more RAM than its domain's <maxMemory>, which the page table is made for"
)]
pub(super) struct NoRoom;

/// All blocks of a guest's RAM.
#[derive(Debug)]
pub(super) struct GuestRam {
    /// Size of all pages.
    size: PageSize,
    /// The VMM's page table, where it has to be asked.
    pagemap: Option<File>,
    /// Each shard's range of the page table.
    ranges: Vec<PageRun>,
    /// In the order of the page table.
    regions: RwLock<Vec<Arc<Region>>>,
}

/// Pages of the table for `bytes` of RAM in at most `blocks` blocks, over `shards` shards.
pub(super) fn table_pages(bytes: u64, blocks: u32, shards: u32, size: PageSize) -> u64 {
    let align = align_pages(size);
    // A region is rounded up by less than one unit, and has one more page behind it.
    let pages = bytes / size.bytes() + 2 * u64::from(blocks * shards * align);
    let each = pages.div_ceil(shards.into());
    each.next_multiple_of(align.into()) * u64::from(shards)
}

impl GuestRam {
    /// No RAM yet; a table of `pages` pages, as [`table_pages`] counts them, for `shards` shards.
    pub(super) fn new(pages: u32, shards: u32, size: PageSize) -> Self {
        let align = align_pages(size);
        let each = pages / shards / align * align;
        let range = |shard| PageRun {
            first: PageIndex(shard * each),
            count: each,
        };
        Self {
            size,
            pagemap: None,
            ranges: (0..shards).map(range).collect(),
            regions: RwLock::default(),
        }
    }

    /// The same, of this VMM, whose page table is asked where the memfd does not tell.
    pub(super) fn of(pages: u32, shards: u32, size: PageSize, vmm: &Vmm) -> io::Result<Self> {
        let pagemap = match size.is_huge() {
            true => Some(vmm.page_map()?),
            false => None,
        };
        Ok(Self {
            pagemap,
            ..Self::new(pages, shards, size)
        })
    }

    /// Size of all pages.
    pub(super) fn page_size(&self) -> PageSize {
        self.size
    }

    /// Each shard's range of the page table.
    pub(super) fn ranges(&self) -> &[PageRun] {
        &self.ranges
    }

    /// The shard whose pages these are.
    ///
    /// # Panics
    /// Where they are no shard's.
    pub(super) fn shard_of(&self, run: PageRun) -> usize {
        let shard = self
            .ranges
            .iter()
            .position(|range| range.contains(run.first));
        shard.unwrap_or_else(|| panic!("pages of no shard"))
    }

    fn lock(&self) -> RwLockReadGuard<'_, Vec<Arc<Region>>> {
        // Each change of the list is one assignment.
        self.regions.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a block its places in the page table. Returns its regions.
    pub(super) fn add(&self, block: RamBlock) -> Result<Vec<Arc<Region>>, NoRoom> {
        let block = Arc::new(Block {
            memfd: block.memfd,
            id: block.id,
            file_offset: block.file_offset,
            hva: block.hva,
            pages: u32::try_from(block.length / self.size.bytes()).map_err(|_| NoRoom)?,
            size: self.size,
        });
        let align = align_pages(self.size);
        let units = block.pages.div_ceil(align);
        let each = units.div_ceil(self.ranges.len() as u32) * align;
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        let mut added = Vec::new();
        let mut skipped = 0;
        for range in &self.ranges {
            let count = each.min(block.pages - skipped);
            for pages in free_places(&regions, *range, count, align).ok_or(NoRoom)? {
                added.push(Arc::new(Region {
                    block: Arc::clone(&block),
                    pages,
                    skipped,
                }));
                skipped += pages.count;
            }
        }
        let mut all = regions.clone();
        all.extend(added.iter().cloned());
        all.sort_by_key(|region| region.pages.first);
        *regions = all;
        Ok(added)
    }

    /// Gives a block the places that it had in a former process, which are a region after the other.
    /// False where they are not all of it, or not places of this table.
    pub(super) fn restore(&self, block: RamBlock, places: &[PageRun]) -> bool {
        let pages: u64 = places.iter().map(|place| u64::from(place.count)).sum();
        if pages * self.size.bytes() != block.length || places.iter().any(|run| run.count == 0) {
            return false;
        }
        let block = Arc::new(Block {
            memfd: block.memfd,
            id: block.id,
            file_offset: block.file_offset,
            hva: block.hva,
            pages: pages as u32,
            size: self.size,
        });
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        let mut all = regions.clone();
        let mut skipped = 0;
        for &pages in places {
            // As they are made: within one shard, and one page away from others.
            let last = u64::from(pages.first.0) + u64::from(pages.count);
            let fits = self
                .ranges
                .iter()
                .any(|range| range.contains(pages.first) && last < u64::from(range.end().0));
            let is_free = all.iter().all(|region| {
                last < u64::from(region.pages.first.0) || region.pages.end() < pages.first
            });
            if !fits || !is_free {
                return false;
            }
            all.push(Arc::new(Region {
                block: Arc::clone(&block),
                pages,
                skipped,
            }));
            skipped += pages.count;
        }
        all.sort_by_key(|region| region.pages.first);
        *regions = all;
        true
    }

    /// Each block with the places of its regions, for a successor.
    pub(super) fn records(&self) -> Vec<BlockRecord> {
        let regions = self.regions();
        let blocks = self.blocks().into_iter();
        let records = blocks.map(|block| {
            let own = regions
                .iter()
                .filter(|region| Arc::ptr_eq(&region.block, &block));
            let mut own: Vec<&Arc<Region>> = own.collect();
            own.sort_by_key(|region| region.skipped);
            let places = own.iter().map(|region| RegionRecord {
                first: region.pages.first.0,
                count: region.pages.count,
            });
            BlockRecord {
                memfd: block.id.into(),
                file_offset: block.file_offset,
                address: block.hva,
                bytes: block.bytes(),
                regions: places.collect(),
            }
        });
        records.collect()
    }

    /// The regions with these pages have left.
    pub(super) fn remove(&self, runs: &[PageRun]) {
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        regions.retain(|region| !runs.contains(&region.pages));
    }

    /// The regions, in the order of their pages.
    pub(super) fn regions(&self) -> Vec<Arc<Region>> {
        self.lock().clone()
    }

    /// The blocks, each once.
    pub(super) fn blocks(&self) -> Vec<Arc<Block>> {
        let mut blocks: Vec<Arc<Block>> = Vec::new();
        for region in self.lock().iter() {
            if !blocks.iter().any(|block| Arc::ptr_eq(block, &region.block)) {
                blocks.push(Arc::clone(&region.block));
            }
        }
        blocks
    }

    /// The parts of regions in a range of the table.
    pub(super) fn parts(&self, range: PageRun) -> Vec<PageRun> {
        let regions = self.lock();
        let parts = regions
            .iter()
            .filter_map(|region| region.pages.intersection(range));
        parts.collect()
    }

    /// The pages of an address range of the VMM.
    pub(super) fn runs_at(&self, start: u64, end: u64) -> Vec<PageRun> {
        let regions = self.lock();
        let runs = regions.iter().filter_map(|region| {
            let limit = region.hva() + region.bytes();
            let (start, end) = (start.max(region.hva()), end.min(limit));
            (start < end).then(|| region.run(start - region.hva(), end - start))
        });
        runs.collect()
    }

    /// Pages in all blocks.
    pub(super) fn pages(&self) -> u32 {
        self.lock().iter().map(|region| region.pages.count).sum()
    }

    /// The region of a page, unless it has left.
    fn region(&self, page: PageIndex) -> Option<Arc<Region>> {
        let regions = self.lock();
        let after = regions.partition_point(|region| region.pages.first <= page);
        let region = regions.get(after.checked_sub(1)?)?;
        region.pages.contains(page).then(|| Arc::clone(region))
    }

    fn known_region(&self, page: PageIndex) -> io::Result<Arc<Region>> {
        self.region(page).ok_or_else(|| left(page))
    }

    /// The page at an address of the VMM.
    pub(super) fn page_at(&self, hva: u64) -> Option<PageIndex> {
        let regions = self.lock();
        regions.iter().find_map(|region| {
            let page = hva.checked_sub(region.hva())? / self.size.bytes();
            (page < u64::from(region.pages.count))
                .then(|| PageIndex(region.pages.first.0 + page as u32))
        })
    }

    /// The pages of a range of a memfd; `None` where not all of it is guest RAM.
    pub(super) fn runs_in_file(
        &self,
        id: MemfdId,
        offset: u64,
        length: u64,
    ) -> Option<Vec<PageRun>> {
        let end = offset.checked_add(length)?;
        let mut runs = Vec::new();
        let mut found = 0;
        for region in self.lock().iter().filter(|region| region.block.id == id) {
            let start = region.file_offset();
            let (from, to) = (offset.max(start), end.min(start + region.bytes()));
            if from < to {
                found += to - from;
                runs.push(region.run(from - start, to - from));
            }
        }
        (found == length).then_some(runs)
    }

    /// The address in the VMM of an offset of a memfd.
    pub(super) fn address_in_file(&self, id: MemfdId, offset: u64) -> Option<u64> {
        let regions = self.lock();
        let block = &regions.iter().find(|region| region.block.id == id)?.block;
        let within = offset.checked_sub(block.file_offset)?;
        (within < block.bytes()).then(|| block.hva + within)
    }

    /// The address range of a run in the VMM: start and length. `None` where it has left.
    pub(super) fn address_range(&self, run: PageRun) -> Option<(u64, u64)> {
        Some((
            self.hva(run.first)?,
            u64::from(run.count) * self.size.bytes(),
        ))
    }

    /// The page's address in the VMM. `None` where it has left.
    pub(super) fn hva(&self, page: PageIndex) -> Option<u64> {
        let region = self.region(page)?;
        Some(region.hva() + u64::from(page.0 - region.pages.first.0) * self.size.bytes())
    }

    /// Has `read` read from a page's memfd, at the page's offset there.
    pub(super) fn read_at<T>(
        &self,
        page: PageIndex,
        read: impl FnOnce(&File, u64) -> io::Result<T>,
    ) -> io::Result<T> {
        let region = self.known_region(page)?;
        read(&region.block.memfd, region.offset_of(page))
    }

    /// Whether the VMM still has a run's pages mapped where they were found.
    pub(super) fn is_mapped(&self, vmm: &Vmm, run: PageRun) -> io::Result<bool> {
        let region = self.known_region(run.first)?;
        let offset = region.offset_of(run.first);
        let start = region.hva() + (offset - region.file_offset());
        let length = u64::from(run.count) * self.size.bytes();
        vmm.is_mapped(region.block.id, offset, start, length)
    }

    /// Whether the memfd has the page.
    pub(super) fn is_present(&self, page: PageIndex) -> io::Result<bool> {
        if let Some(pagemap) = &self.pagemap {
            let Some(hva) = self.hva(page) else {
                return Err(left(page));
            };
            let mut entry = [0; 8];
            pagemap.read_exact_at(&mut entry, pagemap_offset(hva))?;
            return Ok(u64::from_ne_bytes(entry) & PAGEMAP_PRESENT != 0);
        }
        self.read_at(page, |memfd, offset| {
            match rustix::fs::seek(memfd, SeekFrom::Data(offset)) {
                Ok(data) => Ok(data == offset),
                // No data from here to the end.
                Err(rustix::io::Errno::NXIO) => Ok(false),
                Err(errno) => Err(errno.into()),
            }
        })
    }

    /// Takes pages out of the memfd.
    pub(super) fn punch(&self, run: PageRun) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let length = u64::from(run.count) * self.size.bytes();
        self.read_at(run.first, |memfd, offset| {
            loop {
                match rustix::fs::fallocate(memfd, flags, offset, length) {
                    Err(rustix::io::Errno::INTR) => {}
                    result => return Ok(result?),
                }
            }
        })
    }

    /// Makes pages that the memfd does not have into pages of zeros; the others stay as they are.
    pub(super) fn allocate(&self, run: PageRun) -> io::Result<()> {
        let length = u64::from(run.count) * self.size.bytes();
        self.read_at(run.first, |memfd, offset| {
            loop {
                match rustix::fs::fallocate(memfd, FallocateFlags::KEEP_SIZE, offset, length) {
                    Err(rustix::io::Errno::INTR) => {}
                    result => return Ok(result?),
                }
            }
        })
    }

    /// The pages of a region that are there.
    pub(super) fn populated(&self, region: &Region) -> io::Result<Vec<PageRun>> {
        if let Some(pagemap) = &self.pagemap {
            return self.mapped(region, pagemap);
        }
        let start = region.file_offset();
        let data = data_in(&region.block.memfd, start..start + region.bytes())?;
        let runs = data
            .into_iter()
            .map(|data| region.run(data.start - start, data.end - data.start));
        Ok(runs.collect())
    }

    /// The pages of a region that the VMM has mapped.
    fn mapped(&self, region: &Region, pagemap: &File) -> io::Result<Vec<PageRun>> {
        // All base pages of a huge one have an entry, and all of them say the same.
        let entries_each = self.size.length() / PageSize::BASE.length();
        let pages_each = (PAGEMAP_ENTRIES / entries_each).max(1);
        let mut runs = Vec::new();
        let pages: Vec<PageIndex> = region.pages.pages().collect();
        for chunk in pages.chunks(pages_each) {
            let mut bytes = vec![0; chunk.len() * entries_each * 8];
            let skipped = u64::from(chunk[0].0 - region.pages.first.0) * self.size.bytes();
            pagemap.read_exact_at(&mut bytes, pagemap_offset(region.hva() + skipped))?;
            for (page, entries) in chunk.iter().zip(bytes.chunks(entries_each * 8)) {
                let entry = entries
                    .first_chunk()
                    .map_or(0, |entry| u64::from_ne_bytes(*entry));
                if entry & PAGEMAP_PRESENT != 0 {
                    runs.push(PageRun::single(*page));
                }
            }
        }
        Ok(runs)
    }

    /// Bytes of host memory that the guest's memfds take, by the kernel's own count.
    pub(super) fn kernel_bytes(&self) -> io::Result<u64> {
        let mut seen = Vec::new();
        let mut bytes = 0;
        for block in self.blocks() {
            if !seen.contains(&block.id) {
                seen.push(block.id);
                bytes += rustix::fs::fstat(&block.memfd)?.st_blocks as u64 * 512;
            }
        }
        Ok(bytes)
    }
}

impl Region {
    /// Offset of one of its pages in the memfd.
    fn offset_of(&self, page: PageIndex) -> u64 {
        self.file_offset() + u64::from(page.0 - self.pages.first.0) * self.page_bytes()
    }

    /// Its address range in the VMM: start and length.
    pub(super) fn address_range(&self) -> (u64, u64) {
        (self.hva(), self.bytes())
    }
}

fn left(page: PageIndex) -> io::Error {
    let text = format!("page {page} is no guest RAM any longer");
    io::Error::new(io::ErrorKind::NotFound, text)
}

/// Where the entry of an address lies in a page map.
fn pagemap_offset(address: u64) -> u64 {
    address / PageSize::BASE.bytes() * 8
}

/// Places in `range` for `count` pages, each with one more page behind it: the first that has room for all
/// of them, or as few as those between regions allow, where blocks came and went.
fn free_places(
    regions: &[Arc<Region>],
    range: PageRun,
    count: u32,
    align: u32,
) -> Option<Vec<PageRun>> {
    let mut free = free_runs(regions, range, align);
    let mut places = Vec::new();
    let mut left = count;
    while left > 0 {
        let whole = free.iter().position(|run| run.count >= left);
        // Of some of them, a multiple: the next region of the block starts in the midst of no unit.
        let place = whole.or_else(|| (0..free.len()).max_by_key(|at| free[*at].count / align))?;
        let PageRun { first, count: most } = free.remove(place);
        let count = if most >= left {
            left
        } else {
            most / align * align
        };
        if count == 0 {
            return None;
        }
        places.push(PageRun { first, count });
        left -= count;
    }
    Some(places)
}

/// The pages of `range` that may be a region's, in order: each run begins at a multiple of `align`, and ends
/// one page before what is taken.
fn free_runs(regions: &[Arc<Region>], range: PageRun, align: u32) -> Vec<PageRun> {
    let mut free = Vec::new();
    let mut next = range.first.0;
    let mut note = |first: u32, end: u32| {
        if first + 1 < end {
            free.push(PageRun {
                first: PageIndex(first),
                count: end - first - 1,
            });
        }
    };
    for region in regions {
        let taken = region.pages;
        if range.contains(taken.first) {
            note(next, taken.first.0);
            next = (taken.end().0 + 1).next_multiple_of(align);
        }
    }
    note(next, range.end().0);
    free
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A block of `mib` MiB at this address, with a file of its own.
    fn block(mib: u64, hva: u64) -> RamBlock {
        let memfd = tempfile::tempfile_in("/dev/shm").expect("a tmpfs");
        memfd.set_len(mib * MIB).expect("room");
        RamBlock {
            name: "a block".into(),
            id: MemfdId::of(&memfd).expect("open"),
            memfd,
            file_offset: 0,
            hva,
            length: mib * MIB,
            huge_page_bytes: None,
        }
    }

    fn ram(mib: u64, blocks: u32) -> GuestRam {
        let pages = table_pages(mib * MIB, blocks, 2, PageSize::BASE);
        GuestRam::new(pages as u32, 2, PageSize::BASE)
    }

    #[test]
    fn every_shard_has_its_part_of_every_block() {
        let ram = ram(7, 2);
        let first = ram.add(block(5, 0x10_0000_0000)).expect("room");
        let second = ram.add(block(2, 0x20_0000_0000)).expect("room");
        let counts = |regions: &[Arc<Region>]| -> Vec<u32> {
            regions.iter().map(|region| region.pages.count).collect()
        };
        // Three units of 2 MiB, the last of them half full: two and one.
        assert_eq!(counts(&first), [1024, 256]);
        assert_eq!(counts(&second), [512]);
        assert_eq!(ram.pages(), 1792);
        for region in ram.regions() {
            let (start, length) = region.address_range();
            assert_eq!(ram.runs_at(start, start + length), [region.pages]);
            assert_eq!(ram.page_at(start), Some(region.pages.first));
            assert_eq!(ram.hva(region.pages.first), Some(start));
            assert_eq!(ram.page_at(start - 1).is_some(), region.skipped > 0);
        }
    }

    #[test]
    fn a_range_of_a_file_is_found_across_regions_and_only_if_all_of_it_is_ram() {
        let ram = ram(8, 1);
        let block = block(8, 0x10_0000_0000);
        let id = block.id;
        ram.add(block).expect("room");
        let count = |runs: Option<Vec<PageRun>>| -> Option<u32> {
            runs.map(|runs| runs.iter().map(|run| run.count).sum())
        };
        assert_eq!(count(ram.runs_in_file(id, 4 * MIB - 1, 2)), Some(2));
        assert_eq!(count(ram.runs_in_file(id, 100, 3996)), Some(1));
        assert_eq!(count(ram.runs_in_file(id, 100, 3997)), Some(2));
        assert_eq!(count(ram.runs_in_file(id, 8 * MIB - 1, 2)), None);
    }

    #[test]
    fn what_left_is_found_no_more_and_makes_room() {
        let ram = ram(8, 2);
        ram.add(block(4, 0x10_0000_0000)).expect("room");
        let gone = ram.add(block(4, 0x20_0000_0000)).expect("room");
        let runs: Vec<PageRun> = gone.iter().map(|region| region.pages).collect();
        ram.remove(&runs);
        assert_eq!(ram.page_at(0x20_0000_0000), None);
        assert_eq!(ram.hva(runs[0].first), None);
        assert!(ram.punch(runs[0]).is_err());
        let again = ram.add(block(4, 0x20_0000_0000)).expect("its room is free");
        let places: Vec<PageRun> = again.iter().map(|region| region.pages).collect();
        assert_eq!(places, runs);
    }

    #[test]
    fn recorded_places_are_the_same_in_another_process() {
        let before = ram(7, 2);
        before.add(block(5, 0x10_0000_0000)).expect("room");
        before.add(block(2, 0x20_0000_0000)).expect("room");
        let records = before.records();
        let places = |record: &BlockRecord| -> Vec<PageRun> {
            let places = record.regions.iter().map(|region| PageRun {
                first: PageIndex(region.first),
                count: region.count,
            });
            places.collect()
        };
        let after = ram(7, 2);
        for record in &records {
            let again = block(record.bytes / MIB, record.address);
            assert!(after.restore(again, &places(record)));
        }
        for address in [0x10_0000_0000, 0x10_0040_0000, 0x20_0000_0000] {
            assert!(before.page_at(address).is_some());
            assert_eq!(after.page_at(address), before.page_at(address));
        }
        let twice = block(5, 0x30_0000_0000);
        assert!(!after.restore(twice, &places(&records[0])), "taken");
        let other = block(4, 0x30_0000_0000);
        assert!(
            !ram(7, 2).restore(other, &places(&records[0])),
            "of another size"
        );
        let outside = PageRun {
            first: PageIndex(1 << 30),
            count: 512,
        };
        assert!(!ram(7, 2).restore(block(2, 0), &[outside]));
    }

    /// 6 GiB of RAM in a table for 8 GiB, where what is free is the places of two blocks that left, not beside
    /// each other.
    fn fragmented() -> GuestRam {
        let ram = ram(8192, 5);
        ram.add(block(4096, 0x10_0000_0000)).expect("room");
        for number in 2..6 {
            ram.add(block(1024, number << 36)).expect("room");
        }
        for number in [2, 4] {
            ram.remove(&ram.runs_at(number << 36, (number << 36) + 1024 * MIB));
        }
        ram
    }

    #[test]
    fn a_block_that_fits_nowhere_as_a_whole_is_cut_into_what_is_free() {
        let ram = fragmented();
        let start = 0x60_0000_0000;
        let added = ram.add(block(2048, start)).expect("places for its halves");
        let counts: Vec<u32> = added.iter().map(|region| region.pages.count).collect();
        assert_eq!(counts, [1 << 17; 4]);
        assert_eq!(ram.pages(), 2 << 20);
        for (number, region) in added.iter().enumerate() {
            let (hva, length) = region.address_range();
            assert_eq!(hva, start + number as u64 * 512 * MIB);
            assert_eq!(ram.shard_of(region.pages), number / 2);
            assert_eq!(ram.runs_at(hva, hva + length), [region.pages]);
            assert_eq!(ram.hva(region.pages.first), Some(hva));
        }
        let regions = ram.regions();
        let is_apart = |pair: &[Arc<Region>]| pair[0].pages.end() < pair[1].pages.first;
        assert!(regions.windows(2).all(is_apart));
        let file = ram.runs_in_file(added[0].block.id, 0, 2048 * MIB);
        assert_eq!(file.map(|runs| runs.len()), Some(4));
    }

    #[test]
    fn a_block_in_pieces_is_the_same_in_another_process_and_leaves_as_a_whole() {
        let before = fragmented();
        let start = 0x60_0000_0000;
        let added = before.add(block(2048, start)).expect("room");
        let after = ram(8192, 5);
        for record in before.records() {
            let again = block(record.bytes / MIB, record.address);
            assert!(after.restore(again, &super::super::takeover::places(&record)));
        }
        for offset in (0..2048 * MIB).step_by(256 << 20) {
            let page = before.page_at(start + offset);
            assert!(page.is_some());
            assert_eq!(after.page_at(start + offset), page);
        }
        let runs: Vec<PageRun> = added.iter().map(|region| region.pages).collect();
        before.remove(&runs);
        assert_eq!(before.runs_at(start, start + 2048 * MIB), []);
        assert_eq!(before.pages(), 6144 << 8);
        assert!(before.add(block(2048, start)).is_ok(), "its room is free");
    }

    #[test]
    fn no_piece_of_a_block_is_kept_where_not_all_of_it_has_a_place() {
        let ram = fragmented();
        let before = ram.regions().len();
        assert!(ram.add(block(3072, 0x60_0000_0000)).is_err());
        assert_eq!((ram.regions().len(), ram.pages()), (before, 6144 << 8));
    }

    #[test]
    fn a_full_table_refuses_and_stays_as_it_is() {
        let ram = ram(4, 1);
        ram.add(block(4, 0x10_0000_0000)).expect("room");
        assert!(ram.add(block(64, 0x20_0000_0000)).is_err());
        assert_eq!(ram.pages(), 1024);
    }
}
