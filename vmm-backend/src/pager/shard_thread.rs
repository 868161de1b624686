//! The thread of a shard: reads its userfaultfd, its connections and its inbox, tells the engine,
//! and is the engine's hands.
//!
//! While it handles events it takes no lock that a fault in work may hold: the VMM's discards wait
//! until their event is read.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use outram_wire::logging::Seldom;
use rustix::event::Timespec;

use super::awaited::{Awaited, MESSAGES, UFFD};
use super::demand::DemandReads;
use super::evictor::EvictorOrder;
use super::guest_ram::GuestRam;
use super::inbox::{Inbox, Messages};
use super::lock;
use super::pin::PinAnswer;
use super::ready::Ready;
use super::released::{NotReleased, Released};
use super::spin::Spin;
use super::state_dir::StagingArea;
use super::uffd::{Event, Events, FaultKind, MESSAGES_PER_READ, ReadWrite, Uffd};
use super::writer::WriterEvent;
use crate::crash_points::{self, Point};
use crate::engine::eviction::Run;
use crate::engine::shard::{Fault, FetchFailed, Shard};
use crate::engine::slots::ServerIndex;
use crate::engine::table::PageTable;
use crate::engine::{
    Fetch, FetchId, Install, PageIndex, PageRun, PinId, PinRefused, Ports, SlotId, StagedPage,
    StagingSlot,
};
use crate::handover::Vmm;
use crate::remote::DataConn;

/// Until what could not be done is tried again.
const RETRY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000,
};

/// Until the host's pool of huge pages is asked again for a page: whoever gives one back to it does
/// not tell us.
const POOL_PAUSE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};

/// Until a guest that asks for nothing is taken to do without us for now.
const GOES_ON: Duration = Duration::from_millis(1);

/// Within this, a vCPU that goes on with its page asks for the next one where it uses memory at random.
const ASKS_SOON: Duration = Duration::from_micros(15);

/// Retries in a row between two discards: some 100 µs, longer than their caller takes to go on.
const RETRIES_AT_ONCE: usize = 100;

/// What a shard's thread is told.
pub(super) enum ShardEvent {
    /// An evictor hands a run back.
    RunDone(Box<Run>),
    /// A write-back ended, of pages of this shard; each lies in its slot.
    WrittenBack(Vec<(StagedPage, SlotId)>),
    /// Pages are to be kept; answered over the channel.
    Pin {
        /// Its number.
        id: PinId,
        /// Which, all of this shard.
        runs: Vec<PageRun>,
        /// Whether the device will write them.
        write: bool,
        /// Where the answer goes.
        answer: PinAnswer,
    },
    /// Nobody waits for this pin any more.
    CancelPin(PinId),
    /// Pages need not be kept any longer.
    Unpin(Vec<PageRun>),
    /// A connection for demand reads.
    Connection(ServerIndex, DataConn),
    /// What pages are read over is to be dropped; another connection comes.
    Disconnected(ServerIndex),
    /// Groups of slabs are gone for good.
    GroupsLost(Arc<HashSet<u32>>),
    /// Move pages out of slabs that their servers want back: they are marked, and there are more of them.
    Vacate,
    /// Bring every page home, or call that off.
    Homing(bool),
    /// Leave the memory to the kernel once every page is home; answered over the channel.
    Release(Sender<Result<(), NotReleased>>),
    /// A region was plugged, and is watched; these of its pages are there.
    Plug(PageRun, Vec<PageRun>),
    /// A region's memory is gone; answered once nothing refers to it.
    Unplug(PageRun, Sender<()>),
    /// The guest is ending: refuse pins from now on.
    Ending,
    /// Let every faulting thread of the VMM go and end: it is being killed, or has ended.
    Quit,
}

/// What others may see of a shard.
#[derive(Debug, Default)]
pub(super) struct ShardGauges {
    /// Faults that wait for an answer.
    pub(super) waiting: AtomicU64,
    /// ... of which for a page that is lost.
    pub(super) waiting_lost: AtomicU64,
    /// How long faults have waited; none before the shard's first round.
    pub(super) waited: Mutex<Option<Waited>>,
    /// Bytes sent on demand connections.
    pub(super) wire_sent_bytes: AtomicU64,
    /// Bytes received on them.
    pub(super) wire_received_bytes: AtomicU64,
    /// Whether all of its pages are home, while they are brought there.
    pub(super) home: AtomicBool,
}

