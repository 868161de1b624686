//! A server as a whole: its threads, and their orderly end.
//!
//! One thread accepts, one ends leases, one answers scrapers, and each connection has its own.
//! Threads are bounded by the lobby's limit, by the sessions' and by the data connections' of each.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use outram_wire::server::channel::{Channel, ChannelError, EventFd, new_waker, prepare_socket};
use outram_wire::server::data::{self, Admission};
use outram_wire::server::{InstanceId, ServerStats, TLS_FIRST_BYTE};
use outram_wire::tls::{self, Kind, TlsError};
use rustls::ServerConfig;

use crate::config::{Config, ConfigError};
use crate::control::{self, Desk};
use crate::data::{DataEnd, STALL_TIMEOUT, Service};
use crate::ledger::{Ledger, Terms};
use crate::lobby::{Lobby, Place};
use crate::metrics::{Connection, Metrics, Page, Stranger};

/// What a thread of a connection needs at most: TLS is the deepest.
const STACK_BYTES: usize = 512 * 1024;
/// How long a stopping server waits for its threads.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// After so long without an answer from a client's machine the kernel gives a connection up.
const DEAD_AFTER: Duration = Duration::from_secs(60);

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

/// What every connection's thread shares.
struct Hall {
    desk: Desk,
    tls: Arc<ServerConfig>,
    lobby: Lobby,
    config: Config,
    controls: AtomicUsize,
    threads: Mutex<usize>,
    thread_ended: Condvar,
}

impl Server {
    /// Checks the configuration, listens, and serves from then on.
    pub fn start(config: Config) -> Result<Server, ServerError> {
        config.check()?;
        let tls = tls::server_config(&config.tls)?;
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
            token_life: config.token_life,
        };
        let ledger = Ledger::new(instance, config.memory_bytes, terms).map_err(no_random)?;
        let hall = Arc::new(Hall {
            desk: Desk {
                ledger: Arc::new(ledger),
                metrics: Metrics::new(),
            },
            tls,
            lobby: Lobby::new(config.max_strangers),
            config,
            controls: AtomicUsize::new(0),
            threads: Mutex::new(0),
            thread_ended: Condvar::new(),
        });
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
            let ledger = hall.desk.ledger.clone();
            let metrics = hall.desk.metrics.clone();
            let page = Page::serve(listener, metrics, move || ledger.stats(|_| true));
            server.page = Some(page.map_err(thread_error)?);
        }
        let (accepting, stop) = (hall.clone(), server.stop.clone());
        let builder = thread::Builder::new().name("accept".to_owned());
        let thread = builder.spawn(move || accept(&accepting, &listener, &stop));
        server.threads.push(thread.map_err(thread_error)?);
        let stop = server.stop.clone();
        let builder = thread::Builder::new().name("leases".to_owned());
        let thread = builder.spawn(move || end_leases(&hall, &stop));
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
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        self.page = None;
        self.hall.lobby.clear();
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
            Ok((socket, from)) => take_in(hall, socket, from),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                // Out of descriptors, most likely: others have to end before it gets better.
                tracing::warn!(%error, "a connection could not be accepted");
                let pause = PollTimeout::from(100u8);
                if !wait_or_stop(None, stop, pause) {
                    return;
                }
            }
        }
    }
}

fn take_in(hall: &Arc<Hall>, socket: TcpStream, from: SocketAddr) {
    let prepared = prepare_socket(&socket, DEAD_AFTER);
    // On Linux an accepted socket blocks whatever the listening one does; said for certainty.
    if let Err(error) = prepared.and_then(|()| socket.set_nonblocking(false)) {
        tracing::debug!(%from, %error, "a connection ended at once");
        return;
    }
    let socket = Arc::new(socket);
    let (place, crowded) = hall.lobby.enter(from.ip(), socket.clone());
    if crowded {
        hall.desk.metrics.count_stranger(Stranger::Unidentified);
    }
    hall.count_thread();
    let for_thread = hall.clone();
    let spawned = thread::Builder::new()
        .name("connection".to_owned())
        .stack_size(STACK_BYTES)
        .spawn(move || {
            for_thread.meet(&socket, from, place);
            // Threads that hold the socket for others may outlive this one.
            let _ = socket.shutdown(Shutdown::Both);
            for_thread.uncount_thread();
        });
    if let Err(error) = spawned {
        hall.uncount_thread();
        hall.desk.metrics.count_stranger(Stranger::Limit);
        tracing::warn!(%from, %error, "no thread for a connection");
    }
}

