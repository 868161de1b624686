//! Results as text.

use std::fmt::Write;

use outram_wire::units::format_size;

use super::contest::OUTRAM;
use super::mix::table;
use super::results::Results;
use super::statistics::Spread;
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
    let ends = format!("{} … {}", short(spread.low), short(spread.high));
    format!("{:>10}   {ends}", short(spread.median))
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
    Ok(())
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
    writeln!(
        out,
        "Run       {:.0} s; medians of rounds, least … most",
        results.seconds
    )
}

/// Everything but workloads.
fn write_paging(out: &mut String, results: &Results) -> std::fmt::Result {
    writeln!(
        out,
        "\n{:<44}{:>9}{:>9}{:>9}{:>9}{:>9}",
        "Latency (µs)", "p50", "p90", "p99", "p99.9", "max"
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
        writeln!(out, "  {name:<42}{cells}")?;
    }
    writeln!(
        out,
        "\n{:<58}{:>10}   least … most",
        "Figures of this machine", "median"
    )?;
    for (name, figure) in &results.figures {
        // These are in the table of latencies.
        let is_shown = name.ends_with(" p50") || name.ends_with(" p99");
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
    let ours = results.series.iter().filter(|series| {
        series.memory == OUTRAM && series.local_ratio < 1.0 && !series.runs.is_empty()
    });
    let headings: String = names.iter().map(|name| format!("{name:>11}")).collect();
    let mut is_first = true;
    for series in ours {
        if std::mem::take(&mut is_first) {
            let title = "Faults of the first round's run";
            writeln!(out, "\n{title:<34}{headings}  evicted (clean)  pages")?;
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
        writeln!(out, "  {title:<32}{cells}  {evicted} ({clean})  {pages}")?;
    }
    Ok(())
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
