//! A virtual machine for what this one has not got: its root is this machine's under an overlay, its
//! kernel Debian's, its processor emulated with SVM, so that there is KVM in it (see `images/lab`).
//!
//! It runs one script, in a folder that it shares with its caller, and is switched off. Nothing of it
//! outlives that but the folder.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::bench::usage::process_cpu;
use crate::hermetic::command::{run, run_within, wait_for};

/// What becomes of the guest once its root is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boot {
    /// systemd and AppArmor in force, with folders like `/tmp` empty.
    Systemd,
    /// Nothing but what the script starts, with KVM and all that this machine's root has: seconds.
    Plain,
    /// Nothing but what [`pack`] put beside the script, in memory: what is to be suspended cannot have
    /// its root over 9p. A network card leads to this machine's loopback device, as [`OUTSIDE`].
    Memory,
}

/// The address of this machine's loopback device for a guest that was booted from memory.
pub const OUTSIDE: &str = "10.0.2.2";

/// Said beside every figure of a server's processor time over RDMA, which in here is soft-RoCE.
pub const KERNEL_DOES_IT: &str = "with soft-RoCE the server's kernel does the work that a card would: of its process alone is the CPU time near zero";

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
            Self::Memory => "apparmor=0 lab=memory",
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
    /// Its processors; where there are several, beside one that is left idle.
    pub vcpus: u32,
}

impl LabGuest {
    /// Processors for QEMU, and what the kernel's command line says of them.
    ///
    /// QEMU (7.2 to 10.0, and main in 2026) changes flags of the *first* processor from every other's thread,
    /// whenever one loads its FPU state (`cpu_clear_ignne`), without a lock. Beside the flag that it means lie
    /// those of SVM: whether interrupts are let in, and whether addresses go through a guest's nested page
    /// tables. A first processor that runs a guest of KVM meanwhile now and then hears no interrupt again, or
    /// goes on in its host with its guest's nested tables. So no guest runs on it: it is isolated, and one
    /// more is there instead. Alone, it is nobody's but its own. What boots from memory has no KVM.
    fn processors(&self) -> (u32, &'static str) {
        match (self.boot, self.vcpus) {
            (Boot::Memory, vcpus) | (_, vcpus @ 1) => (vcpus, ""),
            (Boot::Systemd | Boot::Plain, several) => (several + 1, " isolcpus=0"),
        }
    }
}

/// Why there is no verdict on what was to run in a lab guest: it failed by itself. The emulation of SVM does
/// so now and then.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// Its script was not reached.
    #[error("the lab guest had not booted after {0:.0?}")]
    NotBooted(Duration),
    /// Its script was, and nothing was heard of it any more.
    #[error("the lab guest stood still for {0:.0?}")]
    StoodStill(Duration),
    /// QEMU, as it ended.
    #[error("the lab guest's QEMU ended with {0}")]
    Emulator(ExitStatus),
    /// Its kernel, which said so.
    #[error("the lab guest's kernel failed: {0}")]
    Kernel(String),
}

/// Runs a test in lab guests, and once or twice more where one failed by itself before there was a verdict: never
/// where the test has failed, or did not end in a guest that goes on and whose kernel said nothing. Nobody is to overlook it: the line
/// begins with [`ONCE_MORE`].
pub fn once_more<T>(test: &str, run: impl Fn() -> Result<T>) -> Result<T> {
    for _ in 0..MOST_MORE {
        let outcome = run();
        let Err(error) = &outcome else {
            return outcome;
        };
        let Some(fault) = no_verdict(error) else {
            return outcome;
        };
        // The name of the test that runs stands in a line that is not ended.
        eprintln!("\n{ONCE_MORE}{test}: {fault}\n{error:#}");
    }
    run().with_context(|| format!("run {MOST_MORE} times more"))
}

/// How often at most: of four lab guests that boot with systemd, two have stood still on one machine.
const MOST_MORE: u32 = 2;

/// Begins what is said of a test that is run once more.
pub const ONCE_MORE: &str = "ONCE MORE: ";

fn no_verdict(error: &anyhow::Error) -> Option<&Fault> {
    // The guest may have failed after the test did.
    let said = format!("{error:#}");
    let has_failed = said.contains(FAILED) || said.lines().any(|line| line.starts_with(REASON));
    error.downcast_ref().filter(|_| !has_failed)
}

/// How a test program sums up where tests failed.
const FAILED: &str = "test result: FAILED";

/// Begins the line in which a script says why it ends with a status other than 0.
const REASON: &str = "FAILED: ";

