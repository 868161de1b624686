//! Certificates from the operator's CA, and connections under them.
#![allow(missing_docs)]

use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use outram_wire::pki::{self, Issued, Kind, Order, PkiError};
use outram_wire::server::channel::{Channel, ChannelError, Received, new_waker};
use outram_wire::server::control::{MAX_CLIENT_FRAME_BYTES, MAX_SERVER_FRAME_BYTES};
use outram_wire::tls::{self, TlsError, TlsFiles};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};

const PATIENCE: Duration = Duration::from_secs(20);

fn ca() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    pki::init(dir.path()).expect("a CA");
    dir
}

fn issue(dir: &Path, kind: Kind, name: &str, days: u32) -> Issued {
    let order = Order {
        kind,
        name,
        addresses: &["localhost".to_owned(), "::1".to_owned()],
        days,
    };
    pki::issue(dir, &order).expect("a certificate")
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

#[test]
fn keys_are_their_owners_alone_and_nothing_is_overwritten() {
    let dir = ca();
    let issued = issue(dir.path(), Kind::Server, "mem1", 30);
    for key in [&dir.path().join("ca.key"), &issued.key] {
        let mode = fs::metadata(key).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{}", key.display());
    }
    let before = fs::read(&issued.key).expect("a key");
    assert!(matches!(pki::init(dir.path()), Err(PkiError::Exists(_))));
    let order = Order {
        kind: Kind::Client,
        name: "mem1",
        addresses: &[],
        days: 30,
    };
    let again = pki::issue(dir.path(), &order);
    assert!(matches!(again, Err(PkiError::Exists(_))));
    assert_eq!(fs::read(&issued.key).expect("a key"), before);
}

#[test]
fn orders_that_make_no_sense_are_refused() {
    let dir = ca();
    let order = |kind, name: &str, addresses: &[String]| {
        let order = Order {
            kind,
            name,
            addresses,
            days: 30,
        };
        pki::issue(dir.path(), &order).expect_err("no sense")
    };
    let long = "x".repeat(65);
    for name in ["", "ca", "../x", "a/b", ".hidden", "a b", &long] {
        let error = order(Kind::Client, name, &[]);
        assert!(matches!(error, PkiError::Name(_)), "{name}");
    }
    assert!(matches!(order(Kind::Server, "a", &[]), PkiError::NoAddress));
    let odd = [
        "not a name\u{e9}",
        "10.0.0.2:7741",
        "rdma://mem1",
        "",
        "a b",
    ];
    for address in odd.map(str::to_owned) {
        let error = order(Kind::Server, "a", &["mem1".to_owned(), address.clone()]);
        assert!(matches!(error, PkiError::Address(odd) if odd == address));
    }
    let nowhere = tempfile::tempdir().expect("a directory");
    let order = Order {
        kind: Kind::Client,
        name: "a",
        addresses: &[],
        days: 30,
    };
    let error = pki::issue(nowhere.path(), &order).expect_err("no CA");
    assert!(error.to_string().contains("'outram pki init'"), "{error}");
    assert_eq!(fs::read_dir(nowhere.path()).expect("readable").count(), 0);
}

#[test]
fn each_kind_serves_its_purpose_alone() {
    let dir = ca();
    let server: TlsFiles = issue(dir.path(), Kind::Server, "mem1", 30).into();
    let client: TlsFiles = issue(dir.path(), Kind::Client, "host1", 30).into();
    assert!(tls::server_config(&server).is_ok() && tls::client_config(&client).is_ok());
    for error in [
        tls::server_config(&client).err(),
        tls::client_config(&server).err(),
    ] {
        let text = error.expect("the wrong kind").to_string();
        assert!(text.contains("wrong kind"), "{text}");
    }
    let shown = CertificateDer::from_pem_file(&client.cert).expect("a certificate");
    let shown = [shown];
    let name = tls::peer_name(&shown, Kind::Client).expect("a name");
    assert_eq!(name.to_string(), "host1");
    assert!(tls::peer_name(&shown, Kind::Server).is_err());
    assert!(tls::peer_name(&[], Kind::Client).is_err());
}

#[test]
fn an_expired_certificate_is_named() {
    let dir = ca();
    let files: TlsFiles = issue(dir.path(), Kind::Client, "old", 0).into();
    // Its validity ended in the second it was made.
    thread::sleep(Duration::from_millis(1100));
    let text = tls::client_config(&files).expect_err("expired").to_string();
    assert!(
        text.contains("old.pem") && text.contains("has expired"),
        "{text}"
    );
}

/// TLS asks a CA for no date: it counts until it is taken out of the file, as the operator's pages say.
#[test]
fn an_expired_ca_counts_for_as_long_as_its_file_has_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let key = rcgen::KeyPair::generate().expect("a key");
    let mut params = rcgen::CertificateParams::new(Vec::new()).expect("no names");
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Constrained(0));
    params.not_before = rcgen::date_time_ymd(2000, 1, 1);
    params.not_after = rcgen::date_time_ymd(2001, 1, 1);
    let ca = params.self_signed(&key).expect("a CA");
    fs::write(dir.path().join("ca.pem"), ca.pem()).expect("written");
    fs::write(dir.path().join("ca.key"), key.serialize_pem()).expect("written");
    let server: TlsFiles = issue(dir.path(), Kind::Server, "mem1", 30).into();
    let client: TlsFiles = issue(dir.path(), Kind::Client, "host1", 30).into();
    assert!(tls::server_config(&server).is_ok() && tls::client_config(&client).is_ok());
}

