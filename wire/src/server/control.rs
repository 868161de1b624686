//! Messages on the control connection between a backend and a memory server.
//!
//! A frame is a 32-bit little-endian length, then that many bytes of JSON. The client's first
//! message is [`ClientMessage::Hello`]; the server answers [`ServerMessage::Welcome`] or
//! [`ServerMessage::Refused`]. After it each [`ClientMessage::Request`] is answered by one
//! [`ServerMessage::Reply`] with the same id, in order. [`ServerMessage::Vacate`] and
//! [`ServerMessage::Closing`] come unasked. Fields may be added within a version; a reader ignores
//! those it does not know.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::{ClientName, DiskId, InstanceId, SessionSecret, SlabId, Token};
use crate::units::{VmId, format_size};
use crate::verbs::{End, Remote};

/// The versions of these messages that this build speaks. Version 1: the first. Version 2: RDMA
/// ([`Request::Key`], [`Request::QueuePair`]); with a peer of version 1, data goes over TCP alone.
pub const CONTROL_VERSIONS: RangeInclusive<u32> = 1..=2;

/// The version from which on RDMA is spoken of.
pub const VERBS_VERSION: u32 = 2;

/// Longest frame a server accepts, in bytes: a client's messages are all short.
pub const MAX_CLIENT_FRAME_BYTES: usize = 4 * 1024;

/// Longest frame a client accepts, in bytes: room for a [`Welcome`] that lists [`MAX_SLABS`].
pub const MAX_SERVER_FRAME_BYTES: usize = 1024 * 1024;

/// Smallest slab that a server lends, in bytes: leases of less are not worth their bookkeeping.
pub const MIN_SLAB_BYTES: u64 = 64 << 10;

/// Most slabs that a server lends to one guest or disk (2.4 TiB of the default size).
pub const MAX_SLABS: u64 = 40_000;

/// What a client sends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClientMessage {
    /// Opens the conversation; once, and first.
    Hello(Hello),
    /// Asks for something.
    Request {
        /// Chosen by the client, repeated in the answer.
        id: u64,
        /// What is asked.
        request: Request,
    },
}

/// Who is calling, and in which versions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// Lowest version of these messages that the client speaks.
    pub version_min: u32,
    /// Highest version of these messages that the client speaks.
    pub version_max: u32,
    /// What the connection is for.
    pub purpose: Purpose,
}

/// What a control connection is for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Purpose {
    /// A backend that stores its guest's pages.
    Guest {
        /// The guest.
        vm: VmId,
        /// Opens the session, or proves that it is the client's own.
        secret: SessionSecret,
        /// The guest comes by migration: another session of it may stand until it has come.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        arrives: bool,
    },
    /// A backend that stores the contents of its guest's far-memory disk. A disk is an object of
    /// its own: it outlives the connection, and the guest's session, until it is dropped.
    Disk {
        /// The disk.
        disk: DiskId,
        /// Known to whoever may use the disk; set by whoever creates it.
        secret: SessionSecret,
        /// How it is opened.
        opening: Opening,
    },
    /// Only [`Request::Stats`] and [`Request::DropDisk`] will be asked.
    Observe,
}

/// How a disk is opened. One backend at a time has it: the latest creation or claim ends the
/// connections of the one before, and nothing that was sent on those lands later.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Opening {
    /// As a new, empty disk. What a parked disk of the same name holds is dropped; one that is in
    /// use is not touched.
    Create(DiskShape),
    /// As it was left: parked, or still in another backend's use.
    Claim,
    /// Again, after a lost connection; refused if another claimed the disk since.
    Resume {
        /// [`DiskWelcome::claim`] of the greeting before.
        claim: u64,
    },
}

/// What is kept about a disk for whoever claims it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskShape {
    /// Bytes that a guest sees.
    pub bytes: u64,
    /// Which part of the disk lies here, counted from 0.
    pub part: u32,
    /// Parts, each on a server of its own.
    pub parts: u32,
}

/// What the claimant of a disk is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskWelcome {
    /// Names this claim among all that the server ever granted.
    pub claim: u64,
    /// As the disk was created.
    pub shape: DiskShape,
}

