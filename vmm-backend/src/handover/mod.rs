//! The hand-over: userfaultfds born in the VMM's address space, and the guest RAM they watch.
//!
//! A userfaultfd belongs to the address space of the process that creates it, so it has to be
//! created *inside* the VMM. [`take`] does that while the VMM's main thread waits for our
//! vhost-user reply: a short-lived process of its own (see [`injector_main`]) makes that thread
//! run a handful of system calls, and this process fetches the descriptors with `pidfd_getfd`.
//! They stay open in the VMM too, so that the registration lives exactly as long as the guest.
//! [`discover`] finds the guest's RAM in the VMM's `/proc` entries, and refuses what paging would
//! destroy.
//!
//! The module knows nothing of pages, tiers, libvirt or virtio. It holds no locks. Invariant: the
//! VMM's registers, signal mask, memory and descriptors are as before after every failure.

pub mod discover;
mod injector;
mod kernel;
mod outcome;
pub(crate) mod powers;
mod ptrace;
mod thread;
mod ways;

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

pub use injector::injector_main;
pub use outcome::Attempt;
pub use powers::Powers;

use discover::{Mapping, RamBlock, Refusal};
use powers::{Answer, Errand};

/// Most userfaultfds one hand-over creates: bounds what is opened in the VMM.
pub const MAX_UFFDS: usize = 256;

/// A process that is being killed answers with all kinds of errors before it is gone: how long an
/// error waits to learn whether that is its reason. A moment, but on a busy host.
const ENDING: Duration = Duration::from_secs(1);

/// Identity of a memfd (or any file): what `fstat` says of it.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub struct MemfdId {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
}

impl MemfdId {
    /// Identity of an open file.
    pub fn of(file: &std::fs::File) -> io::Result<Self> {
        use std::os::unix::fs::MetadataExt;
        let metadata = file.metadata()?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
        })
    }
}

impl fmt::Display for MemfdId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {:#x} inode {}", self.device, self.inode)
    }
}

/// Who is at the other end of a unix socket, as the kernel recorded it at `connect`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process.
    pub pid: i32,
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
}

/// Who connected to this socket (`SO_PEERCRED`).
pub fn peer(socket: &UnixStream) -> Result<Peer, HandoverError> {
    let peer = kernel::peer_credentials(socket.as_fd()).map_err(HandoverError::Peer)?;
    if peer.pid > 0 {
        Ok(peer)
    } else {
        let text = "it runs in another PID namespace; start the backend where it sees QEMU";
        Err(HandoverError::Peer(io::Error::other(text)))
    }
}

/// The process whose guest is paged. Held by a pidfd, so that the number cannot be reused
/// unnoticed.
#[derive(Debug)]
pub struct Vmm {
    /// Process id.
    pub pid: i32,
    /// Field 22 of `/proc/PID/stat`: with the pid it names a process across our own restarts.
    pub start_time: u64,
    pidfd: OwnedFd,
    powers: Powers,
    /// Its memory map, once it was asked for: whoever has it open need not be permitted again.
    maps: Mutex<Option<File>>,
}

/// What forbids paging, in words.
fn forbidden(found: Result<(), Refusal>) -> io::Result<Option<String>> {
    match found {
        Ok(()) => Ok(None),
        Err(Refusal::Unreadable { source, .. }) => Err(source),
        Err(refusal) => Ok(Some(refusal.to_string())),
    }
}

impl Vmm {
    /// Opens the process `pid`; fails where it is gone.
    pub fn open(pid: i32) -> Result<Self, HandoverError> {
        let gone = |source| HandoverError::VmmGone { pid, source };
        let pidfd = kernel::pidfd_open(pid).map_err(gone)?;
        let start_time = discover::start_time(pid).map_err(gone)?;
        Ok(Self {
            pid,
            start_time,
            pidfd,
            powers: Powers::default(),
            maps: Mutex::default(),
        })
    }

    /// The same process, reached with these powers.
    pub fn with_powers(self, powers: &Powers) -> Self {
        Self {
            powers: powers.clone(),
            ..self
        }
    }

    /// Opens the process at the other end of a vhost-user socket.
    pub fn of_peer(socket: &UnixStream, powers: &Powers) -> Result<Self, HandoverError> {
        let pid = peer(socket)?.pid;
        if !powers.are_own() {
            let bound = powers.run(&Errand::Bind, Some(socket.as_fd()));
            bound.map_err(|error| error.into_handover(pid))?;
        }
        Ok(Self::open(pid)?.with_powers(powers))
    }

