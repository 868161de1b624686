//! The pager: the engine's threads, and all that they touch.
//!
//! Threads of a guest: one a shard (its faults, events and demand reads), some that evict, one that
//! writes back, and one that hears the servers' sessions and keeps the house. None of
//! them ever pins a page, takes a lock across I/O, or waits for another but through its inbox.

mod awaited;
mod demand;
mod evictor;
pub(crate) mod fuzzing;
mod guest_ram;
mod homing;
mod inbox;
mod keeping;
mod limits;
mod pin;
mod plugging;
mod promises;
mod ready;
mod record;
mod released;
mod report;
mod shard_thread;
mod spin;
mod state_dir;
mod takeover;
#[cfg(test)]
mod test_world;
mod uffd;
mod writer;

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use outram_wire::compressed_share::ShareError;
use outram_wire::granularity::GranularityError;
use outram_wire::limits::{Sizes, Standing, most_staging_pages};
use outram_wire::lost_pages::LostPages;
use outram_wire::seal::Seal;
use outram_wire::tuning::{Tuning, Workers};
use outram_wire::units::{Limit, PageSize, VmId, format_size};

use crate::crash_points::{self, Point};
use crate::engine::ages::Ages;
use crate::engine::compressed::CompressedPool;
use crate::engine::pace::Pace;
use crate::engine::policy::ThreeQueues;
use crate::engine::seal::{PageKey, SECRET_BYTES, Secret};
use crate::engine::shard::Shard;
use crate::engine::table::{PageTable, Words};
use crate::engine::{Shared, SharedRef, budget, slots, staging, stats};
use crate::handover::discover::RamBlock;
use crate::handover::{HandedOver, Vmm};
use crate::remote::{FIRST_PATIENCE, NewSession, RemoteConfig, RemoteError, Session, SessionEvent};
use crate::whole;
use demand::DemandReads;
use evictor::{EvictorParts, Evictors};
use guest_ram::{GuestRam, table_pages};
use inbox::{Inbox, Messages, inbox};
use keeping::Housekeeping;
use limits::BudgetRule;
use pin::PinGate;
use plugging::{AsideList, Hindrances, Plugging};
use promises::Promises;
use record::{Keys, Record, Records};
use shard_thread::{ShardEvent, ShardGauges, ShardPorts, ShardThread};
use state_dir::{FileSizes, StagingArea, StateDir};
use uffd::Uffd;
use writer::{Writer, WriterEvent, WriterGauges};

pub use homing::{Course, HomingError};
pub(crate) use record::DISK_KEY;
pub(crate) use state_dir::DISK_TABLE;

pub use limits::{HEADROOM_BYTES, LimitError};
pub use report::{MemoryReport, ServerNotes};
pub use state_dir::StateError;
pub use takeover::{Orphan, TakeoverError};

/// How long the servers may take to confirm that everything was given back.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Blocks that a guest may have at a time: more than libvirt gives a domain slots for, usually.
const MOST_BLOCKS: u32 = 64;

/// What a pager is made for.
#[derive(Clone, Debug)]
pub struct PagerConfig {
    /// The guest.
    pub vm: VmId,
    /// Its RAM at start as its domain says, in bytes.
    pub ram_bytes: u64,
    /// What it may grow to by hot-plug, at least that.
    pub max_ram_bytes: u64,
    /// Size of its pages, as its domain says.
    pub page_size: PageSize,
    /// What it may cost.
    pub limit: Limit,
    /// Shards that its RAM is split into.
    pub shards: u32,
    /// Whether its pages are sealed before they leave.
    pub seal: Seal,
    /// What becomes of it where it needs a page that is lost.
    pub lost_pages: LostPages,
    /// How its memory is moved.
    pub tuning: Tuning,
    /// Bytes that the table of its far-memory disk may take in the state directory.
    pub disk_table_bytes: u64,
}

impl PagerConfig {
    /// What its limit is, and of how much RAM.
    fn standing(&self) -> Standing {
        Standing {
            limit: self.limit,
            ram_bytes: self.ram_bytes,
            page_size: self.page_size,
            compressed: self.tuning.compressed_share.unwrap_or_default(),
        }
    }
}

