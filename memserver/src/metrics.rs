//! What the server counts, and the page where Prometheus reads it.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicI64, AtomicU64};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use outram_wire::identity::IdentityStatus;
use outram_wire::server::ServerStats;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// An enum whose values are a label's: each with its text, and all of them in a list.
macro_rules! label {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
        pub(crate) enum $name {
            $($(#[$value_doc])* $value,)*
        }

        impl $name {
            const ALL: &[Self] = &[$(Self::$value),*];
        }

        impl EncodeLabelValue for $name {
            fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
                EncodeLabelValue::encode(&match self { $(Self::$value => $text,)* }, encoder)
            }
        }
    };
}

label! {
    /// Why somebody was turned away.
    Stranger {
        /// Neither TLS nor a data connection.
        Protocol = "protocol",
        /// No certificate, or one that does not pass.
        Certificate = "certificate",
        /// No valid token.
        Token = "token",
        /// Took too long to say who it is, or made room for others.
        Unidentified = "unidentified",
        /// Too many connections.
        Limit = "limit",
    }
}

label! {
    /// Which kind of connection.
    Connection {
        Control = "control",
        Data = "data",
    }
}

label! {
    /// What became of a request for a slab.
    Outcome {
        Granted = "granted",
        Refused = "refused",
    }
}

