//! How often fetching ahead was right: which pages came because a stream was expected to get there, and
//! what was seen of them since.
//!
//! The kernel tells nobody that a page which is there was read. But a guess shows to be right where the guest
//! asks for the page while it is on its way, faults further down its stream, or stores to it. Where
//! nothing of that was seen until the page left again, it counts as wrong: a stream's last window does,
//! of which the guest may have read a part. So of what is counted, the share of right ones is a least.

use super::stats::Stats;
use super::{PageIndex, PageRun};

/// Guesses of a shard that are open, a bit for each of its pages.
#[derive(Debug)]
pub(super) struct Guesses {
    range: PageRun,
    open: Vec<u64>,
}

impl Guesses {
    /// None yet, among the pages of `range`.
    pub(super) fn new(range: PageRun) -> Self {
        Self {
            range,
            open: vec![0; (range.count as usize).div_ceil(64)],
        }
    }

    /// A page is fetched on a guess.
    pub(super) fn open(&mut self, page: PageIndex) {
        if let Some((word, bit)) = self.place(page) {
            self.open[word] |= bit;
        }
    }

    /// The guest used a page.
    pub(super) fn note_used(&mut self, page: PageIndex, stats: &Stats) {
        if self.drop(page) {
            stats.fetched_ahead_used.count();
        }
    }

    /// A page left, and nothing was seen of any use.
    pub(super) fn note_left(&mut self, page: PageIndex, stats: &Stats) {
        if self.drop(page) {
            stats.fetched_ahead_unused.count();
        }
    }

    /// The page never came, or is gone for another reason: that says nothing. Whether there was a guess.
    pub(super) fn drop(&mut self, page: PageIndex) -> bool {
        let Some((word, bit)) = self.place(page) else {
            return false;
        };
        let was_open = self.open[word] & bit != 0;
        self.open[word] &= !bit;
        was_open
    }

    /// A page's word and bit; none has one that is another shard's.
    fn place(&self, page: PageIndex) -> Option<(usize, u64)> {
        let number = page.0.wrapping_sub(self.range.first.0);
        let place = (number as usize / 64, 1 << (number % 64));
        self.range.contains(page).then_some(place)
    }
}
