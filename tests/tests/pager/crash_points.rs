//! The backend dies at every instant that has a name (`outram_backend::crash_points`), and another
//! one takes its guest over.
//!
//! Each point belongs to a scenario in which it is passed; one that is never reached fails, and so
//! does one after which a page of the guest is not as it was last stored.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use outram_backend::crash_points::Point;
use outram_wire::control::Request;
use serde_json::json;

use crate::fixture::{Guest, LEAST, LEAST_HUGE, LONG, Lab, Lender, SLAB, Wish, demand_sound};
use crate::{disk, huge};

pub(crate) const TESTS: &[crate::Test] = &[
    ("crash_points_of_pages", pages),
    ("crash_points_of_stores_to_what_was_read", stores),
    ("crash_points_of_leases", leases),
    ("crash_points_of_vacating", vacating),
    ("crash_points_of_discards", discards),
    ("crash_points_of_tune", tune),
    ("crash_points_of_plugging", plugging),
    ("crash_points_of_unplugging", unplugging),
    ("crash_points_of_homing", homing),
    ("crash_points_of_attach", attach),
    ("crash_points_of_the_disk", requests),
    ("crash_points_of_recovery", recovery),
];

/// Written and mostly evicted.
const FILLED: u64 = 14_000;

/// Pages behind them, most of which nobody has touched.
const ZEROS: u64 = 2000;

/// Loads, of half a second each, in which a point has to be reached.
const LOADS_MOST: u64 = 40;

/// Times that something is asked of a backend that may not listen yet, with a pause in between.
const TRIES_MOST: u32 = 2000;

/// In what a point is passed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scenario {
    Pages,
    Stores,
    Leases,
    Vacating,
    Discards,
    Tune,
    Plugging,
    Unplugging,
    Homing,
    Attach,
    Disk,
    Recovery,
}

/// Without a wildcard: a new point has to be put somewhere.
fn scenario(point: Point) -> Scenario {
    match point {
        Point::EntryHalfWritten
        | Point::EvictBusy
        | Point::EvictProtected
        | Point::EvictStaged
        | Point::EvictHalfDecided
        | Point::EvictDecided
        | Point::EvictPunched
        | Point::EvictEnded
        | Point::EvictSettled
        | Point::WritePlaced
        | Point::WriteSent
        | Point::WriteAcknowledged
        | Point::WriteStored
        | Point::FetchAsked
        | Point::FetchCopied
        | Point::FetchMarked
        | Point::TakeBackCopied
        | Point::TakeBackMarked
        | Point::ZeroMade
        | Point::ZeroMarked
        | Point::FilledCopied
        | Point::FilledMarked => Scenario::Pages,
        Point::UnprotectMarked | Point::Unprotected => Scenario::Stores,
        Point::LeaseAsked | Point::LeaseGranted | Point::LeaseRecorded => Scenario::Leases,
        Point::VacateAsked | Point::MoveStaged | Point::MoveMarked => Scenario::Vacating,
        Point::DiscardRead | Point::DiscardApplied | Point::LeaseReturned => Scenario::Discards,
        Point::FileWritten | Point::TunePromised | Point::TuneSettled | Point::TuneRecorded => {
            Scenario::Tune
        }
        Point::PlugRecorded | Point::PlugWatched | Point::PlugTold => Scenario::Plugging,
        Point::UnplugTold | Point::UnplugDone => Scenario::Unplugging,
        Point::HomingBegun
        | Point::HomingDone
        | Point::HomingShardReleased
        | Point::HomingReleased
        | Point::HomingRecordGone => Scenario::Homing,
        Point::AttachInjected
        | Point::AttachRecorded
        | Point::AttachWatched
        | Point::AttachReady => Scenario::Attach,
        Point::RequestTaken | Point::RequestDone => Scenario::Disk,
        Point::RecoverOpened
        | Point::RecoverFetched
        | Point::RecoverWatched
        | Point::RecoverFirstEntry
        | Point::RecoverTable
        | Point::RecoverStaging
        | Point::RecoverSessions
        | Point::RecoverThreads
        | Point::RecoverWoken => Scenario::Recovery,
    }
}

fn points_of(wanted: Scenario) -> impl Iterator<Item = Point> {
    let points = Point::ALL.iter().copied();
    points.filter(move |point| scenario(*point) == wanted)
}

/// The same wish for a backend that dies at a point.
fn dying<'a>(wish: &Wish<'a>, point: Point) -> Wish<'a> {
    Wish {
        dies_at: Some(point),
        ..wish.clone()
    }
}

