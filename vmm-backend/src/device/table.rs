//! The front end's memory table: translation, and access to request buffers under pins.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use outram_wire::units::PageSize;

use super::chain::Segment;
use super::dirty_log::DirtyLog;
use super::guard::{Guard, GuardedMapping, Stray};
use super::memory::{GuestMemory, HostRange, TableRegion};
use super::request::{AccessError, Buffers};
use crate::interrupt::Interrupt;

/// A region with our own, guarded mapping of it.
pub(super) struct MappedRegion {
    /// As the front end told it.
    pub info: TableRegion,
    /// Its memfd.
    pub file: Arc<File>,
    /// Size of its pages.
    pub size: PageSize,
    mapping: GuardedMapping,
}

impl MappedRegion {
    /// Maps a region of pages of a size. Its borders must be whole pages that lie within the file
    /// (QEMU rounds them, where its pages are huge).
    pub(super) fn map(
        guard: &Guard,
        info: TableRegion,
        file: File,
        size: PageSize,
    ) -> io::Result<Self> {
        let end = info.file_offset.checked_add(info.length);
        let whole_pages = [
            info.file_offset,
            info.guest_address,
            info.vmm_address,
            info.length,
        ]
        .iter()
        .all(|value| value.is_multiple_of(size.bytes()));
        let wraps = info.guest_address.checked_add(info.length).is_none()
            || info.vmm_address.checked_add(info.length).is_none();
        let Some(end) = end.filter(|_| whole_pages && !wraps && info.length > 0) else {
            return Err(io::Error::other("its borders are no whole pages"));
        };
        if end > file.metadata()?.len() {
            return Err(io::Error::other("it is larger than its file"));
        }
        let file = Arc::new(file);
        let mapping = guard.map(&file, info.file_offset..end)?;
        Ok(Self {
            info,
            file,
            size,
            mapping,
        })
    }

    /// A part of the region as the pager addresses it.
    pub(super) fn host_range(&self, offset: u64, length: u64) -> HostRange {
        HostRange {
            memfd: self.info.memfd,
            file_offset: self.info.file_offset + offset,
            length,
        }
    }
}

/// A part of a region that lies in one piece.
struct Piece<'a> {
    region: &'a MappedRegion,
    offset: u64,
    length: u64,
}

impl Piece<'_> {
    fn pages(&self) -> usize {
        let page = self.region.size.bytes();
        (self.offset % page + self.length).div_ceil(page) as usize
    }
}

/// The whole table. Replaced as a whole when it changes.
#[derive(Default)]
pub(super) struct Table {
    regions: Vec<Arc<MappedRegion>>,
}

impl Table {
    /// A table of these regions, or why they make none.
    pub(super) fn new(mut regions: Vec<Arc<MappedRegion>>) -> Result<Self, String> {
        regions.sort_by_key(|region| region.info.guest_address);
        let overlap = regions.windows(2).any(|pair| {
            pair[0].info.guest_address + pair[0].info.length > pair[1].info.guest_address
        });
        if overlap {
            return Err("regions of the memory table overlap".into());
        }
        Ok(Self { regions })
    }

    /// Its regions by guest address.
    pub(super) fn regions(&self) -> &[Arc<MappedRegion>] {
        &self.regions
    }

    /// The region that holds a range of VMM addresses, and where in it.
    pub(super) fn by_vmm_address(
        &self,
        address: u64,
        length: u64,
    ) -> Option<(&Arc<MappedRegion>, u64)> {
        self.regions.iter().find_map(|region| {
            let offset = address.checked_sub(region.info.vmm_address)?;
            let end = offset.checked_add(length)?;
            (end <= region.info.length).then_some((region, offset))
        })
    }

    /// The first guest address behind all regions.
    pub(super) fn guest_end(&self) -> u64 {
        let ends = self.regions.iter();
        let ends = ends.map(|region| region.info.guest_address + region.info.length);
        ends.max().unwrap_or(0)
    }

