//! How a guest comes to a start that is none: its memory arrives from elsewhere.

use crate::words::words;

/// Where an incoming guest's memory arrives from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Incoming {
    /// A saved image: the guest ran before, and nothing of it runs now.
    Restore,
    /// Another host, or another QEMU: the guest may run there until the last moment, and goes on
    /// there if this start fails.
    Migration,
}

words!(
    Incoming { Restore = "restore", Migration = "migration" },
    IncomingError = "is no way that a guest comes in by: expected 'restore' or 'migration'"
);
