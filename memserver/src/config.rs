//! What a server is told: one TOML file, overridden by flags.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use outram_wire::server::control::MIN_SLAB_BYTES;
use outram_wire::tls::TlsFiles;
use outram_wire::units::{PAGE_SIZE, UnitError, format_size, parse_size};
use outram_wire::verbs::Choice;
use serde::Deserialize;

/// Bytes of a slab unless told otherwise: few enough that a client's last one wastes little, many
/// enough that a guest of a TiB has few of them.
pub const DEFAULT_SLAB_BYTES: u64 = 64 << 20;
/// Largest slab: offsets within it have 32 bits on the wire.
pub const MAX_SLAB_BYTES: u64 = 2 << 30;
/// Time after a client's last word at which its lease ends, unless told otherwise: far longer than
/// any outage that is promised to be survived.
pub const DEFAULT_LEASE_TIMEOUT: Duration = Duration::from_secs(600);
/// Shortest lease: clients renew three times as often, over a network that may hesitate.
pub const MIN_LEASE_TIMEOUT: Duration = Duration::from_millis(200);

/// A pager of the most shards has 64 and one that writes; some that have died may be counted still.
const MAX_DATA_CONNECTIONS: usize = 80;

/// Everything a server is told.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where to listen.
    pub listen: SocketAddr,
    /// Bytes to lend at most.
    pub memory_bytes: u64,
    /// Bytes to set aside at most for all that comes under one client certificate, if bounded.
    pub client_memory_bytes: Option<u64>,
    /// Bytes of a slab.
    pub slab_bytes: u64,
    /// The server's identity, and the CA of its clients.
    pub tls: TlsFiles,
    /// A client not heard of for so long loses its slabs.
    pub lease_timeout: Duration,
    /// A far-memory disk that nobody used for so long is dropped; none means that it is kept.
    pub parked_disk_timeout: Option<Duration>,
    /// Where to answer scrapers, if at all.
    pub metrics: Option<SocketAddr>,
    /// Guests served at most, and disks.
    pub max_guests: usize,
    /// Data connections of a guest at most.
    pub max_data_connections: usize,
    /// Connections at most that have not shown yet whose they are.
    pub max_strangers: usize,
    /// How long they have for it.
    pub handshake_timeout: Duration,
    /// How long a token for a data connection is good for.
    pub token_life: Duration,
    /// Which RDMA device clients may use.
    pub rdma: Choice,
}

impl Config {
    /// A configuration with the defaults.
    pub fn new(listen: SocketAddr, memory_bytes: u64, tls: TlsFiles) -> Self {
        Self {
            listen,
            memory_bytes,
            client_memory_bytes: None,
            slab_bytes: DEFAULT_SLAB_BYTES,
            tls,
            lease_timeout: DEFAULT_LEASE_TIMEOUT,
            parked_disk_timeout: None,
            metrics: None,
            max_guests: 256,
            max_data_connections: MAX_DATA_CONNECTIONS,
            max_strangers: 64,
            handshake_timeout: Duration::from_secs(10),
            token_life: Duration::from_secs(15),
            rdma: Choice::Auto,
        }
    }

    /// Reads the file, if one is given, and puts the flags above it.
    pub fn gather(flags: Flags) -> Result<Self, ConfigError> {
        let file = match &flags.config {
            Some(path) => read(path)?,
            None => File::default(),
        };
        let missing = |name| ConfigError::Missing { name };
        let tls = TlsFiles {
            ca: flags.tls_ca.or(file.tls_ca).ok_or(missing("tls-ca"))?,
            cert: flags
                .tls_cert
                .or(file.tls_cert)
                .ok_or(missing("tls-cert"))?,
            key: flags.tls_key.or(file.tls_key).ok_or(missing("tls-key"))?,
        };
        let listen = flags.listen.or(file.listen).ok_or(missing("listen"))?;
        let memory = flags.memory.or(file.memory).ok_or(missing("memory"))?;
        let mut config = Self::new(listen, memory.0, tls);
        config.metrics = flags.metrics.or(file.metrics);
        let client_memory = flags.client_memory.or(file.client_memory);
        config.client_memory_bytes = client_memory.map(|size| size.0);
        if let Some(size) = flags.slab_size.or(file.slab_size) {
            config.slab_bytes = size.0;
        }
        if let Some(timeout) = flags.lease_timeout.or(file.lease_timeout) {
            config.lease_timeout = timeout.0;
        }
        let parked = flags.parked_disk_timeout.or(file.parked_disk_timeout);
        config.parked_disk_timeout = parked.map(|timeout| timeout.0);
        config.rdma = flags.rdma.or(file.rdma).unwrap_or_default();
        config.check()?;
        Ok(config)
    }

