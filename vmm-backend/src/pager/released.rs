//! A shard after a live detach: its range is unregistered and every page is the kernel's again.
//!
//! Two things are left to do until the VMM has dropped the disk and closed its userfaultfds. A
//! discard that had begun before may still put its event into ours, and its caller waits until it
//! is read. And the device still reads and writes guest RAM, so pins are answered: a page that was
//! never touched is allocated, for the device's own mapping must not meet a hole.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use crossbeam_channel::Sender;
use outram_wire::logging::Seldom;

use super::guest_ram::GuestRam;
use super::inbox::Messages;
use super::ready::Watched;
use super::shard_thread::ShardEvent;
use super::uffd::{Events, Uffd};
use crate::engine::{PageRun, PinRefused};

/// Why a shard was not released. It goes on as before.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotReleased {
    /// Not every page is home, or the device waits for one.
    #[error("not every page is home")]
    NotHome,
    /// The kernel does not unregister the range.
    #[error("the kernel does not unregister guest RAM")]
    Refused(#[source] io::Error),
}

/// What is left of a shard.
pub(super) struct Released {
    pub(super) uffd: Arc<Uffd>,
    pub(super) ram: Arc<GuestRam>,
    pub(super) messages: Messages<ShardEvent>,
}

impl Released {
    /// Works until told to quit.
    pub(super) fn work(self, answer: &Sender<Result<(), NotReleased>>, events: &mut Events) {
        // Whoever asked may have ended meanwhile.
        let _ = answer.send(Ok(()));
        loop {
            let descriptors = [self.uffd.as_fd(), self.messages.as_fd()];
            if let Err(error) = Watched::new(&descriptors, std::iter::empty()).wait(None) {
                static CANNOT_WAIT: Seldom = Seldom::new();
                if CANNOT_WAIT.is_due() {
                    tracing::error!(%error, "a released shard cannot wait for events; it tries again");
                }
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            self.read_events(events);
            self.messages.hush();
            while let Some(event) = self.messages.next() {
                match event {
                    ShardEvent::Quit => return,
                    ShardEvent::Release(answer) => drop(answer.send(Ok(()))),
                    ShardEvent::Pin { runs, answer, .. } => answer.give(self.allocate(&runs)),
                    // Nothing of this concerns memory that is the kernel's.
                    _ => {}
                }
            }
        }
    }

    /// Lets whoever waits for an event of theirs to be read go on.
    fn read_events(&self, events: &mut Events) {
        loop {
            match self.uffd.read(events) {
                Ok(read) if !read.is_empty() => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => return,
            }
        }
    }

    fn allocate(&self, runs: &[PageRun]) -> Result<(), PinRefused> {
        for run in runs {
            if let Err(error) = self.ram.allocate(*run) {
                tracing::error!(%error, "guest RAM for a request of the disk cannot be allocated");
                return Err(PinRefused::Ending);
            }
        }
        Ok(())
    }
}
