//! What a pager tells of itself: counts of its own, and the kernel's.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use outram_wire::control::{Counters, Latency, ServerStatus};

use super::{Pager, lock};
use crate::engine::slots::ServerIndex;
use crate::engine::stats::{FaultKind, Stats};
use crate::engine::table::State;
use crate::remote::Session;

/// What is remembered of each server beside its session.
#[derive(Debug)]
pub struct ServerNotes {
    refusals: Vec<Mutex<Option<String>>>,
    lost_slabs: Vec<AtomicU64>,
}

impl ServerNotes {
    pub(super) fn new(servers: usize) -> Self {
        Self {
            refusals: (0..servers).map(|_| Mutex::new(None)).collect(),
            lost_slabs: (0..servers).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Whether it is refused for another reason than before, if it was.
    pub(super) fn note_refusal(&self, server: ServerIndex, reason: String) -> bool {
        let words = |text: &str| text.replace(|letter: char| letter.is_ascii_digit(), "");
        let former = lock(&self.refusals[server]).replace(reason.clone());
        former.is_none_or(|former| words(&former) != words(&reason))
    }

    pub(super) fn clear_refusal(&self, server: ServerIndex) {
        *lock(&self.refusals[server]) = None;
    }

    pub(super) fn note_lost(&self, server: ServerIndex, slabs: u64) {
        self.lost_slabs[server].fetch_add(slabs, Ordering::Relaxed);
    }

    fn detail(&self, server: ServerIndex, session: Option<String>) -> Option<String> {
        let lost = match self.lost_slabs[server].load(Ordering::Relaxed) {
            0 => None,
            slabs => Some(format!(
                "{slabs} slabs with pages of the guest were lost there"
            )),
        };
        let parts: Vec<String> = [session, lost, lock(&self.refusals[server]).clone()]
            .into_iter()
            .flatten()
            .collect();
        (!parts.is_empty()).then(|| parts.join("; "))
    }
}

/// How a guest's memory is, in bytes unless named otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// Guest RAM found.
    pub ram: u64,
    /// The limit.
    pub limit: u64,
    /// In the memfd, by our count.
    pub resident: u64,
    /// In staging.
    pub staged: u64,
    /// Local memory that compressed pages take.
    pub compressed: u64,
    /// Pages that are in it, also those that are resident again.
    pub compressed_held: u64,
    /// On servers only.
    pub stored: u64,
    /// Kept as words.
    pub filled: u64,
    /// Lost for good.
    pub lost: u64,
    /// Faults that wait now.
    pub waiting_faults: u64,
    /// ... of which for a lost page.
    pub waiting_lost_faults: u64,
    /// Hot-plugged memory that is not paged.
    pub unmanaged: u64,
    /// Blocks of the memfds, by the kernel's count.
    pub kernel_memfd: u64,
    /// Blocks of the staging area, by the kernel's count.
    pub kernel_staging: u64,
    /// Blocks of the page table, by the kernel's count.
    pub kernel_table: u64,
}

impl Pager {
    /// How the guest's memory is.
    pub fn memory(&self) -> MemoryReport {
        let stats = &self.shared.stats;
        let page = self.shared.page_size.bytes();
        let pages = |state| stats.pages(state) * page;
        let table =
            rustix::fs::fstat(&self.table_file).map_or(0, |stat| stat.st_blocks as u64 * 512);
        MemoryReport {
            ram: self.ram_bytes(),
            limit: self.rule.limit_pages() * page,
            resident: pages(State::Resident) + pages(State::Busy),
            staged: u64::from(self.shared.staging.in_use()) * page,
            compressed: self.shared.compressed.taken_pages() * page,
            compressed_held: self.shared.compressed.held_pages() * page,
            stored: pages(State::Stored),
            filled: pages(State::Filled),
            lost: pages(State::Lost),
            waiting_faults: self.waiting_faults(),
            waiting_lost_faults: self.sum(|gauges| &gauges.waiting_lost),
            unmanaged: self.aside.report().0,
            kernel_memfd: self.ram.kernel_bytes().unwrap_or(0),
            kernel_staging: self.staging.kernel_bytes().unwrap_or(0),
            kernel_table: table,
        }
    }

    /// Faults that wait now. Cheap: unlike all else of [`Pager::memory`], it asks neither the kernel nor a lock.
    pub fn waiting_faults(&self) -> u64 {
        self.sum(|gauges| &gauges.waiting)
    }

