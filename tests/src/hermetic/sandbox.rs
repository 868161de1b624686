//! The namespaces that everything runs in, and their end.
//!
//! Three processes of the same program: the *outside* one stays in the machine's namespaces, waits,
//! turns Ctrl-C into the end of everything and removes what lies outside of the namespaces
//! (cgroups). It starts, through `unshare`, an *init* that is process 1 of the new PID namespace and
//! reaps orphans; which starts the *inside* one, where [`enter`] returns to its caller.
//!
//! Each dies with its parent (`PR_SET_PDEATHSIG`), and when process 1 dies the kernel kills the whole
//! namespace and drops its mounts: so SIGKILL of the outside process, too, leaves no process, mount
//! or file behind; only empty cgroups, which the next run or `make clean-state` removes.

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, wait};
use nix::unistd::Pid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Tells a process of ours which of the three it is.
const STAGE: &str = "OUTRAM_SANDBOX_STAGE";

/// For the environment of a test on a machine that is there for it alone, and needs no sandbox: it finds
/// itself inside of one.
pub const NONE: &str = "OUTRAM_SANDBOX_STAGE=inside";

/// Names the outside process to the others: cgroups are named for it.
const OWNER: &str = "OUTRAM_SANDBOX_OWNER";

/// Exit status after Ctrl-C, as shells have it.
const INTERRUPTED: u8 = 130;

/// Start of the names of our cgroups; the rest is the outside process's id.
const CGROUP_PREFIX: &str = "outram-test-";

/// Where [`enter`] returned.
#[derive(Debug)]
pub enum Side {
    /// Inside of the sandbox: go on.
    Inside,
    /// Outside, after everything has ended: exit with this status.
    Outside(u8),
}

/// A program and the package that has it.
type Tool = (&'static str, &'static str);

/// What a sandbox itself needs.
const TOOLS: [Tool; 3] = [
    ("unshare", "util-linux"),
    ("setpriv", "util-linux"),
    ("ip", "iproute2"),
];

/// What a private libvirt needs besides.
const LIBVIRT: [Tool; 4] = [
    ("libvirtd", "libvirt-daemon"),
    ("virtlogd", "libvirt-daemon"),
    ("virsh", "libvirt-clients"),
    ("qemu-system-x86_64", "qemu-system-x86"),
];

/// Why no sandbox with libvirt can be made here; `None` where it can.
pub fn obstacle() -> Option<String> {
    obstacle_with(&LIBVIRT)
}

/// Why no sandbox can be made here for tests that need no libvirt; `None` where it can.
pub fn obstacle_without_libvirt() -> Option<String> {
    obstacle_with(&[])
}

fn obstacle_with(more: &[Tool]) -> Option<String> {
    if !nix::unistd::Uid::effective().is_root() {
        return Some("root is needed for namespaces, libvirtd and userfaultfd".to_owned());
    }
    let missing: Vec<String> = TOOLS
        .iter()
        .chain(more)
        .filter(|(tool, _)| find_program(tool).is_none())
        .map(|(tool, package)| format!("{tool} (package {package})"))
        .collect();
    if !missing.is_empty() {
        return Some(format!("not installed: {}", missing.join(", ")));
    }
    if !Path::new("/dev/userfaultfd").exists() {
        return Some(
            "/dev/userfaultfd is missing: Linux 6.1 or newer with CONFIG_USERFAULTFD is needed"
                .to_owned(),
        );
    }
    let probe = Command::new("unshare")
        .args(["--mount", "--pid", "--net", "--ipc", "--fork"])
        .args(["--mount-proc", "true"])
        .output();
    match probe {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(format!(
            "new namespaces are not allowed here: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        )),
        Err(error) => Some(format!("unshare could not be run: {error}")),
    }
}

/// Looks a program up as a shell would, and in the folders of system programs.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/bin:/bin"));
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|candidate| candidate.is_file())
}

/// A note of the outside process for `make clean-state`: its id, and its start time so that another
/// process with the same id is never taken for it. Removed when dropped.
#[derive(Debug)]
struct Record(PathBuf);

impl Record {
    fn write() -> Result<Self> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/sandboxes");
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let stat = fs::read_to_string("/proc/self/stat").context("/proc/self/stat")?;
        // Field 22; the second, in parentheses, may hold spaces (proc_pid_stat(5)).
        let start_time = stat
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.split(' ').nth(19))
            .context("/proc/self/stat has no start time")?;
        let path = folder.join(std::process::id().to_string());
        fs::write(&path, start_time).with_context(|| path.display().to_string())?;
        Ok(Self(path))
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        // clean-state may have removed it.
        let _ = fs::remove_file(&self.0);
    }
}

