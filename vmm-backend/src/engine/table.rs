//! The page table: 32 bytes a page, in memory that outlives the process (a file on our tmpfs).
//!
//! Layout of an entry, four little words (format version 2, see `TABLE_VERSION`):
//!
//! | word | bits | meaning |
//! |---|---|---|
//! | 0 | 0–3 | state; of a busy page also what it becomes, once that is decided |
//! | 0 | 4 | dirty: no lower copy is good; of an absent page: it may still be a memory error |
//! | 0 | 5 | write-protected when installed, and not written since |
//! | 0 | 6 | a slot is held |
//! | 0 | 7 | a staging slot is held |
//! | 0 | 8–31 | staging slot |
//! | 0 | 32–63 | generation, low 32 bits |
//! | 1 | 0–23 | slot: group |
//! | 1 | 24–47 | slot: index |
//! | 1 | 48–63 | generation, high 16 bits |
//! | 2–3 | | tag; in state `Filled`, word 2 is the page's fill word |
//!
//! Once the fate of a `Busy` page is decided, its entry says all of what it becomes when its bytes are
//! punched out of the memfd: the memfd decides (present: resident, dirty; hole: as written).
//!
//! An entry that is half-written when the process dies says the former state or the new one (see
//! [`PageTable::store`]). What the former relies on must not be given to others before the new one is
//! written.
//!
//! A guest may have far more memory than it ever touches, and its table is as sparse: merely to look at
//! an entry would make memory for it. So the table knows, beside its file, which stretches of entries were
//! ever stored to, and looks at no others.

use std::sync::atomic::{AtomicU64, Ordering};

use super::slots::MOST_GROUPS;
use super::tag::Tag;
use super::{Generation, PageIndex, PageRun, SlotId, StagingSlot};
use crate::crash_points::{self, Point};

/// Version of the table's format.
pub const TABLE_VERSION: u32 = 2;

/// Words of an entry.
pub const ENTRY_WORDS: usize = 4;

/// Entries that are known together as touched or not: as many as lie in 4 KiB, the least that the file
/// grows by.
pub const STRETCH: u32 = (4096 / (ENTRY_WORDS * size_of::<u64>())) as u32;

const DIRTY: u64 = 1 << 4;
const PROTECTED: u64 = 1 << 5;
const HAS_SLOT: u64 = 1 << 6;
const HAS_STAGING: u64 = 1 << 7;
const LOW_24: u64 = (1 << 24) - 1;
const _: () = assert!(MOST_GROUPS as u64 == LOW_24 + 1);

/// States in the table of a busy page whose fate is decided.
const BUSY_TO_STAGED: u64 = 7;
const BUSY_TO_STORED: u64 = 8;
const BUSY_TO_FILLED: u64 = 9;

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum State {
    /// Never touched, or given back: reads as zero.
    Absent = 0,
    /// In the memfd.
    Resident = 1,
    /// In a run being evicted.
    Busy = 2,
    /// In the staging area.
    Staged = 3,
    /// On the memory servers.
    Stored = 4,
    /// Kept as one word.
    Filled = 5,
    /// Every copy is gone.
    Lost = 6,
}

impl State {
    /// Number of states.
    pub const COUNT: usize = 7;

    fn decode(bits: u64) -> Self {
        match bits & 0xf {
            0 => State::Absent,
            1 => State::Resident,
            2 => State::Busy,
            3 => State::Staged,
            4 => State::Stored,
            5 => State::Filled,
            BUSY_TO_STAGED | BUSY_TO_STORED | BUSY_TO_FILLED => State::Busy,
            // An unknown state must never be taken for one whose bytes are known.
            _ => State::Lost,
        }
    }
}

/// All that is known of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where it is.
    pub state: State,
    /// Busy, and this is what it becomes once its bytes are out of the memfd: `Staged`, `Stored` or
    /// `Filled`. In other states it means nothing and is not kept.
    pub becomes: Option<State>,
    /// Resident, and no lower copy is good; or absent, given back after it was lost, and maybe still the
    /// memory error that it was made then.
    pub dirty: bool,
    /// Resident, installed write-protected, and not known to have been written.
    pub protected: bool,
    /// Its copy on the memory servers, if one is held.
    pub slot: Option<SlotId>,
    /// Its copy in staging, if one is held.
    pub staging: Option<StagingSlot>,
    /// How often it was staged.
    pub generation: Generation,
    /// Tag of its lower copy; of `Filled`, the word in the first eight bytes.
    pub tag: Tag,
}

