//! Ways to break what the engine relies on, or what it does. Each must be found by a check.

use outram_backend::engine::table::{Entry, State};
use outram_backend::engine::{PageIndex, PageRun};

use crate::steps::Simulation;
use crate::world::{Check, PAGES, World};

/// One thing done wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sabotage {
    /// Pages are punched before they are staged.
    PunchFirst,
    /// A run is read and punched without having been write-protected.
    SkipProtect,
    /// A wake in three is left out.
    DropWake,
    /// An evictor lifts its range's protection after the run was handed back.
    LiftLate,
    /// A page that the engine believes write-protected is not.
    ForgetProtection,
    /// Bytes that do not match their tag are taken.
    SkipTagCheck,
    /// A disconnected server counts as connected: clean pages are dropped.
    HideDisconnect,
    /// Room is counted and never given back.
    LeakBudget,
    /// More pages are put into memory than were asked for and counted.
    ZeroTooMuch,
    /// The limit does not bind.
    IgnoreLimit,
    /// A lost page is answered with zeros.
    AnswerLost,
    /// A page is given up though its copy is good.
    LoseGood,
    /// A write is acknowledged before it is done.
    AckEarly,
    /// Events of discarded pages are thrown away.
    DropRemove,
    /// Alerts between shards are thrown away.
    DropAlerts,
    /// A fault is read and thrown away.
    DropFault,
    /// A staging slot is taken and never used.
    LeakStaging,
    /// A slot on a server is taken and never used.
    LeakSlot,
    /// A page's slot is kept uncounted.
    KeepUncounted,
    /// A page changes its state beside the gauges.
    MissGauge,
    /// A pinned page is punched.
    PunchPinned,
    /// Pages are still evicted while everything is brought home.
    KeepLimit,
    /// The engine is not told that memory was unplugged.
    DropUnplug,
    /// An entry of unplugged memory is made anew.
    KeepUnplugged,
    /// A successor of the backend wakes nobody.
    WakeNobody,
    /// A successor believes the table more than the guest's memory.
    TrustTable,
    /// The staging area dies with the backend.
    LoseStaging,
    /// Which slabs the groups are is not written down.
    WriteNoGroups,
    /// A page given back begins to count its generations anew.
    RepeatGeneration,
}

impl Sabotage {
    /// All of them, each with the checks of which one has to find it.
    pub(crate) const ALL: &[(Self, &[Check])] = &[
        (Self::PunchFirst, &[Check::WrongBytes, Check::NoCopy]),
        (Self::SkipProtect, &[Check::WrongBytes]),
        (Self::DropWake, &[Check::LostWakeUp]),
        (Self::LiftLate, &[Check::Protection, Check::WrongBytes]),
        (Self::ForgetProtection, &[Check::Protection]),
        (Self::SkipTagCheck, &[Check::WrongBytes]),
        (Self::HideDisconnect, &[Check::UnsafeDrop]),
        (Self::LeakBudget, &[Check::Budget]),
        (Self::ZeroTooMuch, &[Check::Stray]),
        (Self::IgnoreLimit, &[Check::Budget]),
        (Self::AnswerLost, &[Check::LostAnswered]),
        (Self::LoseGood, &[Check::LostWithoutCause]),
        (Self::AckEarly, &[Check::NoCopy, Check::WrongBytes]),
        (Self::DropRemove, &[Check::NoCopy]),
        (Self::DropAlerts, &[Check::Stuck]),
        (Self::DropFault, &[Check::LostWakeUp]),
        (Self::LeakStaging, &[Check::Staging]),
        (Self::LeakSlot, &[Check::Slots]),
        (Self::KeepUncounted, &[Check::Slots]),
        (Self::MissGauge, &[Check::Gauges]),
        (Self::PunchPinned, &[Check::PinnedHole, Check::NoCopy]),
        (Self::KeepLimit, &[Check::NotHome, Check::Stuck]),
        (Self::DropUnplug, &[Check::Stuck, Check::Budget]),
        (Self::KeepUnplugged, &[Check::Kept]),
        (Self::WakeNobody, &[Check::LostWakeUp]),
        (Self::TrustTable, &[Check::Stray, Check::WrongBytes]),
        (Self::LoseStaging, &[Check::LostWithoutCause]),
        (Self::WriteNoGroups, &[Check::LostWithoutCause]),
        (Self::RepeatGeneration, &[Check::SentTwice]),
    ];
}

impl Simulation {
    /// Whether something is to be done wrongly now.
    pub(crate) fn sabotaged(&self, sabotage: Sabotage, per_mille: u64) -> bool {
        let world = &mut *self.world.borrow_mut();
        world.is(sabotage) && world.random.chance(per_mille)
    }

    /// Does what is to be done wrongly beside everything else.
    pub(crate) fn sabotage(&mut self) {
        let world = &mut *self.world.borrow_mut();
        let Some(sabotage) = world.sabotage else {
            return;
        };
        match sabotage {
            Sabotage::LiftLate => world.lift_late(),
            Sabotage::AnswerLost => world.answer_lost(),
            Sabotage::PunchPinned => world.punch_pinned(),
            Sabotage::RepeatGeneration => world.repeat_generation(),
            _ if !world.random.chance(2) => {}
            Sabotage::LoseGood => world.lose_good(),
            Sabotage::LeakBudget => world.shared.budget.force(1),
            Sabotage::LeakStaging => drop(world.shared.staging.take(1)),
            Sabotage::LeakSlot => drop(world.shared.slots.allocate(1, &|_| true)),
            Sabotage::KeepUncounted => drop(world.shared.slots.try_keep()),
            Sabotage::MissGauge => world.shared.stats.moved(State::Absent, State::Resident),
            _ => {}
        }
    }
}

impl World {
    fn lift_late(&mut self) {
        if !self.random.chance(20) {
            return;
        }
        for run in std::mem::take(&mut self.late_lifts) {
            for page in run.pages() {
                self.protected[page.0 as usize] = false;
            }
            self.wake(run);
        }
    }

    fn repeat_generation(&mut self) {
        let page = PageIndex(self.random.below(u64::from(PAGES)) as u32);
        if self.shared.table.state(page) == State::Absent {
            self.shared.table.store(page, &Entry::ABSENT);
        }
    }

    fn answer_lost(&mut self) {
        for number in 0..self.vcpus.len() {
            let vcpu = &self.vcpus[number];
            let Some(access) = vcpu.access.filter(|_| vcpu.waits) else {
                continue;
            };
            if self.shared.table.state(PageIndex(access.page)) == State::Lost {
                self.memory[access.page as usize] = Some(self.zero.clone());
                self.wake(PageRun::single(PageIndex(access.page)));
            }
        }
    }

    fn punch_pinned(&mut self) {
        let granted = self.device.values().find(|request| request.granted);
        if let Some(request) = granted {
            self.memory[request.run.first.0 as usize] = None;
        }
    }

    fn lose_good(&mut self) {
        let good = (0..PAGES).map(PageIndex).find(|page| {
            self.shared.table.state(*page) == State::Stored && !self.may_be_lost.contains(&page.0)
        });
        if let Some(page) = good {
            let entry = self.shared.table.load(page);
            let state = State::Lost;
            self.shared.table.store(page, &Entry { state, ..entry });
            self.shared.stats.moved(State::Stored, State::Lost);
        }
    }
}
