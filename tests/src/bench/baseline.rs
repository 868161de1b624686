//! What Outram is compared with: the same workloads on memory that others look after.
//!
//! | memory | what it is |
//! |---|---|
//! | `huge` | anonymous memory, all local, huge pages asked for: as fast as this machine can be |
//! | `memfd` | a memfd, all local: a guest's memory without Outram |
//! | `plain` | a memfd paged by a [plain pager](super::plain_pager), over TCP |
//! | `zram` | anonymous memory under a memory cgroup, swapped to a compressed RAM disk of this host |
//! | `swap-file` | the same, swapped to a file on this host |
//! | `nbd` | the same, swapped to a network block device whose server keeps it in memory, over TCP |

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::phase::{Run, Task};
use super::session::Session;
use super::swap::{NbdPlace, Swap};
use super::watched_memory::PAGE_BYTES;
use crate::hermetic::hard_limit::HardLimit;
use crate::small_vmm::client::SmallVmm;

/// Bytes of data that a byte of the kernel's page tables maps.
const MAPPED_BY_TABLE: u64 = 512;
/// What a cgroup has beside that: with none to spare the kernel soon finds nothing to swap out in time, and kills.
const SPARE_BYTES: u64 = 1 << 20;

/// Memory that all workloads can be run on.
pub const ALL_LOCAL: [&str; 2] = ["huge", "memfd"];
/// The kernel's swap to compressed memory.
pub const ZRAM: &str = "zram";
/// ... to a file.
pub const SWAP_FILE: &str = "swap-file";
/// ... to a network block device.
pub const NBD: &str = "nbd";
/// Memory of which a part is elsewhere.
pub const PARTLY_LOCAL: [&str; 4] = ["plain", ZRAM, SWAP_FILE, NBD];
/// Memory of which the kernel swaps a part out.
pub const SWAPPED: [&str; 3] = [ZRAM, SWAP_FILE, NBD];

/// Runs in a row where all memory is local: they are so short that another process may take all of the
/// time of one.
pub const LOCAL_TIMES: usize = 5;

/// Between the preparation and the run where the kernel swaps: a guest of Outram's comes to rest in between, and the
/// kernel is to have as good a chance to write out what is on its way. It does not say when it has. (The plain pager
/// has nothing on its way when it goes on.)
const PAUSE: Duration = Duration::from_millis(500);

/// Attempts at a run under a cgroup's limit: the kernel may find nothing to swap out in time, and kill
/// what it should shrink.
const ATTEMPTS: usize = 3;

/// Fails where this machine has no such memory, with the reason.
pub fn try_out(session: &Session, memory: &str) -> Result<()> {
    if SWAPPED.contains(&memory) {
        swap(session, memory, TRIED_BYTES)?.demand_alone()?;
        drop(HardLimit::with_swap(TRIED_BYTES)?);
    }
    Ok(())
}

/// Swap that is made to see whether it can be.
const TRIED_BYTES: u64 = 16 << 20;

fn swap(session: &Session, memory: &str, bytes: u64) -> Result<Swap> {
    let reserved = session.reserved_swap()?;
    match memory {
        ZRAM => Swap::zram(reserved, bytes).context("making swap on zram"),
        NBD => {
            let place = NbdPlace {
                file: session.lab.path("nbd-swap"),
                address: session.lab.address(),
                cpus: &session.layout.server,
            };
            Swap::nbd(reserved, bytes, &place).context("making swap over NBD")
        }
        _ => Swap::file(reserved, bytes).context("making a swap file"),
    }
}

/// Runs a workload of so many bytes once.
pub fn run(session: &Session, memory: &str, task: &Task, bytes: u64, local: f64) -> Result<Run> {
    let limit = (bytes as f64 * local) as u64;
    match memory {
        "huge" | "memfd" => {
            let runner = start(session, memory, task, &[])?;
            drive(session, runner, task, LOCAL_TIMES, None)
        }
        "plain" => {
            let pages = bytes as usize / PAGE_BYTES;
            let store = session.page_store(pages)?;
            let limit = (limit as usize / PAGE_BYTES).to_string();
            let paging = [
                ("--limit-pages", limit.as_str()),
                ("--store", &store.address),
                ("--pager-cpus", &list(&session.layout.pager)),
            ];
            let runner = start(session, "paged", task, &paging)?;
            drive(session, runner, task, 1, None)
        }
        ZRAM | SWAP_FILE | NBD => {
            let swap = swap(session, memory, bytes * 2)?;
            for _ in 1..ATTEMPTS {
                match swapped(session, &swap, task, bytes, limit) {
                    Ok(run) => return Ok(run),
                    Err(error) => session.say(&format!("{memory}, tried again: {error:#}")),
                }
            }
            swapped(session, &swap, task, bytes, limit)
        }
        other => bail!("there is no memory '{other}'"),
    }
}

