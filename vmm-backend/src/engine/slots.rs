//! Places on the memory servers: which slabs are leased, and which of their slots hold a page.
//!
//! Slots belong to a *group* of slabs, so that copies and parity can be found by one (group, slot)
//! without more bytes a page. The pager makes groups of one slab; those of several, each with a copy
//! of every page at the same index, are proved in the simulation. A group that has lost one of its
//! copies takes no more pages, and those that it has are to be moved to another.
//!
//! Pages are placed in the fullest group that has room, so that sparse ones empty out and can be
//! given back.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::SlotId;

/// Groups that a guest may have had ever: an entry of the page table has 24 bits for a group's number.
pub const MOST_GROUPS: u32 = 1 << 24;

/// A server in its configured order.
pub type ServerIndex = usize;

/// A slab: the server that lends it, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlabRef {
    /// The server.
    pub server: ServerIndex,
    /// The slab's number at that server.
    pub slab: u64,
}

/// Where a slot's bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The slab.
    pub slab: SlabRef,
    /// Page within the slab.
    pub index: u32,
}

/// One copy of a group: its number, and where it lies. Those of the same number are copies of each
/// other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupPlace {
    /// The number that slots name it by.
    pub number: u32,
    /// Its slab.
    pub slab: SlabRef,
    /// Pages that the slab holds.
    pub slots: u32,
}

/// What became of groups whose slabs are gone.
#[derive(Debug, Default)]
pub struct Forgotten {
    /// No copy is left of these.
    pub lost: HashSet<u32>,
    /// These have one copy less, and their pages are to be moved.
    pub degraded: Vec<u32>,
}

#[derive(Debug)]
struct Group {
    /// One slab a copy, at least one.
    slabs: Vec<SlabRef>,
    /// A set bit is a free slot.
    free: Vec<u64>,
    /// No word before this one has a set bit.
    first_free: usize,
    slots: u32,
    used: u32,
    /// A server wants its slab back, or a copy is lost: nothing new is placed in it.
    vacating: bool,
}

impl Group {
    /// Slabs of which every slot is free.
    fn new(slabs: &[SlabRef], slots: u32) -> Self {
        let mut free = vec![u64::MAX; (slots as usize).div_ceil(64)];
        if !slots.is_multiple_of(64) {
            *free.last_mut().expect("a slab has at least one slot") = (1 << (slots % 64)) - 1;
        }
        Self {
            slabs: slabs.to_vec(),
            free,
            first_free: 0,
            slots,
            used: 0,
            vacating: false,
        }
    }

    /// Takes this very slot; false where there is none such, or it is taken.
    fn claim(&mut self, index: u32) -> bool {
        let (word, bit) = (index as usize / 64, 1u64 << (index % 64));
        let is_free = index < self.slots && self.free[word] & bit != 0;
        if is_free {
            self.free[word] &= !bit;
            self.used += 1;
        }
        is_free
    }

    fn take(&mut self) -> Option<u32> {
        let rest = self.free[self.first_free..].iter();
        let word = self.first_free + rest.take_while(|word| **word == 0).count();
        self.first_free = word;
        let bit = self.free.get(word)?.trailing_zeros();
        self.free[word] &= !(1 << bit);
        self.used += 1;
        Some(word as u32 * 64 + bit)
    }

    fn put_back(&mut self, index: u32) {
        let (word, bit) = (index as usize / 64, 1u64 << (index % 64));
        assert!(self.free[word] & bit == 0, "slot {index} freed twice");
        self.free[word] |= bit;
        self.first_free = self.first_free.min(word);
        self.used -= 1;
    }

    fn room(&self) -> u32 {
        if self.vacating {
            0
        } else {
            self.slots - self.used
        }
    }
}

#[derive(Debug, Default)]
struct Groups {
    /// Those there are, by number: a guest that gives memory back and takes more has had far more of them.
    groups: BTreeMap<u32, Group>,
    /// The next one's number. None is used again: a slot of a slab that is gone stays known as such.
    next: u32,
    releasable: Vec<SlabRef>,
}

