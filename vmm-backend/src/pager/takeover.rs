//! Taking a guest over from a process of ours that died, in the midst of anything.
//!
//! What is left of it: its state directory, the userfaultfds in the VMM, the guest's memory, and its
//! slabs at the servers for as long as their lease. The guest stands still at its next fault
//! meanwhile. In this order:
//!
//! 1. The ranges are registered (again: it does no harm), so that no page comes into being unseen.
//!    What the guest discards from then on is told by an event that nobody has read yet.
//! 2. Every entry of the table that was ever written is recovered, by what the guest's memory has of its
//!    page.
//! 3. Sessions with the servers are resumed in the background, and the threads start. Whoever waited
//!    is woken, for faults that were read by the dead process are not told again.
//!
//! A discard that the dead process had read, and had not applied to the table, is forgotten: the
//! kernel lets its caller go on as the event is read, whatever becomes of the reader. A page that was
//! in memory is found to be a hole, and reads as zeros; one that lay elsewhere comes back with the
//! bytes that the guest gave back: its own last ones, never older ones. Balloon and free-page
//! reporting promise a guest no more than that. It is kept until the guest gives it back again.
//!
//! Nothing is needed of the VMM but that it lives; the vhost-user connection comes later, by itself.
//! Until the last step nothing has been changed that a further successor would not find.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crossbeam_channel::{Sender, unbounded};
use outram_wire::limits::Standing;
use outram_wire::lost_pages::LostPages;
use outram_wire::server::SlabId;
use outram_wire::tuning::Tuning;
use outram_wire::units::{PageSize, VmId};

use super::guest_ram::GuestRam;
use super::inbox::Inbox;
use super::plugging::{Hindrances, Plugging, watch};
use super::record::{BlockRecord, Record, Records};
use super::state_dir::{StagingArea, StateDir, StateError, written_pages};
use super::uffd::Uffd;
use super::{Held, Pager, PagerConfig, PagerError, PreparedPager, pace_of, promises, system};
use crate::crash_points::{self, Point};
use crate::engine::ages::Ages;
use crate::engine::compressed::CompressedPool;
use crate::engine::recovery::recover_page;
use crate::engine::seal::PageKey;
use crate::engine::slots::{GroupPlace, MOST_GROUPS, SlabRef, SlotPool};
use crate::engine::staging::StagingPool;
use crate::engine::stats::Stats;
use crate::engine::table::{PageTable, State, Words};
use crate::engine::{PageIndex, PageRun, Shared, StagingSlot, budget};
use crate::handover::discover::{RamBlock, Refusal};
use crate::handover::{HandoverError, MemfdId, Powers, Vmm, Way};
use crate::remote::{
    AddressError, Former, RemoteConfig, RemoteError, ServerAddress, Session, SessionEvent,
};

/// More userfaultfds than any backend asks for.
const MOST_SHARDS: usize = 4096;