/// So much of the data is local: what the process has beside it comes on top.
fn swapped(session: &Session, swap: &Swap, task: &Task, bytes: u64, limit: u64) -> Result<Run> {
    swap.demand_alone()?;
    let group = HardLimit::with_swap(2 * bytes)?;
    let mut runner = start(session, "base", task, &[])?;
    group.add(runner.pid() as u32)?;
    runner.command(serde_json::json!({"do": "ready"}))?;
    // Nothing of the data is there yet; the tables that map it come with it.
    let beside = group.used_bytes()? + bytes / MAPPED_BY_TABLE + SPARE_BYTES;
    group.set_limit(limit + beside)?;
    let run = drive(session, runner, task, 1, Some(&group))?;
    ensure!(
        run.major_faults > 0,
        "nothing was swapped in: the cgroup's limit has no effect here"
    );
    Ok(run)
}

fn list(cpus: &[usize]) -> String {
    let words: Vec<String> = cpus.iter().map(usize::to_string).collect();
    words.join(",")
}

/// Starts a runner of a workload on a kind of memory.
pub fn start(
    session: &Session,
    memory: &str,
    task: &Task,
    more: &[(&str, &str)],
) -> Result<SmallVmm> {
    let mut command = Command::new(&session.program);
    command.args(["runner", "--memory", memory]);
    command.args(["--task", &serde_json::to_string(task)?]);
    command.args(["--cpus", &list(&session.layout.vcpu)]);
    for (flag, value) in more {
        command.args([flag, value]);
    }
    SmallVmm::spawn(command)
}

/// Prepares and runs so many times; the run of median length. The group, where the kernel swaps, is kept until the
/// runner has ended.
fn drive(
    session: &Session,
    mut runner: SmallVmm,
    task: &Task,
    times: usize,
    group: Option<&HardLimit>,
) -> Result<Run> {
    let pause = group.map_or(Duration::ZERO, |_| PAUSE);
    let mut work = |phase: &str| task.command(&mut runner, phase, session.settings.patience);
    let result = median(times, || {
        work("prepare")?;
        std::thread::sleep(pause);
        let mut run = work("run")?;
        run["digest"] = work("digest")?["digest"].take();
        Ok(run)
    });
    if let (Err(_), Some(group)) = (&result, group) {
        let killed = group.kills().unwrap_or(0);
        ensure!(
            killed == 0,
            "the kernel killed the workload for its cgroup's limit"
        );
    }
    let run = result?;
    runner.exit()?;
    Ok(run)
}

/// Of several runs in a row, that of median length; all of them must come to the same.
pub fn median(times: usize, mut run: impl FnMut() -> Result<Value>) -> Result<Run> {
    let mut runs: Vec<Run> = Vec::with_capacity(times);
    for _ in 0..times {
        let run: Run = serde_json::from_value(run()?)?;
        if let Some(first) = runs.first() {
            first.demand_same(&run)?;
        }
        runs.push(run);
    }
    middle(runs)
}

/// The run of median length.
pub fn middle(mut runs: Vec<Run>) -> Result<Run> {
    runs.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
    ensure!(!runs.is_empty(), "nothing was run");
    Ok(runs.swap_remove(runs.len() / 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_run_of_median_length_is_taken() {
        let mut lengths = [3.0, 9.0, 1.0].into_iter();
        let mut next = || {
            let run = Run {
                seconds: lengths.next().expect("three runs"),
                ..Run::default()
            };
            Ok(serde_json::to_value(run)?)
        };
        assert_eq!(median(3, &mut next).expect("runs").seconds, 3.0);
        let mut checksum = 0;
        let changing = || {
            checksum += 1;
            let run = Run {
                checksum,
                ..Run::default()
            };
            Ok(serde_json::to_value(run)?)
        };
        assert!(median(2, changing).is_err());
        assert!(median(0, || Ok(Value::Null)).is_err());
    }
}
