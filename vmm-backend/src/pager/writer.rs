//! Write-back: drains staging to the memory servers in large batches, on connections of its own,
//! and leases slabs as they are needed.
//!
//! A batch whose connection dies is written again on the next one, into fresh slots. That is safe,
//! for the server lets no new connection in before the old one's last write has ended.
//!
//! What is written is what is staged: pages are sealed there (but for those that an earlier build left,
//! which are sealed on their way, into a buffer). Over TCP the kernel takes it from there; over RDMA it is
//! copied to the connection's registered memory, for staging is not registered: that would pin it, and a
//! retired slot's memory is given back by punching a hole, after which the device would go on with pages
//! that the file has no longer.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use outram_wire::logging::Seldom;
use outram_wire::server::SlabId;
use rustix::event::Timespec;

use super::inbox::{Inbox, Messages};
use super::ready::{Ready, Watched};
use super::shard_thread::ShardEvent;
use super::state_dir::StagingArea;
use crate::crash_points::{self, Point};
use crate::engine::slots::{Place, ServerIndex, SlabRef};
use crate::engine::staging::StagingPool;
use crate::engine::{PageSize, SharedRef, SlotId, StagedPage};
use crate::remote::{DataConn, Extent, ExtentError, Session, SubmitError};

/// Bytes of a batch at most, but at least a page: they amortise the round trip and hold no demand
/// read up for long.
const BATCH_BYTES: u64 = 256 << 10;

/// Pause after a server refused a slab.
const LEASE_PAUSE: Duration = Duration::from_secs(1);

/// How often emptied slabs are looked for when nothing else happens.
const IDLE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 500_000_000,
};

/// What the writer is told.
pub(super) enum WriterEvent {
    /// Pages of this shard wait in staging.
    Write(usize, Vec<StagedPage>),
    /// A connection for write-back.
    Connection(ServerIndex, DataConn),
    /// What is written over is to be dropped; another connection comes.
    Disconnected(ServerIndex),
    /// A server leased a slab, now in the slot pool.
    Leased(ServerIndex),
    /// A server leases no more for now.
    LeaseRefused(ServerIndex),
    /// End.
    Quit,
}

/// What others may see of the writer.
#[derive(Debug, Default)]
pub(super) struct WriterGauges {
    /// Bytes sent.
    pub(super) wire_sent_bytes: AtomicU64,
    /// Bytes received.
    pub(super) wire_received_bytes: AtomicU64,
}

#[derive(Clone, Copy)]
struct Order {
    shard: usize,
    page: StagedPage,
}

/// Where pages may be placed.
#[derive(Clone, Copy)]
enum Slabs {
    /// Where they may stay.
    Lasting,
    /// In slabs that their servers want back, which they are to be moved out of again.
    Vacating,
}

struct Batch {
    server: ServerIndex,
    orders: Vec<(Order, SlotId)>,
}

/// Whether a server may be asked for a slab.
#[derive(Clone, Copy, Default)]
struct Lease {
    asked: bool,
    not_before: Option<Instant>,
}

/// The writer of a guest.
pub(super) struct Writer {
    shared: SharedRef,
    staging: Arc<StagingArea>,
    sessions: Arc<[Session]>,
    shards: Vec<Inbox<ShardEvent>>,
    messages: Messages<WriterEvent>,
    gauges: Arc<WriterGauges>,
    conns: Vec<Option<DataConn>>,
    /// Servers whose connection takes no more before it has sent some of what it has.
    full: Vec<bool>,
    leases: Vec<Lease>,
    /// Pages to be written.
    queue: VecDeque<Order>,
    in_flight: HashMap<u64, Batch>,
    next_batch: u64,
    /// Where a batch's pages are sealed.
    sealed: Vec<u8>,
    closed_sent_bytes: u64,
    closed_received_bytes: u64,
}

