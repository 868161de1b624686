//! Fence around `ptrace(2)` for x86-64: the one architecture-dependent part of the hand-over.
//!
//! A [`Tracee`] is one thread seized by the calling thread. The kernel ties it to that thread, so
//! the type cannot be sent to another. Nothing here decides anything: see `thread` for the rules.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::mem::{MaybeUninit, size_of};
use std::ptr;
use std::time::{Duration, Instant};

/// A thread's general registers.
pub(super) type Registers = libc::user_regs_struct;

/// Bytes of a kernel signal set (`_NSIG / 8`), which is not libc's `sigset_t`.
const KERNEL_SIGSET_BYTES: usize = size_of::<u64>();
// From the kernel's include/uapi/linux/ptrace.h; libc names them for some targets only.
const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
const PTRACE_SETSIGMASK: libc::c_uint = 0x420b;

/// Why a traced thread stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// Our interrupt, or a group-stop.
    Event,
    /// Before this signal is delivered.
    Signal(i32),
    /// The process ended.
    Gone,
}

/// A thread that this thread traces.
pub(super) struct Tracee {
    pid: i32,
    not_send: PhantomData<*const ()>,
}

impl Tracee {
    /// Begins tracing, without stopping the thread.
    pub(super) fn seize(pid: i32) -> io::Result<Self> {
        request(libc::PTRACE_SEIZE, pid, 0, 0)?;
        Ok(Self {
            pid,
            not_send: PhantomData,
        })
    }

    /// Asks the thread to stop.
    pub(super) fn interrupt(&self) -> io::Result<()> {
        request(libc::PTRACE_INTERRUPT, self.pid, 0, 0)
    }

    /// Lets the stopped thread run, with a signal delivered first unless 0.
    pub(super) fn run(&self, signal: i32) -> io::Result<()> {
        request(libc::PTRACE_CONT, self.pid, 0, signal as usize)
    }

    /// Lets the stopped thread execute one instruction, with a signal delivered first unless 0.
    pub(super) fn single_step(&self, signal: i32) -> io::Result<()> {
        request(libc::PTRACE_SINGLESTEP, self.pid, 0, signal as usize)
    }

    /// Ends tracing; the stopped thread runs on.
    pub(super) fn detach(&self) -> io::Result<()> {
        request(libc::PTRACE_DETACH, self.pid, 0, 0)
    }

    /// The stopped thread's registers.
    pub(super) fn registers(&self) -> io::Result<Registers> {
        let mut registers = MaybeUninit::<Registers>::zeroed();
        let address = registers.as_mut_ptr() as usize;
        request(libc::PTRACE_GETREGS, self.pid, 0, address)?;
        // SAFETY: zeroed, and the kernel filled it; any bytes are valid integers.
        Ok(unsafe { registers.assume_init() })
    }

    /// Sets the stopped thread's registers.
    pub(super) fn set_registers(&self, registers: &Registers) -> io::Result<()> {
        let address = ptr::from_ref(registers) as usize;
        request(libc::PTRACE_SETREGS, self.pid, 0, address)
    }

    /// The stopped thread's signal mask: bit n-1 for signal n.
    pub(super) fn signal_mask(&self) -> io::Result<u64> {
        let mut mask = 0u64;
        let address = (&raw mut mask) as usize;
        request(PTRACE_GETSIGMASK, self.pid, KERNEL_SIGSET_BYTES, address)?;
        Ok(mask)
    }

    /// Sets the stopped thread's signal mask.
    pub(super) fn set_signal_mask(&self, mask: u64) -> io::Result<()> {
        let address = (&raw const mask) as usize;
        request(PTRACE_SETSIGMASK, self.pid, KERNEL_SIGSET_BYTES, address)
    }

    /// Whether the signal that the thread stands before came from the kernel (a step's end), not
    /// from a process.
    pub(super) fn signal_is_kernels(&self) -> io::Result<bool> {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        let address = info.as_mut_ptr() as usize;
        request(libc::PTRACE_GETSIGINFO, self.pid, 0, address)?;
        // SAFETY: zeroed, and the kernel filled it; any bytes are valid.
        let info = unsafe { info.assume_init() };
        Ok(info.si_code > 0)
    }

    /// Waits for the thread's next stop; `Ok(None)` at the deadline, `None` has none. SIGCHLD must
    /// be blocked by the caller: it is what the wait sleeps on.
    pub(super) fn wait(&self, deadline: Option<Instant>) -> io::Result<Option<Stop>> {
        loop {
            let mut status = 0;
            // SAFETY: the pointer is to a live local.
            let waited =
                unsafe { libc::waitpid(self.pid, &raw mut status, libc::WNOHANG | libc::__WALL) };
            if waited < 0 {
                let error = io::Error::last_os_error();
                return match error.raw_os_error() {
                    Some(libc::ECHILD) => Ok(Some(Stop::Gone)),
                    _ => Err(error),
                };
            }
            if waited > 0 {
                return Ok(Some(classify(status)));
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(None);
            }
            sleep_until_child_changes(deadline);
        }
    }
}

/// What a wait status of a seized thread means.
fn classify(status: i32) -> Stop {
    if !libc::WIFSTOPPED(status) {
        return Stop::Gone;
    }
    match status >> 16 {
        0 => Stop::Signal(libc::WSTOPSIG(status)),
        _ => Stop::Event,
    }
}

/// Sleeps until a SIGCHLD is pending, for at most 100 ms and not beyond the deadline.
fn sleep_until_child_changes(deadline: Option<Instant>) {
    let tick = Duration::from_millis(100);
    let left = deadline.map_or(tick, |deadline| {
        deadline.saturating_duration_since(Instant::now()).min(tick)
    });
    let timeout = libc::timespec {
        tv_sec: 0,
        tv_nsec: i64::from(left.subsec_nanos()),
    };
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the pointer is to a live local, which this initialises.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: initialised by the line above; SIGCHLD is a valid signal.
    unsafe { libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD) };
    // SAFETY: set and timeout are live and initialised; no information is asked for. Its result
    // does not matter: the caller looks again whatever woke it.
    unsafe { libc::sigtimedwait(set.as_ptr(), ptr::null_mut(), &raw const timeout) };
}

/// One `ptrace` request. `data` is a number or the address of a live object of the size that the
/// request reads or writes; the callers above uphold that.
fn request(request: libc::c_uint, pid: i32, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: every caller in this module passes integers, or the address of a live local of the
    // request's type.
    let result = unsafe { libc::ptrace(request, pid, address, data) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
