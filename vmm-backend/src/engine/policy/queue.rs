//! Pages in the order in which they arrived, in six bytes each.
//!
//! Each page of the guest that is in memory is in here, and for a large guest that is what most of its
//! helper's own memory is for. So an arrival is kept as its distance from another one, and the queue is made of
//! pieces: to grow, none is copied, and those that are empty go at once. What is wanted no longer is
//! looked for in one piece at a time, so that nobody waits for a look at all of a long queue.

use std::collections::VecDeque;

use super::super::PageIndex;
use super::Returns;

/// Pages in a piece at most: 24 KiB.
const PIECE: usize = 4096;

/// Pages that arrived one after the other.
#[derive(Debug, Default)]
struct Piece {
    /// The first one's arrival.
    first: u32,
    pages: Vec<u32>,
    /// Per page, how many arrivals later than the first it came: numbers of one queue are whole steps apart.
    later: Vec<u16>,
}

impl Piece {
    fn get(&self, place: usize) -> Option<(PageIndex, u32)> {
        let page = *self.pages.get(place)?;
        let later = Returns::STEP * u32::from(self.later[place]);
        Some((PageIndex(page), self.first.wrapping_add(later)))
    }

    /// Adds a page, if there is room for it.
    fn push(&mut self, page: PageIndex, arrival: u32) -> bool {
        let later = u16::try_from(arrival.wrapping_sub(self.first) / Returns::STEP);
        let Ok(later) = later else { return false };
        let has_room = self.pages.len() < PIECE;
        if has_room {
            self.pages.push(page.0);
            self.later.push(later);
        }
        has_room
    }

    /// Whether there is room for all of the next piece.
    fn has_room_for(&self, next: &Self) -> bool {
        let last = next.get(next.pages.len().saturating_sub(1));
        let later = last.map_or(0, |(_, arrival)| {
            arrival.wrapping_sub(self.first) / Returns::STEP
        });
        self.pages.len() + next.pages.len() <= PIECE && later <= u16::MAX.into()
    }

    fn shrink(&mut self) {
        self.pages.shrink_to_fit();
        self.later.shrink_to_fit();
    }
}

/// The queue: first in, first out.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// None of them is empty.
    pieces: VecDeque<Piece>,
    /// Pages of the first piece that have left.
    left: usize,
    length: usize,
    /// The piece that is tidied next.
    untidy: usize,
}

impl Queue {
    /// Pages in it.
    pub(super) fn len(&self) -> usize {
        self.length
    }

    /// The first page, with its arrival.
    pub(super) fn front(&self) -> Option<(PageIndex, u32)> {
        self.pieces.front()?.get(self.left)
    }

    /// Drops the first page.
    pub(super) fn pop_front(&mut self) {
        let Some(piece) = self.pieces.front() else {
            return;
        };
        self.length -= 1;
        self.left += 1;
        if self.left == piece.pages.len() {
            self.pieces.pop_front();
            self.left = 0;
            self.untidy = self.untidy.saturating_sub(1);
        }
    }

    /// Adds a page that arrived after all others. The bits below [`Returns::STEP`] are the
    /// same for all of one queue.
    pub(super) fn push_back(&mut self, page: PageIndex, arrival: u32) {
        self.length += 1;
        if let Some(last) = self.pieces.back_mut() {
            if last.push(page, arrival) {
                return;
            }
            // Others may have arrived elsewhere for so long that it is far from full.
            last.shrink();
        }
        self.pieces.push_back(Piece {
            first: arrival,
            pages: vec![page.0],
            later: vec![0],
        });
    }

    /// Drops what is not wanted of one piece; as many calls as there are pieces go through all.
    pub(super) fn tidy(&mut self, mut is_wanted: impl FnMut(PageIndex, u32) -> bool) {
        let number = std::mem::take(&mut self.untidy) % self.pieces.len().max(1);
        let Some(piece) = self.pieces.get_mut(number) else {
            return;
        };
        let left = match number {
            0 => std::mem::take(&mut self.left),
            _ => 0,
        };
        let piece = std::mem::take(piece);
        let queued = (left..piece.pages.len()).filter_map(|place| piece.get(place));
        let mut kept = Piece {
            first: piece.first,
            ..Piece::default()
        };
        for (page, arrival) in queued.filter(|(page, arrival)| is_wanted(*page, *arrival)) {
            kept.push(page, arrival);
        }
        self.length -= piece.pages.len() - left - kept.pages.len();
        let before = number.checked_sub(1).map(|before| &mut self.pieces[before]);
        match before.filter(|before| before.has_room_for(&kept)) {
            Some(before) => {
                for (page, arrival) in (0..kept.pages.len()).filter_map(|place| kept.get(place)) {
                    before.push(page, arrival);
                }
                self.pieces.remove(number);
            }
            None if kept.pages.is_empty() => {
                self.pieces.remove(number);
            }
            None => {
                kept.shrink();
                self.pieces[number] = kept;
                self.untidy = number + 1;
                return;
            }
        }
        self.untidy = number;
    }

    /// Bytes that it takes.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let of = |piece: &Piece| 4 * piece.pages.capacity() + 2 * piece.later.capacity();
        let pieces = self.pieces.capacity() * size_of::<Piece>();
        pieces + self.pieces.iter().map(of).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        /// As many pages, so far apart.
        Push(usize, u32),
        Pop(usize),
        /// Those whose number has this remainder go.
        Drop(u32),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (1..6000usize, prop_oneof![Just(1), 1..40_000u32])
                .prop_map(|(pages, apart)| Step::Push(pages, apart)),
            3 => (1..8000usize).prop_map(Step::Pop),
            1 => (0..3u32).prop_map(Step::Drop),
        ];
        proptest::collection::vec(step, 1..12)
    }

    proptest! {
        #[test]
        fn pages_leave_as_they_came(steps in steps(), start in any::<u32>()) {
            let (mut queue, mut model) = (Queue::default(), VecDeque::new());
            let mut arrival = start;
            for step in steps {
                match step {
                    Step::Push(pages, apart) => for page in 0..pages as u32 {
                        arrival = arrival.wrapping_add(Returns::STEP * apart);
                        queue.push_back(PageIndex(page), arrival);
                        model.push_back((PageIndex(page), arrival));
                    },
                    Step::Pop(pages) => for _ in 0..pages {
                        prop_assert_eq!(queue.front(), model.pop_front());
                        queue.pop_front();
                    },
                    Step::Drop(remainder) => {
                        // A piece that goes is not counted again.
                        for _ in 0..queue.pieces.len() {
                            queue.tidy(|page, _| page.0 % 3 != remainder);
                        }
                        model.retain(|(page, _)| page.0 % 3 != remainder);
                    }
                }
                prop_assert_eq!(queue.len(), model.len());
                prop_assert_eq!(queue.front(), model.front().copied());
            }
            while let Some(next) = model.pop_front() {
                prop_assert_eq!(queue.front(), Some(next));
                queue.pop_front();
            }
            prop_assert!(queue.pieces.is_empty());
        }
    }
}
