//! The checker itself: it must find nothing in good memory, and find what is broken.

use std::time::Duration;

use anyhow::{Result, ensure};
use outram_tests::hermetic::guest::{Guest, Spec};

use crate::Test;
use crate::fixture::{Lab, check};

pub(crate) const TESTS: &[Test] = &[("checker_tells_good_memory_from_broken", tells)];

/// An ordinary guest, without a pager: no mismatch, unless the checker breaks pages itself.
fn tells(_lab: &Lab) -> Result<()> {
    let guest = Guest::define(Spec::new("plain", 256))?;
    let mut console = guest.boot()?;
    check(&mut console, 50, 1)?;
    let minute = Duration::from_secs(60);
    console.ask("alloc 20", "ALLOCATED", minute)?;
    console.ask("corrupt 3", "BROKEN", minute)?;
    let report = console.ask("verify", "CHECKER", minute)?;
    ensure!(
        report.get("mismatches")? == 3,
        "flipped bits: {}",
        report.line
    );
    console.ask("alloc 20", "ALLOCATED", minute)?;
    console.ask("stale 4", "BROKEN", minute)?;
    let report = console.ask("verify", "CHECKER", minute)?;
    ensure!(
        report.get("mismatches")? == 4,
        "lost stores: {}",
        report.line
    );
    console.send("poweroff")?;
    guest.wait_state("shut off", minute)
}
