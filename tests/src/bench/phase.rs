//! One workload on one memory: prepared, run, and its memory summed up.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use outram_wire::control::Latency;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::usage::ThreadUsage;
use super::workloads::{Entry, Parameters, Workload, catalogue};
use crate::small_lab::LEAST;
use crate::small_vmm::client::SmallVmm;
use crate::split_mix::GOLDEN;

/// Memory is made of such steps, so that the kernel's huge pages would fit.
const STEP_MIB: u64 = 2;

/// Which workload, and how large.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// Its name in the catalogue.
    pub name: String,
    /// Bytes of its data.
    pub bytes: usize,
    /// Determines its data.
    pub seed: u64,
    /// Extra work for each operation.
    #[serde(default)]
    pub compute: u32,
}

impl Task {
    /// MiB of memory that it is given.
    pub fn memory_mib(&self) -> Result<u64> {
        let footprint = Subject::new(self)?.footprint() as u64;
        Ok(footprint.div_ceil(1 << 20).next_multiple_of(STEP_MIB))
    }

    /// The limit of a guest that has so much of that in its local memory; fails where it is too little.
    pub fn limit_bytes(&self, local_ratio: f64) -> Result<u64> {
        let limit = ((self.memory_mib()? << 20) as f64 * local_ratio) as u64;
        ensure!(
            limit >= LEAST,
            "{limit} bytes of local memory are less than the least, {LEAST}: use more data"
        );
        Ok(limit)
    }

    /// Has the first vCPU of a VMM, or a [runner](super::runner), do a phase of it: `prepare`, `run` or
    /// `digest`.
    pub fn command(&self, vmm: &mut SmallVmm, phase: &str, patience: Duration) -> Result<Value> {
        let asked = vmm.send(json!({"do": "workload", "task": self, "phase": phase}))?;
        vmm.wait(asked, patience)
    }
}

/// What a run came to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// How long it took.
    pub seconds: f64,
    /// Time of its thread on a processor.
    pub cpu_seconds: f64,
    /// Operations, in the workload's own unit.
    pub operations: u64,
    /// The workload's own checksum.
    pub checksum: u64,
    /// Of all of its memory after the run.
    pub digest: u64,
    /// Faults of its thread that the kernel read a page for.
    pub major_faults: u64,
    /// Its other faults: userfaultfd's are among these.
    pub minor_faults: u64,
    /// What the backend counted meanwhile, by its counters' names; nothing where there is none.
    #[serde(default)]
    pub counters: BTreeMap<String, u64>,
    /// What paging cost meanwhile, by the names of a [bill](super::bill); nothing where none was paged.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub costs: BTreeMap<String, f64>,
    /// Latency of the guest's remote faults so far, where that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_faults: Option<Latency>,
}

impl Run {
    /// Fails where another run came to something else than this, whose memory was all local.
    pub fn demand_same(&self, other: &Self) -> Result<()> {
        let of = |run: &Self| (run.operations, run.checksum, run.digest);
        ensure!(
            of(self) == of(other),
            "WRONG RESULT: operations, checksum and memory afterwards are {:x?}, but {:x?} where all \
             memory is local",
            of(other),
            of(self)
        );
        Ok(())
    }
}

/// A workload that is made, and perhaps prepared.
pub struct Subject {
    task: Task,
    workload: Box<dyn Workload>,
    is_prepared: bool,
}

/// The workload of a name.
pub fn entry(name: &str) -> Result<&'static Entry> {
    let found = catalogue().iter().find(|entry| entry.name == name);
    found.with_context(|| {
        let names: Vec<&str> = catalogue().iter().map(|entry| entry.name).collect();
        format!("there is no workload '{name}', but {}", names.join(", "))
    })
}

impl Subject {
    /// Makes a workload.
    pub fn new(task: &Task) -> Result<Self> {
        let parameters = Parameters {
            bytes: task.bytes,
            seed: task.seed,
            compute: task.compute,
        };
        Ok(Self {
            task: task.clone(),
            workload: (entry(&task.name)?.make)(&parameters),
            is_prepared: false,
        })
    }

