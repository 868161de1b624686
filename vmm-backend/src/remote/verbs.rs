//! RDMA with a server: a device opened for it, what its slabs are called there, and a data connection
//! that is a queue pair.
//!
//! The pages of a request are read and written by this side's device alone; the server's process has no
//! part in it. So nobody refuses a range in words: one that is not ours ends the queue pair. What lies
//! beyond a slab is therefore not asked for, and whether a slab is still ours the next greeting tells.
//!
//! Completions are waited for with all else that a thread waits for, by the channel's descriptor. To look
//! for them again and again for a while first was measured and left alone: with soft-RoCE in an emulated
//! machine of two processors the median of a 4 KiB read went from 248 to 237 µs where it was looked for up
//! to a millisecond, and did not change where it was up to 50 µs (four rounds of 1500 reads each); a
//! processor is taken for it, and other faults of the shard wait. Hardware, which answers in a few
//! microseconds, may say otherwise.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use outram_wire::server::data::{self, DataError};
use outram_wire::server::{Extent, SlabId, Token};
use outram_wire::units::PAGE_SIZE;
use outram_wire::verbs::{
    Choice, Domain, End, Initiator, Port, PostError, Presence, Remote, Stretch, VerbsError,
};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::connection::Line;
use super::{ExtentError, RemoteError, ServerAddress, SubmitError};

/// How long the first packets may take: several times what the device tries for by itself.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// The id of the first read, which proves that packets get there and back.
const PROBE: u64 = 0;

/// What the slabs that a greeting found are called, and those that were leased since.
#[derive(Default)]
pub(super) struct Keys(RwLock<HashMap<SlabId, Remote>>);

impl Keys {
    pub(super) fn insert(&self, slab: SlabId, remote: Remote) {
        let mut keys = self.0.write().unwrap_or_else(PoisonError::into_inner);
        keys.insert(slab, remote);
    }

    pub(super) fn remove(&self, slab: SlabId) {
        let mut keys = self.0.write().unwrap_or_else(PoisonError::into_inner);
        keys.remove(&slab);
    }

    fn get(&self, slab: SlabId) -> Option<Remote> {
        let keys = self.0.read().unwrap_or_else(PoisonError::into_inner);
        keys.get(&slab).copied()
    }
}

/// RDMA with a server between two greetings.
pub(super) struct Verbs {
    domain: Domain,
    pub(super) keys: Arc<Keys>,
    slab_bytes: u64,
    /// Slabs whose keys are to be asked for; with the ones that the owner waits for.
    pub(super) unnamed: VecDeque<(SlabId, bool)>,
    /// Whether a key is being asked for: one at a time, for registering may take the server a while.
    pub(super) is_asking: bool,
    /// Whether the queue pairs were asked for, once every slab had its key.
    pub(super) is_open: bool,
}

impl Verbs {
    /// Opens the device through which a server is reached at the address `local`.
    pub(super) fn open(
        choice: &Choice,
        local: IpAddr,
        slab_bytes: u64,
    ) -> Result<Self, VerbsError> {
        Ok(Self {
            domain: Domain::open(&choice.port(local)?)?,
            keys: Arc::default(),
            slab_bytes,
            unnamed: VecDeque::new(),
            is_asking: false,
            is_open: false,
        })
    }

    pub(super) fn presence(&self) -> Presence {
        self.domain.presence()
    }

    pub(super) fn port(&self) -> &Port {
        self.domain.port()
    }

    /// Whether a slab can be there.
    pub(super) fn holds(&self, remote: Remote) -> bool {
        remote.address.checked_add(self.slab_bytes).is_some()
    }

    /// This side's end of a new queue pair.
    pub(super) fn new_pair(&self) -> Result<Half, VerbsError> {
        Ok(Half {
            initiator: Initiator::new(&self.domain)?,
            keys: self.keys.clone(),
            slab_bytes: self.slab_bytes,
        })
    }
}

/// A queue pair whose other end is not known yet.
pub(super) struct Half {
    initiator: Initiator,
    keys: Arc<Keys>,
    slab_bytes: u64,
}

/// The other end of a queue pair, as the server tells it.
pub(super) struct Other {
    pub(super) end: End,
    pub(super) probe: Remote,
    pub(super) proof: Token,
}

impl Half {
    pub(super) fn end(&self) -> End {
        self.initiator.end()
    }

    /// Joins the ends, and tries whether packets get there and back.
    pub(super) fn join(
        mut self,
        server: ServerAddress,
        other: &Other,
    ) -> Result<VerbsConn, RemoteError> {
        let failed = |source| RemoteError::Verbs {
            server: server.clone(),
            source,
        };
        if !other.end.is_possible() {
            return Err(RemoteError::Protocol {
                server,
                what: format!("an impossible end of a queue pair: {:?}", other.end),
            });
        }
        self.initiator.connect(&other.end).map_err(failed)?;
        match self.probe(other) {
            Ok(true) => {}
            Ok(false) => {
                let what = "a queue pair leads to another server".to_owned();
                return Err(RemoteError::Protocol { server, what });
            }
            Err(error) => return Err(failed(error)),
        }
        Ok(VerbsConn {
            line: Line::new(server),
            initiator: self.initiator,
            keys: self.keys,
            slab_bytes: self.slab_bytes,
            pending: HashMap::new(),
            stretches: Vec::new(),
        })
    }

