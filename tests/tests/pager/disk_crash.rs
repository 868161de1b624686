//! The backend is killed (SIGKILL) while its guest uses the disk, and another one goes on: every
//! request is answered, and every block holds what was written last.

use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::proxy::Proxy;
use outram_tests::hermetic::server::MemServer;
use outram_wire::control::{DiskState, Status};
use serde_json::{Value, json};

use crate::fixture::{Guest, LONG, Lab, PAGE, Wish, demand_sound, halt};

pub(crate) const TESTS: &[crate::Test] = &[
    ("a_backend_killed_under_disk_load", again_and_again),
    ("a_backend_killed_while_its_disk_comes_back", within),
    (
        "a_disk_taken_over_while_its_servers_are_out_of_reach",
        alone,
    ),
    ("a_small_disk_with_requests_under_way", channel),
];

/// Pages before this one are the disk's; the others are written, verified and evicted.
const MEMORY: u64 = 1000;
const PAGES: u64 = 13_000;

/// Rings of queue 0 from here on, and each queue's buffers.
const RINGS: u64 = 8;
const BUFFERS: [u64; 2] = [100, 400];

/// Blocks of each queue: more than two slabs for each request under way.
const BLOCKS: u64 = 4096;
const DEPTH: u64 = 6;

const DISK_MIB: u64 = 64;

/// Kills under load.
const KILLS: u64 = 40;

/// Instants to kill at: spread, and the same in every run.
fn instant(round: u64) -> Duration {
    Duration::from_micros(round * 9973 % 83_000)
}

