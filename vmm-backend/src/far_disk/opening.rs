//! Opening a disk: as a new one, as it was left on its servers, or as a backend that died had it.
//!
//! All that a server says of a disk that was left is believed, if its tags are sound: nobody here knows
//! better. Of a disk that a backend had open when it died, the table does: what the servers have of it
//! is only asked where a change was under way.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};
use outram_wire::causes::with_causes;
use outram_wire::server::{DiskShape, Opening, Refusal, SlabId};

use super::block_keys::BlockKeys;
use super::extents::{Extents, Place, StoredExtent, Unfinished, runs_of};
use super::key::Identity;
use super::layout::{Entry, HEADER, Layout, Run, decode_header, entries};
use super::line::{Line, LineState};
use super::store::{Store, StoreKeys};
use super::table::{DiskTable, FormerOpening};
use super::{DiskError, DiskFault, FarDiskConfig};
use crate::interrupt::Interrupt;
use crate::remote::{DiskOpening, FIRST_PATIENCE, RemoteError, Session, SessionEvent};
use crate::whole;

/// Most blocks whose entries are loaded at once.
const MOST_LOADED: u32 = 32 * 1024;
/// No generation beyond it is believed.
const LAST_GENERATION: u64 = 1 << 61;
/// How long a server may take to notice that a former backend of the guest has ended.
const FORMER_USER: Duration = Duration::from_secs(5);

/// Makes a new, empty disk; what a parked one of the same name holds is dropped.
pub(super) fn create(
    config: &FarDiskConfig,
    identity: &Identity,
    table: &Arc<DiskTable>,
) -> Result<Store, DiskError> {
    let parts = config.remote.addresses.len() as u32;
    let opening = |part| {
        Opening::Create(DiskShape {
            bytes: config.size_bytes,
            part,
            parts,
        })
    };
    // What the guest's former disk held may have to be freed first.
    let mut patient = config.clone();
    patient.remote.timing.patience = FIRST_PATIENCE;
    let patience = Instant::now() + FORMER_USER;
    let lines = loop {
        match connect(&patient, identity, opening) {
            Err(error) if is_still_left(&error) && Instant::now() < patience => {
                std::thread::sleep(super::RETRY);
            }
            connected => break connected?,
        }
    };
    let reserved = reserve(config, &lines).and_then(|layout| {
        let keys = begin(config, identity, table, &layout, 1)?;
        Ok((layout, keys))
    });
    match reserved {
        Ok((layout, keys)) => {
            table.open();
            Ok(Store::new(layout, lines, keys, Extents::new(table), 1, 0))
        }
        Err(error) => {
            give_up(&lines);
            Err(error)
        }
    }
}

/// Begins an opening in the table; its keys.
fn begin(
    config: &FarDiskConfig,
    identity: &Identity,
    table: &DiskTable,
    layout: &Layout,
    first_generation: u64,
) -> Result<StoreKeys, DiskError> {
    let blocks = BlockKeys::draw(&identity.blocks, config.seal).map_err(DiskError::Key)?;
    let opening = FormerOpening {
        slab_bytes: layout.slab_bytes(),
        first_generation,
        salt: blocks.salt(),
    };
    table.begin(opening, layout.extents());
    Ok(StoreKeys {
        headers: identity.tags.clone(),
        blocks,
    })
}

/// Whether a server may only not have noticed yet that the backend before us has ended.
fn is_still_left(error: &DiskError) -> bool {
    let DiskError::Remote(RemoteError::Refused { refusal, .. }) = error else {
        return false;
    };
    matches!(refusal, Refusal::DiskInUse { .. } | Refusal::SessionBusy)
}

/// What could not be made in full is not to lie about.
fn give_up(lines: &[Line]) {
    for line in lines {
        if let Err(error) = line.session.close(super::CLOSE_TIMEOUT) {
            tracing::warn!(
                "a disk that was not made stays parked: {}",
                with_causes(&error)
            );
        }
    }
}

/// Sets the room for all of the disk aside.
fn reserve(config: &FarDiskConfig, lines: &[Line]) -> Result<Layout, DiskError> {
    let layout = layout(config, lines)?;
    let each = u64::from(layout.extents().div_ceil(lines.len() as u32));
    for line in lines {
        let slab_bytes = line.session.status().slab_bytes;
        line.session.reserve(each * slab_bytes)?;
    }
    Ok(layout)
}

