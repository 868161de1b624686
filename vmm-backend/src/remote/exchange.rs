//! Requests on a control connection and what comes back: the part of a session's keeping that is
//! the same whichever order the messages come in.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crossbeam_channel::{Sender, TrySendError};
use outram_wire::server::channel::Channel;
use outram_wire::server::clock::BootTime;
use outram_wire::server::{
    ClientMessage, Purpose, Refusal, Reply, Request, ServerMessage, SlabId, Transport,
};
use outram_wire::verbs::VerbsError;

use super::keeper::{Keeper, LinkEnd, jittered};
use super::opener::{Agreed, Opening};
use super::parting::Parting;
use super::verbs::{Half, Other, Verbs};
use super::{RemoteError, SessionEvent};

/// Requests on their way at most: their answers fit into what the sockets hold, for nobody reads while all of
/// them are sent.
const MOST_IN_FLIGHT: usize = 64;

/// What an answer is awaited for.
pub(super) enum Asked {
    Renew,
    Reserve(u64, Option<Sender<Result<(), RemoteError>>>),
    /// More than was ever promised, for a lease that follows.
    ReserveMore(u64),
    Lease,
    Release(SlabId),
    DataToken(usize),
    /// What a slab is called over RDMA; whether the owner waits for the slab.
    Key(SlabId, bool),
    QueuePair(usize, Box<Half>),
}

/// A request on its way.
pub(super) struct InFlight {
    pub(super) id: u64,
    pub(super) asked: Asked,
    pub(super) asked_at: BootTime,
    pub(super) answer_by: Instant,
}

/// A control connection in use.
pub(super) struct Link {
    pub(super) channel: Channel,
    pub(super) next_id: u64,
    pub(super) in_flight: VecDeque<InFlight>,
    /// To be asked after those.
    pub(super) waiting: VecDeque<Asked>,
    pub(super) renew_at: Instant,
    /// When it was greeted.
    pub(super) since: Instant,
    /// The server has said that it is being stopped.
    pub(super) is_closing: bool,
    /// Our address as the server sees it.
    pub(super) local: Option<IpAddr>,
    /// RDMA, where data goes over it.
    pub(super) verbs: Option<Verbs>,
    /// Slabs that are to be given back.
    pub(super) parting: Parting,
}

impl Link {
    /// Bytes that the server was last asked to promise, if it has not answered yet.
    pub(super) fn promise_under_way(&self) -> Option<u64> {
        let promise = |asked: &Asked| match asked {
            Asked::Reserve(bytes, _) | Asked::ReserveMore(bytes) => Some(*bytes),
            _ => None,
        };
        self.asked().filter_map(promise).last()
    }

    /// All that is not answered yet, in its order.
    fn asked(&self) -> impl Iterator<Item = &Asked> {
        let in_flight = self.in_flight.iter().map(|request| &request.asked);
        in_flight.chain(&self.waiting)
    }

    /// Whether a slab was leased that the owner learns of once it has its key.
    fn awaits_key(&self, slab: SlabId) -> bool {
        let mut unnamed = self.verbs.iter().flat_map(|verbs| &verbs.unnamed);
        unnamed.any(|waiting| *waiting == (slab, true))
            || self
                .asked()
                .any(|asked| matches!(asked, Asked::Key(asked, true) if *asked == slab))
    }
}

impl Keeper {
    pub(super) fn ask(&mut self, link: &mut Link, asked: Asked) -> Result<(), LinkEnd> {
        link.waiting.push_back(asked);
        self.send_waiting(link)
    }

    /// Sends what waits, as far as answers may be awaited.
    fn send_waiting(&mut self, link: &mut Link) -> Result<(), LinkEnd> {
        while link.in_flight.len() < MOST_IN_FLIGHT
            && let Some(asked) = link.waiting.pop_front()
        {
            self.send(link, asked)?;
        }
        Ok(())
    }

