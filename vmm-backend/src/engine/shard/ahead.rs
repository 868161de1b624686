//! Fetching pages that nobody has asked for yet: those that are moved together with one that somebody
//! waits for, and those ahead of a guest that goes through its memory in order (see
//! [`prefetch`](crate::engine::prefetch), which then counts in what is moved together). Those that
//! this host still has a copy of are put in place at once.
//!
//! A page fetched ahead is an ordinary page on its way for which nobody waits yet. What stands in its way
//! ends it: it is fetched when somebody asks for it.

use std::ops::ControlFlow;

use super::*;
use crate::engine::pace::block_of;
use crate::engine::prefetch::{Noted, Window};

impl<P: Ports> Shard<P> {
    /// Asks for a page that somebody waits for, and for those that are likely to be wanted next.
    pub(super) fn fetch_on_demand(&mut self, page: PageIndex, entry: Entry, pending: Pending) {
        if pending.fault.is_none() {
            self.start_fetch(page, entry, 0, pending);
            return;
        }
        // What comes next is thought of while the page is on its way, unless it is to come by the same request.
        if !self.prefetch.fetches_neighbours() {
            if self.start_fetch(page, entry, 0, pending) {
                self.fetch_ahead(page);
            }
            return;
        }
        let (noted, granule) = (self.note_fault(page), self.shared.pace.granule());
        let neighbour = noted.next.filter(|_| noted.is_pair && granule == 1);
        let neighbour = neighbour.and_then(|window| window.pages().next());
        let neighbour = neighbour.filter(|next| self.would_fetch(page, *next));
        let is_on_its_way = self.start_fetch_of(page, entry, 0, pending, neighbour.is_some());
        if let Some(next) = neighbour {
            if is_on_its_way {
                // Where it cannot come after all, the page comes alone.
                let _ = self.fetch_unasked(next, true);
            }
            // All else that comes along has a request of its own: nobody waits for that.
            self.ports.send_waited_for();
        }
        if is_on_its_way {
            self.follow(page, granule, noted);
        }
    }

    pub(super) fn fetch_ahead(&mut self, page: PageIndex) {
        let noted = self.note_fault(page);
        self.follow(page, self.shared.pace.granule(), noted);
    }

    fn note_fault(&mut self, page: PageIndex) -> Noted {
        let granule = self.shared.pace.granule();
        let window = self.shared.pace.window(self.shared.page_size);
        self.prefetch.follow(window, granule);
        self.prefetch.note(page)
    }

    /// Asks for what comes behind a page that the guest has begun to wait for while it was on its way.
    pub(super) fn catch_up(&mut self, page: PageIndex) {
        if let Some(noted) = self.prefetch.note_caught_up(page) {
            self.follow(page, self.shared.pace.granule(), noted);
        }
    }

    /// Asks for what is moved together with a page, and for what is expected behind it.
    fn follow(&mut self, page: PageIndex, granule: u32, noted: Noted) {
        for used in noted.passed.into_iter().flat_map(Window::pages) {
            self.guesses.note_used(used, &self.shared.stats);
        }
        if !self.may_fetch_ahead() {
            return;
        }
        let Some(part) = self.part_of(page) else {
            return;
        };
        let is_there = |next: &PageIndex| part.contains(*next);
        let block = block_of(page, granule).pages().filter(is_there);
        if self.fetch_all_unasked(block, false).is_break() {
            return;
        }
        if noted.is_single && granule == 1 && !self.shared.page_size.is_huge() {
            // Before the page itself is here: what left with it is not known after that.
            let together = self.policy.left_with(page);
            self.prefetch.note_together(page, together.behind(page));
            let together = together.pages().filter(is_there);
            if self.fetch_all_unasked(together, false).is_break() {
                return;
            }
        }
        let behind = noted.next.into_iter().flat_map(Window::pages);
        // Where there is no room, there is nothing else to do here.
        let _ = self.fetch_all_unasked(behind.take_while(is_there), true);
    }

    /// Whatever is under way else has the wire and the room for itself.
    fn may_fetch_ahead(&self) -> bool {
        !self.ending && self.homing.is_none() && self.frozen.is_empty()
    }

    /// Whether a page's neighbour is likely to be fetched with it. This host may have a copy yet, or another shard
    /// take the room for it.
    fn would_fetch(&self, page: PageIndex, next: PageIndex) -> bool {
        self.may_fetch_ahead()
            && self.part_of(page).is_some_and(|part| part.contains(next))
            && self.shared.table.state(next) == State::Stored
            && !self.pending.contains_key(&next)
            && self.shared.budget.spare() > 0
    }

    /// Asks for pages that nobody waits for, as long as there is room for more.
    fn fetch_all_unasked(
        &mut self,
        mut pages: impl Iterator<Item = PageIndex>,
        is_guess: bool,
    ) -> ControlFlow<()> {
        pages.try_for_each(|page| self.fetch_unasked(page, is_guess))
    }

    /// Asks for a page that nobody waits for; breaks where there is no room, or no server, for more.
    fn fetch_unasked(&mut self, page: PageIndex, is_guess: bool) -> ControlFlow<()> {
        let entry = self.shared.table.load(page);
        if entry.state != State::Stored || self.pending.contains_key(&page) {
            return ControlFlow::Continue(());
        }
        if self.shared.budget.spare() == 0 || !self.shared.budget.acquire(1) {
            return ControlFlow::Break(());
        }
        let mut pending = Pending::new(None, self.ports.now_us());
        pending.ahead = true;
        if let Some(kind) = self.find_spare(page, &entry) {
            self.install_spare(page, entry, kind, pending);
            return ControlFlow::Continue(());
        }
        // Room would be held for it until its server is back.
        if !self.is_near(page) {
            self.shared.budget.cancel(1);
            return ControlFlow::Break(());
        }
        self.shared.stats.fetched_ahead.count();
        if is_guess {
            self.guesses.open(page);
        }
        match self.start_fetch(page, entry, 0, pending) {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    }

    /// Nobody has asked for the page yet, and it cannot be put in place now.
    pub(super) fn give_up_ahead(&mut self, page: PageIndex) {
        self.guesses.drop(page);
        // It was not moved, for it was on its way.
        if self.shared.table.state(page) == State::Stored {
            self.move_if_vacating(page);
        }
    }
}
