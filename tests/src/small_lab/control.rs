//! Questions to a backend, on its control socket.

use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, bail};
use outram_wire::control::{
    CONTROL_VERSION, Envelope, Reply, Request, Status, read_frame, write_frame,
};

use super::LONG;
use crate::hermetic::command::wait_for;

/// What a refusal says where a server did not answer, which may be for a moment: its machine or ours was busy.
const NOT_NOW: [&str; 2] = ["out of reach", "did not answer in time"];

/// A connection to a backend's control socket.
pub struct Control(UnixStream);

impl Control {
    /// Connects to the backend of a run directory, which lets go of connections that ask nothing for long.
    pub fn open(dir: &Path) -> Result<Self> {
        let stream = UnixStream::connect(dir.join("control.sock"))?;
        stream.set_read_timeout(Some(LONG))?;
        Ok(Self(stream))
    }

    /// Asks something.
    pub fn ask(&mut self, request: Request) -> Result<Reply> {
        let version = CONTROL_VERSION;
        write_frame(&mut self.0, &Envelope { version, request })?;
        read_frame(&mut self.0)?.context("the backend closed the connection")
    }

    /// Asks something that must be done: again where it is refused for a server that did not answer.
    pub fn order(&mut self, request: Request) -> Result<()> {
        let is_for_now = |why: &str| NOT_NOW.iter().any(|words| why.contains(words));
        wait_for("servers to be in reach", LONG, || {
            match self.ask(request.clone())? {
                Reply::Done => Ok(Some(())),
                Reply::Refused(why) if is_for_now(&why) => Ok(None),
                other => bail!("{request:?} is not done: {other:?}"),
            }
        })
    }

    /// Has the backend replaced by another; it may end before all of its answer is read.
    pub fn restart(&mut self) -> Result<()> {
        match self.ask(Request::Restart) {
            Ok(Reply::Done) | Err(_) => Ok(()),
            Ok(other) => bail!("not done: {other:?}"),
        }
    }

    /// How the guest is.
    pub fn status(&mut self) -> Result<Status> {
        match self.ask(Request::Status)? {
            Reply::Status(status) => Ok(*status),
            other => bail!("expected a status, not {other:?}"),
        }
    }
}
