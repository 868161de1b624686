//! Frames on a data connection, laid out by hand, little-endian.
//!
//! ```text
//! hello    0  magic "OUTRDATA"   8  version u16   10  zero [6]   16  token [32]          = 48
//! welcome  0  magic "OUTRDATA"   8  version u16   10  status u16 12  zero [4]            = 16
//! request  0  op u8  1 zero u8   2  extents u16    4  payload u32  8  id u64              = 16
//!          then per extent:      0  slab u64       8  offset u32  12  length u32          = 16 each
//!          then the payload: of a write its extents' bytes in order, of a read none
//! reply    0  status u8 1 zero   2  extent u16     4  payload u32  8  id u64              = 16
//!          then the payload: of a read its extents' bytes in order, else none
//! ```
//!
//! Requests of one connection are served and answered in order. A request that names a slab or a
//! range that is not its client's changes nothing and is answered with the extent's index. A frame
//! that breaks these rules ends the connection: after it nothing can be trusted to be a frame.

use super::{SlabId, Token};

/// First bytes of a data connection, either way.
pub const MAGIC: [u8; 8] = *b"OUTRDATA";
/// Version of these frames. A client speaks it only after the control connection agreed upon it.
pub const DATA_VERSION: u16 = 1;
/// Bytes of a hello.
pub const HELLO_BYTES: usize = 48;
/// Bytes of a welcome.
pub const WELCOME_BYTES: usize = 16;
/// Bytes of a request before its extents.
pub const REQUEST_BYTES: usize = 16;
/// Bytes of an extent.
pub const EXTENT_BYTES: usize = 16;
/// Bytes of a reply before its payload.
pub const REPLY_BYTES: usize = 16;
/// Most extents in a request: a batch of single pages worth one round trip.
pub const MAX_EXTENTS: usize = 256;
/// Most bytes that a request may move: bounds what a connection may keep others waiting for.
pub const MAX_PAYLOAD_BYTES: usize = 4 * 1024 * 1024;
/// Bytes of the longest request without its payload.
pub const MAX_REQUEST_BYTES: usize = REQUEST_BYTES + MAX_EXTENTS * EXTENT_BYTES;

/// A run of bytes within a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// The slab.
    pub slab: SlabId,
    /// First byte within the slab.
    pub offset: u32,
    /// Bytes; at least one.
    pub length: u32,
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Slab to client.
    Read,
    /// Client to slab.
    Write,
}

/// A request before its extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// What it does.
    pub op: Op,
    /// Extents that follow: 1 to [`MAX_EXTENTS`].
    pub extents: u16,
    /// Bytes that follow the extents.
    pub payload_bytes: u32,
    /// Chosen by the client, repeated in the reply.
    pub id: u64,
}

/// What came of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Done,
    /// The extent's slab is not leased to the client.
    NotLeased,
    /// The extent reaches past its slab's end.
    OutOfRange,
}

/// A reply before its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyHeader {
    /// What came of it.
    pub status: Status,
    /// Index of the extent at fault; zero where none is.
    pub extent: u16,
    /// Bytes that follow.
    pub payload_bytes: u32,
    /// The request's id.
    pub id: u64,
}

/// Whether a data connection is admitted. Those with a wrong token get no answer at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Requests may follow.
    Admitted,
    /// The client has as many data connections as it may have.
    TooMany,
}

/// Why bytes are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DataError {
    /// Not a data connection's first bytes.
    #[error("the peer does not speak Outram's data protocol")]
    Magic,
    /// Another version.
    #[error("version {0} of the data frames, expected {DATA_VERSION}")]
    Version(u16),
    /// A byte that must be zero is not.
    #[error("a reserved byte of a data frame is not zero")]
    Reserved,
    /// No such operation.
    #[error("unknown operation {0}, expected 1 (read) or 2 (write)")]
    Op(u8),
    /// No such status.
    #[error("unknown status {0}")]
    Status(u16),
    /// Too few or too many extents.
    #[error("{0} extents in a request, expected 1 to {MAX_EXTENTS}")]
    Extents(usize),
    /// An extent without bytes.
    #[error("an extent of no bytes")]
    EmptyExtent,
    /// A request that would move too much.
    #[error("a request moves {0} bytes, at most {MAX_PAYLOAD_BYTES} are allowed")]
    TooLong(u64),
    /// The payload does not fit the extents.
    #[error("a payload of {payload_bytes} bytes, expected {expected_bytes}")]
    Payload {
        /// Bytes announced.
        payload_bytes: u64,
        /// Bytes that the extents call for.
        expected_bytes: u64,
    },
}

