//! Which pages to evict. Separate from how: a policy sees pages come, and names runs to go.

mod queue;
mod returns;
mod together;

use std::sync::Arc;

use queue::Queue;
use returns::{KINDS, YOUNG_SHARE};
pub use returns::{Kind, Returns};
pub use together::{BLOCK, Together};
use together::{Reunions, Sample};

use super::pace::block_of;
use super::{PageIndex, PageRun};

/// Why a page came into the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Its first time, or back from elsewhere.
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
    /// The pages of its block that left together with one which somebody waits for, where they are likely to be wanted
    /// as well; [`BLOCK`] says how large one is.
    fn left_with(&mut self, page: PageIndex) -> Together;
    /// The kind of page that should go next, in any shard; `None` where there is no page.
    fn due(&self) -> Option<Kind>;
    /// The number of the arrival of the page of a kind that would go next, with bits of other meaning below
    /// [`Returns::STEP`], of which some are set.
    fn oldest(&mut self, kind: Kind) -> Option<u32>;
    /// The next run of at most `most` pages, all of which `may_go` accepts, of the kind that is due if there is
    /// one; `None` where no page may go. Pages named are gone until they arrive again. `granule` pages, a power
    /// of two, are meant to go together.
    fn choose(
        &mut self,
        due: Kind,
        most: u32,
        granule: u32,
        may_go: &mut dyn FnMut(PageIndex) -> bool,
    ) -> Option<PageRun>;
}

/// Three first-in-first-out queues, one for each [`Kind`] of page. Which of them a page goes from is decided by what
/// comes back of the pages that left them ([`Returns`]); a fault is the only signal where reads cannot be seen.
///
/// A page comes in as a young one, and settles as others come; one that is back soon after it had left goes to those
/// that are proven. Among settled pages the oldest goes first. What goes round through more memory than is
/// there uses the oldest ones next, and finds none of them: then it is the young ones that come back the latest, so
/// that they go and the others stay. Where what is used moves on, it is the settled ones that never come back.
/// (Of policies that see uses, 2Q and S3-FIFO have such queues; DIP and LIRS keep a part of what does not fit.)
///
/// A victim takes its neighbours of about the same age along, for range operations cost a tenth
/// of single ones.
#[derive(Debug)]
pub struct ThreeQueues {
    first: PageIndex,
    /// Per page, the number of its arrival, or of when it left: with its kind, and [`IS_HERE`] or not. 0 where it never
    /// was here, or was given back.
    marks: Vec<u32>,
    /// Pages that are here, by kind.
    present: [usize; KINDS],
    returns: Arc<Returns>,
    /// By kind.
    queues: [Queue; KINDS],
    reunions: Reunions,
}

/// Of a page's mark: it is here.
const IS_HERE: u32 = 1 << 2;
/// Of a page's mark: its kind.
const KIND: u32 = IS_HERE - 1;
const _: () = assert!(Returns::STEP > IS_HERE | KIND);

/// A page that was out while less than this share of what is here arrived came back soon.
const SOON: f64 = 0.3;

/// Young pages that may be in a shard beside their share, of so many pages, before they settle.
const YOUNG_MORE: usize = 64;

/// Arrivals by which neighbours may be younger, whatever their age.
const ALONG_ARRIVALS: u32 = 64;

/// Of pages that are there, the share that may be queued beside them though they departed or arrived again,
/// and how many may be in any case.
const STALE_SHARE: usize = 4;
const STALE_FEW: usize = 8;

/// The number of an arrival, or of when a page left.
fn number(mark: u32) -> u32 {
    mark & !(IS_HERE | KIND)
}

fn is_here(mark: u32) -> bool {
    mark & IS_HERE != 0
}

/// Nothing where it is not here.
fn kind_here(mark: u32) -> Option<Kind> {
    kind(mark).filter(|_| is_here(mark))
}

/// Nothing where it was never here.
fn kind(mark: u32) -> Option<Kind> {
    Kind::ALL
        .into_iter()
        .find(|kind| *kind as u32 == mark & KIND)
}

