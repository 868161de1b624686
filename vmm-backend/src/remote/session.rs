//! The handle of a session: orders to the thread that keeps it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use outram_wire::server::channel::{EventFd, new_waker};
use outram_wire::server::clock::BootTime;
use outram_wire::server::{DiskWelcome, InstanceId, Purpose, SlabId};

use super::keeper::Keeper;
use super::{DiskOpening, RemoteConfig, RemoteError, ServerAddress, SessionEvent};

/// A session as its owner may show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionStatus {
    /// The server.
    pub address: ServerAddress,
    /// Whether the control connection stands and, where RDMA had failed, pages go over it again.
    pub connected: bool,
    /// The last error, in words, while something is wrong.
    pub detail: Option<String>,
    /// What pages go over, in words, once that is settled.
    pub transport: Option<String>,
    /// The server's life that was last seen.
    pub instance: InstanceId,
    /// Bytes of its slabs.
    pub slab_bytes: u64,
    /// Slabs held.
    pub slabs: u64,
    /// Bytes that it has set aside for us.
    pub reserved_bytes: u64,
    /// Times the control connection was made again.
    pub reconnections: u64,
}

/// What a session had in a process that died.
#[derive(Clone, Debug)]
pub struct Former {
    /// Slabs that something of ours lies in.
    pub held: Vec<SlabId>,
    /// What is to be set aside in all.
    pub reserve_bytes: u64,
}

/// What a server has promised to lend, and has lent of it.
#[derive(Clone, Copy, Debug)]
pub struct Promise {
    /// Bytes promised.
    pub bytes: u64,
    /// Bytes of a slab; 0 before the server was first greeted.
    pub slab_bytes: u64,
    /// Slabs lent.
    pub slabs: u64,
}

/// What the keeper is told to do.
pub(super) enum Order {
    Lease,
    Release(SlabId),
    Reserve(u64, Sender<Result<(), RemoteError>>),
    /// A data connection of this greeting is dead.
    DataLost(u64),
    /// A connection over RDMA was opened after this greeting.
    DataOpened(u64),
    /// The opener could not open the role's connection after this greeting.
    DataFailed(usize, u64, RemoteError),
    Close(Sender<Result<(), RemoteError>>),
    Leave,
}

/// What keeper and handle both see.
pub(super) struct Shared {
    pub(super) status: Mutex<SessionStatus>,
    /// The lease is good until then, in milliseconds of [`BootTime`].
    pub(super) lease_until_ms: AtomicU64,
    pub(super) waker: EventFd,
}

impl Shared {
    pub(super) fn status(&self) -> MutexGuard<'_, SessionStatus> {
        // Nothing under the lock can panic half-way through a change.
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Orders for the keeper, which is woken for each.
#[derive(Clone)]
pub(super) struct Orders {
    pub(super) sender: Sender<Order>,
    pub(super) shared: Arc<Shared>,
}

impl Orders {
    /// Hands an order over; false if the keeper has ended.
    pub(super) fn give(&self, order: Order) -> bool {
        let given = self.sender.send(order).is_ok();
        // A counter at its top means that the keeper has wake-ups enough.
        let _ = self.shared.waker.write(1);
        given
    }
}

/// A session with one server. Dropping it leaves the server without a word: the slabs stay for as
/// long as the lease, for whoever comes with the secret. [`Session::close`] gives everything back.
pub struct Session {
    orders: Orders,
    address: ServerAddress,
    answer_timeout: Duration,
    disk: Option<DiskWelcome>,
}

impl Session {
    /// Connects to server number `server` of `config` and reserves `reserve_bytes` in all. Blocks
    /// for that, so that what is wrong from the start is told at the start; from then on a thread of
    /// its own keeps the session, and `events` (which must be received from, or be unbounded) tells
    /// what happens. The first is an `Up`, then come the data connections.
    pub fn start(
        server: usize,
        config: &RemoteConfig,
        reserve_bytes: u64,
        events: Sender<SessionEvent>,
    ) -> Result<Session, RemoteError> {
        Self::open(server, config, of_guest(config), reserve_bytes, events)
    }

    /// Takes over the session of a process that died, which had the same secret. Does not wait for the
    /// server, nor fails where it is out of reach: that is told as it is of any session, and so are
    /// slabs that it has no longer.
    pub fn resume(
        server: usize,
        config: &RemoteConfig,
        former: Former,
        events: Sender<SessionEvent>,
    ) -> Result<Session, RemoteError> {
        let (purpose, waker) = (of_guest(config), waker()?);
        let keeper = Keeper::resume_later(server, config, purpose, former, events, waker)?;
        Self::keep(server, config, keeper)
    }

    /// Like [`Session::start`], for a far-memory disk. A session that another claimant has taken the
    /// disk from stays down: each `Down` says [`Refusal::DiskClaimed`].
    ///
    /// [`Refusal::DiskClaimed`]: outram_wire::server::Refusal::DiskClaimed
    pub fn start_disk(
        server: usize,
        config: &RemoteConfig,
        disk: DiskOpening,
        events: Sender<SessionEvent>,
    ) -> Result<Session, RemoteError> {
        let purpose = Purpose::Disk {
            disk: disk.disk,
            secret: disk.secret,
            opening: disk.opening,
        };
        // What it needs depends on the server's slabs, which the greeting tells.
        Self::open(server, config, purpose, 0, events)
    }

