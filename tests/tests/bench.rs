//! The benchmark measures what it says that it does: a tiny run of it leaves every row. What the figures
//! are is nothing that a test could judge.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use libtest_mimic::{Arguments, Trial};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outram_tests::bench::layout::{Kind, Layout};
use outram_tests::bench::mix::play::{Place, Player, Rules, together};
use outram_tests::bench::own::HUGE_FAULT;
use outram_tests::bench::phase::{Run, Task};
use outram_tests::bench::results::Results;
use outram_tests::bench::session::HUGE_PAGES;
use outram_tests::bench::targets::Verdict;
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::sandbox;
use outram_tests::hermetic::suite::{Skipped, outcome};
use outram_tests::small_vmm::client::SmallVmm;

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
    let small = "run --quick --rounds 1 --faults 200 --fault-mib 64 --tune-mib 16 --workload-mib 34 \
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
        HUGE_FAULT,
        "held page, tuning down",
    ] {
        if name == HUGE_FAULT && results.is_missing(HUGE_PAGES) {
            continue;
        }
        let found = results.distributions.get(name);
        let found = found.with_context(|| format!("no latencies of '{name}'"))?;
        ensure!(found.count > 0 && found.ns_p50 > 0, "{name}: {found:?}");
    }
    for name in [
        "remote fault: CPU of helper",
        "eviction of dirty pages: wire bytes per useful byte",
        "tuning down",
        "copying pages",
        "wire, 64 pages read",
        "wire, 64 pages written",
        "page table",
        "helper's memory, each page more",
        "anonymous memory of the supervisor",
        "64 pages written to a server: rate",
        "64 pages written to a server, raw socket: CPU of client",
        "64 pages read from a server, raw socket: CPU of server",
        "sequential-read: floor of a fault",
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
            let costs = series.runs.iter().map(|run| run.costs.len()).min();
            ensure!(
                memory != "outram" || local == 1.0 || costs == Some(5),
                "not all that it cost is told: {series:?}"
            );
        }
    }
    every_target_is_judged(&results)?;
    for wanted in [
        "remote fault ÷ (uffd + wire), medians",
        "remote fault ÷ (uffd alone + wire alone), medians",
        "outram at 0.5 ÷ plain at 0.5",
        "64 pages read from a server ÷ raw socket",
        "64 pages read from a server: beside a client that stalls ÷ without it",
        "tuning down ÷ (protect + copy + punch + send)",
        "outram at 0.5 ÷ (local memfd + fetches of OPT × floor of a fault)",
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
        compared.contains("+0.0%")
            && compared.contains("one round: no verdict")
            && !compared.contains("WORSE")
            && !compared.contains("UNFINISHED"),
        "{compared}"
    );
    ensure!(
        bench(&["show", &path])?.contains("sequential-read"),
        "nothing is shown"
    );
    Ok(())
}

/// With a verdict for all that this run had, and none for what it left out.
fn every_target_is_judged(results: &Results) -> Result<()> {
    for number in 1..=8 {
        let number = format!("P{number}");
        let mut of_it = results
            .targets
            .iter()
            .filter(|found| found.number == number);
        let is_judged = of_it.any(|found| matches!(found.verdict, Verdict::Met | Verdict::Missed));
        // The baselines of P2 are swap.
        let wanted = number != "P2";
        ensure!(is_judged == wanted, "{number}: {:?}", results.targets);
    }
    Ok(())
}

/// What a run had measured when Ctrl-C came is kept, and told.
fn an_interrupted_run_leaves_what_it_measured() -> Result<()> {
    if let Some(reason) = sandbox::obstacle_without_libvirt() {
        return Err(Skipped(reason).into());
    }
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("results.json");
    let long = "run --quick --rounds 1000 --faults 200 --fault-mib 64 --tune-mib 16 --workload-mib 0 \
                --layout free --out";
    let mut run = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(long.split_whitespace())
        .arg(folder.path())
        .stderr(Stdio::piped())
        .spawn()?;
    let round = wait_for("a round's results", Duration::from_secs(120), || {
        let ended = run.try_wait()?;
        ensure!(ended.is_none(), "it ended by itself: {ended:?}");
        Ok(path.exists().then_some(()))
    });
    // Whatever came of it, it is not to go on.
    if run.try_wait()?.is_none() {
        kill(Pid::from_raw(run.id() as i32), Signal::SIGINT)?;
    }
    let output = run.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    round.with_context(|| said.clone())?;
    ensure!(
        output.status.code() == Some(130),
        "{}: {said}",
        output.status
    );
    let path = path.display().to_string();
    ensure!(
        said.contains(&format!("is in {path}")),
        "it is not told: {said}"
    );
    let shown = bench(&["show", &path])?;
    ensure!(
        shown.contains("UNFINISHED") && shown.contains("remote fault ÷ (uffd + wire)"),
        "{shown}"
    );
    let compared = bench(&["compare", &path, &path])?;
    ensure!(compared.contains("UNFINISHED"), "{compared}");
    Ok(())
}

