//! Attaching to a VMM whose vCPUs run, and detaching from it while they do.

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::server::MemServer;
use outram_wire::control::{Phase, Reply, Request, Status};
use serde_json::{Value, json};

use crate::fixture::{Control, Guest, LEAST, LONG, Lab, Wish, demand_sound, halt};

pub(crate) const TESTS: &[crate::Test] = &[
    ("a_running_guest_is_attached_with_what_it_has", attached),
    ("coming_home_loses_no_store", home),
    ("attached_and_detached_again_and_again", cycles),
    (
        "coming_home_waits_for_a_server_and_can_be_called_off",
        outage,
    ),
    ("coming_home_is_refused_for_what_cannot_come", refused),
    ("the_disk_works_on_after_the_release", disk),
];

const PAGES: u64 = 16_000;

/// What the vCPUs do meanwhile: reads and rewrites, and discards beside both.
fn load(guest: &mut Guest, seconds: f64) -> Result<Vec<u64>> {
    let work = |page: u64, seed: u64| {
        json!({"page": page, "pages": 5000, "seconds": seconds, "seed": seed,
            "write_share": 0.5})
    };
    // One, for QEMU discards on its main thread alone. Two that never pause leave the kernel hardly
    // a moment in which it takes a COPY.
    let race = json!({"page": 10_000, "pages": 6000, "writers": 2, "readers": 1, "discarders": 1,
        "rounds": (seconds * 2500.0) as u64});
    Ok(vec![
        guest.send(0, "work", work(0, 1))?,
        guest.send(1, "work", work(5000, 2))?,
        guest.send(2, "race", race)?,
    ])
}

fn demand_all_sound(guest: &mut Guest, sent: Vec<u64>) -> Result<Vec<Value>> {
    let answers = sent.into_iter().map(|id| {
        let answer = guest.answer(id)?;
        demand_sound(&answer)?;
        Ok(answer)
    });
    answers.collect()
}

/// Userfaultfds that the VMM holds.
fn userfaultfds(guest: &Guest) -> Result<usize> {
    let entries = std::fs::read_dir(format!("/proc/{}/fd", guest.vmm.pid()))?;
    let is_one = |entry: &std::fs::DirEntry| {
        std::fs::read_link(entry.path())
            .is_ok_and(|to| to.to_str() == Some("anon_inode:[userfaultfd]"))
    };
    Ok(entries.flatten().filter(is_one).count())
}

/// Whether any of the VMM's memory is registered with a userfaultfd (`um` or `uw` in its flags).
fn is_registered(guest: &Guest) -> Result<bool> {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", guest.vmm.pid()))?;
    let mut flags = smaps
        .lines()
        .filter_map(|line| line.strip_prefix("VmFlags:"));
    Ok(flags.any(|flags| flags.split(' ').any(|flag| flag == "um" || flag == "uw")))
}

/// Waits for as long as there is progress: how fast it is, is for the scheduler to say where vCPUs
/// that never pause share processors with other tests.
fn wait_home(control: &mut Control) -> Result<Status> {
    let mut last = control.status()?;
    loop {
        let before = elsewhere(&last);
        let next = wait_for("more to come home", LONG, || {
            let status = control.status()?;
            let is_home = status.homing.as_ref().is_some_and(|homing| homing.home);
            let moved = elsewhere(&status) < before;
            last = status;
            Ok((is_home || moved).then_some(is_home))
        });
        if next.with_context(|| format!("{last:#?}"))? {
            return Ok(last);
        }
    }
}

fn elsewhere(status: &Status) -> u64 {
    let homing = status.homing.as_ref();
    homing.map_or(u64::MAX, |homing| homing.elsewhere_bytes)
}

/// A live detach, up to the moment when the VMM may drop the disk.
fn come_home(guest: &Guest, servers: &[&MemServer]) -> Result<()> {
    let mut control = guest.control()?;
    control.order(Request::BringHome)?;
    let home = wait_home(&mut control)?;
    ensure!(home.phase == Phase::Homing, "{home:#?}");
    let elsewhere = home.stored_bytes + home.filled_bytes;
    ensure!(elsewhere == 0 && home.lost_bytes == 0, "{home:#?}");
    control
        .order(Request::Release)
        .with_context(|| guest.log())?;
    ensure!(control.status()?.phase == Phase::Released, "not released");
    ensure!(!is_registered(guest)?, "its memory is still registered");
    ensure!(
        userfaultfds(guest)? == 0,
        "userfaultfds stay open:\n{}",
        guest.log()
    );
    for server in servers {
        wait_for("slabs to be given back", LONG, || {
            Ok((server.slabs_leased()? == 0).then_some(()))
        })?;
    }
    Ok(())
}

