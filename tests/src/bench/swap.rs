//! Swap of the machine's own, for the kernel's way of having less memory than is used. It is the whole
//! machine's while it is there, and goes when it is dropped.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};

use super::layout::pin;
use crate::hermetic::command::{run, wait_for};
use crate::hermetic::sandbox::find_program;

/// Network block devices that are looked at.
const NBD_DEVICES: usize = 16;
/// What is exported.
const EXPORT: &str = "swap";
/// Of nbd-client: to speak to the kernel by ioctl, for netlink's way is closed to namespaces of the network.
const BY_IOCTL: &str = "-nonetlink";
/// Longest wait for nbd's programs.
const NBD_START: Duration = Duration::from_secs(60);

const ZRAM_CONTROL: &str = "/sys/class/zram-control";

/// Starts of the names of files in the folder: swap files, notes of RAM disks, and of network block
/// devices, which are called as these are.
const FILE: &str = "swap-";
const NOTE: &str = "zram-";
const NBD: &str = "nbd";

/// The right to make swap, of one run at a time.
#[derive(Debug)]
pub struct Reserved {
    folder: PathBuf,
    _lock: File,
}

impl Reserved {
    /// Takes the right, and away what killed runs have left of the swap that they made in this folder.
    pub fn new(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let lock = File::create(folder.join("lock")).context("a file to lock")?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .context("another run is measuring swap")?;
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            // Dropped at once, which turns it off and removes it.
            if let Some(number) = name.strip_prefix(NOTE) {
                drop(Swap::on_zram(folder, number));
            } else if name.starts_with(NBD) {
                drop(Swap::on_nbd(folder, &name));
            } else if name.starts_with(FILE) {
                drop(Swap {
                    device: path,
                    kind: Kind::File,
                });
            }
        }
        Ok(Self {
            folder: folder.to_owned(),
            _lock: lock,
        })
    }
}

/// Where pages are swapped to.
#[derive(Debug)]
pub struct Swap {
    device: PathBuf,
    kind: Kind,
}

/// What there is beside the device; a note is for who has to clean up.
#[derive(Debug)]
enum Kind {
    File,
    /// A RAM disk of this number.
    Zram {
        number: String,
        note: PathBuf,
    },
    /// A network block device, and its server and client, which end with us.
    Nbd {
        processes: Vec<Child>,
        note: PathBuf,
    },
}

/// Where a network block device's bytes are kept.
#[derive(Debug)]
pub struct NbdPlace<'a> {
    /// A file in memory, which is made.
    pub file: PathBuf,
    /// Where the server listens: an address and a port.
    pub address: String,
    /// Processors of the server.
    pub cpus: &'a [usize],
}

impl Swap {
    /// A compressed RAM disk, noted in the folder. The error says why there can be none.
    pub fn zram(reserved: &Reserved, bytes: u64) -> Result<Self> {
        let add = Path::new(ZRAM_CONTROL).join("hot_add");
        let text = fs::read_to_string(&add)
            .with_context(|| format!("this kernel makes no zram devices ({})", add.display()))?;
        // From here on, it goes with this.
        let swap = Self::on_zram(&reserved.folder, text.trim());
        swap.leave_note()?;
        let name = format!("zram{}", text.trim());
        let size = format!("/sys/block/{name}/disksize");
        fs::write(&size, bytes.to_string()).with_context(|| size.clone())?;
        swap.make_node(&name)?;
        swap.turn_on()?;
        Ok(swap)
    }

    fn on_zram(folder: &Path, number: &str) -> Self {
        Self {
            device: PathBuf::from(format!("/dev/zram{number}")),
            kind: Kind::Zram {
                number: number.to_owned(),
                note: folder.join(format!("{NOTE}{number}")),
            },
        }
    }

