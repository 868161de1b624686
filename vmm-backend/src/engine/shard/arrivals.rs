//! Pages that come from where they were stored.
//!
//! What somebody waits for is put in place at once. What was fetched ahead waits for those that came with it:
//! pages in a row are put in place by one call, which costs little more than half as much for each, and wakes a
//! guest that goes through them in order once for all of them rather than for each.

use super::*;
use crate::engine::SlotId;

/// Reads of one page before bytes that do not match their tag are believed to be wrong for good.
const FETCH_ATTEMPTS: u32 = 2;

/// Bytes that are put in place together, at most; pages as large are by themselves.
const ROW_BYTES: u64 = 64 << 10;

/// Takes answers to fetches that came together. Nothing else happens to the shard meanwhile; what has come is
/// in place once this is dropped.
pub struct Arrivals<'a, P: Ports>(&'a mut Shard<P>);

/// Pages one after the other that have come, and the bytes of all of them.
#[derive(Default)]
pub(super) struct Row {
    pages: Vec<Arrived>,
    bytes: Vec<u8>,
}

/// A page that has come, for which room is counted.
struct Arrived {
    page: PageIndex,
    /// Its entry while it was stored.
    entry: Entry,
    /// The slot that it is to keep; counted as kept.
    slot: Option<SlotId>,
    kind: FaultKind,
    pending: Pending,
}

impl<P: Ports> Arrivals<'_, P> {
    /// What the shard acts through.
    pub fn ports(&mut self) -> &mut P {
        self.0.ports()
    }

    /// A fetch ended. `bytes` is a whole page as it lay on the server; it is opened in place.
    pub fn on_fetched(
        &mut self,
        id: FetchId,
        page: PageIndex,
        bytes: Result<&mut [u8], FetchFailed>,
    ) {
        self.0.arrived(id, page, bytes);
    }
}

impl<P: Ports> Drop for Arrivals<'_, P> {
    fn drop(&mut self) {
        self.0.install_row();
    }
}

