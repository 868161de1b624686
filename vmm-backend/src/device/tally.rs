//! The device's counters.

use std::sync::atomic::{AtomicU64, Ordering};

use super::DeviceCounters;

/// Counters shared by all queues and connections.
#[derive(Debug, Default)]
pub(super) struct Tally {
    requests: AtomicU64,
    request_errors: AtomicU64,
    broken_queues: AtomicU64,
    pub(super) strays: AtomicU64,
}

impl Tally {
    pub(super) fn request(&self, succeeded: bool) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        if !succeeded {
            self.request_errors.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn stray(&self) {
        self.strays.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a broken queue; whether it is worth a line in the log: a guest can break queues as
    /// fast as it can reset the device, so ever fewer of them are.
    pub(super) fn broken_queue(&self) -> bool {
        let count = self.broken_queues.fetch_add(1, Ordering::Relaxed) + 1;
        count.is_power_of_two()
    }

    pub(super) fn read(&self) -> DeviceCounters {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DeviceCounters {
            requests: get(&self.requests),
            request_errors: get(&self.request_errors),
            broken_queues: get(&self.broken_queues),
            stray_device_accesses: get(&self.strays),
        }
    }
}