/// Why a pager could not be started.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// The limit cannot be kept.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The state directory.
    #[error(transparent)]
    State(#[from] StateError),
    /// A memory server.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// What is to be moved at a time.
    #[error(transparent)]
    Granularity(#[from] GranularityError),
    /// How much of it is to be kept compressed.
    #[error(transparent)]
    Compressed(#[from] ShareError),
    /// No memory server is named.
    #[error(
        "no memory server is named: give --server HOST[:PORT] to 'outram attach', or 'servers' in /etc/outram/backend.toml"
    )]
    NoServer,
    /// More RAM than the domain's XML says.
    #[error("QEMU has {} of guest RAM, but the domain's XML says at most {}: is memory configured past libvirt?", format_size(*found), format_size(*told))]
    MoreRam {
        /// Found in the VMM.
        found: u64,
        /// Told at the start.
        told: u64,
    },
    /// A server's slabs are not filled by the guest's pages: what it promises would hold fewer than it seems.
    #[error(
        "memory server {address} lends slabs of {}, which are no multiple of the guest's pages of {size}: give it '--slab-size 64MiB' or another multiple of {size}",
        format_size(*slab_bytes)
    )]
    UnfitSlabs {
        /// The server.
        address: String,
        /// Bytes of its slabs.
        slab_bytes: u64,
        /// Size of the guest's pages.
        size: PageSize,
    },
    /// Pages of another size than the domain's XML says.
    #[error(
        "block '{name}' of guest RAM has pages of {found}, but by the domain's XML all of its memory has pages of {told}: is memory configured past libvirt?"
    )]
    OtherPages {
        /// The block's name.
        name: String,
        /// Found in the VMM.
        found: String,
        /// Told at the start.
        told: PageSize,
    },
    /// The kernel has no POISON.
    #[error(
        "this host's kernel cannot poison lost pages: lost-pages='poison' needs Linux 6.6 or newer; boot one, or use \
         'outram attach --lost-pages stop'"
    )]
    NoPoison,
    /// A system call.
    #[error("{what} failed")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> PagerError {
    move |source| PagerError::System { what, source }
}

/// A pager with its servers and its state, before a guest's memory is handed over.
pub struct PreparedPager {
    config: PagerConfig,
    sizes: Sizes,
    shared: SharedRef,
    staging: Arc<StagingArea>,
    table_file: std::fs::File,
    state_dir: StateDir,
    sessions: Arc<[Session]>,
    events: Receiver<SessionEvent>,
    servers: Vec<String>,
}

/// A guest's memory in our hands: what the threads of its pager are made of.
struct Held {
    vmm: Arc<Vmm>,
    ram: Arc<GuestRam>,
    uffds: Vec<Arc<Uffd>>,
    plugging: Plugging,
    hindrances: Hindrances,
    record: Record,
    /// Whether it was a former process's, whose table is recovered by now.
    is_recovered: bool,
}

/// Mounts a new guest's state directory, where a [`PreparedPager`] of the same configuration will
/// find it: in a view of the file system that outlives this process.
pub fn prepare_state(config: &PagerConfig, path: &Path) -> Result<(), PagerError> {
    Ok(StateDir::mount_unless_unused(path, state_sizes(config)?)?)
}

/// Sizes of the files of a guest that has grown to its most.
fn state_sizes(config: &PagerConfig) -> Result<FileSizes, PagerError> {
    let most_ram = config.max_ram_bytes.max(config.ram_bytes);
    let pages = table_pages(most_ram, MOST_BLOCKS, config.shards, config.page_size);
    let pages = u32::try_from(pages).map_err(|_| LimitError::TooMuchRam(most_ram))?;
    let staging = most_staging_pages(most_ram, config.page_size);
    Ok(FileSizes {
        pages,
        page_size: config.page_size,
        staging_bytes: u64::from(staging) * config.page_size.bytes(),
        disk_table_bytes: config.disk_table_bytes,
    })
}

