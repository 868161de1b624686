//! Which port of which RDMA device: by what the kernel says in sysfs, without a call of libibverbs.

use std::fmt;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::str::FromStr;

use serde::Deserialize;

use super::link::{Link, links_below};
use super::{Domain, Gid, VerbsError, network};

/// Where the kernel lists RDMA devices.
pub(super) const DEVICES: &str = "/sys/class/infiniband";

/// The type of a port's address that RoCE v2 packets carry: they are UDP, and are routed.
const ROUTED: &str = "RoCE v2";

/// The type of a network device of InfiniBand; see `linux/if_arp.h`.
const ARPHRD_INFINIBAND: &str = "32";

/// A port that is wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Choice {
    /// None: RDMA is not used.
    Off,
    /// That with the address that the peer is reached from, if there is one.
    #[default]
    Auto,
    /// A certain one.
    Device {
        /// The device's name.
        name: String,
        /// Its port, counted from 1.
        port: u8,
        /// Which of the port's addresses; the first of RoCE v2 that is an IPv4 one unless given.
        gid_index: Option<u8>,
    },
}

/// The text chooses nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is no choice of an RDMA device: expected off, auto, or a device with its port and the index of its GID, such as mlx5_0 or mlx5_0:1:3"
)]
pub struct ChoiceError(String);

impl FromStr for Choice {
    type Err = ChoiceError;

    fn from_str(text: &str) -> Result<Self, ChoiceError> {
        let bad = || ChoiceError(text.to_owned());
        match text {
            "off" => return Ok(Self::Off),
            "auto" => return Ok(Self::Auto),
            _ => {}
        }
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        if name.is_empty() || !name.chars().all(legal) {
            return Err(bad());
        }
        let number = |part: &str| part.parse::<u8>().map_err(|_| bad());
        let port = parts.next().map(number).transpose()?.unwrap_or(1);
        let gid_index = parts.next().map(number).transpose()?;
        if parts.next().is_some() || port == 0 {
            return Err(bad());
        }
        Ok(Self::Device {
            name: name.to_owned(),
            port,
            gid_index,
        })
    }
}

impl TryFrom<String> for Choice {
    type Error = ChoiceError;

    fn try_from(text: String) -> Result<Self, ChoiceError> {
        text.parse()
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Auto => f.write_str("auto"),
            Self::Device {
                name,
                port,
                gid_index,
            } => {
                write!(f, "{name}:{port}")?;
                gid_index.map_or(Ok(()), |index| write!(f, ":{index}"))
            }
        }
    }
}

/// A port that can be used, with one of its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// The device's name.
    pub device: String,
    /// The port, counted from 1.
    pub number: u8,
    /// Which of its addresses.
    pub gid_index: u8,
    /// The address.
    pub gid: Gid,
    /// Its local identifier, within an InfiniBand subnet.
    pub lid: u16,
    /// Whether it is one of Ethernet: RoCE.
    pub is_ethernet: bool,
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            device,
            number,
            gid_index,
            gid,
            ..
        } = self;
        write!(f, "{device} port {number} GID {gid_index} ({})", gid.0)
    }
}

impl Choice {
    /// The port to be used where `local` is the address that the peer is reached from.
    pub fn port(&self, local: IpAddr) -> Result<Port, VerbsError> {
        self.port_below(Path::new(DEVICES), local, network::with_address)
    }

