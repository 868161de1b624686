//! Workloads, on Outram and on the [baselines](super::baseline), in turn.
//!
//! Every run must come to what the same run came to with all of its memory local: another checksum, or
//! other bytes in memory afterwards, end the benchmark.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use outram_wire::tuning::Tuning;

use super::baseline::{self, ALL_LOCAL, LOCAL_TIMES, NBD, PARTLY_LOCAL, SWAPPED};
use super::bill::{Bill, Meter, rise};
use super::phase::{Run, Task};
use super::replay::{self, Replay};
use super::results::Series;
use super::session::{HUGE_PAGES, Session, Settings};
use super::workloads::{COMPUTE_NS, Entry, catalogue};
use crate::small_lab::{Guest, LEAST_HUGE};

/// The memory that is ours.
pub const OUTRAM: &str = "outram";

/// Extra work for each operation that key-value stores are also run with: the 10 µs that a server of them
/// spends on a request over TCP, which the bare hash table leaves out.
pub const STATED_COMPUTE: u32 = 10_000 / COMPUTE_NS;
/// The workload that is run with it unless other work is asked for.
pub const STATED: &str = "kv-4k";

/// A contest under way.
pub struct Contest<'a> {
    session: &'a mut Session,
    entrants: Vec<Entrant>,
    /// What each workload has to come to, by its label.
    truths: BTreeMap<String, Run>,
    /// Replays of each workload's trace, by its name: extra work does not change them.
    replays: BTreeMap<String, Vec<Replay>>,
}

/// A workload with so much extra work.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entrant {
    label: String,
    task: Task,
}

/// What a workload with extra work is called.
pub fn label(name: &str, compute: u32) -> String {
    match compute {
        0 => name.to_owned(),
        _ => format!("{name} with {} µs", us_of(compute)),
    }
}

/// How long extra work takes, in microseconds.
pub fn us_of(compute: u32) -> f64 {
    f64::from(compute) * f64::from(COMPUTE_NS) / 1000.0
}

/// The workloads of a run: each that honours extra work with all of it that is asked for.
fn entrants(settings: &Settings) -> Vec<Entrant> {
    let only = &settings.only;
    let wanted = catalogue()
        .iter()
        .filter(|entry| only.is_empty() || only.iter().any(|name| name == entry.name));
    let of = |entry: &'static Entry| {
        let computes = match (&settings.compute[..], entry.honours_compute) {
            (_, false) => vec![0],
            ([], true) if entry.name == STATED => vec![0, STATED_COMPUTE],
            ([], true) => vec![0],
            (asked, true) => asked.to_vec(),
        };
        computes.into_iter().map(|compute| Entrant {
            label: label(entry.name, compute),
            task: Task {
                name: entry.name.to_owned(),
                bytes: (settings.workload_mib << 20) as usize,
                seed: settings.seed,
                compute,
            },
        })
    };
    wanted.flat_map(of).collect()
}

/// Demands that each guest on huge pages may have so little local memory: before hours of others' runs.
fn demand_room_for_huge_pages(entrants: &[Entrant], local_ratios: &[f64]) -> Result<()> {
    for Entrant { label, task } in entrants {
        for &local in local_ratios {
            let limit = task.limit_bytes(local)?;
            ensure!(
                limit >= LEAST_HUGE,
                "{label} at a local ratio of {local}: {limit} bytes of local memory are less than the least of \
                 a guest on huge pages, {LEAST_HUGE}: use more data, larger ratios, or no --huge-pages"
            );
        }
    }
    Ok(())
}

/// Whether what the settings name is known, and this machine has room for it: to be asked before anything is measured.
pub fn check(settings: &Settings) -> Result<()> {
    for name in &settings.only {
        super::phase::entry(name)?;
    }
    for memory in &settings.baselines {
        let known = PARTLY_LOCAL.contains(&memory.as_str());
        ensure!(
            known,
            "a baseline is one of {PARTLY_LOCAL:?}, not '{memory}'"
        );
    }
    // What swap waits for must need no memory that might have to be swapped out for it: a relay does. The rate is
    // the network's own, and bounds this as it does the others.
    ensure!(
        settings.delay.is_zero() || !settings.baselines.iter().any(|memory| memory == NBD),
        "--delay does not reach swap over {NBD}, which would look better than all that pays it: leave out one of \
         them (--rate bounds both)"
    );
    if settings.huge_pages {
        demand_room_for_huge_pages(&entrants(settings), &settings.local_ratios)?;
    }
    Ok(())
}

