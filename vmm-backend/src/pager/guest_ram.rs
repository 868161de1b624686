//! Guest RAM as files and addresses: which page lies where, and the file operations on it.
//!
//! Guest memory is read with `preadv` on the memfd, never through a mapping: a read of a hole
//! through a mapping would make a page of zeros there.

use std::fs::File;
use std::io;

use rustix::fs::{FallocateFlags, SeekFrom};

use crate::engine::{PAGE_SIZE, PageIndex, PageRun};
use crate::handover::MemfdId;
use crate::handover::discover::{self, RamBlock};

const PAGE: u64 = PAGE_SIZE as u64;

/// A block of guest RAM with its place in the page table.
#[derive(Debug)]
pub(super) struct Region {
    /// The memfd.
    pub(super) memfd: File,
    /// Its identity.
    pub(super) id: MemfdId,
    /// Where the block starts in the memfd.
    pub(super) file_offset: u64,
    /// Where the VMM has mapped it.
    pub(super) hva: u64,
    /// Its pages.
    pub(super) pages: PageRun,
}

/// Regions start at multiples of this many pages in the page table (2 MiB), as shards do, with at
/// least one page that is nobody's before them: so that no run of pages crosses from one region
/// into the next, which lies elsewhere in the VMM's address space.
pub(super) const ALIGN_PAGES: u32 = 512;

/// All blocks of a guest's RAM.
#[derive(Debug)]
pub(super) struct GuestRam {
    regions: Vec<Region>,
}

/// Pages of the table that blocks of these lengths need.
pub(super) fn table_pages(lengths: impl IntoIterator<Item = u64>) -> u64 {
    lengths.into_iter().fold(0, |next, length| {
        (next + length / PAGE + 1).next_multiple_of(ALIGN_PAGES.into())
    })
}

impl GuestRam {
    /// Gives each block its place in the page table, one after the other.
    pub(super) fn new(blocks: Vec<RamBlock>) -> Self {
        let mut next = 0;
        let regions = blocks.into_iter().map(|block| {
            let count = (block.length / PAGE) as u32;
            let pages = PageRun {
                first: PageIndex(next),
                count,
            };
            next = (next + count + 1).next_multiple_of(ALIGN_PAGES);
            Region {
                memfd: block.memfd,
                id: block.id,
                file_offset: block.file_offset,
                hva: block.hva,
                pages,
            }
        });
        Self {
            regions: regions.collect(),
        }
    }

    /// Pages of the table that belong to no region, up to the end of the last.
    pub(super) fn gaps(&self) -> Vec<PageRun> {
        let ends = self.regions.iter().map(|region| region.pages.end().0);
        ends.map(|end| PageRun {
            first: PageIndex(end),
            count: (end + 1).next_multiple_of(ALIGN_PAGES) - end,
        })
        .collect()
    }

    /// Splits the table into at most `count` ranges for shards, of about the same size.
    pub(super) fn split(&self, count: u32) -> Vec<PageRun> {
        let end = self.gaps().last().map_or(0, |gap| gap.end().0);
        let blocks = end / ALIGN_PAGES;
        let each = blocks.div_ceil(count.max(1)).max(1) * ALIGN_PAGES;
        let firsts = (0..end).step_by(each as usize);
        firsts
            .map(|first| PageRun {
                first: PageIndex(first),
                count: each.min(end - first),
            })
            .collect()
    }

    /// The parts of regions in a range of the table.
    pub(super) fn parts(&self, range: PageRun) -> Vec<PageRun> {
        let parts = self
            .regions
            .iter()
            .filter_map(|region| intersect(region.pages, range));
        parts.collect()
    }

    /// The pages of an address range of the VMM, which lies in one region.
    pub(super) fn run_at(&self, start: u64, end: u64) -> Option<PageRun> {
        self.regions.iter().find_map(|region| {
            let limit = region.hva + u64::from(region.pages.count) * PAGE;
            let (start, end) = (start.max(region.hva), end.min(limit));
            let count = (end.checked_sub(start)? / PAGE) as u32;
            let first = region.pages.first.0 + ((start - region.hva) / PAGE) as u32;
            (count > 0).then_some(PageRun {
                first: PageIndex(first),
                count,
            })
        })
    }

    /// The blocks, in the order of their pages.
    pub(super) fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Pages in all blocks.
    pub(super) fn pages(&self) -> u32 {
        self.regions.iter().map(|region| region.pages.count).sum()
    }

