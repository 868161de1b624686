//! Who has what: sessions, reservations, leases and tokens, under one lock.
//!
//! Requests on control connections are rare, so one lock is enough; data connections never take it.
//! It is not held across I/O, nor while memory is given back to the system.

use std::collections::{BTreeSet, BinaryHeap, HashMap};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use outram_wire::server::channel::EventFd;
use outram_wire::server::clock::BootTime;
use outram_wire::server::control::MAX_SLABS;
use outram_wire::server::{
    ClientName, ClientStats, DiskStats, DiskWelcome, InstanceId, Refusal, ServerMessage,
    ServerStats, SlabId, Token,
};

use crate::freeing::Freeing;
use crate::session::{Holder, Session};
use crate::slab::{Counts, Slab};
use crate::spare::Spare;

mod admission;
mod disks;
mod guests;
#[cfg(test)]
mod model_tests;

pub(crate) use admission::{Caller, Wish};
use disks::DiskAccount;

/// How long the threads of a fenced session get to finish what they are at: copying a few MiB.
const FENCE_TIMEOUT: Duration = Duration::from_secs(4);

/// How long a lease waits for memory that is being given back: shorter than any client waits for its answer.
const FREED_WITHIN: Duration = Duration::from_secs(2);

/// What the ledger may give.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    pub(crate) slab_bytes: u64,
    pub(crate) lease_timeout: Duration,
    pub(crate) max_sessions: usize,
    /// Data connections and queue pairs that a session may have at most, and tokens that are not used yet.
    pub(crate) max_data_connections: usize,
    /// What is set aside for the clients of one certificate at most, if that is bounded.
    pub(crate) client_bytes: Option<u64>,
    /// A token not used for so long is void.
    pub(crate) token_life: Duration,
    /// A disk that nobody used for so long is dropped; kept without limit if none is set.
    pub(crate) parked_disk_timeout: Option<Duration>,
}

/// All accounts of a server.
pub(crate) struct Ledger {
    pub(crate) instance: InstanceId,
    pub(crate) terms: Terms,
    lent_bytes: Arc<AtomicU64>,
    /// Its lock is taken under that of the books.
    pub(crate) spare: Spare,
    freeing: Arc<Freeing>,
    books: Mutex<Books>,
}

struct Books {
    memory_bytes: u64,
    next_control: u64,
    /// Accounts opened so far.
    opened: u64,
    closing: bool,
    accounts: HashMap<Holder, Account>,
}

struct Account {
    session: Arc<Session>,
    /// Counts on from a random start: ids of another session or another instance mean nothing here,
    /// and nobody learns from its own how many slabs others lease.
    next_slab: u64,
    /// Which of all accounts ever opened it is.
    opened: u64,
    /// Until then it keeps others out though it has nothing.
    settled_at: BootTime,
    reserved_bytes: u64,
    renewed_at: BootTime,
    control: Option<Arc<Control>>,
    /// A new control connection waits for the fence.
    resuming: bool,
    /// Slabs asked back and not yet given.
    vacating: BTreeSet<SlabId>,
    tokens: Vec<(Token, BootTime)>,
    /// What a disk's account has beyond a guest's.
    disk: Option<DiskAccount>,
}

/// A control connection as others reach it: to be sent messages, or to be ended.
pub(crate) struct Control {
    id: u64,
    socket: Arc<TcpStream>,
    waker: Arc<EventFd>,
    outbox: Mutex<Vec<ServerMessage>>,
}

impl Control {
    /// Leaves messages for the connection's own thread to send.
    fn post(&self, messages: impl IntoIterator<Item = ServerMessage>) {
        self.lock_outbox().extend(messages);
        // A counter at its top means that the thread has wake-ups enough.
        let _ = self.waker.write(1);
    }

    /// What is to be sent.
    pub(crate) fn take_outbox(&self) -> Vec<ServerMessage> {
        std::mem::take(&mut self.lock_outbox())
    }