impl Entry {
    /// A page never touched.
    pub const ABSENT: Self = Self {
        state: State::Absent,
        becomes: None,
        dirty: false,
        protected: false,
        slot: None,
        staging: None,
        generation: Generation(0),
        tag: Tag([0; 16]),
    };

    /// The same page in the memfd with no lower copy; its generation goes on.
    pub fn into_dirty_resident(self) -> Self {
        Self {
            state: State::Resident,
            dirty: true,
            generation: self.generation,
            ..Self::ABSENT
        }
    }

    /// The same page given back after it was lost, and not made zero yet.
    pub fn into_unhealed(self) -> Self {
        Self {
            dirty: true,
            ..self.into_absent()
        }
    }

    /// Whether it was given back after it was lost, and not made zero yet.
    pub fn is_unhealed(&self) -> bool {
        self.state == State::Absent && self.dirty
    }

    /// The same page with nothing anywhere; its generation goes on.
    pub fn into_absent(self) -> Self {
        Self {
            generation: self.generation,
            ..Self::ABSENT
        }
    }

    /// The same page kept as `word`.
    pub fn into_filled(self, word: u64) -> Self {
        let mut tag = Tag::default();
        tag.0[..8].copy_from_slice(&word.to_le_bytes());
        Self {
            state: State::Filled,
            generation: self.generation,
            tag,
            ..Self::ABSENT
        }
    }

    /// The word of a `Filled` page.
    pub fn fill_word(&self) -> u64 {
        let mut word = [0; 8];
        word.copy_from_slice(&self.tag.0[..8]);
        u64::from_le_bytes(word)
    }

    fn encode(&self) -> [u64; ENTRY_WORDS] {
        let state = match (self.state, self.becomes) {
            (State::Busy, Some(State::Staged)) => BUSY_TO_STAGED,
            (State::Busy, Some(State::Stored)) => BUSY_TO_STORED,
            (State::Busy, Some(State::Filled)) => BUSY_TO_FILLED,
            (state, _) => state as u64,
        };
        let mut low = state | (self.generation.0 << 32);
        let mut high = self.generation.0 >> 32 << 48;
        low |= if self.dirty { DIRTY } else { 0 };
        low |= if self.protected { PROTECTED } else { 0 };
        if let Some(staging) = self.staging {
            low |= HAS_STAGING | (u64::from(staging.0) & LOW_24) << 8;
        }
        if let Some(slot) = self.slot {
            low |= HAS_SLOT;
            high |= (u64::from(slot.group) & LOW_24) | (u64::from(slot.index) & LOW_24) << 24;
        }
        let mut halves = [[0; 8]; 2];
        halves[0].copy_from_slice(&self.tag.0[..8]);
        halves[1].copy_from_slice(&self.tag.0[8..]);
        [
            low,
            high,
            u64::from_le_bytes(halves[0]),
            u64::from_le_bytes(halves[1]),
        ]
    }

    fn decode(words: [u64; ENTRY_WORDS]) -> Self {
        let [low, high, tag_low, tag_high] = words;
        let mut tag = [0; 16];
        tag[..8].copy_from_slice(&tag_low.to_le_bytes());
        tag[8..].copy_from_slice(&tag_high.to_le_bytes());
        Self {
            state: State::decode(low),
            becomes: match low & 0xf {
                BUSY_TO_STAGED => Some(State::Staged),
                BUSY_TO_STORED => Some(State::Stored),
                BUSY_TO_FILLED => Some(State::Filled),
                _ => None,
            },
            dirty: low & DIRTY != 0,
            protected: low & PROTECTED != 0,
            slot: (low & HAS_SLOT != 0).then_some(SlotId {
                group: (high & LOW_24) as u32,
                index: (high >> 24 & LOW_24) as u32,
            }),
            staging: (low & HAS_STAGING != 0).then_some(StagingSlot((low >> 8 & LOW_24) as u32)),
            generation: Generation(low >> 32 | high >> 48 << 32),
            tag: Tag(tag),
        }
    }
}

