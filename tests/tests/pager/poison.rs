//! Guests that are to be told of lost pages by memory errors, as hardware does.

use std::os::unix::process::ExitStatusExt;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use outram_tests::hermetic::host::kernel_poisons;
use outram_tests::hermetic::server::MemServer;
use outram_wire::control::Phase;
use outram_wire::lost_pages::LostPages;
use serde_json::json;

use crate::fixture::{Guest, Lab, Wish};
use crate::servers::{FILLED, lost_pages};

pub(crate) const TESTS: &[crate::Test] = &[
    ("a_lost_page_is_a_memory_error_where_that_is_wished", told),
    ("memory_errors_are_for_guests_of_kvm", emulated),
];

fn wish<'a>(servers: &'a [&'a str]) -> Wish<'a> {
    Wish {
        servers,
        lost_pages: LostPages::Poison,
        names_kvm: true,
        ..Wish::default()
    }
}

/// Who uses a lost page gets a memory error, and all else goes on; the guest may give the page back, or
/// its VMM replace it.
fn told(lab: &Lab) -> Result<()> {
    let mut server = lab.server()?;
    let addresses = [server.address.clone()];
    let servers = addresses.each_ref().map(String::as_str);
    if !kernel_poisons()? {
        let refused = Guest::start(lab, &wish(&servers)).err();
        let refused = format!("{:#}", refused.context("was not refused")?);
        ensure!(refused.contains("Linux 6.6"), "{refused}");
        return Ok(());
    }
    let mut guest = Guest::start(lab, &wish(&servers))?;
    guest.fill(0, FILLED)?;
    guest.settle()?;
    let lost = lost_pages(&mut guest, 4)?;
    lose_everything(&mut server, &guest)?;
    for page in &lost[..3] {
        // Read by the kernel, which passes the error on.
        let read = guest.command(1, "pipe", json!({"page": page, "pages": 1}));
        let error = format!("{:#}", read.err().context("a lost page was read")?);
        ensure!(error.contains("Bad address"), "{error}");
    }
    // Who waits goes on before its fault is counted.
    let status = guest.wait_status("the answers to be counted", |status| {
        status.counters.faults_poisoned >= 3 && status.waiting_faults == 0
    })?;
    ensure!(status.phase == Phase::Serving, "{status:#?}");
    ensure!(status.counters.faults_poisoned == 3, "{status:#?}");
    let detail = status.detail.clone().unwrap_or_default();
    ensure!(detail.contains("3 accesses"), "'{detail}'");
    // What nobody has lost is as it was, and what is given back or replaced is zero.
    guest.fill(FILLED, 2000)?;
    guest.verify(FILLED, 2000)?;
    guest.command(0, "discard", json!({"page": lost[0], "pages": 1}))?;
    guest.command(0, "remap", json!({"page": lost[1], "pages": 1}))?;
    for page in &lost[..2] {
        guest.verify(*page, 1)?;
        guest.fill(*page, 1)?;
        guest.verify(*page, 1)?;
    }
    // A backend that takes over knows nothing of what was poisoned.
    guest.kill_backend()?;
    guest.take_over(lab, &wish(&servers))?;
    let again = guest.command(1, "pipe", json!({"page": lost[2], "pages": 1}));
    ensure!(again.is_err(), "a lost page was read after a take-over");
    let status = guest.status()?;
    ensure!(
        status.counters.faults_poisoned == 0,
        "it was poisoned twice"
    );
    // By the VMM's own thread, for which nobody stands in here.
    guest.send(2, "verify", json!({"page": lost[3], "pages": 1}))?;
    let ended = guest.vmm.wait_end()?;
    ensure!(ended.signal() == Some(Signal::SIGBUS as i32), "{ended}");
    guest.kill(&[&server])
}

fn lose_everything(server: &mut MemServer, guest: &Guest) -> Result<()> {
    server.kill()?;
    server.start_again()?;
    guest.wait_status("the loss to be noticed", |status| status.lost_bytes > 0)?;
    Ok(())
}

fn emulated(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let servers = [server.address.as_str()];
    let wish = Wish {
        names_kvm: false,
        ..wish(&servers)
    };
    let refused = Guest::start(lab, &wish).err().context("was not refused")?;
    let refused = format!("{refused:#}");
    ensure!(refused.contains("<domain type='kvm'>"), "{refused}");
    ensure!(server.slabs_leased()? == 0, "it keeps what it was refused");
    Ok(())
}
