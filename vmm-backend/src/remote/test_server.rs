//! Real servers in this process, and a gate before them that can be shut: for tests.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use outram_memserver::{Config, Server};
use outram_wire::identity::Identity;
use outram_wire::pki::{self, Issued, Order};
use outram_wire::server::SessionSecret;
use outram_wire::tls::{Kind, TlsFiles};
use outram_wire::units::VmId;

use super::{RemoteConfig, Timing};

pub(crate) const SLAB: u64 = 1 << 20;
/// Long enough for a loaded machine; only what is broken takes so long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) struct Pki {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) server: Issued,
    pub(crate) client: Issued,
}

impl Pki {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        pki::init(dir.path()).expect("a CA");
        let server = issue(&dir, Kind::Server, "server", "127.0.0.1");
        let client = issue(&dir, Kind::Client, "client", "127.0.0.1");
        Self {
            dir,
            server,
            client,
        }
    }
}

pub(crate) fn issue(dir: &tempfile::TempDir, kind: Kind, name: &str, address: &str) -> Issued {
    let order = Order {
        kind,
        name,
        addresses: &[address.to_owned()],
        days: 1,
    };
    pki::issue(dir.path(), &order).expect("a certificate")
}

pub(crate) fn serve(pki: &Pki, listen: SocketAddr, change: impl FnOnce(&mut Config)) -> Server {
    let mut config = Config::new(listen, 8 * SLAB, pki.server.clone().into());
    config.slab_bytes = SLAB;
    change(&mut config);
    Server::start(config).expect("the server starts")
}

pub(crate) fn anywhere() -> SocketAddr {
    "127.0.0.1:0".parse().expect("an address")
}

pub(crate) fn config(address: SocketAddr, tls: impl Into<TlsFiles>) -> RemoteConfig {
    RemoteConfig {
        addresses: vec![address.to_string().parse().expect("an address")],
        identity: Arc::new(Identity::of(tls.into())),
        vm: VmId(uuid::Uuid::from_u128(7)),
        secret: SessionSecret([7; 32]),
        arrives: false,
        data_connections: 2,
        rdma: outram_wire::verbs::Choice::Auto,
        timing: Timing {
            // In this process, and on whatever is left of a busy machine.
            connect: PATIENCE,
            answer: PATIENCE,
            renew: Duration::from_millis(50),
            retry_min: Duration::from_millis(10),
            retry_max: Duration::from_millis(100),
            ..Timing::default()
        },
    }
}

/// A forwarder that can cut what it carries, and keep new connections out.
pub(crate) struct Gate {
    pub(crate) address: SocketAddr,
    pub(crate) shut: Arc<AtomicBool>,
    pub(crate) carried: Arc<Mutex<Vec<TcpStream>>>,
}

impl Gate {
    pub(crate) fn to(target: SocketAddr) -> Self {
        Self::at(TcpListener::bind(anywhere()).expect("a listener"), target)
    }

    /// Whoever has connected already is let in first.
    pub(crate) fn at(listener: TcpListener, target: SocketAddr) -> Self {
        let address = listener.local_addr().expect("bound");
        let shut = Arc::new(AtomicBool::new(false));
        let carried: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
        let (is_shut, carrying) = (shut.clone(), carried.clone());
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                if is_shut.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(far) = TcpStream::connect(target) else {
                    continue;
                };
                let mut carried = carrying.lock().expect("no panic under the lock");
                // Shut since it was accepted: what is not carried yet would not be cut.
                if is_shut.load(Ordering::SeqCst) {
                    continue;
                }
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let from = from.try_clone().expect("a descriptor");
                    let to = to.try_clone().expect("a descriptor");
                    thread::spawn(move || carry(from, to));
                }
                carried.extend([near, far]);
            }
        });
        Self {
            address,
            shut,
            carried,
        }
    }

    pub(crate) fn cut(&self) {
        for socket in self
            .carried
            .lock()
            .expect("no panic under the lock")
            .drain(..)
        {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    pub(crate) fn shut(&self, shut: bool) {
        self.shut.store(shut, Ordering::SeqCst);
        if shut {
            self.cut();
        }
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream) {
    let mut bytes = vec![0; 64 * 1024];
    while let Ok(read @ 1..) = from.read(&mut bytes) {
        if to.write_all(&bytes[..read]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
