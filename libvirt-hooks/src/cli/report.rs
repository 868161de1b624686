//! What is known of each guest: its backend's own report, or why there is none.

use std::time::Duration;
use std::{fs, thread};

use anyhow::{Context, Result, anyhow, bail};
use outram_wire::control::{Phase, Status, is_supervised};
use outram_wire::units::VmId;
use serde::Serialize;

use crate::backend_control::{BackendControl, ControlError};
use crate::backend_log::BackendLog;
use crate::host::Paths;
use crate::launch;
use crate::libvirt::{Libvirt, ask_within};

/// How long libvirt may take for what can be done without it, or told of.
const LIBVIRT_TIMEOUT: Duration = Duration::from_secs(5);

/// A guest with a run directory, or a domain known to libvirt.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Its UUID.
    pub vm: VmId,
    /// Its name when it was started, or its UUID if that was not noted.
    pub name: String,
    /// Its backend.
    pub control: BackendControl,
}

/// In one word, how a guest's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The backend waits for QEMU, or is being started.
    Waiting,
    /// All is well.
    Serving,
    /// Faults wait: for a server out of reach, or for room while nothing may be evicted.
    Stalled,
    /// A page is lost and the guest stands still where it needs it.
    Stopped,
    /// Its memory comes home, for a live detach.
    Homing,
    /// Its memory is the kernel's again; its disk is still there.
    Released,
    /// The backend refused the guest.
    Refused,
    /// The guest ended, its memory is being given back.
    Ending,
    /// The backend does not answer.
    Silent,
    /// The backend died and is being started again: its guest waits a moment.
    Recovering,
    /// All of the backend was killed: whoever needs its memory stands still.
    Gone,
    /// The last start failed.
    Failed,
    /// No backend runs.
    Off,
}

/// One guest's report, as `outram status --json` prints it.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The guest's UUID.
    pub uuid: String,
    /// Its name.
    pub name: String,
    /// How it is.
    pub state: State,
    /// Why, where it is not well.
    pub error: Option<String>,
    /// Everything its backend says, if it answers.
    pub status: Option<Box<Status>>,
}

/// The report of one guest.
pub fn report(guest: &Guest, paths: &Paths) -> Report {
    let run_dir = run_dir(paths, guest.vm);
    let left = launch::reason(&run_dir);
    let (state, error, status) = match guest.control.status() {
        Ok(status) => (
            state_of(status.phase),
            unsupervised(&status, guest, paths),
            Some(status),
        ),
        Err(ControlError::NotRunning(_)) => match left {
            Some(reason) => (State::Failed, Some(reason), None),
            None if launch::is_abandoned(&run_dir) => {
                let log = BackendLog::of(&run_dir);
                let reason = format!(
                    "if the guest still runs, 'outram restart' lets it go on; the log is {log}"
                );
                (State::Gone, Some(reason), None)
            }
            None if launch::is_recovering(&run_dir) => {
                let reason = "its backend ended and is being started again";
                (State::Recovering, Some(reason.to_owned()), None)
            }
            // It listens once all of its servers have answered.
            None if is_supervised(&run_dir) => {
                let reason = "its backend is being started, or ends";
                (State::Waiting, Some(reason.to_owned()), None)
            }
            None => (State::Off, None, None),
        },
        Err(error) => (State::Silent, Some(error.to_string()), None),
    };
    Report {
        uuid: guest.vm.to_string(),
        name: status
            .as_ref()
            .map_or_else(|| guest.name.clone(), |status| status.name.clone()),
        error: error.or_else(|| status.as_ref().and_then(|status| status.detail.clone())),
        state,
        status,
    }
}

fn state_of(phase: Phase) -> State {
    match phase {
        Phase::Waiting => State::Waiting,
        Phase::Serving => State::Serving,
        Phase::Stalled => State::Stalled,
        Phase::Stopped => State::Stopped,
        Phase::Homing => State::Homing,
        Phase::Released => State::Released,
        Phase::Refused => State::Refused,
        Phase::Ending => State::Ending,
    }
}

