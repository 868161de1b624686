//! The pager's engine: page states, faults, eviction, reclaim. Pure: events in, calls on [`Ports`]
//! out. It knows no file descriptor, socket, clock or thread, so that the whole of it runs in a
//! seeded simulation.
//!
//! Ownership: a [`shard::Shard`] is the only writer of its pages' states. The one exception is a
//! run handed to an evictor ([`eviction::Run`]): while its pages are `Busy`, the evictor alone
//! writes their table entries, until the run is handed back.
//!
//! Lock order: [`staging::StagingPool`], [`compressed::CompressedPool`] and [`slots::SlotPool`] are leaf
//! locks, never held together, nor across a call on a port.

pub mod ages;
pub mod budget;
pub mod compressed;
pub mod eviction;
mod guesses;
pub mod pace;
pub mod policy;
pub mod prefetch;
pub mod recovery;
pub mod seal;
pub mod shard;
pub mod slots;
pub mod staging;
pub mod stats;
pub mod table;
pub mod tag;

use std::fmt;
use std::sync::Arc;

use outram_wire::lost_pages::LostPages;
pub use outram_wire::units::PageSize;

/// A page of guest RAM: its place in the page table. Regions follow each other in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageIndex(pub u32);

impl fmt::Display for PageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Neighbouring pages of one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageRun {
    /// First page.
    pub first: PageIndex,
    /// Number of pages, at least 1.
    pub count: u32,
}

impl PageRun {
    /// The run of one page.
    pub fn single(page: PageIndex) -> Self {
        Self {
            first: page,
            count: 1,
        }
    }

    /// The pages in order.
    pub fn pages(self) -> impl DoubleEndedIterator<Item = PageIndex> {
        (self.first.0..self.first.0 + self.count).map(PageIndex)
    }

    /// Whether `page` is one of the run's.
    pub fn contains(self, page: PageIndex) -> bool {
        page.0 >= self.first.0 && page.0 - self.first.0 < self.count
    }

    /// One past the last page.
    pub fn end(self) -> PageIndex {
        PageIndex(self.first.0 + self.count)
    }

    /// The pages that two runs share.
    pub fn intersection(self, other: Self) -> Option<Self> {
        let first = self.first.max(other.first);
        let end = self.end().min(other.end());
        (first < end).then(|| Self {
            first,
            count: end.0 - first.0,
        })
    }
}

/// Counts how often a page was staged; part of its tag and of the nonce that it is sealed under. 48
/// bits are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Generation(pub u64);

impl Generation {
    /// Largest generation that the table can hold: a page staged every microsecond reaches it
    /// after nine years.
    pub const MAX: u64 = (1 << 48) - 1;

    /// The next generation.
    ///
    /// # Panics
    /// Past [`Generation::MAX`]: a repeated generation would break the tags' binding and repeat
    /// a nonce.
    pub fn next(self) -> Self {
        assert!(self.0 < Self::MAX, "a page's generations are used up");
        Self(self.0 + 1)
    }
}

/// A place for a page in the staging area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StagingSlot(pub u32);

/// A place for a page on the memory servers: a group of slabs (one (group, slot) finds every
/// copy) and the page's number in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotId {
    /// The group of slabs; 24 bits are used.
    pub group: u32,
    /// The page within each slab of the group; 24 bits are used.
    pub index: u32,
}

/// How an attempt to put a page into the guest's memory ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Install {
    /// The page is in place and its waiters are awake.
    Done,
    /// A page was there already: it stays, counts as dirty, and has to be woken.
    Exists,
    /// The VMM is changing its mappings: read all events, then try again.
    Again,
    /// The host's pool of huge pages has none left: try again once one was given back to it.
    PoolEmpty,
    /// The VMM or the mapping is gone.
    Gone,
}

/// Names one fetch, so that an answer to a cancelled one is told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FetchId(pub u64);

/// A page to be read from the memory servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Comes back with the answer.
    pub id: FetchId,
    /// The page wanted.
    pub page: PageIndex,
    /// Where it lies.
    pub slot: SlotId,
    /// Whether nobody waits for it yet: it goes behind what somebody waits for.
    pub ahead: bool,
    /// The next one follows at once, and is fetched ahead: both go by one request.
    pub with_next: bool,
}

/// A page in staging, to be written to the memory servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagedPage {
    /// The page.
    pub page: PageIndex,
    /// Where its bytes lie.
    pub staging: staging::Ticket,
    /// Its generation at staging.
    pub generation: Generation,
    /// Whether it is sealed there, as all are but those that an earlier build left, and those of guests
    /// whose pages are not sealed.
    pub is_sealed: bool,
}

/// Names a pin request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PinId(pub u64);

/// Why pages could not be pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PinRefused {
    /// A page is lost.
    #[error("a page of the request is lost")]
    Lost,
    /// The guest is ending.
    #[error("the guest is ending")]
    Ending,
    /// A page's memory was unplugged.
    #[error("a page of the request was unplugged")]
    Unplugged,
}

