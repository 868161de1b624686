//! What a limit means in pages: for the guest's memory, for staging, and for the servers.

use std::sync::atomic::{AtomicU64, Ordering};

use outram_wire::units::{Limit, PAGE_SIZE, format_size};

use super::{Pager, lock};
use crate::engine::Shared;
use crate::remote::RemoteError;

const PAGE: u64 = PAGE_SIZE as u64;

/// Smallest limit that is kept: room for the device's pins, staging and a few runs at once.
pub const MIN_LIMIT_BYTES: u64 = 16 << 20;

/// What a guest may exceed its limit by for moments: pages that QEMU had populated before the
/// hand-over (firmware), until they are evicted.
pub const HEADROOM_BYTES: u64 = 4 << 20;

/// Staging at least and at most: a few runs, and enough to ride out a burst of write-back.
const STAGING_PAGES: std::ops::RangeInclusive<u64> = 256..=16_384;

/// Slabs are leased whole: beyond what is stored, this much may be left over in them.
const RESERVE_SLACK_BYTES: u64 = 128 << 20;

/// Why a limit was refused.
#[derive(Debug, thiserror::Error)]
pub enum LimitError {
    /// Too small.
    #[error("a limit of {} is too small: at least {} of a guest's RAM have to be local", format_size(*.0), format_size(MIN_LIMIT_BYTES))]
    TooSmall(u64),
    /// More RAM than the page table can number.
    #[error("{} of guest RAM are more than the 16 TiB that are supported", format_size(*.0))]
    TooMuchRam(u64),
    /// The servers do not promise what the new limit needs.
    #[error(transparent)]
    Server(#[from] RemoteError),
    /// The staging area could not grow.
    #[error("the staging area could not be enlarged: free memory on this host")]
    Staging(#[source] std::io::Error),
}

/// A limit in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    /// The limit.
    pub(super) limit_pages: u64,
    /// Staging slots.
    pub(super) staging_pages: u32,
    /// What resident pages may take.
    pub(super) budget_pages: u64,
    /// Resident pages that may keep their slot.
    pub(super) keep_pages: u64,
}

impl Sizes {
    pub(super) fn new(limit: Limit, ram_bytes: u64) -> Result<Self, LimitError> {
        let bytes = limit.bytes(ram_bytes);
        if bytes < MIN_LIMIT_BYTES.min(ram_bytes) {
            return Err(LimitError::TooSmall(bytes));
        }
        let limit_pages = bytes / PAGE;
        let staging_pages = staging_pages(limit_pages, ram_bytes / PAGE);
        Ok(Self {
            limit_pages,
            staging_pages: staging_pages as u32,
            budget_pages: budget_pages(limit_pages, ram_bytes / PAGE, staging_pages),
            keep_pages: limit_pages / 4,
        })
    }
}

fn staging_pages(limit_pages: u64, ram_pages: u64) -> u64 {
    // A guest that may have all of its RAM is never evicted from.
    if limit_pages >= ram_pages {
        0
    } else {
        (limit_pages / 16).clamp(*STAGING_PAGES.start(), *STAGING_PAGES.end())
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
pub(super) fn most_staging_pages(ram_bytes: u64) -> u32 {
    // The largest limit that still pages.
    staging_pages((ram_bytes / PAGE).saturating_sub(1), ram_bytes / PAGE) as u32
}

/// What each of `servers` servers has to promise.
pub(super) fn reserve_bytes(ram_bytes: u64, sizes: Sizes, servers: usize) -> u64 {
    let resident = sizes.budget_pages.min(ram_bytes / PAGE);
    let remote = ram_bytes - resident * PAGE;
    if remote == 0 {
        return 0;
    }
    (remote + sizes.keep_pages * PAGE).div_ceil(servers as u64) + RESERVE_SLACK_BYTES
}

/// Keeps the budget at the limit less what staging takes of it, also while staging shrinks.
#[derive(Debug)]
pub(super) struct BudgetRule {
    limit_pages: AtomicU64,
    ram_pages: u64,
}

impl BudgetRule {
    pub(super) fn new(limit_pages: u64, ram_bytes: u64) -> Self {
        Self {
            limit_pages: AtomicU64::new(limit_pages),
            ram_pages: ram_bytes / PAGE,
        }
    }

    pub(super) fn limit_pages(&self) -> u64 {
        self.limit_pages.load(Ordering::Relaxed)
    }

    fn set_limit(&self, shared: &Shared, limit_pages: u64) {
        self.limit_pages.store(limit_pages, Ordering::Relaxed);
        self.apply(shared);
    }

    /// To be called whenever slots were given back.
    pub(super) fn apply(&self, shared: &Shared) {
        let staging = shared.staging.backed();
        shared
            .budget
            .set_limit(budget_pages(self.limit_pages(), self.ram_pages, staging));
    }
}

impl Pager {
    /// The limit as it was last asked for.
    pub fn limit(&self) -> Limit {
        *lock(&self.limit)
    }

    /// Sets a new limit: returns once it is accepted and the servers have promised what it needs;
    /// it is reached in the background.
    pub fn tune(&self, limit: Limit) -> Result<(), LimitError> {
        let mut current = lock(&self.limit);
        let sizes = Sizes::new(limit, self.ram_bytes)?;
        let before = Sizes::new(*current, self.ram_bytes)?;
        let shrinks = sizes.budget_pages < before.budget_pages;
        if shrinks {
            self.reserve(sizes, before)?;
        }
        if sizes.staging_pages > before.staging_pages {
            self.staging
                .back(0, sizes.staging_pages)
                .map_err(LimitError::Staging)?;
        }
        self.shared.staging.set_capacity(sizes.staging_pages);
        self.shared.slots.set_keep_allowance(sizes.keep_pages);
        self.pin_gate.set_limit(sizes.limit_pages);
        self.rule.set_limit(&self.shared, sizes.limit_pages);
        self.shards.iter().for_each(super::Inbox::ring);
        *current = limit;
        Ok(())
    }

    /// Has every server promise its part of a smaller limit; on a refusal all promises are as before.
    fn reserve(&self, sizes: Sizes, before: Sizes) -> Result<(), LimitError> {
        let servers = self.sessions.len();
        for (number, session) in self.sessions.iter().enumerate() {
            if let Err(error) = session.reserve(reserve_bytes(self.ram_bytes, sizes, servers)) {
                for session in &self.sessions[..number] {
                    if let Err(error) =
                        session.reserve(reserve_bytes(self.ram_bytes, before, servers))
                    {
                        tracing::warn!(%error, "a reservation stays larger than needed");
                    }
                }
                return Err(error.into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn limit_staging_and_budget_add_up() {
        let sizes = Sizes::new(Limit::LocalBytes(GIB / 2), GIB).expect("half is enough");
        assert_eq!(
            sizes.budget_pages + u64::from(sizes.staging_pages),
            GIB / 2 / PAGE
        );
        assert!(u64::from(sizes.staging_pages) <= u64::from(most_staging_pages(GIB)));
    }

    #[test]
    fn a_guest_with_all_of_its_ram_local_needs_no_server() {
        let sizes = Sizes::new(Limit::LocalBytes(GIB), GIB).expect("all is enough");
        assert_eq!(reserve_bytes(GIB, sizes, 1), 0);
        assert_eq!(sizes.staging_pages, 0);
    }

    #[test]
    fn a_tiny_limit_is_refused() {
        assert!(matches!(
            Sizes::new(Limit::LocalBytes(1 << 20), GIB),
            Err(LimitError::TooSmall(_))
        ));
    }
}
