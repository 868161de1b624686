//! What may happen next: one small thing of the guest, the kernel, the engine's threads, the
//! servers or the operator.

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;

use outram_backend::engine::budget::Budget;
use outram_backend::engine::policy::TwoQueues;
use outram_backend::engine::shard::{FetchFailed, Shard};
use outram_backend::engine::slots::SlotPool;
use outram_backend::engine::staging::StagingPool;
use outram_backend::engine::stats::{FaultKind, Stats};
use outram_backend::engine::table::{PageTable, State};
use outram_backend::engine::tag::TagKey;
use outram_backend::engine::{PageIndex, PageRun, PinId, Shared, SharedRef};

use crate::contents::Store;
use crate::ports::{SimEvictor, SimPorts};
use crate::sabotage::Sabotage;
use crate::servers::{SERVERS, Started};
use crate::world::{
    Check, DeviceRequest, Message, OutRun, PAGES, SHARD_PAGES, SHARDS, STAGING_MOST, Violation,
    World, fail, shard_of,
};

/// Smallest limit that the simulated operator sets; far above what the device pins.
const LIMIT_LEAST: u32 = 24;
const PINNED_MOST: u32 = 6;

pub(crate) struct Simulation {
    pub(crate) world: Rc<RefCell<World>>,
    pub(crate) shared: SharedRef,
    pub(crate) shards: Vec<Shard<SimPorts>>,
    evictor: SimEvictor,
    next_pin: u64,
    /// The guest issues nothing new, and nothing new goes wrong.
    calm: bool,
}

fn shared() -> SharedRef {
    let stats = Stats::new();
    stats.found(u64::from(PAGES));
    Arc::new(Shared {
        table: PageTable::in_memory(PAGES),
        budget: Budget::new(80),
        staging: StagingPool::new(24),
        slots: SlotPool::new(SERVERS),
        key: TagKey::new([7; 32]),
        stats,
    })
}

impl Simulation {
    pub(crate) fn new(seed: u64, sabotage: Option<Sabotage>) -> Self {
        let shared = shared();
        shared.slots.set_keep_allowance(30);
        let world = World::new(seed, Arc::clone(&shared), sabotage);
        let world = Rc::new(RefCell::new(world));
        let shards = (0..SHARDS).map(|shard| {
            let range = PageRun {
                first: PageIndex(shard as u32 * SHARD_PAGES),
                count: SHARD_PAGES,
            };
            let world = Rc::clone(&world);
            let ports = SimPorts { shard, world };
            let policy = Box::new(TwoQueues::new(range));
            Shard::new(range, Arc::clone(&shared), ports, policy)
        });
        let mut simulation = Self {
            shards: shards.collect(),
            evictor: SimEvictor::new(Rc::clone(&world)),
            world,
            shared,
            next_pin: 0,
            calm: false,
        };
        simulation.adopt_populated();
        for server in 0..SERVERS {
            simulation.world.borrow_mut().set_connected(server, true);
        }
        simulation
    }

    /// The guest's firmware lies in memory before the pager comes.
    fn adopt_populated(&mut self) {
        for page in 0..PAGES / 3 {
            let mut world = self.world.borrow_mut();
            let store = Store::random(&mut world.random);
            let contents = world.zero.with(store);
            world.memory[page as usize] = Some(contents.clone());
            world.allowed[page as usize] = vec![contents];
            drop(world);
            self.shards[shard_of(page)].adopt_populated(PageIndex(page));
        }
    }

    /// One step, and the check of everything after it.
    pub(crate) fn step(&mut self) -> Result<(), Violation> {
        let used_before = self.shared.budget.used();
        let dice = {
            let mut world = self.world.borrow_mut();
            world.clock_us += 1;
            world.random.below(1000)
        };
        match dice {
            0..300 => self.guest_step()?,
            300..400 => self.kernel_step(),
            400..520 => self.owner_step(),
            520..700 => self.evictor_step()?,
            700..760 => self.hand_back_run(),
            760..840 => self.writer_step(),
            840..920 => self.fetch_step(),
            920..940 => self.pump_alerted(),
            940..960 => self.retry(),
            960..985 => self.device_step()?,
            _ if self.calm => {}
            985..990 => self.discard(),
            990..993 => self.tune(),
            _ => self.mishap(),
        }
        self.sabotage();
        self.world.borrow_mut().check(&self.shards, used_before)
    }

