//! A server as a whole: its threads, and their orderly end.
//!
//! One thread accepts, one ends leases and looks after certificates and devices, one has a slab ready
//! ahead, one answers scrapers, and each connection has its own.
//! Threads are bounded by the lobby's limit, by the sessions' and by the data connections' of each.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use outram_wire::identity::Identity;
use outram_wire::logging::Seldom;
use outram_wire::scrape::Page;
use outram_wire::server::channel::{EventFd, new_waker};
use outram_wire::server::clock::BootTime;
use outram_wire::server::{InstanceId, ServerStats};
use outram_wire::tls::TlsError;

use crate::config::{Config, ConfigError};
use crate::control::Desk;
use crate::hall::Hall;
use crate::ledger::{Ledger, Terms};
use crate::metrics::Metrics;

/// How long a stopping server waits for its threads.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the certificates' files and the devices are looked at: whoever renews them hardly waits for
/// longer, and whoever removes a device may have to wait for so long.
const LOOK_AROUND: Duration = Duration::from_secs(1);

/// Whoever keeps the time looks every second. After so long it did not run, nor did those who hear clients. Where
/// leases are short, half of one is long: together with the third that clients renew in it is within a lease.
const STANDSTILL: Duration = Duration::from_secs(3);

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The configuration is no good.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The certificates are no good.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The address is not to be had.
    #[error(
        "cannot listen on {address} for {what}: choose a free port and an address of this machine"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// For whom.
        what: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The system refuses threads, descriptors or random numbers.
    #[error("the system cannot provide {what}")]
    System {
        /// What.
        what: &'static str,
        /// Its reason.
        source: io::Error,
    },
}

/// A running memory server. Dropping it stops it.
pub struct Server {
    hall: Arc<Hall>,
    address: SocketAddr,
    page: Option<Page>,
    stop: Arc<EventFd>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Checks the configuration, listens, and serves from then on.
    pub fn start(config: Config) -> Result<Server, ServerError> {
        config.check()?;
        let identity = Identity::load(config.tls.clone())?;
        let listener = listen(config.listen, "clients")?;
        let address = local_address(&listener)?;
        let page = config.metrics.map(|address| listen(address, "metrics"));
        let page = page.transpose()?;
        let no_random = |error: getrandom::Error| ServerError::System {
            what: "random numbers",
            source: io::Error::other(error),
        };
        let instance = InstanceId::random().map_err(no_random)?;
        let terms = Terms {
            slab_bytes: config.slab_bytes,
            lease_timeout: config.lease_timeout,
            max_sessions: config.max_guests,
            max_data_connections: config.max_data_connections,
            client_bytes: config.client_memory_bytes,
            token_life: config.token_life,
            parked_disk_timeout: config.parked_disk_timeout,
        };
        let ledger = Ledger::new(instance, config.memory_bytes, terms);
        let desk = Desk {
            ledger: Arc::new(ledger),
            metrics: Metrics::new(),
            rdma: config.rdma.clone(),
        };
        let hall = Arc::new(Hall::new(desk, identity, config));
        Self::launch(hall, listener, address, page)
    }

    fn launch(
        hall: Arc<Hall>,
        listener: TcpListener,
        address: SocketAddr,
        page: Option<TcpListener>,
    ) -> Result<Server, ServerError> {
        let thread_error = |source| ServerError::System {
            what: "a thread",
            source,
        };
        let stop = new_waker().map_err(|source| ServerError::System {
            what: "an eventfd",
            source,
        })?;
        let mut server = Server {
            hall: hall.clone(),
            address,
            page: None,
            stop: Arc::new(stop),
            threads: Vec::new(),
        };
        if let Some(listener) = page {
            let (hall, metrics) = (hall.clone(), hall.desk.metrics.clone());
            let registry = metrics.registry();
            let page = Page::serve(listener, move || {
                let stats = hall.desk.ledger.stats(|_| true);
                let spare_bytes = hall.desk.ledger.spare.bytes();
                metrics.page(&registry, &stats, spare_bytes, &hall.identity_status())
            });
            server.page = Some(page.map_err(thread_error)?);
        }
        let (accepting, stop) = (hall.clone(), server.stop.clone());
        let builder = thread::Builder::new().name("accept".to_owned());
        let thread = builder.spawn(move || accept(&accepting, &listener, &stop));
        server.threads.push(thread.map_err(thread_error)?);
        let preparing = hall.clone();
        let builder = thread::Builder::new().name("spare".to_owned());
        let thread = builder.spawn(move || preparing.desk.ledger.keep_spare());
        server.threads.push(thread.map_err(thread_error)?);
        let stop = server.stop.clone();
        let builder = thread::Builder::new().name("time".to_owned());
        let thread = builder.spawn(move || keep_time(&hall, &stop));
        server.threads.push(thread.map_err(thread_error)?);
        Ok(server)
    }

