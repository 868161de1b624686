//! Why a guest's RAM must not be paged, and the cure.

use std::io;
use std::path::PathBuf;

use crate::handover::powers::ErrandError;

/// A refusal. Its message says what was found and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The VMM ended.
    #[error("the VMM (process {pid}) is gone")]
    Gone {
        /// Process.
        pid: i32,
    },
    /// What the supervisor, which looks for us, told.
    #[error("{0}")]
    Told(String),
    /// A file of `/proc` or `/sys` could not be read.
    #[error("{path} cannot be read; the backend must run as root on the VMM's host", path = .path.display())]
    Unreadable {
        /// What was read.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Whether another process maps guest RAM cannot be told.
    #[error(
        "whether process {0} maps the guest's RAM cannot be told, for its memory map cannot be read: a thread of it \
         is stuck in the kernel, in a file system that does not answer perhaps (/proc/{0}/stack): end that process"
    )]
    Stuck(i32),
    /// There is RAM that is not a shared memfd.
    #[error(
        "the guest's memory is private ({0}): give the domain \
         <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>"
    )]
    PrivateMemory(String),
    /// A memfd is mapped more than once or only in part: not how QEMU maps RAM.
    #[error(
        "the VMM maps guest RAM in an unknown way: {0}; please report this with its command line"
    )]
    UnknownLayout(String),
    /// A backend of foreign data cannot be told from RAM.
    #[error(
        "memory backend '{0}' belongs to an ivshmem, NVDIMM, virtio-pmem or CXL device and has the \
         size of a block of guest RAM, so that they cannot be told apart: use <source> files for such \
         devices, as libvirt does by itself, or another size"
    )]
    AmbiguousBackend(String),
    /// Huge pages too large to be moved.
    #[error(
        "memory backend '{0}' has pages of {1}: pages of 2 MiB can be paged; change <page size=…/> in \
         <hugepages> to size='2048' unit='KiB', or remove <hugepages>"
    )]
    HugePages(String, String),
    /// Pages of several sizes.
    #[error(
        "memory backend '{0}' has huge pages and '{1}' has not: all of a guest's memory must have pages \
         of one size; let <hugepages> cover all NUMA cells and memory devices, or remove it"
    )]
    MixedPages(String, String),
    /// RAM is populated at start.
    #[error(
        "memory backend '{0}' is preallocated, which contradicts paging: remove \
         <allocation mode='immediate'/> from <memoryBacking> (or prealloc=on)"
    )]
    Preallocated(String),
    /// RAM is locked.
    #[error(
        "the guest's memory is locked, so that it cannot be evicted: remove <locked/> from \
         <memoryBacking> (or mem-lock=on)"
    )]
    Locked,
    /// The guest's memory is encrypted.
    #[error(
        "the domain uses launch security ({0}), whose memory cannot be paged: remove <launchSecurity>"
    )]
    LaunchSecurity(String),
    /// Devices do DMA into RAM by themselves.
    #[error(
        "the domain has a device that accesses memory by itself ({0}): VFIO, vDPA and vhost-scsi pin \
         guest RAM; remove the <hostdev>, <interface type='hostdev'|'vdpa'> or vhost-scsi device"
    )]
    PassThrough(String),
    /// A disk bypasses the page cache.
    #[error(
        "disk {0} is opened with O_DIRECT, so that reads may land in pages that were evicted \
         meanwhile: use cache='writeback' instead of 'none' or 'directsync', and not io='native'"
    )]
    DirectDisk(String),
    /// Somebody else maps guest RAM.
    #[error(
        "guest RAM is shared with {0}, whose accesses cannot be tracked: remove virtiofs and other \
         vhost-user devices from the domain"
    )]
    OtherMapper(String),
    /// A virtio-gpu maps guest RAM as blobs.
    #[error(
        "device {0} uses blob resources, which pin guest RAM: set blob='no' on the video device"
    )]
    GpuBlob(String),
    /// A nested hypervisor pins pages.
    #[error(
        "the guest may run virtual machines by nested VMX, whose pages are pinned unseen: add \
         <cpu …><feature policy='disable' name='vmx'/></cpu>"
    )]
    NestedVmx,
    /// Memory errors are to be handed to a guest that is emulated.
    #[error(
        "lost-pages='poison' ends a guest that is emulated, for its QEMU has nobody to hand a memory \
         error to: use <domain type='kvm'>, or 'outram attach --lost-pages stop'"
    )]
    NotKvm,
    /// Guest RAM is partly huge pages from before shared-memory THP was turned off.
    #[error(
        "guest RAM '{name}' holds huge pages (at {offset:#x}) from a time when shared-memory huge pages \
         were on, and punching a part of one destroys data: shut the guest down and start it again"
    )]
    LargeFolio {
        /// The memory backend's id.
        name: String,
        /// Where in it.
        offset: u64,
    },
    /// Shared-memory THP is on.
    #[error(
        "shared-memory huge pages are on ({path} is '{setting}'), and punching a part of one destroys \
         data: echo never > {path}",
        path = .path.display()
    )]
    SharedThp {
        /// The setting's file.
        path: PathBuf,
        /// What it is set to.
        setting: String,
    },
}

impl From<ErrandError> for Refusal {
    fn from(error: ErrandError) -> Self {
        Self::Told(outram_wire::causes::with_causes(&error))
    }
}
