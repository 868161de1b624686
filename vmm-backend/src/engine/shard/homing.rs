//! Bringing everything home: before a live detach, every page that lies elsewhere comes back into
//! the guest's memory, a few at a time, behind everything that the guest waits for.
//!
//! The limit has to be out of the way meanwhile (the caller lifts it): nothing is evicted then, so
//! that what is home stays home, and a pass over the shard that finds every page home is the last.
//! A page that comes home is an ordinary resident page: coming home can be called off at any time.
//! Huge pages are not brought home: those of a host's pool that are missing are given up by other
//! pages of the guest.

use super::*;

/// Pages on their way at once: enough to keep the wire busy, few in front of the guest's own reads.
const HOMING_MOST: usize = 32;

/// Entries looked at in one go: some 100 µs, so that no fault waits long.
const SCAN_MOST: u32 = 16_384;

/// How far a shard's pages have come.
#[derive(Debug)]
pub(super) struct Homing {
    /// Next page to be looked at.
    next: PageIndex,
    /// Whether every page of this pass was home when it was looked at, and none was evicted since.
    pub(super) clean: bool,
    /// Pages asked for that may still be on their way.
    under_way: Vec<PageIndex>,
}

impl<P: Ports> Shard<P> {
    /// Begins to bring every page home.
    pub fn start_homing(&mut self) {
        if self.homing.is_none() {
            self.homing = Some(Homing {
                next: self.range.first,
                clean: true,
                under_way: Vec::new(),
            });
        }
    }

    /// Calls it off: what is home stays until it is evicted, what is on its way arrives.
    pub fn stop_homing(&mut self) {
        self.homing = None;
    }

    /// Whether all pages are home: each of them is in the guest's memory, or was never touched.
    /// Lost pages cannot come home.
    pub fn is_home(&self) -> bool {
        self.homing
            .as_ref()
            .is_some_and(|homing| homing.clean && self.plugged_from(homing.next).is_none())
            && self.runs_out.is_empty()
    }

    /// Whether the guest's memory needs this shard no longer: all pages are home, and no request of
    /// the device waits for one.
    pub fn may_be_released(&self) -> bool {
        self.is_home() && self.pin_requests.is_empty()
    }

    /// Whether [`Shard::pump`] has more to look at, though no event may come.
    pub fn has_more_to_bring(&self) -> bool {
        self.homing.as_ref().is_some_and(|homing| {
            let at_end = self.plugged_from(homing.next).is_none();
            match homing.under_way.len() {
                0 => !at_end || !homing.clean,
                under_way => !at_end && under_way < HOMING_MOST,
            }
        })
    }

    /// Looks at some more pages, and asks for those that lie elsewhere.
    pub(super) fn bring_home(&mut self) {
        let Some(mut homing) = self.homing.take() else {
            return;
        };
        homing
            .under_way
            .retain(|page| self.lies_elsewhere(*page) && self.pending.contains_key(page));
        let at_end = self.plugged_from(homing.next).is_none();
        if at_end && !homing.clean && homing.under_way.is_empty() {
            homing.next = self.range.first;
            homing.clean = true;
        }
        for _ in 0..SCAN_MOST {
            if homing.under_way.len() >= HOMING_MOST {
                break;
            }
            // What was never touched is home.
            let Some(page) = self.touched_from(homing.next) else {
                homing.next = self.range.end();
                break;
            };
            homing.next = PageIndex(page.0 + 1);
            if !self.lies_elsewhere(page) {
                continue;
            }
            homing.clean = false;
            if self.bring_page_home(page) {
                homing.under_way.push(page);
            }
        }
        self.homing = Some(homing);
    }

    fn lies_elsewhere(&self, page: PageIndex) -> bool {
        match self.shared.table.state(page) {
            State::Absent | State::Resident | State::Lost => false,
            State::Busy | State::Filled | State::Staged | State::Stored => true,
        }
    }

    /// Asks for a page. False where it is home already, or on its way for somebody else.
    fn bring_page_home(&mut self, page: PageIndex) -> bool {
        if self.pending.contains_key(&page) {
            return true;
        }
        let entry = self.shared.table.load(page);
        if entry.state == State::Filled && entry.fill_word() == 0 {
            // Reads as zero where it is never touched, too, and costs nothing then.
            self.set(page, entry.into_absent());
            return false;
        }
        let pending = Pending::new(None, self.ports.now_us());
        self.resolve(page, pending);
        self.lies_elsewhere(page)
    }
}
