//! The address of a memory server, checked before anything is stored or started.

use std::fmt;
use std::str::FromStr;

use super::DEFAULT_PORT;

/// What pages go over to a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// RDMA where both ends have a usable device, TCP otherwise.
    #[default]
    Auto,
    /// TCP.
    Tcp,
    /// RDMA, or nothing.
    Rdma,
}

/// Where a memory server listens: `host`, `host:port`, `192.0.2.1:port` or `[2001:db8::1]:port`, and
/// `tcp://` or `rdma://` before it where pages are to go over that alone.
#[derive(Clone, Debug)]
pub struct ServerAddress {
    host: String,
    port: u16,
    transport: Transport,
}

/// The text is no server's address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not a server's address: expected host:port, such as mem1.example:{DEFAULT_PORT}, 192.0.2.1:{DEFAULT_PORT} or [2001:db8::1]:{DEFAULT_PORT}, with tcp:// or rdma:// before it where pages are to go over that alone"
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

    /// What pages go over.
    pub fn transport(&self) -> Transport {
        self.transport
    }
}

/// It is the same server whatever pages go over.
impl PartialEq for ServerAddress {
    fn eq(&self, other: &Self) -> bool {
        (&self.host, self.port) == (&other.host, other.port)
    }
}

impl Eq for ServerAddress {}

impl Ord for ServerAddress {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (&self.host, self.port).cmp(&(&other.host, other.port))
    }
}

impl PartialOrd for ServerAddress {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl FromStr for ServerAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let bad = || AddressError(text.to_owned());
        let schemes = [("tcp://", Transport::Tcp), ("rdma://", Transport::Rdma)];
        let named = schemes.into_iter().find_map(|(scheme, transport)| {
            text.strip_prefix(scheme).map(|rest| (rest, transport))
        });
        let (place, transport) = named.unwrap_or((text, Transport::Auto));
        let (host, rest) = match place.strip_prefix('[') {
            Some(inner) => {
                let (host, rest) = inner.split_once(']').ok_or_else(bad)?;
                let _: std::net::Ipv6Addr = host.parse().map_err(|_| bad())?;
                (host, rest)
            }
            None => place.split_at(place.find(':').unwrap_or(place.len())),
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
            transport,
        })
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.transport {
            Transport::Auto => "",
            Transport::Tcp => "tcp://",
            Transport::Rdma => "rdma://",
        })?;
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
            ("tcp://mem1", "tcp://mem1:7741"),
            ("rdma://[::1]:80", "rdma://[::1]:80"),
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
            "udp://host:1",
            "tcp:host:1",
            "rdma://tcp://host:1",
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
