//! The client's side of memory servers.
//!
//! A [`Session`] keeps one server: it leases slabs, renews the lease, connects again when the
//! connection is lost, and opens [`DataConn`]s. What happens is told as [`SessionEvent`]s. Bytes
//! move over data connections alone, each owned by one thread of the pager.
//!
//! The module knows nothing of pages: it moves (slab, offset, length), and never repeats a request
//! by itself. After an error a data connection is dead; what was in flight on it may or may not
//! have happened, and is its owner's to submit again on the next one. The server admits a new
//! session's connections only after every older one has ended, so no old write lands later.
//!
//! Data goes over RDMA where both ends have a device for it and the address does not say otherwise, and
//! over TCP elsewhere: which it is, is settled at each greeting, for all connections that follow it.
//! Where it came to be TCP though there is a device, the session greets anew now and then, to return.

use std::sync::Arc;
use std::time::Duration;

use outram_wire::identity::{Change, Identity};
use outram_wire::server::{DiskId, InstanceId, Opening, Refusal, SessionSecret, SlabId};
use outram_wire::units::VmId;
use outram_wire::verbs::Choice;
use rustls::ClientConfig;

mod connect;
mod connection;
mod error;
mod exchange;
mod keeper;
mod opener;
mod parting;
mod session;
#[cfg(test)]
mod session_tests;
mod tcp;
#[cfg(test)]
pub(crate) mod test_server;
mod verbs;
mod verbs_pause;

pub use connection::{DataConn, ExtentError, SubmitError};
pub use error::RemoteError;
pub use outram_wire::server::{AddressError, Extent, ServerAddress};
pub use session::{Former, NewSession, Promise, Session, SessionStatus};

/// Bytes of a request for pages that nobody waits for yet, at most: what many cost together is spread over
/// them by then, and the first can be used while the next request's are on their way. The answer, with its
/// head, is what Linux hands to a network device, or to a socket of this host, in one piece (64 KiB: at
/// 64 KiB and a head, reading was a sixth slower).
pub const AHEAD_BYTES: u32 = 60 << 10;

/// What every session of a guest shares.
#[derive(Clone, Debug)]
pub struct RemoteConfig {
    /// The servers; a session is of one of them, by index.
    pub addresses: Vec<ServerAddress>,
    /// This host's identity, as its files are whenever a connection is made.
    pub identity: Arc<Identity<ClientConfig>>,
    /// The guest.
    pub vm: VmId,
    /// Opens the sessions, and proves that they are ours after a reconnection. A backend that is to
    /// take over from its predecessor keeps it where that one's page table lies.
    pub secret: SessionSecret,
    /// The guest comes by migration: the source's backend may hold a session of its own.
    pub arrives: bool,
    /// Data connections to each server; their roles are 0 up to this.
    pub data_connections: usize,
    /// Which RDMA device may be used.
    pub rdma: Choice,
    /// Times.
    pub timing: Timing,
}

/// Looks whether this host's certificates were renewed, and says so. Connections that stand go on.
pub fn refresh(identity: &Identity<ClientConfig>) {
    match identity.refresh() {
        Change::None => {}
        Change::Taken => tracing::info!("renewed certificates are taken"),
        Change::Refused(reason) => {
            tracing::warn!(
                "the certificates are no good; those that were good before, if any, stay in use: {reason}"
            );
        }
    }
}

/// A far-memory disk that a session is to be of.
#[derive(Clone, Debug)]
pub struct DiskOpening {
    /// Which.
    pub disk: DiskId,
    /// Shows that it is ours.
    pub secret: SessionSecret,
    /// How it is opened at first; after a lost connection it is resumed.
    pub opening: Opening,
}

/// How long a session waits for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// For a connection to stand, TLS and greeting included.
    pub connect: Duration,
    /// For the answer to a request.
    pub answer: Duration,
    /// How much longer than that a server may take to greet a new session and to promise it memory, once
    /// its machine has answered. A session that was greeted connects again without.
    pub patience: Duration,
    /// Between two renewals at most; a third of the lease's time-out if that is shorter.
    pub renew: Duration,
    /// First pause before connecting again; doubles, with jitter, up to `retry_max`.
    pub retry_min: Duration,
    /// Longest pause before connecting again.
    pub retry_max: Duration,
}

/// How much longer than a known one a server may take to greet a guest that starts: it may be freeing the slabs of
/// a former one, or be as busy as this host, which a start then waits for.
pub(crate) const FIRST_PATIENCE: Duration = Duration::from_secs(25);

impl Default for Timing {
    /// Chosen so that a server out of reach is noticed within seconds, and found again within two.
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            answer: Duration::from_secs(4),
            patience: Duration::ZERO,
            renew: Duration::from_secs(1),
            retry_min: Duration::from_millis(50),
            retry_max: Duration::from_secs(2),
        }
    }
}

/// What a session tells its owner. `server` is the index it was started with.
#[derive(Debug)]
pub enum SessionEvent {
    /// The control connection stands. The first one also comes from [`NewSession::greet`].
    Up {
        /// Which server.
        server: usize,
        /// This life of it.
        instance: InstanceId,
        /// Bytes of its slabs.
        slab_bytes: u64,
        /// Every slab that it keeps for us.
        held: Vec<SlabId>,
    },
    /// A data connection for the role: replaces the former one.
    DataConnection {
        /// Which server.
        server: usize,
        /// Whose connection it is to be.
        role: usize,
        /// The connection.
        conn: DataConn,
    },
    /// The control connection is lost, or could not be made again; it will be tried again. Data
    /// connections may go on for a while.
    Down {
        /// Which server.
        server: usize,
        /// Why.
        error: Arc<RemoteError>,
    },
    /// These slabs are gone for good: the server started anew, or the lease had ended. Comes before
    /// the `Up` that it was learned with.
    Lost {
        /// Which server.
        server: usize,
        /// Which slabs.
        slabs: Vec<SlabId>,
    },
    /// A slab that was requested: it reads as zeros.
    Leased {
        /// Which server.
        server: usize,
        /// The new slab.
        slab: SlabId,
    },
    /// A slab that was requested is not to be had; the request is over.
    LeaseRefused {
        /// Which server.
        server: usize,
        /// Why.
        reason: Refusal,
    },
    /// The server wants this slab back: what lies in it is to be moved, then it is to be released.
    Vacate {
        /// Which server.
        server: usize,
        /// Which slab.
        slab: SlabId,
    },
    /// The device that data connections went over is being removed, which may wait until nobody has it
    /// open: they are to be dropped. `Down` came before.
    Withdrawn {
        /// Which server.
        server: usize,
    },
    /// The server announced that it is being stopped; `Down` follows.
    Closing {
        /// Which server.
        server: usize,
    },
}
