//! What `outram doctor DOMAIN` checks: whether a domain can be attached, as it runs or at its next
//! start, and whether one that is attached can be detached while it runs.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;
use outram_wire::causes::with_causes;
use outram_wire::control::Phase;
use outram_wire::host_settings::HostSettings;
use outram_wire::limits::Standing;
use outram_wire::server::ServerAddress;
use outram_wire::tuning::Tuning;
use outram_wire::units::{Limit, PageSize, format_size};

use super::attach::AttachRefusal;
use super::doctor::Check;
use super::host_checks;
use super::live::{self, LiveRefusal};
use super::report::run_dir;
use crate::attachment::{self, AttachRequest, DiskRequest};
use crate::backend_control::{BackendControl, ControlError};
use crate::backend_log::BackendLog;
use crate::domain_xml::DomainXml;
use crate::host::Paths;
use crate::hotplug_slot;
use crate::launch;
use crate::libvirt::{Libvirt, LibvirtDomain};
use crate::metadata::{self, MemorySettings};
use crate::page_size;
use crate::refusal::{self, Refusal};

/// The check of memory that comes and goes.
const HOT_PLUG: &str = "hot-plug";

/// A domain, and what is known of the host it runs on.
struct Patient<'a> {
    name: &'a str,
    found: LibvirtDomain,
    host: &'a HostSettings,
    paths: &'a Paths,
    /// The servers that were asked: of a domain that runs, its definition mostly names the same.
    asked: BTreeSet<ServerAddress>,
}

/// All checks of a domain.
pub(super) fn domain(
    libvirt: &Libvirt,
    name: &str,
    host: &HostSettings,
    paths: &Paths,
) -> Vec<Check> {
    let checked = libvirt.domain(name).map_err(Into::into).and_then(|found| {
        let mut patient = Patient {
            name,
            found,
            host,
            paths,
            asked: BTreeSet::new(),
        };
        patient.examine()
    });
    checked.unwrap_or_else(|error| {
        let error = with_causes(error.as_ref());
        vec![Check::fail(
            "domain",
            error,
            "name a domain of 'virsh list --all'",
        )]
    })
}

