//! The program that libvirt calls at each stage of a domain's life; see `outram_libvirt::hook`.

use std::process::ExitCode;

use outram_libvirt::{hook, hook_arguments};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    if let Some(text) = hook_arguments::answer(&arguments) {
        print!("{text}");
        return ExitCode::SUCCESS;
    }
    // A panic outside `prepare`, which handles its own, must not fail anything: elsewhere libvirtd
    // would kill a running guest, or keep an unrelated one from starting.
    std::panic::catch_unwind(|| hook::run(&arguments)).unwrap_or(ExitCode::SUCCESS)
}
