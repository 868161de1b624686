//! Pins from the device's threads: bounded in all, so that however small the limit is, there is
//! always something left that may be evicted.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use outram_wire::units::PageSize;

use super::inbox::Inbox;
use super::plugging::AsideHold;
use super::shard_thread::ShardEvent;
use super::{Pager, lock};
use crate::device::{GuestMemory, HostRange, PinError, Pinned, TableRegion};
use crate::engine::{PageIndex, PageRun, PinId, PinRefused};
use crate::handover::MemfdId;
use crate::interrupt::{Interrupt, LOOK};

/// Most of one request: libvirt guests' largest usual I/O.
const MOST_PER_PIN_BYTES: u64 = 1 << 20;

/// Where pages are huge, as many as one pin of a ring may touch: two parts, each across a border.
const MOST_PER_PIN_PAGES: u64 = 4;

#[derive(Debug)]
struct Gate {
    limit: u64,
    pinned: u64,
    /// How often each page is pinned, where they are huge: the rings of many queues lie in one.
    shared: Option<HashMap<PageIndex, u64>>,
    ended: bool,
}

impl Gate {
    /// Pages that pins of these runs add to what is pinned.
    fn added(&self, runs: &[PageRun]) -> u64 {
        let pages = runs.iter().flat_map(|run| run.pages());
        match &self.shared {
            Some(shared) => pages.filter(|page| !shared.contains_key(page)).count() as u64,
            None => runs.iter().map(|run| u64::from(run.count)).sum(),
        }
    }

    fn enter(&mut self, runs: &[PageRun]) {
        self.pinned += self.added(runs);
        if let Some(shared) = &mut self.shared {
            for page in runs.iter().flat_map(|run| run.pages()) {
                *shared.entry(page).or_default() += 1;
            }
        }
    }

    fn leave(&mut self, runs: &[PageRun]) {
        let Some(shared) = &mut self.shared else {
            self.pinned -= self.added(runs);
            return;
        };
        for page in runs.iter().flat_map(|run| run.pages()) {
            match shared.get_mut(&page) {
                Some(count) if *count > 1 => *count -= 1,
                _ => {
                    shared.remove(&page);
                    self.pinned -= 1;
                }
            }
        }
    }
}

/// Admits pins as long as they are a quarter of the limit at most; half of it where pages are huge,
/// and the smallest limit is few of them.
#[derive(Debug)]
pub(super) struct PinGate {
    size: PageSize,
    gate: Mutex<Gate>,
    changed: Condvar,
}

impl PinGate {
    pub(super) fn new(limit_pages: u64, size: PageSize) -> Self {
        let gate = Gate {
            limit: share_of(limit_pages, size),
            pinned: 0,
            shared: size.is_huge().then(HashMap::new),
            ended: false,
        };
        Self {
            size,
            gate: Mutex::new(gate),
            changed: Condvar::new(),
        }
    }

    pub(super) fn set_limit(&self, limit_pages: u64) {
        lock(&self.gate).limit = share_of(limit_pages, self.size);
        self.changed.notify_all();
    }

    pub(super) fn end(&self) {
        lock(&self.gate).ended = true;
        self.changed.notify_all();
    }

