//! Named instants at which a test has the backend die: between any two steps that a successor has
//! to find in order.
//!
//! In builds with debug assertions, `OUTRAM_CRASH_AT=NAME` (or `NAME:COUNT`) has the process kill
//! itself with SIGKILL when it passes that point (for the COUNTth time). The simulation dies at the
//! same points of the engine, thread by thread ([`arm_thread`]). In release builds there is nothing
//! of this but empty functions.
//!
//! A test goes through [`Point::ALL`] and demands that each is reached: a point that is named here
//! and passed nowhere fails it, as does one after which something is wrong.

/// Where a test names the point.
pub const VARIABLE: &str = "OUTRAM_CRASH_AT";

macro_rules! points {
    ($($(#[$doc:meta])* $point:ident = $name:literal,)*) => {
        /// An instant at which a backend may die.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Point {
            $($(#[$doc])* $point,)*
        }

        impl Point {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$point,)*];

            /// Its name on the command line: what happens, and how far it has come.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$point => $name,)*
                }
            }
        }
    };
}

points! {
    /// An entry of the table has two of its four words written.
    EntryHalfWritten = "entry-half-written",
    /// The pages of a run are busy, and nobody else knows.
    EvictBusy = "evict-busy",
    /// They are write-protected.
    EvictProtected = "evict-protected",
    /// Their bytes are in staging.
    EvictStaged = "evict-staged",
    /// The first of them says what it becomes.
    EvictHalfDecided = "evict-half-decided",
    /// All of them do.
    EvictDecided = "evict-decided",
    /// They are punched, and whoever waits is not woken.
    EvictPunched = "evict-punched",
    /// The run has ended, and its owner has not heard.
    EvictEnded = "evict-ended",
    /// The first page is what it was to become; its former slot is not free.
    EvictSettled = "evict-settled",
    /// Slots are taken for pages in staging.
    WritePlaced = "write-placed",
    /// Pages are on their way to a server.
    WriteSent = "write-sent",
    /// A server has them.
    WriteAcknowledged = "write-acknowledged",
    /// A page is stored; its place in staging is not free.
    WriteStored = "write-stored",
    /// A page is asked of a server.
    FetchAsked = "fetch-asked",
    /// It is in the guest's memory, and not in the table.
    FetchCopied = "fetch-copied",
    /// It is in the table; a slot that it needs no longer is not free.
    FetchMarked = "fetch-marked",
    /// A page is back from staging, and not in the table.
    TakeBackCopied = "take-back-copied",
    /// It is in the table; its place in staging is not free.
    TakeBackMarked = "take-back-marked",
    /// Pages were made zero, and are not in the table.
    ZeroMade = "zero-made",
    /// They are in the table.
    ZeroMarked = "zero-marked",
    /// A page full of one word is in the guest's memory, and not in the table.
    FilledCopied = "filled-copied",
    /// It is in the table.
    FilledMarked = "filled-marked",
    /// A page is known as possibly written, and still protected.
    UnprotectMarked = "unprotect-marked",
    /// It is protected no longer.
    Unprotected = "unprotected",
    /// A discard was read: its caller goes on, and the table does not know.
    DiscardRead = "discard-read",
    /// A page given back is in the table as such; its slots are not free.
    DiscardApplied = "discard-applied",
    /// A slab is asked for.
    LeaseAsked = "lease-asked",
    /// A server has lent one, and it is not written down.
    LeaseGranted = "lease-granted",
    /// It is written down, and nothing lies in it.
    LeaseRecorded = "lease-recorded",
    /// An empty slab is about to be given back; it is written down still.
    LeaseReturned = "lease-returned",
    /// A server wants a slab back; what lies in it is not known to have to move.
    VacateAsked = "vacate-asked",
    /// A page that only moves is in staging, and in the table as it was.
    MoveStaged = "move-staged",
    /// It is in the table as staged; its slot in the slab is not free.
    MoveMarked = "move-marked",
    /// A small file is written, and does not replace the former one yet.
    FileWritten = "file-written",
    /// The servers have promised what a new limit needs.
    TunePromised = "tune-promised",
    /// It holds, and is not written down.
    TuneSettled = "tune-settled",
    /// It is written down.
    TuneRecorded = "tune-recorded",
    /// A plugged block is written down, and not watched.
    PlugRecorded = "plug-recorded",
    /// It is watched, and its shards do not know.
    PlugWatched = "plug-watched",
    /// They know.
    PlugTold = "plug-told",
    /// The shards drop a block that the VMM has unmapped.
    UnplugTold = "unplug-told",
    /// They have.
    UnplugDone = "unplug-done",
    /// Everything begins to come home.
    HomingBegun = "homing-begun",
    /// It is home, and the first shard is about to let go.
    HomingDone = "homing-done",
    /// The first shard has let go.
    HomingShardReleased = "homing-shard-released",
    /// All have, and a successor does not know.
    HomingReleased = "homing-released",
    /// There is nothing to take over.
    HomingRecordGone = "homing-record-gone",
    /// The userfaultfds are in the VMM, and nothing is written down.
    AttachInjected = "attach-injected",
    /// The hand-over is written down, and nothing watched.
    AttachRecorded = "attach-recorded",
    /// The first region is watched.
    AttachWatched = "attach-watched",
    /// All is, and nobody serves it.
    AttachReady = "attach-ready",
    /// A request of the guest's disk is taken off its queue.
    RequestTaken = "request-taken",
    /// It is done, and the guest does not know.
    RequestDone = "request-done",
    /// A successor has the table.
    RecoverOpened = "recover-opened",
    /// It has the userfaultfds.
    RecoverFetched = "recover-fetched",
    /// It watches the first region again.
    RecoverWatched = "recover-watched",
    /// It has recovered the first entry.
    RecoverFirstEntry = "recover-first-entry",
    /// It has recovered all.
    RecoverTable = "recover-table",
    /// Its staging area has the right size.
    RecoverStaging = "recover-staging",
    /// Its sessions are about to be resumed.
    RecoverSessions = "recover-sessions",
    /// Its threads work; whoever had waited is not woken.
    RecoverThreads = "recover-threads",
    /// The guest goes on.
    RecoverWoken = "recover-woken",
}

