//! How much of a guest's memory is moved at a time.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::units::{PAGE_SIZE, PageSize, UnitError, format_size, parse_size};

/// Most bytes that are moved at a time: what an evictor takes out of a guest's memory in one go.
pub const MAX_GRANULARITY_BYTES: u32 = 256 << 10;

/// Bytes of guest memory that are fetched and evicted together, aligned to themselves: a power of two
/// from one page to [`MAX_GRANULARITY_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Granularity(u32);

/// Why a granularity was not understood.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum GranularityError {
    /// No size.
    #[error(transparent)]
    Size(#[from] UnitError),
    /// A size that nothing can be moved in.
    #[error(
        "'{0}' is not a granularity: expected a power of two from {least} to {most}, such as 64KiB",
        least = format_size(PAGE_SIZE as u64), most = format_size(MAX_GRANULARITY_BYTES.into())
    )]
    Bytes(String),
    /// A guest of huge pages has no other granularity than its pages.
    #[error(
        "a guest with pages of {0} is moved page by page: leave the granularity at {least}, or give the guest base pages",
        least = Granularity::default()
    )]
    HugePages(PageSize),
}

impl Granularity {
    /// In bytes.
    pub const fn bytes(self) -> u64 {
        self.0 as u64
    }

    /// In pages of a size, at least one; refused where the guest has pages that are larger, and it was
    /// set nevertheless.
    pub fn pages(self, size: PageSize) -> Result<u32, GranularityError> {
        if size.is_huge() && self != Self::default() {
            return Err(GranularityError::HugePages(size));
        }
        Ok(size.pages_in(self.bytes(), 1) as u32)
    }
}

impl Default for Granularity {
    /// Page by page.
    fn default() -> Self {
        Self(PAGE_SIZE as u32)
    }
}

impl From<Granularity> for u32 {
    fn from(granularity: Granularity) -> u32 {
        granularity.0
    }
}

impl TryFrom<u32> for Granularity {
    type Error = GranularityError;

    fn try_from(bytes: u32) -> Result<Self, GranularityError> {
        let is_one =
            bytes.is_power_of_two() && (PAGE_SIZE as u32..=MAX_GRANULARITY_BYTES).contains(&bytes);
        match is_one {
            true => Ok(Self(bytes)),
            false => Err(GranularityError::Bytes(bytes.to_string())),
        }
    }
}

impl FromStr for Granularity {
    type Err = GranularityError;

    fn from_str(text: &str) -> Result<Self, GranularityError> {
        u32::try_from(parse_size(text)?)
            .ok()
            .and_then(|bytes| bytes.try_into().ok())
            .ok_or_else(|| GranularityError::Bytes(text.to_owned()))
    }
}

impl fmt::Display for Granularity {
    /// Without a space: as it is read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}KiB", self.0 >> 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_from_a_page_to_a_run_are_read_and_written() {
        for (text, bytes) in [("4KiB", 4096), ("65536", 65536), ("256k", 262_144)] {
            let read: Granularity = text.parse().expect(text);
            assert_eq!(read.bytes(), bytes);
            assert_eq!(read.to_string().parse(), Ok(read));
        }
        for text in ["0", "2KiB", "12KiB", "512KiB", "4GiB", "8589934592"] {
            let refused = text.parse::<Granularity>();
            assert_eq!(refused, Err(GranularityError::Bytes(text.to_owned())));
        }
        assert!(matches!(
            "much".parse::<Granularity>(),
            Err(GranularityError::Size(_))
        ));
        assert!(serde_json::from_str::<Granularity>("12288").is_err());
    }

    #[test]
    fn huge_pages_are_moved_one_by_one() {
        let large: Granularity = "64KiB".parse().expect("one");
        assert_eq!(large.pages(PageSize::BASE), Ok(16));
        assert_eq!(Granularity::default().pages(PageSize::HUGE), Ok(1));
        assert!(large.pages(PageSize::HUGE).is_err());
    }
}
