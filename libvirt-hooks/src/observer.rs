//! Asking a memory server what it could still lend and which far-memory disks it keeps for this
//! host, and to drop one of these.
//!
//! Nothing is leased or read: the server tells an observer sizes and times of what the host's own
//! certificate uses or used last, and drops only what nobody uses. The module does not know libvirt.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use outram_wire::server::channel::{Channel, ChannelError, Received};
use outram_wire::server::{
    CONTROL_VERSIONS, ClientMessage, DiskId, DiskStats, Hello, Purpose, Refusal, Reply, Request,
    ServerAddress, ServerMessage, ServerStats,
};
use outram_wire::tls::{self, Kind, TlsError, TlsFiles};
use rustls::pki_types::ServerName;

/// How long a server may take to accept a connection, and for each answer.
const CONNECT_PATIENCE: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(5);

/// How long it may take to drop a disk: it answers once the memory of all of it is free.
const DROP_PATIENCE: Duration = Duration::from_secs(60);

/// Why a server did not tell or do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum ObserverError {
    /// This host's identity, or the server's.
    #[error(transparent)]
    Identity(#[from] TlsError),
    /// No connection.
    #[error("memory server {server} cannot be reached")]
    Connect {
        /// Which.
        server: ServerAddress,
        /// Why.
        source: io::Error,
    },
    /// The connection failed.
    #[error("memory server {server} was not understood, or did not answer")]
    Channel {
        /// Which.
        server: ServerAddress,
        /// Why.
        source: ChannelError,
    },
    /// The server refuses.
    #[error("memory server {server} refuses")]
    Refused {
        /// Which.
        server: ServerAddress,
        /// Why.
        source: Refusal,
    },
    /// The server says something else than what was asked.
    #[error("memory server {server} answered with {what}: is it the same release of Outram?")]
    Unexpected {
        /// Which.
        server: ServerAddress,
        /// What.
        what: String,
    },
}

/// A connection that only looks.
pub struct Observer {
    server: ServerAddress,
    channel: Channel,
    asked: u64,
}

impl Observer {
    /// Connects to a server.
    pub fn connect(server: &ServerAddress, files: &TlsFiles) -> Result<Self, ObserverError> {
        let tls = tls::client_config(files)?;
        let name = ServerName::try_from(server.host().to_owned());
        let name = name.map_err(|error| no_connection(server, io::Error::other(error)))?;
        let socket = dial(server).map_err(|source| no_connection(server, source))?;
        // How long its name took to be resolved is none of the server's doing.
        let channel = Channel::connect(socket, tls, name, Instant::now() + PATIENCE);
        let mut observer = Self {
            server: server.clone(),
            channel: channel.map_err(|source| ObserverError::Channel {
                server: server.clone(),
                source,
            })?,
            asked: 0,
        };
        tls::peer_name(observer.channel.peer_certificates(), Kind::Server)?;
        observer.greet()?;
        Ok(observer)
    }

    fn greet(&mut self) -> Result<(), ObserverError> {
        let (version_min, version_max) = CONTROL_VERSIONS.into_inner();
        self.send(&ClientMessage::Hello(Hello {
            version_min,
            version_max,
            purpose: Purpose::Observe,
        }))?;
        match self.receive(PATIENCE)? {
            ServerMessage::Welcome(_) => Ok(()),
            ServerMessage::Refused(refusal) => Err(self.refused(refusal)),
            other => Err(self.unexpected(&other)),
        }
    }

    /// What the server lends, and to whom of this host.
    pub fn stats(&mut self) -> Result<ServerStats, ObserverError> {
        match self.ask(Request::Stats)? {
            Reply::Stats(stats) => Ok(*stats),
            other => Err(self.unexpected(&other)),
        }
    }

    /// The disks that this host used last, in use or parked.
    pub fn disks(&mut self) -> Result<Vec<DiskStats>, ObserverError> {
        Ok(self.stats()?.disks)
    }

    /// Has a parked disk dropped, and its room given back.
    pub fn drop_disk(&mut self, disk: DiskId) -> Result<(), ObserverError> {
        match self.ask_for(Request::DropDisk { disk }, DROP_PATIENCE)? {
            Reply::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    fn ask(&mut self, request: Request) -> Result<Reply, ObserverError> {
        self.ask_for(request, PATIENCE)
    }

    fn ask_for(&mut self, request: Request, patience: Duration) -> Result<Reply, ObserverError> {
        self.asked += 1;
        let id = self.asked;
        self.send(&ClientMessage::Request { id, request })?;
        match self.receive(patience)? {
            ServerMessage::Reply { id: of, reply } if of == id => match reply {
                Reply::Refused(refusal) => Err(self.refused(refusal)),
                reply => Ok(reply),
            },
            other => Err(self.unexpected(&other)),
        }
    }

    /// When the server's certificate expires, in seconds since 1970.
    pub fn expires_unix_s(&self) -> i64 {
        tls::expiry(self.channel.peer_certificates())
    }

    fn send(&mut self, message: &ClientMessage) -> Result<(), ObserverError> {
        let sent = self.channel.send(message, Instant::now() + PATIENCE);
        sent.map_err(|source| self.failed(source))
    }

    fn receive(&mut self, patience: Duration) -> Result<ServerMessage, ObserverError> {
        match self.channel.receive(Instant::now() + patience, None) {
            Ok(Received::Message(message)) => Ok(message),
            Ok(_) => Err(self.failed(ChannelError::TimedOut("answer"))),
            Err(source) => Err(self.failed(source)),
        }
    }

    fn failed(&self, source: ChannelError) -> ObserverError {
        ObserverError::Channel {
            server: self.server.clone(),
            source,
        }
    }

    fn refused(&self, source: Refusal) -> ObserverError {
        ObserverError::Refused {
            server: self.server.clone(),
            source,
        }
    }

    fn unexpected(&self, what: &impl std::fmt::Debug) -> ObserverError {
        ObserverError::Unexpected {
            server: self.server.clone(),
            what: format!("{what:?}"),
        }
    }
}

fn no_connection(server: &ServerAddress, source: io::Error) -> ObserverError {
    ObserverError::Connect {
        server: server.clone(),
        source,
    }
}

/// Connects to the first of a server's addresses that answers.
fn dial(server: &ServerAddress) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in (server.host(), server.port()).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_PATIENCE) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(last)
}
