//! Every port of every RDMA device, whether or not it is up: by what the kernel says in sysfs, without a
//! call of libibverbs.

use std::fmt;
use std::path::Path;

use super::Port;
use super::port::{DEVICES, addresses_of, names_in, text_of};

/// The flag of a network device that was set up; see netdevice(7).
const IFF_UP: u32 = 1;

/// A port of a device, and what it is joined to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The device's name.
    pub device: String,
    /// The port, counted from 1.
    pub number: u8,
    /// How it is, in the kernel's word: ACTIVE where it can be used, INIT or DOWN for example.
    pub state: String,
    /// Whether it is one of Ethernet: RoCE.
    pub is_ethernet: bool,
    /// The network device that it belongs to; of InfiniBand there may be none.
    pub network: Option<Network>,
    /// Its addresses of a kind that is used, in the order of their indexes.
    pub addresses: Vec<Port>,
    /// Whether the kernel lets programs open the device (module `ib_uverbs`).
    pub is_for_programs: bool,
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    /// Its name.
    pub name: String,
    /// Whether it was set up, which tells nothing of its cable.
    pub is_up: bool,
    /// The largest packet that it takes, in bytes.
    pub mtu_bytes: u32,
}

impl Link {
    /// Whether it can be used.
    pub fn is_up(&self) -> bool {
        self.state == "ACTIVE"
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} port {}", self.device, self.number)
    }
}

/// Every port of this machine.
pub fn links() -> Vec<Link> {
    links_below(Path::new(DEVICES))
}

/// `devices` is as `/sys/class/infiniband`; beside it lie `net` and `infiniband_verbs`.
pub(super) fn links_below(devices: &Path) -> Vec<Link> {
    let mut found = Vec::new();
    for device in names_in(devices) {
        let ports = devices.join(&device).join("ports");
        for name in names_in(&ports) {
            if let Ok(number) = name.parse() {
                found.push(link(devices, &device, number));
            }
        }
    }
    found
}

fn link(devices: &Path, device: &str, number: u8) -> Link {
    let place = devices.join(device);
    let port = place.join("ports").join(number.to_string());
    let is_ethernet = text_of(&port.join("link_layer")) == "Ethernet";
    // As '4: ACTIVE'.
    let state = text_of(&port.join("state"));
    let state = state.rsplit(' ').next().unwrap_or_default().to_owned();
    let network = network_name(&place, &port, number);
    Link {
        device: device.to_owned(),
        number,
        state,
        is_ethernet,
        network: network.and_then(|name| network_of(devices, name)),
        addresses: addresses_of(&port, device, number, is_ethernet),
        is_for_programs: is_for_programs(devices, device),
    }
}

/// The network device of a port: as its first address says, else (InfiniBand, or a driver that says
/// nothing while it is down) that of the same card with the port's number, else what soft-RoCE is over.
fn network_name(device: &Path, port: &Path, number: u8) -> Option<String> {
    let told = |path: &Path| Some(text_of(path)).filter(|name| !name.is_empty());
    let of_card = || {
        let networks = device.join("device/net");
        let mut names = names_in(&networks).into_iter();
        names.find(|name| {
            // Counted from 0.
            let of_card: Option<u32> = text_of(&networks.join(name).join("dev_port")).parse().ok();
            of_card.is_some() && of_card == u32::from(number).checked_sub(1)
        })
    };
    told(&port.join("gid_attrs/ndevs/0"))
        .or_else(of_card)
        .or_else(|| told(&device.join("parent")))
}

fn network_of(devices: &Path, name: String) -> Option<Network> {
    let place = devices.parent()?.join("net").join(&name);
    let flags = text_of(&place.join("flags"));
    let flags = u32::from_str_radix(flags.trim_start_matches("0x"), 16).ok()?;
    Some(Network {
        name,
        is_up: flags & IFF_UP != 0,
        mtu_bytes: text_of(&place.join("mtu")).parse().ok()?,
    })
}

