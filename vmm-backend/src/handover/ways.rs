//! The ways by which a stopped VMM thread creates userfaultfds, and the order they are tried in.
//!
//! Each way leaves the VMM's descriptors as they were unless it succeeds.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use super::thread::{BorrowedThread, SCRATCH_BYTES, ThreadError};
use super::{Attempt, Way, kernel};

/// The device whose descriptors create userfaultfds (Linux ≥ 6.1).
const DEVICE_PATH: &str = "/dev/userfaultfd";
/// The same, as the VMM reads it.
const DEVICE_PATH_C: &[u8] = b"/dev/userfaultfd\0";
/// `_IO(0xAA, 0x00)`, include/uapi/linux/userfaultfd.h.
const USERFAULTFD_IOC_NEW: u64 = 0xaa00;
/// Flags of each userfaultfd.
const UFFD_FLAGS: u64 = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
/// What says whether any user may call `userfaultfd(2)`.
const SYSCTL_PATH: &str = "/proc/sys/vm/unprivileged_userfaultfd";
/// The byte that carries the device's descriptor.
const CARRIER: u8 = 0x6f;

/// Why a way did not work.
#[derive(Debug)]
pub(super) enum WayError {
    /// It is not allowed here; the next may be.
    Attempt(Attempt),
    /// The thread is of no further use.
    Thread(ThreadError),
}

impl From<ThreadError> for WayError {
    fn from(error: ThreadError) -> Self {
        WayError::Thread(error)
    }
}

/// What the ways work with.
pub(super) struct Setting<'a> {
    /// The VMM.
    pub pid: i32,
    /// Its pidfd.
    pub pidfd: BorrowedFd<'a>,
    /// Our end of the vhost-user connection.
    pub socket: &'a UnixStream,
    /// Whether [`Way::Syscall`] was opted into.
    pub allow_sysctl: bool,
    /// How many userfaultfds.
    pub count: usize,
}

/// Creates the userfaultfds by one way; their numbers in the VMM.
pub(super) fn create(
    way: Way,
    thread: &mut BorrowedThread,
    setting: &Setting<'_>,
) -> Result<Vec<RawFd>, WayError> {
    match way {
        Way::Device => by_its_own_device(thread, setting),
        Way::PassedDevice => by_a_passed_device(thread, setting),
        Way::Syscall => by_syscall(thread, setting),
    }
}

/// Closes descriptors in the VMM.
pub(super) fn close_all(thread: &mut BorrowedThread, numbers: &[RawFd]) -> Result<(), ThreadError> {
    for &number in numbers {
        // On Linux the descriptor is gone even where close reports an error.
        let _ = thread.call(libc::SYS_close, &[number as u64])?;
    }
    Ok(())
}

fn attempt(way: Way, step: &str, error: &io::Error, cure: &str) -> WayError {
    WayError::Attempt(Attempt {
        way,
        step: step.to_owned(),
        errno: error.raw_os_error().unwrap_or(0),
        cure: cure.to_owned(),
    })
}

fn by_its_own_device(
    thread: &mut BorrowedThread,
    setting: &Setting<'_>,
) -> Result<Vec<RawFd>, WayError> {
    thread.write_scratch(DEVICE_PATH_C)?;
    let arguments = [
        libc::AT_FDCWD as u64,
        thread.scratch_address(),
        (libc::O_RDWR | libc::O_CLOEXEC) as u64,
    ];
    let device = match thread.call(libc::SYS_openat, &arguments)? {
        Ok(number) => number as RawFd,
        Err(error) => {
            let cure = match error.raw_os_error() {
                Some(libc::EMFILE) => "raise max_files in /etc/libvirt/qemu.conf",
                _ => {
                    "add \"/dev/userfaultfd\" to cgroup_device_acl in /etc/libvirt/qemu.conf and \
                     restart libvirtd"
                }
            };
            let step = "opening /dev/userfaultfd in the VMM";
            return Err(attempt(Way::Device, step, &error, cure));
        }
    };
    from_device(Way::Device, thread, device, setting.count)
}

/// Creates the userfaultfds from the device's descriptor in the VMM, and closes that.
fn from_device(
    way: Way,
    thread: &mut BorrowedThread,
    device: RawFd,
    count: usize,
) -> Result<Vec<RawFd>, WayError> {
    let arguments = [device as u64, USERFAULTFD_IOC_NEW, UFFD_FLAGS];
    let created = repeat(
        way,
        thread,
        libc::SYS_ioctl,
        &arguments,
        "USERFAULTFD_IOC_NEW",
        count,
    );
    // Also after a failure; where the thread itself failed this fails the same way.
    close_all(thread, &[device])?;
    created
}

