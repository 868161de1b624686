//! What paging costs, and whom: processor time and counters of guests, helpers and their server.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use outram_wire::control::Counters;
use outram_wire::units::PageSize;
use serde_json::Value;

use super::usage::process_cpu;
use crate::small_lab::{Control, Guest, PAGE};

const GIB: f64 = (1_u64 << 30) as f64;

/// What is called so: bytes on the wire for each byte of pages that it was for.
pub const WIRE_PER_USEFUL: &str = "wire bytes per useful byte";

/// Where a guest's share of a bill is read; without the guest, which may be at work elsewhere.
pub struct Meter {
    vmm: u32,
    backend: u32,
    run_dir: PathBuf,
}

impl Meter {
    /// Of a guest.
    pub fn of(guest: &Guest) -> Self {
        Self {
            vmm: guest.vmm.pid() as u32,
            backend: guest.backend_pid(),
            run_dir: guest.dir.clone(),
        }
    }
}

/// What everybody has used up to a moment.
#[derive(Debug)]
pub struct Bill {
    at: Instant,
    vcpu: Duration,
    helper: Duration,
    server: Duration,
    /// Of each guest.
    pub counters: Vec<Counters>,
}

impl Bill {
    /// Of these guests and the process of their server.
    pub fn now(server: u32, meters: &[Meter]) -> Result<Self> {
        let mut counters = Vec::new();
        let (mut vcpu, mut helper) = (Duration::ZERO, Duration::ZERO);
        for meter in meters {
            let mut control = Control::open(&meter.run_dir)?;
            counters.push(control.status()?.counters);
            vcpu += process_cpu(meter.vmm)?;
            helper += process_cpu(meter.backend)?;
        }
        Ok(Self {
            at: Instant::now(),
            vcpu,
            helper,
            server: process_cpu(server)?,
            counters,
        })
    }

    /// Has the time and the processor time of a vCPU alone, where that said what its work took.
    pub fn only(mut self, before: &Self, answer: &Value) -> Self {
        let took = |key: &str| {
            let seconds = answer[key].as_f64().unwrap_or_default();
            Duration::try_from_secs_f64(seconds).unwrap_or_default()
        };
        self.at = before.at + took("seconds");
        self.vcpu = before.vcpu + took("cpu_seconds");
        self
    }

    /// How much a counter has risen since, in all guests.
    pub fn rise(&self, before: &Self, of: impl Fn(&Counters) -> u64) -> u64 {
        let sum = |bill: &Self| bill.counters.iter().map(&of).sum::<u64>();
        sum(self).saturating_sub(sum(before))
    }

    /// Bytes that went over the wire since for each byte of so many pages.
    pub fn wire_bytes_per_byte(&self, before: &Self, pages: u64) -> f64 {
        let bytes = self.rise(before, |counters| {
            counters.wire_received_bytes + counters.wire_sent_bytes
        });
        bytes as f64 / (pages * PAGE) as f64
    }

    /// What paging has cost since, by name: processor time for each GiB that came or left, how much of
    /// that there was, and bytes on the wire for each that was fetched or written back. Nothing where
    /// nothing was paged. The guests have pages of this size, which their backends count.
    ///
    /// Pages that are known to have been fetched ahead in vain were of no use: of bytes on the wire they are in
    /// those that went over it, and not in those that it was for.
    pub fn paging_costs(&self, before: &Self, size: PageSize) -> BTreeMap<String, f64> {
        let each = size.bytes() / PAGE;
        let fetched = self.rise(before, |counters| {
            (counters.faults_remote + counters.fetched_ahead_pages) * each
        });
        let evicted = self.rise(before, |counters| counters.evicted_pages * each);
        let sent = self.rise(before, |counters| counters.writeback_pages * each);
        let in_vain = self.rise(before, |counters| {
            counters.fetched_ahead_unused_pages * each
        });
        if fetched + evicted == 0 {
            return BTreeMap::new();
        }
        let costs = self.costs(before, fetched + evicted).into_iter();
        let mut costs: BTreeMap<_, _> = costs.map(|(name, _, value)| (name, value)).collect();
        // Some of those that leave now came before.
        let useful = fetched.saturating_sub(in_vain) + sent;
        if useful > 0 {
            let wire = self.wire_bytes_per_byte(before, useful);
            costs.insert(WIRE_PER_USEFUL.to_owned(), wire);
        }
        costs
    }

