//! Runs tests that need a sandbox: all of them in one, each reported under its name. Where no
//! sandbox can be made, each is reported as ignored, with the reason on top: never as passed.

use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Completion, Failed, Trial};

use super::sandbox::{self, Side};

/// What a test of a lab `L` does.
pub type Body<L> = fn(&L) -> anyhow::Result<()>;

/// A test of a lab `L`: its name and what it does.
pub type Test<L> = (&'static str, Body<L>);

/// Why one test cannot run here although its sandbox can: it is reported as ignored.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Skipped(pub String);

/// Demands a program that a single test needs, or skips that test.
pub fn need(program: &str, package: &str) -> Result<(), Skipped> {
    match sandbox::find_program(program) {
        Some(_) => Ok(()),
        None => Err(Skipped(format!(
            "not installed: {program} (package {package})"
        ))),
    }
}

/// Tests that share a sandbox.
pub struct Suite<L> {
    /// What they are, for the reason why they were skipped.
    pub what: &'static str,
    /// Why no sandbox can be made, if so.
    pub obstacle: fn() -> Option<String>,
    /// Tests at once, unless `--test-threads` says otherwise.
    pub at_once: usize,
    /// The tests.
    pub tests: Vec<Test<L>>,
    /// Makes what they share.
    pub furnish: fn() -> anyhow::Result<L>,
    /// Runs one of them.
    pub run: fn(&L, &str, Body<L>) -> anyhow::Result<()>,
}

impl<L: Send + Sync + 'static> Suite<L> {
    /// Runs what the command line asks for; to be called by `main` alone.
    pub fn main(self) -> ExitCode {
        let mut arguments = Arguments::from_args();
        arguments.test_threads.get_or_insert(self.at_once);
        if arguments.list {
            return self.ignored(&arguments);
        }
        if let Some(reason) = (self.obstacle)() {
            eprintln!("\nSKIPPED: all {}: {reason}\n", self.what);
            return self.ignored(&arguments);
        }
        match sandbox::enter() {
            Ok(Side::Outside(code)) => return ExitCode::from(code),
            Ok(Side::Inside) => {}
            Err(error) => {
                eprintln!("the sandbox could not be entered: {error:#}");
                return ExitCode::FAILURE;
            }
        }
        match (self.furnish)() {
            Ok(lab) => {
                let (lab, run) = (Arc::new(lab), self.run);
                let trial = |(name, test): Test<L>| {
                    let lab = Arc::clone(&lab);
                    Trial::ignorable_test(name, move || outcome(run(&lab, name, test)))
                };
                let trials = self.tests.into_iter().map(trial).collect();
                // The lab goes with its last test's last user, which is this function.
                libtest_mimic::run(&arguments, trials).exit_code()
            }
            Err(error) => {
                eprintln!("the sandbox could not be furnished: {error:#}");
                ExitCode::FAILURE
            }
        }
    }

    fn ignored(self, arguments: &Arguments) -> ExitCode {
        let trial = |(name, _): Test<L>| Trial::test(name, || Ok(())).with_ignored_flag(true);
        libtest_mimic::run(arguments, self.tests.into_iter().map(trial).collect()).exit_code()
    }
}

/// A test's result as it is reported.
pub fn outcome(result: anyhow::Result<()>) -> Result<Completion, Failed> {
    match result {
        Ok(()) => Ok(Completion::Completed),
        Err(error) => match error.downcast_ref::<Skipped>() {
            Some(skipped) => Ok(Completion::ignored_with(skipped)),
            None => Err(Failed::from(format!("{error:#}"))),
        },
    }
}
