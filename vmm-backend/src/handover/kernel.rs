//! Fence around the kernel interfaces of the hand-over that std does not offer: pidfds, peer
//! credentials, passed descriptors, signal masks.
#![allow(unsafe_code)]

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

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
    let until = timeout.map(|timeout| Instant::now() + timeout);
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout_ms = left.map_or(-1, |left| left.as_millis().min(i32::MAX as u128) as i32);
        // SAFETY: the pointer is to one live pollfd.
        let ready = check(libc::c_long::from(unsafe {
            libc::poll(&raw mut poll, 1, timeout_ms)
        }));
        match ready {
            // Of a signal that is handled here, which says nothing of the descriptor; also where there was
            // nothing to wait for.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            ready => return Ok(ready? > 0),
        }
    }
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

/// Sends one byte with a descriptor over a unix socket.
pub(super) fn send_descriptor(
    socket: BorrowedFd<'_>,
    byte: u8,
    descriptor: BorrowedFd<'_>,
) -> io::Result<()> {
    const CONTROL_BYTES: usize = 24;
    let mut byte = byte;
    let mut part = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    let mut control = [0u64; CONTROL_BYTES / 8];
    let header = libc::cmsghdr {
        // CMSG_LEN(sizeof(int)): the header and one descriptor.
        cmsg_len: size_of::<libc::cmsghdr>() + size_of::<RawFd>(),
        cmsg_level: libc::SOL_SOCKET,
        cmsg_type: libc::SCM_RIGHTS,
    };
    // SAFETY: the buffer is aligned for, and larger than, a cmsghdr.
    unsafe { control.as_mut_ptr().cast::<libc::cmsghdr>().write(header) };
    control[size_of::<libc::cmsghdr>() / 8] = descriptor.as_raw_fd() as u64;
    // SAFETY: all zeros make a valid msghdr (null pointers, zero lengths).
    let mut message = unsafe { MaybeUninit::<libc::msghdr>::zeroed().assume_init() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_BYTES;
    // SAFETY: the message points to live locals of the lengths it says.
    let sent = check(unsafe {
        libc::sendmsg(
            socket.as_raw_fd(),
            &raw const message,
            libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
        )
    } as libc::c_long)?;
    if sent == 1 {
        Ok(())
    } else {
        Err(io::Error::from(io::ErrorKind::WriteZero))
    }
}

/// Receives one byte without waiting; passed descriptors are dropped.
fn receive_byte(socket: BorrowedFd<'_>, flags: libc::c_int) -> io::Result<u8> {
    let mut byte = 0u8;
    // SAFETY: the pointer is to one live byte.
    let received = check(unsafe {
        libc::recv(
            socket.as_raw_fd(),
            (&raw mut byte).cast(),
            1,
            flags | libc::MSG_DONTWAIT,
        )
    } as libc::c_long)?;
    if received == 1 {
        Ok(byte)
    } else {
        Err(io::Error::from(io::ErrorKind::UnexpectedEof))
    }
}

/// The next byte to be read from a socket, left where it is.
pub(super) fn peek_byte(socket: BorrowedFd<'_>) -> io::Result<u8> {
    receive_byte(socket, libc::MSG_PEEK)
}

/// Takes the next byte out of a socket.
pub(super) fn discard_byte(socket: BorrowedFd<'_>) -> io::Result<()> {
    receive_byte(socket, 0).map(|_| ())
}

/// Blocks every signal of this thread (SIGKILL and SIGSTOP cannot be).
pub(super) fn block_all_signals() -> io::Result<()> {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the pointer is to a live local, which this initialises.
    unsafe { libc::sigfillset(set.as_mut_ptr()) };
    // SAFETY: the set is initialised; the old one is not asked for.
    let result =
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()) };
    match result {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Starts a session of our own, so that nothing sent to our parent's reaches us.
pub(super) fn own_session() -> io::Result<()> {
    // SAFETY: takes nothing.
    check(libc::c_long::from(unsafe { libc::setsid() })).map(|_| ())
}

/// Whether the other end of a pipe that we write to is closed.
pub(super) fn reader_is_gone(pipe: BorrowedFd<'_>) -> bool {
    let mut poll = libc::pollfd {
        fd: pipe.as_raw_fd(),
        events: 0,
        revents: 0,
    };
    // SAFETY: the pointer is to one live pollfd.
    let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
    ready > 0 && poll.revents & libc::POLLERR != 0
}

/// Page size of a file on hugetlbfs; `None` for any other.
pub(super) fn huge_page_bytes(file: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    let mut status = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the pointer is to a live local of the type that the call fills.
    check(libc::c_long::from(unsafe {
        libc::fstatfs(file.as_raw_fd(), status.as_mut_ptr())
    }))?;
    // SAFETY: zeroed, and filled by the kernel; any bytes are valid integers.
    let status = unsafe { status.assume_init() };
    Ok((status.f_type == libc::HUGETLBFS_MAGIC).then_some(status.f_bsize as u64))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_signal_says_nothing_of_a_descriptor() {
        let signalled: Arc<AtomicBool> = Arc::default();
        signal_hook::flag::register(libc::SIGUSR1, Arc::clone(&signalled)).expect("a handler");
        let (nothing_comes, _kept) = std::io::pipe().expect("a pipe");
        let is_over: Arc<AtomicBool> = Arc::default();
        // SAFETY: names this thread, which outlives the other.
        let looking = unsafe { libc::pthread_self() };
        let signals = std::thread::spawn({
            let is_over = Arc::clone(&is_over);
            move || {
                while !is_over.load(Ordering::Relaxed) {
                    // SAFETY: that thread runs until this one is joined, and the signal is handled.
                    unsafe { libc::pthread_kill(looking, libc::SIGUSR1) };
                }
            }
        });
        // The other may come to a processor only once all is looked at.
        while !signalled.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let looks = (0..50_000).map(|_| poll_readable(nothing_comes.as_fd(), Some(Duration::ZERO)));
        let found: io::Result<Vec<bool>> = looks.collect();
        is_over.store(true, Ordering::Relaxed);
        signals.join().expect("no panic");
        assert!(signalled.load(Ordering::Relaxed));
        assert!(found.expect("no error").iter().all(|readable| !readable));
    }
}
