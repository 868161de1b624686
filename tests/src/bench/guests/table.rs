//! What runs of guests measured, as a file and as a table.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use outram_wire::control::Latency;
use serde::Serialize;

use super::super::machine::Machine;
use super::super::report::{ends, short};
use super::super::statistics::Spread;

/// Version of the file.
pub const FORMAT: u32 = 1;

/// A key that files of this sort have, and others do not.
pub const KEY: &str = "emulated";

/// How wide the least and the most are, where there are several rounds.
const ENDS_WIDTH: usize = 16;

/// What paging did and cost during the timed part of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Paging {
    /// Faults that a memory server answered.
    pub faults_remote: u64,
    /// Faults answered from staging.
    pub faults_staged: u64,
    /// Pages asked for before anybody waited for them.
    pub fetched_ahead_pages: u64,
    /// Pages evicted.
    pub evicted_pages: u64,
    /// Bytes from and to memory servers, with their framing.
    pub wire_bytes: u64,
    /// Time that threads of QEMU have waited for pages.
    pub waited_s: f64,
    /// Processor time of the backend.
    pub helper_cpu_s: f64,
    /// Processor time of the memory server.
    pub server_cpu_s: f64,
    /// The most that the guest cost this host at a time, from its first instruction on.
    pub host_bytes_peak: u64,
    /// Latency of all remote faults up to the end of the timed part, as the backend measures it: the guest's start and
    /// what it prepared are among them. Nothing where there was none.
    pub remote_faults: Option<Latency>,
}

impl Paging {
    /// Processor seconds for each GB (10⁹ bytes) that went over the wire; `None` where hardly any did.
    fn per_gb(&self, seconds: f64) -> Option<f64> {
        const LEAST: u64 = 10_000_000;
        (self.wire_bytes >= LEAST).then(|| seconds / (self.wire_bytes as f64 / 1e9))
    }
}

/// A workload's run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Run {
    /// The workload.
    pub workload: String,
    /// Which round, from 0.
    pub round: usize,
    /// The local ratio; `None` without Outram.
    pub local_ratio: Option<f64>,
    /// Seconds of the timed part, by the guest's clock.
    pub seconds: f64,
    /// What it came to.
    pub result: String,
    /// Whether that is what the run without Outram came to.
    pub is_right: bool,
    /// What paging cost.
    pub paging: Option<Paging>,
}

/// A run that came to nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// Which.
    pub what: String,
    /// Why.
    pub reason: String,
}

/// All that was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Results {
    /// Version of the file.
    pub format: u32,
    /// Whether guests were emulated: then ratios are no slowdowns.
    pub emulated: bool,
    /// RAM of each guest.
    pub ram_mib: u64,
    /// How much work, in per cent of the ordinary.
    pub work: u64,
    /// How long all took.
    pub seconds: f64,
    /// The machine.
    pub machine: Machine,
    /// Each run.
    pub runs: Vec<Run>,
    /// What failed.
    pub failures: Vec<Failure>,
}

impl Results {
    /// Writes a file.
    pub fn save(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        fs::write(path, text).with_context(|| path.display().to_string())
    }

    /// How many runs came to something else than without Outram.
    pub fn wrong(&self) -> usize {
        self.runs.iter().filter(|run| !run.is_right).count()
    }

