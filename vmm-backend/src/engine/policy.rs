//! Which pages to evict. Separate from how: a policy sees pages come, and names runs to go.

mod queue;

use std::sync::Arc;

use queue::Queue;

use super::ages::Clock;
use super::pace::block_of;
use super::{PageIndex, PageRun};

/// Why a page came into the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Its first time, or back after a long while.
    New,
    /// Back out of staging: evicted too early.
    Refault,
}

/// Chooses victims among the pages of a shard.
pub trait Policy: Send {
    /// A page became resident.
    fn arrived(&mut self, page: PageIndex, arrival: Arrival);
    /// A page is no longer there for another reason than being chosen.
    fn departed(&mut self, page: PageIndex);
    /// The number of the arrival of the page that would go next.
    fn oldest(&mut self) -> Option<u32>;
    /// The next run of at most `most` pages, all of which `may_go` accepts; `None` where no page
    /// may go. Pages named are forgotten until they arrive again. `granule` pages, a power of two, are
    /// meant to go together.
    fn choose(
        &mut self,
        most: u32,
        granule: u32,
        may_go: &mut dyn FnMut(PageIndex) -> bool,
    ) -> Option<PageRun>;
}

/// Two first-in-first-out queues: pages that came back out of staging wait in a second one, which
/// is drawn from only while it is longer than its share. First-in-first-out plus refaults is the
/// portable signal where reads cannot be seen (see Memtrade's victim cache and S3-FIFO).
///
/// The share follows what comes back, as ARC's does (Megiddo and Modha, 2003): a page that had been
/// in the second queue says that this one is too short, one that had not, that the first is. With a share
/// that stays, hot pages that do not fit into it go round in it for ever, while the first queue keeps pages
/// that nobody uses.
///
/// A victim takes its neighbours of about the same age along, for range operations cost a tenth
/// of single ones.
#[derive(Debug)]
pub struct TwoQueues {
    first: PageIndex,
    /// Per page, the arrival it was queued at, or which queue it left ([`LEFT_FRESH`], [`LEFT_PROVEN`]).
    /// The lowest bit of either names the queue: set for `proven`.
    arrivals: Vec<u32>,
    /// Pages that are queued at an arrival of theirs.
    present: usize,
    clock: Arc<Clock>,
    fresh: Queue,
    proven: Queue,
    /// Of all that is queued, what may be in `proven`.
    proven_share: f64,
}

/// Is not there; has not been in `proven` since it was there last, if ever.
const LEFT_FRESH: u32 = 0;
/// Was evicted out of `proven`.
const LEFT_PROVEN: u32 = 1;

/// What may be in `proven`, of all that is queued: at first and at the least, and at the most.
const SHARE_LEAST: f64 = 0.1;
const SHARE_MOST: f64 = 0.9;
/// Far fewer pages leave `proven` than leave `fresh`, so one that comes back says more. (`bench policies`: with half
/// of it key-value stores miss more, with four times of it what moves on does.)
const PROVEN_COUNTS: f64 = 8.0;

/// Of pages that are there, the share that may be queued beside them though they departed or arrived again,
/// and how many may be in any case.
const STALE_SHARE: usize = 4;
const STALE_FEW: usize = 8;

fn is_queued(arrival: u32) -> bool {
    arrival >= Clock::FIRST
}

impl TwoQueues {
    /// A policy for the pages of `range`, whose arrivals `clock` numbers.
    pub fn new(range: PageRun, clock: Arc<Clock>) -> Self {
        Self {
            first: range.first,
            arrivals: vec![LEFT_FRESH; range.count as usize],
            present: 0,
            clock,
            fresh: Queue::default(),
            proven: Queue::default(),
            proven_share: SHARE_LEAST,
        }
    }

    fn arrival(&self, page: PageIndex) -> u32 {
        self.arrivals[(page.0 - self.first.0) as usize]
    }

    fn set_arrival(&mut self, page: PageIndex, arrival: u32) {
        let place = &mut self.arrivals[(page.0 - self.first.0) as usize];
        self.present += usize::from(!is_queued(*place) && is_queued(arrival));
        self.present -= usize::from(is_queued(*place) && !is_queued(arrival));
        *place = arrival;
    }

    /// The queue to draw from.
    fn due(&mut self) -> &mut Queue {
        let queued = self.proven.len() + self.fresh.len();
        let is_long = self.proven.len() as f64 > self.proven_share * queued as f64;
        match is_long || self.fresh.is_empty() {
            true => &mut self.proven,
            false => &mut self.fresh,
        }
    }

    /// What goes next, still in its queue; drops what departed or arrived again since.
    fn peek_oldest(&mut self) -> Option<(PageIndex, u32)> {
        loop {
            let (page, arrival) = self.due().front()?;
            if self.arrival(page) == arrival {
                return Some((page, arrival));
            }
            self.due().pop_front();
        }
    }

    fn pop_oldest(&mut self) -> Option<(PageIndex, u32)> {
        let oldest = self.peek_oldest()?;
        self.due().pop_front();
        Some(oldest)
    }

