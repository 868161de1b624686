//! A key-value store under load, as memcached is benchmarked.

use super::hash_table::HashTable;
use super::numbers::{Random, Scatter, compute, fold, mix, numbered, unit};
use super::zipf::Zipf;
use super::{Outcome, Parameters, Workload};

/// Longest key of memcached, in bytes.
const KEY_BYTES_MAX: usize = 250;
const KEY_WORDS_MAX: usize = KEY_BYTES_MAX.div_ceil(8);

/// Longest value here.
const VALUE_BYTES_MAX: usize = 32 << 10;
/// Longest of ETC's. Three in ten thousand are longer, which adds half a per cent to the bytes.
const ETC_VALUE_BYTES_MAX: usize = 8192;
const VALUE_WORDS_MAX: usize = VALUE_BYTES_MAX / 8;

/// Table 5 of Atikoglu et al.: how often ETC's values have 0 to 14 bytes.
const ETC_SHORT_VALUES: [f64; 15] = [
    0.00536, 0.00047, 0.17820, 0.09239, 0.00018, 0.02740, 0.00065, 0.00606, 0.00023, 0.00837,
    0.00837, 0.08989, 0.00092, 0.00326, 0.01980,
];

/// What a get that finds nothing adds to the checksum; all keys are set, so it means wrong memory.
const NOTHING: u64 = u64::MAX;

/// A hash table, filled by `prepare`, and gets and sets of keys by Zipf's law.
pub(super) struct KeyValue {
    load: Load,
    words: usize,
    seed: u64,
    compute: u32,
    /// The table and how many keys fit, known once it is filled.
    filled: Option<(HashTable, usize)>,
}

/// What distinguishes one load from another.
struct Load {
    theta: f64,
    gets_per_set: usize,
    key_bytes: fn(u64) -> usize,
    value_bytes: fn(u64) -> usize,
    /// Makes up the value of a key's number.
    fill: fn(usize, &mut Random, &mut [u64]),
    /// Words of an item on average, with its key and its header.
    item_words: usize,
    /// Bytes of memory for each operation.
    bytes_per_operation: usize,
}

impl KeyValue {
    /// Memcached's pool ETC at Facebook (Atikoglu, Xu, Frachtenberg, Jiang, Paleczny: "Workload
    /// analysis of a large-scale key-value store", SIGMETRICS 2012): sizes of keys and values as
    /// fitted there, 30 gets to a set. Half of the keys have a hundredth of the requests there; with
    /// a million keys, that is Zipf's law with 1.2. A set keeps the size, and nothing is deleted.
    pub(super) fn etc(parameters: &Parameters) -> Self {
        let load = Load {
            theta: 1.2,
            gets_per_set: 30,
            key_bytes: etc_key_bytes,
            value_bytes: etc_value_bytes,
            fill: noise,
            item_words: 30,
            bytes_per_operation: 128,
        };
        Self::new(load, parameters)
    }

    /// Values of a page's size; keys, skew and shares as in YCSB's workload B (Cooper et al. 2010):
    /// keys of about 23 bytes, Zipf with 0.99, 19 gets to a set.
    pub(super) fn four_kib(parameters: &Parameters) -> Self {
        let load = Load {
            theta: 0.99,
            gets_per_set: 19,
            key_bytes: |_| 23,
            value_bytes: |_| 4096,
            fill: noise,
            item_words: 1 + 3 + 512,
            bytes_per_operation: 512,
        };
        Self::new(load, parameters)
    }

    /// As [`Self::four_kib`], but values that compress as the cold memory of a fleet does: see [`text`].
    pub(super) fn compressible(parameters: &Parameters) -> Self {
        let mut store = Self::four_kib(parameters);
        store.load.fill = text;
        store
    }

    /// Values of eight pages, as the thesis on remote swap over iSER asks of memcached at least; otherwise
    /// as [`Self::four_kib`].
    pub(super) fn thirty_two_kib(parameters: &Parameters) -> Self {
        let load = Load {
            theta: 0.99,
            gets_per_set: 19,
            key_bytes: |_| 23,
            value_bytes: |_| 32 << 10,
            fill: noise,
            item_words: 1 + 3 + 4096,
            bytes_per_operation: 16 << 10,
        };
        Self::new(load, parameters)
    }

    fn new(load: Load, parameters: &Parameters) -> Self {
        Self {
            load,
            words: parameters.words(),
            seed: parameters.seed,
            compute: parameters.compute,
            filled: None,
        }
    }

