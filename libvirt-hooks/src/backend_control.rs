//! Asking a backend over its control socket, with a bound on how long that may take.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use outram_wire::control::{
    CONTROL_VERSION, Envelope, FrameError, Reply, Request, Status, read_frame, write_frame,
};
use outram_wire::units::Limit;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// How long a backend may take to answer. Its control thread waits for nothing, so a longer
/// silence means that it does not run.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// Why a backend gave no usable answer.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Nobody listens.
    #[error("no backend listens at {0}")]
    NotRunning(PathBuf),
    /// The socket is not ours to use.
    #[error("cannot use {0}: permission denied; run this as root")]
    Permission(PathBuf),
    /// The socket cannot be connected to.
    #[error("cannot connect to {path}: {source}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It takes too long.
    #[error("the backend at {0} did not answer within {1:?}: it may be stopped or overloaded")]
    Silent(PathBuf, Duration),
    /// The connection broke, or the answer is no message.
    #[error("the backend at {path} gave no usable answer: {source}")]
    Frame {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: FrameError,
    },
    /// It closed the connection without an answer.
    #[error("the backend at {0} closed the connection without an answer")]
    Closed(PathBuf),
    /// It refused.
    #[error("the backend refused: {0}")]
    Refused(String),
    /// It answered something else than was asked.
    #[error("the backend at {0} gave an answer to another question: it may be of another version")]
    Unexpected(PathBuf),
}

/// A backend's control socket.
#[derive(Clone, Debug)]
pub struct BackendControl {
    socket: PathBuf,
    timeout: Duration,
}

impl BackendControl {
    /// The backend of a run directory.
    pub fn of(run_dir: &Path) -> Self {
        Self {
            socket: run_dir.join("control.sock"),
            timeout: ANSWER_TIMEOUT,
        }
    }

    /// The same with another bound on each answer.
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Everything known about the guest's memory.
    pub fn status(&self) -> Result<Box<Status>, ControlError> {
        match self.ask(Request::Status)? {
            Reply::Status(status) => Ok(status),
            other => Err(self.refusal(other)),
        }
    }

    /// The backend's metrics, in Prometheus' text form.
    pub fn metrics(&self) -> Result<String, ControlError> {
        match self.ask(Request::Metrics)? {
            Reply::Metrics(text) => Ok(text),
            other => Err(self.refusal(other)),
        }
    }

    /// Sets a new limit.
    pub fn tune(&self, limit: Limit) -> Result<(), ControlError> {
        self.command(Request::Tune(limit))
    }

    /// Ends the backend; refused while a guest's memory depends on it.
    pub fn stop(&self) -> Result<(), ControlError> {
        self.command(Request::Stop)
    }

    fn command(&self, request: Request) -> Result<(), ControlError> {
        match self.ask(request)? {
            Reply::Done => Ok(()),
            other => Err(self.refusal(other)),
        }
    }

    fn refusal(&self, reply: Reply) -> ControlError {
        match reply {
            Reply::Refused(reason) => ControlError::Refused(reason),
            Reply::Status(_) | Reply::Metrics(_) | Reply::Done => {
                ControlError::Unexpected(self.socket.clone())
            }
        }
    }

    fn ask(&self, request: Request) -> Result<Reply, ControlError> {
        let mut stream = self.connect().map_err(|e| self.not_connected(e))?;
        let envelope = Envelope {
            version: CONTROL_VERSION,
            request,
        };
        stream
            .set_read_timeout(Some(self.timeout))
            .map_err(|e| self.broken(e.into()))?;
        write_frame(&mut stream, &envelope).map_err(|e| self.broken(e))?;
        read_frame(&mut stream)
            .map_err(|e| self.broken(e))?
            .ok_or_else(|| ControlError::Closed(self.socket.clone()))
    }

    /// Connects, and bounds how long that and each write may take: once a process that does not run
    /// has its queue full of connections, connecting would wait for ever (unix(7), SO_SNDTIMEO in
    /// socket(7)).
    fn connect(&self) -> io::Result<UnixStream> {
        let address = SocketAddrUnix::new(&self.socket)?;
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        set_socket_timeout(&socket, Timeout::Send, Some(self.timeout))?;
        connect(&socket, &address)?;
        Ok(UnixStream::from(socket))
    }

    fn not_connected(&self, source: io::Error) -> ControlError {
        let path = self.socket.clone();
        match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                ControlError::NotRunning(path)
            }
            io::ErrorKind::PermissionDenied => ControlError::Permission(path),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                ControlError::Silent(path, self.timeout)
            }
            _ => ControlError::Connect { path, source },
        }
    }

    fn broken(&self, source: FrameError) -> ControlError {
        let path = self.socket.clone();
        match &source {
            FrameError::Io(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                ) =>
            {
                ControlError::Silent(path, self.timeout)
            }
            // It ended with our question unread.
            FrameError::Io(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
                ) =>
            {
                ControlError::Closed(path)
            }
            _ => ControlError::Frame { path, source },
        }
    }
}
