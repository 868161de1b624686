//! The operator's own small CA: a directory with a key that signs one certificate per server and
//! per host.
//!
//! ```text
//! ca.pem  ca.key              the CA; the key need not leave the machine it was made on
//! <name>.pem  <name>.key      what was issued
//! ```
//!
//! Keys are ECDSA P-256 and readable by their owner alone. Nothing is ever overwritten.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::ServerName;
use time::{Duration, OffsetDateTime};

pub use crate::tls::Kind;

/// Days that a CA lasts: ten years.
pub const CA_DAYS: u32 = 3650;
/// Days that a certificate lasts unless asked otherwise: two years and a bit.
pub const CERTIFICATE_DAYS: u32 = 825;
/// Clocks of the machines may differ by so much.
const CLOCK_SKEW: Duration = Duration::hours(1);

/// Why nothing was issued.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A file of that name is there.
    #[error("{} exists and is not overwritten: choose another name or directory, or remove it first", .0.display())]
    Exists(PathBuf),
    /// The CA's files are not there.
    #[error("{} cannot be read: make the CA with 'outram pki init' first, or name its directory", path.display())]
    NoCa {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The name cannot be a file's.
    #[error(
        "'{0}' is no name for a certificate: use letters, digits, '.', '-' and '_', not first '.', and not 'ca'"
    )]
    Name(String),
    /// A server's certificate without an address.
    #[error("a server's certificate needs the DNS names or IP addresses that clients connect to")]
    NoAddress,
    /// What no client would find in a certificate.
    #[error("'{0}' is no DNS name or IP address: leave out scheme and port")]
    Address(String),
    /// A name that no certificate can carry, or a CA key that is none.
    #[error(
        "the certificate cannot be made: check the name, and that ca.pem and ca.key are the CA's"
    )]
    Make(#[from] rcgen::Error),
}

/// What is to be issued.
#[derive(Clone, Debug)]
pub struct Order<'a> {
    /// What the certificate is for.
    pub kind: Kind,
    /// Its common name, and the name of its files.
    pub name: &'a str,
    /// DNS names and IP addresses of a server.
    pub addresses: &'a [String],
    /// Days that it lasts; it never outlives the CA in effect.
    pub days: u32,
}

/// The files of what was issued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// The CA's certificate, which goes along.
    pub ca: PathBuf,
    /// The certificate.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl From<Issued> for crate::tls::TlsFiles {
    fn from(issued: Issued) -> Self {
        Self {
            ca: issued.ca,
            cert: issued.cert,
            key: issued.key,
        }
    }
}

/// Makes a CA in `dir`, which is created if need be; returns its certificate's file.
pub fn init(dir: &Path) -> Result<PathBuf, PkiError> {
    let write = |source| PkiError::Write {
        path: dir.to_owned(),
        source,
    };
    // The folders that it lies in are made as any others: /etc/outram has settings, too, that all may read.
    if let Some(parent) = dir.parent() {
        fs::create_dir_all(parent).map_err(write)?;
    }
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(write)?;
    let key = KeyPair::generate()?;
    let mut params = params("Outram CA", CA_DAYS, Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let certificate = params.self_signed(&key)?;
    write_pair(dir, "ca", &certificate.pem(), &key)?;
    Ok(dir.join("ca.pem"))
}

/// Issues a certificate of the CA in `dir`, into the same directory.
pub fn issue(dir: &Path, order: &Order<'_>) -> Result<Issued, PkiError> {
    check_name(order.name)?;
    if order.kind == Kind::Server && order.addresses.is_empty() {
        return Err(PkiError::NoAddress);
    }
    for address in order.addresses {
        let name = address.strip_prefix("*.").unwrap_or(address);
        ServerName::try_from(name).map_err(|_| PkiError::Address(address.clone()))?;
    }
    let ca_key = KeyPair::from_pem(&read_ca(&dir.join("ca.key"))?)?;
    let ca = Issuer::from_ca_cert_pem(&read_ca(&dir.join("ca.pem"))?, ca_key)?;
    let mut params = params(order.name, order.days, order.addresses.to_vec())?;
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.insert_extended_key_usage(match order.kind {
        Kind::Server => ExtendedKeyUsagePurpose::ServerAuth,
        Kind::Client => ExtendedKeyUsagePurpose::ClientAuth,
    });
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &ca)?;
    write_pair(dir, order.name, &certificate.pem(), &key)?;
    Ok(Issued {
        ca: dir.join("ca.pem"),
        cert: dir.join(format!("{}.pem", order.name)),
        key: dir.join(format!("{}.key", order.name)),
    })
}

fn params(name: &str, days: u32, addresses: Vec<String>) -> Result<CertificateParams, PkiError> {
    let mut params = CertificateParams::new(addresses)?;
    params.distinguished_name.remove(DnType::CommonName);
    params.distinguished_name.push(DnType::CommonName, name);
    let now = OffsetDateTime::now_utc();
    params.not_before = now - CLOCK_SKEW;
    params.not_after = now + Duration::days(days.into());
    Ok(params)
}

fn check_name(name: &str) -> Result<(), PkiError> {
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let fits = (1..=64).contains(&name.len()) && name.chars().all(legal);
    if !fits || name.starts_with('.') || name == "ca" {
        return Err(PkiError::Name(name.to_owned()));
    }
    Ok(())
}

fn read_ca(path: &Path) -> Result<String, PkiError> {
    fs::read_to_string(path).map_err(|source| PkiError::NoCa {
        path: path.to_owned(),
        source,
    })
}

/// Writes key and certificate; both or, as far as the system allows, neither.
fn write_pair(dir: &Path, name: &str, certificate: &str, key: &KeyPair) -> Result<(), PkiError> {
    let key_path = dir.join(format!("{name}.key"));
    let cert_path = dir.join(format!("{name}.pem"));
    if cert_path.exists() {
        return Err(PkiError::Exists(cert_path));
    }
    write_new(&key_path, 0o600, &key.serialize_pem())?;
    write_new(&cert_path, 0o644, certificate).inspect_err(|_| {
        let _ = fs::remove_file(&key_path);
    })
}

fn write_new(path: &Path, mode: u32, text: &str) -> Result<(), PkiError> {
    let write = |source: io::Error| match source.kind() {
        io::ErrorKind::AlreadyExists => PkiError::Exists(path.to_owned()),
        _ => PkiError::Write {
            path: path.to_owned(),
            source,
        },
    };
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(mode);
    let mut file = options.open(path).map_err(write)?;
    let written = file
        .write_all(text.as_bytes())
        .and_then(|()| file.sync_all());
    written.map_err(write).inspect_err(|_| {
        let _ = fs::remove_file(path);
    })
}
