//! Sessions against a real server in this process, over real sockets, through a gate that can be
//! shut: so that connections are cut, or stay out, as a network does it.

use std::collections::HashMap;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};
use outram_memserver::{Config, Server};
use outram_wire::causes::with_causes;
use outram_wire::host_settings::MAX_SHARDS;
use outram_wire::pki::{self, Order};
use outram_wire::server::{Refusal, SessionSecret, SlabId};
use outram_wire::tls::{Kind, TlsError, TlsFiles};

use super::test_server::*;
use super::*;

/// The owner of a session: remembers what it was told.
struct Owner {
    session: Session,
    events: Receiver<SessionEvent>,
    conns: HashMap<usize, DataConn>,
    held: Vec<SlabId>,
    lost: Vec<SlabId>,
    vacate: Vec<SlabId>,
    refused: Vec<Refusal>,
    ups: usize,
    downs: Vec<Arc<RemoteError>>,
}

impl Owner {
    fn start(config: &RemoteConfig, slabs: u64) -> Result<Self, RemoteError> {
        let (sender, events) = unbounded();
        let mut session = NewSession::greet(0, config, sender)?;
        if let Err(error) = session.reserve(slabs * SLAB) {
            session.give_up();
            return Err(error);
        }
        Ok(Self::of(session.keep()?, events))
    }

    fn resume(config: &RemoteConfig, former: Former) -> Result<Self, RemoteError> {
        let (sender, events) = unbounded();
        let session = Session::resume(0, config, former, sender)?;
        Ok(Self::of(session, events))
    }

    fn of(session: Session, events: Receiver<SessionEvent>) -> Self {
        Self {
            session,
            events,
            conns: HashMap::new(),
            held: Vec::new(),
            lost: Vec::new(),
            vacate: Vec::new(),
            refused: Vec::new(),
            ups: 0,
            downs: Vec::new(),
        }
    }

    fn note(&mut self, event: SessionEvent) {
        match event {
            SessionEvent::Up { held, .. } => {
                self.ups += 1;
                self.held = held;
                self.conns.clear();
            }
            SessionEvent::DataConnection { role, conn, .. } => {
                self.conns.insert(role, conn);
            }
            SessionEvent::Down { error, .. } => self.downs.push(error),
            SessionEvent::Lost { slabs, .. } => self.lost.extend(slabs),
            SessionEvent::Leased { slab, .. } => self.held.push(slab),
            SessionEvent::LeaseRefused { reason, .. } => self.refused.push(reason),
            SessionEvent::Vacate { slab, .. } => self.vacate.push(slab),
            SessionEvent::Withdrawn { .. } | SessionEvent::Closing { .. } => {}
        }
    }

    /// Notes what it was told by now.
    fn hear(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            self.note(event);
        }
    }

    fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            let event = self.events.recv_deadline(deadline);
            let event = event.unwrap_or_else(|_| panic!("in vain: {what}"));
            self.note(event);
        }
    }

    fn connected(&mut self) {
        self.until("both data connections", |owner| owner.conns.len() == 2);
    }

    fn lease(&mut self) -> SlabId {
        let before = self.held.len();
        self.session.request_slab();
        self.until("a slab", |owner| owner.held.len() > before);
        self.held[before]
    }

    fn write(&mut self, slab: SlabId, offset: u32, bytes: &[u8]) {
        let conn = self.conns.get_mut(&1).expect("a connection");
        let extents = [extent(slab, offset, bytes.len() as u32)];
        conn.submit_write(1, &extents, &[bytes]).expect("submitted");
        assert_eq!(complete(conn).expect("answered"), [(1, Ok(Vec::new()))]);
    }

    fn read(&mut self, slab: SlabId, offset: u32, length: u32) -> Vec<u8> {
        let conn = self.conns.get_mut(&0).expect("a connection");
        conn.submit_read(1, &[extent(slab, offset, length)])
            .expect("submitted");
        let mut done = complete(conn).expect("answered");
        assert_eq!(done.len(), 1);
        done.remove(0).1.expect("done")
    }
}

fn extent(slab: SlabId, offset: u32, length: u32) -> Extent {
    Extent {
        slab,
        offset,
        length,
    }
}

