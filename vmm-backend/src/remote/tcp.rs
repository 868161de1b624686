//! A data connection over TCP: requests go out with a single system call where the socket takes them,
//! replies are parsed in place from one reused buffer.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use foldhash::HashMap;
use outram_wire::server::data::{
    self, DataError, MAX_PAYLOAD_BYTES, MAX_REQUEST_BYTES, Op, REPLY_BYTES, Status,
};
use outram_wire::server::{Extent, SlabId};
use outram_wire::units::PAGE_SIZE;

use super::connection::Line;
use super::{ExtentError, RemoteError, ServerAddress, SubmitError};

/// Most bytes that wait for the socket: two of the largest requests, so that one can be queued
/// while the former is on its way.
const MAX_QUEUED_BYTES: usize = 2 * (MAX_REQUEST_BYTES + MAX_PAYLOAD_BYTES);

/// The queue grows by as much at least: small requests are queued one after the other.
const QUEUE_STEP_BYTES: usize = 4096;

/// The receive buffer at first: many single pages. It grows to the largest reply that is awaited.
const BUFFER_BYTES: usize = 256 * 1024;

/// What a reply must look like.
struct Pending {
    reply_payload_bytes: u32,
    /// Slabs of the extents by index, to name the one at fault; few requests name more than one.
    slabs: SlabNames,
}

/// The slab of each extent, without an allocation where all are in one slab.
enum SlabNames {
    Same(SlabId, usize),
    Each(Vec<SlabId>),
}

impl SlabNames {
    fn of(extents: &[Extent]) -> Self {
        match extents {
            [first, rest @ ..] if rest.iter().all(|extent| extent.slab == first.slab) => {
                Self::Same(first.slab, extents.len())
            }
            _ => Self::Each(extents.iter().map(|extent| extent.slab).collect()),
        }
    }

    fn get(&self, index: usize) -> Option<SlabId> {
        match self {
            Self::Same(slab, count) => (index < *count).then_some(*slab),
            Self::Each(slabs) => slabs.get(index).copied(),
        }
    }
}

/// A data connection over TCP. Owned by one thread; never blocks.
pub(super) struct TcpConn {
    pub(super) line: Line,
    socket: TcpStream,
    pending: HashMap<u64, Pending>,
    frame: Vec<u8>,
    queue: Vec<u8>,
    queue_start: usize,
    buffer: Buffer,
    /// What a look came to.
    looked: Option<io::Result<Taken>>,
}

/// What was taken from the socket at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taken {
    /// There was nothing.
    Nothing,
    /// All that there was.
    All,
    /// As much as there was room for.
    Part,
}

/// What has arrived and is not done with.
struct Buffer {
    bytes: Vec<u8>,
    /// Where in `bytes` a reply goes that finds the buffer empty: amid a page. The kernel has it at the beginning
    /// of one where it came from this host, and is far slower to copy it to a place that is a few bytes further
    /// within its page, as an allocation's first byte is, on processors from AMD's Zen 3 on.
    lead: usize,
    start: usize,
    end: usize,
}

impl Buffer {
    fn new(length: usize) -> Self {
        let bytes = vec![0; length];
        let lead = (PAGE_SIZE / 2).wrapping_sub(bytes.as_ptr().addr()) % PAGE_SIZE;
        Self {
            bytes,
            lead,
            start: lead,
            end: lead,
        }
    }

    fn arrived(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    fn free(&mut self) -> &mut [u8] {
        &mut self.bytes[self.end..]
    }

    /// Moves what has arrived to where a first reply goes, in a buffer that holds so many bytes from there on.
    fn make_room(&mut self, needed: usize) {
        let length = self.end - self.start;
        if self.bytes.len() - self.lead < needed {
            let mut larger = Self::new(needed + PAGE_SIZE - 1);
            larger.end += length;
            larger.bytes[larger.start..larger.end].copy_from_slice(self.arrived());
            *self = larger;
        } else if self.start > self.lead {
            self.bytes.copy_within(self.start..self.end, self.lead);
            (self.start, self.end) = (self.lead, self.lead + length);
        }
    }
}

impl AsFd for TcpConn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl TcpConn {
    /// Most memory that a connection's buffers take: a full queue and the largest reply. One that
    /// reads single pages stays at [`TcpConn::MEMORY_BYTES`].
    pub(super) const MEMORY_BYTES_MAX: usize =
        MAX_QUEUED_BYTES + REPLY_BYTES + MAX_PAYLOAD_BYTES + PAGE_SIZE;
    /// Memory that a connection's buffers take at first.
    pub(super) const MEMORY_BYTES: usize = BUFFER_BYTES + MAX_REQUEST_BYTES;

