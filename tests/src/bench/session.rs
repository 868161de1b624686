//! A run of the benchmark, from its settings to its results.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use outram_wire::tuning::Tuning;
use outram_wire::units::PageSize;

use super::batches;
use super::contest::{self, Contest};
use super::far_wire::FarWire;
use super::floors::{self, Waiting};
use super::helper_memory;
use super::layout::{self, Kind, Layout};
use super::machine::Machine;
use super::own;
use super::page_store::Store;
use super::ratios;
use super::results::{FORMAT, Results};
use super::statistics::{Distribution, Latencies};
use super::swap::Reserved;
use super::targets;
use crate::hermetic::command::run;
use crate::hermetic::huge_pages::HugePages;
use crate::hermetic::server::MemServer;
use crate::hermetic::suite::Skipped;
use crate::small_lab::{Guest, Lab, Wish};

/// What is to be measured.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Whether this is the quick run.
    pub quick: bool,
    /// How often everything is measured.
    pub rounds: usize,
    /// MiB of RAM of the guest whose faults are measured.
    pub fault_mib: u64,
    /// Faults of each sort in each round.
    pub faults: usize,
    /// MiB that a guest is tuned down by.
    pub tune_mib: u64,
    /// MiB of each workload's data; none are run where it is 0.
    pub workload_mib: u64,
    /// Local ratios of workloads.
    pub local_ratios: Vec<f64>,
    /// Names of workloads, all where there is none.
    pub only: Vec<String>,
    /// Extra work for each operation: workloads that honour it are run with each of these. Where there is
    /// none, with what [`super::contest`] has for them.
    pub compute: Vec<u32>,
    /// Seed of all that is random.
    pub seed: u64,
    /// Longest time for a single run of a workload.
    pub patience: Duration,
    /// How threads are spread.
    pub layout: Kind,
    /// Whether processors that idle are kept awake.
    pub awake: bool,
    /// Ways to move memory that Outram's guests have beside the usual one, and what they are called.
    pub tunings: Vec<(String, Tuning)>,
    /// Whether workloads are also run in guests on huge pages.
    pub huge_pages: bool,
    /// How much longer than this machine's a wire is, each way.
    pub delay: Duration,
    /// Bits a second of the wire, as tc(8) takes them, where they are bounded.
    pub rate: Option<String>,
    /// The [baselines](super::baseline) that are paged.
    pub baselines: Vec<String>,
    /// Where swap files go, and notes of other swap.
    pub folder: PathBuf,
    /// Where results are kept from round to round, if anywhere.
    pub file: Option<PathBuf>,
}

impl Settings {
    /// MiB that the memory server lends: enough for the largest guest, and to spare.
    pub fn lent_mib(&self) -> u64 {
        // No guest has more than twice as much as one of these, which is half of what is lent.
        lent_mib(self.fault_mib.max(self.tune_mib).max(self.workload_mib))
    }
}

/// MiB that a memory server lends to guests that have so many at the same time.
pub fn lent_mib(guests_mib: u64) -> u64 {
    guests_mib * 2 + 512
}

/// Demands that local ratios are some.
pub fn demand_ratios(ratios: &[f64]) -> Result<()> {
    let is_ratio = |ratio: &f64| *ratio > 0.0 && *ratio <= 1.0;
    ensure!(
        ratios.iter().all(is_ratio),
        "local ratios are above 0 and at most 1"
    );
    Ok(())
}

/// Faults from which the floor of a moment is taken: a tenth of a second's.
const FLOOR_FAULTS: usize = 2000;

/// Default slabs of memory servers.
pub const SLAB_BYTES: u64 = 64 << 20;

/// What is missing where the machine has no pool of huge pages.
pub const HUGE_PAGES: &str = "huge pages";

/// A run under way.
pub struct Session {
    /// What is to be measured.
    pub settings: Settings,
    /// Processors.
    pub layout: Layout,
    /// This program.
    pub program: PathBuf,
    /// The guests' memory server.
    pub server: MemServer,
    /// Where guests find it.
    pub server_address: String,
    /// Where guests live.
    pub lab: Lab,
    /// What was measured so far.
    pub results: Results,
    latencies: BTreeMap<String, Latencies>,
    swap: OnceCell<Reserved>,
    began: Instant,
    _awake: Option<File>,
}

