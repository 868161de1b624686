//! A guest of KVM whose memory server is on another machine: two lab guests on one cable, each with
//! soft-RoCE over its network card. The same work with pages over RDMA and over TCP, and by the kernel's own
//! swap to a block device in the other machine's memory, in one table; and what pages go by where the network
//! between the machines takes no packet as large as their ends do.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use outram_tests::hermetic::command::{run, run_within, wait_for};
use outram_tests::hermetic::console::Console;
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::hard_limit::HardLimit;
use outram_tests::hermetic::host::{Acceleration, PKI};
use outram_tests::hermetic::latencies::Latencies;
use outram_tests::hermetic::sandbox;
use outram_tests::hermetic::server::sample;
use outram_tests::hermetic::suite::need;
use outram_tests::lab_guest::{self, Boot, Cable, KERNEL_DOES_IT, Kernel, LabGuest};
use outram_tests::small_lab::PAGE;
use outram_wire::control::{Phase, Status};

use crate::Test;
use crate::backend_dies::{end, wait_for_another};
use crate::far_disk::VERY_LONG;
use crate::fixture::{LONG, Lab, SHORT, demand_no_mismatch, top, wait_under_limit};
use crate::live::outram;
use crate::under_kvm::{GUEST, SHOWN, again_in, in_lab_guests, long_wanted};

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

/// Another address of the first machine, which gets nothing larger from the other one than most networks take.
const NARROW_END: &str = "192.0.2.3";
const NARROW_MTU: &str = "1400";

/// Beside each machine's script, in its shared folder: the certificates of both.
const SHARED_PKI: &str = "/share/pki";

fn two_machines(lab: &Lab) -> Result<()> {
    let images = lab_guest::build(top(), Kernel::Ordinary)?;
    let issue = ["pki", "issue", "server", SERVER, "--address", HOST];
    lab.host.outram_ok(&issue)?;
    in_lab_guests(NAME, || on_one_cable(lab, &images))
}

/// Starts the other machine, and in a first one this test again.
fn on_one_cable(lab: &Lab, images: &Path) -> Result<()> {
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
        let other = scope.spawn(|| OTHER.run_joined(images, &there, LIMIT, Some(&far_end)));
        // It may be silent for as long as LONG before it ends by itself, which says more.
        let serves = wait_for("the other machine to serve", 2 * LONG, || {
            ensure!(!other.is_finished(), "it has ended");
            Ok(there.join("serves").exists().then_some(()))
        });
        let has_begun = serves.is_ok();
        let said = serves.and_then(|()| {
            again_in(&here, NAME, &joined("192.0.2.2"), LIMIT, |share| {
                GUEST.run_joined(images, share, LIMIT, Some(&near_end))
            })
        });
        let end = fs::write(there.join("end"), "");
        let other = other.join().map_err(|_| anyhow!("its thread panicked"));
        end?;
        let other = other?.context("the other machine");
        match (said, other) {
            // What went wrong there explains what went wrong here, and is all of it where nothing was begun here.
            (Err(error), Err(other)) if has_begun => Err(error.context(format!("{other:#}"))),
            (Err(error), Err(other)) => Err(other.context(format!("{error:#}"))),
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
    let swap = match Form::wanted().swapped {
        [] => String::new(),
        _ => format!(
            "truncate -s {SWAP_MIB}M /dev/shm/swap
printf '[generic]\n[swap]\nexportname = /dev/shm/swap\n' >/run/nbd.conf
if command -v nbd-server; then nbd-server -C /run/nbd.conf; fi"
        ),
    };
    format!(
        "set -e
{joined}
ip route add {NARROW_END}/32 dev eth0 mtu lock {NARROW_MTU}
{program} --listen {ADDRESS} --metrics {METRICS} --memory 512MiB --slab-size 4MiB \\
  --tls-ca {SHARED_PKI}/ca.pem --tls-cert {SHARED_PKI}/{SERVER}.pem --tls-key {SHARED_PKI}/{SERVER}.key &
{swap}
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
#[derive(Clone, Copy, Debug)]
struct Way {
    name: &'static str,
    scheme: &'static str,
    transport: &'static str,
    /// The machine is reached by its other address.
    is_narrow: bool,
}

const RDMA: Way = Way {
    name: "rdma",
    scheme: "rdma://",
    transport: "RDMA (rxe0)",
    is_narrow: false,
};
const TCP: Way = Way {
    name: "tcp",
    scheme: "tcp://",
    transport: "TCP",
    is_narrow: false,
};
/// RDMA's small packets arrive, and none of its pages.
const NARROW: Way = Way {
    name: "narrow",
    scheme: "",
    transport: "TCP",
    is_narrow: true,
};

impl Way {
    fn server(self) -> String {
        format!("{}{ADDRESS}", self.scheme)
    }

    /// Has the other machine be reached by it from here on.
    fn choose(self) -> Result<()> {
        if self.is_narrow {
            let own = format!("{NARROW_END}/24");
            run("ip", &["address", "add", &own, "dev", "eth0"])?;
            let by = ["dev", "eth0", "src", NARROW_END];
            run("ip", &[&["route", "replace", HOST][..], &by].concat())?;
        }
        Ok(())
    }
}

/// How much is done.
struct Form {
    /// RAM of the guest, each page of which costs milliseconds here.
    ram_mib: u64,
    /// Per cent of it that its checker has.
    share: u64,
    /// How the guest's pages go, one way after another, and limits by which the same work is done meanwhile, as
    /// shares of the RAM. With the first it is attached before it starts, with each other while it runs.
    ways: &'static [(Way, &'static [f64])],
    /// The limits by which it is done with the kernel's swap, if at all.
    swapped: &'static [f64],
    /// Seconds of random reads and writes at each limit.
    work_seconds: u64,
    /// Whether frames get lost, beside what is done always.
    loses_frames: bool,
}

impl Form {
    fn wanted() -> &'static Self {
        match long_wanted() {
            true => &LONG_FORM,
            false => &SHORT_FORM,
        }
    }
}

