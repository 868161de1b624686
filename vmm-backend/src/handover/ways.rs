//! Ways.
