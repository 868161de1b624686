//! A process of which no part is missing.

use std::io;
use std::thread::{Builder, JoinHandle};

/// Ends the process where a panic would end one thread of it alone, for which the guest would wait for good:
/// the supervisor starts another process in its place.
pub(crate) struct AbortIfPanicking;

impl Drop for AbortIfPanicking {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Starts a thread without which the process is not to go on.
pub(crate) fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.into()).spawn(move || {
        let _whole = AbortIfPanicking;
        work()
    })
}
