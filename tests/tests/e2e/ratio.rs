//! Point 1: the checker over 80 % of RAM at each limit, with the kernel's count of what it costs.

use anyhow::{Result, ensure};
use outram_tests::hermetic::console::Console;
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::hard_limit::HardLimit;
use outram_tests::hermetic::sampler::{Sampler, Stated};
use outram_tests::hermetic::server::MemServer;
use outram_tests::hermetic::suite::Skipped;

use crate::Test;
use crate::fixture::{LONG, Lab, RAM_MIB, SHARE, demand_no_mismatch, power_off};

pub(crate) const TESTS: &[Test] = &[
    ("ratio_0_75", |lab| at(lab, &["--local-ratio", "0.75"])),
    ("ratio_0_5", |lab| at(lab, &["--local-ratio", "0.5"])),
    ("ratio_0_25", |lab| at(lab, &["--local-ratio", "0.25"])),
    ("ratio_0_1", |lab| at(lab, &["--local-ratio", "0.1"])),
    ("local_32_mib", |lab| at(lab, &["--local", "32MiB"])),
    ("numa_cells_are_paged_alike", numa),
    ("hard_memory_limit_of_the_kernel", hard_limit),
];

/// Seconds of random reads and writes between filling and the last look at every page.
const WORK_SECONDS: u64 = 3;

/// What QEMU needs beside the guest's RAM under emulation (90 MiB were seen: translated code, its
/// own data), and the backend beside its limit (headroom, page table, its fixed part): together with
/// the limit still a good deal less than what the guest uses.
const OVERHEAD_BYTES: u64 = 200 << 20;

fn at(lab: &Lab, limit: &[&str]) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(Spec::new("ratio", RAM_MIB), limit, &server.address)?;
    let sampler = Sampler::start(&guest);
    let mut console = guest.boot()?;
    sampler.judge(Stated::of(&guest)?);
    run_checker(&mut console)?;
    server_holds_the_rest(&guest, &server)?;
    let seen = sampler.finish()?;
    ensure!(
        seen.with_guest > 20,
        "only {} samples saw guest RAM",
        seen.with_guest
    );
    power_off(&guest, &mut console, &server)
}

/// Fills, works, verifies; the memory stays in use.
fn run_checker(console: &mut Console) -> Result<()> {
    console.ask(&format!("alloc {SHARE}"), "ALLOCATED", LONG)?;
    console.ask(&format!("work {WORK_SECONDS}"), "WORKED", LONG)?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(console, &report)
}

/// What is in use and not here is there, by the server's own count of slabs.
fn server_holds_the_rest(guest: &Guest, server: &MemServer) -> Result<()> {
    let status = guest.status()?;
    let used = (RAM_MIB << 20) / 100 * SHARE;
    let known =
        status.resident_bytes + status.staged_bytes + status.stored_bytes + status.filled_bytes;
    ensure!(
        known >= used,
        "the guest uses {used} bytes, but only {known} are accounted for: {status:?}"
    );
    let rest = used.saturating_sub(status.limit_bytes + status.headroom_bytes);
    ensure!(
        status.stored_bytes + status.filled_bytes >= rest,
        "{rest} bytes must be elsewhere: {status:?}"
    );
    let (slabs, bytes) = (server.slabs_leased()?, server.bytes_leased()?);
    ensure!(
        slabs > 0 && bytes >= status.stored_bytes,
        "the server counts {slabs} slabs of {bytes} bytes in all, less than {} stored",
        status.stored_bytes
    );
    Ok(())
}

/// A guest whose RAM is two memory files.
fn numa(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let mut spec = Spec::new("numa", RAM_MIB);
    let half = RAM_MIB / 2;
    spec.extra_elements = format!(
        "<cpu><numa><cell id='0' cpus='0' memory='{half}' unit='MiB'/>\
         <cell id='1' cpus='1' memory='{half}' unit='MiB'/></numa></cpu>"
    );
    let guest = lab.attach(spec, &["--local-ratio", "0.4"], &server.address)?;
    let sampler = Sampler::start(&guest);
    let mut console = guest.boot()?;
    sampler.judge(Stated::of(&guest)?);
    ensure!(
        guest.status()?.ram_bytes == RAM_MIB << 20,
        "both cells are paged"
    );
    run_checker(&mut console)?;
    server_holds_the_rest(&guest, &server)?;
    sampler.finish()?;
    power_off(&guest, &mut console, &server)
}

/// QEMU and backend in a memory cgroup whose hard limit has no room for RAM kept beside.
fn hard_limit(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let limit_bytes = 64 << 20;
    let guest = lab.attach(
        Spec::new("hardlimit", RAM_MIB),
        &["--local", "64MiB"],
        &server.address,
    )?;
    let group = HardLimit::new(limit_bytes + OVERHEAD_BYTES)
        .map_err(|reason| Skipped(format!("{reason:#}")))?;
    let mut console = lab.boot_in(&group, &guest)?;
    let status = guest.status()?;
    group.add(status.backend_pid)?;
    run_checker(&mut console)?;
    let kills = group.kills()?;
    ensure!(
        kills == 0,
        "the kernel killed {kills} processes for the limit; peak {:?}",
        group.peak_bytes()
    );
    ensure!(
        RAM_MIB * 1024 * 1024 / 100 * SHARE > limit_bytes + OVERHEAD_BYTES,
        "the hard limit would not have caught a cheat"
    );
    power_off(&guest, &mut console, &server)
}
