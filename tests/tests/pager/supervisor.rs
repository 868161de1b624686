//! Nobody but the backend itself sees to it that its guest goes on.

use std::fs;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outram_backend::crash_points::Point;
use outram_tests::hermetic::command::wait_for;
use outram_wire::control::{Phase, Reply, Request, Status};
use serde_json::json;

use crate::fixture::{Guest, LONG, Lab, Stalls, Wish, demand_sound};

pub(crate) const TESTS: &[crate::Test] = &[
    ("a_pager_that_is_killed_is_started_again", pager),
    (
        "a_pager_that_is_killed_amid_the_hand_over_is_started_again",
        unrecorded,
    ),
    ("a_supervisor_that_is_killed_is_started_again", supervisor),
    ("a_pager_that_stands_still_is_replaced", stopped),
    (
        "a_backend_all_killed_goes_on_where_it_is_started_again",
        both,
    ),
    ("a_backend_is_replaced_by_itself_when_asked", replaced),
    (
        "a_takeover_that_fails_at_its_end_leaves_the_guest_to_the_next",
        unheard,
    ),
    (
        "a_backend_outlives_settings_that_are_no_good",
        no_good_settings,
    ),
    ("a_guest_that_ends_with_its_pager_leaves_nothing", together),
];

const FILLED: u64 = 14_000;

fn started(lab: &Lab, server: &str) -> Result<Guest> {
    let wish = wish();
    let servers = [server];
    let wish = Wish {
        servers: &servers,
        ..wish
    };
    let mut guest = Guest::start(lab, &wish)?;
    guest.fill(0, FILLED)?;
    Ok(guest)
}

fn wish() -> Wish<'static> {
    Wish {
        supervised: true,
        ..Wish::default()
    }
}

/// A front end asks again and again, as QEMU does, which stands still meanwhile.
fn unrecorded(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let servers = [server.address.as_str()];
    let wish = Wish {
        servers: &servers,
        dies_at: Some(Point::AttachInjected),
        // Of which only the first pager was told the key.
        disk_mib: Some(16),
        ..wish()
    };
    let mut guest = Guest::start_unconnected(lab, &wish, |_| Ok(()))?;
    ensure!(guest.connect().is_err(), "the pager lives");
    wait_for("another pager", LONG, || Ok(guest.connect().ok()))?;
    guest.wait_serving()?;
    let status = guest.status()?;
    ensure!(status.phase == Phase::Serving, "{status:?}");
    guest.fill(0, FILLED)?;
    guest.squeeze()?;
    guest.verify(0, FILLED)?;
    guest.end(&[&server])
}

fn work(guest: &mut Guest, seconds: f64) -> Result<u64> {
    guest.send(
        0,
        "work",
        json!({"page": 0, "pages": FILLED, "seconds": seconds, "write_share": 0.5, "seed": 3}),
    )
}

pub(crate) fn end(pid: u32, signal: Signal) -> Result<()> {
    Ok(kill(Pid::from_raw(pid as i32), signal)?)
}

/// Kills the pager of this status and its supervisor, which cannot act any more when the pager dies.
pub(crate) fn end_all(guest: &mut Guest, before: &Status) -> Result<()> {
    end(guest.backend().id(), Signal::SIGSTOP)?;
    end(before.backend_pid, Signal::SIGKILL)?;
    guest.kill_backend()?;
    wait_for("the pager to be gone", LONG, || {
        Ok(guest.control().is_err().then_some(()))
    })
}

/// Another pager than that of this status serves the guest.
pub(crate) fn wait_for_another(guest: &Guest, before: &Status) -> Result<Status> {
    wait_for("another pager to serve the guest", LONG, || {
        let status = guest.control().and_then(|mut control| control.status());
        Ok(status
            .ok()
            .filter(|now| now.backend_pid != before.backend_pid && now.phase == Phase::Serving))
    })
}

fn pager(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = started(lab, &server.address)?;
    let sent = work(&mut guest, 2.0)?;
    let mut status = guest.status()?;
    ensure!(status.takeovers == 0, "{status:?}");
    demand_confined(status.backend_pid)?;
    let supervisor = guest.backend().id();
    for round in 1..=6 {
        end(status.backend_pid, Signal::SIGKILL)?;
        status = wait_for_another(&guest, &status)?;
        ensure!(status.takeovers == round, "{status:?}");
    }
    demand_sound(&guest.answer(sent)?)?;
    guest.verify(0, FILLED)?;
    ensure!(guest.backend().id() == supervisor && guest.backend().try_wait()?.is_none());
    guest.connect()?;
    guest.end(&[&server])
}

