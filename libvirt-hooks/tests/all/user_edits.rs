//! Attach, a user's edits, detach: what is left is the domain as it was, but for those edits.
//!
//! Every edit is made twice, to the attached domain and to the one that never was; detaching the
//! first must give the second. Domains are the golden ones and random ones.

use std::path::Path;

use outram_libvirt::attachment::{self, AttachRequest};
use outram_libvirt::domain_xml::DomainXml;
use outram_libvirt::refusal;
use outram_wire::units::{Limit, LocalRatio};
use proptest::collection::vec;
use proptest::prelude::*;
use xot::Node;

/// What a user may do to a domain while it is attached.
#[derive(Clone, Debug)]
enum Edit {
    Rename(String),
    Title(String),
    Memory(u32),
    AddDisk(char),
    RemoveFirstDisk,
    AddDeviceWithComment(String),
    AddMetadata(u8, String),
    RemoveOtherMetadata,
    MetadataToTheEnd,
    AddBacking(&'static str),
    PrivateAccess,
    RemoveBacking,
    /// Outram's own: attached again with other settings, which may happen at any time.
    AttachAgain(u32),
    /// Also attach's own, and the disk's: its name, address and driver are the user's to choose.
    TouchOurDisk,
    RemoveOurDisk,
}

use Edit::*;

use crate::support::{self, DOMAINS, RUN, canonical, golden};

fn parse(text: &str) -> DomainXml {
    DomainXml::parse(text).expect("a domain")
}

fn text_of(domain: &DomainXml) -> String {
    domain.to_text().expect("text")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

fn request(percent: u32) -> AttachRequest {
    let ratio = LocalRatio::new(f64::from(percent) / 100.0).expect("a ratio");
    support::request(Limit::LocalRatio(ratio), &["10.0.0.2:7741"])
}

fn attach(domain: &mut DomainXml, percent: u32) {
    attachment::attach(domain, Path::new(RUN), &request(percent)).expect("attached");
}

/// The child of `parent` of that name; made behind the first of `places` that is there.
fn child_or_new(domain: &mut DomainXml, name: &str, places: &[&str]) -> Node {
    if let Some(found) = domain.find(&[name]) {
        return found;
    }
    let new = domain.element(&format!("<{name}/>")).expect("an element");
    let place = places.iter().find_map(|place| domain.find(&[place]));
    domain
        .insert_after(place.expect("a place"), new)
        .expect("inserted");
    new
}

fn metadata(domain: &mut DomainXml) -> Node {
    child_or_new(
        domain,
        "metadata",
        &["description", "title", "genid", "uuid", "name"],
    )
}

fn backing(domain: &mut DomainXml) -> Node {
    let places = [
        "memtune",
        "blkiotune",
        "currentMemory",
        "maxMemory",
        "memory",
    ];
    child_or_new(domain, "memoryBacking", &places)
}

fn append(domain: &mut DomainXml, parent: Node, fragment: &str) {
    let new = domain.element(fragment).expect("an element");
    domain.append(parent, new).expect("appended");
}

fn replace_text(domain: &mut DomainXml, name: &str, attributes: &str, text: &str) {
    let new = format!("<{name}{attributes}>{}</{name}>", escaped(text));
    let new = domain.element(&new).expect("an element");
    match domain.find(&[name]) {
        Some(old) => domain.replace(old, new).expect("replaced"),
        None => {
            let uuid = domain.find(&["uuid"]).expect("a UUID");
            domain.insert_after(uuid, new).expect("inserted");
        }
    }
}

fn others_disks(domain: &DomainXml) -> Vec<Node> {
    let ours = refusal::our_disks(domain, Path::new(RUN));
    let mut disks = domain.devices("disk");
    disks.retain(|disk| !ours.contains(disk));
    disks
}

impl Edit {
    /// Makes the edit; those of what only an attached domain has do nothing to another.
    fn make(&self, domain: &mut DomainXml) {
        let devices = domain.find(&["devices"]).expect("devices");
        match self {
            Rename(name) => replace_text(domain, "name", "", name),
            Title(title) => replace_text(domain, "title", "", title),
            Memory(mib) => replace_text(domain, "memory", " unit='MiB'", &mib.to_string()),
            AddDisk(letter) => append(
                domain,
                devices,
                &format!("<disk type='file'><target dev='sd{letter}' bus='sata'/></disk>"),
            ),
            RemoveFirstDisk => {
                if let Some(disk) = others_disks(domain).first() {
                    domain.remove(*disk).expect("removed");
                }
            }
            AddDeviceWithComment(comment) => append(
                domain,
                devices,
                &format!("<rng model='virtio'><!-- {comment} --></rng>"),
            ),
            AddMetadata(number, text) => {
                let parent = metadata(domain);
                let text = escaped(text);
                let other =
                    format!("<o{number}:x xmlns:o{number}='urn:o{number}'>{text}</o{number}:x>");
                append(domain, parent, &other);
            }
            RemoveOtherMetadata => {
                let Some(parent) = domain.find(&["metadata"]) else {
                    return;
                };
                for other in domain.elements(parent) {
                    if !domain.namespace(other).contains("outram.dev/") {
                        domain.remove(other).expect("removed");
                    }
                }
            }
            MetadataToTheEnd => {
                // Only where there is one of the user's own: ours goes with what is in it.
                let Some(parent) = domain.find(&["metadata"]) else {
                    return;
                };
                let root = domain.domain();
                domain.append(root, parent).expect("moved");
            }
            AddBacking(fragment) => {
                let parent = backing(domain);
                append(domain, parent, fragment);
            }
            PrivateAccess => {
                let parent = backing(domain);
                match domain.child(parent, "access") {
                    Some(access) => domain.set_attribute(access, "mode", "private"),
                    None => append(domain, parent, "<access mode='private'/>"),
                }
            }
            RemoveBacking => {
                if let Some(backing) = domain.find(&["memoryBacking"]) {
                    domain.remove(backing).expect("removed");
                }
            }
            AttachAgain(_) | TouchOurDisk | RemoveOurDisk => {}
        }
    }

    /// Makes an edit of what only an attached domain has.
    fn make_attached(&self, domain: &mut DomainXml) {
        let ours = refusal::our_disks(domain, Path::new(RUN));
        match (self, ours.first()) {
            (AttachAgain(percent), _) => attach(domain, *percent),
            (TouchOurDisk, Some(disk)) => {
                let target = domain.child(*disk, "target").expect("a target");
                domain.set_attribute(target, "dev", "vdq");
                append(domain, *disk, "<boot order='9'/>");
                append(
                    domain,
                    *disk,
                    "<address type='pci' bus='0x07' slot='0x00'/>",
                );
            }
            (RemoveOurDisk, Some(disk)) => domain.remove(*disk).expect("removed"),
            _ => self.make(domain),
        }
    }
}

/// Attaches, edits and detaches; and edits the same without.
fn demand_edits_alone_stay(before: &str, edits: &[Edit]) {
    let mut expected = parse(before);
    let mut attached = parse(before);
    attach(&mut attached, 50);
    for edit in edits {
        edit.make(&mut expected);
        // As libvirt does in between, so that nothing depends on one tree.
        attached = parse(&text_of(&attached));
        edit.make_attached(&mut attached);
    }
    attachment::detach(&mut attached, Path::new(RUN)).expect("detached");
    assert_eq!(
        settled(&mut attached),
        settled(&mut expected),
        "after {edits:?} of\n{before}"
    );
}

/// The canonical text, with what libvirt itself neither heeds nor keeps left out: the order of what
/// is directly in `<domain>` and `<memoryBacking>`, and that these or `<metadata>` are empty.
fn settled(domain: &mut DomainXml) -> String {
    for name in ["memoryBacking", "metadata"] {
        if let Some(node) = domain.find(&[name])
            && domain.is_empty(node)
        {
            domain.remove(node).expect("removed");
        }
    }
    let parents = [domain.find(&["memoryBacking"]), Some(domain.domain())];
    for parent in parents.into_iter().flatten() {
        let mut children = domain.elements(parent);
        children.sort_by_key(|child| domain.show(*child));
        for child in children {
            domain.append(parent, child).expect("moved");
        }
    }
    canonical(&text_of(domain))
}

fn each_kind() -> Vec<Vec<Edit>> {
    vec![
        vec![],
        vec![Rename("another & name".into())],
        vec![Title("t".into()), Memory(4096)],
        vec![AddDisk('q'), RemoveFirstDisk],
        vec![RemoveFirstDisk, RemoveFirstDisk],
        vec![AddDeviceWithComment("why".into())],
        vec![AddMetadata(1, "x".into()), MetadataToTheEnd],
        vec![RemoveOtherMetadata, AddMetadata(2, "y".into())],
        vec![AddBacking("<nosharepages/>")],
        vec![PrivateAccess],
        vec![RemoveBacking],
        vec![RemoveBacking, AttachAgain(30), AddBacking("<discard/>")],
        vec![AttachAgain(20), AttachAgain(50)],
        vec![TouchOurDisk, AttachAgain(70)],
        vec![RemoveOurDisk],
        vec![RemoveOurDisk, AddDisk('r'), AttachAgain(10)],
    ]
}

#[test]
fn each_edit_of_each_golden_domain_stays() {
    for name in DOMAINS {
        let before = golden(&format!("{name}.xml"));
        for edits in each_kind() {
            demand_edits_alone_stay(&before, &edits);
        }
    }
}

/// The settings are gone by hand: detach takes the disk, and leaves what it cannot know was ours.
#[test]
fn without_its_settings_only_the_disk_goes() {
    let before = golden("virt-install.xml");
    let mut domain = parse(&before);
    attach(&mut domain, 50);
    let settings = outram_libvirt::metadata::find_element(&domain).expect("settings");
    domain.remove(settings).expect("removed");
    attachment::detach(&mut domain, Path::new(RUN)).expect("detached");
    let mut expected = parse(&before);
    AddBacking("<source type='memfd'/>").make(&mut expected);
    AddBacking("<access mode='shared'/>").make(&mut expected);
    assert_eq!(canonical(&text_of(&domain)), canonical(&text_of(&expected)));
    assert!(
        attachment::detach(&mut domain, Path::new(RUN)).is_err(),
        "nothing is left to detach"
    );
}

/// A random domain as a user may have written it.
fn domains() -> impl Strategy<Value = String> {
    let words = "[ a-zA-Z0-9'\"&<>%äß日-]{1,12}";
    let backing = proptest::option::of(vec(
        prop_oneof![
            Just("<nosharepages/>"),
            Just("<source type='memfd'/>"),
            Just("<access mode='shared'/>"),
            Just("<discard/>"),
            Just("<!-- mine -->"),
        ],
        0..4,
    ));
    let metadata = proptest::option::of(vec((0u8..4, words), 0..3));
    let disks = vec(proptest::char::range('a', 'z'), 0..5);
    (words, backing, metadata, disks, any::<bool>()).prop_map(
        |(name, backing, metadata, mut disks, emulator)| {
            disks.sort_unstable();
            disks.dedup();
            let wrap = |name: &str, inner: Option<String>| {
                inner.map_or(String::new(), |inner| format!("<{name}>{inner}</{name}>"))
            };
            let backing = backing.map(|mut parts| {
                parts.sort_unstable();
                parts.dedup();
                parts.concat()
            });
            let metadata = metadata.map(|parts| {
                let part = |(number, text): &(u8, String)| {
                    format!("<m xmlns='urn:m{number}'>{}</m>", escaped(text))
                };
                parts.iter().map(part).collect::<String>()
            });
            let disks: String = disks
                .iter()
                .map(|letter| format!("<disk type='file'><target dev='vd{letter}'/></disk>"))
                .collect();
            format!(
                "<domain type='kvm'><name>{}</name>\
                 <uuid>9a4a7f0e-2f5b-4d55-8a53-0a4e1c7e1234</uuid>{}<memory>1048576</memory>{}\
                 <devices>{}{disks}<memballoon model='virtio'/></devices></domain>",
                escaped(&name),
                wrap("metadata", metadata),
                wrap("memoryBacking", backing),
                if emulator {
                    "<emulator>/q</emulator>"
                } else {
                    ""
                },
            )
        },
    )
}

fn edits() -> impl Strategy<Value = Edit> {
    let words = "[ a-zA-Z0-9'\"&<>%äß日-]{1,12}";
    prop_oneof![
        words.prop_map(Rename),
        words.prop_map(Title),
        (1u32..65536).prop_map(Memory),
        proptest::char::range('a', 'z').prop_map(AddDisk),
        Just(RemoveFirstDisk),
        "[a-z ]{0,8}".prop_map(AddDeviceWithComment),
        (0u8..4, words).prop_map(|(number, text)| AddMetadata(number, text)),
        Just(RemoveOtherMetadata),
        Just(AddBacking("<nosharepages/>")),
        Just(AddBacking("<allocation mode='ondemand'/>")),
        Just(PrivateAccess),
        Just(RemoveBacking),
        (1u32..100).prop_map(AttachAgain),
        Just(TouchOurDisk),
        Just(RemoveOurDisk),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_edits_of_random_domains_stay(before in domains(), edits in vec(edits(), 0..8)) {
        demand_edits_alone_stay(&before, &edits);
    }

    #[test]
    fn attaching_twice_changes_nothing(before in domains(), percent in 1u32..100) {
        let mut domain = parse(&before);
        attach(&mut domain, percent);
        let once = text_of(&domain);
        let changes = attachment::attach(&mut domain, Path::new(RUN), &request(percent))
            .expect("attached");
        prop_assert_eq!(changes, vec![]);
        prop_assert_eq!(text_of(&domain), once);
    }
}