impl PreparedPager {
    /// Reserves room at the servers and makes the state directory.
    pub fn new(
        config: PagerConfig,
        remote: &RemoteConfig,
        state_dir: &Path,
    ) -> Result<Self, PagerError> {
        if remote.addresses.is_empty() {
            return Err(PagerError::NoServer);
        }
        let size = config.page_size;
        let standing = config.standing();
        standing.check().map_err(LimitError::from)?;
        let sizes = standing.sizes();
        standing.compressed.check(size)?;
        let pace = pace_of(&config.tuning, size)?;
        let (sender, events) = unbounded();
        let sessions = start_sessions(remote, &standing, &sender)?;
        check_slabs(&sessions, size)?;
        let files = state_sizes(&config)?;
        let most_staging = (files.staging_bytes / size.bytes()) as u32;
        let state_dir = StateDir::create(state_dir, files)?;
        let table = state_dir.create_table(config.vm, files.pages)?;
        let table_file = table.file().map_err(system("duplicating a descriptor"))?;
        let staging = Arc::new(state_dir.create_staging(most_staging, size)?);
        staging
            .backing()
            .back(0, sizes.staging_pages)
            .map_err(system("allocating the staging area"))?;
        let mut secret = Secret::new([0; SECRET_BYTES]);
        getrandom::fill(&mut secret[..])
            .map_err(|error| system("drawing a key")(io::Error::other(error)))?;
        let keys = Keys {
            seal: config.seal,
            secret: secret.clone(),
            session: remote.secret,
        };
        state_dir.records().write_keys(&keys)?;
        state_dir.records().write_tuning(&config.tuning)?;
        let shared = Arc::new(Shared {
            page_size: size,
            table: PageTable::new(Box::new(table), &[]),
            budget: budget::Budget::new(sizes.budget_pages, size),
            staging: staging::StagingPool::new(sizes.staging_pages),
            compressed: CompressedPool::default(),
            slots: slots::SlotPool::new(sessions.len()),
            pace,
            ages: Ages::default(),
            key: PageKey::new(&secret, config.seal),
            lost_pages: config.lost_pages,
            stats: stats::Stats::new(),
        });
        shared.slots.set_keep_allowance(sizes.keep_pages);
        shared
            .compressed
            .set_capacity(sizes.compressed_pages, &shared.budget);
        Ok(Self {
            config,
            sizes,
            shared,
            staging,
            table_file,
            state_dir,
            sessions,
            events,
            servers: remote.addresses.iter().map(ToString::to_string).collect(),
        })
    }

    /// Room for the table of its far-memory disk, zeros, where it outlives this process; so does the
    /// disk's key, in the file `disk-key` of the state directory.
    pub fn keep_disk(&self, key: &str) -> Result<Box<dyn Words>, StateError> {
        self.state_dir.records().write_disk_key(key)?;
        let table = self
            .state_dir
            .create_disk_table(self.config.disk_table_bytes)?;
        Ok(Box::new(table))
    }

    /// How the servers are, for a status before the guest is there.
    pub fn servers(&self) -> Vec<outram_wire::control::ServerStatus> {
        self.sessions.iter().map(report::server_status).collect()
    }

    /// No guest will come: gives back what was reserved.
    pub fn close(self) {
        close_sessions(&self.sessions);
    }

    /// How many userfaultfds it needs: one a shard.
    pub fn userfaultfds(&self) -> usize {
        self.config.shards as usize
    }