/// What a shard needs of the world. All calls but [`Ports::fetch`], [`Ports::start_run`] and
/// [`Ports::write_back`] act at once; those three only hand work out.
pub trait Ports {
    /// Makes the pages zero and wakes their waiters; stops at the first that cannot be. Returns
    /// how many were made, and how the attempt on the next one ended (`Done` where all were). A run that
    /// is in more than one of the VMM's mappings may be `Gone` as a whole, here as in [`Ports::copy_row`].
    fn zero(&mut self, run: PageRun) -> (u32, Install);
    /// Puts a page in place, write-protected if `protect`, and wakes its waiters.
    fn copy(&mut self, page: PageIndex, bytes: &[u8], protect: bool) -> Install;
    /// Puts pages in place that follow one another, unprotected, from the bytes of all of them, and wakes their
    /// waiters; stops at the first that cannot be. Returns how many were put in place, and how the attempt on the
    /// next one ended: that may be [`Install::Again`] whatever it was where there were any before it.
    fn copy_row(&mut self, run: PageRun, bytes: &[u8]) -> (u32, Install);
    /// Puts a page in place from its staging slot and wakes its waiters.
    fn copy_staged(&mut self, page: PageIndex, slot: StagingSlot) -> Install;
    /// Reads a staging slot, which the shard holds.
    fn read_staged(&mut self, slot: StagingSlot, bytes: &mut [u8]);
    /// Lifts the write protection of one resident page and wakes its waiters.
    fn unprotect(&mut self, page: PageIndex) -> Install;
    /// Makes every access to the page a memory error, until it is put in place again, and wakes its
    /// waiters.
    fn poison(&mut self, page: PageIndex) -> Install;
    /// Wakes waiters without changing anything.
    fn wake(&mut self, run: PageRun);
    /// Whether the guest's memory has a page there, as the kernel says.
    fn is_present(&mut self, page: PageIndex) -> bool;
    /// Starts reading a page; answered by [`shard::Shard::on_fetched`], after reconnecting if
    /// need be. Returns false where the server is out of reach now.
    fn fetch(&mut self, fetch: Fetch) -> bool;
    /// Sends what waits for another to go with it ([`Fetch::with_next`]), whether that came or not.
    fn send_waited_for(&mut self);
    /// Hands out a run; answered by [`shard::Shard::on_run_done`].
    fn start_run(&mut self, run: eviction::Run);
    /// Queues a page for write-back; answered by [`shard::Shard::on_written_back`].
    fn write_back(&mut self, page: StagedPage);
    /// Writes a page's bytes into a staging slot, which the shard holds.
    fn stage(&mut self, slot: StagingSlot, bytes: &[u8]);
    /// Answers a pin request.
    fn answer_pin(&mut self, pin: PinId, result: Result<(), PinRefused>);
    /// Asks the other shards to evict, or to look for room.
    fn alert_shards(&mut self);
    /// Microseconds on a clock that never goes back.
    fn now_us(&self) -> u64;
}

/// What all shards of a guest share.
pub struct Shared {
    /// Size of all of its pages.
    pub page_size: PageSize,
    /// States of all pages.
    pub table: table::PageTable,
    /// Host memory in use against the limit.
    pub budget: budget::Budget,
    /// Places in the staging area.
    pub staging: staging::StagingPool,
    /// What left not long ago, compressed.
    pub compressed: compressed::CompressedPool,
    /// Places on the memory servers.
    pub slots: slots::SlotPool,
    /// How its memory is moved.
    pub pace: pace::Pace,
    /// How long pages have been there.
    pub ages: ages::Ages,
    /// Key that the guest's pages leave and come back under.
    pub key: seal::PageKey,
    /// What becomes of the guest where it uses a page that is lost.
    pub lost_pages: LostPages,
    /// Counters and gauges.
    pub stats: stats::Stats,
}

impl Shared {
    /// Lets so many pages leave slabs that their servers want back as there is room for on servers that
    /// `may_take` any, beside what is staged already and what is to be left; whether it is any. Others
    /// could not be written, and what is evicted would find no place in staging.
    pub fn let_pages_move(&self, left: u64, may_take: &dyn Fn(slots::ServerIndex) -> bool) -> bool {
        let pages = match self.slots.vacating_pages() {
            0 => 0,
            _ => {
                let wanted = u64::from(self.staging.taken()) + left;
                self.slots.room(may_take).saturating_sub(wanted)
            }
        };
        self.slots.allow_moves(pages);
        pages > 0
    }

    /// Keeps a page that is about to leave compressed, where that is wished and of use.
    fn keep_compressed(
        &self,
        page: PageIndex,
        generation: Generation,
        bytes: &[u8],
        press: &mut Option<compressed::Press>,
    ) {
        self.compressed
            .offer(page, generation, bytes, press, &self.budget);
    }
}

/// [`Shared`], shared.
pub type SharedRef = Arc<Shared>;
