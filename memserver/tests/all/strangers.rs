//! Whoever is not a client learns nothing and costs nobody anything; nor does a client that breaks
//! the protocol.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use outram_memserver::Server;
use outram_wire::server::channel::{Channel, ChannelError};
use outram_wire::server::control::MAX_CLIENT_FRAME_BYTES;
use outram_wire::server::data::{self, MAX_EXTENTS, Op, encode_request};
use outram_wire::server::{
    ClientMessage, Extent, Purpose, Refusal, Reply, Request, ServerMessage, SlabId, Token,
};
use outram_wire::tls::{self, Kind};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};

use crate::client::{
    self, Client, Data, PATIENCE, Pki, SLAB, channel, eventually, extent, hello, is_over, metric,
    scrape, server, vm,
};

/// A server with metrics, and a client of it that must not notice anything.
struct House {
    pki: Pki,
    server: Server,
    guest: Client,
    data: Data,
    slab: SlabId,
}

impl House {
    fn new(change: impl FnOnce(&mut outram_memserver::Config)) -> Self {
        let pki = Pki::new();
        let server = server(&pki, 8, |config| {
            config.metrics = Some("127.0.0.1:0".parse().expect("an address"));
            change(config);
        });
        let mut guest = Client::with_slabs(&server, &pki, 1, 2);
        let slab = guest.lease();
        let mut data = guest.data();
        data.write(slab, 0, &[0x5a; 4096]);
        Self {
            pki,
            server,
            guest,
            data,
            slab,
        }
    }

    fn address(&self) -> SocketAddr {
        self.server.local_addr()
    }

    fn connect(&self) -> TcpStream {
        let socket = TcpStream::connect(self.address()).expect("the server listens");
        let timeout = Some(PATIENCE);
        socket.set_read_timeout(timeout).expect("settable");
        socket
    }

    fn metric(&self, series: &str) -> u64 {
        let page = scrape(self.server.metrics_addr().expect("asked for"));
        metric(&page, series)
    }

    fn strangers(&self, reason: &str) -> u64 {
        let series = format!("outram_memserver_refused_strangers_total{{reason=\"{reason}\"}}");
        self.metric(&series)
    }

    fn bad_frames(&self, connection: &str) -> u64 {
        let series = format!("outram_memserver_bad_frames_total{{connection=\"{connection}\"}}");
        self.metric(&series)
    }

    /// The guest still has what it had, and the server is as before.
    fn stands(&mut self) {
        assert_eq!(self.data.read(self.slab, 0, 4096), [0x5a; 4096]);
        assert_eq!(self.guest.ask(Request::Renew), Reply::Done);
        let stats = self.server.stats();
        assert_eq!(stats.leased_bytes, SLAB);
        let own = stats.clients.iter().find(|client| client.vm == vm(1));
        assert_eq!(own.map(|own| own.slabs), Some(1));
    }
}

/// What servers here grant to those they do not know. It is granted to each test's own clients as well, which may
/// be slow.
const GRANTED: Duration = Duration::from_secs(15);

/// A generator good enough to make nonsense that can be made again.
struct Nonsense(u64);

impl Nonsense {
    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length)
            .map(|_| {
                self.0 ^= self.0 << 13;
                self.0 ^= self.0 >> 7;
                self.0 ^= self.0 << 17;
                self.0 as u8
            })
            .collect()
    }
}

/// TLS with whatever a test makes up; the handshake's and the first answer's error.
fn shake_hands(address: SocketAddr, config: ClientConfig) -> Option<ChannelError> {
    let socket = TcpStream::connect(address).expect("the server listens");
    let name = ServerName::try_from("127.0.0.1").expect("an address");
    let deadline = Instant::now() + PATIENCE;
    let mut channel = match Channel::connect(socket, config.into(), name, deadline) {
        Ok(channel) => channel,
        Err(error) => return Some(error),
    };
    // In TLS 1.3 the server's verdict on a client comes after the client's handshake is over.
    let _ = channel.send(&hello(vm(9), 9), deadline);
    client::receive(&mut channel).err()
}

fn unchecked(
    house: &House,
) -> rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert> {
    use rustls::pki_types::pem::PemObject;
    let mut roots = RootCertStore::empty();
    let ca = rustls::pki_types::CertificateDer::from_pem_file(&house.pki.server.ca);
    roots.add(ca.expect("a certificate")).expect("a CA");
    ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_root_certificates(roots)
}

fn with_identity(house: &House, issued: &outram_wire::pki::Issued) -> ClientConfig {
    use rustls::pki_types::pem::PemObject;
    let cert = rustls::pki_types::CertificateDer::from_pem_file(&issued.cert);
    let key = rustls::pki_types::PrivateKeyDer::from_pem_file(&issued.key);
    unchecked(house)
        .with_client_auth_cert(vec![cert.expect("one")], key.expect("one"))
        .expect("they fit")
}

