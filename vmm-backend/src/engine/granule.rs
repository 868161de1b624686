//! How many pages are fetched and evicted together.

use std::sync::atomic::{AtomicU32, Ordering};

use super::{PageIndex, PageRun};

/// Pages that are moved together: as many as this, from a multiple of it on. Changed while the guest runs.
#[derive(Debug)]
pub struct Granule(AtomicU32);

impl Granule {
    /// A granule of `pages` pages, a power of two.
    pub fn new(pages: u32) -> Self {
        let granule = Self::default();
        granule.set(pages);
        granule
    }

    /// Changes it to `pages` pages, a power of two.
    pub fn set(&self, pages: u32) {
        assert!(pages.is_power_of_two(), "a granule of {pages} pages");
        self.0.store(pages, Ordering::Relaxed);
    }

    /// In pages.
    pub fn pages(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Default for Granule {
    fn default() -> Self {
        Self(AtomicU32::new(1))
    }
}

/// The `pages` pages, a power of two, that are moved with `page`.
pub(super) fn block_of(page: PageIndex, pages: u32) -> PageRun {
    PageRun {
        first: PageIndex(page.0 & !(pages - 1)),
        count: pages,
    }
}
