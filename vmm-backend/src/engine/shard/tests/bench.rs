//! A shard on the bench: a world that does what the test says.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use outram_wire::lost_pages::LostPages;
use outram_wire::seal::Seal;
use outram_wire::units::PAGE_SIZE;

use crate::engine::ages::Ages;
use crate::engine::budget::Budget;
use crate::engine::compressed::CompressedPool;
use crate::engine::eviction::{EvictionError, EvictionPorts, Run};
use crate::engine::pace::Pace;
use crate::engine::policy::ThreeQueues;
use crate::engine::seal::PageKey;
use crate::engine::shard::{Fault, Shard};
use crate::engine::slots::{SlabRef, SlotPool};
use crate::engine::staging::{StagingPool, Ticket};
use crate::engine::stats::Stats;
use crate::engine::table::{Entry, PageTable, State};
use crate::engine::{
    Fetch, Generation, Install, PageIndex, PageRun, PageSize, PinId, PinRefused, Ports, Shared,
    SharedRef, SlotId, StagedPage, StagingSlot,
};

pub(super) const READ: Fault = Fault {
    write: false,
    protected: false,
};
pub(super) const WRITE: Fault = Fault {
    write: true,
    protected: false,
};
pub(super) const WRITE_PROTECTED: Fault = Fault {
    write: true,
    protected: true,
};

/// A page whose bytes differ from each other.
pub(super) fn bytes(version: u8) -> Vec<u8> {
    let mut bytes = vec![version; PAGE_SIZE];
    bytes[0] = !version;
    bytes
}

pub(super) fn run(first: u32, count: u32) -> PageRun {
    PageRun {
        first: PageIndex(first),
        count,
    }
}

/// The scripted world of one shard.
pub(super) struct Script {
    shared: SharedRef,
    pub(super) memory: BTreeMap<u32, Vec<u8>>,
    pub(super) protected: BTreeSet<u32>,
    /// Pages that are memory errors.
    pub(super) poisoned: BTreeSet<u32>,
    pub(super) staging: BTreeMap<u32, Vec<u8>>,
    /// How many more attempts to install or unprotect end with `Again`.
    pub(super) agains: u32,
    /// Whether the host has no page for the guest.
    pub(super) pool_is_empty: bool,
    /// Whether the VMM's mapping is gone.
    pub(super) is_unmapped: bool,
    pub(super) refuse_punch: bool,
    /// Where another of the VMM's mappings begins: no run may cross it.
    pub(super) border: Option<PageIndex>,
    pub(super) fetches: Vec<Fetch>,
    pub(super) runs: Vec<Run>,
    pub(super) orders: Vec<StagedPage>,
    pub(super) pins: Vec<(PinId, Result<(), PinRefused>)>,
    pub(super) woken: Vec<PageRun>,
    /// What was put in place by one call.
    pub(super) rows: Vec<PageRun>,
    pub(super) alerts: u32,
    pub(super) clock_us: u64,
}

impl Script {
    fn install(&mut self, page: PageIndex, bytes: Vec<u8>, protect: bool) -> Install {
        if self.agains > 0 {
            self.agains -= 1;
            return Install::Again;
        }
        if self.is_unmapped {
            return Install::Gone;
        }
        if self.memory.contains_key(&page.0) {
            return Install::Exists;
        }
        if self.pool_is_empty {
            return Install::PoolEmpty;
        }
        self.memory.insert(page.0, bytes);
        self.poisoned.remove(&page.0);
        self.protected.remove(&page.0);
        if protect {
            self.protected.insert(page.0);
        }
        self.woken.push(PageRun::single(page));
        Install::Done
    }

    fn crosses_border(&self, run: PageRun) -> bool {
        let border = self.border;
        border.is_some_and(|border| run.first < border && border < run.end())
    }

    /// Whether a page's waiters were woken since this was last asked.
    pub(super) fn has_woken(&mut self, page: u32) -> bool {
        let woken = std::mem::take(&mut self.woken);
        woken.iter().any(|run| run.contains(PageIndex(page)))
    }
}

impl Ports for Script {
    fn zero(&mut self, run: PageRun) -> (u32, Install) {
        if self.crosses_border(run) {
            return (0, Install::Gone);
        }
        for (made, page) in (0..).zip(run.pages()) {
            let how = self.install(page, vec![0; PAGE_SIZE], false);
            if how != Install::Done {
                return (made, how);
            }
        }
        (run.count, Install::Done)
    }

    fn copy(&mut self, page: PageIndex, bytes: &[u8], protect: bool) -> Install {
        self.install(page, bytes.to_vec(), protect)
    }

