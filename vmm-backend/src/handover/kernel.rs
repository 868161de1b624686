//! Fence around the kernel interfaces of the hand-over that std does not offer: pidfds, peer
//! credentials, passed descriptors, signal masks.
#![allow(unsafe_code)]

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use super::Peer;

/// Turns a C return value into a result.
fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Takes ownership of a descriptor that a system call just returned.
fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    let number = check(result)? as RawFd;
    // SAFETY: the kernel returned this descriptor to us a moment ago; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// `pidfd_open(2)`.
pub(super) fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes integers only; creates a close-on-exec descriptor.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
}

/// `pidfd_getfd(2)`.
pub(super) fn pidfd_getfd(pidfd: BorrowedFd<'_>, number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: takes integers only; creates a close-on-exec descriptor.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0) })
}

/// `SO_PEERCRED`.
pub(super) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<Peer> {
    let mut credentials = MaybeUninit::<libc::ucred>::zeroed();
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: both pointers are to live locals; length says how large the first is.
    check(libc::c_long::from(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            credentials.as_mut_ptr().cast(),
            &raw mut length,
        )
    }))?;
    // SAFETY: zeroed above, and any bytes make a valid ucred.
    let credentials = unsafe { credentials.assume_init() };
    Ok(Peer {
        pid: credentials.pid,
        uid: credentials.uid,
        gid: credentials.gid,
    })
}

/// Waits until a descriptor is readable; `None` waits for ever. False on time-out.
pub(super) fn poll_readable(fd: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<bool> {
    let mut poll = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    let timeout_ms = timeout.map_or(-1, |timeout| {
        timeout.as_millis().min(i32::MAX as u128) as i32
    });
    // SAFETY: the pointer is to one live pollfd.
    let ready = check(libc::c_long::from(unsafe {
        libc::poll(&raw mut poll, 1, timeout_ms)
    }))?;
    Ok(ready > 0)
}

/// An error unless the descriptor is a userfaultfd.
pub(super) fn expect_uffd(fd: BorrowedFd<'_>) -> io::Result<()> {
    let target = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    if target.as_os_str() == "anon_inode:[userfaultfd]" {
        Ok(())
    } else {
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("it is {}, not a userfaultfd", target.display()),
        ))
    }
}
