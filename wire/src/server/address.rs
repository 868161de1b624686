//! The address of a memory server, checked before anything is stored or started.

use std::fmt;
use std::str::FromStr;

use super::DEFAULT_PORT;

/// Where a memory server listens: `host`, `host:port`, `192.0.2.1:port` or `[2001:db8::1]:port`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
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
            "",
            "host:",
            "[fd00::2",
            "tcp://host:1",
            ":1",
            "a:",
            "a:0",
            "a:65536",
            "a:+1",
            "::1",
            "[::1",
            "[a]:1",
            "a b:1",
            "a/b:1",
            "[::1]x",
        ] {
            let error = text.parse::<ServerAddress>().expect_err(text).to_string();
            assert!(error.contains("expected host:port"), "{error}");
        }
    }
}
