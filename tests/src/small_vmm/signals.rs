//! Signals to vCPU threads, as QEMU's own kicks and timers send them: a handler without
//! `SA_RESTART` interrupts whatever they are at, also a fault.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

/// Signals handled so far.
static HANDLED: AtomicU64 = AtomicU64::new(0);

/// Pause between two rounds of signals: shorter than a fault takes, so that some meet each.
const PAUSE: Duration = Duration::from_micros(50);

/// How long the last of them may take to be handled.
const PATIENCE: Duration = Duration::from_secs(60);

extern "C" fn note(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    HANDLED.fetch_add(1, Ordering::Relaxed);
}

/// Installs the handler.
pub(super) fn catch() -> Result<()> {
    register_signal_handler(SIGRTMIN(), note).context("installing a signal handler")
}

/// Sends `count` signals to each thread; returns once that many were handled, if they are within a minute.
pub(super) fn bombard<'a>(
    threads: impl Iterator<Item = &'a JoinHandle<()>> + Clone,
    count: u64,
) -> Result<Value> {
    let before = HANDLED.load(Ordering::Relaxed);
    let mut refused = 0;
    for _ in 0..count {
        for thread in threads.clone() {
            // A thread that waits without heeding them fills its queue.
            refused += u64::from(thread.kill(SIGRTMIN()).is_err());
        }
        std::thread::sleep(PAUSE);
    }
    let handled = || HANDLED.load(Ordering::Relaxed) - before;
    let deadline = Instant::now() + PATIENCE;
    while handled() < count && Instant::now() < deadline {
        std::thread::sleep(PAUSE);
    }
    Ok(json!({"handled": handled(), "refused": refused}))
}
