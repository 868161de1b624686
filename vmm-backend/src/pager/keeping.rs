//! Housekeeping: hears what the sessions with the servers say, passes it on, and lets memory of
//! retired staging slots go.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, select};
use outram_wire::causes::with_causes;
use outram_wire::server::SlabId;
use outram_wire::units::format_size;

use super::inbox::Inbox;
use super::limits::BudgetRule;
use super::promises::Promises;
use super::record::Records;
use super::report::ServerNotes;
use super::shard_thread::ShardEvent;
use super::state_dir::{StagingArea, StateError};
use super::writer::{WriterEvent, forget_slabs};
use crate::crash_points::{self, Point};
use crate::engine::SharedRef;
use crate::engine::slots::{GroupPlace, MOST_GROUPS, ServerIndex, SlabRef};
use crate::remote::{Session, SessionEvent};

/// How often leases are checked and retired slots are given back.
const TICK: Duration = Duration::from_millis(200);

/// The housekeeping of a pager.
pub(super) struct Housekeeping {
    pub(super) shared: SharedRef,
    pub(super) staging: Arc<StagingArea>,
    pub(super) sessions: Arc<[Session]>,
    pub(super) events: Receiver<SessionEvent>,
    pub(super) shards: Vec<Inbox<ShardEvent>>,
    pub(super) writer: Inbox<WriterEvent>,
    pub(super) notes: Arc<ServerNotes>,
    pub(super) rule: Arc<BudgetRule>,
    pub(super) records: Records,
    pub(super) promises: Arc<Promises>,
    /// Servers that are connected by what was heard: of one that came back, what it lost is heard first. Its
    /// status shows it sooner, and until then pages that are in memory alone would pass for stored.
    pub(super) up: Vec<bool>,
}

impl Housekeeping {
    /// Works until `stop` says so.
    pub(super) fn work(mut self, stop: &Receiver<()>) {
        let tick = crossbeam_channel::tick(TICK);
        let events = self.events.clone();
        loop {
            select! {
                recv(stop) -> _ => return,
                recv(tick) -> _ => self.tick(),
                recv(events) -> event => match event {
                    Ok(event) => self.hear(event),
                    Err(_) => {
                        tracing::error!("all sessions have ended");
                        return;
                    }
                },
            }
        }
    }

    fn tick(&mut self) {
        // What was said before is heard before.
        let said = self.events.clone();
        said.try_iter().for_each(|event| self.hear(event));
        for (server, session) in self.sessions.iter().enumerate() {
            let is_connected = self.up[server] && session.status().connected;
            self.shared
                .slots
                .set_connected(server, is_connected && session.lease_valid());
        }
        self.promises.look();
        if self
            .staging
            .backing()
            .give_back_retired(&self.shared.staging)
        {
            self.rule.apply(&self.shared);
            self.shards.iter().for_each(Inbox::ring);
        }
    }

    fn hear(&mut self, event: SessionEvent) {
        match event {
            SessionEvent::Up {
                server,
                slab_bytes,
                held,
                ..
            } => self.up(server, slab_bytes, &held),
            SessionEvent::DataConnection { server, role, conn } => {
                let is_connected = self.up[server] && self.sessions[server].lease_valid();
                self.shared.slots.set_connected(server, is_connected);
                match self.shards.get(role) {
                    Some(shard) => shard.send(ShardEvent::Connection(server, conn)),
                    None => self.writer.send(WriterEvent::Connection(server, conn)),
                }
            }
            SessionEvent::Down { server, error } => {
                // The session has told, where it is not as it was at the try before.
                tracing::debug!(server, %error, "a memory server is out of reach");
                self.up[server] = false;
                self.shared.slots.set_connected(server, false);
                // What moves from there gives back what it holds: all of the guest may wait for that.
                self.shards.iter().for_each(Inbox::ring);
            }
            SessionEvent::Lost { server, slabs } => {
                tracing::error!(
                    server,
                    slabs = slabs.len(),
                    "a memory server lost what it held"
                );
                let slabs: Vec<SlabRef> = slabs
                    .iter()
                    .map(|slab| SlabRef {
                        server,
                        slab: slab.0,
                    })
                    .collect();
                self.notes.note_lost(server, slabs.len() as u64);
                forget_slabs(&self.shared, &self.shards, &slabs);
            }
            SessionEvent::Leased { server, slab } => self.leased(server, slab),
            SessionEvent::LeaseRefused { server, reason } => {
                // It is asked again each second.
                if self.notes.note_refusal(server, reason.to_string()) {
                    tracing::warn!(server, %reason, "a memory server leases no slab");
                }
                self.writer.send(WriterEvent::LeaseRefused(server));
            }
            SessionEvent::Vacate { server, slab } => {
                crash_points::pass(Point::VacateAsked);
                let slab = SlabRef {
                    server,
                    slab: slab.0,
                };
                if self.shared.slots.vacate(slab).is_some() {
                    tracing::info!(
                        server,
                        slab = slab.slab,
                        "moving pages out of a slab that its server wants back"
                    );
                    self.shards
                        .iter()
                        .for_each(|shard| shard.send(ShardEvent::Vacate));
                }
                self.writer.ring();
            }
            SessionEvent::Withdrawn { server } => {
                for shard in &self.shards {
                    shard.send(ShardEvent::Disconnected(server));
                }
                self.writer.send(WriterEvent::Disconnected(server));
            }
            SessionEvent::Closing { server } => {
                tracing::warn!(server, "a memory server is being stopped");
            }
        }
    }

