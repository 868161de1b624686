//! A process of its own that reads its memory at random, until a signal ends it: what becomes of one
//! that is given a memory error.

use std::hint::black_box;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use crate::arena::Random;
use crate::pattern::{PAGE_BYTES, mix};

/// This program's argument by which it is a reader.
pub(crate) const ARGUMENT: &str = "reader";

/// What a reader says once all of its memory is written.
const READY: &str = "reading";

/// A reader at work.
pub(crate) struct Reader(Child);

impl Reader {
    /// Starts one; returns once its memory is written.
    pub(crate) fn start(mib: u64) -> Result<Self, String> {
        let mut child = Command::new("/proc/self/exe")
            .args([ARGUMENT, &mib.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("a reader cannot be started: {error}"))?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            let read = BufReader::new(stdout).read_line(&mut line);
            read.map_err(|error| format!("the reader says nothing: {error}"))?;
        }
        match line.trim() == READY {
            true => Ok(Self(child)),
            false => Err(format!("the reader said '{line}'")),
        }
    }

    /// Waits for its end; the signal that it was ended by.
    pub(crate) fn wait(mut self) -> Result<i32, String> {
        let status = self.0.wait().map_err(|error| error.to_string())?;
        let signal = status.signal();
        signal.ok_or_else(|| format!("the reader ended by itself: {status}"))
    }
}

/// Writes so many MiB and reads them at random, for ever, or until a page is not as it was written.
pub(crate) fn read(mib: u64) {
    let words_per_page = PAGE_BYTES / size_of::<u64>();
    let pages = (mib << 20) as usize / PAGE_BYTES;
    let words: Vec<u64> = (0..pages * words_per_page)
        .map(|word| mix(word as u64))
        .collect();
    println!("{READY}");
    let mut random = Random::new(1);
    loop {
        let word = random.below(pages) * words_per_page;
        if black_box(&words)[word] != mix(word as u64) {
            return;
        }
    }
}
