//! Doors for fuzzing to what is private: each takes any bytes, and panics where a promise is broken.
//! Nothing of the backend calls them; tests/fuzz does, and a test that runs its seeds.

pub use crate::device::fuzzing::descriptor_chain;
pub use crate::pager::fuzzing::{LeftBehind, left_behind};
