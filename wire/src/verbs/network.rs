//! Which network device has an address of this machine's.
//!
//! `getifaddrs(3)` asks over netlink, which the units of our daemons keep from them.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::AsRawFd;

/// The kernel's list of addresses of IPv6.
const ADDRESSES: &str = "/proc/net/if_inet6";

/// More addresses of IPv4 than a machine has.
const MOST: usize = 1024;

/// The name of the network device with this address.
pub(super) fn with_address(address: IpAddr) -> Option<String> {
    match address.to_canonical() {
        IpAddr::V4(address) => with_ipv4(address),
        IpAddr::V6(address) => with_ipv6(&fs::read_to_string(ADDRESSES).ok()?, address),
    }
}

/// By SIOCGIFCONF; see netdevice(7).
fn with_ipv4(wanted: Ipv4Addr) -> Option<String> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
    // SAFETY: a structure of integers and unions of such, which may be zero.
    let blank: libc::ifreq = unsafe { std::mem::zeroed() };
    let mut found = vec![blank; MOST];
    let mut list = libc::ifconf {
        ifc_len: i32::try_from(size_of_val(&found[..])).ok()?,
        ifc_ifcu: libc::__c_anonymous_ifc_ifcu {
            ifcu_req: found.as_mut_ptr(),
        },
    };
    // SAFETY: the list tells how many bytes it has room for, and outlives the call.
    let told = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFCONF as _, &raw mut list) };
    if told != 0 {
        return None;
    }
    found.truncate(usize::try_from(list.ifc_len).ok()? / size_of::<libc::ifreq>());
    let address_of = |entry: &libc::ifreq| {
        // SAFETY: the call tells a name and an address, all of IPv4, in each entry.
        let address = unsafe { entry.ifr_ifru.ifru_addr };
        let [_, _, a, b, c, d, ..] = address.sa_data.map(|byte| byte as u8);
        Ipv4Addr::new(a, b, c, d)
    };
    let entry = found.iter().find(|entry| address_of(entry) == wanted)?;
    // SAFETY: the kernel ends the name with a zero.
    let name = unsafe { CStr::from_ptr(entry.ifr_name.as_ptr()) };
    // An address beside the first may have a label, such as ib0:1.
    let name = name.to_str().ok()?.split(':').next()?;
    Some(name.to_owned())
}

/// As the kernel lists them: the address in 32 hexadecimal digits, four numbers, and the name.
fn with_ipv6(list: &str, wanted: Ipv6Addr) -> Option<String> {
    list.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let address = u128::from_str_radix(words.next()?, 16).ok()?;
        let name = words.nth(4)?;
        (Ipv6Addr::from_bits(address) == wanted).then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_device_has_the_loopback_address() {
        assert_eq!(with_address([127, 0, 0, 1].into()).as_deref(), Some("lo"));
        let mapped = IpAddr::from(Ipv4Addr::LOCALHOST.to_ipv6_mapped());
        assert_eq!(with_address(mapped).as_deref(), Some("lo"));
        assert_eq!(with_address([192, 0, 2, 1].into()), None);
    }

    #[test]
    fn addresses_of_ipv6_are_found_in_the_kernels_list() {
        let list = "00000000000000000000000000000001 01 80 10 80       lo\n\
                    fd000000000000000000000000000002 05 40 00 80      ib0\nnonsense\n";
        let find = |text: &str| with_ipv6(list, text.parse().expect("an address"));
        assert_eq!(find("fd00::2").as_deref(), Some("ib0"));
        assert_eq!(find("::1").as_deref(), Some("lo"));
        assert_eq!(find("fd00::3"), None);
    }
}
