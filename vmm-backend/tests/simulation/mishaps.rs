//! What the operator does, what goes wrong, and how everything comes to rest.

use std::collections::HashSet;
use std::sync::Arc;

use outram_backend::engine::shard::Shard;
use outram_backend::engine::slots::SlabRef;
use outram_backend::engine::stats::FaultKind;
use outram_backend::engine::table::State;
use outram_backend::engine::{PageIndex, PageRun};

use crate::crashes::WrittenDown;
use crate::plugging::{Presence, changing_part};
use crate::ports::SimPorts;
use crate::sabotage::Sabotage;
use crate::servers::SERVERS;
use crate::steps::{PINNED_MOST, Simulation};
use crate::world::{Check, Memory, PAGES, SHARD_PAGES, SHARDS, STAGING_MOST, Violation, fail};

/// Smallest limit that the simulated operator sets; far above what the device pins.
const LIMIT_LEAST: u32 = 24;
/// Far more steps than anything takes to end.
const STEPS_TO_REST_MOST: u64 = 100_000;

impl Simulation {
    /// The operator changes the limit, and what is moved together; every shard is told.
    fn tune(&mut self) {
        if !self.world.borrow().homing {
            let world = &mut *self.world.borrow_mut();
            let limit = world.random.between(LIMIT_LEAST, 150);
            let staging = world.random.between(6, STAGING_MOST);
            let kept = world.random.below(50);
            let (granule, compressed) = match world.kind {
                Memory::Hugetlbfs => (1, 0),
                _ => (
                    1 << world.random.below(5),
                    u64::from(world.random.between(limit / 8, limit / 2)),
                ),
            };
            let shared = Arc::clone(&world.shared);
            world.limit = u64::from(limit);
            world.written = WrittenDown {
                limit: world.limit,
                staging,
                kept,
                compressed,
                groups: std::mem::take(&mut world.written.groups),
            };
            let beyond = if world.is(Sabotage::IgnoreLimit) {
                20
            } else {
                0
            };
            shared.budget.set_limit(world.limit + beyond);
            shared.staging.set_capacity(staging);
            shared.slots.set_keep_allowance(kept);
            // All that pages may have, or nothing beyond.
            let promised = world.random.below(2) * u64::from(PAGES);
            shared.slots.set_promised(promised, 0);
            shared.compressed.set_capacity(compressed, &shared.budget);
            shared.pace.set_granule(granule);
            let depth = world.random.between(1, 9);
            let depth = depth.try_into().expect("within bounds");
            shared.pace.set_queue_depth(depth);
            let workers = world.random.between(1, 9);
            shared.pace.set_workers(workers, SHARDS as u32);
            shared.pace.set_protects_reads(world.random.chance(500));
            for slot in shared.staging.drain_retired() {
                world.staging[slot.0 as usize] = None;
            }
            // Slots in use beyond a capacity set before come on top until they are free.
            world.backed_before = shared.staging.backed();
            world.alerted = [true; SHARDS];
        }
    }

    /// Something goes wrong.
    pub(crate) fn mishap(&mut self) {
        let server = self.roll(SERVERS as u64) as usize;
        let is_hugetlbfs = self.world.borrow().kind == Memory::Hugetlbfs;
        if is_hugetlbfs && self.chance(200) {
            // Others take from the pool, or give back to it.
            let left = [0, 0, 3, PAGES][self.roll(4) as usize];
            self.world.borrow_mut().pool_left = left;
        }
        // Huge pages are not brought home, nor plugged.
        let moves = !is_hugetlbfs;
        // On hugetlbfs nothing heals a lost page: few of them, or soon all are.
        let loses = !is_hugetlbfs || self.chance(30);
        match self.roll(110) {
            60..66 if !loses => {}
            0..12 => self.world.borrow_mut().set_connected(server, false),
            12..40 => self.world.borrow_mut().set_connected(server, true),
            40..60 => self.tune(),
            60..62 => self.world.borrow_mut().restart_empty(server),
            62..66 => self.world.borrow_mut().flip_stored_bit(),
            80..84 => self.world.borrow_mut().spoil_compressed(),
            66..70 => self.vacate(),
            70..76 => self.freeze(),
            76..79 if moves => self.start_homing(),
            79 => self.stop_homing(),
            100.. if moves => self.plug_or_unplug(),
            _ => self.thaw(),
        }
        self.tell_lost_groups();
        self.move_degraded();
    }

