//! The backend of a working guest is killed, in part and whole, and replaced.

use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_wire::control::{Phase, Status, is_supervised};

use crate::Test;
use crate::far_disk::{VERY_LONG, demand_no_error, demand_same};
use crate::fixture::{
    HALF, LONG, Lab, RAM_MIB, SHARE, SHORT, check, check_limit, demand_no_mismatch, power_off,
};
use crate::reconnect::wait_greeted;

pub(crate) const TESTS: &[Test] = &[
    ("a_guest_outlives_its_backends", outlive),
    (
        "a_file_system_on_the_far_disk_outlives_its_backends",
        file_system,
    ),
];

fn outlive(lab: &Lab) -> Result<()> {
    const SECONDS: u64 = 25;
    let server = lab.server("1GiB")?;
    let guest = lab.attach(Spec::new("outlives", RAM_MIB), &HALF, &server.address)?;
    let mut console = guest.boot()?;
    let first = guest.status()?;
    console.send(&format!("check {SHARE} {SECONDS}"))?;

    // The pager alone: nobody has to do anything.
    let mut now = first.clone();
    for round in 1..=8 {
        std::thread::sleep(Duration::from_millis(700 + 130 * u64::from(round)));
        end(now.backend_pid)?;
        now = wait_for_another(&guest, &now)?;
        ensure!(now.takeovers == round, "{now:?}");
    }

    // All of it: 'outram restart' starts it again.
    let supervisor = parent(now.backend_pid)?;
    kill(Pid::from_raw(supervisor), Signal::SIGSTOP)?;
    end(now.backend_pid)?;
    kill(Pid::from_raw(supervisor), Signal::SIGKILL)?;
    let run_dir = guest.run_dir();
    wait_for("all of the backend to be gone", SHORT, || {
        let gone = guest.status_if_any().is_none() && !is_supervised(&run_dir);
        Ok(gone.then_some(()))
    })?;
    let told = lab.host.outram(&["status", guest.name()])?;
    ensure!(told.stdout.contains("outram restart"), "{}", told.stdout);
    lab.host.outram_ok(&["restart", guest.name()])?;
    now = wait_for_another(&guest, &now)?;

    // The supervisor alone: nothing stands still, and the operator is told.
    kill(Pid::from_raw(parent(now.backend_pid)?), Signal::SIGKILL)?;
    wait_for("the supervisor to be gone", SHORT, || {
        Ok((!is_supervised(&run_dir)).then_some(()))
    })?;
    let told = lab.host.outram(&["status", guest.name()])?;
    let is_told = told.stdout.contains("serving") && told.stdout.contains("outram restart");
    ensure!(is_told, "{}", told.stdout);
    lab.host.outram_ok(&["restart", guest.name()])?;
    now = wait_for_another(&guest, &now)?;
    let told = lab.host.outram(&["status", guest.name()])?;
    ensure!(!told.stdout.contains("outram restart"), "{}", told.stdout);

    // Politely, by name and all together.
    for arguments in [vec!["restart", guest.name()], vec!["restart", "--all"]] {
        let told = lab.host.outram_ok(&arguments)?;
        ensure!(told.contains("took over from"), "{told}");
        let next = guest.status()?;
        ensure!(next.backend_pid != now.backend_pid, "{next:?}");
        ensure!(next.takeovers == now.takeovers, "nobody died: {next:?}");
        now = next;
    }

    let report = console.expect(&["CHECKER"], check_limit(SECONDS))?;
    demand_no_mismatch(&console, &report)?;
    lab.tune(&guest, &["--local-ratio", "0.3"])?;
    check(&mut console, SHARE, 1)?;
    ensure!(guest.state()? == "running");
    power_off(&guest, &mut console, &server)?;
    guest.wait_run_dir_gone(SHORT)
}

/// Files are written, read and removed meanwhile.
fn file_system(lab: &Lab) -> Result<()> {
    const FILES: u64 = 32;
    let server = lab.server("3GiB")?;
    let limit = ["--local-ratio", "0.4", "--disk-size", "1GiB"];
    let guest = lab.attach(
        Spec::new("filer-outlives", RAM_MIB),
        &limit,
        &server.address,
    )?;
    let mut console = guest.boot()?;
    console.ask("alloc 40", "ALLOCATED", LONG)?;
    console.ask("fs-make", "FS", LONG)?;
    let mut now = guest.status()?;
    for version in 1..=2 {
        for work in ["fs-write", "fs-verify"] {
            console.send(&format!("{work} {FILES} {version}"))?;
            for round in 0..2 {
                std::thread::sleep(Duration::from_millis(400 + 170 * round));
                end(now.backend_pid)?;
                now = wait_for_another(&guest, &now)?;
                // QEMU before 9.1 loses the disk for good where its backend dies amid its first words.
                guest.wait_status("QEMU to be back at the disk", SHORT, |status| {
                    status.disk.as_ref().and_then(|disk| disk.connected) == Some(true)
                })?;
                wait_greeted(&guest)?;
            }
            let report = console.expect(&["FS"], VERY_LONG)?;
            if work == "fs-verify" {
                demand_same(&report)?;
            }
        }
    }
    ensure!(now.takeovers == 8, "{now:?}");
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    console.ask(&format!("fs-remove {FILES}"), "FS", LONG)?;
    let disk = demand_no_error(&guest)?;
    ensure!(disk.discards > 0, "{disk:?}");
    guest.destroy()?;
    guest.wait_backend_gone(SHORT)
}

/// Kills a process.
pub(crate) fn end(pid: u32) -> Result<()> {
    Ok(kill(Pid::from_raw(pid as i32), Signal::SIGKILL)?)
}

/// The process that started this one.
pub(crate) fn parent(pid: u32) -> Result<i32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"));
    Ok(line.unwrap_or_default().trim().parse()?)
}

/// Another process than that of this status serves the guest.
pub(crate) fn wait_for_another(guest: &Guest, before: &Status) -> Result<Status> {
    wait_for("another pager to serve the guest", LONG, || {
        Ok(guest
            .status_if_any()
            .filter(|now| now.backend_pid != before.backend_pid && now.phase == Phase::Serving))
    })
}
