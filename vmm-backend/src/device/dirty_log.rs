//! The log of guest pages that the device writes, for a front end that migrates or saves its guest.
//!
//! While a migration runs, QEMU has the vCPUs' stores tracked by the kernel; those of a vhost-user
//! device pass its mapping by, so the device itself sets a bit for each page *after* it wrote there,
//! in memory that the front end shares with it (vhost-user specification, "Migration"). QEMU takes
//! bits by atomic exchange, so they are set by atomic OR.
//!
//! A bit set too early would be taken before the store it stands for; one set in a log that is no
//! longer read would be lost. So a mark holds the lock for reading, and a log is replaced under the
//! lock for writing: once the front end has its answer, nothing marks the former log any more.
//!
//! The module knows neither rings nor requests. Its lock is a leaf.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustix::fs::SealFlags;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

/// Bytes of guest memory that one bit stands for: `VHOST_LOG_PAGE` of the specification.
const LOG_PAGE: u64 = 4096;
/// Pages that one byte of the log stands for.
const PAGES_PER_BYTE: u64 = 8;

/// Why a log cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum LogError {
    #[error("the dirty log of {0} bytes at {1:#x} does not lie within its file of {2} bytes")]
    OutsideFile(u64, u64, u64),
    #[error(
        "the file of the dirty log could be shortened while it is used: a memfd with F_SEAL_SHRINK is expected"
    )]
    NotSealed,
    #[error(
        "the dirty log of {log_bytes} bytes is too small for guest memory up to {guest_end:#x}: {needed_bytes} bytes are needed"
    )]
    TooSmall {
        log_bytes: u64,
        guest_end: u64,
        needed_bytes: u64,
    },
    #[error("the dirty log cannot be mapped")]
    Map(#[source] io::Error),
}

/// A log that the front end reads.
struct Mapped {
    region: MmapRegion,
}

impl Mapped {
    fn map(file: File, offset: u64, length: u64) -> Result<Self, LogError> {
        let file_length = file.metadata().map_err(LogError::Map)?.len();
        let end = offset.checked_add(length);
        if length == 0 || end.is_none_or(|end| end > file_length) {
            return Err(LogError::OutsideFile(length, offset, file_length));
        }
        // Behind the end of a shortened file an access is a SIGBUS, the end of this process.
        let seals = rustix::fs::fcntl_get_seals(&file);
        if !seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return Err(LogError::NotSealed);
        }
        let length = usize::try_from(length).map_err(|e| LogError::Map(io::Error::other(e)))?;
        let region = MmapRegion::from_file(FileOffset::new(file, offset), length)
            .map_err(|e| LogError::Map(io::Error::other(e)))?;
        Ok(Self { region })
    }

    fn bytes(&self) -> u64 {
        self.region.size() as u64
    }

    fn check_reach(&self, guest_end: u64) -> Result<(), LogError> {
        let needed_bytes = guest_end.div_ceil(LOG_PAGE * PAGES_PER_BYTE);
        if self.bytes() < needed_bytes {
            return Err(LogError::TooSmall {
                log_bytes: self.bytes(),
                guest_end,
                needed_bytes,
            });
        }
        Ok(())
    }

    fn mark(&self, address: u64, length: u64) {
        let Some(last) = length
            .checked_sub(1)
            .map(|more| address.saturating_add(more))
        else {
            return;
        };
        for page in address / LOG_PAGE..=last / LOG_PAGE {
            let at = usize::try_from(page / PAGES_PER_BYTE).unwrap_or(usize::MAX);
            match self.region.get_atomic_ref::<AtomicU8>(at) {
                Ok(byte) => {
                    byte.fetch_or(1 << (page % PAGES_PER_BYTE), Ordering::SeqCst);
                }
                // Logs reach to the table's end, and nothing is written outside of the table.
                Err(error) => tracing::error!(page, %error, "a written page is not in the log"),
            }
        }
    }
}

#[derive(Default)]
struct State {
    log: Option<Mapped>,
    /// Whether the front end acknowledged `VHOST_F_LOG_ALL`.
    wanted: bool,
    /// End of the guest memory that the device can write.
    guest_end: u64,
}

/// The device's dirty log: none, or one that is wanted or not.
#[derive(Default)]
pub(super) struct DirtyLog(RwLock<State>);

impl DirtyLog {
    fn read(&self) -> RwLockReadGuard<'_, State> {
        // A change under the lock is one assignment.
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a log in the place of the present one: `length` bytes of a file from `offset` on.
    pub(super) fn replace(&self, file: File, offset: u64, length: u64) -> Result<(), LogError> {
        let log = Mapped::map(file, offset, length)?;
        let mut state = self.write();
        log.check_reach(state.guest_end)?;
        state.log = Some(log);
        Ok(())
    }

    /// The memory table now ends there. An error where the log does not reach that far.
    pub(super) fn set_guest_end(&self, guest_end: u64) -> Result<(), LogError> {
        let mut state = self.write();
        if let Some(log) = state.log.as_ref().filter(|_| state.wanted) {
            log.check_reach(guest_end)?;
        }
        state.guest_end = guest_end;
        Ok(())
    }

    /// Starts the marking, or ends it and forgets the log: the front end gives a new one each time.
    /// An error where the log does not reach as far as the table.
    pub(super) fn want(&self, wanted: bool) -> Result<(), LogError> {
        let mut state = self.write();
        match &state.log {
            Some(log) if wanted => log.check_reach(state.guest_end)?,
            _ if wanted => {}
            _ => state.log = None,
        }
        state.wanted = wanted;
        Ok(())
    }