impl Writer {
    /// A writer without connections.
    pub(super) fn new(
        shared: SharedRef,
        staging: Arc<StagingArea>,
        sessions: Arc<[Session]>,
        shards: Vec<Inbox<ShardEvent>>,
        messages: Messages<WriterEvent>,
    ) -> Self {
        Self {
            shared,
            staging,
            conns: sessions.iter().map(|_| None).collect(),
            full: vec![false; sessions.len()],
            leases: vec![Lease::default(); sessions.len()],
            sessions,
            shards,
            messages,
            gauges: Arc::default(),
            queue: VecDeque::new(),
            in_flight: HashMap::new(),
            next_batch: 0,
            sealed: Vec::new(),
            closed_sent_bytes: 0,
            closed_received_bytes: 0,
        }
    }

    /// What others may see.
    pub(super) fn gauges(&self) -> Arc<WriterGauges> {
        Arc::clone(&self.gauges)
    }

    /// Works until told to quit.
    pub(super) fn work(mut self) {
        loop {
            let ready = self.wait().unwrap_or_else(|error| {
                static CANNOT_WAIT: Seldom = Seldom::new();
                if CANNOT_WAIT.is_due() {
                    tracing::error!(%error, "the writer cannot wait for events; it tries again");
                }
                std::thread::sleep(Duration::from_millis(10));
                Ready::default()
            });
            for server in &ready.servers {
                self.read_replies(*server);
            }
            if ready.has_own(0) {
                self.messages.hush();
            }
            while let Some(event) = self.messages.next() {
                if matches!(event, WriterEvent::Quit) {
                    return;
                }
                self.handle(event);
            }
            self.submit(Slabs::Lasting);
            tidy(&mut self.queue, &self.shared.staging);
            self.note_promised();
            self.lease_ahead();
            self.let_pages_move();
            self.release_empty();
            self.publish();
        }
    }

    fn wait(&self) -> io::Result<Ready> {
        let conns = self.conns.iter().enumerate();
        let conns = conns.filter_map(|(server, conn)| Some((server, conn.as_ref()?)));
        Watched::new(&[self.messages.as_fd()], conns).wait(Some(&IDLE))
    }

    fn handle(&mut self, event: WriterEvent) {
        match event {
            WriterEvent::Write(shard, pages) => {
                let orders = pages.into_iter().map(|page| Order { shard, page });
                self.queue.extend(orders);
            }
            WriterEvent::Connection(server, conn) => {
                self.drop_conn(server);
                self.conns[server] = Some(conn);
            }
            WriterEvent::Disconnected(server) => self.drop_conn(server),
            WriterEvent::Leased(server) => self.leases[server] = Lease::default(),
            WriterEvent::LeaseRefused(server) => {
                self.leases[server] = Lease {
                    asked: false,
                    not_before: Some(Instant::now() + LEASE_PAUSE),
                };
            }
            WriterEvent::Quit => {}
        }
    }

    /// The next pages to write, claimed.
    fn claim(&mut self, most: usize) -> Vec<Order> {
        let mut orders = Vec::with_capacity(most);
        while orders.len() < most {
            let Some(order) = self.queue.pop_front() else {
                break;
            };
            // Otherwise the page was taken back meanwhile.
            if self.shared.staging.start_write(order.page.staging) {
                orders.push(order);
            }
        }
        orders
    }

    fn batch_pages(&self) -> usize {
        self.shared.page_size.pages_in(BATCH_BYTES, 1) as usize
    }

    /// On their way to a server, at most.
    fn batches_in_flight(&self) -> usize {
        self.shared.pace.queue_depth().get() as usize
    }

    /// Whether a server may be sent another batch: slots of one that cannot take it would keep others from it.
    /// One of several gets no more than its part of staging: while it does not answer, the others' pages need
    /// the rest.
    fn may_take(&self, server: ServerIndex) -> bool {
        if !self.is_reachable(server) || self.full[server] {
            return false;
        }
        let batches = self.in_flight.values().filter(|to| to.server == server);
        let (batches, pages) = batches.fold((0, 0), |(batches, pages), batch| {
            (batches + 1, pages + batch.orders.len())
        });
        let part = match self.sessions.len() {
            1 => usize::MAX,
            servers => self.shared.staging.capacity() as usize / servers,
        };
        batches < self.batches_in_flight() && (batches == 0 || pages + self.batch_pages() <= part)
    }

