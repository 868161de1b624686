//! A child that outlives us and holds nothing of ours: its own session, no inherited descriptor.
//!
//! libvirtd waits until every holder of a hook's descriptors has closed them, so a backend that
//! kept them would delay the start of its own guest.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

/// The first descriptor after stdin, stdout and stderr.
const FIRST_OTHER_FD: libc::c_uint = 3;

/// Starts a command in its own session with `log` as its output.
pub(crate) fn spawn(command: &mut Command, log: File) -> io::Result<Child> {
    let output = log.try_clone()?;
    command
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(log)
        .current_dir("/");
    // SAFETY: the closure runs between fork and exec; it makes system calls only, which are
    // async-signal-safe, and touches no memory shared with the parent.
    unsafe { command.pre_exec(leave_parent) };
    command.spawn()
}

/// Kills a command started here, with all that it has started in its session's first process group.
pub(crate) fn kill_session(child: &Child) {
    // Best effort: they may have ended by themselves.
    if let Some(pid) = rustix::process::Pid::from_raw(child.id() as i32) {
        let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
    }
}

fn leave_parent() -> io::Result<()> {
    // SAFETY: setsid takes no arguments and changes the calling process alone.
    if unsafe { libc::setsid() } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call marks descriptors to be closed at exec and closes none before, so those
    // that the standard library still needs until then stay usable.
    let marked = unsafe {
        libc::close_range(
            FIRST_OTHER_FD,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC as libc::c_int,
        )
    };
    if marked < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
