//! A guest whose network card the kernel serves: vhost-net's worker writes what comes in to the guest's
//! memory by itself, and waits there for a page as any vCPU does. What it writes to pages that are elsewhere
//! is there when they have left and come back again; and a killed QEMU does not wait for it. Before Linux 6.4
//! the worker is no thread of QEMU's: SIGKILL does not reach it, and QEMU is not gone before its faults are
//! answered.

use std::cell::Cell;
use std::fs;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outram_tests::hermetic::command::{run, wait_for};
use outram_tests::hermetic::console::Console;
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::host::Acceleration;
use outram_tests::hermetic::server::MemServer;
use outram_tests::hermetic::suite::Skipped;
use outram_tests::lab_guest::Kernel;
use outram_tests::split_mix::mix;
use outram_wire::control::Status;

use crate::Test;
use crate::fixture::{LONG, Lab, SHORT, is_served, wait_under_limit};
use crate::under_kvm::{SHOWN, again_on_the_newest_kernel, again_under_kvm};

const NAME: &str = "a_killed_qemu_is_reaped_though_vhost_net_waits_for_a_page";

pub(crate) const TESTS: &[Test] = &[
    (NAME, reaped),
    ("a_killed_qemu_is_reaped_on_the_newest_kernel", |_| {
        on_the_newest_kernel()
    }),
];

/// For one kernel: each attempt takes most of a minute on a machine that has time.
const LIMIT: Duration = Duration::from_secs(1800);

/// libvirt gives vhost-net to guests of KVM alone, and this machine may have neither.
fn reaped(lab: &Lab) -> Result<()> {
    match Acceleration::wanted() {
        Acceleration::Emulated => again_under_kvm(NAME, Kernel::Ordinary, LIMIT),
        Acceleration::Kvm => reaped_here(lab),
    }
}

fn on_the_newest_kernel() -> Result<()> {
    if Acceleration::wanted() == Acceleration::Kvm {
        let reason = "it is for the lab guest: this machine has its own kernel";
        bail!(Skipped(reason.into()));
    }
    again_on_the_newest_kernel(NAME, LIMIT)
}

/// The smallest that boots well: each page of it costs a millisecond or more in the lab guest.
const RAM_MIB: u64 = 128;

/// What is left to the guest: less than the third of its RAM that its checker writes. Now and then only the
/// least that there is.
const LEFT: &str = "32MiB";
const LEAST: &str = "16MiB";

/// How often the ring is filled before.
const ROUNDS: usize = 4;

/// The guest's kernel zeroes what it allocates, as Debian has it: each page that it gives to the card would be
/// here, and of zeros.
const NOT_ZEROED: &str = "init_on_alloc=0";

/// How often the card's buffers are sent away until the worker comes to one.
const ATTEMPTS: u32 = 8;

/// How long the worker and the backend may be late. Much less than the server's lease.
const LATE: Duration = Duration::from_secs(15);

/// The card's other end.
const TAP: &str = "outram-tap";

/// Its network, the guest's address in it where one is wanted, and where packets go.
const NETWORK: &str = "192.0.2.1/24";
const GUEST: &str = "192.0.2.2";
const PORT: u16 = 9;
const EVERYBODY: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 255), PORT);

/// More than twice what a ring of received packets holds.
const PACKETS: usize = 600;

/// 64-bit words of one.
const WORDS: u64 = 175;

/// Of these at least, and of as many pages for them, it is shown that they come in and stay.
const RECEIVED: u64 = 100;
const FAULTED: u64 = 20;

fn reaped_here(lab: &Lab) -> Result<()> {
    if !Path::new("/dev/vhost-net").exists() {
        bail!(Skipped("/dev/vhost-net is missing: load vhost_net".into()));
    }
    make_tap()?;
    // A backend waits a moment only for its goodbye to be answered: then the lease has to end.
    let server = MemServer::start_with_lease(&lab.host, "1GiB", "40s")?;
    let mut spec = Spec::new("killed", RAM_MIB);
    spec.extra_devices = format!(
        "<interface type='ethernet'>
      <target dev='{TAP}' managed='no'/>
      <model type='virtio'/>
      <driver name='vhost'/>
    </interface>"
    );
    spec.kernel_arguments = NOT_ZEROED.to_owned();
    let guest = lab.attach(spec, &["--local-ratio", "1"], &server.address)?;
    let mut console = guest.boot()?;
    ensure!(
        !workers()?.is_empty(),
        "QEMU was given no vhost-net: see its log"
    );
    // The pages that the card's buffers are made of are then no longer those that were zero.
    let sender = Sender::new()?;
    for _ in 0..ROUNDS {
        sender.flood()?;
        std::thread::sleep(Duration::from_millis(500));
    }
    console.ask(&format!("net-listen {GUEST} {PORT}"), "NET", LONG)?;
    send_buffers_away(lab, &guest, &mut console)?;
    receive(lab, &guest, &mut console, &sender)?;
    have_it_wait(lab, &guest, &mut console, &server, &sender)?;

    let qemu = guest.qemu_pid()?;
    kill(Pid::from_raw(qemu as i32), Signal::SIGKILL)?;
    wait_for("the killed QEMU to be reaped", SHORT, || {
        Ok((!Path::new(&format!("/proc/{qemu}")).exists()).then_some(()))
    })?;
    guest.wait_state("shut off", SHORT)?;
    guest.wait_backend_gone(LONG)?;
    ensure!(workers()?.is_empty(), "a worker of vhost-net is left");
    let state = guest.run_dir().join("state");
    wait_for("the backend's state to be removed", SHORT, || {
        Ok((!state.exists()).then_some(()))
    })?;
    server.signal(Signal::SIGCONT)?;
    wait_for("the lease to end", LONG, || {
        Ok((server.slabs_leased()? == 0).then_some(()))
    })
}

