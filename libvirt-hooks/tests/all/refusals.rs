//! Each thing that keeps a domain from being paged, with its message.

use std::path::Path;

use outram_libvirt::domain_xml::DomainXml;
use outram_libvirt::refusal::{Refusal, check};

use crate::support::{self, RUN};

/// A domain that is paged, as text.
fn attached() -> String {
    support::attached("virt-install.xml")
}

fn refusals(text: &str) -> Vec<Refusal> {
    let domain = DomainXml::parse(text).expect("well-formed");
    check(&domain, Path::new(RUN)).expect("checked")
}

/// The one refusal of a domain in which `from` is replaced.
fn refusal_with(from: &str, to: &str) -> Refusal {
    let before = attached();
    let after = before.replacen(from, to, 1);
    assert_ne!(before, after, "'{from}' must be in the domain");
    let mut found = refusals(&after);
    assert_eq!(found.len(), 1, "{to}: {found:?}");
    found.remove(0)
}

fn assert_refused(from: &str, to: &str, words: &[&str]) {
    let text = refusal_with(from, to).to_string();
    for word in words {
        assert!(text.contains(word), "'{text}' must name '{word}'");
    }
}

#[test]
fn memory_errors_are_for_guests_of_kvm() {
    let attached = attached().replacen("<outram:memory ", "<outram:memory lost-pages='poison' ", 1);
    assert!(attached.contains("type=\"kvm\"") && attached.contains("poison"));
    assert_eq!(refusals(&attached), []);
    let emulated = attached.replacen("type=\"kvm\"", "type=\"qemu\"", 1);
    let found = refusals(&emulated);
    assert_eq!(found, [Refusal::NobodyToPoison("qemu".into())]);
}

#[test]
fn huge_pages_are_moved_one_by_one_and_not_compressed() {
    let shared = "<access mode=\"shared\"/>";
    let huge = format!("{shared}<hugepages><page size='2' unit='M'/></hugepages>");
    let in_blocks = "<outram:memory granularity='64KiB' compressed-share='0.2' ";
    let attached = attached().replacen("<outram:memory ", in_blocks, 1);
    assert_eq!(refusals(&attached), []);
    let found = refusals(&attached.replacen(shared, &huge, 1));
    assert!(
        matches!(
            &found[..],
            [Refusal::Granularity(_), Refusal::Compressed(_)]
        ),
        "{found:?}"
    );
}

#[test]
fn memory_that_cannot_be_moved_is_refused() {
    let shared = "<access mode=\"shared\"/>";
    let memfd = "<source type=\"memfd\"/>";
    let with = |element: &str| format!("{shared}{element}");
    for (from, to, words) in [
        (shared, String::new(), &["private", "mode='shared'"][..]),
        (
            shared,
            "<access mode='private'/>".into(),
            &["mode='private'", "mode='shared'"],
        ),
        (memfd, String::new(), &["memfd", "type='memfd'"]),
        (
            memfd,
            "<source type='file'/>".into(),
            &["type='file'", "type='memfd'"],
        ),
        (
            memfd,
            "<source type='anonymous'/>".into(),
            &["type='anonymous'"],
        ),
        (
            shared,
            with("<allocation mode='immediate'/>"),
            &["immediate", "ondemand"],
        ),
        (shared, with("<locked/>"), &["<locked/>", "remove"]),
        (
            shared,
            with("<hugepages><page size='1' unit='G'/></hugepages>"),
            &["1 GiB", "size='2048'", "remove"],
        ),
        (
            "<cpu ",
            "<cpu><numa><cell id='3' memAccess='private'/></numa></cpu><cpu ".into(),
            &["cell 3", "memAccess='shared'"],
        ),
        (
            "<memballoon",
            "<memory model='dimm' access='private'/><memballoon".into(),
            &["dimm", "access='shared'"],
        ),
        (
            "<memballoon",
            "<memory model='dimm'><source><pagesize>2048</pagesize></source></memory><memballoon"
                .into(),
            &["huge pages", "memory device", "remove"],
        ),
        (
            "<devices>",
            "<launchSecurity type='sev'/><devices>".into(),
            &["launchSecurity", "sev"],
        ),
    ] {
        assert_refused(from, &to, words);
    }
}

#[test]
fn machines_that_are_not_supported_are_refused() {
    assert_refused("type=\"kvm\"", "type='xen'", &["'xen'", "kvm"]);
    assert_refused("arch=\"x86_64\"", "arch='aarch64'", &["aarch64", "x86_64"]);
}

