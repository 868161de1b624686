//! Outram's own figures: what a fault of a remote page costs the vCPU that meets it, what paging costs
//! everybody, and how fast a limit is reached.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use outram_wire::control::Status;
use outram_wire::units::PageSize;
use serde_json::{Value, json};

use super::bill::{Bill, Meter, WIRE_PER_USEFUL};
use super::session::Session;
use super::statistics::Latencies;
use crate::small_lab::{Guest, LEAST_HUGE, PAGE};

/// Name of a fault that 2 MiB come for.
pub const HUGE_FAULT: &str = "remote fault of a huge page";

/// Name of the figure that is how far a limit falls.
pub const TUNED_BY: &str = "tuned down by";
/// ... of how fast it is reached, in pages; what is measured meanwhile has it in its name.
pub const TUNING: &str = "tuning down";
/// Names of what a vCPU notices of a limit that falls.
pub const HELD_AT_REST: &str = "held page, at rest";
/// The same, meanwhile.
pub const HELD_MEANWHILE: &str = "held page, tuning down";
/// Where it uses pages that are on the server.
pub const FAULT_AT_REST: &str = "remote fault, before tuning down";
/// The same, meanwhile.
pub const FAULT_MEANWHILE: &str = "remote fault, tuning down";

/// Faults that are measured at a time beside something else.
const BESIDE_FAULTS: u64 = 100;
/// The same beside a limit that falls, and how many there are before: looking for pages that are not there takes
/// longer than a fault, and the first of them find threads asleep.
const TUNING_FAULTS: u64 = 250;
const TUNING_SKIPPED: u64 = 10;
/// How often so many are, or pages are held, before a limit falls: the longest time of all is compared as well.
const AT_REST: usize = 10;
/// MiB that are on the server then.
const AWAY_MIB: u64 = 32;

/// How often pages are made to come and go at the limit before that is measured.
const MOST_WARMUPS: u64 = 8;

/// Pages that a vCPU holds on to while its guest shrinks.
const HELD_PAGES: u64 = 256;
/// MiB that stay beside what a guest is tuned down by.
const REST_MIB: u64 = 64;
/// How long pages are held at a time.
const HOLD_SECONDS: f64 = 0.2;
/// Between two looks at a guest's status.
const GLANCE: Duration = Duration::from_millis(5);
/// The same while a limit falls, which takes most of a second at least: a look costs the helper a quarter of a
/// millisecond, on the processor that evicts.
const TUNING_GLANCE: Duration = Duration::from_millis(10);
/// Longest wait for anything but a workload.
const PATIENCE: Duration = Duration::from_secs(300);

/// What a guest, its helper and the server have used up to now.
fn bill(session: &Session, guest: &Guest) -> Result<Bill> {
    Bill::now(session.server.pid(), &[Meter::of(guest)])
}

/// Notes what was used between two bills, by GiB of these pages.
fn note(session: &mut Session, what: &str, before: &Bill, after: &Bill, pages: u64) {
    for (name, unit, value) in after.costs(before, pages) {
        session
            .results
            .note(&format!("{what}: {name}"), unit, value);
    }
    let name = format!("{what}: {WIRE_PER_USEFUL}");
    let wire = after.wire_bytes_per_byte(before, pages);
    session.results.note(&name, "", wire);
}

/// Faults of a guest whose pages are stored remotely: alone with room for them, at the limit, and one
/// after the other in the order of their addresses.
pub fn measure_faults(session: &mut Session, round: usize) -> Result<()> {
    let mib = session.settings.fault_mib;
    let mut guest = session.guest(mib, 2, mib << 20)?;
    let pages = guest.pages();
    command(&mut guest, "fill", json!({"page": 0, "pages": pages}))?;
    evict(session, &guest, "eviction of dirty pages")?;

    // With room for what comes, nothing has to leave meanwhile.
    guest.tune(mib << 20)?;
    probe_by_floor(session, &mut guest, round, "remote fault")?;
    squeeze_and_settle(&guest)?;
    have_clean_ones_leave(session, &mut guest)?;
    probe_by_floor(session, &mut guest, round, "remote fault at the limit")?;
    squeeze_and_settle(&guest)?;
    guest.tune(mib << 20)?;
    read_in_order(session, &mut guest, "remote pages read in order")?;
    squeeze_and_settle(&guest)?;
    guest.tune(mib << 20)?;
    probe_beside(session, &mut guest, round)?;
    guest.end(&[&session.server])
}

