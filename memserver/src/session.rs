//! A client's session as its data connections see it: the slabs they may touch, and the fence that
//! ends them all before another control connection takes over.

use std::collections::{BTreeMap, HashMap};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use outram_wire::server::data::Status;
use outram_wire::server::{ClientName, Extent, SessionSecret, SlabId};
use outram_wire::units::VmId;

use crate::slab::{Piece, Slab};

/// What does not change in a session, its slabs, and its data connections.
///
/// Lock order: the ledger's books before either lock here; never both of these at once.
pub(crate) struct Session {
    pub(crate) vm: VmId,
    pub(crate) name: ClientName,
    pub(crate) secret: SessionSecret,
    slabs: RwLock<BTreeMap<SlabId, Arc<Slab>>>,
    connections: Mutex<Connections>,
    left: Condvar,
}

#[derive(Default)]
struct Connections {
    /// No new ones while set.
    fenced: bool,
    next: u64,
    open: HashMap<u64, Arc<TcpStream>>,
}

/// A data connection's place in its session; leaving it is dropping this.
pub(crate) struct Admitted {
    session: Arc<Session>,
    id: u64,
}

impl Session {
    pub(crate) fn new(vm: VmId, name: ClientName, secret: SessionSecret) -> Self {
        Self {
            vm,
            name,
            secret,
            slabs: RwLock::default(),
            connections: Mutex::default(),
            left: Condvar::new(),
        }
    }

    /// Admits a data connection; none while the session is fenced, nor beyond `limit`.
    pub(crate) fn admit(
        self: &Arc<Self>,
        socket: &Arc<TcpStream>,
        limit: usize,
    ) -> Option<Admitted> {
        let mut connections = self.connections();
        if connections.fenced || connections.open.len() >= limit {
            return None;
        }
        let id = connections.next;
        connections.next += 1;
        connections.open.insert(id, socket.clone());
        Some(Admitted {
            session: self.clone(),
            id,
        })
    }

    /// Admits no more data connections and ends those that stand, without waiting for them.
    pub(crate) fn cut(&self) {
        let mut connections = self.connections();
        connections.fenced = true;
        for socket in connections.open.values() {
            // It may have ended by itself; its thread notices either way.
            let _ = socket.shutdown(Shutdown::Both);
        }
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
        self.connections().open.len()
    }

    /// Turns extents into pieces; or names the first that is not the client's to touch.
    pub(crate) fn resolve(
        &self,
        extents: &[Extent],
        pieces: &mut Vec<Piece>,
    ) -> Result<(), (u16, Status)> {
        pieces.clear();
        let slabs = self.slabs.read().unwrap_or_else(PoisonError::into_inner);
        for (index, extent) in extents.iter().enumerate() {
            // There are at most 256 extents.
            let at = |status| (index as u16, status);
            let slab = slabs.get(&extent.slab);
            let slab = slab.ok_or(at(Status::NotLeased))?.clone();
            let piece = Piece::new(slab, extent.offset, extent.length);
            pieces.push(piece.ok_or(at(Status::OutOfRange))?);
        }
        Ok(())
    }

    pub(crate) fn slab_ids(&self) -> Vec<SlabId> {
        let slabs = self.slabs.read().unwrap_or_else(PoisonError::into_inner);
        slabs.keys().copied().collect()
    }

    pub(crate) fn slab_count(&self) -> u64 {
        let slabs = self.slabs.read().unwrap_or_else(PoisonError::into_inner);
        slabs.len() as u64
    }

    pub(crate) fn add_slab(&self, id: SlabId, slab: Slab) {
        let mut slabs = self.slabs.write().unwrap_or_else(PoisonError::into_inner);
        slabs.insert(id, Arc::new(slab));
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
