//! The systemd unit that a backend runs as: an instance of `outram-backend@.service`, whose file
//! holds the sandbox and everything else that is the same for all guests.
//!
//! What differs between guests, the backend's arguments, is in a file that the unit reads. systemd
//! refuses to stop or restart the unit, for a guest's memory depends on it; before a guest has come,
//! [`BackendUnit::kill`] ends it.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use outram_wire::units::VmId;

/// The unit file's name.
pub const UNIT_FILE: &str = "outram-backend@.service";

/// How long systemd may take to notice that an earlier backend has ended.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// How often it is asked meanwhile.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The file in a run directory with the backend's arguments.
pub const ARGUMENTS_FILE: &str = "arguments";

/// The unit of one guest.
#[derive(Clone, Debug)]
pub struct BackendUnit {
    name: String,
}

impl BackendUnit {
    /// The unit of a guest.
    pub fn of(vm: VmId) -> Self {
        Self {
            name: format!("outram-backend@{vm}.service"),
        }
    }

    /// Starts it; the error is what systemd said.
    pub fn start(&self) -> Result<(), String> {
        // Starting a unit that systemd still believes to run does nothing, and its process, which
        // has ended, is reaped a moment later.
        let deadline = Instant::now() + END_TIMEOUT;
        while self.ended().is_none() && Instant::now() < deadline {
            sleep(POLL_INTERVAL);
        }
        let output = systemctl(&["start", &self.name]).map_err(|error| error.to_string())?;
        if output.status.success() {
            return Ok(());
        }
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }

    /// How it has ended, if it has.
    pub fn ended(&self) -> Option<String> {
        let output = systemctl(&["is-active", &self.name]).ok()?;
        let state = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        matches!(state.as_str(), "inactive" | "failed").then_some(state)
    }

    /// Ends it at once: only while no guest depends on it.
    pub fn kill(&self) {
        // Best effort: it may have ended by itself.
        let _ = systemctl(&["kill", "--signal=KILL", &self.name]);
    }

    /// The last lines that it logged.
    pub fn log(&self) -> Vec<u8> {
        Command::new("journalctl")
            .args(["--quiet", "--output=cat", "--lines=3", "--unit", &self.name])
            .stdin(Stdio::null())
            .output()
            .map(|output| output.stdout)
            .unwrap_or_default()
    }
}

impl fmt::Display for BackendUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

fn systemctl(arguments: &[&str]) -> io::Result<Output> {
    Command::new("systemctl")
        .args(arguments)
        .stdin(Stdio::null())
        .output()
}

/// Writes the arguments as the backend's `launch` reads them: each ended by a NUL byte, which no
/// argument can hold.
pub fn write_arguments(file: &Path, arguments: &[OsString]) -> io::Result<()> {
    let mut text = Vec::new();
    for argument in arguments {
        text.extend_from_slice(argument.as_bytes());
        text.push(0);
    }
    std::fs::OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(file)?
        .write_all(&text)
}