/// How long a shard's faults had waited at a moment, and how many waited on: so that it can be told
/// later while the shard's thread sleeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waited {
    until_then_us: u64,
    waiting: u64,
    then: Instant,
}

impl Waited {
    /// How long they have waited until now, all together.
    pub(super) fn until_now_us(&self) -> u64 {
        self.until_then_us + self.waiting * self.then.elapsed().as_micros() as u64
    }
}

/// What the engine acts through.
pub(super) struct ShardPorts {
    /// Which shard this is.
    pub(super) shard: usize,
    /// Its userfaultfd.
    pub(super) uffd: Arc<Uffd>,
    /// Guest RAM.
    pub(super) ram: Arc<GuestRam>,
    /// The staging area.
    pub(super) staging: Arc<StagingArea>,
    /// Its demand reads.
    pub(super) demand: DemandReads,
    /// The evictors.
    pub(super) evictors: Sender<EvictorOrder>,
    /// The writer.
    pub(super) writer: Inbox<WriterEvent>,
    /// What it is to write, and has not been told of.
    pub(super) to_write: Vec<StagedPage>,
    /// All other shards.
    pub(super) others: Vec<Inbox<ShardEvent>>,
    /// Answers awaited by pinning threads.
    pub(super) pin_answers: HashMap<PinId, PinAnswer>,
    /// Zero of the clock.
    pub(super) epoch: Instant,
}

impl Ports for ShardPorts {
    fn zero(&mut self, run: PageRun) -> (u32, Install) {
        let Some((start, length)) = self.ram.address_range(run) else {
            return (0, Install::Gone);
        };
        let (made, how) = self.uffd.zero(start, length);
        ((made / self.ram.page_size().bytes()) as u32, how)
    }

    fn copy(&mut self, page: PageIndex, bytes: &[u8], protect: bool) -> Install {
        match self.ram.hva(page) {
            Some(hva) => self.uffd.copy(hva, bytes, protect),
            None => Install::Gone,
        }
    }

    fn copy_row(&mut self, run: PageRun, bytes: &[u8]) -> (u32, Install) {
        let Some((start, _)) = self.ram.address_range(run) else {
            return (0, Install::Gone);
        };
        let (made, how) = self.uffd.copy_row(start, bytes);
        ((made / self.ram.page_size().bytes()) as u32, how)
    }

    fn copy_staged(&mut self, page: PageIndex, slot: StagingSlot) -> Install {
        self.copy(page, Arc::clone(&self.staging).page(slot), false)
    }

    fn read_staged(&mut self, slot: StagingSlot, bytes: &mut [u8]) {
        bytes.copy_from_slice(self.staging.page(slot));
    }

    fn unprotect(&mut self, page: PageIndex) -> Install {
        match self.ram.address_range(PageRun::single(page)) {
            Some((start, length)) => self.uffd.unprotect(start, length),
            None => Install::Gone,
        }
    }

    fn poison(&mut self, page: PageIndex) -> Install {
        let range = self.ram.address_range(PageRun::single(page));
        let how = range.map_or(Install::Gone, |(start, length)| {
            self.uffd.poison(start, length)
        });
        if how == Install::Exists {
            // Poisoned by a former process.
            self.wake(PageRun::single(page));
        }
        how
    }

    fn wake(&mut self, run: PageRun) {
        if let Some((start, length)) = self.ram.address_range(run)
            && let Err(error) = self.uffd.wake(start, length)
        {
            tracing::debug!(%error, "waking failed");
        }
    }

    fn is_present(&mut self, page: PageIndex) -> bool {
        self.ram.is_present(page).unwrap_or_else(|error| {
            tracing::error!(%error, page = page.0, "the memfd does not say whether it has a page");
            true
        })
    }

    fn fetch(&mut self, fetch: Fetch) -> bool {
        self.demand.fetch(fetch)
    }

    fn send_waited_for(&mut self) {
        self.demand.send_waited_for();
    }