    /// Checks what the types do not.
    pub fn check(&self) -> Result<(), ConfigError> {
        let pages = self.slab_bytes.is_multiple_of(PAGE_SIZE as u64);
        if !pages || !(MIN_SLAB_BYTES..=MAX_SLAB_BYTES).contains(&self.slab_bytes) {
            return Err(ConfigError::SlabSize {
                slab_bytes: self.slab_bytes,
            });
        }
        // Nothing at all is what an operator wants who empties the server.
        if (1..self.slab_bytes).contains(&self.memory_bytes) {
            return Err(ConfigError::Memory {
                memory_bytes: self.memory_bytes,
                slab_bytes: self.slab_bytes,
            });
        }
        if let Some(client_memory_bytes) = self.client_memory_bytes
            && client_memory_bytes < self.slab_bytes
        {
            return Err(ConfigError::ClientMemory {
                client_memory_bytes,
                slab_bytes: self.slab_bytes,
            });
        }
        if self.lease_timeout < MIN_LEASE_TIMEOUT {
            return Err(ConfigError::LeaseTimeout(self.lease_timeout));
        }
        if let Some(parked) = self.parked_disk_timeout
            && parked < self.lease_timeout
        {
            return Err(ConfigError::ParkedDiskTimeout {
                parked,
                lease: self.lease_timeout,
            });
        }
        Ok(())
    }

    /// Settings in which `next` differs that a running server does not take over.
    pub fn taken_at_start_alone(&self, next: &Self) -> Vec<&'static str> {
        let differ = [
            ("listen", self.listen != next.listen),
            (
                "client-memory",
                self.client_memory_bytes != next.client_memory_bytes,
            ),
            ("slab-size", self.slab_bytes != next.slab_bytes),
            ("lease-timeout", self.lease_timeout != next.lease_timeout),
            (
                "parked-disk-timeout",
                self.parked_disk_timeout != next.parked_disk_timeout,
            ),
            ("rdma", self.rdma != next.rdma),
            ("metrics", self.metrics != next.metrics),
        ];
        let differ = differ.into_iter().filter(|(_, differs)| *differs);
        differ.map(|(name, _)| name).collect()
    }
}

