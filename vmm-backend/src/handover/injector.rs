//! The injector: a short-lived process that makes the VMM create userfaultfds.

use std::ffi::OsString;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use super::{HandoverError, Options, Vmm, Way};

/// Entry of the hidden subcommand `inject`; `args` are those after it.
pub fn injector_main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let _ = args.into_iter().count();
    ExitCode::FAILURE
}

pub(super) fn run(
    _vmm: &Vmm,
    _socket: &UnixStream,
    _count: usize,
    _options: &Options,
) -> Result<(Vec<i32>, Way), HandoverError> {
    Err(HandoverError::Injector("not yet written".into()))
}
