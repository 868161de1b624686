//! Point 5 in a real guest: the device reads and writes guest memory that has been evicted.

use anyhow::{Result, ensure};
use outram_tests::hermetic::guest::Spec;

use crate::Test;
use crate::fixture::{LONG, Lab, RAM_MIB, SHORT, demand_no_mismatch, power_off};

pub(crate) const TESTS: &[Test] = &[("disk_reads_into_evicted_pages", reads)];

fn reads(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(
        Spec::new("disk", RAM_MIB),
        &["--local-ratio", "0.1"],
        &server.address,
    )?;
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
