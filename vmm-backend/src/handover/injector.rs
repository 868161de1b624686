//! The injector: a short-lived process that makes the VMM create userfaultfds, and the parent's
//! side of it.
//!
//! A process of its own, because a tracer that dies while the traced thread stands at a single
//! step kills that process: this one is exempt from the OOM killer, has its own session and every
//! signal blocked, and outlives the backend. Its standard input is the vhost-user socket, its
//! standard output takes one line of JSON. The line is written while the VMM still stands: where
//! nobody reads it any more, the descriptors are closed again. At a live detach the same process
//! closes them for good.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::outcome::Outcome;
use super::thread::{BorrowedThread, ThreadError};
use super::ways::{self, Setting, WayError};
use super::{HandoverError, MAX_UFFDS, Options, Vmm, Way, kernel};

/// Longest line accepted from the injector.
const MAX_LINE_BYTES: usize = 64 * 1024;
/// What the parent waits beyond the injector's own time-out: it matters only where an injector does not
/// even start, and one that is started on a host that is busy beyond measure tells more than the parent can.
const GRACE: Duration = Duration::from_secs(20);

/// What the injector is to do; its command line.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Task {
    pid: i32,
    start_time: u64,
    timeout: Duration,
    job: Job,
}

/// What the VMM's main thread is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Job {
    /// Create userfaultfds.
    Create {
        count: usize,
        allow_sysctl: bool,
        ways: Vec<Way>,
    },
    /// Close these, which an earlier hand-over created.
    Close(Vec<RawFd>),
}

/// The word that tells a task that closes from one that creates.
const CLOSE: &str = "close";

impl Task {
    fn to_args(&self) -> Vec<String> {
        let mut args = vec![
            self.pid.to_string(),
            self.start_time.to_string(),
            self.timeout.as_millis().to_string(),
        ];
        args.extend(match &self.job {
            Job::Create {
                count,
                allow_sysctl,
                ways,
            } => {
                let ways: Vec<&str> = ways.iter().map(|way| way.name()).collect();
                vec![count.to_string(), allow_sysctl.to_string(), ways.join(",")]
            }
            Job::Close(numbers) => {
                let numbers: Vec<String> = numbers.iter().map(RawFd::to_string).collect();
                vec![CLOSE.to_owned(), numbers.join(",")]
            }
        });
        args
    }

    fn from_args(args: impl IntoIterator<Item = OsString>) -> Option<Self> {
        let args: Vec<String> = args
            .into_iter()
            .map(|arg| arg.into_string().ok())
            .collect::<Option<_>>()?;
        let [pid, start_time, timeout, job @ ..] = args.as_slice() else {
            return None;
        };
        let (job, count) = match job {
            [word, numbers] if word == CLOSE => {
                let numbers: Vec<RawFd> = numbers
                    .split(',')
                    .map(|number| number.parse().ok().filter(|number| *number >= 0))
                    .collect::<Option<_>>()?;
                let count = numbers.len();
                (Job::Close(numbers), count)
            }
            [count, allow_sysctl, ways] => {
                let count = count.parse().ok()?;
                let job = Job::Create {
                    count,
                    allow_sysctl: allow_sysctl.parse().ok()?,
                    ways: ways.split(',').map(Way::from_name).collect::<Option<_>>()?,
                };
                (job, count)
            }
            _ => return None,
        };
        let task = Self {
            pid: pid.parse().ok()?,
            start_time: start_time.parse().ok()?,
            timeout: Duration::from_millis(timeout.parse().ok()?),
            job,
        };
        (task.pid > 0 && (1..=MAX_UFFDS).contains(&count)).then_some(task)
    }
}

/// Entry of the hidden subcommand `inject`; `args` are those after it.
pub fn injector_main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let Some(task) = Task::from_args(args) else {
        eprintln!(
            "outram inject: this subcommand is the backend's own: it is started during the \
             hand-over and takes no part in normal use"
        );
        return ExitCode::from(2);
    };
    stand_apart();
    match inject(&task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(outcome) => {
            // Where nobody reads any more there is nobody to tell.
            let _ = report(&outcome);
            ExitCode::FAILURE
        }
    }
}

/// Makes this process hard to disturb, as far as it is allowed to; says what it is not.
fn stand_apart() {
    let steps = [
        ("blocking signals", kernel::block_all_signals()),
        ("starting a session", kernel::own_session()),
        (
            "getting exempt from the OOM killer (needs CAP_SYS_RESOURCE)",
            std::fs::write("/proc/self/oom_score_adj", "-1000"),
        ),
    ];
    for (step, result) in steps {
        if let Err(error) = result {
            eprintln!("outram inject: {step}: {error}; going on without");
        }
    }
}