/// All pages that may leave, at once.
fn evict(session: &mut Session, guest: &Guest, what: &str) -> Result<()> {
    let least = guest.least();
    let before = bill(session, guest)?;
    guest.tune(least)?;
    // Looked for more often than tests do, whose pauses would be a good part of what is measured.
    wait_for(guest, |status| {
        status.resident_bytes <= least && status.staged_bytes == 0
    })?;
    let after = bill(session, guest)?;
    let evicted = after.rise(&before, |counters| counters.writeback_pages);
    note(session, what, &before, &after, base_pages(guest, evicted));
    Ok(())
}

/// Base pages that so many of the guest's are, which its backend counts.
fn base_pages(guest: &Guest, count: u64) -> u64 {
    count * (guest.page_size().bytes() / PAGE)
}

fn wait_for(guest: &Guest, wanted: impl Fn(&Status) -> bool) -> Result<()> {
    let began = Instant::now();
    while !wanted(&guest.status()?) {
        ensure!(began.elapsed() < PATIENCE, "{}", guest.log());
        std::thread::sleep(GLANCE);
    }
    Ok(())
}

pub(super) fn squeeze_and_settle(guest: &Guest) -> Result<Status> {
    guest.squeeze()?;
    guest.settle()
}

/// Name of the floor that was measured right before and after these faults.
pub fn floor_beside(fault: &str) -> String {
    format!("{fault}: uffd + wire")
}

/// One fault at a time, between two looks at what is the least that it takes.
fn probe_by_floor(
    session: &mut Session,
    guest: &mut Guest,
    round: usize,
    name: &str,
) -> Result<()> {
    let mut floor = session.fault_floor()?;
    probe(session, guest, round, name)?;
    floor.add(&session.fault_floor()?);
    session.note_latencies(&floor_beside(name), &floor);
    Ok(())
}

/// One fault at a time, as the vCPU sees it.
fn probe(session: &mut Session, guest: &mut Guest, round: usize, name: &str) -> Result<()> {
    let (count, pages) = (session.settings.faults, guest.pages());
    let before = bill(session, guest)?;
    let seed = session.settings.seed + round as u64;
    let order = json!({"page": 0, "pages": pages, "count": count, "seed": seed});
    let answer = command(guest, "probe", order)?;
    let after = bill(session, guest)?.only(&before, &answer);
    let latencies = Latencies::from_json(&answer["latencies"])?;
    let remote = after.rise(&before, |counters| counters.faults_remote);
    // Of few pages, more follow each other by chance, and were fetched ahead.
    let least = if guest.page_size().is_huge() { 75 } else { 95 };
    ensure!(
        remote * 100 >= latencies.count() * least,
        "of {} pages that were touched, {remote} came from the server",
        latencies.count()
    );
    session.note_latencies(name, &latencies);
    let moved = base_pages(guest, latencies.count());
    note(session, name, &before, &after, moved);
    Ok(())
}

/// Has pages come and go at the limit until those that leave are mostly on the server already: what was written
/// to long ago leaves little by little, and what that costs is measured as eviction.
fn have_clean_ones_leave(session: &mut Session, guest: &mut Guest) -> Result<()> {
    let (count, pages) = (session.settings.faults as u64, guest.pages());
    let mut written = 0;
    for warmup in 0..MOST_WARMUPS {
        let before = guest.status()?.counters.writeback_pages;
        // Of seeds that no round measures with.
        let seed = session.settings.seed.wrapping_sub(1 + warmup);
        let order = json!({"page": 0, "pages": pages, "count": count, "seed": seed});
        command(guest, "probe", order)?;
        squeeze_and_settle(guest)?;
        written = guest.status()?.counters.writeback_pages - before;
        if written * 100 <= count {
            return Ok(());
        }
    }
    session.say(&format!(
        "of {count} pages that leave at the limit, {written} are written back still"
    ));
    Ok(())
}

