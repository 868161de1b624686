//! What the tests share: the private host, and guests attached to memory servers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use outram_tests::hermetic::console::{Answer, Console};
use outram_tests::hermetic::host::Host;

/// The private host that all tests share.
pub(crate) struct Lab {
    pub(crate) host: Host,
}

impl Lab {
    /// Starts it.
    pub(crate) fn new() -> Result<Self> {
        let host = Host::start(&images())?;
        Ok(Self { host })
    }

    /// Runs one test; where it fails, keeps the logs.
    pub(crate) fn run(&self, name: &str, test: fn(&Lab) -> Result<()>) -> Result<()> {
        let start = std::time::Instant::now();
        let result = test(self);
        println!("{name}: {:.1} s", start.elapsed().as_secs_f64());
        result.map_err(|error| {
            let to = logs().join(name);
            match self.host.keep_logs(&to) {
                Ok(()) => error.context(format!("logs are in {}", to.display())),
                Err(lost) => error.context(format!("logs could not be kept: {lost:#}")),
            }
        })
    }
}

fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("."))
        .join("target")
}

/// Where `images/build.sh` puts the guest.
fn images() -> PathBuf {
    target().join("images")
}

/// Where logs of failed tests are kept.
fn logs() -> PathBuf {
    target().join("e2e-logs")
}

/// Runs the checker in a guest over `share` per cent of its RAM and demands that all is well.
pub(crate) fn check(console: &mut Console, share: u64, seconds: u64) -> Result<Answer> {
    let limit = Duration::from_secs(120 + 6 * seconds);
    let report = console.ask(&format!("check {share} {seconds}"), "CHECKER", limit)?;
    demand_no_mismatch(console, &report)?;
    Ok(report)
}

/// Fails where a checker's report has mismatches, or has checked nothing.
pub(crate) fn demand_no_mismatch(console: &Console, report: &Answer) -> Result<()> {
    let mismatches = report.get("mismatches")?;
    let wrong: Vec<String> = console
        .transcript()
        .into_iter()
        .filter(|line| line.starts_with("MISMATCH"))
        .take(10)
        .collect();
    anyhow::ensure!(
        mismatches == 0 && wrong.is_empty(),
        "memory came back wrong: {}\n{}",
        report.line,
        wrong.join("\n")
    );
    anyhow::ensure!(
        report.get("checked")? >= report.get("pages")?,
        "the checker has not looked at every page: {}",
        report.line
    );
    Ok(())
}
