//! One shard: the owner of a range of pages. Takes events about them, decides, and acts through
//! its [`Ports`].
//!
//! Invariant 2 (every fault ends exactly once) is kept by `pending`: a page somebody waits for has
//! one entry there, which ends in `complete` (answered), in a wake (the guest looks again), in a
//! memory error, or stays for good because the page is lost.
//!
//! A slot, here or on a server, is given back only after the table says that the page needs it no
//! longer: whoever recovers the table of a process that died must not find it in another's use.
//!
//! After any batch of events the caller calls [`Shard::pump`], which retries what could not be
//! done, gives room to those who wait for it, and hands out runs to evict.

mod ahead;
mod arrivals;
mod homing;
mod kept;
mod moving;
mod parts;
mod pins;
mod pool;
mod reclaim;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::sync::Arc;

use foldhash::HashMap;
use outram_wire::lost_pages::LostPages;

use super::ages::ShardAge;
use super::eviction::Signals;
use super::guesses::Guesses;
use super::policy::{Arrival, Kind, Policy};
use super::prefetch::Prefetch;
use super::stats::FaultKind;
use super::table::{Entry, State};
use super::{
    Fetch, FetchId, Generation, Install, PageIndex, PageRun, PinId, PinRefused, Ports, SharedRef,
    StagingSlot,
};
use crate::crash_points::{self, Point};
use crate::engine::staging::Ticket;
pub use arrivals::Arrivals;
use arrivals::Row;
use homing::Homing;
use kept::KeptSlots;
use moving::Search;
use pins::PinRequest;

/// Bytes made zero ahead of a guest that touches its memory in order, at most; none where a page is
/// larger.
const ZERO_AHEAD_BYTES: u64 = 64 << 10;

/// What a fault message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The access was a store.
    pub write: bool,
    /// The page was there but write-protected.
    pub protected: bool,
}

/// Why a fetch gave no bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchFailed {
    /// The server says that the slot is not ours: its bytes are gone.
    Gone,
}

/// What somebody who waits for a page waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// Room under the limit.
    Room,
    /// The end of the run that the page is in.
    Run,
    /// Bytes from a server; room is counted for them.
    Fetch { id: FetchId, attempt: u32 },
    /// The VMM's mappings to settle.
    Retry,
    /// A page of the host's pool.
    Pool,
    /// Nothing: the page is lost.
    Lost,
}

/// The faults of a shard that wait for an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// How many they are.
    pub faults: u64,
    /// Of these, those that wait for a page that is lost.
    pub for_lost: u64,
    /// Time that all faults have waited, those still waiting until now. It only rises, but for threads of the
    /// VMM that ended while they waited.
    pub waited_us: u64,
}

/// All who wait for a page.
#[derive(Debug)]
struct Pending {
    fault: Option<Fault>,
    pins: Vec<PinId>,
    /// When the fault came.
    since_us: u64,
    wait: Wait,
    /// Fetched before anybody asked for it; who does then joins in.
    ahead: bool,
    /// The bytes of a stored page whose COPY was refused, and its entry then: under a storm of
    /// discards few attempts find a gap, and each would cost a fetch.
    fetched: Option<(Entry, Box<[u8]>)>,
}

impl Pending {
    /// Somebody who waits from now on.
    fn new(fault: Option<Fault>, now_us: u64) -> Self {
        Self {
            fault,
            pins: Vec::new(),
            since_us: now_us,
            wait: Wait::Retry,
            ahead: false,
            fetched: None,
        }
    }

    /// Nobody waits: the page is only being moved.
    fn is_idle(&self) -> bool {
        self.fault.is_none() && self.pins.is_empty()
    }

    /// It was fetched ahead, and nobody has asked for it since.
    fn is_unasked(&self) -> bool {
        self.ahead && self.is_idle()
    }

    fn wants_write(&self) -> bool {
        !self.pins.is_empty()
            || self
                .fault
                .is_some_and(|fault| fault.write || fault.protected)
    }
}

