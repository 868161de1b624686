//! Notices that QEMU was told to terminate.
//!
//! A QEMU whose vCPU waits in an unanswered fault cannot obey SIGTERM, and `virsh destroy` sends
//! SIGKILL only ten seconds later. The kernel counts for us how often SIGTERM was delivered to
//! QEMU's main thread (the tracepoint `signal:signal_deliver`, by `perf_event_open(2)`), so that
//! [`super::guest`] can help a QEMU along that was told to end and cannot. Where the kernel does not
//! offer it, libvirt's own SIGKILL ends the guest, later.
#![allow(unsafe_code)]

use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use crate::handover::Vmm;
use crate::handover::powers::Errand;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

/// The tracepoint, below a tracefs.
const TRACEPOINT: &str = "events/signal/signal_deliver/id";

/// Where tracefs is usually mounted.
const TRACEFS: &str = "/sys/kernel/tracing";

const PERF_TYPE_TRACEPOINT: u32 = 2;
const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 8;
/// `_IOW('$', 6, char *)`.
const PERF_EVENT_IOC_SET_FILTER: libc::c_ulong = 0x4008_2406;

/// `struct perf_event_attr`, version 0: enough to count.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    breakpoint_address: u64,
}

const _: () = assert!(size_of::<Attributes>() == 64);

/// Counts SIGTERMs delivered to a process's main thread.
pub(super) struct Terminations {
    counter: fs::File,
}

impl Terminations {
    /// Starts counting for a VMM.
    pub(super) fn watch(vmm: &Vmm) -> io::Result<Self> {
        let counter = match vmm.powers().are_own() {
            true => count(vmm.pid)?,
            false => vmm.powers().fetch(&Errand::CountTerminations)?,
        };
        Ok(Self {
            counter: counter.into(),
        })
    }

    /// Whether one was delivered since the start.
    pub(super) fn seen(&self) -> bool {
        let mut count = [0; 8];
        (&self.counter).read_exact(&mut count).is_ok() && u64::from_ne_bytes(count) > 0
    }
}

/// A counter of SIGTERMs delivered to the main thread of process `pid`.
pub(super) fn count(pid: i32) -> io::Result<OwnedFd> {
    let attributes = Attributes {
        kind: PERF_TYPE_TRACEPOINT,
        size: size_of::<Attributes>() as u32,
        config: tracepoint()?,
        ..Attributes::default()
    };
    // SAFETY: the first argument is a live struct whose size it names; the rest are integers.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attributes,
            pid,
            -1,
            -1,
            PERF_FLAG_FD_CLOEXEC,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel returned this descriptor a moment ago; nobody else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let filter = format!("sig == {}\0", libc::SIGTERM);
    // SAFETY: the argument is a live string that ends in NUL.
    let set = unsafe { libc::ioctl(fd.as_raw_fd(), PERF_EVENT_IOC_SET_FILTER, filter.as_ptr()) };
    if set < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

/// The tracepoint's number; through a tracefs mounted nowhere if there is none.
fn tracepoint() -> io::Result<u64> {
    let text = match fs::read_to_string(format!("{TRACEFS}/{TRACEPOINT}")) {
        Ok(text) => text,
        Err(_) => {
            let context = rustix::mount::fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
            rustix::mount::fsconfig_create(context.as_fd())?;
            let mount = rustix::mount::fsmount(
                context.as_fd(),
                FsMountFlags::FSMOUNT_CLOEXEC,
                MountAttrFlags::MOUNT_ATTR_RDONLY,
            )?;
            let file = rustix::fs::openat(
                &mount,
                TRACEPOINT,
                OFlags::RDONLY | OFlags::CLOEXEC,
                Mode::empty(),
            )?;
            let mut text = String::new();
            fs::File::from(file).read_to_string(&mut text)?;
            text
        }
    };
    text.trim()
        .parse()
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the tracepoint has no number"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_delivered_sigterm_is_seen_and_no_other_signal() {
        let child = Command::new("sh")
            .args(["-c", "trap : TERM USR1; echo; while :; do sleep 0.05; done"])
            .stdout(std::process::Stdio::piped())
            .spawn();
        let mut child = child.expect("a shell starts");
        let mut line = [0];
        child
            .stdout
            .as_mut()
            .expect("piped")
            .read_exact(&mut line)
            .expect("it says that it runs");
        let pid = child.id() as i32;
        let vmm = Vmm::open(pid).expect("it runs");
        let watched = Terminations::watch(&vmm);
        let Ok(terminations) = watched else {
            child.kill().expect("it runs");
            child.wait().expect("it was killed");
            let why = format!("this kernel does not count signals: {:?}", watched.err());
            return crate::skip_test(&why);
        };
        let send = |signal| {
            // SAFETY: takes integers only; the child is ours and not yet reaped.
            assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
        };
        send(libc::SIGUSR1);
        std::thread::sleep(Duration::from_millis(200));
        assert!(!terminations.seen());
        send(libc::SIGTERM);
        let deadline = Instant::now() + Duration::from_secs(120);
        while !terminations.seen() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(terminations.seen());
        child.kill().expect("it runs");
        child.wait().expect("it was killed");
    }
}
