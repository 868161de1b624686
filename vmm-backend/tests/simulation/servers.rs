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
    pub(crate) fn new() -> Self {
        Self {
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

    fn stored(&self, slot: SlotId) -> Option<&BTreeMap<u32, Contents>> {
        let place = self.shared.slots.place(slot)?;
        let server = &self.servers.servers[place.slab.server];
        server.slabs.get(&place.slab.slab)
    }

    /// What a server holds in a slot.
    pub(crate) fn contents_of(&self, slot: SlotId) -> Option<&Contents> {
        self.stored(slot)?.get(&slot.index)
    }

    fn is_reachable(&self, slot: SlotId) -> bool {
        let place = self.shared.slots.place(slot);
        place.is_none_or(|place| self.servers.servers[place.slab.server].connected)
    }

    /// A server answers a fetch; sometimes with a bit wrong.
    pub(crate) fn serve_fetch(&mut self, number: usize) {
        let fetch = self.servers.fetches[number].fetch;
        if self.servers.fetches[number].answer.is_some() || !self.is_reachable(fetch.slot) {
            return;
        }
        let known = self.stored(fetch.slot).is_some();
        let held = self.contents_of(fetch.slot).cloned();
        let mut answer = known.then(|| held.unwrap_or_else(|| self.zero.clone()));
        if self.random.chance(8) {
            answer = answer.map(|contents| contents.with_flipped_bit(&mut self.random));
            self.may_be_lost.insert(fetch.page.0);
        }
        if self.is(Sabotage::SkipTagCheck)
            && let Some(contents) = &answer
        {
            let entry = self.shared.table.load(fetch.page);
            let key = &self.shared.key;
            let tag = key.tag(
                fetch.page,
                entry.generation,
                contents.bytes(),
                &mut Vec::new(),
            );
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
        let Some(slot) = self.allocate() else {
            return Started::Abandon(shard, staged);
        };
        let contents = self.staging[staged.staging.slot.0 as usize].clone();
        let contents = contents.expect("an order to write a slot that holds a page");
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
            done: false,
        });
        Started::Yes
    }

    fn allocate(&mut self) -> Option<SlotId> {
        if let Some(slot) = self.shared.slots.allocate(1).pop() {
            return Some(slot);
        }
        // No slab is leased anew before every shard knows what was lost.
        if self
            .servers
            .lost_notices
            .iter()
            .any(|lost| !lost.is_empty())
        {
            return None;
        }
        let first = self.random.below(SERVERS as u64) as usize;
        let server = (first..first + SERVERS)
            .map(|server| server % SERVERS)
            .find(|server| self.servers.servers[*server].connected)?;
        let slab = self.servers.next_slab;
        self.servers.next_slab += 1;
        self.servers.servers[server]
            .slabs
            .insert(slab, BTreeMap::new());
        let slab = SlabRef { server, slab };
        self.shared.slots.add_slab(slab, SLAB_SLOTS);
        self.shared.slots.allocate(1).pop()
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
        let Some(place) = self.shared.slots.place(slot) else {
            let write = self.servers.writes.swap_remove(number);
            return Some((write.shard, write.staged));
        };
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
            write.done = true;
        }
        None
    }

    /// A server is started anew, with nothing in it; it is found out at reconnecting.
    pub(crate) fn restart_empty(&mut self, server: usize) {
        let slabs = std::mem::take(&mut self.servers.servers[server].slabs);
        let slabs: Vec<_> = slabs
            .keys()
            .map(|slab| SlabRef {
                server,
                slab: *slab,
            })
            .collect();
        let lost = self.shared.slots.forget(&slabs);
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
}
