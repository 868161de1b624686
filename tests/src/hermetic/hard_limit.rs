//! A memory cgroup that would kill a cheat: the kernel's own hard limit around QEMU and helper.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::sandbox::{cgroup_mounts, cgroup_name};

/// A cgroup with a hard memory limit; removed when dropped, its processes moved back.
#[derive(Debug)]
pub struct HardLimit {
    folder: PathBuf,
    version: u8,
    /// Where this process is, and where others go back to.
    home: PathBuf,
}

impl HardLimit {
    /// Makes a cgroup that may hold `bytes`, without swap. The error says why none can be made here.
    pub fn new(bytes: u64) -> Result<Self> {
        let made = Self::with_swap(bytes)?;
        // Absent where swap is not accounted; tests run without swap or accept it.
        let _ = match made.version {
            2 => made.write("memory.swap.max", "0"),
            _ => made.write("memory.memsw.limit_in_bytes", &bytes.to_string()),
        };
        Ok(made)
    }

    /// The same with whatever swap the machine has.
    pub fn with_swap(bytes: u64) -> Result<Self> {
        let mut reasons = Vec::new();
        for (mount, version) in cgroup_mounts() {
            match Self::make(&mount, version, bytes) {
                Ok(made) => return Ok(made),
                Err(error) => reasons.push(format!("{}: {error:#}", mount.display())),
            }
        }
        bail!("no memory cgroup can be made: {}", reasons.join("; "))
    }

    fn make(mount: &Path, version: u8, bytes: u64) -> Result<Self> {
        let folder = mount.join(cgroup_name());
        if version == 2 {
            // Refused where other controllers forbid it; the file below then is missing.
            let _ = fs::write(mount.join("cgroup.subtree_control"), "+memory");
        }
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let made = Self {
            folder,
            version,
            home: home(mount, version),
        };
        made.set_limit(bytes)?;
        Ok(made)
    }

    /// Sets another limit; the kernel reclaims what is above it first.
    pub fn set_limit(&self, bytes: u64) -> Result<()> {
        self.write(limit_file(self.version), &bytes.to_string())
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        let path = self.folder.join(file);
        if !path.exists() {
            bail!("{} does not exist", path.display());
        }
        fs::write(&path, value).with_context(|| format!("{value} to {}", path.display()))
    }

    /// Moves a process in; what it starts later is in too.
    pub fn add(&self, pid: u32) -> Result<()> {
        self.write("cgroup.procs", &pid.to_string())
    }

    /// Moves a process out again.
    pub fn release(&self, pid: u32) -> Result<()> {
        let path = self.home.join("cgroup.procs");
        fs::write(&path, pid.to_string()).with_context(|| path.display().to_string())
    }

    /// Whether a process is in it.
    pub fn holds(&self, pid: u32) -> Result<bool> {
        let path = self.folder.join("cgroup.procs");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        Ok(text.lines().any(|line| line.parse() == Ok(pid)))
    }

    /// The limit that the kernel has in force.
    pub fn limit_bytes(&self) -> Result<u64> {
        self.read(limit_file(self.version))
    }

    fn read(&self, file: &str) -> Result<u64> {
        let path = self.folder.join(file);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        text.trim().parse().with_context(|| text)
    }

    /// What it holds now.
    pub fn used_bytes(&self) -> Result<u64> {
        self.read(match self.version {
            2 => "memory.current",
            _ => "memory.usage_in_bytes",
        })
    }

    /// The most it has held, where the kernel tells.
    pub fn peak_bytes(&self) -> Option<u64> {
        let file = if self.version == 2 {
            "memory.peak"
        } else {
            "memory.max_usage_in_bytes"
        };
        let text = fs::read_to_string(self.folder.join(file)).ok()?;
        text.trim().parse().ok()
    }

    /// Processes that the kernel killed for the limit.
    pub fn kills(&self) -> Result<u64> {
        let file = if self.version == 2 {
            "memory.events"
        } else {
            "memory.oom_control"
        };
        let path = self.folder.join(file);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        text.lines()
            .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
            .with_context(|| format!("{} has no oom_kill", path.display()))
    }
}

fn limit_file(version: u8) -> &'static str {
    match version {
        2 => "memory.max",
        _ => "memory.limit_in_bytes",
    }
}

/// The cgroup of this process below `mount`.
fn home(mount: &Path, version: u8) -> PathBuf {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = groups.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let ours = match version {
            2 => controllers.is_empty(),
            _ => controllers.split(',').any(|name| name == "memory"),
        };
        ours.then_some(path)
    });
    mount.join(path.unwrap_or("/").trim_start_matches('/'))
}

impl Drop for HardLimit {
    fn drop(&mut self) {
        let processes = fs::read_to_string(self.folder.join("cgroup.procs")).unwrap_or_default();
        for pid in processes.lines().filter_map(|pid| pid.parse().ok()) {
            // One that has just ended cannot be moved.
            let _ = self.release(pid);
        }
        // The sandbox's outside process removes what is still busy now.
        let _ = fs::remove_dir(&self.folder);
    }
}
