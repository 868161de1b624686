//! Memory that comes and goes while the guest runs: what the VMM has mapped, against what is
//! managed.
//!
//! A new block is taken over once the servers have promised room for it. Until then, or where it
//! cannot be paged at all, it stands *aside*: it stays in this host's memory, past the limit, and
//! is told loudly. A block that the VMM has mapped no longer leaves: its shards drop all that they
//! keep of it, and its memfd is closed here, so that its memory is free.
//!
//! Lock order: `plugging`, then `changing`, then the course or `aside`. No pager thread takes any of
//! them.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded};
use outram_wire::causes::with_causes;
use outram_wire::limits::Standing;
use outram_wire::units::format_size;
use rustix::fs::FallocateFlags;

use super::guest_ram::{Block, GuestRam, Region};
use super::inbox::Inbox;
use super::record::FileId;
use super::shard_thread::ShardEvent;
use super::state_dir::StateError;
use super::uffd::Uffd;
use super::{Course, LimitError, Pager, guest_ram, lock};
use crate::crash_points::{self, Point};
use crate::device::HostRange;
use crate::engine::PageRun;
use crate::handover::MemfdId;
use crate::handover::discover::{Mapping, RamBlock, Refusal};

/// Until a block that stands aside is tried again.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// How long a block that leaves is waited for at once; after that it is looked at again later.
const LEAVE_PATIENCE: Duration = Duration::from_millis(100);

