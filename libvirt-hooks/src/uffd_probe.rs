//! Whether this kernel's userfaultfd can do what the pager needs, asked of the kernel itself.
//!
//! Layouts and numbers are those of `include/uapi/linux/userfaultfd.h`; see
//! <https://docs.kernel.org/admin-guide/mm/userfaultfd.html>.
#![allow(unsafe_code)]

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

/// The device that makes userfaultfds.
pub(crate) const DEVICE: &str = "/dev/userfaultfd";

/// `_IO(0xAA, 0x00)`.
const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa00;
/// `_IOWR(0xAA, 0x3F, struct uffdio_api)`.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
/// The only version of the interface.
const UFFD_API: u64 = 0xaa;

/// The features that the pager needs, with their bits.
const NEEDED: [(&str, u64); 6] = [
    ("write protection", 1 << 0),
    ("remove events", 1 << 3),
    ("missing pages of shared memory", 1 << 5),
    ("unmap events", 1 << 6),
    ("signals for stray accesses", 1 << 7),
    ("write protection of shared memory", 1 << 12),
];

#[repr(C)]
#[derive(Default)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

const _: () = assert!(size_of::<UffdioApi>() == 24);

/// The names of needed features that this kernel lacks.
pub(crate) fn missing_features() -> io::Result<Vec<&'static str>> {
    let features = features(Path::new(DEVICE))?;
    Ok(NEEDED
        .iter()
        .filter(|(_, bit)| features & bit == 0)
        .map(|(name, _)| *name)
        .collect())
}

fn features(device: &Path) -> io::Result<u64> {
    let device = OpenOptions::new().read(true).write(true).open(device)?;
    // SAFETY: the request takes its flags by value and returns a new descriptor or an error.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor and nobody else knows of it.
    let uffd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut api = UffdioApi {
        api: UFFD_API,
        ..UffdioApi::default()
    };
    // SAFETY: `api` has the layout that the request reads and writes, and outlives the call.
    let done = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, &raw mut api) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(api.features)
}
