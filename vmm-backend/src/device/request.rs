//! virtio-blk requests: what a chain asks for, and its answer.
//!
//! Framing is the driver's choice (virtio 1.0): the header is the first 16 readable bytes, the
//! status the last writable byte, however they are cut into descriptors.

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};

use super::chain::{Chain, Segment, total};
use super::disk::{Disk, SECTOR_BYTES};
use super::memory::PinError;

/// Bytes of a request's header.
const HEADER_BYTES: usize = 16;
/// Largest request, data and all: bounds memory and pins. Drivers keep it by keeping the largest
/// number and size of segments that the configuration tells.
pub(super) const MAX_REQUEST_BYTES: u64 = 1 << 20;

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

/// Carries a request out, its status byte included.
pub(super) fn execute(chain: &Chain, disk: &Disk, buffers: &impl Buffers) -> Completion {
    let writable = total(&chain.writable);
    let Some(room) = writable.checked_sub(1) else {
        // Not even a status byte: there is no way to tell the driver but an empty completion.
        return Completion {
            written: 0,
            succeeded: false,
        };
    };
    let (status, data_bytes) = match answer(chain, room, disk, buffers) {
        Ok(data_bytes) => (VIRTIO_BLK_S_OK, data_bytes),
        Err(Failure::Unsupported) => (VIRTIO_BLK_S_UNSUPP, 0),
        Err(Failure::Error) => (VIRTIO_BLK_S_IOERR, 0),
    };
    let told = buffers.write(&chain.writable, room, &[status as u8]);
    Completion {
        // Bounded by MAX_REQUEST_BYTES.
        written: if told.is_ok() { data_bytes + 1 } else { 0 },
        succeeded: told.is_ok() && status == VIRTIO_BLK_S_OK,
    }
}

/// Why a request gets an error as its status.
enum Failure {
    Error,
    Unsupported,
}

impl From<AccessError> for Failure {
    fn from(error: AccessError) -> Self {
        tracing::debug!(%error, "disk request failed");
        Failure::Error
    }
}

/// Carries a request out but for its status; bytes written.
fn answer(chain: &Chain, room: u64, disk: &Disk, buffers: &impl Buffers) -> Result<u32, Failure> {
    let readable = total(&chain.readable);
    let size = readable.saturating_add(room);
    if chain.defect.is_some()
        || readable < HEADER_BYTES as u64
        || size > MAX_REQUEST_BYTES + HEADER_BYTES as u64
    {
        return Err(Failure::Error);
    }
    let mut header = [0; HEADER_BYTES];
    buffers.read(&chain.readable, 0, &mut header)?;
    let [k0, k1, k2, k3, _, _, _, _, sector @ ..] = header;
    let data = match u32::from_le_bytes([k0, k1, k2, k3]) {
        VIRTIO_BLK_T_IN if room.is_multiple_of(SECTOR_BYTES) => disk
            .read(u64::from_le_bytes(sector), room)
            .ok_or(Failure::Error)?,
        VIRTIO_BLK_T_GET_ID => {
            let serial = disk.serial();
            serial[..serial.len().min(room as usize)].to_vec()
        }
        VIRTIO_BLK_T_FLUSH => Vec::new(),
        // The disk is read-only, by feature bit too.
        VIRTIO_BLK_T_IN | VIRTIO_BLK_T_OUT => return Err(Failure::Error),
        _ => return Err(Failure::Unsupported),
    };
    if !data.is_empty() {
        buffers.write(&chain.writable, 0, &data)?;
    }
    Ok(data.len() as u32)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use proptest::prelude::*;

    use super::super::chain::BufferDefect;
    use super::*;

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
        Disk::new(vm.expect("a UUID"), 1 << 20)
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
        let completion = execute(&chain, &disk(), &memory);
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
        let completion = execute(&chain, &disk(), &memory);
        assert_eq!(completion.written, 1);
        assert_eq!(memory.0.borrow()[4096 + 512], VIRTIO_BLK_S_IOERR as u8);
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
            let completion = execute(&chain, &disk(), &memory);
            prop_assert!(u64::from(completion.written) <= total(&chain.writable));
        }
    }
}
