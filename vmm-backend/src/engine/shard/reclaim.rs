//! Runs out to evictors and back, and write-back.

use super::*;
use crate::crash_points::{self, Point};
use crate::engine::eviction::{Fate, RUN_BYTES, Run};
use crate::engine::staging::Spare;
use crate::engine::{SlotId, StagedPage};

impl<P: Ports> Shard<P> {
    /// Hands out runs while the guest is above its watermark, as long as no other shard has pages that
    /// should go first; that one is told.
    pub(super) fn schedule_runs(&mut self) {
        self.age.look();
        let run_pages = self.shared.page_size.pages_in(RUN_BYTES, 1);
        let granule = self.shared.pace.granule();
        self.publish_ages();
        while self.may_hand_out()
            && let Some(due) = self.due()
        {
            let wanted = self.shared.budget.shortage().min(run_pages) as u32;
            let wanted = wanted.next_multiple_of(granule);
            let most = wanted.min(self.free_staging(wanted));
            if most == 0 || self.elder(due).is_some() && !self.is_nobody_evicting() {
                break;
            }
            if !self.hand_out_run(due, most) {
                // What it has may not go now: others should.
                for kind in Kind::ALL {
                    self.age.publish(kind, None);
                }
                break;
            }
            self.publish_ages();
        }
        if let Some(due) = self.due()
            && self.elder(due).is_some_and(|elder| elder.ask())
        {
            self.ports.alert_shards();
        }
    }

    /// Whether runs are about to be handed out, and nothing else is to be done.
    pub fn has_only_to_evict(&self) -> bool {
        let budget = &self.shared.budget;
        self.pending.is_empty()
            && !budget.has_waiters()
            && budget.is_pressed()
            && self.may_hand_out()
    }

    /// Tells others how long the pages have been there that it could hand out now.
    fn publish_ages(&mut self) {
        let may = self.may_hand_out();
        for kind in Kind::ALL {
            let oldest = self.policy.oldest(kind).filter(|_| may);
            self.age.publish(kind, oldest);
        }
    }

    fn may_hand_out(&self) -> bool {
        self.runs_out.len() < self.shared.pace.runs_out() && !self.ending
    }

    /// The kind of page that should go next, where any should.
    fn due(&self) -> Option<Kind> {
        match self.shared.budget.is_pressed() {
            true => self.policy.due(),
            false => None,
        }
    }

    /// The shard that has pages of this kind which should go before any of this one.
    fn elder(&self, due: Kind) -> Option<Arc<ShardAge>> {
        self.shared.ages.elder(&self.age, due)
    }

    /// Whether faults wait for room that nobody is making: then it does not matter whose pages go.
    fn is_nobody_evicting(&self) -> bool {
        let budget = &self.shared.budget;
        budget.evicting() == 0 && budget.has_waiters()
    }

    /// Staging slots free for `wanted` pages; where there are none, whoever frees one says so.
    fn free_staging(&self, wanted: u32) -> u32 {
        let staging = &self.shared.staging;
        if wanted > 0 && staging.available() == 0 {
            staging.note_starved();
        }
        staging.available()
    }

    fn hand_out_run(&mut self, due: Kind, most: u32) -> bool {
        let Some(mut tickets) = self.shared.staging.take(most) else {
            self.shared.staging.note_starved();
            return false;
        };
        let Self {
            policy,
            shared,
            pins,
            pending,
            frozen,
            unplugging,
            ..
        } = self;
        let granule = shared.pace.granule();
        let chosen = policy.choose(due, most, granule, &mut |page| {
            shared.table.state(page) == State::Resident
                && !pins.contains_key(&page)
                && !pending.contains_key(&page)
                && !frozen
                    .iter()
                    .chain(&*unplugging)
                    .any(|run| run.contains(page))
        });
        let count = chosen.map_or(0, |run| run.count);
        for unused in tickets.split_off(count as usize) {
            self.shared.staging.release(unused.slot);
        }
        let Some(pages) = chosen else { return false };
        for page in pages.pages() {
            let entry = self.shared.table.load(page);
            self.set(
                page,
                Entry {
                    state: State::Busy,
                    ..entry
                },
            );
        }
        crash_points::pass(Point::EvictBusy);
        self.shared.budget.start_evicting(u64::from(count));
        let run = Run::new(pages, tickets);
        self.runs_out.push((pages, run.signals()));
        self.ports.start_run(run);
        true
    }

