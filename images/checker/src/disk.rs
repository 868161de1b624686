//! Reads and writes of the guest's first virtio disk, straight into pages under test.
//!
//! The buffers are pages that the pager has most likely evicted, and direct I/O keeps the guest's
//! page cache out of it: so the device has to bring pages in before it touches them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSliceMut, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::Ordering;

use crate::arena::{Random, Region, Tally};
use crate::pattern::{PAGE_BYTES, Page};

const DEVICE: &str = "/dev/vda";

/// `O_DIRECT` of x86-64 Linux (`asm-generic/fcntl.h`).
const O_DIRECT: i32 = 0o40000;

/// Most pages one read covers: 64 KiB, several segments in one request.
const MAX_PAGES_PER_READ: usize = 16;

/// What the device calls itself, as the guest's kernel read it.
pub(crate) fn identity() -> io::Result<String> {
    let serial = fs::read_to_string("/sys/block/vda/serial")?;
    Ok(serial.trim_end_matches(['\n', '\0']).to_owned())
}

/// Reads `count` times at random and compares with a first plain reading. Returns the fields of a
/// report line.
pub(crate) fn read(region: &mut Region, count: usize, tally: &Tally) -> io::Result<String> {
    let reference = fs::read(DEVICE)?;
    let mut device = OpenOptions::new()
        .read(true)
        .custom_flags(O_DIRECT)
        .open(DEVICE)?;
    let pages_on_disk = reference.len() / PAGE_BYTES;
    let mut random = Random::new(reference.len() as u64);
    let (mut errors, mut mismatches) = (0, 0);
    for _ in 0..count {
        let pages = (1 + random.below(MAX_PAGES_PER_READ)).min(pages_on_disk);
        let from = random.below(pages_on_disk - pages + 1) * PAGE_BYTES;
        let at = region.random_page();
        let buffer = region.borrow_pages(at, pages);
        let (length, taken) = (buffer.len() * PAGE_BYTES, buffer.len());
        match read_at(&mut device, from as u64, buffer) {
            Err(error) => {
                errors += 1;
                println!("DISK-ERROR offset={from} length={length} error={error}");
            }
            Ok(()) => {
                let same = buffer
                    .iter()
                    .zip(reference[from..].chunks(PAGE_BYTES))
                    .all(|(page, expected)| page.0 == expected);
                mismatches += u64::from(!same);
            }
        }
        for index in at..at + taken {
            region.rewrite(index, tally);
        }
    }
    tally.checked.fetch_add(count as u64, Ordering::Relaxed);
    Ok(format!(
        "bytes={} reads={count} errors={errors} mismatches={mismatches}",
        reference.len()
    ))
}

fn read_at(device: &mut File, offset: u64, pages: &mut [Page]) -> io::Result<()> {
    device.seek(SeekFrom::Start(offset))?;
    let expected = pages.len() * PAGE_BYTES;
    let mut slices: Vec<IoSliceMut<'_>> = pages
        .iter_mut()
        .map(|page| IoSliceMut::new(&mut page.0))
        .collect();
    let read = device.read_vectored(&mut slices)?;
    if read == expected {
        Ok(())
    } else {
        Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            format!("read {read} bytes of {expected}"),
        ))
    }
}

/// Tries to write the first page; a read-only disk must refuse it.
pub(crate) fn write() -> io::Result<String> {
    let attempt = OpenOptions::new()
        .write(true)
        .open(DEVICE)
        .and_then(|mut device| {
            device.write_all(&[0xa5; PAGE_BYTES])?;
            device.sync_all()
        });
    let read_only = fs::read_to_string("/sys/block/vda/ro")?;
    let outcome = match attempt {
        Ok(()) => "written".to_owned(),
        Err(error) => format!("refused error={}", error.kind()).replace(' ', "_"),
    };
    Ok(format!("outcome={outcome} ro={}", read_only.trim()))
}
