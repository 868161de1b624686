//! The program that KubeVirt's sidecar shim runs; see `outram_libvirt::foreign::kubevirt`.

use std::process::ExitCode;

fn main() -> ExitCode {
    outram_libvirt::foreign::kubevirt::run(std::env::args_os())
}