/// The owner of a range of the page table. Which of its pages there are, [`Shard::plug`] and
/// [`Shard::unplug`] say.
pub struct Shard<P: Ports> {
    range: PageRun,
    /// Stretches of pages that are there, in order; between any two is at least one that is not.
    parts: Vec<PageRun>,
    /// Parts whose memory is gone, and that something in work still refers to.
    unplugging: Vec<PageRun>,
    shared: SharedRef,
    ports: P,
    policy: Box<dyn Policy>,
    pending: HashMap<PageIndex, Pending>,
    waiting_for_room: VecDeque<PageIndex>,
    retries: Vec<PageIndex>,
    waiting_for_pool: Vec<PageIndex>,
    /// Pages given back while busy, and whether that holds if their run takes them out.
    removed_while_busy: HashMap<PageIndex, bool>,
    /// Runs of pages whose mapping is in doubt: not to be evicted.
    frozen: Vec<PageRun>,
    pins: HashMap<PageIndex, u32>,
    pin_requests: HashMap<PinId, PinRequest>,
    /// The search for pages in slabs that their servers want back.
    search: Search,
    /// Those that were found, and are to be moved.
    to_move: BTreeSet<PageIndex>,
    /// Those of them that had no mapping when they came home.
    unmapped: BTreeSet<PageIndex>,
    /// The next of them waits for room.
    move_waits: bool,
    /// Pages on their way out of such slabs, with the staging slots for them; without, they come home.
    moving: HashMap<PageIndex, Option<Ticket>>,
    /// Pages that an earlier build left unsealed in staging, and their generations then.
    staged_plain: HashMap<PageIndex, Generation>,
    /// How far its pages have come home, while they are brought there.
    homing: Option<Homing>,
    /// Those of its pages that are in memory and keep a slot.
    kept: KeptSlots,
    next_fetch: u64,
    runs_out: Vec<(PageRun, Signals)>,
    /// What other shards see of it.
    age: Arc<ShardAge>,
    ending: bool,
    next_zero: PageIndex,
    zero_ahead: u32,
    prefetch: Prefetch,
    guesses: Guesses,
    /// Time that answered faults have waited.
    answered_wait_us: u64,
    /// Pages that have come and are about to be put in place.
    row: Row,
    /// A page's worth of room, for bytes on their way.
    room: Box<[u8]>,
    /// The same, for a copy that was found in memory of this host.
    spare: Box<[u8]>,
    /// Such a copy where it was compressed.
    packed: Vec<u8>,
    /// The same, where a tag is made of such a copy.
    resealed: Vec<u8>,
}

impl<P: Ports> Shard<P> {
    /// The owner of `range`, without any pages yet.
    pub fn new(range: PageRun, shared: SharedRef, ports: P, policy: Box<dyn Policy>) -> Self {
        let room: Box<[u8]> = vec![0; shared.page_size.length()].into();
        let window = shared.pace.window(shared.page_size);
        let age = shared.ages.join();
        let prefetch = Prefetch::new(window, shared.pace.granule());
        Self {
            range,
            parts: Vec::new(),
            unplugging: Vec::new(),
            shared,
            ports,
            policy,
            pending: HashMap::default(),
            waiting_for_room: VecDeque::new(),
            retries: Vec::new(),
            waiting_for_pool: Vec::new(),
            removed_while_busy: HashMap::default(),
            frozen: Vec::new(),
            pins: HashMap::default(),
            pin_requests: HashMap::default(),
            search: Search::new(),
            to_move: BTreeSet::new(),
            unmapped: BTreeSet::new(),
            move_waits: false,
            moving: HashMap::default(),
            staged_plain: HashMap::default(),
            homing: None,
            kept: KeptSlots::new(range.first),
            next_fetch: 0,
            runs_out: Vec::new(),
            age,
            ending: false,
            next_zero: range.first,
            zero_ahead: 1,
            prefetch,
            guesses: Guesses::new(range),
            answered_wait_us: 0,
            row: Row::default(),
            spare: room.clone(),
            packed: Vec::new(),
            resealed: Vec::new(),
            room,
        }
    }

    /// The shard's pages.
    pub fn range(&self) -> PageRun {
        self.range
    }

    /// What the shard acts through.
    pub fn ports(&mut self) -> &mut P {
        &mut self.ports
    }

    /// Takes over a page found in the guest's memory.
    pub fn adopt_populated(&mut self, page: PageIndex) {
        let entry = self.shared.table.load(page);
        if entry.state != State::Resident {
            self.shared.budget.force(1);
            self.settle_resident(page, entry.into_dirty_resident(), Arrival::New);
        }
    }

