//! The settings of a domain that uses Outram: one element of our namespace in its `<metadata>`.
//!
//! ```xml
//! <outram:memory xmlns:outram="https://outram.dev/xmlns/domain/1" local-ratio="0.5" seal="on">
//!   <outram:server address="10.0.0.2:7741"/>
//!   <outram:disk size="8GiB" key="…"/>
//! </outram:memory>
//! ```
//!
//! People write it by hand, so everything unknown is an error that names what was expected.
//! `added` is written by `outram attach` alone: what `outram detach` has to take away again.

use std::fmt;
use std::str::FromStr;

use outram_wire::compressed_share::ShareError;
use outram_wire::disk::{DiskKey, MAX_DISK_BYTES, MIN_DISK_BYTES, is_disk_size};
use outram_wire::granularity::GranularityError;
use outram_wire::lost_pages::{LostPages, LostPagesError};
use outram_wire::seal::{Seal, SealError};
use outram_wire::tuning::{CountError, Tuning};
use outram_wire::units::{Limit, LocalRatio, PAGE_SIZE, UnitError, format_size, parse_size};
use xot::Node;

use crate::domain_xml::{DomainXml, DomainXmlError};
use outram_wire::server::{AddressError, ServerAddress};

/// The namespace; its last part is the format's version.
pub const NAMESPACE: &str = "https://outram.dev/xmlns/domain/1";

/// What every version of the namespace contains, and little else does.
pub const NAMESPACE_MARK: &str = "outram.dev/";

/// The prefix that we write.
pub const PREFIX: &str = "outram";

/// The element in place of settings by which a host is asked whether our hook is called there
/// ([`crate::libvirt::look_at_destination`]): no version may come to know it.
pub const PROBE: &str = "probe";

/// What `outram attach` added to a domain beside the disk and the settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Addition {
    /// The whole `<memoryBacking>` element.
    MemoryBacking,
    /// `<source type='memfd'/>` in `<memoryBacking>`.
    Source,
    /// `<access mode='shared'/>` in `<memoryBacking>`.
    Access,
    /// The `<metadata>` element.
    Metadata,
    /// A PCI controller of this index, added by libvirt for the disk.
    PciController(u32),
}

impl fmt::Display for Addition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MemoryBacking => f.write_str("memory-backing"),
            Self::Source => f.write_str("source"),
            Self::Access => f.write_str("access"),
            Self::Metadata => f.write_str("metadata"),
            Self::PciController(index) => write!(f, "pci-controller:{index}"),
        }
    }
}

impl FromStr for Addition {
    type Err = MetadataError;

    fn from_str(text: &str) -> Result<Self, MetadataError> {
        match text {
            "memory-backing" => Ok(Self::MemoryBacking),
            "source" => Ok(Self::Source),
            "access" => Ok(Self::Access),
            "metadata" => Ok(Self::Metadata),
            _ => text
                .strip_prefix("pci-controller:")
                .and_then(|index| index.parse().ok())
                .map(Self::PciController)
                .ok_or_else(|| MetadataError::Addition(text.to_owned())),
        }
    }
}

/// The settings in a domain's metadata.
#[derive(Clone, Debug, PartialEq)]
pub struct MemorySettings {
    /// What the guest may cost its host.
    pub limit: Limit,
    /// The memory servers in order; none means those of the host's settings.
    pub servers: Vec<ServerAddress>,
    /// Whether what leaves the host is sealed.
    pub seal: Seal,
    /// What becomes of the guest where it uses a page that is lost.
    pub lost_pages: LostPages,
    /// How the guest's memory is moved.
    pub tuning: Tuning,
    /// The far-memory disk; without one the guest sees a small disk that holds nothing.
    pub disk: Option<DiskSettings>,
    /// What attach added; empty for settings written by hand.
    pub added: Vec<Addition>,
}

/// A far-memory disk. Its key goes wherever the domain's definition does: to the host that it is
/// moved to, and into saved images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskSettings {
    /// Bytes that the guest sees.
    pub size_bytes: u64,
    /// The key to its contents.
    pub key: DiskKey,
}

