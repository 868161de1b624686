//! Where a backend logs to: the journal as a unit of systemd, else a file in its run directory.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use crate::backend_unit::BackendUnit;

/// The file in a run directory that a backend without systemd writes its log to.
pub const LOG_FILE: &str = "log";

/// How much of a log's end is read for a reason.
const TAIL_BYTES: usize = 2000;

/// How many lines of it are shown.
const TAIL_LINES: usize = 3;

/// A backend's log. It displays as where an operator finds it.
#[derive(Clone, Debug)]
pub enum BackendLog {
    /// A file of its own.
    File(PathBuf),
    /// The journal of its unit.
    Journal(BackendUnit),
}

impl BackendLog {
    /// The log of a run directory's backend: a file where there is one.
    pub fn of(run_dir: &Path) -> Self {
        let file = run_dir.join(LOG_FILE);
        let name = run_dir.file_name().and_then(|name| name.to_str());
        match name.and_then(|name| name.parse().ok()) {
            Some(vm) if !file.exists() => Self::Journal(BackendUnit::of(vm)),
            _ => Self::File(file),
        }
    }

    /// Its end, on one line.
    pub fn tail(&self) -> String {
        let text = match self {
            Self::File(file) => fs::read(file).unwrap_or_default(),
            Self::Journal(unit) => unit.log(),
        };
        let start = text.len().saturating_sub(TAIL_BYTES);
        let text = String::from_utf8_lossy(&text[start..]);
        let lines: Vec<&str> = text
            .lines()
            .filter(|line| !line.trim().is_empty())
            .collect();
        if lines.is_empty() {
            return "(empty)".to_owned();
        }
        lines[lines.len().saturating_sub(TAIL_LINES)..].join(" | ")
    }
}

impl fmt::Display for BackendLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(file) => write!(f, "{}", file.display()),
            Self::Journal(unit) => write!(f, "(journalctl -u {unit})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_file_the_log_is_the_journal_of_the_guests_unit() {
        let run = tempfile::tempdir().expect("a directory");
        let vm = "00000000-0000-0000-0000-000000000007";
        let run_dir = run.path().join(vm);
        fs::create_dir(&run_dir).expect("made");
        assert_eq!(
            BackendLog::of(&run_dir).to_string(),
            format!("(journalctl -u outram-backend@{vm}.service)")
        );
        fs::write(run_dir.join(LOG_FILE), "one\n\ntwo\nthree\nfour\n").expect("written");
        let log = BackendLog::of(&run_dir);
        assert!(log.to_string().ends_with("/log"), "{log}");
        assert_eq!(log.tail(), "two | three | four");
    }
}
