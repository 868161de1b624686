//! What of a guest's paging is settable beside its limit, for good or while it runs.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::compressed_share::CompressedShare;
use crate::granularity::Granularity;

/// How a guest's memory is moved; `None` leaves it as it is, or at its default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tuning {
    /// How much of it is moved at a time.
    #[serde(default)]
    pub granularity: Option<Granularity>,
    /// How many threads evict it; one a shard by default.
    #[serde(default)]
    pub workers: Option<Workers>,
    /// How much of it is on its way at a time.
    #[serde(default)]
    pub queue_depth: Option<QueueDepth>,
    /// How much of its limit may hold what left, compressed.
    #[serde(default)]
    pub compressed_share: Option<CompressedShare>,
}

impl Tuning {
    /// These, and from `others` what these leave open.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        Self {
            granularity: self.granularity.or(others.granularity),
            workers: self.workers.or(others.workers),
            queue_depth: self.queue_depth.or(others.queue_depth),
            compressed_share: self.compressed_share.or(others.compressed_share),
        }
    }

    /// What is set, by the names that options and attributes have for it.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, String)> {
        let granularity = self.granularity.as_ref().map(ToString::to_string);
        let workers = self.workers.as_ref().map(ToString::to_string);
        let queue_depth = self.queue_depth.as_ref().map(ToString::to_string);
        let compressed_share = self.compressed_share.as_ref().map(ToString::to_string);
        [
            ("granularity", granularity),
            ("workers", workers),
            ("queue-depth", queue_depth),
            ("compressed-share", compressed_share),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
    }
}

/// Why a number was not understood.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("'{found}' is no {of}: expected a number from 1 to {most}")]
pub struct CountError {
    found: String,
    of: &'static str,
    most: u32,
}

/// A type for numbers from 1 to some most, read and written in decimal.
macro_rules! counts {
    ($(#[$doc:meta])* $name:ident, $of:literal, $most:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "u32", into = "u32")]
        pub struct $name(u32);

        impl $name {
            /// The most that may be set.
            pub const MOST: Self = Self($most);

            /// The number.
            pub const fn get(self) -> u32 {
                self.0
            }

            fn refused(found: impl fmt::Display) -> CountError {
                CountError { found: found.to_string(), of: $of, most: $most }
            }
        }

        impl TryFrom<u32> for $name {
            type Error = CountError;

            fn try_from(number: u32) -> Result<Self, CountError> {
                match (1..=$most).contains(&number) {
                    true => Ok(Self(number)),
                    false => Err(Self::refused(number)),
                }
            }
        }

        impl FromStr for $name {
            type Err = CountError;

            fn from_str(text: &str) -> Result<Self, CountError> {
                let number: Option<u32> = text.parse().ok();
                number
                    .and_then(|number| number.try_into().ok())
                    .ok_or_else(|| Self::refused(text))
            }
        }

        impl From<$name> for u32 {
            fn from(count: $name) -> u32 {
                count.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

counts!(
    /// Threads that evict a guest's memory: copy it out, seal it, and give it back to the host.
    Workers,
    "number of workers",
    64
);

counts!(
    /// How much of a guest's memory is on its way at a time, beside what the guest waits for: so many
    /// batches of 256 KiB that are written back to each memory server, and 32 KiB times as many ahead
    /// of each stream that it reads in order.
    QueueDepth,
    "queue depth",
    64
);

impl Default for QueueDepth {
    /// Enough for networks of a data centre: 2 MiB on their way fill 10 Gbit/s where an answer takes
    /// 1.6 ms.
    fn default() -> Self {
        Self(8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_within_their_bounds_are_read_and_written() {
        for number in [1, 8, 64] {
            let text = number.to_string();
            assert_eq!(text.parse().map(Workers::get), Ok(number));
            assert_eq!(text.parse::<QueueDepth>().map(u32::from), Ok(number));
        }
        for wrong in ["0", "65", "-1", "two", "", "4294967297"] {
            let refused = wrong.parse::<Workers>().expect_err(wrong).to_string();
            assert!(refused.contains(wrong) && refused.contains("1 to 64"));
            assert!(wrong.parse::<QueueDepth>().is_err());
        }
        assert!(serde_json::from_str::<QueueDepth>("0").is_err());
    }

    #[test]
    fn what_is_left_open_is_as_before() {
        let before = Tuning {
            granularity: "64KiB".parse().ok(),
            workers: "3".parse().ok(),
            queue_depth: None,
            compressed_share: "0.2".parse().ok(),
        };
        let change = Tuning {
            workers: "4".parse().ok(),
            ..Tuning::default()
        };
        let named: Vec<_> = change.or(before).named().collect();
        let expected = [
            ("granularity", "64KiB"),
            ("workers", "4"),
            ("compressed-share", "0.2"),
        ];
        assert_eq!(
            named,
            expected.map(|(name, value)| (name, value.to_owned()))
        );
    }
}