    fn region(&self, page: PageIndex) -> &Region {
        let region = self
            .regions
            .iter()
            .find(|region| region.pages.contains(page));
        region.unwrap_or_else(|| panic!("page {page} is in no region"))
    }

    /// The page at an address of the VMM.
    pub(super) fn page_at(&self, hva: u64) -> Option<PageIndex> {
        self.regions.iter().find_map(|region| {
            let page = hva.checked_sub(region.hva)? / PAGE;
            (page < u64::from(region.pages.count))
                .then(|| PageIndex(region.pages.first.0 + page as u32))
        })
    }

    /// The page at an offset of a memfd.
    pub(super) fn page_in_file(&self, id: MemfdId, offset: u64) -> Option<PageIndex> {
        self.regions
            .iter()
            .filter(|region| region.id == id)
            .find_map(|region| {
                let page = offset.checked_sub(region.file_offset)? / PAGE;
                (page < u64::from(region.pages.count))
                    .then(|| PageIndex(region.pages.first.0 + page as u32))
            })
    }

    /// The address range of a run in the VMM: start and length.
    pub(super) fn address_range(&self, run: PageRun) -> (u64, u64) {
        (self.hva(run.first), u64::from(run.count) * PAGE)
    }

    /// The page's address in the VMM.
    pub(super) fn hva(&self, page: PageIndex) -> u64 {
        let region = self.region(page);
        region.hva + u64::from(page.0 - region.pages.first.0) * PAGE
    }

    /// The page's memfd and its offset there.
    pub(super) fn place(&self, page: PageIndex) -> (&File, u64) {
        let region = self.region(page);
        (
            &region.memfd,
            region.file_offset + u64::from(page.0 - region.pages.first.0) * PAGE,
        )
    }

    /// Whether process `pid` still has a run's pages mapped where they were found.
    pub(super) fn is_mapped(&self, pid: i32, run: PageRun) -> io::Result<bool> {
        let region = self.region(run.first);
        let (start, length) = self.address_range(run);
        discover::is_mapped(pid, region.id, self.place(run.first).1, start, length)
    }

    /// Whether the memfd has the page.
    pub(super) fn is_present(&self, page: PageIndex) -> io::Result<bool> {
        let (memfd, offset) = self.place(page);
        match rustix::fs::seek(memfd, SeekFrom::Data(offset)) {
            Ok(data) => Ok(data == offset),
            // No data from here to the end.
            Err(rustix::io::Errno::NXIO) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Takes pages out of the memfd.
    pub(super) fn punch(&self, run: PageRun) -> io::Result<()> {
        let (memfd, offset) = self.place(run.first);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let length = u64::from(run.count) * PAGE;
        loop {
            match rustix::fs::fallocate(memfd, flags, offset, length) {
                Err(rustix::io::Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
    }

    /// The pages that a region's memfd has.
    pub(super) fn populated(&self, region: &Region) -> io::Result<Vec<PageRun>> {
        let end = region.file_offset + u64::from(region.pages.count) * PAGE;
        let mut runs = Vec::new();
        let mut at = region.file_offset;
        while at < end {
            let data = match rustix::fs::seek(&region.memfd, SeekFrom::Data(at)) {
                Ok(data) if data < end => data,
                Ok(_) | Err(rustix::io::Errno::NXIO) => break,
                Err(errno) => return Err(errno.into()),
            };
            let hole = rustix::fs::seek(&region.memfd, SeekFrom::Hole(data))?.min(end);
            let first = region.pages.first.0 + ((data - region.file_offset) / PAGE) as u32;
            runs.push(PageRun {
                first: PageIndex(first),
                count: ((hole - data) / PAGE) as u32,
            });
            at = hole;
        }
        Ok(runs)
    }

    /// Bytes of host memory that the guest's memfds take, by the kernel's own count.
    pub(super) fn kernel_bytes(&self) -> io::Result<u64> {
        let mut seen = Vec::new();
        let mut bytes = 0;
        for region in self.regions.iter() {
            if !seen.contains(&region.id) {
                seen.push(region.id);
                bytes += rustix::fs::fstat(&region.memfd)?.st_blocks as u64 * 512;
            }
        }
        Ok(bytes)
    }
}

/// The pages that two runs share.
pub(super) fn intersect(a: PageRun, b: PageRun) -> Option<PageRun> {
    let first = a.first.max(b.first);
    let end = a.end().min(b.end());
    (first < end).then(|| PageRun {
        first,
        count: end.0 - first.0,
    })
}
