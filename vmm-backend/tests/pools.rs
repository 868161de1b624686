//! The engine's pools and policy against simple models of them.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use outram_backend::engine::budget::Budget;
use outram_backend::engine::policy::{Arrival, Policy, ThreeQueues};
use outram_backend::engine::slots::{SlabRef, SlotPool};
use outram_backend::engine::staging::{Spare, StagingPool, Ticket};
use outram_backend::engine::{Generation, PageIndex, PageRun, PageSize, SlotId};
use proptest::prelude::*;

const SERVERS: usize = 2;

#[derive(Clone, Debug)]
enum SlotOp {
    AddSlab(usize, u32),
    Allocate(usize),
    AllocateVacating(usize),
    Free(usize),
    Connect(usize, bool),
    Vacate(usize),
    Forget(usize),
    Drain,
}

fn slot_ops() -> impl Strategy<Value = SlotOp> {
    prop_oneof![
        2 => (0..SERVERS, 1..130u32).prop_map(|(server, slots)| SlotOp::AddSlab(server, slots)),
        6 => (0..100usize).prop_map(SlotOp::Allocate),
        1 => (0..10usize).prop_map(SlotOp::AllocateVacating),
        12 => any::<usize>().prop_map(SlotOp::Free),
        2 => (0..SERVERS, any::<bool>()).prop_map(|(server, up)| SlotOp::Connect(server, up)),
        1 => any::<usize>().prop_map(SlotOp::Vacate),
        1 => any::<usize>().prop_map(SlotOp::Forget),
        1 => Just(SlotOp::Drain),
    ]
}

#[derive(Debug)]
struct ModelSlab {
    slots: u32,
    used: u32,
    vacating: bool,
}

/// What a slot pool has to be.
struct SlotModel {
    pool: SlotPool,
    connected: [bool; SERVERS],
    slabs: BTreeMap<SlabRef, ModelSlab>,
    held: Vec<(SlotId, SlabRef)>,
    next_slab: u64,
}

impl SlotModel {
    fn new() -> Self {
        Self {
            pool: SlotPool::new(SERVERS),
            connected: [false; SERVERS],
            slabs: BTreeMap::new(),
            held: Vec::new(),
            next_slab: 0,
        }
    }

    fn room(&self, vacating: bool) -> u64 {
        let usable = self
            .slabs
            .iter()
            .filter(|(slab, model)| self.connected[slab.server] && model.vacating == vacating);
        usable
            .map(|(_, model)| u64::from(model.slots - model.used))
            .sum()
    }

    fn nth_slab(&self, number: usize) -> Option<SlabRef> {
        let number = number.checked_rem(self.slabs.len())?;
        self.slabs.keys().nth(number).copied()
    }

    fn allocate(&mut self, count: usize, vacating: bool) {
        let expected = self.room(vacating).min(count as u64) as usize;
        let taken = match vacating {
            true => self.pool.allocate_vacating(count, &|_| true),
            false => self.pool.allocate(count, &|_| true),
        };
        assert_eq!(taken.len(), expected);
        for slot in taken {
            assert!(
                self.held.iter().all(|(held, _)| *held != slot),
                "handed out twice"
            );
            let place = self.pool.place(slot).expect("a place");
            assert_eq!(place.index, slot.index);
            let model = self
                .slabs
                .get_mut(&place.slab)
                .expect("a slab that is there");
            assert!(slot.index < model.slots && model.vacating == vacating);
            assert!(self.connected[place.slab.server]);
            model.used += 1;
            self.held.push((slot, place.slab));
        }
    }

    fn apply(&mut self, op: SlotOp) {
        match op {
            SlotOp::AddSlab(server, slots) => {
                let slab = self.next_slab;
                self.next_slab += 1;
                let slab = SlabRef { server, slab };
                self.pool.add_slab(slab, slots);
                let (used, vacating) = (0, false);
                let model = ModelSlab {
                    slots,
                    used,
                    vacating,
                };
                self.slabs.insert(slab, model);
            }
            SlotOp::Allocate(count) => self.allocate(count, false),
            SlotOp::AllocateVacating(count) => self.allocate(count, true),
            SlotOp::Free(number) => {
                let Some(number) = number.checked_rem(self.held.len()) else {
                    return;
                };
                let (slot, slab) = self.held.swap_remove(number);
                self.pool.free(slot);
                if let Some(model) = self.slabs.get_mut(&slab) {
                    model.used -= 1;
                }
            }
            SlotOp::Connect(server, up) => {
                self.pool.set_connected(server, up);
                self.connected[server] = up;
            }
            SlotOp::Vacate(number) => {
                if let Some(slab) = self.nth_slab(number) {
                    let model = self.slabs.get_mut(&slab).expect("a slab");
                    model.vacating = true;
                    let group = self.pool.vacate(slab);
                    assert_eq!(group.is_some(), model.used > 0);
                }
            }
            SlotOp::Forget(number) => {
                if let Some(slab) = self.nth_slab(number) {
                    let groups = self.pool.forget(&[slab]);
                    let gone = self.held.iter().filter(|(_, held)| *held == slab);
                    assert!(
                        gone.into_iter()
                            .all(|(slot, _)| groups.lost.contains(&slot.group))
                    );
                    self.slabs.remove(&slab);
                }
            }
            SlotOp::Drain => {}
        }
        // Which empty slabs go back is the pool's choice; that they are empty is not.
        for slab in self.pool.drain_releasable() {
            let model = self.slabs.remove(&slab);
            assert!(
                model.is_none_or(|model| model.used == 0),
                "given back in use"
            );
        }
    }

