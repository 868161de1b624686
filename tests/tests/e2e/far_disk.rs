//! The far-memory disk in real guests: as swap, under a file system, and through the ends that a
//! guest can come to.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::console::{Answer, Console};
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::host::virsh_ok;
use outram_wire::control::{DiskState, DiskStatus};

use crate::Test;
use crate::fixture::{LONG, Lab, RAM_MIB, SHORT, demand_no_mismatch, wait_slabs};

pub(crate) const TESTS: &[Test] = &[
    ("far_disk_as_swap_of_a_guest_with_little_ram", swap),
    ("far_disk_under_a_file_system_at_0_3", file_system),
    ("far_disk_is_emptied_by_shutdown", emptied),
    ("far_disk_is_kept_by_managedsave", saved),
    ("far_disk_on_a_lost_server_gives_errors", lost),
    ("parked_disks_are_listed_and_dropped", listed_and_dropped),
];

/// Swapping guests are emulated, and page in what they swap out: minutes, on a loaded machine.
pub(crate) const VERY_LONG: Duration = Duration::from_secs(900);

/// A guest at 0.3 of its RAM with a disk of 1 GiB.
fn attach(lab: &Lab, spec: Spec, server: &str) -> Result<Guest> {
    let limit = ["--local-ratio", "0.3", "--disk-size", "1GiB"];
    lab.attach(spec, &limit, server)
}

fn disk_of(guest: &Guest) -> Result<DiskStatus> {
    guest.status()?.disk.context("the status shows the disk")
}

pub(crate) fn demand_same(report: &Answer) -> Result<()> {
    ensure!(report.get("mismatches")? == 0, "{}", report.line);
    Ok(())
}

pub(crate) fn demand_no_error(guest: &Guest) -> Result<DiskStatus> {
    let disk = disk_of(guest)?;
    ensure!(disk.state == DiskState::Open, "{disk:?}");
    ensure!(disk.errors == 0 && disk.integrity_failures == 0, "{disk:?}");
    Ok(disk)
}

/// The way xDM, Infiniswap and the iSER thesis work: the guest swaps to far memory by itself, and
/// its RAM is paged underneath.
fn swap(lab: &Lab) -> Result<()> {
    const RAM: u64 = 256;
    const ARENA: u64 = 288;
    let server = lab.server("3GiB")?;
    let guest = attach(lab, Spec::new("swapper", RAM), &server.address)?;
    let mut console = guest.boot()?;
    let swap = console.ask("swap-on", "SWAP", LONG)?;
    ensure!(swap.get("size_kib")? > 1_000_000, "{}", swap.line);
    console.ask(&format!("arena {ARENA}"), "ALLOCATED", VERY_LONG)?;
    console.ask("work 5", "WORKED", VERY_LONG)?;
    let report = console.ask("verify", "CHECKER", VERY_LONG)?;
    demand_no_mismatch(&console, &report)?;
    let used = console.ask("swap", "SWAP", SHORT)?.get("used_kib")?;
    ensure!(
        used > (ARENA - RAM) * 1024,
        "an arena larger than RAM must have swapped: {used} KiB"
    );
    let disk = demand_no_error(&guest)?;
    ensure!(disk.stored_bytes > 0 && disk.reads > 0, "{disk:?}");
    let status = guest.status()?;
    ensure!(
        status.counters.evicted_pages > 0 && status.counters.stray_device_accesses == 0,
        "the guest's RAM was paged as well: {status:?}"
    );
    guest.destroy()?;
    guest.wait_backend_gone(SHORT)
}