    /// Whether a neighbour is old enough to go along with a page that arrived at `oldest`: in the
    /// older quarter of what came since.
    fn goes_along(&self, page: PageIndex, oldest: u32) -> bool {
        let arrival = self.arrival(page);
        let span = self.clock.now().wrapping_sub(oldest);
        // Every other number is an arrival's.
        is_queued(arrival) && arrival.wrapping_sub(oldest) <= span / 4 + 2 * 64
    }

    /// A page came back out of staging: gives the queue that it had left more room, at the other's cost.
    fn adapt(&mut self, had_left: u32) {
        let page = 1.0 / self.present as f64;
        let change = match had_left {
            LEFT_PROVEN => PROVEN_COUNTS * page,
            _ => -page,
        };
        self.proven_share = (self.proven_share + change).clamp(SHARE_LEAST, SHARE_MOST);
    }

    /// Drops some of what departed or arrived again since, before it outgrows what is there: each page
    /// is queued once at most. The range may be far larger than what is ever plugged of it.
    fn tidy(&mut self) {
        let queued = self.fresh.len() + self.proven.len();
        if queued <= self.present + self.present / STALE_SHARE + STALE_FEW {
            return;
        }
        let (first, arrivals) = (self.first.0, &self.arrivals);
        let is_current = |page: PageIndex, arrival| arrivals[(page.0 - first) as usize] == arrival;
        self.fresh.tidy(is_current);
        self.proven.tidy(is_current);
    }

    /// Places in the queues, also of pages that are there no longer.
    #[cfg(test)]
    pub(super) fn queued(&self) -> usize {
        self.fresh.len() + self.proven.len()
    }

    fn in_range(&self, page: u32) -> bool {
        page >= self.first.0 && ((page - self.first.0) as usize) < self.arrivals.len()
    }

    /// Has a run grow, up and then down, by neighbours that are wanted, to `most` pages.
    fn extend(&self, run: &mut PageRun, most: u32, mut wanted: impl FnMut(PageIndex) -> bool) {
        while run.count < most && self.in_range(run.end().0) && wanted(run.end()) {
            run.count += 1;
        }
        while let Some(before) = run.first.0.checked_sub(1)
            && run.count < most
            && self.in_range(before)
            && wanted(PageIndex(before))
        {
            run.first = PageIndex(before);
            run.count += 1;
        }
    }
}

impl Policy for TwoQueues {
    fn arrived(&mut self, page: PageIndex, arrival: Arrival) {
        let number = self.clock.tick() | u32::from(arrival == Arrival::Refault);
        let had_left = self.arrival(page);
        self.set_arrival(page, number);
        match arrival {
            Arrival::New => self.fresh.push_back(page, number),
            Arrival::Refault => {
                self.adapt(had_left);
                self.proven.push_back(page, number);
            }
        }
        self.tidy();
    }

    fn departed(&mut self, page: PageIndex) {
        self.set_arrival(page, LEFT_FRESH);
    }

    fn oldest(&mut self) -> Option<u32> {
        self.peek_oldest().map(|(_, arrival)| arrival)
    }

