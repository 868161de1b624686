//! Runs workloads in guests, one guest after the other.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use super::super::layout::{Kind, Layout};
use super::super::machine::Machine;
use super::super::usage::process_cpu;
use super::catalogue::Program;
use super::said::{self, MARK, Outcome, Said};
use super::table::{FORMAT, Failure, Paging, Results, Run};
use crate::hermetic::command::{run, wait_for};
use crate::hermetic::console::Console;
use crate::hermetic::guest::{Guest, Spec};
use crate::hermetic::host::{Acceleration, Host, IMAGES, virsh_ok};
use crate::hermetic::sampler::{Sampler, Stated};
use crate::hermetic::server::MemServer;

/// Bytes that a guest may write. The file is sparse, on a tmpfs that goes with the sandbox.
const SCRATCH_BYTES: u64 = 3 << 30;

/// The same processor everywhere, and one that numerical libraries know: they take the plainest
/// for an old one of AMD, with instructions that QEMU has not got.
const PROCESSOR: &str =
    "<cpu mode='custom' match='exact' check='none'><model fallback='forbid'>Nehalem</model></cpu>";

/// For what takes a moment, on a busy machine.
const SOON: Duration = Duration::from_secs(120);

/// What is wanted.
#[derive(Clone, Debug)]
pub struct Settings {
    /// These workloads.
    pub programs: Vec<Program>,
    /// At these local ratios, and without Outram before.
    pub local_ratios: Vec<f64>,
    /// How often.
    pub rounds: usize,
    /// RAM of each guest.
    pub ram_mib: u64,
    /// How much work, in per cent of the ordinary.
    pub work: u64,
    /// Longest time for one guest.
    pub patience: Duration,
    /// Where results are kept, from the first program on: all of them take hours.
    pub file: PathBuf,
    /// The project's `target`, where images are.
    pub target: PathBuf,
}

/// Runs all that `settings` want, on a private host that is made here: once, inside of the sandbox.
/// Each run is told as it ends. One that fails is noted, and the others go on.
pub fn run_all(settings: &Settings) -> Result<Results> {
    let start = Instant::now();
    let host = Host::start(&settings.target.join("images"))?;
    host.set_up_outram()?;
    furnish(&settings.target.join("images-debian"))?;
    let mut results = Results {
        format: FORMAT,
        emulated: Acceleration::wanted() == Acceleration::Emulated,
        ram_mib: settings.ram_mib,
        work: settings.work,
        machine: Machine::this(&Layout::new(Kind::Free)?),
        ..Results::default()
    };
    for round in 0..settings.rounds {
        for program in &settings.programs {
            run_program(&host, settings, program, round, &mut results);
            results.seconds = start.elapsed().as_secs_f64();
            results.save(&settings.file)?;
        }
    }
    if !results.failures.is_empty() {
        let logs = settings.target.join("bench/guests-logs");
        host.keep_logs(&logs)?;
        eprintln!("Logs are in {}", logs.display());
    }
    Ok(results)
}

/// Puts kernel and disks where QEMU's user may read them. The root is large, so it is not copied.
fn furnish(images: &Path) -> Result<()> {
    let missing = || format!("{}: run images/debian/build.sh first", images.display());
    fs::copy(images.join("initrd"), at("debian-initrd")).with_context(missing)?;
    let root = images.join("root.img");
    ensure!(root.is_file(), missing());
    File::create(at("debian-root.img"))?;
    let root = root.display().to_string();
    run("mount", &["--bind", &root, &at("debian-root.img")]).map(drop)
}

fn at(name: &str) -> String {
    format!("{IMAGES}/{name}")
}

/// A workload without Outram, and at each ratio.
fn run_program(
    host: &Host,
    settings: &Settings,
    program: &Program,
    round: usize,
    results: &mut Results,
) {
    let mut right: Option<String> = None;
    let ratios = settings.local_ratios.iter().copied().map(Some);
    for local_ratio in std::iter::once(None).chain(ratios) {
        let what = match local_ratio {
            Some(ratio) => format!("{} at {ratio}", program.name),
            None => format!("{} without Outram", program.name),
        };
        match run_guest(host, settings, program, local_ratio) {
            Ok((seconds, result, paging)) => {
                // The first has nothing to be compared with but what it says of itself.
                let is_right = !result.contains("WRONG")
                    && right.as_ref().is_none_or(|right| *right == result);
                let verdict = if is_right { "" } else { "WRONG RESULT " };
                eprintln!("{what}: {seconds:.1} s, {verdict}{result}");
                right.get_or_insert_with(|| result.clone());
                results.runs.push(Run {
                    workload: program.name.to_owned(),
                    round,
                    local_ratio,
                    seconds,
                    result,
                    is_right,
                    paging,
                });
            }
            Err(error) => {
                let reason = format!("{error:#}");
                eprintln!("{what}: FAILED: {reason}");
                results.failures.push(Failure { what, reason });
                if local_ratio.is_none() {
                    // There would be nothing to compare the others with.
                    return;
                }
            }
        }
    }
}

fn spec(settings: &Settings, program: &Program, scratch: &str) -> Spec {
    let mut spec = Spec::new("debian", settings.ram_mib);
    spec.vcpus = 1;
    spec.extra_elements = PROCESSOR.to_owned();
    spec.initrd = "debian-initrd".to_owned();
    let mib = settings.ram_mib * program.share / 100;
    spec.kernel_arguments = format!(
        "outram.workload={} outram.mib={mib} outram.work={}",
        program.name, settings.work
    );
    let root = at("debian-root.img");
    spec.extra_devices = format!(
        "<disk type='file' device='disk'>
      <driver name='qemu' type='raw'/>
      <source file='{root}'><seclabel model='dac' relabel='no'/></source>
      <target dev='vda' bus='virtio'/>
      <readonly/>
    </disk>
    <disk type='file' device='disk'>
      <driver name='qemu' type='raw'/>
      <source file='{scratch}'/>
      <target dev='vdb' bus='virtio'/>
    </disk>"
    );
    spec
}