    /// An evictor hands a run back.
    pub fn on_run_done(&mut self, run: &Run) {
        assert!(run.has_ended(), "a run came back before its end");
        crash_points::pass(Point::EvictEnded);
        self.runs_out.retain(|(pages, _)| *pages != run.pages);
        // What left had been found home, perhaps: only another pass can tell.
        if let Some(homing) = &mut self.homing {
            homing.clean = false;
        }
        self.shared.budget.end_evicting(u64::from(run.pages.count));
        if run.fates.contains(&Fate::Stays) {
            self.shared.stats.failed_runs.count();
        }
        for (page, fate) in run.pages.pages().zip(&run.fates) {
            self.settle_fate(page, *fate);
        }
        for page in run.pages.pages() {
            if !self.is_plugged(page) {
                self.forget(page);
                continue;
            }
            let stays = self.shared.table.state(page) == State::Resident;
            let removed = self.removed_while_busy.remove(&page);
            if removed.is_some_and(|is_certain| is_certain || stays) {
                self.remove(page);
            }
            // Also where the page was touched again after its discard, and so stays.
            let pending = self.pending.get(&page);
            if pending.is_some_and(|pending| pending.wait == Wait::Run)
                && let Some(pending) = self.pending.remove(&page)
            {
                self.resolve(page, pending);
            }
        }
        if self.shared.budget.has_waiters() {
            self.ports.alert_shards();
        }
    }

    fn settle_fate(&mut self, page: PageIndex, fate: Fate) {
        let entry = self.shared.table.load(page);
        self.judge_guess(page, &entry, fate);
        let stats = &self.shared.stats;
        match fate {
            Fate::Stays => {
                self.keep_as_dirty(page, entry);
                self.policy.arrived(page, Arrival::New);
                return;
            }
            Fate::Clean => {
                stats.evicted_clean.count();
                let safe = entry
                    .slot
                    .is_some_and(|slot| self.shared.slots.place(slot).is_some());
                let next = Entry {
                    state: State::Stored,
                    ..entry
                };
                self.set(page, next);
                match safe {
                    true => self.move_if_vacating(page),
                    false => self.lose_stored(page, next, None),
                }
            }
            Fate::Filled => {
                stats.evicted_filled.count();
                self.set(
                    page,
                    Entry {
                        state: State::Filled,
                        slot: None,
                        ..entry
                    },
                );
                self.free_slot(entry.slot);
            }
            Fate::Staged(ticket) => {
                stats.evicted_staged.count();
                self.set(
                    page,
                    Entry {
                        state: State::Staged,
                        slot: None,
                        ..entry
                    },
                );
                crash_points::pass(Point::EvictSettled);
                self.free_slot(entry.slot);
                let generation = entry.generation;
                self.ports.write_back(StagedPage {
                    page,
                    staging: ticket,
                    generation,
                    is_sealed: self.shared.key.seals(),
                });
            }
        }
        self.shared.budget.release(1);
    }

    /// A page goes that may have been fetched ahead. Where its server still has bytes of it, but not these,
    /// the guest has stored to it.
    fn judge_guess(&mut self, page: PageIndex, entry: &Entry, fate: Fate) {
        let slots = &self.shared.slots;
        let has_changed = || entry.slot.is_some_and(|slot| slots.is_safe(slot));
        match fate {
            Fate::Stays => {}
            Fate::Staged(_) | Fate::Filled if has_changed() => {
                self.guesses.note_used(page, &self.shared.stats);
            }
            _ => self.guesses.note_left(page, &self.shared.stats),
        }
    }

    pub(super) fn free_slot(&self, slot: Option<SlotId>) {
        if let Some(slot) = slot {
            self.shared.slots.free(slot);
        }
    }

    /// A write-back ended: the page's bytes lie in `slot`.
    pub fn on_written_back(&mut self, staged: StagedPage, slot: SlotId) {
        let page = staged.page;
        let is_held = self.shared.staging.end_write(staged.staging);
        let entry = self.shared.table.load(page);
        let same = entry.generation == staged.generation;
        if self.shared.slots.place(slot).is_none() {
            // Lost again before we knew: what staging still has is written anew.
            if is_held {
                self.ports.write_back(staged);
            }
            return;
        }
        self.shared.stats.written_back.count();
        match entry.state {
            State::Staged if is_held => {
                assert!(
                    same,
                    "a staging slot held by another generation of page {page}"
                );
                self.set(
                    page,
                    Entry {
                        state: State::Stored,
                        dirty: false,
                        staging: None,
                        slot: Some(slot),
                        ..entry
                    },
                );
                crash_points::pass(Point::WriteStored);
                if !staged.is_sealed {
                    self.staged_plain.remove(&page);
                }
                self.shared.staging.keep_spare(Spare {
                    slot: staged.staging.slot,
                    page,
                    generation: staged.generation,
                    is_sealed: staged.is_sealed,
                });
                self.move_if_vacating(page);
            }
            // Taken back while it was being written, and not staged again since: the slot is a
            // good copy of the bytes that the tag describes.
            State::Resident
                if same
                    && entry.slot.is_none()
                    && !self.is_pinned(page)
                    && !self.shared.slots.is_vacating(slot)
                    && self.shared.slots.try_keep() =>
            {
                self.set(
                    page,
                    Entry {
                        dirty: false,
                        protected: false,
                        slot: Some(slot),
                        ..entry
                    },
                );
            }
            _ => self.shared.slots.free(slot),
        }
    }

    /// A write-back was not needed, or could not be placed: the page stays in staging.
    pub fn on_write_abandoned(&mut self, staged: StagedPage) {
        if self.shared.staging.end_write(staged.staging) {
            self.ports.write_back(staged);
        }
    }
}
