//! How soon pages come back that were evicted, by the kind of page: what says whose turn it is next.
//!
//! No policy can do better than to evict what is used again last (Bélády, 1966). When that will be nobody
//! knows, and uses of pages that are there cannot be seen. But what was evicted and is used again is seen: it
//! faults. So pages are told apart by how they came, and each kind is evicted from the more, the less of what left
//! of it lately comes back, and the later.
//!
//! Of a kind's *return rate*, each return counts `exp(-t)` for a page that was out for a time t, and is divided by
//! the pages that are out, each of which fades as `exp(-t)` does: a constant rate is estimated without bias, and
//! one that is not has what comes back soon count for more. Time is counted in arrivals of pages.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// What kind of page it is, by how it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Came not long ago, for the first time or back after a long while.
    Young = 1,
    /// The same, and others have come since.
    Settled = 2,
    /// Came back soon after it had left.
    Proven = 3,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; KINDS] = [Self::Young, Self::Settled, Self::Proven];

    /// Its place among all.
    pub const fn index(self) -> usize {
        self as usize - 1
    }
}

/// How many kinds there are.
pub(super) const KINDS: usize = 3;

/// Share of the pages that may be young before any is evicted for being so: time enough to be used, for what
/// was fetched ahead. Twice as many settle.
pub(super) const YOUNG_SHARE: u64 = 32;

/// The time in which a page that is out fades, and that in which what was seen does, by the pages that are there.
const FADES: f64 = 0.5;
/// See [`FADES`].
const FORGETS: f64 = 2.0;
/// What is taken for the return rate of a kind of which none left, and how much (of the pages that are there) that
/// counts.
const FIRST_RATE: f64 = 0.3;
/// See [`FIRST_RATE`].
const FIRST_COUNTS: f64 = 0.02;

/// What return rates are multiplied by. To let pages stay for different times costs hits where none is told from
/// another, so the old go first unless the others are clearly better; and what has proven itself stays.
const WEIGHTS: [f64; KINDS] = [1.25, 1.0, 1.25];
/// Kinds are drawn from by this power of how much less comes back of them...
const PREFERENCE: i32 = 6;
/// ... and at least by this share, to learn what has become of them.
const TRIED: f64 = 1.0 / 16.0;
/// Most pages that a kind's turns may be ahead of, or behind, its share.
const CREDIT_MOST: f64 = 256.0;

/// Weights of returns are counted in units of `2^-UNIT_BITS`.
const UNIT_BITS: u32 = 20;

/// Numbers the arrivals of pages in all shards, and counts what leaves and comes back; shared by the shards.
#[derive(Debug, Default)]
pub struct Returns {
    clock: AtomicU32,
    kinds: [Counts; KINDS],
    turns: Mutex<Turns>,
}

/// Of one kind, in all shards.
#[derive(Debug, Default)]
struct Counts {
    /// Pages that are there.
    present: AtomicU64,
    /// Pages that were evicted ever.
    evicted: AtomicU64,
    /// Weights of those that came back ever.
    returned: AtomicU64,
}

impl Returns {
    /// From one arrival's number to the next one's. Numbers wrap; the bits below are free for others' use.
    pub const STEP: u32 = 8;

    /// The number of an arrival.
    pub(super) fn tick(&self) -> u32 {
        self.clock.fetch_add(Self::STEP, Ordering::Relaxed)
    }

    /// The number of the next arrival, or thereabouts.
    pub(in super::super) fn now(&self) -> u32 {
        self.clock.load(Ordering::Relaxed)
    }

    fn present(&self, kind: Kind) -> u64 {
        self.kinds[kind.index()].present.load(Ordering::Relaxed)
    }

    /// Pages that are there, in all shards.
    pub(in super::super) fn all_present(&self) -> u64 {
        Kind::ALL.map(|kind| self.present(kind)).iter().sum()
    }

    /// Arrivals that pass while as many pages come as are there, one at least.
    fn turnover(&self) -> f64 {
        self.all_present().max(1) as f64
    }

    /// There is one more page of this kind.
    pub(super) fn note_here(&self, kind: Kind) {
        let counts = &self.kinds[kind.index()];
        counts.present.fetch_add(1, Ordering::Relaxed);
    }

    /// There is one less, whatever became of it.
    pub(super) fn note_gone(&self, kind: Kind) {
        let counts = &self.kinds[kind.index()];
        counts.present.fetch_sub(1, Ordering::Relaxed);
    }

    /// A page that was of this kind was evicted.
    pub(super) fn note_evicted(&self, kind: Kind) {
        let counts = &self.kinds[kind.index()];
        counts.evicted.fetch_add(1, Ordering::Relaxed);
    }