    /// The operator wants everything home: the limit is lifted, and every shard is told.
    fn start_homing(&mut self) {
        if std::mem::replace(&mut self.world.borrow_mut().homing, true) {
            return;
        }
        let keeps_limit = self.world.borrow().is(Sabotage::KeepLimit);
        if !keeps_limit {
            self.world.borrow_mut().limit = 2 * u64::from(PAGES);
            self.shared.budget.set_limit(2 * u64::from(PAGES));
            self.shared.compressed.set_capacity(0, &self.shared.budget);
        }
        for shard in 0..SHARDS {
            self.empty_inbox(shard);
            self.shards[shard].start_homing();
            self.shards[shard].pump();
        }
    }

    /// It is called off, or done.
    fn stop_homing(&mut self) {
        if !std::mem::take(&mut self.world.borrow_mut().homing) {
            return;
        }
        self.tune();
        for shard in 0..SHARDS {
            self.empty_inbox(shard);
            self.shards[shard].stop_homing();
            self.shards[shard].pump();
        }
    }

    /// Once all shards say that they are home they are: from then on the kernel alone could answer
    /// for every page, whatever goes on. It begins anew later.
    pub(crate) fn arrive_home(&mut self) -> Result<(), Violation> {
        let is_home = |shard: &Shard<SimPorts>| shard.may_be_released();
        if !self.world.borrow().homing || !self.shards.iter().all(is_home) {
            return Ok(());
        }
        for page in (0..PAGES).map(PageIndex) {
            let entry = self.shared.table.load(page);
            if !matches!(entry.state, State::Absent | State::Resident | State::Lost) {
                return fail(Check::NotHome, format!("page {page}: {entry:?}"));
            }
        }
        self.homecomings += 1;
        if self.calm || self.chance(50) {
            self.stop_homing();
        }
        Ok(())
    }

    /// Each shard hears of lost slabs at its own time.
    fn tell_lost_groups(&mut self) {
        for shard in 0..SHARDS {
            if !self.calm && self.chance(500) {
                continue;
            }
            let lost: HashSet<u32> =
                std::mem::take(&mut self.world.borrow_mut().servers.lost_notices[shard]);
            if !lost.is_empty() {
                self.empty_inbox(shard);
                self.shards[shard].on_groups_lost(&lost);
                self.shards[shard].pump();
            }
        }
    }

    /// A server wants a slab back.
    fn vacate(&mut self) {
        let slab = {
            let world = &mut *self.world.borrow_mut();
            let server = world.random.below(SERVERS as u64) as usize;
            let slabs: Vec<_> = world.servers.servers[server]
                .slabs
                .keys()
                .copied()
                .collect();
            let Some(number) = world.random.index(slabs.len()) else {
                return;
            };
            SlabRef {
                server,
                slab: slabs[number],
            }
        };
        if self.shared.slots.vacate(slab).is_some() {
            for shard in 0..SHARDS {
                self.empty_inbox(shard);
                self.shards[shard].on_vacate();
                self.shards[shard].pump();
            }
        }
    }

    /// A part of a shard is mapped anew, without its protections.
    fn freeze(&mut self) {
        let shard = self.roll(SHARDS as u64) as usize;
        let run = {
            let world = &mut *self.world.borrow_mut();
            let first = shard as u32 * SHARD_PAGES + world.random.below(32) as u32;
            let run = PageRun {
                first: PageIndex(first),
                count: 16,
            };
            let busy = |page| world.shared.table.state(page) == State::Busy;
            if world.uffds[shard].frozen.is_some() || !world.are_there(run) || run.pages().any(busy)
            {
                return;
            }
            world.uffds[shard].frozen = Some(run);
            world.remap(run);
            run
        };
        self.empty_inbox(shard);
        self.shards[shard].freeze(run);
        self.shards[shard].on_mapped_anew(run);
        self.shards[shard].pump();
    }

