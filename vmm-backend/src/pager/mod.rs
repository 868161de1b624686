//! The pager: the engine's threads, and all that they touch.
//!
//! Threads of a guest: one a shard (its faults, events and demand reads), one a shard that evicts,
//! one that writes back, and one that hears the servers' sessions and keeps the house. None of
//! them ever pins a page, takes a lock across I/O, or waits for another but through its inbox.

mod demand;
mod evictor;
mod guest_ram;
mod inbox;
mod keeping;
mod limits;
mod pin;
mod ready;
mod report;
mod shard_thread;
mod state_dir;
mod uffd;
mod writer;

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use outram_wire::units::{Limit, PAGE_SIZE, VmId, format_size};

use crate::engine::policy::TwoQueues;
use crate::engine::shard::Shard;
use crate::engine::table::{Entry, PageTable, State};
use crate::engine::tag::TagKey;
use crate::engine::{PageRun, Shared, SharedRef, budget, slots, staging, stats};
use crate::handover::discover::RamBlock;
use crate::remote::{RemoteConfig, RemoteError, Session, SessionEvent};
use demand::DemandReads;
use evictor::Evictor;
use guest_ram::{GuestRam, table_pages};
use inbox::{Inbox, Messages, inbox};
use keeping::Housekeeping;
use limits::BudgetRule;
use pin::PinGate;
use shard_thread::{ShardEvent, ShardGauges, ShardPorts, ShardThread};
use state_dir::{StagingArea, StateDir};
use uffd::Uffd;
use writer::{Writer, WriterEvent, WriterGauges};

pub use limits::{HEADROOM_BYTES, LimitError, MIN_LIMIT_BYTES};
pub use report::{MemoryReport, ServerNotes};
pub use state_dir::StateError;

/// How long the servers may take to confirm that everything was given back.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Blocks that hot-plug may add beyond those told at the start have room in the table.
const SPARE_TABLE_BLOCKS: u64 = 64;

/// What a pager is made for.
#[derive(Clone, Debug)]
pub struct PagerConfig {
    /// The guest.
    pub vm: VmId,
    /// Its RAM as its domain says, in bytes.
    pub ram_bytes: u64,
    /// What it may cost.
    pub limit: Limit,
    /// Shards that its RAM is split into.
    pub shards: u32,
    /// Where the state directory is mounted.
    pub state_dir: std::path::PathBuf,
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
    /// No memory server is named.
    #[error(
        "no memory server is named: give --server HOST[:PORT] to 'outram attach', or 'servers' in /etc/outram/backend.toml"
    )]
    NoServer,
    /// More RAM than the domain's XML says.
    #[error("QEMU has {} of guest RAM, but the domain's XML says {}: is memory configured past libvirt?", format_size(*found), format_size(*told))]
    MoreRam {
        /// Found in the VMM.
        found: u64,
        /// Told at the start.
        told: u64,
    },
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
    shared: SharedRef,
    staging: Arc<StagingArea>,
    table_file: std::fs::File,
    state_dir: StateDir,
    sessions: Arc<[Session]>,
    events: Receiver<SessionEvent>,
}

