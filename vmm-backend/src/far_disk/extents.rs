//! What is written of a disk: its extents, where they lie, and each block's generation.
//!
//! Generations are what makes old bytes of a block unacceptable; they are kept in the disk's table
//! and in the slab's entries, tags in the entries alone. A generation is read or changed only by
//! whoever holds the block's range.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use outram_wire::server::SlabId;

use super::layout::{Layout, Run};
use super::table::{CLEARING, DiskTable, WRITING};

/// Where an extent lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) extent: u32,
    /// Which server.
    pub(super) line: usize,
    pub(super) slab: SlabId,
}

/// A part of the disk that has a slab.
pub(super) struct StoredExtent {
    pub(super) place: Place,
    /// A release was interrupted: the slab may no longer say whose it is.
    may_lack_header: AtomicBool,
    table: Arc<DiskTable>,
    /// The disk's number of its first block.
    first_block: u32,
    blocks: u32,
    written: AtomicU32,
    /// Blocks whose last change was interrupted, with every generation that the server may have.
    doubtful: Mutex<HashMap<u32, Vec<u64>>>,
}

/// What the table has of a change that was under way when a backend died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unfinished {
    pub(super) writing: bool,
    pub(super) clearing: bool,
}

impl StoredExtent {
    /// One whose blocks have these generations.
    pub(super) fn new(
        table: &Arc<DiskTable>,
        layout: &Layout,
        place: Place,
        generations: impl Iterator<Item = u64>,
    ) -> Self {
        for (block, generation) in (layout.block(place.extent, 0)..).zip(generations) {
            table.block(block).store(generation, Ordering::Release);
        }
        Self::again(table, layout, place)
    }

    /// One as the table has it.
    pub(super) fn again(table: &Arc<DiskTable>, layout: &Layout, place: Place) -> Self {
        let extent = Self {
            place,
            may_lack_header: AtomicBool::new(false),
            table: Arc::clone(table),
            first_block: layout.block(place.extent, 0),
            blocks: layout.blocks_of(place.extent),
            written: AtomicU32::new(0),
            doubtful: Mutex::default(),
        };
        let written = (0..extent.blocks).filter(|place| extent.is_written(*place));
        extent
            .written
            .store(written.count() as u32, Ordering::Release);
        extent
    }

    fn word(&self, place: u32) -> &AtomicU64 {
        self.table.block(self.first_block + place)
    }

    /// 0 where a block is not written.
    pub(super) fn generation(&self, place: u32) -> u64 {
        self.word(place).load(Ordering::Relaxed) & !(WRITING | CLEARING)
    }

    /// Notes, for a successor, that a block is about to be given this generation.
    pub(super) fn announce(&self, place: u32, generation: u64) {
        let change = if generation == 0 { CLEARING } else { WRITING };
        self.word(place).fetch_or(change, Ordering::AcqRel);
    }

    /// What a former backend was changing of a block when it died.
    pub(super) fn unfinished(&self, place: u32) -> Option<Unfinished> {
        let word = self.word(place).load(Ordering::Acquire);
        (word & (WRITING | CLEARING) != 0).then_some(Unfinished {
            writing: word & WRITING != 0,
            clearing: word & CLEARING != 0,
        })
    }

    pub(super) fn is_written(&self, place: u32) -> bool {
        self.generation(place) != 0
    }

    pub(super) fn may_lack_header(&self) -> bool {
        self.may_lack_header.load(Ordering::Acquire)
    }

    pub(super) fn set_may_lack_header(&self, may: bool) {
        self.may_lack_header.store(may, Ordering::Release);
    }

    /// Blocks of the extent.
    pub(super) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Blocks written.
    pub(super) fn written(&self) -> u32 {
        self.written.load(Ordering::Acquire)
    }

    /// Notes what the server certainly has of a block now; the change of blocks written.
    pub(super) fn set_generation(&self, place: u32, generation: u64) -> i64 {
        self.doubtful().remove(&place);
        let before = self.word(place).swap(generation, Ordering::AcqRel);
        match (before & !(WRITING | CLEARING), generation) {
            (0, 1..) => {
                self.written.fetch_add(1, Ordering::AcqRel);
                1
            }
            (1.., 0) => {
                self.written.fetch_sub(1, Ordering::AcqRel);
                -1
            }
            _ => 0,
        }
    }

    /// Notes that the server may have this generation of a block now, or still the one before.
    pub(super) fn doubt(&self, place: u32, generation: u64) {
        let known = self.generation(place);
        let mut doubtful = self.doubtful();
        let candidates = doubtful.entry(place).or_insert_with(|| vec![known]);
        candidates.push(generation);
    }

    /// What the server may have of a block that was interrupted.
    pub(super) fn candidates(&self, place: u32) -> Option<Vec<u64>> {
        self.doubtful().get(&place).cloned()
    }

    /// Whether any of these blocks was interrupted.
    pub(super) fn has_doubts(&self, run: Run) -> bool {
        self.doubtful()
            .keys()
            .any(|place| (run.first..run.end()).contains(place))
    }

    /// Runs of these blocks that are written, or are not, and of which.
    pub(super) fn pieces(&self, run: Run) -> Vec<(Run, bool)> {
        runs_of(run, |place| self.is_written(place))
    }

    fn doubtful(&self) -> MutexGuard<'_, HashMap<u32, Vec<u64>>> {
        self.doubtful.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Cuts a run where `is` changes.
pub(super) fn runs_of(run: Run, is: impl Fn(u32) -> bool) -> Vec<(Run, bool)> {
    let mut pieces: Vec<(Run, bool)> = Vec::new();
    for place in run.places() {
        let kind = is(place);
        match pieces.last_mut() {
            Some((piece, own)) if *own == kind => piece.count += 1,
            _ => pieces.push((
                Run {
                    first: place,
                    count: 1,
                },
                kind,
            )),
        }
    }
    pieces
}

/// The extents that have a slab.
pub(super) struct Extents {
    table: Arc<DiskTable>,
    stored: Mutex<HashMap<u32, Arc<StoredExtent>>>,
}

impl Extents {
    pub(super) fn new(table: &Arc<DiskTable>) -> Self {
        Self {
            table: Arc::clone(table),
            stored: Mutex::default(),
        }
    }

    pub(super) fn table(&self) -> &Arc<DiskTable> {
        &self.table
    }

    pub(super) fn get(&self, extent: u32) -> Option<Arc<StoredExtent>> {
        self.lock().get(&extent).cloned()
    }

    pub(super) fn insert(&self, extent: u32, stored: StoredExtent) -> Arc<StoredExtent> {
        let stored = Arc::new(stored);
        self.table.set_place(stored.place);
        self.lock().insert(extent, Arc::clone(&stored));
        stored
    }

    pub(super) fn remove(&self, extent: u32) {
        self.table.clear_place(extent);
        self.lock().remove(&extent);
    }

    /// Blocks written, in all of them.
    pub(super) fn written_blocks(&self) -> u64 {
        let stored = self.lock();
        stored.values().map(|own| u64::from(own.written())).sum()
    }

    /// Slabs held.
    pub(super) fn count(&self) -> u64 {
        self.lock().len() as u64
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Arc<StoredExtent>>> {
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
