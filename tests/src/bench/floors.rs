//! What faults, pages and the wire cost on this machine without Outram.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Result, ensure};
use vm_memory::{Bytes, MmapRegion, VolatileMemory};

use super::layout::{Layout, pin_self};
use super::page_store::{Client, Store};
use super::statistics::Latencies;
use super::watched_memory::{Fault, PAGE_BYTES, Page, Watch, anonymous, shared};

/// Pages of a range that is worked on at once.
pub const RANGE: usize = 64;
/// Name of the rate at which pages come over the wire by such ranges.
pub const WIRE_READ: &str = "wire, 64 pages read";
/// ... at which they are sent.
pub const WIRE_WRITTEN: &str = "wire, 64 pages written";
/// Pages that are copied to learn the machine's rate: more than a processor's caches hold.
const COPIED_PAGES: usize = 16 << 10;
/// How often all of them are.
const COPIES: usize = 8;

/// How a handler waits for faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// In `poll`, then `read`.
    Sleeping,
    /// In `read` over and over.
    Spinning,
}

/// Round trips of faults: a thread touches pages one by one, another does nothing but put a ready
/// page in place.
pub fn faults(layout: &Layout, waiting: Waiting, count: usize) -> Result<Latencies> {
    let handler = Handler {
        waiting,
        ready: page(1),
        wire: None,
    };
    round_trips(layout, handler, count)
}

/// The same where the page comes over the wire: what a fault of a remote page takes at least. One handler spins
/// for faults, unless it has one processor with who touches pages, and sleeps for the page, whose server may be on its
/// processor; that is the sooner of all ways where processors are few.
pub fn remote_faults(layout: &Layout, store: &Store, count: usize) -> Result<Latencies> {
    let mut wire = Client::connect(&store.address)?;
    wire.write(0, &page(1)[0])?;
    let is_alone = layout.vcpu != layout.pager || layout.vcpu.len() > 1;
    let handler = Handler {
        waiting: match is_alone {
            true => Waiting::Spinning,
            false => Waiting::Sleeping,
        },
        ready: page(0),
        wire: Some(wire),
    };
    round_trips(layout, handler, count)
}

fn page(byte: u8) -> Vec<Page> {
    vec![Page([byte; PAGE_BYTES])]
}

fn round_trips(layout: &Layout, mut handler: Handler, count: usize) -> Result<Latencies> {
    let (region, file) = shared(count * PAGE_BYTES)?;
    let watch = Watch::new(&region, file)?;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let handler = scope.spawn(|| {
            let handled = handler.work(&watch, &layout.pager, &done);
            // Nobody would answer the other thread's next fault.
            handled.inspect_err(|error| {
                eprintln!("measuring floors failed: {error:#}");
                std::process::exit(1);
            })
        });
        let touching = scope.spawn(|| {
            let touched = touch_all(&region, count, &layout.vcpu);
            done.store(true, Ordering::Relaxed);
            touched
        });
        let latencies = touching.join().expect("no panic");
        handler.join().expect("no panic")?;
        latencies
    })
}

/// Answers faults, and does nothing else.
struct Handler {
    waiting: Waiting,
    /// One page.
    ready: Vec<Page>,
    /// Where it is fetched from first, if anywhere.
    wire: Option<Client>,
}

impl Handler {
    fn work(&mut self, watch: &Watch, cpus: &[usize], done: &AtomicBool) -> Result<()> {
        pin_self(cpus)?;
        let (mut buffer, mut faults) = (Watch::buffer(), Vec::new());
        while !done.load(Ordering::Relaxed) {
            match self.waiting {
                Waiting::Sleeping => watch.wait(&mut buffer, &mut faults)?,
                Waiting::Spinning => watch.take(&mut buffer, &mut faults)?,
            }
            for fault in faults.drain(..) {
                if let Fault::Missing(page) = fault {
                    if let Some(wire) = &mut self.wire {
                        wire.read(0, &mut self.ready[0])?;
                    }
                    watch.copy(page, &self.ready)?;
                }
            }
        }
        Ok(())
    }
}

/// In an order that no read-ahead would guess: each page once, by steps that have no divisor in common
/// with their number.
fn touch_all(region: &MmapRegion, count: usize, cpus: &[usize]) -> Result<Latencies> {
    pin_self(cpus)?;
    let step = (count * 5 / 8..).find(|&step| divisor(step, count) == 1);
    let step = step.unwrap_or(1);
    let mut latencies = Latencies::default();
    let mut page = 0;
    for _ in 0..count {
        page = (page + step) % count;
        let slice = region.get_slice(page * PAGE_BYTES, 8)?;
        let started = Instant::now();
        let word: u64 = slice.load(0, Ordering::Relaxed)?;
        latencies.record(started.elapsed().as_nanos() as u64);
        ensure!(word != 0, "page {page} came without its bytes");
    }
    Ok(latencies)
}

fn divisor(a: usize, b: usize) -> usize {
    match b {
        0 => a,
        _ => divisor(b, a % b),
    }
}

