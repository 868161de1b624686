//! The guest's memory as Prometheus reads it. Labels are by outcome or server, never by page.

use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use anyhow::Context;
use outram_wire::control::{Phase, Status};
use outram_wire::scrape::Page;
use outram_wire::tuning::{QueueDepth, Workers};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use super::stage::{Daemon, Stage};
use crate::engine::stats::{FaultKind, Stats};

/// Upper bounds of the latency histogram's buckets, in microseconds: from a fault that stays in
/// memory to one that waits for a server to come back.
const BUCKETS_US: [u64; 14] = [
    10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000, 1_000_000, 10_000_000,
    60_000_000,
];

/// Serves the page at `address`.
pub(super) fn serve(address: SocketAddr, daemon: &Arc<Daemon>) -> anyhow::Result<Page> {
    let daemon = Arc::clone(daemon);
    let listener =
        TcpListener::bind(address).with_context(|| format!("cannot serve metrics at {address}"))?;
    Page::serve(listener, move || page(&daemon)).context("serving metrics")
}

/// The page as it is now.
pub(super) fn page(daemon: &Daemon) -> String {
    let status = daemon.status();
    let labels = [
        ("vm", status.vm.to_string()),
        ("domain", status.name.clone()),
    ];
    let labels = labels.map(|(key, value)| (key.into(), value.into()));
    let mut registry = Registry::with_prefix_and_labels("outram", labels.into_iter());
    let latencies = match daemon.stage() {
        Stage::Serving(guest) => FaultKind::ALL
            .map(|kind| Buckets::of(guest.pager.stats(), kind))
            .to_vec(),
        _ => Vec::new(),
    };
    registry.register_collector(Box::new(Snapshot { status, latencies }));
    let mut page = String::new();
    // A string takes whatever is written.
    let _ = encode(&mut page, &registry);
    page
}

/// Latencies of one kind, in buckets.
#[derive(Clone, Debug)]
struct Buckets {
    kind: FaultKind,
    sum_seconds: f64,
    count: u64,
    buckets: Vec<(f64, u64)>,
}

impl Buckets {
    fn of(stats: &Stats, kind: FaultKind) -> Self {
        stats.latency(kind, |histogram| {
            let mut below = 0;
            let bounds = BUCKETS_US.iter().map(|bound| {
                let until = histogram.count_between(0, *bound);
                let here = until - below;
                below = until;
                (*bound as f64 / 1e6, here)
            });
            let mut buckets: Vec<_> = bounds.collect();
            buckets.push((f64::MAX, histogram.len() - below));
            let sum_seconds = histogram.mean() * histogram.len() as f64 / 1e6;
            Self {
                kind,
                sum_seconds,
                count: histogram.len(),
                buckets,
            }
        })
    }
}

#[derive(Debug)]
struct Snapshot {
    status: Status,
    latencies: Vec<Buckets>,
}

