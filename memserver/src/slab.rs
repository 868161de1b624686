//! Slabs: the memory that is lent, and the only code that touches it.
//!
//! A slab is a private anonymous mapping. Its bytes are never a Rust reference: sockets are filled
//! from it and drained into it by the kernel, and what has arrived in a buffer already is stored
//! word by word through atomics, so that two connections of one client that write the same place
//! leave one or the other's bytes there and nothing worse.
//!
//! Releasing a slab is dropping the last [`Arc`](std::sync::Arc) of it: the mapping goes back to
//! the system, which zeroes memory before anyone else gets it. A request in work keeps its own
//! `Arc`, so nothing is taken away under a running copy. What is mapped is counted until then.
//!
//! Over RDMA a client reads and writes its slabs by itself, under a key that it is told: the slab is
//! registered in the client's own protection domain. A slab that is taken back is first [revoked]
//! (the key is void from then on, whatever is on its way), and its memory given back after that.
//!
//! A slab begins [half a page](LEAD) into its mapping. Clients keep pages at multiples of a page, and to a socket
//! each goes behind its reply's head, of 16 bytes: into kernel memory whose place within its page would be that
//! of the bytes in theirs, and 16 more. Processors from AMD's Zen 3 on copy so (`rep movsb` to a place that is
//! less than 32 bytes behind the source's, modulo 4096) at a twentieth of their speed.
//!
//! [revoked]: Slab::revoke
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use outram_wire::logging::Seldom;
use outram_wire::units::PAGE_SIZE;
use outram_wire::verbs::{Access, Domain, Region, Remote, VerbsError};

/// Where in its mapping a slab begins.
const LEAD: usize = PAGE_SIZE / 2;

/// Memory of one slab.
#[derive(Debug)]
pub(crate) struct Slab {
    /// Its first byte, [`LEAD`] bytes into the mapping.
    base: NonNull<u8>,
    bytes: usize,
    counts: Counts,
    /// Which of its [`PARTS`] have had their memory taken from the system, bit by bit.
    populated: AtomicU64,
    registration: Mutex<Registration>,
}

/// Bytes that are stored at once.
const WORD: usize = size_of::<u64>();

/// Parts of a slab that memory is taken for at once: page by page it would cost a write to a new slab as much
/// again as its bytes do.
const PARTS: usize = u64::BITS as usize;

/// Memory that is taken from the system by one call: others who map, or give memory back, wait as long.
const POPULATED_BYTES: usize = 2 << 20;

/// Whether a slab's client may touch it over RDMA.
#[derive(Debug)]
enum Registration {
    /// It never asked.
    None,
    /// Under this key.
    Registered(Region),
    /// Never again.
    Revoked,
}

/// Where mapped bytes are counted, from mapping to unmapping.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    /// Of the whole server.
    pub(crate) server: Arc<AtomicU64>,
    /// Of the client that the slab was leased to: a slab that it released and still reads from
    /// stays on its own account, so that nobody else goes short.
    pub(crate) client: Arc<AtomicU64>,
}

// SAFETY: the mapping belongs to the slab alone and is not bound to a thread.
unsafe impl Send for Slab {}
// SAFETY: through `&Slab` the memory is only handed to the kernel or written through atomics.
unsafe impl Sync for Slab {}

/// A range within a slab; whoever makes one has checked nothing: [`Piece::new`] does.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    slab: Arc<Slab>,
    offset: usize,
    bytes: usize,
}

