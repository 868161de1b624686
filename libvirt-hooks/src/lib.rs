//! Everything of Outram that speaks libvirt: the `outram` command and libvirt's hook.
//!
//! A domain's settings live in its metadata ([`metadata`]); [`attachment`] edits its XML,
//! [`refusal`] says what it must not have, [`hook`] starts its backend with it ([`launch`]), and
//! [`cli`] is the command line. The crate knows nothing of paging: it talks to a backend over its
//! control socket ([`backend_control`]) alone.

pub mod apparmor;
pub mod arrival;
pub mod attachment;
pub mod backend_control;
pub mod backend_log;
pub mod backend_unit;
pub mod cli;
pub mod daemons;
mod detached;
pub mod domain_xml;
pub mod foreign;
pub mod hook;
pub mod hook_arguments;
pub mod host;
mod host_memory;
mod hotplug_slot;
pub mod launch;
pub mod libvirt;
pub mod metadata;
pub mod metrics_page;
pub mod observer;
pub mod page_size;
pub mod process;
pub mod qemu_user;
pub mod refusal;
mod uffd_probe;
