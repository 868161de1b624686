//! Everyday life of a definition: edits with libvirt's own tools, new names, the end of it. And that
//! what libvirt stores of an attached domain is, once detached, what it had stored before.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::command::{run, wait_for};
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::host::{RUN, virsh, virsh_ok};
use outram_tests::hermetic::suite::need;

use crate::Test;
use crate::fixture::{LONG, Lab, SHORT, check, power_off, wait_slabs};

pub(crate) const TESTS: &[Test] = &[
    ("libvirt_stores_after_detach_what_it_stored_before", stored),
    ("virsh_edit_and_virt_xml_round_trip", edited),
    ("odd_names_are_names_like_others", odd_names),
    ("rename_and_undefine", renamed),
];

const HALF: [&str; 2] = ["--local-ratio", "0.5"];

/// RAM that these guests' little work needs.
const RAM_MIB: u64 = 256;

/// Share of it that the checker goes through.
const SHARE: u64 = 50;

/// The definition with everything in it.
fn definition(domain: &str) -> Result<String> {
    virsh_ok(&["dumpxml", "--inactive", "--security-info", domain])
}

/// The folder of recorded domains: as virt-install, virt-manager and Nova write them, and by hand.
fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../libvirt-hooks/tests/golden")
}

fn stored(lab: &Lab) -> Result<()> {
    let mut seen = 0;
    for entry in fs::read_dir(golden())? {
        let path = entry?.path();
        let is_xml = path.extension().is_some_and(|extension| extension == "xml");
        // Those of oVirt and KubeVirt are never stored: they are started as they are, with machine
        // types of their own, and keep less strictly to libvirt's schema than a definition must.
        let is_started_only = ["ovirt.xml", "kubevirt.xml"]
            .iter()
            .any(|name| path.ends_with(name));
        if !is_xml || is_started_only {
            continue;
        }
        seen += 1;
        comes_back(lab, &path).with_context(|| path.display().to_string())?;
    }
    ensure!(seen >= 8, "only {seen} recorded domains were found");
    Ok(())
}

fn comes_back(lab: &Lab, path: &Path) -> Result<()> {
    // There is no KVM here, nor does it matter: nothing is started.
    let text = fs::read_to_string(path)?.replacen("kvm", "qemu", 1);
    let file = "/run/stored.xml";
    fs::write(file, &text)?;
    virsh_ok(&["define", "--validate", file])?;
    let uuid = text
        .split_once("<uuid>")
        .and_then(|(_, rest)| rest.split_once("</uuid>"))
        .context("it has a UUID")?
        .0;
    // Any second definition moves controllers that libvirt added at the first to their like.
    fs::write(file, definition(uuid)?)?;
    virsh_ok(&["define", file])?;
    let before = definition(uuid)?;
    lab.host
        .outram_ok(&["attach", uuid, "--local=256MiB", "--server=10.0.0.2:7741"])?;
    let attached = definition(uuid)?;
    ensure!(
        attached.contains("vhost.sock") && attached.contains("<access mode='shared'/>"),
        "attach must reach libvirt: {attached}"
    );
    lab.host
        .outram_ok(&["attach", uuid, "--local-ratio=0.25"])?;
    lab.host.outram_ok(&["detach", uuid])?;
    let after = definition(uuid)?;
    virsh_ok(&["undefine", uuid])?;
    demand_same(&before, &after)
}

/// Compares two definitions line by line.
fn demand_same(expected: &str, found: &str) -> Result<()> {
    let lacks = |one: &str, other: &str| -> Vec<String> {
        let other: Vec<&str> = other.lines().collect();
        let missing = one.lines().filter(|line| !other.contains(line));
        missing.map(str::to_owned).collect()
    };
    ensure!(
        expected == found,
        "lacking:\n{:#?}\ntoo much:\n{:#?}\nin:\n{found}",
        lacks(expected, found),
        lacks(found, expected)
    );
    Ok(())
}

/// Edits a domain with `virsh edit` and `virt-xml`, as a user and as a program would.
fn edit(uuid: &str) -> Result<()> {
    let editor = "EDITOR=sed -i \
        -e 's,<vcpu.*</vcpu>,<vcpu>1</vcpu>,' \
        -e 's,<on_crash>destroy,<on_crash>restart,' \
        -e 's,</devices>,<watchdog model=\"ib700\" action=\"reset\"/></devices>,'";
    run("env", &[editor, "virsh", "edit", uuid])?;
    for arguments in [
        &["--edit", "--metadata", "title=edited & more"][..],
        &["--edit", "--memory", "224,maxmemory=256"],
        &["--add-device", "--disk", "device=cdrom,bus=sata"],
        &["--edit", "--xml", "./memoryBacking/nosharepages="],
    ] {
        run("virt-xml", &[&[uuid][..], arguments].concat())?;
    }
    Ok(())
}

