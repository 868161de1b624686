//! What a shard's thread waits for: its userfaultfd, its messages, and its memory servers.
//!
//! While it does not sleep, each is looked at by the very call that takes what is there, or by none. To ask for all
//! of them at once whether something is there, and take it then, costs a fault two calls more, which the guest
//! waits for.

use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::event::Timespec;

use super::demand::DemandReads;
use super::inbox::Messages;
use super::ready::{Ready, Watched};
use super::shard_thread::{ShardEvent, ShardPorts};
use super::spin::Lookout;
use super::uffd::{Events, Uffd};

/// Numbers, in what is ready, of what a shard's thread waits for beside its connections.
pub(super) const UFFD: usize = 0;
pub(super) const MESSAGES: usize = 1;

/// What a shard's thread waits for.
pub(super) struct Awaited<'a> {
    /// Its userfaultfd.
    uffd: &'a Uffd,
    /// Where messages of it are read to.
    events: &'a mut Events,
    /// What it is told.
    messages: &'a Messages<ShardEvent>,
    /// Its demand reads.
    demand: &'a mut DemandReads,
    /// What was found.
    pub(super) ready: Ready,
}

impl<'a> Awaited<'a> {
    /// All that a shard's thread waits for; nothing of it is found yet.
    pub(super) fn of(
        ports: &'a mut ShardPorts,
        messages: &'a Messages<ShardEvent>,
        events: &'a mut Events,
    ) -> Self {
        Self {
            uffd: &ports.uffd,
            events,
            messages,
            demand: &mut ports.demand,
            ready: Ready::default(),
        }
    }

    /// Sleeps until something is ready, or a socket takes what waits for it, or the time is up.
    pub(super) fn sleep(&mut self, timeout: Option<&Timespec>) -> io::Result<()> {
        // In the order of their numbers.
        let own = [self.uffd.as_fd(), self.messages.as_fd()];
        self.ready = Watched::new(&own, self.demand.lines()).wait(timeout)?;
        Ok(())
    }
}

impl Lookout for Awaited<'_> {
    /// A connection over which nothing was asked for is only looked at before sleeping.
    fn look(&mut self, may_sleep: bool) -> io::Result<bool> {
        if may_sleep {
            self.sleep(None)?;
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
