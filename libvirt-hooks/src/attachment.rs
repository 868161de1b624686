//! Attaching a domain to Outram and detaching it, as edits of its XML.
//!
//! What is added is remembered in the settings (`added`), so that detaching takes away that and
//! nothing else. Whatever a user changed in between stays.

use std::fmt;
use std::path::Path;

use outram_wire::disk::DiskKey;
use outram_wire::lost_pages::LostPages;
use outram_wire::seal::Seal;
use outram_wire::tuning::Tuning;
use outram_wire::units::Limit;
use xot::Node;

use crate::domain_xml::{DomainXml, DomainXmlError};
use crate::metadata::{self, Addition, DiskSettings, MemorySettings, MetadataError};
use crate::refusal::{our_disks, socket_path};
use outram_wire::server::ServerAddress;

/// Why a domain's XML was not edited.
#[derive(Debug, thiserror::Error)]
pub enum AttachmentError {
    /// The XML itself.
    #[error(transparent)]
    Xml(#[from] DomainXmlError),
    /// Settings that are there already and not understood.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// All names of virtio disks are taken.
    #[error("the domain has no free virtio disk name from vdz down to vda: remove a disk first")]
    NoTarget,
    /// Nothing to detach.
    #[error("the domain does not use Outram: it has neither settings nor a disk of ours")]
    NotAttached,
}

/// One thing done to a domain's XML.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// `+` added, `-` removed, `~` changed.
    pub sign: char,
    /// The element, and where it stands.
    pub what: String,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.sign, self.what)
    }
}

fn change(sign: char, what: impl Into<String>) -> Change {
    let what = what.into();
    Change { sign, what }
}

/// What a domain is attached with.
#[derive(Clone, Debug)]
pub struct AttachRequest {
    /// What the guest may cost its host.
    pub limit: Limit,
    /// Its servers; none keeps those already in the settings.
    pub servers: Vec<ServerAddress>,
    /// Whether what leaves the host is sealed; `None` keeps it as it is in the settings.
    pub seal: Option<Seal>,
    /// What becomes of the guest where it uses a page that is lost; `None` as for `seal`.
    pub lost_pages: Option<LostPages>,
    /// How its memory is moved; what is `None` of it stays as for `seal`.
    pub tuning: Tuning,
    /// Its far-memory disk.
    pub disk: DiskRequest,
}

/// What is asked of a domain's far-memory disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskRequest {
    /// As it is.
    #[default]
    Keep,
    /// None.
    Remove,
    /// One of this size; this key is taken where there is none yet.
    Size(u64, DiskKey),
}

impl DiskRequest {
    fn applied(self, before: Option<DiskSettings>) -> Option<DiskSettings> {
        match self {
            Self::Keep => before,
            Self::Remove => None,
            Self::Size(size_bytes, fresh) => Some(DiskSettings {
                size_bytes,
                key: before.map_or(fresh, |before| before.key),
            }),
        }
    }
}

impl AttachRequest {
    /// The settings of a domain that has these before, if it is attached.
    fn applied(&self, before: Option<&MemorySettings>) -> MemorySettings {
        let servers = match before {
            Some(before) if self.servers.is_empty() => &before.servers,
            _ => &self.servers,
        };
        MemorySettings {
            limit: self.limit,
            servers: servers.clone(),
            seal: self
                .seal
                .or(before.map(|before| before.seal))
                .unwrap_or_default(),
            lost_pages: self
                .lost_pages
                .or(before.map(|before| before.lost_pages))
                .unwrap_or_default(),
            tuning: self
                .tuning
                .or(before.map(|before| before.tuning).unwrap_or_default()),
            disk: self.disk.applied(before.and_then(|before| before.disk)),
            added: before.map_or_else(Vec::new, |before| before.added.clone()),
        }
    }
}

/// Adds memory backing, disk and settings where they are missing, and updates what is there.
pub fn attach(
    domain: &mut DomainXml,
    run_dir: &Path,
    request: &AttachRequest,
) -> Result<Vec<Change>, AttachmentError> {
    let before = metadata::read(domain)?;
    let mut settings = request.applied(before.as_ref());
    let mut changes = Vec::new();
    share_memory(domain, &mut settings.added, &mut changes)?;
    put_disk(domain, run_dir, &mut changes)?;
    write_settings(domain, before.as_ref(), &mut settings, &mut changes)?;
    Ok(changes)
}

