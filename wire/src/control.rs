//! Messages on a backend's control socket (`/run/outram/<uuid>/control.sock`).
//!
//! Each message is a frame: a 32-bit little-endian length, then that many bytes of JSON. A client
//! sends an [`Envelope`], the backend answers with a [`Reply`]; several may follow each other on
//! one connection. Fields may be added within a version; a reader ignores those it does not know.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::compressed_share::CompressedShare;
use crate::identity::IdentityStatus;
use crate::tuning::{QueueDepth, Tuning, Workers};
use crate::units::{Limit, VmId};

/// Version of the messages of this module.
pub const CONTROL_VERSION: u32 = 1;

/// Longest frame either side accepts, in bytes; a status of hundreds of shards stays far below.
pub const MAX_FRAME_BYTES: usize = 256 * 1024;

/// Whether a supervisor is at work on the guest of this directory (`/run/outram/<uuid>`): it has that
/// directory locked for as long as it lives, and starts the guest's pager again where that dies.
pub fn is_supervised(run_dir: &Path) -> bool {
    let Ok(dir) = File::open(run_dir) else {
        return false;
    };
    let locked = Flock::lock(dir, FlockArg::LockSharedNonblock);
    matches!(locked, Err((_, Errno::EWOULDBLOCK)))
}

/// Opens a control socket. What is sent and received takes no longer than `timeout` each, and neither
/// does connecting: once a process that does not run has its queue full of connections, that would wait
/// for ever (unix(7), SO_SNDTIMEO in socket(7)). An error of kind `WouldBlock` says that it did.
pub fn connect(socket: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let address = UnixAddr::new(socket)?;
    let stream = UnixStream::from(socket::socket(
        AddressFamily::Unix,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?);
    stream.set_write_timeout(Some(timeout))?;
    stream.set_read_timeout(Some(timeout))?;
    socket::connect(stream.as_raw_fd(), &address)?;
    Ok(stream)
}

/// A request with its format's version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Envelope {
    /// Must be [`CONTROL_VERSION`].
    pub version: u32,
    /// What is asked.
    pub request: Request,
}

/// What a control client may ask.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Report everything known about the guest's memory.
    Status,
    /// Report metrics in Prometheus' text form.
    Metrics,
    /// Set a new limit; answered once accepted (and reserved), reached in the background.
    Tune(Limit),
    /// Have the guest's memory moved so from now on; what is `None` stays.
    SetTuning(Tuning),
    /// Bring every page home, the limit notwithstanding: the first part of a live detach. It lasts
    /// as long as the connection that asked for it, and a request at least every ten seconds.
    BringHome,
    /// Leave the guest's memory to the kernel, for good, now that every page is home; only on the
    /// connection that asked for [`Request::BringHome`].
    Release,
    /// Have the backend's process replaced by one of the program that is installed now; the guest waits
    /// for a moment where it needs memory. Answered before that; the next process answers anew.
    Restart,
    /// End the backend. Refused while a guest's memory depends on it.
    Stop,
}

/// The backend's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// To [`Request::Status`].
    Status(Box<Status>),
    /// To [`Request::Metrics`].
    Metrics(String),
    /// The request was carried out.
    Done,
    /// The request was refused; the text says what was wrong and what to do.
    Refused(String),
}

/// Where a backend is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Waits for QEMU; nothing is paged yet.
    Waiting,
    /// Serves a guest.
    Serving,
    /// Faults wait: for a server out of reach, or for room while nothing may be evicted.
    Stalled,
    /// A page the guest asked for is lost: its fault stays unanswered; see `lost` and `detail`.
    Stopped,
    /// Brings every page home, for a live detach: see `homing`.
    Homing,
    /// The guest's memory is the kernel's again; waits for QEMU to drop the disk.
    Released,
    /// The attachment was refused: see `detail`.
    Refused,
    /// The guest ended; slabs are being given back.
    Ending,
}

/// One memory server as the backend sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerStatus {
    /// As configured: `host:port`.
    pub address: String,
    /// Whether control and data connections stand.
    pub connected: bool,
    /// Why not, if not: the last error.
    pub detail: Option<String>,
    /// What pages go over: `TCP`, or `RDMA` with the device; earlier backends do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<String>,
    /// Slabs leased from it.
    pub slabs: u64,
    /// Bytes promised by it.
    pub reserved_bytes: u64,
    /// Bytes of this guest's pages stored there.
    pub stored_bytes: u64,
}