/// Two guests at once, the smaller limit no less than the least.
fn a_mix_is_measured() -> Result<()> {
    if let Some(reason) = sandbox::obstacle_without_libvirt() {
        return Err(Skipped(reason).into());
    }
    let folder = tempfile::tempdir()?;
    let out = folder.path().display().to_string();
    let small = "mix --guests sequential-write,kmeans:0.75 --rounds 1 --workload-mib 34 --out";
    let table = bench(&small.split(' ').chain([out.as_str()]).collect::<Vec<_>>())?;
    let path = folder.path().join("mix.json");
    let results = Results::load(&path)?;
    ensure!(results.mixes.len() == 1, "{} mixes", results.mixes.len());
    for (guest, local_ratio) in results.mixes[0].guests.iter().zip([0.5, 0.75]) {
        ensure!(guest.local_ratio == local_ratio, "{guest:?}");
        let truth = guest.alone_local.first().context("no run alone")?;
        for runs in [&guest.mixed_local, &guest.alone, &guest.mixed] {
            ensure!(runs.len() == 1, "{guest:?}");
            truth.demand_same(&runs[0])?;
        }
        for run in [&guest.alone[0], &guest.mixed[0]] {
            let counted = |name: &str| run.counters.get(name).copied().unwrap_or(0);
            let fetched = counted("faults_remote") + counted("fetched_ahead_pages");
            ensure!(
                fetched > 1000 && counted("evicted_pages") > 1000,
                "{guest:?}"
            );
            let latency = run.remote_faults.as_ref().context("no latency")?;
            ensure!(latency.us_p99 >= latency.us_p50, "{latency:?}");
        }
    }
    ensure!(
        results.ratios.len() == 8,
        "two of each guest, four of both: {:?}",
        results.ratios
    );
    let shown = bench(&["show", &path.display().to_string()])?;
    ensure!(table.starts_with(&shown), "{shown} is not of\n{table}");
    for wanted in ["kmeans at 0.75", "Jain's index", "CPU of helper"] {
        ensure!(shown.contains(wanted), "'{wanted}' is not in:\n{shown}");
    }
    Ok(())
}

/// One of two guests comes to something else than it should; the other is at work meanwhile.
fn a_wrong_result_ends_a_mix() -> Result<()> {
    let cpu = Layout::new(Kind::Shared)?.vcpu[0].to_string();
    let player = |truth: Option<Run>| -> Result<Player> {
        let task = Task {
            name: "sequential-write".to_owned(),
            bytes: 1 << 20,
            seed: 1,
            compute: 0,
        };
        let mut command = Command::new(env!("CARGO_BIN_EXE_bench"));
        command.args(["runner", "--memory", "memfd", "--cpus", &cpu]);
        command.args(["--task", &serde_json::to_string(&task)?]);
        Ok(Player {
            place: Place::Local(SmallVmm::spawn(command)?),
            task,
            truth,
            begun: 0,
        })
    };
    let rules = Rules {
        times: 2,
        patience: Duration::from_secs(60),
        server: std::process::id(),
    };
    let played = together(&mut [player(None)?, player(None)?], rules)?;
    ensure!(played.runs[0].operations == 256, "{:?}", played.runs);
    let wrong = Run {
        checksum: 1,
        ..played.runs[0].clone()
    };
    let error = together(&mut [player(None)?, player(Some(wrong))?], rules).err();
    let said = format!("{:#}", error.context("it was taken")?);
    ensure!(said.contains("WRONG RESULT"), "{said}");
    Ok(())
}

fn nonsense_is_refused() -> Result<()> {
    for words in [
        "compare /dev/null /dev/null",
        "run --layout diagonal",
        "mix --guests kv-4k",
        "mix --local-ratio 0",
        "mix --rounds 0",
        "mix --workload-mib 4",
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
        Trial::ignorable_test("an_interrupted_run_leaves_what_it_measured", || {
            outcome(an_interrupted_run_leaves_what_it_measured())
        }),
        Trial::ignorable_test("a_mix_is_measured", || outcome(a_mix_is_measured())),
        Trial::ignorable_test("a_wrong_result_ends_a_mix", || {
            outcome(a_wrong_result_ends_a_mix())
        }),
        Trial::ignorable_test("nonsense_is_refused", || outcome(nonsense_is_refused())),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
