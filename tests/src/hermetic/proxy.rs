//! A TCP line between a backend and its memory server that tests can cut, or let go bad: bytes of
//! pages are then changed on their way from the server.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use outram_wire::server::data::{MAGIC, REPLY_BYTES};

#[derive(Debug, Default)]
struct Shared {
    open: Mutex<Vec<TcpStream>>,
    refusing: AtomicBool,
    accepted: AtomicU64,
    spoiling: AtomicU64,
}

/// A forwarding proxy; its threads end with the process.
#[derive(Debug)]
pub struct Proxy {
    /// Where clients connect.
    pub address: String,
    shared: Arc<Shared>,
}

impl Proxy {
    /// Listens at `address` and forwards to `target`.
    pub fn start(address: &str, target: &str) -> Result<Self> {
        let listener =
            TcpListener::bind(address).with_context(|| format!("listening at {address}"))?;
        let shared = Arc::new(Shared::default());
        let (for_thread, target) = (Arc::clone(&shared), target.to_owned());
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                accept(client, &target, &for_thread);
            }
        });
        Ok(Self {
            address: address.to_owned(),
            shared,
        })
    }

    /// Cuts every connection that stands; new ones are served again.
    pub fn cut(&self) -> usize {
        let mut open = lock(&self.shared.open);
        for socket in open.iter() {
            // A connection that has closed by itself is as good as cut.
            let _ = socket.shutdown(Shutdown::Both);
        }
        let cut = open.len() / 2;
        open.clear();
        cut
    }

    /// Refuses new connections, or serves them again.
    pub fn refuse(&self, refuse: bool) {
        self.shared.refusing.store(refuse, Ordering::Relaxed);
    }

    /// Flips a bit in the pages of that many replies to come.
    pub fn spoil(&self, replies: u64) {
        self.shared.spoiling.store(replies, Ordering::Relaxed);
    }

    /// Replies that are still to be spoiled.
    pub fn to_spoil(&self) -> u64 {
        self.shared.spoiling.load(Ordering::Relaxed)
    }

    /// Connections accepted so far.
    pub fn accepted(&self) -> u64 {
        self.shared.accepted.load(Ordering::Relaxed)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accept(client: TcpStream, target: &str, shared: &Arc<Shared>) {
    if shared.refusing.load(Ordering::Relaxed) {
        return;
    }
    let Ok(server) = TcpStream::connect(target) else {
        return;
    };
    shared.accepted.fetch_add(1, Ordering::Relaxed);
    let ways = [
        (&client, &server, Stage::Other),
        (&server, &client, Stage::Welcome),
    ];
    for (from, to, stage) in ways {
        let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else {
            return;
        };
        let spoiler = Spoiler::new(Arc::clone(shared), stage);
        std::thread::spawn(move || forward(from, to, spoiler));
    }
    lock(&shared.open).extend([client, server]);
}

fn forward(mut from: TcpStream, mut to: TcpStream, mut spoiler: Spoiler) {
    // Latency is part of what is tested through the proxy.
    let _ = to.set_nodelay(true);
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(read) = from.read(&mut buffer) {
        spoiler.pass(&mut buffer[..read]);
        if read == 0 || to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

/// Follows the frames of a server's data connection, to change what is in pages and nothing else.
struct Spoiler {
    shared: Arc<Shared>,
    /// The frame's header so far.
    header: Vec<u8>,
    /// Bytes of the payload still to come.
    payload: usize,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Welcome,
    Replies,
    /// No data connection's replies: TLS, or the other direction.
    Other,
}

impl Spoiler {
    fn new(shared: Arc<Shared>, stage: Stage) -> Self {
        Self {
            shared,
            header: Vec::new(),
            payload: 0,
            stage,
        }
    }

    fn pass(&mut self, mut bytes: &mut [u8]) {
        while !bytes.is_empty() && self.stage != Stage::Other {
            if self.payload > 0 {
                let here = self.payload.min(bytes.len());
                bytes = &mut bytes[here..];
                self.payload -= here;
                continue;
            }
            let here = (REPLY_BYTES - self.header.len()).min(bytes.len());
            self.header.extend_from_slice(&bytes[..here]);
            bytes = &mut bytes[here..];
            if self.header.len() < REPLY_BYTES {
                continue;
            }
            let header = std::mem::take(&mut self.header);
            match self.stage {
                // A welcome is as long as a reply's header.
                Stage::Welcome if header.starts_with(&MAGIC) => self.stage = Stage::Replies,
                Stage::Replies => {
                    let length = [header[4], header[5], header[6], header[7]];
                    self.payload = u32::from_le_bytes(length) as usize;
                    if let Some(first) = bytes.first_mut().filter(|_| self.payload > 0) {
                        self.spoil(first);
                    }
                }
                _ => self.stage = Stage::Other,
            }
        }
    }

    fn spoil(&self, byte: &mut u8) {
        let left = |left: u64| left.checked_sub(1);
        let order = Ordering::Relaxed;
        if self
            .shared
            .spoiling
            .fetch_update(order, order, left)
            .is_ok()
        {
            *byte ^= 0x10;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwards_until_cut_and_serves_again() {
        let server = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let target = server.local_addr().expect("bound").to_string();
        std::thread::spawn(move || {
            for client in server.incoming().flatten() {
                let (mut from, mut to) = (client.try_clone().expect("clone"), client);
                std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            }
        });
        let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = free.local_addr().expect("bound").to_string();
        drop(free);
        let proxy = Proxy::start(&address, &target).expect("starts");
        for _ in 0..2 {
            let mut client = TcpStream::connect(&address).expect("connects");
            client.write_all(b"hello").expect("sends");
            let mut back = [0; 5];
            client.read_exact(&mut back).expect("comes back");
            assert_eq!(&back, b"hello");
            proxy.cut();
            assert_eq!(client.read(&mut back).unwrap_or(0), 0);
        }
        assert_eq!(proxy.accepted(), 2);
    }
}