    fn lock_outbox(&self) -> MutexGuard<'_, Vec<ServerMessage>> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cut(&self) {
        // It may have ended by itself; its thread notices either way.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

/// An admitted control connection's hold on its account.
pub(crate) struct Hold {
    pub(crate) session: Arc<Session>,
    /// The certificate of whoever holds it.
    pub(crate) client: ClientName,
    pub(crate) control: Arc<Control>,
    pub(crate) resumed: bool,
    /// Slabs of a session that this one took the place of.
    pub(crate) superseded_slabs: Option<u64>,
    pub(crate) reserved_bytes: u64,
    pub(crate) held: Vec<SlabId>,
    pub(crate) disk: Option<DiskWelcome>,
}

/// What a token was for.
pub(crate) struct Redeemed {
    pub(crate) session: Arc<Session>,
    /// The certificate of whoever holds it.
    pub(crate) client: ClientName,
    /// The session's epoch: a client that takes it over from then on ends that.
    pub(crate) epoch: u64,
}

/// How a session came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) slabs: u64,
    /// Whether its threads were done with the slabs at once.
    pub(crate) at_once: bool,
}

impl Ledger {
    pub(crate) fn new(instance: InstanceId, memory_bytes: u64, terms: Terms) -> Self {
        Self {
            instance,
            terms,
            lent_bytes: Arc::default(),
            spare: Spare::default(),
            freeing: Arc::default(),
            books: Mutex::new(Books {
                memory_bytes,
                next_control: 1,
                opened: 0,
                closing: false,
                accounts: HashMap::new(),
            }),
        }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        // A change under the lock either completes or panics before it begins.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets a control connection that has ended; the session goes on until its lease ends.
    pub(crate) fn leave(&self, hold: &Hold) {
        let mut books = self.books();
        if let Ok(account) = account_of(&mut books, hold) {
            account.control = None;
            if account.disk.is_some() {
                // From here on it counts as parked.
                account.renewed_at = BootTime::now();
            }
        }
    }

    /// Keeps the lease: to be called for each request.
    pub(crate) fn renew(&self, hold: &Hold) -> Result<(), Refusal> {
        let mut books = self.books();
        account_of(&mut books, hold)?.renewed_at = BootTime::now();
        Ok(())
    }

    /// Sets `bytes` in all aside for the client; returns what it has then.
    pub(crate) fn reserve(&self, hold: &Hold, bytes: u64) -> Result<u64, Refusal> {
        let mut books = self.books();
        let name = account_of(&mut books, hold)?.name().clone();
        let free_bytes = self.free_bytes(&books, &name);
        let account = account_of(&mut books, hold)?;
        let slab_bytes = self.terms.slab_bytes;
        let leased = account.session.mapped_bytes();
        let wanted = bytes.div_ceil(slab_bytes).saturating_mul(slab_bytes);
        let wanted = wanted.max(leased);
        let more = wanted.saturating_sub(account.reserved_bytes);
        if more > free_bytes {
            return Err(Refusal::ServerFull {
                asked_bytes: wanted,
                free_bytes: free_bytes.saturating_add(account.reserved_bytes),
            });
        }
        // Also of a disk, which is thin: it is to be refused when it is made, and not a write to it some day. One of
        // an earlier build's may have more.
        if more > 0 && wanted / slab_bytes > MAX_SLABS {
            return Err(too_many_slabs());
        }
        account.reserved_bytes = wanted;
        Ok(wanted)
    }

    /// Leases one more slab out of the client's reservation. Where there is no room, what is on its way back is waited
    /// for: of several who wait, each has its time, whoever takes first what is freed.
    pub(crate) fn lease(&self, hold: &Hold) -> Result<SlabId, Refusal> {
        let deadline = Instant::now() + FREED_WITHIN;
        loop {
            let outcome = self.lease_now(hold);
            let is_full = matches!(outcome, Err(Refusal::ServerFull { .. }));
            if !is_full || !self.await_freed(deadline) {
                return outcome;
            }
        }
    }

    fn lease_now(&self, hold: &Hold) -> Result<SlabId, Refusal> {
        let mut books = self.books();
        let free_bytes = self.free_to_lend(&books, hold.session.holder);
        let slab_bytes = self.terms.slab_bytes;
        let account = account_of(&mut books, hold)?;
        // Released slabs count for as long as a request in work uses them.
        let leased = account.session.mapped_bytes();
        if leased + slab_bytes > account.reserved_bytes {
            return Err(Refusal::ReservationExhausted {
                reserved_bytes: account.reserved_bytes,
            });
        }
        if leased / slab_bytes >= MAX_SLABS {
            return Err(too_many_slabs());
        }
        if slab_bytes > free_bytes {
            return Err(Refusal::ServerFull {
                asked_bytes: slab_bytes,
                free_bytes,
            });
        }
        let counts = Counts {
            server: self.lent_bytes.clone(),
            client: account.session.count(),
        };
        // A disk's memory is taken as it is written, and of the spare one all is taken.
        let spare = match account.disk {
            None => self.spare.take(counts.clone()),
            Some(_) => None,
        };
        let slab = match spare {
            Some(slab) => slab,
            None => Slab::map(self.slab_bytes(), counts).map_err(|error| Refusal::OutOfMemory {
                reason: error.to_string(),
            })?,
        };
        let id = SlabId(account.next_slab);
        account.next_slab += 1;
        account.session.add_slab(id, slab);
        Ok(id)
    }

    /// Waits until there is room for another slab of a guest's; false where nothing more comes back, or not in time. A
    /// disk needs no room: see [`Self::free_to_lend`].
    fn await_freed(&self, deadline: Instant) -> bool {
        let lendable = self.books().lendable_bytes();
        let is_full = || {
            let lent = self.lent_bytes.load(Ordering::Acquire);
            lendable.saturating_sub(lent) < self.terms.slab_bytes
        };
        let left = deadline.saturating_duration_since(Instant::now());
        self.freeing.wait_while(left, is_full)
    }

    /// Takes all slabs of a session that is over and was cut: nobody reaches anything there, for a key is of use by the
    /// session's own queue pairs alone, and their memory is the system's again soon. Their number.
    fn take_back(&self, session: &Session) -> u64 {
        let slabs: Vec<Arc<Slab>> = session.take_slabs().into_values().collect();
        let count = slabs.len() as u64;
        self.freeing.free(slabs);
        count
    }

    /// Takes a slab back. Its memory is the system's again once requests in work are done with it.
    pub(crate) fn release(&self, hold: &Hold, slab: SlabId) -> Result<(), Refusal> {
        let mut books = self.books();
        let account = account_of(&mut books, hold)?;
        let taken = account.session.take_slab(slab);
        let taken = taken.ok_or(Refusal::NotLeased { slab })?;
        if account.vacating.remove(&slab) {
            // What was asked back is not to be leased again.
            account.reserved_bytes -= self.terms.slab_bytes.min(account.reserved_bytes);
        }
        drop(books);
        // Before the client is told: from then on it reaches nothing there.
        taken.revoke();
        drop(taken);
        Ok(())
    }

    /// A token for one data connection of the client's.
    pub(crate) fn issue_token(&self, hold: &Hold) -> Result<Token, Refusal> {
        let token = Token::random().map_err(|error| Refusal::OutOfMemory {
            reason: error.to_string(),
        })?;
        let mut books = self.books();
        let account = account_of(&mut books, hold)?;
        let now = BootTime::now();
        account.tokens.retain(|(_, until)| *until > now);
        // All of its connections may be made at once; the oldest makes room.
        if account.tokens.len() >= self.terms.max_data_connections.max(1) {
            account.tokens.remove(0);
        }
        account
            .tokens
            .push((token, now.after(self.terms.token_life)));
        Ok(token)
    }

    /// What a token is for. It is void from then on.
    pub(crate) fn redeem_token(&self, token: &Token) -> Option<Redeemed> {
        let now = BootTime::now();
        let mut books = self.books();
        books.accounts.values_mut().find_map(|account| {
            let place = account.tokens.iter().position(|(own, _)| own == token)?;
            let (_, until) = account.tokens.remove(place);
            (until > now).then(|| Redeemed {
                session: account.session.clone(),
                client: account.name().clone(),
                epoch: account.session.epoch(),
            })
        })
    }

    /// Ends a session at its client's wish.
    pub(crate) fn end(&self, hold: &Hold) -> Result<Ended, Refusal> {
        let mut books = self.books();
        account_of(&mut books, hold)?;
        books.accounts.remove(&hold.session.holder);
        drop(books);
        let at_once = hold.session.fence(FENCE_TIMEOUT);
        let slabs = self.take_back(&hold.session);
        Ok(Ended { slabs, at_once })
    }

    /// Nobody could be heard for so long: that counts for no lease. No client relies on less than it is given.
    pub(crate) fn stood_still(&self, gap: Duration) {
        for account in self.books().accounts.values_mut() {
            account.renewed_at = account.renewed_at.after(gap);
            account.settled_at = account.settled_at.after(gap);
        }
    }

    /// Ends the sessions whose lease has run out at `now`, and drops the disks that were parked for too long by then;
    /// returns whose, with the slabs they had.
    pub(crate) fn expire(&self, now: BootTime) -> Vec<(Holder, u64)> {
        let mut books = self.books();
        let over: Vec<Account> = books
            .accounts
            .extract_if(|_, account| account.is_over(&self.terms, now))
            .map(|(_, account)| account)
            .collect();
        drop(books);
        let mut ended = Vec::new();
        for account in over {
            if let Some(control) = &account.control {
                control.cut();
            }
            account.session.cut();
            let slabs = self.take_back(&account.session);
            ended.push((account.session.holder, slabs));
        }
        ended
    }

    /// Gives up RDMA devices that are to be removed. Their clients connect anew, and are offered what
    /// there is then; returns whose sessions these are.
    pub(crate) fn withdraw_verbs(&self) -> Vec<Holder> {
        let mut withdrawn = Vec::new();
        for session in self.sessions() {
            if !session.withdraw_verbs() {
                continue;
            }
            withdrawn.push(session.holder);
            if let Some(account) = self.books().account_with(&session)
                && let Some(control) = &account.control
            {
                control.cut();
            }
        }
        withdrawn
    }

    /// Makes slabs ready ahead as they are wanted, until the spare one is closed.
    pub(crate) fn keep_spare(&self) {
        self.spare
            .keep(self.slab_bytes(), || self.may_lend_another());
    }

    /// Gives the slab that is ready back where it could not be lent, or nobody uses RDMA any more.
    pub(crate) fn look_at_spare(&self) {
        if self.spare.bytes() == 0 {
            return;
        }
        let is_of_use = self.sessions().iter().any(|session| session.has_verbs());
        if !is_of_use || !self.may_lend_another() {
            self.spare.drop_slab();
        }
    }

    /// All sessions. Their own locks may be held for longer than that of the books is to be waited for.
    fn sessions(&self) -> Vec<Arc<Session>> {
        let books = self.books();
        let accounts = books.accounts.values();
        accounts.map(|account| account.session.clone()).collect()
    }

    fn may_lend_another(&self) -> bool {
        self.unlent_bytes(&self.books()) >= self.terms.slab_bytes
    }

    /// What is neither lent nor held back for disks.
    fn unlent_bytes(&self, books: &Books) -> u64 {
        let lent = self.lent_bytes.load(Ordering::Acquire);
        books.lendable_bytes().saturating_sub(lent)
    }

    /// What could be leased at once, where its reservation allows. What may be lent can have been lowered since
    /// that was made: it is the guests who then have to do with less, and give slabs back. A disk has nowhere else
    /// to write to, and what was set aside for it stays so.
    fn free_to_lend(&self, books: &Books, holder: Holder) -> u64 {
        match holder.is_disk() {
            true => u64::MAX,
            false => self.unlent_bytes(books),
        }
    }

    /// Changes what may be lent, and asks clients for slabs back where more is leased, or is held back for disks;
    /// returns how many were asked for. Of those that were asked for before and are needed no more, none is asked
    /// for again; a client that has begun to empty them may lease others.
    pub(crate) fn set_memory(&self, memory_bytes: u64) -> u64 {
        let slab_bytes = self.terms.slab_bytes;
        let mut books = self.books();
        books.memory_bytes = memory_bytes;
        let taken = books.leased_slabs() * slab_bytes + books.held_back_bytes();
        let needed = taken.saturating_sub(memory_bytes).div_ceil(slab_bytes);
        let asked: u64 = books.accounts.values().map(Account::asked_back).sum();
        let mut too_many = asked.saturating_sub(needed);
        for account in books.accounts.values_mut() {
            while too_many > 0 && account.vacating.pop_first().is_some() {
                too_many -= 1;
            }
        }
        books.ask_back(needed.saturating_sub(asked))
    }

    /// Takes no more clients, and tells those who are there.
    pub(crate) fn close(&self) {
        let mut books = self.books();
        books.closing = true;
        for account in books.accounts.values() {
            if let Some(control) = &account.control {
                control.post([ServerMessage::Closing]);
            }
        }
    }

    /// Ends every session, after [`Ledger::close`]; waits for the threads of their connections.
    pub(crate) fn end_all(&self) {
        let accounts = std::mem::take(&mut self.books().accounts);
        for account in accounts.values() {
            account.session.cut();
            if let Some(control) = &account.control {
                control.cut();
            }
        }
        for account in accounts.into_values() {
            account.session.fence(FENCE_TIMEOUT);
            drop(account.session.take_slabs());
        }
    }

    /// What may still be set aside for a client of that name.
    fn free_bytes(&self, books: &Books, name: &ClientName) -> u64 {
        let free = books.memory_bytes.saturating_sub(books.reserved_bytes());
        let Some(most) = self.terms.client_bytes else {
            return free;
        };
        let own = books.accounts.values().filter(|own| own.name() == name);
        let own: u64 = own.map(|account| account.reserved_bytes).sum();
        free.min(most.saturating_sub(own))
    }

    /// What is lent to a client, as it may know it: what others have is no part of it. What it has
    /// and what is free for it come to `memory_bytes`.
    pub(crate) fn stats_for(&self, asker: &ClientName) -> ServerStats {
        let mut stats = self.stats(|name| name == asker);
        let clients = stats.clients.iter();
        let clients = clients.map(|client| [client.reserved_bytes, client.leased_bytes]);
        let disks = stats.disks.iter();
        let disks = disks.map(|disk| [disk.reserved_bytes, disk.leased_bytes]);
        let own = clients
            .chain(disks)
            .fold([0, 0], |sum, own| [sum[0] + own[0], sum[1] + own[1]]);
        let lent = self.lent_bytes.load(Ordering::Acquire);
        let books = self.books();
        let unlent = books.memory_bytes.saturating_sub(lent);
        let free = self.free_bytes(&books, asker).min(unlent);
        [stats.reserved_bytes, stats.leased_bytes] = own;
        stats.memory_bytes = own[0].max(own[1]) + free;
        stats
    }

    /// What is lent in all: of the clients, those that `show` lets through.
    pub(crate) fn stats(&self, show: impl Fn(&ClientName) -> bool) -> ServerStats {
        let books = self.books();
        let slab_bytes = self.terms.slab_bytes;
        let shown = || {
            books
                .accounts
                .values()
                .filter(|account| show(account.name()))
        };
        let clients = shown().filter_map(|account| {
            let stats = account.client_stats(slab_bytes)?;
            Some((stats, account.session.clone()))
        });
        let clients: Vec<(ClientStats, Arc<Session>)> = clients.collect();
        let disks = shown().filter_map(|account| account.disk_stats(slab_bytes));
        let mut disks: Vec<DiskStats> = disks.collect();
        disks.sort_by_key(|disk| disk.disk);
        let mut stats = ServerStats {
            instance: self.instance,
            memory_bytes: books.memory_bytes,
            reserved_bytes: books.reserved_bytes(),
            leased_bytes: self.lent_bytes.load(Ordering::Acquire),
            slab_bytes: self.terms.slab_bytes,
            clients: Vec::new(),
            disks,
        };
        drop(books);
        let clients = clients.into_iter().map(|(stats, session)| ClientStats {
            data_connections: session.data_connections() as u64,
            ..stats
        });
        stats.clients = clients.collect();
        stats.clients.sort_by_key(|client| client.vm);
        stats
    }

    fn slab_bytes(&self) -> usize {
        // Configured to be at most 2 GiB.
        self.terms.slab_bytes as usize
    }
}

impl Books {
    fn reserved_bytes(&self) -> u64 {
        let accounts = self.accounts.values();
        accounts.map(|account| account.reserved_bytes).sum()
    }

