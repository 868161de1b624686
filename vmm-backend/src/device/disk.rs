//! The disk's contents: read-only, zeros but for a first sector that says in words what this is.

use outram_wire::units::VmId;

/// Bytes of a sector, the unit of virtio-blk.
pub(super) const SECTOR_BYTES: u64 = 512;
/// Bytes of a serial (`VIRTIO_BLK_ID_BYTES`).
pub(super) const SERIAL_BYTES: usize = 20;

/// A read-only disk.
#[derive(Debug)]
pub(super) struct Disk {
    capacity_bytes: u64,
    label: [u8; SECTOR_BYTES as usize],
    serial: [u8; SERIAL_BYTES],
}

impl Disk {
    /// The disk of a guest; the capacity is a multiple of the sector.
    pub(super) fn new(vm: VmId, capacity_bytes: u64) -> Self {
        let text = format!(
            "This disk is the channel between this guest and Outram, which pages its memory.\n\
             It is read-only and holds no data. Leave it as it is: do not format, mount or use it.\n\
             Guest {vm}\n"
        );
        let mut label = [0; SECTOR_BYTES as usize];
        copy_start(&mut label, text.as_bytes());
        let mut serial = [0; SERIAL_BYTES];
        let digits: String = vm.to_string().chars().take(8).collect();
        copy_start(&mut serial, format!("outram-{digits}").as_bytes());
        Self {
            capacity_bytes,
            label,
            serial,
        }
    }

    /// Capacity in sectors.
    pub(super) fn sectors(&self) -> u64 {
        self.capacity_bytes / SECTOR_BYTES
    }

    /// What `VIRTIO_BLK_T_GET_ID` answers: text, filled up with zeros.
    pub(super) fn serial(&self) -> &[u8; SERIAL_BYTES] {
        &self.serial
    }

    /// Contents of `length` bytes from a sector on; `None` beyond the end.
    pub(super) fn read(&self, sector: u64, length: u64) -> Option<Vec<u8>> {
        let start = sector.checked_mul(SECTOR_BYTES)?;
        let end = start.checked_add(length)?;
        if end > self.capacity_bytes {
            return None;
        }
        let mut bytes = vec![0; usize::try_from(length).ok()?];
        if let Some(from) = usize::try_from(start)
            .ok()
            .and_then(|start| self.label.get(start..))
        {
            copy_start(&mut bytes, from);
        }
        Some(bytes)
    }
}

/// Copies as much as fits.
fn copy_start(to: &mut [u8], from: &[u8]) {
    let length = to.len().min(from.len());
    to[..length].copy_from_slice(&from[..length]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> Disk {
        let vm = "123e4567-e89b-12d3-a456-426614174000".parse();
        Disk::new(vm.expect("a UUID"), 1 << 20)
    }

    #[test]
    fn the_first_sector_says_what_it_is() {
        let disk = disk();
        let bytes = disk.read(0, 1024).expect("within");
        assert!(bytes.starts_with(b"This disk is the channel"));
        assert!(bytes[512..].iter().all(|&byte| byte == 0));
        assert!(
            disk.read(1, 512)
                .expect("within")
                .iter()
                .all(|&byte| byte == 0)
        );
        assert_eq!(disk.serial(), b"outram-123e4567\0\0\0\0\0");
    }

    #[test]
    fn nothing_lies_beyond_the_end() {
        let disk = disk();
        assert_eq!(disk.sectors(), 2048);
        assert!(disk.read(2047, 512).is_some());
        assert!(disk.read(2047, 1024).is_none());
        assert!(disk.read(u64::MAX, 512).is_none());
        assert!(disk.read(u64::MAX / 512, u64::MAX).is_none());
    }
}
