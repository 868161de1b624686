//! What of an open disk outlives its backend: where its extents lie, and each block's generation.
//!
//! The words lie in memory that a successor finds again. Each is stored as a whole, and in an order
//! in which a death between two of them does no harm; so there is nothing to be repaired.
//!
//! ```text
//! header   0 magic  1 version  2 the disk's bytes  3 whether it is open  4 bytes of a slab
//!          5 first generation of this opening  6 the next one  7 salt [2]  9 extents             = 16
//! blocks   one word each: its generation (0: not written), and above it whether a change is under way
//! extents  of each: 0 its server's number + 1 (0: it has no slab, and its blocks' words mean nothing)
//!                   1 slab                                                                        = 2
//! ```
//!
//! Generations are drawn from the table itself: whoever goes on draws none that was drawn before, so
//! that an opening stays one, with its key, over several backends.

use std::sync::atomic::{AtomicU64, Ordering};

use outram_wire::server::SlabId;

use super::block_keys::{SALT_BYTES, Salt};
use super::extents::Place;
use super::layout::BLOCK;
use crate::engine::table::Words;

const MAGIC: u64 = u64::from_le_bytes(*b"OUTRAMDT");
const VERSION: u64 = 1;

/// A write of the block is under way, or was when its backend died: the server may have it or not.
pub(super) const WRITING: u64 = 1 << 63;
/// The same of its clearing.
pub(super) const CLEARING: u64 = 1 << 62;

const HEADER_WORDS: usize = 16;
const EXTENT_WORDS: usize = 2;

/// Why a table of a former backend is not gone on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// It is none, or has another format.
    #[error("it is no table of a far-memory disk, or of a version that this build does not know")]
    Unknown,
    /// It is another disk's.
    #[error("it is of a disk of {found} bytes, not {expected}")]
    OtherSize {
        /// What it says.
        found: u64,
        /// The disk's.
        expected: u64,
    },
    /// Words are missing.
    #[error("it is shorter than it has to be")]
    Short,
}

/// The table of a disk. A block's word is changed only by whoever holds the block's range.
pub struct DiskTable {
    words: Box<dyn Words>,
    blocks: usize,
}

/// An opening that is to be gone on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FormerOpening {
    pub(super) slab_bytes: u64,
    pub(super) first_generation: u64,
    pub(super) salt: Salt,
}

impl DiskTable {
    /// Bytes of the table of a disk of so many bytes. Most are never used: an extent has far more than
    /// one block.
    pub fn bytes(size_bytes: u64) -> u64 {
        let blocks = size_bytes.div_ceil(BLOCK as u64);
        (HEADER_WORDS as u64 + blocks * (1 + EXTENT_WORDS as u64)) * 8
    }

    /// The table in `words`: a new one where they are zeros, else as a former backend left it.
    pub fn new(words: Box<dyn Words>, size_bytes: u64) -> Result<Self, TableError> {
        let blocks = size_bytes.div_ceil(BLOCK as u64) as usize;
        let table = Self { words, blocks };
        if table.words.words().len() < HEADER_WORDS + blocks * (1 + EXTENT_WORDS) {
            return Err(TableError::Short);
        }
        match [0, 1, 2].map(|place| table.header(place).load(Ordering::Acquire)) {
            [0, _, _] => {
                table.header(2).store(size_bytes, Ordering::Release);
                table.header(1).store(VERSION, Ordering::Release);
                table.header(0).store(MAGIC, Ordering::Release);
                Ok(table)
            }
            [MAGIC, VERSION, found] if found == size_bytes => Ok(table),
            [MAGIC, VERSION, found] => Err(TableError::OtherSize {
                found,
                expected: size_bytes,
            }),
            _ => Err(TableError::Unknown),
        }
    }

    /// A table in ordinary memory, which nobody finds again.
    #[cfg(test)]
    pub(crate) fn in_memory(size_bytes: u64) -> Self {
        let words = (0..Self::bytes(size_bytes) / 8).map(|_| AtomicU64::new(0));
        let words: Vec<AtomicU64> = words.collect();
        Self::new(Box::new(words), size_bytes).expect("a new one")
    }

    /// The opening that a former backend was at, if the disk was open.
    pub(super) fn former(&self) -> Option<FormerOpening> {
        let load = |place| self.header(place).load(Ordering::Acquire);
        let mut salt = Salt::default();
        for (bytes, place) in salt.0.chunks_exact_mut(8).zip(7..) {
            bytes.copy_from_slice(&load(place).to_le_bytes());
        }
        (load(3) == 1).then(|| FormerOpening {
            slab_bytes: load(4),
            first_generation: load(5),
            salt,
        })
    }

    /// What the table says is no longer so: whoever opens the disk next asks the servers.
    pub(super) fn close(&self) {
        self.header(3).store(0, Ordering::Release);
    }

