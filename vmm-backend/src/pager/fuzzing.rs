//! See [`crate::fuzzing`]: the files of a process that died.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::path::Path;

use outram_wire::compressed_share::CompressedShare;
use outram_wire::limits::Standing;

use super::guest_ram::GuestRam;
use super::record::Record;
use super::state_dir::{StateDir, written_pages};
use super::takeover::{addresses, check, former_slots, places};
use crate::engine::table::PageTable;
use crate::engine::{PageIndex, SlotId};
use crate::handover::discover::RamBlock;

/// The contents of a state directory's files.
#[derive(Clone, Copy, Debug)]
pub struct LeftBehind<'a> {
    /// `record`
    pub record: &'a [u8],
    /// `groups`
    pub groups: &'a [u8],
    /// `key`
    pub key: &'a [u8],
    /// `table`
    pub table: &'a [u8],
    /// `staging`
    pub staging: &'a [u8],
}

/// Puts the files into `dir` and reads them as a successor does, up to where it asks the kernel about
/// its VMM.
///
/// # Panics
/// Where two places in the table, or two slots, would be the same.
pub fn left_behind(dir: &Path, files: &LeftBehind<'_>) -> io::Result<()> {
    for (name, bytes) in [
        ("record", files.record),
        ("groups", files.groups),
        ("key", files.key),
        ("table", files.table),
        ("staging", files.staging),
    ] {
        fs::write(dir.join(name), bytes)?;
    }
    let state = StateDir::open(dir);
    let records = state.records();
    // Whatever is wrong with one file, the others are looked at as well.
    let _ = (records.vmm(), records.keys().is_ok());
    let Ok(record) = records.record() else {
        return Ok(());
    };
    let _ = (addresses(&record), state.open_staging(record.page_size));
    if check(&records, &record).is_err() {
        return Ok(());
    }
    if let Ok(slots) = former_slots(&records, &record) {
        let mut seen = HashSet::new();
        for group in slots.groups() {
            assert!(seen.insert(group.slab), "two groups in one slab");
            let last = SlotId {
                group: group.number,
                index: group.slots - 1,
            };
            assert!(slots.claim(last) && !slots.claim(last));
            let beyond = group.slots;
            assert!(!slots.claim(SlotId {
                index: beyond,
                ..last
            }));
        }
    }
    if let Ok(table) = state.open_table(record.vm) {
        let written = table.file().and_then(|file| written_pages(&file))?;
        let table = PageTable::new(Box::new(table), &written);
        for page in written.into_iter().flat_map(|run| run.pages()) {
            let _ = table.load(page);
        }
        restore(&record, table.pages())?;
    }
    Ok(())
}

/// Gives the RAM its places, without the RAM.
fn restore(record: &Record, pages: u32) -> io::Result<()> {
    let size = record.page_size;
    let shards = record.userfaultfds.len() as u32;
    let ram = GuestRam::new(pages, shards, size);
    for block in &record.blocks {
        let found = RamBlock {
            name: String::new(),
            memfd: File::open("/dev/null")?,
            id: block.memfd.into(),
            file_offset: block.file_offset,
            hva: block.address,
            length: block.bytes,
            huge_page_bytes: None,
        };
        if !ram.restore(found, &places(block)) {
            return Ok(());
        }
    }
    let mut next = PageIndex(0);
    for region in ram.regions() {
        assert!(region.pages.first >= next, "two regions in one place");
        next = region.pages.end();
        assert!(next.0 <= pages);
        let _ = ram.shard_of(region.pages);
    }
    let standing = Standing {
        limit: record.limit,
        ram_bytes: u64::from(ram.pages()) * size.bytes(),
        page_size: size,
        compressed: CompressedShare::default(),
    };
    let _ = standing.reserve_bytes(record.servers.len());
    Ok(())
}
