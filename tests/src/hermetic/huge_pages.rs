//! The host's pool of 2 MiB pages, for as long as a test needs some.
//!
//! The pool is the machine's, also within a sandbox: pages are added to what is there and taken off
//! again at the end, by one test at a time, for it knows what is in the pool. A run that is killed leaves
//! the pool as large as it made it.

use std::fs::{self, File};
use std::io::Write;

use anyhow::{Context, Result};
use outram_wire::units::PageSize;
use rustix::fs::{
    FallocateFlags, FlockOperation, MemfdFlags, Mode, OFlags, fallocate, flock, memfd_create, open,
};
use rustix::io::retry_on_intr;

use super::suite::Skipped;

const SETTING: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
const RESERVED: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages";

/// Whoever changes the pool holds a lock on this file, which stays, and is empty. Test programs run beside each
/// other, and so may those of two source trees: it lies where all of them see the same file, which sandboxes' own
/// /run, /dev and /sys are not.
const LOCK: &str = "/tmp/outram-test-huge-pages";

/// Pages added to the pool, which are nobody else's; taken off when dropped.
#[derive(Debug)]
pub struct HugePages {
    added: u64,
    /// Unlocked once they are taken off.
    _alone: File,
}

impl HugePages {
    /// Adds this many pages that are free; where the machine has no room for them the test is
    /// skipped. Waits for whoever has added some before.
    pub fn add(pages: u64) -> Result<Self> {
        let pool = Self::add_at_most(pages)?;
        if pool.added < pages {
            let reason = format!("only {} of {pages} huge pages can be had", pool.added);
            return Err(Skipped(reason).into());
        }
        Ok(pool)
    }

    fn add_at_most(pages: u64) -> Result<Self> {
        let alone = lock().context(LOCK)?;
        let Ok(before) = read(SETTING) else {
            let reason = "this kernel has no 2 MiB pages (hugetlbfs)";
            return Err(Skipped(reason.to_owned()).into());
        };
        write(before + pages).map_err(|error| {
            Skipped(format!("the pool of huge pages cannot be changed: {error}"))
        })?;
        Ok(Self {
            added: read(SETTING)?.saturating_sub(before),
            _alone: alone,
        })
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let given_back = read(SETTING).and_then(|now| write(now.saturating_sub(self.added)));
        if let Err(error) = given_back {
            eprintln!("the pool of huge pages stays as large as it is: {error:#}");
        }
    }
}

fn lock() -> Result<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(open(LOCK, flags, Mode::RUSR | Mode::WUSR)?);
    retry_on_intr(|| flock(&file, FlockOperation::LockExclusive))?;
    Ok(file)
}

/// Pages of the pool that nobody has and nobody was promised.
pub fn available() -> Result<u64> {
    Ok(read(FREE)?.saturating_sub(read(RESERVED)?))
}

/// Pages of the pool that belong to nobody's file until it is dropped.
#[derive(Debug)]
pub struct Taken(#[allow(dead_code)] File);

/// Takes all that is available, as another user of the pool might.
pub fn take_available() -> Result<Taken> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let file = File::from(memfd_create("others", flags).context("making a memfd")?);
    let length = available()? * PageSize::HUGE.bytes();
    file.set_len(length)?;
    if length > 0 {
        fallocate(&file, FallocateFlags::empty(), 0, length).context("taking the pool")?;
    }
    Ok(Taken(file))
}

fn read(path: &str) -> Result<u64> {
    let text = fs::read_to_string(path).with_context(|| path.to_owned())?;
    text.trim().parse().with_context(|| path.to_owned())
}

fn write(pages: u64) -> Result<()> {
    let mut setting = fs::OpenOptions::new()
        .write(true)
        .open(SETTING)
        .context(SETTING)?;
    setting
        .write_all(pages.to_string().as_bytes())
        .context(SETTING)
}
