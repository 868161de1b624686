//! OpenStack Nova: no hook and no setting of it lets others into a domain's XML, but its libvirt
//! driver can be extended; `docs/nova.md` shows the few lines that pass the XML through this filter.
//!
//! The wish is read from what Nova itself writes into the metadata: the flavor's extra specs, or,
//! where Nova does not write them, the flavor's name, looked up in a file of the host.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use outram_wire::causes::with_causes;
use outram_wire::host_settings::HostSettings;
use serde::Deserialize;
use xot::Node;

use super::{ForeignError, Wish, attach};
use crate::domain_xml::DomainXml;
use crate::host::Paths;

/// What the namespaces of Nova's metadata have in common; what follows is a version.
const NOVA_NAMESPACE: &str = "http://openstack.org/xmlns/libvirt/nova/";

/// The extra specs: the limit, and the servers.
const LIMIT_SPEC: &str = "outram:local";
const SERVERS_SPEC: &str = "outram:servers";

/// The usual file with the wishes of flavors.
const FLAVORS: &str = "/etc/outram/nova.toml";

/// Attaches an instance of OpenStack Nova to Outram, as a filter of its domain's XML
///
/// Reads the XML from standard input and prints it, edited as 'outram attach' does, or as it came if
/// nothing is wished for the instance.
///
/// The extra spec 'outram:local' of the instance's flavor says how much of its memory may lie on the
/// host (0.5 or 512MiB), and 'outram:servers' names memory servers (HOST[:PORT], with commas
/// between); without it those of /etc/outram/backend.toml are used. A Nova that does not write extra
/// specs into the XML's metadata writes the flavor's name: the file of flavors then has a table for
/// it, such as [flavors."m1.large"] with the keys 'local' and 'servers'.
// The text is help for people: a bracket is no link.
#[allow(rustdoc::broken_intra_doc_links)]
#[derive(Debug, Parser)]
#[command(name = "outram-nova-filter", version, max_term_width = 100)]
pub struct FilterArguments {
    /// The file of flavors; must exist if given
    #[arg(long, value_name = "FILE", help = format!("The file of flavors; must exist if given [default: {FLAVORS}, if it exists]"))]
    flavors: Option<PathBuf>,
}

/// The file of flavors. Unknown keys are errors.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Flavors {
    #[serde(default)]
    flavors: BTreeMap<String, FlavorWish>,
}

/// What is wished for the instances of a flavor.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FlavorWish {
    local: String,
    #[serde(default)]
    servers: Vec<String>,
}

/// Why Nova's domain was not attached.
#[derive(Debug, thiserror::Error)]
enum FilterError {
    #[error("cannot read {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("{path} is not understood: {reason}")]
    Flavors { path: PathBuf, reason: String },
    #[error("cannot {what} the domain's XML: {source}")]
    Pipe {
        what: &'static str,
        source: io::Error,
    },
    #[error(transparent)]
    Attach(#[from] ForeignError),
}

/// The filter program.
pub fn run(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let arguments = match FilterArguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    match filter(&arguments, &Paths::from_environment()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "Outram: {}", with_causes(&error));
            ExitCode::FAILURE
        }
    }
}

fn filter(arguments: &FilterArguments, paths: &Paths) -> Result<(), FilterError> {
    let pipe = |what| move |source| FilterError::Pipe { what, source };
    let mut xml = String::new();
    io::stdin().read_to_string(&mut xml).map_err(pipe("read"))?;
    let flavors = read_flavors(arguments.flavors.as_deref())?;
    let domain = DomainXml::parse(&xml).map_err(ForeignError::from)?;
    let edited = match wish_for(&domain, &flavors)? {
        None => xml,
        Some(wish) => {
            let settings = HostSettings::read(&paths.config).map_err(ForeignError::from)?;
            let cure = format!(
                "set the extra spec {SERVERS_SPEC}, or 'servers' in {}",
                paths.config.display()
            );
            attach(&xml, &wish, paths, Some(&settings), &cure)?
        }
    };
    io::stdout()
        .write_all(edited.as_bytes())
        .map_err(pipe("write"))
}

fn read_flavors(given: Option<&Path>) -> Result<Flavors, FilterError> {
    let path = given.unwrap_or(Path::new(FLAVORS));
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if given.is_none() && error.kind() == io::ErrorKind::NotFound => {
            return Ok(Flavors::default());
        }
        Err(source) => {
            let path = path.to_owned();
            return Err(FilterError::File { path, source });
        }
    };
    toml::from_str(&text).map_err(|error| FilterError::Flavors {
        path: path.to_owned(),
        reason: error.message().to_owned(),
    })
}

/// What is wished for an instance: by its extra specs, else by its flavor's name.
fn wish_for(domain: &DomainXml, flavors: &Flavors) -> Result<Option<Wish>, ForeignError> {
    let Some(flavor) = flavor_of(domain) else {
        return Ok(None);
    };
    if let Some(limit) = extra_spec(domain, flavor, LIMIT_SPEC) {
        let servers = extra_spec(domain, flavor, SERVERS_SPEC).unwrap_or_default();
        return Wish::parse(&limit, &servers).map(Some);
    }
    let name = domain.attribute(flavor, "name").unwrap_or_default();
    match flavors.flavors.get(name) {
        None => Ok(None),
        Some(wish) => Wish::parse(&wish.local, &wish.servers.join(",")).map(Some),
    }
}

/// Nova's `<flavor>` in the metadata.
fn flavor_of(domain: &DomainXml) -> Option<Node> {
    let metadata = domain.find(&["metadata"])?;
    let instance = of_nova(domain, metadata, "instance")?;
    of_nova(domain, instance, "flavor")
}

fn extra_spec(domain: &DomainXml, flavor: Node, name: &str) -> Option<String> {
    let specs = of_nova(domain, flavor, "extraSpecs")?;
    domain
        .elements(specs)
        .into_iter()
        .find(|spec| domain.attribute(*spec, "name") == Some(name))
        .map(|spec| domain.text(spec))
}

/// A child element of this name in a namespace of Nova's.
fn of_nova(domain: &DomainXml, parent: Node, name: &str) -> Option<Node> {
    domain.elements(parent).into_iter().find(|element| {
        domain.local_name(*element) == name
            && domain.namespace(*element).starts_with(NOVA_NAMESPACE)
    })
}
