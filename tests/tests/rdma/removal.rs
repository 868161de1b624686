//! Devices that are removed while pages go over them: that no page is lost or changed, that nobody keeps
//! such a device from going, and what goes on once it is there again.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use outram_wire::control::Phase;
use serde_json::json;

use crate::paging::{FILLED, detail, guest, transport, verify_all, wait_transport, work};
use crate::soft_roce::SoftRoce;
use outram_tests::small_lab::{Guest, Lab, Wish, demand_sound};

pub(crate) const TESTS: &[crate::Test] = &[
    (
        "a_link_that_is_deleted_leaves_tcp_until_it_is_back",
        leaves_tcp,
    ),
    ("with_rdma_alone_a_guest_waits_for_its_link", waits),
    ("a_backend_started_again_waits_for_rdma", started_again),
];

fn leaves_tcp(lab: &Lab) -> Result<()> {
    let device = SoftRoce::on_loopback()?;
    let server = lab.server()?;
    let mut guest = guest(lab, &server.address)?;
    wait_transport(&guest, "RDMA (rxe0)")?;
    guest.fill(0, FILLED)?;
    let sent = work(&mut guest, 4.0)?;
    std::thread::sleep(Duration::from_secs(1));
    // Returns once both ends have let go of it.
    device.delete()?;
    guest.wait_status("pages to go over TCP", |status| {
        transport(status) == "TCP" && status.waiting_faults == 0
    })?;
    demand_sound(&guest.answer(sent)?)?;
    verify_all(&mut guest)?;

    device.add()?;
    let sent = work(&mut guest, 4.0)?;
    wait_transport(&guest, &device.transport())?;
    demand_sound(&guest.answer(sent)?)?;
    verify_all(&mut guest)?;
    guest.end(&[&server])
}

fn waits(lab: &Lab) -> Result<()> {
    let device = SoftRoce::on_loopback()?;
    let server = lab.server()?;
    let mut guest = guest(lab, &format!("rdma://{}", server.address))?;
    guest.fill(0, FILLED)?;
    let sent = work(&mut guest, 8.0)?;
    std::thread::sleep(Duration::from_secs(1));
    device.delete()?;
    let missed = use_elsewhere(&mut guest)?;
    guest.wait_status("the wait to be told", |status| {
        status.phase == Phase::Stalled
            && status.waiting_faults > 0
            && detail(status).contains("no RDMA device can be used")
    })?;
    goes_on_once(&mut guest, missed, &device, || device.add())?;
    demand_sound(&guest.answer(sent)?)?;
    guest.end(&[&server])
}

/// Has the vCPU that worked read many pages, of which some are elsewhere: its work may have ended before what
/// came meanwhile. The number of the command.
pub(crate) fn use_elsewhere(guest: &mut Guest) -> Result<u64> {
    guest.send(1, "verify", json!({"page": 0, "pages": 1000}))
}

/// What waits is answered when RDMA is there again, and not before.
pub(crate) fn goes_on_once(
    guest: &mut Guest,
    sent: u64,
    device: &SoftRoce,
    mend: impl FnOnce() -> Result<()>,
) -> Result<()> {
    guest.demand_silence(sent)?;
    mend()?;
    demand_sound(&guest.answer(sent)?)?;
    verify_all(guest)?;
    wait_transport(guest, &device.transport())
}

/// A guest is refused in words where there is no RDMA when it starts; one that is there is kept.
fn started_again(lab: &Lab) -> Result<()> {
    let device = SoftRoce::on_loopback()?;
    let server = lab.server()?;
    let demanding = format!("rdma://{}", server.address);
    let wish = Wish {
        servers: &[&demanding],
        ..Wish::default()
    };
    let mut guest = Guest::start(lab, &wish)?;
    guest.fill(0, FILLED)?;
    guest.kill_backend()?;
    device.delete()?;
    let refused = self::guest(lab, &demanding);
    let error = format!("{:#}", refused.err().context("it was not refused")?);
    ensure!(error.contains("RDMA fails"), "{error}");
    ensure!(server.slabs_leased()? > 0, "the first one's are gone");

    guest.take_over(lab, &wish)?;
    let sent = use_elsewhere(&mut guest)?;
    guest.wait_status("the wait to be told", |status| {
        status.phase == Phase::Stalled && detail(status).contains("RDMA fails")
    })?;
    goes_on_once(&mut guest, sent, &device, || device.add())?;
    guest.connect()?;
    guest.end(&[&server])
}
