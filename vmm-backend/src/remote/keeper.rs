//! The thread that keeps a session: renews, connects again, leases, and has data connections opened.
//!
//! It alone talks on the control connection. What it believes to hold is compared with what the
//! server says at every greeting, so that an answer lost with a connection costs nothing.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use outram_wire::causes::with_causes;
use outram_wire::server::channel::{ChannelError, EventFd, Received};
use outram_wire::server::clock::BootTime;
use outram_wire::server::{
    DiskWelcome, InstanceId, Purpose, Refusal, ServerMessage, SlabId, Welcome,
};
use outram_wire::verbs::Presence;

use super::connect::{Dialer, Greeted};
use super::exchange::{Asked, Link};
use super::opener::{Opener, Opening};
use super::parting::Parting;
use super::session::{Former, Order, Orders, SessionStatus, Shared};
use super::verbs_pause::VerbsPause;
use super::{RemoteConfig, RemoteError, ServerAddress, SessionEvent};

/// An owner that listens no more gives its last order within so long: it only ends its threads first.
const LAST_ORDER: Duration = Duration::from_secs(30);

/// Where RDMA ends so soon after a greeting it is of no use, whatever its first packets did: within eight seconds a
/// queue pair tells what does not get through.
const SOON: Duration = Duration::from_secs(15);

/// Why the keeper stops serving a link.
pub(super) enum LinkEnd {
    Failed(RemoteError),
    /// Nothing is wrong: it is to be greeted anew, for RDMA.
    Again,
    /// The owner left, or the session was closed.
    Over,
    /// The owner listens no more: it closes the session, or leaves it, or is gone.
    Unheard,
}

pub(super) struct Keeper {
    pub(super) server: usize,
    pub(super) dialer: Dialer,
    pub(super) purpose: Purpose,
    pub(super) roles: usize,
    pub(super) events: Sender<SessionEvent>,
    pub(super) shared: Arc<Shared>,
    pub(super) instance: InstanceId,
    pub(super) lease: Duration,
    pub(super) held: BTreeSet<SlabId>,
    /// Given back, but not yet acknowledged.
    pub(super) releasing: BTreeSet<SlabId>,
    /// Asked back by the server, which promises so much less once it has them.
    pub(super) vacating: BTreeSet<SlabId>,
    /// Asked for by the owner, and not yet answered.
    pub(super) leases_wanted: usize,
    /// Why the server promises no more, which the lease that was to follow is refused for.
    pub(super) no_more: Option<Refusal>,
    /// What was last shown of a promise that is wanted and not given.
    pub(super) promise_refused: Option<String>,
    /// Counts greetings, so that connections of a former one are not delivered.
    pub(super) generation: Arc<AtomicU64>,
    pub(super) openings: Option<Sender<Opening>>,
    /// Roles whose connection is to be tried again, and when.
    pub(super) retry_roles: Vec<(Instant, usize)>,
    pub(super) first: Option<Greeted>,
    /// Where TCP would do.
    pub(super) verbs_pause: VerbsPause,
    /// The device that connections were last opened on.
    pub(super) device: Option<Presence>,
    /// RDMA has failed, and no connection was opened over it since.
    pub(super) lacks_verbs: bool,
}

impl Keeper {
    /// Connects for the first time.
    pub(super) fn start(
        server: usize,
        config: &RemoteConfig,
        purpose: Purpose,
        events: Sender<SessionEvent>,
        waker: EventFd,
    ) -> Result<Self, RemoteError> {
        let dialer = Dialer::new(config, server)?;
        let greeted = dialer.control(&purpose, true)?;
        let purpose = resumption(purpose, &greeted.welcome);
        let welcome = &greeted.welcome;
        let status = SessionStatus {
            connected: true,
            instance: welcome.instance,
            slab_bytes: welcome.slab_bytes,
            // What was set aside before stays: for a disk that is claimed.
            wanted_bytes: welcome.reserved_bytes,
            ..untold(&dialer)
        };
        let mut keeper = Self::new(server, dialer, config, purpose, (events, waker), status);
        keeper.lease = Duration::from_millis(welcome.lease_timeout_ms);
        // A successor takes over what its predecessor leased.
        keeper.held = welcome.held.iter().copied().collect();
        keeper.first = Some(greeted);
        Ok(keeper)
    }

