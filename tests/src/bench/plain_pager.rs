//! The pager that anybody would write first: one thread, one fault at a time, one page at a time,
//! first in first out. The baseline that shows what the rest of Outram is for.
//!
//! It is right (a page that is written while it is evicted loses nothing: protect, copy, punch, wake)
//! and keeps its pages on a real [page store](super::page_store) over TCP, but has no staging,
//! no batches, no second thread, no encryption and no checks, and writes every page it evicts.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, Result, ensure};

use super::layout::pin_self;
use super::page_store::Client;
use super::watched_memory::{Fault, PAGE_BYTES, Page, Watch};

/// A pager at work, until it is dropped.
pub struct PlainPager {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
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
                    is_kept: Vec::new(),
                    page: Box::new(Page([0; PAGE_BYTES])),
                };
                pager.serve(&stopped)
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Ends it. The memory must not be used from here on.
    pub fn end(mut self) -> Result<()> {
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
    /// Of each page, whether the store has it.
    is_kept: Vec<bool>,
    page: Box<Page>,
}

impl Pager {
    fn serve(&mut self, stop: &AtomicBool) -> Result<()> {
        let (mut buffer, mut faults) = (Watch::buffer(), Vec::new());
        while !stop.load(Ordering::Relaxed) {
            self.watch.wait(&mut buffer, &mut faults)?;
            for fault in faults.drain(..) {
                // Whoever met protection was woken once its page was out, and meets that.
                if let Fault::Missing(page) = fault {
                    self.bring(page).inspect_err(|error| {
                        // Its workload waits for good: nobody would read this otherwise.
                        eprintln!("the plain pager gives up: {error:#}");
                        std::process::exit(1);
                    })?;
                }
            }
        }
        Ok(())
    }

    fn bring(&mut self, page: usize) -> Result<()> {
        if self.resident.len() >= self.limit {
            self.evict()?;
        }
        if self.is_kept.len() <= page {
            self.is_kept.resize(page + 1, false);
        }
        match self.is_kept[page] {
            true => {
                self.store.read(page, &mut self.page)?;
                self.watch.copy(page, std::slice::from_ref(&*self.page))?;
            }
            false => self.watch.zero(page)?,
        }
        self.resident.push_back(page);
        Ok(())
    }

    fn evict(&mut self) -> Result<()> {
        let victim = self.resident.pop_front().context("nothing to evict")?;
        self.watch.protect(victim, 1)?;
        self.watch.read(victim, &mut self.page)?;
        self.store.write(victim, &self.page)?;
        self.is_kept[victim] = true;
        self.watch.punch(victim, 1)?;
        self.watch.wake(victim, 1)
    }
}
