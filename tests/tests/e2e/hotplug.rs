//! Memory that is hot-plugged and unplugged by libvirt: DIMMs, virtio-mem, in one NUMA cell or two.
//! The checker uses it throughout, and what it costs is counted by the kernel.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::console::Console;
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::host::virsh_ok;
use outram_tests::hermetic::sampler::{Sampler, Stated};
use outram_wire::control::Status;

use crate::Test;
use crate::fixture::{LONG, Lab, demand_no_mismatch, power_off, wait_under_limit};

pub(crate) const TESTS: &[Test] = &[
    ("dimm_plugged_and_unplugged_under_load", dimm),
    ("dimm_in_each_of_two_cells", two_cells),
    ("dimm_with_private_memory_stays_aside", private_dimm),
    ("virtio_mem_grows_shrinks_and_grows", virtio_mem),
];

/// RAM at start.
const RAM_MIB: u64 = 512;

/// The smallest block that an x86 guest can take in.
const DIMM_MIB: u64 = 128;

/// Plugging and unplugging go through the guest's kernel, which is emulated.
const PLUG: Duration = Duration::from_secs(240);

/// A guest with `cells` NUMA cells and room for more memory.
fn spec(name: &str, cells: u64) -> Spec {
    let mut spec = Spec::new(name, RAM_MIB);
    let cells: String = (0..cells)
        .map(|cell| {
            let (cpus, size) = match cells {
                1 => ("0-1".to_owned(), RAM_MIB),
                _ => (cell.to_string(), RAM_MIB / cells),
            };
            format!("<cell id='{cell}' cpus='{cpus}' memory='{size}' unit='MiB'/>")
        })
        .collect();
    spec.extra_elements =
        format!("<maxMemory slots='4' unit='MiB'>2048</maxMemory><cpu><numa>{cells}</numa></cpu>");
    spec
}

fn dimm_xml(cell: u64, access: &str) -> String {
    format!(
        "<memory model='dimm'{access}><target><size unit='MiB'>{DIMM_MIB}</size>\
         <node>{cell}</node></target></memory>"
    )
}

/// `virsh attach-device` and its kin, live.
fn device(verb: &str, guest: &Guest, xml: &str) -> Result<()> {
    let file = format!("/run/{}-memory.xml", guest.name());
    fs::write(&file, xml)?;
    virsh_ok(&[verb, guest.name(), &file, "--live"]).map(drop)
}

/// What the guest's kernel counts as its memory: RAM, less what it keeps for itself.
fn seen_kib(console: &mut Console) -> Result<u64> {
    console.ask("meminfo", "MEMINFO", LONG)?.get("total_kib")
}

/// Plugs a DIMM into a guest whose limit is a share of its RAM; what it costs is judged by what the
/// limit is to be.
fn plug(guest: &Guest, sampler: &Sampler, cell: u64, ratio: f64) -> Result<()> {
    let before = Stated::of(guest)?;
    let more = ((DIMM_MIB << 20) as f64 * ratio) as u64;
    sampler.judge_from_now(Stated {
        limit: before.limit + more,
        ..before
    });
    device("attach-device", guest, &dimm_xml(cell, ""))
}

/// Waits until the guest's kernel counts `more_mib` beyond what it counted at start.
fn wait_seen(console: &mut Console, at_start_kib: u64, more_mib: u64) -> Result<()> {
    let wanted = at_start_kib + (more_mib << 10);
    let mut seen = 0;
    wait_for("the guest to follow", PLUG, || {
        seen = seen_kib(console)?;
        // What describes the new memory may be taken from it.
        Ok((seen <= wanted && seen + (8 << 10) > wanted).then_some(()))
    })
    .with_context(|| format!("it sees {seen} KiB, not {wanted} KiB"))
}

/// Waits until there are `more_mib` beyond the RAM at start, by the backend's word and the guest's
/// kernel's.
fn wait_ram(guest: &Guest, console: &mut Console, at_start_kib: u64, more_mib: u64) -> Result<()> {
    let status = guest.wait_status("the backend to follow", PLUG, |status| {
        status.ram_bytes == (RAM_MIB + more_mib) << 20
    })?;
    ensure!(status.unmanaged_bytes == 0, "{status:?}");
    wait_seen(console, at_start_kib, more_mib)
}

