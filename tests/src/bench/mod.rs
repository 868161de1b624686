//! The benchmark: floors of the machine, Outram beside them, and workloads on Outram and on what else
//! there is, all in one run; its results as a table of ratios, JSON and plots.
//!
//! * [`floors`] measures what the kernel and the wire cost without us;
//! * [`batches`] has the client library move pages, and a raw socket;
//! * [`own`] measures Outram's faults, throughput and tuning;
//! * [`helper_memory`] measures what a guest's helper costs in memory;
//! * [`contest`] runs [`workloads`] on Outram and on the [baselines](baseline);
//! * [`mix`] runs several of them at once, each in a guest of its own;
//! * [`guests`] runs real programs in real guests, with and without Outram;
//! * [`policies`] counts what eviction policies would miss, on [traces](trace) of the workloads, and
//!   [`foresight`] what is left of that by fetching ahead;
//! * [`replay`] has the least time that follows from these;
//! * [`targets`] says what was to be reached, and whether it was;
//! * [`results`] is what a run leaves, [`ratios`] what is read from it, [`report`], [`plot`] and
//!   [`compare`] show it.
//!
//! Absolute figures are those of the machine and its mood. So whatever is divided by each other is
//! measured in turn, round by round, and divided within its round.

pub mod baseline;
pub mod batches;
pub mod bill;
pub mod compare;
pub mod contest;
pub mod far_wire;
pub mod floors;
pub mod foresight;
pub mod guests;
pub mod helper_memory;
pub mod layout;
pub mod machine;
pub mod mix;
pub mod own;
pub mod page_store;
pub mod phase;
pub mod plain_pager;
pub mod plot;
pub mod policies;
pub mod ratios;
pub mod replay;
pub mod report;
pub mod results;
pub mod runner;
pub mod session;
pub mod statistics;
pub mod swap;
pub mod targets;
pub mod trace;
pub mod usage;
pub mod watched_memory;
pub mod workloads;
