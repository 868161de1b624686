//! What a limit means in pages: for the guest's memory, for staging, and for the servers.

use std::sync::Mutex;

use outram_wire::compressed_share::{CompressedShare, ShareError};
use outram_wire::granularity::GranularityError;
use outram_wire::tuning::{QueueDepth, Tuning, Workers};
use outram_wire::units::{Limit, PageSize, format_size};

use super::state_dir::Backing;
use super::{Course, Pager, lock};
use crate::crash_points::{self, Point};
use crate::engine::Shared;
use crate::remote::RemoteError;

/// Smallest limit that is kept: room for the device's pins, staging and a few runs at once.
const MIN_LIMIT_BYTES: u64 = 16 << 20;

/// The same in pages, where these are huge.
const MIN_LIMIT_PAGES: u64 = 32;

/// Smallest limit that is kept for a guest with pages of this size.
pub fn min_limit_bytes(size: PageSize) -> u64 {
    size.pages_in(MIN_LIMIT_BYTES, MIN_LIMIT_PAGES) * size.bytes()
}

/// What a guest may exceed its limit by for moments: pages that QEMU had populated before the
/// hand-over (firmware), until they are evicted.
pub const HEADROOM_BYTES: u64 = 4 << 20;

/// Staging at least and at most: a few runs, and enough to ride out a burst of write-back.
const STAGING_LEAST_BYTES: u64 = 1 << 20;
/// See [`STAGING_LEAST_BYTES`].
const STAGING_MOST_BYTES: u64 = 64 << 20;
/// Staging at least in pages: two shards each read one in while another is written to a server.
const STAGING_LEAST_PAGES: u64 = 4;

/// Slabs are leased whole: beyond what is stored, this much may be left over in them.
const RESERVE_SLACK_BYTES: u64 = 128 << 20;

/// Why a guest's memory is not moved as was asked for.
#[derive(Debug, thiserror::Error)]
pub enum TuningError {
    /// So much at a time.
    #[error(transparent)]
    Granularity(#[from] GranularityError),
    /// So much of it kept compressed.
    #[error(transparent)]
    Compressed(#[from] ShareError),
    /// Where less of the limit is left for what is not compressed.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// By so many threads.
    #[error("not as many workers could be started; those that could be stay")]
    Workers(#[from] std::io::Error),
}

/// Why a limit was refused.
#[derive(Debug, thiserror::Error)]
pub enum LimitError {
    /// Too small.
    #[error("a limit of {} is too small: at least {} of the RAM of a guest with pages of {size} have to be local", format_size(*.bytes), format_size(min_limit_bytes(*.size)))]
    TooSmall {
        /// The limit.
        bytes: u64,
        /// Size of the guest's pages.
        size: PageSize,
    },
    /// More RAM than the page table can number.
    #[error("{} of guest RAM are more than the 16 TiB that are supported", format_size(*.0))]
    TooMuchRam(u64),
    /// The servers do not promise what the new limit needs.
    #[error(transparent)]
    Server(#[from] RemoteError),
    /// Everything is on its way home.
    #[error(
        "the guest is being detached ('outram detach --live'): all of its memory comes home whatever its limit is; interrupt that first"
    )]
    Leaving,
    /// The staging area could not grow.
    #[error("the staging area could not be enlarged: free memory on this host")]
    Staging(#[source] std::io::Error),
}

/// A limit in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The limit.
    pub(super) limit_pages: u64,
    /// Staging slots.
    pub staging_pages: u32,
    /// What resident pages may take.
    pub budget_pages: u64,
    /// How many of these compressed ones may take.
    pub(super) compressed_pages: u64,
    /// Resident pages that may keep their slot.
    pub(super) keep_pages: u64,
}

impl Sizes {
    /// Of a limit of so many bytes, which may be smaller than any that a guest gets; nothing is kept
    /// compressed.
    pub fn of(bytes: u64, ram_bytes: u64, size: PageSize) -> Self {
        let (limit_pages, ram_pages) = (bytes / size.bytes(), ram_bytes / size.bytes());
        let staging_pages = staging_pages(limit_pages, ram_pages, size);
        Self {
            limit_pages,
            staging_pages: staging_pages as u32,
            budget_pages: budget_pages(limit_pages, ram_pages, staging_pages),
            compressed_pages: 0,
            keep_pages: limit_pages / 4,
        }
    }
}

/// What a guest's limit is, and of how much RAM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Standing {
    /// As it was last asked for.
    pub(super) limit: Limit,
    /// RAM that is managed.
    pub(super) ram_bytes: u64,
    /// Size of its pages.
    pub(super) page_size: PageSize,
    /// How much of the limit may hold compressed pages.
    pub(super) compressed: CompressedShare,
}

impl Standing {
    /// Refuses a limit that cannot be kept.
    pub(super) fn check(&self) -> Result<(), LimitError> {
        let (bytes, size) = (self.limit.bytes(self.ram_bytes), self.page_size);
        match bytes < min_limit_bytes(size).min(self.ram_bytes) {
            true => Err(LimitError::TooSmall { bytes, size }),
            false => Ok(()),
        }
    }

