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
use super::plugging::{Hindrances, Plugging};
use super::record::{BlockRecord, Record, Records};
use super::state_dir::{StagingArea, StateDir, StateError, written_pages};
use super::uffd::Uffd;
use super::{
    Held, Pager, PagerConfig, PagerError, PreparedPager, at_once, pace_of, promises, system,
};
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
        fit_staging(&staging, sizes.staging_pages, &recovered.staged)
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
        let sessions = resume_sessions(&remote, &parts, &recovered.slabs, &sender)?;
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

/// What recovered pages rely on.
struct Recovered {
    /// Slabs that hold pages.
    slabs: HashSet<SlabRef>,
    /// Staging slots that do.
    staged: HashSet<StagingSlot>,
}

/// Watches all RAM and recovers every entry of the table that says anything.
fn recover_table(
    shared: &Shared,
    ram: &GuestRam,
    uffds: &[Arc<Uffd>],
    staging: &StagingArea,
) -> io::Result<Recovered> {
    let table = &shared.table;
    let before: Vec<PageRun> = table.touched_in(all_of(table)).collect();
    // Shards have no entry in common.
    let shards = ram.ranges().iter().zip(uffds);
    let works =
        shards.map(|(range, uffd)| move || recover_range(shared, ram, *range, uffd, staging));
    let staged = at_once(works)?
        .into_iter()
        .collect::<io::Result<Vec<_>>>()?;
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
    Ok(Recovered {
        slabs: slabs.collect(),
        staged: staged.into_iter().flatten().collect(),
    })
}