    fn copy_row(&mut self, run: PageRun, bytes: &[u8]) -> (u32, Install) {
        self.rows.push(run);
        if self.crosses_border(run) {
            return (0, Install::Gone);
        }
        for (made, (page, bytes)) in (0..).zip(run.pages().zip(bytes.chunks_exact(PAGE_SIZE))) {
            match self.install(page, bytes.to_vec(), false) {
                Install::Done => {}
                _ if made > 0 => return (made, Install::Again),
                how => return (0, how),
            }
        }
        (run.count, Install::Done)
    }

    fn copy_staged(&mut self, page: PageIndex, slot: StagingSlot) -> Install {
        let bytes = self.staging[&slot.0].clone();
        self.install(page, bytes, false)
    }

    fn read_staged(&mut self, slot: StagingSlot, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.staging[&slot.0]);
    }

    fn unprotect(&mut self, page: PageIndex) -> Install {
        assert!(
            !self.shared.table.load(page).protected,
            "a page is known as possibly written before it can be"
        );
        if self.agains > 0 {
            self.agains -= 1;
            return Install::Again;
        }
        self.protected.remove(&page.0);
        self.woken.push(PageRun::single(page));
        Install::Done
    }

    fn poison(&mut self, page: PageIndex) -> Install {
        if self.agains > 0 {
            self.agains -= 1;
            return Install::Again;
        }
        self.woken.push(PageRun::single(page));
        match self.poisoned.insert(page.0) {
            true => Install::Done,
            false => Install::Exists,
        }
    }

    fn wake(&mut self, run: PageRun) {
        self.woken.push(run);
    }

    fn is_present(&mut self, page: PageIndex) -> bool {
        self.memory.contains_key(&page.0)
    }

    fn fetch(&mut self, fetch: Fetch) -> bool {
        self.fetches.push(fetch);
        true
    }

    fn send_waited_for(&mut self) {}

    fn start_run(&mut self, run: Run) {
        self.runs.push(run);
    }

    fn write_back(&mut self, page: StagedPage) {
        self.orders.push(page);
    }

    fn stage(&mut self, slot: StagingSlot, bytes: &[u8]) {
        self.staging.insert(slot.0, bytes.to_vec());
    }

    fn answer_pin(&mut self, pin: PinId, result: Result<(), PinRefused>) {
        self.pins.push((pin, result));
    }

    fn alert_shards(&mut self) {
        self.alerts += 1;
    }

    fn now_us(&self) -> u64 {
        self.clock_us
    }
}

impl EvictionPorts for Script {
    fn protect(&mut self, run: PageRun) -> Result<(), EvictionError> {
        self.protected.extend(run.pages().map(|page| page.0));
        Ok(())
    }

    fn read(&mut self, run: PageRun, tickets: &[Ticket]) -> Result<(), EvictionError> {
        for (page, ticket) in run.pages().zip(tickets) {
            let bytes = self.memory.get(&page.0).cloned();
            let bytes = bytes.unwrap_or_else(|| vec![0; PAGE_SIZE]);
            self.staging.insert(ticket.slot.0, bytes);
        }
        Ok(())
    }

    fn staged(&self, ticket: Ticket) -> &[u8] {
        &self.staging[&ticket.slot.0]
    }

    fn change_staged(&mut self, ticket: Ticket, change: &mut dyn FnMut(&mut [u8])) {
        change(self.staging.get_mut(&ticket.slot.0).expect("read before"));
    }

    fn punch(&mut self, run: PageRun) -> Result<(), EvictionError> {
        if self.refuse_punch {
            return Err(EvictionError::Refused);
        }
        for page in run.pages() {
            self.memory.remove(&page.0);
        }
        Ok(())
    }

    fn is_present(&mut self, page: PageIndex) -> bool {
        self.memory.contains_key(&page.0)
    }

    fn wake(&mut self, run: PageRun) {
        self.woken.push(run);
    }
}

pub(super) const PAGES: u32 = 256;
pub(super) const SHARD_PAGES: u32 = 128;
pub(super) const SLAB: SlabRef = SlabRef { server: 0, slab: 0 };

/// What a guest's shards share: room for `limit` pages, `staging` staging slots, one slab.
pub(crate) fn shared(limit: u64, staging: u32) -> SharedRef {
    shared_with(limit, staging, LostPages::Stop, PAGES)
}

