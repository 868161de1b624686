//! What the table of a process that died means, page by page.
//!
//! The guest's memory decides: a page that it has is resident and counts as changed, whatever the
//! table says. Of the others the table's word is taken as far as what it relies on is there: bytes
//! in staging have to match their tag, a slot has to lie in a slab that is known and be no other
//! page's. What is in doubt is lost.
//!
//! Recovery may die as well, at any step: a table that was recovered in part is recovered again to
//! the same. Before it ends nothing else may use the table, the pools, or what they stand for.

use super::table::{Entry, State};
use super::{PageIndex, Shared, StagingSlot};

/// Where staged bytes are read.
pub trait StagedBytes {
    /// The bytes of a staging slot; `None` where there is no such slot.
    fn staged(&self, slot: StagingSlot) -> Option<&[u8]>;
}

/// Recovers a page's entry, and claims the slot that it holds on a server. `is_present` says whether
/// the guest's memory has the page.
pub fn recover_page(
    shared: &Shared,
    page: PageIndex,
    is_present: bool,
    bytes: &impl StagedBytes,
) -> Entry {
    let before = shared.table.load(page);
    let after = match is_present {
        true => before.into_dirty_resident(),
        false => without_memory(shared, page, before, bytes),
    };
    if after != before {
        shared.table.store(page, &after);
    }
    after
}

/// What a page is that the guest's memory does not have.
fn without_memory(
    shared: &Shared,
    page: PageIndex,
    before: Entry,
    bytes: &impl StagedBytes,
) -> Entry {
    let state = match before.state {
        // What was not decided was not punched by us.
        State::Busy => before.becomes.unwrap_or(State::Absent),
        // Given back by the guest.
        State::Resident => State::Absent,
        state => state,
    };
    let bare = Entry {
        state,
        becomes: None,
        protected: false,
        slot: None,
        staging: None,
        ..before
    };
    let lost = Entry {
        state: State::Lost,
        ..bare
    };
    match state {
        State::Staged => match before.staging {
            Some(slot) if is_good(shared, page, &before, bytes.staged(slot)) => Entry {
                dirty: true,
                staging: Some(slot),
                ..bare
            },
            _ => lost,
        },
        State::Stored => match before.slot {
            Some(slot) if shared.slots.claim(slot) => Entry {
                dirty: false,
                slot: Some(slot),
                ..bare
            },
            _ => lost,
        },
        State::Filled => Entry {
            dirty: false,
            ..bare
        },
        State::Absent if before.is_unhealed() => before.into_unhealed(),
        State::Absent | State::Resident | State::Busy => before.into_absent(),
        State::Lost => lost,
    }
}