/// What each of a pager's calls costs, by name, per page: alone and by ranges.
pub fn calls(layout: &Layout, pages: usize) -> Result<Vec<(&'static str, Latencies)>> {
    let layout = layout.clone();
    // A thread of its own, so that it alone is pinned.
    std::thread::spawn(move || {
        pin_self(&layout.pager)?;
        let (region, file) = shared(pages * PAGE_BYTES)?;
        let watch = Watch::new(&region, file)?;
        let ready = vec![Page([1; PAGE_BYTES]); RANGE];
        let mut found = Vec::new();
        for (width, names) in [
            (1, ["COPY", "write-protect", "punch"]),
            (
                RANGE,
                ["COPY by range", "write-protect by range", "punch by range"],
            ),
        ] {
            let copy = |page| watch.copy(page, &ready[..width]);
            found.push((names[0], timed(pages, width, copy)?));
            let protect = |page| watch.protect(page, width);
            found.push((names[1], timed(pages, width, protect)?));
            let punch = |page| watch.punch(page, width);
            found.push((names[2], timed(pages, width, punch)?));
        }
        Ok(found)
    })
    .join()
    .expect("no panic")
}

fn timed(pages: usize, width: usize, call: impl Fn(usize) -> Result<()>) -> Result<Latencies> {
    let mut latencies = Latencies::default();
    for page in (0..pages / width * width).step_by(width) {
        let started = Instant::now();
        call(page)?;
        latencies.record(started.elapsed().as_nanos() as u64 / width as u64);
    }
    Ok(latencies)
}

/// The wire's floors.
#[derive(Debug)]
pub struct Wire {
    /// Round trips of single pages.
    pub round_trips: Latencies,
    /// Pages per second that come by batches of [`RANGE`], each one request and waited for.
    pub read_per_second: f64,
    /// ... that are sent so.
    pub written_per_second: f64,
}

/// Round trips and bandwidth of pages over TCP, without anything of ours on either side. The store has at least
/// [`RANGE`] pages.
pub fn wire(layout: &Layout, store: &Store, count: usize) -> Result<Wire> {
    let mut client = Client::connect(&store.address)?;
    let layout = layout.clone();
    std::thread::spawn(move || {
        pin_self(&layout.pager)?;
        let mut page = Box::new(Page([0; PAGE_BYTES]));
        let mut round_trips = Latencies::default();
        for _ in 0..count {
            let started = Instant::now();
            client.read(0, &mut page)?;
            round_trips.record(started.elapsed().as_nanos() as u64);
        }
        let mut pages = vec![1; RANGE * PAGE_BYTES];
        // Written first: what was never written is one page of zeros for all.
        let written_per_second = per_second(count, || client.write_run(0, &pages))?;
        let read_per_second = per_second(count, || client.read_run(0, &mut pages))?;
        Ok(Wire {
            round_trips,
            read_per_second,
            written_per_second,
        })
    })
    .join()
    .expect("no panic")
}

/// Pages per second of batches, as many as take about as long as so many single pages.
fn per_second(count: usize, mut batch: impl FnMut() -> Result<()>) -> Result<f64> {
    let batches = (count / 16).max(1);
    // Buffers grow at first.
    batch()?;
    let started = Instant::now();
    for _ in 0..batches {
        batch()?;
    }
    Ok((batches * RANGE) as f64 / started.elapsed().as_secs_f64())
}

/// Pages per second that one thread copies from memory to memory.
pub fn copied_pages_per_second(layout: &Layout) -> Result<f64> {
    let layout = layout.clone();
    std::thread::spawn(move || {
        pin_self(&layout.pager)?;
        let bytes = COPIED_PAGES * PAGE_BYTES;
        let (from, to) = (anonymous(bytes)?, anonymous(bytes)?);
        let (from, to) = (from.get_slice(0, bytes)?, to.get_slice(0, bytes)?);
        // In pages of their own: what is only read is one page of zeros for all.
        let mut page = Page([1; PAGE_BYTES]);
        for index in 0..COPIED_PAGES {
            from.subslice(index * PAGE_BYTES, PAGE_BYTES)?
                .copy_from(&page.0);
        }
        // Once for the kernel to find the pages.
        from.copy_to_volatile_slice(to);
        let started = Instant::now();
        for _ in 0..COPIES {
            for index in 0..COPIED_PAGES {
                let (source, target) = (
                    from.subslice(index * PAGE_BYTES, PAGE_BYTES)?,
                    to.subslice(index * PAGE_BYTES, PAGE_BYTES)?,
                );
                source.copy_to_volatile_slice(target);
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        to.subslice(0, PAGE_BYTES)?.copy_to(&mut page.0);
        ensure!(page.0[0] == 1, "nothing was copied");
        Ok((COPIES * COPIED_PAGES) as f64 / seconds)
    })
    .join()
    .expect("no panic")
}

#[cfg(test)]
mod tests {
    use super::super::layout::Kind;
    use super::super::watched_memory::skip_without_userfaultfd;
    use super::*;

    #[test]
    fn every_page_is_touched_and_answered_once() {
        let layout = Layout::new(Kind::Free).expect("processors");
        for waiting in [Waiting::Sleeping, Waiting::Spinning] {
            // Where userfaultfd may not be used, there is nothing to see.
            let Ok(latencies) = faults(&layout, waiting, 96) else {
                return skip_without_userfaultfd();
            };
            assert_eq!(latencies.count(), 96);
        }
        let calls = calls(&layout, 2 * RANGE).expect("userfaultfd");
        let counts: Vec<u64> = calls
            .iter()
            .map(|(_, latencies)| latencies.count())
            .collect();
        assert_eq!(counts, [128, 128, 128, 2, 2, 2]);
        assert!(copied_pages_per_second(&layout).expect("memory") > 0.0);
    }
}
