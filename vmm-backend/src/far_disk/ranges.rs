//! Which blocks are being worked on: requests of several queues may meet on one block.
//!
//! A reader shares its blocks with readers, a writer with nobody. Each request holds one range at a
//! time, so that none can wait for another in a circle.

use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::DiskFault;
use crate::interrupt::{Interrupt, LOOK};

/// Ranges in use.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    held: Mutex<Vec<Held>>,
    left: Condvar,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Held {
    blocks: Range<u32>,
    shared: bool,
}

/// A range in use; given back when dropped.
pub(super) struct Hold<'a> {
    ranges: &'a Ranges,
    own: Held,
}

impl Ranges {
    /// Waits until nobody else writes these blocks, nor reads them unless `shared`.
    pub(super) fn hold(
        &self,
        blocks: Range<u32>,
        shared: bool,
        interrupt: &Interrupt<'_>,
    ) -> Result<Hold<'_>, DiskFault> {
        let own = Held { blocks, shared };
        let mut held = self.lock();
        while held.iter().any(|other| other.conflicts(&own)) {
            if interrupt.is_wanted() {
                return Err(DiskFault::Interrupted);
            }
            let waited = self.left.wait_timeout(held, LOOK);
            held = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        held.push(own.clone());
        Ok(Hold { ranges: self, own })
    }

    /// The blocks for oneself alone, if nobody has any of them at the moment.
    pub(super) fn try_hold(&self, blocks: Range<u32>) -> Option<Hold<'_>> {
        let own = Held {
            blocks,
            shared: false,
        };
        let mut held = self.lock();
        if held.iter().any(|other| other.conflicts(&own)) {
            return None;
        }
        held.push(own.clone());
        Some(Hold { ranges: self, own })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Held>> {
        // Pushed to and removed from in single calls.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    fn conflicts(&self, other: &Self) -> bool {
        let meet = self.blocks.start < other.blocks.end && other.blocks.start < self.blocks.end;
        meet && !(self.shared && other.shared)
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        let mut held = self.ranges.lock();
        if let Some(place) = held.iter().position(|held| *held == self.own) {
            held.swap_remove(place);
        }
        self.ranges.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn readers_share_and_writers_do_not() {
        let ranges = Ranges::default();
        let hold = |blocks| {
            let held = ranges.hold(blocks, true, &Interrupt::never());
            held.expect("not interrupted")
        };
        let first = hold(0..10);
        let second = hold(5..15);
        assert!(ranges.try_hold(9..20).is_none());
        assert!(ranges.try_hold(15..20).is_some());
        drop(first);
        assert!(ranges.try_hold(9..20).is_none());
        assert!(ranges.try_hold(0..5).is_some());
        drop(second);
        let _alone = ranges.try_hold(9..20).expect("nobody is there");
        assert!(ranges.try_hold(19..30).is_none());
    }

    #[test]
    fn a_writer_waits_for_its_turn_or_its_interruption() {
        let ranges = Ranges::default();
        let entered = AtomicBool::new(false);
        let hold = |blocks, shared, interrupt: &Interrupt<'_>| {
            let held = ranges.hold(blocks, shared, interrupt);
            held.map(|_held| ())
        };
        let first = ranges.hold(0..4, true, &Interrupt::never());
        let wanted = AtomicBool::new(true);
        let interrupted = hold(3..5, false, &Interrupt::by(&wanted));
        assert!(matches!(interrupted, Err(DiskFault::Interrupted)));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                hold(3..5, false, &Interrupt::never()).expect("not interrupted");
                entered.store(true, Ordering::SeqCst);
            });
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert!(!entered.load(Ordering::SeqCst));
            drop(first);
        });
        assert!(entered.into_inner());
    }
}
