//! Write-back, and pages taken back meanwhile.

use std::sync::Arc;

use super::bench::*;
use crate::engine::PageIndex;
use crate::engine::shard::moving::LOOKS;
use crate::engine::slots::{SlabRef, SlotPool};
use crate::engine::stats::FaultKind;
use crate::engine::table::State;

#[test]
fn a_page_in_staging_comes_back_without_a_server() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.evict_all();
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(1)));
    assert_eq!(bench.shared.staging.in_use(), 0);
    let staged = bench.world().orders.remove(0);
    assert!(!bench.shared.staging.start_write(staged.staging), "stale");
}

#[test]
fn a_page_taken_back_while_it_is_written_keeps_the_copy() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.evict_all();
    let write = bench.start_write();
    bench.fault(7, READ);
    assert_eq!(bench.shared.staging.in_use(), 1, "still being written");
    bench.end_write(write);
    assert_eq!(bench.shared.staging.in_use(), 0);
    assert!(!bench.entry(7).dirty && bench.entry(7).slot.is_some());
    bench.evict_all();
    assert_eq!(bench.state(7), State::Stored);
    assert!(bench.world().orders.is_empty(), "not written twice");
}

#[test]
fn a_stored_page_comes_back_from_where_it_was_staged() {
    let mut bench = Bench::new();
    bench.keeps_spares = true;
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(1)));
    assert!(bench.world().fetches.is_empty(), "nothing was asked for");
    let entry = bench.entry(7);
    assert!(!entry.dirty && entry.protected && entry.slot.is_some());
    assert_eq!(bench.shared.stats.faults(FaultKind::Staged), 1);
    // Unchanged, it goes without being written, and is had back from what was read of it then.
    bench.evict_all();
    assert_eq!(bench.state(7), State::Stored);
    bench.fault(7, WRITE);
    assert_eq!(bench.read(7), Some(bytes(1)));
    assert!(bench.world().fetches.is_empty() && bench.world().orders.is_empty());
    assert_eq!(bench.shared.staging.in_use(), 0);
}

#[test]
fn once_its_place_in_staging_is_anothers_a_page_comes_from_its_server() {
    let mut bench = Bench::new();
    bench.keeps_spares = true;
    bench.shared.staging.set_capacity(1);
    bench.store_remotely(7, 1);
    bench.touch(8, 2);
    bench.evict_all();
    bench.fault(7, READ);
    bench.answer(1);
    assert_eq!(bench.read(7), Some(bytes(1)));
}

#[test]
fn a_spoilt_copy_in_staging_is_not_taken() {
    for is_clean in [false, true] {
        let mut bench = Bench::new();
        bench.keeps_spares = true;
        bench.store_remotely(7, 1);
        if is_clean {
            bench.fault(7, READ);
            bench.evict_all();
        }
        for copy in bench.world().staging.values_mut() {
            copy[9] ^= 1;
        }
        bench.fault(7, READ);
        assert_eq!(bench.read(7), None);
        bench.answer(1);
        assert_eq!(bench.read(7), Some(bytes(1)));
        assert_eq!(bench.shared.stats.refused_reads.get(), 1);
        assert_eq!(bench.shared.stats.integrity_failures.get(), 0);
    }
}

/// A bench that keeps compressed pages, and none in staging.
fn compressing() -> Bench {
    let bench = Bench::new();
    let shared = &bench.shared;
    shared.compressed.set_capacity(10, &shared.budget);
    bench
}

#[test]
fn a_stored_page_comes_back_from_where_it_is_compressed() {
    let mut bench = compressing();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(1)));
    assert!(bench.world().fetches.is_empty(), "nothing was asked for");
    let entry = bench.entry(7);
    assert!(!entry.dirty && entry.protected && entry.slot.is_some());
    assert_eq!(bench.shared.stats.faults(FaultKind::Compressed), 1);
    // Unchanged, it goes without being written again.
    bench.evict_all();
    assert_eq!(bench.state(7), State::Stored);
    bench.fault(7, WRITE);
    assert_eq!(bench.read(7), Some(bytes(1)));
    assert!(bench.world().fetches.is_empty() && bench.world().orders.is_empty());
    assert_eq!(bench.shared.compressed.kept_pages(), 2);
    // What it was before it was changed is not what it is.
    bench.store(7, 2);
    bench.evict_all();
    let write = bench.start_write();
    bench.end_write(write);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(2)));
    assert_eq!(bench.shared.stats.faults(FaultKind::Compressed), 3);
}