impl Patient<'_> {
    fn examine(&mut self) -> Result<Vec<Check>> {
        let mut checks = Vec::new();
        if self.found.is_persistent()? {
            checks.extend(self.definition()?);
        }
        if self.found.is_active()? {
            checks.extend(self.running()?);
        }
        Ok(checks)
    }

    /// The domain as its next start would find it.
    fn definition(&mut self) -> Result<Vec<Check>> {
        let domain = DomainXml::parse(&self.found.definition()?)?;
        let label = "next start";
        let settings = match metadata::read(&domain) {
            Ok(settings) => settings,
            Err(error) => {
                let cure = format!("virsh edit {}", self.name);
                return Ok(vec![Check::fail(label, error.to_string(), cure)]);
            }
        };
        let mut checks = Vec::new();
        if self.found.has_managed_save()? {
            let saved = AttachRefusal::Saved(self.name.to_owned());
            checks.push(Check::warn(label, saved.to_string(), ""));
        }
        let Some(settings) = settings else {
            return match checks.is_empty() {
                true => self.would_attach(&domain),
                false => Ok(checks),
            };
        };
        let found = format!("attached; limit: {}", settings.limit);
        checks.push(Check::pass(label, found));
        checks.extend(verdict(
            "devices",
            refusal::check(&domain, &self.paths.run)?,
            "has nothing that keeps it from being paged",
        ));
        checks.extend(hot_plug(&domain)?);
        let needs = Standing {
            limit: settings.limit,
            ram_bytes: domain.ram_bytes()?,
            // Where it has pages of another size, that is refused above.
            page_size: page_size::find(&domain).unwrap_or(PageSize::BASE),
            compressed: settings.tuning.compressed_share.unwrap_or_default(),
        };
        checks.extend(self.servers(Some(&settings), Some(needs)));
        Ok(checks)
    }

    /// A domain that does not use Outram, shut off or at its next start.
    fn would_attach(&mut self, domain: &DomainXml) -> Result<Vec<Check>> {
        let mut edited = DomainXml::parse(&domain.to_text()?)?;
        attachment::attach(&mut edited, &self.paths.run, &any_request())?;
        let refusals = refusal::check(&edited, &self.paths.run)?;
        if !refusals.is_empty() {
            return Ok(verdict("devices", refusals, ""));
        }
        let cure = format!("outram attach {} --config --local-ratio 0.5", self.name);
        let found = "does not use Outram, and can be attached";
        let mut checks = vec![Check::warn("next start", found, cure)];
        checks.extend(self.servers(None, None));
        Ok(checks)
    }

    /// The domain as it runs.
    fn running(&mut self) -> Result<Vec<Check>> {
        let domain = DomainXml::parse(&self.found.running_definition()?)?;
        match refusal::our_disks(&domain, &self.paths.run).is_empty() {
            true => self.would_attach_live(domain),
            false => self.attached(&domain),
        }
    }

    fn would_attach_live(&self, domain: DomainXml) -> Result<Vec<Check>> {
        let mut edited = DomainXml::parse(&domain.to_text()?)?;
        attachment::attach_running(&mut edited, &self.paths.run, &any_request())?;
        let label = "attach --live";
        let refusals = refusal::check(&edited, &self.paths.run)?;
        // Nothing of it keeps the guest from being attached at its next start.
        let mut checks: Vec<Check> = refusals
            .iter()
            .map(|refusal| {
                let cure = format!(
                    "outram attach {} --config …, then shut it down and start it again",
                    self.name
                );
                Check::warn(label, refusal.to_string(), cure)
            })
            .collect();
        let huge = LiveRefusal::HugePages(self.name.to_owned());
        if checks.is_empty()
            && let Err(refusal) = live::demand_small_pages(&domain, huge)
        {
            checks.push(Check::warn(label, refusal.to_string(), ""));
        }
        match hotplug_slot::find(&domain) {
            Ok(place) if checks.is_empty() => checks.push(Check::pass(
                label,
                format!("possible: shared memory, and {place} is free"),
            )),
            Ok(_) => {}
            Err(error) => checks.push(Check::warn(label, error.to_string(), "")),
        }
        Ok(checks)
    }

    /// A guest that is served now: could it be detached?
    fn attached(&mut self, domain: &DomainXml) -> Result<Vec<Check>> {
        let run_dir = run_dir(self.paths, domain.vm_id()?);
        let status = match BackendControl::of(&run_dir).status() {
            Ok(status) => status,
            Err(error) => {
                let cure = cure_of_silence(&error, &run_dir, self.name);
                return Ok(vec![Check::fail("backend", error.to_string(), cure)]);
            }
        };
        let label = "detach --live";
        let mut checks = Vec::new();
        if let (Phase::Stopped | Phase::Refused, Some(detail)) = (status.phase, &status.detail) {
            return Ok(vec![Check::fail("backend", detail.clone(), "")]);
        }
        match status.unmanaged_bytes {
            0 => checks.extend(hot_plug(domain)?),
            bytes => {
                let detail = status.detail.as_deref().unwrap_or("");
                let found = format!("{} of RAM are not paged: {detail}", format_size(bytes));
                checks.push(Check::warn(HOT_PLUG, found, ""));
            }
        }
        let away: Vec<&str> = status
            .servers
            .iter()
            .filter(|server| server.stored_bytes > 0 && !server.connected)
            .map(|server| server.address.as_str())
            .collect();
        if !away.is_empty() {
            let found = format!("{} hold its pages and are out of reach", away.join(", "));
            checks.push(Check::fail("backend", found, "bring them back"));
        }
        let huge = LiveRefusal::HugePagesHome(self.name.to_owned());
        let possible = live::demand_small_pages(domain, huge)
            .map_err(anyhow::Error::from)
            .and_then(|()| live::demand_no_far_disk(domain, self.name))
            .and_then(|()| Ok(live::demand_room(&status)?));
        match possible {
            Err(error) => checks.push(Check::warn(label, error.to_string(), "")),
            Ok(()) if away.is_empty() => {
                let found = "possible: this host has room for all of its memory";
                checks.push(Check::pass(label, found));
            }
            Ok(()) => {}
        }
        let settings = metadata::read(domain).ok().flatten();
        checks.extend(self.servers(settings.as_ref(), None));
        Ok(checks)
    }

    /// The servers that the guest uses, or would; whether they could lend what it `needs` at its next start. Those that
    /// were asked already are not asked again.
    fn servers(
        &mut self,
        settings: Option<&MemorySettings>,
        needs: Option<Standing>,
    ) -> Vec<Check> {
        let named: &[ServerAddress] = match settings {
            Some(settings) if !settings.servers.is_empty() => &settings.servers,
            _ => &self.host.servers,
        };
        if named.is_empty() {
            return vec![no_server(self.name, &self.paths.config, settings.is_some())];
        }
        let wanted = needs.map(|needs| host_checks::Needs {
            bytes: needs.reserve_bytes(named.len()) * named.len() as u64,
            has_bytes: self.promised_by(named),
        });
        ask_once(&mut self.asked, named, self.host, wanted)
    }

    /// Bytes that these servers have set aside for the guest as it runs, if it does.
    fn promised_by(&self, servers: &[ServerAddress]) -> u64 {
        let Ok(vm) = self.found.vm_id() else { return 0 };
        let run_dir = run_dir(self.paths, vm);
        let Ok(status) = BackendControl::of(&run_dir).status() else {
            return 0;
        };
        let of_them = status.servers.iter().filter(|server| {
            servers
                .iter()
                .any(|named| named.to_string() == server.address)
        });
        of_them.map(|server| server.reserved_bytes).sum()
    }
}

