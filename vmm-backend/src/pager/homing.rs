//! A live detach: everything comes home, and the guest's memory is left to the kernel again.
//!
//! [`Pager::bring_home`] lifts the limit, so that nothing leaves any more, and has every shard
//! fetch what lies elsewhere; [`Pager::stay`] calls that off. Once [`Pager::is_home`],
//! [`Pager::release`] has every shard unregister its range: from there on there is no way back, and
//! no need for one, for every page is where the kernel alone finds it.
//!
//! Lock order: `changing`, then the course; neither is held while shards are waited for.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;

use super::released::NotReleased;
use super::shard_thread::ShardEvent;
use super::writer::WriterEvent;
use super::{Inbox, Pager, close_sessions, lock};
use crate::crash_points::{self, Point};
use crate::engine::table::State;

/// How long shards may take to let go: requests of the device that are in work end first.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(30);

/// Until a shard that could not let go is asked again.
const RELEASE_PAUSE: Duration = Duration::from_millis(5);

/// Where a pager is going.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Course {
    /// It keeps its guest at its limit.
    Serving,
    /// It brings everything home.
    Homing,
    /// Some of the guest's memory is the kernel's again; the rest is to follow.
    Leaving,
    /// All of it is.
    Released,
}

/// Why a guest's memory does not come home.
#[derive(Debug, thiserror::Error)]
pub enum HomingError {
    /// Pages are gone.
    #[error(
        "{0} pages of the guest are lost with their memory server: they cannot come home; save what can be saved, then 'virsh destroy' it"
    )]
    Lost(u64),
    /// A server that holds pages cannot be reached.
    #[error(
        "pages of the guest lie on memory servers that are out of reach: {0}; bring them back first"
    )]
    OutOfReach(String),
    /// A pool of huge pages may have none left for those that lie elsewhere.
    #[error(
        "guests on hugetlbfs are not detached as they run: their huge pages may be other guests' by now; shut the guest down first"
    )]
    HugePages,
    /// Somebody else is at it.
    #[error("the guest's memory is being brought home already, by another 'outram detach --live'")]
    UnderWay,
    /// Nobody has asked for it before.
    #[error("the guest's memory is not being brought home")]
    NotUnderWay,
    /// Not yet.
    #[error("not every page of the guest is home yet")]
    NotHome,
    /// The kernel does not let go.
    #[error("the guest's memory cannot be released: {0}; the guest goes on with its pager")]
    Refused(#[source] std::io::Error),
}

impl Pager {
    /// Where it is going.
    pub fn course(&self) -> Course {
        *lock(&self.course)
    }

    /// Lifts the limit and begins to bring every page home.
    pub fn bring_home(&self) -> Result<(), HomingError> {
        let _alone = lock(&self.changing);
        let standing = self.standing();
        if standing.page_size.is_huge() {
            return Err(HomingError::HugePages);
        }
        let mut course = lock(&self.course);
        match *course {
            Course::Serving => {}
            Course::Homing => return Err(HomingError::UnderWay),
            Course::Leaving | Course::Released => return Ok(()),
        }
        self.demand_nothing_lost()?;
        let away: Vec<String> = self
            .servers()
            .into_iter()
            .filter(|server| server.stored_bytes > 0 && !server.connected)
            .map(|server| server.address)
            .collect();
        if !away.is_empty() {
            return Err(HomingError::OutOfReach(away.join(", ")));
        }
        *course = Course::Homing;
        let ram_pages = standing.ram_pages();
        self.rule.set(&self.shared, ram_pages, ram_pages);
        self.shared.compressed.set_capacity(0, &self.shared.budget);
        for (shard, gauges) in self.shards.iter().zip(&self.gauges) {
            gauges.home.store(false, Ordering::Relaxed);
            shard.send(ShardEvent::Homing(true));
        }
        crash_points::pass(Point::HomingBegun);
        Ok(())
    }