#[test]
fn what_another_page_left_compressed_is_not_taken() {
    let mut bench = compressing();
    bench.store_remotely(7, 1);
    let shared = &bench.shared;
    let generation = bench.entry(7).generation;
    // As if what lies there had been spoilt: other bytes for the same page and generation.
    shared.compressed.set_capacity(0, &shared.budget);
    shared.compressed.set_capacity(10, &shared.budget);
    let (pool, page) = (&shared.compressed, PageIndex(7));
    pool.offer(page, generation, &bytes(9), &mut None, &shared.budget);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), None);
    bench.answer(1);
    assert_eq!(bench.read(7), Some(bytes(1)));
    assert_eq!(bench.shared.stats.refused_reads.get(), 1);
    assert_eq!(bench.shared.stats.integrity_failures.get(), 0);
}

#[test]
fn pages_that_are_clean_since_they_were_fetched_are_compressed_as_they_go() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.answer(1);
    let shared = Arc::clone(&bench.shared);
    shared.compressed.set_capacity(10, &shared.budget);
    bench.evict_all();
    assert_eq!(bench.state(7), State::Stored);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(1)));
    assert_eq!(shared.stats.faults(FaultKind::Compressed), 1);
}

#[test]
fn a_page_given_back_since_has_no_copy_in_staging() {
    let mut bench = Bench::new();
    bench.keeps_spares = true;
    bench.store_remotely(7, 1);
    bench.punch(7);
    bench.remove(7);
    bench.fault(7, READ);
    let read = bench.read(7).expect("zeros are there");
    assert!(read.iter().all(|byte| *byte == 0));
}

#[test]
fn a_page_changed_since_it_was_taken_back_is_written_again() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.evict_all();
    let write = bench.start_write();
    bench.fault(7, WRITE);
    bench.world().protected.clear();
    bench.store(7, 2);
    bench.end_write(write);
    bench.evict_all();
    assert_eq!(bench.state(7), State::Staged);
    assert_eq!(bench.shared.slots.usage(0).1, 0, "the old copy is freed");
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(2)));
}

#[test]
fn a_write_back_of_an_older_generation_frees_its_slot() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.evict_all();
    let old = bench.start_write();
    bench.fault(7, WRITE);
    bench.world().protected.clear();
    bench.store(7, 2);
    bench.evict_all();
    let new = bench.start_write();
    bench.end_write(old);
    assert_eq!(bench.state(7), State::Staged);
    assert_eq!(bench.shared.slots.usage(0).1, 1);
    bench.end_write(new);
    bench.fault(7, READ);
    bench.answer(2);
    assert_eq!(bench.read(7), Some(bytes(2)));
}

#[test]
fn a_page_given_back_and_zero_again_does_not_take_an_old_copy_for_its_own() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.evict_all();
    let write = bench.start_write();
    bench.remove(7);
    bench.touch(7, 2);
    bench.end_write(write);
    bench.evict_all();
    assert_eq!(bench.state(7), State::Staged);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(2)));
}

#[test]
fn a_write_back_to_a_slab_lost_meanwhile_is_done_again() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.evict_all();
    let write = bench.start_write();
    let lost = bench.lose_slab();
    bench.end_write(write);
    bench.shard.on_groups_lost(&lost);
    assert_eq!(bench.state(7), State::Staged);
    assert_eq!(bench.world().orders.len(), 1);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(1)));
}

#[test]
fn an_abandoned_write_is_ordered_again_unless_it_is_stale() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.evict_all();
    let (staged, slot) = bench.start_write();
    bench.shared.slots.free(slot);
    bench.shard.on_write_abandoned(staged);
    let (staged, slot) = bench.start_write();
    bench.shared.slots.free(slot);
    bench.fault(7, READ);
    bench.shard.on_write_abandoned(staged);
    assert!(bench.world().orders.is_empty());
    assert_eq!(bench.shared.staging.in_use(), 0);
}

#[test]
fn pages_move_out_of_a_slab_that_is_wanted_back() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.vacate();
    bench.shard.pump();
    bench.answer(1);
    assert_eq!(bench.state(7), State::Staged);
    assert_eq!(bench.shared.slots.drain_releasable(), [SLAB]);
    assert_eq!(bench.shared.budget.used(), 0);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(1)));
}

