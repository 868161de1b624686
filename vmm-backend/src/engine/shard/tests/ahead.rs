//! Pages fetched before anybody asks for them.

use super::bench::*;
use crate::engine::policy::ThreeQueues;
use crate::engine::table::State;
use crate::engine::{PageIndex, PinId};

/// Pages 20 to 27 lie on the server, and the guest has asked for two neighbours: those behind are under
/// way.
fn under_way() -> Bench {
    let mut bench = Bench::new();
    for page in 20..28 {
        bench.store_remotely(page, page as u8);
    }
    bench.fault(20, READ);
    bench.fault(21, READ);
    bench
}

fn asked(bench: &mut Bench) -> Vec<(u32, bool)> {
    let fetches = &bench.world().fetches;
    let asked = fetches.iter().map(|fetch| (fetch.page.0, fetch.ahead));
    asked.collect()
}

#[test]
fn what_comes_next_is_fetched_behind_what_is_waited_for() {
    let mut bench = under_way();
    let behind = [(22, true), (23, true), (24, true), (25, true)];
    assert_eq!(asked(&mut bench)[..2], [(20, false), (21, false)]);
    assert_eq!(asked(&mut bench)[2..], behind);
    for page in 20..26 {
        bench.answer(page as u8);
    }
    demand_resident(&mut bench, 22..26);
    assert_eq!(bench.shared.budget.used(), 6);
    bench.fault(26, READ);
    assert_eq!(asked(&mut bench), [(26, false), (27, true)]);
}

#[test]
fn a_neighbour_is_asked_for_by_the_same_request_where_neighbours_were_next() {
    const APART: u32 = 100;
    let mut bench = Bench::of_many(40 * APART);
    let places = (0..22).map(|place| place * APART);
    // Of the last two, the neighbours were never touched.
    let (both, alone) = (places.clone().take(20), places.skip(20));
    for first in both.clone() {
        bench.store_remotely(first, first as u8);
        bench.store_remotely(first + 1, first as u8 + 1);
    }
    for first in alone.clone() {
        bench.store_remotely(first, first as u8);
    }
    let mut asked_with_next = |first: u32| {
        bench.fault(first, READ);
        let fetches = bench.world().fetches.clone();
        if fetches[0].with_next {
            assert_eq!((fetches[1].page.0, fetches[1].ahead), (first + 1, true));
        }
        bench.fault(first + 1, READ);
        bench.answer_all();
        fetches[0].with_next
    };
    let asked: Vec<bool> = both.map(&mut asked_with_next).collect();
    assert!(
        !asked[..10].contains(&true),
        "nothing is known yet: {asked:?}"
    );
    assert!(
        asked[18] || asked[19],
        "one of them may be a sample: {asked:?}"
    );
    let asked: Vec<bool> = alone.map(&mut asked_with_next).collect();
    assert_eq!(asked, [false; 2]);
}

/// Has blocks of four pages leave, each by one run, and the guest use the third page of each, then its neighbour, then
/// the others. What is asked for with the third page, by place in its block; whether that waits for its neighbour.
fn asked_with_the_third(bench: &mut Bench, pays: bool) -> Vec<(bool, Vec<(u32, bool)>)> {
    const APART: u32 = 48;
    let mut policy = ThreeQueues::new(bench.shard.range(), bench.shared.ages.returns());
    if pays {
        policy.trust_reunions();
    }
    bench.shard.policy = Box::new(policy);
    let mut use_block = |first: u32| {
        for page in first..first + 4 {
            bench.touch(page, page as u8);
        }
        bench.evict_all();
        for _ in 0..4 {
            let write = bench.start_write();
            bench.end_write(write);
        }
        bench.fault(first + 2, READ);
        let with_next = bench.world().fetches[0].with_next;
        let asked = asked(bench).into_iter();
        let asked = asked.map(|(page, ahead)| (page - first, ahead)).collect();
        bench.answer_all();
        for page in [3, 0, 1, 2].map(|place| first + place) {
            bench.fault(page, READ);
            bench.answer_all();
            assert_eq!(bench.read(page), Some(bytes(page as u8)));
        }
        for page in first..first + 4 {
            bench.punch(page);
            bench.remove(page);
        }
        (with_next, asked)
    };
    (0..20).map(|block| use_block(block * APART)).collect()
}