impl Session {
    /// Prepares a run, in the sandbox, with a memory server that lends so much.
    pub fn new(settings: Settings, lent_mib: u64) -> Result<Self> {
        let program = std::env::current_exe().context("this program's own path")?;
        let layout = Layout::new(settings.layout)?;
        let mut machine = Machine::this(&layout);
        let awake = settings.awake.then(layout::keep_awake).transpose();
        let awake = awake.context("keeping the processors awake (--awake)")?;
        if awake.is_some() {
            machine.layout.push_str("; kept awake");
        }
        let lab = Lab::new(&program)?;
        if let Some(rate) = &settings.rate {
            bound_wire(rate).context("bounding the wire's rate (--rate)")?;
        }
        let lent = format!("{lent_mib}MiB");
        let server = lab.server_of(SLAB_BYTES, &["--memory", &lent])?;
        layout::pin(server.pid(), &layout.server)?;
        let server_address = by_wire(&server.address, settings.delay)?;
        let results = Results {
            format: FORMAT,
            quick: settings.quick,
            machine,
            arguments: told(std::env::args().skip(1)),
            ..Results::default()
        };
        Ok(Self {
            settings,
            layout,
            program,
            server,
            server_address,
            lab,
            results,
            latencies: BTreeMap::new(),
            swap: OnceCell::new(),
            began: Instant::now(),
            _awake: awake,
        })
    }

    /// Measures everything.
    pub fn run(mut self) -> Result<Results> {
        if self.settings.workload_mib > 0 {
            contest::check(&self.settings)?;
        }
        self.results.is_unfinished = true;
        for round in 0..self.settings.rounds {
            self.say(&format!(
                "round {} of {}: floors and faults",
                round + 1,
                self.settings.rounds
            ));
            self.measure_floors()?;
            batches::measure(&mut self)?;
            own::measure_faults(&mut self, round)?;
            own::measure_huge_faults(&mut self, round)?;
            helper_memory::measure(&mut self)?;
            own::measure_tuning(&mut self)?;
            own::measure_faults_while_tuning(&mut self, round)?;
            self.keep()?;
        }
        if self.settings.workload_mib > 0 {
            Contest::new(&mut self)?.run()?;
        }
        self.results.is_unfinished = false;
        self.keep()?;
        Ok(self.results)
    }

    /// Sums up what was measured so far, and writes it where it is to be found should this be the last
    /// that is: a run may take hours.
    pub fn keep(&mut self) -> Result<()> {
        let latencies = self.latencies.iter();
        self.results.distributions = latencies
            .map(|(name, latencies)| (name.clone(), Distribution::from(latencies)))
            .collect();
        self.results.seconds = self.began.elapsed().as_secs_f64();
        self.results.ratios = ratios::of(&self.results);
        self.results.targets = targets::of(&self.results);
        match &self.settings.file {
            Some(file) => self.results.save(file),
            None => Ok(()),
        }
    }

    /// Says what is being done.
    pub fn say(&self, text: &str) {
        eprintln!("bench: {text}");
    }

    /// Notes a round's latencies: all of them, and those that ratios are made of as figures.
    pub fn note_latencies(&mut self, name: &str, latencies: &Latencies) {
        for (which, percent) in [("p50", 50.0), ("p99", 99.0)] {
            self.results
                .note(&format!("{name} {which}"), "µs", latencies.us(percent));
        }
        let all = self.latencies.entry(name.to_owned()).or_default();
        all.add(latencies);
    }

    /// What a remote fault takes at least just now: the machine's speed changes from second to second.
    pub fn fault_floor(&self) -> Result<Latencies> {
        let count = FLOOR_FAULTS.min(self.settings.faults);
        let store = self.page_store(1)?;
        floors::remote_faults(&self.layout, &store, count)
    }

