//! `outram attach` and `outram detach`: edits of a domain's definition, and changes of what runs.

use std::fs;
use std::io;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args};
use outram_wire::control::is_supervised;
use outram_wire::disk::{DiskKey, MAX_DISK_BYTES, MIN_DISK_BYTES, is_disk_size};
use outram_wire::host_settings::HostSettings;
use outram_wire::lost_pages::LostPages;
use outram_wire::seal::Seal;
use outram_wire::units::{Limit, VmId, format_size, parse_size};

use super::affect::AffectArguments;
use super::completion::domain_names;
use super::live::Running;
use super::report::run_dir;
use super::{LimitArguments, TuningArguments, disk, parse_server};
use crate::attachment::{self, AttachRequest, Change, DiskRequest};
use crate::backend_control::{BackendControl, ControlError};
use crate::domain_xml::DomainXml;
use crate::host::Paths;
use crate::launch;
use crate::libvirt::{Libvirt, LibvirtDomain};
use crate::metadata::{self, MemorySettings};
use crate::refusal::{self, Refusal};
use outram_wire::server::ServerAddress;

/// Why a domain is not attached or detached.
#[derive(Debug, thiserror::Error)]
pub enum AttachRefusal {
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
    #[error("no memory server is named: give --server HOST, or set 'servers' in {0}")]
    NoServer(std::path::PathBuf),
}

pub(super) fn list(refusals: &[Refusal]) -> String {
    refusals
        .iter()
        .map(|refusal| format!("\n  - {refusal}"))
        .collect()
}

