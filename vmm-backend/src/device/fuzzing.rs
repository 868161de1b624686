//! See [`crate::fuzzing`]: a guest's rings.

use std::cell::RefCell;

use outram_wire::units::VmId;

use super::chain::{self, DescriptorTable, RawDescriptor, Segment, total};
use super::disk::Disk;
use super::request::{AccessError, Buffers, execute};
use crate::interrupt::Interrupt;

/// Bytes of a descriptor.
const DESCRIPTOR_BYTES: usize = 16;

/// A request as a guest lays it out. The first two bytes are the chain's head, the next the number
/// of descriptors; these follow, and then guest memory, whose first address is 0.
///
/// # Panics
/// Where a chain is longer than its table, or a request writes elsewhere than where it may.
pub fn descriptor_chain(data: &[u8]) {
    let Some(([low, high, size], rest)) = data.split_first_chunk() else {
        return;
    };
    let bytes = usize::from(*size) * DESCRIPTOR_BYTES;
    let (table, memory) = rest.split_at(bytes.min(rest.len()));
    let table = Descriptors(table);
    let Ok(chain) = chain::walk(&table, u16::from_le_bytes([*low, *high])) else {
        return;
    };
    let segments = chain.readable.len() + chain.writable.len();
    assert!(segments <= usize::from(table.size()));
    let disk = Disk::new(VmId(uuid::Uuid::nil()), None);
    let buffers = Memory(RefCell::new(memory.to_vec()));
    let done = execute(&chain, &disk, &buffers, &Interrupt::never());
    let done = done.expect("nothing interrupts it");
    assert!(u64::from(done.written) <= total(&chain.writable));
    for (place, (before, after)) in memory.iter().zip(&*buffers.0.borrow()).enumerate() {
        let is_in = |segment: &Segment| {
            let place = place as u64;
            place >= segment.address && place - segment.address < u64::from(segment.length)
        };
        assert!(before == after || chain.writable.iter().any(is_in));
    }
}

/// A table in plain bytes.
struct Descriptors<'a>(&'a [u8]);

impl DescriptorTable for Descriptors<'_> {
    fn size(&self) -> u16 {
        (self.0.len() / DESCRIPTOR_BYTES) as u16
    }

    fn descriptor(&self, index: u16) -> Option<RawDescriptor> {
        let (descriptors, _) = self.0.as_chunks::<DESCRIPTOR_BYTES>();
        let [a @ .., l0, l1, l2, l3, f0, f1, n0, n1] = *descriptors.get(usize::from(index))?;
        Some(RawDescriptor {
            address: u64::from_le_bytes(a),
            length: u32::from_le_bytes([l0, l1, l2, l3]),
            flags: u16::from_le_bytes([f0, f1]),
            next: u16::from_le_bytes([n0, n1]),
        })
    }
}

/// Guest memory from address 0 on.
struct Memory(RefCell<Vec<u8>>);

impl Memory {
    /// Places of `length` bytes from `offset` of the segments' bytes on.
    fn places(
        &self,
        segments: &[Segment],
        offset: u64,
        length: usize,
    ) -> Result<Vec<usize>, AccessError> {
        let end = self.0.borrow().len() as u64;
        for segment in segments {
            let length = u64::from(segment.length);
            let within = segment.address.checked_add(length);
            if within.is_none_or(|last| last > end) {
                let address = segment.address;
                return Err(AccessError::OutsideTable { address, length });
            }
        }
        let all = segments
            .iter()
            .flat_map(|segment| segment.address..segment.address + u64::from(segment.length));
        let places = all.skip(offset as usize).take(length);
        Ok(places.map(|place| place as usize).collect())
    }
}

impl Buffers for Memory {
    fn read(&self, segments: &[Segment], offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        let places = self.places(segments, offset, into.len())?;
        assert_eq!(places.len(), into.len(), "a read beyond the segments");
        for (byte, place) in into.iter_mut().zip(places) {
            *byte = self.0.borrow()[place];
        }
        Ok(())
    }

    fn write(&self, segments: &[Segment], offset: u64, from: &[u8]) -> Result<(), AccessError> {
        let places = self.places(segments, offset, from.len())?;
        assert_eq!(places.len(), from.len(), "a write beyond the segments");
        for (byte, place) in from.iter().zip(places) {
            self.0.borrow_mut()[place] = *byte;
        }
        Ok(())
    }
}
