//! Evicted pages, compressed, in memory of the host that the guest's limit has room for: what left not
//! long ago comes back from here for a few microseconds, where a server takes a round trip.
//!
//! It is a cache and nothing else: whatever is here is in staging or on a server too, so that it may be
//! dropped at any moment, and is lost with the process. That the bytes are the page's is for whoever
//! takes them to check, by the page's tag. A page that is taken is here no longer, for it is in the
//! guest's memory then.
//!
//! Memory is taken in chunks, each counted against the limit like that many pages and only where there is
//! room to spare, so that a guest whose pages do not compress keeps its limit for itself. A page lies in
//! blocks, anywhere: none is left over but the rest of its last. Where there are not enough, the pages that
//! have been here longest go; where far more are free than the next pages need, as their pages were taken,
//! what lies in the last chunk moves to them, and the chunk is the guest's again.
//!
//! Where few of the last pages became small enough, not all of the following are tried.
//!
//! Faults wait for the lock: while it is held, no more is looked at than what lies in one chunk, or in one
//! part of the index.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use foldhash::HashMap;
use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};
use outram_wire::units::PAGE_SIZE;
use vm_memory::{MmapRegion, VolatileMemory, VolatileSlice};

use super::budget::Budget;
use super::{Generation, PageIndex};

/// Bytes of a page that is kept at most: one that stays larger is worth less than the room that it takes.
const MOST_PACKED_BYTES: usize = PAGE_SIZE / 2;

/// Bytes of a block: half of one, a tenth of what a page usually becomes, is left over in its last.
const BLOCK_BYTES: usize = 256;

/// Blocks of a page at most.
const MOST_BLOCKS: usize = MOST_PACKED_BYTES / BLOCK_BYTES;

/// Pages of memory in a chunk: few system calls, and little to come by or to give up at a time.
const CHUNK_PAGES: u32 = 16;

/// Compressed pages for each page of memory, at most: what bounds the index.
const HELD_PER_PAGE: usize = 4;

/// Chunks' worth of free blocks that are one chunk too many: so many that it is not asked for again at once.
const IDLE_CHUNKS: usize = 2;

/// Pages of memory for which one more is counted, so 1,024 bytes each: for [`HELD_PER_PAGE`] compressed pages 65 bytes
/// in each of at most 3.5 places of the index, and for blocks 6 bytes each. While a part of the index grows, it is there
/// twice.
const PAGES_PER_INDEX_PAGE: u32 = 4;

/// Parts of the index, each a map of its own: what grows or shrinks at once is one of them.
const INDEX_PARTS: usize = 64;

/// Places of a part that are not given back.
const LEAST_PLACES: usize = 14;

/// How many of the last pages that were tried became small enough: from 0 for none to this for all, each
/// counting a 32nd less than the next.
const ALL_SMALL: u32 = 1 << 16;

/// Below this, an eighth, only some are tried: compressing in vain costs evictors more than the rest is worth.
const FEW_SMALL: u32 = ALL_SMALL / 8;

/// Of which one in so many is.
const TRIED_ONE_IN: u32 = 16;

/// What compressing takes beside the page.
pub struct Press {
    table: CompressTable,
    /// Room for what becomes of the worst page.
    packed: Vec<u8>,
}

impl Default for Press {
    fn default() -> Self {
        Self {
            table: CompressTable::default(),
            packed: vec![0; get_maximum_output_size(PAGE_SIZE)],
        }
    }
}

impl Press {
    /// A page, compressed, where that makes it small enough.
    fn pack(&mut self, bytes: &[u8]) -> Option<&[u8]> {
        let length = compress_into_with_table(bytes, &mut self.packed, &mut self.table).ok()?;
        (length <= MOST_PACKED_BYTES).then(|| &self.packed[..length])
    }
}

/// A compressed page.
#[derive(Clone, Copy, Debug)]
struct Held {
    generation: Generation,
    /// The page that came before it, and the one that came after; or [`NOBODY`].
    older: PageIndex,
    younger: PageIndex,
    bytes: u16,
    /// Where its bytes are, as many as it needs.
    blocks: [u32; MOST_BLOCKS],
}

const _: () = assert!(size_of::<(PageIndex, Held)>() == 64, "PAGES_PER_INDEX_PAGE");

/// No page: a table has fewer.
const NOBODY: PageIndex = PageIndex(u32::MAX);

