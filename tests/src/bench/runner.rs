//! The process that runs a workload on memory that Outram has no part in. It is commanded as the small
//! VMM is, by `ready`, `workload` and `exit`.

use std::io::{BufRead, Write};
use std::str::FromStr;

use anyhow::{Result, bail};
use serde_json::{Value, json};
use vm_memory::MmapRegion;

use super::layout::pin_self;
use super::page_store::Client;
use super::phase::{Subject, Task};
use super::plain_pager::PlainPager;
use super::watched_memory::{PAGE_BYTES, Watch, advise_huge, anonymous, as_words, shared};

/// Bytes of a huge page: memory is made of whole ones, so that each may become one.
const HUGE_BYTES: usize = 2 << 20;

/// Memory to run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Anonymous, with huge pages asked for.
    Huge,
    /// Anonymous, in base pages: what the kernel swaps page by page.
    Base,
    /// A memfd, as a guest's is.
    Memfd,
    /// A memfd paged by the [plain pager](PlainPager).
    Paged,
}

impl FromStr for Memory {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "huge" => Ok(Self::Huge),
            "base" => Ok(Self::Base),
            "memfd" => Ok(Self::Memfd),
            "paged" => Ok(Self::Paged),
            other => bail!("memory is 'huge', 'base', 'memfd' or 'paged', not '{other}'"),
        }
    }
}

/// How to run.
#[derive(Clone, Debug)]
pub struct Order {
    /// On what.
    pub memory: Memory,
    /// What.
    pub task: Task,
    /// Processors of the workload.
    pub cpus: Vec<usize>,
    /// For memory that is paged: pages in memory, address of the page store, the pager's processors.
    pub paging: Option<(usize, String, Vec<usize>)>,
}

/// Obeys until `exit` or the end of standard input.
pub fn obey(order: &Order) -> Result<()> {
    pin_self(&order.cpus)?;
    let mut subject = Subject::new(&order.task)?;
    let bytes = subject.footprint().next_multiple_of(HUGE_BYTES);
    let (mut region, pager) = make(order, bytes)?;
    for line in std::io::stdin().lock().lines() {
        let command: Value = serde_json::from_str(&line?)?;
        let memory = as_words(&mut region);
        let result = match command["do"].as_str() {
            // Its memory is mapped, and nothing of it is there.
            Some("ready") => Ok(json!({})),
            Some("workload") => work(&command, &mut subject, memory),
            Some("exit") => break,
            other => bail!("unknown command {other:?}"),
        };
        let answer = match result {
            Ok(value) => json!({"id": command["id"], "ok": value}),
            Err(error) => json!({"id": command["id"], "error": format!("{error:#}")}),
        };
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{answer}")?;
        stdout.flush()?;
    }
    match pager {
        Some(pager) => pager.end().map(drop),
        None => Ok(()),
    }
}

fn work(command: &Value, subject: &mut Subject, memory: &mut [u64]) -> Result<Value> {
    match command["phase"].as_str() {
        Some("prepare") => subject.prepare(memory).map(|()| json!({})),
        Some("run") => Ok(serde_json::to_value(subject.run(memory)?)?),
        Some("digest") => Ok(json!({"digest": subject.digest(memory)?})),
        other => bail!("unknown phase {other:?}"),
    }
}

fn make(order: &Order, bytes: usize) -> Result<(MmapRegion, Option<PlainPager>)> {
    match (order.memory, &order.paging) {
        (kind @ (Memory::Huge | Memory::Base), None) => {
            let region = anonymous(bytes)?;
            advise_huge(&region, kind == Memory::Huge)?;
            Ok((region, None))
        }
        (Memory::Memfd, None) => Ok((shared(bytes)?.0, None)),
        (Memory::Paged, Some((limit, address, cpus))) => {
            let (region, file) = shared(bytes)?;
            let watch = Watch::new(&region, file)?;
            let client = Client::connect(address)?;
            let limit = (*limit).min(bytes / PAGE_BYTES);
            Ok((region, Some(PlainPager::start(watch, client, limit, cpus)?)))
        }
        (memory, _) => {
            bail!("a limit and a store are for paged memory, and it needs both: {memory:?}")
        }
    }
}