type Values<'a> = &'a [(&'a str, u64)];

fn family(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, unit): (&str, &str, Option<&Unit>),
    kind: MetricType,
    label: &str,
    values: Values<'_>,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, unit, kind)?;
    for (value_label, value) in values {
        let labels = [(label, *value_label)];
        match kind {
            MetricType::Counter => {
                ConstCounter::new(*value).encode(metric.encode_family(&labels)?)?
            }
            _ => ConstGauge::new(*value as f64).encode(metric.encode_family(&labels)?)?,
        }
    }
    Ok(())
}

impl Snapshot {
    fn encode_memory(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let status = &self.status;
        family(
            encoder,
            ("memory", "Guest RAM by where it is", Some(&Unit::Bytes)),
            MetricType::Gauge,
            "state",
            &[
                ("resident", status.resident_bytes),
                ("staged", status.staged_bytes),
                ("stored", status.stored_bytes),
                ("filled", status.filled_bytes),
                ("lost", status.lost_bytes),
                ("unmanaged", status.unmanaged_bytes),
            ],
        )?;
        family(
            encoder,
            (
                "size",
                "Guest RAM, what of it may be local, what of it is moved at a time, and what compressed pages take and hold",
                Some(&Unit::Bytes),
            ),
            MetricType::Gauge,
            "of",
            &[
                ("ram", status.ram_bytes),
                ("limit", status.limit_bytes),
                ("granularity", status.granularity_bytes.unwrap_or_default()),
                ("compressed", status.compressed_bytes),
                ("compressed_held", status.compressed_held_bytes),
            ],
        )?;
        family(
            encoder,
            (
                "kernel",
                "Host memory by the kernel's own count",
                Some(&Unit::Bytes),
            ),
            MetricType::Gauge,
            "of",
            &[
                ("memfd", status.kernel_memfd_bytes),
                ("staging", status.kernel_staging_bytes),
                ("table", status.kernel_table_bytes),
                ("anonymous", status.kernel_anon_bytes),
            ],
        )?;
        let serving = u64::from(matches!(status.phase, Phase::Serving));
        let stalled = u64::from(matches!(status.phase, Phase::Stalled));
        let stopped = u64::from(matches!(status.phase, Phase::Stopped));
        family(
            encoder,
            ("phase", "1 for the phase the guest is in", None),
            MetricType::Gauge,
            "phase",
            &[
                ("serving", serving),
                ("stalled", stalled),
                ("stopped", stopped),
            ],
        )?;
        let workers = status.workers.map(Workers::get);
        let queue_depth = status.queue_depth.map(QueueDepth::get);
        for (name, help, value) in [
            (
                "waiting_faults",
                "Faults that wait for an answer",
                status.waiting_faults,
            ),
            (
                "workers",
                "Threads that evict the guest's memory",
                workers.unwrap_or_default().into(),
            ),
            (
                "queue_depth",
                "How much is on its way at a time: batches of 256 KiB written back, 32 KiB ahead of a stream",
                queue_depth.unwrap_or_default().into(),
            ),
        ] {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(value as f64).encode(metric)?;
        }
        Ok(())
    }

    fn encode_counters(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let counters = &self.status.counters;
        let mut family = |name, help, unit, label, values: Values<'_>| {
            family(
                encoder,
                (name, help, unit),
                MetricType::Counter,
                label,
                values,
            )
        };
        family(
            "faults",
            "Faults by how they were answered",
            None,
            "outcome",
            &[
                ("zero", counters.faults_zero),
                ("filled", counters.faults_filled),
                ("staged", counters.faults_staged),
                ("compressed", counters.faults_compressed),
                ("remote", counters.faults_remote),
                ("protected", counters.faults_protected),
                ("duplicate", counters.faults_duplicate),
                ("lost", counters.faults_lost),
                ("poisoned", counters.faults_poisoned),
            ],
        )?;
        family(
            "evicted_pages",
            "Pages evicted, by what became of them",
            None,
            "outcome",
            &[
                ("clean", counters.evicted_clean_pages),
                ("filled", counters.evicted_filled_pages),
                (
                    "staged",
                    counters.evicted_pages
                        - counters.evicted_clean_pages
                        - counters.evicted_filled_pages,
                ),
            ],
        )?;
        family(
            "wire",
            "Bytes on the wire to memory servers",
            Some(&Unit::Bytes),
            "direction",
            &[
                ("received", counters.wire_received_bytes),
                ("sent", counters.wire_sent_bytes),
            ],
        )?;
        family(
            "fetched_ahead_judged_pages",
            "Pages fetched where the guest was expected, by whether it was seen to use them before they left",
            None,
            "outcome",
            &[
                ("used", counters.fetched_ahead_used_pages),
                ("unused", counters.fetched_ahead_unused_pages),
            ],
        )?;
        family(
            "stalls",
            "Attempts to give the guest a page that found no room under the limit, no huge page in the host's pool, or its server out of reach",
            None,
            "reason",
            &[
                ("limit", counters.stalls_limit),
                ("pool", counters.stalls_pool),
                ("server", counters.stalls_server),
            ],
        )
    }

    fn encode_plain(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let counters = &self.status.counters;
        for (name, help, value) in [
            (
                "refaults",
                "Faults on pages that had been evicted",
                counters.refaults,
            ),
            (
                "fetched_ahead_pages",
                "Pages asked for before anybody waited for them",
                counters.fetched_ahead_pages,
            ),
            (
                "compressed_pages",
                "Pages that were kept compressed when they left",
                counters.compressed_pages,
            ),
            (
                "writeback_pages",
                "Pages written to memory servers",
                counters.writeback_pages,
            ),
            (
                "removed_pages",
                "Pages that the guest gave back",
                counters.removed_pages,
            ),
            (
                "integrity_failures",
                "Pages lost because their bytes came back changed",
                counters.integrity_failures,
            ),
            (
                "refused_reads",
                "Reads that gave other bytes than were sent, and were refused",
                counters.refused_reads,
            ),
            (
                "takeovers",
                "Times that the guest was taken over from a process of its backend that had died",
                u64::from(self.status.takeovers),
            ),
            (
                "stray_device_accesses",
                "Accesses of the device to pages not pinned",
                counters.stray_device_accesses,
            ),
        ] {
            let metric = ConstCounter::new(value);
            metric.encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)?;
        }
        Ok(())
    }

    fn encode_wait(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let seconds = self.status.counters.waited_us as f64 / 1e6;
        let metric = encoder.encode_descriptor(
            "fault_wait",
            "Time that faults have waited, all together, those still waiting until now",
            Some(&Unit::Seconds),
            MetricType::Counter,
        )?;
        ConstCounter::new(seconds).encode(metric)
    }

    fn encode_servers(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let servers = &self.status.servers;
        let of = |read: fn(&outram_wire::control::ServerStatus) -> u64| -> Vec<(&str, u64)> {
            servers
                .iter()
                .map(|server| (server.address.as_str(), read(server)))
                .collect()
        };
        let connected = of(|server| server.connected.into());
        family(
            encoder,
            (
                "server_connected",
                "Whether a memory server is connected",
                None,
            ),
            MetricType::Gauge,
            "server",
            &connected,
        )?;
        let over_rdma = of(|server| {
            let transport = server.transport.as_deref().unwrap_or_default();
            transport.starts_with("RDMA").into()
        });
        family(
            encoder,
            (
                "server_rdma",
                "Whether pages go to and come from a memory server over RDMA",
                None,
            ),
            MetricType::Gauge,
            "server",
            &over_rdma,
        )?;
        let stored = of(|server| server.stored_bytes);
        family(
            encoder,
            (
                "server_stored",
                "Bytes of the guest on a memory server",
                Some(&Unit::Bytes),
            ),
            MetricType::Gauge,
            "server",
            &stored,
        )?;
        let slabs = of(|server| server.slabs);
        family(
            encoder,
            ("server_slabs", "Slabs leased from a memory server", None),
            MetricType::Gauge,
            "server",
            &slabs,
        )
    }

    fn encode_disk(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Some(disk) = &self.status.disk else {
            return Ok(());
        };
        family(
            encoder,
            (
                "far_disk",
                "The far-memory disk: what the guest sees, and what of it is written",
                Some(&Unit::Bytes),
            ),
            MetricType::Gauge,
            "of",
            &[("size", disk.size_bytes), ("stored", disk.stored_bytes)],
        )?;
        family(
            encoder,
            (
                "far_disk_requests",
                "Requests of the guest to its far-memory disk",
                None,
            ),
            MetricType::Counter,
            "outcome",
            &[
                ("read", disk.reads),
                ("write", disk.writes),
                ("discard", disk.discards),
                ("error", disk.errors),
            ],
        )?;
        family(
            encoder,
            (
                "far_disk_wire",
                "Bytes on the wire for the far-memory disk",
                Some(&Unit::Bytes),
            ),
            MetricType::Counter,
            "direction",
            &[("received", disk.received_bytes), ("sent", disk.sent_bytes)],
        )?;
        let failures = ConstCounter::new(disk.integrity_failures);
        failures.encode(encoder.encode_descriptor(
            "far_disk_integrity_failures",
            "Blocks of the far-memory disk that came back changed",
            None,
            MetricType::Counter,
        )?)
    }

    fn encode_latency(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "From reading a fault to waking the guest, by how it was answered";
        let mut metric = encoder.encode_descriptor(
            "fault_latency",
            help,
            Some(&Unit::Seconds),
            MetricType::Histogram,
        )?;
        for latency in &self.latencies {
            let labels = [("outcome", latency.kind.name())];
            let mut family = metric.encode_family(&labels)?;
            family.encode_histogram::<NoLabelSet>(
                latency.sum_seconds,
                latency.count,
                &latency.buckets,
                None,
            )?;
        }
        Ok(())
    }
}

