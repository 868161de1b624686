//! A killed QEMU whose network card the kernel serves: vhost-net's worker writes what comes in to the
//! guest's memory by itself, and waits there for a page as any vCPU does. Before Linux 6.4 it is no
//! thread of QEMU's: SIGKILL does not reach it, and QEMU is not gone before its faults are answered.

use std::fs;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outram_tests::hermetic::command::{run, wait_for};
use outram_tests::hermetic::guest::Spec;
use outram_tests::hermetic::host::Acceleration;
use outram_tests::hermetic::server::MemServer;
use outram_tests::hermetic::suite::Skipped;
use outram_tests::lab_guest::Kernel;

use crate::Test;
use crate::fixture::{LONG, Lab, SHORT, wait_under_limit};
use crate::under_kvm::{again_on_the_newest_kernel, again_under_kvm};

const NAME: &str = "a_killed_qemu_is_reaped_though_vhost_net_waits_for_a_page";

pub(crate) const TESTS: &[Test] = &[
    (NAME, reaped),
    ("a_killed_qemu_is_reaped_on_the_newest_kernel", |_| {
        on_the_newest_kernel()
    }),
];

/// For one kernel.
const LIMIT: Duration = Duration::from_secs(900);

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

/// What is left to the guest: less than the third of its RAM that its checker writes.
const LEFT: &str = "32MiB";

/// How often the ring is filled before.
const ROUNDS: usize = 4;

/// The card's other end.
const TAP: &str = "outram-tap";

/// Its network: the guest has no address in it, and need not have one.
const NETWORK: &str = "192.0.2.1/24";
const EVERYBODY: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 255), 9);

/// More than twice what a ring of received packets holds.
const PACKETS: usize = 600;

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
    let guest = lab.attach(spec, &["--local-ratio", "1"], &server.address)?;
    let mut console = guest.boot()?;
    ensure!(
        !workers()?.is_empty(),
        "QEMU was given no vhost-net: see its log"
    );
    // The pages that the card's buffers are made of are then no longer those that were zero.
    let socket = sender()?;
    for _ in 0..ROUNDS {
        flood(&socket)?;
        std::thread::sleep(Duration::from_millis(500));
    }
    // What is used last is kept: the buffers go to the server.
    lab.tune(&guest, &["--local", LEFT])?;
    console.ask("alloc 30", "ALLOCATED", LONG)?;
    wait_under_limit(&guest)?;
    guest.wait_status("write-back to end", LONG, |status| status.staged_bytes == 0)?;
    server.signal(Signal::SIGSTOP)?;
    wait_for("vhost-net to wait for a page", LONG, || {
        flood(&socket)?;
        Ok(workers()?.iter().any(waits_for_a_page).then_some(()))
    })?;
    let status = guest.status()?;
    ensure!(status.waiting_faults > 0, "{status:?}");

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

fn make_tap() -> Result<()> {
    run("ip", &["tuntap", "add", "dev", TAP, "mode", "tap"])?;
    // What the kernel would say on it by itself is not to wake the worker.
    let quiet = format!("/proc/sys/net/ipv6/conf/{TAP}/disable_ipv6");
    fs::write(&quiet, "1").context(quiet)?;
    run("ip", &["address", "add", NETWORK, "dev", TAP])?;
    run("ip", &["link", "set", TAP, "up"]).map(drop)
}

fn sender() -> Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.set_broadcast(true)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn flood(socket: &UdpSocket) -> Result<()> {
    for _ in 0..PACKETS {
        match socket.send_to(&[0xa5; 1400], EVERYBODY) {
            // Full is as good as sent.
            Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error.into()),
            _ => {}
        }
    }
    Ok(())
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
