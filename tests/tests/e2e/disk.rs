//! Point 5 in a real guest: the device reads and writes guest memory that has been evicted.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::guest::Spec;
use outram_tests::hermetic::host::virsh_ok;

use crate::Test;
use crate::backend_dies::parent;
use crate::fixture::{
    HALF, LONG, Lab, RAM_MIB, SHORT, demand_no_mismatch, kernel_cost, power_off, wait_under_limit,
};

pub(crate) const TESTS: &[Test] = &[
    ("disk_reads_into_evicted_pages", reads),
    ("a_disk_plugged_in_with_o_direct_holds_eviction_up", direct),
];

fn reads(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let mut spec = Spec::new("disk", RAM_MIB);
    // QEMU tells the disk of this memory too, which is no RAM of the guest's.
    spec.extra_devices =
        "<shmem name='shared'><model type='ivshmem-plain'/><size unit='M'>4</size></shmem>"
            .to_owned();
    let guest = lab.attach(spec, &["--local-ratio", "0.1"], &server.address)?;
    let mut console = guest.boot()?;
    let id = console.ask("disk-id", "DISK", SHORT)?;
    let expected = format!("id=outram-{}", &guest.uuid[..8]);
    ensure!(
        id.line.contains(&expected),
        "the disk's serial: expected {expected}, found {}",
        id.line
    );
    console.ask("alloc 70", "ALLOCATED", LONG)?;
    let report = console.ask("disk-read 400", "DISK", LONG)?;
    ensure!(
        report.get("errors")? == 0 && report.get("mismatches")? == 0,
        "{}",
        report.line
    );
    ensure!(report.get("bytes")? == 1 << 20, "{}", report.line);
    let refused = console.ask("disk-write", "DISK", SHORT)?;
    ensure!(
        refused.line.contains("outcome=refused") && refused.get("ro")? == 1,
        "the default disk is read-only: {}",
        refused.line
    );
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    let status = guest.status()?;
    ensure!(
        status.counters.stray_device_accesses == 0,
        "the device touched pages that were not pinned"
    );
    power_off(&guest, &mut console, &server)
}

/// libvirt asks nobody when a disk is plugged in, and what such a one writes to a page on its way out is lost: it
/// is noticed, told, and nothing leaves until it is gone.
fn direct(lab: &Lab) -> Result<()> {
    const IMAGE: &str = "/var/lib/libvirt/images/direct.raw";
    let server = lab.server("1GiB")?;
    let mut spec = Spec::new("direct", RAM_MIB);
    // More than there are devices: one is free for another disk.
    let ports = (1..9)
        .map(|index| format!("<controller type='pci' index='{index}' model='pcie-root-port'/>"));
    spec.extra_devices = format!(
        "<controller type='pci' index='0' model='pcie-root'/>{}",
        ports.collect::<String>()
    );
    let guest = lab.attach(spec, &HALF, &server.address)?;
    let mut console = guest.boot()?;
    console.ask("alloc 40", "ALLOCATED", LONG)?;
    fs::write(IMAGE, vec![0; 16 << 20])?;
    let plug = [
        "attach-disk",
        guest.name(),
        IMAGE,
        "vdb",
        "--live",
        "--cache",
        "none",
    ];
    virsh_ok(&[&plug[..], &["--subdriver", "raw"]].concat())?;
    let is_told = |detail: &Option<String>| {
        let detail = detail.as_deref().unwrap_or_default();
        detail.contains("nothing is evicted") && detail.contains(IMAGE)
    };
    guest.wait_status("the disk to be told of", SHORT, |status| {
        is_told(&status.detail)
    })?;
    lab.host
        .outram_ok(&["tune", guest.name(), "--local-ratio", "0.2"])?;
    // What was on its way out when the disk was seen still leaves.
    let evicted = || Ok::<_, anyhow::Error>(guest.status()?.counters.evicted_pages);
    let mut before = evicted()?;
    wait_for("eviction to stand still", SHORT, || {
        sleep(Duration::from_secs(1));
        let now = evicted()?;
        Ok((std::mem::replace(&mut before, now) == now).then_some(()))
    })?;
    sleep(Duration::from_secs(3));
    let status = guest.status()?;
    ensure!(
        status.counters.evicted_pages == before,
        "{before} pages had left: {status:?}"
    );
    ensure!(
        kernel_cost(&status) > status.limit_bytes + status.headroom_bytes,
        "all that had to leave has left: {status:?}"
    );
    // Its servers are there, whether or not it waits for room by now.
    let told = lab.host.outram_ok(&["status", guest.name()])?;
    ensure!(
        told.contains(IMAGE) && !told.contains("out of reach"),
        "{told}"
    );

    // Where nobody looks any more, and where another begins to.
    kill(Pid::from_raw(parent(status.backend_pid)?), Signal::SIGKILL)?;
    sleep(Duration::from_secs(2));
    let alone = guest.status()?;
    ensure!(is_told(&alone.detail), "{alone:?}");
    ensure!(alone.counters.evicted_pages == before, "{alone:?}");
    lab.host.outram_ok(&["restart", guest.name()])?;
    // The guest may wait for room meanwhile.
    let successor = guest.wait_status("the successor to tell of it", SHORT, |status| {
        status.backend_pid != alone.backend_pid && is_told(&status.detail)
    })?;

    // To let go of it the guest may need room.
    lab.host
        .outram_ok(&["tune", guest.name(), "--local-ratio", "1"])?;
    virsh_ok(&["detach-disk", guest.name(), "vdb", "--live"])?;
    guest.wait_status("the word to be taken back", SHORT, |status| {
        !is_told(&status.detail)
    })?;
    fs::remove_file(IMAGE)?;
    lab.host
        .outram_ok(&["tune", guest.name(), "--local-ratio", "0.2"])?;
    let status = wait_under_limit(&guest)?;
    let held = successor.counters.evicted_pages;
    ensure!(status.counters.evicted_pages > held, "{status:?}");
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    power_off(&guest, &mut console, &server)
}
