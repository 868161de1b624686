//! The process that `run` is: it starts the guest's pager, a process of its own, and starts it again
//! where it died and its guest lives. Nothing else, so that hardly anything can go wrong in it.
//!
//! It alone has power over QEMU, and lends it to the pager ([`super::lender`]).
//!
//! A supervisor that dies is started again by systemd, or by `outram restart`. It then finds a pager at
//! work that nobody runs errands for, and replaces it. Where both were killed, it starts a pager.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::Context;
use outram_wire::causes::with_causes;
use outram_wire::control::{
    CONTROL_VERSION, Envelope, Reply, Request, connect, read_frame, write_frame,
};
use outram_wire::units::VmId;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::config::{Config, Flags};
use super::lender::Lender;
use super::run_dir::RunDir;
use super::{leave_reason, prepare, surroundings};
use crate::crash_points;
use crate::handover::{self, Powers, powers};
use crate::pager::{DISK_KEY, Orphan};

/// The exit status of a pager that wants to be started again: sysexits' "temporary failure".
pub(super) const START_AGAIN: i32 = 75;

/// Environment variable by which a supervisor that becomes another program passes on how often its
/// guest was taken over.
const TAKEOVERS: &str = "OUTRAM_TAKEOVERS";

/// A pager that lives this long has not died of its start.
const LONG: Duration = Duration::from_secs(10);

/// The pause before a pager is started again, doubled each time that it dies of its start. The first
/// time there is none.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Pause before settings that are no good are looked at again.
const SETTINGS_PAUSE: Duration = Duration::from_secs(1);

/// How often the lock of a guest's directory is tried anew, and after which pause: for some seconds, for whoever
/// looks may have to wait for a processor.
const LOOKERS: u32 = 300;
const LOOKERS_PAUSE: Duration = Duration::from_millis(10);

/// Pagers that may fail in a row where QEMU waits for one that is to take it over.
const MOST_RESCUES: u32 = 10;

/// How long a pager that is at work already may take to say that it ends.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// This program, as it is installed now and as it runs here.
struct Programs {
    installed: PathBuf,
    running: PathBuf,
}

impl Programs {
    /// The one that is installed, so that an upgrade is taken up; after it was of no use, the one that
    /// runs: it may know what the guest's last pager left where another does not, or be the last that
    /// there is.
    fn choose(&self, useless: u32) -> PathBuf {
        let installed = useless.is_multiple_of(2) && self.installed.exists();
        let chosen = if installed {
            &self.installed
        } else {
            &self.running
        };
        chosen.clone()
    }
}

/// What a supervisor hears of.
enum Event {
    /// The pager ended; how is not known of one that another supervisor started.
    Ended(Option<ExitStatus>),
    Signal(i32),
}

/// A pager whose end is waited for.
enum Awaited {
    Child(Child),
    /// One that another supervisor started.
    Process(OwnedFd),
}

struct Supervisor<'a> {
    flags: &'a Flags,
    /// The arguments after `run`.
    arguments: &'a [OsString],
    programs: Programs,
    dir: PathBuf,
    events: Receiver<Event>,
    /// To the thread that waits for the pager's end.
    awaited: Sender<Awaited>,
    lender: Lender,
    pager: Option<Pid>,
    takeovers: u32,
    /// Starts in a row that led to nothing.
    useless: u32,
    /// When a pager was last started.
    started: Instant,
    /// Pagers that were started for a QEMU that waits for one, and of which there is no record.
    rescues: u32,
    /// The key of its disk, once they were.
    disk_key: Option<Vec<u8>>,
}

/// Runs the backend of one guest until that guest has ended. `arguments` are those after `run`.
pub fn supervise(flags: &Flags, arguments: &[OsString]) -> anyhow::Result<ExitCode> {
    let likely = flags.likely_dir();
    let dir = Config::dir_of(flags)
        .map_err(anyhow::Error::from)
        .inspect_err(|error| leave_reason(&likely, error))?;
    RunDir::make(&dir)?;
    let _lock = lock(&dir)?;
    let (sender, events) = mpsc::channel();
    hear_signals(sender.clone()).context("registering for signals")?;
    let awaited = await_ends(sender).context("starting a thread")?;
    surroundings::prepare();
    let lender = Lender::new(&dir, flags.socket_user.as_deref());
    let installed = std::env::current_exe().context("finding this program")?;
    let mut supervisor = Supervisor {
        flags,
        arguments,
        programs: Programs {
            installed,
            running: "/proc/self/exe".into(),
        },
        dir,
        events,
        awaited,
        lender,
        pager: None,
        takeovers: 0,
        useless: 0,
        started: Instant::now(),
        rescues: 0,
        disk_key: None,
    };
    supervisor.run()
}