label! {
    /// What a data request did.
    Operation {
        Read = "read",
        Write = "write",
        Refused = "refused",
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct Reason {
    pub(crate) reason: Stranger,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct On {
    pub(crate) connection: Connection,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct With {
    pub(crate) outcome: Outcome,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct Of {
    pub(crate) operation: Operation,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Client {
    client: String,
    vm: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Disk {
    client: String,
    disk: String,
    /// Whether nobody uses it.
    parked: String,
}

/// Counters and gauges; cloning shares them.
#[derive(Clone, Default)]
pub(crate) struct Metrics {
    pub(crate) strangers: Family<Reason, Counter>,
    pub(crate) bad_frames: Family<On, Counter>,
    pub(crate) connections: Family<On, Gauge>,
    pub(crate) leases: Family<With, Counter>,
    pub(crate) released_slabs: Counter,
    pub(crate) expired_sessions: Counter,
    pub(crate) expired_slabs: Counter,
    pub(crate) superseded_sessions: Counter,
    pub(crate) vacate_requests: Counter,
    pub(crate) data_requests: Family<Of, Counter>,
    pub(crate) read_bytes: Counter,
    pub(crate) written_bytes: Counter,
    cpu_seconds: Counter<f64, AtomicU64>,
    certificate_expiry: Gauge,
    certificate_refused: Gauge,
    memory_bytes: Gauge,
    reserved_bytes: Gauge,
    leased_bytes: Gauge,
    spare_bytes: Gauge,
    client_leased_bytes: Family<Client, Gauge>,
    client_reserved_bytes: Family<Client, Gauge>,
    disk_leased_bytes: Family<Disk, Gauge>,
    disk_reserved_bytes: Family<Disk, Gauge>,
}

impl Metrics {
    /// Everything at zero; what can be counted is shown from the start.
    pub(crate) fn new() -> Self {
        let metrics = Self::default();
        for reason in Stranger::ALL.iter().copied() {
            drop(metrics.strangers.get_or_create(&Reason { reason }));
        }
        for connection in Connection::ALL.iter().copied() {
            drop(metrics.bad_frames.get_or_create(&On { connection }));
            drop(metrics.connections.get_or_create(&On { connection }));
        }
        for outcome in Outcome::ALL.iter().copied() {
            drop(metrics.leases.get_or_create(&With { outcome }));
        }
        for operation in Operation::ALL.iter().copied() {
            drop(metrics.data_requests.get_or_create(&Of { operation }));
        }
        metrics
    }

    pub(crate) fn count_stranger(&self, reason: Stranger) {
        self.strangers.get_or_create(&Reason { reason }).inc();
    }

    pub(crate) fn count_bad_frame(&self, connection: Connection) {
        self.bad_frames.get_or_create(&On { connection }).inc();
    }

    /// Counts a connection for as long as the answer lives.
    pub(crate) fn connected(&self, connection: Connection) -> Connected {
        let gauge = self.connections.get_or_create(&On { connection }).clone();
        gauge.inc();
        Connected(gauge)
    }

    pub(crate) fn registry(&self) -> Registry {
        let mut registry = Registry::with_prefix("outram_memserver");
        let mut counter =
            |name, help, metric: &Counter| registry.register(name, help, metric.clone());
        counter(
            "released_slabs",
            "Slabs given back by their clients",
            &self.released_slabs,
        );
        counter(
            "expired_sessions",
            "Sessions whose lease ran out",
            &self.expired_sessions,
        );
        counter(
            "expired_slabs",
            "Slabs taken back because a lease ran out",
            &self.expired_slabs,
        );
        counter(
            "superseded_sessions",
            "Sessions given up by a new backend of the same guest",
            &self.superseded_sessions,
        );
        counter(
            "vacate_requests",
            "Slabs asked back from clients",
            &self.vacate_requests,
        );
        counter("read_bytes", "Bytes that clients read", &self.read_bytes);
        counter(
            "written_bytes",
            "Bytes that clients wrote",
            &self.written_bytes,
        );
        let mut gauge = |name, help, metric: &Gauge| registry.register(name, help, metric.clone());
        gauge(
            "memory_bytes",
            "Bytes that may be lent at most",
            &self.memory_bytes,
        );
        gauge(
            "reserved_bytes",
            "Bytes set aside for clients",
            &self.reserved_bytes,
        );
        gauge(
            "leased_bytes",
            "Bytes lent, and so taken from the system",
            &self.leased_bytes,
        );
        gauge(
            "spare_bytes",
            "Bytes taken from the system ahead of the next lease over RDMA",
            &self.spare_bytes,
        );
        gauge(
            "certificate_expiry_timestamp_seconds",
            "When the certificate in use expires, in seconds since 1970",
            &self.certificate_expiry,
        );
        gauge(
            "certificate_refused",
            "Whether the certificates' files were changed and are no good, so that the old ones are in use",
            &self.certificate_refused,
        );
        registry.register(
            "cpu_seconds",
            "Processor time that this process has taken",
            self.cpu_seconds.clone(),
        );
        registry.register(
            "refused_strangers",
            "Connections turned away before they were anybody's, by reason",
            self.strangers.clone(),
        );
        registry.register(
            "bad_frames",
            "Connections of clients ended for frames against the protocol",
            self.bad_frames.clone(),
        );
        registry.register(
            "connections",
            "Connections that stand",
            self.connections.clone(),
        );
        registry.register(
            "leases",
            "Requests for a slab, by outcome",
            self.leases.clone(),
        );
        registry.register(
            "data_requests",
            "Requests on data connections, by operation",
            self.data_requests.clone(),
        );
        registry.register(
            "client_leased_bytes",
            "Bytes leased, by guest",
            self.client_leased_bytes.clone(),
        );
        registry.register(
            "client_reserved_bytes",
            "Bytes set aside, by guest",
            self.client_reserved_bytes.clone(),
        );
        registry.register(
            "disk_leased_bytes",
            "Bytes leased, by far-memory disk",
            self.disk_leased_bytes.clone(),
        );
        registry.register(
            "disk_reserved_bytes",
            "Bytes set aside, by far-memory disk",
            self.disk_reserved_bytes.clone(),
        );
        registry
    }

    /// The page, with the gauges brought up to date.
    pub(crate) fn page(
        &self,
        registry: &Registry,
        stats: &ServerStats,
        spare_bytes: u64,
        identity: &IdentityStatus,
    ) -> String {
        let expiry = identity.expires_unix_s.unwrap_or_default();
        self.certificate_expiry.set(expiry);
        let refused = identity.refused.is_some();
        self.certificate_refused.set(refused.into());
        // The clock of a process of its own can always be read.
        if let Ok(taken) = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID) {
            let taken = Duration::from(taken).as_secs_f64();
            self.cpu_seconds.inc_by(taken - self.cpu_seconds.get());
        }
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        self.memory_bytes.set(signed(stats.memory_bytes));
        self.reserved_bytes.set(signed(stats.reserved_bytes));
        self.leased_bytes.set(signed(stats.leased_bytes));
        self.spare_bytes.set(signed(spare_bytes));
        self.client_leased_bytes.clear();
        self.client_reserved_bytes.clear();
        for client in &stats.clients {
            let label = Client {
                client: client.name.to_string(),
                vm: client.vm.to_string(),
            };
            let leased = self.client_leased_bytes.get_or_create(&label).clone();
            // A guest that is migrated under one certificate has two sessions.
            leased.inc_by(signed(client.leased_bytes));
            let reserved = self.client_reserved_bytes.get_or_create(&label).clone();
            reserved.inc_by(signed(client.reserved_bytes));
        }
        self.disk_leased_bytes.clear();
        self.disk_reserved_bytes.clear();
        for disk in &stats.disks {
            let label = Disk {
                client: disk.name.to_string(),
                disk: disk.disk.to_string(),
                parked: disk.parked_s.is_some().to_string(),
            };
            let leased = self.disk_leased_bytes.get_or_create(&label).clone();
            leased.set(signed(disk.leased_bytes));
            let reserved = self.disk_reserved_bytes.get_or_create(&label).clone();
            reserved.set(signed(disk.reserved_bytes));
        }
        let mut page = String::new();
        if encode(&mut page, registry).is_err() {
            // A string takes whatever is written; an error would be the encoder's own.
            let _ = writeln!(page, "# the metrics could not be encoded");
        }
        page
    }
}

/// A connection being counted.
pub(crate) struct Connected(Gauge<i64, AtomicI64>);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.dec();
    }
}
