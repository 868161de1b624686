//! Workloads, on Outram and on the [baselines](super::baseline), in turn.
//!
//! Every run must come to what the same run came to with all of its memory local: another checksum, or
//! other bytes in memory afterwards, end the benchmark.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use outram_wire::tuning::Tuning;

use super::baseline::{self, ALL_LOCAL, LOCAL_TIMES, PARTLY_LOCAL, SWAPPED};
use super::bill::rise;
use super::phase::{Run, Task};
use super::results::{Missing, Series};
use super::session::Session;
use super::workloads::catalogue;
use crate::small_lab::Guest;

/// The memory that is ours.
pub const OUTRAM: &str = "outram";

/// A contest under way.
pub struct Contest<'a> {
    session: &'a mut Session,
    names: Vec<&'static str>,
    /// What each workload has to come to.
    truths: BTreeMap<&'static str, Run>,
}

impl<'a> Contest<'a> {
    /// Of all workloads, or those that the settings name.
    pub fn new(session: &'a mut Session) -> Result<Self> {
        let only = &session.settings.only;
        for name in only {
            super::phase::entry(name)?;
        }
        for memory in &session.settings.baselines {
            let known = PARTLY_LOCAL.contains(&memory.as_str());
            ensure!(
                known,
                "a baseline is one of {PARTLY_LOCAL:?}, not '{memory}'"
            );
        }
        for memory in session.settings.baselines.clone() {
            if let Err(error) = baseline::try_out(session, &memory) {
                session.say(&format!("without {memory}: {error:#}"));
                session.results.note_missing(&memory, &error);
            }
        }
        let only = &session.settings.only;
        let is_wanted = |name: &str| only.is_empty() || only.iter().any(|wanted| wanted == name);
        let names = catalogue().iter().map(|entry| entry.name);
        Ok(Self {
            names: names.filter(|name| is_wanted(name)).collect(),
            session,
            truths: BTreeMap::new(),
        })
    }

    /// Runs all of them, round by round.
    pub fn run(mut self) -> Result<()> {
        for round in 0..self.session.settings.rounds {
            for name in self.names.clone() {
                self.run_one(round, name)
                    .with_context(|| format!("workload '{name}'"))?;
            }
        }
        Ok(())
    }

    fn run_one(&mut self, round: usize, name: &'static str) -> Result<()> {
        let settings = &self.session.settings;
        let task = Task {
            name: name.to_owned(),
            bytes: (settings.workload_mib << 20) as usize,
            seed: settings.seed,
            compute: settings.compute,
        };
        let local_ratios = settings.local_ratios.clone();
        let rounds = settings.rounds;
        self.session
            .say(&format!("round {} of {rounds}: {name}", round + 1));
        let mib = task.memory_mib()?;
        for memory in ALL_LOCAL {
            self.run_baseline(memory, &task, mib << 20, 1.0, name)?;
        }
        for &local in &local_ratios {
            let mut ours = vec![(OUTRAM.to_owned(), Tuning::default())];
            if local < 1.0 {
                let others = self.session.settings.tunings.iter();
                ours.extend(others.map(|(name, tuning)| (format!("{OUTRAM} {name}"), *tuning)));
            }
            for (memory, tuning) in ours {
                let run = self.run_outram(&task, local, tuning);
                let run = run.with_context(|| format!("{memory} at a local ratio of {local}"))?;
                self.note(&memory, name, mib << 20, local, run)?;
            }
            if local < 1.0 {
                for memory in self.session.settings.baselines.clone() {
                    self.run_baseline(&memory, &task, mib << 20, local, name)?;
                }
            }
        }
        Ok(())
    }

    /// What this machine's swap cannot do is noted as missing; but what it does must be right.
    fn run_baseline(
        &mut self,
        memory: &str,
        task: &Task,
        bytes: u64,
        local: f64,
        name: &'static str,
    ) -> Result<()> {
        let what = format!("{memory} at {local}: {name}");
        let is_missing = |known: &Missing| known.what == memory || known.what == what;
        if self.session.results.missing.iter().any(is_missing) {
            return Ok(());
        }
        match baseline::run(self.session, memory, task, bytes, local) {
            Ok(run) => self.note(memory, name, bytes, local, run),
            Err(error) if SWAPPED.contains(&memory) => {
                self.session.say(&format!("without {what}: {error:#}"));
                self.session.results.note_missing(&what, &error);
                Ok(())
            }
            Err(error) => Err(error.context(format!("memory '{memory}'"))),
        }
    }

    fn run_outram(&self, task: &Task, local: f64, tuning: Tuning) -> Result<Run> {
        let session = &*self.session;
        let mut guest = session.guest(task.memory_mib()?, 1, task.limit_bytes(local)?)?;
        guest.set_tuning(tuning)?;
        let patience = session.settings.patience;
        let work = |guest: &mut Guest, phase: &str| -> Result<serde_json::Value> {
            let answer = task.command(&mut guest.vmm, phase, patience);
            let answer = answer.map_err(|error| error.context(guest.log()))?;
            // Inputs that are still on their way out would be measured with the run.
            guest.settle()?;
            Ok(answer)
        };
        let times = if local < 1.0 { 1 } else { LOCAL_TIMES };
        let mut counters = BTreeMap::new();
        let mut run = baseline::median(times, || {
            work(&mut guest, "prepare")?;
            let before = guest.status()?.counters;
            let mut run = work(&mut guest, "run")?;
            counters = rise(&before, &guest.status()?.counters)?;
            run["digest"] = work(&mut guest, "digest")?["digest"].take();
            Ok(run)
        })?;
        run.counters = counters;
        guest.end(&[&session.server])?;
        Ok(run)
    }

    fn note(
        &mut self,
        memory: &str,
        name: &'static str,
        bytes: u64,
        local_ratio: f64,
        run: Run,
    ) -> Result<()> {
        let truth = self.truths.entry(name).or_insert_with(|| run.clone());
        truth
            .demand_same(&run)
            .with_context(|| format!("on '{memory}' at a local ratio of {local_ratio}"))?;
        self.session.results.note_run(Series {
            workload: name.to_owned(),
            memory: memory.to_owned(),
            local_ratio,
            bytes,
            runs: vec![run],
        });
        Ok(())
    }
}
