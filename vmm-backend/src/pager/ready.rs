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
}

/// Waits until one of `own`, 32 at most, or of the connections has something to read, a connection can
/// send what it has queued, or the time is up.
pub(super) fn wait_ready<'a>(
    own: &[BorrowedFd<'_>],
    conns: impl Iterator<Item = (ServerIndex, &'a DataConn)>,
    timeout: Option<&Timespec>,
) -> io::Result<Ready> {
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
    match rustix::event::poll(&mut fds, timeout) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok(Ready::default()),
        Err(errno) => return Err(errno.into()),
    }
    let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
    let (own, conns) = fds.split_at(own.len());
    let mut conns = conns.iter();
    servers.retain(|_| conns.next().is_some_and(is_ready));
    let own = own.iter().rev();
    Ok(Ready {
        own: own.fold(0, |bits, fd| bits << 1 | u32::from(is_ready(fd))),
        servers,
    })
}
