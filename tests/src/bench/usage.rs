//! What threads and processes have used, by /proc.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

/// What a thread has used so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThreadUsage {
    /// Time on a processor.
    pub cpu: Duration,
    /// Faults that the kernel read a page for.
    pub major_faults: u64,
    /// Other faults: userfaultfd's are among these.
    pub minor_faults: u64,
}

impl ThreadUsage {
    /// Of the calling thread.
    pub fn now() -> Result<Self> {
        let stat = fs::read_to_string("/proc/thread-self/stat")?;
        // Counted from the name's end, as it may hold spaces: minflt is field 10, majflt field 12
        // (proc_pid_stat(5)).
        let (_, rest) = stat.rsplit_once(") ").context("a thread's name")?;
        let fields: Vec<&str> = rest.split(' ').collect();
        let field = |number: usize| -> Result<u64> {
            let text = fields.get(number - 3).context("too few fields")?;
            Ok(text.parse()?)
        };
        Ok(Self {
            cpu: on_processor("/proc/thread-self/schedstat")?,
            minor_faults: field(10)?,
            major_faults: field(12)?,
        })
    }

    /// What was used since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            cpu: self.cpu.saturating_sub(earlier.cpu),
            major_faults: self.major_faults.saturating_sub(earlier.major_faults),
            minor_faults: self.minor_faults.saturating_sub(earlier.minor_faults),
        }
    }
}

/// Time that a process's present threads have been on a processor.
pub fn process_cpu(pid: u32) -> Result<Duration> {
    let mut sum = Duration::ZERO;
    let tasks = format!("/proc/{pid}/task");
    for task in fs::read_dir(&tasks).with_context(|| tasks.clone())? {
        // A thread that has ended meanwhile.
        let Ok(used) = on_processor(&task?.path().join("schedstat").display().to_string()) else {
            continue;
        };
        sum += used;
    }
    Ok(sum)
}

/// The first field of a `schedstat`: nanoseconds on a processor (Documentation/scheduler/sched-stats).
fn on_processor(path: &str) -> Result<Duration> {
    let text = fs::read_to_string(path).with_context(|| path.to_owned())?;
    let first = text.split(' ').next().context("an empty schedstat")?;
    Ok(Duration::from_nanos(first.parse()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_seen_in_its_thread() {
        let before = ThreadUsage::now().expect("/proc");
        let mut memory = vec![0_u8; 4 << 20];
        while ThreadUsage::now().expect("/proc").since(&before).cpu < Duration::from_millis(2) {
            // An optimiser would drop stores that nobody reads.
            std::hint::black_box(&mut memory).fill(1);
        }
        let used = ThreadUsage::now().expect("/proc").since(&before);
        assert!(used.minor_faults > 0, "{used:?}");
    }

    #[test]
    fn work_is_seen_in_its_process() {
        let mut busy = std::process::Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .expect("a shell");
        while process_cpu(busy.id()).expect("/proc") < Duration::from_millis(2) {
            std::thread::yield_now();
        }
        busy.kill().expect("it runs");
        busy.wait().expect("it was killed");
        assert!(process_cpu(busy.id()).is_err());
    }
}
