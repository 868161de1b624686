//! A client that speaks the protocol plainly, request by request, and can also break it.
#![allow(dead_code, reason = "each test program uses its own part")]
#![allow(unreachable_pub, reason = "several test programs share it")]

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use outram_memserver::{Config, Server};
use outram_wire::pki::{self, CERTIFICATE_DAYS, Issued, Order};
use outram_wire::server::channel::{Channel, ChannelError, Received};
use outram_wire::server::data::{self, Op, REPLY_BYTES, ReplyHeader, WELCOME_BYTES};
use outram_wire::server::{
    ClientMessage, Extent, Hello, Purpose, Refusal, Reply, Request, ServerMessage, SessionSecret,
    SlabId, Token, VERBS_VERSION, Welcome,
};
use outram_wire::tls::{self, Kind};
use outram_wire::units::VmId;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};

/// Slabs of the tests: small, so that many fit.
pub const SLAB: u64 = 1 << 20;

/// Long enough for a loaded machine, or one that stands still for a while; only what is broken takes so long.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A CA with a server's and a client's certificate.
pub struct Pki {
    pub dir: tempfile::TempDir,
    pub server: Issued,
    pub client: Issued,
}

impl Pki {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        pki::init(dir.path()).expect("a CA");
        let server = issue(dir.path(), Kind::Server, "server");
        let client = issue(dir.path(), Kind::Client, "client");
        Self {
            dir,
            server,
            client,
        }
    }

    pub fn issue(&self, kind: Kind, name: &str) -> Issued {
        issue(self.dir.path(), kind, name)
    }
}

fn issue(dir: &Path, kind: Kind, name: &str) -> Issued {
    let order = Order {
        kind,
        name,
        addresses: &["127.0.0.1".to_owned(), "localhost".to_owned()],
        days: CERTIFICATE_DAYS,
    };
    pki::issue(dir, &order).expect("a certificate")
}

/// A server in this process that lends `slabs` slabs.
pub fn server(pki: &Pki, slabs: u64, change: impl FnOnce(&mut Config)) -> Server {
    let listen = "127.0.0.1:0".parse().expect("an address");
    let mut config = Config::new(listen, slabs * SLAB, pki.server.clone().into());
    config.slab_bytes = SLAB;
    change(&mut config);
    Server::start(config).expect("the server starts")
}

/// A control connection.
pub struct Client {
    pub address: SocketAddr,
    pub channel: Channel,
    pub welcome: Welcome,
    /// What came unasked.
    pub unasked: Vec<ServerMessage>,
    next_id: u64,
}

pub fn vm(number: u128) -> VmId {
    VmId(uuid::Uuid::from_u128(number))
}

/// Opens TLS alone.
pub fn channel(address: SocketAddr, identity: &Issued) -> Result<Channel, ChannelError> {
    let config = tls::client_config(&identity.clone().into()).expect("a good identity");
    let socket = TcpStream::connect(address).expect("the server listens");
    let name = ServerName::try_from("127.0.0.1").expect("an address");
    Channel::connect(socket, config, name, Instant::now() + PATIENCE)
}

/// Opens TLS alone, believing a server of the CA of `trusted`, whatever CA the client is of.
pub fn channel_under(
    address: SocketAddr,
    client: &Issued,
    trusted: &Issued,
) -> Result<Channel, ChannelError> {
    let read = |path: &Path| CertificateDer::from_pem_file(path).expect("a certificate");
    let mut roots = RootCertStore::empty();
    roots.add(read(&trusted.ca)).expect("a CA");
    let key = PrivateKeyDer::from_pem_file(&client.key).expect("a key");
    let config =
        ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3")
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![read(&client.cert)], key)
            .expect("they fit");
    let socket = TcpStream::connect(address).expect("the server listens");
    let name = ServerName::try_from("127.0.0.1").expect("an address");
    Channel::connect(socket, config.into(), name, Instant::now() + PATIENCE)
}