    /// Those of a port's addresses that may be used: of a named device the one that is, else all
    /// that a peer may be reached from.
    pub fn among<'a>(&self, addresses: &'a [Port]) -> Vec<&'a Port> {
        match self {
            Self::Off => Vec::new(),
            // A link-local address is hardly one that a server is reached from.
            Self::Auto => addresses
                .iter()
                .filter(|port| !port.is_ethernet || !port.gid.0.is_unicast_link_local())
                .collect(),
            Self::Device {
                name,
                port,
                gid_index,
            } => {
                let ours = |found: &&Port| {
                    let indexed = gid_index.is_none_or(|index| index == found.gid_index);
                    found.device == *name && found.number == *port && indexed
                };
                let ipv4 = |port: &&Port| port.gid.0.to_ipv4_mapped().is_some();
                let mut ours = addresses.iter().filter(ours);
                let first = ours.clone().find(ipv4).or(ours.next());
                first.into_iter().collect()
            }
        }
    }

    /// Whether a device that is named is there, and can be opened. What is chosen otherwise depends on the
    /// peer.
    pub fn check(&self) -> Result<(), VerbsError> {
        match self {
            Self::Off | Self::Auto => Ok(()),
            Self::Device { .. } => {
                Domain::open(&self.port(Ipv4Addr::UNSPECIFIED.into())?).map(drop)
            }
        }
    }

    /// `network_with` names the network device that has an address.
    fn port_below(
        &self,
        devices: &Path,
        local: IpAddr,
        network_with: impl Fn(IpAddr) -> Option<String>,
    ) -> Result<Port, VerbsError> {
        match self {
            Self::Off => Err(VerbsError::NoPort("it is switched off".to_owned())),
            Self::Auto => {
                let ports = ports_below(devices);
                let has = |layer, gid: Gid| {
                    let is_that = |port: &&Port| port.is_ethernet == layer && port.gid == gid;
                    ports.iter().find(is_that).cloned()
                };
                // Of Ethernet the address is the port's own. InfiniBand has a network device on it.
                let found = has(true, Gid::from(local.to_canonical())).or_else(|| {
                    let infiniband = network_with(local)
                        .and_then(|network| infiniband_gid(devices, &network))?;
                    has(false, infiniband)
                });
                found.ok_or_else(|| {
                    VerbsError::NoPort(format!(
                        "none has a port that is up and has the address {local} (RoCE v2, or InfiniBand with IPoIB)"
                    ))
                })
            }
            Self::Device {
                name,
                port,
                gid_index,
            } => {
                let ports = ports_below(devices);
                let found = self.among(&ports).first().copied();
                found.cloned().ok_or_else(|| {
                    let why = why_not(&devices.join(name), name, *port, *gid_index);
                    let usable = usable(devices);
                    VerbsError::NoPort(format!("{self} is asked for, but {why}; {usable}"))
                })
            }
        }
    }
}

/// The port's address below a network device of InfiniBand (IPoIB): the kernel has made the device's own
/// of it, after four bytes of flags and a queue pair's number.
fn infiniband_gid(devices: &Path, network: &str) -> Option<Gid> {
    let place = devices.parent()?.join("net").join(network);
    if text_of(&place.join("type")) != ARPHRD_INFINIBAND {
        return None;
    }
    let address = text_of(&place.join("address"));
    let bytes: Option<Vec<u8>> = address
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16).ok())
        .collect();
    let gid: [u8; 16] = bytes?.get(4..)?.try_into().ok()?;
    Some(Gid(gid.into()))
}

/// What a device that is asked for lacks.
fn why_not(device: &Path, name: &str, port: u8, gid_index: Option<u8>) -> String {
    let place = device.join("ports").join(port.to_string());
    let state = text_of(&place.join("state"));
    if !device.exists() {
        format!("there is no device {name}")
    } else if !place.exists() {
        format!("{name} has no port {port}")
    } else if !state.contains("ACTIVE") {
        format!("port {port} of {name} is not up (its state is '{state}')")
    } else if let Some(index) = gid_index {
        format!("port {port} of {name} has no address of RoCE v2 with the index {index}")
    } else {
        format!("port {port} of {name} has no address of RoCE v2")
    }
}

/// What there is instead, and what to do.
fn usable(devices: &Path) -> String {
    let there: Vec<String> = ports_below(devices).iter().map(Port::to_string).collect();
    match there.is_empty() {
        true => "no device here has a port that is up ('rdma link' shows all): load its driver, \
             bring its network up"
            .to_owned(),
        false => format!("usable here: {}", there.join(", ")),
    }
}

/// Every port that is up, with each of its addresses of a kind that is used.
fn ports_below(devices: &Path) -> Vec<Port> {
    let links = links_below(devices).into_iter().filter(Link::is_up);
    links.flat_map(|link| link.addresses).collect()
}

