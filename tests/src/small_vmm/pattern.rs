//! What vCPUs write and expect: every word of a page follows from the page's number and from a
//! version that rises with each rewrite, so that a stale page is a mismatch. About every other page has
//! each word four times, so that it compresses.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use outram_wire::units::PAGE_SIZE;
use serde_json::{Value, json};
use vm_memory::{Bytes, ReadVolatile, VolatileSlice, WriteVolatile};

use super::ram::{Block, Ram};
use crate::split_mix::{GOLDEN, SplitMix};

const PAGE: u64 = PAGE_SIZE as u64;
pub(super) const WORDS: usize = PAGE_SIZE / 8;

/// The versions of pages; 0 is a page never written, which reads as zeros. RAM may be far larger than what is
/// used of it.
#[derive(Default)]
pub(super) struct Versions(Mutex<Known>);

#[derive(Default)]
struct Known {
    pages: u64,
    /// Those of pages that somebody has used.
    of: BTreeMap<u64, Arc<AtomicU32>>,
}

impl Versions {
    /// There are this many pages now; new ones were never written.
    pub(super) fn resize(&self, pages: u64) {
        let mut known = self.0.lock().expect("no holder panics");
        known.pages = pages;
        known.of.split_off(&pages);
    }

    fn of(&self, page: u64) -> Result<Arc<AtomicU32>> {
        let mut known = self.0.lock().expect("no holder panics");
        ensure!(page < known.pages, "there is no page {page}");
        Ok(Arc::clone(known.of.entry(page).or_default()))
    }

    /// Notes that pages were given back.
    pub(super) fn forget(&self, first: u64, pages: u64) {
        let known = self.0.lock().expect("no holder panics");
        for (_, version) in known.of.range(first..first + pages) {
            version.store(0, Ordering::Relaxed);
        }
    }
}

/// A stretch of pages as one vCPU uses it; others leave it alone meanwhile.
pub(super) struct Stretch {
    first: u64,
    pages: Vec<(Arc<Block>, u64, Arc<AtomicU32>)>,
}

/// What was found.
#[derive(Default)]
struct Tally {
    checked: u64,
    rewritten: u64,
    mismatches: u64,
    /// The first page that did not match.
    first_bad: Option<u64>,
}

impl Stretch {
    pub(super) fn new(ram: &Ram, versions: &Versions, first: u64, pages: u64) -> Result<Self> {
        ensure!(pages > 0, "a stretch has at least one page");
        let pages = (first..first + pages)
            .map(|page| {
                let (block, offset) = ram.find(page * PAGE, PAGE)?;
                Ok((block, offset / PAGE, versions.of(page)?))
            })
            .collect::<Result<_>>()?;
        Ok(Self { first, pages })
    }

    /// Writes every page anew.
    pub(super) fn fill(&self) -> Result<Value> {
        let started = Instant::now();
        for index in 0..self.pages.len() {
            self.rewrite(index)?;
        }
        let us = started.elapsed().as_micros() as u64;
        Ok(json!({"pages": self.pages.len(), "us": us}))
    }

    /// Reads every page.
    pub(super) fn verify(&self) -> Result<Value> {
        let started = Instant::now();
        let mut tally = Tally::default();
        for index in 0..self.pages.len() {
            self.check(index, &mut tally)?;
        }
        Ok(tally.report(started))
    }

    /// Reads, or writes without changing anything, one word of every page.
    pub(super) fn touch(&self, write: bool) -> Result<Value> {
        let started = Instant::now();
        for (block, page, _) in &self.pages {
            let slice = block.page(*page)?;
            let word: u64 = slice.load(0, Ordering::Relaxed)?;
            if write {
                slice.store(word, 0, Ordering::Relaxed)?;
            }
        }
        let us = started.elapsed().as_micros() as u64;
        Ok(json!({"pages": self.pages.len(), "us": us}))
    }

    /// Picks pages at random, verifies each and rewrites a share of them, for a time.
    pub(super) fn work(&self, seconds: f64, write_share: f64, seed: u64) -> Result<Value> {
        let started = Instant::now();
        let duration = Duration::try_from_secs_f64(seconds)?;
        let mut tally = Tally::default();
        let mut random = SplitMix(seed);
        let threshold = (write_share.clamp(0.0, 1.0) * f64::from(u32::MAX)) as u64;
        while started.elapsed() < duration {
            let index = (random.next() % self.pages.len() as u64) as usize;
            self.check(index, &mut tally)?;
            if random.next() & u64::from(u32::MAX) < threshold {
                self.rewrite(index)?;
                tally.rewritten += 1;
            }
        }
        Ok(tally.report(started))
    }

    /// Sends every page through a pipe and back into its place: the kernel reads it with
    /// `write(2)` and stores it with `read(2)`, whatever signals are pending.
    pub(super) fn pipe(&self) -> Result<Value> {
        let started = Instant::now();
        let (out, into) = std::io::pipe().context("making a pipe")?;
        let (mut out, mut into) = (OwnedFd::from(out), OwnedFd::from(into));
        let mut tally = Tally::default();
        for index in 0..self.pages.len() {
            let (block, page, _) = &self.pages[index];
            let slice = block.page(*page)?;
            into.write_all_volatile(&slice)
                .context("writing guest memory to a pipe")?;
            out.read_exact_volatile(&mut block.page(*page)?)
                .context("reading guest memory from a pipe")?;
            self.check(index, &mut tally)?;
        }
        Ok(tally.report(started))
    }

