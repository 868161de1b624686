//! The ledger against a model of it: long random lives of a few guests, checked after each step.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use outram_wire::server::channel::{EventFd, new_waker};
use outram_wire::server::{
    ClientName, DiskId, DiskShape, Extent, InstanceId, Opening, Refusal, SessionSecret, SlabId,
};
use outram_wire::units::VmId;

use super::*;

const SLAB: u64 = 64 * 1024;
const MEMORY: u64 = 12 * SLAB;
const GUESTS: u128 = 4;
const CONNECTIONS: usize = 80;
const STEPS: usize = 5_000;

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

/// What a guest should have.
#[derive(Default)]
struct Guest {
    hold: Option<Hold>,
    reserved_slabs: u64,
    held: BTreeSet<SlabId>,
}

struct World {
    ledger: Ledger,
    socket: Arc<TcpStream>,
    waker: Arc<EventFd>,
    name: ClientName,
    guests: BTreeMap<u128, Guest>,
    seen: BTreeSet<SlabId>,
}

impl World {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let address = listener.local_addr().expect("bound");
        let terms = Terms {
            slab_bytes: SLAB,
            lease_timeout: Duration::from_secs(3600),
            max_sessions: GUESTS as usize,
            max_data_connections: CONNECTIONS,
            client_bytes: None,
            token_life: Duration::from_secs(3600),
            parked_disk_timeout: None,
        };
        let instance = InstanceId::random().expect("random numbers");
        Self {
            ledger: Ledger::new(instance, MEMORY, terms),
            socket: Arc::new(TcpStream::connect(address).expect("connected")),
            waker: Arc::new(new_waker().expect("an eventfd")),
            name: ClientName("host".to_owned()),
            guests: (0..GUESTS).map(|vm| (vm, Guest::default())).collect(),
            seen: BTreeSet::new(),
        }
    }

    fn admit(&self, vm: u128, secret: u8) -> Result<Hold, Refusal> {
        self.admit_as(&self.name, (vm, secret), false)
    }

    fn admit_as(
        &self,
        name: &ClientName,
        (vm, secret): (u128, u8),
        arrives: bool,
    ) -> Result<Hold, Refusal> {
        let vm = VmId(uuid::Uuid::from_u128(vm));
        self.admit_to(Wish::Guest { vm, arrives }, name, secret)
    }

    fn admit_to(&self, wish: Wish, name: &ClientName, secret: u8) -> Result<Hold, Refusal> {
        self.ledger.admit(&Caller {
            wish,
            name,
            secret: SessionSecret([secret; 32]),
            socket: &self.socket,
            waker: &self.waker,
        })
    }

    /// A new disk of one slab.
    fn create_disk(&self) -> Hold {
        let shape = DiskShape {
            bytes: SLAB,
            part: 0,
            parts: 1,
        };
        let disk = DiskId(uuid::Uuid::from_u128(77));
        let wish = Wish::Disk(disk, Opening::Create(shape));
        self.admit_to(wish, &self.name, 1).expect("created")
    }

    /// Has the session be as old as one that keeps nobody out with nothing.
    fn age(&self, hold: &Hold) {
        let mut books = self.ledger.books();
        let account = account_of(&mut books, hold).expect("its own session");
        account.settled_at = BootTime::now();
    }

    fn free_slabs(&self) -> u64 {
        let reserved = self.guests.values().map(|guest| guest.reserved_slabs);
        MEMORY / SLAB - reserved.sum::<u64>()
    }

    fn step(&mut self, dice: &mut Dice) {
        let vm = u128::from(dice.below(GUESTS as u64));
        let free = self.free_slabs();
        let mut guest = self.guests.remove(&vm).expect("every guest is there");
        match guest.hold.take() {
            Some(hold) => guest.hold = self.act(&mut guest, hold, free, dice),
            None => self.connect(vm, &mut guest),
        }
        self.guests.insert(vm, guest);
    }

    fn connect(&self, vm: u128, guest: &mut Guest) {
        let hold = self.admit(vm, 1).expect("there is room for every guest");
        assert!(hold.resumed || guest.reserved_slabs == 0);
        let held: BTreeSet<SlabId> = hold.held.iter().copied().collect();
        assert_eq!(held, guest.held);
        assert_eq!(hold.reserved_bytes, guest.reserved_slabs * SLAB);
        guest.hold = Some(hold);
    }

    fn act(&mut self, guest: &mut Guest, hold: Hold, free: u64, dice: &mut Dice) -> Option<Hold> {
        match dice.below(10) {
            0..=3 => self.lease(guest, &hold),
            4..=5 => self.release(guest, &hold, dice),
            6..=7 => {
                let wanted = dice.below(MEMORY / SLAB + 2);
                let granted = wanted.max(guest.held.len() as u64);
                let outcome = self.ledger.reserve(&hold, wanted * SLAB);
                if granted <= guest.reserved_slabs + free {
                    assert_eq!(outcome, Ok(granted * SLAB));
                    guest.reserved_slabs = granted;
                } else {
                    assert!(matches!(outcome, Err(Refusal::ServerFull { .. })));
                }
            }
            8 => {
                self.ledger.leave(&hold);
                return None;
            }
            _ => {
                let ended = self.ledger.end(&hold).expect("its own session");
                assert_eq!(ended.slabs, guest.held.len() as u64);
                *guest = Guest::default();
                return None;
            }
        }
        Some(hold)
    }

    fn lease(&mut self, guest: &mut Guest, hold: &Hold) {
        let outcome = self.ledger.lease(hold);
        if (guest.held.len() as u64) < guest.reserved_slabs {
            let slab = outcome.expect("it is reserved");
            assert!(self.seen.insert(slab), "an id comes once");
            guest.held.insert(slab);
        } else {
            assert!(matches!(outcome, Err(Refusal::ReservationExhausted { .. })));
        }
    }

    fn release(&self, guest: &mut Guest, hold: &Hold, dice: &mut Dice) {
        // Sometimes one that it has, sometimes one that somebody has or had.
        let own = dice.below(2) == 0;
        let choice = if own { &guest.held } else { &self.seen };
        let Some(slab) = choice
            .iter()
            .nth(dice.below(choice.len().max(1) as u64) as usize)
        else {
            return;
        };
        let slab = *slab;
        let outcome = self.ledger.release(hold, slab);
        match guest.held.remove(&slab) {
            true => assert_eq!(outcome, Ok(())),
            false => assert_eq!(outcome, Err(Refusal::NotLeased { slab })),
        }
    }

    fn check(&self) {
        // What is on its way back counts still.
        let freeing = &self.ledger.freeing;
        freeing.wait_while(Duration::from_secs(60), || true);
        let stats = self.ledger.stats(|_| true);
        let held: usize = self.guests.values().map(|guest| guest.held.len()).sum();
        assert_eq!(stats.leased_bytes, held as u64 * SLAB);
        assert_eq!(stats.reserved_bytes, MEMORY - self.free_slabs() * SLAB);
        for client in &stats.clients {
            let guest = &self.guests[&client.vm.0.as_u128()];
            assert_eq!(client.slabs, guest.held.len() as u64);
            assert_eq!(client.connected, guest.hold.is_some());
            assert!(client.leased_bytes <= client.reserved_bytes);
        }
    }
}

