//! Numbers that a seed determines.

use crate::split_mix::{GOLDEN, SplitMix};

pub(super) use crate::split_mix::mix;

/// The `index`th number of SplitMix64 with this seed.
pub(super) fn numbered(seed: u64, index: u64) -> u64 {
    mix(seed.wrapping_add(index.wrapping_add(1).wrapping_mul(GOLDEN)))
}

/// A number below `end`, as evenly spread as the word is (Lemire: "Fast random integer generation
/// in an interval", 2019, without the rejection: the bias is below `end` in 2^64).
pub(super) fn below(word: u64, end: usize) -> usize {
    ((u128::from(word) * end as u128) >> 64) as usize
}

/// A number from 0 up to, but not including, 1.
pub(super) fn unit(word: u64) -> f64 {
    (word >> 11) as f64 / (1u64 << 53) as f64
}

/// A checksum with one more word in it; the order matters.
pub(super) fn fold(checksum: u64, word: u64) -> u64 {
    mix(checksum.wrapping_mul(GOLDEN) ^ word)
}

/// Extra work on a word: as many rounds as there are `units`.
pub(super) fn compute(word: u64, units: u32) -> u64 {
    (0..units).fold(word, |word, _| mix(word.wrapping_add(GOLDEN)))
}

/// SplitMix64 itself, from a mixed seed.
#[derive(Clone, Debug)]
pub(super) struct Random(SplitMix);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(SplitMix(mix(seed)))
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0.next()
    }

    /// A number below `end`.
    pub(super) fn below(&mut self, end: usize) -> usize {
        below(self.next(), end)
    }

    /// A number from 0 up to, but not including, 1.
    pub(super) fn unit(&mut self) -> f64 {
        unit(self.next())
    }
}

/// A permutation of the numbers below a length, in constant space: neighbours end up far apart.
#[derive(Clone, Debug)]
pub(super) struct Scatter {
    len: usize,
    step: usize,
    first: usize,
}

impl Scatter {
    /// One of the numbers below `len`, which is not 0.
    pub(super) fn new(len: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        // Multiplying permutes if the factor and the length have no divisor in common.
        let wanted = len / 4 + random.below(len / 2 + 1);
        let step = (wanted.max(1)..)
            .find(|&step| greatest_common_divisor(step, len) == 1)
            .expect("some number is coprime to any other");
        Self {
            len,
            step,
            first: random.below(len),
        }
    }

    /// Where `index`, which is below the length, ends up.
    pub(super) fn of(&self, index: usize) -> usize {
        match index.checked_mul(self.step) {
            Some(product) => (product % self.len + self.first) % self.len,
            None => {
                let product = index as u128 * self.step as u128;
                ((product % self.len as u128) as usize + self.first) % self.len
            }
        }
    }
}

fn greatest_common_divisor(mut a: usize, mut b: usize) -> usize {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattered_numbers_are_a_permutation() {
        for len in [1, 2, 3, 4, 6, 16, 30, 1000, 4096, 5040] {
            for seed in 0..5 {
                let scatter = Scatter::new(len, seed);
                let mut seen = vec![false; len];
                for index in 0..len {
                    let place = scatter.of(index);
                    assert!(!std::mem::replace(&mut seen[place], true), "{len} {seed}");
                }
            }
        }
    }

    #[test]
    fn products_beyond_64_bits_scatter_as_others() {
        let scatter = Scatter {
            len: (1 << 61) - 1,
            step: 1 << 60,
            first: 5,
        };
        // 2^61 is 1 modulo this length, so four times 2^60 is 2.
        assert_eq!(scatter.of(4), 7);
        assert_eq!(scatter.of(1 << 60), (1 << 59) + 5);
    }

    #[test]
    fn the_generator_gives_its_published_numbers() {
        // The first outputs of SplitMix64 with seed 1234567, as in Vigna's reference code.
        let numbers: Vec<u64> = (0..3).map(|index| numbered(1_234_567, index)).collect();
        assert_eq!(
            numbers,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
    }
}
