//! A memory server as its clients, its operator and strangers see it. One program, for each more is linked
//! anew.

mod client;
mod disks;
mod leases;
mod process;
mod strangers;
mod tenants;