    fn thaw(&mut self) {
        for shard in 0..SHARDS {
            if self.world.borrow_mut().uffds[shard].frozen.take().is_some() {
                self.empty_inbox(shard);
                self.shards[shard].thaw();
                if self.world.borrow().changing_parts[shard] == Presence::Unmapped {
                    self.shards[shard].freeze(changing_part(shard));
                }
                self.shards[shard].pump();
            }
        }
    }

    /// Lets everything come to an end that can, and checks that nobody is left waiting.
    pub(crate) fn settle(&mut self) -> Result<(), Violation> {
        self.calm = true;
        self.change_weather();
        for server in 0..SERVERS {
            self.world.borrow_mut().set_connected(server, true);
        }
        self.tell_lost_groups();
        self.move_degraded();
        self.thaw();
        self.finish_unplugging();
        {
            // Where it has no page of its own to give up, it can only wait; and what the device pins
            // it may not give up.
            let left = &mut self.world.borrow_mut().pool_left;
            *left = (*left).max(PINNED_MOST + 1);
        }
        let mut steps = 0;
        while self.step()? {
            steps += 1;
            if steps > STEPS_TO_REST_MOST {
                let world = self.world.borrow();
                return fail(
                    Check::Stuck,
                    format!("no end: {:?}: {:?}", self.possible(), world.summary()),
                );
            }
        }
        if self.world.borrow().homing {
            return fail(Check::Stuck, "all is quiet, and not everything is home");
        }
        self.world.borrow().check_quiet()?;
        self.calm = false;
        self.change_weather();
        Ok(())
    }
}

impl Simulation {
    /// Adds what this life of the backend has seen to what the former ones have.
    pub(crate) fn note_what_happened(&mut self) {
        let stats = &self.shared.stats;
        let faults = FaultKind::ALL.map(|kind| (kind.name(), stats.faults(kind)));
        let judged = stats.fetched_ahead_used.get() + stats.fetched_ahead_unused.get();
        assert!(
            judged <= stats.fetched_ahead.get(),
            "{judged} of fewer pages that were fetched ahead are known as used or unused"
        );
        let happened = [
            ("clean evictions", stats.evicted_clean.get()),
            ("filled evictions", stats.evicted_filled.get()),
            ("staged evictions", stats.evicted_staged.get()),
            ("failed runs", stats.failed_runs.get()),
            ("write-backs", stats.written_back.get()),
            ("removals", stats.removed.get()),
            ("waits for room", stats.stalls_limit.get()),
            ("waits for the pool", stats.stalls_pool.get()),
            ("waits for a server", stats.stalls_server.get()),
            ("duplicates", stats.duplicates.get()),
        ];
        for (name, count) in faults.into_iter().chain(happened) {
            *self.happened.entry(name).or_default() += count;
        }
    }

    /// The run went everywhere: a simulation that does nothing checks nothing.
    pub(crate) fn assert_lively(&mut self, steps: u64) {
        if steps < 20_000 {
            return;
        }
        self.note_what_happened();
        let kind = self.world.borrow().kind;
        let moves = [
            ("homecomings", self.homecomings),
            ("plugged parts", self.plugged),
        ];
        let deaths = [
            ("deaths", self.deaths.count),
            ("deaths within recovery", self.deaths.within_recovery),
        ];
        self.happened.extend(moves.into_iter().chain(deaths));
        let never = match kind {
            Memory::Tmpfs | Memory::TmpfsTwoCopies => &["waits for the pool"][..],
            // Few pages keep their slot there, and so few come back protected; none is compressed.
            Memory::Hugetlbfs => &["homecomings", "plugged parts", "protected", "compressed"],
        };
        for (name, count) in &self.happened {
            assert!(
                *count > 0 || never.contains(name),
                "no {name} in {steps} steps"
            );
        }
    }
}
