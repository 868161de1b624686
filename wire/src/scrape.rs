//! The page where Prometheus reads a program's metrics: one HTTP request a connection, answered one
//! after the other, so that a scraper costs a bounded amount whatever it does.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Longest request head that is read; scrapers send a few hundred bytes.
const MAX_REQUEST_BYTES: usize = 8 * 1024;
/// A scraper that takes longer is left.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(3);

/// The thread that answers scrapers, one after the other.
pub struct Page {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Page {
    /// Serves what `render` gives, in OpenMetrics text, until dropped.
    pub fn serve(
        listener: TcpListener,
        render: impl Fn() -> String + Send + 'static,
    ) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = thread::Builder::new()
            .name("metrics".to_owned())
            .spawn(move || {
                for socket in listener.incoming() {
                    if stopped.load(Ordering::Acquire) {
                        return;
                    }
                    let Ok(socket) = socket else {
                        // Out of descriptors, most likely: give others time to end.
                        thread::sleep(Duration::from_millis(100));
                        continue;
                    };
                    // A scraper that went away misses one sample; its next scrape tells it so.
                    let _ = answer(&socket, &render);
                }
            })?;
        Ok(Self {
            address,
            stop,
            thread: Some(thread),
        })
    }

    /// Where it is served.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // A connection of our own lets the thread see the flag.
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            });
        }
        let woken = TcpStream::connect_timeout(&address, SCRAPE_TIMEOUT).is_ok();
        if let Some(thread) = self.thread.take()
            && woken
        {
            let _ = thread.join();
        }
    }
}

/// Answers one HTTP request.
fn answer(mut socket: &TcpStream, render: impl FnOnce() -> String) -> io::Result<()> {
    let deadline = Instant::now() + SCRAPE_TIMEOUT;
    let mut head = Vec::new();
    let mut chunk = [0; 1024];
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || head.len() > MAX_REQUEST_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        socket.set_read_timeout(Some(left))?;
        match socket.read(&mut chunk)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => head.extend_from_slice(&chunk[..read]),
        }
    }
    let line = head.split(|byte| *byte == b'\r').next();
    let mut words = line.unwrap_or_default().split(|byte| *byte == b' ');
    let (method, path) = (words.next(), words.next());
    let (status, body) = match (method, path) {
        (Some(b"GET"), Some(b"/metrics" | b"/")) => ("200 OK", render()),
        (Some(b"GET"), _) => ("404 Not Found", "try /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "only GET\n".to_owned()),
    };
    let length = body.len();
    let response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    socket.set_write_timeout(Some(SCRAPE_TIMEOUT))?;
    socket.write_all(response.as_bytes())
}
