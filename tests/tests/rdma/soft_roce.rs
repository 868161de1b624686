//! An RDMA device of the kernel's own over a network device.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use outram_tests::hermetic::command::run;

/// The device; gone when dropped, once nobody uses it.
pub(crate) struct SoftRoce {
    name: &'static str,
    /// Made for it, if any.
    network: Option<&'static str>,
}

impl SoftRoce {
    /// Over the loopback device, whose address all servers here have.
    pub(crate) fn on_loopback() -> Result<Self> {
        let name = "rxe0";
        run(
            "rdma",
            &["link", "add", name, "type", "rxe", "netdev", "lo"],
        )?;
        Ok(Self {
            name,
            network: None,
        })
    }

    /// Over a network device of its own, with an address of its own.
    pub(crate) fn apart() -> Result<Self> {
        let (name, network) = ("rxe1", "roce1");
        let pair = ["type", "veth", "peer", "name", "roce1-far"];
        run("ip", &[&["link", "add", network][..], &pair].concat())?;
        run("ip", &["link", "set", "roce1-far", "up"])?;
        run("ip", &["addr", "add", "10.77.0.1/24", "dev", network])?;
        run("ip", &["link", "set", network, "up"])?;
        run(
            "rdma",
            &["link", "add", name, "type", "rxe", "netdev", network],
        )?;
        Ok(Self {
            name,
            network: Some(network),
        })
    }

    /// Its name.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Takes the network from under it, or gives it back.
    pub(crate) fn set_up(&self, up: bool) -> Result<()> {
        let network = self.network.context("a network device of its own")?;
        run(
            "ip",
            &["link", "set", network, if up { "up" } else { "down" }],
        )?;
        Ok(())
    }

    /// Packets that it has received, by its own count.
    pub(crate) fn received(&self) -> Result<u64> {
        let counter = format!(
            "/sys/class/infiniband/{}/ports/1/hw_counters/rcvd_pkts",
            self.name
        );
        let text = fs::read_to_string(Path::new(&counter)).context(counter)?;
        text.trim().parse().context("a number")
    }
}

impl Drop for SoftRoce {
    fn drop(&mut self) {
        // One that somebody still uses goes with the lab guest.
        if let Some(network) = self.network {
            let _ = run("ip", &["link", "del", network]);
        } else {
            let _ = run("rdma", &["link", "delete", self.name]);
        }
    }
}
