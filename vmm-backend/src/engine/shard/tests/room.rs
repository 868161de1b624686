//! Room under the limit, and shards that wait for each other's.

use super::bench::*;
use crate::engine::PageIndex;
use crate::engine::table::State;

#[test]
fn a_fault_beyond_the_limit_waits_until_a_page_has_gone() {
    let mut bench = Bench::of(0, &shared(4, 32));
    for page in [10, 30, 50, 70, 80] {
        bench.fault(page, WRITE);
    }
    assert_eq!(bench.shared.stats.stalls_limit.get(), 1);
    assert!(bench.shard.awaits(PageIndex(80)));
    assert_eq!(bench.shared.budget.used(), 4);
    let run = bench.world().runs.remove(0);
    bench.end_run(run);
    assert!(!bench.shard.awaits(PageIndex(80)));
    assert_eq!(bench.state(80), State::Resident);
    assert_eq!(bench.shared.budget.waiting(), 0);
    assert!(bench.shared.budget.used() <= 4);
}

#[test]
fn room_made_by_a_higher_limit_is_given_to_who_waits() {
    let mut bench = Bench::of(0, &shared(2, 0));
    for page in [0, 20, 40] {
        bench.fault(page, WRITE);
    }
    assert!(bench.shard.awaits(PageIndex(40)));
    bench.shared.budget.set_limit(3);
    bench.shard.pump();
    assert!(!bench.shard.awaits(PageIndex(40)));
}

#[test]
fn a_fault_does_not_wait_until_a_lowered_limit_is_reached() {
    let mut bench = Bench::of(0, &shared(40, 32));
    for page in 0..40 {
        bench.fault(page, WRITE);
    }
    bench.shared.budget.set_limit(4);
    bench.fault(80, WRITE);
    assert!(bench.shard.awaits(PageIndex(80)), "nothing has gone yet");
    bench.shard.pump();
    let run = bench.world().runs.remove(0);
    bench.end_run(run);
    assert!(bench.shared.budget.used() > 4);
    assert_eq!(bench.state(80), State::Resident);
}

#[test]
fn a_waiting_fault_whose_page_is_given_back_is_counted_no_longer() {
    let mut bench = Bench::of(0, &shared(1, 0));
    bench.store_remotely_with_staging(20, 1);
    bench.fault(0, WRITE);
    bench.fault(20, READ);
    assert_eq!(bench.shared.budget.waiting(), 1);
    let lost = bench.lose_slab();
    bench.shard.on_groups_lost(&lost);
    assert_eq!(bench.shared.budget.waiting(), 0);
    assert_eq!(bench.shard.waiting().for_lost, 1);
}

#[test]
fn a_removal_tells_shards_that_wait_for_room() {
    let shared = shared(40, 0);
    let mut ours = Bench::of(0, &shared);
    let mut theirs = Bench::of(SHARD_PAGES, &shared);
    for page in 0..40 {
        ours.fault(page, WRITE);
    }
    assert_eq!(shared.budget.used(), 40);
    theirs.fault(SHARD_PAGES, READ);
    assert!(theirs.shard.awaits(PageIndex(SHARD_PAGES)));
    ours.world().alerts = 0;
    for page in 0..39 {
        ours.punch(page);
    }
    ours.shard.on_removed(run(0, 39));
    ours.shard.pump();
    assert!(ours.world().alerts > 0, "the other shard is not told");
    theirs.shard.pump();
    assert_eq!(theirs.state(SHARD_PAGES), State::Resident);
}

#[test]
fn staging_that_comes_free_is_told_to_shards_that_lack_it() {
    let shared = shared(100, 1);
    let mut ours = Bench::of(0, &shared);
    let mut theirs = Bench::of(SHARD_PAGES, &shared);
    ours.touch(10, 1);
    ours.evict_all();
    theirs.touch(SHARD_PAGES + 10, 1);
    shared.budget.set_limit(0);
    theirs.shard.pump();
    assert!(theirs.world().runs.is_empty(), "no staging is free");
    ours.shard.pump();
    ours.world().alerts = 0;
    let write = ours.start_write();
    ours.end_write(write);
    assert!(ours.world().alerts > 0, "the other shard is not told");
    theirs.shard.pump();
    assert_eq!(theirs.world().runs.len(), 1);
}

#[test]
fn who_waits_for_the_hosts_pool_leaves_staging_to_what_makes_room_there() {
    const AWAY: [u32; 4] = [10, 20, 30, 40];
    let mut bench = Bench::of(0, &shared(100, AWAY.len() as u32));
    for page in AWAY {
        bench.store_remotely(page, page as u8);
    }
    bench.keeps_spares = true;
    for page in 60..66 {
        bench.touch(page, 1);
    }
    bench.world().pool_is_empty = true;
    for page in AWAY {
        bench.fault(page, READ);
    }
    bench.answer_together();
    for _ in 0..20 {
        if !bench.world().orders.is_empty() {
            let write = bench.start_write();
            bench.end_write(write);
        }
    }
    assert!(!bench.world().runs.is_empty(), "none of its pages goes");
    let run = bench.world().runs.remove(0);
    bench.world().pool_is_empty = false;
    bench.end_run(run);
    bench.answer_all();
    for page in AWAY {
        assert_eq!(bench.read(page), Some(bytes(page as u8)));
    }
}

#[test]
fn alerts_end_where_nothing_can_be_done() {
    let shared = shared(100, 4);
    let mut bench = Bench::of(0, &shared);
    bench.touch(0, 1);
    bench
        .shard
        .on_pin(crate::engine::PinId(1), &[run(0, 1)], false);
    shared.budget.set_limit(0);
    bench.shard.pump();
    bench.world().alerts = 0;
    for _ in 0..10 {
        bench.shard.pump();
    }
    assert_eq!(bench.world().alerts, 0);
}

#[test]
fn pages_found_populated_count_from_the_start() {
    let mut bench = Bench::of(0, &shared(1, 32));
    for page in 0..3 {
        bench.world().memory.insert(page, bytes(1));
        bench.shard.adopt_populated(PageIndex(page));
    }
    assert_eq!(bench.shared.budget.used(), 3);
    bench.shard.pump();
    let run = bench.world().runs.remove(0);
    bench.end_run(run);
    assert!(bench.shared.budget.used() <= 1);
}
