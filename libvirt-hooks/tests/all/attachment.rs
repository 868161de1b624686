//! Attaching and detaching real domains' XML: what is added, what stays, and that it comes back.

use std::path::Path;

use outram_libvirt::attachment::{self, AttachRequest, AttachmentError, Change};
use outram_libvirt::domain_xml::DomainXml;
use outram_libvirt::metadata::{self, Addition, NAMESPACE};
use outram_libvirt::refusal;
use outram_wire::lost_pages::LostPages;
use outram_wire::seal::Seal;
use outram_wire::tuning::Tuning;
use outram_wire::units::{Limit, LocalRatio};

use crate::support::{self, DOMAINS, RUN, assert_golden, canonical, golden};

fn parse(text: &str) -> DomainXml {
    DomainXml::parse(text).expect("a domain")
}

fn request(ratio: f64, servers: &[&str]) -> AttachRequest {
    let ratio = LocalRatio::new(ratio).expect("a ratio");
    support::request(Limit::LocalRatio(ratio), servers)
}

fn attach(text: &str, request: &AttachRequest) -> (String, Vec<Change>) {
    let mut domain = parse(text);
    let changes = attachment::attach(&mut domain, Path::new(RUN), request).expect("attached");
    (domain.to_text().expect("text"), changes)
}

fn detach(text: &str) -> String {
    let mut domain = parse(text);
    attachment::detach(&mut domain, Path::new(RUN)).expect("detached");
    domain.to_text().expect("text")
}

#[test]
fn attached_domains_are_as_recorded_and_can_be_paged() {
    for name in DOMAINS {
        let before = golden(&format!("{name}.xml"));
        let (after, _) = attach(&before, &request(0.5, &["10.0.0.2:7741", "mem2:7741"]));
        assert_golden(&format!("{name}.attached"), &canonical(&after));
        let refusals = refusal::check(&parse(&after), Path::new(RUN)).expect("checked");
        assert_eq!(refusals, [], "{name}");
    }
}

#[test]
fn detach_restores_what_attach_found() {
    for name in DOMAINS {
        let before = golden(&format!("{name}.xml"));
        let (after, _) = attach(&before, &request(0.5, &["10.0.0.2:7741"]));
        assert_eq!(canonical(&detach(&after)), canonical(&before), "{name}");
    }
}

#[test]
fn detach_keeps_what_a_user_changed_in_between() {
    let before = golden("virt-install.xml");
    let (after, _) = attach(&before, &request(0.5, &["10.0.0.2:7741"]));
    let edited = after
        .replace(
            "<access mode=\"shared\"/>",
            "<access mode=\"shared\"/><nosharepages/>",
        )
        .replace(
            "<vcpu placement=\"static\">4<",
            "<vcpu placement=\"static\">8<",
        );
    assert_ne!(after, edited);
    let expected = before
        .replace("<vcpu placement='static'>4<", "<vcpu placement='static'>8<")
        .replace(
            "</currentMemory>",
            "</currentMemory><memoryBacking><nosharepages/></memoryBacking>",
        );
    assert_eq!(canonical(&detach(&edited)), canonical(&expected));
}

#[test]
fn detach_leaves_memory_backing_that_was_there() {
    let text = "<domain type='kvm'><name>n</name>\
        <uuid>9a4a7f0e-2f5b-4d55-8a53-0a4e1c7e1234</uuid><memory>1024</memory>\
        <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>\
        <metadata><x:y xmlns:x='urn:x'/></metadata><devices/></domain>";
    let (after, changes) = attach(text, &request(0.5, &[]));
    assert_eq!(changes.len(), 2, "{changes:?}");
    assert_eq!(canonical(&detach(&after)), canonical(text));
}

#[test]
fn attach_again_changes_only_what_is_new() {
    let before = golden("virt-install.xml");
    let (once, _) = attach(&before, &request(0.5, &["10.0.0.2:7741"]));
    let (same, changes) = attach(&once, &request(0.5, &[]));
    assert_eq!((canonical(&same), changes), (canonical(&once), vec![]));

    let (other, changes) = attach(&once, &request(0.25, &[]));
    assert_eq!(changes.len(), 1, "{changes:?}");
    assert!(changes[0].to_string().starts_with("~ <outram:memory"));
    let settings = metadata::read(&parse(&other))
        .expect("read")
        .expect("there");
    assert_eq!(settings.servers.len(), 1, "servers stay when none is given");

    // The same server, by another transport.
    let (_, changes) = attach(&once, &request(0.5, &["rdma://10.0.0.2:7741"]));
    assert_eq!(changes.len(), 1, "{changes:?}");
    assert_eq!(canonical(&detach(&other)), canonical(&before));
}

#[test]
fn attach_again_keeps_what_it_does_not_name() {
    let first = AttachRequest {
        seal: Some(Seal::Off),
        lost_pages: Some(LostPages::Poison),
        tuning: Tuning {
            granularity: "64KiB".parse().ok(),
            workers: "4".parse().ok(),
            queue_depth: "16".parse().ok(),
            compressed_share: "0.25".parse().ok(),
        },
        ..request(0.5, &["10.0.0.2:7741"])
    };
    let (attached, _) = attach(&golden("virt-install.xml"), &first);
    let (again, _) = attach(&attached, &request(0.25, &[]));
    let settings = metadata::read(&parse(&again)).expect("understood");
    let settings = settings.expect("attached");
    assert_eq!(settings.limit, request(0.25, &[]).limit);
    assert_eq!(settings.servers, first.servers);
    assert_eq!(Some(settings.seal), first.seal);
    assert_eq!(Some(settings.lost_pages), first.lost_pages);
    assert_eq!(settings.tuning, first.tuning);
}

