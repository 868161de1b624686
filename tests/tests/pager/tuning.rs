//! How a guest's memory is moved: how much of it at a time, by how many, and how much is on its way.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::proxy::Proxy;
use outram_wire::tuning::{QueueDepth, Tuning};
use serde_json::json;

use crate::crash::{FILLED, demand_answers, filled, load};
use crate::fixture::{Guest, LONG, Lab, PAGE, Wish, demand_sound};

pub(crate) const TESTS: &[crate::Test] = &[
    ("pages_that_are_moved_together_come_together", together),
    ("a_granularity_changes_under_load", changing),
    ("workers_come_and_go_under_load", crew),
    ("a_queue_depth_bounds_what_is_written_back", depth),
    ("compressed_pages_come_back_from_this_host", compressed),
    ("compressed_shares_change_under_load", compressed_shares),
    ("what_is_in_use_has_room_wherever_it_lies", lopsided),
    ("copies_are_kept_until_their_room_is_needed", copies),
];

/// Pages of a block of 64 KiB.
const BLOCK: u64 = 16;

/// Blocks that are asked for: so far apart that they look like nobody's way through memory.
const STEP: u64 = 60;

const REQUESTS: u64 = 5;

/// Asks for the sixth page of each of some blocks that lie on the server, `first` the first of them, and
/// demands that so many pages of each are there then.
fn ask_for_some(guest: &mut Guest, first: u64, expected: u64) -> Result<()> {
    guest.squeeze()?;
    guest.settle()?;
    // Pages that nobody waits for come where there is room for them: now there is for all of these.
    guest.tune(guest.least() + (1 << 20))?;
    let mut blocks = Vec::new();
    for block in (first..FILLED / BLOCK).step_by(STEP as usize) {
        if guest.present(block * BLOCK, BLOCK)? == 0 {
            blocks.push(block);
        }
    }
    ensure!(blocks.len() >= REQUESTS as usize, "{blocks:?}");
    let before = guest.status()?.counters;
    for block in blocks.into_iter().take(REQUESTS as usize) {
        let start = block * BLOCK;
        guest.verify(start + 5, 1)?;
        wait_for("the others of the block", LONG, || {
            Ok((guest.present(start, BLOCK)? == expected).then_some(()))
        })?;
    }
    // Who waits goes on before its fault is counted.
    let after = guest.wait_status("all to be counted", |status| {
        status.counters.faults_remote >= before.faults_remote + REQUESTS
    })?;
    let after = after.counters;
    let asked = after.faults_remote - before.faults_remote;
    let unasked = after.fetched_ahead_pages - before.fetched_ahead_pages;
    ensure!(
        (asked, unasked) == (REQUESTS, REQUESTS * (expected - 1)),
        "{asked} pages were asked for, and {unasked} came with them"
    );
    Ok(())
}

fn together(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let wish = Wish {
        servers: &[&server.address],
        ..Wish::default()
    };
    let mut guest = filled(lab, &wish)?;
    ensure!(guest.status()?.granularity_bytes == Some(4096));
    guest.set_granularity("64KiB".parse()?)?;
    ensure!(guest.status()?.granularity_bytes == Some(65536));
    ask_for_some(&mut guest, 0, BLOCK)?;
    guest.kill_backend()?;
    guest.take_over(lab, &wish)?;
    ensure!(guest.status()?.granularity_bytes == Some(65536));
    // Where a page has to wait for a connection first, none comes with it: now each shard has one.
    guest.verify(0, FILLED)?;
    ask_for_some(&mut guest, 5, BLOCK)?;
    guest.set_granularity("4KiB".parse()?)?;
    ask_for_some(&mut guest, 10, 1)?;
    guest.verify(0, FILLED)?;
    guest.end(&[&server])
}