/// Says why the guest's own kernel failed, if it did. Lines of its console begin with the time; those of
/// other kernels, which a script may show, do not: they are indented.
fn kernel_failure(said: &str) -> Option<&str> {
    const WORDS: [&str; 5] = [
        "Kernel panic",
        "Oops",
        "BUG: ",
        "soft lockup",
        "general protection fault",
    ];
    said.lines()
        .filter(|line| line.starts_with('['))
        .find(|line| WORDS.iter().any(|words| line.contains(words)))
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
        self.run_joined(images, share, limit, None)
    }

    /// The same with a network card, on a cable to another guest's.
    pub fn run_joined(
        self,
        images: &Path,
        share: &Path,
        limit: Duration,
        cable: Option<&Cable>,
    ) -> Result<String> {
        forget_status(share)?;
        let console = share.join("console");
        let line = format!("file,id=line,path={}", console.display());
        let mut guest = Running(self.start(images, share, &line, Stdio::null(), cable)?);
        let said = || String::from_utf8_lossy(&fs::read(&console).unwrap_or_default()).into_owned();
        let (mut pulse, mut heard) = (None, Instant::now());
        let outcome = wait_for("the lab guest to end", limit, || {
            let now = self.pulse(guest.0.id(), share);
            if now.is_none() || now != pulse {
                (pulse, heard) = (now, Instant::now());
            }
            let silent = heard.elapsed();
            if silent > SILENCE || silent > EXPLAINED && kernel_failure(&said()).is_some() {
                bail!(match share.join(BEGAN).exists() {
                    true => Fault::StoodStill(silent),
                    false => Fault::NotBooted(silent),
                });
            }
            guest.0.try_wait().context("waiting for QEMU")
        })
        .and_then(|ended| match ended.success() {
            true => status(share),
            false => bail!(Fault::Emulator(ended)),
        });
        let said = said();
        match outcome {
            Ok(0) => Ok(said),
            Ok(status) => {
                // First, for records of such runs are cut short.
                let reason = said.lines().find(|line| line.starts_with(REASON));
                let reason = reason.unwrap_or_default().trim_end();
                bail!("the script ended with status {status}: {reason}\nit said: {said}")
            }
            Err(error) => {
                let failure = kernel_failure(&said).map(|line| Fault::Kernel(line.to_owned()));
                let error = error.context(format!("it said so far: {said}"));
                Err(match failure {
                    Some(failure) => error.context(failure),
                    None => error,
                })
            }
        }
    }

    /// What becomes something else again and again as long as the guest goes on; none of one that may be asleep.
    fn pulse(&self, qemu: u32, share: &Path) -> Option<String> {
        if self.boot == Boot::Memory {
            return None;
        }
        if self.boot == Boot::Plain || share.join(BEGAN).exists() {
            return Some(fs::read_to_string(share.join(ALIVE)).unwrap_or_default());
        }
        // systemd may take minutes to come to that. One whose processor waits for an interrupt that does not come
        // takes no time of ours. Once QEMU has ended, that is found out otherwise.
        let used = process_cpu(qemu).unwrap_or_default();
        Some((used.as_millis() / PULSE.as_millis()).to_string())
    }

    /// The same on this process's terminal, or whatever its input and output are, for as long as it
    /// takes; returns the script's exit status.
    pub fn run_here(self, images: &Path, share: &Path) -> Result<u8> {
        forget_status(share)?;
        // Ctrl-C is for the guest.
        let line = "stdio,id=line,signal=off";
        let mut guest = Running(self.start(images, share, line, Stdio::inherit(), None)?);
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
        cable: Option<&Cable>,
    ) -> Result<std::process::Child> {
        let file = |name: &str| images.join(name).display().to_string();
        let (processors, isolated) = self.processors();
        let (memory, processors) = (self.memory_mib.to_string(), processors.to_string());
        let initrd = match self.boot {
            Boot::Memory => share.join(PACKED).display().to_string(),
            Boot::Systemd | Boot::Plain => file("lab-initrd"),
        };
        // One that is suspended unpacks its kernel by itself: QEMU writes an ELF file to the guest's memory
        // anew when it wakes.
        let kernel = file(match self.boot {
            Boot::Memory => "vmlinuz",
            Boot::Systemd | Boot::Plain => "vmlinux",
        });
        let network = match (self.boot, cable) {
            (_, Some(cable)) => cable.devices(),
            (Boot::Memory, None) => vec![
                "-netdev".to_owned(),
                "user,id=net".to_owned(),
                "-device".to_owned(),
                "virtio-net-pci,netdev=net".to_owned(),
            ],
            (Boot::Systemd | Boot::Plain, None) => Vec::new(),
        };
        let words = format!(
            "console=ttyS0 quiet loglevel=3 panic=-1 oops=panic mitigations=off {TICKS} {}{isolated}",
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
            .args(["-cpu", "max", "-smp", &processors, "-m", &memory])
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
            .args(network)
            .args(["-fsdev", &root])
            .args(["-device", "virtio-9p-pci,fsdev=root,mount_tag=root"])
            .args(["-fsdev", &shared])
            .args(["-device", "virtio-9p-pci,fsdev=share,mount_tag=share"])
            .stdin(input)
            .spawn()
            .context("setpriv could not be run")
    }
}