    /// What may be lent to guests, and what is lent to anybody, in all.
    fn lendable_bytes(&self) -> u64 {
        self.memory_bytes.saturating_sub(self.held_back_bytes())
    }

    /// What is set aside for disks and not leased yet.
    fn held_back_bytes(&self) -> u64 {
        let disks = self.accounts.values().filter(|own| own.disk.is_some());
        let unleased = |own: &Account| {
            own.reserved_bytes
                .saturating_sub(own.session.mapped_bytes())
        };
        disks.map(unleased).sum()
    }

    /// Asks guests for so many more slabs back, as far as they have them; returns how many were asked for. Whoever
    /// holds most gives first, its newest slab. A disk gives none: its contents have no other place, and a parked one
    /// has nobody to ask.
    fn ask_back(&mut self, slabs: u64) -> u64 {
        if slabs == 0 {
            return 0;
        }
        let mut guests: Vec<&mut Account> = self.accounts.values_mut().collect();
        guests.retain(|account| account.disk.is_none());
        let count = |account: &Account| account.session.slab_count() - account.asked_back();
        let counts = guests.iter().map(|account| count(account));
        let mut most: BinaryHeap<(u64, usize)> = counts.zip(0..).collect();
        let mut gives = vec![0; guests.len()];
        for _ in 0..slabs {
            let Some(mut first) = most.peek_mut().filter(|first| first.0 > 0) else {
                break;
            };
            first.0 -= 1;
            gives[first.1] += 1;
        }
        for (account, gives) in guests.into_iter().zip(&gives) {
            account.ask_back(*gives);
        }
        gives.iter().sum::<usize>() as u64
    }

