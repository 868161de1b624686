//! What is written of a disk: its extents, where they lie, and each block's generation.
//!
//! Generations are what makes old bytes of a block unacceptable; they are kept here and in the
//! slab's entries, tags in the entries alone. A generation is read or changed only by whoever holds
//! the block's range.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use outram_wire::server::SlabId;

use super::layout::Run;

/// Where an extent lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) extent: u32,
    /// Which server.
    pub(super) line: usize,
    pub(super) slab: SlabId,
}

/// A part of the disk that has a slab.
#[derive(Debug)]
pub(super) struct StoredExtent {
    pub(super) place: Place,
    /// A release was interrupted: the slab may no longer say whose it is.
    may_lack_header: AtomicBool,
    /// 0 where a block is not written.
    generations: Box<[AtomicU64]>,
    written: AtomicU32,
    /// Blocks whose last change was interrupted, with every generation that the server may have.
    doubtful: Mutex<HashMap<u32, Vec<u64>>>,
}

impl StoredExtent {
    pub(super) fn new(place: Place, generations: Vec<u64>) -> Self {
        let written = generations.iter().filter(|own| **own != 0).count();
        Self {
            place,
            may_lack_header: AtomicBool::new(false),
            generations: generations.into_iter().map(AtomicU64::new).collect(),
            written: AtomicU32::new(written as u32),
            doubtful: Mutex::default(),
        }
    }

    pub(super) fn generation(&self, place: u32) -> u64 {
        self.generations[place as usize].load(Ordering::Relaxed)
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
        self.generations.len() as u32
    }

    /// Blocks written.
    pub(super) fn written(&self) -> u32 {
        self.written.load(Ordering::Acquire)
    }

    /// Notes what the server certainly has of a block now; the change of blocks written.
    pub(super) fn set_generation(&self, place: u32, generation: u64) -> i64 {
        self.doubtful().remove(&place);
        let before = self.generations[place as usize].swap(generation, Ordering::Relaxed);
        match (before, generation) {
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
#[derive(Debug, Default)]
pub(super) struct Extents(Mutex<HashMap<u32, Arc<StoredExtent>>>);

impl Extents {
    pub(super) fn get(&self, extent: u32) -> Option<Arc<StoredExtent>> {
        self.lock().get(&extent).cloned()
    }

    pub(super) fn insert(&self, extent: u32, stored: StoredExtent) -> Arc<StoredExtent> {
        let stored = Arc::new(stored);
        self.lock().insert(extent, Arc::clone(&stored));
        stored
    }

    pub(super) fn remove(&self, extent: u32) {
        self.lock().remove(&extent);
    }

    /// Slabs held.
    pub(super) fn count(&self) -> u64 {
        self.lock().len() as u64
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Arc<StoredExtent>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
