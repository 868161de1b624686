//! `make bench`: what paging costs, beside what the machine makes it cost at least, and what else there
//! is. See `outram_tests::bench`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, Subcommand};
use outram_tests::bench::layout::Kind;
use outram_tests::bench::mix::round::{self, Terms};
use outram_tests::bench::mix::{self, Mix};
use outram_tests::bench::phase::Task;
use outram_tests::bench::results::Results;
use outram_tests::bench::runner::{self, Memory, Order};
use outram_tests::bench::session::{Session, Settings, demand_ratios, lent_mib};
use outram_tests::bench::workloads::catalogue;
use outram_tests::bench::{
    compare, foresight, guests, page_store, plot, policies, report, swap, trace,
};
use outram_tests::hermetic::sandbox::{self, Side};
use outram_tests::small_lab::LEAST;
use outram_wire::compressed_share::CompressedShare;
use outram_wire::granularity::Granularity;
use outram_wire::tuning::Tuning;

/// What paging costs, beside what the machine makes it cost at least, and what else there is
#[derive(Parser)]
#[command(name = "bench", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure, print a table, and leave results and plots
    Run(RunArguments),
    /// Measure several guests at once, and how fairly they share the machine
    ///
    /// Each guest has a helper of its own, and all of them one memory server. A round measures each guest
    /// alone and all of them at once, both with all memory local and at their local ratios. All start
    /// their workloads together. A guest that has ended its own does it again (writes its inputs, runs,
    /// and reads all memory to check it) until the slowest has ended its first run, so that everybody has
    /// all neighbours at work all the time. A guest's time is that of its first run; where all memory is
    /// local, which is short, the median of its first five. Figures of the whole mix are of the time until
    /// the slowest has ended its first run.
    Mix(MixArguments),
    /// Print a table of results again
    Show {
        /// The file that a run left
        file: PathBuf,
    },
    /// Print the ratios of two runs beside each other
    Compare {
        /// The file of the first run
        first: PathBuf,
        /// The file of the second run
        second: PathBuf,
    },
    /// Count the misses of eviction policies, side by side, on traces of the workloads, and those that
    /// fetching ahead leaves
    Policies(PolicyArguments),
    /// Run real programs in real guests, at several local ratios and without Outram
    Guests(GuestArguments),
    /// List the workloads
    List,
    /// Run a workload as another process commands; started by 'run'
    #[command(hide = true)]
    Runner(RunnerArguments),
    /// Keep pages for another process; started by 'run'
    #[command(hide = true)]
    PageStore {
        /// How many
        #[arg(long)]
        pages: usize,
    },
}

