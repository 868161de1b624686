//! How a guest comes to a start that is none: its memory arrives from elsewhere.

use std::fmt;
use std::str::FromStr;

/// Where an incoming guest's memory arrives from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Incoming {
    /// A saved image: the guest ran before, and nothing of it runs now.
    Restore,
    /// Another host, or another QEMU: the guest may run there until the last moment, and goes on
    /// there if this start fails.
    Migration,
}

impl Incoming {
    const ALL: [Self; 2] = [Self::Restore, Self::Migration];

    fn word(self) -> &'static str {
        match self {
            Self::Restore => "restore",
            Self::Migration => "migration",
        }
    }
}

impl fmt::Display for Incoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// A word that names no way to come in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no way that a guest comes in by: expected 'restore' or 'migration'")]
pub struct IncomingError(String);

impl FromStr for Incoming {
    type Err = IncomingError;

    fn from_str(text: &str) -> Result<Self, IncomingError> {
        let known = Self::ALL.into_iter().find(|known| known.word() == text);
        known.ok_or_else(|| IncomingError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_name_the_way_and_others_are_told_apart() {
        for incoming in Incoming::ALL {
            assert_eq!(incoming.to_string().parse(), Ok(incoming));
        }
        let error = "postcopy".parse::<Incoming>().expect_err("no such way");
        assert!(error.to_string().contains("'postcopy'"), "{error}");
    }
}
