//! A VMM small enough to see through: it plays QEMU's part for tests and native-speed figures.
//!
//! Its RAM is memfds named and described as QEMU does it; it connects to a backend as vhost-user
//! front end from its main thread, so that the hand-over takes the very same path; its *vCPUs* are
//! threads that use that RAM at native speed. It knows nothing of userfaultfd: whatever pages its
//! memory does so unseen.
//!
//! ```text
//! small-vmm -object memory-backend-memfd,id=pc.ram,size=64M,share=on \
//!           -chardev socket,id=c0,path=/run/x.sock -device vhost-user-blk-pci,chardev=c0 -smp 2
//! ```
//!
//! Commands are JSON, one a line, on standard input; each is answered by one line on standard
//! output with the same `id`: `{"id":1,"ok":{…}}` or `{"id":1,"error":"…"}`. Those with `vcpu` are
//! carried out by that thread, so that several can be at work (or wait in a fault) at once; the
//! others by the main thread. See [`machine`] for what there is to command.

pub mod client;
pub mod machine;

mod arguments;
mod dirty_log;
mod disk;
mod disk_load;
mod front_end;
mod pattern;
mod probe;
mod race;
mod ram;
mod signals;

pub use arguments::Arguments;
