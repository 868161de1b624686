//! The evictors: threads that copy, seal and punch the runs that shards hand out, off the fault path. Any
//! of them takes any shard's run, so that there may be as many as the host can spare for the guest.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use outram_wire::logging::Seldom;
use outram_wire::tuning::Workers;

use super::guest_ram::GuestRam;
use super::inbox::Inbox;
use super::lock;
use super::shard_thread::ShardEvent;
use super::state_dir::StagingArea;
use super::uffd::Uffd;
use crate::engine::eviction::{EvictionError, EvictionPorts, Run};
use crate::engine::staging::Ticket;
use crate::engine::{PageIndex, PageRun, SharedRef};
use crate::whole;

/// Pause before write-protecting is tried again while the VMM changes its mappings: its caller
/// waits for the shard to read one event.
const MAPPING_PAUSE: Duration = Duration::from_micros(50);

/// Pause after a run that the kernel refused to evict, for it is handed out again at once.
const REFUSAL_PAUSE: Duration = Duration::from_millis(100);

/// By how much evictors are nicer than the threads that the guest waits for: where they share processors, a
/// page that arrives goes into its place at once, and not after a run of pages that leave.
const NICER: i32 = 5;

/// What an evictor is told.
pub(super) enum EvictorOrder {
    /// Evict a run of this shard.
    Evict(usize, Run),
    /// End, whoever hears it.
    End,
}

/// What evictors work on.
pub(super) struct EvictorParts {
    /// The shards' userfaultfds.
    pub(super) uffds: Vec<Arc<Uffd>>,
    /// Guest RAM.
    pub(super) ram: Arc<GuestRam>,
    /// The staging area.
    pub(super) staging: Arc<StagingArea>,
    /// The engine's shared state.
    pub(super) shared: SharedRef,
    /// Where the shards' runs come back.
    pub(super) shards: Vec<Inbox<ShardEvent>>,
}

/// The evictors of a guest. Their orders are bounded by the runs that shards have out.
pub(super) struct Evictors {
    parts: Arc<EvictorParts>,
    orders: Sender<EvictorOrder>,
    queue: Receiver<EvictorOrder>,
    crew: Mutex<Crew>,
}

#[derive(Default)]
struct Crew {
    /// How many are not told to end.
    size: u32,
    /// All that were started and may live.
    threads: Vec<JoinHandle<()>>,
}

impl Evictors {
    /// So many of them, who wait for orders.
    pub(super) fn start(parts: EvictorParts, workers: Workers) -> io::Result<Self> {
        let (orders, queue) = unbounded();
        let evictors = Self {
            parts: Arc::new(parts),
            orders,
            queue,
            crew: Mutex::default(),
        };
        evictors.set(workers)?;
        Ok(evictors)
    }

    /// Where shards hand their runs out.
    pub(super) fn orders(&self) -> Sender<EvictorOrder> {
        self.orders.clone()
    }

    /// How many there are, those not counted that are about to end.
    pub(super) fn workers(&self) -> u32 {
        lock(&self.crew).size
    }

    /// Has so many of them from now on. Those that are too many end once what was handed out before is
    /// done; where a thread cannot be started, those that could be stay.
    pub(super) fn set(&self, workers: Workers) -> io::Result<()> {
        let mut crew = lock(&self.crew);
        crew.threads.retain(|thread| !thread.is_finished());
        self.dismiss_down_to(workers.get(), &mut crew);
        let grown = self.grow_to(workers.get(), &mut crew);
        let shards = self.parts.shards.len() as u32;
        self.parts.shared.pace.set_workers(crew.size, shards);
        grown
    }

    /// Ends them all, once what was handed out is done.
    pub(super) fn end(&self) {
        let mut crew = lock(&self.crew);
        self.dismiss_down_to(0, &mut crew);
        for thread in crew.threads.drain(..) {
            // One that had panicked would have ended the process.
            let _ = thread.join();
        }
    }

