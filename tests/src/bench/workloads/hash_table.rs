//! A hash table whose index and items all lie in one slice of memory.
//!
//! Open addressing with linear probing; items follow each other behind the index, as they came. Keys
//! and values are whole words. An item is overwritten in place where the new value fits, and else
//! appended anew, its old place lost: enough for a benchmark, whose values keep their sizes.

use super::numbers::{below, fold};

/// Bits of a slot that say where the item is; those above are of the key's hash, so that other
/// items are hardly ever looked at. A slot of 0 is empty: no item is at 0, where the index is.
const OFFSET_BITS: u32 = 48;

/// Share of the slots that may be taken.
const LOAD: (usize, usize) = (3, 4);

/// What a set that does not fit is answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full;

/// The bookkeeping; the contents are in the memory that each call is given.
#[derive(Clone, Debug)]
pub(super) struct HashTable {
    slots: usize,
    words: usize,
    /// Where the next item goes.
    next: usize,
    items: usize,
}

/// An item: one word of sizes, the key, the value with its room to grow.
struct Item {
    offset: usize,
    key_words: usize,
    value_words: usize,
    capacity: usize,
}

impl Item {
    fn load(memory: &[u64], slot: u64) -> Self {
        let offset = (slot & ((1 << OFFSET_BITS) - 1)) as usize;
        let sizes = memory[offset];
        Self {
            offset,
            key_words: (sizes >> 48) as usize,
            value_words: (sizes >> 24 & 0xff_ffff) as usize,
            capacity: (sizes & 0xff_ffff) as usize,
        }
    }

    fn store(&self, memory: &mut [u64], key: &[u64], value: &[u64]) {
        let [key_words, value_words, capacity] =
            [self.key_words, self.value_words, self.capacity].map(|words| words as u64);
        memory[self.offset] = key_words << 48 | value_words << 24 | capacity;
        let rest = &mut memory[self.offset + 1..];
        rest[..key.len()].copy_from_slice(key);
        rest[key.len()..][..value.len()].copy_from_slice(value);
    }

    fn key<'a>(&self, memory: &'a [u64]) -> &'a [u64] {
        &memory[self.offset + 1..][..self.key_words]
    }

    fn value<'a>(&self, memory: &'a [u64]) -> &'a [u64] {
        &memory[self.offset + 1 + self.key_words..][..self.value_words]
    }
}

impl HashTable {
    /// An empty one in the first `words` of a memory, which it writes the index of. It is made for
    /// items of so many words on average, headers and keys included.
    pub(super) fn new(memory: &mut [u64], words: usize, item_words: usize) -> Self {
        // At two thirds when full of average items; and never without an empty slot.
        let slots = (words / (item_words + 1) * 3 / 2).max(2);
        memory[..slots].fill(0);
        Self {
            slots,
            words,
            next: slots,
            items: 0,
        }
    }

    /// How many keys there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.items
    }

    /// A key's value.
    pub(super) fn get<'a>(&self, memory: &'a [u64], key: &[u64]) -> Option<&'a [u64]> {
        let slot = memory[self.probe(memory, key)];
        (slot != 0).then(|| Item::load(memory, slot).value(memory))
    }

    /// Gives a key a value.
    pub(super) fn set(
        &mut self,
        memory: &mut [u64],
        key: &[u64],
        value: &[u64],
    ) -> Result<(), Full> {
        let place = self.probe(memory, key);
        if memory[place] != 0 {
            let mut item = Item::load(memory, memory[place]);
            if value.len() <= item.capacity {
                item.value_words = value.len();
                item.store(memory, key, value);
                return Ok(());
            }
        } else if (self.items + 1) * LOAD.1 > self.slots * LOAD.0 {
            return Err(Full);
        }
        let offset = self.next;
        let end = offset + 1 + key.len() + value.len();
        if end > self.words {
            return Err(Full);
        }
        let item = Item {
            offset,
            key_words: key.len(),
            value_words: value.len(),
            capacity: value.len(),
        };
        item.store(memory, key, value);
        self.next = end;
        self.items += usize::from(memory[place] == 0);
        memory[place] = tag(hash(key)) | offset as u64;
        Ok(())
    }

    /// The slot that has this key, or else the empty one where it belongs.
    ///
    /// # Panics
    ///
    /// If there is neither, which there always is in memory that holds what was written to it.
    fn probe(&self, memory: &[u64], key: &[u64]) -> usize {
        let hash = hash(key);
        let first = below(hash, self.slots);
        let ends_here = |&place: &usize| {
            let slot = memory[place];
            let same = slot >> OFFSET_BITS << OFFSET_BITS == tag(hash);
            slot == 0 || same && Item::load(memory, slot).key(memory) == key
        };
        (first..self.slots)
            .chain(0..first)
            .find(ends_here)
            .expect("the index has empty slots, or its memory was changed")
    }
}

