//! Places in the staging area, and who holds each.
//!
//! A slot is taken when a run starts and held by its page while that is `Staged`. The writer
//! claims it for the time of a write; a page taken back meanwhile leaves the slot to the writer's
//! end. Tickets carry a turn number, so that a stale write-back order finds out that the slot has
//! moved on.
//!
//! A slot whose page's bytes are safe elsewhere too may be left as a *spare copy*: it is as good as free,
//! and while it is nobody else's, the page may be had back from it. So what left last, and was perhaps
//! evicted too early, costs no server, in memory that staging takes anyway. The oldest are given to others
//! first. That the bytes are the page's is for whoever takes them to check, by the page's tag.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use foldhash::HashMap;

use super::{Generation, PageIndex, StagingSlot};

/// A slot at one turn of its use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    /// The place.
    pub slot: StagingSlot,
    turn: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// Not in use; on the free list.
    Free,
    /// Not in use, and not to be used: beyond the capacity.
    Retired,
    /// As good as free, with bytes that their page may have back.
    Spare,
    /// Holds a page's bytes.
    Held,
    /// Holds a page's bytes, which are being written to a server.
    Writing,
    /// Being written, but no page's any longer.
    Orphaned,
}

/// A copy of a page that is safe elsewhere too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spare {
    /// Where it lies.
    pub slot: StagingSlot,
    /// Whose it is.
    pub page: PageIndex,
    /// Which of its contents.
    pub generation: Generation,
    /// Whether it lies there as it left for the server, or as the guest had it.
    pub is_sealed: bool,
}

#[derive(Debug)]
struct Slots {
    uses: Vec<(Use, u32)>,
    free: Vec<u32>,
    /// One a page, each in a slot that is [`Use::Spare`].
    spares: HashMap<PageIndex, Spare>,
    /// Slots that became spare at a turn of theirs, and for which page, oldest first; some are so no longer.
    spare_since: VecDeque<(u32, u32, PageIndex)>,
    capacity: u32,
    retired: Vec<StagingSlot>,
}

/// The slots of a staging area; a leaf lock guards them.
#[derive(Debug)]
pub struct StagingPool {
    slots: Mutex<Slots>,
    /// A shard found no slot free, and waits to be told of one.
    starved: AtomicBool,
}

impl Slots {
    fn available(&self) -> u32 {
        (self.free.len() + self.spares.len()) as u32
    }

    fn put_back(&mut self, slot: StagingSlot) {
        if slot.0 < self.capacity {
            self.uses[slot.0 as usize].0 = Use::Free;
            self.free.push(slot.0);
        } else {
            self.uses[slot.0 as usize].0 = Use::Retired;
            self.retired.push(slot);
        }
    }

    /// Frees so many of the slots with spare copies, or all.
    fn free_spares(&mut self, mut count: usize) {
        while count > 0
            && let Some((slot, turn, page)) = self.spare_since.pop_front()
        {
            if self.uses[slot as usize] == (Use::Spare, turn) {
                self.spares.remove(&page);
                self.put_back(StagingSlot(slot));
                count -= 1;
            }
        }
    }

    fn drop_spares(&mut self, is_dropped: impl Fn(&Spare) -> bool) {
        let dropped: Vec<Spare> = self.spares.values().copied().filter(is_dropped).collect();
        for spare in dropped {
            self.spares.remove(&spare.page);
            self.put_back(spare.slot);
        }
    }

    /// Forgets since when slots were spare that are so no longer, before they outnumber the others.
    fn tidy_spares(&mut self) {
        if self.spare_since.len() > 2 * self.capacity as usize {
            let uses = &self.uses;
            self.spare_since
                .retain(|(slot, turn, _)| uses[*slot as usize] == (Use::Spare, *turn));
        }
    }
}

impl StagingPool {
    /// A pool of `capacity` slots.
    pub fn new(capacity: u32) -> Self {
        let pool = Self {
            slots: Mutex::new(Slots {
                uses: Vec::new(),
                free: Vec::new(),
                spares: HashMap::default(),
                spare_since: VecDeque::new(),
                capacity: 0,
                retired: Vec::new(),
            }),
            starved: AtomicBool::new(false),
        };
        pool.set_capacity(capacity);
        pool
    }

