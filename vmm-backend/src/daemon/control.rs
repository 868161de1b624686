//! The control socket: `outram tune`, `status`, `detach --live`, and the hook's `stop`.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context;
use outram_wire::causes::with_causes;
use outram_wire::control::{
    CONTROL_VERSION, Envelope, FrameError, Reply, Request, is_supervised, read_frame, write_frame,
};

use super::guest::Guest;
use super::metrics;
use super::stage::{Daemon, Stage};
use crate::pager::Course;

/// A client that takes longer to say or hear something is left.
const PATIENCE: Duration = Duration::from_secs(10);

/// Connections at once; root's tools need one or two.
const MAX_CONNECTIONS: usize = 32;

/// Starts answering.
pub(super) fn serve(listener: UnixListener, daemon: &Arc<Daemon>) -> anyhow::Result<()> {
    let daemon = Arc::clone(daemon);
    let connections = Arc::new(AtomicUsize::new(0));
    let work = move || {
        for connection in listener.incoming() {
            let Ok(stream) = connection else {
                std::thread::sleep(Duration::from_millis(100));
                continue;
            };
            let (daemon, open) = (Arc::clone(&daemon), Arc::clone(&connections));
            if open.fetch_add(1, Ordering::AcqRel) >= MAX_CONNECTIONS {
                open.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            let talk = move || {
                if let Err(error) = converse(stream, &daemon) {
                    tracing::debug!(%error, "a control connection failed");
                }
                open.fetch_sub(1, Ordering::AcqRel);
            };
            if let Err(error) = std::thread::Builder::new()
                .name("control".to_owned())
                .spawn(talk)
            {
                tracing::warn!(%error, "a control connection is not answered");
                connections.fetch_sub(1, Ordering::AcqRel);
            }
        }
    };
    std::thread::Builder::new()
        .name("control".to_owned())
        .spawn(work)
        .context("starting a thread")?;
    Ok(())
}

/// A guest's memory on its way home for a client: it stays away where that client goes.
struct Homing(Arc<Guest>);

impl Drop for Homing {
    fn drop(&mut self) {
        self.0.pager.stay();
    }
}

fn converse(mut stream: UnixStream, daemon: &Daemon) -> Result<(), FrameError> {
    let mut homing = None;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    loop {
        let reply = match read_frame::<Envelope>(&mut stream) {
            Ok(None) => return Ok(()),
            Ok(Some(envelope)) => answer(envelope, daemon, &mut homing),
            Err(error @ (FrameError::Malformed(_) | FrameError::TooLong(_))) => {
                // What follows such a frame cannot be told from its rest.
                let reply = Reply::Refused(format!(
                    "{error}: expected a request of version {CONTROL_VERSION}"
                ));
                return write_frame(&mut stream, &reply);
            }
            Err(error) => return Err(error),
        };
        write_frame(&mut stream, &reply)?;
    }
}

fn answer(envelope: Envelope, daemon: &Daemon, homing: &mut Option<Homing>) -> Reply {
    if envelope.version != CONTROL_VERSION {
        return Reply::Refused(format!(
            "control messages of version {} are not understood: this backend speaks version {CONTROL_VERSION}",
            envelope.version
        ));
    }
    match (envelope.request, daemon.stage()) {
        (Request::Status, _) => Reply::Status(Box::new(daemon.status())),
        (Request::Metrics, _) => Reply::Metrics(metrics::page(daemon)),
        (Request::Tune(limit), Stage::Serving(guest)) => match guest.pager.tune(limit) {
            Ok(()) => {
                tracing::info!(%limit, "tuned");
                Reply::Done
            }
            Err(error) => Reply::Refused(with_causes(&error)),
        },
        (Request::SetTuning(tuning), Stage::Serving(guest)) => {
            match guest.pager.set_tuning(&tuning) {
                Ok(()) => {
                    tracing::info!(settings = ?tuning.named().collect::<Vec<_>>(), "tuned");
                    Reply::Done
                }
                Err(error) => Reply::Refused(with_causes(&error)),
            }
        }
        (Request::Tune(_) | Request::SetTuning(_), _) => {
            Reply::Refused("there is no guest to tune: it has not started, or has ended".into())
        }
        (Request::BringHome, Stage::Serving(guest)) => match guest.pager.bring_home() {
            Ok(()) => {
                tracing::info!("bringing the guest's memory home");
                *homing = Some(Homing(guest));
                Reply::Done
            }
            Err(error) => Reply::Refused(with_causes(&error)),
        },
        (Request::Release, Stage::Serving(guest)) if homing.is_some() => match guest.release() {
            Ok(()) => Reply::Done,
            Err(error) => Reply::Refused(with_causes(&error)),
        },
        (Request::Release, Stage::Serving(_)) => {
            Reply::Refused("the guest's memory was not asked home on this connection".into())
        }
        (Request::BringHome | Request::Release, _) => {
            Reply::Refused("there is no guest to detach: it has not started, or has ended".into())
        }
        (Request::Restart, Stage::Serving(_)) if !is_supervised(&daemon.config.dir) => {
            Reply::Refused("nobody would start this process again: there is no supervisor".into())
        }
        (Request::Restart, Stage::Serving(guest)) if guest.pager.course() == Course::Serving => {
            // The next process would not come up with settings that are no good, and the guest wait for it.
            match daemon.config.check_again() {
                Ok(()) => {
                    daemon.asked_to_start_again.store(true, Ordering::Relaxed);
                    Reply::Done
                }
                Err(error) => Reply::Refused(format!(
                    "the next process would refuse this host's settings: {}; correct them first",
                    with_causes(&error)
                )),
            }
        }
        (Request::Restart, Stage::Serving(_)) => {
            Reply::Refused("the guest is being detached: let that end first".into())
        }
        (Request::Restart, _) => Reply::Refused(
            "there is no guest to go on with: it has not started, or has ended".into(),
        ),
        (Request::Stop, Stage::Serving(guest))
            if !guest.vmm.has_ended() && !guest.may_be_left() =>
        {
            Reply::Refused(format!(
                "QEMU (process {}) depends on this backend for its memory: shut the guest down instead",
                guest.vmm.pid
            ))
        }
        (Request::Stop, _) => {
            daemon.asked_to_stop.store(true, Ordering::Relaxed);
            Reply::Done
        }
    }
}