    fn send(&mut self, link: &mut Link, asked: Asked) -> Result<(), LinkEnd> {
        let request = match &asked {
            Asked::Renew => Request::Renew,
            Asked::Reserve(bytes, _) | Asked::ReserveMore(bytes) => {
                Request::Reserve { bytes: *bytes }
            }
            Asked::Lease => Request::Lease,
            Asked::Release(slab) => Request::Release { slab: *slab },
            Asked::DataToken(_) => Request::DataToken,
            Asked::Key(slab, _) => Request::Key { slab: *slab },
            Asked::QueuePair(_, half) => Request::QueuePair { end: half.end() },
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

    pub(super) fn take(&mut self, link: &mut Link, message: ServerMessage) -> Result<(), LinkEnd> {
        let server = self.server;
        match message {
            ServerMessage::Reply { id, reply } => match link.in_flight.pop_front() {
                Some(in_flight) if in_flight.id == id => {
                    // The server does one after the other: the next one's time begins now.
                    if let Some(next) = link.in_flight.front_mut() {
                        next.answer_by = Instant::now() + self.dialer.timing.answer;
                    }
                    self.take_reply(link, in_flight, reply)?;
                    self.send_waiting(link)
                }
                _ => Err(self.broken(format!("a reply to request {id} out of order"))),
            },
            ServerMessage::Vacate { slab } if self.held.contains(&slab) => {
                // Once: shards look through all of their pages for it.
                match self.vacating.insert(slab) {
                    true => self.tell(SessionEvent::Vacate { server, slab }),
                    false => Ok(()),
                }
            }
            ServerMessage::Vacate { slab } => {
                // Of one whose key is awaited the owner is told once it has the slab.
                if self.releasing.contains(&slab) || link.awaits_key(slab) {
                    self.vacating.insert(slab);
                }
                Ok(())
            }
            ServerMessage::Closing if std::mem::replace(&mut link.is_closing, true) => Ok(()),
            ServerMessage::Closing => self.tell(SessionEvent::Closing { server }),
            other @ (ServerMessage::Welcome(_) | ServerMessage::Refused(_)) => {
                Err(self.broken(format!("{other:?} amid a session")))
            }
        }
    }

    fn take_reply(
        &mut self,
        link: &mut Link,
        in_flight: InFlight,
        reply: Reply,
    ) -> Result<(), LinkEnd> {
        if reply == Reply::Refused(Refusal::SessionEnded) {
            return Err(LinkEnd::Failed(self.dialer.refused(Refusal::SessionEnded)));
        }
        self.note_lease(in_flight.asked_at);
        match (in_flight.asked, reply) {
            (Asked::Renew, Reply::Done) => Ok(()),
            (Asked::Release(slab), Reply::Done | Reply::Refused(Refusal::NotLeased { .. })) => {
                self.releasing.remove(&slab);
                if self.vacating.remove(&slab) {
                    // What was asked back is not promised any more.
                    self.show(|status| {
                        let left = status.reserved_bytes.saturating_sub(status.slab_bytes);
                        status.reserved_bytes = left;
                    });
                }
                Ok(())
            }
            (Asked::Lease, Reply::Leased { slab }) => {
                self.no_more = None;
                self.take_lease(link, slab)?;
                self.advance_verbs(link)
            }
            (Asked::Lease, Reply::Refused(reason)) => {
                self.leases_wanted = self.leases_wanted.saturating_sub(1);
                // The server may have less for us than it once said: after it asked slabs back.
                // What is missing is asked for again with the next renewal.
                if let Refusal::ReservationExhausted { reserved_bytes } = reason {
                    self.show(|status| status.reserved_bytes = reserved_bytes);
                }
                let server = self.server;
                // Why more was not promised says more than that it was not.
                let reason = self.no_more.take().unwrap_or(reason);
                self.tell(SessionEvent::LeaseRefused { server, reason })
            }
            (Asked::Reserve(asked, answer), Reply::Reserved { bytes }) => {
                self.show(|status| {
                    status.reserved_bytes = bytes;
                    // What the keeper asked for by itself may not be wanted any more.
                    if answer.is_some() {
                        status.wanted_bytes = asked;
                    }
                });
                answer.map(|answer| answer.send(Ok(())));
                Ok(())
            }
            (Asked::Reserve(_, answer), Reply::Refused(refusal)) => {
                let error = self.dialer.refused(refusal);
                match answer {
                    Some(answer) => drop(answer.send(Err(error))),
                    None => {
                        self.promise_refused = Some(error.to_string());
                        self.show(|status| status.detail = Some(error.to_string()));
                    }
                }
                Ok(())
            }
            (Asked::ReserveMore(_), Reply::Reserved { bytes }) => {
                self.show(|status| {
                    status.reserved_bytes = bytes;
                    status.wanted_bytes = status.wanted_bytes.max(bytes);
                });
                Ok(())
            }
            (Asked::ReserveMore(_), Reply::Refused(reason)) => {
                self.no_more = Some(reason);
                Ok(())
            }
            (Asked::DataToken(role), Reply::DataToken { token }) => {
                self.open(role, Agreed::Token(token));
                Ok(())
            }
            (Asked::DataToken(role), Reply::Refused(refusal)) => {
                let error = self.dialer.refused(refusal);
                self.show(|status| status.detail = Some(error.to_string()));
                self.retry_role(role);
                Ok(())
            }
            (Asked::Key(slab, is_awaited), reply) => self.take_key(link, slab, is_awaited, reply),
            (Asked::QueuePair(role, half), Reply::QueuePair { end, probe, proof }) => {
                let other = Other { end, probe, proof };
                self.open(role, Agreed::Pair(half, other));
                Ok(())
            }
            (Asked::QueuePair(..), Reply::Refused(refusal)) => {
                Err(self.lose_verbs(link.since, self.dialer.refused(refusal)))
            }
            (_, reply) => Err(self.broken(format!("{reply:?} to a request of another kind"))),
        }
    }

    fn take_key(
        &mut self,
        link: &mut Link,
        slab: SlabId,
        is_awaited: bool,
        reply: Reply,
    ) -> Result<(), LinkEnd> {
        let since = link.since;
        let Some(verbs) = &mut link.verbs else {
            return Err(self.broken(format!("{reply:?} without RDMA")));
        };
        verbs.is_asking = false;
        let was_released = !is_awaited && !self.held.contains(&slab);
        match reply {
            Reply::Key { remote } if !verbs.holds(remote) => {
                return Err(self.broken(format!("slab {slab} at an impossible address")));
            }
            Reply::Key { remote } => {
                if !was_released {
                    verbs.keys.insert(slab, remote);
                }
                if is_awaited {
                    self.tell_leased(slab)?;
                }
            }
            Reply::Refused(Refusal::NotLeased { .. }) if was_released => {}
            Reply::Refused(refusal) => {
                return Err(self.lose_verbs(since, self.dialer.refused(refusal)));
            }
            reply => return Err(self.broken(format!("{reply:?} to a request for a key"))),
        }
        self.advance_verbs(link)
    }

    /// Asks for the next slab's key; for the queue pairs once every slab that is held has one.
    pub(super) fn advance_verbs(&mut self, link: &mut Link) -> Result<(), LinkEnd> {
        let Some(verbs) = &mut link.verbs else {
            return Ok(());
        };
        if verbs.is_asking {
            return Ok(());
        }
        if let Some((slab, is_awaited)) = verbs.unnamed.pop_front() {
            verbs.is_asking = true;
            return self.ask(link, Asked::Key(slab, is_awaited));
        }
        if !verbs.is_open {
            verbs.is_open = true;
            for role in 0..self.roles {
                self.ask_role(link, role)?;
            }
        }
        Ok(())
    }

    /// Asks for a data connection.
    pub(super) fn ask_role(&mut self, link: &mut Link, role: usize) -> Result<(), LinkEnd> {
        let Some(verbs) = &link.verbs else {
            return self.ask(link, Asked::DataToken(role));
        };
        match verbs.new_pair() {
            Ok(half) => self.ask(link, Asked::QueuePair(role, Box::new(half))),
            Err(source) => Err(self.lose_verbs(link.since, self.dialer.verbs_error(source))),
        }
    }

    /// RDMA, in use since then, is of no use: all is made anew, over TCP for a while where that will do.
    pub(super) fn lose_verbs(&mut self, since: Instant, error: RemoteError) -> LinkEnd {
        self.lacks_verbs = true;
        if self.dialer.address.transport() == Transport::Auto {
            self.verbs_pause
                .note_failure(Instant::now(), since.elapsed());
        }
        LinkEnd::Failed(error)
    }

    /// Looks whether the device is being removed, or whether there is one again: all is made anew then.
    pub(super) fn look_at_device(&mut self, link: &Link) -> Result<(), LinkEnd> {
        if let Some(verbs) = &link.verbs {
            if verbs.presence().is_over() {
                let removed = format!("{} is being removed", verbs.port().device);
                let error = self.dialer.verbs_error(VerbsError::NoPort(removed));
                return Err(LinkEnd::Failed(error));
            }
            return Ok(());
        }
        let now = Instant::now();
        let is_guest = matches!(self.purpose, Purpose::Guest { .. });
        if is_guest && self.verbs_pause.is_try_due(now) && self.dialer.might_use_verbs(link.local) {
            self.verbs_pause.note_try(now);
            return Err(LinkEnd::Again);
        }
        Ok(())
    }

    fn open(&mut self, role: usize, agreed: Agreed) {
        let opening = Opening {
            role,
            agreed,
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

    pub(super) fn retry_role(&mut self, role: usize) {
        let at = Instant::now() + jittered(self.dialer.timing.retry_max / 4);
        if self.retry_roles.iter().all(|(_, waiting)| *waiting != role) {
            self.retry_roles.push((at, role));
        }
    }

    /// Takes a lease that was wanted. Over RDMA the owner is told once the slab has its key; until then
    /// it counts as not answered, so that one lost with the connection is found again.
    pub(super) fn take_lease(&mut self, link: &mut Link, slab: SlabId) -> Result<(), LinkEnd> {
        match &mut link.verbs {
            Some(verbs) => {
                verbs.unnamed.push_back((slab, true));
                Ok(())
            }
            None => self.tell_leased(slab),
        }
    }

    fn tell_leased(&mut self, slab: SlabId) -> Result<(), LinkEnd> {
        self.leases_wanted = self.leases_wanted.saturating_sub(1);
        self.held.insert(slab);
        self.show(|_| {});
        let server = self.server;
        self.tell(SessionEvent::Leased { server, slab })?;
        match self.vacating.contains(&slab) {
            true => self.tell(SessionEvent::Vacate { server, slab }),
            false => Ok(()),
        }
    }

    pub(super) fn note_release(&mut self, slab: SlabId) {
        if self.held.remove(&slab) {
            self.releasing.insert(slab);
            self.show(|_| {});
        }
    }
}