impl Held {
    fn blocks(&self) -> &[u32] {
        &self.blocks[..usize::from(self.bytes).div_ceil(BLOCK_BYTES)]
    }
}

/// The compressed pages there are, linked in the order in which they came.
#[derive(Debug)]
struct Index {
    parts: Vec<HashMap<PageIndex, Held>>,
    count: usize,
    oldest: PageIndex,
    youngest: PageIndex,
}

impl Default for Index {
    fn default() -> Self {
        Self {
            parts: (0..INDEX_PARTS).map(|_| HashMap::default()).collect(),
            count: 0,
            oldest: NOBODY,
            youngest: NOBODY,
        }
    }
}

impl Index {
    fn part(&mut self, page: PageIndex) -> &mut HashMap<PageIndex, Held> {
        &mut self.parts[page.0 as usize % INDEX_PARTS]
    }

    fn get(&self, page: PageIndex) -> Option<&Held> {
        self.parts[page.0 as usize % INDEX_PARTS].get(&page)
    }

    fn get_mut(&mut self, page: PageIndex) -> Option<&mut Held> {
        self.part(page).get_mut(&page)
    }

    /// A page is here from now on, which was not.
    fn insert(&mut self, page: PageIndex, held: Held) {
        let older = self.note_youngest(page);
        let held = Held {
            older,
            younger: NOBODY,
            ..held
        };
        self.part(page).insert(page, held);
        self.count += 1;
    }

    fn remove(&mut self, page: PageIndex) -> Option<Held> {
        let part = self.part(page);
        let held = part.remove(&page)?;
        // So much less than it grew by that it is not done again at once.
        if part.capacity() > LEAST_PLACES && 3 * part.len() < part.capacity() {
            part.shrink_to(part.len() * 3 / 2);
        }
        self.count -= 1;
        self.link(held.older, held.younger);
        Some(held)
    }

    /// The page counts as having come now.
    fn renew(&mut self, page: PageIndex) {
        let Some(Held { older, younger, .. }) = self.get(page).copied() else {
            return;
        };
        self.link(older, younger);
        let older = self.note_youngest(page);
        if let Some(held) = self.get_mut(page) {
            (held.older, held.younger) = (older, NOBODY);
        }
    }

    /// Returns what was the youngest before.
    fn note_youngest(&mut self, page: PageIndex) -> PageIndex {
        let before = self.youngest;
        self.link(before, page);
        self.youngest = page;
        before
    }

    /// Has one page come next after another; either may be nobody, or not here yet.
    fn link(&mut self, older: PageIndex, younger: PageIndex) {
        match self.get_mut(older) {
            Some(held) => held.younger = younger,
            None => self.oldest = younger,
        }
        match self.get_mut(younger) {
            Some(held) => held.older = older,
            None => self.youngest = older,
        }
    }
}

/// Memory for blocks.
#[derive(Debug)]
struct Chunk {
    memory: MmapRegion,
    /// Whose each block is, or was.
    owners: Box<[PageIndex]>,
    /// Blocks that hold nothing.
    free: Vec<u16>,
}

impl Chunk {
    fn new(memory: MmapRegion) -> Self {
        let blocks = memory.size() / BLOCK_BYTES;
        Self {
            memory,
            owners: vec![NOBODY; blocks].into(),
            free: (0..blocks as u16).rev().collect(),
        }
    }
}

#[derive(Debug, Default)]
struct Contents {
    /// All are of one size: blocks are numbered through them in a row.
    chunks: Vec<Chunk>,
    /// Those with free blocks.
    roomy: BTreeSet<usize>,
    /// Free blocks in all.
    free: usize,
    index: Index,
}

/// The compressed pages of a guest; a leaf lock guards them, and is not held while anything is compressed.
#[derive(Debug)]
pub struct CompressedPool {
    chunk_pages: u32,
    /// Chunks that there may be.
    most: AtomicU32,
    /// How many of the last pages became small enough.
    small: AtomicU32,
    /// Pages that were not tried since.
    skipped: AtomicU32,
    kept: AtomicU64,
    contents: Mutex<Contents>,
}

impl Default for CompressedPool {
    fn default() -> Self {
        Self::of_chunks(CHUNK_PAGES)
    }
}

impl CompressedPool {
    /// An empty pool, which takes memory in chunks of so many pages, which number their blocks in 16 bits.
    pub fn of_chunks(chunk_pages: u32) -> Self {
        Self {
            chunk_pages,
            most: AtomicU32::new(0),
            small: AtomicU32::new(ALL_SMALL),
            skipped: AtomicU32::new(0),
            kept: AtomicU64::new(0),
            contents: Mutex::default(),
        }
    }

