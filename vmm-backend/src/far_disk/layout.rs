//! Where a disk's blocks lie, byte for byte.
//!
//! A disk is cut into *extents*, each of which fills one slab once anything in it is written:
//!
//! ```text
//! blocks   one after the other, 4096 bytes each
//! entries  of each block: 0 generation u64 (0: not written, reads as zeros)
//!                         8 salt [16]   24 tag [16]                                           = 40
//! …        unused
//! header   0 magic "OUTRDISK"  8 version u16  10 zero [6]  16 extent u64  24 tag [16]  40 zero = 64
//! ```
//!
//! All little-endian; the header ends with the slab. So each slab says for itself what it holds, and
//! whoever has the disk's key can load it from its slabs alone. A block's tag binds its contents to
//! the disk and the opening that wrote it (by the key, see [`super::block_keys`]), the block's number
//! and the generation; the header's tag the slab to its
//! extent. A slab without a header was leased, or is to be released, and holds nothing.

use outram_wire::server::{Extent, SlabId};
use outram_wire::units::PAGE_SIZE;

use super::block_keys::Salt;
use crate::engine::tag::{Tag, TagKey};
use crate::engine::{Generation, PageIndex};

/// Bytes of a block.
pub(super) const BLOCK: usize = PAGE_SIZE;
/// Bytes of a block's entry.
pub(super) const ENTRY: usize = 40;
/// Bytes of a slab's header.
pub(super) const HEADER: usize = 64;

const MAGIC: [u8; 8] = *b"OUTRDISK";
/// 1 had neither salts nor sealed blocks.
const VERSION: u16 = 2;

/// A disk's measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    slab_bytes: u32,
    extent_blocks: u32,
    blocks: u32,
}

/// Blocks of one extent, counted within it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) first: u32,
    pub(super) count: u32,
}

impl Run {
    pub(super) fn end(self) -> u32 {
        self.first + self.count
    }

    pub(super) fn places(self) -> impl Iterator<Item = u32> {
        self.first..self.end()
    }
}

impl Layout {
    /// Of a disk of `bytes` over slabs of `slab_bytes`. `None` where a slab holds not one block.
    pub(super) fn new(bytes: u64, slab_bytes: u64) -> Option<Self> {
        let slab_bytes = u32::try_from(slab_bytes).ok()?;
        let room = (slab_bytes as usize).checked_sub(HEADER)?;
        let extent_blocks = (room / (BLOCK + ENTRY)) as u32;
        let blocks = u32::try_from(bytes.div_ceil(BLOCK as u64)).ok()?;
        (extent_blocks > 0).then_some(Self {
            slab_bytes,
            extent_blocks,
            blocks,
        })
    }

    /// Bytes of the slabs that it is made for.
    pub(super) fn slab_bytes(&self) -> u64 {
        u64::from(self.slab_bytes)
    }

    /// Extents of the disk.
    pub(super) fn extents(&self) -> u32 {
        self.blocks.div_ceil(self.extent_blocks)
    }

    /// Blocks of an extent; the last one may have fewer than the others.
    pub(super) fn blocks_of(&self, extent: u32) -> u32 {
        let before = extent * self.extent_blocks;
        (self.blocks - before).min(self.extent_blocks)
    }

    /// The disk's number of a block of an extent.
    pub(super) fn block(&self, extent: u32, place: u32) -> u32 {
        extent * self.extent_blocks + place
    }

    /// Cuts blocks of the disk into runs of one extent each, of at most `most` blocks.
    pub(super) fn runs(
        &self,
        blocks: std::ops::Range<u32>,
        most: u32,
    ) -> impl Iterator<Item = (u32, Run)> {
        let (layout, mut next) = (*self, blocks.start);
        std::iter::from_fn(move || {
            let left = blocks.end.checked_sub(next).filter(|left| *left > 0)?;
            let (extent, first) = (next / layout.extent_blocks, next % layout.extent_blocks);
            let count = left.min(layout.extent_blocks - first).min(most);
            next += count;
            Some((extent, Run { first, count }))
        })
    }

    /// Where blocks lie in their slab.
    pub(super) fn blocks_at(&self, slab: SlabId, run: Run) -> Extent {
        Extent {
            slab,
            offset: run.first * BLOCK as u32,
            length: run.count * BLOCK as u32,
        }
    }

    /// Where the entries of blocks lie in their slab.
    pub(super) fn entries_at(&self, slab: SlabId, run: Run) -> Extent {
        Extent {
            slab,
            offset: self.extent_blocks * BLOCK as u32 + run.first * ENTRY as u32,
            length: run.count * ENTRY as u32,
        }
    }

    /// Where a slab's header lies.
    pub(super) fn header_at(&self, slab: SlabId) -> Extent {
        Extent {
            slab,
            offset: self.slab_bytes - HEADER as u32,
            length: HEADER as u32,
        }
    }
}

