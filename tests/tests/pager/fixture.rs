//! What the tests of the pager have beside the [small lab](outram_tests::small_lab).

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

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