fn wish<'a>(servers: &'a [&'a str]) -> Wish<'a> {
    Wish {
        servers,
        disk_mib: Some(DISK_MIB),
        ..Wish::default()
    }
}

/// A guest with both queues started and more memory in use than it may have here.
fn started(lab: &Lab, wish: &Wish<'_>) -> Result<Guest> {
    let mut guest = Guest::start(lab, wish)?;
    guest.fill(MEMORY, PAGES)?;
    for queue in 0..2 {
        let command = json!({"do": "disk-start", "queue": queue, "size": 128,
            "page": RINGS + 8 * queue, "event_idx": queue == 0});
        guest.vmm.command(command)?;
    }
    Ok(guest)
}

/// Disk load on both queues, and memory load beside it.
fn load(guest: &mut Guest, seconds: f64, seed: u64) -> Result<Vec<u64>> {
    let mut sent = Vec::new();
    for (queue, page) in (0..).zip(BUFFERS) {
        let wanted = json!({"queue": queue, "first": queue * BLOCKS, "blocks": BLOCKS,
            "page": page, "depth": DEPTH, "seconds": seconds, "seed": seed + queue});
        sent.push(guest.send(queue as usize, "disk-load", wanted)?);
    }
    let work = json!({"page": MEMORY, "pages": PAGES, "seconds": seconds, "write_share": 0.5,
        "seed": seed});
    sent.push(guest.send(2, "work", work)?);
    Ok(sent)
}

fn demand_answers(guest: &mut Guest, sent: Vec<u64>) -> Result<Vec<Value>> {
    let mut answers = Vec::new();
    for id in sent {
        let answer = guest.answer(id)?;
        demand_sound(&answer)?;
        ensure!(answer["errors"].as_u64().unwrap_or(0) == 0, "{answer}");
        answers.push(answer);
    }
    guest.verify(MEMORY, PAGES)?;
    Ok(answers)
}

/// Ends a guest that uses its disk. What its last backend found waiting does not count: the disk would stay.
fn end_in_use(mut guest: Guest, servers: &[&MemServer]) -> Result<()> {
    let sent = load(&mut guest, 0.5, 6)?;
    demand_answers(&mut guest, sent)?;
    guest.end(servers)
}

/// Has the front end come back, as QEMU does by itself.
fn disk_again(guest: &mut Guest) -> Result<()> {
    guest.connect()?;
    guest.vmm.command(json!({"do": "disk-again"}))?;
    Ok(())
}

fn disk_of(status: &Status) -> Result<&outram_wire::control::DiskStatus> {
    let disk = status.disk.as_ref();
    disk.ok_or_else(|| anyhow::anyhow!("it has no disk: {status:#?}"))
}

/// At any instant: requests wait and are carried out, and every block is right.
fn again_and_again(lab: &Lab) -> Result<()> {
    let servers = [lab.server()?, lab.server()?];
    let proxy = Proxy::start(&lab.address(), &servers[1].address)?;
    let addresses = [&servers[0].address[..], &proxy.address[..]];
    let wish = wish(&addresses);
    let mut guest = started(lab, &wish)?;
    for batch in 0..KILLS / 10 {
        let sent = load(&mut guest, 4.0, batch)?;
        for round in 0..10 {
            std::thread::sleep(Duration::from_millis(30) + instant(batch * 10 + round));
            if round % 2 == 0 {
                // Writes that have landed, and of which the backend has not heard.
                proxy.withhold(true);
                std::thread::sleep(Duration::from_millis(20));
            }
            guest.kill_backend()?;
            proxy.withhold(false);
            guest.take_over(lab, &wish)?;
            disk_again(&mut guest)?;
        }
        let answers = demand_answers(&mut guest, sent)?;
        let requests = |answer: &Value| answer["requests"].as_u64().unwrap_or(0);
        ensure!(
            answers[..2].iter().all(|answer| requests(answer) > 100),
            "{answers:?}"
        );
    }
    let status = guest.status()?;
    let disk = disk_of(&status)?;
    ensure!(
        disk.state == DiskState::Open && disk.errors == 0,
        "{disk:#?}"
    );
    ensure!(disk.integrity_failures == 0, "{disk:#?}");
    end_in_use(guest, &[&servers[0], &servers[1]])
}

/// Killed while it opens the disk again, while QEMU connects, and while nothing of the sort has begun.
fn within(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let addresses = [&server.address[..]];
    let wish = wish(&addresses);
    let mut guest = started(lab, &wish)?;
    let sent = load(&mut guest, 4.0, 77)?;
    for round in 0..5 {
        std::thread::sleep(instant(round));
        for attempt in 0..3 {
            guest.kill_backend()?;
            guest.take_over(lab, &wish)?;
            // Whether or not they are answered before the backend dies.
            let connect = guest.vmm.send(json!({"do": "connect"}))?;
            let again = guest.vmm.send(json!({"do": "disk-again"}))?;
            std::thread::sleep(Duration::from_micros(attempt * 3700 + round * 1900));
            guest.kill_backend()?;
            // Before they are waited for: a vCPU that has the rings may wait in a fault, and whoever tells the
            // rings waits for it.
            guest.take_over(lab, &wish)?;
            for id in [connect, again] {
                let _ = guest.vmm.wait(id, LONG);
            }
        }
        disk_again(&mut guest)?;
    }
    demand_answers(&mut guest, sent)?;
    end_in_use(guest, &[&server])
}

/// Memory is served without the disk's server; the disk waits for it, and loses nothing.
fn alone(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let addresses = [&server.address[..]];
    let wish = wish(&addresses);
    let mut guest = started(lab, &wish)?;
    // Long enough that it goes on when the server is halted, on a crowded machine too.
    let sent = load(&mut guest, 30.0, 5)?;
    std::thread::sleep(Duration::from_millis(700));
    halt(&server)?;
    std::thread::sleep(Duration::from_millis(100));
    guest.kill_backend()?;
    guest.take_over(lab, &wish)?;
    guest.connect()?;
    // A vCPU whose buffers have left holds its rings until the server gives them back.
    let again = guest.vmm.send(json!({"do": "disk-again"}))?;
    guest.demand_silence(sent[0])?;
    let parked = disk_of(&guest.status()?)?.state;
    ensure!(
        parked == DiskState::Parked,
        "opened without a server: {parked:?}"
    );
    server.signal(Signal::SIGCONT)?;
    guest.answer(again)?;
    demand_answers(&mut guest, sent)?;
    // At rest all is where the table says.
    guest.kill_backend()?;
    guest.take_over(lab, &wish)?;
    disk_again(&mut guest)?;
    end_in_use(guest, &[&server])
}

/// The disk that is only the channel has its requests answered too.
fn channel(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let addresses = [&server.address[..]];
    let wish = Wish {
        servers: &addresses,
        ..Wish::default()
    };
    let mut guest = started(lab, &wish)?;
    guest.kill_backend()?;
    guest.take_over(lab, &wish)?;
    // Offered while no device is there to see the kick.
    let asked = json!({"queue": 0, "type": 0, "sector": 0, "bytes": 4096, "page": BUFFERS[0],
        "wait_ms": 300});
    let answer = guest.command(0, "request", asked)?;
    ensure!(answer["used"].is_null(), "{answer}");
    disk_again(&mut guest)?;
    // "This", in the first sector of such a disk.
    let address = (BUFFERS[0] + 1) * PAGE;
    wait_for("the answer", LONG, || {
        let seen = guest.command(0, "peek", json!({"address": address, "length": 4}))?;
        Ok((seen["bytes"] == "54686973").then_some(()))
    })?;
    guest.end(&[&server])
}
