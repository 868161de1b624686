//! Runs on their way out, and what comes in between.

use super::bench::*;
use crate::engine::SharedRef;
use crate::engine::table::State;

#[test]
fn evict_beside_read_fault_beside_write_loses_no_store() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    let mut run = bench.hand_out_run();
    bench.advance(&mut run, 2); // protected, read
    bench.fault(7, WRITE_PROTECTED); // a store waits
    bench.advance(&mut run, 2); // marked, punched
    bench.fault(7, READ); // a load waits as well
    assert_eq!(bench.read(7), None);
    bench.end_run(run);
    // The store was stopped by a protection that is no more: all look again.
    assert!(bench.world().has_woken(7) && !bench.shard.awaits(crate::engine::PageIndex(7)));
    bench.fault(7, READ);
    bench.fault(7, WRITE);
    assert_eq!(bench.read(7), Some(bytes(1)));
    bench.store(7, 2);
    bench.evict_all();
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(2)));
}

#[test]
fn a_load_between_punch_and_end_is_answered_at_the_end() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    let mut run = bench.hand_out_run();
    bench.advance(&mut run, 4);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), None, "nothing is brought back into a run");
    bench.end_run(run);
    assert_eq!(bench.read(7), Some(bytes(1)));
}

#[test]
fn a_run_never_lifts_its_protection() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    let run = bench.hand_out_run();
    bench.end_run(run);
    assert!(bench.world().protected.contains(&7));
}

#[test]
fn an_unchanged_page_goes_without_being_written_again() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, WRITE);
    bench.answer(1);
    bench.store(7, 2);
    bench.store(7, 1); // as it was
    bench.evict_all();
    assert_eq!(bench.state(7), State::Stored);
    assert_eq!(bench.shared.stats.evicted_clean.get(), 1);
    assert!(bench.world().orders.is_empty());
    assert_eq!(bench.shared.slots.kept(), 0);
}

#[test]
fn a_changed_page_is_staged_and_its_old_slot_freed() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, WRITE);
    bench.answer(1);
    bench.store(7, 2);
    bench.evict_all();
    assert_eq!(bench.state(7), State::Staged);
    assert_eq!(bench.shared.slots.usage(0).1, 0);
    assert_eq!(bench.shared.slots.kept(), 0);
}

#[test]
fn an_unchanged_page_is_staged_while_its_server_is_out_of_reach() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.answer(1);
    bench.shared.slots.set_connected(0, false);
    bench.evict_all();
    assert_eq!(bench.state(7), State::Staged);
}

#[test]
fn a_slab_lost_while_its_clean_page_goes_loses_the_page() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.answer(1);
    let mut run = bench.hand_out_run();
    bench.advance(&mut run, 3); // found clean
    let lost = bench.lose_slab();
    bench.shard.on_groups_lost(&lost);
    bench.fault(7, READ);
    bench.advance(&mut run, 2);
    // Staging was needed for others meanwhile.
    bench.shared.staging.drop_spares();
    bench.end_run(run);
    assert_eq!((bench.state(7), bench.read(7)), (State::Lost, None));
    assert_eq!(bench.shard.waiting().for_lost, 1);
    assert_eq!(bench.shared.slots.kept(), 0);
}

#[test]
fn a_slab_lost_before_a_run_looks_costs_nothing() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.answer(1);
    let mut run = bench.hand_out_run();
    bench.advance(&mut run, 2);
    let lost = bench.lose_slab();
    bench.shard.on_groups_lost(&lost);
    bench.end_run(run);
    assert_eq!(bench.state(7), State::Staged);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(1)));
}

#[test]
fn a_resident_page_whose_slab_is_lost_is_dirty() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.answer(1);
    let lost = bench.lose_slab();
    bench.shard.on_groups_lost(&lost);
    let entry = bench.entry(7);
    assert!(entry.state == State::Resident && entry.dirty && entry.slot.is_none());
    assert_eq!(bench.shared.slots.kept(), 0);
}

#[test]
fn a_refused_punch_leaves_the_pages_where_they_are() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    let run = bench.hand_out_run();
    bench.world().refuse_punch = true;
    bench.end_run(run);
    assert_eq!(bench.state(7), State::Resident);
    assert_eq!(bench.shared.budget.used(), 1);
    assert_eq!(bench.shared.staging.in_use(), 0);
    assert_eq!(bench.shared.stats.failed_runs.get(), 1);
    bench.world().refuse_punch = false;
    bench.evict_all();
    assert_eq!(bench.state(7), State::Staged);
}

