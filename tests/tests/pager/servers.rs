//! Memory servers that stop, vanish, forget, lie, or want their memory back.

use std::fs;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::proxy::{Mischief, Proxy};
use outram_tests::hermetic::server::MemServer;
use outram_wire::control::{Phase, Request, ServerStatus, Status};
use outram_wire::seal::Seal;
use outram_wire::units::Limit;
use serde_json::json;

use crate::fixture::{
    Guest, LEAST, LONG, Lab, Lender, PAGE, SLAB, Wish, demand_sound, halt, push_out,
};

pub(crate) const TESTS: &[crate::Test] = &[
    ("a_server_that_stands_still", standstill),
    ("connections_cut_again_and_again", cuts),
    ("a_server_that_forgot_everything", amnesia),
    ("a_guest_that_ends_while_its_server_is_gone", gone),
    ("several_regions_over_several_servers", several),
    (
        "a_server_that_does_not_answer_holds_up_no_other",
        unanswered,
    ),
    (
        "a_limit_that_waits_for_a_server_keeps_nobody_from_the_status",
        looked_at,
    ),
    ("a_server_that_wants_its_memory_back", vacate),
    (
        "a_server_that_wants_back_more_than_another_has_promised",
        vacate_most,
    ),
    (
        "a_server_that_wants_back_what_no_other_has_room_for",
        vacate_later,
    ),
    ("a_server_with_less_room_than_its_part", unequal),
    ("changed_bytes_are_never_believed", lies),
    (
        "replayed_swapped_and_cut_pages_are_never_believed",
        mischief,
    ),
    ("nothing_of_the_guest_shows_outside", secrecy),
];

/// Written and mostly evicted by every test here.
pub(crate) const FILLED: u64 = 14_000;

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
    let mut sent = load(&mut guest, 1.0)?;
    halt(&server)?;
    // On a slow machine all others may be at their end. Not where pages are discarded, which the kernel puts before
    // those that are to be brought.
    let last = json!({"page": 0, "pages": 7000, "write": false});
    sent.push(guest.send(2, "touch", last)?);
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
    let mut round = 0;
    // Where the machine is slow, one is cut again before it is made.
    while round < 20 || proxy.accepted() <= accepted + 10 {
        ensure!(round < 100, "connections were not made again");
        std::thread::sleep(Duration::from_millis(20 + 7 * round));
        proxy.cut();
        round += 1;
    }
    demand_answers(&mut guest, sent)?;
    guest.end(&[&server])
}

/// Pages among the filled that were on the server alone.
pub(crate) fn lost_pages(guest: &mut Guest, count: usize) -> Result<Vec<u64>> {
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
        status.phase == Phase::Stopped
            && status.waiting_faults >= waiting.len() as u64
            && status.counters.faults_lost >= waiting.len() as u64
            && status.lost_bytes >= lost * PAGE
    })?;
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

/// What is evicted goes to the other server while one does not answer, and is not given up: it is there.
fn unanswered(lab: &Lab) -> Result<()> {
    const MORE: u64 = 500;
    let servers = [lab.server()?, lab.server()?];
    let line = |server: &MemServer| Proxy::start(&lab.address(), &server.address);
    let lines = [line(&servers[0])?, line(&servers[1])?];
    let addresses = lines.each_ref().map(|line| line.address.as_str());
    let mut guest = filled(lab, &addresses)?;
    for (number, line) in lines.iter().enumerate() {
        guest.settle()?;
        line.withhold(true);
        // Until something is written to it, and then twice what staging has room for.
        let mut first = 0;
        loop {
            let is_asked = line.withheld() > 0;
            guest
                .fill(first, MORE)
                .with_context(|| format!("the guest waits for server {number}"))?;
            if is_asked {
                break;
            }
            first += MORE;
            ensure!(first < FILLED, "nothing is written to server {number}");
        }
        line.withhold(false);
    }
    guest.verify(0, FILLED)?;
    guest.end(&servers.each_ref())
}

