//! Memory that is plugged and unplugged while the guest works.

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use serde_json::json;

use crate::fixture::{Guest, LEAST, Lab, PAGE, Wish, demand_sound, halt, push_out};

pub(crate) const TESTS: &[crate::Test] = &[
    ("blocks_come_and_go_beside_faults", come_and_go),
    ("a_block_vanishes_amid_a_fault_and_evictions", vanishes),
    (
        "memory_plugged_while_its_server_is_away",
        plugged_in_an_outage,
    ),
    ("a_hole_in_a_block_is_no_unplugging", hole),
    ("memory_mapped_privately_stays_aside", private),
    ("the_disk_uses_plugged_memory", disk),
];

/// Of a block that is plugged.
const BLOCK_MIB: u64 = 32;
const BLOCK_PAGES: u64 = BLOCK_MIB << 20 >> 12;

/// Where it begins: behind the 64 MiB that the guest starts with.
const BLOCK: u64 = 64 << 20 >> 12;

fn start(lab: &Lab, server: &str) -> Result<Guest> {
    let wish = Wish {
        servers: &[server],
        hot_plug_mib: 2 * BLOCK_MIB,
        ..Wish::default()
    };
    Guest::start(lab, &wish)
}

fn start_disk(guest: &mut Guest) -> Result<()> {
    let start = json!({"do": "disk-start", "queue": 0, "size": 128, "page": 8});
    guest.vmm.command(start).map(drop)
}

/// Has the disk use a page and the next.
fn read_sector(guest: &mut Guest, page: u64) -> Result<()> {
    let wanted = json!({"queue": 0, "type": 0, "sector": 0, "bytes": 4096, "page": page,
        "wait_ms": 120_000});
    let answer = guest.command(1, "request", wanted)?;
    ensure!(answer["status"] == 0, "{answer}");
    Ok(())
}

fn plug(guest: &mut Guest, private: bool) -> Result<()> {
    let command = json!({"do": "plug", "bytes": BLOCK_MIB << 20, "private": private});
    guest.vmm.command(command).map(drop)
}

fn unplug(guest: &mut Guest, yank: bool) -> Result<()> {
    let command = json!({"do": "unplug", "yank": yank});
    guest.vmm.command(command).map(drop)
}

fn wait_ram(guest: &Guest, mib: u64) -> Result<()> {
    let found = guest.wait_status("RAM to be as plugged", |status| {
        status.ram_bytes == mib << 20
    })?;
    ensure!(found.unmanaged_bytes == 0, "{found:#?}");
    Ok(())
}

/// Plugged, filled, evicted, verified and unplugged, while other vCPUs use the rest. The limit is
/// in bytes and holds throughout; the same place in the page table is used again and again.
fn come_and_go(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = start(lab, &server.address)?;
    guest.fill(0, 16_000)?;
    for round in 0..4 {
        let work = json!({"page": 0, "pages": 15_000, "seconds": 2.0, "seed": round,
            "write_share": 0.5});
        let work = guest.send(1, "work", work)?;
        let race = json!({"page": 15_000, "pages": 1000, "writers": 1, "readers": 1,
            "discarders": 1, "rounds": 500});
        let race = guest.send(2, "race", race)?;
        plug(&mut guest, false)?;
        wait_ram(&guest, 96)?;
        guest.fill(BLOCK, BLOCK_PAGES)?;
        guest.wait_status("the limit to hold with it", |status| {
            status.limit_bytes == LEAST
                && status.kernel_memfd_bytes + status.kernel_staging_bytes <= LEAST
        })?;
        ensure!(
            guest.present(BLOCK, BLOCK_PAGES)? < BLOCK_PAGES / 2,
            "a block larger than the limit is not evicted from"
        );
        guest.verify(BLOCK, BLOCK_PAGES)?;
        unplug(&mut guest, false)?;
        wait_ram(&guest, 64)?;
        for id in [work, race] {
            demand_sound(&guest.answer(id)?)?;
        }
    }
    guest.verify(0, 16_000)?;
    guest.wait_status("nothing to be kept of what is gone", |status| {
        let kept = status.resident_bytes + status.staged_bytes + status.stored_bytes;
        kept <= 16_200 * PAGE
    })?;
    guest.end(&[&server])
}

/// Unmapped at once, while a thread waits for a page of it that is on its way from the server, and
/// others of its pages are being evicted: whoever waits is let go, and nobody else is disturbed.
fn vanishes(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = start(lab, &server.address)?;
    guest.fill(0, 8000)?;
    for round in 0..3 {
        plug(&mut guest, false)?;
        wait_ram(&guest, 96)?;
        guest.fill(BLOCK, BLOCK_PAGES)?;
        let end = BLOCK + BLOCK_PAGES;
        push_out(&mut guest, BLOCK..BLOCK + 100, BLOCK + 100..end)?;
        halt(&server)?;
        // By the kernel, which is refused afterwards; a thread of its own would be killed.
        let waiting = guest.send(1, "pipe", json!({"page": BLOCK, "pages": 50}))?;
        guest.wait_status("a fault to wait", |status| status.waiting_faults > 0)?;
        if round > 0 {
            // Evictions of its last pages begin, to end without it.
            guest.send(2, "fill", json!({"page": 8000, "pages": 500}))?;
        }
        unplug(&mut guest, true)?;
        let refused = guest.answer(waiting);
        let reason = format!("{:#}", refused.expect_err("its memory is gone"));
        ensure!(reason.contains("os error 14"), "{reason}");
        server.signal(Signal::SIGCONT)?;
        wait_ram(&guest, 64)?;
        guest.verify(0, 8000)?;
    }
    guest.end(&[&server])
}