    /// Pages that each chunk counts as: its own, and those of its index.
    fn chunk_cost(&self) -> u64 {
        u64::from(self.chunk_pages + self.chunk_pages.div_ceil(PAGES_PER_INDEX_PAGE))
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        // A panic elsewhere leaves an index that at worst names wrong bytes, and those are found out.
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has it take so many pages of memory at most; what is too much is given back now, and those who wait
    /// for room are to be told.
    pub fn set_capacity(&self, pages: u64, budget: &Budget) {
        let most = u32::try_from(pages / self.chunk_cost()).unwrap_or(u32::MAX);
        self.most.store(most, Ordering::Relaxed);
        while let Some(chunk) = self.take_surplus() {
            // The host's first, as others may take it then.
            drop(chunk);
            budget.release(self.chunk_cost());
        }
    }

    /// A chunk that there is beyond those that there may be.
    fn take_surplus(&self) -> Option<Chunk> {
        let mut contents = self.contents();
        // Another may have set a new number meanwhile.
        let most = self.most.load(Ordering::Relaxed) as usize;
        let chunk = (contents.chunks.len() > most).then(|| contents.drop_last())?;
        // Small pages lie close together in the first chunks, so that few or none went with the last. There were no
        // more than the index may hold before: those too many now are one chunk's at most.
        while contents.index.count > self.most_held(contents.chunks.len()) {
            contents.drop_oldest();
        }
        chunk
    }

    /// Pages that the index may hold with so many chunks.
    fn most_held(&self, chunks: usize) -> usize {
        chunks * self.chunk_pages as usize * HELD_PER_PAGE
    }

    /// Pages of memory that it takes, as they are counted.
    pub fn taken_pages(&self) -> u64 {
        self.contents().chunks.len() as u64 * self.chunk_cost()
    }

    /// Pages that are here.
    pub fn held_pages(&self) -> u64 {
        self.contents().index.count as u64
    }

    /// Pages that were compressed and kept, so far.
    pub fn kept_pages(&self) -> u64 {
        self.kept.load(Ordering::Relaxed)
    }

    /// Whether pages are kept at all.
    pub fn is_on(&self) -> bool {
        self.most.load(Ordering::Relaxed) > 0
    }

    /// Keeps a page that is about to leave, if it becomes small enough. `press` is made where it is needed.
    pub fn offer(
        &self,
        page: PageIndex,
        generation: Generation,
        bytes: &[u8],
        press: &mut Option<Press>,
        budget: &Budget,
    ) {
        if !self.is_on() {
            return;
        }
        self.give_back_idle(budget);
        if self.contents().has(page, generation) || !self.is_tried() {
            return;
        }
        let packed = press.get_or_insert_default().pack(bytes);
        self.note_tried(packed.is_some());
        let Some(packed) = packed else { return };
        let mut contents = self.contents();
        if self.makes_room(&mut contents, packed.len(), budget) {
            contents.push(page, generation, packed);
            self.kept.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether the next page is to be tried.
    fn is_tried(&self) -> bool {
        let skipped = || self.skipped.fetch_add(1, Ordering::Relaxed);
        self.small.load(Ordering::Relaxed) >= FEW_SMALL || skipped() % TRIED_ONE_IN == 0
    }

    fn note_tried(&self, is_small: bool) {
        // Of two that come at once one may go uncounted.
        let small = self.small.load(Ordering::Relaxed);
        let worth = if is_small { ALL_SMALL / 32 } else { 0 };
        self.small
            .store(small - small / 32 + worth, Ordering::Relaxed);
    }

    /// Takes what is here of a page at a generation into `bytes`, which are a page; what they are worth is to
    /// be checked. `packed` is room.
    pub fn take(
        &self,
        page: PageIndex,
        generation: Generation,
        packed: &mut Vec<u8>,
        bytes: &mut [u8],
    ) -> bool {
        self.is_on()
            && self.contents().take(page, generation, packed)
            && decompress_into(packed, bytes).is_ok_and(|length| length == bytes.len())
    }

    /// Gives a chunk back that is not needed.
    fn give_back_idle(&self, budget: &Budget) {
        let chunk = self.contents().take_idle(self.most_held(1));
        if chunk.is_some() {
            // The host's first, as others may take it then.
            drop(chunk);
            budget.release(self.chunk_cost());
        }
    }

    /// Sees that there is room for a page of so many bytes.
    fn makes_room(&self, contents: &mut Contents, bytes: usize, budget: &Budget) -> bool {
        loop {
            let most_held = self.most_held(contents.chunks.len());
            let has_blocks = contents.free >= bytes.div_ceil(BLOCK_BYTES);
            if has_blocks && contents.index.count < most_held {
                return true;
            }
            let most = self.most.load(Ordering::Relaxed) as usize;
            if contents.chunks.len() < most
                && let Some(chunk) = self.new_chunk(budget)
            {
                contents.add(chunk);
            } else if !contents.drop_oldest() {
                return false;
            }
        }
    }

    /// Another chunk, where nobody else is in need of its memory.
    fn new_chunk(&self, budget: &Budget) -> Option<Chunk> {
        let cost = self.chunk_cost();
        if budget.waiting() > 0 || budget.spare() < cost || !budget.acquire(cost) {
            return None;
        }
        let chunk = MmapRegion::new(self.chunk_pages as usize * PAGE_SIZE);
        if chunk.is_err() {
            budget.release(cost);
        }
        chunk.ok().map(Chunk::new)
    }
}

impl Contents {
    /// Blocks of a chunk.
    fn each(&self) -> usize {
        self.chunks.first().map_or(1, |chunk| chunk.owners.len())
    }

    fn add(&mut self, chunk: Chunk) {
        self.free += chunk.free.len();
        self.roomy.insert(self.chunks.len());
        self.chunks.push(chunk);
    }

    /// Takes the last chunk out, and has what lies in it lie elsewhere, where there are more by `IDLE_CHUNKS`
    /// than are in use. A chunk holds `most_held` pages at most.
    fn take_idle(&mut self, most_held: usize) -> Option<Chunk> {
        let each = self.each();
        let needed = self.index.count.div_ceil(most_held) + IDLE_CHUNKS;
        if self.free < IDLE_CHUNKS * each || self.chunks.len() < needed {
            return None;
        }
        // There is one for each in use: even without the last chunk's, a chunk's worth is left.
        self.close_last();
        let end = self.chunks.len() * each;
        (end - each..end).for_each(|block| self.move_block(block as u32));
        self.chunks.pop()
    }

    /// Takes the last chunk out, and drops what lies in it.
    fn drop_last(&mut self) -> Option<Chunk> {
        let end = self.chunks.len() * self.each();
        for block in end - self.each()..end {
            if let Some((page, _)) = self.lying_in(block as u32) {
                self.remove(page);
            }
        }
        self.close_last();
        self.chunks.pop()
    }

    /// Nothing is to come into the last chunk any more.
    fn close_last(&mut self) {
        if let Some(chunk) = self.chunks.last_mut() {
            self.free -= std::mem::take(&mut chunk.free).len();
            self.roomy.remove(&(self.chunks.len() - 1));
        }
    }

    /// The page that lies in a block, and as the how-manieth of its blocks.
    fn lying_in(&self, block: u32) -> Option<(PageIndex, usize)> {
        let each = self.each();
        let owner = self.chunks.get(block as usize / each)?.owners[block as usize % each];
        let held = self.index.get(owner)?;
        let place = held.blocks().iter().position(|other| *other == block)?;
        Some((owner, place))
    }

    /// Moves what is in a block, if there is something, to a free one.
    fn move_block(&mut self, from: u32) {
        let Some((owner, place)) = self.lying_in(from) else {
            return;
        };
        let Some(to) = self.take_block(owner) else {
            return;
        };
        let mut bytes = [0; BLOCK_BYTES];
        // Within a chunk they cannot fail; what was not moved would be found out when it is taken.
        let _ = self.at(from).map(|at| at.copy_to(&mut bytes));
        let _ = self.at(to).map(|at| at.copy_from(&bytes));
        if let Some(held) = self.index.get_mut(owner) {
            held.blocks[place] = to;
        }
    }

    /// A free block for a page: of the first chunk that has one, so that the last are not needed.
    fn take_block(&mut self, owner: PageIndex) -> Option<u32> {
        let (number, each) = (*self.roomy.first()?, self.each());
        let chunk = self.chunks.get_mut(number)?;
        let block = chunk.free.pop()?;
        chunk.owners[usize::from(block)] = owner;
        if chunk.free.is_empty() {
            self.roomy.remove(&number);
        }
        self.free -= 1;
        Some((number * each + usize::from(block)) as u32)
    }

    fn free_block(&mut self, block: u32) {
        let (number, each) = (block as usize / self.each(), self.each());
        if let Some(chunk) = self.chunks.get_mut(number) {
            chunk.free.push((block as usize % each) as u16);
            self.roomy.insert(number);
            self.free += 1;
        }
    }

    /// Whether the page is here; it counts as having come now.
    fn has(&mut self, page: PageIndex, generation: Generation) -> bool {
        let is_here = |held: &Held| held.generation == generation;
        let has = self.index.get(page).is_some_and(is_here);
        if has {
            self.index.renew(page);
        }
        has
    }

    /// There is room for it.
    fn push(&mut self, page: PageIndex, generation: Generation, packed: &[u8]) {
        self.remove(page);
        let mut held = Held {
            generation,
            older: NOBODY,
            younger: NOBODY,
            bytes: packed.len() as u16,
            blocks: [0; MOST_BLOCKS],
        };
        for (place, part) in packed.chunks(BLOCK_BYTES).enumerate() {
            let Some(block) = self.take_block(page) else {
                return;
            };
            held.blocks[place] = block;
            // Within a chunk it cannot fail; what was not written would be found out when it is taken.
            let _ = self.at(block).map(|at| at.copy_from(part));
        }
        self.index.insert(page, held);
    }

    fn take(&mut self, page: PageIndex, generation: Generation, packed: &mut Vec<u8>) -> bool {
        let Some(held) = self.remove(page) else {
            return false;
        };
        packed.resize(held.bytes.into(), 0);
        let parts = packed.chunks_mut(BLOCK_BYTES).zip(held.blocks());
        held.generation == generation
            && parts.into_iter().all(|(part, block)| {
                self.at(*block)
                    .is_some_and(|at| at.copy_to(part) == part.len())
            })
    }

    /// A block's memory.
    fn at(&self, block: u32) -> Option<VolatileSlice<'_>> {
        let each = self.each();
        let chunk = self.chunks.get(block as usize / each)?;
        let offset = block as usize % each * BLOCK_BYTES;
        chunk.memory.get_slice(offset, BLOCK_BYTES).ok()
    }

    /// Frees what a page has here; its bytes stay until the blocks are another's.
    fn remove(&mut self, page: PageIndex) -> Option<Held> {
        let held = self.index.remove(page)?;
        held.blocks()
            .iter()
            .for_each(|block| self.free_block(*block));
        Some(held)
    }

    /// Whether there was one.
    fn drop_oldest(&mut self) -> bool {
        self.remove(self.index.oldest).is_some()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::engine::PageSize;

    const FIRST: Generation = Generation(1);

    /// A pool of chunks of a page, each of which counts as two.
    fn pool(chunks: u64) -> (CompressedPool, Budget) {
        let (pool, budget) = (
            CompressedPool::of_chunks(1),
            Budget::new(100, PageSize::BASE),
        );
        pool.set_capacity(2 * chunks, &budget);
        (pool, budget)
    }

    /// A page of which so many bytes do not compress, and the rest do.
    fn page_of(random_bytes: usize, seed: u64) -> Vec<u8> {
        let mut state = seed.wrapping_mul(2).wrapping_add(1);
        let mut bytes = vec![seed as u8; PAGE_SIZE];
        for byte in &mut bytes[..random_bytes] {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
        bytes
    }

    fn offer(
        (pool, budget): &(CompressedPool, Budget),
        page: u32,
        generation: Generation,
        bytes: &[u8],
    ) {
        pool.offer(PageIndex(page), generation, bytes, &mut None, budget);
    }

    /// What is taken.
    fn found(
        (pool, _): &(CompressedPool, Budget),
        page: u32,
        generation: Generation,
    ) -> Option<Vec<u8>> {
        let mut bytes = vec![0; PAGE_SIZE];
        let is_found = pool.take(PageIndex(page), generation, &mut Vec::new(), &mut bytes);
        is_found.then_some(bytes)
    }

    #[test]
    fn what_is_found_is_what_was_offered() {
        let pool = pool(4);
        for (page, random_bytes) in [(1, 0), (2, 500), (3, 1900)] {
            let bytes = page_of(random_bytes, page.into());
            offer(&pool, page, FIRST, &bytes);
            assert_eq!(found(&pool, page, FIRST), Some(bytes));
        }
        assert_eq!(found(&pool, 4, FIRST), None);
        assert_eq!(found(&pool, 3, FIRST), None, "it was taken");
        assert_eq!((pool.0.held_pages(), pool.0.kept_pages()), (0, 3));
    }

    #[test]
    fn pages_that_stay_large_are_not_kept_and_after_many_few_are_tried() {
        let pool = pool(40);
        let (large, small) = (page_of(2100, 1), page_of(100, 2));
        for page in 0..2000 {
            offer(&pool, page, FIRST, &large);
        }
        assert_eq!((pool.0.held_pages(), pool.1.used()), (0, 0));
        for page in 0..2 * TRIED_ONE_IN {
            offer(&pool, page, FIRST, &small);
        }
        assert_eq!(pool.0.held_pages(), 2);
        // Once some became small, all are tried again.
        for page in 0..100 {
            offer(&pool, page, FIRST, &small);
        }
        let before = pool.0.kept_pages();
        for page in 100..110 {
            offer(&pool, page, FIRST, &small);
        }
        assert_eq!(pool.0.kept_pages(), before + 10);
    }

    #[test]
    fn memory_is_counted_while_it_is_taken() {
        let pool = pool(3);
        let bytes = page_of(1700, 1);
        // Two of them fill a page.
        for page in 0..20 {
            offer(&pool, page, FIRST, &bytes);
        }
        assert_eq!((pool.0.taken_pages(), pool.1.used()), (6, 6));
        assert_eq!(pool.0.held_pages(), 6);
        pool.0.set_capacity(2, &pool.1);
        assert_eq!((pool.0.taken_pages(), pool.1.used()), (2, 2));
        assert_eq!(pool.0.held_pages(), 2);
        offer(&pool, 30, FIRST, &bytes);
        assert_eq!(found(&pool, 30, FIRST), Some(bytes.clone()));
        pool.0.set_capacity(0, &pool.1);
        offer(&pool, 31, FIRST, &bytes);
        assert_eq!((pool.0.held_pages(), pool.1.used()), (0, 0));
        assert!(!pool.0.is_on());
    }

    #[test]
    fn memory_is_given_back_where_what_it_held_was_taken() {
        let pool = pool(6);
        // Each has a half of a chunk's blocks.
        let page = |page: u32| page_of(1700, page.into());
        for number in 0..12 {
            offer(&pool, number, FIRST, &page(number));
        }
        assert_eq!((pool.0.held_pages(), pool.1.used()), (12, 12));
        for number in [0, 3, 4, 7, 8] {
            assert_eq!(found(&pool, number, FIRST), Some(page(number)));
        }
        let again = || offer(&pool, 1, FIRST, &page(1));
        again();
        again();
        assert_eq!((pool.0.held_pages(), pool.1.used()), (7, 10));
        for number in [2, 6, 5, 10] {
            assert_eq!(found(&pool, number, FIRST), Some(page(number)));
            again();
        }
        assert_eq!((pool.0.held_pages(), pool.1.used()), (3, 6));
        for number in [1, 9, 11] {
            assert_eq!(found(&pool, number, FIRST), Some(page(number)));
        }
        let contents = pool.0.contents();
        assert_eq!(contents.free, contents.chunks.len() * contents.each());
    }

    #[test]
    fn memory_is_kept_where_very_small_pages_need_its_index() {
        let pool = pool(6);
        for page in 0..6 * HELD_PER_PAGE as u32 {
            offer(&pool, page, FIRST, &page_of(10, 1));
        }
        for _ in 0..10 {
            offer(&pool, 1, FIRST, &page_of(10, 1));
        }
        let all = (6 * HELD_PER_PAGE as u64, 12);
        assert_eq!((pool.0.held_pages(), pool.1.used()), all);
    }

    #[test]
    fn no_memory_is_taken_that_others_need() {
        let pool = pool(3);
        let bytes = page_of(100, 1);
        pool.1.force(99);
        offer(&pool, 1, FIRST, &bytes);
        pool.1.release(50);
        pool.1.start_waiting();
        offer(&pool, 2, FIRST, &bytes);
        assert_eq!((pool.0.held_pages(), pool.1.used()), (0, 49));
        pool.1.end_waiting();
        offer(&pool, 3, FIRST, &bytes);
        assert_eq!((pool.0.held_pages(), pool.1.used()), (1, 51));
    }

    #[test]
    fn the_oldest_go_first_and_what_left_again_is_young() {
        let pool = pool(2);
        let bytes = page_of(1700, 1);
        for page in 0..4 {
            offer(&pool, page, FIRST, &bytes);
        }
        offer(&pool, 0, FIRST, &bytes);
        offer(&pool, 4, FIRST, &bytes);
        let there = [0, 1, 2, 3, 4].map(|page| found(&pool, page, FIRST).is_some());
        assert_eq!(there, [true, false, true, true, true]);
    }

    #[test]
    fn the_index_is_bounded_where_pages_become_very_small() {
        let pool = pool(2);
        let bytes = page_of(10, 1);
        for page in 0..20 {
            offer(&pool, page, FIRST, &bytes);
        }
        assert_eq!(pool.0.held_pages(), 2 * HELD_PER_PAGE as u64);
    }

    #[test]
    fn what_is_taken_and_put_back_for_ever_leaves_nothing_behind() {
        let pool = pool(2);
        let bytes = page_of(500, 1);
        for _ in 0..1000 {
            offer(&pool, 1, FIRST, &bytes);
            assert_eq!(found(&pool, 1, FIRST), Some(bytes.clone()));
        }
        let contents = pool.0.contents();
        let nobody = (contents.index.oldest, contents.index.youngest);
        assert_eq!(nobody, (NOBODY, NOBODY));
        assert_eq!(contents.free, contents.chunks.len() * contents.each());
    }

    /// Bytes that are taken beside the chunks.
    fn bookkeeping_bytes(contents: &Contents) -> usize {
        // A place and what its map notes of it; seven of eight may be used.
        let place = size_of::<(PageIndex, Held)>() + 1;
        let parts = contents.index.parts.iter();
        let index: usize = parts.map(|part| part.capacity() * 8 / 7 * place).sum();
        let of_chunk =
            |chunk: &Chunk| size_of_val(&*chunk.owners) + chunk.free.capacity() * size_of::<u16>();
        index + contents.chunks.iter().map(of_chunk).sum::<usize>()
    }

    #[test]
    fn bookkeeping_takes_no_more_than_is_counted_for_it() {
        let (pool, budget) = (
            CompressedPool::default(),
            Budget::new(100_000, PageSize::BASE),
        );
        let pool = (pool, budget);
        pool.0.set_capacity(50_000, &pool.1);
        let chunks = |pages: u64| pages / pool.0.chunk_cost();
        let check = || {
            let contents = pool.0.contents();
            let chunks = contents.chunks.len() as u64;
            let counted = chunks * (pool.0.chunk_cost() - u64::from(CHUNK_PAGES));
            let taken = bookkeeping_bytes(&contents);
            assert!(
                taken as u64 <= counted * PAGE_SIZE as u64,
                "{taken} bytes, {chunks} chunks"
            );
        };
        // As many as the index may hold, and what it grows by on the way there.
        let most = chunks(50_000) as u32 * CHUNK_PAGES * HELD_PER_PAGE as u32;
        for page in 0..most {
            offer(&pool, page, FIRST, &page_of(10, 1));
            if page % 1000 == 999 {
                check();
            }
        }
        assert_eq!(pool.0.held_pages(), u64::from(most));
        for page in 0..most - 1000 {
            assert!(found(&pool, page, FIRST).is_some());
            pool.0.give_back_idle(&pool.1);
            if page % 1000 == 999 {
                check();
            }
        }
        assert!(chunks(pool.0.taken_pages()) < 20);
    }

    #[test]
    fn a_chunk_is_given_up_at_a_time() {
        let pool = pool(6);
        for page in 0..12 {
            offer(&pool, page, FIRST, &page_of(1700, page.into()));
        }
        pool.0.most.store(2, Ordering::Relaxed);
        for left in (2..6).rev() {
            assert!(pool.0.take_surplus().is_some());
            let contents = pool.0.contents();
            assert_eq!(contents.chunks.len(), left);
            let used: usize = contents
                .index
                .parts
                .iter()
                .flat_map(HashMap::values)
                .map(|held| held.blocks().len())
                .sum();
            assert_eq!(contents.free + used, left * contents.each());
        }
        assert!(pool.0.take_surplus().is_none());
    }

    #[test]
    fn the_index_shrinks_with_each_chunk_that_is_given_up() {
        let pool = pool(6);
        let bytes = page_of(10, 1);
        // They lie in the first two chunks, of 16 blocks each.
        for page in 0..6 * HELD_PER_PAGE as u32 {
            offer(&pool, page, FIRST, &bytes);
        }
        pool.0.most.store(3, Ordering::Relaxed);
        for left in (3..6).rev() {
            let before = pool.0.held_pages();
            assert!(pool.0.take_surplus().is_some());
            let held = pool.0.held_pages();
            assert_eq!(held, left * HELD_PER_PAGE as u64);
            assert_eq!(before - held, HELD_PER_PAGE as u64, "one chunk's at a time");
        }
        pool.0.set_capacity(2, &pool.1);
        assert!(pool.0.held_pages() <= HELD_PER_PAGE as u64);
        // What comes next drops no more than it would otherwise.
        for page in 30..40 {
            offer(&pool, page, FIRST, &bytes);
        }
        assert_eq!(pool.0.held_pages(), HELD_PER_PAGE as u64);
    }

    #[test]
    fn an_earlier_content_is_not_found_and_is_forgotten() {
        let pool = pool(2);
        offer(&pool, 1, FIRST, &page_of(10, 1));
        assert_eq!(found(&pool, 1, FIRST.next()), None);
        assert_eq!(pool.0.held_pages(), 0);
        for (generation, seed) in [(FIRST, 1), (FIRST.next(), 2)] {
            offer(&pool, 1, generation, &page_of(10, seed));
        }
        assert_eq!(pool.0.held_pages(), 1);
        assert_eq!(found(&pool, 1, FIRST.next()), Some(page_of(10, 2)));
    }

    proptest! {
        /// The oldest is the one that came, or came again, before all others.
        #[test]
        fn pages_are_known_in_the_order_in_which_they_came(
            steps in prop::collection::vec((0..200u32, 0..4u32), 1..300)
        ) {
            let mut index = Index::default();
            let mut known: Vec<PageIndex> = Vec::new();
            let held = Held {
                generation: FIRST,
                older: NOBODY,
                younger: NOBODY,
                bytes: 0,
                blocks: [0; MOST_BLOCKS],
            };
            for (page, what) in steps {
                let page = match what {
                    3 => index.oldest,
                    _ => PageIndex(page),
                };
                let was_here = known.contains(&page);
                known.retain(|other| *other != page);
                match (what, was_here) {
                    (0 | 1, true) => index.renew(page),
                    (0 | 1, false) => index.insert(page, held),
                    _ => prop_assert_eq!(index.remove(page).is_some(), was_here),
                }
                if what < 2 {
                    known.push(page);
                }
                prop_assert_eq!(index.count, known.len());
                let from = |page| index.get(page).map(|held| held.younger);
                let oldest = (index.oldest != NOBODY).then_some(index.oldest);
                let order = std::iter::successors(oldest, |page| from(*page).filter(|next| *next != NOBODY));
                prop_assert_eq!(&order.collect::<Vec<_>>(), &known);
                prop_assert_eq!(index.youngest, known.last().copied().unwrap_or(NOBODY));
            }
        }

        /// Whatever is found is what was last offered of that page, and memory is never taken beyond
        /// what is allowed.
        #[test]
        fn it_is_never_wrong_and_never_too_large(
            steps in prop::collection::vec((0..12u32, 0..2000usize, 0..10u32), 1..200)
        ) {
            let pool = pool(4);
            let mut allowed = 8;
            let mut last: HashMap<u32, (Generation, Vec<u8>)> = HashMap::default();
            for (number, (page, random_bytes, what)) in steps.into_iter().enumerate() {
                match what {
                    0 => {
                        allowed = 2 * u64::from(page % 5);
                        pool.0.set_capacity(allowed, &pool.1);
                    }
                    1..6 => {
                        let generation = Generation(number as u64);
                        let bytes = page_of(random_bytes, number as u64);
                        offer(&pool, page, generation, &bytes);
                        last.insert(page, (generation, bytes));
                    }
                    6..8 => {
                        if let Some((generation, bytes)) = last.get(&page) {
                            offer(&pool, page, *generation, bytes);
                        }
                    }
                    _ => {
                        if let Some((generation, bytes)) = last.get(&page)
                            && let Some(found) = found(&pool, page, *generation)
                        {
                            prop_assert_eq!(&found, bytes);
                        }
                    }
                }
                prop_assert_eq!(pool.0.taken_pages(), pool.1.used());
                prop_assert!(pool.1.used() <= allowed);
                // A chunk counts as two pages, and is one.
                prop_assert!(pool.0.held_pages() <= allowed / 2 * HELD_PER_PAGE as u64);
            }
        }
    }
}