#[test]
fn pages_move_as_far_as_there_is_room_for_them() {
    let mut bench = Bench::new();
    for page in [7, 8, 9] {
        bench.store_remotely(page, 1);
    }
    bench.vacate_without_room();
    assert!(!bench.shared.let_pages_move(0, &|_| true));
    bench.shard.pump();
    assert_eq!(bench.shared.staging.in_use(), 0);
    bench.lease(1, 2);
    assert!(!bench.shared.let_pages_move(0, &|_| false));
    assert!(!bench.shared.let_pages_move(2, &|_| true));
    bench.shard.pump();
    assert_eq!(bench.shard.moves(), 0);
    assert!(bench.shared.let_pages_move(0, &|_| true));
    bench.shared.slots.set_connected(0, false);
    bench.shard.pump();
    assert_eq!(bench.shared.staging.in_use(), 0);
    bench.shared.slots.set_connected(0, true);
    bench.shard.pump();
    assert_eq!(bench.shard.moves(), 2);
    bench.answer(1);
    bench.answer(1);
    // What is staged needs the room that there is.
    assert!(!bench.shared.let_pages_move(0, &|_| true));
    bench.shard.pump();
    assert_eq!((bench.shard.moves(), bench.shared.staging.in_use()), (0, 2));
    for _ in 0..2 {
        let write = bench.start_write();
        bench.end_write(write);
    }
    assert!(!bench.shared.let_pages_move(0, &|_| true));
    bench.lease(2, 1);
    bench.shard.pump();
    bench.answer(1);
    assert_eq!(bench.shared.slots.drain_releasable(), [SLAB]);
}

#[test]
fn pages_come_home_from_a_slab_wanted_back_where_there_is_no_staging() {
    let mut bench = Bench::new();
    for page in 0..20 {
        bench.store_remotely(page, 1);
    }
    bench.shared.staging.set_capacity(0);
    bench.vacate_without_room();
    bench.shard.pump();
    assert_eq!(bench.shard.moves(), 16, "a few at a time");
    for _ in 0..20 {
        bench.answer(1);
        bench.shard.pump();
    }
    assert_eq!(bench.shared.slots.drain_releasable(), [SLAB]);
    assert_eq!((bench.shard.moves(), bench.state(19)), (0, State::Resident));
    assert_eq!(bench.read(19), Some(bytes(1)));
    assert_eq!(bench.shared.budget.used(), 20);
}

#[test]
fn a_page_that_could_not_come_home_comes_once_mappings_are_known_again() {
    let mut bench = Bench::new();
    bench.store_remotely_with_staging(7, 1);
    bench.vacate_without_room();
    bench.shard.pump();
    bench.world().is_unmapped = true;
    bench.answer(1);
    assert_eq!((bench.shard.moves(), bench.state(7)), (0, State::Stored));
    bench.world().is_unmapped = false;
    bench.shard.thaw();
    bench.shard.pump();
    bench.answer(1);
    assert_eq!(bench.state(7), State::Resident);
    assert_eq!(bench.shared.slots.drain_releasable(), [SLAB]);
}

#[test]
fn a_server_out_of_reach_holds_up_no_moves_from_another() {
    let mut shared = Arc::into_inner(shared(100, 32)).expect("nobody else has it");
    shared.slots = SlotPool::new(2);
    let slabs = [0, 1].map(|server| SlabRef { server, ..SLAB });
    for slab in slabs {
        shared.slots.add_slab(slab, 64);
    }
    let mut bench = Bench::of(0, &Arc::new(shared));
    for (page, server) in [(7, 0), (9, 1)] {
        bench.shared.slots.set_connected(server, true);
        bench.store_remotely(page, 1);
        bench.shared.slots.set_connected(server, false);
    }
    let groups = slabs.map(|slab| bench.shared.slots.vacate(slab));
    assert!(groups.iter().all(Option::is_some), "not empty");
    bench.shard.on_vacate();
    bench.shared.slots.set_connected(1, true);
    let next = SlabRef { server: 1, slab: 1 };
    bench.shared.slots.add_slab(next, 64);
    assert!(bench.shared.let_pages_move(0, &|_| true));
    bench.shard.pump();
    bench.answer(1);
    assert_eq!(bench.state(9), State::Staged);
    assert_eq!((bench.shard.moves(), bench.state(7)), (0, State::Stored));
    // It moves when its server is back.
    bench.shard.pump();
    assert!(!bench.shard.has_more_to_vacate());
    bench.shared.slots.set_connected(0, true);
    bench.shard.pump();
    bench.answer(1);
    assert_eq!(bench.state(7), State::Staged);
}

