//! What each server promises to lend: equal parts of what the guest may need. What one has not, the others promise
//! in its place.

use std::sync::{Arc, Mutex};

use outram_wire::server::Refusal;

use super::lock;
use super::record::Records;
use crate::remote::{NewSession, Promise, RemoteError, ServerAddress, Session};

/// What a guest's servers promise.
pub(super) struct Promises {
    sessions: Arc<[Session]>,
    records: Records,
    asked: Mutex<Asked>,
}

struct Asked {
    /// An equal part, in bytes.
    each: u64,
    /// What was last written down, or should have been.
    noted: Vec<u64>,
    is_written: bool,
}

impl Promises {
    /// Of servers that were asked for `each` times their number.
    pub(super) fn new(sessions: Arc<[Session]>, records: Records, each: u64) -> Self {
        let noted = Vec::new();
        Self {
            sessions,
            records,
            asked: Mutex::new(Asked {
                each,
                noted,
                is_written: false,
            }),
        }
    }

    /// Has the servers promise `each` times their number in all, if that is more than before. On an error all
    /// promises are as before.
    pub(super) fn raise(&self, each: u64) -> Result<(), RemoteError> {
        let mut asked = lock(&self.asked);
        if each > asked.each {
            raise(&self.sessions, each)?;
            asked.each = each;
            self.note(&mut asked);
        }
        Ok(())
    }

    /// Has them promise no more than that.
    pub(super) fn lower(&self, each: u64) {
        let mut asked = lock(&self.asked);
        asked.each = each;
        lower(&mut kept(&self.sessions), each);
        self.note(&mut asked);
    }

    /// Gives back what is promised beyond: where one server took its promise back, another was asked for more,
    /// perhaps, and the one may have memory again. To be called now and then; does not wait for a server.
    pub(super) fn look(&self) {
        // Somebody who changes them looks at the end.
        if let Ok(mut asked) = self.asked.try_lock() {
            lower(&mut kept(&self.sessions), asked.each);
            self.note(&mut asked);
        }
    }

    /// Writes down how much each server promises. Of one alone, the limit tells.
    fn note(&self, asked: &mut Asked) {
        if self.sessions.len() < 2 {
            return;
        }
        let Some(parts) = parts(&self.sessions, asked.each) else {
            return;
        };
        let is_other = parts != asked.noted;
        if asked.is_written && !is_other {
            return;
        }
        let written = self.records.write_promises(&parts);
        if let Err(error) = &written
            && is_other
        {
            tracing::warn!(%error, "a backend that takes over from this one would ask the servers for other parts");
        }
        asked.is_written = written.is_ok();
        asked.noted = parts;
    }
}

/// A session whose server is asked for promises.
trait Borrower {
    fn address(&self) -> ServerAddress;
    fn promise(&self) -> Promise;
    fn reserve(&mut self, bytes: u64) -> Result<(), RemoteError>;
    fn want(&mut self, bytes: u64);
}

impl Borrower for &Session {
    fn address(&self) -> ServerAddress {
        self.status().address
    }

    fn promise(&self) -> Promise {
        Session::promise(self)
    }

    fn reserve(&mut self, bytes: u64) -> Result<(), RemoteError> {
        Session::reserve(self, bytes)
    }

    fn want(&mut self, bytes: u64) {
        Session::want(self, bytes);
    }
}

impl Borrower for NewSession {
    fn address(&self) -> ServerAddress {
        NewSession::address(self).clone()
    }

    fn promise(&self) -> Promise {
        NewSession::promise(self)
    }

    fn reserve(&mut self, bytes: u64) -> Result<(), RemoteError> {
        NewSession::reserve(self, bytes)
    }

    fn want(&mut self, bytes: u64) {
        NewSession::want(self, bytes);
    }
}

/// Has the servers promise `each` times their number in all, as equally as they can, before anything else is asked
/// of them. On an error some promise something.
pub(super) fn first(sessions: &mut [NewSession], each: u64) -> Result<(), RemoteError> {
    raise_to(sessions, each)?;
    lower(sessions, each);
    Ok(())
}

/// Has the servers promise `each` times their number in all, as equally as they can. On an error all promises are
/// as before.
fn raise(sessions: &[Session], each: u64) -> Result<(), RemoteError> {
    let before: Vec<Promise> = sessions.iter().map(Session::promise).collect();
    let mut sessions = kept(sessions);
    let outcome = raise_to(&mut sessions, each);
    match outcome {
        Ok(()) => lower(&mut sessions, each),
        Err(_) => {
            for (session, before) in sessions.iter_mut().zip(before) {
                if session.promise().bytes > before.bytes {
                    // Where it cannot be told now, it is with the next renewal.
                    let _ = session.reserve(before.bytes);
                }
                session.want(before.wanted);
            }
        }
    }
    outcome
}

