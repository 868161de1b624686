//! `outram disk`: the far-memory disks that memory servers keep for this host.
//!
//! A disk outlives its guest's end: it stays parked at its servers until the guest comes back, or
//! somebody drops it. A server tells a host of the disks that it used last, and of no others'.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use outram_wire::causes::with_causes;
use outram_wire::disk::DiskKey;
use outram_wire::host_settings::HostSettings;
use outram_wire::server::{DiskId, DiskStats, ServerAddress};
use outram_wire::units::format_size;
use serde::Serialize;

use super::completion::domain_names;
use super::{output, parse_server, table};
use crate::domain_xml::DomainXml;
use crate::host::Paths;
use crate::libvirt::{Libvirt, LibvirtDomain};
use crate::metadata::{self, MemorySettings};
use crate::observer::Observer;

/// What to do with disks.
#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// List the disks that servers keep for this host: whose they are, what they hold, since when
    /// nobody uses them
    List(ListArguments),
    /// Drop a disk that nobody uses: what it holds is gone, its room is given back
    ///
    /// A domain's next ordinary start does so by itself; this is for domains that are not started
    /// again. A guest saved to a file ('virsh save') needs its disk: restored without it, what it
    /// reads and writes there are I/O errors.
    Drop(DropArguments),
}

/// The arguments of `outram disk list`.
#[derive(Debug, Args)]
pub struct ListArguments {
    /// A memory server to ask besides; may be repeated
    #[arg(long, value_name = "[tcp://|rdma://]HOST[:PORT]", value_parser = parse_server)]
    server: Vec<ServerAddress>,
    /// Print JSON: a list of objects
    #[arg(long)]
    json: bool,
}

/// The arguments of `outram disk drop`.
#[derive(Debug, Args)]
pub struct DropArguments {
    /// Name or UUID of the domain; or the disk's own name, as 'outram disk list' shows it
    #[arg(add = domain_names())]
    disk: String,
    /// A memory server to ask besides; may be repeated
    #[arg(long, value_name = "[tcp://|rdma://]HOST[:PORT]", value_parser = parse_server)]
    server: Vec<ServerAddress>,
}

/// Why a disk is not dropped.
#[derive(Debug, thiserror::Error)]
pub enum DropRefusal {
    /// Its guest runs.
    #[error("domain '{0}' is running and has its disk in use: shut it down first")]
    Running(String),
    /// Its guest is saved.
    #[error(
        "domain '{0}' has a saved state that needs its disk: start it and shut it down, or drop the state first ('virsh managedsave-remove {0}')"
    )]
    Saved(String),
    /// There is none.
    #[error(
        "no server keeps a disk {0} for this host ('outram disk list' shows those it keeps); asked: {1}"
    )]
    Unknown(String, String),
}

impl DiskCommand {
    /// Does it. The result is whether every server answered.
    pub fn run(&self, uri: Option<&str>, paths: &Paths) -> Result<bool> {
        match self {
            Self::List(list) => list.run(uri, paths),
            Self::Drop(drop) => drop.run(uri, paths),
        }
    }
}

impl ListArguments {
    fn run(&self, uri: Option<&str>, paths: &Paths) -> Result<bool> {
        let host = HostSettings::read(&paths.config)?;
        // Without libvirt the disks are there all the same, only whose they are is not known.
        let owners = Owners::of_libvirt(uri).unwrap_or_else(|error| {
            complain!("warning: whose disks these are is not known: {error:#}");
            Owners::default()
        });
        let servers = owners.servers(&host, &self.server);
        demand_some(&servers, paths)?;
        let (found, all_answered) = ask(&servers, &host);
        let disks = gather(found, &owners);
        let text = if self.json {
            serde_json::to_string_pretty(&disks)? + "\n"
        } else {
            in_a_table(&disks)
        };
        output::write(&text)?;
        Ok(all_answered)
    }
}

impl DropArguments {
    fn run(&self, uri: Option<&str>, paths: &Paths) -> Result<bool> {
        let host = HostSettings::read(&paths.config)?;
        let libvirt = Libvirt::connect(uri)?;
        let owners = Owners::of(&libvirt)?;
        let domain = libvirt.domain(&self.disk);
        let disk = match (&domain, self.disk.parse::<DiskId>()) {
            (Ok(domain), _) => disk_of(domain)?,
            (Err(_), Ok(disk)) => disk,
            (Err(_), Err(_)) => {
                domain?;
                return Ok(false);
            }
        };
        // Whoever names the disk may not know whose it is.
        if let Some(owner) = owners.by_disk.get(&disk) {
            check_unused(&libvirt.domain(owner)?, owner)?;
        }
        let servers = owners.servers(&host, &self.server);
        demand_some(&servers, paths)?;
        drop_at(&servers, disk, &host)
    }
}

/// The disk that a domain has.
fn disk_of(domain: &LibvirtDomain) -> Result<DiskId> {
    let settings = settings_of(domain)?;
    let Some(disk) = settings.as_ref().and_then(|settings| settings.disk) else {
        bail!(
            "domain '{}' has no far-memory disk in its settings; one that it had before can be dropped by its own name ('outram disk list')",
            domain.name()?
        );
    };
    Ok(disk.key.disk_of(domain.vm_id()?))
}