fn shared_with(limit: u64, staging: u32, lost_pages: LostPages, pages: u32) -> SharedRef {
    let stats = Stats::new();
    let slots = SlotPool::new(1);
    slots.set_connected(0, true);
    slots.add_slab(SLAB, 64);
    slots.set_keep_allowance(8);
    Arc::new(Shared {
        page_size: PageSize::BASE,
        table: PageTable::in_memory(pages),
        budget: Budget::new(limit, PageSize::BASE),
        staging: StagingPool::new(staging),
        compressed: CompressedPool::of_chunks(1),
        slots,
        pace: Pace::default(),
        ages: Ages::default(),
        key: PageKey::new(&[3; 32], Seal::On),
        lost_pages,
        stats,
    })
}

/// A shard, and what it shares.
pub(super) struct Bench {
    pub(super) shard: Shard<Script>,
    pub(super) shared: SharedRef,
    /// Whether pages may be had back from slots that they no longer need.
    pub(super) keeps_spares: bool,
}

impl Bench {
    /// A shard of the first pages, with plenty of everything.
    pub(super) fn new() -> Self {
        Self::of(0, &shared(100, 32))
    }

    /// The same, whose guest is told of lost pages by memory errors.
    pub(super) fn poisoning() -> Self {
        Self::of(0, &shared_with(100, 32, LostPages::Poison, PAGES))
    }

    /// The same, of a guest with so many pages, all of them the shard's.
    pub(super) fn of_many(pages: u32) -> Self {
        let shared = shared_with(100, 32, LostPages::Poison, pages);
        Self::of_range(run(0, pages), &shared)
    }

    /// The shard whose first page is `first`.
    pub(super) fn of(first: u32, shared: &SharedRef) -> Self {
        Self::of_range(run(first, SHARD_PAGES), shared)
    }

    fn of_range(range: PageRun, shared: &SharedRef) -> Self {
        let script = Script {
            shared: Arc::clone(shared),
            memory: BTreeMap::new(),
            protected: BTreeSet::new(),
            poisoned: BTreeSet::new(),
            staging: BTreeMap::new(),
            agains: 0,
            pool_is_empty: false,
            is_unmapped: false,
            refuse_punch: false,
            border: None,
            fetches: Vec::new(),
            runs: Vec::new(),
            orders: Vec::new(),
            pins: Vec::new(),
            woken: Vec::new(),
            rows: Vec::new(),
            alerts: 0,
            clock_us: 0,
        };
        let policy = Box::new(ThreeQueues::new(range, shared.ages.returns()));
        let mut shard = Shard::new(range, Arc::clone(shared), script, policy);
        shard.plug(range);
        Self {
            shard,
            shared: Arc::clone(shared),
            keeps_spares: false,
        }
    }

    pub(super) fn world(&mut self) -> &mut Script {
        self.shard.ports()
    }

    pub(super) fn entry(&self, page: u32) -> Entry {
        self.shared.table.load(PageIndex(page))
    }

    pub(super) fn state(&self, page: u32) -> State {
        self.entry(page).state
    }

    pub(super) fn fault(&mut self, page: u32, fault: Fault) {
        self.shard.on_fault(PageIndex(page), fault);
        self.shard.pump();
    }

    /// The guest stores to a page that is there and not protected.
    pub(super) fn store(&mut self, page: u32, version: u8) {
        assert!(!self.world().protected.contains(&page), "protected");
        let held = self.world().memory.insert(page, bytes(version));
        assert!(held.is_some(), "a store to a hole");
    }

    /// The guest touches a page for the first time, and stores to it.
    pub(super) fn touch(&mut self, page: u32, version: u8) {
        self.fault(page, WRITE);
        self.store(page, version);
    }

    /// What the guest would read.
    pub(super) fn read(&mut self, page: u32) -> Option<Vec<u8>> {
        self.world().memory.get(&page).cloned()
    }

    /// Makes the shard hand out a run of all that may go.
    pub(super) fn hand_out_run(&mut self) -> Run {
        let limit = self.shared.budget.limit();
        self.shared.budget.set_limit(0);
        self.shard.pump();
        self.shared.budget.set_limit(limit);
        self.world().runs.pop().expect("a run")
    }

    /// Takes a run some steps further: protect, read, mark, punch, wake.
    pub(super) fn advance(&mut self, run: &mut Run, steps: u32) {
        let shared = Arc::clone(&self.shared);
        for _ in 0..steps {
            // A refusal ends the run, which the tests then see by its fates.
            let _ = run.advance(&shared, self.shard.ports());
        }
    }

    pub(super) fn end_run(&mut self, mut run: Run) {
        self.advance(&mut run, 5);
        self.shard.on_run_done(&run);
        self.drop_spares();
        self.shard.pump();
    }

