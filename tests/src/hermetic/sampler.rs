//! What a guest's RAM costs its host, counted by the kernel every 50 ms.
//!
//! Host memory of a guest = blocks of the memory files that QEMU holds as its RAM + blocks of the
//! backend's own tmpfs less its page table + anonymous memory of the backend beyond the fixed part
//! that it states. The sampler starts before QEMU does, so that the first instruction is seen too.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::guest::Guest;

/// Time between samples.
const PERIOD: Duration = Duration::from_millis(50);

/// Bytes in a block as `st_blocks` counts them, whatever the file system's own block size.
const STAT_BLOCK: u64 = 512;

/// One look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Blocks of QEMU's RAM files.
    pub memfd: u64,
    /// Blocks of the backend's tmpfs but the page table.
    pub staging: u64,
    /// The backend's anonymous memory.
    pub anon: u64,
    /// Anonymous memory that the backend states as fixed.
    pub fixed_anon: u64,
}

impl Sample {
    /// What counts against the limit.
    pub fn cost(&self) -> u64 {
        self.memfd + self.staging + self.anon.saturating_sub(self.fixed_anon)
    }
}

/// What was seen over a time.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Samples taken.
    pub samples: u64,
    /// Samples in which QEMU held guest RAM.
    pub with_guest: u64,
    /// The largest cost, and what it was made of.
    pub peak: Sample,
    /// The last sample.
    pub last: Sample,
    /// Samples over the allowance, the worst first; at most 10.
    pub over: Vec<(Sample, u64)>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    /// Bytes allowed, headroom included; `None` where nothing is judged.
    allowed: Option<u64>,
    /// The backend's stated fixed anonymous memory.
    fixed_anon: u64,
    /// How often what was before ceased to matter. A sample takes a while: one that was begun before is of no
    /// time that is judged.
    turns: u64,
    seen: Seen,
}

/// A sampler at work.
#[derive(Debug)]
pub struct Sampler {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The parts of a guest that its backend states once, and that judging needs.
#[derive(Clone, Copy, Debug)]
pub struct Stated {
    /// The limit in bytes.
    pub limit: u64,
    /// What it may be exceeded by for moments.
    pub headroom: u64,
    /// Fixed anonymous memory of the backend.
    pub fixed_anon: u64,
}

impl Sampler {
    /// Starts to watch a guest that may not have been started yet.
    pub fn start(guest: &Guest) -> Self {
        let shared = Arc::new(Shared::default());
        let for_thread = Arc::clone(&shared);
        let (name, run_dir) = (guest.name().to_owned(), guest.run_dir());
        let network = guest.place.network();
        let thread =
            std::thread::spawn(move || watch(&name, &run_dir, network.as_deref(), &for_thread));
        Self {
            shared,
            thread: Some(thread),
        }
    }

    /// Judges from now on, and judges the past too: nothing seen so far may have cost more.
    pub fn judge(&self, stated: Stated) {
        let mut book = lock(&self.shared.book);
        let allowed = book.judge_by(stated);
        let mut peak = book.seen.peak;
        peak.fixed_anon = stated.fixed_anon;
        if book.seen.samples > 0 && peak.cost() > allowed {
            book.seen.over.push((peak, allowed));
        }
    }

    /// Judges from now on; what was before is not asked.
    pub fn judge_from_now(&self, stated: Stated) {
        let mut book = lock(&self.shared.book);
        book.judge_by(stated);
        book.turns += 1;
    }

    /// Watches without judging: a limit is on its way to another.
    pub fn pause(&self) {
        let mut book = lock(&self.shared.book);
        book.allowed = None;
        book.turns += 1;
        book.seen.peak = Sample::default();
    }

    /// What was seen so far.
    pub fn seen(&self) -> Seen {
        lock(&self.shared.book).seen.clone()
    }

    /// Ends the watch; fails where the allowance was ever exceeded.
    pub fn finish(mut self) -> Result<Seen> {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            bail!("the sampler failed; see its message above");
        }
        let seen = self.seen();
        if let Some((worst, allowed)) = seen.over.first() {
            bail!(
                "host memory went over the limit and headroom of {allowed} bytes: cost {} = {worst:?}; {} samples over of {}",
                worst.cost(),
                seen.over.len(),
                seen.samples
            );
        }
        if seen.with_guest == 0 {
            bail!("the sampler never saw guest RAM: nothing was judged");
        }
        Ok(seen)
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

impl Book {
    /// Takes these for what is allowed; how much that is.
    fn judge_by(&mut self, stated: Stated) -> u64 {
        let allowed = stated.limit + stated.headroom;
        self.fixed_anon = stated.fixed_anon;
        self.allowed = Some(allowed);
        allowed
    }

