//! Why a server is of no use, in words that say what to do.

use outram_wire::server::Refusal;
use outram_wire::tls::TlsError;
use outram_wire::units::format_size;

use super::ServerAddress;

/// Why a server is of no use at present.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// No server is configured under that index.
    #[error("no memory server number {0} is configured")]
    NoSuchServer(usize),
    /// The own certificate or key is no good.
    #[error(transparent)]
    Identity(#[from] TlsError),
    /// The name has no address.
    #[error(
        "memory server {server}: its name cannot be resolved: check the name, or use an IP address"
    )]
    Resolve {
        /// Which.
        server: ServerAddress,
        /// The resolver's words.
        source: std::io::Error,
    },
    /// Nobody answers there.
    #[error(
        "memory server {server} cannot be reached: check that outram-memserver runs there and that no firewall is between"
    )]
    Connect {
        /// Which.
        server: ServerAddress,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The control connection failed.
    #[error("memory server {server}: {source}")]
    Control {
        /// Which.
        server: ServerAddress,
        /// What happened.
        source: outram_wire::server::channel::ChannelError,
    },
    /// The server refused.
    #[error("memory server {server} refuses: {refusal}")]
    Refused {
        /// Which.
        server: ServerAddress,
        /// Its reason.
        #[source]
        refusal: Refusal,
    },
    /// One server under two addresses.
    #[error("{first} and {second} are the same memory server: name it once")]
    SameServer {
        /// The first.
        first: ServerAddress,
        /// The other.
        second: ServerAddress,
    },
    /// Several servers together have not what is asked for.
    #[error(
        "the memory servers can set aside {} of the {} that the guest may need ({}): raise --local-ratio, raise --memory on a server (and --client-memory, where that is set), or add a server",
        format_size(promised.iter().map(|(_, bytes)| bytes).sum()), format_size(*needed_bytes), listed(promised)
    )]
    PromisedTooLittle {
        /// What is asked for.
        needed_bytes: u64,
        /// What each could promise.
        promised: Vec<(ServerAddress, u64)>,
    },
    /// The server answered what was not asked.
    #[error(
        "memory server {server} broke the protocol: {what}: install the same release of Outram on both machines"
    )]
    Protocol {
        /// Which.
        server: ServerAddress,
        /// How.
        what: String,
    },
    /// A data connection failed or was closed.
    #[error("memory server {server}: the data connection failed")]
    Data {
        /// Which.
        server: ServerAddress,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A frame on a data connection was none.
    #[error("memory server {server}: the data connection carried no frame")]
    Frame {
        /// Which.
        server: ServerAddress,
        /// What was found.
        source: outram_wire::server::data::DataError,
    },
    /// RDMA is demanded, and cannot be had; or it failed.
    #[error("memory server {server}: RDMA fails")]
    Verbs {
        /// Which.
        server: ServerAddress,
        /// Why.
        source: outram_wire::verbs::VerbsError,
    },
    /// There is no connection at the moment.
    #[error("memory server {0} is out of reach at the moment; it is being tried again")]
    Disconnected(ServerAddress),
    /// No answer in time.
    #[error("memory server {0} did not answer in time; the request may still be carried out")]
    TimedOut(ServerAddress),
    /// The session was closed.
    #[error("the session with memory server {0} is closed")]
    SessionClosed(ServerAddress),
    /// The system refuses threads, descriptors or random numbers.
    #[error("the system cannot provide {what}")]
    System {
        /// What.
        what: &'static str,
        /// Its reason.
        source: std::io::Error,
    },
}

fn listed(promised: &[(ServerAddress, u64)]) -> String {
    let each = promised
        .iter()
        .map(|(server, bytes)| format!("{server} {}", format_size(*bytes)));
    each.collect::<Vec<_>>().join(", ")
}
