//! The settings of a host's backends, `/etc/outram/backend.toml`: what flags and a domain do not say.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::{fs, io};

use serde::{Deserialize, Deserializer, de};

use crate::server::ServerAddress;
use crate::tls::TlsFiles;
use crate::verbs::Choice;

/// More would only add threads: each can serve tens of thousands of faults a second. A memory server admits a
/// connection for each, and more.
pub const MAX_SHARDS: u32 = 64;

/// The settings. Unknown keys are errors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct HostSettings {
    /// Servers of guests that name none.
    #[serde(deserialize_with = "addresses")]
    pub servers: Vec<ServerAddress>,
    /// The certificate authority's certificate.
    pub tls_ca: Option<PathBuf>,
    /// This host's certificate.
    pub tls_cert: Option<PathBuf>,
    /// The certificate's key.
    pub tls_key: Option<PathBuf>,
    /// Directory of sockets and state.
    pub run_dir: Option<PathBuf>,
    /// Where metrics are served.
    pub metrics: Option<SocketAddr>,
    /// Threads that handle faults, 1 to [`MAX_SHARDS`].
    pub shards: Option<u32>,
    /// Seconds to wait for QEMU, 1 or more.
    pub connect_timeout: Option<u64>,
    /// The RDMA device.
    pub rdma: Choice,
    /// Whether `userfaultfd(2)` may be used.
    pub allow_sysctl: bool,
}

/// Why a host's settings were not understood.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error("cannot read the settings {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The file is not understood. The reason is part of the message, for TOML's own text has
    /// several lines.
    #[error("{} is not understood{}: {}", path.display(), line_of(text, reason), reason.message())]
    Parse {
        /// Which.
        path: PathBuf,
        /// What is in it.
        text: String,
        /// Where and why.
        reason: Box<toml::de::Error>,
    },
    /// A number out of its range.
    #[error("'{key} = {value}' in {}: expected {expected}", path.display())]
    Range {
        /// The file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// What it is.
        value: u64,
        /// What it may be.
        expected: String,
    },
}

impl HostSettings {
    /// Reads the settings; a missing file is one without any.
    pub fn read(path: &Path) -> Result<Self, SettingsError> {
        match Self::read_existing(path) {
            Err(SettingsError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Ok(Self::default())
            }
            other => other,
        }
    }

    /// Reads the settings, of a file that has to exist.
    pub fn read_existing(path: &Path) -> Result<Self, SettingsError> {
        let text = fs::read_to_string(path).map_err(|source| SettingsError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text, path)
    }

    fn parse(text: &str, path: &Path) -> Result<Self, SettingsError> {
        let settings: Self = toml::from_str(text).map_err(|reason| SettingsError::Parse {
            path: path.to_owned(),
            text: text.to_owned(),
            reason: Box::new(reason),
        })?;
        let wrong = |key, value, expected: String| SettingsError::Range {
            path: path.to_owned(),
            key,
            value,
            expected,
        };
        if let Some(shards) = settings.shards
            && !(1..=MAX_SHARDS).contains(&shards)
        {
            let expected = format!("1 to {MAX_SHARDS}");
            return Err(wrong("shards", shards.into(), expected));
        }
        if settings.connect_timeout == Some(0) {
            let expected = "1 second or more".to_owned();
            return Err(wrong("connect-timeout", 0, expected));
        }
        Ok(settings)
    }

    /// The files of this host's identity.
    pub fn tls_files(&self) -> TlsFiles {
        let or = |path: &Option<PathBuf>, name: &str| {
            let usual = || Path::new("/etc/outram/pki").join(name);
            path.clone().unwrap_or_else(usual)
        };
        TlsFiles {
            ca: or(&self.tls_ca, "ca.pem"),
            cert: or(&self.tls_cert, "client.pem"),
            key: or(&self.tls_key, "client.key"),
        }
    }
}

fn addresses<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<ServerAddress>, D::Error> {
    let texts: Vec<String> = Vec::deserialize(input)?;
    let parsed = texts.iter().map(|text| text.parse());
    let addresses: Vec<ServerAddress> = parsed
        .collect::<Result<_, _>>()
        .map_err(de::Error::custom)?;
    for (index, address) in addresses.iter().enumerate() {
        if addresses[..index].contains(address) {
            let twice = format!("server {address} is named twice: name each once");
            return Err(de::Error::custom(twice));
        }
    }
    Ok(addresses)
}

/// Where in a text an error is, in words.
fn line_of(text: &str, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start));
    before.map_or_else(String::new, |before| {
        format!(" in line {}", before.matches('\n').count() + 1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<HostSettings, String> {
        let parsed = HostSettings::parse(text, Path::new("/etc/outram/backend.toml"));
        parsed.map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place_and_what_was_expected() {
        for (text, parts) in [
            (
                "\nsevrers = []",
                [
                    "in line 2",
                    "unknown field `sevrers`, expected one of `servers`",
                ],
            ),
            ("servers = \"a\"", ["in line 1", "expected a sequence"]),
            (
                "servers = [\"a:b\"]",
                ["'a:b' is not a server's address", "expected host:port"],
            ),
            (
                "servers = [\"a:1\", \"rdma://a:1\"]",
                ["in line 1", "is named twice"],
            ),
            (
                "shards = 100",
                ["'shards = 100' in /etc", "expected 1 to 64"],
            ),
            ("connect-timeout = \"2m\"", ["in line 1", "expected u64"]),
            (
                "connect-timeout = 0",
                ["'connect-timeout = 0' in /etc", "1 second"],
            ),
            ("metrics = \"x\"", ["in line 1", "invalid socket address"]),
            (
                "rdma = \"mlx5_0:x\"",
                ["in line 1", "no choice of an RDMA device"],
            ),
            ("no TOML [[[", ["in line 1", "expected"]),
        ] {
            let error = parse(text).expect_err(text);
            for part in parts {
                assert!(error.contains(part), "{text}: {error}");
            }
            assert!(!error.contains('\n'), "{error}");
        }
        let settings = parse("servers = [\"a\", \"b:1\"]\nrdma = \"off\"\nshards = 64");
        let settings = settings.expect("all is right");
        assert_eq!((settings.servers.len(), settings.rdma), (2, Choice::Off));
    }

    #[test]
    fn a_file_that_is_missing_says_nothing_and_one_that_is_named_has_to_exist() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("backend.toml");
        assert_eq!(
            HostSettings::read(&path).expect("none"),
            HostSettings::default()
        );
        assert!(HostSettings::read_existing(&path).is_err());
    }
}
