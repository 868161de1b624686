//! The thread that keeps a session: renews, connects again, leases, and has data connections opened.
//!
//! It alone talks on the control connection. What it believes to hold is compared with what the
//! server says at every greeting, so that an answer lost with a connection costs nothing.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError, bounded};
use outram_wire::server::channel::{Channel, ChannelError, EventFd, Received};
use outram_wire::server::clock::BootTime;
use outram_wire::server::{
    ClientMessage, InstanceId, Purpose, Refusal, Reply, Request, ServerMessage, SlabId, Token,
};

use super::connect::{Dialer, Greeted};
use super::session::{Order, Orders, SessionStatus, Shared};
use super::{RemoteConfig, RemoteError, ServerAddress, SessionEvent};

/// What an answer is awaited for.
enum Asked {
    Renew,
    Reserve(u64, Option<Sender<Result<(), RemoteError>>>),
    Lease,
    Release(SlabId),
    DataToken(usize),
}

/// A request on its way.
struct InFlight {
    id: u64,
    asked: Asked,
    asked_at: BootTime,
    answer_by: Instant,
}

/// A control connection in use.
struct Link {
    channel: Channel,
    next_id: u64,
    in_flight: VecDeque<InFlight>,
    renew_at: Instant,
}

/// A token to be turned into a connection.
struct Opening {
    role: usize,
    token: Token,
    generation: u64,
}

/// Why the keeper stops serving a link.
enum LinkEnd {
    Failed(RemoteError),
    /// The owner is gone, or the session was closed.
    Over,
}

pub(super) struct Keeper {
    server: usize,
    dialer: Dialer,
    purpose: Purpose,
    roles: usize,
    events: Sender<SessionEvent>,
    shared: Arc<Shared>,
    instance: InstanceId,
    lease: Duration,
    held: BTreeSet<SlabId>,
    /// Given back, but not yet acknowledged.
    releasing: BTreeSet<SlabId>,
    /// Asked for by the owner, and not yet answered.
    leases_wanted: usize,
    reserve_bytes: u64,
    /// Counts greetings, so that connections of a former one are not delivered.
    generation: Arc<AtomicU64>,
    openings: Option<Sender<Opening>>,
    /// Roles whose connection is to be tried again, and when.
    retry_roles: Vec<(Instant, usize)>,
    first: Option<Greeted>,
}

impl Keeper {
    /// Connects for the first time, and reserves.
    pub(super) fn start(
        server: usize,
        config: &RemoteConfig,
        reserve_bytes: u64,
        events: Sender<SessionEvent>,
        waker: EventFd,
    ) -> Result<Self, RemoteError> {
        let dialer = Dialer::new(config, server)?;
        let purpose = Purpose::Guest {
            vm: config.vm,
            secret: config.secret,
        };
        let mut greeted = dialer.control(&purpose)?;
        reserve_first(&dialer, &mut greeted, reserve_bytes)?;
        let welcome = &greeted.welcome;
        let status = SessionStatus {
            address: dialer.address.clone(),
            connected: false,
            detail: None,
            instance: welcome.instance,
            slab_bytes: welcome.slab_bytes,
            slabs: 0,
            reserved_bytes: 0,
            reconnections: 0,
        };
        Ok(Self {
            server,
            purpose,
            roles: config.data_connections,
            events,
            shared: Arc::new(Shared {
                status: status.into(),
                lease_until_ms: AtomicU64::new(0),
                waker,
            }),
            instance: welcome.instance,
            lease: Duration::from_millis(welcome.lease_timeout_ms),
            // A successor takes over what its predecessor leased.
            held: welcome.held.iter().copied().collect(),
            releasing: BTreeSet::new(),
            leases_wanted: 0,
            reserve_bytes,
            generation: Arc::new(AtomicU64::new(0)),
            openings: None,
            retry_roles: Vec::new(),
            first: Some(greeted),
            dialer,
        })
    }

    pub(super) fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    pub(super) fn address(&self) -> &ServerAddress {
        &self.dialer.address
    }

    /// Serves until the session is closed or left.
    pub(super) fn run(mut self, orders: &Receiver<Order>, own: &Orders) {
        if let Err(source) = self.start_opener(own) {
            let error = RemoteError::System {
                what: "a thread",
                source,
            };
            self.tell_down(error);
            return;
        }
        let mut greeted = self.first.take();
        let mut pause = self.dialer.timing.retry_min;
        loop {
            if let Some(greeted) = greeted.take() {
                pause = self.dialer.timing.retry_min;
                match self.serve(greeted, orders) {
                    LinkEnd::Over => return,
                    LinkEnd::Failed(error) => self.tell_down(error),
                }
            }
            if !self.wait_out(jittered(pause), orders) {
                return;
            }
            pause = (pause * 2).min(self.dialer.timing.retry_max);
            match self.dialer.control(&self.purpose) {
                Ok(fresh) => {
                    self.shared.status().reconnections += 1;
                    greeted = Some(fresh);
                }
                Err(error) => self.tell_down(error),
            }
        }
    }

