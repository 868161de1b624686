//! Point 2: the limit changes while the guest works, whose memory moves in blocks of several pages, by more
//! threads and with more of it on its way than usual.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::host::virsh_ok;
use outram_tests::hermetic::sampler::{Sampler, Stated};

use crate::Test;
use crate::fixture::{LONG, Lab, RAM_MIB, demand_no_mismatch, power_off, wait_under_limit};

pub(crate) const TESTS: &[Test] = &[("tune_down_and_up_ten_times", ten_times)];

/// Share of RAM in use: more than the lower limit, and quick to fill.
const SHARE: u64 = 60;

fn ten_times(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(
        Spec::new("tune", RAM_MIB),
        &["--local-ratio", "1.0"],
        &server.address,
    )?;
    let sampler = Sampler::start(&guest);
    let mut console = guest.boot()?;
    lab.tune(&guest, &["--granularity", "64KiB", "--persist"])?;
    lab.tune(&guest, &["--workers=3", "--queue-depth=16", "--persist"])?;
    lab.tune(&guest, &["--compressed-share=0.2", "--persist"])?;
    let status = guest.status()?;
    ensure!(status.granularity_bytes == Some(64 << 10));
    let (workers, depth) = (status.workers, status.queue_depth);
    ensure!(workers.map(u32::from) == Some(3) && depth.map(u32::from) == Some(16));
    let definition = virsh_ok(&["dumpxml", "--inactive", &guest.uuid])?;
    ensure!(
        definition
            .contains(r#" local-ratio="1" granularity="64KiB" workers="3" queue-depth="16" compressed-share="0.2" "#),
        "{definition}"
    );
    carried_along(lab, &guest)?;
    console.ask(&format!("alloc {SHARE}"), "ALLOCATED", LONG)?;
    console.ask("work 0", "WORKING", LONG)?;
    for round in 1..=10 {
        let in_round = || format!("in round {round}");
        lab.tune(&guest, &["--local-ratio", "0.2"])
            .with_context(in_round)?;
        wait_under_limit(&guest).with_context(in_round)?;
        // Reached; from here on it must hold.
        sampler.judge_from_now(Stated::of(&guest)?);
        std::thread::sleep(Duration::from_secs(1));
        sampler.pause();
        lab.tune(&guest, &["--local-ratio", "1.0"])
            .with_context(in_round)?;
        let status = guest.status()?;
        ensure!(
            status.limit_bytes == status.ram_bytes,
            "growing is immediate: {status:?}"
        );
        console.ask("ping", "PONG", LONG).with_context(in_round)?;
    }
    console.ask("halt", "HALTED", LONG)?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    let status = guest.status()?;
    ensure!(
        status.counters.evicted_pages > 0 && status.counters.faults_remote > 0,
        "ten times down and up must have moved pages: {:?}",
        status.counters
    );
    ensure!(
        status.counters.compressed_pages > 0,
        "some of a guest's memory compresses: {:?}",
        status.counters
    );
    sampler.finish()?;
    power_off(&guest, &mut console, &server)
}

/// What is tuned without '--persist' is in what a save or a migration takes along, and not in the definition.
fn carried_along(lab: &Lab, guest: &Guest) -> Result<()> {
    lab.tune(guest, &["--local-ratio=0.8", "--workers=2"])?;
    let running = virsh_ok(&["dumpxml", &guest.uuid])?;
    ensure!(
        running.contains(r#" local-ratio="0.8" granularity="64KiB" workers="2" "#),
        "{running}"
    );
    let definition = virsh_ok(&["dumpxml", "--inactive", &guest.uuid])?;
    ensure!(
        definition.contains(r#" local-ratio="1" "#) && definition.contains(r#" workers="3" "#),
        "{definition}"
    );
    lab.tune(guest, &["--local-ratio=1", "--workers=3"])
}
