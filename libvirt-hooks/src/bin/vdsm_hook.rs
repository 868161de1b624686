//! The program that oVirt's VDSM runs; see `outram_libvirt::foreign::ovirt`.

use std::process::ExitCode;

fn main() -> ExitCode {
    outram_libvirt::foreign::ovirt::run(std::env::args_os())
}
