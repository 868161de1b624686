//! Starting the backend of one guest, and waiting until it is ready or says why not.
//!
//! With systemd the backend is a unit ([`crate::backend_unit`]); without, a detached child, whose
//! arguments are left in a file too: a backend that died is started again with them. Either way it does
//! not end with libvirtd, and the OOM killer leaves it alone: a guest's memory depends on it.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use outram_wire::control::{Phase, Status, is_supervised};
use outram_wire::incoming::Incoming;
use outram_wire::lost_pages::LostPages;
use outram_wire::seal::Seal;
use outram_wire::units::{Limit, PageSize, VmId};

use crate::backend_control::{BackendControl, ControlError};
use crate::backend_log::{BackendLog, LOG_FILE};
use crate::backend_unit::{self, ARGUMENTS_FILE, BackendUnit};
use crate::detached;
use crate::metadata::MemorySettings;
use crate::process::{self, move_out_of_libvirts_cgroup};
use crate::qemu_user::SocketUser;

/// How long a backend may take until it is ready. It connects to every server in that time, and bounds that itself;
/// the rest is for a host that is busy beyond measure.
pub const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// How long an earlier backend may take to end, giving its slabs and its guest's memory back.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a backend that ends may take between closing its sockets and removing them.
const END_MOMENT: Duration = Duration::from_millis(200);

/// How often we look whether something has changed.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The file in a run directory with the reason of a refusal or failure.
pub const ERROR_FILE: &str = "error";

/// The file with a domain's name, beside its run directory: known also while its backend does not
/// answer or has failed. (Within, it would keep the backend from removing the directory.)
pub fn name_file(run: &Path, vm: VmId) -> PathBuf {
    run.join(format!("{vm}.name"))
}

/// Everything a backend is started with.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The backend program.
    pub backend: PathBuf,
    /// The directory of all run directories.
    pub run: PathBuf,
    /// The guest.
    pub vm: VmId,
    /// Its libvirt name.
    pub name: String,
    /// Its RAM at start.
    pub ram_bytes: u64,
    /// What it may grow to by hot-plug.
    pub max_ram_bytes: u64,
    /// Size of its pages.
    pub page_size: PageSize,
    /// Its settings.
    pub settings: MemorySettings,
    /// Who may connect to the vhost-user socket.
    pub socket_user: SocketUser,
    /// Where the guest's memory arrives from, unless this is an ordinary start.
    pub incoming: Option<Incoming>,
    /// Whether it becomes a unit of systemd.
    pub systemd: bool,
    /// The backend's settings file, if not the usual one.
    pub config: Option<PathBuf>,
}

/// Why no backend is ready for a guest.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A file or directory of ours.
    #[error("cannot {what} {path}: {source}")]
    File {
        /// What was tried.
        what: &'static str,
        /// With which path.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A guest's memory depends on the backend that runs.
    #[error(
        "a backend (process {backend}) still serves this domain's earlier QEMU (process {qemu}): end that process first"
    )]
    StillServing {
        /// The backend's process.
        backend: u32,
        /// QEMU's process.
        qemu: u32,
    },
    /// No directory of a guest.
    #[error("{0} is no run directory of a guest: its name is no UUID")]
    NoRunDir(PathBuf),
    /// An earlier backend did not end.
    #[error(
        "an earlier backend of this domain (process {0}) did not end within {END_TIMEOUT:?}: look at its log and end it"
    )]
    DidNotEnd(u32),
    /// Its supervisor did not.
    #[error(
        "the supervisor of an earlier backend of this domain did not end within {END_TIMEOUT:?}: look at its log {0} and end it"
    )]
    StillSupervised(BackendLog),
    /// An earlier backend cannot be asked.
    #[error(
        "an earlier backend of this domain cannot be replaced: {0}; end its process ('pgrep -af outram-backend' names it), then start the domain again"
    )]
    Unusable(#[source] ControlError),
    /// The program could not be started.
    #[error("cannot start {path}: {source}")]
    Spawn {
        /// The program.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// systemd did not start the unit.
    #[error(
        "systemd did not start {unit}: {said} (where the unit is not installed, 'outram setup' does so)"
    )]
    Systemd {
        /// The unit.
        unit: BackendUnit,
        /// What it said.
        said: String,
    },
    /// The backend said why it cannot serve.
    #[error("{0}")]
    Refused(String),
    /// The backend ended without a reason.
    #[error("outram-backend ended ({status}) without being ready; its log {log} ends: {tail}")]
    Ended {
        /// Its exit status.
        status: String,
        /// Its log.
        log: BackendLog,
        /// The end of it.
        tail: String,
    },
    /// The backend is not ready in time.
    #[error("outram-backend was not ready within {READY_TIMEOUT:?}; its log {log} ends: {tail}")]
    NotReady {
        /// Its log.
        log: BackendLog,
        /// The end of it.
        tail: String,
    },
}