    /// Whether a range of guest addresses lies in one region.
    pub(super) fn holds_guest_range(&self, address: u64, length: u64) -> bool {
        self.by_guest_address(address)
            .is_some_and(|(region, offset)| length <= region.info.length - offset)
    }

    /// The rest of the region that holds a guest address.
    fn by_guest_address(&self, address: u64) -> Option<(&MappedRegion, u64)> {
        let after = self
            .regions
            .partition_point(|region| region.info.guest_address <= address);
        let region = self.regions.get(after.checked_sub(1)?)?;
        let offset = address - region.info.guest_address;
        (offset < region.info.length).then_some((region.as_ref(), offset))
    }

    /// The pieces that `length` bytes of the segments from `skip` on lie in.
    fn pieces(
        &self,
        segments: &[Segment],
        mut skip: u64,
        mut length: u64,
    ) -> Result<Vec<Piece<'_>>, AccessError> {
        let mut pieces = Vec::new();
        for segment in segments {
            let segment_length = u64::from(segment.length);
            if skip >= segment_length {
                skip -= segment_length;
                continue;
            }
            let outside = || AccessError::OutsideTable {
                address: segment.address,
                length: segment_length,
            };
            let mut address = segment.address.checked_add(skip).ok_or_else(outside)?;
            let mut left = (segment_length - skip).min(length);
            skip = 0;
            while left > 0 {
                let (region, offset) = self.by_guest_address(address).ok_or_else(outside)?;
                let here = left.min(region.info.length - offset);
                pieces.push(Piece {
                    region,
                    offset,
                    length: here,
                });
                address = address.checked_add(here).ok_or_else(outside)?;
                left -= here;
                length -= here;
            }
            if length == 0 {
                return Ok(pieces);
            }
        }
        match length {
            0 => Ok(pieces),
            // The caller asked for more than the segments hold.
            length => Err(AccessError::OutsideTable { address: 0, length }),
        }
    }
}

/// Cuts pieces into groups of at most `most` pages each, in their order.
fn groups(pieces: Vec<Piece<'_>>, most: usize) -> Vec<Vec<Piece<'_>>> {
    let most = most.max(1);
    let mut groups: Vec<Vec<Piece<'_>>> = Vec::new();
    let mut room = 0;
    for mut piece in pieces {
        loop {
            if room == 0 {
                groups.push(Vec::new());
                room = most;
            }
            let page = piece.region.size.bytes();
            let fits = (room as u64 * page - piece.offset % page).min(piece.length);
            let part = Piece {
                region: piece.region,
                offset: piece.offset,
                length: fits,
            };
            room -= part.pages();
            if let Some(group) = groups.last_mut() {
                group.push(part);
            }
            piece.offset += fits;
            piece.length -= fits;
            if piece.length == 0 {
                break;
            }
        }
    }
    groups
}

/// Access to request buffers: translates, pins, copies, unpins; one pin at a time.
pub(super) struct PinnedBuffers<'a> {
    /// Held for reading while bytes are copied, so that a replaced table is no longer in use once the
    /// front end gets its answer; never while a server is waited for, a disk's or that of a page.
    pub table: &'a RwLock<Arc<Table>>,
    pub memory: &'a dyn GuestMemory,
    pub strays: &'a AtomicU64,
    pub log: &'a DirtyLog,
    pub interrupt: Interrupt<'a>,
}

