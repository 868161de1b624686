//! An RDMA device of the kernel's own over a network device.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::command::{run, wait_for};

use outram_tests::small_lab::LONG;

/// A network device made for one, with an address, and the other end of its cable.
const NETWORK: &str = "roce1";
const ADDRESS: &str = "10.77.0.1/24";
const FAR: &str = "roce1-far";
const FAR_ADDRESS: &str = "10.77.0.2/24";

/// The device; gone when dropped, once nobody uses it.
pub(crate) struct SoftRoce {
    name: &'static str,
    network: &'static str,
    /// Whether the network was made for it, and goes with it.
    owns_network: bool,
}

impl SoftRoce {
    /// Over the loopback device, whose address all servers here have.
    pub(crate) fn on_loopback() -> Result<Self> {
        Self {
            name: "rxe0",
            network: "lo",
            owns_network: false,
        }
        .added()
    }

    /// Over a network device of its own, with an address of its own.
    pub(crate) fn apart() -> Result<Self> {
        let pair = ["type", "veth", "peer", "name", FAR];
        run("ip", &[&["link", "add", NETWORK][..], &pair].concat())?;
        let device = Self {
            name: "rxe1",
            network: NETWORK,
            owns_network: true,
        };
        run("ip", &["link", "set", FAR, "up"])?;
        device.set_up(true)?;
        device.added()
    }

    /// Two, each in working order and with an address, of which neither finds the other: the kernel tries
    /// in vain to resolve the one's address from the other, so that queue pairs cannot be joined.
    pub(crate) fn strangers() -> Result<[Self; 2]> {
        let near = Self::apart()?;
        run("ip", &["addr", "add", FAR_ADDRESS, "dev", FAR])?;
        let far = Self {
            name: "rxe2",
            network: FAR,
            owns_network: false,
        };
        Ok([near, far.added()?])
    }

    fn added(self) -> Result<Self> {
        self.add()?;
        Ok(self)
    }

    /// Adds it, at first or once it was deleted.
    pub(crate) fn add(&self) -> Result<()> {
        let link = ["link", "add", self.name, "type", "rxe", "netdev"];
        run("rdma", &[&link[..], &[self.network]].concat()).map(drop)
    }

    /// Deletes it; returns once nobody has it open. Whoever waits in it for a device in use cannot be killed,
    /// and is left behind.
    pub(crate) fn delete(&self) -> Result<()> {
        let mut deleting = Command::new("rdma")
            .args(["link", "delete", self.name])
            .spawn()
            .context("rdma could not be run")?;
        let ended = wait_for("an RDMA device to be let go", LONG, || {
            Ok(deleting.try_wait()?)
        })?;
        ensure!(ended.success(), "{} is not deleted: {ended}", self.name);
        Ok(())
    }

    /// Its name.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// What a guest's status calls it.
    pub(crate) fn transport(&self) -> String {
        format!("RDMA ({})", self.name)
    }

    /// Takes the network that was made for it from under it, or gives it back.
    pub(crate) fn set_up(&self, up: bool) -> Result<()> {
        ensure!(self.owns_network, "{} is everybody's", self.network);
        let state = if up { "up" } else { "down" };
        run("ip", &["link", "set", self.network, state])?;
        if up {
            // There still, or not: that is the kernel's choice.
            run("ip", &["addr", "replace", ADDRESS, "dev", self.network])?;
        }
        Ok(())
    }

    /// Its own counts, by their names.
    pub(crate) fn counters(&self) -> Result<BTreeMap<String, u64>> {
        let folder = format!("/sys/class/infiniband/{}/ports/1/hw_counters", self.name);
        let mut counters = BTreeMap::new();
        for entry in fs::read_dir(&folder).context(folder)? {
            let entry = entry?;
            let text = fs::read_to_string(entry.path())?;
            // One of them says how often they are gathered.
            if let (Ok(name), Ok(count)) = (entry.file_name().into_string(), text.trim().parse()) {
                counters.insert(name, count);
            }
        }
        Ok(counters)
    }
}

impl Drop for SoftRoce {
    fn drop(&mut self) {
        // One that somebody still uses goes with the lab guest.
        if self.owns_network {
            let _ = run("ip", &["link", "del", self.network]);
        } else {
            let _ = self.delete();
        }
    }
}

/// Hides libibverbs meanwhile: what is written here goes with the lab guest.
pub(crate) fn without_library(act: impl FnOnce() -> Result<()>) -> Result<()> {
    let libraries = Path::new("/usr/lib/x86_64-linux-gnu");
    let hidden = fs::read_dir(libraries)?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.to_string_lossy().contains("/libibverbs.so"));
    let hidden: Vec<PathBuf> = hidden.collect();
    ensure!(!hidden.is_empty(), "there is no libibverbs anyway");
    let away = |path: &Path| path.with_extension("away");
    for path in &hidden {
        fs::rename(path, away(path))?;
    }
    let outcome = act();
    for path in &hidden {
        fs::rename(away(path), path)?;
    }
    outcome
}