    /// Where clients find the server.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Where scrapers find its metrics, if it has any.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.page.as_ref().map(Page::address)
    }

    /// What it lends, to whom.
    pub fn stats(&self) -> ServerStats {
        self.hall.desk.ledger.stats(|_| true)
    }

    /// Takes over from `config` what can change while the server runs: how much may be lent, and
    /// the certificates, which connections made from then on go by. Returns how many slabs were
    /// asked back. An error changes nothing.
    pub fn reload(&self, config: &Config) -> Result<u64, ServerError> {
        config.check()?;
        self.hall
            .change_identity(Identity::load(config.tls.clone())?);
        Ok(self.set_memory(config.memory_bytes))
    }

    /// Changes how much may be lent. Where more is leased, clients are asked to vacate slabs;
    /// returns how many were asked for.
    pub fn set_memory(&self, bytes: u64) -> u64 {
        let asked = self.hall.desk.ledger.set_memory(bytes);
        self.hall.desk.metrics.vacate_requests.inc_by(asked);
        asked
    }

    /// Takes no more clients, tells those who are there, and ends. All slabs end with it.
    pub fn stop(mut self) {
        self.shut_down();
    }

    fn shut_down(&mut self) {
        // A level, not an edge: nobody reads it, so every thread that polls sees it.
        let _ = self.stop.write(1);
        self.hall.desk.ledger.spare.close();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        self.page = None;
        self.hall.lobby.clear();
        self.hall.callers.clear();
        self.hall.desk.ledger.close();
        // Each control connection's thread ends once it has passed the word on; those whose client
        // does not listen are cut off.
        self.hall.await_threads(STOP_TIMEOUT / 5, true);
        self.hall.desk.ledger.end_all();
        self.hall.await_threads(STOP_TIMEOUT, false);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.threads.is_empty() {
            self.shut_down();
        }
    }
}

fn listen(address: SocketAddr, what: &'static str) -> Result<TcpListener, ServerError> {
    TcpListener::bind(address).map_err(|source| ServerError::Listen {
        address,
        what,
        source,
    })
}

fn local_address(listener: &TcpListener) -> Result<SocketAddr, ServerError> {
    listener.local_addr().map_err(|source| ServerError::System {
        what: "the address listened on",
        source,
    })
}

/// Waits for `fd` or for the end; false at the end.
fn wait_or_stop(fd: Option<&TcpListener>, stop: &EventFd, timeout: PollTimeout) -> bool {
    let end = PollFd::new(stop.as_fd(), PollFlags::POLLIN);
    let mut fds = vec![end];
    fds.extend(fd.map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)));
    // An interrupted wait ends like one that timed out: callers wait again.
    let _ = poll(&mut fds, timeout);
    fds[0].any() != Some(true)
}

/// Takes connections in until the server is stopped.
fn accept(hall: &Arc<Hall>, listener: &TcpListener, stop: &EventFd) {
    if let Err(error) = listener.set_nonblocking(true) {
        tracing::error!(%error, "the listening socket is of no use");
        return;
    }
    while wait_or_stop(Some(listener), stop, PollTimeout::NONE) {
        match listener.accept() {
            Ok((socket, from)) => hall.take_in(socket, from),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                // Out of descriptors, most likely: others have to end before it gets better.
                static REFUSED: Seldom = Seldom::new();
                if REFUSED.is_due() {
                    tracing::warn!(%error, "a connection could not be accepted");
                }
                let pause = PollTimeout::from(100u8);
                if !wait_or_stop(None, stop, pause) {
                    return;
                }
            }
        }
    }
}

