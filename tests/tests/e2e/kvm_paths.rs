//! How a guest of KVM comes to a page that is elsewhere, beside its own loads and stores: by instructions
//! that the kernel carries out in its stead, through a disk's requests, by the kernel's threads that wait
//! for a page in place of a vCPU, and, where the long forms of these tests are asked for, with two vCPUs that boot
//! anew.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use outram_tests::hermetic::command::run;
use outram_tests::hermetic::console::Console;
use outram_tests::hermetic::guest::{Guest, Spec, greet};
use outram_tests::hermetic::host::Acceleration;
use outram_tests::lab_guest::Kernel;

use crate::Test;
use crate::far_disk::VERY_LONG;
use crate::fixture::{LONG, Lab, demand_no_mismatch, power_off, wait_under_limit};
use crate::under_kvm::{LIMIT, SHOWN, again_under_kvm, long_wanted};

const NAME: &str = "a_guest_of_kvm_comes_to_its_pages_by_every_path";

pub(crate) const TESTS: &[Test] = &[(NAME, |lab| match Acceleration::wanted() {
    Acceleration::Emulated => again_under_kvm(NAME, Kernel::Ordinary, LIMIT),
    Acceleration::Kvm => every_path(lab),
})];

/// The smallest that boots well: each page of it costs a millisecond or more in the lab guest.
const RAM_MIB: u64 = 160;

/// Share of it that is local while it boots.
const BOOTS: &str = "0.75";

/// Share of it that the checker has, in per cent, and what is left of all of it to be local then.
const SHARE: u64 = 35;
const LEFT: &str = "48MiB";

/// Pages that are written from, by instructions that the kernel carries out; as many are read into.
const MMIO_PAGES: u64 = 128;

/// How often they are driven out until most of them have left.
const ATTEMPTS: u32 = 3;

fn every_path(lab: &Lab) -> Result<()> {
    let server = lab.server("512MiB")?;
    let spec = Spec::new("paths", RAM_MIB);
    let guest = lab.attach(spec, &["--local-ratio", BOOTS], &server.address)?;
    let mut console = guest.boot()?;
    let waits = AsyncFaults::watch();

    mmio(lab, &guest, &mut console)?;
    let report = console.ask("disk-read 50", "DISK", LONG)?;
    ensure!(
        report.get("errors")? == 0 && report.get("mismatches")? == 0,
        "{}",
        report.line
    );
    verify(&mut console)?;
    match waits.and_then(|waits| waits.count()) {
        Ok(count) => println!("{SHOWN}{count} asynchronous page faults completed"),
        Err(reason) => println!("{SHOWN}asynchronous page faults are not counted: {reason:#}"),
    }

    // It boots once already; to boot anew, with its pages elsewhere, takes as long as all before.
    if !long_wanted() {
        return power_off(&guest, &mut console, &server);
    }
    // As much as it booted with. Most of what it boots from now has to be fetched all the same.
    lab.tune(&guest, &["--local-ratio", BOOTS])?;
    console.send("reboot")?;
    console.expect(&["READY"], VERY_LONG)?;
    greet(&mut console)?;
    fill_and_work(&mut console)?;
    verify(&mut console)?;
    power_off(&guest, &mut console, &server)
}

fn fill_and_work(console: &mut Console) -> Result<()> {
    console.ask(&format!("alloc {SHARE}"), "ALLOCATED", LONG)?;
    console.ask("work 5", "WORKED", LONG).map(drop)
}

fn verify(console: &mut Console) -> Result<()> {
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(console, &report)
}

/// The kernel goes through pages that are elsewhere.
fn mmio(lab: &Lab, guest: &Guest, console: &mut Console) -> Result<()> {
    // Pages that are read in order are fetched ahead.
    let brought = || -> Result<u64> {
        let counters = guest.status()?.counters;
        Ok(counters.faults_remote + counters.faults_staged + counters.fetched_ahead_pages)
    };
    for _ in 0..ATTEMPTS {
        lab.tune(guest, &["--local-ratio", BOOTS])?;
        // Anew each time: those that were read into are of zeros then.
        console.ask(&format!("mmio-pages {MMIO_PAGES}"), "MMIO", LONG)?;
        // They are used last before all others, so they leave.
        fill_and_work(console)?;
        lab.tune(guest, &["--local", LEFT])?;
        wait_under_limit(guest)?;
        let before = brought()?;
        let report = console.ask("mmio-pass", "MMIO", VERY_LONG)?;
        ensure!(
            report.get("pages")? == MMIO_PAGES && report.get("wrong")? == 0,
            "what the kernel read or wrote for the guest was wrong: {}",
            report.line
        );
        if brought()? - before >= MMIO_PAGES {
            return Ok(());
        }
    }
    bail!("most pages were local, {ATTEMPTS} times: nothing was shown")
}

/// Counts how often the kernel waited for a page in a vCPU's place, in the kernel's own trace.
struct AsyncFaults(PathBuf);

impl AsyncFaults {
    fn watch() -> Result<Self> {
        let folder = PathBuf::from("/sys/kernel/tracing");
        if !folder.join("trace").exists() {
            let path = folder.display().to_string();
            run("mount", &["-t", "tracefs", "tracefs", &path])?;
        }
        let event = folder.join("events/kvm/kvm_async_pf_completed/enable");
        fs::write(&event, "1").with_context(|| event.display().to_string())?;
        Ok(Self(folder))
    }

    fn count(self) -> Result<u64> {
        let trace = fs::read_to_string(self.0.join("trace"))?;
        let written = trace
            .lines()
            .find_map(|line| line.strip_prefix("# entries-in-buffer/entries-written: "))
            .and_then(|line| line.split_whitespace().next()?.split_once('/'))
            .context("the trace does not say how many entries it had")?;
        Ok(written.1.parse()?)
    }
}
