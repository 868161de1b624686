//! The end of a queue pair that reads and writes its peer's memory, through buffers of its own.
//!
//! A request's stretches become work requests that are posted together, with one doorbell; the last
//! one alone is signalled. A queue pair completes in order, so the buffers are a ring.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;

use rdma_mummy_sys as ibv;

use super::device::{Access, Buffer, checked, refused};
use super::queue_pair::QueuePair;
use super::{Domain, End, Failure, VerbsError};

/// Work requests in flight at most, if the device takes as many: two of the largest requests.
const REQUESTS: u32 = 512;

/// Work requests that a request becomes at most; a device that takes no more is of no use.
const REQUESTS_LEAST: u32 = crate::server::data::MAX_EXTENTS as u32;

/// Bytes in flight at first: many single pages, or a few batches of them. Where a request needs more,
/// there is more from then on.
const BUFFER_BYTES: usize = 1 << 20;

/// Completions taken at once.
const BATCH: usize = 16;

/// A part of the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Where it begins.
    pub address: u64,
    /// The key of its region.
    pub key: u32,
    /// Bytes.
    pub length: u32,
}

/// Why a request was not posted.
#[derive(Debug, thiserror::Error)]
pub enum PostError {
    /// As much is in flight as may be: post again after a completion.
    #[error("as much is in flight as may be")]
    Full,
    /// The queue pair is of no use any more.
    #[error(transparent)]
    Failed(#[from] VerbsError),
}

/// A request in flight.
struct InFlight {
    id: u64,
    number: u64,
    start: usize,
    bytes: usize,
    requests: u32,
    is_read: bool,
}

/// The end that makes requests. Owned by one thread; never blocks.
pub struct Initiator {
    // Dropped first: after that no device accesses the buffer.
    pair: QueuePair,
    buffer: Buffer,
    domain: Domain,
    in_flight: VecDeque<InFlight>,
    /// Where the ring's free part begins.
    head: usize,
    next_number: u64,
    requests_free: u32,
    elements: Vec<ibv::ibv_sge>,
    requests: Vec<ibv::ibv_send_wr>,
}

// SAFETY: the pointers in `requests` lead into `elements` and itself, and are followed only within the
// call that has set them.
unsafe impl Send for Initiator {}

impl AsFd for Initiator {
    /// Readable when something has completed.
    fn as_fd(&self) -> BorrowedFd<'_> {
        let channel = self.pair.channel.expect("made with a channel");
        // SAFETY: the channel lives as long as the queue pair.
        let fd = unsafe { channel.as_ref() }.fd;
        // SAFETY: the descriptor is open for as long as the channel lives.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Initiator {
    /// Makes one that is not joined with a peer's yet.
    pub fn new(domain: &Domain) -> Result<Self, VerbsError> {
        let limits = domain.0.limits;
        let requests = REQUESTS
            .min(limits.requests)
            .min(limits.completions.saturating_sub(1));
        if requests < REQUESTS_LEAST {
            let few = format!("{} takes only {requests} requests at once", domain.port());
            return Err(VerbsError::NoPort(few));
        }
        let made = Self {
            pair: QueuePair::new(domain, requests, true)?,
            buffer: Buffer::new(domain, BUFFER_BYTES, Access::Own)?,
            domain: domain.clone(),
            in_flight: VecDeque::new(),
            head: 0,
            next_number: 0,
            requests_free: requests,
            elements: Vec::with_capacity(REQUESTS_LEAST as usize),
            requests: Vec::with_capacity(REQUESTS_LEAST as usize),
        };
        keep_from_blocking(&made)?;
        made.arm()?;
        Ok(made)
    }

    /// As the peer has to know it.
    pub fn end(&self) -> End {
        self.pair.end()
    }

    /// Joins it with the peer's. May take a while.
    pub fn connect(&mut self, peer: &End) -> Result<(), VerbsError> {
        self.pair.connect(peer)
    }

    /// Reads the stretches, one after the other, under this id.
    pub fn read(&mut self, id: u64, from: &[Stretch]) -> Result<(), PostError> {
        let start = self.reserve(from)?;
        Ok(self.post(id, from, start, ibv::ibv_wr_opcode::IBV_WR_RDMA_READ)?)
    }

