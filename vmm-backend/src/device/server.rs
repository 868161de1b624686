//! The vhost-user back end: what a front end says, and what becomes of it.
//!
//! No in-flight descriptors are offered: requests are served one at a time and in order within a
//! queue, so that the used index alone tells where to go on after a front end has reconnected, or
//! after this process died. (The vhost-user specification's section on tracking of in-flight I/O says
//! so too: descriptors need to be kept only where they are not processed in order.)

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandler};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ,
    VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::bindings::virtio_config::{VIRTIO_F_ANY_LAYOUT, VIRTIO_F_VERSION_1};
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::disk::{BLOCK_SECTORS, Disk, SECTOR_BYTES};
use super::guard::Guard;
use super::memory::TableRegion;
use super::request::{MAX_CLEARED_SECTORS, MAX_CLEARED_SEGMENTS, MAX_REQUEST_BYTES};
use super::ring::{Ring, RingAddresses};
use super::table::{MappedRegion, Table};
use super::worker::{Shared, Signals, Worker};
use crate::handover::MemfdId;

/// Most buffers of a request's data: what fits a queue of 128, QEMU's default, with header and
/// status.
const MAX_SEGMENTS: u32 = 126;
/// Largest of these buffers: so that no driver that keeps both exceeds the largest request.
const MAX_SEGMENT_BYTES: u32 = 8192;
const _: () = assert!(MAX_SEGMENTS as u64 * MAX_SEGMENT_BYTES as u64 <= MAX_REQUEST_BYTES);
/// Most regions of a memory table: what one message can carry descriptors for, four times over.
const MAX_REGIONS: u64 = 128;
/// Space that a front end may read configuration from; beyond the known fields it is zeros.
const CONFIG_BYTES: usize = 256;

/// One connection's state.
pub(super) struct Connection {
    shared: Arc<Shared>,
    guard: Guard,
    max_queues: u16,
    state: Mutex<State>,
}

struct State {
    features: u64,
    regions: Vec<Arc<MappedRegion>>,
    /// Guest address, VMM address and length of regions that are no RAM, and that no request may use.
    foreign: Vec<[u64; 3]>,
    queues: Vec<QueueState>,
}

#[derive(Default)]
struct QueueState {
    size: u32,
    base: u16,
    enabled: bool,
    signals: Signals,
    addresses: Option<RingAddresses>,
    /// Pinned, but not running.
    ring: Option<Ring>,
    worker: Option<Worker>,
}

/// An error of ours, as the vhost crate carries it.
fn refuse(text: impl std::fmt::Display) -> Error {
    Error::ReqHandlerError(io::Error::other(text.to_string()))
}

fn feature(bit: u32) -> u64 {
    1 << bit
}

/// What a device with this disk offers.
fn offered_features(disk: &Disk) -> u64 {
    let kind = match disk.is_writable() {
        true => {
            feature(VIRTIO_BLK_F_DISCARD)
                | feature(VIRTIO_BLK_F_WRITE_ZEROES)
                | feature(VIRTIO_BLK_F_TOPOLOGY)
        }
        false => feature(VIRTIO_BLK_F_RO),
    };
    kind | feature(VIRTIO_F_VERSION_1)
        // Older drivers acknowledge it unasked; requests are read however they are cut.
        | feature(VIRTIO_F_ANY_LAYOUT)
        | feature(VIRTIO_RING_F_EVENT_IDX)
        | feature(VIRTIO_BLK_F_MQ)
        | feature(VIRTIO_BLK_F_FLUSH)
        | feature(VIRTIO_BLK_F_BLK_SIZE)
        | feature(VIRTIO_BLK_F_SEG_MAX)
        | feature(VIRTIO_BLK_F_SIZE_MAX)
        | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
        // Without it QEMU neither migrates nor saves the guest.
        | VhostUserVirtioFeatures::LOG_ALL.bits()
}

