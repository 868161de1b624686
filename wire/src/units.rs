//! Sizes, ratios and identities, with only the arithmetic that makes sense for them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Bytes in x86-64's base page: the unit of paging, but for guests of huge pages ([`PageSize`]).
pub const PAGE_SIZE: usize = 4096;

/// Size of a guest's pages: what is moved, counted and checked as one. All of a guest's RAM has
/// pages of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct PageSize(u32);

impl From<PageSize> for u32 {
    fn from(size: PageSize) -> u32 {
        size.0
    }
}

impl TryFrom<u32> for PageSize {
    type Error = UnitError;

    fn try_from(bytes: u32) -> Result<Self, UnitError> {
        Self::new(bytes).ok_or_else(|| UnitError::PageSize(bytes.to_string()))
    }
}

impl PageSize {
    /// Base pages: of memfds and other files on tmpfs.
    pub const BASE: Self = Self(PAGE_SIZE as u32);
    /// Huge pages of 2 MiB: of memfds and files on hugetlbfs.
    pub const HUGE: Self = Self(2 << 20);

    /// A size that is a power of two and at least that of a base page.
    pub const fn new(bytes: u32) -> Option<Self> {
        if bytes.is_power_of_two() && bytes >= PAGE_SIZE as u32 {
            Some(Self(bytes))
        } else {
            None
        }
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        self.0 as u64
    }

    /// The size in bytes, as the length of a slice.
    pub const fn length(self) -> usize {
        self.0 as usize
    }

    /// Whether these are huge pages.
    pub const fn is_huge(self) -> bool {
        self.0 > PAGE_SIZE as u32
    }

    /// How many pages `bytes` are, at least `least`: for what is bounded in bytes but has to work
    /// with few large pages as well.
    pub const fn pages_in(self, bytes: u64, least: u64) -> u64 {
        let pages = bytes / self.bytes();
        if pages < least { least } else { pages }
    }
}

impl Default for PageSize {
    fn default() -> Self {
        Self::BASE
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format_size(self.bytes()))
    }
}

impl FromStr for PageSize {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let bytes = parse_size(text)?;
        [Self::BASE, Self::HUGE]
            .into_iter()
            .find(|size| size.bytes() == bytes)
            .ok_or_else(|| UnitError::PageSize(text.to_owned()))
    }
}

/// Identity of a guest: its libvirt UUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VmId(pub uuid::Uuid);

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for VmId {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        uuid::Uuid::parse_str(text)
            .map(VmId)
            .map_err(|_| UnitError::Uuid(text.to_owned()))
    }
}

/// Why a size, ratio or identity was not understood.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum UnitError {
    /// The text is no size.
    #[error(
        "'{0}' is not a size: expected a whole number with an optional unit, such as 512MiB, 2G or 1073741824"
    )]
    Size(String),
    /// The size does not fit 64 bits.
    #[error("'{0}' is too large a size: at most 16 EiB fit")]
    SizeOverflow(String),
    /// The text is no ratio in (0, 1].
    #[error("'{0}' is not a local ratio: expected a number above 0 and at most 1, such as 0.5")]
    Ratio(String),
    /// Not a size of pages that can be moved.
    #[error("'{0}' is not a page size that Outram pages: expected 4KiB or 2MiB")]
    PageSize(String),
    /// The text is no UUID.
    #[error("'{0}' is not a UUID: expected the form 123e4567-e89b-12d3-a456-426614174000")]
    Uuid(String),
}

/// Parses a size in bytes. `K`, `M`, `G`, `T` and `KiB`… are binary (powers of 1024), `KB`… decimal,
/// as libvirt and virsh read them; no unit means bytes.
pub fn parse_size(text: &str) -> Result<u64, UnitError> {
    let bad = || UnitError::Size(text.to_owned());
    let trimmed = text.trim();
    let digits = trimmed.len()
        - trimmed
            .trim_start_matches(|c: char| c.is_ascii_digit())
            .len();
    let (number, unit) = trimmed.split_at(digits);
    if number.is_empty() {
        return Err(bad());
    }
    let number: u64 = number
        .parse()
        .map_err(|_| UnitError::SizeOverflow(text.to_owned()))?;
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" | "byte" | "bytes" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(bad()),
    };
    number
        .checked_mul(factor)
        .ok_or_else(|| UnitError::SizeOverflow(text.to_owned()))
}

/// A size as people read it: the largest binary unit that keeps it at or above 1, one decimal.
pub fn format_size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value.fract() == 0.0 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// The share of a guest's RAM that may cost host memory, in (0, 1].
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct LocalRatio(f64);