/// What is wrong where a guest depends on a backend whose supervisor has died.
fn unsupervised(status: &Status, guest: &Guest, paths: &Paths) -> Option<String> {
    let is_needed = !matches!(
        status.phase,
        Phase::Waiting | Phase::Released | Phase::Refused | Phase::Ending
    );
    (is_needed && !is_supervised(&run_dir(paths, guest.vm))).then(|| {
        format!(
            "the supervisor of its backend has died: nobody would start the backend again; 'outram restart {}' puts that right",
            guest.name
        )
    })
}

/// A guest's run directory.
pub(super) fn run_dir(paths: &Paths, vm: VmId) -> std::path::PathBuf {
    paths.run.join(vm.to_string())
}

/// All guests with a run directory, by name.
pub fn all_guests(paths: &Paths) -> Result<Vec<Guest>> {
    let entries = match fs::read_dir(&paths.run) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            bail!("you may not read {}: run this as root", paths.run.display())
        }
        Err(error) => {
            return Err(error).with_context(|| format!("cannot read {}", paths.run.display()));
        }
    };
    let mut guests = Vec::new();
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot read {}", paths.run.display()))?;
        let name = entry.file_name();
        if let Some(vm) = name.to_str().and_then(|name| name.parse().ok()) {
            guests.push(guest_of(paths, vm));
        }
    }
    guests.sort_by(|a, b| (&a.name, a.vm).cmp(&(&b.name, b.vm)));
    Ok(guests)
}

fn guest_of(paths: &Paths, vm: VmId) -> Guest {
    let name = fs::read_to_string(launch::name_file(&paths.run, vm));
    Guest {
        vm,
        name: name.unwrap_or_else(|_| vm.to_string()),
        control: BackendControl::of(&run_dir(paths, vm)),
    }
}

/// The reports of several guests, asked at once: those that do not answer cost their time-out
/// only once.
pub fn reports(guests: &[Guest], paths: &Paths) -> Vec<Report> {
    thread::scope(|scope| {
        let asked: Vec<_> = guests
            .iter()
            .map(|guest| scope.spawn(|| report(guest, paths)))
            .collect();
        asked
            .into_iter()
            .filter_map(|report| report.join().ok())
            .collect()
    })
}

/// Finds a guest by name or UUID: in the run directories first, then, with a bound on the time
/// that may take, in libvirt.
pub fn find_guest(name: &str, uri: Option<&str>, paths: &Paths) -> Result<Guest> {
    let wanted: Option<VmId> = name.parse().ok();
    let guests = all_guests(paths)?;
    let mut matching = guests
        .into_iter()
        .filter(|guest| guest.name == name || Some(guest.vm) == wanted);
    let noted = match (matching.next(), matching.next()) {
        (Some(guest), None) if Some(guest.vm) == wanted || is_there(&guest, paths) => {
            return Ok(guest);
        }
        // Of a start that was refused, perhaps: the domain may have another name by now, or this name
        // another domain.
        (Some(guest), None) => Some(guest),
        _ => None,
    };
    match (look_up(name.to_owned(), uri.map(str::to_owned)), noted) {
        (Ok(vm), _) => Ok(Guest {
            name: name.to_owned(),
            ..guest_of(paths, vm)
        }),
        (Err(_), Some(noted)) => Ok(noted),
        (Err(error), None) => Err(error),
    }
}

/// Whether a guest has a backend, or waits for one that was killed.
fn is_there(guest: &Guest, paths: &Paths) -> bool {
    let status = guest.control.status();
    !matches!(status, Err(ControlError::NotRunning(_)))
        || launch::is_abandoned(&run_dir(paths, guest.vm))
}

fn look_up(name: String, uri: Option<String>) -> Result<VmId> {
    within_time(move || {
        Libvirt::connect(uri.as_deref())
            .and_then(|libvirt| libvirt.domain(&name))
            .and_then(|domain| domain.vm_id())
    })
    .context("the domain is not found by its name; by its UUID it needs no libvirt while its backend runs")?
    .map_err(|error| anyhow!(error))
}

/// Asks libvirt in a thread of its own, so that a libvirt that hangs does not hang us.
pub(super) fn within_time<T: Send + 'static>(
    ask: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    ask_within(LIBVIRT_TIMEOUT, ask)?
        .with_context(|| format!("libvirt gave no answer within {LIBVIRT_TIMEOUT:?}: it may hang"))
}
