//! Eviction policies beside each other, on [traces](super::trace) of the workloads.
//!
//! | policy | what it is |
//! |---|---|
//! | `OPT` | evicts what is used again last (Bélády): it knows the future, and nobody can do better |
//! | `LRU` | evicts what was used longest ago: it sees every use |
//! | `CLOCK` | a second chance for what was used since it was looked at last: hardware's accessed bits |
//! | `FIFO` | evicts what came longest ago: sees faults alone |
//! | `outram` | the pager's policy, as it is run: sees faults alone, evicts in runs and ahead of need; its staging takes its share of the limit, and has what left last |
//!
//! A miss is a use of a page that is not local; what comes back out of staging is no miss. Fetching ahead is left out: it hides misses, whatever the
//! policy ([`foresight`](super::foresight) has it). Misses of the preparation are not counted.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use outram_backend::engine::budget::Budget;
use outram_backend::engine::eviction::RUN_BYTES;
use outram_backend::engine::policy::{Arrival, Policy, ThreeQueues};
use outram_backend::engine::{PageIndex, PageRun, PageSize};
use outram_wire::limits::Sizes;

use super::foresight::{Foresight, Reason};
use super::trace::Trace;

/// How many more misses it takes until a run that left is on the servers, and its staging is free: it
/// takes the time of so many faults, by the rates that the benchmark measures.
const WRITE_BACK_MISSES: u64 = 24;
/// Pages fetched behind a missed one that come in the time of a miss.
const AHEAD_A_MISS: u64 = 8;

/// Misses of one trace at one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Misses {
    /// First in, first out.
    pub fifo: u64,
    /// Second chance.
    pub clock: u64,
    /// The pager's.
    pub outram: u64,
    /// Least recently used.
    pub lru: u64,
    /// The least that is possible.
    pub opt: u64,
}

/// The smallest limit in pages: the pager's staging and a few runs.
pub const LIMIT_LEAST: usize = 512;

/// Counts misses where `limit` pages may be local, [`LIMIT_LEAST`] at least.
pub fn misses(trace: &Trace, limit: usize) -> Misses {
    assert!(limit >= LIMIT_LEAST, "a limit of {limit} pages");
    Misses {
        fifo: count(trace, &mut Fifo::new(trace, limit)),
        clock: count(trace, &mut Clock::new(trace, limit)),
        outram: count(trace, &mut Outram::new(trace, limit, Foresight::none())),
        lru: count(trace, &mut Ordered::lru(trace, limit)),
        opt: count(trace, &mut Ordered::opt(trace, limit)),
    }
}

/// Names the columns of [`line()`].
pub const HEADING: &str = "\
                        misses                  misses ÷ LRU's
workload           local         OPT         LRU     FIFO   CLOCK  outram     OPT";

/// Misses of a workload's trace, as a line of a table.
pub fn line(name: &str, local: f64, misses: &Misses) -> String {
    let of_lru = |count: u64| count as f64 / misses.lru.max(1) as f64;
    format!(
        "{name:<18} {local:>5} {:>11} {:>11} {:>8.3} {:>7.3} {:>7.3} {:>7.3}",
        misses.opt,
        misses.lru,
        of_lru(misses.fifo),
        of_lru(misses.clock),
        of_lru(misses.outram),
        of_lru(misses.opt)
    )
}

pub(super) trait Cache {
    /// A page is used, in the `number`-th use of the trace; whether it was local.
    fn uses(&mut self, number: usize, page: u32) -> bool;
}

fn count(trace: &Trace, cache: &mut impl Cache) -> u64 {
    run(trace, cache, |_| {})
}

/// Counts the misses of a trace; `begin` is called where its preparation ends.
pub(super) fn run<C: Cache>(trace: &Trace, cache: &mut C, begin: impl Fn(&mut C)) -> u64 {
    let mut misses = 0;
    for (number, page) in trace.uses.iter().enumerate() {
        if number == trace.prepared {
            begin(cache);
        }
        let is_local = cache.uses(number, *page);
        misses += u64::from(!is_local && number >= trace.prepared);
    }
    misses
}

struct Fifo {
    limit: usize,
    queue: VecDeque<u32>,
    is_local: Vec<bool>,
}

impl Fifo {
    fn new(trace: &Trace, limit: usize) -> Self {
        Self {
            limit,
            queue: VecDeque::new(),
            is_local: vec![false; trace.pages],
        }
    }
}

impl Cache for Fifo {
    fn uses(&mut self, _: usize, page: u32) -> bool {
        if self.is_local[page as usize] {
            return true;
        }
        if self.queue.len() >= self.limit
            && let Some(victim) = self.queue.pop_front()
        {
            self.is_local[victim as usize] = false;
        }
        self.queue.push_back(page);
        self.is_local[page as usize] = true;
        false
    }
}

/// A ring of pages, and whether each was used since the hand passed it.
struct Clock {
    limit: usize,
    ring: Vec<u32>,
    hand: usize,
    is_local: Vec<bool>,
    is_used: Vec<bool>,
}