    /// Whether pages can be written to a server at all.
    fn is_reachable(&self, server: ServerIndex) -> bool {
        self.conns[server].is_some()
    }

    /// Slots left where pages can be written.
    fn reachable_room(&self) -> u64 {
        self.shared.slots.room(&|server| self.is_reachable(server))
    }

    /// Which servers may: asked for once, for others wait while all slabs are gone through.
    fn takers(&self) -> Vec<bool> {
        let servers = 0..self.sessions.len();
        servers.map(|server| self.may_take(server)).collect()
    }

    fn submit(&mut self, slabs: Slabs) {
        loop {
            let takers = self.takers();
            if !takers.contains(&true) {
                return;
            }
            let orders = self.claim(self.batch_pages());
            if orders.is_empty() {
                return;
            }
            let may_take = |server: ServerIndex| takers[server];
            let slots = match slabs {
                Slabs::Lasting => self.shared.slots.allocate(orders.len(), &may_take),
                Slabs::Vacating => self.shared.slots.allocate_vacating(orders.len(), &may_take),
            };
            let (orders, unplaced) = orders.split_at(slots.len());
            self.put_back(unplaced);
            let mut by_server: Vec<Batch> = Vec::new();
            for (&order, slot) in orders.iter().zip(slots) {
                let Some(Place { slab, .. }) = self.shared.slots.place(slot) else {
                    self.put_back(&[order]);
                    continue;
                };
                match by_server
                    .iter_mut()
                    .find(|batch| batch.server == slab.server)
                {
                    Some(batch) => batch.orders.push((order, slot)),
                    None => by_server.push(Batch {
                        server: slab.server,
                        orders: vec![(order, slot)],
                    }),
                }
            }
            let mut submitted = false;
            for batch in by_server {
                submitted |= self.submit_batch(batch);
            }
            if !submitted {
                return;
            }
        }
    }

    fn submit_batch(&mut self, batch: Batch) -> bool {
        let Some(extents) = self.extents_of(&batch) else {
            self.take_back(batch);
            return false;
        };
        let Some(conn) = &mut self.conns[batch.server] else {
            self.take_back(batch);
            return false;
        };
        let (size, seals) = (self.shared.page_size, self.shared.key.seals());
        if seals {
            seal_batch(&self.shared, &batch, &self.staging, &mut self.sealed);
        }
        let mut sealed = self.sealed.chunks_exact(size.length());
        let staged = batch.orders.iter().map(|(order, _)| order.page);
        let pages = staged.map(|staged| match seals && !staged.is_sealed {
            true => sealed.next().unwrap_or_default(),
            false => self.staging.page(staged.staging.slot),
        });
        let pages: Vec<&[u8]> = pages.collect();
        let id = self.next_batch;
        crash_points::pass(Point::WritePlaced);
        match conn.submit_write(id, &extents, &pages) {
            Ok(()) => {
                crash_points::pass(Point::WriteSent);
                self.next_batch += 1;
                self.in_flight.insert(id, batch);
                true
            }
            Err(SubmitError::QueueFull) => {
                self.full[batch.server] = true;
                self.take_back(batch);
                false
            }
            Err(error) => {
                tracing::info!(%error, "a write-back was not submitted");
                let server = batch.server;
                self.take_back(batch);
                self.lose_conn(server);
                false
            }
        }
    }

    /// Where a batch's pages go; none where the place of one is gone.
    fn extents_of(&self, batch: &Batch) -> Option<Vec<Extent>> {
        let mut extents = Vec::new();
        for (_, slot) in &batch.orders {
            let place = self.shared.slots.place(*slot)?;
            add_extent(&mut extents, extent_of(place, self.shared.page_size));
        }
        Some(extents)
    }

