//! What a dump of a guest's memory holds: ELF files as `virsh dump --memory-only` writes them.

#[expect(dead_code, reason = "the guest's checker needs more of it")]
#[path = "../../../images/checker/src/pattern.rs"]
mod pattern;

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use pattern::{PAGE_BYTES, Page};

/// Type of a segment with memory (elf(5)).
const PT_LOAD: u32 = 1;

/// Bytes of a program header of 64-bit ELF files.
const PROGRAM_HEADER_BYTES: usize = 56;

/// How many of the checker's pages, of which each has its first contents, a dump holds.
pub(crate) fn count_pages_of_version_1(dump: &Path, pages: u64) -> Result<u64> {
    let mut contents: HashMap<[u8; 64], Vec<u64>> = HashMap::new();
    for number in 0..pages {
        let start = page(number).0[..64].try_into()?;
        contents.entry(start).or_default().push(number);
    }
    let mut file = File::open(dump)?;
    let mut memory = Page([0; PAGE_BYTES]);
    let mut found = 0;
    for (offset, bytes) in memory_segments(&mut file)? {
        file.seek(SeekFrom::Start(offset))?;
        for _ in 0..bytes / PAGE_BYTES as u64 {
            file.read_exact(&mut memory.0).context("the dump is cut")?;
            let start: [u8; 64] = memory.0[..64].try_into()?;
            let Some(numbers) = contents.get_mut(&start) else {
                continue;
            };
            // Pages that hold only zeros are alike: each counts once.
            let same = numbers
                .iter()
                .position(|number| page(*number).0 == memory.0);
            if let Some(at) = same {
                numbers.swap_remove(at);
                found += 1;
            }
        }
    }
    Ok(found)
}

fn page(number: u64) -> Page {
    let mut page = Page([0; PAGE_BYTES]);
    pattern::write(&mut page, number, 1);
    page
}

/// Offset and length of each segment of memory in an ELF file.
fn memory_segments(file: &mut File) -> Result<Vec<(u64, u64)>> {
    let mut header = [0; 64];
    file.read_exact(&mut header)?;
    ensure!(header.starts_with(b"\x7fELF\x02"), "a 64-bit ELF file");
    let at = u64::from_le_bytes(header[32..40].try_into()?);
    let count = u16::from_le_bytes(header[56..58].try_into()?);
    let mut table = vec![0; usize::from(count) * PROGRAM_HEADER_BYTES];
    file.seek(SeekFrom::Start(at))?;
    file.read_exact(&mut table)?;
    let mut segments = Vec::new();
    for entry in table.chunks_exact(PROGRAM_HEADER_BYTES) {
        if u32::from_le_bytes(entry[..4].try_into()?) == PT_LOAD {
            let offset = u64::from_le_bytes(entry[8..16].try_into()?);
            segments.push((offset, u64::from_le_bytes(entry[32..40].try_into()?)));
        }
    }
    Ok(segments)
}