/// Each way of the pages, and what becomes of the guest with it, without the kernel's swap to compare it with.
const SHORT_FORM: Form = Form {
    ram_mib: 160,
    share: 45,
    ways: &[(RDMA, &[0.3]), (NARROW, &[0.3])],
    swapped: &[],
    work_seconds: 2,
    loses_frames: false,
};

/// The checker has more than is local at the first limit, or the kernel, which tells what is used, need not
/// swap.
const LONG_FORM: Form = Form {
    ram_mib: 208,
    share: 52,
    ways: &[(RDMA, &RATIOS), (TCP, &RATIOS), (RDMA, &RATIOS)],
    swapped: &RATIOS,
    work_seconds: 10,
    loses_frames: true,
};

const RATIOS: [f64; 2] = [0.5, 0.2];

/// What the kernel swaps to: a file in the other machine's memory, over NBD.
const SWAP_MIB: u64 = 256;

/// What is local while all is verified at the end: with less, each page would also have to send one away.
const LAST: &str = "0.75";

/// How often it works at most before what the kernel swaps is counted, and until pages have come and gone.
const SETTLING: usize = 4;

/// On the first machine.
fn guests(lab: &Lab) -> Result<()> {
    let form = Form::wanted();
    run("cp", &["-rT", SHARED_PKI, PKI])?;
    println!(
        "{SHOWN}{:<9}{:>6}{:>12}{:>13}{:>11}{:>9}{:>9}{:>9}{:>20}",
        "pages by",
        "local",
        "visited/s",
        "fetched/s",
        "written/s",
        "mean us",
        "p50 us",
        "p99 us",
        "server ms per 1000"
    );
    paged(lab, form)?;
    println!("{SHOWN}{KERNEL_DOES_IT}");
    if form.swapped.is_empty() {
        return Ok(());
    }
    match need("nbd-client", "nbd-client").and(need("nbd-server", "nbd-server")) {
        Ok(()) => swapped(lab, form),
        Err(reason) => {
            println!("{SHOWN}nbd swap: {reason}");
            Ok(())
        }
    }
}

