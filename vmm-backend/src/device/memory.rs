//! What the device asks of the pager.

use outram_wire::units::PageSize;

use crate::handover::MemfdId;
use crate::interrupt::Interrupt;

/// A range of guest RAM, addressed as the pager knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostRange {
    /// The memfd.
    pub memfd: MemfdId,
    /// Offset in it, in bytes; need not be page-aligned.
    pub file_offset: u64,
    /// Length in bytes; never 0.
    pub length: u64,
}

/// A region of the front end's memory table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableRegion {
    /// Identity of the descriptor that came with it, by `fstat`.
    pub memfd: MemfdId,
    /// Offset of the region in the memfd, in bytes.
    pub file_offset: u64,
    /// Guest-physical address.
    pub guest_address: u64,
    /// Address in the VMM.
    pub vmm_address: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Keeps pages resident until dropped.
pub trait Pinned: Send + Sync {}

/// Why pages could not be pinned, or a memory table not be confirmed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    /// The guest is ending; nothing is brought in any more.
    #[error("the guest is ending")]
    Ending,
    /// The caller wanted it ended.
    #[error("the request was interrupted")]
    Interrupted,
    /// A page is lost for good.
    #[error("a page of the range is lost")]
    Lost,
    /// More pages than may be pinned at once.
    #[error("{asked} pages are more than the {most} that may be pinned at once")]
    TooMany {
        /// Pages asked for.
        asked: usize,
        /// Pages allowed.
        most: usize,
    },
    /// The range is no guest RAM that the pager knows.
    #[error("{0}")]
    Unknown(String),
}

/// Guest RAM as the device needs it. Implemented by the pager.
pub trait GuestMemory: Send + Sync {
    /// Brings the pages of these ranges in, marks them dirty first if `write`, and keeps them
    /// resident until the guard drops. All or nothing. Blocks until then or until interrupted; fails
    /// if the guest is ending or a page is lost. Ranges may share a page.
    fn pin(
        &self,
        ranges: &[HostRange],
        write: bool,
        interrupt: &Interrupt<'_>,
    ) -> Result<Box<dyn Pinned>, PinError>;

    /// The front end told its memory table: the pager confirms that the regions are guest RAM it
    /// knows, and learns their guest-physical addresses. An error cuts the connection.
    fn confirm(&self, regions: &[TableRegion]) -> Result<(), PinError>;

    /// Whether memory that the front end tells of is none of the guest's RAM: an ivshmem's, an NVDIMM's. The
    /// front end tells of all that has a descriptor.
    fn is_foreign(&self, memfd: MemfdId) -> bool;

    /// Size of the pages that are pinned and mapped.
    fn page_size(&self) -> PageSize;

    /// Most pages of one [`pin`](Self::pin); at least 1.
    fn max_pages_per_pin(&self) -> usize;
}
