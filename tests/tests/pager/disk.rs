//! The device over a paged guest: its rings and buffers lie in evicted pages.

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use outram_tests::hermetic::command::wait_for;
use outram_wire::control::{Phase, Status};
use serde_json::{Value, json};

use crate::fixture::{self, Guest, LONG, Lab, PAGE, Wish, halt};

pub(crate) const TESTS: &[crate::Test] = &[
    ("rings_and_buffers_in_evicted_pages", evicted),
    ("broken_requests_in_evicted_pages", broken),
    ("a_disk_that_qemu_is_silent_about", silent),
    ("a_queue_stops_while_its_buffers_are_out_of_reach", stopped),
];

/// virtio-blk's request types and status bytes.
const IN: u64 = 0;
const OUT: u64 = 1;
const FLUSH: u64 = 4;
const GET_ID: u64 = 8;
const OK: u64 = 0;
const IOERR: u64 = 1;
/// Descriptor flags.
const NEXT: u64 = 1;
const WRITE: u64 = 2;
const INDIRECT: u64 = 4;

/// Pages before this one are the disk's; the others are written, verified and evicted.
pub(crate) const MEMORY: u64 = 1000;
/// How many those are.
pub(crate) const PAGES: u64 = 15_000;

/// Rings of queue 0 from here on; header and buffers of requests behind them.
const RINGS: u64 = 8;
const BUFFERS: u64 = 100;

/// Fills memory until requests' headers and buffers are evicted.
pub(crate) fn push_out(guest: &mut Guest) -> Result<()> {
    fixture::push_out(guest, BUFFERS..BUFFERS + 130, MEMORY..MEMORY + PAGES)
}

/// Starts a queue of the disk.
pub(crate) fn start_queue(guest: &mut Guest, queue: u64) -> Result<()> {
    let command = json!({"do": "disk-start", "queue": queue, "size": 128,
        "page": RINGS + 8 * queue, "event_idx": queue.is_multiple_of(2)});
    guest.vmm.command(command).map(drop)
}

/// Sends a request for the disk's first sector, which waits that long for its answer.
pub(crate) fn send_request(guest: &mut Guest, wait_ms: u64) -> Result<u64> {
    let wanted = json!({"queue": 0, "type": IN, "sector": 0, "bytes": 512, "page": BUFFERS,
        "wait_ms": wait_ms});
    guest.send(1, "request", wanted)
}

fn request(guest: &mut Guest, kind: u64, sector: u64, bytes: u64) -> Result<Value> {
    let wanted = json!({"queue": 0, "type": kind, "sector": sector, "bytes": bytes,
        "page": BUFFERS, "wait_ms": 120_000});
    guest.command(1, "request", wanted)
}

