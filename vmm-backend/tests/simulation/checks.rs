//! The design's invariants, checked over the whole world after each step.

use outram_backend::engine::eviction::Fate;
use outram_backend::engine::shard::Shard;
use outram_backend::engine::table::{Entry, State};
use outram_backend::engine::{PageIndex, PageRun};
use outram_wire::lost_pages::LostPages;

use crate::contents::Contents;
use crate::plugging::Presence;
use crate::ports::SimPorts;
use crate::servers::SERVERS;
use crate::world::{Check, Message, OutRun, PAGES, Violation, World, fail, shard_of};

/// Where a page's bytes would come from.
enum Source {
    /// These bytes.
    Bytes(Contents),
    /// From nowhere.
    Nowhere,
    /// Its copy is damaged or gone by the world's doing; it must not be answered.
    Destroyed,
}

/// Counts of one pass over the table.
#[derive(Default)]
struct Recount {
    states: [u64; State::COUNT],
    kept: u64,
    slots: u64,
    staging: u64,
    present: u64,
}

impl World {
    /// Checks everything. `used_before` are the pages that were counted before the step, `brought` those
    /// that the engine had to take in it.
    pub(crate) fn check(
        &mut self,
        shards: &[Shard<SimPorts>],
        used_before: u64,
        brought: u64,
    ) -> Result<(), Violation> {
        self.check_waiters(shards)?;
        if let Some((page, generation)) = self.sent_twice {
            return fail(
                Check::SentTwice,
                format!("page {page}, generation {generation}"),
            );
        }
        let table = &self.shared.table;
        // A move is given up where its server is out of reach.
        self.live_fetches.retain(|page, fetch| {
            let page = PageIndex(*page);
            let entry = table.load(page);
            entry.state == State::Stored
                && entry.slot == Some(fetch.slot)
                && shards.iter().any(|shard| shard.fetches(page))
        });
        let mut recount = Recount::default();
        for page in 0..PAGES {
            let entry = self.shared.table.load(PageIndex(page));
            match self.presence(page) {
                Presence::There => self.check_page(page, &entry)?,
                // Nobody asks for it any more.
                Presence::Unmapped | Presence::Leaving => {}
                Presence::Gone => {
                    self.check_gone(page, &entry)?;
                    continue;
                }
            }
            self.count_page(page, &entry, &mut recount);
        }
        recount.staging += shards.iter().map(|shard| shard.moves() as u64).sum::<u64>();
        // Above its limit, half of what goes is room, and all that was counted and did not come: never more than
        // there was.
        let above = match used_before > self.limit {
            true => used_before.max(self.used_above),
            false => used_before,
        };
        let used_most = self.limit.max(above) + brought;
        self.used_above = match self.shared.budget.used() > self.limit {
            true => above + brought,
            false => 0,
        };
        self.check_counts(&recount, used_most)
    }

    /// Whoever waits is known to the engine, or has a message to be read.
    fn check_waiters(&self, shards: &[Shard<SimPorts>]) -> Result<(), Violation> {
        for (number, vcpu) in self.vcpus.iter().enumerate().filter(|(_, vcpu)| vcpu.waits) {
            let page = vcpu.access.expect("who waits has an access").page;
            let uffd = &self.uffds[shard_of(page)];
            let read =
                |message: &Message| matches!(message, Message::Fault(fault) if fault.page == page);
            let known = uffd.faults.iter().any(|message| message.vcpu == number)
                || uffd.inbox.iter().any(read)
                || shards[shard_of(page)].awaits(PageIndex(page));
            if !known {
                return fail(
                    Check::LostWakeUp,
                    format!("vCPU {number} waits for page {page}, and nobody knows"),
                );
            }
        }
        Ok(())
    }

    fn run_of(&self, page: u32) -> Option<(&OutRun, Fate)> {
        let run = self
            .runs
            .iter()
            .find(|run| run.run.pages.contains(PageIndex(page)))?;
        let fate = run.run.fates[(page - run.run.pages.first.0) as usize];
        Some((run, fate))
    }

