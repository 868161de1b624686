//! Lends a machine's idle memory to Outram backends as slabs.
//!
//! ```text
//! main ─ config ─ server ─┬─ hall ─┬─ lobby     who has not said yet who it is
//!                         │        ├─ control   requests of clients ─── ledger   who has what
//!                         │        ├─ data      reads and writes ─────┬ session  what is whose
//!                         │        └─ verbs     or none of its work ──┤
//!                         └─ metrics                                  └ slab     the memory
//! ```
//!
//! A client is a certificate and a guest. It reserves memory, leases slabs out of that, and reads
//! and writes them over data connections of its own; nobody else can. The server does not know what
//! lies in a slab. Whatever a client does, others lose nothing by it: each connection has a thread,
//! bounded buffers and time-outs of its own.

mod arguments;
mod config;
mod control;
mod data;
mod freeing;
mod gathering;
mod hall;
mod ledger;
mod lobby;
mod metrics;
mod server;
mod session;
mod slab;
mod spare;
mod verbs;

pub use arguments::Arguments;
pub use config::{
    Config, ConfigError, DEFAULT_LEASE_TIMEOUT, DEFAULT_SLAB_BYTES, Flags, MAX_SLAB_BYTES,
    MIN_LEASE_TIMEOUT, Size, Span, SpanError,
};
pub use server::{Server, ServerError};
