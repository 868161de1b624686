//! What a program writes to its log, which is its standard error.

use std::ffi::OsString;
use std::io::{IsTerminal, stderr};

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
