//! One data connection, whatever it goes over.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use outram_wire::server::data::DataError;
use outram_wire::server::{Extent, SlabId};

use super::tcp::TcpConn;
use super::verbs::VerbsConn;
use super::{RemoteError, ServerAddress};

/// Why a request was not submitted.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// Too much waits for the socket: submit again once [`DataConn::wants_write`] says no.
    #[error("the connection has as much queued as it may")]
    QueueFull,
    /// The request breaks the protocol's bounds; nothing was sent.
    #[error("the request is not allowed")]
    Illegal(#[from] DataError),
    /// The id belongs to a request in flight; nothing was sent.
    #[error("request {0} is in flight already")]
    IdInUse(u64),
    /// The connection is dead.
    #[error(transparent)]
    Dead(#[from] RemoteError),
}

/// The server did not carry out a request; nothing of it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExtentError {
    /// The slab is not leased to us (any more).
    #[error("extent {index}: slab {slab} is not leased to this guest")]
    NotLeased {
        /// The extent's index in the request.
        index: usize,
        /// Its slab.
        slab: SlabId,
    },
    /// The range ends beyond the slab.
    #[error("extent {index}: the range reaches past the end of slab {slab}")]
    OutOfRange {
        /// The extent's index in the request.
        index: usize,
        /// Its slab.
        slab: SlabId,
    },
}

/// A data connection. Owned by one thread; never blocks.
pub struct DataConn {
    carrier: Carrier,
    /// The greeting that it was opened after.
    pub(super) generation: u64,
}

/// What every carrier keeps account of.
pub(super) struct Line {
    pub(super) server: ServerAddress,
    /// Bytes sent and received so far; over TCP with framing.
    pub(super) sent_bytes: u64,
    pub(super) received_bytes: u64,
    /// Whether an error has ended the connection.
    pub(super) dead: bool,
}

impl Line {
    pub(super) fn new(server: ServerAddress) -> Self {
        Self {
            server,
            sent_bytes: 0,
            received_bytes: 0,
            dead: false,
        }
    }

    pub(super) fn check_alive(&self) -> Result<(), RemoteError> {
        if self.dead {
            return Err(RemoteError::Data {
                server: self.server.clone(),
                source: io::ErrorKind::NotConnected.into(),
            });
        }
        Ok(())
    }

    /// Ends the connection for an error of the system's.
    pub(super) fn die(&mut self, source: io::Error) -> RemoteError {
        self.dead = true;
        RemoteError::Data {
            server: self.server.clone(),
            source,
        }
    }

    /// Ends the connection for something that the peer did.
    pub(super) fn broken(&mut self, what: String) -> RemoteError {
        self.dead = true;
        RemoteError::Protocol {
            server: self.server.clone(),
            what,
        }
    }
}

enum Carrier {
    Tcp(Box<TcpConn>),
    Verbs(Box<VerbsConn>),
}

/// Calls the carrier's method of the same name.
macro_rules! carried {
    ($self:ident . $method:ident ( $($argument:expr),* )) => {
        match &$self.carrier {
            Carrier::Tcp(conn) => conn.$method($($argument),*),
            Carrier::Verbs(conn) => conn.$method($($argument),*),
        }
    };
    (mut $self:ident . $method:ident ( $($argument:expr),* )) => {
        match &mut $self.carrier {
            Carrier::Tcp(conn) => conn.$method($($argument),*),
            Carrier::Verbs(conn) => conn.$method($($argument),*),
        }
    };
}

impl std::fmt::Debug for DataConn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DataConn")
            .field("rdma", &self.is_verbs())
            .field("pending", &self.pending())
            .field("dead", &self.is_dead())
            .finish_non_exhaustive()
    }
}

impl AsFd for DataConn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        carried!(self.as_fd())
    }
}

