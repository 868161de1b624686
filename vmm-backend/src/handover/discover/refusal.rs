//! Why a guest's RAM must not be paged, and the cure.

use std::io;
use std::path::PathBuf;

/// A refusal. Its message says what was found and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The VMM ended.
    #[error("the VMM (process {pid}) is gone")]
    Gone {
        /// Process.
        pid: i32,
    },
    /// `/proc` of the VMM could not be read.
    #[error("{path} cannot be read", path = .path.display())]
    Unreadable {
        /// What was read.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}
