//! Demand reads of one shard: its own connection to each server, and what is in flight on it.
//!
//! What somebody waits for goes out at once. What is fetched ahead goes out behind all of that, at the end of the
//! round in which it was asked for: several pages by one request, which costs either side a third less for each
//! than requests of their own do. A single page goes by the request of the one that it is expected behind. A request
//! that the server refuses is made again page by page, for the others of it are not at fault.
//!
//! After a connection is lost, what was in flight waits for the next one. Nothing is ever given up
//! here: a fetch ends when the server answers, or when its slab is known to be gone.

use std::collections::VecDeque;
use std::sync::Arc;

use foldhash::HashMap;
use outram_wire::server::Extent;

use super::writer::{add_extent, extent_of};
use crate::engine::slots::ServerIndex;
use crate::engine::{Fetch, FetchId, SharedRef};
use crate::remote::{AHEAD_BYTES, DataConn, Session, SubmitError};

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

/// Fetches that one request is made of.
#[derive(Debug)]
pub(super) struct Flight {
    first: Fetch,
    rest: Vec<Fetch>,
}

impl Flight {
    fn of(fetch: Fetch) -> Self {
        Self {
            first: fetch,
            rest: Vec::new(),
        }
    }

    /// The first of them.
    pub(super) fn first(&self) -> Fetch {
        self.first
    }

    /// In the order of their bytes.
    pub(super) fn fetches(&self) -> impl Iterator<Item = Fetch> + '_ {
        std::iter::once(self.first).chain(self.rest.iter().copied())
    }

    /// How many they are.
    pub(super) fn count(&self) -> usize {
        1 + self.rest.len()
    }
}

/// Fetches that are about to go out by one request.
#[derive(Debug)]
struct Group {
    flight: Flight,
    /// Where their pages lie; neighbours are one.
    extents: Vec<Extent>,
    bytes: u32,
}

impl Group {
    fn of(fetch: Fetch, extent: Extent) -> Self {
        Self {
            flight: Flight::of(fetch),
            extents: vec![extent],
            bytes: extent.length,
        }
    }

    fn takes(&self, extent: Extent) -> bool {
        self.bytes.saturating_add(extent.length) <= AHEAD_BYTES
    }

    fn add(&mut self, fetch: Fetch, extent: Extent) {
        self.flight.rest.push(fetch);
        self.bytes += extent.length;
        add_extent(&mut self.extents, extent);
    }
}