    /// Opens data connections one after the other, beside the control connection.
    fn start_opener(&mut self, own: &Orders) -> std::io::Result<()> {
        let (sender, openings) = bounded::<Opening>(2 * self.roles + 1);
        let (dialer, own, server) = (self.dialer.clone(), own.clone(), self.server);
        let (generation, events) = (self.generation.clone(), self.events.clone());
        thread::Builder::new()
            .name(format!("server-{server}-open"))
            .spawn(move || {
                for Opening {
                    role,
                    token,
                    generation: wanted,
                } in openings
                {
                    if generation.load(Ordering::Acquire) != wanted {
                        continue;
                    }
                    let told = match dialer.data(&token) {
                        Ok(conn) => events
                            .send(SessionEvent::DataConnection { server, role, conn })
                            .is_ok(),
                        Err(error) => own.give(Order::DataFailed(role, error)),
                    };
                    if !told {
                        return;
                    }
                }
            })?;
        self.openings = Some(sender);
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
        for in_flight in link.in_flight {
            if let Asked::Reserve(_, Some(answer)) = in_flight.asked {
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
        let deadline = retries.chain(awaited).fold(link.renew_at, Instant::min);
        let received = link.channel.receive(deadline, Some(&self.shared.waker));
        match received.map_err(|source| self.failed(source))? {
            Received::Message(message) => self.take(link, message),
            Received::TimedOut | Received::Woken => Ok(()),
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
            renew_at: now,
        };
        self.lease = Duration::from_millis(welcome.lease_timeout_ms);
        self.note_lease(greeted.asked_at);
        let kept: BTreeSet<SlabId> = welcome.held.iter().copied().collect();
        self.releasing.retain(|slab| kept.contains(slab));
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
        self.show(|status| {
            status.connected = true;
            status.detail = None;
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
        for slab in unknown {
            if self.leases_wanted > 0 {
                self.take_lease(slab)?;
            } else {
                self.releasing.insert(slab);
            }
        }
        self.ask(link, Asked::Reserve(self.reserve_bytes, None))?;
        for slab in self.releasing.clone() {
            self.ask(link, Asked::Release(slab))?;
        }
        for _ in 0..self.leases_wanted {
            self.ask(link, Asked::Lease)?;
        }
        for role in 0..self.roles {
            self.ask(link, Asked::DataToken(role))?;
        }
        Ok(())
    }

    fn obey(&mut self, link: &mut Link, order: Order) -> Result<(), LinkEnd> {
        match order {
            Order::Lease => {
                self.leases_wanted += 1;
                self.ask(link, Asked::Lease)
            }
            Order::Release(slab) => {
                self.note_release(slab);
                self.ask(link, Asked::Release(slab))
            }
            Order::Reserve(bytes, answer) => self.ask(link, Asked::Reserve(bytes, Some(answer))),
            Order::OpenData(role) => {
                self.retry_roles.retain(|(_, waiting)| *waiting != role);
                self.ask(link, Asked::DataToken(role))
            }
            Order::DataFailed(role, error) => {
                tracing::warn!(role, "{}", Chain(&error));
                self.show(|status| status.detail = Some(Chain(&error).to_string()));
                self.retry_role(role);
                Ok(())
            }
            Order::Close(answer) => {
                let _ = answer.send(self.say_goodbye(&mut link.channel, link.next_id));
                Err(LinkEnd::Over)
            }
            Order::Leave => Err(LinkEnd::Over),
        }
    }

    /// Does what is due: renewals, roles to be tried again, answers overdue.
    fn keep_time(&mut self, link: &mut Link) -> Result<(), LinkEnd> {
        let now = Instant::now();
        if let Some(first) = link.in_flight.front()
            && first.answer_by <= now
        {
            return Err(self.failed(ChannelError::TimedOut("answer")));
        }
        if link.renew_at <= now {
            link.renew_at = now + self.dialer.timing.renew.min(self.lease / 3);
            if self.shared.status().reserved_bytes < self.reserve_bytes {
                self.ask(link, Asked::Reserve(self.reserve_bytes, None))?;
            } else {
                self.ask(link, Asked::Renew)?;
            }
        }
        let (due, later) = self.retry_roles.drain(..).partition(|(at, _)| *at <= now);
        self.retry_roles = later;
        let due: Vec<(Instant, usize)> = due;
        for (_, role) in due {
            self.ask(link, Asked::DataToken(role))?;
        }
        Ok(())
    }

    fn ask(&mut self, link: &mut Link, asked: Asked) -> Result<(), LinkEnd> {
        let request = match &asked {
            Asked::Renew => Request::Renew,
            Asked::Reserve(bytes, _) => Request::Reserve { bytes: *bytes },
            Asked::Lease => Request::Lease,
            Asked::Release(slab) => Request::Release { slab: *slab },
            Asked::DataToken(_) => Request::DataToken,
        };
        let id = link.next_id;
        link.next_id += 1;
        let answer_by = Instant::now() + self.dialer.timing.answer;
        link.in_flight.push_back(InFlight {
            id,
            asked,
            asked_at: BootTime::now(),
            answer_by,
        });
        let message = ClientMessage::Request { id, request };
        let sent = link.channel.send(&message, answer_by);
        sent.map_err(|source| self.failed(source))
    }

    fn take(&mut self, link: &mut Link, message: ServerMessage) -> Result<(), LinkEnd> {
        let server = self.server;
        match message {
            ServerMessage::Reply { id, reply } => match link.in_flight.pop_front() {
                Some(in_flight) if in_flight.id == id => self.take_reply(in_flight, reply),
                _ => Err(self.broken(format!("a reply to request {id} out of order"))),
            },
            ServerMessage::Vacate { slab } if self.held.contains(&slab) => {
                self.tell(SessionEvent::Vacate { server, slab })
            }
            ServerMessage::Vacate { .. } => Ok(()),
            ServerMessage::Closing => self.tell(SessionEvent::Closing { server }),
            other @ (ServerMessage::Welcome(_) | ServerMessage::Refused(_)) => {
                Err(self.broken(format!("{other:?} amid a session")))
            }
        }
    }

    fn take_reply(&mut self, in_flight: InFlight, reply: Reply) -> Result<(), LinkEnd> {
        if reply == Reply::Refused(Refusal::SessionEnded) {
            return Err(LinkEnd::Failed(self.refused(Refusal::SessionEnded)));
        }
        self.note_lease(in_flight.asked_at);
        match (in_flight.asked, reply) {
            (Asked::Renew, Reply::Done) => Ok(()),
            (Asked::Release(slab), Reply::Done | Reply::Refused(Refusal::NotLeased { .. })) => {
                self.releasing.remove(&slab);
                Ok(())
            }
            (Asked::Lease, Reply::Leased { slab }) => self.take_lease(slab),
            (Asked::Lease, Reply::Refused(reason)) => {
                self.leases_wanted = self.leases_wanted.saturating_sub(1);
                let server = self.server;
                self.tell(SessionEvent::LeaseRefused { server, reason })
            }
            (Asked::Reserve(asked, answer), Reply::Reserved { bytes }) => {
                self.reserve_bytes = asked;
                self.show(|status| status.reserved_bytes = bytes);
                answer.map(|answer| answer.send(Ok(())));
                Ok(())
            }
            (Asked::Reserve(_, answer), Reply::Refused(refusal)) => {
                let error = self.refused(refusal);
                match answer {
                    Some(answer) => drop(answer.send(Err(error))),
                    None => self.show(|status| status.detail = Some(error.to_string())),
                }
                Ok(())
            }
            (Asked::DataToken(role), Reply::DataToken { token }) => {
                self.open(role, token);
                Ok(())
            }
            (Asked::DataToken(role), Reply::Refused(refusal)) => {
                let error = self.refused(refusal);
                self.show(|status| status.detail = Some(error.to_string()));
                self.retry_role(role);
                Ok(())
            }
            (_, reply) => Err(self.broken(format!("{reply:?} to a request of another kind"))),
        }
    }

    fn open(&mut self, role: usize, token: Token) {
        let opening = Opening {
            role,
            token,
            generation: self.generation.load(Ordering::Acquire),
        };
        let sent = self
            .openings
            .as_ref()
            .map(|sender| sender.try_send(opening));
        if let Some(Err(TrySendError::Full(_))) = sent {
            self.retry_role(role);
        }
    }

    fn retry_role(&mut self, role: usize) {
        let at = Instant::now() + jittered(self.dialer.timing.retry_max / 4);
        if self.retry_roles.iter().all(|(_, waiting)| *waiting != role) {
            self.retry_roles.push((at, role));
        }
    }

    fn take_lease(&mut self, slab: SlabId) -> Result<(), LinkEnd> {
        self.leases_wanted = self.leases_wanted.saturating_sub(1);
        self.held.insert(slab);
        self.show(|_| {});
        let server = self.server;
        self.tell(SessionEvent::Leased { server, slab })
    }

    fn note_release(&mut self, slab: SlabId) {
        if self.held.remove(&slab) {
            self.releasing.insert(slab);
            self.show(|_| {});
        }
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
                Ok(Order::OpenData(_) | Order::DataFailed(..)) => {}
                Ok(Order::Close(answer)) => {
                    let outcome = self.dialer.control(&self.purpose);
                    let _ = answer.send(
                        outcome.and_then(|mut greeted| self.say_goodbye(&mut greeted.channel, 1)),
                    );
                    return false;
                }
                Ok(Order::Leave) | Err(RecvTimeoutError::Disconnected) => return false,
                Err(RecvTimeoutError::Timeout) => return true,
            }
        }
    }

    /// Gives everything back, and waits for the server's word that it has it.
    fn say_goodbye(&self, channel: &mut Channel, id: u64) -> Result<(), RemoteError> {
        let deadline = Instant::now() + self.dialer.timing.answer;
        let message = ClientMessage::Request {
            id,
            request: Request::Goodbye,
        };
        let sent = channel.send(&message, deadline);
        sent.map_err(|source| self.dialer.control_error(source))?;
        loop {
            match self.dialer.receive(channel, deadline)? {
                ServerMessage::Reply { id: of, reply } if of == id => {
                    return match reply {
                        Reply::Done | Reply::Refused(Refusal::SessionEnded) => Ok(()),
                        Reply::Refused(refusal) => Err(self.refused(refusal)),
                        other => Err(self.dialer.protocol(format!("{other:?} to a goodbye"))),
                    };
                }
                // Answers to what was asked before are of no interest any more.
                _ => {}
            }
        }
    }

    fn note_lease(&self, asked_at: BootTime) {
        let until = asked_at.after(self.lease).as_millis();
        let lease = &self.shared.lease_until_ms;
        lease.store(until, Ordering::Release);
    }

    fn tell(&self, event: SessionEvent) -> Result<(), LinkEnd> {
        // Without an owner there is no session; the lease keeps the slabs for a successor.
        self.events.send(event).map_err(|_| LinkEnd::Over)
    }

    fn tell_down(&self, error: RemoteError) {
        let words = Chain(&error).to_string();
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

    fn show(&self, change: impl FnOnce(&mut SessionStatus)) {
        let mut status = self.shared.status();
        change(&mut status);
        status.slabs = self.held.len() as u64;
    }

    fn failed(&self, source: ChannelError) -> LinkEnd {
        LinkEnd::Failed(self.dialer.control_error(source))
    }

    fn broken(&self, what: String) -> LinkEnd {
        LinkEnd::Failed(self.dialer.protocol(what))
    }

    fn refused(&self, refusal: Refusal) -> RemoteError {
        RemoteError::Refused {
            server: self.dialer.address.clone(),
            refusal,
        }
    }
}

/// The first reservation, before anything else is said; what is refused here ends the session, so
/// that nothing stays behind on the server.
fn reserve_first(dialer: &Dialer, greeted: &mut Greeted, bytes: u64) -> Result<(), RemoteError> {
    let deadline = Instant::now() + dialer.timing.answer;
    let message = |id, request| ClientMessage::Request { id, request };
    let send = |channel: &mut Channel, message| {
        let sent = channel.send(&message, deadline);
        sent.map_err(|source| dialer.control_error(source))
    };
    let channel = &mut greeted.channel;
    send(channel, message(0, Request::Reserve { bytes }))?;
    loop {
        match dialer.receive(channel, deadline)? {
            ServerMessage::Reply {
                id: 0,
                reply: Reply::Reserved { bytes },
            } => {
                greeted.welcome.reserved_bytes = bytes;
                return Ok(());
            }
            ServerMessage::Reply {
                id: 0,
                reply: Reply::Refused(refusal),
            } => {
                // Only what was opened just now is ended: a former session holds pages.
                if !greeted.welcome.resumed {
                    let _ = send(channel, message(1, Request::Goodbye));
                    let _ = dialer.receive(channel, deadline);
                }
                return Err(RemoteError::Refused {
                    server: dialer.address.clone(),
                    refusal,
                });
            }
            ServerMessage::Vacate { .. } | ServerMessage::Closing => {}
            other => return Err(dialer.protocol(format!("{other:?} instead of a reservation"))),
        }
    }
}

/// Between half of `pause` and all of it, so that many clients do not come back at once.
fn jittered(pause: Duration) -> Duration {
    let mut random = [0; 2];
    // Without random numbers all clients wait the same time: no more than an inconvenience.
    let _ = getrandom::fill(&mut random);
    let share = f64::from(u16::from_le_bytes(random)) / f64::from(u16::MAX);
    pause.mul_f64(0.5 + share / 2.0)
}

/// An error with its causes, in one line.
struct Chain<'a>(&'a dyn std::error::Error);

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(error) = source {
            let words = error.to_string();
            if !self.0.to_string().contains(&words) {
                write!(f, ": {words}")?;
            }
            source = error.source();
        }
        Ok(())
    }
}