/// Makes the same descriptor-creating call `count` times; all or nothing.
fn repeat(
    way: Way,
    thread: &mut BorrowedThread,
    call: libc::c_long,
    arguments: &[u64],
    step: &str,
    count: usize,
) -> Result<Vec<RawFd>, WayError> {
    let mut numbers = Vec::with_capacity(count);
    while numbers.len() < count {
        match thread.call(call, arguments)? {
            Ok(number) => numbers.push(number as RawFd),
            Err(error) => {
                close_all(thread, &numbers)?;
                let cure = match error.raw_os_error() {
                    Some(libc::EMFILE) => "raise max_files in /etc/libvirt/qemu.conf",
                    Some(libc::ENFILE | libc::ENOMEM) => "free memory or descriptors on the host",
                    _ => "see 'outram doctor'",
                };
                return Err(attempt(way, step, &error, cure));
            }
        }
    }
    Ok(numbers)
}

fn by_syscall(thread: &mut BorrowedThread, setting: &Setting<'_>) -> Result<Vec<RawFd>, WayError> {
    let refused = |step: &str| {
        WayError::Attempt(Attempt {
            way: Way::Syscall,
            step: step.to_owned(),
            errno: 0,
            cure: "'outram setup --allow-sysctl' allows it, for every user of this host".into(),
        })
    };
    if !setting.allow_sysctl {
        return Err(refused("not allowed by the configuration"));
    }
    let sysctl = std::fs::read_to_string(SYSCTL_PATH).unwrap_or_default();
    if sysctl.trim() != "1" {
        return Err(refused("vm.unprivileged_userfaultfd is not 1"));
    }
    repeat(
        Way::Syscall,
        thread,
        libc::SYS_userfaultfd,
        &[UFFD_FLAGS],
        "userfaultfd(2) in the VMM",
        setting.count,
    )
}

fn by_a_passed_device(
    thread: &mut BorrowedThread,
    setting: &Setting<'_>,
) -> Result<Vec<RawFd>, WayError> {
    let failed =
        |step: &str, error: io::Error, cure: &str| attempt(Way::PassedDevice, step, &error, cure);
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open(DEVICE_PATH)
        .map_err(|error| {
            failed(
                "opening /dev/userfaultfd in the backend",
                error,
                "run the backend as root on Linux 6.1 or later with CONFIG_USERFAULTFD",
            )
        })?;
    let again = "start the domain again";
    let ends = silent_ends_of(setting)
        .map_err(|error| failed("looking for the VMM's end of the socket", error, again))?;
    kernel::send_descriptor(setting.socket.as_fd(), CARRIER, device.as_fd())
        .map_err(|error| failed("sending the device's descriptor", error, again))?;
    // From here on a byte is under way that must not be left in the stream.
    let holds_byte =
        |end: &(RawFd, OwnedFd)| kernel::peek_byte(end.1.as_fd()).ok() == Some(CARRIER);
    let Some((number, end)) = ends.into_iter().find(holds_byte) else {
        let error = io::Error::from(io::ErrorKind::NotFound);
        let step = "finding the VMM's end of the vhost-user socket";
        // The connection is out of step and must be closed, which every failed hand-over does.
        return Err(failed(step, error, again));
    };
    let received = receive_descriptor(thread, number);
    if kernel::peek_byte(end.as_fd()).ok() == Some(CARRIER) {
        // Not fetched: taken out again, and the descriptor with it.
        let _ = kernel::discard_byte(end.as_fd());
    }
    let device = match received? {
        Ok(device) => device,
        Err(error) => {
            let cure = "allow QEMU to receive userfaultfd descriptors (AppArmor or SELinux \
                        policy), or raise max_files in /etc/libvirt/qemu.conf";
            return Err(failed("receiving the device in the VMM", error, cure));
        }
    };
    from_device(Way::PassedDevice, thread, device, setting.count)
}

/// The VMM's descriptors that may be the other end of our socket, duplicated: unix sockets whose
/// peer has our name, with nothing to read.
fn silent_ends_of(setting: &Setting<'_>) -> io::Result<Vec<(RawFd, OwnedFd)>> {
    let our_name = format!("{:?}", setting.socket.local_addr()?);
    let mut ends = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{}/fd", setting.pid))? {
        let entry = entry?;
        let Some(number) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let is_socket = std::fs::read_link(entry.path()).is_ok_and(|target| {
            target
                .as_os_str()
                .as_encoded_bytes()
                .starts_with(b"socket:")
        });
        if !is_socket {
            continue;
        }
        // It may have been closed by another thread since.
        let Ok(duplicate) = kernel::pidfd_getfd(setting.pidfd, number) else {
            continue;
        };
        let stream = UnixStream::from(duplicate);
        let is_peer = stream
            .peer_addr()
            .is_ok_and(|name| format!("{name:?}") == our_name);
        if is_peer && kernel::peek_byte(stream.as_fd()).is_err() {
            ends.push((number, OwnedFd::from(stream)));
        }
    }
    Ok(ends)
}

