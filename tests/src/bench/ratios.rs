//! What a run says, in numbers that mean the same on another machine: each value by another that was
//! measured in the same round.

use serde::{Deserialize, Serialize};

use super::baseline::PARTLY_LOCAL;
use super::batches::{BATCHES, BESIDE_A_STALL, WITHOUT_A_STALL};
use super::contest::OUTRAM;
use super::floors::{WIRE_READ, WIRE_WRITTEN};
use super::own::{FAULT_AT_REST, FAULT_MEANWHILE, HELD_AT_REST, HELD_MEANWHILE, floor_beside};
use super::replay::{self, By, Replay};
use super::results::Results;
use super::statistics::Spread;

/// One number, of all rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ratio {
    /// The group of rows that it belongs to.
    pub group: String,
    /// What is divided by what.
    pub name: String,
    /// Its value in each round, summed up.
    pub value: Spread,
    /// Whether less of it is better.
    pub is_less_better: bool,
}

impl Ratio {
    /// Whether it is of counts that come out the same each time, rather than of times.
    pub fn is_counted(&self) -> bool {
        self.name.starts_with(BY_LRU)
    }
}

/// Group of everything but workloads.
pub const PAGING: &str = "paging";

/// Name of a workload's ratio: its time by what it takes [at least](super::replay).
pub fn by_least(memory: &str, local_ratio: f64, by: By) -> String {
    format!("{memory} at {local_ratio} ÷ (local memfd + fetches of {by} × floor of a fault)")
}

/// How names of [`by_lru`] begin.
const BY_LRU: &str = "misses of the pager's policy ÷ LRU's";

/// Name of a workload's ratio: misses of the pager's policy by LRU's, on its trace.
pub fn by_lru(local_ratio: f64) -> String {
    format!("{BY_LRU}, at {local_ratio}")
}

/// Name of the ratio of reading beside a client that stalls by reading where there is none.
pub const BESIDE_A_STALL_BY_WITHOUT: &str =
    "64 pages read from a server: beside a client that stalls ÷ without it";

/// Name of the ratio of tuning down by [`eviction_floor`].
pub const BY_EVICTION_FLOOR: &str = "tuning down ÷ (protect + copy + punch + send)";

/// Pages per second, in each round, that a processor can protect, copy out, punch, each by ranges, and send over a
/// raw socket, doing nothing else; where the memory server is on that processor, what takes them there, too.
///
/// Sending counts by its processor time: a pager that does not wait for its batches goes on with others meanwhile.
pub fn eviction_floor(results: &Results) -> Vec<f64> {
    let of = |name: &str| results.rounds(name).iter();
    let (protecting, punching) = (of("write-protect by range p50"), of("punch by range p50"));
    let sending = of("64 pages written to a server, raw socket: CPU of client");
    let serving = of("64 pages written to a server, raw socket: CPU of server");
    let is_shared = results.machine.is_server_beside_pager;
    let sending = sending.zip(serving).map(|(client_us, server_us)| {
        if is_shared {
            client_us + server_us
        } else {
            *client_us
        }
    });
    let rounds = protecting
        .zip(punching)
        .zip(of("copying pages"))
        .zip(sending);
    rounds
        .map(|(((protect_us, punch_us), copied), send_us)| {
            1e6 / (protect_us + punch_us + 1e6 / copied + send_us)
        })
        .collect()
}

/// Name of a fault's ratio by [`sum_of_floors`].
pub fn by_sum_of_floors(fault: &str) -> String {
    format!("{fault} ÷ (uffd alone + wire alone), medians")
}

/// What a round trip of a userfault, by the sooner way to wait for it, and one of a page over the wire take together,
/// in each round: each was measured by itself, so what a fault's way saves by having both is not in it, and neither
/// is what the machine's speed was when the faults were.
pub fn sum_of_floors(results: &Results) -> Vec<f64> {
    let of = |name: &str| results.rounds(name).iter();
    let sleeping = of("uffd round trip, sleeping p50");
    let uffd = sleeping.zip(of("uffd round trip, spinning p50"));
    let both = uffd.zip(of("wire round trip p50"));
    both.map(|((sleeping, spinning), wire)| sleeping.min(*spinning) + wire)
        .collect()
}

