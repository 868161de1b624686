//! What the injector process tells its parent: one line of JSON over a pipe.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{HandoverError, Way};

/// One way of creating a userfaultfd that did not work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// The way.
    pub way: Way,
    /// The step that failed.
    pub step: String,
    /// Its error number, 0 where the way was not allowed to begin with.
    pub errno: i32,
    /// What to do about it.
    pub cure: String,
}

/// The attempts, one line each, for an error message.
pub(super) fn describe(attempts: &[Attempt]) -> String {
    let mut text = String::new();
    for attempt in attempts {
        let reason = match attempt.errno {
            0 => String::new(),
            errno => format!(": {}", std::io::Error::from_raw_os_error(errno)),
        };
        text += &format!(
            "\n  {}: {}{reason}; {}",
            attempt.way, attempt.step, attempt.cure
        );
    }
    text
}

/// How an injection ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "outcome")]
pub(super) enum Outcome {
    /// The userfaultfds stand in the VMM.
    Done {
        /// Their numbers there.
        numbers: Vec<i32>,
        /// How they were made.
        way: Way,
    },
    /// The userfaultfds that were to be closed are.
    Closed,
    /// No way worked; nothing is left in the VMM.
    NoWay {
        /// Why not, each.
        attempts: Vec<Attempt>,
    },
    /// The kernel refused tracing.
    NotPermitted {
        /// Why.
        reason: String,
    },
    /// The main thread never stood in a system call.
    Busy {
        /// Milliseconds tried.
        waited_ms: u64,
    },
    /// The VMM ended.
    Gone,
    /// Anything else.
    Failed {
        /// Step and reason.
        detail: String,
    },
}

impl Outcome {
    /// As the parent sees it: what was created, if that was the task.
    pub(super) fn into_result(self, pid: i32) -> Result<Option<(Vec<i32>, Way)>, HandoverError> {
        Err(match self {
            Outcome::Done { numbers, way } => return Ok(Some((numbers, way))),
            Outcome::Closed => return Ok(None),
            Outcome::NoWay { attempts } => HandoverError::NoWay { attempts },
            Outcome::NotPermitted { reason } => HandoverError::NotPermitted { pid, reason },
            Outcome::Busy { waited_ms } => HandoverError::Busy {
                waited: Duration::from_millis(waited_ms),
            },
            Outcome::Gone => HandoverError::VmmGone {
                pid,
                source: std::io::Error::from_raw_os_error(libc::ESRCH),
            },
            Outcome::Failed { detail } => HandoverError::Injection { pid, detail },
        })
    }
}
