//! Pages that the guest gives back, at every moment.

use super::bench::*;
use crate::engine::table::State;

#[test]
fn a_hole_is_absent_and_costs_nothing() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.remove(7);
    assert_eq!(bench.state(7), State::Absent);
    assert_eq!(bench.shared.slots.usage(0).1, 0);
    bench.touch(8, 1);
    bench.evict_all();
    bench.remove(8);
    assert_eq!(bench.shared.staging.in_use(), 0);
    bench.touch(9, 1);
    bench.punch(9);
    bench.remove(9);
    assert_eq!(bench.shared.budget.used(), 0);
}

#[test]
fn a_page_touched_again_before_the_event_stays() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.punch(7);
    bench.fault(7, WRITE); // another vCPU is faster than the event
    bench.store(7, 2);
    bench.remove(7);
    assert_eq!(bench.read(7), Some(bytes(2)));
    assert!(bench.entry(7).dirty);
    bench.evict_all();
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(2)));
}

#[test]
fn a_fault_read_before_the_event_that_caused_it_gets_zeros() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.punch(7);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(vec![0; 4096]));
    assert_eq!(bench.shared.budget.used(), 1);
}

#[test]
fn a_removal_beside_a_copy_gives_zeros() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.world().agains = u32::MAX; // the event is queued: COPY is refused
    bench.answer(1);
    assert_eq!(bench.read(7), None);
    bench.remove(7); // those who wait go on waiting, but not for the old bytes
    assert_eq!(bench.read(7), None);
    bench.world().agains = 0;
    bench.shard.pump();
    assert_eq!(bench.read(7), Some(vec![0; 4096]));
    assert_eq!(bench.shared.budget.used(), 1);
}

#[test]
fn a_removal_during_a_fetch_gives_zeros() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.remove(7);
    assert_eq!(bench.read(7), Some(vec![0; 4096]));
    bench.answer(1);
    assert_eq!(bench.read(7), Some(vec![0; 4096]));
    assert_eq!(bench.shared.budget.used(), 1);
    assert_eq!(bench.shared.slots.usage(0).1, 0);
}

#[test]
fn a_hole_in_a_run_is_absent_when_the_run_ends() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    let mut run = bench.hand_out_run();
    bench.advance(&mut run, 2);
    bench.punch(7);
    bench.remove(7);
    bench.fault(7, READ);
    bench.end_run(run);
    assert_eq!(bench.read(7), Some(vec![0; 4096]));
    assert_eq!(bench.shared.staging.in_use(), 0);
    assert_eq!(bench.shared.budget.used(), 1);
}

#[test]
fn bytes_stored_after_a_discard_returned_survive_a_run_that_was_out_already() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.punch(7);
    bench.fault(7, READ); // another vCPU brings the page in as zeros
    let mut run = bench.hand_out_run();
    bench.remove(7); // the event is read: the discard has returned
    bench.store(7, 2); // the page is there, and not protected yet
    bench.advance(&mut run, 4);
    bench.end_run(run);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(2)));
}

#[test]
fn bytes_stored_before_a_late_look_at_a_discard_survive() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.punch(7);
    bench.fault(7, READ);
    let mut run = bench.hand_out_run();
    // The event is read, the discard returns, the guest stores, the run ends its punching, and
    // only then does the owner come to deal with the event.
    bench.store(7, 2);
    bench.advance(&mut run, 4);
    bench.remove(7);
    bench.end_run(run);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(2)));
}

#[test]
fn a_discard_after_a_failed_punch_makes_a_hole() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    let mut run = bench.hand_out_run();
    bench.world().refuse_punch = true;
    bench.advance(&mut run, 4);
    bench.punch(7);
    bench.remove(7);
    bench.end_run(run);
    assert_eq!(bench.state(7), State::Absent);
    assert_eq!(bench.shared.budget.used(), 0);
}

#[test]
fn a_write_back_order_of_a_removed_page_is_stale() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.evict_all();
    let staged = bench.world().orders.remove(0);
    bench.remove(7);
    assert!(!bench.shared.staging.start_write(staged.staging));
}

#[test]
fn a_write_back_that_ends_after_a_removal_frees_its_slot() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.evict_all();
    let write = bench.start_write();
    bench.remove(7);
    bench.end_write(write);
    assert_eq!(bench.state(7), State::Absent);
    assert_eq!(bench.shared.slots.usage(0).1, 0);
    assert_eq!(bench.shared.staging.in_use(), 0);
}