    /// Opens the process `pid` only if it is still the one that started at `start_time`.
    pub fn reopen(pid: i32, start_time: u64) -> Result<Self, HandoverError> {
        let vmm = Self::open(pid)?;
        if vmm.start_time == start_time {
            Ok(vmm)
        } else {
            Err(HandoverError::VmmGone {
                pid,
                source: io::Error::from_raw_os_error(libc::ESRCH),
            })
        }
    }

    /// The pidfd: readable (poll) once the process has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Whether the process has ended.
    pub fn has_ended(&self) -> bool {
        self.ends_within(Duration::ZERO)
    }

    fn ends_within(&self, patience: Duration) -> bool {
        // In doubt it lives: all that it has would be let go.
        kernel::poll_readable(self.pidfd.as_fd(), Some(patience)).unwrap_or(false)
    }

    /// The powers that it is reached with.
    pub(crate) fn powers(&self) -> &Powers {
        &self.powers
    }

    /// See [`discover::guest_ram`].
    pub fn guest_ram(&self) -> Result<Vec<RamBlock>, Refusal> {
        match self.powers.are_own() {
            true => discover::guest_ram(self),
            false => Ok(self.powers.blocks(&Errand::GuestRam)?),
        }
    }

    /// The block behind a mapping that appeared after the hand-over, or why it must not be paged.
    pub fn plugged_block(&self, mapping: &Mapping) -> Result<RamBlock, Refusal> {
        match self.powers.are_own() {
            true => discover::plugged_block(self.pid, None, mapping),
            false => self.one_block(Errand::PluggedBlock(mapping.clone())),
        }
    }

    /// The block behind a mapping that an earlier process of ours had taken over already.
    pub fn known_block(&self, mapping: &Mapping) -> Result<RamBlock, Refusal> {
        match self.powers.are_own() {
            true => discover::known_block(self.pid, mapping),
            false => self.one_block(Errand::KnownBlock(mapping.clone())),
        }
    }

    /// What it has open that reaches past its page tables into guest RAM, in words with the cure: such as a disk
    /// with O_DIRECT, or a device that is passed through.
    pub fn forbidden_file(&self) -> io::Result<Option<String>> {
        if !self.powers.are_own() {
            if !self.looks_at_files() {
                let text = "the supervisor is of an earlier build, until 'outram restart'";
                return Err(io::Error::other(text));
            }
            return self.why_forbidden(&Errand::OpenFiles);
        }
        forbidden(discover::open_files(self.pid))
    }

    /// Whether it can be told what it has open: not by the supervisor of a much earlier build.
    pub fn looks_at_files(&self) -> bool {
        self.powers.are_own() || std::env::var_os(powers::OPEN_FILES).is_some()
    }

    /// What large folios of base pages its RAM holds, in words with the cure. To be asked where it
    /// [may be](Self::looks_at_folios).
    pub fn large_folios(&self) -> io::Result<Option<String>> {
        match self.powers.are_own() {
            true => forbidden(discover::large_folios(self.pid)),
            false => self.why_forbidden(&Errand::LargeFolios),
        }
    }

    /// Whether it can be told what large folios there are: not by the supervisor of an earlier build.
    pub fn looks_at_folios(&self) -> bool {
        self.powers.are_own() || powers::knows_folios()
    }

    fn why_forbidden(&self, errand: &Errand) -> io::Result<Option<String>> {
        Ok(match self.powers.send(errand, None)? {
            (Answer::Forbidden(reason), _) => Some(reason),
            _ => None,
        })
    }

    fn one_block(&self, errand: Errand) -> Result<RamBlock, Refusal> {
        let block = self.powers.blocks(&errand)?.pop();
        block.ok_or_else(|| Refusal::Told("no block came with the answer".into()))
    }