// Where the parts of recvmsg's message lie in the scratch memory.
const IOVEC_AT: usize = 64;
const BYTE_AT: usize = 80;
const CONTROL_AT: usize = 96;
/// `CMSG_SPACE(sizeof(int))` on 64-bit Linux: a 16-byte header, the descriptor, padding.
const CONTROL_BYTES: usize = 24;
/// `CMSG_LEN(sizeof(int))`.
const CONTROL_LENGTH: u64 = 20;

/// Makes the VMM receive the byte and the descriptor; the descriptor's number there.
fn receive_descriptor(
    thread: &mut BorrowedThread,
    socket: RawFd,
) -> Result<io::Result<RawFd>, ThreadError> {
    let base = thread.scratch_address();
    thread.write_scratch(&message_for(base))?;
    let flags = (libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT) as u64;
    match thread.call(libc::SYS_recvmsg, &[socket as u64, base, flags])? {
        Err(error) => return Ok(Err(error)),
        Ok(1) => {}
        Ok(other) => {
            let text = format!("{other} bytes were received instead of 1");
            return Ok(Err(io::Error::other(text)));
        }
    }
    let scratch = thread.read_scratch()?;
    Ok(descriptor_of(&scratch).ok_or_else(|| {
        // MSG_CTRUNC: no free descriptor, or a policy dropped it.
        io::Error::other("the kernel dropped the descriptor on its way")
    }))
}

/// A `msghdr`, its `iovec`, byte and control buffer, as laid out on x86-64 Linux, for `base`.
fn message_for(base: u64) -> [u8; SCRATCH_BYTES] {
    let mut bytes = [0; SCRATCH_BYTES];
    let mut put = |at: usize, value: u64| bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    // msg_name and msg_namelen stay 0.
    put(16, base + IOVEC_AT as u64);
    put(24, 1);
    put(32, base + CONTROL_AT as u64);
    put(40, CONTROL_BYTES as u64);
    put(IOVEC_AT, base + BYTE_AT as u64);
    put(IOVEC_AT + 8, 1);
    bytes
}

/// The descriptor in a received control buffer.
fn descriptor_of(scratch: &[u8; SCRATCH_BYTES]) -> Option<RawFd> {
    let word = |at: usize| -> Option<i32> {
        let bytes = scratch.get(at..at + 4)?.try_into().ok()?;
        Some(i32::from_le_bytes(bytes))
    };
    let length = scratch.get(CONTROL_AT..CONTROL_AT + 8)?.try_into().ok()?;
    let is_rights = u64::from_le_bytes(length) == CONTROL_LENGTH
        && word(CONTROL_AT + 8)? == libc::SOL_SOCKET
        && word(CONTROL_AT + 12)? == libc::SCM_RIGHTS;
    is_rights.then(|| word(CONTROL_AT + 16)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_is_laid_out_as_libc_lays_it_out() {
        use std::mem::{offset_of, size_of};
        assert_eq!(offset_of!(libc::msghdr, msg_iov), 16);
        assert_eq!(offset_of!(libc::msghdr, msg_iovlen), 24);
        assert_eq!(offset_of!(libc::msghdr, msg_control), 32);
        assert_eq!(offset_of!(libc::msghdr, msg_controllen), 40);
        assert!(size_of::<libc::msghdr>() <= IOVEC_AT);
        assert_eq!(offset_of!(libc::iovec, iov_len), 8);
        const { assert!(CONTROL_AT + CONTROL_BYTES <= SCRATCH_BYTES) };
        assert_eq!(CONTROL_AT % 8, 0);
    }

    #[test]
    fn only_a_whole_rights_message_holds_a_descriptor() {
        let mut scratch = [0; SCRATCH_BYTES];
        assert_eq!(descriptor_of(&scratch), None);
        scratch[CONTROL_AT] = CONTROL_LENGTH as u8;
        scratch[CONTROL_AT + 8] = libc::SOL_SOCKET as u8;
        scratch[CONTROL_AT + 12] = libc::SCM_RIGHTS as u8;
        scratch[CONTROL_AT + 16] = 17;
        assert_eq!(descriptor_of(&scratch), Some(17));
        scratch[CONTROL_AT] = 16;
        assert_eq!(descriptor_of(&scratch), None);
    }
}
