//! What Outram's programs agree on byte for byte: units, the frames between a backend and a memory
//! server, and the messages on a backend's control socket.
//!
//! The crate knows nothing of userfaultfd, libvirt or how a server stores its slabs. Every format
//! in it carries a version, and every length read from a peer is bounded before it is believed.

pub mod causes;
pub mod compressed_share;
pub mod control;
pub mod disk;
pub mod granularity;
pub mod host_settings;
pub mod identity;
pub mod incoming;
pub mod limits;
pub mod logging;
pub mod lost_pages;
pub mod pki;
pub mod scrape;
pub mod seal;
pub mod server;
pub mod shmem_thp;
pub mod tls;
pub mod tuning;
pub mod units;
pub mod verbs;
mod words;
