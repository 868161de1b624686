//! The supervisor's part of [`crate::handover::powers`]: it runs a pager's errands, and sees to it that
//! they concern the guest's VMM alone.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use outram_wire::causes::with_causes;
use serde::{Deserialize, Serialize};

use super::run_dir::{RunDir, parse_user};
use super::termination;
use crate::handover::powers::{self, Answer, Block, Errand};
use crate::handover::{self, HandoverError, Options, Vmm};

/// The guest's VMM, once it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Bound {
    pid: i32,
    start_time: u64,
}

/// What lends power over one guest's VMM.
#[derive(Clone, Debug)]
pub(super) struct Lender {
    /// Where the VMM is written down, for a supervisor that follows this one: out of the pager's reach.
    file: PathBuf,
    dir: PathBuf,
    socket_user: Option<String>,
    bound: Arc<Mutex<Option<Bound>>>,
    /// The VMM came to this supervisor's pager, and none has let it go since.
    came: Arc<AtomicBool>,
    /// The pager's process, 0 before there is one.
    pager: Arc<AtomicI32>,
    /// Sockets for slow errands that pagers have.
    lines: Arc<AtomicUsize>,
}

/// Most sockets for slow errands: one for each of two pagers, of which one takes over from the other.
const MOST_LINES: usize = 2;