/// Claims the disk: as a backend that died had it open, by the table, or as it was left.
pub(super) fn claim(
    config: &FarDiskConfig,
    identity: &Identity,
    table: &Arc<DiskTable>,
    interrupt: &Interrupt<'_>,
) -> Result<Store, DiskError> {
    let lines = connect(config, identity, |_| Opening::Claim)?;
    check_parts(config, &lines)?;
    let layout = layout(config, &lines)?;
    match table.former() {
        Some(former) => go_on(former, layout, lines, identity, table, interrupt),
        None => load(config, layout, lines, identity, table, interrupt),
    }
}

/// Loads which blocks of the disk are written.
fn load(
    config: &FarDiskConfig,
    layout: Layout,
    lines: Vec<Line>,
    identity: &Identity,
    table: &Arc<DiskTable>,
    interrupt: &Interrupt<'_>,
) -> Result<Store, DiskError> {
    let mut loaded = Loaded::default();
    for (number, line) in lines.iter().enumerate() {
        for slab in line.held(interrupt)? {
            // A server that answers each question at once gives no other occasion.
            if interrupt.is_wanted() {
                return Err(DiskFault::Interrupted.into());
            }
            match load_slab(&layout, identity, line, slab, interrupt)? {
                Some((extent, generations)) => {
                    let place = Place {
                        extent,
                        line: number,
                        slab,
                    };
                    let given_up = loaded.take(place, &generations, &layout, table)?;
                    if let Some(Place { line, slab, .. }) = given_up {
                        lines[line].session.release_slab(slab);
                    }
                }
                // Leased and not used yet, or to be released, when it was parked.
                None => line.session.release_slab(slab),
            }
        }
    }
    let next = loaded.last_generation + 1;
    let keys = begin(config, identity, table, &layout, next)?;
    let extents = loaded.finish(table);
    let written = extents.written_blocks();
    table.open();
    tracing::info!(
        written_blocks = written,
        "the far-memory disk is claimed as it was left"
    );
    Ok(Store::new(layout, lines, keys, extents, next, written))
}

/// Goes on with the disk as the table has it, and finds out what became of changes that were under way.
fn go_on(
    former: FormerOpening,
    layout: Layout,
    lines: Vec<Line>,
    identity: &Identity,
    table: &Arc<DiskTable>,
    interrupt: &Interrupt<'_>,
) -> Result<Store, DiskError> {
    if former.slab_bytes != layout.slab_bytes() {
        return Err(DiskError::OtherServers);
    }
    let places = table.places(layout.extents());
    for (number, line) in lines.iter().enumerate() {
        let held = line.held(interrupt)?;
        let own = places.iter().filter(|place| place.line == number);
        if let Some(gone) = own.clone().find(|place| !held.contains(&place.slab)) {
            return Err(DiskError::SlabGone(gone.slab));
        }
        let known: Vec<SlabId> = own.map(|place| place.slab).collect();
        // Leased and not used yet, or given up already.
        let unknown = held.into_iter().filter(|slab| !known.contains(slab));
        unknown.for_each(|slab| line.session.release_slab(slab));
    }
    let extents = Extents::new(table);
    let successor = Successor {
        layout: &layout,
        table,
        former: &former,
    };
    for place in places {
        let line = lines.get(place.line).ok_or(DiskError::OtherServers)?;
        let stored = StoredExtent::again(table, &layout, place);
        let bytes = line.read(&[layout.header_at(place.slab)], interrupt)?;
        let header: [u8; HEADER] = bytes
            .try_into()
            .map_err(|_| DiskError::Foreign(place.slab))?;
        match decode_header(&identity.tags, &header) {
            Ok(Some(extent)) if extent == place.extent => {}
            // Its release was under way.
            Ok(None) => stored.set_may_lack_header(true),
            _ => return Err(DiskError::Foreign(place.slab)),
        }
        successor.settle(&stored, line, interrupt)?;
        extents.insert(place.extent, stored);
    }
    let written = extents.written_blocks();
    tracing::info!(
        written_blocks = written,
        "the far-memory disk is taken over as it was"
    );
    let keys = StoreKeys {
        headers: identity.tags.clone(),
        blocks: BlockKeys::again(&identity.blocks, former.salt),
    };
    let first = former.first_generation;
    Ok(Store::new(layout, lines, keys, extents, first, written))
}

