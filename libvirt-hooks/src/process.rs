//! Processes as /proc shows them.

use std::fs;
use std::path::Path;

/// Whether a process runs: it exists, and is no zombie.
pub fn is_alive(pid: u32) -> bool {
    stat_fields(pid)
        .is_some_and(|fields| !matches!(fields.first().map(String::as_str), Some("Z" | "X")))
}

/// When a process started, in clock ticks since boot: with the process id, its identity.
pub fn start_ticks(pid: u32) -> Option<u64> {
    // Field 22 of proc_pid_stat(5); the first of `stat_fields` is field 3.
    stat_fields(pid)?.get(22 - 3)?.parse().ok()
}

/// Whether a capability, by its bit in capabilities(7), is in force for a process.
pub fn has_capability(pid: u32, bit: u32) -> bool {
    mask(&pid.to_string(), "CapEff:") & (1 << bit) != 0
}

/// Whether this process ignores a signal, as nohup(1) has it.
pub fn ignores(signal: i32) -> bool {
    mask("self", "SigIgn:") & (1 << (signal - 1)) != 0
}

/// A set in hexadecimal digits, of /proc/PID/status; empty where it is not told.
fn mask(process: &str, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0)
}

/// How many bytes a process may lock, with no number where it may lock all; nothing where that is not
/// told.
pub fn memory_lock_limit(pid: u32) -> Option<Option<u64>> {
    memory_lock_limit_in(&fs::read_to_string(format!("/proc/{pid}/limits")).ok()?)
}

fn memory_lock_limit_in(limits: &str) -> Option<Option<u64>> {
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(None),
        bytes => bytes.parse().ok().map(Some),
    }
}

/// The fields of /proc/PID/stat from the state on; the name before may contain anything.
fn stat_fields(pid: u32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = text.rsplit_once(')')?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

/// Moves a process to the root of each cgroup hierarchy where it sits in a cgroup of libvirt's
/// daemon, as service managers other than systemd make them: it must not end with the daemon.
pub fn move_out_of_libvirts_cgroup(pid: u32) {
    let Ok(text) = fs::read_to_string(format!("/proc/{pid}/cgroup")) else {
        return;
    };
    for line in text.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(cgroup)) = (parts.next(), parts.next()) else {
            continue;
        };
        if cgroup.contains("libvirtd") || cgroup.contains("virtqemud") {
            let name = controllers.trim_start_matches("name=");
            let root = Path::new("/sys/fs/cgroup").join(name);
            // Best effort: the hierarchy may be mounted elsewhere or not be ours to change.
            let _ = fs::write(root.join("cgroup.procs"), pid.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_locked_memory_is_the_soft_one() {
        let limits = |soft: &str| {
            let head =
                "Limit                     Soft Limit           Hard Limit           Units     ";
            format!("{head}\nMax locked memory         {soft}    unlimited            bytes     \n")
        };
        assert_eq!(
            memory_lock_limit_in(&limits("8388608")),
            Some(Some(8 << 20))
        );
        assert_eq!(memory_lock_limit_in(&limits("unlimited")), Some(None));
        assert_eq!(
            memory_lock_limit_in("Max open files  1024 1024 files\n"),
            None
        );
        assert!(memory_lock_limit(std::process::id()).is_some());
    }
}
