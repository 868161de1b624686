//! The table's columns: what a cell says, and how rows are ordered by it.

use std::cmp::Ordering;

use clap::ValueEnum;
use outram_wire::control::Status;
use outram_wire::units::format_size;

use super::rates::Rates;
use super::watcher::Line;
use crate::cli::report::State;

/// A column that rows can be sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Column {
    /// The domain's name
    Name,
    /// How its memory is: serving, stalled, stopped…
    State,
    /// Its RAM
    Ram,
    /// What it costs this host: pages in memory and staging
    Local,
    /// What it may cost this host
    Limit,
    /// Pages on memory servers only
    Remote,
    /// Faults per second
    Faults,
    /// Faults per second on pages that had been evicted
    Refaults,
    /// Time that its faults wait, per time: 100% is one thread of QEMU that always waits
    Wait,
    /// Bytes per second from memory servers
    In,
    /// Bytes per second to memory servers
    Out,
    /// Times that its faults had to wait for room, a huge page or a server out of reach, since its start
    Stalls,
}

impl Column {
    /// All, from left to right.
    pub const ALL: [Self; 12] = [
        Self::Name,
        Self::State,
        Self::Ram,
        Self::Local,
        Self::Limit,
        Self::Remote,
        Self::Faults,
        Self::Refaults,
        Self::Wait,
        Self::In,
        Self::Out,
        Self::Stalls,
    ];

    /// The heading.
    pub fn heading(self) -> &'static str {
        match self {
            Self::Name => "NAME",
            Self::State => "STATE",
            Self::Ram => "RAM",
            Self::Local => "LOCAL",
            Self::Limit => "LIMIT",
            Self::Remote => "REMOTE",
            Self::Faults => "FAULTS/s",
            Self::Refaults => "REFAULTS/s",
            Self::Wait => "WAIT",
            Self::In => "IN/s",
            Self::Out => "OUT/s",
            Self::Stalls => "STALLS",
        }
    }

    /// Whether it holds words, which stand on the left and are sorted from A to Z.
    pub fn is_text(self) -> bool {
        matches!(self, Self::Name | Self::State)
    }

    /// What a guest's cell says; `-` where it is not known.
    pub fn cell(self, line: &Line) -> String {
        let rate = |read: fn(&Rates) -> f64| line.rates.as_ref().map(read);
        let size = |bytes: Option<f64>| bytes.map(|bytes| format_size(bytes as u64));
        let said = match self {
            Self::Name => Some(line.report.name.clone()),
            Self::State => Some(state_word(line.report.state).to_owned()),
            Self::Ram | Self::Local | Self::Limit | Self::Remote => size(self.number(line)),
            Self::Faults => rate(|rates| rates.faults).map(in_figures),
            Self::Refaults => rate(|rates| rates.refaults).map(in_figures),
            Self::Wait => rate(|rates| rates.wait_share * 100.0).map(|p| in_figures(p) + "%"),
            Self::In | Self::Out => size(self.number(line)),
            Self::Stalls => self.number(line).map(|stalls| format!("{stalls:.0}")),
        };
        said.unwrap_or_else(|| "-".to_owned())
    }

    /// What rows are sorted by, where it is a number and known.
    fn number(self, line: &Line) -> Option<f64> {
        let status = |read: fn(&Status) -> u64| {
            let status = line.report.status.as_ref()?;
            Some(read(status) as f64)
        };
        let rates = line.rates.as_ref();
        match self {
            Self::Name | Self::State => None,
            Self::Ram => status(|status| status.ram_bytes),
            Self::Local => status(Status::local_bytes),
            Self::Limit => status(|status| status.limit_bytes),
            Self::Remote => status(|status| status.stored_bytes),
            Self::Faults => rates.map(|rates| rates.faults),
            Self::Refaults => rates.map(|rates| rates.refaults),
            Self::Wait => rates.map(|rates| rates.wait_share),
            Self::In => rates.map(|rates| rates.received_bytes),
            Self::Out => rates.map(|rates| rates.sent_bytes),
            Self::Stalls => status(|status| {
                let c = &status.counters;
                c.stalls_limit + c.stalls_pool + c.stalls_server
            }),
        }
    }

    /// The order of two rows: words from A to Z, numbers from the largest down, and what is not
    /// known last; guests that are equal, by name.
    fn order(self, a: &Line, b: &Line) -> Ordering {
        match self {
            Self::Name => Ordering::Equal,
            Self::State => state_word(a.report.state).cmp(state_word(b.report.state)),
            _ => match (self.number(a), self.number(b)) {
                (Some(a), Some(b)) => b.total_cmp(&a),
                (a, b) => b.is_some().cmp(&a.is_some()),
            },
        }
    }
}