/// One guest, whose pages go one way after another: attached, tuned and detached while its checker works.
fn paged(lab: &Lab, form: &Form) -> Result<()> {
    let (first, _) = form.ways[0];
    let spec = Spec::new("far", form.ram_mib);
    let guest = lab.attach(spec, &["--local-ratio", "1"], &first.server())?;
    let mut console = guest.boot()?;
    console.ask(&format!("alloc {}", form.share), "ALLOCATED", LONG)?;
    for (at, (way, ratios)) in form.ways.iter().enumerate() {
        console.ask("work 0", "WORKING", LONG)?;
        if at > 0 {
            way.choose()?;
            attach_live(lab, &guest, *way, ratios[0])?;
        }
        for ratio in *ratios {
            lab.tune(&guest, &["--local-ratio", &ratio.to_string()])?;
            let status = wait_under_limit(&guest)?;
            ensure!(status.stored_bytes > 0, "{status:?}");
            demand_transport(lab, &guest, *way)?;
            console.ask("halt", "HALTED", LONG)?;
            measure(&guest, &mut console, (*way, *ratio), form.work_seconds)?;
            console.ask("work 0", "WORKING", LONG)?;
        }
        if at == 0 && form.loses_frames {
            lose_frames(&guest)?;
        }
        if at == 0 {
            let before = guest.status()?;
            end(before.backend_pid)?;
            wait_for_another(&guest, &before)?;
            demand_transport(lab, &guest, *way)?;
        }
        if at + 1 < form.ways.len() {
            // All that is elsewhere comes home, a page in milliseconds.
            let detach = ["detach", guest.name(), "--live", "--config"];
            run_within(VERY_LONG, &lab.host.program("outram")?, &detach)?.demand_success()?;
            wait_returned()?;
        } else {
            lab.tune(&guest, &["--local-ratio", LAST])?;
        }
        console.ask("halt", "HALTED", LONG)?;
        verify(&mut console)?;
    }
    console.send("poweroff")?;
    guest.wait_state("shut off", LONG)?;
    guest.wait_backend_gone(SHORT)?;
    wait_returned()
}

fn attach_live(lab: &Lab, guest: &Guest, way: Way, ratio: f64) -> Result<()> {
    let (ratio, server) = (ratio.to_string(), way.server());
    let attach = ["attach", guest.name(), "--live", "--local-ratio", &ratio];
    outram(lab, &[&attach[..], &["--server", &server]].concat()).map(drop)
}

/// A row of the table: what comes and goes while the guest works.
fn measure(
    guest: &Guest,
    console: &mut Console,
    (way, ratio): (Way, f64),
    work_seconds: u64,
) -> Result<()> {
    let mut visits = Visits::default();
    visits.work(console, work_seconds)?;
    let latencies = || Latencies::read(&guest.metrics()?, "remote");
    let (before, server) = ((guest.status()?, latencies()?), server_seconds()?);
    let (mut visited, mut took, mut worked) = (0, 0.0, 0);
    let (fetched, written, latencies) = loop {
        let (more, seconds) = visits.work(console, work_seconds)?;
        (visited, took, worked) = (visited + more, took + seconds, worked + 1);
        let after = (guest.status()?.counters, latencies()?);
        // Also those that nobody had waited for.
        let received = after.0.wire_received_bytes - before.0.counters.wire_received_bytes;
        let fetched = received / PAGE;
        let written = after.0.writeback_pages - before.0.counters.writeback_pages;
        let latencies = after.1.since(&before.1);
        if fetched > 0 && written > 0 && latencies.count() > 0 {
            break (fetched, written, latencies);
        }
        // Where the machine stands still, a guest may not get to anything in its few seconds.
        ensure!(worked < SETTLING, "nothing went to and fro: {after:?}");
    };
    let server = server_seconds()? - server;
    let rest = format!(
        "{:>9.0}{:>9.0}{:>9.0}{:>20.1}",
        latencies.us_mean(),
        latencies.us_quantile(0.5),
        latencies.us_quantile(0.99),
        server * 1e6 / (fetched + written) as f64
    );
    tell(way.name, ratio, took, [visited, fetched, written], &rest);
    Ok(())
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
    guest.wait_status("the guest to wait for its server", LONG, |status| {
        status.phase == Phase::Stalled && status.waiting_faults > 0
    })?;
    neighbour("delete", &[])?;
    guest
        .wait_status("the guest to go on", LONG, |status| {
            status.phase == Phase::Serving
        })
        .map(drop)
}

fn verify(console: &mut Console) -> Result<()> {
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(console, &report)
}

