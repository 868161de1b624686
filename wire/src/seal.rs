//! Whether what leaves a host is sealed.

use std::fmt;
use std::str::FromStr;

/// Whether a guest's pages, and the blocks of its far-memory disk, are encrypted before they leave
/// their host. Either way nothing that was changed is believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Seal {
    /// Encrypted and authenticated: servers and wires see nothing of the guest's memory.
    #[default]
    On,
    /// Authenticated only, for wires and servers that may see the guest's memory.
    Off,
}

impl Seal {
    const ALL: [Self; 2] = [Self::On, Self::Off];

    fn word(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
        }
    }
}

impl fmt::Display for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// A word that says neither.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' does not say whether to seal pages: expected 'on' or 'off'")]
pub struct SealError(String);

impl FromStr for Seal {
    type Err = SealError;

    fn from_str(text: &str) -> Result<Self, SealError> {
        let known = Self::ALL.into_iter().find(|known| known.word() == text);
        known.ok_or_else(|| SealError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_say_it_and_others_are_told_apart() {
        for seal in Seal::ALL {
            assert_eq!(seal.to_string().parse(), Ok(seal));
        }
        let error = "maybe".parse::<Seal>().expect_err("neither");
        assert!(error.to_string().contains("'maybe'"), "{error}");
    }
}
