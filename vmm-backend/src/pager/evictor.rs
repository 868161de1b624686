//! The evictor of a shard: copies and punches runs that the shard hands out, off the fault path.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Receiver;

use super::guest_ram::GuestRam;
use super::inbox::Inbox;
use super::shard_thread::ShardEvent;
use super::state_dir::StagingArea;
use super::uffd::Uffd;
use crate::engine::eviction::{EvictionError, EvictionPorts, Run};
use crate::engine::staging::Ticket;
use crate::engine::{PageIndex, PageRun, SharedRef};

/// Pause before write-protecting is tried again while the VMM changes its mappings: its caller
/// waits for the shard to read one event.
const MAPPING_PAUSE: Duration = Duration::from_micros(50);

/// Pause after a run that the kernel refused to evict, for it is handed out again at once.
const REFUSAL_PAUSE: Duration = Duration::from_millis(100);

/// What an evictor works on.
pub(super) struct Evictor {
    /// The shard's userfaultfd.
    pub(super) uffd: Arc<Uffd>,
    /// Guest RAM.
    pub(super) ram: Arc<GuestRam>,
    /// The staging area.
    pub(super) staging: Arc<StagingArea>,
    /// The engine's shared state.
    pub(super) shared: SharedRef,
    /// Where runs come back.
    pub(super) shard: Inbox<ShardEvent>,
}

impl Evictor {
    /// Works until the shard is gone.
    pub(super) fn work(mut self, runs: &Receiver<Run>) {
        let shared = Arc::clone(&self.shared);
        while let Ok(mut run) = runs.recv() {
            while !run.has_ended() {
                if let Err(error) = run.advance(&shared, &mut self) {
                    tracing::debug!(first = run.pages.first.0, %error, "a run was not evicted");
                    std::thread::sleep(REFUSAL_PAUSE);
                }
            }
            self.shard.send(ShardEvent::RunDone(Box::new(run)));
        }
    }
}

impl EvictionPorts for Evictor {
    fn protect(&mut self, run: PageRun) -> Result<(), EvictionError> {
        let Some((start, length)) = self.ram.address_range(run) else {
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
                _ => {
                    tracing::warn!(%error, "write-protecting a run failed");
                    return Err(EvictionError::Refused);
                }
            }
        }
    }

    fn read(&mut self, run: PageRun, tickets: &[Ticket]) -> Result<(), EvictionError> {
        let slots = tickets.iter().map(|ticket| ticket.slot);
        let read = |memfd: &File, offset| self.staging.read_from(memfd, offset, slots);
        self.ram.read_at(run.first, read).map_err(|error| {
            tracing::warn!(%error, "reading a run failed");
            EvictionError::Refused
        })
    }

    fn staged(&self, ticket: Ticket) -> &[u8] {
        self.staging.page(ticket.slot)
    }

    fn change_staged(&mut self, ticket: Ticket, change: &mut dyn FnMut(&mut [u8])) {
        self.staging.change(ticket.slot, change);
    }

    fn punch(&mut self, run: PageRun) -> Result<(), EvictionError> {
        self.ram.punch(run).map_err(|error| {
            tracing::warn!(%error, "punching a run failed");
            EvictionError::Refused
        })
    }

    fn is_present(&mut self, page: PageIndex) -> bool {
        // In doubt the page is taken to be there: it then stays, and a fault looks again.
        self.ram.is_present(page).unwrap_or(true)
    }

    fn wake(&mut self, run: PageRun) {
        if let Some((start, length)) = self.ram.address_range(run)
            && let Err(error) = self.uffd.wake(start, length)
        {
            tracing::debug!(%error, "waking a run failed");
        }
    }
}
