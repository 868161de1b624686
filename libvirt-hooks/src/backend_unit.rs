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
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
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

    /// Waits until an earlier instance has ended, with all that systemd does after it: starting a unit that
    /// systemd still believes to run does nothing.
    pub fn wait_for_end(&self) {
        let deadline = Instant::now() + END_TIMEOUT;
        while self.ended().is_none() && Instant::now() < deadline {
            sleep(POLL_INTERVAL);
        }
    }

    /// Starts it; the error is what systemd said.
    pub fn start(&self) -> Result<(), String> {
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

/// The program that every backend's unit starts; none where systemd has no such unit.
pub fn program() -> Option<PathBuf> {
    program_in(&shown("ExecStart")?)
}

/// As `systemctl show` writes it.
fn program_in(shown: &str) -> Option<PathBuf> {
    let (_, command) = shown.split_once("ExecStart={ path=")?;
    let (path, _) = command.split_once(" ;")?;
    Some(path.into())
}

/// How much memory a backend may lock, by its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// None where there is no limit.
    pub bytes: Option<u64>,
    /// Whether it may lift it by itself.
    pub may_lift: bool,
}

/// The limit of every backend's unit, drop-ins included; none where systemd has no such unit.
pub fn memory_limit() -> Option<MemoryLimit> {
    memory_limit_in(&shown("LoadState,LimitMEMLOCK,CapabilityBoundingSet")?)
}

/// Properties of every backend's unit, drop-ins included, as `systemctl show` writes them.
fn shown(properties: &str) -> Option<String> {
    // Of a template systemd shows an instance alone.
    let any = UNIT_FILE.replace('@', "@any");
    let output = systemctl(&["show", "--property", properties, &any]).ok()?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// As `systemctl show` writes it.
fn memory_limit_in(shown: &str) -> Option<MemoryLimit> {
    let value = |key: &str| {
        shown
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
    };
    if value("LoadState") != Some("loaded") {
        return None;
    }
    let bytes = match value("LimitMEMLOCK")? {
        "infinity" => None,
        bytes => Some(bytes.parse().ok()?),
    };
    let capabilities = value("CapabilityBoundingSet").unwrap_or_default();
    let mut capabilities = capabilities.split_whitespace();
    Some(MemoryLimit {
        bytes,
        may_lift: capabilities.any(|name| name == "cap_sys_resource"),
    })
}

fn systemctl(arguments: &[&str]) -> io::Result<Output> {
    Command::new("systemctl")
        .args(arguments)
        // A terminal's Ctrl-C is for us to heed.
        .process_group(0)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_units_limit_is_read_as_systemd_shows_it() {
        let shown = |limit: &str, capabilities: &str| {
            memory_limit_in(&format!(
                "LimitMEMLOCK={limit}\nLoadState=loaded\nCapabilityBoundingSet={capabilities}\n"
            ))
        };
        let expected = |bytes, may_lift| Some(MemoryLimit { bytes, may_lift });
        let ours = "cap_ipc_lock cap_sys_resource cap_chown";
        assert_eq!(shown("infinity", ours), expected(None, true));
        assert_eq!(shown("65536", ours), expected(Some(65536), true));
        assert_eq!(shown("65536", "cap_chown"), expected(Some(65536), false));
        assert_eq!(shown("much", ours), None);
        // Of a unit that is not there systemd shows its defaults.
        let absent = "LimitMEMLOCK=8388608\nLoadState=not-found\nCapabilityBoundingSet=\n";
        assert_eq!(memory_limit_in(absent), None);
        assert_eq!(memory_limit_in(""), None);
    }

    #[test]
    fn the_units_program_is_read_as_systemd_shows_it() {
        let shown = "ExecStart={ path=/usr/local/bin/outram-backend ; argv[]=/usr/local/bin/outram-backend launch /run/outram/any/arguments ; ignore_errors=no }\n";
        let program = program_in(shown);
        assert_eq!(
            program.as_deref(),
            Some(Path::new("/usr/local/bin/outram-backend"))
        );
        assert_eq!(program_in("ExecStart=\n"), None);
        assert_eq!(program_in(""), None);
    }
}
