//! Where a running guest has room for another PCI device.
//!
//! A device is hot-plugged into a free PCIe root port (q35) or a free slot of the PCI bus (i440fx).
//! libvirt adds ports only at a start, so a guest without a free one cannot be attached while it
//! runs. See <https://libvirt.org/pci-hotplug.html>.

use std::collections::HashSet;

use crate::attachment::{bus_in_use, pci_controllers};
use crate::domain_xml::DomainXml;

/// Slots of a PCI bus that devices may take: slot 0 is the host bridge's.
const PCI_SLOTS: std::ops::Range<u32> = 1..32;

/// Why there is no room.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoSlot {
    /// Every root port has its device.
    #[error(
        "the guest has no free PCIe port to plug the disk into: shut it down, add <controller type='pci' model='pcie-root-port'/> to its <devices> ('virsh edit'), and start it again"
    )]
    Port,
    /// Every slot has its device.
    #[error("the guest's PCI bus has no free slot to plug the disk into: remove a device")]
    Slot,
    /// A machine without hot-plug.
    #[error(
        "the guest's machine type '{0}' has no hot-pluggable PCI bus: shut it down, and attach it then"
    )]
    Machine(String),
}

/// Finds room for one more device; says where.
pub(crate) fn find(domain: &DomainXml) -> Result<String, NoSlot> {
    let machine = domain
        .find(&["os", "type"])
        .and_then(|os| domain.attribute(os, "machine"))
        .unwrap_or_default();
    if machine.contains("q35") {
        free_port(domain).ok_or(NoSlot::Port)
    } else if machine.starts_with("pc") {
        free_slot(domain).ok_or(NoSlot::Slot)
    } else {
        Err(NoSlot::Machine(machine.to_owned()))
    }
}

fn free_port(domain: &DomainXml) -> Option<String> {
    let is_port = |model: Option<&str>| {
        matches!(
            model,
            Some("pcie-root-port" | "pcie-switch-downstream-port")
        )
    };
    let plugs = |node| {
        let target = domain.child(node, "target");
        target.and_then(|target| domain.attribute(target, "hotplug")) != Some("off")
    };
    pci_controllers(domain)
        .into_iter()
        .find(|(index, node)| {
            is_port(domain.attribute(*node, "model")) && plugs(*node) && !bus_in_use(domain, *index)
        })
        .map(|(index, _)| format!("PCIe root port {index}"))
}

fn free_slot(domain: &DomainXml) -> Option<String> {
    let devices = domain.find(&["devices"])?;
    let number = |text: &str| u32::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let taken: HashSet<u32> = domain
        .elements(devices)
        .into_iter()
        .flat_map(|device| domain.children(device, "address"))
        .filter(|address| domain.attribute(*address, "type") == Some("pci"))
        .filter(|address| domain.attribute(*address, "bus").and_then(number) == Some(0))
        .filter_map(|address| domain.attribute(address, "slot").and_then(number))
        .collect();
    PCI_SLOTS
        .into_iter()
        .find(|slot| !taken.contains(slot))
        .map(|slot| format!("PCI slot {slot}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(machine: &str, devices: &str) -> Result<String, NoSlot> {
        let text = format!(
            "<domain><os><type machine='{machine}'>hvm</type></os><devices>{devices}</devices></domain>"
        );
        find(&DomainXml::parse(&text).expect("well-formed"))
    }

    const PORT: &str = "<controller type='pci' index='3' model='pcie-root-port'>\
        <address type='pci' bus='0x00' slot='0x02' function='0x1'/></controller>";

    #[test]
    fn a_port_with_nothing_in_it_is_free() {
        assert_eq!(
            verdict("pc-q35-7.2", PORT),
            Ok("PCIe root port 3".to_owned())
        );
        let taken = format!(
            "{PORT}<disk><address type='pci' bus='0x03' slot='0x00' function='0x0'/></disk>"
        );
        assert_eq!(verdict("pc-q35-7.2", &taken), Err(NoSlot::Port));
        assert_eq!(verdict("q35", ""), Err(NoSlot::Port));
        let cold = PORT.replace("'><address", "'><target hotplug='off'/><address");
        assert_eq!(verdict("q35", &cold), Err(NoSlot::Port));
    }

    #[test]
    fn the_old_machine_has_slots() {
        let devices: String = (1..31)
            .map(|slot| format!("<disk><address type='pci' bus='0x00' slot='{slot:#04x}'/></disk>"))
            .collect();
        assert_eq!(
            verdict("pc-i440fx-7.2", &devices),
            Ok("PCI slot 31".to_owned())
        );
        let full = format!("{devices}<disk><address type='pci' bus='0x00' slot='0x1f'/></disk>");
        assert_eq!(verdict("pc-i440fx-7.2", &full), Err(NoSlot::Slot));
    }

    #[test]
    fn other_machines_are_named() {
        assert_eq!(
            verdict("microvm", ""),
            Err(NoSlot::Machine("microvm".to_owned()))
        );
    }
}
