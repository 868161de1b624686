//! An open disk: blocks to and from the slabs of its extents.
//!
//! A block and its entry are written by one request, which a server carries out whole or not at
//! all, and acknowledged before the caller goes on. So a block is never in any state but before or
//! after a write, also for whoever loads the disk from its slabs later. An interrupted change leaves
//! it open which; it is looked up before the block is used again. The table says of each change that it
//! is under way before it is sent, so that whoever goes on after this process knows where to look.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use super::DiskFault;
use super::block_keys::BlockKeys;
use super::extents::{Extents, Place, StoredExtent, runs_of};
use super::layout::{BLOCK, ENTRY, Entry, HEADER, Layout, Run, encode_header, entries};
use super::line::{Line, Over};
use super::ranges::{Hold, Ranges};
use crate::engine::seal::Refused;
use crate::engine::tag::{TagKey, fill_word};
use crate::engine::{Generation, PageIndex};
use crate::interrupt::Interrupt;

/// Most blocks that one request to a server moves: 1 MiB, as much as a guest's request.
const MOST_BLOCKS: u32 = 256;
/// Blocks that are not written, and are fetched with those around them rather than these one by one: 32 KiB are on
/// their way for less than an answer takes.
const MOST_SKIPPED: u32 = 8;
/// Most blocks whose entries one request clears: 1 MiB of entries.
const MOST_CLEARED: u32 = (1 << 20) / ENTRY as u32;

/// An open disk.
pub(super) struct Store {
    pub(super) layout: Layout,
    pub(super) lines: Vec<Line>,
    pub(super) extents: Extents,
    ranges: Ranges,
    keys: StoreKeys,
    /// From here on generations are this opening's own.
    first_generation: u64,
    written_blocks: AtomicI64,
}

/// The keys of an opening.
pub(super) struct StoreKeys {
    /// Of the slabs' headers.
    pub(super) headers: TagKey,
    /// Of blocks.
    pub(super) blocks: BlockKeys,
}

impl Store {
    /// A disk of which `extents` are written; those from `first_generation` on by this opening.
    pub(super) fn new(
        layout: Layout,
        lines: Vec<Line>,
        keys: StoreKeys,
        extents: Extents,
        first_generation: u64,
        written_blocks: u64,
    ) -> Self {
        Self {
            layout,
            lines,
            extents,
            ranges: Ranges::default(),
            keys,
            first_generation,
            written_blocks: AtomicI64::new(written_blocks as i64),
        }
    }

    /// Bytes of blocks that are written.
    pub(super) fn written_bytes(&self) -> u64 {
        let blocks = self.written_blocks.load(Ordering::Relaxed);
        blocks.max(0) as u64 * BLOCK as u64
    }

    /// Why a part of the disk is of no use any more, if so.
    pub(super) fn over(&self) -> Option<Over> {
        self.lines.iter().find_map(|line| line.state.over())
    }

