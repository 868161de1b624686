//! Descriptor chains, walked over a table that a hostile guest writes.
//!
//! virtio-queue's own iterator follows indirect tables, which lie in memory that is not pinned; so
//! only the head index is taken from it. Each descriptor is read once, so that a guest that
//! changes it meanwhile changes nothing that was checked.

use virtio_bindings::bindings::virtio_ring::{
    VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE,
};

/// A descriptor as the guest wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RawDescriptor {
    pub address: u64,
    pub length: u32,
    pub flags: u16,
    pub next: u16,
}

/// Where descriptors are read.
pub(super) trait DescriptorTable {
    /// Descriptors in it: the size of the queue.
    fn size(&self) -> u16;
    /// One of them; `None` where it cannot be read. Asked only for indices below the size.
    fn descriptor(&self, index: u16) -> Option<RawDescriptor>;
}

/// A buffer of a chain, in guest-physical addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub address: u64,
    pub length: u32,
}

/// A chain's buffers: what the driver wrote, then what the device may write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Chain {
    pub readable: Vec<Segment>,
    pub writable: Vec<Segment>,
    /// Something is wrong with the buffers, but the chain's structure is sound: an error of this
    /// request alone.
    pub defect: Option<BufferDefect>,
}

/// What is wrong with a chain's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BufferDefect {
    #[error("a descriptor of length 0")]
    Empty,
    #[error("a readable descriptor behind a writable one")]
    Order,
}

/// A chain whose structure is broken: the driver cannot be trusted with this queue any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ChainError {
    #[error("descriptor index {index} is outside the queue of {size}")]
    OutOfRange { index: u16, size: u16 },
    #[error("the descriptor chain from {head} has a loop")]
    Loop { head: u16 },
    #[error("descriptor {index} is indirect, which was not offered")]
    Indirect { index: u16 },
    #[error("descriptor {index} cannot be read")]
    Unreadable { index: u16 },
}

/// Walks the chain that begins at `head`.
pub(super) fn walk(table: &impl DescriptorTable, head: u16) -> Result<Chain, ChainError> {
    let size = table.size();
    let mut chain = Chain::default();
    let mut index = head;
    // A chain of more descriptors than the table has must have a loop.
    for _ in 0..size {
        if index >= size {
            return Err(ChainError::OutOfRange { index, size });
        }
        let descriptor = table
            .descriptor(index)
            .ok_or(ChainError::Unreadable { index })?;
        let has = |flag: u32| u32::from(descriptor.flags) & flag != 0;
        if has(VRING_DESC_F_INDIRECT) {
            return Err(ChainError::Indirect { index });
        }
        chain.add(descriptor, has(VRING_DESC_F_WRITE));
        if !has(VRING_DESC_F_NEXT) {
            return Ok(chain);
        }
        index = descriptor.next;
    }
    match size {
        0 => Err(ChainError::OutOfRange { index: head, size }),
        _ => Err(ChainError::Loop { head }),
    }
}

impl Chain {
    fn add(&mut self, descriptor: RawDescriptor, writable: bool) {
        if descriptor.length == 0 {
            self.defect.get_or_insert(BufferDefect::Empty);
            return;
        }
        let segment = Segment {
            address: descriptor.address,
            length: descriptor.length,
        };
        if writable {
            self.writable.push(segment);
        } else {
            if !self.writable.is_empty() {
                self.defect.get_or_insert(BufferDefect::Order);
            }
            self.readable.push(segment);
        }
    }
}

