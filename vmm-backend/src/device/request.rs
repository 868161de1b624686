//! virtio-blk requests: what a chain asks for, and its answer.
//!
//! Framing is the driver's choice (virtio 1.0): the header is the first 16 readable bytes, the
//! status the last writable byte, however they are cut into descriptors.

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use super::chain::{Chain, Segment, total};
use super::disk::{Disk, SECTOR_BYTES};
use super::memory::PinError;
use crate::interrupt::Interrupt;

/// Bytes of a request's header.
const HEADER_BYTES: usize = 16;
/// Largest request, data and all: bounds memory and pins. Drivers keep it by keeping the largest
/// number and size of segments that the configuration tells.
pub(super) const MAX_REQUEST_BYTES: u64 = 1 << 20;

/// Bytes of a segment of a discard or write-zeroes.
const SEGMENT_BYTES: usize = 16;
/// Most such segments in a request.
pub(super) const MAX_CLEARED_SEGMENTS: u32 = 16;
/// Most sectors of such a segment: 1 GiB, whose clearing keeps a queue for moments only.
pub(super) const MAX_CLEARED_SECTORS: u32 = 1 << 21;

/// Access to a request's buffers, in guest-physical segments.
pub(super) trait Buffers {
    /// Reads from `offset` of the segments' bytes on.
    fn read(&self, segments: &[Segment], offset: u64, into: &mut [u8]) -> Result<(), AccessError>;
    /// Writes from `offset` of the segments' bytes on.
    fn write(&self, segments: &[Segment], offset: u64, from: &[u8]) -> Result<(), AccessError>;
}

/// Why a buffer could not be accessed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum AccessError {
    /// Not guest RAM.
    #[error("guest address {address:#x} with {length} bytes is outside the memory table")]
    OutsideTable {
        /// First address.
        address: u64,
        /// Bytes.
        length: u64,
    },
    /// The pages were refused.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// A pinned page was not there.
    #[error("a pinned page was gone")]
    Stray,
}

/// A request's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Completion {
    /// Bytes written into the chain, for the used ring.
    pub written: u32,
    /// Whether it was carried out.
    pub succeeded: bool,
}

/// Carries a request out, its status byte included; nothing where it was interrupted, to be made
/// again.
pub(super) fn execute(
    chain: &Chain,
    disk: &Disk,
    buffers: &impl Buffers,
    interrupt: &Interrupt<'_>,
) -> Option<Completion> {
    let writable = total(&chain.writable);
    let Some(room) = writable.checked_sub(1) else {
        // Not even a status byte: there is no way to tell the driver but an empty completion.
        return Some(Completion {
            written: 0,
            succeeded: false,
        });
    };
    let answered = answer(chain, room, disk, buffers, interrupt);
    let told = answered.and_then(|data| Ok(tell(chain, room, data, buffers)?));
    let status = match told {
        Ok(written) => {
            return Some(Completion {
                written,
                succeeded: true,
            });
        }
        Err(Failure::Unsupported) => VIRTIO_BLK_S_UNSUPP,
        Err(Failure::Error) => VIRTIO_BLK_S_IOERR,
        Err(Failure::Interrupted) => return None,
    };
    let told = buffers.write(&chain.writable, room, &[status as u8]);
    if let Err(AccessError::Pin(PinError::Interrupted)) = told {
        return None;
    }
    Some(Completion {
        written: u32::from(told.is_ok()),
        succeeded: false,
    })
}

/// Tells that a request succeeded, and what it read; bytes written.
fn tell(
    chain: &Chain,
    room: u64,
    mut data: Vec<u8>,
    buffers: &impl Buffers,
) -> Result<u32, AccessError> {
    let status = [VIRTIO_BLK_S_OK as u8];
    // Bounded by MAX_REQUEST_BYTES.
    let written = data.len() as u32 + 1;
    if data.len() as u64 == room {
        // With one pin, which takes longer than to copy the bytes.
        data.extend_from_slice(&status);
        buffers.write(&chain.writable, 0, &data)?;
        return Ok(written);
    }
    if !data.is_empty() {
        buffers.write(&chain.writable, 0, &data)?;
    }
    buffers.write(&chain.writable, room, &status)?;
    Ok(written)
}