/// What was started, and can be watched and ended.
enum Started {
    Child(Child),
    Unit(BackendUnit),
}

impl Launch {
    /// The backend's arguments.
    pub fn arguments(&self) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["run".into()];
        let mut option = |name: &str, value: OsString| {
            let mut text = OsString::from(format!("--{name}="));
            text.push(value);
            arguments.push(text);
        };
        option("uuid", self.vm.to_string().into());
        option("name", self.name.clone().into());
        option("ram", self.ram_bytes.to_string().into());
        if self.max_ram_bytes > self.ram_bytes {
            option("max-ram", self.max_ram_bytes.to_string().into());
        }
        if self.page_size.is_huge() {
            option("page-size", self.page_size.bytes().to_string().into());
        }
        match self.settings.limit {
            Limit::LocalRatio(ratio) => option("local-ratio", ratio.to_string().into()),
            Limit::LocalBytes(bytes) => option("local", bytes.to_string().into()),
        }
        for server in &self.settings.servers {
            option("server", server.to_string().into());
        }
        if self.settings.seal != Seal::default() {
            option("seal", self.settings.seal.to_string().into());
        }
        if self.settings.lost_pages != LostPages::default() {
            option("lost-pages", self.settings.lost_pages.to_string().into());
        }
        for (name, value) in self.settings.tuning.named() {
            option(name, value.into());
        }
        option("run-dir", self.run.clone().into());
        option("socket-user", self.socket_user.to_string().into());
        if let Some(incoming) = self.incoming {
            option("incoming", incoming.to_string().into());
        }
        if let Some(disk) = &self.settings.disk {
            option("disk-size", disk.size_bytes.to_string().into());
            option("disk-key-file", self.disk_key_file().into());
        }
        if let Some(config) = &self.config {
            option("config", config.clone().into());
        }
        arguments
    }

    /// Where the backend finds the key to its disk: arguments and variables of a process or unit are
    /// for all to see.
    fn disk_key_file(&self) -> PathBuf {
        self.run_dir().join("disk-key")
    }

    fn leave_disk_key(&self) -> Result<(), LaunchError> {
        let path = self.disk_key_file();
        remove_if_there(&path)?;
        let Some(disk) = &self.settings.disk else {
            return Ok(());
        };
        let mut options = OpenOptions::new();
        let file = options.create_new(true).write(true).mode(0o600).open(&path);
        file.and_then(|mut file| writeln!(file, "{}", disk.key))
            .map_err(|source| file_error("write", &path, source))
    }

    fn run_dir(&self) -> PathBuf {
        self.run.join(self.vm.to_string())
    }

    /// Replaces what an earlier start left, starts the backend and waits until it is ready.
    pub fn start(&self) -> Result<(), LaunchError> {
        let run_dir = self.run_dir();
        end_earlier(&run_dir)?;
        if self.systemd {
            // Until then it may remove what is made here.
            BackendUnit::of(self.vm).wait_for_end();
        }
        self.prepare_run_dir(&run_dir)?;
        let (started, outcome) = match start_program(&self.backend, &run_dir, self.systemd) {
            Ok(mut started) => {
                let outcome = wait_until_ready(&run_dir, &mut started);
                (Some(started), outcome)
            }
            // Of what ended before it was started, systemd says no more than that.
            Err(error @ LaunchError::Systemd { .. }) => {
                let reason = reason(&run_dir).map(LaunchError::Refused);
                (None, Err(reason.unwrap_or(error)))
            }
            Err(error) => (None, Err(error)),
        };
        if outcome.is_err() {
            // Without its arguments it is not started again either.
            let _ = fs::remove_file(run_dir.join(ARGUMENTS_FILE));
            let _ = fs::remove_file(self.disk_key_file());
            if let Some(mut started) = started {
                started.end();
            }
            if self.systemd {
                // Until then something of it seems to be at work, and no word of this is left.
                BackendUnit::of(self.vm).wait_for_end();
            }
        }
        outcome
    }

    fn prepare_run_dir(&self, run_dir: &Path) -> Result<(), LaunchError> {
        make_run_dir(run_dir)?;
        for stale in ["vhost.sock", "control.sock", ERROR_FILE, LOG_FILE] {
            remove_if_there(&run_dir.join(stale))?;
        }
        self.leave_disk_key()?;
        let arguments = run_dir.join(ARGUMENTS_FILE);
        backend_unit::write_arguments(&arguments, &self.arguments())
            .map_err(|source| file_error("write", &arguments, source))?;
        let name = name_file(&self.run, self.vm);
        fs::write(&name, &self.name).map_err(|source| file_error("write", &name, source))
    }
}

