//! Waiting for descriptors and connections at once.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::engine::slots::ServerIndex;
use crate::remote::DataConn;

/// What can be read, or sent.
#[derive(Debug, Default)]
pub(super) struct Ready {
    /// Bit by bit, of the caller's own descriptors.
    own: u32,
    /// Servers whose connections are ready.
    pub(super) servers: Vec<ServerIndex>,
}

impl Ready {
    /// Whether the caller's own descriptor of this number is: reading one that is not would cost every
    /// fault a system call.
    pub(super) fn has_own(&self, number: usize) -> bool {
        self.own & (1 << number) != 0
    }

    /// Notes that it is.
    pub(super) fn add_own(&mut self, number: usize) {
        self.own |= 1 << number;
    }

    /// Whether connections are, and nothing of the caller's own.
    pub(super) fn is_of_servers_alone(&self) -> bool {
        self.own == 0 && !self.servers.is_empty()
    }

    /// Whether nothing is.
    pub(super) fn is_nothing(&self) -> bool {
        self.own == 0 && self.servers.is_empty()
    }
}

/// Descriptors and connections to be watched.
pub(super) struct Watched<'a> {
    fds: Vec<PollFd<'a>>,
    /// Of how many the caller's own are.
    own: usize,
    /// Of the others.
    servers: Vec<ServerIndex>,
}

impl<'a> Watched<'a> {
    /// `own`, 32 at most, and connections: these also for being able to send what they have queued.
    pub(super) fn new(
        own: &[BorrowedFd<'a>],
        conns: impl Iterator<Item = (ServerIndex, &'a DataConn)>,
    ) -> Self {
        let mut fds: Vec<PollFd<'_>> = own
            .iter()
            .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN))
            .collect();
        let mut servers = Vec::with_capacity(2);
        for (server, conn) in conns {
            let flags = if conn.wants_write() {
                PollFlags::IN | PollFlags::OUT
            } else {
                PollFlags::IN
            };
            fds.push(PollFd::from_borrowed_fd(conn.as_fd(), flags));
            servers.push(server);
        }
        Self {
            fds,
            own: own.len(),
            servers,
        }
    }

    /// Waits until something is ready or the time is up.
    pub(super) fn wait(mut self, timeout: Option<&Timespec>) -> io::Result<Ready> {
        match rustix::event::poll(&mut self.fds, timeout) {
            // When interrupted, nothing is noted of any.
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(self.ready()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn ready(mut self) -> Ready {
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let (own, conns) = self.fds.split_at(self.own);
        let mut conns = conns.iter();
        self.servers.retain(|_| conns.next().is_some_and(is_ready));
        let own = own.iter().rev();
        Ready {
            own: own.fold(0, |bits, fd| bits << 1 | u32::from(is_ready(fd))),
            servers: self.servers,
        }
    }
}
