//! What a domain must not have while Outram pages its RAM, each with its cure.
//!
//! One check serves `outram attach`, `outram doctor` and the hook: it looks at the domain as it
//! is to be started, so a domain edited by hand meets the same rules as one that was attached.
//! What only shows in a running QEMU (a network that turns into a host device, a descriptor
//! opened with O_DIRECT by other means) is the backend's to refuse.

use std::path::{Path, PathBuf};

use outram_wire::compressed_share::ShareError;
use outram_wire::granularity::GranularityError;
use outram_wire::limits::{Standing, TooSmall};
use outram_wire::lost_pages::LostPages;
use outram_wire::units::{PageSize, VmId};
use xot::Node;

use crate::domain_xml::{DomainXml, DomainXmlError};
use crate::metadata::{self, MemorySettings};
use crate::page_size;

/// One reason why Outram does not page a domain's RAM.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Another hypervisor than QEMU.
    #[error("the domain is of type '{0}': Outram pages guests of type 'kvm' or 'qemu'")]
    DomainType(String),
    /// Memory errors are to be handed to a guest whose QEMU has nobody to hand them to.
    #[error(
        "lost-pages='poison' takes <domain type='kvm'>, and the domain is of type '{0}': its QEMU would end at a lost \
         page; use 'outram attach --lost-pages stop'"
    )]
    NobodyToPoison(String),
    /// More is to be moved at a time than one huge page.
    #[error(transparent)]
    Granularity(GranularityError),
    /// Huge pages are to be kept compressed.
    #[error(transparent)]
    Compressed(ShareError),
    /// Less is to be local than a guest can do with.
    #[error("{0}: use a larger --local or --local-ratio")]
    Limit(TooSmall),
    /// Another architecture.
    #[error("the guest's architecture is '{0}': Outram supports x86_64 guests")]
    Architecture(String),
    /// No memory backing that another process can share.
    #[error(
        "the guest's memory is not backed by a memfd: put <source type='memfd'/> into <memoryBacking>, or let 'outram attach' do it"
    )]
    NoMemfd,
    /// Backed by something else on purpose.
    #[error(
        "<memoryBacking> has <source type='{0}'/>: Outram pages memory in a memfd; change it to <source type='memfd'/>"
    )]
    OtherSource(String),
    /// Memory is private because nothing says otherwise.
    #[error(
        "the guest's memory is private: put <access mode='shared'/> into <memoryBacking>, or let 'outram attach' do it"
    )]
    NotShared,
    /// Memory is private by the user's word.
    #[error(
        "<memoryBacking> has <access mode='private'/>: a private page cannot be moved to a memory server; change it to <access mode='shared'/>"
    )]
    PrivateAccess,
    /// A NUMA cell is private.
    #[error(
        "NUMA cell {0} has memAccess='private': a private page cannot be moved to a memory server; change it to memAccess='shared' or remove the attribute"
    )]
    PrivateCell(String),
    /// A memory device is private.
    #[error(
        "the memory device of model '{0}' has access='private': change it to access='shared' or remove the attribute"
    )]
    PrivateDevice(String),
    /// All memory is taken at start.
    #[error(
        "<memoryBacking> has <allocation mode='immediate'/>: it takes all of the guest's memory at start, which would exceed any limit; remove it or change it to mode='ondemand'"
    )]
    Preallocated,
    /// Memory is locked.
    #[error(
        "<memoryBacking> has <locked/>: locked memory cannot be moved to a memory server; remove it"
    )]
    Locked,
    /// Huge pages of another size.
    #[error(
        "<hugepages> asks for pages of {0}: Outram pages those of 2 MiB; change it to <page size='2048' unit='KiB'/>, or remove <hugepages>"
    )]
    HugePageSize(String),
    /// Huge pages for a part of the memory.
    #[error(
        "<hugepages> does not cover NUMA cell {0}: all of a guest's memory must have pages of one size; remove 'nodeset', or <hugepages>"
    )]
    MixedPages(u32),
    /// A memory device beside huge pages, or with some of its own.
    #[error(
        "the memory device of model '{0}' has huge pages: Outram pages those of <memory> alone; remove the device, or <hugepages> and <pagesize>"
    )]
    HugeDevice(String),
    /// A device of the host.
    #[error(
        "the domain has a <hostdev> of type '{0}': devices of the host reach guest memory without page faults; remove it"
    )]
    HostDevice(String),
    /// vhost-scsi.
    #[error(
        "the domain has a vhost-scsi <hostdev>: the host's kernel writes to guest memory past the pager; use a virtio-scsi controller with ordinary disks"
    )]
    VhostScsi,
    /// An interface that is a device of the host.
    #[error(
        "the interface {mac} is of type '{kind}': such a device reaches guest memory without page faults; use type 'network' or 'bridge'"
    )]
    Interface {
        /// The interface's MAC address, or where it stands.
        mac: String,
        /// Its type.
        kind: String,
    },
    /// A disk whose commands are passed through.
    #[error(
        "disk '{0}' has device='lun': its requests are passed to the host's device with guest memory pinned; use device='disk'"
    )]
    Lun(String),
    /// A disk that bypasses the page cache.
    #[error(
        "disk '{disk}' has {setting}: direct I/O pins guest memory while it may be moved away; {cure}"
    )]
    DirectDisk {
        /// The disk's target.
        disk: String,
        /// The attribute as written.
        setting: String,
        /// What to write in its place.
        cure: &'static str,
    },
    /// A disk served by a device or process with its own view of guest memory.
    #[error(
        "disk '{disk}' is of type '{kind}': {why}; use a disk of type 'file', 'block' or 'network'"
    )]
    DiskType {
        /// The disk's target.
        disk: String,
        /// Its type.
        kind: String,
        /// Why it does not go together.
        why: &'static str,
    },
    /// virtiofs.
    #[error(
        "the file system '{0}' uses virtiofs: its daemon maps guest memory and would see pages that were moved away as zeros; use <driver type='path'/> (9p) or a network file system"
    )]
    Virtiofs(String),
    /// A virtio-gpu with blob resources or in another process.
    #[error(
        "the video device has {0}: guest memory would be shared with the graphics stack past the pager; remove it"
    )]
    Video(&'static str),
    /// Encrypted guest memory.
    #[error(
        "the domain has <launchSecurity type='{0}'>: encrypted guest memory cannot be moved; remove it"
    )]
    LaunchSecurity(String),
    /// Settings, but no disk to bring the backend in.
    #[error(
        "the domain has Outram's settings but not its disk: run 'outram attach' again, or add <disk type='vhostuser'> with the socket {0}"
    )]
    NoDisk(PathBuf),
    /// The disk, but no settings.
    #[error(
        "the domain has a disk at {0} but no Outram settings in its <metadata>: run 'outram attach', or remove the disk"
    )]
    NoSettings(String),
    /// The disk of another domain, as after cloning.
    #[error(
        "disk '{disk}' uses the socket {found}, but this domain's is {expected} (a cloned domain keeps the other's path): run 'outram attach' again, or correct the path"
    )]
    OtherSocket {
        /// The disk's target.
        disk: String,
        /// The path found.
        found: String,
        /// The path of this domain.
        expected: PathBuf,
    },
    /// Our disk has a queue that its largest requests do not fit into.
    #[error(
        "disk '{disk}' has queue_size='{found}': the guest's largest requests to it take {MIN_QUEUE_SIZE} entries of its queue, and the guest would wait for ever where it has fewer; remove the attribute from its <driver>, or set {MIN_QUEUE_SIZE} or more"
    )]
    SmallQueue {
        /// The disk's target.
        disk: String,
        /// The size as written.
        found: String,
    },
    /// More than one of our disks.
    #[error("the domain has {0} disks with the socket {1}: keep one")]
    SeveralDisks(usize, PathBuf),
}

