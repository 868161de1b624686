//! Migrations that fail, are given up or are refused: the guest goes on where it is, and nothing of
//! it is left at the destination or at its servers.

use std::fs;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::command::{Finished, wait_for};
use outram_tests::hermetic::console::Console;
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::host::virsh;

use crate::Test;
use crate::fixture::{HALF, LONG, Lab, ram_mib, wait_slabs};
use crate::migration::{Pair, ends};
use crate::save::{at_work, verify, verify_at_work};

pub(crate) const TESTS: &[Test] = &[
    (
        "migration_to_a_host_without_outram_is_ended_there",
        without_outram,
    ),
    ("migration_that_is_refused_or_given_up_harms_nothing", fails),
];

/// A guest at work here that is to be moved, and what it holds at the server.
struct Moving<'a> {
    pair: &'a Pair,
    here: Guest,
    there: Guest,
    console: Console,
    reserved_bytes: u64,
}

impl<'a> Moving<'a> {
    fn start(lab: &Lab, pair: &'a Pair, name: &str) -> Result<Self> {
        let mut spec = Spec::new(name, ram_mib()?);
        spec.runs_while_taken = true;
        let here = lab.attach(spec, &HALF, &pair.server.address)?;
        let there = pair.there(&here);
        let console = at_work(&here)?;
        let reserved_bytes = reserved(pair)?;
        ensure!(reserved_bytes > 0, "the guest has room at the server");
        Ok(Self {
            pair,
            here,
            there,
            console,
            reserved_bytes,
        })
    }

    fn refused(&self, more: &[&str]) -> Result<Finished> {
        let moved = self.pair.migrate(&self.here, more)?;
        ensure!(!moved.success(), "it moved: {}", moved.line);
        Ok(moved)
    }

    /// The guest runs here, unharmed, and nothing of it there.
    fn stays(&mut self) -> Result<()> {
        ensure!(self.here.state()? == "running", "{}", self.here.state()?);
        self.there.wait_backend_gone(LONG)?;
        let left = self.there.place.virsh_ok(&["list", "--all", "--name"])?;
        ensure!(left.trim().is_empty(), "left there: {left}");
        wait_for("the destination's seat to be given back", LONG, || {
            Ok((reserved(self.pair)? == self.reserved_bytes).then_some(()))
        })?;
        verify_at_work(&mut self.console)
    }
}

fn reserved(pair: &Pair) -> Result<u64> {
    pair.server.metric("outram_memserver_reserved_bytes")
}

/// Where Outram is not set up, no hook runs that could refuse: QEMU waits there for a socket that
/// nobody makes, and `virsh migrate` with it. Ended there, it fails in words that name the socket.
fn without_outram(lab: &Lab) -> Result<()> {
    let pair = Pair::new(lab)?;
    let asked = ask_doctor(lab, &pair)?;
    ensure!(asked.contains("without calling Outram's hook"), "{asked}");
    let mut moving = Moving::start(lab, &pair, "staying")?;
    let (here, there) = (&moving.here, &moving.there);
    let waiting = std::thread::scope(|scope| {
        let migration = scope.spawn(|| moving.refused(&[]));
        let log = there.place.path("/var/log/libvirt/qemu/staying.log");
        let ended = wait_for("QEMU to look for the socket there", LONG, || {
            // libvirt makes the log as it starts QEMU.
            let log = fs::read_to_string(&log).unwrap_or_default();
            Ok(log.contains("/vhost.sock': No such file").then_some(()))
        });
        let running = here.state();
        // libvirt may find the domain gone by itself once QEMU has ended: that is no failure here.
        let destroyed = there.place.virsh(&["destroy", &here.uuid]);
        let waiting = migration.join().ok().context("the thread panicked")?;
        ended?;
        destroyed?;
        ensure!(
            running? == "running",
            "the guest runs while QEMU waits there"
        );
        waiting
    })?;
    ensure!(
        waiting.said().contains("/vhost.sock"),
        "the error names the socket: {}",
        waiting.said()
    );
    moving.stays()
}

fn fails(lab: &Lab) -> Result<()> {
    let pair = Pair::new(lab)?;
    pair.neighbour.set_up_outram(&lab.host)?;
    let asked = ask_doctor(lab, &pair)?;
    ensure!(asked.contains("' calls Outram's hook"), "{asked}");
    let mut moving = Moving::start(lab, &pair, "stubborn")?;

    let certificate = pair.neighbour.place.path("/etc/outram/pki/client.pem");
    let kept = fs::read(&certificate)?;
    fs::remove_file(&certificate)?;
    let refused = moving.refused(&[])?;
    fs::write(&certificate, kept)?;
    ensure!(refused.said().contains("client.pem"), "{}", refused.said());
    moving.stays().context("without a certificate there")?;

    // Post-copy needs a userfaultfd of QEMU's own over the same memory. Refused at once: were virsh's
    // timer to end meanwhile, virsh would forget the error.
    let refused = moving.refused(&["--postcopy", "--timeout", "60", "--timeout-postcopy"])?;
    ensure!(
        refused.said().contains("Postcopy is not supported"),
        "{}",
        refused.said()
    );
    moving.stays().context("after post-copy")?;

    give_up(&moving)?;
    moving.stays().context("after it was given up")?;

    // After all that, under another name, it goes.
    let renamed = ["--auto-converge", "--parallel", "--dname", "renamed"];
    let there = &moving.there;
    pair.move_there(&moving.here, there, &[&renamed[..], &ends()].concat())?;
    let name = there.place.virsh_ok(&["domname", &there.uuid])?;
    ensure!(name.trim() == "renamed", "{name}");
    let outram = lab.host.program("outram")?;
    let told = there.place.run_ok(&outram, &["status", "renamed"])?;
    ensure!(told.contains("renamed"), "{told}");
    let mut console = there.console()?;
    verify(&mut console)?;
    console.send("poweroff")?;
    there.wait_backend_gone(LONG)?;
    wait_slabs(&pair.server, |slabs| slabs == 0)
}

/// What is said of the destination beforehand; nothing may be left there by it.
fn ask_doctor(lab: &Lab, pair: &Pair) -> Result<String> {
    let uri = pair.neighbour.uri();
    let asked = lab.host.outram(&["doctor", "--migrate-to", &uri])?;
    let there = &pair.neighbour.place;
    let left = there.virsh_ok(&["list", "--all", "--name"])?;
    ensure!(left.trim().is_empty(), "left there: {left}");
    let told = there.run_ok(&lab.host.program("outram")?, &["status"])?;
    ensure!(
        told.trim() == "No domain has a backend.",
        "told of there: {told}"
    );
    Ok(asked.said())
}

/// A migration that is given up once it has moved something.
fn give_up(moving: &Moving<'_>) -> Result<()> {
    std::thread::scope(|scope| {
        // So slow that it cannot end before.
        let migration = scope.spawn(|| moving.refused(&["--bandwidth", "2"]));
        let name = moving.here.name();
        let begun = wait_for("the destination to hold a page", LONG, || {
            let status = moving.there.status_if_any();
            Ok(status.filter(|status| status.resident_bytes > 0))
        });
        let aborted = virsh(&["domjobabort", name]);
        let moved = migration.join().ok().context("the thread panicked")?;
        begun?;
        let aborted = aborted?;
        ensure!(aborted.success(), "{}", aborted.said());
        moved.map(drop)
    })
}
