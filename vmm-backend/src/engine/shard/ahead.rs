//! Fetching pages ahead of a guest that goes through its memory in order (see
//! [`prefetch`](crate::engine::prefetch)).
//!
//! A page fetched ahead is an ordinary page on its way for which nobody waits yet. What stands in its way
//! ends it: it is fetched when somebody asks for it.

use super::*;

/// Bytes fetched ahead of one stream at most: a quarter of a millisecond of a gigabyte a second, so that
/// the fault behind a window waits for little more than its own page. None where a page is larger.
pub(super) const WINDOW_BYTES: u64 = 256 << 10;

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
        let Some(window) = self.prefetch.note(page, fault.write) else {
            return;
        };
        // Whatever is under way then has the wire and the room for itself.
        if self.ending || self.homing.is_some() || !self.frozen.is_empty() {
            return;
        }
        let Some(part) = self.part_of(page) else {
            return;
        };
        for next in window.pages().take_while(|next| part.contains(*next)) {
            let entry = self.shared.table.load(next);
            if entry.state != State::Stored || self.pending.contains_key(&next) {
                continue;
            }
            if self.shared.budget.spare() == 0 || !self.shared.budget.acquire(1) {
                return;
            }
            let mut pending = Pending::new(None, self.ports.now_us());
            pending.ahead = true;
            pending.expects_store = window.stores;
            self.shared.stats.fetched_ahead.count();
            if !self.start_fetch(next, entry, 0, pending) {
                return;
            }
        }
    }

    /// Nobody has asked for the page yet, and it cannot be put in place now.
    pub(super) fn give_up_ahead(&mut self, page: PageIndex) {
        // It was not moved, for it was on its way.
        if self.shared.table.state(page) == State::Stored {
            self.move_if_vacating(page);
        }
    }
}