    fn start_run(&mut self, run: Run) {
        let order = EvictorOrder::Evict(self.shard, run);
        if self.evictors.send(order).is_err() {
            tracing::error!(shard = self.shard, "the evictors have ended");
        }
    }

    fn write_back(&mut self, page: StagedPage) {
        self.to_write.push(page);
    }

    fn stage(&mut self, slot: StagingSlot, bytes: &[u8]) {
        self.staging.write(slot, bytes);
    }

    fn answer_pin(&mut self, pin: PinId, result: Result<(), PinRefused>) {
        if let Some(answer) = self.pin_answers.remove(&pin) {
            answer.give(result);
        }
    }

    fn alert_shards(&mut self) {
        self.others.iter().for_each(Inbox::ring);
    }

    fn now_us(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64
    }
}

impl ShardPorts {
    /// Tells the writer what is to be written.
    fn send_to_write(&mut self) {
        if !self.to_write.is_empty() {
            let pages = std::mem::take(&mut self.to_write);
            self.writer.send(WriterEvent::Write(self.shard, pages));
        }
    }
}

/// A shard with all that its thread reads.
pub(super) struct ShardThread {
    /// The engine.
    pub(super) shard: Shard<ShardPorts>,
    /// What it is told.
    pub(super) messages: Messages<ShardEvent>,
    /// What others see of it.
    pub(super) gauges: Arc<ShardGauges>,
    /// The VMM.
    pub(super) vmm: Arc<Vmm>,
    /// Pages that the VMM has not mapped any longer.
    pub(super) unmapped: Vec<PageRun>,
    /// Regions on their way out, and who waits for that.
    pub(super) leaving: Vec<(PageRun, Sender<()>)>,
    /// When the guest last asked for something, or something came for it.
    pub(super) last_of_guest: Instant,
    /// How the thread waits for a guest that goes on.
    pub(super) spin: Spin,
}

impl ShardThread {
    /// Works until told to quit.
    pub(super) fn work(mut self) {
        let mut events = Events::new();
        loop {
            self.shard.ports().send_to_write();
            let ready = match self.wait(&mut events) {
                Ok(ready) => ready,
                Err(error) => {
                    static CANNOT_WAIT: Seldom = Seldom::new();
                    if CANNOT_WAIT.is_due() {
                        tracing::error!(%error, "a shard cannot wait for events; it tries again");
                    }
                    std::thread::sleep(Duration::from_millis(10));
                    continue;
                }
            };
            self.hear_of_guest(&ready, &mut events);
            if ready.is_of_servers_alone() && self.shard.has_only_to_evict() {
                self.let_guest_ask(&mut events);
            }
            // Who sends after this moment rings again.
            if ready.has_own(MESSAGES) {
                self.messages.hush();
            }
            while let Some(event) = self.messages.next() {
                match event {
                    ShardEvent::Quit => return self.let_go(),
                    ShardEvent::Release(answer) => match self.unregister() {
                        Ok(()) => return self.into_released().work(&answer, &mut events),
                        // Whoever asked may have ended meanwhile.
                        Err(error) => drop(answer.send(Err(error))),
                    },
                    event => self.handle(event),
                }
            }
            for fetch in self.shard.ports().demand.drain_gone() {
                self.shard
                    .on_fetched(fetch.id, fetch.page, Err(FetchFailed::Gone));
            }
            self.shard.pump();
            self.shard.ports().send_to_write();
            self.retry_between_discards();
            // For which one of those may have begun to wait just as it was made.
            self.shard.use_room();
            self.shard.ports().demand.send_ahead();
            self.let_regions_go();
            self.publish();
        }
    }

    /// Takes what the guest asks for, and what came for it.
    fn hear_of_guest(&mut self, ready: &Ready, events: &mut Events) {
        if ready.has_own(UFFD) || !ready.servers.is_empty() {
            self.last_of_guest = Instant::now();
        }
        // Mapping changes first: a COPY is refused until their event is read.
        if ready.has_own(UFFD) {
            self.read_uffd(events);
        }
        for server in &ready.servers {
            self.read_replies(*server);
        }
    }