    fn leased_slabs(&self) -> u64 {
        let accounts = self.accounts.values();
        accounts.map(|account| account.session.slab_count()).sum()
    }
}

impl Account {
    fn asked_back(&self) -> u64 {
        self.vacating.len() as u64
    }

    /// Asks for so many more of its slabs back, newest first.
    fn ask_back(&mut self, slabs: usize) {
        let newest = self.session.newest_slabs(slabs, &self.vacating);
        self.vacating.extend(&newest);
        if let Some(control) = &self.control {
            let messages = newest.into_iter();
            control.post(messages.map(|slab| ServerMessage::Vacate { slab }));
        }
    }

    /// Whether its lease has run out. A disk is kept for whoever claims it, if it has anything: room is set aside for
    /// a disk as soon as it is made, and stays so. One without is what a client left that came no further, or that
    /// wanted others' places.
    fn is_over(&self, terms: &Terms, now: BootTime) -> bool {
        let silent = now.since(self.renewed_at);
        match &self.disk {
            None => silent > terms.lease_timeout,
            Some(_) => {
                let parked = self.control.is_none() && !self.resuming;
                let timeout = match self.has_anything() {
                    true => terms.parked_disk_timeout,
                    false => Some(terms.lease_timeout),
                };
                parked && timeout.is_some_and(|timeout| silent > timeout)
            }
        }
    }

