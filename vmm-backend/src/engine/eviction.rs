//! One run of pages on its way out of the guest's memory, off the fault path.
//!
//! The order is what loses no store (see the kernel facts in the design): write-protect the
//! range; read it into staging; write into the table what each page becomes; punch; wake. The
//! range's protection is **never** lifted here: a reader may have brought a page back
//! write-protected meanwhile, and lifting would lose its next store.
//!
//! Invariant 1 (a page's last copy is not dropped before another is safe) is this file's: nothing
//! is punched whose bytes are not in staging, in its unchanged slot on a safe server, or in a word.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::compressed::Press;
use super::staging::{Spare, Ticket};
use super::table::{Entry, State};
use super::tag::{Tag, fill_word};
use super::{PageIndex, PageRun, Shared};
use crate::crash_points::{self, Point};

/// Bytes a run has at most, but at least a page: range operations cost per page little more beyond
/// 64 base pages, and a huge page is a range by itself.
pub const RUN_BYTES: u64 = 256 << 10;

/// What an evictor needs of the world.
pub trait EvictionPorts {
    /// Write-protects the pages. Retries by itself while the VMM is changing its mappings.
    fn protect(&mut self, run: PageRun) -> Result<(), EvictionError>;
    /// Reads the run's pages into the staging slots of `tickets`, in order. Holes read as zero.
    fn read(&mut self, run: PageRun, tickets: &[Ticket]) -> Result<(), EvictionError>;
    /// The bytes of a staging slot.
    fn staged(&self, ticket: Ticket) -> &[u8];
    /// Has them changed in place.
    fn change_staged(&mut self, ticket: Ticket, change: &mut dyn FnMut(&mut [u8]));
    /// Punches the pages out of the guest's memory.
    fn punch(&mut self, run: PageRun) -> Result<(), EvictionError>;
    /// Whether the guest's memory has a page there, as the kernel says.
    fn is_present(&mut self, page: PageIndex) -> bool;
    /// Wakes all that wait in the range.
    fn wake(&mut self, run: PageRun);
}

/// Why a run could not be evicted; its pages stay where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvictionError {
    /// The VMM or the mapping is gone.
    #[error("the VMM or its mapping is gone")]
    Gone,
    /// The kernel refused for a reason that may pass.
    #[error("the kernel refused")]
    Refused,
}

/// What became of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Still in the guest's memory.
    Stays,
    /// Unchanged since it was fetched: dropped.
    Clean,
    /// Kept as a word.
    Filled,
    /// In staging.
    Staged(Ticket),
}

impl Fate {
    /// The state of a page that is no longer in the guest's memory.
    fn state(self) -> Option<State> {
        match self {
            Fate::Stays => None,
            Fate::Clean => Some(State::Stored),
            Fate::Filled => Some(State::Filled),
            Fate::Staged(_) => Some(State::Staged),
        }
    }
}

/// A run handed to an evictor.
#[derive(Debug)]
pub struct Run {
    /// Its pages; all of them `Busy` until the run is handed back.
    pub pages: PageRun,
    tickets: Vec<Ticket>,
    /// What became of each page, once the run has ended.
    pub fates: Vec<Fate>,
    step: Step,
    signals: Signals,
}

/// What a run and the owner of its pages tell each other.
#[derive(Clone, Debug, Default)]
pub(super) struct Signals(Arc<Flags>);

#[derive(Debug, Default)]
struct Flags {
    punches: AtomicBool,
    in_doubt: AtomicBool,
}

impl Signals {
    fn begin_to_punch(&self) {
        self.0.punches.store(true, Ordering::SeqCst);
    }

    /// Whether any hole among the run's pages may be of its making.
    pub(super) fn punches(&self) -> bool {
        self.0.punches.load(Ordering::SeqCst)
    }

    /// The VMM's mapping of some of its pages is another, which nothing is protected in: unless it punches
    /// already, they stay.
    pub(super) fn doubt(&self) {
        self.0.in_doubt.store(true, Ordering::SeqCst);
    }

    fn is_in_doubt(&self) -> bool {
        self.0.in_doubt.load(Ordering::SeqCst)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Protect,
    Read,
    Mark,
    Punch,
    Wake,
    Ended,
}

impl Run {
    /// A run of `pages`, with a staging slot for each.
    pub fn new(pages: PageRun, tickets: Vec<Ticket>) -> Self {
        assert_eq!(
            tickets.len(),
            pages.count as usize,
            "a staging slot for each page"
        );
        let fates = vec![Fate::Stays; tickets.len()];
        Self {
            pages,
            tickets,
            fates,
            step: Step::Protect,
            signals: Signals::default(),
        }
    }

    /// What the owner of its pages keeps while it is out.
    pub(super) fn signals(&self) -> Signals {
        self.signals.clone()
    }

    /// Whether the run has ended, and is to be handed back.
    pub fn has_ended(&self) -> bool {
        self.step == Step::Ended
    }

