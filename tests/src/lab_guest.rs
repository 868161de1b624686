//! A virtual machine for what needs a system of its own: this machine's root under an overlay, with
//! Debian's kernel, systemd as process 1 and AppArmor in force (see `images/lab`).
//!
//! It runs one script, in a folder that it shares with its caller, and is switched off. Nothing of it
//! outlives that but the folder.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::hermetic::command::{run_within, wait_for};

/// Memory of the guest: for the overlay, libvirt, and a small guest within.
const MEMORY_MIB: u32 = 2048;

/// The kernel's and systemd's command line. What the machine's own units might wait for,
/// or do by the clock, is masked.
const COMMAND_LINE: &str = "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off \
    apparmor=1 security=apparmor systemd.unit=lab.target systemd.show_status=false systemd.firstboot=off \
    systemd.mask=systemd-timesyncd.service systemd.mask=networking.service \
    systemd.mask=systemd-networkd-wait-online.service systemd.mask=NetworkManager-wait-online.service \
    systemd.mask=systemd-random-seed.service systemd.mask=timers.target";

/// Ends QEMU with its owner's scope.
struct Running(std::process::Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the script `lab` of the folder `share` in the guest, and returns what it said. `images` is the
/// folder that `images/lab/build.sh` filled.
pub fn run(images: &Path, share: &Path, limit: Duration) -> Result<String> {
    let console = share.join("console");
    let status = share.join("status");
    // An earlier run's is not this one's.
    match fs::remove_file(&status) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("removing {}", status.display()));
        }
        _ => {}
    }
    let mut guest = Running(start(images, share, &console)?);
    let ended = wait_for("the lab guest to end", limit, || {
        guest.0.try_wait().context("waiting for QEMU")
    });
    let said = String::from_utf8_lossy(&fs::read(&console).unwrap_or_default()).into_owned();
    let ended = ended.with_context(|| format!("it said so far: {said}"))?;
    ensure!(
        ended.success(),
        "QEMU ended with {ended}; the guest said: {said}"
    );
    match fs::read_to_string(&status) {
        Ok(status) if status.trim() == "0" => Ok(said),
        Ok(status) => bail!("the script ended with status {}: {said}", status.trim()),
        Err(_) => bail!("the guest ended without running its script; it said: {said}"),
    }
}

fn start(images: &Path, share: &Path, console: &Path) -> Result<std::process::Child> {
    let file = |name: &str| images.join(name).display().to_string();
    let memory = MEMORY_MIB.to_string();
    let (kernel, initrd) = (file("vmlinuz"), file("lab-initrd"));
    let serial = format!("file:{}", console.display());
    let folder = |id: &str, path: &str, more: &str| {
        format!("local,id={id},path={path},security_model=none,multidevs=remap{more}")
    };
    let root = folder("root", "/", ",readonly=on");
    let shared = folder("share", &share.display().to_string(), "");
    // Dies with us, whatever becomes of us.
    Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "--", "qemu-system-x86_64"])
        .args(["-M", "q35", "-accel", "tcg,thread=multi,tb-size=512"])
        .args(["-cpu", "max", "-smp", "2", "-m", &memory])
        .args(["-nodefaults", "-display", "none", "-no-reboot"])
        .args(["-kernel", &kernel, "-initrd", &initrd])
        .args(["-append", COMMAND_LINE, "-serial", &serial])
        .args(["-device", "virtio-rng-pci"])
        .args(["-fsdev", &root])
        .args(["-device", "virtio-9p-pci,fsdev=root,mount_tag=root"])
        .args(["-fsdev", &shared])
        .args(["-device", "virtio-9p-pci,fsdev=share,mount_tag=share"])
        .stdin(Stdio::null())
        .spawn()
        .context("setpriv could not be run")
}

/// Builds what the guest boots; returns the folder.
pub fn build(top: &Path) -> Result<std::path::PathBuf> {
    let script = top.join("images/lab/build.sh").display().to_string();
    let finished = run_within(Duration::from_secs(1200), &script, &[])?;
    ensure!(finished.success(), "{script}: {}", finished.said());
    let folder = finished.stdout.lines().last().context("no folder named")?;
    Ok(folder.into())
}