/// Entries of a queue that one request to our disk may take: a header, the 126 segments that the disk allows, and
/// a status. No tables beside the queue are offered that would hold some of them. It is QEMU's own size, too.
const MIN_QUEUE_SIZE: u32 = 128;

/// Where the backend of a domain listens.
pub fn socket_path(run_dir: &Path, vm: VmId) -> PathBuf {
    run_dir.join(vm.to_string()).join("vhost.sock")
}

/// The path of a vhost-user disk's socket, if the disk is one.
pub fn vhostuser_socket(domain: &DomainXml, disk: Node) -> Option<&str> {
    if domain.attribute(disk, "type") != Some("vhostuser") {
        return None;
    }
    domain.attribute(domain.child(disk, "source")?, "path")
}

/// The vhost-user disks whose socket lies in our run directory, of this domain or of another.
pub fn our_disks(domain: &DomainXml, run_dir: &Path) -> Vec<Node> {
    domain
        .devices("disk")
        .into_iter()
        .filter(|disk| {
            vhostuser_socket(domain, *disk)
                .is_some_and(|socket| Path::new(socket).starts_with(run_dir))
        })
        .collect()
}

/// Everything about a domain with Outram's settings that keeps it from being paged.
pub fn check(domain: &DomainXml, run_dir: &Path) -> Result<Vec<Refusal>, DomainXmlError> {
    let mut refusals = Vec::new();
    check_machine(domain, &mut refusals);
    check_memory_backing(domain, &mut refusals);
    check_memory_devices(domain, &mut refusals);
    check_disks(domain, run_dir, domain.vm_id()?, &mut refusals);
    check_interfaces(domain, &mut refusals);
    check_host_devices(domain, &mut refusals);
    check_other_devices(domain, &mut refusals);
    Ok(refusals)
}