#[derive(Args)]
struct RunArguments {
    /// Small guests and two local ratios: some minutes
    #[arg(long)]
    quick: bool,
    /// Rounds, each of which measures everything once [default: 3, quick 3]
    #[arg(long)]
    rounds: Option<usize>,
    /// MiB of RAM of the guest whose faults are measured [default: 512, quick 64]
    #[arg(long)]
    fault_mib: Option<u64>,
    /// Faults of each sort in each round [default: 20000, quick 4000]
    #[arg(long)]
    faults: Option<usize>,
    /// MiB that a guest is tuned down by [default: 1024, quick 256]
    #[arg(long)]
    tune_mib: Option<u64>,
    /// MiB of each workload's data; 0 runs none [default: 128, quick 36]
    #[arg(long)]
    workload_mib: Option<u64>,
    /// Local ratios [default: 1,0.75,0.5,0.25, quick 1,0.5]
    #[arg(long, value_delimiter = ',')]
    local_ratios: Option<Vec<f64>>,
    /// Run these workloads alone [default: all, quick some]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    only: Vec<String>,
    /// Paged memory to compare with: plain (a pager that does one page after the other), zram,
    /// swap-file and nbd (the kernel's swap, also over a network block device to a server in memory).
    /// Swap is the whole machine's while it is measured, and what it has on nbd is lost should this run be
    /// killed: ask for that where nothing else is at work, as in the lab guest
    #[arg(long, value_delimiter = ',', default_value = "plain,zram,swap-file")]
    baselines: Vec<String>,
    /// Run workloads on Outram also with so much memory moved at a time, such as 16KiB,64KiB
    #[arg(long, value_delimiter = ',', value_name = "SIZE")]
    granularity: Vec<Granularity>,
    /// ... and with such shares of the limit for compressed pages, such as 0.25
    #[arg(long, value_delimiter = ',', value_name = "SHARE")]
    compressed_share: Vec<CompressedShare>,
    /// Run workloads on Outram also in guests on huge pages, of which 64 MiB are local at least: with local
    /// ratios of 0.5 and more that takes the 128 MiB of data of runs that are not quick
    #[arg(long)]
    huge_pages: bool,
    /// Microseconds by which the wire to the memory server is longer than this machine's, each way: a relay
    /// holds all that passes, some 60 µs longer than asked for. Not with the baseline nbd, which it does not reach
    #[arg(long, default_value_t = 0, value_name = "MICROSECONDS")]
    delay: u64,
    /// Bits a second that the wire to the memory server carries, both ways together, such as 1gbit or
    /// 300mbit (as of tc(8)); what is beyond queues up [default: as many as this machine can]
    #[arg(long)]
    rate: Option<String>,
    /// Extra work for each operation of workloads that honour it ('bench list'), in rounds of some 4 ns:
    /// they are run with each of these, such as 0,250,2500 [default: 0, and 2500 also for kv-4k]
    #[arg(long, value_delimiter = ',', value_name = "ROUNDS")]
    compute: Vec<u32>,
    /// Which processors run what: split (vCPU on one, pager on another, server on a third), shared
    /// (all on one) or free
    #[arg(long, default_value = "split")]
    layout: Kind,
    /// Keep processors that idle awake (/dev/cpu_dma_latency): how long one takes to wake differs from run to
    /// run, and hides what a page takes beside it
    #[arg(long)]
    awake: bool,
    #[command(flatten)]
    common: CommonArguments,
}

#[derive(Args)]
struct MixArguments {
    /// Workloads of the guests of a mix, each with its own local ratio where it is to have one, such as
    /// 'quicksort,kv-4k:0.25'; may be given several times, for several mixes
    #[arg(long, value_name = "NAME[:RATIO],…", default_values = mix::DEFAULTS)]
    guests: Vec<Mix>,
    /// Local ratio of the other guests
    #[arg(long, default_value_t = 0.5)]
    local_ratio: f64,
    /// Rounds, each of which measures everything once
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// MiB of each workload's data
    #[arg(long, default_value_t = 40)]
    workload_mib: u64,
    /// Extra work for each operation, in rounds of some 4 ns
    #[arg(long, default_value_t = 0)]
    compute: u32,
    /// Which processors run what: split (all vCPUs on one, all helpers on another, the server on a
    /// third), shared (all on one) or free
    #[arg(long, default_value = "free")]
    layout: Kind,
    #[command(flatten)]
    common: CommonArguments,
}

#[derive(Args)]
struct CommonArguments {
    /// Seed of all that is random
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Longest time for one run of a workload, in seconds
    #[arg(long, default_value_t = 1800)]
    patience: u64,
    /// Folder for results and plots [default: target/bench]
    #[arg(long)]
    out: Option<PathBuf>,
}

