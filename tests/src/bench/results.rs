//! What a run of the benchmark leaves: a file that says all that was measured and on what.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::guests::table::KEY as GUESTS_KEY;
use super::machine::Machine;
use super::mix::results::MixResults;
use super::phase::Run;
use super::ratios::Ratio;
use super::replay::Replay;
use super::statistics::Distribution;
use super::targets::Target;

/// Version of the file.
pub const FORMAT: u32 = 1;

/// A value that was measured in each round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// Its unit.
    pub unit: String,
    /// Of each round, in order.
    pub rounds: Vec<f64>,
}

/// Values by name.
pub type Figures = BTreeMap<String, Figure>;

/// Notes a round's value.
pub fn note(figures: &mut Figures, name: &str, unit: &str, value: f64) {
    let figure = figures.entry(name.to_owned()).or_insert_with(|| Figure {
        unit: unit.to_owned(),
        rounds: Vec::new(),
    });
    figure.rounds.push(value);
}

/// Runs of a workload on one kind of memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Series {
    /// The workload.
    pub workload: String,
    /// The kind of memory: see [`super::contest`].
    pub memory: String,
    /// Share of the data that may be local.
    pub local_ratio: f64,
    /// Bytes of the data.
    pub bytes: u64,
    /// Extra work for each operation, in rounds; part of the workload's name, too.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub compute: u32,
    /// Of each round, in order.
    pub runs: Vec<Run>,
}

/// Something that cannot be measured on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Missing {
    /// What.
    pub what: String,
    /// Why not.
    pub reason: String,
}

/// All of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Results {
    /// Version of the file.
    pub format: u32,
    /// Whether it was the quick run.
    pub quick: bool,
    /// How long all of it took, in seconds.
    pub seconds: f64,
    /// Whether it was still at work when this was written, and never came to its end.
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_unfinished: bool,
    /// The machine.
    pub machine: Machine,
    /// What was asked for, in the words of the command line.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub arguments: Vec<String>,
    /// Latencies by name, all rounds together.
    pub distributions: BTreeMap<String, Distribution>,
    /// Values by name.
    pub figures: Figures,
    /// Runs of workloads.
    pub series: Vec<Series>,
    /// What eviction policies would miss of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replays: Vec<Replay>,
    /// Mixes of workloads over several guests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mixes: Vec<MixResults>,
    /// What could not be measured.
    pub missing: Vec<Missing>,
    /// What follows from all of that.
    pub ratios: Vec<Ratio>,
    /// What was to be reached, and whether it was.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<Target>,
}

impl Results {
    /// Notes a round's value.
    pub fn note(&mut self, name: &str, unit: &str, value: f64) {
        note(&mut self.figures, name, unit, value);
    }

    /// The rounds of a value; none where it was not measured.
    pub fn rounds(&self, name: &str) -> &[f64] {
        self.figures.get(name).map_or(&[], |figure| &figure.rounds)
    }

    /// Runs of a workload on a kind of memory.
    pub fn series(&self, workload: &str, memory: &str, local_ratio: f64) -> Option<&Series> {
        self.series.iter().find(|series| {
            series.workload == workload
                && series.memory == memory
                && series.local_ratio == local_ratio
        })
    }

    /// Notes a run.
    pub fn note_run(&mut self, series: Series) {
        let found = self.series.iter_mut().find(|known| {
            known.workload == series.workload
                && known.memory == series.memory
                && known.local_ratio == series.local_ratio
        });
        match found {
            Some(known) => known.runs.extend(series.runs),
            None => self.series.push(series),
        }
    }

    /// Whether something was found not to be had here.
    pub fn is_missing(&self, what: &str) -> bool {
        self.missing.iter().any(|known| known.what == what)
    }

    /// Notes that something cannot be had here.
    pub fn note_missing(&mut self, what: &str, reason: &anyhow::Error) {
        if !self.is_missing(what) {
            self.missing.push(Missing {
                what: what.to_owned(),
                reason: format!("{reason:#}"),
            });
        }
    }

    /// Reads a file.
    pub fn load(path: &Path) -> Result<Self> {
        let name = || path.display().to_string();
        let text = fs::read_to_string(path).with_context(name)?;
        let value: serde_json::Value = serde_json::from_str(&text).with_context(name)?;
        ensure!(
            value.get(GUESTS_KEY).is_none(),
            "{} is of 'bench guests', which prints its table as it ends; here is to be a file of 'bench run' or \
             'bench mix'",
            name()
        );
        let format = value["format"].as_u64();
        ensure!(
            format == Some(u64::from(FORMAT)),
            "{} is no file of results in format {FORMAT}",
            name()
        );
        serde_json::from_value(value).with_context(name)
    }

    /// Writes a file. Whoever is killed meanwhile leaves the one that was there before.
    pub fn save(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string(self)?;
        let new = path.with_extension("json.new");
        fs::write(&new, text).with_context(|| new.display().to_string())?;
        fs::rename(&new, path).with_context(|| path.display().to_string())
    }
}

// serde has such functions called with references.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_false(value: &bool) -> bool {
    !value
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Results with a value of each sort.
    pub(crate) fn sample() -> Results {
        let mut results = Results {
            format: FORMAT,
            quick: true,
            seconds: 12.5,
            ..Results::default()
        };
        for value in [2.0, 2.5] {
            results.note("remote fault p50", "µs", value * 100.0);
        }
        let distribution = Distribution {
            count: 3,
            ns_max: 9,
            pairs: vec![(1, 2), (9, 1)],
            ..Distribution::default()
        };
        results
            .distributions
            .insert("remote fault".to_owned(), distribution);
        for (memory, local_ratio, seconds) in [("outram", 1.0, 1.0), ("outram", 0.5, 1.75)] {
            for _ in 0..2 {
                results.note_run(Series {
                    workload: "quicksort".to_owned(),
                    memory: memory.to_owned(),
                    local_ratio,
                    bytes: 1 << 20,
                    compute: 0,
                    runs: vec![Run {
                        seconds,
                        checksum: u64::MAX,
                        ..Run::default()
                    }],
                });
            }
        }
        results.note_missing("swap to zram", &anyhow::anyhow!("there is none"));
        results.note_missing("swap to zram", &anyhow::anyhow!("twice"));
        results
    }

    #[test]
    fn results_come_back_from_their_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("results.json");
        let results = sample();
        results.save(&path).expect("room");
        let again = Results::load(&path).expect("what was written");
        assert_eq!(again, results);
        assert_eq!(again.missing.len(), 1);
        let series = again.series("quicksort", "outram", 0.5).expect("it ran");
        assert_eq!(series.runs.len(), 2);
        assert_eq!(series.runs[0].checksum, u64::MAX);
        assert_eq!(again.rounds("remote fault p50"), [200.0, 250.0]);
        assert!(again.rounds("nothing").is_empty());
    }

    #[test]
    fn a_file_of_real_guests_is_told_from_others() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("guests.json");
        let guests = crate::bench::guests::table::Results {
            format: FORMAT,
            ..Default::default()
        };
        guests.save(&path).expect("room");
        let error = Results::load(&path).expect_err("it is another file");
        assert!(format!("{error:#}").contains("'bench guests'"), "{error:#}");
    }

    #[test]
    fn other_files_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("results.json");
        for text in ["", "{}", "[1]", r#"{"format":2}"#, r#"{"format":1}"#] {
            fs::write(&path, text).expect("room");
            assert!(Results::load(&path).is_err(), "{text}");
        }
        assert!(Results::load(&folder.path().join("absent")).is_err());
    }
}