type Done = (u64, Result<Vec<u8>, ExtentError>);

/// Runs a connection until nothing is in flight.
fn complete(conn: &mut DataConn) -> Result<Vec<Done>, RemoteError> {
    let mut done = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    while conn.pending() > 0 {
        assert!(Instant::now() < deadline, "no answer");
        conn.flush()?;
        conn.receive(|id, outcome| done.push((id, outcome.map(|bytes| bytes.to_vec()))))?;
        thread::sleep(Duration::from_micros(100));
    }
    Ok(done)
}

fn page(seed: u8) -> Vec<u8> {
    (0..4096u32).map(|at| seed ^ (at * 7 % 251) as u8).collect()
}

#[test]
fn pages_travel_and_everything_is_given_back() {
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |_| {});
    let config = config(server.local_addr(), pki.client.clone());
    let mut owner = Owner::start(&config, 2).expect("a session");
    owner.connected();
    let slab = owner.lease();
    owner.write(slab, 8192, &page(1));
    assert_eq!(owner.read(slab, 8192, 4096), page(1));
    assert_eq!(owner.read(slab, 0, 4096), [0; 4096]);
    assert!(owner.session.lease_valid());
    owner.session.reserve(3 * SLAB).expect("there is room");
    let status = owner.session.status();
    assert!(status.connected && status.detail.is_none());
    assert_eq!((status.slabs, status.reserved_bytes), (1, 3 * SLAB));
    let too_much = owner.session.reserve(9 * SLAB).expect_err("no room");
    assert!(
        too_much.to_string().contains("9 MiB asked, 8 MiB free"),
        "{too_much}"
    );
    assert_eq!(owner.session.status().reserved_bytes, 3 * SLAB);
    owner.session.release_slab(slab);
    owner.session.close(PATIENCE).expect("a goodbye");
    assert_eq!(server.stats().leased_bytes, 0);
    assert!(server.stats().clients.is_empty());
}

#[test]
fn a_pager_of_the_most_shards_has_all_its_connections() {
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |_| {});
    // One for each shard, and the writer's.
    let data_connections = MAX_SHARDS as usize + 1;
    let config = RemoteConfig {
        data_connections,
        ..config(server.local_addr(), pki.client.clone())
    };
    let mut owner = Owner::start(&config, 1).expect("a session");
    owner.until("all data connections", |owner| {
        owner.conns.len() == data_connections
    });
}

#[test]
fn replies_are_told_apart_and_errors_name_their_extent() {
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |_| {});
    let config = config(server.local_addr(), pki.client.clone());
    let mut owner = Owner::start(&config, 2).expect("a session");
    owner.connected();
    let slab = owner.lease();
    let conn = owner.conns.get_mut(&0).expect("a connection");
    let pieces: Vec<Vec<u8>> = (0..64).map(page).collect();
    let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
    let extents: Vec<Extent> = (0..64).map(|at| extent(slab, at * 8192, 4096)).collect();
    conn.submit_write(1, &extents, &pieces).expect("submitted");
    for (id, at) in (100..164).zip(&extents) {
        conn.submit_read(id, &[*at]).expect("submitted");
    }
    conn.submit_read(2, &[extents[0], extent(slab, SLAB as u32, 1)])
        .expect("submitted");
    conn.submit_read(3, &[extents[0], extents[1], extent(SlabId(1), 0, 1)])
        .expect("submitted");
    assert!(matches!(
        conn.submit_read(3, &extents[..1]),
        Err(SubmitError::IdInUse(3))
    ));
    assert!(matches!(
        conn.submit_write(4, &extents, &pieces[1..]),
        Err(SubmitError::Illegal(_))
    ));
    assert!(matches!(
        conn.submit_read(4, &[]),
        Err(SubmitError::Illegal(_))
    ));
    let done: HashMap<u64, _> = complete(conn).expect("answered").into_iter().collect();
    assert_eq!(done.len(), 67);
    for (id, piece) in (100..164).zip(&pieces) {
        assert_eq!(done[&id].as_deref(), Ok(*piece));
    }
    assert_eq!(done[&2], Err(ExtentError::OutOfRange { index: 1, slab }));
    let slab = SlabId(1);
    assert_eq!(done[&3], Err(ExtentError::NotLeased { index: 2, slab }));
}