    fn check(&self) {
        assert_eq!(self.pool.room(&|_| true), self.room(false));
        let vacating = self.slabs.values().filter(|model| model.vacating);
        let pages = vacating.map(|model| u64::from(model.used)).sum::<u64>();
        assert_eq!(self.pool.vacating_pages(), pages);
        for server in 0..SERVERS {
            let slabs = self.slabs.iter().filter(|(slab, _)| slab.server == server);
            let usage = slabs.fold((0, 0), |(slabs, pages), (_, model)| {
                (slabs + 1, pages + u64::from(model.used))
            });
            assert_eq!(self.pool.usage(server), usage);
        }
        for (slot, slab) in &self.held {
            let model = self.slabs.get(slab);
            assert_eq!(
                self.pool.place(*slot).map(|place| place.slab),
                model.map(|_| *slab)
            );
            let safe = model.is_some_and(|model| !model.vacating && self.connected[slab.server]);
            assert_eq!(self.pool.is_safe(*slot), safe);
        }
    }
}

#[derive(Clone, Debug)]
enum StagingOp {
    Take(u32),
    Release(usize),
    KeepSpare(usize, u32, u64),
    TakeSpare(u32, u64),
    StartWrite(usize),
    EndWrite(usize),
    SetCapacity(u32),
    Drain,
}

