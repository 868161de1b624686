//! What may happen next: one small thing of the guest, the kernel, the engine's threads, the
//! servers or the operator.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use outram_backend::engine::ages::Ages;
use outram_backend::engine::budget::Budget;
use outram_backend::engine::compressed::CompressedPool;
use outram_backend::engine::pace::Pace;
use outram_backend::engine::policy::ThreeQueues;
use outram_backend::engine::seal::PageKey;
use outram_backend::engine::shard::{FetchFailed, Shard};
use outram_backend::engine::slots::SlotPool;
use outram_backend::engine::staging::StagingPool;
use outram_backend::engine::stats::Stats;
use outram_backend::engine::table::{ENTRY_WORDS, PageTable, STRETCH, Words};
use outram_backend::engine::{Fetch, PageIndex, PageRun, PageSize, PinId, Shared, SharedRef};
use outram_wire::lost_pages::LostPages;
use outram_wire::seal::Seal;

use crate::crashes::{Deaths, WrittenDown};
use crate::plugging::{changing_part, lasting_part};
use crate::ports::{SimEvictor, SimPorts};
use crate::sabotage::Sabotage;
use crate::servers::{FetchInFlight, SERVERS, Started};
use crate::world::{
    DeviceRequest, LIMIT_FIRST, Memory, Message, OutRun, PAGES, SHARD_PAGES, SHARDS, Uffd, Vcpu,
    Violation, World, shard_of,
};

/// Pages that the device pins at a time, at most.
pub(crate) const PINNED_MOST: u32 = 6;

/// Something that may happen.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    Guest,
    Signal,
    Kernel,
    Owner,
    Evictor,
    RunDone,
    Write,
    Fetch,
    Alert,
    Retry,
    Device,
    Discard,
    Mishap,
    Death,
}

pub(crate) struct Simulation {
    pub(crate) world: Rc<RefCell<World>>,
    pub(crate) shared: SharedRef,
    pub(crate) shards: Vec<Shard<SimPorts>>,
    pub(crate) evictor: SimEvictor,
    /// Where the table lies: it outlives the backend.
    pub(crate) words: TableWords,
    /// Deaths of the backend.
    pub(crate) deaths: Deaths,
    /// How often, in a thousand steps, it may die of one.
    pub(crate) mortality: u64,
    /// What has happened in former lives of the backend.
    pub(crate) happened: BTreeMap<&'static str, u64>,
    next_pin: u64,
    /// The guest issues nothing new, and nothing new goes wrong.
    pub(crate) calm: bool,
    /// Moments at which everything was home.
    pub(crate) homecomings: u64,
    /// Times that memory was plugged.
    pub(crate) plugged: u64,
    /// How much more often than usual each action comes: other weather, other interleavings.
    weather: [u64; ACTIONS],
}

const ACTIONS: usize = 15;

/// The table's words, which are still there when the table is not.
pub(crate) type TableWords = Arc<Vec<AtomicU64>>;

struct Lasting(TableWords);

