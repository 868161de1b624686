//! What Outram is compared with: the same workloads on memory that others look after.
//!
//! | memory | what it is |
//! |---|---|
//! | `huge` | anonymous memory, all local, huge pages asked for: as fast as this machine can be |
//! | `memfd` | a memfd, all local: a guest's memory without Outram |
//! | `plain` | a memfd paged by a [plain pager](super::plain_pager), over TCP |
//! | `zram` | anonymous memory under a memory cgroup, swapped to a compressed RAM disk of this host |
//! | `swap-file` | the same, swapped to a file on this host |

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::layout;
use super::page_store::Store;
use super::phase::{Run, Task};
use super::session::Session;
use super::swap::Swap;
use super::watched_memory::PAGE_BYTES;
use crate::hermetic::hard_limit::HardLimit;
use crate::small_vmm::client::SmallVmm;

/// What a process that runs a workload under a cgroup's limit may use beside its data: its stacks, its
/// heap, and the kernel's page tables.
const PROCESS_BYTES: u64 = 4 << 20;

/// Memory that all workloads can be run on.
pub const ALL_LOCAL: [&str; 2] = ["huge", "memfd"];
/// Memory of which a part is elsewhere.
pub const PARTLY_LOCAL: [&str; 3] = ["plain", "zram", "swap-file"];

/// Runs a workload of so many bytes once.
pub fn run(session: &Session, memory: &str, task: &Task, bytes: u64, local: f64) -> Result<Run> {
    let limit = (bytes as f64 * local) as u64;
    match memory {
        "huge" | "memfd" => drive(session, start(session, memory, task, &[])?, &[]),
        "plain" => {
            let pages = bytes as usize / PAGE_BYTES;
            let store = Store::start(&session.program, pages)?;
            layout::pin(store.pid(), &session.layout.server)?;
            let limit = (limit as usize / PAGE_BYTES).to_string();
            let paging = [
                ("--limit-pages", limit.as_str()),
                ("--store", &store.address),
                ("--pager-cpus", &list(&session.layout.pager)),
            ];
            drive(session, start(session, "paged", task, &paging)?, &[])
        }
        "zram" => {
            let swap = Swap::zram(bytes * 2).context("making swap on zram")?;
            swapped(session, &swap, task, limit)
        }
        "swap-file" => {
            let swap = Swap::file(session.folder(), bytes * 2).context("making a swap file")?;
            swapped(session, &swap, task, limit)
        }
        other => bail!("there is no memory '{other}'"),
    }
}

fn swapped(session: &Session, swap: &Swap, task: &Task, limit: u64) -> Result<Run> {
    swap.demand_alone()?;
    let group = HardLimit::with_swap(limit + PROCESS_BYTES)?;
    let runner = start(session, "base", task, &[])?;
    group.add(runner.pid() as u32)?;
    let run = drive(session, runner, &[&group])?;
    // Fewer faults than pages beyond the limit: the kernel counted something else.
    anyhow::ensure!(
        run.major_faults > 0,
        "nothing was swapped in: the cgroup's limit has no effect here"
    );
    Ok(run)
}

fn list(cpus: &[usize]) -> String {
    let words: Vec<String> = cpus.iter().map(usize::to_string).collect();
    words.join(",")
}

fn start(session: &Session, memory: &str, task: &Task, more: &[(&str, &str)]) -> Result<SmallVmm> {
    let mut command = Command::new(&session.program);
    command.args(["runner", "--memory", memory]);
    command.args(["--task", &serde_json::to_string(task)?]);
    command.args(["--cpus", &list(&session.layout.vcpu)]);
    for (flag, value) in more {
        command.args([flag, value]);
    }
    SmallVmm::spawn(command)
}

/// Prepares and runs; `groups` are kept until the runner has ended.
fn drive(session: &Session, mut runner: SmallVmm, groups: &[&HardLimit]) -> Result<Run> {
    let patience: Duration = session.settings.patience;
    let mut result = Err(anyhow::anyhow!("nothing was asked for"));
    for phase in ["prepare", "run"] {
        let asked = runner.send(json!({"do": phase}))?;
        result = runner.wait(asked, patience);
        if result.is_err() {
            break;
        }
    }
    for group in groups {
        let killed = group.kills().unwrap_or(0);
        anyhow::ensure!(
            killed == 0,
            "the kernel killed the workload for its cgroup's limit"
        );
    }
    let run = serde_json::from_value(result?)?;
    runner.exit()?;
    Ok(run)
}
