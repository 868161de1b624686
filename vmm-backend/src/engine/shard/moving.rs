//! Moving pages out of a slab that its server wants back: fetched, staged, and written elsewhere (or brought home,
//! where there is no staging), a few at a time, behind everything that the guest waits for.

use super::*;
use crate::engine::StagedPage;

/// Pages on their way at once: enough to keep the wire busy.
const MOVES_MOST: usize = 16;

/// And no more than so much of staging, for each shard: where it is small, what is evicted needs it too.
const MOVES_SHARE: usize = 8;

impl<P: Ports> Shard<P> {
    /// Pages on their way out of slabs that their server wants back.
    pub fn moves(&self) -> usize {
        self.moving.len()
    }

    /// Groups of slabs are wanted back. Nothing new is placed in them already. All of the shard's pages are
    /// looked at, once for however many groups there are.
    pub fn on_vacate(&mut self, groups: &HashSet<u32>) {
        for part in self.parts.clone() {
            self.for_known(part, |shard, page| shard.vacate(page, groups));
        }
    }

    /// Has a page leave its slot, if that is in one of these groups.
    fn vacate(&mut self, page: PageIndex, groups: &HashSet<u32>) {
        let entry = self.shared.table.load(page);
        if !entry.slot.is_some_and(|slot| groups.contains(&slot.group)) {
            return;
        }
        match entry.state {
            State::Stored => {
                self.to_move.insert(page);
            }
            State::Resident => self.keep_as_dirty(page, entry),
            // A run in work is looked at when it ends.
            _ => {}
        }
    }

    /// A page was stored in a slab that its server has asked for meanwhile.
    pub(super) fn move_if_vacating(&mut self, page: PageIndex) {
        let slot = self.shared.table.load(page).slot;
        if slot.is_some_and(|slot| self.shared.slots.is_vacating(slot)) {
            self.to_move.insert(page);
        }
    }

    /// Starts moving what is to be moved, as far as there is room for it: in memory, in staging, and on
    /// servers, of which the writer knows.
    pub(super) fn move_pages(&mut self) {
        if std::mem::take(&mut self.move_waits) {
            self.shared.budget.end_waiting();
        }
        let capacity = self.shared.staging.capacity() as usize;
        let most = match capacity {
            0 => MOVES_MOST,
            capacity => (capacity / MOVES_SHARE).clamp(1, MOVES_MOST),
        };
        while self.moving.len() < most {
            let Some(page) = self.to_move.first().copied() else {
                return;
            };
            let entry = self.shared.table.load(page);
            let vacating = entry
                .slot
                .is_some_and(|slot| self.shared.slots.is_vacating(slot));
            // Whoever waits for the page already brings it home, and its slot is dropped then.
            if entry.state != State::Stored || !vacating || self.pending.contains_key(&page) {
                self.to_move.remove(&page);
                continue;
            }
            // It waits for its server without holding what others need.
            let is_near = entry
                .slot
                .is_some_and(|slot| self.shared.slots.is_within_reach(slot));
            // A guest that may have all of its memory here has no staging: there the page comes home. A huge one may
            // be missing from the host's pool.
            let comes_home = capacity == 0 && !self.shared.page_size.is_huge();
            if !is_near || !comes_home && !self.shared.slots.may_move() {
                return;
            }
            if !self.shared.budget.acquire(1) {
                // Whoever gives room back tells those who are counted as waiting.
                self.shared.budget.start_waiting();
                self.move_waits = true;
                return;
            }
            let ticket = self.staging_slot();
            if ticket.is_none() && !comes_home {
                self.shared.budget.cancel(1);
                self.shared.staging.note_starved();
                return;
            }
            if !comes_home {
                self.shared.slots.count_move();
            }
            self.to_move.remove(&page);
            self.moving.insert(page, ticket);
            let pending = Pending::new(None, self.ports.now_us());
            self.start_fetch(page, entry, 0, pending);
        }
    }

    /// A page that only moves has arrived.
    pub(super) fn stage_moved(
        &mut self,
        page: PageIndex,
        entry: Entry,
        bytes: &[u8],
        ticket: Ticket,
    ) {
        // Also where an earlier build had left it unsealed, before it was written.
        self.staged_plain.remove(&page);
        self.room.copy_from_slice(bytes);
        if self.shared.key.seals() {
            // The very text that came: it is the same page and generation.
            self.shared.key.seal(page, entry.generation, &mut self.room);
        }
        self.ports.stage(ticket.slot, &self.room);
        crash_points::pass(Point::MoveStaged);
        let next = Entry {
            state: State::Staged,
            dirty: true,
            slot: None,
            staging: Some(ticket.slot),
            ..entry
        };
        self.set(page, next);
        crash_points::pass(Point::MoveMarked);
        self.free_slot(entry.slot);
        self.shared.budget.release(1);
        self.ports.write_back(StagedPage {
            page,
            staging: ticket,
            generation: entry.generation,
            is_sealed: self.shared.key.seals(),
        });
    }

    /// A staging slot, if one is free.
    pub(super) fn staging_slot(&self) -> Option<Ticket> {
        self.shared.staging.take(1)?.into_iter().next()
    }

    /// Gives a move's staging slot back.
    pub(super) fn end_move(&mut self, ticket: Option<Ticket>) {
        if let Some(ticket) = ticket {
            self.shared.staging.release(ticket.slot);
        }
    }
}