    /// The key with this number.
    fn key<'a>(&self, number: usize, buffer: &'a mut [u64; KEY_WORDS_MAX]) -> &'a [u64] {
        let first = numbered(self.seed, number as u64);
        let words = (self.load.key_bytes)(first).div_ceil(8);
        let mut random = Random::new(first);
        // The first word alone tells keys apart: numbers that differ are mixed to others.
        buffer[0] = first;
        buffer[1..words].fill_with(|| random.next());
        &buffer[..words]
    }

    /// What the `version`th set gives that key; always of the same size.
    fn value<'a>(
        &self,
        number: usize,
        version: u64,
        buffer: &'a mut [u64; VALUE_WORDS_MAX],
    ) -> &'a [u64] {
        let first = numbered(!self.seed, number as u64);
        let words = (self.load.value_bytes)(first).div_ceil(8);
        let mut random = Random::new(first ^ mix(version));
        (self.load.fill)(number, &mut random, &mut buffer[..words]);
        &buffer[..words]
    }
}

/// Words that nothing compresses.
fn noise(_: usize, random: &mut Random, value: &mut [u64]) {
    value.fill_with(|| random.next());
}

/// A value that LZ4 makes a third as large, but for those of three keys in ten, which it does not. So it
/// was of the cold pages of a fleet, with LZO: a median of a third, and 31 % incompressible
/// (Lagar-Cavilla et al.: "Software-Defined Far Memory in Warehouse-Scale Computers", ASPLOS 2019,
/// section 3). Sixteen keys in a row are alike, so that pages, which values share, are.
fn text(number: usize, random: &mut Random, value: &mut [u64]) {
    if mix(number as u64 / 16) % 100 < 31 {
        return noise(number, random, value);
    }
    // Phrases of three words: one in five is new, the others are said again.
    let phrases = value.len().div_ceil(3);
    for phrase in 0..phrases {
        let place = phrase * 3..value.len().min(phrase * 3 + 3);
        match phrase % 5 {
            0 => noise(number, random, &mut value[place]),
            _ => {
                let said = random.below(phrase / 5 + 1) * 15;
                value.copy_within(said..said + place.len(), place.start);
            }
        }
    }
}

impl Workload for KeyValue {
    fn footprint(&self) -> usize {
        self.words * 8
    }

    fn prepare(&mut self, memory: &mut [u64]) {
        let memory = &mut memory[..self.words];
        let mut table = HashTable::new(memory, self.words, self.load.item_words);
        let (mut key, mut value) = ([0; KEY_WORDS_MAX], [0; VALUE_WORDS_MAX]);
        let fits = |number: &usize| {
            let key = self.key(*number, &mut key);
            let value = self.value(*number, 0, &mut value);
            table.set(memory, key, value).is_ok()
        };
        let keys = (0..).take_while(fits).count();
        self.filled = Some((table, keys));
    }

    fn run(&mut self, memory: &mut [u64]) -> Outcome {
        let memory = &mut memory[..self.words];
        let (mut table, keys) = self.filled.clone().expect("it was prepared");
        let zipf = Zipf::new(keys, self.load.theta);
        // What is asked for most is anywhere in the memory.
        let scatter = Scatter::new(keys, self.seed);
        let mut random = Random::new(!self.seed);
        let operations = (self.words * 8 / self.load.bytes_per_operation) as u64;
        let (mut key, mut value) = ([0; KEY_WORDS_MAX], [0; VALUE_WORDS_MAX]);
        let mut checksum = 0;
        for operation in 1..=operations {
            let number = scatter.of(zipf.draw(&mut random) - 1);
            let key = self.key(number, &mut key);
            let word = if random.below(self.load.gets_per_set + 1) == 0 {
                let value = self.value(number, operation, &mut value);
                u64::from(table.set(memory, key, value).is_ok())
            } else {
                let sum = |value: &[u64]| {
                    value
                        .iter()
                        .fold(0, |sum: u64, &word| sum.wrapping_add(word))
                };
                table.get(memory, key).map_or(NOTHING, sum)
            };
            checksum = compute(fold(checksum, word), self.compute);
        }
        Outcome {
            operations,
            checksum,
        }
    }
}

/// A generalised extreme value distribution (section 5 there), in whole bytes that memcached takes.
fn etc_key_bytes(word: u64) -> usize {
    const LOCATION: f64 = 30.7984;
    const SCALE: f64 = 8.20449;
    const SHAPE: f64 = 0.078688;
    // Never 0, whose logarithm there is not.
    let quantile = 1.0 - unit(mix(word));
    let bytes = LOCATION + SCALE * ((-quantile.ln()).powf(-SHAPE) - 1.0) / SHAPE;
    // The saturating cast makes 250 of the infinity that a quantile of 1 gives.
    (bytes.round() as usize).clamp(1, KEY_BYTES_MAX)
}