fn supervisor(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = started(lab, &server.address)?;
    let sent = work(&mut guest, 2.0)?;
    let before = guest.status()?;
    guest.kill_backend()?;
    std::thread::sleep(Duration::from_millis(300));
    ensure!(
        guest.status()?.backend_pid == before.backend_pid,
        "the pager went with it"
    );
    let refused = guest.control()?.ask(Request::Restart)?;
    ensure!(matches!(refused, Reply::Refused(_)), "{refused:?}");
    // As systemd or 'outram restart' starts it: nobody would run that pager's errands.
    let servers = [server.address.as_str()];
    let wish = Wish {
        servers: &servers,
        ..wish()
    };
    guest.spawn_backend_again(lab, &wish)?;
    let mut now = wait_for_another(&guest, &before)?;
    end(now.backend_pid, Signal::SIGKILL)?;
    now = wait_for_another(&guest, &now)?;
    demand_sound(&guest.answer(sent)?)?;
    guest.verify(0, FILLED)?;
    demand_confined(now.backend_pid)?;
    guest.connect()?;
    guest.end(&[&server])
}

/// Neither pager nor supervisor can do anything, and the former is not even dead.
fn stopped(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = started(lab, &server.address)?;
    let sent = work(&mut guest, 1.0)?;
    let before = guest.status()?;
    end(before.backend_pid, Signal::SIGSTOP)?;
    guest.kill_backend()?;
    let servers = [server.address.as_str()];
    let wish = Wish {
        servers: &servers,
        ..wish()
    };
    guest.spawn_backend_again(lab, &wish)?;
    wait_for_another(&guest, &before)?;
    demand_sound(&guest.answer(sent)?)?;
    guest.verify(0, FILLED)?;
    guest.connect()?;
    guest.end(&[&server])
}

/// A pager with a supervisor keeps no power of root's but, at most, that of locking memory.
fn demand_confined(pid: u32) -> Result<()> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let value = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_default().trim().to_owned()
    };
    let capabilities = u64::from_str_radix(&value("CapPrm:"), 16)?;
    ensure!(capabilities & !(1 << LOCK_MEMORY) == 0, "{status}");
    ensure!(
        value("NoNewPrivs:") == "1" && value("Seccomp:") == "2",
        "{status}"
    );
    Ok(())
}

/// `CAP_IPC_LOCK`.
const LOCK_MEMORY: u32 = 14;

fn both(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = started(lab, &server.address)?;
    let sent = work(&mut guest, 2.0)?;
    let before = guest.status()?;
    end_all(&mut guest, &before)?;
    let servers = [server.address.as_str()];
    let wish = Wish {
        servers: &servers,
        ..wish()
    };
    guest.take_over(lab, &wish)?;
    let now = wait_for_another(&guest, &before)?;
    ensure!(now.takeovers == 1, "{now:?}");
    demand_sound(&guest.answer(sent)?)?;
    guest.verify(0, FILLED)?;
    guest.connect()?;
    guest.end(&[&server])
}

/// Pagers that have taken the guest over and then cannot be asked give up, and harm nobody.
fn unheard(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = started(lab, &server.address)?;
    let before = guest.status()?;
    let socket = guest.dir.join("control.sock");
    fs::remove_file(&socket)?;
    fs::create_dir(&socket)?;
    end(before.backend_pid, Signal::SIGKILL)?;
    wait_for("the reason to be told", LONG, || {
        let reason = fs::read_to_string(guest.dir.join("error")).unwrap_or_default();
        Ok(reason.contains("control.sock").then_some(()))
    })?;
    let sent = guest.send(0, "verify", json!({"page": 0, "pages": FILLED}))?;
    fs::remove_dir(&socket)?;
    wait_for_another(&guest, &before)?;
    demand_sound(&guest.answer(sent)?)?;
    guest.connect()?;
    guest.end(&[&server])
}

