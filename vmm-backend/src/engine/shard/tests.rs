//! Deterministic tests of shards against a scripted world: one for each race that the design
//! names. What may happen at any moment besides is the simulation's (`tests/simulation.rs`).

mod ahead;
pub(crate) mod bench;
mod eviction;
mod faults;
mod homing;
mod kept;
mod parts;
mod pins;
mod removal;
mod room;
mod sparse;
mod writeback;