    /// In pages. A share of RAM that shrank may be less than a limit has to be: it is the least then.
    pub(super) fn sizes(&self) -> Sizes {
        let least = min_limit_bytes(self.page_size).min(self.ram_bytes);
        let bytes = self.limit.bytes(self.ram_bytes).max(least);
        let sizes = Sizes::of(bytes, self.ram_bytes, self.page_size);
        // A guest that may have all of its RAM is never evicted from.
        let compressed_pages = match sizes.limit_pages >= self.ram_pages() {
            true => 0,
            false => self.compressed.of(sizes.limit_pages),
        };
        Sizes {
            compressed_pages,
            ..sizes
        }
    }

    /// All of its RAM, in pages.
    pub(super) fn ram_pages(&self) -> u64 {
        self.ram_bytes / self.page_size.bytes()
    }

    /// What each of `servers` servers has to promise.
    pub(super) fn reserve_bytes(&self, servers: usize) -> u64 {
        let (sizes, page_bytes) = (self.sizes(), self.page_size.bytes());
        let resident = sizes.budget_pages - sizes.compressed_pages;
        let remote = self.ram_bytes - resident.min(self.ram_pages()) * page_bytes;
        if remote == 0 {
            return 0;
        }
        (remote + sizes.keep_pages * page_bytes).div_ceil(servers as u64) + RESERVE_SLACK_BYTES
    }
}

fn staging_pages(limit_pages: u64, ram_pages: u64, size: PageSize) -> u64 {
    // A guest that may have all of its RAM is never evicted from.
    if limit_pages >= ram_pages {
        0
    } else {
        let least = size.pages_in(STAGING_LEAST_BYTES, STAGING_LEAST_PAGES);
        (limit_pages / 16).clamp(least, size.pages_in(STAGING_MOST_BYTES, least))
    }
}

/// Pages that may be resident beside `staging` pages of staging.
fn budget_pages(limit_pages: u64, ram_pages: u64, staging: u64) -> u64 {
    // Twice the RAM has its watermarks above all of the RAM.
    if limit_pages >= ram_pages {
        2 * ram_pages
    } else {
        limit_pages.saturating_sub(staging)
    }
}

/// Staging slots that the guest may ever need.
pub(super) fn most_staging_pages(ram_bytes: u64, size: PageSize) -> u32 {
    let ram_pages = ram_bytes / size.bytes();
    // The largest limit that still pages.
    staging_pages(ram_pages.saturating_sub(1), ram_pages, size) as u32
}

/// Keeps the budget at the limit less what staging takes of it, also while staging shrinks.
#[derive(Debug)]
pub(super) struct BudgetRule(Mutex<Ruled>);

#[derive(Clone, Copy, Debug)]
struct Ruled {
    limit_pages: u64,
    ram_pages: u64,
}

impl Ruled {
    fn apply(self, shared: &Shared) {
        let staging = shared.staging.backed();
        shared
            .budget
            .set_limit(budget_pages(self.limit_pages, self.ram_pages, staging));
    }
}

impl BudgetRule {
    pub(super) fn new(limit_pages: u64, ram_pages: u64) -> Self {
        Self(Mutex::new(Ruled {
            limit_pages,
            ram_pages,
        }))
    }

    pub(super) fn limit_pages(&self) -> u64 {
        lock(&self.0).limit_pages
    }

