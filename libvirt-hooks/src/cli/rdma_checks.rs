//! What `outram doctor` checks of RDMA on this host: its ports, and the limit of locked memory. TCP always
//! works, so that nothing here is a failure.
//!
//! [`ports`] and [`locked_memory`] judge what was looked at, and look at nothing themselves.

use outram_wire::causes::with_causes;
use outram_wire::units::format_size;
use outram_wire::verbs::{Choice, Domain, Link, PathMtu, Port, VerbsError, link};
use rustix::process::{Resource, getrlimit};

use super::doctor::Check;
use crate::backend_unit::{self, UNIT_FILE};
use crate::host::Paths;
use crate::{daemons, process};

const NAME: &str = "RDMA";

/// With less, a page takes several packets.
const PATH_MTU_WANTED: u32 = 4096;

/// What a packet of RoCE v2 has beside its payload, at most: the kernel's `iboe_get_mtu` takes as much
/// off what a network device takes.
const ROCE_HEADERS: u32 = 96;

/// What lets a process lift its own limits; see capabilities(7).
const CAP_SYS_RESOURCE: u32 = 24;

/// Whether pages can go over RDMA, as far as this host alone can tell.
pub(super) fn rdma(choice: &Choice, paths: &Paths) -> Vec<Check> {
    let links = link::links();
    let open = |port: &Port| Domain::open(port).map(|domain| domain.path_mtu());
    let mut checks = ports(choice, &links, open);
    if *choice != Choice::Off && !links.is_empty() {
        checks.push(locked_memory(&limit_of_backends(paths.systemd)));
    }
    checks
}

/// What is to be said of the ports that `choice` allows. `open` opens a port's device.
fn ports(
    choice: &Choice,
    links: &[Link],
    open: impl Fn(&Port) -> Result<PathMtu, VerbsError>,
) -> Vec<Check> {
    match choice {
        Choice::Off => vec![Check::pass(NAME, "switched off: pages go over TCP")],
        Choice::Auto if links.is_empty() => {
            vec![Check::pass(NAME, "no device: pages go over TCP")]
        }
        Choice::Auto => links
            .iter()
            .map(|link| {
                let check = examine(choice, link, &open);
                let is_other = !link.is_up() && links.iter().any(Link::is_up);
                match is_other {
                    true => or_name_another(check),
                    false => check,
                }
            })
            .collect(),
        Choice::Device { name, port, .. } => {
            let is_meant = |link: &&Link| link.device == *name && link.number == *port;
            vec![match links.iter().find(is_meant) {
                Some(link) => examine(choice, link, &open),
                None => absent(choice, links),
            }]
        }
    }
}

/// Of several ports, some may not be meant for this.
fn or_name_another(check: Check) -> Check {
    let cure = format!(
        "{}; or name the port that is meant ('rdma') in the host's settings",
        check.cure
    );
    Check { cure, ..check }
}

/// A device that is asked for and not there.
fn absent(choice: &Choice, links: &[Link]) -> Check {
    let there: Vec<String> = links
        .iter()
        .map(|link| format!("{link} ({})", if link.is_up() { "up" } else { "down" }))
        .collect();
    let there = match there.is_empty() {
        true => "no device at all".to_owned(),
        false => there.join(", "),
    };
    Check::warn(
        NAME,
        format!("{choice} is asked for, but is not there: there is {there}; pages go over TCP"),
        "correct 'rdma' in the host's settings, or load the device's driver ('rdma link' shows what there is)",
    )
}