/// It is not replaced while they are not understood; where it dies, the guest waits until they are mended. An address
/// that another has by now keeps nobody from his memory.
fn no_good_settings(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let servers = [server.address.as_str()];
    let settings = lab.path("mended.toml");
    let metrics = format!("metrics = \"{}\"\n", lab.address());
    fs::write(&settings, &metrics)?;
    let wish = Wish {
        servers: &servers,
        settings: Some(&settings),
        ..wish()
    };
    let mut guest = Guest::start(lab, &wish)?;
    guest.fill(0, FILLED)?;
    let before = guest.status()?;
    fs::write(&settings, "sevrers = []\n")?;
    match guest.control()?.ask(Request::Restart)? {
        Reply::Refused(why) => ensure!(
            why.contains("sevrers") && why.contains("mended.toml"),
            "{why}"
        ),
        other => bail!("it would not come up again: {other:?}"),
    }
    // Nor does another supervisor, which could start no other pager.
    guest.kill_backend()?;
    guest.spawn_backend_again(lab, &wish)?;
    std::thread::sleep(Duration::from_millis(500));
    ensure!(guest.backend().try_wait()?.is_none(), "{}", guest.log());
    ensure!(guest.status()?.backend_pid == before.backend_pid);
    guest.verify(0, FILLED)?;

    let is_waiting = |guest: &Guest| {
        wait_for("the reason to be told", LONG, || {
            let reason = fs::read_to_string(guest.dir.join("error")).unwrap_or_default();
            Ok(reason.contains("sevrers").then_some(()))
        })
    };
    end(before.backend_pid, Signal::SIGKILL)?;
    is_waiting(&guest)?;
    let sent = guest.send(0, "verify", json!({"page": 0, "pages": FILLED}))?;
    guest.demand_silence(sent)?;
    // As where it has to be started again by hand, after a crash of all of it.
    guest.kill_backend()?;
    let is_known = guest.dir.join("control.sock").exists();
    ensure!(is_known, "nobody would know that a guest waits");
    guest.spawn_backend_again(lab, &wish)?;
    std::thread::sleep(Duration::from_millis(500));
    ensure!(guest.backend().try_wait()?.is_none(), "{}", guest.log());
    is_waiting(&guest)?;

    let address = metrics.split('"').nth(1).context("an address")?;
    let another = TcpListener::bind(address)?;
    fs::write(&settings, &metrics)?;
    demand_sound(&guest.answer(sent)?)?;
    wait_for_another(&guest, &before)?;
    ensure!(!guest.dir.join("error").exists(), "a reason is left");
    drop(another);
    guest.connect()?;
    guest.end(&[&server])
}

/// Polite replacements under load.
const RESTARTS: usize = 30;

/// The guest stands still for a moment, which is told.
fn replaced(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let servers = [server.address.as_str()];
    let wish = Wish {
        servers: &servers,
        ram_mib: &[512],
        ..wish()
    };
    let mut guest = Guest::start(lab, &wish)?;
    guest.fill(0, FILLED)?;
    let sent = work(&mut guest, 3.0)?;
    let mut status = guest.status()?;
    let mut untouched = FILLED..guest.pages();
    let mut stalls = Stalls::default();
    for _ in 0..RESTARTS {
        let before = status.backend_pid;
        guest.control()?.restart()?;
        let mut longest = Duration::ZERO;
        while status.backend_pid == before || status.phase != Phase::Serving {
            let page = untouched
                .next()
                .context("no more pages that nobody touched")?;
            let asked = Instant::now();
            guest.command(1, "touch", json!({"page": page, "pages": 1}))?;
            longest = longest.max(asked.elapsed());
            // There are so many only.
            std::thread::sleep(Duration::from_millis(2));
            if let Ok(now) = guest.control().and_then(|mut control| control.status()) {
                status = now;
            }
        }
        stalls.0.push(longest);
        ensure!(status.takeovers == 0, "nobody died: {status:?}");
    }
    println!(
        "a backend replaced {RESTARTS} times when asked: the longest wait for a page was {stalls}"
    );
    demand_sound(&guest.answer(sent)?)?;
    guest.verify(0, FILLED)?;
    ensure!(
        guest.backend().try_wait()?.is_none(),
        "the supervisor ended"
    );
    guest.connect()?;
    guest.end(&[&server])
}

fn together(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = started(lab, &server.address)?;
    let status = guest.status()?;
    let supervisor = guest.backend().id();
    end(supervisor, Signal::SIGSTOP)?;
    end(status.backend_pid, Signal::SIGKILL)?;
    guest.vmm.kill()?;
    end(supervisor, Signal::SIGCONT)?;
    let ended = guest.backend().wait().context("the supervisor")?;
    ensure!(ended.success(), "{ended}");
    ensure!(!guest.dir.exists(), "{} stays", guest.dir.display());
    Ok(())
}
