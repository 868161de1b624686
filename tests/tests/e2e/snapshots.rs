//! Snapshots, dumps and backups of a guest at work, which read all of its memory through QEMU.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::host::{virsh, virsh_ok};
use outram_tests::hermetic::sampler::{Sampler, Stated};

use crate::Test;
use crate::dump::count_pages_of_version_1;
use crate::fixture::{HALF, LONG, Lab, RAM_MIB, power_off, wait_slabs};
use crate::save::{at_work, timed, verify, verify_at_work};

pub(crate) const TESTS: &[Test] = &[
    ("external_snapshots_keep_every_page", snapshots),
    ("memory_dump_holds_every_page", dumps),
    ("documented_backup_leaves_our_disk_out", backups),
    (
        "background_snapshot_is_refused_and_the_guest_goes_on",
        background_snapshot,
    ),
];

const FOLDER: &str = "/var/lib/libvirt/images";

/// A guest with a disk of its own beside ours, as snapshots and backups need one.
fn with_disk(name: &str) -> Result<Spec> {
    let disk = format!("{FOLDER}/{name}.raw");
    fs::File::create(&disk)?.set_len(64 << 20)?;
    let mut spec = Spec::new(name, RAM_MIB);
    spec.extra_devices = format!(
        "<disk type='file' device='disk'><driver name='qemu' type='raw'/>\
         <source file='{disk}'/><target dev='vda' bus='virtio'/></disk>"
    );
    Ok(spec)
}

fn snapshots(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(with_disk("snapped")?, &HALF, &server.address)?;
    let name = guest.name();
    let sampler = Sampler::start(&guest);
    let mut console = at_work(&guest)?;
    sampler.judge(Stated::of(&guest)?);

    virsh_ok(&["snapshot-create-as", name, "disks", "--disk-only"])?;
    let listed = virsh_ok(&["domblklist", name])?;
    ensure!(listed.contains("snapped.disks"), "an overlay: {listed}");
    ensure!(listed.contains("/vhost.sock"), "ours as it was: {listed}");
    verify_at_work(&mut console).context("after a disk snapshot")?;

    for (snapshot, more) in [("paused", &[][..]), ("live", &["--live"])] {
        let memory = format!("{FOLDER}/{snapshot}.memory");
        let memspec = format!("file={memory},snapshot=external");
        let mut words = vec!["snapshot-create-as", name, snapshot, "--memspec", &memspec];
        words.extend(more);
        guest.taken_live(&guest, || {
            timed("memory snapshot at 0.5", || virsh_ok(&words))
        })?;
        let bytes = fs::metadata(&memory)?.len();
        ensure!(bytes > RAM_MIB << 18, "it holds the memory: {bytes} bytes");
        verify_at_work(&mut console).with_context(|| format!("after '{snapshot}'"))?;
    }
    let inside = virsh(&["snapshot-create-as", name, "inside"])?;
    ensure!(!inside.success(), "internal snapshots cannot hold our disk");
    drop(console);
    guest.destroy()?;
    guest.wait_backend_gone(LONG)?;
    // What a snapshot holds is an image as that of a save.
    for snapshot in ["live", "paused"] {
        let memory = format!("{FOLDER}/{snapshot}.memory");
        virsh_ok(&["restore", &memory, "--running"])?;
        let mut console = guest.console()?;
        verify(&mut console).with_context(|| format!("restored from '{snapshot}'"))?;
        drop(console);
        guest.destroy()?;
        guest.wait_backend_gone(LONG)?;
        fs::remove_file(&memory)?;
    }
    sampler.finish()?;
    for snapshot in ["live", "paused", "disks"] {
        virsh_ok(&["snapshot-delete", name, snapshot, "--metadata"])?;
    }
    wait_slabs(&server, |slabs| slabs == 0)
}