/// A port, from its link up to its packets.
fn examine(
    choice: &Choice,
    link: &Link,
    open: impl Fn(&Port) -> Result<PathMtu, VerbsError>,
) -> Check {
    let warn = |found: String, cure: String| {
        Check::warn(NAME, format!("{found}: pages go over TCP"), cure)
    };
    if !link.is_up() {
        let found = format!("{link} is not up (its state is {})", link.state);
        return warn(found, cure_of_link(link));
    }
    if !link.is_for_programs {
        let found = format!("{link} is up, but the kernel lets no program open it");
        return warn(found, "modprobe ib_uverbs".to_owned());
    }
    if *choice == Choice::Auto && !link.is_ethernet && link.network.is_none() {
        let found = format!("{link} is up, but has no network device (IPoIB) to be chosen by");
        let cure = "modprobe ib_ipoib and give its network device an IP address; or name the port \
             ('rdma') in the host's settings";
        return warn(found, cure.to_owned());
    }
    let usable = choice.among(&link.addresses);
    let Some(first) = usable.first() else {
        let found = format!("{link} is up, but has no address that can be used");
        return warn(found, cure_of_address(choice, link));
    };
    let mtu = match open(first) {
        Ok(mtu) => mtu,
        Err(error) => {
            let found = format!("{link} is up, but {}", with_causes(&error));
            let cure =
                "install libibverbs1 and ibverbs-providers, and let root open /dev/infiniband";
            return warn(found, cure.to_owned());
        }
    };
    let over = link.network.as_ref();
    let over = over.map_or(String::new(), |network| format!(" ({})", network.name));
    let gids: Vec<String> = usable
        .iter()
        .map(|port| format!("GID {} ({})", port.gid_index, port.gid.0))
        .collect();
    let found = format!(
        "{link} is up{over}, path MTU {}, {}",
        mtu.bytes,
        gids.join(", ")
    );
    match cure_of_mtu(link, mtu) {
        Some(cure) => Check::warn(NAME, found, cure),
        None => Check::pass(NAME, found),
    }
}

/// Brings a port up.
fn cure_of_link(link: &Link) -> String {
    match (&link.network, link.is_ethernet) {
        (Some(network), true) if !network.is_up => format!("ip link set {} up", network.name),
        (Some(network), true) => format!(
            "{} is set up but has no link: look at its cable and the switch's port ('ip link', 'rdma link')",
            network.name
        ),
        (None, true) => {
            "load the driver of its network device, and set that up ('rdma link', 'ip link')"
                .to_owned()
        }
        // The cable is in, and nobody has given the port its identifier.
        (_, false) if matches!(link.state.as_str(), "INIT" | "ARMED") => {
            "have a subnet manager in its network: opensm on one machine, or the switch's own"
                .to_owned()
        }
        (_, false) => {
            "look at its cable and the switch's port ('rdma link'); ibstat tells more".to_owned()
        }
    }
}

/// Gives a port that is up an address.
fn cure_of_address(choice: &Choice, link: &Link) -> String {
    if let Choice::Device {
        gid_index: Some(index),
        ..
    } = choice
        && !link.addresses.is_empty()
    {
        let there: Vec<String> = link
            .addresses
            .iter()
            .map(|port| format!("{} ({})", port.gid_index, port.gid.0))
            .collect();
        return format!(
            "correct the index {index} of 'rdma' in the host's settings: there is {}",
            there.join(", ")
        );
    }
    let network = link.network.as_ref();
    let network = network.map_or("ITS_NETWORK_DEVICE", |network| &network.name);
    format!("give it an IP address (ip address add ADDRESS/PREFIX dev {network}), of RoCE v2")
}

/// Makes packets larger, where they could be.
fn cure_of_mtu(link: &Link, mtu: PathMtu) -> Option<String> {
    if mtu.bytes >= PATH_MTU_WANTED.min(mtu.most_bytes) {
        return None;
    }
    if !link.is_ethernet {
        return Some(
            "have the subnet manager allow 4096 (opensm: mtu=5 in partitions.conf)".to_owned(),
        );
    }
    let Some(network) = &link.network else {
        return Some("raise the MTU of its network device to 4200 or more".to_owned());
    };
    let allowed = payload(network.mtu_bytes).min(mtu.most_bytes);
    Some(if mtu.bytes < allowed {
        format!(
            "the MTU of {0}, {1}, allows {allowed}: ip link set {0} down, and up again; else look at its driver",
            network.name, network.mtu_bytes
        )
    } else {
        format!(
            "raise the MTU of {0}, {1}: ip link set {0} mtu 4200 (or more), at both ends and on the switches between",
            network.name, network.mtu_bytes
        )
    })
}

/// The path MTU that a network device's MTU gives: a power of two.
fn payload(mtu_bytes: u32) -> u32 {
    let left = mtu_bytes.saturating_sub(ROCE_HEADERS);
    [4096, 2048, 1024, 512, 256]
        .into_iter()
        .find(|&bytes| bytes <= left)
        .unwrap_or(0)
}

