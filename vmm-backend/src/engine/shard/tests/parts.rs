//! Memory that is plugged and unplugged.

use super::bench::*;
use crate::engine::table::{Entry, State};
use crate::engine::{Generation, PageIndex, PinId, PinRefused, StagingSlot};

/// The bench's shard has one part.
fn all() -> crate::engine::PageRun {
    run(0, SHARD_PAGES)
}

/// A shard that takes pages over: each in the staging slot of its number, sealed there but for those of
/// `plain`, which an earlier build left.
fn taken_over(pages: &[u32], plain: &[u32]) -> Bench {
    let mut bench = Bench::of(0, &shared(100, 0));
    for &page in pages {
        let (mut text, generation) = (bytes(1), Generation(5));
        let key = &bench.shared.key;
        let tag = key.seal(PageIndex(page), generation, &mut text);
        let held = if plain.contains(&page) {
            bytes(1)
        } else {
            text
        };
        let entry = Entry {
            state: State::Staged,
            dirty: true,
            staging: Some(StagingSlot(page)),
            generation,
            tag,
            ..Entry::ABSENT
        };
        bench.shared.table.store(PageIndex(page), &entry);
        bench.world().staging.insert(page, held);
        bench.shard.adopt_recovered(PageIndex(page));
    }
    bench.shared.staging.set_capacity(16);
    bench
}

#[test]
fn pages_that_an_earlier_build_left_unsealed_in_staging_are_taken_over() {
    let mut bench = taken_over(&[7, 8], &[8]);
    let orders = bench.world().orders.drain(..);
    let orders: Vec<_> = orders
        .map(|order| (order.page.0, order.is_sealed))
        .collect();
    assert_eq!(orders, [(7, true), (8, false)]);
    for page in [7, 8] {
        bench.fault(page, READ);
        assert_eq!(bench.read(page), Some(bytes(1)));
    }
    assert_eq!(bench.shared.staging.in_use(), 0);
    // From here on it is this build's.
    bench.store(7, 2);
    bench.evict_all();
    assert!(bench.world().orders.iter().all(|order| order.is_sealed));
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(2)));
}

#[test]
fn a_staged_page_that_is_spoilt_since_is_lost() {
    let mut bench = taken_over(&[7], &[]);
    bench.world().staging.get_mut(&7).expect("staged")[100] ^= 1;
    bench.fault(7, READ);
    assert_eq!((bench.read(7), bench.state(7)), (None, State::Lost));
    assert_eq!(bench.shared.stats.integrity_failures.get(), 1);
    assert_eq!(bench.shared.staging.in_use(), 0);
    assert_eq!(bench.shared.budget.used(), 0);
}

#[test]
fn a_page_found_unsealed_is_sealed_where_it_is_staged_again_to_be_moved() {
    let mut bench = taken_over(&[7], &[7]);
    let write = bench.start_write();
    bench.end_write(write);
    bench.vacate();
    bench.shard.pump();
    bench.answer(1);
    assert_eq!(bench.state(7), State::Staged);
    assert!(bench.world().orders.iter().all(|order| order.is_sealed));
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(1)));
}

#[test]
fn unplugged_memory_is_kept_nowhere() {
    let mut bench = Bench::new();
    bench.store_remotely(1, 10);
    bench.touch(2, 20);
    bench.evict_all();
    bench.touch(3, 30);
    let leased = bench.shared.slots.usage(0).1;
    assert_eq!((bench.state(2), leased), (State::Staged, 1));
    bench.shard.unplug(all());
    bench.shard.pump();
    assert_eq!(bench.shard.next_unplugged(), Some(all()));
    for page in 1..=3 {
        assert_eq!(bench.state(page), State::Absent);
    }
    assert_eq!(bench.shared.budget.used(), 0);
    assert_eq!(bench.shared.staging.in_use(), 0);
    assert_eq!(bench.shared.slots.usage(0).1, 0);
    assert_eq!(bench.shared.stats.pages(State::Absent), 0);
}