impl PinnedBuffers<'_> {
    fn transfer(
        &self,
        segments: &[Segment],
        offset: u64,
        length: usize,
        write: bool,
        mut copy: impl FnMut(&MappedRegion, usize, std::ops::Range<usize>) -> Result<(), Stray>,
    ) -> Result<(), AccessError> {
        'anew: loop {
            let table = Arc::clone(&self.table());
            let pieces = table.pieces(segments, offset, length as u64)?;
            let mut done = 0;
            for group in groups(pieces, self.memory.max_pages_per_pin()) {
                let ranges: Vec<HostRange> = group
                    .iter()
                    .map(|piece| piece.region.host_range(piece.offset, piece.length))
                    .collect();
                let pinned = self.memory.pin(&ranges, write, &self.interrupt);
                let current = self.table();
                if !Arc::ptr_eq(&current, &table) {
                    // All of it once more: what was copied is the same.
                    continue 'anew;
                }
                let _pinned = pinned?;
                for piece in &group {
                    let end = done + piece.length as usize;
                    if copy(piece.region, piece.offset as usize, done..end).is_err() {
                        self.strays.fetch_add(1, Ordering::Relaxed);
                        return Err(AccessError::Stray);
                    }
                    done = end;
                }
            }
            return Ok(());
        }
    }

    fn table(&self) -> RwLockReadGuard<'_, Arc<Table>> {
        // Whoever panicked did not change the table: it is replaced as a whole.
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Buffers for PinnedBuffers<'_> {
    fn read(&self, segments: &[Segment], offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        self.transfer(segments, offset, into.len(), false, |region, at, bytes| {
            region.mapping.read(at, &mut into[bytes])
        })
    }

    fn write(&self, segments: &[Segment], offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.transfer(segments, offset, from.len(), true, |region, at, bytes| {
            let (address, length) = (region.info.guest_address + at as u64, bytes.len() as u64);
            let written = region.mapping.write(at, &from[bytes]);
            // A write that failed may have been carried out in part.
            self.log.mark(address, length);
            written
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::Mutex;
    use std::sync::mpsc::channel;

    use super::super::memory::{PinError, Pinned};
    use super::*;
    use crate::handover::MemfdId;

    const PAGE: u64 = PageSize::BASE.bytes();

    /// Everything is resident; pins are recorded.
    struct Resident {
        pins: Mutex<Vec<Vec<HostRange>>>,
        most: usize,
        /// What each pin waits for.
        wait: Box<dyn Fn() + Send + Sync>,
    }

    impl Resident {
        fn new(most: usize) -> Self {
            Self {
                pins: Mutex::default(),
                most,
                wait: Box::new(|| {}),
            }
        }
    }

    struct Nothing;
    impl Pinned for Nothing {}

    impl GuestMemory for Resident {
        fn pin(
            &self,
            ranges: &[HostRange],
            _write: bool,
            _interrupt: &Interrupt<'_>,
        ) -> Result<Box<dyn Pinned>, PinError> {
            (self.wait)();
            let mut pins = self.pins.lock().expect("not poisoned");
            pins.push(ranges.to_vec());
            Ok(Box::new(Nothing))
        }

        fn confirm(&self, _regions: &[TableRegion]) -> Result<(), PinError> {
            Ok(())
        }

        fn is_foreign(&self, _memfd: MemfdId) -> bool {
            false
        }

        fn page_size(&self) -> PageSize {
            PageSize::BASE
        }

        fn max_pages_per_pin(&self) -> usize {
            self.most
        }
    }

    /// Two regions of four pages that touch in guest addresses but are swapped in the file.
    fn table() -> (Table, File) {
        let file = tempfile::tempfile_in("/dev/shm").expect("a tmpfs");
        file.write_all_at(&[1; 8 * PAGE as usize], 0).expect("room");
        let guard = Guard::new().expect("userfaultfd");
        let memfd = MemfdId::of(&file).expect("open");
        let region = |guest_page: u64, file_page: u64| {
            let info = TableRegion {
                memfd,
                file_offset: file_page * PAGE,
                guest_address: guest_page * PAGE,
                vmm_address: 0x7000_0000 + file_page * PAGE,
                length: 4 * PAGE,
            };
            let file = file.try_clone().expect("descriptors");
            Arc::new(MappedRegion::map(&guard, info, file, PageSize::BASE).expect("mapped"))
        };
        let table = Table::new(vec![region(8, 0), region(4, 4)]).expect("no overlap");
        (table, file)
    }

    #[test]
    fn buffers_cross_regions_and_pins_stay_small() {
        let (table, file) = table();
        let memory = Resident::new(2);
        let strays = AtomicU64::new(0);
        let buffers = PinnedBuffers {
            table: &RwLock::new(Arc::new(table)),
            memory: &memory,
            strays: &strays,
            log: &DirtyLog::default(),
            interrupt: Interrupt::never(),
        };
        let start = 8 * PAGE - 100;
        let segments = [
            Segment {
                address: 4 * PAGE,
                length: 8,
            },
            Segment {
                address: start,
                length: 3 * PAGE as u32,
            },
        ];
        let data: Vec<u8> = (0..2 * PAGE).map(|byte| byte as u8).collect();
        buffers.write(&segments, 8, &data).expect("within");
        let mut back = vec![0; data.len()];
        buffers.read(&segments, 8, &mut back).expect("within");
        assert_eq!(back, data);
        let mut tail = [0; 100];
        file.read_exact_at(&mut tail, 8 * PAGE - 100)
            .expect("there");
        assert_eq!(tail, data[..100]);
        for ranges in memory.pins.lock().expect("not poisoned").iter() {
            let pages: u64 = ranges
                .iter()
                .map(|range| (range.file_offset % PAGE + range.length).div_ceil(PAGE))
                .sum();
            assert!((1..=2).contains(&pages), "{ranges:?}");
        }
    }

    #[test]
    fn a_table_is_replaced_while_a_page_is_waited_for() {
        let (former, _former_file) = table();
        let (next, next_file) = table();
        next_file
            .write_all_at(&[2; 8 * PAGE as usize], 0)
            .expect("room");
        let (asked, is_asked) = channel();
        let (comes, come) = channel();
        let come = Mutex::new(come);
        let memory = Resident {
            wait: Box::new(move || {
                let _ = asked.send(());
                // Once the test's end is closed, nobody waits.
                let _ = come.lock().expect("not poisoned").recv();
            }),
            ..Resident::new(1)
        };
        let current = RwLock::new(Arc::new(former));
        let (strays, log) = (AtomicU64::new(0), DirtyLog::default());
        let buffers = PinnedBuffers {
            table: &current,
            memory: &memory,
            strays: &strays,
            log: &log,
            interrupt: Interrupt::never(),
        };
        let segment = Segment {
            address: 4 * PAGE,
            length: 2 * PAGE as u32,
        };
        std::thread::scope(|scope| {
            let read = scope.spawn(|| {
                let mut bytes = vec![0; 2 * PAGE as usize];
                buffers.read(&[segment], 0, &mut bytes).expect("within");
                bytes
            });
            // The second page is on its way, and the first was copied.
            is_asked.recv().expect("the first page");
            comes.send(()).expect("it waits");
            is_asked.recv().expect("the second page");
            *current.try_write().expect("nobody holds it") = Arc::new(next);
            drop(comes);
            let bytes = read.join().expect("no panic");
            assert_eq!(bytes, vec![2; 2 * PAGE as usize]);
        });
    }

    #[test]
    fn what_is_outside_is_refused_before_any_pin() {
        let (table, _file) = table();
        let memory = Resident::new(16);
        let strays = AtomicU64::new(0);
        let buffers = PinnedBuffers {
            table: &RwLock::new(Arc::new(table)),
            memory: &memory,
            strays: &strays,
            log: &DirtyLog::default(),
            interrupt: Interrupt::never(),
        };
        for address in [0, 4 * PAGE - 1, 12 * PAGE - 10, 12 * PAGE, u64::MAX - 5] {
            let segments = [Segment {
                address,
                length: 20,
            }];
            assert!(
                buffers.write(&segments, 0, &[0; 20]).is_err(),
                "{address:#x}"
            );
        }
        assert!(memory.pins.lock().expect("not poisoned").is_empty());
    }
}
