//! How a session passes from one control connection to the next. Whose it is, is told by
//! [`super::guests`] and [`super::disks`].

use std::collections::BTreeSet;
use std::net::TcpStream;
use std::sync::{Arc, Mutex};

use outram_wire::server::channel::EventFd;
use outram_wire::server::clock::BootTime;
use outram_wire::server::{ClientName, DiskId, Opening, Refusal, ServerMessage, SessionSecret};
use outram_wire::units::VmId;

use super::guests::SETTLING;
use super::{Account, Books, Control, DiskAccount, FENCE_TIMEOUT, Hold, Ledger};
use crate::session::{Holder, Session};

/// What a caller asks for.
#[derive(Clone, Debug)]
pub(crate) enum Wish {
    /// The session of a guest's pages.
    Guest {
        vm: VmId,
        /// It comes by migration: it may still run elsewhere.
        arrives: bool,
    },
    /// A disk.
    Disk(DiskId, Opening),
}

/// Who asks to be admitted.
pub(crate) struct Caller<'a> {
    pub(crate) wish: Wish,
    pub(crate) name: &'a ClientName,
    pub(crate) secret: SessionSecret,
    pub(crate) socket: &'a Arc<TcpStream>,
    pub(crate) waker: &'a Arc<EventFd>,
}

/// What a caller comes to.
pub(super) struct Claim {
    pub(super) session: Arc<Session>,
    /// The session was there before.
    pub(super) resumed: bool,
    /// The sessions whose place it takes.
    pub(super) superseded: Vec<Arc<Session>>,
}

impl Ledger {
    /// Admits a control connection: opens the guest's session, or hands it over once every
    /// connection of the former one has ended.
    pub(crate) fn admit(&self, caller: &Caller<'_>) -> Result<Hold, Refusal> {
        let claim = self.claim(caller)?;
        let mut superseded_slabs = None;
        for session in claim.superseded {
            // Its slabs are freed whether or not its threads are done with them by now.
            session.fence(FENCE_TIMEOUT);
            *superseded_slabs.get_or_insert(0) += self.take_back(&session);
        }
        if claim.resumed && !claim.session.fence(FENCE_TIMEOUT) {
            if let Some(account) = self.books().account_with(&claim.session) {
                account.resuming = false;
            }
            return Err(Refusal::SessionBusy);
        }
        let hold = self.hand_over(caller, &claim.session, claim.resumed)?;
        Ok(Hold {
            superseded_slabs,
            ..hold
        })
    }

    fn claim(&self, caller: &Caller<'_>) -> Result<Claim, Refusal> {
        let mut books = self.books();
        if books.closing {
            return Err(Refusal::Closing);
        }
        match &caller.wish {
            Wish::Guest { vm, arrives } => self.claim_guest(&mut books, caller, *vm, *arrives),
            Wish::Disk(disk, opening) => self.claim_disk(&mut books, caller, *disk, opening),
        }
    }

    pub(super) fn open_account(
        &self,
        books: &mut Books,
        caller: &Caller<'_>,
        holder: Holder,
        disk: Option<DiskAccount>,
    ) -> Result<Arc<Session>, Refusal> {
        let disks = holder.is_disk();
        let alike = books.accounts.keys().filter(|own| own.is_disk() == disks);
        if alike.count() >= self.terms.max_sessions {
            return Err(Refusal::TooMany {
                what: if disks { "disks" } else { "guests" }.to_owned(),
                limit: self.terms.max_sessions as u64,
            });
        }
        let next_slab = random_number()? >> 1;
        let session = Session::new(holder, caller.name.clone(), caller.secret);
        let session = Arc::new(session);
        books.opened += 1;
        let account = Account {
            session: session.clone(),
            next_slab,
            opened: books.opened,
            settled_at: BootTime::now().after(SETTLING),
            reserved_bytes: 0,
            renewed_at: BootTime::now(),
            control: None,
            resuming: true,
            vacating: BTreeSet::new(),
            tokens: Vec::new(),
            disk,
        };
        books.accounts.insert(holder, account);
        Ok(session)
    }

    fn hand_over(
        &self,
        caller: &Caller<'_>,
        session: &Arc<Session>,
        resumed: bool,
    ) -> Result<Hold, Refusal> {
        let mut books = self.books();
        let id = books.next_control;
        books.next_control += 1;
        // The lease may have ended while the fence was waited for.
        let account = books.account_with(session).ok_or(Refusal::SessionBusy)?;
        let control = Arc::new(Control {
            id,
            socket: caller.socket.clone(),
            waker: caller.waker.clone(),
            outbox: Mutex::default(),
        });
        account.resuming = false;
        account.renewed_at = BootTime::now();
        account.control = Some(control.clone());
        session.reopen();
        // Who was cut off may never have seen what it was asked for.
        let vacating = account.vacating.iter();
        control.post(vacating.map(|slab| ServerMessage::Vacate { slab: *slab }));
        Ok(Hold {
            session: session.clone(),
            client: caller.name.clone(),
            control,
            resumed,
            superseded_slabs: None,
            reserved_bytes: account.reserved_bytes,
            held: session.slab_ids(),
            disk: account.disk.as_ref().map(DiskAccount::welcome),
        })
    }
}

/// A number that tells nothing. Half of all numbers are far from the largest.
pub(super) fn random_number() -> Result<u64, Refusal> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| Refusal::OutOfMemory {
        reason: error.to_string(),
    })?;
    Ok(u64::from_le_bytes(bytes))
}

impl Books {
    /// The account of exactly this session, not of a later one of the same guest.
    pub(super) fn account_with(&mut self, session: &Arc<Session>) -> Option<&mut Account> {
        let account = self.accounts.get_mut(&session.holder);
        account.filter(|account| Arc::ptr_eq(&account.session, session))
    }
}

impl Account {
    /// Cuts the former control connection and voids the tokens that it was given.
    pub(super) fn begin_resumption(&mut self) -> Arc<Session> {
        self.resuming = true;
        // It has come within its lease, however long its former connections take to end.
        self.renewed_at = BootTime::now();
        self.tokens.clear();
        if let Some(former) = self.control.take() {
            former.cut();
        }
        self.session.clone()
    }
}