impl Supervisor<'_> {
    fn run(&mut self) -> anyhow::Result<ExitCode> {
        match self.find_pager() {
            Some(pager) => self.replace(pager)?,
            None if self.has_ended() => {
                tracing::info!("the guest has ended meanwhile");
                return Ok(self.conclude(None));
            }
            None => {
                let told = std::env::var(TAKEOVERS)
                    .ok()
                    .and_then(|text| text.parse().ok());
                // One that was not asked to be started again, and has a guest, had died.
                let lives = self.guest_lives();
                self.takeovers = told.unwrap_or_else(|| u32::from(lives));
                if !lives {
                    prepare(self.flags.clone())
                        .inspect_err(|error| leave_reason(&self.dir, error))?;
                }
                if let Err(error) = self.start(self.programs.choose(0)) {
                    if !self.guest_lives() {
                        return Err(error);
                    }
                    // Nobody starts a supervisor again that gave up.
                    tracing::error!("{error:#}");
                    if let Some(concluded) = self.start_another(None) {
                        return Ok(concluded);
                    }
                }
            }
        }
        self.started = Instant::now();
        loop {
            let status = match self.events.recv() {
                Ok(Event::Signal(signal)) => {
                    self.pass_on(signal);
                    continue;
                }
                Ok(Event::Ended(status)) => status,
                Err(error) => return Err(error).context("both threads of the supervisor ended"),
            };
            self.pager = None;
            let code = status.and_then(|status| status.code());
            if code == Some(START_AGAIN) {
                // Where that fails, the guest goes on with the program that runs.
                let error = self.become_anew();
                tracing::error!(%error, "the installed program cannot be started");
            }
            if let Some(concluded) = self.start_another(status) {
                return Ok(concluded);
            }
        }
    }

    /// Starts a pager in place of one that ended so, if it is known how, until that is done; if there is no guest
    /// any more, how the supervisor ends.
    fn start_another(&mut self, status: Option<ExitStatus>) -> Option<ExitCode> {
        let gave_up = status.is_some_and(|status| status.code().is_some());
        loop {
            let has_guest = self.guest_lives();
            if !has_guest && !self.is_waited_for(status) {
                return Some(self.conclude(status));
            }
            let was_useful = self.started.elapsed() > LONG;
            self.useless = if was_useful { 0 } else { self.useless + 1 };
            tracing::error!(
                status = %Described(status),
                "the pager ended though its guest lives: it is started again"
            );
            self.pause(self.useless);
            // Of which there is no record, it is handed over as at first.
            self.takeovers += u32::from(has_guest);
            // One that was killed did nothing wrong; one that gave up may know no better.
            let refused = if gave_up { self.useless } else { 0 };
            self.started = Instant::now();
            let prepared = match has_guest {
                true => Ok(()),
                false => self.prepare_anew(),
            };
            match prepared.and_then(|()| self.start(self.programs.choose(refused))) {
                Ok(()) => return None,
                Err(error) => tracing::error!("{error:#}"),
            }
        }
    }

    /// Empties the state that a pager has begun to use. It stays mounted, for others see it elsewhere.
    fn prepare_anew(&mut self) -> anyhow::Result<()> {
        self.rescues += 1;
        let state = RunDir::at(&self.dir).state();
        if let Some(file) = &self.flags.disk_key_file {
            if self.disk_key.is_none() {
                self.disk_key = fs::read(state.join(DISK_KEY)).ok();
            }
            if let Some(key) = &self.disk_key {
                // Where each pager takes it from.
                let mut options = File::options();
                let options = options.create(true).write(true).truncate(true).mode(0o600);
                let written = options.open(file).and_then(|mut file| file.write_all(key));
                written.context("keeping the key of its disk")?;
            }
        }
        let files = fs::read_dir(&state).context("looking at what it left")?;
        for file in files {
            fs::remove_file(file?.path()).context("removing what it left")?;
        }
        prepare(self.flags.clone())
    }

    fn start(&mut self, program: PathBuf) -> anyhow::Result<()> {
        let (ours, theirs) = powers::pair().context("making a socket")?;
        self.lender.lend(ours).context("starting a thread")?;
        let mut command = Command::new(&program);
        if self.takeovers + self.useless > 0 {
            // A test has one pager die.
            command.env_remove(crash_points::VARIABLE);
        }
        let child = command
            .stdin(theirs)
            .arg("page")
            .args(self.arguments)
            .arg(format!("--supervisor={}", std::process::id()))
            .env(powers::OPEN_FILES, powers::FOLIOS)
            .arg(format!("--takeovers={}", self.takeovers))
            .env_remove(TAKEOVERS)
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        let pid = Pid::from_child(&child);
        self.lender.note_pager(pid.as_raw_nonzero().get());
        self.pager = Some(pid);
        let sent = self.awaited.send(Awaited::Child(child));
        sent.context("the thread that waits for the pager's end is gone")
    }

    /// The pager that serves the guest already, once another could take its place: it is left alone while the
    /// settings are no good.
    fn find_pager(&mut self) -> Option<AtWork> {
        let mut told = String::new();
        loop {
            self.pager = None;
            let found = AtWork::find(&self.dir, self.flags.uuid)?;
            let Err(error) = Config::check(self.flags) else {
                return Some(found);
            };
            let reason = with_causes(&error);
            if reason != told {
                tracing::error!(
                    "the pager at work goes on alone until this is corrected: {reason}"
                );
                told = reason;
            }
            self.pager = Some(found.pid);
            if let Ok(Event::Signal(signal)) = self.events.recv_timeout(SETTINGS_PAUSE) {
                self.pass_on(signal);
            }
        }
    }

    /// Replaces a pager that another supervisor started: nobody runs its errands any more.
    fn replace(&mut self, pager: AtWork) -> anyhow::Result<()> {
        let pid = pager.pid.as_raw_nonzero();
        tracing::warn!(%pid, "the supervisor had died: the pager that is at work is replaced");
        if let Err(error) = ask_to_restart(pager.control) {
            tracing::warn!("that pager is killed, for it does not end by itself: {error:#}");
            match pidfd_send_signal(&pager.process, Signal::KILL) {
                // It has ended meanwhile.
                Ok(()) | Err(Errno::SRCH) => {}
                Err(error) => return Err(error).context("killing the pager at work"),
            }
            self.takeovers += 1;
        }
        self.pager = Some(pager.pid);
        let sent = self.awaited.send(Awaited::Process(pager.process));
        sent.context("the thread that waits for the pager's end is gone")
    }

    fn pass_on(&self, signal: i32) {
        let signal = Signal::from_named_raw(signal);
        if let (Some(pager), Some(signal)) = (self.pager, signal)
            && let Err(error) = kill_process(pager, signal)
        {
            tracing::debug!(%error, "the pager is gone already");
        }
    }

    fn pause(&self, useless: u32) {
        if useless < 2 {
            return;
        }
        let pause = FIRST_PAUSE * 2u32.pow((useless - 2).min(10));
        let until = Instant::now() + pause.min(LONGEST_PAUSE);
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            // Signals ask for what cannot be had while the guest lives, and there is no pager that could end.
            if let Err(RecvTimeoutError::Disconnected) = self.events.recv_timeout(left) {
                return;
            }
        }
    }

    /// Whether there is a guest that a pager can go on with. Doubt counts as life: then the pager says
    /// what is wrong, and nothing is touched.
    fn guest_lives(&self) -> bool {
        !matches!(
            Orphan::find(
                &RunDir::at(&self.dir).state(),
                self.flags.uuid,
                &Powers::default()
            ),
            Ok(None)
        )
    }

    /// Whether QEMU had come to a pager that was killed before it wrote down that it has the guest: QEMU stands
    /// still until there is one again. That one takes the guest over as the first would have; it may fail for a
    /// while, for a server that is out of reach.
    fn is_waited_for(&self, status: Option<ExitStatus>) -> bool {
        let goes_on = match status.map(|status| status.code()) {
            Some(None) => true,
            Some(Some(code)) => code != 0 && (1..MOST_RESCUES).contains(&self.rescues),
            None => false,
        };
        goes_on && !RunDir::at(&self.dir).has_record() && self.lender.has_vmm()
    }

    /// Whether there was a guest and it has ended.
    fn has_ended(&self) -> bool {
        RunDir::at(&self.dir).was_served() && !self.guest_lives()
    }

    /// The pager has ended and no guest needs another.
    fn conclude(&self, status: Option<ExitStatus>) -> ExitCode {
        let dir = RunDir::at(&self.dir);
        let was_served = dir.was_served();
        Orphan::clear(&dir.state());
        self.lender.forget();
        match status.map(|status| (status, status.code())) {
            Some((status, None)) if !was_served => {
                let reason = format!("the pager ended before its guest came ({status})");
                tracing::error!("{reason}");
                dir.leave_error(&reason);
                ExitCode::FAILURE
            }
            // It has told why.
            Some((_, Some(code))) if code != 0 => {
                dir.remove_sockets();
                u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from)
            }
            // Its slabs' leases run out where it could not give them back.
            _ => {
                dir.remove();
                ExitCode::SUCCESS
            }
        }
    }

    /// Becomes the program that is installed now. Returns only where that fails.
    fn become_anew(&self) -> io::Error {
        let program = self.programs.choose(0);
        // One that does not know an argument would end at once, and nobody start another.
        if let Err(error) = self.demand_known(&program) {
            return error;
        }
        Command::new(program)
            .args(std::env::args_os().skip(1))
            .env(TAKEOVERS, self.takeovers.to_string())
            .exec()
    }

    /// Demands that a program, which may be of an earlier build, knows all arguments of this guest: it tells of one
    /// that it does not know before it comes to the wish for help.
    fn demand_known(&self, program: &Path) -> io::Result<()> {
        let mut asked = Command::new(program);
        asked.arg("run").args(self.arguments).arg("--help");
        let answer = asked.stdin(Stdio::null()).output()?;
        match answer.status.success() {
            true => Ok(()),
            false => Err(io::Error::other(format!(
                "it does not know all arguments of this guest: {}",
                String::from_utf8_lossy(&answer.stderr).trim()
            ))),
        }
    }
}

