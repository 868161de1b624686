//! Bringing everything home.

use super::bench::*;
use crate::engine::PageSize;
use crate::engine::PinId;
use crate::engine::table::State;

fn start(bench: &mut Bench) {
    bench.shared.budget.set_limit(1000);
    bench.shard.start_homing();
    bench.shard.pump();
}

#[test]
fn a_page_comes_home_from_wherever_it_is() {
    let mut bench = Bench::new();
    bench.store_remotely(3, 1);
    bench.touch(7, 2);
    for (page, word) in [(8, 0), (9, 5)] {
        bench.fault(page, WRITE);
        let filled = vec![word; PageSize::BASE.length()];
        bench.world().memory.insert(page, filled);
    }
    bench.evict_all();
    assert_eq!(bench.state(7), State::Staged);
    assert_eq!(bench.state(9), State::Filled);
    start(&mut bench);
    assert!(!bench.shard.is_home(), "page 3 is still on its way");
    bench.answer(1);
    assert!(bench.shard.is_home());
    assert_eq!(bench.read(3), Some(bytes(1)));
    assert_eq!(bench.read(7), Some(bytes(2)));
    assert_eq!(bench.read(9), Some(vec![5; PageSize::BASE.length()]));
    // Zeros cost nothing where nobody has touched them.
    assert_eq!((bench.state(8), bench.read(8)), (State::Absent, None));
}

#[test]
fn a_run_in_work_is_waited_for() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    let run = bench.hand_out_run();
    start(&mut bench);
    assert!(!bench.shard.is_home());
    bench.end_run(run);
    assert!(bench.shard.is_home());
    assert_eq!(bench.read(7), Some(bytes(1)));
}

#[test]
fn what_is_evicted_after_it_was_found_home_comes_home_again() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    start(&mut bench);
    assert!(bench.shard.is_home());
    bench.evict_all();
    assert!(!bench.shard.is_home(), "page 7 has left since");
    assert!(bench.shard.has_more_to_bring());
    start(&mut bench);
    assert!(bench.shard.is_home());
    assert_eq!(bench.read(7), Some(bytes(1)));
}

#[test]
fn a_page_given_back_on_its_way_is_not_waited_for() {
    let mut bench = Bench::new();
    bench.store_remotely(3, 1);
    start(&mut bench);
    bench.remove(3);
    assert!(bench.shard.is_home());
    assert_eq!(bench.read(3), None);
    bench.answer(1);
    assert_eq!(bench.read(3), None, "a late answer changes nothing");
}

#[test]
fn a_fault_on_a_page_on_its_way_is_answered_by_it() {
    let mut bench = Bench::new();
    bench.store_remotely(3, 1);
    start(&mut bench);
    bench.fault(3, READ);
    assert_eq!(bench.world().fetches.len(), 1, "asked for twice");
    bench.answer(1);
    assert!(bench.world().has_woken(3));
    assert_eq!(bench.read(3), Some(bytes(1)));
    assert_eq!(bench.shard.waiting().faults, 0);
}

#[test]
fn what_is_called_off_leaves_an_ordinary_shard() {
    let mut bench = Bench::new();
    bench.store_remotely(3, 1);
    bench.store_remotely(4, 2);
    start(&mut bench);
    bench.answer(1);
    bench.shard.stop_homing();
    bench.shared.budget.set_limit(100);
    bench.answer(2);
    assert!(!bench.shard.is_home(), "nobody asks any more");
    bench.evict_all();
    assert_eq!(
        bench.state(3),
        State::Stored,
        "unchanged: dropped without I/O"
    );
    bench.fault(3, READ);
    bench.answer(1);
    assert_eq!(bench.read(3), Some(bytes(1)));
}

#[test]
fn a_shard_is_not_released_while_the_device_waits() {
    let mut bench = Bench::new();
    start(&mut bench);
    assert!(bench.shard.may_be_released());
    bench.world().agains = u32::MAX;
    bench.shard.on_pin(PinId(1), &[run(60, 1)], true);
    assert!(bench.shard.is_home() && !bench.shard.may_be_released());
    bench.world().agains = 0;
    bench.shard.pump();
    assert!(bench.shard.may_be_released());
}
