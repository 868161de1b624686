//! Waiting for descriptors and connections at once.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::engine::slots::ServerIndex;
use crate::remote::DataConn;

/// Waits until one of `own` or of the connections has something to read, a connection can send
/// what it has queued, or the time is up. Returns the servers whose connections are ready.
pub(super) fn wait_ready<'a>(
    own: &[BorrowedFd<'_>],
    conns: impl Iterator<Item = (ServerIndex, &'a DataConn)>,
    timeout: Option<&Timespec>,
) -> io::Result<Vec<ServerIndex>> {
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
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    let ready = fds[own.len()..]
        .iter()
        .zip(servers)
        .filter(|(fd, _)| !fd.revents().is_empty());
    Ok(ready.map(|(_, server)| server).collect())
}