impl<P: Ports> Shard<P> {
    /// For answers that came together.
    pub fn arrivals(&mut self) -> Arrivals<'_, P> {
        Arrivals(self)
    }

    /// [`Arrivals::on_fetched`] of one answer by itself.
    pub fn on_fetched(
        &mut self,
        id: FetchId,
        page: PageIndex,
        bytes: Result<&mut [u8], FetchFailed>,
    ) {
        self.arrivals().on_fetched(id, page, bytes);
    }

    fn arrived(&mut self, id: FetchId, page: PageIndex, bytes: Result<&mut [u8], FetchFailed>) {
        let wait = self.pending.get(&page).map(|pending| pending.wait);
        let Some(Wait::Fetch {
            id: current,
            attempt,
        }) = wait
        else {
            return;
        };
        if current != id {
            return;
        }
        let Some(pending) = self.pending.remove(&page) else {
            return;
        };
        let entry = self.shared.table.load(page);
        let Ok(bytes) = bytes else {
            self.shared.budget.release(1);
            self.lose_stored(page, entry, Some(pending));
            return;
        };
        let key = &self.shared.key;
        if key.open(page, entry.generation, entry.tag, bytes).is_ok() {
            match self.moving.remove(&page) {
                Some(Some(ticket)) if pending.is_idle() => {
                    self.stage_moved(page, entry, bytes, ticket);
                }
                ticket => {
                    self.give_back(ticket.flatten());
                    self.install_or_gather(page, entry, bytes, pending);
                }
            }
            return;
        }
        self.shared.stats.refused_reads.count();
        if attempt + 1 < FETCH_ATTEMPTS {
            self.start_fetch(page, entry, attempt + 1, pending);
        } else {
            self.shared.stats.integrity_failures.count();
            self.shared.budget.release(1);
            self.lose_stored(page, entry, Some(pending));
        }
    }

    fn install_or_gather(&mut self, page: PageIndex, entry: Entry, bytes: &[u8], pending: Pending) {
        let most = self.shared.page_size.pages_in(ROW_BYTES, 1) as usize;
        // Protection is a matter of each page.
        if most == 1 || !pending.is_idle() || self.shared.pace.protects_reads() {
            return self.install_fetched(page, entry, bytes, FaultKind::Remote, pending);
        }
        let follows = self.row.pages.last().is_none_or(|last| {
            last.page.0 + 1 == page.0 && self.part_of(last.page) == self.part_of(page)
        });
        if !follows {
            self.install_row();
        }
        let slot = self.slot_to_keep(&entry);
        self.row.bytes.extend_from_slice(bytes);
        self.row.pages.push(Arrived {
            page,
            entry,
            slot,
            kind: FaultKind::Remote,
            pending,
        });
        if self.row.pages.len() == most {
            self.install_row();
        }
    }

    fn install_row(&mut self) {
        let mut row = std::mem::take(&mut self.row);
        let length = self.shared.page_size.length();
        let mut bytes = &row.bytes[..];
        let mut pages = row.pages.drain(..);
        while let Some(first) = pages.as_slice().first() {
            let run = PageRun {
                first: first.page,
                count: pages.len() as u32,
            };
            let (mut made, mut how) = self.ports.copy_row(run, bytes);
            if made == 0 && how == Install::Gone && run.count > 1 {
                // The row may reach into a mapping that is gone where its first page does not.
                how = self.ports.copy(run.first, &bytes[..length], false);
                made = u32::from(how == Install::Done);
            }
            crash_points::pass(Point::FetchCopied);
            // The first that was not made says why when it is tried by itself.
            let (how, ended) = match made {
                0 => (how, 1),
                made => (Install::Done, made as usize),
            };
            for arrived in pages.by_ref().take(ended) {
                let (page, later) = bytes.split_at(length);
                self.end_fetched(arrived, page, how, false);
                bytes = later;
            }
        }
        drop(pages);
        row.bytes.clear();
        self.row = row;
    }

    /// Puts one page in place.
    pub(super) fn install_fetched(
        &mut self,
        page: PageIndex,
        entry: Entry,
        bytes: &[u8],
        kind: FaultKind,
        pending: Pending,
    ) {
        let slot = self.slot_to_keep(&entry);
        let is_read = !pending.wants_write() && self.shared.pace.protects_reads();
        let protect = slot.is_some() && is_read;
        let how = self.ports.copy(page, bytes, protect);
        crash_points::pass(Point::FetchCopied);
        let arrived = Arrived {
            page,
            entry,
            slot,
            kind,
            pending,
        };
        self.end_fetched(arrived, bytes, how, protect);
    }

    /// A page's slot, if the page may keep it; counted as kept from now on.
    fn slot_to_keep(&self, entry: &Entry) -> Option<SlotId> {
        let slots = &self.shared.slots;
        entry
            .slot
            .filter(|slot| !slots.is_vacating(*slot) && slots.try_keep())
    }

    /// Ends the attempt to put a page in place.
    fn end_fetched(&mut self, arrived: Arrived, bytes: &[u8], how: Install, protect: bool) {
        let Arrived {
            page,
            entry,
            slot,
            kind,
            mut pending,
        } = arrived;
        let next = match slot {
            Some(_) => Entry {
                state: State::Resident,
                protected: protect,
                ..entry
            },
            None => entry.into_dirty_resident(),
        };
        let keeps = slot.is_some() && how == Install::Done;
        if slot.is_some() && !keeps {
            self.shared.slots.end_keep();
        }
        let unused = entry
            .slot
            .filter(|_| !keeps && matches!(how, Install::Done | Install::Exists));
        // Half of staging is for what leaves, or nothing does that they could all go on with.
        let staging = &self.shared.staging;
        if how == Install::PoolEmpty
            && staging.available() > staging.capacity() / 2
            && let Some(ticket) = self.staging_slot()
        {
            // Its bytes need not come over the wire again.
            self.stage_moved(page, entry, bytes, ticket);
            return self.wait_for_pool(page, pending);
        }
        if how == Install::Again {
            pending.fetched = Some((entry, bytes.into()));
        }
        let arrival = match kind {
            FaultKind::Staged | FaultKind::Compressed if !pending.is_idle() => Arrival::Refault,
            _ => Arrival::New,
        };
        self.end_install(page, how, next, arrival, kind, pending);
        crash_points::pass(Point::FetchMarked);
        self.free_slot(unused);
    }
}
