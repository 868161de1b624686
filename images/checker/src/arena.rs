//! The memory under test: regions of pages, each with the versions last written.
//!
//! One region belongs to one worker at a time, so a mismatch is never a race of the checker's own.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use crate::pattern::{self, PAGE_BYTES, Page};

/// Mismatches that are printed in full per region; the rest are only counted.
const PRINTED_PER_REGION: u64 = 16;

/// Pages looked at between two looks at the clock and the stop flag.
const BATCH_PAGES: usize = 64;

/// What the workers have done so far; shared by all, only rising.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Pages compared with what they must be.
    pub(crate) checked: AtomicU64,
    /// Pages rewritten with a new version.
    pub(crate) rewritten: AtomicU64,
    /// Pages that were not as they must be.
    pub(crate) mismatches: AtomicU64,
    /// Set to end work that has no end of its own.
    pub(crate) stop: AtomicBool,
}

impl Tally {
    /// The counters as fields of a report line.
    pub(crate) fn report(&self) -> String {
        format!(
            "checked={} rewritten={} mismatches={}",
            self.checked.load(Ordering::Relaxed),
            self.rewritten.load(Ordering::Relaxed),
            self.mismatches.load(Ordering::Relaxed)
        )
    }
}

/// A small fast generator (xorshift64*): tests need spread, not secrecy.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// A generator; equal seeds give equal sequences.
    pub(crate) fn new(seed: u64) -> Self {
        Self(pattern::mix(seed) | 1)
    }

    /// The next number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `bound`; 0 where `bound` is 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

/// Pages that one worker fills, reads, rewrites and verifies.
pub(crate) struct Region {
    first_page: u64,
    pages: Vec<Page>,
    versions: Vec<u32>,
    random: Random,
    printed: u64,
}

impl Region {
    /// Allocates `pages` pages numbered from `first_page` and writes version 1 of each.
    pub(crate) fn filled(first_page: u64, pages: usize, seed: u64) -> Self {
        let mut region = Self {
            first_page,
            pages: Vec::with_capacity(pages),
            versions: vec![1; pages],
            random: Random::new(seed ^ first_page),
            printed: 0,
        };
        let mut page = Page([0; PAGE_BYTES]);
        for index in 0..pages {
            pattern::write(&mut page, first_page + index as u64, 1);
            region.pages.push(page.clone());
        }
        region
    }

    /// Pages in the region.
    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    /// Compares one page, counts and prints what differs. True where all is well.
    pub(crate) fn check(&mut self, index: usize, tally: &Tally) -> bool {
        let number = self.first_page + index as u64;
        let version = self.versions[index];
        let difference = pattern::compare(&self.pages[index], number, version);
        tally.checked.fetch_add(1, Ordering::Relaxed);
        let Some(difference) = difference else {
            return true;
        };
        tally.mismatches.fetch_add(1, Ordering::Relaxed);
        self.printed += 1;
        if self.printed <= PRINTED_PER_REGION {
            println!(
                "MISMATCH page={number} version={version} word={} expected={:#018x} found={:#018x}",
                difference.word, difference.expected, difference.found
            );
        }
        false
    }

    /// Writes the next version of one page.
    pub(crate) fn rewrite(&mut self, index: usize, tally: &Tally) {
        let version = self.versions[index].wrapping_add(1);
        self.versions[index] = version;
        let number = self.first_page + index as u64;
        pattern::write(&mut self.pages[index], number, version);
        tally.rewritten.fetch_add(1, Ordering::Relaxed);
    }

    /// Reads, checks and rewrites at random until the deadline, or until told to stop.
    pub(crate) fn work(&mut self, deadline: Option<Instant>, tally: &Tally) {
        while !tally.stop.load(Ordering::Relaxed)
            && deadline.is_none_or(|deadline| Instant::now() < deadline)
            && !self.pages.is_empty()
        {
            // Half of a batch is spread out, half runs through neighbours, as real programs do.
            let start = self.random.below(self.pages.len());
            for step in 0..BATCH_PAGES {
                let index = if step % 2 == 0 {
                    (start + step / 2) % self.pages.len()
                } else {
                    self.random.below(self.pages.len())
                };
                if self.check(index, tally) && self.random.below(3) == 0 {
                    self.rewrite(index, tally);
                }
            }
        }
    }

    /// Checks every page once.
    pub(crate) fn verify(&mut self, tally: &Tally) {
        for index in 0..self.pages.len() {
            self.check(index, tally);
        }
    }

    /// Flips a bit in `count` different pages, as broken memory would.
    pub(crate) fn corrupt(&mut self, count: usize) {
        for index in self.spread(count) {
            let byte = self.random.below(PAGE_BYTES);
            self.pages[index].0[byte] ^= 1 << self.random.below(8);
        }
    }

    /// Makes `count` different pages stale: their next version is noted, but never stored.
    pub(crate) fn forget_stores(&mut self, count: usize) {
        for index in self.spread(count) {
            self.versions[index] = self.versions[index].wrapping_add(1);
        }
    }

    /// `count` different pages, evenly apart.
    fn spread(&self, count: usize) -> Vec<usize> {
        let count = count.min(self.pages.len());
        (0..count)
            .map(|nth| nth * self.pages.len() / count)
            .collect()
    }

    /// The pages from `index` on, at most `count`, for something else to be read into. What was
    /// there must be given back by [`Region::rewrite`].
    pub(crate) fn borrow_pages(&mut self, index: usize, count: usize) -> &mut [Page] {
        let end = (index + count).min(self.pages.len());
        &mut self.pages[index..end]
    }

    /// A page at random.
    pub(crate) fn random_page(&mut self) -> usize {
        self.random.below(self.pages.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn mismatches(tally: &Tally) -> u64 {
        tally.mismatches.load(Ordering::Relaxed)
    }

    #[test]
    fn good_memory_has_no_mismatch() {
        let tally = Tally::default();
        let mut region = Region::filled(1000, 300, 1);
        region.work(Some(Instant::now() + Duration::from_millis(50)), &tally);
        region.verify(&tally);
        assert_eq!(mismatches(&tally), 0);
        assert!(tally.checked.load(Ordering::Relaxed) >= 300);
        assert!(tally.rewritten.load(Ordering::Relaxed) > 0);
    }

    #[test]
    fn broken_memory_is_told() {
        let tally = Tally::default();
        let mut region = Region::filled(0, 100, 1);
        region.corrupt(7);
        region.verify(&tally);
        assert_eq!(mismatches(&tally), 7);
    }

    #[test]
    fn a_lost_store_is_told() {
        let tally = Tally::default();
        let mut region = Region::filled(0, 100, 1);
        region.forget_stores(5);
        region.verify(&tally);
        assert_eq!(mismatches(&tally), 5);
    }
}