    /// A network block device whose server keeps its bytes in a file in memory, noted in the folder. The
    /// error says why there can be none.
    ///
    /// Should its server be killed, whatever this machine has swapped out by then is lost: so nobody has
    /// this without asking for it.
    pub fn nbd(reserved: &Reserved, bytes: u64, place: &NbdPlace<'_>) -> Result<Self> {
        for tool in ["nbd-server", "nbd-client"] {
            let path = find_program(tool);
            path.with_context(|| format!("not installed: {tool} (package {tool})"))?;
        }
        let name = free_nbd()?;
        let mut swap = Self::on_nbd(&reserved.folder, &name);
        swap.leave_note()?;
        swap.make_node(&name)?;
        let Kind::Nbd { processes, .. } = &mut swap.kind else {
            bail!("it is no network block device");
        };
        processes.push(serve_nbd(bytes, place)?);
        processes.push(connect_nbd(&name, place)?);
        swap.turn_on()?;
        Ok(swap)
    }

    fn on_nbd(folder: &Path, name: &str) -> Self {
        Self {
            device: Path::new("/dev").join(name),
            kind: Kind::Nbd {
                processes: Vec::new(),
                note: folder.join(name),
            },
        }
    }

    fn leave_note(&self) -> Result<()> {
        match &self.kind {
            Kind::File => Ok(()),
            Kind::Zram { note, .. } | Kind::Nbd { note, .. } => {
                fs::write(note, "").with_context(|| note.display().to_string())
            }
        }
    }

    /// Makes the device's file where nobody else does.
    fn make_node(&self, name: &str) -> Result<()> {
        if !self.device.exists() {
            let device = fs::read_to_string(format!("/sys/block/{name}/dev"))?;
            let (major, minor) = device.trim().split_once(':').context("a device's number")?;
            run("mknod", &[&self.path(), "b", major, minor])?;
        }
        Ok(())
    }

    /// A file in the folder. The error says why there can be none.
    pub fn file(reserved: &Reserved, bytes: u64) -> Result<Self> {
        let device = reserved
            .folder
            .join(format!("{FILE}{}", std::process::id()));
        let file = File::create(&device).with_context(|| device.display().to_string())?;
        let swap = Self {
            device,
            kind: Kind::File,
        };
        fs::set_permissions(&swap.device, Permissions::from_mode(0o600))?;
        fallocate(&file, FallocateFlags::empty(), 0, bytes).context("allocating a swap file")?;
        swap.turn_on()?;
        Ok(swap)
    }

    fn path(&self) -> String {
        self.device.display().to_string()
    }

    fn turn_on(&self) -> Result<()> {
        run("mkswap", &[&self.path()])?;
        run("swapon", &[&self.path()])?;
        Ok(())
    }

    /// Whether it is in use, by the kernel's own list.
    pub fn is_on(&self) -> Result<bool> {
        let name = self
            .device
            .file_name()
            .context("a name")?
            .to_string_lossy()
            .into_owned();
        let list = fs::read_to_string("/proc/swaps").context("/proc/swaps")?;
        let is_it = |line: &str| {
            line.split_whitespace()
                .next()
                .is_some_and(|path| path.ends_with(&name))
        };
        Ok(list.lines().any(is_it))
    }

    /// Demands that it is the only swap: another would take the pages.
    pub fn demand_alone(&self) -> Result<()> {
        let list = fs::read_to_string("/proc/swaps").context("/proc/swaps")?;
        ensure!(self.is_on()?, "it is not in use: {list}");
        let others = list.lines().skip(1).count() - 1;
        ensure!(
            others == 0,
            "this machine has swap of its own, which would be measured: {list}"
        );
        Ok(())
    }

    fn turn_off(&mut self) -> Result<()> {
        if self.is_on()? {
            run("swapoff", &[&self.path()])?;
        }
        let path = self.path();
        match &mut self.kind {
            Kind::Zram { number, note } => {
                let reset = PathBuf::from(format!("/sys/block/zram{number}/reset"));
                if reset.exists() {
                    fs::write(&reset, "1").with_context(|| reset.display().to_string())?;
                    let remove = Path::new(ZRAM_CONTROL).join("hot_remove");
                    fs::write(&remove, number).with_context(|| remove.display().to_string())?;
                }
                fs::remove_file(&*note).with_context(|| note.display().to_string())
            }
            Kind::Nbd { processes, note } => {
                run("nbd-client", &[BY_IOCTL, "-d", &path])?;
                // The client ends by itself once its device is disconnected; the server does not.
                for process in processes.iter_mut() {
                    let _ = process.kill();
                    let _ = process.wait();
                }
                fs::remove_file(&*note).with_context(|| note.display().to_string())
            }
            Kind::File => fs::remove_file(&self.device).with_context(|| path),
        }
    }
}

