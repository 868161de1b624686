//! What is fuzzed: everything that reads bytes of somebody else. Each function takes any bytes, and
//! panics where a promise is broken. The fuzz targets call them (`make fuzz`), and so does a test that
//! runs the committed seeds (`tests/tests/seeds.rs`).

use std::collections::HashSet;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use outram_backend::engine::ages::Ages;
use outram_backend::engine::budget::Budget;
use outram_backend::engine::compressed::CompressedPool;
use outram_backend::engine::pace::Pace;
use outram_backend::engine::recovery::{StagedBytes, recover_page};
use outram_backend::engine::seal::PageKey;
use outram_backend::engine::slots::{GroupPlace, SlabRef, SlotPool};
use outram_backend::engine::staging::StagingPool;
use outram_backend::engine::stats::Stats;
use outram_backend::engine::table::{ENTRY_WORDS, Entry, PageTable, State, Words};
use outram_backend::engine::{PageIndex, PageRun, PageSize, Shared, StagingSlot};
use outram_backend::fuzzing::{self, LeftBehind};
use outram_libvirt::domain_xml::DomainXml;
use outram_libvirt::metadata;
use outram_wire::control::{Envelope, read_frame, write_frame};
use outram_wire::lost_pages::LostPages;
use outram_wire::pki::{self, Order};
use outram_wire::seal::Seal;
use outram_wire::server::channel::{Channel, Received};
use outram_wire::server::control::agree_version;
use outram_wire::server::data::{self, EXTENT_BYTES, HELLO_BYTES, REPLY_BYTES, REQUEST_BYTES};
use outram_wire::server::{ClientMessage, ServerMessage};
use outram_wire::tls::{self, Kind, TlsFiles};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection, StreamOwned};

/// A name of a target, and what it does with bytes.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 8] = [
    ("data_frames", data_frames),
    ("control_messages", control_messages),
    ("handshake", handshake),
    ("control_socket", control_socket),
    ("descriptor_chain", descriptor_chain),
    ("metadata", metadata),
    ("recovery", recovery),
    ("left_behind", left_behind),
];

/// Frames of a data connection, as either side reads them: what is read is written the same again.
pub fn data_frames(bytes: &[u8]) {
    if let Some(hello) = bytes.first_chunk::<HELLO_BYTES>()
        && let Ok(token) = data::decode_hello(hello)
    {
        assert_eq!(data::encode_hello(&token), *hello);
    }
    if let Some(welcome) = bytes.first_chunk()
        && let Ok(admission) = data::decode_welcome(welcome)
    {
        assert_eq!(data::encode_welcome(admission), *welcome);
    }
    if let Some(reply) = bytes.first_chunk::<REPLY_BYTES>()
        && let Ok(header) = data::decode_reply(reply)
    {
        assert!(header.payload_bytes as usize <= data::MAX_PAYLOAD_BYTES);
        assert_eq!(data::encode_reply(&header), *reply);
    }
    let Some((head, rest)) = bytes.split_first_chunk::<REQUEST_BYTES>() else {
        return;
    };
    let Ok(header) = data::decode_request(head) else {
        return;
    };
    let (extents, _) = rest.as_chunks::<EXTENT_BYTES>();
    let count = usize::from(header.extents);
    assert!((1..=data::MAX_EXTENTS).contains(&count));
    let Some(extents) = extents.get(..count) else {
        return;
    };
    let extents: Vec<_> = extents.iter().map(data::decode_extent).collect();
    let Ok(total) = data::check_request(&header, &extents) else {
        return;
    };
    assert!(total as usize <= data::MAX_PAYLOAD_BYTES);
    let mut again = Vec::new();
    data::encode_request(header.op, header.id, &extents, &mut again).expect("it was allowed");
    assert_eq!(again, bytes[..again.len()]);
}

/// Messages of a control connection, once TLS has let them through.
pub fn control_messages(bytes: &[u8]) {
    if let Ok(message) = serde_json::from_slice::<ClientMessage>(bytes) {
        let text = serde_json::to_vec(&message).expect("a message is JSON");
        assert_eq!(
            serde_json::from_slice::<ClientMessage>(&text).expect("own text"),
            message
        );
        if let ClientMessage::Hello(hello) = &message {
            let _ = agree_version(hello);
        }
    }
    if let Ok(message) = serde_json::from_slice::<ServerMessage>(bytes) {
        let text = serde_json::to_vec(&message).expect("a message is JSON");
        assert_eq!(
            serde_json::from_slice::<ServerMessage>(&text).expect("own text"),
            message
        );
        if let ServerMessage::Refused(refusal) = &message {
            let _ = refusal.to_string();
        }
    }
}

