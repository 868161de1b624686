//! One pass over the memory, front to back: the iSER thesis's and every block device's first test.
//!
//! Every word differs from its neighbours, so that no page is one value over and over.

use super::{Outcome, Parameters, Workload};
use crate::split_mix::GOLDEN;

const PAGE_BYTES: usize = 4096;

/// No two words of a memory are alike, for the factor is odd.
fn word(seed: u64, index: usize) -> u64 {
    (seed ^ index as u64).wrapping_add(1).wrapping_mul(GOLDEN)
}

fn fold(checksum: u64, word: u64) -> u64 {
    checksum.rotate_left(1) ^ word
}

/// Whole pages of what was asked for.
fn bytes_of(parameters: &Parameters) -> usize {
    parameters.words() * 8 / PAGE_BYTES * PAGE_BYTES
}

/// Writes every word once. All of it was written before, with other words.
pub(super) struct SequentialWrite {
    bytes: usize,
    seed: u64,
}

impl SequentialWrite {
    pub(super) fn new(parameters: &Parameters) -> Self {
        Self {
            bytes: bytes_of(parameters),
            seed: parameters.seed,
        }
    }
}

impl Workload for SequentialWrite {
    fn footprint(&self) -> usize {
        self.bytes
    }

    fn prepare(&mut self, memory: &mut [u64]) {
        for (index, place) in memory[..self.bytes / 8].iter_mut().enumerate() {
            *place = !word(self.seed, index);
        }
    }

    /// The checksum is of the last pages, read back once all is written.
    fn run(&mut self, memory: &mut [u64]) -> Outcome {
        let memory = &mut memory[..self.bytes / 8];
        for (index, place) in memory.iter_mut().enumerate() {
            *place = word(self.seed, index);
        }
        // The last pages alone: reading all of them would be another pass.
        let tail = memory.len().saturating_sub(16 * PAGE_BYTES / 8);
        let checksum = memory[tail..].iter().copied().fold(0, fold);
        Outcome {
            operations: (self.bytes / PAGE_BYTES) as u64,
            checksum,
        }
    }
}

/// Reads every word once.
pub(super) struct SequentialRead {
    bytes: usize,
    seed: u64,
}

impl SequentialRead {
    pub(super) fn new(parameters: &Parameters) -> Self {
        Self {
            bytes: bytes_of(parameters),
            seed: parameters.seed,
        }
    }
}

impl Workload for SequentialRead {
    fn footprint(&self) -> usize {
        self.bytes
    }

    fn prepare(&mut self, memory: &mut [u64]) {
        for (index, place) in memory[..self.bytes / 8].iter_mut().enumerate() {
            *place = word(self.seed, index);
        }
    }

    fn run(&mut self, memory: &mut [u64]) -> Outcome {
        let checksum = memory[..self.bytes / 8].iter().copied().fold(0, fold);
        Outcome {
            operations: (self.bytes / PAGE_BYTES) as u64,
            checksum,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_word_changes_the_checksum() {
        let parameters = Parameters {
            bytes: 64 * PAGE_BYTES,
            seed: 7,
            compute: 0,
        };
        let mut memory = vec![0; 64 * PAGE_BYTES / 8];
        let mut read = SequentialRead::new(&parameters);
        read.prepare(&mut memory);
        let right = read.run(&mut memory);
        assert_eq!(read.run(&mut memory), right);
        memory[9 * PAGE_BYTES / 8] ^= 4;
        assert_ne!(read.run(&mut memory), right);
    }

    #[test]
    fn what_is_written_is_what_another_run_writes() {
        let parameters = Parameters {
            bytes: 99 * PAGE_BYTES + 5,
            seed: 9,
            compute: 0,
        };
        let mut write = SequentialWrite::new(&parameters);
        assert_eq!(write.footprint(), 99 * PAGE_BYTES);
        let mut memory = vec![1; 99 * PAGE_BYTES / 8];
        write.prepare(&mut memory);
        let first = write.run(&mut memory);
        write.prepare(&mut memory);
        assert_eq!(write.run(&mut memory), first);
    }
}