    /// Frees a batch's slots; its pages are written again later.
    fn take_back(&mut self, batch: Batch) {
        let (orders, slots): (Vec<_>, Vec<_>) = batch.orders.into_iter().unzip();
        slots
            .into_iter()
            .for_each(|slot| self.shared.slots.free(slot));
        self.put_back(&orders);
    }

    /// Has pages that were claimed wait again, before all others. Where one was taken back by its guest
    /// meanwhile, its place in staging is free now, and shards may be waiting for that.
    fn put_back(&mut self, orders: &[Order]) {
        let staging = &self.shared.staging;
        let held = |order: &&Order| staging.end_write(order.page.staging);
        let waiting: Vec<Order> = orders.iter().filter(held).copied().collect();
        if waiting.len() < orders.len() {
            self.shards.iter().for_each(Inbox::ring);
        }
        for order in waiting.into_iter().rev() {
            self.queue.push_front(order);
        }
    }

    fn read_replies(&mut self, server: ServerIndex) {
        let Some(mut conn) = self.conns[server].take() else {
            return;
        };
        let mut ended = Vec::new();
        let received = conn
            .flush()
            .and_then(|()| conn.receive(|id, result| ended.push((id, result.map(drop)))));
        self.conns[server] = Some(conn);
        self.full[server] = false;
        for (id, result) in ended {
            let Some(batch) = self.in_flight.remove(&id) else {
                continue;
            };
            match result {
                Ok(()) => self.acknowledge(batch),
                Err(error) => self.refuse(batch, error),
            }
        }
        if let Err(error) = received {
            tracing::info!(%error, "a write-back connection is lost");
            self.lose_conn(server);
        }
    }

    fn acknowledge(&self, batch: Batch) {
        crash_points::pass(Point::WriteAcknowledged);
        let mut by_shard: Vec<Vec<(StagedPage, SlotId)>> = vec![Vec::new(); self.shards.len()];
        for (order, slot) in batch.orders {
            by_shard[order.shard].push((order.page, slot));
        }
        for (shard, pages) in self.shards.iter().zip(by_shard) {
            if !pages.is_empty() {
                shard.send(ShardEvent::WrittenBack(pages));
            }
        }
    }

    /// The server does not know a slab that we hold: what lies in it is gone.
    fn refuse(&mut self, batch: Batch, error: ExtentError) {
        tracing::error!(%error, "a memory server refused a write-back");
        let (ExtentError::NotLeased { slab, .. } | ExtentError::OutOfRange { slab, .. }) = error;
        let slab = SlabRef {
            server: batch.server,
            slab: slab.0,
        };
        self.take_back(batch);
        forget_slabs(&self.shared, &self.shards, &[slab]);
    }

    fn lose_conn(&mut self, server: ServerIndex) {
        let generation = self.conns[server].as_ref().map(DataConn::generation);
        self.drop_conn(server);
        if let Some(generation) = generation {
            self.sessions[server].reconnect_data(generation);
        }
    }

    fn drop_conn(&mut self, server: ServerIndex) {
        self.full[server] = false;
        if let Some(conn) = self.conns[server].take() {
            self.closed_sent_bytes += conn.sent_bytes();
            self.closed_received_bytes += conn.received_bytes();
        }
        let dead: Vec<u64> = self
            .in_flight
            .iter()
            .filter(|(_, batch)| batch.server == server)
            .map(|(id, _)| *id)
            .collect();
        for id in dead {
            if let Some(batch) = self.in_flight.remove(&id) {
                self.take_back(batch);
            }
        }
    }