/// The name of a network block device that nobody uses.
fn free_nbd() -> Result<String> {
    if !Path::new("/sys/block/nbd0").exists() {
        run("modprobe", &["nbd"]).context("this kernel has no network block devices")?;
    }
    let is_free = |name: &String| {
        let device = Path::new("/sys/block").join(name);
        // The process that serves a device in use (Documentation/ABI/testing/sysfs-block has none of it:
        // drivers/block/nbd.c, pid_show).
        device.exists() && !device.join("pid").exists()
    };
    let mut names = (0..NBD_DEVICES).map(|number| format!("{NBD}{number}"));
    let found = names.find(is_free);
    found.context("every network block device is in use")
}

fn serve_nbd(bytes: u64, place: &NbdPlace<'_>) -> Result<Child> {
    let (host, port) = place.address.rsplit_once(':').context("a port")?;
    let file = File::create(&place.file).with_context(|| place.file.display().to_string())?;
    file.set_len(bytes)?;
    let settings = place.file.with_extension("conf");
    let exported = place.file.display();
    let text = format!(
        "[generic]\nlistenaddr = {host}\nport = {port}\n[{EXPORT}]\nexportname = {exported}\n"
    );
    fs::write(&settings, text).with_context(|| settings.display().to_string())?;
    // It closes every descriptor that it might have, before it listens and for each client.
    let server = Command::new("prlimit")
        .args(["--nofile=1024", "nbd-server", "-d", "-C"])
        .arg(&settings)
        .spawn()
        .context("starting nbd-server")?;
    // What it starts for a client runs there, too.
    pin(server.id(), place.cpus)?;
    let port: u16 = port.parse().context("a port")?;
    wait_for("nbd-server to listen", NBD_START, || {
        let sockets = fs::read_to_string("/proc/net/tcp")?;
        Ok(is_listening(&sockets, port).then_some(()))
    })?;
    Ok(server)
}

/// Whether anybody listens at a port, by the kernel's table of sockets (proc_net_tcp(5)). To connect tells as
/// much, but the server ends with a client that says nothing.
fn is_listening(sockets: &str, port: u16) -> bool {
    const LISTENS: &str = "0A";
    let local = format!(":{port:04X}");
    sockets.lines().any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        fields.next().is_some_and(|field| field.ends_with(&local)) && fields.nth(1) == Some(LISTENS)
    })
}

/// It stays there as long as the device is connected.
fn connect_nbd(name: &str, place: &NbdPlace<'_>) -> Result<Child> {
    let (host, port) = place.address.rsplit_once(':').context("a port")?;
    let device = format!("/dev/{name}");
    let client = Command::new("nbd-client")
        .args([BY_IOCTL, "-nofork", "-swap", "-b", "4096"])
        .args(["-N", EXPORT, host, port, &device])
        .stdout(Stdio::null())
        .spawn()
        .context("starting nbd-client")?;
    wait_for("nbd-client to connect", NBD_START, || {
        let size = fs::read_to_string(format!("/sys/block/{name}/size"))?;
        Ok((size.trim() != "0").then_some(()))
    })?;
    Ok(client)
}

impl Drop for Swap {
    fn drop(&mut self) {
        if let Err(error) = self.turn_off() {
            eprintln!("swap at {} stays behind: {error:#}", self.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_listened_at_where_the_kernel_says_so_of_that_very_port() {
        let sockets = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:2A93 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 15 1
   1: 0100007F:2A94 0100007F:2A95 01 00000000:00000000 00:00000000 00000000     0        0 16 1
";
        assert!(is_listening(sockets, 0x2a93));
        assert!(!is_listening(sockets, 0x2a94), "it is connected");
        assert!(!is_listening(sockets, 0x2a95), "another's");
        assert!(!is_listening("", 0x2a93));
    }
}