    /// Takes over what a former process leased, whenever the server can be reached.
    pub(super) fn resume_later(
        server: usize,
        config: &RemoteConfig,
        purpose: Purpose,
        former: Former,
        events: Sender<SessionEvent>,
        waker: EventFd,
    ) -> Result<Self, RemoteError> {
        let dialer = Dialer::new(config, server)?;
        let status = SessionStatus {
            slabs: former.held.len() as u64,
            wanted_bytes: former.reserve_bytes,
            ..untold(&dialer)
        };
        let mut keeper = Self::new(server, dialer, config, purpose, (events, waker), status);
        keeper.held = former.held.into_iter().collect();
        Ok(keeper)
    }

    /// One that holds nothing.
    fn new(
        server: usize,
        dialer: Dialer,
        config: &RemoteConfig,
        purpose: Purpose,
        (events, waker): (Sender<SessionEvent>, EventFd),
        status: SessionStatus,
    ) -> Self {
        Self {
            server,
            dialer,
            purpose,
            roles: config.data_connections,
            events,
            instance: status.instance,
            shared: Arc::new(Shared {
                status: status.into(),
                lease_until_ms: AtomicU64::new(0),
                waker,
            }),
            lease: config.timing.renew,
            held: BTreeSet::new(),
            releasing: BTreeSet::new(),
            vacating: BTreeSet::new(),
            leases_wanted: 0,
            no_more: None,
            promise_refused: None,
            generation: Arc::new(AtomicU64::new(0)),
            openings: None,
            retry_roles: Vec::new(),
            first: None,
            verbs_pause: VerbsPause::new(Instant::now()),
            device: None,
            lacks_verbs: false,
        }
    }

    /// Has `bytes` in all set aside. To be called before [`Self::run`].
    pub(super) fn reserve_first(&mut self, bytes: u64) -> Result<(), RemoteError> {
        let Some(greeted) = &mut self.first else {
            return Err(RemoteError::Disconnected(self.dialer.address.clone()));
        };
        self.dialer.reserve_first(greeted, bytes)?;
        let reserved_bytes = greeted.welcome.reserved_bytes;
        self.show(|status| {
            status.reserved_bytes = reserved_bytes;
            status.wanted_bytes = bytes;
        });
        Ok(())
    }

    /// Gives back what was opened just now. To be called in place of [`Self::run`].
    pub(super) fn give_up(mut self) {
        if let Some(greeted) = &mut self.first
            // Those of a former session are not ours to give.
            && greeted.welcome.held.is_empty()
        {
            // Without the server's word the lease runs out.
            let _ = self.dialer.say_goodbye(&mut greeted.channel, 1);
        }
    }

    /// What the server told about the disk that the session is of.
    pub(super) fn disk(&self) -> Option<DiskWelcome> {
        self.first.as_ref().and_then(|first| first.welcome.disk)
    }

    pub(super) fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    pub(super) fn address(&self) -> &ServerAddress {
        &self.dialer.address
    }

    /// Of the thread that keeps it.
    pub(super) fn name(&self) -> String {
        format!("server-{}", self.server)
    }

    /// The longest that an answer may take, with a new connection before it.
    pub(super) fn answer_timeout(&self) -> Duration {
        self.dialer.timing.answer + self.dialer.timing.connect
    }

    /// Serves until the session is closed or left.
    pub(super) fn run(mut self, orders: &Receiver<Order>) {
        // From here on a server out of reach is to be noticed within seconds.
        self.dialer.timing.patience = Duration::ZERO;
        let mut greeted = self.first.take();
        // A session that is resumed connects at once.
        let mut pause = Duration::ZERO;
        loop {
            if let Some(greeted) = greeted.take() {
                let since = Instant::now();
                let end = self.serve(greeted, orders);
                // One that ends each time as soon as it stands is tried ever more seldom, as one that is not there.
                if since.elapsed() >= pause {
                    pause = self.dialer.timing.retry_min;
                }
                match end {
                    LinkEnd::Over => return,
                    LinkEnd::Unheard => {
                        // Which of these it is, its last order tells.
                        self.wait_out(LAST_ORDER, orders);
                        return;
                    }
                    LinkEnd::Failed(error) => self.tell_down(error),
                    LinkEnd::Again => {
                        let server = &self.dialer.address;
                        tracing::info!(%server, "trying RDMA again");
                        pause = Duration::ZERO;
                    }
                }
            }
            self.tell_withdrawn();
            if !self.wait_out(jittered(pause), orders) {
                return;
            }
            let timing = &self.dialer.timing;
            pause = (pause * 2).clamp(timing.retry_min, timing.retry_max);
            let may_use_verbs = self.verbs_pause.is_over(Instant::now());
            match self.dialer.control(&self.purpose, may_use_verbs) {
                Ok(fresh) => {
                    self.shared.status().reconnections += 1;
                    greeted = Some(fresh);
                }
                Err(error) => self.tell_down(error),
            }
        }
    }

