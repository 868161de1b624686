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

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use outram_wire::server::{DEFAULT_PORT, InstanceId, Refusal, SessionSecret, SlabId};
use outram_wire::tls::TlsFiles;
use outram_wire::units::VmId;

mod connect;
mod connection;
mod error;
mod exchange;
mod keeper;
mod opener;
mod session;
#[cfg(test)]
mod session_tests;

pub use connect::observe;
pub use connection::{DataConn, ExtentError, SubmitError};
pub use error::{Chain, RemoteError};
pub use outram_wire::server::Extent;
pub use session::{Session, SessionStatus};

/// Where a memory server listens: `host`, `host:port`, `192.0.2.1:port` or `[2001:db8::1]:port`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServerAddress {
    host: String,
    port: u16,
}

/// The text is no server's address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not a server's address: expected host:port, such as mem1.example:{DEFAULT_PORT}, 192.0.2.1:{DEFAULT_PORT} or [2001:db8::1]:{DEFAULT_PORT}"
)]
pub struct AddressError(String);

impl ServerAddress {
    /// The host's name or address, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl FromStr for ServerAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let bad = || AddressError(text.to_owned());
        let (host, rest) = match text.strip_prefix('[') {
            Some(inner) => {
                let (host, rest) = inner.split_once(']').ok_or_else(bad)?;
                let _: std::net::Ipv6Addr = host.parse().map_err(|_| bad())?;
                (host, rest)
            }
            None => text.split_at(text.find(':').unwrap_or(text.len())),
        };
        let port = match rest.strip_prefix(':') {
            None if rest.is_empty() => DEFAULT_PORT,
            None => return Err(bad()),
            Some(digits) if digits.bytes().all(|digit| digit.is_ascii_digit()) => {
                digits.parse().map_err(|_| bad())?
            }
            Some(_) => return Err(bad()),
        };
        let named = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        let legal = host.contains(':') || host.chars().all(named);
        if host.is_empty() || !legal || port == 0 {
            return Err(bad());
        }
        Ok(Self {
            host: host.to_owned(),
            port,
        })
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// What every session of a guest shares.
#[derive(Clone, Debug)]
pub struct RemoteConfig {
    /// The servers; a session is of one of them, by index.
    pub addresses: Vec<ServerAddress>,
    /// This host's identity.
    pub tls: TlsFiles,
    /// The guest.
    pub vm: VmId,
    /// Opens the sessions, and proves that they are ours after a reconnection. A backend that is to
    /// take over from its predecessor keeps it where that one's page table lies.
    pub secret: SessionSecret,
    /// Data connections to each server; their roles are 0 up to this.
    pub data_connections: usize,
    /// Times.
    pub timing: Timing,
}

/// How long a session waits for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// For a connection to stand, TLS and greeting included.
    pub connect: Duration,
    /// For the answer to a request.
    pub answer: Duration,
    /// Between two renewals at most; a third of the lease's time-out if that is shorter.
    pub renew: Duration,
    /// First pause before connecting again; doubles, with jitter, up to `retry_max`.
    pub retry_min: Duration,
    /// Longest pause before connecting again.
    pub retry_max: Duration,
}

impl Default for Timing {
    /// Chosen so that a server out of reach is noticed within seconds, and found again within two.
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            answer: Duration::from_secs(4),
            renew: Duration::from_secs(1),
            retry_min: Duration::from_millis(50),
            retry_max: Duration::from_secs(2),
        }
    }
}

/// What a session tells its owner. `server` is the index it was started with.
#[derive(Debug)]
pub enum SessionEvent {
    /// The control connection stands. The first one also comes from [`Session::start`].
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
    /// The server announced that it is being stopped; `Down` follows.
    Closing {
        /// Which server.
        server: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_keep_their_form() {
        for (text, shown) in [
            ("mem1:7000", "mem1:7000"),
            ("mem1.example", "mem1.example:7741"),
            ("192.0.2.1:80", "192.0.2.1:80"),
            ("[2001:db8::1]:80", "[2001:db8::1]:80"),
            ("[::1]", "[::1]:7741"),
        ] {
            let address: ServerAddress = text.parse().expect(text);
            assert_eq!(address.to_string(), shown);
        }
    }

    #[test]
    fn nonsense_is_no_address() {
        for text in [
            "", ":1", "a:", "a:0", "a:65536", "a:+1", "::1", "[::1", "[a]:1", "a b:1", "a/b:1",
            "[::1]x",
        ] {
            let error = text.parse::<ServerAddress>().expect_err(text).to_string();
            assert!(error.contains("expected host:port"), "{error}");
        }
    }
}
