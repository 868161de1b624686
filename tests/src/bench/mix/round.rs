//! A mix in all its situations, round by round.

use std::time::Instant;

use anyhow::{Context, Result};

use super::super::baseline::{self, LOCAL_TIMES};
use super::super::phase::{Run, Task};
use super::super::results::{Results, note};
use super::super::session::Session;
use super::Mix;
use super::play::{Place, Played, Player, Rules, together};
use super::results::{GuestResults, MixResults};

/// What all mixes have in common.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Bytes of each workload's data.
    pub bytes: usize,
    /// Local ratio of guests that have none of their own.
    pub local_ratio: f64,
    /// Extra work for each operation.
    pub compute: u32,
}

/// A mix that is being measured.
struct Measured<'a> {
    session: &'a Session,
    tasks: Vec<Task>,
    truths: Vec<Option<Run>>,
    results: MixResults,
}

/// Measures all mixes.
pub fn measure(mut session: Session, mixes: &[Mix], terms: Terms) -> Result<Results> {
    let began = Instant::now();
    let mut measured: Vec<Measured<'_>> = mixes
        .iter()
        .map(|mix| Measured::new(&session, mix, terms))
        .collect::<Result<_>>()?;
    let rounds = session.settings.rounds;
    for round in 0..rounds {
        for mix in &mut measured {
            let name = mix.results.name.clone();
            session.say(&format!("round {} of {rounds}: {name}", round + 1));
            mix.run().with_context(|| format!("mix '{name}'"))?;
        }
    }
    let mixes: Vec<MixResults> = measured.into_iter().map(|mix| mix.results).collect();
    let results = &mut session.results;
    results.ratios = mixes.iter().flat_map(MixResults::ratios).collect();
    results.mixes = mixes;
    results.seconds = began.elapsed().as_secs_f64();
    Ok(session.results)
}

impl<'a> Measured<'a> {
    fn new(session: &'a Session, mix: &Mix, terms: Terms) -> Result<Self> {
        let (mut tasks, mut guests) = (Vec::new(), Vec::new());
        for (seed, member) in (session.settings.seed..).zip(&mix.0) {
            let task = Task {
                name: member.workload.clone(),
                bytes: terms.bytes,
                seed,
                compute: terms.compute,
            };
            let local_ratio = member.local_ratio.unwrap_or(terms.local_ratio);
            // What cannot be run is to be known before anything is.
            task.limit_bytes(local_ratio)
                .with_context(|| format!("workload '{}'", task.name))?;
            guests.push(GuestResults {
                workload: task.name.clone(),
                local_ratio,
                bytes: task.memory_mib()? << 20,
                ..GuestResults::default()
            });
            tasks.push(task);
        }
        Ok(Self {
            session,
            truths: vec![None; tasks.len()],
            tasks,
            results: MixResults {
                name: mix.to_string(),
                guests,
                ..MixResults::default()
            },
        })
    }

    /// A round. What is local comes first: it says what every later run has to come to.
    fn run(&mut self) -> Result<()> {
        let all: Vec<usize> = (0..self.tasks.len()).collect();
        for &index in &all {
            let run = self.local(&[index])?.runs.swap_remove(0);
            self.truths[index].get_or_insert_with(|| run.clone());
            self.results.guests[index].alone_local.push(run);
        }
        for (guest, run) in all.iter().zip(self.local(&all)?.runs) {
            self.results.guests[*guest].mixed_local.push(run);
        }
        for &index in &all {
            let run = self.paged(&[index])?.runs.swap_remove(0);
            self.results.guests[index].alone.push(run);
        }
        let played = self.paged(&all)?;
        for ((guest, run), begun) in all.iter().zip(played.runs).zip(played.begun) {
            self.results.guests[*guest].mixed.push(run);
            self.results.guests[*guest].mixed_runs.push(begun);
        }
        let (before, after) = played.bills;
        let fetched = after.rise(&before, |counters| {
            counters.faults_remote + counters.fetched_ahead_pages
        });
        let evicted = after.rise(&before, |counters| counters.evicted_pages);
        for (name, unit, value) in after.costs(&before, fetched + evicted) {
            note(&mut self.results.figures, &name, unit, value);
        }
        Ok(())
    }

    /// Some of the guests at the same time, with all memory local.
    fn local(&self, guests: &[usize]) -> Result<Played> {
        let mut players = self.players(guests, |task, _| {
            let runner = baseline::start(self.session, "memfd", task, &[])?;
            Ok(Place::Local(runner))
        })?;
        let played = together(&mut players, self.rules(LOCAL_TIMES))?;
        for player in players {
            if let Place::Local(runner) = player.place {
                runner.exit()?;
            }
        }
        Ok(played)
    }

    /// Some of the guests at the same time, each at its local ratio.
    fn paged(&self, guests: &[usize]) -> Result<Played> {
        let mut players = self.players(guests, |task, local_ratio| {
            let limit = task.limit_bytes(local_ratio)?;
            let guest = self.session.guest(task.memory_mib()?, 1, limit)?;
            Ok(Place::Paged(guest))
        })?;
        let played = together(&mut players, self.rules(1))?;
        let server = &self.session.server;
        while let Some(player) = players.pop() {
            if let Place::Paged(guest) = player.place {
                // It has its slabs back once the last guest is gone.
                match players.is_empty() {
                    true => guest.end(&[server])?,
                    false => guest.end(&[])?,
                }
            }
        }
        Ok(played)
    }

    fn players(
        &self,
        guests: &[usize],
        place: impl Fn(&Task, f64) -> Result<Place>,
    ) -> Result<Vec<Player>> {
        guests
            .iter()
            .map(|&index| {
                let task = self.tasks[index].clone();
                Ok(Player {
                    place: place(&task, self.results.guests[index].local_ratio)?,
                    task,
                    truth: self.truths[index].clone(),
                    begun: 0,
                })
            })
            .collect()
    }

    fn rules(&self, times: usize) -> Rules {
        Rules {
            times,
            patience: self.session.settings.patience,
            server: self.session.server.pid(),
        }
    }
}
