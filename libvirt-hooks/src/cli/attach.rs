//! `outram attach` and `outram detach`: edits of a shut-off domain's definition.

use std::fs;
use std::io;

use anyhow::{Context, Result, bail};
use clap::Args;
use outram_wire::disk::{DiskKey, MAX_DISK_BYTES, MIN_DISK_BYTES, is_disk_size};
use outram_wire::units::{Limit, format_size, parse_size};

use super::completion::domain_names;
use super::{LimitArguments, parse_server};
use crate::attachment::{self, AttachRequest, Change, DiskRequest};
use crate::backend_control::{BackendControl, ControlError};
use crate::domain_xml::DomainXml;
use crate::host::{HostSettings, Paths};
use crate::launch;
use crate::libvirt::{Libvirt, LibvirtDomain};
use crate::metadata;
use crate::refusal::{self, Refusal};
use outram_wire::server::ServerAddress;

/// Why a domain is not attached or detached.
#[derive(Debug, thiserror::Error)]
pub enum AttachRefusal {
    /// It runs.
    #[error("domain '{0}' is running: shut it down first ('virsh shutdown {0}'), then repeat this")]
    Running(String),
    /// It has no definition.
    #[error(
        "domain '{0}' is transient: it has no definition to change; define it first ('virsh define')"
    )]
    Transient(String),
    /// Its next start resumes a saved guest.
    #[error(
        "domain '{0}' has a saved state that its next start resumes with the old hardware: start it and shut it down, or drop the state ('virsh managedsave-remove {0}')"
    )]
    Saved(String),
    /// It has something that Outram cannot page.
    #[error("domain '{name}' cannot be paged:{}", list(.refusals))]
    Domain {
        /// Its name.
        name: String,
        /// Why not.
        refusals: Vec<Refusal>,
    },
    /// No server anywhere.
    #[error("no memory server is named: give --server HOST[:PORT], or set 'servers' in {0}")]
    NoServer(std::path::PathBuf),
}

fn list(refusals: &[Refusal]) -> String {
    refusals
        .iter()
        .map(|refusal| format!("\n  - {refusal}"))
        .collect()
}

/// The arguments of `outram attach`.
#[derive(Debug, Args)]
pub struct AttachArguments {
    /// Name or UUID of the domain
    #[arg(add = domain_names())]
    domain: String,
    #[command(flatten)]
    limit: LimitArguments,
    /// A memory server; may be repeated, in order of preference
    ///
    /// Without it the domain keeps the servers it has, or uses those of /etc/outram/backend.toml.
    #[arg(long, value_name = "HOST[:PORT]", value_parser = parse_server)]
    server: Vec<ServerAddress>,
    /// Give the guest a disk of this size in far memory, such as 8GiB: for swap or scratch files;
    /// 'none' takes it away
    ///
    /// It is thin, and volatile: emptied when the guest is shut down, kept when it is saved or
    /// migrated. Without this, the domain keeps the disk it has.
    #[arg(long, value_name = "SIZE", value_parser = parse_disk_size)]
    disk_size: Option<DiskSize>,
    /// Show what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
}

/// A disk's size as it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DiskSize {
    None,
    Bytes(u64),
}

fn parse_disk_size(text: &str) -> Result<DiskSize, String> {
    if text == "none" {
        return Ok(DiskSize::None);
    }
    match parse_size(text) {
        Ok(bytes) if is_disk_size(bytes) => Ok(DiskSize::Bytes(bytes)),
        Ok(_) => Err(format!(
            "expected a multiple of 4096 bytes from {} to {}, or 'none'",
            format_size(MIN_DISK_BYTES),
            format_size(MAX_DISK_BYTES)
        )),
        Err(error) => Err(error.to_string()),
    }
}

/// The arguments of `outram detach`.
#[derive(Debug, Args)]
pub struct DetachArguments {
    /// Name or UUID of the domain
    #[arg(add = domain_names())]
    domain: String,
    /// Show what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
}