impl ThreeQueues {
    /// A policy for the pages of `range`, which shares `returns` with all other shards.
    pub fn new(range: PageRun, returns: Arc<Returns>) -> Self {
        Self {
            first: range.first,
            marks: vec![0; range.count as usize],
            present: [0; KINDS],
            returns,
            queues: Default::default(),
            reunions: Reunions::default(),
        }
    }

    fn mark(&self, page: PageIndex) -> u32 {
        self.marks[(page.0 - self.first.0) as usize]
    }

    /// Marks a page, and counts what is here, in this shard and in all.
    fn set_mark(&mut self, page: PageIndex, mark: u32) {
        let place = &mut self.marks[(page.0 - self.first.0) as usize];
        let before = kind_here(std::mem::replace(place, mark));
        let now = kind_here(mark);
        if now == before {
            return;
        }
        if let Some(kind) = now {
            self.present[kind.index()] += 1;
            self.returns.note_here(kind);
        }
        if let Some(kind) = before {
            self.present[kind.index()] -= 1;
            self.returns.note_gone(kind);
        }
    }

    /// Pages that are here.
    fn present(&self) -> usize {
        self.present.iter().sum()
    }

    fn queue(&mut self, kind: Kind) -> &mut Queue {
        &mut self.queues[kind.index()]
    }

    /// What goes next of a kind, still in its queue; drops what departed or arrived again since.
    fn peek_oldest(&mut self, kind: Kind) -> Option<(PageIndex, u32)> {
        loop {
            let (page, mark) = self.queue(kind).front()?;
            if self.mark(page) == mark {
                return Some((page, mark));
            }
            self.queue(kind).pop_front();
        }
    }

    fn pop_oldest(&mut self, kind: Kind) -> Option<(PageIndex, u32)> {
        let oldest = self.peek_oldest(kind)?;
        self.queue(kind).pop_front();
        Some(oldest)
    }

    /// Whether a neighbour is old enough to go along with a page that arrived at `oldest`: in the
    /// older quarter of what came since.
    fn goes_along(&self, page: PageIndex, oldest: u32) -> bool {
        let (mark, oldest) = (self.mark(page), number(oldest));
        let span = self.returns.now().wrapping_sub(oldest);
        let younger = number(mark).wrapping_sub(oldest);
        is_here(mark) && younger <= span / 4 + ALONG_ARRIVALS * Returns::STEP
    }

    /// The kind that a page is from now on which comes back, or comes for the first time.
    fn kind_of(&self, before: u32, now: u32, arrival: Arrival) -> Kind {
        let Some(left_as) = kind(before) else {
            return Kind::Young;
        };
        let arrivals = now.wrapping_sub(before) / Returns::STEP;
        let turns = self.returns.note_returned(left_as, arrivals);
        match arrival == Arrival::Refault || turns < SOON {
            true => Kind::Proven,
            false => Kind::Young,
        }
    }

    /// Has young pages settle that others have come after.
    fn settle(&mut self) {
        let most = self.present() / (YOUNG_SHARE as usize / 2) + YOUNG_MORE;
        while self.present[Kind::Young.index()] > most
            && let Some((page, mark)) = self.pop_oldest(Kind::Young)
        {
            let mark = mark & !KIND | Kind::Settled as u32;
            self.set_mark(page, mark);
            self.queue(Kind::Settled).push_back(page, mark);
        }
    }

    /// Drops some of what departed or arrived again since, before it outgrows what is there: each page
    /// is queued once at most. The range may be far larger than what is ever plugged of it.
    fn tidy(&mut self) {
        let present = self.present();
        if self.queued() <= present + present / STALE_SHARE + STALE_FEW {
            return;
        }
        let (first, marks) = (self.first.0, &self.marks);
        let is_current = |page: PageIndex, mark| marks[(page.0 - first) as usize] == mark;
        for queue in &mut self.queues {
            queue.tidy(is_current);
        }
    }

    /// Places in the queues, also of pages that are there no longer.
    pub(super) fn queued(&self) -> usize {
        self.queues.iter().map(Queue::len).sum()
    }