/// All that follow from what was measured.
pub fn of(results: &Results) -> Vec<Ratio> {
    let mut ratios = Vec::new();
    paging(results, &mut ratios);
    for series in &results.series {
        let spread = |memory: &str, local: f64| {
            let to = results.series(&series.workload, memory, local)?;
            Spread::of_ratios(&seconds(series), &seconds(to))
        };
        let mut push = |name: String, value: Option<Spread>| {
            ratios.extend(value.map(|value| Ratio {
                group: series.workload.clone(),
                name,
                value,
                is_less_better: true,
            }));
        };
        let at = series.local_ratio;
        let what = format!("{} at {at}", series.memory);
        if series.memory != "huge" {
            push(format!("{what} ÷ local, huge pages"), spread("huge", 1.0));
        }
        if series.memory != OUTRAM {
            // Moved in another way.
            if series.memory.starts_with(OUTRAM) {
                push(format!("{what} ÷ outram at {at}"), spread(OUTRAM, at));
            }
            continue;
        }
        push(format!("{what} ÷ local memfd"), spread("memfd", 1.0));
        if at < 1.0 {
            push(format!("{what} ÷ outram at 1"), spread(OUTRAM, 1.0));
            for memory in PARTLY_LOCAL {
                push(format!("{what} ÷ {memory} at {at}"), spread(memory, at));
            }
            let workload = &series.workload;
            for by in [By::Opt, By::Lru] {
                let found = replay::by_least(results, workload, OUTRAM, at, by);
                push(by_least(OUTRAM, at, by), found);
            }
            for memory in PARTLY_LOCAL {
                let found = replay::by_least(results, workload, memory, at, By::Lru);
                push(by_least(memory, at, By::Lru), found);
            }
            let of = |replay: &&Replay| replay.workload == *workload && replay.local_ratio == at;
            let replay = results.replays.iter().find(of);
            push(by_lru(at), replay.and_then(Replay::by_lru));
        }
    }
    ratios
}

fn seconds(series: &super::results::Series) -> Vec<f64> {
    series.runs.iter().map(|run| run.seconds).collect()
}