    /// Forgets the log, and that one was wanted.
    pub(super) fn clear(&self) {
        *self.write() = State::default();
    }

    /// Whether marks are wanted that there is no log for yet: until it comes, nothing may be written.
    pub(super) fn is_awaited(&self) -> bool {
        let state = self.read();
        state.wanted && state.log.is_none()
    }

    /// Whether there is a log.
    pub(super) fn is_there(&self) -> bool {
        self.read().log.is_some()
    }

    /// Notes that bytes at a guest address *have been* written.
    pub(super) fn mark(&self, address: u64, length: u64) {
        let state = self.read();
        if let Some(log) = state.log.as_ref().filter(|_| state.wanted) {
            log.mark(address, length);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use rustix::fs::MemfdFlags;

    use super::*;

    fn log_file(bytes: u64, seals: SealFlags) -> File {
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("log", flags).expect("a memfd"));
        file.set_len(bytes).expect("room");
        rustix::fs::fcntl_add_seals(&file, seals).expect("sealed");
        file
    }

    fn wanted_log(bytes: u64, guest_end: u64) -> (DirtyLog, File) {
        let file = log_file(bytes, SealFlags::SHRINK);
        let log = DirtyLog::default();
        log.set_guest_end(guest_end).expect("no log yet");
        let ours = file.try_clone().expect("descriptors");
        log.replace(ours, 0, bytes).expect("large enough");
        log.want(true).expect("large enough");
        (log, file)
    }

    fn contents(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; file.metadata().expect("open").len() as usize];
        file.read_exact_at(&mut bytes, 0).expect("read");
        bytes
    }

    #[test]
    fn every_page_that_a_write_touches_is_marked() {
        let (log, file) = wanted_log(16, 16 * 8 * LOG_PAGE);
        log.mark(0, 1);
        log.mark(3 * LOG_PAGE - 1, 2);
        log.mark(7 * LOG_PAGE, 2 * LOG_PAGE);
        log.mark(127 * LOG_PAGE, LOG_PAGE);
        log.mark(64 * LOG_PAGE, 0);
        let mut expected = [0; 16];
        expected[0] = 0b1000_1101;
        expected[1] = 0b0000_0001;
        expected[15] = 0b1000_0000;
        assert_eq!(contents(&file), expected);
    }

    #[test]
    fn nothing_is_marked_while_it_is_not_wanted() {
        let (log, file) = wanted_log(16, 16 * 8 * LOG_PAGE);
        log.want(false).expect("always");
        log.mark(0, LOG_PAGE);
        assert_eq!(contents(&file), [0; 16]);
        assert!(!log.is_awaited() && !log.is_there());
        // As a front end that starts its device amid a migration says it.
        log.want(true).expect("no log yet");
        log.mark(0, LOG_PAGE);
        assert!(log.is_awaited());
        let ours = file.try_clone().expect("descriptors");
        log.replace(ours, 0, 16).expect("large enough");
        assert!(!log.is_awaited() && log.is_there());
        log.mark(0, LOG_PAGE);
        log.clear();
        log.mark(LOG_PAGE, LOG_PAGE);
        assert_eq!(contents(&file)[0], 1);
    }

    #[test]
    fn a_former_log_is_no_longer_marked() {
        let (log, first) = wanted_log(16, 16 * 8 * LOG_PAGE);
        log.mark(0, 1);
        let second = log_file(4096, SealFlags::SHRINK);
        let ours = second.try_clone().expect("descriptors");
        // Within its file at an offset, as the message may say.
        log.replace(ours, 0, 32).expect("large enough");
        log.mark(LOG_PAGE, 1);
        assert_eq!(contents(&first)[0], 1);
        assert_eq!(contents(&second)[0], 2);
    }

    #[test]
    fn a_log_that_does_not_reach_is_refused() {
        let log = DirtyLog::default();
        log.set_guest_end(8 * LOG_PAGE * 16 + 1).expect("no log");
        let file = || log_file(4096, SealFlags::SHRINK);
        let error = log.replace(file(), 0, 16).expect_err("one byte short");
        assert!(matches!(
            error,
            LogError::TooSmall {
                needed_bytes: 17,
                ..
            }
        ));
        log.replace(file(), 0, 17).expect("just enough");
        log.want(true).expect("just enough");
        let more = 8 * LOG_PAGE * 17 + 1;
        assert!(log.set_guest_end(more).is_err(), "memory was plugged");
        for (offset, length) in [(0, 0), (0, 4097), (4096, 1), (u64::MAX, 2)] {
            let error = log.replace(file(), offset, length).expect_err("outside");
            assert!(matches!(error, LogError::OutsideFile(..)), "{error}");
        }
        let loose = log_file(4096, SealFlags::GROW);
        let error = log.replace(loose, 0, 4096).expect_err("can be shortened");
        assert!(matches!(error, LogError::NotSealed), "{error}");
    }

    #[test]
    fn marks_of_several_threads_in_one_byte_all_stay() {
        let (log, file) = wanted_log(16, 16 * 8 * LOG_PAGE);
        std::thread::scope(|scope| {
            for page in 0..8 {
                let log = &log;
                scope.spawn(move || {
                    for byte in 0..16 {
                        log.mark((byte * 8 + page) * LOG_PAGE, 1);
                    }
                });
            }
        });
        assert_eq!(contents(&file), [0xff; 16]);
    }
}
