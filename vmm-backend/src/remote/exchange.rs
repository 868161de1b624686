//! Requests on a control connection and what comes back: the part of a session's keeping that is
//! the same whichever order the messages come in.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crossbeam_channel::{Sender, TrySendError};
use outram_wire::server::channel::Channel;
use outram_wire::server::clock::BootTime;
use outram_wire::server::{ClientMessage, Refusal, Reply, Request, ServerMessage, SlabId, Token};

use super::keeper::{Keeper, LinkEnd, jittered};
use super::opener::Opening;
use super::{RemoteError, SessionEvent};

/// What an answer is awaited for.
pub(super) enum Asked {
    Renew,
    Reserve(u64, Option<Sender<Result<(), RemoteError>>>),
    Lease,
    Release(SlabId),
    DataToken(usize),
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
    pub(super) renew_at: Instant,
}

impl Keeper {
    pub(super) fn ask(&mut self, link: &mut Link, asked: Asked) -> Result<(), LinkEnd> {
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

    pub(super) fn take(&mut self, link: &mut Link, message: ServerMessage) -> Result<(), LinkEnd> {
        let server = self.server;
        match message {
            ServerMessage::Reply { id, reply } => match link.in_flight.pop_front() {
                Some(in_flight) if in_flight.id == id => {
                    // The server does one after the other: the next one's time begins now.
                    if let Some(next) = link.in_flight.front_mut() {
                        next.answer_by = Instant::now() + self.dialer.timing.answer;
                    }
                    self.take_reply(in_flight, reply)
                }
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
            return Err(LinkEnd::Failed(self.dialer.refused(Refusal::SessionEnded)));
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
                // The server may have less for us than it once said: after it asked slabs back.
                // What is missing is asked for again with the next renewal.
                if let Refusal::ReservationExhausted { reserved_bytes } = reason {
                    self.show(|status| status.reserved_bytes = reserved_bytes);
                }
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
                let error = self.dialer.refused(refusal);
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
                let error = self.dialer.refused(refusal);
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

    pub(super) fn retry_role(&mut self, role: usize) {
        let at = Instant::now() + jittered(self.dialer.timing.retry_max / 4);
        if self.retry_roles.iter().all(|(_, waiting)| *waiting != role) {
            self.retry_roles.push((at, role));
        }
    }

    pub(super) fn take_lease(&mut self, slab: SlabId) -> Result<(), LinkEnd> {
        self.leases_wanted = self.leases_wanted.saturating_sub(1);
        self.held.insert(slab);
        self.show(|_| {});
        let server = self.server;
        self.tell(SessionEvent::Leased { server, slab })
    }

    pub(super) fn note_release(&mut self, slab: SlabId) {
        if self.held.remove(&slab) {
            self.releasing.insert(slab);
            self.show(|_| {});
        }
    }
}
