//! Programs run to their end within a time, with what they said kept for the error message.

use std::fmt::Debug;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// What a program said and how it ended.
#[derive(Clone, Debug)]
pub struct Finished {
    /// The command line, for messages.
    pub line: String,
    /// Exit status; `None` where a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Finished {
    /// Whether it ended with status 0.
    pub fn success(&self) -> bool {
        self.code == Some(0)
    }

    /// Both outputs, for searching messages.
    pub fn said(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }

    /// What it printed to its standard output; an error unless it ended with status 0.
    pub fn demand_success(self) -> Result<String> {
        if !self.success() {
            bail!(
                "'{}' ended with status {:?}: {}",
                self.line,
                self.code,
                self.said().trim()
            );
        }
        Ok(self.stdout)
    }
}

/// How long an ordinary command may take: much more than `outram` itself may wait for a backend, which is a
/// minute, or virsh for a libvirtd that has no time.
pub const COMMAND: Duration = Duration::from_secs(180);

/// Status of coreutils' `timeout` when time was up.
const TIMED_OUT: i32 = 124;

/// Runs a program within `limit` and returns how it ended, whatever its status; running out of time
/// is an error. coreutils' `timeout` ends it and what it started.
pub fn run_within(limit: Duration, program: &str, arguments: &[&str]) -> Result<Finished> {
    let line = format!("{program} {}", arguments.join(" "));
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new("timeout")
        .args(["-k", "3", &format!("{:.1}", limit.as_secs_f64())])
        .arg(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("could not run '{line}'"))?;
    let finished = Finished {
        line,
        code: status.code(),
        stdout: String::from_utf8_lossy(&stdout).into_owned(),
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
    };
    if finished.code == Some(TIMED_OUT) || finished.code.is_none() {
        bail!(
            "'{}' did not end within {limit:?}; it said: {}",
            finished.line,
            finished.said()
        );
    }
    Ok(finished)
}

/// Runs a program that must succeed; returns its standard output.
pub fn run(program: &str, arguments: &[&str]) -> Result<String> {
    run_within(COMMAND, program, arguments)?.demand_success()
}

/// Waits until what `ask` is answered is as wanted. Who does not answer once may have had no time for it; that
/// nobody is there to be asked is an error at once.
pub fn wait_answer<T: Debug>(
    what: &str,
    limit: Duration,
    mut ask: impl FnMut() -> Result<T>,
    mut wanted: impl FnMut(&T) -> bool,
) -> Result<T> {
    let mut last = None;
    wait_for(what, limit, || match ask() {
        Ok(answer) if wanted(&answer) => Ok(Some(answer)),
        Err(error) if is_nobody_there(&error) => Err(error),
        other => {
            last = Some(other);
            Ok(None)
        }
    })
    .with_context(|| format!("the last answer: {last:#?}"))
}

/// Whether nobody listens at the socket that was to be asked by.
fn is_nobody_there(error: &anyhow::Error) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};
    error.chain().any(|cause| {
        let cause = cause.downcast_ref::<std::io::Error>();
        cause.is_some_and(|error| matches!(error.kind(), ConnectionRefused | NotFound))
    })
}

/// Waits until `probe` gives a value; asks every 50 ms. `what` completes "waited … for …".
pub fn wait_for<T>(
    what: &str,
    limit: Duration,
    mut probe: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let start = std::time::Instant::now();
    loop {
        if let Some(value) = probe()? {
            return Ok(value);
        }
        if start.elapsed() > limit {
            bail!("waited {limit:?} for {what}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
