//! What those tests run over that ask for no more than a device.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use anyhow::Result;
use outram_tests::small_lab::Lab;
use outram_wire::verbs::{Choice, Domain, Link, Port, link};

use crate::soft_roce::SoftRoce;

/// In the lab guest soft-RoCE over the loopback device, made for the test; elsewhere the port with the
/// lab's address, which is left as it is.
pub(crate) struct AtHand {
    port: Port,
    made: Option<SoftRoce>,
}

impl AtHand {
    pub(crate) fn of(lab: &Lab) -> Result<Self> {
        let is_ours = lab.host().is_loopback();
        let made = is_ours.then(SoftRoce::on_loopback).transpose()?;
        let port = Choice::Auto.port(lab.host())?;
        Ok(Self { port, made })
    }

    /// A protection domain of its own.
    pub(crate) fn domain(&self) -> Result<Domain> {
        Ok(Domain::open(&self.port)?)
    }

    /// What a guest's status calls it.
    pub(crate) fn transport(&self) -> String {
        format!("RDMA ({})", self.port.device)
    }

    /// Soft-RoCE's own counts; every other driver has names of its own.
    pub(crate) fn counters(&self) -> Result<Option<BTreeMap<String, u64>>> {
        self.made.as_ref().map(SoftRoce::counters).transpose()
    }
}

/// The address of a port of this machine's that can be used, if there is one.
pub(crate) fn address() -> Option<IpAddr> {
    let links = link::links().into_iter().filter(Link::is_up);
    let mut ports = links.flat_map(|link| link.addresses);
    ports.find_map(|port| own_address(&port))
}

fn own_address(port: &Port) -> Option<IpAddr> {
    let address: Ipv4Addr = port.gid.0.to_ipv4_mapped()?;
    (!address.is_loopback()).then_some(address.into())
}