fn evicted(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = Guest::start_on(lab, &server)?;
    // Pages in which the rings and buffers will lie hold something else, far away.
    guest.fill(0, MEMORY)?;
    fixture::push_out(&mut guest, RINGS..BUFFERS + 130, MEMORY..MEMORY + PAGES)?;
    start_queue(&mut guest, 0)?;
    start_queue(&mut guest, 1)?;
    for (kind, sector, bytes, status) in [
        (IN, 0, 512, OK),
        (IN, 8, 512 * 1024, OK),
        (IN, 0, 4096, OK),
        (GET_ID, 0, 20, OK),
        (FLUSH, 0, 0, OK),
        (OUT, 0, 0, IOERR),
        (OUT, 0, 512, IOERR),
        (IN, 2048, 512, IOERR),
        (IN, u64::MAX, 512, IOERR),
    ] {
        guest.fill(BUFFERS, 130)?;
        push_out(&mut guest)?;
        if bytes == 4096 {
            // The guest's own read protects the page, as far as pages may keep their slots: those
            // that do make room. The device writes past that protection.
            guest.command(0, "discard", json!({"page": 11_000, "pages": 5000}))?;
            let buffer = json!({"page": BUFFERS + 1, "pages": 1, "write": false});
            guest.command(1, "touch", buffer)?;
        }
        let answer = request(&mut guest, kind, sector, bytes)?;
        ensure!(
            answer["status"] == status,
            "type {kind} sector {sector}: {answer}"
        );
        if kind == IN && status == OK {
            // What the device wrote is kept when its page is evicted.
            let data = answer["data"].clone();
            push_out(&mut guest)?;
            let address = (BUFFERS + 1) * PAGE;
            let seen = guest.command(0, "peek", json!({"address": address, "length": 64}))?;
            ensure!(seen["bytes"] == data, "{} turned into {seen}", data);
        }
    }
    guest.verify(MEMORY, PAGES)?;
    // Under eviction by others, again and again.
    let work = json!({"page": MEMORY, "pages": PAGES, "seconds": 2.0, "write_share": 0.5});
    let load = guest.send(2, "work", work)?;
    for round in 0..60 {
        let answer = request(&mut guest, IN, round, 64 * 1024)?;
        ensure!(answer["status"] == OK, "{answer}");
    }
    crate::fixture::demand_sound(&guest.answer(load)?)?;
    guest.verify(MEMORY, PAGES)?;
    for queue in 0..2 {
        guest
            .vmm
            .command(json!({"do": "disk-stop", "queue": queue}))?;
    }
    guest.squeeze()?;
    guest.end(&[&server])
}

/// Chains that are no chains, with buffers that are none, all in pages that have to be fetched.
fn broken(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = Guest::start_on(lab, &server)?;
    guest.fill(0, MEMORY)?;
    let header = BUFFERS * PAGE;
    let status = header + 16;
    let data = header + PAGE;
    let end = 64 << 20;
    let sound = json!([header, 16, NEXT, 1]);
    let with_data = |address: u64, length: u64, flags: u64| {
        json!([sound, [address, length, flags, 2], [status, 1, WRITE, 0]])
    };
    // What becomes of the request: null where its queue breaks, else bytes written.
    let cases = [
        ("indirect", json!([[header, 16, INDIRECT, 0]]), Value::Null),
        (
            "a loop",
            json!([[header, 16, NEXT, 1], [header, 16, NEXT, 0]]),
            Value::Null,
        ),
        (
            "next outside",
            json!([[header, 16, NEXT, 200]]),
            Value::Null,
        ),
        (
            "outside RAM",
            with_data(1 << 40, 512, NEXT | WRITE),
            json!(1),
        ),
        (
            "across the end",
            with_data(end - 256, 512, NEXT | WRITE),
            json!(1),
        ),
        (
            "wrapping",
            with_data(u64::MAX - 10, 512, NEXT | WRITE),
            json!(1),
        ),
        ("no bytes", with_data(data, 0, NEXT | WRITE), json!(1)),
        (
            "4 GiB",
            with_data(data, u64::from(u32::MAX), NEXT | WRITE),
            json!(1),
        ),
        (
            "wrong direction",
            json!([[header, 16, NEXT | WRITE, 1], [status, 1, WRITE, 0]]),
            json!(1),
        ),
    ];
    for (what, chain, written) in cases {
        push_out(&mut guest)?;
        start_queue(&mut guest, 0)?;
        let poke = json!({"address": header, "bytes": "00".repeat(16)});
        guest.command(1, "poke", poke)?;
        push_out(&mut guest)?;
        let breaks = written.is_null();
        let chain = json!({"queue": 0, "descriptors": chain, "head": 0, "wait_ms": 120_000});
        let answer = guest.command(1, "submit", chain).context(what)?;
        match breaks {
            true => ensure!(
                answer["used"].is_null() && answer["broken"] == true,
                "{what}: {answer}"
            ),
            false => {
                ensure!(answer["used"]["length"] == written, "{what}: {answer}");
                let seen = guest.command(1, "peek", json!({"address": status, "length": 1}))?;
                ensure!(seen["bytes"] == "01", "{what}: status {seen}");
            }
        }
        guest.vmm.command(json!({"do": "disk-stop", "queue": 0}))?;
    }
    // A reset heals it, and the memory around is as it was.
    start_queue(&mut guest, 0)?;
    ensure!(
        request(&mut guest, IN, 0, 512)?["status"] == OK,
        "not healed"
    );
    guest.verify(MEMORY, PAGES)?;
    guest.verify(BUFFERS + 10, 500)?;
    guest.end(&[&server])
}