    /// The faults that wait for an answer now.
    pub fn waiting(&self) -> Waiting {
        let now_us = self.ports.now_us();
        let mut waiting = Waiting {
            waited_us: self.answered_wait_us,
            ..Waiting::default()
        };
        let pending = self.pending.values();
        for pending in pending.filter(|pending| pending.fault.is_some()) {
            waiting.faults += 1;
            waiting.for_lost += u64::from(pending.wait == Wait::Lost);
            waiting.waited_us += now_us.saturating_sub(pending.since_us);
        }
        waiting
    }

    /// Whether a fault on the page waits for an answer.
    pub fn awaits(&self, page: PageIndex) -> bool {
        self.pending
            .get(&page)
            .is_some_and(|pending| pending.fault.is_some())
    }

    /// Whether the page's bytes are on their way from its server, for whatever reason.
    pub fn fetches(&self, page: PageIndex) -> bool {
        let pending = self.pending.get(&page);
        pending.is_some_and(|pending| matches!(pending.wait, Wait::Fetch { .. }))
    }

    /// Whether something has to be tried again soon.
    pub fn has_retries(&self) -> bool {
        !self.retries.is_empty()
    }

    /// The guest faulted.
    pub fn on_fault(&mut self, page: PageIndex, fault: Fault) {
        assert!(
            self.range.contains(page),
            "a fault on page {page} of another shard"
        );
        if !self.is_plugged(page) {
            // The message was older than the end of its memory.
            return self.ports.wake(PageRun::single(page));
        }
        if let Some(pending) = self.pending.get_mut(&page) {
            // Another vCPU, or the same once more after a signal: one answer wakes them all.
            if let Some(known) = &mut pending.fault {
                self.shared.stats.duplicates.count();
                known.write |= fault.write;
                known.protected |= fault.protected;
            } else {
                // It was on its way before anybody waited.
                pending.fault = Some(fault);
                pending.since_us = self.ports.now_us();
                if pending.ahead {
                    self.catch_up(page);
                }
            }
            return;
        }
        let pending = Pending::new(Some(fault), self.ports.now_us());
        self.resolve(page, pending);
    }

    /// The guest gave pages back (balloon, free-page reporting).
    pub fn on_removed(&mut self, run: PageRun) {
        self.for_known(run, |shard, page| {
            if !shard.is_plugged(page) {
                return;
            }
            if shard.shared.table.state(page) == State::Busy {
                let is_certain = shard.is_punched_by_guest(page);
                *shard.removed_while_busy.entry(page).or_default() |= is_certain;
            } else {
                shard.remove(page);
            }
        });
    }

    /// The VMM dropped its mapping of pages, and with it what was known of stores to them; the
    /// pages stay.
    pub fn on_mapping_dropped(&mut self, run: PageRun) {
        self.for_known(run, |shard, page| {
            let entry = shard.shared.table.load(page);
            if entry.state == State::Resident {
                shard.keep_as_dirty(page, entry);
            }
        });
    }

    /// Whether a busy page is a hole that its run did not make. Where the run may have made it,
    /// the guest may have stored to the page after its discard had returned and before the run
    /// copied it: what the run copied is kept, for bytes that the guest gave back do no harm, and
    /// zeros in place of bytes that it stored do.
    fn is_punched_by_guest(&mut self, page: PageIndex) -> bool {
        // The memfd is looked at first: a run that has not begun after that did not make the hole.
        let is_hole = !self.ports.is_present(page);
        let mut runs = self.runs_out.iter();
        let run = runs.find(|(run, _)| run.contains(page));
        is_hole && run.is_some_and(|(_, signals)| !signals.punches())
    }

    /// Slabs are gone for good, with all that lay in them.
    pub fn on_groups_lost(&mut self, groups: &HashSet<u32>) {
        for part in self.parts.clone() {
            self.for_known(part, |shard, page| shard.drop_copy(page, groups));
        }
    }

    /// A page's slot is gone, if it was in one of these groups.
    fn drop_copy(&mut self, page: PageIndex, groups: &HashSet<u32>) {
        let entry = self.shared.table.load(page);
        if !entry.slot.is_some_and(|slot| groups.contains(&slot.group)) {
            return;
        }
        match entry.state {
            State::Stored => {
                let pending = self.end_waiting(page);
                self.lose_stored(page, entry, pending);
            }
            State::Resident => {
                self.set(
                    page,
                    Entry {
                        slot: None,
                        dirty: true,
                        protected: false,
                        ..entry
                    },
                );
            }
            // A run in work finds out when it ends.
            _ => {}
        }
    }

