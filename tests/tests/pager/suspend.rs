//! A host whose wall clock jumps, and that is really suspended, to memory, and woken: the lab guest is
//! that host, with backend and small VMM in it; the memory servers run on, outside of it.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::time::{TimeSpec, TimeValLike};
use nix::time::{ClockId, clock_gettime, clock_settime};
use outram_tests::hermetic::sandbox::{self, find_program};
use outram_tests::hermetic::server::{Launch, MemServer};
use outram_tests::hermetic::suite::need;
use outram_tests::lab_guest::{self, Boot, Kernel, LabGuest, OUTSIDE};
use outram_wire::control::{Phase, Status};
use serde_json::json;

use crate::fixture::{Guest, Lab, SLAB, Wish, certificates, demand_sound, top};

const NAME: &str = "a_host_whose_clock_jumps_and_that_is_suspended";

pub(crate) const TESTS: &[crate::Test] = &[(NAME, suspended)];

/// Tells a test that it runs on the host that is to be suspended: addresses of the server whose lease
/// outlasts it and of the one whose lease does not, and the certificates' folder.
const HOST: &str = "OUTRAM_TEST_SUSPENDED_HOST";

/// Seconds of sleep: longer than the short lease, and than either side waits for a sign of life of the other.
const ASLEEP_S: u64 = 60;

/// Attempts to fall asleep, each for twice as long.
const ATTEMPTS: u64 = 4;

/// One that ends meanwhile, though not where only a thread stands still; and one that outlasts all attempts.
const SHORT_LEASE: &str = "30s";
const LONG_LEASE: &str = "3600s";

/// Seconds that the wall clock is wrong: longer than the short lease.
const JUMPED_S: u64 = 40;

/// A few more pages than may be local: each fault costs ten milliseconds and more in there.
const FILLED: u64 = 5_000;

const MACHINE: LabGuest = LabGuest {
    boot: Boot::Memory,
    memory_mib: 1024,
    vcpus: 2,
};

/// Longest that the whole may take, sleep included.
const LIMIT: Duration = Duration::from_secs(1800);

fn suspended(lab: &Lab) -> Result<()> {
    match std::env::var(HOST) {
        Ok(told) => on_the_host(lab, &told),
        Err(_) => outside(lab),
    }
}

fn outside(lab: &Lab) -> Result<()> {
    need("qemu-system-x86_64", "qemu-system-x86")?;
    need("cpio", "cpio")?;
    let images = lab_guest::build(top(), Kernel::Ordinary)?;
    // Where a sandbox in there does not hide it.
    let pki = tempfile::tempdir_in("/tmp")?;
    certificates(pki.path(), &[OUTSIDE, "127.0.0.1"])?;
    let server = |lease: &str| {
        let address = lab.address();
        MemServer::launch(Launch {
            program: lab.program("outram-memserver")?,
            metrics: lab.address(),
            pki: pki.path().to_owned(),
            log: lab.path(&format!("memserver-{address}")),
            slab_bytes: SLAB,
            arguments: ["--memory", "1GiB", "--lease-timeout", lease]
                .map(String::from)
                .into(),
            address,
        })
    };
    let (patient, hasty) = (server(LONG_LEASE)?, server(SHORT_LEASE)?);

    let share = tempfile::tempdir_in("/run")?;
    let program = std::env::current_exe().context("this program's own path")?;
    let within = |server: &MemServer| server.address.replace("127.0.0.1", OUTSIDE);
    let script = format!(
        "export {HOST}='{} {} {}' {}
{} --color never --exact {NAME} 2>&1 | sed 's/^/  /'
",
        within(&patient),
        within(&hasty),
        pki.path().display(),
        sandbox::NONE,
        program.display(),
    );
    fs::write(share.path().join("lab"), script)?;
    let mut programs = vec![program];
    for name in ["outram-backend", "small-vmm"] {
        programs.push(lab.program(name)?);
    }
    for name in ["ip", "mount", "umount", "timeout", "unshare", "setpriv"] {
        programs.push(find_program(name).with_context(|| name.to_owned())?);
    }
    lab_guest::pack(&images, share.path(), &programs, pki.path())?;
    let said = MACHINE.run(&images, share.path(), LIMIT)?;
    // Neither left out nor skipped in there.
    ensure!(said.contains("1 passed; 0 failed"), "{said}");
    Ok(())
}