/// Bytes in the segments together.
pub(super) fn total(segments: &[Segment]) -> u64 {
    segments
        .iter()
        .map(|segment| u64::from(segment.length))
        .sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A table in plain bytes, as it lies in guest memory.
    struct Bytes<'a>(&'a [u8]);

    impl DescriptorTable for Bytes<'_> {
        fn size(&self) -> u16 {
            (self.0.len() / 16) as u16
        }

        fn descriptor(&self, index: u16) -> Option<RawDescriptor> {
            let at = usize::from(index) * 16;
            let bytes = self.0.get(at..at + 16)?;
            Some(RawDescriptor {
                address: u64::from_le_bytes(bytes[..8].try_into().ok()?),
                length: u32::from_le_bytes(bytes[8..12].try_into().ok()?),
                flags: u16::from_le_bytes(bytes[12..14].try_into().ok()?),
                next: u16::from_le_bytes(bytes[14..16].try_into().ok()?),
            })
        }
    }

    const NEXT: u16 = VRING_DESC_F_NEXT as u16;
    const WRITE: u16 = VRING_DESC_F_WRITE as u16;
    const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

    fn table(descriptors: &[(u64, u32, u16, u16)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (address, length, flags, next) in descriptors {
            bytes.extend_from_slice(&address.to_le_bytes());
            bytes.extend_from_slice(&length.to_le_bytes());
            bytes.extend_from_slice(&flags.to_le_bytes());
            bytes.extend_from_slice(&next.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn a_sound_chain_is_split_by_direction() {
        let bytes = table(&[
            (0x1000, 16, NEXT, 2),
            (0x9000, 1, WRITE, 0),
            (0x2000, 512, NEXT | WRITE, 1),
            (0, 0, 0, 0),
        ]);
        let chain = walk(&Bytes(&bytes), 0).expect("sound");
        let segment = |address, length| Segment { address, length };
        assert_eq!(chain.readable, [segment(0x1000, 16)]);
        assert_eq!(chain.writable, [segment(0x2000, 512), segment(0x9000, 1)]);
        assert_eq!(chain.defect, None);
        assert_eq!(total(&chain.writable), 513);
    }

    #[test]
    fn broken_structures_break_the_queue() {
        let looped = table(&[(0, 1, NEXT, 1), (0, 1, NEXT, 0)]);
        assert_eq!(walk(&Bytes(&looped), 0), Err(ChainError::Loop { head: 0 }));
        let indirect = table(&[(0, 16, INDIRECT, 0)]);
        assert_eq!(
            walk(&Bytes(&indirect), 0),
            Err(ChainError::Indirect { index: 0 })
        );
        let far = table(&[(0, 1, NEXT, 9)]);
        let out = |index| Err(ChainError::OutOfRange { index, size: 1 });
        assert_eq!(walk(&Bytes(&far), 7), out(7));
        // The one descriptor is used up before the next index matters.
        assert_eq!(walk(&Bytes(&far), 0), Err(ChainError::Loop { head: 0 }));
        assert_eq!(
            walk(&Bytes(&[]), 0),
            Err(ChainError::OutOfRange { index: 0, size: 0 })
        );
    }

    #[test]
    fn odd_buffers_are_a_defect_of_the_request() {
        let empty = table(&[(0, 0, NEXT, 1), (0, 1, WRITE, 0)]);
        let chain = walk(&Bytes(&empty), 0).expect("structure is sound");
        assert_eq!(chain.defect, Some(BufferDefect::Empty));
        let order = table(&[(0, 1, NEXT | WRITE, 1), (0, 16, 0, 0)]);
        let chain = walk(&Bytes(&order), 0).expect("structure is sound");
        assert_eq!(chain.defect, Some(BufferDefect::Order));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_exceed_the_table(
            bytes in proptest::collection::vec(any::<u8>(), 0..16 * 64),
            head in any::<u16>(),
        ) {
            let table = Bytes(&bytes);
            if let Ok(chain) = walk(&table, head) {
                let segments = chain.readable.len() + chain.writable.len();
                prop_assert!(segments <= usize::from(table.size()));
                prop_assert!(head < table.size());
            }
        }

        #[test]
        fn small_indices_are_walked_without_panic(
            descriptors in proptest::collection::vec(
                (any::<u64>(), 0u32..3, 0u16..8, 0u16..20), 1..16),
            head in 0u16..20,
        ) {
            let bytes = table(&descriptors);
            let _ = walk(&Bytes(&bytes), head);
        }
    }
}
