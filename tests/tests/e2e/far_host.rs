//! A guest of KVM whose memory server is on another machine: two lab guests on one cable, each with
//! soft-RoCE over its network card. The same work with pages over RDMA and over TCP, and by the kernel's own
//! swap to a block device in the other machine's memory, in one table.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use outram_tests::hermetic::command::{run, wait_for};
use outram_tests::hermetic::console::Console;
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::hard_limit::HardLimit;
use outram_tests::hermetic::host::{Acceleration, PKI};
use outram_tests::hermetic::sandbox;
use outram_tests::hermetic::server::sample;
use outram_tests::hermetic::suite::need;
use outram_tests::lab_guest::{self, Boot, Cable, KERNEL_DOES_IT, Kernel, LabGuest};
use outram_tests::small_lab::PAGE;
use outram_wire::control::{Phase, Status};

use crate::Test;
use crate::backend_dies::{end, wait_for_another};
use crate::fixture::{LONG, Lab, SHORT, demand_no_mismatch, top, wait_under_limit};
use crate::live::{SHARED, outram};
use crate::under_kvm::{GUEST, SHOWN, again_in, demand_wanted};

const NAME: &str = "a_guest_of_kvm_is_paged_by_another_machine";

pub(crate) const TESTS: &[Test] = &[(NAME, |lab| match Acceleration::wanted() {
    Acceleration::Emulated => two_machines(lab),
    Acceleration::Kvm => guests(lab),
})];

/// The other machine: memory for what it lends.
const OTHER: LabGuest = LabGuest {
    boot: Boot::Plain,
    memory_mib: 1024,
    vcpus: 1,
};

/// How long it may all take.
const LIMIT: Duration = Duration::from_secs(2400);

/// The server's name as a certificate has it, and its addresses.
const SERVER: &str = "far";
const HOST: &str = "192.0.2.1";
const ADDRESS: &str = "192.0.2.1:7741";
const METRICS: &str = "192.0.2.1:7742";

/// Beside each machine's script, in its shared folder: the certificates of both.
const SHARED_PKI: &str = "/share/pki";

/// Starts the other machine, and in a first one this test again.
fn two_machines(lab: &Lab) -> Result<()> {
    demand_wanted()?;
    let images = lab_guest::build(top(), Kernel::Ordinary)?;
    let issue = ["pki", "issue", "server", SERVER, "--address", HOST];
    lab.host.outram_ok(&issue)?;
    // Private to the sandbox: gone with it, however that ends.
    let folder = tempfile::tempdir_in("/run")?;
    let [here, there] = ["here", "there"].map(|name| folder.path().join(name));
    for share in [&here, &there] {
        fs::create_dir(share)?;
        let pki = share.join("pki").display().to_string();
        run("cp", &["-r", PKI, &pki])?;
    }
    fs::write(
        there.join("lab"),
        serve(&lab.host.program("outram-memserver")?),
    )?;
    let [far_end, near_end] = Cable::within(folder.path());
    thread::scope(|scope| {
        let other = scope.spawn(|| OTHER.run_joined(&images, &there, LIMIT, Some(&far_end)));
        let said = wait_for("the other machine to serve", LONG, || {
            ensure!(!other.is_finished(), "it has ended");
            Ok(there.join("serves").exists().then_some(()))
        })
        .and_then(|()| {
            again_in(&here, NAME, &joined("192.0.2.2"), |share| {
                GUEST.run_joined(&images, share, LIMIT, Some(&near_end))
            })
        });
        let end = fs::write(there.join("end"), "");
        let other = other.join().map_err(|_| anyhow!("its thread panicked"));
        end?;
        let other = other?.context("the other machine");
        // What went wrong there explains what went wrong here.
        match (said, other) {
            (Err(error), Err(other)) => Err(error.context(format!("{other:#}"))),
            (said, other) => other.and(said),
        }
    })
}

/// Lines of a script: a machine at its end of the cable.
fn joined(address: &str) -> String {
    format!(
        "modprobe -a virtio_net rdma_rxe crc32_generic ib_uverbs
ip address add {address}/24 dev eth0
ip link set eth0 mtu 4200 up
rdma link add rxe0 type rxe netdev eth0
export {}
",
        sandbox::NONE
    )
}