/// Has the servers promise no more than `each` times their number in all: those less that promise most. Where they
/// promise less than that, none does less than it does, and they are asked on for what they took back. One that
/// cannot be reached promises nothing, and is asked for no more than before once it can be.
fn lower<B: Borrower>(sessions: &mut [B], each: u64) {
    let promises: Vec<Promise> = sessions.iter().map(B::promise).collect();
    let here = promises.iter().filter(|promise| promise.is_connected);
    let has: Vec<u64> = here.map(|promise| promise.bytes).collect();
    let total = total(sessions.len(), each);
    let level = |has: &[u64]| (sum(has) >= total).then(|| level_below(has, total));
    let level_here = level(&has);
    // As if those that are away came back as they were.
    let had: Vec<u64> = promises
        .iter()
        .map(|promise| promise.bytes.max(promise.wanted))
        .collect();
    let level_once_back = level(&had).unwrap_or(u64::MAX);
    for (session, promise) in sessions.iter_mut().zip(promises) {
        session.want(match level_here {
            _ if !promise.is_connected => promise.wanted.min(level_once_back),
            Some(level) => promise.bytes.min(level),
            None => promise.bytes.max(promise.wanted),
        });
    }
}

/// What each server promises, or is to promise: for [`resumed`]. Of those that cannot be reached as much as the
/// others leave. `None` where none can be reached.
fn parts(sessions: &[Session], each: u64) -> Option<Vec<u64>> {
    let promises: Vec<Promise> = sessions.iter().map(Session::promise).collect();
    let part = |promise: &Promise| promise.bytes.max(promise.wanted);
    let here = promises.iter().filter(|promise| promise.is_connected);
    let here: Vec<u64> = here.map(part).collect();
    let mut left = total(sessions.len(), each).saturating_sub(sum(&here));
    let parts = promises.iter().map(|promise| match promise.is_connected {
        true => part(promise),
        false => {
            let part = part(promise).min(left);
            left -= part;
            part
        }
    });
    (!here.is_empty()).then(|| parts.collect())
}

/// What the servers are to promise to the successor of a process that last wrote down these [`parts`], perhaps
/// before what it promised the guest last; `each` is an equal part.
pub(super) fn resumed(parts: &[u64], each: u64, servers: usize) -> Vec<u64> {
    let total = total(servers, each);
    if parts.len() != servers {
        return vec![each; servers];
    }
    let least = level_above(parts, &vec![false; servers], total).unwrap_or(0);
    let most = level_below(parts, total).max(least);
    let parts = parts.iter().map(|bytes| (*bytes).clamp(least, most));
    parts.collect()
}

fn kept(sessions: &[Session]) -> Vec<&Session> {
    sessions.iter().collect()
}

fn raise_to<B: Borrower>(sessions: &mut [B], each: u64) -> Result<(), RemoteError> {
    let total = total(sessions.len(), each);
    // Of those that have not as much as they were asked for, or cannot be reached.
    let is_away = |session: &B| sessions.len() > 1 && !session.promise().is_connected;
    let is_away: Vec<bool> = sessions.iter().map(is_away).collect();
    let mut rooms: Vec<Option<u64>> = is_away.iter().map(|away| away.then_some(0)).collect();
    let mut has = Vec::new();
    // Each round but the last finds a server full, or less in one than it said.
    for _ in 0..=2 * sessions.len() {
        // Less was wanted, perhaps, and is not told yet.
        let sure = |(session, is_away): (&B, &bool)| {
            let promise = session.promise();
            let sure = promise.bytes.min(promise.wanted);
            if *is_away { 0 } else { sure }
        };
        let sure: Vec<u64> = sessions.iter().zip(&is_away).map(sure).collect();
        has = sure.clone();
        for (has, room) in has.iter_mut().zip(&rooms) {
            *has = room.unwrap_or(0).max(*has);
        }
        let is_full: Vec<bool> = rooms.iter().map(Option::is_some).collect();
        let Some(level) = level_above(&has, &is_full, total) else {
            break;
        };
        // What the full ones have, once it is known that this is enough.
        let is_open = |server: &usize| !is_full[*server] && has[*server] < level;
        let mut asked: Vec<usize> = (0..sessions.len()).filter(is_open).collect();
        if asked.is_empty() {
            asked = (0..sessions.len())
                .filter(|server| has[*server] > sure[*server])
                .collect();
        }
        if asked.is_empty() {
            return Ok(());
        }
        for server in asked {
            let bytes = rooms[server].unwrap_or(level);
            if let Err(error) = sessions[server].reserve(bytes) {
                let slab_bytes = sessions[server].promise().slab_bytes;
                rooms[server] = Some(room_in(slab_bytes, error, sessions.len() == 1)?);
            }
        }
    }
    if let Some(away) = is_away.iter().position(|is_away| *is_away) {
        return Err(RemoteError::Disconnected(sessions[away].address()));
    }
    let addresses = sessions.iter().map(B::address);
    Err(RemoteError::PromisedTooLittle {
        needed_bytes: total,
        promised: addresses.zip(has).collect(),
    })
}

