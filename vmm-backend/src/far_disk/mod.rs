//! The far-memory disk: a thin disk whose blocks lie on the memory servers alone.
//!
//! A write returns once a server has it, so that nothing of the disk lies on this host; blocks that
//! were never written, or were given back, read as zeros and cost nothing. Each block is sealed under
//! a key bound to disk, block and generation: a wrong or lost block is an error, never other bytes.
//!
//! The disk belongs to nobody's process. It is created with its guest's start, *parked* when its
//! backend goes away keeping it, and claimed by the next one: after a restore, or at the other end of
//! a migration. The latest claim wins. So it is opened no earlier than its first use, for until then
//! another host's guest may be using it; see [`FarDisk::resume`].
//!
//! A backend that died is a different matter: what it knew of the open disk stands in a table that
//! outlives it (see [`DiskTable`]), and its successor goes on with that.
//!
//! The module knows neither virtio nor the pager. Its callers wait for the network; the pager's
//! threads never do so here. What would wait for a server out of reach can be interrupted, and the
//! request be made again later: each is whole blocks to a fixed place, and may be done twice.
//! Lock order: `opening`, then `access`; neither while waiting for a server, but for `opening` by
//! whoever opens.

mod block_keys;
mod extents;
mod key;
mod layout;
mod line;
mod opening;
mod ranges;
mod store;
mod table;
#[cfg(test)]
pub(crate) mod tests;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::Duration;

use outram_wire::causes::with_causes;
use outram_wire::control::{DiskState, DiskStatus};
use outram_wire::disk::DiskKey;
use outram_wire::logging::Seldom;
use outram_wire::seal::Seal;
use outram_wire::server::{DiskId, SlabId};
use outram_wire::units::{VmId, format_size};

use crate::interrupt::{Interrupt, LOOK};
use crate::remote::{RemoteConfig, RemoteError};
use key::Identity;
use line::Over;
use store::Store;

pub use table::{DiskTable, TableError};

/// How long the servers may take to confirm that the disk is dropped.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two attempts to open a disk whose server is out of reach.
const RETRY: Duration = Duration::from_millis(500);
/// Data connections to each server: as many requests move at a time.
pub const DATA_CONNECTIONS: usize = 4;

/// What a disk is made of.
#[derive(Clone, Debug)]
pub struct FarDiskConfig {
    /// The guest.
    pub vm: VmId,
    /// Bytes: see [`outram_wire::disk::is_disk_size`].
    pub size_bytes: u64,
    /// The key in the domain's metadata.
    pub key: DiskKey,
    /// Whether blocks are sealed before they leave; those that lie there are read either way.
    pub seal: Seal,
    /// The servers, and who we are; its `vm` and `secret` are not used.
    pub remote: RemoteConfig,
}

/// Why a disk could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// A memory server.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// No key for what is to be written.
    #[error("drawing a key for the disk's blocks failed")]
    Key(#[source] std::io::Error),
    /// No server is named.
    #[error("a far-memory disk needs a memory server, and none is named")]
    NoServer,
    /// Slabs without room for a block.
    #[error("slabs of {0} bytes are too small for a far-memory disk")]
    SlabSize(u64),
    /// The disk on the servers has another size.
    #[error(
        "the disk on the memory servers has {}, the domain's metadata says {}: set the size back, or start the guest without its saved state",
        format_size(*kept), format_size(*asked)
    )]
    OtherSize {
        /// As it was created.
        kept: u64,
        /// As it is asked for.
        asked: u64,
    },
    /// The servers named are not those that it was created on.
    #[error(
        "the far-memory disk was created on other memory servers: name the same ones, all of them"
    )]
    OtherServers,
    /// A slab that is not this disk's.
    #[error("slab {0} on a memory server is not this disk's, or was changed")]
    Foreign(SlabId),
    /// A slab in which blocks lie is not there any more.
    #[error("slab {0} of the disk is gone from its memory server")]
    SlabGone(SlabId),
    /// It failed while being loaded.
    #[error(transparent)]
    Fault(#[from] DiskFault),
}

