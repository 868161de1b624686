//! RDMA, for real: over soft-RoCE in the lab guest (see `outram_tests::lab_guest`). There this same
//! program runs the tests of its modules; outside each is reported under its name. Where the lab guest
//! cannot be had, all are reported as ignored. One is of the benchmark's swap over a network block device, for which
//! no other guest would be booted.
//!
//! Those that need no more than a device are run a second time where this machine has one, over that:
//! the native check. Without such a device these are reported as ignored.

mod at_hand;
#[path = "../../../memserver/tests/all/client.rs"]
mod client;
mod doctor;
mod links;
mod native;
mod nbd_swap;
mod paging;
mod removal;
mod soft_roce;
mod tenants;
mod verbs;

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use libtest_mimic::{Arguments, Trial};
use outram_tests::hermetic::suite::{Skipped, need, outcome};
use outram_tests::lab_guest::{self, Boot, Kernel, LabGuest, once_more};
use outram_tests::small_lab::Lab;

/// A test: its name and what it does in the lab guest.
type Test = (&'static str, fn(&Lab) -> Result<()>);

/// Memory for guests, servers and what the overlay takes up.
const GUEST: LabGuest = LabGuest {
    boot: Boot::Plain,
    memory_mib: 1536,
    vcpus: 2,
};

/// How long all tests may take together, once more included: on a busy machine they add up to ten minutes, and
/// beside the end-to-end tests they have what those leave.
const LIMIT: Duration = Duration::from_secs(2250);

/// Set where this program runs in the lab guest.
const INSIDE: &str = "OUTRAM_TEST_IN_LAB";

/// Set where it runs the native check: the address of the device's port.
const NATIVE: &str = "OUTRAM_TEST_RDMA_AT";

/// Said in there where the kernel has no soft-RoCE.
const NO_RXE: &str = "this kernel has no rdma_rxe";

/// What a line of the outcome begins with, so that nobody takes it for the suite's own.
const OUTCOME: &str = "inside:";

/// Said in such a line of a test that failed.
const FAILED: &str = " failed: ";

fn main() -> ExitCode {
    let tests = [
        verbs::TESTS,
        tenants::TESTS,
        paging::TESTS,
        removal::TESTS,
        doctor::TESTS,
        links::TESTS,
        nbd_swap::TESTS,
    ]
    .concat();
    if let Ok(server) = std::env::var(tenants::PESTER) {
        return pester(&server);
    }
    let program = Path::new(env!("CARGO_BIN_EXE_small-vmm"));
    if std::env::var_os(INSIDE).is_some() {
        return inside(Lab::new(program), &tests);
    }
    if let Ok(address) = std::env::var(NATIVE) {
        return inside(native::lab(program, &address), &native::tests());
    }
    let arguments = Arguments::from_args();
    let trial = |(name, _): Test| Trial::ignorable_test(name, move || outcome(outside(name)));
    let mut trials: Vec<Trial> = tests.into_iter().map(trial).collect();
    trials.extend(native::trials());
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Is the client that a test kills.
fn pester(server: &str) -> ExitCode {
    let pki = std::env::args_os().nth(1).unwrap_or_default();
    match tenants::pester(Path::new(&pki), server) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What became of one test, of all that the lab guest ran at once.
fn outside(name: &str) -> Result<()> {
    static SAID: OnceLock<Result<String>> = OnceLock::new();
    need("qemu-system-x86_64", "qemu-system-x86")?;
    need("rdma", "rdma-core, iproute2")?;
    let said = match SAID.get_or_init(run_lab) {
        Ok(said) => said,
        Err(error) => bail!("{error:#}"),
    };
    if said.contains(NO_RXE) {
        bail!(Skipped(NO_RXE.to_owned()));
    }
    report(name, said)
}

/// One test's outcome, and what it told of itself.
fn report(name: &str, said: &str) -> Result<()> {
    let passed = format!("{OUTCOME} {name} ok");
    ensure!(said.lines().any(|line| line.trim() == passed), "{said}");
    for line in said
        .lines()
        .filter(|line| line.starts_with(&format!("{name}: ")))
    {
        eprintln!("{line}");
    }
    Ok(())
}

fn run_lab() -> Result<String> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let images = lab_guest::build(&top, Kernel::Ordinary)?;
    let share = tempfile::tempdir()?;
    let program = std::env::current_exe().context("this program's own path")?;
    // Its status is not that of the tests: each tells its own outcome.
    let script = format!(
        "modprobe -a rdma_rxe crc32_generic ib_uverbs || {{ echo '{NO_RXE}'; exit 0; }}
{INSIDE}=1 '{}' || true
",
        program.display()
    );
    fs::write(share.path().join("lab"), script)?;
    let began = Instant::now();
    once_more("all tests of rdma", || {
        let left = LIMIT.saturating_sub(began.elapsed());
        GUEST.run(&images, share.path(), left).map_err(verdict)
    })
}

/// Where a test had failed before the guest did, that stands: then all is said as it was, and nothing is run
/// once more.
fn verdict(error: anyhow::Error) -> anyhow::Error {
    let said = format!("{error:#}");
    let has_failed = |line: &str| {
        let outcome = line.trim().strip_prefix(OUTCOME);
        outcome.is_some_and(|outcome| outcome.contains(FAILED))
    };
    match said.lines().any(has_failed) {
        true => anyhow!(said),
        false => error,
    }
}

/// Runs all tests, or those whose name contains a word of the command line.
fn inside(lab: Result<Lab>, tests: &[Test]) -> ExitCode {
    let lab = match lab {
        Ok(lab) => lab,
        Err(error) => {
            println!("{error:#}");
            return ExitCode::FAILURE;
        }
    };
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|word| name.contains(word));
    for (name, test) in tests.iter().filter(|(name, _)| is_wanted(name)) {
        let began = std::time::Instant::now();
        // One that panics is not to take the others' outcomes with it.
        match std::panic::catch_unwind(|| test(&lab)) {
            Ok(Ok(())) => println!("{OUTCOME} {name} ok"),
            Ok(Err(error)) => println!("{OUTCOME} {name}{FAILED}{error:#}"),
            Err(_) => println!("{OUTCOME} {name}{FAILED}it panicked"),
        }
        println!("{name}: {:.1} s", began.elapsed().as_secs_f64());
    }
    ExitCode::SUCCESS
}