    fn slots(&self) -> std::sync::MutexGuard<'_, Slots> {
        // A panic elsewhere does not make the slots' states wrong: each change is one assignment.
        self.slots
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Changes the number of slots; backing memory for growth must be there before, and stay. Slots in use
    /// beyond a smaller capacity are retired once free; those free are retired now.
    pub fn set_capacity(&self, capacity: u32) {
        let mut slots = self.slots();
        slots.capacity = capacity;
        slots.drop_spares(|spare| spare.slot.0 >= capacity);
        let known = slots.uses.len() as u32;
        for slot in known..capacity {
            slots.uses.push((Use::Retired, 0));
            debug_assert_eq!(slots.uses.len() as u32, slot + 1);
        }
        for slot in 0..slots.uses.len() as u32 {
            let used = slots.uses[slot as usize].0;
            if used == Use::Retired && slot < capacity {
                slots.uses[slot as usize].0 = Use::Free;
                slots.free.push(slot);
                slots.retired.retain(|retired| retired.0 != slot);
            } else if used == Use::Free && slot >= capacity {
                slots.uses[slot as usize].0 = Use::Retired;
                slots.retired.push(StagingSlot(slot));
            }
        }
        slots.free.retain(|slot| *slot < capacity);
        // Low numbers are handed out first.
        slots.free.sort_unstable_by(|a, b| b.cmp(a));
    }

    /// Slots beyond the capacity were given memory, and are not to be used after all: those that hold nothing
    /// are retired once more. The others are as they come free.
    pub fn retire_unused(&self, range: std::ops::Range<u32>) {
        let mut slots = self.slots();
        let range = range.start.max(slots.capacity)..range.end;
        // Each once.
        slots.retired.retain(|retired| !range.contains(&retired.0));
        for slot in range {
            let used = slots.uses.get(slot as usize);
            if used.is_none_or(|(used, _)| *used == Use::Retired) {
                slots.retired.push(StagingSlot(slot));
            }
        }
    }

    /// Slots retired since the last call: their memory can be given back, before they may be used again by
    /// a capacity that grows.
    pub fn drain_retired(&self) -> Vec<StagingSlot> {
        std::mem::take(&mut self.slots().retired)
    }

    /// Slots whose memory is not given back yet: in use or usable.
    pub fn backed(&self) -> u64 {
        let slots = self.slots();
        let retired = slots
            .uses
            .iter()
            .filter(|(used, _)| *used == Use::Retired)
            .count();
        (slots.uses.len() - retired + slots.retired.len()) as u64
    }

    /// Slots that are free or as good as.
    pub fn available(&self) -> u32 {
        self.slots().available()
    }

    /// Slots of the capacity that are not.
    pub fn taken(&self) -> u32 {
        let slots = self.slots();
        slots.capacity.saturating_sub(slots.available())
    }

    /// Notes that a shard needs slots and found none. It looks once more after that.
    pub fn note_starved(&self) {
        self.starved.store(true, Ordering::SeqCst);
    }

    /// Whether slots are free that a shard waits for; tells so once.
    pub fn ends_starvation(&self) -> bool {
        self.starved.load(Ordering::SeqCst)
            && self.available() > 0
            && self.starved.swap(false, Ordering::SeqCst)
    }

    /// Slots in use.
    pub fn in_use(&self) -> u32 {
        let slots = self.slots();
        let idle = |used: Use| matches!(used, Use::Free | Use::Spare | Use::Retired);
        slots.uses.iter().filter(|(used, _)| !idle(*used)).count() as u32
    }

    /// The capacity in slots.
    pub fn capacity(&self) -> u32 {
        self.slots().capacity
    }

    /// Takes `count` slots, or none.
    pub fn take(&self, count: u32) -> Option<Vec<Ticket>> {
        let mut slots = self.slots();
        let lacking = (count as usize).saturating_sub(slots.free.len());
        if lacking > slots.spares.len() {
            return None;
        }
        slots.free_spares(lacking);
        let keep = slots.free.len().checked_sub(count as usize)?;
        let mut taken = slots.free.split_off(keep);
        taken.reverse();
        let ticket = |slot: u32, slots: &mut Slots| {
            let (used, turn) = &mut slots.uses[slot as usize];
            debug_assert_eq!(*used, Use::Free);
            *used = Use::Held;
            *turn = turn.wrapping_add(1);
            Ticket {
                slot: StagingSlot(slot),
                turn: *turn,
            }
        };
        Some(
            taken
                .into_iter()
                .map(|slot| ticket(slot, &mut slots))
                .collect(),
        )
    }

    /// Ends all spare copies.
    #[cfg(test)]
    pub(super) fn drop_spares(&self) {
        self.slots().drop_spares(|_| true);
    }

    /// Takes a slot that a page held before the process was started anew. Before the capacity is
    /// set; `None` where it is taken already.
    pub fn claim(&self, slot: StagingSlot) -> Option<Ticket> {
        let mut slots = self.slots();
        let place = slot.0 as usize;
        if slots.uses.len() <= place {
            slots.uses.resize(place + 1, (Use::Retired, 0));
        }
        let (used, turn) = &mut slots.uses[place];
        if *used != Use::Retired {
            return None;
        }
        (*used, *turn) = (Use::Held, 1);
        Some(Ticket { slot, turn: 1 })
    }

