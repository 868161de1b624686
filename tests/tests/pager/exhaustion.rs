//! A backend that is given no more of something, and signals that come to everybody at once: what is
//! missing is waited for, or the pager dies and another goes on; memory is right either way.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outram_tests::hermetic::command::{run, wait_for};
use outram_tests::hermetic::proxy::Proxy;
use outram_wire::control::{Phase, Status};
use serde_json::json;

use crate::fixture::{Guest, LONG, Lab, Wish, demand_gone, demand_sound};

pub(crate) const TESTS: &[crate::Test] = &[
    ("a_backend_without_descriptors", descriptors),
    ("a_backend_without_address_space_and_threads", address_space),
    ("a_state_directory_that_is_full", full),
    ("a_backend_that_stood_still_goes_on", stood_still),
    (
        "a_backend_that_stood_still_beyond_its_lease",
        beyond_its_lease,
    ),
    ("everything_is_told_to_end_at_once", all_end),
];

/// Written and mostly evicted by every test here.
const FILLED: u64 = 12_000;

fn filled(lab: &Lab, wish: &Wish<'_>) -> Result<Guest> {
    let mut guest = Guest::start(lab, wish)?;
    guest.fill(0, FILLED)?;
    Ok(guest)
}

fn work(guest: &mut Guest, seconds: f64) -> Result<u64> {
    guest.send(
        0,
        "work",
        json!({"page": 0, "pages": FILLED, "seconds": seconds, "write_share": 0.5, "seed": 4}),
    )
}

fn verify_all(guest: &mut Guest) -> Result<u64> {
    guest.send(1, "verify", json!({"page": 0, "pages": FILLED}))
}

/// Sets what a process may have of something, up to what it may raise that to itself.
fn limit(pid: u32, resource: &str, most: &str) -> Result<()> {
    let option = format!("--{resource}={most}:");
    run("prlimit", &["--pid", &pid.to_string(), &option]).map(drop)
}

/// What a process may raise its limit to, as the kernel tells it.
fn hard_limit(pid: u32, name: &str) -> Result<String> {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits"))?;
    let line = limits.lines().find_map(|line| line.strip_prefix(name));
    let mut values = line.context("such a limit")?.split_whitespace();
    Ok(values.nth(1).context("a hard limit")?.to_owned())
}

fn signal(pid: u32, signal: Signal) -> Result<()> {
    Ok(kill(Pid::from_raw(pid as i32), signal)?)
}

/// Connections that were cut cannot be made again, nor new ones be taken in: all of it comes later.
fn descriptors(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let proxy = Proxy::start(&lab.address(), &server.address)?;
    let wish = Wish {
        servers: &[&proxy.address],
        ..Wish::default()
    };
    let mut guest = filled(lab, &wish)?;
    guest.settle()?;
    let pid = guest.status()?.backend_pid;
    let most = hard_limit(pid, "Max open files")?;
    // Taken in right before there is no room for it: one that asks nothing for long is let go of.
    let mut control = guest.control()?;
    control.status()?;
    limit(pid, "nofile", "3")?;
    proxy.cut();
    let late = UnixStream::connect(guest.dir.join("control.sock"))?;
    let all = verify_all(&mut guest)?;
    wait_for("the stall to be told", LONG, || {
        Ok((control.status()?.phase == Phase::Stalled).then_some(()))
    })?;
    guest.demand_silence(all)?;
    limit(pid, "nofile", &most)?;
    demand_sound(&guest.answer(all)?)?;
    drop(late);
    ensure!(guest.status()?.backend_pid == pid, "it died of it");
    guest.end(&[&server])
}