/// Memory that a table lies in: [`ENTRY_WORDS`] words a page.
pub trait Words: Send + Sync {
    /// The words.
    fn words(&self) -> &[AtomicU64];
}

impl Words for Vec<AtomicU64> {
    fn words(&self) -> &[AtomicU64] {
        self
    }
}

/// The entries of all pages. Shared between threads; each entry has one writer at a time.
pub struct PageTable {
    words: Box<dyn Words>,
    /// A bit for each stretch: whether any of its entries was ever stored.
    touched: Box<[AtomicU64]>,
    /// Entries that were asked for.
    #[cfg(test)]
    asked: AtomicU64,
}

impl PageTable {
    /// A table in `words`, of which those of the entries of `touched` may be anything; all others are
    /// zeros.
    pub fn new(words: Box<dyn Words>, touched: &[PageRun]) -> Self {
        let stretches = (words.words().len() / ENTRY_WORDS).div_ceil(STRETCH as usize);
        let table = Self {
            words,
            touched: (0..stretches.div_ceil(64)).map(|_| 0.into()).collect(),
            #[cfg(test)]
            asked: AtomicU64::new(0),
        };
        for run in touched.iter().filter(|run| run.count > 0) {
            let last = run.end().0 - 1;
            (run.first.0 / STRETCH..=last / STRETCH).for_each(|stretch| table.touch(stretch));
        }
        table
    }

    /// A table of absent pages in ordinary memory, for tests and simulation.
    pub fn in_memory(pages: u32) -> Self {
        let words = (0..pages as usize * ENTRY_WORDS).map(|_| AtomicU64::new(0));
        Self::new(Box::new(words.collect::<Vec<_>>()), &[])
    }

    fn entry(&self, page: PageIndex) -> &[AtomicU64] {
        let start = page.0 as usize * ENTRY_WORDS;
        &self.words.words()[start..start + ENTRY_WORDS]
    }

    /// Pages in the table.
    pub fn pages(&self) -> u32 {
        (self.words.words().len() / ENTRY_WORDS) as u32
    }

    /// The bits of a stretch and of those after it that share a word, its own the lowest.
    fn touched_from(&self, stretch: u32) -> u64 {
        self.touched[(stretch / 64) as usize].load(Ordering::Acquire) >> (stretch % 64)
    }

    fn touch(&self, stretch: u32) {
        // Nearly always it is noted already.
        if self.touched_from(stretch) & 1 == 0 {
            self.touched[(stretch / 64) as usize].fetch_or(1 << (stretch % 64), Ordering::Release);
        }
    }

    /// Whether the page's entry may say anything else than that it was never touched.
    pub fn is_touched(&self, page: PageIndex) -> bool {
        self.touched_from(page.0 / STRETCH) & 1 != 0
    }

    /// The parts of a run whose pages were ever touched, with some of their neighbours, in order.
    pub fn touched_in(&self, run: PageRun) -> impl Iterator<Item = PageRun> {
        let end = run.end().0;
        let mut next = run.first.0;
        std::iter::from_fn(move || {
            let part = self.next_touched(next, end)?;
            next = part.end().0;
            Some(part)
        })
    }

    /// The first part, of one stretch, of the pages from `next` to `end`.
    fn next_touched(&self, next: u32, end: u32) -> Option<PageRun> {
        let mut stretch = next / STRETCH;
        while stretch < end.div_ceil(STRETCH) {
            let bits = self.touched_from(stretch);
            if bits & 1 == 0 {
                let left_of_word = 64 - stretch % 64;
                stretch += bits.trailing_zeros().min(left_of_word);
                continue;
            }
            let first = next.max(stretch * STRETCH);
            let last = end.min((stretch + 1).saturating_mul(STRETCH));
            return (first < last).then_some(PageRun {
                first: PageIndex(first),
                count: last - first,
            });
        }
        None
    }

    /// Entries that were asked for since this was last called.
    #[cfg(test)]
    pub(super) fn take_asked(&self) -> u64 {
        self.asked.swap(0, Ordering::Relaxed)
    }

    fn note_asked(&self) {
        #[cfg(test)]
        self.asked.fetch_add(1, Ordering::Relaxed);
    }

    /// The page's state alone.
    pub fn state(&self, page: PageIndex) -> State {
        self.note_asked();
        match self.is_touched(page) {
            true => State::decode(self.entry(page)[0].load(Ordering::Acquire)),
            false => State::Absent,
        }
    }