/// Inodes of the memory files that QEMU holds as its RAM.
fn ram_files(guest: &Guest) -> Result<Vec<u64>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(format!("/proc/{}/fd", guest.qemu_pid()?))?.flatten() {
        let is_ram = fs::read_link(entry.path())
            .is_ok_and(|to| to.to_string_lossy().contains("memory-backend-memfd"));
        if let Some(metadata) = fs::metadata(entry.path()).ok().filter(|_| is_ram) {
            files.push(metadata.ino());
        }
    }
    files.sort_unstable();
    files.dedup();
    Ok(files)
}

/// Whether any process of the sandbox has the memory file open or mapped: its memory is freed once
/// none has.
fn is_held(inode: u64) -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.into_iter().any(|process| {
        let maps = fs::read_to_string(process.path().join("maps")).unwrap_or_default();
        let mapped = maps.lines().any(|line| {
            line.contains("/memfd:") && line.split_whitespace().nth(4) == Some(&inode.to_string())
        });
        let files = fs::read_dir(process.path().join("fd")).into_iter();
        mapped
            || files.flatten().flatten().any(|file| {
                let is_memfd = fs::read_link(file.path())
                    .is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:"));
                is_memfd && fs::metadata(file.path()).is_ok_and(|found| found.ino() == inode)
            })
    })
}

/// Fills, works on and verifies what is taken.
fn work_and_verify(console: &mut Console) -> Result<()> {
    console.ask("work 2", "WORKED", LONG)?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(console, &report)
}

/// Has the guest let go of a DIMM. Its kernel refuses where it cannot empty the memory just then, and is asked
/// again.
fn unplug(guest: &Guest, console: &mut Console) -> Result<()> {
    let mut asked = device("detach-device", guest, &dimm_xml(0, ""));
    // An emulated guest's kernel finds no time to empty the memory while all of its processors work.
    console.ask("halt", "HALTED", LONG)?;
    console.ask("work 1", "WORKED", LONG)?;
    let gone = |limit| {
        let is_gone = |status: &Status| status.ram_bytes == RAM_MIB << 20;
        guest
            .wait_status("the DIMM to go", limit, is_gone)
            .map(drop)
    };
    for _ in 0..3 {
        if gone(PLUG / 3).is_ok() {
            return Ok(());
        }
        // One that has gone at last is not found any more.
        asked = device("detach-device", guest, &dimm_xml(0, ""));
    }
    gone(PLUG).with_context(|| format!("asked once more: {asked:?}"))
}

/// The limit follows the RAM, and holds with it; unplugged memory is free, and the same can be
/// plugged again.
fn dimm(lab: &Lab) -> Result<()> {
    let server = lab.server("2GiB")?;
    let guest = lab.attach(spec("dimm", 1), &["--local-ratio", "0.5"], &server.address)?;
    let sampler = Sampler::start(&guest);
    let mut console = guest.boot()?;
    sampler.judge(Stated::of(&guest)?);
    let at_start = seen_kib(&mut console)?;
    console.ask("alloc 60", "ALLOCATED", LONG)?;
    let before = ram_files(&guest)?;
    for _ in 0..2 {
        console.ask("work 0", "WORKING", LONG)?;
        plug(&guest, &sampler, 0, 0.5)?;
        wait_ram(&guest, &mut console, at_start, DIMM_MIB)?;
        let limit = Stated::of(&guest)?.limit;
        ensure!(limit == (RAM_MIB + DIMM_MIB) << 19, "{limit}");
        let files = ram_files(&guest)?;
        let added = files.iter().find(|file| !before.contains(file));
        let added = *added.context("QEMU has no memory file for the DIMM")?;
        // Far more than is left of the memory that the guest started with.
        console.ask("more 120", "ALLOCATED", LONG)?;
        work_and_verify(&mut console)?;
        let status = guest.status()?;
        ensure!(
            status.stored_bytes > 0,
            "nothing left this host: {status:?}"
        );

        // What is in use has to fit into the rest, where the kernel moves it.
        console.ask("alloc 40", "ALLOCATED", LONG)?;
        console.ask("work 0", "WORKING", LONG)?;
        sampler.pause();
        unplug(&guest, &mut console)?;
        wait_ram(&guest, &mut console, at_start, 0)?;
        wait_for("the DIMM's memory to be free", PLUG, || {
            Ok((!is_held(added)).then_some(()))
        })?;
        wait_under_limit(&guest)?;
        sampler.judge_from_now(Stated::of(&guest)?);
        work_and_verify(&mut console)?;
    }
    sampler.finish()?;
    power_off(&guest, &mut console, &server)
}

