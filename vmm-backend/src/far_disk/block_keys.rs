//! The keys that a disk's blocks lie on its servers under.
//!
//! A disk's key outlives every backend that opens the disk, and what a backend knows of generations
//! it has from the servers: they begin anew with each start of the guest, and a server that lies may
//! set them back. So each opening draws a *salt*, and what it writes is sealed under a key made of
//! the disk's and that salt, which stands beside the block. Within an opening no generation comes
//! twice; so nothing that servers say makes a nonce come twice.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use outram_wire::seal::Seal;

use crate::engine::seal::{PageKey, Secret};

/// Bytes of a salt.
pub(super) const SALT_BYTES: usize = 16;

/// Keys of other openings that are kept at hand: a disk has one for each move of its guest. A
/// server that invents salts only has them made again.
const MOST_KNOWN: usize = 64;

/// Names an opening of a disk. Its lowest bit is set where the opening seals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(super) struct Salt(pub(super) [u8; SALT_BYTES]);

impl Salt {
    fn draw(seal: Seal) -> Result<Self, getrandom::Error> {
        let mut salt = [0; SALT_BYTES];
        getrandom::fill(&mut salt)?;
        salt[0] = salt[0] & !1 | u8::from(seal == Seal::On);
        Ok(Self(salt))
    }

    fn seal(self) -> Seal {
        match self.0[0] & 1 {
            1 => Seal::On,
            _ => Seal::Off,
        }
    }
}

/// The keys of a disk's blocks.
pub(super) struct BlockKeys {
    secret: Secret,
    salt: Salt,
    own: Arc<PageKey>,
    others: Mutex<HashMap<Salt, Arc<PageKey>>>,
}

impl BlockKeys {
    /// Of a new opening.
    pub(super) fn draw(secret: &Secret, seal: Seal) -> io::Result<Self> {
        let salt = Salt::draw(seal).map_err(io::Error::other)?;
        Ok(Self::again(secret, salt))
    }

    /// Of an opening that a former backend began. No generation of it may be drawn twice.
    pub(super) fn again(secret: &Secret, salt: Salt) -> Self {
        Self {
            own: make(secret, salt),
            secret: secret.clone(),
            salt,
            others: Mutex::default(),
        }
    }

    /// What names this opening.
    pub(super) fn salt(&self) -> Salt {
        self.salt
    }

    /// The key of what this opening writes.
    pub(super) fn own(&self) -> &PageKey {
        &self.own
    }

    /// The key of what an opening wrote.
    pub(super) fn of(&self, salt: Salt) -> Arc<PageKey> {
        if salt == self.salt {
            return Arc::clone(&self.own);
        }
        // Each change under the lock is a single call.
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        if others.len() >= MOST_KNOWN && !others.contains_key(&salt) {
            others.clear();
        }
        let other = others
            .entry(salt)
            .or_insert_with(|| make(&self.secret, salt));
        Arc::clone(other)
    }
}

fn make(secret: &Secret, salt: Salt) -> Arc<PageKey> {
    let secret = Secret::new(*blake3::keyed_hash(secret, &salt.0).as_bytes());
    Arc::new(PageKey::new(&secret, salt.seal()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Generation, PageIndex};

    #[test]
    fn each_opening_has_a_key_of_its_own_that_the_next_can_make() {
        let secret = Secret::new([1; 32]);
        for seal in [Seal::On, Seal::Off] {
            let first = BlockKeys::draw(&secret, seal).expect("drawn");
            let second = BlockKeys::draw(&secret, Seal::On).expect("drawn");
            assert_ne!(first.salt(), second.salt());
            let (page, generation) = (PageIndex(1), Generation(1));
            let mut block = vec![7; 4096];
            let tag = first.own().seal(page, generation, &mut block);
            let opens = |key: &PageKey| {
                let opened = key.open(page, generation, tag, &mut block.clone());
                opened.is_ok()
            };
            assert!(opens(&second.of(first.salt())));
            assert!(!opens(second.own()), "one key for two openings");
            let mut other = first.salt();
            other.0[0] ^= 1;
            assert!(!opens(&second.of(other)), "whether it is sealed is bound");
        }
    }

    #[test]
    fn invented_salts_take_no_more_than_their_room() {
        let keys = BlockKeys::draw(&Secret::new([1; 32]), Seal::On).expect("drawn");
        for number in 0..1000u128 {
            keys.of(Salt(number.to_le_bytes()));
        }
        let known = keys.others.lock().expect("no panic").len();
        assert!(known <= MOST_KNOWN, "{known}");
    }
}
