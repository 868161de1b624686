//! What a program writes to its log, which is its standard error.

use std::ffi::OsString;
use std::io::{IsTerminal, stderr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

/// Begins to log, in `program`'s name: what RUST_LOG says, and info where it says nothing or what cannot be
/// told. To be called once.
pub fn start(program: &str) {
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal());
    tracing_subscriber::registry()
        .with(lines)
        .with(what_to_log(program, std::env::var_os("RUST_LOG")))
        .init();
}

/// How long what was told is not told again by [`Seldom`].
const SILENCE: Duration = Duration::from_secs(10);

/// Keeps what fails at every attempt, many times a second, from filling the log: one of these for each message.
#[derive(Debug, Default)]
pub struct Seldom(Mutex<Option<Instant>>);

impl Seldom {
    /// Nothing was told.
    pub const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Whether to tell of it: at once, and then not for ten seconds.
    pub fn is_due(&self) -> bool {
        self.is_due_at(Instant::now())
    }

    fn is_due_at(&self, now: Instant) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = last.is_none_or(|last| now.saturating_duration_since(last) >= SILENCE);
        if is_due {
            *last = Some(now);
        }
        is_due
    }
}

fn what_to_log(program: &str, wish: Option<OsString>) -> Targets {
    let info = Targets::new().with_default(LevelFilter::INFO);
    let Some(wish) = wish.filter(|wish| !wish.is_empty()) else {
        return info;
    };
    wish.to_string_lossy().parse().unwrap_or_else(|error| {
        let module = program.replace('-', "_");
        eprintln!(
            "{program}: RUST_LOG is {wish:?} ({error}): expected a level such as 'debug', or levels of \
             modules such as '{module}=debug,info'; it logs at level info"
        );
        info
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_all_the_time_is_told_now_and_then() {
        let (seldom, start) = (Seldom::new(), Instant::now());
        let told = (0..25).filter(|&s| seldom.is_due_at(start + Duration::from_secs(s)));
        assert_eq!(told.collect::<Vec<_>>(), [0, 10, 20]);
    }

    #[test]
    fn what_is_logged_is_as_wished() {
        let at = |level| Targets::new().with_default(level);
        let of_module = at(LevelFilter::WARN).with_target("outram_backend", LevelFilter::DEBUG);
        for (wish, expected) in [
            (None, at(LevelFilter::INFO)),
            (Some(""), at(LevelFilter::INFO)),
            (Some("debug"), at(LevelFilter::DEBUG)),
            (Some("outram_backend=debug,warn"), of_module),
            (Some("outram_backend=loud"), at(LevelFilter::INFO)),
        ] {
            let found = what_to_log("outram-backend", wish.map(OsString::from));
            assert_eq!(found, expected, "{wish:?}");
        }
    }
}
