//! Looking again and again before sleeping: a thread that sleeps on an idle processor takes longer to wake than
//! a page takes over a fast wire, and the guest waits for both.
//!
//! As KVM does for halted vCPUs: who waited for a short time only looks for about as long the next time. So a
//! guest that faults now and then costs no processor time, and one that faults all the time costs some in place
//! of the kernel's for putting a thread to sleep and waking it. Between two looks the processor is offered to
//! whoever else wants it: to a memory server of this host that makes the very answer, or to a vCPU. Who takes
//! it for long needs it more than we do, and has it for itself for a while.

use std::io;
use std::time::{Duration, Instant};

/// Longest time to look before sleeping. A page comes within it over any wire that is worth it.
const MOST: Duration = Duration::from_micros(100);

/// Who takes the processor for so long is at work of its own: what is about to answer us, or was woken by us,
/// soon waits again.
const CROWDED: Duration = Duration::from_micros(300);

/// Waits to be slept through once the processor was found to be wanted; twice as many each further time.
const SIT_OUT_FIRST: u32 = 16;
/// ... but no more than this.
const SIT_OUT_MOST: u32 = 4096;
/// Waits that end well in a row, after which only half as many are to be slept through.
const WELL: u32 = 32;

/// What is waited for, and how.
pub(super) trait Lookout {
    /// Looks once, and sleeps first until there is something to be found if it may. Whether it found anything.
    fn look(&mut self, may_sleep: bool) -> io::Result<bool>;
    /// Offers the processor to whoever else wants it.
    fn offer(&mut self);
    /// A clock's time.
    fn now(&self) -> Instant;
}

/// When a thread looks before it sleeps.
#[derive(Debug, Default)]
pub(super) struct Spin {
    /// The last wait was short.
    is_worth_it: bool,
    /// Waits still to be slept through.
    sitting_out: u32,
    /// How many the last time.
    sat_out: u32,
    /// Waits since then, or since that was halved, in which what was looked for came.
    well: u32,
}

impl Spin {
    /// Waits until something is found.
    pub(super) fn wait(&mut self, lookout: &mut impl Lookout) -> io::Result<()> {
        let began = lookout.now();
        if self.is_due() && self.finds_awake(lookout, MOST)? {
            return Ok(());
        }
        lookout.look(true)?;
        self.is_worth_it = lookout.now() - began < MOST;
        Ok(())
    }

    /// Looks for so long at most, and never sleeps, where looking is what the waits of this time do. Whether
    /// anything was found.
    pub(super) fn glance(
        &mut self,
        lookout: &mut impl Lookout,
        most: Duration,
    ) -> io::Result<bool> {
        Ok(self.is_worth_it && self.sitting_out == 0 && self.finds_awake(lookout, most)?)
    }

    fn is_due(&mut self) -> bool {
        let sits_out = self.sitting_out > 0;
        self.sitting_out = self.sitting_out.saturating_sub(1);
        self.is_worth_it && !sits_out
    }

    fn finds_awake(&mut self, lookout: &mut impl Lookout, most: Duration) -> io::Result<bool> {
        let began = lookout.now();
        let mut now = began;
        while now - began < most {
            if lookout.look(false)? {
                self.went_well();
                return Ok(true);
            }
            lookout.offer();
            let before = std::mem::replace(&mut now, lookout.now());
            if now - before > CROWDED {
                self.was_crowded();
            }
        }
        Ok(false)
    }

    fn went_well(&mut self) {
        self.well += 1;
        if self.well == WELL {
            (self.sat_out, self.well) = (self.sat_out / 2, 0);
        }
    }

