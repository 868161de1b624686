//! Sealing: what a page becomes when it is staged, and what is believed when it comes back.
//!
//! A sealed page is AES-256-GCM's ciphertext, as long as the page; the 16 bytes of its tag stay in
//! the page table. The nonce is the page's number and its generation, so that bytes of another
//! page or of an earlier time open as nothing; the guest is bound by its key, which is fresh at
//! every start.
//!
//! **Nonces.** GCM falls if two texts are ever sealed under one nonce *and let out*. A page gets a
//! new generation whenever it is staged with bytes that are not known to be those of its current
//! one ([`super::eviction`]), generations never go back (not when a page is given back, nor when its
//! place in the table is given to other memory), and a staging slot, where pages are sealed, does not
//! change while it is written. So all that is ever sent for a page and a generation is the same text: a
//! write that is retried, or a page that is moved to another slab, sends the very same bytes again.
//!
//! **Tags without sending.** Whether a page still equals its stored copy is told by making its tag
//! anew. Under GCM that seals other bytes under a nonce in use; their ciphertext is thrown away
//! here and never leaves the process.
//!
//! Unsealed pages leave as they are, with [`TagKey`]'s tag in the table.
//!
//! **Cost** of a page of 4 KiB, in microseconds (an EPYC with VAES, by the benchmark below): sealed, 0.6
//! when it is staged and 0.5 when it comes back; unsealed, 1.8 when it is staged and 1.9 when it comes
//! back, for the keyed hash is slower than AES-GCM.

use outram_wire::seal::Seal;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use zeroize::Zeroizing;

use super::tag::{Tag, TagKey};
use super::{Generation, PageIndex};

/// Bytes of a secret that keys are made of.
pub const SECRET_BYTES: usize = 32;

/// What a guest's keys are made of; zeroed when dropped.
pub type Secret = Zeroizing<[u8; SECRET_BYTES]>;

/// What came back is not what was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the bytes are not those that were sent")]
pub struct Refused;

/// The key that pages leave and come back under.
pub struct PageKey(Kind);

enum Kind {
    Sealing(Box<LessSafeKey>),
    Tagging(TagKey),
}

impl PageKey {
    /// The key made of a secret. The secret may make both kinds: neither tells of the other.
    pub fn new(secret: &[u8; SECRET_BYTES], seal: Seal) -> Self {
        let derive = |context| Zeroizing::new(blake3::derive_key(context, secret));
        Self(match seal {
            Seal::On => {
                let key = derive("outram 2025 sealed pages");
                let key = UnboundKey::new(&AES_256_GCM, &key[..]);
                Kind::Sealing(Box::new(LessSafeKey::new(key.expect("32 bytes"))))
            }
            Seal::Off => Kind::Tagging(TagKey::new(*derive("outram 2025 tagged pages"))),
        })
    }

    /// Whether pages have to pass through [`Self::seal`] before they leave.
    pub fn seals(&self) -> bool {
        matches!(self.0, Kind::Sealing(_))
    }

    /// The tag of `bytes` as contents of `page` at `generation`. `room` is used for as many bytes.
    pub fn tag(
        &self,
        page: PageIndex,
        generation: Generation,
        bytes: &[u8],
        room: &mut Vec<u8>,
    ) -> Tag {
        match &self.0 {
            Kind::Sealing(_) => {
                room.clear();
                room.extend_from_slice(bytes);
                self.seal(page, generation, room)
            }
            Kind::Tagging(key) => key.tag(page, generation, bytes),
        }
    }

    /// Makes of a page's bytes what may leave, in place; its tag. Whoever sends them has to keep
    /// to the rule of nonces (see the module).
    pub fn seal(&self, page: PageIndex, generation: Generation, bytes: &mut [u8]) -> Tag {
        match &self.0 {
            Kind::Sealing(key) => {
                let nonce = nonce(page, generation);
                let sealed = key.seal_in_place_separate_tag(nonce, Aad::empty(), bytes);
                let mut tag = Tag::default();
                // GCM takes up to 64 GiB at a time.
                tag.0.copy_from_slice(sealed.expect("a page").as_ref());
                tag
            }
            Kind::Tagging(key) => key.tag(page, generation, bytes),
        }
    }

    /// Makes of what came back the bytes that were sent, in place. Where they are not those of this
    /// page, generation and tag, `bytes` is left as nobody may use it.
    pub fn open(
        &self,
        page: PageIndex,
        generation: Generation,
        tag: Tag,
        bytes: &mut [u8],
    ) -> Result<(), Refused> {
        match &self.0 {
            Kind::Sealing(key) => {
                let nonce = nonce(page, generation);
                key.open_in_place_separate_tag(nonce, Aad::empty(), tag.0.into(), bytes, 0..)
                    .map(drop)
                    .map_err(|_| Refused)
            }
            Kind::Tagging(key) if key.tag(page, generation, bytes) == tag => Ok(()),
            Kind::Tagging(_) => Err(Refused),
        }
    }
}