/// What a domain that runs is attached with; its memory stays backed as it is.
pub struct RunningAttachment {
    /// The disk to be plugged in.
    pub disk: String,
    /// The settings, without namespace as libvirt puts them into ours.
    pub settings: String,
    /// What changes.
    pub changes: Vec<Change>,
}

/// Adds disk and settings to the XML of a running domain.
pub fn attach_running(
    domain: &mut DomainXml,
    run_dir: &Path,
    request: &AttachRequest,
) -> Result<RunningAttachment, AttachmentError> {
    let mut settings = request.applied(None);
    let mut changes = Vec::new();
    put_disk(domain, run_dir, &mut changes)?;
    write_settings(domain, None, &mut settings, &mut changes)?;
    // libvirt alone sees to the <metadata> around the settings of a running domain.
    settings.added.clear();
    let disk = our_disks(domain, run_dir);
    let disk = disk.first().ok_or(DomainXmlError::Missing("disk"))?;
    Ok(RunningAttachment {
        disk: domain.show(*disk),
        settings: metadata::to_plain_text(&settings)?,
        changes,
    })
}

/// The disk of a running domain that is to be unplugged, as libvirt knows it, if it is there.
pub fn running_disk(domain: &DomainXml, run_dir: &Path) -> Option<(String, Change)> {
    let disk = our_disks(domain, run_dir).first().copied()?;
    let what = format!("disk {}", target_name(domain, disk));
    Some((domain.show(disk), change('-', what)))
}

fn share_memory(
    domain: &mut DomainXml,
    added: &mut Vec<Addition>,
    changes: &mut Vec<Change>,
) -> Result<(), AttachmentError> {
    let backing = match domain.find(&["memoryBacking"]) {
        Some(backing) => backing,
        None => {
            let backing = domain.element("<memoryBacking/>")?;
            put_memory_backing(domain, backing)?;
            note(added, Addition::MemoryBacking);
            backing
        }
    };
    for (name, fragment, addition) in [
        ("source", "<source type='memfd'/>", Addition::Source),
        ("access", "<access mode='shared'/>", Addition::Access),
    ] {
        if domain.child(backing, name).is_none() {
            let element = domain.element(fragment)?;
            domain.append(backing, element)?;
            note(added, addition);
            changes.push(change('+', format!("{fragment} in <memoryBacking>")));
        }
    }
    Ok(())
}

/// Puts `<memoryBacking>` where libvirt itself writes it: behind the memory settings.
fn put_memory_backing(domain: &mut DomainXml, backing: Node) -> Result<(), DomainXmlError> {
    let place = [
        "memtune",
        "blkiotune",
        "currentMemory",
        "maxMemory",
        "memory",
    ]
    .iter()
    .find_map(|name| domain.find(&[name]));
    match place {
        Some(place) => domain.insert_after(place, backing),
        None => domain.append(domain.domain(), backing),
    }
}

fn note(added: &mut Vec<Addition>, addition: Addition) {
    if !added.contains(&addition) {
        added.push(addition);
    }
}

