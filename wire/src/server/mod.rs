//! What a backend and a memory server say to each other.
//!
//! One port carries both kinds of connection; the first byte tells them apart. [`control`] messages
//! travel as JSON frames inside mutually authenticated TLS 1.3 ([`channel`]). [`data`] connections
//! are bare TCP with hand-laid binary frames, admitted by a one-time [`Token`] that was obtained
//! over the control connection. Where both ends have an RDMA device, queue pairs take their place
//! ([`crate::verbs`]): ends and keys are told over the control connection.
//!
//! The module knows neither where slabs lie nor what is stored in them.

use std::fmt;

use serde::{Deserialize, Serialize};

mod address;
pub mod channel;
pub mod clock;
pub mod control;
pub mod data;

pub use address::{AddressError, ServerAddress, Transport};
pub use control::{
    CONTROL_VERSIONS, ClientMessage, ClientStats, DiskShape, DiskStats, DiskWelcome, Hello,
    Opening, Purpose, Refusal, Reply, Request, ServerMessage, ServerStats, VERBS_VERSION, Welcome,
};
pub use data::Extent;

/// The port a memory server listens on unless told otherwise.
pub const DEFAULT_PORT: u16 = 7741;

/// First byte of a TLS record that carries a handshake (RFC 8446, section 5.1).
pub const TLS_FIRST_BYTE: u8 = 0x16;

/// A slab within one server instance. Ids of different instances do not meet in practice: each
/// instance counts on from a random start.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default,
)]
#[serde(transparent)]
pub struct SlabId(pub u64);

impl fmt::Display for SlabId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// One life of a server process: drawn at random when it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct InstanceId(pub uuid::Uuid);

impl InstanceId {
    /// A fresh identity.
    pub fn random() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)?;
        Ok(Self(uuid::Builder::from_random_bytes(bytes).into_uuid()))
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A far-memory disk: derived from its domain's UUID and the key in its metadata.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default,
)]
#[serde(transparent)]
pub struct DiskId(pub uuid::Uuid);

impl fmt::Display for DiskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::str::FromStr for DiskId {
    type Err = uuid::Error;

    fn from_str(text: &str) -> Result<Self, uuid::Error> {
        text.parse().map(Self)
    }
}

/// Who a peer is by its certificate: the subject's common name, as the operator's CA vouches for it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ClientName(pub String);

impl fmt::Display for ClientName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// 32 random bytes that only their holder knows; written as hexadecimal digits.
macro_rules! secret {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Eq, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(pub [u8; 32]);

        impl $name {
            /// Draws a fresh one.
            pub fn random() -> Result<Self, getrandom::Error> {
                let mut bytes = [0; 32];
                getrandom::fill(&mut bytes)?;
                Ok(Self(bytes))
            }
        }

        impl PartialEq for $name {
            /// Takes the same time wherever the first difference lies.
            fn eq(&self, other: &Self) -> bool {
                let differing = self.0.iter().zip(other.0).fold(0, |all, (a, b)| all | (a ^ b));
                differing == 0
            }
        }

        impl fmt::Debug for $name {
            /// Shows nothing of the bytes: a log is no place for them.
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!(stringify!($name), "(…)"))
            }
        }

        impl From<$name> for String {
            fn from(secret: $name) -> String {
                hex(&secret.0)
            }
        }

        impl TryFrom<String> for $name {
            type Error = SecretError;

            fn try_from(text: String) -> Result<Self, SecretError> {
                unhex(&text).map(Self)
            }
        }
    };
}

secret! {
    /// Proves that a reconnecting client is the one whose session it asks for. Chosen by the
    /// client, so that a lost answer can never lock it out of its own slabs.
    SessionSecret
}

secret! {
    /// Admits one data connection, once, for a short while.
    Token
}

/// The text is no secret.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("expected 64 hexadecimal digits")]
pub struct SecretError;

pub(crate) fn hex(bytes: &[u8; 32]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|nibble| char::from(DIGITS[usize::from(nibble)]))
        .collect()
}

pub(crate) fn unhex(text: &str) -> Result<[u8; 32], SecretError> {
    let digits = text.as_bytes();
    if digits.len() != 64 {
        return Err(SecretError);
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let [high, low] = [pair[0], pair[1]].map(|digit| char::from(digit).to_digit(16));
        let (high, low) = (high.ok_or(SecretError)?, low.ok_or(SecretError)?);
        *byte = (high * 16 + low) as u8;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_travel_as_hexadecimal_digits() {
        let mut bytes = [0; 32];
        bytes[0] = 0x0f;
        bytes[31] = 0xa0;
        let text = serde_json::to_string(&Token(bytes)).expect("a token is a string");
        assert_eq!(text, format!("\"0f{}a0\"", "00".repeat(30)));
        let back: Token = serde_json::from_str(&text).expect("own text");
        assert_eq!(back, Token(bytes));
    }

    #[test]
    fn nonsense_is_no_secret() {
        for text in ["", "0f", &"0g".repeat(32), &"é".repeat(32)] {
            assert_eq!(unhex(text), Err(SecretError), "{text}");
        }
    }

    #[test]
    fn secrets_stay_out_of_logs() {
        assert_eq!(format!("{:?}", SessionSecret([7; 32])), "SessionSecret(…)");
    }
}
