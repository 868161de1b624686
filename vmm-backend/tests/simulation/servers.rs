//! Memory servers, the way to them, and the writer that drains staging.

use std::collections::{BTreeMap, HashSet};

use outram_backend::engine::slots::SlabRef;
use outram_backend::engine::table::State;
use outram_backend::engine::{Fetch, FetchId, PageIndex, SlotId, StagedPage};

use crate::contents::Contents;
use crate::sabotage::Sabotage;
use crate::world::{PAGES, SHARDS, World};

pub(crate) const SERVERS: usize = 2;
const SLAB_SLOTS: u32 = 40;

#[derive(Debug, Default)]
pub(crate) struct Server {
    pub(crate) connected: bool,
    pub(crate) slabs: BTreeMap<u64, BTreeMap<u32, Contents>>,
}

/// A fetch on its way; `answer` once it was served.
#[derive(Debug)]
pub(crate) struct FetchInFlight {
    pub(crate) shard: usize,
    pub(crate) fetch: Fetch,
    /// `None` inside: the server says that the slot is not ours.
    pub(crate) answer: Option<Option<Contents>>,
}

/// A fetch that the engine counts room for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LiveFetch {
    pub(crate) id: FetchId,
    pub(crate) slot: SlotId,
}

#[derive(Debug)]
pub(crate) struct WriteInFlight {
    pub(crate) shard: usize,
    pub(crate) staged: StagedPage,
    pub(crate) slot: SlotId,
    contents: Contents,
    /// Slabs that have it.
    carried: Vec<SlabRef>,
    pub(crate) done: bool,
}

#[derive(Debug)]
pub(crate) struct Servers {
    pub(crate) servers: Vec<Server>,
    next_slab: u64,
    pub(crate) fetches: Vec<FetchInFlight>,
    pub(crate) writes: Vec<WriteInFlight>,
    /// Groups lost that each shard has not been told of.
    pub(crate) lost_notices: [HashSet<u32>; SHARDS],
    /// Copies that each group has, each on another server.
    copies: usize,
    /// Groups that have lost a copy, of which no shard was told.
    pub(crate) degraded: Vec<u32>,
}

/// What the writer did with an order.
pub(crate) enum Started {
    /// It is on its way, or was not needed any longer.
    Yes,
    /// It has to go back to its shard.
    Abandon(usize, StagedPage),
    /// Nothing to do, or no server to do it with.
    No,
}

impl Servers {
    pub(crate) fn new(copies: usize) -> Self {
        Self {
            copies,
            degraded: Vec::new(),
            servers: (0..SERVERS).map(|_| Server::default()).collect(),
            next_slab: 0,
            fetches: Vec::new(),
            writes: Vec::new(),
            lost_notices: Default::default(),
        }
    }
}

impl World {
    pub(crate) fn set_connected(&mut self, server: usize, connected: bool) {
        self.servers.servers[server].connected = connected;
        if connected || !self.is(Sabotage::HideDisconnect) {
            self.shared.slots.set_connected(server, connected);
        }
    }

    fn slab(&self, slab: SlabRef) -> Option<&BTreeMap<u32, Contents>> {
        self.servers.servers[slab.server].slabs.get(&slab.slab)
    }

    /// What the servers hold in a slot; nothing where one of the copies is not as the others.
    pub(crate) fn contents_of(&self, slot: SlotId) -> Option<&Contents> {
        let copies = self.shared.slots.copies(slot).into_iter();
        let mut held = copies.map(|copy| self.slab(copy.slab)?.get(&slot.index));
        let first = held.next()??;
        held.all(|other| other == Some(first)).then_some(first)
    }

    /// A server answers a fetch; sometimes with a bit wrong.
    pub(crate) fn serve_fetch(&mut self, number: usize) {
        let fetch = self.servers.fetches[number].fetch;
        if self.servers.fetches[number].answer.is_some() {
            return;
        }
        // Of several copies any that is in reach will do.
        let copies = self.shared.slots.copies(fetch.slot);
        let mut near = copies.clone();
        near.retain(|copy| self.servers.servers[copy.slab.server].connected);
        let slab = match self.random.index(near.len()) {
            Some(copy) => self.slab(near[copy].slab),
            None if copies.is_empty() => None,
            None => return,
        };
        let held = slab.map(|slab| slab.get(&fetch.slot.index).cloned());
        let mut answer = held.map(|held| held.unwrap_or_else(|| self.zero.clone()));
        if self.servers.copies == 1 && self.random.chance(8) {
            answer = answer.map(|contents| contents.with_flipped_bit(&mut self.random));
            self.may_be_lost.insert(fetch.page.0);
        }
        if self.is(Sabotage::SkipTagCheck)
            && let Some(contents) = &answer
        {
            let entry = self.shared.table.load(fetch.page);
            let (key, mut bytes) = (&self.shared.key, contents.bytes().to_vec());
            if key.seals() {
                // Sealed as what it is the text of, it is this again, and has the tag that is taken.
                key.seal(fetch.page, entry.generation, &mut bytes);
            }
            let tag = key.seal(fetch.page, entry.generation, &mut bytes);
            if entry.state == State::Stored {
                let entry = outram_backend::engine::table::Entry { tag, ..entry };
                self.shared.table.store(fetch.page, &entry);
            }
        }
        self.servers.fetches[number].answer = Some(answer);
    }

