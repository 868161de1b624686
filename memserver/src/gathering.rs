//! Memory that writes to disks are gathered in: bounded for all of them, and for each certificate.
//!
//! Whoever finds no room waits, and sends no more than its socket's buffers take meanwhile. Those of one certificate
//! go one after the other; of several, whoever came first, unless its certificate has its share. So nobody's
//! waiting keeps out others than its own, and large requests get their turn.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use outram_wire::server::ClientName;
use outram_wire::server::data::MAX_PAYLOAD_BYTES;

/// Bytes in all: what a fast network brings in some hundredths of a second, and little beside what is lent.
const MOST_BYTES: usize = 128 << 20;
/// ... and for one certificate: 32 of the requests that backends make, which have 1 MiB mostly.
const MOST_OF_ONE: usize = MOST_BYTES / 4;
const _: () = assert!(MAX_PAYLOAD_BYTES <= MOST_OF_ONE, "every request fits");

/// How often who waits looks whether it is to end: a fence waits for it, for some seconds.
const LOOK: Duration = Duration::from_millis(500);

/// The memory as its users share it.
pub(crate) struct Gathering {
    most_bytes: usize,
    most_of_one: usize,
    shares: Mutex<Shares>,
}

#[derive(Default)]
struct Shares {
    bytes: usize,
    next_ticket: u64,
    /// Of those who have or want something.
    clients: HashMap<ClientName, Share>,
    /// Whose turn has come, and who does not know it yet.
    called: HashSet<u64>,
}

/// What the connections of one certificate have.
#[derive(Default)]
struct Share {
    bytes: usize,
    /// Who wants how much, first come first.
    waiting: VecDeque<Waiting>,
}

struct Waiting {
    ticket: u64,
    bytes: usize,
    thread: Thread,
}

/// The memory for connections of one certificate.
#[derive(Clone, Copy)]
pub(crate) struct Gatherer<'a> {
    gathering: &'a Gathering,
    client: &'a ClientName,
}

/// Bytes that may be used; giving them back is dropping this.
pub(crate) struct Portion<'a> {
    gatherer: Gatherer<'a>,
    bytes: usize,
}

impl Default for Gathering {
    fn default() -> Self {
        Self::new(MOST_BYTES, MOST_OF_ONE)
    }
}

impl Gathering {
    fn new(most_bytes: usize, most_of_one: usize) -> Self {
        Self {
            most_bytes,
            most_of_one,
            shares: Mutex::default(),
        }
    }

    /// What there is for connections of this certificate.
    pub(crate) fn of<'a>(&'a self, client: &'a ClientName) -> Gatherer<'a> {
        Gatherer {
            gathering: self,
            client,
        }
    }

    /// Calls those whose turn has come.
    fn call(&self, shares: &mut Shares) {
        loop {
            let left = self.most_bytes - shares.bytes;
            let turns = shares.clients.values_mut().filter_map(|share| {
                let next = self.next_of(share)?;
                Some((next.ticket, next.bytes, share))
            });
            let Some((_, bytes, share)) = turns.min_by_key(|(ticket, _, _)| *ticket) else {
                return;
            };
            if bytes > left {
                return;
            }
            let Some(first) = share.waiting.pop_front() else {
                return;
            };
            share.bytes += first.bytes;
            shares.bytes += first.bytes;
            shares.called.insert(first.ticket);
            first.thread.unpark();
        }
    }

    /// Who of a certificate's may have its turn next, if the certificate's share has room for it.
    fn next_of<'a>(&self, share: &'a Share) -> Option<&'a Waiting> {
        let front = share.waiting.front()?;
        (share.bytes + front.bytes <= self.most_of_one).then_some(front)
    }

    fn shares(&self) -> MutexGuard<'_, Shares> {
        // Nothing under the lock can panic half-way through a change.
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'a> Gatherer<'a> {
    /// Whether anybody waits for memory that could have what this client gives back: others who have their
    /// certificate's share could not.
    pub(crate) fn is_wanted(self) -> bool {
        let shares = self.gathering.shares();
        let mut clients = shares.clients.iter();
        clients.any(|(client, share)| match client == self.client {
            true => !share.waiting.is_empty(),
            false => self.gathering.next_of(share).is_some(),
        })
    }

    /// Waits for so many bytes, which are no more than a request's, until `deadline` or until `is_over` says that
    /// nobody wants them any more: none then.
    pub(crate) fn take(
        self,
        bytes: usize,
        deadline: Instant,
        is_over: impl Fn() -> bool,
    ) -> Option<Portion<'a>> {
        let mut shares = self.gathering.shares();
        let ticket = shares.next_ticket;
        shares.next_ticket += 1;
        let own = shares.clients.entry(self.client.clone()).or_default();
        own.waiting.push_back(Waiting {
            ticket,
            bytes,
            thread: thread::current(),
        });
        self.gathering.call(&mut shares);
        while !shares.called.remove(&ticket) {
            drop(shares);
            let left = deadline.saturating_duration_since(Instant::now());
            let gives_up = left.is_zero() || is_over();
            if !gives_up {
                thread::park_timeout(left.min(LOOK));
            }
            shares = self.gathering.shares();
            if gives_up && !shares.called.contains(&ticket) {
                if let Some(own) = shares.clients.get_mut(self.client) {
                    own.waiting.retain(|waiting| waiting.ticket != ticket);
                }
                shares.forget_idle(self.client);
                // Others may have waited behind it.
                self.gathering.call(&mut shares);
                return None;
            }
        }
        Some(Portion {
            gatherer: self,
            bytes,
        })
    }
}