#[test]
fn nobody_gets_in_without_a_client_certificate_of_the_ca() {
    let mut house = House::new(|_| {});
    let foreign = Pki::new();
    let wrong_kind = house.pki.issue(Kind::Server, "another-server");
    let nameless = unchecked(&house).with_no_client_auth();
    for config in [
        nameless,
        with_identity(&house, &foreign.client),
        with_identity(&house, &wrong_kind),
    ] {
        let error = shake_hands(house.address(), config).expect("no welcome");
        assert!(matches!(error, ChannelError::Tls(_)), "{error:?}");
    }
    eventually("all are counted", || house.strangers("certificate") == 3);
    house.stands();
}

#[test]
fn bytes_that_are_no_protocol_end_the_connection() {
    let mut house = House::new(|_| {});
    let mut nonsense = Nonsense(0x9e37_79b9_7f4a_7c15);
    for first in [0x16, b'O', b'G', 0, 0xff] {
        for length in [1, 5, 47, 48, 300, 20_000] {
            let mut socket = house.connect();
            let mut bytes = nonsense.bytes(length);
            bytes[0] = first;
            // The server may close before it has read everything.
            let _ = socket.write_all(&bytes);
            let _ = socket.shutdown(Shutdown::Write);
            assert!(is_over(&mut socket), "{first} {length}");
        }
    }
    eventually("they are counted", || house.strangers("protocol") >= 18);
    house.stands();
}

#[test]
fn a_token_opens_one_connection_and_not_for_long() {
    let mut house = House::new(|config| config.token_life = GRANTED);
    let address = house.address();
    let used = house.guest.token();
    let mut first = Data::connect(address, &used).expect("admitted");
    assert!(Data::connect(address, &used).is_err(), "used");
    assert!(Data::connect(address, &Token([0; 32])).is_err(), "wrong");
    let mut near_miss = house.guest.token();
    near_miss.0[31] ^= 1;
    assert!(Data::connect(address, &near_miss).is_err(), "nearly right");
    let late = house.guest.token();
    std::thread::sleep(GRANTED + Duration::from_millis(100));
    assert!(Data::connect(address, &late).is_err(), "too old");
    eventually("all are counted", || house.strangers("token") == 4);
    assert_eq!(first.read(house.slab, 0, 1), [0x5a]);
    house.stands();
}

#[test]
fn hellos_of_another_version_are_refused() {
    let mut house = House::new(|_| {});
    let mut frame = data::encode_hello(&house.guest.token());
    frame[8] = 2;
    let mut socket = house.connect();
    socket.write_all(&frame).expect("sent");
    assert!(is_over(&mut socket));
    let mut channel = channel(house.address(), &house.pki.client).expect("TLS stands");
    let ClientMessage::Hello(mut later) = hello(vm(2), 2) else {
        unreachable!("a hello is a hello");
    };
    (later.version_min, later.version_max) = (3, 9);
    let deadline = Instant::now() + PATIENCE;
    channel
        .send(&ClientMessage::Hello(later), deadline)
        .expect("sent");
    let answer = client::receive(&mut channel).expect("an answer");
    let version = Refusal::Version { min: 1, max: 2 };
    assert_eq!(answer, ServerMessage::Refused(version));
    house.stands();
}

/// Opens TLS by hand, as whoever wants to send frames that the channel would not.
fn raw_tls(house: &House) -> rustls::StreamOwned<rustls::ClientConnection, TcpStream> {
    let config = tls::client_config(&house.pki.client.clone().into()).expect("good");
    let name = ServerName::try_from("127.0.0.1").expect("an address");
    let tls = rustls::ClientConnection::new(config, name).expect("TLS");
    rustls::StreamOwned::new(tls, house.connect())
}

#[test]
fn control_frames_against_the_protocol_end_their_connection() {
    let mut house = House::new(|_| {});
    let mut nonsense = Nonsense(77);
    let frame = |body: &[u8]| [&(body.len() as u32).to_le_bytes(), body].concat();
    let oversized = (MAX_CLIENT_FRAME_BYTES as u32 + 1).to_le_bytes();
    let deep = [vec![b'['; 2000], vec![b']'; 2000]].concat();
    let bad = [
        u32::MAX.to_le_bytes().to_vec(),
        oversized.to_vec(),
        frame(b""),
        frame(b"{}"),
        frame(b"{\"hello\":{}}"),
        frame(b"\xff\xfe"),
        frame(&deep),
        frame(&nonsense.bytes(1000)),
    ];
    for (done, bytes) in bad.iter().enumerate() {
        let mut stream = raw_tls(&house);
        stream.write_all(bytes).expect("sent");
        stream.flush().expect("sent");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert_eq!(answer, b"", "nothing is answered to {bytes:?}");
        let counted = done as u64 + 1;
        eventually("it is counted", || house.bad_frames("control") == counted);
    }
    // A frame that ends too early is a connection that ends: not to be counted as a breach.
    let mut stream = raw_tls(&house);
    stream.write_all(&frame(b"{}")[..5]).expect("sent");
    stream.flush().expect("sent");
    stream.sock.shutdown(Shutdown::Write).expect("sent");
    assert!(is_over(&mut stream.sock));
    house.stands();
}