/// Carries the task out and reports its success itself, while the VMM still stands.
fn inject(task: &Task) -> Result<(), Outcome> {
    let vmm = Vmm::reopen(task.pid, task.start_time).map_err(|_| Outcome::Gone)?;
    let mut thread = BorrowedThread::borrow(task.pid, task.timeout).map_err(Outcome::from)?;
    let outcome = match &task.job {
        Job::Create {
            count,
            allow_sysctl,
            ways,
        } => create(&vmm, &mut thread, *count, *allow_sysctl, ways),
        Job::Close(numbers) => close(&vmm, &mut thread, numbers),
    };
    let given_back = thread.give_back();
    outcome?;
    // The result is with the parent already; a VMM that ended meanwhile is noticed there.
    if let Err(error) = given_back {
        eprintln!("outram inject: giving the thread back: {error}");
    }
    Ok(())
}

fn create(
    vmm: &Vmm,
    thread: &mut BorrowedThread,
    count: usize,
    allow_sysctl: bool,
    ways: &[Way],
) -> Result<(), Outcome> {
    let socket = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map(UnixStream::from)
        .map_err(|error| Outcome::Failed {
            detail: format!("taking over the socket: {error}"),
        })?;
    let setting = Setting {
        pid: vmm.pid,
        pidfd: vmm.pidfd(),
        socket: &socket,
        allow_sysctl,
        count,
    };
    let (numbers, way) = create_by_any(ways, thread, &setting)?;
    hand_in(vmm, thread, numbers, way)
}

/// Closes userfaultfds in the VMM. Nothing is closed unless each number still is one.
fn close(vmm: &Vmm, thread: &mut BorrowedThread, numbers: &[RawFd]) -> Result<(), Outcome> {
    let failed = |detail: String| Outcome::Failed { detail };
    // Dropped before the VMM runs on: the last of them to be closed is to be the VMM's own.
    vmm.fetch_uffds(numbers)
        .map(drop)
        .map_err(|error| failed(error.to_string()))?;
    ways::close_all(thread, numbers).map_err(Outcome::from)?;
    report(&Outcome::Closed).map_err(|error| failed(format!("reporting to the backend: {error}")))
}

/// Tries the ways in their order.
fn create_by_any(
    ways: &[Way],
    thread: &mut BorrowedThread,
    setting: &Setting<'_>,
) -> Result<(Vec<RawFd>, Way), Outcome> {
    let mut attempts = Vec::new();
    for &way in ways {
        match ways::create(way, thread, setting) {
            Ok(numbers) => return Ok((numbers, way)),
            Err(WayError::Attempt(attempt)) => attempts.push(attempt),
            Err(WayError::Thread(error)) => return Err(error.into()),
        }
    }
    Err(Outcome::NoWay { attempts })
}

/// Checks that the descriptors can be fetched, and reports them; closes them where either fails.
fn hand_in(
    vmm: &Vmm,
    thread: &mut BorrowedThread,
    numbers: Vec<RawFd>,
    way: Way,
) -> Result<(), Outcome> {
    let handed_in = vmm
        .fetch_uffds(&numbers)
        .map_err(|error| match error {
            HandoverError::Fetch { number, source, .. } => {
                format!("fetching userfaultfd {number}: {source}")
            }
            other => other.to_string(),
        })
        .and_then(|_| {
            let outcome = Outcome::Done {
                numbers: numbers.clone(),
                way,
            };
            report(&outcome).map_err(|error| format!("reporting to the backend: {error}"))
        });
    match handed_in {
        Ok(()) => Ok(()),
        Err(detail) => {
            ways::close_all(thread, &numbers).map_err(Outcome::from)?;
            Err(Outcome::Failed { detail })
        }
    }
}

/// Writes the one line.
fn report(outcome: &Outcome) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    if kernel::reader_is_gone(stdout.as_fd()) {
        return Err(io::Error::from(io::ErrorKind::BrokenPipe));
    }
    let mut line = serde_json::to_vec(outcome).map_err(io::Error::other)?;
    line.push(b'\n');
    stdout.write_all(&line)?;
    stdout.flush()
}

impl From<ThreadError> for Outcome {
    fn from(error: ThreadError) -> Self {
        match error {
            ThreadError::Gone => Outcome::Gone,
            ThreadError::NotPermitted(reason) => Outcome::NotPermitted { reason },
            ThreadError::Busy(waited) => Outcome::Busy {
                waited_ms: waited.as_millis() as u64,
            },
            error => Outcome::Failed {
                detail: error.to_string(),
            },
        }
    }
}

