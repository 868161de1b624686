//! Moving pages out of a slab that its server wants back: fetched, staged, and written elsewhere (or brought home,
//! where there is no staging), a few at a time, behind everything that the guest waits for.

use foldhash::HashSet;

use super::*;
use crate::engine::{SlotId, StagedPage};

/// Pages on their way at once: enough to keep the wire busy.
const MOVES_MOST: usize = 16;

/// And no more than so much of staging, for each shard: where it is small, what is evicted needs it too.
const MOVES_SHARE: usize = 8;

/// So much of staging moves leave to what is evicted, however many shards there are.
const LEFT_SHARE: usize = 4;

/// Entries looked at in one go: some 100 µs, so that no fault waits long.
pub(super) const LOOKS: u32 = 4096;

/// Pages that are looked for by one pass over the shard, in whole slabs, but at least one of these: eight of the
/// usual ones. They are noted, some 16 bytes each. Fewer would take more passes where a server wants much back, more
/// would empty its first slab later.
const PASS_PAGES: u64 = 1 << 17;

/// The search for pages that lie in slabs which their servers want back: a few slabs by each pass over the shard, so
/// that these are empty soon, and what is known of pages takes little memory. Pages in memory that keep a slot there
/// give it up at once, whichever slab it is in: that takes neither notes nor room elsewhere, and waits for no move.
#[derive(Debug)]
pub(super) struct Search {
    /// How many pages a pass looks for: [`PASS_PAGES`].
    pub(super) most: u64,
    /// Groups of slabs whose stored pages are looked for by this pass.
    groups: HashSet<u32>,
    /// Those in which pages in memory keep no slot any more, once this pass has ended.
    unkept: HashSet<u32>,
    /// Where it goes on; nowhere between two passes.
    next: Option<PageIndex>,
    /// Groups whose stored pages need not be looked for any more, all of which were wanted back when the last pass
    /// began.
    searched: HashSet<u32>,
    /// More were wanted back since the last pass began.
    is_asked: bool,
    /// There may be groups that are to be looked for, once all that were found before have moved.
    is_due: bool,
    /// Arrivals of servers within reach that the last pass knew of.
    arrivals: u64,
    /// More of what was found is to be looked at than was in one go.
    is_cut_short: bool,
}

impl Search {
    /// Nothing is wanted back yet.
    pub(super) fn new() -> Self {
        Self {
            most: PASS_PAGES,
            groups: HashSet::default(),
            unkept: HashSet::default(),
            next: None,
            searched: HashSet::default(),
            is_asked: false,
            is_due: false,
            arrivals: 0,
            is_cut_short: false,
        }
    }

    /// Chooses the groups whose stored pages this pass looks for, of those that are wanted back and how many pages
    /// lie in each.
    fn choose(&mut self, wanted: &[(u32, u32)]) {
        let mut pages = 0;
        for (group, used) in wanted {
            if self.searched.contains(group) {
                continue;
            }
            pages += u64::from(*used);
            if pages > self.most && !self.groups.is_empty() {
                break;
            }
            self.groups.insert(*group);
        }
        self.searched.extend(&self.groups);
    }
}

impl<P: Ports> Shard<P> {
    /// Pages on their way out of slabs that their server wants back.
    pub fn moves(&self) -> usize {
        self.moving.len()
    }

    /// Slabs are wanted back. Nothing new is placed in them already.
    pub fn on_vacate(&mut self) {
        self.search.is_asked = true;
    }

    /// Whether [`Shard::pump`] has more to look at, though no event may come.
    pub fn has_more_to_vacate(&self) -> bool {
        let search = &self.search;
        search.next.is_some()
            || search.is_cut_short
            || search.is_asked
            || (search.is_due && self.to_move.is_empty())
    }

    /// Looks at some more pages for those that are to move, once all that were found before do, and for those that
    /// keep a slot.
    fn look_for_moves(&mut self) {
        let search = &self.search;
        let has_come = search.arrivals != self.shared.slots.arrivals();
        let is_due = search.is_due && self.to_move.is_empty();
        if search.next.is_none() && (search.is_asked || has_come || is_due) {
            self.begin_pass();
        }
        for _ in 0..LOOKS {
            let Some(next) = self.search.next else { return };
            let page = self.touched_from(next);
            self.search.next = page.map(|page| PageIndex(page.0 + 1));
            if let Some(page) = page {
                self.vacate(page);
            }
        }
    }

    /// Chooses the slabs whose pages are looked for next, of those that servers within reach want back: none whose
    /// stored pages are, while others are still to move.
    fn begin_pass(&mut self) {
        let search = &mut self.search;
        search.is_asked = false;
        // Before the servers are looked at: who comes meanwhile is looked at once more.
        search.arrivals = self.shared.slots.arrivals();
        search.groups.clear();
        let wanted = self.shared.slots.vacating_within_reach();
        let groups: HashSet<u32> = wanted.iter().map(|(group, _)| *group).collect();
        search.searched.retain(|group| groups.contains(group));
        let has_new = !groups.is_subset(&search.unkept);
        search.unkept = groups;
        if self.to_move.is_empty() {
            search.choose(&wanted);
        }
        let is_searched = !search.groups.is_empty();
        search.is_due = is_searched || !self.to_move.is_empty();
        search.next = (is_searched || has_new).then_some(self.range.first);
    }

    /// Has a page leave its slot, if that is in one of the slabs that are looked for.
    fn vacate(&mut self, page: PageIndex) {
        let entry = self.shared.table.load(page);
        let search = &self.search;
        let is_in = |groups: &HashSet<u32>| {
            let slot = entry.slot;
            slot.is_some_and(|slot| groups.contains(&slot.group))
        };
        match entry.state {
            State::Stored if is_in(&search.groups) => self.move_if_vacating(page),
            State::Resident if is_in(&search.unkept) => self.keep_as_dirty(page, entry),
            // A run in work is looked at when it ends.
            _ => {}
        }
    }

    /// Has a page move if it is stored in a slab that its server has asked for.
    pub(super) fn move_if_vacating(&mut self, page: PageIndex) {
        if self.vacating_slot(page).is_some() {
            self.to_move.insert(page);
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
        self.look_for_moves();
        let capacity = self.shared.staging.capacity() as usize;
        let most = match capacity {
            0 => MOVES_MOST,
            capacity => (capacity / MOVES_SHARE).clamp(1, MOVES_MOST),
        };
        let mut dropped = 0;
        self.search.is_cut_short = false;
        while self.moving.len() < most
            && let Some(page) = self.to_move.first().copied()
        {
            if dropped == LOOKS {
                self.search.is_cut_short = true;
                return;
            }
            let entry = self.shared.table.load(page);
            let slot = self
                .vacating_slot(page)
                .filter(|_| entry.state == State::Stored);
            // Whoever waits for the page already brings it home, and its slot is dropped then.
            let Some(slot) = slot.filter(|_| !self.pending.contains_key(&page)) else {
                self.to_move.remove(&page);
                dropped += 1;
                continue;
            };
            // It is looked for once more when its server is back, and holds up no others until then.
            if !self.is_near(page) {
                self.to_move.remove(&page);
                self.search.searched.remove(&slot.group);
                dropped += 1;
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
            self.to_move.remove(&page);
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