/// How much memory backends may lock, by whom.
struct MemoryLimit {
    /// Where the limit was looked at.
    of: String,
    /// None where there is none.
    bytes: Option<u64>,
    /// Whether a backend can lift it by itself, and so does.
    is_lifted: bool,
    /// What lifts it otherwise.
    cure: String,
}

/// Registered memory is locked, and so is all else that a backend has.
fn locked_memory(limit: &MemoryLimit) -> Check {
    let (name, of) = ("locked memory", &limit.of);
    match limit.bytes {
        None => Check::pass(name, format!("without a limit ({of})")),
        Some(bytes) if limit.is_lifted => Check::pass(
            name,
            format!("{} ({of}), which backends lift", format_size(bytes)),
        ),
        Some(bytes) => Check::warn(
            name,
            format!(
                "{} ({of}): too little for a backend, which may not lift it",
                format_size(bytes)
            ),
            limit.cure.clone(),
        ),
    }
}

/// A unit of systemd has its own limit; another backend that of libvirt's daemon, whose hook starts it,
/// and where none runs, this shell's is what there is to go by.
fn limit_of_backends(systemd: bool) -> MemoryLimit {
    let unit = systemd.then(backend_unit::memory_limit).flatten();
    if let Some(unit) = unit {
        return MemoryLimit {
            of: format!("of the unit {UNIT_FILE}"),
            bytes: unit.bytes,
            is_lifted: unit.may_lift,
            cure: format!(
                "systemctl edit {UNIT_FILE}: [Service] LimitMEMLOCK=infinity, for guests that start then"
            ),
        };
    }
    if let Some(daemon) = daemons::running().first()
        && let Some(bytes) = process::memory_lock_limit(daemon.pid)
    {
        return MemoryLimit {
            of: format!("of {}, process {}", daemon.name, daemon.pid),
            bytes,
            is_lifted: process::has_capability(daemon.pid, CAP_SYS_RESOURCE),
            cure: format!(
                "prlimit --pid {} --memlock=unlimited, and 'ulimit -l unlimited' where {} is started",
                daemon.pid, daemon.name
            ),
        };
    }
    MemoryLimit {
        of: "of this shell".to_owned(),
        bytes: getrlimit(Resource::Memlock).current,
        is_lifted: process::has_capability(std::process::id(), CAP_SYS_RESOURCE),
        cure: "ulimit -l unlimited where libvirtd is started".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use outram_wire::verbs::{Gid, Network};

    use super::*;
    use crate::cli::doctor::Verdict;

    const FULL: PathMtu = PathMtu {
        bytes: 4096,
        most_bytes: 4096,
    };

    fn address(device: &str, gid_index: u8, address: impl Into<IpAddr>) -> Port {
        Port {
            device: device.to_owned(),
            number: 1,
            gid_index,
            gid: Gid::from(address.into()),
            lid: 0,
            is_ethernet: true,
        }
    }

    fn link(device: &str) -> Link {
        let local = "fe80::5054:ff:fe12:3456"
            .parse::<IpAddr>()
            .expect("an address");
        Link {
            device: device.to_owned(),
            number: 1,
            state: "ACTIVE".to_owned(),
            is_ethernet: true,
            network: Some(Network {
                name: "eth1".to_owned(),
                is_up: true,
                mtu_bytes: 9000,
            }),
            addresses: vec![address(device, 0, local), address(device, 1, [10, 0, 0, 2])],
            is_for_programs: true,
        }
    }

    fn infiniband(device: &str) -> Link {
        let mut link = Link {
            is_ethernet: false,
            ..link(device)
        };
        link.network.as_mut().expect("it has one").name = "ib0".to_owned();
        link.addresses.truncate(1);
        link.addresses[0].is_ethernet = false;
        link
    }

    fn down(link: Link) -> Link {
        Link {
            state: "DOWN".to_owned(),
            ..link
        }
    }

    fn choice(text: &str) -> Choice {
        text.parse().expect("a choice")
    }

    /// What is said of these, where every device can be opened.
    fn judge(text: &str, links: &[Link]) -> Vec<Check> {
        ports(&choice(text), links, |_| Ok(FULL))
    }

    /// The only check, which has to be a warning: what was found, and the cure.
    fn warning(checks: Vec<Check>) -> (String, String) {
        let [check] = <[Check; 1]>::try_from(checks).expect("one check");
        assert_eq!(check.verdict, Verdict::Warn, "{check}");
        (check.found, check.cure)
    }

    fn passed(checks: Vec<Check>) -> String {
        let [check] = <[Check; 1]>::try_from(checks).expect("one check");
        assert_eq!(check.verdict, Verdict::Pass, "{check}");
        check.found
    }

    #[test]
    fn a_port_that_can_be_used_is_told_with_mtu_and_address() {
        let said = passed(judge("auto", &[link("mlx5_0")]));
        let expected = "mlx5_0 port 1 is up (eth1), path MTU 4096, GID 1 (::ffff:10.0.0.2)";
        assert_eq!(said, expected);
        assert_eq!(passed(judge("mlx5_0", &[link("mlx5_0")])), expected);
        let said = passed(judge("mlx5_0:1:0", &[link("mlx5_0")]));
        assert!(said.ends_with("GID 0 (fe80::5054:ff:fe12:3456)"), "{said}");
        assert!(passed(judge("off", &[link("mlx5_0")])).contains("switched off"));
        assert_eq!(passed(judge("auto", &[])), "no device: pages go over TCP");
    }

    #[test]
    fn a_port_that_is_down_is_told_with_its_cure() {
        let cured = |link: Link| {
            let (found, cure) = warning(judge("auto", &[link]));
            assert!(
                found.contains("mlx5_0 port 1 is not up (its state is"),
                "{found}"
            );
            assert!(found.ends_with("pages go over TCP"), "{found}");
            cure
        };
        let mut unset = down(link("mlx5_0"));
        unset.network.as_mut().expect("it has one").is_up = false;
        assert_eq!(cured(unset), "ip link set eth1 up");
        assert!(cured(down(link("mlx5_0"))).starts_with("eth1 is set up but has no link"));
        let bare = Link {
            network: None,
            ..down(link("mlx5_0"))
        };
        assert!(cured(bare).contains("driver of its network device"));
        assert!(cured(down(infiniband("mlx5_0"))).contains("cable"));
        let unmanaged = Link {
            state: "INIT".to_owned(),
            ..infiniband("mlx5_0")
        };
        assert!(cured(unmanaged).contains("subnet manager"));
    }

    #[test]
    fn each_port_of_several_is_told_and_another_may_be_named() {
        let checks = judge("auto", &[link("mlx5_0"), down(link("mlx5_1"))]);
        let verdicts: Vec<Verdict> = checks.iter().map(|check| check.verdict).collect();
        assert_eq!(verdicts, [Verdict::Pass, Verdict::Warn]);
        assert!(
            checks[1].cure.ends_with("('rdma') in the host's settings"),
            "{}",
            checks[1]
        );
        // Of one that is named, others are none of its business.
        passed(judge("mlx5_0", &[down(link("mlx5_1")), link("mlx5_0")]));
    }

    #[test]
    fn a_device_that_is_not_there_is_told_with_what_is() {
        let links = [link("mlx5_0"), down(link("mlx5_1"))];
        for (text, links, there) in [
            (
                "rxe0",
                &links[..],
                "there is mlx5_0 port 1 (up), mlx5_1 port 1 (down);",
            ),
            (
                "mlx5_0:2",
                &links[..],
                "there is mlx5_0 port 1 (up), mlx5_1 port 1 (down);",
            ),
            ("rxe0", &[], "there is no device at all;"),
        ] {
            let (found, cure) = warning(judge(text, links));
            let asked = format!("{} is asked for, but is not there", choice(text));
            assert!(
                found.starts_with(&asked) && found.contains(there),
                "{found}"
            );
            assert!(cure.contains("correct 'rdma'"), "{cure}");
        }
    }

    #[test]
    fn what_keeps_programs_from_a_port_is_told() {
        let closed = Link {
            is_for_programs: false,
            ..link("mlx5_0")
        };
        assert_eq!(warning(judge("auto", &[closed])).1, "modprobe ib_uverbs");
        let refused = |_: &Port| Err(VerbsError::NoPort("libibverbs is not installed".to_owned()));
        let (found, cure) = warning(ports(&Choice::Auto, &[link("mlx5_0")], refused));
        assert!(
            found.contains("is up, but") && found.contains("libibverbs is not"),
            "{found}"
        );
        assert!(cure.contains("libibverbs1"), "{cure}");
    }

    #[test]
    fn an_infiniband_port_is_chosen_by_its_network_device_or_named() {
        let said = passed(judge("auto", &[infiniband("mlx5_0")]));
        assert!(
            said.contains("is up (ib0), path MTU 4096, GID 0 (fe80::"),
            "{said}"
        );
        let bare = Link {
            network: None,
            ..infiniband("mlx5_0")
        };
        let (found, cure) = warning(judge("auto", std::slice::from_ref(&bare)));
        assert!(found.contains("no network device (IPoIB)"), "{found}");
        assert!(cure.contains("modprobe ib_ipoib"), "{cure}");
        passed(judge("mlx5_0", &[bare]));
    }

    #[test]
    fn a_port_without_an_address_is_told_with_its_cure() {
        let mut bare = link("mlx5_0");
        bare.addresses.truncate(1);
        let (found, cure) = warning(judge("auto", &[bare]));
        assert!(found.contains("no address that can be used"), "{found}");
        assert!(
            cure.contains("ip address add ADDRESS/PREFIX dev eth1"),
            "{cure}"
        );
        let (_, cure) = warning(judge("mlx5_0:1:3", &[link("mlx5_0")]));
        assert!(
            cure.contains("index 3") && cure.contains("1 (::ffff:10.0.0.2)"),
            "{cure}"
        );
    }

    #[test]
    fn packets_smaller_than_a_page_are_told_with_their_cure() {
        let cured = |link: &Link, bytes, most_bytes| {
            let mtu = PathMtu { bytes, most_bytes };
            let checks = ports(&Choice::Auto, std::slice::from_ref(link), |_| Ok(mtu));
            let (found, cure) = warning(checks);
            assert!(found.contains(&format!("path MTU {bytes}")), "{found}");
            cure
        };
        let small = |mtu_bytes| {
            let mut link = link("mlx5_0");
            link.network.as_mut().expect("it has one").mtu_bytes = mtu_bytes;
            link
        };
        let raised = cured(&small(1500), 1024, 4096);
        assert!(
            raised.starts_with("raise the MTU of eth1, 1500: ip link set eth1 mtu 4200"),
            "{raised}"
        );
        let lags = cured(&small(9000), 1024, 4096);
        assert!(
            lags.starts_with("the MTU of eth1, 9000, allows 4096"),
            "{lags}"
        );
        // One short of a page and what is around it.
        assert!(cured(&small(4191), 2048, 4096).starts_with("raise"));
        assert!(cured(&small(4192), 2048, 4096).contains("allows 4096"));
        assert!(cured(&infiniband("mlx5_0"), 2048, 4096).contains("subnet manager"));
        let able = PathMtu {
            bytes: 2048,
            most_bytes: 2048,
        };
        passed(ports(&Choice::Auto, &[link("mlx4_0")], |_| Ok(able)));
    }

    #[test]
    fn a_limit_of_locked_memory_matters_to_whom_it_binds() {
        let limit = |bytes, is_lifted| {
            locked_memory(&MemoryLimit {
                of: "of this shell".to_owned(),
                bytes,
                is_lifted,
                cure: "ulimit -l unlimited".to_owned(),
            })
        };
        let check = limit(Some(8 << 20), false);
        assert_eq!(check.verdict, Verdict::Warn);
        assert!(check.found.starts_with("8 MiB (of this shell)"), "{check}");
        assert_eq!(check.cure, "ulimit -l unlimited");
        assert_eq!(limit(None, false).verdict, Verdict::Pass);
        let check = limit(Some(8 << 20), true);
        assert_eq!(check.verdict, Verdict::Pass);
        assert!(check.found.contains("which backends lift"), "{check}");
    }
}