/// An empty file system for what a guest writes.
fn make_scratch(path: &str) -> Result<()> {
    let file = File::create(path).with_context(|| path.to_owned())?;
    file.set_len(SCRATCH_BYTES)?;
    let quietly = ["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0"];
    run("mke2fs", &[&quietly[..], &[path]].concat()).map(drop)
}

/// One guest's life. Its seconds, its result, and what paging cost.
fn run_guest(
    host: &Host,
    settings: &Settings,
    program: &Program,
    local_ratio: Option<f64>,
) -> Result<(f64, String, Option<Paging>)> {
    let scratch = at("debian-scratch.img");
    make_scratch(&scratch)?;
    let memory = format!("{}MiB", settings.ram_mib + 256);
    let server = MemServer::start(host, &memory, 16)?;
    let guest = Guest::define(spec(settings, program, &scratch))?;
    let mut sampler = None;
    if let Some(ratio) = local_ratio {
        let ratio = ratio.to_string();
        let attach = ["attach", guest.name(), "--local-ratio", &ratio];
        host.outram_ok(&[&attach[..], &["--server", &server.address]].concat())?;
        sampler = Some(Sampler::start(&guest));
    }
    virsh_ok(&["start", guest.name()])?;
    let mut console = Console::connect(&guest.spec.serial_socket())?;
    if let Some(sampler) = &sampler {
        sampler.judge(Stated::of(&guest)?);
    }
    let meter = sampler.as_ref().map(|_| Meter {
        guest: &guest,
        server: &server,
    });
    let heard = listen(&mut console, settings.patience, meter.as_ref())
        .and_then(|(outcome, status, paging)| Ok((outcome.finish(status)?, paging)));
    let ((seconds, result), mut paging) =
        heard.map_err(|error| anyhow!("{error:#}\n{}", tail(&console)))?;
    console.send("done")?;
    guest.wait_state("shut off", SOON)?;
    if let Some(sampler) = sampler {
        // Fails where the limit was passed.
        let seen = sampler.finish()?;
        if let Some(paging) = &mut paging {
            paging.host_bytes_peak = seen.peak.cost();
        }
        guest.wait_backend_gone(SOON)?;
        wait_for("slabs to be given back", SOON, || {
            Ok((server.slabs_leased()? == 0).then_some(()))
        })?;
    }
    Ok((seconds, result, paging))
}

/// The end of what a guest said, for the message of a run that fails.
fn tail(console: &Console) -> String {
    let said = console.transcript();
    let from = said.len().saturating_sub(25);
    format!("the guest said at last:\n{}\n", said[from..].join("\n"))
}

/// Follows a workload to its end: its report, its status, and what paging cost in its timed part.
fn listen(
    console: &mut Console,
    patience: Duration,
    meter: Option<&Meter<'_>>,
) -> Result<(Outcome, i32, Option<Paging>)> {
    let deadline = Instant::now() + patience;
    let mut outcome = Outcome::default();
    let (mut before, mut paging) = (None, None);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let said = said::parse(&console.expect(&[MARK], left)?.line)?;
        outcome.note(&said);
        match (&said, meter) {
            (Said::Exit(status), _) => return Ok((outcome, *status, paging)),
            (Said::Begin, Some(meter)) => before = Some(meter.read()?),
            (Said::End(_), Some(meter)) => {
                let before = before.take().context("an end without a beginning")?;
                paging = Some(since(&meter.read()?, &before));
            }
            _ => {}
        }
    }
}

/// Where paging's costs are read.
struct Meter<'a> {
    guest: &'a Guest,
    server: &'a MemServer,
}

impl Meter<'_> {
    fn read(&self) -> Result<Paging> {
        let status = self.guest.status()?;
        let counters = &status.counters;
        Ok(Paging {
            faults_remote: counters.faults_remote,
            faults_staged: counters.faults_staged,
            fetched_ahead_pages: counters.fetched_ahead_pages,
            evicted_pages: counters.evicted_pages,
            wire_bytes: counters.wire_received_bytes + counters.wire_sent_bytes,
            waited_s: counters.waited_us as f64 / 1e6,
            helper_cpu_s: process_cpu(status.backend_pid)?.as_secs_f64(),
            server_cpu_s: self.server.cpu()?.as_secs_f64(),
            host_bytes_peak: 0,
            remote_faults: status.latency.get("remote").cloned(),
        })
    }
}

fn since(now: &Paging, before: &Paging) -> Paging {
    Paging {
        faults_remote: now.faults_remote - before.faults_remote,
        faults_staged: now.faults_staged - before.faults_staged,
        fetched_ahead_pages: now.fetched_ahead_pages - before.fetched_ahead_pages,
        evicted_pages: now.evicted_pages - before.evicted_pages,
        wire_bytes: now.wire_bytes - before.wire_bytes,
        waited_s: now.waited_s - before.waited_s,
        helper_cpu_s: now.helper_cpu_s - before.helper_cpu_s,
        server_cpu_s: now.server_cpu_s - before.server_cpu_s,
        host_bytes_peak: 0,
        // Percentiles cannot be subtracted.
        remote_faults: now.remote_faults.clone(),
    }
}