    /// Whose certificate it is under.
    fn name(&self) -> &ClientName {
        let claimant = self.disk.as_ref().map(|disk| &disk.claimant);
        claimant.unwrap_or(&self.session.name)
    }

    /// All but its data connections, whose locks may be held for long.
    fn client_stats(&self, slab_bytes: u64) -> Option<ClientStats> {
        let Holder::Guest(vm, _) = self.session.holder else {
            return None;
        };
        let slabs = self.session.slab_count();
        Some(ClientStats {
            vm,
            name: self.session.name.clone(),
            connected: self.control.is_some(),
            slabs,
            leased_bytes: slabs * slab_bytes,
            reserved_bytes: self.reserved_bytes,
            data_connections: 0,
        })
    }
}

/// More could not be listed to a client that comes back.
fn too_many_slabs() -> Refusal {
    Refusal::TooMany {
        what: "slabs for one guest or disk (larger ones, by --slab-size, hold more)".to_owned(),
        limit: MAX_SLABS,
    }
}

/// The account, if the connection still is the one that speaks for it.
fn account_of<'a>(books: &'a mut Books, hold: &Hold) -> Result<&'a mut Account, Refusal> {
    let account = books.accounts.get_mut(&hold.session.holder);
    account
        .filter(|account| {
            let control = account.control.as_ref();
            Arc::ptr_eq(&account.session, &hold.session)
                && control.is_some_and(|control| control.id == hold.control.id)
        })
        .ok_or(Refusal::SessionEnded)
}
