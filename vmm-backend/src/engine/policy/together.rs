//! Whether pages that left together are wanted back together.
//!
//! What a guest does not need for a while leaves in one run after the other, and where it takes that up again it
//! needs the neighbours, too, be it in another order: then it saves faults to fetch with a page those that left with
//! it. Where its uses are scattered, they would only take the place of others. Which it is shows in a sample of the memory's
//! blocks, in which nothing is fetched so: of the pages that left together with one that is wanted back, a share is
//! wanted soon after. Of any pages that left, a share is as well: only what is more than that is gained.

use std::collections::VecDeque;

use foldhash::HashMap;

use crate::engine::PageIndex;
use crate::engine::pace::block_of;

/// Pages of a block, in which they are fetched together: what a disk would read around one as well.
pub const BLOCK: u32 = 8;

/// One block in so many is of the sample.
const SAMPLES: u32 = 16;

/// Soon is before so large a share of what is there has come.
const SOON: f64 = 0.5;

/// Pages that are watched at a time, at most.
const WATCHED_MOST: usize = 1024;

/// By how much the share of those that are wanted soon is to be larger: one that is fetched and not needed costs a third
/// of what one saves that is.
const GAIN_LEAST: f32 = 0.3;

/// What one page counts against all that were judged before.
const WEIGHT: f32 = 1.0 / 64.0;

/// Pages of a block that left together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Together {
    first: PageIndex,
    /// Of each page behind the first, whether it is one of them.
    bits: u8,
}

const _: () = assert!(BLOCK == u8::BITS);

impl Together {
    /// No pages.
    pub const NONE: Self = Self {
        first: PageIndex(0),
        bits: 0,
    };

    /// Those of a page's block, but for itself, that are accepted.
    pub(super) fn with(page: PageIndex, accepts: impl Fn(PageIndex) -> bool) -> Self {
        let first = block_of(page, BLOCK).first;
        let bits = (0..BLOCK).filter(|place| {
            let other = PageIndex(first.0 + place);
            other != page && accepts(other)
        });
        Self {
            first,
            bits: bits.fold(0, |bits, place| bits | 1 << place),
        }
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.bits == 0
    }

    /// The pages, in order.
    pub fn pages(self) -> impl Iterator<Item = PageIndex> {
        let places = (0..BLOCK).filter(move |place| self.bits & 1 << place != 0);
        places.map(move |place| PageIndex(self.first.0 + place))
    }

    /// How many of them follow a page of their block, one after the other.
    pub fn behind(self, page: PageIndex) -> u32 {
        (u32::from(self.bits) >> (page.0 % BLOCK + 1)).trailing_ones()
    }
}

/// Which pages are watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sample {
    /// One that left together with one that was wanted back just now.
    Mate = 0,
    /// One that just left.
    Any = 1,
}

#[derive(Debug)]
struct Watched {
    page: PageIndex,
    sample: Sample,
    /// The sample's arrivals before.
    since: u64,
    came: bool,
}

/// What becomes of pages that left together, in one shard.
#[derive(Debug, Default)]
pub(super) struct Reunions {
    /// Arrivals of pages of the sample.
    arrivals: u64,
    /// Pages that are watched, those first that have been for the longest.
    watched: VecDeque<Watched>,
    /// How many were, before those.
    judged: u64,
    /// Of pages that are watched and have not come, which of all that ever were watched they are.
    numbers: HashMap<PageIndex, u64>,
    /// The share that came soon, by sample.
    came: [f32; 2],
}

impl Reunions {
    /// Whether a page's block is one of the sample.
    pub(super) fn samples(page: PageIndex) -> bool {
        // Fibonacci hashing (Knuth, The Art of Computer Programming, 6.4): blocks of arrays are not all of it or none.
        let hash = (page.0 / BLOCK).wrapping_mul(0x9e37_79b9);
        hash < u32::MAX / SAMPLES
    }

    /// Whether pages that left together are wanted back together more than others are.
    pub(super) fn pay(&self) -> bool {
        self.came[Sample::Mate as usize] >= self.came[Sample::Any as usize] + GAIN_LEAST
    }

    /// Looks what becomes of a page of the sample which is elsewhere.
    pub(super) fn watch(&mut self, page: PageIndex, sample: Sample) {
        if self.watched.len() == WATCHED_MOST {
            return;
        }
        let number = self.judged + self.watched.len() as u64;
        self.numbers.insert(page, number);
        self.watched.push_back(Watched {
            page,
            sample,
            since: self.arrivals,
            came: false,
        });
    }

