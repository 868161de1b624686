//! What the tests share: the private host, and guests attached to memory servers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::console::{Answer, Console};
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::hard_limit::HardLimit;
use outram_tests::hermetic::host::Host;
use outram_tests::hermetic::server::MemServer;
use outram_tests::hermetic::suite::Skipped;
use outram_wire::control::{Phase, Status};

/// The private host that all tests share.
pub(crate) struct Lab {
    pub(crate) host: Host,
}

impl Lab {
    /// Starts it.
    pub(crate) fn new() -> Result<Self> {
        let host = Host::start(&images())?;
        host.set_up_outram()?;
        Ok(Self { host })
    }

    /// Runs one test; where it fails, keeps the logs.
    pub(crate) fn run(&self, name: &str, test: fn(&Lab) -> Result<()>) -> Result<()> {
        let start = std::time::Instant::now();
        let result = test(self);
        note_duration(name, start.elapsed());
        result.map_err(|error| {
            if error.is::<Skipped>() {
                return error;
            }
            let to = logs().join(name);
            match self.host.keep_logs(&to) {
                Ok(()) => error.context(format!("logs are in {}", to.display())),
                Err(lost) => error.context(format!("logs could not be kept: {lost:#}")),
            }
        })
    }
}

/// The top of the source tree.
pub(crate) fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("."))
}

fn target() -> PathBuf {
    top().join("target")
}

/// Where `images/build.sh` puts the guest.
pub(crate) fn images() -> PathBuf {
    target().join("images")
}

/// Where logs of failed tests are kept.
pub(crate) fn logs() -> PathBuf {
    target().join("e2e-logs")
}

/// Appends to `target/e2e-times`: where the suite's time goes.
pub(crate) fn note_duration(name: &str, took: Duration) {
    let line = format!("{name} {:.1} s\n", took.as_secs_f64());
    let file = std::fs::File::options()
        .create(true)
        .append(true)
        .open(target().join("e2e-times"));
    // Only of use to people who look; never a reason to fail.
    let _ = file.and_then(|mut file| std::io::Write::write_all(&mut file, line.as_bytes()));
}

/// Pages that a guest may leave to its kernel while most of its RAM is in use.
pub(crate) const SHARE: u64 = 80;

/// A limit that leaves half of what a guest uses elsewhere.
pub(crate) const HALF: [&str; 2] = ["--local-ratio", "0.5"];

/// RAM of an ordinary guest: the smallest whose kernel leaves 80 per cent to the checker.
pub(crate) const RAM_MIB: u64 = 512;

/// Names another size in MiB for guests that can do with less, where every fault takes long.
pub(crate) const RAM_VARIABLE: &str = "OUTRAM_TEST_RAM_MIB";

/// RAM of a guest that need not leave as much to the checker.
pub(crate) fn ram_mib() -> Result<u64> {
    match std::env::var(RAM_VARIABLE) {
        Err(_) => Ok(RAM_MIB),
        Ok(mib) => mib
            .parse()
            .with_context(|| format!("{RAM_VARIABLE}={mib} is no number of MiB")),
    }
}

/// Long enough for anything that works at all on a loaded machine.
pub(crate) const LONG: Duration = Duration::from_secs(180);

/// For what is done in a moment, on a machine that has time.
pub(crate) const SHORT: Duration = Duration::from_secs(120);

impl Lab {
    /// A memory server with small slabs, so that little memory makes many of them.
    pub(crate) fn server(&self, memory: &str) -> Result<MemServer> {
        MemServer::start(&self.host, memory, 4)
    }

    /// Defines a guest and attaches it with `outram attach`.
    pub(crate) fn attach(&self, spec: Spec, limit: &[&str], server: &str) -> Result<Guest> {
        let guest = Guest::define(spec)?;
        let mut arguments = vec!["attach", guest.name()];
        arguments.extend(limit);
        arguments.extend(["--server", server]);
        self.host.outram_ok(&arguments)?;
        Ok(guest)
    }

    /// Boots a guest within a cgroup.
    pub(crate) fn boot_in(&self, group: &HardLimit, guest: &Guest) -> Result<Console> {
        let libvirtd = self.host.libvirtd_pid()?;
        // What libvirtd starts is in its cgroup from its first instruction on.
        group.add(libvirtd)?;
        let started = guest.boot();
        group.release(libvirtd)?;
        started
    }

    /// `outram tune`, which must succeed.
    pub(crate) fn tune(&self, guest: &Guest, limit: &[&str]) -> Result<()> {
        let mut arguments = vec!["tune", guest.name()];
        arguments.extend(limit);
        self.host.outram_ok(&arguments).map(drop)
    }
}

/// Host memory of a guest as its backend reports the kernel's counts.
pub(crate) fn kernel_cost(status: &Status) -> u64 {
    status.kernel_memfd_bytes
        + status.kernel_staging_bytes
        + status
            .kernel_anon_bytes
            .saturating_sub(status.fixed_anon_bytes)
}

/// Waits until a guest costs no more than its limit and headroom, by the kernel's count.
pub(crate) fn wait_under_limit(guest: &Guest) -> Result<Status> {
    guest.wait_status("the limit to be reached", LONG, |status| {
        kernel_cost(status) <= status.limit_bytes + status.headroom_bytes
    })
}

/// Whether a guest is served, by all of its servers.
pub(crate) fn is_served(status: &Status) -> bool {
    status.phase == Phase::Serving && status.servers.iter().all(|server| server.connected)
}

/// Ends a guest from inside and waits until nothing of it is left, on the server neither.
pub(crate) fn power_off(guest: &Guest, console: &mut Console, server: &MemServer) -> Result<()> {
    console.send("poweroff")?;
    guest.wait_state("shut off", LONG)?;
    guest.wait_backend_gone(SHORT)?;
    wait_slabs(server, |slabs| slabs == 0)
}

/// Waits until the server's own count of leased slabs is as wanted.
pub(crate) fn wait_slabs(server: &MemServer, wanted: impl Fn(u64) -> bool) -> Result<()> {
    let mut last = 0;
    wait_for("slabs to be given back", SHORT, || {
        last = server.slabs_leased()?;
        Ok(wanted(last).then_some(()))
    })
    .with_context(|| format!("the server still counts {last} slabs"))
}

/// Runs the checker in a guest over `share` per cent of its RAM and demands that all is well. It fills, works
/// for so many seconds and verifies before it answers.
pub(crate) fn check(console: &mut Console, share: u64, seconds: u64) -> Result<Answer> {
    let check = format!("check {share} {seconds}");
    let report = console.ask(&check, "CHECKER", check_limit(seconds))?;
    demand_no_mismatch(console, &report)?;
    Ok(report)
}

/// How long that may take.
pub(crate) fn check_limit(seconds: u64) -> Duration {
    LONG + Duration::from_secs(120 + 6 * seconds)
}

/// Fails where a checker's report has mismatches, or has checked nothing.
pub(crate) fn demand_no_mismatch(console: &Console, report: &Answer) -> Result<()> {
    let mismatches = report.get("mismatches")?;
    let wrong: Vec<String> = console
        .transcript()
        .into_iter()
        .filter(|line| line.starts_with("MISMATCH"))
        .take(10)
        .collect();
    anyhow::ensure!(
        mismatches == 0 && wrong.is_empty(),
        "memory came back wrong: {}\n{}",
        report.line,
        wrong.join("\n")
    );
    anyhow::ensure!(
        report.get("checked")? >= report.get("pages")?,
        "the checker has not looked at every page: {}",
        report.line
    );
    Ok(())
}