fn edited(lab: &Lab) -> Result<()> {
    need("virt-xml", "virtinst")?;
    let server = lab.server("1GiB")?;
    let guest = Guest::define(Spec::new("edited", RAM_MIB))?;
    let (uuid, before) = (&guest.uuid, definition(&guest.uuid)?);
    edit(uuid)?;
    let expected = definition(uuid)?;
    ensure!(
        expected.contains("edited &amp; more") && expected.contains("ib700"),
        "the edits must be made: {expected}"
    );
    fs::write("/run/before.xml", before)?;
    virsh_ok(&["define", "/run/before.xml"])?;

    let attach = [&["attach", uuid], &HALF[..], &["--server", &server.address]].concat();
    lab.host.outram_ok(&attach)?;
    edit(uuid)?;
    let mut console = guest.boot()?;
    check(&mut console, SHARE, 1)?;
    let status = guest.status()?;
    ensure!(
        status.ram_bytes == RAM_MIB << 20,
        "an edited domain is paged as before: {status:?}"
    );
    power_off(&guest, &mut console, &server)?;
    lab.host.outram_ok(&["detach", uuid])?;
    let after = definition(uuid)?;
    demand_same(&expected, &after)
}

/// Names that libvirt takes, and that programs stumble over.
fn names() -> Vec<String> {
    vec![
        "-starts-with-a-dash".to_owned(),
        "with spaces, \"quotes\" & 'more' <of> \\ it".to_owned(),
        "100%s $HOME `id` $(id) ; #; {}=:@,".to_owned(),
        "größer 日本 🦀".to_owned(),
        "long".repeat(50),
    ]
}

fn odd_names(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    for name in names() {
        try_name(lab, &name, &server.address).with_context(|| format!("named '{name}'"))?;
        wait_slabs(&server, |slabs| slabs == 0)?;
    }
    let slash = virsh(&["define", &with_name("a/b")?])?;
    ensure!(!slash.success(), "libvirt itself takes no slashes");
    Ok(())
}

/// A file with a domain of that name.
fn with_name(name: &str) -> Result<String> {
    let file = "/run/named.xml".to_owned();
    fs::write(&file, Spec::new(name, RAM_MIB).xml())?;
    Ok(file)
}

/// Attach, start, look, tune and detach a domain, each by its name.
fn try_name(lab: &Lab, name: &str, server: &str) -> Result<()> {
    let guest = Guest::define(Spec::new(name, RAM_MIB))?;
    let outram = |command: &str, arguments: &[&str]| {
        lab.host
            .outram_ok(&[&[command][..], arguments, &["--", name]].concat())
    };
    outram("attach", &["--local-ratio=0.5", "--server", server])?;
    // Its memory is handed over before its first instruction.
    virsh_ok(&["start", "--paused", &guest.uuid])?;
    guest.wait_status("QEMU to be there", SHORT, |status| {
        status.qemu_pid.is_some()
    })?;
    outram("tune", &["--local-ratio=0.25", "--persist"])?;
    let told = outram("status", &[])?;
    ensure!(told.contains(name), "status of one: {told}");
    let table = lab.host.outram_ok(&["status"])?;
    ensure!(table.contains("serving"), "the table says: {table}");
    let report: serde_json::Value = serde_json::from_str(&outram("status", &["--json"])?)?;
    ensure!(report["name"] == name, "as JSON: {report}");
    let metrics = outram("metrics", &[])?;
    let label = name.replace('\\', "\\\\").replace('"', "\\\"");
    ensure!(
        metrics.contains(&format!("\"{label}\"")),
        "metrics: {metrics}"
    );
    guest.destroy()?;
    guest.wait_backend_gone(SHORT)?;
    outram("detach", &[])?;
    wait_nothing_left(&guest)
}

/// Waits until a guest has no file in the directory of run directories.
fn wait_nothing_left(guest: &Guest) -> Result<()> {
    let mut left = Vec::new();
    wait_for("what the guest left to go", SHORT, || {
        left = fs::read_dir(RUN)?
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.display().to_string().contains(&guest.uuid))
            .collect();
        Ok(left.is_empty().then_some(()))
    })
    .with_context(|| format!("left: {left:?}"))
}

fn renamed(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(Spec::new("first-name", RAM_MIB), &HALF, &server.address)?;
    let name = "second 'name' & 50%";
    virsh_ok(&["domrename", &guest.uuid, name])?;
    let mut console = guest.boot()?;
    let told = lab.host.outram_ok(&["status", name])?;
    ensure!(told.contains(name), "status by the new name: {told}");
    let old = lab.host.outram(&["status", "first-name"])?;
    ensure!(!old.success(), "the old name is gone: {}", old.said());
    check(&mut console, SHARE, 1)?;

    // From here on it is transient.
    virsh_ok(&["undefine", &guest.uuid])?;
    lab.host
        .outram_ok(&["tune", name, "--local-ratio", "0.3"])?;
    let detached = lab.host.outram(&["detach", name, "--config"])?;
    ensure!(
        !detached.success() && detached.said().contains("transient"),
        "it has no definition: {}",
        detached.said()
    );
    check(&mut console, SHARE, 1)?;
    console.send("poweroff")?;
    guest.wait_backend_gone(LONG)?;
    wait_slabs(&server, |slabs| slabs == 0)?;
    wait_nothing_left(&guest)?;

    let off = lab.attach(Spec::new("undefined", RAM_MIB), &HALF, &server.address)?;
    virsh_ok(&["undefine", &off.uuid])?;
    wait_nothing_left(&off)
}
