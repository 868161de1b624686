//! A client's session as its data connections see it: the slabs they may touch, and the fence that
//! ends them all before another control connection takes over.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use outram_wire::server::data::Status;
use outram_wire::server::{ClientName, DiskId, Extent, SessionSecret, SlabId};
use outram_wire::units::VmId;
use outram_wire::verbs::{Domain, End, Port, Remote, VerbsError};

use crate::slab::{Piece, Slab};
use crate::verbs::{Answer, Lent, Pair, PairError};

/// Whose slabs a session's are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Holder {
    /// A guest's pages.
    Guest(VmId, Seat),
    /// A far-memory disk's contents.
    Disk(DiskId),
}

/// Which of a guest's sessions one is: while the guest is migrated there are two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Seat {
    First,
    Second,
}

impl Holder {
    /// Whether it is a disk.
    pub(crate) fn is_disk(self) -> bool {
        matches!(self, Self::Disk(_))
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Guest(vm, _) => write!(f, "guest {vm}"),
            Self::Disk(disk) => write!(f, "disk {disk}"),
        }
    }
}

/// What does not change in a session, its slabs, and its data connections.
///
/// Lock order: the ledger's books before any lock here; of these, `connections` before `verbs`, and
/// no other two at once.
pub(crate) struct Session {
    pub(crate) holder: Holder,
    /// Who opened it.
    pub(crate) name: ClientName,
    pub(crate) secret: SessionSecret,
    slabs: RwLock<BTreeMap<SlabId, Arc<Slab>>>,
    mapped_bytes: Arc<AtomicU64>,
    connections: Mutex<Connections>,
    left: Condvar,
    /// Its RDMA, where there is any.
    verbs: Mutex<Option<Lent>>,
    /// Queue pairs of that, which go up under the lock of `connections` alone: the other may be held for long.
    pairs: AtomicUsize,
}

#[derive(Default)]
struct Connections {
    /// No new ones while set.
    fenced: bool,
    /// Times the session was cut: what was promised before the last one is void.
    epoch: u64,
    next: u64,
    open: HashMap<u64, Arc<TcpStream>>,
}

/// A data connection's place in its session; leaving it is dropping this.
pub(crate) struct Admitted {
    session: Arc<Session>,
    id: u64,
    epoch: u64,
}

impl Session {
    pub(crate) fn new(holder: Holder, name: ClientName, secret: SessionSecret) -> Self {
        Self {
            holder,
            name,
            secret,
            slabs: RwLock::default(),
            mapped_bytes: Arc::default(),
            connections: Mutex::default(),
            left: Condvar::new(),
            verbs: Mutex::default(),
            pairs: AtomicUsize::new(0),
        }
    }

    /// Changes whenever every data connection is ended.
    pub(crate) fn epoch(&self) -> u64 {
        self.connections().epoch
    }

    /// Admits a data connection whose token was redeemed in `epoch`; none while the session is
    /// fenced, nor if it was since, nor beyond `limit`.
    pub(crate) fn admit(
        self: &Arc<Self>,
        socket: &Arc<TcpStream>,
        epoch: u64,
        limit: usize,
    ) -> Option<Admitted> {
        let mut connections = self.connections();
        let current = epoch == connections.epoch && !connections.fenced;
        if !current || self.paths(&connections) >= limit {
            return None;
        }
        let id = connections.next;
        connections.next += 1;
        connections.open.insert(id, socket.clone());
        Some(Admitted {
            session: self.clone(),
            id,
            epoch,
        })
    }

    /// Admits no more data connections and ends those that stand, without waiting for them.
    pub(crate) fn cut(&self) {
        let mut connections = self.connections();
        connections.fenced = true;
        connections.epoch += 1;
        for socket in connections.open.values() {
            // It may have ended by itself; its thread notices either way.
            let _ = socket.shutdown(Shutdown::Both);
        }
        drop(connections);
        // Under the lock: whatever came by them has landed when this returns, for whoever cuts.
        if let Some(lent) = self.verbs().as_mut() {
            lent.end_pairs();
            self.pairs.store(0, Ordering::Release);
        }
    }

    /// Data connections and queue pairs.
    fn paths(&self, connections: &Connections) -> usize {
        connections.open.len() + self.pairs.load(Ordering::Acquire)
    }