    fn was_crowded(&mut self) {
        self.sat_out = (self.sat_out * 2).clamp(SIT_OUT_FIRST, SIT_OUT_MOST);
        (self.sitting_out, self.well) = (self.sat_out, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Something that comes at a moment, on a processor that others take for so long when it is offered.
    struct Play {
        now: Instant,
        comes: Instant,
        taken: Duration,
        looks: u32,
        sleeps: u32,
    }

    impl Lookout for Play {
        fn look(&mut self, may_sleep: bool) -> io::Result<bool> {
            if may_sleep {
                self.sleeps += 1;
                self.now = self.now.max(self.comes);
            } else {
                self.looks += 1;
                self.now += Duration::from_micros(1);
            }
            Ok(self.now >= self.comes)
        }

        fn offer(&mut self) {
            self.now += self.taken;
        }

        fn now(&self) -> Instant {
            self.now
        }
    }

    /// Something that comes after so many microseconds.
    fn play(comes_us: u64, taken_us: u64) -> Play {
        let now = Instant::now();
        Play {
            now,
            comes: now + Duration::from_micros(comes_us),
            taken: Duration::from_micros(taken_us),
            looks: 0,
            sleeps: 0,
        }
    }

    /// Looks and sleeps of a wait for it.
    fn wait(spin: &mut Spin, comes_us: u64, taken_us: u64) -> (u32, u32) {
        let mut play = play(comes_us, taken_us);
        spin.wait(&mut play).expect("nothing fails");
        (play.looks, play.sleeps)
    }

    #[test]
    fn who_waits_for_long_sleeps() {
        let mut spin = Spin::default();
        for _ in 0..10 {
            assert_eq!(wait(&mut spin, 1_000, 0), (0, 1));
        }
    }

    #[test]
    fn who_waited_for_a_short_time_looks_until_that_is_over() {
        let mut spin = Spin::default();
        assert_eq!(wait(&mut spin, 30, 0), (0, 1), "nothing is known yet");
        for _ in 0..10 {
            assert_eq!(wait(&mut spin, 30, 0), (30, 0));
        }
        assert_eq!(wait(&mut spin, 1_000, 0), (100, 1), "it looks once in vain");
        assert_eq!(wait(&mut spin, 1_000, 0), (0, 1));
    }

    /// Finds the processor taken, and then sleeps as long as it does so at every wait; for how many.
    fn sits_out(spin: &mut Spin) -> usize {
        assert_eq!(wait(spin, 30, 1_000), (1, 1), "it was to look");
        let waits = std::iter::repeat_with(|| wait(spin, 30, 0));
        waits.take_while(|(looks, _)| *looks == 0).count()
    }

    #[test]
    fn a_processor_that_others_want_is_left_to_them_longer_each_time() {
        let mut spin = Spin::default();
        wait(&mut spin, 30, 0);
        let slept: Vec<usize> = (0..12).map(|_| sits_out(&mut spin)).collect();
        assert_eq!(slept[..4], [16, 32, 64, 128]);
        assert_eq!(slept[11], SIT_OUT_MOST as usize);
        // Waits that end well make up for it; each of the above ended with one.
        for _ in 1..WELL {
            assert_eq!(wait(&mut spin, 30, 0), (30, 0));
        }
        assert_eq!(sits_out(&mut spin), SIT_OUT_MOST as usize);
        for _ in 1..10 * WELL {
            wait(&mut spin, 30, 0);
        }
        assert_eq!(sits_out(&mut spin), 16);
    }

    #[test]
    fn a_glance_is_as_long_as_it_may_be_and_none_where_waits_are_slept_through() {
        let glance = |spin: &mut Spin, comes_us| {
            let mut play = play(comes_us, 0);
            let found = spin.glance(&mut play, Duration::from_micros(10));
            (found.expect("nothing fails"), play.looks, play.sleeps)
        };
        let mut spin = Spin::default();
        assert_eq!(glance(&mut spin, 5), (false, 0, 0), "nothing is known yet");
        wait(&mut spin, 30, 0);
        assert_eq!(glance(&mut spin, 5), (true, 5, 0));
        assert_eq!(glance(&mut spin, 50), (false, 10, 0));
        wait(&mut spin, 30, 1_000);
        wait(&mut spin, 30, 0);
        assert_eq!(
            glance(&mut spin, 5),
            (false, 0, 0),
            "others want the processor"
        );
    }

    #[test]
    fn a_short_turn_of_who_answers_is_none_that_others_want() {
        let mut spin = Spin::default();
        wait(&mut spin, 80, 0);
        for _ in 0..10 {
            assert_eq!(wait(&mut spin, 80, 40), (3, 0));
        }
    }
}
