//! Pre-copy live migration between two libvirtd, each on a machine of its own, with the checker at
//! work throughout.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::command::{Finished, run_within};
use outram_tests::hermetic::console::Console;
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::host::Acceleration;
use outram_tests::hermetic::neighbour::{FIRST_ADDRESS, Neighbour, SECOND_ADDRESS};
use outram_tests::hermetic::sampler::{Sampler, Stated};
use outram_tests::hermetic::server::MemServer;

use crate::Test;
use crate::far_disk::{demand_no_error, demand_same};
use crate::fixture::{HALF, LONG, Lab, demand_no_mismatch, images, power_off, ram_mib};
use crate::save::{at_work, backend_arguments, timed, verify, verify_at_work};

pub(crate) const TESTS: &[Test] = &[
    (
        "live_migration_there_and_back_keeps_every_page",
        there_and_back,
    ),
    ("far_disk_moves_with_its_guest", disk_moves),
];

/// A checker on a busy machine stores faster than its pages travel: after so many seconds, in which
/// QEMU's start at the destination counts too, libvirt suspends it for the rest, as an operator would
/// have it. Under KVM, where stores on the way are what is to be seen, later: in the lab guest that
/// start alone takes one minute or two, and each page its milliseconds.
pub(crate) fn ends() -> [&'static str; 3] {
    let seconds = match Acceleration::wanted() {
        Acceleration::Emulated => "15",
        Acceleration::Kvm => "240",
    };
    ["--timeout", seconds, "--timeout-suspend"]
}

/// Longest a migration may take, with a busy machine and the lab guest in mind.
const MOVING: Duration = Duration::from_secs(900);

/// The definition moves too.
const MOVES: [&str; 2] = ["--persistent", "--undefinesource"];

/// Two machines with a memory server that both reach.
pub(crate) struct Pair {
    pub(crate) neighbour: Neighbour,
    pub(crate) server: MemServer,
}

impl Pair {
    pub(crate) fn new(lab: &Lab) -> Result<Self> {
        Ok(Self {
            neighbour: Neighbour::start(&lab.host, &images())?,
            server: MemServer::start_at(&lab.host, FIRST_ADDRESS, "3GiB", 4)?,
        })
    }

    pub(crate) fn there(&self, guest: &Guest) -> Guest {
        guest.at(&self.neighbour.place)
    }

    /// `virsh migrate` from here to there, with further words.
    pub(crate) fn migrate(&self, guest: &Guest, more: &[&str]) -> Result<Finished> {
        let (uri, line) = (self.neighbour.uri(), format!("tcp://{SECOND_ADDRESS}"));
        let mut words = vec!["migrate", "--live", guest.name(), &uri];
        words.extend(["--migrateuri", &line, "--listen-address", SECOND_ADDRESS]);
        words.extend(more);
        run_within(MOVING, "virsh", &words)
    }

    /// Moves a guest there; it runs there then.
    pub(crate) fn move_there(&self, here: &Guest, there: &Guest, more: &[&str]) -> Result<()> {
        here.taken_live(there, || demand(self.migrate(here, more)?))
    }

    /// Moves a guest from there to here; it runs here then.
    fn move_back(&self, here: &Guest, there: &Guest, more: &[&str]) -> Result<()> {
        let (uri, line) = (Neighbour::first_uri(), format!("tcp://{FIRST_ADDRESS}"));
        let mut words = vec!["migrate", "--live", here.name(), &uri];
        words.extend(["--migrateuri", &line, "--listen-address", FIRST_ADDRESS]);
        words.extend(more);
        let place = &self.neighbour.place;
        there.taken_live(here, || demand(place.run_within(MOVING, "virsh", &words)?))
    }
}

fn demand(finished: Finished) -> Result<()> {
    ensure!(finished.success(), "{}: {}", finished.line, finished.said());
    Ok(())
}

fn came_by_migration(guest: &Guest) -> Result<bool> {
    let arguments = backend_arguments(guest)?;
    Ok(arguments.iter().any(|word| word == "--incoming=migration"))
}

/// Verifies where the guest is now.
fn checked_there(guest: &Guest) -> Result<Console> {
    let mut console = guest.console()?;
    verify_at_work(&mut console)?;
    Ok(console)
}

fn there_and_back(lab: &Lab) -> Result<()> {
    let pair = Pair::new(lab)?;
    pair.neighbour.set_up_outram(&lab.host)?;
    let mut spec = Spec::new("moving", ram_mib()?);
    spec.runs_while_taken = true;
    let here = lab.attach(spec, &HALF, &pair.server.address)?;
    let there = pair.there(&here);
    let source = Sampler::start(&here);
    drop(at_work(&here)?);
    let stated = Stated::of(&here)?;
    source.judge(stated);

    let destination = Sampler::start(&there);
    destination.judge_from_now(stated);
    timed("migration at 0.5", || {
        pair.move_there(&here, &there, &[&MOVES[..], &ends()].concat())
    })?;
    ensure!(came_by_migration(&there)?, "the hook told the backend");
    source.finish().context("at the source")?;
    here.wait_backend_gone(LONG)?;
    let left = here.place.virsh_ok(&["list", "--all", "--name"])?;
    ensure!(left.trim().is_empty(), "undefined at the source: {left}");
    drop(checked_there(&there)?);
    destination.finish().context("at the destination")?;

    let back = Sampler::start(&here);
    back.judge_from_now(stated);
    pair.move_back(&here, &there, &[&MOVES[..], &ends()].concat())?;
    there.wait_backend_gone(LONG)?;
    let mut console = checked_there(&here)?;
    back.finish().context("back again")?;
    verify(&mut console)?;
    power_off(&here, &mut console, &pair.server)
}

/// What the guest wrote to its far-memory disk is there after each move, and writable; the server
/// keeps one copy of it throughout.
fn disk_moves(lab: &Lab) -> Result<()> {
    const FILES: u64 = 16;
    let pair = Pair::new(lab)?;
    pair.neighbour.set_up_outram(&lab.host)?;
    let limit = ["--local-ratio", "0.3", "--disk-size", "1GiB"];
    let here = lab.attach(Spec::new("disk-mover", 256), &limit, &pair.server.address)?;
    let there = pair.there(&here);
    let mut console = here.boot()?;
    console.ask("alloc 40", "ALLOCATED", LONG)?;
    console.ask("fs-make", "FS", LONG)?;
    console.ask(&format!("fs-write {FILES} 1"), "FS", LONG)?;
    let stored = demand_no_error(&here)?.stored_bytes;
    ensure!(
        stored >= FILES << 19,
        "files lie on the disk: {stored} bytes"
    );
    drop(console);

    pair.move_there(&here, &there, &[&MOVES[..], &ends()].concat())?;
    here.wait_backend_gone(LONG)?;
    let mut console = there.console()?;
    demand_same(&console.ask(&format!("fs-verify {FILES} 1"), "FS", LONG)?)?;
    let moved = demand_no_error(&there)?.stored_bytes;
    ensure!(
        moved >= FILES << 19,
        "claimed as it was: {moved} bytes, before {stored}"
    );
    console.ask(&format!("fs-write {FILES} 2"), "FS", LONG)?;
    drop(console);

    pair.move_back(&here, &there, &[&MOVES[..], &ends()].concat())?;
    there.wait_backend_gone(LONG)?;
    let mut console = here.console()?;
    demand_same(&console.ask(&format!("fs-verify {FILES} 2"), "FS", LONG)?)?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    demand_no_error(&here)?;
    here.destroy()?;
    here.wait_backend_gone(LONG)
}