/// What a slab says about one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// 0 where nothing is written.
    pub(super) generation: u64,
    /// Which opening wrote it.
    pub(super) salt: Salt,
    pub(super) tag: Tag,
}

impl Entry {
    pub(super) fn encode(self) -> [u8; ENTRY] {
        let mut bytes = [0; ENTRY];
        bytes[..8].copy_from_slice(&self.generation.to_le_bytes());
        bytes[8..24].copy_from_slice(&self.salt.0);
        bytes[24..].copy_from_slice(&self.tag.0);
        bytes
    }

    pub(super) fn decode(bytes: &[u8; ENTRY]) -> Self {
        let mut generation = [0; 8];
        generation.copy_from_slice(&bytes[..8]);
        let (mut salt, mut tag) = (Salt::default(), Tag::default());
        salt.0.copy_from_slice(&bytes[8..24]);
        tag.0.copy_from_slice(&bytes[24..]);
        Self {
            generation: u64::from_le_bytes(generation),
            salt,
            tag,
        }
    }
}

/// Entries one after the other.
pub(super) fn entries(bytes: &[u8]) -> impl Iterator<Item = Entry> {
    bytes.as_chunks::<ENTRY>().0.iter().map(Entry::decode)
}

/// A slab's header.
pub(super) fn encode_header(tags: &TagKey, extent: u32) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
    bytes[16..24].copy_from_slice(&u64::from(extent).to_le_bytes());
    // Generation 0 is no block's: no block's contents can pass for a header, nor the reverse.
    let tag = tags.tag(PageIndex(extent), Generation(0), &bytes[..24]);
    bytes[24..40].copy_from_slice(&tag.0);
    bytes
}

/// Which extent a slab holds, by its header; `None` where it has none.
pub(super) fn decode_header(
    tags: &TagKey,
    bytes: &[u8; HEADER],
) -> Result<Option<u32>, HeaderError> {
    if *bytes == [0; HEADER] {
        return Ok(None);
    }
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[16..20]);
    let extent = u32::from_le_bytes(number);
    match encode_header(tags, extent) == *bytes {
        true => Ok(Some(extent)),
        false => Err(HeaderError),
    }
}

/// A slab of another disk, version or making.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a slab's header is not this disk's, or was changed")]
pub(super) struct HeaderError;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cover_the_blocks_once_and_stay_within_extents() {
        let layout = Layout::new(100 * 4096, 65_536).expect("a disk");
        assert_eq!(layout.extent_blocks, 15);
        assert_eq!(layout.extents(), 7);
        assert_eq!(layout.blocks_of(6), 10);
        let mut next = 7;
        for (extent, run) in layout.runs(7..98, 4) {
            assert_eq!(layout.block(extent, run.first), next);
            assert!(run.count <= 4 && run.end() <= layout.blocks_of(extent));
            next += run.count;
        }
        assert_eq!(next, 98);
        assert_eq!(layout.runs(5..5, 4).count(), 0);
    }

    #[test]
    fn nothing_in_a_slab_overlaps() {
        for slab_bytes in [65_536, 1 << 20, 64 << 20, 2 << 30] {
            let layout = Layout::new(1 << 40, slab_bytes).expect("a disk");
            let whole = Run {
                first: 0,
                count: layout.extent_blocks,
            };
            let [blocks, entries, header] = [
                layout.blocks_at(SlabId(1), whole),
                layout.entries_at(SlabId(1), whole),
                layout.header_at(SlabId(1)),
            ];
            let end = |extent: Extent| u64::from(extent.offset) + u64::from(extent.length);
            assert_eq!(end(blocks), u64::from(entries.offset));
            assert!(end(entries) <= u64::from(header.offset));
            assert_eq!(end(header), slab_bytes);
        }
    }

    #[test]
    fn entries_and_headers_have_these_bytes() {
        let entry = Entry {
            generation: 0x0102,
            salt: Salt([8; 16]),
            tag: Tag([9; 16]),
        };
        let mut expected = [9; ENTRY];
        expected[8..24].fill(8);
        expected[..8].copy_from_slice(&[2, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(entry.encode(), expected);
        assert_eq!(Entry::decode(&expected), entry);
        let tags = TagKey::new([1; 32]);
        let header = encode_header(&tags, 0x0506);
        assert_eq!(&header[..18], b"OUTRDISK\x02\0\0\0\0\0\0\0\x06\x05");
        assert_eq!(decode_header(&tags, &header), Ok(Some(0x0506)));
        assert_eq!(decode_header(&tags, &[0; HEADER]), Ok(None));
        for place in [0, 8, 16, 23, 24, 39, 40, 63] {
            let mut changed = header;
            changed[place] ^= 1;
            assert_eq!(decode_header(&tags, &changed), Err(HeaderError), "{place}");
        }
        let other = TagKey::new([2; 32]);
        assert_eq!(decode_header(&other, &header), Err(HeaderError));
    }
}