    /// Takes the guest's memory over: from here on its faults are ours.
    pub fn start(
        self,
        vmm: &Arc<Vmm>,
        blocks: Vec<RamBlock>,
        taken: HandedOver,
    ) -> Result<Pager, PagerError> {
        let size = self.config.page_size;
        check_page_sizes(&blocks, size)?;
        let ram = GuestRam::of(self.shared.table.pages(), self.config.shards, size, vmm);
        let ram = Arc::new(ram.map_err(system("opening QEMU's page map"))?);
        let told = self.config.max_ram_bytes.max(self.config.ram_bytes);
        let found = blocks.iter().map(|block| block.length).sum();
        let more = PagerError::MoreRam { found, told };
        if found > told {
            return Err(more);
        }
        let mappings = vmm.mappings();
        let mappings = mappings.map_err(system("reading the VMM's memory map"))?;
        let plugging = Plugging::new(&mappings, &blocks);
        for block in blocks {
            if ram.add(block).is_err() {
                return Err(more);
            }
        }
        let mut record = Record::new(vmm, &taken, &self.config, self.servers.clone());
        record.blocks = ram.records();
        record.foreign = plugging.foreign();
        // Before the kernel asks anybody for a page: from then on somebody has to answer.
        self.state_dir.records().write_record(&record)?;
        crash_points::pass(Point::AttachRecorded);
        let uffds = taken.uffds.into_iter();
        let uffds = uffds
            .map(|fd| Uffd::adopt(fd, size).map(Arc::new))
            .collect::<io::Result<Vec<_>>>()
            .map_err(system("the userfaultfd handshake"))?;
        if self.config.lost_pages == LostPages::Poison
            && !uffds.iter().all(|uffd| uffd.can_poison())
        {
            return Err(PagerError::NoPoison);
        }
        self.spawn(Held {
            vmm: Arc::clone(vmm),
            ram,
            uffds,
            plugging,
            hindrances: Hindrances::default(),
            record,
            is_recovered: false,
        })
    }

    fn spawn(self, held: Held) -> Result<Pager, PagerError> {
        // Opened once all threads stand: where one cannot be made, no other has touched anything.
        let (opener, gate) = unbounded();
        let mut threads = Vec::new();
        let mut inboxes = Vec::new();
        let mut queues = Vec::new();
        for _ in &held.uffds {
            let (sender, messages) = inbox().map_err(system("making an eventfd"))?;
            inboxes.push(sender);
            queues.push(messages);
        }
        let (writer_inbox, writer_messages) = inbox().map_err(system("making an eventfd"))?;
        let writer = Writer::new(
            Arc::clone(&self.shared),
            Arc::clone(&self.staging),
            Arc::clone(&self.sessions),
            inboxes.clone(),
            writer_messages,
        );
        let writer_gauges = writer.gauges();
        let evictors = EvictorParts {
            uffds: held.uffds.clone(),
            ram: Arc::clone(&held.ram),
            staging: Arc::clone(&self.staging),
            shared: Arc::clone(&self.shared),
            shards: inboxes.clone(),
        };
        let evictors = Evictors::start(evictors, workers_of(&self.config));
        let evictors = evictors.map_err(system("starting a thread"))?;
        let parts = Parts {
            prepared: &self,
            held: &held,
            inboxes: &inboxes,
            writer: &writer_inbox,
            evictors: &evictors,
        };
        let mut gauges = Vec::new();
        for (number, shard) in parts.take_shards(queues)?.into_iter().enumerate() {
            gauges.push(Arc::clone(&shard.gauges));
            let name = format!("shard-{number}");
            threads.push(spawn(&name, &gate, move || shard.work())?);
        }
        threads.push(spawn("write-back", &gate, move || writer.work())?);
        let (stop_keeping, stopped) = bounded(1);
        let standing = self.config.standing();
        let is_new = !held.is_recovered;
        let limit_pages = self.sizes.limit_pages;
        let rule = Arc::new(BudgetRule::new(limit_pages, standing.ram_pages()));
        if !is_new {
            // Its pages have claimed the slots that they hold.
            self.shared.staging.set_capacity(self.sizes.staging_pages);
            rule.apply(&self.shared);
        }
        let notes = Arc::new(ServerNotes::new(self.sessions.len()));
        let records = self.state_dir.records();
        let each = standing.reserve_bytes(self.sessions.len());
        let promises = Promises::new(Arc::clone(&self.sessions), records.clone(), each);
        // So that a successor knows them from the start.
        promises.look();
        let promises = Arc::new(promises);
        let keeping = Housekeeping {
            shared: Arc::clone(&self.shared),
            staging: Arc::clone(&self.staging),
            sessions: Arc::clone(&self.sessions),
            events: self.events,
            shards: inboxes.clone(),
            writer: writer_inbox.clone(),
            notes: Arc::clone(&notes),
            rule: Arc::clone(&rule),
            records: records.clone(),
            promises: Arc::clone(&promises),
            up: vec![false; self.sessions.len()],
        };
        threads.push(spawn("housekeeping", &gate, move || {
            keeping.work(&stopped)
        })?);
        if is_new {
            crash_points::pass(Point::AttachReady);
        }
        for _ in &threads {
            // The gate, which outlives this, keeps the channel open.
            let _ = opener.send(());
        }
        let mut state_dir = self.state_dir;
        state_dir.keep();
        Ok(Pager {
            shared: self.shared,
            ram: held.ram,
            staging: self.staging,
            table_file: self.table_file,
            sessions: self.sessions,
            shards: inboxes,
            gauges,
            writer: writer_inbox,
            writer_gauges,
            evictors,
            notes,
            vmm: held.vmm,
            most_ram_bytes: self.config.max_ram_bytes.max(self.config.ram_bytes),
            uffds: held.uffds,
            changing: Mutex::default(),
            standing: Mutex::new(standing),
            following: Mutex::new(()),
            plugging: Mutex::new(held.plugging),
            hindrances: Mutex::new(held.hindrances),
            hindrance: Mutex::default(),
            aside: AsideList::default(),
            rule,
            pin_gate: Arc::new(PinGate::new(limit_pages, self.config.page_size)),
            next_pin: AtomicU64::new(0),
            threads: Mutex::new(threads),
            stop_keeping,
            course: Mutex::new(Course::Serving),
            retired: AtomicBool::new(false),
            state_dir: Mutex::new(Some(state_dir)),
            promises,
            records,
            record: Mutex::new(held.record),
        })
    }
}

