//! Demand reads of one shard: its own connection to each server, and what is in flight on it.
//!
//! After a connection is lost, what was in flight waits for the next one. Nothing is ever given up
//! here: a fetch ends when the server answers, or when its slab is known to be gone.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use outram_wire::server::Extent;

use super::writer::extent_of;
use crate::engine::slots::{Place, ServerIndex};
use crate::engine::{Fetch, FetchId, SharedRef};
use crate::remote::{DataConn, Session, SubmitError};

/// A connection as its shard sees it.
#[derive(Debug, Default)]
enum Line {
    /// None: the session is making one.
    #[default]
    Down,
    /// Ready for requests.
    Up(Box<DataConn>),
    /// Taken out for a moment, while its replies are handled.
    Lent,
}

/// What nobody waits for yet goes out with what else is queued by then.
fn submit(conn: &mut DataConn, fetch: &Fetch, extent: Extent) -> Result<(), SubmitError> {
    match fetch.ahead {
        true => conn.queue_read(fetch.id.0, &[extent]),
        false => conn.submit_read(fetch.id.0, &[extent]),
    }
}

/// The demand reads of a shard.
pub(super) struct DemandReads {
    shared: SharedRef,
    sessions: Arc<[Session]>,
    lines: Vec<Line>,
    in_flight: HashMap<FetchId, (ServerIndex, Fetch)>,
    waiting: VecDeque<Fetch>,
    gone: Vec<Fetch>,
    wire_sent_bytes: u64,
    wire_received_bytes: u64,
}

impl DemandReads {
    /// No connection yet.
    pub(super) fn new(shared: SharedRef, sessions: Arc<[Session]>) -> Self {
        Self {
            shared,
            lines: sessions.iter().map(|_| Line::Down).collect(),
            sessions,
            in_flight: HashMap::new(),
            waiting: VecDeque::new(),
            gone: Vec::new(),
            wire_sent_bytes: 0,
            wire_received_bytes: 0,
        }
    }

    /// Asks for a page; false where its server is out of reach now.
    pub(super) fn fetch(&mut self, fetch: Fetch) -> bool {
        let Some(place) = self.shared.slots.place(fetch.slot) else {
            self.gone.push(fetch);
            return true;
        };
        let Place { slab, .. } = place;
        let extent = extent_of(place, self.shared.page_size);
        let (queued, reachable) = match &mut self.lines[slab.server] {
            Line::Up(conn) => match submit(conn, &fetch, extent) {
                Ok(()) => (false, true),
                Err(SubmitError::QueueFull) => (true, true),
                Err(error) => {
                    tracing::debug!(%error, "a demand read was not submitted");
                    self.drop_line(slab.server);
                    (true, false)
                }
            },
            Line::Lent => (true, true),
            Line::Down => (true, false),
        };
        if queued {
            self.waiting.push_back(fetch);
        } else {
            self.in_flight.insert(fetch.id, (slab.server, fetch));
        }
        reachable
    }

    /// Fetches whose slab is gone, since the last call.
    pub(super) fn drain_gone(&mut self) -> Vec<Fetch> {
        std::mem::take(&mut self.gone)
    }

    /// A new connection: what waited for one goes out.
    pub(super) fn connected(&mut self, server: ServerIndex, conn: DataConn) {
        self.drop_line_of(server);
        self.lines[server] = Line::Up(Box::new(conn));
        self.submit_waiting();
    }

    /// The connection is of no use any more: what is in flight waits for the next one.
    pub(super) fn disconnected(&mut self, server: ServerIndex) {
        self.drop_line_of(server);
    }

    /// Submits again what could not be submitted.
    pub(super) fn submit_waiting(&mut self) {
        for _ in 0..self.waiting.len() {
            let Some(fetch) = self.waiting.pop_front() else {
                break;
            };
            self.fetch(fetch);
        }
    }

    /// Connections to poll, by server, and whether each has something to send.
    pub(super) fn lines(&self) -> impl Iterator<Item = (ServerIndex, &DataConn)> {
        self.lines
            .iter()
            .enumerate()
            .filter_map(|(server, line)| match line {
                Line::Up(conn) => Some((server, conn.as_ref())),
                _ => None,
            })
    }

    /// Takes a connection out, to handle its replies.
    pub(super) fn lend(&mut self, server: ServerIndex) -> Option<Box<DataConn>> {
        match std::mem::replace(&mut self.lines[server], Line::Lent) {
            Line::Up(conn) => Some(conn),
            other => {
                self.lines[server] = other;
                None
            }
        }
    }

    /// Puts a connection back; `alive` is false where it failed.
    pub(super) fn give_back(&mut self, server: ServerIndex, conn: Box<DataConn>, alive: bool) {
        self.lines[server] = Line::Up(conn);
        if alive {
            self.submit_waiting();
        } else {
            self.drop_line(server);
        }
    }

    /// Notes that a fetch was answered.
    pub(super) fn answered(&mut self, id: FetchId) -> Option<Fetch> {
        self.in_flight.remove(&id).map(|(_, fetch)| fetch)
    }

    /// Bytes sent and received on all connections so far.
    pub(super) fn wire_bytes(&self) -> (u64, u64) {
        self.lines().fold(
            (self.wire_sent_bytes, self.wire_received_bytes),
            |(sent, received), (_, conn)| {
                (sent + conn.sent_bytes(), received + conn.received_bytes())
            },
        )
    }

    fn drop_line_of(&mut self, server: ServerIndex) {
        if let Line::Up(conn) = std::mem::take(&mut self.lines[server]) {
            self.wire_sent_bytes += conn.sent_bytes();
            self.wire_received_bytes += conn.received_bytes();
        }
        // Ids are never used twice, so a late answer would be ignored; in order of their age.
        let mut lost: Vec<Fetch> = self
            .in_flight
            .extract_if(|_, (of, _)| *of == server)
            .map(|(_, (_, fetch))| fetch)
            .collect();
        lost.sort_unstable_by_key(|fetch| fetch.id);
        self.waiting.extend(lost);
    }

    fn drop_line(&mut self, server: ServerIndex) {
        let generation = match &self.lines[server] {
            Line::Up(conn) => Some(conn.generation()),
            Line::Down | Line::Lent => None,
        };
        self.drop_line_of(server);
        if let Some(generation) = generation {
            self.sessions[server].reconnect_data(generation);
        }
    }
}
