//! Save, restore and managed save, with the checker at work throughout, and what goes wrong with
//! them.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use outram_tests::hermetic::console::Console;
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::host::{virsh, virsh_ok};
use outram_tests::hermetic::sampler::{Sampler, Stated};

use crate::Test;
use crate::fixture::{
    HALF, LONG, Lab, RAM_MIB, demand_no_mismatch, power_off, ram_mib, wait_slabs,
};

pub(crate) const TESTS: &[Test] = &[
    ("save_restore_and_managed_save_keep_every_page", keeps),
    ("save_waits_for_a_server_and_can_be_given_up", server_away),
];

/// Where the tests save to.
const IMAGE: &str = "/var/lib/libvirt/images/saved";

/// Share of RAM that the checker uses: the rest is the guest's kernel's and never touched, so that a
/// save reads pages of every kind. Of less RAM, its kernel needs a larger share.
fn used() -> Result<u64> {
    Ok(if ram_mib()? < RAM_MIB { 35 } else { 60 })
}

/// A guest at work on more memory than may be local.
pub(crate) fn at_work(guest: &Guest) -> Result<Console> {
    let mut console = guest.boot()?;
    console.ask(&format!("alloc {}", used()?), "ALLOCATED", LONG)?;
    console.ask("work 0", "WORKING", LONG)?;
    Ok(console)
}

/// Ends the checker's work and has it look at every page.
pub(crate) fn verify(console: &mut Console) -> Result<()> {
    console.ask("halt", "HALTED", LONG)?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(console, &report)
}

/// Has the checker look at every page, and work on.
pub(crate) fn verify_at_work(console: &mut Console) -> Result<()> {
    verify(console)?;
    console.ask("work 0", "WORKING", LONG).map(drop)
}

/// What a guest's backend was started with, word by word.
pub(crate) fn backend_arguments(guest: &Guest) -> Result<Vec<String>> {
    let pid = guest.status()?.backend_pid;
    let line = fs::read_to_string(format!("/proc/{pid}/cmdline"))?;
    Ok(line.split('\0').map(str::to_owned).collect())
}

fn arrived_by(guest: &Guest) -> Result<Option<String>> {
    let arguments = backend_arguments(guest)?;
    let found = arguments.iter().find_map(|a| a.strip_prefix("--incoming="));
    Ok(found.map(str::to_owned))
}

/// Notes the time that an operation takes beside those of the tests.
pub(crate) fn timed<T>(what: &str, act: impl FnOnce() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    let outcome = act()?;
    crate::fixture::note_duration(what, start.elapsed());
    Ok(outcome)
}

fn keeps(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(Spec::new("save", RAM_MIB), &HALF, &server.address)?;
    let sampler = Sampler::start(&guest);
    drop(at_work(&guest)?);
    sampler.judge(Stated::of(&guest)?);
    ensure!(arrived_by(&guest)?.is_none(), "an ordinary start");
    let name = guest.name();
    for round in 0..2 {
        timed("save at 0.5", || virsh_ok(&["save", name, IMAGE]))?;
        guest.wait_state("shut off", LONG)?;
        guest.wait_backend_gone(LONG)?;
        wait_slabs(&server, |slabs| slabs == 0)?;
        timed("restore at 0.5", || virsh_ok(&["restore", IMAGE]))?;
        ensure!(arrived_by(&guest)?.as_deref() == Some("restore"));
        let mut console = guest.console()?;
        verify_at_work(&mut console).with_context(|| format!("after save {round}"))?;
    }
    virsh_ok(&["managedsave", name])?;
    guest.wait_backend_gone(LONG)?;
    let listed = virsh_ok(&["list", "--all", "--with-managed-save"])?;
    ensure!(listed.contains(name), "{listed}");
    virsh_ok(&["start", name])?;
    ensure!(arrived_by(&guest)?.as_deref() == Some("restore"));
    let mut console = guest.console()?;
    verify(&mut console)?;
    sampler.finish()?;
    power_off(&guest, &mut console, &server)?;
    // Nothing of the arrivals is left for a start that is none.
    virsh_ok(&["start", name])?;
    ensure!(arrived_by(&guest)?.is_none(), "an ordinary start");
    guest.destroy()
}

fn server_away(lab: &Lab) -> Result<()> {
    let mut server = lab.server("1GiB")?;
    let guest = lab.attach(Spec::new("saveaway", RAM_MIB), &HALF, &server.address)?;
    let mut console = at_work(&guest)?;
    // A save reads pages that are at the server: it waits as the guest does.
    server.signal(Signal::SIGSTOP)?;
    let name = guest.name().to_owned();
    let saving = thread::spawn(move || virsh(&["save", &name, IMAGE]));
    thread::sleep(Duration::from_secs(5));
    ensure!(!saving.is_finished(), "the save cannot have ended");
    // Given up while it waits, it ends once the server is back: the guest goes on.
    let name = guest.name().to_owned();
    let aborting = thread::spawn(move || virsh(&["domjobabort", &name]));
    thread::sleep(Duration::from_secs(2));
    server.signal(Signal::SIGCONT)?;
    let given_up = aborting.join().ok().context("the thread panicked")??;
    let saved = saving.join().ok().context("the thread panicked")??;
    if saved.success() {
        // The word came too late on a slow machine: then it is saved, which is right as well.
        guest.wait_state("shut off", LONG)?;
        guest.wait_backend_gone(LONG)?;
        virsh_ok(&["restore", IMAGE])?;
        console = guest.console()?;
    } else {
        ensure!(given_up.success(), "{}", given_up.said());
        ensure!(guest.state()? == "running", "given up: {}", saved.said());
    }
    verify_at_work(&mut console)?;

    // Without a server the saved guest does not start, is told why, and loses nothing.
    virsh_ok(&["managedsave", guest.name()])?;
    guest.wait_backend_gone(LONG)?;
    server.kill()?;
    let refused = virsh(&["start", guest.name()])?;
    ensure!(
        !refused.success() && refused.said().contains(&server.address),
        "{}",
        refused.said()
    );
    let image = format!("/var/lib/libvirt/qemu/save/{}.save", guest.name());
    ensure!(Path::new(&image).exists(), "the image is kept");
    server.start_again()?;
    // Nor where the hook cannot note that it arrives: as a fresh start it would lose its disk.
    let in_the_way = guest.run_dir().with_extension("incoming-new");
    fs::create_dir(&in_the_way)?;
    let refused = virsh(&["start", guest.name()])?;
    ensure!(
        !refused.success() && refused.said().contains("arrives by restore"),
        "{}",
        refused.said()
    );
    ensure!(Path::new(&image).exists(), "the image is kept");
    fs::remove_dir(&in_the_way)?;
    virsh_ok(&["start", guest.name()])?;
    ensure!(arrived_by(&guest)?.as_deref() == Some("restore"));
    let mut console = guest.console()?;
    verify(&mut console)?;
    power_off(&guest, &mut console, &server)
}