/// Whoever goes on with the opening of a backend that died.
struct Successor<'a> {
    layout: &'a Layout,
    table: &'a DiskTable,
    former: &'a FormerOpening,
}

impl Successor<'_> {
    /// Settles what of an extent was being changed: the server has each block from before the change or
    /// from after it.
    fn settle(
        &self,
        stored: &StoredExtent,
        line: &Line,
        interrupt: &Interrupt<'_>,
    ) -> Result<(), DiskError> {
        let whole = Run {
            first: 0,
            count: stored.blocks(),
        };
        let pieces = runs_of(whole, |place| stored.unfinished(place).is_some());
        for (piece, _) in pieces.into_iter().filter(|(_, unfinished)| *unfinished) {
            let mut first = piece.first;
            while first < piece.end() {
                let count = MOST_LOADED.min(piece.end() - first);
                let run = Run { first, count };
                let at = self.layout.entries_at(stored.place.slab, run);
                let bytes = line.read(&[at], interrupt)?;
                for (place, entry) in run.places().zip(entries(&bytes)) {
                    self.settle_block(stored, place, &entry);
                }
                first += count;
            }
        }
        Ok(())
    }

    fn settle_block(&self, stored: &StoredExtent, place: u32, told: &Entry) {
        let certain = stored.generation(place);
        let is_possible = |change: Unfinished| {
            let drawn = self.former.first_generation..self.table.next_generation();
            let is_later = told.generation > certain && drawn.contains(&told.generation);
            told.generation == certain
                || (change.clearing && told.generation == 0)
                || (change.writing && is_later && told.salt == self.former.salt)
        };
        match stored.unfinished(place) {
            Some(change) if is_possible(change) => {
                stored.set_generation(place, told.generation);
            }
            // It is an error until it is written whole.
            _ => stored.doubt(place, certain),
        }
    }
}

/// Opens a session with each server.
fn connect(
    config: &FarDiskConfig,
    identity: &Identity,
    opening: impl Fn(u32) -> Opening,
) -> Result<Vec<Line>, DiskError> {
    let (sender, events) = unbounded();
    let states: Vec<Arc<LineState>> = config
        .remote
        .addresses
        .iter()
        .map(|_| Arc::default())
        .collect();
    listen(states.clone(), events)?;
    let mut lines = Vec::new();
    for (number, state) in states.into_iter().enumerate() {
        let disk = DiskOpening {
            disk: identity.disk,
            secret: identity.secret,
            opening: opening(number as u32),
        };
        let creates = matches!(disk.opening, Opening::Create(_));
        match Session::start_disk(number, &config.remote, disk, sender.clone()) {
            Ok(session) => lines.push(Line { session, state }),
            Err(error) => {
                if creates {
                    give_up(&lines);
                }
                return Err(error.into());
            }
        }
    }
    Ok(lines)
}

/// Hears the sessions until the last of them has ended.
fn listen(states: Vec<Arc<LineState>>, events: Receiver<SessionEvent>) -> Result<(), DiskError> {
    let work = move || {
        for event in events {
            if let Some(state) = states.get(server_of(&event)) {
                state.hear(event);
            }
        }
    };
    whole::spawn("disk-servers", work)
        .map(drop)
        .map_err(|source| {
            DiskError::Remote(RemoteError::System {
                what: "a thread",
                source,
            })
        })
}

fn server_of(event: &SessionEvent) -> usize {
    match event {
        SessionEvent::Up { server, .. }
        | SessionEvent::DataConnection { server, .. }
        | SessionEvent::Down { server, .. }
        | SessionEvent::Lost { server, .. }
        | SessionEvent::Leased { server, .. }
        | SessionEvent::LeaseRefused { server, .. }
        | SessionEvent::Vacate { server, .. }
        | SessionEvent::Withdrawn { server }
        | SessionEvent::Closing { server } => *server,
    }
}

/// Extents as large as the smallest server's slabs allow: the same whoever opens the disk.
fn layout(config: &FarDiskConfig, lines: &[Line]) -> Result<Layout, DiskError> {
    let sizes = lines.iter().map(|line| line.session.status().slab_bytes);
    let smallest = sizes.min().ok_or(DiskError::NoServer)?;
    Layout::new(config.size_bytes, smallest).ok_or(DiskError::SlabSize(smallest))
}