    /// The mapping of these pages is in doubt: nothing of them may be evicted until thawed.
    pub fn freeze(&mut self, run: PageRun) {
        self.frozen.push(run);
        for (pages, signals) in &self.runs_out {
            if pages.intersection(run).is_some() {
                signals.doubt();
            }
        }
        // A new mapping has none of the old one's write protection: stores to it go unnoticed,
        // and only the pages' tags tell whether they changed.
        self.for_known(run, |shard, page| {
            let entry = shard.shared.table.load(page);
            if entry.state == State::Resident && entry.protected {
                shard.set(
                    page,
                    Entry {
                        protected: false,
                        ..entry
                    },
                );
            }
        });
    }

    /// All mappings are known again.
    pub fn thaw(&mut self) {
        self.frozen.clear();
        for page in std::mem::take(&mut self.unmapped) {
            self.move_if_vacating(page);
        }
    }

    /// The guest is ending: nobody waits for pins any longer.
    pub fn end(&mut self) {
        self.ending = true;
        self.refuse_all_pins();
    }

    /// Tries again what the VMM's changing mappings were in the way of.
    pub fn retry(&mut self) {
        for page in std::mem::take(&mut self.retries) {
            if let Some(pending) = self.pending.remove(&page) {
                self.resolve(page, pending);
            }
        }
    }

    /// Brings everything forward that waits for something else than an event.
    pub fn pump(&mut self) {
        self.retry();
        self.look_into_pool();
        self.use_room();
        for _ in 0..2 {
            self.move_pages();
            self.bring_home();
            self.give_slots_back();
            self.schedule_runs();
            // What was given back here may be what others wait for.
            let ends_starvation = self.shared.staging.ends_starvation();
            if ends_starvation || self.shared.budget.is_room_waited_for() {
                self.ports.alert_shards();
            }
            // Or what was missing here a moment ago: nobody else says so once more.
            if !ends_starvation {
                break;
            }
        }
    }

    /// Has those go on that wait for room, as far as there is any.
    pub fn use_room(&mut self) {
        while self.shared.budget.has_room()
            && let Some(page) = self.waiting_for_room.pop_front()
        {
            self.shared.budget.end_waiting();
            if let Some(pending) = self.pending.remove(&page) {
                self.resolve(page, pending);
            }
        }
    }

    /// Does something to all pages of a run of which there is anything to know: they were touched once, or
    /// somebody waits for them. A guest may have far more than those.
    fn for_known(&mut self, run: PageRun, mut act: impl FnMut(&mut Self, PageIndex)) {
        let shared = Arc::clone(&self.shared);
        let keys = self.pending.keys().copied();
        let mut awaited: Vec<PageIndex> = match self.pending.len() < run.count as usize {
            true => keys.filter(|page| run.contains(*page)).collect(),
            false => run
                .pages()
                .filter(|page| self.pending.contains_key(page))
                .collect(),
        };
        awaited.retain(|page| !shared.table.is_touched(*page));
        // The map has another order each time; a simulation has to go the same way again.
        awaited.sort_unstable();
        for page in shared.table.touched_in(run).flat_map(PageRun::pages) {
            act(self, page);
        }
        awaited.into_iter().for_each(|page| act(self, page));
    }

    /// Changes a page's entry, and all that is counted by it.
    fn set(&mut self, page: PageIndex, entry: Entry) {
        let before = self.shared.table.load(page);
        let in_memory = |entry: &Entry| matches!(entry.state, State::Resident | State::Busy);
        let keeps = |entry: &Entry| in_memory(entry) && entry.slot.is_some();
        match (keeps(&before), keeps(&entry)) {
            (true, false) => {
                self.kept.count -= 1;
                self.shared.slots.end_keep();
            }
            // It was counted by whoever asked whether it may.
            (false, true) => self.kept.count += 1,
            _ => {}
        }
        self.shared.stats.moved(before.state, entry.state);
        self.shared.table.store(page, &entry);
    }

