//! Attaching a guest that runs, and detaching it while it does: the checker works all along.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::console::Console;
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::hard_limit::HardLimit;
use outram_tests::hermetic::host::virsh_ok;
use outram_tests::hermetic::server::MemServer;
use outram_tests::hermetic::suite::Skipped;
use outram_wire::control::Phase;
use vm_memory::{FileOffset, MmapRegion};

use crate::Test;
use crate::fixture::{LONG, Lab, RAM_MIB, SHORT, demand_no_mismatch, wait_slabs, wait_under_limit};

pub(crate) const TESTS: &[Test] = &[
    ("attached_and_detached_while_it_works", both),
    ("definition_and_guest_are_changed_together", together),
    ("attach_live_refuses_before_harm", refused),
    ("a_failed_live_attach_leaves_nothing", undone),
    ("detach_live_is_refused_without_room_at_home", no_room),
    ("detach_live_can_be_interrupted", interrupted),
    ("attach_live_can_be_interrupted_and_killed", attach_ended),
    ("doctor_says_what_a_domain_allows", examined),
    ("a_far_memory_disk_comes_live_and_stays", far_disk),
];

/// RAM that another process can map, as attaching demands.
pub(crate) const SHARED: &str =
    "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>";

/// A guest that can be attached while it runs: libvirt leaves it a free PCIe port.
fn ready(name: &str) -> Spec {
    let mut spec = Spec::new(name, RAM_MIB);
    spec.extra_elements = SHARED.to_owned();
    spec
}

/// Boots it and has it work on most of its memory.
fn working(guest: &Guest) -> Result<Console> {
    let mut console = guest.boot()?;
    console.ask("alloc 60", "ALLOCATED", LONG)?;
    console.ask("work 0", "WORKING", LONG)?;
    Ok(console)
}

fn verify(console: &mut Console) -> Result<()> {
    console.ask("halt", "HALTED", LONG)?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(console, &report)
}

/// Runs `outram`, which must succeed: all that it said.
pub(crate) fn outram(lab: &Lab, arguments: &[&str]) -> Result<String> {
    let finished = lab.host.outram(arguments)?;
    ensure!(
        finished.success(),
        "{} failed: {}",
        finished.line,
        finished.said()
    );
    Ok(finished.said())
}

/// Runs `outram`, which must refuse with these words.
fn demand_refusal(lab: &Lab, arguments: &[&str], words: &[&str]) -> Result<()> {
    let finished = lab.host.outram(arguments)?;
    let said = finished.said();
    ensure!(!finished.success(), "{} succeeded: {said}", finished.line);
    for word in words {
        ensure!(
            said.contains(word),
            "{} must name '{word}'; it said: {said}",
            finished.line
        );
    }
    Ok(())
}

/// Nothing of Outram is left in what runs, nor beside it.
fn demand_untouched(guest: &Guest) -> Result<()> {
    let xml = virsh_ok(&["dumpxml", guest.name()])?;
    ensure!(!xml.contains("outram"), "something is left: {xml}");
    guest.wait_run_dir_gone(SHORT)?;
    ensure!(guest.state()? == "running", "it does not run");
    let userfaultfds = std::fs::read_dir(format!("/proc/{}/fd", guest.qemu_pid()?))?
        .flatten()
        .filter(|entry| {
            std::fs::read_link(entry.path())
                .is_ok_and(|to| to.to_string_lossy().contains("userfaultfd"))
        })
        .count();
    ensure!(userfaultfds == 0, "{userfaultfds} userfaultfds are left");
    Ok(())
}

fn power_off(guest: &Guest, console: &mut Console) -> Result<()> {
    console.send("poweroff")?;
    guest.wait_state("shut off", LONG)
}

/// Twice over, with the limit changed while the first draining is under way.
fn both(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = Guest::define(ready("live"))?;
    let mut console = working(&guest)?;
    for limit in ["0.4", "0.25"] {
        let attach = [
            "attach",
            guest.name(),
            "--live",
            "--local-ratio",
            limit,
            "--server",
            &server.address,
        ];
        let said = outram(lab, &attach)?;
        ensure!(said.contains("outram status"), "{said}");
        lab.tune(&guest, &["--local-ratio", "0.5"])?;
        lab.tune(&guest, &["--local-ratio", limit])?;
        let status = wait_under_limit(&guest)?;
        ensure!(
            status.stored_bytes > 0 && status.phase == Phase::Serving,
            "{status:?}"
        );
        demand_refusal(lab, &attach, &["attached already", "outram tune"])?;
        console.ask("ping", "PONG", LONG)?;
        let said = outram(lab, &["detach", guest.name(), "--live"])?;
        ensure!(said.contains("100%"), "its progress: {said}");
        demand_untouched(&guest)?;
        wait_slabs(&server, |slabs| slabs == 0)?;
        console.ask("ping", "PONG", LONG)?;
    }
    verify(&mut console)?;
    power_off(&guest, &mut console)
}

