//! One-sided reads and writes between two ends of a queue pair, and what they may not touch.
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use outram_tests::hermetic::command::wait_for;
use outram_wire::verbs::{
    Access, Domain, Failure, Initiator, PostError, Region, Remote, Responder, Stretch, VerbsError,
};

use crate::at_hand::AtHand;
use outram_tests::small_lab::{LONG, Lab};

pub(crate) const TESTS: &[crate::Test] = &[
    ("batches_arrive_in_order_and_whole", batches),
    ("nothing_beyond_a_slab_can_be_touched", borders),
    ("wrong_and_revoked_keys_open_nothing", keys),
    ("a_peer_that_is_gone_is_noticed", gone),
];

pub(crate) const PAGE: usize = 4096;

/// Memory that is lent: a mapping whose first part is registered, so that what follows it is there,
/// too, but not lent.
struct Lent {
    // Revoked before it is unmapped.
    region: Option<Region>,
    base: NonNull<u8>,
    bytes: usize,
}

impl Lent {
    fn new(domain: &Domain, pages: usize, access: Access) -> Result<Self> {
        let bytes = (pages + 1) * PAGE;
        let (read_write, private) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new anonymous mapping touches no memory of ours; it is checked before it is used.
        let base = unsafe { libc::mmap(ptr::null_mut(), bytes, read_write, private, -1, 0) };
        ensure!(base != libc::MAP_FAILED, "no memory");
        let base = NonNull::new(base.cast::<u8>()).context("memory at address zero")?;
        // SAFETY: the mapping lives until `drop`, which gives the region up first; its bytes are read
        // by value alone.
        let region = unsafe { Region::register(domain, base, pages * PAGE, access) }?;
        Ok(Self {
            region: Some(region),
            base,
            bytes,
        })
    }

    fn remote(&self) -> Remote {
        self.region.as_ref().expect("not revoked").remote()
    }

    fn revoke(&mut self) {
        self.region = None;
    }

