//! A control connection: frames of JSON inside TLS, over a socket that never blocks.
//!
//! The owner waits with a deadline, and may be woken early through an [`EventFd`]; so one thread
//! can serve the peer and take orders at the same time. Nothing is buffered beyond one frame of the
//! agreed maximum and what TLS needs itself.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use nix::sys::eventfd::{EfdFlags, EventFd};

/// Bytes taken from TLS at once; a record carries at most four times as much.
const CHUNK_BYTES: usize = 4096;

/// Why a control connection failed. It is of no further use after any of these.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The socket failed.
    #[error("the connection failed")]
    Io(#[source] io::Error),
    /// TLS failed: see [`crate::tls::explain`] for the words of a cure.
    #[error("{}", crate::tls::explain(.0))]
    Tls(#[source] rustls::Error),
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer took too long.
    #[error("the peer did not {0} in time")]
    TimedOut(&'static str),
    /// A frame over the maximum.
    #[error("a control frame of {frame_bytes} bytes, at most {max_bytes} are allowed")]
    TooLong {
        /// Bytes of the frame.
        frame_bytes: usize,
        /// The maximum of its receiver.
        max_bytes: usize,
    },
    /// A frame that is not the JSON expected.
    #[error("a control frame is not understood")]
    Malformed(#[source] serde_json::Error),
}

/// What waiting for a message came to.
#[derive(Debug)]
pub enum Received<T> {
    /// A message.
    Message(T),
    /// The deadline passed.
    TimedOut,
    /// The waker was used; its count is taken back.
    Woken,
}

/// One end of a control connection.
pub struct Channel {
    socket: Arc<TcpStream>,
    tls: Connection,
    inbox: Vec<u8>,
    closed: bool,
    max_received_bytes: usize,
}

impl Channel {
    /// Opens the client's end: TLS is shaken hands upon before `deadline`.
    pub fn connect(
        socket: impl Into<Arc<TcpStream>>,
        config: Arc<ClientConfig>,
        server: ServerName<'static>,
        deadline: Instant,
    ) -> Result<Self, ChannelError> {
        let tls = ClientConnection::new(config, server).map_err(ChannelError::Tls)?;
        let max = super::control::MAX_SERVER_FRAME_BYTES;
        Self::open(socket.into(), tls.into(), max, deadline)
    }

    /// Opens the server's end.
    pub fn accept(
        socket: impl Into<Arc<TcpStream>>,
        config: Arc<ServerConfig>,
        deadline: Instant,
    ) -> Result<Self, ChannelError> {
        let tls = ServerConnection::new(config).map_err(ChannelError::Tls)?;
        let max = super::control::MAX_CLIENT_FRAME_BYTES;
        Self::open(socket.into(), tls.into(), max, deadline)
    }

    fn open(
        socket: Arc<TcpStream>,
        tls: Connection,
        max_received_bytes: usize,
        deadline: Instant,
    ) -> Result<Self, ChannelError> {
        socket.set_nonblocking(true).map_err(ChannelError::Io)?;
        let mut channel = Self {
            socket,
            tls,
            inbox: Vec::new(),
            closed: false,
            max_received_bytes,
        };
        // A frame waits in TLS until the socket takes it: the longest one must fit.
        let longest = super::control::MAX_SERVER_FRAME_BYTES + CHUNK_BYTES;
        channel.tls.set_buffer_limit(Some(longest));
        while channel.tls.is_handshaking() {
            channel.flush()?;
            if channel.closed {
                return Err(ChannelError::Closed);
            }
            let mut events = PollFlags::POLLIN;
            if channel.tls.wants_write() {
                events |= PollFlags::POLLOUT;
            }
            if !channel.fill()? && !wait(channel.socket.as_fd(), events, None, deadline)?.socket {
                return Err(ChannelError::TimedOut("complete the TLS handshake"));
            }
        }
        channel.finish_sending(deadline)?;
        Ok(channel)
    }

    /// The peer's certificates, its own first.
    pub fn peer_certificates(&self) -> &[CertificateDer<'static>] {
        self.tls.peer_certificates().unwrap_or_default()
    }

    /// Sends one message; all of it, or the channel is dead.
    pub fn send<T: Serialize>(
        &mut self,
        message: &T,
        deadline: Instant,
    ) -> Result<(), ChannelError> {
        let body = serde_json::to_vec(message).map_err(ChannelError::Malformed)?;
        let max_bytes = super::control::MAX_SERVER_FRAME_BYTES;
        if body.len() > max_bytes {
            return Err(ChannelError::TooLong {
                frame_bytes: body.len(),
                max_bytes,
            });
        }
        let mut frame = Vec::with_capacity(body.len() + 4);
        frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
        frame.extend_from_slice(&body);
        let written = self.tls.writer().write_all(&frame);
        written.map_err(ChannelError::Io)?;
        self.finish_sending(deadline)
    }

    /// Waits for one message until `deadline`, or until `waker` is used.
    pub fn receive<T: DeserializeOwned>(
        &mut self,
        deadline: Instant,
        waker: Option<&EventFd>,
    ) -> Result<Received<T>, ChannelError> {
        loop {
            if let Some(message) = self.take_frame()? {
                return Ok(Received::Message(message));
            }
            // What came before the end was delivered first.
            if self.closed {
                return Err(ChannelError::Closed);
            }
            if self.fill()? {
                continue;
            }
            let ready = wait(self.socket.as_fd(), PollFlags::POLLIN, waker, deadline)?;
            if ready.waker {
                // Without a count the read would block; the flag for that is the owner's to set.
                let _ = waker.map(EventFd::read);
                return Ok(Received::Woken);
            }
            if !ready.socket {
                return Ok(Received::TimedOut);
            }
        }
    }

    /// Tells the peer that nothing more comes, as far as the socket takes it at once.
    pub fn close(mut self) {
        self.tls.send_close_notify();
        let _ = self.flush();
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    fn finish_sending(&mut self, deadline: Instant) -> Result<(), ChannelError> {
        loop {
            self.flush()?;
            if !self.tls.wants_write() {
                return Ok(());
            }
            if !wait(self.socket.as_fd(), PollFlags::POLLOUT, None, deadline)?.socket {
                return Err(ChannelError::TimedOut("take what was sent to it"));
            }
        }
    }

    /// Writes what the socket takes now.
    fn flush(&mut self) -> Result<(), ChannelError> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut &*self.socket) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.explain_broken_pipe(error)),
            }
        }
        Ok(())
    }

    /// Where the peer hung up while we were sending, its reason may be waiting to be read.
    fn explain_broken_pipe(&mut self, error: io::Error) -> ChannelError {
        while let Ok(read) = self.tls.read_tls(&mut &*self.socket) {
            if let Err(alert) = self.tls.process_new_packets() {
                return ChannelError::Tls(alert);
            }
            if read == 0 {
                break;
            }
        }
        ChannelError::Io(error)
    }

    /// Takes what has arrived; false if nothing has.
    fn fill(&mut self) -> Result<bool, ChannelError> {
        match self.tls.read_tls(&mut &*self.socket) {
            Ok(0) => self.closed = true,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(true),
            Err(error) => return Err(ChannelError::Io(error)),
        }
        if let Err(error) = self.tls.process_new_packets() {
            // The peer deserves the alert that says why; whether it gets it changes nothing.
            let _ = self.tls.write_tls(&mut &*self.socket);
            return Err(ChannelError::Tls(error));
        }
        let mut chunk = [0; CHUNK_BYTES];
        loop {
            match self.tls.reader().read(&mut chunk) {
                Ok(0) => {
                    self.closed = true;
                    break;
                }
                Ok(read) => self.inbox.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // The socket ended without TLS's own end: the same, for whole frames.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    self.closed = true;
                    break;
                }
                Err(error) => return Err(ChannelError::Io(error)),
            }
        }
        if !self.closed {
            self.flush()?;
        }
        Ok(true)
    }

    fn take_frame<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ChannelError> {
        let Some((length, rest)) = self.inbox.split_first_chunk() else {
            return Ok(None);
        };
        let frame_bytes = u32::from_le_bytes(*length) as usize;
        if frame_bytes > self.max_received_bytes {
            return Err(ChannelError::TooLong {
                frame_bytes,
                max_bytes: self.max_received_bytes,
            });
        }
        let Some(body) = rest.get(..frame_bytes) else {
            return Ok(None);
        };
        let message = serde_json::from_slice(body).map_err(ChannelError::Malformed)?;
        self.inbox.drain(..4 + frame_bytes);
        Ok(Some(message))
    }
}

