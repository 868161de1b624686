//! libvirt's daemons on this host: which run, since when, and telling them to reload.
//!
//! A daemon looks for hooks when it starts and when it reloads (SIGHUP), at no other time.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::process;

/// The daemons that run QEMU domains: the old one for all drivers, and the one for QEMU.
const NAMES: [&str; 2] = ["libvirtd", "virtqemud"];

/// The file in the directory of run directories that notes which daemon was told to reload.
pub const RELOAD_STAMP: &str = "libvirt-reloaded";

/// A running daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Daemon {
    /// Its process.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// When it started, in clock ticks since boot.
    pub start_ticks: u64,
}

impl Daemon {
    /// What identifies it in stamps.
    pub fn stamp(&self) -> String {
        format!("{} {}", self.pid, self.start_ticks)
    }

    /// When it started, by the clock; to a second or so.
    pub fn started_at(&self) -> Option<SystemTime> {
        let boot: u64 = fs::read_to_string("/proc/stat")
            .ok()?
            .lines()
            .find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok())?;
        // SAFETY: the call takes a number and returns one; it cannot fail for this name.
        let ticks_per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
        let ticks_per_second = u64::try_from(ticks_per_second).ok().filter(|n| *n > 0)?;
        Some(UNIX_EPOCH + Duration::from_secs(boot + self.start_ticks / ticks_per_second))
    }

    /// Tells it to reload its settings and hooks.
    pub fn reload(&self) -> io::Result<()> {
        let pid = libc::pid_t::try_from(self.pid).map_err(io::Error::other)?;
        // SAFETY: kill takes numbers only; the signal asks these daemons to reload, and the
        // process was just seen to be one of them.
        if unsafe { libc::kill(pid, libc::SIGHUP) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// What a process has in common with those that it forks, until these run something else.
type Origin = (u32, Vec<u8>);

/// The daemons that share our view of the file system: others, in containers, have hooks of
/// their own.
pub fn running() -> Vec<Daemon> {
    let ours = fs::read_link("/proc/self/ns/mnt").ok();
    let found = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter_map(|pid| {
            let dir = Path::new("/proc").join(pid.to_string());
            let name = fs::read_to_string(dir.join("comm")).ok()?.trim().to_owned();
            let same_view = fs::read_link(dir.join("ns/mnt")).ok() == ours;
            (NAMES.contains(&name.as_str()) && same_view && process::is_alive(pid)).then_some(())?;
            let user = fs::metadata(&dir).ok()?.uid();
            let origin = (user, fs::read(dir.join("cmdline")).ok()?);
            let daemon = Daemon {
                pid,
                name,
                start_ticks: process::start_ticks(pid)?,
            };
            Some((daemon, origin))
        });
    without_forks(found.collect())
}

/// A thread of libvirtd that forks has its name for a moment, and might not survive a signal: the oldest is the
/// daemon. Those of other users or with other arguments, as sessions are, are daemons by themselves.
fn without_forks(mut found: Vec<(Daemon, Origin)>) -> Vec<Daemon> {
    found.sort_by_key(|(daemon, _)| (daemon.start_ticks, daemon.pid));
    let mut known = Vec::new();
    found.retain(|(daemon, (user, command))| {
        let this = (daemon.name.clone(), *user, command.clone());
        let is_first = !known.contains(&this);
        known.push(this);
        is_first
    });
    found.into_iter().map(|(daemon, _)| daemon).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_daemon_forks_is_none() {
        let process = |pid, name: &str, start_ticks, user, command: &str| {
            let daemon = Daemon {
                pid,
                name: name.to_owned(),
                start_ticks,
            };
            (daemon, (user, command.as_bytes().to_vec()))
        };
        let found = vec![
            process(30, "libvirtd", 700, 0, "libvirtd"),
            process(9, "libvirtd", 700, 1000, "libvirtd --timeout=30"),
            process(20, "libvirtd", 500, 0, "libvirtd"),
            process(40, "libvirtd", 300, 0, "libvirtd --timeout=30"),
            process(50, "virtqemud", 800, 0, "virtqemud"),
        ];
        let pids: Vec<u32> = without_forks(found).iter().map(|it| it.pid).collect();
        assert_eq!(pids, [40, 20, 9, 50]);
    }
}