impl CommonArguments {
    /// The folder, which is made.
    fn folder(&self) -> Result<PathBuf> {
        let folder = self.out.clone().unwrap_or_else(target);
        for folder in [&folder, &target()] {
            fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
        Ok(folder.canonicalize()?)
    }
}

#[derive(Args)]
struct PolicyArguments {
    /// MiB of each workload's data
    #[arg(long, default_value_t = 64)]
    workload_mib: usize,
    /// Local ratios
    #[arg(long, value_delimiter = ',', default_value = "0.75,0.5,0.25")]
    local_ratios: Vec<f64>,
    /// These workloads alone [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    only: Vec<String>,
    /// Seed of all that is random
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Args)]
struct GuestArguments {
    /// List the programs, and run none
    #[arg(long)]
    list: bool,
    /// Small guests with less to do
    #[arg(long)]
    quick: bool,
    /// Rounds, each of which runs everything once
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// Local ratios
    #[arg(long, value_delimiter = ',', default_value = "1.0,0.75,0.5,0.25")]
    local_ratios: Vec<f64>,
    /// Run these programs alone [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    only: Vec<String>,
    /// Longest time for one guest, in seconds
    #[arg(long, default_value_t = 1800)]
    patience: u64,
    /// Folder for guests.json [default: target/bench]
    #[arg(long)]
    out: Option<PathBuf>,
}

#[derive(Args)]
struct RunnerArguments {
    #[arg(long)]
    memory: Memory,
    #[arg(long)]
    task: String,
    #[arg(long, value_delimiter = ',', required = true)]
    cpus: Vec<usize>,
    #[arg(long, requires = "store")]
    limit_pages: Option<usize>,
    #[arg(long)]
    store: Option<String>,
    #[arg(long, value_delimiter = ',')]
    pager_cpus: Vec<usize>,
}

fn main() -> ExitCode {
    let small = sandbox::obstacle_without_libvirt;
    let done = match Arguments::parse().command {
        Command::Run(arguments) => {
            let began = SystemTime::now();
            let code = in_sandbox(small(), || run(&arguments));
            tell_of_unfinished(&arguments.common, began);
            return code;
        }
        Command::Mix(arguments) => return in_sandbox(small(), || measure_mixes(&arguments)),
        Command::Guests(arguments) if arguments.list => {
            for program in guests::catalogue::CATALOGUE {
                println!("{:<18}{}", program.name, program.summary);
            }
            Ok(())
        }
        Command::Guests(arguments) => {
            return in_sandbox(sandbox::obstacle(), || run_guests(&arguments));
        }
        Command::Show { file } => {
            Results::load(&file).map(|results| print!("{}", report::text(&results)))
        }
        Command::Compare { first, second } => compare_files(&first, &second),
        Command::Policies(arguments) => policies(&arguments),
        Command::List => {
            for entry in catalogue() {
                println!("{:<18}{}", entry.name, entry.summary);
            }
            Ok(())
        }
        Command::Runner(arguments) => order(arguments).and_then(|order| runner::obey(&order)),
        Command::PageStore { pages } => page_store::serve(pages),
    };
    tell(done)
}