    fn roll(&self, end: u64) -> u64 {
        self.world.borrow_mut().random.below(end)
    }

    fn chance(&self, per_mille: u64) -> bool {
        self.world.borrow_mut().random.chance(per_mille)
    }

    fn pick(&self, len: usize) -> Option<usize> {
        self.world.borrow_mut().random.index(len)
    }

    fn guest_step(&mut self) -> Result<(), Violation> {
        let world = &mut *self.world.borrow_mut();
        let vcpus = world.vcpus.len();
        let mut number = world.random.below(vcpus as u64) as usize;
        if world.vcpus[number].waits && world.random.chance(30) {
            return world.interrupt(number);
        }
        // One that can go on does.
        let runs = |number: &usize| !world.vcpus[*number].waits;
        match (number..vcpus).chain(0..number).find(runs) {
            Some(next) => number = next,
            None => return Ok(()),
        }
        if world.vcpus[number].access.is_none() {
            if self.calm {
                return Ok(());
            }
            world.choose_access(number);
        }
        world.try_access(number)
    }

    fn kernel_step(&mut self) {
        let world = &mut *self.world.borrow_mut();
        let first = world.random.below(SHARDS as u64) as usize;
        let is_busy = |shard: &usize| {
            let uffd = &world.uffds[*shard];
            !uffd.faults.is_empty() || uffd.changing > 0 || !uffd.punched.is_empty()
        };
        let mut shards = (first..SHARDS).chain(0..first);
        let shard = shards.find(is_busy).unwrap_or(first);
        match world.random.below(4) {
            0 => world.queue_removal(shard),
            1 => world.return_from_discards(shard),
            _ => {
                let most = world.random.below(5) as usize + 1;
                world.read_messages(shard, most);
            }
        }
    }

    /// A shard's owner deals with what it has read.
    fn owner_step(&mut self) {
        let first = self.roll(SHARDS as u64) as usize;
        for shard in (first..SHARDS).chain(0..first) {
            if self.empty_inbox(shard) {
                return self.shards[shard].pump();
            }
        }
    }

    /// An owner deals with what it has read before it looks at anything else.
    fn empty_inbox(&mut self, shard: usize) -> bool {
        let messages = std::mem::take(&mut self.world.borrow_mut().uffds[shard].inbox);
        let some = !messages.is_empty();
        for message in messages {
            match message {
                Message::Fault(_) if self.sabotaged(Sabotage::DropFault, 20) => {}
                Message::Fault(fault) => {
                    self.shards[shard].on_fault(PageIndex(fault.page), fault.fault);
                }
                Message::Removed(run) => {
                    if !self.sabotaged(Sabotage::DropRemove, 200) {
                        self.shards[shard].on_removed(run);
                    }
                    self.world.borrow_mut().end_discard(run);
                }
            }
        }
        some
    }

    fn evictor_step(&mut self) -> Result<(), Violation> {
        let Some(mut run) = self.take_run(false) else {
            return Ok(());
        };
        // Protecting is tried again until the VMM's mappings are settled.
        let waits = run.steps == 0 && self.world.borrow().is_changing(run.shard);
        if !waits {
            run.steps += 1;
            // A refusal is the run's own affair: it ends, and its pages stay.
            let _ = run.run.advance(&self.shared, &mut self.evictor);
        }
        let about_to_punch = run.steps == 3 && !run.run.has_ended();
        let checked = match about_to_punch && !waits {
            true => self.world.borrow().check_drops(&run),
            false => Ok(()),
        };
        self.world.borrow_mut().runs.push(run);
        checked
    }