    /// A page came back that had left as one of this kind, so many arrivals ago; by how many times what is there has
    /// come meanwhile.
    pub(super) fn note_returned(&self, kind: Kind, arrivals: u32) -> f64 {
        let turns = f64::from(arrivals) / self.turnover();
        let weight = (-turns / FADES).exp();
        let units = (weight * f64::from(1u32 << UNIT_BITS)) as u64;
        let counts = &self.kinds[kind.index()];
        counts.returned.fetch_add(units, Ordering::Relaxed);
        turns
    }

    /// The kind that pages should go of now; nothing where there is no page.
    pub(super) fn due(&self) -> Option<Kind> {
        // What it holds are estimates, each change of which is a whole.
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.look(self);
        turns.choose(self)
    }

    /// So many pages are about to go for one of this kind's turns.
    pub(super) fn note_turn(&self, kind: Kind, pages: u32) {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.take(kind, f64::from(pages));
    }
}

/// What was learnt, and who was drawn from.
#[derive(Debug, Default)]
struct Turns {
    /// When it was looked last.
    looked: u32,
    kinds: [Learnt; KINDS],
}

#[derive(Debug, Default)]
struct Learnt {
    /// What was counted when it was looked last.
    evicted: u64,
    returned: u64,
    /// Pages that are out, faded.
    out: f64,
    /// The same times the turnovers that they were out for, and what came back: both faded.
    exposure: f64,
    returns: f64,
    /// Share of the turns that it is to have now.
    share: f64,
    /// Pages that it is behind its share.
    credit: f64,
}

impl Turns {
    /// Takes in what was counted since it was looked last.
    fn look(&mut self, counted: &Returns) {
        let now = counted.now();
        let arrivals = now.wrapping_sub(std::mem::replace(&mut self.looked, now)) / Returns::STEP;
        let turns = f64::from(arrivals) / counted.turnover();
        let (fades, forgets) = ((-turns / FADES).exp(), (-turns / FORGETS).exp());
        for (learnt, counts) in self.kinds.iter_mut().zip(&counted.kinds) {
            let evicted = counts.evicted.load(Ordering::Relaxed);
            let returned = counts.returned.load(Ordering::Relaxed);
            let left = evicted - std::mem::replace(&mut learnt.evicted, evicted);
            let came = returned - std::mem::replace(&mut learnt.returned, returned);
            learnt.out = learnt.out * fades + left as f64;
            learnt.exposure = learnt.exposure * forgets + learnt.out * turns / FADES;
            learnt.returns = learnt.returns * forgets + came as f64 / f64::from(1u32 << UNIT_BITS);
        }
    }

    /// What comes back of a kind, weighted, where so many pages are there.
    fn rate(&self, kind: Kind, present: f64) -> f64 {
        let (learnt, first) = (&self.kinds[kind.index()], FIRST_COUNTS * present);
        let rate = (learnt.returns + first * FIRST_RATE) / (learnt.exposure + first);
        WEIGHTS[kind.index()] * rate
    }

    fn choose(&mut self, counted: &Returns) -> Option<Kind> {
        // Looked at once: others change it meanwhile.
        let present = Kind::ALL.map(|kind| counted.present(kind));
        let all: u64 = present.iter().sum();
        if all == 0 {
            return None;
        }
        // At least one kind has enough.
        let rates = Kind::ALL.map(|kind| {
            let least = match kind {
                Kind::Young => all / YOUNG_SHARE,
                Kind::Settled | Kind::Proven => 0,
            };
            (present[kind.index()] > least).then(|| self.rate(kind, all as f64))
        });
        let least = rates.iter().flatten().copied().fold(f64::MAX, f64::min);
        let share = |rate: f64| (least / rate).powi(PREFERENCE).max(TRIED);
        let shares = rates.map(|rate| rate.map_or(0.0, share));
        for (learnt, share) in self.kinds.iter_mut().zip(shares) {
            learnt.share = share / shares.iter().sum::<f64>();
        }
        let behind = |kind: &Kind| {
            let learnt = &self.kinds[kind.index()];
            learnt.credit + learnt.share
        };
        let may = Kind::ALL
            .into_iter()
            .filter(|kind| rates[kind.index()].is_some());
        may.max_by(|one, other| behind(one).total_cmp(&behind(other)))
    }

    fn take(&mut self, kind: Kind, pages: f64) {
        for learnt in &mut self.kinds {
            learnt.credit += learnt.share * pages;
        }
        self.kinds[kind.index()].credit -= pages;
        for learnt in &mut self.kinds {
            learnt.credit = learnt.credit.clamp(-CREDIT_MOST, CREDIT_MOST);
        }
    }
}
