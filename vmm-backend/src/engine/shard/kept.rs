//! Slots on servers that pages keep while they are in memory, so that they need not be written again if
//! they leave unchanged. Where other pages need those slots, they are given back: their pages count as
//! changed then.

use super::*;

/// Pages looked at in one go: some tens of microseconds.
const LOOKS: u32 = 4096;

/// Which pages keep their slot: those whose entry says so.
#[derive(Debug)]
pub(super) struct KeptSlots {
    /// How many.
    pub(super) count: u64,
    /// Where the next is looked for.
    next: PageIndex,
}

impl KeptSlots {
    /// None yet, in a range that begins there.
    pub(super) fn new(first: PageIndex) -> Self {
        Self {
            count: 0,
            next: first,
        }
    }
}

impl<P: Ports> Shard<P> {
    /// Whether it has slots that others need, and should look for them soon.
    pub fn has_slots_to_give_back(&self) -> bool {
        self.kept.count > 0 && self.shared.slots.wants_back()
    }

    /// Gives slots back that others need, as far as some are found soon.
    pub(super) fn give_slots_back(&mut self) {
        for _ in 0..LOOKS {
            if !self.has_slots_to_give_back() {
                return;
            }
            let Some(page) = self.touched_from(self.kept.next) else {
                self.kept.next = self.range.first;
                continue;
            };
            self.kept.next = PageIndex(page.0 + 1);
            let entry = self.shared.table.load(page);
            let is_kept = entry.state == State::Resident && entry.slot.is_some();
            if is_kept && self.shared.slots.claim_wanted_back() {
                self.keep_as_dirty(page, entry);
            }
        }
    }
}
