//! A TCP line between a backend and its memory server that tests can cut, or let go bad: what comes
//! from the server is then altered, replayed, swapped, cut short or delayed.

use std::collections::{HashMap, VecDeque};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use outram_wire::server::data::{
    self, EXTENT_BYTES, Extent, HELLO_BYTES, MAGIC, Op, REPLY_BYTES, REQUEST_BYTES, WELCOME_BYTES,
};
use outram_wire::units::PageSize;

/// Bytes of a page, and of a huge one.
const PAGE_BYTES: u32 = PageSize::BASE.bytes() as u32;
const HUGE_BYTES: u32 = PageSize::HUGE.bytes() as u32;

/// By how much a reply is delayed: far longer than one takes.
const DELAY: Duration = Duration::from_millis(300);

/// What is done to what a server gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mischief {
    /// A bit is flipped.
    #[default]
    Flip,
    /// What the same place held before is given; nothing where it held nothing.
    Replay,
    /// What another place holds is given.
    Swap,
    /// Half of it is given, and the connection is cut.
    Truncate,
    /// It is given late.
    Delay,
}

#[derive(Debug, Default)]
struct Orders {
    mischief: Mischief,
    replies: u64,
    /// The only place that it is done to, once there is one.
    place: Option<Extent>,
    is_for_one: bool,
}

#[derive(Debug, Default)]
struct Shared {
    open: Mutex<Vec<TcpStream>>,
    refusing: AtomicBool,
    accepted: AtomicU64,
    orders: Mutex<Orders>,
    recording: AtomicBool,
    withholding: AtomicBool,
    withheld: AtomicU64,
    /// The two latest writes to each place.
    written: Mutex<HashMap<Extent, Vec<Vec<u8>>>>,
}

/// A forwarding proxy; its threads end with the process.
#[derive(Debug)]
pub struct Proxy {
    /// Where clients connect.
    pub address: String,
    shared: Arc<Shared>,
}

impl Proxy {
    /// Listens at `address` and forwards to `target`.
    pub fn start(address: &str, target: &str) -> Result<Self> {
        let listener = TcpListener::bind(address);
        Self::on(
            listener.with_context(|| format!("listening at {address}"))?,
            target,
        )
    }