#[test]
fn bulk_is_queued_within_bounds_and_arrives() {
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |_| {});
    let config = config(server.local_addr(), pki.client.clone());
    let mut owner = Owner::start(&config, 8).expect("a session");
    owner.connected();
    let slabs: Vec<SlabId> = (0..8).map(|_| owner.lease()).collect();
    let whole: Vec<Extent> = slabs.iter().map(|id| extent(*id, 0, SLAB as u32)).collect();
    let bytes: Vec<u8> = (0..4 * SLAB).map(|at| (at / 511) as u8).collect();
    let conn = owner.conns.get_mut(&1).expect("a connection");
    let mut submitted = 0;
    for id in 0..1000 {
        match conn.submit_write(id, &whole[4 * (id as usize % 2)..][..4], &[&bytes]) {
            Ok(()) => submitted += 1,
            Err(SubmitError::QueueFull) => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert!((1..1000).contains(&submitted), "{submitted}");
    assert_eq!(complete(conn).expect("answered").len(), submitted);
    assert!(!conn.wants_write());
    conn.submit_read(1, &whole[..4]).expect("submitted");
    conn.submit_read(2, &whole[4..]).expect("submitted");
    for (_, read) in complete(conn).expect("answered") {
        assert!(read.expect("done") == bytes);
    }
    assert!(conn.sent_bytes() > 4 * SLAB && conn.received_bytes() > 8 * SLAB);
}

#[test]
fn cut_connections_come_back_and_nothing_is_lost() {
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |_| {});
    let gate = Gate::to(server.local_addr());
    let config = config(gate.address, pki.client.clone());
    let mut owner = Owner::start(&config, 4).expect("a session");
    owner.connected();
    let slab = owner.lease();
    owner.write(slab, 0, &page(9));
    for round in 0..5 {
        gate.cut();
        // Orders given meanwhile are carried out afterwards.
        owner.session.request_slab();
        owner.until("a connection again", |owner| owner.ups == round + 2);
        owner.connected();
        let wanted = 2 + round;
        owner.until("the slab asked for", |owner| owner.held.len() == wanted);
        assert_eq!(owner.read(slab, 0, 4096), page(9));
        let newest = owner.held[wanted - 1];
        owner.session.release_slab(newest);
        owner.held.pop();
        owner.session.request_slab();
        owner.until("another slab", |owner| owner.held.len() == wanted);
        if round == 2 {
            break;
        }
    }
    assert!(owner.lost.is_empty() && owner.refused.is_empty());
    let stats = server.stats();
    assert_eq!(stats.clients[0].slabs, owner.held.len() as u64);
    owner.session.close(PATIENCE).expect("a goodbye");
}

#[test]
fn a_new_guest_waits_for_a_server_that_is_slow_to_greet() {
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |_| {});
    // Its system takes connections, and nobody looks at them yet.
    let listener = TcpListener::bind(anywhere()).expect("a listener");
    let address = listener.local_addr().expect("bound");
    let mut config = config(address, pki.client.clone());
    // It stays so short for connections that are made later: those are tried again.
    config.timing.connect = Duration::from_millis(300);
    let silent = Owner::start(&config, 2).err();
    assert!(
        matches!(silent, Some(RemoteError::Control { .. })),
        "{silent:?}"
    );
    config.timing.patience = PATIENCE;
    let target = server.local_addr();
    let opens = thread::spawn(move || {
        thread::sleep(Duration::from_secs(2));
        Gate::at(listener, target)
    });
    let mut owner = Owner::start(&config, 2).expect("a session");
    let gate = opens.join().expect("no panic");
    owner.connected();
    let slab = owner.lease();
    owner.write(slab, 0, &page(5));
    let ups = owner.ups;
    gate.cut();
    owner.until("a connection again", |owner| owner.ups > ups);
    owner.connected();
    assert_eq!(owner.read(slab, 0, 4096), page(5));
    owner.session.close(PATIENCE).expect("a goodbye");
}