    /// What it has mapped of memory backends' memfds now, RAM or not.
    pub fn mappings(&self) -> io::Result<Vec<Mapping>> {
        let mut maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner);
        let file = match &mut *maps {
            Some(file) => file,
            none => none.insert(self.open_own("maps", &Errand::Maps)?),
        };
        file.seek(SeekFrom::Start(0))?;
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        Ok(discover::parse_mappings(&text))
    }

    /// Whether `length` bytes at `file_offset` of the memfd `id` are mapped at `hva`, as when they were
    /// found. An unplugged block is not; a block whose pages the VMM replaced is.
    pub fn is_mapped(
        &self,
        id: MemfdId,
        file_offset: u64,
        hva: u64,
        length: u64,
    ) -> io::Result<bool> {
        Ok(self.mappings()?.iter().any(|mapping| {
            mapping.id == id
                && mapping.start <= hva
                && hva + length <= mapping.end
                && mapping.offset + (hva - mapping.start) == file_offset
        }))
    }

    /// Its page table, as `/proc/PID/pagemap` shows it.
    pub fn page_map(&self) -> io::Result<File> {
        self.open_own("pagemap", &Errand::PageMap)
    }

    fn open_own(&self, name: &str, errand: &Errand) -> io::Result<File> {
        match self.powers.are_own() {
            true => File::open(format!("/proc/{}/{name}", self.pid)),
            false => Ok(self.powers.fetch(errand)?.into()),
        }
    }

    /// Ends it (SIGKILL).
    pub fn kill(&self) -> io::Result<()> {
        match self.powers.are_own() {
            true => Ok(rustix::process::pidfd_send_signal(
                self.pidfd.as_fd(),
                rustix::process::Signal::KILL,
            )?),
            false => Ok(self.powers.run(&Errand::Kill, None)?),
        }
    }

    /// A duplicate of one of its descriptors.
    pub fn fetch(&self, number: RawFd) -> io::Result<OwnedFd> {
        kernel::pidfd_getfd(self.pidfd.as_fd(), number)
    }

    /// Duplicates of userfaultfds that an earlier hand-over left in the VMM: how a restarted
    /// backend takes a guest over. Each is checked to be a userfaultfd.
    pub fn fetch_uffds(&self, numbers: &[RawFd]) -> Result<Vec<OwnedFd>, HandoverError> {
        if !self.powers.are_own() {
            let sent = self.powers.send(&Errand::Fetch(numbers.to_vec()), None);
            let (_, uffds) = sent.map_err(|error| error.into_handover(self.pid))?;
            return match uffds.len() == numbers.len() {
                true => Ok(uffds),
                false => Err(HandoverError::Count(uffds.len())),
            };
        }
        numbers
            .iter()
            .map(|&number| {
                let fetched = self
                    .fetch(number)
                    .and_then(|fd| kernel::expect_uffd(fd.as_fd()).map(|()| fd));
                fetched.map_err(|source| HandoverError::Fetch {
                    pid: self.pid,
                    number,
                    source,
                })
            })
            .collect()
    }
}

impl AsRawFd for Vmm {
    fn as_raw_fd(&self) -> RawFd {
        self.pidfd.as_raw_fd()
    }
}

/// How the userfaultfds were obtained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// The VMM's own `/dev/userfaultfd`.
    Device,
    /// Our `/dev/userfaultfd`, passed over the vhost-user socket.
    PassedDevice,
    /// `userfaultfd(2)`, with `vm.unprivileged_userfaultfd = 1`.
    Syscall,
}

impl Way {
    /// Its name on command lines and in configuration.
    pub fn name(self) -> &'static str {
        match self {
            Way::Device => "device",
            Way::PassedDevice => "passed-device",
            Way::Syscall => "syscall",
        }
    }

    /// The way of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Way::Device, Way::PassedDevice, Way::Syscall]
            .into_iter()
            .find(|way| way.name() == name)
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Way::Device => "/dev/userfaultfd opened by QEMU",
            Way::PassedDevice => "/dev/userfaultfd passed over the vhost-user socket",
            Way::Syscall => "userfaultfd(2), vm.unprivileged_userfaultfd = 1",
        })
    }
}

/// What the hand-over may do.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether `userfaultfd(2)` may be used where the host's sysctl opens it to every user.
    pub allow_sysctl: bool,
    /// How long the whole hand-over may take: a moment, but on a host that is busy beyond measure. The VMM stands
    /// still for a small part of it.
    pub timeout: Duration,
    /// Ways that may be tried, in this order. For tests and for `doctor`; all by default.
    pub ways: Vec<Way>,
    /// The program whose subcommand `inject` is the injector: this one, unless a test says
    /// otherwise.
    pub injector: PathBuf,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            allow_sysctl: false,
            timeout: Duration::from_secs(30),
            ways: vec![Way::Device, Way::PassedDevice, Way::Syscall],
            injector: PathBuf::from("/proc/self/exe"),
        }
    }
}

/// A finished hand-over.
#[derive(Debug)]
pub struct HandedOver {
    /// The userfaultfds, before `UFFDIO_API`; close-on-exec and non-blocking.
    pub uffds: Vec<OwnedFd>,
    /// Their numbers in the VMM, in the same order.
    pub vmm_fd_numbers: Vec<RawFd>,
    /// How they were obtained.
    pub way: Way,
}