/// As a program reads it, and as people do. A pager that has just begun may still be connecting.
fn demand_transport(lab: &Lab, guest: &Guest, way: Way) -> Result<()> {
    let goes_so = |status: &Status| {
        let server = status.servers.first();
        server.is_some_and(|server| {
            server.connected && server.transport.as_deref() == Some(way.transport)
        })
    };
    guest.wait_status("pages to go the way that was asked for", LONG, goes_so)?;
    let mut told = String::new();
    wait_for("'outram status' to say so", LONG, || {
        let finished = lab.host.outram(&["status", guest.name()])?;
        told = finished.said();
        let says_so = finished.success() && told.contains(way.transport);
        Ok(says_so.then_some(()))
    })
    .with_context(|| format!("it says: {told}"))
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
fn swapped(lab: &Lab, form: &Form) -> Result<()> {
    let device = "/dev/nbd0";
    run("modprobe", &["nbd"])?;
    run("nbd-client", &["-swap", "-N", "swap", HOST, device])?;
    run("mkswap", &[device])?;
    run("swapon", &[device])?;
    let mut spec = Spec::new("nbd", form.ram_mib);
    spec.extra_elements = "<memoryBacking><source type='anonymous'/></memoryBacking>".to_owned();
    let guest = Guest::define(spec)?;
    let group = HardLimit::with_swap((2 * form.ram_mib) << 20)?;
    let mut console = lab.boot_in(&group, &guest)?;
    console.ask(&format!("alloc {}", form.share), "ALLOCATED", LONG)?;
    // The group's limit is for QEMU's own memory as well, and for the kernel's on its behalf.
    let overhead = group.used_bytes()? - resident_ram(guest.qemu_pid()?, form.ram_mib)?;
    let mut visits = Visits::default();
    for ratio in form.swapped {
        let local = ((form.ram_mib << 20) as f64 * ratio) as u64;
        group.set_limit(local + overhead)?;
        // The kernel swaps out more than it must at first.
        for _ in 0..SETTLING {
            visits.work(&mut console, form.work_seconds)?;
            if group.used_bytes()? + (4 << 20) > group.limit_bytes()? {
                break;
            }
        }
        let before = swapped_pages()?;
        let (visited, took) = visits.work(&mut console, form.work_seconds)?;
        let after = swapped_pages()?;
        ensure!(
            after[0] > before[0],
            "{before:?} pages were swapped in and out, then {after:?}: QEMU holds {} bytes of {}",
            group.used_bytes()?,
            group.limit_bytes()?
        );
        let moved = [visited, after[0] - before[0], after[1] - before[1]];
        tell("nbd swap", *ratio, took, moved, "");
    }
    group.set_limit((2 * form.ram_mib) << 20)?;
    console.send("poweroff")?;
    guest.wait_state("shut off", LONG)?;
    run("swapoff", &[device])?;
    run("nbd-client", &["-d", device]).map(drop)
}

/// Bytes of a guest's RAM that are mapped in its QEMU: the mapping of just that size.
fn resident_ram(pid: u32, ram_mib: u64) -> Result<u64> {
    let path = format!("/proc/{pid}/smaps");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let kib = |line: &str, name: &str| -> Option<u64> {
        let rest = line.strip_prefix(name)?;
        rest.trim().strip_suffix(" kB")?.parse().ok()
    };
    text.lines()
        .skip_while(|line| kib(line, "Size:") != Some(ram_mib << 10))
        .find_map(|line| kib(line, "Rss:"))
        .map(|rss| rss << 10)
        .with_context(|| format!("{path}: no mapping of {ram_mib} MiB"))
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
    fn work(&mut self, console: &mut Console, seconds: u64) -> Result<(u64, f64)> {
        let began = Instant::now();
        let report = console.ask(&format!("work {seconds}"), "WORKED", LONG)?;
        let took = began.elapsed().as_secs_f64();
        ensure!(
            report.get("mismatches")? == 0,
            "memory came back wrong: {}",
            report.line
        );
        let before = std::mem::replace(&mut self.0, report.get("checked")?);
        Ok((self.0 - before, took))
    }
}

/// A row of the table: pages visited, fetched and written in so many seconds.
fn tell(name: &str, ratio: f64, took: f64, pages: [u64; 3], rest: &str) {
    let [visited, fetched, written] = pages.map(|count| count as f64 / took);
    println!("{SHOWN}{name:<9}{ratio:>6}{visited:>12.0}{fetched:>13.0}{written:>11.0}{rest}");
}
