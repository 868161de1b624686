//! Integrity tags: a keyed 128-bit hash bound to guest (by the key), page and generation.
//!
//! One tag serves two questions: whether bytes that came back are those that were sent, and
//! whether a resident page still equals its stored copy. Keyed BLAKE3, truncated: a server that
//! does not know the key cannot make other bytes pass, nor bytes of another page or generation.

use super::{Generation, PageIndex};

/// A page's tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Tag(pub [u8; 16]);

/// The guest's key: fresh at every start of a guest.
#[derive(Clone)]
pub struct TagKey([u8; 32]);

impl TagKey {
    /// A key of these bytes.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The tag of `bytes` as contents of `page` at `generation`.
    pub fn tag(&self, page: PageIndex, generation: Generation, bytes: &[u8]) -> Tag {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(bytes);
        hasher.update(&page.0.to_le_bytes());
        hasher.update(&generation.0.to_le_bytes());
        let mut tag = [0; 16];
        tag.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Tag(tag)
    }
}

impl std::fmt::Debug for TagKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TagKey(secret)")
    }
}

/// The word that fills all of `bytes`, if one does. `bytes` is a whole page.
pub fn fill_word(bytes: &[u8]) -> Option<u64> {
    let (first, rest) = bytes.split_at(8);
    let word = u64::from_ne_bytes(first.try_into().ok()?);
    // Compared in blocks, so that the compiler vectorises it and most pages end after the first.
    let same = rest.chunks(64).all(|block| {
        block.chunks_exact(8).fold(0, |difference, chunk| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(chunk);
            difference | (u64::from_ne_bytes(bytes) ^ word)
        }) == 0
    });
    same.then_some(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_binds_key_page_generation_and_bytes() {
        let key = TagKey::new([1; 32]);
        let page = [7u8; 4096];
        let tag = key.tag(PageIndex(3), Generation(9), &page);
        assert_eq!(tag, key.tag(PageIndex(3), Generation(9), &page));
        assert_ne!(
            tag,
            TagKey::new([2; 32]).tag(PageIndex(3), Generation(9), &page)
        );
        assert_ne!(tag, key.tag(PageIndex(4), Generation(9), &page));
        assert_ne!(tag, key.tag(PageIndex(3), Generation(10), &page));
        let mut other = page;
        other[4095] ^= 1;
        assert_ne!(tag, key.tag(PageIndex(3), Generation(9), &other));
    }

    #[test]
    fn only_same_filled_pages_have_a_word() {
        assert_eq!(fill_word(&[0; 4096]), Some(0));
        assert_eq!(fill_word(&[0xab; 4096]), Some(0xabab_abab_abab_abab));
        for place in [0, 7, 8, 63, 64, 71, 72, 4088, 4095] {
            let mut page = [0u8; 4096];
            page[place] = 1;
            assert_eq!(fill_word(&page), None, "byte {place}");
        }
    }
}