/// `--live --config`, and back: the definition is as it was.
fn together(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = Guest::define(ready("together"))?;
    let before = virsh_ok(&["dumpxml", "--inactive", guest.name()])?;
    let mut console = guest.boot()?;
    console.ask("alloc 40", "ALLOCATED", LONG)?;
    let attach = |flags: &[&'static str]| {
        let mut arguments = vec!["attach", guest.name(), "--local-ratio", "0.5"];
        arguments.extend(["--server", &server.address]);
        arguments.extend(flags);
        outram(lab, &arguments)
    };
    attach(&["--live", "--config"])?;
    let defined = virsh_ok(&["dumpxml", "--inactive", guest.name()])?;
    ensure!(
        defined.contains("vhostuser"),
        "not in the definition: {defined}"
    );
    ensure!(guest.status()?.phase == Phase::Serving, "not served");
    // As virsh has it: without flags, what runs.
    outram(lab, &["detach", guest.name()])?;
    demand_untouched(&guest)?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    outram(lab, &["detach", guest.name(), "--config"])?;
    let after = virsh_ok(&["dumpxml", "--inactive", guest.name()])?;
    ensure!(before == after, "before:\n{before}\nafter:\n{after}");
    power_off(&guest, &mut console)?;
    demand_refusal(
        lab,
        &["detach", guest.name(), "--live"],
        &["not running", "--live"],
    )
}

/// What cannot be attached while it runs is told with its cure, and nothing is touched.
fn refused(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = Guest::define(Spec::new("private", RAM_MIB))?;
    let mut console = guest.boot()?;
    let arguments = [
        "attach",
        guest.name(),
        "--live",
        "--local-ratio",
        "0.5",
        "--server",
        &server.address,
    ];
    let words = ["memfd", "outram attach private --config"];
    demand_refusal(lab, &arguments, &words)?;
    demand_untouched(&guest)?;
    console.ask("ping", "PONG", SHORT)?;
    demand_refusal(
        lab,
        &["detach", guest.name(), "--live"],
        &["does not use Outram"],
    )?;
    guest.destroy()
}

/// A server without room, and a stranger who maps guest RAM: the one is met before the hand-over,
/// the other by it.
fn undone(lab: &Lab) -> Result<()> {
    let small = lab.server("64MiB")?;
    let server = lab.server("1GiB")?;
    let guest = Guest::define(ready("undone"))?;
    let mut console = working(&guest)?;
    let attach = |address| {
        let limit = ["attach", "undone", "--live", "--local-ratio", "0.25"];
        [&limit[..], &["--server", address]].concat()
    };
    demand_refusal(lab, &attach(&small.address), &[&small.address])?;
    demand_untouched(&guest)?;
    let stranger = map_guest_ram(&guest)?;
    let reason = "guest RAM is shared with process";
    demand_refusal(lab, &attach(&server.address), &[reason])?;
    demand_untouched(&guest)?;
    drop(stranger);
    outram(lab, &attach(&server.address))?;
    wait_under_limit(&guest)?;
    verify(&mut console)?;
    guest.destroy()?;
    guest.wait_backend_gone(SHORT)?;
    wait_slabs(&server, |slabs| slabs == 0)
}

/// Has this very process map the first page of the guest's memfd, for as long as the result lives.
fn map_guest_ram(guest: &Guest) -> Result<MmapRegion> {
    let folder = format!("/proc/{}/fd", guest.qemu_pid()?);
    let memfd = std::fs::read_dir(&folder)?
        .flatten()
        .find(|entry| {
            std::fs::read_link(entry.path())
                .is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:memory-backend"))
        })
        .context("QEMU has no memfd")?;
    let file = File::options().read(true).write(true).open(memfd.path())?;
    Ok(MmapRegion::from_file(FileOffset::new(file, 0), 4096)?)
}

