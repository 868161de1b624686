//! Writers, readers and discarders at once on the same pages.
//!
//! A page has one writer, so that its versions rise; whoever reads notes before what had been
//! written for good and afterwards what may have been, and demands that every word be of a version
//! between the two. Zeros are right only where a discard came in between.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use anyhow::{Context, Result, ensure};
use outram_wire::units::PAGE_SIZE;
use serde_json::{Value, json};
use vm_memory::Bytes;

use super::pattern::{Stretch, WORDS, expected, key, key_of};
use super::ram::{Block, Ram};
use crate::split_mix::SplitMix;

/// Pages that are discarded together at most: QEMU's balloon gives single ones, free-page reporting
/// runs.
const DISCARD_MOST: u64 = 8;

/// Who takes part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Players {
    /// Threads that rewrite pages, each its own.
    pub writers: u64,
    /// Threads that read any page.
    pub readers: u64,
    /// Threads that give pages back.
    pub discarders: u64,
    /// Threads that drop mappings and no contents (`MADV_DONTNEED` alone): not while pages are
    /// evicted, for such a page would then count as given back.
    pub droppers: u64,
    /// Rewrites by each writer; the others go on until all have ended.
    pub rounds: u64,
}

/// A page and what is known of it.
struct Contested {
    number: u64,
    block: Arc<Block>,
    index: u64,
    /// The version being written, or written last.
    started: AtomicU32,
    /// The version written last, completely.
    done: AtomicU32,
    /// The oldest version that can have survived the last discard that ended.
    floor: AtomicU32,
    /// The newest version that a discard may have taken.
    taken: AtomicU32,
    discards: AtomicU32,
    discards_open: AtomicU32,
}

/// What was found, by all threads together.
#[derive(Default)]
struct Findings {
    reads: AtomicU64,
    discards: AtomicU64,
    drops: AtomicU64,
    /// Words of a version that had been overwritten or given back.
    stale: AtomicU64,
    /// Zeros where bytes had been stored and not given back.
    vanished: AtomicU64,
}

/// The pages of a race.
pub(super) struct Race<'a> {
    ram: &'a Ram,
    first: u64,
    pages: Vec<Contested>,
    findings: Findings,
    writers_left: AtomicU64,
    failed: AtomicBool,
}

impl<'a> Race<'a> {
    /// On these pages, which are as their versions say.
    pub(super) fn new(ram: &'a Ram, stretch: &Stretch, first: u64) -> Self {
        let contested = |(offset, (block, index, version)): (u64, _)| {
            let version: u32 = version;
            Contested {
                number: first + offset,
                block,
                index,
                started: version.into(),
                done: version.into(),
                floor: 0.into(),
                taken: 0.into(),
                discards: 0.into(),
                discards_open: 0.into(),
            }
        };
        Self {
            ram,
            first,
            pages: (0..).zip(stretch.state()).map(contested).collect(),
            findings: Findings::default(),
            writers_left: AtomicU64::new(0),
            failed: AtomicBool::new(false),
        }
    }

    /// Lets all of them run; afterwards the stretch's versions are as what was found.
    pub(super) fn run(&self, players: Players, stretch: &Stretch) -> Result<Value> {
        ensure!(players.writers > 0, "a race has at least one writer");
        self.writers_left.store(players.writers, Ordering::SeqCst);
        std::thread::scope(|scope| -> Result<()> {
            let mut threads = Vec::new();
            for writer in 0..players.writers {
                threads.push(scope.spawn(move || self.write(writer, &players)));
            }
            for seed in 0..players.readers {
                threads
                    .push(scope.spawn(move || self.repeat(seed, |race, page, _| race.check(page))));
            }
            for seed in 0..players.discarders {
                let discard = |race: &Self, page, length| race.discard(page, length);
                threads.push(scope.spawn(move || self.repeat(100 + seed, discard)));
            }
            for seed in 0..players.droppers {
                let drop = |race: &Self, page, length| race.drop_mapping(page, length);
                threads.push(scope.spawn(move || self.repeat(200 + seed, drop)));
            }
            let ends = threads.into_iter().map(|thread| {
                let ended = thread.join();
                ended.unwrap_or_else(|_| Err(anyhow::anyhow!("a thread of the race panicked")))
            });
            ends.collect::<Vec<_>>().into_iter().collect()
        })?;
        self.take_stock(stretch)?;
        let count = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        let found = &self.findings;
        Ok(json!({
            "rewritten": players.writers * players.rounds,
            "reads": count(&found.reads),
            "discards": count(&found.discards),
            "drops": count(&found.drops),
            "stale": count(&found.stale),
            "vanished": count(&found.vanished),
        }))
    }

