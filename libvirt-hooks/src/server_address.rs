//! The address of a memory server: `host:port`, checked before anything is stored or started.

use std::fmt;
use std::str::FromStr;

/// A memory server's `host:port`; IPv6 addresses stand in brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServerAddress(String);

/// Why a text is no server address.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "'{0}' is not a server address: expected HOST:PORT, such as 10.0.0.2:7070, mem1.example:7070 or [fd00::2]:7070"
)]
pub struct AddressError(String);

impl ServerAddress {
    /// The address as text, as `ToSocketAddrs` takes it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ServerAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let bad = || AddressError(text.to_owned());
        let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
        let port_is_good = port.bytes().all(|byte| byte.is_ascii_digit())
            && port.parse::<u16>().is_ok_and(|port| port != 0);
        let host_is_good = match host.strip_prefix('[') {
            Some(rest) => rest
                .strip_suffix(']')
                .is_some_and(|inner| inner.parse::<std::net::Ipv6Addr>().is_ok()),
            None => {
                !host.is_empty()
                    && host
                        .bytes()
                        .all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
            }
        };
        if port_is_good && host_is_good {
            Ok(Self(text.to_owned()))
        } else {
            Err(bad())
        }
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_addresses_with_a_port_are_taken() {
        for text in [
            "10.0.0.2:7070",
            "mem-1.example:1",
            "[fd00::2]:65535",
            "localhost:7070",
        ] {
            assert_eq!(
                ServerAddress::from_str(text).map(|a| a.0),
                Ok(text.to_owned())
            );
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "host",
            "host:",
            ":7070",
            "host:0",
            "host:65536",
            "host:+1",
            "fd00::2:7070",
            "[fd00::2]",
            "[host]:1",
            "a b:1",
            "host:70 70",
            "tcp://host:1",
        ] {
            assert!(ServerAddress::from_str(text).is_err(), "{text}");
        }
    }
}