    /// Its page's bytes are safe elsewhere: the page no longer needs the slot, and may have it back.
    pub fn keep_spare(&self, spare: Spare) {
        let mut slots = self.slots();
        let (used, turn) = slots.uses[spare.slot.0 as usize];
        assert_eq!(used, Use::Held, "staging slot {} is kept", spare.slot.0);
        if spare.slot.0 >= slots.capacity {
            return slots.put_back(spare.slot);
        }
        slots.uses[spare.slot.0 as usize].0 = Use::Spare;
        if let Some(older) = slots.spares.insert(spare.page, spare) {
            slots.put_back(older.slot);
        }
        slots.tidy_spares();
        slots
            .spare_since
            .push_back((spare.slot.0, turn, spare.page));
    }

    /// The spare copy of a page at a generation, if there is one: the slot is held, and to be released.
    pub fn take_spare(&self, page: PageIndex, generation: Generation) -> Option<Spare> {
        let mut slots = self.slots();
        let spare = slots.spares.remove(&page)?;
        if spare.generation != generation {
            slots.put_back(spare.slot);
            return None;
        }
        let (used, turn) = &mut slots.uses[spare.slot.0 as usize];
        (*used, *turn) = (Use::Held, turn.wrapping_add(1));
        Some(spare)
    }

    /// The page no longer needs its slot. Freed at once, or by [`Self::end_write`] if it is being
    /// written.
    pub fn release(&self, slot: StagingSlot) {
        let mut slots = self.slots();
        match slots.uses[slot.0 as usize].0 {
            Use::Held => slots.put_back(slot),
            Use::Writing => slots.uses[slot.0 as usize].0 = Use::Orphaned,
            used => panic!("staging slot {} released while {used:?}", slot.0),
        }
    }

    /// Whether a page holds its slot still, and it is not being written.
    pub fn is_held(&self, ticket: Ticket) -> bool {
        self.slots().uses[ticket.slot.0 as usize] == (Use::Held, ticket.turn)
    }

    /// Claims a slot for a write; false where the page was taken back meanwhile: nothing to do.
    pub fn start_write(&self, ticket: Ticket) -> bool {
        let mut slots = self.slots();
        let (used, turn) = &mut slots.uses[ticket.slot.0 as usize];
        let current = *turn == ticket.turn && *used == Use::Held;
        if current {
            *used = Use::Writing;
        }
        current
    }

