//! Host memory that a guest's resident pages cost, against its limit.
//!
//! A page is counted from before it is put into the memfd until after it is punched out, so that
//! the kernel's own count never exceeds this one. Staging is preallocated and not counted here:
//! its size is taken off the limit beforehand.

use std::sync::atomic::{AtomicU64, Ordering};

/// Pages counted against the limit; shared by all shards without a lock.
#[derive(Debug)]
pub struct Budget {
    limit: AtomicU64,
    used: AtomicU64,
    evicting: AtomicU64,
    waiting: AtomicU64,
}

/// Pages kept free ahead of need: large enough that faults in a burst find room, small beside the
/// limit. A sixteenth, at least two runs, at most 32 MiB.
fn reserve_of(limit: u64) -> u64 {
    (limit / 16).clamp(128.min(limit / 2), 8192)
}

impl Budget {
    /// A budget of `limit` pages.
    pub fn new(limit: u64) -> Self {
        Self {
            limit: AtomicU64::new(limit),
            used: AtomicU64::new(0),
            evicting: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
        }
    }

    /// Changes the limit. Shards evict down to it on their own.
    pub fn set_limit(&self, pages: u64) {
        self.limit.store(pages, Ordering::Relaxed);
    }

    /// The limit in pages.
    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Pages counted now.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::SeqCst)
    }

    /// Whether faults wait though there is room. Either the shard that gives room back sees who
    /// waits, or the one that starts to wait sees the room: hence the total order of both counts.
    pub fn is_room_waited_for(&self) -> bool {
        self.used() < self.limit() && self.waiting() > 0
    }

    /// Counts `pages` more if they fit under the limit.
    pub fn acquire(&self, pages: u64) -> bool {
        let limit = self.limit();
        self.used
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |used| {
                used.checked_add(pages).filter(|used| *used <= limit)
            })
            .is_ok()
    }

    /// Counts pages that are there whether they fit or not (found populated at the start).
    pub fn force(&self, pages: u64) {
        self.used.fetch_add(pages, Ordering::AcqRel);
    }

    /// Takes back what was counted.
    pub fn release(&self, pages: u64) {
        let before = self.used.fetch_sub(pages, Ordering::SeqCst);
        assert!(before >= pages, "more pages released than were counted");
    }

    /// Room that faults may take without eating into the reserve.
    pub fn spare(&self) -> u64 {
        let limit = self.limit();
        (limit - reserve_of(limit)).saturating_sub(self.used())
    }

    /// Pages that have to be chosen for eviction now: down to the low watermark once the high one
    /// (half the reserve) is passed; more where faults wait for room.
    pub fn shortage(&self) -> u64 {
        let limit = self.limit();
        let staying = self
            .used()
            .saturating_sub(self.evicting.load(Ordering::Relaxed));
        let waiting = self.waiting.load(Ordering::Relaxed);
        let reserve = reserve_of(limit);
        if staying + waiting > limit - reserve / 2 {
            (staying + waiting).saturating_sub(limit - reserve)
        } else {
            0
        }
    }

    /// Whether eviction should run.
    pub fn is_pressed(&self) -> bool {
        self.shortage() > 0
    }

    /// Notes pages chosen for eviction.
    pub fn start_evicting(&self, pages: u64) {
        self.evicting.fetch_add(pages, Ordering::AcqRel);
    }

    /// Notes that a run of `pages` ended.
    pub fn end_evicting(&self, pages: u64) {
        self.evicting.fetch_sub(pages, Ordering::AcqRel);
    }

    /// Notes a fault that waits for room.
    pub fn start_waiting(&self) {
        self.waiting.fetch_add(1, Ordering::SeqCst);
    }

    /// Notes that it no longer waits.
    pub fn end_waiting(&self) {
        self.waiting.fetch_sub(1, Ordering::AcqRel);
    }

    /// Faults that wait for room, in all shards.
    pub fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_never_passed_by_acquiring() {
        let budget = Budget::new(10);
        assert!(budget.acquire(10));
        assert!(!budget.acquire(1));
        budget.release(1);
        assert!(budget.acquire(1));
        budget.set_limit(5);
        assert!(!budget.acquire(0) || budget.used() == 10);
    }

    #[test]
    fn eviction_starts_at_the_high_and_ends_at_the_low_watermark() {
        let budget = Budget::new(3200);
        budget.force(3100);
        assert_eq!(budget.shortage(), 0);
        budget.force(1);
        assert_eq!(budget.shortage(), 101);
        budget.start_evicting(101);
        assert_eq!(budget.shortage(), 0);
    }

    #[test]
    fn a_lowered_limit_makes_a_shortage_at_once() {
        let budget = Budget::new(1000);
        budget.force(900);
        budget.set_limit(320);
        assert_eq!(budget.shortage(), 900 - (320 - 128));
    }
}