impl Words for Lasting {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

/// What the file of such a table has data of.
fn written(words: &TableWords) -> Vec<PageRun> {
    let stretches = words.chunks(STRETCH as usize * ENTRY_WORDS);
    let is_written =
        |words: &[AtomicU64]| words.iter().any(|word| word.load(Ordering::Relaxed) != 0);
    let written = (0..).zip(stretches).filter(|(_, words)| is_written(words));
    let runs = written.map(|(number, words)| PageRun {
        first: PageIndex(number * STRETCH),
        count: (words.len() / ENTRY_WORDS) as u32,
    });
    runs.collect()
}

/// An engine's shared part over a table, with no staging slots yet.
pub(crate) fn shared(words: TableWords, seal: Seal, lost_pages: LostPages) -> SharedRef {
    Arc::new(Shared {
        page_size: PageSize::BASE,
        table: PageTable::new(Box::new(Lasting(Arc::clone(&words))), &written(&words)),
        budget: Budget::new(LIMIT_FIRST, PageSize::BASE),
        staging: StagingPool::new(0),
        compressed: CompressedPool::of_chunks(1),
        slots: SlotPool::new(SERVERS),
        pace: Pace::default(),
        ages: Ages::default(),
        key: PageKey::new(&[7; 32], seal),
        lost_pages,
        stats: Stats::new(),
    })
}

/// Shards without any pages.
pub(crate) fn shards(world: &Rc<RefCell<World>>, shared: &SharedRef) -> Vec<Shard<SimPorts>> {
    let shards = (0..SHARDS).map(|number| {
        let range = PageRun {
            first: PageIndex(number as u32 * SHARD_PAGES),
            count: SHARD_PAGES,
        };
        let ports = SimPorts {
            shard: number,
            world: Rc::clone(world),
        };
        let policy = Box::new(ThreeQueues::new(range, shared.ages.returns()));
        Shard::new(range, Arc::clone(shared), ports, policy)
    });
    shards.collect()
}

impl Simulation {
    pub(crate) fn new(seed: u64, memory: Memory, sabotage: Option<Sabotage>) -> Self {
        let words = (0..PAGES as usize * ENTRY_WORDS).map(|_| AtomicU64::new(0));
        let words: TableWords = Arc::new(words.collect());
        let lost_pages = match seed % 2 {
            1 => LostPages::Stop,
            _ => LostPages::Poison,
        };
        let seal = match seed / 2 % 2 {
            1 => Seal::On,
            _ => Seal::Off,
        };
        let shared = shared(Arc::clone(&words), seal, lost_pages);
        let written = WrittenDown::default();
        shared.staging.set_capacity(written.staging);
        shared.slots.set_keep_allowance(written.kept);
        let world = World::new(seed, Arc::clone(&shared), memory, sabotage);
        let world = Rc::new(RefCell::new(world));
        let mut shards = shards(&world, &shared);
        for (number, shard) in shards.iter_mut().enumerate() {
            shard.plug(lasting_part(number));
            shard.plug(changing_part(number));
        }
        let mut simulation = Self {
            shards,
            words,
            deaths: Deaths::default(),
            mortality: 0,
            happened: BTreeMap::new(),
            evictor: SimEvictor::new(Rc::clone(&world)),
            world,
            shared,
            next_pin: 0,
            calm: false,
            homecomings: 0,
            plugged: 0,
            weather: [10; ACTIONS],
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
            if self.world.borrow().is_there(page) {
                self.populate(PageIndex(page));
            }
        }
    }

    /// Sets how often what happens until it is set again.
    pub(crate) fn change_weather(&mut self) {
        self.weather = [10; ACTIONS];
        let world = &mut *self.world.borrow_mut();
        if !self.calm {
            for weight in &mut self.weather {
                *weight = [1, 3, 10, 10, 30, 100][world.random.below(6) as usize];
            }
            self.mortality = [0, 5, 50, 300][world.random.below(4) as usize];
        }
        let span = [6, 24, PAGES][world.random.below(3) as usize];
        let first = world.random.below(u64::from(PAGES - span) + 1) as u32;
        world.hot = (first, span);
    }

    /// What can happen now, each with how often it shall.
    pub(crate) fn possible(&self) -> Vec<(u64, Action)> {
        let world = self.world.borrow();
        let runs = |ended| world.runs.iter().any(|run| run.run.has_ended() == ended);
        let connected = world.servers.servers.iter().any(|server| server.connected);
        let has_to_move = self.shared.slots.vacating_pages() > 0;
        let may_go_on = |vcpu: &Vcpu| !vcpu.waits && (vcpu.access.is_some() || !self.calm);
        let all = [
            (400, Action::Guest, world.vcpus.iter().any(may_go_on)),
            (4, Action::Signal, !self.calm),
            (100, Action::Kernel, world.uffds.iter().any(Uffd::is_busy)),
            (120, Action::Owner, world.uffds.iter().any(Uffd::has_read)),
            (150, Action::Evictor, runs(false)),
            (80, Action::RunDone, runs(true)),
            (
                60,
                Action::Write,
                connected && (!world.orders.is_empty() || has_to_move),
            ),
            (80, Action::Write, !world.servers.writes.is_empty()),
            (80, Action::Fetch, !world.servers.fetches.is_empty()),
            (40, Action::Alert, world.alerted.contains(&true)),
            (20, Action::Retry, self.shards.iter().any(Self::tries_again)),
            (20, Action::Device, !self.calm || !world.device.is_empty()),
            (3, Action::Discard, !self.calm),
            (6, Action::Mishap, !self.calm),
            (1, Action::Death, !self.calm),
        ];
        let all = all.into_iter().zip(self.weather);
        let possible = all.filter(|((.., possible), _)| *possible);
        possible
            .map(|((weight, action, _), weather)| (weight * weather, action))
            .collect()
    }