#[test]
fn many_requests_at_once_are_all_answered() {
    const MANY: usize = 1000;
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |config| {
        config.memory_bytes = MANY as u64 * SLAB;
    });
    let mut config = config(server.local_addr(), pki.client.clone());
    // Nothing else is asked meanwhile.
    config.timing.renew = PATIENCE;
    let mut owner = Owner::start(&config, MANY as u64).expect("a session");
    owner.connected();
    (0..MANY).for_each(|_| owner.session.request_slab());
    owner.until("all leases", |owner| owner.held.len() == MANY);
    for slab in std::mem::take(&mut owner.held) {
        owner.session.release_slab(slab);
    }
    let deadline = Instant::now() + PATIENCE;
    while server.stats().leased_bytes > 0 {
        assert!(Instant::now() < deadline, "some are not given back");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!((owner.ups, owner.refused.len()), (1, 0));
}

#[test]
fn an_outage_is_told_and_survived() {
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |_| {});
    let gate = Gate::to(server.local_addr());
    let config = config(gate.address, pki.client.clone());
    let mut owner = Owner::start(&config, 2).expect("a session");
    owner.connected();
    let slab = owner.lease();
    owner.write(slab, 0, &page(3));
    gate.shut(true);
    owner.until("word of it", |owner| owner.downs.len() > 2);
    let status = owner.session.status();
    assert!(!status.connected && status.detail.is_some(), "{status:?}");
    assert!(matches!(
        owner.session.reserve(SLAB),
        Err(RemoteError::Disconnected(_))
    ));
    let conn = owner.conns.get_mut(&0).expect("a connection");
    let dead = conn
        .submit_read(5, &[extent(slab, 0, 4096)])
        .map_err(drop)
        .and_then(|()| complete(conn).map_err(drop));
    assert!(dead.is_err() && conn.is_dead());
    assert!(owner.session.lease_valid());
    gate.shut(false);
    owner.until("the server again", |owner| owner.ups == 2);
    owner.connected();
    assert_eq!(owner.read(slab, 0, 4096), page(3));
    assert!(owner.session.status().detail.is_none());
}

#[test]
fn a_dead_data_connection_is_replaced_behind_a_fence() {
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |_| {});
    let config = config(server.local_addr(), pki.client.clone());
    let mut owner = Owner::start(&config, 1).expect("a session");
    owner.connected();
    let slab = owner.lease();
    let dead = owner.conns.remove(&0).expect("a connection");
    owner.session.reconnect_data(dead.generation());
    owner.connected();
    assert_eq!(owner.ups, 2, "a new greeting");
    // The same one is told dead again, late: it has been replaced.
    owner.session.reconnect_data(dead.generation());
    owner
        .session
        .reserve(SLAB)
        .expect("orders are obeyed in turn");
    assert_eq!(owner.read(slab, 0, 1), [0]);
    assert!(owner.session.status().connected);
    assert_eq!(owner.session.status().reconnections, 1);
    assert_ne!(owner.conns[&0].generation(), dead.generation());
}

/// A slab that arrives when nobody listens any more is given back with the others.
#[test]
fn what_comes_while_the_owner_goes_is_given_back() {
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |_| {});
    let config = config(server.local_addr(), pki.client.clone());
    let mut owner = Owner::start(&config, 1).expect("a session");
    owner.connected();
    let Owner {
        session, events, ..
    } = owner;
    drop(events);
    session.request_slab();
    while server.stats().leased_bytes == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(50));
    session.close(PATIENCE).expect("the server confirms it");
    assert_eq!(server.stats().leased_bytes, 0);
    assert!(server.stats().clients.is_empty());
}

#[test]
fn rdma_that_is_demanded_and_not_to_be_had_is_refused_at_once() {
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |config| config.rdma = Choice::Off);
    let mut config = config(server.local_addr(), pki.client.clone());
    config.addresses = vec![
        format!("rdma://{}", server.local_addr())
            .parse()
            .expect("legal"),
    ];
    let error = Owner::start(&config, 1).err().expect("it is refused");
    let words = with_causes(&error);
    assert!(
        words.contains("RDMA fails") && words.contains("offers none"),
        "{words}"
    );
    assert!(server.stats().clients.is_empty(), "nothing stays behind");
    config.addresses = vec![
        format!("tcp://{}", server.local_addr())
            .parse()
            .expect("legal"),
    ];
    let mut owner = Owner::start(&config, 1).expect("a session");
    owner.connected();
    assert_eq!(owner.session.status().transport.as_deref(), Some("TCP"));
}

