//! Pages that the device uses.

use super::bench::*;
use crate::engine::table::State;
use crate::engine::{PageIndex, PinId, PinRefused};

const PIN: PinId = PinId(1);

#[test]
fn a_pin_waits_for_all_of_its_pages_and_keeps_them() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.touch(8, 2);
    bench.shard.on_pin(PIN, &[run(7, 3)], false);
    assert!(bench.world().pins.is_empty());
    bench.answer(1);
    assert_eq!(bench.world().pins, [(PIN, Ok(()))]);
    bench.shared.budget.set_limit(0);
    bench.shard.pump();
    assert!(bench.world().runs.is_empty(), "all that is there is pinned");
    bench.shard.on_unpin(&[run(7, 3)]);
    bench.shard.pump();
    assert!(!bench.world().runs.is_empty());
}

#[test]
fn pages_to_be_written_are_dirty_before_the_device_has_them() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.answer(1);
    assert!(!bench.entry(7).dirty);
    bench.shard.on_pin(PIN, &[run(7, 1)], true);
    assert!(bench.entry(7).dirty && bench.entry(7).slot.is_none());
    // The device's store passes by the protection.
    bench.world().memory.insert(7, bytes(2));
    bench.shard.on_unpin(&[run(7, 1)]);
    bench.evict_all();
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(2)));
}

#[test]
fn a_pin_on_a_busy_page_waits_for_its_run() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    let run_out = bench.hand_out_run();
    bench.shard.on_pin(PIN, &[run(7, 1)], true);
    assert!(bench.world().pins.is_empty());
    bench.end_run(run_out);
    assert_eq!(bench.world().pins, [(PIN, Ok(()))]);
    assert_eq!(bench.read(7), Some(bytes(1)));
}

#[test]
fn a_pin_is_not_granted_on_a_hole() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    let run_out = bench.hand_out_run();
    bench.fault(7, WRITE_PROTECTED);
    bench.shard.on_pin(PIN, &[run(7, 1)], true);
    bench.world().refuse_punch = true; // the page stays ...
    bench.end_run_after_discard(run_out, 7); // ... and the guest discards it
    assert_eq!(bench.world().pins, [(PIN, Ok(()))]);
    assert_eq!(bench.read(7), Some(vec![0; 4096]));
}

#[test]
fn a_refused_pin_lets_go_of_its_other_pages() {
    let mut bench = Bench::new();
    bench.store_remotely(9, 1);
    bench.touch(7, 1);
    bench.touch(8, 1);
    bench.shard.on_pin(PIN, &[run(7, 3)], true);
    let lost = bench.lose_slab();
    bench.shard.on_groups_lost(&lost);
    assert_eq!(bench.world().pins, [(PIN, Err(PinRefused::Lost))]);
    let run_out = bench.hand_out_run();
    assert!(run_out.pages.contains(PageIndex(7)) && run_out.pages.contains(PageIndex(8)));
    bench.end_run(run_out);
}

#[test]
fn a_pin_on_a_lost_page_is_refused_at_once() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    let lost = bench.lose_slab();
    bench.shard.on_groups_lost(&lost);
    bench.fault(7, READ);
    bench.world().clock_us = 50;
    bench.shard.on_pin(PIN, &[run(7, 2)], false);
    assert_eq!(bench.world().pins, [(PIN, Err(PinRefused::Lost))]);
    let waiting = bench.shard.waiting();
    assert_eq!(waiting.for_lost, 1, "the guest still waits");
    assert_eq!(waiting.waited_us, 50, "and has for that long");
}

#[test]
fn two_pins_of_a_page_end_one_by_one() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.shard.on_pin(PinId(1), &[run(7, 1)], false);
    bench.shard.on_pin(PinId(2), &[run(7, 1)], true);
    bench.shard.on_unpin(&[run(7, 1)]);
    bench.shared.budget.set_limit(0);
    bench.shard.pump();
    assert!(bench.world().runs.is_empty());
    bench.shard.on_unpin(&[run(7, 1)]);
    bench.shard.pump();
    assert_eq!(bench.world().runs.len(), 1);
}

#[test]
fn a_copy_written_before_a_pin_is_not_taken_for_the_pinned_page() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.evict_all();
    let write = bench.start_write();
    bench.shard.on_pin(PIN, &[run(7, 1)], true);
    bench.world().memory.insert(7, bytes(2));
    bench.shard.on_unpin(&[run(7, 1)]);
    bench.end_write(write);
    bench.evict_all();
    assert_eq!(bench.state(7), State::Staged);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(2)));
}

#[test]
fn the_end_of_the_guest_refuses_pins() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.shard.on_pin(PinId(1), &[run(7, 1)], false);
    bench.shard.end();
    bench.shard.on_pin(PinId(2), &[run(8, 1)], false);
    let ending = Err(PinRefused::Ending);
    assert_eq!(bench.world().pins, [(PinId(1), ending), (PinId(2), ending)]);
}

#[test]
fn a_pin_that_is_cancelled_keeps_nothing_and_leaves_others_theirs() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.touch(8, 2);
    bench.shard.on_pin(PinId(1), &[run(7, 2)], false);
    bench.shard.on_pin(PinId(2), &[run(7, 1)], false);
    bench.shard.cancel_pin(PinId(1));
    bench.answer(1);
    // Answered before, to somebody who keeps it.
    bench.shard.cancel_pin(PinId(2));
    let refused = (PinId(1), Err(PinRefused::Ending));
    assert_eq!(bench.world().pins, [refused, (PinId(2), Ok(()))]);
    bench.shared.budget.set_limit(0);
    bench.shard.pump();
    let left = |bench: &mut Bench| -> Vec<PageIndex> {
        let runs = bench.world().runs.iter();
        runs.flat_map(|run| run.pages.pages()).collect()
    };
    assert!(left(&mut bench).contains(&PageIndex(8)));
    assert!(!left(&mut bench).contains(&PageIndex(7)), "it is pinned");
    bench.shard.on_unpin(&[run(7, 1)]);
    bench.shard.pump();
    assert!(left(&mut bench).contains(&PageIndex(7)));
}
