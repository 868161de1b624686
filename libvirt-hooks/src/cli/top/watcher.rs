//! Asks every backend again and again, each in a thread of its own: one that does not answer keeps
//! neither the others' rows nor the screen waiting. libvirt is never asked.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use outram_wire::units::VmId;

use super::rates::{Rates, Sample};
use crate::cli::report::{Report, State, all_guests, report};
use crate::host::Paths;

/// Rates of faults remembered of each guest: more than the widest sparkline shows.
const HISTORY: usize = 64;

/// A guest as the table shows it.
#[derive(Clone, Debug)]
pub struct Line {
    /// What was last heard of it.
    pub report: Report,
    /// What happens per second, once it was heard of twice.
    pub rates: Option<Rates>,
    /// Faults per second so far, the newest last.
    pub history: VecDeque<f64>,
    last: Option<Sample>,
}

impl Line {
    /// A guest first heard of.
    pub fn new(report: Report, at: Instant) -> Self {
        let mut line = Self {
            report: report.clone(),
            rates: None,
            history: VecDeque::new(),
            last: None,
        };
        line.note(report, at);
        line
    }

    /// Takes in what was heard of it at `at`.
    pub fn note(&mut self, report: Report, at: Instant) {
        let sample = report.status.as_ref().map(|status| Sample::of(status, at));
        self.rates = match (&sample, &self.last) {
            (Some(now), Some(before)) => now.since(before),
            _ => None,
        };
        if let Some(rates) = self.rates {
            self.history.push_back(rates.faults);
            if self.history.len() > HISTORY {
                self.history.pop_front();
            }
        }
        self.last = sample;
        self.report = report;
    }
}

struct Answer {
    vm: VmId,
    report: Report,
    at: Instant,
}

/// All guests of the host, and who has been asked and not answered yet.
pub struct Watcher {
    paths: Paths,
    asked: BTreeSet<VmId>,
    lines: BTreeMap<VmId, Line>,
    sender: Sender<Answer>,
    receiver: Receiver<Answer>,
}

impl Watcher {
    /// Knows nobody yet.
    pub fn new(paths: &Paths) -> Self {
        let (sender, receiver) = mpsc::channel();
        Self {
            paths: paths.clone(),
            asked: BTreeSet::new(),
            lines: BTreeMap::new(),
            sender,
            receiver,
        }
    }

    /// Asks all guests that there are, but for those that still owe an answer.
    pub fn ask(&mut self) -> Result<()> {
        let guests = all_guests(&self.paths)?;
        let there: BTreeSet<VmId> = guests.iter().map(|guest| guest.vm).collect();
        self.lines.retain(|vm, _| there.contains(vm));
        for guest in guests {
            if !self.asked.insert(guest.vm) {
                continue;
            }
            let (paths, sender) = (self.paths.clone(), self.sender.clone());
            let ask = move || {
                let report = report(&guest, &paths);
                let at = Instant::now();
                // Nobody listens where the table was left meanwhile.
                let _ = sender.send(Answer {
                    vm: guest.vm,
                    report,
                    at,
                });
            };
            thread::Builder::new()
                .name("ask".to_owned())
                .spawn(ask)
                .context("cannot start a thread to ask a backend")?;
        }
        Ok(())
    }

    /// Takes in the answers that have come; whether there were any.
    pub fn hear(&mut self) -> bool {
        let mut any = false;
        while let Ok(answer) = self.receiver.try_recv() {
            self.take(answer);
            any = true;
        }
        any
    }

    /// Waits until everybody asked has answered, each of which takes a bounded time.
    pub fn hear_all(&mut self) {
        while !self.asked.is_empty() {
            // The sender is our own, so the channel never closes.
            match self.receiver.recv_timeout(Duration::from_secs(60)) {
                Ok(answer) => self.take(answer),
                Err(_) => return,
            }
        }
    }

    fn take(&mut self, answer: Answer) {
        let Answer { vm, report, at } = answer;
        self.asked.remove(&vm);
        if report.state == State::Off {
            self.lines.remove(&vm);
        } else if let Some(line) = self.lines.get_mut(&vm) {
            line.note(report, at);
        } else {
            self.lines.insert(vm, Line::new(report, at));
        }
    }

    /// The guests heard of.
    pub fn lines(&self) -> Vec<Line> {
        self.lines.values().cloned().collect()
    }
}