impl Slab {
    /// Maps a slab. It reads as zeros, and takes memory from the system as it is written.
    pub(crate) fn map(bytes: usize, counts: Counts) -> io::Result<Self> {
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory of
        // ours; the result is checked before it is used.
        let mapping = unsafe {
            libc::mmap(
                ptr::null_mut(),
                LEAD + bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapping == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let Some(mapping) = NonNull::new(mapping.cast::<u8>()) else {
            return Err(io::Error::other("the system mapped a slab at address zero"));
        };
        // SAFETY: the mapping is longer than that.
        let base = unsafe { mapping.add(LEAD) };
        for count in [&counts.server, &counts.client] {
            count.fetch_add(bytes as u64, Ordering::AcqRel);
        }
        let slab = Self {
            base,
            bytes,
            counts,
            populated: AtomicU64::new(0),
            registration: Mutex::new(Registration::None),
        };
        slab.keep_private()?;
        Ok(slab)
    }

    /// Maps a slab that nobody has yet, and has all of its memory taken from the system, as zeros.
    pub(crate) fn map_ahead(bytes: usize) -> io::Result<Self> {
        let slab = Self::map(bytes, Counts::default())?;
        slab.populate(0, bytes)?;
        slab.populated.store(u64::MAX, Ordering::Relaxed);
        Ok(slab)
    }

    /// The whole mapping: where it begins, and its bytes.
    fn mapping(&self) -> (*mut libc::c_void, usize) {
        // SAFETY: the mapping begins so many bytes before the slab.
        let start = unsafe { self.base.as_ptr().sub(LEAD) };
        (start.cast(), LEAD + self.bytes)
    }

    /// Has the memory taken from the system of all pages that hold a byte of a range, which lies within the slab.
    fn populate(&self, offset: usize, bytes: usize) -> io::Result<()> {
        let (mapping, _) = self.mapping();
        let first = (LEAD + offset) / PAGE_SIZE * PAGE_SIZE;
        let end = (LEAD + offset + bytes).next_multiple_of(PAGE_SIZE);
        for at in (first..end).step_by(POPULATED_BYTES) {
            let bytes = POPULATED_BYTES.min(end - at);
            // SAFETY: the page of a byte of the slab begins within the mapping.
            let start = unsafe { mapping.add(at) };
            // SAFETY: the range is our own mapping, the last page of which is ours as a whole; the advice brings its
            // pages in, as a write to each would, and changes no byte.
            let advised = unsafe { libc::madvise(start, bytes, libc::MADV_POPULATE_WRITE) };
            if advised != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }

    /// The same for the parts that a range lies in, unless they have theirs.
    fn populate_parts(&self, offset: usize, bytes: usize) {
        let part = self.bytes / PARTS;
        for number in offset / part..(offset + bytes).div_ceil(part) {
            let bit = 1 << number;
            let is_new = self.populated.load(Ordering::Relaxed) & bit == 0
                && self.populated.fetch_or(bit, Ordering::Relaxed) & bit == 0;
            // Where there is none, whoever writes to it meets that.
            if is_new && let Err(error) = self.populate(number * part, part) {
                tracing::debug!(%error, "a slab's memory is not taken ahead");
            }
        }
    }

    /// The slab, counted here from now on.
    pub(crate) fn counted(mut self, counts: Counts) -> Self {
        let bytes = self.bytes();
        for count in [&counts.server, &counts.client] {
            count.fetch_add(bytes, Ordering::AcqRel);
        }
        let former = std::mem::replace(&mut self.counts, counts);
        for count in [&former.server, &former.client] {
            count.fetch_sub(bytes, Ordering::AcqRel);
        }
        self
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// What the slab is called over RDMA, in its client's protection domain; none once it is revoked.
    /// Registering takes all of its memory from the system.
    pub(crate) fn key(&self, domain: &Domain) -> Result<Option<Remote>, VerbsError> {
        let mut registration = self.registration();
        let is_needed = match &*registration {
            Registration::None => true,
            // Of a device that is gone.
            Registration::Registered(region) => !region.is_of(domain),
            Registration::Revoked => false,
        };
        if is_needed {
            // SAFETY: the mapping lives until `drop`, which revokes first. No Rust code relies on its
            // bytes.
            let region =
                unsafe { Region::register(domain, self.base, self.bytes, Access::ReadWrite) }?;
            *registration = Registration::Registered(region);
        }
        Ok(match &*registration {
            Registration::Registered(region) => Some(region.remote()),
            Registration::None | Registration::Revoked => None,
        })
    }

    /// Ends its client's access over RDMA, for good.
    pub(crate) fn revoke(&self) {
        *self.registration() = Registration::Revoked;
    }

    /// Ends its client's access in this domain until it asks for a key again.
    pub(crate) fn unregister(&self, domain: &Domain) {
        let mut registration = self.registration();
        if matches!(&*registration, Registration::Registered(region) if region.is_of(domain)) {
            *registration = Registration::None;
        }
    }

    fn registration(&self) -> MutexGuard<'_, Registration> {
        // A change is a single assignment.
        self.registration
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps it from being revoked meanwhile, as a device does that takes long for it.
    #[cfg(test)]
    pub(crate) fn keep_registration(&self) -> impl Drop + '_ {
        self.registration()
    }

    /// A guest's memory has no place in a core dump.
    fn keep_private(&self) -> io::Result<()> {
        let (mapping, bytes) = self.mapping();
        // SAFETY: the range is exactly our own mapping; the advice changes no byte of it.
        let advised = unsafe { libc::madvise(mapping, bytes, libc::MADV_DONTDUMP) };
        if advised != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // Before anybody else gets the memory.
        self.revoke();
        let (mapping, bytes) = self.mapping();
        // SAFETY: the mapping is ours, was not unmapped before, and no `Piece` refers to it any
        // more, for each holds an `Arc` of the slab.
        let unmapped = unsafe { libc::munmap(mapping, bytes) };
        if unmapped != 0 {
            // One mapping more would be too many for the system: where neighbours are kept as one, taking out the
            // middle leaves two.
            let error = io::Error::last_os_error();
            // SAFETY: the range is our own mapping, to which nobody refers.
            let emptied = unsafe { libc::madvise(mapping, bytes, libc::MADV_DONTNEED) };
            static NOT_UNMAPPED: Seldom = Seldom::new();
            if NOT_UNMAPPED.is_due() {
                match emptied {
                    0 => {
                        tracing::warn!(%error, "a slab's memory is given back, its addresses are not: raise vm.max_map_count")
                    }
                    _ => {
                        tracing::error!(%error, "a slab's memory is not given back: raise vm.max_map_count")
                    }
                }
            }
        }
        for count in [&self.counts.server, &self.counts.client] {
            count.fetch_sub(self.bytes as u64, Ordering::AcqRel);
        }
    }
}

impl Piece {
    /// The range, if it lies within the slab.
    pub(crate) fn new(slab: Arc<Slab>, offset: u32, length: u32) -> Option<Self> {
        let (offset, bytes) = (offset as usize, length as usize);
        let end = offset.checked_add(bytes)?;
        (end <= slab.bytes).then_some(Self {
            slab,
            offset,
            bytes,
        })
    }

    /// The range's part from `skip` on, for the kernel to read or write.
    fn io_vector(&self, skip: usize) -> libc::iovec {
        assert!(skip <= self.bytes, "a part lies within its piece");
        // SAFETY: offset + skip lies within the mapping, for offset + bytes does (`Piece::new`).
        let start = unsafe { self.slab.base.as_ptr().add(self.offset + skip) };
        libc::iovec {
            iov_base: start.cast(),
            iov_len: self.bytes - skip,
        }
    }

    /// Prepares the range for being written.
    pub(crate) fn prepare(&self) {
        // Parts are whole pages wherever slabs are of a size that is worth it.
        if self.slab.bytes.is_multiple_of(PARTS * PAGE_SIZE) {
            self.slab.populate_parts(self.offset, self.bytes);
        }
    }

    /// Stores `source` at `at` within the range.
    fn store(&self, at: usize, source: &[u8]) {
        let end = at.checked_add(source.len());
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "what is stored lies within its piece"
        );
        let place = self.offset + at;
        let before = (place.next_multiple_of(WORD) - place).min(source.len());
        let (first, rest) = source.split_at(before);
        let (words, last) = rest.as_chunks();
        let place_of = |word: usize| place + before + word * WORD;
        if !first.is_empty() {
            store_part(self.word(place), place % WORD, first);
        }
        for (number, bytes) in words.iter().enumerate() {
            let word = self.word(place_of(number));
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
        if !last.is_empty() {
            store_part(self.word(place_of(words.len())), 0, last);
        }
    }

    /// The word of the slab that its byte at `place` is in.
    fn word(&self, place: usize) -> &AtomicU64 {
        assert!(place < self.slab.bytes, "a place lies within its slab");
        // SAFETY: the word of a byte of the slab lies within the mapping, which begins and ends at a page.
        let word = unsafe { self.slab.base.as_ptr().add(place / WORD * WORD) };
        // SAFETY: a slab begins at a multiple of a word in its mapping, which ends at a page's end: the word is
        // aligned, valid for as long as `self` holds the slab, and never accessed by Rust code other than through
        // atomics of this size.
        unsafe { AtomicU64::from_ptr(word.cast()) }
    }
}

/// Stores some of a word's bytes and leaves its others as they are, whoever writes to those meanwhile.
fn store_part(word: &AtomicU64, at: usize, source: &[u8]) {
    let with = |before: u64| {
        let mut bytes = before.to_ne_bytes();
        bytes[at..at + source.len()].copy_from_slice(source);
        Some(u64::from_ne_bytes(bytes))
    };
    // It never gives up.
    let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with);
}

/// A part of what is sent or received.
pub(crate) enum Part<'a> {
    Bytes(&'a [u8]),
    Piece(&'a Piece),
}

impl Part<'_> {
    fn bytes(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Piece(piece) => piece.bytes,
        }
    }

    fn io_vector(&self, skip: usize) -> libc::iovec {
        match self {
            Self::Bytes(bytes) => libc::iovec {
                iov_base: bytes[skip..].as_ptr().cast_mut().cast(),
                iov_len: bytes.len() - skip,
            },
            Self::Piece(piece) => piece.io_vector(skip),
        }
    }
}

/// Vectors for the kernel: parts one after the other, but for the first `done` bytes. Kept for reuse.
#[derive(Default)]
pub(crate) struct Vectors(Vec<libc::iovec>);

// SAFETY: the vector is emptied before each use; addresses left in it are never followed.
unsafe impl Send for Vectors {}

impl Vectors {
    /// The most that one call takes (`IOV_MAX`).
    pub(crate) const MAX: usize = 1024;