/// QEMU replaces single pages of a block by others: whatever is missing of it for a moment, the rest
/// is the guest's memory as before.
fn hole(lab: &Lab) -> Result<()> {
    const HOLE_PAGES: u64 = 16;
    let server = lab.server()?;
    let mut guest = start(lab, &server.address)?;
    plug(&mut guest, false)?;
    wait_ram(&guest, 96)?;
    guest.fill(BLOCK, BLOCK_PAGES)?;
    guest.settle()?;
    let middle = BLOCK + BLOCK_PAGES / 2;
    let unmap = json!({"page": middle, "pages": HOLE_PAGES});
    guest.command(0, "unmap", unmap)?;
    // Once another is followed, the VMM's memory map was looked at with the hole in it.
    plug(&mut guest, false)?;
    wait_ram(&guest, 128)?;
    guest.verify(BLOCK, BLOCK_PAGES / 2)?;
    let rest = BLOCK_PAGES / 2 - HOLE_PAGES;
    guest.verify(middle + HOLE_PAGES, rest)?;
    unplug(&mut guest, false)?;
    unplug(&mut guest, false)?;
    wait_ram(&guest, 64)?;
    guest.end(&[&server])
}

/// No room is promised: the block stays local and is told of, and is taken over, with what was
/// written meanwhile, when the server is back. The front end gets its answer, and the disk uses the block, before
/// that is known.
fn plugged_in_an_outage(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = start(lab, &server.address)?;
    start_disk(&mut guest)?;
    guest.fill(200, 8000)?;
    guest.settle()?;
    halt(&server)?;
    plug(&mut guest, false)?;
    let status = guest.status()?;
    ensure!(status.unmanaged_bytes == BLOCK_MIB << 20, "{status:#?}");
    let detail = status.detail.unwrap_or_default();
    // On a slow machine the server may have been asked in vain by now.
    let reasons = ["not taken over yet", &server.address];
    ensure!(
        reasons.iter().any(|reason| detail.contains(reason)),
        "{detail}"
    );
    read_sector(&mut guest, BLOCK + 100)?;
    let status = guest.wait_status("the block to stay aside", |status| {
        status.unmanaged_bytes == BLOCK_MIB << 20
    })?;
    ensure!(status.ram_bytes == 64 << 20, "{status:#?}");
    guest.wait_status("the server to be named", |status| {
        let detail = status.detail.as_deref().unwrap_or_default();
        detail.contains("not paged") && !detail.contains("not taken over yet")
    })?;
    guest.fill(BLOCK, BLOCK_PAGES)?;
    ensure!(
        guest.present(BLOCK, BLOCK_PAGES)? == BLOCK_PAGES,
        "all of it is local"
    );
    server.signal(Signal::SIGCONT)?;
    wait_ram(&guest, 96)?;
    guest.squeeze()?;
    ensure!(
        guest.present(BLOCK, BLOCK_PAGES)? < BLOCK_PAGES,
        "not paged"
    );
    guest.verify(200, 8000)?;
    guest.verify(BLOCK, BLOCK_PAGES)?;
    guest.end(&[&server])
}

/// Its pages are in no memfd: refused by name, and left alone.
fn private(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = start(lab, &server.address)?;
    guest.fill(0, 16_000)?;
    plug(&mut guest, true)?;
    guest.wait_status("the block to stay aside", |status| {
        // It is told of before it is looked at, too.
        let detail = status.detail.as_deref().unwrap_or_default();
        status.unmanaged_bytes == BLOCK_MIB << 20 && detail.contains("mapped privately")
    })?;
    guest.fill(BLOCK, BLOCK_PAGES)?;
    guest.squeeze()?;
    guest.verify(BLOCK, BLOCK_PAGES)?;
    guest.verify(0, 16_000)?;
    unplug(&mut guest, false)?;
    guest.wait_status("it to be forgotten", |status| {
        status.unmanaged_bytes == 0 && status.detail.is_none()
    })?;
    guest.end(&[&server])
}

/// Regions are added to the memory table and removed while a queue runs, and its requests use them.
fn disk(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = start(lab, &server.address)?;
    guest.fill(200, 15_000)?;
    start_disk(&mut guest)?;
    for _ in 0..3 {
        plug(&mut guest, false)?;
        // Whether or not it is paged already.
        for page in (100..1000).step_by(3) {
            read_sector(&mut guest, BLOCK + page)?;
        }
        wait_ram(&guest, 96)?;
        guest.fill(BLOCK, BLOCK_PAGES)?;
        for page in [100, BLOCK + 100] {
            read_sector(&mut guest, page)?;
        }
        // Its pages were overwritten by the device.
        guest.verify(BLOCK + 110, BLOCK_PAGES - 110)?;
        unplug(&mut guest, false)?;
        wait_ram(&guest, 64)?;
    }
    guest.verify(200, 15_000)?;
    guest.end(&[&server])
}
