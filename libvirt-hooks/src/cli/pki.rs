//! `outram pki`: the operator's own small CA and the certificates of servers and hosts.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use outram_wire::pki::{self, CERTIFICATE_DAYS, Kind, Order};

const DEFAULT_DIR: &str = "/etc/outram/pki";

/// The arguments of `outram pki`.
#[derive(Debug, Args)]
pub struct PkiArguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Make the CA: ca.pem and ca.key
    ///
    /// Do this once, on a machine that you trust. ca.key need not be anywhere else.
    Init {
        #[command(flatten)]
        dir: Directory,
    },
    /// Issue the certificate of a memory server or of a host with guests
    #[command(subcommand)]
    Issue(Issue),
}

#[derive(Debug, Subcommand)]
enum Issue {
    /// For a memory server
    Server {
        /// Its name, also of the files NAME.pem and NAME.key
        name: String,
        /// DNS name or IP address that clients connect to; may be repeated
        #[arg(long, value_name = "HOST", required = true)]
        address: Vec<String>,
        #[command(flatten)]
        common: Common,
    },
    /// For a host with guests
    Client {
        /// Its name, also of the files NAME.pem and NAME.key; backends look for 'client'
        #[arg(default_value = "client")]
        name: String,
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Debug, Args)]
struct Directory {
    /// The CA's directory
    #[arg(long, value_name = "DIR", default_value = DEFAULT_DIR)]
    dir: PathBuf,
}

#[derive(Debug, Args)]
struct Common {
    #[command(flatten)]
    dir: Directory,
    /// Days that the certificate lasts
    #[arg(long, default_value_t = CERTIFICATE_DAYS, value_parser = clap::value_parser!(u32).range(1..=36500))]
    days: u32,
}

impl PkiArguments {
    /// Makes what is asked for.
    pub fn run(&self) -> Result<bool> {
        match &self.action {
            Action::Init { dir } => {
                let ca = pki::init(&dir.dir)?;
                say!("The CA is made: {}", ca.display());
                say!("Keep {} to yourself.", ca.with_extension("key").display());
            }
            Action::Issue(Issue::Server {
                name,
                address,
                common,
            }) => issue(Kind::Server, name, address, common)?,
            Action::Issue(Issue::Client { name, common }) => {
                issue(Kind::Client, name, &[], common)?;
            }
        }
        Ok(true)
    }
}

fn issue(kind: Kind, name: &str, addresses: &[String], common: &Common) -> Result<()> {
    let issued = pki::issue(
        &common.dir.dir,
        &Order {
            kind,
            name,
            addresses,
            days: common.days,
        },
    )?;
    say!("Issued for {} days:", common.days);
    say!("  certificate  {}", issued.cert.display());
    say!("  private key  {}", issued.key.display());
    say!(
        "They go to their machine together with {}.",
        issued.ca.display()
    );
    Ok(())
}
