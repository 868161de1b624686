//! An opened device with a protection domain on it, and memory registered there.
//!
//! libibverbs may be called from several threads at once (see ibv_open_device(3)); what belongs
//! together is freed in order because everything holds what it was made from.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsStr};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rdma_mummy_sys as ibv;
use serde::{Deserialize, Serialize};

use super::port::Port;
use super::{Failure, VerbsError};

/// A protection domain of its own on a device opened for it: queue pairs in it reach the memory
/// registered in it and no other. Cloning shares it.
#[derive(Clone)]
pub struct Domain(pub(super) Arc<Opened>);

pub(super) struct Opened {
    pub(super) context: NonNull<ibv::ibv_context>,
    pub(super) domain: NonNull<ibv::ibv_pd>,
    pub(super) port: Port,
    pub(super) limits: Limits,
}

/// What the device can, as far as it is of interest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Requests of a queue pair at once.
    pub(super) requests: u32,
    /// Completions of a queue at once.
    pub(super) completions: u32,
    /// Reads that a queue pair takes, and that it makes, at once.
    pub(super) reads_taken: u8,
    pub(super) reads_made: u8,
    /// The port's path MTU, and the largest that it is capable of.
    pub(super) mtu: u32,
    pub(super) mtu_most: u32,
}

/// How much a packet of a port carries, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathMtu {
    /// As it is.
    pub bytes: u32,
    /// At most, by what the device is capable of.
    pub most_bytes: u32,
}

// SAFETY: both objects belong to this value, and libibverbs lets any thread use them.
unsafe impl Send for Opened {}
// SAFETY: as above; what changes in them, libibverbs and the kernel guard.
unsafe impl Sync for Opened {}

impl std::fmt::Debug for Domain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Domain({})", self.0.port)
    }
}

impl Domain {
    /// Opens the port's device.
    pub fn open(port: &Port) -> Result<Self, VerbsError> {
        let refused = |what, source| refused(port, what, source);
        let context = open(port)?;
        // SAFETY: the context was opened just now.
        let domain = unsafe { ibv::ibv_alloc_pd(context.as_ptr()) };
        let Some(domain) = NonNull::new(domain) else {
            let source = io::Error::last_os_error();
            // SAFETY: the context is ours, and nothing was made from it.
            unsafe { ibv::ibv_close_device(context.as_ptr()) };
            return Err(refused("a protection domain", source));
        };
        let mut opened = Opened {
            context,
            domain,
            port: port.clone(),
            limits: Limits {
                requests: 0,
                completions: 0,
                reads_taken: 0,
                reads_made: 0,
                mtu: 0,
                mtu_most: 0,
            },
        };
        opened.limits = opened.look()?;
        Ok(Self(Arc::new(opened)))
    }

    /// Whether the two are one.
    pub fn is(&self, other: &Domain) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The port that it was opened for.
    pub fn port(&self) -> &Port {
        &self.0.port
    }

    /// How much a packet carries.
    pub fn path_mtu(&self) -> PathMtu {
        // As `enum ibv_mtu` counts: 1 is 256 bytes, 5 is 4096.
        let bytes = |mtu: u32| 128 << mtu.min(5);
        PathMtu {
            bytes: bytes(self.0.limits.mtu),
            most_bytes: bytes(self.0.limits.mtu_most),
        }
    }

    /// Whether the device is still there, and its port up.
    pub fn is_usable(&self) -> bool {
        !self.is_removed() && self.0.look().is_ok()
    }

    /// Whether the device is gone, or is to go.
    pub fn is_removed(&self) -> bool {
        self.presence().is_over()
    }

    /// For looking whether the device is still there without keeping it open.
    pub fn presence(&self) -> Presence {
        // SAFETY: the context is open.
        let device = unsafe { self.0.context.as_ref() }.device;
        // SAFETY: its device lives as long as the context does.
        let path = unsafe { &(*device).dev_path };
        // SAFETY: libibverbs has written a path of sysfs there that ends with a zero.
        let path = unsafe { CStr::from_ptr(path.as_ptr()) };
        Presence(Path::new(OsStr::from_bytes(path.to_bytes())).to_owned())
    }
}

/// Where the kernel shows a device that was opened.
#[derive(Clone, Debug)]
pub struct Presence(PathBuf);

impl Presence {
    /// Whether the device is gone, or is to go: the removal of one whose driver cannot part with
    /// programs (soft-RoCE's) waits until nobody has it open, and it works as before meanwhile.
    pub fn is_over(&self) -> bool {
        // This is the first that a removal takes away.
        !self.0.exists()
    }
}

