//! The pager on real userfaultfd: the real backend, the real memory server, and the small VMM in
//! QEMU's place, at native speed. Each race that the design names has a test here that makes it
//! happen.
//!
//! The tests run in a sandbox of their own (see `outram_tests::hermetic::sandbox`), without
//! libvirt. Where none can be made, each is reported as ignored, with the reason on top.

mod disk;
mod fixture;
mod races;
mod refusals;
mod servers;

use std::process::ExitCode;
use std::sync::Arc;

use fixture::Lab;
use libtest_mimic::{Arguments, Failed, Trial};
use outram_tests::hermetic::sandbox::{self, Side};

/// A test: its name and what it does.
type Test = (&'static str, fn(&Lab) -> anyhow::Result<()>);

fn tests() -> Vec<Test> {
    [races::TESTS, disk::TESTS, servers::TESTS, refusals::TESTS].concat()
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Two, for several of them wait for a time-out while the processors are idle.
    arguments.test_threads.get_or_insert(2);
    if arguments.list {
        return libtest_mimic::run(&arguments, trials(None)).exit_code();
    }
    if let Some(reason) = sandbox::obstacle_without_libvirt() {
        eprintln!("\nSKIPPED: all tests of the pager: {reason}\n");
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
            eprintln!("the sandbox could not be furnished: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The tests in a lab; without one, all of them ignored.
fn trials(lab: Option<Arc<Lab>>) -> Vec<Trial> {
    tests()
        .into_iter()
        .map(|(name, test)| match &lab {
            Some(lab) => {
                let lab = Arc::clone(lab);
                Trial::test(name, move || {
                    test(&lab).map_err(|error| Failed::from(format!("{error:#}")))
                })
            }
            None => Trial::test(name, || Ok(())).with_ignored_flag(true),
        })
        .collect()
}