    /// The writer takes an order.
    pub(crate) fn start_write(&mut self) -> Started {
        let connected = self.servers.servers.iter().any(|server| server.connected);
        if !connected {
            return Started::No;
        }
        let Some(number) = self.random.index(self.orders.len()) else {
            return Started::No;
        };
        let Some((shard, staged)) = self.orders.remove(number) else {
            return Started::No;
        };
        if !self.shared.staging.start_write(staged.staging) {
            return Started::Yes;
        }
        // Servers always lend more here: as if they did not.
        if self.random.chance(20) {
            let wanted = self.random.below(10);
            self.shared.slots.want_back(wanted);
            self.alerted = [true; SHARDS];
        }
        let Some(slot) = self.allocate() else {
            return Started::Abandon(shard, staged);
        };
        let contents = self.staging[staged.staging.slot.0 as usize].clone();
        let mut contents = contents.expect("an order to write a slot that holds a page");
        if self.shared.key.seals() && !staged.is_sealed {
            let mut bytes = contents.bytes().to_vec();
            let key = &self.shared.key;
            key.seal(staged.page, staged.generation, &mut bytes);
            contents = Contents::new(&bytes);
        }
        let sealed_as = (staged.page.0, staged.generation.0);
        let sent = *self.sent.entry(sealed_as).or_insert(contents.hash());
        if sent != contents.hash() {
            self.sent_twice = Some(sealed_as);
        }
        self.servers.writes.push(WriteInFlight {
            shard,
            staged,
            slot,
            contents,
            carried: Vec::new(),
            done: false,
        });
        Started::Yes
    }

    fn allocate(&mut self) -> Option<SlotId> {
        let slots = &self.shared.slots;
        if let Some(slot) = slots.allocate(1, &|_| true).pop() {
            return Some(slot);
        }
        // As if no server lent more.
        if self.random.chance(200)
            && let Some(slot) = slots.allocate_vacating(1, &|_| true).pop()
        {
            return Some(slot);
        }
        match self.lease_group() {
            true => self.shared.slots.allocate(1, &|_| true).pop(),
            false => None,
        }
    }

    /// Lets pages move out of slabs that are wanted back, into those that servers lend for them.
    pub(crate) fn let_pages_move(&mut self) {
        if self.shared.slots.vacating_pages() == 0 {
            return;
        }
        let may_move = self.shared.let_pages_move(0, &|_| true);
        if may_move
            || self.random.chance(500)
                && self.lease_group()
                && self.shared.let_pages_move(0, &|_| true)
        {
            self.alerted = [true; SHARDS];
        }
    }

    /// Servers lend more, if so many are within reach as have to hold each page.
    fn lease_group(&mut self) -> bool {
        // No slab is leased anew before every shard knows what was lost.
        if self
            .servers
            .lost_notices
            .iter()
            .any(|lost| !lost.is_empty())
        {
            return false;
        }
        let first = self.random.below(SERVERS as u64) as usize;
        let near = (first..first + SERVERS)
            .map(|server| server % SERVERS)
            .filter(|server| self.servers.servers[*server].connected);
        let near: Vec<_> = near.take(self.servers.copies).collect();
        if near.len() < self.servers.copies {
            return false;
        }
        let slabs: Vec<_> = near.into_iter().map(|server| self.lease(server)).collect();
        self.shared.slots.add_group(&slabs, SLAB_SLOTS);
        // Before any page lies there.
        if !self.is(Sabotage::WriteNoGroups) {
            self.written.groups = (self.shared.slots.groups(), self.shared.slots.next_group());
        }
        true
    }

    fn lease(&mut self, server: usize) -> SlabRef {
        let slab = self.servers.next_slab;
        self.servers.next_slab += 1;
        let slabs = &mut self.servers.servers[server].slabs;
        slabs.insert(slab, BTreeMap::new());
        SlabRef { server, slab }
    }

