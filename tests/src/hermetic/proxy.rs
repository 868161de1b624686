//! A TCP line between a backend and its memory server that tests can cut.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};

#[derive(Debug, Default)]
struct Shared {
    open: Mutex<Vec<TcpStream>>,
    refusing: AtomicBool,
    accepted: AtomicU64,
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

    /// Connections accepted so far.
    pub fn accepted(&self) -> u64 {
        self.shared.accepted.load(Ordering::Relaxed)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accept(client: TcpStream, target: &str, shared: &Shared) {
    if shared.refusing.load(Ordering::Relaxed) {
        return;
    }
    let Ok(server) = TcpStream::connect(target) else {
        return;
    };
    shared.accepted.fetch_add(1, Ordering::Relaxed);
    let pair = [(&client, &server), (&server, &client)];
    for (from, to) in pair {
        let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else {
            return;
        };
        std::thread::spawn(move || forward(from, to));
    }
    lock(&shared.open).extend([client, server]);
}

fn forward(mut from: TcpStream, mut to: TcpStream) {
    // Latency is part of what is tested through the proxy.
    let _ = to.set_nodelay(true);
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(read) = from.read(&mut buffer) {
        if read == 0 || to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
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