pub fn receive(channel: &mut Channel) -> Result<ServerMessage, ChannelError> {
    match channel.receive(Instant::now() + PATIENCE, None)? {
        Received::Message(message) => Ok(message),
        other => panic!("{other:?} instead of a message"),
    }
}

pub fn hello(vm: VmId, secret: u8) -> ClientMessage {
    hello_for(guest(vm, secret, false))
}

fn guest(vm: VmId, secret: u8, arrives: bool) -> Purpose {
    Purpose::Guest {
        vm,
        secret: SessionSecret([secret; 32]),
        arrives,
    }
}

fn hello_for(purpose: Purpose) -> ClientMessage {
    hello_at(1, purpose)
}

fn hello_at(version: u32, purpose: Purpose) -> ClientMessage {
    ClientMessage::Hello(Hello {
        version_min: version,
        version_max: version,
        purpose,
    })
}

impl Client {
    pub fn connect(
        server: SocketAddr,
        identity: &Issued,
        vm: VmId,
        secret: u8,
    ) -> Result<Self, Refusal> {
        Self::greet(server, identity, &hello(vm, secret))
    }

    /// Connects as the destination of a migration.
    pub fn arrive(
        server: SocketAddr,
        identity: &Issued,
        vm: VmId,
        secret: u8,
    ) -> Result<Self, Refusal> {
        Self::for_purpose(server, identity, guest(vm, secret, true))
    }

    /// Connects as one that knows of RDMA.
    pub fn with_verbs(
        server: SocketAddr,
        identity: &Issued,
        vm: VmId,
        secret: u8,
    ) -> Result<Self, Refusal> {
        let hello = hello_at(VERBS_VERSION, guest(vm, secret, false));
        Self::greet(server, identity, &hello)
    }

    /// Connects for any purpose.
    pub fn for_purpose(
        server: SocketAddr,
        identity: &Issued,
        purpose: Purpose,
    ) -> Result<Self, Refusal> {
        Self::greet(server, identity, &hello_for(purpose))
    }

    fn greet(
        server: SocketAddr,
        identity: &Issued,
        hello: &ClientMessage,
    ) -> Result<Self, Refusal> {
        let mut channel = channel(server, identity).expect("TLS stands");
        let sent = channel.send(hello, Instant::now() + PATIENCE);
        sent.expect("hello is taken");
        match receive(&mut channel).expect("an answer") {
            ServerMessage::Welcome(welcome) => Ok(Self {
                address: server,
                channel,
                welcome,
                unasked: Vec::new(),
                next_id: 1,
            }),
            ServerMessage::Refused(refusal) => Err(refusal),
            other => panic!("{other:?} instead of a welcome"),
        }
    }

    /// Connects and reserves `slabs` slabs.
    pub fn with_slabs(server: &Server, pki: &Pki, number: u128, slabs: u64) -> Self {
        let address = server.local_addr();
        let mut client = Self::connect(address, &pki.client, vm(number), 1).expect("admitted");
        let bytes = slabs * SLAB;
        let reply = client.ask(Request::Reserve { bytes });
        assert_eq!(reply, Reply::Reserved { bytes });
        client
    }

    pub fn try_ask(&mut self, request: Request) -> Result<Reply, ChannelError> {
        let id = self.next_id;
        self.next_id += 1;
        let deadline = Instant::now() + PATIENCE;
        let message = ClientMessage::Request { id, request };
        self.channel.send(&message, deadline)?;
        loop {
            match receive(&mut self.channel)? {
                ServerMessage::Reply { id: of, reply } => {
                    assert_eq!(of, id);
                    return Ok(reply);
                }
                other => self.unasked.push(other),
            }
        }
    }

    pub fn ask(&mut self, request: Request) -> Reply {
        self.try_ask(request).expect("an answer")
    }

    pub fn lease(&mut self) -> SlabId {
        match self.ask(Request::Lease) {
            Reply::Leased { slab } => slab,
            other => panic!("{other:?} instead of a slab"),
        }
    }

