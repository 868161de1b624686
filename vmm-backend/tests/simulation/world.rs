//! The world that the engine runs in: guest memory as the kernel keeps it, vCPUs that wait in
//! faults, the queues of messages, and what each page may hold.
//!
//! The kernel's part follows `fs/userfaultfd.c` and `mm/shmem.c`: messages of faults are read
//! before events; a wake ends every wait in its range, read or unread; COPY and its kin fail with
//! EAGAIN from the queueing of a REMOVE until its caller has gone on; COPY onto a page that is
//! there fails with EEXIST and wakes nobody; the protection of a page outlives its punching.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use outram_backend::engine::eviction::Run;
use outram_backend::engine::shard::Fault;
use outram_backend::engine::table::State;
use outram_backend::engine::tag::Tag;
use outram_backend::engine::{
    Generation, PageIndex, PageRun, PinId, PinRefused, SharedRef, StagedPage,
};
use outram_wire::lost_pages::LostPages;

use crate::contents::{Contents, Store};
use crate::crashes::WrittenDown;
use crate::plugging::Presence;
use crate::random::Random;
use crate::sabotage::Sabotage;
use crate::servers::{LiveFetch, Servers};

pub(crate) const SHARDS: usize = 3;
pub(crate) const SHARD_PAGES: u32 = 64;
pub(crate) const PAGES: u32 = SHARDS as u32 * SHARD_PAGES;
pub(crate) const STAGING_MOST: u32 = 64;
pub(crate) const LIMIT_FIRST: u64 = 80;

/// Where the guest's memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// On tmpfs: discards raise an event, and memory is never short.
    Tmpfs,
    /// On hugetlbfs: discards raise none, and pages come from a pool that may be empty.
    Hugetlbfs,
    /// On tmpfs, and every group of slots has a copy on each of two servers, of which one at a time
    /// loses what it holds.
    TmpfsTwoCopies,
}

/// A sealed page's generation and tag, its text's hash; and what was sealed.
pub(crate) type Opened = ((Generation, Tag, u64), Contents);

/// Which check failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// A page's bytes, wherever they are, are not those last stored.
    WrongBytes,
    /// A page has no copy to be answered from.
    NoCopy,
    /// Somebody waits whom nobody knows.
    LostWakeUp,
    /// All is quiet, but somebody waits or the limit is not reached.
    Stuck,
    /// Pages counted are not those that are there.
    Budget,
    /// All is quiet, but a page that is not lost is a memory error.
    Poisoned,
    /// Staging slots in use are not those held, or exceed the capacity.
    Staging,
    /// Gauges are not a recount of the table.
    Gauges,
    /// Slots in use or kept are not those held.
    Slots,
    /// The table believes in a protection that the kernel does not have.
    Protection,
    /// A page is lost without a cause.
    LostWithoutCause,
    /// A lost page was answered.
    LostAnswered,
    /// The only copy outside a server was given up while that was out of reach.
    UnsafeDrop,
    /// A page is in memory that the table believes elsewhere.
    Stray,
    /// A pinned page is not there.
    PinnedHole,
    /// All is said to be home, and a page is elsewhere.
    NotHome,
    /// Something is kept of memory that was unplugged.
    Kept,
    /// Other bytes were sent for a page and a generation that bytes were sent for before: a nonce came
    /// twice.
    SentTwice,
}

/// A check that failed.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    pub(crate) check: Check,
    pub(crate) what: String,
}

/// Fails a check.
pub(crate) fn fail<T>(check: Check, what: impl Into<String>) -> Result<T, Violation> {
    Err(Violation {
        check,
        what: what.into(),
    })
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) page: u32,
    pub(crate) store: Option<Store>,
}

/// A vCPU: what it is about to do, and whether it waits in a fault.
#[derive(Clone, Debug, Default)]
pub(crate) struct Vcpu {
    pub(crate) access: Option<Access>,
    pub(crate) waits: bool,
    pub(crate) place: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct FaultMessage {
    pub(crate) vcpu: usize,
    pub(crate) page: u32,
    pub(crate) fault: Fault,
}

/// What a shard's owner has read and not yet dealt with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Message {
    Fault(FaultMessage),
    Removed(PageRun),
}

/// One shard's descriptor, and its reader's batch.
#[derive(Debug, Default)]
pub(crate) struct Uffd {
    pub(crate) faults: VecDeque<FaultMessage>,
    pub(crate) events: VecDeque<PageRun>,
    /// REMOVEs queued whose callers have not gone on: `mmap_changing`.
    pub(crate) changing: u32,
    /// REMOVEs read whose callers are about to go on.
    pub(crate) returning: Vec<PageRun>,
    /// Pages punched whose REMOVE is not queued yet.
    pub(crate) punched: Vec<PageRun>,
    pub(crate) inbox: VecDeque<Message>,
    pub(crate) frozen: Option<PageRun>,
}

