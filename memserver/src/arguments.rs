//! The command line of `outram-memserver`; its manual page is made from this.

use clap::Parser;

use crate::config::Flags;

/// Lends this machine's idle memory to the guests of other hosts.
///
/// Clients connect with TLS certificates of the operator's own CA ('outram pki'). What they lease is
/// taken from the system slab by slab, at most --memory of it, and given back, emptied, when they
/// release it or when their lease ends.
///
/// SIGTERM and SIGINT end the server and every lease: guests whose pages it holds stop. SIGHUP reads
/// the certificates and, from the file of --config, 'memory' again; clients are asked to give back
/// what is leased beyond.
///
/// Logs go to standard error. RUST_LOG chooses what: a level (error, warn, info, debug, trace; info by
/// default), or levels of modules, such as 'outram_memserver=debug,info', where the last is that of all
/// others: without it they are silent.
#[derive(Debug, Parser)]
#[command(name = "outram-memserver", version, max_term_width = 100)]
pub struct Arguments {
    /// The settings.
    #[command(flatten)]
    pub flags: Flags,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Arguments::command().debug_assert();
    }
}
