//! A process of which no part is missing.

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
