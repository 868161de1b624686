//! Which pages of the shard's range there are: memory that is plugged and unplugged.
//!
//! Unplugged memory is gone at once, for the VMM has unmapped it; what in work still refers to it
//! (a run at an evictor, a pin of the device) ends as it does always, and only then the pages' place
//! in the table may be given to other memory. Their generations go on: no copy of an earlier
//! content matches a later tag.

use super::*;
use crate::engine::StagedPage;

impl<P: Ports> Shard<P> {
    /// These pages are there from now on, none of them touched yet. Others of the same range that are
    /// there lie at least one page away.
    ///
    /// # Panics
    /// Where they are not the shard's, or there already.
    pub fn plug(&mut self, run: PageRun) {
        let within = self.range.first <= run.first && run.end() <= self.range.end();
        assert!(within, "pages of another shard are plugged");
        let place = self.parts.partition_point(|part| part.first < run.first);
        let before = place.checked_sub(1).map(|before| self.parts[before].end());
        let after = self.parts.get(place).map(|after| after.first);
        assert!(
            before.is_none_or(|end| end <= run.first)
                && after.is_none_or(|first| run.end() <= first),
            "pages are plugged twice"
        );
        self.parts.insert(place, run);
        self.shared.stats.found(run.count.into());
    }

    /// Takes over a page of a former process as the recovered table says; the page is plugged, and
    /// nothing was done to it yet. One whose staging slot is another's is lost.
    pub fn adopt_recovered(&mut self, page: PageIndex) {
        let mut entry = self.shared.table.load(page);
        let ticket = entry
            .staging
            .and_then(|slot| self.shared.staging.claim(slot));
        if entry.state == State::Staged && ticket.is_none() {
            entry = Entry {
                state: State::Lost,
                staging: None,
                ..entry
            };
            self.shared.table.store(page, &entry);
        }
        // Counted as never touched when it was plugged.
        self.shared.stats.moved(State::Absent, entry.state);
        match (entry.state, ticket) {
            (State::Resident, _) => {
                self.shared.budget.force(1);
                self.policy.arrived(page, Arrival::New);
            }
            (State::Staged, Some(staging)) => {
                // Recovery has made sure that it is the page's, sealed or as it is.
                let seals = self.shared.key.seals();
                let is_sealed = seals && self.opens_staged(page, &entry, staging.slot);
                if seals && !is_sealed {
                    self.staged_plain.insert(page, entry.generation);
                }
                self.ports.write_back(StagedPage {
                    page,
                    staging,
                    generation: entry.generation,
                    is_sealed,
                });
            }
            (State::Absent, _) if entry.is_unhealed() => {
                let heal = Pending::new(None, self.ports.now_us());
                self.retry_later(page, heal);
            }
            _ => {}
        }
    }

    /// The memory of a part is gone: nothing of it is kept anywhere, and whoever waits for it looks
    /// again. [`Shard::next_unplugged`] names it once nothing refers to it.
    ///
    /// # Panics
    /// Where the run is no part as it was plugged.
    pub fn unplug(&mut self, run: PageRun) {
        assert!(
            self.parts.contains(&run),
            "what was never plugged is unplugged"
        );
        self.unplugging.push(run);
        self.for_known(run, Self::forget);
        self.ports.wake(run);
    }

    /// The next part that was unplugged and that nothing refers to any longer. It is then forgotten.
    pub fn next_unplugged(&mut self) -> Option<PageRun> {
        let is_clear = |run: &PageRun| {
            let is_out = |(out, _): &(PageRun, Signals)| run.contains(out.first);
            !self.runs_out.iter().any(is_out) && !self.pins.keys().any(|page| run.contains(*page))
        };
        let place = self.unplugging.iter().position(is_clear)?;
        let run = self.unplugging.swap_remove(place);
        self.parts.retain(|part| *part != run);
        self.frozen.retain(|frozen| !run.contains(frozen.first));
        self.to_move.retain(|page| !run.contains(*page));
        self.unmapped.retain(|page| !run.contains(*page));
        self.shared.stats.vanished(run.count.into());
        Some(run)
    }

    /// The part that a page lies in.
    pub(super) fn part_of(&self, page: PageIndex) -> Option<PageRun> {
        let after = self.parts.partition_point(|part| part.first <= page);
        let part = self.parts[after.checked_sub(1)?];
        part.contains(page).then_some(part)
    }

    /// The first page that is there, from this one on.
    pub(super) fn plugged_from(&self, page: PageIndex) -> Option<PageIndex> {
        let place = self.parts.partition_point(|part| part.end() <= page);
        Some(self.parts.get(place)?.first.max(page))
    }

    /// The first page that is there and that was touched once, or lies beside such, from this one on.
    pub(super) fn touched_from(&self, page: PageIndex) -> Option<PageIndex> {
        let place = self.parts.partition_point(|part| part.end() <= page);
        self.parts[place..].iter().find_map(|part| {
            let first = part.first.max(page);
            let rest = PageRun {
                first,
                count: part.end().0 - first.0,
            };
            let touched = self.shared.table.touched_in(rest).next()?;
            Some(touched.first)
        })
    }

    /// Whether the page is there, and not on its way out.
    pub fn is_plugged(&self, page: PageIndex) -> bool {
        self.part_of(page).is_some() && !self.unplugging.iter().any(|run| run.contains(page))
    }

    /// Drops a page whose memory is gone. A busy one is dropped when its run ends.
    pub(super) fn forget(&mut self, page: PageIndex) {
        let entry = self.shared.table.load(page);
        if entry.state == State::Busy {
            return;
        }
        self.removed_while_busy.remove(&page);
        self.clear(page, entry, entry.into_absent());
        if let Some(pending) = self.end_waiting(page) {
            self.let_go(&pending);
        }
    }
}