/// The demand reads of a shard.
pub(super) struct DemandReads {
    shared: SharedRef,
    sessions: Arc<[Session]>,
    lines: Vec<Line>,
    /// By the first fetch of each request.
    in_flight: HashMap<FetchId, (ServerIndex, Flight)>,
    /// What is fetched ahead and has not gone out yet.
    ahead: Vec<(ServerIndex, Group)>,
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
            in_flight: HashMap::default(),
            ahead: Vec::new(),
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
        let server = place.slab.server;
        let extent = extent_of(place, self.shared.page_size);
        match &mut self.lines[server] {
            Line::Up(_) if fetch.with_next => {
                self.ahead.push((server, Group::of(fetch, extent)));
                true
            }
            Line::Up(_) if fetch.ahead => {
                let mut groups = self.ahead.iter_mut().rev();
                match groups.find(|(to, _)| *to == server) {
                    Some((_, last)) if last.takes(extent) => last.add(fetch, extent),
                    _ => self.ahead.push((server, Group::of(fetch, extent))),
                }
                true
            }
            Line::Up(conn) => {
                let submitted = conn.submit_read(fetch.id.0, &[extent]);
                self.note(server, Flight::of(fetch), submitted)
            }
            Line::Lent => {
                self.waiting.push_back(fetch);
                true
            }
            Line::Down => {
                self.waiting.push_back(fetch);
                false
            }
        }
    }

    /// Notes what became of a request; false where its server is out of reach now.
    fn note(
        &mut self,
        server: ServerIndex,
        flight: Flight,
        submitted: Result<(), SubmitError>,
    ) -> bool {
        let reachable = match submitted {
            Ok(()) => {
                self.in_flight.insert(flight.first.id, (server, flight));
                return true;
            }
            Err(SubmitError::QueueFull) => true,
            Err(error) => {
                tracing::debug!(%error, "a demand read was not submitted");
                self.drop_line(server);
                false
            }
        };
        self.waiting.extend(flight.fetches());
        reachable
    }

    /// Sends what somebody waits for, with what was to come with it where that did.
    pub(super) fn send_waited_for(&mut self) {
        let is_waited_for = |(_, group): &(_, Group)| group.flight.first.with_next;
        while let Some(place) = self.ahead.iter().rposition(is_waited_for) {
            let (server, group) = self.ahead.remove(place);
            let submitted = match &mut self.lines[server] {
                Line::Up(conn) => conn.submit_read(group.flight.first.id.0, &group.extents),
                Line::Down | Line::Lent => Err(SubmitError::QueueFull),
            };
            self.note(server, group.flight, submitted);
        }
    }

    /// Sends what is fetched ahead: to be called at the end of a round.
    pub(super) fn send_ahead(&mut self) {
        for (server, group) in std::mem::take(&mut self.ahead) {
            let Group {
                flight, extents, ..
            } = group;
            let submitted = match &mut self.lines[server] {
                Line::Up(conn) => conn.queue_read(flight.first.id.0, &extents),
                Line::Down | Line::Lent => Err(SubmitError::QueueFull),
            };
            self.note(server, flight, submitted);
        }
        for server in 0..self.lines.len() {
            if let Line::Up(conn) = &mut self.lines[server]
                && conn.wants_write()
                && let Err(error) = conn.flush()
            {
                tracing::debug!(%error, "reads ahead were not sent");
                self.drop_line(server);
            }
        }
    }

    /// Asks for each page of a request by itself that was refused as a whole.
    pub(super) fn ask_one_by_one(&mut self, flight: &Flight) {
        let alone = |fetch| Fetch {
            ahead: false,
            ..fetch
        };
        self.waiting.extend(flight.fetches().map(alone));
    }

    /// Whether a page still has its copy where it was fetched from.
    pub(super) fn is_there(&self, fetch: Fetch) -> bool {
        self.shared.table.load(fetch.page).slot == Some(fetch.slot)
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
            // It has waited: what was to come with it does not hold it up any longer.
            self.fetch(Fetch {
                with_next: false,
                ..fetch
            });
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

    /// Whether a request waits for its socket to take it.
    pub(super) fn wants_write(&self) -> bool {
        self.lines().any(|(_, conn)| conn.wants_write())
    }

    /// Takes from the sockets what has come of what was asked for, and notes the servers that it came from.
    pub(super) fn look(&mut self, found: &mut Vec<ServerIndex>) {
        for (server, line) in self.lines.iter_mut().enumerate() {
            if let Line::Up(conn) = line
                && conn.pending() > 0
                && conn.look()
            {
                found.push(server);
            }
        }
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

    /// Notes that a request was answered.
    pub(super) fn answered(&mut self, id: FetchId) -> Option<Flight> {
        self.in_flight.remove(&id).map(|(_, flight)| flight)
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
        let mut lost = Vec::new();
        for (_, (_, flight)) in self.in_flight.extract_if(|_, (of, _)| *of == server) {
            lost.extend(flight.fetches());
        }
        for (_, group) in self.ahead.extract_if(.., |(of, _)| *of == server) {
            lost.extend(group.flight.fetches());
        }
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

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use crossbeam_channel::{Receiver, unbounded};
    use outram_memserver::Server;
    use outram_wire::server::SlabId;

    use super::*;
    use crate::engine::shard::tests::bench;
    use crate::engine::slots::SlabRef;
    use crate::engine::table::{Entry, State};
    use crate::engine::{PageIndex, SlotId};
    use crate::remote::test_server::{PATIENCE, Pki, SLAB, anywhere, config, serve};
    use crate::remote::{ExtentError, NewSession, SessionEvent};

    const PAGE: usize = 4096;
    /// Pages of a request, at most.
    const MOST: usize = AHEAD_BYTES as usize / PAGE;
    /// Groups of slabs: one at the server, one that it does not know.
    const KNOWN: u32 = 1;
    const UNKNOWN: u32 = 2;

    /// Reads of pages that a real server keeps.
    struct Reads {
        demand: DemandReads,
        events: Receiver<SessionEvent>,
        _server: Server,
        _pki: Pki,
    }

    /// Requests that were answered: pages of each, and their bytes.
    type Answers = Vec<(Vec<u32>, Result<Vec<u8>, ExtentError>)>;

    impl Reads {
        /// Of a server that keeps page `n` in slot `n`, filled with its number.
        fn new() -> Self {
            let pki = Pki::new();
            let server = serve(&pki, anywhere(), |_| {});
            let (sender, events) = unbounded();
            let config = config(server.local_addr(), pki.client.clone());
            let mut greeted = NewSession::greet(0, &config, sender).expect("a greeting");
            greeted.reserve(SLAB).expect("there is room");
            let session = greeted.keep().expect("a session");
            session.request_slab();
            let shared = bench::shared(1, 1);
            let demand = DemandReads::new(Arc::clone(&shared), Arc::new([session]));
            let mut reads = Self {
                demand,
                events,
                _server: server,
                _pki: pki,
            };
            let (mut conns, slab) = reads.granted();
            let pages = SLAB as usize / PAGE;
            for number in [slab.0, slab.0 + 1] {
                let slab = SlabRef {
                    server: 0,
                    slab: number,
                };
                shared.slots.add_slab(slab, pages as u32);
            }
            let bytes: Vec<u8> = (0..pages).flat_map(|page| [page as u8; PAGE]).collect();
            let whole = Extent {
                slab,
                offset: 0,
                length: SLAB as u32,
            };
            let mut writing = conns.pop().expect("two");
            writing.submit_write(0, &[whole], &[&bytes]).expect("sent");
            while writing.pending() > 0 {
                writing.flush().expect("alive");
                writing
                    .receive(|_, outcome| assert!(outcome.is_ok()))
                    .expect("alive");
            }
            let reading = conns.pop().expect("two");
            reads.demand.connected(0, reading);
            reads
        }

        fn granted(&self) -> (Vec<DataConn>, SlabId) {
            let deadline = Instant::now() + PATIENCE;
            let (mut conns, mut leased) = (Vec::new(), None);
            loop {
                match self.events.recv_deadline(deadline).expect("in time") {
                    SessionEvent::DataConnection { conn, .. } => conns.push(conn),
                    SessionEvent::Leased { slab, .. } => leased = Some(slab),
                    _ => {}
                }
                if let (2, Some(slab)) = (conns.len(), leased) {
                    return (conns, slab);
                }
            }
        }

        fn fetch(&mut self, page: u32, group: u32, ahead: bool) {
            let fetch = Fetch {
                id: FetchId(page.into()),
                page: PageIndex(page),
                slot: SlotId { group, index: page },
                ahead,
                with_next: false,
            };
            self.ask(fetch);
        }

        /// A page that somebody waits for, and its neighbour.
        fn fetch_with_next(&mut self, page: u32) {
            self.ask(Fetch {
                id: FetchId(page.into()),
                page: PageIndex(page),
                slot: SlotId {
                    group: KNOWN,
                    index: page,
                },
                ahead: false,
                with_next: true,
            });
        }

        fn ask(&mut self, fetch: Fetch) {
            assert!(self.demand.fetch(fetch), "the server is there");
        }

        /// Waits until nothing is on its way.
        fn answers(&mut self) -> Answers {
            let mut answers = Vec::new();
            let deadline = Instant::now() + PATIENCE;
            while !self.demand.in_flight.is_empty() || !self.demand.waiting.is_empty() {
                assert!(Instant::now() < deadline, "no answer");
                let mut conn = self.demand.lend(0).expect("alive");
                conn.flush().expect("alive");
                let mut ended = Vec::new();
                let received =
                    conn.receive(|id, result| ended.push((id, result.map(|bytes| bytes.to_vec()))));
                received.expect("alive");
                for (id, result) in ended {
                    let flight = self.demand.answered(FetchId(id)).expect("it was asked");
                    let pages = flight.fetches().map(|fetch| fetch.page.0).collect();
                    if result.is_err() && flight.count() > 1 {
                        self.demand.ask_one_by_one(&flight);
                    }
                    answers.push((pages, result));
                }
                self.demand.give_back(0, conn, true);
                self.demand.send_ahead();
            }
            answers
        }
    }

    fn bytes_of(pages: &[u32]) -> Vec<u8> {
        let pages = pages.iter();
        pages.flat_map(|page| [*page as u8; PAGE]).collect()
    }

    #[test]
    fn what_is_fetched_ahead_goes_out_together_and_behind_what_is_waited_for() {
        let mut reads = Reads::new();
        // Some follow each other, others do not.
        let ahead: Vec<u32> = (10..20).chain([7, 5]).chain(30..40).collect();
        for page in &ahead {
            reads.fetch(*page, KNOWN, true);
        }
        reads.fetch(200, KNOWN, false);
        reads.demand.send_ahead();
        let answers = reads.answers();
        let (first, second) = ahead.split_at(MOST);
        let expected: Answers = [&[200][..], first, second]
            .map(|pages| (pages.to_vec(), Ok(bytes_of(pages))))
            .to_vec();
        assert!(
            answers == expected,
            "{:?}",
            answers.iter().map(|(pages, _)| pages)
        );
    }

    #[test]
    fn a_page_and_its_neighbour_come_by_one_request_before_what_is_ahead() {
        let mut reads = Reads::new();
        for page in [50, 51] {
            reads.fetch(page, KNOWN, true);
        }
        reads.fetch_with_next(10);
        assert_eq!(reads.demand.in_flight.len(), 0, "its neighbour comes first");
        reads.fetch(11, KNOWN, true);
        reads.demand.send_waited_for();
        assert_eq!(reads.demand.in_flight.len(), 1, "both are asked for");
        reads.fetch(52, KNOWN, true);
        // Of this one the neighbour does not come.
        reads.fetch_with_next(20);
        reads.demand.send_waited_for();
        assert_eq!(reads.demand.in_flight.len(), 2);
        reads.demand.send_ahead();
        let answers = reads.answers();
        let pages: Vec<&[u32]> = answers.iter().map(|(pages, _)| &pages[..]).collect();
        assert_eq!(pages, [&[10, 11][..], &[20], &[50, 51, 52]]);
        let right = |(pages, result): &(Vec<u32>, _)| *result == Ok(bytes_of(pages));
        assert!(answers.iter().all(right));
    }

    #[test]
    fn a_page_that_had_to_wait_does_not_wait_for_its_neighbour() {
        let mut reads = Reads::new();
        let conn = reads.demand.lend(0).expect("alive");
        reads.fetch_with_next(10);
        reads.demand.send_waited_for();
        reads.demand.give_back(0, conn, true);
        assert_eq!(reads.demand.in_flight.len(), 1, "it is asked for");
        assert!(reads.answers() == [(vec![10], Ok(bytes_of(&[10])))]);
    }

    #[test]
    fn a_request_that_is_refused_for_one_page_brings_the_others() {
        let mut reads = Reads::new();
        for page in 0..4 {
            let group = if page == 2 { UNKNOWN } else { KNOWN };
            reads.fetch(page, group, true);
        }
        reads.demand.send_ahead();
        let answers = reads.answers();
        let is_done: Vec<(&[u32], bool)> = answers
            .iter()
            .map(|(pages, result)| (&pages[..], result.is_ok()))
            .collect();
        assert_eq!(
            is_done,
            [
                (&[0, 1, 2, 3][..], false),
                (&[0], true),
                (&[1], true),
                (&[2], false),
                (&[3], true)
            ]
        );
        let right = |(pages, result): &(Vec<u32>, _)| *result == Ok(bytes_of(pages));
        assert_eq!(answers.iter().filter(|answer| right(answer)).count(), 3);
    }

    #[test]
    fn a_page_that_was_dropped_on_its_way_is_missed_by_nobody() {
        let mut reads = Reads::new();
        let shared = Arc::clone(&reads.demand.shared);
        let fetch = Fetch {
            id: FetchId(1),
            page: PageIndex(1),
            slot: SlotId {
                group: UNKNOWN,
                index: 1,
            },
            ahead: true,
            with_next: false,
        };
        let stored = Entry {
            state: State::Stored,
            slot: Some(fetch.slot),
            ..Entry::ABSENT
        };
        shared.table.store(fetch.page, &stored);
        reads.ask(fetch);
        reads.demand.send_ahead();
        assert!(reads.answers()[0].1.is_err());
        assert!(reads.demand.is_there(fetch), "it is lost");
        shared.table.store(fetch.page, &stored.into_absent());
        assert!(!reads.demand.is_there(fetch), "its guest gave it back");
        let elsewhere = SlotId {
            group: KNOWN,
            index: 1,
        };
        let moved = Entry {
            slot: Some(elsewhere),
            ..stored
        };
        shared.table.store(fetch.page, &moved);
        assert!(!reads.demand.is_there(fetch), "it lies elsewhere");
    }

    #[test]
    fn what_was_on_its_way_waits_for_the_next_connection() {
        let mut reads = Reads::new();
        for page in 0..20 {
            reads.fetch(page, KNOWN, true);
        }
        reads.demand.send_ahead();
        for page in 20..25 {
            reads.fetch(page, KNOWN, true);
        }
        reads.demand.disconnected(0);
        assert!(reads.demand.in_flight.is_empty() && reads.demand.ahead.is_empty());
        let waiting: Vec<u32> = reads
            .demand
            .waiting
            .iter()
            .map(|fetch| fetch.page.0)
            .collect();
        assert_eq!(waiting, Vec::from_iter(0..25));
    }
}