/// The arguments of `outram attach`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("amount").required(true).args(["local_ratio", "local"]))]
pub struct AttachArguments {
    /// Name or UUID of the domain
    #[arg(add = domain_names())]
    domain: String,
    #[command(flatten)]
    limit: LimitArguments,
    /// A memory server; may be repeated: the guest's pages are spread over all of them
    ///
    /// Each holds a part and has to be there at the start: a second one is more room, no standby. Without any, the
    /// domain keeps the servers it has, or uses those of /etc/outram/backend.toml. With tcp:// or rdma:// pages
    /// go over that alone; without, over RDMA where it works, else over TCP.
    #[arg(long, value_name = "[tcp://|rdma://]HOST[:PORT]", value_parser = parse_server)]
    server: Vec<ServerAddress>,
    /// Give the guest a disk of this size in far memory, such as 8GiB: for swap or scratch files;
    /// 'none' takes it away
    ///
    /// It is thin, and volatile: emptied when the guest is shut down, kept when it is saved or
    /// migrated. Without this, the domain keeps the disk it has.
    #[arg(long, value_name = "SIZE", value_parser = parse_disk_size)]
    disk_size: Option<DiskSize>,
    /// Whether the guest's memory is sealed (encrypted) before it leaves this host
    ///
    /// 'off' is for wires and servers that may see it: what comes back is checked all the same.
    /// Without this it stays as the domain has it, which is 'on' at first. A guest that runs with
    /// Outram already keeps what it has until its next start.
    #[arg(long, value_name = "on|off")]
    seal: Option<Seal>,
    /// What becomes of the guest where it uses a page that is lost for good
    ///
    /// 'stop' stops it there. 'poison' gives it a memory error, as hardware does, by which its kernel
    /// ends the process whose page it was, or itself: for domains of type kvm, on Linux 6.6 or newer.
    /// Without this it stays as the domain has it, which is 'stop' at first. A guest that runs with
    /// Outram already keeps what it has until its next start.
    #[arg(long, value_name = "stop|poison")]
    lost_pages: Option<LostPages>,
    #[command(flatten)]
    tuning: TuningArguments,
    #[command(flatten)]
    affect: AffectArguments,
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
    #[command(flatten)]
    affect: AffectArguments,
    /// Drop what its far-memory disk left parked at the memory servers, too
    ///
    /// Without this it stays there, for a guest saved to a file may need it.
    #[arg(long)]
    drop_disk: bool,
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
        let affects = self.affect.of(&name, found.is_active()?)?;
        let request = AttachRequest {
            limit: self.limit.limit().context("no limit is given")?,
            servers: self.server.clone(),
            seal: self.seal,
            lost_pages: self.lost_pages,
            tuning: self.tuning.tuning(),
            disk: match self.disk_size {
                None => DiskRequest::Keep,
                Some(DiskSize::None) => DiskRequest::Remove,
                Some(DiskSize::Bytes(bytes)) => {
                    let key = DiskKey::random().map_err(io::Error::other);
                    DiskRequest::Size(bytes, key.context("drawing a key for the disk")?)
                }
            },
        };
        // Both are checked before either is changed.
        let config = match affects.config {
            true => Some(self.edit(&found, &name, &request, paths)?),
            false => None,
        };
        if affects.live {
            self.attach_live(&found, &name, &request, paths)?;
        }
        let Some(edit) = config else { return Ok(true) };
        // That may have taken long, and somebody else have changed the definition.
        let edit = match affects.live && !self.dry_run {
            true => self.edit(&found, &name, &request, paths)?,
            false => edit,
        };
        if self.dry_run || edit.changes.is_empty() {
            report(&name, &edit.changes, self.dry_run);
            return Ok(true);
        }
        let defined = libvirt.define(&edit.edited.to_text()?)?;
        note_additions(&edit.before, &defined)?;
        report(&name, &edit.changes, false);
        if self.disk_size == Some(DiskSize::None)
            && let Some(former) = metadata::read(&edit.before).ok().flatten()
        {
            tell_of_disk(&former, found.vm_id()?);
        }
        if found.is_active()? {
            say!("It takes effect when the domain is shut down and started again.");
        } else {
            say!("It takes effect when the domain is started: virsh start {name}");
        }
        Ok(true)
    }

    fn edit(
        &self,
        found: &LibvirtDomain,
        name: &str,
        request: &AttachRequest,
        paths: &Paths,
    ) -> Result<Edit> {
        let edit = Edit::of(found, name, |domain| {
            Ok(attachment::attach(domain, &paths.run, request)?)
        })?;
        check_result(&edit.edited, name, paths)?;
        warn_about_limit(&edit.edited, request.limit)?;
        Ok(edit)
    }

    fn attach_live(
        &self,
        found: &LibvirtDomain,
        name: &str,
        request: &AttachRequest,
        paths: &Paths,
    ) -> Result<()> {
        let running = Running::new(found, name, paths)?;
        let prepared = running.prepare(request)?;
        if !self.dry_run {
            running.attach(&prepared)?;
        }
        report_live(name, prepared.changes(), self.dry_run);
        if !self.dry_run {
            say!(
                "What is above its limit leaves in the background: 'outram status {name}' shows how far it is."
            );
        }
        Ok(())
    }
}

/// A definition before and after.
struct Edit {
    before: DomainXml,
    edited: DomainXml,
    changes: Vec<Change>,
}

impl Edit {
    /// Changes a domain's definition as it is now; it is not defined anew yet.
    fn of(
        found: &LibvirtDomain,
        name: &str,
        change: impl FnOnce(&mut DomainXml) -> Result<Vec<Change>>,
    ) -> Result<Self> {
        check_editable(found, name)?;
        let text = found.definition()?;
        let mut edited = DomainXml::parse(&text)?;
        let changes = change(&mut edited)?;
        Ok(Self {
            before: DomainXml::parse(&text)?,
            edited,
            changes,
        })
    }
}

impl DetachArguments {
    /// Detaches the domain.
    pub fn run(&self, uri: Option<&str>, paths: &Paths) -> Result<bool> {
        let libvirt = Libvirt::connect(uri)?;
        let found = libvirt.domain(&self.domain)?;
        let name = found.name()?;
        let is_active = found.is_active()?;
        let affects = self.affect.of(&name, is_active)?;
        let config = match affects.config {
            true => Some(Self::edit(&found, &name, paths)?),
            false => None,
        };
        if affects.live {
            let running = Running::new(&found, &name, paths)?;
            let changes = running.detachment()?;
            if !self.dry_run {
                running.detach()?;
            }
            report_live(&name, &changes, self.dry_run);
        }
        let Some(edit) = config else {
            return Ok(true);
        };
        // That may have taken long, and somebody else have changed the definition.
        let edit = match affects.live && !self.dry_run {
            true => Self::edit(&found, &name, paths)?,
            false => edit,
        };
        if !self.dry_run {
            // With its settings goes the key to its disk: settings that are broken name none.
            if let Some(settings) = metadata::read(&edit.before).ok().flatten() {
                self.leave_disk(&settings, found.vm_id()?, paths)?;
            }
            libvirt.define(&edit.edited.to_text()?)?;
            if !is_active {
                remove_run_dir(&found, paths)?;
            }
        }
        report(&name, &edit.changes, self.dry_run);
        Ok(true)
    }

