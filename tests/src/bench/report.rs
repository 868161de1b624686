//! Results as text.

use std::fmt::Write;

use outram_wire::control::Latency;
use outram_wire::units::format_size;

use super::bill::WIRE_PER_USEFUL;
use super::contest::OUTRAM;
use super::mix::table;
use super::results::{Results, Series};
use super::statistics::Spread;
use super::targets::{Bound, Verdict};
use super::watched_memory::PAGE_BYTES;

/// A number with three figures.
pub fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.1 => format!("{value:.2}"),
        _ => format!("{value:.2e}"),
    }
}

/// A median, the least and the most.
pub fn spread(spread: &Spread) -> String {
    format!("{:>10}   {}", short(spread.median), ends(spread))
}

/// The least and the most.
pub fn ends(spread: &Spread) -> String {
    format!("{} … {}", short(spread.low), short(spread.high))
}

/// All of it.
pub fn text(results: &Results) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut text, results);
    text
}

fn write(out: &mut String, results: &Results) -> std::fmt::Result {
    write_head(out, results)?;
    if results.mixes.is_empty() {
        write_paging(out, results)?;
        write_ratios(out, results)?;
        write_faults(out, results)?;
        write_costs(out, results)?;
        write_fault_latencies(out, results)?;
    }
    for mix in &results.mixes {
        table::write(out, mix)?;
    }
    if !results.missing.is_empty() {
        writeln!(out, "\nNot available here")?;
    }
    for missing in &results.missing {
        writeln!(out, "  {}: {}", missing.what, missing.reason)?;
    }
    write_targets(out, results)
}

/// What was measured on.
fn write_head(out: &mut String, results: &Results) -> std::fmt::Result {
    let machine = &results.machine;
    let kind = if machine.is_virtual {
        ", a virtual machine"
    } else {
        ""
    };
    writeln!(
        out,
        "\nMachine   {} × {}{kind}",
        machine.processors, machine.processor
    )?;
    let memory = format_size(machine.memory_bytes);
    writeln!(
        out,
        "          {memory} of memory, Linux {}",
        machine.kernel
    )?;
    writeln!(out, "Layout    {}", machine.layout)?;
    writeln!(out, "Load      {} before it began", machine.load)?;
    writeln!(out, "Outram    {}", machine.outram)?;
    writeln!(out, "Run as    bench {}", results.arguments.join(" "))?;
    writeln!(
        out,
        "Run       {:.0} s; medians of rounds, least … most, where nothing else is said",
        results.seconds
    )?;
    if results.is_unfinished {
        writeln!(
            out,
            "          UNFINISHED: what was measured until it ended"
        )?;
    }
    Ok(())
}

/// Everything but workloads.
fn write_paging(out: &mut String, results: &Results) -> std::fmt::Result {
    writeln!(
        out,
        "\n{:<44}{:>9}{:>9}{:>9}{:>9}{:>9}   {:<20}p99 of rounds",
        "Latency (µs), all rounds together", "p50", "p90", "p99", "p99.9", "max", "p50 of rounds"
    )?;
    for (name, found) in &results.distributions {
        let us = |ns: u64| short(ns as f64 / 1000.0);
        let cells = [
            found.ns_p50,
            found.ns_p90,
            found.ns_p99,
            found.ns_p999,
            found.ns_max,
        ];
        let cells: String = cells.iter().map(|&ns| format!("{:>9}", us(ns))).collect();
        let rounds = |which: &str| {
            let found = Spread::of(results.rounds(&format!("{name} {which}")));
            found.map_or("-".to_owned(), |found| ends(&found))
        };
        let (p50, p99) = (rounds("p50"), rounds("p99"));
        writeln!(out, "  {name:<42}{cells}   {p50:<20}{p99}")?;
    }
    writeln!(
        out,
        "\n{:<58}{:>10}   least … most",
        "Figures of this machine", "median"
    )?;
    for (name, figure) in &results.figures {
        let latency = name.strip_suffix(" p50").or(name.strip_suffix(" p99"));
        let is_shown = latency.is_some_and(|name| results.distributions.contains_key(name));
        if let Some(found) = Spread::of(&figure.rounds).filter(|_| !is_shown) {
            let title = format!("{name} [{}]", figure.unit);
            writeln!(
                out,
                "  {:<56}{}",
                title.trim_end_matches(" []"),
                spread(&found)
            )?;
        }
    }
    Ok(())
}

fn write_ratios(out: &mut String, results: &Results) -> std::fmt::Result {
    let mut group = "";
    for ratio in &results.ratios {
        if ratio.group != group {
            group = &ratio.group;
            writeln!(
                out,
                "\n{:<58}{:>10}   least … most",
                format!("Ratios: {group}"),
                "median"
            )?;
        }
        writeln!(out, "  {:<56}{}", ratio.name, spread(&ratio.value))?;
    }
    Ok(())
}