/// What a client may ask.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Nothing but to keep the lease: every request does.
    Renew,
    /// Have so many bytes set aside for this guest: the total, not an addition. Rounded up to whole
    /// slabs, and never below what is leased.
    Reserve {
        /// The total wanted.
        bytes: u64,
    },
    /// Lease one more slab, out of the reservation.
    Lease,
    /// Give a slab back.
    Release {
        /// Which.
        slab: SlabId,
    },
    /// A token for one data connection.
    DataToken,
    /// What a slab is called over RDMA, which it is registered for if it was not. From version 2 on.
    Key {
        /// Which.
        slab: SlabId,
    },
    /// A queue pair in place of a data connection, by which the client reads and writes its slabs by
    /// itself. It ends where a data connection would be ended. From version 2 on.
    QueuePair {
        /// The client's end.
        end: End,
    },
    /// Report what is lent.
    Stats,
    /// From an observer: give back all that a parked disk holds. Only the host that used it last
    /// may, told by its certificate.
    DropDisk {
        /// Which.
        disk: DiskId,
    },
    /// End the session: every slab and the reservation are given back.
    Goodbye,
}

/// What a server sends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServerMessage {
    /// The client is admitted.
    Welcome(Welcome),
    /// The client is not admitted; the connection ends.
    Refused(Refusal),
    /// The answer to the request of that id.
    Reply {
        /// The request's id.
        id: u64,
        /// What came of it.
        reply: Reply,
    },
    /// The server's own machine needs memory: the client shall move what lies in the slab and
    /// release it.
    Vacate {
        /// Which slab.
        slab: SlabId,
    },
    /// The server is being stopped; everything it lent ends with it.
    Closing,
}

/// What an admitted client is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    /// The version spoken from here on.
    pub version: u32,
    /// This life of the server.
    pub instance: InstanceId,
    /// Bytes of a slab.
    pub slab_bytes: u64,
    /// Milliseconds after the last message at which the lease ends.
    pub lease_timeout_ms: u64,
    /// Whether a session was found that the client had before.
    pub resumed: bool,
    /// Bytes set aside for the client.
    pub reserved_bytes: u64,
    /// Slabs that the client holds.
    pub held: Vec<SlabId>,
    /// About the disk, to [`Purpose::Disk`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskWelcome>,
    /// Whether the server has an RDMA device for this client.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub verbs: bool,
}

/// What came of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// To [`Request::Renew`], [`Request::Release`], [`Request::DropDisk`] and [`Request::Goodbye`].
    Done,
    /// To [`Request::Reserve`]: so much is set aside now.
    Reserved {
        /// The total, in whole slabs.
        bytes: u64,
    },
    /// To [`Request::Lease`]. The slab reads as zeros.
    Leased {
        /// The new slab.
        slab: SlabId,
    },
    /// To [`Request::DataToken`].
    DataToken {
        /// Admits one data connection.
        token: Token,
    },
    /// To [`Request::Key`].
    Key {
        /// Where the slab begins, and its key.
        remote: Remote,
    },
    /// To [`Request::QueuePair`].
    QueuePair {
        /// The server's end.
        end: End,
        /// Memory that may be read, and holds [`Reply::QueuePair::proof`]: whether packets get there
        /// and back is tried before anything depends on it.
        probe: Remote,
        /// Bytes of its own for each queue pair.
        proof: Token,
    },
    /// To [`Request::Stats`].
    Stats(Box<ServerStats>),
    /// The request was refused and changed nothing.
    Refused(Refusal),
}