/// QEMU's memory cgroup has no room for what would come home.
fn no_room(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = Guest::define(ready("noroom"))?;
    let mut console = working(&guest)?;
    let attach = [
        "attach",
        guest.name(),
        "--live",
        "--local",
        "64MiB",
        "--server",
        &server.address,
    ];
    outram(lab, &attach)?;
    wait_under_limit(&guest)?;
    let group = HardLimit::new(200 << 20).map_err(|reason| Skipped(format!("{reason:#}")))?;
    group.add(guest.qemu_pid()?)?;
    demand_refusal(
        lab,
        &["detach", guest.name(), "--live"],
        &["would have to come home", "cgroup"],
    )?;
    let status = guest.status()?;
    ensure!(status.phase == Phase::Serving, "{status:?}");
    group.release(guest.qemu_pid()?)?;
    outram(lab, &["detach", guest.name(), "--live"])?;
    verify(&mut console)?;
    demand_untouched(&guest)?;
    power_off(&guest, &mut console)
}

/// Ends an attachment by a signal, while its server stands still: what it said. It does not wait for such a
/// server for long: where it has given up by itself before, it is begun again.
fn end_attach(lab: &Lab, server: &MemServer, guest: &Guest, signal: Signal) -> Result<String> {
    let said = tempfile::NamedTempFile::new_in("/run")?;
    for _ in 0..ATTEMPTS {
        server.signal(Signal::SIGSTOP)?;
        let mut attach = Command::new(lab.host.program("outram")?)
            .args(["attach", guest.name(), "--live", "--local-ratio", "0.25"])
            .args(["--server", &server.address])
            .stdin(Stdio::null())
            .stdout(File::create(said.path())?)
            .stderr(File::options().append(true).open(said.path())?)
            .spawn()?;
        let is_begun = wait_for("the attachment's settings", SHORT, || {
            let xml = virsh_ok(&["dumpxml", guest.name()])?;
            Ok((xml.contains("outram") || attach.try_wait()?.is_some()).then_some(()))
        });
        // A second one has to wait.
        let second = ["attach", guest.name(), "--live", "--local-ratio", "0.5"];
        let second = [&second[..], &["--server", &server.address]].concat();
        let refused = demand_refusal(lab, &second, &["is under way"]);
        if let Some(ended) = attach.try_wait()? {
            server.signal(Signal::SIGCONT)?;
            ensure!(!ended.success(), "it is attached without its server");
            continue;
        }
        kill(Pid::from_raw(attach.id() as i32), signal)?;
        std::thread::sleep(Duration::from_secs(1));
        server.signal(Signal::SIGCONT)?;
        let ended = wait_for("attach to end", LONG, || Ok(attach.try_wait()?));
        is_begun?;
        refused?;
        ensure!(!ended?.success(), "it is attached all the same");
        return Ok(fs::read_to_string(said.path())?);
    }
    let said = fs::read_to_string(said.path())?;
    bail!("it ended by itself, {ATTEMPTS} times: {said}")
}

/// Ctrl-C leaves nothing. What a kill leaves is in nobody's way: not when the guest is saved and restored, and
/// not when it is attached again.
fn attach_ended(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = Guest::define(ready("cutshort"))?;
    let mut console = working(&guest)?;
    let said = end_attach(lab, &server, &guest, Signal::SIGINT)?;
    let wanted = "interrupted: domain 'cutshort' is as it was before";
    ensure!(said.contains(wanted), "{said}");
    demand_untouched(&guest)?;
    end_attach(lab, &server, &guest, Signal::SIGKILL)?;
    virsh_ok(&["managedsave", guest.name()])?;
    drop(console);
    virsh_ok(&["start", guest.name()])?;
    console = guest.console()?;
    verify(&mut console)?;
    let attach = ["attach", guest.name(), "--live", "--local-ratio", "0.25"];
    let attach = [&attach[..], &["--server", &server.address]].concat();
    outram(lab, &["detach", guest.name(), "--live"])?;
    demand_untouched(&guest)?;
    end_attach(lab, &server, &guest, Signal::SIGKILL)?;
    outram(lab, &attach)?;
    wait_under_limit(&guest)?;
    verify(&mut console)?;
    outram(lab, &["detach", guest.name(), "--live"])?;
    demand_untouched(&guest)?;
    power_off(&guest, &mut console)
}

