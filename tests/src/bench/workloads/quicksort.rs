//! Quicksort: what HPBD, Fastswap and others measure far memory by.

use super::numbers::numbered;
use super::{Outcome, Parameters, Workload};

/// Up to so many words are sorted by insertion.
const SMALL: usize = 16;

/// Words that are compared before any is moved.
const BLOCK: usize = 64;

/// Parts that wait at most. The larger part waits, so each is at most half of what was split: as
/// many as a length has bits.
const WAITING_MAX: usize = usize::BITS as usize;

/// Sorts random words, a permutation almost surely without equals.
pub(super) struct Quicksort {
    words: usize,
    seed: u64,
}

impl Quicksort {
    pub(super) fn new(parameters: &Parameters) -> Self {
        Self {
            words: parameters.words(),
            seed: parameters.seed,
        }
    }
}

impl Workload for Quicksort {
    fn footprint(&self) -> usize {
        self.words * 8
    }

    fn prepare(&mut self, memory: &mut [u64]) {
        for (index, word) in memory[..self.words].iter_mut().enumerate() {
            *word = numbered(self.seed, index as u64);
        }
    }

    fn run(&mut self, memory: &mut [u64]) -> Outcome {
        let mut checksum = 0u64;
        // Every word is weighed where it ends up, as it gets there: no pass over the memory more.
        sort(&mut memory[..self.words], |first, sorted| {
            for (index, word) in sorted.iter().enumerate() {
                let weight = 2 * (first + index) as u64 + 1;
                checksum = checksum.wrapping_add(word.wrapping_mul(weight));
            }
        });
        Outcome {
            operations: self.words as u64,
            checksum,
        }
    }
}

/// Sorts, and says of every word once that it is in its final place: where, and which.
fn sort(words: &mut [u64], mut placed: impl FnMut(usize, &[u64])) {
    let mut waiting = [(0, 0); WAITING_MAX];
    let mut count = 0;
    let (mut from, mut to) = (0, words.len());
    loop {
        while to - from > SMALL {
            let pivot = from + partition(&mut words[from..to]);
            placed(pivot, &words[pivot..=pivot]);
            let (left, right) = ((from, pivot), (pivot + 1, to));
            let (small, large) = match pivot - from < to - pivot {
                true => (left, right),
                false => (right, left),
            };
            waiting[count] = large;
            count += 1;
            (from, to) = small;
        }
        insert(&mut words[from..to]);
        placed(from, &words[from..to]);
        if count == 0 {
            return;
        }
        count -= 1;
        (from, to) = waiting[count];
    }
}

fn insert(words: &mut [u64]) {
    for end in 1..words.len() {
        let word = words[end];
        let mut place = end;
        while place > 0 && words[place - 1] > word {
            words[place] = words[place - 1];
            place -= 1;
        }
        words[place] = word;
    }
}

/// Puts the median of three words where it belongs, smaller ones before it; gives its place.
///
/// Two fronts run towards each other from both ends, as in Hoare's quicksort. They compare a block
/// each before they swap, without a branch that depends on the data (Edelkamp, Weiß: "BlockQuicksort",
/// 2016): by a branch for each, the sort is bound by mispredictions rather than memory.
fn partition(words: &mut [u64]) -> usize {
    let last = words.len() - 1;
    choose_pivot(words);
    let (pivot, rest) = words.split_first_mut().expect("more than SMALL words");
    let pivot_value = *pivot;
    // Before `from`, all are smaller; from `to` on, none is.
    let (mut from, mut to) = (0, last);
    let (mut on_left, mut on_right) = (Block::default(), Block::default());
    while to - from >= 2 * BLOCK {
        if on_left.is_empty() {
            on_left.note(&rest[from..from + BLOCK], |word| word >= pivot_value);
        }
        if on_right.is_empty() {
            on_right.note(&rest[to - BLOCK..to], |word| word < pivot_value);
        }
        for _ in 0..on_left.len().min(on_right.len()) {
            rest.swap(from + on_left.take(), to - BLOCK + on_right.take());
        }
        from += if on_left.is_empty() { BLOCK } else { 0 };
        to -= if on_right.is_empty() { BLOCK } else { 0 };
    }
    // What is left between the fronts, with the block that one of them may be in the midst of:
    // those it has swapped already are on their side and stay there.
    let boundary = from + split(&mut rest[from..to], pivot_value);
    words.swap(0, boundary);
    boundary
}

