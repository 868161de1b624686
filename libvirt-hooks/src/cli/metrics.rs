//! `outram metrics`: a backend's metrics, for scrapers that read files or commands.

use anyhow::Result;
use clap::Args;

use super::completion::domain_names;
use super::report::find_guest;
use crate::host::Paths;

/// The arguments of `outram metrics`.
#[derive(Debug, Args)]
pub struct MetricsArguments {
    /// Name or UUID of the domain
    #[arg(add = domain_names())]
    domain: String,
}

impl MetricsArguments {
    /// Prints the metrics.
    pub fn run(&self, uri: Option<&str>, paths: &Paths) -> Result<bool> {
        print!(
            "{}",
            find_guest(&self.domain, uri, paths)?.control.metrics()?
        );
        Ok(true)
    }
}
