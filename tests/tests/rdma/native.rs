//! The native check: what needs no more than a device, over one that this machine has, as it is set up.
//! Each test is a process in mount and PID namespaces of its own, so that nothing of it stays; the network
//! is the machine's, for the device is.

use std::net::IpAddr;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use libtest_mimic::Trial;
use outram_tests::hermetic::command::run_within;
use outram_tests::hermetic::suite::{Skipped, outcome};
use outram_tests::small_lab::Lab;

use crate::{LIMIT, NATIVE, Test, at_hand, paging, report, tenants, verbs};

/// What a native test's name begins with.
const PREFIX: &str = "natively::";

/// Why it is skipped without a device.
const NO_DEVICE: &str =
    "no RDMA device of this machine has a port that is up and has an IPv4 address";

/// What is run natively: all that makes or deletes no device.
pub(crate) fn tests() -> Vec<Test> {
    [verbs::TESTS, tenants::TESTS, &[paging::ONE_SIDED]].concat()
}

/// The lab of one native test.
pub(crate) fn lab(program: &Path, address: &str) -> Result<Lab> {
    let address: IpAddr = address.parse().with_context(|| NATIVE)?;
    Lab::at(program, address)
}

/// The tests as they are reported.
pub(crate) fn trials() -> Vec<Trial> {
    let address = at_hand::address();
    if address.is_none() {
        eprintln!("\nSKIPPED: the native check of RDMA: {NO_DEVICE}\n");
    }
    let trial = |(name, _): Test| {
        Trial::ignorable_test(format!("{PREFIX}{name}"), move || {
            outcome(run(name, address))
        })
    };
    tests().into_iter().map(trial).collect()
}

fn run(name: &str, address: Option<IpAddr>) -> Result<()> {
    // They have the device, and its address's ports, for themselves.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let Some(address) = address else {
        bail!(Skipped(NO_DEVICE.to_owned()));
    };
    if !nix::unistd::Uid::effective().is_root() {
        bail!(Skipped("not root".to_owned()));
    }
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let program = std::env::current_exe().context("this program's own path")?;
    let (program, native) = (program.display().to_string(), format!("{NATIVE}={address}"));
    // The end of the first process is the end of all.
    let apart = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let line = [&apart[..], &["env", &native, &program, name]].concat();
    let said = run_within(LIMIT, "unshare", &line)?.demand_success()?;
    report(name, &said)
}
