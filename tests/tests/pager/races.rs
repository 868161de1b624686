//! The races that the design names: evict beside read fault beside write, REMOVE beside COPY,
//! duplicate events, signals, EEXIST and EAGAIN.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use outram_tests::hermetic::command::wait_for;
use outram_wire::control::Status;
use serde_json::json;

use crate::fixture::{
    Guest, LEAST, LONG, Lab, PAGE, Wish, demand_sound, halt, push_out, race_until,
};

pub(crate) const TESTS: &[crate::Test] = &[
    ("eviction_beside_reads_and_writes", eviction),
    ("limits_go_up_and_down_at_once", limits),
    ("discards_beside_faults", discards),
    ("dropped_mappings_keep_their_bytes", dropped),
    ("given_back_pages_are_freed_at_the_server", freed),
    ("signals_amid_faults", signals),
    ("kernel_mode_faults_with_signals_pending", kernel_mode),
    ("pages_that_appear_behind_the_pager", behind),
];

/// The limit goes down to the least and up again while vCPUs read, write, and do both to the same
/// pages.
fn eviction(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = Guest::start(
        lab,
        &Wish {
            limit: 64 << 20,
            servers: &[&server.address],
            ..Wish::default()
        },
    )?;
    guest.fill(0, 12_000)?;
    for seed in 0..4 {
        let work = |page, write_share| {
            json!({"page": page, "pages": 6000, "seconds": 2.0, "seed": seed,
                "write_share": write_share})
        };
        let race = json!({"page": 12_000, "pages": 4000, "writers": 1, "readers": 1,
            "rounds": 4000});
        let sent = [
            guest.send(0, "work", work(0, 0.5))?,
            guest.send(1, "work", work(6000, 0.0))?,
            guest.send(2, "race", race)?,
        ];
        guest.squeeze()?;
        guest.tune(64 << 20)?;
        // On a slow machine all others may be at their end.
        let last = guest.send(0, "verify", json!({"page": 0, "pages": 6000}))?;
        let grown = |status: &Status| status.resident_bytes > LEAST;
        guest.wait_status("the guest to grow again", grown)?;
        for id in sent.into_iter().chain([last]) {
            demand_sound(&guest.answer(id)?)?;
        }
    }
    guest.squeeze()?;
    guest.verify(0, 16_000)?;
    let counters = guest.status()?.counters;
    ensure!(
        counters.faults_remote > 0 && counters.evicted_clean_pages > 0,
        "{counters:?}"
    );
    guest.end(&[&server])
}

/// A limit of all RAM takes staging's memory away, and a lower one right after it needs that again: what is
/// staged then stays as it is.
fn limits(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let wish = Wish {
        limit: 48 << 20,
        servers: &[&server.address],
        ..Wish::default()
    };
    let mut guest = Guest::start(lab, &wish)?;
    guest.fill(0, 15_000)?;
    let work = |page, seed| json!({"page": page, "pages": 7500, "seconds": 4.0, "seed": seed, "write_share": 0.5});
    let sent = [
        guest.send(0, "work", work(0, 1))?,
        guest.send(1, "work", work(7500, 2))?,
    ];
    let until = Instant::now() + Duration::from_secs(4);
    let mut rounds = 0;
    while Instant::now() < until {
        guest.tune(64 << 20)?;
        guest.tune(if rounds % 2 == 0 { 48 << 20 } else { LEAST })?;
        rounds += 1;
    }
    for id in sent {
        demand_sound(&guest.answer(id)?)?;
    }
    guest.verify(0, 15_000)?;
    let counters = guest.status()?.counters;
    ensure!(
        counters.refused_reads == 0 && counters.integrity_failures == 0,
        "after {rounds} rounds: {counters:?}"
    );
    ensure!(
        counters.evicted_pages > counters.evicted_clean_pages,
        "{counters:?}"
    );
    guest.end(&[&server])
}

/// Pages are given back while others fault on them, in two regions and at the least limit: what is
/// read is what was written last, or zeros where it was given back. Every discard makes COPY fail
/// (EAGAIN) until its event is read.
fn discards(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = Guest::start(
        lab,
        &Wish {
            ram_mib: &[32, 32],
            servers: &[&server.address],
            ..Wish::default()
        },
    )?;
    guest.fill(0, 16_000)?;
    let race = json!({"page": 0, "pages": 16_000, "writers": 2, "readers": 1, "discarders": 1,
        "rounds": 6000});
    // Of several pages each: enough for the count at the end.
    race_until(&mut guest, &race, &["reads", "discards"], 500)?;
    guest.verify(0, 16_000)?;
    // Few pages, so that all of it happens to the same ones while others are evicted.
    let work = json!({"page": 1000, "pages": 15_000, "seconds": 1.0, "write_share": 0.5});
    let work = guest.send(1, "work", work)?;
    let race = json!({"page": 100, "pages": 8, "writers": 2, "readers": 2, "discarders": 1,
        "rounds": 3000});
    demand_sound(&guest.command(0, "race", race)?)?;
    demand_sound(&guest.answer(work)?)?;
    guest.verify(0, 16_000)?;
    let removed = guest.status()?.counters.removed_pages;
    ensure!(removed > 1000, "only {removed} pages were removed");
    guest.end(&[&server])
}

