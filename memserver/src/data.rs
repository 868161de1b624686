//! A data connection, once its token was good: requests are served in order, each by one or two
//! system calls that move bytes between the socket and the slabs directly.
//!
//! Reads that came together are answered so, by one call for many: what goes ahead of somebody's fault comes in
//! dozens, and each answer by itself would wake its reader. But the first of them is sent at once, for it
//! may be the fault's.
//!
//! Per connection there is one thread and a small buffer; what a write to a disk is [gathered] in is bounded for all of
//! them. A client that stops reading stops its own
//! thread, which gives up after a while; a frame against the protocol ends the connection.
//!
//! [gathered]: crate::gathering

use std::io::{self, Read};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use outram_wire::server::Extent;
use outram_wire::server::data::{
    self, DataError, EXTENT_BYTES, Op, REPLY_BYTES, REQUEST_BYTES, ReplyHeader, RequestHeader,
    Status,
};
use prometheus_client::metrics::counter::Counter;

use crate::gathering::Gatherer;
use crate::metrics::{Metrics, Of, Operation};
use crate::session::Admitted;
use crate::slab::{self, Part, Piece, Vectors};

/// The buffer: the longest request head, and some of what follows it, which is copied once more.
const BUFFER_BYTES: usize = 2 * data::MAX_REQUEST_BYTES;

/// Answers of so many bytes wait for no other. Linux sends each 64 KiB of a call as it has copied them, so that to
/// gather more keeps nothing back, and a call less is some microseconds less.
const GATHER_BYTES: usize = 256 << 10;

/// ... nor do any where the next might take more parts than one call does.
const GATHER_PARTS: usize = Vectors::MAX - (1 + data::MAX_EXTENTS);

/// What memory to gather a write in begins with; from then on it doubles as bytes arrive.
const FIRST_GATHERED_BYTES: usize = 64 << 10;

/// Whoever sends a write to a disk more slowly than this, and [`STALL_TIMEOUT`] beside, is left: others wait for the
/// memory that it is gathered in. No network that a disk is usable over is so slow.
const SLOWEST_BYTES_PER_S: u64 = 128 << 10;

/// How long such memory is waited for. A backend gives a connection up that takes nothing for 15 seconds.
const ROOM_TIMEOUT: Duration = Duration::from_secs(10);

/// Whoever sends nothing of such a write for so long is left if others wait for memory.
const CROWDED_TIMEOUT: Duration = Duration::from_secs(5);

/// A peer that neither sends the rest of a request nor takes a reply for so long is left.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a data connection ended otherwise than by its client's closing it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DataEnd {
    #[error("the connection failed")]
    Io(#[from] io::Error),
    #[error("the client broke the protocol")]
    Breach(#[from] DataError),
}

/// A data connection being served.
pub(crate) struct Service<'a> {
    socket: &'a TcpStream,
    session: &'a Admitted,
    metrics: &'a Metrics,
    /// Requests, each by its operation.
    counts: Counts,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Whether the request in work came together with the one before it.
    follows: bool,
    extents: Vec<Extent>,
    pieces: Vec<Piece>,
    answers: Answers,
    vectors: Vectors,
    gatherer: Gatherer<'a>,
}

impl<'a> Service<'a> {
    /// Takes a blocking socket whose hello was answered.
    pub(crate) fn new(
        socket: &'a TcpStream,
        session: &'a Admitted,
        metrics: &'a Metrics,
        gatherer: Gatherer<'a>,
    ) -> Self {
        Self {
            socket,
            session,
            metrics,
            counts: Counts::of(metrics),
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            follows: false,
            extents: Vec::new(),
            pieces: Vec::new(),
            answers: Answers::default(),
            vectors: Vectors::default(),
            gatherer,
        }
    }

    /// Serves requests until the client closes the connection.
    pub(crate) fn run(mut self) -> Result<(), DataEnd> {
        self.socket.set_read_timeout(Some(STALL_TIMEOUT))?;
        self.socket.set_write_timeout(Some(STALL_TIMEOUT))?;
        while let Some(header) = self.await_request()? {
            self.await_extents(&header)?;
            let total = data::check_request(&header, &self.extents)? as usize;
            let resolved = self.session.resolve(&self.extents, &mut self.pieces);
            match (resolved, header.op) {
                (Ok(()), Op::Read) => self.reply_bytes(header.id, total)?,
                (Ok(()), Op::Write) if self.session.holder.is_disk() => {
                    self.take_bytes_whole(header.id, total)?;
                }
                (Ok(()), Op::Write) => self.take_bytes(header.id, total)?,
                (Err((extent, status)), op) => {
                    let payload = if op == Op::Write { total } else { 0 };
                    self.refuse(header.id, extent, status, payload)?;
                }
            }
            // The slabs are not to be kept for longer than the request.
            self.pieces.clear();
        }
        Ok(())
    }