/// The other machine's script: it serves until it finds the file 'end'.
fn serve(program: &str) -> String {
    format!(
        "set -e
{joined}
{program} --listen {ADDRESS} --metrics {METRICS} --memory 512MiB --slab-size 4MiB \\
  --tls-ca {SHARED_PKI}/ca.pem --tls-cert {SHARED_PKI}/{SERVER}.pem --tls-key {SHARED_PKI}/{SERVER}.key &
truncate -s {SWAP_MIB}M /dev/shm/swap
printf '[generic]\n[swap]\nexportname = /dev/shm/swap\n' >/run/nbd.conf
if command -v nbd-server; then nbd-server -C /run/nbd.conf; fi
until (exec 3<>/dev/tcp/{HOST}/7741) 2>/dev/null; do sleep 0.2; done
touch /share/serves
until [ -e /share/end ]; do sleep 1; done
kill %1
wait %1
",
        joined = joined(HOST)
    )
}

/// How pages go, as an address says and as `status` says.
const WAYS: [(&str, &str); 2] = [("rdma", "RDMA (rxe0)"), ("tcp", "TCP")];

/// What the kernel swaps to: a file in the other machine's memory, over NBD.
const SWAP_MIB: u64 = 256;

/// Limits by which the same work is done, as shares of the RAM.
const RATIOS: [f64; 2] = [0.5, 0.2];

/// What is local while all is verified at the end: with less, each page would also have to send one away.
const LAST: &str = "0.75";

/// RAM of the guest, each page of which costs milliseconds here, and per cent of it that its checker has:
/// more than is local at the first limit, or the kernel, which tells what is used, need not swap.
const RAM_MIB: u64 = 208;
const SHARE: u64 = 52;

/// Seconds of random reads and writes at each limit.
const WORK_SECONDS: u64 = 10;

/// How often it works at most before what the kernel swaps is counted.
const SETTLING: usize = 4;

/// On the first machine.
fn guests(lab: &Lab) -> Result<()> {
    run("cp", &["-rT", SHARED_PKI, PKI])?;
    println!(
        "{SHOWN}{:<9}{:>6}{:>12}{:>13}{:>11}{:>9}{:>9}{:>20}",
        "pages by",
        "local",
        "visited/s",
        "fetched/s",
        "written/s",
        "p50 us",
        "p99 us",
        "server ms per 1000"
    );
    for (scheme, transport) in WAYS {
        attached(lab, scheme, transport)?;
    }
    println!("{SHOWN}{KERNEL_DOES_IT}");
    match need("nbd-client", "nbd-client").and(need("nbd-server", "nbd-server")) {
        Ok(()) => swapped(lab)?,
        Err(reason) => println!("{SHOWN}nbd swap: {reason}"),
    }
    attached_live(lab)
}

fn attached(lab: &Lab, scheme: &str, transport: &str) -> Result<()> {
    let spec = Spec::new(scheme, RAM_MIB);
    let server = format!("{scheme}://{ADDRESS}");
    let guest = lab.attach(spec, &["--local-ratio", "1"], &server)?;
    let mut console = guest.boot()?;
    demand_transport(&guest.status()?, transport)?;
    console.ask(&format!("alloc {SHARE}"), "ALLOCATED", LONG)?;
    let mut visits = Visits::default();
    for ratio in RATIOS {
        lab.tune(&guest, &["--local-ratio", &ratio.to_string()])?;
        wait_under_limit(&guest)?;
        visits.work(&mut console)?;
        let (before, server) = (guest.status()?, server_seconds()?);
        let (visited, took) = visits.work(&mut console)?;
        let after = guest.status()?;
        let server = server_seconds()? - server;
        let (fetched, written) = (
            // Also those that nobody had waited for.
            (after.counters.wire_received_bytes - before.counters.wire_received_bytes) / PAGE,
            after.counters.writeback_pages - before.counters.writeback_pages,
        );
        ensure!(
            fetched > 0 && written > 0,
            "nothing went to and fro: {after:?}"
        );
        // Since the guest's start.
        let latency = after.latency.get("remote").context("no latency")?;
        let rest = format!(
            "{:>9}{:>9}{:>20.1}",
            latency.us_p50,
            latency.us_p99,
            server * 1e6 / (fetched + written) as f64
        );
        tell(scheme, ratio, took, [visited, fetched, written], &rest);
    }
    if scheme == "rdma" {
        console.ask("work 0", "WORKING", LONG)?;
        lose_frames(&guest)?;
        let before = guest.status()?;
        end(before.backend_pid)?;
        wait_for_another(&guest, &before)?;
        console.ask("halt", "HALTED", LONG)?;
    }
    lab.tune(&guest, &["--local-ratio", LAST])?;
    verify(&mut console)?;
    demand_transport(&guest.status()?, transport)?;
    console.send("poweroff")?;
    guest.wait_state("shut off", LONG)?;
    guest.wait_backend_gone(SHORT)?;
    wait_returned()
}

