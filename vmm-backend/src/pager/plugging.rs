//! Memory that comes and goes while the guest runs: what the VMM has mapped, against what is
//! managed.
//!
//! A new block is taken over once the servers have promised room for it. Until then, or where it
//! cannot be paged at all, it stands *aside*: it stays in this host's memory, past the limit, and
//! is told loudly. A block that the VMM has mapped no longer leaves: its shards drop all that they
//! keep of it, and its memfd is closed here, so that its memory is free.
//!
//! Lock order: `following`, then `changing` or `plugging`, then the course or `aside`. No pager thread takes any of
//! them. Servers are waited for under the first two alone: the front end's word, for which the VMM waits, needs
//! neither.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError, bounded};
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
use crate::handover::discover::{Mapping, RamBlock, Refusal, has_large_folios, host_requirements};
use crate::handover::{MemfdId, Vmm};

/// Until a block that stands aside is tried again; then after twice as long each time, for all processes of the host
/// are looked through before.
const RETRY_AFTER: Duration = Duration::from_secs(5);
/// ... and this at most.
const RETRY_AFTER_MOST: Duration = Duration::from_secs(60);

/// How long requests of our own device are waited for that use a block aside.
const USERS_PATIENCE: Duration = Duration::from_millis(20);

/// How long a block that leaves is waited for at once; after that it is looked at again later.
const LEAVE_PATIENCE: Duration = Duration::from_millis(100);

/// Between two looks for large folios.
const FOLIOS_AGAIN: Duration = Duration::from_secs(30);

/// What is told of large folios that cannot be seen.
const UNSEEN_FOLIOS: &str = "shared-memory huge pages were on while the guest ran, the host has some (ShmemHugePages in /proc/meminfo), and \
     whether they are the guest's cannot be told: shut the guest down, or end what else has them";
/// ... and not be looked for.
const UNKNOWN_FOLIOS: &str = "shared-memory huge pages were on while the guest ran, and the supervisor, of an earlier build, does not look for \
     those that are left: run 'outram restart'";

/// What is told until the VMM's open files were looked at.
const UNSEEN_FILES: &str =
    "what QEMU has open was not looked at yet since its backend started anew";

/// What was last seen that forbids evicting anything.
#[derive(Debug, Default)]
pub(super) struct Hindrances {
    /// Of what the VMM has open, in words.
    file: Option<String>,
    folios: Folios,
    /// Shared memory was allowed to come as large folios while the guest ran: those that nobody has mapped cannot be
    /// seen.
    were_allowed: bool,
    /// The same could not be written down.
    is_unwritten: bool,
}

/// Whether the guest's RAM holds large folios.
#[derive(Debug, Default)]
enum Folios {
    /// There were none, and none have come.
    #[default]
    None,
    /// They may have come since.
    NotKnown,
    /// They were looked for at that time, and why that is not all; in words.
    Found(Instant, String),
}

impl Hindrances {
    /// Of a guest that is taken over, and what its former process has noted of large folios.
    pub(super) fn not_known(vmm: &Vmm, were_allowed: bool) -> Self {
        Self {
            file: vmm.looks_at_files().then(|| UNSEEN_FILES.to_owned()),
            folios: Folios::NotKnown,
            were_allowed,
            is_unwritten: false,
        }
    }
}

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

/// What is told of a block aside.
#[derive(Debug)]
struct Note {
    reason: String,
    retry_at: Instant,
    /// For how long it was put off.
    patience: Duration,
}

impl Note {
    /// Of a block that is to be looked at now.
    fn new(reason: String) -> Self {
        Self {
            reason,
            retry_at: Instant::now(),
            patience: Duration::ZERO,
        }
    }

    /// Has the block tried again in a while, which is longer than the one `before`.
    fn put_off(&mut self, before: Duration) {
        self.patience = (2 * before).clamp(RETRY_AFTER, RETRY_AFTER_MOST);
        self.retry_at = Instant::now() + self.patience;
    }
}

/// A block that is not managed: all of it is local.
#[derive(Debug)]
pub(super) struct Aside {
    mapping: Mapping,
    /// Its memfd, where it may be used by our own device.
    file: Option<File>,
    since: Instant,
    note: Mutex<Note>,
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
    fn has_left(&mut self) -> bool {
        self.waits
            .retain(|wait| matches!(wait.try_recv(), Err(TryRecvError::Empty)));
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
        let mut reasons: Vec<String> = all.iter().map(|aside| aside.reason()).collect();
        reasons.dedup();
        (bytes, reasons)
    }

