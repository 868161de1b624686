//! Packets that come in by the network, which the device writes to the guest's memory. They are looked at
//! later than they come: what they lie in may have left and come back meanwhile.

use std::fs;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};

use crate::busybox::busybox;
use crate::pattern::mix;

/// Room for packets that nobody has looked at: more than a thousand of them.
const QUEUE_BYTES: u64 = 4 << 20;

/// Packets to one port that wait to be looked at.
pub(crate) struct Packets(UdpSocket);

impl Packets {
    /// Has them kept from now on, by an address of a network of 256.
    pub(crate) fn listen(address: &str, port: u16) -> Result<Self, String> {
        let words = |error: std::io::Error| error.to_string();
        // Of sockets that are made from now on.
        fs::write("/proc/sys/net/core/rmem_default", QUEUE_BYTES.to_string()).map_err(words)?;
        let address = format!("{address}/24");
        busybox(&["ip", "address", "add", &address, "dev", "eth0"])?;
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).map_err(words)?;
        socket.set_nonblocking(true).map_err(words)?;
        Ok(Self(socket))
    }

    /// Looks at all that have come: how many, and how many were not as they were sent, or came before
    /// another that was sent earlier.
    pub(crate) fn check(self) -> Result<(u64, u64), String> {
        let (mut packets, mut wrong) = (0, 0);
        let mut last = 0;
        let mut buffer = [0; 2048];
        loop {
            match self.0.recv(&mut buffer) {
                Ok(length) => {
                    let number = number_of(&buffer[..length]).filter(|number| *number > last);
                    packets += 1;
                    wrong += u64::from(number.is_none());
                    last = number.unwrap_or(last);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok((packets, wrong)),
                Err(error) => return Err(format!("a packet cannot be read: {error}")),
            }
        }
    }
}

/// A packet's number, where all else in it follows from that: its first word, and 256 times that with each
/// other word's index, mixed.
fn number_of(packet: &[u8]) -> Option<u64> {
    let (words, rest) = packet.as_chunks::<8>();
    let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
    let number = words.next()?;
    let is_right = (1..)
        .zip(words)
        .all(|(index, word)| word == mix((number << 8) | index));
    (is_right && rest.is_empty()).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_byte_is_seen() {
        let words = (0..175).map(|index| if index == 0 { 7 } else { mix((7 << 8) | index) });
        let mut packet: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        assert_eq!(number_of(&packet), Some(7));
        packet[700] ^= 1;
        assert_eq!(number_of(&packet), None);
        assert_eq!(number_of(&packet[..7]), None);
    }
}
