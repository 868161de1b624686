//! Settings of the host that paging depends on: shared-memory THP.

use std::path::Path;

use outram_wire::shmem_thp::{HugeShmem, SETTINGS, Unreadable, find};

use super::Refusal;

/// Refuses unless shared-memory THP is off in every size.
pub(super) fn check_shmem_thp() -> Result<(), Refusal> {
    let found = find(Path::new(SETTINGS))
        .map_err(|Unreadable { path, source }| Refusal::Unreadable { path, source })?;
    match found.into_iter().next() {
        Some(HugeShmem { path, value }) => Err(Refusal::SharedThp {
            path,
            setting: value,
        }),
        None => Ok(()),
    }
}