    /// Calls it off: back to the limit that was asked for last. Nothing where memory has been
    /// released already.
    pub fn stay(&self) {
        let _alone = lock(&self.changing);
        let standing = self.standing();
        let mut course = lock(&self.course);
        if *course != Course::Homing {
            return;
        }
        *course = Course::Serving;
        for shard in &self.shards {
            shard.send(ShardEvent::Homing(false));
        }
        let sizes = standing.sizes();
        self.rule
            .set(&self.shared, sizes.limit_pages, standing.ram_pages());
        self.shared
            .compressed
            .set_capacity(sizes.compressed_pages, &self.shared.budget);
        self.shards.iter().for_each(Inbox::ring);
    }

    /// Whether everything is home.
    pub fn is_home(&self) -> bool {
        match self.course() {
            Course::Serving => false,
            Course::Homing => self
                .gauges
                .iter()
                .all(|gauges| gauges.home.load(Ordering::Relaxed)),
            Course::Leaving | Course::Released => true,
        }
    }

    /// Bytes that still lie elsewhere.
    pub fn bytes_elsewhere(&self) -> u64 {
        let stats = &self.shared.stats;
        let states = [State::Stored, State::Staged, State::Filled, State::Busy];
        let pages: u64 = states.into_iter().map(|state| stats.pages(state)).sum();
        pages * self.ram.page_size().bytes()
    }

    /// Leaves the guest's memory to the kernel and gives every slab back. To be repeated where it
    /// fails in the middle: the guest is served as far as it was not released.
    pub fn release(&self) -> Result<(), HomingError> {
        self.begin_to_leave()?;
        crash_points::pass(Point::HomingDone);
        let deadline = Instant::now() + RELEASE_TIMEOUT;
        for (number, shard) in self.shards.iter().enumerate() {
            if let Err(error) = release_shard(shard, deadline) {
                if number == 0 && !matches!(error, HomingError::Refused(_)) {
                    // As if it had not been tried.
                    *lock(&self.course) = Course::Homing;
                }
                return Err(error);
            }
            if number == 0 {
                crash_points::pass(Point::HomingShardReleased);
            }
        }
        crash_points::pass(Point::HomingReleased);
        if let Err(error) = self.records.remove_record() {
            tracing::warn!(%error, "a backend that takes over from this one would page the guest again");
        }
        crash_points::pass(Point::HomingRecordGone);
        *lock(&self.course) = Course::Released;
        self.retire();
        Ok(())
    }

    fn begin_to_leave(&self) -> Result<(), HomingError> {
        let is_home = self.is_home();
        let mut course = lock(&self.course);
        match *course {
            Course::Serving => Err(HomingError::NotUnderWay),
            Course::Homing if !is_home => Err(HomingError::NotHome),
            Course::Homing | Course::Leaving => {
                self.demand_nothing_lost()?;
                *course = Course::Leaving;
                Ok(())
            }
            Course::Released => Ok(()),
        }
    }

    fn demand_nothing_lost(&self) -> Result<(), HomingError> {
        match self.shared.stats.pages(State::Lost) {
            0 => Ok(()),
            lost => Err(HomingError::Lost(lost)),
        }
    }

    /// Ends what works towards the servers; only once.
    pub(super) fn retire(&self) {
        if self.retired.swap(true, Ordering::AcqRel) {
            return;
        }
        self.writer.send(WriterEvent::Quit);
        // Full means that it was told already.
        let _ = self.stop_keeping.try_send(());
        close_sessions(&self.sessions);
    }
}

fn release_shard(shard: &Inbox<ShardEvent>, deadline: Instant) -> Result<(), HomingError> {
    loop {
        let (answer, answered) = bounded(1);
        shard.send(ShardEvent::Release(answer));
        match answered.recv() {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(NotReleased::NotHome)) if Instant::now() < deadline => {
                std::thread::sleep(RELEASE_PAUSE);
            }
            Ok(Err(NotReleased::Refused(source))) => return Err(HomingError::Refused(source)),
            // A shard that has ended did so with its guest.
            Ok(Err(NotReleased::NotHome)) | Err(_) => return Err(HomingError::NotHome),
        }
    }
}