    fn settle_resident(&mut self, page: PageIndex, entry: Entry, arrival: Arrival) {
        self.set(page, entry);
        self.policy.arrived(page, arrival);
    }

    /// Gives a page to those who wait for it, or says what they wait for.
    fn resolve(&mut self, page: PageIndex, mut pending: Pending) {
        if pending.is_unasked() {
            return self.give_up_ahead(page);
        }
        let entry = self.shared.table.load(page);
        match entry.state {
            State::Busy => self.wait_for(page, Wait::Run, pending),
            State::Resident => self.resolve_resident(page, entry, pending),
            State::Lost => self.lose(page, pending),
            // A store to a page that was evicted meanwhile: it has to fault again to be answered.
            _ if pending.pins.is_empty() && pending.fault.is_some_and(|fault| fault.protected) => {
                self.end_wait(&pending);
                self.ports.wake(PageRun::single(page));
            }
            _ if !self.shared.budget.acquire(1) => {
                self.shared.stats.stalls_limit.count();
                self.shared.budget.start_waiting();
                self.waiting_for_room.push_back(page);
                self.wait_for(page, Wait::Room, pending);
            }
            State::Absent => self.zero_fill(page, pending),
            State::Filled => self.install_filled(page, entry, pending),
            State::Staged => self.take_back(page, entry, pending),
            State::Stored => match pending.fetched.take() {
                Some((of, bytes)) if of == entry => {
                    self.install_fetched(page, entry, &bytes, FaultKind::Remote, pending);
                }
                _ => match self.find_spare(page, &entry) {
                    Some(kind) => {
                        let is_waited_for = pending.fault.is_some();
                        self.install_spare(page, entry, kind, pending);
                        if is_waited_for {
                            self.fetch_ahead(page);
                        }
                    }
                    None => self.fetch_on_demand(page, entry, pending),
                },
            },
        }
    }

    fn wait_for(&mut self, page: PageIndex, wait: Wait, mut pending: Pending) {
        pending.wait = wait;
        self.pending.insert(page, pending);
    }

    fn leave_queues(&mut self, page: PageIndex, wait: Wait) {
        match wait {
            Wait::Room => {
                self.waiting_for_room.retain(|waiting| *waiting != page);
                self.shared.budget.end_waiting();
            }
            Wait::Retry => self.retries.retain(|retry| *retry != page),
            Wait::Pool => self.leave_pool_queue(page),
            _ => {}
        }
    }

    fn retry_later(&mut self, page: PageIndex, pending: Pending) {
        self.retries.push(page);
        self.wait_for(page, Wait::Retry, pending);
    }

    fn resolve_resident(&mut self, page: PageIndex, entry: Entry, pending: Pending) {
        let protected = pending.fault.is_some_and(|fault| fault.protected);
        let relies_on_presence = !protected || !pending.pins.is_empty();
        if relies_on_presence && !self.ports.is_present(page) {
            // Discarded a moment ago; the event that says so is still to come.
            self.remove(page);
            self.resolve(page, pending);
            return;
        }
        if protected {
            // Known as possibly written before the guest can write it.
            self.set(
                page,
                Entry {
                    protected: false,
                    ..entry
                },
            );
            crash_points::pass(Point::UnprotectMarked);
            match self.ports.unprotect(page) {
                Install::Again | Install::PoolEmpty => return self.retry_later(page, pending),
                Install::Gone => return self.let_go(&pending),
                Install::Done | Install::Exists => crash_points::pass(Point::Unprotected),
            }
            self.complete(page, FaultKind::Protected, pending);
        } else {
            self.guesses.note_used(page, &self.shared.stats);
            if pending.fault.is_some() {
                self.shared.stats.duplicates.count();
                self.end_wait(&pending);
                self.ports.wake(PageRun::single(page));
            }
            self.complete_pins(page, &pending);
        }
    }

    /// The mapping is gone. Whoever faulted is woken when it is known what became of it: before that it would
    /// find the zeros of one that nobody watches.
    fn let_go(&mut self, pending: &Pending) {
        if pending.fault.is_some() {
            self.end_wait(pending);
        }
        self.refuse_pins_of(pending, PinRefused::Unplugged);
    }

    /// Notes how long a fault has waited that waits no longer.
    fn end_wait(&mut self, pending: &Pending) -> u64 {
        let took_us = self.ports.now_us().saturating_sub(pending.since_us);
        self.answered_wait_us += took_us;
        took_us
    }

