//! What fetching ahead brings, on [traces](super::trace) of the workloads: the pager's own streams, and
//! beside them pages that left together with the one that is missed, as the pager does it and otherwise.
//!
//! | column | is fetched behind a miss |
//! |---|---|
//! | `streams` | the window of the stream that it is in, or its neighbour where neighbours were next lately, as the pager does |
//! | `pager` | also the pages of its block that it had left with, where no stream explains the miss and as long as that pays: all that the pager does |
//! | `run of 8` | also, for each miss, up to 8 pages of the run that it had left in: its neighbours, those next to it first |
//! | `8 in order` | also the next 8 pages that left after it, of this run or later ones |
//!
//! A page that is fetched so comes at once, takes room as any other, and is judged when it leaves again: it
//! was used meanwhile or it was not.

use outram_backend::engine::policy::{Policy, ThreeQueues};
use outram_backend::engine::prefetch::Prefetch;
use outram_backend::engine::{PageIndex, PageRun};

use super::policies::{Outram, run};
use super::trace::Trace;

/// Pages of a stream's window at most: the pager's, unless its queue depth is changed.
const WINDOW_MOST: u32 = 64;

/// Why a page was fetched that nobody had asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A stream goes there.
    Stream,
    /// It left together with a page that was missed.
    Together,
}

impl Reason {
    const COUNT: usize = 2;
}

/// Pages fetched ahead for one reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ahead {
    /// All of them.
    pub fetched: u64,
    /// Of which were used before they left again.
    pub used: u64,
}

/// Which pages are fetched with one that left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Group {
    None,
    /// Those that the pager takes, as long as that pays.
    Pager,
    OfRun(u32),
    InOrder(u32),
}

/// The columns.
const KINDS: [(&str, Group); 4] = [
    ("streams", Group::None),
    ("pager", Group::Pager),
    ("run of 8", Group::OfRun(8)),
    ("8 in order", Group::InOrder(8)),
];

/// What is fetched ahead of a workload, and what becomes of it.
pub struct Foresight {
    streams: Option<Prefetch>,
    group: Group,
    /// Pages in the order in which they left.
    left: Vec<u32>,
    /// Per page, its last place there and the run that it left in.
    places: Vec<Option<(usize, u32)>>,
    runs: u32,
    /// Per page, why it was fetched, as long as it was not used.
    unused: Vec<Option<Reason>>,
    counts: [Ahead; Reason::COUNT],
}

impl Foresight {
    /// Fetches nothing ahead.
    pub fn none() -> Self {
        Self {
            streams: None,
            group: Group::None,
            left: Vec::new(),
            places: Vec::new(),
            runs: 0,
            unused: Vec::new(),
            counts: [Ahead::default(); Reason::COUNT],
        }
    }

    fn new(trace: &Trace, group: Group) -> Self {
        Self {
            streams: Some(Prefetch::new(WINDOW_MOST, 1)),
            group,
            places: vec![None; trace.pages],
            unused: vec![None; trace.pages],
            ..Self::none()
        }
    }

    /// A run leaves.
    pub fn note_left(&mut self, run: PageRun) {
        if self.streams.is_none() {
            return;
        }
        self.runs += 1;
        for page in run.pages() {
            self.places[page.0 as usize] = Some((self.left.len(), self.runs));
            self.left.push(page.0);
            self.unused[page.0 as usize] = None;
        }
    }

    /// Whether a page is elsewhere, or was once: others were never touched.
    pub fn has_left(&self, page: PageIndex) -> bool {
        self.places[page.0 as usize].is_some()
    }

    /// A page that is there is used.
    pub fn note_used(&mut self, page: u32) {
        if let Some(Some(reason)) = self.unused.get_mut(page as usize).map(Option::take) {
            self.counts[reason as usize].used += 1;
        }
    }

    /// A page was fetched that nobody had asked for.
    pub fn note_fetched(&mut self, page: PageIndex, reason: Reason) {
        self.counts[reason as usize].fetched += 1;
        self.unused[page.0 as usize] = Some(reason);
    }

    /// What to fetch behind a page that is missed, in this order; some of it may be there.
    pub fn behind(&mut self, page: u32, policy: &mut ThreeQueues) -> Vec<(PageIndex, Reason)> {
        let Some(streams) = &mut self.streams else {
            return Vec::new();
        };
        if self.places[page as usize].is_none() {
            return Vec::new();
        }
        let noted = streams.note(PageIndex(page));
        let mut behind = Vec::new();
        if self.group == Group::Pager && noted.is_single {
            let together = policy.left_with(PageIndex(page));
            streams.note_together(PageIndex(page), together.behind(PageIndex(page)));
            behind.extend(together.pages().map(|next| (next, Reason::Together)));
        }
        let window = noted.next.into_iter().flat_map(|window| window.pages());
        let pages = self.places.len();
        let window = window.take_while(|next| (next.0 as usize) < pages);
        behind.extend(window.map(|next| (next, Reason::Stream)));
        let together = self.together(page).into_iter();
        behind.extend(together.map(|next| (PageIndex(next), Reason::Together)));
        behind
    }