impl Groups {
    /// The group of a slot, unless its slabs are gone.
    fn of(&self, slot: SlotId) -> Option<&Group> {
        self.groups.get(&slot.group)
    }

    fn used(&self) -> u64 {
        let groups = self.groups.values();
        groups.map(|group| u64::from(group.used)).sum()
    }

    fn room(&self) -> u64 {
        let groups = self.groups.values();
        groups.map(|group| u64::from(group.room())).sum()
    }
}

/// All slots of a guest. A leaf lock guards the groups.
#[derive(Debug)]
pub struct SlotPool {
    groups: Mutex<Groups>,
    connected: Vec<AtomicBool>,
    /// How often a server came within reach.
    arrivals: AtomicU64,
    kept: AtomicU64,
    keep_allowance: AtomicU64,
    /// Whether servers have promised more than is in use.
    has_unneeded: AtomicBool,
    /// Kept slots that other pages need.
    wanted_back: AtomicU64,
    /// Pages that may begin to leave slabs that their servers want back.
    may_move: AtomicU64,
}

impl SlotPool {
    /// A pool over `servers` servers, none of them connected yet.
    pub fn new(servers: usize) -> Self {
        Self {
            groups: Mutex::default(),
            connected: (0..servers).map(|_| AtomicBool::new(false)).collect(),
            arrivals: AtomicU64::new(0),
            kept: AtomicU64::new(0),
            keep_allowance: AtomicU64::new(0),
            has_unneeded: AtomicBool::new(false),
            wanted_back: AtomicU64::new(0),
            may_move: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Groups> {
        // Each change of a group is complete before anything in it can panic.
        self.groups
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Notes whether a server is connected *and* its lease valid.
    pub fn set_connected(&self, server: ServerIndex, connected: bool) {
        let was_connected = self.connected[server].swap(connected, Ordering::AcqRel);
        if connected && !was_connected {
            self.arrivals.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// How often a server came within reach.
    pub(super) fn arrivals(&self) -> u64 {
        self.arrivals.load(Ordering::Acquire)
    }

    /// Whether the server is connected and its lease valid.
    pub fn is_connected(&self, server: ServerIndex) -> bool {
        self.connected[server].load(Ordering::Acquire)
    }

    /// Adds a leased slab of `slots` pages, a group by itself. There must be a number left for it: see
    /// [`SlotPool::next_group`].
    pub fn add_slab(&self, slab: SlabRef, slots: u32) {
        self.add_group(&[slab], slots);
    }

    /// Adds a group of leased slabs of `slots` pages each, every one of them a copy.
    pub fn add_group(&self, slabs: &[SlabRef], slots: u32) {
        let mut inner = self.lock();
        let number = inner.next;
        assert!(number < MOST_GROUPS, "no number is left for a group");
        inner.groups.insert(number, Group::new(slabs, slots));
        inner.next += 1;
    }

    /// The groups there are, copy by copy. With [`SlotPool::restore`] slots of the table mean the same
    /// again in another process.
    pub fn groups(&self) -> Vec<GroupPlace> {
        let inner = self.lock();
        let places = inner.groups.iter().flat_map(|(number, group)| {
            group.slabs.iter().map(|slab| GroupPlace {
                number: *number,
                slab: *slab,
                slots: group.slots,
            })
        });
        places.collect()
    }

    /// The number that the next slab's group gets; [`MOST_GROUPS`] where none is left.
    pub fn next_group(&self) -> u32 {
        self.lock().next
    }

    /// Groups of a former process, all of their slots free. Into an empty pool; no later group gets
    /// a number below `next`.
    pub fn restore(&self, places: &[GroupPlace], next: u32) {
        let mut inner = self.lock();
        let numbers = places.iter().map(|place| place.number + 1);
        inner.next = numbers.fold(next, u32::max);
        for place in places {
            match inner.groups.entry(place.number) {
                Entry::Occupied(group) => group.into_mut().slabs.push(place.slab),
                Entry::Vacant(none) => {
                    none.insert(Group::new(&[place.slab], place.slots));
                }
            }
        }
    }

    /// Takes the slot that a page of a former process has; false where it is not to be had.
    pub fn claim(&self, slot: SlotId) -> bool {
        let mut inner = self.lock();
        let group = inner.groups.get_mut(&slot.group);
        group.is_some_and(|group| group.claim(slot.index))
    }

    /// Forgets restored groups in which no slot was claimed.
    pub fn forget_unclaimed(&self) {
        self.lock().groups.retain(|_, group| group.used > 0);
    }

    /// Takes up to `count` slots on connected servers that `may_take` more.
    pub fn allocate(&self, count: usize, may_take: &dyn Fn(ServerIndex) -> bool) -> Vec<SlotId> {
        self.take(count, &|group| {
            group.room() > 0 && self.takes_more(group, may_take)
        })
    }

    /// The same, in slabs that their servers want back: where a guest could not go on otherwise.
    pub fn allocate_vacating(
        &self,
        count: usize,
        may_take: &dyn Fn(ServerIndex) -> bool,
    ) -> Vec<SlotId> {
        self.take(count, &|group| {
            group.vacating && group.used < group.slots && self.takes_more(group, may_take)
        })
    }

    /// Takes up to `count` slots of groups that are `fit`, which have one free.
    fn take(&self, count: usize, fit: &dyn Fn(&Group) -> bool) -> Vec<SlotId> {
        let mut inner = self.lock();
        let mut taken = Vec::with_capacity(count);
        while taken.len() < count {
            let fitting = inner.groups.iter_mut().filter(|(_, group)| fit(group));
            let fullest = fitting.min_by_key(|(_, group)| group.slots - group.used);
            let Some((&number, group)) = fullest else {
                break;
            };
            while taken.len() < count {
                let Some(index) = group.take() else { break };
                taken.push(SlotId {
                    group: number,
                    index,
                });
            }
        }
        taken
    }

    /// Frees a slot. A slab that becomes empty while others have room is queued for release.
    pub fn free(&self, slot: SlotId) {
        let mut inner = self.lock();
        let Some(group) = inner.groups.get_mut(&slot.group) else {
            // Its slab was lost meanwhile, and the slot with it.
            return;
        };
        group.put_back(slot.index);
        let (empty, vacating, size) = (group.used == 0, group.vacating, u64::from(group.slots));
        // One empty slab is kept against lease traffic back and forth.
        if empty
            && (vacating || inner.room() >= 2 * size)
            && let Some(group) = inner.groups.remove(&slot.group)
        {
            inner.releasable.extend(group.slabs);
        }
    }

    /// Slabs emptied since the last call, to be given back to their servers.
    pub fn drain_releasable(&self) -> Vec<SlabRef> {
        std::mem::take(&mut self.lock().releasable)
    }

    fn reaches_all(&self, group: &Group) -> bool {
        let mut slabs = group.slabs.iter();
        slabs.all(|slab| self.is_connected(slab.server))
    }

    fn takes_more(&self, group: &Group, may_take: &dyn Fn(ServerIndex) -> bool) -> bool {
        self.reaches_all(group) && group.slabs.iter().all(|slab| may_take(slab.server))
    }

    fn reaches_one(&self, group: &Group) -> bool {
        let mut slabs = group.slabs.iter();
        slabs.any(|slab| self.is_connected(slab.server))
    }

    /// Where a slot lies, within reach if any copy is; `None` where all of its slabs are gone.
    pub fn place(&self, slot: SlotId) -> Option<Place> {
        let inner = self.lock();
        let slabs = &inner.of(slot)?.slabs;
        let near = slabs.iter().find(|slab| self.is_connected(slab.server));
        near.or(slabs.first()).map(|slab| Place {
            slab: *slab,
            index: slot.index,
        })
    }

    /// Every place where a slot's bytes lie.
    pub fn copies(&self, slot: SlotId) -> Vec<Place> {
        let inner = self.lock();
        let slabs = inner.of(slot).map(|group| &group.slabs);
        let place = |slab: &SlabRef| Place {
            slab: *slab,
            index: slot.index,
        };
        slabs.into_iter().flatten().map(place).collect()
    }

    /// Whether a slot's bytes can be relied upon now: a copy's server connected, its lease valid.
    pub fn is_safe(&self, slot: SlotId) -> bool {
        let inner = self.lock();
        inner
            .of(slot)
            .is_some_and(|group| !group.vacating && self.reaches_one(group))
    }

    /// Whether a slot's bytes can be had now.
    pub(super) fn is_within_reach(&self, slot: SlotId) -> bool {
        let inner = self.lock();
        inner.of(slot).is_some_and(|group| self.reaches_one(group))
    }

    /// Slots free on connected servers that `may_take` more.
    pub fn room(&self, may_take: &dyn Fn(ServerIndex) -> bool) -> u64 {
        let inner = self.lock();
        let groups = inner.groups.values();
        groups
            .filter(|group| group.room() > 0 && self.takes_more(group, may_take))
            .map(|group| u64::from(group.room()))
            .sum()
    }

    /// Forgets slabs whose contents are gone, and names their groups. The caller must have every
    /// shard drop slots of those that are lost before a slab is added again.
    pub fn forget(&self, gone: &[SlabRef]) -> Forgotten {
        let mut inner = self.lock();
        let mut forgotten = Forgotten::default();
        inner.groups.retain(|number, group| {
            let copies = group.slabs.len();
            group.slabs.retain(|slab| !gone.contains(slab));
            if group.slabs.is_empty() {
                forgotten.lost.insert(*number);
            } else if group.slabs.len() < copies {
                group.vacating = true;
                forgotten.degraded.push(*number);
            }
            !group.slabs.is_empty()
        });
        forgotten
    }

    /// Stops placing pages in a slab that its server wants back, and names its group; an empty
    /// slab is queued for release at once.
    pub fn vacate(&self, slab: SlabRef) -> Option<u32> {
        let mut inner = self.lock();
        let mut groups = inner.groups.iter_mut();
        let (&number, group) = groups.find(|(_, group)| group.slabs.contains(&slab))?;
        group.vacating = true;
        if group.used == 0 {
            let empty = inner.groups.remove(&number)?;
            inner.releasable.extend(empty.slabs);
            return None;
        }
        Some(number)
    }

    /// Whether a slot's server wants its slab back.
    pub fn is_vacating(&self, slot: SlotId) -> bool {
        let inner = self.lock();
        inner.of(slot).is_some_and(|group| group.vacating)
    }

    /// Pages that lie in slabs that their servers want back.
    pub fn vacating_pages(&self) -> u64 {
        let inner = self.lock();
        let vacating = inner.groups.values().filter(|group| group.vacating);
        vacating.map(|group| u64::from(group.used)).sum()
    }

    /// Groups of which slabs are wanted back by their servers, and that can be reached, in the order of their numbers;
    /// and how many pages lie in each.
    pub(super) fn vacating_within_reach(&self) -> Vec<(u32, u32)> {
        let inner = self.lock();
        let groups = inner.groups.iter();
        let wanted = groups.filter(|(_, group)| group.vacating && self.reaches_one(group));
        wanted
            .map(|(number, group)| (*number, group.used))
            .collect()
    }

    /// Sets how many pages may begin to leave such slabs, until it is set again.
    pub(super) fn allow_moves(&self, pages: u64) {
        self.may_move.store(pages, Ordering::Release);
    }

    /// Whether one more may.
    pub(super) fn may_move(&self) -> bool {
        self.may_move.load(Ordering::Acquire) > 0
    }

    /// Counts one that does.
    pub(super) fn count_move(&self) {
        take_one(&self.may_move);
    }

    /// Slabs leased and pages in them, of one server.
    pub fn usage(&self, server: ServerIndex) -> (u64, u64) {
        let inner = self.lock();
        let groups = inner
            .groups
            .values()
            .filter(|group| group.slabs.iter().any(|slab| slab.server == server));
        groups.fold((0, 0), |(slabs, pages), group| {
            (slabs + 1, pages + u64::from(group.used))
        })
    }

    /// Sets how many resident pages may keep their slot besides, whatever else needs slots.
    pub fn set_keep_allowance(&self, pages: u64) {
        self.keep_allowance.store(pages, Ordering::Relaxed);
    }

    /// Notes how many pages servers within reach have promised room for, and how many of them are to be
    /// left to what is on its way there: what is promised beyond, and not in use, resident pages may
    /// keep, until [`SlotPool::want_back`].
    pub fn set_promised(&self, pages: u64, left: u64) {
        let is_unneeded = self.lock().used() + left <= pages;
        self.has_unneeded.store(is_unneeded, Ordering::Relaxed);
    }

    /// Asks shards for so many slots that resident pages keep; whether they were asked for none before.
    pub fn want_back(&self, slots: u64) -> bool {
        if slots > 0 {
            self.has_unneeded.store(false, Ordering::Relaxed);
        }
        self.wanted_back.swap(slots, Ordering::AcqRel) == 0
    }

    /// Whether slots that resident pages keep are asked for.
    pub(super) fn wants_back(&self) -> bool {
        self.wanted_back.load(Ordering::Acquire) > 0
    }

    /// Whether one more is asked for, which the caller gives back then.
    pub(super) fn claim_wanted_back(&self) -> bool {
        take_one(&self.wanted_back)
    }

    /// Whether one more resident page may keep its slot, and counts it if so.
    pub fn try_keep(&self) -> bool {
        let allowance = match self.has_unneeded.load(Ordering::Relaxed) {
            true => u64::MAX,
            false => self.keep_allowance.load(Ordering::Relaxed),
        };
        self.kept
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |kept| {
                (kept < allowance).then_some(kept + 1)
            })
            .is_ok()
    }

    /// A resident page no longer keeps its slot.
    pub fn end_keep(&self) {
        self.kept.fetch_sub(1, Ordering::AcqRel);
    }

    /// Resident pages that keep their slot.
    pub fn kept(&self) -> u64 {
        self.kept.load(Ordering::Relaxed)
    }
}

/// Counts one down; false where none is left.
fn take_one(counter: &AtomicU64) -> bool {
    let less = |left: u64| left.checked_sub(1);
    counter
        .fetch_update(Ordering::AcqRel, Ordering::Acquire, less)
        .is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLAB: SlabRef = SlabRef { server: 0, slab: 7 };

    fn pool(slabs: u64, slots: u32) -> SlotPool {
        let pool = SlotPool::new(1);
        pool.set_connected(0, true);
        for slab in 0..slabs {
            pool.add_slab(
                SlabRef {
                    server: 0,
                    slab: 7 + slab,
                },
                slots,
            );
        }
        pool
    }

    #[test]
    fn each_slot_is_handed_out_once() {
        let pool = pool(2, 70);
        let taken: HashSet<_> = pool.allocate(1000, &|_| true).into_iter().collect();
        assert_eq!(taken.len(), 140);
        assert!(taken.iter().all(|slot| slot.index < 70));
        assert_eq!(pool.room(&|_| true), 0);
    }

    #[test]
    fn a_slot_put_back_is_handed_out_again_wherever_it_lies() {
        let pool = pool(1, 300);
        let slots = pool.allocate(300, &|_| true);
        for again in [299, 0, 130, 64] {
            pool.free(slots[again]);
            assert_eq!(pool.allocate(2, &|_| true), [slots[again]]);
        }
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_slot_freed_twice_is_caught() {
        let pool = pool(1, 4);
        let slots = pool.allocate(2, &|_| true);
        pool.free(slots[0]);
        pool.free(slots[0]);
    }

    #[test]
    fn an_emptied_slab_is_given_back_while_others_have_room() {
        let pool = pool(2, 4);
        let slots = pool.allocate(8, &|_| true);
        slots[..4].iter().for_each(|slot| pool.free(*slot));
        assert!(
            pool.drain_releasable().is_empty(),
            "one slab's room is kept"
        );
        slots[4..].iter().for_each(|slot| pool.free(*slot));
        assert_eq!(pool.drain_releasable().len(), 1);
    }

    #[test]
    fn slabs_that_were_given_back_leave_nothing_but_their_numbers() {
        let pool = pool(0, 4);
        for slab in 0..10_000 {
            pool.add_slab(SlabRef { server: 0, slab }, 4);
            let slot = pool.allocate(1, &|_| true)[0];
            assert!(pool.vacate(SlabRef { server: 0, slab }).is_some());
            pool.free(slot);
            assert_eq!(pool.drain_releasable().len(), 1);
        }
        assert!(pool.lock().groups.is_empty());
        assert_eq!(pool.next_group(), 10_000);
    }

    #[test]
    #[should_panic(expected = "no number is left")]
    fn a_number_that_an_entry_has_no_bits_for_is_given_to_no_group() {
        let pool = pool(0, 4);
        pool.restore(&[], MOST_GROUPS - 1);
        pool.add_slab(SLAB, 4);
        assert_eq!(pool.next_group(), MOST_GROUPS);
        pool.add_slab(SlabRef { server: 0, slab: 8 }, 4);
    }

    #[test]
    fn nothing_is_placed_on_a_server_out_of_reach() {
        let pool = pool(1, 4);
        pool.set_connected(0, false);
        assert!(pool.allocate(1, &|_| true).is_empty());
    }

    #[test]
    fn a_vacated_slab_takes_nothing_new_and_goes_when_empty() {
        let pool = pool(1, 4);
        let slots = pool.allocate(1, &|_| true);
        assert!(pool.vacate(SLAB).is_some());
        assert!(pool.allocate(1, &|_| true).is_empty());
        pool.free(slots[0]);
        assert_eq!(pool.drain_releasable(), [SLAB]);
    }

    #[test]
    fn restored_groups_keep_their_numbers_and_what_is_claimed_of_them() {
        let before = pool(3, 4);
        let after = SlotPool::new(1);
        after.set_connected(0, true);
        after.restore(&before.groups()[1..], before.next_group());
        let slot = SlotId { group: 1, index: 2 };
        assert!(after.claim(slot));
        assert!(!after.claim(slot), "twice");
        for (group, index) in [(0, 0), (1, 4), (3, 0)] {
            assert!(!after.claim(SlotId { group, index }));
        }
        assert_eq!(after.place(slot), before.place(slot));
        after.forget_unclaimed();
        assert_eq!(after.groups(), before.groups()[1..2]);
        assert_eq!(after.next_group(), 3);
        assert!(!after.allocate(10, &|_| true).contains(&slot));
    }

    #[test]
    fn a_slot_finds_every_copy_and_outlives_the_loss_of_one() {
        let other = SlabRef { server: 1, slab: 3 };
        let before = SlotPool::new(2);
        before.add_group(&[SLAB, other], 4);
        assert!(
            before.allocate(1, &|_| true).is_empty(),
            "a copy is out of reach"
        );
        before.set_connected(0, true);
        assert!(
            before.allocate(1, &|_| true).is_empty(),
            "a copy is out of reach"
        );
        before.set_connected(1, true);
        let slot = before.allocate(1, &|_| true)[0];
        // The same in another process, of which the table's entry is all that it has.
        let after = SlotPool::new(2);
        after.restore(&before.groups(), before.next_group());
        assert!(after.claim(slot));
        for pool in [&before, &after] {
            let slabs: Vec<_> = pool.copies(slot).iter().map(|copy| copy.slab).collect();
            assert_eq!(slabs, [SLAB, other]);
            pool.set_connected(0, false);
            pool.set_connected(1, true);
            assert_eq!(pool.place(slot).map(|place| place.slab), Some(other));
            assert!(pool.is_safe(slot));
            let forgotten = pool.forget(&[SLAB]);
            assert_eq!((forgotten.lost.len(), forgotten.degraded), (0, vec![0]));
            assert_eq!(pool.copies(slot).len(), 1);
            assert!(pool.is_vacating(slot) && pool.allocate(1, &|_| true).is_empty());
            assert_eq!(pool.forget(&[other]).lost, HashSet::from([0]));
            assert_eq!(pool.place(slot), None);
        }
    }

    #[test]
    fn slots_of_a_lost_slab_are_gone() {
        let pool = pool(1, 4);
        let slot = pool.allocate(1, &|_| true)[0];
        assert_eq!(pool.forget(&[SLAB]).lost.len(), 1);
        assert_eq!(pool.place(slot), None);
        pool.free(slot);
    }
}
