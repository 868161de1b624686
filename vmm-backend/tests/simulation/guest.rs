//! What the guest does: accesses of its vCPUs, discards, and the device that it talks to.

use outram_backend::engine::shard::Fault;
use outram_backend::engine::table::State;
use outram_backend::engine::{PageIndex, PageRun, PinId};

use crate::contents::Store;
use crate::world::{
    Access, Check, DeviceRequest, FaultMessage, Memory, PAGES, SHARD_PAGES, Vcpu, Violation, World,
    fail, shard_of,
};

impl World {
    /// A vCPU that can go on does.
    pub(crate) fn run_vcpu(&mut self, may_begin: bool) -> Result<(), Violation> {
        let may_go_on = |vcpu: &Vcpu| !vcpu.waits && (vcpu.access.is_some() || may_begin);
        let vcpus = self.vcpus.iter().enumerate();
        let able: Vec<_> = vcpus
            .filter(|(_, vcpu)| may_go_on(vcpu))
            .map(|(number, _)| number)
            .collect();
        let Some(number) = self.random.index(able.len()) else {
            return Ok(());
        };
        if self.vcpus[able[number]].access.is_none() {
            self.choose_access(able[number]);
        }
        self.try_access(able[number])
    }

    /// A signal comes to a vCPU.
    pub(crate) fn interrupt_vcpu(&mut self) -> Result<(), Violation> {
        let number = self.random.below(self.vcpus.len() as u64) as usize;
        match self.vcpus[number].waits {
            true => self.interrupt(number),
            false => Ok(()),
        }
    }

    /// The guest gives pages back.
    pub(crate) fn discard_somewhere(&mut self) {
        // Often something that is lost, for nothing else heals that.
        let is_lost = |page: &u32| self.shared.table.state(PageIndex(*page)) == State::Lost;
        let lost = (0..PAGES).find(is_lost);
        let first = match lost.filter(|_| self.random.chance(500)) {
            Some(page) => page,
            None => self.hot.0 + self.random.below(u64::from(self.hot.1)) as u32,
        };
        let end = first + self.random.between(1, 6);
        let end = end.min((first / SHARD_PAGES + 1) * SHARD_PAGES);
        let run = PageRun {
            first: PageIndex(first),
            count: end - first,
        };
        match self.kind {
            _ if !self.is_unpinned(run) || !self.are_there(run) => {}
            Memory::Tmpfs | Memory::TmpfsTwoCopies => self.discard(run),
            Memory::Hugetlbfs => self.discard_silently(run),
        }
    }

    /// Pages that are there go without a word; what lies elsewhere stays.
    fn discard_silently(&mut self, run: PageRun) {
        for page in run.pages() {
            let place = page.0 as usize;
            if self.take_out(page).is_none() {
                continue;
            }
            self.silently_gone[place] = true;
            // A run that has read the page keeps what it held: no less right than zeros.
            if self.shared.table.state(page) != State::Busy {
                self.allowed[place].clear();
            }
            if !self.allowed[place].contains(&self.zero) {
                self.allowed[place].push(self.zero.clone());
            }
        }
    }

    /// A vCPU decides what to do next: near where it was, at random, or in order.
    fn choose_access(&mut self, number: usize) {
        let place = self.vcpus[number].place;
        let (first, span) = self.hot;
        let page = match self.random.below(10) {
            0..4 => first + self.random.below(u64::from(span)) as u32,
            4 => self.random.below(u64::from(PAGES)) as u32,
            5..7 => (place + 1) % PAGES,
            _ => (place + self.random.below(24) as u32) % PAGES,
        };
        if self.random.chance(300) {
            self.vcpus[number].place = page;
        }
        if !self.is_there(page) {
            return;
        }
        let store = self
            .random
            .chance(350)
            .then(|| Store::random(&mut self.random));
        self.vcpus[number].access = Some(Access { page, store });
    }

    /// A vCPU tries its access: it happens, or the vCPU waits in a fault.
    fn try_access(&mut self, number: usize) -> Result<(), Violation> {
        let Some(access) = self.vcpus[number].access else {
            return Ok(());
        };
        let page = access.page as usize;
        if self.poisoned.contains(&access.page) {
            // It is told so, and does something else.
            self.vcpus[number].access = None;
            return Ok(());
        }
        let Some(contents) = self.memory[page].clone() else {
            // Under KVM's asynchronous page faults reads ask for write access, too.
            let write = access.store.is_some() || self.random.chance(300);
            self.wait_in_fault(number, access.page, write, false);
            return Ok(());
        };
        if access.store.is_some() && self.protected[page] {
            self.wait_in_fault(number, access.page, true, true);
            return Ok(());
        }
        if !self.allowed[page].contains(&contents) {
            return fail(Check::WrongBytes, format!("a load of page {page}"));
        }
        if let Some(store) = access.store {
            self.store(access.page, store);
        }
        self.vcpus[number].access = None;
        Ok(())
    }