    /// Reads from `offset` on.
    pub(super) fn read(
        &self,
        offset: u64,
        into: &mut [u8],
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskFault> {
        let blocks = touched(offset, into.len() as u64);
        for (extent, run) in self.layout.runs(blocks, MOST_BLOCKS) {
            {
                let _hold = self.hold(extent, run, true, interrupt)?;
                self.read_run(extent, run, (offset, &mut *into), interrupt)?;
            }
            // Whoever emptied it meanwhile left it to us.
            self.release_if_empty(extent, interrupt)?;
        }
        Ok(())
    }

    /// Reads what of a run, which is held, lies among the bytes from an offset on.
    fn read_run(
        &self,
        extent: u32,
        run: Run,
        (offset, into): (u64, &mut [u8]),
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskFault> {
        let start = self.start_of(extent, run);
        if let Some(part) = self.aligned_part(offset, into, start, run) {
            return self.read_blocks(extent, run, part, interrupt);
        }
        let mut bytes = vec![0; run.count as usize * BLOCK];
        self.read_blocks(extent, run, &mut bytes, interrupt)?;
        let (from, to, length) = overlap(start, bytes.len(), offset, into.len());
        into[to..to + length].copy_from_slice(&bytes[from..from + length]);
        Ok(())
    }

    /// Writes from `offset` on.
    pub(super) fn write(
        &self,
        offset: u64,
        from: &[u8],
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskFault> {
        let blocks = touched(offset, from.len() as u64);
        for (extent, run) in self.layout.runs(blocks, MOST_BLOCKS) {
            let start = self.start_of(extent, run);
            let (to, at, length) = overlap(start, run.count as usize * BLOCK, offset, from.len());
            let change = Change {
                extent,
                run,
                start: to,
                bytes: &from[at..at + length],
            };
            self.change(&change, interrupt)?;
        }
        Ok(())
    }

    /// Makes `length` bytes from `offset` on read as zeros, and gives their room back.
    pub(super) fn zero(
        &self,
        offset: u64,
        length: u64,
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskFault> {
        let end = offset + length;
        let first_whole = offset.next_multiple_of(BLOCK as u64).min(end);
        let last_whole = (end / BLOCK as u64 * BLOCK as u64).max(first_whole);
        for (start, end) in [(offset, first_whole), (last_whole, end)] {
            if start < end {
                let zeros = vec![0; (end - start) as usize];
                self.write(start, &zeros, interrupt)?;
            }
        }
        let blocks = touched(first_whole, last_whole - first_whole);
        for (extent, run) in self.layout.runs(blocks, u32::MAX) {
            self.clear(extent, run, interrupt)?;
        }
        Ok(())
    }

    /// Gives up whole blocks of an extent, and its slab if nothing else is in it.
    pub(super) fn clear(
        &self,
        extent: u32,
        run: Run,
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskFault> {
        {
            let _hold = self.hold(extent, run, false, interrupt)?;
            let Some(stored) = self.extents.get(extent) else {
                return Ok(());
            };
            if run.count == self.layout.blocks_of(extent) {
                return self.release(extent, &stored, interrupt);
            }
            self.settle(&stored, run, interrupt)?;
            self.clear_entries(&stored, run, interrupt)?;
        }
        self.release_if_empty(extent, interrupt)
    }

    fn hold(
        &self,
        extent: u32,
        run: Run,
        shared: bool,
        interrupt: &Interrupt<'_>,
    ) -> Result<Hold<'_>, DiskFault> {
        let first = self.layout.block(extent, run.first);
        let blocks = first..first + run.count;
        self.ranges.hold(blocks, shared, interrupt)
    }

    fn whole(&self, extent: u32) -> Run {
        Run {
            first: 0,
            count: self.layout.blocks_of(extent),
        }
    }

    /// Where a run begins on the disk, in bytes.
    fn start_of(&self, extent: u32, run: Run) -> u64 {
        u64::from(self.layout.block(extent, run.first)) * BLOCK as u64
    }

    /// The part of `bytes`, which lie from `offset` on, that is exactly the run.
    fn aligned_part<'a>(
        &self,
        offset: u64,
        bytes: &'a mut [u8],
        start: u64,
        run: Run,
    ) -> Option<&'a mut [u8]> {
        let at = usize::try_from(start.checked_sub(offset)?).ok()?;
        bytes.get_mut(at..at + run.count as usize * BLOCK)
    }

    /// Reads whole blocks whose range is held.
    fn read_blocks(
        &self,
        extent: u32,
        run: Run,
        into: &mut [u8],
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskFault> {
        let Some(stored) = self.extents.get(extent) else {
            into.fill(0);
            return Ok(());
        };
        // What was read stays so when the disk is left, though the release that was under way is never ended.
        self.ensure_header(&stored, interrupt)?;
        self.settle(&stored, run, interrupt)?;
        let spans = spans(&stored.pieces(run));
        if spans != [run] {
            into.fill(0);
        }
        for span in spans {
            let at = (span.first - run.first) as usize * BLOCK;
            let part = &mut into[at..at + span.count as usize * BLOCK];
            self.fetch(&stored, span, part, interrupt)?;
        }
        Ok(())
    }

    /// Fetches blocks, and opens each that is written: others are zeros, whatever comes for them.
    fn fetch(
        &self,
        stored: &StoredExtent,
        run: Run,
        into: &mut [u8],
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskFault> {
        let places = [
            self.layout.blocks_at(stored.place.slab, run),
            self.layout.entries_at(stored.place.slab, run),
        ];
        let mut opened = Ok(());
        let open = |bytes: &mut [u8]| {
            let (blocks, told) = bytes.split_at_mut(run.count as usize * BLOCK);
            opened = self.open_blocks(stored, run, blocks, told);
            if opened.is_ok() {
                into.copy_from_slice(blocks);
            }
        };
        self.line(stored).read_in_place(&places, interrupt, open)?;
        opened
    }

    /// Opens the blocks of a run in place, by the entries that came with them.
    fn open_blocks(
        &self,
        stored: &StoredExtent,
        run: Run,
        blocks: &mut [u8],
        told: &[u8],
    ) -> Result<(), DiskFault> {
        let contents = blocks.chunks_exact_mut(BLOCK).zip(entries(told));
        for (place, (block, entry)) in run.places().zip(contents) {
            if !stored.is_written(place) {
                block.fill(0);
                continue;
            }
            let number = self.layout.block(stored.place.extent, place);
            let is_current = entry.generation == stored.generation(place) && self.may_be(&entry);
            if !is_current || self.open(number, &entry, block).is_err() {
                return Err(DiskFault::Corrupt { block: number });
            }
        }
        Ok(())
    }

    /// Whether an entry may be of its generation: an earlier opening came by the same ones where it
    /// was told of others than we.
    fn may_be(&self, entry: &Entry) -> bool {
        entry.generation < self.first_generation || entry.salt == self.keys.blocks.salt()
    }

    fn open(&self, block: u32, entry: &Entry, bytes: &mut [u8]) -> Result<(), Refused> {
        let key = self.keys.blocks.of(entry.salt);
        let generation = Generation(entry.generation);
        key.open(PageIndex(block), generation, entry.tag, bytes)
    }

    /// Makes of a block what may leave, in place; its entry.
    fn seal(&self, block: u32, generation: u64, bytes: &mut [u8]) -> Entry {
        let key = self.keys.blocks.own();
        Entry {
            generation,
            salt: self.keys.blocks.salt(),
            tag: key.seal(PageIndex(block), Generation(generation), bytes),
        }
    }

    /// Makes a change, once there is a slab for it.
    fn change(&self, change: &Change<'_>, interrupt: &Interrupt<'_>) -> Result<(), DiskFault> {
        let extent = change.extent;
        {
            let zeros = change.bytes.iter().all(|byte| *byte == 0);
            let hold = self.hold(extent, change.run, false, interrupt)?;
            let (_hold, stored) = match self.extents.get(extent) {
                Some(stored) => (hold, stored),
                // Reads as zeros already.
                None if zeros => return Ok(()),
                None => {
                    // Nobody else may find the extent without a slab meanwhile.
                    drop(hold);
                    let hold = self.hold(extent, self.whole(extent), false, interrupt)?;
                    let stored = match self.extents.get(extent) {
                        Some(stored) => stored,
                        None => self.begin(extent, interrupt)?,
                    };
                    (hold, stored)
                }
            };
            self.write_blocks(&stored, change, interrupt)?;
        }
        self.release_if_empty(extent, interrupt)
    }

    /// The line to the server that has set room aside for an extent: by the part that each was made for, for
    /// whoever claims the disk may name its servers in another order.
    fn line_of(&self, extent: u32) -> usize {
        let part = extent as usize % self.lines.len();
        let is_of_part = |line: &Line| {
            let disk = line.session.disk();
            disk.is_some_and(|disk| disk.shape.part as usize == part)
        };
        self.lines.iter().position(is_of_part).unwrap_or(part)
    }

    /// Leases a slab for an extent, whose whole range is held, and marks it as the extent's.
    fn begin(
        &self,
        extent: u32,
        interrupt: &Interrupt<'_>,
    ) -> Result<Arc<StoredExtent>, DiskFault> {
        let number = self.line_of(extent);
        let line = &self.lines[number];
        let slab = line.lease(interrupt)?;
        let header = encode_header(&self.keys.headers, extent);
        let written = line.write(&[self.layout.header_at(slab)], &[&header], interrupt);
        if let Err(error) = written {
            line.session.release_slab(slab);
            return Err(error);
        }
        let place = Place {
            extent,
            line: number,
            slab,
        };
        let none = (0..self.layout.blocks_of(extent)).map(|_| 0);
        let stored = StoredExtent::new(self.extents.table(), &self.layout, place, none);
        Ok(self.extents.insert(extent, stored))
    }

    /// Writes blocks whose range is held: what the change leaves of its first and last block is read
    /// before.
    fn write_blocks(
        &self,
        stored: &StoredExtent,
        change: &Change<'_>,
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskFault> {
        self.ensure_header(stored, interrupt)?;
        let run = change.run;
        let whole = run.count as usize * BLOCK;
        let merged: Vec<u8>;
        let bytes = match change.bytes.len() == whole {
            true => change.bytes,
            false => {
                merged = self.merge(change, interrupt)?;
                &merged
            }
        };
        let block = |place: u32| {
            let at = (place - run.first) as usize * BLOCK;
            &bytes[at..at + BLOCK]
        };
        for (piece, zeros) in runs_of(run, |place| fill_word(block(place)) == Some(0)) {
            if zeros {
                self.settle(stored, piece, interrupt)?;
                self.clear_entries(stored, piece, interrupt)?;
                continue;
            }
            let generations: Vec<u64> = piece
                .places()
                .map(|_| self.extents.table().draw_generation())
                .collect();
            let mut told = Vec::with_capacity(piece.count as usize * ENTRY);
            let at = (piece.first - run.first) as usize * BLOCK;
            let mut sealed = bytes[at..at + piece.count as usize * BLOCK].to_vec();
            let blocks = piece.places().zip(sealed.chunks_exact_mut(BLOCK));
            for ((place, block), generation) in blocks.zip(&generations) {
                let number = self.layout.block(change.extent, place);
                told.extend_from_slice(&self.seal(number, *generation, block).encode());
            }
            let payload = [&sealed[..], &told];
            let places = [
                self.layout.blocks_at(stored.place.slab, piece),
                self.layout.entries_at(stored.place.slab, piece),
            ];
            announce(stored, piece, &generations);
            let written = self.line(stored).write(&places, &payload, interrupt);
            self.note(stored, piece, &generations, written)?;
        }
        Ok(())
    }

    /// Marks a slab as its extent's again, should that be in doubt.
    fn ensure_header(
        &self,
        stored: &StoredExtent,
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskFault> {
        if stored.may_lack_header() {
            let header = encode_header(&self.keys.headers, stored.place.extent);
            let at = self.layout.header_at(stored.place.slab);
            self.line(stored).write(&[at], &[&header], interrupt)?;
            stored.set_may_lack_header(false);
        }
        Ok(())
    }

    fn line(&self, stored: &StoredExtent) -> &Line {
        &self.lines[stored.place.line]
    }

    /// The blocks of a change with what the change leaves of them.
    fn merge(&self, change: &Change<'_>, interrupt: &Interrupt<'_>) -> Result<Vec<u8>, DiskFault> {
        let (extent, run) = (change.extent, change.run);
        let mut merged = vec![0; run.count as usize * BLOCK];
        let end = change.start + change.bytes.len();
        let first_is_cut = !change.start.is_multiple_of(BLOCK);
        let last_is_cut = !end.is_multiple_of(BLOCK) && (run.count > 1 || !first_is_cut);
        let last = run.end() - 1;
        for (cut, place) in [(first_is_cut, run.first), (last_is_cut, last)] {
            if cut {
                let one = Run {
                    first: place,
                    count: 1,
                };
                let at = (place - run.first) as usize * BLOCK;
                self.read_blocks(extent, one, &mut merged[at..at + BLOCK], interrupt)?;
            }
        }
        merged[change.start..end].copy_from_slice(change.bytes);
        Ok(merged)
    }

    /// Marks blocks whose range is held, and that are settled, as not written.
    fn clear_entries(
        &self,
        stored: &StoredExtent,
        run: Run,
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskFault> {
        for (piece, written) in stored.pieces(run) {
            let mut first = piece.first;
            while written && first < piece.end() {
                let count = MOST_CLEARED.min(piece.end() - first);
                let part = Run { first, count };
                let place = self.layout.entries_at(stored.place.slab, part);
                let zeros = vec![0; place.length as usize];
                let none = vec![0; count as usize];
                announce(stored, part, &none);
                let cleared = self.line(stored).write(&[place], &[&zeros], interrupt);
                self.note(stored, part, &none, cleared)?;
                first += count;
            }
        }
        Ok(())
    }

    /// Notes what became of blocks that were to have these generations.
    fn note(
        &self,
        stored: &StoredExtent,
        run: Run,
        generations: &[u64],
        outcome: Result<(), DiskFault>,
    ) -> Result<(), DiskFault> {
        for (place, generation) in run.places().zip(generations) {
            match &outcome {
                Ok(()) => {
                    let change = stored.set_generation(place, *generation);
                    self.written_blocks.fetch_add(change, Ordering::Relaxed);
                }
                Err(DiskFault::Interrupted) => stored.doubt(place, *generation),
                // The server is lost, and everything on it.
                Err(_) => {}
            }
        }
        outcome
    }

    /// Finds out what became of blocks whose last change was interrupted.
    fn settle(
        &self,
        stored: &StoredExtent,
        run: Run,
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskFault> {
        if !stored.has_doubts(run) {
            return Ok(());
        }
        for place in run.places() {
            let Some(candidates) = stored.candidates(place) else {
                continue;
            };
            let one = Run {
                first: place,
                count: 1,
            };
            let at = self.layout.entries_at(stored.place.slab, one);
            let bytes = self.line(stored).read(&[at], interrupt)?;
            let told = entries(&bytes).next().map(|entry| entry.generation);
            match told {
                Some(generation) if candidates.contains(&generation) => {
                    let change = stored.set_generation(place, generation);
                    self.written_blocks.fetch_add(change, Ordering::Relaxed);
                }
                // Left in doubt: it is an error until it is written whole.
                _ => {
                    let block = self.layout.block(stored.place.extent, place);
                    return Err(DiskFault::Corrupt { block });
                }
            }
        }
        Ok(())
    }

    /// Releases an extent's slab if nothing is written there and nobody uses it at the moment;
    /// otherwise whoever leaves it last does.
    fn release_if_empty(&self, extent: u32, interrupt: &Interrupt<'_>) -> Result<(), DiskFault> {
        let is_empty = |stored: &Arc<StoredExtent>| {
            stored.written() == 0 && !stored.has_doubts(self.whole(extent))
        };
        if !self.extents.get(extent).is_some_and(|own| is_empty(&own)) {
            return Ok(());
        }
        let first = self.layout.block(extent, 0);
        let whole = first..first + self.layout.blocks_of(extent);
        let Some(_hold) = self.ranges.try_hold(whole) else {
            return Ok(());
        };
        match self.extents.get(extent) {
            Some(stored) if is_empty(&stored) => self.release(extent, &stored, interrupt),
            _ => Ok(()),
        }
    }

    /// Gives an extent's slab back; its whole range is held.
    fn release(
        &self,
        extent: u32,
        stored: &StoredExtent,
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskFault> {
        let line = &self.line(stored);
        // Without its header it is nothing, should the release not arrive before the disk is parked.
        let header = self.layout.header_at(stored.place.slab);
        match line.write(&[header], &[&[0; HEADER]], interrupt) {
            Ok(()) => {
                let written = i64::from(stored.written());
                self.written_blocks.fetch_sub(written, Ordering::Relaxed);
                self.extents.remove(extent);
                line.session.release_slab(stored.place.slab);
                Ok(())
            }
            Err(error) => {
                // It stays, whether or not the server has its header still.
                stored.set_may_lack_header(true);
                Err(error)
            }
        }
    }
}

/// What is to be fetched of pieces that are written or not: what is written, by one request where little lies
/// between.
fn spans(pieces: &[(Run, bool)]) -> Vec<Run> {
    let mut spans: Vec<Run> = Vec::new();
    for (piece, _) in pieces.iter().filter(|(_, written)| *written) {
        match spans.last_mut() {
            Some(span) if piece.first - span.end() <= MOST_SKIPPED => {
                span.count = piece.end() - span.first;
            }
            _ => spans.push(*piece),
        }
    }
    spans
}

/// Notes, for a successor, which blocks are about to be given which generations.
fn announce(stored: &StoredExtent, run: Run, generations: &[u64]) {
    for (place, generation) in run.places().zip(generations) {
        stored.announce(place, *generation);
    }
}

/// Bytes to be stored, in blocks of one extent.
struct Change<'a> {
    extent: u32,
    run: Run,
    /// Where in the run the bytes begin.
    start: usize,
    bytes: &'a [u8],
}

/// The blocks that a range of bytes touches.
fn touched(offset: u64, length: u64) -> std::ops::Range<u32> {
    let block = BLOCK as u64;
    if length == 0 {
        return 0..0;
    }
    // Within the disk, whose blocks have 32 bits.
    (offset / block) as u32..(offset + length).div_ceil(block) as u32
}

/// Where a run of `run_bytes` from `start` on and `length` bytes from `offset` on meet: within the
/// run, within the bytes, and how long.
fn overlap(start: u64, run_bytes: usize, offset: u64, length: usize) -> (usize, usize, usize) {
    let first = start.max(offset);
    let end = (start + run_bytes as u64).min(offset + length as u64);
    (
        (first - start) as usize,
        (first - offset) as usize,
        (end - first) as usize,
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::{World, store};
    use super::*;
    use crate::remote::test_server::SLAB;

    #[test]
    fn written_blocks_with_little_between_them_are_read_at_once() {
        let world = World::new(&[SLAB]);
        let disk = world.create();
        let (never, store) = (Interrupt::never(), store(&disk));
        let mut model = vec![0; 32 * BLOCK];
        for place in [1, 3, 10, 30] {
            model[place * BLOCK..(place + 1) * BLOCK].fill(place as u8);
            let offset = (place * BLOCK) as u64;
            disk.write(offset, &model[place * BLOCK..][..BLOCK], &never)
                .expect("written");
        }
        // What was there once is not what it reads as.
        disk.write(5 * BLOCK as u64, &[9; BLOCK], &never)
            .expect("written");
        disk.zero(5 * BLOCK as u64, BLOCK as u64, &never)
            .expect("discarded");
        let cost = |blocks: usize| {
            let before = store.lines[0].state.traffic().0;
            let mut bytes = vec![0xee; blocks * BLOCK];
            disk.read(0, &mut bytes, &never).expect("read");
            assert!(bytes == model[..blocks * BLOCK]);
            store.lines[0].state.traffic().0 - before
        };
        let once = cost(2);
        assert_eq!(cost(16), once);
        assert_eq!(cost(32), 2 * once, "what lies far away is asked for apart");
    }

    #[test]
    fn whoever_reads_where_all_is_discarded_gives_the_slab_back() {
        let world = World::new(&[SLAB]);
        let disk = world.create();
        let (never, store) = (Interrupt::never(), store(&disk));
        disk.write(0, &[1; BLOCK], &never).expect("written");
        let reader = store
            .ranges
            .hold(1..2, true, &never)
            .expect("nobody is there");
        disk.zero(0, BLOCK as u64, &never).expect("discarded");
        assert_eq!(store.extents.count(), 1, "it is being read");
        drop(reader);
        let mut bytes = [1; BLOCK];
        disk.read(BLOCK as u64, &mut bytes, &never).expect("read");
        assert_eq!((store.extents.count(), bytes), (0, [0; BLOCK]));
        world.eventually("its server has it back", || world.leased_bytes() == 0);
    }
}