    /// Whether it is this one.
    pub fn is(&self, task: &Task) -> bool {
        self.task == *task
    }

    /// Bytes of memory that it uses.
    pub fn footprint(&self) -> usize {
        self.workload.footprint()
    }

    fn demand_room(&self, memory: &[u64]) -> Result<()> {
        let (has, needs) = (memory.len() * 8, self.footprint());
        ensure!(
            needs <= has,
            "'{}' needs {needs} bytes of memory, which has {has}",
            self.task.name
        );
        Ok(())
    }

    /// Writes its inputs.
    pub fn prepare(&mut self, memory: &mut [u64]) -> Result<()> {
        self.demand_room(memory)?;
        self.workload.prepare(memory);
        self.is_prepared = true;
        Ok(())
    }

    /// Runs it, measured. [`Subject::digest`] is still to be added.
    pub fn run(&mut self, memory: &mut [u64]) -> Result<Run> {
        self.demand_room(memory)?;
        ensure!(self.is_prepared, "'{}' is not prepared", self.task.name);
        self.is_prepared = false;
        let before = ThreadUsage::now()?;
        let started = Instant::now();
        let outcome = self.workload.run(memory);
        let seconds = started.elapsed().as_secs_f64();
        let used = ThreadUsage::now()?.since(&before);
        Ok(Run {
            seconds,
            cpu_seconds: used.cpu.as_secs_f64(),
            operations: outcome.operations,
            checksum: outcome.checksum,
            digest: 0,
            major_faults: used.major_faults,
            minor_faults: used.minor_faults,
            ..Run::default()
        })
    }

    /// Sums its memory up, which takes a pass over all of it.
    pub fn digest(&self, memory: &[u64]) -> Result<u64> {
        self.demand_room(memory)?;
        Ok(digest(&memory[..self.footprint() / 8]))
    }
}

/// Follows from every bit of the memory and its place.
fn digest(memory: &[u64]) -> u64 {
    memory.iter().fold(memory.len() as u64, |digest, word| {
        (digest.rotate_left(5) ^ word).wrapping_mul(GOLDEN)
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::bench) fn task(name: &str) -> Task {
        Task {
            name: name.to_owned(),
            bytes: 1 << 20,
            seed: 3,
            compute: 0,
        }
    }

    #[test]
    fn two_runs_come_to_the_same() {
        let mut subject = Subject::new(&task("sequential-write")).expect("a workload");
        let mut memory = vec![0; subject.footprint() / 8];
        assert!(subject.run(&mut memory).is_err(), "it is not prepared");
        let mut run = || {
            subject.prepare(&mut memory).expect("room");
            let run = subject.run(&mut memory).expect("prepared");
            (run.checksum, subject.digest(&memory).expect("room"))
        };
        assert_eq!(run(), run());
        assert!(subject.prepare(&mut memory[1..]).is_err());
        assert!(Subject::new(&task("mine-bitcoin")).is_err());
    }

    #[test]
    fn any_change_of_the_memory_changes_its_digest() {
        let memory: Vec<u64> = (0..1000).collect();
        let mut other = memory.clone();
        other[500] ^= 1 << 63;
        assert_ne!(digest(&memory), digest(&other));
        other[500] = memory[501];
        other[501] = memory[500];
        assert_ne!(digest(&memory), digest(&other));
    }

    #[test]
    fn another_result_ends_the_benchmark() {
        let truth = Run {
            operations: 5,
            checksum: 6,
            digest: 7,
            seconds: 1.0,
            ..Run::default()
        };
        let slower = Run {
            seconds: 9.0,
            major_faults: 3,
            ..truth.clone()
        };
        truth.demand_same(&slower).expect("slower is not wrong");
        for wrong in [
            Run {
                operations: 4,
                ..truth.clone()
            },
            Run {
                checksum: 4,
                ..truth.clone()
            },
            Run {
                digest: 4,
                ..truth.clone()
            },
        ] {
            let error = truth.demand_same(&wrong).expect_err("it is wrong");
            assert!(error.to_string().contains("WRONG RESULT"), "{error}");
        }
    }
}
