//! What an operator meets beside guests: `setup`, `doctor`, `status`, and runs that are cut short.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::guest::Spec;

use crate::Test;
use crate::fixture::{Lab, SHORT, power_off};

pub(crate) const TESTS: &[Test] = &[
    ("setup_changes_nothing_twice", setup_twice),
    ("doctor_finds_a_host_set_up_well", doctor),
    ("status_speaks_to_people_and_programs", status),
    ("an_interrupted_demo_leaves_nothing", interrupted),
];

fn setup_twice(lab: &Lab) -> Result<()> {
    let said = lab.host.outram_ok(&["setup"])?;
    ensure!(
        said.contains("found") && !said.lines().any(|line| line.starts_with("done")),
        "a second setup has nothing to do, but said: {said}"
    );
    Ok(())
}

fn doctor(lab: &Lab) -> Result<()> {
    let examined = lab.host.outram(&["doctor"])?;
    ensure!(
        examined.success(),
        "the host was set up by 'outram setup', but the doctor says: {}",
        examined.said()
    );
    Ok(())
}

fn status(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(
        Spec::new("told", 256),
        &["--local-ratio", "0.5"],
        &server.address,
    )?;
    let mut console = guest.boot()?;
    let table = lab.host.outram_ok(&["status"])?;
    ensure!(
        table.contains("told") && table.contains("serving"),
        "the table says: {table}"
    );
    let one = lab.host.outram_ok(&["status", "told"])?;
    ensure!(one.contains("127.0.0.1"), "the details say: {one}");
    let json = lab.host.outram_ok(&["status", "told", "--json"])?;
    let report: serde_json::Value = serde_json::from_str(&json).context("status --json")?;
    ensure!(
        report["status"]["ram_bytes"] == 256 << 20 && report["name"] == "told",
        "the report says: {json}"
    );
    power_off(&guest, &mut console, &server)
}

/// The demo makes a sandbox of its own within this one; ended in its midst, nothing of it may stay.
fn interrupted(lab: &Lab) -> Result<()> {
    for signal in [Signal::SIGINT, Signal::SIGKILL] {
        let mut demo = start_demo(lab)?;
        let pid = demo.id();
        let output = demo.stdout.take().context("its output")?;
        // Open until it has ended: a demo that nobody hears ends by itself.
        let mut lines = BufReader::new(output).lines();
        let started = lines
            .by_ref()
            .map_while(Result::ok)
            .any(|line| line.contains("memory server"));
        ensure!(started, "the demo never got to its memory server");
        ensure!(
            !of_run(pid)?.is_empty(),
            "the demo's processes must be found"
        );
        kill(Pid::from_raw(pid as i32), signal)?;
        demo.wait()?;
        drop(lines);
        wait_for(&format!("processes to go after {signal}"), SHORT, || {
            Ok(of_run(pid)?.is_empty().then_some(()))
        })
        .with_context(|| format!("left: {:?}", of_run(pid)))?;
        if signal == Signal::SIGKILL {
            // What only a process that lives can remove: its own note for 'make clean-state'.
            let note = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../target/sandboxes")
                .join(pid.to_string());
            fs::remove_file(&note).with_context(|| note.display().to_string())?;
        }
    }
    Ok(())
}

fn start_demo(lab: &Lab) -> Result<Child> {
    let mut command = Command::new(lab.host.program("demo")?);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("OUTRAM_SANDBOX_")) {
        command.env_remove(name);
    }
    command.stderr(Stdio::null()).spawn().context("the demo")
}

/// Processes that a run's outside process `owner` has started, by their environment.
fn of_run(owner: u32) -> Result<Vec<u32>> {
    let mark = format!("OUTRAM_SANDBOX_OWNER={owner}");
    let found = fs::read_dir("/proc")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment
                .split(|byte| *byte == 0)
                .any(|variable| variable == mark.as_bytes())
        })
        .collect();
    Ok(found)
}