#[test]
fn accounts_stay_right_over_long_lives() {
    for seed in [1, 2, 0xdead_beef] {
        let (mut world, mut dice) = (World::new(), Dice(seed));
        for step in 0..STEPS {
            let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                world.step(&mut dice);
                world.check();
            }));
            assert!(checked.is_ok(), "seed {seed}, step {step}");
        }
        assert!(world.seen.len() > 100, "the lives were eventful");
    }
}

#[test]
fn a_hold_that_was_taken_over_speaks_for_nobody() {
    let world = World::new();
    let former = world.admit(0, 1).expect("admitted");
    let hold = world.admit(0, 1).expect("resumed");
    assert_eq!(world.ledger.lease(&former), Err(Refusal::SessionEnded));
    assert_eq!(world.ledger.renew(&former), Err(Refusal::SessionEnded));
    assert!(world.ledger.issue_token(&former).is_err());
    assert!(world.ledger.end(&former).is_err());
    // Its end is not the session's.
    world.ledger.leave(&former);
    assert_eq!(world.ledger.renew(&hold), Ok(()));
    let token = world.ledger.issue_token(&hold).expect("its own session");
    assert!(world.ledger.redeem_token(&token).is_some());
    assert!(world.ledger.redeem_token(&token).is_none());
}

/// Slabs asked back of each guest by the plain rule: one after the other, the newest of whoever has most left. Of
/// several who have as much it is one or the other's.
fn asked_by_the_plain_rule(
    held: &[Vec<SlabId>],
    asked: &[BTreeSet<SlabId>],
    slabs: u64,
) -> Vec<BTreeSet<SlabId>> {
    let mut asked = asked.to_vec();
    for _ in 0..slabs {
        let left = |guest: &usize| held[*guest].len() - asked[*guest].len();
        let most = (0..held.len()).max_by_key(left).expect("guests");
        let newest = held[most].iter().rev();
        let Some(slab) = newest.copied().find(|slab| !asked[most].contains(slab)) else {
            break;
        };
        asked[most].insert(slab);
    }
    asked
}

