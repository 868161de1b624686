//! Making connections: control with TLS and greeting, data with a token.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use outram_wire::causes::with_causes;
use outram_wire::identity::Identity;
use outram_wire::logging::Seldom;
use outram_wire::server::channel::{Channel, ChannelError, Received, prepare_socket};
use outram_wire::server::clock::BootTime;
use outram_wire::server::data::{Admission, WELCOME_BYTES, decode_welcome, encode_hello};
use outram_wire::server::{
    CONTROL_VERSIONS, ClientMessage, Hello, Purpose, Refusal, Reply, Request, ServerMessage, Token,
    Transport, Welcome,
};
use outram_wire::tls::{self, Kind};
use outram_wire::verbs::{Choice, VerbsError};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;

use super::verbs::Verbs;
use super::{DataConn, RemoteConfig, RemoteError, ServerAddress, Timing};

/// After so long without an answer from the server's machine the kernel gives a connection up.
const DEAD_AFTER: Duration = Duration::from_secs(15);

/// Knows how to reach one server.
#[derive(Clone)]
pub(super) struct Dialer {
    pub(super) address: ServerAddress,
    pub(super) timing: Timing,
    identity: Arc<Identity<ClientConfig>>,
    name: ServerName<'static>,
    rdma: Choice,
    known: Arc<Mutex<Known>>,
}

/// Where the server is.
#[derive(Clone, Debug, Default)]
struct Known {
    /// Its addresses, as its name was last resolved, the one that answered last first.
    addresses: Vec<SocketAddr>,
    /// Whoever answered there last may have been another.
    is_in_doubt: bool,
}

/// A control connection that was greeted.
pub(super) struct Greeted {
    pub(super) channel: Channel,
    pub(super) welcome: Welcome,
    /// When the greeting was sent: the lease runs from then, or later.
    pub(super) asked_at: BootTime,
    /// Our address as the server sees it.
    pub(super) local: Option<IpAddr>,
    /// RDMA, where data is to go over it.
    pub(super) verbs: Option<Verbs>,
}

impl Dialer {
    pub(super) fn new(config: &RemoteConfig, server: usize) -> Result<Self, RemoteError> {
        let address = config.addresses.get(server);
        let address = address.ok_or(RemoteError::NoSuchServer(server))?.clone();
        let name = ServerName::try_from(address.host().to_owned()).map_err(|error| {
            RemoteError::Resolve {
                server: address.clone(),
                source: io::Error::new(io::ErrorKind::InvalidInput, error),
            }
        })?;
        Ok(Self {
            address,
            timing: config.timing,
            identity: config.identity.clone(),
            name,
            rdma: config.rdma.clone(),
            known: Arc::default(),
        })
    }

    /// Greets the server, and settles what a guest's data goes over: without `may_use_verbs` over TCP,
    /// unless the address demands RDMA.
    pub(super) fn control(
        &self,
        purpose: &Purpose,
        may_use_verbs: bool,
    ) -> Result<Greeted, RemoteError> {
        let mut greeted = self.greet(purpose)?;
        if !matches!(purpose, Purpose::Guest { .. }) {
            return Ok(greeted);
        }
        match self.verbs(&greeted, may_use_verbs) {
            Ok(verbs) => {
                greeted.verbs = verbs;
                Ok(greeted)
            }
            Err(error) => {
                if !greeted.welcome.resumed {
                    // Nothing is to stay behind on the server.
                    let _ = self.say_goodbye(&mut greeted.channel, 0);
                }
                Err(error)
            }
        }
    }

    /// Connects, shakes hands under the identity as its files are now, and says hello.
    pub(super) fn greet(&self, purpose: &Purpose) -> Result<Greeted, RemoteError> {
        super::refresh(&self.identity);
        let identity = self.identity.current()?;
        let (socket, deadline) = self.reach()?;
        let greeted = self.say_hello(socket, deadline, identity, purpose);
        let is_the_server = matches!(&greeted, Ok(_) | Err(RemoteError::Refused { .. }));
        self.known().is_in_doubt = !is_the_server;
        greeted
    }

