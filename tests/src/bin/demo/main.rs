//! `make demo`: a guest of 1 GiB with half of its RAM on a memory server, watched while it runs.
//!
//! Everything is real (libvirtd, QEMU, `outram`, a memory server in another process) and private to
//! the demo: when it ends, or is interrupted, nothing of it is left.

mod table;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Parser;
use outram_tests::hermetic::console::{Answer, Console};
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::host::{Host, virsh_ok};
use outram_tests::hermetic::sampler::{Sampler, Seen, Stated};
use outram_tests::hermetic::sandbox::{self, Side};
use outram_tests::hermetic::server::MemServer;
use outram_wire::control::Status;
use outram_wire::units::format_size;
use table::{Row, Table};

/// A guest with half of its RAM on a memory server, watched while it runs.
#[derive(Parser)]
#[command(name = "demo")]
struct Options {
    /// Seconds at each of the three limits
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// RAM of the guest in MiB
    #[arg(long, default_value_t = 1024)]
    memory_mib: u64,
    /// Share of its RAM that the guest's checker uses, in per cent
    #[arg(long, default_value_t = 80)]
    share: u64,
}

/// Name of the guest, as in the documentation.
const NAME: &str = "web1";

/// What the memory server lends beside the guest's RAM: what a small guest reserves is more than what it keeps there.
const BESIDE_MIB: u64 = 256;

/// Long enough for every step on a slow machine.
const LONG: Duration = Duration::from_secs(300);

fn main() -> ExitCode {
    let options = Options::parse();
    if let Some(reason) = sandbox::obstacle() {
        eprintln!("The demo cannot run here: {reason}");
        return ExitCode::FAILURE;
    }
    match sandbox::enter() {
        Ok(Side::Outside(code)) => return ExitCode::from(code),
        Ok(Side::Inside) => {}
        Err(error) => {
            eprintln!("The demo's private namespaces could not be entered: {error:#}");
            return ExitCode::FAILURE;
        }
    }
    match show(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nThe demo failed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The parts of a running demo.
struct Stage<'a> {
    host: &'a Host,
    server: MemServer,
    guest: Guest,
    sampler: Sampler,
}

fn show(options: &Options) -> Result<()> {
    say("Starting libvirtd in private namespaces; this machine's own libvirt is not touched.");
    let host = Host::start(&target().join("images"))?;
    let shown = set_the_stage(options, &host).and_then(|stage| stage.play(options));
    if shown.is_err() {
        let logs = target().join("demo-logs");
        if host.keep_logs(&logs).is_ok() {
            eprintln!("\nLogs are in {}", logs.display());
        }
    }
    shown
}

fn set_the_stage<'a>(options: &Options, host: &'a Host) -> Result<Stage<'a>> {
    say("Making certificates and installing libvirt's hook: 'outram pki', 'outram setup'.");
    host.set_up_outram()?;
    // All that is not local, and what small guests need beside it.
    let lent = format!("{}MiB", options.memory_mib + BESIDE_MIB);
    let server = MemServer::start(host, &lent, 16)?;
    say(&format!(
        "Starting a memory server that lends up to {lent} at {}.",
        server.address
    ));
    say(&format!(
        "Defining the guest '{NAME}' with {} MiB of RAM.",
        options.memory_mib
    ));
    let guest = Guest::define(Spec::new(NAME, options.memory_mib))?;
    let attach = [
        "attach",
        NAME,
        "--local-ratio",
        "0.5",
        "--server",
        &server.address,
    ];
    echo("outram", &attach);
    print!("{}", host.outram_ok(&attach)?);
    let sampler = Sampler::start(&guest);
    Ok(Stage {
        host,
        server,
        guest,
        sampler,
    })
}