/// A lower limit needs more of the server, which is asked first.
fn looked_at(lab: &Lab) -> Result<()> {
    const LOOKS: usize = 2;
    let server = lab.server()?;
    let mut guest = filled(lab, &[&server.address])?;
    let promised = || server.metric("outram_memserver_reserved_bytes");
    let most = promised()?;
    guest.tune(2 * LEAST)?;
    wait_for("less to be promised", LONG, || {
        Ok((promised()? < most).then_some(()))
    })?;
    // One that has stood still for seconds is out of reach, and is not asked.
    wait_for("looks while the server is asked", LONG, || {
        halt(&server)?;
        let mut control = guest.control()?;
        let order = Request::Tune(Limit::LocalBytes(LEAST));
        let tuning = std::thread::spawn(move || control.ask(order));
        let mut looks = 0;
        while !tuning.is_finished() {
            let status = guest.status()?;
            if !tuning.is_finished() {
                ensure!(status.limit_bytes == 2 * LEAST, "{status:?}");
                looks += 1;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        server.signal(Signal::SIGCONT)?;
        guest.wait_status("the server to be back", |status| {
            status.servers.iter().all(|server| server.connected)
        })?;
        Ok((looks > LOOKS).then_some(()))
    })?;
    guest.tune(LEAST)?;
    guest.verify(0, FILLED)?;
    guest.end(&[&server])
}

const PLENTY: u64 = 1 << 30;

/// Its limit is lowered while the guest works: pages move away, and none of them is lost.
fn vacate(lab: &Lab) -> Result<()> {
    let shrinking = Lender::start(lab, "shrinking", PLENTY)?;
    let other = lab.server()?;
    let mut guest = filled(lab, &[&shrinking.server.address, &other.address])?;
    ensure!(
        shrinking.server.slabs_leased()? > 4,
        "it holds too little to begin with"
    );
    let sent = load(&mut guest, 1.0)?;
    shrinking.lend(2 * SLAB)?;
    shrinking.wait_vacated(&guest)?;
    demand_answers(&mut guest, sent)?;
    guest.end(&[&shrinking.server, &other])
}

/// The other has promised half of what the guest may need, and a little, and lends all of it.
fn vacate_most(lab: &Lab) -> Result<()> {
    const MIB: u64 = 640;
    const PAGES: u64 = MIB * 256;
    let shrinking = Lender::start(lab, "shrinking-most", PLENTY)?;
    let other = lab.server()?;
    let wish = Wish {
        ram_mib: &[MIB],
        servers: &[&shrinking.server.address, &other.address],
        ..Wish::default()
    };
    let mut guest = Guest::start(lab, &wish)?;
    guest.fill(0, PAGES)?;
    guest.settle()?;
    let promised = other.metric("outram_memserver_reserved_bytes")?;
    shrinking.lend(2 * SLAB)?;
    shrinking.wait_vacated(&guest)?;
    let lent = other.bytes_leased()?;
    ensure!(
        lent > promised,
        "{promised} bytes were promised, {lent} lent"
    );
    guest.verify(0, PAGES)?;
    guest.end(&[&shrinking.server, &other])
}

/// The other lends no more: the guest goes on with what it has, and its pages move, though it does nothing,
/// once they can.
fn vacate_later(lab: &Lab) -> Result<()> {
    let shrinking = Lender::start(lab, "shrinking-later", PLENTY)?;
    let full = Lender::start(lab, "full", PLENTY)?;
    let servers = [&shrinking.server, &full.server];
    let mut guest = filled(lab, &servers.map(|server| server.address.as_str()))?;
    full.lend(full.server.bytes_leased()?)?;
    shrinking.lend(2 * SLAB)?;
    // More than once all of staging, and all that there was room for.
    for _ in 0..2 {
        let work = json!({"page": 0, "pages": FILLED, "seconds": 2.0, "write_share": 0.5});
        let sent = guest.send(0, "work", work)?;
        demand_answers(&mut guest, vec![sent])?;
    }
    ensure!(
        shrinking.server.bytes_leased()? > 2 * SLAB,
        "there was room"
    );
    guest.settle()?;
    full.lend(PLENTY)?;
    shrinking.wait_vacated(&guest)?;
    guest.verify(0, FILLED)?;
    guest.end(&servers)
}

/// The other promises what the one has not: at the start, when the guest needs more and less, and to a backend that
/// takes over.
fn unequal(lab: &Lab) -> Result<()> {
    const LITTLE: u64 = 16 * SLAB;
    let (small, large) = (Lender::start(lab, "small", LITTLE)?, lab.server()?);
    let servers = [&small.server, &large];
    let wish = Wish {
        servers: &servers.map(|server| server.address.as_str()),
        ..Wish::default()
    };
    let mut guest = filled(lab, wish.servers)?;
    let promised = |server: &MemServer| server.metric("outram_memserver_reserved_bytes");
    let has_promised = |bytes: u64| {
        wait_for("another promise", LONG, || {
            ensure!(promised(&small.server)? == LITTLE);
            Ok((promised(&large)? == bytes).then_some(()))
        })
    };
    let most = promised(&large)?;
    has_promised(most)?;
    for server in servers {
        ensure!(
            server.slabs_leased()? > 0,
            "{} holds nothing",
            server.address
        );
    }
    guest.tune(2 * LEAST)?;
    wait_for("less to be promised", LONG, || {
        Ok((promised(&large)? < most).then_some(()))
    })?;
    let less = promised(&large)?;
    guest.kill_backend()?;
    guest.take_over(lab, &wish)?;
    guest.verify(0, FILLED)?;
    has_promised(less)?;
    let untroubled = |server: &ServerStatus| server.detail.is_none();
    guest.wait_status("the servers to be as before", |status| {
        status.servers.iter().all(untroubled)
    })?;
    guest.tune(LEAST)?;
    has_promised(most)?;
    guest.verify(0, FILLED)?;
    guest.end(&servers)
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
    ensure!(counters.refused_reads == 1, "{counters:?}");
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

/// What another place holds, or held before, is refused and read again; always is a page that is
/// never given. What comes late, or not whole, is only waited for. Sealed or not.
fn mischief(lab: &Lab) -> Result<()> {
    for seal in [Seal::On, Seal::Off] {
        let server = lab.server()?;
        let proxy = Proxy::start(&lab.address(), &server.address)?;
        proxy.record();
        let wish = Wish {
            servers: &[&proxy.address],
            seal,
            ..Wish::default()
        };
        let mut guest = Guest::start(lab, &wish)?;
        // Twice, so that most places have held something before.
        for _ in 0..2 {
            guest.fill(0, FILLED)?;
            guest.settle()?;
        }
        let mut refused = 0;
        for (mischief, is_refused) in [
            (Mischief::Replay, true),
            (Mischief::Swap, true),
            (Mischief::Truncate, false),
            (Mischief::Delay, false),
        ] {
            once(&mut guest, &proxy, mischief)?;
            refused += u64::from(is_refused);
            let counters = guest.status()?.counters;
            ensure!(
                counters.refused_reads == refused && counters.integrity_failures == 0,
                "seal {seal}, {mischief:?}: {counters:?}"
            );
        }
        let pages = lost_pages(&mut guest, 40)?;
        let (some, others) = pages.split_at(20);
        let replayed = forever(&mut guest, &proxy, Mischief::Replay, 1, some)?;
        let swapped = forever(&mut guest, &proxy, Mischief::Swap, 2, others)?;
        demand_stopped(&mut guest, &[replayed, swapped], 2)?;
        guest.kill(&[&server])?;
    }
    Ok(())
}

/// Does something to one reply, and reads pages until it was done.
fn once(guest: &mut Guest, proxy: &Proxy, mischief: Mischief) -> Result<()> {
    let pages = lost_pages(guest, 20)?;
    proxy.meddle(mischief, 1);
    for page in pages {
        guest.verify(page, 1)?;
        if proxy.to_spoil() == 0 {
            return Ok(());
        }
    }
    bail!("{mischief:?} could not be done to any of many pages")
}

/// Does something to all replies until one of the pages is lost to it; the access that waits for it.
fn forever(
    guest: &mut Guest,
    proxy: &Proxy,
    mischief: Mischief,
    vcpu: usize,
    pages: &[u64],
) -> Result<u64> {
    let before = guest.status()?.counters.integrity_failures;
    for page in pages {
        proxy.meddle(mischief, u64::MAX);
        let reading = guest.send(vcpu, "verify", json!({"page": page, "pages": 1}))?;
        let answer = wait_for("an answer, or the loss of the page", LONG, || {
            if let Some(answer) = guest.vmm.poll(reading)? {
                return Ok(Some(Some(answer)));
            }
            let failures = guest.status()?.counters.integrity_failures;
            Ok((failures > before).then_some(None))
        });
        proxy.meddle(mischief, 0);
        let failures = guest.status()?.counters.integrity_failures - before;
        let answer = answer.with_context(|| guest.log())?;
        ensure!(
            failures == u64::from(answer.is_none()),
            "{failures} pages were lost to {mischief:?}, and the access ended with {answer:?}"
        );
        match answer {
            // Nothing could be done to this page.
            Some(answer) => demand_sound(&answer)?,
            None => return Ok(reading),
        }
    }
    bail!("{mischief:?} could not be done to any of many pages")
}

/// A secret that the guest keeps in memory is on no wire and in no server's memory, sealed.
fn secrecy(lab: &Lab) -> Result<()> {
    const SECRET: &[u8] = b"what the guest keeps to itself: ";
    for seal in [Seal::On, Seal::Off] {
        let server = lab.server()?;
        let proxy = Proxy::start(&lab.address(), &server.address)?;
        proxy.record();
        let wish = Wish {
            servers: &[&proxy.address],
            seal,
            ..Wish::default()
        };
        let mut guest = Guest::start(lab, &wish)?;
        let hex: String = SECRET.iter().map(|byte| format!("{byte:02x}")).collect();
        let text = hex.repeat(PAGE as usize / SECRET.len());
        let kept = FILLED + 100;
        for page in kept..kept + 16 {
            guest.command(0, "poke", json!({"address": page * PAGE, "bytes": text}))?;
        }
        push_out(&mut guest, kept..kept + 16, 0..FILLED)?;
        // The server got it if it shows without the seal: the search finds what is there.
        let expected = seal == Seal::Off;
        ensure!(
            proxy.has_carried(SECRET) == expected,
            "on the wire, seal {seal}"
        );
        let held = process_holds(server.pid(), SECRET)?;
        ensure!(held == expected, "in the server's memory, seal {seal}");
        for page in kept..kept + 16 {
            let seen = json!({"address": page * PAGE, "length": PAGE});
            let seen = guest.command(0, "peek", seen)?;
            ensure!(seen["bytes"] == text, "page {page} came back wrong");
        }
        guest.verify(0, FILLED)?;
        guest.end(&[&server])?;
    }
    Ok(())
}

/// Whether a process has these bytes anywhere in the memory that it can write to.
fn process_holds(pid: u32, bytes: &[u8]) -> Result<bool> {
    let memory = fs::File::open(format!("/proc/{pid}/mem"))?;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    for line in maps.lines().filter(|line| line.contains(" rw")) {
        let range = line.split_whitespace().next().context("a range")?;
        let (start, end) = range.split_once('-').context("two addresses")?;
        let (start, end) = (
            u64::from_str_radix(start, 16)?,
            u64::from_str_radix(end, 16)?,
        );
        for address in (start..end).step_by(1 << 20) {
            let mut part = vec![0; (end - address).min(1 << 20) as usize];
            // What cannot be read holds nothing of ours.
            let Ok(read) = memory.read_at(&mut part, address) else {
                continue;
            };
            // It was stored again and again from a page's start on.
            if part[..read]
                .chunks_exact(bytes.len())
                .any(|part| part == bytes)
            {
                return Ok(true);
            }
        }
    }
    Ok(false)
}