/// Why a request gets no answer but its status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    Error,
    Unsupported,
    /// Its queue is to stop: it gets no status either.
    Interrupted,
}

impl From<AccessError> for Failure {
    fn from(error: AccessError) -> Self {
        if let AccessError::Pin(PinError::Interrupted) = error {
            return Failure::Interrupted;
        }
        tracing::debug!(%error, "disk request failed");
        Failure::Error
    }
}

/// Carries a request out; what is to be written into the chain before its status.
fn answer(
    chain: &Chain,
    room: u64,
    disk: &Disk,
    buffers: &impl Buffers,
    interrupt: &Interrupt<'_>,
) -> Result<Vec<u8>, Failure> {
    let readable = total(&chain.readable);
    let size = readable.saturating_add(room);
    if chain.defect.is_some()
        || readable < HEADER_BYTES as u64
        || size > MAX_REQUEST_BYTES + HEADER_BYTES as u64
    {
        return Err(Failure::Error);
    }
    // With what the driver sends behind the header: one pin for both.
    let mut bytes = vec![0; readable as usize];
    buffers.read(&chain.readable, 0, &mut bytes)?;
    let (header, sent) = bytes
        .split_first_chunk::<HEADER_BYTES>()
        .ok_or(Failure::Error)?;
    let [k0, k1, k2, k3, _, _, _, _, sector @ ..] = *header;
    let sector = u64::from_le_bytes(sector);
    Ok(match u32::from_le_bytes([k0, k1, k2, k3]) {
        VIRTIO_BLK_T_IN if room.is_multiple_of(SECTOR_BYTES) => {
            disk.read(sector, room, interrupt)?
        }
        VIRTIO_BLK_T_OUT if (sent.len() as u64).is_multiple_of(SECTOR_BYTES) => {
            disk.write(sector, sent, interrupt)?;
            Vec::new()
        }
        VIRTIO_BLK_T_IN | VIRTIO_BLK_T_OUT => return Err(Failure::Error),
        kind @ (VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES) if disk.is_writable() => {
            for (sector, sectors) in cleared(kind, sent)? {
                disk.clear(sector, sectors, interrupt)?;
            }
            Vec::new()
        }
        VIRTIO_BLK_T_GET_ID => {
            let serial = disk.serial();
            serial[..serial.len().min(room as usize)].to_vec()
        }
        // Every write is on its servers before it is answered: there is nothing left to flush.
        VIRTIO_BLK_T_FLUSH => Vec::new(),
        _ => return Err(Failure::Unsupported),
    })
}