impl Uffd {
    /// The kernel has something to bring forward.
    pub(crate) fn is_busy(&self) -> bool {
        !self.faults.is_empty()
            || !self.events.is_empty()
            || self.changing > 0
            || !self.punched.is_empty()
    }

    /// The owner has something to deal with.
    pub(crate) fn has_read(&self) -> bool {
        !self.inbox.is_empty()
    }
}

/// A run out at an evictor.
#[derive(Debug)]
pub(crate) struct OutRun {
    pub(crate) shard: usize,
    pub(crate) run: Run,
    pub(crate) steps: u32,
}

#[derive(Debug)]
pub(crate) struct DeviceRequest {
    pub(crate) shard: usize,
    pub(crate) run: PageRun,
    pub(crate) write: bool,
    pub(crate) granted: bool,
    pub(crate) accesses_left: u32,
}

pub(crate) struct World {
    pub(crate) random: Random,
    pub(crate) clock_us: u64,
    pub(crate) shared: SharedRef,
    /// The memfd.
    pub(crate) memory: Vec<Option<Contents>>,
    /// Write protection of the guest's mapping.
    pub(crate) protected: Vec<bool>,
    /// What each page may hold: one, but for pages being discarded.
    pub(crate) allowed: Vec<Vec<Contents>>,
    /// Discards of each page that the engine has not dealt with.
    pub(crate) discarding: Vec<u32>,
    /// Where the memory lies.
    pub(crate) kind: Memory,
    /// Pages discarded without an event, and not there again since.
    pub(crate) silently_gone: Vec<bool>,
    /// Pages left in the host's pool.
    pub(crate) pool_left: u32,
    /// Discards of each page whose callers have not gone on.
    pub(crate) unreturned: Vec<u32>,
    /// Of those not dealt with, the ones that end with the page's run.
    pub(crate) deferred: Vec<u32>,
    /// Pages whose stored copy the world has destroyed or damaged.
    pub(crate) may_be_lost: BTreeSet<u32>,
    /// Pages that are memory errors.
    pub(crate) poisoned: BTreeSet<u32>,
    pub(crate) vcpus: Vec<Vcpu>,
    pub(crate) uffds: Vec<Uffd>,
    /// Of each shard, the memory that comes and goes.
    pub(crate) changing_parts: [Presence; SHARDS],
    /// Pages that were there already when memory was plugged in this step: the engine has to take
    /// them, whatever its limit.
    pub(crate) brought: u64,
    /// Most pages that were there since they were more than the limit, while they are.
    pub(crate) used_above: u64,
    /// Pages that a backend had room for that died in this step.
    pub(crate) used_at_death: u64,
    pub(crate) staging: Vec<Option<Contents>>,
    /// What each page's text was when it was last opened for a check.
    pub(crate) opened: RefCell<Vec<Option<Opened>>>,
    pub(crate) runs: Vec<OutRun>,
    pub(crate) orders: VecDeque<(usize, StagedPage)>,
    pub(crate) servers: Servers,
    /// What was sent for each page and generation, by its hash.
    pub(crate) sent: BTreeMap<(u32, u64), u64>,
    pub(crate) sent_twice: Option<(u32, u64)>,
    pub(crate) live_fetches: BTreeMap<u32, LiveFetch>,
    pub(crate) alerted: [bool; SHARDS],
    pub(crate) pin_answers: Vec<(PinId, Result<(), PinRefused>)>,
    pub(crate) device: BTreeMap<PinId, DeviceRequest>,
    /// Pinned pages, and those asked to be.
    pub(crate) device_pages: Vec<u32>,
    pub(crate) zero: Contents,
    pub(crate) sabotage: Option<Sabotage>,
    /// Protections that a sabotaged evictor lifts when it is too late.
    pub(crate) late_lifts: Vec<PageRun>,
    /// Where the guest is busiest: first page, number of pages.
    pub(crate) hot: (u32, u32),
    /// The operator's limit.
    pub(crate) limit: u64,
    /// What a successor of the backend finds.
    pub(crate) written: WrittenDown,
    /// Everything is being brought home.
    pub(crate) homing: bool,
    /// Staging slots with memory before the step.
    pub(crate) backed_before: u64,
}

/// The shard of a page.
pub(crate) fn shard_of(page: u32) -> usize {
    (page / SHARD_PAGES) as usize
}