fn paging(results: &Results, ratios: &mut Vec<Ratio>) {
    let mut push = |name: &str, values: &[f64], to: &[f64], is_less_better: bool| {
        ratios.extend(Spread::of_ratios(values, to).map(|value| Ratio {
            group: PAGING.to_owned(),
            name: name.to_owned(),
            value,
            is_less_better,
        }));
    };
    let of = |name: &str| results.rounds(name);
    for (which, title) in [("p50", "medians"), ("p99", "p99")] {
        for fault in ["remote fault", "remote fault at the limit"] {
            push(
                &format!("{fault} ÷ (uffd + wire), {title}"),
                of(&format!("{fault} {which}")),
                of(&format!("{} {which}", floor_beside(fault))),
                true,
            );
        }
    }
    for fault in ["remote fault", "remote fault at the limit"] {
        push(
            &by_sum_of_floors(fault),
            of(&format!("{fault} p50")),
            &sum_of_floors(results),
            true,
        );
    }
    push(
        "uffd spinning ÷ sleeping",
        of("uffd round trip, spinning p50"),
        of("uffd round trip, sleeping p50"),
        true,
    );
    for (what, rate, floor) in [
        (
            "remote pages read in order",
            "remote pages read in order: rate",
            WIRE_READ,
        ),
        (
            "remote huge pages read in order",
            "remote huge pages read in order: rate",
            WIRE_READ,
        ),
        (
            "eviction of dirty huge pages",
            "eviction of dirty huge pages: rate",
            WIRE_WRITTEN,
        ),
        ("tuning down", "tuning down", WIRE_WRITTEN),
    ] {
        push(&format!("{what} ÷ {floor}"), of(rate), of(floor), false);
    }
    for what in BATCHES {
        push(
            &format!("{what} ÷ raw socket"),
            of(&format!("{what}: rate")),
            of(&format!("{what}, raw socket: rate")),
            false,
        );
    }
    push(
        BESIDE_A_STALL_BY_WITHOUT,
        of(&format!("{BESIDE_A_STALL}: rate")),
        of(&format!("{WITHOUT_A_STALL}: rate")),
        false,
    );
    push(
        "tuning down ÷ copying pages",
        of("tuning down"),
        of("copying pages"),
        false,
    );
    push(
        BY_EVICTION_FLOOR,
        of("tuning down"),
        &eviction_floor(results),
        false,
    );
    for which in ["p99", "p99.9", "longest"] {
        push(
            &format!("use of a held page, {which}: tuning down ÷ at rest"),
            of(&format!("{HELD_MEANWHILE} {which}")),
            of(&format!("{HELD_AT_REST} {which}")),
            true,
        );
        push(
            &format!("remote fault, {which}: tuning down ÷ before"),
            of(&format!("{FAULT_MEANWHILE} {which}")),
            of(&format!("{FAULT_AT_REST} {which}")),
            true,
        );
    }
    for what in [
        "remote fault",
        "eviction of dirty pages",
        "remote pages read in order",
    ] {
        let name = format!("{what}: wire bytes per useful byte");
        let ones = vec![1.0; of(&name).len()];
        push(&name, of(&name), &ones, true);
    }
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::sample;
    use super::*;

    fn value(ratios: &[Ratio], name: &str) -> Option<f64> {
        let found = ratios.iter().find(|ratio| ratio.name == name);
        found.map(|ratio| ratio.value.median)
    }

    #[test]
    fn tuning_down_is_divided_by_what_its_calls_take_at_least() {
        let mut results = sample();
        results.note("write-protect by range p50", "µs", 0.25);
        results.note("punch by range p50", "µs", 0.75);
        results.note("copying pages", "pages/s", 2e6);
        let raw = |what: &str| format!("64 pages written to a server, raw socket: {what}");
        // Most of a batch's time the client waits.
        results.note(&raw("rate"), "pages/s", 1e4);
        results.note(&raw("CPU of client"), "µs/page", 0.5);
        results.note(&raw("CPU of server"), "µs/page", 2.0);
        results.note("tuning down", "pages/s", 1e5);
        assert_eq!(eviction_floor(&results), [5e5]);
        assert_eq!(value(&of(&results), BY_EVICTION_FLOOR), Some(0.2));
        results.machine.is_server_beside_pager = true;
        assert_eq!(eviction_floor(&results), [2.5e5]);
    }

    #[test]
    fn what_writes_is_divided_by_a_wire_that_is_written_to() {
        let mut results = sample();
        results.note(WIRE_READ, "pages/s", 1000.0);
        results.note(WIRE_WRITTEN, "pages/s", 500.0);
        for name in [
            "remote pages read in order: rate",
            "eviction of dirty huge pages: rate",
            "tuning down",
        ] {
            results.note(name, "pages/s", 250.0);
        }
        let ratios = of(&results);
        for (name, wanted) in [
            ("remote pages read in order ÷ wire, 64 pages read", 0.25),
            ("eviction of dirty huge pages ÷ wire, 64 pages written", 0.5),
            ("tuning down ÷ wire, 64 pages written", 0.5),
        ] {
            assert_eq!(value(&ratios, name), Some(wanted), "{name}");
        }
    }

    #[test]
    fn a_fault_is_divided_by_the_floor_of_its_moment() {
        let mut results = sample();
        for floor in [50.0, 100.0] {
            for which in ["p50", "p99"] {
                let name = format!("{} {which}", floor_beside("remote fault"));
                results.note(&name, "µs", floor);
            }
            results.note("remote fault p99", "µs", 2.0 * floor);
            // Of another moment.
            results.note("uffd round trip, sleeping p50", "µs", 15.0);
            results.note("uffd round trip, spinning p50", "µs", 10.0);
            results.note("wire round trip p50", "µs", 40.0);
        }
        let ratios = of(&results);
        // 200 / 50 and 250 / 100.
        assert_eq!(
            value(&ratios, "remote fault ÷ (uffd + wire), medians"),
            Some(3.25)
        );
        assert_eq!(
            value(&ratios, "remote fault ÷ (uffd + wire), p99"),
            Some(2.0)
        );
        // 200 / 50 and 250 / 50.
        assert_eq!(sum_of_floors(&results), [50.0, 50.0]);
        assert_eq!(value(&ratios, &by_sum_of_floors("remote fault")), Some(4.5));
        assert_eq!(value(&ratios, "outram at 0.5 ÷ outram at 1"), Some(1.75));
    }

    #[test]
    fn what_was_not_measured_has_no_ratio() {
        let ratios = of(&sample());
        assert_eq!(value(&ratios, "outram at 0.5 ÷ zram at 0.5"), None);
        assert_eq!(value(&ratios, "tuning down ÷ copying pages"), None);
    }
}