    fn write(&self, writer: u64, players: &Players) -> Result<()> {
        let mut random = SplitMix(writer);
        let own = self.pages.len() as u64 / players.writers;
        let result = (0..players.rounds).try_for_each(|_| {
            let index = random.next() % own * players.writers + writer;
            let page = &self.pages[index as usize];
            self.check(page.number - self.first)?;
            page.rewrite()?;
            self.check(page.number - self.first)
        });
        if result.is_err() {
            self.failed.store(true, Ordering::SeqCst);
        }
        self.writers_left.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// Does something to random runs of pages until the writers have ended.
    fn repeat(&self, seed: u64, act: impl Fn(&Self, u64, u64) -> Result<()>) -> Result<()> {
        let mut random = SplitMix(1 << 32 | seed);
        let pages = self.pages.len() as u64;
        while self.writers_left.load(Ordering::SeqCst) > 0 && !self.failed.load(Ordering::SeqCst) {
            let index = random.next() % pages;
            let within = pages.min(self.block_end(index)) - index;
            let length = (1 + random.next() % DISCARD_MOST).min(within);
            if let Some((index, length)) = self.whole_pages(index, length) {
                act(self, index, length)?;
            }
        }
        Ok(())
    }

    /// A run, or where its block's pages are huge, the one that it begins in, if all of that takes
    /// part.
    fn whole_pages(&self, index: u64, length: u64) -> Option<(u64, u64)> {
        let page = &self.pages[index as usize];
        let each = page.block.discard_pages();
        if each == 1 {
            return Some((index, length));
        }
        let first = index.checked_sub(page.index % each)?;
        (first + each <= self.pages.len() as u64).then_some((first, each))
    }

    /// Index of the first page behind this one's block.
    fn block_end(&self, index: u64) -> u64 {
        let page = &self.pages[index as usize];
        index + page.block.size / PAGE_SIZE as u64 - page.index
    }

    fn check(&self, index: u64) -> Result<()> {
        let page = &self.pages[index as usize];
        let before = page.outlook();
        let mut words = [0u64; WORDS];
        page.read(&mut words)?;
        fence(Ordering::SeqCst);
        let zeros_are_right = page.may_be_zero(&before);
        let newest = page.started.load(Ordering::SeqCst);
        self.findings.reads.fetch_add(1, Ordering::Relaxed);
        let oldest = before.done.max(before.floor);
        let keys: Vec<u64> = (oldest.max(1)..=newest)
            .map(|version| key(page.number, version))
            .collect();
        for (number, word) in words.iter().enumerate() {
            let wrong = match *word {
                0 if zeros_are_right => continue,
                0 => &self.findings.vanished,
                word if keys.contains(&key_of(word, number)) => continue,
                _ => &self.findings.stale,
            };
            wrong.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    }

    fn discard(&self, index: u64, length: u64) -> Result<()> {
        let run = &self.pages[index as usize..(index + length) as usize];
        let floors: Vec<u32> = run.iter().map(Contested::begin_discard).collect();
        self.ram.discard(self.first + index, length)?;
        for (page, floor) in run.iter().zip(floors) {
            page.end_discard(floor);
        }
        self.findings.discards.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn drop_mapping(&self, index: u64, length: u64) -> Result<()> {
        self.ram.drop_mapping(self.first + index, length)?;
        self.findings.drops.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Everyone has ended: each page is wholly what was written last, or given back after it.
    fn take_stock(&self, stretch: &Stretch) -> Result<()> {
        for (index, page) in (0..).zip(&self.pages) {
            self.check(index)?;
            let mut words = [0u64; WORDS];
            page.read(&mut words)?;
            let done = page.done.load(Ordering::SeqCst);
            let wanted = key(page.number, done);
            let whole = |(number, word): (usize, &u64)| *word == expected(wanted, number);
            let version = match done > 0 && words.iter().enumerate().all(whole) {
                true => done,
                false => 0,
            };
            if version == 0 && words.iter().any(|word| *word != 0) {
                // Partly given back amid a rewrite: complete it.
                page.rewrite()?;
                stretch.note(index, page.done.load(Ordering::SeqCst));
            } else {
                stretch.note(index, version);
            }
        }
        Ok(())
    }
}

/// What is known of a page before it is read.
struct Outlook {
    done: u32,
    floor: u32,
    discards: u32,
}

impl Contested {
    fn outlook(&self) -> Outlook {
        let before = Outlook {
            floor: self.floor.load(Ordering::SeqCst),
            discards: self.discards.load(Ordering::SeqCst),
            done: self.done.load(Ordering::SeqCst),
        };
        fence(Ordering::SeqCst);
        before
    }

    fn may_be_zero(&self, before: &Outlook) -> bool {
        before.done == 0
            || self.discards_open.load(Ordering::SeqCst) > 0
            || self.discards.load(Ordering::SeqCst) != before.discards
            || self.taken.load(Ordering::SeqCst) >= before.done
    }

    fn begin_discard(&self) -> u32 {
        self.discards_open.fetch_add(1, Ordering::SeqCst);
        self.discards.fetch_add(1, Ordering::SeqCst);
        let floor = self.started.load(Ordering::SeqCst);
        fence(Ordering::SeqCst);
        floor
    }

    fn end_discard(&self, floor: u32) {
        fence(Ordering::SeqCst);
        let newest = self.started.load(Ordering::SeqCst);
        self.taken.fetch_max(newest, Ordering::SeqCst);
        self.floor.fetch_max(floor, Ordering::SeqCst);
        self.discards_open.fetch_sub(1, Ordering::SeqCst);
    }

    fn read(&self, words: &mut [u64; WORDS]) -> Result<()> {
        let slice = self.block.page(self.index)?;
        for (number, word) in words.iter_mut().enumerate() {
            *word = slice
                .load(number * 8, Ordering::Relaxed)
                .context("within the page")?;
        }
        Ok(())
    }

    fn rewrite(&self) -> Result<()> {
        let version = self.started.load(Ordering::SeqCst) + 1;
        self.started.store(version, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let slice = self.block.page(self.index)?;
        let key = key(self.number, version);
        for word in 0..WORDS {
            slice.store(expected(key, word), word * 8, Ordering::Relaxed)?;
        }
        fence(Ordering::SeqCst);
        self.done.store(version, Ordering::SeqCst);
        Ok(())
    }
}