/// Ends the leases that have run out, and looks whether certificates were renewed and devices removed.
fn keep_time(hall: &Hall, stop: &EventFd) {
    let tick = hall.config.lease_timeout / 8;
    let tick = tick.clamp(Duration::from_millis(10), Duration::from_secs(1));
    let tick = PollTimeout::try_from(tick).unwrap_or(PollTimeout::MAX);
    let mut looked_at = Instant::now();
    let mut was_awake = BootTime::now();
    while wait_or_stop(None, stop, tick) {
        end_leases(&hall.desk, &mut was_awake, BootTime::now());
        if looked_at.elapsed() >= LOOK_AROUND {
            looked_at = Instant::now();
            hall.refresh_identity();
            for holder in hall.desk.ledger.withdraw_verbs() {
                tracing::warn!(%holder, "its RDMA device is being removed: its client connects anew");
            }
        }
        hall.desk.ledger.look_at_spare();
    }
}

/// Ends the leases that have run out at `now`. There is one such moment in a round: what stands still after it, or
/// takes its time, is a gap for the next round, and ends no lease meanwhile. Where clients were heard in the gap,
/// their leases last longer than they have to.
fn end_leases(desk: &Desk, was_awake: &mut BootTime, now: BootTime) {
    let gap = now.since(*was_awake);
    *was_awake = now;
    if gap >= STANDSTILL.min(desk.ledger.terms.lease_timeout / 2) {
        tracing::warn!(?gap, "this server stood still: leases last so much longer");
        desk.ledger.stood_still(gap);
    }
    for (holder, slabs) in desk.ledger.expire(now) {
        desk.metrics.expired_sessions.inc();
        desk.metrics.expired_slabs.inc_by(slabs);
        tracing::warn!(%holder, slabs, "a lease ran out: its slabs are freed");
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use outram_wire::server::{ClientName, SessionSecret};
    use outram_wire::units::VmId;
    use outram_wire::verbs::Choice;

    use super::*;
    use crate::ledger::{Caller, Wish};

    const LEASE: Duration = Duration::from_secs(3600);
    const TICK: Duration = Duration::from_secs(1);

    /// A server's desk, where one guest has a session.
    fn desk(lease_timeout: Duration) -> Desk {
        let terms = Terms {
            slab_bytes: 65536,
            lease_timeout,
            max_sessions: 1,
            max_data_connections: 1,
            client_bytes: None,
            token_life: LEASE,
            parked_disk_timeout: None,
        };
        let instance = InstanceId::random().expect("random numbers");
        let ledger = Ledger::new(instance, 65536, terms);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let address = listener.local_addr().expect("bound");
        let admitted = ledger.admit(&Caller {
            wish: Wish::Guest {
                vm: VmId(uuid::Uuid::from_u128(1)),
                arrives: false,
            },
            name: &ClientName("host".to_owned()),
            secret: SessionSecret([1; 32]),
            socket: &Arc::new(TcpStream::connect(address).expect("connected")),
            waker: &Arc::new(new_waker().expect("an eventfd")),
        });
        admitted.expect("there is room");
        Desk {
            ledger: Arc::new(ledger),
            metrics: Metrics::new(),
            rdma: Choice::Off,
        }
    }

    fn sessions(desk: &Desk) -> usize {
        desk.ledger.stats(|_| true).clients.len()
    }

    #[test]
    fn a_standstill_amid_a_round_ends_no_lease() {
        let desk = desk(LEASE);
        let mut was_awake = BootTime::now();
        // Just before it, a round began.
        let before = was_awake.after(TICK);
        end_leases(&desk, &mut was_awake, before);
        let after = before.after(10 * LEASE);
        end_leases(&desk, &mut was_awake, after);
        assert_eq!(sessions(&desk), 1);
        let mut now = after;
        while now < after.after(LEASE + 2 * TICK) {
            now = now.after(TICK);
            end_leases(&desk, &mut was_awake, now);
        }
        assert_eq!(sessions(&desk), 0, "it lasts no longer than that");
    }

    #[test]
    fn a_short_lease_outlasts_a_standstill_as_well() {
        let short = Duration::from_secs(1);
        let desk = desk(short);
        let mut was_awake = BootTime::now();
        let after = was_awake.after(STANDSTILL - TICK);
        end_leases(&desk, &mut was_awake, after);
        assert_eq!(sessions(&desk), 1);
    }
}