impl AsRawFd for DataConn {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl From<VerbsConn> for DataConn {
    fn from(conn: VerbsConn) -> Self {
        Self {
            carrier: Carrier::Verbs(Box::new(conn)),
            generation: 0,
        }
    }
}

impl DataConn {
    /// Most memory that a connection's buffers take: over TCP a full queue and the largest reply. One
    /// that reads single pages stays at [`DataConn::MEMORY_BYTES`].
    pub const MEMORY_BYTES_MAX: usize = TcpConn::MEMORY_BYTES_MAX;
    /// Memory that a connection's buffers take at first, over TCP.
    pub const MEMORY_BYTES: usize = TcpConn::MEMORY_BYTES;

    /// Takes a socket that the server has admitted and that does not block.
    pub(super) fn new(server: ServerAddress, socket: TcpStream) -> Self {
        Self {
            carrier: Carrier::Tcp(Box::new(TcpConn::new(server, socket))),
            generation: 0,
        }
    }

    /// One that was opened after this greeting, for tests of who uses which.
    #[cfg(test)]
    pub(crate) fn of_greeting(server: ServerAddress, socket: TcpStream, generation: u64) -> Self {
        Self {
            generation,
            ..Self::new(server, socket)
        }
    }

    /// Whether it goes over RDMA.
    pub(super) fn is_verbs(&self) -> bool {
        matches!(self.carrier, Carrier::Verbs(_))
    }

    /// Which greeting of its session it was opened after: the server's fence lies between two.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Asks for the bytes of `extents`; the reply under `id` holds them one after the other.
    pub fn submit_read(&mut self, id: u64, extents: &[Extent]) -> Result<(), SubmitError> {
        carried!(mut self.submit_read(id, extents))
    }

    /// The same, but where the carrier sends by system calls, the request waits for [`DataConn::flush`]:
    /// many go out by one then.
    pub fn queue_read(&mut self, id: u64, extents: &[Extent]) -> Result<(), SubmitError> {
        match &mut self.carrier {
            Carrier::Tcp(conn) => conn.queue_read(id, extents),
            Carrier::Verbs(conn) => conn.submit_read(id, extents),
        }
    }

    /// Sends `payload`, whose pieces together are as long as `extents`, to be stored there.
    pub fn submit_write(
        &mut self,
        id: u64,
        extents: &[Extent],
        payload: &[&[u8]],
    ) -> Result<(), SubmitError> {
        carried!(mut self.submit_write(id, extents, payload))
    }

    /// Whether bytes wait for the socket to become writable: poll for that, then [`Self::flush`].
    pub fn wants_write(&self) -> bool {
        match &self.carrier {
            Carrier::Tcp(conn) => conn.wants_write(),
            // The device has whatever was submitted.
            Carrier::Verbs(_) => false,
        }
    }

    /// Sends what was queued, as far as the socket takes it.
    pub fn flush(&mut self) -> Result<(), RemoteError> {
        match &mut self.carrier {
            Carrier::Tcp(conn) => conn.flush(),
            Carrier::Verbs(conn) => conn.line.check_alive(),
        }
    }

    /// Takes what has arrived and calls `on_completion` once for each request that has ended: with
    /// the bytes read (none for a write), which it may change in place, or with why the server did
    /// not carry it out.
    pub fn receive(
        &mut self,
        on_completion: impl FnMut(u64, Result<&mut [u8], ExtentError>),
    ) -> Result<(), RemoteError> {
        carried!(mut self.receive(on_completion))
    }

    /// Whether something has arrived, or the connection has failed: for [`Self::receive`], which is to be called
    /// then. What has arrived is taken from the carrier, so that it costs no more to know than to receive.
    pub fn look(&mut self) -> bool {
        carried!(mut self.look())
    }

    /// Requests in flight.
    pub fn pending(&self) -> usize {
        carried!(self.pending())
    }

    /// Bytes sent so far; over TCP with framing.
    pub fn sent_bytes(&self) -> u64 {
        self.line().sent_bytes
    }

    /// Bytes received so far; over TCP with framing.
    pub fn received_bytes(&self) -> u64 {
        self.line().received_bytes
    }

    /// Whether an error has ended the connection.
    pub fn is_dead(&self) -> bool {
        self.line().dead
    }

    fn line(&self) -> &Line {
        match &self.carrier {
            Carrier::Tcp(conn) => &conn.line,
            Carrier::Verbs(conn) => &conn.line,
        }
    }
}
