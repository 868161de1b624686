//! Whether what leaves a host is sealed.

use crate::words::words;

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

words!(
    Seal { On = "on", Off = "off" },
    SealError = "does not say whether to seal pages: expected 'on' or 'off'"
);