    /// The table, with what has to be known of it above.
    pub fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let machine = &self.machine;
        writeln!(
            out,
            "\nMachine   {} × {}",
            machine.processors, machine.processor
        )?;
        writeln!(out, "Load      {} before it began", machine.load)?;
        writeln!(out, "Outram    {}", machine.outram)?;
        let (ram, work) = (self.ram_mib, self.work);
        writeln!(
            out,
            "Guests    of {ram} MiB and one processor; {work} % of the ordinary work"
        )?;
        if self.emulated {
            writeln!(
                out,
                "\nThese guests are emulated: their processor is so slow that faults hardly show. The\n\
                 ratios below tell whether results are right, and trends; they are not slowdowns."
            )?;
        }
        let width = self.ends_width();
        let (least, most) = if width > 0 {
            ("least …", "… most")
        } else {
            ("", "")
        };
        writeln!(
            out,
            "\n{:<16}{:>7}{:>10}{:>9}{least:>width$}{:>10}{:>9}{:>9}{:>10}{:>10}{:>10}{:>9}{:>9}  result",
            "workload",
            "ratio",
            "seconds",
            "÷ local",
            "faults",
            "p50",
            "p99",
            "pages",
            "MB on",
            "MiB here",
            "helper",
            "server"
        )?;
        writeln!(
            out,
            "{:<16}{:>7}{:>10}{:>9}{most:>width$}{:>10}{:>9}{:>9}{:>10}{:>10}{:>10}{:>9}{:>9}",
            "", "", "", "", "fetched", "µs", "µs", "evicted", "the wire", "at most", "s/GB", "s/GB"
        )?;
        let mut rows: Vec<(String, Option<f64>)> = Vec::new();
        for run in &self.runs {
            let row = (run.workload.clone(), run.local_ratio);
            if !rows.contains(&row) {
                rows.push(row);
            }
        }
        // Rounds are mixed in the file; a workload's rows belong together.
        let first: BTreeMap<&str, usize> = (rows.iter().enumerate().rev())
            .map(|(at, (name, _))| (name.as_str(), at))
            .collect();
        let mut order: Vec<&(String, Option<f64>)> = rows.iter().collect();
        order.sort_by_key(|(name, _)| first[name.as_str()]);
        for (name, ratio) in order {
            writeln!(out, "{}", self.row(name, *ratio).trim_end())?;
        }
        if !self.failures.is_empty() {
            writeln!(out, "\nFailed")?;
        }
        for failure in &self.failures {
            let reason = failure.reason.lines().next().unwrap_or_default();
            writeln!(out, "  {}: {reason}", failure.what)?;
        }
        Ok(())
    }

    fn of(&self, name: &str, ratio: Option<f64>) -> Vec<&Run> {
        let is_meant = |run: &&Run| run.workload == name && run.local_ratio == ratio;
        self.runs.iter().filter(is_meant).collect()
    }

    /// Of single rounds, there is no least and no most.
    fn ends_width(&self) -> usize {
        match self.runs.iter().any(|run| run.round > 0) {
            true => ENDS_WIDTH,
            false => 0,
        }
    }

    fn row(&self, name: &str, ratio: Option<f64>) -> String {
        let runs = self.of(name, ratio);
        let median = |value: &dyn Fn(&Run) -> Option<f64>| -> String {
            let values: Vec<f64> = runs.iter().filter_map(|run| value(run)).collect();
            Spread::of(&values).map_or(String::new(), |found| short(found.median))
        };
        let count = |value: fn(&Paging) -> f64| median(&|run| run.paging.as_ref().map(value));
        let cost = |seconds: fn(&Paging) -> f64| {
            median(&|run| {
                run.paging
                    .as_ref()
                    .and_then(|paging| paging.per_gb(seconds(paging)))
            })
        };
        let local = self.of(name, None);
        let to_local = |run: &Run| {
            let beside = local.iter().find(|other| other.round == run.round)?;
            Some(run.seconds / beside.seconds)
        };
        let width = self.ends_width();
        let spread = match (width, ratio) {
            (0, _) | (_, None) => String::new(),
            _ => {
                let ratios: Vec<f64> = runs.iter().filter_map(|run| to_local(run)).collect();
                Spread::of(&ratios).map_or(String::new(), |found| ends(&found))
            }
        };
        let latency = |us: fn(&Latency) -> u64| {
            median(&|run| {
                let found = run.paging.as_ref()?.remote_faults.as_ref()?;
                (found.count > 0).then(|| us(found) as f64)
            })
        };
        let result = match (ratio, runs.iter().all(|run| run.is_right)) {
            (_, false) => "WRONG RESULT",
            (None, true) => "",
            (Some(_), true) => "as local",
        };
        format!(
            "{name:<16}{:>7}{:>10}{:>9}{spread:>width$}{:>10}{:>9}{:>9}{:>10}{:>10}{:>10}{:>9}{:>9}  {result}",
            ratio.map_or("local".to_owned(), |ratio| format!("{ratio:?}")),
            median(&|run| Some(run.seconds)),
            median(&|run| to_local(run).filter(|_| ratio.is_some())),
            count(|paging| paging.faults_remote as f64),
            latency(|found| found.us_p50),
            latency(|found| found.us_p99),
            count(|paging| paging.evicted_pages as f64),
            count(|paging| paging.wire_bytes as f64 / 1e6),
            count(|paging| (paging.host_bytes_peak >> 20) as f64),
            cost(|paging| paging.helper_cpu_s),
            cost(|paging| paging.server_cpu_s),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(round: usize, local_ratio: Option<f64>, seconds: f64, is_right: bool) -> Run {
        let paging = Paging {
            faults_remote: 500,
            wire_bytes: 2_000_000_000,
            helper_cpu_s: 3.0,
            remote_faults: Some(Latency {
                count: 500,
                us_p50: 123,
                us_p99: 456,
                ..Latency::default()
            }),
            ..Paging::default()
        };
        Run {
            workload: "redis".to_owned(),
            round,
            local_ratio,
            seconds,
            result: "x".to_owned(),
            is_right,
            paging: local_ratio.map(|_| paging),
        }
    }

    fn results(is_right: bool) -> Results {
        Results {
            emulated: true,
            runs: vec![
                run(0, None, 10.0, true),
                run(0, Some(0.5), 15.0, true),
                run(1, None, 20.0, true),
                run(1, Some(0.5), 50.0, is_right),
            ],
            ..Results::default()
        }
    }

    /// The cells of the row that has this second cell.
    fn row(text: &str, ratio: &str) -> Vec<String> {
        let cells =
            |line: &str| -> Vec<String> { line.split_whitespace().map(str::to_owned).collect() };
        let mut rows = text.lines().map(cells);
        rows.find(|cells| cells.get(1).is_some_and(|cell| cell == ratio))
            .expect("the row")
    }

    #[test]
    fn runs_are_divided_by_those_of_their_round() {
        let text = results(true).text();
        assert_eq!(row(&text, "local")[2..], ["15.0"]);
        // 1.5 and 2.5; three seconds for two GB.
        assert_eq!(
            row(&text, "0.5")[2..10],
            ["32.5", "2.00", "1.50", "…", "2.50", "500", "123", "456"]
        );
        assert!(row(&text, "0.5").contains(&"1.50".to_owned()), "{text}");
        assert!(text.contains("not slowdowns"));
    }

    #[test]
    fn a_single_round_has_no_least_and_no_most() {
        let mut results = results(true);
        results.runs.truncate(2);
        let text = results.text();
        assert_eq!(row(&text, "0.5")[2..5], ["15.0", "1.50", "500"]);
        assert!(!text.contains("least"), "{text}");
    }

    #[test]
    fn a_wrong_result_is_shown_whichever_round_it_was_of() {
        let results = results(false);
        assert_eq!(results.wrong(), 1);
        assert!(results.text().contains("WRONG RESULT"));
    }

    #[test]
    fn guests_of_kvm_have_slowdowns() {
        let mut results = results(true);
        results.emulated = false;
        assert!(!results.text().contains("emulated"));
    }
}