    /// Begins anew: no extent has a slab. The disk counts as open once [`Self::open`] says so.
    pub(super) fn begin(&self, opening: FormerOpening, extents: u32) {
        self.close();
        for extent in 0..self.header(9).load(Ordering::Acquire) {
            self.extent_words(extent as u32)[0].store(0, Ordering::Release);
        }
        let store = |place: usize, value| self.header(place).store(value, Ordering::Release);
        store(4, opening.slab_bytes);
        store(5, opening.first_generation);
        store(6, opening.first_generation);
        let (halves, _) = opening.salt.0.as_chunks::<{ SALT_BYTES / 2 }>();
        for (half, place) in halves.iter().zip(7..) {
            store(place, u64::from_le_bytes(*half));
        }
        store(9, u64::from(extents));
    }

    /// All that is written stands in the table.
    pub(super) fn open(&self) {
        self.header(3).store(1, Ordering::Release);
    }

    /// A generation that no block was ever given.
    pub(super) fn draw_generation(&self) -> u64 {
        self.header(6).fetch_add(1, Ordering::AcqRel)
    }

    /// The generation that is drawn next.
    pub(super) fn next_generation(&self) -> u64 {
        self.header(6).load(Ordering::Acquire)
    }

    /// A block's word.
    pub(super) fn block(&self, block: u32) -> &AtomicU64 {
        assert!((block as usize) < self.blocks, "block {block}");
        &self.words.words()[HEADER_WORDS + block as usize]
    }

    /// Says where an extent lies. Its blocks' words are to be right before.
    pub(super) fn set_place(&self, place: Place) {
        let [line, slab] = self.extent_words(place.extent);
        slab.store(place.slab.0, Ordering::Release);
        line.store(place.line as u64 + 1, Ordering::Release);
    }

    /// Says that an extent has no slab any more.
    pub(super) fn clear_place(&self, extent: u32) {
        self.extent_words(extent)[0].store(0, Ordering::Release);
    }

    /// Where the extents lie.
    pub(super) fn places(&self, extents: u32) -> Vec<Place> {
        let place = |extent| {
            let [line, slab] = self
                .extent_words(extent)
                .map(|word| word.load(Ordering::Acquire));
            let line = usize::try_from(line.checked_sub(1)?).ok()?;
            let slab = SlabId(slab);
            Some(Place { extent, line, slab })
        };
        (0..extents).filter_map(place).collect()
    }

    fn header(&self, place: usize) -> &AtomicU64 {
        &self.words.words()[place]
    }

    fn extent_words(&self, extent: u32) -> [&AtomicU64; EXTENT_WORDS] {
        // An extent has at least one block.
        assert!((extent as usize) < self.blocks, "extent {extent}");
        let at = HEADER_WORDS + self.blocks + extent as usize * EXTENT_WORDS;
        let words = self.words.words();
        [&words[at], &words[at + 1]]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Words that outlive the table in them.
    #[derive(Clone)]
    pub(crate) struct Kept(Arc<Vec<AtomicU64>>);

    impl Words for Kept {
        fn words(&self) -> &[AtomicU64] {
            &self.0
        }
    }

    const SIZE: u64 = 100 * 4096;

    fn kept() -> Kept {
        let words = (0..DiskTable::bytes(SIZE) / 8).map(|_| AtomicU64::new(0));
        Kept(Arc::new(words.collect()))
    }

    fn table(kept: &Kept) -> Result<DiskTable, TableError> {
        DiskTable::new(Box::new(kept.clone()), SIZE)
    }

    #[test]
    fn a_successor_finds_all_that_was_said_and_draws_on() {
        let kept = kept();
        let first = table(&kept).expect("a new one");
        assert_eq!(first.former(), None);
        let opening = FormerOpening {
            slab_bytes: 65_536,
            first_generation: 9,
            salt: Salt(*b"0123456789abcdef"),
        };
        first.begin(opening, 7);
        let place = |extent, slab| Place {
            extent,
            line: 1,
            slab: SlabId(slab),
        };
        first.set_place(place(0, 0));
        first.set_place(place(6, 77));
        assert_eq!(first.former(), None, "not open before it says so");
        first.open();
        assert_eq!((first.draw_generation(), first.draw_generation()), (9, 10));
        first.block(99).store(10 | WRITING, Ordering::Relaxed);
        first.clear_place(0);
        drop(first);
        let second = table(&kept).expect("the same");
        assert_eq!(second.former(), Some(opening));
        assert_eq!(second.places(7), [place(6, 77)]);
        assert_eq!(second.block(99).load(Ordering::Relaxed), 10 | WRITING);
        assert_eq!(second.draw_generation(), 11);
        second.begin(opening, 7);
        assert_eq!((second.former(), second.places(7)), (None, Vec::new()));
    }

    #[test]
    fn what_is_not_known_is_refused() {
        let words = kept();
        drop(table(&words).expect("a new one"));
        let other = DiskTable::new(Box::new(words.clone()), SIZE - 4096);
        let expected = SIZE - 4096;
        let found = SIZE;
        assert_eq!(other.err(), Some(TableError::OtherSize { found, expected }));
        words.0[1].store(VERSION + 1, Ordering::Relaxed);
        assert_eq!(table(&words).err(), Some(TableError::Unknown));
        let short = DiskTable::new(Box::new(Vec::new()), SIZE);
        assert_eq!(short.err(), Some(TableError::Short));
    }
}
