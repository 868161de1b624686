//! Guests whose RAM is 2 MiB pages of the host's pool, as libvirt gives them with `<hugepages/>`.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use nix::sys::signal::Signal;
use outram_tests::hermetic::guest::Spec;
use outram_tests::hermetic::huge_pages::{self, HugePages};
use outram_tests::hermetic::sampler::{Sampler, Stated};

use crate::Test;
use crate::fixture::{LONG, Lab, demand_no_mismatch, power_off, wait_under_limit};

pub(crate) const TESTS: &[Test] = &[
    ("huge_pages_at_half_a_quarter_and_all", ratios),
    ("huge_pages_while_the_server_stops", server_stops),
    ("huge_pages_that_cannot_be_paged_are_refused", refused),
];

const RAM_MIB: u64 = 256;
const HUGE: u64 = 2 << 20;
/// Share of RAM in use: with the guest's kernel more than half of it, and quick to fill.
const SHARE: u64 = 60;

fn spec(name: &str, page: &str) -> Spec {
    let mut spec = Spec::new(name, RAM_MIB);
    spec.extra_elements = format!("<memoryBacking><hugepages>{page}</hugepages></memoryBacking>");
    spec
}

const TWO_MIB: &str = "<page size='2048' unit='KiB'/>";

fn ratios(lab: &Lab) -> Result<()> {
    let _pool = HugePages::add((RAM_MIB << 20) / HUGE)?;
    let server = lab.server("1GiB")?;
    let limit = ["--local-ratio", "0.5"];
    let guest = lab.attach(spec("huge", TWO_MIB), &limit, &server.address)?;
    let sampler = Sampler::start(&guest);
    let mut console = guest.boot()?;
    // libvirt had all of it populated; from the first eviction on the limit holds.
    let status = wait_under_limit(&guest)?;
    ensure!(status.ram_bytes == RAM_MIB << 20, "{status:?}");
    sampler.judge_from_now(Stated::of(&guest)?);
    ensure!(
        huge_pages::available()? * HUGE >= status.ram_bytes - status.limit_bytes - HUGE,
        "what is beyond the limit is given back to the pool"
    );
    console.ask(&format!("alloc {SHARE}"), "ALLOCATED", LONG)?;
    console.ask("work 5", "WORKED", LONG)?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;

    sampler.pause();
    lab.tune(&guest, &["--local-ratio", "0.25"])?;
    wait_under_limit(&guest)?;
    sampler.judge_from_now(Stated::of(&guest)?);
    console.ask("work 3", "WORKED", LONG)?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    let status = guest.status()?;
    let counters = &status.counters;
    ensure!(
        counters.faults_remote > 0 && counters.evicted_pages > 0 && status.stored_bytes > 0,
        "pages must have moved: {status:?}"
    );
    ensure!(
        server.bytes_leased()? >= status.stored_bytes,
        "the server counts less than is stored: {status:?}"
    );

    sampler.pause();
    lab.tune(&guest, &["--local-ratio", "1.0"])?;
    console.ask("work 3", "WORKED", LONG)?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    sampler.finish()?;
    power_off(&guest, &mut console, &server)
}

fn server_stops(lab: &Lab) -> Result<()> {
    let _pool = HugePages::add((RAM_MIB << 20) / HUGE)?;
    let server = lab.server("1GiB")?;
    // With less a guest's kernel comes to its huge pages in turn while it boots, a few thousand times:
    // in the lab, where a guest of KVM is emulated twice, that takes longer than it may.
    let limit = ["--local-ratio", "0.5"];
    let guest = lab.attach(spec("hugestop", TWO_MIB), &limit, &server.address)?;
    let mut console = guest.boot()?;
    console.ask(&format!("alloc {SHARE}"), "ALLOCATED", LONG)?;
    console.ask("work 0", "WORKING", LONG)?;
    server.signal(Signal::SIGSTOP)?;
    let waits = guest.wait_status("faults to wait", LONG, |status| status.waiting_faults > 0);
    std::thread::sleep(Duration::from_secs(5));
    server.signal(Signal::SIGCONT)?;
    ensure!(waits?.lost_bytes == 0, "nothing may be lost");
    console.ask("halt", "HALTED", LONG)?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    power_off(&guest, &mut console, &server)
}

/// By name, before anything is started.
fn refused(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let half = RAM_MIB / 2;
    let partly = {
        let mut spec = spec("partly", "<page size='2048' unit='KiB' nodeset='0'/>");
        spec.extra_elements += &format!(
            "<cpu><numa><cell id='0' cpus='0' memory='{half}' unit='MiB'/>\
             <cell id='1' cpus='1' memory='{half}' unit='MiB'/></numa></cpu>"
        );
        spec
    };
    let giga = spec("giga", "<page size='1' unit='GiB'/>");
    for (spec, words) in [(giga, ["1 GiB", "2 MiB"]), (partly, ["cell 1", "nodeset"])] {
        let attached = lab.attach(spec, &["--local-ratio", "0.5"], &server.address);
        let Err(error) = attached else {
            bail!("it was attached");
        };
        let error = format!("{error:#}");
        for word in words {
            ensure!(error.contains(word), "'{word}' is not in: {error}");
        }
    }
    Ok(())
}