impl std::fmt::Debug for PageKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PageKey(secret)")
    }
}

fn nonce(page: PageIndex, generation: Generation) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[..4].copy_from_slice(&page.0.to_le_bytes());
    nonce[4..].copy_from_slice(&generation.0.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: PageIndex = PageIndex(3);
    const NOW: Generation = Generation(9);

    fn key(seal: Seal) -> PageKey {
        PageKey::new(&[1; SECRET_BYTES], seal)
    }

    fn page() -> Vec<u8> {
        (0..4096u32).map(|place| (place % 251) as u8).collect()
    }

    /// What leaves, and the tag that stays.
    fn sent(key: &PageKey) -> (Vec<u8>, Tag) {
        let mut bytes = page();
        let tag = key.seal(PAGE, NOW, &mut bytes);
        (bytes, tag)
    }

    #[test]
    fn a_page_comes_back_as_it_left() {
        for seal in [Seal::On, Seal::Off] {
            let key = key(seal);
            let (mut bytes, tag) = sent(&key);
            assert_eq!(bytes == page(), seal == Seal::Off, "{seal}");
            assert_eq!(key.tag(PAGE, NOW, &page(), &mut Vec::new()), tag);
            assert_eq!(key.open(PAGE, NOW, tag, &mut bytes), Ok(()));
            assert_eq!(bytes, page());
        }
    }

    #[test]
    fn nothing_of_a_sealed_page_shows() {
        let (bytes, _) = sent(&key(Seal::On));
        let plain = page();
        let shows = |part: &[u8]| bytes.windows(8).any(|window| window == part);
        assert!(!plain.chunks(8).any(shows));
    }

    #[test]
    fn altered_swapped_and_replayed_pages_are_refused() {
        for seal in [Seal::On, Seal::Off] {
            let key = key(seal);
            let (bytes, tag) = sent(&key);
            let opens = |key: &PageKey, page, generation, tag, bytes: &[u8]| {
                key.open(page, generation, tag, &mut bytes.to_vec()).is_ok()
            };
            assert!(opens(&key, PAGE, NOW, tag, &bytes));
            for place in [0, 1, 15, 16, 2048, 4095] {
                let mut changed = bytes.clone();
                changed[place] ^= 1;
                assert!(!opens(&key, PAGE, NOW, tag, &changed), "byte {place}");
            }
            let mut other = tag;
            other.0[15] ^= 0x80;
            assert!(!opens(&key, PAGE, NOW, other, &bytes));
            assert!(!opens(&key, PageIndex(4), NOW, tag, &bytes), "swapped");
            assert!(!opens(&key, PAGE, Generation(10), tag, &bytes), "replayed");
            assert!(!opens(&key, PAGE, NOW, tag, &bytes[..4080]), "cut");
            let guest = PageKey::new(&[2; SECRET_BYTES], seal);
            assert!(!opens(&guest, PAGE, NOW, tag, &bytes), "another guest's");
        }
    }

    #[test]
    fn a_changed_page_has_another_tag() {
        for seal in [Seal::On, Seal::Off] {
            let key = key(seal);
            let mut room = Vec::new();
            let tag = key.tag(PAGE, NOW, &page(), &mut room);
            let mut changed = page();
            changed[4095] ^= 1;
            assert_ne!(key.tag(PAGE, NOW, &changed, &mut room), tag);
        }
    }

    /// What a page costs, sealed and not: `cargo test --release -p outram-backend --lib -- --ignored
    /// --nocapture cost_of_a_page`.
    #[test]
    #[ignore = "a benchmark"]
    fn cost_of_a_page_on_its_way_out_and_back() {
        for bytes in [4096, 2 << 20] {
            // Pages of 64 MiB one after the other, as an evictor and a server give them.
            let count = (64 << 20) / bytes;
            let mut pages = vec![0x5a; count * bytes];
            for seal in [Seal::Off, Seal::On] {
                let key = key(seal);
                let mut tags = vec![Tag::default(); count];
                let mut rounds = [u128::MAX; 2];
                for _ in 0..5 {
                    let mut least = |number: usize, took: std::time::Duration| {
                        rounds[number] = rounds[number].min(took.as_nanos());
                    };
                    let began = std::time::Instant::now();
                    for (number, page) in pages.chunks_mut(bytes).enumerate() {
                        tags[number] = key.seal(PageIndex(number as u32), NOW, page);
                    }
                    least(0, began.elapsed());
                    let began = std::time::Instant::now();
                    for (number, page) in pages.chunks_mut(bytes).enumerate() {
                        let index = PageIndex(number as u32);
                        key.open(index, NOW, tags[number], page).expect("as staged");
                    }
                    least(1, began.elapsed());
                }
                let [stage, fetch] = rounds.map(|took| took / count as u128);
                println!("{bytes} bytes, seal {seal}: staged {stage} ns, fetched {fetch} ns");
            }
        }
    }
}