/// The addresses of a port, in the order of their indexes.
pub(super) fn addresses_of(port: &Path, device: &str, number: u8, is_ethernet: bool) -> Vec<Port> {
    let lid = text_of(&port.join("lid"));
    let lid = u16::from_str_radix(lid.trim_start_matches("0x"), 16).unwrap_or(0);
    let mut indexes: Vec<u8> = names_in(&port.join("gids"))
        .iter()
        .filter_map(|name| name.parse().ok())
        .collect();
    indexes.sort_unstable();
    let address = |index: u8| {
        // Of an index without an address the kernel tells no type.
        let kind = text_of(&port.join(format!("gid_attrs/types/{index}")));
        let gid: Ipv6Addr = text_of(&port.join(format!("gids/{index}"))).parse().ok()?;
        let is_used = !gid.is_unspecified() && (!is_ethernet || kind == ROUTED);
        is_used.then(|| Port {
            device: device.to_owned(),
            number,
            gid_index: index,
            gid: Gid(gid),
            lid,
            is_ethernet,
        })
    };
    indexes.into_iter().filter_map(address).collect()
}

/// Sorted, so that the choice is the same each time; none where there is no such directory.
pub(super) fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort_unstable();
    names
}

pub(super) fn text_of(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A device with one port, whose addresses are by type and text.
    fn device(devices: &Path, name: &str, state: &str, addresses: &[(&str, &str)]) {
        let port = devices.join(name).join("ports/1");
        fs::create_dir_all(port.join("gids")).expect("made");
        fs::create_dir_all(port.join("gid_attrs/types")).expect("made");
        let write = |file: &str, text: &str| fs::write(port.join(file), text).expect("written");
        write("state", state);
        write("link_layer", "Ethernet\n");
        write("lid", "0x0\n");
        for (index, (kind, gid)) in addresses.iter().enumerate() {
            write(&format!("gids/{index}"), gid);
            if !kind.is_empty() {
                write(&format!("gid_attrs/types/{index}"), kind);
            }
        }
    }

    const LOCAL: &str = "fe80:0000:0000:0000:5054:00ff:fe12:3456\n";
    const OF_HOST: &str = "0000:0000:0000:0000:0000:ffff:0a00:0002\n";
    const NONE: &str = "0000:0000:0000:0000:0000:0000:0000:0000\n";
    const UP: &str = "4: ACTIVE\n";

    /// A folder as `/sys/class`, with the list of devices in it.
    struct Machine {
        folder: tempfile::TempDir,
        devices: PathBuf,
    }

    impl Machine {
        fn path(&self) -> &Path {
            &self.devices
        }

        /// An InfiniBand device with a network device on it.
        fn add_infiniband(&self, name: &str, gid: &str, network: &str, address: &str) {
            device(&self.devices, name, UP, &[("IB/RoCE v1\n", gid)]);
            let write = |path: &Path, text: &str| fs::write(path, text).expect("written");
            let port = self.devices.join(name).join("ports/1");
            write(&port.join("link_layer"), "InfiniBand\n");
            write(&port.join("lid"), "0x1f\n");
            let network = self.folder.path().join("net").join(network);
            fs::create_dir_all(&network).expect("made");
            write(&network.join("type"), "32\n");
            write(&network.join("address"), &format!("{address}\n"));
        }
    }

    /// The port for a peer that is reached from `address`. In these machines, network devices named
    /// for the last number of it have it.
    fn choose_below(devices: &Path, choice: &Choice, address: [u8; 4]) -> Result<Port, VerbsError> {
        let network_with = |address: IpAddr| match address {
            IpAddr::V4(address) => Some(format!("ib{}", address.octets()[3])),
            IpAddr::V6(_) => None,
        };
        choice.port_below(devices, address.into(), network_with)
    }

    fn machine() -> Machine {
        let folder = tempfile::tempdir().expect("a directory");
        let devices = Machine {
            devices: folder.path().join("infiniband"),
            folder,
        };
        let old = ("IB/RoCE v1\n", OF_HOST);
        let new = [("RoCE v2\n", LOCAL), ("RoCE v2\n", OF_HOST), ("", NONE)];
        device(devices.path(), "down_0", "1: DOWN\n", &new);
        device(devices.path(), "old_0", UP, &[old]);
        device(devices.path(), "rxe0", UP, &new);
        devices
    }

    #[test]
    fn auto_takes_the_port_with_the_address() {
        let devices = machine();
        let choose = |address: [u8; 4]| choose_below(devices.path(), &Choice::Auto, address);
        let port = choose([10, 0, 0, 2]).expect("rxe0 has it");
        assert_eq!((port.device.as_str(), port.gid_index), ("rxe0", 1));
        let error = choose([10, 0, 0, 3]).expect_err("nobody has it");
        assert!(error.to_string().contains("10.0.0.3"), "{error}");
        let nowhere = Path::new("/nonexistent");
        let none = choose_below(nowhere, &Choice::Auto, [10, 0, 0, 2]);
        assert!(matches!(none, Err(VerbsError::NoPort(_))));
    }

    #[test]
    fn auto_takes_the_infiniband_port_below_the_network_device_with_the_address() {
        let devices = machine();
        let gid = |last: u8| format!("fe80:0000:0000:0000:e41d:2d03:0050:9b{last:02x}\n");
        let address = |last: u8| {
            format!("80:00:02:08:fe:80:00:00:00:00:00:00:e4:1d:2d:03:00:50:9b:{last:02x}")
        };
        devices.add_infiniband("mlx5_0", &gid(0xf1), "ib5", &address(0xf1));
        devices.add_infiniband("mlx5_1", &gid(0xf2), "ib6", &address(0xf2));
        let choose = |last| choose_below(devices.path(), &Choice::Auto, [10, 1, 0, last]);
        let port = choose(6).expect("mlx5_1 has it");
        assert_eq!((port.device.as_str(), port.lid), ("mlx5_1", 0x1f));
        assert!(!port.is_ethernet);
        assert_eq!(choose(5).expect("mlx5_0 has it").device, "mlx5_0");
        // Of a card of Ethernet, and of a network device that is not there.
        let network = devices.folder.path().join("net/ib6");
        fs::write(network.join("type"), "1\n").expect("written");
        for last in [6, 7] {
            let error = choose(last).expect_err("nobody has it").to_string();
            assert!(error.contains(&format!("10.1.0.{last}")), "{error}");
        }
        // One of which only the name is told is chosen by that.
        let choice: Choice = "mlx5_1".parse().expect("a device");
        let named = choose_below(devices.path(), &choice, [10, 1, 0, 6]).expect("there");
        assert_eq!((named.device.as_str(), named.gid_index), ("mlx5_1", 0));
    }

    #[test]
    fn a_network_device_of_infiniband_tells_its_ports_address_or_none() {
        let devices = machine();
        devices.add_infiniband("mlx5_0", "::\n", "ib0", "80:00");
        devices.add_infiniband("mlx5_1", "::\n", "ib1", "nonsense");
        for network in ["ib0", "ib1", "ib2"] {
            assert_eq!(infiniband_gid(devices.path(), network), None, "{network}");
        }
    }

    #[test]
    fn a_named_device_is_taken_whatever_its_address() {
        let devices = machine();
        let choose = |text: &str| {
            let choice: Choice = text.parse().expect(text);
            choose_below(devices.path(), &choice, [192, 0, 2, 1])
        };
        assert_eq!(choose("rxe0").expect("there").gid_index, 1);
        assert_eq!(choose("rxe0:1:0").expect("there").gid_index, 0);
        for (text, why) in [
            ("rxe0:2", "rxe0:2 is asked for, but rxe0 has no port 2"),
            ("rxe0:1:2", "has no address of RoCE v2 with the index 2"),
            ("rxe1", "there is no device rxe1"),
            ("down_0", "is not up (its state is '1: DOWN')"),
            ("old_0", "port 1 of old_0 has no address of RoCE v2;"),
            ("off", "switched off"),
        ] {
            let error = choose(text).expect_err(text).to_string();
            assert!(error.contains(why), "{error}");
            let is_told = error.contains("usable here: rxe0 port 1 GID 0 (fe80::");
            assert!(is_told || text == "off", "{error}");
        }
        let choice: Choice = "rxe0".parse().expect("a device");
        let nowhere = choose_below(Path::new("/nonexistent"), &choice, [192, 0, 2, 1]);
        let error = nowhere.expect_err("there is none").to_string();
        assert!(
            error.contains("no device here has a port that is up"),
            "{error}"
        );
    }

    #[test]
    fn choices_keep_their_form_and_nonsense_is_none() {
        for (text, shown) in [
            ("off", "off"),
            ("auto", "auto"),
            ("a_0", "a_0:1"),
            ("a:2:3", "a:2:3"),
        ] {
            let choice: Choice = text.parse().expect(text);
            assert_eq!(choice.to_string(), shown);
        }
        for text in ["", "a:", "a:0", "a:1:", "a:1:2:3", "../a", "a:x", "a:256"] {
            let error = text.parse::<Choice>().expect_err(text);
            assert!(error.to_string().contains("expected off, auto"), "{error}");
        }
    }
}