    /// Takes the run one step further. On an error the pages stay, and the run ends.
    pub fn advance(
        &mut self,
        shared: &Shared,
        ports: &mut impl EvictionPorts,
    ) -> Result<(), EvictionError> {
        let done = match self.step {
            Step::Protect | Step::Read | Step::Mark | Step::Punch if self.signals.is_in_doubt() => {
                Err(EvictionError::Gone)
            }
            Step::Protect => ports.protect(self.pages).map(|()| Step::Read),
            Step::Read => {
                crash_points::pass(Point::EvictProtected);
                ports.read(self.pages, &self.tickets).map(|()| Step::Mark)
            }
            Step::Mark => {
                crash_points::pass(Point::EvictStaged);
                self.mark(shared, ports);
                Ok(Step::Punch)
            }
            Step::Punch => {
                crash_points::pass(Point::EvictDecided);
                self.signals.begin_to_punch();
                ports.punch(self.pages).map(|()| Step::Wake)
            }
            Step::Wake => {
                crash_points::pass(Point::EvictPunched);
                ports.wake(self.pages);
                self.give_back_unused(shared);
                Ok(Step::Ended)
            }
            Step::Ended => Ok(Step::Ended),
        };
        match done {
            Ok(next) => {
                self.step = next;
                Ok(())
            }
            Err(error) => {
                self.abandon(shared, ports);
                Err(error)
            }
        }
    }

    /// Decides each page's fate and writes it into the table, before anything is punched.
    fn mark(&mut self, shared: &Shared, ports: &mut impl EvictionPorts) {
        let mut tools = Tools::default();
        for (number, page) in self.pages.pages().enumerate() {
            let ticket = self.tickets[number];
            let (fate, next) = decide(shared, page, ticket, ports, &mut tools);
            shared.table.store(
                page,
                &Entry {
                    state: State::Busy,
                    becomes: fate.state(),
                    ..next
                },
            );
            self.fates[number] = fate;
            if number == 0 {
                crash_points::pass(Point::EvictHalfDecided);
            }
        }
    }

    /// Ends the run early: what is still in the guest's memory stays, what a failed punch took
    /// out went where the table says.
    fn abandon(&mut self, shared: &Shared, ports: &mut impl EvictionPorts) {
        for (page, fate) in self.pages.pages().zip(&mut self.fates) {
            if self.step == Step::Punch && !ports.is_present(page) {
                continue;
            }
            *fate = Fate::Stays;
            // Its place in staging is about to be another's: were the page discarded now and this
            // process to die, nobody should look for its bytes there.
            let entry = shared.table.load(page);
            let undecided = Entry {
                becomes: None,
                staging: None,
                ..entry
            };
            shared.table.store(page, &undecided);
        }
        // Waiters retry, find their page protected, and are opened one by one.
        ports.wake(self.pages);
        self.give_back_unused(shared);
        self.step = Step::Ended;
    }

    fn give_back_unused(&mut self, shared: &Shared) {
        let fates = self.pages.pages().zip(&self.fates);
        for (ticket, (page, fate)) in self.tickets.drain(..).zip(fates) {
            match fate {
                Fate::Staged(_) => {}
                // What was read to see whether it is unchanged.
                Fate::Clean => shared.staging.keep_spare(Spare {
                    slot: ticket.slot,
                    page,
                    generation: shared.table.load(page).generation,
                    is_sealed: false,
                }),
                Fate::Stays | Fate::Filled => shared.staging.release(ticket.slot),
            }
        }
    }
}

/// What a run's pages are looked at with.
#[derive(Default)]
struct Tools {
    /// For making tags in.
    room: Vec<u8>,
    press: Option<Press>,
}

/// What a page becomes whose bytes were read into staging; there they are sealed, if that is where they
/// stay. The entry's slot is named in the result only if it stays its.
fn decide(
    shared: &Shared,
    page: PageIndex,
    ticket: Ticket,
    ports: &mut impl EvictionPorts,
    tools: &mut Tools,
) -> (Fate, Entry) {
    let entry = shared.table.load(page);
    let bytes = ports.staged(ticket);
    if let Some(word) = fill_word(bytes) {
        // The slot, if any, stays in the entry until the owner frees it.
        return (
            Fate::Filled,
            Entry {
                slot: entry.slot,
                ..entry.into_filled(word)
            },
        );
    }
    if let Some(slot) = entry.slot.filter(|_| !entry.dirty) {
        let room = &mut tools.room;
        let unchanged =
            entry.protected || shared.key.tag(page, entry.generation, bytes, room) == entry.tag;
        if unchanged && shared.slots.is_safe(slot) {
            shared.keep_compressed(page, entry.generation, bytes, &mut tools.press);
            return (
                Fate::Clean,
                Entry {
                    protected: false,
                    ..entry
                },
            );
        }
    }
    let generation = entry.generation.next();
    shared.keep_compressed(page, generation, bytes, &mut tools.press);
    let mut tag = Tag::default();
    ports.change_staged(ticket, &mut |bytes| {
        tag = shared.key.seal(page, generation, bytes);
    });
    let next = Entry {
        dirty: true,
        protected: false,
        staging: Some(ticket.slot),
        generation,
        tag,
        ..entry
    };
    (Fate::Staged(ticket), next)
}