#[cfg(debug_assertions)]
mod armed {
    use std::cell::Cell;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::Point;

    /// The point at which the process dies, and how often it is still passed before.
    static PROCESS: OnceLock<Option<(Point, AtomicU32)>> = OnceLock::new();

    thread_local! {
        static THREAD: Cell<Option<(Point, u32)>> = const { Cell::new(None) };
    }

    /// What unwinds a thread that was to die.
    #[derive(Debug)]
    pub struct Died(pub Point);

    /// Has this thread unwind with [`Died`] when it passes a point for the `count`th time, or never.
    pub fn arm_thread(point: Option<(Point, u32)>) {
        THREAD.set(point);
    }

    fn of_process() -> Option<(Point, AtomicU32)> {
        let text = std::env::var(super::VARIABLE).ok()?;
        let (name, count) = match text.split_once(':') {
            Some((name, count)) => (name, count.parse().ok()),
            None => (text.as_str(), Some(1)),
        };
        let point = Point::ALL.iter().find(|point| point.name() == name);
        match (point, count) {
            (Some(point), Some(count)) => Some((*point, AtomicU32::new(count))),
            _ => {
                eprintln!("OUTRAM_CRASH_AT={text}: expected NAME or NAME:COUNT of a crash point");
                std::process::exit(2);
            }
        }
    }

    /// Passes a point: alive, mostly.
    pub fn pass(point: Point) {
        if let Some((armed, count)) = PROCESS.get_or_init(of_process)
            && *armed == point
            && count.fetch_sub(1, Ordering::Relaxed) == 1
        {
            let _ = rustix::process::kill_process(
                rustix::process::getpid(),
                rustix::process::Signal::KILL,
            );
            // A confined process may not.
            std::process::abort();
        }
        if let Some((armed, count)) = THREAD.get()
            && armed == point
        {
            THREAD.set((count > 1).then_some((armed, count - 1)));
            if count <= 1 {
                // Without the panic hook's message: nothing is wrong.
                std::panic::resume_unwind(Box::new(Died(point)));
            }
        }
    }
}

#[cfg(debug_assertions)]
pub use armed::{Died, arm_thread, pass};

/// Passes a point.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub fn pass(_: Point) {}

#[cfg(all(test, debug_assertions))]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_thread_dies_where_it_is_told_to_and_nowhere_else() {
        let names: HashSet<_> = Point::ALL.iter().map(|point| point.name()).collect();
        assert_eq!(names.len(), Point::ALL.len(), "a name comes twice");
        arm_thread(Some((Point::EvictBusy, 2)));
        pass(Point::EvictBusy);
        pass(Point::EvictStaged);
        let died = std::panic::catch_unwind(|| pass(Point::EvictBusy)).expect_err("alive");
        assert!(matches!(died.downcast_ref(), Some(Died(Point::EvictBusy))));
        pass(Point::EvictBusy);
    }
}
