//! What the disk holds: by default zeros, read-only, but for a first sector that says in words what
//! this is; on demand whatever the guest writes, in far memory.

use std::sync::Arc;

use outram_wire::units::VmId;

use super::request::Failure;
use crate::far_disk::{DiskFault, FarDisk};
use crate::interrupt::Interrupt;

/// Bytes of a sector, the unit of virtio-blk.
pub(super) const SECTOR_BYTES: u64 = 512;
/// Sectors of a block, the unit in which a far-memory disk is stored.
pub(super) const BLOCK_SECTORS: u64 = 8;
/// Bytes of a serial (`VIRTIO_BLK_ID_BYTES`).
pub(super) const SERIAL_BYTES: usize = 20;
/// Capacity of a disk that holds nothing.
pub(super) const CHANNEL_BYTES: u64 = 1 << 20;

/// A disk.
pub(super) struct Disk {
    contents: Contents,
    serial: [u8; SERIAL_BYTES],
}

enum Contents {
    /// Nothing but this first sector.
    Channel(Box<[u8; SECTOR_BYTES as usize]>),
    /// What the guest writes.
    Far(Arc<FarDisk>),
}

impl From<DiskFault> for Failure {
    fn from(fault: DiskFault) -> Self {
        match fault {
            DiskFault::Interrupted => Self::Interrupted,
            // Counted and logged by the disk.
            _ => Self::Error,
        }
    }
}

impl Disk {
    /// The disk of a guest.
    pub(super) fn new(vm: VmId, far: Option<Arc<FarDisk>>) -> Self {
        let mut serial = [0; SERIAL_BYTES];
        let digits: String = vm.to_string().chars().take(8).collect();
        copy_start(&mut serial, format!("outram-{digits}").as_bytes());
        let contents = match far {
            Some(far) => Contents::Far(far),
            None => Contents::Channel(Box::new(label(vm))),
        };
        Self { contents, serial }
    }

    /// Whether the guest may write.
    pub(super) fn is_writable(&self) -> bool {
        matches!(self.contents, Contents::Far(_))
    }

    /// Capacity in sectors.
    pub(super) fn sectors(&self) -> u64 {
        let bytes = match &self.contents {
            Contents::Channel(_) => CHANNEL_BYTES,
            Contents::Far(far) => far.size_bytes(),
        };
        bytes / SECTOR_BYTES
    }

    /// What `VIRTIO_BLK_T_GET_ID` answers: text, filled up with zeros.
    pub(super) fn serial(&self) -> &[u8; SERIAL_BYTES] {
        &self.serial
    }

    /// The guest begins to use it.
    pub(super) fn resume(&self) {
        if let Contents::Far(far) = &self.contents {
            far.resume();
        }
    }

    /// Contents of `length` bytes from a sector on.
    pub(super) fn read(
        &self,
        sector: u64,
        length: u64,
        interrupt: &Interrupt<'_>,
    ) -> Result<Vec<u8>, Failure> {
        let start = self.place(sector, length)?;
        let length = usize::try_from(length).map_err(|_| Failure::Error)?;
        // With room for the status, which follows.
        let mut bytes = vec![0; length.saturating_add(1)];
        bytes.truncate(length);
        match &self.contents {
            Contents::Channel(label) => {
                let start = usize::try_from(start).unwrap_or(usize::MAX);
                if let Some(from) = label.get(start..) {
                    copy_start(&mut bytes, from);
                }
            }
            Contents::Far(far) => far.read(start, &mut bytes, interrupt)?,
        }
        Ok(bytes)
    }

    /// Stores bytes from a sector on.
    pub(super) fn write(
        &self,
        sector: u64,
        from: &[u8],
        interrupt: &Interrupt<'_>,
    ) -> Result<(), Failure> {
        let far = self.writable()?;
        let start = self.place(sector, from.len() as u64)?;
        Ok(far.write(start, from, interrupt)?)
    }

    /// Makes sectors read as zeros and gives their room back.
    pub(super) fn clear(
        &self,
        sector: u64,
        sectors: u32,
        interrupt: &Interrupt<'_>,
    ) -> Result<(), Failure> {
        let far = self.writable()?;
        let length = u64::from(sectors) * SECTOR_BYTES;
        let start = self.place(sector, length)?;
        Ok(far.zero(start, length, interrupt)?)
    }

    fn writable(&self) -> Result<&FarDisk, Failure> {
        match &self.contents {
            Contents::Far(far) => Ok(far),
            // By feature bit too.
            Contents::Channel(_) => Err(Failure::Error),
        }
    }

    /// The first byte of a range; an error where it reaches beyond the end.
    fn place(&self, sector: u64, length: u64) -> Result<u64, Failure> {
        let start = sector.checked_mul(SECTOR_BYTES).ok_or(Failure::Error)?;
        let end = start.checked_add(length).ok_or(Failure::Error)?;
        match end <= self.sectors() * SECTOR_BYTES {
            true => Ok(start),
            false => Err(Failure::Error),
        }
    }
}

/// The first sector of a disk that holds nothing.
fn label(vm: VmId) -> [u8; SECTOR_BYTES as usize] {
    let text = format!(
        "This disk is the channel between this guest and Outram, which pages its memory.\n\
         It is read-only and holds no data. Leave it as it is: do not format, mount or use it.\n\
         Guest {vm}\n"
    );
    let mut label = [0; SECTOR_BYTES as usize];
    copy_start(&mut label, text.as_bytes());
    label
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
        Disk::new(vm.expect("a UUID"), None)
    }

    fn read(disk: &Disk, sector: u64, length: u64) -> Option<Vec<u8>> {
        disk.read(sector, length, &Interrupt::never()).ok()
    }

    #[test]
    fn the_first_sector_says_what_it_is() {
        let disk = disk();
        let bytes = read(&disk, 0, 1024).expect("within");
        assert!(bytes.starts_with(b"This disk is the channel"));
        assert!(bytes[512..].iter().all(|&byte| byte == 0));
        let next = read(&disk, 1, 512).expect("within");
        assert!(next.iter().all(|&byte| byte == 0));
        assert_eq!(disk.serial(), b"outram-123e4567\0\0\0\0\0");
    }

    #[test]
    fn nothing_lies_beyond_the_end() {
        let disk = disk();
        assert_eq!(disk.sectors(), 2048);
        assert!(read(&disk, 2047, 512).is_some());
        assert!(read(&disk, 2047, 1024).is_none());
        assert!(read(&disk, u64::MAX, 512).is_none());
        assert!(read(&disk, u64::MAX / 512, u64::MAX).is_none());
    }

    #[test]
    fn the_channel_takes_no_writes() {
        let disk = disk();
        let never = Interrupt::never();
        assert!(!disk.is_writable());
        assert!(disk.write(0, &[1; 512], &never).is_err());
        assert!(disk.clear(0, 1, &never).is_err());
    }
}