#[test]
fn slabs_are_asked_back_by_the_plain_rule() {
    for seed in 1..=200 {
        let mut dice = Dice(seed);
        let world = World::new();
        let guests = 1 + dice.below(GUESTS as u64) as usize;
        world.ledger.set_memory(guests as u64 * 20 * SLAB);
        let holds: Vec<Hold> = (0..guests as u128)
            .map(|vm| world.admit(vm, 1).expect("there is room"))
            .collect();
        for hold in &holds {
            let slabs = dice.below(20);
            world.ledger.reserve(hold, slabs * SLAB).expect("room");
            for _ in 0..slabs {
                world.ledger.lease(hold).expect("reserved");
            }
        }
        let held: Vec<Vec<SlabId>> = holds.iter().map(|hold| hold.session.slab_ids()).collect();
        let leased: usize = held.iter().map(Vec::len).sum();
        let asked = || -> Vec<BTreeSet<SlabId>> {
            let mut books = world.ledger.books();
            let mut of = |hold| account_of(&mut books, hold).map(|own| own.vacating.clone());
            let asked = holds.iter().map(|hold| of(hold).expect("its own"));
            asked.collect()
        };
        for _ in 0..4 {
            let before = asked();
            let count: usize = before.iter().map(BTreeSet::len).sum();
            let memory = dice.below(leased as u64 + 3);
            let needed = (leased as u64).saturating_sub(memory);
            let posted = world.ledger.set_memory(memory * SLAB);
            let now = asked();
            if let Some(more) = needed.checked_sub(count as u64) {
                let plain = asked_by_the_plain_rule(&held, &before, more);
                assert_eq!(posted, more, "seed {seed}");
                let left = |asked: &[BTreeSet<SlabId>]| {
                    let counts = held
                        .iter()
                        .zip(asked)
                        .map(|(own, asked)| own.len() - asked.len());
                    let mut counts: Vec<usize> = counts.collect();
                    counts.sort_unstable();
                    counts
                };
                assert_eq!(left(&now), left(&plain), "seed {seed}");
                for (guest, own) in now.iter().enumerate() {
                    let more = own.len() - before[guest].len();
                    let newest = held[guest].iter().rev();
                    let newest = newest.filter(|slab| !before[guest].contains(slab));
                    let newest: BTreeSet<SlabId> = newest.take(more).copied().collect();
                    assert_eq!(own - &before[guest], newest, "seed {seed}");
                }
            } else {
                let count: usize = now.iter().map(BTreeSet::len).sum();
                assert_eq!((posted, count as u64), (0, needed), "seed {seed}");
            }
        }
    }
}

#[test]
fn whoever_is_asked_for_thousands_of_slabs_is_told_each_once() {
    const SLABS: u64 = 8_000;
    let world = World::new();
    world.ledger.set_memory(SLABS * SLAB);
    let hold = world.admit(0, 1).expect("there is room");
    world.ledger.reserve(&hold, SLABS * SLAB).expect("room");
    let mut slabs: Vec<SlabId> = (0..SLABS)
        .map(|_| world.ledger.lease(&hold).expect("reserved"))
        .collect();
    assert_eq!(world.ledger.set_memory(0), SLABS);
    assert_eq!(world.ledger.set_memory(0), 0);
    slabs.reverse();
    let wanted = slabs.into_iter().map(|slab| ServerMessage::Vacate { slab });
    assert_eq!(hold.control.take_outbox(), wanted.collect::<Vec<_>>());
}

#[test]
fn all_connections_of_a_session_may_be_made_at_once() {
    let world = World::new();
    let hold = world.admit(0, 1).expect("admitted");
    let issue = |_| world.ledger.issue_token(&hold).expect("its own session");
    let tokens: Vec<_> = (0..=CONNECTIONS).map(issue).collect();
    let redeemed = tokens
        .iter()
        .map(|token| world.ledger.redeem_token(token).is_some());
    let redeemed: Vec<bool> = redeemed.collect();
    assert!(!redeemed[0], "the oldest of one too many made room");
    assert!(redeemed[1..].iter().all(|is_good| *is_good));
}