fn dumps(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(Spec::new("dumped", RAM_MIB), &HALF, &server.address)?;
    let sampler = Sampler::start(&guest);
    let mut console = guest.boot()?;
    let pages = console.ask("alloc 60", "ALLOCATED", LONG)?.get("pages")?;
    sampler.judge(Stated::of(&guest)?);
    let remote = guest.status()?.stored_bytes;
    ensure!(remote > 0, "a part of it lies on the server");

    let core = dump(&guest, "memory dump at 0.5", &["--memory-only"])?;
    let found = count_pages_of_version_1(&core, pages)?;
    ensure!(found == pages, "{found} of the checker's {pages} pages");
    fs::remove_file(&core)?;
    console.ask("work 0", "WORKING", LONG)?;
    for more in [&["--memory-only", "--live"][..], &["--live"], &[]] {
        let core = dump(&guest, "dump at 0.5", more)?;
        let bytes = fs::metadata(&core)?.len();
        ensure!(bytes > RAM_MIB << 18, "{more:?} leaves {bytes} bytes");
        fs::remove_file(&core)?;
        ensure!(guest.state()? == "running", "after {more:?}");
        verify_at_work(&mut console).with_context(|| format!("after a dump {more:?}"))?;
    }
    verify(&mut console)?;
    sampler.finish()?;
    power_off(&guest, &mut console, &server)
}

fn dump(guest: &Guest, what: &str, more: &[&str]) -> Result<std::path::PathBuf> {
    let core = Path::new(FOLDER).join("core");
    let file = core.display().to_string();
    let words = [&["dump", guest.name(), &file], more].concat();
    timed(what, || virsh_ok(&words))?;
    Ok(core)
}

/// The XML of docs/save-and-migrate.md.
fn backups(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(with_disk("backed-up")?, &HALF, &server.address)?;
    let name = guest.name();
    let mut console = at_work(&guest)?;
    let whole = virsh(&["backup-begin", name])?;
    ensure!(!whole.success(), "without a list of disks libvirt refuses");

    let target = format!("{FOLDER}/backup.qcow2");
    let document = include_str!("../../../docs/save-and-migrate.md");
    let (_, from) = document
        .split_once("```xml\n")
        .context("the XML is documented")?;
    let (xml, _) = from.split_once("```").context("the XML ends")?;
    let xml = xml.replace("/var/backups/web1-vda.qcow2", &target);
    ensure!(xml.contains(&target), "the target is replaced: {xml}");
    fs::write("/run/backup.xml", xml)?;
    virsh_ok(&["backup-begin", name, "--backupxml", "/run/backup.xml"])?;
    wait_for("the backup to end", LONG, || {
        let done = virsh(&["domjobinfo", name, "--completed"])?;
        Ok(done.said().contains("Completed").then_some(()))
    })?;
    ensure!(fs::metadata(&target)?.len() > 0, "there is a backup");
    for refused in [
        &["domblkstat", name, "vdz"][..],
        &["domblkinfo", name, "--all"],
    ] {
        let said = virsh(refused)?;
        ensure!(!said.success(), "documented to fail: {}", said.said());
    }
    verify(&mut console)?;
    power_off(&guest, &mut console, &server)
}

/// QEMU's background snapshot protects the same memory by a userfaultfd of its own. libvirt has no
/// way to it but its monitor.
fn background_snapshot(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(Spec::new("background", RAM_MIB), &HALF, &server.address)?;
    let mut console = at_work(&guest)?;
    let command = |json: &str| -> Result<String> {
        let said = virsh(&["qemu-monitor-command", guest.name(), json])?;
        Ok(said.said())
    };
    let said = command(
        r#"{"execute":"migrate-set-capabilities","arguments":{"capabilities":
           [{"capability":"background-snapshot","state":true}]}}"#,
    )?;
    ensure!(
        said.contains("Background-snapshot is not supported"),
        "QEMU says so: {said}"
    );
    ensure!(guest.state()? == "running", "{}", guest.state()?);
    verify(&mut console)?;
    power_off(&guest, &mut console, &server)
}
