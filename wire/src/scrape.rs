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
/// A scraper that takes longer to ask, or to take its answer, is left.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(3);

/// What a page is.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0";

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
        Self::serve_if_any(listener, move || Some(render()))
    }

    /// As [`Self::serve`], of what may fail: where `render` gives nothing, and has said why to whom it concerns, a
    /// scraper is told that there was an error, rather than given a page without metrics.
    pub fn serve_if_any(
        listener: TcpListener,
        render: impl Fn() -> Option<String> + Send + 'static,
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
fn answer(socket: &TcpStream, render: impl FnOnce() -> Option<String>) -> io::Result<()> {
    let head = read_head(socket, |left| socket.set_read_timeout(Some(left)))?;
    let line = head.split(|byte| *byte == b'\r').next();
    let mut words = line.unwrap_or_default().split(|byte| *byte == b' ');
    let (method, path) = (words.next(), words.next());
    let plain = |status, text: &str| (status, "text/plain", text.to_owned());
    let (status, kind, body) = match (method, path) {
        (Some(b"GET"), Some(b"/metrics" | b"/")) => match render() {
            Some(page) => ("200 OK", OPEN_METRICS, page),
            None => plain(
                "500 Internal Server Error",
                "no metrics: the log of this program says why\n",
            ),
        },
        (Some(b"GET"), _) => plain("404 Not Found", "try /metrics\n"),
        _ => plain("405 Method Not Allowed", "only GET\n"),
    };
    let length = body.len();
    let response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}; charset=utf-8\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    write_answer(socket, response.as_bytes())
}

/// Reads a request to the end of its head, in a bounded time all together: `set_timeout` bounds what each read takes.
fn read_head(
    mut socket: impl Read,
    set_timeout: impl Fn(Duration) -> io::Result<()>,
) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + SCRAPE_TIMEOUT;
    let mut head = Vec::new();
    let mut chunk = [0; 1024];
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        if head.len() > MAX_REQUEST_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        set_timeout(left_until(deadline)?)?;
        match socket.read(&mut chunk) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => head.extend_from_slice(&chunk[..read]),
            // A process that was stopped and goes on has this of every socket with a time-out.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(head)
}

/// Writes all of an answer in a bounded time: a time-out of each write alone would let one that reads a little now
/// and then keep all others waiting.
fn write_answer(mut socket: &TcpStream, mut rest: &[u8]) -> io::Result<()> {
    let deadline = Instant::now() + SCRAPE_TIMEOUT;
    while !rest.is_empty() {
        socket.set_write_timeout(Some(left_until(deadline)?))?;
        match socket.write(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => rest = &rest[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The time that is left, never none: a socket would take that for no time-out at all.
fn left_until(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    match left.is_zero() {
        true => Err(io::ErrorKind::TimedOut.into()),
        false => Ok(left),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: &[u8] = b"GET /metrics HTTP/1.1\r\n\r\n";

    fn listen() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").expect("listens")
    }

    fn answered(page: &Page) -> String {
        let mut socket = TcpStream::connect(page.address()).expect("connects");
        socket.write_all(REQUEST).expect("asked");
        let mut text = String::new();
        socket.read_to_string(&mut text).expect("answered");
        text
    }

    #[test]
    fn a_page_that_cannot_be_made_is_an_error_and_no_empty_page() {
        let page = Page::serve(listen(), || "# EOF\n".to_owned()).expect("serves");
        let text = answered(&page);
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
        assert!(text.ends_with("\r\n\r\n# EOF\n"), "{text}");
        let page = Page::serve_if_any(listen(), || None).expect("serves");
        let text = answered(&page);
        assert!(text.starts_with("HTTP/1.1 500 "), "{text}");
        assert!(!text.contains("# EOF"), "{text}");
    }

    /// A socket whose every other read is interrupted, and which gives a few bytes at a time.
    struct Interrupted<'a> {
        rest: &'a [u8],
        is_next: bool,
    }

    impl Read for Interrupted<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.is_next = !self.is_next;
            if self.is_next {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let few = into.len().min(5);
            self.rest.read(&mut into[..few])
        }
    }

    #[test]
    fn a_request_is_read_on_after_an_interruption() {
        let socket = Interrupted {
            rest: REQUEST,
            is_next: false,
        };
        let head = read_head(socket, |_| Ok(())).expect("read");
        assert_eq!(head, REQUEST);
    }

    #[test]
    fn whoever_reads_a_little_now_and_then_is_left_at_last() {
        // More than the kernel keeps of it for the two, and much more than is read in the time there is.
        const PAGE_BYTES: usize = 64 << 20;
        let listener = listen();
        let mut reader =
            TcpStream::connect(listener.local_addr().expect("an address")).expect("connects");
        reader.write_all(REQUEST).expect("asked");
        let (socket, _) = listener.accept().expect("accepted");
        let reading = thread::spawn(move || {
            let mut chunk = [0; 64 << 10];
            while matches!(reader.read(&mut chunk), Ok(1..)) {
                thread::sleep(Duration::from_millis(50));
            }
        });
        let answered = answer(&socket, || Some("x".repeat(PAGE_BYTES)));
        assert!(answered.is_err());
        socket.shutdown(std::net::Shutdown::Both).expect("shut");
        drop(reading);
    }
}