/// Of each workload's first run on Outram with less than all local: what its faults were.
fn write_faults(out: &mut String, results: &Results) -> std::fmt::Result {
    let names = [
        "remote",
        "staged",
        "compressed",
        "filled",
        "zero",
        "protected",
        "duplicate",
    ];
    let ours = paged(results).filter(|series| series.memory == OUTRAM);
    let headings: String = names.iter().map(|name| format!("{name:>11}")).collect();
    let mut is_first = true;
    for series in ours {
        if std::mem::take(&mut is_first) {
            let title = "Faults of the first round's run";
            writeln!(
                out,
                "\n{title:<34}{headings}  evicted (clean)  pages  ahead (accuracy)"
            )?;
        }
        let counters = &series.runs[0].counters;
        let of = |name: &str| counters.get(name).copied().unwrap_or(0);
        let cells: String = names
            .iter()
            .map(|name| format!("{:>11}", of(&format!("faults_{name}"))))
            .collect();
        let title = format!("{} at {}", series.workload, series.local_ratio);
        let (evicted, clean) = (of("evicted_pages"), of("evicted_clean_pages"));
        let pages = series.bytes / PAGE_BYTES as u64;
        let ahead = of("fetched_ahead_pages");
        let accuracy = accuracy(
            of("fetched_ahead_used_pages"),
            of("fetched_ahead_unused_pages"),
        );
        writeln!(
            out,
            "  {title:<32}{cells}  {evicted} ({clean})  {pages}  {ahead} ({accuracy})"
        )?;
    }
    Ok(())
}

/// Runs on Outram with less than all local, however memory was moved.
fn paged(results: &Results) -> impl Iterator<Item = &Series> {
    let is_ours = |series: &&Series| {
        series.memory.starts_with(OUTRAM) && series.local_ratio < 1.0 && !series.runs.is_empty()
    };
    results.series.iter().filter(is_ours)
}

/// A workload, and the memory where that is not just Outram's.
fn title(series: &Series) -> String {
    let moved = series.memory.trim_start_matches(OUTRAM);
    format!("{} at {}{moved}", series.workload, series.local_ratio)
}

/// What paging cost, medians of the rounds.
fn write_costs(out: &mut String, results: &Results) -> std::fmt::Result {
    let columns = [
        ("rate", "pages/s"),
        // All of its time: what the workload computes is no cost of paging, and cannot be told apart.
        ("CPU of vCPU", "vCPU+work s/GiB"),
        ("CPU of helper", "helper s/GiB"),
        ("CPU of server", "server s/GiB"),
        (WIRE_PER_USEFUL, "wire/useful"),
    ];
    let mut is_first = true;
    for series in paged(results) {
        if std::mem::take(&mut is_first) {
            let headings: String = columns
                .iter()
                .map(|(_, head)| format!("{head:>16}"))
                .collect();
            let what = "Cost of pages that came or left, medians";
            writeln!(out, "\n{what:<40}{headings}")?;
        }
        let cell = |name: &str| {
            let values: Option<Vec<f64>> = series
                .runs
                .iter()
                .map(|run| run.costs.get(name).copied())
                .collect();
            let found = values.and_then(|values| Spread::of(&values));
            found.map_or("-".to_owned(), |found| short(found.median))
        };
        let cells: String = columns
            .iter()
            .map(|(name, _)| format!("{:>16}", cell(name)))
            .collect();
        writeln!(out, "  {:<38}{cells}", title(series))?;
    }
    Ok(())
}

/// What the backend measured of remote faults, medians of the rounds.
fn write_fault_latencies(out: &mut String, results: &Results) -> std::fmt::Result {
    type Percentile = fn(&Latency) -> Option<u64>;
    let columns: [(&str, Percentile); 5] = [
        ("p50", |found| Some(found.us_p50)),
        ("p90", |found| found.us_p90),
        ("p99", |found| Some(found.us_p99)),
        ("p99.9", |found| found.us_p999),
        ("max", |found| Some(found.us_max)),
    ];
    let mut is_first = true;
    for series in paged(results) {
        let latencies = series
            .runs
            .iter()
            .filter_map(|run| run.remote_faults.as_ref());
        let latencies: Vec<&Latency> = latencies.filter(|latency| latency.count > 0).collect();
        if latencies.is_empty() {
            continue;
        }
        if std::mem::take(&mut is_first) {
            let headings: String = columns
                .iter()
                .map(|(head, _)| format!("{head:>9}"))
                .collect();
            let what = "Remote faults in the helper (µs), medians";
            writeln!(out, "\n{what:<44}{headings}")?;
        }
        let cell = |of: Percentile| {
            let values = latencies
                .iter()
                .map(|latency| of(latency).map(|us| us as f64));
            let found = values.collect::<Option<Vec<f64>>>();
            let found = found.and_then(|values| Spread::of(&values));
            found.map_or("-".to_owned(), |found| short(found.median))
        };
        let cells: String = columns
            .iter()
            .map(|(_, of)| format!("{:>9}", cell(*of)))
            .collect();
        writeln!(out, "  {:<42}{cells}", title(series))?;
    }
    Ok(())
}

