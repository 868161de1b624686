//! What the engine acts through, in the simulated world.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use outram_backend::engine::eviction::{EvictionError, EvictionPorts, Run};
use outram_backend::engine::staging::Ticket;
use outram_backend::engine::{
    Fetch, Install, PageIndex, PageRun, PinId, PinRefused, Ports, StagedPage, StagingSlot,
};

use crate::contents::Contents;
use crate::sabotage::Sabotage;
use crate::servers::{FetchInFlight, LiveFetch};
use crate::world::{Memory, OutRun, SHARDS, World};

/// A shard's owner's hands.
pub(crate) struct SimPorts {
    pub(crate) shard: usize,
    pub(crate) world: Rc<RefCell<World>>,
}

impl World {
    /// UFFDIO_COPY or UFFDIO_ZEROPAGE of one page.
    fn install(&mut self, shard: usize, page: PageIndex, contents: Contents, wp: bool) -> Install {
        if self.is_changing(shard) || self.random.chance(5) {
            return Install::Again;
        }
        if !self.is_there(page.0) {
            return Install::Gone;
        }
        let place = page.0 as usize;
        if self.memory[place].is_some() {
            return Install::Exists;
        }
        if self.kind == Memory::Hugetlbfs {
            if self.pool_left == 0 {
                return Install::PoolEmpty;
            }
            self.pool_left -= 1;
        }
        self.memory[place] = Some(contents);
        self.poisoned.remove(&page.0);
        self.protected[place] = wp;
        self.wake(PageRun::single(page));
        Install::Done
    }
}

impl Ports for SimPorts {
    fn zero(&mut self, run: PageRun) -> (u32, Install) {
        let world = &mut *self.world.borrow_mut();
        let mut made = 0;
        let beyond = u32::from(world.is(Sabotage::ZeroTooMuch));
        for page in run.first.0..run.end().0 {
            let zero = world.zero.clone();
            match world.install(self.shard, PageIndex(page), zero, false) {
                Install::Done => made += 1,
                how => return (made, how),
            }
        }
        for page in run.end().0..run.end().0 + beyond {
            if (page as usize) < world.memory.len() {
                let zero = world.zero.clone();
                world.install(self.shard, PageIndex(page), zero, false);
            }
        }
        (made, Install::Done)
    }

    fn copy(&mut self, page: PageIndex, bytes: &[u8], protect: bool) -> Install {
        let world = &mut *self.world.borrow_mut();
        let protect = protect && !world.is(Sabotage::ForgetProtection);
        world.install(self.shard, page, Contents::new(bytes), protect)
    }

    fn copy_row(&mut self, run: PageRun, bytes: &[u8]) -> (u32, Install) {
        let world = &mut *self.world.borrow_mut();
        let pages = bytes.chunks_exact(bytes.len() / run.count as usize);
        for (made, (page, bytes)) in (0..).zip(run.pages().zip(pages)) {
            match world.install(self.shard, page, Contents::new(bytes), false) {
                Install::Done => {}
                _ if made > 0 => return (made, Install::Again),
                how => return (0, how),
            }
        }
        (run.count, Install::Done)
    }

    fn copy_staged(&mut self, page: PageIndex, slot: StagingSlot) -> Install {
        let world = &mut *self.world.borrow_mut();
        let contents = world.staging[slot.0 as usize].clone();
        let contents = contents.expect("a staging slot that holds a page");
        world.install(self.shard, page, contents, false)
    }

    fn read_staged(&mut self, slot: StagingSlot, bytes: &mut [u8]) {
        let world = self.world.borrow();
        let contents = world.staging[slot.0 as usize].as_ref();
        bytes.copy_from_slice(contents.expect("a staging slot that holds a page").bytes());
    }

    fn unprotect(&mut self, page: PageIndex) -> Install {
        let world = &mut *self.world.borrow_mut();
        if world.is_changing(self.shard) || world.random.chance(5) {
            return Install::Again;
        }
        if !world.is_there(page.0) {
            return Install::Gone;
        }
        world.protected[page.0 as usize] = false;
        world.wake(PageRun::single(page));
        Install::Done
    }

    fn poison(&mut self, page: PageIndex) -> Install {
        let world = &mut *self.world.borrow_mut();
        if world.is_changing(self.shard) || world.random.chance(5) {
            return Install::Again;
        }
        if !world.is_there(page.0) {
            return Install::Gone;
        }
        world.wake(PageRun::single(page));
        match world.poisoned.insert(page.0) {
            true => Install::Done,
            false => Install::Exists,
        }
    }

    fn wake(&mut self, run: PageRun) {
        let world = &mut *self.world.borrow_mut();
        if world.is(Sabotage::DropWake) && world.random.chance(300) {
            return;
        }
        world.wake(run);
    }