fn name(name: &str) -> ClientName {
    ClientName(name.to_owned())
}

fn is_taken(admitted: &Result<Hold, Refusal>) -> bool {
    matches!(admitted, Err(Refusal::SessionTaken { .. }))
}

#[test]
fn a_session_that_has_nothing_bars_no_guest_from_its_own_host() {
    for squats_as_arrival in [false, true] {
        let world = World::new();
        let squatter = world.admit_as(&name("x"), (1, 9), squats_as_arrival);
        let squatter = squatter.expect("nobody else is there");
        let Err(Refusal::SessionTaken { ends_in_s, .. }) = world.admit(1, 1) else {
            panic!("it may settle yet");
        };
        let longest = guests::SETTLING.as_secs() + 1;
        assert!(
            ends_in_s <= longest,
            "not for as long as its lease: {ends_in_s} s"
        );
        world.age(&squatter);
        let hold = world.admit(1, 1).expect("it bars nobody");
        assert!(!hold.resumed);
        assert_eq!(
            world.ledger.renew(&squatter),
            Err(Refusal::SessionEnded),
            "it is superseded"
        );
        world.ledger.reserve(&hold, SLAB).expect("its own session");
        world.age(&hold);
        let again = world.admit_as(&name("x"), (1, 9), false);
        assert!(is_taken(&again), "whoever has something is there to stay");
    }
}

#[test]
fn a_session_that_has_nothing_bars_no_migration() {
    let [x, destination, next] = ["x", "destination", "next"].map(name);
    let world = World::new();
    let source = world.admit(1, 1).expect("there is room");
    world.ledger.reserve(&source, SLAB).expect("there is room");
    let squatter = world.admit_as(&x, (1, 9), true).expect("a seat is free");
    let arrive = |name, secret| world.admit_as(name, (1, secret), true);
    assert!(is_taken(&arrive(&destination, 2)), "it may settle yet");
    world.age(&squatter);
    let arrived = arrive(&destination, 2).expect("it bars nobody");
    // Whoever arrived has its time, and then a seat of its own.
    assert!(is_taken(&arrive(&x, 9)));
    world.ledger.reserve(&arrived, SLAB).expect("room");
    world.age(&arrived);
    assert!(is_taken(&arrive(&x, 9)));
    assert_eq!(world.ledger.renew(&source), Ok(()));
    // Of two that came before an arrival it may be the older one's seat.
    let world = World::new();
    let arrive = |name, secret| world.admit_as(name, (1, secret), true);
    world.age(&arrive(&x, 9).expect("there is room"));
    let arrived = arrive(&destination, 2).expect("a seat is free");
    world.ledger.reserve(&arrived, SLAB).expect("room");
    arrive(&next, 3).expect("it bars nobody");
    assert_eq!(world.ledger.renew(&arrived), Ok(()));
}

#[test]
fn a_session_that_has_nothing_is_its_clients_all_the_same() {
    let world = World::new();
    let hold = world.admit(1, 1).expect("there is room");
    world.age(&hold);
    assert!(is_taken(&world.admit(1, 2)), "it is connected");
    let hold = world.admit(1, 1).expect("its own");
    assert!(hold.resumed);
}

#[test]
fn a_disk_takes_no_slab_that_was_made_ahead() {
    let world = World::new();
    let (disk, guest) = (world.create_disk(), world.admit(0, 1).expect("admitted"));
    let left = std::thread::scope(|scope| {
        scope.spawn(|| world.ledger.keep_spare());
        world.ledger.spare.want();
        while world.ledger.spare.bytes() == 0 {
            std::thread::yield_now();
        }
        let left = [&disk, &guest].map(|hold| {
            let leased = world.ledger.reserve(hold, SLAB);
            let leased = leased.and_then(|_| world.ledger.lease(hold));
            leased.map(|_| world.ledger.spare.bytes())
        });
        world.ledger.spare.close();
        left
    });
    assert_eq!(left, [Ok(SLAB), Ok(0)]);
}

