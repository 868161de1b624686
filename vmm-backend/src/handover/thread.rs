//! The VMM's main thread, borrowed for a few system calls and given back as it was.
//!
//! Invariants: the thread is taken only where it stands in a system call, so that the kernel
//! restarts that call by itself; every stop is checked; whatever ends the borrowing, registers,
//! signal mask and scratch memory are put back before it ([`BorrowedThread::give_back`], also on
//! drop). While registers are altered there is no time-out: letting go then would kill the VMM.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::ptrace::{Registers, Stop, Tracee};

/// x86-64's `syscall` instruction.
const SYSCALL_INSTRUCTION: [u8; 2] = [0x0f, 0x05];
/// Code segment of 64-bit user code (`__USER_CS`); 32-bit code numbers its calls otherwise.
const USER_CS_64: u64 = 0x33;
/// Below the stack pointer, this many bytes belong to the function that runs (System V ABI).
const RED_ZONE_BYTES: u64 = 128;
/// Bytes below the red zone that are used and put back.
pub(super) const SCRATCH_BYTES: usize = 256;
/// Every signal but SIGTRAP: the kernel resets the disposition of a forced signal that it finds
/// blocked, and each step ends in a forced SIGTRAP.
const ALL_BUT_TRAP: u64 = !(1 << (libc::SIGTRAP - 1));
/// How long the thread runs before it is looked at again where it was not in a system call.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// Why a thread could not be borrowed, or an injected call not be made.
#[derive(Debug, thiserror::Error)]
pub(super) enum ThreadError {
    /// The VMM ended.
    #[error("the VMM ended")]
    Gone,
    /// Tracing is not permitted.
    #[error("{0}")]
    NotPermitted(String),
    /// It was not seen in a system call in time.
    #[error("the main thread did not wait in a system call within {0:?}")]
    Busy(Duration),
    /// A step failed; the text says which.
    #[error("{step}: {source}")]
    Step {
        /// What was being done.
        step: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A step ended elsewhere than it must.
    #[error("an injected call met {0}")]
    Astray(String),
}

/// Names the step of an error; a vanished process is told apart.
fn at(step: &'static str) -> impl Fn(io::Error) -> ThreadError {
    move |source| match source.raw_os_error() {
        Some(libc::ESRCH) => ThreadError::Gone,
        _ => ThreadError::Step { step, source },
    }
}

/// A VMM's main thread that executes system calls for us.
pub(super) struct BorrowedThread {
    tracee: Tracee,
    memory: File,
    registers: Registers,
    signal_mask: u64,
    scratch: [u8; SCRATCH_BYTES],
    borrowed: bool,
}

impl BorrowedThread {
    /// Stops the main thread of `pid` where it stands in a system call.
    pub(super) fn borrow(pid: i32, timeout: Duration) -> Result<Self, ThreadError> {
        let started = Instant::now();
        let tracee = Tracee::seize(pid).map_err(|source| refused(pid, source))?;
        let memory = OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))
            .map_err(at("opening /proc/PID/mem"))?;
        let registers = stop_in_call(&tracee, &memory, started, timeout)?;
        let prepared = save(&tracee, &memory, &registers);
        let (signal_mask, scratch) = match prepared {
            Ok(saved) => saved,
            Err(error) => {
                // Nothing is altered yet; failing to detach means that the process is gone.
                let _ = tracee.detach();
                return Err(error);
            }
        };
        let thread = Self {
            tracee,
            memory,
            registers,
            signal_mask,
            scratch,
            borrowed: true,
        };
        // From here on, dropping gives back.
        thread
            .tracee
            .set_signal_mask(ALL_BUT_TRAP)
            .map_err(at("blocking its signals"))?;
        Ok(thread)
    }

    /// Where the scratch memory lies in the VMM.
    pub(super) fn scratch_address(&self) -> u64 {
        scratch_address(&self.registers)
    }

    /// Fills the scratch memory from its start.
    pub(super) fn write_scratch(&self, bytes: &[u8]) -> Result<(), ThreadError> {
        debug_assert!(bytes.len() <= SCRATCH_BYTES);
        self.memory
            .write_all_at(bytes, self.scratch_address())
            .map_err(at("writing below its stack"))
    }

    /// Reads the scratch memory.
    pub(super) fn read_scratch(&self) -> Result<[u8; SCRATCH_BYTES], ThreadError> {
        read_scratch(&self.memory, &self.registers)
    }

    /// Makes the thread execute a system call. The inner result is the call's own.
    pub(super) fn call(
        &mut self,
        number: libc::c_long,
        arguments: &[u64],
    ) -> Result<Result<u64, io::Error>, ThreadError> {
        let mut registers = self.registers;
        registers.rip -= SYSCALL_INSTRUCTION.len() as u64;
        registers.rax = number as u64;
        // Not in a system call, as far as the kernel is concerned: nothing is to be restarted.
        registers.orig_rax = u64::MAX;
        let argument = |index: usize| arguments.get(index).copied().unwrap_or(0);
        registers.rdi = argument(0);
        registers.rsi = argument(1);
        registers.rdx = argument(2);
        registers.r10 = argument(3);
        registers.r8 = argument(4);
        registers.r9 = argument(5);
        self.tracee
            .set_registers(&registers)
            .map_err(at("setting its registers"))?;
        let result = self.step_over_call()? as i64;
        Ok(if (-4095..0).contains(&result) {
            Err(io::Error::from_raw_os_error(-result as i32))
        } else {
            Ok(result as u64)
        })
    }

    /// Steps until the `syscall` instruction is done; its `rax`.
    fn step_over_call(&self) -> Result<u64, ThreadError> {
        let mut signal = 0;
        loop {
            self.tracee.single_step(signal).map_err(at("stepping"))?;
            signal = 0;
            match self.tracee.wait(None).map_err(at("waiting for a step"))? {
                Some(Stop::Gone) => return Err(ThreadError::Gone),
                // A group-stop, or our own late interrupt: step on.
                Some(Stop::Event) | None => {}
                Some(Stop::Signal(libc::SIGTRAP)) if self.signal_is_kernels()? => {
                    let registers = self.registers_now()?;
                    if registers.rip == self.registers.rip {
                        return Ok(registers.rax);
                    }
                    let text = format!("a trap at {:#x}", registers.rip);
                    return Err(ThreadError::Astray(text));
                }
                Some(Stop::Signal(
                    fatal @ (libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE),
                )) => return Err(ThreadError::Astray(format!("signal {fatal}"))),
                // Cannot be blocked (SIGSTOP), or sent as SIGTRAP by somebody: let it through.
                Some(Stop::Signal(other)) => signal = other,
            }
        }
    }

    fn signal_is_kernels(&self) -> Result<bool, ThreadError> {
        self.tracee
            .signal_is_kernels()
            .map_err(at("reading its signal"))
    }

    fn registers_now(&self) -> Result<Registers, ThreadError> {
        self.tracee.registers().map_err(at("reading its registers"))
    }

    /// Puts everything back and lets the thread go: its interrupted call restarts by itself.
    pub(super) fn give_back(mut self) -> Result<(), ThreadError> {
        self.restore()
    }

    fn restore(&mut self) -> Result<(), ThreadError> {
        if !self.borrowed {
            return Ok(());
        }
        self.borrowed = false;
        // Each is tried whatever became of the others: more put back is better than less.
        let memory = self.write_scratch(&self.scratch.clone());
        let registers = self.tracee.set_registers(&self.registers);
        let mask = self.tracee.set_signal_mask(self.signal_mask);
        let detached = self.tracee.detach();
        memory?;
        registers.map_err(at("restoring its registers"))?;
        mask.map_err(at("restoring its signal mask"))?;
        detached.map_err(at("detaching"))
    }
}

