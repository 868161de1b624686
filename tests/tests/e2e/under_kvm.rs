//! What only KVM can show, in the lab guest: an emulated machine that has it (see
//! `outram_tests::lab_guest`). There this program runs one of its tests again, with guests of
//! `<domain type='kvm'>`: their faults then come through nested page tables and from the kernel, and
//! the kernel notes what they store while they are moved.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use outram_tests::hermetic::host::ACCELERATION;
use outram_tests::hermetic::suite::Skipped;
use outram_tests::lab_guest::{self, Boot, Kernel, LabGuest, once_more};

use crate::Test;
use crate::fixture::{RAM_VARIABLE, logs, top};

pub(crate) const TESTS: &[Test] = &[
    ("live_migration_under_kvm", |_| {
        demand_wanted()?;
        again_under_kvm(
            "live_migration_there_and_back_keeps_every_page",
            Kernel::Ordinary,
            LIMIT,
        )
    }),
    ("huge_pages_under_kvm", |_| {
        again_under_kvm("huge_pages_while_the_server_stops", Kernel::Ordinary, LIMIT)
    }),
];

/// Memory for the guest within, twice while it moves, what it has at the memory server, programs.
pub(crate) const GUEST: LabGuest = LabGuest {
    boot: Boot::Plain,
    memory_mib: 3072,
    vcpus: 2,
};

/// RAM of a guest within, where a fault costs a millisecond and more. One of 160 MiB, 80 of them local,
/// had not booted after six minutes.
const RAM_MIB: u64 = 256;

/// How long one may take: thirteen minutes were seen for the migrations, on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(2400);

/// Left before that to tell where it hangs.
const TO_TELL: Duration = Duration::from_secs(300);

/// Said where the emulated processor cannot run guests.
const NO_SVM: &str = "this QEMU does not emulate SVM";

/// Asks for the long forms of these tests.
const WANTED: &str = "OUTRAM_TEST_UNDER_KVM";

/// Begins what a test says in the lab guest that is to be seen outside of it.
pub(crate) const SHOWN: &str = "shown: ";

/// Whether all is to be done that takes long: here, and in the lab guest that this is asked in.
pub(crate) fn long_wanted() -> bool {
    std::env::var_os(WANTED).is_some_and(|value| value == "1")
}

/// Skips a test that takes long where nobody has asked for it.
pub(crate) fn demand_wanted() -> Result<()> {
    if !long_wanted() {
        let reason = format!("it wants minutes and both processors: ask for it with {WANTED}=1");
        bail!(Skipped(reason));
    }
    Ok(())
}

/// When all tests are ended if they still run: seconds since 1970.
const UNTIL: &str = "OUTRAM_TEST_UNTIL";

/// What one of these tests takes on a slow machine, where its lab guest fails once.
const TAKES: Duration = Duration::from_secs(600);

/// Skips a test that might not end before all are ended: of what is cut off, nobody learns what became of the
/// others.
fn demand_time() -> Result<()> {
    let Ok(until) = std::env::var(UNTIL) else {
        return Ok(());
    };
    let until: u64 = until
        .parse()
        .with_context(|| format!("{UNTIL} is seconds since 1970, not '{until}'"))?;
    let left = (UNIX_EPOCH + Duration::from_secs(until)).duration_since(SystemTime::now());
    let left = left.unwrap_or_default();
    if left < TAKES {
        let reason = format!("it may take {TAKES:?}, and until {UNTIL} {left:.0?} are left");
        bail!(Skipped(reason));
    }
    Ok(())
}

/// Runs a test in lab guests, once more where one of them fails by itself and there is time.
pub(crate) fn in_lab_guests(test: &str, run: impl Fn() -> Result<()>) -> Result<()> {
    once_more(test, || {
        demand_time()?;
        run()
    })
}

/// Runs a test of this program in the lab guest, which boots this kernel.
pub(crate) fn again_under_kvm(test: &str, kernel: Kernel, limit: Duration) -> Result<()> {
    let images = lab_guest::build(top(), kernel)?;
    in_lab_guests(test, || {
        // Private to the sandbox: gone with it, however that ends.
        let share = tempfile::tempdir_in("/run")?;
        again_in(share.path(), test, "", limit, |share| {
            GUEST.run(&images, share, limit)
        })
    })
}

/// The same with the newest kernel that the distribution offers, where that has been asked for and fetched.
pub(crate) fn again_on_the_newest_kernel(test: &str, limit: Duration) -> Result<()> {
    demand_wanted()?;
    if !top().join("target/images-newest/lab-initrd").exists() {
        let reason = "it takes another kernel package: get it with images/lab/newest.sh";
        bail!(Skipped(reason.into()));
    }
    again_under_kvm(test, Kernel::Newest, limit)
}

/// Runs a test of this program in a lab guest that `run` boots with this shared folder, after the lines
/// `before` of a script, and ends after `limit`.
pub(crate) fn again_in(
    share: &Path,
    test: &str,
    before: &str,
    limit: Duration,
    run: impl FnOnce(&Path) -> Result<String>,
) -> Result<()> {
    let program = std::env::current_exe().context("this program's own path")?;
    let script = script(&program.display().to_string(), test, before, limit);
    fs::write(share.join("lab"), script)?;
    let said = run(share);
    let inner = share.join(test);
    if inner.is_dir() {
        let to = logs().join(format!("{test}-under-kvm"));
        fs::create_dir_all(&to)?;
        let copied = std::process::Command::new("cp")
            .arg("-rT")
            .args([&inner, &to])
            .status()?;
        ensure!(copied.success(), "keeping the logs in {}", to.display());
    }
    let said = said?;
    if said.contains(NO_SVM) {
        bail!(Skipped(NO_SVM.into()));
    }
    // Neither left out nor skipped in there.
    ensure!(said.contains("1 passed; 0 failed"), "{said}");
    for (_, shown) in said.lines().filter_map(|line| line.split_once(SHOWN)) {
        eprintln!("{shown}");
    }
    Ok(())
}

/// Its lines are indented, so that nobody takes them for those of the suite outside. Shortly before the
/// guest is given up, it says what each thread waits for: if nothing of that comes, it is the guest that hangs.
fn script(program: &str, test: &str, before: &str, limit: Duration) -> String {
    let late = limit.saturating_sub(TO_TELL).as_secs();
    format!(
        "grep -qw svm /proc/cpuinfo || {{ echo '{NO_SVM}'; exit 0; }}
set -o pipefail
{before}
cd '{top}/tests'
export {ACCELERATION}=kvm {RAM_VARIABLE}={RAM_MIB} {WANTED}={long}
rm -f ../target/e2e-times
{{
    sleep {late}
    echo 'late: threads, where they are in the kernel, and their stacks'
    ps -eLo pid,tid,stat,wchan:32,time,comm
    for thread in /proc/[0-9]*/task/[0-9]*; do
        ! grep -q . $thread/cmdline || {{ echo $thread; cat $thread/stack; }}
    done
}} 2>/dev/null | sed 's/^/  /' &
'{program}' --color never --exact {test} 2>&1 | sed 's/^/  /'
status=$?
[ $status = 0 ] || cp -r ../target/e2e-logs/{test} /share/ || true
[ ! -e ../target/e2e-times ] || sed 's/^/  /' ../target/e2e-times
exit $status
",
        top = top().display(),
        long = u8::from(long_wanted()),
    )
}