impl Connection {
    pub(super) fn new(shared: Arc<Shared>, guard: Guard, max_queues: u16) -> Self {
        let mut queues = Vec::new();
        queues.resize_with(usize::from(max_queues), QueueState::default);
        Self {
            shared,
            guard,
            max_queues,
            state: Mutex::new(State {
                features: 0,
                regions: Vec::new(),
                foreign: Vec::new(),
                queues,
            }),
        }
    }

    /// Stops every queue, unpins every ring and forgets the memory table.
    pub(super) fn close(&self) {
        let mut state = self.state();
        for queue in &mut state.queues {
            queue.halt();
            *queue = QueueState::default();
        }
        state.regions.clear();
        state.foreign.clear();
        self.replace_table(Table::default());
        self.shared.log.clear();
    }

    /// Drops regions of memfds that are guest RAM no longer.
    pub(super) fn forget(&self, memfds: &[MemfdId]) {
        let mut state = self.state();
        let before = state.regions.len();
        state
            .regions
            .retain(|region| !memfds.contains(&region.info.memfd));
        if state.regions.len() == before {
            return;
        }
        match Table::new(state.regions.clone()) {
            Ok(table) => self.replace_table(table),
            Err(error) => tracing::error!(error, "a memory table became wrong by being less"),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn replace_table(&self, table: Table) {
        let mut current = self
            .shared
            .table
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *current = Arc::new(table);
    }

    fn with_queue<T>(
        &self,
        index: u32,
        act: impl FnOnce(&mut QueueState, u64) -> Result<T>,
    ) -> Result<T> {
        let mut state = self.state();
        let features = state.features;
        let queue = state
            .queues
            .get_mut(index as usize)
            .ok_or_else(|| refuse(format_args!("queue {index} of {}", self.max_queues)))?;
        act(queue, features)
    }

    /// Starts a queue once everything for it is there.
    fn start_if_ready(&self, index: u32, queue: &mut QueueState, features: u64) -> Result<()> {
        if !queue.enabled || queue.signals.kick.is_none() || queue.worker.is_some() {
            return Ok(());
        }
        // What it wrote before there is a log would be missed: the log's coming starts it.
        if self.shared.log.is_awaited() {
            return Ok(());
        }
        let Some(mut ring) = queue.ring.take() else {
            return Ok(());
        };
        let event_idx = features & feature(VIRTIO_RING_F_EVENT_IDX) != 0;
        ring.start_at(queue.base, event_idx).map_err(refuse)?;
        let shared = Arc::clone(&self.shared);
        let worker = Worker::start(index as usize, ring, &queue.signals, shared).map_err(refuse)?;
        queue.worker = Some(worker);
        Ok(())
    }

    /// Puts regions in place of the present ones, once the pager has confirmed them.
    fn set_regions(&self, state: &mut State, regions: Vec<Arc<MappedRegion>>) -> Result<()> {
        let infos: Vec<TableRegion> = regions.iter().map(|region| region.info).collect();
        let table = Table::new(regions.clone()).map_err(refuse)?;
        let log = &self.shared.log;
        log.set_guest_end(table.guest_end()).map_err(refuse)?;
        self.shared.memory.confirm(&infos).map_err(refuse)?;
        state.regions = regions;
        self.replace_table(table);
        Ok(())
    }

    fn map_region(
        &self,
        file: File,
        [guest_address, vmm_address, file_offset, length]: [u64; 4],
        foreign: &mut Vec<[u64; 3]>,
    ) -> Result<Option<Arc<MappedRegion>>> {
        let memfd = MemfdId::of(&file).map_err(refuse)?;
        if self.shared.memory.is_foreign(memfd) {
            tracing::info!(
                %memfd, bytes = length,
                "the disk is told of memory that is none of the guest's RAM: no request can use it"
            );
            foreign.push([guest_address, vmm_address, length]);
            return Ok(None);
        }
        let info = TableRegion {
            memfd,
            file_offset,
            guest_address,
            vmm_address,
            length,
        };
        // One that is mapped already stays as it is.
        if let Some(known) = self.known_region(&info) {
            return Ok(Some(known));
        }
        let size = self.shared.memory.page_size();
        let region = MappedRegion::map(&self.guard, info, file, size).map_err(|error| {
            refuse(format_args!(
                "the memory region at guest address {guest_address:#x} with {length:#x} bytes \
                 cannot be used: {error}"
            ))
        })?;
        Ok(Some(Arc::new(region)))
    }

    fn known_region(&self, info: &TableRegion) -> Option<Arc<MappedRegion>> {
        let table = self
            .shared
            .table
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        table
            .regions()
            .iter()
            .find(|region| region.info == *info)
            .cloned()
    }

    fn configuration(&self) -> [u8; CONFIG_BYTES] {
        // Offsets of struct virtio_blk_config (virtio 1.2, section 5.2.4).
        let mut bytes = [0; CONFIG_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &self.shared.disk.sectors().to_le_bytes());
        put(8, &MAX_SEGMENT_BYTES.to_le_bytes());
        put(12, &MAX_SEGMENTS.to_le_bytes());
        put(20, &(SECTOR_BYTES as u32).to_le_bytes());
        put(34, &self.max_queues.to_le_bytes());
        if self.shared.disk.is_writable() {
            // Any sector may be read and written; whole blocks are what costs least.
            put(24, &[BLOCK_SECTORS.trailing_zeros() as u8, 0]);
            put(26, &(BLOCK_SECTORS as u16).to_le_bytes());
            // Discards: sectors, segments, alignment; then sectors and segments to be zeroed, which
            // gives their room back as well.
            put(36, &MAX_CLEARED_SECTORS.to_le_bytes());
            put(40, &MAX_CLEARED_SEGMENTS.to_le_bytes());
            put(44, &(BLOCK_SECTORS as u32).to_le_bytes());
            put(48, &MAX_CLEARED_SECTORS.to_le_bytes());
            put(52, &MAX_CLEARED_SEGMENTS.to_le_bytes());
            put(56, &[1]);
        }
        bytes
    }
}

impl QueueState {
    /// Ends the queue's thread; its ring stays pinned. Where to go on is remembered.
    fn halt(&mut self) {
        if let Some(worker) = self.worker.take() {
            self.ring = worker.stop();
            if let Some(ring) = &self.ring {
                self.base = ring.next_available();
            }
        }
    }
}

impl VhostUserBackendReqHandler for Connection {
    fn set_owner(&self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&self) -> Result<()> {
        // Deprecated by the specification, which asks back ends to ignore it.
        Ok(())
    }

    fn reset_device(&self) -> Result<()> {
        let mut state = self.state();
        state.features = 0;
        self.shared.log.want(false).map_err(refuse)?;
        for queue in &mut state.queues {
            queue.halt();
            let signals = std::mem::take(&mut queue.signals);
            *queue = QueueState {
                signals,
                ..QueueState::default()
            };
        }
        self.shared.usage.stopped();
        Ok(())
    }

    fn get_features(&self) -> Result<u64> {
        Ok(offered_features(&self.shared.disk))
    }

    fn set_features(&self, features: u64) -> Result<()> {
        let unknown = features & !offered_features(&self.shared.disk);
        if unknown != 0 {
            return Err(refuse(format_args!(
                "features {unknown:#x} were not offered"
            )));
        }
        let mut state = self.state();
        let logged = features & VhostUserVirtioFeatures::LOG_ALL.bits() != 0;
        let runs = state.queues.iter().any(|queue| queue.worker.is_some());
        if logged && runs && !self.shared.log.is_there() {
            return Err(refuse(
                "writes are to be logged (VHOST_F_LOG_ALL) while queues run, but no log was given",
            ));
        }
        self.shared.log.want(logged).map_err(refuse)?;
        state.features = features;
        if features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            // Without SET_VRING_ENABLE, rings are enabled from the start.
            for queue in &mut state.queues {
                queue.enabled = true;
            }
        }
        Ok(())
    }

    fn set_mem_table(
        &self,
        table: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        let mut foreign = Vec::new();
        let regions = table
            .iter()
            .zip(files)
            .filter_map(|(region, file)| {
                // Copied out: the message is packed.
                let VhostUserMemoryRegion {
                    guest_phys_addr,
                    memory_size,
                    user_addr,
                    mmap_offset,
                    ..
                } = *region;
                let fields = [guest_phys_addr, user_addr, mmap_offset, memory_size];
                self.map_region(file, fields, &mut foreign).transpose()
            })
            .collect::<Result<Vec<_>>>()?;
        let mut state = self.state();
        self.set_regions(&mut state, regions)?;
        state.foreign = foreign;
        Ok(None)
    }

    fn set_vring_num(&self, index: u32, num: u32) -> Result<()> {
        self.with_queue(index, |queue, _| {
            queue.size = num;
            Ok(())
        })
    }

    fn set_vring_addr(
        &self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let table = {
            let table = self.shared.table.read();
            Arc::clone(&table.unwrap_or_else(PoisonError::into_inner))
        };
        self.with_queue(index, |queue, features| {
            let addresses = RingAddresses {
                descriptors: descriptor,
                available,
                used,
                used_log: flags
                    .contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG)
                    .then_some(log),
            };
            let stands = queue.ring.is_some() || queue.worker.is_some();
            if stands && queue.addresses == Some(addresses) {
                return Ok(());
            }
            queue.halt();
            // Unpinned before the new one is pinned: pins are bounded.
            queue.ring = None;
            let memory = self.shared.memory.as_ref();
            let ring = Ring::open(&self.guard, &table, memory, queue.size, addresses)
                .map_err(|error| refuse(format_args!("queue {index}: {error}")))?;
            queue.addresses = Some(addresses);
            queue.ring = Some(ring);
            self.start_if_ready(index, queue, features)
        })
    }

