//! The ledger against a model of it: long random lives of a few guests, checked after each step.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use outram_wire::server::channel::{EventFd, new_waker};
use outram_wire::server::{ClientName, InstanceId, Refusal, SessionSecret, SlabId};
use outram_wire::units::VmId;

use super::*;

const SLAB: u64 = 64 * 1024;
const MEMORY: u64 = 12 * SLAB;
const GUESTS: u128 = 4;
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
        self.ledger.admit(&Caller {
            wish: Wish::Guest {
                vm: VmId(uuid::Uuid::from_u128(vm)),
                arrives: false,
            },
            name: &self.name,
            secret: SessionSecret([secret; 32]),
            socket: &self.socket,
            waker: &self.waker,
        })
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
