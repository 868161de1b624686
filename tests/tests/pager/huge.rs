//! Guests of 2 MiB pages: the races of base pages once more, and what only hugetlbfs does. Pages are
//! numbered, written and verified as base pages; 512 of them come and go together.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::huge_pages::{self, HugePages};
use outram_tests::hermetic::proxy::Proxy;
use outram_tests::hermetic::server::MemServer;
use outram_wire::control::Status;
use serde_json::json;

use crate::fixture::{Guest, LEAST_HUGE, LONG, Lab, PAGE, Wish, demand_sound, halt, race_until};
use crate::tuning::of_share;

pub(crate) const TESTS: &[crate::Test] = &[
    ("huge_pages_evicted_beside_reads_and_writes", eviction),
    ("huge_pages_taken_back_and_dropped_clean", clean_and_back),
    ("huge_pages_read_in_order_are_fetched_ahead", in_order),
    ("huge_pages_discarded_without_a_word", discards),
    ("huge_pages_populated_at_the_start", populated),
    ("huge_pages_over_cut_connections", cuts),
    ("huge_pages_of_an_empty_pool", empty_pool),
    ("huge_pages_under_the_devices_rings", rings),
    ("huge_pages_told_wrongly_are_refused", refused),
    ("huge_pages_outlive_their_backends", outlive),
    ("huge_pages_are_moved_one_by_one", page_by_page),
];

const HUGE: u64 = 2 << 20;
/// Base pages in a huge one.
const EACH: u64 = HUGE / PAGE;
const RAM_MIB: u64 = 192;
pub(crate) const RAM_PAGES: u64 = (RAM_MIB << 20) / PAGE;
/// Huge pages of its RAM.
const RAM_HUGE: u64 = (RAM_MIB << 20) / HUGE;
const WHOLE: u64 = RAM_MIB << 20;

pub(crate) fn server(lab: &Lab) -> Result<MemServer> {
    lab.server_of(4 << 20, &["--memory", "1GiB"])
}

/// A pool for one guest, and for one test.
fn pool() -> Result<HugePages> {
    HugePages::add(RAM_HUGE)
}

fn guest(lab: &Lab, limit: u64, server: &str, populated: bool) -> Result<(HugePages, Guest)> {
    start(lab, &wish(&[server], limit, populated))
}