impl Clock {
    fn new(trace: &Trace, limit: usize) -> Self {
        Self {
            limit,
            ring: Vec::new(),
            hand: 0,
            is_local: vec![false; trace.pages],
            is_used: vec![false; trace.pages],
        }
    }
}

impl Cache for Clock {
    fn uses(&mut self, _: usize, page: u32) -> bool {
        let was_local = self.is_local[page as usize];
        if was_local {
            self.is_used[page as usize] = true;
            return true;
        }
        self.is_local[page as usize] = true;
        if self.ring.len() < self.limit {
            self.ring.push(page);
            return false;
        }
        loop {
            let place = self.hand;
            self.hand = (self.hand + 1) % self.limit;
            let candidate = self.ring[place] as usize;
            if !std::mem::take(&mut self.is_used[candidate]) {
                self.is_local[candidate] = false;
                self.ring[place] = page;
                return false;
            }
        }
    }
}

/// Evicts the local page that comes first in an order which each use renews.
struct Ordered {
    limit: usize,
    /// What each use makes of its page's place in the order.
    places: Vec<u64>,
    order: BTreeSet<(u64, u32)>,
    of: Vec<Option<u64>>,
}

impl Ordered {
    fn new(trace: &Trace, limit: usize, places: Vec<u64>) -> Self {
        Self {
            limit,
            places,
            order: BTreeSet::new(),
            of: vec![None; trace.pages],
        }
    }

    fn lru(trace: &Trace, limit: usize) -> Self {
        Self::new(trace, limit, (0..trace.uses.len() as u64).collect())
    }

    fn opt(trace: &Trace, limit: usize) -> Self {
        let mut next = vec![u64::MAX; trace.pages];
        let mut places = vec![0; trace.uses.len()];
        for (number, page) in trace.uses.iter().enumerate().rev() {
            // What is used last of all comes first.
            places[number] = u64::MAX - next[*page as usize];
            next[*page as usize] = number as u64;
        }
        Self::new(trace, limit, places)
    }
}

impl Cache for Ordered {
    fn uses(&mut self, number: usize, page: u32) -> bool {
        let place = self.places[number];
        let before = self.of[page as usize].replace(place);
        if let Some(before) = before {
            self.order.remove(&(before, page));
        } else if self.order.len() >= self.limit
            && let Some((_, victim)) = self.order.pop_first()
        {
            self.of[victim as usize] = None;
        }
        self.order.insert((place, page));
        before.is_some()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Remote,
    Resident,
    Staged,
    /// On the servers, and in staging until its place there is another's.
    Spare,
}

/// The pager's own policy and budget, in one shard.
pub(super) struct Outram {
    pub(super) foresight: Foresight,
    policy: ThreeQueues,
    budget: Budget,
    staging: u64,
    run_pages: u64,
    places: Vec<Place>,
    /// Runs that left, and the time at which their staging is free.
    leaving: VecDeque<(u64, PageRun)>,
    staged: u64,
    /// Pages that became spare, and when, oldest first; some are so no longer.
    spares: VecDeque<(u32, u64)>,
    /// When each did last.
    spare_since: Vec<u64>,
    spare: u64,
    /// Counts what is fetched, a miss [`AHEAD_A_MISS`] times.
    time: u64,
}

impl Outram {
    pub(super) fn new(trace: &Trace, limit: usize, foresight: Foresight) -> Self {
        let size = PageSize::BASE;
        let bytes = |pages: usize| pages as u64 * size.bytes();
        let range = PageRun {
            first: PageIndex(0),
            count: trace.pages as u32,
        };
        let sizes = Sizes::of(bytes(limit), bytes(trace.pages), size);
        Self {
            foresight,
            policy: ThreeQueues::new(range, Arc::default()),
            budget: Budget::new(sizes.budget_pages, size),
            staging: sizes.staging_pages.into(),
            run_pages: size.pages_in(RUN_BYTES, 1),
            places: vec![Place::Remote; trace.pages],
            leaving: VecDeque::new(),
            staged: 0,
            spares: VecDeque::new(),
            spare_since: vec![0; trace.pages],
            spare: 0,
            time: 0,
        }
    }

    /// What left long enough ago is on the servers, but for what came back meanwhile.
    fn write_back(&mut self, all: bool) {
        while let Some((at, run)) = self.leaving.front().copied()
            && (all || at <= self.time)
        {
            self.leaving.pop_front();
            for page in run.pages() {
                let place = &mut self.places[page.0 as usize];
                if *place == Place::Staged {
                    *place = Place::Spare;
                    self.staged -= 1;
                    self.spare += 1;
                    self.spare_since[page.0 as usize] = at;
                    self.spares.push_back((page.0, at));
                }
            }
        }
    }