    /// Everyone who waited has the page.
    fn complete(&mut self, page: PageIndex, kind: FaultKind, pending: Pending) {
        if !pending.is_idle() {
            self.guesses.note_used(page, &self.shared.stats);
        }
        if pending.fault.is_some() {
            let took_us = self.end_wait(&pending);
            self.shared.stats.note_fault(kind, took_us);
        }
        self.complete_pins(page, &pending);
    }

    /// Ends an attempt to install a page for which room was counted. `entry` is what the page
    /// becomes if its bytes went in.
    fn end_install(
        &mut self,
        page: PageIndex,
        how: Install,
        entry: Entry,
        arrival: Arrival,
        kind: FaultKind,
        pending: Pending,
    ) {
        match how {
            Install::Done => {
                self.settle_resident(page, entry, arrival);
                self.complete(page, kind, pending);
            }
            Install::Exists => {
                // Whoever was faster has the newer bytes.
                self.settle_resident(page, entry.into_dirty_resident(), arrival);
                self.ports.wake(PageRun::single(page));
                self.complete(page, kind, pending);
            }
            Install::Again => {
                self.shared.budget.cancel(1);
                self.retry_later(page, pending);
            }
            Install::PoolEmpty => {
                self.shared.budget.cancel(1);
                self.wait_for_pool(page, pending);
            }
            Install::Gone => {
                self.shared.budget.cancel(1);
                self.note_unmapped(page);
                self.let_go(&pending);
            }
        }
    }

    fn zero_fill(&mut self, page: PageIndex, pending: Pending) {
        let most = self.shared.page_size.pages_in(ZERO_AHEAD_BYTES, 1) as u32;
        self.zero_ahead = match page == self.next_zero {
            true => (self.zero_ahead * 2).min(most),
            false => 1,
        };
        let part = self.part_of(page);
        let ahead = (1..self.zero_ahead)
            .map(|offset| PageIndex(page.0 + offset))
            .take_while(|next| part.is_some_and(|part| part.contains(*next)))
            .take_while(|next| self.shared.table.state(*next) == State::Absent)
            .take_while(|next| !self.pending.contains_key(next))
            .count() as u64;
        let mut ahead = ahead.min(self.shared.budget.spare());
        if ahead > 0 && !self.shared.budget.acquire(ahead) {
            ahead = 0;
        }
        let run = PageRun {
            first: page,
            count: ahead as u32 + 1,
        };
        let (mut made, mut how) = self.ports.zero(run);
        if ahead > 0 && made == 0 && how == Install::Gone {
            // The first that was not made says why when it is tried by itself.
            (made, how) = self.ports.zero(PageRun::single(page));
        }
        crash_points::pass(Point::ZeroMade);
        self.next_zero = PageIndex(page.0 + made.max(1));
        self.shared
            .budget
            .cancel(ahead - u64::from(made.saturating_sub(1)));
        for next in run.pages().skip(1).take(made.saturating_sub(1) as usize) {
            let entry = self.shared.table.load(next).into_dirty_resident();
            self.settle_resident(next, entry, Arrival::New);
        }
        let how = if made > 0 { Install::Done } else { how };
        let entry = self.shared.table.load(page).into_dirty_resident();
        self.end_install(page, how, entry, Arrival::New, FaultKind::Zero, pending);
        crash_points::pass(Point::ZeroMarked);
    }

    fn install_filled(&mut self, page: PageIndex, entry: Entry, pending: Pending) {
        let word = entry.fill_word();
        let how = if word == 0 {
            self.ports.zero(PageRun::single(page)).1
        } else {
            self.room
                .chunks_exact_mut(8)
                .for_each(|chunk| chunk.copy_from_slice(&word.to_ne_bytes()));
            self.ports.copy(page, &self.room, false)
        };
        crash_points::pass(Point::FilledCopied);
        let next = entry.into_dirty_resident();
        self.end_install(page, how, next, Arrival::New, FaultKind::Filled, pending);
        crash_points::pass(Point::FilledMarked);
    }

