//! What a limit means in pages: for the guest's memory, for staging, and for the servers.

use std::sync::Mutex;

use outram_wire::compressed_share::{CompressedShare, ShareError};
use outram_wire::granularity::GranularityError;
use outram_wire::limits::{Standing, TooSmall, budget_pages};
use outram_wire::tuning::{QueueDepth, Tuning, Workers};
use outram_wire::units::{Limit, format_size};

use super::state_dir::Backing;
use super::{Course, Pager, lock};
use crate::crash_points::{self, Point};
use crate::engine::Shared;
use crate::remote::RemoteError;

/// What a guest may exceed its limit by for moments: pages that QEMU had populated before the
/// hand-over (firmware), until they are evicted.
pub const HEADROOM_BYTES: u64 = 4 << 20;

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
    #[error(transparent)]
    TooSmall(#[from] TooSmall),
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
    /// What the limit is, and of how much RAM.
    pub(super) fn standing(&self) -> Standing {
        *lock(&self.standing)
    }

    /// The limit as it was last asked for.
    pub fn limit(&self) -> Limit {
        self.standing().limit
    }

    /// Sets a new limit: returns once it is accepted and the servers have promised what it needs;
    /// it is reached in the background.
    pub fn tune(&self, limit: Limit) -> Result<(), LimitError> {
        let _alone = lock(&self.changing);
        let standing = self.standing();
        if self.course() != Course::Serving {
            return Err(LimitError::Leaving);
        }
        let next = Standing { limit, ..standing };
        next.check()?;
        self.promise(&next)?;
        crash_points::pass(Point::TunePromised);
        match self.back_staging(&standing, &next) {
            Ok(backing) => self.settle(next, backing),
            Err(error) => {
                self.promise_less(&standing);
                return Err(error);
            }
        }
        crash_points::pass(Point::TuneSettled);
        match self.update_record(|record| record.limit = limit) {
            // Only what a successor does not need either.
            Ok(()) => self.promise_less(&next),
            Err(error) => {
                tracing::warn!(%error, "a backend that takes over from this one would keep the former limit");
            }
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
        self.standing().compressed
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
        let _alone = lock(&self.changing);
        let next = share.map(|compressed| Standing {
            compressed,
            ..self.standing()
        });
        if let Some(next) = &next {
            self.promise(next).map_err(TuningError::Limit)?;
        }
        // What may fail comes first, so that all of it is in force or nothing.
        if let Some(workers) = tuning.workers
            && let Err(error) = self.evictors.set(workers)
        {
            // Where nothing was raised, nothing is to be lowered: more may be promised on purpose.
            if next.is_some() {
                self.promise_less(&self.standing());
            }
            return Err(error.into());
        }
        if let Some(next) = next {
            self.settle(next, self.staging.backing());
        }
        let pace = &self.shared.pace;
        granule
            .into_iter()
            .for_each(|pages| pace.set_granule(pages));
        let depth = tuning.queue_depth.into_iter();
        depth.for_each(|depth| pace.set_queue_depth(depth));
        match self.records.write_tuning(tuning) {
            Ok(()) if share.is_some() => self.promise_less(&self.standing()),
            Ok(()) => {}
            Err(error) => {
                tracing::warn!(%error, "a backend that takes over from this one would move the guest's memory as before");
            }
        }
        Ok(())
    }

    /// Allocates the staging that is needed beyond what was before, which is for [`Pager::settle`] to have used, or
    /// for [`Pager::unback_staging`] to give back.
    pub(super) fn back_staging(
        &self,
        before: &Standing,
        next: &Standing,
    ) -> Result<Backing<'_>, LimitError> {
        let [before, next] = [before, next].map(|standing| standing.sizes().staging_pages);
        let backing = self.staging.backing();
        // No more than what is new: where the kernel has too little memory, it takes back what it had given
        // within the range that it was asked for.
        backing
            .back(before, next.saturating_sub(before))
            .map_err(LimitError::Staging)?;
        Ok(backing)
    }

    /// Gives back what [`Pager::back_staging`] has allocated, for nothing comes of the change.
    pub(super) fn unback_staging(&self, before: &Standing, next: &Standing, backing: Backing<'_>) {
        let [before, next] = [before, next].map(|standing| standing.sizes().staging_pages);
        // Not all of it: pages may hold slots there still, from before the limit was lowered.
        self.shared.staging.retire_unused(before..next);
        backing.give_back_retired(&self.shared.staging);
        drop(backing);
        // Slots that had come free meanwhile went with them.
        self.rule.apply(&self.shared);
        self.shards.iter().for_each(super::Inbox::ring);
    }

    /// Changes what the limit is and of how much RAM; the servers have promised room for it, and its
    /// staging is there: nothing of that was given back since. While everything comes home, the limit stays
    /// out of the way.
    pub(super) fn settle(&self, next: Standing, backing: Backing<'_>) {
        let sizes = next.sizes();
        let (limit_pages, compressed_pages) = match self.course() {
            Course::Serving => (sizes.limit_pages, sizes.compressed_pages),
            Course::Homing | Course::Leaving | Course::Released => (next.ram_pages(), 0),
        };
        self.shared.staging.set_capacity(sizes.staging_pages);
        // At once: what staging still has is taken off the limit.
        backing.give_back_retired(&self.shared.staging);
        drop(backing);
        self.shared.slots.set_keep_allowance(sizes.keep_pages);
        self.pin_gate.set_limit(sizes.limit_pages);
        self.rule.set(&self.shared, limit_pages, next.ram_pages());
        self.shared
            .compressed
            .set_capacity(compressed_pages, &self.shared.budget);
        self.shards.iter().for_each(super::Inbox::ring);
        *lock(&self.standing) = next;
    }

    /// The guest's RAM has become less: the limit follows, and so does what the servers promise.
    /// Staging never grows by it.
    pub(super) fn shrink(&self, next: Standing) {
        self.settle(next, self.staging.backing());
        self.promise_less(&next);
    }

    /// Has the servers promise what is to be, if that is more than before; on a refusal all promises are
    /// as before.
    pub(super) fn promise(&self, next: &Standing) -> Result<(), LimitError> {
        let each = next.reserve_bytes(self.sessions.len());
        Ok(self.promises.raise(each)?)
    }

    /// Lets the servers promise no more than this needs, or than a successor does, which knows the limit as it was
    /// last written down.
    pub(super) fn promise_less(&self, standing: &Standing) {
        let recorded = lock(&self.record).limit;
        let each = least_promise(standing, recorded, self.sessions.len());
        self.promises.lower(each);
    }
}

/// What each of `servers` servers has to promise, by this limit and by the one that is written down.
fn least_promise(standing: &Standing, recorded: Limit, servers: usize) -> u64 {
    let by = |limit| Standing { limit, ..*standing }.reserve_bytes(servers);
    by(standing.limit).max(by(recorded))
}

#[cfg(test)]
mod tests {
    use outram_wire::units::PageSize;

    use super::*;

    #[test]
    fn as_much_stays_promised_as_a_successor_needs_by_the_limit_that_is_written_down() {
        let standing = |limit| Standing {
            limit,
            ram_bytes: 1 << 30,
            page_size: PageSize::BASE,
            compressed: CompressedShare::default(),
        };
        let [low, high] = [300, 600].map(|mib| Limit::LocalBytes(mib << 20));
        let needed = |limit| standing(limit).reserve_bytes(2);
        assert!(needed(low) > needed(high));
        for (limit, recorded) in [(low, low), (low, high), (high, low)] {
            assert_eq!(least_promise(&standing(limit), recorded, 2), needed(low));
        }
        assert_eq!(least_promise(&standing(high), high, 2), needed(high));
    }
}