#[test]
fn a_server_that_started_anew_has_lost_the_slabs() {
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |_| {});
    let address = server.local_addr();
    let config = config(address, pki.client.clone());
    let mut owner = Owner::start(&config, 2).expect("a session");
    owner.connected();
    let slab = owner.lease();
    server.stop();
    owner.until("word of it", |owner| !owner.downs.is_empty());
    let server = serve(&pki, address, |_| {});
    owner.until("the server again", |owner| owner.ups == 2);
    assert_eq!(owner.lost, [slab]);
    assert!(owner.held.is_empty());
    owner.connected();
    // The reservation is made anew, before what is asked for next.
    let next = owner.lease();
    assert_ne!(next, slab);
    assert_eq!(server.stats().reserved_bytes, 2 * SLAB);
}

#[test]
fn a_lease_that_ended_has_lost_the_slabs() {
    let pki = Pki::new();
    // Longer than a busy machine keeps the keeper from renewing.
    let lease = Duration::from_secs(12);
    let server = serve(&pki, anywhere(), |config| config.lease_timeout = lease);
    let gate = Gate::to(server.local_addr());
    let config = config(gate.address, pki.client.clone());
    let mut owner = Owner::start(&config, 2).expect("a session");
    owner.connected();
    let slab = owner.lease();
    thread::sleep(lease.mul_f64(1.5));
    // One that stood still renews it a moment later.
    let deadline = Instant::now() + PATIENCE;
    while !owner.session.lease_valid() {
        assert!(Instant::now() < deadline, "it is not renewed");
        thread::sleep(Duration::from_millis(5));
    }
    owner.hear();
    assert!(owner.lost.is_empty(), "renewed by itself");
    let ups = owner.ups;
    gate.shut(true);
    let deadline = Instant::now() + PATIENCE;
    while !server.stats().clients.is_empty() {
        assert!(Instant::now() < deadline, "the lease does not end");
        thread::sleep(Duration::from_millis(5));
    }
    assert!(
        !owner.session.lease_valid(),
        "ours ends before the server's"
    );
    gate.shut(false);
    owner.until("the server again", |owner| owner.ups > ups);
    assert_eq!(owner.lost, [slab]);
}

#[test]
fn a_successor_takes_over_what_was_leased() {
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |_| {});
    let config = config(server.local_addr(), pki.client.clone());
    let mut owner = Owner::start(&config, 2).expect("a session");
    owner.connected();
    let slab = owner.lease();
    owner.write(slab, 0, &page(4));
    drop(owner);
    let mut owner = Owner::start(&config, 2).expect("a session");
    owner.connected();
    assert_eq!(owner.held, [slab]);
    assert_eq!(owner.read(slab, 0, 4096), page(4));
    let other = RemoteConfig {
        secret: SessionSecret([8; 32]),
        ..config
    };
    let refused = Owner::start(&other, 1).err().expect("not its own");
    assert!(
        refused
            .to_string()
            .contains("under another certificate or secret"),
        "{refused}"
    );
}

/// Puts a copy of an identity where a test may change it.
fn own_files(dir: &tempfile::TempDir, from: &TlsFiles) -> TlsFiles {
    let place = |name: &str| dir.path().join(name);
    let own = TlsFiles {
        ca: place("ca.pem"),
        cert: place("client.pem"),
        key: place("client.key"),
    };
    put(from, &own);
    own
}

fn put(from: &TlsFiles, to: &TlsFiles) {
    for (from, to) in [
        (&from.ca, &to.ca),
        (&from.cert, &to.cert),
        (&from.key, &to.key),
    ] {
        std::fs::copy(from, to).expect("copied");
    }
}