fn settings_of(domain: &LibvirtDomain) -> Result<Option<MemorySettings>> {
    Ok(metadata::read(&DomainXml::parse(&domain.definition()?)?)?)
}

/// The same of a domain that runs, as it runs; none of one that does not.
fn running_settings_of(domain: &LibvirtDomain) -> Result<Option<MemorySettings>> {
    match domain.is_active()? {
        true => Ok(metadata::read(&DomainXml::parse(
            &domain.running_definition()?,
        )?)?),
        false => Ok(None),
    }
}

fn check_unused(domain: &LibvirtDomain, name: &str) -> Result<()> {
    if domain.is_active()? {
        bail!(DropRefusal::Running(name.to_owned()));
    }
    if domain.has_managed_save()? {
        bail!(DropRefusal::Saved(name.to_owned()));
    }
    Ok(())
}

/// Where nobody is asked, nothing is known of what is kept.
fn demand_some(servers: &BTreeSet<ServerAddress>, paths: &Paths) -> Result<()> {
    if servers.is_empty() {
        bail!(
            "no memory server is known to ask: name those of the disk with --server, or 'servers' in {}",
            paths.config.display()
        );
    }
    Ok(())
}

/// Drops a disk wherever a part of it is parked, once all of its parts are found, or every server has answered.
fn drop_at(servers: &BTreeSet<ServerAddress>, disk: DiskId, host: &HostSettings) -> Result<bool> {
    let (found, all_answered) = ask(servers, host);
    let parts: Vec<_> = found.iter().filter(|(_, part)| part.disk == disk).collect();
    if parts.is_empty() && all_answered {
        let asked: Vec<String> = servers.iter().map(ToString::to_string).collect();
        bail!(DropRefusal::Unknown(disk.to_string(), asked.join(", ")));
    }
    // A part of a disk is of no use to a guest that has all of it in its saved state.
    let found: BTreeSet<u32> = parts.iter().map(|(_, part)| part.shape.part).collect();
    let is_whole = parts
        .first()
        .is_some_and(|(_, part)| found.len() == part.shape.parts as usize);
    if !all_answered && !is_whole {
        complain!("error: nothing is dropped: every server of the disk has to answer first");
        return Ok(false);
    }
    for (server, part) in parts {
        Observer::connect(server, &host.tls_files())?.drop_disk(disk)?;
        let held = format_size(part.leased_bytes);
        say!("Dropped disk {disk} at {server}: {held} given back");
    }
    Ok(true)
}

/// Drops what a domain that is being detached leaves parked, if anything.
pub(super) fn drop_parked(settings: &MemorySettings, disk: DiskId, paths: &Paths) -> Result<()> {
    let host = HostSettings::read(&paths.config)?;
    let servers = match settings.servers.is_empty() {
        true => &host.servers,
        false => &settings.servers,
    };
    // All of them are asked before anything is dropped.
    let mut keepers = Vec::new();
    for server in servers {
        let mut observer = Observer::connect(server, &host.tls_files())?;
        if observer.disks()?.iter().any(|kept| kept.disk == disk) {
            keepers.push((server, observer));
        }
    }
    for (server, mut observer) in keepers {
        observer.drop_disk(disk)?;
        say!("Dropped disk {disk} at {server}");
    }
    Ok(())
}

/// The domains that have far-memory disks, and every server that a domain names.
#[derive(Default)]
struct Owners {
    by_disk: BTreeMap<DiskId, String>,
    servers: BTreeSet<ServerAddress>,
}

impl Owners {
    fn of_libvirt(uri: Option<&str>) -> Result<Self> {
        Self::of(&Libvirt::connect(uri)?)
    }

    fn of(libvirt: &Libvirt) -> Result<Self> {
        let mut owners = Self::default();
        for name in libvirt.domain_names()? {
            // One that is undefined meanwhile, or whose settings are broken, is passed over: its disk
            // is listed without it.
            let Ok(domain) = libvirt.domain(&name) else {
                continue;
            };
            // One that was attached as it runs has settings that its definition has not.
            let all = [settings_of(&domain), running_settings_of(&domain)];
            for settings in all.into_iter().flatten().flatten() {
                owners.servers.extend(settings.servers);
                if let Some(disk) = settings.disk {
                    let key: DiskKey = disk.key;
                    let disk = key.disk_of(domain.vm_id()?);
                    owners.by_disk.insert(disk, name.clone());
                }
            }
        }
        Ok(owners)
    }

    fn servers(&self, host: &HostSettings, more: &[ServerAddress]) -> BTreeSet<ServerAddress> {
        let all = self.servers.iter().chain(&host.servers).chain(more);
        all.cloned().collect()
    }
}

