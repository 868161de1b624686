//! How much of a guest's memory is moved at a time.

use anyhow::{Result, ensure};
use outram_tests::hermetic::command::wait_for;

use crate::crash::{FILLED, demand_answers, filled, load};
use crate::fixture::{Guest, LONG, Lab, Wish};

pub(crate) const TESTS: &[crate::Test] = &[
    ("pages_that_are_moved_together_come_together", together),
    ("a_granularity_changes_under_load", changing),
];

/// Pages of a block of 64 KiB.
const BLOCK: u64 = 16;

/// Blocks that are asked for: so far apart that they look like nobody's way through memory.
const STEP: u64 = 60;

const REQUESTS: u64 = 5;

/// Asks for the sixth page of each of some blocks that lie on the server, `first` the first of them, and
/// demands that so many pages of each are there then.
fn ask_for_some(guest: &mut Guest, first: u64, expected: u64) -> Result<()> {
    let mut blocks = Vec::new();
    for block in (first..FILLED / BLOCK).step_by(STEP as usize) {
        if guest.present(block * BLOCK, BLOCK)? == 0 {
            blocks.push(block);
        }
    }
    ensure!(blocks.len() >= REQUESTS as usize, "{blocks:?}");
    let before = guest.status()?.counters;
    for block in blocks.into_iter().take(REQUESTS as usize) {
        let start = block * BLOCK;
        guest.verify(start + 5, 1)?;
        wait_for("the others of the block", LONG, || {
            Ok((guest.present(start, BLOCK)? == expected).then_some(()))
        })?;
    }
    let after = guest.status()?.counters;
    let asked = after.faults_remote - before.faults_remote;
    let unasked = after.fetched_ahead_pages - before.fetched_ahead_pages;
    ensure!(
        (asked, unasked) == (REQUESTS, REQUESTS * (expected - 1)),
        "{asked} pages were asked for, and {unasked} came with them"
    );
    Ok(())
}

fn together(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let wish = Wish {
        servers: &[&server.address],
        ..Wish::default()
    };
    let mut guest = filled(lab, &wish)?;
    guest.squeeze()?;
    guest.settle()?;
    ensure!(guest.status()?.granularity_bytes == Some(4096));
    guest.set_granularity("64KiB".parse()?)?;
    ensure!(guest.status()?.granularity_bytes == Some(65536));
    ask_for_some(&mut guest, 0, BLOCK)?;
    guest.kill_backend()?;
    guest.take_over(lab, &wish)?;
    ensure!(guest.status()?.granularity_bytes == Some(65536));
    ask_for_some(&mut guest, 5, BLOCK)?;
    guest.set_granularity("4KiB".parse()?)?;
    ask_for_some(&mut guest, 10, 1)?;
    guest.verify(0, FILLED)?;
    guest.end(&[&server])
}

fn changing(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = filled(
        lab,
        &Wish {
            servers: &[&server.address],
            vcpus: 3,
            ..Wish::default()
        },
    )?;
    guest.squeeze()?;
    let sent = load(&mut guest, 4.0)?;
    for round in 0..40 {
        let kib = 4 << (5 * round % 7);
        guest.set_granularity(format!("{kib}KiB").parse()?)?;
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    demand_answers(&mut guest, sent)?;
    let counters = guest.status()?.counters;
    ensure!(counters.integrity_failures == 0 && counters.faults_lost == 0);
    guest.end(&[&server])
}
