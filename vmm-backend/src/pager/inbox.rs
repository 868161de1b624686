//! A queue that wakes its reader out of `poll`.
//!
//! Unbounded by type, bounded by use: what may be in it at once is bounded by staging slots, runs
//! out, and pins, each limited where it is made. A sender never blocks, so that no two threads of
//! the pager can wait for each other.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::{Receiver, Sender, unbounded};
use rustix::event::EventfdFlags;

struct Bell {
    eventfd: OwnedFd,
    /// Set while a ring is unheard: spares a system call for each further one.
    rung: AtomicBool,
}

impl Bell {
    fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel)
            && let Err(error) = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes())
        {
            tracing::error!(%error, "a pager thread cannot be woken");
        }
    }
}

/// The sending side.
pub(super) struct Inbox<T> {
    sender: Sender<T>,
    bell: Arc<Bell>,
}

impl<T> Clone for Inbox<T> {
    fn clone(&self) -> Self {
        Self {
            sender: self.sender.clone(),
            bell: Arc::clone(&self.bell),
        }
    }
}

impl<T> Inbox<T> {
    /// Queues a message; dropped where the reader has ended.
    pub(super) fn send(&self, message: T) {
        if self.sender.send(message).is_ok() {
            self.bell.ring();
        }
    }

    /// Only wakes the reader.
    pub(super) fn ring(&self) {
        self.bell.ring();
    }
}

/// The reading side.
pub(super) struct Messages<T> {
    receiver: Receiver<T>,
    bell: Arc<Bell>,
}

impl<T> Messages<T> {
    /// The next message, if one is there.
    pub(super) fn next(&self) -> Option<T> {
        self.receiver.try_recv().ok()
    }

    /// Whether there is a ring to be heard: in time, without a system call. The eventfd may be written
    /// only later, and then tells of nothing new.
    pub(super) fn have_rung(&self) -> bool {
        self.bell.rung.load(Ordering::Acquire)
    }

    /// Hears the ring: to be called before the messages are read.
    ///
    /// The eventfd first, then the flag. The other way round a ring in between would be heard and
    /// the flag stay set: nobody would ring again. A sender that still finds the flag set has
    /// queued its message before; the swap makes that message visible.
    pub(super) fn hush(&self) {
        let mut count = [0; 8];
        // Nothing to read is no error here.
        let _ = rustix::io::read(&self.bell.eventfd, &mut count);
        self.bell.rung.swap(false, Ordering::AcqRel);
    }
}

impl<T> AsFd for Messages<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.eventfd.as_fd()
    }
}

/// A queue and its two sides.
pub(super) fn inbox<T>() -> std::io::Result<(Inbox<T>, Messages<T>)> {
    let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let bell = Arc::new(Bell {
        eventfd,
        rung: AtomicBool::new(false),
    });
    let (sender, receiver) = unbounded();
    Ok((
        Inbox {
            sender,
            bell: Arc::clone(&bell),
        },
        Messages { receiver, bell },
    ))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    /// Two senders that each wait for their message to be read: a lost ring leaves both waiting.
    #[test]
    fn no_ring_is_lost() {
        listen(|_| false);
        // Some are heard before the eventfd is written.
        listen(Messages::have_rung);
    }

    fn listen(hears_at_once: fn(&Messages<usize>) -> bool) {
        const SENDERS: usize = 2;
        const EACH: usize = 50_000;
        let (inbox, messages) = inbox::<usize>().expect("an eventfd");
        let heard: Arc<[AtomicUsize; SENDERS]> = Arc::default();
        for sender in 0..SENDERS {
            let (inbox, heard) = (inbox.clone(), Arc::clone(&heard));
            std::thread::spawn(move || {
                for number in 0..EACH {
                    inbox.send(sender);
                    while heard[sender].load(Ordering::Acquire) <= number {
                        std::thread::yield_now();
                    }
                }
            });
        }
        let mut left = SENDERS * EACH;
        while left > 0 {
            if !hears_at_once(&messages) {
                let mut fds = [PollFd::new(&messages, PollFlags::IN)];
                let patience = Timespec {
                    tv_sec: 120,
                    tv_nsec: 0,
                };
                let rung = poll(&mut fds, Some(&patience)).expect("a sound descriptor");
                assert_eq!(rung, 1, "{left} messages were never rung for");
            }
            messages.hush();
            while let Some(sender) = messages.next() {
                heard[sender].fetch_add(1, Ordering::Release);
                left -= 1;
            }
        }
    }
}