/// Swaps the median of the first, the middle and the last word to the front.
fn choose_pivot(words: &mut [u64]) {
    let (middle, last) = (words.len() / 2, words.len() - 1);
    let [a, b, c] = [words[0], words[middle], words[last]];
    let median = if (a < b) == (b < c) {
        middle
    } else if (a < b) == (c < a) {
        0
    } else {
        last
    };
    words.swap(0, median);
}

/// Puts smaller words before the others; gives how many they are.
fn split(words: &mut [u64], pivot: u64) -> usize {
    let mut smaller = 0;
    for index in 0..words.len() {
        let is_smaller = words[index] < pivot;
        words.swap(smaller, index);
        smaller += usize::from(is_smaller);
    }
    smaller
}

/// Offsets within a block of the words that are on the wrong side.
struct Block {
    offsets: [u8; BLOCK],
    first: usize,
    end: usize,
}

impl Default for Block {
    fn default() -> Self {
        Self {
            offsets: [0; BLOCK],
            first: 0,
            end: 0,
        }
    }
}

impl Block {
    fn is_empty(&self) -> bool {
        self.first == self.end
    }

    fn len(&self) -> usize {
        self.end - self.first
    }

    /// Notes where those words of a block are for which that is so.
    fn note(&mut self, words: &[u64], is_wrong: impl Fn(u64) -> bool) {
        (self.first, self.end) = (0, 0);
        for (offset, &word) in words.iter().enumerate() {
            // Never more than there are offsets, which the remainder tells the compiler.
            self.offsets[self.end % BLOCK] = offset as u8;
            self.end += usize::from(is_wrong(word));
        }
    }

    fn take(&mut self) -> usize {
        let offset = self.offsets[self.first % BLOCK];
        self.first += 1;
        usize::from(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::super::numbers::Random;
    use super::*;

    fn check(words: &[u64]) {
        let mut wanted = words.to_vec();
        wanted.sort_unstable();
        let mut sorted = words.to_vec();
        let mut seen = vec![0; words.len()];
        let mut placed = vec![0; words.len()];
        sort(&mut sorted, |first, part| {
            for (index, &word) in part.iter().enumerate() {
                seen[first + index] += 1;
                placed[first + index] = word;
            }
        });
        assert!(sorted == wanted, "{words:?}");
        assert!(placed == wanted, "what was said to be placed: {words:?}");
        assert!(seen.iter().all(|&times| times == 1));
    }

    #[test]
    fn any_words_are_sorted_and_none_is_lost() {
        let mut random = Random::new(1);
        for len in (0..400).chain([1000, 5000, 65_536]) {
            check(&(0..len).map(|_| random.next()).collect::<Vec<_>>());
            // Order, reverse order, and equals, of which a great many take long.
            if len <= 1000 {
                check(&(0..len).map(|_| random.next() % 7).collect::<Vec<_>>());
            }
            check(&(0..len).collect::<Vec<_>>());
            check(&(0..len).rev().collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_workload_leaves_its_own_words_in_order() {
        let mut quicksort = Quicksort::new(&Parameters {
            bytes: 1 << 20,
            seed: 2,
            compute: 0,
        });
        let mut memory = vec![0; quicksort.words];
        quicksort.prepare(&mut memory);
        let mut wanted = memory.clone();
        wanted.sort_unstable();
        quicksort.run(&mut memory);
        assert!(memory == wanted);
    }
}