impl Snapshot {
    fn encode_identity(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let identity = &self.status.identity;
        let mut gauge = |name, help, value: i64| {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(value).encode(metric)
        };
        // Where none was ever taken, 0 would say that it expired in 1970.
        if let Some(expiry) = identity.expires_unix_s {
            gauge(
                "certificate_expiry_timestamp_seconds",
                "When this host's certificate expires, in seconds since 1970",
                expiry,
            )?;
        }
        gauge(
            "certificate_refused",
            "Whether the certificates' files are no good as they are now, so that earlier ones are in use",
            identity.refused.is_some().into(),
        )
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.encode_memory(&mut encoder)?;
        self.encode_counters(&mut encoder)?;
        self.encode_plain(&mut encoder)?;
        self.encode_wait(&mut encoder)?;
        self.encode_servers(&mut encoder)?;
        self.encode_identity(&mut encoder)?;
        self.encode_disk(&mut encoder)?;
        self.encode_latency(&mut encoder)
    }
}

#[cfg(test)]
mod tests {
    use outram_wire::control::{Counters, DiskState, DiskStatus, ServerStatus};
    use outram_wire::units::{Limit, VmId};

    use super::*;

    fn status() -> Status {
        let server = ServerStatus {
            address: "mem1:7741".to_owned(),
            connected: true,
            detail: None,
            transport: Some("RDMA (mlx5_0)".to_owned()),
            slabs: 3,
            reserved_bytes: 1 << 30,
            stored_bytes: 4096,
        };
        Status {
            vm: VmId(Default::default()),
            name: "web1".to_owned(),
            backend_version: "0".to_owned(),
            backend_pid: 1,
            takeovers: 0,
            qemu_pid: None,
            phase: Phase::Serving,
            detail: None,
            sealed: true,
            identity: outram_wire::identity::IdentityStatus {
                expires_unix_s: Some(1_900_000_000),
                refused: None,
            },
            handover: None,
            ram_bytes: 1 << 30,
            limit: Limit::LocalBytes(1 << 29),
            limit_bytes: 1 << 29,
            granularity_bytes: Some(65536),
            workers: "3".parse().ok(),
            queue_depth: "16".parse().ok(),
            compressed_share: "0.2".parse().ok(),
            compressed_bytes: 1 << 20,
            compressed_held_bytes: 3 << 20,
            resident_bytes: 8192,
            staged_bytes: 0,
            stored_bytes: 4096,
            filled_bytes: 0,
            lost_bytes: 0,
            homing: None,
            unmanaged_bytes: 0,
            waiting_faults: 2,
            kernel_memfd_bytes: 8192,
            kernel_staging_bytes: 0,
            kernel_table_bytes: 0,
            kernel_anon_bytes: 0,
            fixed_anon_bytes: 0,
            headroom_bytes: 0,
            counters: Counters {
                faults_remote: 7,
                waited_us: 1_500_000,
                fetched_ahead_used_pages: 12,
                ..Counters::default()
            },
            latency: Default::default(),
            servers: vec![server],
            disk: Some(DiskStatus {
                id: Default::default(),
                size_bytes: 8 << 30,
                state: DiskState::Open,
                connected: Some(true),
                detail: None,
                stored_bytes: 4096,
                leased_slabs: 1,
                reads: 1,
                writes: 2,
                discards: 3,
                errors: 4,
                integrity_failures: 5,
                sent_bytes: 6,
                received_bytes: 7,
            }),
        }
    }