/// Why a guest is not taken over. It stands still at its next fault, as before.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// What the former process left.
    #[error(transparent)]
    State(#[from] StateError),
    /// The VMM.
    #[error(transparent)]
    Vmm(#[from] HandoverError),
    /// The guest's RAM.
    #[error(transparent)]
    Ram(#[from] Refusal),
    /// A server's address.
    #[error("the address of a memory server in the record")]
    Address(#[from] AddressError),
    /// The VMM has none of the RAM that was taken over.
    #[error("the VMM has no guest RAM mapped any longer: it is ending")]
    NoRam,
    /// A session.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// A thread, or a system call.
    #[error(transparent)]
    Pager(Box<PagerError>),
}

impl From<PagerError> for TakeoverError {
    fn from(error: PagerError) -> Self {
        Self::Pager(Box::new(error))
    }
}

/// A guest whose backend died.
pub struct Orphan {
    vmm: Arc<Vmm>,
    record: Record,
    state_dir: StateDir,
}

impl Orphan {
    /// The guest `vm` that a former process served out of this state directory, if it runs still.
    pub fn find(
        state_dir: &Path,
        vm: VmId,
        powers: &Powers,
    ) -> Result<Option<Self>, TakeoverError> {
        let state_dir = StateDir::open(state_dir);
        let records = state_dir.records();
        let Some((vmm, is_known)) = records.vmm()? else {
            return Ok(None);
        };
        let vmm = match Vmm::reopen(vmm.pid, vmm.start_time) {
            Ok(vmm) if !vmm.has_ended() => Arc::new(vmm.with_powers(powers)),
            Ok(_) => return Ok(None),
            Err(HandoverError::VmmGone { source, .. }) if is_gone(&source) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if !is_known {
            let why = "its format has a version that this build does not know";
            return Err(records.unusable("record", why).into());
        }
        let record = records.record()?;
        let is_sound = record.vm == vm
            && [PageSize::BASE, PageSize::HUGE].contains(&record.page_size)
            && (1..=crate::handover::MAX_UFFDS).contains(&record.userfaultfds.len());
        if !is_sound {
            let why = "it is not that of a guest of this UUID";
            return Err(records.unusable("record", why).into());
        }
        Ok(Some(Self {
            vmm,
            record,
            state_dir,
        }))
    }

    /// Removes what a former process left of a guest that has ended.
    pub fn clear(state_dir: &Path) {
        StateDir::open(state_dir).adopt();
    }

    /// The numbers of its userfaultfds in the VMM.
    pub fn userfaultfds(&self) -> &[i32] {
        &self.record.userfaultfds
    }

    /// How they were obtained.
    pub fn way(&self) -> Way {
        self.record.way
    }

    /// What the former process had its far-memory disk's table in.
    pub fn disk_table(&self) -> Result<Box<dyn Words>, StateError> {
        Ok(Box::new(self.state_dir.open_disk_table()?))
    }

    /// Serves it from here on. Of `remote` the identity is used; servers and secret are those that
    /// the former process had.
    pub fn take_over(
        self,
        remote: &RemoteConfig,
        lost_pages: LostPages,
    ) -> Result<(Arc<Vmm>, Pager), TakeoverError> {
        check(&self.state_dir.records(), &self.record)?;
        let size = self.record.page_size;
        let table = self.state_dir.open_table(self.record.vm)?;
        let table_file = table.file().map_err(system("duplicating a descriptor"))?;
        let written =
            written_pages(&table_file).map_err(system("looking for the table's holes"))?;
        let table = PageTable::new(Box::new(table), &written);
        let staging = Arc::new(self.state_dir.open_staging(size)?);
        let ram = Arc::new(self.find_ram(table.pages())?);
        crash_points::pass(Point::RecoverOpened);
        let uffds = self.fetch_userfaultfds()?;
        crash_points::pass(Point::RecoverFetched);
        let keys = self.state_dir.records().keys()?;
        let tuning = self.state_dir.records().tuning()?;
        let standing = self.standing(&ram, &tuning);
        let sizes = standing.sizes();
        let shared = Arc::new(Shared {
            page_size: size,
            table,
            budget: budget::Budget::new(sizes.budget_pages, size),
            // Its capacity is set once its slots are claimed.
            staging: StagingPool::new(0),
            compressed: CompressedPool::default(),
            slots: former_slots(&self.state_dir.records(), &self.record)?,
            ages: Ages::default(),
            pace: pace_of(&tuning, size).map_err(|error| {
                let records = self.state_dir.records();
                records.unusable("granularity", error.to_string())
            })?,
            key: PageKey::new(&keys.secret, keys.seal),
            lost_pages,
            stats: Stats::new(),
        });
        shared.slots.set_keep_allowance(sizes.keep_pages);
        shared
            .compressed
            .set_capacity(sizes.compressed_pages, &shared.budget);
        let recovered = recover_table(&shared, &ram, &uffds, &staging)
            .map_err(system("taking guest RAM over again"))?;
        crash_points::pass(Point::RecoverTable);
        fit_staging(&shared, &staging, sizes.staging_pages)
            .map_err(system("allocating the staging area"))?;
        crash_points::pass(Point::RecoverStaging);
        let remote = RemoteConfig {
            addresses: self.addresses()?,
            secret: keys.session,
            data_connections: uffds.len() + 1,
            ..remote.clone()
        };
        // What was plugged into the guest is there still.
        // Until the first look at all that forbids evicting, which comes at once.
        shared.pace.suspend_eviction(true);
        let were_allowed = self.state_dir.records().large_folios()?;
        let hindrances = Hindrances::not_known(&self.vmm, were_allowed);
        let (sender, events) = unbounded();
        let servers = remote.addresses.len();
        let each = standing.reserve_bytes(servers);
        let parts = self.state_dir.records().promises().unwrap_or_else(|error| {
            // What they lend is theirs to keep; what more was promised is asked for anew.
            tracing::warn!(%error, "the servers are asked for equal parts");
            Vec::new()
        });
        let parts = promises::resumed(&parts, each, servers);
        crash_points::pass(Point::RecoverSessions);
        let sessions = resume_sessions(&remote, &parts, &recovered, &sender)?;
        let prepared = PreparedPager {
            config: PagerConfig {
                vm: self.record.vm,
                ram_bytes: standing.ram_bytes,
                max_ram_bytes: self.record.most_ram_bytes,
                page_size: size,
                limit: self.record.limit,
                shards: uffds.len() as u32,
                seal: keys.seal,
                lost_pages,
                tuning,
                // Used where the state directory is made.
                disk_table_bytes: 0,
            },
            sizes,
            shared,
            staging,
            table_file,
            state_dir: self.state_dir,
            sessions: sessions.into(),
            events,
            servers: self.record.servers.clone(),
        };
        let pager = prepared.spawn(Held {
            vmm: Arc::clone(&self.vmm),
            ram,
            uffds,
            plugging: Plugging::again(&self.record.foreign),
            hindrances,
            record: self.record,
            is_recovered: true,
        })?;
        crash_points::pass(Point::RecoverThreads);
        pager.wake_all();
        // An idle guest may be above its limit.
        pager.shards.iter().for_each(Inbox::ring);
        crash_points::pass(Point::RecoverWoken);
        Ok((self.vmm, pager))
    }

    /// The RAM in its places. Blocks that the VMM has unplugged meanwhile are left out.
    fn find_ram(&self, pages: u32) -> Result<GuestRam, TakeoverError> {
        let (vmm, size) = (&self.vmm, self.record.page_size);
        let shards = self.record.userfaultfds.len() as u32;
        let ram = GuestRam::of(pages, shards, size, vmm);
        let ram = ram.map_err(system("opening QEMU's page map"))?;
        let mappings = vmm.mappings();
        let mappings = mappings.map_err(system("reading the VMM's memory map"))?;
        for block in &self.record.blocks {
            let id = MemfdId::from(block.memfd);
            let Some(mapping) = mappings.iter().find(|mapping| mapping.id == id) else {
                tracing::info!(bytes = block.bytes, memfd = %id, "guest RAM was unplugged meanwhile");
                continue;
            };
            let found = RamBlock {
                file_offset: block.file_offset,
                hva: block.address,
                length: block.bytes,
                ..vmm.known_block(mapping)?
            };
            let pages_are = found.huge_page_bytes.unwrap_or(PageSize::BASE.bytes());
            if pages_are != size.bytes() || !ram.restore(found, &places(block)) {
                let why = format!("its places of block {id} make no sense");
                return Err(self.state_dir.records().unusable("record", why).into());
            }
        }
        if ram.pages() == 0 {
            // No guest runs without RAM: the VMM is ending.
            return Err(TakeoverError::NoRam);
        }
        Ok(ram)
    }

    fn fetch_userfaultfds(&self) -> Result<Vec<Arc<Uffd>>, TakeoverError> {
        let fds = self.vmm.fetch_uffds(&self.record.userfaultfds)?;
        let adopt = |fd| Uffd::adopt_again(fd, self.record.page_size).map(Arc::new);
        let uffds: io::Result<Vec<_>> = fds.into_iter().map(adopt).collect();
        Ok(uffds.map_err(system("the userfaultfd handshake"))?)
    }

    fn standing(&self, ram: &GuestRam, tuning: &Tuning) -> Standing {
        Standing {
            limit: self.record.limit,
            ram_bytes: u64::from(ram.pages()) * self.record.page_size.bytes(),
            page_size: self.record.page_size,
            compressed: tuning.compressed_share.unwrap_or_default(),
        }
    }

    /// The servers that the former process had, in their order.
    pub fn addresses(&self) -> Result<Vec<ServerAddress>, AddressError> {
        addresses(&self.record)
    }
}

/// Refuses a record that no hand-over leaves.
pub(super) fn check(records: &Records, record: &Record) -> Result<(), StateError> {
    let is_sound = (1..=MOST_SHARDS).contains(&record.userfaultfds.len())
        && !record.servers.is_empty()
        && [PageSize::BASE, PageSize::HUGE].contains(&record.page_size);
    match is_sound {
        true => Ok(()),
        false => Err(records.unusable("record", "it names what cannot be")),
    }
}

pub(super) fn addresses(record: &Record) -> Result<Vec<ServerAddress>, AddressError> {
    let servers = record.servers.iter();
    servers.map(|server| server.parse()).collect()
}

/// The slots of the slabs that the former process had.
pub(super) fn former_slots(records: &Records, record: &Record) -> Result<SlotPool, StateError> {
    let (places, next) = records.groups()?;
    let servers = record.servers.len();
    // Two groups in one slab would give two pages the same place.
    let (mut numbers, mut slabs) = (HashSet::new(), HashSet::new());
    let mut is_sound = |place: &GroupPlace| {
        let bytes = u64::from(place.slots) * record.page_size.bytes();
        place.number < next
            && place.slab.server < servers
            && (1..=u64::from(u32::MAX)).contains(&bytes)
            && numbers.insert(place.number)
            && slabs.insert(place.slab)
    };
    if next > MOST_GROUPS || !places.iter().all(&mut is_sound) {
        return Err(records.unusable("groups", "it names what cannot be"));
    }
    let slots = SlotPool::new(servers);
    slots.restore(&places, next);
    Ok(slots)
}

impl Pager {
    /// Has all look again that wait in a fault: those that a former process had read are not told
    /// again.
    fn wake_all(&self) {
        for region in self.ram.regions() {
            let (start, length) = region.address_range();
            let shard = self.shard_of(region.pages);
            if let Err(error) = self.uffds[shard].wake(start, length) {
                tracing::error!(%error, "threads of the guest that wait for memory are not woken");
            }
        }
    }
}

/// Whether an error says that there is no such process.
fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ESRCH | libc::ENOENT | libc::EINVAL)
    )
}

pub(super) fn places(block: &BlockRecord) -> Vec<PageRun> {
    let regions = block.regions.iter();
    let places = regions.map(|region| PageRun {
        first: PageIndex(region.first),
        count: region.count,
    });
    places.collect()
}

/// Watches all RAM and recovers every entry of the table that says anything. Returns the slabs that
/// hold pages.
fn recover_table(
    shared: &Shared,
    ram: &GuestRam,
    uffds: &[Arc<Uffd>],
    staging: &StagingArea,
) -> io::Result<HashSet<SlabRef>> {
    let table = &shared.table;
    let before: Vec<PageRun> = table.touched_in(all_of(table)).collect();
    for region in ram.regions() {
        let shard = ram.shard_of(region.pages);
        let populated = watch(&uffds[shard], ram, &region)?;
        crash_points::pass(Point::RecoverWatched);
        for page in populated.iter().flat_map(|run| run.pages()) {
            recover_page(shared, page, true, staging);
            crash_points::pass(Point::RecoverFirstEntry);
        }
        let own = table.touched_in(region.pages);
        for page in without(own, populated) {
            recover_page(shared, page, false, staging);
        }
    }
    let regions = ram.regions();
    let regions = regions.iter().map(|region| region.pages);
    for page in without(before.into_iter(), regions) {
        let entry = table.load(page);
        if entry.state != State::Absent {
            table.store(page, &entry.into_absent());
        }
    }
    shared.slots.forget_unclaimed();
    let slabs = shared.slots.groups().into_iter().map(|group| group.slab);
    Ok(slabs.collect())
}

fn all_of(table: &PageTable) -> PageRun {
    PageRun {
        first: PageIndex(0),
        count: table.pages(),
    }
}

/// The pages of some runs that are in none of some others; either are in order.
fn without(
    runs: impl Iterator<Item = PageRun>,
    others: impl IntoIterator<Item = PageRun>,
) -> impl Iterator<Item = PageIndex> {
    let mut others = others.into_iter().peekable();
    runs.flat_map(PageRun::pages).filter(move |page| {
        while others.next_if(|other| other.end() <= *page).is_some() {}
        others.peek().is_none_or(|other| !other.contains(*page))
    })
}

/// Backs the staging area as far as its capacity, and beyond that only what a page holds.
fn fit_staging(shared: &Shared, staging: &StagingArea, capacity: u32) -> io::Result<()> {
    let backing = staging.backing();
    backing.back(0, capacity)?;
    let table = &shared.table;
    let pages = table.touched_in(all_of(table)).flat_map(PageRun::pages);
    let held: HashSet<u32> = pages
        .filter_map(|page| table.load(page).staging)
        .map(|slot| slot.0)
        .collect();
    for slot in (capacity..staging.slots()).filter(|slot| !held.contains(slot)) {
        backing.give_back(StagingSlot(slot), 1)?;
    }
    Ok(())
}

fn resume_sessions(
    remote: &RemoteConfig,
    parts: &[u64],
    slabs: &HashSet<SlabRef>,
    events: &Sender<SessionEvent>,
) -> Result<Vec<Session>, RemoteError> {
    let resume = |(server, reserve_bytes): (usize, &u64)| {
        let own = slabs.iter().filter(|slab| slab.server == server);
        let former = Former {
            held: own.map(|slab| SlabId(slab.slab)).collect(),
            reserve_bytes: *reserve_bytes,
        };
        Session::resume(server, remote, former, events.clone())
    };
    parts.iter().enumerate().map(resume).collect()
}
