//! The guest's far-memory disk in use: as swap, under a file system, and bare.
//!
//! What is written is the checker's pages; the guest's page cache is dropped before they are read
//! back, so that they come from the disk.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::busybox::busybox;
use crate::pattern::{self, PAGE_BYTES, Page};

const DEVICE: &str = "/dev/vda";
const MOUNT: &str = "/mnt";
const PAGES_PER_MIB: u64 = (1 << 20) / PAGE_BYTES as u64;

fn words(error: io::Error) -> String {
    error.to_string()
}

/// Makes the disk a swap device and swaps to it.
pub(crate) fn swap_on() -> Result<String, String> {
    busybox(&["mkswap", DEVICE])?;
    busybox(&["swapon", DEVICE])?;
    swap_in_use()
}

/// How much is swapped out.
pub(crate) fn swap_in_use() -> Result<String, String> {
    let table = fs::read_to_string("/proc/swaps").map_err(words)?;
    let line = table.lines().find(|line| line.starts_with(DEVICE));
    let mut fields = line.ok_or("no swap device")?.split_whitespace().skip(2);
    let mut field = || fields.next().unwrap_or("0").to_owned();
    Ok(format!("SWAP size_kib={} used_kib={}", field(), field()))
}

/// Makes a file system on the disk and mounts it.
pub(crate) fn make_file_system() -> Result<String, String> {
    busybox(&["mke2fs", "-F", "-b", "4096", DEVICE])?;
    fs::create_dir_all(MOUNT).map_err(words)?;
    busybox(&["mount", "-t", "ext4", DEVICE, MOUNT])?;
    Ok("FS mounted".to_owned())
}

fn file(number: u64) -> PathBuf {
    Path::new(MOUNT).join(format!("file-{number}"))
}

/// Writes files of a MiB each.
pub(crate) fn write_files(files: u64, version: u64) -> Result<String, String> {
    for number in 0..files {
        let mut file = File::create(file(number)).map_err(words)?;
        write_pages(&mut file, number * PAGES_PER_MIB, PAGES_PER_MIB, version).map_err(words)?;
        file.sync_all().map_err(words)?;
    }
    Ok(format!("FS files={files}"))
}

/// Compares files with what was written.
pub(crate) fn verify_files(files: u64, version: u64) -> Result<String, String> {
    drop_cache()?;
    let mut mismatches = 0;
    for number in 0..files {
        let mut file = File::open(file(number)).map_err(words)?;
        let first = number * PAGES_PER_MIB;
        mismatches += differing(&mut file, first, PAGES_PER_MIB, version).map_err(words)?;
    }
    Ok(format!("FS files={files} mismatches={mismatches}"))
}

/// Removes files and gives their room back.
pub(crate) fn remove_files(files: u64) -> Result<String, String> {
    for number in 0..files {
        fs::remove_file(file(number)).map_err(words)?;
    }
    busybox(&["sync"])?;
    busybox(&["fstrim", MOUNT])?;
    Ok(format!("FS removed={files}"))
}

/// Writes the disk's first MiBs.
pub(crate) fn write_bare(mib: u64, version: u64) -> Result<String, String> {
    let mut disk = OpenOptions::new().write(true).open(DEVICE).map_err(words)?;
    write_pages(&mut disk, 0, mib * PAGES_PER_MIB, version).map_err(words)?;
    disk.sync_all().map_err(words)?;
    Ok(format!("BARE mib={mib}"))
}

/// Compares the disk's first MiBs with what was written; version 0 stands for zeros.
pub(crate) fn verify_bare(mib: u64, version: u64) -> Result<String, String> {
    drop_cache()?;
    let mut disk = File::open(DEVICE).map_err(words)?;
    let pages = mib * PAGES_PER_MIB;
    let mismatches = differing(&mut disk, 0, pages, version).map_err(words)?;
    let size = disk.seek(SeekFrom::End(0)).map_err(words)?;
    Ok(format!(
        "BARE mib={mib} size={size} mismatches={mismatches}"
    ))
}

/// Discards the whole disk, or writes zeros to all of it.
pub(crate) fn clear(how: &str) -> Result<String, String> {
    match how {
        "discard" => busybox(&["blkdiscard", DEVICE])?,
        "zeroes" => busybox(&["blkdiscard", "-z", DEVICE])
            .or_else(|_| busybox(&["dd", "if=/dev/zero", &format!("of={DEVICE}"), "bs=1M"]))?,
        other => return Err(format!("'{other}' is neither discard nor zeroes")),
    }
    Ok(format!("BARE cleared={how}"))
}

fn drop_cache() -> Result<(), String> {
    busybox(&["sync"])?;
    fs::write("/proc/sys/vm/drop_caches", "3").map_err(words)
}

fn write_pages(to: &mut File, first: u64, pages: u64, version: u64) -> io::Result<()> {
    let mut page = Page([0; PAGE_BYTES]);
    for number in first..first + pages {
        pattern::write(&mut page, number, version as u32);
        to.write_all(&page.0)?;
    }
    Ok(())
}

/// Pages that are not as they must be.
fn differing(from: &mut File, first: u64, pages: u64, version: u64) -> io::Result<u64> {
    let mut page = Page([0; PAGE_BYTES]);
    let mut mismatches = 0;
    for number in first..first + pages {
        from.read_exact(&mut page.0)?;
        let wrong = match version {
            0 => page.0.iter().any(|byte| *byte != 0),
            _ => pattern::compare(&page, number, version as u32).is_some(),
        };
        if wrong {
            println!("MISMATCH disk page={number} version={version}");
            mismatches += 1;
        }
    }
    Ok(mismatches)
}
