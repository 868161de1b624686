//! A disk's line to one server: its session, and the data connections that requests take turns on.
//!
//! A request takes a connection, waits for its one reply and puts the connection back. Where one dies
//! or is given up, what was sent on it may still land: from then on no request takes a connection that
//! was there before, but those that come behind the server's fence, after which nothing of the former
//! ones can. The request is made again on one of these. A server out of reach is waited
//! for, for as long as nobody interrupts; one that has the disk no more, or that another has claimed
//! it from, is an error at once.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use outram_wire::server::data::Op;
use outram_wire::server::{Extent, Refusal, SlabId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::DiskFault;
use crate::interrupt::{Interrupt, LOOK};
use crate::remote::{DataConn, ExtentError, RemoteError, Session, SessionEvent, SubmitError};

/// How long an interrupted request waits for a reply that is under way: a server in reach answers
/// far sooner, and giving a connection up costs all of them.
const GRACE: Duration = Duration::from_secs(1);

/// How long a slab that was given back may count at its server still: moments, or as long as a thread there waits for
/// a processor.
const COUNTED_STILL: Duration = Duration::from_secs(5);

/// A disk's line to one server.
pub(super) struct Line {
    pub(super) session: Session,
    pub(super) state: Arc<LineState>,
}

/// What requests and the thread that hears the session share.
#[derive(Default)]
pub(super) struct LineState {
    now: Mutex<Now>,
    changed: Condvar,
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
}

#[derive(Default)]
struct Now {
    idle: Vec<DataConn>,
    /// The latest greeting: connections of former ones are dead.
    generation: u64,
    /// The latest greeting of which a connection was given up: none of its others is taken either.
    given_up: Option<u64>,
    /// Slabs that the server kept for the disk when it was opened.
    held: Option<Vec<SlabId>>,
    /// A slab was asked for, and there is no answer yet.
    asked: bool,
    /// Slabs that came, and are nobody's yet.
    slabs: VecDeque<SlabId>,
    /// Refusals that came, and the last of them: for those who waited for an answer by then, alone.
    refusals: u64,
    refusal: Option<Refusal>,
    over: Option<Over>,
}

/// Why a line is of no use any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// Another backend has claimed the disk.
    Claimed(String),
    /// What was stored there is gone.
    Lost(String),
}

impl Over {
    fn fault(&self) -> DiskFault {
        match self {
            Self::Claimed(reason) => DiskFault::Claimed(reason.clone()),
            Self::Lost(reason) => DiskFault::Lost(reason.clone()),
        }
    }
}

impl Now {
    /// Whether requests may take connections of a greeting.
    fn is_usable(&self, generation: u64) -> bool {
        generation == self.generation && self.given_up.is_none_or(|last| generation > last)
    }

    /// A connection that no request uses any more.
    fn take_back(&mut self, conn: DataConn) {
        if self.is_usable(conn.generation()) {
            self.idle.push(conn);
        }
    }

    /// Something sent on a connection of this greeting may land at any time until the next one.
    fn give_up(&mut self, generation: u64) {
        self.given_up = self.given_up.max(Some(generation));
        self.idle.retain(|conn| conn.generation() > generation);
    }
}

impl LineState {
    /// Takes in what the session tells.
    pub(super) fn hear(&self, event: SessionEvent) {
        let mut now = self.lock();
        match event {
            SessionEvent::Up { held, .. } => {
                now.held.get_or_insert(held);
            }
            SessionEvent::DataConnection { conn, .. } => {
                if conn.generation() > now.generation {
                    now.idle.clear();
                    now.generation = conn.generation();
                }
                now.take_back(conn);
            }
            SessionEvent::Down { error, .. } => {
                if let Some(over) = verdict(&error) {
                    now.over.get_or_insert(over);
                }
            }
            SessionEvent::Lost { slabs, .. } => {
                let reason = format!("the server lost {} slabs of the disk", slabs.len());
                now.over.get_or_insert(Over::Lost(reason));
            }
            SessionEvent::Leased { slab, .. } => {
                now.asked = false;
                now.slabs.push_back(slab);
            }
            SessionEvent::LeaseRefused { reason, .. } => {
                now.asked = false;
                now.refusals += 1;
                now.refusal = Some(reason);
            }
            // Servers ask nothing back of a disk, and no RDMA device has part in it; of a stop, the end
            // of the connection tells.
            SessionEvent::Vacate { .. }
            | SessionEvent::Withdrawn { .. }
            | SessionEvent::Closing { .. } => {}
        }
        drop(now);
        self.changed.notify_all();
    }

