//! The packages from installation to purge in a machine that runs systemd and AppArmor, with a guest of KVM.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use outram_tests::hermetic::suite::Skipped;
use outram_tests::lab_guest::{self, Boot, Kernel, LabGuest, once_more};

use super::debian::{need_root, packages};
use super::units::UNITS;
use super::{Test, need, top};

const NAME: &str = "packages_run_a_confined_guest_under_systemd";

pub(crate) const TESTS: &[Test] = &[(NAME, life_of_the_packages)];

/// How long the emulated guest may take, once more included: some ten minutes where nothing else runs, but the
/// end-to-end tests run beside it and come first. Of CI's 90 minutes, what comes after it takes 30.
const GUEST_LIMIT: Duration = Duration::from_secs(2400);

/// Memory for the overlay, libvirt, and a small guest within. One processor: all of several stood in the
/// kernel for good once, under "libvirt, confined" and a busy host, as kernels do whose code QEMU 7.2's
/// emulation runs though another processor has changed it (see `BOOTS_ALONE` in `hermetic::guest`).
const GUEST: LabGuest = LabGuest {
    boot: Boot::Systemd,
    memory_mib: 2048,
    vcpus: 1,
};

const SCRIPT: &str = include_str!("life_of_the_packages.sh");
const DOMAIN: &str = include_str!("domain.xml");

fn life_of_the_packages() -> Result<()> {
    need_root()?;
    need("qemu-system-x86_64", "qemu-system-x86")?;
    need("apparmor_parser", "apparmor")?;
    need("setpriv", "util-linux")?;
    if !Path::new("/lib/systemd/systemd").exists() {
        bail!(Skipped("systemd (package systemd) is not installed".into()));
    }
    let images = lab_guest::build(&top(), Kernel::Ordinary)?;
    let share = packages()?;
    for image in ["vmlinux", "initrd"] {
        fs::copy(images.join(image), share.path().join(image))?;
    }
    fs::write(share.path().join("lab"), SCRIPT)?;
    fs::write(share.path().join("domain.xml"), DOMAIN)?;
    fs::write(share.path().join("exposures"), exposures())?;
    let began = Instant::now();
    let said = once_more(NAME, || {
        let left = GUEST_LIMIT.saturating_sub(began.elapsed());
        GUEST.run(&images, share.path(), left)
    })?;
    for done in [
        "Overall exposure level",
        "mismatches=0",
        "s: all of it is as it should be",
    ] {
        ensure!(said.contains(done), "it did not say '{done}': {said}");
    }
    Ok(())
}

/// The units' names and the most that each may be exposed, a line each.
fn exposures() -> String {
    let name = |unit: &str| unit.rsplit('/').next().unwrap_or(unit).to_owned();
    let lines = UNITS.map(|(unit, most)| format!("{} {most}\n", name(unit)));
    lines.concat()
}