impl World {
    pub(crate) fn new(
        seed: u64,
        shared: SharedRef,
        kind: Memory,
        sabotage: Option<Sabotage>,
    ) -> Self {
        let zero = Contents::filled(0);
        Self {
            random: Random::new(seed),
            clock_us: 0,
            shared,
            memory: vec![None; PAGES as usize],
            protected: vec![false; PAGES as usize],
            allowed: vec![vec![zero.clone()]; PAGES as usize],
            discarding: vec![0; PAGES as usize],
            kind,
            silently_gone: vec![false; PAGES as usize],
            pool_left: PAGES,
            unreturned: vec![0; PAGES as usize],
            deferred: vec![0; PAGES as usize],
            may_be_lost: BTreeSet::new(),
            poisoned: BTreeSet::new(),
            vcpus: vec![Vcpu::default(); 6],
            uffds: (0..SHARDS).map(|_| Uffd::default()).collect(),
            changing_parts: [Presence::There; SHARDS],
            brought: 0,
            used_above: 0,
            used_at_death: 0,
            staging: vec![None; STAGING_MOST as usize],
            opened: RefCell::new(vec![None; PAGES as usize]),
            runs: Vec::new(),
            orders: VecDeque::new(),
            servers: Servers::new(if kind == Memory::TmpfsTwoCopies { 2 } else { 1 }),
            sent: BTreeMap::new(),
            sent_twice: None,
            live_fetches: BTreeMap::new(),
            alerted: [false; SHARDS],
            pin_answers: Vec::new(),
            device: BTreeMap::new(),
            device_pages: vec![0; PAGES as usize],
            zero,
            sabotage,
            late_lifts: Vec::new(),
            hot: (0, PAGES),
            limit: LIMIT_FIRST,
            written: WrittenDown::default(),
            homing: false,
            backed_before: 0,
        }
    }

    pub(crate) fn is(&self, sabotage: Sabotage) -> bool {
        self.sabotage == Some(sabotage)
    }

    pub(crate) fn is_changing(&self, shard: usize) -> bool {
        self.uffds[shard].changing > 0
    }

    /// A page leaves the guest's memory; its bytes, if it was there.
    pub(crate) fn take_out(&mut self, page: PageIndex) -> Option<Contents> {
        let contents = self.memory[page.0 as usize].take();
        self.pool_left += u32::from(contents.is_some());
        contents
    }

    /// Ends every wait in a range, and forgets messages not yet read.
    pub(crate) fn wake(&mut self, run: PageRun) {
        for (number, vcpu) in self.vcpus.iter_mut().enumerate() {
            let in_range = |access: Access| run.contains(PageIndex(access.page));
            if vcpu.waits && vcpu.access.is_some_and(in_range) {
                vcpu.waits = false;
                let uffd = &mut self.uffds[shard_of(run.first.0)];
                uffd.faults.retain(|message| message.vcpu != number);
            }
        }
    }

    /// The kernel brings something forward at one of the descriptors.
    pub(crate) fn kernel_step(&mut self) {
        let first = self.random.below(SHARDS as u64) as usize;
        let mut shards = (first..SHARDS).chain(0..first);
        let Some(shard) = shards.find(|shard| self.uffds[*shard].is_busy()) else {
            return;
        };
        match self.random.below(4) {
            0 => self.queue_removal(shard),
            1 => self.return_from_discards(shard),
            _ => {
                let most = self.random.below(5) as usize + 1;
                self.read_messages(shard, most);
            }
        }
    }

    /// The owner reads messages: faults first, as the kernel gives them.
    fn read_messages(&mut self, shard: usize, most: usize) {
        for _ in 0..most {
            let uffd = &mut self.uffds[shard];
            if let Some(message) = uffd.faults.pop_front() {
                uffd.inbox.push_back(Message::Fault(message));
            } else if let Some(run) = uffd.events.pop_front() {
                uffd.inbox.push_back(Message::Removed(run));
                uffd.returning.push(run);
            }
        }
    }

    /// The callers of REMOVEs that were read go on.
    fn return_from_discards(&mut self, shard: usize) {
        let uffd = &mut self.uffds[shard];
        for run in std::mem::take(&mut uffd.returning) {
            uffd.changing -= 1;
            for page in run.pages() {
                self.unreturned[page.0 as usize] -= 1;
                self.poisoned.remove(&page.0);
            }
        }
    }

    /// The mapping of a range is replaced: its protections are gone, its pages are not. The VMM
    /// does so while its vCPUs stand still.
    pub(crate) fn remap(&mut self, run: PageRun) {
        for page in run.pages() {
            let place = page.0 as usize;
            self.protected[place] = false;
            self.poisoned.remove(&page.0);
            // Whoever is told of what is lost gets new memory in its place.
            let is_told = self.shared.lost_pages == LostPages::Poison;
            if is_told && self.shared.table.state(page) == State::Lost {
                // Lost it is still where the engine dies before it has seen to that.
                self.allowed[place] = vec![self.zero.clone()];
            }
        }
        self.wake(run);
    }
}