    fn dismiss_down_to(&self, size: u32, crew: &mut Crew) {
        while crew.size > size {
            // The queue lasts as long as we do.
            let _ = self.orders.send(EvictorOrder::End);
            crew.size -= 1;
        }
    }

    fn grow_to(&self, size: u32, crew: &mut Crew) -> io::Result<()> {
        while crew.size < size {
            let (parts, queue) = (Arc::clone(&self.parts), self.queue.clone());
            let name = format!("evict-{}", crew.size);
            crew.threads
                .push(whole::spawn(name, move || parts.work(&queue))?);
            crew.size += 1;
        }
        Ok(())
    }
}

impl EvictorParts {
    /// Works until told to end, or until nobody is left who could tell.
    fn work(&self, orders: &Receiver<EvictorOrder>) {
        // Of the calling thread alone, in Linux.
        if let Err(error) = rustix::process::nice(NICER) {
            tracing::debug!(%error, "an evictor runs at the priority of the others");
        }
        while let Ok(EvictorOrder::Evict(shard, mut run)) = orders.recv() {
            let mut hands = Hands {
                parts: self,
                uffd: &self.uffds[shard],
            };
            let mut was_refused = false;
            while !run.has_ended() {
                if let Err(error) = run.advance(&self.shared, &mut hands) {
                    tracing::debug!(first = run.pages.first.0, %error, "a run was not evicted");
                    was_refused = true;
                }
            }
            // Before the pause: faults on its pages wait for this.
            self.shards[shard].send(ShardEvent::RunDone(Box::new(run)));
            if was_refused {
                std::thread::sleep(REFUSAL_PAUSE);
            }
        }
    }
}

/// What a run of one shard is evicted with.
struct Hands<'a> {
    parts: &'a EvictorParts,
    uffd: &'a Uffd,
}

impl EvictionPorts for Hands<'_> {
    fn protect(&mut self, run: PageRun) -> Result<(), EvictionError> {
        let Some((start, length)) = self.parts.ram.address_range(run) else {
            return Err(EvictionError::Gone);
        };
        loop {
            let error = match self.uffd.protect(start, length) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => std::thread::sleep(MAPPING_PAUSE),
                Some(libc::ESRCH | libc::ENOENT) => return Err(EvictionError::Gone),
                _ => return Err(refused(&error, "write-protecting")),
            }
        }
    }

    fn read(&mut self, run: PageRun, tickets: &[Ticket]) -> Result<(), EvictionError> {
        let slots = tickets.iter().map(|ticket| ticket.slot);
        let read = |memfd: &File, offset| self.parts.staging.read_from(memfd, offset, slots);
        let read = self.parts.ram.read_at(run.first, read);
        read.map_err(|error| refused(&error, "reading"))
    }

    fn staged(&self, ticket: Ticket) -> &[u8] {
        self.parts.staging.page(ticket.slot)
    }

    fn change_staged(&mut self, ticket: Ticket, change: &mut dyn FnMut(&mut [u8])) {
        self.parts.staging.change(ticket.slot, change);
    }

    fn punch(&mut self, run: PageRun) -> Result<(), EvictionError> {
        let punched = self.parts.ram.punch(run);
        punched.map_err(|error| refused(&error, "punching"))
    }

    fn is_present(&mut self, page: PageIndex) -> bool {
        // In doubt the page is taken to be there: it then stays, and a fault looks again.
        self.parts.ram.is_present(page).unwrap_or(true)
    }

    fn wake(&mut self, run: PageRun) {
        if let Some((start, length)) = self.parts.ram.address_range(run)
            && let Err(error) = self.uffd.wake(start, length)
        {
            tracing::debug!(%error, "waking a run failed");
        }
    }
}

/// The kernel would not do this: the run is handed out again.
fn refused(error: &io::Error, what: &str) -> EvictionError {
    static REFUSED: Seldom = Seldom::new();
    if REFUSED.is_due() {
        tracing::warn!(%error, "{what} a run failed");
    }
    EvictionError::Refused
}