    /// Writes `payload`, whose pieces are together as long as the stretches, to them.
    pub fn write(&mut self, id: u64, to: &[Stretch], payload: &[&[u8]]) -> Result<(), PostError> {
        let bytes: usize = payload.iter().map(|piece| piece.len()).sum();
        assert_eq!(bytes, length_of(to), "a payload for every byte");
        let start = self.reserve(to)?;
        let mut at = start;
        for piece in payload {
            // SAFETY: the range was free: nothing in flight reads or writes it.
            let place = unsafe { self.buffer.slice(at, piece.len()) };
            place.copy_from_slice(piece);
            at += piece.len();
        }
        Ok(self.post(id, to, start, ibv::ibv_wr_opcode::IBV_WR_RDMA_WRITE)?)
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Calls `each` with the id of every request that has completed, in their order, and with what it
    /// read (nothing where it wrote). After an error nothing more completes: of what was in flight, any
    /// part may have happened.
    pub fn complete(&mut self, mut each: impl FnMut(u64, &mut [u8])) -> Result<(), VerbsError> {
        if self.take_events()? {
            self.arm()?;
        }
        loop {
            // SAFETY: a structure of integers, which may be zero.
            let mut taken: [ibv::ibv_wc; BATCH] = unsafe { std::mem::zeroed() };
            let (queue, room) = (self.pair.completions.as_ptr(), BATCH as i32);
            // SAFETY: the queue lives as long as the pair; there is room for so many.
            let count = unsafe { ibv::ibv_poll_cq(queue, room, taken.as_mut_ptr()) };
            let Ok(count) = usize::try_from(count) else {
                let source = io::Error::from_raw_os_error(count.abs());
                let port = &self.pair.opened().port;
                return Err(refused(port, "to tell what has completed", source));
            };
            for completion in &taken[..count] {
                self.end_one(completion, &mut each)?;
            }
            if count < BATCH {
                return Ok(());
            }
        }
    }

    fn end_one(
        &mut self,
        completion: &ibv::ibv_wc,
        each: &mut impl FnMut(u64, &mut [u8]),
    ) -> Result<(), VerbsError> {
        if completion.status != ibv::ibv_wc_status::IBV_WC_SUCCESS {
            return Err(VerbsError::Failed(Failure::from(completion.status)));
        }
        let Some(ended) = self.in_flight.pop_front() else {
            return Err(VerbsError::Failed(Failure::Unknown));
        };
        // Only a request's last part is signalled, and they end in order.
        if ended.number != completion.wr_id {
            return Err(VerbsError::Failed(Failure::Unknown));
        }
        self.requests_free += ended.requests;
        let bytes = if ended.is_read { ended.bytes } else { 0 };
        // SAFETY: the transfer into this range has completed, and no other has it.
        each(ended.id, unsafe { self.buffer.slice(ended.start, bytes) });
        Ok(())
    }

    /// Has the next completion be told of by the channel.
    fn arm(&self) -> Result<(), VerbsError> {
        // SAFETY: the queue lives as long as the pair.
        let errno = unsafe { ibv::ibv_req_notify_cq(self.pair.completions.as_ptr(), 0) };
        checked(&self.pair.opened().port, "to tell of completions", errno)
    }

    /// Takes what the channel tells; whether that was anything.
    fn take_events(&mut self) -> Result<bool, VerbsError> {
        let channel = self.pair.channel.expect("made with a channel");
        let mut any = false;
        loop {
            let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel lives as long as the pair, and does not block; the places are ours.
            let failed = unsafe {
                ibv::ibv_get_cq_event(channel.as_ptr(), &raw mut queue, &raw mut context)
            };
            if failed != 0 {
                let error = io::Error::last_os_error();
                return match error.kind() {
                    io::ErrorKind::WouldBlock => Ok(any),
                    io::ErrorKind::Interrupted => continue,
                    _ => Err(refused(&self.pair.opened().port, "events", error)),
                };
            }
            any = true;
            // SAFETY: an event of this queue was taken just now.
            unsafe { ibv::ibv_ack_cq_events(queue, 1) };
        }
    }

    /// Room in the ring for the stretches' bytes.
    fn reserve(&mut self, stretches: &[Stretch]) -> Result<usize, PostError> {
        let bytes = length_of(stretches);
        if stretches.is_empty() || stretches.len() > self.requests_free as usize {
            return Err(PostError::Full);
        }
        if self.in_flight.is_empty() {
            if bytes > self.buffer.bytes() {
                let bytes = bytes.next_multiple_of(BUFFER_BYTES);
                self.buffer = Buffer::new(&self.domain, bytes, Access::Own)?;
            }
            return Ok(0);
        }
        let tail = self.in_flight.front().map_or(0, |oldest| oldest.start);
        let (head, end) = (self.head, self.buffer.bytes());
        // Where head and tail meet while something is in flight, all is taken.
        if head > tail {
            if bytes <= end - head {
                return Ok(head);
            }
            return if bytes < tail {
                Ok(0)
            } else {
                Err(PostError::Full)
            };
        }
        if bytes < tail - head {
            return Ok(head);
        }
        Err(PostError::Full)
    }

    fn post(
        &mut self,
        id: u64,
        stretches: &[Stretch],
        start: usize,
        opcode: ibv::ibv_wr_opcode::Type,
    ) -> Result<(), VerbsError> {
        let number = self.next_number;
        self.lay_out(stretches, start, opcode, number);
        let first = self.requests.as_mut_ptr();
        let mut bad = ptr::null_mut();
        // SAFETY: the requests are a list that ends, of elements that outlive the call and describe
        // registered memory that nothing else in flight uses, and that outlives the queue pair.
        let errno = unsafe { ibv::ibv_post_send(self.pair.pair.as_ptr(), first, &raw mut bad) };
        // Where it fails some may be under way: the caller gives the queue pair up.
        checked(&self.pair.opened().port, "a request", errno)?;
        let bytes = length_of(stretches);
        self.next_number += 1;
        self.head = start + bytes;
        // At most MAX_EXTENTS, as `reserve` has checked.
        let requests = stretches.len() as u32;
        self.requests_free -= requests;
        self.in_flight.push_back(InFlight {
            id,
            number,
            start,
            bytes,
            requests,
            is_read: opcode == ibv::ibv_wr_opcode::IBV_WR_RDMA_READ,
        });
        Ok(())
    }

    fn lay_out(
        &mut self,
        stretches: &[Stretch],
        start: usize,
        opcode: ibv::ibv_wr_opcode::Type,
        number: u64,
    ) {
        self.elements.clear();
        let mut at = start;
        for stretch in stretches {
            self.elements.push(ibv::ibv_sge {
                addr: self.buffer.address(at),
                length: stretch.length,
                lkey: self.buffer.region().local_key(),
            });
            at += stretch.length as usize;
        }
        self.requests.clear();
        for (element, stretch) in self.elements.iter_mut().zip(stretches) {
            // SAFETY: a structure of integers and pointers, which may be zero.
            let mut request: ibv::ibv_send_wr = unsafe { std::mem::zeroed() };
            request.wr_id = number;
            request.sg_list = element;
            request.num_sge = 1;
            request.opcode = opcode;
            request.wr.rdma = ibv::rdma_t {
                remote_addr: stretch.address,
                rkey: stretch.key,
            };
            self.requests.push(request);
        }
        if let Some(last) = self.requests.last_mut() {
            last.send_flags = ibv::ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
        for index in 1..self.requests.len() {
            let next: *mut ibv::ibv_send_wr = &raw mut self.requests[index];
            self.requests[index - 1].next = next;
        }
    }
}

fn length_of(stretches: &[Stretch]) -> usize {
    stretches
        .iter()
        .map(|stretch| stretch.length as usize)
        .sum()
}

/// Events are looked for, never waited for.
fn keep_from_blocking(initiator: &Initiator) -> Result<(), VerbsError> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let set = fcntl(initiator.as_fd(), FcntlArg::F_SETFL(OFlag::O_NONBLOCK));
    set.map(drop).map_err(|errno| {
        let port = &initiator.pair.opened().port;
        refused(port, "a channel that does not block", errno.into())
    })
}