impl Drop for BorrowedThread {
    fn drop(&mut self) {
        if let Err(error) = self.restore() {
            eprintln!("outram inject: giving the thread back: {error}");
        }
    }
}

/// Explains a refused `PTRACE_SEIZE`.
fn refused(pid: i32, source: io::Error) -> ThreadError {
    if source.raw_os_error() == Some(libc::ESRCH) {
        return ThreadError::Gone;
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map_or("", str::trim)
    };
    // An ending process is refused like a forbidden one.
    if matches!(field("State:").chars().next(), None | Some('Z' | 'X')) {
        return ThreadError::Gone;
    }
    let tracer = field("TracerPid:");
    ThreadError::NotPermitted(match tracer {
        "0" => source.to_string(),
        tracer => format!("{source}: process {tracer} (a debugger?) traces it already"),
    })
}

/// Interrupts the thread until it stands in a system call; its registers there.
fn stop_in_call(
    tracee: &Tracee,
    memory: &File,
    started: Instant,
    timeout: Duration,
) -> Result<Registers, ThreadError> {
    let deadline = started + timeout;
    loop {
        tracee.interrupt().map_err(at("interrupting"))?;
        loop {
            match tracee
                .wait(Some(deadline))
                .map_err(at("waiting for a stop"))?
            {
                // It does not even stop: our end lets it run on, untouched.
                None => return Err(ThreadError::Busy(started.elapsed())),
                Some(Stop::Gone) => return Err(ThreadError::Gone),
                Some(Stop::Event) => break,
                Some(Stop::Signal(signal)) => tracee.run(signal).map_err(at("resuming"))?,
            }
        }
        let registers = tracee.registers().map_err(at("reading its registers"))?;
        if stands_in_call(&registers, memory) {
            return Ok(registers);
        }
        if Instant::now() >= deadline {
            tracee.detach().map_err(at("detaching"))?;
            return Err(ThreadError::Busy(started.elapsed()));
        }
        tracee.run(0).map_err(at("resuming"))?;
        std::thread::sleep(RETRY_PAUSE);
    }
}

/// Whether a thread with these registers stands in a 64-bit system call.
fn stands_in_call(registers: &Registers, memory: &File) -> bool {
    let mut instruction = [0; SYSCALL_INSTRUCTION.len()];
    registers.cs == USER_CS_64
        && (registers.orig_rax as i64) >= 0
        && registers.rip > instruction.len() as u64
        && memory
            .read_exact_at(
                &mut instruction,
                registers.rip - SYSCALL_INSTRUCTION.len() as u64,
            )
            .is_ok()
        && instruction == SYSCALL_INSTRUCTION
}

/// What has to be put back besides the registers.
fn save(
    tracee: &Tracee,
    memory: &File,
    registers: &Registers,
) -> Result<(u64, [u8; SCRATCH_BYTES]), ThreadError> {
    let mask = tracee
        .signal_mask()
        .map_err(at("reading its signal mask"))?;
    Ok((mask, read_scratch(memory, registers)?))
}

fn scratch_address(registers: &Registers) -> u64 {
    (registers.rsp - RED_ZONE_BYTES - SCRATCH_BYTES as u64) & !63
}

fn read_scratch(memory: &File, registers: &Registers) -> Result<[u8; SCRATCH_BYTES], ThreadError> {
    let mut scratch = [0; SCRATCH_BYTES];
    memory
        .read_exact_at(&mut scratch, scratch_address(registers))
        .map_err(at("reading below its stack"))?;
    Ok(scratch)
}
