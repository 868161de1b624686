//! Memory servers that stop, vanish, forget, lie, or want their memory back.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::proxy::Proxy;
use outram_wire::control::{Phase, Status};
use serde_json::json;

use crate::fixture::{Guest, LONG, Lab, PAGE, SLAB, Wish, demand_sound, halt};

pub(crate) const TESTS: &[crate::Test] = &[
    ("a_server_that_stands_still", standstill),
    ("connections_cut_again_and_again", cuts),
    ("a_server_that_forgot_everything", amnesia),
    ("a_guest_that_ends_while_its_server_is_gone", gone),
    ("several_regions_over_several_servers", several),
    ("a_server_that_wants_its_memory_back", vacate),
    ("changed_bytes_are_never_believed", lies),
];

/// Written and mostly evicted by every test here.
const FILLED: u64 = 14_000;

fn filled(lab: &Lab, servers: &[&str]) -> Result<Guest> {
    let mut guest = Guest::start(
        lab,
        &Wish {
            servers,
            ..Wish::default()
        },
    )?;
    guest.fill(0, FILLED)?;
    guest.settle()?;
    Ok(guest)
}

/// All sorts of access to all that is filled.
fn load(guest: &mut Guest, seconds: f64) -> Result<Vec<u64>> {
    let work = json!({"page": 0, "pages": 7000, "seconds": seconds, "write_share": 0.5});
    let race = json!({"page": 7000, "pages": 7000, "writers": 1, "readers": 1, "discarders": 1,
        "rounds": (2000.0 * seconds) as u64});
    Ok(vec![
        guest.send(0, "work", work)?,
        guest.send(1, "race", race)?,
    ])
}

fn demand_answers(guest: &mut Guest, sent: Vec<u64>) -> Result<()> {
    for id in sent {
        demand_sound(&guest.answer(id)?)?;
    }
    guest.verify(0, FILLED)
}

/// Faults wait, `status` says so, and the guest goes on.
fn standstill(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = filled(lab, &[&server.address])?;
    let sent = load(&mut guest, 1.0)?;
    halt(&server)?;
    let stalled = guest.wait_status("the stall to be told", |status| {
        status.phase == Phase::Stalled && status.waiting_faults > 0
    })?;
    let detail = stalled.detail.unwrap_or_default();
    ensure!(detail.contains(&server.address), "which server? '{detail}'");
    server.signal(Signal::SIGCONT)?;
    demand_answers(&mut guest, sent)?;
    guest.end(&[&server])
}

fn cuts(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let proxy = Proxy::start(&lab.address(), &server.address)?;
    let mut guest = filled(lab, &[&proxy.address])?;
    let sent = load(&mut guest, 2.0)?;
    let accepted = proxy.accepted();
    for round in 0..20 {
        std::thread::sleep(Duration::from_millis(20 + 7 * round));
        proxy.cut();
    }
    demand_answers(&mut guest, sent)?;
    ensure!(
        proxy.accepted() > accepted + 10,
        "connections were not made again"
    );
    guest.end(&[&server])
}

/// Pages among the filled that were on the server alone.
fn lost_pages(guest: &mut Guest, count: usize) -> Result<Vec<u64>> {
    let mut lost = Vec::new();
    for page in (0..FILLED).step_by(97) {
        if lost.len() < count && guest.present(page, 1)? == 0 {
            lost.push(page);
        }
    }
    ensure!(lost.len() == count, "too few pages were evicted");
    Ok(lost)
}

/// The accesses are never answered, and nothing else is given in their place; what does not need
/// them goes on.
fn demand_stopped(guest: &mut Guest, waiting: &[u64], lost: u64) -> Result<Status> {
    let status = guest.wait_status("the guest to be stopped", |status| {
        status.phase == Phase::Stopped && status.waiting_faults >= waiting.len() as u64
    })?;
    ensure!(status.lost_bytes >= lost * PAGE, "{status:#?}");
    ensure!(
        status.counters.faults_lost >= waiting.len() as u64,
        "{status:#?}"
    );
    let detail = status.detail.clone().unwrap_or_default();
    ensure!(detail.contains("virsh destroy"), "no advice: '{detail}'");
    for id in waiting {
        guest.demand_silence(*id)?;
    }
    let fresh = json!({"page": FILLED, "pages": 2000});
    guest.command(0, "fill", fresh.clone())?;
    demand_sound(&guest.command(0, "verify", fresh)?)?;
    for id in waiting {
        guest.demand_silence(*id)?;
    }
    Ok(status)
}

