//! Waiting for a page of the host's pool of huge pages, which other guests draw from as well: this
//! guest gives up one of its own for each that it waits for, and looks again and again.

use super::*;

impl<P: Ports> Shard<P> {
    /// Whether somebody waits for a page that only the host can give.
    pub fn waits_for_pool(&self) -> bool {
        !self.waiting_for_pool.is_empty()
    }

    pub(super) fn wait_for_pool(&mut self, page: PageIndex, pending: Pending) {
        // No page of the guest's is given up for one that nobody waits for.
        if pending.is_unasked() {
            return self.give_up_ahead(page);
        }
        self.shared.stats.stalls_pool.count();
        self.shared.budget.start_waiting_for_pool();
        self.waiting_for_pool.push(page);
        self.wait_for(page, Wait::Pool, pending);
    }

    pub(super) fn leave_pool_queue(&mut self, page: PageIndex) {
        self.waiting_for_pool.retain(|waiting| *waiting != page);
        self.shared.budget.end_waiting_for_pool();
    }

    /// Tries again all that waits for the pool.
    pub(super) fn look_into_pool(&mut self) {
        for page in std::mem::take(&mut self.waiting_for_pool) {
            self.shared.budget.end_waiting_for_pool();
            if let Some(pending) = self.pending.remove(&page) {
                self.resolve(page, pending);
            }
        }
    }
}