/// The VMM drops the disk; the backend has nothing left to do and ends.
fn drop_disk(guest: &mut Guest) -> Result<()> {
    guest.vmm.command(json!({"do": "disconnect"}))?;
    // At once where it is asked to; by itself after some seconds (see `home`), perhaps before it has answered.
    wait_for("the backend to obey", LONG, || {
        Ok(matches!(guest.ask(Request::Stop), Ok(Reply::Done) | Err(_)).then_some(()))
    })?;
    wait_end(guest)
}

fn wait_end(guest: &mut Guest) -> Result<()> {
    let status = guest.wait_backend()?;
    ensure!(status.success(), "{status}:\n{}", guest.log());
    ensure!(!guest.log().contains("panicked"), "{}", guest.log());
    Ok(())
}

/// The end of a VMM that no backend serves.
fn finish(mut guest: Guest) -> Result<()> {
    guest.vmm.kill()
}

/// What it wrote before, and what it writes at that moment, is all there, and its limit is reached.
fn attached(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let wish = Wish {
        ram_mib: &[40, 24],
        servers: &[&server.address],
        ..Wish::default()
    };
    let mut working = Vec::new();
    let mut guest = Guest::start_late(lab, &wish, |vmm| {
        let fill = json!({"do": "fill", "vcpu": 0, "page": 0, "pages": PAGES});
        vmm.command(fill)?;
        for (vcpu, page) in [(0u64, 0u64), (1, 5000)] {
            let work = json!({"do": "work", "vcpu": vcpu, "page": page, "pages": 5000,
                "seconds": 4.0, "seed": vcpu, "write_share": 0.5});
            working.push(vmm.send(work)?);
        }
        let race = json!({"do": "race", "vcpu": 2, "page": 10_000, "pages": 6000, "writers": 2,
            "readers": 1, "discarders": 1, "rounds": 8000});
        working.push(vmm.send(race)?);
        Ok(())
    })?;
    ensure!(is_registered(&guest)?, "its memory is not registered");
    guest.wait_status("the limit to be reached", |status| {
        status.kernel_memfd_bytes + status.kernel_staging_bytes <= LEAST
            && status.counters.evicted_pages > 1000
    })?;
    demand_all_sound(&mut guest, working)?;
    guest.verify(0, PAGES)?;
    guest.end(&[&server])
}

/// Stores and discards go on all along: before, while pages come home, through the release, after.
fn home(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = Guest::start(
        lab,
        &Wish {
            ram_mib: &[40, 24],
            servers: &[&server.address],
            ..Wish::default()
        },
    )?;
    guest.fill(0, PAGES)?;
    // Pages of one value come home, too.
    guest.command(0, "discard", json!({"page": 9000, "pages": 500}))?;
    guest.command(
        0,
        "touch",
        json!({"page": 9000, "pages": 500, "write": false}),
    )?;
    guest.squeeze()?;
    let sent = load(&mut guest, 3.0)?;
    come_home(&guest, &[&server])?;
    demand_all_sound(&mut guest, sent)?;
    guest.verify(0, PAGES)?;
    let sent = load(&mut guest, 0.5)?;
    let stop = guest.ask(Request::Stop)?;
    ensure!(
        matches!(stop, Reply::Refused(_)),
        "it ended with its disk in use: {stop:?}"
    );
    guest.vmm.command(json!({"do": "disconnect"}))?;
    wait_end(&mut guest)?;
    demand_all_sound(&mut guest, sent)?;
    guest.verify(0, PAGES)?;
    finish(guest)
}

/// Six rounds of both under load, with the limit changed in between.
fn cycles(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let wish = Wish {
        servers: &[&server.address],
        ..Wish::default()
    };
    let mut guest = Guest::start(lab, &wish)?;
    guest.fill(0, PAGES)?;
    for round in 0..6 {
        let sent = load(&mut guest, 1.5)?;
        if round > 0 {
            guest
                .attach_again(lab, &wish)
                .with_context(|| format!("round {round}"))?;
            // While it drains.
            guest.tune(LEAST + (8 << 20))?;
            guest.tune(LEAST)?;
        }
        guest.wait_status("pages to leave", |status| status.stored_bytes > 8 << 20)?;
        come_home(&guest, &[&server]).with_context(|| format!("round {round}"))?;
        drop_disk(&mut guest)?;
        demand_all_sound(&mut guest, sent)?;
        guest
            .verify(0, PAGES)
            .with_context(|| format!("round {round}"))?;
    }
    finish(guest)
}