/// Ctrl-C while a server stands still: the guest is served as before.
fn interrupted(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = Guest::define(ready("interrupted"))?;
    let mut console = working(&guest)?;
    let attach = [
        "attach",
        guest.name(),
        "--live",
        "--local-ratio",
        "0.25",
        "--server",
        &server.address,
    ];
    outram(lab, &attach)?;
    wait_under_limit(&guest)?;
    let said = tempfile::NamedTempFile::new_in("/run")?;
    let mut detach = begin_to_detach(lab, &server, &guest, said.path())?;
    std::thread::sleep(Duration::from_secs(1));
    kill(Pid::from_raw(detach.id() as i32), Signal::SIGINT)?;
    let ended = wait_for("detach to end", LONG, || Ok(detach.try_wait()?));
    server.signal(Signal::SIGCONT)?;
    let ended = ended?;
    let said = std::fs::read_to_string(said.path())?;
    ensure!(
        !ended.success() && ended.signal().is_none() && said.contains("interrupted"),
        "{ended}: {said}"
    );
    let status = guest.wait_status("it to be served as before", LONG, |status| {
        status.phase == Phase::Serving
    })?;
    ensure!(status.limit_bytes == (RAM_MIB << 20) / 4, "{status:?}");
    wait_under_limit(&guest)?;
    verify(&mut console)?;
    guest.destroy()?;
    guest.wait_backend_gone(SHORT)?;
    wait_slabs(&server, |slabs| slabs == 0)
}

/// How often is begun what may come too late.
const ATTEMPTS: u32 = 5;

/// Detaches a guest whose server stands still: what runs, once pages are to come home. A server that has stood
/// still for some seconds counts as away, and whoever comes then is refused, and is to come again.
fn begin_to_detach(lab: &Lab, server: &MemServer, guest: &Guest, said: &Path) -> Result<Child> {
    let begin = || {
        Command::new(lab.host.program("outram")?)
            .args(["detach", guest.name(), "--live"])
            .stdin(Stdio::null())
            .stdout(File::create(said)?)
            .stderr(File::options().append(true).open(said)?)
            .spawn()
            .context("outram detach")
    };
    for _ in 0..ATTEMPTS {
        server.signal(Signal::SIGSTOP)?;
        let mut detach = begin()?;
        let begun = wait_for("pages to come home", SHORT, || {
            match guest.status_if_any().map(|status| status.phase) {
                Some(Phase::Homing) => Ok(Some(true)),
                _ => Ok(detach.try_wait()?.map(|_| false)),
            }
        });
        if let Ok(true) = begun {
            return Ok(detach);
        }
        server.signal(Signal::SIGCONT)?;
        begun?;
        guest.wait_status("the server to be back", LONG, |status| {
            status.servers.iter().all(|server| server.connected)
        })?;
    }
    bail!("no page is to come home: {}", fs::read_to_string(said)?)
}

/// Has the doctor look at a domain: its exit status, and for each check the words of one line.
fn demand_findings(lab: &Lab, domain: &str, healthy: bool, findings: &[[&str; 3]]) -> Result<()> {
    let doctor = lab.host.outram(&["doctor", domain])?;
    let said = doctor.said();
    ensure!(
        doctor.success() == healthy,
        "{} of '{domain}' has the wrong exit status: {said}",
        doctor.line
    );
    for [verdict, check, words] in findings {
        let is_found = said
            .lines()
            .any(|line| line.starts_with(verdict) && line.contains(check) && line.contains(words));
        ensure!(
            is_found,
            "no line '{verdict} {check} … {words}' in:\n{said}"
        );
    }
    let mut asked: Vec<&str> = said
        .lines()
        .filter_map(|line| {
            line.strip_prefix("pass  server ")?
                .split_whitespace()
                .next()
        })
        .collect();
    let count = asked.len();
    asked.sort_unstable();
    asked.dedup();
    ensure!(asked.len() == count, "a server was asked twice:\n{said}");
    Ok(())
}