    /// What so many pages have cost since: names, units and values.
    pub fn costs(&self, before: &Self, pages: u64) -> Vec<(String, &'static str, f64)> {
        let gib = (pages * PAGE) as f64 / GIB;
        let mut costs: Vec<_> = [
            ("vCPU", before.vcpu, self.vcpu),
            ("helper", before.helper, self.helper),
            ("server", before.server, self.server),
        ]
        .into_iter()
        .map(|(who, before, after)| {
            let seconds = after.saturating_sub(before).as_secs_f64();
            (format!("CPU of {who}"), "s/GiB", seconds / gib)
        })
        .collect();
        let seconds = (self.at - before.at).as_secs_f64();
        costs.push(("rate".to_owned(), "pages/s", pages as f64 / seconds));
        costs
    }
}

/// How much each counter has risen, by its name.
pub fn rise(before: &Counters, after: &Counters) -> Result<BTreeMap<String, u64>> {
    let named = |counters: &Counters| -> Result<BTreeMap<String, u64>> {
        Ok(serde_json::from_value(serde_json::to_value(counters)?)?)
    };
    let before = named(before)?;
    let mut counters = named(after)?;
    for (name, count) in &mut counters {
        *count = count.saturating_sub(before.get(name).copied().unwrap_or(0));
    }
    Ok(counters)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bill(at: Instant, used: Duration, evicted_pages: u64) -> Bill {
        let counters = Counters {
            evicted_pages,
            ..Counters::default()
        };
        Bill {
            at: at + used,
            vcpu: used,
            helper: used * 2,
            server: Duration::ZERO,
            counters: vec![counters.clone(), counters],
        }
    }

    #[test]
    fn a_bill_is_of_what_was_used_in_between() {
        let now = Instant::now();
        let before = bill(now, Duration::from_secs(1), 100);
        let after = bill(now, Duration::from_secs(3), 150);
        let pages = after.rise(&before, |counters| counters.evicted_pages);
        assert_eq!(pages, 100, "both guests' are counted");
        let costs = after.costs(&before, (1 << 30) / PAGE);
        let values: Vec<f64> = costs.iter().map(|cost| cost.2).collect();
        assert_eq!(values, [2.0, 4.0, 0.0, 131_072.0]);
        let rise = rise(&before.counters[0], &after.counters[0]).expect("counters");
        assert_eq!((rise["evicted_pages"], rise["faults_zero"]), (50, 0));
    }

    #[test]
    fn paging_is_billed_by_what_came_and_what_left() {
        let now = Instant::now();
        let before = bill(now, Duration::from_secs(1), 0);
        let mut after = bill(now, Duration::from_secs(3), 1 << 16);
        assert!(
            before.paging_costs(&before, PageSize::BASE).is_empty(),
            "nothing was paged"
        );
        for counters in &mut after.counters {
            counters.fetched_ahead_pages = 1 << 16;
            counters.wire_received_bytes = 5 << 28;
        }
        let costs = after.paging_costs(&before, PageSize::BASE);
        // Of two guests, each 256 MiB evicted and as much fetched; the former crossed no wire.
        assert_eq!(costs["CPU of helper"], 4.0);
        assert_eq!(costs["rate"], f64::from(1 << 18) / 2.0);
        assert_eq!(costs[WIRE_PER_USEFUL], 5.0);
        let costs = after.paging_costs(&before, PageSize::HUGE);
        assert_eq!(costs["CPU of helper"], 4.0 / 512.0);
    }

    #[test]
    fn pages_fetched_ahead_in_vain_are_no_use() {
        let now = Instant::now();
        let before = bill(now, Duration::from_secs(1), 0);
        let mut after = bill(now, Duration::from_secs(3), 0);
        for counters in &mut after.counters {
            counters.faults_remote = 1000;
            counters.fetched_ahead_pages = 3000;
            counters.wire_received_bytes = 4000 * PAGE;
        }
        let wire = |after: &Bill| after.paging_costs(&before, PageSize::BASE)[WIRE_PER_USEFUL];
        assert_eq!(wire(&after), 1.0);
        for counters in &mut after.counters {
            counters.fetched_ahead_unused_pages = 2000;
        }
        assert_eq!(wire(&after), 2.0);
        // All of them, and some that came before: nothing was of use.
        for counters in &mut after.counters {
            counters.fetched_ahead_unused_pages = 5000;
        }
        let costs = after.paging_costs(&before, PageSize::BASE);
        assert_eq!(costs.get(WIRE_PER_USEFUL), None);
    }
}
