//! Where connections are met: found out what they are, and served by a thread each.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use outram_wire::causes::with_causes;
use outram_wire::identity::{Change, Identity, IdentityStatus};
use outram_wire::server::ClientName;
use outram_wire::server::TLS_FIRST_BYTE;
use outram_wire::server::channel::{Channel, ChannelError, prepare_socket};
use outram_wire::server::data::{self, Admission};
use outram_wire::tls::{self, Kind};
use rustls::ServerConfig;

use crate::config::Config;
use crate::control::{self, Desk};
use crate::data::{DataEnd, STALL_TIMEOUT, Service};
use crate::gathering::Gathering;
use crate::ledger::Redeemed;
use crate::lobby::{Lobby, Place};
use crate::metrics::{Connection, Stranger};

/// What a thread of a connection needs at most: TLS is the deepest.
const STACK_BYTES: usize = 512 * 1024;
/// After so long without an answer from a client's machine the kernel gives a connection up.
const DEAD_AFTER: Duration = Duration::from_secs(60);

/// Data connections of a disk at most: writes to it are gathered, each in memory of its own. Backends have four.
const MOST_OF_A_DISK: usize = 8;

/// What every connection's thread shares.
pub(crate) struct Hall {
    pub(crate) desk: Desk,
    /// Connections that have not shown who they are.
    pub(crate) lobby: Lobby<IpAddr>,
    /// Control connections with a certificate and without a session: on their way to one, or observers.
    pub(crate) callers: Lobby<ClientName>,
    pub(crate) config: Config,
    /// Where writes to disks are gathered.
    gathering: Gathering,
    identity: RwLock<Arc<Identity<ServerConfig>>>,
    /// Control connections that are known by their certificates.
    controls: AtomicUsize,
    threads: Mutex<usize>,
    thread_ended: Condvar,
}

/// A connection's thread, counted for as long as it runs.
struct Busy(Arc<Hall>);

impl Hall {
    pub(crate) fn new(desk: Desk, identity: Identity<ServerConfig>, config: Config) -> Self {
        Self {
            desk,
            lobby: Lobby::new(config.max_strangers),
            // All guests and disks may come at once, after a failure of the network.
            callers: Lobby::new(2 * config.max_guests + config.max_strangers),
            config,
            gathering: Gathering::default(),
            identity: RwLock::new(Arc::new(identity)),
            controls: AtomicUsize::new(0),
            threads: Mutex::new(0),
            thread_ended: Condvar::new(),
        }
    }

    /// Connections made from now on are met under this identity.
    pub(crate) fn change_identity(&self, identity: Identity<ServerConfig>) {
        let own = self.identity.write();
        *own.unwrap_or_else(PoisonError::into_inner) = Arc::new(identity);
    }

    /// Looks whether the certificates were renewed. Connections that stand go on under the old ones.
    pub(crate) fn refresh_identity(&self) {
        match self.identity().refresh() {
            Change::None => {}
            Change::Taken => tracing::info!("renewed certificates are taken"),
            Change::Refused(reason) => {
                tracing::error!(
                    "the changed certificates are no good, the old ones stay: {reason}"
                );
            }
        }
    }

    /// How the server's own certificates are.
    pub(crate) fn identity_status(&self) -> IdentityStatus {
        self.identity().status()
    }

    fn identity(&self) -> Arc<Identity<ServerConfig>> {
        let identity = self.identity.read();
        identity.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Gives a new connection its thread.
    pub(crate) fn take_in(self: &Arc<Self>, socket: TcpStream, from: SocketAddr) {
        let prepared = prepare_socket(&socket, DEAD_AFTER);
        // On Linux an accepted socket blocks whatever the listening one does; said for certainty.
        if let Err(error) = prepared.and_then(|()| socket.set_nonblocking(false)) {
            tracing::debug!(%from, %error, "a connection ended at once");
            return;
        }
        let socket = Arc::new(socket);
        let (place, crowded) = self.lobby.enter(from.ip(), socket.clone());
        if crowded {
            self.desk.metrics.count_stranger(Stranger::Unidentified);
        }
        let busy = Busy::count(self);
        let spawned = thread::Builder::new()
            .name("connection".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                busy.0.meet(&socket, from, place);
                // Others that hold the socket may do so for longer than this thread lives.
                let _ = socket.shutdown(Shutdown::Both);
            });
        if let Err(error) = spawned {
            self.desk.metrics.count_stranger(Stranger::Limit);
            tracing::warn!(%from, %error, "no thread for a connection");
        }
    }