#[test]
fn what_left_together_is_fetched_together_where_that_pays() {
    let mut bench = Bench::of_many(1000);
    let asked = asked_with_the_third(&mut bench, false);
    let alone = (false, vec![(2, false)]);
    assert!(asked[..8].iter().all(|asked| *asked == alone), "{asked:?}");
    let asked = asked_with_the_third(&mut bench, true);
    let by_itself = (false, vec![(2, false), (0, true), (1, true), (3, true)]);
    // By now neighbours are known to be next: that one comes by the request of the page that is waited for.
    let with_next = (true, vec![(2, false), (3, true), (0, true), (1, true)]);
    let is_whole = |asked: &&(bool, Vec<_>)| **asked == by_itself || **asked == with_next;
    // But for the blocks of the sample.
    assert!(asked.iter().filter(is_whole).count() >= 16, "{asked:?}");
    assert!(asked.contains(&with_next), "{asked:?}");
    let mut others = asked.iter().filter(|asked| !is_whole(asked));
    assert!(others.all(|(_, asked)| asked.iter().all(|(place, _)| *place >= 2)));
}

#[test]
fn the_next_window_is_asked_for_while_the_guest_waits_for_all_of_one() {
    let mut bench = Bench::new();
    bench.shared.pace.set_granule(8);
    bench
        .shared
        .pace
        .set_queue_depth("1".parse().expect("a depth"));
    for page in 0..32 {
        bench.store_remotely(page, page as u8);
    }
    let blocks = |bench: &mut Bench| {
        let fetches = asked(bench).into_iter();
        fetches.map(|(page, _)| page / 8).collect::<Vec<_>>()
    };
    bench.fault(0, READ);
    bench.fault(8, READ);
    assert_eq!(blocks(&mut bench), [[0; 8], [1; 8], [2; 8]].concat());
    bench.fault(17, READ);
    assert_eq!(blocks(&mut bench)[24..], [3; 8], "the guest waits for 17");
    for page in 0..32 {
        bench.answer(page);
    }
    for page in 0..32 {
        assert_eq!(bench.read(page), Some(bytes(page as u8)));
    }
}

/// The same where reads do not protect.
fn in_a_row() -> Bench {
    let bench = under_way();
    bench.shared.pace.set_protects_reads(false);
    bench
}

fn demand_resident(bench: &mut Bench, pages: std::ops::Range<u32>) {
    for page in pages {
        assert_eq!(bench.read(page), Some(bytes(page as u8)));
        assert_eq!(bench.state(page), State::Resident);
        assert!(!bench.entry(page).dirty, "its slot holds the same bytes");
        assert!(bench.entry(page).slot.is_some());
    }
}

#[test]
fn what_comes_together_in_a_row_is_put_in_place_by_one_call() {
    let mut bench = in_a_row();
    bench.answer_together();
    assert_eq!(bench.world().rows, [run(22, 4)], "20 and 21 do not wait");
    demand_resident(&mut bench, 20..26);
    assert_eq!(bench.shared.budget.used(), 6);
    assert!(bench.world().has_woken(24));
}

#[test]
fn what_does_not_follow_begins_a_row_of_its_own() {
    let mut bench = in_a_row();
    bench.world().fetches.remove(3);
    bench.answer_together();
    assert_eq!(bench.world().rows, [run(22, 1), run(24, 2)]);
    demand_resident(&mut bench, 24..26);
    assert_eq!(bench.state(23), State::Stored);
}

#[test]
fn a_row_goes_on_behind_a_page_that_is_there() {
    let mut bench = in_a_row();
    bench.world().memory.insert(24, bytes(99));
    bench.answer_together();
    assert_eq!(bench.world().rows, [run(22, 4), run(24, 2), run(25, 1)]);
    demand_resident(&mut bench, 22..24);
    demand_resident(&mut bench, 25..26);
    assert_eq!(bench.read(24), Some(bytes(99)), "whoever was faster");
    assert!(bench.entry(24).dirty && bench.entry(24).slot.is_none());
    assert_eq!(bench.shared.budget.used(), 6);
}