fn changing(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = filled(
        lab,
        &Wish {
            servers: &[&server.address],
            vcpus: 3,
            ..Wish::default()
        },
    )?;
    guest.squeeze()?;
    let sent = load(&mut guest, 4.0)?;
    for round in 0..40 {
        let kib = 4 << (5 * round % 7);
        guest.set_granularity(format!("{kib}KiB").parse()?)?;
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    demand_answers(&mut guest, sent)?;
    let counters = guest.status()?.counters;
    ensure!(counters.integrity_failures == 0 && counters.faults_lost == 0);
    guest.end(&[&server])
}

/// Threads of a backend that evict.
fn evictors(guest: &Guest) -> Result<u32> {
    let mut found = 0;
    for task in fs::read_dir(format!("/proc/{}/task", guest.backend_pid()))? {
        let comm = task?.path().join("comm");
        // One that ends meanwhile is none.
        let name = fs::read_to_string(comm).unwrap_or_default();
        found += u32::from(name.starts_with("evict-"));
    }
    Ok(found)
}

fn wait_for_crew(guest: &Guest, workers: u32) -> Result<()> {
    wait_for("as many threads as workers", LONG, || {
        Ok((evictors(guest)? == workers).then_some(()))
    })?;
    let told = guest.status()?.workers.map(u32::from);
    ensure!(told == Some(workers), "{told:?} instead of {workers}");
    Ok(())
}

fn of_workers(workers: u32) -> Result<Tuning> {
    Ok(Tuning {
        workers: Some(workers.try_into()?),
        ..Tuning::default()
    })
}

fn crew(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let wish = Wish {
        servers: &[&server.address],
        vcpus: 3,
        ..Wish::default()
    };
    let mut guest = filled(lab, &wish)?;
    // As many as shards.
    wait_for_crew(&guest, 2)?;
    guest.squeeze()?;
    let sent = load(&mut guest, 4.0)?;
    for workers in [1, 7, 3, 12, 1, 64, 5].into_iter().cycle().take(40) {
        guest.set_tuning(of_workers(workers)?)?;
        std::thread::sleep(Duration::from_millis(100));
    }
    guest.set_tuning(of_workers(5)?)?;
    demand_answers(&mut guest, sent)?;
    wait_for_crew(&guest, 5)?;
    guest.kill_backend()?;
    guest.take_over(lab, &wish)?;
    wait_for_crew(&guest, 5)?;
    guest.verify(0, FILLED)?;
    let counters = guest.status()?.counters;
    ensure!(counters.integrity_failures == 0 && counters.faults_lost == 0);
    guest.end(&[&server])
}

/// Bytes of a batch that is written back.
const BATCH: u64 = 256 << 10;

/// Waits until so many are sent, at least, and nothing more is; whole batches that were sent since `before`,
/// rounded up.
fn batches_sent(guest: &Guest, before: u64, least: u64) -> Result<u64> {
    let mut last = before;
    wait_for("write-back to stand still", LONG, || {
        std::thread::sleep(Duration::from_millis(500));
        let sent = guest.status()?.counters.wire_sent_bytes;
        let batches = (sent - before).div_ceil(BATCH + BATCH / 16);
        let stands = batches >= least && std::mem::replace(&mut last, sent) == sent;
        Ok(stands.then_some(batches))
    })
}

/// A server that does not answer has as many batches of a guest at most as its queue is deep. It is there, for one
/// that is not would be given up.
fn depth(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let of_depth = |depth: u32| -> Result<Tuning> {
        Ok(Tuning {
            queue_depth: Some(depth.try_into()?),
            ..Tuning::default()
        })
    };
    let proxy = Proxy::start(&lab.address(), &server.address)?;
    let wish = Wish {
        servers: &[&proxy.address],
        ..Wish::default()
    };
    let mut guest = filled(lab, &wish)?;
    ensure!(guest.status()?.queue_depth == Some(QueueDepth::default()));
    let more = 2000;
    // What is on its way when a connection is lost is sent once more.
    let (shallow, more_deep) = wait_for("connections to stand", LONG, || {
        guest.set_tuning(of_depth(1)?)?;
        guest.settle()?;
        // Pages of an attempt before would be asked for, and requests are sent bytes too.
        guest.command(0, "discard", json!({"page": FILLED, "pages": more}))?;
        let before = guest.settle()?.counters.wire_sent_bytes;
        let accepted = proxy.accepted();
        proxy.withhold(true);
        let filling = guest.send(0, "fill", json!({"page": FILLED, "pages": more}))?;
        let shallow = batches_sent(&guest, before, 1)?;
        // The first went as soon as there was something to write, and may be a short one.
        let before = guest.status()?.counters.wire_sent_bytes;
        guest.set_tuning(of_depth(3)?)?;
        let more_deep = batches_sent(&guest, before, 2)?;
        let is_connected = guest.status()?.servers[0].connected;
        let have_stood = is_connected && proxy.accepted() == accepted;
        proxy.withhold(false);
        demand_sound(&guest.answer(filling)?)?;
        Ok(have_stood.then_some((shallow, more_deep)))
    })?;
    ensure!(
        (shallow, more_deep) == (1, 2),
        "{shallow} batches with a queue depth of 1, {more_deep} more with one of 3"
    );
    guest.kill_backend()?;
    guest.take_over(lab, &wish)?;
    ensure!(guest.status()?.queue_depth.map(u32::from) == Some(3));
    guest.verify(0, FILLED + more)?;
    guest.end(&[&server])
}

pub(crate) fn of_share(share: &str) -> Result<Tuning> {
    Ok(Tuning {
        compressed_share: Some(share.parse()?),
        ..Tuning::default()
    })
}

/// Reads some of what is filled at random until some of it was compressed on this host, in less memory than
/// it has itself.
fn demand_compressed(guest: &mut Guest) -> Result<()> {
    let before = guest.status()?.counters;
    wait_for("pages to be compressed", LONG, || {
        let work = json!({"page": 0, "pages": 6000, "seconds": 1.0, "write_share": 0.0, "seed": 1});
        let work = guest.send(0, "work", work)?;
        demand_sound(&guest.answer(work)?)?;
        let status = guest.settle()?;
        let (after, taken) = (&status.counters, status.compressed_bytes);
        ensure!(
            taken <= status.limit_bytes * 3 / 10,
            "{taken} bytes of a limit of {}",
            status.limit_bytes
        );
        ensure!(status.local_bytes() <= status.limit_bytes);
        ensure!(after.refused_reads == 0 && after.integrity_failures == 0);
        let is_so = taken > 0
            && status.compressed_held_bytes > taken
            && after.compressed_pages > before.compressed_pages
            && after.faults_compressed > before.faults_compressed;
        Ok(is_so.then_some(()))
    })
    .with_context(|| format!("{:?}", guest.status()))
}

/// Anonymous memory of a process, counted exactly.
fn anonymous_bytes(pid: u32) -> Result<u64> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = rollup
        .lines()
        .find_map(|line| line.strip_prefix("Anonymous:"));
    let kib = line.and_then(|line| line.split_whitespace().next());
    Ok(kib.context("no anonymous memory")?.parse::<u64>()? << 10)
}