    /// Finds out what a connection is, and serves it.
    fn meet(&self, socket: &Arc<TcpStream>, from: SocketAddr, place: Place<IpAddr>) {
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
        place: Place<IpAddr>,
        deadline: Instant,
    ) {
        let identity = match self.identity().current() {
            Ok(identity) => identity,
            Err(error) => return self.turn_away(from, Stranger::Certificate, &with_causes(&error)),
        };
        let channel = match Channel::accept(socket.clone(), identity, deadline) {
            Ok(channel) => channel,
            Err(error) => return self.turn_away(from, reason_of(&error), &with_causes(&error)),
        };
        let name = match tls::peer_name(channel.peer_certificates(), Kind::Client) {
            Ok(name) => name,
            Err(error) => return self.turn_away(from, Stranger::Certificate, &with_causes(&error)),
        };
        drop(place);
        let _busy = Counted::one_of(&self.controls);
        let (caller, crowded) = self.callers.enter(name.clone(), socket.clone());
        if crowded {
            self.desk.metrics.count_stranger(Stranger::Limit);
        }
        let _counted = self.desk.metrics.connected(Connection::Control);
        match control::serve(&self.desk, channel, socket, caller, &name, deadline) {
            Ok(()) => {}
            Err(error) if control::is_breach(&error) => {
                self.desk.metrics.count_bad_frame(Connection::Control);
                tracing::warn!(%from, client = %name, "a control connection is ended: {}", with_causes(&error));
            }
            Err(error) => {
                tracing::debug!(%from, client = %name, "a control connection ended: {}", with_causes(&error));
            }
        }
    }

    fn meet_data(
        &self,
        socket: &Arc<TcpStream>,
        from: SocketAddr,
        place: Place<IpAddr>,
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
        let Some(redeemed) = self.desk.ledger.redeem_token(&token) else {
            return self.turn_away(
                from,
                Stranger::Token,
                &"its token is wrong, used or too old",
            );
        };
        drop(place);
        let Redeemed {
            session,
            client,
            epoch,
        } = redeemed;
        let holder = session.holder;
        let most = match holder.is_disk() {
            true => MOST_OF_A_DISK.min(self.config.max_data_connections),
            false => self.config.max_data_connections,
        };
        let admitted = session.admit(socket, epoch, most);
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
        let gatherer = self.gathering.of(&client);
        let served = welcomed
            .map_err(DataEnd::Io)
            .and_then(|()| Service::new(socket, &admitted, &self.desk.metrics, gatherer).run());
        match served {
            Ok(()) => {}
            Err(DataEnd::Breach(error)) => {
                self.desk.metrics.count_bad_frame(Connection::Data);
                tracing::warn!(%from, %holder, %error, "a data connection is ended");
            }
            Err(DataEnd::Io(error)) => {
                tracing::debug!(%from, %holder, %error, "a data connection ended");
            }
        }
    }

    fn turn_away(&self, from: SocketAddr, reason: Stranger, words: &dyn std::fmt::Display) {
        self.desk.metrics.count_stranger(reason);
        // Anybody can cause these: no louder than debug, the metric tells how many there are.
        tracing::debug!(%from, ?reason, "a connection is turned away: {words}");
    }

    /// Waits until no connection has a thread; or only data connections, which end at a word from
    /// nobody but the ledger.
    pub(crate) fn await_threads(&self, timeout: Duration, controls_only: bool) {
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

impl Busy {
    fn count(hall: &Arc<Hall>) -> Self {
        *hall.threads.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Self(hall.clone())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let hall = &self.0;
        *hall.threads.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        hall.thread_ended.notify_all();
    }
}

/// One more for as long as it lives.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn one_of(number: &'a AtomicUsize) -> Self {
        number.fetch_add(1, Ordering::AcqRel);
        Self(number)
    }
}

impl Drop for Counted<'_> {
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