/// The same of a shard's range. Returns the staging slots that hold pages.
fn recover_range(
    shared: &Shared,
    ram: &GuestRam,
    range: PageRun,
    uffd: &Uffd,
    staging: &StagingArea,
) -> io::Result<Vec<StagingSlot>> {
    let mut staged = Vec::new();
    let regions = ram.regions().into_iter();
    for region in regions.filter(|region| range.contains(region.pages.first)) {
        let (start, length) = region.address_range();
        uffd.register(start, length)?;
        // It stays registered where this fails: the guest would read zeros in place of pages that lie elsewhere.
        let populated = ram.populated(&region)?;
        crash_points::pass(Point::RecoverWatched);
        for page in populated.iter().flat_map(|run| run.pages()) {
            recover_page(shared, page, true, staging);
            crash_points::pass(Point::RecoverFirstEntry);
        }
        let own = shared.table.touched_in(region.pages);
        for page in without(own, populated) {
            staged.extend(recover_page(shared, page, false, staging).staging);
        }
    }
    Ok(staged)
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

/// Backs the staging area as far as its capacity, and beyond that only what holds a page.
fn fit_staging(
    staging: &StagingArea,
    capacity: u32,
    held: &HashSet<StagingSlot>,
) -> io::Result<()> {
    let backing = staging.backing();
    backing.back(0, capacity)?;
    let beyond = (capacity..staging.slots()).map(StagingSlot);
    let unused: Vec<StagingSlot> = beyond.filter(|slot| !held.contains(slot)).collect();
    for run in unused.chunk_by(|slot, next| slot.0 + 1 == next.0) {
        backing.give_back(run[0], run.len() as u32)?;
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

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::os::unix::fs::FileExt;

    use vm_memory::{FileOffset, MmapRegion};

    use super::*;
    use crate::engine::shard::tests::bench;
    use crate::engine::table::Entry;
    use crate::engine::{Generation, Install, SlotId};
    use crate::pager::guest_ram::table_pages;

    const BYTES: u64 = 8 << 20;
    const STAGING: u32 = 8;
    const WORD: u64 = 0x1234;

    #[allow(unsafe_code)]
    fn userfaultfd(device: &File) -> Arc<Uffd> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: USERFAULTFD_IOC_NEW takes flags and makes a descriptor.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), 0xaa00, flags) };
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        // SAFETY: it is nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Arc::new(Uffd::adopt(fd, PageSize::BASE).expect("the handshake"))
    }

    /// What userfaultfds are made by, if it may be opened.
    fn device() -> Option<File> {
        let mut options = OpenOptions::new();
        let device = options.write(true).read(true).open("/dev/userfaultfd");
        device.ok()
    }

    /// A block of memory that is mapped here.
    fn block(memfd: File, mapping: &MmapRegion) -> RamBlock {
        RamBlock {
            name: "ram".into(),
            id: MemfdId::of(&memfd).expect("it is open"),
            memfd,
            file_offset: 0,
            hva: mapping.as_ptr() as u64,
            length: BYTES,
            huge_page_bytes: None,
        }
    }

    /// A memory file whose pages of these numbers are there, mapped here.
    fn memory(present: &[u64]) -> (File, MmapRegion) {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let memfd = File::from(rustix::fs::memfd_create("ram", flags).expect("a memfd"));
        memfd.set_len(BYTES).expect("room");
        for page in present {
            memfd.write_all_at(&[1], page * 4096).expect("room");
        }
        let file = FileOffset::new(memfd.try_clone().expect("a descriptor"), 0);
        let mapping = MmapRegion::from_file(file, BYTES as usize).expect("mapped");
        (memfd, mapping)
    }

    #[test]
    fn every_shard_recovers_what_is_its_own_and_staging_keeps_what_pages_need() {
        let Some(device) = device() else {
            return crate::skip_test("/dev/userfaultfd cannot be opened");
        };
        let pages = table_pages(BYTES, 1, 2, PageSize::BASE) as u32;
        let (memfd, mapping) = memory(&[5, 1500]);
        let (ram, hva) = (
            GuestRam::new(pages, 2, PageSize::BASE),
            mapping.as_ptr() as u64,
        );
        ram.add(block(memfd, &mapping)).expect("room");
        let page = |number: u64| ram.page_at(hva + number * 4096).expect("a page of RAM");
        let mut shared = Arc::into_inner(bench::shared(1, STAGING)).expect("nobody else has it");
        shared.table = PageTable::in_memory(pages);
        let table = &shared.table;
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let staging = StateDir::open(dir.path()).create_staging(STAGING, PageSize::BASE);
        let staging = staging.expect("a staging area");
        staging.backing().back(0, STAGING).expect("room");
        let (bytes, generation) = ([7; 4096], Generation(3));
        staging.write(StagingSlot(6), &bytes);
        let filled = Entry::ABSENT.into_filled(WORD);
        let stored = Entry {
            state: State::Stored,
            slot: Some(SlotId {
                group: 77,
                index: 0,
            }),
            ..Entry::ABSENT
        };
        let staged = Entry {
            state: State::Staged,
            staging: Some(StagingSlot(6)),
            generation,
            tag: shared
                .key
                .tag(page(1600), generation, &bytes, &mut Vec::new()),
            ..Entry::ABSENT
        };
        let resident = Entry::ABSENT.into_dirty_resident();
        for (number, entry) in [
            (5, filled),
            (6, filled),
            (7, resident),
            (1600, staged),
            (1700, stored),
        ] {
            table.store(page(number), &entry);
        }
        let of_nobody = PageIndex(pages - 1);
        table.store(of_nobody, &filled);
        // Gone before the mapping is, which would wait for its event to be read.
        let uffds = [userfaultfd(&device), userfaultfd(&device)];
        let recovered = recover_table(&shared, &ram, &uffds, &staging).expect("watched");
        let states = [5, 6, 7, 1500, 1600, 1700, 1701].map(|number| table.state(page(number)));
        let expected = [
            State::Resident,
            State::Filled,
            State::Absent,
            State::Resident,
            State::Staged,
            State::Lost,
            State::Absent,
        ];
        assert_eq!(states, expected);
        assert_eq!(table.state(of_nobody), State::Absent);
        assert_eq!(recovered.staged, HashSet::from([StagingSlot(6)]));
        assert!(recovered.slabs.is_empty(), "no page lies in one");
        fit_staging(&staging, 2, &recovered.staged).expect("room");
        assert_eq!(staging.kernel_bytes().expect("a file"), 3 * 4096);
        assert_eq!(staging.page(StagingSlot(6)), bytes);
    }

    #[test]
    fn memory_stays_watched_where_what_is_there_of_it_cannot_be_told() {
        let Some(device) = device() else {
            return crate::skip_test("/dev/userfaultfd cannot be opened");
        };
        let pages = table_pages(BYTES, 1, 1, PageSize::BASE) as u32;
        let ram = GuestRam::new(pages, 1, PageSize::BASE);
        let (_memfd, mapping) = memory(&[]);
        // One that cannot be searched for data.
        let (pipe, _writer) = io::pipe().expect("a pipe");
        let pipe = File::from(OwnedFd::from(pipe));
        ram.add(block(pipe, &mapping)).expect("room");
        let mut shared = Arc::into_inner(bench::shared(1, STAGING)).expect("nobody else has it");
        shared.table = PageTable::in_memory(pages);
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let staging = StateDir::open(dir.path()).create_staging(STAGING, PageSize::BASE);
        let staging = staging.expect("a staging area");
        // Gone before the mapping is, which would wait for its event to be read.
        let uffds = [userfaultfd(&device)];
        let recovered = recover_table(&shared, &ram, &uffds, &staging);
        assert!(recovered.is_err(), "a pipe holds no memory");
        // Zeros are made in a registered range alone.
        let made = uffds[0].zero(mapping.as_ptr() as u64, 4096);
        assert_eq!(made, (4096, Install::Done));
    }
}