    fn page_of(status: Status) -> String {
        let stats = Stats::new();
        stats.note_fault(FaultKind::Remote, 42);
        let latencies = FaultKind::ALL
            .map(|kind| Buckets::of(&stats, kind))
            .to_vec();
        let mut registry = Registry::with_prefix("outram");
        registry.register_collector(Box::new(Snapshot { status, latencies }));
        let mut page = String::new();
        encode(&mut page, &registry).expect("a string takes everything");
        page
    }

    #[test]
    fn an_expiry_that_is_not_known_is_not_told() {
        let mut status = status();
        status.identity.expires_unix_s = None;
        status.identity.refused = Some("client.pem is missing".to_owned());
        let page = page_of(status);
        assert!(!page.contains("certificate_expiry"), "{page}");
        assert!(page.contains("outram_certificate_refused 1\n"), "{page}");
    }

    #[test]
    fn metrics_have_these_names() {
        let page = page_of(status());
        let types: Vec<&str> = page
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE "))
            .collect();
        assert_eq!(
            types,
            [
                "outram_memory_bytes gauge",
                "outram_size_bytes gauge",
                "outram_kernel_bytes gauge",
                "outram_phase gauge",
                "outram_waiting_faults gauge",
                "outram_workers gauge",
                "outram_queue_depth gauge",
                "outram_faults counter",
                "outram_evicted_pages counter",
                "outram_wire_bytes counter",
                "outram_fetched_ahead_judged_pages counter",
                "outram_stalls counter",
                "outram_refaults counter",
                "outram_fetched_ahead_pages counter",
                "outram_compressed_pages counter",
                "outram_writeback_pages counter",
                "outram_removed_pages counter",
                "outram_integrity_failures counter",
                "outram_refused_reads counter",
                "outram_takeovers counter",
                "outram_stray_device_accesses counter",
                "outram_fault_wait_seconds counter",
                "outram_server_connected gauge",
                "outram_server_rdma gauge",
                "outram_server_stored_bytes gauge",
                "outram_server_slabs gauge",
                "outram_certificate_expiry_timestamp_seconds gauge",
                "outram_certificate_refused gauge",
                "outram_far_disk_bytes gauge",
                "outram_far_disk_requests counter",
                "outram_far_disk_wire_bytes counter",
                "outram_far_disk_integrity_failures counter",
                "outram_fault_latency_seconds histogram",
            ]
        );
        for line in [
            "outram_faults_total{outcome=\"remote\"} 7",
            "outram_fetched_ahead_judged_pages_total{outcome=\"used\"} 12",
            "outram_fetched_ahead_judged_pages_total{outcome=\"unused\"} 0",
            "# HELP outram_stalls Attempts to give the guest a page that found no room",
            "outram_fault_wait_seconds_total 1.5",
            "outram_certificate_expiry_timestamp_seconds 1900000000",
            "outram_server_connected{server=\"mem1:7741\"} 1.0",
            "outram_server_rdma{server=\"mem1:7741\"} 1.0",
            "outram_far_disk_bytes{of=\"stored\"} 4096",
            "outram_far_disk_requests_total{outcome=\"error\"} 4",
            "outram_fault_latency_seconds_bucket{le=\"0.00005\",outcome=\"remote\"} 1",
            "outram_fault_latency_seconds_count{outcome=\"remote\"} 1",
        ] {
            assert!(page.contains(line), "{line} is not in:\n{page}");
        }
    }
}