    fn set_vring_base(&self, index: u32, base: u32) -> Result<()> {
        self.with_queue(index, |queue, _| {
            queue.base = u16::try_from(base)
                .map_err(|_| refuse(format_args!("ring base {base} exceeds 16 bits")))?;
            Ok(())
        })
    }

    fn get_vring_base(&self, index: u32) -> Result<VhostUserVringState> {
        self.with_queue(index, |queue, _| {
            queue.halt();
            // Unpinned, and not to be started again before all is set anew.
            queue.ring = None;
            queue.addresses = None;
            queue.signals.kick = None;
            queue.signals.call = None;
            Ok(VhostUserVringState::new(index, u32::from(queue.base)))
        })
        .inspect(|_| {
            let state = self.state();
            if state.queues.iter().all(|queue| queue.worker.is_none()) {
                self.shared.usage.stopped();
            }
        })
    }

    fn set_vring_kick(&self, index: u8, fd: Option<File>) -> Result<()> {
        let index = u32::from(index);
        self.with_queue(index, |queue, features| {
            let kick = fd.ok_or_else(|| refuse("polled queues are not supported: no kick"))?;
            queue.halt();
            queue.signals.kick = Some(kick);
            self.shared.disk.resume();
            self.start_if_ready(index, queue, features)
        })
    }

