//! `outram tune`: a new limit for a running domain, for its definition, or both.

use anyhow::{Result, bail};
use clap::Args;

use super::LimitArguments;
use super::completion::domain_names;
use super::report::{Guest, find_guest};
use crate::domain_xml::DomainXml;
use crate::host::Paths;
use crate::libvirt::{Libvirt, LibvirtDomain};
use crate::metadata::{self, MemorySettings};

/// The arguments of `outram tune`.
#[derive(Debug, Args)]
pub struct TuneArguments {
    /// Name or UUID of the domain
    #[arg(add = domain_names())]
    domain: String,
    #[command(flatten)]
    limit: LimitArguments,
    /// Also change the domain's settings, so that later starts use the new limit
    #[arg(long)]
    persist: bool,
}

impl TuneArguments {
    /// Sets the limit.
    pub fn run(&self, uri: Option<&str>, paths: &Paths) -> Result<bool> {
        let limit = self.limit.limit();
        let guest = find_guest(&self.domain, uri, paths)?;
        let running = guest.control.status();
        match &running {
            Ok(_) => {
                guest.control.tune(limit)?;
                println!("Domain '{}' now has the limit: {limit}", guest.name);
            }
            Err(_) if self.persist && !domain_runs(&guest, uri)? => {
                println!(
                    "Domain '{}' is not running: only its settings are changed",
                    guest.name
                );
            }
            Err(error) => bail!(
                "domain '{}' has no running backend: {error}; start it first, or use --persist on a domain that is shut off",
                guest.name
            ),
        }
        if self.persist {
            self.persist(&guest, uri)?;
            println!("Later starts of '{}' will use it too.", guest.name);
        }
        Ok(true)
    }

    fn persist(&self, guest: &Guest, uri: Option<&str>) -> Result<()> {
        let domain = Libvirt::connect(uri)?.domain(&guest.vm.to_string())?;
        let settings = settings_of(&domain)?;
        let settings = MemorySettings {
            limit: self.limit.limit(),
            ..settings
        };
        domain.set_settings(&metadata::to_plain_text(&settings)?, domain.is_active()?)?;
        Ok(())
    }
}

fn domain_runs(guest: &Guest, uri: Option<&str>) -> Result<bool> {
    Ok(Libvirt::connect(uri)?
        .domain(&guest.vm.to_string())?
        .is_active()?)
}

fn settings_of(domain: &LibvirtDomain) -> Result<MemorySettings> {
    let xml = DomainXml::parse(&domain.definition()?)?;
    match metadata::read(&xml)? {
        Some(settings) => Ok(settings),
        None => bail!(
            "domain '{}' does not use Outram: run 'outram attach' on it first",
            domain.name()?
        ),
    }
}