    fn gather<'a>(&mut self, parts: impl Iterator<Item = Part<'a>>, done: usize) {
        self.0.clear();
        let mut skip = done;
        for part in parts {
            let skipped = skip.min(part.bytes());
            skip -= skipped;
            if skipped < part.bytes() {
                self.0.push(part.io_vector(skipped));
            }
        }
    }
}

/// Sends the parts' bytes, but for the first `done` of them all; returns how many the socket took.
pub(crate) fn send<'a>(
    socket: BorrowedFd<'_>,
    parts: impl Iterator<Item = Part<'a>>,
    done: usize,
    vectors: &mut Vectors,
) -> io::Result<usize> {
    vectors.gather(parts, done);
    // SAFETY: a message header of zeros is a legal one: no name, no vectors, no control bytes.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.0.as_mut_ptr();
    message.msg_iovlen = vectors.0.len();
    // SAFETY: the vectors describe bytes that are borrowed for `'a` and ranges of slabs that pieces
    // borrowed as long keep mapped; the kernel only reads them.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Receives into the pieces, but for the first `done` bytes of them; returns how many came, zero
/// where the peer has closed.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    pieces: &[Piece],
    done: usize,
    vectors: &mut Vectors,
) -> io::Result<usize> {
    vectors.gather(pieces.iter().map(Part::Piece), done);
    let count = i32::try_from(vectors.0.len()).unwrap_or(i32::MAX);
    // SAFETY: the vectors describe ranges of slabs that the pieces keep mapped during the call; no
    // Rust reference to their bytes exists.
    let read = unsafe { libc::readv(socket.as_raw_fd(), vectors.0.as_ptr(), count) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// Stores `source`, which is at most as long as the pieces together, from their first byte on.
pub(crate) fn store(pieces: &[Piece], source: &[u8]) {
    let mut rest = source;
    for piece in pieces {
        let (here, later) = rest.split_at(rest.len().min(piece.bytes));
        piece.store(0, here);
        rest = later;
    }
    assert!(rest.is_empty(), "what is stored fits its pieces");
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use outram_wire::server::data::REPLY_BYTES;

    use super::*;

    const BYTES: usize = 64 * 1024;

    fn slab(counts: &Counts) -> Arc<Slab> {
        Arc::new(Slab::map(BYTES, counts.clone()).expect("64 KiB can be mapped"))
    }

    fn read(pieces: &[Piece]) -> Vec<u8> {
        let (mut near, far) = UnixStream::pair().expect("a socket pair");
        let total: usize = pieces.iter().map(|piece| piece.bytes).sum();
        let mut vectors = Vectors::default();
        let mut done = 0;
        while done < total {
            let parts = pieces.iter().map(Part::Piece);
            done += send(far.as_fd(), parts, done, &mut vectors).expect("sent");
        }
        let mut bytes = vec![0xff; total];
        near.read_exact(&mut bytes).expect("received");
        bytes
    }

    #[test]
    fn ranges_past_the_end_are_no_pieces() {
        let slab = slab(&Counts::default());
        assert!(Piece::new(slab.clone(), 0, BYTES as u32).is_some());
        assert!(Piece::new(slab.clone(), 1, BYTES as u32).is_none());
        assert!(Piece::new(slab.clone(), BYTES as u32, 1).is_none());
        assert!(Piece::new(slab, u32::MAX, u32::MAX).is_none());
    }

    #[test]
    fn bytes_come_back_across_pieces() {
        let slab = slab(&Counts::default());
        let piece = |offset, length| Piece::new(slab.clone(), offset, length).expect("in range");
        let pieces = [piece(4096, 10), piece(0, 3), piece(9000, 20)];
        let data: Vec<u8> = (1..=33).collect();
        store(&pieces, &data[..12]);
        let (mut near, far) = UnixStream::pair().expect("a socket pair");
        near.write_all(&data[12..]).expect("sent");
        let mut done = 12;
        let mut vectors = Vectors::default();
        while done < data.len() {
            done += receive(far.as_fd(), &pieces, done, &mut vectors).expect("received");
        }
        assert_eq!(read(&pieces), data);
        assert_eq!(read(&[piece(4106, 4)]), [0; 4]);
    }

    #[test]
    fn bytes_are_stored_at_any_place_and_none_beside_them() {
        let slab = slab(&Counts::default());
        let whole = [Piece::new(slab.clone(), 0, 64).expect("in range")];
        for offset in 0..2 * WORD {
            for length in 0..=3 * WORD {
                store(&whole, &[0xee; 64]);
                let piece = Piece::new(slab.clone(), offset as u32, length as u32);
                let bytes: Vec<u8> = (1..=length as u8).collect();
                store(&[piece.expect("in range")], &bytes);
                let mut expected = [0xee; 64];
                expected[offset..offset + length].copy_from_slice(&bytes);
                assert_eq!(read(&whole), expected, "{length} bytes at {offset}");
            }
        }
    }

    #[test]
    fn a_page_goes_to_no_place_a_few_bytes_behind_its_own_within_a_page() {
        let slab = slab(&Counts::default());
        let page = Piece::new(slab, 3 * PAGE_SIZE as u32, PAGE_SIZE as u32).expect("in range");
        let from = page.io_vector(0).iov_base.addr() % PAGE_SIZE;
        let behind = (REPLY_BYTES + PAGE_SIZE - from) % PAGE_SIZE;
        assert!(behind >= 64, "{behind} bytes");
    }

    #[test]
    fn parts_are_prepared_that_are_written() {
        let part = 2 * PAGE_SIZE;
        let slab = Slab::map(PARTS * part, Counts::default()).expect("it can be mapped");
        let slab = Arc::new(slab);
        let prepared = |offset: usize, bytes: usize| {
            let piece = Piece::new(slab.clone(), offset as u32, bytes as u32);
            piece.expect("in range").prepare();
            slab.populated.load(Ordering::Relaxed)
        };
        assert_eq!(prepared(3 * part, 1), 1 << 3);
        assert_eq!(prepared(3 * part, part), 1 << 3);
        assert_eq!(prepared(6 * part - 1, 2), 1 << 3 | 1 << 5 | 1 << 6);
        assert_eq!(prepared(0, PARTS * part), u64::MAX);
        let first = Piece::new(slab.clone(), 0, part as u32).expect("in range");
        assert_eq!(read(&[first]), vec![0; part], "it still reads as zeros");
    }

    #[test]
    fn a_slab_made_ahead_has_all_of_its_memory() {
        let bytes = 2 * POPULATED_BYTES + 3 * PAGE_SIZE;
        let slab = Slab::map_ahead(bytes).expect("it can be mapped");
        let (mapping, length) = slab.mapping();
        let mut resident = vec![0u8; length.div_ceil(PAGE_SIZE)];
        // SAFETY: the range is our own mapping, and the vector has a byte for each of its pages.
        let told = unsafe { libc::mincore(mapping, length, resident.as_mut_ptr()) };
        assert_eq!(told, 0);
        assert!(resident.iter().all(|page| page & 1 == 1), "{resident:?}");
    }

    #[test]
    fn memory_counts_until_its_last_user_is_done() {
        let counts = Counts::default();
        let slab = slab(&counts);
        let piece = Piece::new(slab.clone(), 0, 1).expect("in range");
        drop(slab);
        assert_eq!(counts.server.load(Ordering::Acquire), BYTES as u64);
        assert_eq!(counts.client.load(Ordering::Acquire), BYTES as u64);
        drop(piece);
        assert_eq!(counts.server.load(Ordering::Acquire), 0);
        assert_eq!(counts.client.load(Ordering::Acquire), 0);
    }
}