/// Why a hand-over failed. The VMM goes on as if nothing had happened.
#[derive(Debug, thiserror::Error)]
pub enum HandoverError {
    /// The socket has no peer credentials.
    #[error("cannot tell which process is at the other end of the vhost-user socket: {0}")]
    Peer(#[source] io::Error),
    /// The process ended (or never was).
    #[error("the VMM (process {pid}) is gone")]
    VmmGone {
        /// Process.
        pid: i32,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// More descriptors were asked for than [`MAX_UFFDS`], or none.
    #[error("{0} userfaultfds were asked for: expected 1 to {MAX_UFFDS}")]
    Count(usize),
    /// The injector could not be started, or ended without a result.
    #[error("the injector process failed: {0}")]
    Injector(String),
    /// The kernel does not let us trace the VMM.
    #[error(
        "tracing the VMM (process {pid}) is not permitted: {reason}; the backend needs CAP_SYS_PTRACE, \
         kernel.yama.ptrace_scope below 3, and leave of AppArmor or SELinux (see 'outram doctor')"
    )]
    NotPermitted {
        /// Process.
        pid: i32,
        /// What the kernel said, and who traces it already if anyone does.
        reason: String,
    },
    /// The main thread was never found in a system call.
    #[error(
        "the VMM's main thread did not wait in a system call within {waited:?}: is it stuck or busy? \
         Start the domain again"
    )]
    Busy {
        /// How long it was tried.
        waited: Duration,
    },
    /// No way to create a userfaultfd in the VMM is allowed.
    #[error("no userfaultfd can be created in the VMM:{}", outcome::describe(.attempts))]
    NoWay {
        /// Each way tried, with its error and cure.
        attempts: Vec<Attempt>,
    },
    /// A descriptor created in the VMM could not be fetched.
    #[error("userfaultfd {number} of the VMM (process {pid}) cannot be fetched")]
    Fetch {
        /// Process.
        pid: i32,
        /// The descriptor's number there.
        number: RawFd,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// What the supervisor told of an errand that failed.
    #[error("{0}")]
    Told(String),
    /// The injection itself failed; everything was put back.
    #[error("the injection into the VMM (process {pid}) failed: {detail}")]
    Injection {
        /// Process.
        pid: i32,
        /// At which step, and why.
        detail: String,
    },
}

/// Creates `uffd_count` userfaultfds in the VMM that waits for a reply on `socket` (our end).
///
/// Blocks for at most `options.timeout` and, where the injector does not even start, some seconds
/// more. Nothing of the vhost-user stream is consumed, and nothing is left in it, whatever the outcome.
pub fn take(
    vmm: &Vmm,
    socket: &UnixStream,
    uffd_count: usize,
    options: &Options,
) -> Result<HandedOver, HandoverError> {
    if uffd_count == 0 || uffd_count > MAX_UFFDS {
        return Err(HandoverError::Count(uffd_count));
    }
    if !vmm.powers.are_own() {
        let taken = vmm.powers.take(socket, uffd_count, options.allow_sysctl);
        return taken.map_err(|error| error.into_handover(vmm.pid));
    }
    let taken = injector::run(vmm, socket, uffd_count, options)
        .and_then(|(numbers, way)| Ok((vmm.fetch_uffds(&numbers)?, numbers, way)));
    let (uffds, numbers, way) = taken.map_err(|error| match error {
        // Whatever the step that met its end.
        _ if vmm.ends_within(ENDING) => HandoverError::VmmGone {
            pid: vmm.pid,
            source: io::Error::from_raw_os_error(libc::ESRCH),
        },
        error => error,
    })?;
    Ok(HandedOver {
        uffds,
        vmm_fd_numbers: numbers,
        way,
    })
}

/// Closes userfaultfds in the VMM that [`take`] left there: the end of a live detach, once every
/// range is unregistered and nothing of the guest's memory lies elsewhere. All or none are closed.
///
/// The VMM's main thread may be at anything; it is taken where it waits in a system call. Blocks as
/// long as [`take`].
pub fn close(vmm: &Vmm, numbers: &[RawFd], options: &Options) -> Result<(), HandoverError> {
    if numbers.is_empty() || numbers.len() > MAX_UFFDS {
        return Err(HandoverError::Count(numbers.len()));
    }
    if !vmm.powers.are_own() {
        let closed = vmm.powers.run(&Errand::Close(numbers.to_vec()), None);
        return closed.map_err(|error| error.into_handover(vmm.pid));
    }
    injector::run_close(vmm, numbers, options).map_err(|error| match error {
        _ if vmm.ends_within(ENDING) => HandoverError::VmmGone {
            pid: vmm.pid,
            source: io::Error::from_raw_os_error(libc::ESRCH),
        },
        error => error,
    })
}
