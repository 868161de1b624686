//! What the tests with the small VMM share: programs, sockets, and guest RAM without a pager.
#![allow(dead_code, unreachable_pub)]

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use outram_backend::device::{
    Device, DeviceConfig, GuestMemory, HostRange, PinError, Pinned, TableRegion, wait_first_message,
};
use outram_backend::handover::discover::{self, RamBlock};
use outram_backend::handover::{self, MemfdId, Options, Vmm};
use outram_backend::interrupt::Interrupt;
use outram_tests::small_vmm::client::{Plan, SmallVmm};
use outram_wire::units::PageSize;
use vmm_sys_util::seek_hole::SeekHole;

pub const PAGE: u64 = 4096;
/// How long a VMM may take to say its first word.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A program of this workspace; built with it.
pub fn program(name: &str) -> Result<PathBuf> {
    let this = std::env::current_exe()?;
    let folder = this.parent().context("a folder")?;
    let folder = match folder.ends_with("deps") {
        true => folder.parent().context("a folder")?,
        false => folder,
    };
    let path = folder.join(name);
    ensure!(
        path.is_file(),
        "{} is not built: run 'cargo build --workspace' first",
        path.display()
    );
    Ok(path)
}

/// Options of a hand-over by the real injector.
pub fn options() -> Result<Options> {
    Ok(Options {
        injector: program("outram-backend")?,
        ..Options::default()
    })
}

/// A socket in a directory of its own, open to every user.
pub struct Socket {
    pub path: PathBuf,
    pub listener: UnixListener,
    _directory: tempfile::TempDir,
}

impl Socket {
    pub fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let open = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        };
        open(directory.path(), 0o755)?;
        let path = directory.path().join("vhost.sock");
        let listener = UnixListener::bind(&path)?;
        open(&path, 0o666)?;
        Ok(Self {
            path,
            listener,
            _directory: directory,
        })
    }

    /// The next connection, once its first message is there, and who it is.
    pub fn accept(&self) -> Result<(UnixStream, Vmm)> {
        let (stream, _) = self.listener.accept()?;
        wait_first_message(&stream, PATIENCE)?;
        let vmm = Vmm::open(handover::peer(&stream)?.pid)?;
        Ok((stream, vmm))
    }
}

/// A small VMM that connects to this socket.
pub fn small_vmm(
    socket: &Socket,
    ram: &[&str],
    vcpus: usize,
    user: Option<u32>,
) -> Result<SmallVmm> {
    SmallVmm::start(&Plan {
        program: Path::new(env!("CARGO_BIN_EXE_small-vmm")),
        ram,
        socket: Some(&socket.path),
        vcpus,
        names_kvm: false,
        user,
    })
}

/// Guest RAM of a VMM that nobody pages: a pin makes holes into pages of zeros.
pub struct PlainRam {
    vmm: Vmm,
    blocks: Mutex<Vec<RamBlock>>,
    /// Pins held.
    pub pins: Arc<AtomicUsize>,
    /// Pages of one pin at most.
    pub most: usize,
}

struct Pin(Arc<AtomicUsize>);

impl Pinned for Pin {}

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl PlainRam {
    pub fn new(vmm: Vmm, most: usize) -> Result<Self> {
        let blocks = discover::guest_ram(&vmm)?;
        Ok(Self {
            vmm,
            blocks: Mutex::new(blocks),
            pins: Arc::default(),
            most,
        })
    }

    fn populate(&self, range: &HostRange) -> Result<(), PinError> {
        let blocks = self.blocks.lock().expect("no holder panics");
        let block = blocks
            .iter()
            .find(|block| block.id == range.memfd)
            .ok_or_else(|| PinError::Unknown(format!("{} is no guest RAM", range.memfd)))?;
        let first = range.file_offset / PAGE;
        let end = (range.file_offset + range.length).div_ceil(PAGE);
        for page in first..end {
            let mut file = block.memfd.try_clone().expect("descriptors");
            let data = file.seek_data(page * PAGE).expect("a memfd");
            if data != Some(page * PAGE) {
                let zeros = [0; PAGE as usize];
                block.memfd.write_all_at(&zeros, page * PAGE).expect("room");
            }
        }
        Ok(())
    }
}

impl GuestMemory for PlainRam {
    fn pin(
        &self,
        ranges: &[HostRange],
        _write: bool,
        _interrupt: &Interrupt<'_>,
    ) -> Result<Box<dyn Pinned>, PinError> {
        let page_of = |at: u64| at / PAGE;
        let pages: u64 = ranges
            .iter()
            .map(|range| {
                page_of(range.file_offset + range.length - 1) - page_of(range.file_offset) + 1
            })
            .sum();
        assert!(pages as usize <= self.most, "a pin of {pages} pages");
        for range in ranges {
            self.populate(range)?;
        }
        self.pins.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(Pin(Arc::clone(&self.pins))))
    }

    fn confirm(&self, regions: &[TableRegion]) -> Result<(), PinError> {
        let found =
            discover::guest_ram(&self.vmm).map_err(|error| PinError::Unknown(error.to_string()))?;
        let mut blocks = self.blocks.lock().expect("no holder panics");
        *blocks = found;
        for region in regions {
            if !blocks.iter().any(|block| block.id == region.memfd) {
                let text = format!("{} is no guest RAM", region.memfd);
                return Err(PinError::Unknown(text));
            }
        }
        Ok(())
    }

    fn is_foreign(&self, _memfd: MemfdId) -> bool {
        false
    }

    fn page_size(&self) -> PageSize {
        PageSize::BASE
    }

    fn max_pages_per_pin(&self) -> usize {
        self.most
    }
}

/// A device for a VMM, over unpaged RAM.
pub fn device(vmm: Vmm, most: usize) -> Result<(Arc<Device>, Arc<PlainRam>)> {
    let ram = Arc::new(PlainRam::new(vmm, most)?);
    let guest = "123e4567-e89b-12d3-a456-426614174000".parse()?;
    let device = Device::new(DeviceConfig::new(guest), Arc::clone(&ram) as _)?;
    Ok((Arc::new(device), ram))
}

/// Numbers of a process's open descriptors.
pub fn descriptors(pid: i32) -> Result<usize> {
    Ok(std::fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}
