//! What becomes of a guest that needs a page which is lost for good.

use crate::words::words;

/// What a guest meets where it uses a page that is lost with its memory server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum LostPages {
    /// The access waits for good: the guest is stopped where it needs the page.
    #[default]
    Stop,
    /// A memory error of the hardware: QEMU hands it to the guest's kernel, which ends the process
    /// whose page it was, or itself. Under KVM only.
    Poison,
}

words!(
    LostPages { Stop = "stop", Poison = "poison" },
    LostPagesError = "does not say what becomes of lost pages: expected 'stop' or 'poison'"
);
