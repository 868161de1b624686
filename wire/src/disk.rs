//! What a domain says about its far-memory disk: how large it is, and the key to it.

use crate::server::DiskId;
use crate::units::{PAGE_SIZE, VmId};

/// Smallest disk that can be asked for: less is no use to any file system.
pub const MIN_DISK_BYTES: u64 = 1 << 20;
/// Largest disk: its blocks are numbered with 32 bits, as pages are.
pub const MAX_DISK_BYTES: u64 = (PAGE_SIZE as u64) << 31;

/// Whether a disk of so many bytes can be made: whole pages, within bounds.
pub fn is_disk_size(bytes: u64) -> bool {
    bytes.is_multiple_of(PAGE_SIZE as u64) && (MIN_DISK_BYTES..=MAX_DISK_BYTES).contains(&bytes)
}

/// The key to a disk's contents: 32 random bytes, written as 64 hexadecimal digits. Drawn by
/// `outram attach`, kept in the domain's metadata.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DiskKey(pub [u8; 32]);

impl DiskKey {
    /// Draws a fresh one.
    pub fn random() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// The disk that a guest with this key has: a clone of a domain has one of its own although it
    /// has the same key.
    pub fn disk_of(&self, vm: VmId) -> DiskId {
        let mut hasher = blake3::Hasher::new_derive_key("outram 2025 far-memory disk name");
        hasher.update(&self.0);
        hasher.update(vm.0.as_bytes());
        let mut name = [0; 16];
        name.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        DiskId(uuid::Builder::from_random_bytes(name).into_uuid())
    }
}

impl std::fmt::Debug for DiskKey {
    /// Shows nothing of the bytes: a log is no place for them.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DiskKey(…)")
    }
}

impl std::fmt::Display for DiskKey {
    /// The digits, for metadata and key files.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&crate::server::hex(&self.0))
    }
}

impl std::str::FromStr for DiskKey {
    type Err = crate::server::SecretError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        crate::server::unhex(text).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_as_it_is_written() {
        let key = DiskKey([0xa5; 32]);
        assert_eq!(key.to_string(), "a5".repeat(32));
        assert_eq!(key.to_string().parse(), Ok(key));
        assert!("a5".parse::<DiskKey>().is_err());
        assert_eq!(format!("{key:?}"), "DiskKey(…)");
    }

    #[test]
    fn a_disk_keeps_its_name_from_release_to_release() {
        let vm = VmId(uuid::Uuid::from_u128(7));
        let disk = DiskKey([3; 32]).disk_of(vm);
        assert_eq!(disk.to_string(), "af4665dc-bba7-4f7f-8a2b-c207225bfe61");
    }

    #[test]
    fn disks_are_whole_pages_within_bounds() {
        assert!(is_disk_size(1 << 20) && is_disk_size(8 << 40));
        for bytes in [0, 4096, (1 << 20) + 512, (8 << 40) + 4096] {
            assert!(!is_disk_size(bytes), "{bytes}");
        }
    }
}
