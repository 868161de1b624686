//! The vhost-user connection is cut while the guest's disk requests are in flight.
//!
//! QEMU connects again and goes on where the used ring says; the device serves each queue in order,
//! one request after the other, so that this is where it stopped.

use std::fs;
use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::guest::{Guest, Spec};
use rustix::net::Shutdown;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::Test;
use crate::far_disk::{demand_no_error, demand_same};
use crate::fixture::{LONG, Lab, demand_no_mismatch};

pub(crate) const TESTS: &[Test] = &[("requests_in_flight_survive_cut_connections", cut)];

/// State of a connected socket in /proc/net/unix.
const CONNECTED: &str = "03";

const MIB: u64 = 32;

/// What QEMU says after the queues have begun takes it a moment at least.
const SETTLED: Duration = Duration::from_millis(500);

fn cut(lab: &Lab) -> Result<()> {
    let server = lab.server("3GiB")?;
    // All of its RAM may be local: so it runs, but for its disk, while the server stands still.
    let limit = ["--local-ratio", "1.0", "--disk-size", "1GiB"];
    let guest = lab.attach(Spec::new("reconnects", 256), &limit, &server.address)?;
    let mut console = guest.boot()?;
    console.ask("alloc 40", "ALLOCATED", LONG)?;
    let mut line = Line {
        guest: &guest,
        cut: Vec::new(),
    };
    for version in 1..=3 {
        // No write can end while the server stands still: these are in flight at each cut.
        server.signal(Signal::SIGSTOP)?;
        console.send(&format!("bare-write {MIB} {version}"))?;
        let early = (0..2).try_for_each(|_| {
            let answer = console.hear(&["BARE"], Duration::from_secs(2))?;
            ensure!(answer.is_none(), "answered without a server: {answer:?}");
            line.cut()
        });
        server.signal(Signal::SIGCONT)?;
        early?;
        console.expect(&["BARE"], LONG)?;
        // Reads are cut while they go on: each connection once it has served some.
        console.send(&format!("bare-verify {MIB} {version}"))?;
        let mut served = requests(&guest)?;
        let report = loop {
            if let Some(report) = console.hear(&["BARE"], Duration::from_millis(10))? {
                break report;
            }
            if requests(&guest)? > served + 16 {
                line.cut()?;
                served = requests(&guest)?;
            }
        };
        demand_same(&report)?;
    }
    let disk = demand_no_error(&guest)?;
    ensure!(disk.stored_bytes >= MIB << 19, "it is written: {disk:?}");
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    let log = fs::read_to_string(guest.run_dir().join("log"))?;
    let ended = log.matches("disconnected the disk").count();
    let cuts = line.cut.len();
    ensure!(ended >= cuts, "{cuts} cuts, {ended} connections ended");
    guest.destroy()?;
    guest.wait_backend_gone(LONG)
}

fn requests(guest: &Guest) -> Result<u64> {
    let disk = guest.status()?.disk.context("the status shows the disk")?;
    Ok(disk.reads + disk.writes)
}

/// The connections of a guest's QEMU with its backend, one after the other.
struct Line<'a> {
    guest: &'a Guest,
    /// Sockets that were cut already, as links in /proc name them.
    cut: Vec<String>,
}

impl Line<'_> {
    /// Cuts the connection that stands, or is made next.
    fn cut(&mut self) -> Result<()> {
        let pid = self.guest.status()?.backend_pid;
        let (socket, number) = wait_for("QEMU to connect again", LONG, || self.find(pid))?;
        // QEMU does not come back from a cut amid its greeting: the queues must run.
        wait_for("the queues to run", LONG, || {
            let tasks = fs::read_dir(format!("/proc/{pid}/task"))?.flatten();
            let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).ok();
            let runs = tasks
                .filter_map(name)
                .any(|name| name.starts_with("blk-queue"));
            Ok(runs.then_some(()))
        })?;
        std::thread::sleep(SETTLED);
        wait_greeted(self.guest)?;
        let pid = Pid::from_raw(pid as i32).context("a process id")?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).context("the backend")?;
        let end: OwnedFd = pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty())
            .context("the backend's end of its connection")?;
        rustix::net::shutdown(end, Shutdown::Both).context("cutting the connection")?;
        self.cut.push(socket);
        Ok(())
    }

    /// The connection that stands, and its number in the backend.
    fn find(&self, pid: u32) -> Result<Option<(String, i32)>> {
        // What it was made as is its name to the kernel ever after.
        let path = self.guest.run_dir().join("vhost.new");
        let path = path.display().to_string();
        let sockets = fs::read_to_string(format!("/proc/{pid}/net/unix"))?;
        let mut connected = sockets.lines().filter(|line| line.ends_with(&path));
        let found = connected.find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (state, inode) = (fields.get(5)?, fields.get(6)?);
            let socket = format!("socket:[{inode}]");
            let stands = *state == CONNECTED && !self.cut.contains(&socket);
            stands.then(|| descriptor(pid, &socket).map(|number| (socket, number)))?
        });
        Ok(found)
    }
}

/// Waits until a QEMU that has begun to greet its backend is done with it: until 9.0 it has lost its disk where
/// it is cut off before. It is done within one event of its main thread, which waits for the next by ppoll, and
/// for an answer by other calls.
pub(crate) fn wait_greeted(guest: &Guest) -> Result<()> {
    let qemu = guest.qemu_pid()?;
    let path = format!("/proc/{qemu}/syscall");
    wait_for("QEMU to wait for events", LONG, || {
        let call = fs::read_to_string(&path).with_context(|| path.clone())?;
        let number = call
            .split(' ')
            .next()
            .and_then(|number| number.parse().ok());
        Ok((number == Some(libc::SYS_ppoll)).then_some(()))
    })
}

/// The number under which a process holds a socket.
fn descriptor(pid: u32, socket: &str) -> Option<i32> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    entries.flatten().find_map(|entry| {
        let to = fs::read_link(entry.path()).ok()?;
        let is_it = to.as_os_str() == socket;
        entry.file_name().to_str().filter(|_| is_it)?.parse().ok()
    })
}