/// Why a server refuses. The texts say what was wrong and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
pub enum Refusal {
    /// No version in common.
    #[error(
        "the server speaks versions {min} to {max} of the control messages, and none of them was offered: install the same release of Outram on both machines"
    )]
    Version {
        /// Lowest version of the server.
        min: u32,
        /// Highest version of the server.
        max: u32,
    },
    /// Another holds a session for the guest.
    #[error(
        "guest {vm} has a session with the server under another certificate or secret; it ends {ends_in_s} s from now at the latest: check that the guest does not run elsewhere, then try again"
    )]
    SessionTaken {
        /// The guest.
        vm: VmId,
        /// When the session's lease ends if it is not renewed.
        ends_in_s: u64,
    },
    /// The old connections of the session did not end in time.
    #[error("the server is still closing the guest's former connections: try again")]
    SessionBusy,
    /// The server has not so much to lend.
    #[error(
        "the server is full: {} asked, {} free: raise --local-ratio, raise --memory on the server (and --client-memory, where that is set), or add a server",
        format_size(*asked_bytes), format_size(*free_bytes)
    )]
    ServerFull {
        /// What was asked for.
        asked_bytes: u64,
        /// What is not set aside for others.
        free_bytes: u64,
    },
    /// The client leased all that was set aside for it.
    #[error(
        "all {} reserved on the server are leased: reserve more first", format_size(*reserved_bytes)
    )]
    ReservationExhausted {
        /// What is set aside for the client.
        reserved_bytes: u64,
    },
    /// The server's machine has no memory to give although the server may lend it.
    #[error("the server's machine could not provide a slab's memory: {reason}")]
    OutOfMemory {
        /// The system's words.
        reason: String,
    },
    /// A bound on sessions or connections is reached.
    #[error("the server's limit is reached: {limit} {what}")]
    TooMany {
        /// What there are too many of.
        what: String,
        /// How many are allowed.
        limit: u64,
    },
    /// The slab is not the client's.
    #[error("slab {slab} is not leased to this guest")]
    NotLeased {
        /// Which.
        slab: SlabId,
    },
    /// There is no such disk: it was never created here, was dropped, or the server was restarted.
    #[error(
        "the server has no disk {disk}: it was dropped, or the server was started anew since; its contents are gone"
    )]
    NoSuchDisk {
        /// Which.
        disk: DiskId,
    },
    /// The secret is another's.
    #[error("disk {disk} belongs to another: the key in the domain's metadata is not its key")]
    DiskSecret {
        /// Which.
        disk: DiskId,
    },
    /// A disk cannot be created or dropped while it is in use.
    #[error("disk {disk} is in use by {client}: check that the guest does not run there")]
    DiskInUse {
        /// Which.
        disk: DiskId,
        /// By whom.
        client: ClientName,
    },
    /// Another backend has claimed the disk since.
    #[error("disk {disk} was claimed by {client} since: the guest was moved or started elsewhere")]
    DiskClaimed {
        /// Which.
        disk: DiskId,
        /// By whom.
        client: ClientName,
    },
    /// There is no RDMA with this client, at least at the moment.
    #[error("the server cannot use RDMA here: {reason}")]
    NoVerbs {
        /// Why not.
        reason: String,
    },
    /// The message does not belong here.
    #[error("the server expected another message: {expected}")]
    Unexpected {
        /// What was expected.
        expected: String,
    },
    /// The session's lease has ended, or another connection took it over.
    #[error("the session has ended: connect again")]
    SessionEnded,
    /// The server is being stopped.
    #[error("the server is being stopped")]
    Closing,
}

/// What a server lends, to whom.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerStats {
    /// This life of the server.
    pub instance: InstanceId,
    /// Bytes it may lend at most.
    pub memory_bytes: u64,
    /// Bytes set aside for clients.
    pub reserved_bytes: u64,
    /// Bytes leased, and so taken from its system.
    pub leased_bytes: u64,
    /// Bytes of a slab.
    pub slab_bytes: u64,
    /// The sessions that the asker may see: those under its own certificate.
    pub clients: Vec<ClientStats>,
    /// The disks that the asker may see: those that it used last.
    #[serde(default)]
    pub disks: Vec<DiskStats>,
}

/// What one disk holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStats {
    /// The disk.
    pub disk: DiskId,
    /// The certificate of the host that uses it, or used it last.
    pub name: ClientName,
    /// As it was created.
    pub shape: DiskShape,
    /// Since when nobody uses it, in seconds; `None` while it is in use.
    pub parked_s: Option<u64>,
    /// Slabs leased.
    pub slabs: u64,
    /// ... in bytes.
    pub leased_bytes: u64,
    /// Bytes set aside.
    pub reserved_bytes: u64,
}

/// What one client holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientStats {
    /// The guest.
    pub vm: VmId,
    /// The certificate's name.
    pub name: ClientName,
    /// Whether its control connection stands.
    pub connected: bool,
    /// Slabs leased.
    pub slabs: u64,
    /// ... in bytes.
    pub leased_bytes: u64,
    /// Bytes set aside.
    pub reserved_bytes: u64,
    /// Data connections that stand.
    pub data_connections: u64,
}