    pub fn release(&mut self, slab: SlabId) {
        assert_eq!(self.ask(Request::Release { slab }), Reply::Done);
    }

    pub fn token(&mut self) -> Token {
        match self.ask(Request::DataToken) {
            Reply::DataToken { token } => token,
            other => panic!("{other:?} instead of a token"),
        }
    }

    pub fn data(&mut self) -> Data {
        let token = self.token();
        Data::connect(self.address, &token).expect("admitted")
    }
}

/// A data connection that blocks.
pub struct Data {
    pub socket: TcpStream,
    next_id: u64,
}

impl Data {
    pub fn connect(server: SocketAddr, token: &Token) -> io::Result<Self> {
        let mut socket = TcpStream::connect(server)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.write_all(&data::encode_hello(token))?;
        let mut welcome = [0; WELCOME_BYTES];
        socket.read_exact(&mut welcome)?;
        match data::decode_welcome(&welcome) {
            Ok(data::Admission::Admitted) => Ok(Self { socket, next_id: 1 }),
            other => panic!("{other:?} instead of an admission"),
        }
    }

    pub fn send(&mut self, op: Op, extents: &[Extent], payload: &[u8]) -> io::Result<u64> {
        let id = self.next_id;
        self.next_id += 1;
        let mut frame = Vec::new();
        data::encode_request(op, id, extents, &mut frame).expect("a legal request");
        frame.extend_from_slice(payload);
        self.socket.write_all(&frame)?;
        Ok(id)
    }

    pub fn reply(&mut self) -> io::Result<(ReplyHeader, Vec<u8>)> {
        let mut head = [0; REPLY_BYTES];
        self.socket.read_exact(&mut head)?;
        let header = data::decode_reply(&head).expect("a reply");
        let mut payload = vec![0; header.payload_bytes as usize];
        self.socket.read_exact(&mut payload)?;
        Ok((header, payload))
    }

    pub fn read(&mut self, slab: SlabId, offset: u32, length: u32) -> Vec<u8> {
        self.send(Op::Read, &[extent(slab, offset, length)], &[])
            .expect("sent");
        let (header, payload) = self.reply().expect("answered");
        assert_eq!(header.status, data::Status::Done);
        payload
    }

    pub fn write(&mut self, slab: SlabId, offset: u32, bytes: &[u8]) {
        self.send(
            Op::Write,
            &[extent(slab, offset, bytes.len() as u32)],
            bytes,
        )
        .expect("sent");
        let (header, _) = self.reply().expect("answered");
        assert_eq!(header.status, data::Status::Done);
    }

    /// Whether the server has ended the connection.
    pub fn is_over(&mut self) -> bool {
        is_over(&mut self.socket)
    }
}

/// Waits for the end of a connection; whatever comes before it is passed over.
pub fn is_over(socket: &mut TcpStream) -> bool {
    let mut bytes = [0; 4096];
    loop {
        match socket.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == io::ErrorKind::ConnectionReset,
        }
    }
}

pub fn extent(slab: SlabId, offset: u32, length: u32) -> Extent {
    Extent {
        slab,
        offset,
        length,
    }
}

/// Waits until `done` says so.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The server's metrics as text.
pub fn scrape(address: SocketAddr) -> String {
    // A scraper that stands still for a while is left without an answer.
    let page = (0..5).find_map(|_| scrape_once(address));
    page.expect("answered")
}

fn scrape_once(address: SocketAddr) -> Option<String> {
    let mut socket = TcpStream::connect(address).expect("the page is served");
    let request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut page = String::new();
    let sent = socket.write_all(request);
    let answered = sent.and_then(|()| socket.read_to_string(&mut page));
    matches!(answered, Ok(1..)).then_some(page)
}

/// The value of one line of the metrics.
pub fn metric(page: &str, series: &str) -> u64 {
    let line = page.lines().find_map(|line| line.strip_prefix(series));
    let value = line.and_then(|rest| rest.trim().parse().ok());
    value.unwrap_or_else(|| panic!("no '{series}' in:\n{page}"))
}