/// Why a block stands aside.
#[derive(Debug, thiserror::Error)]
enum AsideReason {
    /// It cannot be paged.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Of huge pages.
    #[error("it or the guest is made of huge pages, to which nothing is added as it runs")]
    HugePages,
    /// The limit, or the servers' promise for it.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The page table.
    #[error(transparent)]
    NoRoom(#[from] guest_ram::NoRoom),
    /// Our own device uses it.
    #[error("the guest's disk is using it")]
    InUse,
    /// It could not be written down.
    #[error(transparent)]
    State(#[from] StateError),
    /// A shard could not take its part.
    #[error("userfaultfd refused it")]
    Userfaultfd(#[source] std::io::Error),
}

/// A block that is not managed: all of it is local.
#[derive(Debug)]
pub(super) struct Aside {
    mapping: Mapping,
    /// Its memfd, where it may be used by our own device.
    file: Option<File>,
    reason: String,
    retry_at: Instant,
    pins: AtomicU64,
}

/// Holds a block aside for as long as the device uses it.
pub(super) struct AsideHold(Arc<Aside>);

impl Drop for AsideHold {
    fn drop(&mut self) {
        self.0.pins.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A block on its way out.
#[derive(Debug)]
struct Leaving {
    block: Arc<Block>,
    runs: Vec<PageRun>,
    waits: Vec<Receiver<()>>,
}

impl Leaving {
    /// Whether nothing refers to it any longer.
    fn has_left(&mut self, patience: Duration) -> bool {
        self.waits.retain(|wait| {
            let answer = wait.recv_timeout(patience);
            matches!(answer, Err(crossbeam_channel::RecvTimeoutError::Timeout))
        });
        self.waits.is_empty()
    }

    fn overlaps(&self, mapping: &Mapping) -> bool {
        let end = self.block.hva + self.block.bytes();
        self.block.id == mapping.id || (self.block.hva < mapping.end && mapping.start < end)
    }
}

/// What is known of the VMM's memory beside the managed blocks.
#[derive(Debug, Default)]
pub(super) struct Plugging {
    /// Memory backends that were no RAM at the hand-over.
    foreign: Vec<MemfdId>,
    leaving: Vec<Leaving>,
}

impl Plugging {
    /// What is mapped at the hand-over and not among the blocks found there is no RAM.
    pub(super) fn new(mappings: &[Mapping], blocks: &[RamBlock]) -> Self {
        let foreign = mappings.iter().map(|mapping| mapping.id);
        Self {
            foreign: foreign
                .filter(|id| blocks.iter().all(|block| block.id != *id))
                .collect(),
            leaving: Vec::new(),
        }
    }

    /// The same as a former process found it.
    pub(super) fn again(foreign: &[FileId]) -> Self {
        Self {
            foreign: foreign.iter().map(|id| (*id).into()).collect(),
            leaving: Vec::new(),
        }
    }

    /// What is no RAM, for a successor.
    pub(super) fn foreign(&self) -> Vec<FileId> {
        self.foreign.iter().map(|id| (*id).into()).collect()
    }
}

/// The blocks that stand aside.
#[derive(Debug, Default)]
pub(super) struct AsideList(RwLock<Vec<Arc<Aside>>>);

impl AsideList {
    fn all(&self) -> Vec<Arc<Aside>> {
        self.0
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn change<T>(&self, change: impl FnOnce(&mut Vec<Arc<Aside>>) -> T) -> T {
        change(&mut self.0.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Bytes that stand aside, and why, each reason once.
    pub(super) fn report(&self) -> (u64, Vec<String>) {
        let all = self.all();
        let bytes = all.iter().map(|aside| aside.mapping.length()).sum();
        let mut reasons: Vec<String> = all.iter().map(|aside| aside.reason.clone()).collect();
        reasons.dedup();
        (bytes, reasons)
    }

    /// Makes a range of a block that stands aside present, and keeps the block there. `None` where
    /// the range is in none.
    pub(super) fn hold(&self, range: &HostRange) -> Option<std::io::Result<AsideHold>> {
        let list = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let aside = list.iter().find(|aside| aside.holds(range))?;
        let file = aside.file.as_ref()?;
        aside.pins.fetch_add(1, Ordering::AcqRel);
        let hold = AsideHold(Arc::clone(aside));
        // A hole would be a stray access to our mapping. All of this memory is local anyway.
        let flags = FallocateFlags::KEEP_SIZE;
        let made = rustix::fs::fallocate(file, flags, range.file_offset, range.length);
        Some(made.map(|()| hold).map_err(Into::into))
    }

    /// Whether a block with this memfd stands aside.
    pub(super) fn has(&self, id: MemfdId) -> bool {
        self.all().iter().any(|aside| aside.mapping.id == id)
    }
}

impl Aside {
    fn holds(&self, range: &HostRange) -> bool {
        let end = self.mapping.offset + self.mapping.length();
        self.mapping.id == range.memfd
            && self.mapping.offset <= range.file_offset
            && range
                .file_offset
                .checked_add(range.length)
                .is_some_and(|last| last <= end)
    }
}

impl Pager {
    /// Looks at what the VMM has mapped: takes new blocks of RAM over, and lets go of those that are
    /// mapped no longer. Returns the memfds of the blocks that have left.
    ///
    /// To be called now and then, and whenever the front end tells of memory that is not known. May
    /// wait for the memory servers' word, for as long as a session takes to answer.
    pub fn follow_memory(&self) -> std::io::Result<Vec<MemfdId>> {
        let mut plugging = lock(&self.plugging);
        let mappings = self.vmm.mappings()?;
        if mappings.is_empty() {
            // No guest runs without RAM: the VMM is ending.
            return Ok(Vec::new());
        }
        self.send_off(&mut plugging, &mappings);
        let gone = self.finish_leaving(&mut plugging);
        self.aside.change(|list| {
            list.retain(|aside| mappings.contains(&aside.mapping));
        });
        for mapping in mappings {
            self.look_at(&plugging, mapping);
        }
        Ok(gone)
    }

    /// Looks at what the VMM has open. While there is something that reaches past its page tables into guest RAM,
    /// nothing is evicted: what such a device writes to a page on its way out would be lost.
    ///
    /// To be called now and then, for disks and devices are plugged without a word to us.
    pub fn follow_files(&self) -> std::io::Result<()> {
        let found = self.vmm.forbidden_file()?;
        let mut hindrance = lock(&self.hindrance);
        if self.shared.pace.suspend_eviction(found.is_some()) {
            match &found {
                Some(reason) => tracing::error!(
                    "nothing of this guest's memory is evicted any more, and it may wait for room: {reason}"
                ),
                None => tracing::info!("the guest's memory is evicted again"),
            }
            self.shards.iter().for_each(Inbox::ring);
        }
        *hindrance = found;
        Ok(())
    }

    /// Why nothing is evicted, in words with the cure, where that is so.
    pub fn hindrance(&self) -> Option<String> {
        lock(&self.hindrance).clone()
    }

    /// Has the shards drop what is mapped no longer.
    fn send_off(&self, plugging: &mut Plugging, mappings: &[Mapping]) {
        for block in self.ram.blocks() {
            let leaves = |leaving: &Leaving| Arc::ptr_eq(&leaving.block, &block);
            // A block is unplugged as a whole. Where some of it is missing, the VMM is replacing
            // pages (QEMU does so with poisoned ones at a reset, and unmaps them before).
            let is_there = mappings.iter().any(|mapping| mapping.id == block.id);
            if is_there || plugging.leaving.iter().any(leaves) {
                continue;
            }
            tracing::info!(bytes = block.bytes(), memfd = %block.id, "guest RAM was unplugged");
            let regions = self.ram.regions().into_iter();
            let regions = regions.filter(|region| Arc::ptr_eq(&region.block, &block));
            let runs: Vec<PageRun> = regions.map(|region| region.pages).collect();
            for run in &runs {
                // The limit counts what is free, and our descriptor stays open for some time yet.
                if let Err(error) = self.ram.punch(*run) {
                    tracing::warn!(%error, "unplugged memory is not free before it has left");
                }
            }
            let waits = runs.iter().map(|run| {
                let (answer, wait) = bounded(1);
                self.shards[self.shard_of(*run)].send(ShardEvent::Unplug(*run, answer));
                wait
            });
            let waits = waits.collect();
            crash_points::pass(Point::UnplugTold);
            plugging.leaving.push(Leaving { block, runs, waits });
        }
    }

    /// Forgets blocks that nothing refers to any longer; returns their memfds.
    fn finish_leaving(&self, plugging: &mut Plugging) -> Vec<MemfdId> {
        let mut gone = Vec::new();
        plugging.leaving.retain_mut(|leaving| {
            let has_left = leaving.has_left(LEAVE_PATIENCE);
            if has_left {
                self.ram.remove(&leaving.runs);
                gone.push(leaving.block.id);
            }
            !has_left
        });
        if !gone.is_empty() {
            crash_points::pass(Point::UnplugDone);
            let _alone = lock(&self.changing);
            let ram_bytes = self.ram_bytes();
            self.shrink(Standing {
                ram_bytes,
                ..self.standing()
            });
            tracing::info!(ram = %format_size(ram_bytes), "guest RAM is smaller");
        }
        gone
    }

    /// Takes a mapping over if it is RAM that is not managed yet.
    fn look_at(&self, plugging: &Plugging, mapping: Mapping) {
        let is_managed = |block: &Arc<Block>| block.id == mapping.id;
        if plugging.foreign.contains(&mapping.id)
            || plugging
                .leaving
                .iter()
                .any(|leaving| leaving.overlaps(&mapping))
            || self.ram.blocks().iter().any(is_managed)
        {
            return;
        }
        let mut aside = self.aside.all().into_iter();
        let aside = aside.find(|aside| aside.mapping == mapping);
        if aside
            .as_ref()
            .is_some_and(|aside| Instant::now() < aside.retry_at)
        {
            return;
        }
        let bytes = mapping.length();
        match self.take_in(&mapping, aside.as_ref()) {
            Ok(()) => {
                tracing::info!(bytes, ram = %format_size(self.ram_bytes()), "guest RAM was plugged");
            }
            Err(reason) => self.set_aside(mapping, aside, with_causes(&reason)),
        }
    }

    /// Notes why a block is not managed.
    fn set_aside(&self, mapping: Mapping, before: Option<Arc<Aside>>, reason: String) {
        let is_in_use = |before: &Arc<Aside>| before.pins.load(Ordering::Acquire) > 0;
        if before.as_ref().is_some_and(is_in_use) {
            // Whoever uses it holds on to the old note.
            return;
        }
        if before.as_ref().is_none_or(|before| before.reason != reason) {
            tracing::error!(
                bytes = mapping.length(), %reason,
                "hot-plugged memory is not paged: it stays local, beyond the limit"
            );
        }
        let retry_at = Instant::now() + RETRY_AFTER;
        let block = self.vmm.plugged_block(&mapping);
        let aside = Arc::new(Aside {
            file: block.ok().map(|block| block.memfd),
            mapping: mapping.clone(),
            reason,
            retry_at,
            pins: AtomicU64::new(0),
        });
        self.aside.change(|list| {
            list.retain(|aside| aside.mapping != mapping);
            list.push(aside);
        });
    }

    /// Manages a block.
    fn take_in(&self, mapping: &Mapping, aside: Option<&Arc<Aside>>) -> Result<(), AsideReason> {
        let in_use = |aside: &Arc<Aside>| aside.pins.load(Ordering::Acquire) > 0;
        if aside.is_some_and(in_use) {
            return Err(AsideReason::InUse);
        }
        let block = self.vmm.plugged_block(mapping)?;
        if block.huge_page_bytes.is_some() || self.ram.page_size().is_huge() {
            return Err(AsideReason::HugePages);
        }
        let _alone = lock(&self.changing);
        let before = self.standing();
        if self.course() != Course::Serving {
            return Err(LimitError::Leaving.into());
        }
        let grown = Standing {
            ram_bytes: self.ram_bytes() + block.length,
            ..before
        };
        if grown.ram_bytes > self.most_ram_bytes {
            return Err(guest_ram::NoRoom.into());
        }
        self.promise(&grown)?;
        let backed = self.back_staging(&before, &grown);
        let plugged = backed.map_err(AsideReason::from).and_then(|backing| {
            self.aside.change(|list| {
                // Nobody starts to use it while the list is held.
                if aside.is_some_and(in_use) {
                    return Err(AsideReason::InUse);
                }
                self.plug(block)?;
                // Managed or aside, never seen as both.
                list.retain(|aside| aside.mapping != *mapping);
                Ok(backing)
            })
        });
        match plugged {
            Ok(backing) => {
                self.settle(grown, backing);
                Ok(())
            }
            Err(reason) => {
                self.promise_less(&before);
                Err(reason)
            }
        }
    }

    /// Gives a block to the shards: all of it or nothing. Only then may anything of it be evicted.
    fn plug(&self, block: RamBlock) -> Result<(), AsideReason> {
        let regions = self.ram.add(block)?;
        if let Err(error) = self.note_blocks() {
            let runs: Vec<PageRun> = regions.iter().map(|region| region.pages).collect();
            self.ram.remove(&runs);
            return Err(error.into());
        }
        crash_points::pass(Point::PlugRecorded);
        let mut watched = Vec::new();
        for region in &regions {
            match watch(&self.uffds[self.shard_of(region.pages)], &self.ram, region) {
                Ok(populated) => watched.push((region, populated)),
                Err(error) => {
                    for (region, _) in watched {
                        unwatch(&self.uffds[self.shard_of(region.pages)], region);
                    }
                    let runs: Vec<PageRun> = regions.iter().map(|region| region.pages).collect();
                    self.ram.remove(&runs);
                    // It stays mapped, and a successor would take it in as what nobody had promised for.
                    if let Err(error) = self.note_blocks() {
                        tracing::warn!(%error, "the record names a block that is not managed");
                    }
                    return Err(AsideReason::Userfaultfd(error));
                }
            }
        }
        crash_points::pass(Point::PlugWatched);
        for (region, populated) in watched {
            let shard = &self.shards[self.shard_of(region.pages)];
            shard.send(ShardEvent::Plug(region.pages, populated));
        }
        crash_points::pass(Point::PlugTold);
        Ok(())
    }

    /// Writes down the blocks there are, before anything of a new one leaves memory. What is written
    /// down and not mapped (it has left since, or was not taken in the end) does no harm.
    fn note_blocks(&self) -> Result<(), StateError> {
        let blocks = self.ram.records();
        self.update_record(|record| record.blocks = blocks)
    }

    /// RAM that is managed, in bytes.
    pub(super) fn ram_bytes(&self) -> u64 {
        u64::from(self.ram.pages()) * self.ram.page_size().bytes()
    }

    pub(super) fn shard_of(&self, run: PageRun) -> usize {
        self.ram.shard_of(run)
    }
}

/// Watches a region. Returns what is there of it: from here on no page comes into being without our
/// doing.
pub(super) fn watch(uffd: &Uffd, ram: &GuestRam, region: &Region) -> std::io::Result<Vec<PageRun>> {
    let (start, length) = region.address_range();
    uffd.register(start, length)?;
    ram.populated(region).inspect_err(|_| unwatch(uffd, region))
}

fn unwatch(uffd: &Uffd, region: &Region) {
    let (start, length) = region.address_range();
    if let Err(error) = uffd.unregister(start, length) {
        tracing::warn!(%error, "memory that is not taken over stays registered");
    }
}
