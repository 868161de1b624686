//! Guests of the small VMM with real backends and memory servers, for tests and benchmarks: a [`Lab`]
//! has the certificates and places in it, a [`Guest`] is a VMM with its backend, [`Control`] asks that.
//!
//! It lives in a [sandbox](crate::hermetic::sandbox), whose end is the end of all of it.

mod backend;
mod control;
mod guest;

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use outram_wire::pki::{self, Kind, Order};

use crate::hermetic::command::{run, wait_for};
use crate::hermetic::server::{Launch, MemServer};

pub use control::Control;
pub use guest::{Guest, Wish, demand_gone, demand_sound, demand_unmounted};

/// Everything lies on a tmpfs of the sandbox's own, and goes with it.
const ROOT: &str = "/run";

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// The smallest limit that is accepted, and what every test tunes down to.
pub const LEAST: u64 = 16 << 20;

/// The smallest limit of a guest with huge pages.
pub const LEAST_HUGE: u64 = 64 << 20;

/// Slabs so small that little memory makes many of them.
pub const SLAB: u64 = 1 << 20;

/// Long enough for anything that works at all on a loaded machine.
pub const LONG: Duration = Duration::from_secs(180);

/// In which nothing may happen, where nothing is to happen.
pub const WHILE: Duration = Duration::from_millis(700);

/// The sandbox's furniture.
pub struct Lab {
    programs: PathBuf,
    host: IpAddr,
    next_port: AtomicU16,
}

impl Lab {
    /// Makes the machine's state private and issues certificates. Call it once, in the sandbox; the
    /// others of our programs are beside this one.
    pub fn new(program: &Path) -> Result<Self> {
        run("ip", &["link", "set", "lo", "up"])?;
        Self::at(program, Ipv4Addr::LOCALHOST.into())
    }

    /// The same with servers at another address of this machine's.
    pub fn at(program: &Path, host: IpAddr) -> Result<Self> {
        let programs = program.parent().context("a program is in a folder")?;
        run("mount", &["-t", "tmpfs", "-o", "mode=755", "tmpfs", ROOT])?;
        let own = host.to_string();
        for folder in ["pki", "other-pki"] {
            let names = ["127.0.0.1", "localhost", &own];
            certificates(&Path::new(ROOT).join(folder), &names)?;
        }
        // No settings of this machine's are to matter.
        fs::write(Path::new(ROOT).join("backend.toml"), "")?;
        Ok(Self {
            programs: programs.to_owned(),
            host,
            next_port: AtomicU16::new(7100),
        })
    }

    /// Path of one of our programs.
    pub fn program(&self, name: &str) -> Result<PathBuf> {
        let path = self.programs.join(name);
        ensure!(
            path.is_file(),
            "{} is not built: run 'cargo build --workspace' first",
            path.display()
        );
        Ok(path)
    }

    /// The address of this machine's that servers are at.
    pub fn host(&self) -> IpAddr {
        self.host
    }

    /// An address that nobody else was given.
    pub fn address(&self) -> String {
        loop {
            let port = self.next_port.fetch_add(1, Ordering::Relaxed);
            let address = SocketAddr::new(self.host, port);
            // Outside of a network of our own, others may listen too.
            if TcpListener::bind(address).is_ok() {
                return address.to_string();
            }
        }
    }

    /// A file or folder of the lab.
    pub fn path(&self, name: &str) -> PathBuf {
        Path::new(ROOT).join(name)
    }

    /// A memory server that lends a GiB.
    pub fn server(&self) -> Result<MemServer> {
        self.server_with(&["--memory", "1GiB"])
    }

    /// A memory server with these arguments.
    pub fn server_with(&self, arguments: &[&str]) -> Result<MemServer> {
        self.server_of(SLAB, arguments)
    }

    /// A memory server with slabs of this size, and these arguments.
    pub fn server_of(&self, slab_bytes: u64, arguments: &[&str]) -> Result<MemServer> {
        self.server_by(self.program("outram-memserver")?, slab_bytes, arguments)
    }

    /// A memory server that is this program.
    pub fn server_by(
        &self,
        program: PathBuf,
        slab_bytes: u64,
        arguments: &[&str],
    ) -> Result<MemServer> {
        let address = self.address();
        MemServer::launch(Launch {
            program,
            metrics: self.address(),
            pki: self.path("pki"),
            log: self.path(&format!("memserver-{address}")),
            slab_bytes,
            arguments: arguments.iter().map(|&word| word.to_owned()).collect(),
            address,
        })
    }

    /// Arguments of a backend that every guest's has.
    pub fn backend_arguments(&self, uuid: &str, ram_bytes: u64) -> Vec<String> {
        let pki = |file: &str| self.path("pki").join(file).display().to_string();
        [
            ("--uuid", uuid.to_owned()),
            ("--name", "small".to_owned()),
            ("--ram", ram_bytes.to_string()),
            ("--config", self.path("backend.toml").display().to_string()),
            ("--run-dir", self.path("outram").display().to_string()),
            ("--tls-ca", pki("ca.pem")),
            ("--tls-cert", pki("client.pem")),
            ("--tls-key", pki("client.key")),
        ]
        .into_iter()
        .flat_map(|(flag, value)| [flag.to_owned(), value])
        .collect()
    }

    /// An UUID that nobody else was given.
    pub fn uuid(&self) -> String {
        let number = self.next_port.fetch_add(1, Ordering::Relaxed);
        format!("00000000-0000-4000-8000-{number:012}")
    }
}

/// Certificates of a server at these addresses, and of a client.
pub fn certificates(folder: &Path, addresses: &[&str]) -> Result<()> {
    pki::init(folder)?;
    let addresses = addresses
        .iter()
        .map(|&address| address.to_owned())
        .collect();
    for (kind, name, addresses) in [
        (Kind::Server, "memserver", addresses),
        (Kind::Client, "client", Vec::new()),
    ] {
        let order = Order {
            kind,
            name,
            addresses: &addresses,
            days: 2,
        };
        pki::issue(folder, &order)?;
    }
    Ok(())
}

/// Stops a memory server with SIGSTOP; returns once all of its threads stand still.
pub fn halt(server: &MemServer) -> Result<()> {
    server.signal(Signal::SIGSTOP)?;
    let tasks = format!("/proc/{}/task", server.pid());
    wait_for("the memory server to stop", LONG, || {
        for task in fs::read_dir(&tasks)? {
            let stat = fs::read_to_string(task?.path().join("stat"))?;
            let (_, rest) = stat.rsplit_once(") ").context("a name")?;
            if !rest.starts_with('T') {
                return Ok(None);
            }
        }
        Ok(Some(()))
    })
}
