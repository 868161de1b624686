//! A driver that keeps many requests of one queue under way, and knows what each block of its part of
//! the disk has to hold. It does not know of connections: whatever becomes of its device, requests
//! that were offered are to be answered in the end, each once.

use std::ops::Range;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use outram_wire::units::PAGE_SIZE;
use serde_json::{Value, json};

use super::disk::{Descriptor, NEXT, Rings, SharedRings, WRITE};
use super::ram::Ram;
use crate::split_mix::SplitMix;

const PAGE: u64 = PAGE_SIZE as u64;
const SECTOR: u64 = 512;
const BLOCK_SECTORS: u64 = PAGE / SECTOR;
/// Most sectors of a request that moves data.
const MOST: u64 = 64;
/// Pages of a request under way: its header and status, and its data.
const SLOT_PAGES: u64 = 1 + MOST / BLOCK_SECTORS;
/// Descriptors of a request: header, data, status.
const CHAIN: u16 = 3;
/// Longer than any outage of a test.
const PATIENCE: Duration = Duration::from_secs(180);
const TICK: Duration = Duration::from_micros(50);

/// virtio-blk's request types.
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

/// What there is to do.
pub(super) struct DiskLoad {
    /// First block of the disk that is this driver's alone.
    pub first: u64,
    pub blocks: u64,
    /// First page of its buffers: nine for each request under way.
    pub page: u64,
    /// Requests under way.
    pub depth: u16,
    pub seconds: f64,
    pub seed: u64,
}

/// What was found.
#[derive(Default)]
struct Tally {
    requests: u64,
    mismatches: u64,
    errors: u64,
    longest: Duration,
}

/// A request: its type, and sectors of its slot's part of the disk.
#[derive(Clone, Copy)]
struct Wanted {
    kind: u32,
    first: u64,
    count: u64,
}

impl Wanted {
    /// Its bytes of the slot's.
    fn bytes(&self) -> Range<usize> {
        let end = self.first + self.count;
        (self.first * SECTOR) as usize..(end * SECTOR) as usize
    }
}

/// A request's place: only one at a time is under way in it, and on its sectors.
struct Slot {
    first_sector: u64,
    /// What its sectors hold.
    bytes: Vec<u8>,
    asked: Option<(Wanted, Instant)>,
}

impl DiskLoad {
    /// Begins by zeroing its blocks, works for a time, and reads all of them at the end.
    pub(super) fn run(&self, ram: &Ram, rings: &SharedRings) -> Result<Value> {
        let each = self.blocks / u64::from(self.depth) * BLOCK_SECTORS;
        ensure!(each >= MOST, "too few blocks");
        let slot = |number| Slot {
            first_sector: self.first * BLOCK_SECTORS + number * each,
            bytes: vec![0; (each * SECTOR) as usize],
            asked: None,
        };
        let mut slots: Vec<Slot> = (0..u64::from(self.depth)).map(slot).collect();
        let mut random = SplitMix(self.seed);
        let mut tally = Tally::default();
        let zeroes = Wanted {
            kind: WRITE_ZEROES,
            first: 0,
            count: each,
        };
        self.round(ram, rings, &mut slots, &mut tally, zeroes)?;
        let end = Instant::now() + Duration::from_secs_f64(self.seconds);
        self.work(ram, rings, &mut slots, &mut tally, |_| {
            (Instant::now() < end).then(|| pick(&mut random, each))
        })?;
        for first in (0..each).step_by(MOST as usize) {
            let read = Wanted {
                kind: IN,
                first,
                count: MOST.min(each - first),
            };
            self.round(ram, rings, &mut slots, &mut tally, read)?;
        }
        Ok(json!({
            "requests": tally.requests,
            "mismatches": tally.mismatches,
            "errors": tally.errors,
            "longest_ms": tally.longest.as_millis() as u64,
        }))
    }

    /// One request in each slot.
    fn round(
        &self,
        ram: &Ram,
        rings: &SharedRings,
        slots: &mut [Slot],
        tally: &mut Tally,
        wanted: Wanted,
    ) -> Result<()> {
        let mut left = vec![true; slots.len()];
        self.work(ram, rings, slots, tally, |slot| {
            std::mem::take(&mut left[slot]).then_some(wanted)
        })
    }