/// The sectors that a discard or write-zeroes names (virtio 1.2, section 5.2.6): all of them are
/// checked before any is touched.
fn cleared(kind: u32, segments: &[u8]) -> Result<Vec<(u64, u32)>, Failure> {
    let (segments, rest) = segments.as_chunks::<SEGMENT_BYTES>();
    let count = segments.len() as u32;
    if !rest.is_empty() || count == 0 || count > MAX_CLEARED_SEGMENTS {
        return Err(Failure::Error);
    }
    segments
        .iter()
        .map(|segment| {
            let [
                s0,
                s1,
                s2,
                s3,
                s4,
                s5,
                s6,
                s7,
                n0,
                n1,
                n2,
                n3,
                f0,
                f1,
                f2,
                f3,
            ] = *segment;
            let flags = u32::from_le_bytes([f0, f1, f2, f3]);
            // Room is given back with or without it; of a discard it must not be asked.
            let known = match kind {
                VIRTIO_BLK_T_WRITE_ZEROES => VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
                _ => 0,
            };
            if flags & !known != 0 {
                return Err(Failure::Unsupported);
            }
            let sectors = u32::from_le_bytes([n0, n1, n2, n3]);
            if sectors > MAX_CLEARED_SECTORS {
                return Err(Failure::Error);
            }
            let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
            Ok((sector, sectors))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use proptest::prelude::*;

    use super::super::chain::BufferDefect;
    use super::*;
    use crate::far_disk::tests::{self as far_disk, World};

    /// 64 KiB of guest memory from address 0.
    struct Memory(RefCell<Vec<u8>>);

    impl Memory {
        fn bytes_of(&self, segments: &[Segment], offset: u64) -> Result<Vec<usize>, AccessError> {
            let mut bytes = Vec::new();
            for segment in segments {
                let length = u64::from(segment.length);
                let end = segment.address.checked_add(length);
                if end.is_none_or(|end| end > 1 << 16) {
                    return Err(AccessError::OutsideTable {
                        address: segment.address,
                        length,
                    });
                }
                bytes.extend((segment.address..segment.address + length).map(|at| at as usize));
            }
            Ok(bytes.split_off(offset as usize))
        }
    }

    impl Buffers for Memory {
        fn read(
            &self,
            segments: &[Segment],
            offset: u64,
            into: &mut [u8],
        ) -> Result<(), AccessError> {
            let places = self.bytes_of(segments, offset)?;
            for (byte, place) in into.iter_mut().zip(places) {
                *byte = self.0.borrow()[place];
            }
            Ok(())
        }

        fn write(&self, segments: &[Segment], offset: u64, from: &[u8]) -> Result<(), AccessError> {
            let places = self.bytes_of(segments, offset)?;
            for (byte, place) in from.iter().zip(places) {
                self.0.borrow_mut()[place] = *byte;
            }
            Ok(())
        }
    }

    fn disk() -> Disk {
        let vm = "123e4567-e89b-12d3-a456-426614174000".parse();
        Disk::new(vm.expect("a UUID"), None)
    }

    fn segment(address: u64, length: u32) -> Segment {
        Segment { address, length }
    }

    /// A request with its header at 0, data at 4096 and status at 8192.
    fn run(kind: u32, sector: u64, data: u32) -> (Completion, Vec<u8>, u8) {
        let memory = Memory(RefCell::new(vec![0xee; 1 << 16]));
        memory.0.borrow_mut()[..4].copy_from_slice(&kind.to_le_bytes());
        memory.0.borrow_mut()[8..16].copy_from_slice(&sector.to_le_bytes());
        let mut writable = vec![segment(8192, 1)];
        if data > 0 {
            writable.insert(0, segment(4096, data));
        }
        let chain = Chain {
            // Cut amid the header, as a driver may.
            readable: vec![segment(0, 5), segment(5, 11)],
            writable,
            defect: None,
        };
        let completion = execute(&chain, &disk(), &memory, &Interrupt::never());
        let completion = completion.expect("not interrupted");
        let bytes = memory.0.into_inner();
        let status = bytes[8192];
        (
            completion,
            bytes[4096..4096 + data as usize].to_vec(),
            status,
        )
    }

    #[test]
    fn reads_within_the_disk_succeed() {
        let (completion, data, status) = run(VIRTIO_BLK_T_IN, 0, 1024);
        assert!(completion.succeeded);
        assert_eq!((completion.written, status), (1025, 0));
        assert!(data.starts_with(b"This disk"));
    }

    #[test]
    fn everything_else_gets_its_error() {
        for (kind, sector, data, expected) in [
            (VIRTIO_BLK_T_IN, 2048, 512, VIRTIO_BLK_S_IOERR),
            (VIRTIO_BLK_T_IN, u64::MAX, 512, VIRTIO_BLK_S_IOERR),
            (VIRTIO_BLK_T_IN, 0, 511, VIRTIO_BLK_S_IOERR),
            (VIRTIO_BLK_T_OUT, 0, 0, VIRTIO_BLK_S_IOERR),
            (VIRTIO_BLK_T_FLUSH, 0, 0, VIRTIO_BLK_S_OK),
            (11, 0, 0, VIRTIO_BLK_S_UNSUPP),
            (u32::MAX, 0, 0, VIRTIO_BLK_S_UNSUPP),
        ] {
            let (completion, _, status) = run(kind, sector, data);
            assert_eq!(u32::from(status), expected, "type {kind} sector {sector}");
            assert_eq!(completion.written, 1);
        }
    }

    #[test]
    fn the_serial_is_told() {
        let (completion, data, status) = run(VIRTIO_BLK_T_GET_ID, 0, 20);
        assert_eq!((completion.written, status), (21, 0));
        assert_eq!(data, b"outram-123e4567\0\0\0\0\0");
    }

    #[test]
    fn a_defect_is_an_error_with_status() {
        let memory = Memory(RefCell::new(vec![0; 1 << 16]));
        let chain = Chain {
            readable: vec![segment(0, 16)],
            writable: vec![segment(4096, 513)],
            defect: Some(BufferDefect::Empty),
        };
        let completion = execute(&chain, &disk(), &memory, &Interrupt::never());
        let completion = completion.expect("not interrupted");
        assert_eq!(completion.written, 1);
        assert_eq!(memory.0.borrow()[4096 + 512], VIRTIO_BLK_S_IOERR as u8);
    }

    fn far(world: &World) -> Disk {
        let vm = "123e4567-e89b-12d3-a456-426614174000".parse();
        let far = std::sync::Arc::new(world.create());
        Disk::new(vm.expect("a UUID"), Some(far))
    }

    /// A request to a far-memory disk, with `sent` behind its header: its status and what it read.
    fn run_far(disk: &Disk, kind: u32, sector: u64, sent: &[u8], room: u32) -> (u32, Vec<u8>) {
        let memory = Memory(RefCell::new(vec![0xee; 1 << 16]));
        {
            let mut bytes = memory.0.borrow_mut();
            bytes[..4].copy_from_slice(&kind.to_le_bytes());
            bytes[8..16].copy_from_slice(&sector.to_le_bytes());
            bytes[16..16 + sent.len()].copy_from_slice(sent);
        }
        let mut writable = vec![segment(60_000, 1)];
        if room > 0 {
            writable.insert(0, segment(32_768, room));
        }
        let chain = Chain {
            readable: vec![segment(0, 16 + sent.len() as u32)],
            writable,
            defect: None,
        };
        let completion = execute(&chain, disk, &memory, &Interrupt::never());
        let completion = completion.expect("not interrupted");
        let bytes = memory.0.into_inner();
        let status = u32::from(bytes[60_000]);
        assert_eq!(completion.succeeded, status == VIRTIO_BLK_S_OK);
        (status, bytes[32_768..32_768 + room as usize].to_vec())
    }

    /// Memory that counts how often it is read and written, and takes no more than so many bytes at once.
    struct Probe {
        memory: Memory,
        accesses: RefCell<[u32; 2]>,
        most: usize,
    }

    impl Probe {
        fn new(byte: u8, most: usize) -> Self {
            Self {
                memory: Memory(RefCell::new(vec![byte; 1 << 16])),
                accesses: RefCell::default(),
                most,
            }
        }
    }

    impl Buffers for Probe {
        fn read(
            &self,
            segments: &[Segment],
            offset: u64,
            into: &mut [u8],
        ) -> Result<(), AccessError> {
            self.accesses.borrow_mut()[0] += 1;
            self.memory.read(segments, offset, into)
        }

        fn write(&self, segments: &[Segment], offset: u64, from: &[u8]) -> Result<(), AccessError> {
            self.accesses.borrow_mut()[1] += 1;
            match from.len() > self.most {
                true => Err(AccessError::Stray),
                false => self.memory.write(segments, offset, from),
            }
        }
    }

    #[test]
    fn a_request_is_read_once_and_answered_once() {
        let world = World::new(&[1 << 20]);
        let disk = far(&world);
        let memory = Probe::new(1, usize::MAX);
        for (kind, sent, room) in [(VIRTIO_BLK_T_OUT, 512, 0), (VIRTIO_BLK_T_IN, 0, 512)] {
            let mut header = kind.to_le_bytes().to_vec();
            header.resize(HEADER_BYTES, 0);
            memory.memory.0.borrow_mut()[..HEADER_BYTES].copy_from_slice(&header);
            let chain = Chain {
                readable: vec![segment(0, 16 + sent)],
                writable: vec![segment(4096, room + 1)],
                defect: None,
            };
            let completion = execute(&chain, &disk, &memory, &Interrupt::never());
            assert!(completion.expect("not interrupted").succeeded);
            assert_eq!(memory.accesses.take(), [1, 1], "type {kind}");
        }
        assert_eq!(memory.memory.0.borrow()[4096..4608], [1; 512]);
    }

    #[test]
    fn what_cannot_be_written_is_an_error_with_status() {
        let chain = Chain {
            readable: vec![segment(0, 16)],
            writable: vec![segment(4096, 513)],
            defect: None,
        };
        // The memory takes the status alone.
        let memory = Probe::new(0, 1);
        let completion = execute(&chain, &disk(), &memory, &Interrupt::never());
        let completion = completion.expect("not interrupted");
        assert_eq!((completion.written, completion.succeeded), (1, false));
        assert_eq!(memory.memory.0.borrow()[4608], VIRTIO_BLK_S_IOERR as u8);
    }

    fn cleared_segment(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
        let mut bytes = sector.to_le_bytes().to_vec();
        bytes.extend_from_slice(&sectors.to_le_bytes());
        bytes.extend_from_slice(&flags.to_le_bytes());
        bytes
    }

    #[test]
    fn a_far_memory_disk_reads_writes_and_clears() {
        const OK: u32 = VIRTIO_BLK_S_OK;
        let world = World::new(&[1 << 20]);
        let disk = far(&world);
        assert!(disk.is_writable());
        assert_eq!(disk.sectors(), far_disk::SIZE / 512);
        assert_eq!(
            run_far(&disk, VIRTIO_BLK_T_IN, 7, &[], 512),
            (OK, vec![0; 512])
        );
        let bytes: Vec<u8> = (0..9 * 512).map(|at| (at % 251) as u8 + 1).collect();
        assert_eq!(run_far(&disk, VIRTIO_BLK_T_OUT, 7, &bytes, 0).0, OK);
        assert_eq!(run_far(&disk, VIRTIO_BLK_T_FLUSH, 0, &[], 0).0, OK);
        let read = |sector, count: u32| run_far(&disk, VIRTIO_BLK_T_IN, sector, &[], count * 512);
        assert_eq!(read(7, 9), (OK, bytes.clone()));
        let unmap = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
        for (flags, sector) in [(0, 8), (unmap, 10)] {
            let zeros = cleared_segment(sector, 1, flags);
            assert_eq!(
                run_far(&disk, VIRTIO_BLK_T_WRITE_ZEROES, 0, &zeros, 0).0,
                OK
            );
            assert_eq!(read(sector, 1), (OK, vec![0; 512]));
            assert_eq!(
                read(sector + 1, 1).1,
                bytes[(sector as usize - 6) * 512..][..512]
            );
        }
        let two = [cleared_segment(0, 8, 0), cleared_segment(8, 8, 0)].concat();
        assert_eq!(run_far(&disk, VIRTIO_BLK_T_DISCARD, 0, &two, 0).0, OK);
        assert_eq!(read(7, 9), (OK, vec![0; 9 * 512]));
        world.eventually("its room is given back", || {
            world.servers[0].stats().disks[0].slabs == 0
        });
    }

    #[test]
    fn requests_that_a_far_memory_disk_cannot_carry_out_change_nothing() {
        const ERROR: u32 = VIRTIO_BLK_S_IOERR;
        const UNSUPPORTED: u32 = VIRTIO_BLK_S_UNSUPP;
        let world = World::new(&[1 << 20]);
        let disk = far(&world);
        let last = disk.sectors() - 1;
        let mark = [7; 512];
        assert_eq!(run_far(&disk, VIRTIO_BLK_T_OUT, last, &mark, 0).0, 0);
        let good = cleared_segment(last, 1, 0);
        let many = good.repeat(MAX_CLEARED_SEGMENTS as usize + 1);
        for (kind, sent, expected) in [
            (VIRTIO_BLK_T_OUT, vec![0; 1024], ERROR),
            (VIRTIO_BLK_T_OUT, vec![0; 100], ERROR),
            (VIRTIO_BLK_T_DISCARD, Vec::new(), ERROR),
            (VIRTIO_BLK_T_DISCARD, good[..15].to_vec(), ERROR),
            (VIRTIO_BLK_T_DISCARD, many, ERROR),
            (
                VIRTIO_BLK_T_DISCARD,
                cleared_segment(last, 1, 1),
                UNSUPPORTED,
            ),
            (
                VIRTIO_BLK_T_WRITE_ZEROES,
                cleared_segment(last, 1, 2),
                UNSUPPORTED,
            ),
            (
                VIRTIO_BLK_T_WRITE_ZEROES,
                cleared_segment(last, 2, 0),
                ERROR,
            ),
            (
                VIRTIO_BLK_T_WRITE_ZEROES,
                cleared_segment(u64::MAX, 1, 0),
                ERROR,
            ),
            (VIRTIO_BLK_T_DISCARD, cleared_segment(0, u32::MAX, 0), ERROR),
            // The second of two is bad: the first is not begun.
            (
                VIRTIO_BLK_T_DISCARD,
                [good.clone(), cleared_segment(0, 1, 4)].concat(),
                UNSUPPORTED,
            ),
        ] {
            let (status, _) = run_far(&disk, kind, last, &sent, 0);
            assert_eq!(status, expected, "type {kind}, {} bytes", sent.len());
        }
        let (status, bytes) = run_far(&disk, VIRTIO_BLK_T_IN, last, &[], 512);
        assert_eq!((status, bytes), (0, mark.to_vec()));
    }

    #[test]
    fn an_interrupted_request_has_no_status_and_can_be_made_again() {
        let world = World::new(&[1 << 20]);
        let disk = far(&world);
        assert_eq!(run_far(&disk, VIRTIO_BLK_T_OUT, 0, &[7; 512], 0).0, 0);
        world.gates[0].shut(true);
        let memory = Memory(RefCell::new(vec![0; 1 << 16]));
        let chain = Chain {
            readable: vec![segment(0, 16)],
            writable: vec![segment(4096, 513)],
            defect: None,
        };
        let wanted = std::sync::atomic::AtomicBool::new(true);
        let completion = execute(&chain, &disk, &memory, &Interrupt::by(&wanted));
        assert_eq!(completion, None);
        assert_eq!(memory.0.borrow()[4096..4609], [0; 513]);
        world.gates[0].shut(false);
        let completion = execute(&chain, &disk, &memory, &Interrupt::never());
        assert!(completion.expect("not interrupted").succeeded);
        assert_eq!(memory.0.borrow()[4096..4608], [7; 512]);
    }

    proptest! {
        #[test]
        fn no_request_panics_or_reports_more_than_it_was_given(
            readable in proptest::collection::vec((0u64..70_000, 1u32..3000), 0..6),
            writable in proptest::collection::vec((0u64..70_000, 1u32..3000), 0..6),
            bytes in proptest::collection::vec(0u8..12, 64),
        ) {
            let segments = |list: &[(u64, u32)]| -> Vec<Segment> {
                list.iter().map(|&(address, length)| segment(address, length)).collect()
            };
            let memory = Memory(RefCell::new(bytes.repeat(1024)));
            let chain = Chain {
                readable: segments(&readable),
                writable: segments(&writable),
                defect: None,
            };
            let completion = execute(&chain, &disk(), &memory, &Interrupt::never());
            let completion = completion.expect("not interrupted");
            prop_assert!(u64::from(completion.written) <= total(&chain.writable));
        }
    }
}