impl AttachArguments {
    /// Attaches the domain.
    pub fn run(&self, uri: Option<&str>, paths: &Paths) -> Result<bool> {
        let libvirt = Libvirt::connect(uri)?;
        let found = libvirt.domain(&self.domain)?;
        let name = found.name()?;
        check_editable(&found, &name)?;
        let text = found.definition()?;
        let before = DomainXml::parse(&text)?;
        let mut edited = DomainXml::parse(&text)?;
        let request = AttachRequest {
            limit: self.limit.limit(),
            servers: self.server.clone(),
            disk: match self.disk_size {
                None => DiskRequest::Keep,
                Some(DiskSize::None) => DiskRequest::Remove,
                Some(DiskSize::Bytes(bytes)) => {
                    let key = DiskKey::random().map_err(io::Error::other);
                    DiskRequest::Size(bytes, key.context("drawing a key for the disk")?)
                }
            },
        };
        let changes = attachment::attach(&mut edited, &paths.run, &request)?;
        check_result(&edited, &name, paths)?;
        warn_about_limit(&edited, request.limit)?;
        if self.dry_run || changes.is_empty() {
            report(&name, &changes, self.dry_run);
            return Ok(true);
        }
        let defined = libvirt.define(&edited.to_text()?)?;
        note_additions(&before, &defined)?;
        report(&name, &changes, false);
        println!("It takes effect when the domain is started: virsh start {name}");
        Ok(true)
    }
}

impl DetachArguments {
    /// Detaches the domain.
    pub fn run(&self, uri: Option<&str>, paths: &Paths) -> Result<bool> {
        let libvirt = Libvirt::connect(uri)?;
        let found = libvirt.domain(&self.domain)?;
        let name = found.name()?;
        check_editable(&found, &name)?;
        let mut edited = DomainXml::parse(&found.definition()?)?;
        let changes = attachment::detach(&mut edited, &paths.run)?;
        if !self.dry_run {
            libvirt.define(&edited.to_text()?)?;
            remove_run_dir(&found, paths)?;
        }
        report(&name, &changes, self.dry_run);
        Ok(true)
    }
}

fn check_editable(domain: &LibvirtDomain, name: &str) -> Result<()> {
    if domain.is_active()? {
        bail!(AttachRefusal::Running(name.to_owned()));
    }
    if !domain.is_persistent()? {
        bail!(AttachRefusal::Transient(name.to_owned()));
    }
    if domain.has_managed_save()? {
        bail!(AttachRefusal::Saved(name.to_owned()));
    }
    Ok(())
}

/// Checks the domain as it would be defined.
fn check_result(edited: &DomainXml, name: &str, paths: &Paths) -> Result<()> {
    let refusals = refusal::check(edited, &paths.run)?;
    if !refusals.is_empty() {
        bail!(AttachRefusal::Domain {
            name: name.to_owned(),
            refusals,
        });
    }
    let named = metadata::read(edited)?.is_some_and(|settings| !settings.servers.is_empty());
    if !named && HostSettings::read(&paths.config)?.servers.is_empty() {
        bail!(AttachRefusal::NoServer(paths.config.clone()));
    }
    Ok(())
}

fn warn_about_limit(domain: &DomainXml, limit: Limit) -> Result<()> {
    let ram = domain.ram_bytes()?;
    if let Limit::LocalBytes(bytes) = limit
        && bytes >= ram
    {
        eprintln!(
            "warning: {} is not less than the guest's RAM ({}): nothing will leave this host",
            format_size(bytes),
            format_size(ram)
        );
    }
    Ok(())
}

/// libvirt may have added controllers to make room for the disk: `detach` removes them again.
fn note_additions(before: &DomainXml, defined: &LibvirtDomain) -> Result<()> {
    let after = DomainXml::parse(&defined.definition()?)?;
    if let Some(settings) = attachment::note_controllers(before, &after)? {
        defined.set_settings(&metadata::to_plain_text(&settings)?, false)?;
    }
    Ok(())
}

/// Removes what a failed start may have left; a backend that still ends keeps its directory.
fn remove_run_dir(domain: &LibvirtDomain, paths: &Paths) -> Result<()> {
    let vm = domain.vm_id()?;
    let run_dir = paths.run.join(vm.to_string());
    let control = BackendControl::of(&run_dir);
    if !matches!(control.status(), Err(ControlError::NotRunning(_))) {
        return Ok(());
    }
    for removed in [
        fs::remove_dir_all(&run_dir),
        fs::remove_file(launch::name_file(&paths.run, vm)),
    ] {
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", run_dir.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

fn report(name: &str, changes: &[Change], dry_run: bool) {
    match (changes.is_empty(), dry_run) {
        (true, _) => println!("Domain '{name}' is as asked already; nothing to change."),
        (false, true) => println!("Domain '{name}' would be changed:"),
        (false, false) => println!("Domain '{name}' changed:"),
    }
    for change in changes {
        println!("  {change}");
    }
}
