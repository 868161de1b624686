//! What benchmarks have a vCPU do: use memory, and note how long each use took.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use vm_memory::Bytes;

use super::pattern::Stretch;
use super::ram::Ram;
use crate::bench::phase::{Subject, Task};
use crate::bench::statistics::Latencies;
use crate::bench::usage::ThreadUsage;
use crate::split_mix::SplitMix;

/// Reads a word each of at most `count` pages that are not in the memfd, in random order; of huge pages one each.
/// The latencies are without the first `skip` of them, which may find threads asleep.
pub(super) fn absent(stretch: &Stretch, count: u64, skip: u64, seed: u64) -> Result<Value> {
    let mut pages = Vec::new();
    for (block, page, _) in stretch.state() {
        if page % block.discard_pages() == 0 && !block.has_page(page)? {
            pages.push((block, page));
        }
    }
    shuffle(&mut pages, seed);
    let mut latencies = Latencies::default();
    let before = ThreadUsage::now()?;
    let began = Instant::now();
    let (count, skip) = (usize::try_from(count)?, usize::try_from(skip)?);
    for (index, (block, page)) in pages.iter().take(count).enumerate() {
        let slice = block.page(*page)?;
        let started = Instant::now();
        let word: u64 = slice.load(0, Ordering::Relaxed)?;
        std::hint::black_box(word);
        if index >= skip {
            latencies.record(started.elapsed().as_nanos() as u64);
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    let used = ThreadUsage::now()?.since(&before);
    Ok(json!({
        "absent": pages.len(),
        "latencies": latencies.pairs(),
        "faults": used.major_faults + used.minor_faults,
        "cpu_seconds": used.cpu.as_secs_f64(),
        "seconds": seconds,
    }))
}

/// Fisher and Yates's shuffle.
fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut random = SplitMix(seed);
    for last in (1..items.len()).rev() {
        items.swap(last, (random.next() % (last as u64 + 1)) as usize);
    }
}

/// Uses the pages one after the other, over and over, for a time.
pub(super) fn hold(stretch: &Stretch, seconds: f64) -> Result<Value> {
    let pages: Vec<_> = stretch.state().collect();
    let duration = Duration::try_from_secs_f64(seconds)?;
    let mut latencies = Latencies::default();
    let before = ThreadUsage::now()?;
    let began = Instant::now();
    // From the end of one use to the end of the next, so that no time is lost between them.
    let mut ended = began;
    'all: loop {
        for (block, page, _) in &pages {
            let slice = block.page(*page)?;
            let word: u64 = slice.load(0, Ordering::Relaxed)?;
            slice.store(word, 0, Ordering::Relaxed)?;
            let now = Instant::now();
            latencies.record((now - ended).as_nanos() as u64);
            ended = now;
            if now - began >= duration {
                break 'all;
            }
        }
    }
    let used = ThreadUsage::now()?.since(&before);
    Ok(json!({"latencies": latencies.pairs(), "faults": used.major_faults + used.minor_faults}))
}

/// Prepares or runs a workload; `subject` is the one that this vCPU has prepared.
pub(super) fn work(command: &Value, ram: &Ram, subject: &mut Option<Subject>) -> Result<Value> {
    let task: Task = serde_json::from_value(command["task"].clone()).context("'task'")?;
    match command["phase"].as_str() {
        Some("prepare") => {
            let mut made = Subject::new(&task)?;
            ram.with_words(|memory| made.prepare(memory))??;
            let bytes = made.footprint();
            *subject = Some(made);
            Ok(json!({"footprint": bytes}))
        }
        Some("run") => {
            let prepared = subject.as_mut().filter(|subject| subject.is(&task));
            let prepared = prepared.context("this workload was not prepared here")?;
            let run = ram.with_words(|memory| prepared.run(memory))??;
            Ok(serde_json::to_value(run)?)
        }
        Some("digest") => {
            let made = subject.as_ref().filter(|subject| subject.is(&task));
            let made = made.context("this workload was not prepared here")?;
            let digest = ram.with_words(|memory| made.digest(memory))??;
            Ok(json!({"digest": digest}))
        }
        _ => bail!("'phase' is 'prepare', 'run' or 'digest'"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_keeps_what_there_is() {
        let mut items: Vec<u32> = (0..100).collect();
        shuffle(&mut items, 1);
        assert_ne!(items, (0..100).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
        shuffle::<u32>(&mut [], 1);
    }

    #[test]
    fn a_workload_runs_where_it_was_prepared() {
        let ram = Ram::default();
        ram.plug(1 << 20, false).expect("memory");
        let task = json!({"name": "sequential-read", "bytes": 1 << 19, "seed": 1});
        let prepare = json!({"phase": "prepare", "task": task});
        let run = json!({"phase": "run", "task": task});
        let mut subject = None;
        assert!(work(&run, &ram, &mut subject).is_err());
        work(&prepare, &ram, &mut subject).expect("room");
        let ran = work(&run, &ram, &mut subject).expect("prepared");
        assert_eq!(ran["operations"], 128);
        let large = json!({"name": "sequential-read", "bytes": 2 << 20, "seed": 1});
        let prepare = json!({"phase": "prepare", "task": large});
        assert!(work(&prepare, &ram, &mut subject).is_err());
    }
}
