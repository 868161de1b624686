//! Faults on pages in each state.

use std::collections::BTreeSet;

use super::bench::*;
use crate::engine::shard::FetchFailed;
use crate::engine::stats::FaultKind;
use crate::engine::table::State;
use crate::engine::{Install, PageIndex, Ports};

#[test]
fn a_page_never_touched_is_zero() {
    let mut bench = Bench::new();
    bench.fault(5, READ);
    assert_eq!(bench.read(5), Some(vec![0; 4096]));
    assert_eq!(bench.state(5), State::Resident);
    assert!(bench.entry(5).dirty);
    assert_eq!(bench.shared.budget.used(), 1);
}

#[test]
fn zeros_run_ahead_of_a_guest_that_touches_its_memory_in_order() {
    let mut bench = Bench::new();
    let mut faults = 0;
    for page in 0..40 {
        if bench.read(page).is_none() {
            bench.fault(page, WRITE);
            faults += 1;
        }
    }
    assert!(faults < 10, "{faults} faults for 40 pages in order");
    let there = bench.world().memory.len() as u64;
    assert_eq!(bench.shared.budget.used(), there);
}

#[test]
fn zeros_ahead_stop_at_a_page_that_is_there() {
    let mut bench = Bench::new();
    bench.world().memory.insert(3, bytes(9));
    for page in 0..3 {
        bench.fault(page, WRITE);
    }
    assert_eq!(bench.read(3), Some(bytes(9)));
    assert_eq!(bench.state(3), State::Absent, "not ours to count");
    assert_eq!(bench.shared.budget.used(), 3);
}

#[test]
fn zeros_ahead_do_not_fail_where_another_mapping_begins() {
    let mut bench = Bench::new();
    bench.world().border = Some(PageIndex(5));
    for page in 0..20 {
        if bench.read(page).is_none() {
            bench.fault(page, WRITE);
        }
        assert_eq!(bench.read(page), Some(vec![0; 4096]), "page {page}");
    }
    assert_eq!(bench.shard.waiting().faults, 0);
    let there = bench.world().memory.len() as u64;
    assert_eq!(bench.shared.budget.used(), there);
}

#[test]
fn nothing_of_a_page_shows_in_staging() {
    let mut bench = Bench::new();
    bench.touch(5, 1);
    bench.evict_all();
    let slot = bench.entry(5).staging.expect("staged").0;
    let shows = bench.world().staging[&slot]
        .windows(8)
        .any(|part| part == &bytes(1)[..8]);
    assert!(!shows);
    bench.fault(5, READ);
    assert_eq!(bench.read(5), Some(bytes(1)));
}

#[test]
fn a_page_that_exists_already_counts_as_dirty_and_its_waiters_wake() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.world().memory.insert(7, bytes(2));
    bench.answer(1);
    assert_eq!(bench.read(7), Some(bytes(2)), "the newer bytes stay");
    assert!(bench.world().has_woken(7));
    let entry = bench.entry(7);
    assert!(entry.state == State::Resident && entry.dirty && entry.slot.is_none());
    assert_eq!(bench.shared.slots.usage(0).1, 0, "its slot is freed");
    assert_eq!(bench.shared.slots.kept(), 0);
}

#[test]
fn duplicates_are_answered_once() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    for _ in 0..100 {
        bench.fault(7, READ);
    }
    assert_eq!(bench.world().fetches.len(), 1);
    bench.answer(1);
    assert_eq!(bench.shared.stats.faults(FaultKind::Remote), 1);
    assert_eq!(bench.shared.stats.duplicates.get(), 99);
    // One that was read late finds the page there, and is woken.
    bench.world().woken.clear();
    bench.fault(7, READ);
    assert!(bench.world().has_woken(7));
}

