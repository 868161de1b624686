//! `outram-backend`: pages one guest's RAM between its host and memory servers.

use std::process::ExitCode;

use clap::Parser;
use outram_backend::arguments::{Arguments, Command};
use outram_backend::{daemon, handover};
use outram_wire::causes::with_causes;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let flags = match Arguments::parse().command {
        Command::Inject { args } => return handover::injector_main(args),
        Command::Run(flags) => flags,
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
    match daemon::run(*flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("outram-backend: {}", with_causes(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}