fn check_machine(domain: &DomainXml, refusals: &mut Vec<Refusal>) {
    let kind = domain
        .attribute(domain.domain(), "type")
        .unwrap_or_default();
    if !matches!(kind, "kvm" | "qemu") {
        refusals.push(Refusal::DomainType(kind.to_owned()));
    }
    // Settings that are not understood are told of by who reads them.
    let settings = metadata::read(domain).ok().flatten();
    let poisons = settings.is_some_and(|settings| settings.lost_pages == LostPages::Poison);
    if poisons && kind != "kvm" {
        refusals.push(Refusal::NobodyToPoison(kind.to_owned()));
    }
    if let Some(arch) = domain
        .find(&["os", "type"])
        .and_then(|os| domain.attribute(os, "arch"))
        && arch != "x86_64"
    {
        refusals.push(Refusal::Architecture(arch.to_owned()));
    }
    if let Some(security) = domain.find(&["launchSecurity"]) {
        let kind = domain.attribute(security, "type").unwrap_or_default();
        refusals.push(Refusal::LaunchSecurity(kind.to_owned()));
    }
}

fn check_memory_backing(domain: &DomainXml, refusals: &mut Vec<Refusal>) {
    let backing = |name: &str| domain.find(&["memoryBacking", name]);
    let setting = |name: &str, attribute: &str| {
        backing(name).and_then(|node| domain.attribute(node, attribute))
    };
    match setting("source", "type") {
        Some("memfd") => {}
        Some(other) => refusals.push(Refusal::OtherSource(other.to_owned())),
        None => refusals.push(Refusal::NoMemfd),
    }
    let cells = cells(domain);
    let all_cells_shared = !cells.is_empty()
        && cells
            .iter()
            .all(|cell| domain.attribute(*cell, "memAccess") == Some("shared"));
    match setting("access", "mode") {
        Some("shared") => {}
        Some("private") => refusals.push(Refusal::PrivateAccess),
        _ if all_cells_shared => {}
        _ => refusals.push(Refusal::NotShared),
    }
    for cell in cells {
        if domain.attribute(cell, "memAccess") == Some("private") {
            let id = domain.attribute(cell, "id").unwrap_or("?");
            refusals.push(Refusal::PrivateCell(id.to_owned()));
        }
    }
    // libvirt populates huge pages at the start anyway.
    if setting("allocation", "mode") == Some("immediate") && backing("hugepages").is_none() {
        refusals.push(Refusal::Preallocated);
    }
    if backing("locked").is_some() {
        refusals.push(Refusal::Locked);
    }
    if let Err(refusal) = page_size::find(domain) {
        refusals.push(refusal);
    }
    // Settings that are not understood are told of by who reads them.
    let settings = metadata::read(domain).ok().flatten();
    refusals.extend(settings.map_or_else(Vec::new, |settings| check_settings(domain, &settings)));
}