#[test]
fn a_row_goes_on_behind_a_page_that_cannot_be_put_in_place_now() {
    let mut bench = in_a_row();
    bench.answer(20);
    bench.answer(21);
    bench.world().agains = 1;
    bench.answer_together();
    assert_eq!(bench.world().rows, [run(22, 4), run(23, 3)]);
    demand_resident(&mut bench, 23..26);
    assert_eq!(bench.state(22), State::Stored);
    assert_eq!(bench.shared.budget.used(), 5);
    bench.fault(22, READ);
    bench.answer_all();
    demand_resident(&mut bench, 22..23);
}

#[test]
fn where_reads_protect_each_page_comes_by_itself() {
    let mut bench = under_way();
    bench.answer_together();
    assert_eq!(bench.world().rows, []);
    demand_resident(&mut bench, 20..26);
    assert!(bench.world().protected.contains(&24));
}

#[test]
fn what_comes_next_and_was_staged_not_long_ago_costs_no_server() {
    let mut bench = Bench::new();
    bench.keeps_spares = true;
    for page in 20..28 {
        bench.store_remotely(page, page as u8);
    }
    bench.fault(20, READ);
    bench.fault(21, READ);
    assert_eq!(asked(&mut bench), []);
    for page in 20..26 {
        assert_eq!(bench.read(page), Some(bytes(page as u8)));
        assert_eq!(bench.state(page), State::Resident);
    }
    assert_eq!(bench.state(26), State::Stored);
    assert_eq!(bench.shared.budget.used(), 6);
    assert_eq!(bench.shared.stats.fetched_ahead.get(), 0);
}

#[test]
fn who_asks_for_a_page_under_way_waits_for_that() {
    let mut bench = under_way();
    bench.fault(23, WRITE);
    assert_eq!(asked(&mut bench).len(), 6, "it is not asked for twice");
    assert_eq!(bench.shard.waiting().faults, 3);
    for page in 20..26 {
        bench.answer(page as u8);
    }
    assert_eq!(bench.shard.waiting().faults, 0);
    assert!(
        !bench.world().protected.contains(&23),
        "it is to be written"
    );
}

#[test]
fn who_asks_late_has_not_waited_since_the_fetch_began() {
    let mut bench = under_way();
    bench.answer(20);
    bench.answer(21);
    bench.world().clock_us = 500;
    bench.fault(23, READ);
    bench.world().clock_us = 530;
    assert_eq!(bench.shard.waiting().waited_us, 30);
}

#[test]
fn without_room_to_spare_nothing_is_fetched_ahead() {
    let mut bench = Bench::new();
    for page in 20..28 {
        bench.store_remotely(page, 1);
    }
    // The third is the reserve's.
    bench.shared.budget.set_limit(3);
    bench.fault(20, READ);
    bench.fault(21, READ);
    assert_eq!(asked(&mut bench), [(20, false), (21, false)]);
}

#[test]
fn a_page_that_is_on_its_way_is_not_asked_for_again() {
    let mut bench = Bench::new();
    for page in 20..28 {
        bench.store_remotely(page, 1);
    }
    for page in [23, 20, 21] {
        bench.fault(page, READ);
    }
    let behind = [(22, true), (24, true), (25, true)];
    assert_eq!(asked(&mut bench)[3..], behind);
}

/// The VMM is changing its mappings: who waits is tried again, and nobody waits for this page.
#[test]
fn a_page_that_cannot_be_put_in_place_is_left_where_it_lies() {
    let mut bench = under_way();
    bench.answer(20);
    bench.answer(21);
    bench.world().agains = 1;
    bench.answer(22);
    assert_eq!(bench.state(22), State::Stored);
    assert_eq!(bench.shared.budget.used(), 5, "its room is given back");
    bench.fault(22, READ);
    assert!(asked(&mut bench).contains(&(22, false)));
    assert!(bench.shard.awaits(PageIndex(22)));
}

