//! A domain's XML as a tree: found, read and edited by name, never as a string.
//!
//! The module knows XML and where libvirt puts a domain's name, identity and memory; it knows
//! nothing of what Outram wants of them. Whatever it is not asked to change, comments, foreign
//! namespaces and metadata of others among it, stays as it was.

use outram_wire::units::{UnitError, VmId, parse_size};
use xot::{Node, Xot};

/// Why a domain's XML could not be used.
#[derive(Debug, thiserror::Error)]
pub enum DomainXmlError {
    /// The text is no well-formed XML.
    #[error("the domain's XML is not well-formed")]
    Parse(#[from] xot::ParseError),
    /// The tree could not be read or edited.
    #[error("the domain's XML could not be edited")]
    Tree(#[from] xot::Error),
    /// The root is another element.
    #[error("the XML describes a <{0}>, not a <domain>")]
    NotADomain(String),
    /// An element that libvirt always writes is missing.
    #[error("the domain's XML has no <{0}>; expected the form that 'virsh dumpxml' prints")]
    Missing(&'static str),
    /// The domain's identity or memory is not understood.
    #[error("the domain's <{element}> is not understood")]
    Value {
        /// The element.
        element: &'static str,
        /// What is wrong with its text.
        source: UnitError,
    },
}

/// A parsed `<domain>`.
pub struct DomainXml {
    xot: Xot,
    document: Node,
    domain: Node,
}

impl DomainXml {
    /// Parses what libvirt prints or hands to its hooks.
    pub fn parse(text: &str) -> Result<Self, DomainXmlError> {
        let mut xot = Xot::new();
        let document = xot.parse(text)?;
        let domain = xot.document_element(document)?;
        let parsed = Self {
            xot,
            document,
            domain,
        };
        match parsed.local_name(domain) {
            "domain" => Ok(parsed),
            other => Err(DomainXmlError::NotADomain(other.to_owned())),
        }
    }

    /// The document as text, for libvirt to define.
    pub fn to_text(&self) -> Result<String, DomainXmlError> {
        Ok(self.xot.to_string(self.document)?)
    }

    /// The `<domain>` element.
    pub fn domain(&self) -> Node {
        self.domain
    }

    /// The domain's libvirt name.
    pub fn name(&self) -> Result<String, DomainXmlError> {
        self.child(self.domain, "name")
            .map(|name| self.text(name))
            .ok_or(DomainXmlError::Missing("name"))
    }

    /// The domain's UUID.
    pub fn vm_id(&self) -> Result<VmId, DomainXmlError> {
        let uuid = self
            .child(self.domain, "uuid")
            .ok_or(DomainXmlError::Missing("uuid"))?;
        self.text(uuid)
            .trim()
            .parse()
            .map_err(|source| DomainXmlError::Value {
                element: "uuid",
                source,
            })
    }

    /// Bytes of RAM at start: `<memory>`, which counts NUMA cells and memory devices, less those
    /// devices that are no RAM to page (NVDIMM, virtio-pmem, SGX).
    /// See <https://libvirt.org/formatdomain.html#memory-allocation>.
    pub fn ram_bytes(&self) -> Result<u64, DomainXmlError> {
        let memory = self
            .child(self.domain, "memory")
            .ok_or(DomainXmlError::Missing("memory"))?;
        let total = self.size_of(memory, "memory")?;
        let mut not_ram = 0u64;
        for device in self.devices("memory") {
            let model = self.attribute(device, "model").unwrap_or_default();
            if !matches!(model, "nvdimm" | "virtio-pmem" | "sgx-epc") {
                continue;
            }
            let size = self
                .child(device, "target")
                .and_then(|target| self.child(target, "size"))
                .ok_or(DomainXmlError::Missing("size"))?;
            not_ram = not_ram.saturating_add(self.size_of(size, "size")?);
        }
        Ok(total.saturating_sub(not_ram))
    }

    /// What its RAM may grow to by hot-plug: `<maxMemory>`, or what it has at start.
    pub fn max_ram_bytes(&self) -> Result<u64, DomainXmlError> {
        let at_start = self.ram_bytes()?;
        match self.child(self.domain, "maxMemory") {
            Some(most) => Ok(self.size_of(most, "maxMemory")?.max(at_start)),
            None => Ok(at_start),
        }
    }

    /// Slots for DIMMs in all, and those that are taken; `None` where no memory can be plugged.
    pub fn memory_slots(&self) -> Option<(usize, usize)> {
        let most = self.child(self.domain, "maxMemory")?;
        let all = self.attribute(most, "slots")?.parse().ok()?;
        let devices = self.devices("memory").into_iter();
        let is_dimm = |model: &str| matches!(model, "dimm" | "nvdimm");
        let taken = devices.filter(|device| self.attribute(*device, "model").is_some_and(is_dimm));
        Some((all, taken.count()))
    }

    /// A size as libvirt writes it: a number, and a `unit` attribute that is KiB by default.
    fn size_of(&self, node: Node, element: &'static str) -> Result<u64, DomainXmlError> {
        let unit = self.attribute(node, "unit").unwrap_or("KiB");
        parse_size(&format!("{}{unit}", self.text(node).trim()))
            .map_err(|source| DomainXmlError::Value { element, source })
    }

    /// The devices of one element name, in their order.
    pub fn devices(&self, name: &str) -> Vec<Node> {
        self.child(self.domain, "devices")
            .map(|devices| self.children(devices, name))
            .unwrap_or_default()
    }

    /// The first child element of that name, outside any namespace.
    pub fn child(&self, parent: Node, name: &str) -> Option<Node> {
        self.children(parent, name).first().copied()
    }

    /// The element at the end of a path of names below `<domain>`.
    pub fn find(&self, path: &[&str]) -> Option<Node> {
        path.iter()
            .try_fold(self.domain, |node, name| self.child(node, name))
    }

    /// All child elements of that name, outside any namespace.
    pub fn children(&self, parent: Node, name: &str) -> Vec<Node> {
        self.elements(parent)
            .into_iter()
            .filter(|node| self.local_name(*node) == name && self.namespace(*node).is_empty())
            .collect()
    }

    /// All child elements.
    pub fn elements(&self, parent: Node) -> Vec<Node> {
        self.xot
            .children(parent)
            .filter(|node| self.xot.is_element(*node))
            .collect()
    }

    /// The text directly inside a node's elements, joined.
    pub fn text(&self, node: Node) -> String {
        self.xot
            .children(node)
            .filter_map(|child| self.xot.text_str(child))
            .collect()
    }

    /// An attribute outside any namespace.
    pub fn attribute(&self, node: Node, name: &str) -> Option<&str> {
        self.xot
            .name(name)
            .and_then(|id| self.xot.get_attribute(node, id))
    }

    /// All attributes: namespace (empty for none), local name, value.
    pub fn attributes(&self, node: Node) -> Vec<(String, String, String)> {
        self.xot
            .attributes(node)
            .iter()
            .map(|(id, value)| {
                let (local, namespace) = self.xot.name_ns_str(id);
                (namespace.to_owned(), local.to_owned(), value.clone())
            })
            .collect()
    }

    /// An element's name without its prefix.
    pub fn local_name(&self, node: Node) -> &str {
        self.xot
            .node_name(node)
            .map(|id| self.xot.local_name_str(id))
            .unwrap_or_default()
    }

    /// The namespace an element's name is in; empty for none.
    pub fn namespace(&self, node: Node) -> &str {
        self.xot
            .node_name(node)
            .map(|id| self.xot.uri_str(id))
            .unwrap_or_default()
    }

    /// Whether nothing but white space is left inside.
    pub fn is_empty(&self, node: Node) -> bool {
        self.xot.children(node).all(|child| {
            self.xot
                .text_str(child)
                .is_some_and(|text| text.trim().is_empty())
        })
    }

    /// Sets an attribute outside any namespace.
    pub fn set_attribute(&mut self, node: Node, name: &str, value: &str) {
        let id = self.xot.add_name(name);
        self.xot.set_attribute(node, id, value);
    }

    /// Parses a fragment of one element and returns it, not yet in the tree.
    pub fn element(&mut self, fragment: &str) -> Result<Node, DomainXmlError> {
        let document = self.xot.parse(fragment)?;
        let element = self.xot.document_element(document)?;
        self.xot.detach(element)?;
        Ok(element)
    }

    /// Appends a child.
    pub fn append(&mut self, parent: Node, child: Node) -> Result<(), DomainXmlError> {
        Ok(self.xot.append(parent, child)?)
    }

    /// Inserts a sibling after a node.
    pub fn insert_after(&mut self, node: Node, sibling: Node) -> Result<(), DomainXmlError> {
        Ok(self.xot.insert_after(node, sibling)?)
    }

    /// Puts one node in another's place.
    pub fn replace(&mut self, old: Node, new: Node) -> Result<(), DomainXmlError> {
        Ok(self.xot.replace(old, new)?)
    }

    /// Removes a node and all below it.
    pub fn remove(&mut self, node: Node) -> Result<(), DomainXmlError> {
        Ok(self.xot.remove(node)?)
    }

    /// The text of one element, for messages.
    pub fn show(&self, node: Node) -> String {
        self.xot
            .to_string(node)
            .unwrap_or_else(|_| format!("<{}/>", self.local_name(node)))
    }
}