fn file_system(lab: &Lab) -> Result<()> {
    const FILES: u64 = 48;
    let server = lab.server("3GiB")?;
    let guest = attach(lab, Spec::new("filer", RAM_MIB), &server.address)?;
    let mut console = guest.boot()?;
    let id = console.ask("disk-id", "DISK", SHORT)?;
    ensure!(id.line.contains(&guest.uuid[..8]), "{}", id.line);
    // Most of RAM in use and evicted, so that the device's buffers have to be brought in.
    console.ask("alloc 60", "ALLOCATED", LONG)?;
    console.ask("fs-make", "FS", LONG)?;
    for version in [1, 2] {
        console.ask(&format!("fs-write {FILES} {version}"), "FS", VERY_LONG)?;
        let report = console.ask(&format!("fs-verify {FILES} {version}"), "FS", VERY_LONG)?;
        demand_same(&report)?;
    }
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    let full = demand_no_error(&guest)?;
    // One page in 32 of the checker's is all zeros, and not stored.
    ensure!(full.stored_bytes >= (FILES << 20) / 16 * 15, "{full:?}");
    console.ask(&format!("fs-remove {FILES}"), "FS", LONG)?;
    guest.wait_status("what is trimmed to give its room back", SHORT, |status| {
        status.disk.as_ref().is_some_and(|trimmed| {
            trimmed.discards > 0 && trimmed.stored_bytes + ((FILES - 8) << 20) < full.stored_bytes
        })
    })?;
    demand_no_error(&guest)?;
    let shown = lab.host.outram_ok(&["status", guest.name()])?;
    ensure!(shown.contains("volatile"), "{shown}");
    guest.destroy()?;
    guest.wait_backend_gone(SHORT)
}

fn emptied(lab: &Lab) -> Result<()> {
    let server = lab.server("3GiB")?;
    let guest = attach(lab, Spec::new("volatile", 256), &server.address)?;
    let mut console = guest.boot()?;
    write_and_verify(&mut console)?;
    console.ask("bare-clear discard", "BARE", LONG)?;
    demand_same(&console.ask("bare-verify 16 0", "BARE", LONG)?)?;
    guest.wait_status("the disk to give its room back", SHORT, |status| {
        status
            .disk
            .as_ref()
            .is_some_and(|disk| disk.stored_bytes == 0 && disk.leased_slabs == 0)
    })?;
    demand_no_error(&guest)?;
    write_and_verify(&mut console)?;
    console.send("poweroff")?;
    guest.wait_state("shut off", LONG)?;
    guest.wait_backend_gone(SHORT)?;
    drop(console);
    // Its end looked like that of a guest being saved: this start knows that it was not.
    let mut console = guest.boot()?;
    demand_same(&console.ask("bare-verify 16 0", "BARE", LONG)?)?;
    let disk = demand_no_error(&guest)?;
    ensure!(disk.stored_bytes == 0, "{disk:?}");
    guest.destroy()?;
    guest.wait_backend_gone(SHORT)
}

pub(crate) fn write_and_verify(console: &mut Console) -> Result<()> {
    console.ask("bare-write 16 3", "BARE", LONG)?;
    let report = console.ask("bare-verify 16 3", "BARE", LONG)?;
    ensure!(report.get("size")? == 1 << 30, "{}", report.line);
    demand_same(&report)
}

fn saved(lab: &Lab) -> Result<()> {
    let server = lab.server("3GiB")?;
    let guest = attach(lab, Spec::new("saved", 256), &server.address)?;
    let mut console = guest.boot()?;
    console.ask("alloc 40", "ALLOCATED", LONG)?;
    write_and_verify(&mut console)?;
    for round in 0..2 {
        drop(console);
        virsh_ok(&["managedsave", &guest.uuid])?;
        guest.wait_state("shut off", LONG)?;
        guest.wait_backend_gone(SHORT)?;
        ensure!(server.slabs_leased()? > 0, "the disk is parked");
        virsh_ok(&["start", &guest.uuid])?;
        console = guest.console()?;
        let report = console.ask("bare-verify 16 3", "BARE", LONG)?;
        demand_same(&report).with_context(|| format!("round {round}"))?;
    }
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    demand_no_error(&guest)?;
    // A saved state that is thrown away takes the disk with it, at the next start.
    virsh_ok(&["managedsave", &guest.uuid])?;
    guest.wait_backend_gone(SHORT)?;
    drop(console);
    virsh_ok(&["managedsave-remove", &guest.uuid])?;
    let mut console = guest.boot()?;
    demand_same(&console.ask("bare-verify 16 0", "BARE", LONG)?)?;
    guest.destroy()?;
    guest.wait_backend_gone(SHORT)
}

