//! What the benchmark is to show, and whether a run did.
//!
//! | target | of what |
//! |---|---|
//! | P1 | a remote fault, by the floors of userfault and wire |
//! | P2 | sequential access at a half, by the kernel's swap to compressed memory |
//! | P3 | every workload, by all of it local and the floor of a fault for each page that OPT fetches |
//! | P4 | the other baselines |
//! | P5 | batches of pages over the client library, by those over a raw socket |
//! | P6 | the helper's memory |
//! | P7 | a limit that falls, by the machine's rate of copying pages |
//! | P8 | the eviction policy's misses, by LRU's |
//!
//! Times are divided so that less is better: twice as fast as a baseline is a half of its time.

use serde::{Deserialize, Serialize};

use super::baseline::{NBD, SWAP_FILE, ZRAM};
use super::contest::{OUTRAM, STATED, STATED_COMPUTE, label};
use super::helper_memory;
use super::own::{FAULT_AT_REST, HELD_AT_REST, TUNED_BY, TUNING, floor_beside};
use super::ratios::{
    BESIDE_A_STALL_BY_WITHOUT, BY_EVICTION_FLOOR, PAGING, by_least, by_lru, by_sum_of_floors,
    eviction_floor, sum_of_floors,
};
use super::replay::{By, least_seconds};
use super::results::Results;
use super::statistics::Spread;

/// Local ratios that workloads are to be paged well at.
const RATIOS: [f64; 3] = [0.75, 0.5, 0.25];
/// That of a comparison with the baselines: memory for half of the data.
const HALF: f64 = 0.5;

/// Where a value is to be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bound {
    /// No more than this.
    AtMost(f64),
    /// No less than this.
    AtLeast(f64),
    /// Published of other systems, at their machines: shown beside, and nothing to be reached.
    Published(f64, f64),
    /// To be shown.
    Shown,
}

/// Whether it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The median is.
    Met,
    /// It is not.
    Missed,
    /// There is nothing to be reached.
    Shown,
    /// The run did not include it.
    NotMeasured,
}

/// What a value is measured against.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Floor {
    /// Median of the rounds.
    pub median: f64,
    /// Its unit.
    pub unit: String,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// Its number.
    pub number: String,
    /// What is divided by what, or what is shown.
    pub what: String,
    /// Where it is to be.
    pub bound: Bound,
    /// What was found.
    pub found: Option<Spread>,
    /// What that was measured against.
    pub floor: Option<Floor>,
    /// Whether it is there.
    pub verdict: Verdict,
}

/// All of them, in order, as a run found them.
pub fn of(results: &Results) -> Vec<Target> {
    let table = Table(results);
    let mut targets = table.faults();
    targets.extend(table.sequential());
    targets.extend(table.workloads());
    targets.extend(table.published());
    targets.extend(table.baselines());
    targets.extend(table.wire());
    targets.extend(table.helper());
    targets.extend(table.policies());
    targets
}

fn judge(bound: Bound, found: Option<&Spread>) -> Verdict {
    let Some(found) = found else {
        return Verdict::NotMeasured;
    };
    let is_met = match bound {
        Bound::AtMost(most) => found.median <= most,
        Bound::AtLeast(least) => found.median >= least,
        Bound::Published(..) | Bound::Shown => return Verdict::Shown,
    };
    if is_met {
        Verdict::Met
    } else {
        Verdict::Missed
    }
}

fn target(
    number: &str,
    what: String,
    bound: Bound,
    found: Option<Spread>,
    floor: Option<Floor>,
) -> Target {
    Target {
        number: number.to_owned(),
        what,
        verdict: judge(bound, found.as_ref()),
        bound,
        floor: floor.filter(|_| found.is_some()),
        found,
    }
}

/// Which of the workloads that were run is furthest off, and how many these were: fewer than there are where the run
/// was a quick one, or was to have some alone.
fn worst_of(name: &str, within: usize, all: usize) -> String {
    format!(", worst: {name} ({within} of the {all} run within)")
}

struct Table<'a>(&'a Results);