    /// Where the page's bytes would come from, were it asked for now.
    fn source(&self, page: u32, entry: &Entry) -> Source {
        let present = self.memory[page as usize].clone();
        let hole = || {
            // A hole in a page believed to be there: a discard that the engine is yet to hear of.
            let place = page as usize;
            match self.discarding[place] > 0 || self.silently_gone[place] {
                true => Source::Bytes(self.zero.clone()),
                false => Source::Nowhere,
            }
        };
        match entry.state {
            State::Absent => Source::Bytes(present.unwrap_or_else(|| self.zero.clone())),
            State::Resident => present.map_or_else(hole, Source::Bytes),
            State::Busy => match (present, self.run_of(page)) {
                (Some(contents), _) => Source::Bytes(contents),
                (None, None) => Source::Nowhere,
                (None, Some((_, Fate::Stays))) => hole(),
                (None, Some((_, Fate::Clean))) => self.stored_source(page, entry),
                (None, Some((_, Fate::Filled))) => {
                    Source::Bytes(Contents::filled(entry.fill_word()))
                }
                (None, Some((_, Fate::Staged(_)))) => self.staged_source(page, entry),
            },
            State::Staged => self.staged_source(page, entry),
            State::Stored => self.stored_source(page, entry),
            State::Filled => Source::Bytes(Contents::filled(entry.fill_word())),
            State::Lost => Source::Destroyed,
        }
    }

    fn staged_source(&self, page: u32, entry: &Entry) -> Source {
        let held = entry
            .staging
            .and_then(|slot| self.staging[slot.0 as usize].clone());
        held.map_or(Source::Nowhere, |held| {
            Source::Bytes(self.opened(page, entry, held))
        })
    }

    fn stored_source(&self, page: u32, entry: &Entry) -> Source {
        if self.may_be_lost.contains(&page) {
            return Source::Destroyed;
        }
        let held = entry.slot.and_then(|slot| self.contents_of(slot).cloned());
        held.map_or(Source::Nowhere, |held| {
            Source::Bytes(self.opened(page, entry, held))
        })
    }

    /// What was sealed as this page's; what does not open is as it is.
    fn opened(&self, page: u32, entry: &Entry, held: Contents) -> Contents {
        if !self.shared.key.seals() {
            return held;
        }
        let known = &mut self.opened.borrow_mut()[page as usize];
        let sealed = (entry.generation, entry.tag, held.hash());
        if let Some((of, contents)) = known
            && *of == sealed
        {
            return contents.clone();
        }
        match held.opened(&self.shared.key, PageIndex(page), entry) {
            Some(contents) => {
                *known = Some((sealed, contents.clone()));
                contents
            }
            None => held,
        }
    }

    /// The page can be given, and what would be given is what was last stored.
    fn check_page(&mut self, page: u32, entry: &Entry) -> Result<(), Violation> {
        let place = page as usize;
        let describe = || format!("page {page}: {entry:?}");
        if entry.state == State::Busy && self.run_of(page).is_none() {
            return fail(Check::NoCopy, format!("busy in no run: {}", describe()));
        }
        let in_memory = matches!(entry.state, State::Resident | State::Busy);
        if self.memory[place].is_some() && !in_memory {
            let check = match entry.state {
                State::Lost => Check::LostAnswered,
                _ => Check::Stray,
            };
            return fail(check, format!("there, but not believed so: {}", describe()));
        }
        if self.memory[place].is_some() || !in_memory {
            self.silently_gone[place] = false;
        }
        if entry.protected && self.memory[place].is_some() && !self.protected[place] {
            return fail(Check::Protection, describe());
        }
        match self.source(page, entry) {
            Source::Bytes(contents) => {
                if !self.allowed[place].contains(&contents) {
                    return fail(
                        Check::WrongBytes,
                        format!(
                            "{contents:?} instead of {:?}: {}",
                            self.allowed[place],
                            describe()
                        ),
                    );
                }
                let undecided = entry.state == State::Busy && self.silently_gone[place];
                let is_settled = self.discarding[place] == 0 && !undecided;
                if is_settled && self.allowed[place].len() > 1 {
                    self.allowed[place] = vec![contents];
                }
                if in_memory && !entry.protected && entry.slot.is_none()
                    || !in_memory && entry.state != State::Stored
                {
                    self.may_be_lost.remove(&page);
                }
            }
            Source::Nowhere => return fail(Check::NoCopy, describe()),
            Source::Destroyed if self.may_be_lost.contains(&page) => {}
            Source::Destroyed => return fail(Check::LostWithoutCause, describe()),
        }
        Ok(())
    }