    /// Cuts, and waits until the last connection's thread is done with the slabs: after it no write
    /// of theirs can land. False if that takes longer than `timeout`; the fence stays then.
    pub(crate) fn fence(&self, timeout: Duration) -> bool {
        self.cut();
        let deadline = Instant::now() + timeout;
        let mut connections = self.connections();
        while !connections.open.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            connections = self
                .left
                .wait_timeout(connections, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        true
    }

    /// Lets data connections in again.
    pub(crate) fn reopen(&self) {
        self.connections().fenced = false;
    }

    pub(crate) fn data_connections(&self) -> usize {
        self.paths(&self.connections())
    }

    /// Has RDMA ready at this port, if it can be had: what was registered at another, or at a device
    /// that is gone, is so no longer.
    pub(crate) fn prepare_verbs(&self, port: &Port) -> Result<(), VerbsError> {
        let verbs = self.verbs();
        if verbs.as_ref().is_some_and(|lent| lent.is_usable(port)) {
            return Ok(());
        }
        drop(verbs);
        self.close_verbs();
        let lent = Lent::open(port)?;
        *self.verbs() = Some(lent);
        Ok(())
    }

    /// Gives the device up: nothing of the session is registered from then on.
    pub(crate) fn close_verbs(&self) {
        self.close_verbs_if(|_| true);
    }

    /// Gives a device up that is to be removed, which may wait for just that; whether it was one.
    pub(crate) fn withdraw_verbs(&self) -> bool {
        self.close_verbs_if(Lent::is_removed)
    }

    fn close_verbs_if(&self, condition: impl FnOnce(&Lent) -> bool) -> bool {
        let mut verbs = self.verbs();
        let Some(mut former) = verbs.take_if(|lent| condition(lent)) else {
            return false;
        };
        // Under the lock: a fence that finds no RDMA any more can rely on what came by it.
        former.end_pairs();
        self.pairs.store(0, Ordering::Release);
        drop(verbs);
        // Each takes the device a while: whoever leases or releases a slab meanwhile has the books locked.
        let slabs: Vec<Arc<Slab>> = self.slabs().values().cloned().collect();
        for slab in slabs {
            slab.unregister(&former.domain());
        }
        true
    }

    /// The other end of a client's queue pair, with what its packets can be tried on. Like a data
    /// connection's it is void if the session was cut since `epoch`, and counts towards `limit`.
    pub(crate) fn open_pair(
        &self,
        peer: &End,
        epoch: u64,
        limit: usize,
    ) -> Result<Answer, PairError> {
        let domain = self.domain().ok_or(PairError::NoVerbs)?;
        let pair = Pair::new(&domain, peer)?;
        let answer = pair.answer();
        let connections = self.connections();
        if connections.fenced || connections.epoch != epoch {
            return Err(PairError::Cut);
        }
        let mut verbs = self.verbs();
        let lent = verbs.as_mut().ok_or(PairError::NoVerbs)?;
        if self.paths(&connections) >= limit {
            return Err(PairError::TooMany);
        }
        lent.keep(pair);
        self.pairs.fetch_add(1, Ordering::AcqRel);
        Ok(answer)
    }

    /// What a slab is called over RDMA; none that is not (or no longer) the client's.
    pub(crate) fn key(&self, slab: SlabId) -> Result<Option<Remote>, PairError> {
        let domain = self.domain().ok_or(PairError::NoVerbs)?;
        let Some(slab) = self.slabs().get(&slab).cloned() else {
            return Ok(None);
        };
        let key = slab.key(&domain)?;
        // Given up meanwhile: nothing may keep it open.
        if !self.domain().is_some_and(|now| now.is(&domain)) {
            slab.unregister(&domain);
            return Err(PairError::NoVerbs);
        }
        Ok(key)
    }

    /// Whether its client may use RDMA.
    pub(crate) fn has_verbs(&self) -> bool {
        self.verbs().is_some()
    }

    fn domain(&self) -> Option<Domain> {
        self.verbs().as_ref().map(Lent::domain)
    }

    fn verbs(&self) -> MutexGuard<'_, Option<Lent>> {
        // Each change under the lock is a single assignment, or a vector's.
        self.verbs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slabs(&self) -> RwLockReadGuard<'_, BTreeMap<SlabId, Arc<Slab>>> {
        self.slabs.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Turns extents into pieces; or names the first that is not the client's to touch.
    pub(crate) fn resolve(
        &self,
        extents: &[Extent],
        pieces: &mut Vec<Piece>,
    ) -> Result<(), (u16, Status)> {
        pieces.clear();
        let slabs = self.slabs();
        let mut last = None;
        for (index, extent) in extents.iter().enumerate() {
            // There are at most 256 extents.
            let at = |status| (index as u16, status);
            // Mostly of one slab, which is looked for once.
            let of_last = last.filter(|(id, _)| *id == extent.slab);
            let found = of_last.or_else(|| Some((extent.slab, slabs.get(&extent.slab)?)));
            let (_, slab) = found.ok_or(at(Status::NotLeased))?;
            let piece = Piece::new(Arc::clone(slab), extent.offset, extent.length);
            pieces.push(piece.ok_or(at(Status::OutOfRange))?);
            last = found;
        }
        Ok(())
    }

    pub(crate) fn slab_ids(&self) -> Vec<SlabId> {
        let slabs = self.slabs();
        slabs.keys().copied().collect()
    }

    /// So many of its newest slabs, newest first, but for some.
    pub(crate) fn newest_slabs(&self, most: usize, without: &BTreeSet<SlabId>) -> Vec<SlabId> {
        let slabs = self.slabs();
        let newest = slabs.keys().rev().filter(|slab| !without.contains(slab));
        newest.take(most).copied().collect()
    }

    pub(crate) fn slab_count(&self) -> u64 {
        let slabs = self.slabs();
        slabs.len() as u64
    }

    /// Bytes of the client's slabs, of those too that it released while a request still used them.
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes.load(Ordering::Acquire)
    }