    fn drop_spares(&self) {
        if !self.keeps_spares {
            self.shared.staging.drop_spares();
        }
    }

    /// Ends a run, after which the guest discards a page, before the owner hears of either.
    pub(super) fn end_run_after_discard(&mut self, mut run: Run, page: u32) {
        self.advance(&mut run, 5);
        self.punch(page);
        self.shard.on_run_done(&run);
        self.drop_spares();
        self.shard.pump();
    }

    /// The slab is wanted back, and another is leased in its place.
    pub(super) fn vacate(&mut self) {
        self.vacate_without_room();
        self.lease(1, 64);
    }

    /// The slab is wanted back, and no other is to be had.
    pub(super) fn vacate_without_room(&mut self) {
        assert!(self.shared.slots.vacate(SLAB).is_some(), "not empty");
        self.shard.on_vacate();
    }

    /// Another slab is leased, as far as whose room pages may move.
    pub(super) fn lease(&mut self, slab: u64, slots: u32) {
        let slab = SlabRef { slab, ..SLAB };
        self.shared.slots.add_slab(slab, slots);
        assert!(self.shared.let_pages_move(0, &|_| true));
    }

    pub(super) fn evict_all(&mut self) {
        let run = self.hand_out_run();
        self.end_run(run);
    }

    /// The writer takes the next order.
    pub(super) fn start_write(&mut self) -> (StagedPage, SlotId) {
        let staged = self.world().orders.remove(0);
        assert!(
            self.shared.staging.start_write(staged.staging),
            "a stale order"
        );
        let slot = self
            .shared
            .slots
            .allocate(1, &|_| true)
            .pop()
            .expect("a slot");
        (staged, slot)
    }

    pub(super) fn end_write(&mut self, (staged, slot): (StagedPage, SlotId)) {
        self.shard.on_written_back(staged, slot);
        self.drop_spares();
        self.shard.pump();
    }

    /// Puts a page with these bytes on the server.
    pub(super) fn store_remotely(&mut self, page: u32, version: u8) {
        self.touch(page, version);
        self.evict_all();
        let write = self.start_write();
        self.end_write(write);
        assert_eq!(self.state(page), State::Stored);
        self.world().woken.clear();
    }

    /// The same where the guest has no staging of its own.
    pub(super) fn store_remotely_with_staging(&mut self, page: u32, version: u8) {
        self.shared.staging.set_capacity(1);
        self.store_remotely(page, version);
        self.shared.staging.set_capacity(0);
    }

    /// The server answers the oldest fetch.
    pub(super) fn answer(&mut self, version: u8) {
        let fetch = self.world().fetches.remove(0);
        let generation = self.shared.table.load(fetch.page).generation;
        self.answer_sealed(fetch, fetch.page, generation, version);
    }

    /// The server answers all fetches, also of pages ahead, each with its page's number.
    pub(super) fn answer_all(&mut self) {
        while let Some(fetch) = self.world().fetches.first() {
            let version = fetch.page.0 as u8;
            self.answer(version);
        }
    }

    /// The same, with answers that come together.
    pub(super) fn answer_together(&mut self) {
        let fetches = std::mem::take(&mut self.world().fetches);
        let mut arrivals = self.shard.arrivals();
        for fetch in fetches {
            let mut sealed = bytes(fetch.page.0 as u8);
            let generation = self.shared.table.load(fetch.page).generation;
            self.shared.key.seal(fetch.page, generation, &mut sealed);
            arrivals.on_fetched(fetch.id, fetch.page, Ok(&mut sealed));
        }
        drop(arrivals);
        self.shard.pump();
    }

    /// The server answers a fetch with what was once sent for a page and a generation.
    pub(super) fn answer_sealed(
        &mut self,
        fetch: Fetch,
        page: PageIndex,
        generation: Generation,
        version: u8,
    ) {
        let mut sealed = bytes(version);
        self.shared.key.seal(page, generation, &mut sealed);
        self.shard.on_fetched(fetch.id, fetch.page, Ok(&mut sealed));
        self.shard.pump();
    }

    /// The guest discards pages; the event comes later.
    pub(super) fn punch(&mut self, page: u32) {
        self.world().memory.remove(&page);
    }

    pub(super) fn remove(&mut self, page: u32) {
        self.shard.on_removed(run(page, 1));
        self.shard.pump();
    }

    /// The one slab's contents are gone.
    pub(super) fn lose_slab(&mut self) -> HashSet<u32> {
        self.shared.slots.forget(&[SLAB]).lost
    }
}