/// Each cell has a block of its own from the start, and gets one more.
fn two_cells(lab: &Lab) -> Result<()> {
    let server = lab.server("2GiB")?;
    let guest = lab.attach(spec("cells", 2), &["--local-ratio", "0.4"], &server.address)?;
    let sampler = Sampler::start(&guest);
    let mut console = guest.boot()?;
    sampler.judge(Stated::of(&guest)?);
    let at_start = seen_kib(&mut console)?;
    console.ask("alloc 60", "ALLOCATED", LONG)?;
    for cell in 0..2 {
        plug(&guest, &sampler, cell, 0.4)?;
        wait_ram(&guest, &mut console, at_start, (cell + 1) * DIMM_MIB)?;
        console.ask("more 100", "ALLOCATED", LONG)?;
    }
    ensure!(ram_files(&guest)?.len() == 4, "four blocks of their own");
    work_and_verify(&mut console)?;
    sampler.finish()?;
    power_off(&guest, &mut console, &server)
}

/// Its pages are in no memory file that another process could see: told, and left alone.
fn private_dimm(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(
        spec("privdimm", 1),
        &["--local-ratio", "0.5"],
        &server.address,
    )?;
    let mut console = guest.boot()?;
    console.ask("alloc 60", "ALLOCATED", LONG)?;
    device("attach-device", &guest, &dimm_xml(0, " access='private'"))?;
    let status = guest.wait_status("the DIMM to be told of", PLUG, |status| {
        // It is told of before it is looked at, too.
        let detail = status.detail.as_deref().unwrap_or_default();
        status.unmanaged_bytes == DIMM_MIB << 20 && detail.contains("mapped privately")
    })?;
    ensure!(status.ram_bytes == RAM_MIB << 20, "{status:?}");
    let told = lab.host.outram_ok(&["status", guest.name()])?;
    ensure!(told.contains("mapped privately"), "{told}");
    work_and_verify(&mut console)?;
    console.send("poweroff")?;
    guest.wait_state("shut off", LONG)
}

/// The device's whole size is reserved and counts as RAM; what is requested of it is what the guest
/// can use.
fn virtio_mem(lab: &Lab) -> Result<()> {
    let server = lab.server("2GiB")?;
    let mut spec = spec("vmem", 1);
    spec.extra_devices = "<memory model='virtio-mem'><target><size unit='MiB'>256</size>\
         <node>0</node><block unit='MiB'>2</block><requested unit='MiB'>0</requested></target></memory>"
        .to_owned();
    let guest = lab.attach(spec, &["--local", "256MiB"], &server.address)?;
    let sampler = Sampler::start(&guest);
    let mut console = guest.boot()?;
    sampler.judge(Stated::of(&guest)?);
    let at_start = seen_kib(&mut console)?;
    console.ask("alloc 60", "ALLOCATED", LONG)?;
    for _ in 0..2 {
        request(&guest, &mut console, at_start, 256)?;
        console.ask("more 200", "ALLOCATED", LONG)?;
        work_and_verify(&mut console)?;
        let before = guest.status()?.counters.removed_pages;
        console.ask("alloc 40", "ALLOCATED", LONG)?;
        request(&guest, &mut console, at_start, 0)?;
        let given_back = guest.status()?.counters.removed_pages - before;
        ensure!(
            given_back > 10_000,
            "only {given_back} pages were given back"
        );
        work_and_verify(&mut console)?;
    }
    sampler.finish()?;
    power_off(&guest, &mut console, &server)
}

/// `virsh update-memory-device`, and the guest's answer to it.
fn request(guest: &Guest, console: &mut Console, at_start_kib: u64, mib: u64) -> Result<()> {
    let size = format!("{mib}MiB");
    virsh_ok(&[
        "update-memory-device",
        guest.name(),
        "--live",
        "--requested-size",
        &size,
    ])?;
    wait_seen(console, at_start_kib, mib)
}