    fn say_hello(
        &self,
        socket: TcpStream,
        deadline: Instant,
        identity: Arc<ClientConfig>,
        purpose: &Purpose,
    ) -> Result<Greeted, RemoteError> {
        let deadline = deadline + self.timing.patience;
        let local = socket.local_addr();
        let mut channel = Channel::connect(socket, identity, self.name.clone(), deadline)
            .map_err(|source| self.control_error(source))?;
        tls::peer_name(channel.peer_certificates(), Kind::Server)?;
        let (version_min, version_max) = CONTROL_VERSIONS.into_inner();
        let hello = ClientMessage::Hello(Hello {
            version_min,
            version_max,
            purpose: purpose.clone(),
        });
        let asked_at = BootTime::now();
        let sent = channel.send(&hello, deadline);
        sent.map_err(|source| self.control_error(source))?;
        // The server may be fencing off our former connections, which takes it a moment.
        let deadline = deadline + self.timing.answer;
        match self.receive(&mut channel, deadline)? {
            ServerMessage::Welcome(welcome) => {
                self.check_welcome(&welcome)?;
                Ok(Greeted {
                    channel,
                    welcome,
                    asked_at,
                    local: local.ok().map(|local| local.ip()),
                    verbs: None,
                })
            }
            ServerMessage::Refused(refusal) => Err(self.refused(refusal)),
            ServerMessage::Closing => Err(self.refused(Refusal::Closing)),
            other => Err(self.protocol(format!("{other:?} instead of a welcome"))),
        }
    }

    /// RDMA, where both ends can and the address does not say TCP; an error only where it says RDMA.
    fn verbs(&self, greeted: &Greeted, may_use: bool) -> Result<Option<Verbs>, RemoteError> {
        let welcome = &greeted.welcome;
        let is_demanded = match self.address.transport() {
            Transport::Tcp => return Ok(None),
            Transport::Auto if !may_use || !welcome.verbs => return Ok(None),
            Transport::Auto => false,
            Transport::Rdma => true,
        };
        let opened = match (welcome.verbs, greeted.local) {
            (true, Some(local)) => Verbs::open(&self.rdma, local, welcome.slab_bytes),
            (true, None) => {
                let why = "the address that the server is reached from is not known";
                Err(VerbsError::NoPort(why.to_owned()))
            }
            (false, _) => {
                let why = "the server offers none to this host; its log says why";
                Err(VerbsError::NoPort(why.to_owned()))
            }
        };
        match opened {
            Ok(verbs) => Ok(Some(verbs)),
            Err(source) if is_demanded => Err(self.verbs_error(source)),
            Err(error) => {
                tracing::info!(server = %self.address, "pages go over TCP: {}", with_causes(&error));
                Ok(None)
            }
        }
    }

    /// Whether there is a port that RDMA could go over, and the address leaves the choice.
    pub(super) fn might_use_verbs(&self, local: Option<IpAddr>) -> bool {
        self.address.transport() == Transport::Auto
            && local.is_some_and(|local| self.rdma.port(local).is_ok())
    }

    fn check_welcome(&self, welcome: &Welcome) -> Result<(), RemoteError> {
        if !CONTROL_VERSIONS.contains(&welcome.version) {
            return Err(self.protocol(format!("version {} was chosen", welcome.version)));
        }
        let page = outram_wire::units::PAGE_SIZE as u64;
        let size = welcome.slab_bytes;
        if size == 0 || !size.is_multiple_of(page) || u32::try_from(size).is_err() {
            return Err(self.protocol(format!("slabs of {size} bytes")));
        }
        if welcome.lease_timeout_ms == 0 {
            return Err(self.protocol("a lease without time".to_owned()));
        }
        Ok(())
    }

    /// One message, before anything else is in flight.
    pub(super) fn receive(
        &self,
        channel: &mut Channel,
        deadline: Instant,
    ) -> Result<ServerMessage, RemoteError> {
        match channel.receive(deadline, None) {
            Ok(Received::Message(message)) => Ok(message),
            Ok(_) => Err(self.control_error(ChannelError::TimedOut("answer"))),
            Err(source) => Err(self.control_error(source)),
        }
    }

    /// Ends a wait for an answer in place of which a server says other things without end.
    fn check_time(&self, deadline: Instant) -> Result<(), RemoteError> {
        match Instant::now() < deadline {
            true => Ok(()),
            false => Err(self.control_error(ChannelError::TimedOut("answer"))),
        }
    }

    /// Opens a data connection with a token that was obtained over control.
    pub(super) fn data(&self, token: &Token) -> Result<DataConn, RemoteError> {
        // A token does not last as long as a name may take to be resolved, and the control connection has found
        // the server.
        let known = self.known().addresses.clone();
        let (mut socket, deadline) = self.socket(&known)?;
        let admission = self
            .say_data_hello(&mut socket, token, deadline)
            .map_err(|source| self.data_error(source))?;
        let admission = decode_welcome(&admission).map_err(|source| RemoteError::Frame {
            server: self.address.clone(),
            source,
        })?;
        match admission {
            Admission::Admitted => Ok(DataConn::new(self.address.clone(), socket)),
            Admission::TooMany => {
                Err(self.protocol("it admits no further data connection".to_owned()))
            }
        }
    }