/// How much a server could promise, in slabs of that size, that has refused to promise more. Of an only one, that
/// is an error.
fn room_in(slab_bytes: u64, refused: RemoteError, is_only: bool) -> Result<u64, RemoteError> {
    match refused {
        RemoteError::Refused {
            refusal: Refusal::ServerFull { free_bytes, .. },
            ..
        } if !is_only => Ok(free_bytes - free_bytes.checked_rem(slab_bytes).unwrap_or(0)),
        RemoteError::Refused {
            refusal: Refusal::TooMany { limit, .. },
            ..
        } if !is_only => Ok(limit.saturating_mul(slab_bytes)),
        error => Err(error),
    }
}

fn total(servers: usize, each: u64) -> u64 {
    each.saturating_mul(servers as u64)
}

fn sum(bytes: &[u64]) -> u64 {
    bytes.iter().fold(0, |sum, next| sum.saturating_add(*next))
}

/// The least that those which are not full have to have each, for all to have `total` together. `None` where all
/// are full, and have not.
fn level_above(has: &[u64], is_full: &[bool], total: u64) -> Option<u64> {
    let missing = total.saturating_sub(sum(has));
    if missing == 0 {
        return Some(0);
    }
    let open = has.iter().zip(is_full).filter(|(_, is_full)| !**is_full);
    let mut open: Vec<u64> = open.map(|(has, _)| *has).collect();
    open.sort_unstable();
    // Those with the least are filled up first: as many as come no higher than the next one is.
    let (mut level, mut filled) = (0, missing);
    for (count, has) in open.iter().enumerate() {
        if count > 0 && *has >= level {
            break;
        }
        filled = filled.saturating_add(*has);
        level = filled.div_ceil(count as u64 + 1);
    }
    (!open.is_empty()).then_some(level)
}