#[test]
fn whoever_comes_next_has_the_room_of_who_said_goodbye() {
    let world = World::new();
    // Thousands of pages each, so that giving them back takes a moment.
    let slab = 4 << 20;
    let mut ledger = World::new().ledger;
    ledger.terms.slab_bytes = slab;
    ledger.set_memory(12 * slab);
    let world = World { ledger, ..world };
    for round in 0..20 {
        let hold = world.admit(round % GUESTS, 1).expect("there is room");
        world.ledger.reserve(&hold, 12 * slab).expect("all is free");
        for number in 0..12 {
            let leased = world.ledger.lease(&hold);
            let leased = leased.unwrap_or_else(|error| panic!("round {round}, {number}: {error}"));
            let whole = Extent {
                slab: leased,
                offset: 0,
                length: slab as u32,
            };
            let mut pieces = Vec::new();
            hold.session
                .resolve(&[whole], &mut pieces)
                .expect("its own");
            pieces[0].prepare();
        }
        assert_eq!(world.ledger.end(&hold).expect("its own").slabs, 12);
    }
}

/// A slab's room on its way back: it is there once its sender says so.
struct Returning(mpsc::Receiver<()>, Arc<AtomicU64>);

impl Drop for Returning {
    fn drop(&mut self) {
        let told = self.0.recv_timeout(Duration::from_secs(60));
        told.expect("nobody waits for it");
        self.1.fetch_sub(SLAB, Ordering::AcqRel);
    }
}

/// Has all of the memory be on its way back, each slab's once something is sent.
fn give_all_back(world: &World) -> Vec<mpsc::Sender<()>> {
    let lent = &world.ledger.lent_bytes;
    lent.fetch_add(MEMORY, Ordering::AcqRel);
    let (senders, returning) = (0..MEMORY / SLAB)
        .map(|_| mpsc::channel())
        .map(|(sender, receiver)| (sender, Returning(receiver, lent.clone())))
        .unzip::<_, _, _, Vec<_>>();
    world.ledger.freeing.free(returning);
    senders
}

#[test]
fn of_several_who_wait_for_freed_memory_none_is_refused_while_more_comes() {
    let world = World::new();
    let holds = [0, 1].map(|vm| world.admit(vm, 1).expect("there is room"));
    let each = MEMORY / 2;
    for hold in &holds {
        world.ledger.reserve(hold, each).expect("there is room");
    }
    let returning = give_all_back(&world);
    std::thread::scope(|scope| {
        for hold in &holds {
            let ledger = &world.ledger;
            scope.spawn(move || {
                for number in 0..each / SLAB {
                    let leased = ledger.lease(hold);
                    assert!(leased.is_ok(), "slab {number}: {leased:?}");
                }
            });
        }
        // So that both wait by then; and each time, that both see the room before one of them has it.
        let pause = Duration::from_millis(20);
        for sender in returning {
            std::thread::sleep(pause);
            let _books = world.ledger.books();
            sender.send(()).expect("it is on its way");
            std::thread::sleep(pause);
        }
    });
    assert_eq!(world.ledger.stats(|_| true).leased_bytes, MEMORY);
}

#[test]
fn who_finds_no_room_and_nothing_on_its_way_back_is_refused() {
    let world = World::new();
    let hold = world.admit(0, 1).expect("there is room");
    world.ledger.reserve(&hold, SLAB).expect("there is room");
    // Also where less than a slab may be lent, and nothing is.
    world.ledger.set_memory(SLAB / 2);
    let refused = world.ledger.lease(&hold);
    assert!(
        matches!(refused, Err(Refusal::ServerFull { .. })),
        "{refused:?}"
    );
}

#[test]
fn a_disks_slab_waits_for_no_memory_to_come_back() {
    let world = World::new();
    let disk = world.create_disk();
    world.ledger.reserve(&disk, SLAB).expect("there is room");
    let returning = give_all_back(&world);
    let ended = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| ended.0.send(world.ledger.lease(&disk).map(drop)));
        // All of it is on its way still when the disk has its slab.
        let leased = ended.1.recv_timeout(FREED_WITHIN / 2);
        for sender in returning {
            sender.send(()).expect("it is on its way");
        }
        assert_eq!(leased, Ok(Ok(())));
    });
}

#[test]
fn who_says_goodbye_waits_for_no_slab_to_be_deregistered() {
    let world = World::new();
    let hold = world.admit(0, 1).expect("there is room");
    world.ledger.reserve(&hold, MEMORY).expect("all is free");
    let leased = (0..MEMORY / SLAB).map(|_| world.ledger.lease(&hold).expect("reserved"));
    let last = leased.last().expect("several");
    let slab = hold.session.slab(last).expect("its own");
    let registration = slab.keep_registration();
    let ended = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| ended.0.send(world.ledger.end(&hold)));
        let answer = ended.1.recv_timeout(Duration::from_secs(20));
        drop(registration);
        assert!(matches!(answer, Ok(Ok(_))), "{answer:?}");
    });
}