    /// Notes a sample that was begun in this turn.
    fn note(&mut self, mut sample: Sample, turn: u64) {
        sample.fixed_anon = self.fixed_anon;
        let seen = &mut self.seen;
        seen.samples += 1;
        seen.with_guest += u64::from(sample.memfd > 0);
        seen.last = sample;
        if turn != self.turns {
            return;
        }
        if sample.cost() > seen.peak.cost() {
            seen.peak = sample;
        }
        if let Some(allowed) = self.allowed.filter(|allowed| sample.cost() > *allowed) {
            seen.over.push((sample, allowed));
            seen.over
                .sort_by_key(|(sample, _)| std::cmp::Reverse(sample.cost()));
            seen.over.truncate(10);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn watch(name: &str, run_dir: &Path, network: Option<&Path>, shared: &Shared) {
    let mut qemu = None;
    let mut backend = None;
    while !shared.stop.load(Ordering::Relaxed) {
        let start = Instant::now();
        let turn = lock(&shared.book).turns;
        if !qemu.is_some_and(|pid| is_alive(pid, "qemu-system")) {
            qemu = find_process("qemu-system", &format!("guest={name}"), network);
        }
        if !backend.is_some_and(|pid| is_alive(pid, "outram-backend")) {
            let uuid = run_dir.file_name().and_then(|uuid| uuid.to_str());
            backend = uuid.and_then(|uuid| find_process("outram-backend", uuid, network));
        }
        let sample = Sample {
            memfd: qemu.map_or(0, ram_file_bytes),
            staging: folder_bytes(&run_dir.join("state")),
            anon: backend.and_then(anonymous_bytes).unwrap_or(0),
            // Stated, not measured.
            fixed_anon: 0,
        };
        lock(&shared.book).note(sample, turn);
        std::thread::sleep(PERIOD.saturating_sub(start.elapsed()));
    }
}

fn is_alive(pid: u32, program: &str) -> bool {
    fs::read(format!("/proc/{pid}/cmdline"))
        .is_ok_and(|line| String::from_utf8_lossy(&line).contains(program))
}

/// The newest process on the machine with that network whose command line has both words.
fn find_process(program: &str, word: &str, network: Option<&Path>) -> Option<u32> {
    fs::read_dir("/proc")
        .ok()?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut words = line.split(|byte| *byte == 0);
            let is_program = words
                .next()
                .is_some_and(|first| String::from_utf8_lossy(first).contains(program));
            let is_there = || {
                let of = fs::read_link(format!("/proc/{pid}/ns/net"));
                network.is_none_or(|network| of.is_ok_and(|of| of == network))
            };
            is_program
                && words.any(|other| String::from_utf8_lossy(other).contains(word))
                && is_there()
        })
        .max()
}

/// Blocks of every memory file that QEMU holds as guest RAM. One that several descriptors share
/// counts once.
fn ram_file_bytes(qemu: u32) -> u64 {
    let Ok(entries) = fs::read_dir(format!("/proc/{qemu}/fd")) else {
        return 0;
    };
    let mut files: Vec<(u64, u64)> = entries
        .flatten()
        .filter(|entry| {
            fs::read_link(entry.path())
                .is_ok_and(|to| to.to_string_lossy().contains("memory-backend-memfd"))
        })
        .filter_map(|entry| {
            let meta = fs::metadata(entry.path()).ok()?;
            Some((meta.ino(), meta.blocks() * STAT_BLOCK))
        })
        .collect();
    files.sort_unstable();
    files.dedup_by_key(|(inode, _)| *inode);
    files.iter().map(|(_, bytes)| bytes).sum()
}

/// Blocks of all files below `folder` but those named `table`.
fn folder_bytes(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    entries
        .flatten()
        .filter(|entry| entry.file_name() != "table")
        .filter_map(|entry| {
            let meta = fs::symlink_metadata(entry.path()).ok()?;
            Some(if meta.is_dir() {
                folder_bytes(&entry.path())
            } else {
                meta.blocks() * STAT_BLOCK
            })
        })
        .sum()
}

/// Anonymous memory of a process.
pub fn anonymous_bytes(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

impl Stated {
    /// From a backend's status.
    pub fn of(guest: &Guest) -> Result<Self> {
        let status = guest.status().context("what the backend states")?;
        Ok(Self {
            limit: status.limit_bytes,
            headroom: status.headroom_bytes,
            fixed_anon: status.fixed_anon_bytes,
        })
    }
}