/// Opens a device by its name.
fn open(port: &Port) -> Result<NonNull<ibv::ibv_context>, VerbsError> {
    let mut count = 0;
    // SAFETY: the count is ours; without libibverbs the list is null.
    let list = unsafe { ibv::ibv_get_device_list(&raw mut count) };
    if list.is_null() {
        let source = io::Error::last_os_error();
        if source.raw_os_error() == Some(libc::EOPNOTSUPP) {
            let hint = "libibverbs is not installed (packages libibverbs1, ibverbs-providers)";
            return Err(VerbsError::NoPort(hint.to_owned()));
        }
        return Err(refused(port, "the list of devices", source));
    }
    let mut context = Err(VerbsError::NoPort(format!(
        "libibverbs has no driver for {} (package ibverbs-providers)",
        port.device
    )));
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has `count` entries.
        let entry = unsafe { list.add(index) };
        // SAFETY: an entry of the list, which was not freed yet.
        let device = unsafe { *entry };
        // SAFETY: a device of the list.
        let name = unsafe { ibv::ibv_get_device_name(device) };
        // SAFETY: the name is a string that lives as long as the list.
        let name = unsafe { CStr::from_ptr(name) };
        if name.to_bytes() == port.device.as_bytes() {
            // SAFETY: a device of the list; once open it outlives the list.
            let opened = unsafe { ibv::ibv_open_device(device) };
            context = NonNull::new(opened)
                .ok_or_else(|| refused(port, "to be opened", io::Error::last_os_error()));
        }
    }
    // SAFETY: the list came from ibv_get_device_list, and is not used any more.
    unsafe { ibv::ibv_free_device_list(list) };
    context
}

pub(super) fn refused(port: &Port, what: &'static str, source: io::Error) -> VerbsError {
    VerbsError::Refused {
        device: port.device.clone(),
        what,
        source,
    }
}

/// What a call returned: zero or an errno.
pub(super) fn checked(port: &Port, what: &'static str, errno: i32) -> Result<(), VerbsError> {
    match errno {
        0 => Ok(()),
        errno => Err(refused(
            port,
            what,
            io::Error::from_raw_os_error(errno.abs()),
        )),
    }
}

impl Opened {
    /// Asks device and port how they are.
    fn look(&self) -> Result<Limits, VerbsError> {
        // SAFETY: a structure of integers, which may be zero.
        let mut device: ibv::ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, the structure ours.
        let errno = unsafe { ibv::ibv_query_device(self.context.as_ptr(), &raw mut device) };
        checked(&self.port, "to say what it can", errno)?;
        // SAFETY: a structure of integers, which may be zero.
        let mut port: ibv::ibv_port_attr = unsafe { std::mem::zeroed() };
        let number = self.port.number;
        // SAFETY: the context is open, the structure ours.
        let errno = unsafe { ibv::ibv_query_port(self.context.as_ptr(), number, &raw mut port) };
        checked(&self.port, "to say how its port is", errno)?;
        if port.state != ibv::ibv_port_state::IBV_PORT_ACTIVE {
            let down = format!("port {number} of {} is down", self.port.device);
            return Err(VerbsError::NoPort(down));
        }
        let count = |number: i32| u32::try_from(number).unwrap_or(0);
        let reads = |number: i32| u8::try_from(number.clamp(0, 255)).unwrap_or(0);
        Ok(Limits {
            requests: count(device.max_qp_wr),
            completions: count(device.max_cqe),
            reads_taken: reads(device.max_qp_rd_atom),
            reads_made: reads(device.max_qp_init_rd_atom),
            mtu: port.active_mtu,
            mtu_most: port.max_mtu,
        })
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: whatever was made in the domain held an `Arc` of this, and so is gone.
        let errno = unsafe { ibv::ibv_dealloc_pd(self.domain.as_ptr()) };
        debug_assert_eq!(errno, 0, "nothing is left in the domain");
        // SAFETY: the context is ours, and nothing made from it is left.
        unsafe { ibv::ibv_close_device(self.context.as_ptr()) };
    }
}

/// What a peer may do with registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Nothing: only the device does, for queue pairs of this side.
    Own,
    /// Read it.
    Read,
    /// Read and write it.
    ReadWrite,
}

/// Registered memory: its pages stay where they are, and the device may access them, until this is
/// dropped.
pub struct Region {
    region: NonNull<ibv::ibv_mr>,
    opened: Arc<Opened>,
}

/// Registered memory as the peer names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remote {
    /// Where it begins, in its owner's addresses.
    pub address: u64,
    /// Shows that it may be accessed.
    pub key: u32,
}

// SAFETY: the region belongs to this value, and libibverbs lets any thread use it.
unsafe impl Send for Region {}
// SAFETY: through `&Region` only numbers are read that do not change.
unsafe impl Sync for Region {}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({})", self.opened.port)
    }
}