fn start_program(backend: &Path, run_dir: &Path, systemd: bool) -> Result<Started, LaunchError> {
    match systemd {
        true => start_unit(run_dir),
        false => start_child(backend, run_dir),
    }
}

fn start_child(backend: &Path, run_dir: &Path) -> Result<Started, LaunchError> {
    let path = run_dir.join(LOG_FILE);
    let mut options = OpenOptions::new();
    let log = options.create(true).append(true).mode(0o600).open(&path);
    let log = log.map_err(|source| file_error("write", &path, source))?;
    let mut command = Command::new(backend);
    command.arg("launch").arg(run_dir.join(ARGUMENTS_FILE));
    let child = detached::spawn(&mut command, log).map_err(|source| LaunchError::Spawn {
        path: backend.to_owned(),
        source,
    })?;
    // Both are best effort: a container may forbid them, and the guest runs without.
    let _ = fs::write(format!("/proc/{}/oom_score_adj", child.id()), "-1000");
    move_out_of_libvirts_cgroup(child.id());
    Ok(Started::Child(child))
}

fn start_unit(run_dir: &Path) -> Result<Started, LaunchError> {
    let unit = unit_of(run_dir).ok_or_else(|| LaunchError::NoRunDir(run_dir.to_owned()))?;
    match unit.start() {
        Ok(()) => Ok(Started::Unit(unit)),
        Err(said) => Err(LaunchError::Systemd { unit, said }),
    }
}

fn unit_of(run_dir: &Path) -> Option<BackendUnit> {
    let name = run_dir.file_name()?.to_str()?;
    name.parse().ok().map(BackendUnit::of)
}

/// Starts a backend that died again, with the arguments that it had; returns once it serves its guest.
pub fn start_again(backend: &Path, run_dir: &Path, systemd: bool) -> Result<(), LaunchError> {
    if systemd && let Some(unit) = unit_of(run_dir) {
        unit.wait_for_end();
    }
    let mut started = start_program(backend, run_dir, systemd)?;
    wait_until_ready(run_dir, &mut started)
}

impl Started {
    /// The exit status, if it has ended.
    fn ended(&mut self) -> Option<String> {
        match self {
            Self::Child(child) => match child.try_wait() {
                Ok(Some(status)) => Some(status.to_string()),
                Ok(None) => None,
                Err(error) => Some(error.to_string()),
            },
            Self::Unit(unit) => unit.ended(),
        }
    }

    /// Ends what has not become ready: no guest depends on it yet.
    fn end(&mut self) {
        match self {
            Self::Child(child) => {
                // The supervisor and the pager, which would otherwise run on.
                detached::kill_session(child);
                let _ = child.wait();
            }
            Self::Unit(unit) => unit.kill(),
        }
    }
}

fn wait_until_ready(run_dir: &Path, started: &mut Started) -> Result<(), LaunchError> {
    let control = BackendControl::of(run_dir);
    let log = BackendLog::of(run_dir);
    let deadline = Instant::now() + READY_TIMEOUT;
    let mut next_look = Instant::now();
    while Instant::now() < deadline {
        if let Ok(status) = control.status() {
            // It may have been started before its parent had left libvirt's cgroup.
            move_out_of_libvirts_cgroup(status.backend_pid);
            return Ok(());
        }
        // Looking at a unit costs a process, so it is done more rarely than asking the socket.
        if Instant::now() >= next_look {
            next_look = Instant::now() + started.look_interval();
            if let Some(status) = started.ended() {
                return Err(reason(run_dir).map_or_else(
                    || LaunchError::Ended {
                        status,
                        tail: log.tail(),
                        log: log.clone(),
                    },
                    LaunchError::Refused,
                ));
            }
        }
        sleep(POLL_INTERVAL);
    }
    Err(reason(run_dir).map_or_else(
        || LaunchError::NotReady {
            tail: log.tail(),
            log: log.clone(),
        },
        LaunchError::Refused,
    ))
}