/// Opens a session with each server, and has them promise what the guest may need remotely.
fn start_sessions(
    remote: &RemoteConfig,
    standing: &Standing,
    events: &Sender<SessionEvent>,
) -> Result<Arc<[Session]>, PagerError> {
    let mut remote = remote.clone();
    remote.timing.patience = FIRST_PATIENCE;
    let servers = remote.addresses.len();
    let mut greeted: Vec<NewSession> = Vec::with_capacity(servers);
    let mut greet = || {
        for server in 0..servers {
            let session = NewSession::greet(server, &remote, events.clone())?;
            let before = greeted
                .iter()
                .find(|it| it.instance() == session.instance());
            let same = before.map(|before| RemoteError::SameServer {
                first: before.address().clone(),
                second: session.address().clone(),
            });
            greeted.push(session);
            same.map_or(Ok(()), Err)?;
        }
        promises::first(&mut greeted, standing.reserve_bytes(servers))
    };
    if let Err(error) = greet() {
        // Nothing of it stays behind on those that can be reached.
        greeted.into_iter().for_each(NewSession::give_up);
        return Err(error.into());
    }
    let mut sessions = Vec::with_capacity(servers);
    let mut failed = None;
    for session in greeted {
        if failed.is_some() {
            session.give_up();
            continue;
        }
        match session.keep() {
            Ok(session) => sessions.push(session),
            Err(error) => failed = Some(error),
        }
    }
    match failed {
        None => Ok(sessions.into()),
        Some(error) => {
            close_sessions(&sessions);
            Err(error.into())
        }
    }
}

/// How a guest with pages of this size is to be moved.
fn pace_of(tuning: &Tuning, size: PageSize) -> Result<Pace, GranularityError> {
    let pace = Pace::default();
    pace.set_granule(tuning.granularity.unwrap_or_default().pages(size)?);
    pace.set_queue_depth(tuning.queue_depth.unwrap_or_default());
    // A tag takes less than a microsecond of 4 KiB, and some 300 of 2 MiB; a fault takes tens of them.
    pace.set_protects_reads(size.is_huge());
    Ok(pace)
}

/// As many as are asked for, or one a shard.
fn workers_of(config: &PagerConfig) -> Workers {
    let one_a_shard = Workers::try_from(config.shards).unwrap_or(Workers::MOST);
    config.tuning.workers.unwrap_or(one_a_shard)
}

