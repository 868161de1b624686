//! The host's pool of 2 MiB pages, for as long as a test needs some.
//!
//! The pool is the machine's, also within a sandbox: pages are added to what is there and taken off
//! again at the end. A run that is killed leaves the pool as large as it made it.

use std::fs::{self, File};
use std::io::Write;
use std::sync::Mutex;

use anyhow::{Context, Result};
use outram_wire::units::PageSize;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};

use super::suite::Skipped;

const SETTING: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
const RESERVED: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages";

/// One change at a time: each reads what the other wrote.
static CHANGE: Mutex<()> = Mutex::new(());

/// Pages added to the pool; taken off when dropped.
#[derive(Debug)]
pub struct HugePages(u64);

impl HugePages {
    /// Adds this many pages that are free; where the machine has no room for them the test is
    /// skipped.
    pub fn add(pages: u64) -> Result<Self> {
        let added = Self::add_at_most(pages)?;
        if added.0 < pages {
            let reason = format!("only {} of {pages} huge pages can be had", added.0);
            return Err(Skipped(reason).into());
        }
        Ok(added)
    }

    fn add_at_most(pages: u64) -> Result<Self> {
        let _alone = CHANGE
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let Ok(before) = read(SETTING) else {
            let reason = "this kernel has no 2 MiB pages (hugetlbfs)";
            return Err(Skipped(reason.to_owned()).into());
        };
        write(before + pages).map_err(|error| {
            Skipped(format!("the pool of huge pages cannot be changed: {error}"))
        })?;
        Ok(Self(read(SETTING)?.saturating_sub(before)))
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _alone = CHANGE
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let given_back = read(SETTING).and_then(|now| write(now.saturating_sub(self.0)));
        if let Err(error) = given_back {
            eprintln!("the pool of huge pages stays as large as it is: {error:#}");
        }
    }
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