    fn is_present(&mut self, page: PageIndex) -> bool {
        self.world.borrow().memory[page.0 as usize].is_some()
    }

    fn fetch(&mut self, fetch: Fetch) -> bool {
        let world = &mut *self.world.borrow_mut();
        let live = LiveFetch {
            id: fetch.id,
            slot: fetch.slot,
        };
        world.live_fetches.insert(fetch.page.0, live);
        world.servers.fetches.push(FetchInFlight {
            shard: self.shard,
            fetch,
            answer: None,
        });
        world.shared.slots.is_safe(fetch.slot)
    }

    /// Each goes at once.
    fn send_waited_for(&mut self) {}

    fn start_run(&mut self, run: Run) {
        let mut world = self.world.borrow_mut();
        world.runs.push(OutRun {
            shard: self.shard,
            run,
            steps: 0,
        });
    }

    fn write_back(&mut self, page: StagedPage) {
        let mut world = self.world.borrow_mut();
        world.orders.push_back((self.shard, page));
    }

    fn stage(&mut self, slot: StagingSlot, bytes: &[u8]) {
        let mut world = self.world.borrow_mut();
        world.staging[slot.0 as usize] = Some(Contents::new(bytes));
    }

    fn answer_pin(&mut self, pin: PinId, result: Result<(), PinRefused>) {
        self.world.borrow_mut().pin_answers.push((pin, result));
    }

    fn alert_shards(&mut self) {
        let mut world = self.world.borrow_mut();
        if world.is(Sabotage::DropAlerts) {
            return;
        }
        for other in (0..SHARDS).filter(|other| *other != self.shard) {
            world.alerted[other] = true;
        }
    }

    fn now_us(&self) -> u64 {
        self.world.borrow().clock_us
    }
}

/// An evictor's hands.
pub(crate) struct SimEvictor {
    world: Rc<RefCell<World>>,
    /// What was read into staging, for as long as the slot holds it.
    copies: BTreeMap<u32, Contents>,
}

impl SimEvictor {
    pub(crate) fn new(world: Rc<RefCell<World>>) -> Self {
        Self {
            world,
            copies: BTreeMap::new(),
        }
    }

    fn refuses(&mut self) -> Result<(), EvictionError> {
        match self.world.borrow_mut().random.chance(15) {
            true => Err(EvictionError::Refused),
            false => Ok(()),
        }
    }
}

impl EvictionPorts for SimEvictor {
    fn protect(&mut self, run: PageRun) -> Result<(), EvictionError> {
        self.refuses()?;
        let world = &mut *self.world.borrow_mut();
        if !world.are_there(run) {
            return Err(EvictionError::Gone);
        }
        for page in run.pages() {
            let place = page.0 as usize;
            if !world.is(Sabotage::SkipProtect) {
                world.protected[place] = true;
            }
            if world.is(Sabotage::PunchFirst) {
                world.memory[place] = None;
            }
        }
        Ok(())
    }

    fn read(&mut self, run: PageRun, tickets: &[Ticket]) -> Result<(), EvictionError> {
        self.refuses()?;
        let world = &mut *self.world.borrow_mut();
        for (page, ticket) in run.pages().zip(tickets) {
            let contents = world.memory[page.0 as usize].as_ref();
            let contents = contents.unwrap_or(&world.zero).clone();
            self.copies.insert(ticket.slot.0, contents.clone());
            world.staging[ticket.slot.0 as usize] = Some(contents);
        }
        Ok(())
    }

    fn staged(&self, ticket: Ticket) -> &[u8] {
        self.copies[&ticket.slot.0].bytes()
    }

    fn change_staged(&mut self, ticket: Ticket, change: &mut dyn FnMut(&mut [u8])) {
        let mut bytes = self.staged(ticket).to_vec();
        change(&mut bytes);
        let contents = Contents::new(&bytes);
        self.copies.insert(ticket.slot.0, contents.clone());
        self.world.borrow_mut().staging[ticket.slot.0 as usize] = Some(contents);
    }

    fn punch(&mut self, run: PageRun) -> Result<(), EvictionError> {
        let refused = self.refuses();
        let world = &mut *self.world.borrow_mut();
        let count = match refused {
            Ok(()) => u64::from(run.count),
            Err(_) => world.random.below(u64::from(run.count)),
        };
        for page in run.pages().take(count as usize) {
            world.take_out(page);
        }
        refused
    }

    fn is_present(&mut self, page: PageIndex) -> bool {
        self.world.borrow().memory[page.0 as usize].is_some()
    }

    fn wake(&mut self, run: PageRun) {
        let world = &mut *self.world.borrow_mut();
        if world.is(Sabotage::DropWake) && world.random.chance(300) {
            return;
        }
        world.wake(run);
        if world.is(Sabotage::LiftLate) {
            world.late_lifts.push(run);
        }
    }
}