    /// Has connections dropped that keep a device from going.
    fn tell_withdrawn(&mut self) {
        if self.device.take_if(|device| device.is_over()).is_some() {
            let server = self.server;
            // Without an owner nobody has connections.
            let _ = self.tell(SessionEvent::Withdrawn { server });
        }
    }

    /// Starts the thread that opens data connections. To be called once, before [`Self::run`].
    pub(super) fn start_opener(&mut self, own: &Orders) -> std::io::Result<()> {
        let opener = Opener {
            server: self.server,
            dialer: self.dialer.clone(),
            generation: self.generation.clone(),
            events: self.events.clone(),
            orders: own.clone(),
        };
        self.openings = Some(opener.start(2 * self.roles + 1)?);
        Ok(())
    }

    /// Serves one control connection until it fails or the session is over.
    fn serve(&mut self, greeted: Greeted, orders: &Receiver<Order>) -> LinkEnd {
        let mut link = match self.greet(greeted) {
            Ok(link) => link,
            Err(end) => return end,
        };
        let end = loop {
            if let Err(end) = self.serve_once(&mut link, orders) {
                break end;
            }
        };
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.retry_roles.clear();
        let in_flight = link.in_flight.into_iter().map(|request| request.asked);
        for asked in in_flight.chain(link.waiting) {
            if let Asked::Reserve(_, Some(answer)) = asked {
                let _ = answer.send(Err(RemoteError::Disconnected(self.dialer.address.clone())));
            }
        }
        end
    }

    fn serve_once(&mut self, link: &mut Link, orders: &Receiver<Order>) -> Result<(), LinkEnd> {
        while let Ok(order) = orders.try_recv() {
            self.obey(link, order)?;
        }
        self.keep_time(link)?;
        let awaited = link.in_flight.front().map(|first| first.answer_by);
        let retries = self.retry_roles.iter().map(|(at, _)| *at);
        let others = awaited.into_iter().chain(link.parting.next_at());
        let deadline = retries.chain(others).fold(link.renew_at, Instant::min);
        let received = link.channel.receive(deadline, Some(&self.shared.waker));
        match received.map_err(|source| self.failed(source))? {
            Received::Message(message) => {
                if !matches!(message, ServerMessage::Reply { .. }) {
                    self.check_overdue(link)?;
                }
                self.take(link, message)
            }
            Received::TimedOut => self.check_overdue(link),
            Received::Woken => Ok(()),
        }
    }

    /// To be called once it is known that the answer has not come: this process may have stood still itself.
    fn check_overdue(&self, link: &Link) -> Result<(), LinkEnd> {
        match link.in_flight.front() {
            Some(first) if first.answer_by <= Instant::now() => {
                Err(self.failed(ChannelError::TimedOut("answer")))
            }
            _ => Ok(()),
        }
    }