/// The event of a dropped mapping finds the page in the memfd: it stays, and counts as changed.
fn dropped(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = Guest::start(
        lab,
        &Wish {
            limit: 64 << 20,
            servers: &[&server.address],
            ..Wish::default()
        },
    )?;
    guest.fill(0, 16_000)?;
    let race = json!({"page": 0, "pages": 16_000, "writers": 2, "readers": 1, "droppers": 2,
        "rounds": 6000});
    race_until(&mut guest, &race, &["drops"], 100)?;
    guest.squeeze()?;
    guest.verify(0, 16_000)?;
    guest.end(&[&server])
}

/// What the guest gives back costs nobody anything.
fn freed(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = Guest::start_on(lab, &server)?;
    guest.fill(0, 16_000)?;
    guest.settle()?;
    let before = (guest.status()?, server.slabs_leased()?);
    ensure!(before.0.stored_bytes > 40 << 20, "{:#?}", before.0);
    guest.command(1, "discard", json!({"page": 0, "pages": 12_000}))?;
    // Each shard does its part when it has read the event; the guest goes on before that.
    guest.wait_status("what was given back to be freed", |status| {
        status.resident_bytes + status.stored_bytes + status.staged_bytes <= 4400 * PAGE
    })?;
    // Zeros, by the versions that the VMM keeps; and of no cost again once evicted.
    guest.verify(0, 16_000)?;
    guest.wait_status("zeros to be kept as words", |status| {
        status.stored_bytes <= 4400 * PAGE
    })?;
    let freed = || Ok((server.slabs_leased()? < before.1).then_some(()));
    wait_for("slabs to be given back", LONG, freed)?;
    guest.end(&[&server])
}

/// A signal ends the wait in a fault, and the access faults again: one answer for all of them.
fn signals(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = Guest::start_on(lab, &server)?;
    guest.fill(0, 16_000)?;
    guest.settle()?;
    // While nothing is answered: each signal makes one more message.
    halt(&server)?;
    let stretch = json!({"page": 10, "pages": 100});
    let waiting = guest.send(1, "verify", stretch)?;
    guest.wait_status("a fault to wait", |status| status.waiting_faults > 0)?;
    let before = guest.status()?.counters.faults_duplicate;
    let sent = guest.vmm.command(json!({"do": "bombard", "count": 500}))?;
    ensure!(sent["handled"].as_u64() >= Some(500), "{sent}");
    guest.wait_status("duplicates to be told", |status| {
        status.counters.faults_duplicate > before
    })?;
    server.signal(Signal::SIGCONT)?;
    demand_sound(&guest.answer(waiting)?)?;
    // While all is answered, as fast as it can be.
    let work = json!({"page": 0, "pages": 8000, "seconds": 1.5, "write_share": 0.5});
    let race = json!({"page": 8000, "pages": 8000, "writers": 1, "readers": 1, "discarders": 1,
        "rounds": 2000});
    let sent = [guest.send(1, "work", work)?, guest.send(2, "race", race)?];
    let handled = guest.vmm.command(json!({"do": "bombard", "count": 5000}))?;
    ensure!(handled["handled"].as_u64() > Some(1000), "{handled}");
    for id in sent {
        demand_sound(&guest.answer(id)?)?;
    }
    guest.verify(0, 16_000)?;
    guest.end(&[&server])
}

/// `read(2)` and `write(2)` into evicted pages repeat their fault as long as a signal is pending.
fn kernel_mode(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = Guest::start_on(lab, &server)?;
    guest.fill(0, 16_000)?;
    guest.settle()?;
    halt(&server)?;
    let waiting = guest.send(1, "pipe", json!({"page": 10, "pages": 50}))?;
    guest.wait_status("a fault to wait", |status| status.waiting_faults > 0)?;
    guest.vmm.command(json!({"do": "bombard", "count": 10}))?;
    let before = guest.status()?.counters.faults_duplicate;
    guest.wait_status("the fault to repeat itself", |status| {
        status.counters.faults_duplicate > before + 100
    })?;
    // Its repetitions keep nobody else from being served.
    let fresh = json!({"page": 16_100, "pages": 64});
    guest.command(2, "fill", fresh)?;
    server.signal(Signal::SIGCONT)?;
    demand_sound(&guest.answer(waiting)?)?;
    let sent = [
        guest.send(0, "pipe", json!({"page": 0, "pages": 4000}))?,
        guest.send(1, "pipe", json!({"page": 4000, "pages": 4000}))?,
    ];
    guest.vmm.command(json!({"do": "bombard", "count": 2000}))?;
    for id in sent {
        demand_sound(&guest.answer(id)?)?;
    }
    guest.verify(0, 16_000)?;
    guest.end(&[&server])
}

/// A page that is there when its bytes arrive counts as changed, and wins.
fn behind(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = Guest::start_on(lab, &server)?;
    guest.fill(0, 16_000)?;
    // So far apart that none comes with another.
    let pages = [20, 60, 100];
    push_out(&mut guest, 20..101, 4000..16_000)?;
    halt(&server)?;
    for (page, write) in pages.into_iter().zip([false, true, false]) {
        let touch = json!({"page": page, "pages": 1, "write": write});
        let waiting = guest.send(1, "touch", touch)?;
        guest.wait_status("the fault to wait", |status| status.waiting_faults == 1)?;
        guest.command(2, "write-file", json!({"page": page, "pages": 1}))?;
        server.signal(Signal::SIGCONT)?;
        guest.answer(waiting)?;
        // Not only seen, but kept when it is evicted.
        guest.verify(page, 1)?;
        halt(&server)?;
    }
    server.signal(Signal::SIGCONT)?;
    push_out(&mut guest, 20..101, 4000..16_000)?;
    guest.verify(0, 16_000).context("after eviction")?;
    guest.end(&[&server])
}