    fn leased(&mut self, server: ServerIndex, id: SlabId) {
        let (bytes, size) = (
            self.sessions[server].status().slab_bytes,
            self.shared.page_size,
        );
        let pages = (bytes / size.bytes()) as u32;
        if pages == 0 {
            // It was started anew with smaller slabs.
            let reason = format!("its slabs of {} hold no page of {size}", format_size(bytes));
            return self.give_back(server, id, reason);
        }
        if self.shared.slots.next_group() >= MOST_GROUPS {
            let reason = "this guest has had as many slabs as can be numbered: start it anew";
            return self.give_back(server, id, reason.to_owned());
        }
        let slab = SlabRef { server, slab: id.0 };
        crash_points::pass(Point::LeaseGranted);
        // Before any page lies there: a successor has to find it.
        if let Err(error) = self.note_group(slab, pages) {
            let reason = format!("its slab cannot be noted down: {}", with_causes(&error));
            return self.give_back(server, id, reason);
        }
        crash_points::pass(Point::LeaseRecorded);
        self.shared.slots.add_slab(slab, pages);
        self.notes.clear_refusal(server);
        self.writer.send(WriterEvent::Leased(server));
    }

    /// Gives a slab back that is of no use: as if its server had leased none.
    fn give_back(&self, server: ServerIndex, id: SlabId, reason: String) {
        // Another is asked for each second.
        if self.notes.note_refusal(server, reason.clone()) {
            tracing::error!(server, %reason, "a slab is given back");
        }
        self.sessions[server].release_slab(id);
        self.writer.send(WriterEvent::LeaseRefused(server));
    }

    /// Writes down the groups there are and the one to come.
    fn note_group(&self, slab: SlabRef, slots: u32) -> Result<(), StateError> {
        let mut groups = self.shared.slots.groups();
        let number = self.shared.slots.next_group();
        groups.push(GroupPlace {
            number,
            slab,
            slots,
        });
        self.records.write_groups(&groups, number + 1)
    }

