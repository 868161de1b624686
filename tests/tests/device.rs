//! The vhost-user-blk device, driven by the small VMM: sound requests and hostile ones.

mod small;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use outram_backend::device::{self, Device, DeviceError, Served, refuse_loop};
use outram_backend::handover::Vmm;
use outram_tests::small_vmm::client::SmallVmm;
use serde_json::{Value, json};
use small::{PATIENCE, PlainRam, Socket, device, small_vmm};

/// virtio-blk's request types and status bytes.
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const OK: u64 = 0;
const IOERR: u64 = 1;
const UNSUPP: u64 = 2;
/// Descriptor flags.
const NEXT: u64 = 1;
const WRITE: u64 = 2;
const INDIRECT: u64 = 4;

/// A small VMM whose disk is served.
struct Bench {
    small: SmallVmm,
    device: Arc<Device>,
    ram: Arc<PlainRam>,
    socket: Arc<Socket>,
    ended: std::sync::mpsc::Receiver<Result<Served, DeviceError>>,
}

impl Bench {
    /// 32 MiB of RAM in two blocks; connections are served one after the other.
    fn new(most_pages: usize) -> Result<Self> {
        let socket = Arc::new(Socket::new()?);
        let mut small = small_vmm(&socket, &["16M", "16M"], 2, None)?;
        let (stream, vmm) = socket.accept()?;
        let (device, ram) = device(vmm, most_pages)?;
        let (sender, ended) = std::sync::mpsc::channel();
        let (served, accepting) = (Arc::clone(&device), Arc::clone(&socket));
        std::thread::spawn(move || {
            let mut stream = stream;
            loop {
                if sender.send(served.serve(stream)).is_err() {
                    return;
                }
                let Ok((next, _)) = accepting.listener.accept() else {
                    return;
                };
                stream = next;
            }
        });
        small.wait_connected()?;
        Ok(Self {
            small,
            device,
            ram,
            socket,
            ended,
        })
    }

    fn start(&mut self, queue: u64, page: u64, event_idx: bool) -> Result<()> {
        let command = json!({"do": "disk-start", "queue": queue, "size": 128, "page": page,
            "event_idx": event_idx});
        self.small.command(command).map(|_| ())
    }

    fn request(&mut self, queue: u64, kind: u32, sector: u64, bytes: u32) -> Result<Value> {
        let command = json!({"do": "request", "queue": queue, "type": kind, "sector": sector,
            "bytes": bytes, "page": 2000});
        self.small.command(command)
    }

    /// Offers a chain of raw descriptors whose header, if any, is at page 1000.
    fn submit(&mut self, descriptors: Value, head: u64) -> Result<Value> {
        let header = json!({"do": "poke", "address": 1000 * 4096, "bytes": "00".repeat(16)});
        self.small.command(header)?;
        let command = json!({"do": "submit", "queue": 0, "descriptors": descriptors, "head": head,
            "wait_ms": 120_000});
        self.small.command(command)
    }