    /// Compares what the server keeps for us with what we believe, and tells the owner.
    fn greet(&mut self, greeted: Greeted) -> Result<Link, LinkEnd> {
        let welcome = greeted.welcome;
        let now = Instant::now();
        let mut link = Link {
            channel: greeted.channel,
            next_id: 1,
            in_flight: VecDeque::new(),
            waiting: VecDeque::new(),
            renew_at: now,
            since: now,
            is_closing: false,
            local: greeted.local,
            verbs: greeted.verbs,
            parting: Parting::default(),
        };
        if let Some(verbs) = &link.verbs {
            self.device = Some(verbs.presence());
        }
        self.lease = Duration::from_millis(welcome.lease_timeout_ms);
        self.note_lease(greeted.asked_at);
        let kept: BTreeSet<SlabId> = welcome.held.iter().copied().collect();
        self.releasing.retain(|slab| kept.contains(slab));
        // The server says them anew.
        self.vacating.clear();
        let lost: Vec<SlabId> = self.held.difference(&kept).copied().collect();
        let unknown: Vec<SlabId> = kept
            .iter()
            .filter(|slab| !self.held.contains(slab) && !self.releasing.contains(slab))
            .copied()
            .collect();
        self.held.retain(|slab| kept.contains(slab));
        self.instance = welcome.instance;
        if !lost.is_empty() {
            let server = self.server;
            self.tell(SessionEvent::Lost {
                server,
                slabs: lost,
            })?;
        }
        let transport = link.verbs.as_ref().map_or_else(
            || "TCP".to_owned(),
            |verbs| format!("RDMA ({})", verbs.port().device),
        );
        let is_mended = !(self.lacks_verbs && link.verbs.is_some());
        self.show(|status| {
            status.connected = is_mended;
            if is_mended {
                status.detail = None;
            }
            status.transport = Some(transport);
            status.instance = welcome.instance;
            status.slab_bytes = welcome.slab_bytes;
            status.reserved_bytes = welcome.reserved_bytes;
        });
        self.tell(SessionEvent::Up {
            server: self.server,
            instance: welcome.instance,
            slab_bytes: welcome.slab_bytes,
            held: self.held.iter().copied().collect(),
        })?;
        self.resume(&mut link, unknown)?;
        Ok(link)
    }

    /// Asks again for all that the former connection left open.
    fn resume(&mut self, link: &mut Link, unknown: Vec<SlabId>) -> Result<(), LinkEnd> {
        // The answer to these leases was lost with the former connection.
        let found = unknown.len().min(self.leases_wanted);
        let still_wanted = self.leases_wanted - found;
        for (index, slab) in unknown.into_iter().enumerate() {
            if index < found {
                self.take_lease(link, slab)?;
            } else {
                self.releasing.insert(slab);
            }
        }
        let wanted_bytes = self.shared.status().wanted_bytes;
        self.ask(link, Asked::Reserve(wanted_bytes, None))?;
        for slab in self.releasing.clone() {
            self.ask(link, Asked::Release(slab))?;
        }
        for _ in 0..still_wanted {
            self.ask(link, Asked::Lease)?;
        }
        if let Some(verbs) = &mut link.verbs {
            verbs
                .unnamed
                .extend(self.held.iter().map(|slab| (*slab, false)));
            return self.advance_verbs(link);
        }
        for role in 0..self.roles {
            self.ask_role(link, role)?;
        }
        Ok(())
    }

    fn obey(&mut self, link: &mut Link, order: Order) -> Result<(), LinkEnd> {
        match order {
            Order::Lease => {
                self.leases_wanted += 1;
                link.parting.want_lease();
                self.ask_leases(link)
            }
            Order::Release(slab) => {
                self.note_release(slab);
                match &link.verbs {
                    Some(_) => link.parting.add(Instant::now(), slab),
                    None => self.ask(link, Asked::Release(slab))?,
                }
                Ok(())
            }
            Order::Reserve(bytes, answer) => self.ask(link, Asked::Reserve(bytes, Some(answer))),
            Order::DataLost(generation) if self.is_current(generation) => {
                let reason = "one is dead: all are made anew, behind the server's fence";
                let source = std::io::Error::new(std::io::ErrorKind::ConnectionReset, reason);
                let error = self.dialer.data_error(source);
                // A server that dies ends the control connection long before a queue pair notices.
                Err(match link.verbs.is_some() && link.since.elapsed() < SOON {
                    true => self.lose_verbs(link.since, error),
                    false => LinkEnd::Failed(error),
                })
            }
            Order::DataFailed(role, generation, error) if self.is_current(generation) => {
                let words = with_causes(&error);
                // The same goes on for as long as it is tried again.
                if self.shared.status().detail.as_ref() != Some(&words) {
                    tracing::warn!(role, "{words}");
                }
                if link.verbs.is_some() {
                    return Err(self.lose_verbs(link.since, error));
                }
                self.show(|status| status.detail = Some(words));
                self.retry_role(role);
                Ok(())
            }
            Order::DataOpened(generation) if self.is_current(generation) => {
                if std::mem::take(&mut self.lacks_verbs) {
                    self.show(|status| {
                        status.connected = true;
                        status.detail = None;
                    });
                }
                Ok(())
            }
            // All have been opened anew since.
            Order::DataLost(_) | Order::DataOpened(_) | Order::DataFailed(..) => Ok(()),
            Order::Close(answer) => {
                let _ = answer.send(self.dialer.say_goodbye(&mut link.channel, link.next_id));
                Err(LinkEnd::Over)
            }
            Order::Leave => Err(LinkEnd::Over),
        }
    }

