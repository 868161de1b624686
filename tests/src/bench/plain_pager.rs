//! The pager that anybody would write first: one thread, one fault at a time, one page at a time,
//! first in first out. The baseline that shows what the rest of Outram is for.
//!
//! It is right (a page that is written while it is evicted loses nothing: protect, copy, punch, wake)
//! and keeps its pages on a real [page store](super::page_store) over TCP, but has no staging,
//! no batches, no second thread, no encryption and no checks. What it fetches is write-protected until it is
//! written to, so that unchanged pages are dropped; it writes each that was changed before the fault goes on
//! that it leaves for.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail, ensure};

use super::layout::pin_self;
use super::page_store::Client;
use super::watched_memory::{Fault, PAGE_BYTES, Page, Watch};

/// A pager at work, until it is dropped.
pub struct PlainPager {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<u64>>>,
}

impl PlainPager {
    /// Starts one that lets `limit` pages be in memory, on these processors.
    pub fn start(watch: Watch, store: Client, limit: usize, cpus: &[usize]) -> Result<Self> {
        ensure!(limit > 0, "a pager needs a page");
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, cpus) = (Arc::clone(&stop), cpus.to_vec());
        let thread = std::thread::Builder::new()
            .name("plain-pager".to_owned())
            .spawn(move || {
                pin_self(&cpus)?;
                let mut pager = Pager {
                    watch,
                    store,
                    limit,
                    resident: VecDeque::with_capacity(limit),
                    pages: Vec::new(),
                    written: 0,
                    page: Box::new(Page([0; PAGE_BYTES])),
                };
                pager.serve(&stopped)?;
                Ok(pager.written)
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Ends it; how many pages it has written to the store. The memory must not be used from here on.
    pub fn end(mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("it has ended")?;
        thread.join().expect("the pager panics nowhere")
    }
}

struct Pager {
    watch: Watch,
    store: Client,
    limit: usize,
    /// Pages in memory, the first that came in front.
    resident: VecDeque<usize>,
    /// Of each page, what the store has of it.
    pages: Vec<Kept>,
    /// Pages that were written to the store.
    written: u64,
    page: Box<Page>,
}

/// What the store has of a page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kept {
    /// Nothing: it was never evicted.
    Nothing,
    /// What it was before it was changed.
    Old,
    /// What it is: if it is in memory, it is write-protected.
    Same,
}

impl Pager {
    fn serve(&mut self, stop: &AtomicBool) -> Result<()> {
        let (mut buffer, mut faults) = (Watch::buffer(), Vec::new());
        while !stop.load(Ordering::Relaxed) {
            self.watch.wait(&mut buffer, &mut faults)?;
            for fault in faults.drain(..) {
                let resolved = match fault {
                    Fault::Missing(page) => self.bring(page, false),
                    Fault::MissingToWrite(page) => self.bring(page, true),
                    Fault::Protected(page) => self.let_change(page),
                    Fault::Unmapped(page) => bail!("nobody asked for page {page} to be mapped"),
                };
                resolved.inspect_err(|error| {
                    // Its workload waits for good: nobody would read this otherwise.
                    eprintln!("the plain pager gives up: {error:#}");
                    std::process::exit(1);
                })?;
            }
        }
        Ok(())
    }

    /// A page that is about to be written to. One that has left since is none of that: whoever met protection was
    /// woken once it was out, and it comes back as it is kept.
    fn let_change(&mut self, page: usize) -> Result<()> {
        *self.kept(page) = Kept::Old;
        self.watch.unprotect(page)
    }

    fn kept(&mut self, page: usize) -> &mut Kept {
        if self.pages.len() <= page {
            self.pages.resize(page + 1, Kept::Nothing);
        }
        &mut self.pages[page]
    }

    fn bring(&mut self, page: usize, to_write: bool) -> Result<()> {
        if self.resident.len() >= self.limit {
            self.evict()?;
        }
        if *self.kept(page) == Kept::Nothing {
            self.watch.zero(page)?;
        } else {
            self.store.read(page, &mut self.page)?;
            if to_write {
                *self.kept(page) = Kept::Old;
                self.watch.copy(page, std::slice::from_ref(&*self.page))?;
            } else {
                *self.kept(page) = Kept::Same;
                self.watch.copy_protected(page, &self.page)?;
            }
        }
        self.resident.push_back(page);
        Ok(())
    }

    fn evict(&mut self) -> Result<()> {
        let victim = self.resident.pop_front().context("nothing to evict")?;
        if *self.kept(victim) != Kept::Same {
            self.watch.protect(victim, 1)?;
            self.watch.read(victim, &mut self.page)?;
            self.store.write(victim, &self.page)?;
            *self.kept(victim) = Kept::Same;
            self.written += 1;
        }
        self.watch.punch(victim, 1)?;
        self.watch.wake(victim, 1)
    }
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    use super::super::layout::{Kind, Layout};
    use super::super::page_store::tests::client_of;
    use super::super::watched_memory::{as_words, shared, skip_without_userfaultfd};
    use super::*;

    const PAGES: usize = 8;
    const WORDS: usize = PAGE_BYTES / 8;

    #[test]
    fn pages_that_did_not_change_are_dropped_and_changes_are_kept() {
        let (store, server) = client_of(PAGES);
        let (mut region, file) = shared(PAGES * PAGE_BYTES).expect("memory");
        let Ok(watch) = Watch::new(&region, file) else {
            return skip_without_userfaultfd();
        };
        let cpus = Layout::new(Kind::Free).expect("processors").pager;
        let pager = PlainPager::start(watch, store, PAGES / 2, &cpus).expect("a pager");
        let memory = as_words(&mut region);
        let mut wanted: Vec<u64> = (1..=PAGES as u64).collect();
        for (page, word) in wanted.iter().enumerate() {
            memory[page * WORDS] = *word;
        }
        let read_all = |memory: &mut [u64], wanted: &[u64]| {
            for (page, word) in wanted.iter().enumerate() {
                // Each is to be a use of the page.
                assert_eq!(black_box(&mut *memory)[page * WORDS], *word, "page {page}");
            }
        };
        for _ in 0..3 {
            read_all(memory, &wanted);
        }
        // One is written to while it is not local, one after it was read.
        memory[0] = 100;
        assert_eq!(black_box(&mut *memory)[3 * WORDS], wanted[3]);
        memory[3 * WORDS] = 103;
        (wanted[0], wanted[3]) = (100, 103);
        for _ in 0..2 {
            read_all(memory, &wanted);
        }
        let written = pager.end().expect("it gave up nothing");
        assert_eq!(written, PAGES as u64 + 2);
        server.join().expect("no panic").expect("its client ended");
    }
}