/// The parent's side of a hand-over.
pub(super) fn run(
    vmm: &Vmm,
    socket: &UnixStream,
    count: usize,
    options: &Options,
) -> Result<(Vec<RawFd>, Way), HandoverError> {
    let socket: OwnedFd = socket
        .try_clone()
        .map_err(|error| failed("duplicating the socket", error))?
        .into();
    let job = Job::Create {
        count,
        allow_sysctl: options.allow_sysctl,
        ways: options.ways.clone(),
    };
    let (outcome, status) = start(vmm, job, Stdio::from(socket), options)?;
    match outcome.into_result(vmm.pid)? {
        Some(created) => Ok(created),
        None => Err(unexpected(&status)),
    }
}

/// The parent's side of closing userfaultfds in the VMM.
pub(super) fn run_close(
    vmm: &Vmm,
    numbers: &[RawFd],
    options: &Options,
) -> Result<(), HandoverError> {
    let job = Job::Close(numbers.to_vec());
    let (outcome, status) = start(vmm, job, Stdio::null(), options)?;
    match outcome.into_result(vmm.pid)? {
        None => Ok(()),
        Some(_) => Err(unexpected(&status)),
    }
}

fn failed(step: &str, error: io::Error) -> HandoverError {
    HandoverError::Injector(format!("{step}: {error}"))
}

fn unexpected(status: &ExitStatus) -> HandoverError {
    HandoverError::Injector(format!("it ended without a result, with {status}"))
}

/// Starts the injector and reads its line.
fn start(
    vmm: &Vmm,
    job: Job,
    stdin: Stdio,
    options: &Options,
) -> Result<(Outcome, ExitStatus), HandoverError> {
    let task = Task {
        pid: vmm.pid,
        start_time: vmm.start_time,
        timeout: options.timeout,
        job,
    };
    let mut child = Command::new(&options.injector)
        .arg("inject")
        .args(task.to_args())
        .stdin(stdin)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| failed("starting it", error))?;
    let line = read_line(&mut child, options.timeout + GRACE);
    let line = match line {
        Ok(line) => line,
        Err(error) => {
            // Never killed: it may hold the VMM at a single step. It ends by itself.
            std::thread::spawn(move || child.wait());
            return Err(failed("waiting for its result", error));
        }
    };
    // Having written its line it only lets the VMM go: microseconds.
    let status = child
        .wait()
        .map_err(|error| failed("waiting for its end", error))?;
    match serde_json::from_slice(&line) {
        Ok(outcome) => Ok((outcome, status)),
        Err(_) => Err(unexpected(&status)),
    }
}

/// Reads up to a newline or the end of the injector's output.
fn read_line(child: &mut Child, timeout: Duration) -> io::Result<Vec<u8>> {
    let Some(stdout) = child.stdout.as_mut() else {
        return Err(io::Error::from(io::ErrorKind::NotConnected));
    };
    let deadline = Instant::now() + timeout;
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') && line.len() < MAX_LINE_BYTES {
        let left = deadline.saturating_duration_since(Instant::now());
        match kernel::poll_readable(stdout.as_fd(), Some(left)) {
            Ok(true) => {}
            Ok(false) => return Err(io::Error::from(io::ErrorKind::TimedOut)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        }
        let mut chunk = [0; 4096];
        match stdout.read(&mut chunk)? {
            0 => break,
            read => line.extend_from_slice(&chunk[..read]),
        }
    }
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_survives_its_command_line() {
        let jobs = [
            Job::Create {
                count: 5,
                allow_sysctl: true,
                ways: vec![Way::Device, Way::PassedDevice, Way::Syscall],
            },
            Job::Close(vec![31, 7]),
        ];
        for job in jobs {
            let task = Task {
                pid: 17,
                start_time: 4711,
                timeout: Duration::from_millis(2500),
                job,
            };
            let args = task.to_args().into_iter().map(OsString::from);
            assert_eq!(Task::from_args(args), Some(task));
        }
    }

    #[test]
    fn nonsense_is_no_task() {
        let parse = |text: &str| Task::from_args(text.split(' ').map(OsString::from));
        assert_eq!(parse("17 4711 2500 5 true teleport"), None);
        assert_eq!(parse("17 4711 2500 0 true device"), None);
        assert_eq!(parse("0 4711 2500 5 true device"), None);
        assert_eq!(parse("17 4711 2500 close"), None);
        assert_eq!(parse("17 4711 2500 close 7,-1"), None);
        assert_eq!(parse("17 4711 2500 close all"), None);
        assert_eq!(parse("--help"), None);
    }
}