impl LocalRatio {
    /// A ratio in (0, 1]; anything else, NaN among it, is refused.
    pub fn new(ratio: f64) -> Result<Self, UnitError> {
        if ratio > 0.0 && ratio <= 1.0 {
            Ok(Self(ratio))
        } else {
            Err(UnitError::Ratio(ratio.to_string()))
        }
    }

    /// The ratio as a number.
    pub fn get(self) -> f64 {
        self.0
    }

    /// This share of `ram_bytes`, rounded down to whole pages.
    pub fn of(self, ram_bytes: u64) -> u64 {
        let bytes = (ram_bytes as f64 * self.0) as u64;
        bytes.min(ram_bytes) / PAGE_SIZE as u64 * PAGE_SIZE as u64
    }
}

impl TryFrom<f64> for LocalRatio {
    type Error = UnitError;

    fn try_from(ratio: f64) -> Result<Self, UnitError> {
        Self::new(ratio)
    }
}

impl From<LocalRatio> for f64 {
    fn from(ratio: LocalRatio) -> f64 {
        ratio.0
    }
}

impl FromStr for LocalRatio {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        text.trim()
            .parse()
            .map_err(|_| UnitError::Ratio(text.to_owned()))
            .and_then(|ratio| Self::new(ratio).map_err(|_| UnitError::Ratio(text.to_owned())))
    }
}

impl fmt::Display for LocalRatio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a guest may cost its host: a share of its RAM, or bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// A share of the guest's RAM; follows hot-plugged memory.
    LocalRatio(LocalRatio),
    /// Bytes of host memory.
    LocalBytes(u64),
}

impl Limit {
    /// The limit in bytes for a guest of `ram_bytes`: whole pages, never above its RAM.
    pub fn bytes(self, ram_bytes: u64) -> u64 {
        match self {
            Limit::LocalRatio(ratio) => ratio.of(ram_bytes),
            Limit::LocalBytes(bytes) => bytes.min(ram_bytes) / PAGE_SIZE as u64 * PAGE_SIZE as u64,
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::LocalRatio(ratio) => write!(f, "ratio {ratio}"),
            Limit::LocalBytes(bytes) => f.write_str(&format_size(*bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_libvirt_reads_them() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64k", 65_536),
            ("64 KiB", 65_536),
            ("1G", 1 << 30),
            ("2TiB", 2 << 40),
            ("5MB", 5_000_000),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn only_sizes_that_can_be_moved_are_page_sizes() {
        assert_eq!("4096".parse(), Ok(PageSize::BASE));
        assert_eq!("2MiB".parse(), Ok(PageSize::HUGE));
        assert_eq!(PageSize::HUGE.to_string(), "2 MiB");
        for text in ["1GiB", "64KiB", "0"] {
            let refused = PageSize::from_str(text);
            assert_eq!(refused, Err(UnitError::PageSize(text.to_owned())));
        }
        assert_eq!(PageSize::new(3 << 20), None);
        assert_eq!(serde_json::from_str("4096").ok(), Some(PageSize::BASE));
        for bytes in ["0", "1", "4095", "6144"] {
            assert!(serde_json::from_str::<PageSize>(bytes).is_err(), "{bytes}");
        }
        assert_eq!(PageSize::HUGE.pages_in(1 << 20, 2), 2);
    }

    #[test]
    fn nonsense_is_no_size() {
        for text in ["", "G", "-1", "1.5G", "1X", "0x10"] {
            assert!(
                matches!(parse_size(text), Err(UnitError::Size(_))),
                "{text}"
            );
        }
        assert!(matches!(
            parse_size("99999999999T"),
            Err(UnitError::SizeOverflow(_))
        ));
        assert!(matches!(
            parse_size("99999999999999999999"),
            Err(UnitError::SizeOverflow(_))
        ));
    }

    #[test]
    fn ratios_outside_their_range_are_refused() {
        for text in ["0", "-0.1", "1.01", "NaN", "inf", "half", ""] {
            assert!(LocalRatio::from_str(text).is_err(), "{text}");
        }
        assert_eq!(
            LocalRatio::from_str("0.5").map(|r| r.of(1 << 30)),
            Ok(1 << 29)
        );
    }

    #[test]
    fn a_limit_never_exceeds_the_ram() {
        assert_eq!(Limit::LocalBytes(1 << 40).bytes(1 << 30), 1 << 30);
        assert_eq!(Limit::LocalBytes(4097).bytes(1 << 30), 4096);
    }
}
