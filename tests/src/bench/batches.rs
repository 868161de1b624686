//! Batches of pages on their way to a memory server and back, by the client library that pagers use, and
//! the same over a raw socket: what our protocol and our two programs add to TCP.
//!
//! One batch after the other, each waited for. The library's batches are as the pager makes them: a write
//! of pages whose places are a row, and one of pages that have their places here and there; and reads of what is
//! fetched ahead of somebody who goes through pages that left in a row. The raw socket's are one request of all
//! pages in a row.
//!
//! Beside that, the library's reads while another client has asked for much and takes nothing of it, by those while
//! there is none: no connection's stall is to delay another.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use crossbeam_channel::{Receiver, unbounded};
use outram_backend::remote::{
    AHEAD_BYTES, DataConn, Extent, NewSession, RemoteConfig, Session as Lease, SessionEvent, Timing,
};
use outram_wire::identity::Identity;
use outram_wire::server::{ServerAddress, SessionSecret, SlabId};
use outram_wire::tls::TlsFiles;
use outram_wire::units::VmId;
use outram_wire::verbs::Choice;
use rustix::event::{PollFd, PollFlags, poll};
use rustls::ClientConfig;

use super::floors::RANGE;
use super::layout::pin_self;
use super::page_store::Client;
use super::session::{SLAB_BYTES, Session};
use super::usage::{ThreadUsage, process_cpu};
use super::watched_memory::PAGE_BYTES;

/// What is done with batches of [`RANGE`] pages.
pub const BATCHES: [&str; 3] = [
    "64 neighbours written to a server",
    "64 pages written to a server",
    "64 pages read from a server",
];

/// What is read beside a client that stalls, and where there is none.
pub const BESIDE_A_STALL: &str = "64 pages read from a server, beside a client that stalls";
/// The same where there is none, right before and after.
pub const WITHOUT_A_STALL: &str = "64 pages read from a server, without such a client";

/// Bytes of a batch.
const BATCH_BYTES: usize = RANGE * PAGE_BYTES;
/// Longest wait for a server.
const PATIENCE: Duration = Duration::from_secs(30);

/// Turns that the library and the raw socket take: the machine's speed changes from one moment to the next.
const TURNS: usize = 16;

/// Turns with a client that stalls: each waits for it to.
const STALLED_TURNS: usize = 4;
/// What that client asks for, by requests as the pager's: several times what sockets hold, of either side.
const STALLED_READS: u64 = 1024;
/// How long until it can get no more.
const UNTIL_STALLED: Duration = Duration::from_millis(100);

/// Batches of one sort.
#[derive(Clone, Copy, Default)]
struct Done {
    pages: u64,
    took: Duration,
    client: Duration,
    server: Duration,
}

impl Done {
    fn add(&mut self, other: Self) {
        self.pages += other.pages;
        self.took += other.took;
        self.client += other.client;
        self.server += other.server;
    }
}