fn on_the_host(lab: &Lab, told: &str) -> Result<()> {
    let words: Vec<&str> = told.split(' ').collect();
    let &[patient, hasty, pki] = words.as_slice() else {
        anyhow::bail!("{HOST}='{told}' is not two addresses and a folder");
    };
    for file in ["ca.pem", "client.pem", "client.key"] {
        fs::copy(PathBuf::from(pki).join(file), lab.path("pki").join(file))?;
    }
    let start = |server: &str| {
        let wish = Wish {
            servers: &[server],
            ..Wish::default()
        };
        let mut guest = Guest::start(lab, &wish)?;
        guest.fill(0, FILLED)?;
        anyhow::Ok(guest)
    };
    let (mut kept, mut lost) = (start(patient)?, start(hasty)?);
    jump(&mut lost)?;
    lost.settle()?;
    // Pages are on their way in either direction while the host falls asleep.
    let sent = kept.send(
        0,
        "work",
        json!({"page": 0, "pages": FILLED, "seconds": 6.0, "write_share": 0.5, "seed": 4}),
    )?;
    std::thread::sleep(Duration::from_secs(2));
    suspend()?;

    demand_sound(&kept.answer(sent)?)?;
    kept.verify(0, FILLED)?;
    kept.end(&[])?;

    let all = lost.send(1, "verify", json!({"page": 0, "pages": FILLED}))?;
    let is_stopped = |status: &Status| status.phase == Phase::Stopped && status.lost_bytes > 0;
    lost.wait_status("the guest to be stopped", is_stopped)?;
    lost.demand_silence(all)?;
    lost.kill(&[])
}

/// The wall clock jumps back and ahead, by more than certificates are valid for. Leases are renewed
/// meanwhile, and pages come and go over the connections that stand.
fn jump(guest: &mut Guest) -> Result<()> {
    for days in [-400, 400] {
        turn_clock(days)?;
        let work = json!({"page": 0, "pages": FILLED, "seconds": JUMPED_S, "write_share": 0.5});
        demand_sound(&guest.command(0, "work", work)?)?;
        turn_clock(-days)?;
        // A connection that was lost meanwhile is made again only now.
        let status = guest.wait_status("it to be served as before", |status| {
            status.phase == Phase::Serving && status.servers.iter().all(|server| server.connected)
        })?;
        ensure!(status.lost_bytes == 0, "{status:#?}");
    }
    guest.verify(0, FILLED)
}

fn turn_clock(days: i64) -> Result<()> {
    let clock = ClockId::CLOCK_REALTIME;
    let now = clock_gettime(clock)?;
    Ok(clock_settime(
        clock,
        now + TimeSpec::seconds(days * 24 * 3600),
    )?)
}

/// Suspends this machine to memory; returns when it is awake again.
fn suspend() -> Result<()> {
    let before = asleep()?;
    fs::write("/sys/power/mem_sleep", "deep").context("suspending to memory")?;
    // A slow machine may still be falling asleep when the alarm goes off, and nothing else would wake it.
    let mut tries = (0..ATTEMPTS).map(|doubled| fall_asleep(ASLEEP_S << doubled));
    let has_slept = tries.find(|slept| !matches!(slept, Ok(false)));
    has_slept.context("it never fell asleep before its alarm went off")??;
    let slept = asleep()?.saturating_sub(before);
    println!("slept for {slept:?}");
    // The alarm is set for a whole second, and falling asleep takes some of them.
    ensure!(
        slept > Duration::from_secs(ASLEEP_S / 2),
        "this machine slept for {slept:?} only"
    );
    Ok(())
}

/// Suspends this machine for so many seconds; false where its alarm went off before it slept.
fn fall_asleep(seconds: u64) -> Result<bool> {
    let (alarm, count) = ("/sys/class/rtc/rtc0/wakealarm", "/sys/power/wakeup_count");
    // From here on, the kernel does not suspend a machine that something has tried to wake.
    let events = fs::read_to_string(count).context(count)?;
    fs::write(count, events.trim()).context(count)?;
    fs::write(alarm, "0").context(alarm)?;
    fs::write(alarm, format!("+{seconds}")).context(alarm)?;
    match fs::write("/sys/power/state", "mem") {
        Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => Ok(false),
        other => Ok(other.map(|()| true).context("suspending")?),
    }
}

/// How long this machine has been suspended since it was booted.
fn asleep() -> Result<Duration> {
    let since_boot = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME)?);
    let awake = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
    Ok(since_boot.saturating_sub(awake))
}
