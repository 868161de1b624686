//! What a page holds: real bytes, and a hash of them that makes comparing cheap.

use std::rc::Rc;

use outram_backend::engine::PageIndex;
use outram_backend::engine::seal::PageKey;
use outram_backend::engine::table::Entry;
use outram_wire::units::PAGE_SIZE;

use crate::random::Random;

#[derive(Clone)]
pub(crate) struct Contents {
    bytes: Rc<[u8; PAGE_SIZE]>,
    hash: u64,
}

impl PartialEq for Contents {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash
    }
}

impl std::fmt::Debug for Contents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.hash)
    }
}

fn hash(bytes: &[u8; PAGE_SIZE]) -> u64 {
    bytes.chunks_exact(8).fold(1, |hash, chunk| {
        let word = u64::from_le_bytes(chunk.try_into().expect("eight bytes"));
        (hash.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    })
}

impl Contents {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        let bytes: [u8; PAGE_SIZE] = bytes.try_into().expect("a whole page");
        let hash = hash(&bytes);
        Self {
            bytes: Rc::new(bytes),
            hash,
        }
    }

    /// A page full of one word.
    pub(crate) fn filled(word: u64) -> Self {
        Self::new(&word.to_le_bytes().repeat(PAGE_SIZE / 8))
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..]
    }

    /// The same page after a store.
    pub(crate) fn with(&self, store: Store) -> Self {
        match store {
            Store::Word { place, value } => {
                let mut bytes = *self.bytes;
                bytes[place * 8..][..8].copy_from_slice(&value.to_le_bytes());
                Self::new(&bytes)
            }
            Store::Fill(word) => Self::filled(word),
            Store::Page(seed) => {
                let mut random = Random::new(seed);
                let mut bytes = [0; PAGE_SIZE];
                for chunk in bytes.chunks_exact_mut(8) {
                    chunk.copy_from_slice(&random.next().to_le_bytes());
                }
                Self::new(&bytes)
            }
        }
    }

    /// What was sealed as a page's contents; `None` where this is not what was.
    pub(crate) fn opened(&self, key: &PageKey, page: PageIndex, entry: &Entry) -> Option<Self> {
        let mut bytes = *self.bytes;
        let opened = key.open(page, entry.generation, entry.tag, &mut bytes);
        opened.is_ok().then(|| Self::new(&bytes))
    }

    /// The same page with one bit wrong.
    pub(crate) fn with_flipped_bit(&self, random: &mut Random) -> Self {
        let mut bytes = *self.bytes;
        let bit = random.below(PAGE_SIZE as u64 * 8) as usize;
        bytes[bit / 8] ^= 1 << (bit % 8);
        Self::new(&bytes)
    }
}

/// What a store changes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Store {
    Word { place: usize, value: u64 },
    Fill(u64),
    Page(u64),
}

impl Store {
    pub(crate) fn random(random: &mut Random) -> Self {
        match random.below(10) {
            0 => Self::Fill(0),
            1 => Self::Fill(random.next()),
            2..5 => Self::Page(random.next()),
            // Few places, so that stores often put back what was there.
            _ => Self::Word {
                place: random.below(4) as usize,
                value: random.below(3),
            },
        }
    }
}
