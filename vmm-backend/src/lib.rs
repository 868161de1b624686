//! Pages one guest's RAM between its host and memory servers.

pub mod arguments;
pub mod crash_points;
pub mod daemon;
pub mod device;
pub mod engine;
pub mod far_disk;
pub mod fuzzing;
pub mod handover;
mod holes;
pub mod interrupt;
pub mod pager;
pub mod remote;
mod whole;

/// Says that a test cannot run here, past what keeps the output of tests that pass: it is counted as skipped.
#[cfg(test)]
fn skip_test(why: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "\nSKIPPED TEST: {why}");
}