fn put_disk(
    domain: &mut DomainXml,
    run_dir: &Path,
    changes: &mut Vec<Change>,
) -> Result<(), AttachmentError> {
    let socket = socket_path(run_dir, domain.vm_id()?);
    let socket = socket.display().to_string();
    let mut ours = our_disks(domain, run_dir).into_iter();
    if let Some(disk) = ours.next() {
        correct_socket(domain, disk, &socket, changes)?;
        for surplus in ours {
            changes.push(change(
                '-',
                format!("disk {}", target_name(domain, surplus)),
            ));
            domain.remove(surplus)?;
        }
        return Ok(());
    }
    let target = free_target(domain)?;
    let disk = domain.element(&format!(
        "<disk type='vhostuser' device='disk'><driver name='qemu' type='raw'/>\
         <source type='unix'><reconnect enabled='yes' timeout='1'/></source>\
         <target dev='{target}' bus='virtio'/></disk>"
    ))?;
    if let Some(source) = domain.child(disk, "source") {
        domain.set_attribute(source, "path", &socket);
    }
    let place = match (
        domain.devices("disk").last(),
        domain.devices("emulator").last(),
    ) {
        (Some(disk), _) => Some(*disk),
        (None, emulator) => emulator.copied(),
    };
    let devices = domain
        .find(&["devices"])
        .ok_or(DomainXmlError::Missing("devices"))?;
    match place {
        Some(place) => domain.insert_after(place, disk)?,
        None => domain.append(devices, disk)?,
    }
    changes.push(change(
        '+',
        format!("<disk type='vhostuser'> {target} with the socket {socket}"),
    ));
    Ok(())
}

/// Gives a disk of ours the socket of this domain: a cloned domain has the other's.
fn correct_socket(
    domain: &mut DomainXml,
    disk: Node,
    socket: &str,
    changes: &mut Vec<Change>,
) -> Result<(), AttachmentError> {
    let source = domain
        .child(disk, "source")
        .ok_or(DomainXmlError::Missing("source"))?;
    if domain.attribute(source, "path") != Some(socket) {
        domain.set_attribute(source, "path", socket);
        let name = target_name(domain, disk);
        changes.push(change('~', format!("disk {name}: socket is now {socket}")));
    }
    Ok(())
}

fn target_name(domain: &DomainXml, disk: Node) -> String {
    domain
        .child(disk, "target")
        .and_then(|target| domain.attribute(target, "dev"))
        .unwrap_or("?")
        .to_owned()
}

/// The last free name of a virtio disk, so that the guest's own disks keep theirs.
fn free_target(domain: &DomainXml) -> Result<String, AttachmentError> {
    let taken: Vec<String> = domain
        .devices("disk")
        .into_iter()
        .map(|disk| target_name(domain, disk))
        .collect();
    ('a'..='z')
        .rev()
        .map(|letter| format!("vd{letter}"))
        .find(|name| !taken.contains(name))
        .ok_or(AttachmentError::NoTarget)
}

fn write_settings(
    domain: &mut DomainXml,
    before: Option<&MemorySettings>,
    settings: &mut MemorySettings,
    changes: &mut Vec<Change>,
) -> Result<(), AttachmentError> {
    let parent = match domain.find(&["metadata"]) {
        Some(parent) => parent,
        None => {
            let parent = domain.element("<metadata/>")?;
            let place = ["description", "title", "genid", "uuid", "name"]
                .iter()
                .find_map(|name| domain.find(&[name]));
            match place {
                Some(place) => domain.insert_after(place, parent)?,
                None => domain.append(domain.domain(), parent)?,
            }
            note(&mut settings.added, Addition::Metadata);
            parent
        }
    };
    let text = metadata::to_text(settings)?;
    // As they are written: servers are the same whatever their transport, but not as settings.
    let text_before = before.map(metadata::to_text).transpose()?;
    let element = domain.element(&text)?;
    match metadata::find_element(domain) {
        Some(old) => domain.replace(old, element)?,
        None => domain.append(parent, element)?,
    }
    if text_before.as_ref() != Some(&text) {
        let sign = if before.is_some() { '~' } else { '+' };
        // The key is not for the terminal's scroll-back.
        let shown = match &settings.disk {
            Some(disk) => text.replace(&disk.key.to_string(), "…"),
            None => text,
        };
        changes.push(change(sign, format!("{shown} in <metadata>")));
    }
    Ok(())
}

/// Adds to the settings what libvirt itself added to make room for the disk: PCI controllers
/// that `defined` has and `before` had not. Returns the new settings if there were any.
pub fn note_controllers(
    before: &DomainXml,
    defined: &DomainXml,
) -> Result<Option<MemorySettings>, AttachmentError> {
    let known = pci_controllers(before);
    let Some(mut settings) = metadata::read(defined)? else {
        return Ok(None);
    };
    let count = settings.added.len();
    for (index, _) in pci_controllers(defined) {
        if !known.iter().any(|(old, _)| *old == index) {
            note(&mut settings.added, Addition::PciController(index));
        }
    }
    Ok((settings.added.len() > count).then_some(settings))
}