/// The most that each may have, for all to have `total` together and little more.
fn level_below(has: &[u64], total: u64) -> u64 {
    let mut most = has.to_vec();
    most.sort_unstable();
    let mut left = total;
    for (place, has) in most.iter().enumerate() {
        let part = left.div_ceil((most.len() - place) as u64);
        if *has >= part {
            return part;
        }
        left -= has;
    }
    u64::MAX
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use crossbeam_channel::unbounded;
    use outram_memserver::Server;
    use proptest::prelude::*;

    use outram_wire::server::control::MAX_SLABS;

    use super::*;
    use crate::remote::test_server::{PATIENCE, Pki, SLAB, anywhere, config, serve};

    proptest! {
        #[test]
        fn those_that_have_room_promise_what_is_missing(
            parts in prop::collection::vec((0_u64..1 << 40, any::<bool>()), 1..6),
            total in 0_u64..1 << 42,
        ) {
            let (has, is_full): (Vec<u64>, Vec<bool>) = parts.into_iter().unzip();
            let raised = |level: u64| {
                let parts = has.iter().zip(&is_full);
                let parts = parts.map(|(has, full)| if *full { *has } else { level.max(*has) });
                parts.sum::<u64>()
            };
            match level_above(&has, &is_full, total) {
                Some(level) => {
                    prop_assert!(raised(level) >= total);
                    prop_assert!(level == 0 || raised(level - 1) < total, "no more than needed");
                }
                None => prop_assert!(raised(0) < total && !is_full.contains(&false)),
            }
        }

        #[test]
        fn those_that_promise_most_promise_less(
            has in prop::collection::vec(0_u64..1 << 40, 1..6),
            total in 0_u64..1 << 42,
        ) {
            let lowered = |level: u64| has.iter().map(|has| level.min(*has)).sum::<u64>();
            let level = level_below(&has, total);
            prop_assert!(lowered(level) >= total.min(sum(&has)));
            prop_assert!(level == 0 || level == u64::MAX || lowered(level - 1) < total);
        }

        #[test]
        fn a_successor_has_as_much_promised(
            parts in prop::collection::vec(0_u64..1 << 40, 0..6),
            each in 0_u64..1 << 40,
            servers in 1_usize..6,
        ) {
            let next = resumed(&parts, each, servers);
            let total = each * servers as u64;
            prop_assert_eq!(next.len(), servers);
            prop_assert!((total..total + servers as u64).contains(&sum(&next)));
            if sum(&parts) == total && parts.len() == servers {
                prop_assert_eq!(next, parts);
            }
        }
    }

    /// Counts how often the server is asked.
    struct Counted<'a>(&'a Session, u32);

    impl Borrower for Counted<'_> {
        fn address(&self) -> ServerAddress {
            Borrower::address(&self.0)
        }

        fn promise(&self) -> Promise {
            self.0.promise()
        }

        fn reserve(&mut self, bytes: u64) -> Result<(), RemoteError> {
            self.1 += 1;
            self.0.reserve(bytes)
        }

        fn want(&mut self, bytes: u64) {
            self.0.want(bytes);
        }
    }

    /// Servers with so many slabs to lend, and sessions with them.
    struct World {
        servers: Vec<Server>,
        sessions: Vec<Session>,
        _pki: Pki,
    }

    impl World {
        fn with(slabs: &[u64]) -> Self {
            let pki = Pki::new();
            let serve = |slabs: &u64| serve(&pki, anywhere(), |it| it.memory_bytes = slabs * SLAB);
            let servers: Vec<Server> = slabs.iter().map(serve).collect();
            // Nobody has to listen: nothing is leased.
            let (sender, events) = unbounded();
            thread::spawn(move || events.iter().for_each(drop));
            let start = |server: &Server| {
                let config = config(server.local_addr(), pki.client.clone());
                let greeted = NewSession::greet(0, &config, sender.clone()).expect("a greeting");
                greeted.keep().expect("a session")
            };
            Self {
                sessions: servers.iter().map(start).collect(),
                servers,
                _pki: pki,
            }
        }

        fn set_aside(&self) -> Vec<u64> {
            let slabs = |server: &Server| server.stats().reserved_bytes / SLAB;
            self.servers.iter().map(slabs).collect()
        }

        /// What is given back, is with the next renewal.
        fn comes_to_set_aside(&self, slabs: &[u64]) {
            let deadline = Instant::now() + PATIENCE;
            let bytes: Vec<u64> = slabs.iter().map(|slabs| slabs * SLAB).collect();
            let told = || self.sessions.iter().map(|session| session.promise().bytes);
            while self.set_aside() != slabs || told().ne(bytes.iter().copied()) {
                assert!(Instant::now() < deadline, "{:?}", self.set_aside());
                thread::sleep(Duration::from_millis(5));
            }
        }
    }

    #[test]
    fn servers_promise_equal_parts_and_what_one_has_not_the_others() {
        let world = World::with(&[8, 8, 2]);
        raise(&world.sessions, 2 * SLAB).expect("there is room");
        assert_eq!(world.set_aside(), [2, 2, 2]);
        raise(&world.sessions, 4 * SLAB).expect("two have room");
        assert_eq!(world.set_aside(), [5, 5, 2]);
        // What it takes back is asked of others once the guest needs more, and of it no longer.
        world.servers[1].set_memory(4 * SLAB);
        raise(&world.sessions, 13 * SLAB / 3).expect("one has room");
        assert_eq!(world.set_aside(), [6, 5, 2]);
        lower(&mut kept(&world.sessions), 3 * SLAB);
        world.comes_to_set_aside(&[4, 4, 2]);
        lower(&mut kept(&world.sessions), SLAB);
        world.comes_to_set_aside(&[1, 1, 1]);
    }

    #[test]
    fn what_one_that_is_away_has_promised_the_others_do() {
        let mut world = World::with(&[12, 8]);
        raise(&world.sessions, 4 * SLAB).expect("there is room");
        world.servers.truncate(1);
        let deadline = Instant::now() + PATIENCE;
        while world.sessions[1].promise().is_connected {
            assert!(Instant::now() < deadline, "it is not missed");
            thread::sleep(Duration::from_millis(5));
        }
        raise(&world.sessions, 5 * SLAB).expect("one has room");
        assert_eq!(world.set_aside(), [10]);
        lower(&mut kept(&world.sessions), 5 * SLAB);
        let wanted = |server: usize| world.sessions[server].promise().wanted / SLAB;
        assert_eq!((wanted(0), wanted(1)), (10, 4));
        let refused = raise(&world.sessions, 7 * SLAB).expect_err("14 of 12");
        assert!(matches!(refused, RemoteError::Disconnected(_)), "{refused}");
        assert_eq!((world.set_aside(), wanted(0)), (vec![10], 10));
        let parts = parts(&world.sessions, 5 * SLAB);
        assert_eq!(
            parts,
            Some(vec![10 * SLAB, 0]),
            "a successor asks for so much"
        );
        lower(&mut kept(&world.sessions), 3 * SLAB);
        assert_eq!(
            (wanted(0), wanted(1)),
            (6, 3),
            "no more than once both are there"
        );
    }

    #[test]
    fn what_is_given_back_and_needed_again_at_once_is_promised() {
        let world = World::with(&[8]);
        raise(&world.sessions, 4 * SLAB).expect("there is room");
        let mut sessions = [Counted(&world.sessions[0], 0)];
        lower(&mut sessions, 2 * SLAB);
        raise_to(&mut sessions, 4 * SLAB).expect("there is room");
        // The server may have been told of less, and what it gave back be another's.
        assert_eq!(sessions[0].1, 1);
        // Renewals come and go.
        thread::sleep(Duration::from_millis(200));
        assert_eq!(world.set_aside(), [4]);
    }

    #[test]
    fn what_is_promised_beyond_is_given_back_and_no_more() {
        let world = World::with(&[8, 8]);
        let dir = tempfile::tempdir().expect("a directory");
        let records = Records::of(dir.path());
        let World {
            servers, sessions, ..
        } = world;
        let promises = Promises::new(sessions.into(), records.clone(), 0);
        promises.raise(4 * SLAB).expect("there is room");
        let set_aside = || servers.iter().map(|it| it.stats().reserved_bytes / SLAB);
        // The one took some back, and the other promised more for it.
        promises.sessions[0].reserve(2 * SLAB).expect("less");
        promises.sessions[1].reserve(7 * SLAB).expect("more");
        let deadline = Instant::now() + PATIENCE;
        let parts = [2 * SLAB, 6 * SLAB];
        while set_aside().sum::<u64>() > 8 || records.promises().expect("readable") != parts {
            assert!(Instant::now() < deadline, "nothing is given back");
            promises.look();
            thread::sleep(Duration::from_millis(5));
        }
        promises.look();
        assert_eq!(set_aside().collect::<Vec<u64>>(), [2, 6]);
    }

    #[test]
    fn one_that_lends_no_more_slabs_has_so_much_room() {
        let world = World::with(&[2 * MAX_SLABS, 3]);
        raise(&world.sessions, MAX_SLABS / 2 * SLAB).expect("there is room");
        assert_eq!(world.set_aside(), [MAX_SLABS - 3, 3]);
        let refused = raise(&world.sessions, (MAX_SLABS / 2 + 2) * SLAB).expect_err("one more");
        let RemoteError::PromisedTooLittle { promised, .. } = &refused else {
            panic!("{refused}");
        };
        let promised: Vec<u64> = promised.iter().map(|(_, bytes)| bytes / SLAB).collect();
        assert_eq!(promised, [MAX_SLABS, 3]);
        world.comes_to_set_aside(&[MAX_SLABS - 3, 3]);
    }

    #[test]
    fn what_the_servers_have_not_together_is_refused_and_changes_nothing() {
        let world = World::with(&[3, 8]);
        raise(&world.sessions, 4 * SLAB).expect("there is room");
        assert_eq!(world.set_aside(), [3, 5]);
        let refused = raise(&world.sessions, 6 * SLAB)
            .expect_err("11 of 12")
            .to_string();
        assert!(refused.contains("11 MiB of the 12 MiB"), "{refused}");
        assert!(
            refused.contains(" 3 MiB, ") && refused.contains(" 8 MiB)"),
            "{refused}"
        );
        world.comes_to_set_aside(&[3, 5]);
        let parts = parts(&world.sessions, 4 * SLAB);
        assert_eq!(parts, Some(vec![3 * SLAB, 5 * SLAB]));
    }
}