#[test]
fn no_page_of_the_hosts_is_waited_for_where_nobody_asked() {
    let mut bench = under_way();
    bench.answer(20);
    bench.answer(21);
    bench.world().pool_is_empty = true;
    bench.answer(22);
    assert_eq!(bench.shared.stats.stalls_pool.get(), 0);
    assert_eq!(bench.shared.budget.used(), 5, "its room is given back");
    // But somebody who asks for it waits.
    bench.fault(22, READ);
    assert!(bench.shard.waits_for_pool());
    bench.world().pool_is_empty = false;
    bench.shard.pump();
    assert_eq!(bench.read(22), Some(bytes(22)));
}

#[test]
fn one_whose_server_wants_its_slab_back_is_moved_after_all() {
    let mut bench = under_way();
    bench.answer(20);
    bench.answer(21);
    bench.vacate();
    bench.shard.pump();
    bench.world().agains = 1;
    bench.answer(22);
    assert!(
        bench.shard.fetches(PageIndex(22)),
        "it stays in a slab that is wanted back"
    );
}

#[test]
fn lost_on_its_way_it_is_lost_for_who_asks_later() {
    let mut bench = under_way();
    let lost = bench.lose_slab();
    bench.shard.on_groups_lost(&lost);
    assert_eq!(bench.state(24), State::Lost);
    assert_eq!(bench.shared.budget.used(), 0);
    bench.fault(24, READ);
    assert_eq!(bench.shard.waiting().for_lost, 3);
}

/// Pages 16 to 39 lie on the server but for 19, and eight are moved together.
fn in_blocks() -> Bench {
    let mut bench = Bench::new();
    bench.shared.pace.set_granule(8);
    for page in (16..40).filter(|page| *page != 19) {
        bench.store_remotely(page, page as u8);
    }
    bench
}

#[test]
fn what_is_moved_together_is_fetched_together() {
    let mut bench = in_blocks();
    bench.fault(21, READ);
    let others = [16, 17, 18, 20, 22, 23].map(|page| (page, true));
    assert_eq!(
        asked(&mut bench)[0],
        (21, false),
        "what is waited for first"
    );
    assert_eq!(asked(&mut bench)[1..], others);
    for page in [21, 16, 17, 18, 20, 22, 23] {
        bench.answer(page);
        assert_eq!(bench.read(page.into()), Some(bytes(page)));
    }
    assert_eq!(bench.state(19), State::Absent);
    // Neighbouring blocks are a guest that goes in order, as neighbouring pages are.
    bench.fault(24, READ);
    assert_eq!(asked(&mut bench).len(), 8 + 8);
    assert!(asked(&mut bench)[8..].iter().all(|(page, _)| *page >= 32));
}

#[test]
fn what_is_moved_together_may_change_at_any_time() {
    let mut bench = in_blocks();
    bench.fault(21, READ);
    bench.shared.pace.set_granule(2);
    bench.fault(24, READ);
    assert_eq!(asked(&mut bench)[7..], [(24, false), (25, true)]);
    bench.shared.pace.set_granule(1);
    bench.fault(39, READ);
    assert_eq!(asked(&mut bench)[9..], [(39, false)]);
}

#[test]
fn without_room_to_spare_a_page_comes_without_those_moved_with_it() {
    let mut bench = in_blocks();
    bench.shared.budget.set_limit(3);
    bench.fault(21, READ);
    assert_eq!(asked(&mut bench), [(21, false), (16, true)]);
    bench.fault(22, READ);
    assert_eq!(asked(&mut bench)[2..], [(22, false)]);
}

/// What is known of pages that were fetched on a guess: used, and unused.
fn judged(bench: &Bench) -> (u64, u64) {
    let stats = &bench.shared.stats;
    let (used, unused) = (&stats.fetched_ahead_used, &stats.fetched_ahead_unused);
    (used.get(), unused.get())
}