/// Everything about these settings that does not go with the domain's memory: its size at start and its pages.
pub fn check_settings(domain: &DomainXml, settings: &MemorySettings) -> Vec<Refusal> {
    // Pages that are refused have no size.
    let Ok(size) = page_size::find(domain) else {
        return Vec::new();
    };
    let tuning = &settings.tuning;
    let granularity = tuning.granularity.unwrap_or_default().pages(size);
    let share = tuning.compressed_share.unwrap_or_default().check(size);
    [
        check_limit(domain, settings, size).err(),
        granularity.err().map(Refusal::Granularity),
        share.err().map(Refusal::Compressed),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Whether the domain can be kept to its limit, by the RAM that it has at start.
fn check_limit(
    domain: &DomainXml,
    settings: &MemorySettings,
    page_size: PageSize,
) -> Result<(), Refusal> {
    // Without a size it is libvirt that refuses the domain.
    let Ok(ram_bytes) = domain.ram_bytes() else {
        return Ok(());
    };
    let standing = Standing {
        limit: settings.limit,
        ram_bytes,
        page_size,
        compressed: settings.tuning.compressed_share.unwrap_or_default(),
    };
    standing.check().map_err(Refusal::Limit)
}

fn cells(domain: &DomainXml) -> Vec<Node> {
    domain
        .find(&["cpu", "numa"])
        .map(|numa| domain.children(numa, "cell"))
        .unwrap_or_default()
}

fn check_memory_devices(domain: &DomainXml, refusals: &mut Vec<Refusal>) {
    for device in domain.devices("memory") {
        let model = domain.attribute(device, "model").unwrap_or_default();
        if !matches!(model, "dimm" | "virtio-mem") {
            continue;
        }
        if domain.attribute(device, "access") == Some("private") {
            refusals.push(Refusal::PrivateDevice(model.to_owned()));
        }
        let source = domain.child(device, "source");
        let has_pages = source.is_some_and(|source| domain.child(source, "pagesize").is_some());
        if has_pages || domain.find(&["memoryBacking", "hugepages"]).is_some() {
            refusals.push(Refusal::HugeDevice(model.to_owned()));
        }
    }
}

fn check_disks(domain: &DomainXml, run_dir: &Path, vm: VmId, refusals: &mut Vec<Refusal>) {
    let expected = socket_path(run_dir, vm);
    let mut own = 0;
    let mut ours_elsewhere = false;
    for disk in domain.devices("disk") {
        let name = disk_name(domain, disk);
        match vhostuser_socket(domain, disk).map(Path::new) {
            Some(socket) if socket == expected => {
                own += 1;
                refusals.extend(check_queue(domain, disk, name));
            }
            Some(socket) if socket.starts_with(run_dir) => {
                ours_elsewhere = true;
                refusals.push(Refusal::OtherSocket {
                    disk: name,
                    found: socket.display().to_string(),
                    expected: expected.clone(),
                });
            }
            _ => check_disk(domain, disk, name, refusals),
        }
    }
    match own {
        0 if !ours_elsewhere => refusals.push(Refusal::NoDisk(expected)),
        0 | 1 => {}
        several => refusals.push(Refusal::SeveralDisks(several, expected)),
    }
}

fn disk_name(domain: &DomainXml, disk: Node) -> String {
    domain
        .child(disk, "target")
        .and_then(|target| domain.attribute(target, "dev"))
        .unwrap_or("?")
        .to_owned()
}

/// `attach` writes no size: a user may have. One that is no number is libvirt's to refuse.
fn check_queue(domain: &DomainXml, disk: Node, name: String) -> Option<Refusal> {
    let driver = domain.child(disk, "driver")?;
    let found = domain.attribute(driver, "queue_size")?;
    let is_small = found.parse().is_ok_and(|size: u32| size < MIN_QUEUE_SIZE);
    is_small.then(|| Refusal::SmallQueue {
        disk: name,
        found: found.to_owned(),
    })
}

fn check_disk(domain: &DomainXml, disk: Node, name: String, refusals: &mut Vec<Refusal>) {
    let kind = domain.attribute(disk, "type").unwrap_or_default();
    let why = match kind {
        "vhostuser" => {
            Some("its process maps guest memory and would see pages that were moved away as zeros")
        }
        "vhostvdpa" => Some("the device reaches guest memory without page faults"),
        "nvme" => Some("it is driven through VFIO, which pins all guest memory"),
        _ => None,
    };
    if let Some(why) = why {
        refusals.push(Refusal::DiskType {
            disk: name,
            kind: kind.to_owned(),
            why,
        });
        return;
    }
    if domain.attribute(disk, "device") == Some("lun") {
        refusals.push(Refusal::Lun(name.clone()));
    }
    let Some(driver) = domain.child(disk, "driver") else {
        return;
    };
    if let Some(cache @ ("none" | "directsync")) = domain.attribute(driver, "cache") {
        refusals.push(Refusal::DirectDisk {
            disk: name.clone(),
            setting: format!("cache='{cache}'"),
            cure: "use cache='writeback' or cache='writethrough'",
        });
    }
    if domain.attribute(driver, "io") == Some("native") {
        refusals.push(Refusal::DirectDisk {
            disk: name,
            setting: "io='native'".to_owned(),
            cure: "use io='threads' or remove the attribute",
        });
    }
}

fn check_interfaces(domain: &DomainXml, refusals: &mut Vec<Refusal>) {
    for interface in domain.devices("interface") {
        let kind = domain.attribute(interface, "type").unwrap_or_default();
        if !matches!(kind, "hostdev" | "vdpa" | "vhostuser") {
            continue;
        }
        let mac = domain
            .child(interface, "mac")
            .and_then(|mac| domain.attribute(mac, "address"))
            .unwrap_or("without a MAC address");
        refusals.push(Refusal::Interface {
            mac: mac.to_owned(),
            kind: kind.to_owned(),
        });
    }
}

fn check_host_devices(domain: &DomainXml, refusals: &mut Vec<Refusal>) {
    for device in domain.devices("hostdev") {
        let kind = domain.attribute(device, "type").unwrap_or_default();
        refusals.push(match kind {
            "scsi_host" => Refusal::VhostScsi,
            _ => Refusal::HostDevice(kind.to_owned()),
        });
    }
}

fn check_other_devices(domain: &DomainXml, refusals: &mut Vec<Refusal>) {
    for filesystem in domain.devices("filesystem") {
        let driver = domain
            .child(filesystem, "driver")
            .and_then(|driver| domain.attribute(driver, "type"));
        if driver == Some("virtiofs") {
            let target = domain
                .child(filesystem, "target")
                .and_then(|target| domain.attribute(target, "dir"));
            refusals.push(Refusal::Virtiofs(target.unwrap_or("?").to_owned()));
        }
    }
    for video in domain.devices("video") {
        let driver = domain
            .child(video, "driver")
            .and_then(|driver| domain.attribute(driver, "name"));
        if driver == Some("vhostuser") {
            refusals.push(Refusal::Video("<driver name='vhostuser'/>"));
        }
        let blob = domain
            .child(video, "model")
            .and_then(|model| domain.attribute(model, "blob"));
        if blob == Some("on") {
            refusals.push(Refusal::Video("blob='on'"));
        }
    }
}