    /// Stores the next version of every page into its memfd, past this process's mapping.
    pub(super) fn write_file(&self) -> Result<Value> {
        for (index, (block, page, version)) in self.pages.iter().enumerate() {
            let next = version.load(Ordering::Relaxed).wrapping_add(1).max(1);
            version.store(next, Ordering::Relaxed);
            let key = key(self.first + index as u64, next);
            let words = (0..WORDS).flat_map(|word| expected(key, word).to_ne_bytes());
            let bytes: Vec<u8> = words.collect();
            block.file.write_all_at(&bytes, page * PAGE)?;
        }
        Ok(json!({"pages": self.pages.len()}))
    }

    /// Pages that are in the memfd now, as the kernel says.
    pub(super) fn present(&self) -> Result<Value> {
        let mut present = 0;
        for (block, page, _) in &self.pages {
            present += u64::from(block.has_page(*page)?);
        }
        Ok(json!({"present": present}))
    }

    /// Each page with its version.
    pub(super) fn state(&self) -> impl Iterator<Item = (Arc<Block>, u64, u32)> {
        self.pages.iter().map(|(block, page, version)| {
            (Arc::clone(block), *page, version.load(Ordering::Relaxed))
        })
    }

    /// Notes a page's version.
    pub(super) fn note(&self, index: u64, version: u32) {
        self.pages[index as usize]
            .2
            .store(version, Ordering::Relaxed);
    }

    fn rewrite(&self, index: usize) -> Result<()> {
        let (block, page, version) = &self.pages[index];
        let next = version.load(Ordering::Relaxed).wrapping_add(1).max(1);
        version.store(next, Ordering::Relaxed);
        let slice = block.page(*page)?;
        let key = key(self.first + index as u64, next);
        for word in 0..WORDS {
            let value = expected(key, word);
            slice.store(value, word * 8, Ordering::Relaxed)?;
        }
        Ok(())
    }

    fn check(&self, index: usize, tally: &mut Tally) -> Result<()> {
        let (block, page, version) = &self.pages[index];
        let version = version.load(Ordering::Relaxed);
        let number = self.first + index as u64;
        let slice = block.page(*page)?;
        tally.checked += 1;
        if !matches(&slice, number, version)? {
            tally.mismatches += 1;
            tally.first_bad.get_or_insert(number);
        }
        Ok(())
    }
}

impl Tally {
    fn report(&self, started: Instant) -> Value {
        json!({
            "checked": self.checked,
            "rewritten": self.rewritten,
            "mismatches": self.mismatches,
            "first_bad": self.first_bad,
            "us": started.elapsed().as_micros() as u64,
        })
    }
}

fn matches(slice: &VolatileSlice<'_>, page: u64, version: u32) -> Result<bool> {
    let key = key(page, version);
    for word in 0..WORDS {
        let found: u64 = slice.load(word * 8, Ordering::Relaxed)?;
        let wanted = match version {
            0 => 0,
            _ => expected(key, word),
        };
        if found != wanted {
            return Ok(false);
        }
    }
    Ok(true)
}

pub(super) fn key(page: u64, version: u32) -> u64 {
    SplitMix(page << 32 ^ u64::from(version)).next() & !CARRY
}

/// Set in the keys of pages whose words come four times.
const REPEATING: u64 = 1 << 63;

/// Not set in keys, so that no sum of one and a word's number changes [`REPEATING`].
const CARRY: u64 = 1 << 62;

/// What a word's number adds to a key.
fn step(key: u64, word: usize) -> u64 {
    match key & REPEATING {
        0 => word as u64,
        _ => word as u64 & !3,
    }
}

/// `GOLDEN * UNSPREAD == 1` in 64 bits: words can be taken back.
const UNSPREAD: u64 = 0xf1de_83e1_9937_733d;
const _: () = assert!(GOLDEN.wrapping_mul(UNSPREAD) == 1);

pub(super) fn expected(key: u64, word: usize) -> u64 {
    key.wrapping_add(step(key, word)).wrapping_mul(GOLDEN)
}

/// The key whose `word`th word this is.
pub(super) fn key_of(found: u64, word: usize) -> u64 {
    let sum = found.wrapping_mul(UNSPREAD);
    sum.wrapping_sub(step(sum, word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_tells_its_key() {
        let mut repeating = 0;
        for page in 0..100 {
            let key = key(page, 3);
            repeating += key >> 63;
            let told = |word| key_of(expected(key, word), word) == key;
            assert!((0..WORDS).all(told), "page {page}");
        }
        assert!((30..70).contains(&repeating), "{repeating} of 100 repeat");
    }

    #[test]
    fn stale_and_foreign_pages_are_mismatches() {
        let ram = Ram::default();
        ram.plug(8 * PAGE, false).expect("memory");
        let versions = Versions::default();
        versions.resize(8);
        let stretch = Stretch::new(&ram, &versions, 0, 8).expect("within");
        let bad = |stretch: &Stretch| stretch.verify().expect("within")["mismatches"].clone();
        assert_eq!(bad(&stretch), 0);
        stretch.fill().expect("within");
        assert_eq!(bad(&stretch), 0);
        let old = ram.read(3 * PAGE, PAGE).expect("within");
        stretch.fill().expect("within");
        ram.write(3 * PAGE, &old).expect("within");
        assert_eq!(bad(&stretch), 1);
        ram.discard(0, 8).expect("within");
        assert_eq!(bad(&stretch), 8);
        versions.forget(0, 8);
        assert_eq!(bad(&stretch), 0);
        assert!(Stretch::new(&ram, &versions, 4, 5).is_err());
    }
}
