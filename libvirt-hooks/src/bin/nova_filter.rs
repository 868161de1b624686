//! The filter that Nova's domains go through; see `outram_libvirt::foreign::nova`.

use std::process::ExitCode;

fn main() -> ExitCode {
    outram_libvirt::foreign::nova::run(std::env::args_os())
}
