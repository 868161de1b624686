//! A guest with far more memory than it touches: whatever is done to it, it costs what it touches.

use std::fs;
use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::command::wait_for;
use outram_wire::control::{Request, Status};
use outram_wire::units::format_size;
use serde_json::json;

use crate::fixture::{Guest, LEAST, LONG, Lab, Lender, PAGE, SLAB, Wish};

pub(crate) const TESTS: &[crate::Test] = &[("a_guest_of_64_gib_costs_what_it_touches", large)];

/// Its RAM in MiB.
const RAM_MIB: u64 = 64 << 10;

/// The same in pages.
const PAGES: u64 = RAM_MIB << 8;

/// Places that it uses, from one end of its RAM to the other.
const PLACES: u64 = 8;

/// Pages of each: 8 MiB.
const EACH: u64 = 2048;

/// Pages that are made zero ahead of a guest that fills its memory in order, at most.
const AHEAD: u64 = 16;

/// From a place to the next: no multiple of what lies together anywhere.
const STEP: u64 = PAGES / PLACES - 1000;

/// Bytes that the table takes at most: 32 a page; at either end of a place, some of its neighbours';
/// and a page for its header.
const TABLE_MOST: u64 = 32 * PLACES * EACH + (2 * PLACES + 1) * PAGE;

/// Anonymous memory of the backend at most: most of it is stacks, buffers and code's data, which a guest of any
/// size costs. Half a byte for each page of RAM would be as much again.
const ANON_MOST: u64 = 8 << 20;

fn places() -> impl Iterator<Item = u64> {
    (0..PLACES).map(|place| 500 + place * STEP)
}

/// Demands that the guest costs little by the kernel's own count.
fn demand_little(guest: &Guest, when: &str) -> Result<Status> {
    let table = fs::metadata(guest.dir.join("state/table"))?.blocks() * 512;
    let status = guest.status()?;
    let anon = status.kernel_anon_bytes;
    println!(
        "{when}: a table of {}, {} anonymous, {} of guest memory",
        format_size(table),
        format_size(anon),
        format_size(status.kernel_memfd_bytes)
    );
    ensure!(table == status.kernel_table_bytes, "{table}: {status:#?}");
    ensure!(
        table <= TABLE_MOST,
        "{when}: a table of {table} bytes, of which {TABLE_MOST} at most were to be"
    );
    ensure!(
        anon <= ANON_MOST,
        "{when}: {anon} bytes of anonymous memory"
    );
    ensure!(
        status.kernel_memfd_bytes <= PLACES * (EACH + AHEAD) * PAGE,
        "{when}: {status:#?}"
    );
    Ok(status)
}

fn verify(guest: &mut Guest) -> Result<()> {
    places().try_for_each(|place| guest.verify(place, EACH))
}

fn large(lab: &Lab) -> Result<()> {
    let lender = Lender::start(lab, "sparse", RAM_MIB << 20)?;
    let server = &lender.server;
    let mut other = lab.server_with(&["--memory", "64GiB"])?;
    let addresses = [server.address.clone(), other.address.clone()];
    let wish = Wish {
        ram_mib: &[RAM_MIB],
        limit: 1 << 30,
        servers: &[&addresses[0], &addresses[1]],
        ..Wish::default()
    };
    let mut guest = Guest::start(lab, &wish)?;
    demand_little(&guest, "at the start")?;
    for place in places() {
        guest.fill(place, EACH)?;
    }
    demand_little(&guest, "filled")?;
    guest.squeeze()?;
    let status = guest.settle()?;
    ensure!(status.stored_bytes > 0, "{status:#?}");
    demand_little(&guest, "tuned down")?;

    // As free-page reporting does, and a balloon of nearly all of it.
    for place in places() {
        let pages = (STEP - EACH).min(PAGES - place - EACH);
        guest.command(1, "discard", json!({"page": place + EACH, "pages": pages}))?;
    }
    demand_little(&guest, "given back what was never touched")?;

    guest.kill_backend()?;
    guest.take_over(lab, &wish)?;
    demand_little(&guest, "taken over")?;
    verify(&mut guest)?;
    guest.settle()?;

    ensure!(server.slabs_leased()? > 4, "it holds too little");
    lender.lend(2 * SLAB)?;
    lender.wait_vacated(&guest)?;
    demand_little(&guest, "moved out of slabs")?;
    verify(&mut guest)?;

    let mut control = guest.control()?;
    control.order(Request::BringHome)?;
    wait_for("everything to come home", LONG, || {
        let homing = control.status()?.homing;
        Ok(homing.is_some_and(|homing| homing.home).then_some(()))
    })?;
    demand_little(&guest, "at home")?;
    // Called off.
    drop(control);
    guest.wait_status("the limit to hold again", |status| {
        status.homing.is_none() && status.limit_bytes == LEAST
    })?;
    guest.squeeze()?;
    guest.settle()?;
    verify(&mut guest)?;

    let first = places().next().context("a place")?;
    let all = json!({"page": first, "pages": PAGES - first});
    guest.command(1, "discard", all.clone())?;
    let kept = |status: &Status| status.local_bytes() + status.stored_bytes;
    // What was on its way out, and so has a place in staging, is kept: for all that can be told, the guest may
    // have stored to it since.
    guest.wait_status("all to be freed that was not on its way out", |status| {
        kept(status) <= status.kernel_staging_bytes
    })?;
    wait_for("nothing to be kept", LONG, || {
        guest.command(1, "discard", all.clone())?;
        Ok((kept(&guest.status()?) == 0).then_some(()))
    })
    .with_context(|| format!("{:#?}\n{}", guest.status(), guest.log()))?;
    let status = demand_little(&guest, "given back all")?;
    ensure!(status.stored_bytes == 0, "{status:#?}");
    ensure!(status.kernel_memfd_bytes <= PAGE, "{status:#?}");
    verify(&mut guest)?;

    for place in places() {
        guest.fill(place, EACH)?;
    }
    guest.settle()?;
    other.kill()?;
    other.start_again()?;
    guest.wait_status("the loss to be told", |status| status.lost_bytes > 0)?;
    demand_little(&guest, "some of it lost")?;
    guest.kill(&[server, &other])
}
