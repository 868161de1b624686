//! Uniformly random words of the memory, read or changed.
//!
//! Each place follows from the word read before, so an operation waits for the one before it, as in
//! a program that follows pointers: what is measured is the latency of one access.

use super::numbers::{below, compute, fold, numbered};
use super::{Outcome, Parameters, Workload};

/// Words of memory for each operation. 256 MiB is then two million operations: thirty for each page
/// of 4 KiB, and short enough for a pager at whose hands nearly each is a fault.
const WORDS_PER_OPERATION: usize = 16;

/// Reads.
pub(super) struct RandomRead(Table);

/// Reads, changes and writes back.
pub(super) struct RandomUpdate(Table);

struct Table {
    words: usize,
    seed: u64,
    compute: u32,
}

impl RandomRead {
    pub(super) fn new(parameters: &Parameters) -> Self {
        Self(Table::new(parameters))
    }
}

impl RandomUpdate {
    pub(super) fn new(parameters: &Parameters) -> Self {
        Self(Table::new(parameters))
    }
}

impl Table {
    fn new(parameters: &Parameters) -> Self {
        Self {
            words: parameters.words(),
            seed: parameters.seed,
            compute: parameters.compute,
        }
    }

    fn fill(&self, memory: &mut [u64]) {
        for (index, word) in memory[..self.words].iter_mut().enumerate() {
            *word = numbered(self.seed, index as u64);
        }
    }

    /// Lets `access` do something with one random word after the other; it gives the word's value.
    fn walk(&self, memory: &mut [u64], access: impl Fn(&mut u64, u64) -> u64) -> Outcome {
        let memory = &mut memory[..self.words];
        let operations = (self.words / WORDS_PER_OPERATION) as u64;
        let checksum = (0..operations).fold(!self.seed, |state, operation| {
            let place = below(state, memory.len());
            let value = access(&mut memory[place], state);
            // The number of the operation keeps the walk out of circles.
            compute(fold(state, value ^ operation), self.compute)
        });
        Outcome {
            operations,
            checksum,
        }
    }
}

impl Workload for RandomRead {
    fn footprint(&self) -> usize {
        self.0.words * 8
    }

    fn prepare(&mut self, memory: &mut [u64]) {
        self.0.fill(memory);
    }

    fn run(&mut self, memory: &mut [u64]) -> Outcome {
        self.0.walk(memory, |word, _| *word)
    }
}

impl Workload for RandomUpdate {
    fn footprint(&self) -> usize {
        self.0.words * 8
    }

    fn prepare(&mut self, memory: &mut [u64]) {
        self.0.fill(memory);
    }

    fn run(&mut self, memory: &mut [u64]) -> Outcome {
        self.0.walk(memory, |word, state| {
            *word ^= state;
            *word
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(compute: u32) -> Parameters {
        Parameters {
            bytes: 1 << 20,
            seed: 3,
            compute,
        }
    }

    #[test]
    fn reading_leaves_the_memory_as_it_was_and_updating_does_not() {
        let mut memory = vec![0; (1 << 20) / 8];
        let mut read = RandomRead::new(&parameters(0));
        read.prepare(&mut memory);
        let before = memory.clone();
        read.run(&mut memory);
        assert!(memory == before);

        let mut update = RandomUpdate::new(&parameters(0));
        let operations = update.run(&mut memory).operations as usize;
        let changed = memory.iter().zip(&before).filter(|(a, b)| a != b).count();
        // Few places come twice, for there are sixteen times as many of them as operations.
        assert!(changed > operations * 9 / 10, "{changed} of {operations}");
        assert!(changed <= operations);
    }

    #[test]
    fn every_part_of_the_memory_is_read_alike() {
        // Another word anywhere in a sixteenth of the memory is another checksum, or that sixteenth
        // is not read.
        let mut memory = vec![0; (1 << 20) / 8];
        let mut read = RandomRead::new(&parameters(0));
        read.prepare(&mut memory);
        let checksum = read.run(&mut memory).checksum;
        let part = memory.len() / 16;
        for first in (0..memory.len()).step_by(part) {
            read.prepare(&mut memory);
            memory[first..first + part].fill(0);
            assert_ne!(read.run(&mut memory).checksum, checksum, "from {first}");
        }
    }

    #[test]
    fn compute_is_done_and_adds_no_operations() {
        let mut memory = vec![0; (1 << 20) / 8];
        let outcomes = [0, 5].map(|compute| {
            let mut read = RandomRead::new(&parameters(compute));
            read.prepare(&mut memory);
            read.run(&mut memory)
        });
        assert_eq!(outcomes[0].operations, outcomes[1].operations);
        assert_ne!(outcomes[0].checksum, outcomes[1].checksum);
    }
}