/// Domains that can and that cannot be attached, detached, or started.
fn examined(lab: &Lab) -> Result<()> {
    demand_findings(lab, "nobody", false, &[["FAIL", "domain", "nobody"]])?;
    let mut locked = Spec::new("locked", 256);
    locked.extra_elements = "<memoryBacking><locked/></memoryBacking>".to_owned();
    let locked = Guest::define(locked)?;
    let found = [["FAIL", "devices", "lock"]];
    demand_findings(lab, locked.name(), false, &found)?;

    // It could be attached, but not as it runs.
    let private = Guest::define(Spec::new("private", 256))?;
    let _console = private.boot()?;
    let found = [
        ["warn", "next start", "can be attached"],
        ["warn", "attach --live", "memfd"],
    ];
    demand_findings(lab, private.name(), true, &found)?;
    private.destroy()?;

    let small = lab.server("64MiB")?;
    let arguments = ["--local-ratio", "0.25"];
    let starved = lab.attach(Spec::new("starved", RAM_MIB), &arguments, &small.address)?;
    let found = [
        ["pass", "next start", "attached"],
        ["FAIL", "room", "and the guest needs"],
    ];
    demand_findings(lab, starved.name(), false, &found)?;
    patient_goes_on(lab)
}

/// A guest from before it is attached until its server is gone.
fn patient_goes_on(lab: &Lab) -> Result<()> {
    let mut server = lab.server("1GiB")?;
    let guest = Guest::define(ready("patient"))?;
    let mut console = guest.boot()?;
    console.ask("alloc 60", "ALLOCATED", LONG)?;
    let found = [["pass", "attach --live", "PCIe root port"]];
    demand_findings(lab, guest.name(), true, &found)?;
    let limit = ["attach", guest.name(), "--live", "--local-ratio", "0.25"];
    outram(lab, &[&limit[..], &["--server", &server.address]].concat())?;
    wait_under_limit(&guest)?;
    let found = [
        ["pass", "detach --live", "has room"],
        ["pass", "server", "free"],
    ];
    demand_findings(lab, guest.name(), true, &found)?;
    server.kill()?;
    guest.wait_status("the outage to be seen", LONG, |status| {
        status.servers.iter().any(|server| !server.connected)
    })?;
    let found = [["FAIL", "backend", "out of reach"]];
    demand_findings(lab, guest.name(), false, &found)?;
    guest.destroy()
}

/// A disk that a guest may have its swap on: plugged in and used, but not taken away under it.
fn far_disk(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = Guest::define(ready("diskful"))?;
    let mut console = guest.boot()?;
    console.ask("alloc 40", "ALLOCATED", LONG)?;
    let limit = ["attach", guest.name(), "--live", "--local-ratio", "0.25"];
    let disk = ["--disk-size", "64MiB", "--server", &server.address];
    outram(lab, &[&limit[..], &disk].concat())?;
    wait_under_limit(&guest)?;
    // The guest's kernel takes it in when it gets to it.
    wait_for("the guest to see its disk", LONG, || {
        Ok(console.ask("disk-id", "DISK", SHORT).ok())
    })?;
    console.ask("fs-make", "FS", LONG)?;
    console.ask("fs-write 8 1", "FS", LONG)?;
    // Only the domain as it runs tells of its servers and its disk.
    let disks = lab.host.outram_ok(&["disk", "list"])?;
    ensure!(
        disks.contains(guest.name()) && disks.contains(&server.address),
        "{disks}"
    );
    // What is of the definition alone does not come into what runs.
    let config = ["attach", guest.name(), "--config", "--local-ratio", "0.5"];
    outram(lab, &[&config[..], &["--server", &server.address]].concat())?;
    outram(
        lab,
        &["tune", guest.name(), "--local-ratio=0.3", "--persist"],
    )?;
    let inactive = virsh_ok(&["dumpxml", "--inactive", guest.name()])?;
    ensure!(
        !inactive.contains("outram:disk") && inactive.contains("0.3"),
        "{inactive}"
    );
    let detach = ["detach", guest.name(), "--live"];
    let words = ["far-memory disk", "shut the guest down"];
    demand_refusal(lab, &detach, &words)?;
    demand_refusal(lab, &[&detach[..], &["--dry-run"]].concat(), &words)?;
    let found = [["warn", "detach --live", "far-memory disk"]];
    demand_findings(lab, guest.name(), true, &found)?;
    let status = guest.status()?;
    ensure!(status.phase == Phase::Serving, "{status:?}");
    let report = console.ask("fs-verify 8 1", "FS", LONG)?;
    ensure!(report.get("mismatches")? == 0, "{}", report.line);
    verify(&mut console)?;
    power_off(&guest, &mut console)?;
    guest.wait_backend_gone(SHORT)
}
