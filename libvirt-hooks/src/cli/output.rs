//! What commands say: that nobody reads it is no failure, and ends what goes on and on quietly.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use time::OffsetDateTime;

/// Shortest time between two reports: each asks every backend.
const SHORTEST_DELAY_SECONDS: f64 = 0.1;

/// Longest; whoever waits longer wants cron.
const LONGEST_DELAY_SECONDS: f64 = 86_400.0;

/// A line to standard output, on which nothing depends.
pub(super) fn say(line: Arguments<'_>) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// A line to standard error, on which nothing depends.
pub(super) fn complain(line: Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Writes to standard output; `false` where nobody reads any longer.
pub(super) fn write(text: &str) -> Result<bool> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error).context("cannot write to standard output"),
    }
}

/// Parses the time between two reports, in seconds, for clap.
pub(super) fn parse_delay(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (SHORTEST_DELAY_SECONDS..=LONGEST_DELAY_SECONDS).contains(&seconds) => {
            Ok(Duration::from_secs_f64(seconds))
        }
        _ => Err(format!(
            "expected seconds from {SHORTEST_DELAY_SECONDS} to {LONGEST_DELAY_SECONDS}, such as 2 or 0.5"
        )),
    }
}

/// Date and time, in UTC.
pub(super) fn now_in_words() -> String {
    let now = OffsetDateTime::now_utc();
    format!(
        "{} {:02}:{:02}:{:02} UTC",
        now.date(),
        now.hour(),
        now.minute(),
        now.second()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_that_make_no_sense_are_refused() {
        assert_eq!(parse_delay("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "", "x", "NaN", "inf", "0.01", "1e9"] {
            assert!(parse_delay(text).is_err(), "{text}");
        }
    }
}