/// Why a request to the disk failed. What it was to change may or may not have changed where it was
/// interrupted; otherwise it has not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskFault {
    /// The caller wanted it ended: to be made again.
    #[error("the request was interrupted")]
    Interrupted,
    /// What was stored is gone.
    #[error("the disk's contents are lost: {0}")]
    Lost(String),
    /// Another backend uses the disk now.
    #[error("the disk is used elsewhere: {0}")]
    Claimed(String),
    /// A block that came back is not the one that was stored.
    #[error("block {block} came back changed")]
    Corrupt {
        /// Its number on the disk.
        block: u32,
    },
    /// There is no room although it was set aside.
    #[error("no room for more of the disk: {0}")]
    NoRoom(String),
    /// The request reaches past the disk's end.
    #[error("the request reaches past the end of the disk")]
    Beyond,
    /// The disk could not be opened.
    #[error("the disk could not be opened: {0}")]
    Unopened(String),
    /// The guest has ended.
    #[error("the guest has ended")]
    Ended,
}

/// A guest's far-memory disk.
pub struct FarDisk {
    config: FarDiskConfig,
    identity: Identity,
    table: Arc<DiskTable>,
    access: Mutex<Access>,
    /// Held by whoever opens the disk.
    opening: Mutex<()>,
    /// The guest has begun to use the disk, and it was not claimed back since.
    may_reclaim: AtomicBool,
    tally: Tally,
}

/// How far a disk is open.
enum Access {
    /// To be claimed by the first who uses it, once nobody is at work any more with the store that it
    /// was before: both have one table.
    Closed(Weak<Store>),
    Open(Arc<Store>),
    /// It cannot be opened, for this reason.
    Failed(String),
    Ended,
}

#[derive(Default)]
struct Tally {
    reads: AtomicU64,
    writes: AtomicU64,
    discards: AtomicU64,
    errors: AtomicU64,
    integrity_failures: AtomicU64,
}

impl FarDisk {
    /// A new, empty disk: every byte of it is set aside on the servers.
    pub fn create(config: FarDiskConfig, table: DiskTable) -> Result<Self, DiskError> {
        let disk = Self::incoming(config, table);
        let store = opening::create(&disk.config, &disk.identity, &disk.table)?;
        *disk.access() = Access::Open(Arc::new(store));
        Ok(disk)
    }

    /// The disk as it was left, or is being used until its guest is here, or, where the table says that
    /// it was open, as a backend that died had it: claimed at its first use.
    pub fn incoming(config: FarDiskConfig, table: DiskTable) -> Self {
        let identity = Identity::derive(config.vm, &config.key);
        Self {
            config,
            identity,
            table: Arc::new(table),
            access: Mutex::new(Access::Closed(Weak::new())),
            opening: Mutex::default(),
            may_reclaim: AtomicBool::new(false),
            tally: Tally::default(),
        }
    }