/// Stops the server for good once a worker waits for what it has.
fn have_it_wait(
    lab: &Lab,
    guest: &Guest,
    console: &mut Console,
    server: &MemServer,
    sender: &Sender,
) -> Result<()> {
    for _ in 0..ATTEMPTS {
        send_buffers_away(lab, guest, console)?;
        server.signal(Signal::SIGSTOP)?;
        if soon_waits(guest, sender)? {
            return Ok(());
        }
        // What it wrote to was all there: the guest recycles that, and nothing else will come.
        server.signal(Signal::SIGCONT)?;
        guest.wait_status("the server to be back", LONG, is_served)?;
    }
    bail!("vhost-net found all pages here, {ATTEMPTS} times")
}

/// Others are used after the card's buffers, and of all only few may stay: the buffers go to the server. (What
/// was just freed is what is allocated next, so that alone drives out little.)
fn send_buffers_away(lab: &Lab, guest: &Guest, console: &mut Console) -> Result<()> {
    console.ask("alloc 30", "ALLOCATED", LONG)?;
    console.ask("work 5", "WORKED", LONG)?;
    lab.tune(guest, &["--local", LEAST])?;
    wait_under_limit(guest)?;
    guest.wait_status("write-back to end", LONG, |status| status.staged_bytes == 0)?;
    lab.tune(guest, &["--local", LEFT])
}

/// Whether a worker comes to wait for a page, and the backend knows of it.
fn soon_waits(guest: &Guest, sender: &Sender) -> Result<bool> {
    let start = Instant::now();
    while start.elapsed() < LATE {
        sender.flood()?;
        let is_known = |status: Status| status.waiting_faults > 0;
        if workers()?.iter().any(waits_for_a_page) && guest.status_if_any().is_some_and(is_known) {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(false)
}

/// Packets come to pages that are elsewhere, and are looked at once others have been used after them.
fn receive(lab: &Lab, guest: &Guest, console: &mut Console, sender: &Sender) -> Result<()> {
    let before = guest.status()?.counters;
    let came = wait_for("packets to come to pages elsewhere", LONG, || {
        sender.flood()?;
        let counters = guest.status_if_any().map(|status| status.counters);
        Ok(counters.filter(|now| now.faults_remote >= before.faults_remote + FAULTED))
    })?;
    send_buffers_away(lab, guest, console)?;
    let report = console.ask("net-check", "NET", LONG)?;
    let packets = report.get("packets")?;
    ensure!(
        packets >= RECEIVED && report.get("wrong")? == 0,
        "what vhost-net wrote was lost or is wrong: {}",
        report.line
    );
    let fetched = came.faults_remote - before.faults_remote;
    println!("{SHOWN}{packets} packets were right; {fetched} and more pages were fetched for them");
    Ok(())
}

fn make_tap() -> Result<()> {
    run("ip", &["tuntap", "add", "dev", TAP, "mode", "tap"])?;
    // What the kernel would say on it by itself is not to wake the worker.
    let quiet = format!("/proc/sys/net/ipv6/conf/{TAP}/disable_ipv6");
    fs::write(&quiet, "1").context(quiet)?;
    run("ip", &["address", "add", NETWORK, "dev", TAP])?;
    run("ip", &["link", "set", TAP, "up"]).map(drop)
}

/// Sends packets to everybody. The guest's checker knows what is in them, and that their numbers rise.
struct Sender {
    socket: UdpSocket,
    sent: Cell<u64>,
}

impl Sender {
    fn new() -> Result<Self> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.set_broadcast(true)?;
        socket.set_nonblocking(true)?;
        let sent = Cell::new(0);
        Ok(Self { socket, sent })
    }

    fn flood(&self) -> Result<()> {
        for _ in 0..PACKETS {
            self.sent.set(self.sent.get() + 1);
            match self.socket.send_to(&packet(self.sent.get()), EVERYBODY) {
                // Full is as good as sent.
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error.into()),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Its number, and words that follow from it.
fn packet(number: u64) -> Vec<u8> {
    let words = (1..WORDS).map(|index| mix((number << 8) | index));
    let words = std::iter::once(number).chain(words);
    words.flat_map(u64::to_le_bytes).collect()
}

/// A worker of vhost-net: its entry in the machine's own `/proc`.
type Worker = String;

/// Kernel threads are of the machine, not of this sandbox: they are in the `/proc` that lies below its
/// own.
fn in_the_machines_proc(script: &str) -> Result<String> {
    let script = format!("umount /proc && cd /proc && {script}");
    run("unshare", &["--mount", "bash", "-c", &script])
}

/// Threads of QEMU's since Linux 6.4, of the kernel's before.
fn workers() -> Result<Vec<Worker>> {
    let said = in_the_machines_proc("grep -ls '^vhost-' [0-9]*/task/*/comm || true")?;
    Ok(said.lines().map(str::to_owned).collect())
}

fn waits_for_a_page(worker: &Worker) -> bool {
    let stack = worker.replace("/comm", "/stack");
    // One that has ended waits for nothing.
    in_the_machines_proc(&format!("cat {stack}"))
        .is_ok_and(|said| said.contains("handle_userfault"))
}