/// Why an errand is not run.
#[derive(Debug, thiserror::Error)]
enum LendError {
    /// No VMM has come.
    #[error(
        "no VMM has connected to this backend, and none is written down in {0} (a guest that was started by an earlier build needs that build again)"
    )]
    Unbound(PathBuf),
    /// Another one than the guest's.
    #[error("process {0} is not this guest's VMM, which is process {1}")]
    Other(i32, i32),
    /// Whoever the pager shows did not come as a VMM does.
    #[error("what is shown is no connection to {0}, which is where this guest's VMM comes")]
    Elsewhere(PathBuf),
    /// Another user's process.
    #[error("process {0} is of user {1}, this guest's VMM of '{2}'")]
    User(i32, u32, String),
    /// A pager that asks again and again.
    #[error("there are {MOST_LINES} sockets for slow errands already, and no pager needs more")]
    Lines,
    /// What has its place among all others.
    #[error("this errand is not run over a socket for slow ones")]
    NotSlow,
    /// The errand.
    #[error(transparent)]
    Handover(#[from] HandoverError),
    /// The errand.
    #[error(transparent)]
    Refusal(#[from] handover::discover::Refusal),
    /// The errand.
    #[error(transparent)]
    System(#[from] io::Error),
    /// An errand of a later build's.
    #[error("this supervisor does not know the errand")]
    Unknown(#[source] serde_json::Error),
    /// Nothing was beside the errand.
    #[error("the socket that belongs to the errand is missing")]
    NoSocket,
    /// A socket that cannot be given away.
    #[error("{0}")]
    Socket(String),
}

impl LendError {
    fn is_gone(&self) -> bool {
        use handover::discover::Refusal;
        matches!(
            self,
            Self::Handover(HandoverError::VmmGone { .. }) | Self::Refusal(Refusal::Gone { .. })
        )
    }
}

type Brought = (Answer, Vec<OwnedFd>);

impl Lender {
    /// For the guest of this directory, of which a former supervisor may have written down its VMM.
    pub(super) fn new(dir: &Path, socket_user: Option<&str>) -> Self {
        let file = dir.with_extension("vmm");
        let text = fs::read(&file).ok();
        let bound = text.and_then(|text| serde_json::from_slice(&text).ok());
        Self {
            file,
            dir: dir.to_owned(),
            socket_user: socket_user.map(str::to_owned),
            bound: Arc::new(Mutex::new(bound)),
            came: Arc::default(),
            pager: Arc::default(),
            lines: Arc::default(),
        }
    }

    /// Says which process the pager is: it has the guest's memory mapped, and may.
    pub(super) fn note_pager(&self, pid: i32) {
        self.pager.store(pid, Ordering::Relaxed);
    }

    /// Forgets the VMM, which has ended.
    pub(super) fn forget(&self) {
        if let Err(error) = fs::remove_file(&self.file)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, path = %self.file.display(), "a file stays");
        }
    }

    /// Runs errands for one pager, in a thread of its own, until that pager has ended.
    pub(super) fn lend(&self, socket: OwnedFd) -> io::Result<()> {
        self.lend_line(socket, None)
    }

    /// The same over a socket for slow errands alone, where `line` counts it.
    fn lend_line(&self, socket: OwnedFd, line: Option<Line>) -> io::Result<()> {
        let lender = self.clone();
        let work = move || {
            if let Err(error) = lender.serve(&socket, line.is_some()) {
                tracing::warn!(%error, "the pager's errands are not run any more");
            }
        };
        std::thread::Builder::new()
            .name("errands".to_owned())
            .spawn(work)
            .map(drop)
    }

    fn serve(&self, socket: &OwnedFd, is_slow: bool) -> io::Result<()> {
        loop {
            let ran = match powers::receive::<serde_json::Value>(socket.as_fd()) {
                Ok(None) => return Ok(()),
                Ok(Some((asked, beside))) => serde_json::from_value(asked)
                    .map_err(LendError::Unknown)
                    .and_then(|errand: Errand| match is_slow && !errand.is_slow() {
                        true => Err(LendError::NotSlow),
                        false => self.run(errand, beside),
                    }),
                // The pager waits for an answer all the same: no descriptor was free for what came, perhaps.
                Err(error) => Err(LendError::System(error)),
            };
            let (answer, descriptors) = match ran {
                Ok(brought) => brought,
                Err(error) => {
                    let failed = Answer::Failed {
                        gone: error.is_gone(),
                        reason: with_causes(&error),
                    };
                    (failed, Vec::new())
                }
            };
            let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            powers::send(socket.as_fd(), &answer, &descriptors)?;
        }
    }

    fn run(&self, errand: Errand, beside: Vec<OwnedFd>) -> Result<Brought, LendError> {
        let socket = beside.into_iter().next().map(UnixStream::from);
        match errand {
            Errand::Bind => {
                self.bind(&socket.ok_or(LendError::NoSocket)?)?;
                return done();
            }
            Errand::GiveSocket => {
                let given = RunDir::at(&self.dir).give_vhost(self.socket_user.as_deref());
                given.map_err(|error| LendError::Socket(format!("{error:#}")))?;
                return done();
            }
            Errand::NoteError(reason) => {
                RunDir::at(&self.dir).note_error(&reason);
                return done();
            }
            Errand::Line => {
                let line = Line::add(&self.lines).ok_or(LendError::Lines)?;
                let (ours, theirs) = powers::pair()?;
                self.lend_line(ours, Some(line))?;
                return one(theirs);
            }
            _ => {}
        }
        let vmm = self.vmm()?;
        match errand {
            Errand::Bind | Errand::GiveSocket | Errand::NoteError(_) | Errand::Line => done(),
            Errand::GuestRam => Ok(blocks(vmm.guest_ram()?)),
            Errand::PluggedBlock(mapping) => {
                let pager = Some(self.pager.load(Ordering::Relaxed));
                let block = handover::discover::plugged_block(vmm.pid, pager, &mapping)?;
                Ok(blocks(vec![block]))
            }
            Errand::KnownBlock(mapping) => Ok(blocks(vec![vmm.known_block(&mapping)?])),
            Errand::Take {
                count,
                allow_sysctl,
            } => {
                let options = Options {
                    allow_sysctl,
                    ..Options::default()
                };
                let socket = socket.ok_or(LendError::NoSocket)?;
                let taken = handover::take(&vmm, &socket, count, &options)?;
                let answer = Answer::Taken {
                    numbers: taken.vmm_fd_numbers,
                    way: taken.way,
                };
                Ok((answer, taken.uffds))
            }
            Errand::Close(numbers) => {
                self.came.store(false, Ordering::Relaxed);
                handover::close(&vmm, &numbers, &Options::default())?;
                done()
            }
            Errand::Fetch(numbers) => Ok((Answer::Done, vmm.fetch_uffds(&numbers)?)),
            Errand::OpenFiles => forbidden(vmm.forbidden_file()?),
            Errand::LargeFolios => forbidden(vmm.large_folios()?),
            Errand::Maps => one(fs::File::open(format!("/proc/{}/maps", vmm.pid))?),
            Errand::PageMap => one(vmm.page_map()?),
            Errand::CountTerminations => one(termination::count(vmm.pid)?),
            Errand::Kill => {
                vmm.kill()?;
                done()
            }
        }
    }

    /// Whether a VMM has come, lives, and was not let go.
    pub(super) fn has_vmm(&self) -> bool {
        self.came.load(Ordering::Relaxed) && self.vmm().is_ok_and(|vmm| !vmm.has_ended())
    }

    /// The guest's VMM.
    fn vmm(&self) -> Result<Vmm, LendError> {
        let bound = *self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        let bound = bound.ok_or_else(|| LendError::Unbound(self.file.clone()))?;
        Ok(Vmm::reopen(bound.pid, bound.start_time)?)
    }

    /// Whoever is at the other end of this socket is the guest's VMM, unless that is another process.
    /// The pager is not believed: it could show a connection that it made to somebody, or a process of
    /// root's that asked it something.
    fn bind(&self, socket: &UnixStream) -> Result<(), LendError> {
        let dir = RunDir::at(&self.dir);
        // A pager of an earlier build makes it under its name.
        let places = [dir.vhost_socket_made(), dir.vhost_socket()];
        let met = socket.local_addr()?;
        if !places.iter().any(|place| met.as_pathname() == Some(place)) {
            return Err(LendError::Elsewhere(dir.vhost_socket()));
        }
        let peer = handover::peer(socket)?;
        if let Some(user) = &self.socket_user {
            let (uid, _) =
                parse_user(user).map_err(|error| LendError::Socket(format!("{error:#}")))?;
            if uid != peer.uid {
                return Err(LendError::User(peer.pid, peer.uid, user.clone()));
            }
        }
        let came = Vmm::open(peer.pid)?;
        if let Ok(known) = self.vmm()
            && !known.has_ended()
            && (known.pid, known.start_time) != (came.pid, came.start_time)
        {
            return Err(LendError::Other(came.pid, known.pid));
        }
        let bound = Bound {
            pid: came.pid,
            start_time: came.start_time,
        };
        self.write_down(bound)?;
        *self.bound.lock().unwrap_or_else(PoisonError::into_inner) = Some(bound);
        self.came.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn write_down(&self, bound: Bound) -> io::Result<()> {
        let next = self.file.with_extension("vmm.next");
        let mut options = fs::OpenOptions::new();
        let file = options.create(true).write(true).truncate(true).mode(0o600);
        serde_json::to_writer(file.open(&next)?, &bound)?;
        fs::rename(&next, &self.file)
    }
}

/// Counts a socket for slow errands, until it is dropped.
struct Line(Arc<AtomicUsize>);

impl Line {
    /// One more, unless there are enough.
    fn add(lines: &Arc<AtomicUsize>) -> Option<Self> {
        let more = |count| (count < MOST_LINES).then_some(count + 1);
        lines
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .ok()
            .map(|_| Self(Arc::clone(lines)))
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn done() -> Result<Brought, LendError> {
    Ok((Answer::Done, Vec::new()))
}

fn forbidden(why: Option<String>) -> Result<Brought, LendError> {
    Ok((why.map_or(Answer::Done, Answer::Forbidden), Vec::new()))
}

fn one(descriptor: impl Into<OwnedFd>) -> Result<Brought, LendError> {
    Ok((Answer::Done, vec![descriptor.into()]))
}

fn blocks(found: Vec<handover::discover::RamBlock>) -> Brought {
    let (told, memfds) = found.into_iter().map(Block::split).unzip();
    (Answer::Blocks(told), memfds)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixListener;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Set where this program runs as a VMM: the socket that it connects to.
    const SOCKET: &str = "OUTRAM_TEST_SOCKET";

    /// A process that has connected to a socket, as QEMU does.
    struct Visitor {
        process: Child,
        connection: UnixStream,
    }

    impl Visitor {
        fn come(listener: &UnixListener) -> Self {
            let path = listener.local_addr().expect("bound");
            let process = Command::new(std::env::current_exe().expect("this program"))
                .args(["--exact", "daemon::lender::tests::visitor"])
                .env(SOCKET, path.as_pathname().expect("a path"))
                .stdout(Stdio::null())
                .spawn()
                .expect("this program runs");
            let (connection, _) = listener.accept().expect("it connects");
            Self {
                process,
                connection,
            }
        }

        fn shown(&self) -> Vec<OwnedFd> {
            vec![self.connection.try_clone().expect("a duplicate").into()]
        }
    }

    impl Drop for Visitor {
        fn drop(&mut self) {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }

    /// What a visitor runs; by itself it has nothing to do.
    #[test]
    fn visitor() {
        if let Ok(path) = std::env::var(SOCKET) {
            let mut connection = UnixStream::connect(path).expect("somebody listens");
            let _ = connection.read(&mut [0]);
        }
    }

    fn listen(dir: &Path) -> (UnixListener, Lender) {
        let listener = UnixListener::bind(RunDir::at(dir).vhost_socket_made()).expect("bound");
        (listener, Lender::new(dir, None))
    }

    /// The same, and a pager's socket to it.
    fn lent(dir: &Path) -> (UnixListener, Lender, OwnedFd) {
        let (listener, lender) = listen(dir);
        let (ours, theirs) = powers::pair().expect("a socket");
        lender.lend(theirs).expect("a thread");
        (listener, lender, ours)
    }

    fn maps(brought: Brought) -> String {
        let descriptor = brought.1.into_iter().next().expect("a file");
        std::io::read_to_string(fs::File::from(descriptor)).expect("readable")
    }

    fn maps_of(visitor: &Visitor) -> String {
        let path = format!("/proc/{}/maps", visitor.process.id());
        fs::read_to_string(path).expect("readable")
    }

    #[test]
    fn errands_concern_the_vmm_that_came_first_and_no_other() {
        let root = tempfile::tempdir().expect("a folder");
        let dir = root.path().join("guest");
        fs::create_dir(&dir).expect("made");
        let (listener, lender) = listen(&dir);
        let unbound = lender.run(Errand::Kill, Vec::new());
        assert!(matches!(unbound, Err(LendError::Unbound(_))), "{unbound:?}");
        let (first, second) = (Visitor::come(&listener), Visitor::come(&listener));
        lender.run(Errand::Bind, first.shown()).expect("bound");
        // Its supervisor may be another one by then.
        for lender in [&lender, &Lender::new(&dir, None)] {
            let refused = lender.run(Errand::Bind, second.shown());
            assert!(matches!(refused, Err(LendError::Other(..))), "{refused:?}");
            // The first one's main thread may still be starting: what it maps is compared once it stays the same.
            let (brought, own) = loop {
                let own = maps_of(&first);
                let brought = lender.run(Errand::Maps, Vec::new()).expect("brought");
                let brought = maps(brought);
                if own == maps_of(&first) {
                    break (brought, own);
                }
            };
            assert_eq!(brought, own);
            assert_ne!(brought, maps_of(&second));
        }
        lender.run(Errand::Kill, Vec::new()).expect("killed");
        let (mut first, mut second) = (first, second);
        let status = first.process.wait().expect("ours");
        assert!(!status.success(), "{status}");
        assert!(second.process.try_wait().expect("ours").is_none());
        let gone = lender.run(Errand::Maps, Vec::new());
        assert!(gone.is_err_and(|error| error.is_gone()));
        lender.run(Errand::Bind, second.shown()).expect("the next");
    }

    /// A pager in somebody's hands could connect to anybody, libvirtd for one, or have root's commands
    /// connect to what it listens at.
    #[test]
    fn nobody_is_bound_who_did_not_come_as_a_vmm_does() {
        let root = tempfile::tempdir().expect("a folder");
        let dir = root.path().join("guest");
        fs::create_dir(&dir).expect("made");
        let (listener, lender) = listen(&dir);
        let daemon = UnixListener::bind(root.path().join("daemon.sock")).expect("bound");
        let address = daemon.local_addr().expect("bound");
        let made = UnixStream::connect_addr(&address).expect("connected");
        let asked = Visitor::come(&daemon);
        for shown in [vec![made.into()], asked.shown()] {
            let refused = lender.run(Errand::Bind, shown);
            assert!(
                matches!(refused, Err(LendError::Elsewhere(_))),
                "{refused:?}"
            );
        }
        let came = Visitor::come(&listener);
        let other_user = Lender::new(&dir, Some("4294967294"));
        let refused = other_user.run(Errand::Bind, came.shown());
        assert!(matches!(refused, Err(LendError::User(..))), "{refused:?}");
        lender.run(Errand::Bind, came.shown()).expect("bound");
    }

    /// Has an errand run, as a pager does.
    fn ask(line: &OwnedFd, errand: &impl Serialize) -> (Answer, Vec<OwnedFd>) {
        powers::send(line.as_fd(), errand, &[]).expect("sent");
        let answer = powers::receive(line.as_fd()).expect("received");
        answer.expect("an answer")
    }

    #[test]
    fn a_pager_has_few_sockets_and_they_end_with_it() {
        let root = tempfile::tempdir().expect("a folder");
        let (_listener, lender, first) = lent(root.path());
        let mut lines = Vec::new();
        loop {
            match ask(&first, &Errand::Line) {
                (Answer::Done, beside) => lines.extend(beside),
                (refused, _) => break assert!(matches!(refused, Answer::Failed { .. })),
            }
        }
        assert_eq!(lines.len(), MOST_LINES);
        // What has to be one after the other is.
        match ask(&lines[0], &Errand::Bind) {
            (Answer::Failed { reason, .. }, _) => assert!(reason.contains("slow"), "{reason}"),
            other => panic!("{other:?}"),
        }
        drop(lines);
        while lender.lines.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn an_errand_of_a_later_build_is_answered_and_the_next_is_run() {
        let root = tempfile::tempdir().expect("a folder");
        let (_listener, _lender, ours) = lent(root.path());
        for errand in ["\"no-such-errand\"", "{\"kill\":7}", "\"kill\""] {
            let asked: serde_json::Value = serde_json::from_str(errand).expect("JSON");
            let (answer, _) = ask(&ours, &asked);
            let is_failed = matches!(answer, Answer::Failed { .. });
            assert!(is_failed, "{errand}: {answer:?}");
        }
    }
}