    /// Reads what the server holds for this; whether it is that. A page, of which the server registers a whole one:
    /// where the largest packets get lost on their way, small ones prove nothing.
    fn probe(&mut self, other: &Other) -> Result<bool, VerbsError> {
        let proof = other.proof.0;
        let stretch = Stretch {
            address: other.probe.address,
            key: other.probe.key,
            length: PAGE_SIZE as u32,
        };
        let in_time = |error: io::Error| VerbsError::NoPort(format!("no answer in time: {error}"));
        match self.initiator.read(PROBE, &[stretch]) {
            Ok(()) => {}
            Err(PostError::Failed(error)) => return Err(error),
            Err(PostError::Full) => return Err(in_time(io::ErrorKind::QuotaExceeded.into())),
        }
        let deadline = Instant::now() + PROBE_TIMEOUT;
        let mut found = None;
        while found.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(in_time(io::ErrorKind::TimedOut.into()));
            }
            wait_readable(self.initiator.as_fd(), left).map_err(in_time)?;
            self.initiator
                .complete(|_, bytes| found = Some(bytes.starts_with(&proof)))?;
        }
        Ok(found == Some(true))
    }
}

/// Waits until there is something to read, for so long at most; whether there is.
fn wait_readable(fd: BorrowedFd<'_>, limit: Duration) -> io::Result<bool> {
    let limit = Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    match rustix::event::poll(
        &mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)],
        Some(&limit),
    ) {
        Ok(readable) => Ok(readable > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// A data connection over RDMA. Owned by one thread; never blocks.
pub(super) struct VerbsConn {
    pub(super) line: Line,
    initiator: Initiator,
    keys: Arc<Keys>,
    slab_bytes: u64,
    /// Bytes that each request in flight reads.
    pending: HashMap<u64, u64>,
    stretches: Vec<Stretch>,
}

impl AsFd for VerbsConn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.initiator.as_fd()
    }
}

impl VerbsConn {
    pub(super) fn submit_read(&mut self, id: u64, extents: &[Extent]) -> Result<(), SubmitError> {
        let bytes = self.prepare(id, extents)?;
        let posted = self.initiator.read(id, &self.stretches);
        self.note(id, posted, bytes)
    }

    pub(super) fn submit_write(
        &mut self,
        id: u64,
        extents: &[Extent],
        payload: &[&[u8]],
    ) -> Result<(), SubmitError> {
        let bytes = self.prepare(id, extents)?;
        let payload_bytes: u64 = payload.iter().map(|piece| piece.len() as u64).sum();
        if payload_bytes != bytes {
            return Err(SubmitError::Illegal(DataError::Payload {
                payload_bytes,
                expected_bytes: bytes,
            }));
        }
        let posted = self.initiator.write(id, &self.stretches, payload);
        self.note(id, posted, 0)?;
        self.line.sent_bytes += bytes;
        Ok(())
    }

    /// Checks a request and says where its extents lie; returns their bytes.
    fn prepare(&mut self, id: u64, extents: &[Extent]) -> Result<u64, SubmitError> {
        self.line.check_alive()?;
        let bytes = data::check_extents(extents)?;
        if self.pending.contains_key(&id) {
            return Err(SubmitError::IdInUse(id));
        }
        self.stretches.clear();
        for extent in extents {
            let Extent {
                slab,
                offset,
                length,
            } = *extent;
            if u64::from(offset) + u64::from(length) > self.slab_bytes {
                let what = format!("a range past the end of slab {slab}");
                return Err(self.not_found(what));
            }
            let Some(remote) = self.keys.get(slab) else {
                return Err(self.not_found(format!("slab {slab} has no key")));
            };
            let address = remote.address + u64::from(offset);
            match self.stretches.last_mut() {
                // Neighbours are one transfer.
                Some(last)
                    if last.key == remote.key
                        && last.address + u64::from(last.length) == address =>
                {
                    last.length += length;
                }
                _ => self.stretches.push(Stretch {
                    address,
                    key: remote.key,
                    length,
                }),
            }
        }
        Ok(bytes.into())
    }

    fn note(
        &mut self,
        id: u64,
        posted: Result<(), PostError>,
        read_bytes: u64,
    ) -> Result<(), SubmitError> {
        match posted {
            Ok(()) => {
                self.pending.insert(id, read_bytes);
                Ok(())
            }
            Err(PostError::Full) => Err(SubmitError::QueueFull),
            Err(PostError::Failed(source)) => {
                self.line.dead = true;
                Err(SubmitError::Dead(self.failed(source)))
            }
        }
    }

    pub(super) fn receive(
        &mut self,
        mut on_completion: impl FnMut(u64, Result<&mut [u8], ExtentError>),
    ) -> Result<(), RemoteError> {
        self.line.check_alive()?;
        let (pending, received) = (&mut self.pending, &mut self.line.received_bytes);
        let completed = self.initiator.complete(|id, bytes| {
            *received += pending.remove(&id).unwrap_or(0);
            on_completion(id, Ok(bytes));
        });
        completed.map_err(|source| {
            self.line.dead = true;
            self.failed(source)
        })
    }

    /// Whether there is anything to [`receive`](Self::receive), an error among it.
    pub(super) fn look(&self) -> bool {
        // A failure shows where it is waited for.
        self.line.dead || wait_readable(self.as_fd(), Duration::ZERO).unwrap_or(false)
    }

    pub(super) fn pending(&self) -> usize {
        self.pending.len()
    }

    fn failed(&self, source: VerbsError) -> RemoteError {
        RemoteError::Verbs {
            server: self.line.server.clone(),
            source,
        }
    }

    fn not_found(&mut self, what: String) -> SubmitError {
        let source = io::Error::new(io::ErrorKind::NotFound, what);
        self.line.die(source).into()
    }
}