/// Whether the bytes are the page's: sealed, or as they are, as an earlier build left them.
fn is_good(shared: &Shared, page: PageIndex, entry: &Entry, bytes: Option<&[u8]>) -> bool {
    let (key, generation, tag) = (&shared.key, entry.generation, entry.tag);
    bytes.is_some_and(|bytes| {
        let sealed = key.open(page, generation, tag, &mut bytes.to_vec());
        sealed.is_ok() || key.seals() && key.tag(page, generation, bytes, &mut Vec::new()) == tag
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use outram_wire::lost_pages::LostPages;
    use outram_wire::seal::Seal;

    use super::*;
    use crate::engine::ages::Ages;
    use crate::engine::budget::Budget;
    use crate::engine::compressed::CompressedPool;
    use crate::engine::pace::Pace;
    use crate::engine::seal::PageKey;
    use crate::engine::slots::{GroupPlace, SlabRef, SlotPool};
    use crate::engine::staging::StagingPool;
    use crate::engine::stats::Stats;
    use crate::engine::table::PageTable;
    use crate::engine::{Generation, PageSize, SlotId};

    const PAGE: PageIndex = PageIndex(5);
    const SLOT: SlotId = SlotId { group: 2, index: 7 };
    const STAGED: StagingSlot = StagingSlot(3);
    const GENERATION: Generation = Generation(9);

    struct Staging(HashMap<u32, Vec<u8>>);

    impl StagedBytes for Staging {
        fn staged(&self, slot: StagingSlot) -> Option<&[u8]> {
            self.0.get(&slot.0).map(Vec::as_slice)
        }
    }

    /// What a process left: one group, and bytes in one staging slot.
    fn left() -> (Shared, Staging) {
        let slots = SlotPool::new(1);
        let place = GroupPlace {
            number: SLOT.group,
            slab: SlabRef { server: 0, slab: 4 },
            slots: 8,
        };
        slots.restore(&[place], 3);
        let shared = Shared {
            page_size: PageSize::BASE,
            table: PageTable::in_memory(8),
            budget: Budget::new(8, PageSize::BASE),
            staging: StagingPool::new(0),
            compressed: CompressedPool::default(),
            slots,
            pace: Pace::default(),
            ages: Ages::default(),
            key: PageKey::new(&[3; 32], Seal::On),
            lost_pages: LostPages::Stop,
            stats: Stats::new(),
        };
        let mut bytes = plain();
        shared.key.seal(PAGE, GENERATION, &mut bytes);
        (shared, Staging(HashMap::from([(STAGED.0, bytes)])))
    }

    /// What is staged, before it was sealed.
    fn plain() -> Vec<u8> {
        (0..4096).map(|place| (place % 251) as u8).collect()
    }

    /// An entry with everything in it, and the tag of what is staged.
    fn entry(shared: &Shared, state: State, becomes: Option<State>) -> Entry {
        Entry {
            state,
            becomes,
            dirty: false,
            protected: true,
            slot: Some(SLOT),
            staging: Some(STAGED),
            generation: GENERATION,
            tag: shared.key.seal(PAGE, GENERATION, &mut plain()),
        }
    }

    fn recovered(state: State, becomes: Option<State>, is_present: bool) -> Entry {
        let (shared, staging) = left();
        let before = entry(&shared, state, becomes);
        shared.table.store(PAGE, &before);
        let after = recover_page(&shared, PAGE, is_present, &staging);
        assert_eq!(shared.table.load(PAGE), after);
        assert_eq!(after.generation, GENERATION, "it never goes back");
        assert!(!after.protected);
        // Once more, by a process that knows nothing of the first.
        let (again, _) = left();
        again.table.store(PAGE, &after);
        assert_eq!(recover_page(&again, PAGE, is_present, &staging), after);
        after
    }

    #[test]
    fn what_was_lost_and_given_back_is_healed_yet() {
        let (shared, staging) = left();
        let before = entry(&shared, State::Lost, None).into_unhealed();
        shared.table.store(PAGE, &before);
        let after = recover_page(&shared, PAGE, false, &staging);
        assert!(after.is_unhealed());
        let present = recover_page(&shared, PAGE, true, &staging);
        assert_eq!(present, before.into_dirty_resident());
    }

    #[test]
    fn what_the_guests_memory_has_is_resident_and_changed() {
        for state in [
            State::Absent,
            State::Resident,
            State::Busy,
            State::Staged,
            State::Stored,
            State::Filled,
            State::Lost,
        ] {
            let after = recovered(state, None, true);
            assert_eq!((after.state, after.dirty), (State::Resident, true));
            assert_eq!((after.slot, after.staging), (None, None));
        }
    }

    #[test]
    fn a_hole_is_what_its_entry_says_and_holds_that_alone() {
        let holds = |after: Entry| (after.state, after.slot, after.staging);
        for (state, becomes) in [(State::Staged, None), (State::Busy, Some(State::Staged))] {
            let after = recovered(state, becomes, false);
            assert_eq!(holds(after), (State::Staged, None, Some(STAGED)));
        }
        for (state, becomes) in [(State::Stored, None), (State::Busy, Some(State::Stored))] {
            let after = recovered(state, becomes, false);
            assert_eq!(holds(after), (State::Stored, Some(SLOT), None));
        }
        for (state, becomes) in [(State::Filled, None), (State::Busy, Some(State::Filled))] {
            let after = recovered(state, becomes, false);
            assert_eq!(holds(after), (State::Filled, None, None));
        }
    }

    #[test]
    fn what_an_earlier_build_left_unsealed_in_staging_is_taken_over_as_well() {
        let (shared, mut staging) = left();
        let before = entry(&shared, State::Staged, None);
        staging.0.insert(STAGED.0, plain());
        shared.table.store(PAGE, &before);
        let after = recover_page(&shared, PAGE, false, &staging);
        assert_eq!((after.state, after.staging), (State::Staged, Some(STAGED)));
    }

    #[test]
    fn a_hole_that_was_not_punched_by_us_was_given_back() {
        for state in [State::Resident, State::Busy, State::Absent] {
            let after = recovered(state, None, false);
            assert_eq!(
                (after.state, after.slot, after.staging),
                (State::Absent, None, None)
            );
        }
    }

    #[test]
    fn what_is_in_doubt_is_lost() {
        let lost = |change: &dyn Fn(&Shared, &mut Staging, &mut Entry), state| {
            let (shared, mut staging) = left();
            let mut before = entry(&shared, state, None);
            change(&shared, &mut staging, &mut before);
            shared.table.store(PAGE, &before);
            let after = recover_page(&shared, PAGE, false, &staging);
            assert_eq!((after.slot, after.staging), (None, None));
            after.state == State::Lost
        };
        assert!(lost(&|_, _, _| {}, State::Lost));
        // Another page's bytes by now.
        let spoil = |_: &Shared, staging: &mut Staging, _: &mut Entry| {
            staging.0.get_mut(&STAGED.0).expect("there")[0] ^= 1;
        };
        assert!(lost(&spoil, State::Staged));
        assert!(lost(&|_, staging, _| staging.0.clear(), State::Staged));
        assert!(lost(&|_, _, entry| entry.staging = None, State::Staged));
        // Another page's slot, one of no slab, and one beyond its slab.
        let taken = |shared: &Shared, _: &mut Staging, _: &mut Entry| {
            assert!(shared.slots.claim(SLOT));
        };
        assert!(lost(&taken, State::Stored));
        let elsewhere = |group, index| {
            move |_: &Shared, _: &mut Staging, entry: &mut Entry| {
                entry.slot = Some(SlotId { group, index });
            }
        };
        assert!(lost(&elsewhere(1, 0), State::Stored));
        assert!(lost(&elsewhere(2, 8), State::Stored));
        assert!(lost(&|_, _, entry| entry.slot = None, State::Stored));
    }
}