    /// Asks for a slab while the room left is less than a few batches and pages wait, or are to be moved.
    fn lease_ahead(&mut self) {
        let batch = self.batch_pages();
        let waiting = self.queue.len();
        let wanting = waiting + self.in_flight.len() * batch;
        let slots = &self.shared.slots;
        let has_to_move = slots.vacating_pages() > 0;
        let mut enough = (wanting + self.batches_in_flight() * batch) as u64;
        if has_to_move {
            // With less, none is let move.
            enough = enough.max(u64::from(self.shared.staging.taken()) + 2 * batch as u64);
        }
        let is_idle = wanting == 0 && !has_to_move;
        let takers = self.takers();
        if is_idle || slots.room(&|server| takers[server]) >= enough {
            slots.want_back(0);
            return;
        }
        if !takers.contains(&true) {
            return;
        }
        let now = Instant::now();
        let unreserved = |server: &ServerIndex| {
            let promise = self.sessions[*server].promise();
            promise
                .bytes
                .saturating_sub(promise.slabs * promise.slab_bytes)
        };
        let candidates = (0..self.sessions.len())
            .filter(|server| slots.is_connected(*server))
            .filter(|server| takers[*server])
            .filter(|server| !self.leases[*server].asked)
            .filter(|server| {
                self.leases[*server]
                    .not_before
                    .is_none_or(|time| time <= now)
            });
        let candidate = candidates.max_by_key(unreserved);
        // More than was ever promised, where another server does not keep its promise: not for slots that
        // pages in memory only keep.
        let is_promised = |server: &ServerIndex| {
            unreserved(server) >= self.sessions[*server].promise().slab_bytes
        };
        // Nor where one is on its way that was promised.
        let is_promised_one_asked = (0..self.sessions.len())
            .filter(|server| self.leases[*server].asked && slots.is_connected(*server))
            .any(|server| is_promised(&server));
        let may_exceed = has_to_move || (slots.kept() == 0 && !is_promised_one_asked);
        if let Some(server) = candidate.filter(|server| is_promised(server) || may_exceed) {
            self.leases[server].asked = true;
            self.sessions[server].request_slab();
            crash_points::pass(Point::LeaseAsked);
            return;
        }
        let mut leases = self.leases.iter().enumerate();
        if leases.any(|(server, lease)| lease.asked && slots.is_connected(server)) {
            return;
        }
        // No server lends more for now.
        self.want_kept_slots(waiting as u64);
        // Better there than that the guest waits for a server that has room.
        if self.reachable_room() == 0 {
            self.submit(Slabs::Vacating);
        }
    }

    /// Lets shards move what servers want back, as far as there is room for it.
    fn let_pages_move(&self) {
        let left = self.batch_pages() as u64;
        let may_take = |server| self.is_reachable(server);
        if self.shared.let_pages_move(left, &may_take) {
            self.shards.iter().for_each(Inbox::ring);
        }
    }

    /// Has pages that are in memory give up slots, where these are what others wait for.
    fn want_kept_slots(&self, waiting: u64) {
        let missing = waiting.saturating_sub(self.reachable_room());
        if missing > 0 && self.shared.slots.want_back(missing) {
            self.shards.iter().for_each(Inbox::ring);
        }
    }

    /// Notes what servers have promised: what is not needed of it, pages in memory may keep.
    fn note_promised(&self) {
        let promised = |(server, session): (ServerIndex, &Session)| {
            let promise = session.promise();
            let is_near = self.shared.slots.is_connected(server) && promise.slab_bytes > 0;
            // They are leased whole.
            is_near.then(|| promise.bytes / promise.slab_bytes * promise.slab_bytes)
        };
        let sessions = self.sessions.iter().enumerate();
        let bytes: u64 = sessions.filter_map(promised).sum();
        let on_its_way = self.sessions.len() * self.batches_in_flight() * self.batch_pages();
        let left = u64::from(self.shared.staging.capacity()) + on_its_way as u64;
        let pages = bytes / self.shared.page_size.bytes();
        self.shared.slots.set_promised(pages, left);
    }

    fn release_empty(&self) {
        for slab in self.shared.slots.drain_releasable() {
            crash_points::pass(Point::LeaseReturned);
            self.sessions[slab.server].release_slab(SlabId(slab.slab));
        }
    }