    fn count_page(&self, page: u32, entry: &Entry, recount: &mut Recount) {
        recount.states[entry.state as usize] += 1;
        recount.present += u64::from(self.memory[page as usize].is_some());
        let in_memory = matches!(entry.state, State::Resident | State::Busy);
        recount.kept += u64::from(in_memory && entry.slot.is_some());
        let slot = entry.slot.into_iter();
        recount.slots += slot
            .map(|slot| self.shared.slots.copies(slot).len() as u64)
            .sum::<u64>();
        recount.staging += u64::from(entry.state == State::Staged);
    }

    fn check_counts(&mut self, recount: &Recount, used_most: u64) -> Result<(), Violation> {
        for (state, counted) in STATES.iter().zip(recount.states) {
            let gauge = self.shared.stats.pages(*state);
            if gauge != counted {
                return fail(
                    Check::Gauges,
                    format!("{counted} pages are {state:?}, the gauge says {gauge}"),
                );
            }
        }
        self.check_budget(recount, used_most)?;
        self.check_slots(recount)?;
        self.check_staging(recount)
    }

    fn check_budget(&mut self, recount: &Recount, used_most: u64) -> Result<(), Violation> {
        let counted = recount.states[State::Resident as usize]
            + recount.states[State::Busy as usize]
            + self.live_fetches.len() as u64
            + self.shared.compressed.taken_pages();
        let used = self.shared.budget.used();
        if used != counted {
            return fail(
                Check::Budget,
                format!("{used} pages are counted, {counted} are there or on their way"),
            );
        }
        if used > used_most {
            let limit = self.limit;
            return fail(
                Check::Budget,
                format!("{used} pages, {used_most} at most, by a limit of {limit}"),
            );
        }
        if recount.present > used {
            return fail(
                Check::Budget,
                format!("{} pages are there, {used} are counted", recount.present),
            );
        }
        Ok(())
    }

    fn check_slots(&self, recount: &Recount) -> Result<(), Violation> {
        let slots = &self.shared.slots;
        if slots.kept() != recount.kept {
            return fail(
                Check::Slots,
                format!("{} slots kept, {} counted", recount.kept, slots.kept()),
            );
        }
        let in_flight = self.servers.writes.iter();
        let in_flight = in_flight.map(|write| slots.copies(write.slot).len() as u64);
        let held = recount.slots + in_flight.sum::<u64>();
        let used: u64 = (0..SERVERS).map(|server| slots.usage(server).1).sum();
        if used != held {
            return fail(Check::Slots, format!("{held} slots held, {used} in use"));
        }
        Ok(())
    }

    fn check_staging(&mut self, recount: &Recount) -> Result<(), Violation> {
        let staging = &self.shared.staging;
        let runs = self.runs.iter().map(|run| match run.run.has_ended() {
            false => u64::from(run.run.pages.count),
            true => {
                let staged = |fate: &&Fate| matches!(fate, Fate::Staged(_));
                run.run.fates.iter().filter(staged).count() as u64
            }
        });
        let orphans = self.servers.writes.iter().filter(|write| {
            let entry = self.shared.table.load(write.staged.page);
            entry.state != State::Staged
                || entry.staging != Some(write.staged.staging.slot)
                || entry.generation != write.staged.generation
        });
        let held = recount.staging + runs.sum::<u64>() + orphans.count() as u64;
        let in_use = u64::from(staging.in_use());
        if in_use != held {
            return fail(
                Check::Staging,
                format!("{held} staging slots held, {in_use} in use"),
            );
        }
        // A smaller capacity is reached as slots beyond it come free.
        let backed = staging.backed();
        let ceiling = u64::from(staging.capacity()).max(self.backed_before);
        if in_use > backed || backed > ceiling {
            return fail(
                Check::Staging,
                format!("{in_use} staging slots in use, {backed} backed, {ceiling} allowed"),
            );
        }
        self.backed_before = backed;
        Ok(())
    }