impl Stage<'_> {
    fn play(self, options: &Options) -> Result<()> {
        echo("virsh", &["start", NAME]);
        virsh_ok(&["start", NAME])?;
        let mut console = self.guest.console()?;
        say(&format!(
            "The guest is up. Its checker takes {} % of its RAM, then reads, rewrites and verifies at random.",
            options.share
        ));
        self.sampler.judge(Stated::of(&self.guest)?);
        let mut table = Table::new();
        self.fill(&mut console, &mut table, options.share)?;
        console.ask("work 0", "WORKING", LONG)?;
        let time = Duration::from_secs(options.seconds);
        self.watch(&mut console, &mut table, time)?;
        for ratio in ["0.3", "0.5"] {
            let tune = ["tune", NAME, "--local-ratio", ratio];
            table.note(&format!("$ outram {}", tune.join(" ")));
            self.sampler.pause();
            self.host.outram_ok(&tune)?;
            self.reach(&mut console, &mut table)?;
            self.sampler.judge_from_now(Stated::of(&self.guest)?);
            self.watch(&mut console, &mut table, time)?;
        }
        table.note("The checker stops and looks at every page once more.");
        console.ask("halt", "HALTED", LONG)?;
        let report = console.ask("verify", "CHECKER", LONG)?;
        self.finish(&mut console, &report)
    }

    /// Waits for the checker to fill its memory, and shows it.
    fn fill(&self, console: &mut Console, table: &mut Table, share: u64) -> Result<()> {
        console.send(&format!("alloc {share}"))?;
        let start = Instant::now();
        loop {
            if console
                .hear(&["ALLOCATED"], Duration::from_secs(1))?
                .is_some()
            {
                return Ok(());
            }
            ensure!(start.elapsed() < LONG, "the guest did not fill its memory");
            table.show(&self.row(None)?);
        }
    }

    /// Shows a row a second for a time.
    fn watch(&self, console: &mut Console, table: &mut Table, time: Duration) -> Result<()> {
        let start = Instant::now();
        while start.elapsed() < time {
            self.look(console, table)?;
        }
        Ok(())
    }

    /// Shows rows until the limit is reached by the kernel's count.
    fn reach(&self, console: &mut Console, table: &mut Table) -> Result<()> {
        let start = Instant::now();
        loop {
            let row = self.look(console, table)?;
            if row.cost <= row.status.limit_bytes + row.status.headroom_bytes {
                let took = start.elapsed().as_secs_f64();
                table.note(&format!("reached after {took:.1} s"));
                return Ok(());
            }
            ensure!(start.elapsed() < LONG, "the new limit was not reached");
        }
    }

    fn look(&self, console: &mut Console, table: &mut Table) -> Result<Row> {
        std::thread::sleep(Duration::from_secs(1));
        let pong = console.ask("ping demo", "PONG", LONG)?;
        let row = self.row(Some(&pong))?;
        table.show(&row);
        Ok(row)
    }

    fn row(&self, pong: Option<&Answer>) -> Result<Row> {
        let field = |name| pong.map_or(Ok(0), |pong| pong.get(name));
        Ok(Row {
            status: self.guest.status()?,
            cost: self.sampler.seen().last.cost(),
            on_server: self.server.bytes_leased()?,
            verified: field("checked")?,
            mismatches: field("mismatches")?,
        })
    }

    fn finish(self, console: &mut Console, report: &Answer) -> Result<()> {
        let status = self.guest.status()?;
        let (slabs, leased) = (self.server.slabs_leased()?, self.server.bytes_leased()?);
        let seen = self.sampler.finish()?;
        tell_checker(report)?;
        tell_pager(&status);
        println!(
            "On the memory server: {} in {slabs} slabs, by the server's own count; {} of the guest's pages lie there.",
            format_size(leased),
            format_size(status.stored_bytes)
        );
        tell_host_memory(&status, &seen);
        ensure!(
            report.get("mismatches")? == 0,
            "the guest's memory came back wrong"
        );
        console.send("poweroff")?;
        self.guest.wait_state("shut off", LONG)?;
        self.guest.wait_backend_gone(LONG)?;
        println!(
            "The guest was shut down from inside; the server now counts {} slabs in use.",
            self.server.slabs_leased()?
        );
        Ok(())
    }
}

fn tell_checker(report: &Answer) -> Result<()> {
    println!(
        "\nPages verified: {} ({} different ones; {} rewrites). Mismatches: {}.",
        report.get("checked")?,
        report.get("pages")?,
        report.get("rewritten")?,
        report.get("mismatches")?
    );
    Ok(())
}

fn tell_pager(status: &Status) {
    let counters = &status.counters;
    println!(
        "Faults: {} in all: {} on pages never touched, {} same-filled, {} taken back from staging, {} decompressed, {} fetched from the server, {} on write-protected pages.",
        counters.answered_faults(),
        counters.faults_zero,
        counters.faults_filled,
        counters.faults_staged,
        counters.faults_compressed,
        counters.faults_remote,
        counters.faults_protected
    );
    if let Some(remote) = status.latency.get("remote") {
        println!(
            "A fetch from the server took {} µs in the median, {} µs at the 99th percentile.",
            remote.us_p50, remote.us_p99
        );
    }
    println!(
        "Evictions: {} pages, of which {} were unchanged and {} same-filled; {} were wanted back soon.",
        counters.evicted_pages,
        counters.evicted_clean_pages,
        counters.evicted_filled_pages,
        counters.refaults
    );
}

fn tell_host_memory(status: &Status, seen: &Seen) {
    println!(
        "Host memory by the kernel's own count: {} now, at a limit of {} (and {} headroom); never over in {} samples.",
        format_size(seen.last.cost()),
        format_size(status.limit_bytes),
        format_size(status.headroom_bytes),
        seen.samples
    );
}

fn say(text: &str) {
    println!("{text}");
}

fn echo(program: &str, arguments: &[&str]) {
    println!("$ {program} {}", arguments.join(" "));
}

fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target")
}
