//! One of the machines of a sandbox: the private one itself, or a neighbour of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use super::command::{Finished, run_within};

/// A machine, named by a process on it.
#[derive(Clone, Debug)]
pub struct Place {
    /// None for the machine that this process is on.
    pid: Option<u32>,
}

impl Place {
    /// The machine that this process is on.
    pub fn here() -> Self {
        Self { pid: None }
    }

    /// The machine that a process with namespaces of its own makes.
    pub fn of_process(pid: u32) -> Self {
        Self { pid: Some(pid) }
    }

    fn proc(&self) -> PathBuf {
        let pid = self.pid.map_or("self".to_owned(), |pid| pid.to_string());
        Path::new("/proc").join(pid)
    }

    /// A file of that machine as this process reaches it.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        match self.pid {
            None => path.to_owned(),
            Some(_) => {
                let relative = path.strip_prefix("/").unwrap_or(path);
                self.proc().join("root").join(relative)
            }
        }
    }

    /// What tells its network from those of other machines.
    pub fn network(&self) -> Option<PathBuf> {
        fs::read_link(self.proc().join("ns/net")).ok()
    }

    /// Runs a program there and returns how it ended.
    pub fn run_within(
        &self,
        limit: Duration,
        program: &str,
        arguments: &[&str],
    ) -> Result<Finished> {
        let Some(pid) = self.pid else {
            return run_within(limit, program, arguments);
        };
        let pid = pid.to_string();
        let mut entered = vec!["--target", &pid, "--mount", "--net", "--uts", program];
        entered.extend(arguments);
        run_within(limit, "nsenter", &entered)
    }

    /// Runs a program there, which must succeed; returns what it printed.
    pub fn run_ok(&self, program: &str, arguments: &[&str]) -> Result<String> {
        self.run_within(Duration::from_secs(120), program, arguments)?
            .demand_success()
    }

    /// Runs `virsh` there and returns how it ended.
    pub fn virsh(&self, arguments: &[&str]) -> Result<Finished> {
        self.run_within(Duration::from_secs(120), "virsh", arguments)
    }

    /// Runs `virsh` there, which must succeed; returns what it printed.
    pub fn virsh_ok(&self, arguments: &[&str]) -> Result<String> {
        self.run_ok("virsh", arguments)
    }
}
