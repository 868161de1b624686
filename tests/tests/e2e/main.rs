//! End to end on real parts: libvirtd, QEMU, userfaultfd, a memory server in another process.
//!
//! All tests share one private host (see `outram_tests::hermetic`) and run one after another unless
//! `--test-threads` says otherwise. Where no such host can be made, each is reported as ignored, with
//! the reason on top.

mod backend_dies;
mod checker;
mod command_line;
mod confinement;
mod disk;
mod dump;
mod editing;
mod far_disk;
mod far_host;
mod fixture;
mod host_life;
mod hotplug;
mod hugetlb;
mod kvm_paths;
mod larger_than_host;
mod life;
mod live;
mod migration;
mod migration_fails;
mod neighbours;
mod operator;
mod outage;
mod poison;
mod ratio;
mod readme;
mod reconnect;
mod refusals;
mod save;
mod snapshots;
mod start_paths;
mod strangers;
mod tune;
mod under_kvm;
mod vhost_net;

use std::process::ExitCode;

use fixture::Lab;
use outram_tests::hermetic::suite::{self, Suite};
use outram_tests::hermetic::{neighbour, sandbox};

/// A test: its name and what it does.
type Test = suite::Test<Lab>;

/// Which of these tests are to be run, as the variable `OUTRAM_E2E` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// `none`.
    None,
    /// `here`: those on this machine.
    Here,
    /// `lab`: those in a lab guest, which want the machine for themselves.
    Lab,
    /// Anything else, or no such variable.
    All,
}

impl Part {
    fn wanted() -> Self {
        let named = std::env::var("OUTRAM_E2E");
        match named.as_deref() {
            Ok("none") => Self::None,
            Ok("here") => Self::Here,
            Ok("lab") => Self::Lab,
            _ => Self::All,
        }
    }
}

fn main() -> ExitCode {
    if let Some(code) = neighbour::serve() {
        return code;
    }
    let part = Part::wanted();
    if part == Part::None {
        eprintln!("the end-to-end tests run beside these: see tests/scripts/run-tests.sh");
        return ExitCode::SUCCESS;
    }
    let here = [
        checker::TESTS,
        operator::TESTS,
        command_line::TESTS,
        editing::TESTS,
        start_paths::TESTS,
        host_life::TESTS,
        confinement::TESTS,
        refusals::TESTS,
        ratio::TESTS,
        larger_than_host::TESTS,
        tune::TESTS,
        hugetlb::TESTS,
        neighbours::TESTS,
        life::TESTS,
        hotplug::TESTS,
        live::TESTS,
        disk::TESTS,
        far_disk::TESTS,
        reconnect::TESTS,
        save::TESTS,
        snapshots::TESTS,
        migration::TESTS,
        migration_fails::TESTS,
        outage::TESTS,
        backend_dies::TESTS,
        strangers::TESTS,
    ];
    let in_the_lab = [
        under_kvm::TESTS,
        kvm_paths::TESTS,
        vhost_net::TESTS,
        poison::TESTS,
        far_host::TESTS,
    ];
    let tests = match part {
        Part::None => Vec::new(),
        Part::Here => here.concat(),
        Part::Lab => in_the_lab.concat(),
        Part::All => [here.concat(), in_the_lab.concat()].concat(),
    };
    let suite = Suite {
        what: "end-to-end tests",
        obstacle: sandbox::obstacle,
        // Each guest wants a processor of its own, and there may be two.
        at_once: 1,
        tests,
        furnish: Lab::new,
        run: Lab::run,
    };
    suite.main()
}
