//! Moving pages out of a slab that its server wants back: fetched, staged, and written elsewhere (or brought home,
//! where there is no staging), a few at a time, behind everything that the guest waits for.

use super::*;
use crate::engine::{SlotId, StagedPage};

/// Pages on their way at once: enough to keep the wire busy.
const MOVES_MOST: usize = 16;

/// And no more than so much of staging, for each shard: where it is small, what is evicted needs it too.
const MOVES_SHARE: usize = 8;

/// So much of staging moves leave to what is evicted, however many shards there are.
const LEFT_SHARE: usize = 4;

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
            State::Stored => self.move_if_vacating(page),
            State::Resident => self.keep_as_dirty(page, entry),
            // A run in work is looked at when it ends.
            _ => {}
        }
    }

    /// Has a page move if it is stored in a slab that its server has asked for.
    pub(super) fn move_if_vacating(&mut self, page: PageIndex) {
        if let Some(slot) = self.vacating_slot(page) {
            self.to_move.insert((slot.group, page));
        }
    }

    /// What was to come home from such a slab had no mapping: it is tried once more when mappings are known again.
    pub(super) fn note_unmapped(&mut self, page: PageIndex) {
        if self.vacating_slot(page).is_some() {
            self.unmapped.insert(page);
        }
    }

    /// A page's slot, if it lies in a slab that is wanted back.
    fn vacating_slot(&self, page: PageIndex) -> Option<SlotId> {
        let slot = self.shared.table.load(page).slot;
        slot.filter(|slot| self.shared.slots.is_vacating(*slot))
    }

    /// Whether a server within reach has the page.
    pub(super) fn is_near(&self, page: PageIndex) -> bool {
        let slot = self.shared.table.load(page).slot;
        slot.is_some_and(|slot| self.shared.slots.is_within_reach(slot))
    }

    /// Has what moves from a server that went out of reach wait without holding what others need.
    fn put_off_moves(&mut self) {
        let moving = self.moving.keys().copied();
        let mut far: Vec<PageIndex> = moving.filter(|page| !self.is_near(*page)).collect();
        // The map has another order each time; a simulation has to go the same way again.
        far.sort_unstable();
        for page in far {
            self.end_move(page);
            // Its answer, should it come, is to nobody.
            if self.pending.get(&page).is_some_and(Pending::is_idle) {
                drop(self.end_waiting(page));
                self.move_if_vacating(page);
            }
        }
    }

    /// Starts moving what is to be moved, as far as there is room for it: in memory, in staging, and on
    /// servers, of which the writer knows.
    pub(super) fn move_pages(&mut self) {
        if std::mem::take(&mut self.move_waits) {
            self.shared.budget.end_waiting();
        }
        self.put_off_moves();
        let capacity = self.shared.staging.capacity() as usize;
        let most = match capacity {
            0 => MOVES_MOST,
            capacity => (capacity / MOVES_SHARE).clamp(1, MOVES_MOST),
        };
        let mut from = (0, PageIndex(0));
        while self.moving.len() < most
            && let Some((group, page)) = self.to_move.range(from..).next().copied()
        {
            let entry = self.shared.table.load(page);
            let slot = self.vacating_slot(page);
            let vacating = slot.is_some_and(|slot| slot.group == group);
            // Whoever waits for the page already brings it home, and its slot is dropped then.
            if entry.state != State::Stored || !vacating || self.pending.contains_key(&page) {
                self.to_move.remove(&(group, page));
                continue;
            }
            // It waits for its server without holding what others need, or holding them up.
            if !self.is_near(page) {
                from = (group + 1, PageIndex(0));
                continue;
            }
            // A guest that may have all of its memory here has no staging: there the page comes home. A huge one may
            // be missing from the host's pool.
            let comes_home = capacity == 0 && !self.shared.page_size.is_huge();
            if !comes_home && !self.shared.slots.may_move() {
                return;
            }
            if !self.shared.budget.acquire(1) {
                // Whoever gives room back tells those who are counted as waiting.
                self.shared.budget.start_waiting();
                self.move_waits = true;
                return;
            }
            let ticket = self.staging_slot();
            let is_scarce = (self.shared.staging.available() as usize) < capacity / LEFT_SHARE;
            if !comes_home && (ticket.is_none() || is_scarce) {
                self.shared.budget.cancel(1);
                // While some are free the writer is who says so once more: shards would tell each other without end.
                if ticket.is_none() {
                    self.shared.staging.note_starved();
                }
                self.give_back(ticket);
                return;
            }
            if !comes_home {
                self.shared.slots.count_move();
            }
            self.to_move.remove(&(group, page));
            self.moving.insert(page, ticket);
            let pending = Pending::new(None, self.ports.now_us());
            self.start_fetch(page, entry, 0, pending);
        }
    }

    /// A page that only moves has arrived, for which room was counted.
    pub(super) fn stage_moved(
        &mut self,
        page: PageIndex,
        entry: Entry,
        bytes: &[u8],
        ticket: Ticket,
    ) {
        self.stage_stored(page, entry, bytes, ticket);
        self.shared.budget.release(1);
    }

    /// What servers had of a stored page is gone, or is not its bytes. It is staged anew where this host has a copy.
    /// No room is counted for it.
    pub(super) fn lose_stored(&mut self, page: PageIndex, entry: Entry, pending: Option<Pending>) {
        let mut pending = pending.unwrap_or_else(|| Pending::new(None, self.ports.now_us()));
        self.end_move(page);
        let fetched = pending.fetched.take().filter(|(of, _)| *of == entry);
        let copy = fetched.map(|(_, bytes)| bytes).or_else(|| {
            let found = self.find_spare(page, &entry);
            found.map(|_| self.spare.clone())
        });
        let mut is_kept = false;
        if let Some(bytes) = copy
            && let Some(ticket) = self.staging_slot()
        {
            self.stage_stored(page, entry, &bytes, ticket);
            is_kept = true;
        }
        match (is_kept, pending.is_idle()) {
            (true, true) => drop(self.guesses.drop(page)),
            (true, false) => self.resolve(page, pending),
            (false, _) => self.lose(page, pending),
        }
    }

    fn stage_stored(&mut self, page: PageIndex, entry: Entry, bytes: &[u8], ticket: Ticket) {
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

    /// The page, if it was to move, does so no longer.
    pub(super) fn end_move(&mut self, page: PageIndex) {
        let ticket = self.moving.remove(&page);
        self.give_back(ticket.flatten());
    }

    /// Gives a move's staging slot back.
    pub(super) fn give_back(&self, ticket: Option<Ticket>) {
        if let Some(ticket) = ticket {
            self.shared.staging.release(ticket.slot);
        }
    }
}
