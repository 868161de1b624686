//! RDMA: what a backend and a memory server share of verbs(7).
//!
//! A [`Choice`] leads to a device's [`Port`] by what sysfs says, [`link`] to how all ports are; [`Domain`] is a protection domain on it,
//! [`Region`] memory registered there; a [`Responder`] lets its peer read and write what is registered,
//! an [`Initiator`] does so with its peer's memory, through buffers of its own. What the two ends have to
//! know of each other is an [`End`]; how it travels is not known here.
//!
//! Bound through `rdma-mummy-sys`, which looks for libibverbs when the program starts: so that one
//! binary runs everywhere. (The crate `ibverbs` links to it, and its safe interface has no one-sided
//! transfers.) All of its calls are in `device`, `queue_pair` and
//! `initiator`.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr};

use serde::{Deserialize, Serialize};

mod device;
mod initiator;
pub mod link;
mod network;
mod port;
mod queue_pair;

pub use device::{Access, Buffer, Domain, PathMtu, Presence, Region, Remote};
pub use initiator::{Initiator, PostError, Stretch};
pub use link::{Link, Network};
pub use port::{Choice, ChoiceError, Port};
pub use queue_pair::Responder;

/// Why RDMA is of no use at the moment.
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    /// There is no port as it is wanted.
    #[error("no RDMA device can be used: {0}")]
    NoPort(String),
    /// The device, its driver or libibverbs refuses.
    #[error("the RDMA device {device} refuses {what}")]
    Refused {
        /// The device's name.
        device: String,
        /// What was asked of it.
        what: &'static str,
        /// Its reason.
        source: io::Error,
    },
    /// A transfer failed, and with it the queue pair.
    #[error("a transfer over RDMA failed: {0}")]
    Failed(Failure),
}

/// How a transfer failed, by the status of its completion (`enum ibv_wc_status`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The peer's memory is not ours to touch: a border, a key, or a lease that ended.
    RemoteAccess,
    /// The peer does not answer.
    Unanswered,
    /// Ended with the queue pair, after another's failure.
    Flushed,
    /// A completion that belongs to no transfer.
    Unknown,
    /// Any other.
    Status(u32),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RemoteAccess => f.write_str("the peer's memory may not be accessed there"),
            Self::Unanswered => f.write_str("the peer does not answer"),
            Self::Flushed => f.write_str("the queue pair has ended"),
            Self::Unknown => f.write_str("a completion of nothing that was asked for"),
            Self::Status(status) => write!(f, "completion status {status}"),
        }
    }
}

/// A port's address: of RoCE v2 an IP address, an IPv4 one mapped to IPv6. Written as the latter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Gid(pub Ipv6Addr);

impl From<IpAddr> for Gid {
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => Self(address.to_ipv6_mapped()),
            IpAddr::V6(address) => Self(address),
        }
    }
}

/// One end of a queue pair, as the other has to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// Its port's address.
    pub gid: Gid,
    /// Its port's local identifier, within an InfiniBand subnet.
    pub lid: u16,
    /// The queue pair's number, of 24 bits.
    pub number: u32,
    /// The first packet's number, of 24 bits.
    pub first_packet: u32,
    /// The port's path MTU, as `enum ibv_mtu` counts: 1 is 256 bytes, 5 is 4096.
    pub mtu: u32,
    /// Reads of its peer's that it takes at once.
    pub reads: u8,
}

impl End {
    /// Whether the numbers are such as there can be; they come from a peer.
    pub fn is_possible(&self) -> bool {
        let bits = |number: u32| number < 1 << 24;
        bits(self.number)
            && bits(self.first_packet)
            && (1..=5).contains(&self.mtu)
            && self.reads > 0
            && !self.gid.0.is_unspecified()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end() -> End {
        End {
            gid: Gid::from(IpAddr::from([10, 0, 0, 2])),
            lid: 0,
            number: 17,
            first_packet: 0xff_ffff,
            mtu: 3,
            reads: 16,
        }
    }

    #[test]
    fn an_end_has_this_text() {
        let text = serde_json::to_string(&end()).expect("JSON");
        assert_eq!(
            text,
            r#"{"gid":"::ffff:10.0.0.2","lid":0,"number":17,"first_packet":16777215,"mtu":3,"reads":16}"#
        );
        assert_eq!(serde_json::from_str::<End>(&text).expect("own"), end());
    }

    #[test]
    fn impossible_ends_are_told_apart() {
        assert!(end().is_possible());
        let none = Gid(Ipv6Addr::UNSPECIFIED);
        for end in [
            End {
                number: 1 << 24,
                ..end()
            },
            End {
                first_packet: 1 << 24,
                ..end()
            },
            End { mtu: 0, ..end() },
            End { mtu: 6, ..end() },
            End { reads: 0, ..end() },
            End { gid: none, ..end() },
        ] {
            assert!(!end.is_possible(), "{end:?}");
        }
    }
}