impl Table<'_> {
    fn ratio(&self, group: &str, name: &str) -> Option<Spread> {
        let ratios = self.0.ratios.iter();
        let mut of_it = ratios.filter(|ratio| ratio.group == group && ratio.name == name);
        of_it.next().map(|ratio| ratio.value)
    }

    /// The sum of figures' medians.
    fn figures(&self, names: &[&str]) -> Option<Floor> {
        let figure = self.0.figures.get(*names.first()?)?;
        let medians = names
            .iter()
            .map(|name| Some(Spread::of(self.0.rounds(name))?.median));
        Some(Floor {
            median: medians.sum::<Option<f64>>()?,
            unit: figure.unit.clone(),
        })
    }

    fn seconds(values: &[f64]) -> Option<Floor> {
        Spread::of(values).map(|found| Floor {
            median: found.median,
            unit: "s".to_owned(),
        })
    }

    /// Time of a workload on a kind of memory.
    fn time(&self, workload: &str, memory: &str, local_ratio: f64) -> Option<Floor> {
        let series = self.0.series(workload, memory, local_ratio)?;
        let seconds: Vec<f64> = series.runs.iter().map(|run| run.seconds).collect();
        Self::seconds(&seconds)
    }

    fn paging(&self, number: &str, name: &str, bound: Bound, floor: &[&str]) -> Target {
        let found = self.ratio(PAGING, name);
        target(number, name.to_owned(), bound, found, self.figures(floor))
    }

    /// A ratio of a limit that falls: its row says by how much it did, which quick runs have less of.
    fn tuning(&self, name: &str, bound: Bound, floor: Option<Floor>) -> Target {
        let found = self.ratio(PAGING, name);
        let by = Spread::of(self.0.rounds(TUNED_BY));
        let by = by.map_or(String::new(), |by| format!(" by {} MiB", by.median));
        let what = name.replace(TUNING, &format!("{TUNING}{by}"));
        target("P7", what, bound, found, floor)
    }

    /// A value itself.
    fn figure(&self, number: &str, name: &str, bound: Bound, floor: &[&str]) -> Target {
        let unit = self.0.figures.get(name).map(|figure| &figure.unit[..]);
        let unit = unit.filter(|unit| !unit.is_empty());
        let title = unit.map_or(name.to_owned(), |unit| format!("{name} [{unit}]"));
        let found = Spread::of(self.0.rounds(name));
        target(number, title, bound, found, self.figures(floor))
    }

    /// A workload at a half by the same on a baseline.
    fn contest(&self, number: &str, workload: &str, memory: &str, bound: Bound) -> Target {
        let name = format!("{OUTRAM} at {HALF} ÷ {memory} at {HALF}");
        let found = self.ratio(workload, &name);
        let what = format!("{workload}: {OUTRAM} ÷ {memory}, at {HALF}");
        target(
            number,
            what,
            bound,
            found,
            self.time(workload, memory, HALF),
        )
    }

    /// A workload at a half by the same with all memory local.
    fn slowdown(&self, number: &str, workload: &str, bound: Bound) -> Target {
        let found = self.ratio(workload, &format!("{OUTRAM} at {HALF} ÷ local memfd"));
        let what = format!("{workload}: {OUTRAM} at {HALF} ÷ all local");
        target(
            number,
            what,
            bound,
            found,
            self.time(workload, "memfd", 1.0),
        )
    }

    fn faults(&self) -> Vec<Target> {
        let mut targets = Vec::new();
        for fault in ["remote fault", "remote fault at the limit"] {
            for (title, which, most) in [("medians", "p50", 1.10), ("p99", "p99", 1.25)] {
                targets.push(self.paging(
                    "P1",
                    &format!("{fault} ÷ (uffd + wire), {title}"),
                    Bound::AtMost(most),
                    &[&format!("{} {which}", floor_beside(fault))],
                ));
            }
            // By the floors as they are when nothing has both, at another moment of the round.
            let name = by_sum_of_floors(fault);
            let found = self.ratio(PAGING, &name);
            let floor = Spread::of(&sum_of_floors(self.0)).map(|floor| Floor {
                median: floor.median,
                unit: "µs".to_owned(),
            });
            targets.push(target("P1", name, Bound::Shown, found, floor));
        }
        targets
    }

    fn sequential(&self) -> Vec<Target> {
        vec![
            self.contest("P2", "sequential-write", ZRAM, Bound::AtMost(1.5)),
            self.contest("P2", "sequential-read", ZRAM, Bound::AtMost(2.0)),
            // The thesis on remote swap over iSER: an array twice the local memory.
            self.slowdown("P2", "sequential-write", Bound::Published(3.1, 3.1)),
        ]
    }

    /// Every workload: of all at one ratio, the one that is furthest off.
    fn workloads(&self) -> Vec<Target> {
        let most = 1.25;
        let bounds = [(By::Opt, Bound::AtMost(most)), (By::Lru, Bound::Shown)];
        let of_ratio = |local: f64| bounds.map(|(by, bound)| self.by_least(local, by, most, bound));
        RATIOS.into_iter().flat_map(of_ratio).collect()
    }

    fn by_least(&self, local: f64, by: By, most: f64, bound: Bound) -> Target {
        let (within, all, worst) = self.worst(&by_least(OUTRAM, local, by), most);
        let mut what =
            format!("every workload run, at {local} ÷ (all local + fetches of {by} × floor)");
        let floor = worst.as_ref().and_then(|(name, _)| {
            what += &worst_of(name, within, all);
            Self::seconds(&least_seconds(self.0, name, local, by))
        });
        let found = worst.map(|(_, found)| found);
        target("P3", what, bound, found, floor)
    }

    /// Of all workloads' ratios of this name: how many are within a bound, how many there are, and the
    /// largest.
    fn worst(&self, name: &str, most: f64) -> (usize, usize, Option<(String, Spread)>) {
        let ratios = self.0.ratios.iter();
        let found: Vec<_> = ratios.filter(|ratio| ratio.name == name).collect();
        let within = found.iter().filter(|ratio| ratio.value.median <= most);
        let by_median = |one: &f64, other: &f64| -> std::cmp::Ordering { one.total_cmp(other) };
        let worst = found
            .iter()
            .max_by(|one, other| by_median(&one.value.median, &other.value.median));
        let worst = worst.map(|ratio| (ratio.group.clone(), ratio.value));
        (within.count(), found.len(), worst)
    }

    /// Infiniswap, Fastswap: from memcached's 1.03 to PowerGraph's 1.24 with half of the data local.
    fn published(&self) -> Vec<Target> {
        let stated = label(STATED, STATED_COMPUTE);
        let names = [&stated, "quicksort", "kmeans", "pagerank"];
        let of = |name| self.slowdown("P3", name, Bound::Published(1.03, 1.24));
        names.map(of).to_vec()
    }

    fn baselines(&self) -> Vec<Target> {
        let (random, in_order) = (
            ["random-read", "random-update"],
            ["sequential-write", "sequential-read"],
        );
        let mut targets = Vec::new();
        for (workloads, memory, most) in [
            (random, SWAP_FILE, 1.0),
            (random, NBD, 1.0),
            (in_order, NBD, 0.5),
            (in_order, ZRAM, 1.5),
            (in_order, "plain", 1.0 / 3.0),
            (random, "plain", 1.0 / 3.0),
        ] {
            let of = |name| self.contest("P4", name, memory, Bound::AtMost(most));
            targets.extend(workloads.map(of));
        }
        // Where the machine answers a fault of these sooner than a userfault takes by itself, nothing of ours
        // could be ahead of them.
        for memory in [SWAP_FILE, "plain"] {
            let of = |name: &str| {
                let found = self.ratio(name, &by_least(memory, HALF, By::Lru));
                let floor = Self::seconds(&least_seconds(self.0, name, HALF, By::Lru));
                let what =
                    format!("{name}: {memory} ÷ (all local + fetches of LRU × floor), at {HALF}");
                target("P4", what, Bound::Shown, found, floor)
            };
            targets.extend(random.map(of));
        }
        targets
    }

    fn wire(&self) -> Vec<Target> {
        let mut targets = Vec::new();
        for what in super::batches::BATCHES {
            let floor = format!("{what}, raw socket: rate");
            let bound = Bound::AtLeast(0.8);
            targets.push(self.paging("P5", &format!("{what} ÷ raw socket"), bound, &[&floor]));
            for who in ["client", "server"] {
                let name = |raw: &str| format!("{what}{raw}: CPU of {who}");
                let floor = name(", raw socket");
                targets.push(self.figure("P5", &name(""), Bound::Shown, &[&floor]));
            }
        }
        // Whether a stall delays others is judged by a test of the memory server, to which time is nothing.
        let without = format!("{}: rate", super::batches::WITHOUT_A_STALL);
        targets.push(self.paging("P5", BESIDE_A_STALL_BY_WITHOUT, Bound::Shown, &[&without]));
        targets
    }

    fn helper(&self) -> Vec<Target> {
        let held = "use of a held page, longest: tuning down ÷ at rest";
        vec![
            self.figure(
                "P6",
                helper_memory::BY_ALLOWED,
                Bound::AtMost(1.0),
                &[helper_memory::ALLOWED],
            ),
            // By itself, for the constant alone would allow several times as much of a small guest.
            self.figure(
                "P6",
                helper_memory::EACH_PAGE_MORE,
                Bound::AtMost(helper_memory::BYTES_A_PAGE as f64),
                &[],
            ),
            self.tuning(
                "tuning down ÷ copying pages",
                Bound::AtLeast(0.5),
                self.figures(&["copying pages"]),
            ),
            self.tuning(
                BY_EVICTION_FLOOR,
                Bound::Shown,
                Spread::of(&eviction_floor(self.0)).map(|floor| Floor {
                    median: floor.median,
                    unit: "pages/s".to_owned(),
                }),
            ),
            self.tuning(
                held,
                Bound::Shown,
                self.figures(&[&format!("{HELD_AT_REST} longest")]),
            ),
            self.tuning(
                "remote fault, p99: tuning down ÷ before",
                Bound::AtMost(1.5),
                self.figures(&[&format!("{FAULT_AT_REST} p99")]),
            ),
        ]
    }

    fn policies(&self) -> Vec<Target> {
        let of_ratio = |local: f64| {
            let (within, all, worst) = self.worst(&by_lru(local), 1.05);
            let mut what =
                format!("misses of the pager's policy ÷ LRU's, every workload run, at {local}");
            let floor = worst.as_ref().and_then(|(name, _)| {
                what += &worst_of(name, within, all);
                let mut replays = self.0.replays.iter();
                let of = |replay: &&super::replay::Replay| {
                    replay.workload == *name && replay.local_ratio == local
                };
                replays.find(of).map(|replay| Floor {
                    median: replay.lru as f64,
                    unit: "misses".to_owned(),
                })
            });
            let found = worst.map(|(_, found)| found);
            target("P8", what, Bound::AtMost(1.05), found, floor)
        };
        RATIOS.map(of_ratio).to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::super::ratios::{self, Ratio};
    use super::super::results::tests::sample;
    use super::*;

    fn found<'a>(targets: &'a [Target], start: &str) -> &'a Target {
        let mut of_it = targets
            .iter()
            .filter(|target| target.what.starts_with(start));
        of_it.next().expect("it is in the table")
    }

    fn ratio(group: &str, name: &str, values: &[f64]) -> Ratio {
        Ratio {
            group: group.to_owned(),
            name: name.to_owned(),
            value: Spread::of(values).expect("values"),
            is_less_better: true,
        }
    }

    #[test]
    fn every_target_is_in_the_table_though_nothing_was_measured() {
        let targets = of(&Results::default());
        for number in ["P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8"] {
            let of_it = targets.iter().filter(|target| target.number == number);
            assert!(of_it.count() > 0, "{number}");
        }
        let none = |target: &Target| {
            target.verdict == Verdict::NotMeasured
                && target.found.is_none()
                && target.floor.is_none()
        };
        assert!(targets.iter().all(none), "{targets:?}");
    }

    #[test]
    fn the_median_is_judged_by_the_floor_of_its_run() {
        let mut results = sample();
        for floor in [200.0, 300.0] {
            let name = format!("{} p50", floor_beside("remote fault"));
            results.note(&name, "µs", floor);
        }
        results.ratios = ratios::of(&results);
        let targets = of(&results);
        let fault = found(&targets, "remote fault ÷ (uffd + wire), medians");
        // 200 by 200, and 250 by 300.
        let median = fault.found.expect("both were measured").median;
        assert!((median - 11.0 / 12.0).abs() < 1e-9, "{fault:?}");
        assert_eq!(fault.verdict, Verdict::Met);
        let floor = fault.floor.as_ref().expect("it was measured");
        assert_eq!((floor.median, &floor.unit[..]), (250.0, "µs"));
        results.note(helper_memory::BY_ALLOWED, "", 1.01);
        results.note(helper_memory::ALLOWED, "MiB", 68.0);
        let targets = of(&results);
        assert_eq!(
            found(&targets, helper_memory::BY_ALLOWED).verdict,
            Verdict::Missed
        );
    }

    #[test]
    fn more_is_better_where_it_is_said_so() {
        let spread = |value| Spread::of(&[value]);
        let judged = |bound, value| judge(bound, spread(value).as_ref());
        assert_eq!(judged(Bound::AtLeast(0.5), 0.5), Verdict::Met);
        assert_eq!(judged(Bound::AtLeast(0.5), 0.4), Verdict::Missed);
        assert_eq!(judged(Bound::AtMost(0.5), 0.4), Verdict::Met);
        assert_eq!(judged(Bound::AtMost(0.5), 0.6), Verdict::Missed);
        assert_eq!(judged(Bound::Published(1.0, 2.0), 9.0), Verdict::Shown);
        assert_eq!(judge(Bound::Shown, None), Verdict::NotMeasured);
    }

    #[test]
    fn a_limit_that_falls_says_by_how_much() {
        let mut results = sample();
        results.note(TUNED_BY, "MiB", 256.0);
        results.note("tuning down", "pages/s", 60.0);
        results.note("copying pages", "pages/s", 100.0);
        results.ratios = ratios::of(&results);
        let targets = of(&results);
        let down = found(&targets, "tuning down by 256 MiB ÷ copying pages");
        assert_eq!(down.verdict, Verdict::Met);
        found(&targets, "tuning down by 256 MiB ÷ (protect");
        found(
            &targets,
            "remote fault, p99: tuning down by 256 MiB ÷ before",
        );
    }

    #[test]
    fn of_every_workload_the_worst_is_told() {
        let results = Results {
            ratios: vec![
                ratio("quicksort", &by_least(OUTRAM, 0.5, By::Opt), &[1.2]),
                ratio("bfs", &by_least(OUTRAM, 0.5, By::Opt), &[1.3, 1.9, 1.4]),
                ratio("kmeans", &by_least(OUTRAM, 0.25, By::Opt), &[9.0]),
                ratio("kmeans", &by_lru(0.75), &[1.05]),
            ],
            ..Results::default()
        };
        let targets = of(&results);
        let half = found(&targets, "every workload run, at 0.5");
        assert_eq!(half.found.expect("it is there").median, 1.4);
        assert_eq!(half.verdict, Verdict::Missed);
        assert!(
            half.what.ends_with("worst: bfs (1 of the 2 run within)"),
            "{half:?}"
        );
        let policy = found(
            &targets,
            "misses of the pager's policy ÷ LRU's, every workload run, at 0.75",
        );
        assert_eq!(policy.verdict, Verdict::Met);
        let other = found(&targets, "every workload run, at 0.75");
        assert_eq!(other.verdict, Verdict::NotMeasured);
    }
}
