//! A mix as text: a column for each guest, then what is of all of them.

use std::fmt::Write;

use super::super::phase::Run;
use super::super::report::{short, spread};
use super::super::statistics::Spread;
use super::results::{Divisor, GuestResults, MixResults, seconds};

const TITLE_WIDTH: usize = 44;
const COLUMN_WIDTH: usize = 24;

/// A row: its title, and what it says of a guest.
type Row = (&'static str, fn(&GuestResults) -> Option<Spread>);

const ROWS: [Row; 14] = [
    ("time ÷ in the mix, all local", |guest| {
        Spread::of(&guest.slowdowns(Divisor::MixedLocal))
    }),
    ("time ÷ alone, at the same local ratio", |guest| {
        Spread::of(&guest.slowdowns(Divisor::Alone))
    }),
    ("... where all is local: in the mix ÷ alone", |guest| {
        Spread::of_ratios(&seconds(&guest.mixed_local), &seconds(&guest.alone_local))
    }),
    ("remote fault p50 [µs]", |guest| {
        latency(&guest.mixed, false)
    }),
    ("... alone", |guest| latency(&guest.alone, false)),
    ("remote fault p99 [µs]", |guest| {
        latency(&guest.mixed, true)
    }),
    ("... alone", |guest| latency(&guest.alone, true)),
    ("pages fetched", |guest| {
        each(&guest.mixed, |run| {
            counted(run, "faults_remote") + counted(run, "fetched_ahead_pages")
        })
    }),
    ("pages evicted", |guest| {
        each(&guest.mixed, |run| counted(run, "evicted_pages"))
    }),
    ("its time: waits for memory [%]", |guest| {
        share(&guest.mixed, waited)
    }),
    ("... alone", |guest| share(&guest.alone, waited)),
    ("its time: on a processor [%]", |guest| {
        share(&guest.mixed, |run| run.cpu_seconds)
    }),
    ("... alone", |guest| {
        share(&guest.alone, |run| run.cpu_seconds)
    }),
    ("runs begun until all had ended one", |guest| {
        let begun = guest.mixed_runs.iter().map(|&runs| runs as f64);
        Spread::of(&begun.collect::<Vec<f64>>())
    }),
];

fn counted(run: &Run, name: &str) -> f64 {
    run.counters.get(name).copied().unwrap_or(0) as f64
}

fn each(runs: &[Run], of: impl Fn(&Run) -> f64) -> Option<Spread> {
    Spread::of(&runs.iter().map(of).collect::<Vec<f64>>())
}

/// Of each run, the part of its time that these seconds are, in percent.
fn share(runs: &[Run], seconds: fn(&Run) -> f64) -> Option<Spread> {
    each(runs, |run| seconds(run) / run.seconds * 100.0)
}

fn waited(run: &Run) -> f64 {
    counted(run, "waited_us") / 1e6
}

fn latency(runs: &[Run], is_p99: bool) -> Option<Spread> {
    let us: Vec<f64> = runs
        .iter()
        .filter_map(|run| run.remote_faults.as_ref())
        .filter(|found| found.count > 0)
        .map(|found| if is_p99 { found.us_p99 } else { found.us_p50 } as f64)
        .collect();
    Spread::of(&us)
}

/// Writes a mix's table.
pub fn write(out: &mut String, mix: &MixResults) -> std::fmt::Result {
    let head = format!("Mix of {} guests", mix.guests.len());
    write!(out, "\n{head:<TITLE_WIDTH$}")?;
    for guest in &mix.guests {
        let title = format!("{} at {}", guest.workload, guest.local_ratio);
        write!(out, "  {title:<COLUMN_WIDTH$}")?;
    }
    writeln!(out)?;
    for (title, of) in ROWS {
        write!(out, "  {title:<width$}", width = TITLE_WIDTH - 2)?;
        for guest in &mix.guests {
            let cell = of(guest).map_or("-".to_owned(), |found| {
                let (median, low, high) =
                    (short(found.median), short(found.low), short(found.high));
                format!("{median:>6}  {low} … {high}")
            });
            write!(out, "  {cell:<COLUMN_WIDTH$}")?;
        }
        writeln!(out)?;
    }
    writeln!(out, "  all guests together")?;
    for measure in mix.measures() {
        writeln!(out, "    {:<54}{}", measure.name, spread(&measure.value))?;
    }
    for (name, figure) in &mix.figures {
        if let Some(found) = Spread::of(&figure.rounds) {
            let title = format!("{name} [{}]", figure.unit);
            writeln!(out, "    {title:<54}{}", spread(&found))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::sample;
    use super::*;

    #[test]
    fn the_table_has_a_column_for_each_guest() {
        let mut text = String::new();
        write(&mut text, &sample()).expect("a string takes it");
        let row = |title: &str| {
            let line = text.lines().find(|line| line.contains(title));
            line.unwrap_or_else(|| panic!("no '{title}' in:\n{text}"))
        };
        assert!(row("Mix of 2 guests").contains("lu at 0.5"), "{text}");
        assert!(row("time ÷ alone").contains("3.00  3.00 … 3.00"), "{text}");
        assert!(row("waits for memory").contains("50.0"), "{text}");
        assert!(row("pages evicted").contains("77.0"), "{text}");
        assert!(row("remote fault p99").contains('-'), "{text}");
        assert!(row("Jain's index").contains("0.80"), "{text}");
    }
}