#[test]
fn generations_go_on_in_memory_plugged_at_the_same_place() {
    let mut bench = Bench::new();
    bench.store_remotely(1, 10);
    let before = bench.entry(1).generation;
    bench.shard.unplug(all());
    assert_eq!(bench.shard.next_unplugged(), Some(all()));
    bench.world().memory.clear();
    bench.shard.plug(all());
    bench.store_remotely(1, 11);
    assert!(bench.entry(1).generation > before);
}

#[test]
fn a_run_in_work_holds_its_memory_up() {
    let mut bench = Bench::new();
    bench.touch(1, 10);
    let run = bench.hand_out_run();
    bench.shard.unplug(all());
    bench.shard.pump();
    assert_eq!(bench.shard.next_unplugged(), None);
    bench.end_run(run);
    assert_eq!(bench.shard.next_unplugged(), Some(all()));
    assert_eq!(bench.state(1), State::Absent);
    assert_eq!(bench.shared.staging.in_use(), 0);
    assert_eq!(bench.shared.budget.used(), 0);
}

#[test]
fn a_pin_holds_its_memory_up_and_a_late_one_is_refused() {
    let mut bench = Bench::new();
    bench.touch(1, 10);
    bench.shard.on_pin(PinId(1), &[run(1, 1)], true);
    bench.shard.unplug(all());
    bench.shard.on_pin(PinId(2), &[run(1, 1)], false);
    assert_eq!(
        bench.world().pins,
        [(PinId(1), Ok(())), (PinId(2), Err(PinRefused::Unplugged))]
    );
    assert_eq!(bench.shard.next_unplugged(), None);
    bench.shard.on_unpin(&[run(1, 1)]);
    assert_eq!(bench.shard.next_unplugged(), Some(all()));
}

#[test]
fn whoever_waits_for_unplugged_memory_is_let_go() {
    let mut bench = Bench::new();
    bench.store_remotely(1, 10);
    bench.fault(1, READ);
    bench.shard.on_pin(PinId(1), &[run(1, 2)], false);
    assert_eq!(bench.shard.waiting().faults, 1);
    bench.world().clock_us = 50;
    bench.shard.unplug(all());
    assert!(bench.world().has_woken(1));
    let waiting = bench.shard.waiting();
    assert_eq!((waiting.faults, waiting.waited_us), (0, 50));
    assert_eq!(bench.world().pins, [(PinId(1), Err(PinRefused::Unplugged))]);
    // The server's answer comes late.
    bench.answer(10);
    assert_eq!(bench.shard.next_unplugged(), Some(all()));
    assert_eq!(bench.shared.budget.used(), 0);
    assert_eq!(bench.state(1), State::Absent);
}

#[test]
fn a_write_in_work_ends_without_a_trace() {
    let mut bench = Bench::new();
    bench.touch(1, 10);
    bench.evict_all();
    let write = bench.start_write();
    bench.shard.unplug(all());
    assert_eq!(bench.shard.next_unplugged(), Some(all()));
    bench.end_write(write);
    assert_eq!(bench.shared.slots.usage(0).1, 0);
    assert_eq!(bench.shared.staging.in_use(), 0);
}

#[test]
fn messages_that_outlive_their_memory_make_nothing() {
    let mut bench = Bench::new();
    bench.shard.unplug(all());
    bench.fault(1, WRITE);
    assert!(bench.world().has_woken(1));
    bench.remove(1);
    assert_eq!(bench.shard.next_unplugged(), Some(all()));
    bench.fault(1, WRITE);
    assert_eq!(bench.read(1), None);
    assert_eq!(bench.state(1), State::Absent);
}

#[test]
fn zeros_ahead_end_where_memory_ends() {
    let mut bench = Bench::new();
    bench.shard.unplug(all());
    assert_eq!(bench.shard.next_unplugged(), Some(all()));
    bench.shard.plug(run(0, 10));
    bench.shard.plug(run(20, 10));
    for page in 0..10 {
        if bench.state(page) == State::Absent {
            bench.fault(page, WRITE);
        }
    }
    assert_eq!(bench.read(10), None);
    assert!(!bench.shard.is_plugged(PageIndex(10)));
    assert!(bench.shard.is_plugged(PageIndex(20)));
}