fn hash(key: &[u64]) -> u64 {
    key.iter().fold(0, |hash, &word| fold(hash, word))
}

/// The low bits of the hash, for the high ones have chosen the slot.
fn tag(hash: u64) -> u64 {
    hash << OFFSET_BITS
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::numbers::Random;
    use super::*;

    fn words(random: &mut Random, most: usize) -> Vec<u64> {
        let len = random.below(most + 1);
        (0..len).map(|_| random.next()).collect()
    }

    #[test]
    fn a_table_answers_as_a_hash_map_does_until_it_is_full() {
        for seed in 0..20 {
            let mut random = Random::new(seed);
            // Garbage, which nothing may be read of.
            let mut memory: Vec<u64> = (0..2048).map(|_| random.next()).collect();
            let size = memory.len();
            let mut table = HashTable::new(&mut memory, size, 12);
            let mut model = HashMap::new();
            let mut full = 0;
            for _ in 0..2000 {
                // Few enough keys that most come again, some of them empty, and values that grow
                // and shrink.
                let number = random.below(300) as u64;
                let key: Vec<u64> = (0..number % 4).map(|word| number + word).collect();
                if random.below(3) == 0 {
                    let value = words(&mut random, 10);
                    match table.set(&mut memory, &key, &value) {
                        Ok(()) => drop(model.insert(key, value)),
                        Err(Full) => full += 1,
                    }
                } else {
                    let wanted = model.get(&key).map(Vec::as_slice);
                    assert_eq!(table.get(&memory, &key), wanted, "seed {seed}");
                }
            }
            assert_eq!(table.len(), model.len());
            for (key, value) in &model {
                assert_eq!(
                    table.get(&memory, key),
                    Some(value.as_slice()),
                    "seed {seed}"
                );
            }
            assert!(full > 0, "the table was never full");
        }
    }

    #[test]
    fn keys_whose_hashes_begin_and_end_alike_are_kept_apart() {
        let mut memory = vec![0; 1024];
        let mut table = HashTable::new(&mut memory, 1024, 100);
        let alike = |key: u64| (tag(hash(&[key])), below(hash(&[key]), table.slots));
        let other = (1..).find(|&key| alike(key) == alike(0)).expect("some key");
        assert_eq!(table.set(&mut memory, &[0], &[10]), Ok(()));
        assert_eq!(table.get(&memory, &[other]), None);
        assert_eq!(table.set(&mut memory, &[other], &[11]), Ok(()));
        assert_eq!(table.get(&memory, &[0]), Some(&[10][..]));
        assert_eq!(table.get(&memory, &[other]), Some(&[11][..]));
    }

    #[test]
    fn a_table_of_tiny_items_keeps_an_empty_slot() {
        let mut memory = vec![0; 1024];
        let mut table = HashTable::new(&mut memory, 1024, 100);
        let set = (0..1024).take_while(|&key| table.set(&mut memory, &[key], &[]).is_ok());
        let set = set.count();
        assert_eq!(table.len(), set);
        assert!(set > 5 && set < table.slots);
        assert_eq!(table.get(&memory, &[5000]), None);
    }
}
