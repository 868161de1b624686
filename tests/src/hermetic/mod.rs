//! A machine of one's own inside the machine: private mounts, processes and network, with libvirtd
//! and QEMU as a distribution ships them. The machine's own libvirt is neither seen nor touched, and
//! all of it ends with the process that started it, however that ends.
//!
//! * [`sandbox`] makes the namespaces and cleans up after them;
//! * [`host`] is the private machine: mounts, `virtlogd`, `libvirtd`, certificates, `outram setup`;
//! * [`neighbour`] is a second such machine, a [`place`] one of the two;
//! * [`guest`] is a domain on it, driven through its serial [`console`];
//! * [`latencies`] are those of a backend's faults between two moments;
//! * [`server`] is a memory server process, [`proxy`] a line to it that can be cut;
//! * [`suite`] runs tests in one;
//! * [`sampler`] watches what a guest costs its host, [`hard_limit`] makes the kernel enforce it;
//! * [`huge_pages`] fills the machine's pool of huge pages.

pub mod command;
pub mod console;
pub mod guest;
pub mod hard_limit;
pub mod host;
pub mod huge_pages;
pub mod latencies;
pub mod neighbour;
pub mod place;
pub mod proxy;
pub mod sampler;
pub mod sandbox;
pub mod server;
pub mod suite;
