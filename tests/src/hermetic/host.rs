//! The private machine: mounts that hide the real one's state, and Debian's own daemons on top.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::command::{COMMAND, Finished, run, run_within, wait_for};
use super::neighbour::FIRST_ADDRESS;
use super::sandbox;

/// Where guests' kernel and initramfs lie, readable by QEMU's user.
pub const IMAGES: &str = "/var/lib/libvirt/images";

/// QEMU for guests whose RAM has an odd size.
pub const ODD_RAM_EMULATOR: &str = "/var/lib/libvirt/images/odd-ram-qemu";

/// Where each guest's backend keeps its run directory.
pub const RUN: &str = "/run/outram";

/// The certificates made for this host.
pub const PKI: &str = "/etc/outram/pki";

/// First TCP port given out; the network namespace is private, so none is ever taken.
const FIRST_PORT: u16 = 7100;

const QEMU_CONF: &str = r#"# Debian's defaults, but for what this place has not got: no AppArmor profiles of a private
# mount namespace, no systemd that would make cgroups.
security_driver = "none"
cgroup_controllers = []
"#;

const LIBVIRTD_CONF: &str = r#"auth_unix_ro = "none"
auth_unix_rw = "none"
log_filters = "3:*"
log_outputs = "1:file:/var/log/libvirt/libvirtd.log"
"#;

/// Set to `kvm`, it has guests run on KVM instead of being emulated.
pub const ACCELERATION: &str = "OUTRAM_TEST_ACCELERATION";

/// What runs the guests' instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acceleration {
    /// QEMU itself: the same everywhere.
    Emulated,
    /// The kernel. `/dev/kvm` must be there and open to QEMU's user.
    Kvm,
}

impl Acceleration {
    /// What the environment asks for, for all machines and guests of a sandbox. [`Host::start`] has
    /// seen to it that it is a word known here.
    pub fn wanted() -> Self {
        match std::env::var(ACCELERATION).as_deref() {
            Ok("kvm") => Self::Kvm,
            _ => Self::Emulated,
        }
    }

    fn check() -> Result<()> {
        match std::env::var(ACCELERATION).as_deref() {
            Err(_) | Ok("kvm") => Ok(()),
            Ok(other) => bail!("{ACCELERATION} is 'kvm' or not set, not '{other}'"),
        }
    }

    /// libvirt's word for it.
    pub fn domain_type(self) -> &'static str {
        match self {
            Self::Emulated => "qemu",
            Self::Kvm => "kvm",
        }
    }
}

/// A private machine with libvirt running on it.
#[derive(Debug)]
pub struct Host {
    programs: PathBuf,
    daemons: Mutex<Vec<(&'static str, Child)>>,
    next_port: AtomicU16,
}

impl Host {
    /// Makes the machine and starts libvirt. Call it once, inside of the sandbox: it changes the
    /// mounts of this process. `images` is the folder that `images/build.sh` filled.
    pub fn start(images: &Path) -> Result<Self> {
        Self::start_with(images, LIBVIRTD_CONF)
    }

    /// The same for a second machine, within namespaces of its own. libvirt refuses to migrate
    /// between hosts of the same UUID.
    pub(super) fn start_neighbour(images: &Path) -> Result<Self> {
        let id = std::process::id();
        let uuid = format!("host_uuid = \"4f757472-616d-4e00-8000-{id:012}\"\n");
        Self::start_with(images, &format!("{LIBVIRTD_CONF}{uuid}"))
    }

    fn start_with(images: &Path, libvirtd_conf: &str) -> Result<Self> {
        Acceleration::check()?;
        let host = Self {
            programs: programs()?,
            daemons: Mutex::new(Vec::new()),
            next_port: AtomicU16::new(FIRST_PORT),
        };
        hide_the_machine().context("making the machine's state private")?;
        write_libvirt_settings(libvirtd_conf)?;
        copy_images(images)?;
        host.start_daemons()?;
        Ok(host)
    }

    /// The folder of our programs: where this one was built.
    pub fn programs(&self) -> &Path {
        &self.programs
    }

    /// Path of one of our programs.
    pub fn program(&self, name: &str) -> Result<String> {
        let path = self.programs.join(name);
        if !path.is_file() {
            bail!(
                "{} is not built: run 'cargo build --workspace' first",
                path.display()
            );
        }
        Ok(path.display().to_string())
    }

    /// A TCP port of 127.0.0.1 that nobody else was given.
    pub fn port(&self) -> u16 {
        self.next_port.fetch_add(1, Ordering::Relaxed)
    }

