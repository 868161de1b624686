//! How a guest's memory is moved, as its operator sets it while the guest runs.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use outram_wire::tuning::QueueDepth;
use outram_wire::units::PageSize;

use super::{PageIndex, PageRun};

/// Bytes fetched ahead of one stream at most, for each of the queue's depth. With the usual eight that is a
/// quarter of a millisecond of a gigabyte a second, so that the fault behind a window waits for little
/// more than its own page.
const WINDOW_BYTES: u64 = 32 << 10;

/// See the module.
#[derive(Debug)]
pub struct Pace {
    granule: AtomicU32,
    queue_depth: AtomicU32,
    runs_out: AtomicU32,
    is_eviction_suspended: AtomicBool,
    protects_reads: AtomicBool,
}

impl Pace {
    /// Whether a page that is fetched to be read is write-protected. It then leaves without its tag being
    /// made if nothing was stored to it; but the first store to it is a fault.
    pub fn set_protects_reads(&self, protects: bool) {
        self.protects_reads.store(protects, Ordering::Relaxed);
    }

    pub(super) fn protects_reads(&self) -> bool {
        self.protects_reads.load(Ordering::Relaxed)
    }

    /// So many pages, a power of two, are moved together: from a multiple of it on.
    pub fn set_granule(&self, pages: u32) {
        assert!(pages.is_power_of_two(), "a granule of {pages} pages");
        self.granule.store(pages, Ordering::Relaxed);
    }

    /// Pages that are moved together.
    pub fn granule(&self) -> u32 {
        self.granule.load(Ordering::Relaxed)
    }

    /// So much is on its way at a time, beside what is waited for.
    pub fn set_queue_depth(&self, depth: QueueDepth) {
        self.queue_depth.store(depth.get(), Ordering::Relaxed);
    }

    /// How much is on its way at a time: so many batches that are written back, among others.
    pub fn queue_depth(&self) -> QueueDepth {
        let depth = self.queue_depth.load(Ordering::Relaxed);
        depth.try_into().unwrap_or_default()
    }

    /// Pages of this size that are fetched ahead of one stream at most: one, where they are huge.
    pub(super) fn window(&self, size: PageSize) -> u32 {
        let bytes = u64::from(self.queue_depth().get()) * WINDOW_BYTES;
        size.pages_in(bytes, 1) as u32
    }

    /// So many threads evict what so many shards hand out.
    pub fn set_workers(&self, workers: u32, shards: u32) {
        // One in work and one waiting for each thread, so that none idles, and two for those that end
        // together.
        let runs_out = 2 * workers.div_ceil(shards) + 2;
        self.runs_out.store(runs_out, Ordering::Relaxed);
    }

    /// Has nothing evicted that is not on its way yet, or things go on as they did; tells whether that changes
    /// anything. Shards are to be woken where they go on.
    pub fn suspend_eviction(&self, suspended: bool) -> bool {
        self.is_eviction_suspended
            .swap(suspended, Ordering::Relaxed)
            != suspended
    }

    /// Runs that a shard has out at once.
    pub(super) fn runs_out(&self) -> usize {
        match self.is_eviction_suspended.load(Ordering::Relaxed) {
            true => 0,
            false => self.runs_out.load(Ordering::Relaxed) as usize,
        }
    }
}

impl Default for Pace {
    /// Page by page, one thread a shard, and what is read is protected.
    fn default() -> Self {
        let pace = Self {
            granule: AtomicU32::new(1),
            queue_depth: AtomicU32::new(QueueDepth::default().get()),
            runs_out: AtomicU32::new(0),
            is_eviction_suspended: AtomicBool::new(false),
            protects_reads: AtomicBool::new(true),
        };
        pace.set_workers(1, 1);
        pace
    }
}

/// The `pages` pages, a power of two, that are moved with `page`.
pub(super) fn block_of(page: PageIndex, pages: u32) -> PageRun {
    PageRun {
        first: PageIndex(page.0 & !(pages - 1)),
        count: pages,
    }
}
