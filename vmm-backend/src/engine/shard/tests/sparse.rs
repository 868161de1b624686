//! A guest with far more memory than it touches: what is done to all of it looks at what was touched.

use std::collections::HashSet;

use super::bench::*;
use crate::engine::table::{STRETCH, State};
use crate::engine::{PageIndex, PinId, PinRefused};

/// 4 GiB.
const MANY: u32 = 1 << 20;

/// Pages that were touched, far from each other: stored, kept as a word, resident.
const TOUCHED: [u32; 3] = [77, MANY / 3, MANY - 5];

/// Looks at entries in one go through all memory: a few at each entry of a stretch that was touched.
const MOST: u64 = 4 * TOUCHED.len() as u64 * STRETCH as u64;

fn sparse() -> Bench {
    let mut bench = Bench::of_many(MANY);
    bench.store_remotely(TOUCHED[0], 1);
    bench.fault(TOUCHED[1], WRITE);
    bench.evict_all();
    bench.touch(TOUCHED[2], 2);
    let states = TOUCHED.map(|page| bench.state(page));
    assert_eq!(states, [State::Stored, State::Filled, State::Resident]);
    bench
}

/// Does something to a sparse guest, and demands that few entries are looked at.
fn demand_few(what: &str, act: impl FnOnce(&mut Bench)) -> Bench {
    let mut bench = sparse();
    bench.shared.table.take_asked();
    act(&mut bench);
    bench.shard.pump();
    let asked = bench.shared.table.take_asked();
    assert!(asked <= MOST, "{what} looked at {asked} entries");
    assert_eq!(bench.shared.table.touched_in(run(0, MANY)).count(), 3);
    bench
}

#[test]
fn what_is_done_to_all_memory_looks_at_what_was_touched() {
    let bench = demand_few("a discard", |bench| {
        TOUCHED.iter().for_each(|page| bench.punch(*page));
        bench.shard.on_removed(run(0, MANY));
    });
    assert_eq!(TOUCHED.map(|page| bench.state(page)), [State::Absent; 3]);
    demand_few("a dropped mapping", |bench| {
        bench.shard.on_mapping_dropped(run(0, MANY));
    });
    demand_few("memory mapped anew", |bench| {
        bench.shard.freeze(run(0, MANY));
        bench.shard.thaw();
        bench.shard.on_mapped_anew(run(0, MANY));
    });
    let bench = demand_few("a lost slab", |bench| {
        let groups = bench.lose_slab();
        bench.shard.on_groups_lost(&groups);
    });
    assert_eq!(bench.state(TOUCHED[0]), State::Lost);
    demand_few("a loss of others", |bench| {
        bench.shard.on_groups_lost(&HashSet::from([9]));
    });
    let mut bench = demand_few("a slab that is wanted back", |bench| {
        bench.vacate();
    });
    assert_eq!(bench.world().fetches.len(), 1, "its page is moved");
}

#[test]
fn all_memory_comes_home_with_a_look_at_what_was_touched() {
    let bench = demand_few("coming home", |bench| {
        bench.shared.budget.set_limit(1000);
        bench.shard.start_homing();
        bench.shard.pump();
        assert!(!bench.shard.is_home());
        bench.answer(1);
        // Touched for the first time behind what was looked at: home, too.
        bench.fault(MANY - 2, WRITE);
    });
    assert!(bench.shard.is_home());
}

#[test]
fn memory_leaves_with_a_look_at_what_was_touched_and_whoever_waits() {
    let mut bench = demand_few("memory that leaves", |bench| {
        bench.world().agains = u32::MAX;
        bench.shard.on_fault(PageIndex(MANY / 2), WRITE);
        bench.shard.on_pin(PinId(1), &[run(MANY / 2 + 9, 1)], true);
        assert_eq!(bench.shard.waiting().faults, 1);
        bench.shard.unplug(run(0, MANY));
    });
    assert_eq!(bench.shard.waiting().faults, 0);
    let refused = (PinId(1), Err(PinRefused::Unplugged));
    assert_eq!(bench.world().pins, [refused]);
    assert_eq!(bench.shard.next_unplugged(), Some(run(0, MANY)));
    assert_eq!(bench.shared.budget.used(), 0);
}
