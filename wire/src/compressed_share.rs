//! How much of a guest's limit may hold pages that are compressed.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::units::PageSize;

/// Thousandths that the largest share has: a guest keeps at least half of its limit for pages that it can
/// use as they are.
const MOST: u16 = 500;

/// The share of a guest's limit that may hold evicted pages, compressed; 0, the default, keeps none. Told in
/// thousandths.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(try_from = "f64", into = "f64")]
pub struct CompressedShare(u16);

/// Why a share was not understood.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum ShareError {
    /// No number, or one out of bounds.
    #[error(
        "'{0}' is no share of compressed memory: expected a number from 0, for none, to 0.5, such as 0.2"
    )]
    Number(String),
    /// A guest of huge pages has none.
    #[error(
        "pages of {0} are not kept compressed: leave the compressed share at 0, or give the guest base pages"
    )]
    HugePages(PageSize),
}

impl CompressedShare {
    /// Refuses a share that was set for a guest of huge pages.
    pub fn check(self, size: PageSize) -> Result<(), ShareError> {
        match size.is_huge() && self != Self::default() {
            true => Err(ShareError::HugePages(size)),
            false => Ok(()),
        }
    }

    /// This share of so many pages, rounded down.
    pub fn of(self, pages: u64) -> u64 {
        pages * u64::from(self.0) / 1000
    }
}

impl TryFrom<f64> for CompressedShare {
    type Error = ShareError;

    fn try_from(share: f64) -> Result<Self, ShareError> {
        // NaN is in no range.
        match (0.0..=f64::from(MOST) / 1000.0).contains(&share) {
            true => Ok(Self((share * 1000.0).round() as u16)),
            false => Err(ShareError::Number(share.to_string())),
        }
    }
}

impl From<CompressedShare> for f64 {
    fn from(share: CompressedShare) -> f64 {
        f64::from(share.0) / 1000.0
    }
}

impl FromStr for CompressedShare {
    type Err = ShareError;

    fn from_str(text: &str) -> Result<Self, ShareError> {
        let number: Option<f64> = text.trim().parse().ok();
        number
            .and_then(|number| number.try_into().ok())
            .ok_or_else(|| ShareError::Number(text.to_owned()))
    }
}

impl fmt::Display for CompressedShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f64::from(*self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_up_to_a_half_are_read_and_written() {
        for (text, pages) in [("0", 0), ("0.001", 1), ("0.25", 250), (" 0.5 ", 500)] {
            let share: CompressedShare = text.parse().expect(text);
            assert_eq!(share.of(1000), pages, "{text}");
            assert_eq!(share.to_string(), text.trim());
            let json = serde_json::to_string(&share).expect("a number");
            assert_eq!(serde_json::from_str(&json).ok(), Some(share));
        }
        for text in ["-0.1", "0.51", "1", "25%", "NaN", "inf", ""] {
            let refused = CompressedShare::from_str(text).expect_err(text).to_string();
            assert!(refused.contains(&format!("'{text}'")) && refused.contains("0.5"));
        }
        assert!(serde_json::from_str::<CompressedShare>("0.6").is_err());
    }

    #[test]
    fn huge_pages_are_not_compressed() {
        let share = CompressedShare::try_from(0.2).expect("within bounds");
        assert_eq!(share.check(PageSize::BASE), Ok(()));
        assert!(share.check(PageSize::HUGE).is_err());
        assert_eq!(CompressedShare::default().check(PageSize::HUGE), Ok(()));
    }
}
