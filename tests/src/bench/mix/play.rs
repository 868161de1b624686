//! Guests that work at the same time.
//!
//! They start their workloads together. One that has ended its own goes on with it until the slowest has
//! come to its end, so that everybody has all neighbours at work in all of what is measured.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use outram_wire::control::Status;
use serde_json::Value;

use super::super::baseline::middle;
use super::super::bill::{Bill, Meter, rise};
use super::super::phase::{Run, Task};
use crate::small_lab::Guest;
use crate::small_vmm::client::SmallVmm;

/// What runs a workload.
pub enum Place {
    /// A process with all memory local.
    Local(SmallVmm),
    /// A guest of Outram.
    Paged(Guest),
}

/// A guest at work.
pub struct Player {
    /// Where it works.
    pub place: Place,
    /// At what.
    pub task: Task,
    /// What each run has to come to; what the first came to, where there is none.
    pub truth: Option<Run>,
    /// Runs that it has begun.
    pub begun: u64,
}

/// How it is played.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Runs of each guest that are measured, of which that of median length is taken.
    pub times: usize,
    /// Longest time for anything that a guest is told to do.
    pub patience: Duration,
    /// Process of the memory server.
    pub server: u32,
}

/// What was measured.
pub struct Played {
    /// Of each player, the run that counts.
    pub runs: Vec<Run>,
    /// Of each player, how many it began.
    pub begun: Vec<u64>,
    /// From when all started until the last had done what is measured.
    pub bills: (Bill, Bill),
}

/// What the players' threads share.
struct Stage {
    start: Barrier,
    is_over: AtomicBool,
}

/// Has all of them work at the same time.
pub fn together(players: &mut [Player], rules: Rules) -> Result<Played> {
    for player in &mut *players {
        player.prepare(rules)?;
    }
    let meters: Vec<Meter> = players
        .iter()
        .filter_map(|player| match &player.place {
            Place::Paged(guest) => Some(Meter::of(guest)),
            Place::Local(_) => None,
        })
        .collect();
    let stage = Stage {
        start: Barrier::new(players.len()),
        is_over: AtomicBool::new(false),
    };
    let before = Bill::now(rules.server, &meters)?;
    let (runs, after) = std::thread::scope(|scope| {
        let (sender, done) = channel();
        let threads: Vec<_> = players
            .iter_mut()
            .map(|player| {
                let (stage, sender) = (&stage, sender.clone());
                scope.spawn(move || player.play(rules, stage, sender))
            })
            .collect();
        drop(sender);
        // Ends once every player has told, or failed.
        done.iter().for_each(drop);
        let after = Bill::now(rules.server, &meters);
        stage.is_over.store(true, Ordering::Relaxed);
        let ended = threads.into_iter().map(|thread| {
            let run = thread.join();
            run.unwrap_or_else(|_| Err(anyhow!("a guest's thread panicked")))
        });
        (ended.collect::<Vec<_>>(), after)
    });
    Ok(Played {
        runs: runs.into_iter().collect::<Result<_>>()?,
        begun: players.iter().map(|player| player.begun).collect(),
        bills: (before, after?),
    })
}

impl Player {
    /// The run that counts; `done` is told when it is over.
    fn play(&mut self, rules: Rules, stage: &Stage, done: Sender<()>) -> Result<Run> {
        // Nothing that may fail comes before: the others would wait for ever.
        stage.start.wait();
        let mut done = Some(done);
        let mut runs = Vec::new();
        loop {
            let mut run = self.run(rules)?;
            if runs.len() + 1 == rules.times
                && let Some(done) = done.take()
            {
                // Nobody listens after a failure.
                let _ = done.send(());
            }
            let digest = self.work("digest", rules)?["digest"].as_u64();
            run.digest = digest.context("a number")?;
            let truth = self.truth.get_or_insert_with(|| run.clone());
            truth
                .demand_same(&run)
                .with_context(|| format!("workload '{}'", self.task.name))?;
            if runs.len() < rules.times {
                runs.push(run);
            }
            if stage.is_over.load(Ordering::Relaxed) {
                return middle(runs);
            }
            self.work("prepare", rules)?;
        }
    }

    fn prepare(&mut self, rules: Rules) -> Result<()> {
        self.work("prepare", rules)?;
        if let Place::Paged(guest) = &self.place {
            // Inputs that are still on their way out would be measured with the run.
            guest.settle()?;
        }
        Ok(())
    }

    /// A run, with what the backend counted meanwhile.
    fn run(&mut self, rules: Rules) -> Result<Run> {
        self.begun += 1;
        let before = self.status()?;
        let mut run: Run = serde_json::from_value(self.work("run", rules)?)?;
        if let (Some(before), Some(mut after)) = (before, self.status()?) {
            run.counters = rise(&before.counters, &after.counters)?;
            run.remote_faults = after.latency.remove("remote");
        }
        Ok(run)
    }

    fn status(&self) -> Result<Option<Status>> {
        match &self.place {
            Place::Local(_) => Ok(None),
            Place::Paged(guest) => guest.status().map(Some),
        }
    }

    fn work(&mut self, phase: &str, rules: Rules) -> Result<Value> {
        match &mut self.place {
            Place::Local(runner) => self.task.command(runner, phase, rules.patience),
            Place::Paged(guest) => {
                let answer = self.task.command(&mut guest.vmm, phase, rules.patience);
                answer.map_err(|error| error.context(guest.log()))
            }
        }
    }
}