    /// A page of the sample has come, where so many are here.
    pub(super) fn note_arrived(&mut self, page: PageIndex, present: usize) {
        self.arrivals += 1;
        if let Some(number) = self.numbers.remove(&page)
            && let Some(watched) = self.watched.get_mut((number - self.judged) as usize)
        {
            watched.came = true;
        }
        let soon = (present as f64 * SOON) as u64 / u64::from(SAMPLES);
        while let Some(watched) = self.watched.front()
            && watched.since + soon < self.arrivals
        {
            let share = &mut self.came[watched.sample as usize];
            *share += (f32::from(u8::from(watched.came)) - *share) * WEIGHT;
            if self.numbers.get(&watched.page) == Some(&self.judged) {
                self.numbers.remove(&watched.page);
            }
            self.judged += 1;
            self.watched.pop_front();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    impl Reunions {
        /// As after pages came back together for long.
        pub(crate) fn proven() -> Self {
            Self {
                came: [1.0, 0.0],
                ..Self::default()
            }
        }
    }

    /// What is here, of which soon is 100 arrivals of the sample.
    const PRESENT: usize = 200 * SAMPLES as usize;

    /// Of both kinds of pages, so many in ten come soon, from a page on.
    fn watch(reunions: &mut Reunions, from: u32, mates: u32, any: u32) {
        for number in 0..600 {
            let pages = [(Sample::Mate, mates), (Sample::Any, any)];
            for (place, (sample, come)) in pages.into_iter().enumerate() {
                let page = PageIndex(from + 2 * number + place as u32);
                reunions.watch(page, sample);
                if number % 10 < come {
                    reunions.note_arrived(page, PRESENT);
                }
            }
        }
        for other in 0..200 {
            reunions.note_arrived(PageIndex(1_000_000 + other), PRESENT);
        }
    }

    #[test]
    fn pages_that_left_together_pay_where_they_come_more_often_than_others() {
        let mut reunions = Reunions::default();
        assert!(!reunions.pay(), "nothing is known");
        watch(&mut reunions, 0, 8, 2);
        assert!(reunions.pay(), "{:?}", reunions.came);
        watch(&mut reunions, 10_000, 2, 1);
        assert!(!reunions.pay(), "{:?}", reunions.came);
        watch(&mut reunions, 20_000, 9, 8);
        assert!(!reunions.pay(), "all come: {:?}", reunions.came);
    }

    #[test]
    fn what_comes_late_counts_as_what_never_does() {
        let mut reunions = Reunions::default();
        for number in 0..600 {
            reunions.watch(PageIndex(number), Sample::Mate);
            reunions.note_arrived(PageIndex(number.wrapping_sub(150)), PRESENT);
        }
        assert_eq!(reunions.came, [0.0; 2]);
    }

    #[test]
    fn no_more_is_watched_than_there_is_room_for() {
        let mut reunions = Reunions::default();
        for page in 0..10 * WATCHED_MOST as u32 {
            reunions.watch(PageIndex(page), Sample::Any);
        }
        assert_eq!(reunions.watched.len(), WATCHED_MOST);
        assert_eq!(reunions.numbers.len(), WATCHED_MOST);
        for page in 0..2 * PRESENT as u32 {
            reunions.note_arrived(PageIndex(1_000_000 + page), PRESENT);
        }
        assert!(reunions.watched.is_empty() && reunions.numbers.is_empty());
    }

    #[test]
    fn one_block_in_so_many_is_of_the_sample() {
        let blocks = (0..160_000).filter(|block| Reunions::samples(PageIndex(block * BLOCK)));
        assert!((9_000..11_000).contains(&blocks.count()));
        let alike = |page: u32| {
            Reunions::samples(PageIndex(page)) == Reunions::samples(PageIndex(page / BLOCK * BLOCK))
        };
        assert!((0..1000).all(alike));
    }

    #[test]
    fn pages_behind_one_are_counted_up_to_a_gap() {
        let together = Together::with(PageIndex(82), |page| page.0 != 85);
        let pages: Vec<u32> = together.pages().map(|page| page.0).collect();
        assert_eq!(pages, [80, 81, 83, 84, 86, 87]);
        let behind = |page| together.behind(PageIndex(page));
        assert_eq!(
            [behind(82), behind(84), behind(86), behind(87)],
            [2, 0, 1, 0]
        );
        assert!(Together::NONE.is_empty() && !together.is_empty());
    }
}
