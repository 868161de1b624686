//! The benchmark: known workloads in memory that is paged underneath.

pub mod workloads;