/// A peer on the control port. The first byte says which side it is, and whether it speaks TLS
/// before it sends the rest.
pub fn handshake(bytes: &[u8]) {
    let Some((mode, bytes)) = bytes.split_first() else {
        return;
    };
    let pki = Pki::get();
    let (near, far) = sockets();
    let soon = || Instant::now() + Duration::from_secs(10);
    thread::scope(|scope| match mode % 4 {
        0 => {
            scope.spawn(|| say(far, bytes));
            let met = Channel::accept(near, pki.server.clone(), soon());
            assert!(met.is_err(), "somebody without a certificate was let in");
        }
        1 => {
            scope.spawn(|| say(far, bytes));
            let met = Channel::connect(near, pki.client.clone(), pki.name.clone(), soon());
            assert!(met.is_err(), "a server without a certificate was believed");
        }
        2 => {
            let tls = ClientConnection::new(pki.client.clone(), pki.name.clone());
            let tls = StreamOwned::new(tls.expect("both are good"), far);
            scope.spawn(|| say(tls, bytes));
            let channel = Channel::accept(near, pki.server.clone(), soon());
            listen::<ClientMessage>(channel.expect("both are good"));
        }
        _ => {
            let tls = ServerConnection::new(pki.server.clone());
            let tls = StreamOwned::new(tls.expect("both are good"), far);
            scope.spawn(|| say(tls, bytes));
            let channel = Channel::connect(near, pki.client.clone(), pki.name.clone(), soon());
            listen::<ServerMessage>(channel.expect("both are good"));
        }
    });
}

/// Says everything and hangs up. Whoever hangs up first hears no more of it.
fn say(mut connection: impl Write, bytes: &[u8]) {
    let _ = connection
        .write_all(bytes)
        .and_then(|()| connection.flush());
}

fn listen<T: serde::de::DeserializeOwned>(mut channel: Channel) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while let Ok(received) = channel.receive::<T>(deadline, None) {
        assert!(
            !matches!(received, Received::TimedOut),
            "the peer has hung up"
        );
    }
}

/// Two ends of a connection.
fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let near = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
    let (far, _) = listener.accept().expect("accepted");
    (near, far)
}

/// Both sides' certificates, made once.
struct Pki {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Pki {
    fn get() -> &'static Self {
        static PKI: OnceLock<Pki> = OnceLock::new();
        PKI.get_or_init(|| {
            let dir = tempfile::tempdir().expect("a folder");
            pki::init(dir.path()).expect("a CA");
            let issue = |kind, name: &str| -> TlsFiles {
                let order = Order {
                    kind,
                    name,
                    addresses: &["127.0.0.1".to_owned()],
                    days: 30,
                };
                pki::issue(dir.path(), &order).expect("issued").into()
            };
            Pki {
                server: tls::server_config(&issue(Kind::Server, "server")).expect("good"),
                client: tls::client_config(&issue(Kind::Client, "client")).expect("good"),
                name: ServerName::try_from("127.0.0.1").expect("an address"),
            }
        })
    }
}

/// A client of a backend's control socket: what is understood is written the same again.
pub fn control_socket(mut bytes: &[u8]) {
    while let Ok(Some(envelope)) = read_frame::<Envelope>(&mut bytes) {
        let mut frame = Vec::new();
        write_frame(&mut frame, &envelope).expect("it was short enough");
        let again = read_frame::<Envelope>(&mut frame.as_slice()).expect("own frame");
        assert_eq!(again, Some(envelope));
    }
}

/// See [`fuzzing::descriptor_chain`].
pub fn descriptor_chain(bytes: &[u8]) {
    fuzzing::descriptor_chain(bytes);
}

/// A domain's XML: settings that are understood are written such that they are understood again.
pub fn metadata(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let Ok(domain) = DomainXml::parse(text) else {
        return;
    };
    let _ = (domain.name(), domain.vm_id(), domain.max_ram_bytes());
    let Ok(Some(settings)) = metadata::read(&domain) else {
        return;
    };
    let element = metadata::to_text(&settings).expect("settings can be written");
    let text = format!("<domain><metadata>{element}</metadata></domain>");
    let again = DomainXml::parse(&text).expect("own text");
    let again = metadata::read(&again).expect("own settings");
    assert_eq!(again, Some(settings), "{element}");
}

/// Pages in the table that is recovered.
const PAGES: u32 = 8;
/// Slots of the staging area.
const STAGED: u32 = 4;
/// Groups of slots, and slots of each.
const GROUPS: u32 = 2;
const SLOTS: u32 = 8;

/// The staging area of a dead process: each page is one byte, again and again.
struct Staging(Vec<Vec<u8>>);

impl StagedBytes for Staging {
    fn staged(&self, slot: StagingSlot) -> Option<&[u8]> {
        self.0.get(slot.0 as usize).map(Vec::as_slice)
    }
}

