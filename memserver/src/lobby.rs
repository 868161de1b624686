//! Connections that hold nothing yet: few, and none keeps others out.
//!
//! Where the lobby is full, a newcomer takes the place of the oldest connection of whoever has most of
//! them: an address before it is known who is there, a certificate after that.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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

impl<Who: Eq + Hash> Lobby<Who> {
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

impl<Who: Eq + Hash> Waiting<Who> {
    fn evict(&mut self) {
        let mut crowds: HashMap<&Who, usize> = HashMap::new();
        for (_, from, _) in &self.places {
            *crowds.entry(from).or_default() += 1;
        }
        let largest = crowds.values().copied().max();
        let oldest = self
            .places
            .iter()
            .position(|(_, from, _)| crowds.get(from).copied() == largest);
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
        let lobby: Lobby<std::net::IpAddr> = Lobby::new(3);
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
        assert!(lock(&lobby.waiting).places.is_empty());
    }
}