    /// Why the line is of no use any more, if so.
    pub(super) fn over(&self) -> Option<Over> {
        self.lock().over.clone()
    }

    /// Bytes sent and received, with framing.
    pub(super) fn traffic(&self) -> (u64, u64) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (get(&self.sent_bytes), get(&self.received_bytes))
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        // Each change under the lock is a single call.
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `find` finds what it looks for.
    fn wait<T>(
        &self,
        interrupt: &Interrupt<'_>,
        mut find: impl FnMut(&mut Now) -> Option<T>,
    ) -> Result<T, DiskFault> {
        let mut now = self.lock();
        loop {
            if let Some(over) = &now.over {
                return Err(over.fault());
            }
            if let Some(found) = find(&mut now) {
                return Ok(found);
            }
            if interrupt.is_wanted() {
                return Err(DiskFault::Interrupted);
            }
            let waited = self.changed.wait_timeout(now, LOOK);
            now = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// What an error of the session means for the disk; nothing where it may pass.
fn verdict(error: &RemoteError) -> Option<Over> {
    let RemoteError::Refused { refusal, .. } = error else {
        return None;
    };
    match refusal {
        Refusal::DiskClaimed { .. } => Some(Over::Claimed(error.to_string())),
        Refusal::NoSuchDisk { .. } | Refusal::DiskSecret { .. } => {
            Some(Over::Lost(error.to_string()))
        }
        _ => None,
    }
}

/// How a request on a connection ended.
enum Exchange {
    Done,
    Refused(ExtentError),
    Dead,
    Interrupted,
}

impl Line {
    /// Slabs that the server kept for the disk.
    pub(super) fn held(&self, interrupt: &Interrupt<'_>) -> Result<Vec<SlabId>, DiskFault> {
        self.state.wait(interrupt, |now| now.held.clone())
    }

    /// Leases a slab. All of the disk's room is set aside, but a slab that was given back counts for as long as the
    /// server is at a request to it: that is waited for.
    pub(super) fn lease(&self, interrupt: &Interrupt<'_>) -> Result<SlabId, DiskFault> {
        let give_up_at = Instant::now() + COUNTED_STILL;
        loop {
            match self.ask_slab(interrupt)? {
                Err(Refusal::ReservationExhausted { .. }) if Instant::now() < give_up_at => {
                    std::thread::sleep(LOOK);
                }
                answer => return answer.map_err(|refusal| DiskFault::NoRoom(refusal.to_string())),
            }
        }
    }

    /// Asks for a slab: one, or why there is none.
    fn ask_slab(&self, interrupt: &Interrupt<'_>) -> Result<Result<SlabId, Refusal>, DiskFault> {
        let known = self.state.lock().refusals;
        self.state.wait(interrupt, |now| {
            if let Some(slab) = now.slabs.pop_front() {
                return Some(Ok(slab));
            }
            if now.refusals > known {
                return now.refusal.clone().map(Err);
            }
            if !std::mem::replace(&mut now.asked, true) {
                self.session.request_slab();
            }
            None
        })
    }

    /// Reads the bytes of `extents`.
    pub(super) fn read(
        &self,
        extents: &[Extent],
        interrupt: &Interrupt<'_>,
    ) -> Result<Vec<u8>, DiskFault> {
        let mut all = Vec::new();
        self.read_in_place(extents, interrupt, |bytes| all = bytes.to_vec())?;
        Ok(all)
    }

    /// Reads the bytes of `extents`, and has `take` take them from where they arrived, once.
    pub(super) fn read_in_place(
        &self,
        extents: &[Extent],
        interrupt: &Interrupt<'_>,
        mut take: impl FnMut(&mut [u8]),
    ) -> Result<(), DiskFault> {
        self.perform((Op::Read, extents, &[]), interrupt, &mut take)
    }

    /// Stores `payload` at `extents`: all of it, or nothing.
    pub(super) fn write(
        &self,
        extents: &[Extent],
        payload: &[&[u8]],
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskFault> {
        self.perform((Op::Write, extents, payload), interrupt, &mut |_| {})
    }

    fn perform(
        &self,
        request: (Op, &[Extent], &[&[u8]]),
        interrupt: &Interrupt<'_>,
        take: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), DiskFault> {
        loop {
            let mut conn = self.state.wait(interrupt, |now| now.idle.pop())?;
            let before = (conn.sent_bytes(), conn.received_bytes());
            let ended = exchange(&mut conn, request, interrupt, take);
            let count = |counter: &AtomicU64, bytes| counter.fetch_add(bytes, Ordering::Relaxed);
            count(&self.state.sent_bytes, conn.sent_bytes() - before.0);
            count(&self.state.received_bytes, conn.received_bytes() - before.1);
            match ended {
                Exchange::Done => {
                    self.put_back(conn);
                    return Ok(());
                }
                Exchange::Refused(error) => {
                    self.put_back(conn);
                    return Err(DiskFault::Lost(error.to_string()));
                }
                Exchange::Dead => self.give_up(&conn),
                Exchange::Interrupted => {
                    self.give_up(&conn);
                    return Err(DiskFault::Interrupted);
                }
            }
        }
    }

    fn put_back(&self, conn: DataConn) {
        self.state.lock().take_back(conn);
        self.state.changed.notify_all();
    }

    /// What was sent on a connection may still land: has everything wait for connections behind the
    /// server's fence. To be called before the range of the request is let go.
    fn give_up(&self, conn: &DataConn) {
        self.state.lock().give_up(conn.generation());
        self.session.reconnect_data(conn.generation());
    }
}

/// Makes one request on a connection that has no other in flight.
fn exchange(
    conn: &mut DataConn,
    (op, extents, payload): (Op, &[Extent], &[&[u8]]),
    interrupt: &Interrupt<'_>,
    take: &mut dyn FnMut(&mut [u8]),
) -> Exchange {
    let submitted = match op {
        Op::Read => conn.submit_read(0, extents),
        Op::Write => conn.submit_write(0, extents, payload),
    };
    match submitted {
        Ok(()) => {}
        Err(SubmitError::Dead(_)) => return Exchange::Dead,
        Err(error) => {
            // Requests are far below the protocol's bounds, and alone on their connection.
            tracing::error!(%error, "a disk request could not be sent");
            return Exchange::Dead;
        }
    }
    let mut give_up_at = None;
    loop {
        let mut reply = None;
        let received = match conn.wants_write() {
            true => conn.flush(),
            false => Ok(()),
        }
        .and_then(|()| conn.receive(|_, outcome| reply = Some(outcome.map(&mut *take))));
        match (reply, received) {
            (Some(Ok(())), _) => return Exchange::Done,
            (Some(Err(error)), _) => return Exchange::Refused(error),
            (None, Err(_)) => return Exchange::Dead,
            (None, Ok(())) => {}
        }
        if interrupt.is_wanted() {
            let at = *give_up_at.get_or_insert_with(|| Instant::now() + GRACE);
            if Instant::now() >= at {
                return Exchange::Interrupted;
            }
        }
        wait_for(conn);
    }
}

/// Waits for the connection, at most for a look's time.
fn wait_for(conn: &DataConn) {
    let mut flags = PollFlags::IN;
    flags.set(PollFlags::OUT, conn.wants_write());
    let mut fds = [PollFd::from_borrowed_fd(conn.as_fd(), flags)];
    let timeout = Timespec {
        tv_sec: 0,
        tv_nsec: LOOK.as_nanos() as i64,
    };
    // A failed wait is only a shorter one: the connection is asked either way.
    let _ = poll(&mut fds, Some(&timeout));
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::{TcpListener, TcpStream};
    use std::sync::atomic::AtomicBool;
    use std::thread::{self, ScopedJoinHandle};

    use rustix::io::ioctl_fionread;

    use super::super::tests::{World, store};
    use super::*;
    use crate::remote::test_server::SLAB;

    /// Tells a line's state of a connection of a greeting.
    fn connect(state: &LineState, listener: &TcpListener, generation: u64) {
        let address = listener.local_addr().expect("bound");
        let socket = TcpStream::connect(address).expect("connected");
        let address = address.to_string().parse().expect("an address");
        state.hear(SessionEvent::DataConnection {
            server: 0,
            role: 0,
            conn: DataConn::of_greeting(address, socket, generation),
        });
    }

    /// The connection that a request takes; none where it would have to wait.
    fn take(state: &LineState) -> Option<DataConn> {
        let at_once = AtomicBool::new(true);
        let interrupt = Interrupt::by(&at_once);
        state.wait(&interrupt, |now| now.idle.pop()).ok()
    }

    #[test]
    fn after_one_is_given_up_all_wait_for_the_fence() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let state = LineState::default();
        (0..3).for_each(|_| connect(&state, &listener, 1));
        let (lost, busy) = (take(&state).expect("idle"), take(&state).expect("idle"));
        state.lock().give_up(lost.generation());
        assert!(
            take(&state).is_none(),
            "the third would overtake the lost one"
        );
        // One that another request was using, and one that the session opened meanwhile.
        state.lock().take_back(busy);
        connect(&state, &listener, 1);
        assert!(take(&state).is_none(), "they would too");
        connect(&state, &listener, 2);
        let next = take(&state).expect("behind the fence");
        assert_eq!(next.generation(), 2);
        state.lock().take_back(next);
        assert!(take(&state).is_some());
    }

    #[test]
    fn a_slab_that_its_server_is_not_done_with_is_waited_for() {
        let world = World::new(&[SLAB]);
        let disk = world.create();
        let (never, store) = (Interrupt::never(), store(&disk));
        let extents = store.layout.extents();
        let start_of = |extent| u64::from(store.layout.block(extent, 0)) * 4096;
        // All that is set aside is leased.
        for extent in 0..extents {
            disk.write(start_of(extent), &[1; 4096], &never)
                .expect("there is room");
        }
        // Answers that nobody takes keep the server at a slab, once there is no more room for them on their way.
        let slab = store.extents.get(0).expect("written").place.slab;
        let whole = Extent {
            slab,
            offset: 0,
            length: SLAB as u32,
        };
        let state = &store.lines[0].state;
        let mut slow = take(state).expect("idle");
        for id in 0..64 {
            slow.submit_read(id, &[whole]).expect("submitted");
        }
        assert!(!slow.wants_write(), "all is asked for");
        let (unread, looks) = (Cell::new(0), Cell::new(0));
        world.eventually("the server to wait for its client", || {
            thread::sleep(LOOK);
            let now = ioctl_fionread(&slow).expect("a socket");
            let is_same = now > 0 && unread.replace(now) == now;
            looks.set(if is_same { looks.get() + 1 } else { 0 });
            looks.get() == 10
        });
        disk.zero(0, start_of(1), &never).expect("discarded");
        let flag = AtomicBool::new(false);
        let write = |interrupt| disk.write(0, &[2; 4096], &interrupt);
        thread::scope(|scope| {
            let wait_refused = |asked: &ScopedJoinHandle<'_, _>, times| {
                // On a machine that stood still the server may be done with it after all.
                world.eventually("a refusal", || {
                    state.lock().refusals >= times || asked.is_finished()
                });
            };
            let asked = scope.spawn(|| write(Interrupt::by(&flag)));
            wait_refused(&asked, 1);
            flag.store(true, Ordering::Release);
            let outcome = asked.join().expect("no panic");
            assert!(
                matches!(outcome, Err(DiskFault::Interrupted) | Ok(())),
                "{outcome:?}"
            );
            let asked = scope.spawn(|| write(never));
            wait_refused(&asked, 2);
            while slow.pending() > 0 {
                slow.receive(|_, _| {}).expect("answered");
                wait_for(&slow);
            }
            assert_eq!(asked.join().expect("no panic"), Ok(()));
        });
    }
}
