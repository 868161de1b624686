//! Slots that pages keep while they are in memory.

use super::bench::*;
use crate::engine::table::State;

/// Pages 0 to 11, each in memory, unchanged, and with a slot of its own as far as it may keep it, where of
/// 64 slots so many are to be left.
fn fetched(bench: &mut Bench, left: u64) {
    for page in 0..12 {
        bench.store_remotely(page, page as u8);
    }
    bench.shared.slots.set_promised(64, left);
    for page in 0..12 {
        bench.fault(page, READ);
        bench.answer_all();
    }
}

fn kept(bench: &Bench) -> usize {
    (0..12)
        .filter(|page| bench.entry(*page).slot.is_some())
        .count()
}

#[test]
fn pages_keep_what_servers_have_promised_and_nobody_needs() {
    let mut bench = Bench::new();
    fetched(&mut bench, 52);
    assert_eq!((kept(&bench), bench.shared.slots.kept()), (12, 12));
}

#[test]
fn pages_keep_no_more_than_their_allowance_of_what_is_needed() {
    let mut bench = Bench::new();
    fetched(&mut bench, 53);
    assert_eq!((kept(&bench), bench.shared.slots.kept()), (8, 8));
}

#[test]
fn slots_that_pages_keep_go_to_those_that_need_them() {
    let mut bench = Bench::new();
    fetched(&mut bench, 52);
    assert!(bench.shared.slots.want_back(5), "nobody was asked before");
    bench.shard.pump();
    assert!(!bench.shard.has_slots_to_give_back());
    assert_eq!((kept(&bench), bench.shared.slots.kept()), (7, 7));
    assert_eq!(bench.shared.slots.usage(0).1, 7);
    // Those that gave theirs have to be written again.
    bench.evict_all();
    let states = (0..12).map(|page| bench.state(page));
    let staged = states.filter(|state| *state == State::Staged).count();
    assert_eq!(staged, 5);
    for page in 0..12 {
        bench.fault(page, READ);
        bench.answer_all();
        assert_eq!(bench.read(page), Some(bytes(page as u8)));
    }
}

#[test]
fn what_is_asked_for_and_not_there_is_not_looked_for_again_and_again() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.shared.slots.want_back(5);
    bench.shard.pump();
    assert!(!bench.shard.has_slots_to_give_back());
    assert_eq!(bench.state(7), State::Resident);
}
