//! Progress of something long: a bar that is drawn over itself on a terminal, plain lines elsewhere.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use outram_wire::units::format_size;

/// Characters between the bar's ends.
const WIDTH: u64 = 30;

/// Between two plain lines.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Bytes that come nearer to an end.
pub(super) struct Progress {
    what: &'static str,
    total: u64,
    started: Instant,
    is_terminal: bool,
    last_line: Option<Instant>,
    /// The last line said that nothing is left.
    is_complete: bool,
}

impl Progress {
    /// `total` bytes are ahead.
    pub(super) fn new(what: &'static str, total: u64) -> Self {
        Self {
            what,
            total: total.max(1),
            started: Instant::now(),
            is_terminal: io::stdout().is_terminal(),
            last_line: None,
            is_complete: false,
        }
    }

    /// `left` bytes are still ahead; more than at first where more came up since.
    pub(super) fn show(&mut self, left: u64) {
        self.total = self.total.max(left);
        let text = line(self.what, self.total, left, self.started.elapsed());
        if self.is_terminal {
            // The rest of a longer line before is erased.
            self.write(&format!("\r{text}\x1b[K"));
        } else if self.is_line_due(left) {
            self.last_line = Some(Instant::now());
            self.is_complete = left == 0;
            self.write(&format!("{text}\n"));
        }
    }

    /// Every so often, and once where nothing is left.
    fn is_line_due(&self, left: u64) -> bool {
        let is_time = self
            .last_line
            .is_none_or(|last| last.elapsed() >= LINE_INTERVAL);
        is_time || (left == 0 && !self.is_complete)
    }

    /// Ends the bar's line.
    pub(super) fn end(self) {
        if self.is_terminal {
            self.write("\n");
        }
    }

    /// A closed standard output is no reason to stop.
    fn write(&self, text: &str) {
        let mut stdout = io::stdout().lock();
        let _ = stdout
            .write_all(text.as_bytes())
            .and_then(|()| stdout.flush());
    }
}

fn line(what: &str, total: u64, left: u64, elapsed: Duration) -> String {
    let done = total - left.min(total);
    let share = |of: u64| (u128::from(done) * u128::from(of) / u128::from(total)) as u64;
    let full = share(WIDTH) as usize;
    let bar = format!("{}{}", "#".repeat(full), ".".repeat(WIDTH as usize - full));
    let mut text = format!(
        "{what} [{bar}] {:>3}%  {} of {}",
        share(100),
        format_size(done),
        format_size(total)
    );
    let rate = done as f64 / elapsed.as_secs_f64().max(0.001);
    if done > 0 && left > 0 && elapsed >= Duration::from_secs(1) {
        let seconds = (left as f64 / rate).ceil();
        text += &format!("  {}/s, {seconds} s left", format_size(rate as u64));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_line_says_how_far_and_how_long() {
        let text = line("coming home", 2 * GIB, GIB, Duration::from_secs(4));
        assert_eq!(
            text,
            "coming home [###############...............]  50%  1 GiB of 2 GiB  256 MiB/s, 4 s left"
        );
    }

    #[test]
    fn nothing_left_is_all_of_it() {
        let text = line("x", GIB, 0, Duration::ZERO);
        assert!(text.contains("100%") && !text.contains('.'.to_string().repeat(2).as_str()));
    }

    #[test]
    fn more_than_there_was_is_no_progress() {
        assert!(line("x", 10, 20, Duration::ZERO).contains("  0%"));
    }
}