    fn wait_in_fault(&mut self, vcpu: usize, page: u32, write: bool, protected: bool) {
        self.vcpus[vcpu].waits = true;
        let fault = Fault { write, protected };
        let message = FaultMessage { vcpu, page, fault };
        self.uffds[shard_of(page)].faults.push_back(message);
    }

    /// A signal takes a vCPU out of its fault; it comes straight back.
    fn interrupt(&mut self, number: usize) -> Result<(), Violation> {
        if let Some(access) = self.vcpus[number].access {
            self.vcpus[number].waits = false;
            let uffd = &mut self.uffds[shard_of(access.page)];
            uffd.faults.retain(|message| message.vcpu != number);
        }
        self.try_access(number)
    }

    /// Bytes of a page that is there change, by a vCPU or a device.
    pub(crate) fn store(&mut self, page: u32, store: Store) {
        let place = page as usize;
        let contents = self.memory[place].as_ref().expect("a store to a page");
        self.memory[place] = Some(contents.with(store));
        for contents in &mut self.allowed[place] {
            *contents = contents.with(store);
        }
        // Beside a discard, the discard may come last; once it has returned, it has been.
        if self.unreturned[place] > 0 && !self.allowed[place].contains(&self.zero) {
            self.allowed[place].push(self.zero.clone());
        }
    }

    /// The first half of a discard: the memfd is punched.
    fn discard(&mut self, run: PageRun) {
        for page in run.pages() {
            let place = page.0 as usize;
            self.memory[place] = None;
            self.discarding[place] += 1;
            self.unreturned[place] += 1;
            let state = self.shared.table.state(page);
            if matches!(state, State::Resident | State::Lost | State::Absent) {
                self.allowed[place].clear();
            }
            if !self.allowed[place].contains(&self.zero) {
                self.allowed[place].push(self.zero.clone());
            }
        }
        self.uffds[shard_of(run.first.0)].punched.push(run);
    }

    /// The second half: the event is queued, and its caller waits.
    pub(crate) fn queue_removal(&mut self, shard: usize) {
        let uffd = &mut self.uffds[shard];
        if let Some(run) = uffd.punched.pop() {
            uffd.events.push_back(run);
            uffd.changing += 1;
        }
    }

    /// The engine was told of a discard.
    pub(crate) fn end_discard(&mut self, run: PageRun) {
        for page in run.pages() {
            // A page in a run is dealt with when that ends.
            if self.shared.table.state(page) == State::Busy {
                self.deferred[page.0 as usize] += 1;
            } else {
                self.discarding[page.0 as usize] -= 1;
            }
        }
    }

    /// A run ended, and with it the discards of its pages.
    pub(crate) fn end_deferred_discards(&mut self, run: PageRun) {
        for page in run.pages() {
            self.discarding[page.0 as usize] -= std::mem::take(&mut self.deferred[page.0 as usize]);
        }
    }

    /// The device accesses pinned memory, past all protections. True if it is done with it.
    pub(crate) fn use_pin(&mut self, pin: PinId) -> Result<bool, Violation> {
        let Some(request) = self.device.get_mut(&pin) else {
            return Ok(false);
        };
        if !request.granted {
            return Ok(false);
        }
        if request.accesses_left == 0 {
            return Ok(true);
        }
        request.accesses_left -= 1;
        let (run, write) = (request.run, request.write);
        let page = run.first.0 + self.random.below(u64::from(run.count)) as u32;
        if !self.is_there(page) {
            // The guest unplugged what its device uses, and gets an error.
            return Ok(true);
        }
        let Some(contents) = &self.memory[page as usize] else {
            return fail(
                Check::PinnedHole,
                format!("page {page} is pinned, and gone"),
            );
        };
        if !self.allowed[page as usize].contains(contents) {
            return fail(Check::WrongBytes, format!("the device reads page {page}"));
        }
        if write {
            let store = Store::random(&mut self.random);
            self.store(page, store);
        }
        Ok(false)
    }

    /// The device has no such request any longer.
    pub(crate) fn forget_request(&mut self, pin: PinId) -> Option<DeviceRequest> {
        let request = self.device.remove(&pin)?;
        for page in request.run.pages() {
            self.device_pages[page.0 as usize] -= 1;
        }
        Some(request)
    }
}