/// What each server keeps; whether all of them answered. One that does not is told on stderr.
fn ask(
    servers: &BTreeSet<ServerAddress>,
    host: &HostSettings,
) -> (Vec<(ServerAddress, DiskStats)>, bool) {
    let files = host.tls_files();
    let mut found = Vec::new();
    let mut all_answered = true;
    for server in servers {
        match Observer::connect(server, &files).and_then(|mut observer| observer.disks()) {
            Ok(disks) => found.extend(disks.into_iter().map(|disk| (server.clone(), disk))),
            Err(error) => {
                complain!("error: {}", with_causes(&error));
                all_answered = false;
            }
        }
    }
    (found, all_answered)
}

/// A disk, its parts taken together.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct ListedDisk {
    disk: DiskId,
    /// The domain whose settings name it, if one of this host does.
    domain: Option<String>,
    size_bytes: u64,
    /// Bytes that servers lend for it.
    used_bytes: u64,
    /// Since when nobody uses any part of it; none while it is in use.
    parked_s: Option<u64>,
    /// Servers that it was made on.
    parts: u32,
    /// Those that were asked and keep a part.
    servers: Vec<String>,
}

fn gather(found: Vec<(ServerAddress, DiskStats)>, owners: &Owners) -> Vec<ListedDisk> {
    let mut disks: BTreeMap<DiskId, ListedDisk> = BTreeMap::new();
    for (server, part) in found {
        let disk = disks.entry(part.disk).or_insert_with(|| ListedDisk {
            disk: part.disk,
            domain: owners.by_disk.get(&part.disk).cloned(),
            size_bytes: part.shape.bytes,
            used_bytes: 0,
            parked_s: part.parked_s,
            parts: part.shape.parts,
            servers: Vec::new(),
        });
        disk.used_bytes += part.leased_bytes;
        disk.parked_s = disk.parked_s.zip(part.parked_s).map(|(a, b)| a.min(b));
        disk.servers.push(server.to_string());
    }
    disks.into_values().collect()
}

const HEADINGS: [&str; 6] = ["DISK", "DOMAIN", "SIZE", "USED", "STATE", "SERVERS"];

fn in_a_table(disks: &[ListedDisk]) -> String {
    if disks.is_empty() {
        return "No server keeps a disk for this host.\n".to_owned();
    }
    let mut rows = vec![HEADINGS.map(str::to_owned)];
    rows.extend(disks.iter().map(|disk| {
        let servers = disk.servers.join(", ");
        let lacking = disk.parts as usize > disk.servers.len();
        [
            disk.disk.to_string(),
            disk.domain.clone().unwrap_or_else(|| "-".to_owned()),
            format_size(disk.size_bytes),
            format_size(disk.used_bytes),
            match disk.parked_s {
                None => "in use".to_owned(),
                Some(seconds) => format!("parked for {}", in_words(seconds)),
            },
            match lacking {
                true => format!("{servers} (of {})", disk.parts),
                false => servers,
            },
        ]
    }));
    table::lay_out(&rows)
}

/// A time in its two largest units.
fn in_words(seconds: u64) -> String {
    let time = Duration::from_secs(seconds).as_secs();
    let (days, hours, minutes) = (time / 86_400, time / 3600 % 24, time / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{time} s"),
        (0, 0, minutes) => format!("{minutes} min"),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use outram_wire::server::{ClientName, DiskShape};

    fn part(disk: u128, part: u32, parked_s: Option<u64>) -> (ServerAddress, DiskStats) {
        let server = format!("10.0.0.{part}:7741").parse().expect("an address");
        let stats = DiskStats {
            disk: DiskId(uuid::Uuid::from_u128(disk)),
            name: ClientName("host1".to_owned()),
            shape: DiskShape {
                bytes: 8 << 30,
                part,
                parts: 2,
            },
            parked_s,
            slabs: 1,
            leased_bytes: 64 << 20,
            reserved_bytes: 4 << 30,
        };
        (server, stats)
    }

    #[test]
    fn parts_of_a_disk_make_one_line() {
        let mut owners = Owners::default();
        let first = DiskId(uuid::Uuid::from_u128(1));
        owners.by_disk.insert(first, "web1".to_owned());
        let found = vec![
            part(1, 0, Some(90_100)),
            part(1, 1, Some(90_000)),
            part(2, 1, None),
        ];
        let shown = in_a_table(&gather(found, &owners));
        let zeros = "00000000-0000-0000-0000-00000000000";
        assert_eq!(
            shown,
            format!(
                "DISK                                  DOMAIN  SIZE   USED     STATE               SERVERS\n\
                 {zeros}1  web1    8 GiB  128 MiB  parked for 1 d 1 h  10.0.0.0:7741, 10.0.0.1:7741\n\
                 {zeros}2  -       8 GiB  64 MiB   in use              10.0.0.1:7741 (of 2)\n"
            )
        );
    }

    #[test]
    fn a_disk_in_use_anywhere_is_in_use() {
        let found = vec![part(1, 0, Some(5)), part(1, 1, None)];
        let disks = gather(found, &Owners::default());
        assert_eq!(disks[0].parked_s, None);
    }
}