    fn take_run(&mut self, ended: bool) -> Option<OutRun> {
        let world = &mut *self.world.borrow_mut();
        let fitting = |world: &World| -> Vec<usize> {
            let runs = world.runs.iter().enumerate();
            let fitting = runs.filter(|(_, run)| run.run.has_ended() == ended);
            fitting.map(|(number, _)| number).collect()
        };
        let numbers = fitting(world);
        let number = numbers[world.random.index(numbers.len())?];
        Some(world.runs.swap_remove(number))
    }

    fn hand_back_run(&mut self) {
        let Some(run) = self.take_run(true) else {
            return;
        };
        self.empty_inbox(run.shard);
        self.shards[run.shard].on_run_done(&run.run);
        self.world.borrow_mut().end_deferred_discards(run.run.pages);
        self.shards[run.shard].pump();
    }

    fn writer_step(&mut self) {
        self.world.borrow_mut().release_slabs();
        match self.roll(3) {
            0 => {
                let started = self.world.borrow_mut().start_write();
                if let Started::Abandon(shard, staged) = started {
                    self.empty_inbox(shard);
                    self.shards[shard].on_write_abandoned(staged);
                    self.shards[shard].pump();
                }
            }
            1 => {
                let Some(number) = self.pick(self.writes()) else {
                    return;
                };
                let abandoned = self.world.borrow_mut().carry_write(number);
                if let Some((shard, staged)) = abandoned {
                    self.empty_inbox(shard);
                    self.shards[shard].on_write_abandoned(staged);
                    self.shards[shard].pump();
                }
            }
            _ => self.acknowledge_write(),
        }
    }

    fn writes(&self) -> usize {
        self.world.borrow().servers.writes.len()
    }

    fn acknowledge_write(&mut self) {
        let Some(number) = self.pick(self.writes()) else {
            return;
        };
        let write = {
            let writes = &mut self.world.borrow_mut().servers.writes;
            if !writes[number].done {
                return;
            }
            writes.swap_remove(number)
        };
        self.empty_inbox(write.shard);
        self.shards[write.shard].on_written_back(write.staged, write.slot);
        self.shards[write.shard].pump();
    }

    fn fetch_step(&mut self) {
        let fetches = self.world.borrow().servers.fetches.len();
        let Some(number) = self.pick(fetches) else {
            return;
        };
        let fetch = {
            let world = &mut *self.world.borrow_mut();
            if world.servers.fetches[number].answer.is_none() {
                return world.serve_fetch(number);
            }
            world.servers.fetches.swap_remove(number)
        };
        self.empty_inbox(fetch.shard);
        let (id, page) = (fetch.fetch.id, fetch.fetch.page);
        {
            let live = &mut self.world.borrow_mut().live_fetches;
            if live.get(&page.0).is_some_and(|live| live.id == id) {
                live.remove(&page.0);
            }
        }
        let shard = &mut self.shards[fetch.shard];
        match fetch.answer.flatten() {
            Some(contents) => shard.on_fetched(id, page, Ok(contents.bytes())),
            None => shard.on_fetched(id, page, Err(FetchFailed::Gone)),
        }
        shard.pump();
    }

    fn pump_alerted(&mut self) {
        for shard in 0..SHARDS {
            if std::mem::take(&mut self.world.borrow_mut().alerted[shard]) {
                self.empty_inbox(shard);
                self.shards[shard].pump();
            }
        }
    }

    fn retry(&mut self) {
        let shard = self.roll(SHARDS as u64) as usize;
        if self.shards[shard].has_retries() {
            self.empty_inbox(shard);
            self.shards[shard].pump();
        }
    }