    /// Its size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.config.size_bytes
    }

    /// Its name on the servers.
    pub fn id(&self) -> DiskId {
        self.identity.disk
    }

    /// Reads from `offset` on.
    pub fn read(
        &self,
        offset: u64,
        into: &mut [u8],
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskFault> {
        self.check_bounds(offset, into.len() as u64)?;
        let result = self.with_store(interrupt, |store| store.read(offset, into, interrupt));
        self.count(&self.tally.reads, result)
    }

    /// Writes from `offset` on; returns once the servers have all of it.
    pub fn write(
        &self,
        offset: u64,
        from: &[u8],
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskFault> {
        self.check_bounds(offset, from.len() as u64)?;
        let result = self.with_store(interrupt, |store| store.write(offset, from, interrupt));
        self.count(&self.tally.writes, result)
    }

    /// Makes bytes read as zeros, and gives back the room of blocks that lie among them whole.
    pub fn zero(
        &self,
        offset: u64,
        length: u64,
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskFault> {
        self.check_bounds(offset, length)?;
        let result = self.with_store(interrupt, |store| store.zero(offset, length, interrupt));
        self.count(&self.tally.discards, result)
    }

    /// The guest begins to use the disk (again): should another backend have claimed it meanwhile,
    /// it is claimed back at the next use. A migration that failed after the hand-over ends so.
    pub fn resume(&self) {
        self.may_reclaim.store(true, Ordering::Release);
        let mut access = self.access();
        if matches!(&*access, Access::Failed(_)) {
            // What kept it from being opened may be mended by now.
            *access = Access::Closed(Weak::new());
        }
    }

    /// The guest has ended: the disk is parked for whoever claims it, or dropped.
    pub fn end(&self, keep: bool) {
        let access = std::mem::replace(&mut *self.access(), Access::Ended);
        let Access::Open(store) = access else {
            return;
        };
        if keep {
            tracing::info!("the far-memory disk is parked on its servers");
            return;
        }
        for line in &store.lines {
            if let Err(error) = line.session.close(CLOSE_TIMEOUT) {
                tracing::warn!(
                    "a memory server did not confirm that the far-memory disk is dropped, and may keep it parked: {}",
                    with_causes(&error)
                );
            }
        }
    }

    /// How the disk is.
    pub fn status(&self) -> DiskStatus {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut status = DiskStatus {
            id: self.identity.disk,
            size_bytes: self.config.size_bytes,
            state: DiskState::Parked,
            connected: None,
            detail: None,
            stored_bytes: 0,
            leased_slabs: 0,
            reads: get(&self.tally.reads),
            writes: get(&self.tally.writes),
            discards: get(&self.tally.discards),
            errors: get(&self.tally.errors),
            integrity_failures: get(&self.tally.integrity_failures),
            sent_bytes: 0,
            received_bytes: 0,
        };
        match &*self.access() {
            Access::Open(store) => {
                status.state = DiskState::Open;
                status.stored_bytes = store.written_bytes();
                status.leased_slabs = store.extents.count();
                for line in &store.lines {
                    let (sent, received) = line.state.traffic();
                    status.sent_bytes += sent;
                    status.received_bytes += received;
                }
                match store.over() {
                    Some(Over::Claimed(reason)) => {
                        (status.state, status.detail) = (DiskState::Claimed, Some(reason));
                    }
                    Some(Over::Lost(reason)) => {
                        (status.state, status.detail) = (DiskState::Lost, Some(reason));
                    }
                    None => {}
                }
            }
            Access::Failed(reason) => {
                (status.state, status.detail) = (DiskState::Lost, Some(reason.clone()));
            }
            Access::Closed(_) | Access::Ended => {}
        }
        status
    }

    fn access(&self) -> MutexGuard<'_, Access> {
        // Each change under the lock is an assignment.
        self.access.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The disk, open; `None` while it is to be claimed.
    fn opened(&self) -> Option<Result<Arc<Store>, DiskFault>> {
        match &*self.access() {
            Access::Open(store) => Some(Ok(Arc::clone(store))),
            Access::Closed(_) => None,
            Access::Failed(reason) => Some(Err(DiskFault::Unopened(reason.clone()))),
            Access::Ended => Some(Err(DiskFault::Ended)),
        }
    }

    /// The disk, open: claimed now if it was not yet. A server out of reach is waited for.
    fn open(&self, interrupt: &Interrupt<'_>) -> Result<Arc<Store>, DiskFault> {
        if let Some(opened) = self.opened() {
            return opened;
        }
        let _opening = self.begin_opening(interrupt)?;
        loop {
            // Another may have opened it while the lock was waited for.
            if let Some(opened) = self.opened() {
                return opened;
            }
            if interrupt.is_wanted() {
                return Err(DiskFault::Interrupted);
            }
            if self.is_left_behind() {
                std::thread::sleep(LOOK);
                continue;
            }
            match opening::claim(&self.config, &self.identity, &self.table, interrupt) {
                Ok(store) => self.settle(Access::Open(Arc::new(store))),
                Err(error) if opening::may_pass(&error) => {
                    static NOT_YET: Seldom = Seldom::new();
                    if NOT_YET.is_due() {
                        let why = with_causes(&error);
                        tracing::warn!("the far-memory disk is not open yet: {why}");
                    }
                    std::thread::sleep(RETRY);
                }
                Err(error) => {
                    let reason = with_causes(&error);
                    tracing::error!("the far-memory disk cannot be opened: {reason}");
                    self.settle(Access::Failed(reason));
                }
            }
        }
    }

    /// Waits for whoever opens the disk, who may be waiting for servers.
    fn begin_opening(&self, interrupt: &Interrupt<'_>) -> Result<MutexGuard<'_, ()>, DiskFault> {
        loop {
            match self.opening.try_lock() {
                Ok(opening) => return Ok(opening),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if interrupt.is_wanted() => {
                    return Err(DiskFault::Interrupted);
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
            }
        }
    }

    /// Whether somebody is at work still with a store that was claimed by another.
    fn is_left_behind(&self) -> bool {
        matches!(&*self.access(), Access::Closed(former) if former.strong_count() > 0)
    }

    /// Acts on the open disk; on the disk claimed back, should another have claimed it before our guest
    /// began to use it.
    fn with_store(
        &self,
        interrupt: &Interrupt<'_>,
        mut act: impl FnMut(&Store) -> Result<(), DiskFault>,
    ) -> Result<(), DiskFault> {
        let store = self.open(interrupt)?;
        match act(&store) {
            Err(DiskFault::Claimed(_)) if self.is_to_be_reclaimed(&store) => {
                drop(store);
                act(&*self.open(interrupt)?)
            }
            result => result,
        }
    }

    /// Whether a store that was claimed by another is no longer the current one, or closed now.
    fn is_to_be_reclaimed(&self, claimed: &Arc<Store>) -> bool {
        let mut access = self.access();
        match &*access {
            Access::Open(store) if Arc::ptr_eq(store, claimed) => {
                let may = self.may_reclaim.swap(false, Ordering::AcqRel);
                if may {
                    tracing::warn!("the far-memory disk was claimed elsewhere: claiming it back");
                    // What the other did is not in it.
                    self.table.close();
                    *access = Access::Closed(Arc::downgrade(claimed));
                }
                may
            }
            // Another queue's request was first.
            _ => true,
        }
    }

    /// Ends an opening, unless the guest has ended meanwhile.
    fn settle(&self, outcome: Access) {
        let mut access = self.access();
        if matches!(*access, Access::Closed(_)) {
            *access = outcome;
        }
    }

    fn check_bounds(&self, offset: u64, length: u64) -> Result<(), DiskFault> {
        let end = offset.checked_add(length);
        match end.is_some_and(|end| end <= self.config.size_bytes) {
            true => Ok(()),
            false => Err(DiskFault::Beyond),
        }
    }

    fn count(&self, kind: &AtomicU64, result: Result<(), DiskFault>) -> Result<(), DiskFault> {
        match &result {
            Ok(()) => {
                kind.fetch_add(1, Ordering::Relaxed);
            }
            // Made again later.
            Err(DiskFault::Interrupted) => {}
            Err(fault) => {
                if matches!(fault, DiskFault::Corrupt { .. }) {
                    self.tally
                        .integrity_failures
                        .fetch_add(1, Ordering::Relaxed);
                }
                let errors = self.tally.errors.fetch_add(1, Ordering::Relaxed) + 1;
                // A guest can repeat what fails as fast as it likes: ever fewer are logged.
                if errors.is_power_of_two() {
                    tracing::error!(errors, "a request to the far-memory disk failed: {fault}");
                }
            }
        }
        result
    }
}