/// Faults in one half of memory while another vCPU reads the other half in order, once.
fn probe_beside(session: &mut Session, guest: &mut Guest, round: usize) -> Result<()> {
    let half = guest.pages() / 2;
    let reading = guest.send(1, "touch", json!({"page": half, "pages": half}))?;
    let mut latencies = Latencies::default();
    let mut seed = session.settings.seed + round as u64;
    let began = Instant::now();
    let read = loop {
        let order = json!({"page": 0, "pages": half, "count": BESIDE_FAULTS, "seed": seed});
        let answer = command(guest, "probe", order)?;
        // What was measured after its end was not beside it.
        if let Some(read) = guest.vmm.poll(reading)? {
            break read;
        }
        latencies.add(&Latencies::from_json(&answer["latencies"])?);
        seed += 1;
        ensure!(began.elapsed() < PATIENCE, "{}", guest.log());
    };
    if latencies.count() > 0 {
        session.note_latencies("remote fault beside reading in order", &latencies);
    }
    let us = read["us"].as_u64().unwrap_or_default().max(1);
    let rate = half as f64 * 1e6 / us as f64;
    let name = "remote pages read in order beside faults";
    session.results.note(name, "pages/s", rate);
    Ok(())
}

fn read_in_order(session: &mut Session, guest: &mut Guest, what: &str) -> Result<()> {
    let pages = guest.pages();
    let before = bill(session, guest)?;
    command(guest, "touch", json!({"page": 0, "pages": pages}))?;
    let after = bill(session, guest)?;
    let kept = guest.least() / PAGE;
    note(session, what, &before, &after, pages - kept);
    Ok(())
}

/// Faults of a guest on huge pages that are stored remotely, at random and one after the other, and their
/// eviction; nothing where the machine has no pool of them.
pub fn measure_huge_faults(session: &mut Session, round: usize) -> Result<()> {
    let away = session
        .settings
        .fault_mib
        .next_multiple_of(PageSize::HUGE.bytes() >> 20);
    let mib = away + (LEAST_HUGE >> 20);
    let Some(_pool) = session.huge_pages(mib)? else {
        return Ok(());
    };
    let mut guest = session.huge_guest(mib, mib << 20)?;
    let pages = guest.pages();
    command(&mut guest, "fill", json!({"page": 0, "pages": pages}))?;
    evict(session, &guest, "eviction of dirty huge pages")?;
    guest.tune(mib << 20)?;
    probe(session, &mut guest, round, HUGE_FAULT)?;
    squeeze_and_settle(&guest)?;
    guest.tune(mib << 20)?;
    read_in_order(session, &mut guest, "remote huge pages read in order")?;
    guest.end(&[&session.server])
}

/// A limit that falls, and what a vCPU notices that uses pages which stay.
pub fn measure_tuning(session: &mut Session) -> Result<()> {
    let (down, all) = (
        session.settings.tune_mib,
        session.settings.tune_mib + REST_MIB,
    );
    let mut guest = session.guest(all, 1, all << 20)?;
    let pages = guest.pages();
    command(&mut guest, "fill", json!({"page": 0, "pages": pages}))?;
    let held = json!({"page": pages - HELD_PAGES, "pages": HELD_PAGES, "seconds": HOLD_SECONDS});
    let mut at_rest = Vec::new();
    for _ in 0..AT_REST {
        at_rest.push(command(&mut guest, "hold", held.clone())?);
    }
    let (reached, answers) = tune_down(&mut guest, REST_MIB << 20, "hold", &held)?;
    session.results.note(TUNED_BY, "MiB", down as f64);
    let evicted = ((down << 20) / PAGE) as f64;
    let rate = evicted / reached.as_secs_f64();
    session.results.note(TUNING, "pages/s", rate);
    let faults = answers.iter().filter_map(|held| held["faults"].as_u64());
    let faults = faults.sum::<u64>() as f64;
    session
        .results
        .note("faults of held pages meanwhile", "", faults);
    note_all(session, HELD_AT_REST, &latencies_of(&at_rest)?);
    note_all(session, HELD_MEANWHILE, &latencies_of(&answers)?);
    guest.end(&[&session.server])
}