    fn say_data_hello(
        &self,
        socket: &mut TcpStream,
        token: &Token,
        deadline: Instant,
    ) -> io::Result<[u8; WELCOME_BYTES]> {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = left.max(Duration::from_millis(1));
        socket.set_write_timeout(Some(left))?;
        socket.set_read_timeout(Some(left))?;
        socket.write_all(&encode_hello(token))?;
        let mut welcome = [0; WELCOME_BYTES];
        socket.read_exact(&mut welcome)?;
        socket.set_nonblocking(true)?;
        Ok(welcome)
    }

    /// Connects to the server where it was, or else where its name says that it is: while name servers are out of
    /// reach as well, that takes as long as many a lease has left.
    fn reach(&self) -> Result<(TcpStream, Instant), RemoteError> {
        let Known {
            addresses: tried,
            is_in_doubt,
        } = self.known().clone();
        if tried.is_empty() || is_in_doubt {
            return self.socket(&self.resolved()?);
        }
        let unreached = match self.socket(&tried) {
            Err(error) => error,
            reached => return reached,
        };
        // It may have moved.
        let mut others = self.resolved()?;
        others.retain(|address| !tried.contains(address));
        match others.is_empty() {
            true => Err(unreached),
            false => self.socket(&others),
        }
    }

    /// Connects to the first of the server's addresses that answers, which is tried first from then on; until when
    /// it may be met.
    fn socket(&self, addresses: &[SocketAddr]) -> Result<(TcpStream, Instant), RemoteError> {
        // How long a name takes to be resolved is none of the server's doing.
        let deadline = Instant::now() + self.timing.connect;
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for (tried, address) in addresses.iter().enumerate() {
            // One that swallows what it is sent leaves the others their part.
            let left = deadline.saturating_duration_since(Instant::now());
            let part = left / (addresses.len() - tried) as u32;
            if part.is_zero() {
                last = io::ErrorKind::TimedOut.into();
                break;
            }
            let connected = TcpStream::connect_timeout(address, part)
                .and_then(|socket| prepare_socket(&socket, DEAD_AFTER).map(|()| socket));
            match connected {
                Ok(socket) => {
                    let mut known = self.known();
                    known.addresses.sort_by_key(|known| known != address);
                    return Ok((socket, deadline));
                }
                Err(error) => last = error,
            }
        }
        Err(RemoteError::Connect {
            server: self.address.clone(),
            source: last,
        })
    }

    /// What the server's name stands for, or stood for when that could last be told: whoever tells may be gone
    /// while the server is there.
    fn resolved(&self) -> Result<Vec<SocketAddr>, RemoteError> {
        let resolved = (self.address.host(), self.address.port()).to_socket_addrs();
        let mut known = self.known();
        match resolved {
            Ok(addresses) => known.addresses = addresses.collect(),
            Err(error) if !known.addresses.is_empty() => {
                static UNRESOLVED: Seldom = Seldom::new();
                if UNRESOLVED.is_due() {
                    tracing::warn!(server = %self.address, %error, "a name is not resolved: the addresses that it had are used");
                }
            }
            Err(source) => {
                return Err(RemoteError::Resolve {
                    server: self.address.clone(),
                    source,
                });
            }
        }
        Ok(known.addresses.clone())
    }

    /// Held for moments alone.
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has `bytes` in all set aside, before anything else is asked.
    pub(super) fn reserve_first(
        &self,
        greeted: &mut Greeted,
        bytes: u64,
    ) -> Result<(), RemoteError> {
        let deadline = Instant::now() + self.timing.answer + self.timing.patience;
        let message = ClientMessage::Request {
            id: 0,
            request: Request::Reserve { bytes },
        };
        let sent = greeted.channel.send(&message, deadline);
        sent.map_err(|source| self.control_error(source))?;
        loop {
            match self.receive(&mut greeted.channel, deadline)? {
                ServerMessage::Reply { id: 0, reply } => {
                    return match reply {
                        Reply::Reserved { bytes } => {
                            greeted.welcome.reserved_bytes = bytes;
                            Ok(())
                        }
                        Reply::Refused(refusal) => Err(self.refused(refusal)),
                        other => Err(self.protocol(format!("{other:?} to a reservation"))),
                    };
                }
                ServerMessage::Vacate { .. } | ServerMessage::Closing => {
                    self.check_time(deadline)?;
                }
                other => return Err(self.protocol(format!("{other:?} instead of a reservation"))),
            }
        }
    }

