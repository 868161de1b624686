//! `outram-backend`: pages one guest's RAM between its host and memory servers.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use outram_backend::{daemon, handover};
use outram_wire::causes::with_causes;
use tracing_subscriber::EnvFilter;

/// Pages one guest's RAM between its host and memory servers.
///
/// libvirt's hook starts one for each guest that 'outram attach' was used on; it ends with its
/// guest. Logs go to standard error; RUST_LOG chooses what (info by default).
#[derive(Parser)]
#[command(name = "outram-backend", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve one guest until it ends
    Run(Box<daemon::Flags>),
    /// Create userfaultfds inside a VMM; started by 'run' itself
    #[command(hide = true, disable_help_flag = true)]
    Inject {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}

fn main() -> ExitCode {
    let flags = match Cli::parse().command {
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