    /// Of all shards.
    fn sum(&self, read: fn(&super::ShardGauges) -> &AtomicU64) -> u64 {
        let each = self.gauges.iter().map(|gauges| read(gauges));
        each.map(|gauge| gauge.load(Ordering::Relaxed)).sum()
    }

    /// Why hot-plugged memory is not paged, if some is not.
    pub fn unmanaged_reasons(&self) -> Vec<String> {
        self.aside.report().1
    }

    /// How long faults have waited, all together.
    fn waited_us(&self) -> u64 {
        self.gauges
            .iter()
            .filter_map(|gauges| *lock(&gauges.waited))
            .map(|waited| waited.until_now_us())
            .sum()
    }

    /// What happened since the start.
    pub fn counters(&self) -> Counters {
        let stats = &self.shared.stats;
        let faults = |kind| stats.faults(kind);
        let clean = stats.evicted_clean.get();
        let filled = stats.evicted_filled.get();
        Counters {
            faults_zero: faults(FaultKind::Zero),
            faults_filled: faults(FaultKind::Filled),
            faults_staged: faults(FaultKind::Staged),
            faults_compressed: faults(FaultKind::Compressed),
            faults_remote: faults(FaultKind::Remote),
            faults_protected: faults(FaultKind::Protected),
            faults_duplicate: stats.duplicates.get(),
            faults_lost: stats.lost_faults.get(),
            faults_poisoned: stats.poisoned_faults.get(),
            refaults: faults(FaultKind::Filled)
                + faults(FaultKind::Staged)
                + faults(FaultKind::Compressed)
                + faults(FaultKind::Remote),
            waited_us: self.waited_us(),
            evicted_pages: clean + filled + stats.evicted_staged.get(),
            evicted_clean_pages: clean,
            evicted_filled_pages: filled,
            writeback_pages: stats.written_back.get(),
            compressed_pages: self.shared.compressed.kept_pages(),
            fetched_ahead_pages: stats.fetched_ahead.get(),
            fetched_ahead_used_pages: stats.fetched_ahead_used.get(),
            fetched_ahead_unused_pages: stats.fetched_ahead_unused.get(),
            removed_pages: stats.removed.get(),
            wire_received_bytes: self.sum(|gauges| &gauges.wire_received_bytes)
                + self
                    .writer_gauges
                    .wire_received_bytes
                    .load(Ordering::Relaxed),
            wire_sent_bytes: self.sum(|gauges| &gauges.wire_sent_bytes)
                + self.writer_gauges.wire_sent_bytes.load(Ordering::Relaxed),
            stalls_limit: stats.stalls_limit.get(),
            stalls_pool: stats.stalls_pool.get(),
            stalls_server: stats.stalls_server.get(),
            integrity_failures: stats.integrity_failures.get(),
            refused_reads: stats.refused_reads.get(),
            stray_device_accesses: 0,
        }
    }

    /// The engine's counters and latencies, for metrics.
    pub fn stats(&self) -> &Stats {
        &self.shared.stats
    }

    /// Latencies of faults by kind.
    pub fn latencies(&self) -> BTreeMap<String, Latency> {
        let of = |kind: FaultKind| {
            let latency = self.shared.stats.latency(kind, |histogram| Latency {
                count: histogram.len(),
                us_p50: histogram.value_at_quantile(0.5),
                us_p90: Some(histogram.value_at_quantile(0.9)),
                us_p99: histogram.value_at_quantile(0.99),
                us_p999: Some(histogram.value_at_quantile(0.999)),
                us_max: histogram.max(),
            });
            (kind.name().to_owned(), latency)
        };
        FaultKind::ALL.into_iter().map(of).collect()
    }

    /// The servers in their configured order.
    pub fn servers(&self) -> Vec<ServerStatus> {
        let of = |(number, session)| {
            let mut status = server_status(session);
            status.stored_bytes = self.shared.slots.usage(number).1 * self.shared.page_size.bytes();
            status.detail = self.notes.detail(number, status.detail);
            status
        };
        self.sessions.iter().enumerate().map(of).collect()
    }
}

/// A server as its session knows it.
pub(super) fn server_status(session: &Session) -> ServerStatus {
    let status = session.status();
    ServerStatus {
        address: status.address.to_string(),
        connected: status.connected,
        detail: status.detail,
        transport: status.transport,
        slabs: status.slabs,
        reserved_bytes: status.reserved_bytes,
        stored_bytes: 0,
    }
}