/// Ends the leases that have run out.
fn end_leases(hall: &Hall, stop: &EventFd) {
    let tick = hall.config.lease_timeout / 8;
    let tick = tick.clamp(Duration::from_millis(10), Duration::from_secs(1));
    let tick = PollTimeout::try_from(tick).unwrap_or(PollTimeout::MAX);
    while wait_or_stop(None, stop, tick) {
        for (vm, slabs) in hall.desk.ledger.expire() {
            hall.desk.metrics.expired_sessions.inc();
            hall.desk.metrics.expired_slabs.inc_by(slabs);
            tracing::warn!(%vm, slabs, "a guest's lease ran out: its slabs are freed");
        }
    }
}

impl Hall {
    /// Finds out what a connection is, and serves it.
    fn meet(&self, socket: &Arc<TcpStream>, from: SocketAddr, place: Place) {
        let deadline = Instant::now() + self.config.handshake_timeout;
        let mut first = [0];
        let peeked = socket
            .set_read_timeout(Some(self.config.handshake_timeout))
            .and_then(|()| socket.peek(&mut first));
        match peeked {
            Ok(1) if first[0] == TLS_FIRST_BYTE => self.meet_control(socket, from, place, deadline),
            Ok(1) if first[0] == data::MAGIC[0] => self.meet_data(socket, from, place, deadline),
            Ok(1) => self.turn_away(
                from,
                Stranger::Protocol,
                &"neither TLS nor a data connection",
            ),
            // A port scan, or a health check: nothing was said.
            Ok(_) => {}
            Err(error) => self.turn_away(from, Stranger::Unidentified, &error),
        }
    }

    fn meet_control(
        &self,
        socket: &Arc<TcpStream>,
        from: SocketAddr,
        place: Place,
        deadline: Instant,
    ) {
        let channel = match Channel::accept(socket.clone(), self.tls.clone(), deadline) {
            Ok(channel) => channel,
            Err(error) => return self.turn_away(from, reason_of(&error), &Words(&error)),
        };
        let name = match tls::peer_name(channel.peer_certificates(), Kind::Client) {
            Ok(name) => name,
            Err(error) => return self.turn_away(from, Stranger::Certificate, &Words(&error)),
        };
        drop(place);
        let most = 2 * self.config.max_guests + self.config.max_strangers;
        let _seat = match Seat::take(&self.controls, most) {
            Some(seat) => seat,
            None => return self.turn_away(from, Stranger::Limit, &"too many control connections"),
        };
        let _counted = self.desk.metrics.connected(Connection::Control);
        match control::serve(&self.desk, channel, socket, &name, deadline) {
            Ok(()) => {}
            Err(error) if control::is_breach(&error) => {
                self.desk.metrics.count_bad_frame(Connection::Control);
                tracing::warn!(%from, client = %name, "a control connection is ended: {}", Words(&error));
            }
            Err(error) => {
                tracing::debug!(%from, client = %name, "a control connection ended: {}", Words(&error));
            }
        }
    }