    fn wait_until(&self, what: &str, done: impl Fn() -> bool) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !done() {
            ensure!(Instant::now() < deadline, "{what} never came");
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

#[test]
fn a_guest_reads_the_disk_and_learns_what_it_is() -> Result<()> {
    for event_idx in [false, true] {
        // Pins of five pages are the smallest that a ring needs.
        let mut bench = Bench::new(5)?;
        let info = bench.small.command(json!({"do": "info"}))?;
        assert_eq!(
            &info["config"].as_str().context("text")?[..16],
            "0008000000000000"
        );
        for queue in 0..4 {
            bench.start(queue, 100 + 10 * queue, event_idx)?;
            let answer = bench.request(queue, IN, 0, 512)?;
            assert_eq!(answer["status"], OK);
            assert_eq!(answer["used"]["length"], 513);
            assert!(
                answer["data"]
                    .as_str()
                    .context("text")?
                    .starts_with("54686973")
            );
            // Far more than one pin may hold.
            let answer = bench.request(queue, IN, 8, 512 * 1024)?;
            assert_eq!(
                (&answer["status"], &answer["used"]["length"]),
                (&json!(OK), &json!(524_289))
            );
            let answer = bench.request(queue, GET_ID, 0, 20)?;
            assert_eq!(answer["data"], "6f757472616d2d31323365343536370000000000");
        }
        for (kind, sector, bytes, status) in [
            (FLUSH, 0, 0, OK),
            (IN, 2047, 512, OK),
            (IN, 2048, 512, IOERR),
            (IN, u64::MAX, 512, IOERR),
            (IN, 0, 100, IOERR),
            (OUT, 0, 0, IOERR),
            (DISCARD, 0, 0, UNSUPP),
            (0xffff_ffff, 0, 0, UNSUPP),
            (IN, 0, 2 << 20, IOERR),
        ] {
            let answer = bench.request(1, kind, sector, bytes)?;
            assert_eq!(
                answer["status"], status,
                "type {kind} sector {sector} bytes {bytes}"
            );
        }
        // Wraps the ring of 128 several times over.
        for _ in 0..400 {
            assert_eq!(bench.request(2, IN, 3, 512)?["status"], OK);
        }
        assert_eq!(bench.device.counters().stray_device_accesses, 0);
        assert_eq!(bench.device.counters().broken_queues, 0);
        for queue in 0..4 {
            bench
                .small
                .command(json!({"do": "disk-stop", "queue": queue}))?;
        }
        assert_eq!(bench.ram.pins.load(Ordering::SeqCst), 0, "all is unpinned");
    }
    Ok(())
}

/// Pages of RAM for requests; rings lie below, headers and data from there on.
const BUFFERS: u64 = 1000;

/// The pages of buffers that the device marked, once it has marked a used ring's page too: it does
/// that a moment after the driver can see the answer, and other rings' as they are started.
fn marked(bench: &mut Bench, used_page: u64) -> Result<Vec<u64>> {
    let deadline = Instant::now() + PATIENCE;
    let mut all = std::collections::BTreeSet::new();
    while !all.contains(&used_page) {
        ensure!(
            Instant::now() < deadline,
            "the used ring is never marked: {all:?}"
        );
        let answer = bench.small.command(json!({"do": "log-take"}))?;
        let pages = answer["pages"].as_array().context("a list")?;
        all.extend(pages.iter().filter_map(Value::as_u64));
    }
    Ok(all.into_iter().filter(|page| *page >= BUFFERS).collect())
}

#[test]
fn every_page_the_device_writes_is_logged_while_a_migration_runs() -> Result<()> {
    for event_idx in [false, true] {
        let mut bench = Bench::new(64)?;
        for (queue, page) in [(0, 100), (1, 200)] {
            bench.start(queue, page, event_idx)?;
            assert_eq!(bench.request(queue, IN, 0, 512)?["status"], OK);
        }
        // Rings of 128: descriptors, available and used ring take a page each.
        let used = [102, 202];
        for round in 0..3 {
            bench.small.command(json!({"do": "log-start"}))?;
            for (queue, used) in (0..).zip(used) {
                // Header and status in page 2000, 70 KiB of data behind.
                let answer = bench.request(queue, IN, 0, 70 << 10)?;
                assert_eq!(answer["status"], OK, "round {round}");
                let expected: Vec<u64> = (2000..=2018).collect();
                assert_eq!(marked(&mut bench, used)?, expected, "queue {queue}");
                // An answer without data is a status alone.
                assert_eq!(bench.request(queue, OUT, 0, 0)?["status"], IOERR);
                assert_eq!(marked(&mut bench, used)?, [2000]);
            }
            // A larger log in the place of the first; a queue that starts while logging is on.
            bench
                .small
                .command(json!({"do": "log-start", "bytes": 8192}))?;
            bench.start(2, 300, event_idx)?;
            assert_eq!(bench.request(2, GET_ID, 0, 20)?["status"], OK);
            assert_eq!(marked(&mut bench, 302)?, [2000, 2001]);
            bench
                .small
                .command(json!({"do": "disk-stop", "queue": 2}))?;
            bench.small.command(json!({"do": "log-stop"}))?;
            assert_eq!(
                bench.request(1, IN, 0, 512)?["status"],
                OK,
                "unlogged again"
            );
        }
        let counters = bench.device.counters();
        assert_eq!(
            (counters.broken_queues, counters.stray_device_accesses),
            (0, 0)
        );
    }
    Ok(())
}

#[test]
fn a_log_too_small_for_guest_memory_is_refused() -> Result<()> {
    let mut bench = Bench::new(64)?;
    bench.start(0, 100, true)?;
    // 32 MiB are 8192 pages: 1024 bytes of log.
    let small = json!({"do": "log-start", "bytes": 1023});
    assert!(bench.small.command(small).is_err(), "it is cut off");
    let ended = bench.ended.recv_timeout(PATIENCE)?;
    let error = ended.expect_err("refused").to_string();
    assert!(
        error.contains("1023 bytes is too small") && error.contains("1024"),
        "{error}"
    );
    bench.small.command(json!({"do": "connect"}))?;
    bench.start(0, 100, true)?;
    bench
        .small
        .command(json!({"do": "log-start", "bytes": 1024}))?;
    assert_eq!(bench.request(0, GET_ID, 0, 20)?["status"], OK);
    assert_eq!(marked(&mut bench, 102)?, [2000, 2001]);
    Ok(())
}

#[test]
fn broken_structures_break_their_queue_alone() -> Result<()> {
    let mut bench = Bench::new(64)?;
    bench.start(1, 200, true)?;
    let header = 1000 * 4096;
    let cases = [
        ("indirect", json!([[header, 16, INDIRECT, 0]]), 0),
        (
            "a loop",
            json!([[header, 16, NEXT, 1], [header, 16, NEXT, 0]]),
            0,
        ),
        ("a loop on itself", json!([[header, 16, NEXT, 0]]), 0),
        ("next outside", json!([[header, 16, NEXT, 128]]), 0),
        ("head outside", json!([]), 128),
        ("head far outside", json!([]), 65535),
    ];
    for (broken, (what, descriptors, head)) in (1..).zip(cases) {
        bench.start(0, 100, true)?;
        let answer = bench.submit(descriptors, head)?;
        assert_eq!(answer["used"], Value::Null, "{what}");
        assert_eq!(answer["broken"], true, "{what}: the driver is told");
        assert_eq!(bench.device.counters().broken_queues, broken, "{what}");
        assert_eq!(
            bench.request(1, IN, 0, 512)?["status"],
            OK,
            "the other queue lives"
        );
        bench
            .small
            .command(json!({"do": "disk-stop", "queue": 0}))?;
    }
    bench.start(0, 100, true)?;
    let answer = bench
        .small
        .command(json!({"do": "overrun", "queue": 0, "by": 129, "wait_ms": 120_000}))?;
    assert_eq!(answer["broken"], true, "more offered than there can be");
    bench
        .small
        .command(json!({"do": "disk-stop", "queue": 0}))?;
    bench.start(0, 100, true)?;
    assert_eq!(
        bench.request(0, IN, 0, 512)?["status"],
        OK,
        "a reset heals it"
    );
    assert_eq!(bench.device.counters().stray_device_accesses, 0);
    Ok(())
}

#[test]
fn bad_buffers_fail_their_request_alone() -> Result<()> {
    let mut bench = Bench::new(64)?;
    bench.start(0, 100, true)?;
    let header = 1000 * 4096;
    let status = header + 16;
    let data = 1001 * 4096;
    let end = 32 << 20;
    let sound = [header, 16, NEXT, 1];
    let cases = [
        (
            "data outside RAM",
            json!([
                sound,
                [1u64 << 40, 512, NEXT | WRITE, 2],
                [status, 1, WRITE, 0]
            ]),
        ),
        (
            "data across the end",
            json!([
                sound,
                [end - 256, 512, NEXT | WRITE, 2],
                [status, 1, WRITE, 0]
            ]),
        ),
        (
            "data that wraps",
            json!([
                sound,
                [u64::MAX - 10, 512, NEXT | WRITE, 2],
                [status, 1, WRITE, 0]
            ]),
        ),
        (
            "length 0",
            json!([sound, [data, 0, NEXT | WRITE, 2], [status, 1, WRITE, 0]]),
        ),
        (
            "4 GiB",
            json!([
                sound,
                [data, u32::MAX, NEXT | WRITE, 2],
                [status, 1, WRITE, 0]
            ]),
        ),
        (
            "a short header",
            json!([[header, 8, NEXT, 1], [status, 1, WRITE, 0]]),
        ),
        (
            "header behind status",
            json!([[status, 1, WRITE | NEXT, 1], [header, 16, 0, 0]]),
        ),
        (
            "data to read in a read",
            json!([sound, [data, 100, NEXT, 2], [status, 100, WRITE, 0]]),
        ),
    ];
    for (what, descriptors) in cases {
        let answer = bench.submit(descriptors.clone(), 0)?;
        assert_eq!(answer["used"]["length"], 1, "{what}: {answer}");
        let at = if what.starts_with("data to read") {
            status + 99
        } else {
            status
        };
        let byte = bench
            .small
            .command(json!({"do": "peek", "address": at, "length": 1}))?;
        assert_eq!(byte["bytes"], "01", "{what}: IOERR");
    }
    for (what, descriptors) in [
        ("no status", json!([[header, 16, 0, 0]])),
        (
            "status outside RAM",
            json!([sound, [1u64 << 40, 1, WRITE, 0]]),
        ),
    ] {
        let answer = bench.submit(descriptors, 0)?;
        assert_eq!(answer["used"]["length"], 0, "{what}: {answer}");
    }
    // A buffer across both blocks of RAM, which touch, is sound.
    let across = json!([
        sound,
        [(16 << 20) - 256, 512, NEXT | WRITE, 2],
        [status, 1, WRITE, 0]
    ]);
    assert_eq!(bench.submit(across, 0)?["used"]["length"], 513);
    let counters = bench.device.counters();
    assert_eq!(
        (counters.broken_queues, counters.stray_device_accesses),
        (0, 0),
        "{counters:?}"
    );
    Ok(())
}

#[test]
fn rings_that_the_guest_gives_back_are_caught() -> Result<()> {
    let mut bench = Bench::new(64)?;
    bench.start(0, 100, true)?;
    bench.start(1, 200, true)?;
    assert_eq!(bench.request(0, IN, 0, 512)?["status"], OK);
    // The balloon swallows the descriptor table and the used ring, pinned or not.
    bench
        .small
        .command(json!({"do": "discard", "page": 100, "pages": 1}))?;
    bench
        .small
        .command(json!({"do": "discard", "page": 102, "pages": 1}))?;
    // One more request is offered, without the guest itself touching these pages again.
    let offer = json!({"do": "overrun", "queue": 0, "by": 1, "wait_ms": 0});
    bench.small.command(offer)?;
    let device = Arc::clone(&bench.device);
    bench.wait_until("a stray access", || {
        device.counters().stray_device_accesses > 0
    })?;
    let command = json!({"do": "request", "queue": 1, "type": 0, "sector": 0, "bytes": 512,
        "page": 2100, "vcpu": 1});
    assert_eq!(
        bench.small.command(command)?["status"],
        OK,
        "the other queue lives"
    );
    bench
        .small
        .command(json!({"do": "disk-stop", "queue": 0}))?;
    bench.start(0, 100, true)?;
    assert_eq!(
        bench.request(0, IN, 0, 512)?["status"],
        OK,
        "a reset heals it"
    );
    Ok(())
}

#[test]
fn a_front_end_comes_back_again_and_again() -> Result<()> {
    let mut bench = Bench::new(64)?;
    for round in 0..10 {
        bench.start(0, 100, round % 2 == 0)?;
        assert_eq!(bench.request(0, IN, 0, 4096)?["status"], OK);
        // Without stopping the queue: as after a crash of the front end's connection.
        bench.small.command(json!({"do": "connect"}))?;
        let ended = bench.ended.recv_timeout(PATIENCE)?;
        assert_eq!(ended?, Served::Disconnected);
        bench.wait_until("unpinning", || bench.ram.pins.load(Ordering::SeqCst) == 0)?;
    }
    let base = |bench: &mut Bench| bench.small.command(json!({"do": "disk-stop", "queue": 0}));
    bench.start(0, 100, true)?;
    for _ in 0..5 {
        bench.request(0, FLUSH, 0, 0)?;
    }
    assert_eq!(base(&mut bench)?["base"], 5, "where to go on is told");
    Ok(())
}

/// What QEMU does with a paused guest: it starts the queues where it connects again, and kicks them.
#[test]
fn only_what_the_guest_asks_of_a_running_queue_counts_as_use() -> Result<()> {
    let mut bench = Bench::new(64)?;
    bench.start(0, 100, true)?;
    ensure!(!bench.device.is_driven(), "a queue that starts is no use");
    ensure!(bench.request(0, FLUSH, 0, 0)?["status"] == OK);
    ensure!(bench.device.is_driven());
    bench.small.command(json!({"do": "disconnect"}))?;
    bench.ended.recv_timeout(PATIENCE)??;
    ensure!(bench.device.is_driven(), "the VMM may be at its end");
    // Asked of nobody.
    let request = json!({"do": "request", "queue": 0, "type": FLUSH, "sector": 0, "bytes": 0,
        "page": 2000, "wait_ms": 50});
    ensure!(bench.small.command(request)?["used"].is_null());
    let served = bench.device.counters().requests;
    bench.small.command(json!({"do": "connect"}))?;
    bench.small.command(json!({"do": "disk-again"}))?;
    bench.wait_until("what was left over", || {
        bench.device.counters().requests > served
    })?;
    ensure!(!bench.device.is_driven(), "it was there before");
    let keep = json!({"do": "disk-stop", "queue": 0, "keep": true});
    bench.small.command(keep)?;
    bench.small.command(json!({"do": "disk-again"}))?;
    // It finds the answer to the former one, and does not wait for its own.
    bench.request(0, FLUSH, 0, 0)?;
    bench.wait_until("the request", || bench.device.is_driven())?;
    bench
        .small
        .command(json!({"do": "disk-stop", "queue": 0}))?;
    ensure!(!bench.device.is_driven(), "every queue is stopped");
    Ok(())
}

#[test]
fn memory_plugged_later_serves_as_buffers() -> Result<()> {
    let mut bench = Bench::new(64)?;
    bench.start(0, 100, true)?;
    let pages = bench
        .small
        .command(json!({"do": "plug", "bytes": 8 << 20}))?;
    assert_eq!(pages["pages"], 10 * 1024);
    let command = json!({"do": "request", "queue": 0, "type": GET_ID, "sector": 0, "bytes": 20,
        "page": 9000});
    assert_eq!(bench.small.command(command)?["status"], OK);
    Ok(())
}

#[test]
fn garbage_cuts_the_connection_and_nothing_else() -> Result<()> {
    let mut bench = Bench::new(64)?;
    let socket = Arc::clone(&bench.socket);
    for garbage in [
        vec![0xff; 64],
        // GET_FEATURES that claims a body of 4 GiB.
        [1u32, 1, u32::MAX]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect(),
        // SET_VRING_NUM of queue 999.
        [8u32, 1, 8, 999, 16]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect(),
        // SET_VRING_ADDR without any memory table.
        [9u32, 1, 40]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .chain([0; 40])
            .collect(),
    ] {
        // One connection is served at a time: first ours ends, then theirs.
        bench.small.command(json!({"do": "disconnect"}))?;
        let ours = bench.ended.recv_timeout(PATIENCE)?;
        assert!(matches!(ours, Ok(Served::Disconnected)), "{ours:?}");
        let mut stranger = UnixStream::connect(&socket.path)?;
        stranger.write_all(&garbage)?;
        let theirs = bench.ended.recv_timeout(PATIENCE)?;
        assert!(
            matches!(theirs, Err(DeviceError::Protocol(_))),
            "{theirs:?}"
        );
        bench.small.command(json!({"do": "connect"}))?;
    }
    bench.start(0, 100, true)?;
    assert_eq!(bench.request(0, IN, 0, 512)?["status"], OK);
    Ok(())
}

#[test]
fn a_refused_front_end_is_cut_off_until_told_otherwise() -> Result<()> {
    let socket = Arc::new(Socket::new()?);
    let stop = Arc::new(AtomicBool::new(false));
    let (refusing, until) = (Arc::clone(&socket), Arc::clone(&stop));
    let refuser = std::thread::spawn(move || refuse_loop(&refusing.listener, "a test", &until));
    for _ in 0..3 {
        let mut small = small_vmm(&socket, &["16M"], 1, None)?;
        let error = small.wait_connected().expect_err("it is refused");
        assert!(format!("{error:#}").contains("features"), "{error:#}");
    }
    stop.store(true, Ordering::Release);
    refuser.join().expect("no panic")?;
    Ok(())
}

#[test]
fn a_silent_peer_is_given_up() -> Result<()> {
    let (ours, theirs) = UnixStream::pair()?;
    let wait = |stream| device::wait_first_message(stream, Duration::from_millis(50));
    assert!(matches!(wait(&ours), Err(DeviceError::Silent(_))));
    (&theirs).write_all(b"x")?;
    wait(&ours)?;
    let (ours, theirs) = UnixStream::pair()?;
    drop(theirs);
    assert!(matches!(wait(&ours), Err(DeviceError::Connection(_))));
    let us = Vmm::open(std::process::id() as i32)?;
    assert!(!us.has_ended());
    Ok(())
}