    /// The clean pages that a run is about to punch lie on servers that are in reach.
    pub(crate) fn check_drops(&self, run: &OutRun) -> Result<(), Violation> {
        for (page, fate) in run.run.pages.pages().zip(&run.run.fates) {
            let slot = self.shared.table.load(page).slot;
            let reachable = slot
                .and_then(|slot| self.shared.slots.place(slot))
                .is_some_and(|place| self.servers.servers[place.slab.server].connected);
            if *fate == Fate::Clean && !reachable {
                return fail(Check::UnsafeDrop, format!("page {page} at {slot:?}"));
            }
        }
        Ok(())
    }

    /// All is quiet, every server in reach: nobody waits but for lost pages, and the guest is
    /// within its limit.
    pub(crate) fn check_quiet(&self) -> Result<(), Violation> {
        for (number, vcpu) in self.vcpus.iter().enumerate() {
            let Some(access) = vcpu.access else { continue };
            let is_lost = self.shared.table.state(PageIndex(access.page)) == State::Lost;
            if !is_lost || self.shared.lost_pages == LostPages::Poison {
                return fail(
                    Check::Stuck,
                    format!("vCPU {number} waits: {access:?}, {:?}", self.summary()),
                );
            }
        }
        let is_lost = |page: &u32| self.shared.table.state(PageIndex(*page)) == State::Lost;
        if let Some(page) = self.poisoned.iter().find(|page| !is_lost(page)) {
            return fail(
                Check::Poisoned,
                format!("page {page} is a memory error: {:?}", self.summary()),
            );
        }
        if let Some((pin, request)) = self.device.iter().next() {
            return fail(Check::Stuck, format!("{pin:?} waits: {request:?}"));
        }
        if self.shared.budget.is_pressed() || self.shared.budget.waiting() > 0 {
            return fail(
                Check::Stuck,
                format!("the limit is not reached: {:?}", self.summary()),
            );
        }
        let kept_back = |page: &u32| {
            let slot = self.shared.table.load(PageIndex(*page)).slot;
            slot.is_some_and(|slot| self.shared.slots.is_vacating(slot))
        };
        if let Some(page) = (0..PAGES).find(kept_back) {
            return fail(
                Check::Stuck,
                format!("page {page} was not moved: {:?}", self.summary()),
            );
        }
        if let Some(page) = (0..PAGES).find(|page| self.presence(*page) == Presence::Leaving) {
            return fail(Check::Stuck, format!("page {page} never left"));
        }
        if !self.orders.is_empty() || self.shared.staging.in_use() > 0 {
            return fail(Check::Stuck, format!("staging: {:?}", self.summary()));
        }
        Ok(())
    }

    /// For messages.
    pub(crate) fn summary(&self) -> impl std::fmt::Debug {
        let budget = &self.shared.budget;
        (
            ("budget", budget.used(), budget.limit(), budget.waiting()),
            (
                "staging",
                self.shared.staging.available(),
                self.orders.len(),
            ),
            STATES.map(|state| (state, self.shared.stats.pages(state))),
        )
    }

    /// Whether a range may be discarded, or remapped: nothing of it is pinned.
    pub(crate) fn is_unpinned(&self, run: PageRun) -> bool {
        run.pages()
            .all(|page| self.device_pages[page.0 as usize] == 0)
    }
}

const STATES: [State; State::COUNT] = [
    State::Absent,
    State::Resident,
    State::Busy,
    State::Staged,
    State::Stored,
    State::Filled,
    State::Lost,
];
