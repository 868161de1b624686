//! Pins from the device's threads: bounded in all, so that however small the limit is, there is
//! always something left that may be evicted.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crossbeam_channel::bounded;
use outram_wire::units::PAGE_SIZE;

use super::guest_ram::intersect;
use super::inbox::Inbox;
use super::shard_thread::ShardEvent;
use super::{Pager, lock};
use crate::device::{GuestMemory, HostRange, PinError, Pinned, TableRegion};
use crate::engine::{PageIndex, PageRun, PinRefused};

const PAGE: u64 = PAGE_SIZE as u64;

/// Most pages of one request: 1 MiB, libvirt guests' largest usual I/O.
const MOST_PER_PIN: u64 = 256;

#[derive(Debug)]
struct Gate {
    limit: u64,
    pinned: u64,
    ended: bool,
}

/// Admits pins as long as they are a quarter of the limit at most.
#[derive(Debug)]
pub(super) struct PinGate {
    gate: Mutex<Gate>,
    changed: Condvar,
}

impl PinGate {
    pub(super) fn new(limit_pages: u64) -> Self {
        let gate = Gate {
            limit: limit_pages / 4,
            pinned: 0,
            ended: false,
        };
        Self {
            gate: Mutex::new(gate),
            changed: Condvar::new(),
        }
    }

    pub(super) fn set_limit(&self, limit_pages: u64) {
        lock(&self.gate).limit = limit_pages / 4;
        self.changed.notify_all();
    }

    pub(super) fn end(&self) {
        lock(&self.gate).ended = true;
        self.changed.notify_all();
    }

    fn enter(&self, pages: u64) -> Result<(), PinError> {
        let mut gate = lock(&self.gate);
        loop {
            if gate.ended {
                return Err(PinError::Ending);
            }
            if gate.pinned + pages <= gate.limit {
                gate.pinned += pages;
                return Ok(());
            }
            gate = self
                .changed
                .wait(gate)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn leave(&self, pages: u64) {
        lock(&self.gate).pinned -= pages;
        self.changed.notify_all();
    }
}

/// Pages pinned in one shard.
struct PinnedRuns {
    shard: Inbox<ShardEvent>,
    runs: Vec<PageRun>,
}

/// Pins of one request; unpinned when dropped.
struct Pins {
    runs: Vec<PinnedRuns>,
    pages: u64,
    gate: Arc<PinGate>,
}

impl Pinned for Pins {}

impl Drop for Pins {
    fn drop(&mut self) {
        for pinned in self.runs.drain(..) {
            pinned.shard.send(ShardEvent::Unpin(pinned.runs));
        }
        self.gate.leave(self.pages);
    }
}

impl Pager {
    /// The pages of file ranges, each once, in order.
    fn runs_of(&self, ranges: &[HostRange]) -> Result<Vec<PageRun>, PinError> {
        let mut runs = Vec::with_capacity(ranges.len());
        for range in ranges {
            let last = range
                .file_offset
                .checked_add(range.length)
                .and_then(|end| end.checked_sub(1));
            let find = |offset| self.ram.page_in_file(range.memfd, offset);
            let (Some(first), Some(last)) = (find(range.file_offset), last.and_then(find)) else {
                return Err(PinError::Unknown(format!(
                    "{} bytes at offset {} of {} are not in the guest's RAM",
                    range.length, range.file_offset, range.memfd
                )));
            };
            runs.push((first.0, last.0 + 1));
        }
        runs.sort_unstable();
        let mut merged: Vec<(u32, u32)> = Vec::with_capacity(runs.len());
        for (first, end) in runs {
            match merged.last_mut() {
                Some((_, before)) if first <= *before => *before = end.max(*before),
                _ => merged.push((first, end)),
            }
        }
        Ok(merged
            .into_iter()
            .map(|(first, end)| PageRun {
                first: PageIndex(first),
                count: end - first,
            })
            .collect())
    }
}

impl GuestMemory for Pager {
    fn pin(&self, ranges: &[HostRange], write: bool) -> Result<Box<dyn Pinned>, PinError> {
        let runs = self.runs_of(ranges)?;
        let pages: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
        let most = self.max_pages_per_pin();
        if pages > most as u64 {
            return Err(PinError::TooMany {
                asked: pages as usize,
                most,
            });
        }
        self.pin_gate.enter(pages)?;
        let mut pins = Pins {
            runs: Vec::new(),
            pages,
            gate: Arc::clone(&self.pin_gate),
        };
        let mut answers = Vec::new();
        for (range, shard) in self.ranges.iter().zip(&self.shards) {
            let runs: Vec<PageRun> = runs
                .iter()
                .filter_map(|run| intersect(*run, *range))
                .collect();
            if !runs.is_empty() {
                let (answer, answered) = bounded(1);
                shard.send(ShardEvent::Pin {
                    runs: runs.clone(),
                    write,
                    answer,
                });
                answers.push((
                    answered,
                    PinnedRuns {
                        shard: shard.clone(),
                        runs,
                    },
                ));
            }
        }
        let mut refused = None;
        for (answered, runs) in answers {
            match answered.recv() {
                Ok(Ok(())) => pins.runs.push(runs),
                Ok(Err(PinRefused::Lost)) => refused = Some(PinError::Lost),
                // A shard that has ended drops the question.
                Ok(Err(PinRefused::Ending)) | Err(_) => refused = Some(PinError::Ending),
            }
        }
        match refused {
            None => Ok(Box::new(pins)),
            Some(error) => Err(error),
        }
    }

    fn confirm(&self, regions: &[TableRegion]) -> Result<(), PinError> {
        for region in regions {
            let range = HostRange {
                memfd: region.memfd,
                file_offset: region.file_offset,
                length: region.length,
            };
            let runs = self.runs_of(&[range])?;
            let hva = runs.first().map(|run| self.ram.hva(run.first));
            if hva != Some(region.vmm_address / PAGE * PAGE) {
                return Err(PinError::Unknown(format!(
                    "QEMU says that guest address {:#x} lies at {:#x}, but its memory map has that part of {} elsewhere",
                    region.guest_address, region.vmm_address, region.memfd
                )));
            }
        }
        Ok(())
    }

    fn max_pages_per_pin(&self) -> usize {
        (lock(&self.pin_gate.gate).limit / 4).clamp(1, MOST_PER_PIN) as usize
    }
}
