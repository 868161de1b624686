//! What a host does around its guests: libvirtd that starts, stops and crashes, and the host's own
//! shutdown.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outram_tests::hermetic::command::{run_within, wait_for};
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::host::virsh_ok;
use outram_tests::hermetic::suite::Skipped;
use outram_wire::control::Phase;

use crate::Test;
use crate::fixture::{LONG, Lab, SHORT, demand_no_mismatch, power_off, wait_slabs};

pub(crate) const TESTS: &[Test] = &[
    (
        "autostart_then_libvirtd_ends_and_crashes_under_the_guest",
        libvirtd_comes_and_goes,
    ),
    (
        "the_hosts_shutdown_saves_a_guest_though_its_backend_is_told_to_end",
        host_shuts_down,
    ),
];

const HALF: [&str; 2] = ["--local-ratio", "0.5"];

const RAM_MIB: u64 = 256;

/// libvirt starts domains once after the host's boot; that it did so is noted here.
const AUTOSTARTED: &str = "/run/libvirt/qemu/autostarted";

fn libvirtd_comes_and_goes(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(Spec::new("autostart", RAM_MIB), &HALF, &server.address)?;
    virsh_ok(&["autostart", &guest.uuid])?;
    lab.host.end_libvirtd(Signal::SIGTERM)?;
    fs::remove_file(AUTOSTARTED).context(AUTOSTARTED)?;
    lab.host.start_libvirtd()?;
    guest.wait_state("running", LONG)?;
    let mut console = guest.console()?;
    let started = guest.status()?;
    console.ask("alloc 50", "ALLOCATED", LONG)?;
    console.ask("work 0", "WORKING", LONG)?;

    // A hook that failed at 'reconnect' would make libvirtd kill the guest.
    let settings = Path::new("/etc/outram/backend.toml");
    let good = fs::read_to_string(settings)?;
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        lab.host.end_libvirtd(signal)?;
        works_without_libvirtd(lab, &guest).with_context(|| format!("after {signal}"))?;
        fs::write(settings, "this is no TOML [[[")?;
        let again = lab.host.start_libvirtd();
        fs::write(settings, &good)?;
        again?;
        guest.wait_state("running", SHORT)?;
        lab.tune(&guest, &HALF)?;
    }
    let status = guest.status()?;
    ensure!(
        status.qemu_pid == started.qemu_pid && status.backend_pid == started.backend_pid,
        "guest and backend are the same as before: {started:?}, now {status:?}"
    );
    console.ask("halt", "HALTED", LONG)?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    guest.destroy()?;
    guest.wait_backend_gone(SHORT)?;
    wait_slabs(&server, |slabs| slabs == 0)
}

/// A running guest is told of and tuned by those who know its name, libvirtd or not.
fn works_without_libvirtd(lab: &Lab, guest: &Guest) -> Result<()> {
    lab.tune(guest, &["--local-ratio", "0.3"])?;
    let told = lab.host.outram_ok(&["status", guest.name()])?;
    ensure!(told.contains("serving"), "status says: {told}");
    Ok(())
}

/// What libvirt itself runs at the host's shutdown and boot.
const LIBVIRT_GUESTS: &str = "/usr/lib/libvirt/libvirt-guests.sh";

/// Whoever ends all processes may come to the backend first: it stays until its guest is saved.
fn host_shuts_down(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(Spec::new("shut-down", RAM_MIB), &HALF, &server.address)?;
    let mut console = guest.boot()?;
    console.ask("alloc 50", "ALLOCATED", LONG)?;
    console.ask("work 0", "WORKING", LONG)?;
    tell_to_end(&guest)?;
    if !Path::new(LIBVIRT_GUESTS).exists() {
        anyhow::bail!(Skipped(format!("{LIBVIRT_GUESTS} is not installed")));
    }
    fs::write(
        "/etc/default/libvirt-guests",
        "ON_BOOT=start\nON_SHUTDOWN=suspend\n",
    )?;
    libvirt_guests("stop")?;
    guest.wait_state("shut off", SHORT)?;
    guest.wait_backend_gone(SHORT)?;
    wait_slabs(&server, |slabs| slabs == 0)?;

    libvirt_guests("start")?;
    guest.wait_state("running", LONG)?;
    let mut console = guest.console()?;
    console.ask("halt", "HALTED", LONG)?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    power_off(&guest, &mut console, &server)
}

fn libvirt_guests(order: &str) -> Result<()> {
    let done = run_within(LONG, "sh", &[LIBVIRT_GUESTS, order])?;
    ensure!(done.success(), "{}: {}", done.line, done.said());
    Ok(())
}

/// Sends a backend every signal that asks a daemon to end: it stays, and says why.
fn tell_to_end(guest: &Guest) -> Result<()> {
    let backend = guest.status()?.backend_pid;
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        kill(Pid::from_raw(backend as i32), signal)?;
        std::thread::sleep(Duration::from_millis(500));
        let status = guest.status().with_context(|| format!("after {signal}"))?;
        ensure!(
            status.phase == Phase::Serving && status.backend_pid == backend,
            "after {signal}: {status:?}"
        );
    }
    let log = || fs::read_to_string(guest.run_dir().join("log"));
    wait_for("its log to tell why it stays", SHORT, || {
        let told = log()?.contains("shut the guest down instead");
        Ok(told.then_some(()))
    })
    .with_context(|| format!("its log: {:?}", log()))
}
