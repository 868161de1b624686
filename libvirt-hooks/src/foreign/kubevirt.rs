//! KubeVirt: the shim of a hook sidecar runs a program called `onDefineDomain` with the virtual
//! machine instance (JSON) and the domain's XML as arguments, and takes the XML that it prints.
//!
//! See <https://kubevirt.io/user-guide/user_workloads/hook-sidecar/>.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use outram_wire::causes::with_causes;

use super::{ForeignError, Wish, attach};
use crate::host::Paths;

/// The annotations: the limit, and the servers.
const LIMIT_ANNOTATION: &str = "outram.dev/local";
const SERVERS_ANNOTATION: &str = "outram.dev/servers";

/// Attaches a virtual machine instance of KubeVirt to Outram, in a hook sidecar
///
/// Called 'onDefineDomain' in the sidecar's image, it is run by KubeVirt's sidecar shim, and prints
/// the domain's XML, edited as 'outram attach' does.
///
/// The annotation 'outram.dev/local' of the instance says how much of its memory may lie on the node
/// (0.5 or 512MiB); without it the XML is printed as it came. The annotation 'outram.dev/servers' then
/// has to name memory servers (HOST[:PORT], with commas between).
// The text is help for people: a bracket is no link.
#[allow(rustdoc::broken_intra_doc_links)]
#[derive(Debug, Parser)]
#[command(name = "outram-kubevirt-sidecar", version, max_term_width = 100)]
pub struct SidecarArguments {
    /// The virtual machine instance
    #[arg(long, value_name = "JSON")]
    vmi: String,
    /// The domain
    #[arg(long, value_name = "XML", allow_hyphen_values = true)]
    domain: String,
}

/// Why KubeVirt's domain was not attached.
#[derive(Debug, thiserror::Error)]
enum SidecarError {
    #[error("the virtual machine instance is no JSON: {0}")]
    Vmi(#[from] serde_json::Error),
    #[error("the annotation {0} must be text, such as \"0.5\"")]
    Annotation(&'static str),
    #[error(transparent)]
    Attach(#[from] ForeignError),
}

/// The sidecar's program.
pub fn run(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let arguments = match SidecarArguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    let written = edited(&arguments, &Paths::default()).map_err(|error| with_causes(&error));
    let written = written.and_then(|xml| {
        let said = io::stdout().write_all(xml.as_bytes());
        said.map_err(|error| format!("cannot write the XML: {error}"))
    });
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            let _ = writeln!(io::stderr(), "Outram: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn edited(arguments: &SidecarArguments, paths: &Paths) -> Result<String, SidecarError> {
    let vmi: serde_json::Value = serde_json::from_str(&arguments.vmi)?;
    let annotation = |name| match vmi["metadata"]["annotations"].get(name) {
        None => Ok(None),
        Some(serde_json::Value::String(text)) => Ok(Some(text.as_str())),
        Some(_) => Err(SidecarError::Annotation(name)),
    };
    let Some(limit) = annotation(LIMIT_ANNOTATION)? else {
        return Ok(arguments.domain.clone());
    };
    let servers = annotation(SERVERS_ANNOTATION)?.unwrap_or_default();
    let wish = Wish::parse(limit, servers)?;
    // The settings of the node are not in the sidecar's image.
    let cure = format!("set the annotation {SERVERS_ANNOTATION}");
    Ok(attach(&arguments.domain, &wish, paths, None, &cure)?)
}