/// Every part of the disk must be there, once: what lies on a server that is not asked would read
/// as zeros.
fn check_parts(config: &FarDiskConfig, lines: &[Line]) -> Result<(), DiskError> {
    let mut parts: Vec<u32> = Vec::new();
    for line in lines {
        let shape = line.session.disk().map(|disk| disk.shape);
        let shape = shape.ok_or(DiskError::OtherServers)?;
        if shape.bytes != config.size_bytes {
            return Err(DiskError::OtherSize {
                kept: shape.bytes,
                asked: config.size_bytes,
            });
        }
        if shape.parts as usize != lines.len() || parts.contains(&shape.part) {
            return Err(DiskError::OtherServers);
        }
        parts.push(shape.part);
    }
    Ok(())
}

/// What a slab holds: its extent, and the generation of each of its blocks.
fn load_slab(
    layout: &Layout,
    identity: &Identity,
    line: &Line,
    slab: SlabId,
    interrupt: &Interrupt<'_>,
) -> Result<Option<(u32, Vec<u64>)>, DiskError> {
    let bytes = line.read(&[layout.header_at(slab)], interrupt)?;
    let header: [u8; HEADER] = bytes.try_into().map_err(|_| DiskError::Foreign(slab))?;
    let extent = decode_header(&identity.tags, &header).map_err(|_| DiskError::Foreign(slab))?;
    let Some(extent) = extent else {
        return Ok(None);
    };
    if extent >= layout.extents() {
        return Err(DiskError::Foreign(slab));
    }
    let blocks = layout.blocks_of(extent);
    let mut generations = Vec::with_capacity(blocks as usize);
    while (generations.len() as u32) < blocks {
        let first = generations.len() as u32;
        let count = MOST_LOADED.min(blocks - first);
        let run = Run { first, count };
        let bytes = line.read(&[layout.entries_at(slab, run)], interrupt)?;
        generations.extend(entries(&bytes).map(|entry| entry.generation));
    }
    // No disk comes so far by writing, and counting on from there would.
    if generations.iter().any(|own| *own > LAST_GENERATION) {
        return Err(DiskError::Foreign(slab));
    }
    Ok(Some((extent, generations)))
}

/// Extents found so far. What their blocks are stands in the table, which is closed meanwhile.
#[derive(Default)]
struct Loaded {
    extents: HashMap<u32, StoredExtent>,
    last_generation: u64,
}

impl Loaded {
    /// Takes in what lies in a slab. Of two slabs for one extent, one that is empty had been given up: its place.
    fn take(
        &mut self,
        place: Place,
        generations: &[u64],
        layout: &Layout,
        table: &Arc<DiskTable>,
    ) -> Result<Option<Place>, DiskError> {
        let latest = generations.iter().copied().max().unwrap_or(0);
        self.last_generation = self.last_generation.max(latest);
        let other = self.extents.get(&place.extent);
        if other.is_some() && latest == 0 {
            return Ok(Some(place));
        }
        if let Some(other) = other.filter(|other| other.written() > 0) {
            return Err(DiskError::Foreign(other.place.slab));
        }
        let generations = generations.iter().copied();
        let stored = StoredExtent::new(table, layout, place, generations);
        let empty = self.extents.insert(place.extent, stored);
        Ok(empty.map(|empty| empty.place))
    }

    fn finish(self, table: &Arc<DiskTable>) -> Extents {
        let extents = Extents::new(table);
        for (number, stored) in self.extents {
            extents.insert(number, stored);
        }
        extents
    }
}

/// Whether an error may pass if the disk is opened again later.
pub(super) fn may_pass(error: &DiskError) -> bool {
    match error {
        DiskError::Remote(RemoteError::Refused { refusal, .. }) => matches!(
            refusal,
            Refusal::SessionBusy | Refusal::Closing | Refusal::SessionEnded
        ),
        DiskError::Remote(
            RemoteError::Connect { .. }
            | RemoteError::Resolve { .. }
            | RemoteError::Control { .. }
            | RemoteError::Data { .. }
            | RemoteError::Disconnected(_)
            | RemoteError::TimedOut(_)
            // No more threads or descriptors for now.
            | RemoteError::System { .. }
            // Certificates that are being renewed: a process that was just started knows of no earlier ones.
            | RemoteError::Identity(_),
        ) => true,
        DiskError::Fault(fault) => matches!(fault, DiskFault::Interrupted),
        _ => false,
    }
}
