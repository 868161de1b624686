//! What memory this host, and a process's memory cgroup, could still give: before a guest's pages
//! all come home.

use std::fs;
use std::path::{Path, PathBuf};

use outram_wire::units::format_size;

/// What stays free beside what comes home: a twentieth of it, at least this much.
const MARGIN_LEAST_BYTES: u64 = 64 << 20;

/// Where there is too little.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} of the guest's memory would have to come home, and {place} has {} available ({} are to stay free): free memory there, or leave the guest attached",
    format_size(*needed), format_size(*available), format_size(*margin)
)]
pub(crate) struct TooLittle {
    needed: u64,
    available: u64,
    margin: u64,
    place: String,
}

/// Checks that `bytes` more can be taken on this host by process `pid`.
pub(crate) fn check(bytes: u64, pid: Option<u32>) -> Result<(), TooLittle> {
    let mut places = vec![("this host".to_owned(), available_on_host())];
    if let Some(pid) = pid {
        places.extend(groups_of(pid).into_iter().map(|group| {
            let name = format!("QEMU's memory cgroup {}", group.folder.display());
            (name, group.available())
        }));
    }
    let margin = (bytes / 20).max(MARGIN_LEAST_BYTES);
    for (place, available) in places {
        if let Some(available) = available
            && available < bytes.saturating_add(margin)
            && bytes > 0
        {
            return Err(TooLittle {
                needed: bytes,
                available,
                margin,
                place,
            });
        }
    }
    Ok(())
}

/// The kernel's own estimate of what can be had without swapping.
fn available_on_host() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

/// A memory cgroup with the names of its files.
struct Group {
    folder: PathBuf,
    limit: &'static str,
    usage: &'static str,
}

impl Group {
    /// What it can still take; `None` where it has no limit.
    fn available(&self) -> Option<u64> {
        let read = |name: &str| fs::read_to_string(self.folder.join(name)).ok();
        let limit: u64 = read(self.limit)?.trim().parse().ok()?;
        let usage: u64 = read(self.usage)?.trim().parse().ok()?;
        // Page cache of files goes by itself when memory is wanted.
        let cache: u64 = read("memory.stat")
            .and_then(|text| {
                let line = text
                    .lines()
                    .find_map(|line| line.strip_prefix("inactive_file "))?;
                line.trim().parse().ok()
            })
            .unwrap_or(0);
        Some(limit.saturating_sub(usage.saturating_sub(cache)))
    }
}

/// The memory cgroups that a process is charged to, from its own up.
fn groups_of(pid: u32) -> Vec<Group> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let is_memory = controllers.split(',').any(|name| name == "memory");
        if !controllers.is_empty() && !is_memory {
            continue;
        }
        let (limit, usage) = match is_memory {
            true => ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            false => ("memory.max", "memory.current"),
        };
        let Some(mount) = mount_of(&mounts, is_memory) else {
            continue;
        };
        let mut folder = mount.join(path.trim_start_matches('/'));
        while folder.starts_with(&mount) && folder != mount {
            found.push(Group {
                folder: folder.clone(),
                limit,
                usage,
            });
            if !folder.pop() {
                break;
            }
        }
    }
    found
}

/// Where version 1's memory controller, or version 2, is mounted.
fn mount_of(mounts: &str, version_1: bool) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (at, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        let fits = match version_1 {
            true => kind == "cgroup" && options.split(',').any(|option| option == "memory"),
            false => kind == "cgroup2",
        };
        fits.then(|| Path::new(at).to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_always_had_and_all_the_world_never() {
        assert_eq!(check(0, Some(std::process::id())), Ok(()));
        let error = check(1 << 60, None).expect_err("no host has that");
        assert!(error.to_string().contains("this host"), "{error}");
    }

    #[test]
    fn a_group_has_its_limit_less_what_it_must_keep() {
        let folder = tempfile::tempdir().expect("a folder");
        let put = |name: &str, text: &str| {
            fs::write(folder.path().join(name), text).expect("a file");
        };
        let group = Group {
            folder: folder.path().to_owned(),
            limit: "memory.max",
            usage: "memory.current",
        };
        put("memory.max", "max\n");
        put("memory.current", "600\n");
        assert_eq!(group.available(), None);
        put("memory.max", "1000\n");
        assert_eq!(group.available(), Some(400));
        put("memory.stat", "anon 1\ninactive_file 100\n");
        assert_eq!(group.available(), Some(500));
    }

    #[test]
    fn mounts_are_told_apart() {
        let mounts = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n\
                      cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n";
        assert_eq!(mount_of(mounts, true), Some("/sys/fs/cgroup/memory".into()));
        assert_eq!(
            mount_of(mounts, false),
            Some("/sys/fs/cgroup/unified".into())
        );
    }
}