impl<'a> Contest<'a> {
    /// Of all workloads, or those that the settings name, which were checked.
    pub fn new(session: &'a mut Session) -> Result<Self> {
        let entrants = entrants(&session.settings);
        for memory in session.settings.baselines.clone() {
            if let Err(error) = baseline::try_out(session, &memory) {
                session.say(&format!("without {memory}: {error:#}"));
                session.results.note_missing(&memory, &error);
            }
        }
        Ok(Self {
            entrants,
            session,
            truths: BTreeMap::new(),
            replays: BTreeMap::new(),
        })
    }

    /// Runs all of them, round by round.
    pub fn run(mut self) -> Result<()> {
        for round in 0..self.session.settings.rounds {
            for entrant in self.entrants.clone() {
                let name = &entrant.label;
                let (number, of) = (round + 1, self.session.settings.rounds);
                self.session.say(&format!("round {number} of {of}: {name}"));
                self.run_one(round, &entrant)
                    .with_context(|| format!("workload '{name}'"))?;
                self.session.keep()?;
            }
        }
        Ok(())
    }

    /// Replays the workload's trace, and measures the floor of its faults in this round.
    fn measure_least(&mut self, round: usize, Entrant { label, task }: &Entrant) -> Result<()> {
        let local_ratios = &self.session.settings.local_ratios;
        if round == 0 {
            if !self.replays.contains_key(&task.name) {
                let replays = replay::record(task, local_ratios)?;
                self.replays.insert(task.name.clone(), replays);
            }
            let replays = self.replays[&task.name].iter().map(|replay| Replay {
                workload: label.clone(),
                ..replay.clone()
            });
            self.session.results.replays.extend(replays);
        }
        let floor_us = self.session.fault_floor()?.us(50.0);
        let name = replay::fault_floor(label);
        self.session.results.note(&name, "µs", floor_us);
        Ok(())
    }

    fn run_one(&mut self, round: usize, entrant: &Entrant) -> Result<()> {
        let task = &entrant.task;
        let local_ratios = self.session.settings.local_ratios.clone();
        if local_ratios.iter().any(|&local| local < 1.0) {
            self.measure_least(round, entrant)?;
        }
        let mib = task.memory_mib()?;
        for memory in ALL_LOCAL {
            self.run_baseline(memory, entrant, mib << 20, 1.0)?;
        }
        for &local in &local_ratios {
            let mut ours = vec![(OUTRAM.to_owned(), Tuning::default())];
            if local < 1.0 {
                let others = self.session.settings.tunings.iter();
                ours.extend(others.map(|(name, tuning)| (format!("{OUTRAM} {name}"), *tuning)));
            }
            for (memory, tuning) in ours {
                let run = self
                    .small_pages(task, local, tuning)
                    .and_then(|guest| self.run_outram(task, local, guest));
                let run = run.with_context(|| format!("{memory} at a local ratio of {local}"))?;
                self.note(&memory, entrant, mib << 20, local, run)?;
            }
            if self.session.settings.huge_pages {
                self.run_on_huge_pages(entrant, local)?;
            }
            if local < 1.0 {
                for memory in self.session.settings.baselines.clone() {
                    self.run_baseline(&memory, entrant, mib << 20, local)?;
                }
            }
        }
        Ok(())
    }

    /// What this machine's swap cannot do is noted as missing; but what it does must be right.
    fn run_baseline(
        &mut self,
        memory: &str,
        entrant: &Entrant,
        bytes: u64,
        local: f64,
    ) -> Result<()> {
        let what = format!("{memory} at {local}: {}", entrant.label);
        let results = &self.session.results;
        if results.is_missing(memory) || results.is_missing(&what) {
            return Ok(());
        }
        match baseline::run(self.session, memory, &entrant.task, bytes, local) {
            Ok(run) => self.note(memory, entrant, bytes, local, run),
            Err(error) if SWAPPED.contains(&memory) => {
                self.session.say(&format!("without {what}: {error:#}"));
                self.session.results.note_missing(&what, &error);
                Ok(())
            }
            Err(error) => Err(error.context(format!("memory '{memory}'"))),
        }
    }

    fn small_pages(&self, task: &Task, local: f64, tuning: Tuning) -> Result<Guest> {
        let (mib, limit) = (task.memory_mib()?, task.limit_bytes(local)?);
        let guest = self.session.guest(mib, 1, limit)?;
        guest.set_tuning(tuning)?;
        Ok(guest)
    }