#[test]
fn renewed_certificates_serve_the_next_connection_and_bad_ones_none() {
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |_| {});
    let gate = Gate::to(server.local_addr());
    let dir = tempfile::tempdir().expect("a folder");
    let files = own_files(&dir, &pki.client.clone().into());
    let config = config(gate.address, files.clone());
    let mut owner = Owner::start(&config, 2).expect("a session");
    owner.connected();
    let slab = owner.lease();
    owner.write(slab, 0, &page(9));
    let expires = |config: &RemoteConfig| config.identity.status().expires_unix_s;
    let first = expires(&config).expect("one is in use");

    std::fs::write(&files.cert, "half of a certif").expect("written");
    gate.cut();
    owner.until("a connection under what was good", |owner| owner.ups == 2);
    owner.connected();
    assert_eq!(owner.read(slab, 0, 4096), page(9));
    let refused = config.identity.status().refused.expect("told");
    assert!(refused.contains("no certificate in PEM form"), "{refused}");

    // The same name under the same CA: the session is found again.
    let ca = tempfile::tempdir().expect("a folder");
    for file in ["ca.pem", "ca.key"] {
        std::fs::copy(pki.dir.path().join(file), ca.path().join(file)).expect("copied");
    }
    let order = Order {
        kind: Kind::Client,
        name: "client",
        addresses: &[],
        days: 30,
    };
    let renewed = pki::issue(ca.path(), &order).expect("issued");
    put(&renewed.into(), &files);
    gate.cut();
    owner.until("a connection under the renewed one", |owner| owner.ups == 3);
    owner.connected();
    assert_eq!(owner.read(slab, 0, 4096), page(9));
    assert!(owner.lost.is_empty());
    assert_eq!(config.identity.status().refused, None);
    assert!(expires(&config).expect("in use") > first + 20 * 24 * 3600);
}

#[test]
fn a_successor_waits_for_certificates_that_are_no_good() {
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |_| {});
    let dir = tempfile::tempdir().expect("a folder");
    let files = own_files(&dir, &pki.client.clone().into());
    let good = config(server.local_addr(), pki.client.clone());
    let mut owner = Owner::start(&good, 1).expect("a session");
    owner.connected();
    let slab = owner.lease();
    owner.write(slab, 0, &page(5));
    drop(owner);

    std::fs::remove_file(&files.key).expect("removed");
    let config = config(server.local_addr(), files.clone());
    let former = Former {
        held: vec![slab],
        reserve_bytes: SLAB,
    };
    let mut owner = Owner::resume(&config, former).expect("it waits");
    owner.until("word of the trouble", |owner| !owner.downs.is_empty());
    assert!(matches!(*owner.downs[0], RemoteError::Identity(_)));
    put(&pki.client.clone().into(), &files);
    owner.connected();
    assert_eq!(owner.read(slab, 0, 4096), page(5));
}

#[test]
fn more_than_was_promised_is_had_where_there_is_room() {
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |_| {});
    let config = config(server.local_addr(), pki.client.clone());
    let mut owner = Owner::start(&config, 1).expect("a session");
    owner.connected();
    for slabs in 1..=8 {
        owner.lease();
        assert_eq!(server.stats().reserved_bytes, slabs * SLAB);
    }
    owner.session.request_slab();
    owner.until("a refusal", |owner| !owner.refused.is_empty());
    let status = owner.session.status();
    assert_eq!((status.slabs, status.reserved_bytes), (8, 8 * SLAB));
    assert_eq!(status.detail, None);
    assert!(matches!(owner.refused[..], [Refusal::ServerFull { .. }]));
    // It ends like any other promise: with what is leased of it.
    owner.session.release_slab(owner.held[7]);
    owner.session.reserve(2 * SLAB).expect("less");
    assert_eq!(server.stats().reserved_bytes, 7 * SLAB);
}

#[test]
fn slabs_wanted_back_are_told() {
    let pki = Pki::new();
    let server = serve(&pki, anywhere(), |_| {});
    let config = config(server.local_addr(), pki.client.clone());
    let mut owner = Owner::start(&config, 2).expect("a session");
    owner.connected();
    let slabs = [owner.lease(), owner.lease()];
    assert_eq!(server.set_memory(SLAB), 1);
    owner.until("word of it", |owner| !owner.vacate.is_empty());
    assert_eq!(owner.vacate, [slabs[1]]);
    owner.session.release_slab(slabs[1]);
    let deadline = Instant::now() + PATIENCE;
    while owner.session.status().reserved_bytes > SLAB {
        assert!(Instant::now() < deadline, "as much is promised");
        thread::sleep(Duration::from_millis(5));
    }
    owner.session.request_slab();
    owner.until("a refusal", |owner| !owner.refused.is_empty());
    assert_eq!(server.stats().leased_bytes, SLAB);
    // Once the server has memory again, what it took is reserved anew.
    server.set_memory(8 * SLAB);
    let deadline = Instant::now() + PATIENCE;
    while owner.session.status().reserved_bytes < 2 * SLAB {
        assert!(Instant::now() < deadline, "nothing is reserved");
        thread::sleep(Duration::from_millis(5));
    }
    owner.held.clear();
    owner.lease();
}

