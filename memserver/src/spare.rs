//! A slab ahead: its memory is taken from the system, and zeroed there, before anybody leases it.
//!
//! Registering a slab with an RDMA device takes all of its memory from the system at once, which is by
//! far the most of what it costs (in an emulated machine 700 ms for 64 MiB, and 5 ms once the memory is
//! there). That part needs no client: the slab is registered nowhere, so nobody reaches it. What a
//! client may do with it begins when that client is told its key, as with any other slab.
//!
//! There is one, and only where slabs are being registered and another one may be lent.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::slab::{Counts, Slab};

/// The slab ahead, and the orders of the thread that makes it.
#[derive(Default)]
pub(crate) struct Spare {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    slab: Option<Slab>,
    is_wanted: bool,
    is_over: bool,
}

impl Spare {
    /// The slab, if there is one, lent to whoever it is counted for.
    pub(crate) fn take(&self, counts: Counts) -> Option<Slab> {
        let slab = self.state().slab.take();
        slab.map(|slab| slab.counted(counts))
    }

    /// Has one made ready, unless there is one.
    pub(crate) fn want(&self) {
        let mut state = self.state();
        state.is_wanted = state.slab.is_none();
        self.changed.notify_all();
    }

    /// Gives the slab back to the system.
    pub(crate) fn drop_slab(&self) {
        let mut state = self.state();
        state.is_wanted = false;
        let slab = state.slab.take();
        drop(state);
        drop(slab);
    }

    /// Bytes of the slab that is ready.
    pub(crate) fn bytes(&self) -> u64 {
        self.state().slab.as_ref().map_or(0, Slab::bytes)
    }

    /// Makes slabs of `bytes` ready as they are wanted, if `may_be_lent` says that there may be one
    /// more, until it is closed.
    pub(crate) fn keep(&self, bytes: usize, may_be_lent: impl Fn() -> bool) {
        loop {
            let mut state = self.state();
            while !state.is_wanted && !state.is_over {
                let waited = self.changed.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
            }
            if state.is_over {
                return;
            }
            state.is_wanted = false;
            drop(state);
            if !may_be_lent() {
                continue;
            }
            match Slab::map_ahead(bytes) {
                Ok(slab) => {
                    let mut state = self.state();
                    // Whoever wanted one while it was made wanted this one.
                    state.is_wanted = false;
                    let needless = match state.is_over {
                        true => Some(slab),
                        false => state.slab.replace(slab),
                    };
                    drop(state);
                    // Giving memory back takes a while, and leases wait for the lock.
                    drop(needless);
                }
                // Whoever leases one is told if it is so still.
                Err(error) => tracing::debug!(%error, "no slab is made ready ahead"),
            }
        }
    }

    /// Ends [`Spare::keep`].
    pub(crate) fn close(&self) {
        self.state().is_over = true;
        self.changed.notify_all();
        self.drop_slab();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change under the lock is an assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const BYTES: usize = 64 * 1024;

    fn wait_for(spare: &Spare, bytes: usize) {
        while spare.bytes() != bytes as u64 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn one_is_ready_where_it_is_wanted_and_counted_once_it_is_lent() {
        let spare = Spare::default();
        std::thread::scope(|scope| {
            scope.spawn(|| spare.keep(BYTES, || true));
            let counts = Counts::default();
            assert!(spare.take(counts.clone()).is_none(), "nobody wanted one");
            spare.want();
            wait_for(&spare, BYTES);
            assert_eq!(counts.server.load(Ordering::Acquire), 0);
            let slab = spare.take(counts.clone()).expect("it is ready");
            assert_eq!(counts.client.load(Ordering::Acquire), BYTES as u64);
            assert_eq!(spare.bytes(), 0);
            drop(slab);
            assert_eq!(counts.server.load(Ordering::Acquire), 0);
            spare.want();
            wait_for(&spare, BYTES);
            spare.close();
        });
        assert_eq!(spare.bytes(), 0);
    }

    #[test]
    fn whoever_wants_one_while_it_is_made_gets_no_other() {
        let spare = Spare::default();
        let made = AtomicUsize::new(0);
        let is_wanted = std::thread::scope(|scope| {
            scope.spawn(|| {
                spare.keep(BYTES, || {
                    if made.fetch_add(1, Ordering::AcqRel) == 0 {
                        spare.want();
                    }
                    true
                });
            });
            spare.want();
            wait_for(&spare, BYTES);
            let is_wanted = spare.state().is_wanted;
            spare.close();
            is_wanted
        });
        assert!(!is_wanted);
        assert_eq!(made.load(Ordering::Acquire), 1);
    }
}