    fn open(
        server: usize,
        config: &RemoteConfig,
        purpose: Purpose,
        reserve_bytes: u64,
        events: Sender<SessionEvent>,
    ) -> Result<Session, RemoteError> {
        let waker = waker()?;
        let keeper = Keeper::start(server, config, purpose, reserve_bytes, events, waker)?;
        Self::keep(server, config, keeper)
    }

    fn keep(
        server: usize,
        config: &RemoteConfig,
        mut keeper: Keeper,
    ) -> Result<Session, RemoteError> {
        // Orders are few: the pager bounds its requests by what it may lease.
        let (sender, receiver): (Sender<Order>, Receiver<Order>) = unbounded();
        let disk = keeper.disk();
        let orders = Orders {
            sender,
            shared: keeper.shared(),
        };
        let address = keeper.address().clone();
        // Both threads or none: a session without them would stay down in silence.
        let keeping = thread::Builder::new().name(format!("server-{server}"));
        keeper
            .start_opener(&orders)
            .and_then(|()| keeping.spawn(move || keeper.run(&receiver)))
            .map_err(|source| RemoteError::System {
                what: "a thread",
                source,
            })?;
        Ok(Session {
            orders,
            address,
            answer_timeout: config.timing.answer + config.timing.connect,
            disk,
        })
    }

    /// What the server told about the disk when it was opened.
    pub fn disk(&self) -> Option<DiskWelcome> {
        self.disk
    }

    /// Asks for one more slab, and for the promise of it where the server has promised less: answered by
    /// `Leased` or `LeaseRefused`, also after a reconnection.
    pub fn request_slab(&self) {
        self.orders.give(Order::Lease);
    }

    /// Gives a slab back, at once or after the next reconnection. It must not be used any more.
    pub fn release_slab(&self, slab: SlabId) {
        self.orders.give(Order::Release(slab));
    }

    /// Has `bytes` in all set aside. Blocks until the server has answered; at once an error while
    /// it is out of reach.
    pub fn reserve(&self, bytes: u64) -> Result<(), RemoteError> {
        self.await_answer(self.answer_timeout, |answer| Order::Reserve(bytes, answer))
    }

    /// Says that a data connection is dead; `generation` is its [`DataConn::generation`]. All
    /// connections are made anew, unless they were since: what the dead one had sent may still lie
    /// unread at the server, and only the fence of a new greeting keeps such a write from landing
    /// after one of the next connection.
    ///
    /// [`DataConn::generation`]: super::DataConn::generation
    pub fn reconnect_data(&self, generation: u64) {
        self.orders.give(Order::DataLost(generation));
    }

    /// How the session is.
    pub fn status(&self) -> SessionStatus {
        self.orders.shared.status().clone()
    }

    /// What the server has promised to lend.
    pub fn promise(&self) -> Promise {
        let status = self.orders.shared.status();
        Promise {
            bytes: status.reserved_bytes,
            slab_bytes: status.slab_bytes,
            slabs: status.slabs,
        }
    }

    /// Whether the server certainly still keeps our slabs, unless it has died: by our own clock,
    /// from the sending of the last renewal that it acknowledged.
    pub fn lease_valid(&self) -> bool {
        BootTime::now().as_millis() < self.orders.shared.lease_until_ms.load(Ordering::Acquire)
    }

    /// Gives everything back and ends the session: waits for the server's word, at most `timeout`.
    /// Without it the server takes everything back when the lease ends.
    pub fn close(&self, timeout: Duration) -> Result<(), RemoteError> {
        self.await_answer(timeout, Order::Close)
    }

    fn await_answer(
        &self,
        timeout: Duration,
        order: impl FnOnce(Sender<Result<(), RemoteError>>) -> Order,
    ) -> Result<(), RemoteError> {
        let (answer, answered) = bounded(1);
        let closed = || Err(RemoteError::SessionClosed(self.address.clone()));
        if !self.orders.give(order(answer)) {
            return closed();
        }
        match answered.recv_timeout(timeout) {
            Ok(outcome) => outcome,
            Err(crossbeam_channel::RecvTimeoutError::Timeout) => {
                Err(RemoteError::TimedOut(self.address.clone()))
            }
            Err(crossbeam_channel::RecvTimeoutError::Disconnected) => closed(),
        }
    }
}

/// What a guest's session is opened or resumed for.
fn of_guest(config: &RemoteConfig) -> Purpose {
    Purpose::Guest {
        vm: config.vm,
        secret: config.secret,
        arrives: config.arrives,
    }
}

fn waker() -> Result<EventFd, RemoteError> {
    new_waker().map_err(|source| RemoteError::System {
        what: "an eventfd",
        source,
    })
}

impl Drop for Session {
    fn drop(&mut self) {
        self.orders.give(Order::Leave);
    }
}