    /// The same where somebody listens already.
    fn on(listener: TcpListener, target: &str) -> Result<Self> {
        let address = listener.local_addr()?.to_string();
        let shared = Arc::new(Shared::default());
        let (for_thread, target) = (Arc::clone(&shared), target.to_owned());
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                accept(client, &target, &for_thread);
            }
        });
        Ok(Self { address, shared })
    }

    /// Cuts every connection that stands; new ones are served again.
    pub fn cut(&self) -> usize {
        let mut open = lock(&self.shared.open);
        for socket in open.iter() {
            // A connection that has closed by itself is as good as cut.
            let _ = socket.shutdown(Shutdown::Both);
        }
        let cut = open.len() / 2;
        open.clear();
        cut
    }

    /// Refuses new connections, or serves them again.
    pub fn refuse(&self, refuse: bool) {
        self.shared.refusing.store(refuse, Ordering::Relaxed);
    }

    /// Keeps back answers to writes, which have been carried out, or lets them go.
    pub fn withhold(&self, withhold: bool) {
        self.shared.withholding.store(withhold, Ordering::Relaxed);
    }

    /// Connections with an answer that is kept back now.
    pub fn withheld(&self) -> u64 {
        self.shared.withheld.load(Ordering::Relaxed)
    }

    /// Flips a bit in the pages of that many replies to come.
    pub fn spoil(&self, replies: u64) {
        self.meddle(Mischief::Flip, replies);
    }

    /// Does this to that many replies to come.
    pub fn meddle(&self, mischief: Mischief, replies: u64) {
        *lock(&self.shared.orders) = Orders {
            mischief,
            replies,
            ..Orders::default()
        };
    }

    /// Flips a bit of whatever is read next whenever it is read, until other orders come.
    pub fn spoil_one_page(&self) {
        *lock(&self.shared.orders) = Orders {
            replies: u64::MAX,
            is_for_one: true,
            ..Orders::default()
        };
    }

    /// Replies that it is still to be done to.
    pub fn to_spoil(&self) -> u64 {
        lock(&self.shared.orders).replies
    }

    /// Remembers from now on what is written, to be replayed, swapped and looked into.
    pub fn record(&self) {
        self.shared.recording.store(true, Ordering::Relaxed);
    }

    /// Whether anything that was written since contains these bytes, at a multiple of their length.
    pub fn has_carried(&self, bytes: &[u8]) -> bool {
        let written = lock(&self.shared.written);
        let contains = |page: &Vec<u8>| page.chunks_exact(bytes.len()).any(|part| part == bytes);
        written.values().flatten().any(contains)
    }

    /// Connections accepted so far.
    pub fn accepted(&self) -> u64 {
        self.shared.accepted.load(Ordering::Relaxed)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accept(client: TcpStream, target: &str, shared: &Arc<Shared>) {
    if shared.refusing.load(Ordering::Relaxed) {
        return;
    }
    let Ok(server) = TcpStream::connect(target) else {
        return;
    };
    let (Ok(from), Ok(to)) = (client.try_clone(), server.try_clone()) else {
        return;
    };
    shared.accepted.fetch_add(1, Ordering::Relaxed);
    // Before anything is carried: a client that has its answer may have it cut.
    lock(&shared.open).extend([from, to]);
    let asked = Arc::<Mutex<VecDeque<Asked>>>::default();
    for (from, to, way) in [
        (&client, &server, Way::Requests),
        (&server, &client, Way::Replies),
    ] {
        let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else {
            return;
        };
        let (shared, asked) = (Arc::clone(shared), Arc::clone(&asked));
        std::thread::spawn(move || forward(from, to, way, &shared, &asked));
    }
}

/// A request on its way, in the order in which they are answered.
struct Asked {
    op: Op,
    extents: Vec<Extent>,
}

/// What a direction carries.
#[derive(Clone, Copy)]
enum Way {
    Requests,
    Replies,
}

impl Way {
    /// Bytes before the first frame.
    fn opening_bytes(self) -> usize {
        match self {
            Self::Requests => HELLO_BYTES,
            Self::Replies => WELCOME_BYTES,
        }
    }
}

fn forward(
    mut from: TcpStream,
    mut to: TcpStream,
    way: Way,
    shared: &Shared,
    asked: &Mutex<VecDeque<Asked>>,
) {
    // Latency is part of what is tested through the proxy.
    let _ = to.set_nodelay(true);
    // However it ends, the connection is shut.
    let _ = carry_all(&mut from, &mut to, way, shared, asked);
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

fn carry_all(
    from: &mut TcpStream,
    to: &mut TcpStream,
    way: Way,
    shared: &Shared,
    asked: &Mutex<VecDeque<Asked>>,
) -> Result<()> {
    if !carry_opening(from, to)? {
        return Ok(());
    }
    let mut rest = vec![0; way.opening_bytes() - MAGIC.len()];
    from.read_exact(&mut rest)?;
    to.write_all(&rest)?;
    loop {
        match way {
            Way::Requests => carry_request(from, to, shared, asked)?,
            Way::Replies => carry_reply(from, to, shared, asked)?,
        }
    }
}

/// Whether this is a data connection; what is none is carried over to its end.
fn carry_opening(from: &mut TcpStream, to: &mut TcpStream) -> Result<bool> {
    let mut seen = [0; MAGIC.len()];
    let mut length = 0;
    while length < seen.len() {
        let read = from.read(&mut seen[length..])?;
        to.write_all(&seen[length..length + read])?;
        length += read;
        if read == 0 || seen[..length] != MAGIC[..length] {
            std::io::copy(from, to)?;
            return Ok(false);
        }
    }
    Ok(true)
}

fn carry_request(
    from: &mut TcpStream,
    to: &mut TcpStream,
    shared: &Shared,
    asked: &Mutex<VecDeque<Asked>>,
) -> Result<()> {
    let mut head = [0; REQUEST_BYTES];
    from.read_exact(&mut head)?;
    let header = data::decode_request(&head)?;
    let mut frame = head.to_vec();
    let mut extents = Vec::new();
    for _ in 0..header.extents {
        let mut extent = [0; EXTENT_BYTES];
        from.read_exact(&mut extent)?;
        frame.extend_from_slice(&extent);
        extents.push(data::decode_extent(&extent));
    }
    let mut payload = vec![0; header.payload_bytes as usize];
    from.read_exact(&mut payload)?;
    if header.op == Op::Write && shared.recording.load(Ordering::Relaxed) {
        record(shared, &extents, &payload);
    }
    let op = header.op;
    lock(asked).push_back(Asked { op, extents });
    to.write_all(&frame)?;
    Ok(to.write_all(&payload)?)
}

/// The parts of what is written that are read by themselves: pages of 4 KiB that lie side by side are written as
/// one, and huge ones are not.
fn read_alone(written: Extent) -> impl Iterator<Item = Extent> {
    let are_pages = written.length < HUGE_BYTES && written.length.is_multiple_of(PAGE_BYTES);
    let length = if are_pages {
        PAGE_BYTES
    } else {
        written.length
    };
    (0..written.length / length).map(move |part| Extent {
        offset: written.offset + part * length,
        length,
        ..written
    })
}

fn record(shared: &Shared, extents: &[Extent], mut payload: &[u8]) {
    let mut written = lock(&shared.written);
    for extent in extents.iter().flat_map(|extent| read_alone(*extent)) {
        let (bytes, rest) = payload.split_at(extent.length as usize);
        let versions = written.entry(extent).or_default();
        versions.push(bytes.to_vec());
        // The latest, and what it replaced.
        if versions.len() > 2 {
            versions.remove(0);
        }
        payload = rest;
    }
}

fn carry_reply(
    from: &mut TcpStream,
    to: &mut TcpStream,
    shared: &Shared,
    asked: &Mutex<VecDeque<Asked>>,
) -> Result<()> {
    let mut head = [0; REPLY_BYTES];
    from.read_exact(&mut head)?;
    let header = data::decode_reply(&head)?;
    let mut payload = vec![0; header.payload_bytes as usize];
    from.read_exact(&mut payload)?;
    let request = lock(asked).pop_front().context("an answer to nothing")?;
    if request.op == Op::Write {
        shared.withhold();
    }
    if request.op == Op::Read && !payload.is_empty() {
        match shared.meddle(&request.extents, &mut payload) {
            Some(Mischief::Truncate) => {
                to.write_all(&head)?;
                to.write_all(&payload[..payload.len() / 2])?;
                bail!("cut short");
            }
            Some(Mischief::Delay) => std::thread::sleep(DELAY),
            Some(Mischief::Flip | Mischief::Replay | Mischief::Swap) | None => {}
        }
    }
    to.write_all(&head)?;
    Ok(to.write_all(&payload)?)
}

impl Shared {
    /// Returns once answers are not kept back, or no longer.
    fn withhold(&self) {
        if !self.withholding.load(Ordering::Relaxed) {
            return;
        }
        self.withheld.fetch_add(1, Ordering::Relaxed);
        while self.withholding.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.withheld.fetch_sub(1, Ordering::Relaxed);
    }

    /// Does to a reply what is to be done to replies, if anything can be; what was done. Of several pages that come
    /// together it is done to the first, which somebody waits for.
    fn meddle(&self, extents: &[Extent], payload: &mut [u8]) -> Option<Mischief> {
        let mut orders = lock(&self.orders);
        if orders.replies == 0 {
            return None;
        }
        let written = lock(&self.written);
        let mut read = extents.iter().flat_map(|extent| read_alone(*extent));
        let mut start = 0;
        let extent = read.find(|extent| {
            let is_it = orders.place.is_none_or(|place| place == *extent);
            start += if is_it { 0 } else { extent.length as usize };
            is_it
        })?;
        orders.place = orders.is_for_one.then_some(extent);
        let bytes = payload.get_mut(start..start + extent.length as usize)?;
        match orders.mischief {
            Mischief::Flip => bytes[0] ^= 0x10,
            Mischief::Replay => {
                let versions = written.get(&extent)?;
                let [earlier, _] = versions.as_slice() else {
                    return None;
                };
                bytes.copy_from_slice(earlier);
            }
            Mischief::Swap => {
                let like = |other: &&Extent| **other != extent && other.length == extent.length;
                let other = written.keys().find(like)?;
                bytes.copy_from_slice(written[other].last()?);
            }
            Mischief::Truncate | Mischief::Delay => {}
        }
        orders.replies -= 1;
        Some(orders.mischief)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwards_until_cut_and_serves_again() {
        let server = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let target = server.local_addr().expect("bound").to_string();
        std::thread::spawn(move || {
            for client in server.incoming().flatten() {
                let (mut from, mut to) = (client.try_clone().expect("clone"), client);
                std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            }
        });
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let proxy = Proxy::on(listener, &target).expect("starts");
        for _ in 0..2 {
            let mut client = TcpStream::connect(&proxy.address).expect("connects");
            client.write_all(b"hello").expect("sends");
            let mut back = [0; 5];
            client.read_exact(&mut back).expect("comes back");
            assert_eq!(&back, b"hello");
            proxy.cut();
            assert_eq!(client.read(&mut back).unwrap_or(0), 0);
        }
        assert_eq!(proxy.accepted(), 2);
    }
}