    fn in_range(&self, page: u32) -> bool {
        page >= self.first.0 && ((page - self.first.0) as usize) < self.marks.len()
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

impl Policy for ThreeQueues {
    fn arrived(&mut self, page: PageIndex, arrival: Arrival) {
        let (before, now) = (self.mark(page), self.returns.tick());
        let kind = kind_here(before).unwrap_or_else(|| self.kind_of(before, now, arrival));
        let mark = now | IS_HERE | kind as u32;
        self.set_mark(page, mark);
        self.queue(kind).push_back(page, mark);
        self.settle();
        self.tidy();
        if Reunions::samples(page) {
            self.reunions.note_arrived(page, self.present());
        }
    }

    fn left_with(&mut self, page: PageIndex) -> Together {
        let (left, is_sample) = (self.mark(page), Reunions::samples(page));
        if left == 0 || is_here(left) || !(is_sample || self.reunions.pay()) {
            return Together::NONE;
        }
        let together = Together::with(page, |other| {
            let mark = self.in_range(other.0).then(|| self.mark(other));
            mark.is_some_and(|mark| mark != 0 && !is_here(mark) && number(mark) == number(left))
        });
        if !is_sample {
            return together;
        }
        if let Some(mate) = together.pages().next() {
            self.reunions.watch(mate, Sample::Mate);
        }
        Together::NONE
    }

    fn departed(&mut self, page: PageIndex) {
        self.set_mark(page, 0);
    }

    fn due(&self) -> Option<Kind> {
        self.returns.due()
    }

    fn oldest(&mut self, kind: Kind) -> Option<u32> {
        self.peek_oldest(kind).map(|(_, mark)| mark)
    }

    fn choose(
        &mut self,
        due: Kind,
        most: u32,
        granule: u32,
        may_go: &mut dyn FnMut(PageIndex) -> bool,
    ) -> Option<PageRun> {
        // Pages that may not go now (pinned) are set aside, so that none of them hides one that
        // may, and queue up again.
        let mut set_aside = Vec::new();
        let others = Kind::ALL.into_iter().filter(|kind| *kind != due);
        let found = std::iter::once(due).chain(others).find_map(|kind| {
            loop {
                match self.pop_oldest(kind)? {
                    (page, _) if !may_go(page) => set_aside.push(page),
                    found => return Some(found),
                }
            }
        });
        for page in set_aside {
            self.arrived(page, Arrival::New);
        }
        let (victim, oldest) = found?;
        let block = block_of(victim, granule);
        let of_block = |page: PageIndex| block.contains(page) && is_here(self.mark(page));
        let mut run = PageRun::single(victim);
        // What is moved with it comes first, whatever its age.
        self.extend(&mut run, most, |page| of_block(page) && may_go(page));
        self.extend(&mut run, most, |page| {
            self.goes_along(page, oldest) && may_go(page)
        });
        self.returns.note_turn(due, run.count);
        let now = self.returns.now();
        for page in run.pages() {
            let Some(kind) = kind(self.mark(page)) else {
                continue;
            };
            self.set_mark(page, now | kind as u32);
            self.returns.note_evicted(kind);
            if page.0.is_multiple_of(BLOCK) && Reunions::samples(page) {
                self.reunions.watch(page, Sample::Any);
            }
        }
        Some(run)
    }
}

#[cfg(test)]
impl ThreeQueues {
    /// As after pages that left together came back together for long.
    pub(super) fn trust_reunions(&mut self) {
        self.reunions = Reunions::proven();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    fn policy(pages: u32) -> ThreeQueues {
        let range = PageRun {
            first: PageIndex(100),
            count: pages,
        };
        ThreeQueues::new(range, Arc::default())
    }

    fn choose(
        policy: &mut ThreeQueues,
        most: u32,
        granule: u32,
        may_go: &mut dyn FnMut(PageIndex) -> bool,
    ) -> Option<PageRun> {
        policy.choose(policy.due()?, most, granule, may_go)
    }

    #[test]
    fn the_oldest_goes_first_with_its_neighbours() {
        let mut policy = policy(1000);
        for page in [110, 111, 112, 500] {
            policy.arrived(PageIndex(page), Arrival::New);
        }
        let run = choose(&mut policy, 64, 1, &mut |_| true);
        assert_eq!(
            run,
            Some(PageRun {
                first: PageIndex(110),
                count: 3
            })
        );
        assert_eq!(
            choose(&mut policy, 64, 1, &mut |_| true),
            Some(PageRun::single(PageIndex(500)))
        );
        assert_eq!(choose(&mut policy, 64, 1, &mut |_| true), None);
    }

    /// The first blocks that are, or are not, of the sample.
    fn blocks(of_sample: bool) -> impl Iterator<Item = u32> {
        let starts = (104..).step_by(BLOCK as usize);
        starts.filter(move |start| Reunions::samples(PageIndex(*start)) == of_sample)
    }

    /// Has pages come and leave, all by one run.
    fn leave(policy: &mut ThreeQueues, pages: std::ops::Range<u32>) {
        for page in pages.clone() {
            policy.arrived(PageIndex(page), Arrival::New);
        }
        let run = choose(policy, 64, 1, &mut |page| pages.contains(&page.0));
        assert_eq!(run.map(|run| run.count), Some(pages.len() as u32));
    }

    #[test]
    fn what_left_with_a_page_and_is_not_back_is_named_where_that_pays() {
        let mut policy = policy(10_000);
        let start = blocks(false).next().expect("most are not");
        leave(&mut policy, start..start + 6);
        // This one left by itself.
        leave(&mut policy, start + 7..start + 8);
        let named = |policy: &mut ThreeQueues, page: u32| {
            let pages = policy.left_with(PageIndex(page)).pages();
            pages.map(|page| page.0 - start).collect::<Vec<_>>()
        };
        assert_eq!(
            named(&mut policy, start + 2),
            [0; 0],
            "nothing is known yet"
        );
        policy.trust_reunions();
        assert_eq!(named(&mut policy, start + 2), [0, 1, 3, 4, 5]);
        policy.arrived(PageIndex(start + 2), Arrival::New);
        assert_eq!(named(&mut policy, start + 3), [0, 1, 4, 5]);
        policy.departed(PageIndex(start + 4));
        assert_eq!(named(&mut policy, start + 3), [0, 1, 5]);
        assert_eq!(named(&mut policy, start + 7), [0; 0]);
        assert_eq!(named(&mut policy, start + 6), [0; 0], "it never came");
        assert_eq!(named(&mut policy, start + 2), [0; 0], "it is here");
    }

    #[test]
    fn nothing_comes_along_in_the_sample_and_what_becomes_of_it_is_seen() {
        let mut policy = policy(1_000_000);
        policy.trust_reunions();
        for round in 0..3 {
            // What is here, so that soon is a while.
            for other in 0..4_000 {
                policy.arrived(PageIndex(500_000 + round * 4_000 + other), Arrival::New);
            }
            let starts: Vec<u32> = blocks(true).skip(round as usize * 200).take(200).collect();
            for start in &starts {
                leave(&mut policy, *start..start + BLOCK);
            }
            for start in starts {
                assert!(policy.left_with(PageIndex(start)).is_empty());
                policy.arrived(PageIndex(start), Arrival::New);
            }
        }
        assert!(!policy.reunions.pay(), "none but one of each block came");
    }

    #[test]
    fn pages_that_may_not_go_stay_queued() {
        let mut policy = policy(10);
        policy.arrived(PageIndex(101), Arrival::New);
        assert_eq!(choose(&mut policy, 1, 1, &mut |_| false), None);
        assert_eq!(
            choose(&mut policy, 1, 1, &mut |_| true),
            Some(PageRun::single(PageIndex(101)))
        );
    }

    /// A guest of which so many pages may be there; the last 32 that left are in staging.
    struct Guest {
        policy: ThreeQueues,
        left: VecDeque<PageIndex>,
        most: usize,
    }

    impl Guest {
        fn new(most: usize) -> Self {
            Self {
                policy: policy(100_000),
                left: VecDeque::new(),
                most,
            }
        }

        /// Uses pages in turn; how many were not there.
        fn misses(&mut self, pages: impl Iterator<Item = u32>) -> usize {
            pages
                .filter(|page| !self.is_there(PageIndex(100 + page)))
                .count()
        }

        fn is_there(&mut self, page: PageIndex) -> bool {
            if is_here(self.policy.mark(page)) {
                return true;
            }
            let staged = self.left.contains(&page);
            self.left.retain(|left| *left != page);
            if self.policy.present() == self.most {
                let victim = choose(&mut self.policy, 1, 1, &mut |_| true).expect("a victim");
                self.left.push_back(victim.first);
                if self.left.len() > 32 {
                    self.left.pop_front();
                }
            }
            let arrival = if staged {
                Arrival::Refault
            } else {
                Arrival::New
            };
            self.policy.arrived(page, arrival);
            false
        }
    }

    #[test]
    fn of_what_goes_round_through_more_than_fits_a_part_stays() {
        let mut guest = Guest::new(1000);
        let rounds: Vec<usize> = (0..12).map(|_| guest.misses(0..1500)).collect();
        // Nobody misses fewer than 500 of a round; first in, first out misses all.
        let later: usize = rounds[2..].iter().sum();
        assert!(later < 8000, "{rounds:?}");
    }

    #[test]
    fn what_is_used_no_longer_makes_place_for_what_is() {
        let mut guest = Guest::new(1000);
        for _ in 0..12 {
            guest.misses(0..1500);
        }
        let moved: Vec<usize> = (0..12).map(|_| guest.misses(5000..5900)).collect();
        assert_eq!(moved[11], 0, "{moved:?}");
    }

    #[test]
    fn what_is_used_often_stays_beside_what_is_used_once() {
        let mut guest = Guest::new(1000);
        let mut hot = 0;
        for round in 0..40 {
            hot = guest.misses(0..600);
            guest.misses((0..400).map(|page| 10_000 + 400 * round + page));
        }
        assert!(hot < 200, "{hot} of 600 missed");
    }

    #[test]
    fn all_shards_count_together() {
        let returns = Arc::<Returns>::default();
        let range = |first| PageRun {
            first: PageIndex(first),
            count: 1000,
        };
        let [mut one, mut other] =
            [0, 1000].map(|first| ThreeQueues::new(range(first), Arc::clone(&returns)));
        for page in 0..500 {
            one.arrived(PageIndex(page), Arrival::New);
        }
        // What this one is told goes by what is there of the other.
        assert_eq!(other.due(), Some(Kind::Settled));
        assert_eq!(other.choose(Kind::Settled, 1, 1, &mut |_| true), None);
        other.arrived(PageIndex(1500), Arrival::New);
        let run = other.choose(Kind::Settled, 1, 1, &mut |_| true);
        assert_eq!(run, Some(PageRun::single(PageIndex(1500))));
        one.departed(PageIndex(3));
        assert_eq!(returns.all_present(), 499);
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
        let run = choose(&mut policy, 64, 8, &mut |page| page != PageIndex(508));
        assert_eq!(
            run,
            Some(PageRun {
                first: PageIndex(509),
                count: 3
            })
        );
    }

    /// Bytes of the queues for each page that is there.
    fn queue_bytes(policy: &ThreeQueues) -> f64 {
        let bytes: usize = policy.queues.iter().map(Queue::bytes).sum();
        bytes as f64 / policy.present() as f64
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
        assert_eq!(policy.present(), PAGES as usize);
        assert!(queue_bytes(&policy) < 6.2, "{}", queue_bytes(&policy));
        let mut most = 0.0f64;
        for number in 0..2 * PAGES {
            let page = spread(number);
            match number % 3 {
                0 => policy.departed(page),
                1 => drop(choose(&mut policy, 2, 1, &mut |_| true)),
                _ => {}
            }
            if !is_here(policy.mark(page)) {
                let arrivals = [Arrival::New, Arrival::New, Arrival::Refault];
                policy.arrived(page, arrivals[number as usize / 5 % 3]);
            }
            if number % 1024 == 0 {
                most = most.max(queue_bytes(&policy));
            }
        }
        assert!(policy.present() as u32 > PAGES / 2, "{}", policy.present());
        assert!(most < 8.0, "{most} bytes for each page");
    }

    #[test]
    fn a_run_stays_within_the_shard() {
        let mut policy = policy(2);
        policy.arrived(PageIndex(100), Arrival::New);
        policy.arrived(PageIndex(101), Arrival::New);
        assert_eq!(
            choose(&mut policy, 64, 1, &mut |_| true).map(|run| run.count),
            Some(2)
        );
    }
}
