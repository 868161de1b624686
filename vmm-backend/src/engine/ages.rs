//! How long pages have been there, in all shards: what came first goes first, whichever shard it is in.
//!
//! Shards own fixed parts of the guest's RAM. Did each make room among its own pages only, a guest that
//! works in one part would be short of memory while another kept pages that nobody uses.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};

use super::policy::{Kind, Returns};

/// Ages that differ by arrivals of less than this share of all pages that are there are about the same.
const SLACK_SHARE: u64 = 8;

/// What other shards see of one.
#[derive(Debug, Default)]
pub struct ShardAge {
    /// By kind, the number of the arrival of the page that it would evict next; 0 where there is none.
    oldest: [AtomicU32; Kind::ALL.len()],
    /// It was asked to evict, and has not looked since.
    is_asked: AtomicBool,
}

impl ShardAge {
    pub(super) fn publish(&self, kind: Kind, oldest: Option<u32>) {
        self.oldest[kind.index()].store(oldest.unwrap_or(0), Ordering::SeqCst);
    }

    /// Whether there is any page that it would evict.
    fn has_any(&self) -> bool {
        self.oldest
            .iter()
            .any(|oldest| oldest.load(Ordering::SeqCst) != 0)
    }

    /// Notes that somebody wants it to evict; whether nobody has since it looked last.
    pub(super) fn ask(&self) -> bool {
        !self.is_asked.swap(true, Ordering::SeqCst)
    }

    /// Notes that it is about to look.
    pub(super) fn look(&self) {
        self.is_asked.store(false, Ordering::SeqCst);
    }
}

/// The ages of all shards; shared by them.
#[derive(Debug, Default)]
pub struct Ages {
    returns: Arc<Returns>,
    shards: RwLock<Vec<Weak<ShardAge>>>,
}

impl Ages {
    /// What numbers arrivals, and says which kind of page is to go.
    pub fn returns(&self) -> Arc<Returns> {
        Arc::clone(&self.returns)
    }

    /// One more shard, until that is dropped.
    pub(super) fn join(&self) -> Arc<ShardAge> {
        let age = Arc::<ShardAge>::default();
        // Each change of the list is one call.
        let mut shards = self.shards.write().unwrap_or_else(PoisonError::into_inner);
        shards.retain(|shard| shard.strong_count() > 0);
        shards.push(Arc::downgrade(&age));
        age
    }

    /// The shard whose pages of a kind are the oldest, where those of `shard` are so much younger that they should
    /// not go yet: where the ages are about the same, the shard that needs room makes it by itself,
    /// which costs no message. Of kinds whose pages leave young, ages say little; unless it has no
    /// page at all that it could evict, some of another kind do as well.
    pub(super) fn elder(&self, shard: &ShardAge, kind: Kind) -> Option<Arc<ShardAge>> {
        let now = self.returns.now();
        let age = |shard: &ShardAge| match shard.oldest[kind.index()].load(Ordering::SeqCst) {
            0 => 0,
            oldest => u64::from(now.wrapping_sub(oldest)),
        };
        let shards = self.shards.read().unwrap_or_else(PoisonError::into_inner);
        let oldest = shards
            .iter()
            .filter_map(Weak::upgrade)
            .max_by_key(|shard| age(shard))?;
        let slack = match shard.has_any() {
            true => self.returns.all_present() / SLACK_SHARE * u64::from(Returns::STEP),
            false => 0,
        };
        (age(shard) + slack < age(&oldest) * 3 / 4).then_some(oldest)
    }
}