fn tell(done: Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Says where the results of a run are that was interrupted, or failed, after it had measured some.
fn tell_of_unfinished(arguments: &CommonArguments, began: SystemTime) {
    let path = arguments.out.clone().unwrap_or_else(target).join(RESULTS);
    let written = path.metadata().and_then(|found| found.modified());
    // Inside of the sandbox, which has processes of this program too, nobody is told twice.
    let is_of_this_run = written.is_ok_and(|at| at >= began) && sandbox::is_outside();
    if is_of_this_run && Results::load(&path).is_ok_and(|results| results.is_unfinished) {
        let path = path.display();
        eprintln!("bench: what was measured until then is in {path} ('bench show' prints it)");
    }
}

fn compare_files(first: &Path, second: &Path) -> Result<()> {
    let (first, second) = (Results::load(first)?, Results::load(second)?);
    print!("{}", compare::text(&first, &second));
    Ok(())
}

fn policies(arguments: &PolicyArguments) -> Result<()> {
    demand_ratios(&arguments.local_ratios)?;
    let only = arguments.only.iter().map(String::as_str);
    let names: Vec<&str> = match arguments.only.is_empty() {
        true => catalogue().iter().map(|entry| entry.name).collect(),
        false => only.collect(),
    };
    let mut ahead = foresight::heading();
    println!("{}", policies::HEADING);
    for name in names {
        let task = Task {
            name: name.to_owned(),
            bytes: arguments.workload_mib << 20,
            seed: arguments.seed,
            compute: 0,
        };
        let (trace, _) = trace::record(&task, &arguments.local_ratios)?;
        for local in &arguments.local_ratios {
            let limit = (trace.pages as f64 * local) as usize;
            ensure!(
                limit >= policies::LIMIT_LEAST,
                "{local} of '{name}' are {limit} pages, and at least {} are needed: more MiB",
                policies::LIMIT_LEAST
            );
            let misses = policies::misses(&trace, limit);
            println!("{}", policies::line(name, *local, &misses));
            let (without, outcomes) = foresight::outcomes(&trace, limit);
            let line = foresight::line(name, *local, without, &outcomes);
            ahead.push('\n');
            ahead.push_str(&line);
        }
    }
    println!("{ahead}");
    Ok(())
}

fn order(arguments: RunnerArguments) -> Result<Order> {
    let paging = arguments.limit_pages.zip(arguments.store);
    Ok(Order {
        memory: arguments.memory,
        task: serde_json::from_str(&arguments.task).context("--task")?,
        cpus: arguments.cpus,
        paging: paging.map(|(limit, store)| (limit, store, arguments.pager_cpus)),
    })
}

fn in_sandbox(obstacle: Option<String>, work: impl FnOnce() -> Result<()>) -> ExitCode {
    if let Some(reason) = obstacle {
        eprintln!("bench: nothing can be measured here: {reason}");
        return ExitCode::FAILURE;
    }
    match sandbox::enter() {
        Ok(Side::Outside(code)) => {
            // Swap is no namespace's: it does not go with the sandbox where that was killed.
            if let Err(error) = swap::Reserved::new(&target()).map(drop) {
                eprintln!("bench: {error:#}");
            }
            ExitCode::from(code)
        }
        Ok(Side::Inside) => tell(work()),
        Err(error) => tell(Err(error.context("entering the sandbox"))),
    }
}

fn run_guests(arguments: &GuestArguments) -> Result<()> {
    demand_ratios(&arguments.local_ratios)?;
    ensure!(arguments.rounds > 0, "at least one round");
    let folder = arguments.out.clone().unwrap_or_else(target);
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let file = folder.canonicalize()?.join("guests.json");
    let (ram_mib, work) = if arguments.quick {
        (320, 25)
    } else {
        (640, 100)
    };
    let results = guests::session::run_all(&guests::session::Settings {
        programs: guests::catalogue::chosen(&arguments.only)?,
        local_ratios: arguments.local_ratios.clone(),
        rounds: arguments.rounds,
        ram_mib,
        work,
        patience: Duration::from_secs(arguments.patience),
        file: file.clone(),
        target: target().join("..").canonicalize()?,
    })?;
    println!("{}\nAll of it is in {}", results.text(), file.display());
    let (wrong, failed) = (results.wrong(), results.failures.len());
    ensure!(
        wrong == 0 && failed == 0,
        "{wrong} with a WRONG RESULT, {failed} failed"
    );
    Ok(())
}

/// Workloads of the quick run: those that other systems publish figures of.
const QUICK: [&str; 7] = [
    "sequential-write",
    "sequential-read",
    "random-read",
    "kv-4k",
    "quicksort",
    "kmeans",
    "pagerank",
];

/// Where results go unless said otherwise, and swap always.
fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench")
}

/// What a run leaves.
const RESULTS: &str = "results.json";

fn run(arguments: &RunArguments) -> Result<()> {
    let folder = arguments.common.folder()?;
    let mut settings = settings(arguments)?;
    settings.file = Some(folder.join(RESULTS));
    let lent = settings.lent_mib();
    let results = Session::new(settings, lent)?.run()?;
    print!("{}", report::text(&results));
    let plots = plot::draw(&results, &folder)?;
    println!("\nIn {}: {RESULTS}, {}", folder.display(), plots.join(", "));
    Ok(())
}

