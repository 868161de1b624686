//! The benchmark measures what it says that it does: a tiny run of it leaves every row. What the figures
//! are is nothing that a test could judge.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use libtest_mimic::{Arguments, Trial};
use outram_tests::bench::phase::Run;
use outram_tests::bench::results::Results;
use outram_tests::hermetic::sandbox;
use outram_tests::hermetic::suite::{Skipped, outcome};

/// Runs the program; what it said.
fn bench(words: &[&str]) -> Result<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(words)
        .output()
        .context("running the benchmark")?;
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(
        output.status.success(),
        "'bench {}' ended with {}:\n{}{}",
        words.join(" "),
        output.status,
        said(&output.stdout),
        said(&output.stderr)
    );
    Ok(said(&output.stdout))
}

/// Swap is left out, for it is the whole machine's.
fn tiny_run(folder: &Path) -> Result<String> {
    let folder = folder.display().to_string();
    let small = "run --quick --rounds 1 --faults 200 --fault-mib 32 --tune-mib 16 --workload-mib 34 \
                 --only sequential-write,sequential-read --baselines plain --layout free --out";
    bench(
        &small
            .split_whitespace()
            .chain([folder.as_str()])
            .collect::<Vec<_>>(),
    )
}

fn every_row_is_there() -> Result<()> {
    if let Some(reason) = sandbox::obstacle_without_libvirt() {
        return Err(Skipped(reason).into());
    }
    let folder = tempfile::tempdir()?;
    let table = tiny_run(folder.path())?;
    let path = folder.path().join("results.json");
    let results = Results::load(&path)?;
    for name in [
        "uffd round trip, sleeping",
        "uffd round trip, spinning",
        "COPY",
        "write-protect by range",
        "punch by range",
        "wire round trip",
        "remote fault",
        "remote fault at the limit",
        "held page, tuning down",
    ] {
        let found = results.distributions.get(name);
        let found = found.with_context(|| format!("no latencies of '{name}'"))?;
        ensure!(found.count > 0 && found.ns_p50 > 0, "{name}: {found:?}");
    }
    for name in [
        "remote fault: CPU of helper",
        "eviction of dirty pages: wire bytes per useful byte",
        "tuning down",
        "copying pages",
        "wire, batched",
        "page table",
    ] {
        let rounds = results.rounds(name);
        ensure!(rounds.len() == 1, "{name}: {rounds:?}");
    }
    for workload in ["sequential-write", "sequential-read"] {
        for (memory, local) in [
            ("huge", 1.0),
            ("memfd", 1.0),
            ("outram", 1.0),
            ("outram", 0.5),
            ("plain", 0.5),
        ] {
            let series = results.series(workload, memory, local);
            let series = series.with_context(|| format!("no {workload} on {memory} at {local}"))?;
            ensure!(series.runs.len() == 1, "{series:?}");
            // Outram's own count, where there is one: of its faults, pages fetched ahead leave few.
            let paged = |run: &Run| match run.counters.get("evicted_pages") {
                Some(evicted) => *evicted,
                None => run.major_faults + run.minor_faults,
            };
            let pages = series.runs.iter().map(paged).min();
            ensure!(
                local == 1.0 || pages > Some(1000),
                "nothing was paged: {series:?}"
            );
        }
    }
    for wanted in [
        "remote fault ÷ (uffd + wire), medians",
        "outram at 0.5 ÷ plain at 0.5",
    ] {
        ensure!(
            results.ratios.iter().any(|ratio| ratio.name == wanted),
            "no ratio '{wanted}'"
        );
        ensure!(table.contains(wanted), "'{wanted}' is not in:\n{table}");
    }
    for file in [
        "latencies.svg",
        "latencies.png",
        "slowdown.svg",
        "slowdown-sequential-read.png",
    ] {
        ensure!(folder.path().join(file).is_file(), "no {file}");
    }
    let path = path.display().to_string();
    let compared = bench(&["compare", &path, &path])?;
    ensure!(
        compared.contains("+0.0%") && !compared.contains("WORSE"),
        "{compared}"
    );
    ensure!(
        bench(&["show", &path])?.contains("sequential-read"),
        "nothing is shown"
    );
    Ok(())
}

fn nonsense_is_refused() -> Result<()> {
    for words in [
        "compare /dev/null /dev/null",
        "run --layout diagonal",
        "runner --memory huge --task {} --cpus 0",
        "runner --memory tape --task {} --cpus 0",
    ] {
        let words: Vec<&str> = words.split(' ').collect();
        ensure!(bench(&words).is_err(), "{words:?} was taken");
    }
    Ok(())
}

fn main() -> ExitCode {
    let trials = vec![
        Trial::ignorable_test("a_tiny_run_leaves_every_row", || {
            outcome(every_row_is_there())
        }),
        Trial::ignorable_test("nonsense_is_refused", || outcome(nonsense_is_refused())),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