    /// Asks for the leases that there is room for. Should the link be lost, all that are wanted are asked for anew.
    fn ask_leases(&mut self, link: &mut Link) -> Result<(), LinkEnd> {
        let (promised, slab) = self.promise(link);
        let taken = self.taken_slabs(link);
        for _ in 0..link.parting.take_leases(taken, promised / slab.max(1)) {
            self.reserve_more(link)?;
            self.ask(link, Asked::Lease)?;
        }
        Ok(())
    }

    /// Bytes that the server has promised, or is about to, and those of a slab.
    fn promise(&self, link: &Link) -> (u64, u64) {
        let status = self.shared.status();
        let promised = link.promise_under_way();
        (promised.unwrap_or(status.reserved_bytes), status.slab_bytes)
    }

    /// Slabs that are held or asked for, without those that are given up.
    fn taken_slabs(&self, link: &Link) -> u64 {
        let asked = self.leases_wanted.saturating_sub(link.parting.leases());
        (self.held.len() + asked) as u64
    }

    /// Asks for more than was promised, or is about to be, where what is leased goes beyond: another server may
    /// have taken its promise back.
    fn reserve_more(&mut self, link: &mut Link) -> Result<(), LinkEnd> {
        let (promised, slab) = self.promise(link);
        let leased = self.taken_slabs(link) * slab;
        match leased > promised {
            true => self.ask(link, Asked::ReserveMore(leased)),
            false => Ok(()),
        }
    }

    /// What the server is to promise, where it promises less, having wanted some back, or more than what is
    /// leased needs.
    fn other_promise(&self) -> Option<u64> {
        let status = self.shared.status();
        let (reserved, wanted) = (status.reserved_bytes, status.wanted_bytes);
        // Rounded up as the server does. What is not acknowledged yet may still be in use there.
        let leased = (self.held.len() + self.releasing.len()) as u64;
        let leased = leased * status.slab_bytes;
        let needed = wanted
            .next_multiple_of(status.slab_bytes.max(1))
            .max(leased);
        let is_more = reserved > needed && self.leases_wanted == 0;
        (reserved < wanted || is_more).then_some(wanted)
    }

    fn is_current(&self, generation: u64) -> bool {
        self.generation.load(Ordering::Acquire) == generation
    }

    /// Does what is due: renewals, roles to be tried again.
    fn keep_time(&mut self, link: &mut Link) -> Result<(), LinkEnd> {
        let now = Instant::now();
        if link.renew_at <= now {
            self.look_at_device(link)?;
            link.renew_at = now + self.dialer.timing.renew.min(self.lease / 3);
            if link.promise_under_way().is_some() {
                // Another promise would take the place of that one.
                self.ask(link, Asked::Renew)?;
            } else if let Some(bytes) = self.other_promise() {
                self.ask(link, Asked::Reserve(bytes, None))?;
            } else {
                // It has been given, or is not wanted any more.
                if let Some(shown) = self.promise_refused.take() {
                    self.show(|status| {
                        status.detail.take_if(|detail| *detail == shown);
                    });
                }
                self.ask(link, Asked::Renew)?;
            }
        }
        self.release_parting(link, now)?;
        let (due, later) = self.retry_roles.drain(..).partition(|(at, _)| *at <= now);
        self.retry_roles = later;
        let due: Vec<(Instant, usize)> = due;
        for (_, role) in due {
            self.ask_role(link, role)?;
        }
        Ok(())
    }

    /// Gives slabs back that nothing is read from any more, and asks for what was to have their room.
    fn release_parting(&mut self, link: &mut Link, now: Instant) -> Result<(), LinkEnd> {
        while let Some(slab) = link.parting.take_due(now) {
            if let Some(verbs) = &link.verbs {
                verbs.keys.remove(slab);
            }
            self.ask(link, Asked::Release(slab))?;
        }
        self.ask_leases(link)
    }