#[test]
fn devices_that_pass_the_pager_by_are_refused() {
    let pci = "<hostdev mode='subsystem' type='pci'><source/></hostdev>";
    let vhost_scsi =
        "<hostdev mode='subsystem' type='scsi_host'><source protocol='vhost'/></hostdev>";
    let virtiofs = "<filesystem type='mount'><driver type='virtiofs'/><source dir='/srv'/>\
                    <target dir='share'/></filesystem>";
    let cases: &[(&str, &[&str])] = &[
        (pci, &["hostdev", "'pci'"]),
        (vhost_scsi, &["vhost-scsi", "virtio-scsi"]),
        (
            "<interface type='hostdev'><mac address='52:54:00:00:00:01'/></interface>",
            &["52:54:00:00:00:01", "hostdev", "bridge"],
        ),
        ("<interface type='vdpa'/>", &["vdpa"]),
        ("<interface type='vhostuser'/>", &["vhostuser"]),
        (virtiofs, &["share", "virtiofs", "9p"]),
        (
            "<video><model type='virtio' blob='on'/></video>",
            &["blob='on'"],
        ),
        ("<video><driver name='vhostuser'/></video>", &["vhostuser"]),
        (
            "<disk type='block' device='lun'><target dev='sdb'/></disk>",
            &["sdb", "device='lun'", "device='disk'"],
        ),
        (
            "<disk type='file'><driver cache='none'/><target dev='vdb'/></disk>",
            &["vdb", "cache='none'", "writeback"],
        ),
        (
            "<disk type='file'><driver cache='directsync'/><target dev='vdb'/></disk>",
            &["cache='directsync'", "writethrough"],
        ),
        (
            "<disk type='file'><driver cache='writeback' io='native'/><target dev='vdb'/></disk>",
            &["io='native'", "io='threads'"],
        ),
        (
            "<disk type='vhostuser'><source type='unix' path='/run/spdk'/><target dev='vdb'/></disk>",
            &["vdb", "vhostuser"],
        ),
        (
            "<disk type='vhostvdpa'><target dev='vdb'/></disk>",
            &["vhostvdpa"],
        ),
        (
            "<disk type='nvme'><target dev='vdb'/></disk>",
            &["nvme", "VFIO"],
        ),
    ];
    for (device, words) in cases {
        assert_refused("<memballoon", &format!("{device}<memballoon"), words);
    }
}

#[test]
fn settings_without_their_disk_are_refused() {
    let text = refusal_with("/vhost.sock", "/other").to_string();
    assert!(text.contains("vhost.sock"), "{text}");
    let mut domain = DomainXml::parse(&attached()).expect("a domain");
    let disk = outram_libvirt::refusal::our_disks(&domain, Path::new(RUN))[0];
    domain.remove(disk).expect("removed");
    let found = refusals(&domain.to_text().expect("text"));
    assert!(
        matches!(found.as_slice(), [Refusal::NoDisk(_)]),
        "{found:?}"
    );
}

#[test]
fn a_queue_that_requests_do_not_fit_into_is_refused() {
    let ours = "<disk type=\"vhostuser\" device=\"disk\"><driver ";
    let sized = |size: &str| format!("{ours}queue_size='{size}' ");
    assert_refused(
        ours,
        &sized("64"),
        &["vdz", "queue_size='64'", "128 or more"],
    );
    for fits in ["128", "1024"] {
        let after = attached().replacen(ours, &sized(fits), 1);
        assert!(after.contains("queue_size"));
        assert_eq!(refusals(&after), []);
    }
}

#[test]
fn all_reasons_are_given_at_once() {
    let text = attached()
        .replace(
            "<access mode=\"shared\"/>",
            "<access mode='private'/><locked/>",
        )
        .replace("type=\"kvm\"", "type='lxc'");
    assert_eq!(refusals(&text).len(), 3);
}

#[test]
fn ordinary_devices_are_not_refused() {
    let fine = "<disk type='file'><driver cache='writeback' io='io_uring'/><target dev='vdb'/></disk>\
        <filesystem type='mount'><driver type='path'/><target dir='d'/></filesystem>\
        <memory model='nvdimm' access='private'/><shmem name='s'/><vsock model='virtio'/>\
        <interface type='bridge'/><video><model type='virtio'/></video>";
    let text = attached().replacen("<memballoon", &format!("{fine}<memballoon"), 1);
    assert_eq!(refusals(&text), []);
}

#[test]
fn a_limit_below_what_a_guest_can_do_with_is_refused() {
    let with = |limit: &str| attached().replacen("local=\"1GiB\"", limit, 1);
    assert!(with("").ne(&attached()), "the limit must be in the domain");
    assert_eq!(refusals(&with("local=\"16MiB\"")), []);
    for limit in ["local=\"15MiB\"", "local-ratio=\"0.001\""] {
        let found = refusals(&with(limit));
        let [refusal @ Refusal::Limit(_)] = &found[..] else {
            panic!("{limit}: {found:?}");
        };
        let text = refusal.to_string();
        assert!(text.contains("at least 16 MiB"), "{text}");
    }
}
