//! The vhost-user-blk device: the channel by which libvirt attaches a backend to its guest.
//!
//! By default a read-only disk of 1 MiB whose first sector says what it is; on demand a far-memory
//! disk ([`crate::far_disk`]), whose requests wait for the network and may be interrupted by a stop
//! of their queue: they are then left in the ring, and made again. The device is a
//! guest's (hostile) input: whatever a driver writes into its rings is an error of that request,
//! or breaks that queue, never a panic and never an access to memory that is not pinned.
//!
//! The module knows nothing of paging: [`GuestMemory`] is what it asks of the pager. It talks
//! vhost-user to a front end that has been handed over already. Lock order: the server's state,
//! then the memory table; a pin is never taken while a lock of the pager is held, and never while
//! another pin of the same request is held.

mod chain;
mod dirty_log;
mod disk;
pub(crate) mod fuzzing;
mod guard;
mod memory;
mod request;
mod ring;
mod server;
mod table;
mod tally;
mod usage;
mod worker;

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use outram_wire::units::VmId;
use vhost::vhost_user::{BackendReqHandler, Error};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::handover::MemfdId;
use dirty_log::DirtyLog;
use disk::Disk;
use guard::Guard;
use server::Connection;
use table::Table;
use tally::Tally;
use usage::Usage;
use worker::Shared;

use crate::far_disk::FarDisk;

pub use memory::{GuestMemory, HostRange, PinError, Pinned, TableRegion};

/// Most queues a device can have: what one ring-mapping table serves, and more than QEMU asks for
/// guests of this size.
pub const MAX_QUEUES: u16 = 256;

/// What the device is.
#[derive(Clone)]
pub struct DeviceConfig {
    /// The guest: its first eight digits are the disk's serial.
    pub vm: VmId,
    /// What the disk holds: without one it is small, read-only and says what it is.
    pub far_disk: Option<Arc<FarDisk>>,
    /// Most queues a front end may use. QEMU takes one a vCPU unless told otherwise.
    pub max_queues: u16,
}

impl DeviceConfig {
    /// The default disk of a guest.
    pub fn new(vm: VmId) -> Self {
        Self {
            vm,
            far_disk: None,
            max_queues: MAX_QUEUES,
        }
    }
}

/// Counters of the device; all only rise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounters {
    /// Requests completed, failed ones among them.
    pub requests: u64,
    /// Requests answered with an error.
    pub request_errors: u64,
    /// Queues given up because their driver broke the rules.
    pub broken_queues: u64,
    /// Accesses to pages that were not there although pinned: caught, and the request failed.
    pub stray_device_accesses: u64,
}

