//! When RDMA is tried again where pages go over TCP meanwhile: after each try in vain twice as late as
//! before. A try makes all connections anew, and where packets do not arrive, pages wait seconds for it.

use std::time::{Duration, Instant};

/// The first pause: long beside the seconds that a try may hold pages up for, short beside what is served over
/// TCP meanwhile where a server was only started again.
const FIRST: Duration = Duration::from_secs(15);

/// The longest: a try that is in vain is of no weight then.
const LONGEST: Duration = Duration::from_secs(3600);

/// The pause of a session.
#[derive(Debug)]
pub(super) struct VerbsPause {
    next: Duration,
    /// No connection is to go over RDMA before.
    barred_until: Option<Instant>,
    /// Connections that go over TCP are to be left alone before.
    try_at: Instant,
}

impl VerbsPause {
    /// Of a session that begins now: RDMA is tried at once.
    pub(super) fn new(now: Instant) -> Self {
        Self {
            next: FIRST,
            barred_until: None,
            try_at: now + FIRST,
        }
    }

    /// Whether a connection that is made anyway may go over RDMA.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.barred_until.is_none_or(|until| until <= now)
    }

    /// Whether it is time to make connections anew for its sake.
    pub(super) fn is_try_due(&self, now: Instant) -> bool {
        self.try_at <= now
    }

    /// Such a try is made.
    pub(super) fn note_try(&mut self, now: Instant) {
        self.try_at = now + self.next;
        self.next = (self.next * 2).min(LONGEST);
    }

    /// RDMA has failed, after it was in use for so long.
    pub(super) fn note_failure(&mut self, now: Instant, used: Duration) {
        if used >= self.next {
            self.next = FIRST;
        }
        self.note_try(now);
        self.barred_until = Some(self.try_at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_in_vain_become_rare() {
        let mut now = Instant::now();
        let mut pause = VerbsPause::new(now);
        assert!(pause.is_over(now) && !pause.is_try_due(now));
        for pauses in [1, 2, 4, 8, 16, 32, 64, 128, 240, 240] {
            pause.note_failure(now, Duration::ZERO);
            let end = now + FIRST * pauses;
            let before = end - Duration::from_millis(1);
            assert!(!pause.is_over(before) && !pause.is_try_due(before));
            assert!(pause.is_over(end) && pause.is_try_due(end));
            now = end;
        }
    }

    #[test]
    fn a_failure_after_long_use_is_the_first_again() {
        let now = Instant::now();
        let mut pause = VerbsPause::new(now);
        pause.note_failure(now, Duration::ZERO);
        pause.note_failure(now, Duration::ZERO);
        pause.note_failure(now, FIRST * 4);
        assert!(pause.is_over(now + FIRST));
    }

    #[test]
    fn a_try_bars_nothing() {
        let now = Instant::now();
        let mut pause = VerbsPause::new(now);
        pause.note_try(now + FIRST);
        assert!(pause.is_over(now + FIRST));
        assert!(!pause.is_try_due(now + FIRST) && pause.is_try_due(now + FIRST * 2));
    }
}