/// One end of a cable between the network cards of two guests: a socket, so that no frame is lost on
/// it. (Of datagrams the kernel queues ten, and RDMA waits tens of milliseconds for each one lost.)
#[derive(Clone, Debug)]
pub struct Cable {
    socket: PathBuf,
    /// Whether this end is there first, and the other comes to it.
    first: bool,
}

impl Cable {
    /// Both ends of a cable whose socket is in `folder`: that of the guest that is started first, and
    /// that of the other.
    pub fn within(folder: &Path) -> [Self; 2] {
        let socket = folder.join("cable");
        [true, false].map(|first| Self {
            socket: socket.clone(),
            first,
        })
    }

    fn devices(&self) -> Vec<String> {
        let (server, mac) = match self.first {
            true => ("on", "52:54:00:00:02:01"),
            false => ("off", "52:54:00:00:02:02"),
        };
        let netdev = format!(
            "stream,id=net,server={server},addr.type=unix,addr.path={}",
            self.socket.display()
        );
        // A page and its headers in a frame.
        let card = format!("virtio-net-pci,netdev=net,mac={mac},host_mtu=4200");
        vec!["-netdev".to_owned(), netdev, "-device".to_owned(), card]
    }
}

/// What a guest that is booted from memory boots, in its shared folder.
const PACKED: &str = "initrd";

/// Packs the script `lab` of the folder `share` for a guest that is booted from memory, with `programs`
/// and the libraries that they need, and with `folder`: all at the paths that they have here.
pub fn pack(images: &Path, share: &Path, programs: &[PathBuf], folder: &Path) -> Result<()> {
    let mut paths: BTreeSet<PathBuf> = programs.iter().cloned().collect();
    for program in programs {
        let said = run("ldd", &[&program.display().to_string()])?;
        let libraries = said.split_whitespace().filter(|word| word.starts_with('/'));
        paths.extend(libraries.map(PathBuf::from));
    }
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        paths.insert(entry?.path());
    }
    // The kernel makes no folders by itself.
    let folders = paths.iter().flat_map(|path| path.ancestors().skip(1));
    let folders: BTreeSet<PathBuf> = folders.map(Path::to_path_buf).collect();
    let names = folders.iter().chain(&paths);
    let names = names.filter_map(|path| path.strip_prefix("/").ok());
    let names: String = names.map(|name| format!("{}\n", name.display())).collect();
    let list = share.join("packed");
    fs::write(&list, names)?;
    // Links are followed: what they lead to is what is needed.
    let pack = "cp \"$1\" \"$2\" && cd \"$3\" && echo lab | cpio -o -H newc --quiet >>\"$2\" \
        && cd / && cpio -o -L -H newc --quiet <\"$4\" >>\"$2\"";
    let [initrd, packed, share, list] = [
        images.join("lab-initrd"),
        share.join(PACKED),
        share.to_owned(),
        list,
    ]
    .map(|path| path.display().to_string());
    run(
        "bash",
        &["-c", pack, "pack", &initrd, &packed, &share, &list],
    )
    .map(drop)
}

/// Has each processor's timer go on by itself. QEMU 7.2 takes a flag back without a lock as a guest of KVM
/// is left (`do_vmexit`: `interrupt_request`), by which an interrupt that another thread has just raised is
/// forgotten now and then. Where that was the timer's, and none is set before it has come, the processor waits for
/// good, or stays in the guest; of a timer that goes on by itself, the next comes.
const TICKS: &str = "nohz=off highres=off";

/// There once a script is reached.
const BEGAN: &str = "began";

/// Written every few seconds from then on, each time something else.
const ALIVE: &str = "alive";

/// Time on a processor by which QEMU's guest goes on: of an idle Linux, some ten seconds' worth.
const PULSE: Duration = Duration::from_millis(100);

/// Longest until any of these: a few seconds on a machine that has time.
const SILENCE: Duration = Duration::from_secs(180);

/// The same where the guest's kernel has said what is the matter. A processor that stands still may yet go on.
const EXPLAINED: Duration = Duration::from_secs(100);

