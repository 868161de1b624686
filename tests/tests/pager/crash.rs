//! The backend is killed (SIGKILL), and another one takes its guest over.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use outram_wire::control::Phase;
use serde_json::json;

use crate::fixture::{Guest, LEAST, Lab, Stalls, Wish, demand_sound, halt};

pub(crate) const TESTS: &[crate::Test] = &[
    ("a_backend_killed_again_and_again", again_and_again),
    ("a_takeover_that_is_killed_itself", within),
    ("a_takeover_while_the_servers_are_out_of_reach", alone),
    ("a_limit_and_plugged_memory_outlive_the_backend", settings),
    ("a_record_of_an_unknown_version", unknown),
    ("slabs_that_are_gone_by_the_takeover", amnesia),
];

/// Written and mostly evicted by every test here.
pub(crate) const FILLED: u64 = 14_000;

/// Kills under load in 'make test'; `OUTRAM_SOAK_KILLS` says another number.
const KILLS: u64 = 200;

/// Kills while one load lasts.
const KILLS_A_LOAD: u64 = 20;

/// Longest time that the guest works in peace between two kills.
const PEACE_MOST_US: u64 = 60_000;

/// The vCPU that asks for a page that was never touched, which needs no server.
const ASKS_FOR_NEW: usize = 3;

/// The vCPU that asks for pages most of which lie on a server.
const ASKS_FOR_STORED: usize = 4;

/// Pages that it asks for: so many that one of them at least is not in memory.
const ASKED_FOR: u64 = 24;

fn from_environment(name: &str) -> Result<Option<u64>> {
    let Ok(value) = std::env::var(name) else {
        return Ok(None);
    };
    let number = value.parse();
    Ok(Some(number.with_context(|| format!("{name}={value}"))?))
}