impl Started {
    fn look_interval(&self) -> Duration {
        match self {
            Self::Child(_) => POLL_INTERVAL,
            Self::Unit(_) => Duration::from_millis(300),
        }
    }
}

/// Leaves word of a start that was refused, for 'outram status', unless something of the guest's is at work
/// there. Best effort: the same text reaches whoever started it.
pub fn note_refusal(run: &Path, vm: VmId, name: &str, text: &str) {
    let run_dir = run.join(vm.to_string());
    let status = BackendControl::of(&run_dir).status();
    let is_free = matches!(status, Err(ControlError::NotRunning(_))) && !is_supervised(&run_dir);
    if is_free && make_run_dir(&run_dir).is_ok() && fs::write(name_file(run, vm), name).is_ok() {
        let _ = fs::write(run_dir.join(ERROR_FILE), format!("{text}\n"));
    }
}

fn make_run_dir(run_dir: &Path) -> Result<(), LaunchError> {
    let made = fs::DirBuilder::new()
        .recursive(true)
        .mode(0o711)
        .create(run_dir);
    made.map_err(|source| file_error("create", run_dir, source))
}

/// The reason that a backend left in its run directory.
pub fn reason(run_dir: &Path) -> Option<String> {
    let text = fs::read_to_string(run_dir.join(ERROR_FILE)).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// Whether a backend ended without removing its sockets, and nobody starts it again: all of it was
/// killed. One that is just about to remove them is given a moment.
pub fn is_abandoned(run_dir: &Path) -> bool {
    let control = BackendControl::of(run_dir);
    let dead_socket = || control.has_ended() && run_dir.join("control.sock").exists();
    dead_socket() && {
        sleep(END_MOMENT);
        dead_socket()
    }
}

/// Whether a backend that does not listen died, and its supervisor starts it again. One that is being
/// started for the first time, or ends, has no socket.
pub fn is_recovering(run_dir: &Path) -> bool {
    is_supervised(run_dir) && run_dir.join("control.sock").exists()
}

/// Whether nobody but [`start_again`] brings a backend back that gave this in place of an answer: all of it
/// was killed; or its supervisor was, and its pager stands still, which a new supervisor ends.
pub fn has_to_be_started_again(error: &ControlError, run_dir: &Path) -> bool {
    match error {
        ControlError::NotRunning(_) => is_abandoned(run_dir),
        ControlError::Silent(..) => !is_supervised(run_dir),
        _ => false,
    }
}

/// Clears up after a backend that was killed, once its guest has ended too: its state's tmpfs
/// holds host memory. What happened is left as the reason for 'outram status'.
pub fn clear_abandoned(run_dir: &Path) {
    if !is_abandoned(run_dir) {
        return;
    }
    // All of it is best effort: the next start replaces what is left.
    let _ = Command::new("umount")
        .arg("--lazy")
        .arg(run_dir.join("state"))
        .stdin(Stdio::null())
        .output();
    let _ = fs::remove_dir(run_dir.join("state"));
    for socket in ["control.sock", "vhost.sock"] {
        let _ = fs::remove_file(run_dir.join(socket));
    }
    if reason(run_dir).is_none() {
        let log = BackendLog::of(run_dir);
        let text = format!(
            "outram-backend ended while its guest ran; its log {log} ends: {}\n",
            log.tail()
        );
        let _ = fs::write(run_dir.join(ERROR_FILE), text);
    }
}

/// How an earlier backend is; `None` if there is none.
fn ask_earlier(control: &BackendControl) -> Result<Option<Box<Status>>, LaunchError> {
    let deadline = Instant::now() + END_TIMEOUT;
    loop {
        match control.status() {
            Ok(status) => return Ok(Some(status)),
            Err(ControlError::NotRunning(_)) => return Ok(None),
            // It ended between our call and its answer: called again, it is gone.
            Err(ControlError::Closed(_)) if Instant::now() < deadline => sleep(POLL_INTERVAL),
            // It cannot be told whether a guest depends on it, so it is left alone.
            Err(error) => return Err(LaunchError::Unusable(error)),
        }
    }
}

/// Ends a backend of an earlier start, unless a QEMU still lives on it.
fn end_earlier(run_dir: &Path) -> Result<(), LaunchError> {
    let control = BackendControl::of(run_dir);
    let deadline = Instant::now() + END_TIMEOUT;
    loop {
        // One that is still starting can be asked only later.
        if let Some(status) = ask_earlier(&control)? {
            end_pager(&control, &status)?;
        }
        // Its supervisor goes last, and takes with it what is in the directory by then.
        if !is_supervised(run_dir) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(LaunchError::StillSupervised(BackendLog::of(run_dir)));
        }
        sleep(POLL_INTERVAL);
    }
}

