//! oVirt: VDSM runs the programs in `/usr/libexec/vdsm/hooks/before_vm_start` and lets them edit
//! the domain's XML, which lies in the file that `_hook_domxml` names. A virtual machine's custom
//! properties are environment variables.
//!
//! See <https://www.ovirt.org/develop/developer-guide/vdsm/hooks.html>.

use std::env;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use outram_wire::causes::with_causes;
use outram_wire::host_settings::HostSettings;

use super::{ForeignError, Wish, attach};
use crate::host::Paths;

/// The variable with the path of the domain's XML.
const XML_VARIABLE: &str = "_hook_domxml";

/// The custom properties: the limit, and the servers.
const LIMIT_PROPERTY: &str = "outram";
const SERVERS_PROPERTY: &str = "outram_servers";

/// What VDSM takes as: failed, and the virtual machine is not to be started.
const ABORT: u8 = 2;

/// Attaches a virtual machine of oVirt to Outram, as a hook of VDSM
///
/// VDSM runs it before it starts a virtual machine; a link in
/// /usr/libexec/vdsm/hooks/before_vm_start installs it. The domain's XML is edited in the file that
/// the environment variable _hook_domxml names, as 'outram attach' does.
///
/// The custom property 'outram' of the virtual machine says how much of its memory may lie on the
/// host (0.5 or 512MiB); without it nothing is done. The property 'outram_servers' names memory
/// servers (HOST[:PORT], with commas between); without it those of /etc/outram/backend.toml are used.
// The text is help for people: a bracket is no link.
#[allow(rustdoc::broken_intra_doc_links)]
#[derive(Debug, Parser)]
#[command(name = "outram-vdsm-hook", version, max_term_width = 100)]
pub struct VdsmArguments {}

/// Why VDSM's domain was not attached.
#[derive(Debug, thiserror::Error)]
enum VdsmError {
    #[error("{XML_VARIABLE} is not set: VDSM sets it when it runs this as a hook")]
    NoXml,
    #[error("cannot {what} {path}: {source}")]
    File {
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error(transparent)]
    Attach(#[from] ForeignError),
}

/// The hook program.
pub fn run(arguments: impl Iterator<Item = std::ffi::OsString>) -> ExitCode {
    if let Err(error) = VdsmArguments::command().try_get_matches_from(arguments) {
        // Help and version among it, which go to standard output.
        let _ = error.print();
        return ExitCode::from(if error.use_stderr() { ABORT } else { 0 });
    }
    match edit(&Paths::from_environment()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // VDSM writes it to its log; a closed one is no reason to fail otherwise.
            let _ = writeln!(io::stderr(), "Outram: {}", with_causes(&error));
            ExitCode::from(ABORT)
        }
    }
}

fn edit(paths: &Paths) -> Result<(), VdsmError> {
    let property = |name| env::var(name).unwrap_or_default();
    let limit = property(LIMIT_PROPERTY);
    if limit.trim().is_empty() {
        return Ok(());
    }
    let wish = Wish::parse(&limit, &property(SERVERS_PROPERTY))?;
    let path = PathBuf::from(env::var_os(XML_VARIABLE).ok_or(VdsmError::NoXml)?);
    let file = |what| {
        let path = path.clone();
        move |source| VdsmError::File { what, path, source }
    };
    let xml = fs::read_to_string(&path).map_err(file("read"))?;
    let settings = HostSettings::read(&paths.config).map_err(ForeignError::from)?;
    let cure = format!(
        "set the custom property {SERVERS_PROPERTY}, or 'servers' in {}",
        paths.config.display()
    );
    let edited = attach(&xml, &wish, paths, Some(&settings), &cure)?;
    // In place, as VDSM's own hooks do: the folder is not theirs. Half a file is never used, for
    // VDSM starts nothing after a failure.
    fs::write(&path, edited).map_err(file("write"))
}