    fn meet_data(
        &self,
        socket: &Arc<TcpStream>,
        from: SocketAddr,
        place: Place,
        deadline: Instant,
    ) {
        let hello = match read_hello(socket, deadline) {
            Ok(hello) => hello,
            Err(error) => return self.turn_away(from, Stranger::Unidentified, &error),
        };
        let token = match data::decode_hello(&hello) {
            Ok(token) => token,
            Err(error) => return self.turn_away(from, Stranger::Protocol, &error),
        };
        let Some(session) = self.desk.ledger.redeem_token(&token) else {
            return self.turn_away(
                from,
                Stranger::Token,
                &"its token is wrong, used or too old",
            );
        };
        drop(place);
        let vm = session.vm;
        let admitted = session.admit(socket, self.config.max_data_connections);
        let admission = match admitted {
            Some(_) => Admission::Admitted,
            None => Admission::TooMany,
        };
        let welcomed = socket
            .set_write_timeout(Some(STALL_TIMEOUT))
            .and_then(|()| (&**socket).write_all(&data::encode_welcome(admission)));
        let Some(admitted) = admitted else {
            return self.turn_away(from, Stranger::Limit, &"too many data connections");
        };
        let _counted = self.desk.metrics.connected(Connection::Data);
        let served = welcomed
            .map_err(DataEnd::Io)
            .and_then(|()| Service::new(socket, &admitted, &self.desk.metrics).run());
        match served {
            Ok(()) => {}
            Err(DataEnd::Breach(error)) => {
                self.desk.metrics.count_bad_frame(Connection::Data);
                tracing::warn!(%from, %vm, %error, "a data connection is ended");
            }
            Err(DataEnd::Io(error)) => {
                tracing::debug!(%from, %vm, %error, "a data connection ended");
            }
        }
    }

    fn turn_away(&self, from: SocketAddr, reason: Stranger, words: &dyn std::fmt::Display) {
        self.desk.metrics.count_stranger(reason);
        // Anybody can cause these: no louder than debug, the metric tells how many there are.
        tracing::debug!(%from, ?reason, "a connection is turned away: {words}");
    }

    fn count_thread(&self) {
        *self.threads.lock().unwrap_or_else(PoisonError::into_inner) += 1;
    }

    fn uncount_thread(&self) {
        *self.threads.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.thread_ended.notify_all();
    }

    /// Waits until no connection has a thread; or only data connections, which end at a word from
    /// nobody but the ledger.
    fn await_threads(&self, timeout: Duration, controls_only: bool) {
        let deadline = Instant::now() + timeout;
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let busy = |threads: usize| match controls_only {
            true => self.controls.load(Ordering::Acquire) > 0,
            false => threads > 0,
        };
        while busy(*threads) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            threads = self
                .thread_ended
                .wait_timeout(threads, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// One of the control connections that may stand at a time.
struct Seat<'a>(&'a AtomicUsize);

impl<'a> Seat<'a> {
    fn take(taken: &'a AtomicUsize, most: usize) -> Option<Self> {
        let seat = Seat(taken);
        (taken.fetch_add(1, Ordering::AcqRel) < most).then_some(seat)
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Reads a data connection's hello before `deadline`, however slowly it comes.
fn read_hello(mut socket: &TcpStream, deadline: Instant) -> io::Result<[u8; data::HELLO_BYTES]> {
    let mut hello = [0; data::HELLO_BYTES];
    let mut filled = 0;
    while filled < hello.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(left))?;
        match socket.read(&mut hello[filled..])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => filled += read,
        }
    }
    Ok(hello)
}

fn reason_of(error: &ChannelError) -> Stranger {
    match error {
        ChannelError::TimedOut(_) | ChannelError::Closed | ChannelError::Io(_) => {
            Stranger::Unidentified
        }
        ChannelError::Tls(
            rustls::Error::InvalidCertificate(_)
            | rustls::Error::NoCertificatesPresented
            | rustls::Error::AlertReceived(_),
        ) => Stranger::Certificate,
        _ => Stranger::Protocol,
    }
}

/// An error with its causes, in one line.
struct Words<'a>(&'a dyn std::error::Error);

impl std::fmt::Display for Words<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(error) = source {
            write!(f, ": {error}")?;
            source = error.source();
        }
        Ok(())
    }
}
