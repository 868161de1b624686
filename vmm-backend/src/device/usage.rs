//! Whether the guest uses the disk: what decides, when its QEMU ends, whether a far-memory disk is dropped.
//!
//! A QEMU that ends while its guest uses the disk has crashed or was killed: nobody will ask for the disk
//! again. In any other case the guest may have been saved or moved, and the disk is kept: an ordinary next
//! start drops it. To keep one too many costs room until then, to drop one too many is a loss. So the guest
//! counts as using the disk
//!
//! - from the first request on that it *adds* to a running queue. That a queue was started says nothing, nor
//!   that it was kicked, nor what lay in it by then: QEMU starts and kicks the queues of a paused guest too, where
//!   it connects again, and does not stop them when that guest is saved;
//! - until the front end has stopped every queue, as it does for a pause, a save, the end of a migration
//!   and a reset;
//! - and not any more where a connection has ended and QEMU lives on: it may pause its guest meanwhile, and has
//!   nobody to tell.
//!
//! A device of a backend that takes over from a dead one begins as one that is not used, for the same reason.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long QEMU may take from the end of its connection to its own, where that is the reason: the kernel
/// closes its sockets first, and takes KVM down after that.
const QEMU_ENDS_WITHIN: Duration = Duration::from_secs(5);

/// Whether the guest uses the disk.
#[derive(Default)]
pub(super) struct Usage {
    used: AtomicBool,
    /// When the last connection ended, if there is none.
    left_at: Mutex<Option<Instant>>,
}

impl Usage {
    /// The guest has added a request to a running queue.
    pub(super) fn request_added(&self) {
        self.used.store(true, Ordering::Release);
    }

    /// No queue runs any more, by the front end's word.
    pub(super) fn stopped(&self) {
        self.used.store(false, Ordering::Release);
    }

    /// A front end has connected: should there have been one before, what it was at is over.
    pub(super) fn connected(&self) {
        self.stopped();
        *self.left_at() = None;
    }

    /// The connection has ended, perhaps because QEMU does.
    pub(super) fn disconnected(&self, now: Instant) {
        *self.left_at() = Some(now);
    }

    /// Whether the guest used the disk to the last, should its QEMU have ended just now.
    pub(super) fn lasts(&self, now: Instant) -> bool {
        let is_recent = |left: Instant| now.saturating_duration_since(left) < QEMU_ENDS_WITHIN;
        self.used.load(Ordering::Acquire) && self.left_at().is_none_or(is_recent)
    }

    fn left_at(&self) -> MutexGuard<'_, Option<Instant>> {
        // Each change under the lock is one assignment.
        self.left_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disk_is_used_from_a_request_to_a_stop() {
        let (usage, now) = (Usage::default(), Instant::now());
        assert!(!usage.lasts(now));
        usage.connected();
        assert!(!usage.lasts(now));
        usage.request_added();
        assert!(usage.lasts(now));
        usage.stopped();
        assert!(!usage.lasts(now));
    }

    #[test]
    fn a_connection_that_ends_with_its_qemu_leaves_a_disk_in_use() {
        let (usage, now) = (Usage::default(), Instant::now());
        usage.connected();
        usage.request_added();
        usage.disconnected(now);
        assert!(usage.lasts(now + Duration::from_secs(1)));
        assert!(
            !usage.lasts(now + Duration::from_secs(6)),
            "QEMU goes on without the disk"
        );
    }

    #[test]
    fn who_connects_again_has_used_nothing_yet() {
        let (usage, now) = (Usage::default(), Instant::now());
        usage.connected();
        usage.request_added();
        usage.disconnected(now);
        usage.connected();
        assert!(!usage.lasts(now), "the guest may be paused by now");
        usage.request_added();
        assert!(usage.lasts(now + Duration::from_secs(6)));
    }
}
