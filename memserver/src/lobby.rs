//! Connections that have not yet shown who they are: few, and not for long.
//!
//! Where the lobby is full, a newcomer takes the place of the oldest connection of the address that
//! has most of them: so a crowd from one machine does not keep others out.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The lobby; cloning shares it.
#[derive(Clone)]
pub(crate) struct Lobby {
    limit: usize,
    waiting: Arc<Mutex<Waiting>>,
}

#[derive(Default)]
struct Waiting {
    next: u64,
    /// Oldest first.
    places: VecDeque<(u64, IpAddr, Arc<TcpStream>)>,
}

/// A place in the lobby; leaving is dropping it.
pub(crate) struct Place {
    lobby: Lobby,
    id: u64,
}

impl Lobby {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
            waiting: Arc::default(),
        }
    }

    /// Takes a newcomer in; true if another had to make room.
    pub(crate) fn enter(&self, address: IpAddr, socket: Arc<TcpStream>) -> (Place, bool) {
        let mut waiting = self.waiting();
        let crowded = waiting.places.len() >= self.limit;
        if crowded {
            waiting.evict();
        }
        let id = waiting.next;
        waiting.next += 1;
        waiting.places.push_back((id, address, socket));
        let lobby = self.clone();
        (Place { lobby, id }, crowded)
    }

    /// Ends everyone's waiting.
    pub(crate) fn clear(&self) {
        for (_, _, socket) in self.waiting().places.drain(..) {
            // It may have ended by itself.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn evict(&mut self) {
        let mut crowds: HashMap<IpAddr, usize> = HashMap::new();
        for (_, address, _) in &self.places {
            *crowds.entry(*address).or_default() += 1;
        }
        let largest = crowds.values().copied().max();
        let oldest = self
            .places
            .iter()
            .position(|(_, address, _)| crowds.get(address).copied() == largest);
        if let Some((_, _, socket)) = oldest.and_then(|place| self.places.remove(place)) {
            // Its thread notices, and leaves a lobby that it is in no more.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut waiting = self.lobby.waiting();
        waiting.places.retain(|(id, _, _)| *id != self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;
    use std::time::Duration;

    use super::*;

    fn pair() -> (TcpStream, Arc<TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let address = listener.local_addr().expect("bound");
        let near = TcpStream::connect(address).expect("connected");
        let (far, _) = listener.accept().expect("accepted");
        let timeout = Some(Duration::from_millis(50));
        near.set_read_timeout(timeout).expect("a time-out is legal");
        (near, Arc::new(far))
    }

    #[test]
    fn a_crowd_from_one_address_makes_room_for_others() {
        let lobby = Lobby::new(3);
        let addresses = ["192.0.2.1", "192.0.2.2", "192.0.2.2", "192.0.2.3"];
        let mut sockets: Vec<_> = addresses.iter().map(|_| pair()).collect();
        let places: Vec<_> = addresses
            .iter()
            .zip(&sockets)
            .map(|(address, (_, far))| {
                lobby.enter(address.parse().expect("an address"), far.clone())
            })
            .collect();
        assert!(places[3].1 && !places[2].1);
        let ended: Vec<bool> = sockets
            .iter_mut()
            .map(|(near, _)| matches!(near.read(&mut [0]), Ok(0)))
            .collect();
        assert_eq!(ended, [false, true, false, false]);
        drop(places);
        assert!(lobby.waiting().places.is_empty());
    }
}