pub(crate) fn pci_controllers(domain: &DomainXml) -> Vec<(u32, Node)> {
    domain
        .devices("controller")
        .into_iter()
        .filter(|node| domain.attribute(*node, "type") == Some("pci"))
        .filter_map(|node| Some((domain.attribute(node, "index")?.parse().ok()?, node)))
        .collect()
}

/// Takes away what `attach` added, and the disk and settings in any case. Settings that are not understood do not
/// tell what was added: that stays, as what a user may have written.
pub fn detach(domain: &mut DomainXml, run_dir: &Path) -> Result<Vec<Change>, AttachmentError> {
    let settings = metadata::read(domain);
    let disks = our_disks(domain, run_dir);
    if matches!(settings, Ok(None)) && disks.is_empty() {
        return Err(AttachmentError::NotAttached);
    }
    let note = match settings {
        Ok(_) => "",
        Err(_) => " (not understood: whatever else 'attach' added stays)",
    };
    let added = settings.ok().flatten();
    let added = added.map(|settings| settings.added).unwrap_or_default();
    let mut changes = Vec::new();
    for disk in disks {
        changes.push(change('-', format!("disk {}", target_name(domain, disk))));
        domain.remove(disk)?;
    }
    remove_controllers(domain, &added, &mut changes)?;
    remove_backing(domain, &added, &mut changes)?;
    for element in metadata::our_elements(domain) {
        domain.remove(element)?;
        let what = format!("<outram:memory> in <metadata>{note}");
        changes.push(change('-', what));
    }
    if added.contains(&Addition::Metadata)
        && let Some(parent) = domain.find(&["metadata"])
        && domain.is_empty(parent)
    {
        domain.remove(parent)?;
    }
    Ok(changes)
}

fn remove_backing(
    domain: &mut DomainXml,
    added: &[Addition],
    changes: &mut Vec<Change>,
) -> Result<(), AttachmentError> {
    let Some(backing) = domain.find(&["memoryBacking"]) else {
        return Ok(());
    };
    for (addition, name, attribute, value) in [
        (Addition::Source, "source", "type", "memfd"),
        (Addition::Access, "access", "mode", "shared"),
    ] {
        let Some(element) = domain.child(backing, name) else {
            continue;
        };
        if added.contains(&addition) && domain.attribute(element, attribute) == Some(value) {
            domain.remove(element)?;
            let what = format!("<{name} {attribute}='{value}'/> in <memoryBacking>");
            changes.push(change('-', what));
        }
    }
    if added.contains(&Addition::MemoryBacking) && domain.is_empty(backing) {
        domain.remove(backing)?;
    }
    Ok(())
}

/// Removes the controllers that libvirt added for the disk, from the last index down, as long as
/// nothing sits on them: a gap in the indices would only be filled again.
fn remove_controllers(
    domain: &mut DomainXml,
    added: &[Addition],
    changes: &mut Vec<Change>,
) -> Result<(), AttachmentError> {
    loop {
        let last = pci_controllers(domain)
            .into_iter()
            .max_by_key(|(index, _)| *index);
        let Some((index, node)) = last else {
            return Ok(());
        };
        if !added.contains(&Addition::PciController(index)) || bus_in_use(domain, index) {
            return Ok(());
        }
        domain.remove(node)?;
        changes.push(change(
            '-',
            format!("PCI controller {index}, added for the disk"),
        ));
    }
}

pub(crate) fn bus_in_use(domain: &DomainXml, index: u32) -> bool {
    let Some(devices) = domain.find(&["devices"]) else {
        return false;
    };
    domain.elements(devices).into_iter().any(|device| {
        domain
            .children(device, "address")
            .into_iter()
            .any(|address| {
                domain.attribute(address, "type") == Some("pci")
                    && domain
                        .attribute(address, "bus")
                        .and_then(|bus| u32::from_str_radix(bus.trim_start_matches("0x"), 16).ok())
                        == Some(index)
            })
    })
}