/// Measures both ways, by the library and raw, in turns.
pub fn measure(session: &mut Session) -> Result<()> {
    // A batch costs what some eight single pages do.
    let count = (session.settings.faults / 2 / TURNS).max(1);
    let store = session.page_store(RANGE)?;
    let raw = Client::connect(&store.address)?;
    let way = Way::of(session)?;
    let ours = Line::open(&way)?;
    let cpus = session.layout.pager.clone();
    let (ours_pid, raw_pid) = (session.server.pid(), store.pid());
    // A thread of its own, so that it alone is pinned.
    let measured = std::thread::spawn(move || -> Result<_> {
        pin_self(&cpus)?;
        let (mut ours, mut raw) = (ours, raw);
        let pages: Vec<u8> = (0..BATCH_BYTES).map(|at| (at % 251) as u8).collect();
        let mut back = vec![0; BATCH_BYTES];
        let (row, apart) = (vec![ours.extent(0, BATCH_BYTES)], ours.places_apart());
        let mut measured = [(Done::default(), Done::default()); 3];
        let mut stalled = (Done::default(), Done::default());
        let [in_a_row, scattered, read] = &mut measured;
        for _ in 0..TURNS {
            for (written, places) in [(&mut *in_a_row, &row), (&mut *scattered, &apart)] {
                let ours = times(count, ours_pid, || ours.write(&pages, places))?;
                written.0.add(ours);
                let raw = times(count, raw_pid, || raw.write_run(0, &pages))?;
                written.1.add(raw);
            }
            // Like the pager, which opens pages where they came to.
            read.0.add(times(count, ours_pid, || ours.read(|_, _| {}))?);
            read.1
                .add(times(count, raw_pid, || raw.read_run(0, &mut back))?);
        }
        for _ in 0..STALLED_TURNS {
            let mut read = || times(count, ours_pid, || ours.read(|_, _| {}));
            stalled.0.add(read()?);
            let stalling = Line::stalled(&way)?;
            stalled.1.add(read()?);
            stalling.close()?;
            stalled.0.add(read()?);
        }
        ensure!(back == pages, "the raw socket brings other bytes");
        back.fill(0);
        ours.read(|start, bytes| back[start..start + bytes.len()].copy_from_slice(bytes))?;
        for back in [back, ours.read_back(&apart)?] {
            ensure!(
                back == pages,
                "WRONG RESULT: pages came back with other bytes"
            );
        }
        ours.close()?;
        Ok((measured, stalled))
    });
    let (measured, (without, beside)) = measured.join().expect("no panic")?;
    for (what, (ours, raw)) in BATCHES.into_iter().zip(measured) {
        note(session, what, &ours);
        note(session, &format!("{what}, raw socket"), &raw);
    }
    note_rate(session, WITHOUT_A_STALL, &without);
    note_rate(session, BESIDE_A_STALL, &beside);
    Ok(())
}

fn note_rate(session: &mut Session, what: &str, done: &Done) {
    let rate = done.pages as f64 / done.took.as_secs_f64();
    session
        .results
        .note(&format!("{what}: rate"), "pages/s", rate);
}

fn note(session: &mut Session, what: &str, done: &Done) {
    note_rate(session, what, done);
    let results = &mut session.results;
    let pages = done.pages as f64;
    for (who, cpu) in [("client", done.client), ("server", done.server)] {
        let us = cpu.as_secs_f64() * 1e6 / pages;
        results.note(&format!("{what}: CPU of {who}"), "µs/page", us);
    }
}

fn times(count: usize, server: u32, mut batch: impl FnMut() -> Result<()>) -> Result<Done> {
    // Buffers grow at first.
    batch()?;
    let serving = process_cpu(server)?;
    let client = ThreadUsage::now()?;
    let began = Instant::now();
    for _ in 0..count {
        batch()?;
    }
    Ok(Done {
        took: began.elapsed(),
        pages: (count * RANGE) as u64,
        client: ThreadUsage::now()?.since(&client).cpu,
        server: process_cpu(server)?.saturating_sub(serving),
    })
}

/// How the memory server is reached.
struct Way {
    address: ServerAddress,
    identity: Arc<Identity<ClientConfig>>,
}

impl Way {
    fn of(session: &Session) -> Result<Self> {
        let pki = |file: &str| session.lab.path("pki").join(file);
        let files = TlsFiles {
            ca: pki("ca.pem"),
            cert: pki("client.pem"),
            key: pki("client.key"),
        };
        let address = session.server_address.parse();
        Ok(Self {
            address: address.context("the memory server's address")?,
            identity: Arc::new(Identity::load(files)?),
        })
    }
}

/// A session with the memory server, a slab of it and a connection.
struct Line {
    lease: Lease,
    conn: DataConn,
    slab: SlabId,
}

impl Line {
    fn open(way: &Way) -> Result<Self> {
        let config = RemoteConfig {
            addresses: vec![way.address.clone()],
            identity: Arc::clone(&way.identity),
            vm: VmId(uuid::Uuid::new_v4()),
            secret: SessionSecret::random()?,
            arrives: false,
            data_connections: 1,
            rdma: Choice::Off,
            timing: Timing::default(),
        };
        let (sender, events) = unbounded();
        let mut greeted = NewSession::greet(0, &config, sender)?;
        greeted.reserve(SLAB_BYTES)?;
        let lease = greeted.keep()?;
        lease.request_slab();
        let (conn, slab) = granted(&events)?;
        Ok(Self { lease, conn, slab })
    }

