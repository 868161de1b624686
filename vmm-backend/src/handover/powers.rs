//! What takes power over the VMM: finding and opening its memory, making and fetching descriptors in
//! it, ending it. A pager has none of that power itself. Its supervisor keeps it and runs these few
//! errands for it, on the one VMM that is its guest's.
//!
//! One message each way over a socket that keeps messages apart (`SOCK_SEQPACKET`): JSON, with
//! descriptors beside it. Both ends are of one build, or of two that follow each other: fields may be
//! added, and an errand that is not known is answered with an error.
//!
//! Errands that take long go over a socket of their own, for QEMU may wait for others.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::discover::{Mapping, RamBlock};
use super::{HandedOver, HandoverError, MemfdId, Way};

/// Longest message either side takes.
const MAX_MESSAGE_BYTES: usize = 128 << 10;

/// Most descriptors beside one: the kernel's limit (`SCM_MAX_FD`).
const MAX_DESCRIPTORS: usize = 253;

/// A variable that a supervisor sets where it knows [`Errand::OpenFiles`], to [`FOLIOS`] where it knows
/// [`Errand::LargeFolios`] and answers what it does not know with an error. One of an earlier build runs no errand any
/// more once it was asked for one that it does not know.
pub(crate) const OPEN_FILES: &str = "OUTRAM_LOOKS_AT_OPEN_FILES";
/// See [`OPEN_FILES`].
pub(crate) const FOLIOS: &str = "folios";

/// Whether the supervisor knows [`Errand::LargeFolios`]; see [`OPEN_FILES`].
pub(crate) fn knows_folios() -> bool {
    std::env::var_os(OPEN_FILES).is_some_and(|known| known == FOLIOS)
}

/// What a pager may ask of its supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Errand {
    /// The VMM at the other end of the socket beside this is the guest's, unless there is one already.
    Bind,
    /// See [`super::discover::guest_ram`].
    GuestRam,
    /// See [`super::take`]; the socket is beside it.
    Take {
        /// How many.
        count: usize,
        /// As in [`super::Options`].
        allow_sysctl: bool,
    },
    /// See [`super::close`].
    Close(Vec<RawFd>),
    /// Duplicates of userfaultfds.
    Fetch(Vec<RawFd>),
    /// See [`super::discover::open_files`].
    OpenFiles,
    /// See [`super::discover::large_folios`].
    LargeFolios,
    /// `/proc/PID/maps`, open.
    Maps,
    /// `/proc/PID/pagemap`, open.
    PageMap,
    /// See [`super::discover::plugged_block`].
    PluggedBlock(Mapping),
    /// See [`super::discover::known_block`].
    KnownBlock(Mapping),
    /// A counter of SIGTERMs that it gets.
    CountTerminations,
    /// SIGKILL.
    Kill,
    /// Make the vhost-user socket QEMU's user's.
    GiveSocket,
    /// Leave this reason in the guest's directory.
    NoteError(String),
    /// A socket for [slow](Self::is_slow) errands.
    Line,
}

impl Errand {
    /// It may take seconds.
    pub(crate) fn is_slow(&self) -> bool {
        matches!(self, Self::PluggedBlock(_) | Self::LargeFolios)
    }
}

/// How an errand went.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Answer {
    /// It is done; what was asked for is beside this.
    Done,
    /// Blocks of RAM, their memfds beside this in the same order.
    Blocks(Vec<Block>),
    /// Userfaultfds, beside this in the same order.
    Taken {
        /// Their numbers in the VMM.
        numbers: Vec<RawFd>,
        /// How they were obtained.
        way: Way,
    },
    /// Of open files or large folios: why they forbid paging.
    Forbidden(String),
    /// It failed.
    Failed {
        /// Because the VMM is gone.
        gone: bool,
        /// Why, in words.
        reason: String,
    },
}

/// A block of RAM without its memfd.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Block {
    name: String,
    id: MemfdId,
    file_offset: u64,
    hva: u64,
    length: u64,
    huge_page_bytes: Option<u64>,
}

impl Block {
    /// A block as it is told, and its memfd.
    pub(crate) fn split(block: RamBlock) -> (Self, OwnedFd) {
        let told = Self {
            name: block.name,
            id: block.id,
            file_offset: block.file_offset,
            hva: block.hva,
            length: block.length,
            huge_page_bytes: block.huge_page_bytes,
        };
        (told, block.memfd.into())
    }

    fn join(self, memfd: OwnedFd) -> RamBlock {
        RamBlock {
            name: self.name,
            memfd: File::from(memfd),
            id: self.id,
            file_offset: self.file_offset,
            hva: self.hva,
            length: self.length,
            huge_page_bytes: self.huge_page_bytes,
        }
    }
}

/// Why an errand brought nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ErrandError {
    /// The VMM is gone.
    #[error("{0}")]
    Gone(String),
    /// Anything else that the supervisor told.
    #[error("{0}")]
    Told(String),
    /// Nobody answers.
    #[error("the supervisor does not answer")]
    Silent(#[source] io::Error),
}

impl From<ErrandError> for io::Error {
    fn from(error: ErrandError) -> Self {
        match error {
            ErrandError::Silent(error) => error,
            ErrandError::Gone(_) => Self::from_raw_os_error(libc::ESRCH),
            ErrandError::Told(reason) => Self::other(reason),
        }
    }
}