impl PreparedPager {
    /// Reserves room at the servers and makes the state directory.
    pub fn new(config: PagerConfig, remote: &RemoteConfig) -> Result<Self, PagerError> {
        if remote.addresses.is_empty() {
            return Err(PagerError::NoServer);
        }
        let sizes = limits::Sizes::new(config.limit, config.ram_bytes)?;
        let (sender, events) = unbounded();
        let sessions = start_sessions(remote, &config, sizes, &sender)?;
        let pages = table_pages([config.ram_bytes])
            + SPARE_TABLE_BLOCKS * u64::from(guest_ram::ALIGN_PAGES);
        let pages = u32::try_from(pages).map_err(|_| LimitError::TooMuchRam(config.ram_bytes))?;
        let most_staging = limits::most_staging_pages(config.ram_bytes);
        let state_dir = StateDir::create(&config.state_dir, pages, most_staging)?;
        let table = state_dir.create_table(config.vm, pages)?;
        let table_file = table.file().map_err(system("duplicating a descriptor"))?;
        let staging = Arc::new(state_dir.create_staging(most_staging)?);
        staging
            .back(0, sizes.staging_pages)
            .map_err(system("allocating the staging area"))?;
        let mut key = [0; 32];
        getrandom::fill(&mut key)
            .map_err(|error| system("drawing a key")(io::Error::other(error)))?;
        let shared = Arc::new(Shared {
            table: PageTable::new(Box::new(table)),
            budget: budget::Budget::new(sizes.budget_pages),
            staging: staging::StagingPool::new(sizes.staging_pages),
            slots: slots::SlotPool::new(sessions.len()),
            key: TagKey::new(key),
            stats: stats::Stats::new(),
        });
        shared.slots.set_keep_allowance(sizes.keep_pages);
        Ok(Self {
            config,
            shared,
            staging,
            table_file,
            state_dir,
            sessions,
            events,
        })
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
        vmm_pid: i32,
        blocks: Vec<RamBlock>,
        uffds: Vec<OwnedFd>,
    ) -> Result<Pager, PagerError> {
        let ram = Arc::new(GuestRam::new(blocks));
        let told = self.config.ram_bytes;
        let found = u64::from(ram.pages()) * PAGE_SIZE as u64;
        if found > told
            || ram
                .gaps()
                .last()
                .is_some_and(|gap| gap.end().0 > self.shared.table.pages())
        {
            return Err(PagerError::MoreRam { found, told });
        }
        self.shared.stats.found(ram.pages().into());
        for page in ram.gaps().into_iter().flat_map(PageRun::pages) {
            // Nobody's pages: never zero-filled ahead, never anything.
            self.shared.table.store(
                page,
                &Entry {
                    state: State::Lost,
                    ..Entry::ABSENT
                },
            );
        }
        let ranges = ram.split(self.config.shards);
        let uffds: Vec<Uffd> = uffds
            .into_iter()
            .take(ranges.len())
            .map(Uffd::adopt)
            .collect::<io::Result<_>>()
            .map_err(system("the userfaultfd handshake"))?;
        for (range, uffd) in ranges.iter().zip(&uffds) {
            for part in ram.parts(*range) {
                let (start, length) = ram.address_range(part);
                uffd.register(start, length)
                    .map_err(system("registering guest RAM with userfaultfd"))?;
            }
        }
        self.spawn(vmm_pid, ram, ranges, uffds)
    }

    fn spawn(
        self,
        vmm_pid: i32,
        ram: Arc<GuestRam>,
        ranges: Vec<PageRun>,
        uffds: Vec<Uffd>,
    ) -> Result<Pager, PagerError> {
        let mut threads = Vec::new();
        let mut inboxes = Vec::new();
        let mut queues = Vec::new();
        for _ in &ranges {
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
        let parts = Parts {
            prepared: &self,
            vmm_pid,
            ram: &ram,
            inboxes: &inboxes,
            writer: &writer_inbox,
        };
        let mut gauges = Vec::new();
        for (number, ((range, uffd), messages)) in ranges.iter().zip(uffds).zip(queues).enumerate()
        {
            gauges.push(parts.start_shard(number, *range, uffd, messages, &mut threads)?);
        }
        threads.push(spawn("write-back", move || writer.work())?);
        let (stop_keeping, stopped) = bounded(1);
        let sizes = limits::Sizes::new(self.config.limit, self.config.ram_bytes)?;
        let rule = Arc::new(BudgetRule::new(sizes.limit_pages, self.config.ram_bytes));
        let notes = Arc::new(ServerNotes::new(self.sessions.len()));
        let keeping = Housekeeping {
            shared: Arc::clone(&self.shared),
            staging: Arc::clone(&self.staging),
            sessions: Arc::clone(&self.sessions),
            events: self.events,
            shards: inboxes.clone(),
            writer: writer_inbox.clone(),
            notes: Arc::clone(&notes),
            rule: Arc::clone(&rule),
            known_slabs: HashSet::new(),
        };
        threads.push(spawn("housekeeping", move || keeping.work(&stopped))?);
        Ok(Pager {
            shared: self.shared,
            ram,
            ranges,
            staging: self.staging,
            table_file: self.table_file,
            sessions: self.sessions,
            shards: inboxes,
            gauges,
            writer: writer_inbox,
            writer_gauges,
            notes,
            limit: Mutex::new(self.config.limit),
            rule,
            pin_gate: Arc::new(PinGate::new(sizes.limit_pages)),
            threads: Mutex::new(threads),
            stop_keeping,
            ram_bytes: self.config.ram_bytes,
            state_dir: Mutex::new(Some(self.state_dir)),
        })
    }
}

/// Opens a session with each server; what the guest may need remotely is reserved in equal parts.
fn start_sessions(
    remote: &RemoteConfig,
    config: &PagerConfig,
    sizes: limits::Sizes,
    events: &Sender<SessionEvent>,
) -> Result<Arc<[Session]>, PagerError> {
    let each = limits::reserve_bytes(config.ram_bytes, sizes, remote.addresses.len());
    let sessions = (0..remote.addresses.len())
        .map(|server| Session::start(server, remote, each, events.clone()));
    let sessions: Vec<Session> = sessions.collect::<Result<_, _>>()?;
    Ok(sessions.into())
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, PagerError> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(work)
        .map_err(system("starting a thread"))
}

/// What the threads of a shard are made of.
struct Parts<'a> {
    prepared: &'a PreparedPager,
    vmm_pid: i32,
    ram: &'a Arc<GuestRam>,
    inboxes: &'a [Inbox<ShardEvent>],
    writer: &'a Inbox<WriterEvent>,
}