fn measure_mixes(arguments: &MixArguments) -> Result<()> {
    let path = arguments.common.folder()?.join("mix.json");
    demand_ratios(&[arguments.local_ratio])?;
    ensure!(arguments.rounds > 0, "at least one round");
    let settings = Settings {
        rounds: arguments.rounds,
        seed: arguments.common.seed,
        patience: Duration::from_secs(arguments.common.patience),
        layout: arguments.layout,
        ..Settings::default()
    };
    let most = arguments.guests.iter().map(|mix| mix.0.len()).max();
    let at_once = most.unwrap_or(0) as u64 * arguments.workload_mib;
    let session = Session::new(settings, lent_mib(at_once))?;
    let terms = Terms {
        bytes: (arguments.workload_mib << 20) as usize,
        local_ratio: arguments.local_ratio,
        compute: arguments.compute,
    };
    let results = round::measure(session, &arguments.guests, terms)?;
    results.save(&path)?;
    print!("{}", report::text(&results));
    println!("\nIn {}", path.display());
    Ok(())
}

fn settings(arguments: &RunArguments) -> Result<Settings> {
    let quick = arguments.quick;
    let or = |value: Option<u64>, full: u64, small: u64| {
        value.unwrap_or(if quick { small } else { full })
    };
    let ratios: &[f64] = if quick {
        &[1.0, 0.5]
    } else {
        &[1.0, 0.75, 0.5, 0.25]
    };
    let local_ratios = arguments.local_ratios.clone().unwrap_or(ratios.to_vec());
    demand_ratios(&local_ratios)?;
    let rounds = or(arguments.rounds.map(|rounds| rounds as u64), 3, 3);
    let faults = or(arguments.faults.map(|faults| faults as u64), 20_000, 4000);
    ensure!(rounds > 0 && faults > 0, "at least one round of one fault");
    let only = match arguments.only.is_empty() && quick {
        true => QUICK.map(str::to_owned).to_vec(),
        false => arguments.only.clone(),
    };
    let fault_mib = or(arguments.fault_mib, 512, 64);
    let most = fault_mib.saturating_sub(LEAST >> 20) << 20 >> 12;
    ensure!(
        faults <= most,
        "a guest of {fault_mib} MiB has no more than {most} pages elsewhere: fewer faults, or more MiB"
    );
    Ok(Settings {
        quick,
        rounds: rounds as usize,
        fault_mib,
        faults: faults as usize,
        tune_mib: or(arguments.tune_mib, 1024, 256),
        workload_mib: or(arguments.workload_mib, 128, 36),
        local_ratios,
        only,
        compute: arguments.compute.clone(),
        seed: arguments.common.seed,
        patience: Duration::from_secs(arguments.common.patience),
        layout: arguments.layout,
        awake: arguments.awake,
        tunings: tunings(arguments),
        huge_pages: arguments.huge_pages,
        delay: Duration::from_micros(arguments.delay),
        rate: arguments.rate.clone(),
        baselines: arguments.baselines.clone(),
        folder: target().canonicalize()?,
        file: None,
    })
}

/// The ways to move memory that are asked for, and how they are called.
fn tunings(arguments: &RunArguments) -> Vec<(String, Tuning)> {
    let by = arguments.granularity.iter().map(|granularity| Tuning {
        granularity: Some(*granularity),
        ..Tuning::default()
    });
    let with = arguments.compressed_share.iter().map(|share| Tuning {
        compressed_share: Some(*share),
        ..Tuning::default()
    });
    let name = |tuning: Tuning| {
        let named = tuning
            .named()
            .map(|(name, value)| format!("{name} {value}"));
        (named.collect::<Vec<_>>().join(", "), tuning)
    };
    by.chain(with).map(name).collect()
}