#[test]
fn slabs_that_are_wanted_back_are_emptied_one_after_the_other() {
    let mut shared = Arc::into_inner(shared(100, 32)).expect("nobody else has it");
    shared.slots = SlotPool::new(1);
    shared.slots.set_connected(0, true);
    let mut bench = Bench::of(0, &Arc::new(shared));
    let slabs = [0, 1, 2].map(|slab| SlabRef { slab, ..SLAB });
    // Each has pages from all over the guest.
    for (slab, pages) in slabs.iter().zip([[9, 30], [7, 50], [1, 60]]) {
        bench.shared.slots.add_slab(*slab, 2);
        for page in pages {
            bench.store_remotely(page, 1);
        }
    }
    for slab in slabs {
        assert!(bench.shared.slots.vacate(slab).is_some(), "not empty");
    }
    bench.lease(3, 64);
    bench.shard.search.most = 3;
    bench.shard.on_vacate();
    assert!(bench.shard.has_more_to_vacate(), "an event may not come");
    bench.shard.pump();
    assert_eq!(bench.shard.moves(), 2, "of the first slab alone");
    let mut emptied = Vec::new();
    for _ in 0..6 {
        bench.answer(1);
        emptied.extend(bench.shared.slots.drain_releasable());
        bench.shard.pump();
    }
    assert_eq!(emptied, slabs);
    bench.shard.pump();
    assert!(!bench.shard.has_more_to_vacate());
}

#[test]
fn slots_that_pages_in_memory_keep_are_given_back_though_nothing_may_move() {
    let mut shared = Arc::into_inner(shared(100, 32)).expect("nobody else has it");
    shared.slots = SlotPool::new(1);
    shared.slots.set_connected(0, true);
    shared.slots.set_keep_allowance(8);
    let mut bench = Bench::of(0, &Arc::new(shared));
    let slabs = [0, 1, 2].map(|slab| SlabRef { slab, ..SLAB });
    for (slab, page) in slabs.iter().zip([7, 30, 50]) {
        bench.shared.slots.add_slab(*slab, 1);
        bench.store_remotely(page, page as u8);
    }
    for page in [30, 50] {
        bench.fault(page, READ);
        bench.answer(page as u8);
        assert!(bench.entry(page).slot.is_some(), "kept");
    }
    bench.shard.search.most = 1;
    let mut ask_back = |slabs: &[SlabRef]| {
        for slab in slabs {
            assert!(bench.shared.slots.vacate(*slab).is_some(), "not empty");
        }
        bench.shard.on_vacate();
        while bench.shard.has_more_to_vacate() {
            bench.shard.pump();
        }
        bench.shared.slots.drain_releasable()
    };
    assert_eq!(ask_back(&slabs[..2]), slabs[1..2]);
    // Also where it is asked for while others wait.
    assert_eq!(ask_back(&slabs[2..]), slabs[2..]);
    assert_eq!((bench.shard.moves(), bench.state(7)), (0, State::Stored));
    let kept = [30, 50].map(|page| (bench.state(page), bench.entry(page).slot));
    assert_eq!(kept, [(State::Resident, None); 2]);
}

#[test]
fn what_moves_holds_nothing_while_its_server_is_out_of_reach() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.vacate();
    bench.shard.pump();
    assert_eq!(bench.shard.moves(), 1);
    bench.shared.slots.set_connected(0, false);
    bench.shard.pump();
    assert_eq!(bench.shard.moves(), 0);
    assert_eq!(bench.shared.staging.in_use(), 0);
    assert_eq!(bench.shared.budget.used(), 0);
    bench.shared.slots.set_connected(0, true);
    bench.shard.pump();
    bench.answer(1);
    assert_eq!(bench.state(7), State::Stored, "the answer comes too late");
    bench.answer(1);
    assert_eq!(bench.state(7), State::Staged);
    assert_eq!(bench.shared.slots.drain_releasable(), [SLAB]);
}

#[test]
fn pages_that_do_not_move_after_all_are_looked_at_a_few_at_a_time() {
    const STORED: u32 = 2 * LOOKS + 64;
    let mut bench = Bench::of_many(STORED);
    bench.lose_slab();
    bench.shared.slots.add_slab(SLAB, STORED);
    for page in 0..STORED {
        bench.store_remotely(page, 1);
    }
    bench.vacate_without_room();
    while bench.shard.has_more_to_vacate() {
        bench.shard.pump();
    }
    assert_eq!(bench.shard.to_move.len(), STORED as usize);
    bench.shared.slots.set_connected(0, false);
    for left in [LOOKS + 64, 64] {
        bench.shard.pump();
        assert_eq!(bench.shard.to_move.len(), left as usize);
        assert!(bench.shard.has_more_to_vacate(), "no event comes");
    }
    while bench.shard.has_more_to_vacate() {
        bench.shard.pump();
    }
    assert!(bench.shard.to_move.is_empty());
    // All of them move when the server is back.
    bench.shared.slots.set_connected(0, true);
    bench.lease(1, STORED);
    for _ in 0..STORED {
        bench.shard.pump();
        while !bench.world().fetches.is_empty() {
            bench.answer(1);
        }
        while !bench.world().orders.is_empty() {
            let write = bench.start_write();
            bench.end_write(write);
        }
        bench.shared.let_pages_move(0, &|_| true);
    }
    assert_eq!(bench.shared.slots.drain_releasable(), [SLAB]);
}