    fn set_vring_call(&self, index: u8, fd: Option<File>) -> Result<()> {
        let index = u32::from(index);
        self.with_queue(index, |queue, features| {
            // Changed while the queue runs whenever the guest masks its interrupt.
            queue.halt();
            queue.signals.call = fd;
            self.start_if_ready(index, queue, features)
        })
    }

    fn set_vring_err(&self, index: u8, fd: Option<File>) -> Result<()> {
        self.with_queue(u32::from(index), |queue, _| {
            queue.signals.error = fd;
            Ok(())
        })
    }

    fn get_protocol_features(&self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::LOG_SHMFD)
    }

    fn set_protocol_features(&self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&self) -> Result<u64> {
        Ok(u64::from(self.max_queues))
    }

    fn set_vring_enable(&self, index: u32, enable: bool) -> Result<()> {
        self.with_queue(index, |queue, features| {
            queue.enabled = enable;
            if enable {
                self.start_if_ready(index, queue, features)
            } else {
                queue.halt();
                Ok(())
            }
        })
    }

    fn get_config(&self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let start = offset as usize;
        start
            .checked_add(size as usize)
            .and_then(|end| self.configuration().get(start..end).map(<[u8]>::to_vec))
            .ok_or(Error::InvalidParam)
    }

    fn set_config(&self, _offset: u32, _buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        Err(refuse("the disk's configuration cannot be changed"))
    }

    fn set_gpu_socket(&self, _gpu_backend: GpuBackend) -> Result<()> {
        Err(unsupported())
    }

    fn get_shared_object(&self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(unsupported())
    }

    fn get_inflight_fd(&self, _: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        Err(unsupported())
    }

    fn set_inflight_fd(&self, _inflight: &VhostUserInflight, _file: File) -> Result<()> {
        Err(unsupported())
    }

    fn get_max_mem_slots(&self) -> Result<u64> {
        Ok(MAX_REGIONS)
    }

    fn add_mem_region(
        &self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<u64>> {
        let fields = region_fields(region);
        let mut state = self.state();
        if (state.regions.len() + state.foreign.len()) as u64 >= MAX_REGIONS {
            return Err(refuse(format_args!(
                "more than {MAX_REGIONS} memory regions"
            )));
        }
        let mut regions = state.regions.clone();
        if let Some(region) = self.map_region(file, fields, &mut state.foreign)? {
            regions.push(region);
            self.set_regions(&mut state, regions)?;
        }
        Ok(None)
    }

    fn remove_mem_region(&self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let [guest_address, vmm_address, _, length] = region_fields(region);
        let mut state = self.state();
        let gone = [guest_address, vmm_address, length];
        if let Some(place) = state.foreign.iter().position(|own| *own == gone) {
            state.foreign.swap_remove(place);
            return Ok(());
        }
        let mut regions = state.regions.clone();
        let before = regions.len();
        regions.retain(|known| {
            let info = &known.info;
            (info.guest_address, info.vmm_address, info.length)
                != (guest_address, vmm_address, length)
        });
        if regions.len() == before {
            return Err(refuse(
                "a memory region that is not there was to be removed",
            ));
        }
        self.set_regions(&mut state, regions)
    }

    fn set_device_state_fd(
        &self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        Err(unsupported())
    }

    fn check_device_state(&self) -> Result<()> {
        Err(unsupported())
    }

    fn get_shmem_config(&self) -> Result<VhostUserShMemConfig> {
        Err(unsupported())
    }

    fn set_log_base(&self, log: &VhostUserLog, file: File) -> Result<()> {
        let VhostUserLog {
            mmap_size,
            mmap_offset,
        } = *log;
        let mut state = self.state();
        let State {
            features, queues, ..
        } = &mut *state;
        let log = &self.shared.log;
        log.replace(file, mmap_offset, mmap_size).map_err(refuse)?;
        for (index, queue) in (0..).zip(queues) {
            self.start_if_ready(index, queue, *features)?;
        }
        Ok(())
    }
}

/// Something that was not offered.
fn unsupported() -> Error {
    Error::InvalidOperation("not offered by this device")
}

/// Guest address, VMM address, file offset and length of a region.
fn region_fields(region: &VhostUserSingleMemoryRegion) -> [u64; 4] {
    [
        region.guest_phys_addr,
        region.user_addr,
        region.mmap_offset,
        region.memory_size,
    ]
}
