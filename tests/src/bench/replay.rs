//! How well a workload could be paged at all: its [trace], replayed by eviction
//! [policies], and the time that follows from the best of them.
//!
//! Nobody fetches less than OPT, and no fault takes less than a userfault and a round trip of its page
//! over the wire. So a pager that fetches a page when it is asked for takes no less time than the workload
//! with all memory local and, for each page that OPT fetches, that floor of a fault. One that
//! fetches ahead may take less. But OPT knows what comes: what a pager takes at least with LRU's fetches, which
//! does not, is shown beside it.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::phase::Task;
use super::policies;
use super::results::Results;
use super::statistics::Spread;
use super::trace::{self, Trace};
use super::watched_memory::PAGE_BYTES;

/// What policies miss of a workload at one local ratio.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Replay {
    /// The workload.
    pub workload: String,
    /// Share of its memory that may be local.
    pub local_ratio: f64,
    /// Pages that OPT fetches.
    pub opt_fetches: u64,
    /// Misses of OPT; first uses of pages, which nobody fetches, are among them.
    pub opt: u64,
    /// ... of LRU.
    pub lru: u64,
    /// ... of the pager's policy.
    pub outram: u64,
}

/// Whose fetches are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// OPT's: nobody has fewer.
    Opt,
    /// LRU's.
    Lru,
}

impl std::fmt::Display for By {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Opt => "OPT",
            Self::Lru => "LRU",
        })
    }
}

impl Replay {
    fn fetches(&self, by: By) -> u64 {
        match by {
            By::Opt => self.opt_fetches,
            // First uses are as many whatever is evicted.
            By::Lru => self.lru - (self.opt - self.opt_fetches),
        }
    }

    /// Misses of the pager's policy by LRU's; nothing where that has none.
    pub fn by_lru(&self) -> Option<Spread> {
        Spread::of_ratios(&[self.outram as f64], &[self.lru as f64])
    }
}

/// Records what a workload uses and replays that at the ratios that leave a part of it elsewhere.
///
/// Recording takes several times as long as the workload: so it is a run of its own. Extra work changes
/// nothing of what is used, and is left out.
pub fn record(task: &Task, local_ratios: &[f64]) -> Result<Vec<Replay>> {
    let task = Task {
        compute: 0,
        ..task.clone()
    };
    let (trace, _) = trace::record(&task, local_ratios)?;
    let short = local_ratios.iter().filter(|&&local| local < 1.0);
    short
        .map(|&local_ratio| {
            let limit = task.limit_bytes(local_ratio)? as usize / PAGE_BYTES;
            Ok(replay(&trace, &task.name, local_ratio, limit))
        })
        .collect()
}

fn replay(trace: &Trace, workload: &str, local_ratio: f64, limit: usize) -> Replay {
    let misses = policies::misses(trace, limit);
    Replay {
        workload: workload.to_owned(),
        local_ratio,
        // A page's first use is a miss whatever is evicted.
        opt_fetches: misses.opt - trace.first_uses(),
        opt: misses.opt,
        lru: misses.lru,
        outram: misses.outram,
    }
}

/// Name of the figure: floor of a fault when this workload was run.
pub fn fault_floor(workload: &str) -> String {
    format!("{workload}: floor of a fault")
}

/// Seconds that a workload takes at least by that, in each round; nothing where a part of it was not
/// measured.
pub fn least_seconds(results: &Results, workload: &str, local_ratio: f64, by: By) -> Vec<f64> {
    let of = |replay: &&Replay| replay.workload == workload && replay.local_ratio == local_ratio;
    let local = results.series(workload, "memfd", 1.0);
    let (Some(replay), Some(local)) = (results.replays.iter().find(of), local) else {
        return Vec::new();
    };
    let floors_us = results.rounds(&fault_floor(workload));
    local
        .runs
        .iter()
        .zip(floors_us)
        .map(|(run, floor_us)| run.seconds + replay.fetches(by) as f64 * floor_us / 1e6)
        .collect()
}

/// How many times as long as that a kind of memory took.
pub fn by_least(
    results: &Results,
    workload: &str,
    memory: &str,
    local_ratio: f64,
    by: By,
) -> Option<Spread> {
    let series = results.series(workload, memory, local_ratio)?;
    let seconds: Vec<f64> = series.runs.iter().map(|run| run.seconds).collect();
    let least = least_seconds(results, workload, local_ratio, by);
    Spread::of_ratios(&seconds, &least)
}

#[cfg(test)]
mod tests {
    use super::super::phase::Run;
    use super::super::results::Series;
    use super::*;

    #[test]
    fn first_uses_are_fetched_by_nobody() {
        // Pages 0 to 999 are written by the preparation, all 2000 used three times after that.
        let prepared: Vec<u32> = (0..1000).collect();
        let rounds = (0..3).flat_map(|_| 0..2000);
        let trace = Trace {
            pages: 2000,
            uses: prepared.iter().copied().chain(rounds).collect(),
            prepared: 1000,
        };
        let all = replay(&trace, "rounds", 1.0, 2000);
        assert_eq!((all.opt, all.opt_fetches), (1000, 0));
        let half = replay(&trace, "rounds", 0.5, 1000);
        // Of each later round, OPT keeps all but one of its thousand places for what it has.
        assert!((2000..2010).contains(&half.opt_fetches), "{half:?}");
        assert!(half.lru >= half.opt && half.outram >= half.opt, "{half:?}");
    }

    #[test]
    fn a_workload_is_divided_by_what_it_takes_at_least_in_its_round() {
        let mut results = Results::default();
        let by_opt = |results: &Results, local_ratio| {
            by_least(results, "quicksort", "outram", local_ratio, By::Opt)
        };
        assert_eq!(by_opt(&results, 0.5), None);
        for (memory, local_ratio, seconds) in [
            ("memfd", 1.0, [1.0, 2.0]),
            ("outram", 0.5, [3.0, 12.0]),
            ("outram", 0.25, [9.0, 9.0]),
        ] {
            for seconds in seconds {
                results.note_run(Series {
                    workload: "quicksort".to_owned(),
                    memory: memory.to_owned(),
                    local_ratio,
                    bytes: 1 << 20,
                    compute: 0,
                    runs: vec![Run {
                        seconds,
                        ..Run::default()
                    }],
                });
            }
        }
        results.replays.push(Replay {
            workload: "quicksort".to_owned(),
            local_ratio: 0.5,
            opt_fetches: 50_000,
            opt: 60_000,
            lru: 160_000,
            ..Replay::default()
        });
        assert_eq!(by_opt(&results, 0.5), None, "no floor yet");
        for floor_us in [20.0, 40.0] {
            results.note(&fault_floor("quicksort"), "µs", floor_us);
        }
        let least = |by| least_seconds(&results, "quicksort", 0.5, by);
        assert_eq!(least(By::Opt), [2.0, 4.0]);
        assert_eq!(least(By::Lru), [4.0, 8.0]);
        let found = by_opt(&results, 0.5).expect("all of it");
        assert_eq!((found.low, found.high), (1.5, 3.0));
        assert_eq!(by_opt(&results, 0.25), None, "not replayed");
    }
}