    /// A server takes a write in; its acknowledgement comes later. Returns the write if it has to
    /// be given up.
    pub(crate) fn carry_write(&mut self, number: usize) -> Option<(usize, StagedPage)> {
        let (slot, done) = {
            let write = &self.servers.writes[number];
            (write.slot, write.done)
        };
        if done {
            return None;
        }
        let copies = self.shared.slots.copies(slot);
        if copies.is_empty() {
            let write = self.servers.writes.swap_remove(number);
            return Some((write.shard, write.staged));
        }
        let carried = &self.servers.writes[number].carried;
        let mut missing = copies.iter().filter(|copy| !carried.contains(&copy.slab));
        let Some(place) = missing.next().copied() else {
            self.servers.writes[number].done = true;
            return None;
        };
        let is_last = missing.next().is_none();
        if !self.servers.servers[place.slab.server].connected {
            // Resubmitted after reconnecting, or given up.
            if !self.random.chance(100) {
                return None;
            }
            let write = self.servers.writes.swap_remove(number);
            self.shared.slots.free(slot);
            return Some((write.shard, write.staged));
        }
        let early = self.is(Sabotage::AckEarly) && self.random.chance(50);
        let write = &mut self.servers.writes[number];
        let server = &mut self.servers.servers[place.slab.server];
        if let Some(slab) = server.slabs.get_mut(&place.slab.slab) {
            if !early {
                slab.insert(place.index, write.contents.clone());
            }
            write.carried.push(place.slab);
            write.done = is_last;
        }
        None
    }

    /// What is left of a write whose backend has died: some of its copies arrive.
    pub(crate) fn deliver(&mut self, number: usize) {
        let write = &self.servers.writes[number];
        let (slot, contents) = (write.slot, write.contents.clone());
        for copy in self.shared.slots.copies(slot) {
            let slabs = &mut self.servers.servers[copy.slab.server].slabs;
            if self.random.chance(500)
                && let Some(slab) = slabs.get_mut(&copy.slab.slab)
            {
                slab.insert(slot.index, contents.clone());
            }
        }
    }

    /// Whether a server holds the only copy of anything.
    fn holds_last_copy(&self, server: usize) -> bool {
        let groups = self.shared.slots.groups();
        let elsewhere = |number| {
            let mut others = groups.iter().filter(|place| place.number == number);
            others.any(|place| place.slab.server != server)
        };
        let mut own = groups.iter().filter(|place| place.slab.server == server);
        own.any(|place| !elsewhere(place.number))
    }

    /// A server is started anew, with nothing in it; it is found out at reconnecting.
    pub(crate) fn restart_empty(&mut self, server: usize) {
        if self.servers.copies > 1 && self.holds_last_copy(server) {
            return;
        }
        let slabs = std::mem::take(&mut self.servers.servers[server].slabs);
        let slabs: Vec<_> = slabs
            .keys()
            .map(|slab| SlabRef {
                server,
                slab: *slab,
            })
            .collect();
        let forgotten = self.shared.slots.forget(&slabs);
        self.servers.degraded.extend(forgotten.degraded);
        let lost = forgotten.lost;
        for page in 0..PAGES {
            let entry = self.shared.table.load(PageIndex(page));
            let in_lost = entry.slot.is_some_and(|slot| lost.contains(&slot.group));
            if in_lost && matches!(entry.state, State::Stored | State::Busy) {
                self.may_be_lost.insert(page);
            }
        }
        for notices in &mut self.servers.lost_notices {
            notices.extend(&lost);
        }
        self.set_connected(server, true);
    }

    /// Slabs that became empty go back.
    pub(crate) fn release_slabs(&mut self) {
        for slab in self.shared.slots.drain_releasable() {
            self.servers.servers[slab.server].slabs.remove(&slab.slab);
        }
    }

    /// A bit of a stored page rots.
    pub(crate) fn flip_stored_bit(&mut self) {
        if self.servers.copies > 1 {
            // No loss is excused where there is another copy.
            return;
        }
        let page = self.random.below(u64::from(PAGES)) as u32;
        let entry = self.shared.table.load(PageIndex(page));
        let Some(slot) = entry.slot else { return };
        let Some(place) = self.shared.slots.place(slot) else {
            return;
        };
        let slabs = &mut self.servers.servers[place.slab.server].slabs;
        if let Some(contents) = slabs
            .get_mut(&place.slab.slab)
            .and_then(|slab| slab.get_mut(&place.index))
        {
            *contents = contents.with_flipped_bit(&mut self.random);
            self.may_be_lost.insert(page);
        }
    }

    /// What is compressed is forgotten, but for bytes that a page never had.
    pub(crate) fn spoil_compressed(&mut self) {
        let (pool, budget) = (&self.shared.compressed, &self.shared.budget);
        if !pool.is_on() {
            return;
        }
        pool.set_capacity(0, budget);
        pool.set_capacity(self.written.compressed, budget);
        let page = PageIndex(self.random.below(u64::from(PAGES)) as u32);
        let generation = self.shared.table.load(page).generation;
        let wrong = Contents::filled(self.random.next());
        pool.offer(page, generation, wrong.bytes(), &mut None, budget);
        // What was given back may be what others wait for.
        self.alerted = [true; SHARDS];
    }
}
