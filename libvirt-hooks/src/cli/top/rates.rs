//! What happens per second, from two reports of a backend's counters.

use std::time::Instant;

use outram_wire::control::{Counters, Status};

/// A backend's counters at a moment.
#[derive(Clone, Debug)]
pub struct Sample {
    at: Instant,
    backend_pid: u32,
    counters: Counters,
}

/// What happened per second between two samples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Faults answered.
    pub faults: f64,
    /// ... of which on pages that had been evicted.
    pub refaults: f64,
    /// Time waited by all faults, per time: the mean number of QEMU's threads (vCPUs, mostly) that
    /// wait for memory.
    pub wait_share: f64,
    /// Bytes from memory servers.
    pub received_bytes: f64,
    /// Bytes to them.
    pub sent_bytes: f64,
}

impl Sample {
    /// What a backend told at `at`.
    pub fn of(status: &Status, at: Instant) -> Self {
        Self {
            at,
            backend_pid: status.backend_pid,
            counters: status.counters.clone(),
        }
    }

    fn faults(&self) -> u64 {
        let c = &self.counters;
        c.answered_faults()
    }

    /// The rates since an earlier sample. `None` where they cannot be told: the backend is another
    /// one, whose counters began anew, or no time has passed.
    pub fn since(&self, earlier: &Self) -> Option<Rates> {
        let seconds = self.at.checked_duration_since(earlier.at)?.as_secs_f64();
        if seconds <= 0.0 || self.backend_pid != earlier.backend_pid {
            return None;
        }
        let rate = |now: u64, before: u64| Some(now.checked_sub(before)? as f64 / seconds);
        let (now, before) = (&self.counters, &earlier.counters);
        Some(Rates {
            faults: rate(self.faults(), earlier.faults())?,
            refaults: rate(now.refaults, before.refaults)?,
            // A thread that ends while it waits takes its wait along: that is no negative share.
            wait_share: now.waited_us.saturating_sub(before.waited_us) as f64 / 1e6 / seconds,
            received_bytes: rate(now.wire_received_bytes, before.wire_received_bytes)?,
            sent_bytes: rate(now.wire_sent_bytes, before.wire_sent_bytes)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn sample(at: Instant, seconds: u64, backend_pid: u32, faults_remote: u64) -> Sample {
        Sample {
            at: at + Duration::from_secs(seconds),
            backend_pid,
            counters: Counters {
                faults_remote,
                faults_zero: 1,
                refaults: faults_remote,
                waited_us: faults_remote * 1_000,
                wire_received_bytes: faults_remote * 4096,
                ..Counters::default()
            },
        }
    }

    #[test]
    fn rates_are_differences_by_time() {
        let start = Instant::now();
        let rates = sample(start, 2, 7, 300).since(&sample(start, 0, 7, 100));
        let rates = rates.expect("two samples of one backend");
        assert_eq!((rates.faults, rates.refaults), (100.0, 100.0));
        assert_eq!(rates.received_bytes, 409_600.0);
        assert!((rates.wait_share - 0.1).abs() < 1e-9, "0.2 s in 2 s");
    }

    #[test]
    fn a_backend_that_began_anew_has_no_rates_at_first() {
        let start = Instant::now();
        let before = sample(start, 0, 7, 100);
        assert_eq!(sample(start, 2, 8, 300).since(&before), None, "another pid");
        assert_eq!(sample(start, 2, 7, 30).since(&before), None, "counts back");
        assert_eq!(sample(start, 0, 7, 100).since(&before), None, "no time");
        assert_eq!(before.since(&sample(start, 2, 7, 100)), None, "backwards");
    }
}