/// Refuses servers whose slabs are not filled by pages of this size.
fn check_slabs(sessions: &[Session], size: PageSize) -> Result<(), PagerError> {
    for status in sessions.iter().map(Session::status) {
        if status.slab_bytes == 0 || !status.slab_bytes.is_multiple_of(size.bytes()) {
            close_sessions(sessions);
            return Err(PagerError::UnfitSlabs {
                address: status.address.to_string(),
                slab_bytes: status.slab_bytes,
                size,
            });
        }
    }
    Ok(())
}

/// Refuses RAM whose pages have another size than was told: all that is sized by it would be wrong.
fn check_page_sizes(blocks: &[RamBlock], told: PageSize) -> Result<(), PagerError> {
    let bytes = |block: &RamBlock| block.huge_page_bytes.unwrap_or(PageSize::BASE.bytes());
    match blocks.iter().find(|block| bytes(block) != told.bytes()) {
        Some(block) => Err(PagerError::OtherPages {
            name: block.name.clone(),
            found: format_size(bytes(block)),
            told,
        }),
        None => Ok(()),
    }
}

/// Starts a thread that begins its work at a word from the gate, or ends where none can come.
fn spawn(
    name: &str,
    gate: &Receiver<()>,
    work: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, PagerError> {
    let gate = gate.clone();
    let started = whole::spawn(name, move || {
        if gate.recv().is_ok() {
            work();
        }
    });
    started.map_err(system("starting a thread"))
}

/// What the threads of a shard are made of.
struct Parts<'a> {
    prepared: &'a PreparedPager,
    held: &'a Held,
    inboxes: &'a [Inbox<ShardEvent>],
    writer: &'a Inbox<WriterEvent>,
    evictors: &'a Evictors,
}

/// Does some works at the same time, each in a thread of its own: the guest stands still, perhaps, till all are done.
fn at_once<T: Send>(
    works: impl IntoIterator<Item = impl FnOnce() -> T + Send>,
) -> io::Result<Vec<T>> {
    std::thread::scope(|scope| {
        let start = |work| std::thread::Builder::new().spawn_scoped(scope, work);
        let started = works.into_iter().map(start);
        let started: Vec<_> = started.collect::<io::Result<_>>()?;
        let ended = started.into_iter().map(|thread| thread.join());
        Ok(ended
            .map(|ended| ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect())
    })
}

impl Parts<'_> {
    /// Takes over what is populated of all shards' ranges.
    fn take_shards(
        &self,
        queues: Vec<Messages<ShardEvent>>,
    ) -> Result<Vec<ShardThread>, PagerError> {
        let works = queues
            .into_iter()
            .enumerate()
            .map(|(number, messages)| move || self.take_shard(number, messages));
        let taken = at_once(works).map_err(system("starting a thread"))?;
        taken.into_iter().collect()
    }

    /// Takes over what is populated of a shard's range, for its thread.
    fn take_shard(
        &self,
        number: usize,
        messages: Messages<ShardEvent>,
    ) -> Result<ShardThread, PagerError> {
        let shared = Arc::clone(&self.prepared.shared);
        let others = self
            .inboxes
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != number);
        let ports = ShardPorts {
            shard: number,
            uffd: Arc::clone(&self.held.uffds[number]),
            ram: Arc::clone(&self.held.ram),
            staging: Arc::clone(&self.prepared.staging),
            demand: DemandReads::new(Arc::clone(&shared), Arc::clone(&self.prepared.sessions)),
            evictors: self.evictors.orders(),
            writer: self.writer.clone(),
            others: others.map(|(_, inbox)| inbox.clone()).collect(),
            to_write: Vec::new(),
            pin_answers: HashMap::new(),
            epoch: Instant::now(),
        };
        let range = self.held.ram.ranges()[number];
        let policy = Box::new(ThreeQueues::new(range, shared.ages.returns()));
        let mut thread = ShardThread {
            shard: Shard::new(range, Arc::clone(&shared), ports, policy),
            messages,
            gauges: Arc::default(),
            vmm: Arc::clone(&self.held.vmm),
            unmapped: Vec::new(),
            leaving: Vec::new(),
            last_of_guest: Instant::now(),
            spin: spin::Spin::default(),
        };
        let regions = self.held.ram.regions().into_iter();
        for region in regions.filter(|region| range.contains(region.pages.first)) {
            if self.held.is_recovered {
                // Watched by a former process, and since then.
                thread.take_over(region.pages, &shared.table);
                continue;
            }
            let populated = plugging::watch(&thread.shard.ports().uffd, &self.held.ram, &region)
                .map_err(system("taking guest RAM over with userfaultfd"))?;
            crash_points::pass(Point::AttachWatched);
            thread.plug(region.pages, populated);
        }
        Ok(thread)
    }
}