    fn choose(
        &mut self,
        most: u32,
        granule: u32,
        may_go: &mut dyn FnMut(PageIndex) -> bool,
    ) -> Option<PageRun> {
        // Pages that may not go now (pinned) are set aside, so that none of them hides one that
        // may, and queue up again.
        let mut set_aside = Vec::new();
        let found = loop {
            match self.pop_oldest() {
                Some((page, _)) if !may_go(page) => set_aside.push(page),
                found => break found,
            }
        };
        for page in set_aside {
            self.arrived(page, Arrival::New);
        }
        let (victim, oldest) = found?;
        let block = block_of(victim, granule);
        let of_block = |page: PageIndex| block.contains(page) && is_queued(self.arrival(page));
        let mut run = PageRun::single(victim);
        // What is moved with it comes first, whatever its age.
        self.extend(&mut run, most, |page| of_block(page) && may_go(page));
        self.extend(&mut run, most, |page| {
            self.goes_along(page, oldest) && may_go(page)
        });
        for page in run.pages() {
            self.set_arrival(page, self.arrival(page) & LEFT_PROVEN);
        }
        Some(run)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    fn policy(pages: u32) -> TwoQueues {
        let range = PageRun {
            first: PageIndex(100),
            count: pages,
        };
        TwoQueues::new(range, Arc::default())
    }

    #[test]
    fn the_oldest_goes_first_with_its_neighbours() {
        let mut policy = policy(1000);
        for page in [110, 111, 112, 500] {
            policy.arrived(PageIndex(page), Arrival::New);
        }
        let run = policy.choose(64, 1, &mut |_| true);
        assert_eq!(
            run,
            Some(PageRun {
                first: PageIndex(110),
                count: 3
            })
        );
        assert_eq!(
            policy.choose(64, 1, &mut |_| true),
            Some(PageRun::single(PageIndex(500)))
        );
        assert_eq!(policy.choose(64, 1, &mut |_| true), None);
    }

    #[test]
    fn pages_that_may_not_go_stay_queued() {
        let mut policy = policy(10);
        policy.arrived(PageIndex(101), Arrival::New);
        assert_eq!(policy.choose(1, 1, &mut |_| false), None);
        assert_eq!(
            policy.choose(1, 1, &mut |_| true),
            Some(PageRun::single(PageIndex(101)))
        );
    }

    #[test]
    fn refaulted_pages_outlive_fresh_ones_while_they_are_the_fewer() {
        let mut policy = policy(1000);
        policy.arrived(PageIndex(100), Arrival::Refault);
        let fresh: Vec<u32> = (0..12).map(|number| 300 + 10 * number).collect();
        for page in &fresh {
            policy.arrived(PageIndex(*page), Arrival::New);
        }
        for page in fresh[..4].iter().chain(&[100]).chain(&fresh[4..]) {
            let chosen = policy.choose(1, 1, &mut |_| true);
            assert_eq!(chosen, Some(PageRun::single(PageIndex(*page))));
        }
    }

    /// Uses pages in turn where 30 may be there, and of those that left the last 16 come back out of
    /// staging; how many were not there.
    fn misses(policy: &mut TwoQueues, left: &mut VecDeque<PageIndex>, pages: PageRun) -> usize {
        let mut misses = 0;
        for page in pages.pages() {
            if is_queued(policy.arrival(page)) {
                continue;
            }
            misses += 1;
            let staged = left.iter().rev().take(16).any(|left| *left == page);
            left.retain(|left| *left != page);
            let arrival = if staged {
                Arrival::Refault
            } else {
                Arrival::New
            };
            if policy.present == 30 {
                let victim = policy.choose(1, 1, &mut |_| true).expect("a victim");
                left.push_back(victim.first);
            }
            policy.arrived(page, arrival);
        }
        misses
    }

    #[test]
    fn pages_in_use_take_the_place_of_what_nobody_uses() {
        let (mut policy, mut left) = (policy(1000), VecDeque::new());
        let run = |first, count| PageRun {
            first: PageIndex(first),
            count,
        };
        misses(&mut policy, &mut left, run(200, 20));
        misses(&mut policy, &mut left, run(300, 20));
        let rounds = (0..10).map(|_| misses(&mut policy, &mut left, run(200, 20)));
        assert_eq!(rounds.last(), Some(0));
    }

    #[test]
    fn what_is_moved_together_goes_together_whatever_its_age() {
        let mut policy = policy(10_000);
        policy.arrived(PageIndex(510), Arrival::New);
        for page in 1000..2000 {
            policy.arrived(PageIndex(page), Arrival::New);
        }
        for page in [505, 508, 509, 511, 512] {
            policy.arrived(PageIndex(page), Arrival::New);
        }
        let run = policy.choose(64, 8, &mut |page| page != PageIndex(508));
        assert_eq!(
            run,
            Some(PageRun {
                first: PageIndex(509),
                count: 3
            })
        );
    }

    /// Bytes of the queues for each page that is there.
    fn queue_bytes(policy: &TwoQueues) -> f64 {
        (policy.fresh.bytes() + policy.proven.bytes()) as f64 / policy.present as f64
    }

    /// 4 GiB that are there: filled, then made room in and given back.
    #[test]
    fn a_page_that_is_there_costs_eight_bytes_beside_its_arrival() {
        const PAGES: u32 = 1 << 20;
        let mut policy = policy(PAGES);
        let spread = |number: u32| PageIndex(100 + number.wrapping_mul(0x9e37_79b1) % PAGES);
        for number in 0..PAGES {
            policy.arrived(spread(number), Arrival::New);
        }
        assert_eq!(policy.present, PAGES as usize);
        assert!(queue_bytes(&policy) < 6.2, "{}", queue_bytes(&policy));
        let mut most = 0.0f64;
        for number in 0..2 * PAGES {
            let page = spread(number);
            match number % 3 {
                0 => policy.departed(page),
                1 => drop(policy.choose(2, 1, &mut |_| true)),
                _ => {}
            }
            if !is_queued(policy.arrival(page)) {
                let arrivals = [Arrival::New, Arrival::New, Arrival::Refault];
                policy.arrived(page, arrivals[number as usize / 5 % 3]);
            }
            if number % 1024 == 0 {
                most = most.max(queue_bytes(&policy));
            }
        }
        assert!(policy.present as u32 > PAGES / 2, "{}", policy.present);
        assert!(most < 8.0, "{most} bytes for each page");
    }

    #[test]
    fn a_run_stays_within_the_shard() {
        let mut policy = policy(2);
        policy.arrived(PageIndex(100), Arrival::New);
        policy.arrived(PageIndex(101), Arrival::New);
        assert_eq!(
            policy.choose(64, 1, &mut |_| true).map(|run| run.count),
            Some(2)
        );
    }
}
