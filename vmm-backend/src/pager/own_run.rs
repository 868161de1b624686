//! A page that leaves while the guest waits for another, evicted by the shard's own thread.
//!
//! At the limit each page that comes has another leave. An evictor protects and punches that one when it has a
//! processor: mostly once the page has come, so that the kernel interrupts the processor of the vCPU that goes on,
//! and waits for it; or while the shard wants that processor itself. The shard's thread has the time while the
//! page is on its way: the vCPU waits as well then, and need not be interrupted.
//!
//! That is so as long as one vCPU alone waits. Others that run meanwhile are interrupted whoever evicts, and that
//! takes so long that it is better done beside the shard: how long it took is looked at each time.

use std::time::{Duration, Instant};

use crate::engine::eviction::Run;

/// Who takes longer has interrupted others: of a single page, all of an eviction takes some 10 µs.
const LONG: Duration = Duration::from_micros(25);

/// So many in a row that took long are no accident.
const ACCIDENTS: u32 = 4;

/// Runs that the evictors have then before it is tried again.
const OTHERS_TURNS: u32 = 64;

/// The run that a shard's thread keeps for itself.
#[derive(Debug, Default)]
pub(super) struct OwnRun {
    run: Option<Run>,
    /// Evictions that took long since the last one that did not.
    long: u32,
    /// Runs that are still the evictors'.
    others_turns: u32,
}

impl OwnRun {
    /// Keeps a run of a single page; gives back what the evictors are to have.
    pub(super) fn keep(&mut self, run: Run) -> Option<Run> {
        if run.pages.count > 1 || self.run.is_some() {
            return Some(run);
        }
        if self.others_turns > 0 {
            self.others_turns -= 1;
            return Some(run);
        }
        self.run.replace(run)
    }

    /// The run that is kept.
    pub(super) fn take(&mut self) -> Option<Run> {
        self.run.take()
    }

    /// Notes an eviction that began then, and whether the kernel has refused it.
    pub(super) fn note(&mut self, began: Instant, now: Instant, was_refused: bool) {
        self.long = match now - began > LONG {
            true => self.long + 1,
            false => 0,
        };
        if was_refused || self.long == ACCIDENTS {
            (self.others_turns, self.long) = (OTHERS_TURNS, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::shard::tests::bench;
    use crate::engine::{PageIndex, PageRun};

    fn run(pages: u32) -> Run {
        let staging = &bench::shared(pages.into(), pages).staging;
        let tickets = staging.take(pages).expect("so many are free");
        let count = tickets.len() as u32;
        let first = PageIndex(7);
        Run::new(PageRun { first, count }, tickets)
    }

    /// Whether a single page is kept, of which nothing is noted yet.
    fn keeps(own: &mut OwnRun) -> bool {
        own.keep(run(1)).is_none() && own.take().is_some()
    }

    fn note(own: &mut OwnRun, took_us: u64, was_refused: bool) {
        let began = Instant::now();
        own.note(began, began + Duration::from_micros(took_us), was_refused);
    }

    #[test]
    fn one_page_is_kept_and_more_are_the_evictors() {
        let mut own = OwnRun::default();
        assert!(own.keep(run(2)).is_some());
        assert!(own.keep(run(1)).is_none());
        assert!(own.keep(run(1)).is_some(), "there is one already");
        assert!(own.take().is_some());
        assert!(own.take().is_none());
        assert!(keeps(&mut own));
    }

    #[test]
    fn what_takes_long_again_and_again_is_the_evictors_for_a_while() {
        let mut own = OwnRun::default();
        for _ in 1..ACCIDENTS {
            note(&mut own, 100, false);
            assert!(keeps(&mut own));
        }
        note(&mut own, 10, false);
        for _ in 1..ACCIDENTS {
            note(&mut own, 100, false);
        }
        assert!(keeps(&mut own), "one in between was quick");
        note(&mut own, 100, false);
        for _ in 0..OTHERS_TURNS {
            assert!(!keeps(&mut own));
        }
        assert!(keeps(&mut own));
    }

    #[test]
    fn what_the_kernel_refused_is_the_evictors_for_a_while() {
        let mut own = OwnRun::default();
        note(&mut own, 1, true);
        for _ in 0..OTHERS_TURNS {
            assert!(!keeps(&mut own));
        }
        assert!(keeps(&mut own));
    }
}
