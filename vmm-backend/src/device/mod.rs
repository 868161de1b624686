//! The vhost-user-blk device: the channel by which libvirt attaches a backend to its guest.
//!
//! By default a read-only disk of 1 MiB whose first sector says what it is. The device is a
//! guest's (hostile) input: whatever a driver writes into its rings is an error of that request,
//! or breaks that queue, never a panic and never an access to memory that is not pinned.
//!
//! The module knows nothing of paging: [`GuestMemory`] is what it asks of the pager. It talks
//! vhost-user to a front end that has been handed over already. Lock order: the server's state,
//! then the memory table; a pin is never taken while a lock of the pager is held, and never while
//! another pin of the same request is held.

mod memory;

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use outram_wire::units::VmId;

pub use memory::{GuestMemory, HostRange, PinError, Pinned, TableRegion};

/// Smallest and default capacity of the disk, in bytes.
pub const DEFAULT_CAPACITY_BYTES: u64 = 1 << 20;

/// What the device is.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// The guest: its first eight digits are the disk's serial.
    pub vm: VmId,
    /// Capacity in bytes: a multiple of 512, at least 512.
    pub capacity_bytes: u64,
    /// Most queues a front end may use. QEMU takes one a vCPU unless told otherwise.
    pub max_queues: u16,
}

impl DeviceConfig {
    /// The default disk of a guest.
    pub fn new(vm: VmId) -> Self {
        Self {
            vm,
            capacity_bytes: DEFAULT_CAPACITY_BYTES,
            max_queues: 256,
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
    config: DeviceConfig,
    memory: Arc<dyn GuestMemory>,
}

impl Device {
    /// A device whose accesses to guest RAM go through `memory`.
    pub fn new(config: DeviceConfig, memory: Arc<dyn GuestMemory>) -> Result<Self, DeviceError> {
        Ok(Self { config, memory })
    }

    /// Serves one front end until it disconnects. Rings are released and their threads ended when
    /// this returns. A `shutdown` of a clone of `stream` ends it from outside.
    pub fn serve(&self, stream: UnixStream) -> Result<Served, DeviceError> {
        let _ = (&self.config, &self.memory, stream);
        Err(DeviceError::Protocol("not yet served".into()))
    }

    /// Counters over all connections.
    pub fn counters(&self) -> DeviceCounters {
        DeviceCounters::default()
    }
}

/// Waits until the front end's first message has *arrived*, without reading it: the moment for
/// the hand-over, since the VMM's main thread then waits for our reply.
pub fn wait_first_message(stream: &UnixStream, timeout: Duration) -> Result<(), DeviceError> {
    let _ = stream;
    Err(DeviceError::Silent(timeout))
}

/// Accepts and closes connections until `stop` is set: how a refusal makes QEMU give up instead
/// of hanging `virsh start`. Each refused connection is logged with `reason`.
pub fn refuse_loop(listener: &UnixListener, reason: &str, stop: &AtomicBool) -> io::Result<()> {
    let _ = (listener, reason, stop);
    Ok(())
}
