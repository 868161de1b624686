//! What the hook remembers from `restore begin` or `migrate begin` until `prepare begin`: that the
//! start to come is none, for the guest's memory arrives from elsewhere.
//!
//! libvirt calls the hook once for each, and nothing in the XML of `prepare` tells. The note lies
//! beside the guest's run directory, is taken away by the `prepare` that it was made for, and by
//! `release`. Where an arrival fails before either, the note is of no use to anybody: a later start
//! does not heed one that another libvirtd left, or that is older than `NOTE_LIFE`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use outram_wire::incoming::Incoming;
use outram_wire::server::clock::BootTime;
use outram_wire::units::VmId;

use crate::process;

/// Between the two hooks libvirt does little: milliseconds, seconds where it examines QEMU anew. A
/// note given up too early would cost a saved guest its disk, one kept too long costs next to
/// nothing: so the bound is generous.
const NOTE_LIFE: Duration = Duration::from_secs(300);

/// The libvirt daemon that called this process, told apart from all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    pid: u32,
    start_ticks: u64,
}

impl Caller {
    /// The parent of this process.
    pub fn of_this_process() -> Self {
        let pid = std::os::unix::process::parent_id();
        Self {
            pid,
            // Of a parent that is gone by now only the id is left.
            start_ticks: process::start_ticks(pid).unwrap_or(0),
        }
    }
}

/// Where the note on a guest lies.
pub fn note_file(run: &Path, vm: VmId) -> PathBuf {
    run.join(format!("{vm}.incoming"))
}

/// Notes that the guest's next start is an arrival.
pub fn note(run: &Path, vm: VmId, incoming: Incoming, caller: Caller) -> io::Result<()> {
    let Caller { pid, start_ticks } = caller;
    let now_ms = BootTime::now().as_millis();
    fs::create_dir_all(run)?;
    // Beside, then renamed: half a note would be none.
    let file = note_file(run, vm);
    let fresh = file.with_extension("incoming-new");
    fs::write(&fresh, format!("{incoming} {pid} {start_ticks} {now_ms}\n"))?;
    fs::rename(&fresh, &file)
}

/// Takes the note away; what it says, if it was made for this start.
pub fn take(run: &Path, vm: VmId, caller: Caller) -> Option<Incoming> {
    let text = fs::read_to_string(note_file(run, vm)).ok()?;
    forget(run, vm);
    read(&text, caller, BootTime::now())
}

/// Takes the note away, whatever it says.
pub fn forget(run: &Path, vm: VmId) {
    // There is none most of the time; one that cannot be removed grows too old to be heeded.
    let _ = fs::remove_file(note_file(run, vm));
}

fn read(text: &str, caller: Caller, now: BootTime) -> Option<Incoming> {
    let mut words = text.split_whitespace();
    let incoming = words.next()?.parse().ok()?;
    let noted_by = Caller {
        pid: words.next()?.parse().ok()?,
        start_ticks: words.next()?.parse().ok()?,
    };
    let noted_ms: u64 = words.next()?.parse().ok()?;
    let now_ms = now.as_millis();
    let fresh = noted_ms <= now_ms && now_ms - noted_ms <= NOTE_LIFE.as_millis() as u64;
    (noted_by == caller && fresh).then_some(incoming)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALLER: Caller = Caller {
        pid: 7,
        start_ticks: 99,
    };

    fn vm() -> VmId {
        VmId(uuid::Uuid::from_u128(5))
    }

    #[test]
    fn a_note_serves_one_start() {
        let run = tempfile::tempdir().expect("a directory");
        let run = run.path().join("made-when-needed");
        assert_eq!(take(&run, vm(), CALLER), None);
        for incoming in [Incoming::Restore, Incoming::Migration] {
            note(&run, vm(), incoming, CALLER).expect("written");
            assert_eq!(take(&run, vm(), CALLER), Some(incoming));
            assert_eq!(take(&run, vm(), CALLER), None);
        }
        note(&run, vm(), Incoming::Restore, CALLER).expect("written");
        forget(&run, vm());
        assert_eq!(take(&run, vm(), CALLER), None);
        assert_eq!(fs::read_dir(&run).expect("there").count(), 0);
    }

    #[test]
    fn a_note_of_another_time_or_daemon_is_taken_away_unheeded() {
        let run = tempfile::tempdir().expect("a directory");
        let other = Caller {
            start_ticks: 100,
            ..CALLER
        };
        note(run.path(), vm(), Incoming::Migration, CALLER).expect("written");
        assert_eq!(take(run.path(), vm(), other), None);
        assert_eq!(take(run.path(), vm(), CALLER), None);

        let now = BootTime::now();
        let at = |ms: u64| read(&format!("restore 7 99 {ms}"), CALLER, now);
        let now_ms = now.as_millis();
        assert_eq!(at(now_ms), Some(Incoming::Restore));
        assert_eq!(at(now_ms.saturating_sub(299_000)), Some(Incoming::Restore));
        assert_eq!(at(now_ms.saturating_sub(301_000)), None);
        assert_eq!(at(now_ms + 1), None, "of an earlier life of the machine");
        for broken in ["", "restore", "restore x y z", "other 7 99 0"] {
            assert_eq!(read(broken, CALLER, now), None, "{broken}");
        }
    }
}