    /// A byte of it, of what is not lent too.
    fn byte(&self, at: usize) -> u8 {
        assert!(at < self.bytes);
        // SAFETY: the offset lies within the mapping.
        let place = unsafe { self.base.as_ptr().add(at) };
        // SAFETY: the place is mapped; a device may be writing there, which changes a byte at most.
        unsafe { place.read_volatile() }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.revoke();
        // SAFETY: the mapping is ours, and no device knows of it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Two ends, joined; the one that is accessed belongs to `lender`.
fn pair(lender: &Domain, borrower: &Domain) -> Result<(Responder, Initiator)> {
    let mut initiator = Initiator::new(borrower)?;
    let responder = Responder::new(lender, &initiator.end())?;
    initiator.connect(&responder.end())?;
    Ok((responder, initiator))
}

pub(crate) fn stretch(remote: Remote, offset: usize, length: usize) -> Stretch {
    Stretch {
        address: remote.address + offset as u64,
        key: remote.key,
        length: length as u32,
    }
}

/// Waits until so many requests have completed; their ids and what they read.
pub(crate) fn completed(initiator: &mut Initiator, count: usize) -> Result<Vec<(u64, Vec<u8>)>> {
    let mut all = Vec::new();
    wait_for("transfers to complete", LONG, || {
        initiator.complete(|id, bytes| all.push((id, bytes.to_vec())))?;
        Ok((all.len() >= count).then_some(()))
    })?;
    Ok(all)
}

/// Demands that the next completion is this failure.
pub(crate) fn demand_failure(initiator: &mut Initiator, wanted: Failure) -> Result<()> {
    let failure = wait_for(
        "a transfer to fail",
        Duration::from_secs(60),
        || match initiator.complete(|id, _| panic!("request {id} was carried out")) {
            Ok(()) => Ok(None),
            Err(VerbsError::Failed(failure)) => Ok(Some(failure)),
            Err(other) => bail!(other),
        },
    )?;
    ensure!(failure == wanted, "{failure:?} instead of {wanted:?}");
    Ok(())
}

pub(crate) fn content(page: usize) -> Vec<u8> {
    (0..PAGE)
        .map(|at| (at / 8 * 31 + at + page * 7) as u8)
        .collect()
}

fn batches(lab: &Lab) -> Result<()> {
    const PAGES: usize = 256;
    let device = AtHand::of(lab)?;
    let (lender, borrower) = (device.domain()?, device.domain()?);
    let lent = Lent::new(&lender, PAGES, Access::ReadWrite)?;
    let (_responder, mut initiator) = pair(&lender, &borrower)?;
    let pages: Vec<Vec<u8>> = (0..PAGES).map(content).collect();
    // Each page by itself, scattered, 64 to a doorbell.
    let place = |page: usize| (page * 97 % PAGES) * PAGE;
    let mut posted = 0;
    let mut ended = 0;
    for batch in (0..PAGES).collect::<Vec<_>>().chunks(64) {
        let to: Vec<Stretch> = batch
            .iter()
            .map(|page| stretch(lent.remote(), place(*page), PAGE))
            .collect();
        let payload: Vec<&[u8]> = batch.iter().map(|page| pages[*page].as_slice()).collect();
        loop {
            match initiator.write(posted, &to, &payload) {
                Ok(()) => break,
                Err(PostError::Full) => ended += completed(&mut initiator, 1)?.len(),
                Err(error) => bail!(error),
            }
        }
        posted += 1;
    }
    let left = posted as usize - ended;
    completed(&mut initiator, left)?;
    ensure!(initiator.in_flight() == 0, "something is in flight still");
    let sample = 1234;
    ensure!(
        lent.byte(place(5) + sample) == pages[5][sample],
        "not written"
    );
    ensure!(
        (0..PAGE).all(|at| lent.byte(PAGES * PAGE + at) == 0),
        "beyond"
    );
    // Many single reads at once, in another order; as many as there is room for.
    let mut wanted: Vec<usize> = (0..PAGES).rev().collect();
    let mut checked = 0;
    while checked < PAGES {
        while let Some(page) = wanted.last() {
            let from = [stretch(lent.remote(), place(*page), PAGE)];
            match initiator.read(*page as u64, &from) {
                Ok(()) => drop(wanted.pop()),
                Err(PostError::Full) => break,
                Err(error) => bail!(error),
            }
        }
        for (id, bytes) in completed(&mut initiator, 1)? {
            ensure!(bytes == pages[id as usize], "page {id} came back changed");
            checked += 1;
        }
    }
    // One that is larger than the buffers were at first.
    let all = [stretch(lent.remote(), 0, PAGES * PAGE)];
    initiator.read(9, &[all, all].concat())?;
    let (_, bytes) = completed(&mut initiator, 1)?.remove(0);
    ensure!(bytes.len() == 2 * PAGES * PAGE, "{} bytes", bytes.len());
    ensure!(bytes[place(7)..][..PAGE] == pages[7], "a large read");
    Ok(())
}

/// One access of what is not lent fails, changes nothing, and ends its own queue pair alone.
fn borders(lab: &Lab) -> Result<()> {
    const PAGES: usize = 4;
    let device = AtHand::of(lab)?;
    let (lender, borrower) = (device.domain()?, device.domain()?);
    let lent = Lent::new(&lender, PAGES, Access::ReadWrite)?;
    let remote = lent.remote();
    let (_bystander, mut unharmed) = pair(&lender, &borrower)?;
    let end = PAGES * PAGE;
    for (offset, length) in [(end - 8, 9), (end, 8), (0, end + 1)] {
        for is_write in [false, true] {
            let (_responder, mut initiator) = pair(&lender, &borrower)?;
            // The last byte can be touched.
            initiator.write(1, &[stretch(remote, end - 8, 8)], &[&[7; 8]])?;
            completed(&mut initiator, 1)?;
            let beyond = [stretch(remote, offset, length)];
            match is_write {
                true => initiator.write(2, &beyond, &[&vec![9; length]])?,
                false => initiator.read(2, &beyond)?,
            }
            demand_failure(&mut initiator, Failure::RemoteAccess)?;
            ensure!(lent.byte(end) == 0, "what is not lent was written");
        }
    }
    unharmed.read(1, &[stretch(remote, end - 8, 8)])?;
    completed(&mut unharmed, 1)?;
    Ok(())
}

fn keys(lab: &Lab) -> Result<()> {
    let device = AtHand::of(lab)?;
    let (lender, borrower, other) = (device.domain()?, device.domain()?, device.domain()?);
    let mut lent = Lent::new(&lender, 2, Access::ReadWrite)?;
    let others = Lent::new(&other, 2, Access::ReadWrite)?;
    let shown = Lent::new(&lender, 2, Access::Read)?;
    let remote = lent.remote();
    let wrong = Remote {
        key: remote.key ^ 1,
        ..remote
    };
    // A wrong key; one that is right, of another client's domain; memory that may only be read.
    for (remote, what) in [
        (wrong, "wrong"),
        (others.remote(), "another's"),
        (shown.remote(), "read"),
    ] {
        let (_responder, mut initiator) = pair(&lender, &borrower)?;
        initiator.write(1, &[stretch(remote, 0, 8)], &[&[5; 8]])?;
        demand_failure(&mut initiator, Failure::RemoteAccess).context(what)?;
    }
    ensure!(others.byte(0) == 0 && shown.byte(0) == 0, "written");
    // A key that was good until it was revoked, on the same queue pair.
    let (_responder, mut initiator) = pair(&lender, &borrower)?;
    initiator.write(1, &[stretch(remote, 0, 8)], &[&[5; 8]])?;
    completed(&mut initiator, 1)?;
    ensure!(lent.byte(0) == 5, "not written");
    lent.revoke();
    initiator.write(2, &[stretch(remote, 0, 8)], &[&[6; 8]])?;
    demand_failure(&mut initiator, Failure::RemoteAccess)?;
    ensure!(lent.byte(0) == 5, "written after it was revoked");
    Ok(())
}

fn gone(lab: &Lab) -> Result<()> {
    let device = AtHand::of(lab)?;
    let (lender, borrower) = (device.domain()?, device.domain()?);
    let lent = Lent::new(&lender, 2, Access::ReadWrite)?;
    let (responder, mut initiator) = pair(&lender, &borrower)?;
    drop(responder);
    initiator.write(1, &[stretch(lent.remote(), 0, 8)], &[&[5; 8]])?;
    demand_failure(&mut initiator, Failure::Unanswered)?;
    ensure!(lent.byte(0) == 0, "written by a queue pair that had ended");
    Ok(())
}