fn lost(lab: &Lab) -> Result<()> {
    let mut server = lab.server("3GiB")?;
    // All of its RAM may stay here: only the disk is on the server.
    let limit = ["--local-ratio", "1.0", "--disk-size", "1GiB"];
    let guest = lab.attach(Spec::new("loser", 256), &limit, &server.address)?;
    let mut console = guest.boot()?;
    write_and_verify(&mut console)?;
    server.kill()?;
    server.start_again()?;
    console.send("bare-verify 16 3")?;
    let answer = console.expect(&["BARE", "ERROR"], LONG)?;
    ensure!(
        answer.line.contains("ERROR"),
        "reads of lost blocks must fail: {}",
        answer.line
    );
    let disk = disk_of(&guest)?;
    ensure!(disk.state == DiskState::Lost && disk.errors > 0, "{disk:?}");
    guest.destroy()?;
    guest.wait_backend_gone(SHORT)
}

fn listed_and_dropped(lab: &Lab) -> Result<()> {
    let server = lab.server("3GiB")?;
    let guest = attach(lab, Spec::new("parker", 256), &server.address)?;
    let name = guest.name();
    let listed = || -> Result<Vec<serde_json::Value>> {
        let disks = lab.host.outram_ok(&["disk", "list", "--json"])?;
        Ok(serde_json::from_str(&disks)?)
    };
    ensure!(listed()?.is_empty(), "{:?}", listed()?);
    write_and_verify(&mut guest.boot()?)?;
    let [in_use] = &listed()?[..] else {
        anyhow::bail!("one disk: {:?}", listed()?);
    };
    ensure!(
        in_use["domain"] == name && in_use["parked_s"].is_null(),
        "{in_use}"
    );
    ensure!(in_use["size_bytes"] == 1u64 << 30, "{in_use}");
    ensure!(in_use["used_bytes"].as_u64() >= Some(15 << 20), "{in_use}");
    let id = in_use["disk"].as_str().context("it has a name")?;
    drop_is_refused(lab, &["disk", "drop", id], "running")?;

    // The server parks a disk once its connection has ended, which may be after the backend has.
    let wait_parked = || {
        wait_for("the disk to be parked", SHORT, || {
            let disks = listed()?;
            let is_parked = disks.iter().all(|disk| !disk["parked_s"].is_null());
            Ok(is_parked.then_some(()))
        })
    };
    virsh_ok(&["managedsave", name])?;
    guest.wait_backend_gone(SHORT)?;
    wait_parked()?;
    let shown = lab.host.outram_ok(&["disk", "list"])?;
    ensure!(
        shown.contains("parked for") && shown.contains(name),
        "{shown}"
    );
    drop_is_refused(lab, &["disk", "drop", name], "saved state")?;
    virsh_ok(&["managedsave-remove", name])?;
    lab.host.outram_ok(&["disk", "drop", name])?;
    ensure!(listed()?.is_empty(), "{:?}", listed()?);
    wait_slabs(&server, |slabs| slabs == 0)?;
    drop_is_refused(lab, &["disk", "drop", name], "no server keeps")?;

    // What a shut-off guest leaves parked goes with its settings, if asked.
    let mut console = guest.boot()?;
    write_and_verify(&mut console)?;
    console.send("poweroff")?;
    guest.wait_state("shut off", LONG)?;
    guest.wait_backend_gone(SHORT)?;
    ensure!(server.slabs_leased()? > 0, "it is parked");
    wait_parked()?;
    lab.host.outram_ok(&["detach", "--drop-disk", name])?;
    wait_slabs(&server, |slabs| slabs == 0)
}

fn drop_is_refused(lab: &Lab, words: &[&str], because: &str) -> Result<()> {
    let refused = lab.host.outram(words)?;
    ensure!(!refused.success(), "{}", refused.line);
    ensure!(refused.said().contains(because), "{}", refused.said());
    Ok(())
}