#[test]
fn moves_leave_staging_to_what_is_evicted() {
    let mut bench = Bench::of(0, &shared(100, 4));
    bench.store_remotely(7, 1);
    bench.vacate();
    let held = bench.shared.staging.take(3).expect("free");
    bench.shard.pump();
    assert_eq!((bench.shard.moves(), bench.world().alerts), (0, 0));
    bench.shared.staging.release(held[0].slot);
    bench.shard.pump();
    assert_eq!(bench.shard.moves(), 1);
}

/// Loses the slab, and demands that page 7 goes on with a copy that this host has.
fn demand_kept(mut bench: Bench) {
    let lost = bench.lose_slab();
    bench.shard.on_groups_lost(&lost);
    demand_whole(bench);
}

fn demand_whole(mut bench: Bench) {
    assert_eq!(bench.state(7), State::Staged);
    assert_eq!(bench.world().orders.len(), 1);
    bench.fault(7, READ);
    assert_eq!(bench.read(7), Some(bytes(1)));
    assert_eq!(bench.shared.staging.in_use(), 0);
}

#[test]
fn a_page_whose_slab_is_lost_goes_on_with_a_spare() {
    let mut bench = Bench::new();
    bench.keeps_spares = true;
    bench.store_remotely(7, 1);
    demand_kept(bench);
}

#[test]
fn a_page_whose_slab_is_lost_goes_on_compressed() {
    let mut bench = Bench::new();
    let shared = Arc::clone(&bench.shared);
    shared.compressed.set_capacity(10, &shared.budget);
    bench.store_remotely(7, 1);
    demand_kept(bench);
}

#[test]
fn a_clean_page_whose_slab_is_lost_while_it_leaves_goes_on_with_what_was_read() {
    let mut bench = Bench::new();
    bench.keeps_spares = true;
    bench.store_remotely(7, 1);
    bench.shared.staging.drop_spares();
    bench.fault(7, READ);
    bench.answer(1);
    let mut run = bench.hand_out_run();
    bench.advance(&mut run, 4);
    let lost = bench.lose_slab();
    bench.end_run(run);
    bench.shard.on_groups_lost(&lost);
    demand_whole(bench);
}

#[test]
fn a_page_whose_slab_is_lost_goes_on_with_what_came_of_it() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.fault(7, READ);
    bench.world().agains = u32::MAX;
    bench.answer(1);
    let lost = bench.lose_slab();
    bench.shard.on_groups_lost(&lost);
    assert_eq!(bench.state(7), State::Staged);
    bench.world().agains = 0;
    bench.shard.pump();
    assert_eq!(bench.read(7), Some(bytes(1)));
    assert_eq!(bench.shared.budget.used(), 1);
}

#[test]
fn a_slab_that_is_asked_for_again_moves_each_page_once() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.store_remotely(8, 1);
    for _ in 0..3 {
        bench.vacate_without_room();
        bench.shard.pump();
    }
    let to_move = bench.shard.to_move.iter().map(|page| page.0);
    assert_eq!(to_move.collect::<Vec<_>>(), [7, 8]);
}

#[test]
fn a_page_written_into_a_slab_wanted_back_meanwhile_moves_too() {
    let mut bench = Bench::new();
    bench.touch(7, 1);
    bench.evict_all();
    let write = bench.start_write();
    bench.vacate();
    bench.end_write(write);
    assert_eq!(bench.shard.moves(), 1);
    bench.answer(1);
    assert_eq!(bench.shared.slots.drain_releasable(), [SLAB]);
}

#[test]
fn a_fault_on_a_page_that_moves_brings_it_home() {
    let mut bench = Bench::new();
    bench.store_remotely(7, 1);
    bench.vacate();
    bench.shard.pump();
    bench.fault(7, WRITE);
    bench.answer(1);
    assert_eq!(bench.read(7), Some(bytes(1)));
    assert_eq!(bench.shared.staging.in_use(), 0);
    assert_eq!(bench.shard.moves(), 0);
    assert!(!bench.shard.awaits(PageIndex(7)));
}
