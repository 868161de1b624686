//! Opening a disk: as a new one, or as it was left on its servers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};
use outram_wire::causes::with_causes;
use outram_wire::server::{DiskShape, Opening, Refusal, SlabId};

use super::block_keys::BlockKeys;
use super::extents::{Extents, Place, StoredExtent};
use super::key::Identity;
use super::layout::{HEADER, Layout, Run, decode_header, entries};
use super::line::{Line, LineState};
use super::store::{Store, StoreKeys};
use super::{DiskError, DiskFault, FarDiskConfig, Interrupt};
use crate::remote::{DiskOpening, RemoteError, Session, SessionEvent};

/// Most blocks whose entries are loaded at once.
const MOST_LOADED: u32 = 32 * 1024;
/// No generation beyond it is believed.
const LAST_GENERATION: u64 = 1 << 62;
/// How long a server may take to notice that a former backend of the guest has ended.
const FORMER_USER: Duration = Duration::from_secs(5);

/// Makes a new, empty disk; what a parked one of the same name holds is dropped.
pub(super) fn create(config: &FarDiskConfig, identity: &Identity) -> Result<Store, DiskError> {
    let parts = config.remote.addresses.len() as u32;
    let opening = |part| {
        Opening::Create(DiskShape {
            bytes: config.size_bytes,
            part,
            parts,
        })
    };
    let patience = Instant::now() + FORMER_USER;
    let lines = loop {
        match connect(config, identity, opening) {
            Err(error) if is_still_left(&error) && Instant::now() < patience => {
                std::thread::sleep(super::RETRY);
            }
            connected => break connected?,
        }
    };
    match reserve(config, &lines) {
        Ok(layout) => {
            let keys = keys(config, identity)?;
            Ok(Store::new(layout, lines, keys, Extents::default(), 1, 0))
        }
        Err(error) => {
            give_up(&lines);
            Err(error)
        }
    }
}

/// The keys of a new opening.
fn keys(config: &FarDiskConfig, identity: &Identity) -> Result<StoreKeys, DiskError> {
    let blocks = BlockKeys::draw(&identity.blocks, config.seal).map_err(DiskError::Key)?;
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

/// Claims the disk as it was left, and loads which of its blocks are written.
pub(super) fn claim(
    config: &FarDiskConfig,
    identity: &Identity,
    interrupt: &Interrupt<'_>,
) -> Result<Store, DiskError> {
    let lines = connect(config, identity, |_| Opening::Claim)?;
    check_parts(config, &lines)?;
    let layout = layout(config, &lines)?;
    let mut loaded = Loaded::default();
    for (number, line) in lines.iter().enumerate() {
        for slab in line.held(interrupt)? {
            match load_slab(&layout, identity, line, slab, interrupt)? {
                Some((extent, generations)) => {
                    let place = Place {
                        extent,
                        line: number,
                        slab,
                    };
                    loaded.take(StoredExtent::new(place, generations), &lines)?;
                }
                // Leased and not used yet, or to be released, when it was parked.
                None => line.session.release_slab(slab),
            }
        }
    }
    let keys = keys(config, identity)?;
    let (next, written) = (loaded.last_generation + 1, loaded.written_blocks());
    tracing::info!(
        written_blocks = written,
        "the far-memory disk is claimed as it was left"
    );
    Ok(Store::new(
        layout,
        lines,
        keys,
        loaded.finish(),
        next,
        written,
    ))
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
    std::thread::Builder::new()
        .name("disk-servers".to_owned())
        .spawn(work)
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

/// Extents found so far.
#[derive(Default)]
struct Loaded {
    extents: HashMap<u32, StoredExtent>,
    last_generation: u64,
}

impl Loaded {
    /// Takes one in. Of two slabs for one extent, one that is empty had been given up.
    fn take(&mut self, found: StoredExtent, lines: &[Line]) -> Result<(), DiskError> {
        let places = 0..found.blocks();
        let latest = places.map(|place| found.generation(place)).max();
        self.last_generation = self.last_generation.max(latest.unwrap_or(0));
        let extent = found.place.extent;
        let kept = match self.extents.remove(&extent) {
            None => found,
            Some(other) => {
                let (kept, empty) = match found.written() {
                    0 => (other, found),
                    _ => (found, other),
                };
                if empty.written() > 0 {
                    return Err(DiskError::Foreign(empty.place.slab));
                }
                let place = empty.place;
                lines[place.line].session.release_slab(place.slab);
                kept
            }
        };
        self.extents.insert(extent, kept);
        Ok(())
    }

    fn written_blocks(&self) -> u64 {
        let written = self.extents.values().map(StoredExtent::written);
        written.map(u64::from).sum()
    }

    fn finish(self) -> Extents {
        let extents = Extents::default();
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
            | RemoteError::TimedOut(_),
        ) => true,
        DiskError::Fault(fault) => matches!(fault, DiskFault::Interrupted),
        _ => false,
    }
}