/// A guest of all that is in the pool.
pub(crate) fn wish<'a>(servers: &'a [&'a str], limit: u64, populated: bool) -> Wish<'a> {
    Wish {
        ram_mib: &[RAM_MIB / 2, RAM_MIB / 2],
        limit,
        servers,
        huge: Some(populated),
        ..Wish::default()
    }
}

pub(crate) fn start(lab: &Lab, wish: &Wish<'_>) -> Result<(HugePages, Guest)> {
    let pool = pool()?;
    Ok((pool, Guest::start(lab, wish)?))
}

/// Sends three vCPUs to work on a third of the RAM each: one reads and writes, one reads, and one has
/// several of the VMM's threads do both to the same pages.
fn send_load(guest: &mut Guest, seconds: f64, seed: u64, rounds: u64) -> Result<[u64; 3]> {
    let third = RAM_PAGES / 3;
    let work = |page, write_share| {
        json!({"page": page, "pages": third, "seconds": seconds, "seed": seed,
            "write_share": write_share})
    };
    let race = json!({"page": 2 * third, "pages": third, "writers": 1, "readers": 1,
        "rounds": rounds});
    Ok([
        guest.send(0, "work", work(0, 0.5))?,
        guest.send(1, "work", work(third, 0.0))?,
        guest.send(2, "race", race)?,
    ])
}

/// The limit goes down to the least and up again while vCPUs read, write, and do both to the same
/// pages.
fn eviction(lab: &Lab) -> Result<()> {
    let server = server(lab)?;
    let (_pool, mut guest) = guest(lab, WHOLE, &server.address, false)?;
    guest.fill(0, RAM_PAGES)?;
    for seed in 0..3 {
        let sent = send_load(&mut guest, 2.0, seed, 1000)?;
        guest.squeeze()?;
        guest.tune(WHOLE)?;
        // On a slow machine all others may be at their end.
        let last = json!({"page": 0, "pages": 2 * RAM_PAGES / 3});
        let last = guest.send(0, "verify", last)?;
        let grown = |status: &Status| status.resident_bytes > LEAST_HUGE;
        guest.wait_status("the guest to grow again", grown)?;
        for id in sent.into_iter().chain([last]) {
            demand_sound(&guest.answer(id)?)?;
        }
    }
    guest.squeeze()?;
    guest.verify(0, RAM_PAGES)?;
    let counters = guest.status()?.counters;
    ensure!(
        counters.faults_remote > 0 && counters.writeback_pages > 0,
        "{counters:?}"
    );
    guest.end(&[&server])
}

/// What was only read goes without I/O; what waits in staging comes back without any.
fn clean_and_back(lab: &Lab) -> Result<()> {
    let server = server(lab)?;
    let (_pool, mut guest) = guest(lab, LEAST_HUGE, &server.address, false)?;
    let filled = RAM_PAGES / 2;
    guest.fill(0, filled)?;
    guest.settle()?;
    guest.verify(0, filled)?;
    let before = guest.settle()?.counters;
    wait_for("pages to be dropped clean", LONG, || {
        guest.verify(0, filled)?;
        let dropped = guest.settle()?.counters.evicted_clean_pages;
        Ok((dropped > before.evicted_clean_pages).then_some(()))
    })?;
    // While its server stands still, what is evicted stays in staging.
    halt(&server)?;
    let before = guest.status()?.counters.faults_staged;
    let mut present = Vec::new();
    for page in (0..filled).step_by(EACH as usize) {
        if guest.present(page, 1)? == 1 {
            present.push(page);
        }
    }
    ensure!(!present.is_empty(), "nothing is there");
    for page in &present {
        guest.fill(*page, EACH)?;
    }
    let fresh = guest.send(1, "fill", json!({"page": filled, "pages": 4 * EACH}))?;
    guest.wait_status("pages to be staged", |status| status.staged_bytes >= HUGE)?;
    // Its place in staging is taken some time before it leaves.
    let gone = wait_for("a page to leave", LONG, || {
        for page in &present {
            if guest.present(*page, 1)? == 0 {
                return Ok(Some(*page));
            }
        }
        Ok(None)
    })?;
    let back = guest.send(2, "verify", json!({"page": gone, "pages": EACH}))?;
    guest.wait_status("a page to come back out of staging", |status| {
        status.counters.faults_staged > before
    })?;
    server.signal(Signal::SIGCONT)?;
    demand_sound(&guest.answer(back)?)?;
    guest.answer(fresh)?;
    guest.verify(0, filled + 4 * EACH)?;
    guest.end(&[&server])
}

fn in_order(lab: &Lab) -> Result<()> {
    let server = server(lab)?;
    let (_pool, mut guest) = guest(lab, WHOLE, &server.address, false)?;
    guest.fill(0, RAM_PAGES)?;
    guest.squeeze()?;
    let before = guest.settle()?.counters;
    guest.tune(WHOLE)?;
    guest.verify(0, RAM_PAGES)?;
    let after = guest.status()?.counters;
    let ahead = after.fetched_ahead_pages - before.fetched_ahead_pages;
    let asked = after.faults_remote - before.faults_remote;
    ensure!(
        (RAM_HUGE / 4..=RAM_HUGE).contains(&ahead),
        "{ahead} pages ahead, {asked} faults"
    );
    guest.end(&[&server])
}

/// Holes that nobody was told of: what is read there is zero or, where the page had been moved away
/// before, what it held; never anything that was not stored there.
fn discards(lab: &Lab) -> Result<()> {
    let server = server(lab)?;
    let (_pool, mut guest) = guest(lab, WHOLE, &server.address, false)?;
    guest.fill(0, RAM_PAGES)?;
    // All of it is there, and not evicted: zeros at once, and a store after that stays.
    guest.command(1, "discard", json!({"page": 0, "pages": 8 * EACH}))?;
    guest.verify(0, 2 * EACH)?;
    guest.fill(2 * EACH, 2 * EACH)?;
    guest.verify(0, 8 * EACH)?;
    // Discarded and never touched again: zeros also after an eviction that saw the hole.
    guest.command(1, "discard", json!({"page": 20 * EACH, "pages": 4 * EACH}))?;
    guest.squeeze()?;
    guest.verify(0, RAM_PAGES)?;
    let race = json!({"page": 0, "pages": RAM_PAGES, "writers": 2, "readers": 1, "discarders": 1,
        "rounds": 300});
    race_until(&mut guest, &race, &["discards"], 3)?;
    guest.verify(0, RAM_PAGES)?;
    // Few pages, so that all of it happens to the same ones while others are evicted.
    let work = json!({"page": 8 * EACH, "pages": RAM_PAGES - 8 * EACH, "seconds": 2.0,
        "write_share": 0.5});
    let work = guest.send(1, "work", work)?;
    let race = json!({"page": 0, "pages": 2 * EACH, "writers": 2, "readers": 2, "discarders": 1,
        "rounds": 500});
    demand_sound(&guest.command(0, "race", race)?)?;
    demand_sound(&guest.answer(work)?)?;
    guest.verify(0, RAM_PAGES)?;
    guest.end(&[&server])
}

/// As libvirt starts them: the whole pool is taken, and what is beyond the limit given back to it.
fn populated(lab: &Lab) -> Result<()> {
    let server = server(lab)?;
    let (_pool, mut guest) = guest(lab, LEAST_HUGE, &server.address, true)?;
    let free = huge_pages::available()?;
    guest.wait_status("the limit to be reached", |status| {
        status.kernel_memfd_bytes + status.kernel_staging_bytes <= LEAST_HUGE
    })?;
    let now = huge_pages::available()?;
    let beyond = (WHOLE - LEAST_HUGE) / HUGE;
    ensure!(
        now >= beyond,
        "{free} pages of the pool were free, then {now}"
    );
    let status = guest.status()?;
    ensure!(
        status.filled_bytes > 0 && status.stored_bytes == 0,
        "zeros cost nothing: {status:?}"
    );
    guest.verify(0, RAM_PAGES)?;
    guest.fill(0, RAM_PAGES)?;
    guest.verify(0, RAM_PAGES)?;
    guest.end(&[&server])
}

fn cuts(lab: &Lab) -> Result<()> {
    let server = server(lab)?;
    let proxy = Proxy::start(&lab.address(), &server.address)?;
    let (_pool, mut guest) = guest(lab, LEAST_HUGE, &proxy.address, false)?;
    guest.fill(0, RAM_PAGES)?;
    let work = json!({"page": 0, "pages": RAM_PAGES, "seconds": 3.0, "write_share": 0.5});
    let sent = guest.send(0, "work", work)?;
    let accepted = proxy.accepted();
    let mut round = 0;
    // Where the machine is slow, one is cut again before it is made.
    while round < 15 || proxy.accepted() <= accepted + 5 {
        ensure!(round < 100, "connections were not made again");
        std::thread::sleep(Duration::from_millis(50 + 17 * round));
        proxy.cut();
        round += 1;
    }
    demand_sound(&guest.answer(sent)?)?;
    guest.verify(0, RAM_PAGES)?;
    // A bit that flips on the way is read again.
    proxy.spoil(1);
    guest.verify(0, RAM_PAGES)?;
    ensure!(proxy.to_spoil() == 0, "nothing was changed");
    guest.end(&[&server])
}

/// Others have taken what the guest gave back to the pool: it goes on within what it has.
fn empty_pool(lab: &Lab) -> Result<()> {
    let server = server(lab)?;
    let (_pool, mut guest) = guest(lab, LEAST_HUGE, &server.address, true)?;
    guest.fill(0, RAM_PAGES)?;
    guest.squeeze()?;
    guest.settle()?;
    let others = huge_pages::take_available()?;
    // Of all of its RAM it would give up nothing.
    let limit = WHOLE - 8 * HUGE;
    guest.tune(limit)?;
    let work = json!({"page": 0, "pages": RAM_PAGES, "seconds": 1.0, "write_share": 0.5});
    demand_sound(&guest.command(0, "work", work)?)?;
    guest.verify(0, RAM_PAGES)?;
    let status = guest.status()?;
    ensure!(
        status.counters.stalls_pool > 0 && status.resident_bytes < limit / 2,
        "the pool was not empty: {status:#?}"
    );
    drop(others);
    guest.tune(WHOLE)?;
    guest.verify(0, RAM_PAGES)?;
    let grown = |status: &Status| status.resident_bytes == WHOLE;
    guest.wait_status("all of it to be there again", grown)?;
    guest.verify(0, RAM_PAGES)?;
    guest.end(&[&server])
}

/// The device's rings and buffers in huge pages that come and go.
fn rings(lab: &Lab) -> Result<()> {
    let server = server(lab)?;
    let (_pool, mut guest) = guest(lab, LEAST_HUGE, &server.address, false)?;
    let own = 8 * EACH;
    guest.fill(own, RAM_PAGES - own)?;
    for queue in 0..2u64 {
        let start = json!({"do": "disk-start", "queue": queue, "size": 64, "page": queue * 16});
        guest.vmm.command(start)?;
    }
    let work = json!({"page": own, "pages": RAM_PAGES - own, "seconds": 3.0, "write_share": 0.5});
    let load = guest.send(2, "work", work)?;
    for round in 0..40 {
        // Buffers that begin shortly before a border.
        let page = (1 + round % 4) * EACH + EACH - 4;
        let request = json!({"queue": round % 2, "type": 0, "sector": round, "bytes": 65_536,
            "page": page, "wait_ms": 120_000});
        let answer = guest.command(1, "request", request)?;
        ensure!(answer["status"] == 0, "{answer}");
    }
    demand_sound(&guest.answer(load)?)?;
    guest.verify(own, RAM_PAGES - own)?;
    for queue in 0..2 {
        guest
            .vmm
            .command(json!({"do": "disk-stop", "queue": queue}))?;
    }
    guest.squeeze()?;
    guest.end(&[&server])
}

/// A domain whose memory is not what its XML said, and a server whose slabs hold no such page.
fn refused(lab: &Lab) -> Result<()> {
    let server = server(lab)?;
    let _pool = pool()?;
    let wish = |huge| Wish {
        ram_mib: &[64],
        servers: &[],
        huge,
        ..Wish::default()
    };
    let servers = [server.address.as_str()];
    for (block, told) in [("64M", "2MiB"), ("64M,hugetlb=on,hugetlbsize=2M", "4KiB")] {
        let wish = Wish {
            servers: &servers,
            limit: LEAST_HUGE,
            ..wish(None)
        };
        let started = Guest::start_told(lab, &wish, &[block.to_owned()], told);
        let error = started.err().context("was not refused")?;
        let text = format!("{error:#}");
        ensure!(text.contains("has pages of"), "{text}");
    }
    for slab_bytes in [1 << 20, 3 << 20] {
        let server = lab.server_of(slab_bytes, &["--memory", "1GiB"])?;
        let wish = Wish {
            servers: &[&server.address],
            limit: LEAST_HUGE,
            ram_mib: &[RAM_MIB],
            ..wish(Some(false))
        };
        let error = Guest::start(lab, &wish).err().context("was not refused")?;
        let text = format!("{error:#}");
        ensure!(
            text.contains("are no multiple of the guest's pages of 2 MiB"),
            "{text}"
        );
        ensure!(server.slabs_leased()? == 0, "it keeps what it was refused");
    }
    Ok(())
}

/// The backend is killed at any instant of heavy paging, populated at the start or not; what is
/// discarded while nobody looks is zeros afterwards.
fn outlive(lab: &Lab) -> Result<()> {
    for populated in [false, true] {
        let server = server(lab)?;
        let _pool = pool()?;
        let servers = [server.address.as_str()];
        let wish = Wish {
            ram_mib: &[RAM_MIB / 2, RAM_MIB / 2],
            limit: LEAST_HUGE,
            servers: &servers,
            huge: Some(populated),
            ..Wish::default()
        };
        let mut guest = Guest::start(lab, &wish)?;
        guest.fill(0, RAM_PAGES)?;
        for batch in 0..2u64 {
            let sent = send_load(&mut guest, 3.0, batch, 1500)?;
            for round in 0..8 {
                std::thread::sleep(Duration::from_micros((batch * 8 + round) * 7919 % 90_000));
                guest.kill_backend()?;
                guest.take_over(lab, &wish)?;
            }
            for id in sent {
                demand_sound(&guest.answer(id)?)?;
            }
            guest.verify(0, RAM_PAGES)?;
        }
        // A discard of what is just being evicted is forgotten with the backend.
        guest.settle()?;
        guest.kill_backend()?;
        let mut discarded = 0;
        for page in (0..RAM_PAGES).step_by(EACH as usize) {
            // What had been moved away before stays what it was.
            if discarded < 8 && guest.present(page, 1)? == 1 {
                guest.command(0, "discard", json!({"page": page, "pages": EACH}))?;
                discarded += 1;
            }
        }
        ensure!(discarded == 8, "only {discarded} pages were there");
        guest.take_over(lab, &wish)?;
        guest.verify(0, RAM_PAGES)?;
        guest.connect()?;
        guest.squeeze()?;
        guest.verify(0, RAM_PAGES)?;
        guest.end(&[&server])?;
    }
    Ok(())
}

fn page_by_page(lab: &Lab) -> Result<()> {
    let server = server(lab)?;
    let (_pool, guest) = guest(lab, WHOLE, &server.address, true)?;
    guest.set_granularity("4KiB".parse()?)?;
    guest.set_tuning(of_share("0")?)?;
    let refused = guest.set_tuning(of_share("0.2")?);
    let refused = format!("{:#}", refused.expect_err("compressed huge pages"));
    ensure!(refused.contains("are not kept compressed"), "{refused}");
    let refused = guest.set_granularity("64KiB".parse()?);
    let refused = format!("{:#}", refused.expect_err("less than a page"));
    ensure!(refused.contains("page by page"), "{refused}");
    ensure!(guest.status()?.granularity_bytes == Some(HUGE));
    guest.end(&[&server])
}
