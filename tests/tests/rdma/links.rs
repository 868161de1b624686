//! Networks that go and come back, and devices that do not find each other although nothing is wrong with
//! either: what pages go over meanwhile, that none is lost, and what the status says.

use std::fs;
use std::time::Duration;

use anyhow::{Result, ensure};
use outram_tests::hermetic::server::MemServer;
use outram_wire::control::Phase;
use serde_json::json;

use crate::paging::{FILLED, detail, guest, transport, verify_all, wait_transport, work};
use crate::removal::{goes_on_once, use_elsewhere};
use crate::soft_roce::SoftRoce;
use outram_tests::small_lab::{Guest, Lab, demand_sound};

pub(crate) const TESTS: &[crate::Test] = &[
    (
        "a_network_that_goes_leaves_tcp_until_it_is_back",
        leaves_tcp,
    ),
    ("with_rdma_alone_a_guest_waits_for_its_network", waits),
    ("devices_that_do_not_find_each_other_leave_tcp", unheard),
    (
        "with_rdma_alone_devices_that_do_not_find_each_other_are_told_of",
        told,
    ),
];

/// Runs a test with a server at one device and guests at another, or the same.
fn between(
    lab: &Lab,
    near: &SoftRoce,
    far: &SoftRoce,
    test: impl FnOnce(&MemServer) -> Result<()>,
) -> Result<()> {
    let server = lab.server_with(&["--memory", "1GiB", "--rdma", far.name()])?;
    let settings = lab.path("backend.toml");
    fs::write(&settings, format!("rdma = \"{}\"\n", near.name()))?;
    let outcome = test(&server);
    fs::write(&settings, "")?;
    outcome
}

/// Reads all pages; those that are not in memory by way of this device, as itself counts.
fn verify_over(guest: &mut Guest, device: &SoftRoce) -> Result<()> {
    let received = || Ok::<_, anyhow::Error>(device.counters()?["rcvd_pkts"]);
    let (missing, before) = (FILLED - guest.present(0, FILLED)?, received()?);
    verify_all(guest)?;
    let packets = received()? - before;
    ensure!(missing > 0, "all of it is in memory");
    ensure!(packets > missing, "{packets} packets for {missing} pages");
    Ok(())
}

fn leaves_tcp(lab: &Lab) -> Result<()> {
    let device = SoftRoce::apart()?;
    between(lab, &device, &device, |server| {
        let mut guest = guest(lab, &server.address)?;
        wait_transport(&guest, &device.transport())?;
        guest.fill(0, FILLED)?;
        // Only who uses the network notices: there has to be work left once it is gone.
        let sent = work(&mut guest, 12.0)?;
        std::thread::sleep(Duration::from_secs(2));
        device.set_up(false)?;
        let missed = use_elsewhere(&mut guest)?;
        guest.wait_status("pages to go over TCP", |status| {
            transport(status) == "TCP" && status.waiting_faults == 0
        })?;
        demand_sound(&guest.answer(sent)?)?;
        demand_sound(&guest.answer(missed)?)?;
        verify_all(&mut guest)?;

        device.set_up(true)?;
        let sent = work(&mut guest, 4.0)?;
        wait_transport(&guest, &device.transport())?;
        demand_sound(&guest.answer(sent)?)?;
        verify_over(&mut guest, &device)?;
        guest.end(&[server])
    })
}

fn waits(lab: &Lab) -> Result<()> {
    let device = SoftRoce::apart()?;
    between(lab, &device, &device, |server| {
        let mut guest = guest(lab, &format!("rdma://{}", server.address))?;
        guest.fill(0, FILLED)?;
        let sent = work(&mut guest, 8.0)?;
        std::thread::sleep(Duration::from_secs(1));
        device.set_up(false)?;
        let missed = use_elsewhere(&mut guest)?;
        guest.wait_status("the wait to be told", |status| {
            status.phase == Phase::Stalled
                && status.waiting_faults > 0
                && detail(status).contains("no RDMA device can be used")
        })?;
        goes_on_once(&mut guest, missed, &device, || device.set_up(true))?;
        demand_sound(&guest.answer(sent)?)?;
        guest.end(&[server])
    })
}

fn unheard(lab: &Lab) -> Result<()> {
    let [near, far] = SoftRoce::strangers()?;
    between(lab, &near, &far, |server| {
        let mut guest = guest(lab, &server.address)?;
        guest.fill(0, FILLED)?;
        guest.wait_status("pages to go over TCP", |status| {
            transport(status) == "TCP" && status.servers.iter().all(|server| server.connected)
        })?;
        verify_all(&mut guest)?;
        guest.end(&[server])
    })
}

/// All connections are made anew every second or two meanwhile.
fn told(lab: &Lab) -> Result<()> {
    let [near, far] = SoftRoce::strangers()?;
    between(lab, &near, &far, |server| {
        let mut guest = guest(lab, &format!("rdma://{}", server.address))?;
        // More than the guest may have here.
        let sent = guest.send(0, "fill", json!({"page": 0, "pages": FILLED}))?;
        for _ in 0..5 {
            guest.wait_status("the wait to be told", |status| {
                status.phase == Phase::Stalled
                    && status.waiting_faults > 0
                    && detail(status).contains("cannot use RDMA")
            })?;
            std::thread::sleep(Duration::from_millis(700));
        }
        guest.demand_silence(sent)?;
        guest.kill(&[server])
    })
}