/// Checks those of `named` that were not asked, which they are from now on.
fn ask_once(
    asked: &mut BTreeSet<ServerAddress>,
    named: &[ServerAddress],
    host: &HostSettings,
    wanted: Option<host_checks::Needs>,
) -> Vec<Check> {
    let fresh = named
        .iter()
        .filter(|server| asked.insert((*server).clone()));
    let fresh: Vec<_> = fresh.cloned().collect();
    host_checks::servers(&fresh, host, wanted)
}

/// What helps where a guest's backend gives no answer. Its memory is where it was.
fn cure_of_silence(error: &ControlError, run_dir: &Path, name: &str) -> String {
    if launch::has_to_be_started_again(error, run_dir) {
        return format!("outram restart {name}: the guest goes on");
    }
    match error {
        ControlError::Permission(_) => "run this as root".to_owned(),
        ControlError::NotRunning(_) => {
            format!("it is being started again: look once more ('outram status {name}')")
        }
        _ => format!(
            "look again in a moment; then see its log, {}",
            BackendLog::of(run_dir)
        ),
    }
}

/// Attached with whatever: only what the domain itself is like matters.
fn any_request() -> AttachRequest {
    AttachRequest {
        limit: Limit::LocalBytes(1 << 30),
        servers: Vec::new(),
        seal: None,
        lost_pages: None,
        tuning: Tuning::default(),
        disk: DiskRequest::Keep,
    }
}

/// Whether memory that is plugged would be paged; nothing where libvirt lets none be plugged.
fn hot_plug(domain: &DomainXml) -> Result<Option<Check>> {
    let Some((slots, taken)) = domain.memory_slots() else {
        return Ok(None);
    };
    if domain.find(&["memoryBacking", "hugepages"]).is_some() {
        let found = "memory that is plugged would not be paged, and stay beyond the limit: the domain has huge pages";
        return Ok(Some(Check::warn(HOT_PLUG, found, "")));
    }
    let (ram, most) = (domain.ram_bytes()?, domain.max_ram_bytes()?);
    let found = if most == ram {
        format!("RAM is at its <maxMemory> of {}", format_size(most))
    } else {
        format!(
            "memory that is plugged is paged like the rest, up to {} of RAM in all; {} of {slots} slots for DIMMs are free",
            format_size(most),
            slots.saturating_sub(taken),
        )
    };
    Ok(Some(Check::pass(HOT_PLUG, found)))
}

fn verdict(label: &str, refusals: Vec<Refusal>, well: &str) -> Vec<Check> {
    if refusals.is_empty() {
        return vec![Check::pass(label, well)];
    }
    // Each message names its cure itself.
    let fail = |refusal: &Refusal| Check::fail(label, refusal.to_string(), "");
    refusals.iter().map(fail).collect()
}

fn no_server(name: &str, config: &Path, is_attached: bool) -> Check {
    let cure = format!(
        "outram attach {name} … --server HOST:PORT, or 'servers' in {}",
        config.display()
    );
    match is_attached {
        true => Check::fail("servers", "none is named", cure),
        false => Check::warn("servers", "none is named", cure),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_asked_once() {
        let servers = |names: &[&str]| -> Vec<ServerAddress> {
            let parsed = names.iter().map(|name| name.parse().expect("an address"));
            parsed.collect()
        };
        let host = HostSettings {
            tls_ca: Some("/nowhere/ca.pem".into()),
            ..HostSettings::default()
        };
        // Without certificates each check fails before anything is sent.
        let mut asked = BTreeSet::new();
        let mut checks = |names: &[&str]| ask_once(&mut asked, &servers(names), &host, None).len();
        assert_eq!(checks(&["10.0.0.2", "10.0.0.3"]), 2);
        assert_eq!(checks(&["10.0.0.3", "10.0.0.4"]), 1);
        assert_eq!(checks(&["10.0.0.4"]), 0);
    }

    #[test]
    fn memory_that_could_be_plugged_is_told() {
        let domain = |most: &str| {
            let xml = format!(
                "<domain><memory unit='MiB'>640</memory>{most}<devices>\
                 <memory model='dimm'/><memory model='virtio-mem'/></devices></domain>"
            );
            DomainXml::parse(&xml).expect("a domain")
        };
        let told = |most: &str| hot_plug(&domain(most)).expect("sizes").map(|it| it.found);
        assert_eq!(told(""), None);
        let room = told("<maxMemory slots='4' unit='GiB'>2</maxMemory>").expect("told");
        assert!(room.contains("2 GiB"), "{room}");
        assert!(room.contains("3 of 4 slots"), "{room}");
        let full = told("<maxMemory slots='4' unit='MiB'>640</maxMemory>").expect("told");
        assert!(full.contains("at its <maxMemory>"), "{full}");
        let huge = "<maxMemory slots='4' unit='GiB'>2</maxMemory>\
                    <memoryBacking><hugepages/></memoryBacking>";
        let huge = told(huge).expect("told");
        assert!(huge.contains("would not be paged"), "{huge}");
    }
}