    /// Makes a range of a block that stands aside present, and keeps the block there. `None` where
    /// the range is in none.
    pub(super) fn hold(&self, range: &HostRange) -> Option<std::io::Result<AsideHold>> {
        let list = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let aside = list.iter().find(|aside| aside.holds(range))?;
        let Some(file) = &aside.file else {
            return Some(Err(std::io::Error::other(aside.reason())));
        };
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
    fn reason(&self) -> String {
        lock(&self.note).reason.clone()
    }

    fn is_in_use(&self) -> bool {
        self.pins.load(Ordering::Acquire) > 0
    }

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
    /// To be called now and then. May wait for the memory servers' word, for as long as a session
    /// takes to answer.
    pub fn follow_memory(&self) -> std::io::Result<Vec<MemfdId>> {
        let _alone = lock(&self.following);
        let mappings = self.vmm.mappings()?;
        if mappings.is_empty() {
            // No guest runs without RAM: the VMM is ending.
            return Ok(Vec::new());
        }
        self.send_off(&mappings);
        // Before that, for what has left is told of once.
        self.forget_aside()?;
        let gone = self.finish_leaving();
        for mapping in mappings {
            self.look_at(mapping);
        }
        Ok(gone)
    }

    /// Forgets what stood aside and is mapped no longer.
    fn forget_aside(&self) -> std::io::Result<()> {
        if self.aside.all().is_empty() {
            return Ok(());
        }
        self.aside.change(|list| {
            // Looked at now: what has been set aside since an earlier look would be missing there.
            let mappings = self.vmm.mappings()?;
            list.retain(|aside| aside.is_in_use() || mappings.contains(&aside.mapping));
            Ok(())
        })
    }

    /// Sets aside what the front end tells of and nobody has looked at yet, until it is. Waits for no server.
    pub(super) fn set_new_aside(&self, is_told: impl Fn(MemfdId) -> bool) -> std::io::Result<()> {
        for mapping in self.vmm.mappings()? {
            let is_left = |leaving: &Leaving| leaving.block.id == mapping.id;
            if !is_told(mapping.id) || lock(&self.plugging).leaving.iter().any(is_left) {
                continue;
            }
            let reason = "it is not taken over yet".to_owned();
            let aside = self.aside_of(mapping, reason);
            self.aside.change(|list| {
                let is_same = |other: &Arc<Aside>| other.mapping == aside.mapping;
                if !list.iter().any(is_same) && !self.is_managed(aside.mapping.id) {
                    list.push(Arc::new(aside));
                }
            });
        }
        Ok(())
    }

    pub(super) fn is_managed(&self, memfd: MemfdId) -> bool {
        self.ram.blocks().iter().any(|block| block.id == memfd)
    }

    /// Looks at what the VMM has open, and at the host's settings. While there is something that reaches past its
    /// page tables into guest RAM, nothing is evicted: what such a device writes to a page on its way out would be
    /// lost. Nor is it while shared memory may come as large folios, of which a page cannot be taken out.
    ///
    /// To be called now and then, for disks and devices are plugged without a word to us.
    pub fn follow_files(&self) -> std::io::Result<()> {
        // Others ask for the words alone: a look for large folios takes long.
        let mut seen = lock(&self.hindrances);
        let large = self.large_pages(&mut seen);
        // After that, for disks may have come meanwhile.
        let forbidden = self.vmm.forbidden_file();
        // Where its files cannot be looked at, what was seen of them stands.
        if let Ok(found) = &forbidden {
            seen.file.clone_from(found);
        }
        let found = seen.file.clone().or(large);
        lock(&self.hindrance).clone_from(&found);
        if self.shared.pace.suspend_eviction(found.is_some()) {
            match &found {
                Some(reason) => tracing::error!(
                    "nothing of this guest's memory is evicted any more, and it may wait for room: {reason}"
                ),
                None => tracing::info!("the guest's memory is evicted again"),
            }
            self.shards.iter().for_each(Inbox::ring);
        }
        forbidden.map(drop)
    }

    /// Why pages cannot be taken out one by one: shared memory may come as large folios now, or may have before.
    fn large_pages(&self, seen: &mut Hindrances) -> Option<String> {
        if self.shared.page_size.is_huge() {
            return None;
        }
        if let Err(refused) = host_requirements() {
            // Not where it could not be seen: that is looked at again, and what has come by then is looked for.
            if matches!(refused, Refusal::SharedThp { .. }) {
                self.note_large_folios(seen, true);
            }
            seen.folios = Folios::NotKnown;
            return Some(refused.to_string());
        }
        match &seen.folios {
            Folios::None => return None,
            // A look at all of a guest's pages takes long.
            Folios::Found(last, reason) if last.elapsed() < FOLIOS_AGAIN => {
                return Some(reason.clone());
            }
            _ => {}
        }
        let found = match self.vmm.looks_at_folios() {
            true => match self.vmm.large_folios() {
                Ok(Some(found)) => Some(found),
                // What was made large and not used since is in nobody's page tables.
                Ok(None) => {
                    (seen.were_allowed && has_large_folios()).then_some(UNSEEN_FOLIOS.to_owned())
                }
                Err(error) => Some(error.to_string()),
            },
            false => seen.were_allowed.then_some(UNKNOWN_FOLIOS.to_owned()),
        };
        seen.folios = match &found {
            None => {
                self.note_large_folios(seen, false);
                Folios::None
            }
            Some(reason) => Folios::Found(Instant::now(), reason.clone()),
        };
        found
    }

    /// Notes whether large folios may have come that cannot be seen: for a successor, too.
    fn note_large_folios(&self, seen: &mut Hindrances, may_be: bool) {
        if seen.were_allowed == may_be && !seen.is_unwritten {
            return;
        }
        seen.were_allowed = may_be;
        let written = self.records.write_large_folios(may_be);
        let was_unwritten = std::mem::replace(&mut seen.is_unwritten, written.is_err());
        if let Err(error) = written
            && !was_unwritten
        {
            tracing::error!(%error, "a backend that follows this one would not know of large folios; it is tried again");
        }
    }

    /// Why nothing is evicted, in words with the cure, where that is so.
    pub fn hindrance(&self) -> Option<String> {
        lock(&self.hindrance).clone()
    }

    /// Has the shards drop what is mapped no longer.
    fn send_off(&self, mappings: &[Mapping]) {
        for block in self.departing(mappings) {
            tracing::info!(bytes = block.bytes(), memfd = %block.id, "guest RAM was unplugged");
            let regions = self.ram.regions().into_iter();
            let regions = regions.filter(|region| Arc::ptr_eq(&region.block, &block));
            let runs: Vec<PageRun> = regions.map(|region| region.pages).collect();
            // Takes long, and the front end may ask for `plugging`: a block counts as managed meanwhile.
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
            let leaving = Leaving { block, runs, waits };
            lock(&self.plugging).leaving.push(leaving);
        }
    }

    /// Blocks that are mapped no longer, and are not on their way out yet. None other sends them off: `following`
    /// is held.
    fn departing(&self, mappings: &[Mapping]) -> Vec<Arc<Block>> {
        let plugging = lock(&self.plugging);
        let mut blocks = self.ram.blocks();
        blocks.retain(|block| {
            let leaves = |leaving: &Leaving| Arc::ptr_eq(&leaving.block, block);
            // A block is unplugged as a whole. Where some of it is missing, the VMM is replacing
            // pages (QEMU does so with poisoned ones at a reset, and unmaps them before).
            let is_there = mappings.iter().any(|mapping| mapping.id == block.id);
            !is_there && !plugging.leaving.iter().any(leaves)
        });
        blocks
    }

    /// Forgets blocks that nothing refers to any longer; returns their memfds.
    fn finish_leaving(&self) -> Vec<MemfdId> {
        let mut gone = Vec::new();
        let began = Instant::now();
        loop {
            let mut plugging = lock(&self.plugging);
            plugging.leaving.retain_mut(|leaving| {
                let has_left = leaving.has_left();
                if has_left {
                    self.ram.remove(&leaving.runs);
                    gone.push(leaving.block.id);
                }
                !has_left
            });
            if plugging.leaving.is_empty() || began.elapsed() >= LEAVE_PATIENCE {
                break;
            }
            drop(plugging);
            std::thread::sleep(LEAVE_PATIENCE / 100);
        }
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
    fn look_at(&self, mapping: Mapping) {
        let is_none_of_ours = {
            let plugging = lock(&self.plugging);
            let overlaps = |leaving: &Leaving| leaving.overlaps(&mapping);
            plugging.foreign.contains(&mapping.id) || plugging.leaving.iter().any(overlaps)
        };
        if is_none_of_ours || self.is_managed(mapping.id) {
            return;
        }
        let mut aside = self.aside.all().into_iter();
        let aside = aside.find(|aside| aside.mapping == mapping);
        if aside
            .as_ref()
            .is_some_and(|aside| Instant::now() < lock(&aside.note).retry_at)
        {
            return;
        }
        let is_old = aside.is_some_and(|aside| aside.since.elapsed() > RETRY_AFTER);
        let bytes = mapping.length();
        match self.take_in(&mapping) {
            Ok(()) => {
                tracing::info!(bytes, ram = %format_size(self.ram_bytes()), "guest RAM was plugged");
            }
            // It is the device's for moments only, as a rule.
            Err(AsideReason::InUse) if !is_old => {}
            Err(reason) => self.set_aside(mapping, &reason),
        }
    }

    /// Notes why a block is not managed.
    fn set_aside(&self, mapping: Mapping, reason: &AsideReason) {
        let is_in_use = matches!(reason, AsideReason::InUse);
        let aside = self.aside_of(mapping, with_causes(reason));
        self.aside.change(|list| {
            let before = list
                .iter()
                .position(|before| before.mapping == aside.mapping);
            let before = before.map(|at| list.swap_remove(at));
            // One that the device uses is not looked at any closer.
            let former = before.as_ref().filter(|_| !is_in_use);
            let put_off = former.map_or(Duration::ZERO, |before| lock(&before.note).patience);
            lock(&aside.note).put_off(put_off);
            if before
                .as_ref()
                .is_none_or(|before| before.reason() != aside.reason())
            {
                tracing::error!(
                    bytes = aside.mapping.length(),
                    reason = aside.reason(),
                    "hot-plugged memory is not paged: it stays local, beyond the limit"
                );
            }
            list.push(match before {
                // Whoever uses it holds on to it.
                Some(before) if before.is_in_use() => {
                    std::mem::swap(&mut *lock(&before.note), &mut *lock(&aside.note));
                    before
                }
                _ => Arc::new(aside),
            });
        });
    }

    /// A block that is to be looked at, and why it is not managed.
    fn aside_of(&self, mapping: Mapping, reason: String) -> Aside {
        // Whatever is against paging it, the device may use it.
        let block = self.vmm.known_block(&mapping);
        Aside {
            file: block.ok().map(|block| block.memfd),
            mapping,
            since: Instant::now(),
            note: Mutex::new(Note::new(reason)),
            pins: AtomicU64::new(0),
        }
    }

    /// Manages a block.
    fn take_in(&self, mapping: &Mapping) -> Result<(), AsideReason> {
        let is_in_use = |list: &[Arc<Aside>]| {
            let mut same = list.iter().filter(|aside| aside.mapping == *mapping);
            same.any(|aside| aside.is_in_use())
        };
        if is_in_use(&self.aside.all()) {
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
        let backing = backed.inspect_err(|_| self.promise_less(&before))?;
        let plugged = self.aside.change(|list| {
            // Nobody starts to use it while the list is held.
            let since = Instant::now();
            while is_in_use(list) {
                if since.elapsed() >= USERS_PATIENCE {
                    return Err(AsideReason::InUse);
                }
                std::thread::sleep(USERS_PATIENCE / 20);
            }
            self.plug(block)?;
            // Managed or aside, never seen as both.
            list.retain(|aside| aside.mapping != *mapping);
            Ok(())
        });
        match &plugged {
            Ok(()) => self.settle(grown, backing),
            Err(_) => {
                self.unback_staging(&before, &grown, backing);
                self.promise_less(&before);
            }
        }
        plugged
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

/// Watches a region of which nothing has left memory yet: where this fails, the guest goes on without us. Returns what
/// is there of it: from here on no page comes into being without our doing.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_stays_aside_is_looked_at_ever_more_rarely() {
        let mut note = Note::new("it is not taken over yet".into());
        assert!(note.retry_at <= Instant::now());
        let put_off = |_| {
            let before = Instant::now();
            note.put_off(note.patience);
            assert!(note.retry_at >= before + note.patience);
            note.patience.as_secs()
        };
        assert_eq!([(); 6].map(put_off), [5, 10, 20, 40, 60, 60]);
    }
}