/// No thread can be made, nor any room for one. What asks for one is refused; where the pager itself
/// cannot do without, it dies (so does Rust's own library), and another takes over.
fn address_space(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let proxy = Proxy::start(&lab.address(), &server.address)?;
    let wish = Wish {
        servers: &[&proxy.address],
        supervised: true,
        ..Wish::default()
    };
    let mut guest = filled(lab, &wish)?;
    let pid = guest.status()?.backend_pid;
    let sent = work(&mut guest, 3.0)?;
    limit(pid, "as", "1048576")?;
    // Each wants a thread, and the servers' sessions are made anew. It may die of the first of them, and
    // the others are refused then.
    let asked: Vec<UnixStream> = (0..8)
        .flat_map(|_| UnixStream::connect(guest.dir.join("control.sock")))
        .collect();
    ensure!(!asked.is_empty(), "nobody was asked for a thread");
    proxy.cut();
    std::thread::sleep(Duration::from_secs(1));
    drop(asked);
    // It may die just now.
    let is_alive =
        fs::read_link(format!("/proc/{pid}/exe")).is_ok() && limit(pid, "as", "unlimited").is_ok();
    demand_sound(&guest.answer(sent)?)?;
    guest.verify(0, FILLED)?;
    let status = guest.status()?;
    ensure!(is_alive || status.takeovers == 1, "{status:?}");
    ensure!(status.lost_bytes == 0, "{status:?}");
    guest.vmm.kill()?;
    ensure!(guest.wait_backend()?.success(), "{}", guest.log());
    demand_gone(&guest.dir)
}

/// Somebody with the right to has filled the guest's tmpfs: pages that need room in the table wait
/// until there is some.
fn full(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let wish = Wish {
        servers: &[&server.address],
        supervised: true,
        ..Wish::default()
    };
    let mut guest = Guest::start(lab, &wish)?;
    let part = FILLED / 4;
    guest.fill(0, part)?;
    guest.settle()?;
    let path = guest.dir.join("state/ballast");
    let mut ballast = File::create(&path)?;
    let zeros = vec![0; 1 << 12];
    while ballast.write_all(&zeros).is_ok() {}
    let rest = guest.send(0, "fill", json!({"page": part, "pages": FILLED - part}))?;
    let known = guest.send(1, "verify", json!({"page": 0, "pages": part}))?;
    guest.demand_silence(rest)?;
    drop(ballast);
    fs::remove_file(path)?;
    guest.answer(rest)?;
    demand_sound(&guest.answer(known)?)?;
    guest.verify(0, FILLED)?;
    guest.connect()?;
    guest.end(&[&server])
}

/// As while its host was suspended, until something has come.
fn stand_still(guest: &Guest, come: impl FnOnce() -> Result<()>) -> Result<()> {
    let pid = guest.status()?.backend_pid;
    signal(pid, Signal::SIGSTOP)?;
    let come = come();
    signal(pid, Signal::SIGCONT)?;
    come
}

fn stood_still(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let wish = Wish {
        servers: &[&server.address],
        ..Wish::default()
    };
    let mut guest = filled(lab, &wish)?;
    let sent = work(&mut guest, 3.0)?;
    std::thread::sleep(Duration::from_millis(500));
    // Longer than either side waits for a sign of life of the other.
    stand_still(&guest, || {
        std::thread::sleep(Duration::from_secs(12));
        Ok(())
    })?;
    demand_sound(&guest.answer(sent)?)?;
    guest.verify(0, FILLED)?;
    guest.end(&[&server])
}

fn beyond_its_lease(lab: &Lab) -> Result<()> {
    let server = lab.server_with(&["--memory", "1GiB", "--lease-timeout", "30s"])?;
    let wish = Wish {
        servers: &[&server.address],
        ..Wish::default()
    };
    let mut guest = filled(lab, &wish)?;
    guest.settle()?;
    stand_still(&guest, || {
        wait_for("the lease to end", LONG, || {
            Ok((server.slabs_leased()? == 0).then_some(()))
        })
    })?;
    let all = verify_all(&mut guest)?;
    let is_stopped = |status: &Status| status.phase == Phase::Stopped && status.lost_bytes > 0;
    guest.wait_status("the guest to be stopped", is_stopped)?;
    guest.demand_silence(all)?;
    guest.kill(&[&server])
}

/// The host shuts down.
fn all_end(lab: &Lab) -> Result<()> {
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
        let server = lab.server()?;
        let wish = Wish {
            servers: &[&server.address],
            supervised: true,
            ..Wish::default()
        };
        let mut guest = filled(lab, &wish)?;
        let _load = work(&mut guest, 2.0)?;
        std::thread::sleep(Duration::from_millis(300));
        let pids = [server.pid(), guest.backend().id(), guest.vmm.pid() as u32];
        for who in order {
            signal(pids[who], Signal::SIGTERM)?;
        }
        let ended = guest.wait_backend()?;
        ensure!(
            ended.success(),
            "the backend ended with {ended}: {}",
            guest.log()
        );
        demand_gone(&guest.dir)?;
    }
    Ok(())
}