    fn take_back(&mut self, page: PageIndex, entry: Entry, pending: Pending) {
        let Some(slot) = entry.staging else {
            self.shared.budget.release(1);
            return self.lose(page, pending);
        };
        let found_plain = self.staged_plain.get(&page) == Some(&entry.generation);
        let how = if found_plain || !self.shared.key.seals() {
            self.ports.copy_staged(page, slot)
        } else if self.opens_staged(page, &entry, slot) {
            self.ports.copy(page, &self.room, false)
        } else {
            // Spoilt since: what lies there is nobody's bytes.
            self.shared.stats.integrity_failures.count();
            self.shared.budget.release(1);
            self.lose(page, pending);
            return self.shared.staging.release(slot);
        };
        crash_points::pass(Point::TakeBackCopied);
        // The tag stays: if a write-back in work ends, its slot is a good copy of these bytes.
        let next = Entry {
            tag: entry.tag,
            ..entry.into_dirty_resident()
        };
        self.end_install(
            page,
            how,
            next,
            Arrival::Refault,
            FaultKind::Staged,
            pending,
        );
        crash_points::pass(Point::TakeBackMarked);
        if matches!(how, Install::Done | Install::Exists) {
            if found_plain {
                self.staged_plain.remove(&page);
            }
            self.shared.staging.release(slot);
        }
    }

    /// Whether the bytes in a staging slot are sealed as this page's; opened, they are in `room` then.
    fn opens_staged(&mut self, page: PageIndex, entry: &Entry, slot: StagingSlot) -> bool {
        self.ports.read_staged(slot, &mut self.room);
        self.shared
            .key
            .open(page, entry.generation, entry.tag, &mut self.room)
            .is_ok()
    }

    /// Returns whether the page's server is within reach.
    fn start_fetch(
        &mut self,
        page: PageIndex,
        entry: Entry,
        attempt: u32,
        pending: Pending,
    ) -> bool {
        self.start_fetch_of(page, entry, attempt, pending, false)
    }

    /// The same; another page may come by the same request.
    fn start_fetch_of(
        &mut self,
        page: PageIndex,
        entry: Entry,
        attempt: u32,
        pending: Pending,
        with_next: bool,
    ) -> bool {
        let Some(slot) = entry.slot else {
            self.shared.budget.release(1);
            self.lose(page, pending);
            return false;
        };
        let id = FetchId(self.next_fetch);
        self.next_fetch += 1;
        // What only moves or comes home, too.
        let ahead = pending.is_idle();
        self.wait_for(page, Wait::Fetch { id, attempt }, pending);
        let fetch = Fetch {
            id,
            page,
            slot,
            ahead,
            with_next,
        };
        let reachable = self.ports.fetch(fetch);
        if !reachable {
            self.shared.stats.stalls_server.count();
        }
        crash_points::pass(Point::FetchAsked);
        reachable
    }

    /// Looks for a copy of a stored page that this host still has: a whole one is in `spare` then. How a
    /// fault is answered with it.
    fn find_spare(&mut self, page: PageIndex, entry: &Entry) -> Option<FaultKind> {
        if self.finds_staged_spare(page, entry) {
            Some(FaultKind::Staged)
        } else if self.finds_compressed(page, entry) {
            Some(FaultKind::Compressed)
        } else {
            None
        }
    }

    fn finds_compressed(&mut self, page: PageIndex, entry: &Entry) -> bool {
        let (packed, spare) = (&mut self.packed, &mut self.spare);
        let pool = &self.shared.compressed;
        pool.take(page, entry.generation, packed, spare) && self.is_spare_whole(page, entry)
    }

    /// Whether what `spare` has are the bytes that a stored page left with.
    fn is_spare_whole(&mut self, page: PageIndex, entry: &Entry) -> bool {
        let (key, room) = (&self.shared.key, &mut self.resealed);
        let is_whole = key.tag(page, entry.generation, &self.spare, room) == entry.tag;
        if !is_whole {
            // Its server has another.
            self.shared.stats.refused_reads.count();
        }
        is_whole
    }

    fn finds_staged_spare(&mut self, page: PageIndex, entry: &Entry) -> bool {
        let Some(found) = self.shared.staging.take_spare(page, entry.generation) else {
            return false;
        };
        self.ports.read_staged(found.slot, &mut self.spare);
        self.shared.staging.release(found.slot);
        if !found.is_sealed {
            return self.is_spare_whole(page, entry);
        }
        let key = &self.shared.key;
        let opened = key.open(page, entry.generation, entry.tag, &mut self.spare);
        if opened.is_err() {
            // Its server has another.
            self.shared.stats.refused_reads.count();
        }
        opened.is_ok()
    }

