//! `outram tune`: a new limit for a running domain, or other ways to move its memory, for its definition,
//! or both.

use anyhow::{Result, bail};
use clap::{ArgGroup, Args};
use outram_wire::control::Status;
use outram_wire::tuning::Tuning;
use outram_wire::units::{Limit, VmId};

use super::attach::check_editable;
use super::completion::domain_names;
use super::report::{Guest, find_guest, within_time};
use super::{LimitArguments, TuningArguments};
use crate::backend_control::ControlError;
use crate::domain_xml::DomainXml;
use crate::host::Paths;
use crate::libvirt::{Libvirt, LibvirtDomain};
use crate::metadata::{self, MemorySettings};
use crate::refusal;

/// The arguments of `outram tune`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("change").required(true).multiple(true).args(["local_ratio", "local", "granularity", "workers", "queue_depth", "compressed_share"]))]
pub struct TuneArguments {
    /// Name or UUID of the domain
    #[arg(add = domain_names())]
    domain: String,
    #[command(flatten)]
    limit: LimitArguments,
    #[command(flatten)]
    tuning: TuningArguments,
    /// Also change the domain's definition, so that its next start uses it
    ///
    /// Without this it is for the guest that runs, and goes with it where it is saved or migrated.
    #[arg(long)]
    persist: bool,
}

impl TuneArguments {
    /// Sets what is asked for.
    pub fn run(&self, uri: Option<&str>, paths: &Paths) -> Result<bool> {
        let guest = find_guest(&self.domain, uri, paths)?;
        // What cannot be is refused before anything changes.
        let later = self.persist.then(|| self.later(&guest, uri)).transpose()?;
        let running = guest.control.status();
        match &running {
            Ok(status) => {
                self.tune(&guest, status)?;
                self.note_in_running(&guest, uri);
            }
            Err(_) if self.persist && !domain_runs(&guest, uri)? => {
                say!(
                    "Domain '{}' is not running: only its settings are changed",
                    guest.name
                );
            }
            Err(error @ ControlError::NotRunning(_)) => bail!(
                "domain '{}' has no running backend: {error}; start it first, or use --persist on a domain that is shut off",
                guest.name
            ),
            Err(error) => bail!("domain '{}': {error}", guest.name),
        }
        if let Some((domain, settings)) = later {
            domain.set_settings(&metadata::to_plain_text(&settings)?)?;
            say!("Later starts of '{}' will use it too.", guest.name);
        }
        Ok(true)
    }

    fn tune(&self, guest: &Guest, status: &Status) -> Result<()> {
        let tuning = self.tuning.tuning();
        let named: Vec<_> = tuning.named().collect();
        let unknown = match tuning.compressed_share {
            Some(_) if status.compressed_share.is_none() => Some("compressed-share"),
            _ if status.queue_depth.is_none() => named.first().map(|(name, _)| *name),
            _ => None,
        };
        if let Some(name) = unknown {
            bail!(
                "the backend of domain '{0}' is of an earlier build, whose {name} cannot be changed: 'outram restart {0}' replaces it by the one that is installed",
                guest.name
            );
        }
        // What servers may have no room for goes first.
        if let Some(limit) = self.limit.limit() {
            guest.control.tune(limit)?;
            say!("Domain '{}' now has the limit: {limit}", guest.name);
        }
        if tuning != Tuning::default() {
            guest.control.set_tuning(tuning)?;
        }
        for (name, value) in named {
            say!("Domain '{}' now has the {name}: {value}", guest.name);
        }
        Ok(())
    }

    /// A save or a migration takes the settings of the running domain along, so these are to be what it runs with.
    /// The guest is tuned by now, and libvirt may be away or hang: that is no failure.
    fn note_in_running(&self, guest: &Guest, uri: Option<&str>) {
        let (vm, uri, wish) = (guest.vm, uri.map(str::to_owned), self.wish());
        let noted = within_time(move || wish.note_in(vm, uri.as_deref()));
        if let Err(error) = noted.and_then(|noted| noted) {
            complain!(
                "warning: it runs so now, but a save or a migration would take along what was before, for its metadata could not be changed: {error:#}; run this again once libvirt answers"
            );
        }
    }

    /// What is asked for.
    fn wish(&self) -> Wish {
        Wish {
            limit: self.limit.limit(),
            tuning: self.tuning.tuning(),
        }
    }

    /// The domain, and its settings from its next start on.
    fn later(&self, guest: &Guest, uri: Option<&str>) -> Result<(LibvirtDomain, MemorySettings)> {
        let domain = Libvirt::connect(uri)?.domain(&guest.vm.to_string())?;
        check_editable(&domain, &domain.name()?)?;
        let xml = DomainXml::parse(&domain.definition()?)?;
        let Some(settings) = metadata::read(&xml)? else {
            bail!(
                "domain '{}' does not use Outram: run 'outram attach' on it first",
                domain.name()?
            );
        };
        let before = refusal::check_settings(&xml, &settings);
        let settings = self.wish().applied(settings);
        // What was wrong already is for the next start to tell.
        let mut refusals = refusal::check_settings(&xml, &settings).into_iter();
        if let Some(refusal) = refusals.find(|refusal| !before.contains(refusal)) {
            bail!(refusal);
        }
        Ok((domain, settings))
    }
}

/// What is to be different.
struct Wish {
    limit: Option<Limit>,
    tuning: Tuning,
}

impl Wish {
    /// What is asked for, in place of what was.
    fn applied(&self, settings: MemorySettings) -> MemorySettings {
        MemorySettings {
            limit: self.limit.unwrap_or(settings.limit),
            tuning: self.tuning.or(settings.tuning),
            ..settings
        }
    }

    /// Changes the settings of a domain as it runs, which may be others than by its definition.
    fn note_in(&self, vm: VmId, uri: Option<&str>) -> Result<()> {
        let domain = Libvirt::connect(uri)?.domain(&vm.to_string())?;
        if !domain.is_active()? {
            return Ok(());
        }
        let running = DomainXml::parse(&domain.running_definition()?)?;
        if let Some(settings) = metadata::read(&running)? {
            let settings = metadata::to_plain_text(&self.applied(settings))?;
            domain.set_running_settings(Some(&settings))?;
        }
        Ok(())
    }
}

fn domain_runs(guest: &Guest, uri: Option<&str>) -> Result<bool> {
    Ok(Libvirt::connect(uri)?
        .domain(&guest.vm.to_string())?
        .is_active()?)
}
