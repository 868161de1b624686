//! Mutual TLS 1.3 between backends and memory servers, under the operator's own CA.
//!
//! Server certificates carry *serverAuth*, client certificates *clientAuth*, and neither passes for
//! the other. Files are checked when they are loaded, so that a mistake is told at the start, with
//! its file's name, and not by a peer's refusal later.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier, danger::ClientCertVerifier};
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore, ServerConfig};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::server::ClientName;

/// Where one side's identity lies: PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates of the CA that vouches for the peers.
    pub ca: PathBuf,
    /// The own certificate, and those between it and the CA's.
    pub cert: PathBuf,
    /// The own private key.
    pub key: PathBuf,
}

/// What a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A memory server's (*serverAuth*).
    Server,
    /// A backend's (*clientAuth*).
    Client,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Kind::Server => "server",
            Kind::Client => "client",
        })
    }
}

/// Why an identity could not be loaded, or a peer's is no good.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file cannot be read.
    #[error("cannot read {what} {}: make it with 'outram pki', or name the right file", path.display())]
    Read {
        /// What the file should hold.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The file holds something else.
    #[error("{} holds no {what} in PEM form", path.display())]
    Pem {
        /// What the file should hold.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What was found.
        source: pem::Error,
    },
    /// The key is not that of the certificate, or of no known kind.
    #[error("the private key {} does not fit the certificate {}", key.display(), cert.display())]
    Key {
        /// The key's file.
        key: PathBuf,
        /// The certificate's file.
        cert: PathBuf,
        /// What TLS says.
        source: rustls::Error,
    },
    /// The certificate would be refused by every peer.
    #[error("the {kind} certificate {} is no good under the CA {}: {}", cert.display(), ca.display(), explain(source))]
    Certificate {
        /// What it should be for.
        kind: Kind,
        /// The certificate's file.
        cert: PathBuf,
        /// The CA's file.
        ca: PathBuf,
        /// What is wrong.
        source: rustls::Error,
    },
    /// The CA's file is of no use.
    #[error("the CA certificate {} cannot be used", ca.display())]
    Ca {
        /// The CA's file.
        ca: PathBuf,
        /// What is wrong.
        source: rustls::Error,
    },
    /// The certificate has no common name, is for something else, or is no certificate.
    #[error("a certificate is not one that 'outram pki issue {kind}' makes: {reason}")]
    Identity {
        /// What it should be for.
        kind: Kind,
        /// What is missing.
        reason: &'static str,
    },
    /// TLS 1.3 is not to be had.
    #[error("TLS cannot be set up")]
    Setup(#[source] rustls::Error),
}

struct Identity {
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// A server's side: asks every client for a certificate.
pub fn server_config(files: &TlsFiles) -> Result<Arc<ServerConfig>, TlsError> {
    server_side(files).map(|(config, _)| config)
}

/// See [`server_config`]; and when the certificate expires, in seconds since 1970.
pub(crate) fn server_side(files: &TlsFiles) -> Result<(Arc<ServerConfig>, i64), TlsError> {
    let identity = load(files)?;
    let expires_unix_s = expiry(&identity.chain);
    check_server_chain(files, &identity)?;
    let verifier = client_verifier(files, &identity.roots)?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(TlsError::Setup)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(identity.chain, identity.key)
        .map_err(|source| key_error(files, source))?;
    // Each connection proves both certificates anew; tickets would only cost memory.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    Ok((Arc::new(config), expires_unix_s))
}

/// A client's side: shows its certificate, and checks the server's against its address.
pub fn client_config(files: &TlsFiles) -> Result<Arc<ClientConfig>, TlsError> {
    client_side(files).map(|(config, _)| config)
}

/// See [`client_config`]; and when the certificate expires, in seconds since 1970.
pub(crate) fn client_side(files: &TlsFiles) -> Result<(Arc<ClientConfig>, i64), TlsError> {
    let identity = load(files)?;
    let expires_unix_s = expiry(&identity.chain);
    check_client_chain(files, &identity)?;
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(TlsError::Setup)?
        .with_root_certificates(identity.roots)
        .with_client_auth_cert(identity.chain, identity.key)
        .map_err(|source| key_error(files, source))?;
    config.resumption = rustls::client::Resumption::disabled();
    Ok((Arc::new(config), expires_unix_s))
}

/// When the first certificate of a chain expires, in seconds since 1970. What is no certificate is
/// refused elsewhere.
pub fn expiry(chain: &[CertificateDer<'_>]) -> i64 {
    let each = chain.iter().filter_map(|der| {
        let (_, certificate) = X509Certificate::from_der(der).ok()?;
        Some(certificate.validity().not_after.timestamp())
    });
    each.min().unwrap_or(i64::MAX)
}

/// The common name of a peer's certificate, which TLS has already found to be the CA's. Refuses
/// certificates that do not say what they are for: TLS alone would let those pass as either kind.
pub fn peer_name(certificates: &[CertificateDer<'_>], kind: Kind) -> Result<ClientName, TlsError> {
    let bad = |reason| TlsError::Identity { kind, reason };
    let der = certificates.first().ok_or_else(|| bad("none was shown"))?;
    let (_, certificate) =
        X509Certificate::from_der(der).map_err(|_| bad("it is no X.509 certificate"))?;
    let usage = certificate.extended_key_usage();
    let usage = usage.map_err(|_| bad("its key usage is not readable"))?;
    let fits = usage.is_some_and(|usage| match kind {
        Kind::Server => usage.value.server_auth,
        Kind::Client => usage.value.client_auth,
    });
    if !fits {
        return Err(bad("its extended key usage says otherwise"));
    }
    let name = certificate.subject().iter_common_name().next();
    let name = name.and_then(|name| name.as_str().ok());
    match name {
        Some(name) if !name.is_empty() => Ok(ClientName(name.to_owned())),
        _ => Err(bad("it has no common name")),
    }
}

/// A TLS error in words that say what to do.
pub fn explain(error: &rustls::Error) -> String {
    use CertificateError as Cert;
    use rustls::Error::{AlertReceived, InvalidCertificate, NoCertificatesPresented};
    let words = match error {
        InvalidCertificate(Cert::Expired | Cert::ExpiredContext { .. }) => {
            "the certificate has expired: issue a new one with 'outram pki issue' (or set the clock right)"
        }
        InvalidCertificate(Cert::NotValidYet | Cert::NotValidYetContext { .. }) => {
            "the certificate is not valid yet: set the clocks of both machines right"
        }
        InvalidCertificate(Cert::UnknownIssuer | Cert::BadSignature) => {
            "the certificate was not issued by the CA expected: use certificates of one 'outram pki' directory on both machines"
        }
        InvalidCertificate(Cert::InvalidPurpose | Cert::InvalidPurposeContext { .. }) => {
            "the certificate is of the wrong kind: a server needs one of 'outram pki issue server', a client one of 'outram pki issue client'"
        }
        InvalidCertificate(Cert::NotValidForName) => {
            "the server's certificate is for another name: issue it with the name or address that clients connect to"
        }
        InvalidCertificate(Cert::NotValidForNameContext { expected, .. }) => {
            return format!(
                "the server's certificate is not for '{}': issue it with the name or address that clients connect to",
                expected.to_str()
            );
        }
        NoCertificatesPresented | AlertReceived(AlertDescription::CertificateRequired) => {
            "no client certificate was shown: configure one of 'outram pki issue client'"
        }
        AlertReceived(AlertDescription::UnknownCA | AlertDescription::DecryptError) => {
            "the peer does not know this machine's CA: use certificates of one 'outram pki' directory on both machines"
        }
        AlertReceived(AlertDescription::CertificateExpired) => {
            "the peer says that this machine's certificate has expired: issue a new one with 'outram pki issue'"
        }
        AlertReceived(
            AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::AccessDenied,
        ) => {
            "the peer does not accept this machine's certificate: a server needs one of 'outram pki issue server', a client one of 'outram pki issue client'"
        }
        rustls::Error::InvalidMessage(_) => "the peer does not speak TLS 1.3",
        other => return format!("TLS failed: {other}"),
    };
    words.to_owned()
}

fn load(files: &TlsFiles) -> Result<Identity, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in load_certificates("CA certificate", &files.ca)? {
        roots.add(certificate).map_err(|source| TlsError::Ca {
            ca: files.ca.clone(),
            source,
        })?;
    }
    let chain = load_certificates("certificate", &files.cert)?;
    let what = "private key";
    let text = read(what, &files.key)?;
    let key = PrivateKeyDer::from_pem_slice(&text).map_err(|source| TlsError::Pem {
        what,
        path: files.key.clone(),
        source,
    })?;
    Ok(Identity {
        roots: Arc::new(roots),
        chain,
        key,
    })
}

fn load_certificates(
    what: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = read(what, path)?;
    let pem = |source| TlsError::Pem {
        what,
        path: path.to_owned(),
        source,
    };
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(pem)?;
    if found.is_empty() {
        return Err(pem(pem::Error::NoItemsFound));
    }
    Ok(found)
}

fn read(what: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|source| TlsError::Read {
        what,
        path: path.to_owned(),
        source,
    })
}

fn key_error(files: &TlsFiles, source: rustls::Error) -> TlsError {
    TlsError::Key {
        key: files.key.clone(),
        cert: files.cert.clone(),
        source,
    }
}

fn client_verifier(
    files: &TlsFiles,
    roots: &Arc<RootCertStore>,
) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    WebPkiClientVerifier::builder_with_provider(roots.clone(), provider())
        .build()
        .map_err(|error| TlsError::Ca {
            ca: files.ca.clone(),
            source: rustls::Error::General(error.to_string()),
        })
}

fn check_server_chain(files: &TlsFiles, identity: &Identity) -> Result<(), TlsError> {
    let (own, between) = identity.chain.split_at(1);
    ParsedCertificate::try_from(&own[0])
        .and_then(|own| {
            verify_server_cert_signed_by_trust_anchor(
                &own,
                &identity.roots,
                between,
                UnixTime::now(),
                provider().signature_verification_algorithms.all,
            )
        })
        .map_err(|source| certificate_error(files, Kind::Server, source))?;
    peer_name(&identity.chain, Kind::Server).map(|_| ())
}

fn check_client_chain(files: &TlsFiles, identity: &Identity) -> Result<(), TlsError> {
    let (own, between) = identity.chain.split_at(1);
    client_verifier(files, &identity.roots)?
        .verify_client_cert(&own[0], between, UnixTime::now())
        .map_err(|source| certificate_error(files, Kind::Client, source))?;
    peer_name(&identity.chain, Kind::Client).map(|_| ())
}

fn certificate_error(files: &TlsFiles, kind: Kind, source: rustls::Error) -> TlsError {
    TlsError::Certificate {
        kind,
        cert: files.cert.clone(),
        ca: files.ca.clone(),
        source,
    }
}
