//! Host memory that a guest's resident pages cost, against its limit.
//!
//! A page is counted from before it is put into the memfd until after it is punched out, so that
//! the kernel's own count never exceeds this one. Staging is preallocated and not counted here:
//! its size is taken off the limit beforehand.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};

use super::PageSize;

/// Pages counted against the limit; shared by all shards without a lock.
#[derive(Debug)]
pub struct Budget {
    /// Pages kept free ahead of need, at least and at most.
    reserve: RangeInclusive<u64>,
    /// Of how many pages of the limit one of them is, in between.
    of_pages: u64,
    limit: AtomicU64,
    /// In half pages: up to where faults find room while more is used than the limit. It falls with all that goes.
    ceiling: AtomicU64,
    used: AtomicU64,
    evicting: AtomicU64,
    waiting: AtomicU64,
    waiting_for_pool: AtomicU64,
}

/// The reserve at least: four runs, or two pages where these are larger. With half as much, a guest that reads
/// in order too often finds no room for all that is fetched ahead of it.
const RESERVE_LEAST_BYTES: u64 = 1 << 20;
/// The reserve at most.
const RESERVE_MOST_BYTES: u64 = 32 << 20;

impl Budget {
    /// A budget of `limit` pages of a size.
    pub fn new(limit: u64, size: PageSize) -> Self {
        let least = size.pages_in(RESERVE_LEAST_BYTES, 2);
        Self {
            reserve: least..=size.pages_in(RESERVE_MOST_BYTES, least),
            // What is reserved is missed. A huge page ahead of need takes far more of it than a window of others.
            of_pages: if size.is_huge() { 16 } else { 64 },
            limit: AtomicU64::new(limit),
            ceiling: AtomicU64::new(0),
            used: AtomicU64::new(0),
            evicting: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            waiting_for_pool: AtomicU64::new(0),
        }
    }

    /// Pages kept free ahead of need: large enough that faults in a burst find room, small beside
    /// the limit.
    fn reserve_of(&self, limit: u64) -> u64 {
        let least = (*self.reserve.start()).min(limit / 2);
        (limit / self.of_pages).clamp(least, *self.reserve.end())
    }

    /// Changes the limit. Shards evict down to it on their own, and no more is used meanwhile than now.
    pub fn set_limit(&self, pages: u64) {
        // An old one never counts beside a new limit, and a new one is not judged by the old limit.
        self.ceiling.store(0, Ordering::SeqCst);
        self.limit.store(pages, Ordering::SeqCst);
        let used = self.used();
        if used > pages {
            self.ceiling.fetch_max(2 * used, Ordering::SeqCst);
        }
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
        self.has_room() && self.waiting() > 0
    }

    /// Whether faults wait, for room or for the host's pool of huge pages.
    pub fn has_waiters(&self) -> bool {
        self.waiting() > 0 || self.waiting_for_pool() > 0
    }

    /// Whether a page more can be counted.
    pub fn has_room(&self) -> bool {
        self.used() < self.most()
    }