    /// One step, and the check of everything after it. False where nothing can happen.
    pub(crate) fn step(&mut self) -> Result<bool, Violation> {
        let used_before = self.shared.budget.used();
        self.arrive_home()?;
        let possible = self.possible();
        let weights: u64 = possible.iter().map(|(weight, _)| weight).sum();
        if weights == 0 {
            return Ok(false);
        }
        let mut dice = self.roll(weights);
        for (weight, action) in possible {
            if dice < weight {
                self.act_or_die(action)?;
                break;
            }
            dice -= weight;
        }
        self.see_off();
        self.sabotage();
        let mut world = self.world.borrow_mut();
        world.clock_us += 1;
        let brought = std::mem::take(&mut world.brought);
        // A successor finds what the dead one had room for, and maybe another limit.
        let at_death = std::mem::take(&mut world.used_at_death);
        world.check(&self.shards, used_before.max(at_death), brought)?;
        Ok(true)
    }

    pub(crate) fn act(&mut self, action: Action) -> Result<(), Violation> {
        match action {
            Action::Guest => self.world.borrow_mut().run_vcpu(!self.calm)?,
            Action::Signal => self.world.borrow_mut().interrupt_vcpu()?,
            Action::Kernel => self.world.borrow_mut().kernel_step(),
            Action::Owner => self.owner_step(),
            Action::Evictor => self.evictor_step()?,
            Action::RunDone => self.hand_back_run(),
            Action::Write => self.writer_step(),
            Action::Fetch => self.fetch_step(),
            Action::Alert => self.pump_alerted(),
            Action::Retry => self.retry(),
            Action::Device => self.device_step()?,
            Action::Discard => self.world.borrow_mut().discard_somewhere(),
            Action::Mishap => self.mishap(),
            Action::Death => self.die(),
        }
        Ok(())
    }

    pub(crate) fn roll(&self, end: u64) -> u64 {
        self.world.borrow_mut().random.below(end)
    }

    pub(crate) fn chance(&self, per_mille: u64) -> bool {
        self.world.borrow_mut().random.chance(per_mille)
    }

    pub(crate) fn pick(&self, len: usize) -> Option<usize> {
        self.world.borrow_mut().random.index(len)
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
    pub(crate) fn empty_inbox(&mut self, shard: usize) -> bool {
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
        self.world.borrow_mut().let_pages_move();
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
        let shard = fetch.shard;
        let mut arrived = vec![fetch];
        if self.chance(500) {
            arrived.extend(self.answered_fetches(shard));
            arrived.sort_by_key(|fetch| fetch.fetch.page);
        }
        self.empty_inbox(shard);
        {
            let live_fetches = &mut self.world.borrow_mut().live_fetches;
            for Fetch { id, page, .. } in arrived.iter().map(|fetch| fetch.fetch) {
                if live_fetches.get(&page.0).is_some_and(|live| live.id == id) {
                    live_fetches.remove(&page.0);
                }
            }
        }
        let mut arrivals = self.shards[shard].arrivals();
        for FetchInFlight { fetch, answer, .. } in arrived {
            match answer.flatten() {
                Some(contents) => {
                    let mut bytes = contents.bytes().to_vec();
                    arrivals.on_fetched(fetch.id, fetch.page, Ok(&mut bytes));
                }
                None => arrivals.on_fetched(fetch.id, fetch.page, Err(FetchFailed::Gone)),
            }
        }
        drop(arrivals);
        self.shards[shard].pump();
    }

    /// Takes all of a shard's fetches that have an answer.
    fn answered_fetches(&mut self, shard: usize) -> Vec<FetchInFlight> {
        let fetches = &mut self.world.borrow_mut().servers.fetches;
        let (answered, others) = std::mem::take(fetches)
            .into_iter()
            .partition(|fetch| fetch.shard == shard && fetch.answer.is_some());
        *fetches = others;
        answered
    }

    fn pump_alerted(&mut self) {
        for shard in 0..SHARDS {
            if std::mem::take(&mut self.world.borrow_mut().alerted[shard]) {
                self.empty_inbox(shard);
                self.shards[shard].pump();
            }
        }
    }

    fn tries_again(shard: &Shard<SimPorts>) -> bool {
        shard.has_retries() || shard.has_more_to_bring() || shard.waits_for_pool()
    }

    fn retry(&mut self) {
        for shard in 0..SHARDS {
            if Self::tries_again(&self.shards[shard]) {
                self.empty_inbox(shard);
                self.shards[shard].pump();
            }
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
            if !world.are_there(run) {
                return;
            }
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
}