    /// Installs what [`Shard::find_spare`] has found: what came from the page's server otherwise.
    fn install_spare(&mut self, page: PageIndex, entry: Entry, kind: FaultKind, pending: Pending) {
        let bytes = std::mem::take(&mut self.spare);
        self.install_fetched(page, entry, &bytes, kind, pending);
        self.spare = bytes;
    }

    /// The page's bytes are gone: nothing wrong is ever given instead.
    fn lose(&mut self, page: PageIndex, pending: Pending) {
        self.guesses.drop(page);
        self.end_move(page);
        let entry = self.shared.table.load(page);
        if entry.state != State::Lost {
            self.set(
                page,
                Entry {
                    state: State::Lost,
                    slot: None,
                    staging: None,
                    ..entry
                },
            );
            self.free_slot(entry.slot);
        }
        self.refuse_pins_of(&pending, PinRefused::Lost);
        if pending.fault.is_none() {
            return;
        }
        let pending = Pending {
            pins: Vec::new(),
            ..pending
        };
        if self.shared.lost_pages == LostPages::Stop {
            self.shared.stats.lost_faults.count();
            return self.wait_for(page, Wait::Lost, pending);
        }
        match self.ports.poison(page) {
            Install::Done | Install::Exists => {
                self.shared.stats.poisoned_faults.count();
                self.end_wait(&pending);
            }
            Install::Again | Install::PoolEmpty => self.retry_later(page, pending),
            Install::Gone => self.let_go(&pending),
        }
    }

    /// The VMM mapped pages anew. It does so, when the guest is reset, where the guest was told of a
    /// memory error: what is lost is zero from now on.
    pub fn on_mapped_anew(&mut self, run: PageRun) {
        self.for_known(run, |shard, page| {
            let is_told = shard.shared.lost_pages == LostPages::Poison;
            if is_told && shard.shared.table.state(page) == State::Lost {
                shard.remove(page);
            }
        });
    }

    /// The guest gave a page back: it is zero from now on, unless it was touched again already.
    fn remove(&mut self, page: PageIndex) {
        let entry = self.shared.table.load(page);
        let resident = entry.state == State::Resident;
        if resident && self.ports.is_present(page) {
            return self.keep_as_dirty(page, entry);
        }
        if entry.state != State::Absent {
            self.shared.stats.removed.count();
        }
        let was_error = entry.state == State::Lost && self.shared.lost_pages == LostPages::Poison;
        let next = match was_error || entry.is_unhealed() {
            // A fault from before may have made it a memory error after it was given back. A successor
            // sees to it where we do not come to it.
            true => entry.into_unhealed(),
            false => entry.into_absent(),
        };
        self.clear(page, entry, next);
        // Whoever waits for the old bytes gets zeros.
        if let Some(pending) = self.end_waiting(page)
            && !pending.is_idle()
        {
            self.resolve(page, pending);
        } else if next.is_unhealed() {
            let heal = Pending::new(None, self.ports.now_us());
            self.resolve(page, heal);
        }
    }

    /// Frees all that a page holds anywhere; it is absent from now on, as `next` says. It is not busy.
    fn clear(&mut self, page: PageIndex, entry: Entry, next: Entry) {
        self.guesses.drop(page);
        if entry.state == State::Resident {
            self.shared.budget.release(1);
            self.policy.departed(page);
        }
        if entry.state != State::Absent {
            self.set(page, next);
            crash_points::pass(Point::DiscardApplied);
        }
        self.free_slot(entry.slot);
        if let Some(slot) = entry.staging {
            self.shared.staging.release(slot);
        }
    }

    /// Takes those who wait for a page out of every queue.
    fn end_waiting(&mut self, page: PageIndex) -> Option<Pending> {
        let pending = self.pending.remove(&page)?;
        if matches!(pending.wait, Wait::Fetch { .. }) {
            self.shared.budget.release(1);
        }
        self.leave_queues(page, pending.wait);
        self.end_move(page);
        Some(pending)
    }

    fn keep_as_dirty(&mut self, page: PageIndex, entry: Entry) {
        self.set(page, entry.into_dirty_resident());
        self.free_slot(entry.slot);
    }
}
