//! A virtual machine for what this one has not got: its root is this machine's under an overlay, its
//! kernel Debian's, its processor emulated with SVM, so that there is KVM in it (see `images/lab`).
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

/// What becomes of the guest once its root is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boot {
    /// systemd and AppArmor in force, with folders like `/tmp` empty.
    Systemd,
    /// Nothing but what the script starts, with KVM and all that this machine's root has: seconds.
    Plain,
}

impl Boot {
    /// What the kernel's command line says beside what is always the same. What the machine's own
    /// units might wait for, or do by the clock, is masked.
    fn words(self) -> &'static str {
        match self {
            Self::Systemd => {
                "apparmor=1 security=apparmor systemd.unit=lab.target systemd.show_status=false \
                 systemd.firstboot=off systemd.mask=systemd-timesyncd.service \
                 systemd.mask=networking.service systemd.mask=systemd-networkd-wait-online.service \
                 systemd.mask=NetworkManager-wait-online.service \
                 systemd.mask=systemd-random-seed.service systemd.mask=timers.target"
            }
            Self::Plain => "apparmor=0 lab=plain",
        }
    }
}

/// A guest as it is wanted.
#[derive(Clone, Copy, Debug)]
pub struct LabGuest {
    /// How it boots.
    pub boot: Boot,
    /// Its memory; half of it and more may go to the overlay.
    pub memory_mib: u32,
    /// Its processors.
    pub vcpus: u32,
}

/// Ends QEMU with its owner's scope.
struct Running(std::process::Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl LabGuest {
    /// Runs the script `lab` of the folder `share` in the guest, and returns what it said. `images` is
    /// the folder that `images/lab/build.sh` filled.
    pub fn run(self, images: &Path, share: &Path, limit: Duration) -> Result<String> {
        forget_status(share)?;
        let console = share.join("console");
        let line = format!("file,id=line,path={}", console.display());
        let mut guest = Running(self.start(images, share, &line, Stdio::null())?);
        let ended = wait_for("the lab guest to end", limit, || {
            guest.0.try_wait().context("waiting for QEMU")
        });
        let said = String::from_utf8_lossy(&fs::read(&console).unwrap_or_default()).into_owned();
        let ended = ended.with_context(|| format!("it said so far: {said}"))?;
        ensure!(
            ended.success(),
            "QEMU ended with {ended}; the guest said: {said}"
        );
        match status(share).with_context(|| format!("it said: {said}"))? {
            0 => Ok(said),
            status => bail!("the script ended with status {status}: {said}"),
        }
    }

    /// The same on this process's terminal, or whatever its input and output are, for as long as it
    /// takes; returns the script's exit status.
    pub fn run_here(self, images: &Path, share: &Path) -> Result<u8> {
        forget_status(share)?;
        // Ctrl-C is for the guest.
        let line = "stdio,id=line,signal=off";
        let mut guest = Running(self.start(images, share, line, Stdio::inherit())?);
        let ended = guest.0.wait().context("waiting for QEMU")?;
        ensure!(ended.success(), "QEMU ended with {ended}");
        status(share)
    }

    fn start(
        self,
        images: &Path,
        share: &Path,
        line: &str,
        input: Stdio,
    ) -> Result<std::process::Child> {
        let file = |name: &str| images.join(name).display().to_string();
        let (memory, vcpus) = (self.memory_mib.to_string(), self.vcpus.to_string());
        let (kernel, initrd) = (file("vmlinuz"), file("lab-initrd"));
        let words = format!(
            "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off {}",
            self.boot.words()
        );
        let folder = |id: &str, path: &str, more: &str| {
            format!("local,id={id},path={path},security_model=none,multidevs=remap{more}")
        };
        let root = folder("root", "/", ",readonly=on");
        let shared = folder("share", &share.display().to_string(), "");
        // Dies with us, whatever becomes of us.
        Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "qemu-system-x86_64"])
            .args(["-M", "q35", "-accel", "tcg,thread=multi,tb-size=512"])
            .args(["-cpu", "max", "-smp", &vcpus, "-m", &memory])
            .args(["-nodefaults", "-display", "none", "-no-reboot"])
            .args(["-kernel", &kernel, "-initrd", &initrd])
            .args([
                "-append",
                &words,
                "-chardev",
                line,
                "-serial",
                "chardev:line",
            ])
            .args(["-device", "virtio-rng-pci"])
            .args(["-fsdev", &root])
            .args(["-device", "virtio-9p-pci,fsdev=root,mount_tag=root"])
            .args(["-fsdev", &shared])
            .args(["-device", "virtio-9p-pci,fsdev=share,mount_tag=share"])
            .stdin(input)
            .spawn()
            .context("setpriv could not be run")
    }
}

/// The exit status of an earlier script is not that of the next.
fn forget_status(share: &Path) -> Result<()> {
    let status = share.join("status");
    match fs::remove_file(&status) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", status.display()))
        }
        _ => Ok(()),
    }
}

fn status(share: &Path) -> Result<u8> {
    let status = fs::read_to_string(share.join("status"))
        .context("the guest ended without running its script")?;
    let status = status.trim();
    status.parse().with_context(|| format!("status '{status}'"))
}

/// Builds what the guest boots; returns the folder.
pub fn build(top: &Path) -> Result<std::path::PathBuf> {
    let script = top.join("images/lab/build.sh").display().to_string();
    let finished = run_within(Duration::from_secs(1200), &script, &[])?;
    ensure!(finished.success(), "{script}: {}", finished.said());
    let folder = finished.stdout.lines().last().context("no folder named")?;
    Ok(folder.into())
}
