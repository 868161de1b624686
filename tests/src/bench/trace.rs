//! Which pages a workload uses, one after the other: what eviction policies are judged by.
//!
//! Recorded by taking its memory away: no more than the [`WINDOW`] pages that came last are there at a
//! time, so every use of another one is a fault, which is written down. Uses of pages within the window
//! are not seen; a policy that keeps thousands of pages has them in any case.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, Result};

use super::phase::{Run, Subject, Task};
use super::watched_memory::{Fault, PAGE_BYTES, Page, Watch, as_words, shared};

/// Pages that are there while a trace is recorded.
pub const WINDOW: usize = 8;

/// The pages that a workload used, each time that it used another than the last few.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Pages of its memory.
    pub pages: usize,
    /// Those that it used, in order.
    pub uses: Vec<u32>,
    /// How many of them were its preparation's.
    pub prepared: usize,
}

impl Trace {
    /// Pages that were used for the first time after the preparation.
    pub fn first_uses(&self) -> u64 {
        let mut is_used = vec![false; self.pages];
        let mut first = 0;
        for (number, page) in self.uses.iter().enumerate() {
            let was_used = std::mem::replace(&mut is_used[*page as usize], true);
            first += u64::from(!was_used && number >= self.prepared);
        }
        first
    }
}

/// Runs a workload and records what it uses; also what the run came to.
pub fn record(task: &Task) -> Result<(Trace, Run)> {
    let mut subject = Subject::new(task)?;
    let bytes = subject.footprint().next_multiple_of(PAGE_BYTES);
    let (mut region, file) = shared(bytes)?;
    let watch = Watch::new(&region, file)?;
    let (ended, seen) = (Arc::default(), Arc::default());
    let recorder = {
        let (ended, seen) = (Arc::clone(&ended), Arc::clone(&seen));
        let recorder = Recorder::new(watch, bytes / PAGE_BYTES, seen);
        thread::Builder::new()
            .name("recorder".to_owned())
            .spawn(move || recorder.record(&ended))?
    };
    let memory = as_words(&mut region);
    subject.prepare(memory)?;
    let prepared = AtomicUsize::load(&seen, Ordering::Acquire);
    let run = subject.run(memory)?;
    AtomicBool::store(&ended, true, Ordering::Release);
    let uses = recorder.join().expect("the recorder panics nowhere")?;
    let trace = Trace {
        pages: bytes / PAGE_BYTES,
        uses,
        prepared,
    };
    Ok((trace, run))
}

struct Recorder {
    watch: Watch,
    /// Pages that are there, the first that came in front.
    window: VecDeque<usize>,
    /// Bytes of pages that were there once.
    kept: Vec<Option<Box<Page>>>,
    uses: Vec<u32>,
    /// How many uses there are.
    seen: Arc<AtomicUsize>,
}

impl Recorder {
    fn new(watch: Watch, pages: usize, seen: Arc<AtomicUsize>) -> Self {
        Self {
            watch,
            window: VecDeque::with_capacity(WINDOW + 1),
            kept: vec![None; pages],
            uses: Vec::new(),
            seen,
        }
    }

    fn record(mut self, ended: &AtomicBool) -> Result<Vec<u32>> {
        let (mut buffer, mut faults) = (Watch::buffer(), Vec::new());
        while !ended.load(Ordering::Acquire) {
            self.watch.wait(&mut buffer, &mut faults)?;
            for fault in faults.drain(..) {
                // Who met protection is woken once the page is out, and meets that.
                if let Fault::Missing(page) = fault {
                    self.bring(page).inspect_err(|error| {
                        // The workload waits for good: nobody would read this otherwise.
                        eprintln!("bench: a trace cannot be recorded: {error:#}");
                        std::process::exit(1);
                    })?;
                }
            }
        }
        Ok(self.uses)
    }

    fn bring(&mut self, page: usize) -> Result<()> {
        if self.window.len() >= WINDOW {
            self.take_out()?;
        }
        self.uses.push(page as u32);
        self.seen.store(self.uses.len(), Ordering::Release);
        self.window.push_back(page);
        match &self.kept[page] {
            Some(bytes) => self.watch.copy(page, std::slice::from_ref(&**bytes)),
            None => self.watch.zero(page),
        }
    }

    /// Protected before it is read: a store between reading and punching would be lost.
    fn take_out(&mut self) -> Result<()> {
        let page = self.window.pop_front().context("nothing is there")?;
        self.watch.protect(page, 1)?;
        let bytes = self.kept[page].get_or_insert_with(|| Box::new(Page([0; PAGE_BYTES])));
        self.watch.read(page, bytes)?;
        self.watch.punch(page, 1)?;
        self.watch.wake(page, 1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::bench::phase::tests::task;

    #[test]
    fn what_is_read_in_order_is_recorded_in_order() {
        let (trace, _) = record(&task("sequential-read")).expect("userfaultfd is there");
        let run = &trace.uses[trace.prepared..];
        let follows = |pair: &[u32]| pair[1] == pair[0] + 1 || pair[1] == 0;
        assert!(run.windows(2).all(follows));
        let used: HashSet<_> = run.iter().collect();
        assert!(used.len() + WINDOW >= trace.pages);
    }

    #[test]
    fn a_workload_comes_to_the_same_while_it_is_recorded() {
        let task = task("stream");
        let (trace, run) = record(&task).expect("userfaultfd is there");
        assert!(trace.uses.len() > 2 * trace.pages);
        let mut subject = Subject::new(&task).expect("it is known");
        let mut memory = vec![0; subject.footprint() / 8];
        subject.prepare(&mut memory).expect("it has room");
        let truth = subject.run(&mut memory).expect("it has room");
        truth.demand_same(&run).expect("no page was lost");
    }
}