    /// Of a client that has asked for much, of which it takes nothing.
    fn stalled(way: &Way) -> Result<Self> {
        let mut line = Self::open(way)?;
        for id in 0..STALLED_READS {
            let extent = line.extent(0, AHEAD_BYTES as usize);
            line.conn.submit_read(id, &[extent])?;
        }
        std::thread::sleep(UNTIL_STALLED);
        Ok(line)
    }

    fn extent(&self, offset: usize, length: usize) -> Extent {
        Extent {
            slab: self.slab,
            offset: offset as u32,
            length: length as u32,
        }
    }

    /// A place for each page of a batch, none beside another: of neighbours, the pager makes one extent.
    fn places_apart(&self) -> Vec<Extent> {
        let of = |page| self.extent(BATCH_BYTES + 2 * page * PAGE_BYTES, PAGE_BYTES);
        (0..RANGE).map(of).collect()
    }

    fn write(&mut self, pages: &[u8], places: &[Extent]) -> Result<()> {
        let pieces: Vec<&[u8]> = pages.chunks(PAGE_BYTES).collect();
        self.conn.submit_write(0, places, &pieces)?;
        self.finish(|_, _| {})
    }

    fn read_back(&mut self, places: &[Extent]) -> Result<Vec<u8>> {
        let mut back = Vec::new();
        self.conn.submit_read(0, places)?;
        self.finish(|_, bytes| back.extend_from_slice(bytes))?;
        Ok(back)
    }

    /// Reads a batch; `take` gets each answer's place in it, and its bytes.
    fn read(&mut self, mut take: impl FnMut(usize, &[u8])) -> Result<()> {
        let length = AHEAD_BYTES as usize;
        for start in (0..BATCH_BYTES).step_by(length) {
            let extent = self.extent(start, length.min(BATCH_BYTES - start));
            self.conn.queue_read(start as u64, &[extent])?;
        }
        let mut came = 0;
        self.finish(|start, bytes| {
            came += bytes.len();
            take(start as usize, bytes);
        })?;
        ensure!(came == BATCH_BYTES, "the memory server sent {came} bytes");
        Ok(())
    }

    /// Sends what is queued and takes replies until none is due.
    fn finish(&mut self, mut take: impl FnMut(u64, &[u8])) -> Result<()> {
        let mut refused = None;
        loop {
            self.conn.flush()?;
            self.conn.receive(|id, outcome| match outcome {
                Ok(bytes) => take(id, bytes),
                Err(error) => refused = Some(error),
            })?;
            if let Some(error) = refused {
                return Err(error).context("the memory server refused");
            }
            if self.conn.pending() == 0 {
                return Ok(());
            }
            let mut wanted = PollFlags::IN;
            wanted.set(PollFlags::OUT, self.conn.wants_write());
            let fd = self.conn.as_fd();
            poll(&mut [PollFd::new(&fd, wanted)], None)?;
        }
    }

    fn close(self) -> Result<()> {
        drop(self.conn);
        self.lease.close(PATIENCE).context("giving the slab back")
    }
}

/// Waits for a connection and a slab.
fn granted(events: &Receiver<SessionEvent>) -> Result<(DataConn, SlabId)> {
    let deadline = Instant::now() + PATIENCE;
    let (mut found, mut leased) = (None, None);
    loop {
        match events.recv_deadline(deadline)? {
            SessionEvent::DataConnection { conn, .. } => found = Some(conn),
            SessionEvent::Leased { slab, .. } => leased = Some(slab),
            SessionEvent::LeaseRefused { reason, .. } => bail!("no slab: {reason:?}"),
            _ => {}
        }
        match (found.take(), leased) {
            (Some(conn), Some(slab)) => return Ok((conn, slab)),
            (conn, _) => found = conn,
        }
    }
}