    /// Counts `pages` more if they fit under the limit; or, while more is used than that, in place of half as
    /// many of those that went meanwhile. So nobody waits until all of the excess has gone.
    pub fn acquire(&self, pages: u64) -> bool {
        let most = self.most();
        self.used
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |used| {
                used.checked_add(pages).filter(|used| *used <= most)
            })
            .is_ok()
    }

    fn most(&self) -> u64 {
        self.limit().max(self.ceiling.load(Ordering::SeqCst) / 2)
    }

    /// Counts pages that are there whether they fit or not (found populated at the start).
    pub fn force(&self, pages: u64) {
        let used = self.used.fetch_add(pages, Ordering::AcqRel) + pages;
        if used > self.limit() {
            self.ceiling.fetch_max(2 * used, Ordering::SeqCst);
        }
    }

    /// Takes back what was counted for pages that did not come.
    pub fn cancel(&self, pages: u64) {
        let used = self.subtract(pages);
        // The limit is reached thereby as well.
        if self.ceiling.load(Ordering::SeqCst) > 0 && used <= self.limit() {
            self.lower_ceiling(0, used);
        }
    }

    /// Takes back what was counted for pages that have gone.
    pub fn release(&self, pages: u64) {
        let used = self.subtract(pages);
        if self.ceiling.load(Ordering::SeqCst) > 0 {
            self.lower_ceiling(pages, used);
        }
    }

    fn subtract(&self, pages: u64) -> u64 {
        let before = self.used.fetch_sub(pages, Ordering::SeqCst);
        assert!(before >= pages, "more pages released than were counted");
        before - pages
    }

    /// Half of what goes is for the excess to become less. Of the other half, no more is kept for faults to come
    /// than is at any time; and nothing once the limit is reached.
    #[cold]
    fn lower_ceiling(&self, released: u64, used: u64) {
        let limit = self.limit();
        let most = match used > limit {
            true => 2 * (used + self.reserve_of(limit)),
            false => 0,
        };
        let lowered = self
            .ceiling
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |ceiling| {
                Some(ceiling.saturating_sub(released).min(most))
            });
        debug_assert!(lowered.is_ok(), "it is always given a value");
    }

    /// Room that pages which nobody waits for yet may take: as long as a quarter of the reserve is left to
    /// those that somebody waits for. Eviction, which begins at half of it, makes room meanwhile.
    pub fn spare(&self) -> u64 {
        let limit = self.limit();
        (limit - self.reserve_of(limit).div_ceil(4)).saturating_sub(self.used())
    }

    /// Pages that have to be chosen for eviction now: down to the low watermark once the high one
    /// (half the reserve) is passed; more where faults wait for room, and one for each that waits
    /// for a page of the host's pool, however far the limit is.
    pub fn shortage(&self) -> u64 {
        let limit = self.limit();
        let evicting = self.evicting.load(Ordering::Relaxed);
        let staying = self.used().saturating_sub(evicting);
        let waiting = self.waiting.load(Ordering::Relaxed);
        let reserve = self.reserve_of(limit);
        let over_limit = if staying + waiting > limit - reserve / 2 {
            (staying + waiting).saturating_sub(limit - reserve)
        } else {
            0
        };
        over_limit.max(self.waiting_for_pool().saturating_sub(evicting))
    }

    /// Whether eviction should run.
    pub fn is_pressed(&self) -> bool {
        self.shortage() > 0
    }

    /// Pages chosen for eviction that are still there.
    pub fn evicting(&self) -> u64 {
        self.evicting.load(Ordering::SeqCst)
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

    /// Notes a fault that waits for a page of the host's pool.
    pub fn start_waiting_for_pool(&self) {
        self.waiting_for_pool.fetch_add(1, Ordering::AcqRel);
    }

    /// Notes that it no longer waits.
    pub fn end_waiting_for_pool(&self) {
        self.waiting_for_pool.fetch_sub(1, Ordering::AcqRel);
    }

    /// Faults that wait for a page of the host's pool, in all shards.
    pub fn waiting_for_pool(&self) -> u64 {
        self.waiting_for_pool.load(Ordering::Acquire)
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
        let budget = Budget::new(10, PageSize::BASE);
        assert!(budget.acquire(10));
        assert!(!budget.acquire(1));
        budget.release(1);
        assert!(budget.acquire(1));
        budget.set_limit(5);
        assert!(!budget.acquire(0) || budget.used() == 10);
    }

    #[test]
    fn eviction_starts_at_the_high_and_ends_at_the_low_watermark() {
        let budget = Budget::new(64_000, PageSize::BASE);
        budget.force(63_500);
        assert_eq!(budget.shortage(), 0);
        budget.force(1);
        assert_eq!(budget.shortage(), 501);
        budget.start_evicting(501);
        assert_eq!(budget.shortage(), 0);
    }

    #[test]
    fn above_a_lowered_limit_half_of_what_goes_is_room() {
        let budget = Budget::new(100_000, PageSize::BASE);
        assert!(budget.acquire(100_000));
        budget.set_limit(10_000);
        assert!(!budget.acquire(1), "nothing has gone yet");
        let (mut gone, mut came) = (0, 0);
        while budget.used() > 10_000 {
            budget.release(1);
            gone += 1;
            came += u64::from(budget.acquire(1));
        }
        assert!(came.abs_diff(gone / 2) <= 1, "{came} for {gone}");
        assert!(!budget.has_room(), "the limit counts once it is reached");
    }

    #[test]
    fn what_nobody_took_of_the_room_above_a_limit_is_not_kept() {
        let budget = Budget::new(100_000, PageSize::BASE);
        assert!(budget.acquire(100_000));
        budget.set_limit(10_000);
        budget.release(80_000);
        let reserve = budget.reserve_of(10_000);
        assert!(budget.acquire(reserve));
        assert!(!budget.acquire(1));
        budget.release(10_000 + reserve);
        assert_eq!(budget.used(), 10_000);
        assert!(!budget.acquire(1));
    }

    #[test]
    fn what_was_found_populated_above_the_limit_leaves_room_as_it_goes() {
        let budget = Budget::new(10, PageSize::BASE);
        budget.force(20);
        assert!(!budget.acquire(1));
        budget.release(2);
        assert!(budget.acquire(1));
        assert!(!budget.acquire(1));
        // The page did not come after all.
        budget.cancel(1);
        assert!(budget.acquire(1));
    }

    #[test]
    fn the_limit_counts_where_it_is_reached_by_pages_that_did_not_come() {
        let budget = Budget::new(10, PageSize::BASE);
        budget.force(12);
        budget.cancel(2);
        assert!(!budget.acquire(1));
    }

    #[test]
    fn a_lowered_limit_makes_a_shortage_at_once() {
        let budget = Budget::new(1000, PageSize::BASE);
        budget.force(900);
        budget.set_limit(640);
        assert_eq!(budget.shortage(), 900 - (640 - 256));
    }

    #[test]
    fn few_large_pages_are_not_all_reserved() {
        let budget = Budget::new(32, PageSize::HUGE);
        budget.force(31);
        assert_eq!(budget.shortage(), 0);
        budget.force(1);
        assert_eq!(budget.shortage(), 2);
        assert_eq!(Budget::new(32, PageSize::HUGE).spare(), 31);
    }

    #[test]
    fn large_pages_ahead_of_need_have_a_larger_share() {
        let [base, huge] = [PageSize::BASE, PageSize::HUGE].map(|size| Budget::new(64_000, size));
        assert_eq!(base.spare(), 64_000 - 1000 / 4);
        assert_eq!(Budget::new(160, PageSize::HUGE).spare(), 160 - 3);
        // The most that it may be.
        assert_eq!(huge.spare(), 64_000 - 16 / 4);
    }

    #[test]
    fn an_empty_pool_is_a_shortage_below_the_limit() {
        let budget = Budget::new(100, PageSize::HUGE);
        budget.force(10);
        budget.start_waiting_for_pool();
        assert_eq!(budget.shortage(), 1);
        budget.start_evicting(1);
        assert_eq!(budget.shortage(), 0);
        budget.end_evicting(1);
        budget.end_waiting_for_pool();
        assert_eq!(budget.shortage(), 0);
    }
}