    /// Where the machine has no pool of them, that is noted.
    fn run_on_huge_pages(&mut self, entrant: &Entrant, local: f64) -> Result<()> {
        let task = &entrant.task;
        let (mib, limit) = (task.memory_mib()?, task.limit_bytes(local)?);
        let Some(_pool) = self.session.huge_pages(mib)? else {
            return Ok(());
        };
        let guest = self.session.huge_guest(mib, limit)?;
        let run = self.run_outram(task, local, guest);
        let memory = format!("{OUTRAM} {HUGE_PAGES}");
        let run = run.with_context(|| format!("{memory} at a local ratio of {local}"))?;
        self.note(&memory, entrant, mib << 20, local, run)
    }

    fn run_outram(&self, task: &Task, local: f64, mut guest: Guest) -> Result<Run> {
        let session = &*self.session;
        let patience = session.settings.patience;
        let work = |guest: &mut Guest, phase: &str| -> Result<serde_json::Value> {
            let answer = task.command(&mut guest.vmm, phase, patience);
            answer.map_err(|error| error.context(guest.log()))
        };
        let times = if local < 1.0 { 1 } else { LOCAL_TIMES };
        let meters = [Meter::of(&guest)];
        let bill = || Bill::now(session.server.pid(), &meters);
        let run = baseline::median(times, || {
            work(&mut guest, "prepare")?;
            // Inputs that are still on their way out would be measured with the run.
            guest.settle()?;
            let before = bill()?;
            let mut run = work(&mut guest, "run")?;
            // Before anything is waited for: pages that leave later are not of its time, and to be asked how far
            // that is costs the helper.
            let after = bill()?.only(&before, &run);
            run["counters"] = serde_json::to_value(rise(&before.counters[0], &after.counters[0])?)?;
            run["costs"] = serde_json::to_value(after.paging_costs(&before, guest.page_size()))?;
            run["remote_faults"] = serde_json::to_value(guest.status()?.latency.get("remote"))?;
            run["digest"] = work(&mut guest, "digest")?["digest"].take();
            Ok(run)
        })?;
        guest.end(&[&session.server])?;
        Ok(run)
    }

    fn note(
        &mut self,
        memory: &str,
        entrant: &Entrant,
        bytes: u64,
        local_ratio: f64,
        run: Run,
    ) -> Result<()> {
        let label = entrant.label.clone();
        let truth = self.truths.entry(label).or_insert_with(|| run.clone());
        truth
            .demand_same(&run)
            .with_context(|| format!("on '{memory}' at a local ratio of {local_ratio}"))?;
        self.session.results.note_run(Series {
            workload: entrant.label.clone(),
            memory: memory.to_owned(),
            local_ratio,
            bytes,
            compute: entrant.task.compute,
            runs: vec![run],
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_longer_wire_is_refused_where_it_would_not_be_longer_for_all() {
        let settings = |delay, baselines: &[&str]| Settings {
            delay: Duration::from_micros(delay),
            baselines: baselines.iter().map(|&name| name.to_owned()).collect(),
            rate: Some("1gbit".to_owned()),
            ..Settings::default()
        };
        check(&settings(0, &["plain", "nbd"])).expect("a rate is the network's");
        check(&settings(100, &["plain", "zram"])).expect("no wire but those that are longer");
        let error = check(&settings(100, &["plain", "nbd"])).expect_err("it would be the shorter");
        assert!(error.to_string().contains("--delay"), "{error}");
    }

    fn labels(only: &[&str], compute: &[u32]) -> Vec<String> {
        let settings = Settings {
            only: only.iter().map(|&name| name.to_owned()).collect(),
            compute: compute.to_vec(),
            ..Settings::default()
        };
        let entrants = entrants(&settings).into_iter();
        entrants.map(|entrant| entrant.label).collect()
    }

    #[test]
    fn extra_work_is_swept_where_it_is_honoured() {
        let all = labels(&[], &[]);
        assert_eq!(all.len(), catalogue().len() + 1);
        assert!(all.contains(&"kv-4k with 10 µs".to_owned()), "{all:?}");
        assert_eq!(labels(&["quicksort"], &[0, 250]), ["quicksort"]);
        assert_eq!(
            labels(&["random-read"], &[0, 25, 250]),
            [
                "random-read",
                "random-read with 0.1 µs",
                "random-read with 1 µs"
            ]
        );
    }
}