/// Lays out a hello.
pub fn encode_hello(token: &Token) -> [u8; HELLO_BYTES] {
    let mut frame = [0; HELLO_BYTES];
    frame[..8].copy_from_slice(&MAGIC);
    frame[8..10].copy_from_slice(&DATA_VERSION.to_le_bytes());
    frame[16..].copy_from_slice(&token.0);
    frame
}

/// Reads a hello.
pub fn decode_hello(frame: &[u8; HELLO_BYTES]) -> Result<Token, DataError> {
    check_opening(frame)?;
    if frame[10..16] != [0; 6] {
        return Err(DataError::Reserved);
    }
    let mut token = [0; 32];
    token.copy_from_slice(&frame[16..]);
    Ok(Token(token))
}

/// Lays out a welcome.
pub fn encode_welcome(admission: Admission) -> [u8; WELCOME_BYTES] {
    let mut frame = [0; WELCOME_BYTES];
    frame[..8].copy_from_slice(&MAGIC);
    frame[8..10].copy_from_slice(&DATA_VERSION.to_le_bytes());
    frame[10] = match admission {
        Admission::Admitted => 0,
        Admission::TooMany => 1,
    };
    frame
}

/// Reads a welcome.
pub fn decode_welcome(frame: &[u8; WELCOME_BYTES]) -> Result<Admission, DataError> {
    check_opening(frame)?;
    if frame[12..] != [0; 4] {
        return Err(DataError::Reserved);
    }
    match u16_at(frame, 10) {
        0 => Ok(Admission::Admitted),
        1 => Ok(Admission::TooMany),
        other => Err(DataError::Status(other)),
    }
}

fn check_opening(frame: &[u8]) -> Result<(), DataError> {
    if frame[..8] != MAGIC {
        return Err(DataError::Magic);
    }
    match u16_at(frame, 8) {
        DATA_VERSION => Ok(()),
        other => Err(DataError::Version(other)),
    }
}

/// Appends a request without its payload. Refuses what a server would end the connection for.
pub fn encode_request(
    op: Op,
    id: u64,
    extents: &[Extent],
    frame: &mut Vec<u8>,
) -> Result<(), DataError> {
    let total = check_extents(extents)?;
    let payload_bytes = if op == Op::Write { total } else { 0 };
    frame.extend_from_slice(&[if op == Op::Read { 1 } else { 2 }, 0]);
    frame.extend_from_slice(&(extents.len() as u16).to_le_bytes());
    frame.extend_from_slice(&payload_bytes.to_le_bytes());
    frame.extend_from_slice(&id.to_le_bytes());
    for extent in extents {
        frame.extend_from_slice(&extent.slab.0.to_le_bytes());
        frame.extend_from_slice(&extent.offset.to_le_bytes());
        frame.extend_from_slice(&extent.length.to_le_bytes());
    }
    Ok(())
}

/// Reads the part of a request before its extents.
pub fn decode_request(frame: &[u8; REQUEST_BYTES]) -> Result<RequestHeader, DataError> {
    let op = match frame[0] {
        1 => Op::Read,
        2 => Op::Write,
        other => return Err(DataError::Op(other)),
    };
    if frame[1] != 0 {
        return Err(DataError::Reserved);
    }
    let header = RequestHeader {
        op,
        extents: u16_at(frame, 2),
        payload_bytes: u32_at(frame, 4),
        id: u64_at(frame, 8),
    };
    if header.extents == 0 || usize::from(header.extents) > MAX_EXTENTS {
        return Err(DataError::Extents(header.extents.into()));
    }
    Ok(header)
}

/// Reads one extent.
pub fn decode_extent(frame: &[u8; EXTENT_BYTES]) -> Extent {
    Extent {
        slab: SlabId(u64_at(frame, 0)),
        offset: u32_at(frame, 8),
        length: u32_at(frame, 12),
    }
}

