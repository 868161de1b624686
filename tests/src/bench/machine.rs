//! The machine that something was measured on.

use std::fs;
use std::process::Command;

use serde::{Deserialize, Serialize};

use super::layout::Layout;

/// What a reader has to know of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Its processor's name.
    pub processor: String,
    /// How many of them.
    pub processors: usize,
    /// Whether it is a virtual machine itself.
    pub is_virtual: bool,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Its kernel.
    pub kernel: String,
    /// Which processors ran what.
    pub layout: String,
    /// Whether the pager shared its one processor with the memory server.
    #[serde(default)]
    pub is_server_beside_pager: bool,
    /// How busy it was with other things before: processes that ran or wanted to, in the last minute.
    pub load: String,
    /// Version of Outram, and how it was built.
    pub outram: String,
}

/// The commit of the source tree that this was built in, as it is now.
fn commit() -> String {
    let git = Command::new("git")
        .args([
            "-C",
            env!("CARGO_MANIFEST_DIR"),
            "describe",
            "--always",
            "--dirty",
        ])
        .output();
    let told = git.ok().filter(|git| git.status.success());
    let told = told.map(|git| String::from_utf8_lossy(&git.stdout).trim().to_owned());
    told.unwrap_or_else(|| "an unknown commit".to_owned())
}

impl Machine {
    /// This one. What it does not tell is empty.
    pub fn this(layout: &Layout) -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let info = read("/proc/cpuinfo");
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_once(':'))
                .map(|(_, value)| value.trim().to_owned())
                .unwrap_or_default()
        };
        let memory = field(&read("/proc/meminfo"), "MemTotal");
        let kib: u64 = memory.trim_end_matches(" kB").parse().unwrap_or(0);
        let build = if cfg!(debug_assertions) {
            "debug"
        } else {
            "release"
        };
        Self {
            processor: field(&info, "model name"),
            processors: info
                .lines()
                .filter(|line| line.starts_with("processor"))
                .count(),
            is_virtual: field(&info, "flags")
                .split(' ')
                .any(|flag| flag == "hypervisor"),
            memory_bytes: kib << 10,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            layout: layout.to_string(),
            is_server_beside_pager: layout.is_server_beside_pager(),
            load: read("/proc/loadavg")
                .split(' ')
                .next()
                .unwrap_or_default()
                .to_owned(),
            outram: format!(
                "{} ({build} build, in a tree at {})",
                env!("CARGO_PKG_VERSION"),
                commit()
            ),
        }
    }
}
