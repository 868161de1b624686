//! What a shard's thread looks at while it does not sleep: its userfaultfd, its messages, and what it has asked its
//! memory servers for.
//!
//! Each by the very call that takes what is there, or by none. To ask for all of them at once whether something is
//! there, and take it then, costs a fault two calls more, which the guest waits for.

use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

use super::demand::DemandReads;
use super::inbox::Messages;
use super::ready::{Ready, Watched};
use super::shard_thread::{MESSAGES, ShardEvent, UFFD};
use super::spin::Lookout;
use super::uffd::{Events, Uffd};

/// What a shard's thread waits for.
pub(super) struct Awaited<'a> {
    /// Its userfaultfd.
    pub(super) uffd: &'a Uffd,
    /// Where messages of it are read to.
    pub(super) events: &'a mut Events,
    /// What it is told.
    pub(super) messages: &'a Messages<ShardEvent>,
    /// Its demand reads, none of which wait for a socket to take them.
    pub(super) demand: &'a mut DemandReads,
    /// What was found.
    pub(super) ready: Ready,
}

impl Lookout for Awaited<'_> {
    /// A connection over which nothing was asked for is only looked at before sleeping.
    fn look(&mut self, may_sleep: bool) -> io::Result<bool> {
        if may_sleep {
            // In the order of their numbers.
            let own = [self.uffd.as_fd(), self.messages.as_fd()];
            self.ready = Watched::new(&own, self.demand.lines()).wait(None)?;
            return Ok(!self.ready.is_nothing());
        }
        if self.uffd.look(self.events) {
            self.ready.add_own(UFFD);
        }
        if self.messages.have_rung() {
            self.ready.add_own(MESSAGES);
        }
        self.demand.look(&mut self.ready.servers);
        Ok(!self.ready.is_nothing())
    }

    fn offer(&mut self) {
        std::thread::yield_now();
    }

    fn now(&self) -> Instant {
        Instant::now()
    }
}
