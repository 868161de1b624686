//! The live table: one row a second, drawn in place on a terminal, as plain lines elsewhere.

use std::io::{IsTerminal, Write, stdout};
use std::time::{Duration, Instant};

use outram_wire::control::{Counters, Status};
use outram_wire::units::format_size;

/// Rows that a terminal shows at once; older ones scroll up.
const LIVE_ROWS: usize = 1;

/// Where the numbers of a row come from.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    /// What the backend says.
    pub(crate) status: Status,
    /// Host memory of the guest as the sampler has last counted it.
    pub(crate) cost: u64,
    /// Bytes leased, by the server's own count.
    pub(crate) on_server: u64,
    /// Pages that the guest's checker has verified so far.
    pub(crate) verified: u64,
    /// Pages that were wrong.
    pub(crate) mismatches: u64,
}

/// The table so far.
#[derive(Debug)]
pub(crate) struct Table {
    start: Instant,
    terminal: bool,
    last: Option<(Instant, Counters)>,
    live: usize,
}

const HEADINGS: [(&str, usize); 9] = [
    ("time", 6),
    ("limit", 10),
    ("host memory", 12),
    ("on server", 10),
    ("faults/s", 9),
    ("remote/s", 9),
    ("evicted/s", 10),
    ("verified", 10),
    ("wrong", 6),
];

impl Table {
    /// Prints the headings.
    pub(crate) fn new() -> Self {
        let headings: String = HEADINGS
            .iter()
            .map(|(name, width)| format!("{name:>width$}"))
            .collect();
        println!("\n{headings}");
        Self {
            start: Instant::now(),
            terminal: stdout().is_terminal(),
            last: None,
            live: 0,
        }
    }

    /// Shows a row; on a terminal it takes the place of the last one, unless that was kept.
    pub(crate) fn show(&mut self, row: &Row) {
        let line = self.format(row);
        if self.terminal && self.live >= LIVE_ROWS {
            print!("\x1b[1A\x1b[2K");
        }
        println!("{line}");
        // Nobody looks at a table that cannot be written.
        let _ = stdout().flush();
        self.live = 1;
    }

    /// Keeps the last row and says what happens next.
    pub(crate) fn note(&mut self, text: &str) {
        println!("  {text}");
        self.live = 0;
    }

    fn format(&mut self, row: &Row) -> String {
        let now = Instant::now();
        let counters = row.status.counters.clone();
        let (since, before) = self
            .last
            .replace((now, counters.clone()))
            .unwrap_or_else(|| (self.start, counters.clone()));
        let seconds = now.duration_since(since).max(Duration::from_millis(1));
        let rate = |new: u64, old: u64| {
            format!(
                "{:.0}",
                new.saturating_sub(old) as f64 / seconds.as_secs_f64()
            )
        };
        let cells = [
            format!("{:.0} s", self.start.elapsed().as_secs_f64()),
            format_size(row.status.limit_bytes),
            format_size(row.cost),
            format_size(row.on_server),
            rate(counters.answered_faults(), before.answered_faults()),
            rate(counters.faults_remote, before.faults_remote),
            rate(counters.evicted_pages, before.evicted_pages),
            row.verified.to_string(),
            row.mismatches.to_string(),
        ];
        cells
            .iter()
            .zip(HEADINGS)
            .map(|(cell, (_, width))| format!("{cell:>width$}"))
            .collect()
    }
}