/// A running pager.
pub struct Pager {
    shared: SharedRef,
    ram: Arc<GuestRam>,
    staging: Arc<StagingArea>,
    table_file: std::fs::File,
    sessions: Arc<[Session]>,
    shards: Vec<Inbox<ShardEvent>>,
    gauges: Vec<Arc<ShardGauges>>,
    writer: Inbox<WriterEvent>,
    writer_gauges: Arc<WriterGauges>,
    evictors: Evictors,
    notes: Arc<ServerNotes>,
    vmm: Arc<Vmm>,
    most_ram_bytes: u64,
    uffds: Vec<Arc<Uffd>>,
    /// Held by who changes what stands, or where all goes, and may wait for servers meanwhile.
    changing: Mutex<()>,
    /// Held for moments alone.
    standing: Mutex<Standing>,
    /// Held by who follows the VMM's memory, and may wait for servers meanwhile.
    following: Mutex<()>,
    /// Held for moments alone.
    plugging: Mutex<Plugging>,
    /// Held by who looks for what forbids evicting, for long perhaps.
    hindrances: Mutex<Hindrances>,
    /// Why nothing is evicted, in words, where that is so.
    hindrance: Mutex<Option<String>>,
    aside: AsideList,
    rule: Arc<BudgetRule>,
    pin_gate: Arc<PinGate>,
    /// Number of the next pin.
    next_pin: AtomicU64,
    threads: Mutex<Vec<JoinHandle<()>>>,
    stop_keeping: Sender<()>,
    course: Mutex<Course>,
    /// What works towards the servers has ended.
    retired: AtomicBool,
    state_dir: Mutex<Option<StateDir>>,
    promises: Arc<Promises>,
    records: Records,
    /// What a successor is to find.
    record: Mutex<Record>,
}

impl Pager {
    /// Writes down what has changed of the hand-over, for a successor.
    fn update_record(&self, change: impl FnOnce(&mut Record)) -> Result<(), StateError> {
        let mut record = lock(&self.record);
        let mut next = record.clone();
        change(&mut next);
        self.records.write_record(&next)?;
        *record = next;
        Ok(())
    }

    /// Lets every thread of the VMM that waits in a fault go: it is being killed and could not be
    /// reaped otherwise. Nothing of its memory is served any longer.
    pub fn let_go(&self) {
        self.pin_gate.end();
        self.shards
            .iter()
            .for_each(|shard| shard.send(ShardEvent::Quit));
    }

    /// The guest has ended: refuses further pins, ends all threads and gives every slab back.
    pub fn end(&self) {
        self.pin_gate.end();
        self.shards
            .iter()
            .for_each(|shard| shard.send(ShardEvent::Ending));
        self.let_go();
        self.writer.send(WriterEvent::Quit);
        // Full means that it was told already.
        let _ = self.stop_keeping.try_send(());
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            // One that had panicked would have ended the process.
            let _ = thread.join();
        }
        self.evictors.end();
        if !self.retired.swap(true, Ordering::AcqRel) {
            close_sessions(&self.sessions);
        }
        if let Some(mut state_dir) = lock(&self.state_dir).take() {
            state_dir.adopt();
        }
    }
}

fn close_sessions(sessions: &[Session]) {
    for session in sessions {
        if let Err(error) = session.close(CLOSE_TIMEOUT) {
            tracing::warn!(%error, "a memory server did not confirm the end; its lease will run out");
        }
    }
}

/// Nothing under the pager's locks is left half-changed by a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