/// Checks that extents keep the rules and returns the bytes they span.
pub fn check_extents(extents: &[Extent]) -> Result<u32, DataError> {
    if extents.is_empty() || extents.len() > MAX_EXTENTS {
        return Err(DataError::Extents(extents.len()));
    }
    let mut total = 0;
    for extent in extents {
        if extent.length == 0 {
            return Err(DataError::EmptyExtent);
        }
        total += u64::from(extent.length);
    }
    match u32::try_from(total) {
        Ok(bytes) if total <= MAX_PAYLOAD_BYTES as u64 => Ok(bytes),
        _ => Err(DataError::TooLong(total)),
    }
}

/// Checks that a request's payload fits its extents; returns the bytes it moves.
pub fn check_request(header: &RequestHeader, extents: &[Extent]) -> Result<u32, DataError> {
    let total = check_extents(extents)?;
    let expected = if header.op == Op::Write { total } else { 0 };
    if header.payload_bytes != expected {
        return Err(DataError::Payload {
            payload_bytes: header.payload_bytes.into(),
            expected_bytes: expected.into(),
        });
    }
    Ok(total)
}

/// Lays out a reply without its payload.
pub fn encode_reply(header: &ReplyHeader) -> [u8; REPLY_BYTES] {
    let mut frame = [0; REPLY_BYTES];
    frame[0] = match header.status {
        Status::Done => 0,
        Status::NotLeased => 1,
        Status::OutOfRange => 2,
    };
    frame[2..4].copy_from_slice(&header.extent.to_le_bytes());
    frame[4..8].copy_from_slice(&header.payload_bytes.to_le_bytes());
    frame[8..].copy_from_slice(&header.id.to_le_bytes());
    frame
}

/// Reads the part of a reply before its payload.
pub fn decode_reply(frame: &[u8; REPLY_BYTES]) -> Result<ReplyHeader, DataError> {
    let status = match frame[0] {
        0 => Status::Done,
        1 => Status::NotLeased,
        2 => Status::OutOfRange,
        other => return Err(DataError::Status(other.into())),
    };
    if frame[1] != 0 {
        return Err(DataError::Reserved);
    }
    let header = ReplyHeader {
        status,
        extent: u16_at(frame, 2),
        payload_bytes: u32_at(frame, 4),
        id: u64_at(frame, 8),
    };
    if header.payload_bytes as usize > MAX_PAYLOAD_BYTES {
        return Err(DataError::TooLong(header.payload_bytes.into()));
    }
    Ok(header)
}

fn u16_at(frame: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([frame[at], frame[at + 1]])
}

fn u32_at(frame: &[u8], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&frame[at..at + 4]);
    u32::from_le_bytes(bytes)
}