#[test]
fn messages_out_of_place_are_refused() {
    let mut house = House::new(|_| {});
    let deadline = Instant::now() + PATIENCE;
    let mut early = channel(house.address(), &house.pki.client).expect("TLS stands");
    let request = ClientMessage::Request {
        id: 1,
        request: Request::Lease,
    };
    early.send(&request, deadline).expect("sent");
    let answer = client::receive(&mut early).expect("an answer");
    let misplaced = |answer| matches!(answer, ServerMessage::Refused(Refusal::Unexpected { .. }));
    assert!(misplaced(answer));
    let mut twice = Client::connect(house.address(), &house.pki.client, vm(2), 2).expect("in");
    twice
        .channel
        .send(&hello(vm(3), 3), deadline)
        .expect("sent");
    assert!(misplaced(
        client::receive(&mut twice.channel).expect("an answer")
    ));
    house.stands();
}

#[test]
fn data_frames_against_the_protocol_end_their_connection() {
    let mut house = House::new(|_| {});
    let slab = house.slab;
    let legal = |op| {
        let mut frame = Vec::new();
        encode_request(op, 1, &[extent(slab, 0, 4096)], &mut frame).expect("legal");
        frame
    };
    let changed = |op, at: usize, bytes: &[u8]| {
        let mut frame = legal(op);
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frame
    };
    let bad = [
        changed(Op::Read, 0, &[3]),
        changed(Op::Read, 1, &[1]),
        changed(Op::Read, 2, &[0, 0]),
        changed(Op::Read, 2, &(MAX_EXTENTS as u16 + 1).to_le_bytes()),
        changed(Op::Read, 4, &[1, 0, 0, 0]),
        changed(Op::Write, 4, &[0xff; 4]),
        changed(Op::Write, 4, &[0; 4]),
        changed(Op::Write, 28, &[0; 4]),
        changed(Op::Read, 28, &[0xff; 4]),
    ];
    for (done, bytes) in bad.iter().enumerate() {
        let mut data = house.guest.data();
        data.socket.write_all(bytes).expect("sent");
        assert!(data.is_over(), "{bytes:?}");
        let counted = done as u64 + 1;
        eventually("it is counted", || house.bad_frames("data") == counted);
    }
    // Ends too early, at every place.
    let write = [legal(Op::Write), vec![1; 4096]].concat();
    for length in [1, 15, 16, 31, 32, 33, write.len() - 1] {
        let mut data = house.guest.data();
        data.socket.write_all(&write[..length]).expect("sent");
        data.socket.shutdown(Shutdown::Write).expect("sent");
        assert!(data.is_over(), "{length}");
    }
    // What had come of the last write is the client's own doing.
    let mut data = house.guest.data();
    data.write(slab, 0, &[0x5a; 4096]);
    house.stands();
}

#[test]
fn random_data_frames_hurt_nobody() {
    let mut house = House::new(|_| {});
    let mut nonsense = Nonsense(4711);
    for round in 0..200 {
        let mut data = house.guest.data();
        let mut bytes = nonsense.bytes(16 + round * 8);
        // Every other one begins like a request, to get further.
        if round % 2 == 0 {
            bytes[..4].copy_from_slice(&[1 + (round / 2 % 2) as u8, 0, 1, 0]);
        }
        let _ = data.socket.write_all(&bytes);
        let _ = data.socket.shutdown(Shutdown::Write);
        assert!(data.is_over());
    }
    house.stands();
    eventually("all connections have ended", || {
        let stats = house.server.stats();
        stats.clients[0].data_connections == 1
    });
}

#[test]
fn who_says_nothing_is_left_and_keeps_nobody_out() {
    let mut house = House::new(|config| {
        config.max_strangers = 8;
        config.handshake_timeout = GRANTED;
    });
    // More than there is room for, half-open in every way.
    let mut silent: Vec<TcpStream> = (0..40)
        .map(|number| {
            let mut socket = house.connect();
            let begun: &[u8] = match number % 4 {
                0 => b"",
                1 => b"\x16\x03\x01\x02",
                2 => b"OUTRDATA",
                _ => b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            };
            socket.write_all(begun).expect("sent");
            socket
        })
        .collect();
    // A client gets in nevertheless.
    let client = Client::connect(house.address(), &house.pki.client, vm(2), 2);
    assert!(client.is_ok());
    for socket in &mut silent {
        assert!(is_over(socket));
    }
    eventually("they are counted", || house.strangers("unidentified") >= 32);
    house.stands();
}