    /// Gives the vCPU that goes on just now the time to ask for the next page, if that comes soon. To protect
    /// pages while it runs interrupts its processor, and takes as long as all the rest of an eviction; while it
    /// waits, the kernel need not.
    fn let_guest_ask(&mut self, events: &mut Events) {
        let mut awaited = Awaited::of(self.shard.ports(), &self.messages, events);
        // What fails here fails at the next wait as well, which tells of it.
        if let Ok(true) = self.spin.glance(&mut awaited, ASKS_SOON) {
            let ready = awaited.ready;
            self.hear_of_guest(&ready, events);
        }
    }

    /// Waits until something is to be done.
    fn wait(&mut self, events: &mut Events) -> io::Result<Ready> {
        let shard = &self.shard;
        let again = shard.has_retries()
            || shard.has_more_to_bring()
            || shard.has_more_to_vacate()
            || shard.has_slots_to_give_back();
        let retry = match again {
            true => Some(&RETRY),
            false => self.shard.waits_for_pool().then_some(&POOL_PAUSE),
        };
        let guest_goes_on = self.last_of_guest.elapsed() < GOES_ON;
        let ports = self.shard.ports();
        // Only who sleeps hears of a socket that takes more.
        let looks = retry.is_none() && guest_goes_on && !ports.demand.wants_write();
        let mut awaited = Awaited::of(ports, &self.messages, events);
        match looks {
            true => self.spin.wait(&mut awaited)?,
            false => awaited.sleep(retry)?,
        }
        Ok(awaited.ready)
    }

    /// A COPY is refused from the start of a discard until its caller has gone on after we read the
    /// event. A guest that inflates its balloon discards page by page, with a moment in between
    /// that is neither now nor when the next event comes: it has to be waited for.
    fn retry_between_discards(&mut self) {
        for _ in 0..RETRIES_AT_ONCE {
            if !self.shard.has_retries() {
                return;
            }
            // Its caller may need this very processor.
            std::thread::yield_now();
            self.shard.retry();
            // The next discard has begun.
            if self.shard.ports().uffd.has_messages() {
                return;
            }
        }
    }

