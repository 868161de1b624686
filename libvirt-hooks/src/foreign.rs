//! Domains whose XML other programs generate (Nova, oVirt, KubeVirt): attached within that program,
//! before libvirt sees them.
//!
//! The edits are those of `outram attach` ([`crate::attachment`]), and so are the refusals. How XML
//! and wishes come in and go out is each program's: [`nova`], [`ovirt`], [`kubevirt`].

pub mod kubevirt;
pub mod nova;
pub mod ovirt;

use std::str::FromStr;

use outram_wire::host_settings::{HostSettings, SettingsError};
use outram_wire::server::{AddressError, ServerAddress};
use outram_wire::tuning::Tuning;
use outram_wire::units::{Limit, LocalRatio, PAGE_SIZE, parse_size};

use crate::attachment::{self, AttachRequest, AttachmentError, DiskRequest};
use crate::domain_xml::{DomainXml, DomainXmlError};
use crate::host::Paths;
use crate::metadata;
use crate::refusal::{self, Refusal};

/// Why another program's domain was not attached.
#[derive(Debug, thiserror::Error)]
pub enum ForeignError {
    /// The limit is none.
    #[error(
        "'{0}' is no limit for a guest's local memory: expected a share of its RAM such as 0.5, or a size such as 512MiB"
    )]
    Limit(String),
    /// A server's address is none.
    #[error(transparent)]
    Server(#[from] AddressError),
    /// The domain has something that Outram cannot page.
    #[error("the domain cannot be paged: {}", list(.0))]
    Refused(Vec<Refusal>),
    /// No server anywhere.
    #[error("no memory server is named: {0}")]
    NoServer(String),
    /// The XML could not be edited.
    #[error(transparent)]
    Attachment(#[from] AttachmentError),
    /// The XML itself.
    #[error(transparent)]
    Xml(#[from] DomainXmlError),
    /// The host's settings.
    #[error(transparent)]
    Settings(#[from] SettingsError),
}

fn list(refusals: &[Refusal]) -> String {
    let texts: Vec<String> = refusals.iter().map(ToString::to_string).collect();
    texts.join("; ")
}

/// What is wished for a domain, as people write it in a property or an annotation.
#[derive(Clone, Debug, PartialEq)]
pub struct Wish {
    /// What the guest may cost its host.
    pub limit: Limit,
    /// Its servers; none means those of the host's settings.
    pub servers: Vec<ServerAddress>,
}

impl Wish {
    /// Reads a limit (`0.5` or `512MiB`) and servers (`HOST[:PORT]`, with commas or spaces between).
    pub fn parse(limit: &str, servers: &str) -> Result<Self, ForeignError> {
        let servers = servers
            .split([',', ' '])
            .filter(|server| !server.is_empty())
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        Ok(Self {
            limit: parse_limit(limit.trim())?,
            servers,
        })
    }
}

/// A number without a unit is a share, for a size of less than two bytes makes no sense.
fn parse_limit(text: &str) -> Result<Limit, ForeignError> {
    let wrong = || ForeignError::Limit(text.to_owned());
    if text.parse::<f64>().is_ok() {
        return LocalRatio::from_str(text)
            .map(Limit::LocalRatio)
            .map_err(|_| wrong());
    }
    match parse_size(text) {
        Ok(bytes) if bytes >= PAGE_SIZE as u64 => Ok(Limit::LocalBytes(bytes)),
        _ => Err(wrong()),
    }
}

/// Attaches a domain's XML. `settings` are those of the host that it will run on, if this is that
/// host; `cure` says how a server is named.
pub fn attach(
    xml: &str,
    wish: &Wish,
    paths: &Paths,
    settings: Option<&HostSettings>,
    cure: &str,
) -> Result<String, ForeignError> {
    let mut domain = DomainXml::parse(xml)?;
    let request = AttachRequest {
        limit: wish.limit,
        servers: wish.servers.clone(),
        seal: None,
        lost_pages: None,
        tuning: Tuning::default(),
        disk: DiskRequest::Keep,
    };
    attachment::attach(&mut domain, &paths.run, &request)?;
    let refusals = refusal::check(&domain, &paths.run)?;
    if !refusals.is_empty() {
        return Err(ForeignError::Refused(refusals));
    }
    let in_domain = metadata::read(&domain).map_err(AttachmentError::from)?;
    let named = in_domain.is_some_and(|found| !found.servers.is_empty())
        || settings.is_some_and(|settings| !settings.servers.is_empty());
    if !named {
        return Err(ForeignError::NoServer(cure.to_owned()));
    }
    Ok(domain.to_text()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_shares_or_sizes() {
        for (text, limit) in [
            (
                "0.5",
                Limit::LocalRatio(LocalRatio::new(0.5).expect("a ratio")),
            ),
            (
                "1",
                Limit::LocalRatio(LocalRatio::new(1.0).expect("a ratio")),
            ),
            ("512MiB", Limit::LocalBytes(512 << 20)),
            (" 2G ", Limit::LocalBytes(2 << 30)),
        ] {
            let wish = Wish::parse(text, "").expect(text);
            assert_eq!((wish.limit, wish.servers), (limit, Vec::new()));
        }
        for text in ["", "0", "2", "-1", "half", "1B", "NaN", "inf"] {
            assert!(Wish::parse(text, "").is_err(), "{text}");
        }
    }

    #[test]
    fn servers_stand_between_commas_or_spaces() {
        let wish = Wish::parse("0.5", "10.0.0.2, mem2:7000").expect("two servers");
        let shown: Vec<String> = wish.servers.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["10.0.0.2:7741", "mem2:7000"]);
        assert!(Wish::parse("0.5", "mem2:x").is_err());
    }
}