#[test]
fn who_dribbles_a_hello_is_left_as_well() {
    let mut house = House::new(|config| {
        config.handshake_timeout = GRANTED;
        // It is not for its token that it is left.
        config.token_life = PATIENCE;
    });
    let hello = data::encode_hello(&house.guest.token());
    let mut socket = house.connect();
    let started = Instant::now();
    let mut sent = 0;
    for byte in hello {
        std::thread::sleep(2 * GRANTED / data::HELLO_BYTES as u32);
        if socket.write_all(&[byte]).is_err() {
            break;
        }
        sent += 1;
    }
    assert!(is_over(&mut socket));
    assert!(sent < hello.len() || started.elapsed() > GRANTED);
    house.stands();
}

#[test]
fn a_reader_that_stalls_stalls_itself_alone() {
    let mut house = House::new(|_| {});
    let slab = house.slab;
    // Far more is asked for than the sockets hold, and nothing of it is taken.
    let mut stalled = house.guest.data();
    let frame = {
        let mut frame = Vec::new();
        let whole: Vec<Extent> = (0..4).map(|_| extent(slab, 0, SLAB as u32)).collect();
        encode_request(Op::Read, 1, &whole, &mut frame).expect("legal");
        frame
    };
    for _ in 0..16 {
        stalled.socket.write_all(&frame).expect("sent");
    }
    // It has begun to answer; a moment later it cannot go on.
    assert_eq!(stalled.socket.peek(&mut [0]).expect("an answer"), 1);
    std::thread::sleep(Duration::from_millis(100));
    house.stands();
    // A slab in use by it is taken back from the client at once; memory follows the request, and
    // until then is on its own account.
    let other = house.guest.lease();
    house.guest.release(slab);
    assert_eq!(house.server.stats().leased_bytes, 2 * SLAB);
    let bytes = 7 * SLAB;
    let mut neighbour = Client::with_slabs(&house.server, &house.pki, 2, 6);
    let refused = neighbour.ask(Request::Reserve { bytes });
    assert!(matches!(
        refused,
        Reply::Refused(Refusal::ServerFull { .. })
    ));
    let refused = house.guest.ask(Request::Lease);
    assert!(matches!(
        refused,
        Reply::Refused(Refusal::ReservationExhausted { .. })
    ));
    for _ in 0..6 {
        neighbour.lease();
    }
    assert_eq!(neighbour.ask(Request::Goodbye), Reply::Done);
    assert_eq!(house.data.read(other, 0, 1), [0]);
    let stats = house.server.stats();
    assert_eq!(stats.clients[0].slabs, 1);
    // The fence reaches it: a returning client is not kept waiting.
    let again = Client::connect(house.address(), &house.pki.client, vm(1), 1).expect("admitted");
    assert_eq!(again.welcome.held, [other]);
    assert_eq!(house.server.stats().leased_bytes, SLAB);
}

#[test]
fn data_connections_and_guests_are_bounded() {
    let house = House::new(|config| {
        config.max_data_connections = 2;
        config.max_guests = 2;
    });
    let address = house.address();
    let mut second = Client::connect(address, &house.pki.client, vm(2), 2).expect("in");
    let _held = [second.data(), second.data()];
    let mut socket = house.connect();
    let hello = data::encode_hello(&second.token());
    socket.write_all(&hello).expect("sent");
    let mut welcome = [0; data::WELCOME_BYTES];
    socket.read_exact(&mut welcome).expect("an answer");
    assert_eq!(data::decode_welcome(&welcome), Ok(data::Admission::TooMany));
    assert!(is_over(&mut socket));
    let third = Client::connect(address, &house.pki.client, vm(3), 3).err();
    assert!(
        matches!(third, Some(Refusal::TooMany { limit: 2, .. })),
        "{third:?}"
    );
}

#[test]
fn one_certificates_connections_keep_no_other_out() {
    let mut house = House::new(|config| {
        config.max_guests = 2;
        config.max_strangers = 4;
    });
    let address = house.address();
    let greedy = house.pki.issue(Kind::Client, "greedy");
    let observe = |_| Client::for_purpose(address, &greedy, Purpose::Observe).expect("admitted");
    let mut observers: Vec<Client> = (0..20).map(observe).collect();
    house.stands();
    let mut second = Client::connect(address, &house.pki.client, vm(2), 2).expect("in");
    assert_eq!(second.ask(Request::Renew), Reply::Done);
    // Its own oldest made room for its newest.
    assert!(house.strangers("limit") > 0);
    assert!(observers[0].try_ask(Request::Stats).is_err());
    assert!(observers[19].try_ask(Request::Stats).is_ok());
}