fn evict_everything(bench: &mut Bench) {
    while bench.shared.budget.used() > 0 {
        bench.evict_all();
    }
}

#[test]
fn a_guess_is_right_where_the_guest_goes_on_behind_it() {
    let mut bench = under_way();
    bench.answer_all();
    assert_eq!(judged(&bench), (0, 0), "nothing is known yet");
    bench.fault(26, READ);
    assert_eq!(judged(&bench), (4, 0));
    bench.answer_all();
    evict_everything(&mut bench);
    assert_eq!(judged(&bench), (4, 1), "of 27 no use was seen");
    bench.fault(27, READ);
    bench.answer_all();
    evict_everything(&mut bench);
    assert_eq!(judged(&bench), (4, 1), "each is counted once");
}

#[test]
fn a_guess_is_right_where_somebody_asks_before_it_is_there() {
    let mut bench = under_way();
    bench.fault(23, READ);
    bench.shard.on_pin(PinId(1), &[run(24, 1)], false);
    bench.answer_all();
    assert_eq!(judged(&bench), (2, 0));
    bench.shard.on_unpin(&[run(24, 1)]);
    evict_everything(&mut bench);
    assert_eq!(judged(&bench), (2, 2));
}

#[test]
fn a_guess_is_right_where_the_page_comes_just_before_who_asks_is_heard() {
    let mut bench = under_way();
    bench.answer_all();
    bench.fault(22, READ);
    assert_eq!(judged(&bench), (1, 0));
}

#[test]
fn a_guess_is_right_where_the_guest_stores_to_the_page() {
    let mut bench = under_way();
    bench.answer_all();
    bench.fault(22, WRITE_PROTECTED);
    bench.store(22, 99);
    assert_eq!(judged(&bench), (1, 0));
    evict_everything(&mut bench);
    assert_eq!(judged(&bench), (1, 3));
}

#[test]
fn a_guess_is_right_where_the_page_leaves_with_other_bytes() {
    let mut bench = Bench::new();
    bench.shared.pace.set_protects_reads(false);
    for page in 20..28 {
        bench.store_remotely(page, page as u8);
    }
    bench.fault(20, WRITE);
    bench.fault(21, WRITE);
    bench.answer_all();
    bench.store(23, 99);
    evict_everything(&mut bench);
    assert_eq!(judged(&bench), (1, 3));
}

#[test]
fn of_a_guess_that_never_came_or_was_given_back_nothing_is_said() {
    let mut bench = under_way();
    bench.answer(20);
    bench.answer(21);
    bench.world().agains = 1;
    bench.answer(22);
    bench.answer_all();
    bench.punch(23);
    bench.remove(23);
    for page in [22, 23] {
        bench.fault(page, WRITE);
    }
    bench.answer_all();
    evict_everything(&mut bench);
    assert_eq!(judged(&bench), (0, 4), "24 and 25, and 26 and 27 behind 22");
}

#[test]
fn what_is_moved_together_is_no_guess() {
    let mut bench = in_blocks();
    bench.fault(21, READ);
    bench.answer_all();
    evict_everything(&mut bench);
    assert_eq!(bench.shared.stats.fetched_ahead.get(), 6);
    assert_eq!(judged(&bench), (0, 0));
}

#[test]
fn a_row_that_reaches_into_another_mapping_is_put_in_place_page_by_page_up_to_it() {
    let mut bench = in_a_row();
    bench.world().border = Some(PageIndex(24));
    bench.answer_together();
    assert_eq!(bench.world().rows, [run(22, 4), run(23, 3), run(24, 2)]);
    demand_resident(&mut bench, 20..26);
}

#[test]
fn nothing_is_fetched_ahead_from_a_server_out_of_reach() {
    let mut bench = Bench::new();
    for page in 20..28 {
        bench.store_remotely(page, page as u8);
    }
    bench.shared.slots.set_connected(0, false);
    bench.fault(20, READ);
    bench.fault(21, READ);
    assert_eq!(asked(&mut bench), [(20, false), (21, false)]);
    assert_eq!(bench.shared.budget.used(), 2, "no room is held for others");
}