/// What the command line may say; each flag has a key of the same name in the file.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Flags {
    /// TOML file with these settings (keys named as the flags, without dashes in front); flags
    /// override it. SIGHUP reads 'memory' from it again
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Address and port to listen on, such as 0.0.0.0:7741; IPv6 goes in brackets
    #[arg(long, value_name = "ADDR:PORT")]
    pub listen: Option<SocketAddr>,
    /// Memory to lend at most, such as 64GiB; taken from the system only as slabs are leased. With 0 nothing is
    /// lent, and guests move to other servers what they have here
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<Size>,
    /// Memory that the guests and disks of one client certificate may have set aside in all, such as
    /// 16GiB; no bound but --memory unless given
    #[arg(long, value_name = "SIZE")]
    pub client_memory: Option<Size>,
    /// Size of the pieces that are lent, 64KiB to 2GiB and a multiple of the guests' pages; a guest or disk
    /// is lent 40000 at most [default: 64MiB]
    #[arg(long, value_name = "SIZE")]
    pub slab_size: Option<Size>,
    /// CA certificate that clients' certificates must come from ('outram pki init')
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// This server's certificate ('outram pki issue server')
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Its private key
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Time after which the slabs of a client that is not heard of are freed, such as 90s or 10m;
    /// its guest's pages are lost then [default: 10m]
    #[arg(long, value_name = "TIME")]
    pub lease_timeout: Option<Span>,
    /// Time after which a far-memory disk that nobody uses is dropped, such as 168h, and not shorter than the
    /// lease: its guest was saved, shut down or lost its host, or runs and is cut off; kept for that guest
    /// unless given
    #[arg(long, value_name = "TIME")]
    pub parked_disk_timeout: Option<Span>,
    /// RDMA device that clients may use: auto for that with the address they came to, off for none,
    /// or its name, with a port and the index of a GID where it has several, such as mlx5_0:1:3
    /// [default: auto]
    #[arg(long, value_name = "auto|off|DEVICE")]
    pub rdma: Option<Choice>,
    /// Address and port to answer Prometheus on; not answered unless given
    #[arg(long, value_name = "ADDR:PORT")]
    pub metrics: Option<SocketAddr>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    listen: Option<SocketAddr>,
    memory: Option<Size>,
    client_memory: Option<Size>,
    slab_size: Option<Size>,
    tls_ca: Option<PathBuf>,
    tls_cert: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    lease_timeout: Option<Span>,
    parked_disk_timeout: Option<Span>,
    rdma: Option<Choice>,
    metrics: Option<SocketAddr>,
}

fn read(path: &Path) -> Result<File, ConfigError> {
    let text = fs::read_to_string(path).map_err(|source| ConfigError::Read {
        path: path.to_owned(),
        source,
    })?;
    toml::from_str(&text).map_err(|source| ConfigError::Parse {
        path: path.to_owned(),
        source: Box::new(source),
    })
}

/// A size as people write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Size(pub u64);

impl std::str::FromStr for Size {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        parse_size(text).map(Self)
    }
}

impl TryFrom<String> for Size {
    type Error = UnitError;

    fn try_from(text: String) -> Result<Self, UnitError> {
        text.parse()
    }
}

/// A span of time as people write it: a whole number with `ms`, `s`, `m` or `h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Span(pub Duration);

/// The text is no span of time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a time: expected a whole number with ms, s, m or h, such as 90s or 10m")]
pub struct SpanError(String);

impl std::str::FromStr for Span {
    type Err = SpanError;

    fn from_str(text: &str) -> Result<Self, SpanError> {
        let bad = || SpanError(text.to_owned());
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| bad())?;
        let millis = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return Err(bad()),
        };
        let millis = number.checked_mul(millis).ok_or_else(bad)?;
        Ok(Self(Duration::from_millis(millis)))
    }
}

impl TryFrom<String> for Span {
    type Error = SpanError;

    fn try_from(text: String) -> Result<Self, SpanError> {
        text.parse()
    }
}