/// What was to be reached.
fn write_targets(out: &mut String, results: &Results) -> std::fmt::Result {
    if results.targets.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\n{:<46}{:>12}{:>10}   {:<18}measured against",
        "Targets", "target", "found", "least … most"
    )?;
    for target in &results.targets {
        let bound = match target.bound {
            Bound::AtMost(most) => format!("≤ {}", short(most)),
            Bound::AtLeast(least) => format!("≥ {}", short(least)),
            Bound::Published(low, high) if low == high => format!("others {}", short(low)),
            Bound::Published(low, high) => format!("others {}–{}", short(low), short(high)),
            Bound::Shown => String::new(),
        };
        let verdict = match target.verdict {
            Verdict::Met => "met",
            Verdict::Missed => "MISSED",
            Verdict::Shown => "shown",
            Verdict::NotMeasured => "not measured in this run",
        };
        writeln!(out, "  {}  {}", target.number, target.what)?;
        let Some(found) = &target.found else {
            writeln!(out, "{:<46}{bound:>12}{:>10}   {verdict}", "", "-")?;
            continue;
        };
        let ends = ends(found);
        let median = short(found.median);
        let floor = target.floor.as_ref();
        let floor = floor.map_or(String::new(), |floor| {
            format!("{} {}", short(floor.median), floor.unit)
        });
        writeln!(
            out,
            "{:<46}{bound:>12}{median:>10}   {ends:<18}{floor:<17} {verdict}",
            ""
        )?;
    }
    Ok(())
}

/// The least share of pages fetched ahead that were used, of those of which anything is known.
fn accuracy(used: u64, unused: u64) -> String {
    match used + unused {
        0 => "-".to_owned(),
        judged => format!("≥ {} %", used * 100 / judged),
    }
}

#[cfg(test)]
mod tests {
    use super::super::ratios;
    use super::super::results::tests::sample;
    use super::*;

    #[test]
    fn numbers_have_three_figures() {
        let shown = [0.0, 0.000_12, 0.123_4, 1.0, 12.34, 123.4, 12_345.6].map(short);
        assert_eq!(
            shown,
            ["0", "1.20e-4", "0.12", "1.00", "12.3", "123", "12346"]
        );
    }

    #[test]
    fn what_paging_cost_and_what_was_to_be_reached_is_told() {
        let mut results = sample();
        for (series, rate) in results.series.iter_mut().zip([0.0, 4321.0]) {
            for run in &mut series.runs {
                run.costs = [("rate".to_owned(), rate)].into();
                run.remote_faults = Some(Latency {
                    count: 9,
                    us_p50: 123,
                    us_p90: None,
                    us_p99: 456,
                    us_p999: Some(789),
                    us_max: 1000,
                });
            }
        }
        results.note("tuning down", "pages/s", 60.0);
        results.note("copying pages", "pages/s", 100.0);
        results.is_unfinished = true;
        results.ratios = ratios::of(&results);
        results.targets = super::super::targets::of(&results);
        let text = text(&results);
        let words = |line: &str| {
            line.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let rows: Vec<Vec<String>> = text.lines().map(words).collect();
        for row in [
            "Cost of pages that came or left, medians pages/s vCPU+work s/GiB helper s/GiB server s/GiB \
             wire/useful",
            "quicksort at 0.5 4321 - - - -",
            "Remote faults in the helper (µs), medians p50 p90 p99 p99.9 max",
            "quicksort at 0.5 123 - 456 789 1000",
            "≥ 0.50 0.60 0.60 … 0.60 100 pages/s met",
            "≤ 1.05 - not measured in this run",
        ] {
            assert!(rows.contains(&words(row)), "{row} is not in:\n{text}");
        }
        assert!(text.contains("UNFINISHED"), "{text}");
    }

    #[test]
    fn latencies_have_the_spreads_of_their_rounds() {
        let text = text(&sample());
        let rows: Vec<String> = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        for row in [
            "Latency (µs), all rounds together p50 p90 p99 p99.9 max p50 of rounds p99 of rounds",
            "remote fault 0 0 0 0 9.00e-3 200 … 250 -",
        ] {
            assert!(
                rows.iter().any(|found| found == row),
                "{row} is not in:\n{text}"
            );
        }
    }

    #[test]
    fn accuracy_is_of_what_is_known() {
        assert_eq!(accuracy(0, 0), "-");
        assert_eq!(accuracy(995, 5), "≥ 99 %");
        assert_eq!(accuracy(1, 3), "≥ 25 %");
    }

    #[test]
    fn the_report_has_what_was_measured_and_what_was_not() {
        let mut results = sample();
        results.ratios = ratios::of(&results);
        let text = text(&results);
        for part in [
            "remote fault",
            "outram at 0.5 ÷ outram at 1",
            "1.75",
            "there is none",
        ] {
            assert!(text.contains(part), "{part} is not in:\n{text}");
        }
    }
}
