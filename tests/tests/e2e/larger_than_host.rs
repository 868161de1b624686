//! A guest with more RAM than its host has memory: host, that is QEMU and backend in a memory cgroup
//! whose hard limit is the kernel's own.

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::hard_limit::HardLimit;
use outram_tests::hermetic::suite::Skipped;

use crate::Test;
use crate::fixture::{LONG, Lab, SHORT, demand_no_mismatch, power_off};

pub(crate) const TESTS: &[Test] = &[("a_guest_larger_than_its_host_uses_all_its_ram", larger)];

/// The guest's RAM, and the memory of its host.
const GUEST_MIB: u64 = 1024;
const HOST_BYTES: u64 = 320 << 20;

/// What the guest may have of that; the rest is for QEMU under emulation (90 MiB were seen) and for
/// what the backend needs beside the limit.
const LIMIT: [&str; 2] = ["--local", "96MiB"];

/// Of the guest's RAM, what its kernel keeps free for itself or its memory map leaves out (seen: 7).
const NEVER_TOUCHED_PERCENT: u64 = 10;

fn larger(lab: &Lab) -> Result<()> {
    without_outram(lab)?;
    let server = lab.server("2GiB")?;
    let guest = lab.attach(Spec::new("larger", GUEST_MIB), &LIMIT, &server.address)?;
    let group = host()?;
    let mut console = lab.boot_in(&group, &guest)?;
    let backend = guest.status()?.backend_pid;
    group.add(backend)?;
    let filled = console.ask("alloc all", "ALLOCATED", 4 * LONG)?;
    let bytes = filled.get("pages")? * 4096;
    ensure!(
        bytes > 2 * HOST_BYTES,
        "only {bytes} bytes were filled: no more than the host could hold"
    );
    let memory = console.ask("meminfo", "MEMINFO", SHORT)?;
    let available = memory.get("available_kib")? << 10;
    ensure!(
        available < (GUEST_MIB << 20) / 20,
        "the guest has {available} bytes left"
    );
    all_is_somewhere(&guest)?;
    // Not in the order in which it was filled, with stores; then each page once more.
    console.ask("work 8", "WORKED", 4 * LONG)?;
    let report = console.ask("verify", "CHECKER", 4 * LONG)?;
    demand_no_mismatch(&console, &report)?;
    for pid in [guest.qemu_pid()?, backend] {
        ensure!(group.holds(pid)?, "process {pid} has left the cgroup");
    }
    let (limit, peak) = (group.limit_bytes()?, group.peak_bytes());
    ensure!(limit == HOST_BYTES, "its limit is {limit} bytes");
    ensure!(
        peak.is_none_or(|peak| peak <= HOST_BYTES),
        "it has held {peak:?} bytes"
    );
    let kills = group.kills()?;
    ensure!(kills == 0, "the kernel killed {kills} processes: {peak:?}");
    power_off(&guest, &mut console, &server)
}

/// The same guest, without Outram: the host's kernel kills it before all of its RAM is filled.
fn without_outram(lab: &Lab) -> Result<()> {
    let guest = Guest::define(Spec::new("toolarge", GUEST_MIB))?;
    let group = host()?;
    let before = group.kills()?;
    let mut console = lab.boot_in(&group, &guest)?;
    console.send("alloc all")?;
    wait_for("the kernel to kill it", 4 * LONG, || {
        Ok((group.kills()? > before).then_some(()))
    })
    .context("the host's memory is enough for it")?;
    guest.wait_state("shut off", LONG)
}

fn host() -> Result<HardLimit> {
    Ok(HardLimit::new(HOST_BYTES).map_err(|reason| Skipped(format!("{reason:#}")))?)
}

/// The pager accounts for every page but those that the guest's kernel never touched.
fn all_is_somewhere(guest: &Guest) -> Result<()> {
    let status = guest.status()?;
    let known =
        status.resident_bytes + status.staged_bytes + status.stored_bytes + status.filled_bytes;
    ensure!(
        known >= (GUEST_MIB << 20) / 100 * (100 - NEVER_TOUCHED_PERCENT),
        "only {known} bytes of its RAM are in use: {status:?}"
    );
    Ok(())
}