    fn edit(found: &LibvirtDomain, name: &str, paths: &Paths) -> Result<Edit> {
        Edit::of(found, name, |domain| {
            Ok(attachment::detach(domain, &paths.run)?)
        })
    }

    /// Drops the disk, or says how it is dropped later.
    fn leave_disk(&self, settings: &MemorySettings, vm: VmId, paths: &Paths) -> Result<()> {
        match settings.disk {
            Some(disk) if self.drop_disk => {
                disk::drop_parked(settings, disk.key.disk_of(vm), paths).context(
                    "the domain is left as it is, for its far-memory disk could not be dropped",
                )
            }
            _ => {
                tell_of_disk(settings, vm);
                Ok(())
            }
        }
    }
}

/// Says how the disk of these settings, which are about to be gone, is dropped later.
fn tell_of_disk(settings: &MemorySettings, vm: VmId) {
    let Some(disk) = &settings.disk else { return };
    let disk = disk.key.disk_of(vm);
    // Its servers are no longer known by then, unless the host's settings name them.
    let servers = settings.servers.iter();
    let named: String = servers
        .map(|server| format!(" --server {server}"))
        .collect();
    say!("Its far-memory disk may stay parked at its servers; to drop it:");
    say!("  outram disk drop {disk}{named}");
}

pub(super) fn check_editable(domain: &LibvirtDomain, name: &str) -> Result<()> {
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
        complain!(
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
        defined.set_settings(&metadata::to_plain_text(&settings)?)?;
    }
    Ok(())
}

/// How long a backend's supervisor may take to follow it, and how often that is looked at.
const END_MOMENT: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(50);

/// Removes what a failed start may have left; a backend that still ends keeps its directory.
pub(super) fn remove_run_dir(domain: &LibvirtDomain, paths: &Paths) -> Result<()> {
    let vm = domain.vm_id()?;
    let run_dir = run_dir(paths, vm);
    let control = BackendControl::of(&run_dir);
    if !matches!(control.status(), Err(ControlError::NotRunning(_))) {
        return Ok(());
    }
    // It unmounts the state.
    let deadline = Instant::now() + END_MOMENT;
    while is_supervised(&run_dir) {
        if Instant::now() > deadline {
            return Ok(());
        }
        sleep(POLL);
    }
    // Its unit unmounts what the supervisor, in a view of its own, could not.
    let mut removed = fs::remove_dir_all(&run_dir);
    while let Err(error) = &removed
        && error.kind() == io::ErrorKind::ResourceBusy
        && Instant::now() < deadline + END_MOMENT
    {
        sleep(POLL);
        removed = fs::remove_dir_all(&run_dir);
    }
    for removed in [removed, fs::remove_file(launch::name_file(&paths.run, vm))] {
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", run_dir.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

fn report_live(name: &str, changes: &[Change], dry_run: bool) {
    match dry_run {
        true => say!("Domain '{name}' would be changed as it runs:"),
        false => say!("Domain '{name}' changed as it runs:"),
    }
    for change in changes {
        say!("  {change}");
    }
}

fn report(name: &str, changes: &[Change], dry_run: bool) {
    match (changes.is_empty(), dry_run) {
        (true, _) => say!("Domain '{name}' is as asked already; nothing to change."),
        (false, true) => say!("Domain '{name}' would be changed:"),
        (false, false) => say!("Domain '{name}' changed:"),
    }
    for change in changes {
        say!("  {change}");
    }
}