/// Frames to the other machine go to a card that nobody has, and no end is told: the guest waits, and goes
/// on once they arrive again.
fn lose_frames(guest: &Guest) -> Result<()> {
    let neighbour = |verb: &str, more: &[&str]| {
        run(
            "ip",
            &[&["neighbour", verb, HOST, "dev", "eth0"], more].concat(),
        )
    };
    neighbour(
        "replace",
        &["lladdr", "52:54:00:00:02:99", "nud", "permanent"],
    )?;
    wait_for("the guest to wait for its server", LONG, || {
        let status = guest.status()?;
        let waits = status.phase == Phase::Stalled && status.waiting_faults > 0;
        Ok(waits.then_some(()))
    })?;
    neighbour("delete", &[])?;
    wait_for("the guest to go on", LONG, || {
        Ok((guest.status()?.phase == Phase::Serving).then_some(()))
    })
}

/// Attached while it runs, tuned, and detached while it runs.
fn attached_live(lab: &Lab) -> Result<()> {
    let mut spec = Spec::new("live", RAM_MIB);
    spec.extra_elements = SHARED.to_owned();
    let guest = Guest::define(spec)?;
    let mut console = guest.boot()?;
    console.ask(&format!("alloc {SHARE}"), "ALLOCATED", LONG)?;
    console.ask("work 0", "WORKING", LONG)?;
    let (scheme, transport) = WAYS[0];
    let server = format!("{scheme}://{ADDRESS}");
    outram(
        lab,
        &[
            "attach",
            "live",
            "--live",
            "--local-ratio",
            "0.5",
            "--server",
            &server,
        ],
    )?;
    demand_transport(&wait_under_limit(&guest)?, transport)?;
    lab.tune(&guest, &["--local-ratio", "0.2"])?;
    let status = wait_under_limit(&guest)?;
    ensure!(status.stored_bytes > 0, "{status:?}");
    outram(lab, &["detach", "live", "--live"])?;
    wait_returned()?;
    console.ask("halt", "HALTED", LONG)?;
    verify(&mut console)?;
    console.send("poweroff")?;
    guest.wait_state("shut off", LONG)
}

fn verify(console: &mut Console) -> Result<()> {
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(console, &report)
}

fn demand_transport(status: &Status, wanted: &str) -> Result<()> {
    let server = status.servers.first().context("no server")?;
    let found = server.transport.as_deref();
    ensure!(found == Some(wanted), "not {wanted}: {status:?}");
    Ok(())
}

/// Processor time that the server's process has taken.
fn server_seconds() -> Result<f64> {
    sample(METRICS, "outram_memserver_cpu_seconds_total")
}

fn wait_returned() -> Result<()> {
    wait_for("slabs to be given back", SHORT, || {
        let leased = sample(METRICS, "outram_memserver_leased_bytes")?;
        Ok((leased == 0.0).then_some(()))
    })
}

