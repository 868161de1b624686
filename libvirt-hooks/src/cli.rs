//! The `outram` command line: its arguments, and one module for each subcommand.

/// As `println!`, but that nobody reads it is no reason to stop halfway.
macro_rules! say {
    ($($words:tt)*) => { $crate::cli::output::say(format_args!($($words)*)) };
}

/// As `eprintln!`, likewise.
macro_rules! complain {
    ($($words:tt)*) => { $crate::cli::output::complain(format_args!($($words)*)) };
}

mod affect;
pub mod attach;
pub mod completion;
pub mod disk;
pub mod doctor;
mod domain_checks;
mod host_checks;
mod live;
pub mod metrics;
mod output;
pub mod pki;
mod progress;
mod rdma_checks;
pub mod report;
pub mod restart;
pub mod setup;
pub mod status;
mod table;
pub mod top;
pub mod tune;

use std::str::FromStr;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use outram_wire::compressed_share::CompressedShare;
use outram_wire::granularity::Granularity;
use outram_wire::tuning::{QueueDepth, Tuning, Workers};
use outram_wire::units::{Limit, LocalRatio, PAGE_SIZE, parse_size};

use crate::host::Paths;
use crate::libvirt::check_uri;
use outram_wire::server::ServerAddress;

/// Gives libvirt guests memory that lies partly on other machines.
#[derive(Debug, Parser)]
#[command(name = "outram", version, max_term_width = 100)]
#[command(after_help = "\
A first guest, in short:
  outram setup                              once per host, as root
  outram attach web1 --local-ratio 0.5      shut off; or running, with shared memory
  virsh start web1
  outram tune web1 --local-ratio 0.3        while it runs
  outram status web1

Exit status:
  0  what was asked for is done
  1  it is not, and standard error says why; or 'doctor' found something that fails
  2  the command line is no good")]
pub struct Arguments {
    /// The libvirt to use; only the system's own on this host works
    ///
    /// Taken from LIBVIRT_DEFAULT_URI if not given, else qemu:///system.
    #[arg(short, long, global = true, value_name = "URI")]
    pub connect: Option<String>,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make this host ready: hook, directories, settings
    ///
    /// Prints each thing it does or finds done; running it again changes nothing.
    Setup(setup::SetupArguments),
    /// Check everything that paging needs, and say what to do where it is missing
    Doctor(doctor::DoctorArguments),
    /// Make the certificates by which hosts and memory servers know each other
    Pki(pki::PkiArguments),
    /// Let a domain's memory lie partly on memory servers
    ///
    /// The XML of a domain that is shut off is changed as one would by hand: shared memory in a
    /// memfd, a small vhost-user disk that the pager connects through, and the settings in its
    /// metadata. Run again, it updates the settings. A running domain whose memory is shared already
    /// is attached as it runs.
    Attach(attach::AttachArguments),
    /// Undo what 'attach' did to a domain
    ///
    /// What 'attach' added is removed; changes that you made in between stay. All memory of a running
    /// domain comes home first, which Ctrl-C calls off.
    Detach(attach::DetachArguments),
    /// Change how much of the host's memory a running domain may use, or how much is moved at a time
    ///
    /// Growing takes effect at once; shrinking moves pages away in the background.
    Tune(tune::TuneArguments),
    /// Replace the backend of a running domain by the program that is installed now
    ///
    /// The guest runs on; where it needs memory from elsewhere it waits for a moment. A backend of
    /// which all was killed is started again. Packages do so for all domains when they are upgraded.
    Restart(restart::RestartArguments),
    /// Show where the memory of domains is
    ///
    /// Asks each backend, never libvirt's monitor, so it works while a guest stands still.
    Status(status::StatusArguments),
    /// Show all guests in a table that is redrawn, as top does
    ///
    /// Asks each backend, never libvirt's monitor, so it works while a guest stands still. Rates are
    /// of the time since the look before.
    Top(top::TopArguments),
    /// Show the far-memory disks that memory servers keep for this host, or drop one
    ///
    /// Asks the servers of this host's settings and of its domains, each with a time-out.
    #[command(subcommand)]
    Disk(disk::DiskCommand),
    /// Print the metrics of running domains in Prometheus' text form, or serve them
    Metrics(metrics::MetricsArguments),
    /// Print a script by which a shell completes outram's command line, domains' names included
    ///
    /// Packages install it. By hand: 'outram completions bash' to
    /// /etc/bash_completion.d/outram, or the like of your shell.
    Completions(completion::CompletionsArguments),
}

