//! What a limit means in pages: for the guest's memory, for staging, and for the servers.

use crate::compressed_share::CompressedShare;
use crate::units::{Limit, PageSize, format_size};

/// Smallest limit that is kept: room for the device's pins, staging and a few runs at once.
const MIN_LIMIT_BYTES: u64 = 16 << 20;

/// The same in pages, where these are huge.
const MIN_LIMIT_PAGES: u64 = 32;

/// Smallest limit that is kept for a guest with pages of this size.
pub fn min_limit_bytes(size: PageSize) -> u64 {
    size.pages_in(MIN_LIMIT_BYTES, MIN_LIMIT_PAGES) * size.bytes()
}

/// Staging at least and at most: a few runs, and enough to ride out a burst of write-back.
const STAGING_LEAST_BYTES: u64 = 1 << 20;
/// See [`STAGING_LEAST_BYTES`].
const STAGING_MOST_BYTES: u64 = 64 << 20;
/// Staging at least in pages: two shards each read one in while another is written to a server.
const STAGING_LEAST_PAGES: u64 = 4;

/// Slabs are leased whole: beyond what is stored, this much may be left over in them.
const RESERVE_SLACK_BYTES: u64 = 128 << 20;

/// A limit that cannot be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a limit of {} is too small: at least {} of the RAM of a guest with pages of {size} have to be local", format_size(*.bytes), format_size(min_limit_bytes(*.size)))]
pub struct TooSmall {
    /// The limit.
    pub bytes: u64,
    /// Size of the guest's pages.
    pub size: PageSize,
}

/// A limit in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The limit.
    pub limit_pages: u64,
    /// Staging slots.
    pub staging_pages: u32,
    /// What resident pages may take.
    pub budget_pages: u64,
    /// How many of these compressed ones may take.
    pub compressed_pages: u64,
    /// Resident pages that may keep their slot.
    pub keep_pages: u64,
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
pub struct Standing {
    /// As it was last asked for.
    pub limit: Limit,
    /// RAM that is managed.
    pub ram_bytes: u64,
    /// Size of its pages.
    pub page_size: PageSize,
    /// How much of the limit may hold compressed pages.
    pub compressed: CompressedShare,
}

impl Standing {
    /// Refuses a limit that cannot be kept.
    pub fn check(&self) -> Result<(), TooSmall> {
        let (bytes, size) = (self.limit.bytes(self.ram_bytes), self.page_size);
        match bytes < min_limit_bytes(size).min(self.ram_bytes) {
            true => Err(TooSmall { bytes, size }),
            false => Ok(()),
        }
    }

    /// In pages. A share of RAM that shrank may be less than a limit has to be: it is the least then.
    pub fn sizes(&self) -> Sizes {
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
    pub fn ram_pages(&self) -> u64 {
        self.ram_bytes / self.page_size.bytes()
    }

    /// What each of `servers` servers has to promise, where all have as much.
    pub fn reserve_bytes(&self, servers: usize) -> u64 {
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
pub fn budget_pages(limit_pages: u64, ram_pages: u64, staging: u64) -> u64 {
    // Twice the RAM has its watermarks above all of the RAM.
    if limit_pages >= ram_pages {
        2 * ram_pages
    } else {
        limit_pages.saturating_sub(staging)
    }
}

/// Staging slots that the guest may ever need.
pub fn most_staging_pages(ram_bytes: u64, size: PageSize) -> u32 {
    let ram_pages = ram_bytes / size.bytes();
    // The largest limit that still pages.
    staging_pages(ram_pages.saturating_sub(1), ram_pages, size) as u32
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