    fn together(&self, page: u32) -> Vec<u32> {
        let Some((place, run)) = self.places[page as usize] else {
            return Vec::new();
        };
        match self.group {
            Group::None | Group::Pager => Vec::new(),
            Group::OfRun(most) => {
                let of_run = |next: &u32| self.places[*next as usize].is_some_and(|of| of.1 == run);
                let end = self.places.len() as u32;
                let up = (page + 1..end).take_while(of_run);
                let down = (0..page).rev().take_while(of_run);
                let mut pages: Vec<u32> = up.chain(down).collect();
                pages.sort_by_key(|next| next.abs_diff(page));
                pages.truncate(most as usize);
                pages
            }
            Group::InOrder(most) => {
                let last = self.left.len().min(place + 1 + most as usize);
                let still = |next: &usize| {
                    let page = self.left[*next] as usize;
                    self.places[page].is_some_and(|of| of.0 == *next)
                };
                let behind = (place + 1..last).filter(still);
                behind.map(|next| self.left[next]).collect()
            }
        }
    }
}

/// What one column comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Uses of pages that were not there.
    pub misses: u64,
    /// For streams.
    pub streams: Ahead,
    /// For pages that left together.
    pub together: Ahead,
}

/// Runs a trace at a limit in pages, in each column's way; misses without fetching ahead come first.
pub fn outcomes(trace: &Trace, limit: usize) -> (u64, Vec<Outcome>) {
    let of = |foresight| {
        let mut pager = Outram::new(trace, limit, foresight);
        let misses = run(trace, &mut pager, |pager| {
            pager.foresight.counts = Default::default();
        });
        Outcome {
            misses,
            streams: pager.foresight.counts[Reason::Stream as usize],
            together: pager.foresight.counts[Reason::Together as usize],
        }
    };
    let kinds = KINDS.iter();
    let outcomes = kinds.map(|(_, group)| of(Foresight::new(trace, *group)));
    (of(Foresight::none()).misses, outcomes.collect())
}

/// Names the columns of [`line()`].
pub fn heading() -> String {
    let names: String = KINDS.map(|(name, _)| format!(" {name:>22}")).concat();
    let columns = format!(" {:>6} {:>7} {:>7}", "misses", "fetched", "used").repeat(KINDS.len());
    format!(
        "\nFetching ahead: misses ÷ those without, pages fetched per such miss, and used of them\n\
         {:<24} {names}\n{:<18} local{columns}",
        "", "workload"
    )
}

/// A workload's outcomes as a line of a table. Of columns but the first, what is fetched and used is what
/// left together alone.
pub fn line(name: &str, local: f64, without: u64, outcomes: &[Outcome]) -> String {
    let of = |count: u64| count as f64 / without.max(1) as f64;
    let cell = |(number, outcome): (usize, &Outcome)| {
        let ahead = if number == 0 {
            outcome.streams
        } else {
            outcome.together
        };
        let used = match ahead.fetched {
            0 => "-".to_owned(),
            fetched => format!("{:.0} %", ahead.used as f64 / fetched as f64 * 100.0),
        };
        let (misses, fetched) = (of(outcome.misses), of(ahead.fetched));
        format!(" {misses:>6.3} {fetched:>7.3} {used:>7}")
    };
    let cells: String = outcomes.iter().enumerate().map(cell).collect();
    format!("{name:<18} {local:>5}{cells}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::policies::LIMIT_LEAST;
    use crate::split_mix::SplitMix;

    /// Objects of four pages that lie apart but are used together, one object after the other at random.
    fn objects() -> Trace {
        let objects: u32 = 2048;
        let mut random = SplitMix(5);
        let uses = (0..20_000).flat_map(|_| {
            let object = (random.next() % u64::from(objects)) as u32;
            let of_part = |(part, odd)| (object * odd) % objects + part * objects;
            [(0, 1), (1, 7919), (2, 4099), (3, 6151)].map(of_part)
        });
        Trace {
            pages: 4 * objects as usize,
            uses: uses.collect(),
            prepared: 0,
        }
    }

    #[test]
    fn a_stream_is_fetched_ahead_and_used() {
        let uses: Vec<u32> = (0..5).flat_map(|_| 0..6000).collect();
        let trace = Trace {
            pages: 6000,
            uses,
            prepared: 6000,
        };
        let (without, outcomes) = outcomes(&trace, 2000);
        let streams = outcomes[0];
        assert!(without > 4 * 3000 && streams.misses * 20 < without);
        assert!(streams.streams.used * 100 > streams.streams.fetched * 99);
        assert_eq!(streams.together, Ahead::default());
    }

    #[test]
    fn what_is_used_together_leaves_in_order() {
        let (without, outcomes) = outcomes(&objects(), 2048);
        let in_order = outcomes[3];
        assert!(
            in_order.misses * 100 < without * 95,
            "{without}: {outcomes:?}"
        );
        let streams = outcomes[0];
        assert!(
            streams.misses * 100 > without * 95,
            "{without}: {outcomes:?}"
        );
    }

    #[test]
    fn next_to_nothing_is_used_of_what_is_fetched_behind_random_uses() {
        let mut random = SplitMix(7);
        let uses = std::iter::repeat_with(|| (random.next() % 16_384) as u32);
        let trace = Trace {
            pages: 16_384,
            uses: uses.take(100_000).collect(),
            prepared: 20_000,
        };
        let (_, outcomes) = outcomes(&trace, LIMIT_LEAST * 4);
        for outcome in &outcomes[3..] {
            let ahead = outcome.together;
            assert!(
                ahead.fetched > 1000 && ahead.used * 3 < ahead.fetched,
                "{ahead:?}"
            );
        }
    }
}