fn staging_ops() -> impl Strategy<Value = StagingOp> {
    prop_oneof![
        4 => (0..12u32).prop_map(StagingOp::Take),
        6 => any::<usize>().prop_map(StagingOp::Release),
        4 => (any::<usize>(), 0..9u32, 0..3u64)
            .prop_map(|(ticket, page, generation)| StagingOp::KeepSpare(ticket, page, generation)),
        4 => (0..9u32, 0..3u64).prop_map(|(page, generation)| StagingOp::TakeSpare(page, generation)),
        6 => any::<usize>().prop_map(StagingOp::StartWrite),
        6 => any::<usize>().prop_map(StagingOp::EndWrite),
        1 => (0..40u32).prop_map(StagingOp::SetCapacity),
        1 => Just(StagingOp::Drain),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Hold {
    Held,
    Writing,
    Orphaned,
    Stale,
}

/// What a staging pool has to be: every ticket ever taken, and what became of it.
struct StagingModel {
    pool: StagingPool,
    capacity: u32,
    tickets: Vec<(Ticket, Hold)>,
    /// Oldest first.
    spares: Vec<Spare>,
}

impl StagingModel {
    fn in_use(&self) -> impl Iterator<Item = u32> {
        let used = self.tickets.iter().filter(|(_, held)| *held != Hold::Stale);
        used.map(|(ticket, _)| ticket.slot.0)
    }

    fn available(&self) -> u32 {
        let below = self.in_use().filter(|slot| *slot < self.capacity);
        self.capacity - below.count() as u32
    }

    fn apply(&mut self, op: StagingOp) {
        let nth = |number: usize, tickets: usize| number.checked_rem(tickets);
        match op {
            StagingOp::Take(count) => match self.pool.take(count) {
                Some(taken) => {
                    assert!(count <= self.available());
                    assert_eq!(taken.len(), count as usize);
                    let free = self.available() as usize - self.spares.len();
                    self.spares.drain(..taken.len().saturating_sub(free));
                    for ticket in taken {
                        assert!(ticket.slot.0 < self.capacity);
                        assert!(
                            self.in_use().all(|slot| slot != ticket.slot.0),
                            "taken twice"
                        );
                        assert!(self.spares.iter().all(|spare| spare.slot != ticket.slot));
                        self.tickets.push((ticket, Hold::Held));
                    }
                }
                None => assert!(count > self.available()),
            },
            StagingOp::Release(number) => {
                let Some(number) = nth(number, self.tickets.len()) else {
                    return;
                };
                let (ticket, held) = &mut self.tickets[number];
                *held = match held {
                    Hold::Held => Hold::Stale,
                    Hold::Writing => Hold::Orphaned,
                    Hold::Orphaned | Hold::Stale => return,
                };
                self.pool.release(ticket.slot);
            }
            StagingOp::KeepSpare(number, page, generation) => {
                let Some(number) = nth(number, self.tickets.len()) else {
                    return;
                };
                let (ticket, held) = &mut self.tickets[number];
                if *held != Hold::Held {
                    return;
                }
                *held = Hold::Stale;
                let spare = Spare {
                    slot: ticket.slot,
                    page: PageIndex(page),
                    generation: Generation(generation),
                    is_sealed: generation == 1,
                };
                self.pool.keep_spare(spare);
                if spare.slot.0 < self.capacity {
                    self.spares.retain(|older| older.page != spare.page);
                    self.spares.push(spare);
                }
            }
            StagingOp::TakeSpare(page, generation) => {
                let (page, generation) = (PageIndex(page), Generation(generation));
                let kept = self.spares.iter().position(|spare| spare.page == page);
                let kept = kept.map(|place| self.spares.remove(place));
                let kept = kept.filter(|spare| spare.generation == generation);
                assert_eq!(self.pool.take_spare(page, generation), kept);
                if let Some(spare) = kept {
                    assert_eq!(self.pool.in_use(), self.in_use().count() as u32 + 1);
                    self.pool.release(spare.slot);
                }
            }
            StagingOp::StartWrite(number) => {
                let Some(number) = nth(number, self.tickets.len()) else {
                    return;
                };
                let (ticket, held) = &mut self.tickets[number];
                assert_eq!(self.pool.start_write(*ticket), *held == Hold::Held);
                if *held == Hold::Held {
                    *held = Hold::Writing;
                }
            }
            StagingOp::EndWrite(number) => {
                let Some(number) = nth(number, self.tickets.len()) else {
                    return;
                };
                let (ticket, held) = &mut self.tickets[number];
                let next = match held {
                    Hold::Writing => Hold::Held,
                    Hold::Orphaned => Hold::Stale,
                    Hold::Held | Hold::Stale => return,
                };
                assert_eq!(self.pool.end_write(*ticket), *held == Hold::Writing);
                *held = next;
            }
            StagingOp::SetCapacity(capacity) => {
                self.pool.set_capacity(capacity);
                self.capacity = capacity;
                self.spares.retain(|spare| spare.slot.0 < capacity);
            }
            StagingOp::Drain => {
                let retired = self.pool.drain_retired();
                let used: BTreeSet<_> = self.in_use().collect();
                for slot in retired {
                    assert!(slot.0 >= self.capacity && !used.contains(&slot.0));
                }
                let beyond = used.iter().filter(|slot| **slot >= self.capacity).count();
                assert_eq!(self.pool.backed(), u64::from(self.capacity) + beyond as u64);
            }
        }
    }

    fn check(&self) {
        assert_eq!(self.pool.capacity(), self.capacity);
        assert_eq!(self.pool.available(), self.available());
        assert_eq!(self.pool.in_use(), self.in_use().count() as u32);
        assert!(self.pool.backed() >= self.in_use().count() as u64);
    }
}

#[derive(Clone, Debug)]
enum BudgetOp {
    Acquire(u64),
    Force(u64),
    Release(u64),
    SetLimit(u64),
    Wait(bool),
}

fn budget_ops() -> impl Strategy<Value = BudgetOp> {
    prop_oneof![
        4 => (1..300u64).prop_map(BudgetOp::Acquire),
        1 => (0..50u64).prop_map(BudgetOp::Force),
        4 => (0..300u64).prop_map(BudgetOp::Release),
        1 => (0..5000u64).prop_map(BudgetOp::SetLimit),
        1 => any::<bool>().prop_map(BudgetOp::Wait),
    ]
}

#[derive(Clone, Debug)]
enum PolicyOp {
    Arrive(u32, bool),
    Depart(u32),
    Choose(u32, u32, u64),
}

fn policy_ops() -> impl Strategy<Value = PolicyOp> {
    prop_oneof![
        8 => (0..64u32, any::<bool>()).prop_map(|(page, back)| PolicyOp::Arrive(page, back)),
        1 => (0..64u32).prop_map(PolicyOp::Depart),
        2 => (1..20u32, 0..4u32, any::<u64>())
            .prop_map(|(most, power, may)| PolicyOp::Choose(most, 1 << power, may)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn slots_are_held_once_and_slabs_given_back_empty(
        ops in proptest::collection::vec(slot_ops(), 1..120),
    ) {
        let mut model = SlotModel::new();
        for op in ops {
            model.apply(op);
            model.check();
        }
    }

    #[test]
    fn staging_slots_are_held_once(ops in proptest::collection::vec(staging_ops(), 1..200)) {
        let capacity = 16;
        let pool = StagingPool::new(capacity);
        let mut model = StagingModel { pool, capacity, tickets: Vec::new(), spares: Vec::new() };
        for op in ops {
            model.apply(op);
            model.check();
        }
    }

    #[test]
    fn a_budget_passes_its_limit_by_half_of_what_goes_while_above_it_and_no_more(
        ops in proptest::collection::vec(budget_ops(), 1..100),
    ) {
        let budget = Budget::new(1000, PageSize::BASE);
        let (mut used, mut limit, mut waiting) = (0u64, 1000u64, 0u64);
        // Pages that went and came while more were used than the limit.
        let (mut gone, mut came) = (0u64, 0u64);
        for op in ops {
            match op {
                BudgetOp::Acquire(pages) => {
                    let (fits, was_above) = (used + pages <= limit, used > limit);
                    let acquired = budget.acquire(pages);
                    prop_assert!(acquired || !fits);
                    if acquired {
                        used += pages;
                        came += if was_above { pages } else { 0 };
                        prop_assert!(fits || was_above && 2 * came <= gone);
                    }
                }
                BudgetOp::Force(pages) => {
                    budget.force(pages);
                    used += pages;
                }
                BudgetOp::Release(pages) => {
                    gone += if used > limit { pages.min(used) } else { 0 };
                    budget.release(pages.min(used));
                    used -= pages.min(used);
                }
                BudgetOp::SetLimit(pages) => {
                    budget.set_limit(pages);
                    limit = pages;
                    (gone, came) = (0, 0);
                }
                BudgetOp::Wait(true) => {
                    budget.start_waiting();
                    waiting += 1;
                }
                BudgetOp::Wait(false) if waiting > 0 => {
                    budget.end_waiting();
                    waiting -= 1;
                }
                BudgetOp::Wait(false) => {}
            }
            prop_assert_eq!((budget.used(), budget.waiting()), (used, waiting));
            prop_assert!(used > limit || budget.has_room() == (used < limit));
            prop_assert_eq!(budget.is_room_waited_for(), budget.has_room() && waiting > 0);
            let shortage = budget.shortage();
            prop_assert!(used + waiting <= limit || shortage > 0);
            prop_assert!(shortage <= used + waiting);
            // To choose what is short is enough, and there is room for faults then.
            budget.start_evicting(shortage.min(used));
            prop_assert!(budget.shortage() == 0 || shortage > used);
            budget.end_evicting(shortage.min(used));
            prop_assert!(budget.spare() <= limit.saturating_sub(used));
        }
    }

    #[test]
    fn a_policy_names_what_is_there_and_may_go(
        ops in proptest::collection::vec(policy_ops(), 1..300),
    ) {
        const FIRST: u32 = 1000;
        let range = PageRun { first: PageIndex(FIRST), count: 64 };
        let mut policy = ThreeQueues::new(range, std::sync::Arc::default());
        let mut there = HashSet::new();
        for op in ops {
            match op {
                PolicyOp::Arrive(page, back) => {
                    let arrival = if back { Arrival::Refault } else { Arrival::New };
                    policy.arrived(PageIndex(FIRST + page), arrival);
                    there.insert(page);
                }
                PolicyOp::Depart(page) => {
                    policy.departed(PageIndex(FIRST + page));
                    there.remove(&page);
                }
                PolicyOp::Choose(most, granule, may) => {
                    let may_go = |page: PageIndex| may >> (page.0 - FIRST) & 1 == 1;
                    let due = policy.due();
                    prop_assert_eq!(due.is_none(), there.is_empty());
                    let Some(due) = due else { continue };
                    match policy.choose(due, most, granule, &mut |page| may_go(page)) {
                        Some(run) => {
                            prop_assert!(run.count >= 1 && run.count <= most);
                            for page in run.pages() {
                                prop_assert!(range.contains(page) && may_go(page));
                                prop_assert!(there.remove(&(page.0 - FIRST)));
                            }
                        }
                        None => prop_assert!(
                            !there.iter().any(|page| may_go(PageIndex(FIRST + page)))
                        ),
                    }
                }
            }
        }
    }
}

#[test]
fn threads_together_never_pass_the_limit() {
    let budget = Budget::new(100, PageSize::BASE);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let budget = &budget;
            scope.spawn(move || {
                for turn in 0..20_000u64 {
                    let pages = 1 + (turn * 7 + thread * 13) % 60;
                    if budget.acquire(pages) {
                        assert!(budget.used() <= 100);
                        budget.release(pages);
                    }
                }
            });
        }
    });
    assert_eq!(budget.used(), 0);
}