/// Why the device or its connection failed.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The configuration makes no disk.
    #[error("{0}")]
    Config(String),
    /// The net under the device's accesses cannot be set up.
    #[error("the device's own mapping of guest RAM cannot be guarded")]
    Guard(#[source] io::Error),
    /// The connection failed.
    #[error("the vhost-user connection failed")]
    Connection(#[source] io::Error),
    /// The front end broke the protocol, or asked for what is refused.
    #[error("the vhost-user front end was cut off: {0}")]
    Protocol(String),
    /// No message within the time-out.
    #[error("no vhost-user message arrived within {0:?}: the peer connected and stayed silent")]
    Silent(Duration),
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// The front end closed it: guest ended, device unplugged or front end reconnects.
    Disconnected,
}

/// The device. One for a guest's life; serves one connection after the other.
pub struct Device {
    max_queues: u16,
    guard: Guard,
    shared: Arc<Shared>,
    /// The connection being served, if any.
    connection: Mutex<Weak<Connection>>,
}

impl Device {
    /// A device whose accesses to guest RAM go through `memory`.
    pub fn new(config: DeviceConfig, memory: Arc<dyn GuestMemory>) -> Result<Self, DeviceError> {
        if config.max_queues == 0 || config.max_queues > MAX_QUEUES {
            let text = format!(
                "{} disk queues were asked for: expected 1 to {MAX_QUEUES}",
                config.max_queues
            );
            return Err(DeviceError::Config(text));
        }
        Ok(Self {
            max_queues: config.max_queues,
            guard: Guard::new().map_err(DeviceError::Guard)?,
            shared: Arc::new(Shared {
                disk: Disk::new(config.vm, config.far_disk),
                memory,
                tally: Tally::default(),
                log: DirtyLog::default(),
                table: RwLock::new(Arc::new(Table::default())),
                usage: Usage::default(),
            }),
            connection: Mutex::default(),
        })
    }

    /// Serves one front end until it disconnects. Rings are released and their threads ended when
    /// this returns. A `shutdown` of a clone of `stream` ends it from outside.
    ///
    /// One connection at a time.
    pub fn serve(&self, stream: UnixStream) -> Result<Served, DeviceError> {
        let connection = Arc::new(Connection::new(
            Arc::clone(&self.shared),
            self.guard.clone(),
            self.max_queues,
        ));
        *self.connection() = Arc::downgrade(&connection);
        self.shared.usage.connected();
        let mut handler = BackendReqHandler::from_stream(stream, Arc::clone(&connection));
        let result = loop {
            match handler.handle_request() {
                Ok(()) | Err(Error::SocketRetry(_)) => {}
                Err(Error::Disconnected | Error::SocketBroken(_)) => {
                    break Ok(Served::Disconnected);
                }
                Err(Error::SocketError(source)) => break Err(DeviceError::Connection(source)),
                Err(Error::ReqHandlerError(reason)) => {
                    break Err(DeviceError::Protocol(reason.to_string()));
                }
                Err(error) => break Err(DeviceError::Protocol(error.to_string())),
            }
        };
        self.shared.usage.disconnected(Instant::now());
        connection.close();
        result
    }

    /// Whether the guest used the disk to the last, should its VMM have ended just now: then it was neither
    /// saved nor moved. In doubt it was not.
    pub fn is_driven(&self) -> bool {
        self.shared.usage.lasts(Instant::now())
    }

    /// Memory that is guest RAM no longer: drops what is mapped of it. A front end whose driver has
    /// stopped the disk does not tell.
    pub fn forget(&self, memfds: &[MemfdId]) {
        if memfds.is_empty() {
            return;
        }
        let connection = self.connection().upgrade();
        if let Some(connection) = connection {
            connection.forget(memfds);
        }
    }

    fn connection(&self) -> MutexGuard<'_, Weak<Connection>> {
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Counters over all connections.
    pub fn counters(&self) -> DeviceCounters {
        self.shared.tally.read()
    }
}

/// Waits until the front end's first message has *arrived*, without reading it: the moment for
/// the hand-over, since the VMM's main thread then waits for our reply.
pub fn wait_first_message(stream: &UnixStream, timeout: Duration) -> Result<(), DeviceError> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match wait_for(stream.as_raw_fd(), left).map_err(DeviceError::Connection)? {
            None if Instant::now() >= deadline => return Err(DeviceError::Silent(timeout)),
            None => {}
            Some(events) if events.intersects(EventSet::HANG_UP | EventSet::READ_HANG_UP) => {
                let source = io::Error::from(io::ErrorKind::UnexpectedEof);
                return Err(DeviceError::Connection(source));
            }
            Some(_) => return Ok(()),
        }
    }
}

/// Waits until a descriptor is readable or closed; `None` at the time-out or a signal.
fn wait_for(fd: i32, timeout: Duration) -> io::Result<Option<EventSet>> {
    let epoll = Epoll::new()?;
    let interest = EpollEvent::new(EventSet::IN | EventSet::READ_HANG_UP, 0);
    epoll.ctl(ControlOperation::Add, fd, interest)?;
    let mut events = [EpollEvent::default()];
    let timeout_ms = timeout.as_millis().min(i32::MAX as u128) as i32;
    match epoll.wait(timeout_ms, &mut events) {
        Ok(0) => Ok(None),
        Ok(_) => Ok(Some(events[0].event_set())),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
        Err(error) => Err(error),
    }
}

/// How often [`refuse_loop`] looks whether it is to end.
const REFUSE_TICK: Duration = Duration::from_millis(200);

/// Accepts and closes connections until `stop` is set: how a refusal makes QEMU give up instead
/// of hanging `virsh start`. The first refused connection is logged with `reason`, later ones ever
/// more rarely.
pub fn refuse_loop(listener: &UnixListener, reason: &str, stop: &AtomicBool) -> io::Result<()> {
    let mut refused = 0u64;
    while !stop.load(Ordering::Acquire) {
        if wait_for(listener.as_raw_fd(), REFUSE_TICK)?.is_none() {
            continue;
        }
        match listener.accept() {
            Ok((stream, _)) => {
                drop(stream);
                refused += 1;
                if refused.is_power_of_two() {
                    tracing::warn!(refused, reason, "connection refused");
                }
            }
            // Gone again, or a signal.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock
                        | io::ErrorKind::Interrupted
                        | io::ErrorKind::ConnectionAborted
                ) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