    /// Fetches what is expected, as far as there is room.
    fn fetch_behind(&mut self, behind: Vec<(PageIndex, Reason)>) {
        for (next, reason) in behind {
            let place = self.places[next.0 as usize];
            if !matches!(place, Place::Remote | Place::Spare) || !self.foresight.has_left(next) {
                continue;
            }
            if self.budget.spare() == 0 || !self.budget.acquire(1) {
                return;
            }
            match place {
                Place::Spare => self.spare -= 1,
                _ => {
                    self.time += 1;
                    self.foresight.note_fetched(next, reason);
                }
            }
            self.places[next.0 as usize] = Place::Resident;
            self.policy.arrived(next, Arrival::New);
            self.write_back(false);
            self.make_room();
        }
    }

    fn make_room(&mut self) {
        loop {
            let most = self.budget.shortage().min(self.run_pages);
            let most = most.min(self.staging - self.staged) as u32;
            if most == 0 {
                return;
            }
            let due = self.policy.due();
            let run = due.and_then(|due| self.policy.choose(due, most, 1, &mut |_| true));
            let Some(run) = run else { return };
            for page in run.pages() {
                self.places[page.0 as usize] = Place::Staged;
            }
            self.staged += u64::from(run.count);
            while self.staged + self.spare > self.staging {
                let (page, since) = self.spares.pop_front().expect("one for each that is spare");
                let place = &mut self.places[page as usize];
                if *place == Place::Spare && self.spare_since[page as usize] == since {
                    *place = Place::Remote;
                    self.spare -= 1;
                }
            }
            self.budget.release(u64::from(run.count));
            self.leaving
                .push_back((self.time + WRITE_BACK_MISSES * AHEAD_A_MISS, run));
            self.foresight.note_left(run);
        }
    }
}

impl Cache for Outram {
    fn uses(&mut self, _: usize, page: u32) -> bool {
        let place = self.places[page as usize];
        if place == Place::Resident {
            self.foresight.note_used(page);
            return true;
        }
        if place == Place::Remote {
            self.time += AHEAD_A_MISS;
        }
        self.write_back(false);
        // It may have been written back just now.
        let place = self.places[page as usize];
        if !self.budget.acquire(1) {
            // Whoever faults waits for staging to be written back.
            self.write_back(true);
            self.make_room();
            assert!(self.budget.acquire(1), "there is room");
        }
        let arrival = match place {
            Place::Staged => {
                self.staged -= 1;
                Arrival::Refault
            }
            Place::Spare => {
                self.spare -= 1;
                Arrival::Refault
            }
            _ => Arrival::New,
        };
        // As the pager does it: what comes out of staging is no miss, but goes on with a stream.
        let behind = match place {
            Place::Remote | Place::Spare => self.foresight.behind(page, &mut self.policy),
            _ => Vec::new(),
        };
        self.places[page as usize] = Place::Resident;
        self.policy.arrived(PageIndex(page), arrival);
        self.make_room();
        self.fetch_behind(behind);
        matches!(place, Place::Staged | Place::Spare)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::split_mix::SplitMix;

    fn trace(pages: usize, uses: Vec<u32>) -> Trace {
        Trace {
            pages,
            uses,
            prepared: 0,
        }
    }

    #[test]
    fn the_textbooks_reference_string_has_the_textbooks_misses() {
        // Silberschatz, Operating System Concepts, on page replacement.
        let uses = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1];
        let trace = trace(8, uses.to_vec());
        assert_eq!(count(&trace, &mut Fifo::new(&trace, 3)), 15);
        assert_eq!(count(&trace, &mut Ordered::lru(&trace, 3)), 12);
        assert_eq!(count(&trace, &mut Ordered::opt(&trace, 3)), 9);
    }

    #[test]
    fn what_fits_is_missed_once() {
        let uses = (0..3).flat_map(|_| 0..1000).collect();
        let misses = misses(&trace(1000, uses), 1000);
        let all = [
            misses.fifo,
            misses.clock,
            misses.outram,
            misses.lru,
            misses.opt,
        ];
        assert_eq!(all, [1000; 5]);
    }

    #[test]
    fn going_round_more_than_fits_has_lru_miss_always_and_opt_seldom() {
        let uses = (0..10).flat_map(|_| 0..6000).collect();
        let misses = misses(&trace(6000, uses), 5000);
        assert_eq!(
            (misses.lru, misses.clock, misses.fifo),
            (60_000, 60_000, 60_000)
        );
        assert!(misses.opt < 20_000 && misses.outram <= 60_000, "{misses:?}");
    }

    #[test]
    fn nobody_is_better_than_opt_and_preparation_does_not_count() {
        let mut random = SplitMix(3);
        let uses = (0..60_000).map(|_| (random.next() % 8192) as u32);
        let uses = uses.collect();
        let mut trace = trace(8192, uses);
        let all = misses(&trace, 4096);
        assert!(
            [all.fifo, all.clock, all.outram, all.lru]
                .iter()
                .all(|policy| *policy >= all.opt)
        );
        trace.prepared = 30_000;
        assert!(misses(&trace, 4096).lru < all.lru);
    }
}