/// Counters since the guest's start; all only rise.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Faults taken by kind: never-touched pages given as zeros.
    pub faults_zero: u64,
    /// Faults answered from a same-filled page's word.
    pub faults_filled: u64,
    /// Faults answered from staging, without I/O.
    pub faults_staged: u64,
    /// Faults answered from memory that holds the page compressed, without I/O.
    pub faults_compressed: u64,
    /// Faults answered from a memory server.
    pub faults_remote: u64,
    /// Faults on write-protected pages.
    pub faults_protected: u64,
    /// Messages that repeated a fault in work or already answered.
    pub faults_duplicate: u64,
    /// Faults left unanswered because their page is lost.
    pub faults_lost: u64,
    /// Faults answered with a memory error because their page is lost.
    pub faults_poisoned: u64,
    /// Remote or staged faults on pages evicted recently.
    pub refaults: u64,
    /// Time that faults have waited, all together, those still waiting until now: in a span of time,
    /// it rises by the span times the mean number of threads of QEMU that wait for memory.
    pub waited_us: u64,
    /// Pages evicted.
    pub evicted_pages: u64,
    /// ... of which unchanged since they were fetched: dropped without I/O.
    pub evicted_clean_pages: u64,
    /// ... of which same-filled: kept as a word.
    pub evicted_filled_pages: u64,
    /// Pages that were kept compressed when they left.
    pub compressed_pages: u64,
    /// Pages asked for before anybody waited for them: the guest went through its memory in order.
    pub fetched_ahead_pages: u64,
    /// ... of which because the guest was expected to get there, and was seen to.
    pub fetched_ahead_used_pages: u64,
    /// ... of which for the same reason, but which left again without a sign of any use.
    pub fetched_ahead_unused_pages: u64,
    /// Pages written to memory servers.
    pub writeback_pages: u64,
    /// Pages freed by the guest (balloon, free-page reporting).
    pub removed_pages: u64,
    /// Page bytes received from and sent to memory servers, with their framing.
    pub wire_received_bytes: u64,
    /// See `wire_received_bytes`.
    pub wire_sent_bytes: u64,
    /// Times a fault had to wait for room under the limit.
    pub stalls_limit: u64,
    /// Times the host's pool of huge pages had none for a fault.
    pub stalls_pool: u64,
    /// Times a fault had to wait for a server out of reach.
    pub stalls_server: u64,
    /// Pages lost because their bytes came back changed, twice.
    pub integrity_failures: u64,
    /// Reads that gave other bytes than were sent (altered, of another page, or of an earlier time),
    /// and were refused; most are followed by one that does not.
    pub refused_reads: u64,
    /// Accesses by the device to pages that were not pinned (caught).
    pub stray_device_accesses: u64,
}

impl Counters {
    /// Faults of all kinds that gave the guest a page.
    pub fn answered_faults(&self) -> u64 {
        self.faults_zero
            + self.faults_filled
            + self.faults_staged
            + self.faults_compressed
            + self.faults_remote
            + self.faults_protected
    }
}

/// Fault latency of one kind, in microseconds from reading the message to waking the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Latency {
    /// Faults measured.
    pub count: u64,
    /// Median.
    pub us_p50: u64,
    /// 90th percentile; earlier backends do not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub us_p90: Option<u64>,
    /// 99th percentile.
    pub us_p99: u64,
    /// 99.9th percentile; earlier backends do not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub us_p999: Option<u64>,
    /// Largest.
    pub us_max: u64,
}

/// How far a guest's memory has come home.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomingStatus {
    /// Bytes that still lie elsewhere.
    pub elsewhere_bytes: u64,
    /// Whether every page is home.
    pub home: bool,
}

