//! The pager on real userfaultfd: the real backend, the real memory server, and the small VMM in
//! QEMU's place, at native speed. Each race that the design names has a test here that makes it
//! happen.
//!
//! The tests run in a sandbox of their own (see `outram_tests::hermetic::sandbox`), without
//! libvirt. Where none can be made, each is reported as ignored, with the reason on top.

mod crash;
mod crash_points;
mod disk;
mod disk_crash;
mod exhaustion;
mod fixture;
mod huge;
mod live;
mod plugging;
mod poison;
mod races;
mod refusals;
mod servers;
mod sparse;
mod supervisor;
mod suspend;
mod tuning;
mod upgrade;

use std::process::ExitCode;

use fixture::Lab;
use outram_tests::hermetic::sandbox;
use outram_tests::hermetic::suite::{self, Suite};

/// A test: its name and what it does.
type Test = suite::Test<Lab>;

fn main() -> ExitCode {
    let suite = Suite {
        what: "tests of the pager",
        obstacle: sandbox::obstacle_without_libvirt,
        // Several of them wait for a time-out while the processors are idle.
        at_once: 2,
        tests: [
            races::TESTS,
            live::TESTS,
            plugging::TESTS,
            disk::TESTS,
            poison::TESTS,
            servers::TESTS,
            sparse::TESTS,
            tuning::TESTS,
            crash::TESTS,
            crash_points::TESTS,
            supervisor::TESTS,
            upgrade::TESTS,
            disk_crash::TESTS,
            exhaustion::TESTS,
            suspend::TESTS,
            refusals::TESTS,
            huge::TESTS,
        ]
        .concat(),
        furnish: fixture::furnish,
        run: |lab, _, test| test(lab),
    };
    suite.main()
}
