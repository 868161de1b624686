//! What a page must contain, from its number and its version alone.
//!
//! A version rises with each rewrite, so that a page which comes back with the bytes of an earlier
//! rewrite, of another page, or of nobody, differs from what is expected. A few versions are all
//! zeros or one repeated word: pagers treat such pages in ways of their own.

/// Bytes in a page of the guest.
pub(crate) const PAGE_BYTES: usize = 4096;

/// One page of the guest's memory, aligned as the hardware's.
#[derive(Clone)]
#[repr(C, align(4096))]
pub(crate) struct Page(pub(crate) [u8; PAGE_BYTES]);

/// The first word of a page that is not as expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// Index of the 8-byte word within the page.
    pub(crate) word: usize,
    /// What was last written there.
    pub(crate) expected: u64,
    /// What is there.
    pub(crate) found: u64,
}

/// How the words of one version follow from its seed.
#[derive(Clone, Copy)]
struct Words {
    seed: u64,
    step: u64,
}

impl Words {
    fn of(page: u64, version: u32) -> Self {
        let seed = mix(page.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (u64::from(version) << 1 | 1));
        match seed >> 59 {
            // One version in 32 is all zeros, and one in 32 a repeated word.
            0 => Self { seed: 0, step: 0 },
            1 => Self { seed, step: 0 },
            _ => Self {
                seed,
                step: mix(seed) | 1,
            },
        }
    }

    fn at(self, word: usize) -> u64 {
        self.seed
            .wrapping_add((word as u64).wrapping_mul(self.step))
    }
}

/// SplitMix64's finaliser: every input bit reaches every output bit.
pub(crate) fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Writes what `version` of page number `page` is.
pub(crate) fn write(into: &mut Page, page: u64, version: u32) {
    let words = Words::of(page, version);
    for (word, bytes) in into.0.chunks_exact_mut(8).enumerate() {
        bytes.copy_from_slice(&words.at(word).to_le_bytes());
    }
}

/// Compares with what `version` of page number `page` is; `None` where all is well.
pub(crate) fn compare(found: &Page, page: u64, version: u32) -> Option<Difference> {
    let words = Words::of(page, version);
    found
        .0
        .chunks_exact(8)
        .enumerate()
        .find_map(|(word, bytes)| {
            let bytes: [u8; 8] = bytes.try_into().ok()?;
            let (expected, found) = (words.at(word), u64::from_le_bytes(bytes));
            (expected != found).then_some(Difference {
                word,
                expected,
                found,
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(number: u64, version: u32) -> Page {
        let mut page = Page([0; PAGE_BYTES]);
        write(&mut page, number, version);
        page
    }

    #[test]
    fn a_page_is_itself_and_nothing_else() {
        for number in 0..64 {
            for version in 0..64 {
                let written = page(number, version);
                assert_eq!(compare(&written, number, version), None);
            }
        }
        let distinct = (0..200)
            .filter(|version| compare(&page(7, 0), 7, version + 1).is_some())
            .count();
        assert_eq!(
            distinct, 200,
            "an older version must never pass for a newer"
        );
        assert!(compare(&page(7, 3), 8, 3).is_some());
    }

    #[test]
    fn one_flipped_bit_is_found_where_it_is() {
        let mut broken = page(5, 1);
        broken.0[8 * 100 + 3] ^= 0x10;
        let difference = compare(&broken, 5, 1).expect("a flipped bit is a difference");
        assert_eq!(difference.word, 100);
        assert_eq!(difference.expected ^ difference.found, 0x1000_0000);
    }

    #[test]
    fn some_versions_are_zero_and_some_repeat_a_word() {
        let kinds: Vec<(bool, bool)> = (0..1000)
            .map(|version| {
                let page = page(1, version);
                let zero = page.0.iter().all(|byte| *byte == 0);
                let filled = page.0.chunks(8).all(|word| word == &page.0[..8]);
                (zero, filled)
            })
            .collect();
        let zeros = kinds.iter().filter(|kind| kind.0).count();
        let filled = kinds.iter().filter(|kind| kind.1 && !kind.0).count();
        assert!((10..100).contains(&zeros), "{zeros}");
        assert!((10..100).contains(&filled), "{filled}");
    }
}
