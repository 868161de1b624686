//! The benchmark's swap over a network block device, which of all kernels at hand only the lab guest's has.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use outram_tests::bench::swap::{NbdPlace, Reserved, Swap};
use outram_tests::hermetic::hard_limit::HardLimit;
use outram_tests::small_lab::Lab;

pub(crate) const TESTS: &[crate::Test] = &[(
    "memory_swapped_over_nbd_comes_back_and_the_device_goes",
    comes_back,
)];

const BYTES: usize = 16 << 20;

fn comes_back(lab: &Lab) -> Result<()> {
    let folder = lab.path("swap");
    let reserved = Reserved::new(&folder)?;
    let place = NbdPlace {
        file: lab.path("nbd-swap"),
        address: "127.0.0.1:10899".to_owned(),
        cpus: &[1],
    };
    let swap = Swap::nbd(&reserved, 2 * BYTES as u64, &place)?;
    swap.demand_alone()?;
    let limit = HardLimit::with_swap(BYTES as u64 / 2)?;
    limit.add(std::process::id())?;
    let used = use_memory();
    limit.release(std::process::id())?;
    used?;
    drop(swap);
    let swaps = fs::read_to_string("/proc/swaps")?;
    ensure!(swaps.lines().count() == 1, "{swaps}");
    ensure!(
        !Path::new("/sys/block/nbd0/pid").exists(),
        "it is connected"
    );
    let left: Vec<_> = fs::read_dir(&folder)?.filter_map(Result::ok).collect();
    ensure!(left.len() == 1, "beside the lock there is left: {left:?}");
    // And another, at the same address.
    drop(Swap::nbd(&reserved, 2 * BYTES as u64, &place)?);
    Ok(())
}

/// Fills and reads more memory than may stay.
fn use_memory() -> Result<()> {
    let mut words = vec![0; BYTES / size_of::<u64>()];
    let numbered = |number: usize| !(number as u64);
    for (number, word) in words.iter_mut().enumerate() {
        *word = numbered(number);
    }
    let swapped = swapped_bytes()?;
    ensure!(swapped > BYTES / 4, "swapped are {swapped} bytes alone");
    let is_as_filled = |(number, word): (usize, &u64)| *word == numbered(number);
    ensure!(
        words.iter().enumerate().all(is_as_filled),
        "other bytes came back"
    );
    Ok(())
}

/// Bytes of this process that are swapped out.
fn swapped_bytes() -> Result<usize> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmSwap:"));
    let kib = line.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<usize>().ok());
    Ok(kib.with_context(|| format!("no word of swap: {status}"))? << 10)
}