fn compressed(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let wish = Wish {
        servers: &[&server.address],
        ..Wish::default()
    };
    let mut guest = filled(lab, &wish)?;
    guest.squeeze()?;
    guest.set_tuning(of_share("0.3")?)?;
    ensure!(guest.status()?.compressed_share == "0.3".parse().ok());
    demand_compressed(&mut guest)?;
    guest.kill_backend()?;
    guest.take_over(lab, &wish)?;
    let status = guest.status()?;
    ensure!(status.compressed_share == "0.3".parse().ok());
    ensure!(status.compressed_held_bytes == 0, "they died with it");
    demand_compressed(&mut guest)?;
    let taken = guest.status()?.compressed_bytes;
    let before = anonymous_bytes(guest.backend_pid())?;
    guest.set_tuning(of_share("0")?)?;
    let status = guest.status()?;
    ensure!(status.compressed_bytes == 0 && status.compressed_held_bytes == 0);
    let after = anonymous_bytes(guest.backend_pid())?;
    // A part of what is counted is the index's, which the allocator may keep.
    ensure!(
        before.saturating_sub(after) >= taken / 2,
        "{before} bytes before, {after} after {taken} were to be given back to the host"
    );
    guest.verify(0, FILLED)?;
    guest.end(&[&server])
}

fn compressed_shares(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = filled(
        lab,
        &Wish {
            servers: &[&server.address],
            vcpus: 3,
            ..Wish::default()
        },
    )?;
    guest.squeeze()?;
    let sent = load(&mut guest, 4.0)?;
    let shares = ["0.5", "0", "0.2", "0.01", "0.4"];
    for share in shares.into_iter().cycle().take(40) {
        guest.set_tuning(of_share(share)?)?;
        std::thread::sleep(Duration::from_millis(100));
        let mut status = guest.status()?;
        if status.local_bytes() > status.limit_bytes {
            // It is read part by part: a page that moves meanwhile is in two of them.
            status = guest.status()?;
        }
        ensure!(status.local_bytes() <= status.limit_bytes, "{status:?}");
    }
    demand_answers(&mut guest, sent)?;
    let counters = guest.status()?.counters;
    ensure!(counters.faults_compressed > 0, "{counters:?}");
    ensure!(counters.integrity_failures == 0 && counters.faults_lost == 0);
    ensure!(counters.refused_reads == 0, "{counters:?}");
    guest.end(&[&server])
}

/// Each half of the RAM is a shard's own; what is in use of the one drives out what is not of the other.
fn lopsided(lab: &Lab) -> Result<()> {
    const HALF: u64 = 8192;
    const IN_USE: u64 = 5000;
    let server = lab.server()?;
    let wish = Wish {
        limit: 32 << 20,
        servers: &[&server.address],
        ..Wish::default()
    };
    let mut guest = Guest::start(lab, &wish)?;
    ensure!(guest.status()?.ram_bytes == 2 * HALF * PAGE, "two halves");
    guest.fill(0, HALF - 100)?;
    guest.fill(HALF, IN_USE)?;
    wait_for("all that is in use to be there", LONG, || {
        guest.verify(HALF, IN_USE)?;
        Ok((guest.present(HALF, IN_USE)? == IN_USE).then_some(()))
    })?;
    guest.end(&[&server])
}

/// Pages of a MiB.
const MIB: u64 = (1 << 20) / PAGE;

/// Of 1 GiB with a half local a server promises some 800 MiB. While 750 are used, every page may keep its
/// copy there, and leaves without being written if it is only read; more than that needs the copies' room.
fn copies(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let wish = Wish {
        ram_mib: &[1024],
        limit: 512 << 20,
        servers: &[&server.address],
        ..Wish::default()
    };
    let mut guest = Guest::start(lab, &wish)?;
    guest.fill(0, 750 * MIB)?;
    guest.settle()?;
    guest.verify(0, 750 * MIB)?;
    let before = guest.status()?.counters;
    guest.verify(0, 750 * MIB)?;
    let after = guest.status()?.counters;
    let evicted = after.evicted_pages - before.evicted_pages;
    let clean = after.evicted_clean_pages - before.evicted_clean_pages;
    ensure!(
        clean > evicted / 4 * 3,
        "{clean} of {evicted} pages left without being written again"
    );
    guest.fill(750 * MIB, 250 * MIB)?;
    guest.settle()?;
    guest.verify(0, 1000 * MIB)?;
    guest.end(&[&server])
}
