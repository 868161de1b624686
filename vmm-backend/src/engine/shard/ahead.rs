//! Fetching pages that nobody has asked for yet: those that are moved together with one that somebody
//! waits for, and those ahead of a guest that goes through its memory in order (see
//! [`prefetch`](crate::engine::prefetch), which then counts in what is moved together).
//!
//! A page fetched ahead is an ordinary page on its way for which nobody waits yet. What stands in its way
//! ends it: it is fetched when somebody asks for it.

use super::*;
use crate::engine::PageSize;
use crate::engine::granule::block_of;
use crate::engine::prefetch::Window;

/// Bytes fetched ahead of one stream at most: a quarter of a millisecond of a gigabyte a second, so that
/// the fault behind a window waits for little more than its own page. None where a page is larger.
const WINDOW_BYTES: u64 = 256 << 10;

/// Steps of `granule` pages that are fetched ahead of one stream at most.
pub(super) fn window_steps(size: PageSize, granule: u32) -> u32 {
    size.pages_in(WINDOW_BYTES, 0) as u32 / granule
}

impl<P: Ports> Shard<P> {
    /// Asks for a page that somebody waits for, and for those that are likely to be wanted next.
    pub(super) fn fetch_on_demand(&mut self, page: PageIndex, entry: Entry, pending: Pending) {
        let fault = pending.fault;
        let reachable = self.start_fetch(page, entry, 0, pending);
        if let Some(fault) = fault
            && reachable
        {
            self.fetch_ahead(page, fault);
        }
    }

    fn fetch_ahead(&mut self, page: PageIndex, fault: Fault) {
        self.follow_granule();
        let granule = self.granule;
        let window = self.prefetch.note(self.step_of(page), fault.write);
        // Whatever is under way then has the wire and the room for itself.
        if self.ending || self.homing.is_some() || !self.frozen.is_empty() {
            return;
        }
        let Some(part) = self.part_of(page) else {
            return;
        };
        let stores = window.map_or(fault.write, |window| window.stores);
        let block = block_of(page, granule).pages();
        let steps = window.into_iter().flat_map(Window::steps);
        let blocks = steps.map_while(|step| step.checked_mul(granule));
        let behind = blocks.flat_map(|first| block_of(PageIndex(first), granule).pages());
        let behind = behind.take_while(|next| part.contains(*next));
        for next in block.filter(|next| part.contains(*next)).chain(behind) {
            if !self.fetch_unasked(next, stores) {
                return;
            }
        }
    }

    /// Asks for a page that nobody waits for; whether there is room, and a server, for more.
    fn fetch_unasked(&mut self, page: PageIndex, expects_store: bool) -> bool {
        let entry = self.shared.table.load(page);
        if entry.state != State::Stored || self.pending.contains_key(&page) {
            return true;
        }
        if self.shared.budget.spare() == 0 || !self.shared.budget.acquire(1) {
            return false;
        }
        let mut pending = Pending::new(None, self.ports.now_us());
        pending.ahead = true;
        pending.expects_store = expects_store;
        self.shared.stats.fetched_ahead.count();
        self.start_fetch(page, entry, 0, pending)
    }

    /// Where the guest goes is followed in steps of what is moved together: anew where that has changed.
    fn follow_granule(&mut self) {
        let granule = self.shared.granule.pages();
        if granule != self.granule {
            self.granule = granule;
            self.prefetch = Prefetch::new(window_steps(self.shared.page_size, granule));
        }
    }

    /// Notes a store to a page that was there, write-protected.
    pub(super) fn note_store(&mut self, page: PageIndex) {
        self.prefetch.note_store(self.step_of(page));
    }

    fn step_of(&self, page: PageIndex) -> u32 {
        page.0 / self.granule
    }

    /// Nobody has asked for the page yet, and it cannot be put in place now.
    pub(super) fn give_up_ahead(&mut self, page: PageIndex) {
        // It was not moved, for it was on its way.
        if self.shared.table.state(page) == State::Stored {
            self.move_if_vacating(page);
        }
    }
}
