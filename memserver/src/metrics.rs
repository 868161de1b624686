//! What the server counts, and the page where Prometheus reads it.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use outram_wire::server::ServerStats;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Longest request head that is read; scrapers send a few hundred bytes.
const MAX_REQUEST_BYTES: usize = 8 * 1024;
/// A scraper that takes longer is left.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(3);

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
    memory_bytes: Gauge,
    reserved_bytes: Gauge,
    leased_bytes: Gauge,
    client_leased_bytes: Family<Client, Gauge>,
    client_reserved_bytes: Family<Client, Gauge>,
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

    fn registry(&self) -> Registry {
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
        registry
    }

    /// The page, with the gauges brought up to date.
    fn page(&self, registry: &Registry, stats: &ServerStats) -> String {
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        self.memory_bytes.set(signed(stats.memory_bytes));
        self.reserved_bytes.set(signed(stats.reserved_bytes));
        self.leased_bytes.set(signed(stats.leased_bytes));
        self.client_leased_bytes.clear();
        self.client_reserved_bytes.clear();
        for client in &stats.clients {
            let label = Client {
                client: client.name.to_string(),
                vm: client.vm.to_string(),
            };
            let leased = self.client_leased_bytes.get_or_create(&label).clone();
            leased.set(signed(client.leased_bytes));
            let reserved = self.client_reserved_bytes.get_or_create(&label).clone();
            reserved.set(signed(client.reserved_bytes));
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

/// The thread that answers scrapers, one after the other.
pub(crate) struct Page {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Page {
    pub(crate) fn serve(
        listener: TcpListener,
        metrics: Metrics,
        stats: impl Fn() -> ServerStats + Send + 'static,
    ) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = thread::Builder::new()
            .name("metrics".to_owned())
            .spawn(move || {
                let registry = metrics.registry();
                for socket in listener.incoming() {
                    if stopped.load(Ordering::Acquire) {
                        return;
                    }
                    let Ok(socket) = socket else {
                        // Out of descriptors, most likely: give others time to end.
                        thread::sleep(Duration::from_millis(100));
                        continue;
                    };
                    if let Err(error) = answer(&socket, || metrics.page(&registry, &stats())) {
                        tracing::debug!(%error, "a scraper was not answered");
                    }
                }
            })?;
        Ok(Self {
            address,
            stop,
            thread: Some(thread),
        })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // A connection of our own lets the thread see the flag.
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            });
        }
        let woken = TcpStream::connect_timeout(&address, SCRAPE_TIMEOUT).is_ok();
        if let Some(thread) = self.thread.take()
            && woken
        {
            let _ = thread.join();
        }
    }
}

/// Answers one HTTP request.
fn answer(mut socket: &TcpStream, page: impl FnOnce() -> String) -> io::Result<()> {
    let deadline = Instant::now() + SCRAPE_TIMEOUT;
    let mut head = Vec::new();
    let mut chunk = [0; 1024];
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || head.len() > MAX_REQUEST_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        socket.set_read_timeout(Some(left))?;
        match socket.read(&mut chunk)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => head.extend_from_slice(&chunk[..read]),
        }
    }
    let line = head.split(|byte| *byte == b'\r').next();
    let mut words = line.unwrap_or_default().split(|byte| *byte == b' ');
    let (method, path) = (words.next(), words.next());
    let (status, body) = match (method, path) {
        (Some(b"GET"), Some(b"/metrics" | b"/")) => ("200 OK", page()),
        (Some(b"GET"), _) => ("404 Not Found", "try /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "only GET\n".to_owned()),
    };
    let length = body.len();
    let response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    socket.set_write_timeout(Some(SCRAPE_TIMEOUT))?;
    socket.write_all(response.as_bytes())
}