#[test]
fn a_certificate_without_a_purpose_is_neither_kind() {
    let dir = ca();
    let read = |name| fs::read_to_string(dir.path().join(name)).expect("a file");
    let ca_key = rcgen::KeyPair::from_pem(&read("ca.key")).expect("a key");
    let issuer = rcgen::Issuer::from_ca_cert_pem(&read("ca.pem"), ca_key).expect("a CA");
    let key = rcgen::KeyPair::generate().expect("a key");
    let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
    let made = params.signed_by(&key, &issuer).expect("a certificate");
    let files = TlsFiles {
        ca: dir.path().join("ca.pem"),
        cert: dir.path().join("any.pem"),
        key: dir.path().join("any.key"),
    };
    fs::write(&files.cert, made.pem()).expect("written");
    fs::write(&files.key, key.serialize_pem()).expect("written");
    assert!(matches!(
        tls::client_config(&files),
        Err(TlsError::Identity { .. } | TlsError::Certificate { .. })
    ));
    assert!(matches!(
        tls::server_config(&files),
        Err(TlsError::Identity { .. } | TlsError::Certificate { .. })
    ));
}

/// Both ends of a connection, with what the server's end is to do.
fn connected(at_server: impl FnOnce(Channel) + Send + 'static) -> Channel {
    let dir = ca();
    let server: TlsFiles = issue(dir.path(), Kind::Server, "mem1", 30).into();
    let client: TlsFiles = issue(dir.path(), Kind::Client, "host1", 30).into();
    let config = tls::server_config(&server).expect("good");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().expect("bound");
    thread::spawn(move || {
        let (socket, _) = listener.accept().expect("accepted");
        at_server(Channel::accept(socket, config, soon()).expect("TLS stands"));
    });
    let config = tls::client_config(&client).expect("good");
    let socket = TcpStream::connect(address).expect("connected");
    let name = ServerName::try_from("localhost").expect("a name");
    Channel::connect(socket, config, name, soon()).expect("TLS stands")
}

#[test]
fn messages_of_every_size_arrive_and_the_last_before_the_end() {
    let lengths = [0, 1, 5000, 100_000, MAX_SERVER_FRAME_BYTES - 2];
    let mut channel = connected(move |mut channel| {
        for length in lengths {
            channel.send(&"x".repeat(length), soon()).expect("sent");
        }
        channel.close();
    });
    for length in lengths {
        match channel.receive::<String>(soon(), None) {
            Ok(Received::Message(text)) => assert_eq!(text.len(), length),
            other => panic!("{other:?}"),
        }
    }
    let end = channel.receive::<String>(soon(), None);
    assert!(matches!(end, Err(ChannelError::Closed)), "{end:?}");
}

#[test]
fn frames_over_the_maximum_are_refused_at_both_ends() {
    let mut channel = connected(|mut channel| {
        let frame = channel.receive::<String>(soon(), None);
        assert!(
            matches!(frame, Err(ChannelError::TooLong { .. })),
            "{frame:?}"
        );
    });
    let long = "x".repeat(MAX_SERVER_FRAME_BYTES);
    let refused = channel.send(&long, soon());
    assert!(matches!(refused, Err(ChannelError::TooLong { .. })));
    let frame = "x".repeat(MAX_CLIENT_FRAME_BYTES);
    channel.send(&frame, soon()).expect("sent");
    let end = channel.receive::<String>(soon(), None);
    assert!(end.is_err());
}

#[test]
fn waiting_ends_at_the_deadline_and_at_a_wake_up() {
    let (told, done) = std::sync::mpsc::channel::<()>();
    let mut channel = connected(move |channel| {
        // The connection stands until the test is over.
        let _ = done.recv();
        drop(channel);
    });
    let waker = Arc::new(new_waker().expect("an eventfd"));
    let deadline = Instant::now() + Duration::from_millis(20);
    let waited = channel.receive::<String>(deadline, Some(&waker));
    assert!(matches!(waited, Ok(Received::TimedOut)));
    let other = waker.clone();
    let waking = thread::spawn(move || other.write(1));
    let waited = channel.receive::<String>(soon(), Some(&waker));
    assert!(matches!(waited, Ok(Received::Woken)));
    let deadline = Instant::now() + Duration::from_millis(20);
    let waited = channel.receive::<String>(deadline, Some(&waker));
    assert!(matches!(waited, Ok(Received::TimedOut)), "woken once alone");
    assert!(waking.join().expect("no panic").is_ok());
    drop(told);
}

#[test]
fn a_peer_without_tls_is_told_apart() {
    let dir = ca();
    let server: TlsFiles = issue(dir.path(), Kind::Server, "mem1", 30).into();
    let config = tls::server_config(&server).expect("good");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let mut stranger = TcpStream::connect(listener.local_addr().expect("bound")).expect("in");
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("sent");
    let (socket, _) = listener.accept().expect("accepted");
    let error = Channel::accept(socket, config.clone(), soon()).err();
    assert!(matches!(error, Some(ChannelError::Tls(_))), "{error:?}");
    let mut silent = TcpStream::connect(listener.local_addr().expect("bound")).expect("in");
    let (socket, _) = listener.accept().expect("accepted");
    let deadline = Instant::now() + Duration::from_millis(30);
    let error = Channel::accept(socket, config, deadline).err();
    assert!(
        matches!(error, Some(ChannelError::TimedOut(_))),
        "{error:?}"
    );
    let _ = silent.flush();
}