    /// Takes a socket that the server has admitted and that does not block.
    pub(super) fn new(server: ServerAddress, socket: TcpStream) -> Self {
        Self {
            line: Line::new(server),
            socket,
            pending: HashMap::default(),
            frame: Vec::with_capacity(MAX_REQUEST_BYTES),
            queue: Vec::new(),
            queue_start: 0,
            buffer: Buffer::new(BUFFER_BYTES),
            looked: None,
        }
    }

    /// Asks for the bytes of `extents`; the reply under `id` holds them one after the other.
    pub(super) fn submit_read(&mut self, id: u64, extents: &[Extent]) -> Result<(), SubmitError> {
        self.prepare(Op::Read, id, extents, &[])?;
        self.send(&[]).map_err(SubmitError::Dead)
    }

    /// The same, left to the next [`TcpConn::flush`].
    pub(super) fn queue_read(&mut self, id: u64, extents: &[Extent]) -> Result<(), SubmitError> {
        self.prepare(Op::Read, id, extents, &[])?;
        self.queue_rest(&[], 0);
        Ok(())
    }

    /// Sends `payload`, whose pieces together are as long as `extents`, to be stored there.
    pub(super) fn submit_write(
        &mut self,
        id: u64,
        extents: &[Extent],
        payload: &[&[u8]],
    ) -> Result<(), SubmitError> {
        self.prepare(Op::Write, id, extents, payload)?;
        self.send(payload).map_err(SubmitError::Dead)
    }

    /// Checks a request, notes it as in flight, and encodes it into `self.frame`.
    fn prepare(
        &mut self,
        op: Op,
        id: u64,
        extents: &[Extent],
        payload: &[&[u8]],
    ) -> Result<(), SubmitError> {
        self.line.check_alive()?;
        let total = data::check_extents(extents)?;
        let payload_bytes: usize = payload.iter().map(|piece| piece.len()).sum();
        if op == Op::Write && payload_bytes != total as usize {
            return Err(SubmitError::Illegal(DataError::Payload {
                payload_bytes: payload_bytes as u64,
                expected_bytes: total.into(),
            }));
        }
        if self.pending.contains_key(&id) {
            return Err(SubmitError::IdInUse(id));
        }
        let frame_bytes = MAX_REQUEST_BYTES + payload_bytes;
        if self.queued_bytes() + frame_bytes > MAX_QUEUED_BYTES {
            return Err(SubmitError::QueueFull);
        }
        self.frame.clear();
        data::encode_request(op, id, extents, &mut self.frame)?;
        let pending = Pending {
            reply_payload_bytes: if op == Op::Read { total } else { 0 },
            slabs: SlabNames::of(extents),
        };
        self.pending.insert(id, pending);
        Ok(())
    }

    /// Sends `self.frame` and the payload: what the socket takes at once, the rest is queued.
    fn send(&mut self, payload: &[&[u8]]) -> Result<(), RemoteError> {
        let mut sent = 0;
        if self.queued_bytes() == 0 {
            let written = if payload.is_empty() {
                self.socket.write(&self.frame)
            } else {
                let head = std::iter::once(self.frame.as_slice());
                let pieces = head.chain(payload.iter().copied());
                let slices: Vec<IoSlice<'_>> = pieces.map(IoSlice::new).collect();
                // Linux takes 1024 pieces at most; whatever is beyond is queued below.
                self.socket
                    .write_vectored(&slices[..slices.len().min(1024)])
            };
            sent = match written {
                Ok(0) => return Err(self.line.die(io::ErrorKind::WriteZero.into())),
                Ok(sent) => sent,
                Err(error) if is_temporary(&error) => 0,
                Err(error) => return Err(self.line.die(error)),
            };
            self.line.sent_bytes += sent as u64;
        }
        self.queue_rest(payload, sent);
        Ok(())
    }

    /// Queues `self.frame` and the payload but for the first `sent` bytes.
    fn queue_rest(&mut self, payload: &[&[u8]], sent: usize) {
        self.make_queue_room(payload, sent);
        let mut skip = sent;
        for piece in std::iter::once(self.frame.as_slice()).chain(payload.iter().copied()) {
            let skipped = skip.min(piece.len());
            skip -= skipped;
            self.queue.extend_from_slice(&piece[skipped..]);
        }
    }

    /// Room for what the socket did not take, and not more: a vector that doubles by itself would
    /// take twice what is promised.
    fn make_queue_room(&mut self, payload: &[&[u8]], sent: usize) {
        self.queue.drain(..self.queue_start);
        self.queue_start = 0;
        let payload_bytes: usize = payload.iter().map(|piece| piece.len()).sum();
        let rest = self.frame.len() + payload_bytes - sent;
        self.queue.reserve_exact(rest.max(QUEUE_STEP_BYTES));
    }