/// Killed and started again empty: what it held is lost, and never answered.
fn amnesia(lab: &Lab) -> Result<()> {
    let mut server = lab.server()?;
    let mut guest = filled(lab, &[&server.address])?;
    let lost = lost_pages(&mut guest, 2)?;
    server.kill()?;
    server.start_again()?;
    guest.wait_status("the loss to be noticed", |status| status.lost_bytes > 0)?;
    let mut waiting = Vec::new();
    for (vcpu, page) in (1..).zip(&lost) {
        waiting.push(guest.send(vcpu, "verify", json!({"page": page, "pages": 1}))?);
    }
    demand_stopped(&mut guest, &waiting, lost.len() as u64)?;
    // A third access to the same page waits as well, and a signal changes nothing.
    guest.vmm.command(json!({"do": "bombard", "count": 100}))?;
    let again = json!({"page": lost[0], "pages": 1});
    waiting.push(guest.send(0, "pipe", again)?);
    for id in &waiting {
        guest.demand_silence(*id)?;
    }
    guest.kill(&[&server])
}

/// A fault waits for a server that never comes back, and the VMM is killed.
fn gone(lab: &Lab) -> Result<()> {
    let mut server = lab.server()?;
    let mut guest = filled(lab, &[&server.address])?;
    let lost = lost_pages(&mut guest, 1)?;
    server.kill()?;
    let waiting = guest.send(1, "verify", json!({"page": lost[0], "pages": 1}))?;
    guest.wait_status("the stall to be told", |status| {
        status.phase == Phase::Stalled
    })?;
    guest.demand_silence(waiting)?;
    guest.kill(&[])
}

/// NUMA cells, each a block of RAM, and pages spread over two servers.
fn several(lab: &Lab) -> Result<()> {
    let servers = [lab.server()?, lab.server()?];
    let addresses = servers.each_ref().map(|server| server.address.as_str());
    let mut guest = Guest::start(
        lab,
        &Wish {
            ram_mib: &[20, 12, 32],
            servers: &addresses,
            ..Wish::default()
        },
    )?;
    guest.fill(0, FILLED)?;
    guest.settle()?;
    for server in &servers {
        ensure!(
            server.slabs_leased()? > 0,
            "{} holds nothing",
            server.address
        );
    }
    let sent = load(&mut guest, 1.5)?;
    demand_answers(&mut guest, sent)?;
    guest.end(&servers.each_ref())
}

/// Its limit is lowered while the guest works: pages move away, and none of them is lost.
fn vacate(lab: &Lab) -> Result<()> {
    let config = lab.path("shrinking.toml");
    fs::write(&config, "memory = \"1GiB\"")?;
    let path = config.display().to_string();
    let shrinking = lab.server_with(&["--config", &path])?;
    let other = lab.server()?;
    let mut guest = filled(lab, &[&shrinking.address, &other.address])?;
    ensure!(
        shrinking.slabs_leased()? > 4,
        "it holds too little to begin with"
    );
    let sent = load(&mut guest, 1.0)?;
    fs::write(&config, "memory = \"2MiB\"")?;
    shrinking.signal(Signal::SIGHUP)?;
    let few = || Ok((shrinking.bytes_leased()? <= 2 * SLAB).then_some(()));
    wait_for("slabs to be vacated", LONG, few).with_context(|| guest.log())?;
    demand_answers(&mut guest, sent)?;
    guest.end(&[&shrinking, &other])
}

/// A bit flips on the way: once is read again, always is a page that is never given.
fn lies(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let proxy = Proxy::start(&lab.address(), &server.address)?;
    let mut guest = filled(lab, &[&proxy.address])?;
    let pages = lost_pages(&mut guest, 3)?;
    proxy.spoil(1);
    guest.verify(pages[0], 1)?;
    ensure!(proxy.to_spoil() == 0, "nothing was changed");
    let counters = guest.status()?.counters;
    ensure!(counters.integrity_failures == 0, "{counters:?}");
    proxy.spoil(u64::MAX);
    let waiting = [
        guest.send(1, "verify", json!({"page": pages[1], "pages": 1}))?,
        guest.send(2, "verify", json!({"page": pages[2], "pages": 1}))?,
    ];
    guest.wait_status("the lie to be counted", |status| {
        status.counters.integrity_failures == 2
    })?;
    proxy.spoil(0);
    demand_stopped(&mut guest, &waiting, 2)?;
    guest.kill(&[&server])
}