/// What is known of an earlier script is not so of the next.
fn forget_status(share: &Path) -> Result<()> {
    for name in ["status", BEGAN, ALIVE] {
        let file = share.join(name);
        match fs::remove_file(&file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("removing {}", file.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

fn status(share: &Path) -> Result<u8> {
    let status = fs::read_to_string(share.join("status"))
        .context("the guest ended without running its script")?;
    let status = status.trim();
    status.parse().with_context(|| format!("status '{status}'"))
}

/// The kernel it boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// The distribution's own.
    Ordinary,
    /// The newest that the distribution offers, which may be the same.
    Newest,
}

impl Kernel {
    fn script(self) -> &'static str {
        match self {
            Self::Ordinary => "images/lab/build.sh",
            Self::Newest => "images/lab/newest.sh",
        }
    }
}

/// Builds what the guest boots; returns the folder.
pub fn build(top: &Path, kernel: Kernel) -> Result<PathBuf> {
    let script = top.join(kernel.script()).display().to_string();
    let finished = run_within(Duration::from_secs(1200), &script, &[])?;
    ensure!(finished.success(), "{script}: {}", finished.said());
    let folder = finished.stdout.lines().last().context("no folder named")?;
    Ok(folder.into())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use anyhow::anyhow;

    use super::*;

    /// How often a test is run whose first run ends like this, and each other well.
    fn runs(first: fn() -> Result<()>) -> u32 {
        let runs = Cell::new(0);
        let outcome = once_more("test", || {
            runs.set(runs.get() + 1);
            if runs.get() == 1 { first() } else { Ok(()) }
        });
        assert_eq!(outcome.is_err(), runs.get() == 1 && first().is_err());
        runs.get()
    }

    fn fault() -> Fault {
        Fault::NotBooted(SILENCE)
    }

    #[test]
    fn only_what_has_no_verdict_is_run_once_more() {
        assert_eq!(runs(|| Ok(())), 1);
        assert_eq!(runs(|| bail!("memory came back wrong")), 1);
        assert_eq!(runs(|| bail!(fault())), 2);
        assert_eq!(runs(|| Err(anyhow!("ended").context(fault()))), 2);
        assert_eq!(runs(|| Err(anyhow!(FAILED).context(fault()))), 1);
        let because = || Err(anyhow!("it said so far:\n{REASON}no unit").context(fault()));
        assert_eq!(runs(because), 1);
        let runs = Cell::new(0);
        let outcome: Result<()> = once_more("test", || {
            runs.set(runs.get() + 1);
            bail!(fault())
        });
        assert!(outcome.is_err());
        assert_eq!(runs.get(), 3);
    }

    #[test]
    fn who_does_not_go_on_has_no_pulse() {
        let of = |boot| LabGuest {
            boot,
            memory_mib: 1,
            vcpus: 1,
        };
        let guest = of(Boot::Systemd);
        let has_pulse = |script: &str, limit| {
            let mut command = Command::new("sh");
            let running = Running(command.args(["-c", script]).spawn().expect("a shell"));
            let pulse = || guest.pulse(running.0.id(), Path::new("/"));
            let before = pulse();
            wait_for("a pulse", Duration::from_secs(limit), || {
                Ok((before != pulse()).then_some(()))
            })
        };
        assert!(has_pulse("while :; do :; done", 120).is_ok());
        assert!(has_pulse("exec sleep 600", 2).is_err());
        // Once its script is reached, that time alone tells nothing: it may go round in the guest within.
        let share = tempfile::tempdir().expect("a folder");
        let pulse = || guest.pulse(std::process::id(), share.path());
        fs::write(share.path().join(BEGAN), "").expect("begun");
        fs::write(share.path().join(ALIVE), "goes on").expect("alive");
        assert_eq!(pulse().as_deref(), Some("goes on"));
        // It may sleep for minutes, which is no standing still.
        let asleep = of(Boot::Memory).pulse(std::process::id(), Path::new("/"));
        assert_eq!(asleep, None);
    }

    #[test]
    fn only_the_guests_own_kernel_is_heard() {
        let own = "[   12.345678] Kernel panic - not syncing: Fatal exception";
        let heard = format!("  test a ... ok\r\n{own}\r\n");
        assert_eq!(kernel_failure(&heard), Some(own));
        let another = "  [   12.345678] watchdog: BUG: soft lockup - CPU#1 stuck for 22s!";
        assert_eq!(kernel_failure(another), None);
        assert_eq!(
            kernel_failure("[    1.000000] random: crng init done"),
            None
        );
    }
}