    /// Waits before connecting again, and takes orders meanwhile; false if the session is over.
    fn wait_out(&mut self, pause: Duration, orders: &Receiver<Order>) -> bool {
        let until = Instant::now() + pause;
        loop {
            match orders.recv_deadline(until) {
                Ok(Order::Lease) => self.leases_wanted += 1,
                Ok(Order::Release(slab)) => self.note_release(slab),
                Ok(Order::Reserve(_, answer)) => {
                    let address = self.dialer.address.clone();
                    let _ = answer.send(Err(RemoteError::Disconnected(address)));
                }
                // Every role gets a connection after the next greeting anyway.
                Ok(Order::DataLost(_) | Order::DataOpened(_) | Order::DataFailed(..)) => {}
                Ok(Order::Close(answer)) => {
                    let greeted = self.dialer.greet(&self.purpose);
                    let ended = greeted
                        .and_then(|mut greeted| self.dialer.say_goodbye(&mut greeted.channel, 1));
                    let _ = answer.send(ended);
                    return false;
                }
                Ok(Order::Leave) | Err(RecvTimeoutError::Disconnected) => return false,
                Err(RecvTimeoutError::Timeout) => return true,
            }
        }
    }

    pub(super) fn note_lease(&self, asked_at: BootTime) {
        let until = asked_at.after(self.lease).as_millis();
        let lease = &self.shared.lease_until_ms;
        lease.store(until, Ordering::Release);
    }

    pub(super) fn tell(&self, event: SessionEvent) -> Result<(), LinkEnd> {
        // Without an owner there is no session; the lease keeps the slabs for a successor.
        self.events.send(event).map_err(|_| LinkEnd::Unheard)
    }

    fn tell_down(&self, error: RemoteError) {
        let words = with_causes(&error);
        let changed = self.shared.status().detail.as_ref() != Some(&words);
        if changed {
            tracing::warn!(server = %self.dialer.address, "{words}");
        }
        self.show(|status| {
            status.connected = false;
            status.detail = Some(words);
        });
        let _ = self.tell(SessionEvent::Down {
            server: self.server,
            error: Arc::new(error),
        });
    }

    pub(super) fn show(&self, change: impl FnOnce(&mut SessionStatus)) {
        let mut status = self.shared.status();
        change(&mut status);
        status.slabs = self.held.len() as u64;
    }

    pub(super) fn failed(&self, source: ChannelError) -> LinkEnd {
        LinkEnd::Failed(self.dialer.control_error(source))
    }

    pub(super) fn broken(&self, what: String) -> LinkEnd {
        LinkEnd::Failed(self.dialer.protocol(what))
    }
}

/// The status of a session of which the server has told nothing yet.
fn untold(dialer: &Dialer) -> SessionStatus {
    SessionStatus {
        address: dialer.address.clone(),
        connected: false,
        detail: None,
        transport: None,
        // Told by the first greeting.
        instance: InstanceId(uuid::Uuid::nil()),
        slab_bytes: 0,
        slabs: 0,
        reserved_bytes: 0,
        wanted_bytes: 0,
        reconnections: 0,
    }
}

/// What the next greetings are for: once opened, a disk is only resumed, so that whoever claimed it
/// meanwhile keeps it.
fn resumption(purpose: Purpose, welcome: &Welcome) -> Purpose {
    match (purpose, welcome.disk) {
        (Purpose::Disk { disk, secret, .. }, Some(granted)) => Purpose::Disk {
            disk,
            secret,
            opening: outram_wire::server::Opening::Resume {
                claim: granted.claim,
            },
        },
        (purpose, _) => purpose,
    }
}

/// Between half of `pause` and all of it, so that many clients do not come back at once.
pub(super) fn jittered(pause: Duration) -> Duration {
    let mut random = [0; 2];
    // Without random numbers all clients wait the same time: no more than an inconvenience.
    let _ = getrandom::fill(&mut random);
    let share = f64::from(u16::from_le_bytes(random)) / f64::from(u16::MAX);
    pause.mul_f64(0.5 + share / 2.0)
}
