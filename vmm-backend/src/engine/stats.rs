//! Counters and gauges that all shards share. Counters only rise.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use hdrhistogram::Histogram;

use super::table::State;

/// A number that only rises.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// One more.
    pub fn count(&self) {
        self.add(1);
    }

    /// `number` more.
    pub fn add(&self, number: u64) {
        self.0.fetch_add(number, Ordering::Relaxed);
    }

    /// The number so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How a fault was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum FaultKind {
    /// Never touched: zeros.
    Zero,
    /// From the page's word.
    Filled,
    /// From staging.
    Staged,
    /// From memory that holds it compressed.
    Compressed,
    /// From a memory server.
    Remote,
    /// By lifting the write protection.
    Protected,
}

impl FaultKind {
    /// All kinds, in their order as numbers.
    pub const ALL: [Self; 6] = [
        Self::Zero,
        Self::Filled,
        Self::Staged,
        Self::Compressed,
        Self::Remote,
        Self::Protected,
    ];

    /// As in metrics and `status`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zero => "zero",
            Self::Filled => "filled",
            Self::Staged => "staged",
            Self::Compressed => "compressed",
            Self::Remote => "remote",
            Self::Protected => "protected",
        }
    }
}

/// What happened since the start, and where pages are.
#[derive(Debug)]
pub struct Stats {
    faults: [Counter; FaultKind::ALL.len()],
    latencies_us: [Mutex<Histogram<u64>>; FaultKind::ALL.len()],
    /// Messages that repeated a fault in work or already answered.
    pub duplicates: Counter,
    /// Faults left unanswered because their page is lost.
    pub lost_faults: Counter,
    /// Faults answered with a memory error because their page is lost.
    pub poisoned_faults: Counter,
    /// Pages dropped at eviction, unchanged.
    pub evicted_clean: Counter,
    /// Pages kept as a word at eviction.
    pub evicted_filled: Counter,
    /// Pages staged at eviction.
    pub evicted_staged: Counter,
    /// Runs whose eviction failed.
    pub failed_runs: Counter,
    /// Pages written to the servers.
    pub written_back: Counter,
    /// Pages asked for before anybody waited for them.
    pub fetched_ahead: Counter,
    /// Of which a stream was expected to use, and did.
    pub fetched_ahead_used: Counter,
    /// Of which a stream was expected to use, and that left again without a sign of it.
    pub fetched_ahead_unused: Counter,
    /// Pages that the guest gave back.
    pub removed: Counter,
    /// Faults that waited for room under the limit.
    pub stalls_limit: Counter,
    /// Attempts to give a page that found the host's pool of huge pages empty.
    pub stalls_pool: Counter,
    /// Faults that waited for a server out of reach.
    pub stalls_server: Counter,
    /// Pages whose bytes did not match their tag.
    pub integrity_failures: Counter,
    /// Reads whose bytes were not those that were sent, also where a second one's were.
    pub refused_reads: Counter,
    pages: [AtomicU64; State::COUNT],
}

impl Default for Stats {
    fn default() -> Self {
        Self::new()
    }
}

impl Stats {
    /// All zero.
    pub fn new() -> Self {
        // Up to a minute with two digits; longer waits count as a minute.
        let histogram = || {
            let empty = Histogram::new_with_bounds(1, 60_000_000, 2);
            Mutex::new(empty.expect("the bounds are constants that the library accepts"))
        };
        Self {
            faults: Default::default(),
            latencies_us: std::array::from_fn(|_| histogram()),
            duplicates: Counter::default(),
            lost_faults: Counter::default(),
            poisoned_faults: Counter::default(),
            evicted_clean: Counter::default(),
            evicted_filled: Counter::default(),
            evicted_staged: Counter::default(),
            failed_runs: Counter::default(),
            written_back: Counter::default(),
            fetched_ahead: Counter::default(),
            fetched_ahead_used: Counter::default(),
            fetched_ahead_unused: Counter::default(),
            removed: Counter::default(),
            stalls_limit: Counter::default(),
            stalls_pool: Counter::default(),
            stalls_server: Counter::default(),
            integrity_failures: Counter::default(),
            refused_reads: Counter::default(),
            pages: Default::default(),
        }
    }

    /// Notes an answered fault and how long it took.
    pub fn note_fault(&self, kind: FaultKind, took_us: u64) {
        self.faults[kind as usize].count();
        let latency = self.latencies_us[kind as usize].lock();
        latency
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .saturating_record(took_us.max(1));
    }

    /// Faults answered in this way.
    pub fn faults(&self, kind: FaultKind) -> u64 {
        self.faults[kind as usize].get()
    }

    /// Faults answered in any way.
    pub fn answered_faults(&self) -> u64 {
        self.faults.iter().map(Counter::get).sum()
    }

    /// Looks at the latencies of one kind, in microseconds.
    pub fn latency<R>(&self, kind: FaultKind, look: impl FnOnce(&Histogram<u64>) -> R) -> R {
        let latency = self.latencies_us[kind as usize].lock();
        look(&latency.unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    /// Notes that a page went from one state to another.
    pub fn moved(&self, from: State, to: State) {
        self.pages[from as usize].fetch_sub(1, Ordering::Relaxed);
        self.pages[to as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Notes pages of RAM that were found, all absent so far.
    pub fn found(&self, pages: u64) {
        self.pages[State::Absent as usize].fetch_add(pages, Ordering::Relaxed);
    }

    /// Notes that pages of RAM are there no longer, all absent by now.
    pub fn vanished(&self, pages: u64) {
        self.pages[State::Absent as usize].fetch_sub(pages, Ordering::Relaxed);
    }

    /// Pages in a state now.
    pub fn pages(&self, state: State) -> u64 {
        self.pages[state as usize].load(Ordering::Relaxed)
    }
}