#[test]
fn what_is_wrong_at_the_start_is_said_at_once() {
    let pki = Pki::new();
    let foreign = Pki::new();
    let server = serve(&pki, anywhere(), |_| {});
    let address = server.local_addr();
    let fails = |config: &RemoteConfig, slabs, words: &str| {
        let error = Owner::start(config, slabs).err().expect(words);
        let text = format!("{:#}", anyhow::Error::new(error));
        assert!(text.contains(words), "'{words}' is not in: {text}");
    };
    let good = config(address, pki.client.clone());
    fails(&good, 9, "9 MiB asked, 8 MiB free");
    assert!(server.stats().clients.is_empty(), "nothing stays behind");

    // A port that was free just now may be another's by then: nobody has this one.
    let closed = "127.0.0.1:1".parse().expect("an address");
    let nobody = config(closed, pki.client.clone());
    fails(&nobody, 1, "check that outram-memserver runs there");

    fails(
        &config(address, foreign.client.clone()),
        1,
        "one 'outram pki' directory",
    );
    fails(&config(address, pki.server.clone()), 1, "wrong kind");
    let mut missing: TlsFiles = pki.client.clone().into();
    missing.key = "/nonexistent.key".into();
    fails(
        &config(address, missing),
        1,
        "cannot read private key /nonexistent.key",
    );
    let mut crossed: TlsFiles = pki.client.clone().into();
    crossed.key = pki.server.key.clone();
    fails(&config(address, crossed), 1, "does not fit the certificate");
    let mut distrusted: TlsFiles = pki.client.clone().into();
    distrusted.ca = foreign.server.ca.clone();
    fails(&config(address, distrusted), 1, "is no good under the CA");

    let elsewhere = issue(&pki.dir, Kind::Server, "elsewhere", "192.0.2.1");
    let other = Config::new(anywhere(), 64 << 20, elsewhere.into());
    let other = Server::start(other).expect("the server starts");
    let misnamed = config(other.local_addr(), pki.client.clone());
    fails(&misnamed, 1, "is not for '127.0.0.1'");

    let error = Owner::start(&config(address, pki.server.clone()), 1).err();
    assert!(matches!(
        error,
        Some(RemoteError::Identity(TlsError::Certificate { .. }))
    ));
    let none = RemoteConfig {
        addresses: Vec::new(),
        ..good
    };
    fails(&none, 1, "no memory server number 0");
}

#[test]
fn a_server_that_sends_nonsense_ends_the_connection_and_no_more() {
    let listener = TcpListener::bind(anywhere()).expect("a listener");
    let address = listener.local_addr().expect("bound");
    let replies: [&[u8]; 4] = [
        &[9; 16],
        &[0, 0, 0, 0, 1, 0, 0, 0, 42, 0, 0, 0, 0, 0, 0, 0],
        &[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0, 0, 0, 0, 0],
        &[1, 0, 200, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
    ];
    for reply in replies {
        let socket = TcpStream::connect(address).expect("connected");
        socket.set_nonblocking(true).expect("settable");
        let (mut far, _) = listener.accept().expect("accepted");
        let mut conn = DataConn::new("127.0.0.1:1".parse().expect("an address"), socket);
        conn.submit_read(1, &[extent(SlabId(1), 0, 4096)])
            .expect("submitted");
        far.write_all(reply).expect("sent");
        assert!(complete(&mut conn).is_err(), "{reply:?}");
        assert!(conn.is_dead());
        assert!(conn.submit_read(2, &[extent(SlabId(1), 0, 1)]).is_err());
        assert_eq!(conn.pending(), 1, "to be submitted again elsewhere");
        assert!(conn.as_fd().try_clone_to_owned().is_ok());
    }
}
