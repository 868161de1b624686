//! What the pager's upkeep works with, in tests: two real memory servers, each of which has leased a slab.

use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, unbounded};
use outram_memserver::Server;

use super::state_dir::{StagingArea, StateDir};
use crate::engine::shard::tests::bench;
use crate::engine::slots::{SlabRef, SlotPool};
use crate::engine::{PageSize, SharedRef};
use crate::remote::test_server::{PATIENCE, Pki, SLAB, anywhere, config, serve};
use crate::remote::{DataConn, NewSession, Session, SessionEvent};

pub(super) const SERVERS: usize = 2;
/// Slots of the staging area.
const STAGING: u32 = 8;

pub(super) struct World {
    pub(super) dir: tempfile::TempDir,
    pub(super) shared: SharedRef,
    pub(super) staging: Arc<StagingArea>,
    pub(super) sessions: Arc<[Session]>,
    /// By server; the first's is the smaller, which is filled first.
    pub(super) slabs: Vec<SlabRef>,
    /// By server.
    pub(super) conns: Vec<Vec<DataConn>>,
    _events: Receiver<SessionEvent>,
    _servers: Vec<Server>,
    _pki: Pki,
}

impl World {
    pub(super) fn new() -> Self {
        let pki = Pki::new();
        let serve = |_| serve(&pki, anywhere(), |_| {});
        let servers: Vec<Server> = (0..SERVERS).map(serve).collect();
        let address = |server: &Server| server.local_addr().to_string().parse();
        let mut config = config(servers[0].local_addr(), pki.client.clone());
        let addresses = servers.iter().map(address).collect::<Result<_, _>>();
        config.addresses = addresses.expect("addresses");
        let (sender, events) = unbounded();
        let greet = |server| {
            let mut greeted =
                NewSession::greet(server, &config, sender.clone()).expect("a greeting");
            greeted.reserve(SLAB).expect("there is room");
            let session = greeted.keep().expect("a session");
            session.request_slab();
            session
        };
        let sessions: Arc<[Session]> = (0..SERVERS).map(greet).collect();
        let (mut conns, mut leased) = (Vec::new(), [None; SERVERS]);
        conns.resize_with(SERVERS, Vec::new);
        let deadline = Instant::now() + PATIENCE;
        while leased.contains(&None) || conns.iter().any(Vec::is_empty) {
            match events.recv_deadline(deadline).expect("in time") {
                SessionEvent::DataConnection { server, conn, .. } => conns[server].push(conn),
                SessionEvent::Leased { server, slab } => leased[server] = Some(slab.0),
                _ => {}
            }
        }
        let slab = |(server, slab)| {
            Some(SlabRef {
                server,
                slab: slab?,
            })
        };
        let slabs: Vec<SlabRef> = leased.into_iter().enumerate().filter_map(slab).collect();
        let mut shared = Arc::into_inner(bench::shared(1, STAGING)).expect("nobody else has it");
        shared.slots = SlotPool::new(SERVERS);
        for slab in &slabs {
            shared.slots.set_connected(slab.server, true);
            let slots = (SLAB / PageSize::BASE.bytes()) as u32;
            shared
                .slots
                .add_slab(*slab, slots >> (SERVERS - 1 - slab.server));
        }
        let dir = tempfile::tempdir().expect("a directory");
        let staging = StateDir::open(dir.path()).create_staging(STAGING, PageSize::BASE);
        Self {
            dir,
            shared: Arc::new(shared),
            staging: Arc::new(staging.expect("a staging area")),
            sessions,
            slabs,
            conns,
            _events: events,
            _servers: servers,
            _pki: pki,
        }
    }
}
