//! Point 6: the server stops, its connections are cut, it comes back empty.

use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::console::Console;
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::proxy::Proxy;
use outram_tests::hermetic::server::MemServer;
use outram_wire::control::Phase;

use crate::Test;
use crate::fixture::{
    LONG, Lab, RAM_MIB, SHORT, demand_no_mismatch, is_served, power_off, wait_slabs,
};

pub(crate) const TESTS: &[Test] = &[
    ("server_stops_for_ten_seconds", server_stops),
    ("connections_are_cut_repeatedly", connections_cut),
    ("server_comes_back_empty", server_comes_back_empty),
    ("destroy_while_the_server_is_gone", destroy_while_gone),
];

const QUARTER: [&str; 2] = ["--local-ratio", "0.25"];

/// A guest at work on more memory than may be local.
fn working_guest(lab: &Lab, name: &str, server: &str) -> Result<(Guest, Console)> {
    let guest = lab.attach(Spec::new(name, RAM_MIB), &QUARTER, server)?;
    let mut console = guest.boot()?;
    console.ask("alloc 70", "ALLOCATED", LONG)?;
    console.ask("work 0", "WORKING", LONG)?;
    std::thread::sleep(Duration::from_secs(1));
    Ok((guest, console))
}

fn verify(console: &mut Console) -> Result<()> {
    console.ask("halt", "HALTED", LONG)?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(console, &report)
}

fn server_stops(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let (guest, mut console) = working_guest(lab, "stopped", &server.address)?;
    server.signal(Signal::SIGSTOP)?;
    let faults_wait =
        || guest.wait_status("faults to wait", LONG, |status| status.waiting_faults > 0);
    let begun = faults_wait();
    std::thread::sleep(Duration::from_secs(10));
    let during = begun.and_then(|_| faults_wait());
    server.signal(Signal::SIGCONT)?;
    let during = during?;
    ensure!(during.lost_bytes == 0, "nothing is lost: {during:?}");
    guest.wait_status("the guest to be served again", LONG, is_served)?;
    verify(&mut console)?;
    power_off(&guest, &mut console, &server)
}

fn connections_cut(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let proxy = Proxy::start(&format!("127.0.0.1:{}", lab.host.port()), &server.address)?;
    let (guest, mut console) = working_guest(lab, "cut", &proxy.address)?;
    for round in 0..12 {
        // Some cuts meet a connection that is just being made again.
        std::thread::sleep(Duration::from_millis(if round % 3 == 0 {
            150
        } else {
            1200
        }));
        proxy.cut();
    }
    proxy.refuse(true);
    proxy.cut();
    let away = guest.wait_status("the outage to be told", SHORT, |status| {
        status.servers.iter().any(|server| !server.connected)
    })?;
    ensure!(
        away.servers.iter().all(|server| server.detail.is_some()),
        "a server out of reach is told with its reason: {:?}",
        away.servers
    );
    proxy.refuse(false);
    guest.wait_status("the server to be reached again", LONG, is_served)?;
    verify(&mut console)?;
    ensure!(guest.status()?.lost_bytes == 0, "nothing may be lost");
    power_off(&guest, &mut console, &server)
}

fn server_comes_back_empty(lab: &Lab) -> Result<()> {
    let mut server = lab.server("1GiB")?;
    let (guest, console) = working_guest(lab, "lost", &server.address)?;
    server.kill()?;
    std::thread::sleep(Duration::from_secs(1));
    server.start_again()?;
    let status = guest.wait_status("the loss to be told", LONG, |status| {
        status.phase == Phase::Stopped
    })?;
    ensure!(
        status.lost_bytes > 0 && status.detail.is_some(),
        "what is lost is told, in words too: {status:?}"
    );
    let told = lab.host.outram_ok(&["status", guest.name()])?;
    ensure!(told.contains("stopped"), "outram status says: {told}");
    let wrong = console
        .transcript()
        .iter()
        .any(|line| line.starts_with("MISMATCH"));
    ensure!(!wrong, "other bytes were given for lost pages");
    guest.destroy()?;
    guest.wait_backend_gone(SHORT)?;
    wait_slabs(&server, |slabs| slabs == 0)
}

fn destroy_while_gone(lab: &Lab) -> Result<()> {
    // A backend waits a moment for its goodbye to be answered; on a machine so busy that the server
    // comes back later, its slabs return when the lease ends.
    let mut server = MemServer::start_with_lease(&lab.host, "1GiB", "40s")?;
    let (guest, _console) = working_guest(lab, "gone", &server.address)?;
    server.signal(Signal::SIGSTOP)?;
    std::thread::sleep(Duration::from_secs(2));
    guest.destroy()?;
    guest.wait_state("shut off", SHORT)?;
    server.signal(Signal::SIGCONT)?;
    guest.wait_backend_gone(LONG)?;
    wait_for(
        "slabs to be given back, or their lease to end",
        LONG,
        || Ok((server.slabs_leased()? == 0).then_some(())),
    )?;

    let (guest, _console) = {
        let mut console = guest.boot()?;
        console.ask("alloc 70", "ALLOCATED", LONG)?;
        console.ask("work 0", "WORKING", LONG)?;
        (guest, console)
    };
    server.kill()?;
    std::thread::sleep(Duration::from_secs(2));
    guest.destroy()?;
    guest.wait_state("shut off", SHORT)?;
    guest.wait_backend_gone(LONG)
}
