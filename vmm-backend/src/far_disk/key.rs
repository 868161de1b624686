//! A disk's key, from which all that names and guards the disk is derived.
//!
//! The key travels in the domain's metadata, so that whoever the domain is restored on or moved to
//! can claim the disk. The guest's UUID is part of every derivation: a clone of a domain has its own
//! disk although it has the same key. Servers see the derived secret, never the key: they cannot
//! make tags, nor open a block.

use outram_wire::disk::DiskKey;
use outram_wire::server::{DiskId, SessionSecret};
use outram_wire::units::VmId;

use crate::engine::seal::Secret;
use crate::engine::tag::TagKey;

/// What a disk's key comes to for one guest.
#[derive(Clone)]
pub(super) struct Identity {
    pub(super) disk: DiskId,
    pub(super) secret: SessionSecret,
    /// Of the slabs' headers.
    pub(super) tags: TagKey,
    /// What the keys of its blocks are made of.
    pub(super) blocks: Secret,
}

impl Identity {
    pub(super) fn derive(vm: VmId, key: &DiskKey) -> Self {
        let derive = |context: &str| {
            let mut hasher = blake3::Hasher::new_derive_key(context);
            hasher.update(&key.0);
            hasher.update(vm.0.as_bytes());
            *hasher.finalize().as_bytes()
        };
        Self {
            disk: key.disk_of(vm),
            secret: SessionSecret(derive("outram 2025 far-memory disk secret")),
            tags: TagKey::new(derive("outram 2025 far-memory disk tags")),
            blocks: Secret::new(derive("outram 2025 far-memory disk blocks")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clone_with_the_same_key_has_another_disk() {
        let vm = |number| VmId(uuid::Uuid::from_u128(number));
        let key = DiskKey([3; 32]);
        let own = Identity::derive(vm(1), &key);
        let same = Identity::derive(vm(1), &key);
        let clone = Identity::derive(vm(2), &key);
        let other = Identity::derive(vm(1), &DiskKey([4; 32]));
        assert_eq!((own.disk, own.secret), (same.disk, same.secret));
        assert_ne!(own.disk, clone.disk);
        assert_ne!(own.secret, clone.secret);
        assert_ne!(own.disk, other.disk);
        assert_ne!(own.secret.0, key.0, "a server never sees the key");
    }
}
