//! Memory on its way back to the system. To unmap thousands of slabs takes seconds, which no client waits for: they
//! are taken from it, and what it reached them by is void, before it has its answer; the rest is done by a thread
//! for that alone.
//!
//! Slabs count as lent until they are unmapped. Whoever leases one meanwhile, and needs their room, waits for it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// What is unmapped at once, without a thread: some 10 ms each, where slabs are of 64 MiB.
const AT_ONCE: usize = 8;

/// What is being given back.
#[derive(Default)]
pub(crate) struct Freeing {
    batches: Mutex<usize>,
    /// One of a batch is free, or a batch is at its end.
    freed: Condvar,
}

/// Things that are dropped one by one.
struct Batch<T> {
    things: Vec<T>,
    freeing: Arc<Freeing>,
}

impl Freeing {
    /// Drops what nobody uses any more, soon.
    pub(crate) fn free<T: Send + 'static>(self: &Arc<Self>, things: Vec<T>) {
        let is_long = things.len() > AT_ONCE;
        *self.batches() += 1;
        let batch = Batch {
            things,
            freeing: Arc::clone(self),
        };
        if is_long {
            let thread = thread::Builder::new().name("freeing".to_owned());
            // Where there is no thread for it, it is dropped at once with the thread's work.
            if let Err(error) = thread.spawn(move || drop(batch)) {
                tracing::debug!(%error, "no thread to give memory back");
            }
        }
    }

    /// Waits while something holds that may change as things are freed, for so long at most; whether it then did not
    /// hold, though others may have changed it again since.
    pub(crate) fn wait_while(&self, timeout: Duration, holds: impl Fn() -> bool) -> bool {
        let mut is_over = false;
        let is_to_wait = |batches: &mut usize| {
            // In any case: what was freed last counts too.
            is_over = !holds();
            *batches > 0 && !is_over
        };
        let waited = self
            .freed
            .wait_timeout_while(self.batches(), timeout, is_to_wait);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        is_over
    }

    fn batches(&self) -> MutexGuard<'_, usize> {
        // A change is a single assignment.
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Drop for Batch<T> {
    fn drop(&mut self) {
        for thing in self.things.drain(..) {
            drop(thing);
            // Under the lock: whoever looks meanwhile hears of it.
            let _batches = self.freeing.batches();
            self.freeing.freed.notify_all();
        }
        *self.freeing.batches() -= 1;
        self.freeing.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Something that takes as long to drop as its sender likes.
    struct Slow(Receiver<()>);

    impl Drop for Slow {
        fn drop(&mut self) {
            self.0.recv_timeout(PATIENCE).expect("nobody waits for it");
        }
    }

    fn slow(count: usize) -> (Vec<Sender<()>>, Vec<Slow>) {
        (0..count)
            .map(|_| channel())
            .map(|(sender, receiver)| (sender, Slow(receiver)))
            .unzip()
    }

    #[test]
    fn who_gives_much_back_does_not_wait_for_it() {
        let freeing = Arc::new(Freeing::default());
        let (senders, things) = slow(AT_ONCE + 1);
        freeing.free(things);
        assert_eq!(*freeing.batches(), 1);
        for sender in senders {
            sender.send(()).expect("it is not dropped yet");
        }
        freeing.wait_while(PATIENCE, || true);
        assert_eq!(*freeing.batches(), 0);
    }

    #[test]
    fn who_needs_room_waits_until_it_is_there_and_no_longer() {
        let freeing = Arc::new(Freeing::default());
        assert!(!freeing.wait_while(PATIENCE, || true), "nothing comes");
        assert!(freeing.wait_while(PATIENCE, || false));
        let (senders, things) = slow(AT_ONCE + 1);
        freeing.free(things);
        assert!(freeing.wait_while(PATIENCE, || false));
        assert!(!freeing.wait_while(Duration::from_millis(20), || true));
        assert_eq!(*freeing.batches(), 1, "the time is over");
        senders
            .iter()
            .for_each(|sender| sender.send(()).expect("it is there"));
        freeing.wait_while(PATIENCE, || true);
    }
}