/// A limit that falls, and what a vCPU notices that uses pages which are on the server.
pub fn measure_faults_while_tuning(session: &mut Session, round: usize) -> Result<()> {
    let there = session.settings.tune_mib + REST_MIB;
    let mut guest = session.guest(AWAY_MIB + there, 1, there << 20)?;
    let pages = guest.pages();
    command(&mut guest, "fill", json!({"page": 0, "pages": pages}))?;
    guest.settle()?;
    let seed = session.settings.seed + round as u64;
    // Those that were filled first have left.
    let away = (AWAY_MIB << 20) / PAGE;
    let order = json!({"page": 0, "pages": away, "count": TUNING_FAULTS, "skip": TUNING_SKIPPED, "seed": seed});
    let mut at_rest = Vec::new();
    for _ in 0..AT_REST {
        at_rest.push(command(&mut guest, "probe", order.clone())?);
    }
    let (_, meanwhile) = tune_down(&mut guest, REST_MIB << 20, "probe", &order)?;
    note_all(session, FAULT_AT_REST, &latencies_of(&at_rest)?);
    note_all(session, FAULT_MEANWHILE, &latencies_of(&meanwhile)?);
    guest.end(&[&session.server])
}

/// Has a vCPU do something over and over while its guest's limit falls: how long it took until no more was in
/// memory, and what the vCPU answered.
fn tune_down(
    guest: &mut Guest,
    limit: u64,
    action: &str,
    order: &Value,
) -> Result<(Duration, Vec<Value>)> {
    let (mut answers, mut reached) = (Vec::new(), None);
    let began = Instant::now();
    guest.tune(limit)?;
    loop {
        let asked = guest.send(0, action, order.clone())?;
        let answer = loop {
            let status = guest.status()?;
            if reached.is_none() && status.local_bytes() <= limit {
                reached = Some(began.elapsed());
            }
            if let Some(answer) = guest.vmm.poll(asked)? {
                break answer;
            }
            ensure!(
                began.elapsed() < PATIENCE,
                "the vCPU does not end: {}",
                guest.log()
            );
            std::thread::sleep(TUNING_GLANCE);
        };
        answers.push(answer);
        if let Some(reached) = reached {
            return Ok((reached, answers));
        }
        ensure!(began.elapsed() < PATIENCE, "the limit was not reached");
    }
}

fn latencies_of(answers: &[Value]) -> Result<Latencies> {
    let mut all = Latencies::default();
    for answer in answers {
        all.add(&Latencies::from_json(&answer["latencies"])?);
    }
    Ok(all)
}

/// Notes latencies with the rarest of them.
fn note_all(session: &mut Session, name: &str, latencies: &Latencies) {
    session.note_latencies(name, latencies);
    for (which, percent) in [("p99.9", 99.9), ("longest", 100.0)] {
        let us = latencies.us(percent);
        session.results.note(&format!("{name} {which}"), "µs", us);
    }
}

/// Has the guest's first vCPU do something, however long it takes.
pub(super) fn command(guest: &mut Guest, action: &str, more: Value) -> Result<Value> {
    let asked = guest.send(0, action, more)?;
    let answer = guest.vmm.wait(asked, PATIENCE);
    answer.map_err(|error| error.context(guest.log()))
}
