//! Asking a backend over its control socket, with a bound on how long that may take.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use outram_wire::control::{
    CONTROL_VERSION, Envelope, FrameError, Reply, Request, Status, connect, is_supervised,
    read_frame, write_frame,
};
use outram_wire::tuning::Tuning;
use outram_wire::units::Limit;

/// How long a backend may take to answer what it has to ask nobody else for: a longer silence means
/// that it does not run.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a new limit may take: servers are asked for more first, one after another, and one that has just
/// gone is waited for for nine seconds.
const TUNE_TIMEOUT: Duration = Duration::from_secs(60);

/// How long the release of a guest's memory may take: half a minute for what the disk has in work,
/// as much for closing the userfaultfds in QEMU, and a little for the rest.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(75);

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

    /// Whether all of the backend has ended. Its supervisor goes last: it unmounts the state.
    pub fn has_ended(&self) -> bool {
        let run_dir = self.socket.parent();
        let is_gone = matches!(self.status(), Err(ControlError::NotRunning(_)));
        is_gone && !run_dir.is_some_and(is_supervised)
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
        self.patient().command(Request::Tune(limit))
    }

    /// Has the guest's memory moved so from now on.
    pub fn set_tuning(&self, tuning: Tuning) -> Result<(), ControlError> {
        self.patient().command(Request::SetTuning(tuning))
    }

    /// For what servers may be asked for first.
    fn patient(&self) -> Self {
        self.clone().with_timeout(TUNE_TIMEOUT)
    }

    /// Has the backend's process replaced by one of the program that is installed now. That it has
    /// been asked is all that an answer tells.
    pub fn restart(&self) -> Result<(), ControlError> {
        match self.command(Request::Restart) {
            // It ended before we had read all of its answer.
            Err(ControlError::Closed(_)) => Ok(()),
            other => other,
        }
    }

    /// Ends the backend; refused while a guest's memory depends on it.
    pub fn stop(&self) -> Result<(), ControlError> {
        self.command(Request::Stop)
    }

    /// Has the backend bring every page home, for as long as what is returned lives.
    pub fn bring_home(&self) -> Result<Homecoming, ControlError> {
        let mut homecoming = Homecoming {
            stream: self.open()?,
            control: self.clone(),
        };
        // A limit that is changed at this moment comes first.
        homecoming.wait_at_most(TUNE_TIMEOUT)?;
        self.done(self.ask_on(&homecoming.stream, Request::BringHome)?)?;
        homecoming.wait_at_most(self.timeout)?;
        Ok(homecoming)
    }

    fn command(&self, request: Request) -> Result<(), ControlError> {
        self.done(self.ask(request)?)
    }

    fn done(&self, reply: Reply) -> Result<(), ControlError> {
        match reply {
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
        self.ask_on(&self.open()?, request)
    }

    fn open(&self) -> Result<UnixStream, ControlError> {
        connect(&self.socket, self.timeout).map_err(|e| self.not_connected(e))
    }

    fn ask_on(&self, mut stream: &UnixStream, request: Request) -> Result<Reply, ControlError> {
        let envelope = Envelope {
            version: CONTROL_VERSION,
            request,
        };
        write_frame(&mut stream, &envelope).map_err(|e| self.broken(e))?;
        read_frame(&mut stream)
            .map_err(|e| self.broken(e))?
            .ok_or_else(|| ControlError::Closed(self.socket.clone()))
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

/// A guest's memory on its way home. Where this is dropped before [`Homecoming::release`], or its
/// process ends, the backend goes on serving the guest at its limit.
#[derive(Debug)]
pub struct Homecoming {
    control: BackendControl,
    stream: UnixStream,
}

impl Homecoming {
    /// How far it has come. To be asked at least every few seconds: the backend takes a longer
    /// silence for the end of whoever asked.
    pub fn status(&self) -> Result<Box<Status>, ControlError> {
        match self.control.ask_on(&self.stream, Request::Status)? {
            Reply::Status(status) => Ok(status),
            other => Err(self.control.refusal(other)),
        }
    }

    fn wait_at_most(&mut self, timeout: Duration) -> Result<(), ControlError> {
        self.control.timeout = timeout;
        let set = self.stream.set_read_timeout(Some(timeout));
        set.map_err(|e| self.control.broken(e.into()))
    }

    /// Leaves the guest's memory to the kernel, now that every page is home.
    pub fn release(mut self) -> Result<(), ControlError> {
        self.wait_at_most(RELEASE_TIMEOUT)?;
        let reply = self.control.ask_on(&self.stream, Request::Release)?;
        self.control.done(reply)
    }
}