    /// The page's entry.
    pub fn load(&self, page: PageIndex) -> Entry {
        self.note_asked();
        if !self.is_touched(page) {
            return Entry::ABSENT;
        }
        let entry = self.entry(page);
        let low = entry[0].load(Ordering::Acquire);
        Entry::decode([
            low,
            entry[1].load(Ordering::Relaxed),
            entry[2].load(Ordering::Relaxed),
            entry[3].load(Ordering::Relaxed),
        ])
    }

    /// Replaces the page's entry. Whoever finds it half-written finds the former entry, or a new one
    /// that does not need what is missing: what the new state relies on is written before the word
    /// with the state, what only the former state relied on after it.
    pub fn store(&self, page: PageIndex, entry: &Entry) {
        self.touch(page.0 / STRETCH);
        for (step, (word, value)) in self.steps(page, entry).into_iter().enumerate() {
            if step == ENTRY_WORDS / 2 {
                crash_points::pass(Point::EntryHalfWritten);
            }
            self.entry(page)[word].store(value, Ordering::Release);
        }
    }

    /// The words of an entry in the order in which they replace the former one's.
    fn steps(&self, page: PageIndex, entry: &Entry) -> [(usize, u64); ENTRY_WORDS] {
        let words = entry.encode();
        let rises = self.entry(page)[1].load(Ordering::Relaxed) >> 48 != words[1] >> 48;
        let needs_place = entry.slot.is_some() || rises;
        let needs_tag = entry.slot.is_some()
            || entry.staging.is_some()
            || entry.state == State::Filled
            || entry.becomes.is_some();
        let order: [usize; ENTRY_WORDS] = match (needs_place, needs_tag) {
            (true, true) => [3, 2, 1, 0],
            (true, false) => [1, 0, 3, 2],
            (false, true) => [3, 2, 0, 1],
            (false, false) => [0, 1, 2, 3],
        };
        order.map(|word| (word, words[word]))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(first: u32, count: u32) -> PageRun {
        PageRun {
            first: PageIndex(first),
            count,
        }
    }

    fn entries() -> impl Strategy<Value = Entry> {
        let slot = proptest::option::of((0..1u32 << 24, 0..1u32 << 24));
        let staging = proptest::option::of(0..1u32 << 24);
        (
            0..10u64,
            any::<[bool; 2]>(),
            slot,
            staging,
            0..=Generation::MAX,
            any::<[u8; 16]>(),
        )
            .prop_map(|(state, flags, slot, staging, generation, tag)| Entry {
                state: State::decode(state),
                becomes: Entry::decode([state, 0, 0, 0]).becomes,
                dirty: flags[0],
                protected: flags[1],
                slot: slot.map(|(group, index)| SlotId { group, index }),
                staging: staging.map(StagingSlot),
                generation: Generation(generation),
                tag: Tag(tag),
            })
    }

    proptest! {
        #[test]
        fn an_entry_comes_back_as_it_was_stored(entry in entries(), page in 0..4u32) {
            let table = PageTable::in_memory(4);
            table.store(PageIndex(page), &entry);
            prop_assert_eq!(table.load(PageIndex(page)), entry);
            for other in (0..4).filter(|other| *other != page) {
                prop_assert_eq!(table.load(PageIndex(other)), Entry::ABSENT);
            }
        }
    }

    #[test]
    fn an_entry_has_these_words() {
        let entry = Entry {
            state: State::Staged,
            becomes: None,
            dirty: true,
            protected: false,
            slot: Some(SlotId {
                group: 0x010203,
                index: 0x040506,
            }),
            staging: Some(StagingSlot(0x0a0b0c)),
            generation: Generation(0x1122_3344_5566),
            tag: Tag([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]),
        };
        assert_eq!(
            entry.encode(),
            [
                0x3344_5566_0a0b_0cd3,
                0x1122_0405_0601_0203,
                0x0807_0605_0403_0201,
                0x100f_0e0d_0c0b_0a09
            ]
        );
    }

    /// What recovery makes of an entry whose page is a hole.
    fn meaning(entry: &Entry) -> (State, Option<SlotId>, Option<StagingSlot>, Option<Tag>) {
        let state = match entry.state {
            State::Busy => entry.becomes.unwrap_or(State::Absent),
            state => state,
        };
        let relies = matches!(state, State::Staged | State::Stored | State::Filled);
        (
            state,
            entry.slot.filter(|_| state == State::Stored),
            entry.staging.filter(|_| state == State::Staged),
            relies.then_some(entry.tag),
        )
    }

    #[test]
    fn a_half_written_entry_means_the_former_or_the_new() {
        let slot = |number| SlotId {
            group: number,
            index: 77,
        };
        let staged = Entry {
            state: State::Staged,
            dirty: true,
            staging: Some(StagingSlot(5)),
            generation: Generation(9),
            tag: Tag([7; 16]),
            ..Entry::ABSENT
        };
        let stored = Entry {
            state: State::Stored,
            dirty: false,
            staging: None,
            slot: Some(slot(3)),
            ..staged
        };
        let busy = |becomes, of: Entry| Entry {
            state: State::Busy,
            becomes: Some(becomes),
            slot: Some(slot(8)),
            ..of
        };
        let filled = staged.into_filled(0x1234);
        let lost = Entry {
            state: State::Lost,
            slot: None,
            ..stored
        };
        // All changes of a page that stays a hole.
        for (former, new) in [
            (busy(State::Staged, staged), staged),
            (
                busy(State::Stored, stored),
                Entry {
                    slot: Some(slot(8)),
                    ..stored
                },
            ),
            (busy(State::Filled, filled), filled),
            (staged, stored),
            (stored, staged),
            (staged, staged.into_absent()),
            (stored, stored.into_absent()),
            (filled, filled.into_absent()),
            (stored, lost),
        ] {
            for written in 0..=ENTRY_WORDS {
                let table = PageTable::in_memory(1);
                table.store(PageIndex(0), &former);
                let steps = table.steps(PageIndex(0), &new);
                for (word, value) in &steps[..written] {
                    table.entry(PageIndex(0))[*word].store(*value, Ordering::Release);
                }
                let found = table.load(PageIndex(0));
                let known = [meaning(&former), meaning(&new)];
                assert!(
                    known.contains(&meaning(&found)),
                    "{written} words of {former:?} to {new:?}: {found:?}"
                );
                assert_eq!(found.generation, Generation(9));
            }
        }
    }

    #[test]
    fn touched_stretches_are_found_and_no_others() {
        let (first, count) = (PageIndex(100), 200 * STRETCH);
        let table = PageTable::new(
            PageTable::in_memory(first.0 + count).words,
            &[PageRun { first, count: 1 }, run(130 * STRETCH - 1, 2)],
        );
        let entry = Entry::ABSENT.into_dirty_resident();
        table.store(PageIndex(65 * STRETCH + 7), &entry);
        let all: Vec<_> = table.touched_in(run(0, first.0 + count)).collect();
        let stretch = |number: u32| run(number * STRETCH, STRETCH);
        assert_eq!(all, [0, 65, 129, 130].map(stretch));
        let some = table.touched_in(run(5, 65 * STRETCH + 7 - 5));
        assert_eq!(
            some.collect::<Vec<_>>(),
            [run(5, STRETCH - 5), run(65 * STRETCH, 7)]
        );
        assert_eq!(table.touched_in(run(STRETCH, 64 * STRETCH)).count(), 0);
        assert_eq!(table.touched_in(run(150 * STRETCH, 9)).count(), 0);
        assert_eq!(table.load(PageIndex(65 * STRETCH + 7)), entry);
    }

    /// What was never touched is not looked at, whatever lies there.
    #[test]
    fn entries_that_were_never_touched_are_not_looked_at() {
        let words = (0..2 * STRETCH as usize * ENTRY_WORDS).map(|_| AtomicU64::new(4));
        let touched = PageRun::single(PageIndex(STRETCH));
        let table = PageTable::new(Box::new(words.collect::<Vec<_>>()), &[touched]);
        assert_eq!(table.state(PageIndex(STRETCH - 1)), State::Absent);
        assert_eq!(table.load(PageIndex(0)), Entry::ABSENT);
        assert_eq!(table.state(PageIndex(2 * STRETCH - 1)), State::Stored);
    }

    #[test]
    fn an_unknown_state_is_lost() {
        assert_eq!(Entry::decode([15, 0, 0, 0]).state, State::Lost);
    }
}