    /// Waits until there is room for pins of these runs.
    fn admit(
        self: &Arc<Self>,
        runs: Vec<PageRun>,
        interrupt: &Interrupt<'_>,
    ) -> Result<Admission, PinError> {
        let mut gate = lock(&self.gate);
        loop {
            if gate.ended {
                return Err(PinError::Ending);
            }
            if gate.pinned + gate.added(&runs) <= gate.limit {
                gate.enter(&runs);
                let gate = Arc::clone(self);
                return Ok(Admission { gate, runs });
            }
            if interrupt.is_wanted() {
                return Err(PinError::Interrupted);
            }
            let waited = self.changed.wait_timeout(gate, LOOK);
            gate = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Pages that may be pinned: until all that was pinned of them is let go.
struct Admission {
    gate: Arc<PinGate>,
    runs: Vec<PageRun>,
}

impl Drop for Admission {
    fn drop(&mut self) {
        lock(&self.gate.gate).leave(&self.runs);
        self.gate.changed.notify_all();
    }
}

/// The part of a limit that may be pinned.
fn share_of(limit_pages: u64, size: PageSize) -> u64 {
    match size.is_huge() {
        true => limit_pages / 2,
        false => limit_pages / 4,
    }
}

/// Pages pinned in one shard; unpinned when dropped.
struct PinnedRuns {
    shard: Inbox<ShardEvent>,
    runs: Vec<PageRun>,
    _admission: Arc<Admission>,
}

impl Drop for PinnedRuns {
    fn drop(&mut self) {
        let runs = std::mem::take(&mut self.runs);
        self.shard.send(ShardEvent::Unpin(runs));
    }
}

/// Where a shard says what became of a pin.
pub(super) struct PinAnswer {
    to: Sender<Result<PinnedRuns, PinRefused>>,
    shard: Inbox<ShardEvent>,
    runs: Vec<PageRun>,
    admission: Arc<Admission>,
}

impl PinAnswer {
    pub(super) fn give(self, result: Result<(), PinRefused>) {
        let answer = result.map(|()| PinnedRuns {
            shard: self.shard,
            runs: self.runs,
            _admission: self.admission,
        });
        // Whoever asked may have ended or been interrupted: then nothing stays pinned for it.
        let _ = self.to.send(answer);
    }
}

/// Pins of one request; unpinned when dropped.
struct Pins {
    _runs: Vec<PinnedRuns>,
    /// Blocks that are not managed, and stay so meanwhile.
    _aside: Vec<AsideHold>,
}

impl Pinned for Pins {}

impl Pager {
    /// The pages of file ranges, each once, in order.
    fn runs_of(&self, ranges: &[HostRange]) -> Result<Vec<PageRun>, PinError> {
        let mut runs = Vec::with_capacity(ranges.len());
        for range in ranges {
            let found = self
                .ram
                .runs_in_file(range.memfd, range.file_offset, range.length)
                .ok_or_else(|| {
                    PinError::Unknown(format!(
                        "{} bytes at offset {} of {} are not in the guest's RAM",
                        range.length, range.file_offset, range.memfd
                    ))
                })?;
            runs.extend(found.into_iter().map(|run| (run.first.0, run.end().0)));
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

impl Pager {
    /// Holds those of the ranges that lie in blocks that are not managed; returns the others.
    fn hold_aside(
        &self,
        ranges: &[HostRange],
    ) -> Result<(Vec<AsideHold>, Vec<HostRange>), PinError> {
        let (mut holds, mut managed) = (Vec::new(), Vec::new());
        for range in ranges {
            match self.aside.hold(range) {
                Some(Ok(hold)) => holds.push(hold),
                Some(Err(error)) => {
                    let text = format!("memory that is not paged cannot be used: {error}");
                    return Err(PinError::Unknown(text));
                }
                None => managed.push(*range),
            }
        }
        Ok((holds, managed))
    }

    /// Whether a region of the memory table is where it is known to be; `None` where it is not
    /// known.
    fn agrees(&self, region: &TableRegion) -> Option<bool> {
        if self.aside.has(region.memfd) {
            return Some(true);
        }
        self.ram
            .runs_in_file(region.memfd, region.file_offset, region.length)?;
        let address = self.ram.address_in_file(region.memfd, region.file_offset)?;
        Some(address == region.vmm_address)
    }
}

impl GuestMemory for Pager {
    fn pin(
        &self,
        ranges: &[HostRange],
        write: bool,
        interrupt: &Interrupt<'_>,
    ) -> Result<Box<dyn Pinned>, PinError> {
        let (aside, ranges) = self.hold_aside(ranges)?;
        let runs = self.runs_of(&ranges)?;
        let pages: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
        let most = self.max_pages_per_pin();
        if pages > most as u64 {
            return Err(PinError::TooMany {
                asked: pages as usize,
                most,
            });
        }
        let admission = Arc::new(self.pin_gate.admit(runs, interrupt)?);
        // In each shard it is of its own.
        let id = PinId(self.next_pin.fetch_add(1, Ordering::Relaxed));
        let mut answers = Vec::new();
        for (range, shard) in self.ram.ranges().iter().zip(&self.shards) {
            let runs: Vec<PageRun> = admission
                .runs
                .iter()
                .filter_map(|run| run.intersection(*range))
                .collect();
            if !runs.is_empty() {
                let (to, answered) = bounded(1);
                let answer = PinAnswer {
                    to,
                    shard: shard.clone(),
                    runs: runs.clone(),
                    admission: Arc::clone(&admission),
                };
                shard.send(ShardEvent::Pin {
                    id,
                    runs,
                    write,
                    answer,
                });
                answers.push((shard, answered));
            }
        }
        let mut pinned = Vec::with_capacity(answers.len());
        let mut refused = None;
        for (_, answered) in &answers {
            let answer = loop {
                match answered.recv_timeout(LOOK) {
                    Err(RecvTimeoutError::Timeout) if interrupt.is_wanted() => {
                        for (shard, _) in &answers {
                            shard.send(ShardEvent::CancelPin(id));
                        }
                        return Err(PinError::Interrupted);
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    answer => break answer,
                }
            };
            match answer {
                Ok(Ok(runs)) => pinned.push(runs),
                Ok(Err(PinRefused::Lost)) => refused = Some(PinError::Lost),
                Ok(Err(error @ PinRefused::Unplugged)) => {
                    refused = Some(PinError::Unknown(error.to_string()));
                }
                // A shard that has ended drops the question.
                Ok(Err(PinRefused::Ending)) | Err(_) => refused = Some(PinError::Ending),
            }
        }
        match refused {
            None => Ok(Box::new(Pins {
                _runs: pinned,
                _aside: aside,
            })),
            Some(error) => Err(error),
        }
    }

    fn confirm(&self, regions: &[TableRegion]) -> Result<(), PinError> {
        let is_new = |region: &TableRegion| self.agrees(region).is_none();
        let is_told = |memfd| {
            regions
                .iter()
                .any(|region| region.memfd == memfd && is_new(region))
        };
        if regions.iter().any(is_new)
            && let Err(error) = self.set_new_aside(is_told)
        {
            tracing::warn!(%error, "the VMM's memory map is not readable");
        }
        for region in regions {
            match self.agrees(region) {
                Some(true) => {}
                Some(false) => {
                    return Err(PinError::Unknown(format!(
                        "QEMU says that guest address {:#x} lies at {:#x}, but its memory map has that part of {} elsewhere",
                        region.guest_address, region.vmm_address, region.memfd
                    )));
                }
                None => {
                    return Err(PinError::Unknown(format!(
                        "{} bytes at offset {} of {} are not in the guest's RAM",
                        region.length, region.file_offset, region.memfd
                    )));
                }
            }
        }
        Ok(())
    }

    fn is_foreign(&self, memfd: MemfdId) -> bool {
        if self.is_managed(memfd) || self.aside.has(memfd) {
            return false;
        }
        let was_there = lock(&self.record).foreign.contains(&memfd.into());
        // RAM that was plugged just now is mapped as every memory backend is. In doubt it is taken for that.
        let is_backend = || match self.vmm.mappings() {
            Ok(all) => all.iter().any(|mapping| mapping.id == memfd),
            Err(_) => true,
        };
        was_there || !is_backend()
    }

    fn page_size(&self) -> PageSize {
        self.shared.page_size
    }

    fn max_pages_per_pin(&self) -> usize {
        let most = self
            .shared
            .page_size
            .pages_in(MOST_PER_PIN_BYTES, MOST_PER_PIN_PAGES);
        (lock(&self.pin_gate.gate).limit / 4).clamp(1, most) as usize
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn run(first: u32, count: u32) -> PageRun {
        PageRun {
            first: PageIndex(first),
            count,
        }
    }

    fn gate(size: PageSize) -> Arc<PinGate> {
        Arc::new(PinGate::new(32, size))
    }

    fn admit(gate: &Arc<PinGate>, runs: &[PageRun]) -> Admission {
        let admitted = gate.admit(runs.to_vec(), &Interrupt::never());
        admitted.expect("room")
    }

    #[test]
    fn many_rings_in_one_huge_page_are_one_pinned_page() {
        let gate = gate(PageSize::HUGE);
        let rings: Vec<_> = (0..100).map(|_| admit(&gate, &[run(3, 1)])).collect();
        let more = admit(&gate, &[run(3, 2), run(8, 1)]);
        assert_eq!(lock(&gate.gate).pinned, 3);
        drop(more);
        assert_eq!(lock(&gate.gate).pinned, 1);
        drop(rings);
        assert_eq!(lock(&gate.gate).pinned, 0);
    }

    #[test]
    fn base_pages_count_as_often_as_they_are_pinned() {
        let gate = gate(PageSize::BASE);
        let first = admit(&gate, &[run(3, 4)]);
        let _second = admit(&gate, &[run(3, 4)]);
        assert_eq!(lock(&gate.gate).pinned, 8);
        drop(first);
        assert_eq!(lock(&gate.gate).pinned, 4);
    }

    #[test]
    fn whoever_waits_for_room_can_be_interrupted() {
        let gate = gate(PageSize::BASE);
        let _all = admit(&gate, &[run(0, 8)]);
        let wanted = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| gate.admit(vec![run(8, 1)], &Interrupt::by(&wanted)));
            wanted.store(true, Ordering::Release);
            let ended = waits.join().expect("no panic").map(drop);
            assert_eq!(ended, Err(PinError::Interrupted));
        });
        assert_eq!(lock(&gate.gate).pinned, 8);
    }
}