#[test]
fn time_waited_is_of_all_faults_and_of_those_that_still_wait() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.store_remotely(8, 1);
    bench.world().clock_us = 100;
    bench.fault(7, READ);
    bench.world().clock_us = 130;
    bench.fault(8, READ);
    // The same vCPU again: it waits no longer for that.
    bench.fault(7, READ);
    bench.world().clock_us = 150;
    assert_eq!(bench.shard.waiting().waited_us, 50 + 20);
    bench.answer(1);
    bench.world().clock_us = 1_000;
    let still = bench.shard.waiting().faults;
    assert_eq!(bench.shard.waiting().waited_us, 50 + 20 + still * 850);
    while bench.shard.waiting().faults > 0 {
        bench.answer(1);
    }
    let waited_us = bench.shard.waiting().waited_us;
    bench.world().clock_us = 9_000;
    assert_eq!(
        bench.shard.waiting().waited_us,
        waited_us,
        "nobody waits any more"
    );
}

#[test]
fn a_page_read_is_protected_and_a_store_is_noted_before_it_can_happen() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.answer(1);
    assert!(bench.entry(7).protected && bench.world().protected.contains(&7));
    // The scripted world checks the order at `unprotect`.
    bench.fault(7, WRITE_PROTECTED);
    assert!(!bench.entry(7).protected && bench.world().has_woken(7));
}

#[test]
fn a_store_that_waits_is_not_answered_with_a_protected_page() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.fault(7, WRITE);
    bench.answer(1);
    assert!(!bench.entry(7).protected && !bench.world().protected.contains(&7));
}

#[test]
fn what_the_kernel_refuses_for_now_is_tried_again_with_the_same_bytes() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.world().agains = u32::MAX;
    bench.answer(1);
    assert_eq!(bench.shared.budget.used(), 0, "no room is held meanwhile");
    assert_eq!(bench.state(7), State::Stored);
    assert!(bench.shard.has_retries());
    bench.world().agains = 0;
    bench.shard.pump();
    assert_eq!(bench.read(7), Some(bytes(1)));
    assert!(bench.world().fetches.is_empty(), "fetched once");
    assert_eq!(bench.shared.budget.used(), 1);
    assert!(!bench.shard.has_retries());
}

#[test]
fn an_unprotecting_that_is_refused_for_now_is_tried_again() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.answer(1);
    bench.world().woken.clear();
    bench.world().agains = 2;
    bench.fault(7, WRITE_PROTECTED);
    assert!(bench.shard.has_retries() && !bench.world().has_woken(7));
    bench.shard.pump();
    bench.shard.pump();
    assert!(!bench.shard.has_retries() && bench.world().has_woken(7));
}

#[test]
fn bytes_that_do_not_match_are_read_once_more_and_then_lost() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.answer(2);
    assert_eq!(bench.state(7), State::Stored);
    bench.answer(2);
    assert_eq!(bench.state(7), State::Lost);
    assert_eq!(bench.read(7), None, "nothing wrong is given");
    assert_eq!(bench.shard.waiting().for_lost, 1);
    assert_eq!(bench.shared.budget.used(), 0);
    assert_eq!(bench.shared.stats.integrity_failures.get(), 1);
}

#[test]
fn bytes_wrong_once_on_their_way_do_no_harm() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.answer(2);
    bench.answer(1);
    assert_eq!(bench.read(7), Some(bytes(1)));
}

/// The guest changes a page that is stored, and it is stored again.
fn store_anew(bench: &mut Bench, page: u32, before: u8, version: u8) {
    bench.fault(page, WRITE);
    bench.answer(before);
    bench.store(page, version);
    bench.evict_all();
    let write = bench.start_write();
    bench.end_write(write);
    assert_eq!(bench.state(page), State::Stored);
}

#[test]
fn what_a_page_once_was_is_not_taken() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    let earlier = bench.shared.table.load(PageIndex(7)).generation;
    store_anew(&mut bench, 7, 1, 2);
    bench.fault(7, READ);
    for _ in 0..2 {
        let fetch = bench.world().fetches.remove(0);
        bench.answer_sealed(fetch, PageIndex(7), earlier, 1);
    }
    assert_eq!(bench.state(7), State::Lost);
    assert_eq!(bench.shared.stats.refused_reads.get(), 2);
}

#[test]
fn what_was_sealed_for_another_page_is_not_taken() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.store_remotely(8, 1);
    let other = bench.shared.table.load(PageIndex(8)).generation;
    bench.fault(7, READ);
    for _ in 0..2 {
        let fetch = bench.world().fetches.remove(0);
        bench.answer_sealed(fetch, PageIndex(8), other, 1);
    }
    assert_eq!(bench.state(7), State::Lost);
}