/// Goes through the points of a scenario, and says at which one something was wrong.
fn each(wanted: Scenario, mut test: impl FnMut(Point) -> Result<()>) -> Result<()> {
    for point in points_of(wanted) {
        test(point).with_context(|| format!("dying at '{}'", point.name()))?;
    }
    Ok(())
}

/// Half a second of all sorts of accesses, but for discards.
fn load(guest: &mut Guest, round: u64) -> Result<Vec<u64>> {
    let work = |page, share| json!({"page": page, "pages": 5000, "seconds": 0.5, "write_share": share, "seed": round});
    // Some that were never touched, and those before, which are full of zeros.
    let zeros = json!({"page": FILLED, "pages": (8 + 8 * round).min(ZEROS)});
    Ok(vec![
        guest.send(0, "work", work(0, 0.5))?,
        guest.send(1, "work", work(5000, 0.1))?,
        guest.send(
            2,
            "work",
            json!({"page": 10_000, "pages": FILLED - 10_000, "seconds": 0.5}),
        )?,
        guest.send(3, "touch", zeros)?,
    ])
}

fn wish<'a>(servers: &'a [&'a str]) -> Wish<'a> {
    Wish {
        servers,
        vcpus: 4,
        ..Wish::default()
    }
}

fn filled(lab: &Lab, wish: &Wish<'_>) -> Result<Guest> {
    let mut guest = Guest::start(lab, wish)?;
    guest.fill(0, FILLED)?;
    Ok(guest)
}

/// Waits for the answers to a load, which wait for a backend's successor where it dies meanwhile; whether
/// it did.
fn is_outlived(guest: &mut Guest, sent: Vec<u64>, lab: &Lab, wish: &Wish<'_>) -> Result<bool> {
    let moment = Duration::from_millis(20);
    let deadline = Instant::now() + LONG;
    let mut awaited = sent.into_iter().peekable();
    let mut has_died = false;
    loop {
        let is_last_look = awaited.peek().is_none();
        if let Some(id) = awaited.peek()
            && let Some(answer) = guest.vmm.poll(*id)?
        {
            demand_sound(&answer)?;
            awaited.next();
        } else if guest.dies_within(moment)? {
            has_died = true;
            guest.take_over(lab, wish)?;
        } else if is_last_look {
            return Ok(has_died);
        }
        ensure!(Instant::now() < deadline, "no answer\n{}", guest.log());
    }
}

fn pages(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let servers = [server.address.as_str()];
    let wish = wish(&servers);
    let mut guest = filled(lab, &wish)?;
    let mut round = 0;
    each(Scenario::Pages, |point| {
        guest.kill_backend()?;
        guest.spawn_backend_again(lab, &dying(&wish, point))?;
        let last = round + LOADS_MOST;
        loop {
            let sent = load(&mut guest, round)?;
            round += 1;
            let has_died = is_outlived(&mut guest, sent, lab, &wish)?;
            if has_died {
                return guest.verify(0, FILLED);
            }
            ensure!(round < last, "it is never reached");
        }
    })?;
    guest.connect()?;
    guest.verify(FILLED, ZEROS)?;
    guest.end(&[&server])
}

/// Huge pages that are read come back write-protected: stores to them are faults.
fn stores(lab: &Lab) -> Result<()> {
    let server = huge::server(lab)?;
    let servers = [server.address.as_str()];
    let wish = huge::wish(&servers, LEAST_HUGE, false);
    let pages = huge::RAM_PAGES;
    let (_pool, mut guest) = huge::start(lab, &wish)?;
    guest.fill(0, pages)?;
    each(Scenario::Stores, |point| {
        guest.kill_backend()?;
        guest.take_over(lab, &dying(&wish, point))?;
        let work = json!({"page": 0, "pages": pages, "seconds": 4.0, "write_share": 0.5});
        let sent = guest.send(0, "work", work)?;
        guest.wait_death()?;
        guest.take_over(lab, &wish)?;
        demand_sound(&guest.answer(sent)?)?;
        guest.verify(0, pages)
    })?;
    guest.connect()?;
    guest.end(&[&server])
}

fn leases(lab: &Lab) -> Result<()> {
    each(Scenario::Leases, |point| {
        let server = lab.server()?;
        let servers = [server.address.as_str()];
        let wish = wish(&servers);
        let mut guest = Guest::start(lab, &dying(&wish, point))?;
        let fill = guest.send(0, "fill", json!({"page": 0, "pages": FILLED}))?;
        guest.wait_death()?;
        guest.take_over(lab, &wish)?;
        guest.answer(fill)?;
        guest.verify(0, FILLED)?;
        guest.connect()?;
        guest.end(&[&server])
    })
}

/// A server wants its memory back.
fn vacating(lab: &Lab) -> Result<()> {
    each(Scenario::Vacating, |point| {
        let shrinking = Lender::start(lab, point.name(), 1 << 30)?;
        let other = lab.server()?;
        let servers = [shrinking.server.address.as_str(), other.address.as_str()];
        let wish = wish(&servers);
        let mut guest = filled(lab, &wish)?;
        guest.kill_backend()?;
        guest.take_over(lab, &dying(&wish, point))?;
        let sent = load(&mut guest, 0)?;
        shrinking.lend(2 * SLAB)?;
        guest.wait_death()?;
        guest.take_over(lab, &wish)?;
        shrinking.wait_vacated(&guest)?;
        for id in sent {
            demand_sound(&guest.answer(id)?)?;
        }
        guest.verify(0, FILLED)?;
        guest.connect()?;
        guest.end(&[&shrinking.server, &other])
    })
}

/// What was read of a discard and is in no table yet is forgotten: the guest may find what it gave
/// back. It gives it back once more, and finds zeros.
fn discards(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let servers = [server.address.as_str()];
    let wish = wish(&servers);
    let mut guest = filled(lab, &wish)?;
    let discard = json!({"page": 0, "pages": 12_000});
    each(Scenario::Discards, |point| {
        guest.settle()?;
        guest.kill_backend()?;
        guest.take_over(lab, &dying(&wish, point))?;
        guest.send(0, "discard", discard.clone())?;
        guest.wait_death()?;
        guest.take_over(lab, &wish)?;
        guest.command(0, "discard", discard.clone())?;
        guest.verify(0, FILLED)?;
        guest.fill(0, FILLED)
    })?;
    guest.connect()?;
    guest.end(&[&server])
}

fn tune(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let servers = [server.address.as_str()];
    let wish = wish(&servers);
    let mut guest = filled(lab, &wish)?;
    let mut limit = LEAST;
    each(Scenario::Tune, |point| {
        let next = 3 * LEAST - limit;
        guest.kill_backend()?;
        guest.spawn_backend_again(lab, &dying(&wish, point))?;
        // It may not listen yet, or die of a slab that it notes down.
        let mut tries = 0;
        while !guest.dies_within(Duration::from_millis(10))? {
            tries += 1;
            ensure!(guest.tune(next).is_err() && tries < TRIES_MOST, "it lives");
        }
        guest.take_over(lab, &wish)?;
        let found = guest.status()?.limit_bytes;
        ensure!(found == limit || found == next, "a limit of {found}");
        let is_recorded = point == Point::TuneRecorded;
        ensure!(!is_recorded || found == next, "a limit of {found}");
        limit = found;
        guest.verify(0, FILLED)
    })?;
    guest.squeeze()?;
    guest.connect()?;
    guest.end(&[&server])
}

/// Commands the VMM, whose disk may fail at it: its backend dies.
fn command(guest: &mut Guest, what: serde_json::Value) -> Result<()> {
    let id = guest.vmm.send(what)?;
    let _ = guest.vmm.wait(id, LONG);
    Ok(())
}

fn plug(guest: &mut Guest) -> Result<()> {
    command(guest, json!({"do": "plug", "bytes": 32 << 20}))
}

fn wait_ram(guest: &Guest, mib: u64) -> Result<()> {
    let wanted = mib << 20;
    guest.wait_status("the RAM to be as plugged", |status| {
        status.ram_bytes == wanted
    })?;
    Ok(())
}

fn plugging(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let servers = [server.address.as_str()];
    each(Scenario::Plugging, |point| {
        let wish = Wish {
            hot_plug_mib: 32,
            ..wish(&servers)
        };
        let mut guest = filled(lab, &wish)?;
        guest.kill_backend()?;
        guest.take_over(lab, &dying(&wish, point))?;
        guest.connect()?;
        plug(&mut guest)?;
        guest.wait_death()?;
        guest.take_over(lab, &wish)?;
        guest.connect()?;
        wait_ram(&guest, 96)?;
        guest.fill(16_384, 8192)?;
        guest.squeeze()?;
        guest.verify(16_384, 8192)?;
        guest.verify(0, FILLED)?;
        guest.end(&[&server])
    })
}

fn unplugging(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let servers = [server.address.as_str()];
    each(Scenario::Unplugging, |point| {
        let wish = Wish {
            hot_plug_mib: 32,
            ..wish(&servers)
        };
        let mut guest = filled(lab, &wish)?;
        plug(&mut guest)?;
        wait_ram(&guest, 96)?;
        guest.fill(16_384, 8192)?;
        guest.kill_backend()?;
        guest.take_over(lab, &dying(&wish, point))?;
        guest.connect()?;
        command(&mut guest, json!({"do": "unplug"}))?;
        guest.wait_death()?;
        guest.take_over(lab, &wish)?;
        wait_ram(&guest, 64)?;
        guest.verify(0, FILLED)?;
        guest.connect()?;
        guest.end(&[&server])
    })
}

fn homing(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let servers = [server.address.as_str()];
    each(Scenario::Homing, |point| {
        let wish = wish(&servers);
        let mut guest = filled(lab, &wish)?;
        guest.kill_backend()?;
        guest.take_over(lab, &dying(&wish, point))?;
        let mut control = guest.control()?;
        while let Ok(status) = match control.order(Request::BringHome) {
            Ok(()) | Err(_) => control.status(),
        } {
            if status.homing.is_some_and(|homing| homing.home) {
                ensure!(control.order(Request::Release).is_err(), "it lives");
                break;
            }
        }
        guest.wait_death()?;
        // Where nothing was left to be taken over, it is handed over anew.
        guest.attach_again(lab, &wish)?;
        guest.wait_serving()?;
        guest.verify(0, FILLED)?;
        guest.fill(0, FILLED)?;
        guest.squeeze()?;
        guest.verify(0, FILLED)?;
        guest.end(&[&server])
    })
}

/// A guest that starts, and one that runs already.
fn attach(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let servers = [server.address.as_str()];
    each(Scenario::Attach, |point| {
        for early in [0, 6000] {
            let wish = wish(&servers);
            let mut guest =
                Guest::start_unconnected(lab, &dying(&wish, point), |vmm| match early {
                    0 => Ok(()),
                    pages => vmm
                        .command(json!({"do": "fill", "page": 0, "pages": pages}))
                        .map(drop),
                })?;
            if guest.connect().is_ok() {
                bail!("it lives");
            }
            guest.wait_death()?;
            // Nobody pages it, or somebody has to.
            let writes = guest.send(0, "fill", json!({"page": early, "pages": 100}))?;
            guest.attach_again(lab, &wish)?;
            guest.wait_serving()?;
            guest.answer(writes)?;
            guest.fill(early + 100, FILLED - early - 100)?;
            guest.squeeze()?;
            guest.verify(0, FILLED)?;
            guest.end(&[&server])?;
        }
        Ok(())
    })
}

/// The guest asks again, as a front end does whose backend comes back; its memory is as it was.
fn requests(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let servers = [server.address.as_str()];
    let wish = wish(&servers);
    let mut guest = Guest::start(lab, &wish)?;
    disk::push_out(&mut guest)?;
    each(Scenario::Disk, |point| {
        guest.kill_backend()?;
        guest.take_over(lab, &dying(&wish, point))?;
        guest.connect()?;
        disk::start_queue(&mut guest, 0)?;
        let asked = disk::send_request(&mut guest, 100)?;
        guest.wait_death()?;
        guest.take_over(lab, &wish)?;
        let _ = guest.answer(asked);
        guest.connect()?;
        disk::start_queue(&mut guest, 0)?;
        let asked = disk::send_request(&mut guest, 120_000)?;
        let answer = guest.answer(asked)?;
        ensure!(answer["status"] == 0, "the request failed: {answer}");
        guest.verify(disk::MEMORY, disk::PAGES)
    })?;
    guest.end(&[&server])
}

/// Twice in a row at each.
fn recovery(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let servers = [server.address.as_str()];
    let wish = wish(&servers);
    let mut guest = filled(lab, &wish)?;
    let mut round = 0;
    each(Scenario::Recovery, |point| {
        let sent = load(&mut guest, round)?;
        round += 1;
        guest.kill_backend()?;
        for _ in 0..2 {
            guest.spawn_backend_again(lab, &dying(&wish, point))?;
            guest.wait_death()?;
        }
        guest.take_over(lab, &wish)?;
        for id in sent {
            demand_sound(&guest.answer(id)?)?;
        }
        guest.verify(0, FILLED)
    })?;
    guest.connect()?;
    guest.end(&[&server])
}
