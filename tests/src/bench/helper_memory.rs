//! What a guest's helper costs its host in memory: in all, and for each page that the guest has more.
//!
//! The helper is pager and supervisor, as libvirt's hook starts them. Most of what it has is the same for any
//! guest, so a small one would be within its allowance whatever its pages cost: two sizes tell that apart.

use std::fs;

use anyhow::{Context, Result};
use serde_json::json;

use super::own::{command, squeeze_and_settle};
use super::results::Results;
use super::session::Session;

/// What a helper's memory is to stay below: so much for each page, and so much beside that.
pub const BYTES_A_PAGE: u64 = 32;
const BYTES: u64 = 64 << 20;
/// Name of that bound's figure.
pub const ALLOWED: &str = "32 bytes a page + 64 MiB";
/// Name of the figure that is the helper's memory by it.
pub const BY_ALLOWED: &str = "helper's memory ÷ (32 bytes a page + 64 MiB)";
/// Name of the figure that is what the larger guest's helper has more, by the pages that the guest has more.
pub const EACH_PAGE_MORE: &str = "helper's memory, each page more";

/// How many times as large the larger guest is.
const LARGER: u64 = 2;

/// What a helper has.
#[derive(Clone, Copy, Debug)]
struct Memory {
    /// Pages of its guest.
    pages: u64,
    /// Blocks of the page table, whose entries are made as pages are first used.
    table: u64,
    /// The pager's anonymous memory.
    pager: u64,
    /// The supervisor's.
    supervisor: u64,
}

impl Memory {
    fn bytes(&self) -> u64 {
        self.table + self.pager + self.supervisor
    }
}

/// Measures both sizes.
pub fn measure(session: &mut Session) -> Result<()> {
    let mib = session.settings.fault_mib;
    let small = of_guest(session, mib)?;
    let large = of_guest(session, mib * LARGER)?;
    note(&mut session.results, small, large);
    Ok(())
}

/// Of a guest all of whose pages have left and are local again, by a limit as large as its RAM: what is kept for pages
/// that are elsewhere is there, and what is kept for those that are local, as many as there can be.
fn of_guest(session: &Session, mib: u64) -> Result<Memory> {
    let mut guest = session.supervised_guest(mib, mib << 20)?;
    let pages = guest.pages();
    let all = json!({"page": 0, "pages": pages});
    command(&mut guest, "fill", all.clone())?;
    squeeze_and_settle(&guest)?;
    guest.tune(mib << 20)?;
    command(&mut guest, "touch", all)?;
    let status = guest.settle()?;
    let memory = Memory {
        pages,
        table: status.kernel_table_bytes,
        pager: anonymous_bytes(status.backend_pid)?,
        supervisor: anonymous_bytes(guest.backend_pid())?,
    };
    guest.end(&[&session.server])?;
    Ok(memory)
}

/// Anonymous memory of a process, to the page: what its status says is off by some dozen pages for each processor
/// (lib/percpu_counter.c), which is more than is looked for here.
fn anonymous_bytes(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let mut lines = text.lines();
    let line = lines.find_map(|line| line.strip_prefix("Anonymous:"));
    let kib = line.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    Ok(kib.with_context(|| format!("{path} says nothing of anonymous memory"))? << 10)
}

fn note(results: &mut Results, small: Memory, large: Memory) {
    let pages = large.pages as f64;
    let bytes = large.bytes() as f64;
    results.note(
        "helper's memory, all pages in use",
        "bytes/page",
        bytes / pages,
    );
    let more = bytes - small.bytes() as f64;
    let each = more / (large.pages - small.pages) as f64;
    results.note(EACH_PAGE_MORE, "bytes/page", each);
    let allowed = (BYTES_A_PAGE * large.pages + BYTES) as f64;
    results.note(BY_ALLOWED, "", bytes / allowed);
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    results.note(ALLOWED, "MiB", mib(allowed));
    for (name, bytes) in [("pager", large.pager), ("supervisor", large.supervisor)] {
        let name = format!("anonymous memory of the {name}");
        results.note(&name, "MiB", mib(bytes as f64));
    }
    let table = large.table as f64 / pages;
    results.note("page table", "bytes/page", table);
}

#[cfg(test)]
mod tests {
    use super::super::targets::{self, Verdict};
    use super::*;

    /// A helper that has so many bytes for each page.
    fn memory(pages: u64, each: u64) -> Memory {
        Memory {
            pages,
            table: 24 * pages,
            pager: (each - 24) * pages + (10 << 20),
            supervisor: 2 << 20,
        }
    }

    #[test]
    fn pages_that_cost_too_much_miss_the_target_however_much_is_allowed_beside_them() {
        for (each, verdict) in [(32, Verdict::Met), (40, Verdict::Missed)] {
            let mut results = Results::default();
            note(&mut results, memory(1 << 17, each), memory(1 << 18, each));
            assert_eq!(results.rounds(EACH_PAGE_MORE), [each as f64]);
            assert!(results.rounds(BY_ALLOWED)[0] < 1.0);
            let targets = targets::of(&results);
            let verdicts: Vec<Verdict> = targets
                .iter()
                .filter(|target| target.number == "P6")
                .map(|target| target.verdict)
                .collect();
            assert_eq!(verdicts, [Verdict::Met, verdict]);
        }
    }

    #[test]
    fn anonymous_memory_is_counted_to_the_page() {
        let before = anonymous_bytes(std::process::id()).expect("our own");
        let more = vec![1_u8; 64 << 20];
        let after = anonymous_bytes(std::process::id()).expect("our own");
        // Other tests take and give some meanwhile.
        let rise = after as i64 - before as i64;
        assert!(rise > 32 << 20, "{rise} for {}", more.len());
        assert!(anonymous_bytes(u32::MAX).is_err());
    }
}