/// What a wait ended with; neither is set where the deadline passed.
struct Ready {
    socket: bool,
    waker: bool,
}

fn wait(
    socket: BorrowedFd<'_>,
    events: PollFlags,
    waker: Option<&EventFd>,
    deadline: Instant,
) -> Result<Ready, ChannelError> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up, so that a wait of less than a millisecond does not spin.
        let left = left.saturating_add(Duration::from_micros(999));
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let waker_fd = waker.map_or(socket, AsFd::as_fd);
        let mut fds = [
            PollFd::new(socket, events),
            PollFd::new(waker_fd, PollFlags::POLLIN),
        ];
        let watched = if waker.is_some() { 2 } else { 1 };
        match poll(&mut fds[..watched], timeout) {
            Ok(_) => {
                return Ok(Ready {
                    socket: fds[0].any() == Some(true),
                    waker: watched == 2 && fds[1].any() == Some(true),
                });
            }
            Err(nix::errno::Errno::EINTR) if Instant::now() < deadline => {}
            Err(nix::errno::Errno::EINTR) => {
                return Ok(Ready {
                    socket: false,
                    waker: false,
                });
            }
            Err(errno) => return Err(ChannelError::Io(errno.into())),
        }
    }
}

/// An [`EventFd`] for [`Channel::receive`]: counts wake-ups, never blocks.
pub fn new_waker() -> io::Result<EventFd> {
    let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
    Ok(EventFd::from_value_and_flags(0, flags)?)
}

/// Sets what every connection of ours needs: no delay for small frames, and an end to it within
/// `dead_after` once the peer's machine does not answer any more.
pub fn prepare_socket(socket: &TcpStream, dead_after: Duration) -> io::Result<()> {
    socket.set_nodelay(true)?;
    setsockopt(socket, sockopt::KeepAlive, &true)?;
    let seconds = u32::try_from(dead_after.as_secs()).unwrap_or(u32::MAX);
    setsockopt(socket, sockopt::TcpKeepIdle, &(seconds / 3).max(1))?;
    setsockopt(socket, sockopt::TcpKeepInterval, &(seconds / 3).max(1))?;
    setsockopt(socket, sockopt::TcpKeepCount, &2)?;
    let millis = u32::try_from(dead_after.as_millis()).unwrap_or(u32::MAX);
    setsockopt(socket, sockopt::TcpUserTimeout, &millis)?;
    Ok(())
}