/// The highest version both sides speak, if any.
pub fn agree_version(hello: &Hello) -> Result<u32, Refusal> {
    let (min, max) = CONTROL_VERSIONS.into_inner();
    let version = max.min(hello.version_max);
    if version < min || version < hello.version_min {
        return Err(Refusal::Version { min, max });
    }
    Ok(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(version_min: u32, version_max: u32) -> Hello {
        Hello {
            version_min,
            version_max,
            purpose: Purpose::Observe,
        }
    }

    #[test]
    fn messages_have_these_texts() {
        let vm: VmId = "123e4567-e89b-12d3-a456-426614174000"
            .parse()
            .expect("a UUID");
        let message = ClientMessage::Hello(Hello {
            version_min: 1,
            version_max: 1,
            purpose: Purpose::Guest {
                vm,
                secret: SessionSecret([0xab; 32]),
                arrives: false,
            },
        });
        let text = serde_json::to_string(&message).expect("a message is JSON");
        assert_eq!(
            text,
            format!(
                r#"{{"hello":{{"version_min":1,"version_max":1,"purpose":{{"guest":{{"vm":"{vm}","secret":"{}"}}}}}}}}"#,
                "ab".repeat(32)
            )
        );
        let message = ClientMessage::Request {
            id: 7,
            request: Request::Release { slab: SlabId(9) },
        };
        let text = serde_json::to_string(&message).expect("a message is JSON");
        assert_eq!(
            text,
            r#"{"request":{"id":7,"request":{"release":{"slab":9}}}}"#
        );
        let message = ServerMessage::Reply {
            id: 7,
            reply: Reply::Refused(Refusal::NotLeased { slab: SlabId(9) }),
        };
        let text = serde_json::to_string(&message).expect("a message is JSON");
        assert_eq!(
            text,
            r#"{"reply":{"id":7,"reply":{"refused":{"not-leased":{"slab":9}}}}}"#
        );
    }

    #[test]
    fn a_welcome_with_the_most_slabs_is_no_longer_than_a_client_accepts() {
        let welcome = ServerMessage::Welcome(Welcome {
            version: u32::MAX,
            instance: InstanceId(uuid::Uuid::max()),
            slab_bytes: u64::MAX,
            lease_timeout_ms: u64::MAX,
            resumed: true,
            reserved_bytes: u64::MAX,
            held: vec![SlabId(u64::MAX); MAX_SLABS as usize],
            disk: Some(DiskWelcome {
                claim: u64::MAX,
                shape: DiskShape {
                    bytes: u64::MAX,
                    part: u32::MAX,
                    parts: u32::MAX,
                },
            }),
            verbs: true,
        });
        let text = serde_json::to_string(&welcome).expect("a message is JSON");
        assert!(text.len() <= MAX_SERVER_FRAME_BYTES, "{}", text.len());
    }

    #[test]
    fn messages_of_rdma_have_these_texts() {
        let end = End {
            gid: std::net::IpAddr::from([10, 0, 0, 2]).into(),
            lid: 0,
            number: 17,
            first_packet: 5,
            mtu: 3,
            reads: 16,
        };
        let ours =
            r#"{"gid":"::ffff:10.0.0.2","lid":0,"number":17,"first_packet":5,"mtu":3,"reads":16}"#;
        let message = ClientMessage::Request {
            id: 7,
            request: Request::QueuePair { end },
        };
        let text = serde_json::to_string(&message).expect("a message is JSON");
        assert_eq!(
            text,
            format!(r#"{{"request":{{"id":7,"request":{{"queue-pair":{{"end":{ours}}}}}}}}}"#)
        );
        let remote = Remote {
            address: u64::MAX,
            key: 9,
        };
        let reply = Reply::QueuePair {
            end,
            probe: remote,
            proof: Token([0; 32]),
        };
        let text = serde_json::to_string(&reply).expect("a message is JSON");
        let zeros = "00".repeat(32);
        assert_eq!(
            text,
            format!(
                r#"{{"queue-pair":{{"end":{ours},"probe":{{"address":18446744073709551615,"key":9}},"proof":"{zeros}"}}}}"#
            )
        );
        assert_eq!(serde_json::from_str::<Reply>(&text).expect("own"), reply);
    }

    /// What a server of version 1 says and is told has not changed.
    #[test]
    fn a_welcome_without_rdma_says_nothing_of_it() {
        let welcome = Welcome {
            version: 1,
            instance: InstanceId(uuid::Uuid::nil()),
            slab_bytes: 1,
            lease_timeout_ms: 1,
            resumed: false,
            reserved_bytes: 0,
            held: Vec::new(),
            disk: None,
            verbs: false,
        };
        let text = serde_json::to_string(&welcome).expect("a message is JSON");
        assert!(!text.contains("verbs"), "{text}");
        assert_eq!(
            serde_json::from_str::<Welcome>(&text).expect("own"),
            welcome
        );
    }

    #[test]
    fn the_highest_common_version_is_agreed() {
        assert_eq!(agree_version(&hello(1, 1)), Ok(1));
        assert_eq!(agree_version(&hello(1, 2)), Ok(2));
        assert_eq!(agree_version(&hello(0, 99)), Ok(2));
        for (min, max) in [(3, 4), (0, 0), (5, 1)] {
            assert_eq!(
                agree_version(&hello(min, max)),
                Err(Refusal::Version { min: 1, max: 2 })
            );
        }
    }

    #[test]
    fn a_full_server_says_how_much_is_free() {
        let text = Refusal::ServerFull {
            asked_bytes: 1 << 30,
            free_bytes: 1 << 28,
        }
        .to_string();
        assert!(text.contains("1 GiB asked, 256 MiB free"), "{text}");
    }
}