    fn device_step(&mut self) -> Result<(), Violation> {
        let answers = std::mem::take(&mut self.world.borrow_mut().pin_answers);
        for (pin, result) in answers {
            let world = &mut *self.world.borrow_mut();
            match result {
                Ok(()) => {
                    if let Some(request) = world.device.get_mut(&pin) {
                        request.granted = true;
                    }
                }
                Err(_) => drop(world.forget_request(pin)),
            }
        }
        let requests: Vec<_> = self.world.borrow().device.keys().copied().collect();
        let Some(number) = self.pick(requests.len()) else {
            self.ask_for_pins();
            return Ok(());
        };
        if self.chance(100) {
            self.ask_for_pins();
        }
        self.use_pins(requests[number])
    }

    fn ask_for_pins(&mut self) {
        if self.calm {
            return;
        }
        let (shard, run, write) = {
            let world = &mut *self.world.borrow_mut();
            let pinned: u32 = world.device_pages.iter().sum();
            if pinned + 3 > PINNED_MOST {
                return;
            }
            let first = world.random.below(u64::from(PAGES) - 3) as u32;
            let count = world.random.between(1, 3);
            let shard = shard_of(first);
            if shard_of(first + count - 1) != shard {
                return;
            }
            let run = PageRun {
                first: PageIndex(first),
                count,
            };
            run.pages()
                .for_each(|page| world.device_pages[page.0 as usize] += 1);
            let (write, accesses_left) = (world.random.chance(500), world.random.between(1, 6));
            let request = DeviceRequest {
                shard,
                run,
                write,
                granted: false,
                accesses_left,
            };
            world.device.insert(PinId(self.next_pin), request);
            (shard, run, write)
        };
        let pin = PinId(self.next_pin);
        self.next_pin += 1;
        self.empty_inbox(shard);
        self.shards[shard].on_pin(pin, &[run], write);
        self.shards[shard].pump();
    }

    /// The device accesses guest memory past all protections, or is done.
    fn use_pins(&mut self, pin: PinId) -> Result<(), Violation> {
        let done = {
            let world = &mut *self.world.borrow_mut();
            match world.use_pin(pin)? {
                true => world.forget_request(pin),
                false => None,
            }
        };
        if let Some(request) = done {
            self.empty_inbox(request.shard);
            self.shards[request.shard].on_unpin(&[request.run]);
            self.shards[request.shard].pump();
        }
        Ok(())
    }

    fn discard(&mut self) {
        let world = &mut *self.world.borrow_mut();
        // Most often something that is lost, for nothing else heals that.
        let lost =
            (0..PAGES).find(|page| world.shared.table.state(PageIndex(*page)) == State::Lost);
        let first = match lost.filter(|_| world.random.chance(500)) {
            Some(page) => page,
            None => world.random.below(u64::from(PAGES)) as u32,
        };
        let end = (first + world.random.between(1, 6)).min((first / SHARD_PAGES + 1) * SHARD_PAGES);
        let run = PageRun {
            first: PageIndex(first),
            count: end - first,
        };
        if world.is_unpinned(run) {
            world.discard(run);
        }
    }

    /// The operator changes the limit; every shard is told.
    fn tune(&mut self) {
        {
            let world = &mut *self.world.borrow_mut();
            let limit = world.random.between(LIMIT_LEAST, 150);
            let staging = world.random.between(6, STAGING_MOST);
            let kept = world.random.below(50);
            let shared = Arc::clone(&world.shared);
            world.limit = u64::from(limit);
            let beyond = if world.is(Sabotage::IgnoreLimit) {
                20
            } else {
                0
            };
            shared.budget.set_limit(world.limit + beyond);
            shared.staging.set_capacity(staging);
            shared.slots.set_keep_allowance(kept);
            for slot in shared.staging.drain_retired() {
                world.staging[slot.0 as usize] = None;
            }
            // Slots in use beyond a capacity set before come on top until they are free.
            world.backed_before = shared.staging.backed();
            world.alerted = [true; SHARDS];
        }
    }