/// Why a configuration is no good.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The file is not understood.
    #[error("the configuration {} is not understood", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// A setting without a default is missing.
    #[error("{name} is not set: give --{name}, or '{name}' in the file of --config")]
    Missing {
        /// Its name.
        name: &'static str,
    },
    /// The slab size is out of range.
    #[error(
        "a slab size of {slab_bytes} bytes is not possible: expected a multiple of {PAGE_SIZE} bytes from {} to {}",
        format_size(MIN_SLAB_BYTES),
        format_size(MAX_SLAB_BYTES)
    )]
    SlabSize {
        /// What was asked for.
        slab_bytes: u64,
    },
    /// Not one slab could be lent to a client.
    #[error(
        "--client-memory of {} is less than a slab of {}: allow more, or make --slab-size smaller",
        format_size(*client_memory_bytes), format_size(*slab_bytes)
    )]
    ClientMemory {
        /// What a client may have set aside.
        client_memory_bytes: u64,
        /// Bytes of a slab.
        slab_bytes: u64,
    },
    /// Not one slab could be lent.
    #[error(
        "--memory of {} is less than a slab of {}: lend more, or nothing (0), or make --slab-size smaller",
        format_size(*memory_bytes), format_size(*slab_bytes)
    )]
    Memory {
        /// What may be lent.
        memory_bytes: u64,
        /// What is lent at once.
        slab_bytes: u64,
    },
    /// The lease is too short.
    #[error("a lease time-out of {0:?} is too short: at least {MIN_LEASE_TIMEOUT:?}")]
    LeaseTimeout(Duration),
    /// Disks would go before the memory of the guests that they are of.
    #[error(
        "a parked-disk time-out of {parked:?} is shorter than the lease of {lease:?}: a guest that is cut off for so long would keep its memory and lose its disk"
    )]
    ParkedDiskTimeout {
        /// For disks.
        parked: Duration,
        /// For guests.
        lease: Duration,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        fs::write(file.path(), text).expect("written");
        file
    }

    const WHOLE: &str = r#"
        listen = "127.0.0.1:7741"
        memory = "1GiB"
        slab-size = "1MiB"
        tls-ca = "ca.pem"
        tls-cert = "cert.pem"
        tls-key = "key.pem"
        lease-timeout = "90s"
    "#;

    #[test]
    fn flags_override_the_file() {
        let file = file(WHOLE);
        let flags = Flags {
            config: Some(file.path().to_owned()),
            memory: Some(Size(2 << 30)),
            ..Flags::default()
        };
        let config = Config::gather(flags).expect("legal");
        assert_eq!(config.memory_bytes, 2 << 30);
        assert_eq!(config.slab_bytes, 1 << 20);
        assert_eq!(config.lease_timeout, Duration::from_secs(90));
    }

    #[test]
    fn what_is_not_taken_over_while_it_runs_is_named() {
        let file = file(WHOLE);
        let flags = Flags {
            config: Some(file.path().to_owned()),
            ..Flags::default()
        };
        let config = Config::gather(flags).expect("legal");
        let mut next = config.clone();
        next.memory_bytes *= 2;
        assert!(config.taken_at_start_alone(&next).is_empty());
        next.client_memory_bytes = Some(64 << 20);
        next.lease_timeout *= 2;
        let named = config.taken_at_start_alone(&next);
        assert_eq!(named, ["client-memory", "lease-timeout"]);
    }

    #[test]
    fn unknown_keys_are_named() {
        let file = file("memroy = \"1GiB\"");
        let flags = Flags {
            config: Some(file.path().to_owned()),
            ..Flags::default()
        };
        let error = Config::gather(flags).expect_err("a typo");
        let ConfigError::Parse { source, .. } = error else {
            panic!("{error:?}");
        };
        assert!(source.to_string().contains("memroy"), "{source}");
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = Config::gather(Flags::default()).expect_err("nothing is set");
        assert!(error.to_string().contains("--tls-ca"), "{error}");
    }

    #[test]
    fn impossible_sizes_and_times_are_refused() {
        let tls = TlsFiles {
            ca: "a".into(),
            cert: "b".into(),
            key: "c".into(),
        };
        let listen = "127.0.0.1:0".parse().expect("an address");
        let legal = Config::new(listen, 1 << 30, tls);
        assert!(legal.check().is_ok());
        for change in [
            |config: &mut Config| config.slab_bytes = 65_537,
            |config: &mut Config| config.slab_bytes = 4 << 30,
            |config: &mut Config| config.memory_bytes = 1 << 20,
            |config: &mut Config| config.client_memory_bytes = Some(1 << 20),
            |config: &mut Config| config.lease_timeout = Duration::ZERO,
            |config: &mut Config| config.parked_disk_timeout = Some(Duration::from_secs(7)),
        ] {
            let mut config = legal.clone();
            change(&mut config);
            assert!(config.check().is_err(), "{config:?}");
        }
        for text in ["", "10", "m", "-1s", "1.5s", "1d", "99999999999999999999s"] {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
        assert_eq!("10m".parse(), Ok(Span(Duration::from_secs(600))));
    }
}
