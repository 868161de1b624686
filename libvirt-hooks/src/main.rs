//! The `outram` command; see `outram_libvirt::cli`.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use outram_libvirt::{cli, libvirt};
use outram_wire::causes::with_causes;

fn main() -> ExitCode {
    if let Some(status) = cli::completion::answer_shell() {
        return status;
    }
    let arguments = cli::Arguments::parse();
    let outcome = cli::run(&arguments).inspect_err(|error| {
        // It fails whether or not that can be said.
        let _ = writeln!(io::stderr(), "outram: {}", with_causes(error.as_ref()));
    });
    libvirt::leave(outcome.is_ok_and(|done| done))
}
