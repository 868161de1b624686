//! The backend dies, between two steps or at a named point within one, and another takes its guest
//! over: with what outlives a process, by the engine's own recovery.
//!
//! What outlives it: the table's words, the staging area, the kernel's part (guest memory, its
//! protections, messages that nobody has read), the servers, and what is written down (the limit,
//! which slabs the groups are). All else is made anew. The successor may die of its recovery, and so
//! may that one's.
//!
//! A discard that was read and is not in the table is forgotten: the page may hold zeros or what it
//! held last, but nothing older, and is one of both for good (see `pager/takeover.rs`).

use std::collections::{BTreeSet, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;

use outram_backend::crash_points::{Died, Point, arm_thread};
use outram_backend::engine::recovery::{StagedBytes, recover_page};
use outram_backend::engine::slots::{GroupPlace, SlabRef};
use outram_backend::engine::table::State;
use outram_backend::engine::{PageIndex, PageRun, StagingSlot};
use outram_wire::seal::Seal;

use crate::contents::Contents;
use crate::plugging::{Presence, changing_part, lasting_part};
use crate::ports::SimEvictor;
use crate::sabotage::Sabotage;
use crate::servers::SERVERS;
use crate::steps::{Action, Simulation, shards, shared};
use crate::world::{LIMIT_FIRST, PAGES, SHARD_PAGES, SHARDS, Violation, World};

/// Where the engine dies within a step. Those of the pager's threads have none here.
pub(crate) const POINTS: &[Point] = &[
    Point::EntryHalfWritten,
    Point::EvictBusy,
    Point::EvictProtected,
    Point::EvictStaged,
    Point::EvictHalfDecided,
    Point::EvictDecided,
    Point::EvictPunched,
    Point::EvictEnded,
    Point::EvictSettled,
    Point::WriteStored,
    Point::FetchAsked,
    Point::FetchCopied,
    Point::FetchMarked,
    Point::TakeBackCopied,
    Point::TakeBackMarked,
    Point::ZeroMade,
    Point::ZeroMarked,
    Point::FilledCopied,
    Point::FilledMarked,
    Point::UnprotectMarked,
    Point::Unprotected,
    Point::DiscardApplied,
    Point::MoveStaged,
    Point::MoveMarked,
];

/// What a backend writes down, for its successor.
#[derive(Debug)]
pub(crate) struct WrittenDown {
    pub(crate) limit: u64,
    pub(crate) staging: u32,
    pub(crate) kept: u64,
    /// Pages that compressed ones may take; those of the guest whose pages are huge take none.
    pub(crate) compressed: u64,
    pub(crate) groups: (Vec<GroupPlace>, u32),
}

impl Default for WrittenDown {
    fn default() -> Self {
        Self {
            limit: LIMIT_FIRST,
            staging: 24,
            kept: 30,
            compressed: 0,
            groups: (Vec::new(), 0),
        }
    }
}

/// Deaths of the backend.
#[derive(Debug, Default)]
pub(crate) struct Deaths {
    /// Of all kinds.
    pub(crate) count: u64,
    /// Of recovering.
    pub(crate) within_recovery: u64,
    /// The points at which it died.
    pub(crate) points: BTreeSet<Point>,
}

/// The staging area as it was left.
struct Left(Vec<Option<Contents>>);

impl StagedBytes for Left {
    fn staged(&self, slot: StagingSlot) -> Option<&[u8]> {
        self.0.get(slot.0 as usize)?.as_ref().map(Contents::bytes)
    }
}

impl Simulation {
    /// Does something, and may die of it.
    pub(crate) fn act_or_die(&mut self, action: Action) -> Result<(), Violation> {
        if self.calm || !self.chance(self.mortality) {
            return self.act(action);
        }
        let point = self.choose_point();
        let count = 1 + self.roll(3) as u32;
        match living(Some((point, count)), || self.act(action)) {
            Ok(acted) => acted,
            Err(Died(point)) => {
                self.deaths.points.insert(point);
                self.die();
                Ok(())
            }
        }
    }

    /// Half of the time one at which it has not died yet: some are passed seldom.
    fn choose_point(&mut self) -> Point {
        let died_at = &self.deaths.points;
        let seldom: Vec<Point> = (POINTS.iter().copied())
            .filter(|point| !died_at.contains(point))
            .collect();
        let among = match self.chance(500) && !seldom.is_empty() {
            true => &seldom,
            false => POINTS,
        };
        among[self.roll(among.len() as u64) as usize]
    }

    /// The backend is no more, and another one takes over.
    pub(crate) fn die(&mut self) {
        self.deaths.count += 1;
        self.note_what_happened();
        self.world.borrow_mut().used_at_death = self.shared.budget.used();
        self.world.borrow_mut().forget_volatile();
        if self.chance(200) {
            self.world.borrow_mut().open_staged();
        }
        loop {
            let point = self.chance(500).then_some(Point::EntryHalfWritten);
            let count = 1 + self.roll(u64::from(PAGES / 2)) as u32;
            match living(point.map(|point| (point, count)), || self.recover()) {
                Ok(()) => break,
                Err(Died(_)) => self.deaths.within_recovery += 1,
            }
        }
        self.find_lost_slabs();
        if !self.world.borrow().is(Sabotage::WakeNobody) {
            self.world.borrow_mut().wake_all();
        }
        // Nobody may fault for long, and the guest may be above its limit.
        self.world.borrow_mut().alerted = [true; SHARDS];
    }

    /// As the pager does it: every entry, then the shards, then the staging area's capacity.
    fn recover(&mut self) {
        let seal = match self.shared.key.seals() {
            true => Seal::On,
            false => Seal::Off,
        };
        let engine = shared(Arc::clone(&self.words), seal, self.shared.lost_pages);
        let left = {
            let world = &mut *self.world.borrow_mut();
            world.shared = Arc::clone(&engine);
            world.orders.clear();
            let (places, next) = &world.written.groups;
            engine.slots.restore(places, *next);
            engine.slots.set_keep_allowance(world.written.kept);
            engine
                .compressed
                .set_capacity(world.written.compressed, &engine.budget);
            engine.budget.set_limit(world.limit);
            for server in 0..SERVERS {
                let connected = world.servers.servers[server].connected;
                engine.slots.set_connected(server, connected);
            }
            Left(world.staging.clone())
        };
        for page in (0..PAGES).map(PageIndex) {
            let (is_there, is_present) = {
                let world = self.world.borrow();
                let trusts = world.is(Sabotage::TrustTable);
                let is_present = world.memory[page.0 as usize].is_some() && !trusts;
                (world.is_there(page.0), is_present)
            };
            if is_there {
                recover_page(&engine, page, is_present, &left);
            } else {
                let entry = engine.table.load(page);
                if entry.state != State::Absent {
                    engine.table.store(page, &entry.into_absent());
                }
            }
        }
        engine.slots.forget_unclaimed();
        self.evictor = SimEvictor::new(Rc::clone(&self.world));
        self.shards = shards(&self.world, &engine);
        for number in 0..SHARDS {
            let parts = [lasting_part(number), changing_part(number)];
            for part in parts {
                if !self.world.borrow().are_there(part) {
                    continue;
                }
                self.shards[number].plug(part);
                for page in part.pages() {
                    self.shards[number].adopt_recovered(page);
                }
            }
        }
        let world = &mut *self.world.borrow_mut();
        engine.staging.set_capacity(world.written.staging);
        world.backed_before = engine.staging.backed();
        self.shared = engine;
    }

    /// The sessions are resumed, and tell what the servers have no longer.
    fn find_lost_slabs(&mut self) {
        let world = &mut *self.world.borrow_mut();
        world.release_unknown_slabs();
        let gone: Vec<SlabRef> = (self.shared.slots.groups().iter())
            .map(|place| place.slab)
            .filter(|slab| {
                let server = &world.servers.servers[slab.server];
                !server.slabs.contains_key(&slab.slab)
            })
            .collect();
        let forgotten = self.shared.slots.forget(&gone);
        for notices in &mut world.servers.lost_notices {
            notices.extend(&forgotten.lost);
        }
        world.servers.degraded.extend(forgotten.degraded);
    }

    /// Pages leave groups that have lost a copy.
    pub(crate) fn move_degraded(&mut self) {
        let degraded = std::mem::take(&mut self.world.borrow_mut().servers.degraded);
        if degraded.is_empty() {
            return;
        }
        for shard in 0..SHARDS {
            self.empty_inbox(shard);
            self.shards[shard].on_vacate();
            self.shards[shard].pump();
        }
    }
}

/// Runs something that may die at a point.
fn living<T>(point: Option<(Point, u32)>, act: impl FnOnce() -> T) -> Result<T, Died> {
    if point.is_none() {
        return Ok(act());
    }
    arm_thread(point);
    let acted = catch_unwind(AssertUnwindSafe(act));
    arm_thread(None);
    acted.or_else(|payload| match payload.downcast::<Died>() {
        Ok(died) => Err(*died),
        Err(payload) => resume_unwind(payload),
    })
}

impl World {
    /// The process that died was of an earlier build, which leaves pages as they are in staging.
    fn open_staged(&mut self) {
        let (key, table) = (&self.shared.key, &self.shared.table);
        for page in (0..PAGES).map(PageIndex).filter(|_| key.seals()) {
            let entry = table.load(page);
            let Some(slot) = entry.staging else { continue };
            let held = &mut self.staging[slot.0 as usize];
            let opened = held
                .as_ref()
                .and_then(|held| held.opened(key, page, &entry));
            *held = opened.or_else(|| held.take());
        }
    }

    /// What only the dead process had is gone.
    fn forget_volatile(&mut self) {
        for number in 0..self.servers.writes.len() {
            // What was on its way arrives, or does not.
            if self.random.chance(500) {
                self.deliver(number);
            }
        }
        self.servers.writes.clear();
        self.servers.fetches.clear();
        self.servers.lost_notices = Default::default();
        self.servers.degraded.clear();
        self.live_fetches.clear();
        self.runs.clear();
        self.late_lifts.clear();
        self.alerted = [false; SHARDS];
        self.pin_answers.clear();
        self.device.clear();
        self.device_pages.fill(0);
        self.homing = false;
        self.limit = self.written.limit;
        if self.is(Sabotage::LoseStaging) {
            self.staging.fill(None);
        }
        self.deferred.fill(0);
        self.discarding.fill(0);
        for uffd in &mut self.uffds {
            uffd.inbox.clear();
            uffd.frozen = None;
            for page in uffd
                .punched
                .iter()
                .chain(&uffd.events)
                .flat_map(|run| run.pages())
            {
                self.discarding[page.0 as usize] += 1;
            }
        }
        for shard in 0..SHARDS {
            // What the VMM has unmapped is looked for no more.
            match self.changing_parts[shard] {
                Presence::There | Presence::Gone => {}
                Presence::Unmapped | Presence::Leaving => {
                    self.empty(shard);
                    self.changing_parts[shard] = Presence::Gone;
                }
            }
        }
    }

    /// Slabs that nobody knows of hold nothing, and go back.
    fn release_unknown_slabs(&mut self) {
        let known: HashSet<SlabRef> = self
            .shared
            .slots
            .groups()
            .iter()
            .map(|place| place.slab)
            .collect();
        for server in 0..SERVERS {
            let is_known = |slab: &u64| {
                known.contains(&SlabRef {
                    server,
                    slab: *slab,
                })
            };
            self.servers.servers[server]
                .slabs
                .retain(|slab, _| is_known(slab));
        }
    }

    fn wake_all(&mut self) {
        for shard in 0..SHARDS as u32 {
            self.wake(PageRun {
                first: PageIndex(shard * SHARD_PAGES),
                count: SHARD_PAGES,
            });
        }
    }
}