fn is_for_programs(devices: &Path, device: &str) -> bool {
    let Some(verbs) = devices.parent().map(|class| class.join("infiniband_verbs")) else {
        return false;
    };
    let names = names_in(&verbs);
    let mut told = names
        .iter()
        .map(|name| text_of(&verbs.join(name).join("ibdev")));
    told.any(|name| name == device)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    /// A folder as `/sys/class`.
    struct Sysfs(tempfile::TempDir);

    impl Sysfs {
        fn new() -> Self {
            Self(tempfile::tempdir().expect("a directory"))
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().expect("it has one")).expect("made");
            fs::write(path, format!("{text}\n")).expect("written");
        }

        fn port(&self, device: &str, number: u8, layer: &str, state: &str) {
            let port = format!("infiniband/{device}/ports/{number}");
            self.write(&format!("{port}/link_layer"), layer);
            self.write(&format!("{port}/state"), state);
        }

        fn network(&self, name: &str, flags: &str, mtu: &str) {
            self.write(&format!("net/{name}/flags"), flags);
            self.write(&format!("net/{name}/mtu"), mtu);
        }

        fn devices(&self) -> PathBuf {
            self.0.path().join("infiniband")
        }

        fn links(&self) -> Vec<Link> {
            links_below(&self.devices())
        }
    }

    fn network(name: &str, is_up: bool, mtu_bytes: u32) -> Option<Network> {
        let name = name.to_owned();
        Some(Network {
            name,
            is_up,
            mtu_bytes,
        })
    }

    #[test]
    fn every_port_is_listed_up_or_not() {
        let sysfs = Sysfs::new();
        sysfs.port("mlx5_0", 1, "Ethernet", "4: ACTIVE");
        sysfs.port("mlx5_0", 2, "Ethernet", "1: DOWN");
        sysfs.port("mthca0", 1, "InfiniBand", "2: INIT");
        let told: Vec<(String, String, bool, bool)> = sysfs
            .links()
            .into_iter()
            .map(|link| {
                let (shown, up) = (link.to_string(), link.is_up());
                (shown, link.state, link.is_ethernet, up)
            })
            .collect();
        let expected = |shown: &str, state: &str, is_ethernet, is_up| {
            (shown.to_owned(), state.to_owned(), is_ethernet, is_up)
        };
        assert_eq!(
            told,
            [
                expected("mlx5_0 port 1", "ACTIVE", true, true),
                expected("mlx5_0 port 2", "DOWN", true, false),
                expected("mthca0 port 1", "INIT", false, false),
            ]
        );
        assert_eq!(links_below(Path::new("/nonexistent")), []);
    }

    #[test]
    fn a_ports_network_device_is_found_wherever_its_driver_tells_it() {
        let sysfs = Sysfs::new();
        sysfs.network("eth1", "0x1003", "9000");
        sysfs.network("eth2", "0x1002", "1500");
        for (device, number) in [("mlx5_0", 1), ("mlx4_0", 1), ("mlx4_0", 2), ("rxe0", 1)] {
            sysfs.port(device, number, "Ethernet", "1: DOWN");
        }
        sysfs.port("bare", 1, "Ethernet", "1: DOWN");
        sysfs.write("infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0", "eth1");
        sysfs.write("infiniband/mlx4_0/device/net/eth2/dev_port", "0");
        sysfs.write("infiniband/mlx4_0/device/net/eth1/dev_port", "1");
        sysfs.write("infiniband/rxe0/parent", "eth1");
        let found: Vec<(String, Option<Network>)> = sysfs
            .links()
            .into_iter()
            .map(|link| (link.to_string(), link.network))
            .collect();
        let (one, two) = (network("eth1", true, 9000), network("eth2", false, 1500));
        let expected = [
            ("bare port 1", None),
            ("mlx4_0 port 1", two),
            ("mlx4_0 port 2", one.clone()),
            ("mlx5_0 port 1", one.clone()),
            ("rxe0 port 1", one),
        ];
        assert_eq!(
            found,
            expected.map(|(name, network)| (name.to_owned(), network))
        );
    }

    #[test]
    fn what_programs_may_open_is_told() {
        let sysfs = Sysfs::new();
        sysfs.port("mlx5_0", 1, "Ethernet", "4: ACTIVE");
        sysfs.port("mlx5_1", 1, "Ethernet", "4: ACTIVE");
        assert!(sysfs.links().iter().all(|link| !link.is_for_programs));
        sysfs.write("infiniband_verbs/abi_version", "6");
        sysfs.write("infiniband_verbs/uverbs0/ibdev", "mlx5_1");
        let open: Vec<bool> = sysfs
            .links()
            .iter()
            .map(|link| link.is_for_programs)
            .collect();
        assert_eq!(open, [false, true]);
    }
}