fn end_pager(control: &BackendControl, status: &Status) -> Result<(), LaunchError> {
    if let Some(qemu) = living_qemu(status) {
        return Err(LaunchError::StillServing {
            backend: status.backend_pid,
            qemu,
        });
    }
    if status.phase != Phase::Ending {
        match control.stop() {
            Ok(()) | Err(ControlError::NotRunning(_) | ControlError::Closed(_)) => {}
            // It may have noticed its guest's end in between: then it ends by itself.
            Err(ControlError::Refused(_)) => {}
            Err(error) => return Err(LaunchError::Unusable(error)),
        }
    }
    let deadline = Instant::now() + END_TIMEOUT;
    while process::is_alive(status.backend_pid) {
        if Instant::now() >= deadline {
            return Err(LaunchError::DidNotEnd(status.backend_pid));
        }
        sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// The QEMU that a backend serves, if it runs.
fn living_qemu(status: &Status) -> Option<u32> {
    status.qemu_pid.filter(|pid| process::is_alive(*pid))
}

fn remove_if_there(path: &Path) -> Result<(), LaunchError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(file_error("remove", path, source))
        }
        _ => Ok(()),
    }
}

fn file_error(what: &'static str, path: &Path, source: io::Error) -> LaunchError {
    LaunchError::File {
        what,
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use outram_wire::tuning::Tuning;
    use outram_wire::units::LocalRatio;
    use std::fs::File;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Has a run directory, which is there, look as one that a supervisor is at work in until this is dropped.
    pub(crate) fn supervised(run_dir: &Path) -> File {
        let file = File::open(run_dir).expect("it is there");
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)
            .expect("nobody else has it");
        file
    }

    #[test]
    fn a_start_waits_for_the_supervisor_of_the_one_before() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = supervised(dir.path());
        let has_ended = Arc::new(AtomicBool::new(false));
        let supervisor = std::thread::spawn({
            let has_ended = has_ended.clone();
            move || {
                sleep(10 * POLL_INTERVAL);
                has_ended.store(true, Ordering::SeqCst);
                drop(file);
            }
        });
        end_earlier(dir.path()).expect("it ends soon");
        assert!(has_ended.load(Ordering::SeqCst));
        supervisor.join().expect("no panic");
    }

    #[test]
    fn a_backend_is_started_with_these_arguments() {
        let launch = Launch {
            backend: "/usr/bin/outram-backend".into(),
            run: "/run/outram".into(),
            vm: VmId(uuid::Uuid::from_u128(7)),
            name: "100% $mine".to_owned(),
            page_size: PageSize::HUGE,
            ram_bytes: 1 << 30,
            max_ram_bytes: 1 << 31,
            settings: MemorySettings {
                limit: Limit::LocalRatio(LocalRatio::new(0.5).expect("a ratio")),
                servers: Vec::new(),
                seal: Seal::Off,
                lost_pages: LostPages::Poison,
                tuning: Tuning {
                    granularity: "64KiB".parse().ok(),
                    workers: "4".parse().ok(),
                    queue_depth: "16".parse().ok(),
                    compressed_share: "0.25".parse().ok(),
                },
                disk: None,
                added: Vec::new(),
            },
            socket_user: SocketUser {
                user: "libvirt-qemu".to_owned(),
                group: "kvm".to_owned(),
            },
            incoming: Some(Incoming::Restore),
            systemd: true,
            config: Some("/etc/other.toml".into()),
        };
        let arguments = launch.arguments();
        let text: Vec<String> = arguments
            .iter()
            .map(|argument| argument.to_string_lossy().into_owned())
            .collect();
        assert_eq!(
            text,
            [
                "run",
                "--uuid=00000000-0000-0000-0000-000000000007",
                "--name=100% $mine",
                "--ram=1073741824",
                "--max-ram=2147483648",
                "--page-size=2097152",
                "--local-ratio=0.5",
                "--seal=off",
                "--lost-pages=poison",
                "--granularity=64KiB",
                "--workers=4",
                "--queue-depth=16",
                "--compressed-share=0.25",
                "--run-dir=/run/outram",
                "--socket-user=libvirt-qemu:kvm",
                "--incoming=restore",
                "--config=/etc/other.toml",
            ]
        );
    }
}