    /// Where the client's slabs are to be counted.
    pub(crate) fn count(&self) -> Arc<AtomicU64> {
        self.mapped_bytes.clone()
    }

    pub(crate) fn add_slab(&self, id: SlabId, slab: Slab) {
        let mut slabs = self.slabs.write().unwrap_or_else(PoisonError::into_inner);
        slabs.insert(id, Arc::new(slab));
    }

    #[cfg(test)]
    pub(crate) fn slab(&self, id: SlabId) -> Option<Arc<Slab>> {
        self.slabs().get(&id).cloned()
    }

    /// Takes a slab out; dropping it gives its memory back, which is not to be done under a lock.
    pub(crate) fn take_slab(&self, id: SlabId) -> Option<Arc<Slab>> {
        let mut slabs = self.slabs.write().unwrap_or_else(PoisonError::into_inner);
        slabs.remove(&id)
    }

    /// Takes every slab out.
    pub(crate) fn take_slabs(&self) -> BTreeMap<SlabId, Arc<Slab>> {
        let mut slabs = self.slabs.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut slabs)
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        // Each change under the lock is a single call that completes or does not begin.
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Admitted {
    /// Whether the session was cut since, and the connection with it.
    pub(crate) fn is_cut(&self) -> bool {
        self.session.epoch() != self.epoch
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.session.connections().open.remove(&self.id);
        self.session.left.notify_all();
    }
}

impl std::ops::Deref for Admitted {
    type Target = Session;

    fn deref(&self) -> &Session {
        &self.session
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn socket() -> Arc<TcpStream> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let address = listener.local_addr().expect("bound");
        Arc::new(TcpStream::connect(address).expect("connected"))
    }

    fn session() -> Arc<Session> {
        let holder = Holder::Guest(VmId(uuid::Uuid::from_u128(1)), Seat::First);
        let name = ClientName("host".to_owned());
        Arc::new(Session::new(holder, name, SessionSecret([1; 32])))
    }

    #[test]
    fn a_fence_waits_for_the_last_connection() {
        let session = session();
        let epoch = session.epoch();
        let admitted = session.admit(&socket(), epoch, 1).expect("there is room");
        assert!(session.admit(&socket(), epoch, 1).is_none(), "the limit");
        assert!(!admitted.is_cut());
        assert!(!session.fence(Duration::from_millis(20)));
        assert!(admitted.is_cut());
        let fencing = session.clone();
        let fenced = std::thread::spawn(move || fencing.fence(Duration::from_secs(20)));
        std::thread::sleep(Duration::from_millis(20));
        drop(admitted);
        assert!(fenced.join().expect("no panic"));
        assert_eq!(session.data_connections(), 0);
    }

    #[test]
    fn what_was_promised_before_a_fence_is_void_after_it() {
        let session = session();
        let before = session.epoch();
        assert!(session.fence(Duration::ZERO));
        assert!(session.admit(&socket(), session.epoch(), 1).is_none());
        session.reopen();
        assert!(session.admit(&socket(), before, 1).is_none());
        assert!(session.admit(&socket(), session.epoch(), 1).is_some());
    }

    #[test]
    fn queue_pairs_count_towards_the_limit_of_connections() {
        let session = session();
        let admit = || session.admit(&socket(), session.epoch(), 2);
        session.pairs.store(1, Ordering::Release);
        let admitted = admit().expect("there is room");
        assert_eq!(session.data_connections(), 2);
        assert!(admit().is_none(), "the limit");
        drop(admitted);
        assert!(admit().is_some());
    }
}
