//! The command line of `outram-backend`; its manual page is made from this.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::daemon::Flags;

/// Pages one guest's RAM between its host and memory servers.
///
/// libvirt's hook starts one for each guest that 'outram attach' was used on; it ends with its
/// guest.
///
/// Logs go to standard error. RUST_LOG chooses what: a level (error, warn, info, debug, trace; info by
/// default), or levels of modules, such as 'outram_backend=debug,info', where the last is that of all
/// others: without it they are silent.
#[derive(Debug, Parser)]
#[command(name = "outram-backend", version, max_term_width = 100)]
pub struct Arguments {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve one guest until it ends
    Run(Box<Flags>),
    /// Page one guest's memory; started by 'run', which starts it again where it dies
    #[command(hide = true)]
    Page(Box<Flags>),
    /// Mount the directory of a guest's state where it outlives this process's own view of the file
    /// system; how systemd prepares 'run'
    #[command(hide = true)]
    Prepare {
        /// The file with the arguments of 'run'
        file: PathBuf,
    },
    /// Remove what is left of a guest that has ended where 'prepare' mounted it; how systemd ends 'run'
    #[command(hide = true)]
    Tidy {
        /// The guest's directory
        dir: PathBuf,
    },
    /// Do what the arguments in a file say, each ended by a NUL byte; how systemd starts 'run'
    #[command(hide = true)]
    Launch {
        /// The file
        file: PathBuf,
    },
    /// Create userfaultfds inside a VMM; started by 'run' itself
    #[command(hide = true, disable_help_flag = true)]
    Inject {
        /// As 'run' gives them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}
