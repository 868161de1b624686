//! What a pager needs of its own process: memory that stays, descriptors, and mercy of the OOM
//! killer. None of it is vital where the host refuses: it is logged.

use nix::sys::mman::{MlockAllFlags, mlockall};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Prepares the process.
pub(super) fn prepare() {
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    if let Err(error) = setrlimit(Resource::Memlock, unlimited) {
        tracing::warn!(%error, "the limit of locked memory stays as it is");
    }
    let files = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: files.maximum,
            ..files
        },
    ) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
    // Nothing on the fault path may wait for memory that it resolves. On fault: the page table of
    // a large guest stays as sparse as the guest.
    let on_fault = MlockAllFlags::from_bits_retain(libc::MCL_ONFAULT);
    let flags = MlockAllFlags::MCL_CURRENT | MlockAllFlags::MCL_FUTURE | on_fault;
    if let Err(error) = mlockall(flags) {
        tracing::warn!(%error, "memory cannot be locked: under memory pressure faults may take long");
    }
    // Ending this process would cost the guest its memory.
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-1000") {
        tracing::warn!(%error, "the OOM killer may choose this process");
    }
}
