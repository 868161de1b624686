//! The handle of a session: orders to the thread that keeps it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use outram_wire::server::channel::{EventFd, new_waker};
use outram_wire::server::clock::BootTime;
use outram_wire::server::{DiskWelcome, InstanceId, Purpose, SlabId};

use super::keeper::Keeper;
use super::{DiskOpening, RemoteConfig, RemoteError, ServerAddress, SessionEvent};
use crate::whole;

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
    /// Bytes that it is to set aside: it is asked for them again where it has less.
    pub wanted_bytes: u64,
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
    /// Bytes that it was last asked to promise, and did: it may have taken some back since.
    pub wanted: u64,
    /// Whether the server can be reached: where not, nobody knows what it has by now.
    pub is_connected: bool,
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

    fn promise(&self) -> Promise {
        let status = self.status();
        Promise {
            bytes: status.reserved_bytes,
            wanted: status.wanted_bytes,
            is_connected: status.connected,
            slab_bytes: status.slab_bytes,
            slabs: status.slabs,
        }
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

/// A session whose server was greeted, and which nothing keeps yet. What it is asked for now does not hang on
/// data connections, of which it has none. Dropping it leaves the server without a word.
pub struct NewSession {
    keeper: Keeper,
}

impl NewSession {
    /// Connects to server number `server` of `config`, with nothing reserved. Blocks for that, so that
    /// what is wrong from the start is told at the start.
    pub fn greet(
        server: usize,
        config: &RemoteConfig,
        events: Sender<SessionEvent>,
    ) -> Result<Self, RemoteError> {
        Self::open(server, config, of_guest(config), events)
    }

    fn open(
        server: usize,
        config: &RemoteConfig,
        purpose: Purpose,
        events: Sender<SessionEvent>,
    ) -> Result<Self, RemoteError> {
        let keeper = Keeper::start(server, config, purpose, events, waker()?)?;
        Ok(Self { keeper })
    }

    /// Has `bytes` in all set aside. Blocks until the server has answered.
    pub fn reserve(&mut self, bytes: u64) -> Result<(), RemoteError> {
        self.keeper.reserve_first(bytes)
    }

    /// See [`Session::want`].
    pub fn want(&mut self, bytes: u64) {
        self.keeper.shared().status().wanted_bytes = bytes;
    }

    /// What the server has promised to lend.
    pub fn promise(&self) -> Promise {
        self.keeper.shared().promise()
    }

    /// Which run of the server it is with.
    pub fn instance(&self) -> InstanceId {
        self.keeper.shared().status().instance
    }

    /// Which server it is with.
    pub fn address(&self) -> &ServerAddress {
        self.keeper.address()
    }

    /// Has a thread of its own keep the session; `events`, which it was opened with (and which must be received
    /// from, or be unbounded), tells what happens. The first is an `Up`, then come the data connections.
    pub fn keep(self) -> Result<Session, RemoteError> {
        Session::keep(self.keeper)
    }

    /// Gives back what was opened just now; where the server does not answer, it takes that when the lease ends.
    pub fn give_up(self) {
        self.keeper.give_up();
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
        Self::keep(keeper)
    }

    /// Like [`NewSession::greet`] and [`NewSession::keep`], for a far-memory disk. A session that another
    /// claimant has taken the disk from stays down: each `Down` says [`Refusal::DiskClaimed`].
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
        NewSession::open(server, config, purpose, events)?.keep()
    }

    fn keep(mut keeper: Keeper) -> Result<Session, RemoteError> {
        // Orders are few: the pager bounds its requests by what it may lease.
        let (sender, receiver): (Sender<Order>, Receiver<Order>) = unbounded();
        let disk = keeper.disk();
        let orders = Orders {
            sender,
            shared: keeper.shared(),
        };
        let address = keeper.address().clone();
        let answer_timeout = keeper.answer_timeout();
        // Both threads or none: a session without them would stay down in silence.
        keeper
            .start_opener(&orders)
            .and_then(|()| whole::spawn(keeper.name(), move || keeper.run(&receiver)))
            .map_err(|source| RemoteError::System {
                what: "a thread",
                source,
            })?;
        Ok(Session {
            orders,
            address,
            answer_timeout,
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

    /// Wants `bytes` set aside: the server is told with the next renewal where it has less set aside, or more
    /// than that and what is leased.
    pub fn want(&self, bytes: u64) {
        self.orders.shared.status().wanted_bytes = bytes;
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
        self.orders.shared.promise()
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