/// A stop is for QEMU's main thread: it waits for no server, and what was not answered is made again.
fn stopped(lab: &Lab) -> Result<()> {
    /// So far from the header's that it does not come with it.
    const DATA: u64 = BUFFERS + 64;
    let server = lab.server()?;
    let mut guest = Guest::start_on(lab, &server)?;
    guest.fill(0, MEMORY)?;
    start_queue(&mut guest, 0)?;
    push_out(&mut guest)?;
    let (header, data) = (BUFFERS * PAGE, DATA * PAGE);
    let status = header + 16;
    // A read of the first sector; the page of its header is there, that of its data is not.
    let poke = json!({"address": header, "bytes": format!("{}ff", "00".repeat(16))});
    guest.command(1, "poke", poke)?;
    ensure!(guest.present(DATA, 1)? == 0, "the buffer is there");
    halt(&server)?;
    let chain = json!([
        [header, 16, NEXT, 1],
        [data, 512, NEXT | WRITE, 2],
        [status, 1, WRITE, 0]
    ]);
    let submit = json!({"queue": 0, "descriptors": chain, "head": 0, "wait_ms": 300});
    let answer = guest.command(1, "submit", submit)?;
    ensure!(
        answer["used"].is_null(),
        "answered without its buffer: {answer}"
    );
    for _ in 0..3 {
        let stop = json!({"do": "disk-stop", "queue": 0, "keep": true});
        let answer = guest.vmm.command(stop)?;
        ensure!(answer["base"] == 0, "{answer}");
        guest.vmm.command(json!({"do": "disk-again"}))?;
    }
    server.signal(Signal::SIGCONT)?;
    wait_for("the request to be served", LONG, || {
        let seen = guest.command(1, "peek", json!({"address": status, "length": 1}))?;
        ensure!(
            seen["bytes"] == "00" || seen["bytes"] == "ff",
            "status {seen}"
        );
        Ok((seen["bytes"] == "00").then_some(()))
    })?;
    // Nothing stays pinned of what was interrupted.
    push_out(&mut guest)?;
    guest.verify(MEMORY, PAGES)?;
    guest.vmm.command(json!({"do": "disk-stop", "queue": 0}))?;
    guest.end(&[&server])
}

/// As QEMU before 9.1 is, where a backend died while it connected again.
fn silent(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let wish = Wish {
        servers: &[&server.address],
        disk_mib: Some(8),
        ..Wish::default()
    };
    let mut guest = Guest::start(lab, &wish)?;
    let connected = |status: &Status| status.disk.as_ref().and_then(|disk| disk.connected);
    guest.wait_status("the disk's connection", |status| {
        connected(status) == Some(true)
    })?;
    guest.vmm.command(json!({"do": "connect-silently"}))?;
    let status = guest.wait_status("its silence to be told", |status| {
        let disk = status.disk.as_ref();
        disk.is_some_and(|disk| disk.detail.is_some())
    })?;
    let detail = status.disk.as_ref().and_then(|disk| disk.detail.clone());
    ensure!(
        detail.is_some_and(|detail| detail.contains("says nothing")),
        "{status:?}"
    );
    ensure!(connected(&status) == Some(false) && status.phase == Phase::Serving);
    guest.fill(0, 6000)?;
    guest.verify(0, 6000)?;
    guest.connect()?;
    let status = guest.wait_status("the disk's connection", |status| {
        connected(status) == Some(true)
    })?;
    ensure!(status.disk.is_some_and(|disk| disk.detail.is_none()));
    guest.end(&[&server])
}
