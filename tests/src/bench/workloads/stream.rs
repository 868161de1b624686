//! STREAM (McCalpin: "Memory bandwidth and machine balance in current high performance computers",
//! 1995): four kernels over three arrays, each far larger than any cache.

use super::numbers::{fold, numbered, unit};
use super::{Outcome, Parameters, Workload};

/// How often all four kernels are run; the original's ten take too long where memory is far.
const ROUNDS: u64 = 5;
const KERNELS: u64 = 4;
const SCALAR: f64 = 3.0;

/// Elements after which the last kernel's results are summed up, while they are in the cache.
const CHUNK: usize = 512;

pub(super) struct Stream {
    elements: usize,
    seed: u64,
}

impl Stream {
    pub(super) fn new(parameters: &Parameters) -> Self {
        Self {
            elements: parameters.words() / 3,
            seed: parameters.seed,
        }
    }

    /// The arrays a, b and c.
    fn arrays<'a>(&self, memory: &'a mut [u64]) -> [&'a mut [u64]; 3] {
        let (a, rest) = memory.split_at_mut(self.elements);
        let (b, rest) = rest.split_at_mut(self.elements);
        [a, b, &mut rest[..self.elements]]
    }
}

impl Workload for Stream {
    fn footprint(&self) -> usize {
        3 * self.elements * 8
    }

    fn prepare(&mut self, memory: &mut [u64]) {
        let [a, b, c] = self.arrays(memory);
        for (index, word) in a.iter_mut().enumerate() {
            // The original has ones; these have results that depend on the seed.
            *word = (1.0 + unit(numbered(self.seed, index as u64))).to_bits();
        }
        b.fill(2f64.to_bits());
        c.fill(0f64.to_bits());
    }

    fn run(&mut self, memory: &mut [u64]) -> Outcome {
        let [a, b, c] = self.arrays(memory);
        let mut checksum = 0;
        for _ in 0..ROUNDS {
            copy(a, c);
            scale(c, b);
            add(a, b, c);
            checksum = fold(checksum, triad(b, c, a));
        }
        Outcome {
            operations: ROUNDS * KERNELS * self.elements as u64,
            checksum,
        }
    }
}

/// `to = from`.
fn copy(from: &[u64], to: &mut [u64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = *from;
    }
}

/// `to = SCALAR * from`.
fn scale(from: &[u64], to: &mut [u64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = (SCALAR * f64::from_bits(*from)).to_bits();
    }
}

/// `to = one + other`.
fn add(one: &[u64], other: &[u64], to: &mut [u64]) {
    for ((to, one), other) in to.iter_mut().zip(one).zip(other) {
        *to = (f64::from_bits(*one) + f64::from_bits(*other)).to_bits();
    }
}

/// `to = one + SCALAR * other`; gives the sum of what it wrote, taken as words.
fn triad(one: &[u64], other: &[u64], to: &mut [u64]) -> u64 {
    let mut sum = 0u64;
    let chunks = to
        .chunks_mut(CHUNK)
        .zip(one.chunks(CHUNK))
        .zip(other.chunks(CHUNK));
    for (place, ((to, one), other)) in chunks.enumerate() {
        for ((to, one), other) in to.iter_mut().zip(one).zip(other) {
            *to = (f64::from_bits(*one) + SCALAR * f64::from_bits(*other)).to_bits();
        }
        // Weighed by the chunk, so that chunks in each other's place are another sum.
        let weight = 2 * place as u64 + 1;
        let chunk = to.iter().fold(0u64, |sum, &word| sum.wrapping_add(word));
        sum = sum.wrapping_add(chunk.wrapping_mul(weight));
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_in_each_others_place_are_another_checksum() {
        let mut stream = Stream::new(&Parameters {
            bytes: 1 << 20,
            seed: 9,
            compute: 0,
        });
        let mut memory = vec![0; stream.footprint() / 8];
        stream.prepare(&mut memory);
        let checksum = stream.run(&mut memory).checksum;
        stream.prepare(&mut memory);
        let (one, other) = memory.split_at_mut(CHUNK);
        one.swap_with_slice(&mut other[..CHUNK]);
        assert_ne!(stream.run(&mut memory).checksum, checksum);
    }

    #[test]
    fn the_arrays_hold_what_the_kernels_come_to() {
        let mut stream = Stream::new(&Parameters {
            bytes: 1 << 20,
            seed: 9,
            compute: 0,
        });
        let mut memory = vec![3; stream.footprint() / 8];
        stream.prepare(&mut memory);
        let first: Vec<f64> = memory[..stream.elements]
            .iter()
            .map(|&word| f64::from_bits(word))
            .collect();
        stream.run(&mut memory);
        let arrays = stream.arrays(&mut memory);
        for (index, &start) in first.iter().enumerate() {
            assert!((1.0..2.0).contains(&start));
            let (mut a, mut b, mut c) = (start, 0.0, 0.0);
            for _ in 0..ROUNDS {
                c = a;
                b = SCALAR * c;
                c = a + b;
                a = b + SCALAR * c;
            }
            let found = [0, 1, 2].map(|array: usize| f64::from_bits(arrays[array][index]));
            assert_eq!(found, [a, b, c], "element {index}");
        }
    }
}