#[test]
fn a_page_of_another_place_is_not_taken() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.store_remotely(8, 2);
    bench.fault(7, READ);
    bench.answer(2);
    bench.answer(2);
    assert_eq!(bench.state(7), State::Lost);
}

#[test]
fn a_slab_lost_during_a_fetch_loses_the_page() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    let lost = bench.lose_slab();
    bench.shard.on_groups_lost(&lost);
    assert_eq!(bench.state(7), State::Lost);
    assert_eq!(bench.shared.budget.used(), 0);
    // The answer comes late, and changes nothing.
    bench.answer(1);
    assert_eq!((bench.state(7), bench.read(7)), (State::Lost, None));
    assert_eq!(bench.shared.budget.used(), 0);
}

#[test]
fn a_server_that_does_not_know_the_slot_loses_the_page() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    let fetch = bench.world().fetches.remove(0);
    bench
        .shard
        .on_fetched(fetch.id, fetch.page, Err(FetchFailed::Gone));
    assert_eq!(bench.state(7), State::Lost);
    assert_eq!(bench.shard.waiting().for_lost, 1);
}

#[test]
fn a_lost_page_that_the_guest_gives_back_is_zero_again() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    let lost = bench.lose_slab();
    bench.shard.on_groups_lost(&lost);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), None);
    bench.remove(7);
    assert_eq!(bench.read(7), Some(vec![0; 4096]));
    assert_eq!(bench.shard.waiting().for_lost, 0);
}

#[test]
fn a_page_of_one_word_needs_no_server() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.world().memory.insert(7, vec![0xab; 4096]);
    bench.evict_all();
    assert_eq!(bench.state(7), State::Filled);
    assert!(bench.world().orders.is_empty());
    assert_eq!(bench.shared.staging.in_use(), 0);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(vec![0xab; 4096]));
}

#[test]
fn a_range_mapped_anew_is_not_clean_by_its_old_protection() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.answer(1);
    bench.shard.freeze(run(0, 16));
    bench.world().protected.clear();
    bench.store(7, 2);
    bench.shard.thaw();
    bench.evict_all();
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(2)));
}

/// Its steps: protect, read, mark, punch, wake.
#[test]
fn a_run_that_is_out_when_its_range_is_mapped_anew_leaves_it_there() {
    for steps in 0..5 {
        let mut bench = Bench::new();
        bench.store_remotely(7, 1);
        bench.fault(7, READ);
        bench.answer(1);
        let mut out = bench.hand_out_run();
        bench.advance(&mut out, steps);
        bench.shard.freeze(run(0, 16));
        bench.world().protected.clear();
        let has_punched = steps == 4;
        if !has_punched {
            bench.store(7, 2);
        }
        bench.shard.thaw();
        bench.end_run(out);
        if has_punched {
            assert_eq!(bench.state(7), State::Stored);
            bench.fault(7, READ);
            bench.answer(1);
            assert_eq!(bench.read(7), Some(bytes(1)));
            continue;
        }
        assert_eq!(bench.state(7), State::Resident, "{steps} steps");
        bench.evict_all();
        bench.fault(7, READ);
        assert_eq!(bench.read(7), Some(bytes(2)), "{steps} steps");
    }
}

#[test]
fn a_frozen_range_is_not_evicted() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.touch(70, 1);
    bench.shard.freeze(run(0, 16));
    let run = bench.hand_out_run();
    assert!(!run.pages.contains(crate::engine::PageIndex(7)));
    bench.end_run(run);
    assert_eq!(bench.state(7), State::Resident);
}

#[test]
fn the_scripted_world_reports_what_exists() {
    let mut bench = Bench::new();
    bench.world().memory.insert(1, bytes(1));
    let (made, how) = bench.world().zero(run(0, 3));
    assert_eq!((made, how), (1, Install::Exists));
}