    /// Ends a write. True where the page still held the slot: it is `Held` again and the page's
    /// owner releases it; false where it had been orphaned, and is free now.
    pub fn end_write(&self, ticket: Ticket) -> bool {
        let mut slots = self.slots();
        match slots.uses[ticket.slot.0 as usize] {
            (Use::Writing, turn) if turn == ticket.turn => {
                slots.uses[ticket.slot.0 as usize].0 = Use::Held;
                true
            }
            (Use::Orphaned, turn) if turn == ticket.turn => {
                slots.put_back(ticket.slot);
                false
            }
            other => panic!(
                "write of staging slot {} ended while {other:?}",
                ticket.slot.0
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_taken_back_while_written_is_freed_at_the_writes_end() {
        let pool = StagingPool::new(1);
        let ticket = pool.take(1).expect("one is free")[0];
        assert!(pool.start_write(ticket));
        pool.release(ticket.slot);
        assert_eq!(pool.available(), 0);
        assert!(!pool.end_write(ticket));
        assert_eq!(pool.available(), 1);
    }

    #[test]
    fn a_stale_order_finds_that_the_slot_moved_on() {
        let pool = StagingPool::new(1);
        let old = pool.take(1).expect("one is free")[0];
        pool.release(old.slot);
        let new = pool.take(1).expect("one is free")[0];
        assert!(!pool.start_write(old));
        assert!(pool.start_write(new));
    }

    #[test]
    fn slots_are_taken_all_or_none() {
        let pool = StagingPool::new(3);
        assert!(pool.take(4).is_none());
        assert_eq!(pool.available(), 3);
        assert_eq!(pool.take(3).map(|taken| taken.len()), Some(3));
    }

    #[test]
    fn claimed_slots_are_no_others_and_come_free_as_any() {
        let pool = StagingPool::new(0);
        let held = pool.claim(StagingSlot(1)).expect("free");
        let beyond = pool.claim(StagingSlot(7)).expect("free");
        assert_eq!(pool.claim(StagingSlot(1)), None);
        pool.set_capacity(3);
        assert_eq!((pool.available(), pool.in_use(), pool.backed()), (2, 2, 4));
        assert!(pool.start_write(held));
        assert!(pool.end_write(held));
        pool.release(held.slot);
        pool.release(beyond.slot);
        assert_eq!((pool.available(), pool.in_use()), (3, 0));
        assert_eq!(pool.drain_retired(), [StagingSlot(7)]);
    }

    fn spare(slot: StagingSlot, page: u32, generation: u64) -> Spare {
        Spare {
            slot,
            page: PageIndex(page),
            generation: Generation(generation),
            is_sealed: true,
        }
    }

    #[test]
    fn a_spare_copy_is_there_until_its_slot_is_anothers() {
        let pool = StagingPool::new(2);
        let taken = pool.take(2).expect("two are free");
        let (older, newer) = (spare(taken[0].slot, 7, 1), spare(taken[1].slot, 8, 1));
        pool.keep_spare(older);
        pool.keep_spare(newer);
        assert_eq!((pool.available(), pool.in_use()), (2, 0));
        assert_eq!(pool.take_spare(newer.page, newer.generation), Some(newer));
        assert_eq!(pool.take_spare(newer.page, newer.generation), None);
        assert_eq!((pool.available(), pool.in_use()), (1, 1));
        let other = pool.take(1).expect("as good as free")[0];
        assert_eq!(other.slot, older.slot);
        assert_eq!(pool.take_spare(older.page, older.generation), None);
        assert!(pool.take(1).is_none());
        pool.release(newer.slot);
        pool.release(other.slot);
        assert_eq!((pool.available(), pool.in_use()), (2, 0));
    }

    #[test]
    fn the_oldest_spare_copies_go_first() {
        let pool = StagingPool::new(3);
        for (ticket, page) in pool.take(3).expect("three are free").into_iter().zip(7..) {
            pool.keep_spare(spare(ticket.slot, page, 1));
        }
        let again = pool.take_spare(PageIndex(7), Generation(1)).expect("there");
        pool.keep_spare(again);
        assert_eq!(pool.take(1).map(|taken| taken.len()), Some(1));
        let left = [7, 8, 9].map(|page| pool.take_spare(PageIndex(page), Generation(1)).is_some());
        assert_eq!(left, [true, false, true]);
    }

    #[test]
    fn a_page_has_one_spare_copy_and_none_of_an_earlier_content() {
        let pool = StagingPool::new(3);
        let taken = pool.take(2).expect("two are free");
        pool.keep_spare(spare(taken[0].slot, 7, 1));
        pool.keep_spare(spare(taken[1].slot, 7, 2));
        assert_eq!((pool.available(), pool.in_use()), (3, 0));
        assert_eq!(pool.take_spare(PageIndex(7), Generation(3)), None);
        assert_eq!(
            (pool.available(), pool.take(3).map(|all| all.len())),
            (3, Some(3))
        );
    }

    #[test]
    fn a_smaller_capacity_ends_spare_copies_beyond_it() {
        let pool = StagingPool::new(2);
        for (ticket, page) in pool.take(2).expect("two are free").into_iter().zip(7..) {
            pool.keep_spare(spare(ticket.slot, page, 1));
        }
        pool.set_capacity(1);
        assert_eq!((pool.available(), pool.backed()), (1, 2));
        assert_eq!(pool.drain_retired(), [StagingSlot(1)]);
        assert!(pool.take_spare(PageIndex(7), Generation(1)).is_some());
        assert!(pool.take_spare(PageIndex(8), Generation(1)).is_none());
    }

    #[test]
    fn a_smaller_capacity_retires_slots_as_they_come_free() {
        let pool = StagingPool::new(4);
        let held = pool.take(4).expect("four are free");
        pool.set_capacity(2);
        assert!(pool.drain_retired().is_empty());
        assert_eq!(pool.backed(), 4);
        for ticket in &held {
            pool.release(ticket.slot);
        }
        assert_eq!(pool.drain_retired().len(), 2);
        assert_eq!((pool.available(), pool.backed()), (2, 2));
        pool.set_capacity(3);
        assert_eq!((pool.available(), pool.backed()), (3, 3));
    }

    #[test]
    fn memory_given_for_nothing_is_given_back_but_for_slots_that_are_held() {
        let pool = StagingPool::new(4);
        let held = pool.take(4).expect("four are free");
        pool.set_capacity(2);
        pool.release(held[2].slot);
        assert_eq!(pool.drain_retired(), [StagingSlot(2)]);
        let unused = [2, 4, 5].map(StagingSlot);
        // By a second try before anything was given back, too.
        for range in [2..6, 0..6] {
            pool.retire_unused(range);
            assert_eq!(pool.backed(), 6);
        }
        assert_eq!(pool.drain_retired(), unused);
        pool.release(held[3].slot);
        pool.release(held[0].slot);
        pool.retire_unused(2..4);
        assert_eq!(pool.drain_retired(), [2, 3].map(StagingSlot));
        pool.set_capacity(6);
        assert_eq!((pool.available(), pool.backed()), (5, 6));
    }
}
