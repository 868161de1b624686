//! The engine in a simulated world: a kernel, a guest, memory servers and an operator, all of
//! which may do anything at any moment that they may do in reality. The engine's process dies, again
//! and again, and is recovered from what outlives it (`crashes.rs`). One seed determines all.
//!
//! After each step the design's invariants are checked over the whole world (`checks.rs`). That
//! each check catches something is tested, too: the world is broken in one way after the other
//! (`sabotage.rs`), and the check has to find it.
//!
//! `OUTRAM_SIM_SEED=7 OUTRAM_SIM_STEPS=1000000 cargo test -p outram-backend --test simulation`
//! runs one seed for longer; `OUTRAM_SIM_SECONDS=3600` seeds that nobody has run before, for an hour.

#[path = "simulation/checks.rs"]
mod checks;
#[path = "simulation/contents.rs"]
mod contents;
#[path = "simulation/crashes.rs"]
mod crashes;
#[path = "simulation/guest.rs"]
mod guest;
#[path = "simulation/mishaps.rs"]
mod mishaps;
#[path = "simulation/plugging.rs"]
mod plugging;
#[path = "simulation/ports.rs"]
mod ports;
#[path = "simulation/random.rs"]
mod random;
#[path = "simulation/sabotage.rs"]
mod sabotage;
#[path = "simulation/servers.rs"]
mod servers;
#[path = "simulation/steps.rs"]
mod steps;
#[path = "simulation/world.rs"]
mod world;

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use sabotage::Sabotage;
use steps::Simulation;
use world::{Memory, Violation};

/// Steps of the default run, over all seeds, of each world: more than a million together.
const fn steps_of(memory: Memory) -> u64 {
    match memory {
        Memory::Tmpfs => 1_600_000,
        Memory::TmpfsTwoCopies => 800_000,
        Memory::Hugetlbfs => 400_000,
    }
}

const SEEDS: u64 = 8;
/// Steps of each seed of a soak.
const SOAK_STEPS: u64 = 200_000;
/// Steps between two times at which everything is let come to rest.
const STEPS_UNTIL_QUIET: u64 = 1_500;

fn from_environment(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    match value.parse() {
        Ok(number) => Some(number),
        Err(error) => panic!("{name}={value} is not a number: {error}"),
    }
}

/// Runs a world; where it fails, says at which step.
fn run(
    seed: u64,
    steps: u64,
    memory: Memory,
    sabotage: Option<Sabotage>,
) -> Result<Simulation, (u64, Violation)> {
    let mut simulation = Simulation::new(seed, memory, sabotage);
    for step in 1..=steps {
        simulation.step().map_err(|violation| (step, violation))?;
        if step % STEPS_UNTIL_QUIET == 0 {
            simulation.settle().map_err(|violation| (step, violation))?;
        }
    }
    Ok(simulation)
}

/// Prints what to run again, also where the engine panics.
struct Announce(u64, u64);

impl Drop for Announce {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "run it again with OUTRAM_SIM_SEED={} OUTRAM_SIM_STEPS={}",
                self.0, self.1
            );
        }
    }
}

#[test]
fn invariants_hold_after_each_step() {
    invariants_hold_in(Memory::Tmpfs);
}

/// Each page on two servers, one of which may lose all that it has: nothing is lost by that.
#[test]
fn invariants_hold_after_each_step_with_two_copies() {
    invariants_hold_in(Memory::TmpfsTwoCopies);
}

/// Discards that no event tells of, and a pool of pages that others draw from.
#[test]
fn invariants_hold_after_each_step_on_hugetlbfs() {
    invariants_hold_in(Memory::Hugetlbfs);
}

fn invariants_hold_in(memory: Memory) {
    if let Some(seconds) = from_environment("OUTRAM_SIM_SECONDS") {
        return soak(memory, Duration::from_secs(seconds));
    }
    let steps = from_environment("OUTRAM_SIM_STEPS").unwrap_or(steps_of(memory));
    if let Some(seed) = from_environment("OUTRAM_SIM_SEED") {
        run_well(seed, steps, memory);
        return;
    }
    let mut died_at = BTreeSet::new();
    for seed in 0..SEEDS {
        died_at.append(&mut run_well(seed, steps / SEEDS, memory).deaths.points);
    }
    let missing = crashes::POINTS.iter();
    let missing = missing.filter(|point| !died_at.contains(point));
    let missing: Vec<_> = missing.map(|point| point.name()).collect();
    let is_complete = missing.is_empty() || memory != Memory::Tmpfs || steps < steps_of(memory);
    assert!(is_complete, "never died at {missing:?}");
}

/// Runs one seed after the other, none of them known before, for as long as that.
fn soak(memory: Memory, length: Duration) {
    let start = Instant::now();
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    let first = since_epoch.map_or(0, |time| time.as_micros() as u64);
    let mut seeds = 0;
    while start.elapsed() < length {
        run_well(first + seeds, SOAK_STEPS, memory);
        seeds += 1;
    }
    println!("{memory:?}: {seeds} seeds from {first}, {SOAK_STEPS} steps each: all is well");
}

/// Runs a seed, which has to go well.
fn run_well(seed: u64, steps: u64, memory: Memory) -> Simulation {
    let _announce = Announce(seed, steps);
    match run(seed, steps, memory, None) {
        Ok(mut simulation) => {
            simulation.assert_lively(steps);
            simulation
        }
        Err((step, Violation { check, what })) => panic!("step {step}: {check:?}: {what}"),
    }
}

#[test]
fn each_check_finds_what_it_is_for() {
    for (sabotage, checks) in Sabotage::ALL {
        let found = (0..8).find_map(|seed| run(seed, 30_000, Memory::Tmpfs, Some(*sabotage)).err());
        match found {
            Some((_, violation)) => assert!(
                checks.contains(&violation.check),
                "{sabotage:?} was found by the wrong check: {violation:?}"
            ),
            None => panic!("{sabotage:?} was not found"),
        }
    }
}
