//! Swap of the machine's own, for the kernel's way of having less memory than is used. It is the whole
//! machine's while it is there, and goes when it is dropped.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};

use crate::hermetic::command::run;

const ZRAM_CONTROL: &str = "/sys/class/zram-control";

/// Starts of the names of files in the folder: swap files, and notes of RAM disks.
const FILE: &str = "swap-";
const NOTE: &str = "zram-";

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
            } else if name.starts_with(FILE) {
                drop(Swap {
                    device: path,
                    zram: None,
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
    /// The number of a RAM disk, and a note of it for who has to clean up.
    zram: Option<(String, PathBuf)>,
}

impl Swap {
    /// A compressed RAM disk, noted in the folder. The error says why there can be none.
    pub fn zram(reserved: &Reserved, bytes: u64) -> Result<Self> {
        let add = Path::new(ZRAM_CONTROL).join("hot_add");
        let text = fs::read_to_string(&add)
            .with_context(|| format!("this kernel makes no zram devices ({})", add.display()))?;
        // From here on, it goes with this.
        let swap = Self::on_zram(&reserved.folder, text.trim());
        if let Some((_, note)) = &swap.zram {
            fs::write(note, "").with_context(|| note.display().to_string())?;
        }
        let name = format!("zram{}", text.trim());
        let size = format!("/sys/block/{name}/disksize");
        fs::write(&size, bytes.to_string()).with_context(|| size.clone())?;
        if !swap.device.exists() {
            let device = fs::read_to_string(format!("/sys/block/{name}/dev"))?;
            let (major, minor) = device.trim().split_once(':').context("a device's number")?;
            run("mknod", &[&swap.path(), "b", major, minor])?;
        }
        swap.turn_on()?;
        Ok(swap)
    }

    fn on_zram(folder: &Path, number: &str) -> Self {
        Self {
            device: PathBuf::from(format!("/dev/zram{number}")),
            zram: Some((number.to_owned(), folder.join(format!("{NOTE}{number}")))),
        }
    }

    /// A file in the folder. The error says why there can be none.
    pub fn file(reserved: &Reserved, bytes: u64) -> Result<Self> {
        let device = reserved
            .folder
            .join(format!("{FILE}{}", std::process::id()));
        let file = File::create(&device).with_context(|| device.display().to_string())?;
        let swap = Self { device, zram: None };
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

    fn turn_off(&self) -> Result<()> {
        if self.is_on()? {
            run("swapoff", &[&self.path()])?;
        }
        match &self.zram {
            Some((number, note)) => {
                let reset = PathBuf::from(format!("/sys/block/zram{number}/reset"));
                if reset.exists() {
                    fs::write(&reset, "1").with_context(|| reset.display().to_string())?;
                    let remove = Path::new(ZRAM_CONTROL).join("hot_remove");
                    fs::write(&remove, number).with_context(|| remove.display().to_string())?;
                }
                fs::remove_file(note).with_context(|| note.display().to_string())
            }
            None => fs::remove_file(&self.device).with_context(|| self.path()),
        }
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        if let Err(error) = self.turn_off() {
            eprintln!("swap at {} stays behind: {error:#}", self.path());
        }
    }
}