impl ErrandError {
    pub(super) fn into_handover(self, pid: i32) -> HandoverError {
        match self {
            Self::Gone(_) => HandoverError::VmmGone {
                pid,
                source: io::Error::from_raw_os_error(libc::ESRCH),
            },
            error => HandoverError::Told(outram_wire::causes::with_causes(&error)),
        }
    }
}

/// Power over the VMM: this process's own, or the supervisor's.
#[derive(Clone, Debug, Default)]
pub struct Powers(Option<Arc<Lines>>);

/// Sockets to the supervisor. A question and its answer are one thing under a lock.
#[derive(Debug)]
struct Lines {
    first: Mutex<OwnedFd>,
    /// For what is slow, once that was asked for and given.
    slow: OnceLock<Mutex<OwnedFd>>,
}

impl Powers {
    /// Those of whoever is at the other end.
    pub fn lent(socket: OwnedFd) -> Self {
        Self(Some(Arc::new(Lines {
            first: Mutex::new(socket),
            slow: OnceLock::new(),
        })))
    }

    /// Whether this process has them itself.
    pub(crate) fn are_own(&self) -> bool {
        self.0.is_none()
    }

    /// Has an errand run.
    pub(crate) fn send(
        &self,
        errand: &Errand,
        beside: Option<BorrowedFd<'_>>,
    ) -> Result<(Answer, Vec<OwnedFd>), ErrandError> {
        let Some(lines) = &self.0 else {
            let text = "this process runs its errands itself".to_owned();
            return Err(ErrandError::Told(text));
        };
        let socket = match errand.is_slow() {
            true => self.slow_line(lines),
            false => &lines.first,
        };
        let socket = socket.lock().unwrap_or_else(PoisonError::into_inner);
        let beside: Vec<BorrowedFd<'_>> = beside.into_iter().collect();
        send(socket.as_fd(), errand, &beside).map_err(ErrandError::Silent)?;
        let received = receive(socket.as_fd()).map_err(ErrandError::Silent)?;
        match received {
            Some((Answer::Failed { gone: true, reason }, _)) => Err(ErrandError::Gone(reason)),
            Some((Answer::Failed { reason, .. }, _)) => Err(ErrandError::Told(reason)),
            Some(answer) => Ok(answer),
            None => Err(ErrandError::Silent(io::ErrorKind::BrokenPipe.into())),
        }
    }

    /// Where slow errands go: with all others where the supervisor gives no socket for them.
    fn slow_line<'a>(&self, lines: &'a Lines) -> &'a Mutex<OwnedFd> {
        if let Some(slow) = lines.slow.get() {
            return slow;
        }
        // Those before run no errand any more after one that they do not know.
        if !knows_folios() {
            return &lines.first;
        }
        match self.fetch(&Errand::Line) {
            Ok(line) => lines.slow.get_or_init(|| Mutex::new(line)),
            Err(error) => {
                tracing::debug!(%error, "slow errands hold up others");
                &lines.first
            }
        }
    }

    /// One that brings a descriptor.
    pub(crate) fn fetch(&self, errand: &Errand) -> Result<OwnedFd, ErrandError> {
        let (_, descriptors) = self.send(errand, None)?;
        let descriptor = descriptors.into_iter().next();
        descriptor.ok_or_else(|| ErrandError::Told("no descriptor came with the answer".into()))
    }

    /// One that brings nothing.
    pub(crate) fn run(
        &self,
        errand: &Errand,
        beside: Option<BorrowedFd<'_>>,
    ) -> Result<(), ErrandError> {
        self.send(errand, beside).map(drop)
    }

    pub(super) fn blocks(&self, errand: &Errand) -> Result<Vec<RamBlock>, ErrandError> {
        match self.send(errand, None)? {
            (Answer::Blocks(blocks), memfds) if blocks.len() == memfds.len() => {
                let joined = blocks.into_iter().zip(memfds);
                Ok(joined.map(|(block, memfd)| block.join(memfd)).collect())
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    pub(super) fn take(
        &self,
        socket: &UnixStream,
        count: usize,
        allow_sysctl: bool,
    ) -> Result<HandedOver, ErrandError> {
        let errand = Errand::Take {
            count,
            allow_sysctl,
        };
        match self.send(&errand, Some(socket.as_fd()))? {
            (Answer::Taken { numbers, way }, uffds) if uffds.len() == numbers.len() => {
                Ok(HandedOver {
                    uffds,
                    vmm_fd_numbers: numbers,
                    way,
                })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }
}

fn unexpected(answer: &Answer) -> ErrandError {
    ErrandError::Told(format!(
        "the supervisor's answer is to another question: {answer:?}"
    ))
}

/// Both ends of a socket for errands.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    Ok((ours, theirs))
}

/// Sends one message.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    message: &impl Serialize,
    beside: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MAX_MESSAGE_BYTES || beside.len() > MAX_DESCRIPTORS {
        return Err(io::Error::other("a message is too long"));
    }
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !beside.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(beside)) {
        return Err(io::Error::other("too many descriptors"));
    }
    sendmsg(
        socket,
        &[IoSlice::new(&bytes)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// Receives one message; `None` where the other end is closed.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; MAX_MESSAGE_BYTES];
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        match recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            received => break received?,
        }
    };
    let descriptors = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    if received.bytes == 0 {
        return Ok(None);
    }
    if received
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        return Err(io::Error::other("a message was cut short"));
    }
    Ok(Some((
        serde_json::from_slice(&bytes[..received.bytes])?,
        descriptors,
    )))
}