/// The table of a dead process: the words of eight pages, a byte that says which of them the guest's
/// memory has, one that says whose tags are to be right (of every other page as one that is not sealed),
/// and what lies in four staging slots.
pub fn recovery(bytes: &[u8]) {
    let mut bytes = bytes.iter().copied();
    let mut next = || bytes.next().unwrap_or(0);
    let words: Vec<u64> = (0..PAGES as usize * ENTRY_WORDS)
        .map(|_| u64::from_le_bytes(std::array::from_fn(|_| next())))
        .collect();
    let (present, tagged) = (next(), next());
    let staging = Staging((0..STAGED).map(|_| vec![next(); 4096]).collect());
    let (shared, again) = (left(&words), left(&words));
    let is_set = |bits: u8, page: u32| bits >> page & 1 == 1;
    for page in (0..PAGES).filter(|page| is_set(tagged, *page)) {
        let entry = shared.table.load(PageIndex(page));
        if let Some(held) = entry.staging.and_then(|slot| staging.staged(slot)) {
            let (key, mut bytes) = (&shared.key, held.to_vec());
            if page % 2 == 0 {
                // Sealed as what it is the text of, it is this again, and has the tag that is right.
                key.seal(PageIndex(page), entry.generation, &mut bytes);
            }
            let tag = key.seal(PageIndex(page), entry.generation, &mut bytes);
            shared.table.store(PageIndex(page), &Entry { tag, ..entry });
        }
    }
    let before: Vec<Entry> = (0..PAGES)
        .map(|page| shared.table.load(PageIndex(page)))
        .collect();
    let recover = |shared: &Shared| -> Vec<Entry> {
        (0..PAGES)
            .map(|page| recover_page(shared, PageIndex(page), is_set(present, page), &staging))
            .collect()
    };
    let after = recover(&shared);
    let (mut slots, mut held) = (HashSet::new(), HashSet::new());
    for (page, (after, before)) in after.iter().zip(&before).enumerate() {
        let page = PageIndex(page as u32);
        assert_eq!(shared.table.load(page), *after, "it is what the table says");
        assert_eq!(after.generation, before.generation, "it never goes back");
        assert!(!after.protected && after.becomes.is_none());
        match after.state {
            State::Resident => assert!(is_set(present, page.0) && after.dirty),
            _ => assert!(
                !is_set(present, page.0),
                "what the guest has is not dropped"
            ),
        }
        // A page is in one place, and no two are in the same.
        assert_eq!(after.slot.is_some(), after.state == State::Stored);
        assert_eq!(after.staging.is_some(), after.state == State::Staged);
        assert!(after.slot.is_none_or(|slot| slots.insert(slot)));
        if let Some(slot) = after.staging {
            // Told when the page is adopted: whoever comes second to a staging slot is lost.
            assert_eq!(shared.staging.claim(slot).is_some(), held.insert(slot));
        }
        assert!(after.state != State::Busy, "nobody is at work on it");
        if let Some(bytes) = after.staging.map(|slot| staging.staged(slot)) {
            let bytes = bytes.expect("there is such a slot");
            let (key, generation) = (&shared.key, after.generation);
            let sealed = key.open(page, generation, after.tag, &mut bytes.to_vec());
            let is_its =
                sealed.is_ok() || key.tag(page, generation, bytes, &mut Vec::new()) == after.tag;
            assert!(is_its, "bytes that are another's are not believed");
        }
    }
    // Recovery that died half-way is repeated, by a process that knows nothing of the first.
    for (page, entry) in after.iter().enumerate() {
        again.table.store(PageIndex(page as u32), entry);
    }
    assert_eq!(recover(&again), after);
}

/// What a process left: a table of these words, and two slabs.
fn left(words: &[u64]) -> Shared {
    let slots = SlotPool::new(1);
    let places = (0..GROUPS).map(|number| GroupPlace {
        number,
        slab: SlabRef {
            server: 0,
            slab: number.into(),
        },
        slots: SLOTS,
    });
    slots.restore(&places.collect::<Vec<_>>(), GROUPS);
    let words: Vec<_> = words.iter().map(|word| (*word).into()).collect();
    let words: Box<dyn Words> = Box::new(words);
    let all = PageRun {
        first: PageIndex(0),
        count: PAGES,
    };
    Shared {
        page_size: PageSize::BASE,
        table: PageTable::new(words, &[all]),
        budget: Budget::new(PAGES.into(), PageSize::BASE),
        staging: StagingPool::new(0),
        compressed: CompressedPool::default(),
        slots,
        pace: Pace::default(),
        ages: Ages::default(),
        key: PageKey::new(&[3; 32], Seal::On),
        lost_pages: LostPages::Stop,
        stats: Stats::new(),
    }
}

/// The files of a dead process, in the order of [`LeftBehind`], each after its length in two bytes.
pub fn left_behind(mut bytes: &[u8]) {
    thread_local! {
        static DIR: tempfile::TempDir = {
            // A file system that writes to a disk would be what is measured.
            let memory = Path::new("/dev/shm");
            let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
            dir.expect("a folder")
        };
    }
    let mut next = || {
        let (length, rest) = bytes.split_first_chunk().unwrap_or((&[0, 0], &[]));
        let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
        let (file, rest) = rest.split_at(length);
        bytes = rest;
        file
    };
    let files = LeftBehind {
        record: next(),
        groups: next(),
        key: next(),
        table: next(),
        staging: next(),
    };
    DIR.with(|dir| fuzzing::left_behind(dir.path(), &files))
        .expect("a folder to write to");
}