impl Region {
    /// Registers memory.
    ///
    /// # Safety
    ///
    /// The `bytes` from `start` on have to stay mapped until the region is dropped. While they are
    /// registered the device and, as far as `access` allows, the peer change them: nothing may rely
    /// on their staying as they are.
    pub unsafe fn register(
        domain: &Domain,
        start: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<Self, VerbsError> {
        let none = ibv::ibv_access_flags(0);
        let (local, read, write) = (
            ibv::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE,
            ibv::ibv_access_flags::IBV_ACCESS_REMOTE_READ,
            ibv::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE,
        );
        let flags = match access {
            Access::Own => none | local,
            Access::Read => none | read,
            Access::ReadWrite => local | read | write,
        };
        let opened = domain.0.clone();
        let place = start.as_ptr().cast();
        let flags = i32::try_from(flags.0).unwrap_or(0);
        // SAFETY: the domain is there; the caller vouches for the memory.
        let region = unsafe { ibv::ibv_reg_mr(opened.domain.as_ptr(), place, bytes, flags) };
        let Some(region) = NonNull::new(region) else {
            let source = io::Error::last_os_error();
            let what = match source.raw_os_error() {
                Some(libc::ENOMEM) => {
                    "memory (is the limit of locked memory too low? LimitMEMLOCK=)"
                }
                _ => "memory",
            };
            return Err(refused(&opened.port, what, source));
        };
        Ok(Self { region, opened })
    }

    /// As the peer names it.
    pub fn remote(&self) -> Remote {
        // SAFETY: the region is registered for as long as `self` lives.
        let region = unsafe { self.region.as_ref() };
        Remote {
            address: region.addr as u64,
            key: region.rkey,
        }
    }

    /// Whether it was registered in this domain.
    pub fn is_of(&self, domain: &Domain) -> bool {
        Arc::ptr_eq(&self.opened, &domain.0)
    }

    /// As queue pairs of this side name it.
    pub(super) fn local_key(&self) -> u32 {
        // SAFETY: the region is registered for as long as `self` lives.
        unsafe { self.region.as_ref() }.lkey
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the region is ours and not used any more. What is in flight to it fails.
        let errno = unsafe { ibv::ibv_dereg_mr(self.region.as_ptr()) };
        // Its pages are the kernel's own then, and nobody else's, until the process ends.
        debug_assert_eq!(errno, 0, "an own region can be given up");
    }
}

/// Registered memory of its own.
pub struct Buffer {
    // Dropped before the mapping is.
    region: Option<Region>,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to this value and is bound to no thread.
unsafe impl Send for Buffer {}
// SAFETY: through `&Buffer` no byte of it is accessed.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Maps and registers so much.
    pub(super) fn new(domain: &Domain, bytes: usize, access: Access) -> Result<Self, VerbsError> {
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory of
        // ours; the result is checked before it is used.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        let no_memory = || refused(domain.port(), "a buffer", io::Error::last_os_error());
        if base == libc::MAP_FAILED {
            return Err(no_memory());
        }
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(no_memory)?;
        let mut buffer = Self {
            region: None,
            base,
            bytes,
        };
        // SAFETY: the range is exactly our own mapping. What passes here has no place in a core dump.
        unsafe { libc::madvise(base.as_ptr().cast(), bytes, libc::MADV_DONTDUMP) };
        // SAFETY: the mapping lives as long as `buffer`, which drops the region first; its bytes are
        // lent out only where the device does not write (see `slice`).
        let region = unsafe { Region::register(domain, base, bytes, access) }?;
        buffer.region = Some(region);
        Ok(buffer)
    }

    /// A few bytes that a peer may read.
    pub fn holding(domain: &Domain, content: &[u8]) -> Result<Self, VerbsError> {
        let mut buffer = Self::new(domain, content.len(), Access::Read)?;
        // SAFETY: no device writes into it, for its peer may not.
        unsafe { buffer.slice(0, content.len()) }.copy_from_slice(content);
        Ok(buffer)
    }

    /// As the peer names it.
    pub fn remote(&self) -> Remote {
        self.region().remote()
    }

    pub(super) fn region(&self) -> &Region {
        self.region.as_ref().expect("registered when it was made")
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where a place of it is, for the device.
    pub(super) fn address(&self, offset: usize) -> u64 {
        self.base.as_ptr() as u64 + offset as u64
    }

    /// A part of it.
    ///
    /// # Safety
    ///
    /// No transfer in flight writes there.
    pub(super) unsafe fn slice(&mut self, offset: usize, bytes: usize) -> &mut [u8] {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "it lies within");
        // SAFETY: the offset lies within the mapping, as asserted.
        let start = unsafe { self.base.as_ptr().add(offset) };
        // SAFETY: the range is mapped and initialised, for it was zeros at first; `&mut self` keeps
        // other references away, and the caller the device.
        unsafe { std::slice::from_raw_parts_mut(start, bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.region = None;
        // SAFETY: the mapping is ours, and no device knows of it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

impl From<u32> for Failure {
    /// By `enum ibv_wc_status`.
    fn from(status: u32) -> Self {
        match status {
            ibv::ibv_wc_status::IBV_WC_REM_ACCESS_ERR => Self::RemoteAccess,
            ibv::ibv_wc_status::IBV_WC_RETRY_EXC_ERR
            | ibv::ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR => Self::Unanswered,
            ibv::ibv_wc_status::IBV_WC_WR_FLUSH_ERR => Self::Flushed,
            other => Self::Status(other),
        }
    }
}