#[test]
fn a_refused_punch_that_took_some_pages_goes_by_the_memfd() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.touch(8, 2);
    let mut run = bench.hand_out_run();
    bench.advance(&mut run, 3);
    bench.world().refuse_punch = true;
    bench.world().memory.remove(&7);
    bench.end_run(run);
    assert_eq!(
        (bench.state(7), bench.state(8)),
        (State::Staged, State::Resident)
    );
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(1)));
}

/// Were it discarded and its backend to die before the run is handed back, its successor would look
/// for its bytes where another page's are.
#[test]
fn a_page_whose_punch_was_refused_names_no_place_in_staging() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    let mut run = bench.hand_out_run();
    bench.world().refuse_punch = true;
    bench.advance(&mut run, 5);
    let entry = bench.entry(7);
    assert_eq!(entry.state, State::Busy);
    assert_eq!((entry.becomes, entry.staging), (None, None));
    assert_eq!(bench.shared.staging.in_use(), 0);
}

#[test]
fn a_page_that_came_back_early_stays_longer() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.evict_all();
    bench.fault(7, READ); // a refault out of staging
    for page in (0..12).map(|number| 100 - 5 * number) {
        bench.touch(page, 2); // younger, but new
    }
    bench.shared.staging.set_capacity(1);
    bench.shared.budget.set_limit(1);
    bench.shard.pump();
    let run = bench.world().runs.pop();
    assert_eq!(run.map(|run| run.pages.first.0), Some(100));
}

#[test]
fn a_queue_of_pages_that_come_and_go_does_not_grow() {
    use crate::engine::PageIndex;
    use crate::engine::policy::{Arrival, Policy, ThreeQueues};
    let mut policy = ThreeQueues::new(run(0, 8), std::sync::Arc::default());
    for _ in 0..10_000 {
        policy.arrived(PageIndex(3), Arrival::New);
        policy.departed(PageIndex(3));
    }
    policy.arrived(PageIndex(4), Arrival::New);
    let mut looks = 0;
    let due = policy.due().expect("a page is there");
    let chosen = policy.choose(due, 1, 1, &mut |_| {
        looks += 1;
        true
    });
    assert_eq!((chosen, looks), (Some(run(4, 1)), 1));
    assert!(policy.queued() <= 16, "{} queued", policy.queued());
}

/// Two shards of one guest with ten pages each, those of the first the older ones.
fn old_and_young(shared: &SharedRef) -> [Bench; 2] {
    let mut both = [0, SHARD_PAGES].map(|first| Bench::of(first, shared));
    for (number, bench) in both.iter_mut().enumerate() {
        for page in 0..10 {
            // Apart, so that none comes ahead.
            bench.touch(number as u32 * SHARD_PAGES + 3 + 5 * page, 1);
        }
    }
    both
}

#[test]
fn older_pages_of_another_shard_go_first() {
    let shared = shared(100, 32);
    let [mut old, mut young] = old_and_young(&shared);
    shared.budget.set_limit(24);
    for _ in 0..3 {
        young.shard.pump();
        assert_eq!(young.world().runs.len(), 0);
    }
    assert_eq!(young.world().alerts, 1, "asked once until it looks");
    old.shard.pump();
    assert_eq!(old.world().runs[0].pages, run(3, 1));
    assert_eq!(old.world().alerts, 0);

    // Once the one has as much to do as it may have, the other helps.
    shared.budget.set_limit(1);
    old.shard.pump();
    young.shard.pump();
    assert!(!young.world().runs.is_empty());
}

/// Its faults do not wait for the other to wake up.
#[test]
fn younger_pages_go_where_faults_wait_for_room_and_nobody_makes_any() {
    let shared = shared(20, 0);
    let [_old, mut young] = old_and_young(&shared);
    shared.staging.set_capacity(32);
    young.fault(SHARD_PAGES + 77, READ);
    young.shard.pump();
    assert_eq!(young.world().runs[0].pages, run(SHARD_PAGES + 3, 1));
}

#[test]
fn only_eviction_is_left_where_pages_have_to_go_and_none_is_on_its_way() {
    let mut bench = Bench::new();
    bench.store_remotely(70, 1);
    bench.touch(7, 1);
    assert!(!bench.shard.has_only_to_evict(), "nothing has to go");
    let limit = bench.shared.budget.limit();
    bench.shared.budget.set_limit(0);
    assert!(bench.shard.has_only_to_evict());
    bench.shared.budget.set_limit(limit);
    bench.fault(70, READ);
    bench.shared.budget.set_limit(0);
    assert!(!bench.shard.has_only_to_evict(), "a page is on its way");
    bench.answer(1);
    assert!(!bench.shard.has_only_to_evict(), "all have been handed out");
}