    pub(super) fn set(&self, shared: &Shared, limit_pages: u64, ram_pages: u64) {
        let mut ruled = lock(&self.0);
        *ruled = Ruled {
            limit_pages,
            ram_pages,
        };
        ruled.apply(shared);
    }

    /// To be called whenever slots were given back. Under the lock: what it sets never comes behind, and
    /// in place of, what a later [`BudgetRule::set`] does.
    pub(super) fn apply(&self, shared: &Shared) {
        lock(&self.0).apply(shared);
    }
}

impl Pager {
    /// The limit as it was last asked for.
    pub fn limit(&self) -> Limit {
        lock(&self.standing).limit
    }

    /// Sets a new limit: returns once it is accepted and the servers have promised what it needs;
    /// it is reached in the background.
    pub fn tune(&self, limit: Limit) -> Result<(), LimitError> {
        let mut standing = lock(&self.standing);
        if self.course() != Course::Serving {
            return Err(LimitError::Leaving);
        }
        let next = Standing { limit, ..*standing };
        next.check()?;
        self.promise(&standing, &next)?;
        crash_points::pass(Point::TunePromised);
        match self.back_staging(&standing, &next) {
            Ok(backing) => self.settle(&mut standing, next, backing),
            Err(error) => {
                self.promise_less(&standing);
                return Err(error);
            }
        }
        crash_points::pass(Point::TuneSettled);
        if let Err(error) = self.update_record(|record| record.limit = limit) {
            tracing::warn!(%error, "a backend that takes over from this one would keep the former limit");
        }
        crash_points::pass(Point::TuneRecorded);
        Ok(())
    }

    /// How much of the guest's memory is moved at a time, in bytes.
    pub fn granularity_bytes(&self) -> u64 {
        u64::from(self.shared.pace.granule()) * self.shared.page_size.bytes()
    }

    /// Threads that evict.
    pub fn workers(&self) -> Option<Workers> {
        self.evictors.workers().try_into().ok()
    }

    /// How much of the guest's memory is on its way at a time.
    pub fn queue_depth(&self) -> QueueDepth {
        self.shared.pace.queue_depth()
    }

    /// How much of the limit may hold what left, compressed.
    pub fn compressed_share(&self) -> CompressedShare {
        lock(&self.standing).compressed
    }

    /// Has the guest's memory moved so from now on; what is `None` stays.
    pub fn set_tuning(&self, tuning: &Tuning) -> Result<(), TuningError> {
        let size = self.shared.page_size;
        let granule = tuning
            .granularity
            .map(|granularity| granularity.pages(size));
        let granule = granule.transpose()?;
        let share = tuning.compressed_share;
        share.map(|share| share.check(size)).transpose()?;
        // So that of two changes at once, the one that lasts is the one that is written last.
        let mut standing = lock(&self.standing);
        if let Some(compressed) = share {
            let next = Standing {
                compressed,
                ..*standing
            };
            self.promise(&standing, &next).map_err(TuningError::Limit)?;
            self.settle(&mut standing, next, self.staging.backing());
        }
        if let Some(workers) = tuning.workers {
            self.evictors.set(workers)?;
        }
        let pace = &self.shared.pace;
        granule
            .into_iter()
            .for_each(|pages| pace.set_granule(pages));
        let depth = tuning.queue_depth.into_iter();
        depth.for_each(|depth| pace.set_queue_depth(depth));
        if let Err(error) = self.records.write_tuning(tuning) {
            tracing::warn!(%error, "a backend that takes over from this one would move the guest's memory as before");
        }
        Ok(())
    }

    /// Allocates the staging that is needed beyond what was before, which is for [`Pager::settle`] to have used.
    pub(super) fn back_staging(
        &self,
        before: &Standing,
        next: &Standing,
    ) -> Result<Backing<'_>, LimitError> {
        let staging_pages = next.sizes().staging_pages;
        let backing = self.staging.backing();
        if staging_pages > before.sizes().staging_pages {
            backing
                .back(0, staging_pages)
                .map_err(LimitError::Staging)?;
        }
        Ok(backing)
    }

