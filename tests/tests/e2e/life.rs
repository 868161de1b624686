//! Point 4: reboot, reset, suspend, shutdown, and memory that the guest gives back.

use std::time::Duration;

use anyhow::{Result, ensure};
use outram_tests::hermetic::guest::{BOOT_LIMIT, Spec, greet};
use outram_tests::hermetic::host::virsh_ok;

use crate::Test;
use crate::fixture::{LONG, Lab, RAM_MIB, SHARE, SHORT, check, demand_no_mismatch, power_off};

pub(crate) const TESTS: &[Test] = &[
    ("reboot_reset_suspend_shutdown", reboot_and_reset),
    ("balloon_frees_remote_memory", balloon),
    ("free_page_reporting_frees_remote_memory", reporting),
];

const HALF: [&str; 2] = ["--local-ratio", "0.5"];

fn reboot_and_reset(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(Spec::new("life", RAM_MIB), &HALF, &server.address)?;
    let mut console = guest.boot()?;
    check(&mut console, SHARE, 1)?;
    let backend = guest.status()?.backend_pid;

    console.send("reboot")?;
    console.expect(&["READY"], BOOT_LIMIT)?;
    greet(&mut console)?;
    check(&mut console, SHARE, 1)?;

    virsh_ok(&["reset", guest.name()])?;
    console.expect(&["READY"], BOOT_LIMIT)?;
    greet(&mut console)?;
    check(&mut console, SHARE, 1)?;
    ensure!(
        guest.status()?.backend_pid == backend,
        "a reboot keeps its backend"
    );

    console.ask("alloc 60", "ALLOCATED", LONG)?;
    virsh_ok(&["suspend", guest.name()])?;
    guest.wait_state("paused", SHORT)?;
    lab.tune(&guest, &["--local-ratio", "0.2"])?;
    std::thread::sleep(Duration::from_secs(2));
    virsh_ok(&["resume", guest.name()])?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    power_off(&guest, &mut console, &server)
}

/// Fills memory so that much of it is remote, then empties it again. Returns remote bytes before.
fn fill_and_free(
    guest: &outram_tests::hermetic::guest::Guest,
    console: &mut outram_tests::hermetic::console::Console,
) -> Result<u64> {
    console.ask(&format!("alloc {SHARE}"), "ALLOCATED", LONG)?;
    let full = guest.wait_status("pages to be stored", LONG, |status| {
        status.stored_bytes > (RAM_MIB << 20) / 4
    })?;
    console.ask("free", "FREED", LONG)?;
    Ok(full.stored_bytes)
}

fn balloon(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(Spec::new("balloon", RAM_MIB), &HALF, &server.address)?;
    let mut console = guest.boot()?;
    let stored = fill_and_free(&guest, &mut console)?;
    // A quarter: then the balloon must take remote pages too, whichever it takes first.
    let small = format!("{}", (RAM_MIB / 4) << 10);
    virsh_ok(&["setmem", guest.name(), &small, "--live"])?;
    guest.wait_status("the balloon to free remote memory", LONG, |status| {
        status.counters.removed_pages > 10_000 && status.stored_bytes < stored / 2
    })?;
    let whole = format!("{}", RAM_MIB << 10);
    virsh_ok(&["setmem", guest.name(), &whole, "--live"])?;
    // The guest's kernel takes its pages back in the background.
    outram_tests::hermetic::command::wait_for("the balloon to deflate", LONG, || {
        let memory = console.ask("meminfo", "MEMINFO", SHORT)?;
        Ok((memory.get("free_kib")? > (RAM_MIB << 10) * 3 / 4).then_some(()))
    })?;
    check(&mut console, SHARE, 2)?;
    power_off(&guest, &mut console, &server)
}

fn reporting(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let mut spec = Spec::new("reporting", RAM_MIB);
    spec.free_page_reporting = true;
    let guest = lab.attach(spec, &HALF, &server.address)?;
    let mut console = guest.boot()?;
    let stored = fill_and_free(&guest, &mut console)?;
    guest.wait_status("reported pages to be freed", LONG, |status| {
        status.stored_bytes < stored / 2
    })?;
    check(&mut console, SHARE, 2)?;
    power_off(&guest, &mut console, &server)
}
