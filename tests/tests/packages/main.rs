//! What is shipped beside the programs: units of systemd and packages, rules for security modules,
//! dashboards. Where a tool to check one of them is missing, its test is reported as ignored.

mod debian;
mod guest;
mod libraries;
mod monitoring;
mod selinux;
mod units;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use libtest_mimic::{Arguments, Trial};
use outram_tests::hermetic::suite::{need, outcome};

/// How long one tool may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(300);

/// A test: its name and what it does.
type Test = (&'static str, fn() -> Result<()>);

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let tests = [
        units::TESTS,
        monitoring::TESTS,
        selinux::TESTS,
        libraries::TESTS,
        debian::TESTS,
        guest::TESTS,
    ];
    let trial = |(name, test): Test| Trial::ignorable_test(name, move || outcome(test()));
    let trials = tests.concat().into_iter().map(trial).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The repository's folder.
fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}