    /// Changes what the limit is and of how much RAM; the servers have promised room for it, and its
    /// staging is there: nothing of that was given back since. While everything comes home, the limit stays
    /// out of the way.
    pub(super) fn settle(&self, standing: &mut Standing, next: Standing, backing: Backing<'_>) {
        let sizes = next.sizes();
        let (limit_pages, compressed_pages) = match self.course() {
            Course::Serving => (sizes.limit_pages, sizes.compressed_pages),
            Course::Homing | Course::Leaving | Course::Released => (next.ram_pages(), 0),
        };
        self.shared.staging.set_capacity(sizes.staging_pages);
        drop(backing);
        self.shared.slots.set_keep_allowance(sizes.keep_pages);
        self.pin_gate.set_limit(sizes.limit_pages);
        self.rule.set(&self.shared, limit_pages, next.ram_pages());
        self.shared
            .compressed
            .set_capacity(compressed_pages, &self.shared.budget);
        self.shards.iter().for_each(super::Inbox::ring);
        *standing = next;
    }

    /// The guest's RAM has become less: the limit follows, and so does what the servers promise.
    /// Staging never grows by it.
    pub(super) fn shrink(&self, standing: &mut Standing, next: Standing) {
        self.settle(standing, next, self.staging.backing());
        self.promise_less(standing);
    }

    /// Has every server promise its part of what is to be, if that is more than before; on a
    /// refusal all promises are as before.
    pub(super) fn promise(&self, before: &Standing, next: &Standing) -> Result<(), LimitError> {
        let servers = self.sessions.len();
        let bytes = next.reserve_bytes(servers);
        if bytes <= before.reserve_bytes(servers) {
            return Ok(());
        }
        for session in self.sessions.iter() {
            if let Err(error) = session.reserve(bytes) {
                self.promise_less(before);
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Lets the servers promise no more than this needs. Where one cannot be told, it keeps more
    /// room than needed.
    pub(super) fn promise_less(&self, standing: &Standing) {
        let bytes = standing.reserve_bytes(self.sessions.len());
        for session in self.sessions.iter() {
            if let Err(error) = session.reserve(bytes) {
                tracing::warn!(%error, "a reservation stays larger than needed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    const BOTH: [PageSize; 2] = [PageSize::BASE, PageSize::HUGE];

    fn standing(local_bytes: u64, page_size: PageSize, share: &str) -> Standing {
        Standing {
            limit: Limit::LocalBytes(local_bytes),
            ram_bytes: GIB,
            page_size,
            compressed: share.parse().expect("a share"),
        }
    }

    #[test]
    fn servers_promise_room_for_what_compressed_pages_displace() {
        let [none, some] = ["0", "0.25"].map(|share| standing(GIB / 2, PageSize::BASE, share));
        assert_eq!(some.sizes().budget_pages, none.sizes().budget_pages);
        assert_eq!(some.sizes().compressed_pages, GIB / 8 / 4096);
        assert_eq!(some.reserve_bytes(1) - none.reserve_bytes(1), GIB / 8);
    }

    #[test]
    fn limit_staging_and_budget_add_up() {
        for size in BOTH {
            let sizes = standing(GIB / 2, size, "0").sizes();
            assert_eq!(
                sizes.budget_pages + u64::from(sizes.staging_pages),
                GIB / 2 / size.bytes()
            );
            assert!(u64::from(sizes.staging_pages) <= u64::from(most_staging_pages(GIB, size)));
        }
    }

    #[test]
    fn a_guest_with_all_of_its_ram_local_needs_no_server() {
        for size in BOTH {
            let all = standing(GIB, size, "0.5");
            assert_eq!(all.reserve_bytes(1), 0);
            let sizes = all.sizes();
            assert_eq!((sizes.staging_pages, sizes.compressed_pages), (0, 0));
        }
    }

    #[test]
    fn a_tiny_limit_is_refused() {
        for (size, least) in [(PageSize::BASE, "16 MiB"), (PageSize::HUGE, "64 MiB")] {
            let least_bytes = min_limit_bytes(size);
            assert!(standing(least_bytes, size, "0").check().is_ok());
            let refused = standing(least_bytes - size.bytes(), size, "0").check();
            let reason = refused.expect_err("too little").to_string();
            assert!(reason.contains(least), "{reason}");
        }
    }
}