    fn measure_floors(&mut self) -> Result<()> {
        let (layout, count) = (self.layout.clone(), self.settings.faults);
        for (name, waiting) in [
            ("uffd round trip, sleeping", Waiting::Sleeping),
            ("uffd round trip, spinning", Waiting::Spinning),
        ] {
            let latencies = floors::faults(&layout, waiting, count)?;
            self.note_latencies(name, &latencies);
        }
        for (name, latencies) in floors::calls(&layout, count.next_multiple_of(floors::RANGE))? {
            self.note_latencies(name, &latencies);
        }
        let store = self.page_store(floors::RANGE)?;
        let wire = floors::wire(&layout, &store, count)?;
        self.note_latencies("wire round trip", &wire.round_trips);
        for (name, rate) in [
            (floors::WIRE_READ, wire.read_per_second),
            (floors::WIRE_WRITTEN, wire.written_per_second),
        ] {
            self.results.note(name, "pages/s", rate);
        }
        let copied = floors::copied_pages_per_second(&layout)?;
        self.results.note("copying pages", "pages/s", copied);
        Ok(())
    }

    /// Starts a guest on its processors.
    pub fn guest(&self, ram_mib: u64, vcpus: usize, limit: u64) -> Result<Guest> {
        self.start(&Wish {
            ram_mib: &[ram_mib],
            vcpus,
            limit,
            ..Wish::default()
        })
    }

    /// The same, of one vCPU, whose pager has a supervisor.
    pub fn supervised_guest(&self, ram_mib: u64, limit: u64) -> Result<Guest> {
        self.start(&Wish {
            ram_mib: &[ram_mib],
            vcpus: 1,
            limit,
            supervised: true,
            ..Wish::default()
        })
    }

    /// So many MiB more in the machine's pool of huge pages; where that cannot be, notes why, and asks no more.
    pub fn huge_pages(&mut self, mib: u64) -> Result<Option<HugePages>> {
        if self.results.is_missing(HUGE_PAGES) {
            return Ok(None);
        }
        match HugePages::add((mib << 20) / PageSize::HUGE.bytes()) {
            Ok(pool) => Ok(Some(pool)),
            Err(error) if error.is::<Skipped>() => {
                self.say(&format!("without {HUGE_PAGES}: {error:#}"));
                self.results.note_missing(HUGE_PAGES, &error);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The same as [`Session::guest`], of one vCPU, on huge pages.
    pub fn huge_guest(&self, ram_mib: u64, limit: u64) -> Result<Guest> {
        self.start(&Wish {
            ram_mib: &[ram_mib],
            vcpus: 1,
            limit,
            huge: Some(false),
            ..Wish::default()
        })
    }

    fn start(&self, wish: &Wish<'_>) -> Result<Guest> {
        let wish = Wish {
            servers: &[&self.server_address],
            ..*wish
        };
        let guest = Guest::start(&self.lab, &wish)?;
        layout::pin(guest.vmm.pid() as u32, &self.layout.vcpu)?;
        layout::pin(guest.backend_pid(), &self.layout.pager)?;
        Ok(guest)
    }

    /// A page store for so many pages, on its processors, at the end of the wire.
    pub fn page_store(&self, pages: usize) -> Result<Store> {
        let mut store = Store::start(&self.program, pages)?;
        layout::pin(store.pid(), &self.layout.server)?;
        store.address = by_wire(&store.address, self.settings.delay)?;
        Ok(store)
    }

    /// The right to make swap, taken when it is first asked for and kept until the end.
    pub fn reserved_swap(&self) -> Result<&Reserved> {
        if let Some(reserved) = self.swap.get() {
            return Ok(reserved);
        }
        let reserved = Reserved::new(&self.settings.folder)?;
        Ok(self.swap.get_or_init(|| reserved))
    }
}

/// The arguments but for where the results go.
fn told(mut arguments: impl Iterator<Item = String>) -> Vec<String> {
    let mut told = Vec::new();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--out" => drop(arguments.next()),
            other if other.starts_with("--out=") => {}
            _ => told.push(argument),
        }
    }
    told
}

/// Has the sandbox's own network carry so many bits a second, both ways together; what is beyond waits in one
/// queue. A packet of loopback's, the largest there is, is to fit into the bucket.
fn bound_wire(rate: &str) -> Result<()> {
    let bucket = ["qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate];
    let queue = ["burst", "128k", "latency", "200ms"];
    run("tc", &[&bucket[..], &queue[..]].concat())?;
    Ok(())
}

/// Where a server is found by a wire that is so much longer than this machine's.
fn by_wire(server: &str, delay: Duration) -> Result<String> {
    if delay.is_zero() {
        return Ok(server.to_owned());
    }
    let wire = FarWire::before(server, delay).context("starting a relay")?;
    Ok(wire.address.to_string())
}
