//! Placeholder of the ptrace fence.