    /// Something goes wrong.
    fn mishap(&mut self) {
        let server = self.roll(SERVERS as u64) as usize;
        match self.roll(100) {
            0..12 => self.world.borrow_mut().set_connected(server, false),
            12..60 => self.reconnect(server),
            60..62 => self.world.borrow_mut().restart_empty(server),
            62..66 => self.world.borrow_mut().flip_stored_bit(),
            66..70 => self.vacate(),
            70..80 => self.freeze(),
            _ => self.thaw(),
        }
        self.tell_lost_groups();
    }

    fn reconnect(&mut self, server: usize) {
        self.world.borrow_mut().set_connected(server, true);
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
            outram_backend::engine::slots::SlabRef {
                server,
                slab: slabs[number],
            }
        };
        if let Some(group) = self.shared.slots.vacate(slab) {
            for shard in 0..SHARDS {
                self.empty_inbox(shard);
                self.shards[shard].on_vacate(group);
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
            if world.uffds[shard].frozen.is_some() || run.pages().any(busy) {
                return;
            }
            world.uffds[shard].frozen = Some(run);
            world.remap(run);
            run
        };
        self.empty_inbox(shard);
        self.shards[shard].freeze(run);
        self.shards[shard].pump();
    }

    fn thaw(&mut self) {
        for shard in 0..SHARDS {
            if self.world.borrow_mut().uffds[shard].frozen.take().is_some() {
                self.empty_inbox(shard);
                self.shards[shard].thaw();
                self.shards[shard].pump();
            }
        }
    }

    /// Lets everything come to an end that can, and checks that nobody is left waiting.
    pub(crate) fn settle(&mut self) -> Result<(), Violation> {
        self.calm = true;
        for server in 0..SERVERS {
            self.reconnect(server);
        }
        self.tell_lost_groups();
        self.thaw();
        for round in 0.. {
            for _ in 0..400 {
                self.step()?;
            }
            self.pump_alerted();
            if self.is_idle() {
                break;
            }
            if round > 300 {
                let world = self.world.borrow();
                return fail(Check::Stuck, format!("no end: {:?}", world.summary()));
            }
        }
        self.world.borrow().check_quiet()?;
        self.calm = false;
        Ok(())
    }

    /// Nothing is under way in any queue.
    fn is_idle(&self) -> bool {
        let world = self.world.borrow();
        let uffd_idle = world.uffds.iter().all(|uffd| {
            uffd.faults.is_empty()
                && uffd.events.is_empty()
                && uffd.inbox.is_empty()
                && uffd.punched.is_empty()
                && uffd.changing == 0
        });
        let is_owed = |number: usize| {
            let vcpu = &world.vcpus[number];
            !vcpu.waits && vcpu.access.is_some()
        };
        uffd_idle
            && world.runs.is_empty()
            && world.servers.fetches.is_empty()
            && world.servers.writes.is_empty()
            && world.pin_answers.is_empty()
            && !world.device.values().any(|request| request.granted)
            && !world.alerted.contains(&true)
            && !(0..world.vcpus.len()).any(is_owed)
            && !self.shards.iter().any(Shard::has_retries)
            && world.orders.is_empty()
    }
}

impl Simulation {
    /// The run went everywhere: a simulation that does nothing checks nothing.
    pub(crate) fn assert_lively(&self, steps: u64) {
        if steps < 20_000 {
            return;
        }
        let stats = &self.shared.stats;
        let faults = FaultKind::ALL.map(|kind| (kind.name(), stats.faults(kind)));
        for (name, count) in faults.into_iter().chain([
            ("clean evictions", stats.evicted_clean.get()),
            ("filled evictions", stats.evicted_filled.get()),
            ("staged evictions", stats.evicted_staged.get()),
            ("failed runs", stats.failed_runs.get()),
            ("write-backs", stats.written_back.get()),
            ("removals", stats.removed.get()),
            ("waits for room", stats.stalls_limit.get()),
            ("waits for a server", stats.stalls_server.get()),
            ("duplicates", stats.duplicates.get()),
            ("lost faults", 6 + stats.lost_faults.get()),
        ]) {
            println!("{name}: {count}");
            assert!(count > 5, "only {count} {name} in {steps} steps");
        }
    }
}