/// Enters the sandbox: runs this program again within it, with the same arguments.
pub fn enter() -> Result<Side> {
    match std::env::var(STAGE).ok().as_deref() {
        None => outside().map(Side::Outside),
        Some("init") => init().map(Side::Outside),
        Some("inside") => Ok(Side::Inside),
        Some(other) => bail!("{STAGE}={other} is not a stage; unset it"),
    }
}

/// Whether this process is in the machine's namespaces: [`enter`] was or will be called in it.
pub fn is_outside() -> bool {
    std::env::var_os(STAGE).is_none()
}

/// Whether this is a sandbox that was [entered](enter), and no machine that is there for a test alone.
pub(super) fn is_made() -> bool {
    std::env::var_os(OWNER).is_some()
}

/// The cgroup name that this run may use below any cgroup mount.
pub fn cgroup_name() -> String {
    let owner = std::env::var(OWNER).unwrap_or_else(|_| std::process::id().to_string());
    format!("{CGROUP_PREFIX}{owner}")
}

fn outside() -> Result<u8> {
    remove_stale_cgroups();
    let _record = Record::write()?;
    // When `unshare` is killed, process 1 of the namespace becomes ours to reap.
    nix::sys::prctl::set_child_subreaper(true).context("becoming a reaper of orphans")?;
    let program = std::env::current_exe().context("this program's own path")?;
    let signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("signal handlers")?;
    let mut child = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "--", "unshare"])
        .args(["--mount", "--pid", "--net", "--ipc", "--fork"])
        .args(["--kill-child=KILL", "--mount-proc", "--"])
        .arg(program)
        .args(std::env::args_os().skip(1))
        .env(STAGE, "init")
        .env(OWNER, std::process::id().to_string())
        .spawn()
        .context("setpriv could not be run")?;
    let interrupted = end_on_signal(signals, &child);
    let status = child.wait().context("waiting for the sandbox")?;
    // Ends with ECHILD: once process 1 is reaped, nothing of the namespace is left.
    while wait().is_ok() {}
    remove_stale_cgroups();
    if interrupted.load(Ordering::Relaxed) {
        return Ok(INTERRUPTED);
    }
    Ok(code_of(status))
}

/// Ends the sandbox on the first signal; the flag then says so.
fn end_on_signal(mut signals: Signals, child: &Child) -> Arc<AtomicBool> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&interrupted);
    let child = Pid::from_raw(child.id() as i32);
    std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            flag.store(true, Ordering::Relaxed);
            eprintln!("interrupted: ending the sandbox and all in it");
            // The only failure is that it has ended by itself.
            let _ = kill(child, Signal::SIGKILL);
        }
    });
    interrupted
}

fn code_of(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal))
        .unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

/// Process 1 of the namespace: starts the inside process, reaps everybody, ends with it.
fn init() -> Result<u8> {
    let program = std::env::current_exe().context("this program's own path")?;
    let inside = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "--"])
        .arg(program)
        .args(std::env::args_os().skip(1))
        .env(STAGE, "inside")
        .spawn()
        .context("setpriv could not be run")?;
    let inside = Pid::from_raw(inside.id() as i32);
    loop {
        match wait() {
            Ok(WaitStatus::Exited(pid, code)) if pid == inside => {
                return Ok(u8::try_from(code).unwrap_or(1));
            }
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == inside => {
                return Ok(128 + signal as u8);
            }
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => bail!("process 1 lost its child: {error}"),
        }
    }
}

/// Folders in which cgroups can be made: version 2, and version 1's memory controller.
pub fn cgroup_mounts() -> Vec<(PathBuf, u8)> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(' ');
            let (_, at, kind, options) = (
                fields.next()?,
                fields.next()?,
                fields.next()?,
                fields.next()?,
            );
            match kind {
                "cgroup2" => Some((PathBuf::from(at), 2)),
                "cgroup" if options.split(',').any(|option| option == "memory") => {
                    Some((PathBuf::from(at), 1))
                }
                _ => None,
            }
        })
        .collect()
}

/// Removes cgroups of runs whose outside process is gone (or is this one). They are empty by then.
fn remove_stale_cgroups() {
    for (mount, _) in cgroup_mounts() {
        let Ok(entries) = fs::read_dir(&mount) else {
            continue;
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let owner = name
                .to_str()
                .and_then(|name| name.strip_prefix(CGROUP_PREFIX))
                .and_then(|owner| owner.parse::<u32>().ok());
            let stale = owner.is_some_and(|owner| {
                owner == std::process::id() || !Path::new(&format!("/proc/{owner}")).exists()
            });
            if stale {
                // Still busy for a moment, or not ours to remove: the next run tries again.
                let _ = fs::remove_dir(entry.path());
            }
        }
    }
}