fn u64_at(frame: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&frame[at..at + 8]);
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn extent(slab: u64, offset: u32, length: u32) -> Extent {
        Extent {
            slab: SlabId(slab),
            offset,
            length,
        }
    }

    #[test]
    fn a_hello_has_these_bytes() {
        let frame = encode_hello(&Token([0xa5; 32]));
        assert_eq!(&frame[..16], b"OUTRDATA\x01\0\0\0\0\0\0\0");
        assert_eq!(frame[16..], [0xa5; 32]);
        assert_eq!(decode_hello(&frame), Ok(Token([0xa5; 32])));
    }

    #[test]
    fn a_welcome_has_these_bytes() {
        let frame = encode_welcome(Admission::TooMany);
        assert_eq!(&frame, b"OUTRDATA\x01\0\x01\0\0\0\0\0");
        assert_eq!(decode_welcome(&frame), Ok(Admission::TooMany));
    }

    #[test]
    fn a_request_has_these_bytes() {
        let mut frame = Vec::new();
        let extents = [
            extent(0x0102_0304_0506_0708, 0x1000, 0x2000),
            extent(9, 0, 1),
        ];
        encode_request(Op::Write, 0x1122_3344_5566_7788, &extents, &mut frame).expect("legal");
        assert_eq!(
            frame,
            b"\x02\0\x02\0\x01\x20\0\0\x88\x77\x66\x55\x44\x33\x22\x11\
              \x08\x07\x06\x05\x04\x03\x02\x01\0\x10\0\0\0\x20\0\0\
              \x09\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0"
        );
    }

    #[test]
    fn a_reply_has_these_bytes() {
        let header = ReplyHeader {
            status: Status::OutOfRange,
            extent: 3,
            payload_bytes: 0,
            id: 0x1122,
        };
        let frame = encode_reply(&header);
        assert_eq!(&frame, b"\x02\0\x03\0\0\0\0\0\x22\x11\0\0\0\0\0\0");
        assert_eq!(decode_reply(&frame), Ok(header));
    }

    #[test]
    fn other_versions_and_strangers_are_told_apart() {
        let mut frame = encode_hello(&Token([0; 32]));
        frame[8] = 2;
        assert_eq!(decode_hello(&frame), Err(DataError::Version(2)));
        frame[0] = b'X';
        assert_eq!(decode_hello(&frame), Err(DataError::Magic));
    }

    #[test]
    fn requests_outside_their_bounds_are_refused() {
        let mut frame = Vec::new();
        let page = extent(1, 0, 4096);
        let many = vec![page; MAX_EXTENTS + 1];
        for (extents, error) in [
            (&[][..], DataError::Extents(0)),
            (&many, DataError::Extents(MAX_EXTENTS + 1)),
            (&[extent(1, 0, 0)], DataError::EmptyExtent),
            (
                &[extent(1, 0, u32::MAX); 2],
                DataError::TooLong(2 * u64::from(u32::MAX)),
            ),
        ] {
            assert_eq!(encode_request(Op::Read, 1, extents, &mut frame), Err(error));
            assert!(frame.is_empty());
        }
        let header = RequestHeader {
            op: Op::Write,
            extents: 1,
            payload_bytes: 4095,
            id: 1,
        };
        assert!(matches!(
            check_request(&header, &[page]),
            Err(DataError::Payload { .. })
        ));
    }

    fn any_extent() -> impl Strategy<Value = Extent> {
        (any::<u64>(), any::<u32>(), 1u32..=16384)
            .prop_map(|(slab, offset, length)| extent(slab, offset, length))
    }

    proptest! {
        #[test]
        fn requests_survive_the_wire(
            write in any::<bool>(),
            id in any::<u64>(),
            extents in prop::collection::vec(any_extent(), 1..=MAX_EXTENTS),
        ) {
            let op = if write { Op::Write } else { Op::Read };
            let mut frame = Vec::new();
            encode_request(op, id, &extents, &mut frame).expect("within bounds");
            let (head, tail) = frame.split_first_chunk().expect("a header");
            let header = decode_request(head).expect("own header");
            prop_assert_eq!((header.op, header.id), (op, id));
            let back: Vec<Extent> = tail
                .as_chunks::<EXTENT_BYTES>().0
                .iter()
                .map(decode_extent)
                .collect();
            prop_assert_eq!(&back, &extents);
            prop_assert!(check_request(&header, &back).is_ok());
        }

        #[test]
        fn replies_survive_the_wire(
            status in prop::sample::select(vec![Status::Done, Status::NotLeased, Status::OutOfRange]),
            extent in any::<u16>(),
            payload_bytes in 0..=MAX_PAYLOAD_BYTES as u32,
            id in any::<u64>(),
        ) {
            let header = ReplyHeader { status, extent, payload_bytes, id };
            prop_assert_eq!(decode_reply(&encode_reply(&header)), Ok(header));
        }

        #[test]
        fn garbage_is_an_error_or_a_frame_within_bounds(bytes in any::<[u8; HELLO_BYTES]>()) {
            let _ = decode_hello(&bytes);
            let (welcome, rest) = bytes.split_first_chunk().expect("48 bytes");
            let _ = decode_welcome(welcome);
            let head = rest.first_chunk().expect("32 bytes");
            if let Ok(header) = decode_request(head) {
                prop_assert!((1..=MAX_EXTENTS).contains(&usize::from(header.extents)));
            }
            if let Ok(header) = decode_reply(head) {
                prop_assert!(header.payload_bytes as usize <= MAX_PAYLOAD_BYTES);
            }
        }
    }
}
