//! Which pages a workload uses, one after the other: what eviction policies are judged by.
//!
//! Recorded by unmapping its memory: no more than a window of the pages that came last is mapped at a time,
//! so every use of another one is a fault, which is written down. Uses within the window are not seen: it is a
//! small part of what is local with any of the limits that the trace is for, so that no policy has let go of
//! such a page.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, Result, bail};

use super::layout::{Kind, Layout, pin_self};
use super::phase::{Run, Subject, Task};
use super::watched_memory::{Fault, PAGE_BYTES, Watch, as_words, shared};

/// Its part of the least limit. (With a 32nd and less, misses of PageRank were the same to the third digit; with
/// a fourth, within a hundredth of LRU's, and two of CLOCK's.)
const WINDOW_PART: usize = 16;

/// Pages of the smallest window: an instruction may need several at a time.
const WINDOW_LEAST: usize = 8;

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

/// Runs a workload and records what it uses, for judging limits of these shares of its memory; also what the
/// run came to.
pub fn record(task: &Task, local_ratios: &[f64]) -> Result<(Trace, Run)> {
    let mut subject = Subject::new(task)?;
    let pages = subject.footprint().div_ceil(PAGE_BYTES);
    let least = local_ratios.iter().copied().fold(1.0, f64::min);
    let window = (pages as f64 * least) as usize / WINDOW_PART;
    let (mut region, file) = shared(pages * PAGE_BYTES)?;
    let (ended, seen): (AtomicBool, AtomicUsize) = Default::default();
    let recorder = Recorder {
        watch: Watch::of_mapping(&region, file)?,
        mapped: VecDeque::new(),
        window: window.max(WINDOW_LEAST),
        uses: Vec::new(),
        seen: &seen,
    };
    let memory = as_words(&mut region);
    // They take turns, and to wake somebody on another processor takes longer than to change to them.
    let cpus = &Layout::new(Kind::Shared)?.vcpu;
    thread::scope(|scope| {
        let recorder = scope.spawn(|| {
            pin_self(cpus)?;
            recorder.record(&ended)
        });
        let workload = scope.spawn(|| {
            let outcome = pin_self(cpus).and_then(|()| {
                subject.prepare(memory)?;
                let prepared = seen.load(Ordering::Acquire);
                Ok((prepared, subject.run(memory)?))
            });
            ended.store(true, Ordering::Release);
            outcome
        });
        let (prepared, run) = workload.join().expect("a workload panics nowhere")?;
        let uses = recorder.join().expect("the recorder panics nowhere")?;
        let trace = Trace {
            pages,
            uses,
            prepared,
        };
        Ok((trace, run))
    })
}

struct Recorder<'a> {
    watch: Watch,
    /// Pages that are mapped, the first that came in front.
    mapped: VecDeque<usize>,
    /// How many may be.
    window: usize,
    uses: Vec<u32>,
    /// How many uses there are.
    seen: &'a AtomicUsize,
}

impl Recorder<'_> {
    fn record(mut self, ended: &AtomicBool) -> Result<Vec<u32>> {
        let (mut buffer, mut faults) = (Watch::buffer(), Vec::new());
        while !ended.load(Ordering::Acquire) {
            self.watch.wait(&mut buffer, &mut faults)?;
            for fault in faults.drain(..) {
                self.note(fault).inspect_err(|error| {
                    // The workload waits for good: nobody would read this otherwise.
                    eprintln!("bench: a trace cannot be recorded: {error:#}");
                    std::process::exit(1);
                })?;
            }
        }
        Ok(self.uses)
    }

    fn note(&mut self, fault: Fault) -> Result<()> {
        let Fault::Unmapped(page) = fault else {
            bail!("a fault that nobody asked for: {fault:?}");
        };
        if self.mapped.len() >= self.window {
            let first = self.mapped.pop_front().context("nothing is mapped")?;
            self.watch.unmap(first)?;
        }
        self.uses.push(page as u32);
        self.seen.store(self.uses.len(), Ordering::Release);
        self.mapped.push_back(page);
        self.watch.map(page)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::bench::phase::tests::task;

    #[test]
    fn what_is_read_in_order_is_recorded_in_order() {
        let (trace, _) = record(&task("sequential-read"), &[0.5]).expect("userfaultfd is there");
        let run = &trace.uses[trace.prepared..];
        let follows = |pair: &[u32]| pair[1] == pair[0] + 1 || pair[1] == 0;
        assert!(run.windows(2).all(follows));
        let used: HashSet<_> = run.iter().collect();
        let window = (trace.pages / 2 / WINDOW_PART).max(WINDOW_LEAST);
        assert!(used.len() + window >= trace.pages);
    }

    #[test]
    fn a_workload_comes_to_the_same_while_it_is_recorded() {
        let task = task("stream");
        let (trace, run) = record(&task, &[0.5]).expect("userfaultfd is there");
        assert!(trace.uses.len() > 2 * trace.pages);
        let mut subject = Subject::new(&task).expect("it is known");
        let mut memory = vec![0; subject.footprint() / 8];
        subject.prepare(&mut memory).expect("it has room");
        let truth = subject.run(&mut memory).expect("it has room");
        truth.demand_same(&run).expect("no page was lost");
    }
}