/// Everything known about a guest's memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The guest.
    pub vm: VmId,
    /// Its libvirt name when the backend started.
    pub name: String,
    /// Version of the backend.
    pub backend_version: String,
    /// The backend's process.
    pub backend_pid: u32,
    /// How often the guest was taken over from a process of its backend that had died.
    #[serde(default)]
    pub takeovers: u32,
    /// QEMU's process, once connected.
    pub qemu_pid: Option<u32>,
    /// Where it is in its life.
    pub phase: Phase,
    /// In words, where `phase` is not the ordinary one.
    pub detail: Option<String>,
    /// Whether what leaves the host is sealed; earlier backends, which do not say, seal nothing.
    #[serde(default)]
    pub sealed: bool,
    /// How this host's certificate is; nothing of it where an earlier backend does not say.
    #[serde(default)]
    pub identity: IdentityStatus,
    /// How the userfaultfds were obtained.
    pub handover: Option<String>,
    /// The guest's RAM found so far, in bytes.
    pub ram_bytes: u64,
    /// The limit as asked.
    pub limit: Limit,
    /// The limit in bytes.
    pub limit_bytes: u64,
    /// Bytes that are fetched and evicted together; earlier backends do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granularity_bytes: Option<u64>,
    /// Threads that evict; earlier backends do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<Workers>,
    /// How much is on its way at a time; earlier backends do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_depth: Option<QueueDepth>,
    /// How much of the limit may hold compressed pages; earlier backends do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compressed_share: Option<CompressedShare>,
    /// Bytes in the memfd, by our count.
    pub resident_bytes: u64,
    /// Bytes in the staging area, by our count.
    pub staged_bytes: u64,
    /// Bytes of local memory that compressed pages take.
    #[serde(default)]
    pub compressed_bytes: u64,
    /// What these are when they are not compressed: copies of pages that are elsewhere too.
    #[serde(default)]
    pub compressed_held_bytes: u64,
    /// Bytes stored on memory servers and not resident.
    pub stored_bytes: u64,
    /// Pages kept as a word, in bytes of guest memory.
    pub filled_bytes: u64,
    /// Bytes lost for good.
    pub lost_bytes: u64,
    /// How far its memory has come home, in the phases that bring it there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub homing: Option<HomingStatus>,
    /// Hot-plugged memory that is not paged: all of it is local, beyond the limit.
    #[serde(default)]
    pub unmanaged_bytes: u64,
    /// Faults waiting right now.
    pub waiting_faults: u64,
    /// The kernel's own count: blocks of the memfd.
    pub kernel_memfd_bytes: u64,
    /// The kernel's own count: blocks of our tmpfs less the page table.
    pub kernel_staging_bytes: u64,
    /// The kernel's own count: the page table's blocks.
    pub kernel_table_bytes: u64,
    /// The kernel's own count: this process's anonymous memory.
    pub kernel_anon_bytes: u64,
    /// Anonymous memory that is not counted against the limit: stated and fixed.
    pub fixed_anon_bytes: u64,
    /// What the guest may exceed its limit by for moments: stated and fixed.
    pub headroom_bytes: u64,
    /// Counters since the start.
    pub counters: Counters,
    /// Latency of faults by kind: `zero`, `filled`, `staged`, `compressed`, `remote`, `protected`.
    pub latency: std::collections::BTreeMap<String, Latency>,
    /// The servers in their configured order.
    pub servers: Vec<ServerStatus>,
    /// The far-memory disk, where the domain has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskStatus>,
}

impl Status {
    /// Bytes of local memory that count against the limit.
    pub fn local_bytes(&self) -> u64 {
        self.resident_bytes + self.staged_bytes + self.compressed_bytes
    }
}

/// How far a far-memory disk is of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskState {
    /// Kept by its servers, to be claimed at its first use.
    Parked,
    /// In use.
    Open,
    /// Another backend has claimed it: the guest was moved.
    Claimed,
    /// It, or a part of it, is gone: requests end in I/O errors; see `detail`.
    Lost,
}

/// A far-memory disk. Its contents are volatile: emptied by a shutdown of the guest, kept by save
/// and migration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskStatus {
    /// Its name on the servers.
    pub id: crate::server::DiskId,
    /// What the guest sees.
    pub size_bytes: u64,
    /// How far it is of use.
    pub state: DiskState,
    /// Whether QEMU speaks to it; earlier backends do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connected: Option<bool>,
    /// In words, where something is wrong.
    pub detail: Option<String>,
    /// Bytes of blocks that are written.
    pub stored_bytes: u64,
    /// Slabs that they lie in.
    pub leased_slabs: u64,
    /// Requests done by kind, since the backend's start.
    pub reads: u64,
    /// See `reads`.
    pub writes: u64,
    /// Discards and write-zeroes; see `reads`.
    pub discards: u64,
    /// Requests that failed.
    pub errors: u64,
    /// ... of which because a block came back changed.
    pub integrity_failures: u64,
    /// Bytes sent to servers for the disk, with framing.
    pub sent_bytes: u64,
    /// Bytes received from servers for the disk, with framing.
    pub received_bytes: u64,
}

