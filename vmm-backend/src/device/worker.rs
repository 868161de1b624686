//! The thread that serves one queue while its ring is started.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};
use std::thread::JoinHandle;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::dirty_log::DirtyLog;
use super::disk::Disk;
use super::guard;
use super::memory::GuestMemory;
use super::request;
use super::ring::{Ring, RingError};
use super::table::{PinnedBuffers, Table};
use super::tally::Tally;
use super::usage::Usage;
use crate::crash_points::{self, Point};
use crate::interrupt::Interrupt;
use crate::whole;

/// What all queues of a device share.
pub(super) struct Shared {
    pub disk: Disk,
    pub memory: Arc<dyn GuestMemory>,
    pub tally: Tally,
    /// Pages written are noted here, after the write.
    pub log: DirtyLog,
    pub table: RwLock<Arc<Table>>,
    pub usage: Usage,
}

/// The descriptors by which driver and device notify each other.
#[derive(Default)]
pub(super) struct Signals {
    pub kick: Option<File>,
    pub call: Option<File>,
    pub error: Option<File>,
}

/// A running queue.
pub(super) struct Worker {
    stop: Arc<Stop>,
    thread: JoinHandle<Ring>,
}

struct Stop {
    wanted: AtomicBool,
    event: EventFd,
}

impl Worker {
    /// Starts serving. `signals.kick` must be there.
    pub(super) fn start(
        index: usize,
        ring: Ring,
        signals: &Signals,
        shared: Arc<Shared>,
    ) -> io::Result<Self> {
        let stop = Arc::new(Stop {
            wanted: AtomicBool::new(false),
            event: EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?,
        });
        let clone = |file: &Option<File>| file.as_ref().map(File::try_clone).transpose();
        let kick = clone(&signals.kick)?
            .ok_or_else(|| io::Error::other("a queue was started without a kick descriptor"))?;
        let (call, error) = (clone(&signals.call)?, clone(&signals.error)?);
        let epoll = Epoll::new()?;
        for fd in [kick.as_raw_fd(), stop.event.as_raw_fd()] {
            let event = EpollEvent::new(EventSet::IN, fd as u64);
            epoll.ctl(ControlOperation::Add, fd, event)?;
        }
        let mut server = QueueServer {
            index,
            ring,
            shared,
            stop: Arc::clone(&stop),
            epoll,
            kick,
            call,
            error,
        };
        let thread = whole::spawn(format!("blk-queue-{index}"), move || {
            guard::accept_bus_errors();
            server.run();
            server.ring
        })?;
        Ok(Self { stop, thread })
    }

    /// Ends the thread after the request it is at; its ring. `None` would be of a thread that panicked, which
    /// ends the process.
    pub(super) fn stop(self) -> Option<Ring> {
        self.stop.wanted.store(true, Ordering::Release);
        if let Err(error) = self.stop.event.write(1) {
            tracing::error!(%error, "a queue's thread cannot be woken");
        }
        self.thread.join().ok()
    }
}

struct QueueServer {
    index: usize,
    ring: Ring,
    shared: Arc<Shared>,
    stop: Arc<Stop>,
    epoll: Epoll,
    kick: File,
    call: Option<File>,
    error: Option<File>,
}

impl QueueServer {
    /// Serves until stopped, or until the driver breaks the queue's rules.
    fn run(&mut self) {
        // A front end that lost its connection listens at another descriptor when it is back, and
        // may change it once more after the queue has started (QEMU's does): what was completed in
        // between would not be heard of. A call too many does no harm.
        self.notify();
        // Kicks may have come before we listened.
        let mut result = self.serve_available();
        while result.is_ok() && !self.stop_is_wanted() {
            result = match self.wait_for_kick() {
                Ok(()) => self.serve_available(),
                Err(error) => Err(RingError::Map(error)),
            };
        }
        if let Err(error) = result {
            self.give_up(&error);
        }
    }

    fn stop_is_wanted(&self) -> bool {
        self.stop.wanted.load(Ordering::Acquire)
    }

    fn wait_for_kick(&mut self) -> io::Result<()> {
        let mut events = [EpollEvent::default(); 2];
        let ready = match self.epoll.wait(-1, &mut events) {
            Ok(ready) => ready,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
        let kick = self.kick.as_raw_fd();
        if events[..ready].iter().any(|event| event.fd() == kick) {
            let mut count = [0; 8];
            match self.kick.read(&mut count) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Serves requests until there are none, or a stop is wanted.
    fn serve_available(&mut self) -> Result<(), RingError> {
        loop {
            self.ring.poll(&self.shared.log)?;
            while !self.stop_is_wanted() {
                let Some((head, chain)) = self.ring.next()? else {
                    break;
                };
                if !self.ring.took_left_over() {
                    self.shared.usage.request_added();
                }
                crash_points::pass(Point::RequestTaken);
                let Some(written) = self.execute(&chain) else {
                    // Interrupted: it is made again when the ring is started the next time.
                    self.ring.give_back();
                    return Ok(());
                };
                crash_points::pass(Point::RequestDone);
                if self.ring.complete(head, written, &self.shared.log)? {
                    self.notify();
                }
            }
            let more = self.ring.wait_for_more(&self.shared.log)?;
            if !more || self.stop_is_wanted() {
                return Ok(());
            }
        }
    }

    /// Bytes written into the chain; nothing where the request was interrupted by a stop.
    fn execute(&self, chain: &super::chain::Chain) -> Option<u32> {
        let interrupt = Interrupt::by(&self.stop.wanted);
        let buffers = PinnedBuffers {
            table: &self.shared.table,
            memory: self.shared.memory.as_ref(),
            strays: &self.shared.tally.strays,
            log: &self.shared.log,
            interrupt,
        };
        let completion = request::execute(chain, &self.shared.disk, &buffers, &interrupt)?;
        self.shared.tally.request(completion.succeeded);
        Some(completion.written)
    }

    fn notify(&mut self) {
        write_event(&mut self.call, "interrupt the guest");
    }

    /// The queue stays silent until its driver resets the device.
    fn give_up(&mut self, error: &RingError) {
        if matches!(error, RingError::Stray) {
            self.shared.tally.stray();
        }
        if self.shared.tally.broken_queue() {
            tracing::warn!(
                queue = self.index,
                %error,
                "a disk queue is given up until the guest resets the device"
            );
        }
        write_event(&mut self.error, "report a broken queue");
    }
}

/// Adds one to an eventfd, where there is one.
fn write_event(event: &mut Option<File>, purpose: &str) {
    let Some(event) = event else { return };
    match event.write(&1u64.to_ne_bytes()) {
        Ok(_) => {}
        // The counter is full: it is signalled as much as can be.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(error) => tracing::debug!(%error, "cannot {purpose}"),
    }
}
