//! The vhost-user front end: what QEMU says to a backend, in its order.

use std::os::fd::AsRawFd;

use anyhow::{Context, Result, ensure};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};

use super::dirty_log::DirtyLog;
use super::disk::Rings;
use super::ram::{Block, Ram};

/// Queues that are used at most.
const MAX_QUEUES: u64 = 16;
const CONFIG_BYTES: u32 = 60;
/// `VHOST_F_LOG_ALL`.
const LOG_ALL: u64 = 1 << 26;
/// `VIRTIO_RING_F_EVENT_IDX`.
const EVENT_IDX: u64 = 1 << 29;

/// A connection to a backend.
pub(super) struct FrontEnd {
    front: Frontend,
    /// What the backend offers.
    pub features: u64,
    /// Its disk's configuration.
    pub config: Vec<u8>,
    /// Queues it can serve.
    pub queues: u64,
    /// What was acknowledged of it, but for logging.
    acknowledged: u64,
    /// Where the device marks what it writes.
    pub log: Option<DirtyLog>,
    has_memory_table: bool,
}

impl FrontEnd {
    /// Connects and asks what the backend is. Its first answer comes once it has everything it
    /// wants of this process: the main thread waits for it here.
    pub(super) fn connect(path: &str) -> Result<Self> {
        let mut front =
            Frontend::connect(path, MAX_QUEUES).with_context(|| format!("connecting to {path}"))?;
        let features = front.get_features().context("asking for its features")?;
        front.set_owner()?;
        let offered = front.get_protocol_features()?;
        let wanted = VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::LOG_SHMFD;
        front.set_protocol_features(offered & wanted)?;
        front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let queues = front.get_queue_num()?;
        let zeros = [0; CONFIG_BYTES as usize];
        let (_, config) =
            front.get_config(0, CONFIG_BYTES, VhostUserConfigFlags::empty(), &zeros)?;
        Ok(Self {
            front,
            features,
            config,
            queues,
            acknowledged: 0,
            log: None,
            has_memory_table: false,
        })
    }

    /// Starts a queue, at what was not answered yet; the first time with the whole memory table before
    /// it.
    pub(super) fn start(&mut self, ram: &Ram, rings: &Rings) -> Result<()> {
        let (queue, event_idx) = (rings.queue, rings.event_idx);
        if !self.has_memory_table {
            let unwanted = if event_idx { 0 } else { EVENT_IDX };
            self.acknowledged = self.features & !unwanted & !LOG_ALL;
            self.acknowledge()?;
            let table: Vec<_> = ram.blocks().iter().map(|block| region(block)).collect();
            self.front
                .set_mem_table(&table)
                .context("telling the memory table")?;
            self.has_memory_table = true;
        }
        self.front.set_vring_num(queue, rings.size)?;
        let base = rings.answered(ram)?;
        self.front.set_vring_base(queue, base)?;
        self.tell_rings(ram, rings)?;
        self.front.set_vring_kick(queue, &rings.kick)?;
        self.front.set_vring_call(queue, &rings.call)?;
        self.front.set_vring_err(queue, &rings.error)?;
        ensure!(
            self.features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0,
            "the backend offers no protocol features"
        );
        Ok(self.front.set_vring_enable(queue, true)?)
    }

    fn acknowledge(&self) -> Result<()> {
        let logging = if self.log.is_some() { LOG_ALL } else { 0 };
        self.front
            .set_features(self.acknowledged | logging)
            .context("acknowledging features")
    }

    /// Has the device's writes logged, or no longer; in QEMU's order, which tells each ring after it.
    pub(super) fn set_log(&mut self, log: Option<DirtyLog>) -> Result<()> {
        if let Some(log) = &log {
            let region = VhostUserDirtyLogRegion {
                mmap_size: log.bytes,
                mmap_offset: 0,
                mmap_handle: log.file.as_raw_fd(),
            };
            self.front
                .set_log_base(0, Some(region))
                .context("giving the log")?;
        }
        self.log = log;
        self.acknowledge()
    }

    /// Tells where a queue's rings lie, and that its used ring is logged while there is a log.
    pub(super) fn tell_rings(&mut self, ram: &Ram, rings: &Rings) -> Result<()> {
        let config = VringConfigData {
            queue_max_size: rings.size,
            queue_size: rings.size,
            flags: u32::from(self.log.is_some()),
            desc_table_addr: ram.vmm_address(rings.descriptors, 16)?,
            used_ring_addr: ram.vmm_address(rings.used, 4)?,
            avail_ring_addr: ram.vmm_address(rings.available, 4)?,
            log_addr: self.log.is_some().then_some(rings.used),
        };
        self.front
            .set_vring_addr(rings.queue, &config)
            .context("telling the ring's addresses")
    }

    /// Stops a queue; where its backend would go on.
    pub(super) fn stop(&mut self, queue: usize) -> Result<u32> {
        self.front.set_vring_enable(queue, false)?;
        Ok(self.front.get_vring_base(queue)?)
    }

    /// Tells of a block of RAM that was added.
    pub(super) fn plug(&mut self, block: &Block) -> Result<()> {
        if self.has_memory_table {
            self.front.add_mem_region(&region(block))?;
        }
        Ok(())
    }

    /// Tells that a block of RAM is about to go.
    pub(super) fn unplug(&mut self, block: &Block) -> Result<()> {
        if self.has_memory_table {
            self.front.remove_mem_region(&region(block))?;
        }
        Ok(())
    }
}

fn region(block: &Block) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: block.guest_address,
        memory_size: block.size,
        userspace_addr: block.vmm_address(),
        mmap_offset: 0,
        mmap_handle: block.file.as_raw_fd(),
    }
}
