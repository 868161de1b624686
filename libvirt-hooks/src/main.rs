//! The `outram` command; see `outram_libvirt::cli`.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use outram_libvirt::cli;
use outram_wire::causes::with_causes;

fn main() -> ExitCode {
    cli::completion::answer_shell();
    let arguments = cli::Arguments::parse();
    match cli::run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            // It fails whether or not that can be said.
            let _ = writeln!(io::stderr(), "outram: {}", with_causes(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}
