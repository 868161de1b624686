//! A wire that is longer than this machine's: a relay before a server, which holds all that passes for a
//! while, however much that is.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes that are held as one.
const PIECE_BYTES: usize = 256 << 10;

/// The relay; it ends with this process.
pub struct FarWire {
    /// Where it listens.
    pub address: SocketAddr,
}

impl FarWire {
    /// A relay before the server at `to`, which holds what passes for so long on its way there, and as long
    /// on its way back. Sleeping threads wake some 60 µs late, so that it is longer than asked for.
    pub fn before(to: &str, delay: Duration) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let to = to.to_owned();
        thread::spawn(move || {
            // A connection that cannot be passed on is closed: whoever made it tells.
            for near in listener.incoming().flatten() {
                let _ = TcpStream::connect(&to).and_then(|far| relay(&near, &far, delay));
            }
        });
        Ok(Self { address })
    }
}

fn relay(near: &TcpStream, far: &TcpStream, delay: Duration) -> io::Result<()> {
    for (from, to) in [(near, far), (far, near)] {
        to.set_nodelay(true)?;
        let (mut from, to) = (from.try_clone()?, to.try_clone()?);
        let (pieces, queue) = channel();
        thread::spawn(move || take(&mut from, &pieces));
        thread::spawn(move || pass_on(to, &queue, delay));
    }
    Ok(())
}

/// Takes what comes until there is no more, or nobody passes it on.
fn take(from: &mut TcpStream, pieces: &Sender<(Instant, Vec<u8>)>) {
    let mut room = vec![0; PIECE_BYTES];
    while let Ok(read @ 1..) = from.read(&mut room) {
        let piece = (Instant::now(), room[..read].to_vec());
        if pieces.send(piece).is_err() {
            break;
        }
    }
}

fn pass_on(mut to: TcpStream, queue: &Receiver<(Instant, Vec<u8>)>, delay: Duration) {
    for (came, piece) in queue {
        thread::sleep((came + delay).saturating_duration_since(Instant::now()));
        if to.write_all(&piece).is_err() {
            break;
        }
    }
    // What comes back ends by itself.
    let _ = to.shutdown(Shutdown::Write);
}