/// How much of the host's memory a guest may use: one of the two at most.
#[derive(Clone, Debug, Args)]
#[group(multiple = false)]
pub struct LimitArguments {
    /// Share of the guest's RAM that may lie on this host: above 0, at most 1
    #[arg(long, value_name = "RATIO", value_parser = LocalRatio::from_str)]
    local_ratio: Option<LocalRatio>,
    /// Size that may lie on this host, such as 512MiB or 2G
    #[arg(long, value_name = "SIZE", value_parser = parse_local)]
    local: Option<u64>,
}

/// How a guest's memory is moved. Without these it stays as the domain has it.
#[derive(Clone, Debug, Args)]
#[group(multiple = true)]
pub struct TuningArguments {
    /// How much of the guest's memory is fetched and evicted together
    ///
    /// A power of two from 4KiB (page by page) to 256KiB. More than a page helps a guest whose programs
    /// use memory in larger pieces, at random places, and harms one that uses a little of each; what is
    /// used in order is fetched ahead by itself. At first it is 4KiB.
    #[arg(long, value_name = "SIZE")]
    granularity: Option<Granularity>,
    /// Threads that evict the guest's memory, 1 to 64
    ///
    /// They copy it, seal it and give it back to the host, so that more of them shrink a guest faster where
    /// the host has processors to spare. At first there is one for each of the backend's shards.
    #[arg(long, value_name = "COUNT")]
    workers: Option<Workers>,
    /// How much of the guest's memory is on its way at a time, 1 to 64
    ///
    /// Beside what the guest waits for: so many batches of 256KiB that are written back, and as many times
    /// 32KiB ahead of each stream that it reads in order. More fills a network that is fast but far; less
    /// leaves one that is slow to what the guest waits for. At first it is 8.
    #[arg(long, value_name = "COUNT")]
    queue_depth: Option<QueueDepth>,
    /// Share of the guest's limit that may hold what left it, compressed, from 0 (none) to 0.5
    ///
    /// Pages that LZ4 makes half as large or smaller then come back from this host's memory for some
    /// microseconds, and take room from pages that are not compressed. It pays where servers are far and
    /// memory compresses well. At first it is 0.
    #[arg(long, value_name = "SHARE")]
    compressed_share: Option<CompressedShare>,
}

impl TuningArguments {
    /// What is asked for.
    fn tuning(&self) -> Tuning {
        Tuning {
            granularity: self.granularity,
            workers: self.workers,
            queue_depth: self.queue_depth,
            compressed_share: self.compressed_share,
        }
    }
}

/// A size of at least a page.
fn parse_local(text: &str) -> Result<u64, String> {
    match parse_size(text) {
        Ok(bytes) if bytes < PAGE_SIZE as u64 => Err(format!(
            "'{text}' is less than one page: expected a size such as 512MiB"
        )),
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(error.to_string()),
    }
}

impl LimitArguments {
    /// The limit, where one is given.
    pub fn limit(&self) -> Option<Limit> {
        let ratio = self.local_ratio.map(Limit::LocalRatio);
        ratio.or(self.local.map(Limit::LocalBytes))
    }
}

/// Parses a server's address for clap.
fn parse_server(text: &str) -> Result<ServerAddress, String> {
    text.parse::<ServerAddress>()
        .map_err(|error| error.to_string())
}

/// Does what the command line says. The result is whether all went well.
pub fn run(arguments: &Arguments) -> Result<bool> {
    let paths = Paths::from_environment();
    let uri = arguments.connect.as_deref();
    // Also where a command does without libvirt: what it acts on is this host's all the same.
    uri.map(check_uri).transpose()?;
    match &arguments.command {
        Command::Setup(setup) => setup.run(uri, &paths),
        Command::Doctor(doctor) => doctor.run(uri, &paths),
        Command::Pki(pki) => pki.run(),
        Command::Attach(attach) => attach.run(uri, &paths),
        Command::Detach(detach) => detach.run(uri, &paths),
        Command::Tune(tune) => tune.run(uri, &paths),
        Command::Restart(restart) => restart.run(uri, &paths),
        Command::Status(status) => status.run(uri, &paths),
        Command::Top(top) => top.run(&paths),
        Command::Disk(disk) => disk.run(uri, &paths),
        Command::Metrics(metrics) => metrics.run(uri, &paths),
        Command::Completions(completions) => completions.run(),
    }
}
