//! Whether whoever made a request wants it ended before it is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often what waits looks whether it is interrupted.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// Whether whoever made a request wants it ended.
#[derive(Clone, Copy, Debug)]
pub struct Interrupt<'a>(Option<&'a AtomicBool>);

impl<'a> Interrupt<'a> {
    /// Wanted once the flag is set.
    pub fn by(flag: &'a AtomicBool) -> Self {
        Self(Some(flag))
    }

    /// Never wanted.
    pub fn never() -> Self {
        Self(None)
    }

    pub(crate) fn is_wanted(&self) -> bool {
        self.0.is_some_and(|flag| flag.load(Ordering::Acquire))
    }
}