/// Short values by the table, longer ones by a generalised Pareto distribution (section 5 there).
fn etc_value_bytes(word: u64) -> usize {
    const SCALE: f64 = 214.476;
    const SHAPE: f64 = 0.348238;
    let mut quantile = unit(mix(word));
    for (bytes, share) in ETC_SHORT_VALUES.iter().enumerate() {
        if quantile < *share {
            return bytes;
        }
        quantile -= share;
    }
    let tail = 1.0 - ETC_SHORT_VALUES.iter().sum::<f64>();
    let remaining = ((tail - quantile) / tail).max(f64::EPSILON);
    let bytes = SCALE * (remaining.powf(-SHAPE) - 1.0) / SHAPE;
    (ETC_SHORT_VALUES.len() + bytes as usize).min(ETC_VALUE_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters() -> Parameters {
        Parameters {
            bytes: 1 << 20,
            seed: 11,
            compute: 0,
        }
    }

    #[test]
    fn the_memory_is_filled_with_keys_that_keep_their_values() {
        for mut load in [
            KeyValue::etc(&parameters()),
            KeyValue::four_kib(&parameters()),
            KeyValue::compressible(&parameters()),
            KeyValue::thirty_two_kib(&parameters()),
        ] {
            let mut memory = vec![7; load.words];
            load.prepare(&mut memory);
            let (table, keys) = load.filled.clone().expect("just prepared");
            assert_eq!(table.len(), keys);
            let wanted = load.words / load.load.item_words;
            assert!(keys > wanted * 8 / 10, "{keys} keys of {wanted}");
            load.run(&mut memory);
            let (mut key, mut value) = ([0; KEY_WORDS_MAX], [0; VALUE_WORDS_MAX]);
            let mut changed = 0;
            for number in 0..keys {
                let found = table.get(&memory, load.key(number, &mut key));
                let first = load.value(number, 0, &mut value);
                assert_eq!(found.map(<[u64]>::len), Some(first.len()));
                changed += usize::from(found != Some(first));
            }
            // The sets were of some keys: those that are asked for often.
            assert!(changed > 0 && changed < keys / 2, "{changed} of {keys}");
        }
    }

    #[test]
    fn seven_values_in_ten_compress_to_a_third() {
        const KEYS: usize = 16_000;
        let store = KeyValue::compressible(&parameters());
        let mut value = [0; VALUE_WORDS_MAX];
        let mut small = Vec::new();
        for number in (0..KEYS).step_by(8) {
            let value = store.value(number, 0, &mut value);
            let bytes: Vec<u8> = value.iter().flat_map(|word| word.to_le_bytes()).collect();
            let packed = lz4_flex::block::compress(&bytes).len();
            if packed < bytes.len() / 2 {
                small.push(packed as f64 / bytes.len() as f64);
            }
        }
        let share = small.len() as f64 / (KEYS / 8) as f64;
        assert!((0.66..0.72).contains(&share), "{share} of values");
        let ratio = small.iter().sum::<f64>() / small.len() as f64;
        assert!((0.3..0.4).contains(&ratio), "to {ratio}");
    }

    #[test]
    fn sizes_are_those_of_etc() {
        const DRAWS: u64 = 100_000;
        let mean = |bytes: fn(u64) -> usize| {
            let sum: usize = (0..DRAWS).map(|index| bytes(numbered(1, index))).sum();
            sum as f64 / DRAWS as f64
        };
        // The distributions' means: the location and 0.62 scales, roughly; the table's, and that of
        // the Pareto distribution, scale / (1 - shape), above 15.
        let keys = mean(etc_key_bytes);
        assert!((35.5..37.0).contains(&keys), "{keys}");
        let values = mean(etc_value_bytes);
        assert!((180.0..200.0).contains(&values), "{values}");
        let two = (0..DRAWS).filter(|&index| etc_value_bytes(numbered(1, index)) == 2);
        let two = two.count() as f64 / DRAWS as f64;
        assert!((0.173..0.183).contains(&two), "{two}");
        for word in [0, 1, u64::MAX] {
            assert!((1..=KEY_BYTES_MAX).contains(&etc_key_bytes(word)));
            assert!(etc_value_bytes(word) <= ETC_VALUE_BYTES_MAX);
        }
    }
}