/// The server stands still in the middle: nothing is lost, and the way back is open.
fn outage(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = Guest::start_on(lab, &server)?;
    guest.fill(0, PAGES)?;
    guest.settle()?;
    // One that has stood still for seconds is out of reach.
    let mut control = wait_for("the way home to begin at once", LONG, || {
        halt(&server)?;
        let mut control = guest.control()?;
        if matches!(control.ask(Request::BringHome)?, Reply::Done) {
            return Ok(Some(control));
        }
        server.signal(Signal::SIGCONT)?;
        guest.wait_status("the server to be back", |status| {
            status.servers.iter().all(|server| server.connected)
        })?;
        Ok(None)
    })?;
    let second = guest.ask(Request::BringHome)?;
    ensure!(
        matches!(&second, Reply::Refused(why) if why.contains("already")),
        "two at once: {second:?}"
    );
    let early = control.ask(Request::Release)?;
    ensure!(
        matches!(&early, Reply::Refused(why) if why.contains("not every page")),
        "released with pages elsewhere: {early:?}"
    );
    let tuned = guest.tune(64 << 20);
    ensure!(
        tuned.is_err(),
        "the limit of a guest on its way home was changed"
    );
    // Called off by a client that goes; what was on its way arrives later.
    drop(control);
    guest.wait_status("it to be served as before", |status| {
        status.phase != Phase::Homing && status.limit_bytes == LEAST
    })?;
    server.signal(Signal::SIGCONT)?;
    guest.verify(0, PAGES)?;
    guest.squeeze()?;
    // Once more, and this time the server comes back while it is waited for.
    guest.settle()?;
    let sent = load(&mut guest, 2.0)?;
    let mut control = guest.control()?;
    control.order(Request::BringHome)?;
    halt(&server)?;
    std::thread::sleep(crate::fixture::WHILE);
    let waits = control.status()?;
    ensure!(waits.phase == Phase::Homing, "{waits:#?}");
    server.signal(Signal::SIGCONT)?;
    wait_home(&mut control)?;
    control.order(Request::Release)?;
    demand_all_sound(&mut guest, sent)?;
    guest.verify(0, PAGES)?;
    drop(control);
    drop_disk(&mut guest)?;
    guest.verify(0, PAGES)?;
    finish(guest)
}

/// A page that is lost cannot come home, nor one whose server is away; the guest goes on.
fn refused(lab: &Lab) -> Result<()> {
    let mut server = lab.server()?;
    let mut guest = Guest::start_on(lab, &server)?;
    guest.fill(0, PAGES)?;
    guest.settle()?;
    server.kill()?;
    guest.wait_status("the outage to be seen", |status| {
        status.servers.iter().any(|server| !server.connected)
    })?;
    let away = guest.ask(Request::BringHome)?;
    ensure!(
        matches!(&away, Reply::Refused(why) if why.contains("out of reach")),
        "{away:?}"
    );
    server.start_again()?;
    guest.wait_status("the loss to be told", |status| status.lost_bytes > 0)?;
    let lost = guest.ask(Request::BringHome)?;
    ensure!(
        matches!(&lost, Reply::Refused(why) if why.contains("lost")),
        "{lost:?}"
    );
    let status = guest.status()?;
    ensure!(
        status.limit_bytes == LEAST && status.homing.is_none(),
        "{status:#?}"
    );
    guest.kill(&[&server])
}

/// The guest may be slow to let go of the disk: its requests are served until it does, into pages
/// that nobody has touched, too.
fn disk(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let mut guest = Guest::start_on(lab, &server)?;
    guest.fill(200, 12_000)?;
    guest
        .vmm
        .command(json!({"do": "disk-start", "queue": 0, "size": 128, "page": 8}))?;
    come_home(&guest, &[&server])?;
    let request = |page: u64| {
        json!({"queue": 0, "type": 0, "sector": 0, "bytes": 64 * 1024, "page": page,
            "wait_ms": 120_000})
    };
    for page in [300, 13_000] {
        let answer = guest.command(1, "request", request(page))?;
        ensure!(answer["status"] == 0, "a read into page {page}: {answer}");
    }
    let strays = guest.status()?.counters.stray_device_accesses;
    ensure!(strays == 0, "{strays} stray accesses");
    guest.verify(400, 11_000)?;
    guest.vmm.command(json!({"do": "disk-stop", "queue": 0}))?;
    drop_disk(&mut guest)?;
    finish(guest)
}
