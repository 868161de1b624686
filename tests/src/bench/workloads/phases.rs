//! A working set that moves: what was hot is cold all at once, and what was cold is hot.
//!
//! It moves after so many operations, not after so many seconds: with as many, every run has the same uses in the same
//! order, on whatever memory, and comes to the same checksum. How long that is depends on how fast they are.

use super::numbers::{Scatter, below, compute, fold, numbered};
use super::{Outcome, Parameters, Workload};

/// How often the working set is another one. Each covers a quarter of the memory; together they
/// cover all of it twice or more.
const PHASES: usize = 16;

/// The working set is one of this many parts of the memory.
const PARTS: usize = 4;

/// Words of memory for each operation: as many operations as random reads have, an eighth of a
/// million in a working set of 64 MiB, so that each of its pages is used eight times a phase.
const WORDS_PER_OPERATION: usize = 16;

/// One operation in so many writes.
const READS_PER_WRITE: u64 = 4;

pub(super) struct Phases {
    words: usize,
    seed: u64,
    compute: u32,
}

impl Phases {
    pub(super) fn new(parameters: &Parameters) -> Self {
        Self {
            words: parameters.words(),
            seed: parameters.seed,
            compute: parameters.compute,
        }
    }

    /// The first word of each phase's working set, in order. Two that follow each other have nothing
    /// in common: a step of the scattered order is between a quarter and three quarters of the way.
    fn starts(&self) -> impl Iterator<Item = usize> {
        let order = Scatter::new(PHASES, self.seed);
        let reach = self.words - self.words / PARTS;
        (0..PHASES).map(move |phase| order.of(phase) * reach / (PHASES - 1))
    }

    /// An operation for every 2 KiB of the memory: 65,536 of 128 MiB.
    fn operations_per_phase(&self) -> u64 {
        (self.words / WORDS_PER_OPERATION / PHASES) as u64
    }

    /// Uses one working set at random; takes and gives the state of the walk.
    fn stay(&self, working_set: &mut [u64], state: u64) -> u64 {
        (0..self.operations_per_phase()).fold(state, |state, operation| {
            let word = &mut working_set[below(state, self.words / PARTS)];
            let value = *word;
            if operation.is_multiple_of(READS_PER_WRITE) {
                *word ^= state;
            }
            compute(fold(state, value ^ operation), self.compute)
        })
    }
}

impl Workload for Phases {
    fn footprint(&self) -> usize {
        self.words * 8
    }

    fn prepare(&mut self, memory: &mut [u64]) {
        for (index, word) in memory[..self.words].iter_mut().enumerate() {
            *word = numbered(self.seed, index as u64);
        }
    }

    fn run(&mut self, memory: &mut [u64]) -> Outcome {
        let memory = &mut memory[..self.words];
        let checksum = self.starts().fold(!self.seed, |state, start| {
            self.stay(&mut memory[start..start + self.words / PARTS], state)
        });
        Outcome {
            operations: self.operations_per_phase() * PHASES as u64,
            checksum,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_working_sets_differ_and_cover_the_memory() {
        let phases = Phases::new(&Parameters {
            bytes: 1 << 20,
            seed: 5,
            compute: 0,
        });
        let size = phases.words / PARTS;
        let starts: Vec<usize> = phases.starts().collect();
        let mut sorted = starts.clone();
        sorted.sort_unstable();
        assert_eq!((sorted[0], sorted[PHASES - 1]), (0, phases.words - size));
        assert!(
            sorted
                .windows(2)
                .all(|two| two[1] > two[0] && two[1] <= two[0] + size)
        );
        let apart = |two: &[usize]| two[0].abs_diff(two[1]) >= size;
        assert!(starts.windows(2).all(apart), "{starts:?}");
    }

    #[test]
    fn the_working_set_moves_as_often_as_its_summary_says() {
        let phases = Phases::new(&Parameters {
            bytes: 128 << 20,
            seed: 5,
            compute: 0,
        });
        assert_eq!(phases.operations_per_phase(), (128 << 20) / (2 << 10));
    }

    #[test]
    fn a_phase_stays_within_its_working_set() {
        let phases = Phases::new(&Parameters {
            bytes: 1 << 20,
            seed: 5,
            compute: 0,
        });
        let mut memory = vec![1; phases.words];
        let size = phases.words / PARTS;
        phases.stay(&mut memory[100..100 + size], 9);
        let changed = |part: &[u64]| part.iter().filter(|&&word| word != 1).count() as u64;
        assert_eq!(changed(&memory[..100]) + changed(&memory[100 + size..]), 0);
        let writes = phases.operations_per_phase() / READS_PER_WRITE;
        // All over it, and few places twice.
        let parts = memory[100..100 + size].chunks(size / 8);
        assert!(parts.clone().map(changed).sum::<u64>() > writes * 9 / 10);
        assert!(parts.map(changed).all(|count| count > 0));
    }
}
