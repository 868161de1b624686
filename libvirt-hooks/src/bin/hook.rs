//! The program that libvirt calls at each stage of a domain's life; see `outram_libvirt::hook`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    // A panic outside `prepare`, which handles its own, must not fail anything: elsewhere libvirtd
    // would kill a running guest, or keep an unrelated one from starting.
    std::panic::catch_unwind(|| outram_libvirt::hook::run(&arguments)).unwrap_or(ExitCode::SUCCESS)
}