/// A page that is lost, of a guest that is told so by memory errors.
fn lost_and_poisonable(page: u32) -> Bench {
    let mut bench = Bench::poisoning();
    bench.store_remotely(page, 1);
    let lost = bench.lose_slab();
    bench.shard.on_groups_lost(&lost);
    bench
}

#[test]
fn who_asks_for_a_lost_page_is_told_by_a_memory_error() {
    let mut bench = lost_and_poisonable(7);
    assert!(bench.world().poisoned.is_empty(), "unasked");
    bench.fault(7, READ);
    assert_eq!(bench.world().poisoned, BTreeSet::from([7]));
    assert!(bench.world().has_woken(7));
    assert_eq!((bench.state(7), bench.read(7)), (State::Lost, None));
    assert_eq!(bench.shard.waiting().faults, 0);
    let stats = &bench.shared.stats;
    assert_eq!(
        (stats.poisoned_faults.get(), stats.lost_faults.get()),
        (1, 0)
    );
}

#[test]
fn a_memory_error_waits_for_mappings_to_settle() {
    let mut bench = lost_and_poisonable(7);
    bench.world().agains = 2;
    bench.fault(7, READ);
    assert_eq!(bench.shard.waiting().faults, 1);
    bench.shard.pump();
    assert_eq!(bench.world().poisoned, BTreeSet::from([7]));
    assert_eq!(bench.shard.waiting().faults, 0);
}

#[test]
fn a_page_poisoned_by_a_former_process_is_poisoned_still() {
    let mut bench = lost_and_poisonable(7);
    bench.world().poisoned.insert(7);
    bench.fault(7, WRITE);
    assert_eq!(bench.shard.waiting().faults, 0);
    assert_eq!((bench.state(7), bench.read(7)), (State::Lost, None));
}

#[test]
fn memory_in_place_of_lost_pages_is_zero() {
    let mut bench = lost_and_poisonable(7);
    bench.touch(8, 2);
    bench.fault(7, READ);
    bench.shard.on_mapped_anew(run(6, 4));
    assert!(bench.world().poisoned.is_empty());
    assert_eq!(bench.read(7), Some(vec![0; 4096]));
    assert_eq!(bench.read(8), Some(bytes(2)), "what is not lost stays");
}

#[test]
fn memory_mapped_anew_is_lost_still_for_who_was_not_told() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    let lost = bench.lose_slab();
    bench.shard.on_groups_lost(&lost);
    bench.fault(7, READ);
    bench.shard.on_mapped_anew(run(6, 4));
    assert_eq!((bench.state(7), bench.read(7)), (State::Lost, None));
}

/// The fault was told before the discard, and answered after its caller had gone on.
#[test]
fn a_page_poisoned_while_it_was_given_back_is_healed() {
    let mut bench = lost_and_poisonable(7);
    bench.fault(7, READ);
    bench.remove(7);
    assert!(bench.world().poisoned.is_empty());
    assert_eq!(bench.read(7), Some(vec![0; 4096]));
}

#[test]
fn a_page_given_back_twice_before_it_is_healed_is_healed() {
    let mut bench = lost_and_poisonable(7);
    bench.fault(7, READ);
    bench.world().agains = u32::MAX;
    bench.remove(7);
    bench.remove(7);
    assert_eq!(bench.world().poisoned, BTreeSet::from([7]));
    bench.world().agains = 0;
    bench.shard.pump();
    assert!(bench.world().poisoned.is_empty());
    assert_eq!(bench.read(7), Some(vec![0; 4096]));
}

#[test]
fn a_successor_heals_what_was_given_back_and_not_healed() {
    let mut dying = lost_and_poisonable(7);
    dying.fault(7, READ);
    dying.world().agains = u32::MAX;
    dying.remove(7);
    let left = dying.entry(7);
    let mut bench = Bench::poisoning();
    bench.world().poisoned.insert(7);
    bench.shared.table.store(PageIndex(7), &left);
    bench.shard.adopt_recovered(PageIndex(7));
    bench.shard.pump();
    assert!(bench.world().poisoned.is_empty());
    assert_eq!(bench.read(7), Some(vec![0; 4096]));
    assert!(!bench.entry(7).is_unhealed());
}
