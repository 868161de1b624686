//! The disk against real servers in this process, compared with a plain array: through cut
//! connections, interrupted requests, and one backend after the other.

use std::thread;

use outram_memserver::Server;
use outram_wire::server::{Extent, Refusal};

use super::layout::Run;
use super::*;
use crate::remote::SessionEvent;
use crate::remote::test_server::{self, Gate, PATIENCE, Pki, SLAB, anywhere, serve};

pub(crate) const SIZE: u64 = 3 * SLAB;

/// Xorshift: good enough, and the same for the same seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// With a table that nobody finds again.
fn create(config: FarDiskConfig) -> Result<FarDisk, DiskError> {
    let table = DiskTable::in_memory(config.size_bytes);
    FarDisk::create(config, table)
}

fn incoming(config: FarDiskConfig) -> FarDisk {
    let table = DiskTable::in_memory(config.size_bytes);
    FarDisk::incoming(config, table)
}

/// A disk's servers, each behind a gate.
pub(crate) struct World {
    pub(crate) pki: Pki,
    pub(crate) servers: Vec<Server>,
    pub(crate) gates: Vec<Gate>,
}

impl World {
    pub(crate) fn new(slabs: &[u64]) -> Self {
        let pki = Pki::new();
        let start = |slab: &u64| serve(&pki, anywhere(), |config| config.slab_bytes = *slab);
        let servers: Vec<Server> = slabs.iter().map(start).collect();
        let gates = servers.iter().map(|server| Gate::to(server.local_addr()));
        Self {
            gates: gates.collect(),
            servers,
            pki,
        }
    }

    fn config(&self) -> FarDiskConfig {
        let addresses = self.gates.iter().map(|gate| gate.address.to_string());
        let addresses = addresses.map(|address| address.parse().expect("an address"));
        let remote = test_server::config(self.gates[0].address, self.pki.client.clone());
        FarDiskConfig {
            vm: VmId(uuid::Uuid::from_u128(9)),
            size_bytes: SIZE,
            key: DiskKey([5; 32]),
            seal: Seal::On,
            remote: RemoteConfig {
                addresses: addresses.collect(),
                data_connections: DATA_CONNECTIONS,
                ..remote
            },
        }
    }

    pub(crate) fn create(&self) -> FarDisk {
        create(self.config()).expect("there is room")
    }

    pub(crate) fn leased_bytes(&self) -> u64 {
        let stats = self.servers.iter().map(Server::stats);
        stats.map(|stats| stats.leased_bytes).sum()
    }

    /// Whoever drops a disk waits but for seconds until its servers have done so.
    fn comes_to_have_no_disk(&self) {
        let is_free = |server: &Server| {
            let stats = server.stats();
            stats.disks.is_empty() && stats.reserved_bytes == 0
        };
        self.eventually("no disk is left", || self.servers.iter().all(is_free));
    }

