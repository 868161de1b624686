//! Which processors run what.

use std::fmt;
use std::fs::{self, File};
use std::io::Write;
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// How threads are spread over the processors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// The vCPU on one processor, the pager on another, the memory server on a third; where there
    /// are but two, pager and server share the second.
    #[default]
    Split,
    /// All on one processor.
    Shared,
    /// As the kernel likes.
    Free,
}

impl FromStr for Kind {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "split" => Ok(Self::Split),
            "shared" => Ok(Self::Shared),
            "free" => Ok(Self::Free),
            other => bail!("a layout is 'split', 'shared' or 'free', not '{other}'"),
        }
    }
}

/// Processors by what they run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    kind: Kind,
    /// Of the vCPU, or whatever thread uses the memory.
    pub vcpu: Vec<usize>,
    /// Of the pager, or whatever answers faults.
    pub pager: Vec<usize>,
    /// Of the memory server, or whatever keeps pages.
    pub server: Vec<usize>,
}

impl Layout {
    /// Of the processors that this process may use.
    pub fn new(kind: Kind) -> Result<Self> {
        let set = sched_getaffinity(None).context("asking for the processors")?;
        let cpus: Vec<usize> = (0..CpuSet::MAX_CPU)
            .filter(|&cpu| set.is_set(cpu))
            .collect();
        Self::over(kind, &cpus)
    }

    /// Whether pager and memory server have but one processor, and the same.
    pub fn is_server_beside_pager(&self) -> bool {
        self.pager.len() == 1 && self.pager == self.server
    }

    fn over(kind: Kind, cpus: &[usize]) -> Result<Self> {
        let first = *cpus.first().context("there is no processor")?;
        let nth = |index: usize| vec![cpus[index.min(cpus.len() - 1)]];
        let (vcpu, pager, server) = match kind {
            Kind::Split => (nth(0), nth(1), nth(2)),
            Kind::Shared => (vec![first], vec![first], vec![first]),
            Kind::Free => (cpus.to_vec(), cpus.to_vec(), cpus.to_vec()),
        };
        Ok(Self {
            kind,
            vcpu,
            pager,
            server,
        })
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |cpus: &[usize]| {
            let words: Vec<String> = cpus.iter().map(usize::to_string).collect();
            words.join(",")
        };
        write!(
            f,
            "{:?}: vCPU on processor {}, pager on {}, memory server on {}",
            self.kind,
            list(&self.vcpu),
            list(&self.pager),
            list(&self.server)
        )
    }
}

fn set_of(cpus: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        set.set(cpu);
    }
    set
}

/// How long a processor may take to wake, in microseconds as an `i32`, for as long as the file is open (Linux's
/// admin-guide/pm/cpuidle).
const WAKE_LATENCY: &str = "/dev/cpu_dma_latency";

/// Has no processor of the machine sleep where it idles, until what this returns is dropped. To wake one takes as
/// long as a page, or longer, where the machine is a virtual one, and not as long each time.
pub fn keep_awake() -> Result<File> {
    let mut file = File::options()
        .write(true)
        .open(WAKE_LATENCY)
        .context(WAKE_LATENCY)?;
    file.write_all(&0i32.to_ne_bytes()).context(WAKE_LATENCY)?;
    Ok(file)
}

/// Has the calling thread run on these processors alone, and what it starts from now on.
pub fn pin_self(cpus: &[usize]) -> Result<()> {
    sched_setaffinity(None, &set_of(cpus)).with_context(|| format!("pinning to {cpus:?}"))
}

/// Has every thread of a process run on these processors alone, and those that they start.
pub fn pin(pid: u32, cpus: &[usize]) -> Result<()> {
    let mut pinned = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let name = task?.file_name();
        let number: i32 = name.to_string_lossy().parse()?;
        let thread = Pid::from_raw(number).context("a thread's number")?;
        // One that has ended meanwhile needs no processor.
        pinned += usize::from(sched_setaffinity(Some(thread), &set_of(cpus)).is_ok());
    }
    ensure!(pinned > 0, "no thread of process {pid} could be pinned");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_do_with_what_there_is() {
        let split = |cpus: &[usize]| Layout::over(Kind::Split, cpus).expect("processors");
        let one = split(&[4]);
        assert!(one.is_server_beside_pager());
        assert_eq!(
            (one.vcpu, one.pager, one.server),
            (vec![4], vec![4], vec![4])
        );
        let two = split(&[0, 1]);
        assert!(two.is_server_beside_pager());
        assert_eq!(
            (two.vcpu, two.pager, two.server),
            (vec![0], vec![1], vec![1])
        );
        let many = split(&[2, 3, 5, 7]);
        assert!(!many.is_server_beside_pager());
        assert_eq!(
            (many.vcpu, many.pager, many.server),
            (vec![2], vec![3], vec![5])
        );
        let free = Layout::over(Kind::Free, &[0, 1]).expect("processors");
        assert!(!free.is_server_beside_pager(), "each may have its own");
        assert!(Layout::over(Kind::Free, &[]).is_err());
        assert!("diagonal".parse::<Kind>().is_err());
    }

    #[test]
    fn a_pinned_thread_stays_where_it_was_put() {
        let layout = Layout::new(Kind::Split).expect("processors");
        std::thread::spawn(move || {
            pin_self(&layout.pager).expect("allowed");
            let set = sched_getaffinity(None).expect("a set");
            assert_eq!(set.count() as usize, 1);
            assert!(set.is_set(layout.pager[0]));
        })
        .join()
        .expect("no panic");
    }
}
