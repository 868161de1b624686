//! Pins: pages that our own device reads or writes are brought in, and stay until it is done.

use super::*;

/// A request whose pages are not all there yet.
#[derive(Debug)]
pub(super) struct PinRequest {
    write: bool,
    pinned: Vec<PageIndex>,
    missing: u32,
}

impl<P: Ports> Shard<P> {
    /// Brings pages in and keeps them; answered through the ports once all are there. The caller
    /// bounds how many pages are pinned at once, well below the limit.
    pub fn on_pin(&mut self, id: PinId, runs: &[PageRun], write: bool) {
        let missing = runs.iter().map(|run| run.count).sum();
        if self.ending {
            return self.ports.answer_pin(id, Err(PinRefused::Ending));
        }
        if missing == 0 {
            return self.ports.answer_pin(id, Ok(()));
        }
        for page in runs.iter().flat_map(|run| run.pages()) {
            assert!(
                self.range.contains(page),
                "a pin on page {page} of another shard"
            );
            if !self.is_plugged(page) {
                return self.ports.answer_pin(id, Err(PinRefused::Unplugged));
            }
        }
        self.pin_requests.insert(
            id,
            PinRequest {
                write,
                pinned: Vec::new(),
                missing,
            },
        );
        for page in runs.iter().flat_map(|run| run.pages()) {
            if let Some(pending) = self.pending.get_mut(&page)
                && pending.wait != Wait::Lost
            {
                pending.pins.push(id);
                continue;
            }
            // Of a lost page the guest may have waited for long.
            let now_us = self.ports.now_us();
            let mut pending = match self.pending.remove(&page) {
                Some(lost) if lost.fault.is_some() => lost,
                _ => Pending::new(None, now_us),
            };
            pending.pins.push(id);
            self.resolve(page, pending);
        }
    }

    /// Ends a pin: the pages may go again.
    pub fn on_unpin(&mut self, runs: &[PageRun]) {
        for page in runs.iter().flat_map(|run| run.pages()) {
            self.unpin(page);
        }
    }

    /// Ends a pin that nobody waits for any more; nothing where it was answered.
    pub fn cancel_pin(&mut self, id: PinId) {
        self.refuse_pin(id, PinRefused::Ending);
    }

    pub(super) fn is_pinned(&self, page: PageIndex) -> bool {
        self.pins.contains_key(&page)
    }

    fn unpin(&mut self, page: PageIndex) {
        let Some(count) = self.pins.get_mut(&page) else {
            panic!("page {page} unpinned more often than pinned");
        };
        *count -= 1;
        if *count == 0 {
            self.pins.remove(&page);
        }
    }

    /// The page is resident: pins it for all requests that wait for it.
    pub(super) fn complete_pins(&mut self, page: PageIndex, pending: &Pending) {
        for id in &pending.pins {
            // A request refused meanwhile pins nothing.
            let Some(request) = self.pin_requests.get_mut(id) else {
                continue;
            };
            request.pinned.push(page);
            request.missing -= 1;
            let (write, is_last) = (request.write, request.missing == 0);
            *self.pins.entry(page).or_insert(0) += 1;
            if write {
                // The device's stores pass by the VMM's write protection: the page counts as
                // changed before the first of them.
                let entry = self.shared.table.load(page);
                self.keep_as_dirty(page, entry);
            }
            if is_last {
                self.pin_requests.remove(id);
                self.ports.answer_pin(*id, Ok(()));
            }
        }
    }

    pub(super) fn refuse_pins_of(&mut self, pending: &Pending, why: PinRefused) {
        for id in &pending.pins {
            self.refuse_pin(*id, why);
        }
    }

    pub(super) fn refuse_all_pins(&mut self) {
        let ids: Vec<_> = self.pin_requests.keys().copied().collect();
        for id in ids {
            self.refuse_pin(id, PinRefused::Ending);
        }
    }

    fn refuse_pin(&mut self, id: PinId, why: PinRefused) {
        let Some(request) = self.pin_requests.remove(&id) else {
            return;
        };
        for page in request.pinned {
            self.unpin(page);
        }
        self.ports.answer_pin(id, Err(why));
    }
}
