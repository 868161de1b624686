//! Moving pages out of a slab that its server wants back: fetched, staged, and written elsewhere (or brought home,
//! where there is no staging), a few at a time, behind everything that the guest waits for.

use super::*;
use crate::engine::StagedPage;

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
        let slot = self.shared.table.load(page).slot;
        if let Some(slot) = slot.filter(|slot| self.shared.slots.is_vacating(*slot)) {
            self.to_move.insert((slot.group, page));
        }
    }

    /// What was to come home from such a slab had no mapping: it is tried once more when mappings are known again.
    pub(super) fn note_unmapped(&mut self, page: PageIndex) {
        let slot = self.shared.table.load(page).slot;
        if slot.is_some_and(|slot| self.shared.slots.is_vacating(slot)) {
            self.unmapped.insert(page);
        }
    }

    /// Has what moves from a server that went out of reach wait without holding what others need.
    fn put_off_moves(&mut self) {
        let is_far = |page: &PageIndex| {
            let slot = self.shared.table.load(*page).slot;
            !slot.is_some_and(|slot| self.shared.slots.is_within_reach(slot))
        };
        let mut far: Vec<PageIndex> = self.moving.keys().copied().filter(is_far).collect();
        // The map has another order each time; a simulation has to go the same way again.
        far.sort_unstable();
        for page in far {
            let ticket = self.moving.remove(&page);
            self.end_move(ticket.flatten());
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
            let vacating = entry
                .slot
                .is_some_and(|slot| slot.group == group && self.shared.slots.is_vacating(slot));
            // Whoever waits for the page already brings it home, and its slot is dropped then.
            if entry.state != State::Stored || !vacating || self.pending.contains_key(&page) {
                self.to_move.remove(&(group, page));
                continue;
            }
            // It waits for its server without holding what others need, or holding them up.
            let is_near = entry
                .slot
                .is_some_and(|slot| self.shared.slots.is_within_reach(slot));
            // A guest that may have all of its memory here has no staging: there the page comes home. A huge one may
            // be missing from the host's pool.
            let comes_home = capacity == 0 && !self.shared.page_size.is_huge();
            if !is_near {
                from = (group + 1, PageIndex(0));
                continue;
            }
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
                self.end_move(ticket);
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
        let ticket = self.moving.remove(&page);
        self.end_move(ticket.flatten());
        let fetched = pending.fetched.take().filter(|(of, _)| *of == entry);
        let is_kept = self.stage_copy(page, entry, fetched.map(|(_, bytes)| bytes));
        match (is_kept, pending.is_idle()) {
            (true, true) => drop(self.guesses.drop(page)),
            (true, false) => self.resolve(page, pending),
            (false, _) => self.lose(page, pending),
        }
    }

    /// Stages a stored page from a copy that this host has, if there is one and a place for it. It may have been
    /// fetched already.
    pub(super) fn stage_copy(
        &mut self,
        page: PageIndex,
        entry: Entry,
        fetched: Option<Box<[u8]>>,
    ) -> bool {
        let found = fetched.or_else(|| {
            let found = self.find_spare(page, &entry);
            found.map(|_| self.spare.clone())
        });
        if let Some(bytes) = found
            && let Some(ticket) = self.staging_slot()
        {
            self.stage_stored(page, entry, &bytes, ticket);
            return true;
        }
        false
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

    /// Gives a move's staging slot back.
    pub(super) fn end_move(&mut self, ticket: Option<Ticket>) {
        if let Some(ticket) = ticket {
            self.shared.staging.release(ticket.slot);
        }
    }
}
