//! What the guest does: accesses of its vCPUs, discards, and the device that it talks to.

use outram_backend::engine::shard::Fault;
use outram_backend::engine::table::State;
use outram_backend::engine::{PageRun, PinId};

use crate::contents::Store;
use crate::world::{
    Access, Check, DeviceRequest, FaultMessage, PAGES, Violation, World, fail, shard_of,
};

impl World {
    /// A vCPU decides what to do next: near where it was, at random, or in order.
    pub(crate) fn choose_access(&mut self, number: usize) {
        let place = self.vcpus[number].place;
        let page = match self.random.below(10) {
            0 => self.random.below(u64::from(PAGES)) as u32,
            1..5 => (place + 1) % PAGES,
            _ => (place + self.random.below(24) as u32) % PAGES,
        };
        if self.random.chance(300) {
            self.vcpus[number].place = page;
        }
        let store = self
            .random
            .chance(450)
            .then(|| Store::random(&mut self.random));
        self.vcpus[number].access = Some(Access { page, store });
    }

    /// A vCPU tries its access: it happens, or the vCPU waits in a fault.
    pub(crate) fn try_access(&mut self, number: usize) -> Result<(), Violation> {
        let Some(access) = self.vcpus[number].access else {
            return Ok(());
        };
        let page = access.page as usize;
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
    pub(crate) fn interrupt(&mut self, number: usize) -> Result<(), Violation> {
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
        // Beside a discard, the discard may come last.
        if self.discarding[place] > 0 && !self.allowed[place].contains(&self.zero) {
            self.allowed[place].push(self.zero.clone());
        }
    }

    /// The first half of a discard: the memfd is punched.
    pub(crate) fn discard(&mut self, run: PageRun) {
        for page in run.pages() {
            let place = page.0 as usize;
            self.memory[place] = None;
            self.discarding[place] += 1;
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