/// Why a domain's settings were not understood.
#[derive(Debug, thiserror::Error)]
pub enum MetadataError {
    /// An element of ours in a namespace that this version does not know.
    #[error(
        "the metadata's namespace '{0}' is not known to this version of Outram: expected '{NAMESPACE}'"
    )]
    Namespace(String),
    /// More than one element of ours.
    #[error("the metadata has more than one element of '{NAMESPACE}': keep one <outram:memory>")]
    Duplicate,
    /// An element with a wrong name.
    #[error("<outram:{found}> in the metadata is not known: expected <outram:{expected}>")]
    Element {
        /// The name found.
        found: String,
        /// The name expected in its place.
        expected: &'static str,
    },
    /// An element of another namespace, or none, inside ours.
    #[error(
        "<{0}> inside <outram:memory> is not in Outram's namespace: write <outram:server address='HOST:PORT'/>"
    )]
    Foreign(String),
    /// An attribute with a wrong name.
    #[error("attribute '{found}' of <outram:{element}> is not known: expected {expected}")]
    Attribute {
        /// The element it stands at.
        element: &'static str,
        /// The name found.
        found: String,
        /// The names expected.
        expected: &'static str,
    },
    /// Text where none belongs.
    #[error(
        "<outram:{0}> contains text: expected attributes, and <outram:server address='HOST:PORT'/> inside <outram:memory>"
    )]
    Text(&'static str),
    /// Neither limit.
    #[error(
        "<outram:memory> sets no limit: write either local-ratio='0.5' (a share of the guest's RAM) or local='512MiB' (a size)"
    )]
    NoLimit,
    /// Both limits.
    #[error(
        "<outram:memory> sets both local-ratio='{ratio}' and local='{local}': keep one of the two"
    )]
    BothLimits {
        /// The ratio found.
        ratio: String,
        /// The size found.
        local: String,
    },
    /// The ratio or size is not understood.
    #[error("attribute '{attribute}' of <outram:memory>: {source}")]
    Limit {
        /// Which attribute.
        attribute: &'static str,
        /// What is wrong.
        source: UnitError,
    },
    /// Neither sealed nor not.
    #[error("attribute 'seal' of <outram:memory>: {0}")]
    Seal(#[from] SealError),
    /// Neither stopped at lost pages nor told of them.
    #[error("attribute 'lost-pages' of <outram:memory>: {0}")]
    LostPages(#[from] LostPagesError),
    /// No size that memory can be moved in.
    #[error("attribute 'granularity' of <outram:memory>: {0}")]
    Granularity(#[from] GranularityError),
    /// No share that compressed memory may have.
    #[error("attribute 'compressed-share' of <outram:memory>: {0}")]
    Compressed(#[from] ShareError),
    /// No number of what can be counted.
    #[error("attribute '{attribute}' of <outram:memory>: {source}")]
    Count {
        /// Which attribute.
        attribute: &'static str,
        /// What is wrong.
        source: CountError,
    },
    /// A limit of less than a page.
    #[error("local='{0}' of <outram:memory> is less than one page: expected a size such as 512MiB")]
    TooSmall(String),
    /// A server without its address.
    #[error("<outram:server> has no address: write <outram:server address='HOST:PORT'/>")]
    NoAddress,
    /// A server address that is none.
    #[error("attribute 'address' of <outram:server>: {0}")]
    Address(#[from] AddressError),
    /// A server named twice.
    #[error("<outram:server address='{0}'/> appears twice: name each server once")]
    SameServer(ServerAddress),
    /// More than one disk.
    #[error("<outram:memory> has more than one <outram:disk>: a guest can have one")]
    Disks,
    /// A disk without its size.
    #[error("<outram:disk> has no size: write <outram:disk size='8GiB' key='…'/>")]
    NoDiskSize,
    /// A size that no disk can have.
    #[error(
        "attribute 'size' of <outram:disk>: '{0}' is not possible: expected a multiple of 4096 bytes from {min} to {max}, such as 8GiB",
        min = format_size(MIN_DISK_BYTES), max = format_size(MAX_DISK_BYTES)
    )]
    DiskSize(String),
    /// A disk without a key, or with one that is none.
    #[error(
        "attribute 'key' of <outram:disk> must be 64 hexadecimal digits that nobody can guess: 'outram attach --disk-size' writes them, 'openssl rand -hex 32' does too"
    )]
    DiskKey,
    /// An unknown word in `added`.
    #[error(
        "'{0}' in attribute 'added' of <outram:memory> is not known: 'outram attach' writes this attribute; leave it as it was, or remove it"
    )]
    Addition(String),
}

/// The elements of our namespaces, known or not, directly inside `<metadata>`.
pub fn our_elements(domain: &DomainXml) -> Vec<Node> {
    domain
        .find(&["metadata"])
        .map(|metadata| domain.elements(metadata))
        .unwrap_or_default()
        .into_iter()
        .filter(|node| domain.namespace(*node).contains(NAMESPACE_MARK))
        .collect()
}

/// The element with our settings, whatever is in it.
pub fn find_element(domain: &DomainXml) -> Option<Node> {
    our_elements(domain)
        .into_iter()
        .find(|node| domain.namespace(*node) == NAMESPACE)
}

