//! Memory that is unplugged and plugged again: the upper part of each shard comes and goes.
//!
//! As in reality, the VMM unmaps it first, which is told as the mapping being in doubt, or noticed
//! by nobody yet; only then the engine hears that the memory is gone. Its place is used again once
//! the engine says that nothing refers to it.

use outram_backend::engine::table::{Entry, State};
use outram_backend::engine::{PageIndex, PageRun};

use crate::contents::Store;
use crate::sabotage::Sabotage;
use crate::steps::Simulation;
use crate::world::{Check, SHARD_PAGES, SHARDS, Violation, World, fail, shard_of};

/// Pages of a shard that are always there; the one behind them is nobody's, as between regions.
const LASTING_PAGES: u32 = 40;

/// Whether memory is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// The guest uses it.
    There,
    /// The VMM has unmapped it, and the engine was not told that it is gone.
    Unmapped,
    /// The engine was told, and something still refers to it.
    Leaving,
    /// It can be plugged.
    Gone,
}

/// The part of a shard that stays.
pub(crate) fn lasting_part(shard: usize) -> PageRun {
    PageRun {
        first: PageIndex(shard as u32 * SHARD_PAGES),
        count: LASTING_PAGES,
    }
}

/// The part of a shard that comes and goes.
pub(crate) fn changing_part(shard: usize) -> PageRun {
    PageRun {
        first: PageIndex(shard as u32 * SHARD_PAGES + LASTING_PAGES + 1),
        count: SHARD_PAGES - LASTING_PAGES - 1,
    }
}

impl World {
    /// What the memory of a page is; gone where it is nobody's.
    pub(crate) fn presence(&self, page: u32) -> Presence {
        let shard = shard_of(page);
        if lasting_part(shard).contains(PageIndex(page)) {
            Presence::There
        } else if changing_part(shard).contains(PageIndex(page)) {
            self.changing_parts[shard]
        } else {
            Presence::Gone
        }
    }

    pub(crate) fn is_there(&self, page: u32) -> bool {
        self.presence(page) == Presence::There
    }

    /// Whether a run is guest memory that lies in one piece.
    pub(crate) fn are_there(&self, run: PageRun) -> bool {
        run.pages().all(|page| self.is_there(page.0))
    }

    /// Whether discards of a part wait to be read: whoever unmapped it waits behind them, and does not
    /// come to map anything there.
    fn has_messages_of(&self, part: PageRun) -> bool {
        let uffd = &self.uffds[shard_of(part.first.0)];
        let mut discards = uffd.punched.iter().chain(&uffd.events);
        discards.any(|run| part.contains(run.first))
    }

    /// The VMM unmaps a part: whoever accesses it is at an end.
    fn unmap(&mut self, shard: usize) {
        let run = changing_part(shard);
        for (number, vcpu) in self.vcpus.iter_mut().enumerate() {
            let goes = |page: u32| run.contains(PageIndex(page));
            if vcpu.access.is_some_and(|access| goes(access.page)) {
                vcpu.access = None;
                vcpu.waits = false;
                let faults = &mut self.uffds[shard].faults;
                faults.retain(|message| message.vcpu != number);
            }
        }
        for page in run.pages() {
            self.protected[page.0 as usize] = false;
            self.poisoned.remove(&page.0);
        }
        self.changing_parts[shard] = Presence::Unmapped;
    }

    /// The memory behind a part is gone.
    pub(crate) fn empty(&mut self, shard: usize) {
        for page in changing_part(shard).pages() {
            let place = page.0 as usize;
            self.memory[place] = None;
            self.allowed[place] = vec![self.zero.clone()];
            self.may_be_lost.remove(&page.0);
        }
        self.changing_parts[shard] = Presence::Leaving;
    }

    /// Nothing of memory that is not there is kept, and nobody has made any of it.
    pub(crate) fn check_gone(&self, page: u32, entry: &Entry) -> Result<(), Violation> {
        let is_clear =
            entry.state == State::Absent && entry.slot.is_none() && entry.staging.is_none();
        if !is_clear {
            return fail(Check::Kept, format!("page {page} is gone: {entry:?}"));
        }
        if self.memory[page as usize].is_some() {
            return fail(Check::Stray, format!("page {page} is nobody's, and there"));
        }
        Ok(())
    }
}

impl Simulation {
    /// Brings the memory of one shard a step forward: out, or in again.
    pub(crate) fn plug_or_unplug(&mut self) {
        let shard = self.roll(SHARDS as u64) as usize;
        let presence = self.world.borrow().changing_parts[shard];
        match presence {
            Presence::There => {
                self.world.borrow_mut().unmap(shard);
                // The event may be read late.
                if self.chance(700) {
                    self.empty_inbox(shard);
                    self.shards[shard].freeze(changing_part(shard));
                    self.shards[shard].pump();
                }
            }
            Presence::Unmapped => self.unplug(shard),
            Presence::Leaving => {}
            Presence::Gone => self.plug(shard),
        }
    }

    fn unplug(&mut self, shard: usize) {
        self.world.borrow_mut().empty(shard);
        if self.world.borrow().is(Sabotage::DropUnplug) {
            return;
        }
        self.empty_inbox(shard);
        self.shards[shard].unplug(changing_part(shard));
        self.shards[shard].pump();
    }

    /// A new block, of which some pages are there already.
    fn plug(&mut self, shard: usize) {
        if self.world.borrow().has_messages_of(changing_part(shard)) {
            return;
        }
        self.empty_inbox(shard);
        self.shards[shard].plug(changing_part(shard));
        self.world.borrow_mut().changing_parts[shard] = Presence::There;
        self.plugged += 1;
        for page in changing_part(shard).pages() {
            if self.chance(100) {
                self.populate(page);
            }
        }
        self.shards[shard].pump();
    }

    /// A page lies in memory before the pager comes.
    pub(crate) fn populate(&mut self, page: PageIndex) {
        let place = page.0 as usize;
        {
            let world = &mut *self.world.borrow_mut();
            let store = Store::random(&mut world.random);
            let contents = world.zero.with(store);
            world.memory[place] = Some(contents.clone());
            world.allowed[place] = vec![contents];
            world.brought += 1;
        }
        self.shards[shard_of(page.0)].adopt_populated(page);
    }

    /// Takes the engine's word for what has left.
    pub(crate) fn see_off(&mut self) {
        for shard in 0..SHARDS {
            while let Some(run) = self.shards[shard].next_unplugged() {
                assert_eq!(
                    run,
                    changing_part(shard),
                    "what was never unplugged has left"
                );
                let world = &mut *self.world.borrow_mut();
                world.changing_parts[shard] = Presence::Gone;
                if world.is(Sabotage::KeepUnplugged) {
                    let state = State::Filled;
                    let entry = Entry {
                        state,
                        ..Entry::ABSENT
                    };
                    world.shared.table.store(run.first, &entry);
                }
            }
        }
    }

    /// What is on its way out is let go; to be called before everything comes to rest.
    pub(crate) fn finish_unplugging(&mut self) {
        for shard in 0..SHARDS {
            let presence = self.world.borrow().changing_parts[shard];
            if presence == Presence::Unmapped {
                self.unplug(shard);
            }
        }
        // There may be nothing else to do.
        self.see_off();
    }
}