    pub(crate) fn eventually(&self, what: &str, done: impl Fn() -> bool) {
        let deadline = std::time::Instant::now() + PATIENCE;
        while !done() {
            assert!(std::time::Instant::now() < deadline, "in vain: {what}");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

fn read(disk: &FarDisk, offset: u64, length: usize) -> Result<Vec<u8>, DiskFault> {
    let mut bytes = vec![0xee; length];
    disk.read(offset, &mut bytes, &Interrupt::never())
        .map(|()| bytes)
}

fn write(disk: &FarDisk, offset: u64, bytes: &[u8]) {
    disk.write(offset, bytes, &Interrupt::never())
        .expect("written");
}

/// Carries a request out under interruptions that come when they like, until it is done.
fn insist(dice: &mut Dice, request: impl Fn(&Interrupt<'_>) -> Result<(), DiskFault> + Sync) {
    let give_up_after = Duration::from_millis(dice.below(4));
    let flag = AtomicBool::new(false);
    let outcome = thread::scope(|scope| {
        let asked = scope.spawn(|| request(&Interrupt::by(&flag)));
        thread::sleep(give_up_after);
        flag.store(true, Ordering::Release);
        asked.join().expect("no panic")
    });
    match outcome {
        Ok(()) => {}
        Err(DiskFault::Interrupted) => request(&Interrupt::never()).expect("carried out"),
        Err(other) => panic!("{other:?}"),
    }
}

/// Random requests, compared with an array after each read and at the end.
fn live(seed: u64, slabs: &[u64], steps: usize) {
    let world = World::new(slabs);
    let mut dice = Dice(seed);
    let mut model = vec![0u8; SIZE as usize];
    let mut disk = world.create();
    for step in 0..steps {
        // Sectors, as a guest's requests are; some of whole blocks.
        let unit = if dice.below(2) == 0 { 512 } else { 4096 };
        let offset = dice.below(SIZE / unit) * unit;
        // As often within a block as over many.
        let most = if dice.below(2) == 0 { 4096 } else { 300 * 1024 };
        let most = (SIZE - offset).min(most);
        let length = (dice.below(most / unit) + 1) * unit;
        let part = offset as usize..(offset + length) as usize;
        match dice.below(20) {
            0..=6 => {
                let found = read(&disk, offset, length as usize).expect("read");
                assert!(
                    found == model[part],
                    "seed {seed} step {step}: {offset}+{length}"
                );
            }
            7..=13 => {
                for byte in &mut model[part.clone()] {
                    *byte = dice.below(256) as u8;
                }
                let bytes = &model[part];
                insist(&mut dice, |interrupt| disk.write(offset, bytes, interrupt));
            }
            14..=16 => {
                model[part].fill(0);
                insist(&mut dice, |interrupt| disk.zero(offset, length, interrupt));
            }
            17 => world.gates.iter().for_each(Gate::cut),
            18 => {
                let out = dice.below(slabs.len() as u64) as usize;
                world.gates[out].shut(true);
                let bytes = model[part].to_vec();
                thread::scope(|scope| {
                    scope.spawn(|| write(&disk, offset, &bytes));
                    thread::sleep(Duration::from_millis(20));
                    world.gates[out].shut(false);
                });
            }
            _ => {
                disk.end(true);
                disk = incoming(world.config());
            }
        }
    }
    let found = read(&disk, 0, SIZE as usize).expect("read");
    assert!(found == model, "seed {seed}: the whole disk");
    assert_eq!(disk.status().errors, 0);
    let whole = |block: &[u8]| block.iter().any(|byte| *byte != 0);
    let written = model.chunks(4096).filter(|block| whole(block)).count();
    assert_eq!(disk.status().stored_bytes, written as u64 * 4096);
    disk.zero(0, SIZE, &Interrupt::never()).expect("zeroed");
    world.eventually("every slab is given back", || world.leased_bytes() == 0);
    disk.end(false);
    world.comes_to_have_no_disk();
}

#[test]
fn random_requests_leave_what_an_array_would_hold() {
    for seed in [1, 2, 3] {
        live(0x9e37_79b9_7f4a_7c15 ^ seed, &[128 << 10], 250);
    }
}

#[test]
fn a_disk_over_servers_of_different_slabs_holds_what_an_array_would() {
    live(
        0x1234_5678_9abc_def1,
        &[64 << 10, 192 << 10, 128 << 10],
        300,
    );
}

#[test]
fn requests_that_share_blocks_lose_nothing_of_each_other() {
    let world = World::new(&[SLAB]);
    let disk = world.create();
    const SECTORS: u64 = 512;
    thread::scope(|scope| {
        for own in 0..4u64 {
            let disk = &disk;
            scope.spawn(move || {
                for round in 0..3 {
                    for sector in (own..SECTORS).step_by(4) {
                        let bytes = [(sector + round + 1) as u8; 512];
                        write(disk, sector * 512, &bytes);
                        let found = read(disk, sector * 512, 512).expect("read");
                        assert!(found == bytes, "sector {sector}");
                    }
                }
            });
        }
    });
    let found = read(&disk, 0, (SECTORS * 512) as usize).expect("read");
    for (sector, bytes) in found.chunks(512).enumerate() {
        assert!(bytes.iter().all(|byte| *byte == (sector + 3) as u8));
    }
}

#[test]
fn what_is_not_written_costs_nothing() {
    let world = World::new(&[SLAB]);
    let disk = world.create();
    assert_eq!(read(&disk, 0, 8192), Ok(vec![0; 8192]));
    write(&disk, 4096, &[0; 64 * 1024]);
    let whole = disk.zero(0, SIZE, &Interrupt::never());
    assert_eq!(whole, Ok(()));
    assert_eq!(world.leased_bytes(), 0);
    let reserved = world.servers[0].stats().reserved_bytes;
    assert!(reserved >= SIZE, "all of it is set aside: {reserved}");
    write(&disk, SIZE - 512, &[1; 512]);
    assert_eq!(
        (world.leased_bytes(), disk.status().stored_bytes),
        (SLAB, 4096)
    );
    // Overwritten with zeros it is no more.
    write(&disk, SIZE - 512, &[0; 512]);
    world.eventually("the slab is given back", || world.leased_bytes() == 0);
    assert_eq!(disk.status().stored_bytes, 0);
}

#[test]
fn a_disk_that_does_not_fit_is_refused_and_leaves_nothing() {
    let world = World::new(&[SLAB, SLAB]);
    let config = FarDiskConfig {
        size_bytes: 40 * SLAB,
        ..world.config()
    };
    let error = create(config).err().expect("8 MiB are lent");
    assert!(with_causes(&error).contains("server is full"), "{error}");
    world.comes_to_have_no_disk();
}

#[test]
fn a_server_started_anew_gives_errors_and_no_zeros() {
    let mut world = World::new(&[SLAB]);
    let disk = world.create();
    write(&disk, 0, &[7; 4096]);
    let address = world.servers[0].local_addr();
    drop(world.servers.remove(0));
    world.servers.push(serve(&world.pki, address, |_| {}));
    let error = read(&disk, 0, 4096).expect_err("it is gone");
    assert!(matches!(error, DiskFault::Lost(_)), "{error:?}");
    let refused = disk.write(0, &[8; 4096], &Interrupt::never());
    assert!(matches!(refused, Err(DiskFault::Lost(_))), "{refused:?}");
    let status = disk.status();
    assert_eq!((status.state, status.errors), (DiskState::Lost, 2));
    let later = incoming(world.config());
    let error = read(&later, 0, 4096).expect_err("there is no such disk");
    assert!(matches!(error, DiskFault::Unopened(_)), "{error:?}");
}

/// The open store of a disk, to be meddled with.
pub(super) fn store(disk: &FarDisk) -> Arc<Store> {
    disk.open(&Interrupt::never()).expect("open")
}

#[test]
fn a_changed_or_older_block_is_an_error_and_counted() {
    let world = World::new(&[SLAB]);
    let disk = world.create();
    let line_of = |store: &Store| store.extents.get(0).expect("written").place.slab;
    write(&disk, 0, &[1; 8192]);
    let store = store(&disk);
    let slab = line_of(&store);
    let whole = |offset, length| Extent {
        slab,
        offset,
        length,
    };
    let never = Interrupt::never();
    let line = &store.lines[0];
    let before = line.read(&[whole(0, SLAB as u32)], &never).expect("read");
    // Another byte than the sealed one, which may be any.
    line.write(&[whole(5, 1)], &[&[!before[5]]], &never)
        .expect("meddled");
    assert_eq!(read(&disk, 0, 4096), Err(DiskFault::Corrupt { block: 0 }));
    assert_eq!(read(&disk, 4096, 4096), Ok(vec![1; 4096]));
    write(&disk, 0, &[2; 4096]);
    assert_eq!(read(&disk, 0, 4096), Ok(vec![2; 4096]));
    // All as it once was, tags and all: a server that forgot the last write.
    line.write(&[whole(0, SLAB as u32)], &[&before], &never)
        .expect("put back");
    assert_eq!(read(&disk, 0, 4096), Err(DiskFault::Corrupt { block: 0 }));
    let status = disk.status();
    assert_eq!((status.integrity_failures, status.errors), (2, 2));
    // One block in the place of another.
    let swap = incoming(world.config());
    write(&swap, 0, &[3; 8192]);
    let other = super::tests::store(&swap);
    let block = other.lines[0]
        .read(&[whole(0, 4096)], &never)
        .expect("read");
    write(&swap, 4096, &[4; 4096]);
    other.lines[0]
        .write(&[whole(4096, 4096)], &[&block], &never)
        .expect("meddled");
    assert_eq!(
        read(&swap, 4096, 4096),
        Err(DiskFault::Corrupt { block: 1 })
    );
}

#[test]
fn nothing_of_a_block_shows_at_its_server_unless_it_may() {
    for seal in [Seal::On, Seal::Off] {
        let world = World::new(&[SLAB]);
        let config = FarDiskConfig {
            seal,
            ..world.config()
        };
        let disk = create(config.clone()).expect("there is room");
        let secret = b"what nobody else may read ";
        let bytes = secret.repeat(400)[..8192].to_vec();
        write(&disk, 4096, &bytes);
        let store = store(&disk);
        let slab = store.extents.get(0).expect("written").place.slab;
        let (offset, length) = (0, SLAB as u32);
        let whole = Extent {
            slab,
            offset,
            length,
        };
        let kept = store.lines[0].read(&[whole], &Interrupt::never());
        let shows = kept
            .expect("read")
            .windows(8)
            .any(|part| part == &secret[..8]);
        assert_eq!(shows, seal == Seal::Off, "{seal}");
        // Whoever claims it reads what was written either way, and writes as it is told.
        drop(store);
        disk.end(true);
        drop(disk);
        let other = match seal {
            Seal::On => Seal::Off,
            Seal::Off => Seal::On,
        };
        let later = incoming(FarDiskConfig {
            seal: other,
            ..config
        });
        assert_eq!(read(&later, 4096, 8192), Ok(bytes));
        write(&later, 0, &[3; 5000]);
        assert_eq!(read(&later, 0, 4096), Ok(vec![3; 4096]));
    }
}

#[test]
fn an_earlier_openings_block_of_the_same_generation_is_not_taken() {
    let world = World::new(&[SLAB]);
    let first = world.create();
    write(&first, 0, &[1; 4096]);
    let former = store(&first);
    let slab = former.extents.get(0).expect("written").place.slab;
    let block = Run { first: 0, count: 1 };
    let places = [
        former.layout.blocks_at(slab, block),
        former.layout.entries_at(slab, block),
    ];
    let never = Interrupt::never();
    let kept = former.lines[0].read(&places, &never).expect("read");
    drop(former);
    first.end(false);
    drop(first);
    // A new start of the guest: generations begin anew, under the same key.
    let second = world.create();
    write(&second, 0, &[2; 4096]);
    let now = store(&second);
    let slab = now.extents.get(0).expect("written").place.slab;
    let places = [
        now.layout.blocks_at(slab, block),
        now.layout.entries_at(slab, block),
    ];
    let (old, entry) = kept.split_at(4096);
    now.lines[0]
        .write(&places, &[old, entry], &never)
        .expect("meddled");
    assert_eq!(read(&second, 0, 4096), Err(DiskFault::Corrupt { block: 0 }));
}

#[test]
fn a_server_cannot_pass_a_foreign_slab_off_as_the_disks() {
    let world = World::new(&[SLAB]);
    let disk = world.create();
    write(&disk, 0, &[1; 4096]);
    let store = store(&disk);
    let slab = store.extents.get(0).expect("written").place.slab;
    let header = store.layout.header_at(slab);
    let never = Interrupt::never();
    store.lines[0]
        .write(&[header], &[&[3; layout::HEADER]], &never)
        .expect("meddled");
    drop(store);
    disk.end(true);
    let error = read(&incoming(world.config()), 0, 4096).expect_err("foreign");
    assert!(error.to_string().contains("not this disk's"), "{error}");
}

#[test]
fn the_latest_claim_wins_and_a_resumed_guest_claims_back() {
    let world = World::new(&[SLAB]);
    let source = world.create();
    write(&source, 0, &[1; 4096]);
    let destination = incoming(world.config());
    assert_eq!(destination.status().state, DiskState::Parked);
    assert_eq!(read(&destination, 0, 4096), Ok(vec![1; 4096]));
    write(&destination, 4096, &[2; 4096]);
    let refused = source.write(0, &[3; 4096], &Interrupt::never());
    assert!(matches!(refused, Err(DiskFault::Claimed(_))), "{refused:?}");
    assert_eq!(source.status().state, DiskState::Claimed);
    // The migration failed after all.
    destination.end(true);
    source.resume();
    assert_eq!(read(&source, 0, 8192).expect("read")[4096..], [2; 4096]);
    write(&source, 0, &[3; 4096]);
    source.end(false);
    world.comes_to_have_no_disk();
}

#[test]
fn the_former_claimant_cannot_drop_the_disk() {
    let world = World::new(&[SLAB]);
    let source = world.create();
    write(&source, 0, &[1; 4096]);
    let destination = incoming(world.config());
    assert_eq!(read(&destination, 0, 4096), Ok(vec![1; 4096]));
    source.end(false);
    write(&destination, 4096, &[2; 4096]);
    assert_eq!(read(&destination, 0, 4096), Ok(vec![1; 4096]));
}

#[test]
fn a_disk_that_is_being_claimed_can_be_interrupted() {
    let world = World::new(&[SLAB]);
    let source = world.create();
    write(&source, 0, &[1; 4096]);
    source.end(true);
    let destination = incoming(world.config());
    let flag = AtomicBool::new(true);
    let outcome = destination.read(0, &mut [0; 4096], &Interrupt::by(&flag));
    assert_eq!(outcome, Err(DiskFault::Interrupted));
    assert_eq!(read(&destination, 0, 4096), Ok(vec![1; 4096]));
}

#[test]
fn a_successor_waits_for_certificates_that_are_no_good() {
    let world = World::new(&[SLAB]);
    let source = world.create();
    write(&source, 0, &[1; 4096]);
    source.end(true);
    // As in the middle of a renewal.
    let key = &world.pki.client.key;
    let aside = key.with_extension("aside");
    std::fs::rename(key, &aside).expect("moved");
    let destination = incoming(world.config());
    thread::scope(|scope| {
        let asked = scope.spawn(|| read(&destination, 0, 4096));
        thread::sleep(Duration::from_millis(300));
        assert!(!asked.is_finished());
        std::fs::rename(&aside, key).expect("moved back");
        assert_eq!(asked.join().expect("no panic"), Ok(vec![1; 4096]));
    });
}

#[test]
fn servers_in_another_order_have_what_was_set_aside() {
    let world = World::new(&[SLAB, SLAB]);
    let source = world.create();
    // Extents take a little less than a slab: all of the first server's.
    for place in [0, 2] {
        write(&source, place * SLAB, &[1; 4096]);
    }
    source.end(true);
    for server in &world.servers {
        server.set_memory(server.stats().reserved_bytes);
    }
    let mut config = world.config();
    config.remote.addresses.reverse();
    let destination = incoming(config);
    for offset in [SLAB, SIZE - 4096] {
        write(&destination, offset, &[2; 4096]);
    }
    assert_eq!(world.leased_bytes(), 4 * SLAB);
    assert_eq!(read(&destination, 2 * SLAB, 4096), Ok(vec![1; 4096]));
}

#[test]
fn a_refusal_that_nobody_waited_for_is_no_later_ones() {
    let world = World::new(&[SLAB]);
    let disk = world.create();
    write(&disk, 0, &[1; 4096]);
    let store = match &*disk.access() {
        Access::Open(store) => Arc::clone(store),
        _ => panic!("it is open"),
    };
    let reason = Refusal::OutOfMemory {
        reason: "for a moment".to_owned(),
    };
    store.lines[0]
        .state
        .hear(SessionEvent::LeaseRefused { server: 0, reason });
    // Of the next extent, which needs a slab.
    let written = store.write(SLAB, &[2; 4096], &Interrupt::never());
    written.expect("there is room");
}

#[test]
fn a_request_to_a_server_out_of_reach_waits_and_can_be_interrupted() {
    let world = World::new(&[SLAB]);
    let disk = world.create();
    write(&disk, 0, &[1; 4096]);
    world.gates[0].shut(true);
    let flag = AtomicBool::new(false);
    thread::scope(|scope| {
        let asked = scope.spawn(|| {
            let mut bytes = [0; 4096];
            disk.read(0, &mut bytes, &Interrupt::by(&flag))
        });
        thread::sleep(Duration::from_millis(300));
        assert!(!asked.is_finished());
        flag.store(true, Ordering::Release);
        assert_eq!(asked.join().expect("no panic"), Err(DiskFault::Interrupted));
    });
    world.gates[0].shut(false);
    assert_eq!(read(&disk, 0, 4096), Ok(vec![1; 4096]));
    assert_eq!(disk.status().errors, 0);
}

#[test]
fn who_waits_for_another_to_open_the_disk_can_be_interrupted() {
    let world = World::new(&[SLAB]);
    world.create().end(true);
    world.gates[0].shut(true);
    let disk = incoming(world.config());
    let flags = [AtomicBool::new(false), AtomicBool::new(false)];
    let read = |flag| disk.read(0, &mut [0; 4096], &Interrupt::by(flag));
    thread::scope(|scope| {
        let opener = scope.spawn(|| read(&flags[0]));
        world.eventually("it is being opened", || disk.opening.try_lock().is_err());
        let other = scope.spawn(|| read(&flags[1]));
        flags[1].store(true, Ordering::Release);
        let deadline = std::time::Instant::now() + PATIENCE;
        while !other.is_finished() && std::time::Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        let is_alone = other.is_finished() && !opener.is_finished();
        flags[0].store(true, Ordering::Release);
        assert!(is_alone, "it waits for the one that opens the disk");
        for asked in [opener, other] {
            assert_eq!(asked.join().expect("no panic"), Err(DiskFault::Interrupted));
        }
    });
}

#[test]
fn a_disk_is_not_claimed_with_other_servers_or_another_size() {
    let world = World::new(&[SLAB, SLAB]);
    let disk = world.create();
    write(&disk, 0, &[1; 4096]);
    disk.end(true);
    let unopened = |change: fn(&mut FarDiskConfig)| {
        let mut config = world.config();
        change(&mut config);
        let disk = incoming(config);
        read(&disk, 0, 4096).expect_err("refused").to_string()
    };
    let text = unopened(|config| drop(config.remote.addresses.pop()));
    assert!(text.contains("other memory servers"), "{text}");
    let text = unopened(|config| config.size_bytes *= 2);
    assert!(text.contains("set the size back"), "{text}");
    let text = unopened(|config| config.key = DiskKey([6; 32]));
    assert!(text.contains("has no disk"), "{text}");
    let mut config = world.config();
    config.remote.addresses.reverse();
    assert_eq!(
        read(&incoming(config), 0, 4096),
        Ok(vec![1; 4096]),
        "their order does not matter"
    );
}

#[test]
fn nothing_lies_beyond_the_end() {
    let world = World::new(&[SLAB]);
    let disk = world.create();
    for (offset, length) in [(SIZE, 512), (SIZE - 512, 1024), (u64::MAX, 1)] {
        assert_eq!(read(&disk, offset, length), Err(DiskFault::Beyond));
        let zeroed = disk.zero(offset, length as u64, &Interrupt::never());
        assert_eq!(zeroed, Err(DiskFault::Beyond));
    }
}

/// Words that the next backend finds.
#[derive(Clone)]
struct Kept(Arc<Vec<AtomicU64>>);

impl Kept {
    fn new() -> Self {
        let words = (0..DiskTable::bytes(SIZE) / 8).map(|_| AtomicU64::new(0));
        Self(Arc::new(words.collect()))
    }

    /// What a backend that dies now leaves: it can do no more to it.
    fn at_death(&self) -> Self {
        let load = |word: &AtomicU64| AtomicU64::new(word.load(Ordering::Acquire));
        Self(Arc::new(self.0.iter().map(load).collect()))
    }

    fn table(&self) -> DiskTable {
        DiskTable::new(Box::new(self.clone()), SIZE).expect("of this disk")
    }
}

impl crate::engine::table::Words for Kept {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

/// A disk whose table is kept, with two blocks written.
fn kept_disk(world: &World) -> (Kept, FarDisk) {
    let kept = Kept::new();
    let disk = FarDisk::create(world.config(), kept.table()).expect("there is room");
    write(&disk, 0, &[1; 8192]);
    (kept, disk)
}

#[test]
fn a_successor_finds_the_disk_as_it_was_and_seals_nothing_twice_alike() {
    let world = World::new(&[SLAB, SLAB]);
    let (kept, first) = kept_disk(&world);
    write(&first, SIZE - 4096, &[2; 4096]);
    first
        .zero(4096, 4096, &Interrupt::never())
        .expect("cleared");
    let (stored, next) = (first.status().stored_bytes, first.table.next_generation());
    let second = FarDisk::incoming(world.config(), kept.at_death().table());
    assert_eq!(second.table.next_generation(), next, "none is drawn again");
    assert_eq!(read(&second, 0, 4096), Ok(vec![1; 4096]));
    assert_eq!(read(&second, 4096, 4096), Ok(vec![0; 4096]));
    assert_eq!(read(&second, SIZE - 4096, 4096), Ok(vec![2; 4096]));
    assert_eq!(second.status().stored_bytes, stored);
    // The dead one's requests cannot land any more.
    let late = first.write(0, &[9; 4096], &Interrupt::never());
    assert!(matches!(late, Err(DiskFault::Claimed(_))), "{late:?}");
    write(&second, 0, &[3; 4096]);
    assert_eq!(read(&second, 0, 4096), Ok(vec![3; 4096]));
    second.end(false);
    world.eventually("all is given back", || world.leased_bytes() == 0);
}

#[test]
fn a_server_cannot_set_a_block_back_while_nobody_looks() {
    let world = World::new(&[SLAB]);
    let (kept, first) = kept_disk(&world);
    let open = store(&first);
    let slab = open.extents.get(0).expect("written").place.slab;
    let all = Extent {
        slab,
        offset: 0,
        length: SLAB as u32,
    };
    let never = Interrupt::never();
    let before = open.lines[0].read(&[all], &never).expect("read");
    write(&first, 0, &[2; 4096]);
    let dead = kept.at_death();
    open.lines[0]
        .write(&[all], &[&before], &never)
        .expect("meddled");
    let second = FarDisk::incoming(world.config(), dead.table());
    assert_eq!(read(&second, 0, 4096), Err(DiskFault::Corrupt { block: 0 }));
    assert_eq!(read(&second, 4096, 4096), Ok(vec![1; 4096]));
    // Nor drop its slab.
    let now = store(&second);
    now.lines[0].session.release_slab(slab);
    world.eventually("it is gone", || world.leased_bytes() == 0);
    let third = FarDisk::incoming(world.config(), dead.at_death().table());
    let error = read(&third, 4096, 4096).err();
    let text = error.map(|error| error.to_string()).unwrap_or_default();
    assert!(text.contains("is gone"), "{text}");
}

#[test]
fn a_change_that_was_under_way_is_there_or_not_and_nothing_else() {
    let never = Interrupt::never();
    // What the server has when the successor asks: what was there, or what was sent.
    for landed in [false, true] {
        for generation in [0, 1] {
            let world = World::new(&[SLAB]);
            let (kept, first) = kept_disk(&world);
            let open = store(&first);
            let stored = open.extents.get(0).expect("written");
            // As a request leaves it that is sent and not answered.
            stored.announce(0, generation);
            let dead = kept.at_death();
            let after = match (landed, generation) {
                (false, _) => 1,
                (true, 0) => {
                    // A later one clears the slab's entry; of the other block nothing is to change.
                    first.zero(0, 4096, &never).expect("cleared");
                    0
                }
                (true, _) => {
                    write(&first, 0, &[2; 4096]);
                    dead.0[6].fetch_add(1, Ordering::AcqRel);
                    2
                }
            };
            let second = FarDisk::incoming(world.config(), dead.table());
            let found = read(&second, 0, 8192).expect("read");
            let what = format!("landed: {landed}, generation {generation}");
            assert!(found[..4096] == [after; 4096], "{what}: {}", found[0]);
            assert!(found[4096..] == [1; 4096], "{what}");
            let blocks = 1 + u64::from(after != 0);
            assert_eq!(second.status().stored_bytes, blocks * 4096, "{what}");
        }
    }
    // A block of which nothing was under way is not believed to have changed.
    let world = World::new(&[SLAB]);
    let (kept, first) = kept_disk(&world);
    let dead = kept.at_death();
    write(&first, 0, &[2; 4096]);
    dead.0[6].fetch_add(1, Ordering::AcqRel);
    let second = FarDisk::incoming(world.config(), dead.table());
    assert_eq!(read(&second, 0, 4096), Err(DiskFault::Corrupt { block: 0 }));
}

#[test]
fn a_release_that_was_under_way_loses_nothing_that_is_kept() {
    // What a guest has only read is kept as well.
    for writes in [false, true] {
        let world = World::new(&[SLAB]);
        let (kept, first) = kept_disk(&world);
        let open = store(&first);
        let slab = open.extents.get(0).expect("written").place.slab;
        let never = Interrupt::never();
        // The header goes first.
        open.lines[0]
            .write(
                &[open.layout.header_at(slab)],
                &[&[0; layout::HEADER]],
                &never,
            )
            .expect("meddled");
        let second = FarDisk::incoming(world.config(), kept.at_death().table());
        assert_eq!(read(&second, 0, 8192), Ok(vec![1; 8192]));
        let mut after = vec![1; 8192];
        if writes {
            write(&second, 4096, &[2; 4096]);
            after[4096..].fill(2);
        }
        second.end(true);
        // The slab says again whose it is.
        let later = incoming(world.config());
        assert_eq!(read(&later, 0, 8192), Ok(after), "writes: {writes}");
    }
}

#[test]
fn a_successor_finds_errors_where_the_disk_is_gone_or_was_another_hosts() {
    let mut world = World::new(&[SLAB]);
    let (kept, first) = kept_disk(&world);
    let dead = kept.at_death();
    // Another host's guest has written meanwhile: what it wrote is not what the table knows.
    let elsewhere = incoming(world.config());
    write(&elsewhere, 0, &[2; 4096]);
    let second = FarDisk::incoming(world.config(), dead.at_death().table());
    assert_eq!(read(&second, 0, 4096), Err(DiskFault::Corrupt { block: 0 }));
    assert_eq!(read(&second, 4096, 4096), Ok(vec![1; 4096]));
    drop((first, elsewhere, second));
    let address = world.servers[0].local_addr();
    drop(world.servers.remove(0));
    world.servers.push(serve(&world.pki, address, |_| {}));
    let third = FarDisk::incoming(world.config(), dead.table());
    for _ in 0..2 {
        let error = read(&third, 4096, 4096).expect_err("its server has forgotten it");
        assert!(matches!(error, DiskFault::Unopened(_)), "{error:?}");
        // Nor when the guest's driver starts the device again.
        third.resume();
    }
    assert_eq!(third.status().state, DiskState::Parked);
}