/// The settings of a domain; `None` if it does not use Outram.
pub fn read(domain: &DomainXml) -> Result<Option<MemorySettings>, MetadataError> {
    let elements = our_elements(domain);
    for element in &elements {
        let namespace = domain.namespace(*element);
        if namespace != NAMESPACE {
            return Err(MetadataError::Namespace(namespace.to_owned()));
        }
    }
    match elements.as_slice() {
        [] => Ok(None),
        [element] => read_memory(domain, *element).map(Some),
        _ => Err(MetadataError::Duplicate),
    }
}

fn read_memory(domain: &DomainXml, element: Node) -> Result<MemorySettings, MetadataError> {
    expect_name(domain, element, "memory")?;
    expect_no_text(domain, element, "memory")?;
    let (mut ratio, mut local, mut added) = (None, None, Vec::new());
    let (mut seal, mut lost_pages) = (Seal::default(), LostPages::default());
    let mut tuning = Tuning::default();
    let not_in = |attribute| move |source| MetadataError::Count { attribute, source };
    for (namespace, name, value) in domain.attributes(element) {
        match (namespace.as_str(), name.as_str()) {
            ("", "local-ratio") => ratio = Some(value),
            ("", "local") => local = Some(value),
            ("", "seal") => seal = value.parse()?,
            ("", "lost-pages") => lost_pages = value.parse()?,
            ("", "granularity") => tuning.granularity = Some(value.parse()?),
            ("", "workers") => tuning.workers = Some(value.parse().map_err(not_in("workers"))?),
            ("", "queue-depth") => {
                tuning.queue_depth = Some(value.parse().map_err(not_in("queue-depth"))?);
            }
            ("", "compressed-share") => tuning.compressed_share = Some(value.parse()?),
            ("", "added") => {
                added = value
                    .split_whitespace()
                    .map(str::parse)
                    .collect::<Result<_, _>>()?;
            }
            _ => {
                return Err(MetadataError::Attribute {
                    element: "memory",
                    found: name,
                    expected: "'local-ratio', 'local', 'seal', 'lost-pages', 'granularity', 'workers', 'queue-depth' or 'compressed-share'",
                });
            }
        }
    }
    let mut servers = Vec::new();
    let mut disk = None;
    for child in domain.elements(element) {
        if domain.namespace(child) == NAMESPACE && domain.local_name(child) == "disk" {
            if disk.replace(read_disk(domain, child)?).is_some() {
                return Err(MetadataError::Disks);
            }
            continue;
        }
        let server = read_server(domain, child)?;
        if servers.contains(&server) {
            return Err(MetadataError::SameServer(server));
        }
        servers.push(server);
    }
    Ok(MemorySettings {
        limit: read_limit(ratio, local)?,
        servers,
        seal,
        lost_pages,
        tuning,
        disk,
        added,
    })
}

fn read_disk(domain: &DomainXml, element: Node) -> Result<DiskSettings, MetadataError> {
    expect_no_text(domain, element, "disk")?;
    if let Some(child) = domain.elements(element).first() {
        return Err(MetadataError::Foreign(domain.local_name(*child).to_owned()));
    }
    let (mut size, mut key) = (None, None);
    for (namespace, name, value) in domain.attributes(element) {
        match (namespace.as_str(), name.as_str()) {
            ("", "size") => size = Some(value),
            ("", "key") => key = Some(value),
            _ => {
                return Err(MetadataError::Attribute {
                    element: "disk",
                    found: name,
                    expected: "'size' and 'key'",
                });
            }
        }
    }
    let size = size.ok_or(MetadataError::NoDiskSize)?;
    let size_bytes = parse_size(&size).ok().filter(|bytes| is_disk_size(*bytes));
    let key = key.and_then(|key| key.parse().ok());
    Ok(DiskSettings {
        size_bytes: size_bytes.ok_or(MetadataError::DiskSize(size))?,
        key: key.ok_or(MetadataError::DiskKey)?,
    })
}

fn read_limit(ratio: Option<String>, local: Option<String>) -> Result<Limit, MetadataError> {
    match (ratio, local) {
        (None, None) => Err(MetadataError::NoLimit),
        (Some(ratio), Some(local)) => Err(MetadataError::BothLimits { ratio, local }),
        (Some(ratio), None) => {
            LocalRatio::from_str(&ratio)
                .map(Limit::LocalRatio)
                .map_err(|source| MetadataError::Limit {
                    attribute: "local-ratio",
                    source,
                })
        }
        (None, Some(local)) => match parse_size(&local) {
            Ok(bytes) if bytes < PAGE_SIZE as u64 => Err(MetadataError::TooSmall(local)),
            Ok(bytes) => Ok(Limit::LocalBytes(bytes)),
            Err(source) => Err(MetadataError::Limit {
                attribute: "local",
                source,
            }),
        },
    }
}