/// Why a frame could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The socket failed or closed amid a frame.
    #[error("control connection failed")]
    Io(#[from] io::Error),
    /// The frame is longer than allowed.
    #[error("control frame of {0} bytes is over the limit of {MAX_FRAME_BYTES}")]
    TooLong(usize),
    /// The bytes are not the JSON expected.
    #[error("control frame is not understood: {0}")]
    Malformed(#[from] serde_json::Error),
}

/// Writes one frame.
pub fn write_frame<T: Serialize>(to: &mut impl Write, message: &T) -> Result<(), FrameError> {
    let body = serde_json::to_vec(message)?;
    if body.len() > MAX_FRAME_BYTES {
        return Err(FrameError::TooLong(body.len()));
    }
    let mut frame = (body.len() as u32).to_le_bytes().to_vec();
    frame.extend_from_slice(&body);
    to.write_all(&frame)?;
    Ok(to.flush()?)
}

/// Reads one frame; `Ok(None)` where the peer closed before its first byte.
pub fn read_frame<T: DeserializeOwned>(from: &mut impl Read) -> Result<Option<T>, FrameError> {
    let mut length = [0; 4];
    match read_uninterrupted(from, &mut length)? {
        0 => return Ok(None),
        read => from.read_exact(&mut length[read..])?,
    }
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_FRAME_BYTES {
        return Err(FrameError::TooLong(length));
    }
    let mut body = vec![0; length];
    from.read_exact(&mut body)?;
    Ok(Some(serde_json::from_slice(&body)?))
}

/// A signal, such as Ctrl-C of somebody who is to be told properly, ends no conversation: reads of a
/// socket with a time-out are not restarted by the kernel (signal(7)).
fn read_uninterrupted(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match from.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is interrupted before each byte.
    struct Interrupting<'a>(&'a [u8], bool);

    impl Read for Interrupting<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.1 = !self.1;
            if self.1 {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let one = buffer.len().min(1);
            self.0.read(&mut buffer[..one])
        }
    }

    #[test]
    fn signals_end_no_conversation() {
        let mut frame = Vec::new();
        write_frame(&mut frame, &Request::Stop).expect("a vector takes every frame");
        let read = read_frame::<Request>(&mut Interrupting(&frame, false));
        assert_eq!(read.expect("own frame"), Some(Request::Stop));
        let end = read_frame::<Request>(&mut Interrupting(&[], false));
        assert_eq!(end.expect("a closed connection"), None);
    }

    #[test]
    fn a_request_has_these_bytes() {
        let mut frame = Vec::new();
        let envelope = Envelope {
            version: CONTROL_VERSION,
            request: Request::Status,
        };
        write_frame(&mut frame, &envelope).expect("a vector takes every frame");
        assert_eq!(
            frame,
            b"\x20\0\0\0{\"version\":1,\"request\":\"status\"}".as_slice()
        );
        assert_eq!(
            read_frame::<Envelope>(&mut frame.as_slice()).expect("own frame"),
            Some(envelope)
        );
    }

    #[test]
    fn oversized_and_truncated_frames_are_errors() {
        let huge = u32::MAX.to_le_bytes();
        assert!(matches!(
            read_frame::<Envelope>(&mut huge.as_slice()),
            Err(FrameError::TooLong(_))
        ));
        let short = b"\x10\0\0\0{\"ver";
        assert!(matches!(
            read_frame::<Envelope>(&mut short.as_slice()),
            Err(FrameError::Io(_))
        ));
        let nonsense = b"\x02\0\0\0[]";
        assert!(matches!(
            read_frame::<Envelope>(&mut nonsense.as_slice()),
            Err(FrameError::Malformed(_))
        ));
    }

    #[test]
    fn a_closed_connection_is_no_frame() {
        assert!(
            read_frame::<Envelope>(&mut [].as_slice())
                .expect("end is no error")
                .is_none()
        );
    }
}