/// How rows are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sorting {
    /// By this column.
    pub by: Column,
    /// The other way round.
    pub reversed: bool,
}

impl Sorting {
    /// Puts rows in order.
    pub fn sort(self, lines: &mut [Line]) {
        lines.sort_by(|a, b| {
            let order = self.by.order(a, b);
            let names = (&a.report.name, &a.report.uuid).cmp(&(&b.report.name, &b.report.uuid));
            let order = order.then(names);
            if self.reversed {
                order.reverse()
            } else {
                order
            }
        });
    }
}

/// A state in one word.
pub fn state_word(state: State) -> &'static str {
    match state {
        State::Waiting => "waiting",
        State::Serving => "serving",
        State::Stalled => "stalled",
        State::Stopped => "stopped",
        State::Homing => "homing",
        State::Released => "released",
        State::Refused => "refused",
        State::Ending => "ending",
        State::Silent => "silent",
        State::Recovering => "recovering",
        State::Gone => "gone",
        State::Failed => "failed",
        State::Off => "off",
    }
}

/// A number in few figures: small ones with one decimal.
fn in_figures(number: f64) -> String {
    if number == 0.0 || number >= 9.95 {
        format!("{number:.0}")
    } else {
        format!("{number:.1}")
    }
}

/// All guests together, in a line.
pub fn totals(lines: &[Line]) -> String {
    // (The sum of no numbers is -0.0.)
    let sum = |column: Column| {
        lines
            .iter()
            .filter_map(|line| column.number(line))
            .fold(0.0, |a, b| a + b)
    };
    let size = |column| format_size(sum(column) as u64);
    format!(
        "RAM {}   local {} of {}   remote {}   faults {}/s   in {}/s   out {}/s",
        size(Column::Ram),
        size(Column::Local),
        size(Column::Limit),
        size(Column::Remote),
        in_figures(sum(Column::Faults)),
        size(Column::In),
        size(Column::Out)
    )
}

/// What is wrong with guests, a line each.
pub fn notes(lines: &[Line]) -> Vec<String> {
    lines
        .iter()
        .filter_map(|line| {
            let error = line.report.error.as_ref()?;
            // A reason may have several lines; the first says what it is.
            let first = error.lines().next().unwrap_or_default();
            Some(format!("{}: {first}", line.report.name))
        })
        .collect()
}

/// The whole table as plain text.
pub fn plain(lines: &[Line]) -> String {
    let mut rows = vec![Column::ALL.map(|column| column.heading().to_owned())];
    rows.extend(
        lines
            .iter()
            .map(|line| Column::ALL.map(|column| column.cell(line))),
    );
    let width = |index: usize| rows.iter().map(|row| row[index].chars().count()).max();
    let widths: Vec<usize> = (0..Column::ALL.len())
        .map(|index| width(index).unwrap_or_default())
        .collect();
    let mut text = String::new();
    for row in &rows {
        let cells = Column::ALL.iter().zip(row).zip(&widths);
        let cells: Vec<String> = cells
            .map(|((column, cell), width)| {
                if column.is_text() {
                    format!("{cell:width$}")
                } else {
                    format!("{cell:>width$}")
                }
            })
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    for note in notes(lines) {
        text.push_str(&note);
        text.push('\n');
    }
    text
}