    /// Runs `outram` and returns how it ended.
    pub fn outram(&self, arguments: &[&str]) -> Result<Finished> {
        run_within(COMMAND, &self.program("outram")?, arguments)
    }

    /// Runs `outram`, which must succeed; returns what it printed.
    pub fn outram_ok(&self, arguments: &[&str]) -> Result<String> {
        run(&self.program("outram")?, arguments)
    }

    /// Makes the certificates and sets the host up, as an operator would.
    pub fn set_up_outram(&self) -> Result<()> {
        for arguments in [
            &["setup"][..],
            &["pki", "init"],
            &[
                "pki",
                "issue",
                "server",
                "memserver",
                "--address",
                "127.0.0.1",
                "--address",
                FIRST_ADDRESS,
            ],
            &["pki", "issue", "client"],
        ] {
            self.outram_ok(arguments)?;
        }
        Ok(())
    }

    /// libvirtd's process.
    pub fn libvirtd_pid(&self) -> Result<u32> {
        let daemons = self.lock();
        let libvirtd = daemons
            .iter()
            .find(|(name, _)| *name == "libvirtd")
            .context("libvirtd was not started")?;
        Ok(libvirtd.1.id())
    }

    /// Copies logs of libvirt, QEMU and backends to `to`, for looking at after a failure.
    pub fn keep_logs(&self, to: &Path) -> Result<()> {
        fs::create_dir_all(to).with_context(|| to.display().to_string())?;
        let to = to.display().to_string();
        run("cp", &["-rT", "/var/log/libvirt", &format!("{to}/libvirt")])?;
        let keep = "cd /run/outram 2>/dev/null || exit 0; \
             find . -maxdepth 2 -type f \\( -name log -o -name error \\) -exec cp --parents {} \"$0\" \\;";
        run("bash", &["-c", keep, &to])?;
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(&'static str, Child)>> {
        self.daemons
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Ends libvirtd by a signal; guests and virtlogd go on.
    pub fn end_libvirtd(&self, signal: Signal) -> Result<()> {
        let mut daemons = self.lock();
        let at = daemons
            .iter()
            .position(|(name, _)| *name == "libvirtd")
            .context("libvirtd does not run")?;
        let (_, mut libvirtd) = daemons.remove(at);
        kill(Pid::from_raw(libvirtd.id() as i32), signal).context("ending libvirtd")?;
        wait_for("libvirtd to end", Duration::from_secs(60), || {
            Ok(libvirtd.try_wait()?.map(drop))
        })
    }

    /// Starts libvirtd, and waits until it answers.
    pub fn start_libvirtd(&self) -> Result<()> {
        self.start_daemon("libvirtd")?;
        wait_for_libvirtd()
    }

    fn start_daemons(&self) -> Result<()> {
        self.start_daemon("virtlogd")?;
        self.start_libvirtd()
    }

    fn start_daemon(&self, name: &'static str) -> Result<()> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(format!("/var/log/libvirt/{name}.out"))?;
        let path = std::env::var("PATH").unwrap_or_default();
        let child = Command::new(name)
            .env("PATH", format!("{}:{path}", self.programs.display()))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("{name} could not be run"))?;
        self.lock().push((name, child));
        Ok(())
    }
}

fn wait_for_libvirtd() -> Result<()> {
    wait_for("libvirtd to answer", Duration::from_secs(300), || {
        // One that hangs is none yet.
        let answered = run_within(Duration::from_secs(30), "virsh", &["uri"]);
        Ok(answered.is_ok_and(|end| end.success()).then_some(()))
    })
    .with_context(|| fs::read_to_string("/var/log/libvirt/libvirtd.out").unwrap_or_default())
}

impl Drop for Host {
    fn drop(&mut self) {
        for (_, child) in self.lock().iter_mut().rev() {
            // Either it has ended, or the namespace's end takes it.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Runs `virsh` on the private libvirt and returns how it ended.
pub fn virsh(arguments: &[&str]) -> Result<Finished> {
    run_within(COMMAND, "virsh", arguments)
}

/// Runs `virsh`, which must succeed; returns what it printed.
pub fn virsh_ok(arguments: &[&str]) -> Result<String> {
    run("virsh", arguments)
}

/// The folder this program was built into: tests lie in its `deps`.
fn programs() -> Result<PathBuf> {
    let this = std::env::current_exe().context("this program's own path")?;
    let folder = this.parent().context("this program has no folder")?;
    let folder = if folder.ends_with("deps") {
        folder.parent().unwrap_or(folder)
    } else {
        folder
    };
    Ok(folder.to_path_buf())
}

fn hide_the_machine() -> Result<()> {
    run("ip", &["link", "set", "lo", "up"])?;
    run("mount", &["-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"])?;
    show_own_sysfs()?;
    if Acceleration::wanted() == Acceleration::Emulated {
        hide_kvm()?;
    }
    fs::create_dir_all("/run/lock")?;
    // In the lab guest each file costs milliseconds, on a busy machine many of them.
    run_within(Duration::from_secs(300), "cp", &["-aT", "/etc", "/run/etc"])?.demand_success()?;
    run("mount", &["--bind", "/run/etc", "/etc"])?;
    for folder in ["lib", "cache", "log"] {
        let folder = format!("/var/{folder}/libvirt");
        fs::create_dir_all(&folder)?;
        run(
            "mount",
            &["-t", "tmpfs", "-o", "mode=755", "tmpfs", &folder],
        )?;
    }
    fs::create_dir_all("/var/log/libvirt/qemu")?;
    Ok(())
}

/// Guests are emulated, so that tests are the same everywhere, unless KVM is asked for. Where `/dev/kvm`
/// exists but QEMU's user may not open it, libvirt 9.0 would examine QEMU anew at every step, for
/// seconds: so there is a /dev without it. (A mount over the node would not do: libvirt carries mounts
/// below /dev along.)
fn hide_kvm() -> Result<()> {
    if !Path::new("/dev/kvm").exists() {
        return Ok(());
    }
    fs::create_dir_all("/run/dev")?;
    run(
        "mount",
        &["-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run/dev"],
    )?;
    let own = fs::metadata("/dev")?.dev();
    for entry in fs::read_dir("/dev")? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        let from = path.display().to_string();
        let to = format!("/run/dev/{}", name.to_string_lossy());
        if name == "kvm" {
            continue;
        } else if entry.metadata()?.dev() != own {
            fs::create_dir(&to)?;
            run("mount", &["--rbind", &from, &to])?;
        } else {
            run("cp", &["-a", &from, &to])?;
        }
    }
    // What lay there must go: libvirt would try to carry along mounts that are only covered.
    // One process does both: in between there is no /dev/null to start another with.
    let swap = "umount --lazy /dev 2>/dev/null; mount --move /run/dev /dev";
    run("bash", &["-c", swap])?;
    Ok(())
}

/// A fresh sysfs shows this network namespace's devices; the cgroup mounts are carried over. On a
/// machine that is there for a test alone, the network is the machine's.
fn show_own_sysfs() -> Result<()> {
    if !sandbox::is_made() {
        return Ok(());
    }
    fs::create_dir_all("/run/cgroup")?;
    run("mount", &["--rbind", "/sys/fs/cgroup", "/run/cgroup"])?;
    run("mount", &["-t", "sysfs", "sysfs", "/sys"])?;
    run("mount", &["--rbind", "/run/cgroup", "/sys/fs/cgroup"])?;
    Ok(())
}

fn write_libvirt_settings(libvirtd_conf: &str) -> Result<()> {
    for entry in fs::read_dir("/etc/libvirt").into_iter().flatten().flatten() {
        let path = entry.path();
        let removed = if path.is_dir() && !path.is_symlink() {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        };
        removed.with_context(|| path.display().to_string())?;
    }
    fs::create_dir_all("/etc/libvirt")?;
    let _ = fs::remove_dir_all("/etc/outram");
    fs::write("/etc/libvirt/qemu.conf", QEMU_CONF)?;
    fs::write("/etc/libvirt/libvirtd.conf", libvirtd_conf)?;
    Ok(())
}

fn copy_images(from: &Path) -> Result<()> {
    fs::create_dir_all(IMAGES)?;
    for name in ["vmlinux", "initrd"] {
        let source = from.join(name);
        fs::copy(&source, Path::new(IMAGES).join(name)).with_context(|| {
            format!("{} is missing: run images/build.sh first", source.display())
        })?;
    }
    fs::write(ODD_RAM_EMULATOR, include_str!("odd-ram-qemu"))?;
    fs::set_permissions(ODD_RAM_EMULATOR, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// Whether this kernel has UFFDIO_POISON.
pub fn kernel_poisons() -> Result<bool> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let mut numbers = release.split(|sign: char| !sign.is_ascii_digit());
    let mut next = || -> Result<u32> { Ok(numbers.next().context("too short")?.parse()?) };
    let version = (next()?, next()?);
    Ok(version >= (6, 6))
}
