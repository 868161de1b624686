//! What the tests of the pager have beside the [small lab](outram_tests::small_lab).

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::server::MemServer;
use serde_json::Value;

pub(crate) use outram_tests::small_lab::{
    Control, Guest, LEAST, LEAST_HUGE, LONG, Lab, PAGE, SLAB, WHILE, Wish, certificates,
    demand_gone, demand_sound, demand_unmounted, halt,
};

/// The top of the source tree.
pub(crate) fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("."))
}

/// The lab that all tests share. Its programs are this build's.
pub(crate) fn furnish() -> Result<Lab> {
    Lab::new(Path::new(env!("CARGO_BIN_EXE_small-vmm")))
}

/// Fills some pages until none of others is left in memory or in staging: what stays of memory that is gone through
/// again and again depends on what came back of it, and when.
pub(crate) fn push_out(guest: &mut Guest, pages: Range<u64>, by: Range<u64>) -> Result<()> {
    let mut there = 0;
    for _ in 0..8 {
        guest.fill(by.start, by.end - by.start)?;
        guest.settle()?;
        there = guest.present(pages.start, pages.end - pages.start)?;
        if there == 0 {
            return Ok(());
        }
    }
    bail!("{there} of the pages {pages:?} are still there");
}

/// Has pages raced for until each of these was done more than so many times: by all races together, for on a loaded
/// machine one may be over before all who take part have begun.
pub(crate) fn race_until(guest: &mut Guest, race: &Value, done: &[&str], times: u64) -> Result<()> {
    let mut counts = vec![0; done.len()];
    let has_raced = wait_for("a race of all who take part", LONG, || {
        let found = guest.command(0, "race", race.clone())?;
        demand_sound(&found)?;
        for (count, key) in counts.iter_mut().zip(done) {
            *count += found[key].as_u64().unwrap_or(0);
        }
        Ok(counts.iter().all(|count| *count > times).then_some(()))
    });
    has_raced.with_context(|| format!("{done:?}: {counts:?}"))
}

/// A server whose memory can be changed while it runs.
pub(crate) struct Lender {
    config: PathBuf,
    pub(crate) server: MemServer,
}

impl Lender {
    pub(crate) fn start(lab: &Lab, name: &str, bytes: u64) -> Result<Self> {
        let config = lab.path(&format!("{name}.toml"));
        write_memory(&config, bytes)?;
        let server = lab.server_with(&["--config", &config.display().to_string()])?;
        Ok(Self { config, server })
    }

    /// Lends so much from now on: returns once it has taken that in.
    pub(crate) fn lend(&self, bytes: u64) -> Result<()> {
        write_memory(&self.config, bytes)?;
        self.server.signal(Signal::SIGHUP)?;
        wait_for("the server to lend that", LONG, || {
            let lent = self.server.metric("outram_memserver_memory_bytes")?;
            Ok((lent == bytes).then_some(()))
        })
    }

    /// Waits until it has all back but two slabs.
    pub(crate) fn wait_vacated(&self, guest: &Guest) -> Result<()> {
        let few = || Ok((self.server.bytes_leased()? <= 2 * SLAB).then_some(()));
        wait_for("slabs to be vacated", LONG, few).with_context(|| guest.log())
    }
}

fn write_memory(config: &Path, bytes: u64) -> Result<()> {
    Ok(fs::write(config, format!("memory = \"{bytes}\""))?)
}

/// How long the guest stood still, time by time.
#[derive(Default)]
pub(crate) struct Stalls(pub(crate) Vec<Duration>);

impl std::fmt::Display for Stalls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let of = |percent: usize| match sorted.len() {
            0 => 0,
            length => sorted[(length * percent / 100).min(length - 1)].as_millis(),
        };
        write!(
            f,
            "p50 {} ms, p99 {} ms, most {} ms",
            of(50),
            of(99),
            of(100)
        )
    }
}
