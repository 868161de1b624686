//! A virtqueue whose pages are pinned: from SET_VRING_ADDR to GET_VRING_BASE or the connection's
//! end.
//!
//! virtio-queue keeps the ring's indices. The memory it is given holds the ring's own pages and
//! nothing else, keyed by their addresses in the VMM; so whatever a guest writes there, no access
//! of it can leave them.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use outram_wire::units::PageSize;
use virtio_queue::desc::{self, split};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use super::chain::{self, Chain, ChainError, DescriptorTable, RawDescriptor};
use super::dirty_log::DirtyLog;
use super::guard::{Guard, RingMapping};
use super::memory::{GuestMemory, HostRange, PinError, Pinned};
use super::table::{MappedRegion, Table};
use crate::interrupt::Interrupt;

/// Largest queue offered; QEMU allows 1024 for this device.
pub(super) const MAX_QUEUE_SIZE: u16 = 1024;

/// Where a ring's three parts lie, in addresses of the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingAddresses {
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    /// Guest address that writes of the used ring are logged at, where the front end tells it.
    pub used_log: Option<u64>,
}

/// Why a ring cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum RingError {
    #[error("queue size {0} is no power of two up to {MAX_QUEUE_SIZE}")]
    Size(u32),
    #[error("the ring at {0:#x} is misaligned or outside the memory table")]
    Address(u64),
    #[error("the used ring is to be logged at {0:#x}, outside the memory table")]
    LogAddress(u64),
    #[error("the ring's pages cannot be pinned")]
    Pin(#[from] PinError),
    #[error("the ring's pages cannot be mapped")]
    Map(#[from] std::io::Error),
    #[error("the queue's rules are broken: {0}")]
    Rules(#[from] virtio_queue::Error),
    #[error("the queue's rules are broken: {0}")]
    Chain(#[from] ChainError),
    #[error("a pinned page of the ring was gone")]
    Stray,
}

/// A ring ready for use.
pub(super) struct Ring {
    queue: Queue,
    memory: GuestMemoryMmap,
    mappings: Vec<RingMapping>,
    /// Chains that were there when it was started, and were not taken yet.
    left_over: u16,
    /// Guest address and length of the used ring.
    used: (u64, u64),
    /// Dropped last: the pages stay while they are mapped.
    _pins: [Box<dyn Pinned>; 2],
}

impl Ring {
    /// Pins and maps a ring's pages.
    pub(super) fn open(
        guard: &Guard,
        table: &Table,
        pager: &dyn GuestMemory,
        size: u32,
        addresses: RingAddresses,
    ) -> Result<Self, RingError> {
        let mut queue = Queue::new(MAX_QUEUE_SIZE)?;
        let entries = u16::try_from(size).map_err(|_| RingError::Size(size))?;
        queue
            .try_set_size(entries)
            .map_err(|_| RingError::Size(size))?;
        let RingAddresses {
            descriptors,
            available,
            used,
            used_log,
        } = addresses;
        let misaligned = |address| move |_| RingError::Address(address);
        queue
            .try_set_desc_table_address(GuestAddress(descriptors))
            .map_err(misaligned(descriptors))?;
        queue
            .try_set_avail_ring_address(GuestAddress(available))
            .map_err(misaligned(available))?;
        queue
            .try_set_used_ring_address(GuestAddress(used))
            .map_err(misaligned(used))?;
        let size = u64::from(entries);
        // Sizes of the split ring's parts with EVENT_IDX (virtio 1.2, section 2.7).
        let read = [(descriptors, 16 * size), (available, 6 + 2 * size)];
        let written = [(used, 6 + 8 * size)];
        let used_at = guest_address_of(table, written[0], used_log)?;
        let pins = [
            pager.pin(&host_ranges(table, &read)?, false, &Interrupt::never())?,
            pager.pin(&host_ranges(table, &written)?, true, &Interrupt::never())?,
        ];
        let parts = [read[0], read[1], written[0]];
        let (memory, mappings) = map(guard, table, &parts, pager.page_size())?;
        queue.set_ready(true);
        let ring = Self {
            queue,
            memory,
            mappings,
            left_over: 0,
            used: (used_at, written[0].1),
            _pins: pins,
        };
        Ok(ring)
    }

    /// Sets where processing goes on, and whether notifications go by event index.
    pub(super) fn start_at(&mut self, base: u16, event_idx: bool) -> Result<(), RingError> {
        let used = self.queue.used_idx(&self.memory, Ordering::Acquire)?.0;
        let size = self.queue.size();
        self.queue.set_next_avail(go_on_at(base, used, size));
        self.queue.set_next_used(used);
        self.queue.set_event_idx(event_idx);
        let available = self.queue.avail_idx(&self.memory, Ordering::Acquire)?.0;
        self.left_over = available.wrapping_sub(self.queue.next_avail());
        self.checked(())
    }

    /// The next index to be taken: what GET_VRING_BASE answers.
    pub(super) fn next_available(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Whether the chain taken last was there already when the ring was started. To be asked once for each.
    pub(super) fn took_left_over(&mut self) -> bool {
        let left = self.left_over.checked_sub(1);
        self.left_over = left.unwrap_or(0);
        left.is_some()
    }

    /// Puts the chain taken last back, to be taken again.
    pub(super) fn give_back(&mut self) {
        self.queue
            .set_next_avail(self.queue.next_avail().wrapping_sub(1));
    }

    /// Takes the next chain, if there is one.
    pub(super) fn next(&mut self) -> Result<Option<(u16, Chain)>, RingError> {
        let head = self
            .queue
            .iter(&self.memory)?
            .next()
            .map(|chain| chain.head_index());
        let Some(head) = self.checked(head)? else {
            return Ok(None);
        };
        let chain = chain::walk(self, head);
        // A stray access explains whatever the walk found.
        let chain = self.checked(chain)??;
        Ok(Some((head, chain)))
    }

    /// Gives a chain back to the driver; whether it wants to be notified.
    pub(super) fn complete(
        &mut self,
        head: u16,
        written: u32,
        log: &DirtyLog,
    ) -> Result<bool, RingError> {
        let added = self.queue.add_used(&self.memory, head, written);
        self.mark_used(log);
        added?;
        let notify = self.queue.needs_notification(&self.memory)?;
        self.checked(notify)
    }

    /// Asks the driver for notifications; whether there is more to take already.
    pub(super) fn wait_for_more(&mut self, log: &DirtyLog) -> Result<bool, RingError> {
        let more = self.queue.enable_notification(&self.memory);
        self.mark_used(log);
        self.checked(more?)
    }

    /// Tells the driver that notifications are not needed for now.
    pub(super) fn poll(&mut self, log: &DirtyLog) -> Result<(), RingError> {
        let told = self.queue.disable_notification(&self.memory);
        self.mark_used(log);
        told?;
        self.checked(())
    }

    /// Notes the used ring as written, all of it: its index, event index and flags lie at both ends.
    fn mark_used(&self, log: &DirtyLog) {
        let (address, length) = self.used;
        log.mark(address, length);
    }

    /// The value, unless a page of the ring was missing meanwhile.
    fn checked<T>(&self, value: T) -> Result<T, RingError> {
        if self.mappings.iter().any(RingMapping::has_strayed) {
            Err(RingError::Stray)
        } else {
            Ok(value)
        }
    }
}

impl DescriptorTable for Ring {
    fn size(&self) -> u16 {
        self.queue.size()
    }

    fn descriptor(&self, index: u16) -> Option<RawDescriptor> {
        let address = self.queue.desc_table().checked_add(16 * u64::from(index))?;
        let raw: desc::RawDescriptor = self.memory.read_obj(GuestAddress(address)).ok()?;
        let descriptor = split::Descriptor::from(raw);
        Some(RawDescriptor {
            address: descriptor.addr().0,
            length: descriptor.len(),
            flags: descriptor.flags(),
            next: descriptor.next(),
        })
    }
}

/// The first request to be served, by the front end's word and the used ring's. After a lost
/// connection, a front end takes the used index for its base, and may have read it just before the
/// last request was completed: that one is not to be completed twice.
fn go_on_at(base: u16, used: u16, size: u16) -> u16 {
    let completed_since = used.wrapping_sub(base);
    if completed_since <= size { used } else { base }
}

/// The region of a part and its first and last page there.
fn pages_of(
    table: &Table,
    (address, length): (u64, u64),
) -> Result<(&Arc<MappedRegion>, Range<u64>), RingError> {
    let (region, offset) = table
        .by_vmm_address(address, length)
        .ok_or(RingError::Address(address))?;
    let page = region.size.bytes();
    Ok((region, offset / page..(offset + length).div_ceil(page)))
}

/// The guest address of a part that the VMM gave its own address of: the one to log at, if told.
fn guest_address_of(
    table: &Table,
    part: (u64, u64),
    logged_at: Option<u64>,
) -> Result<u64, RingError> {
    let (address, length) = part;
    let (region, offset) = table
        .by_vmm_address(address, length)
        .ok_or(RingError::Address(address))?;
    match logged_at {
        Some(logged_at) if table.holds_guest_range(logged_at, length) => Ok(logged_at),
        Some(logged_at) => Err(RingError::LogAddress(logged_at)),
        None => Ok(region.info.guest_address + offset),
    }
}

/// The whole pages of these parts, as the pager addresses them.
fn host_ranges(table: &Table, parts: &[(u64, u64)]) -> Result<Vec<HostRange>, RingError> {
    parts
        .iter()
        .map(|&part| {
            let (region, pages) = pages_of(table, part)?;
            let page = region.size.bytes();
            let length = (pages.end - pages.start) * page;
            Ok(region.host_range(pages.start * page, length))
        })
        .collect()
}

/// Maps the pages of all parts, each page once.
fn map(
    guard: &Guard,
    table: &Table,
    parts: &[(u64, u64)],
    size: PageSize,
) -> Result<(GuestMemoryMmap, Vec<RingMapping>), RingError> {
    let page_bytes = size.bytes();
    // Parts may share pages: as VMM addresses of pages, sorted and without doubles.
    let mut pages = BTreeSet::new();
    for &part in parts {
        let (region, range) = pages_of(table, part)?;
        pages.extend(range.map(|page| region.info.vmm_address + page * page_bytes));
    }
    let mut mappings = Vec::new();
    let mut regions = Vec::new();
    for run in runs(pages.into_iter().collect(), page_bytes) {
        let length = run.end - run.start;
        // A run may cross regions that touch in the VMM; each page lies in one.
        let mut address = run.start;
        while address < run.end {
            let (region, offset) = table
                .by_vmm_address(address, page_bytes)
                .ok_or(RingError::Address(address))?;
            let here = (run.end - address)
                .min(region.info.length - offset)
                .min(length);
            let start = region.info.file_offset + offset;
            let mapping = guard.map_ring(&region.file, start..start + here, size)?;
            let region = GuestRegionMmap::with_arc(mapping.region(), GuestAddress(address));
            regions.push(region.ok_or(RingError::Address(address))?);
            mappings.push(mapping);
            address += here;
        }
    }
    let memory = GuestMemoryMmap::from_regions(regions).map_err(std::io::Error::other)?;
    Ok((memory, mappings))
}

/// Neighbouring pages as ranges of addresses.
fn runs(pages: Vec<u64>, page_bytes: u64) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for page in pages {
        match runs.last_mut() {
            Some(run) if run.end == page => run.end += page_bytes,
            _ => runs.push(page..page + page_bytes),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_completed_after_the_front_end_looked_is_not_served_again() {
        assert_eq!(go_on_at(7, 7, 128), 7);
        assert_eq!(go_on_at(7, 8, 128), 8);
        assert_eq!(go_on_at(u16::MAX, 0, 128), 0);
        // What the front end says was taken already is not taken again.
        assert_eq!(go_on_at(8, 7, 128), 8);
        assert_eq!(go_on_at(7, 7 + 129, 128), 7, "no ring is so long");
    }

    #[test]
    fn neighbouring_pages_make_a_run() {
        for page in [PageSize::BASE.bytes(), PageSize::HUGE.bytes()] {
            assert_eq!(
                runs(vec![page, 2 * page, 5 * page], page),
                [page..3 * page, 5 * page..6 * page]
            );
        }
    }
}
