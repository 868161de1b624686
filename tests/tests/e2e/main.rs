//! End to end on real parts: libvirtd, QEMU, userfaultfd, a memory server in another process.
//!
//! All tests share one private host (see `outram_tests::hermetic`) and run one after another unless
//! `--test-threads` says otherwise. Where no such host can be made, each is reported as ignored, with
//! the reason on top.

mod checker;
mod disk;
mod fixture;
mod life;
mod neighbours;
mod operator;
mod outage;
mod ratio;
mod refusals;
mod strangers;
mod tune;

use std::process::ExitCode;
use std::sync::Arc;

use fixture::{Lab, Skipped};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use outram_tests::hermetic::sandbox::{self, Side};

/// A test: its name and what it does.
type Test = (&'static str, fn(&Lab) -> anyhow::Result<()>);

fn tests() -> Vec<Test> {
    [
        checker::TESTS,
        operator::TESTS,
        refusals::TESTS,
        ratio::TESTS,
        tune::TESTS,
        neighbours::TESTS,
        life::TESTS,
        disk::TESTS,
        outage::TESTS,
        strangers::TESTS,
    ]
    .concat()
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Each guest wants a processor of its own, and there may be two.
    arguments.test_threads.get_or_insert(1);
    if arguments.list {
        return libtest_mimic::run(&arguments, trials(None)).exit_code();
    }
    if let Some(reason) = sandbox::obstacle() {
        eprintln!("\nSKIPPED: all end-to-end tests: {reason}\n");
        return libtest_mimic::run(&arguments, trials(None)).exit_code();
    }
    match sandbox::enter() {
        Ok(Side::Outside(code)) => return ExitCode::from(code),
        Ok(Side::Inside) => {}
        Err(error) => {
            eprintln!("the sandbox could not be entered: {error:#}");
            return ExitCode::FAILURE;
        }
    }
    match Lab::new() {
        Ok(lab) => libtest_mimic::run(&arguments, trials(Some(Arc::new(lab)))).exit_code(),
        Err(error) => {
            eprintln!("the private host could not be made: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The tests on a host; without one, all of them ignored.
fn trials(lab: Option<Arc<Lab>>) -> Vec<Trial> {
    tests()
        .into_iter()
        .map(|(name, test)| match &lab {
            Some(lab) => {
                let lab = Arc::clone(lab);
                Trial::ignorable_test(name, move || outcome(lab.run(name, test)))
            }
            None => Trial::test(name, || Ok(())).with_ignored_flag(true),
        })
        .collect()
}

/// A test that cannot run here is ignored, with its reason; never passed.
fn outcome(result: anyhow::Result<()>) -> Result<Completion, Failed> {
    match result {
        Ok(()) => Ok(Completion::Completed),
        Err(error) => match error.downcast_ref::<Skipped>() {
            Some(skipped) => Ok(Completion::ignored_with(skipped)),
            None => Err(Failed::from(format!("{error:#}"))),
        },
    }
}