/// Numbers that lie far from each other for numbers that lie side by side (Knuth, "The Art of
/// Computer Programming", 6.4: multiplicative hashing).
fn spread(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

pub(crate) fn filled(lab: &Lab, wish: &Wish<'_>) -> Result<Guest> {
    let mut guest = Guest::start(lab, wish)?;
    guest.fill(0, FILLED)?;
    Ok(guest)
}

/// All sorts of access to all that is filled, but for discards.
pub(crate) fn load(guest: &mut Guest, seconds: f64) -> Result<Vec<u64>> {
    let work = |page, seed, write_share| {
        json!({"page": page, "pages": 5000, "seconds": seconds, "write_share": write_share,
            "seed": seed})
    };
    Ok(vec![
        guest.send(0, "work", work(0, 1, 0.5))?,
        guest.send(1, "work", work(5000, 2, 0.1))?,
        guest.send(
            2,
            "race",
            json!({"page": 10_000, "pages": 4000, "writers": 1, "readers": 1,
                "rounds": (1500.0 * seconds) as u64}),
        )?,
    ])
}

pub(crate) fn demand_answers(guest: &mut Guest, sent: Vec<u64>) -> Result<()> {
    for id in sent {
        demand_sound(&guest.answer(id)?)?;
    }
    guest.verify(0, FILLED)
}

/// At any instant of heavy paging: the guest stalls and goes on.
fn again_and_again(lab: &Lab) -> Result<()> {
    let kills = from_environment("OUTRAM_SOAK_KILLS")?.unwrap_or(KILLS);
    let seed = from_environment("OUTRAM_KILL_SEED")?.unwrap_or(1);
    println!("killing a backend {kills} times (OUTRAM_KILL_SEED={seed})");
    let random = |kill: u64, below: u64| spread((seed << 32) + kill) % below;
    let server = lab.server()?;
    let wish = Wish {
        servers: &[&server.address],
        vcpus: 5,
        ..Wish::default()
    };
    let mut guest = filled(lab, &wish)?;
    let untouched = guest.pages() - FILLED;
    let (mut new, mut stored) = (Stalls::default(), Stalls::default());
    let mut sent = Vec::new();
    for kill in 0..kills {
        if kill % KILLS_A_LOAD == 0 {
            demand_answers(&mut guest, std::mem::take(&mut sent))?;
            sent = load(&mut guest, 3.0)?;
        }
        std::thread::sleep(Duration::from_micros(random(kill, PEACE_MOST_US)));
        guest.kill_backend()?;
        let killed = Instant::now();
        guest.spawn_backend_again(lab, &wish)?;
        let page = FILLED + kill % untouched;
        let touch = guest.send(ASKS_FOR_NEW, "touch", json!({"page": page, "pages": 1}))?;
        let page = random(kill, FILLED - ASKED_FOR);
        let touch_stored = json!({"page": page, "pages": ASKED_FOR});
        let touch_stored = guest.send(ASKS_FOR_STORED, "touch", touch_stored)?;
        guest.answer(touch)?;
        new.0.push(killed.elapsed());
        guest.answer(touch_stored)?;
        stored.0.push(killed.elapsed());
    }
    demand_answers(&mut guest, sent)?;
    println!(
        "{kills} kills; from the kill until a fault was answered that needs no server: {new}; \
         until {ASKED_FOR} pages were there, most of them from a server: {stored}"
    );
    guest.wait_serving()?;
    guest.connect()?;
    guest.squeeze()?;
    guest.verify(0, FILLED)?;
    guest.end(&[&server])
}

/// Killed within recovery, twice in a row and more.
fn within(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let wish = Wish {
        servers: &[&server.address],
        ..Wish::default()
    };
    let mut guest = filled(lab, &wish)?;
    let sent = load(&mut guest, 1.5)?;
    for round in 0..6 {
        guest.kill_backend()?;
        for attempt in 0..4 {
            guest.spawn_backend_again(lab, &wish)?;
            std::thread::sleep(Duration::from_millis(3 + 5 * attempt + 2 * round));
            guest.kill_backend()?;
        }
        guest.take_over(lab, &wish)?;
    }
    demand_answers(&mut guest, sent)?;
    guest.end(&[&server])
}

/// Faults that need no server are answered without one; the others when it is back.
fn alone(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let wish = Wish {
        servers: &[&server.address],
        ..Wish::default()
    };
    let mut guest = filled(lab, &wish)?;
    guest.settle()?;
    halt(&server)?;
    guest.kill_backend()?;
    guest.take_over(lab, &wish)?;
    guest.fill(FILLED, 100)?;
    guest.verify(FILLED, 100)?;
    let all = guest.send(1, "verify", json!({"page": 0, "pages": FILLED}))?;
    guest.wait_status("the stall to be told", |status| {
        status.phase == Phase::Stalled && status.waiting_faults > 0
    })?;
    server.signal(Signal::SIGCONT)?;
    demand_sound(&guest.answer(all)?)?;
    guest.end(&[&server])
}

/// What was changed since the start is as it was: not as the arguments say.
fn settings(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let wish = Wish {
        limit: 2 * LEAST,
        hot_plug_mib: 32,
        servers: &[&server.address],
        ..Wish::default()
    };
    let mut guest = filled(lab, &wish)?;
    guest
        .vmm
        .command(json!({"do": "plug", "bytes": 32 << 20}))?;
    guest.wait_status("the plugged memory to be taken over", |status| {
        status.ram_bytes == 96 << 20
    })?;
    guest.fill(16_384, 8192)?;
    guest.squeeze()?;
    guest.kill_backend()?;
    guest.take_over(lab, &wish)?;
    let status = guest.status()?;
    ensure!(status.limit_bytes == LEAST, "{status:#?}");
    ensure!(status.ram_bytes == 96 << 20, "{status:#?}");
    guest.verify(0, FILLED)?;
    guest.verify(16_384, 8192)?;
    guest.connect()?;
    guest.vmm.command(json!({"do": "unplug"}))?;
    guest.wait_status("the memory to leave", |status| status.ram_bytes == 64 << 20)?;
    guest.kill_backend()?;
    guest.take_over(lab, &wish)?;
    ensure!(guest.status()?.ram_bytes == 64 << 20);
    guest.verify(0, FILLED)?;
    guest.end(&[&server])
}

/// What this build does not know it leaves alone, so that one that does can go on.
fn unknown(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let wish = Wish {
        servers: &[&server.address],
        ..Wish::default()
    };
    let mut guest = filled(lab, &wish)?;
    guest.kill_backend()?;
    let path = guest.dir.join("state/record");
    let record = fs::read_to_string(&path)?;
    fs::write(&path, record.replacen("\"version\":1", "\"version\":9", 1))?;
    let refused = guest.take_over(lab, &wish).err().context("taken over")?;
    let refused = format!("{refused:#}");
    ensure!(refused.contains("version"), "no reason: {refused}");
    fs::write(&path, record)?;
    guest.take_over(lab, &wish)?;
    guest.verify(0, FILLED)?;
    guest.end(&[&server])
}

/// A server that was started anew meanwhile has nothing: what lay there is lost, and never made up.
fn amnesia(lab: &Lab) -> Result<()> {
    let mut server = lab.server()?;
    let address = server.address.clone();
    let wish = Wish {
        servers: &[&address],
        ..Wish::default()
    };
    let mut guest = filled(lab, &wish)?;
    guest.settle()?;
    ensure!(server.slabs_leased()? > 4, "too little lies there");
    guest.kill_backend()?;
    server.kill()?;
    server.start_again()?;
    guest.take_over(lab, &wish)?;
    guest.wait_status("the loss to be noticed", |status| status.lost_bytes > 0)?;
    let all = guest.send(1, "verify", json!({"page": 0, "pages": FILLED}))?;
    guest.wait_status("the guest to be stopped", |status| {
        status.phase == Phase::Stopped
    })?;
    guest.demand_silence(all)?;
    guest.kill(&[&server])
}