    /// Keeps every slot at work until `next` names nothing more for any.
    fn work(
        &self,
        ram: &Ram,
        rings: &SharedRings,
        slots: &mut [Slot],
        tally: &mut Tally,
        mut next: impl FnMut(usize) -> Option<Wanted>,
    ) -> Result<()> {
        loop {
            let mut done = true;
            // Not held while waiting: the main thread may tell the rings to a new device meanwhile.
            let mut held = rings.lock().expect("no holder panics");
            while let Some((head, _)) = held.take_used(ram)? {
                let number = usize::try_from(head / u32::from(CHAIN))?;
                self.finish(ram, number, slots, tally)?;
            }
            for (number, slot) in slots.iter_mut().enumerate() {
                if slot.asked.is_none()
                    && let Some(wanted) = next(number)
                {
                    let mut contents = SplitMix(self.seed ^ tally.requests << 16 ^ number as u64);
                    self.ask(ram, &mut held, (number, slot), wanted, &mut contents)?;
                }
                if let Some((wanted, since)) = &slot.asked {
                    done = false;
                    let kind = wanted.kind;
                    ensure!(
                        since.elapsed() < PATIENCE,
                        "one of type {kind} is not answered"
                    );
                }
            }
            drop(held);
            if done {
                return Ok(());
            }
            std::thread::sleep(TICK);
        }
    }

    fn header(&self, slot: usize) -> u64 {
        (self.page + slot as u64 * SLOT_PAGES) * PAGE
    }

    fn ask(
        &self,
        ram: &Ram,
        rings: &mut MutexGuard<'_, Rings>,
        (number, slot): (usize, &mut Slot),
        wanted: Wanted,
        random: &mut SplitMix,
    ) -> Result<()> {
        let header = self.header(number);
        let (data, status) = (header + PAGE, header + 16);
        let sector = slot.first_sector + wanted.first;
        let part = &mut slot.bytes[wanted.bytes()];
        let sent = match wanted.kind {
            FLUSH => Vec::new(),
            // What was there before must not pass for an answer.
            IN => vec![0xaa; part.len()],
            OUT => {
                let (words, _) = part.as_chunks_mut::<8>();
                words
                    .iter_mut()
                    .for_each(|word| *word = random.next().to_le_bytes());
                part.to_vec()
            }
            _ => {
                part.fill(0);
                let mut segment = sector.to_le_bytes().to_vec();
                segment.extend_from_slice(&(wanted.count as u32).to_le_bytes());
                segment.extend_from_slice(&[0; 4]);
                segment
            }
        };
        ram.write(data, &sent)?;
        let is_move = matches!(wanted.kind, IN | OUT);
        let mut bytes = u64::from(wanted.kind).to_le_bytes().to_vec();
        bytes.extend_from_slice(&(if is_move { sector } else { 0 }).to_le_bytes());
        bytes.push(0xff);
        ram.write(header, &bytes)?;
        let (kind, length) = (wanted.kind, sent.len());
        let head = number as u16 * CHAIN;
        let descriptor = |address, length: usize, flags, next| Descriptor {
            address,
            length: length as u32,
            flags,
            next,
        };
        let data_flags = if kind == IN { NEXT | WRITE } else { NEXT };
        let chain = [
            descriptor(
                header,
                16,
                NEXT,
                if length > 0 { head + 1 } else { head + 2 },
            ),
            descriptor(data, length, data_flags, head + 2),
            descriptor(status, 1, WRITE, 0),
        ];
        rings.describe(ram, head, &chain)?;
        rings.offer(ram, head)?;
        slot.asked = Some((wanted, Instant::now()));
        Ok(())
    }

    fn finish(
        &self,
        ram: &Ram,
        number: usize,
        slots: &mut [Slot],
        tally: &mut Tally,
    ) -> Result<()> {
        let slot = slots.get_mut(number).context("no such slot")?;
        let (wanted, since) = slot.asked.take().context("it was answered twice")?;
        tally.requests += 1;
        tally.longest = tally.longest.max(since.elapsed());
        let header = self.header(number);
        let part = &slot.bytes[wanted.bytes()];
        if ram.read(header + 16, 1)? != [0] {
            tally.errors += 1;
        } else if wanted.kind == IN && ram.read(header + PAGE, part.len() as u64)? != part {
            tally.mismatches += 1;
        }
        Ok(())
    }
}

/// A request of a slot with so many sectors: whole blocks as often as parts.
fn pick(random: &mut SplitMix, sectors: u64) -> Wanted {
    let unit = if random.next().is_multiple_of(2) {
        1
    } else {
        BLOCK_SECTORS
    };
    let count = (1 + random.next() % (MOST / unit)) * unit;
    let first = random.next() % ((sectors - count) / unit + 1) * unit;
    let of = |kind| Wanted { kind, first, count };
    match random.next() % 16 {
        0..=5 => of(OUT),
        6..=11 => of(IN),
        12 => of(DISCARD),
        13 => of(WRITE_ZEROES),
        14 => Wanted {
            kind: DISCARD,
            first: 0,
            count: sectors,
        },
        _ => Wanted {
            kind: FLUSH,
            first: 0,
            count: 0,
        },
    }
}