/// How a pager ended, in words.
struct Described(Option<ExitStatus>);

impl std::fmt::Display for Described {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(status) => status.fmt(f),
            None => f.write_str("unknown"),
        }
    }
}

/// Starts the thread that waits for pagers' ends, one after another.
fn await_ends(events: Sender<Event>) -> io::Result<Sender<Awaited>> {
    let (sender, awaited) = mpsc::channel();
    let wait = move || {
        for pager in awaited {
            let ended = match pager {
                Awaited::Child(child) => wait_for_child(child),
                Awaited::Process(process) => wait_for_process(&process).map(|()| None),
            };
            let status = ended.unwrap_or_else(|error| {
                tracing::error!(%error, "how the pager ended is not known");
                None
            });
            if events.send(Event::Ended(status)).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new()
        .name("pager's end".to_owned())
        .spawn(wait)?;
    Ok(sender)
}

fn wait_for_child(mut child: Child) -> io::Result<Option<ExitStatus>> {
    loop {
        match child.wait() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            ended => return ended.map(Some),
        }
    }
}

fn wait_for_process(process: &OwnedFd) -> io::Result<()> {
    loop {
        let mut polled = [PollFd::new(process, PollFlags::IN)];
        match poll(&mut polled, None) {
            Ok(_) if !polled[0].revents().is_empty() => return Ok(()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn hear_signals(sender: Sender<Event>) -> io::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let hear = move || {
        for signal in signals.forever() {
            if sender.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(hear)?;
    Ok(())
}

/// Keeps others from supervising the same guest, for as long as what is returned is open.
fn lock(dir: &Path) -> anyhow::Result<File> {
    let file = File::open(dir).with_context(|| format!("cannot open {}", dir.display()))?;
    let lock = || rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
    let mut locked = lock();
    // Whoever only looks whether somebody has it holds it for an instant.
    for _ in 0..LOOKERS {
        if locked != Err(Errno::WOULDBLOCK) {
            break;
        }
        std::thread::sleep(LOOKERS_PAUSE);
        locked = lock();
    }
    match locked {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => anyhow::bail!(
            "a backend of this guest runs already in {}: is the guest running?",
            dir.display()
        ),
        Err(error) => Err(error).with_context(|| format!("cannot lock {}", dir.display())),
    }
}

/// Asks a pager to end, such that another is started.
fn ask_to_restart(mut stream: UnixStream) -> anyhow::Result<()> {
    let envelope = Envelope {
        version: CONTROL_VERSION,
        request: Request::Restart,
    };
    write_frame(&mut stream, &envelope)?;
    match read_frame(&mut stream)?.context("the pager ended")? {
        Reply::Refused(reason) => Err(anyhow::Error::msg(reason)),
        _ => Ok(()),
    }
}

/// A pager that another supervisor started.
struct AtWork {
    pid: Pid,
    process: OwnedFd,
    control: UnixStream,
}

impl AtWork {
    /// The pager that serves the guest already, if there is one, whether or not it answers.
    fn find(dir: &Path, vm: VmId) -> Option<Self> {
        let control = connect(&dir.join("control.sock"), ANSWER_TIMEOUT);
        let found = control.map_err(anyhow::Error::from).and_then(|control| {
            let pid = Pid::from_raw(handover::peer(&control)?.pid).context("no process")?;
            let process = pidfd_open(pid, PidfdFlags::empty())?;
            // What listens there is of the pager's making. What a process was started as is not.
            let number = pid.as_raw_nonzero();
            let arguments = std::fs::read(format!("/proc/{number}/cmdline"))?;
            anyhow::ensure!(
                is_pager(&arguments, vm),
                "process {number} is no pager of this guest"
            );
            Ok(Self {
                pid,
                process,
                control,
            })
        });
        found
            .inspect_err(|error| tracing::debug!("no pager is at work: {error:#}"))
            .ok()
    }
}

/// Whether these arguments, each ended by a zero, are those of a guest's pager.
fn is_pager(arguments: &[u8], vm: VmId) -> bool {
    let mut arguments = arguments.split(|&byte| byte == 0).skip(1);
    let uuid = vm.to_string();
    arguments.next() == Some(b"page")
        && arguments.any(|argument| argument.ends_with(uuid.as_bytes()))
}