fn read_server(domain: &DomainXml, element: Node) -> Result<ServerAddress, MetadataError> {
    if domain.namespace(element) != NAMESPACE {
        return Err(MetadataError::Foreign(
            domain.local_name(element).to_owned(),
        ));
    }
    expect_name(domain, element, "server")?;
    expect_no_text(domain, element, "server")?;
    if let Some(child) = domain.elements(element).first() {
        return Err(MetadataError::Foreign(domain.local_name(*child).to_owned()));
    }
    let mut address = None;
    for (namespace, name, value) in domain.attributes(element) {
        match (namespace.as_str(), name.as_str()) {
            ("", "address") => address = Some(value.parse()?),
            _ => {
                return Err(MetadataError::Attribute {
                    element: "server",
                    found: name,
                    expected: "'address'",
                });
            }
        }
    }
    address.ok_or(MetadataError::NoAddress)
}

fn expect_name(
    domain: &DomainXml,
    element: Node,
    expected: &'static str,
) -> Result<(), MetadataError> {
    match domain.local_name(element) {
        name if name == expected => Ok(()),
        name => Err(MetadataError::Element {
            found: name.to_owned(),
            expected,
        }),
    }
}

fn expect_no_text(
    domain: &DomainXml,
    element: Node,
    name: &'static str,
) -> Result<(), MetadataError> {
    if domain.text(element).trim().is_empty() {
        Ok(())
    } else {
        Err(MetadataError::Text(name))
    }
}

/// The settings as an XML element in our namespace.
pub fn to_text(settings: &MemorySettings) -> Result<String, DomainXmlError> {
    serialise(settings, NAMESPACE)
}

/// The settings as an element without namespace, as `virDomainSetMetadata` takes it: libvirt puts
/// every element of it into the namespace that it is given beside.
pub fn to_plain_text(settings: &MemorySettings) -> Result<String, DomainXmlError> {
    serialise(settings, "")
}

fn serialise(settings: &MemorySettings, namespace: &str) -> Result<String, DomainXmlError> {
    let mut xot = xot::Xot::new();
    let id = xot.add_namespace(namespace);
    let memory_name = xot.add_name_ns("memory", id);
    let memory = xot.new_element(memory_name);
    if !namespace.is_empty() {
        let prefix = xot.add_prefix(PREFIX);
        xot.set_namespace(memory, prefix, id);
    }
    let (attribute, value) = limit_attribute(settings.limit);
    let attribute = xot.add_name(attribute);
    xot.set_attribute(memory, attribute, value);
    if settings.seal != Seal::default() {
        let seal = xot.add_name("seal");
        xot.set_attribute(memory, seal, settings.seal.to_string());
    }
    if settings.lost_pages != LostPages::default() {
        let lost_pages = xot.add_name("lost-pages");
        xot.set_attribute(memory, lost_pages, settings.lost_pages.to_string());
    }
    for (name, value) in settings.tuning.named() {
        let name = xot.add_name(name);
        xot.set_attribute(memory, name, value);
    }
    if !settings.added.is_empty() {
        let words: Vec<String> = settings.added.iter().map(Addition::to_string).collect();
        let added = xot.add_name("added");
        xot.set_attribute(memory, added, words.join(" "));
    }
    let server_name = xot.add_name_ns("server", id);
    let address_name = xot.add_name("address");
    for address in &settings.servers {
        let server = xot.new_element(server_name);
        xot.set_attribute(server, address_name, address.to_string());
        xot.append(memory, server)?;
    }
    if let Some(settings) = &settings.disk {
        let name = xot.add_name_ns("disk", id);
        let disk = xot.new_element(name);
        for (attribute, value) in [
            ("size", exact_size(settings.size_bytes)),
            ("key", settings.key.to_string()),
        ] {
            let attribute = xot.add_name(attribute);
            xot.set_attribute(disk, attribute, value);
        }
        xot.append(memory, disk)?;
    }
    Ok(xot.to_string(memory)?)
}

/// The attribute that states a limit, and its value: exact, in the largest unit that is.
pub fn limit_attribute(limit: Limit) -> (&'static str, String) {
    match limit {
        Limit::LocalRatio(ratio) => ("local-ratio", ratio.to_string()),
        Limit::LocalBytes(bytes) => ("local", exact_size(bytes)),
    }
}

/// A size in the largest binary unit that divides it.
fn exact_size(bytes: u64) -> String {
    [("GiB", 30), ("MiB", 20), ("KiB", 10)]
        .into_iter()
        .find(|(_, shift)| bytes != 0 && bytes.trailing_zeros() >= *shift)
        .map_or_else(
            || bytes.to_string(),
            |(unit, shift)| format!("{}{unit}", bytes >> shift),
        )
}
