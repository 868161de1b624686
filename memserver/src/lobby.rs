//! Connections that hold nothing yet: few, and none keeps others out.
//!
//! Where the lobby is full, a newcomer takes the place of the oldest connection of whoever has most of
//! them: before it is known who is there, of the IPv6 network that has most the address that has; after that, a
//! certificate.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use outram_wire::server::ClientName;

/// Who waits in a lobby.
pub(crate) trait Guest: Clone + Eq + Hash {
    /// Who may come as several, by a name that all of those have.
    fn house(&self) -> Self;
}

impl Guest for ClientName {
    fn house(&self) -> Self {
        self.clone()
    }
}

impl Guest for IpAddr {
    /// Of IPv6, where anybody has as many addresses as it likes within its network, that network (/64).
    fn house(&self) -> Self {
        match self.to_canonical() {
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
            }
            address => address,
        }
    }
}

/// The lobby of connections from each `Who`.
pub(crate) struct Lobby<Who> {
    limit: usize,
    waiting: Arc<Mutex<Waiting<Who>>>,
}

struct Waiting<Who> {
    next: u64,
    /// Oldest first.
    places: VecDeque<(u64, Who, Arc<TcpStream>)>,
}

/// A place in the lobby; leaving is dropping it.
pub(crate) struct Place<Who> {
    waiting: Arc<Mutex<Waiting<Who>>>,
    id: u64,
}

impl<Who: Guest> Lobby<Who> {
    pub(crate) fn new(limit: usize) -> Self {
        let waiting = Waiting {
            next: 0,
            places: VecDeque::new(),
        };
        Self {
            limit,
            waiting: Arc::new(Mutex::new(waiting)),
        }
    }

    /// Takes a newcomer in; true if another had to make room.
    pub(crate) fn enter(&self, from: Who, socket: Arc<TcpStream>) -> (Place<Who>, bool) {
        let mut waiting = lock(&self.waiting);
        let crowded = waiting.places.len() >= self.limit;
        if crowded {
            waiting.evict();
        }
        let id = waiting.next;
        waiting.next += 1;
        waiting.places.push_back((id, from, socket));
        let waiting = self.waiting.clone();
        (Place { waiting, id }, crowded)
    }

    /// Ends everyone's waiting.
    pub(crate) fn clear(&self) {
        for (_, _, socket) in lock(&self.waiting).places.drain(..) {
            // It may have ended by itself.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn lock<Who>(waiting: &Mutex<Waiting<Who>>) -> MutexGuard<'_, Waiting<Who>> {
    // A change under the lock completes or does not begin.
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<Who: Guest> Waiting<Who> {
    fn evict(&mut self) {
        let (mut houses, mut guests) = (HashMap::new(), HashMap::new());
        for (_, from, _) in &self.places {
            *houses.entry(from.house()).or_insert(0) += 1;
            *guests.entry(from).or_insert(0) += 1;
        }
        let crowd = |from: &Who| (houses[&from.house()], guests[from]);
        let largest = self.places.iter().map(|(_, from, _)| crowd(from)).max();
        let mut places = self.places.iter();
        let oldest = places.position(|(_, from, _)| Some(crowd(from)) == largest);
        if let Some((_, _, socket)) = oldest.and_then(|place| self.places.remove(place)) {
            // Its thread notices, and leaves a lobby that it is in no more.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl<Who> Drop for Place<Who> {
    fn drop(&mut self) {
        let mut waiting = lock(&self.waiting);
        waiting.places.retain(|(id, _, _)| *id != self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (TcpStream, Arc<TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let address = listener.local_addr().expect("bound");
        let near = TcpStream::connect(address).expect("connected");
        let (far, _) = listener.accept().expect("accepted");
        (near, Arc::new(far))
    }

    /// Which one has to go when the last of these comes into a lobby that is full.
    fn put_out(addresses: &[&str]) -> usize {
        let lobby: Lobby<IpAddr> = Lobby::new(addresses.len() - 1);
        let sockets: Vec<_> = addresses.iter().map(|_| pair()).collect();
        let enter = |(address, (_, far)): (&&str, &(TcpStream, Arc<TcpStream>))| {
            lobby.enter(address.parse().expect("an address"), far.clone())
        };
        let places: Vec<_> = addresses.iter().zip(&sockets).map(enter).collect();
        let (last, others) = places.split_last().expect("some");
        assert!(last.1 && others.iter().all(|(_, had_to_go)| !had_to_go));
        let stays = |id: &u64| {
            lock(&lobby.waiting)
                .places
                .iter()
                .any(|place| place.0 == *id)
        };
        let gone: Vec<u64> = (0..addresses.len() as u64)
            .filter(|id| !stays(id))
            .collect();
        let [gone] = gone[..] else {
            panic!("{gone:?}");
        };
        let mut near = &sockets[gone as usize].0;
        assert_eq!(near.read(&mut [0]).expect("it has ended"), 0);
        drop(places);
        assert!(lock(&lobby.waiting).places.is_empty());
        gone as usize
    }

    #[test]
    fn a_crowd_from_one_address_makes_room_for_others() {
        let crowd = ["192.0.2.1", "192.0.2.2", "192.0.2.2", "192.0.2.3"];
        assert_eq!(put_out(&crowd), 1);
        // Others of its network stay.
        let crowd = ["2001:db8::1", "2001:db8::2", "2001:db8::2", "2001:db8::3"];
        assert_eq!(put_out(&crowd), 1);
        // Who takes a new address each time is put out before who has two of another network.
        let crowd = [
            "2001:db8:0:1::1",
            "2001:db8:0:1::1",
            "2001:db8::1",
            "2001:db8::2",
            "2001:db8::3",
            "2001:db8::4",
        ];
        assert_eq!(put_out(&crowd), 2);
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_house() {
        let of = |address: &str| address.parse::<IpAddr>().expect("an address").house();
        assert_eq!(
            of("2001:db8:1:2::3"),
            of("2001:db8:1:2:ffff:ffff:ffff:ffff")
        );
        assert_ne!(of("2001:db8:1:2::3"), of("2001:db8:1:3::3"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("::ffff:192.0.2.1"), of("::ffff:192.0.2.2"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }
}