/// The same work, where the kernel swaps the guest's memory as it does any process's.
fn swapped(lab: &Lab) -> Result<()> {
    let device = "/dev/nbd0";
    run("modprobe", &["nbd"])?;
    run("nbd-client", &["-swap", "-N", "swap", HOST, device])?;
    run("mkswap", &[device])?;
    run("swapon", &[device])?;
    let mut spec = Spec::new("nbd", RAM_MIB);
    spec.extra_elements = "<memoryBacking><source type='anonymous'/></memoryBacking>".to_owned();
    let guest = Guest::define(spec)?;
    let group = HardLimit::with_swap((2 * RAM_MIB) << 20)?;
    let mut console = lab.boot_in(&group, &guest)?;
    console.ask(&format!("alloc {SHARE}"), "ALLOCATED", LONG)?;
    // The group's limit is for QEMU's own memory as well, and for the kernel's on its behalf.
    let overhead = group.used_bytes()? - resident_ram(guest.qemu_pid()?)?;
    let mut visits = Visits::default();
    for ratio in RATIOS {
        let local = ((RAM_MIB << 20) as f64 * ratio) as u64;
        group.set_limit(local + overhead)?;
        // The kernel swaps out more than it must at first.
        for _ in 0..SETTLING {
            visits.work(&mut console)?;
            if group.used_bytes()? + (4 << 20) > group.limit_bytes()? {
                break;
            }
        }
        let before = swapped_pages()?;
        let (visited, took) = visits.work(&mut console)?;
        let after = swapped_pages()?;
        ensure!(
            after[0] > before[0],
            "{before:?} pages were swapped in and out, then {after:?}: QEMU holds {} bytes of {}",
            group.used_bytes()?,
            group.limit_bytes()?
        );
        let moved = [visited, after[0] - before[0], after[1] - before[1]];
        tell("nbd swap", ratio, took, moved, "");
    }
    group.set_limit((2 * RAM_MIB) << 20)?;
    verify(&mut console)?;
    console.send("poweroff")?;
    guest.wait_state("shut off", LONG)?;
    run("swapoff", &[device])?;
    run("nbd-client", &["-d", device]).map(drop)
}

/// Bytes of a guest's RAM that are mapped in its QEMU: the mapping of just that size.
fn resident_ram(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/smaps");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let kib = |line: &str, name: &str| -> Option<u64> {
        let rest = line.strip_prefix(name)?;
        rest.trim().strip_suffix(" kB")?.parse().ok()
    };
    text.lines()
        .skip_while(|line| kib(line, "Size:") != Some(RAM_MIB << 10))
        .find_map(|line| kib(line, "Rss:"))
        .map(|rss| rss << 10)
        .with_context(|| format!("{path}: no mapping of {RAM_MIB} MiB"))
}

/// Pages that the kernel has fetched from swap and written there.
fn swapped_pages() -> Result<[u64; 2]> {
    let text = fs::read_to_string("/proc/vmstat")?;
    let read = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let count = line.with_context(|| format!("no {name}in /proc/vmstat"))?;
        count.trim().parse::<u64>().context(name.to_owned())
    };
    Ok([read("pswpin ")?, read("pswpout ")?])
}

/// Pages that a guest's checker has looked at so far.
#[derive(Default)]
struct Visits(u64);

impl Visits {
    /// Has it work; pages that it looked at meanwhile, and seconds.
    fn work(&mut self, console: &mut Console) -> Result<(u64, f64)> {
        let began = Instant::now();
        let report = console.ask(&format!("work {WORK_SECONDS}"), "WORKED", LONG)?;
        let took = began.elapsed().as_secs_f64();
        let before = std::mem::replace(&mut self.0, report.get("checked")?);
        Ok((self.0 - before, took))
    }
}

/// A row of the table: pages visited, fetched and written in so many seconds.
fn tell(name: &str, ratio: f64, took: f64, pages: [u64; 3], rest: &str) {
    let [visited, fetched, written] = pages.map(|count| count as f64 / took);
    println!("{SHOWN}{name:<9}{ratio:>6}{visited:>12.0}{fetched:>13.0}{written:>11.0}{rest}");
}