#[test]
fn a_cloned_domain_gets_its_own_socket() {
    let (once, _) = attach(
        &golden("virt-install.xml"),
        &request(0.5, &["10.0.0.2:7741"]),
    );
    let clone = once.replacen(
        "<uuid>3b1e9f00-6f1c-4b63-9f6c-5b2f3f0a7c11</uuid>",
        "<uuid>11111111-1111-4111-8111-111111111111</uuid>",
        1,
    );
    let refusals = refusal::check(&parse(&clone), Path::new(RUN)).expect("checked");
    assert!(
        matches!(refusals.as_slice(), [refusal::Refusal::OtherSocket { .. }]),
        "{refusals:?}"
    );
    let (fixed, changes) = attach(&clone, &request(0.5, &[]));
    assert_eq!(changes.len(), 1, "{changes:?}");
    assert!(fixed.contains("/run/outram/11111111-1111-4111-8111-111111111111/vhost.sock"));
    assert!(!fixed.contains("/run/outram/3b1e9f00"));
}

#[test]
fn controllers_that_libvirt_adds_for_the_disk_go_with_it() {
    let before = golden("virt-install.xml");
    let (after, _) = attach(&before, &request(0.5, &["10.0.0.2:7741"]));
    let port = "<controller type='pci' index='2' model='pcie-root-port'>\
        <address type='pci' domain='0x0000' bus='0x00' slot='0x02' function='0x1'/></controller>";
    let defined = after
        .replace("</devices>", &format!("{port}</devices>"))
        .replacen(
            "<target dev=\"vdz\" bus=\"virtio\"/>",
            "<target dev=\"vdz\" bus=\"virtio\"/>\
             <address type='pci' domain='0x0000' bus='0x03' slot='0x00' function='0x0'/>",
            1,
        );
    let settings = attachment::note_controllers(&parse(&before), &parse(&defined))
        .expect("noted")
        .expect("a new controller");
    assert!(settings.added.contains(&Addition::PciController(2)));

    let mut domain = parse(&defined);
    let old = metadata::find_element(&domain).expect("settings");
    let text = metadata::to_text(&settings).expect("text");
    let new = domain.element(&text).expect("an element");
    domain.replace(old, new).expect("replaced");
    let noted = domain.to_text().expect("text");
    // Bus 2 carries the user's USB controller, so the port has to stay.
    assert!(detach(&noted).contains("index='2'") || detach(&noted).contains("index=\"2\""));
    let free = noted.replace("bus=\"0x02\"", "bus=\"0x01\"");
    assert_ne!(free, noted);
    assert!(!detach(&free).contains("index=\"2\""));
}

#[test]
fn a_domain_whose_settings_are_broken_is_detached() {
    let attached = support::attached("backed.xml");
    let other = format!("<o:memory xmlns:o='{NAMESPACE}'/><outram:memory ");
    for broken in [
        attached.replacen(" local=", " locall=", 1),
        attached.replace("xmlns/domain/1", "xmlns/domain/2"),
        attached.replacen("<outram:memory ", &other, 1),
    ] {
        let mut domain = parse(&broken);
        assert!(metadata::read(&domain).is_err(), "{broken}");
        let changes = attachment::detach(&mut domain, Path::new(RUN)).expect("detached");
        assert!(changes[1].what.contains("not understood"), "{changes:?}");
        let detached = domain.to_text().expect("text");
        assert!(!detached.contains("outram"), "{detached}");
        assert!(detached.contains("<access mode=\"shared\"/>"), "{detached}");
    }
}

#[test]
fn a_domain_that_is_not_attached_is_not_detached() {
    let mut domain = parse(&golden("virt-install.xml"));
    assert!(matches!(
        attachment::detach(&mut domain, Path::new(RUN)),
        Err(AttachmentError::NotAttached)
    ));
}

#[test]
fn a_domain_without_a_free_disk_name_is_refused() {
    let disks: String = ('a'..='z')
        .map(|c| format!("<disk type='file'><target dev='vd{c}' bus='virtio'/></disk>"))
        .collect();
    let text = format!(
        "<domain type='kvm'><name>n</name><uuid>9a4a7f0e-2f5b-4d55-8a53-0a4e1c7e1234</uuid>\
         <memory>1024</memory><devices>{disks}</devices></domain>"
    );
    let attached = attachment::attach(&mut parse(&text), Path::new(RUN), &request(0.5, &[]));
    assert!(matches!(attached, Err(AttachmentError::NoTarget)));
}

#[test]
fn ram_counts_dimms_but_no_persistent_memory() {
    let domain = parse(&golden("backed.xml"));
    assert_eq!(domain.ram_bytes().expect("a size"), (2048 - 512) << 20);
    let domain = parse(&golden("virt-install.xml"));
    assert_eq!(domain.ram_bytes().expect("a size"), 4 << 30);
    assert_eq!(domain.name().expect("a name"), "debian 12 \"web\" & more");
}