    fn publish(&self) {
        let live = self.conns.iter().flatten();
        let (sent, received) = live.fold(
            (self.closed_sent_bytes, self.closed_received_bytes),
            |(sent, received), conn| (sent + conn.sent_bytes(), received + conn.received_bytes()),
        );
        self.gauges.wire_sent_bytes.store(sent, Ordering::Relaxed);
        self.gauges
            .wire_received_bytes
            .store(received, Ordering::Relaxed);
    }
}

/// Forgets pages that were taken back meanwhile, before they outnumber the others: while nothing can be
/// written, a guest may have pages evicted and back for as long as it likes.
fn tidy(queue: &mut VecDeque<Order>, staging: &StagingPool) {
    if queue.len() > 2 * staging.capacity() as usize {
        queue.retain(|order| staging.is_held(order.page.staging));
    }
}

/// Puts those of a batch's pages that are not sealed yet into `sealed`, one after the other, as they may
/// leave the host. A page that is sent again for the same generation is the same once more: its staging
/// slot has not changed since.
fn seal_batch(shared: &SharedRef, batch: &Batch, staging: &StagingArea, sealed: &mut Vec<u8>) {
    sealed.clear();
    let pages = batch.orders.iter().map(|(order, _)| order.page);
    for staged in pages.filter(|staged| !staged.is_sealed) {
        let start = sealed.len();
        sealed.extend_from_slice(staging.page(staged.staging.slot));
        // The tag is in the page's entry since it was staged.
        let _ = shared
            .key
            .seal(staged.page, staged.generation, &mut sealed[start..]);
    }
}

/// The bytes of a page's place. They fit into one request: [`MAX_PAYLOAD_BYTES`] is two huge pages.
///
/// [`MAX_PAYLOAD_BYTES`]: outram_wire::server::data::MAX_PAYLOAD_BYTES
pub(super) fn extent_of(place: Place, size: PageSize) -> Extent {
    let length = size.bytes() as u32;
    Extent {
        slab: SlabId(place.slab.slab),
        offset: place.index * length,
        length,
    }
}

/// Adds one extent to those of a request: neighbours are one, for which the server has one thing to do.
pub(super) fn add_extent(extents: &mut Vec<Extent>, extent: Extent) {
    match extents.last_mut() {
        Some(last) if last.slab == extent.slab && last.offset + last.length == extent.offset => {
            last.length += extent.length;
        }
        _ => extents.push(extent),
    }
}

const _: () = assert!(PageSize::HUGE.length() <= outram_wire::server::data::MAX_PAYLOAD_BYTES);