    fn read_uffd(&mut self, events: &mut Events) {
        loop {
            let uffd = Arc::clone(&self.shard.ports().uffd);
            let read = match uffd.read(events) {
                Ok(read) => read,
                Err(error) => {
                    if !matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) {
                        tracing::error!(%error, "reading a userfaultfd failed");
                    }
                    return;
                }
            };
            // What comes from now on is told by the next wait.
            let is_last = read.len() < MESSAGES_PER_READ;
            for event in read {
                self.handle_uffd(event);
            }
            if is_last {
                return;
            }
        }
    }

    fn handle_uffd(&mut self, event: Event) {
        match event {
            Event::Pagefault { kind, rw, addr, .. } => {
                let fault = Fault {
                    write: rw == ReadWrite::Write,
                    protected: kind == FaultKind::WriteProtected,
                };
                match self.shard.ports().ram.page_at(addr as u64) {
                    Some(page) => self.shard.on_fault(page, fault),
                    None => tracing::error!(address = addr as u64, "a fault outside guest RAM"),
                }
            }
            Event::Remove { start, end } => {
                crash_points::pass(Point::DiscardRead);
                for run in self.runs_of(start as u64, end as u64) {
                    self.removed(run);
                }
            }
            Event::Unmap { start, end } => {
                for run in self.runs_of(start as u64, end as u64) {
                    // Where it is known to be gone already, there is nothing left to guard.
                    if self.shard.is_plugged(run.first) {
                        self.on_unmapped(run);
                    }
                }
            }
            other => tracing::warn!(?other, "an event that was not asked for"),
        }
    }

    /// QEMU dropped a range of its mapping. That discards huge pages only if it punched them as
    /// well, of which no word comes and which nobody can tell from here: they count as changed,
    /// and are found to be gone at their next fault, or as zeros when they are evicted.
    fn removed(&mut self, run: PageRun) {
        match self.shard.ports().ram.page_size().is_huge() {
            true => self.shard.on_mapping_dropped(run),
            false => self.shard.on_removed(run),
        }
    }

    /// QEMU unmapped guest RAM. Where it mapped the same pages again (it replaces poisoned ones at
    /// a reset), they are registered anew, for the new mapping is not: its caller goes on only now
    /// that the event is read, with its vCPUs stopped. Where it did not (a block was unplugged),
    /// nothing of them is evicted; that the block is gone is told by [`ShardEvent::Unplug`].
    fn on_unmapped(&mut self, run: PageRun) {
        tracing::info!(
            first = run.first.0,
            pages = run.count,
            "QEMU unmapped guest RAM"
        );
        self.shard.freeze(run);
        let ports = self.shard.ports();
        let is_mapped = ports.ram.is_mapped(&self.vmm, run).unwrap_or_else(|error| {
            tracing::warn!(%error, "the VMM's memory map is not readable");
            false
        });
        let range = ports.ram.address_range(run).filter(|_| is_mapped);
        let registered = range.map(|(start, length)| ports.uffd.register(start, length));
        match registered {
            Some(Ok(())) => {
                self.shard.thaw();
                self.unmapped.iter().for_each(|run| self.shard.freeze(*run));
                self.shard.on_mapped_anew(run);
                // Whoever waits in the old mapping looks at the new one.
                self.shard.ports().wake(run);
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "guest RAM that was mapped anew is not watched any more");
                self.unmapped.push(run);
            }
            None => self.unmapped.push(run),
        }
    }

    /// Takes a region over that is watched by now, with the pages that were there of it.
    pub(super) fn plug(&mut self, region: PageRun, populated: Vec<PageRun>) {
        self.shard.plug(region);
        let pages = populated.into_iter().flat_map(PageRun::pages);
        pages.for_each(|page| self.shard.adopt_populated(page));
    }

    /// Takes a region over from a former process, whose table is recovered by now.
    pub(super) fn take_over(&mut self, region: PageRun, table: &PageTable) {
        self.shard.plug(region);
        let pages = table.touched_in(region).flat_map(PageRun::pages);
        pages.for_each(|page| self.shard.adopt_recovered(page));
    }

    /// A region's memory is gone.
    fn unplug(&mut self, run: PageRun, answer: Sender<()>) {
        self.unmapped
            .retain(|unmapped| !run.contains(unmapped.first));
        self.shard.unplug(run);
        self.leaving.push((run, answer));
    }

    /// Tells of regions that nothing refers to any longer.
    fn let_regions_go(&mut self) {
        while let Some(run) = self.shard.next_unplugged() {
            if let Some(place) = self.leaving.iter().position(|(known, _)| *known == run) {
                // Nobody waits for it any more where the guest has ended meanwhile.
                let _ = self.leaving.swap_remove(place).1.send(());
            }
        }
    }

    /// The parts of an address range that are this shard's.
    fn runs_of(&mut self, start: u64, end: u64) -> Vec<PageRun> {
        let range = self.shard.range();
        let runs = self.shard.ports().ram.runs_at(start, end).into_iter();
        runs.filter_map(|run| run.intersection(range)).collect()
    }

    fn read_replies(&mut self, server: ServerIndex) {
        let Some(mut conn) = self.shard.ports().demand.lend(server) else {
            return;
        };
        let flushed = conn.flush();
        let length = self.shard.ports().ram.page_size().length();
        let mut arrivals = self.shard.arrivals();
        let received = flushed.and_then(|()| {
            conn.receive(|id, result| {
                let Some(flight) = arrivals.ports().demand.answered(FetchId(id)) else { return };
                match result {
                    Ok(bytes) => {
                        let pages = bytes.chunks_exact_mut(length);
                        for (fetch, page) in flight.fetches().zip(pages) {
                            arrivals.on_fetched(fetch.id, fetch.page, Ok(page));
                        }
                    }
                    Err(error) if flight.count() == 1 => {
                        let fetch = flight.first();
                        // One that is fetched ahead may have been dropped meanwhile, and its slab given back.
                        if arrivals.ports().demand.is_there(fetch) {
                            tracing::error!(%error, page = fetch.page.0, "a memory server does not know a page's place");
                        }
                        arrivals.on_fetched(fetch.id, fetch.page, Err(FetchFailed::Gone));
                    }
                    Err(_) => arrivals.ports().demand.ask_one_by_one(&flight),
                }
            })
        });
        drop(arrivals);
        if let Err(error) = &received {
            tracing::info!(%error, "a demand connection is lost");
        }
        self.shard
            .ports()
            .demand
            .give_back(server, conn, received.is_ok());
    }

    fn handle(&mut self, event: ShardEvent) {
        match event {
            ShardEvent::RunDone(run) => self.shard.on_run_done(&run),
            ShardEvent::WrittenBack(pages) => {
                for (page, slot) in pages {
                    self.shard.on_written_back(page, slot);
                }
            }
            ShardEvent::Pin {
                id,
                runs,
                write,
                answer,
            } => {
                self.shard.ports().pin_answers.insert(id, answer);
                self.shard.on_pin(id, &runs, write);
            }
            ShardEvent::CancelPin(id) => self.shard.cancel_pin(id),
            ShardEvent::Unpin(runs) => self.shard.on_unpin(&runs),
            ShardEvent::Connection(server, conn) => {
                self.shard.ports().demand.connected(server, conn)
            }
            ShardEvent::Disconnected(server) => self.shard.ports().demand.disconnected(server),
            ShardEvent::GroupsLost(groups) => self.shard.on_groups_lost(&groups),
            ShardEvent::Vacate => self.shard.on_vacate(),
            ShardEvent::Homing(true) => self.shard.start_homing(),
            ShardEvent::Homing(false) => self.shard.stop_homing(),
            ShardEvent::Plug(region, populated) => self.plug(region, populated),
            ShardEvent::Unplug(run, answer) => self.unplug(run, answer),
            ShardEvent::Ending => self.shard.end(),
            ShardEvent::Release(_) | ShardEvent::Quit => {}
        }
    }

    /// The VMM is dying: whoever waits in a fault is let go, so that it can be reaped.
    fn let_go(mut self) {
        self.shard.end();
        let range = self.shard.range();
        let ports = self.shard.ports();
        for part in ports.ram.parts(range) {
            if let Some((start, length)) = ports.ram.address_range(part)
                && let Err(error) = ports.uffd.unregister(start, length)
            {
                tracing::debug!(%error, "a dying VMM's range is gone already");
            }
        }
    }

    /// Ends the shard's work: its whole range is the kernel's again, as before the hand-over.
    fn unregister(&mut self) -> Result<(), NotReleased> {
        if !self.shard.may_be_released() {
            return Err(NotReleased::NotHome);
        }
        let range = self.shard.range();
        let gone = self.unmapped.clone();
        let mut parts = self.shard.ports().ram.parts(range);
        // What was unplugged is not forgotten by all yet.
        parts.retain(|part| self.shard.is_plugged(part.first));
        let ports = self.shard.ports();
        for part in parts {
            let Some((start, length)) = ports.ram.address_range(part) else {
                continue;
            };
            if let Err(source) = ports.uffd.unregister(start, length) {
                if gone.iter().any(|run| run.intersection(part).is_some()) {
                    continue;
                }
                // What of it is let go already is only never evicted again.
                self.shard.freeze(range);
                return Err(NotReleased::Refused(source));
            }
        }
        self.gauges.waiting.store(0, Ordering::Relaxed);
        self.gauges.waiting_lost.store(0, Ordering::Relaxed);
        Ok(())
    }

    /// What goes on once the range is unregistered; the engine's part ends here.
    fn into_released(mut self) -> Released {
        let ports = self.shard.ports();
        Released {
            uffd: Arc::clone(&ports.uffd),
            ram: Arc::clone(&ports.ram),
            messages: self.messages,
        }
    }

    fn publish(&mut self) {
        let (sent, received) = self.shard.ports().demand.wire_bytes();
        let gauges = &self.gauges;
        let waiting = self.shard.waiting();
        gauges.waiting.store(waiting.faults, Ordering::Relaxed);
        gauges
            .waiting_lost
            .store(waiting.for_lost, Ordering::Relaxed);
        // Its only other user copies it under the lock, and waits for nothing meanwhile.
        *lock(&gauges.waited) = Some(Waited {
            until_then_us: waiting.waited_us,
            waiting: waiting.faults,
            then: Instant::now(),
        });
        gauges.home.store(self.shard.is_home(), Ordering::Relaxed);
        gauges.wire_sent_bytes.store(sent, Ordering::Relaxed);
        gauges
            .wire_received_bytes
            .store(received, Ordering::Relaxed);
    }
}
