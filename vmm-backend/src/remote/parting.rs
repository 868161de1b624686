//! Slabs that are to be given back over RDMA, and leases that wait for their room.
//!
//! A page that was fetched ahead may have been dropped while it was on its way: its read would end at a key that is
//! not valid any more, and with it every queue pair. So a slab is given back a while after its owner gave it up. The
//! server counts it until then: what is leased in its place is asked for behind it, or it would be refused.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use outram_wire::server::SlabId;

/// Until a slab that is to be given back is.
const PARTING: Duration = Duration::from_secs(1);

/// Those of a control connection.
#[derive(Default)]
pub(super) struct Parting {
    /// Slabs, and since when, first come first.
    slabs: VecDeque<(Instant, SlabId)>,
    /// Leases that are wanted and not asked for yet.
    leases: usize,
}

impl Parting {
    /// Takes in a slab that its owner has given up.
    pub(super) fn add(&mut self, now: Instant, slab: SlabId) {
        self.slabs.push_back((now, slab));
    }

    /// When the next slab is to be given back.
    pub(super) fn next_at(&self) -> Option<Instant> {
        self.slabs.front().map(|(since, _)| *since + PARTING)
    }

    /// A slab that is to be given back by now.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<SlabId> {
        self.next_at().filter(|at| *at <= now)?;
        self.slabs.pop_front().map(|(_, slab)| slab)
    }

    /// Takes in a lease that is wanted.
    pub(super) fn want_lease(&mut self) {
        self.leases += 1;
    }

    /// Leases that are wanted and not asked for yet.
    pub(super) fn leases(&self) -> usize {
        self.leases
    }

    /// How many of those are to be asked for now, and are not among them any more. `taken` slabs are held, or asked
    /// for, beside those here, and `promised` by the server. Once none is here it is the server's to say what there
    /// is.
    pub(super) fn take_leases(&mut self, taken: u64, promised: u64) -> usize {
        let room = promised.saturating_sub(taken + self.slabs.len() as u64);
        let due = match self.slabs.is_empty() {
            true => self.leases,
            false => self.leases.min(usize::try_from(room).unwrap_or(usize::MAX)),
        };
        self.leases -= due;
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_needs_the_room_of_slabs_given_up_is_asked_for_once_and_behind_them() {
        let mut parting = Parting::default();
        let now = Instant::now();
        // Ten are promised, and were held.
        for slab in 0..2 {
            parting.add(now, SlabId(slab));
            parting.want_lease();
        }
        assert_eq!(parting.take_leases(8, 10), 0, "they count still");
        assert_eq!(parting.leases(), 2);
        assert_eq!(parting.take_due(now), None, "reads may be on their way");
        assert_eq!(parting.next_at(), Some(now + PARTING), "not later");
        let then = now + PARTING;
        assert_eq!(parting.take_due(then), Some(SlabId(0)));
        assert_eq!(parting.take_leases(8, 10), 1);
        assert_eq!(parting.take_leases(9, 10), 0, "it is asked for once");
        assert_eq!(parting.take_due(then), Some(SlabId(1)));
        assert_eq!(parting.take_leases(9, 10), 1);
        assert_eq!((parting.leases(), parting.next_at()), (0, None));
    }

    #[test]
    fn what_has_room_beside_slabs_given_up_does_not_wait_for_them() {
        let mut parting = Parting::default();
        parting.add(Instant::now(), SlabId(1));
        parting.want_lease();
        parting.want_lease();
        assert_eq!(parting.take_leases(8, 10), 1);
        assert_eq!(parting.leases(), 1);
    }

    #[test]
    fn where_none_is_given_up_the_server_says_what_there_is() {
        let mut parting = Parting::default();
        parting.want_lease();
        assert_eq!(parting.take_leases(10, 10), 1);
        assert_eq!(parting.leases(), 0);
    }
}