    /// The next request's header; none where the client closed the connection between requests.
    fn await_request(&mut self) -> Result<Option<RequestHeader>, DataEnd> {
        self.follows = self.start < self.end;
        while self.start == self.end {
            // Nothing is begun: the client may be silent for as long as its lease lasts.
            match self.read_more() {
                Ok(0) => return Ok(None),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        let header = *self.need::<REQUEST_BYTES>()?;
        Ok(Some(data::decode_request(&header)?))
    }

    fn await_extents(&mut self, header: &RequestHeader) -> Result<(), DataEnd> {
        self.extents.clear();
        for _ in 0..header.extents {
            let extent = data::decode_extent(self.need::<EXTENT_BYTES>()?);
            self.extents.push(extent);
        }
        Ok(())
    }

    /// Takes the next `N` bytes, waiting for them if they are not here yet.
    fn need<const N: usize>(&mut self) -> io::Result<&[u8; N]> {
        while self.end - self.start < N {
            if self.read_more()? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let taken = self.start;
        self.start += N;
        let bytes = self.buffer[taken..].first_chunk();
        Ok(bytes.expect("so many bytes were waited for"))
    }

    fn read_more(&mut self) -> io::Result<usize> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        loop {
            match self.socket.read(&mut self.buffer[self.end..]) {
                Ok(read) => {
                    self.end += read;
                    return Ok(read);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Answers a read: header and slabs' bytes in one call, as far as the socket takes them.
    fn reply_bytes(&mut self, id: u64, total: usize) -> Result<(), DataEnd> {
        self.reply(id, Status::Done, 0, total)?;
        self.counts.read.inc();
        self.metrics.read_bytes.inc_by(total as u64);
        Ok(())
    }

    /// Carries out a write: what is in the buffer already is stored, the rest received in place.
    fn take_bytes(&mut self, id: u64, total: usize) -> Result<(), DataEnd> {
        // Not of a disk, which is written here and there.
        self.pieces.iter().for_each(Piece::prepare);
        let here = total.min(self.end - self.start);
        slab::store(&self.pieces, &self.buffer[self.start..self.start + here]);
        self.start += here;
        let mut done = here;
        while done < total {
            let socket = self.socket.as_fd();
            match slab::receive(socket, &self.pieces, done, &mut self.vectors) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.acknowledge(id, total)
    }

    /// Carries out a write to a disk once all of it has arrived: a client or a connection that dies
    /// amid a request leaves what was there before, so that a block and its tag always match.
    fn take_bytes_whole(&mut self, id: u64, total: usize) -> Result<(), DataEnd> {
        if self.start == self.end && self.read_more()? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        let here = total.min(self.end - self.start);
        let buffered = &self.buffer[self.start..self.start + here];
        if here == total {
            slab::store(&self.pieces, buffered);
        } else {
            // Not before some of it is here: who announces a write and sends none of it keeps others from nothing.
            let until = Instant::now() + ROOM_TIMEOUT;
            let taken = self.gatherer.take(total, until, || self.session.is_cut());
            let _portion = taken.ok_or(io::Error::from(io::ErrorKind::TimedOut))?;
            let seconds = total as u64 / SLOWEST_BYTES_PER_S;
            let until = Instant::now() + STALL_TIMEOUT + Duration::from_secs(seconds);
            let gatherer = self.gatherer;
            self.socket.set_read_timeout(Some(CROWDED_TIMEOUT))?;
            let gathered = gather(self.socket, buffered, total, until, || gatherer.is_wanted())?;
            self.socket.set_read_timeout(Some(STALL_TIMEOUT))?;
            slab::store(&self.pieces, &gathered);
        }
        self.start += here;
        self.acknowledge(id, total)
    }

    fn acknowledge(&mut self, id: u64, total: usize) -> Result<(), DataEnd> {
        self.metrics.written_bytes.inc_by(total as u64);
        self.pieces.clear();
        self.reply(id, Status::Done, 0, 0)?;
        self.counts.written.inc();
        Ok(())
    }

    /// Answers a request that is not the client's to make; its payload is passed over.
    fn refuse(
        &mut self,
        id: u64,
        extent: u16,
        status: Status,
        mut payload: usize,
    ) -> Result<(), DataEnd> {
        self.pieces.clear();
        loop {
            let here = payload.min(self.end - self.start);
            self.start += here;
            payload -= here;
            if payload == 0 {
                break;
            }
            if self.read_more()? == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        }
        self.counts.refused.inc();
        self.reply(id, status, extent, 0)
    }

    fn reply(
        &mut self,
        id: u64,
        status: Status,
        extent: u16,
        payload_bytes: usize,
    ) -> Result<(), DataEnd> {
        let head = data::encode_reply(&ReplyHeader {
            status,
            extent,
            // At most MAX_PAYLOAD_BYTES.
            payload_bytes: payload_bytes as u32,
            id,
        });
        self.answers.add(head, &mut self.pieces, payload_bytes);
        let may_wait = self.follows && has_read(&self.buffer[self.start..self.end]);
        match may_wait && !self.answers.are_many() {
            true => Ok(()),
            false => self.send_answers(),
        }
    }

    fn send_answers(&mut self) -> Result<(), DataEnd> {
        let mut done = 0;
        while done < self.answers.bytes {
            let parts = self.answers.parts();
            match slab::send(self.socket.as_fd(), parts, done, &mut self.vectors) {
                Ok(sent) => done += sent,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.answers.clear();
        Ok(())
    }
}

/// The `total` bytes that begin with those `here`, once the others have come from `source`. It is asked for none after
/// `until`, nor once none came in time and it `is_crowded`.
fn gather(
    mut source: impl Read,
    here: &[u8],
    total: usize,
    until: Instant,
    is_crowded: impl Fn() -> bool,
) -> io::Result<Vec<u8>> {
    let mut gathered = Vec::with_capacity(total);
    gathered.extend_from_slice(here);
    let mut filled = here.len();
    while filled < total {
        if Instant::now() >= until {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if filled == gathered.len() {
            // Memory that nothing was written to is not taken from the system.
            gathered.resize(total.min(FIRST_GATHERED_BYTES.max(2 * filled)), 0);
        }
        match source.read(&mut gathered[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !is_crowded() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(gathered)
}

/// Counters of requests: to look them up costs what many a request does in all.
struct Counts {
    read: Counter,
    written: Counter,
    refused: Counter,
}

impl Counts {
    fn of(metrics: &Metrics) -> Self {
        let of = |operation| metrics.data_requests.get_or_create_owned(&Of { operation });
        Self {
            read: of(Operation::Read),
            written: of(Operation::Write),
            refused: of(Operation::Refused),
        }
    }
}

/// Answers that are sent together.
#[derive(Default)]
struct Answers {
    /// Each answer's head, and how many of the pieces are before the next one's.
    heads: Vec<([u8; REPLY_BYTES], usize)>,
    pieces: Vec<Piece>,
    /// Of all of them.
    bytes: usize,
}

impl Answers {
    fn add(&mut self, head: [u8; REPLY_BYTES], pieces: &mut Vec<Piece>, payload_bytes: usize) {
        self.pieces.append(pieces);
        self.heads.push((head, self.pieces.len()));
        self.bytes += head.len() + payload_bytes;
    }

    fn are_many(&self) -> bool {
        self.bytes >= GATHER_BYTES || self.heads.len() + self.pieces.len() > GATHER_PARTS
    }

    fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        let starts = std::iter::once(0).chain(self.heads.iter().map(|(_, end)| *end));
        self.heads
            .iter()
            .zip(starts)
            .flat_map(|((head, end), start)| {
                let pieces = self.pieces[start..*end].iter().map(Part::Piece);
                std::iter::once(Part::Bytes(head)).chain(pieces)
            })
    }

    fn clear(&mut self) {
        self.heads.clear();
        self.pieces.clear();
        self.bytes = 0;
    }
}

/// Whether these bytes begin with a whole request to read, which is answered without waiting for its client.
fn has_read(bytes: &[u8]) -> bool {
    let Some(Ok(header)) = bytes.first_chunk().map(data::decode_request) else {
        return false;
    };
    let length = REQUEST_BYTES + usize::from(header.extents) * EXTENT_BYTES;
    header.op == Op::Read && bytes.len() >= length
}

#[cfg(test)]
mod tests {
    use outram_wire::server::SlabId;

    use super::*;

    #[test]
    fn an_answer_waits_for_no_request_that_is_not_here_as_a_whole() {
        let extent = |offset| Extent {
            slab: SlabId(1),
            offset,
            length: 4096,
        };
        let (mut read, mut write) = (Vec::new(), Vec::new());
        let extents = [extent(0), extent(4096)];
        data::encode_request(Op::Read, 1, &extents, &mut read).expect("legal");
        data::encode_request(Op::Write, 1, &extents, &mut write).expect("legal");
        assert!(has_read(&read));
        assert!(has_read(&[&read[..], &write[..5]].concat()));
        assert!((0..read.len()).all(|length| !has_read(&read[..length])));
        assert!(!has_read(&write), "its answer waits for its bytes");
        read[0] = 99;
        assert!(!has_read(&read), "it is not answered");
    }

    /// Sends so many bytes at a time, each its place's, and remembers the most memory that it was given.
    struct Source {
        at_a_time: usize,
        sent: usize,
        most_given: usize,
    }

    impl Read for &mut Source {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.most_given = self.most_given.max(self.sent + into.len());
            let sent = into.len().min(self.at_a_time);
            for (byte, place) in into[..sent].iter_mut().zip(self.sent..) {
                *byte = place as u8;
            }
            self.sent += sent;
            Ok(sent)
        }
    }

    fn source(at_a_time: usize) -> Source {
        Source {
            at_a_time,
            sent: 3,
            most_given: 0,
        }
    }

    #[test]
    fn what_is_gathered_is_what_came() {
        let some_day = Instant::now() + Duration::from_secs(3600);
        for at_a_time in [1000, data::MAX_PAYLOAD_BYTES] {
            let total = data::MAX_PAYLOAD_BYTES - 5;
            let mut source = source(at_a_time);
            let gathered =
                gather(&mut source, &[0, 1, 2], total, some_day, || true).expect("it came");
            let right = |(place, byte): (usize, &u8)| *byte == place as u8;
            assert_eq!((gathered.len(), source.sent), (total, total));
            assert!(gathered.iter().enumerate().all(right));
        }
    }

    /// Its end comes after so many bytes.
    struct Ending(Source, usize);

    impl Read for &mut Ending {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            match self.0.sent < self.1 {
                true => (&mut self.0).read(into),
                false => Ok(0),
            }
        }
    }

    #[test]
    fn memory_to_gather_in_grows_as_bytes_arrive() {
        let some_day = Instant::now() + Duration::from_secs(3600);
        for arrived in [1, FIRST_GATHERED_BYTES, 1 << 20] {
            let mut ending = Ending(source(512), arrived);
            let gathered = gather(
                &mut ending,
                &[0, 1, 2],
                data::MAX_PAYLOAD_BYTES,
                some_day,
                || true,
            );
            let error = gathered.expect_err("it ended");
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
            let most = FIRST_GATHERED_BYTES.max(2 * ending.0.sent);
            assert!(ending.0.most_given <= most, "{arrived} bytes arrived");
        }
    }

    #[test]
    fn who_dribbles_a_write_is_left() {
        let mut dribbling = source(1);
        let gathered = gather(&mut dribbling, &[0, 1, 2], 1 << 20, Instant::now(), || {
            false
        });
        let error = gathered.expect_err("its time is over");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    /// Nothing comes of it in time, again and again.
    struct Stalling(Source, usize);

    impl Read for &mut Stalling {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            match self.1.checked_sub(1) {
                Some(left) => {
                    self.1 = left;
                    Err(io::ErrorKind::WouldBlock.into())
                }
                None => (&mut self.0).read(into),
            }
        }
    }

    #[test]
    fn who_stalls_amid_a_write_is_left_once_others_wait() {
        let some_day = Instant::now() + Duration::from_secs(3600);
        let mut stalling = Stalling(source(4096), 3);
        let gathered = gather(&mut stalling, &[0, 1, 2], 1 << 20, some_day, || false);
        assert_eq!(gathered.expect("nobody waits").len(), 1 << 20);
        let mut stalling = Stalling(source(4096), 3);
        let gathered = gather(&mut stalling, &[0, 1, 2], 1 << 20, some_day, || true);
        let error = gathered.expect_err("somebody waits");
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert_eq!(stalling.1, 2, "at once");
    }
}