impl Parts<'_> {
    /// Takes over what is populated of a shard's range, and starts its threads.
    fn start_shard(
        &self,
        number: usize,
        range: PageRun,
        uffd: Uffd,
        messages: Messages<ShardEvent>,
        threads: &mut Vec<JoinHandle<()>>,
    ) -> Result<Arc<ShardGauges>, PagerError> {
        let shared = Arc::clone(&self.prepared.shared);
        let uffd = Arc::new(uffd);
        let (runs, handed_out) = bounded(16);
        let evictor = Evictor {
            uffd: Arc::clone(&uffd),
            ram: Arc::clone(self.ram),
            staging: Arc::clone(&self.prepared.staging),
            shared: Arc::clone(&shared),
            shard: self.inboxes[number].clone(),
        };
        threads.push(spawn(&format!("evict-{number}"), move || {
            evictor.work(&handed_out)
        })?);
        let others = self
            .inboxes
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != number);
        let ports = ShardPorts {
            shard: number,
            uffd,
            ram: Arc::clone(self.ram),
            staging: Arc::clone(&self.prepared.staging),
            demand: DemandReads::new(Arc::clone(&shared), Arc::clone(&self.prepared.sessions)),
            evictor: runs,
            writer: self.writer.clone(),
            others: others.map(|(_, inbox)| inbox.clone()).collect(),
            pin_answers: HashMap::new(),
            epoch: Instant::now(),
        };
        let mut shard = Shard::new(
            range,
            Arc::clone(&shared),
            ports,
            Box::new(TwoQueues::new(range)),
        );
        for region in self.ram.regions() {
            let populated = self
                .ram
                .populated(region)
                .map_err(system("looking for populated guest RAM"))?;
            let ours = populated
                .into_iter()
                .filter_map(|run| guest_ram::intersect(run, range));
            ours.flat_map(PageRun::pages)
                .for_each(|page| shard.adopt_populated(page));
        }
        let gauges = Arc::<ShardGauges>::default();
        let thread = ShardThread {
            shard,
            messages,
            gauges: Arc::clone(&gauges),
            vmm_pid: self.vmm_pid,
            unplugged: Vec::new(),
            next_pin: 0,
        };
        threads.push(spawn(&format!("shard-{number}"), move || thread.work())?);
        Ok(gauges)
    }
}

/// A running pager.
pub struct Pager {
    shared: SharedRef,
    ram: Arc<GuestRam>,
    ranges: Vec<PageRun>,
    staging: Arc<StagingArea>,
    table_file: std::fs::File,
    sessions: Arc<[Session]>,
    shards: Vec<Inbox<ShardEvent>>,
    gauges: Vec<Arc<ShardGauges>>,
    writer: Inbox<WriterEvent>,
    writer_gauges: Arc<WriterGauges>,
    notes: Arc<ServerNotes>,
    limit: Mutex<Limit>,
    rule: Arc<BudgetRule>,
    pin_gate: Arc<PinGate>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    stop_keeping: Sender<()>,
    ram_bytes: u64,
    state_dir: Mutex<Option<StateDir>>,
}

impl Pager {
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
            if thread.join().is_err() {
                tracing::error!("a pager thread had panicked");
            }
        }
        close_sessions(&self.sessions);
        drop(lock(&self.state_dir).take());
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
