//! The log in which a device marks the pages that it writes, as a front end that migrates keeps it.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, SealFlags};

use super::ram::Ram;

/// Pages that one 64-bit word of the log stands for.
const PAGES_PER_WORD: u64 = 64;

/// A log in a sealed memfd.
pub(super) struct DirtyLog {
    pub file: File,
    pub bytes: u64,
}

impl DirtyLog {
    /// One of `bytes`, or large enough for all RAM.
    pub(super) fn new(ram: &Ram, bytes: Option<u64>) -> Result<Self> {
        let bytes = bytes.unwrap_or(ram.pages().div_ceil(PAGES_PER_WORD) * 8);
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("dirty-log", flags)?);
        file.set_len(bytes)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(Self { file, bytes })
    }

    /// The guest pages marked since last asked. The device is to be at rest meanwhile.
    pub(super) fn take(&self) -> Result<Vec<u64>> {
        let mut bits = vec![0; self.bytes as usize];
        self.file
            .read_exact_at(&mut bits, 0)
            .context("reading the log")?;
        self.file.write_all_at(&vec![0; bits.len()], 0)?;
        let marked = bits.iter().zip(0..).flat_map(|(byte, at)| {
            let set = (0..8).filter(move |bit| byte >> bit & 1 == 1);
            set.map(move |bit| at * 8 + bit)
        });
        Ok(marked.collect())
    }
}