/// Forgets slabs whose contents are gone, and tells every shard.
pub(super) fn forget_slabs(shared: &SharedRef, shards: &[Inbox<ShardEvent>], slabs: &[SlabRef]) {
    let groups: Arc<HashSet<u32>> = Arc::new(shared.slots.forget(slabs).lost);
    if !groups.is_empty() {
        for shard in shards {
            shard.send(ShardEvent::GroupsLost(Arc::clone(&groups)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Generation, PageIndex};
    use crate::pager::inbox::inbox;
    use crate::pager::test_world::World;
    use crate::remote::test_server::PATIENCE;

    #[test]
    fn a_server_that_takes_nothing_keeps_no_page_from_another() {
        let mut world = World::new();
        let (shard, heard) = inbox().expect("an eventfd");
        let (orders, messages) = inbox().expect("an eventfd");
        let page = StagedPage {
            page: PageIndex(7),
            staging: world.shared.staging.take(1).expect("a free slot")[0],
            generation: Generation(0),
            is_sealed: false,
        };
        // The slab that would be filled first is the other server's, of which there is no connection. It is in use:
        // otherwise it would be given back.
        let first = world.shared.slots.allocate(1, &|server| server == 0);
        assert_eq!(first.len(), 1);
        let conn = world.conns[1].pop().expect("a connection");
        let writer = Writer::new(
            Arc::clone(&world.shared),
            Arc::clone(&world.staging),
            Arc::clone(&world.sessions),
            vec![shard],
            messages,
        );
        let writing = std::thread::spawn(|| writer.work());
        orders.send(WriterEvent::Connection(1, conn));
        orders.send(WriterEvent::Write(0, vec![page]));
        let deadline = Instant::now() + PATIENCE;
        let written = loop {
            match heard.next() {
                Some(ShardEvent::WrittenBack(written)) => break written,
                _ => assert!(Instant::now() < deadline, "the page was never written"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        orders.send(WriterEvent::Quit);
        writing.join().expect("no panic");
        let [(staged, slot)] = written[..] else {
            panic!("{} pages were written", written.len());
        };
        assert_eq!(staged.page, page.page);
        let place = world.shared.slots.place(slot).expect("its slab is leased");
        assert_eq!(place.slab, world.slabs[1]);
    }

    #[test]
    fn a_page_taken_back_from_a_batch_that_is_lost_leaves_its_place_to_others() {
        let world = World::new();
        let (shard, heard) = inbox().expect("an eventfd");
        let (_orders, messages) = inbox().expect("an eventfd");
        let mut writer = Writer::new(
            Arc::clone(&world.shared),
            Arc::clone(&world.staging),
            Arc::clone(&world.sessions),
            vec![shard],
            messages,
        );
        let staging = &world.shared.staging;
        let all = staging.available();
        let tickets = staging.take(2).expect("free slots");
        let mut orders = Vec::new();
        for (page, ticket) in (7..).zip(&tickets) {
            assert!(staging.start_write(*ticket));
            let page = StagedPage {
                page: PageIndex(page),
                staging: *ticket,
                generation: Generation(0),
                is_sealed: true,
            };
            let slot = world.shared.slots.allocate(1, &|_| true)[0];
            orders.push((Order { shard: 0, page }, slot));
        }
        writer.in_flight.insert(1, Batch { server: 1, orders });
        // The guest wants the first of them back.
        staging.release(tickets[0].slot);
        assert_eq!(staging.available(), all - 2);
        writer.drop_conn(1);
        assert_eq!(staging.available(), all - 1);
        let rung = rustix::io::read(heard.as_fd(), &mut [0; 8]);
        assert!(rung.is_ok(), "shards are not told of a free place");
        let waiting: Vec<u32> = writer.queue.iter().map(|order| order.page.page.0).collect();
        assert_eq!(waiting, [8]);
    }

    #[test]
    fn neighbours_of_one_slab_are_one_extent() {
        let extent = |slab, offset, length| Extent {
            slab: SlabId(slab),
            offset,
            length,
        };
        let mut extents = Vec::new();
        // In order, in order again, with a gap, backwards, in another slab.
        for (slab, page) in [(1, 4), (1, 5), (1, 6), (1, 8), (1, 7), (2, 8)] {
            add_extent(&mut extents, extent(slab, page * 4096, 4096));
        }
        let expected = [
            extent(1, 4 * 4096, 3 * 4096),
            extent(1, 8 * 4096, 4096),
            extent(1, 7 * 4096, 4096),
            extent(2, 8 * 4096, 4096),
        ];
        assert_eq!(extents, expected);
    }

    #[test]
    fn pages_taken_back_before_they_are_written_are_forgotten() {
        const SLOTS: u32 = 4;
        let staging = StagingPool::new(SLOTS);
        let mut queue = VecDeque::new();
        let mut order = |page| {
            let staged = StagedPage {
                page: PageIndex(page),
                staging: staging.take(1).expect("a free slot")[0],
                generation: Generation(0),
                is_sealed: true,
            };
            tidy(&mut queue, &staging);
            let most = 2 * SLOTS as usize;
            assert!(queue.len() <= most, "{} orders wait", queue.len());
            queue.push_back(Order {
                shard: 0,
                page: staged,
            });
            staged.staging.slot
        };
        order(1000);
        for page in 0..100 {
            staging.release(order(page));
        }
        order(1001);
        queue.retain(|order| staging.is_held(order.page.staging));
        let left: Vec<u32> = queue.iter().map(|order| order.page.page.0).collect();
        assert_eq!(left, [1000, 1001]);
    }
}