impl Shares {
    fn forget_idle(&mut self, client: &ClientName) {
        let own = self.clients.get(client);
        if own.is_some_and(|own| own.bytes == 0 && own.waiting.is_empty()) {
            self.clients.remove(client);
        }
    }
}

impl Drop for Portion<'_> {
    fn drop(&mut self) {
        let Gatherer { gathering, client } = self.gatherer;
        let mut shares = gathering.shares();
        shares.bytes -= self.bytes;
        if let Some(own) = shares.clients.get_mut(client) {
            own.bytes -= self.bytes;
        }
        shares.forget_idle(client);
        gathering.call(&mut shares);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn client(name: &str) -> ClientName {
        ClientName(name.to_owned())
    }

    fn soon() -> Instant {
        Instant::now()
    }

    /// Long enough for a loaded machine; only what is broken waits so long.
    fn some_day() -> Instant {
        Instant::now() + Duration::from_secs(120)
    }

    fn wait_for(gathering: &Gathering, waiting: usize) {
        let count = || -> usize {
            let shares = gathering.shares();
            shares.clients.values().map(|own| own.waiting.len()).sum()
        };
        let deadline = some_day();
        while count() != waiting {
            assert!(Instant::now() < deadline, "nobody waits");
            thread::yield_now();
        }
    }

    #[test]
    fn nobody_has_more_than_its_share_nor_all_more_than_there_is() {
        let gathering = Gathering::new(8, 4);
        let [a, b, c] = ["a", "b", "c"].map(client);
        let take = |client, bytes| gathering.of(client).take(bytes, soon(), || false);
        let first = take(&a, 3).expect("there is room");
        assert!(take(&a, 2).is_none(), "its share is 4");
        assert!(!gathering.of(&a).is_wanted(), "who gave up wants nothing");
        let second = take(&b, 4).expect("there is room");
        assert!(take(&c, 2).is_none(), "1 is left");
        drop(first);
        let third = take(&c, 2).expect("there is room");
        drop((second, third));
        assert!(gathering.shares().clients.is_empty());
        assert_eq!(gathering.shares().bytes, 0);
    }

    #[test]
    fn who_waits_for_its_share_keeps_no_other_out() {
        let gathering = Gathering::new(8, 4);
        let [a, b] = ["a", "b"].map(client);
        let held = gathering.of(&a).take(4, soon(), || false);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| gathering.of(&a).take(4, some_day(), || false).is_some());
            wait_for(&gathering, 1);
            assert!(gathering.of(&a).is_wanted());
            assert!(gathering.of(&b).take(4, soon(), || false).is_some());
            drop(held);
            assert!(waiting.join().expect("no panic"));
        });
    }

    #[test]
    fn what_only_others_without_room_in_their_share_wait_for_is_not_wanted() {
        let gathering = Gathering::new(8, 4);
        let [a, b, c] = ["a", "b", "c"].map(client);
        let take = |client, bytes| gathering.of(client).take(bytes, soon(), || false);
        let (held, _other) = (take(&a, 4), take(&b, 4));
        thread::scope(|scope| {
            let own = scope.spawn(|| gathering.of(&a).take(2, some_day(), || false).is_some());
            wait_for(&gathering, 1);
            assert!(
                !gathering.of(&b).is_wanted(),
                "it is a's share that is full"
            );
            assert!(gathering.of(&a).is_wanted());
            let third = scope.spawn(|| gathering.of(&c).take(1, some_day(), || false).is_some());
            wait_for(&gathering, 2);
            assert!(gathering.of(&b).is_wanted(), "c could have it");
            drop(held);
            assert!(own.join().expect("no panic") && third.join().expect("no panic"));
        });
    }

    #[test]
    fn a_large_request_gets_its_turn_before_small_ones_that_came_later() {
        let gathering = Gathering::new(4, 4);
        let [a, b, c] = ["a", "b", "c"].map(client);
        let held = gathering.of(&a).take(1, soon(), || false);
        thread::scope(|scope| {
            let large = scope.spawn(|| gathering.of(&b).take(4, some_day(), || false).is_some());
            wait_for(&gathering, 1);
            let small = gathering.of(&c).take(1, soon(), || false);
            assert!(small.is_none(), "there is room, but for the one before");
            drop(held);
            assert!(large.join().expect("no panic"));
        });
    }

    #[test]
    fn who_is_cut_off_waits_no_more_and_lets_those_behind_it_go() {
        let gathering = Gathering::new(4, 4);
        let [a, b, c] = ["a", "b", "c"].map(client);
        let _held = gathering.of(&a).take(1, soon(), || false);
        let is_cut = AtomicBool::new(false);
        thread::scope(|scope| {
            let cut = scope.spawn(|| {
                let is_over = || is_cut.load(Ordering::Acquire);
                let deadline = some_day();
                let taken = gathering.of(&b).take(4, deadline, is_over);
                taken.is_none() && Instant::now() < deadline
            });
            wait_for(&gathering, 1);
            let behind = scope.spawn(|| gathering.of(&c).take(1, some_day(), || false).is_some());
            wait_for(&gathering, 2);
            is_cut.store(true, Ordering::Release);
            assert!(cut.join().expect("no panic"));
            assert!(behind.join().expect("no panic"));
        });
    }
}