    fn up(&mut self, server: ServerIndex, slab_bytes: u64, held: &[SlabId]) {
        tracing::info!(
            server,
            slab_bytes,
            held = held.len(),
            "connected to a memory server"
        );
        self.up[server] = true;
        self.shared.slots.set_connected(server, true);
        // What the server keeps for us, and the pool has not, holds nothing of ours: it was never taken in, or is
        // about to be given back anyway. Only this thread takes any in, as it hears of them, and of each that `held`
        // names it has heard by now.
        let groups = self.shared.slots.groups();
        let known: HashSet<SlabRef> = groups.iter().map(|group| group.slab).collect();
        for slab in held {
            if !known.contains(&SlabRef {
                server,
                slab: slab.0,
            }) {
                self.sessions[server].release_slab(*slab);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::Sender;

    use super::*;
    use crate::pager::inbox::{Messages, inbox};
    use crate::pager::test_world::{SERVERS, World};
    use crate::remote::{RemoteError, SessionStatus};

    /// The upkeep of a world, the shard that it rings, and who tells it what sessions do.
    struct Upkeep<'a> {
        world: &'a World,
        keeping: Housekeeping,
        shard: Messages<ShardEvent>,
        says: Sender<SessionEvent>,
    }

    impl<'a> Upkeep<'a> {
        fn of(world: &'a World) -> Self {
            let records = Records::of(world.dir.path());
            let (says, events) = crossbeam_channel::unbounded();
            let (to_shard, shard) = inbox().expect("an eventfd");
            let keeping = Housekeeping {
                shared: Arc::clone(&world.shared),
                staging: Arc::clone(&world.staging),
                sessions: Arc::clone(&world.sessions),
                events,
                shards: vec![to_shard],
                writer: inbox().expect("an eventfd").0,
                notes: Arc::new(ServerNotes::new(SERVERS)),
                rule: Arc::new(BudgetRule::new(1, 1)),
                records: records.clone(),
                promises: Arc::new(Promises::new(Arc::clone(&world.sessions), records, 0)),
                up: vec![false; SERVERS],
            };
            Self {
                world,
                keeping,
                shard,
                says,
            }
        }

        fn hear(&mut self, events: impl IntoIterator<Item = SessionEvent>) {
            for event in events {
                self.says.send(event).expect("it is heard");
            }
            self.keeping.tick();
        }

        fn status(&self) -> SessionStatus {
            self.world.sessions[0].status()
        }

        /// The first server's slab.
        fn slab(&self) -> SlabId {
            SlabId(self.world.slabs[0].slab)
        }

        /// The first server is greeted, and keeps these for us.
        fn up(&self, held: &[SlabId]) -> SessionEvent {
            let status = self.status();
            SessionEvent::Up {
                server: 0,
                instance: status.instance,
                slab_bytes: status.slab_bytes,
                held: held.to_vec(),
            }
        }
    }

    #[test]
    fn a_server_that_came_back_is_connected_once_its_losses_are_heard() {
        let world = World::new();
        let slots = &world.shared.slots;
        let mut upkeep = Upkeep::of(&world);
        let status = upkeep.status();
        assert!(status.connected && world.sessions[0].lease_valid());
        upkeep.hear([]);
        assert!(!slots.is_connected(0), "nothing was heard of it");
        upkeep.hear([upkeep.up(&[])]);
        assert!(slots.is_connected(0));
        assert!(!upkeep.shard.have_rung());
        upkeep.hear([SessionEvent::Down {
            server: 0,
            error: Arc::new(RemoteError::Disconnected(status.address.clone())),
        }]);
        assert!(
            !slots.is_connected(0),
            "its status is shown before its losses are told"
        );
        assert!(upkeep.shard.have_rung(), "moves may hold what others need");
        let lost = SessionEvent::Lost {
            server: 0,
            slabs: vec![upkeep.slab()],
        };
        upkeep.hear([lost, upkeep.up(&[])]);
        assert!(slots.is_connected(0));
        let left: Vec<SlabRef> = slots.groups().iter().map(|group| group.slab).collect();
        assert_eq!(left, world.slabs[1..]);
    }

    #[test]
    fn a_slab_that_no_page_can_lie_in_is_given_back_and_no_other() {
        let world = World::new();
        let slots = &world.shared.slots;
        let mut upkeep = Upkeep::of(&world);
        let slab = upkeep.slab();
        let has_it = |upkeep: &Upkeep<'_>| {
            // Orders are obeyed in turn.
            world.sessions[0].reserve(0).expect("it is connected");
            upkeep.status().slabs == 1
        };
        upkeep.hear([upkeep.up(&[slab])]);
        assert!(has_it(&upkeep), "it is in the pool");
        // It comes, and what is told of it lies unheard when the server is greeted again.
        slots.forget(&world.slabs[..1]);
        let leased = SessionEvent::Leased { server: 0, slab };
        upkeep.hear([leased, upkeep.up(&[slab])]);
        assert!(has_it(&upkeep), "it has come before");
        // Pages left it.
        slots.vacate(world.slabs[0]);
        assert_eq!(slots.drain_releasable(), world.slabs[..1]);
        upkeep.hear([upkeep.up(&[slab])]);
        assert!(!has_it(&upkeep));
    }
}