    /// Gives everything back, and waits for the server's word that it has it.
    pub(super) fn say_goodbye(&self, channel: &mut Channel, id: u64) -> Result<(), RemoteError> {
        let deadline = Instant::now() + self.timing.answer;
        let message = ClientMessage::Request {
            id,
            request: Request::Goodbye,
        };
        let sent = channel.send(&message, deadline);
        sent.map_err(|source| self.control_error(source))?;
        loop {
            match self.receive(channel, deadline)? {
                ServerMessage::Reply { id: of, reply } if of == id => {
                    return match reply {
                        Reply::Done | Reply::Refused(Refusal::SessionEnded) => Ok(()),
                        Reply::Refused(refusal) => Err(self.refused(refusal)),
                        other => Err(self.protocol(format!("{other:?} to a goodbye"))),
                    };
                }
                // Answers to what was asked before are of no interest any more.
                _ => self.check_time(deadline)?,
            }
        }
    }

    pub(super) fn refused(&self, refusal: Refusal) -> RemoteError {
        RemoteError::Refused {
            server: self.address.clone(),
            refusal,
        }
    }

    pub(super) fn control_error(&self, source: ChannelError) -> RemoteError {
        RemoteError::Control {
            server: self.address.clone(),
            source,
        }
    }

    pub(super) fn verbs_error(&self, source: VerbsError) -> RemoteError {
        RemoteError::Verbs {
            server: self.address.clone(),
            source,
        }
    }

    pub(super) fn data_error(&self, source: io::Error) -> RemoteError {
        RemoteError::Data {
            server: self.address.clone(),
            source,
        }
    }

    pub(super) fn protocol(&self, what: String) -> RemoteError {
        RemoteError::Protocol {
            server: self.address.clone(),
            what,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::remote::test_server::{self, Pki};

    /// Machines with the same port: one that the name 'localhost' stands for, one that it stood for once.
    struct Machines {
        dialer: Dialer,
        named: TcpListener,
        former: TcpListener,
        _pki: Pki,
    }

    impl Machines {
        fn new() -> Self {
            let (named, former) = (0..100)
                .find_map(|_| {
                    let named = TcpListener::bind("127.0.0.1:0").ok()?;
                    let port = named.local_addr().ok()?.port();
                    let former = TcpListener::bind(("127.0.0.2", port)).ok()?;
                    Some((named, former))
                })
                .expect("a port that both have");
            let pki = Pki::new();
            let address = named.local_addr().expect("bound");
            let mut config = test_server::config(address, pki.client.clone());
            let name = format!("localhost:{}", address.port());
            config.addresses = vec![name.parse().expect("an address")];
            let dialer = Dialer::new(&config, 0).expect("a server");
            dialer.known().addresses = vec![former.local_addr().expect("bound")];
            Self {
                dialer,
                named,
                former,
                _pki: pki,
            }
        }

        fn reached(&self) -> SocketAddr {
            let (socket, _) = self.dialer.reach().expect("somebody listens");
            socket.peer_addr().expect("connected")
        }
    }

    #[test]
    fn a_server_is_looked_for_where_it_was_before_its_name_is_resolved() {
        let machines = Machines::new();
        let former = machines.former.local_addr().expect("bound");
        assert_eq!(machines.reached(), former);
        assert_eq!(machines.dialer.known().addresses, [former]);
    }

    #[test]
    fn a_server_that_is_not_where_it_was_is_found_by_its_name() {
        let Machines {
            dialer,
            named,
            former,
            _pki,
        } = Machines::new();
        drop(former);
        let (socket, _) = dialer.reach().expect("it is there");
        let named = named.local_addr().expect("bound");
        assert_eq!(socket.peer_addr().expect("connected"), named);
        assert_eq!(dialer.known().addresses.first(), Some(&named));
    }

    #[test]
    fn where_another_answers_the_name_is_resolved_next_time() {
        let machines = Machines::new();
        let (purpose, former) = (Purpose::Observe, &machines.former);
        std::thread::scope(|scope| {
            // It says nothing that a server would.
            scope.spawn(|| former.accept().map(drop));
            assert!(machines.dialer.greet(&purpose).is_err());
            // Whoever waits there still waits no more.
            drop(former.local_addr().map(TcpStream::connect));
        });
        assert_eq!(
            machines.reached(),
            machines.named.local_addr().expect("bound")
        );
    }
}
