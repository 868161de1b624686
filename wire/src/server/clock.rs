//! The clock that leases are measured by: it goes on while the machine is suspended.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// A moment on `CLOCK_BOOTTIME`. Unlike [`std::time::Instant`] it does not stand still while a host
/// is suspended, when a server's clock runs on and leases end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTime(Duration);

impl BootTime {
    /// The present.
    pub fn now() -> Self {
        // The kernel has this clock since 2.6.39; without an answer the present counts as long past
        // or long to come, both of which make a lease look over: the safe side.
        Self(clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::MAX, Duration::from))
    }

    /// This moment put off by `delay`; saturates.
    pub fn after(self, delay: Duration) -> Self {
        Self(self.0.saturating_add(delay))
    }

    /// Time from `earlier` to this moment; zero if that is not earlier.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl BootTime {
    /// Milliseconds since the machine started; saturates. For atomics.
    pub fn as_millis(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_on() {
        let now = BootTime::now();
        let later = now.after(Duration::from_secs(5));
        assert_eq!(later.since(now), Duration::from_secs(5));
        assert_eq!(now.since(later), Duration::ZERO);
        assert!(BootTime::now() >= now);
    }
}