    /// Whether bytes wait for the socket to become writable: poll for that, then [`Self::flush`].
    pub(super) fn wants_write(&self) -> bool {
        !self.line.dead && self.queued_bytes() > 0
    }

    /// Sends what was queued, as far as the socket takes it.
    pub(super) fn flush(&mut self) -> Result<(), RemoteError> {
        self.line.check_alive()?;
        while self.queued_bytes() > 0 {
            match self.socket.write(&self.queue[self.queue_start..]) {
                Ok(0) => return Err(self.line.die(io::ErrorKind::WriteZero.into())),
                Ok(sent) => {
                    self.queue_start += sent;
                    self.line.sent_bytes += sent as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_temporary(&error) => break,
                Err(error) => return Err(self.line.die(error)),
            }
        }
        if self.queued_bytes() == 0 {
            self.queue.clear();
            self.queue_start = 0;
        } else if self.queue_start > self.queue.len() / 2 {
            self.queue.drain(..self.queue_start);
            self.queue_start = 0;
        }
        Ok(())
    }

    /// Takes what has arrived and calls `on_completion` once for each request that has ended: with
    /// the bytes read (none for a write), which it may change in place, or with why the server did
    /// not carry it out.
    pub(super) fn receive(
        &mut self,
        mut on_completion: impl FnMut(u64, Result<&mut [u8], ExtentError>),
    ) -> Result<(), RemoteError> {
        self.line.check_alive()?;
        loop {
            let looked = self.looked.take();
            let taken = match looked.unwrap_or_else(|| self.take()) {
                Ok(taken) => taken,
                Err(error) => return Err(self.line.die(error)),
            };
            if taken != Taken::Nothing {
                self.complete(&mut on_completion)?;
            }
            // What comes once all was taken raises a new poll event.
            if taken != Taken::Part {
                return Ok(());
            }
        }
    }

    /// Whether there is anything to [`receive`](Self::receive), an error among it. What has arrived is in the
    /// buffer from now on.
    pub(super) fn look(&mut self) -> bool {
        if self.looked.is_none() && !self.line.dead {
            self.looked = Some(self.take()).filter(|taken| !matches!(taken, Ok(Taken::Nothing)));
        }
        self.looked.is_some() || self.line.dead
    }

    /// Takes what the socket has, by one read.
    fn take(&mut self) -> io::Result<Taken> {
        self.make_room();
        loop {
            let free = self.buffer.free();
            let room = free.len();
            return match self.socket.read(free) {
                Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    self.buffer.end += read;
                    self.line.received_bytes += read as u64;
                    Ok(if read < room { Taken::All } else { Taken::Part })
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if is_temporary(&error) => Ok(Taken::Nothing),
                Err(error) => Err(error),
            };
        }
    }

    /// Completes the requests whose replies lie whole in the buffer.
    fn complete(
        &mut self,
        on_completion: &mut impl FnMut(u64, Result<&mut [u8], ExtentError>),
    ) -> Result<(), RemoteError> {
        while let Some(head) = self.buffer.arrived().first_chunk::<REPLY_BYTES>() {
            let header = data::decode_reply(head).map_err(|source| {
                self.line.dead = true;
                RemoteError::Frame {
                    server: self.line.server.clone(),
                    source,
                }
            })?;
            let Some(pending) = self.pending.get(&header.id) else {
                return Err(self
                    .line
                    .broken(format!("a reply to request {}, never made", header.id)));
            };
            let payload_bytes = header.payload_bytes as usize;
            let extent = usize::from(header.extent);
            let outcome = match (header.status, pending.slabs.get(extent)) {
                (Status::Done, _) if header.payload_bytes == pending.reply_payload_bytes => Ok(()),
                (Status::NotLeased, Some(slab)) if payload_bytes == 0 => {
                    Err(ExtentError::NotLeased {
                        index: extent,
                        slab,
                    })
                }
                (Status::OutOfRange, Some(slab)) if payload_bytes == 0 => {
                    Err(ExtentError::OutOfRange {
                        index: extent,
                        slab,
                    })
                }
                _ => {
                    return Err(self
                        .line
                        .broken(format!("{header:?} does not fit its request")));
                }
            };
            let payload_start = self.buffer.start + REPLY_BYTES;
            let payload_end = payload_start + payload_bytes;
            if payload_end > self.buffer.end {
                break;
            }
            self.pending.remove(&header.id);
            self.buffer.start = payload_end;
            let payload = &mut self.buffer.bytes[payload_start..payload_end];
            on_completion(header.id, outcome.map(|()| payload));
        }
        Ok(())
    }

    /// Has room for at least one byte more, and for all of the reply that began to arrive.
    fn make_room(&mut self) {
        let awaited = match self.buffer.arrived().first_chunk::<REPLY_BYTES>() {
            Some(head) => data::decode_reply(head).map_or(0, |header| header.payload_bytes),
            None => 0,
        };
        self.buffer.make_room(REPLY_BYTES + awaited as usize);
    }

    /// Requests in flight.
    pub(super) fn pending(&self) -> usize {
        self.pending.len()
    }

    fn queued_bytes(&self) -> usize {
        self.queue.len() - self.queue_start
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    use super::*;

    const PAYLOAD: u32 = 4096;

    /// A connection that has asked for a few bytes by this request, and its other end.
    fn asked(id: u64) -> (TcpConn, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let socket = TcpStream::connect(address).expect("somebody listens");
        socket.set_nonblocking(true).expect("a socket");
        let (peer, _) = listener.accept().expect("somebody comes");
        let name = address.to_string().parse().expect("an address");
        let mut conn = TcpConn::new(name, socket);
        let extent = Extent {
            slab: SlabId(7),
            offset: 0,
            length: PAYLOAD,
        };
        conn.submit_read(id, &[extent]).expect("sent");
        (conn, peer)
    }

    fn reply(id: u64) -> Vec<u8> {
        let head = data::encode_reply(&data::ReplyHeader {
            status: Status::Done,
            extent: 0,
            payload_bytes: PAYLOAD,
            id,
        });
        let payload = (0..PAYLOAD).map(|at| at as u8);
        head.into_iter().chain(payload).collect()
    }

    /// Looks until something has arrived.
    fn look(conn: &mut TcpConn) {
        let deadline = Instant::now() + Duration::from_secs(120);
        while !conn.look() {
            assert!(Instant::now() < deadline, "nothing has arrived");
        }
    }

    /// Requests that have ended, and their bytes; and whether the connection is alive.
    type Received = (Vec<(u64, Vec<u8>)>, Result<(), RemoteError>);

    fn receive(conn: &mut TcpConn) -> Received {
        let mut ended = Vec::new();
        let received = conn.receive(|id, outcome| {
            ended.push((id, outcome.expect("it was carried out").to_vec()));
        });
        (ended, received)
    }

    #[test]
    fn what_a_look_takes_is_received_once_and_an_end_behind_it_is_met() {
        let (mut conn, mut peer) = asked(5);
        assert!(!conn.look(), "nothing was sent yet");
        let reply = reply(5);
        let (begin, rest) = reply.split_at(1000);
        for part in [begin, rest] {
            peer.write_all(part).expect("it is taken");
            look(&mut conn);
            assert!(conn.look(), "it was not received yet");
            let (ended, received) = receive(&mut conn);
            received.expect("alive");
            let is_whole = part.len() == rest.len();
            let expected = is_whole.then(|| (5, reply[REPLY_BYTES..].to_vec()));
            assert_eq!(ended, Vec::from_iter(expected));
            assert!(!conn.look(), "all was received");
        }
        assert_eq!(conn.line.received_bytes, reply.len() as u64);
        assert_eq!(conn.pending(), 0);

        drop(peer);
        look(&mut conn);
        assert!(receive(&mut conn).1.is_err(), "it has ended");
        assert!(conn.look(), "that it has is to be heard again");
        assert!(receive(&mut conn).1.is_err());
    }

    #[test]
    fn replies_begin_amid_a_page_in_a_buffer_that_grows_too() {
        let mut buffer = Buffer::new(BUFFER_BYTES);
        let begins = |buffer: &Buffer| buffer.arrived().as_ptr().addr() % PAGE_SIZE;
        let arrives = |buffer: &mut Buffer, bytes: &[u8]| {
            buffer.free()[..bytes.len()].copy_from_slice(bytes);
            buffer.end += bytes.len();
        };
        assert_eq!(begins(&buffer), PAGE_SIZE / 2);
        arrives(&mut buffer, b"done with, not yet");
        buffer.start += b"done with, ".len();
        buffer.make_room(8);
        assert_eq!(buffer.arrived(), b"not yet");
        assert_eq!(begins(&buffer), PAGE_SIZE / 2);
        for needed in [BUFFER_BYTES, BUFFER_BYTES + 1, MAX_PAYLOAD_BYTES] {
            buffer.make_room(needed);
            assert_eq!(buffer.arrived(), b"not yet");
            assert_eq!(begins(&buffer), PAGE_SIZE / 2);
            assert!(buffer.arrived().len() + buffer.free().len() >= needed);
        }
    }
}
