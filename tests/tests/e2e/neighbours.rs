//! Point 3: two guests on one server, one of which dies.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::sampler::anonymous_bytes;

use crate::Test;
use crate::fixture::{LONG, Lab, SHORT, demand_no_mismatch, power_off};

pub(crate) const TESTS: &[Test] = &[("a_guest_dies_and_its_neighbour_lives", one_dies)];

const RAM_MIB: u64 = 256;

/// What its backend counts.
fn slabs_of(guest: &Guest) -> Result<u64> {
    let status = guest.status()?;
    Ok(status.servers.iter().map(|server| server.slabs).sum())
}

fn one_dies(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let doomed = lab.attach(
        Spec::new("doomed", RAM_MIB),
        &["--local-ratio", "0.5"],
        &server.address,
    )?;
    let healthy = lab.attach(
        Spec::new("healthy", RAM_MIB),
        &["--local-ratio", "0.25"],
        &server.address,
    )?;
    let mut first = doomed.boot()?;
    let mut second = healthy.boot()?;
    for console in [&mut first, &mut second] {
        console.ask("alloc 65", "ALLOCATED", LONG)?;
        console.ask("work 0", "WORKING", LONG)?;
    }
    std::thread::sleep(Duration::from_secs(3));
    let (before, memory_before) = (server.slabs_leased()?, anonymous_bytes(server.pid()));
    let lost = slabs_of(&doomed)?;
    ensure!(
        lost > 0 && before > lost,
        "both guests must hold slabs: {lost} of {before}"
    );

    kill(Pid::from_raw(doomed.qemu_pid()? as i32), Signal::SIGKILL)?;
    doomed.wait_state("shut off", SHORT)?;
    doomed.wait_backend_gone(SHORT)?;
    // The other goes on, and may need more of them at any time.
    wait_for("the dead guest's slabs to be given back", SHORT, || {
        let leased = server.slabs_leased()?;
        let given_back = leased <= slabs_of(&healthy)?.max(before - lost);
        Ok(given_back.then_some(()))
    })?;
    second.ask("halt", "HALTED", LONG)?;
    wait_for(
        "the freed slabs' memory to go back to the system",
        SHORT,
        || Ok((anonymous_bytes(server.pid()) < memory_before).then_some(())),
    )
    .with_context(|| format!("it was {memory_before:?}"))?;

    let report = second.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&second, &report)?;

    // A new guest is leased the freed slabs: it must never see what was in them.
    let mut first = doomed.boot()?;
    let report = first.ask("check 65 2", "CHECKER", LONG)?;
    demand_no_mismatch(&first, &report)?;
    first.send("poweroff")?;
    doomed.wait_state("shut off", LONG)?;
    power_off(&healthy, &mut second, &server)
}
