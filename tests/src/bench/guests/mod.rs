//! Real programs in real guests: a Debian root (`images/debian`) whose workloads run through libvirt,
//! `outram attach`, the hook, a backend and a memory server, each at several local ratios and once without
//! Outram.
//!
//! Where guests are emulated, their processor is so slow that faults hardly show: what such a run tells is
//! whether results are right, and trends.
//!
//! * [`catalogue`] names the workloads, which are scripts in `images/debian/workloads`;
//! * [`said`] understands what a guest says on its serial line;
//! * [`session`] runs them;
//! * [`table`] holds what was measured, and shows it.

pub mod catalogue;
pub mod said;
pub mod session;
pub mod table;
