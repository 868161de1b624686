//! Sessions of guests: one each, and a second one beside it while a guest is migrated.
//!
//! A session is its client's who shows the same certificate and the same secret. One whose secret
//! is another, but whose certificate is the same, takes the session's place only if nobody is
//! connected to it: then the backend that knew the secret is gone, and its guest with it. Anybody
//! else waits until the lease ends.
//!
//! The destination of a migration says that its guest *arrives*: the source may need its own session
//! until the last moment, and is perhaps only cut off for one. So an arrival takes nobody's place but
//! that of an earlier arrival which failed, and sits beside the source instead. Neither can touch the
//! other's slabs. That a guest is started on two hosts by mistake is still told: only an arrival
//! sits down beside another.
//!
//! Anybody can say a guest's UUID. So a session under another certificate bars nobody if it has neither slabs nor
//! anything set aside, [some time](SETTLING) after it was opened: whoever asks for the guest then ends it, and with
//! it nothing of anybody's.

use std::sync::Arc;
use std::time::Duration;

use outram_wire::server::Refusal;
use outram_wire::server::clock::BootTime;
use outram_wire::units::VmId;

use super::admission::{Caller, Claim};
use super::{Account, Books, Ledger};
use crate::session::{Holder, Seat, Session};

/// How long a session may have nothing and keep others out all the same. A backend greets all of its servers, one
/// after the other, before it has any set something aside; each may take half a minute for that.
pub(super) const SETTLING: Duration = Duration::from_secs(60);

impl Ledger {
    /// Opens the session of a guest, or finds the caller's own.
    pub(super) fn claim_guest(
        &self,
        books: &mut Books,
        caller: &Caller<'_>,
        vm: VmId,
        arrives: bool,
    ) -> Result<Claim, Refusal> {
        let seats = [Seat::First, Seat::Second].map(|seat| Holder::Guest(vm, seat));
        let own = seats.into_iter().find(|seat| {
            let account = books.accounts.get(seat);
            account.is_some_and(|account| account.is_callers(caller))
        });
        if let Some(account) = own.and_then(|own| books.accounts.get_mut(&own)) {
            if account.resuming {
                return Err(Refusal::SessionBusy);
            }
            return Ok(Claim {
                session: account.begin_resumption(),
                resumed: true,
                superseded: Vec::new(),
            });
        }
        let now = BootTime::now();
        let bars = |seat: &&Holder| {
            let account = books.accounts.get(seat);
            account.map(|account| account.bars(caller, now))
        };
        // An arrival takes a seat that nobody sits on, or that of who came last and is gone, or else one whose holder
        // bars nobody.
        let empty = seats.iter().find(|seat| bars(seat).is_none());
        let seat = match empty {
            Some(empty) if arrives => *empty,
            _ => {
                let found = self.free_seat(books, caller, &seats, arrives);
                let other = seats.iter().find(|seat| bars(seat) == Some(false));
                match (found, other) {
                    (Err(_), Some(other)) if arrives => *other,
                    (found, _) => found?,
                }
            }
        };
        let superseded = match arrives {
            true => books.take_sessions(&[seat]),
            false => books.take_sessions(&seats),
        };
        Ok(Claim {
            session: self.open_account(books, caller, seat, None)?,
            resumed: false,
            superseded,
        })
    }

    /// The seat that the caller may take from whoever sat there: the first, if all are to be had for
    /// a guest that starts; the one taken last, if its guest arrives.
    fn free_seat(
        &self,
        books: &Books,
        caller: &Caller<'_>,
        seats: &[Holder; 2],
        arrives: bool,
    ) -> Result<Holder, Refusal> {
        let taken = seats.iter().filter_map(|seat| books.accounts.get(seat));
        let newest = taken.clone().max_by_key(|account| account.opened);
        let asked: Vec<&Account> = match arrives {
            true => newest.into_iter().collect(),
            false => taken.collect(),
        };
        for account in &asked {
            account.check_gone(caller, &self.terms.lease_timeout)?;
        }
        match asked.first() {
            Some(account) if arrives => Ok(account.session.holder),
            _ => Ok(seats[0]),
        }
    }
}

impl Books {
    /// Takes out the accounts of these seats, and cuts their control connections; their sessions.
    fn take_sessions(&mut self, seats: &[Holder]) -> Vec<Arc<Session>> {
        let accounts = seats.iter().filter_map(|seat| self.accounts.remove(seat));
        let sessions = accounts.map(|account| {
            if let Some(control) = &account.control {
                control.cut();
            }
            account.session
        });
        sessions.collect()
    }
}

impl Account {
    fn is_callers(&self, caller: &Caller<'_>) -> bool {
        self.session.name == *caller.name && self.session.secret == caller.secret
    }

    /// Whether the session of somebody else may keep the caller out at all.
    fn bars(&self, caller: &Caller<'_>, now: BootTime) -> bool {
        self.session.name == *caller.name || self.has_anything() || now < self.settled_at
    }

    pub(super) fn has_anything(&self) -> bool {
        self.reserved_bytes > 0 || self.session.slab_count() > 0
    }

    /// Whether the caller, who is another, may take this session's place.
    fn check_gone(&self, caller: &Caller<'_>, lease_timeout: &Duration) -> Result<(), Refusal> {
        let Holder::Guest(vm, _) = self.session.holder else {
            return Ok(());
        };
        // Also one that is just being resumed: that comes to nothing then.
        if !self.bars(caller, BootTime::now()) {
            return Ok(());
        }
        if self.resuming {
            return Err(Refusal::SessionBusy);
        }
        if self.session.name != *caller.name || self.control.is_some() {
            let ends = self.renewed_at.after(*lease_timeout);
            let ends = match self.session.name != *caller.name && !self.has_anything() {
                true => ends.min(self.settled_at),
                false => ends,
            };
            return Err(Refusal::SessionTaken {
                vm,
                ends_in_s: ends.since(BootTime::now()).as_secs() + 1,
            });
        }
        Ok(())
    }
}
