//! The connection to libvirt: looking domains up, reading and defining their XML.
//!
//! Only the system's own libvirt on this host is used: the backends, their sockets and the guests'
//! memory are this host's. The exception is a look at a migration's destination.

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;
use std::{env, thread};

use outram_wire::units::VmId;
use virt::connect::Connect;
use virt::domain::Domain;
use virt::error::{Error, ErrorNumber};
use virt::sys;

use crate::metadata::{NAMESPACE, PREFIX, PROBE};

/// A thread asks libvirt and is not waited for any longer.
static IS_GIVEN_UP: AtomicBool = AtomicBool::new(false);

/// Asks libvirt in a thread of its own, so that a libvirt that hangs does not hang us; nothing where it gave no answer
/// within `patience`. An error where there is no thread.
pub(crate) fn ask_within<T: Send + 'static>(
    patience: Duration,
    ask: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Option<T>> {
    let (answer, result) = mpsc::channel();
    let ask = move || {
        // The receiver is gone only if this took too long, which is told there.
        let _ = answer.send(ask());
    };
    let asker = thread::Builder::new()
        .name("libvirt".to_owned())
        .spawn(ask)?;
    let answer = result.recv_timeout(patience);
    match answer {
        // What its libraries keep for a thread they free as that ends: amid the end of the process, that breaks the heap.
        Ok(_) => drop(asker.join()),
        Err(_) => IS_GIVEN_UP.store(true, Ordering::Relaxed),
    }
    Ok(answer.ok())
}

/// Ends the process: without what its libraries do at its end, where a thread may be in the midst of one.
pub fn leave(succeeded: bool) -> ExitCode {
    if IS_GIVEN_UP.load(Ordering::Relaxed) {
        // Whatever is said by then has been, or cannot be.
        let _ = io::stdout().flush();
        signal_hook::low_level::exit(i32::from(!succeeded));
    }
    match succeeded {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// The environment variable that libvirt's tools take their URI from.
pub const URI_VARIABLE: &str = "LIBVIRT_DEFAULT_URI";

/// The URI used where none is given.
pub const DEFAULT_URI: &str = "qemu:///system";

/// Why libvirt did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum LibvirtError {
    /// A session's libvirt.
    #[error(
        "'{0}' is a libvirt session of one user: its QEMU and hooks run without the privileges that paging needs; use {DEFAULT_URI}"
    )]
    Session(String),
    /// Another host's libvirt.
    #[error(
        "'{0}' is the libvirt of another host: run this command on that host, with {DEFAULT_URI}"
    )]
    Remote(String),
    /// Another driver.
    #[error("'{0}' is not QEMU's libvirt driver: use {DEFAULT_URI}")]
    OtherDriver(String),
    /// No connection.
    #[error("cannot connect to libvirt at '{uri}': {}; is libvirtd (or virtqemud) running, and may you use it?", error.message())]
    Connect {
        /// Where.
        uri: String,
        /// Why.
        error: Error,
    },
    /// No such domain.
    #[error("there is no domain '{0}': 'virsh list --all' shows those there are")]
    NoDomain(String),
    /// Anything else that failed.
    #[error("libvirt could not {what}: {}", error.message())]
    Call {
        /// What was asked.
        what: &'static str,
        /// Why it failed.
        error: Error,
    },
}

fn call(what: &'static str) -> impl FnOnce(Error) -> LibvirtError {
    move |error| LibvirtError::Call { what, error }
}

/// A connection to the system's libvirt.
pub struct Libvirt {
    connection: Connect,
}

impl Libvirt {
    /// Connects to `uri`, or to what the environment names, or to the system's.
    pub fn connect(uri: Option<&str>) -> Result<Self, LibvirtError> {
        Self::open(uri, Connect::open)
    }

    /// As [`Self::connect`], for looking only: where libvirt's settings are the usual ones, every
    /// user may, and nobody is asked for a password.
    pub fn connect_to_read(uri: Option<&str>) -> Result<Self, LibvirtError> {
        Self::open(uri, Connect::open_read_only)
    }

    fn open(
        uri: Option<&str>,
        open: fn(Option<&str>) -> Result<Connect, Error>,
    ) -> Result<Self, LibvirtError> {
        let uri = match uri {
            Some(uri) => uri.to_owned(),
            None => env::var(URI_VARIABLE)
                .ok()
                .filter(|uri| !uri.is_empty())
                .unwrap_or_else(|| DEFAULT_URI.to_owned()),
        };
        check_uri(&uri)?;
        // Without this, libvirt prints each error by itself as well.
        virt::error::clear_error_callback();
        let connection = open(Some(&uri)).map_err(|error| LibvirtError::Connect {
            uri: uri.clone(),
            error,
        })?;
        // The URI may have been an alias of libvirt's client configuration.
        let canonical = connection.uri().map_err(call("tell its URI"))?;
        check_uri(&canonical)?;
        Ok(Self { connection })
    }

    /// The names of all domains, running or not, in order.
    pub fn domain_names(&self) -> Result<Vec<String>, LibvirtError> {
        let domains = self.connection.list_all_domains(0);
        let domains = domains.map_err(call("list its domains"))?;
        let names = domains
            .iter()
            .map(|domain| domain.name().map_err(call("tell a domain's name")));
        let mut names = names.collect::<Result<Vec<_>, _>>()?;
        names.sort();
        Ok(names)
    }

    /// Finds a domain by name or UUID.
    pub fn domain(&self, name: &str) -> Result<LibvirtDomain, LibvirtError> {
        let missing = |error: Error| {
            if error.code().is(ErrorNumber::NoDomain) {
                LibvirtError::NoDomain(name.to_owned())
            } else {
                call("look the domain up")(error)
            }
        };
        let found = match self.connection.lookup_domain_by_name(name) {
            Ok(domain) => Ok(domain),
            Err(error) => match name.parse::<VmId>() {
                Ok(vm) => self.connection.lookup_domain_by_uuid(vm.0),
                Err(_) => Err(error),
            },
        };
        found.map(LibvirtDomain).map_err(missing)
    }

    /// Defines a domain anew, its XML checked against libvirt's schema.
    pub fn define(&self, xml: &str) -> Result<LibvirtDomain, LibvirtError> {
        self.connection
            .define_domain_xml_flags(xml, sys::VIR_DOMAIN_DEFINE_VALIDATE)
            .map(LibvirtDomain)
            .map_err(call("define the domain"))
    }

    /// The versions of libvirt and QEMU, each as `(major, minor, release)`.
    pub fn versions(&self) -> Result<(Version, Version), LibvirtError> {
        let library = self.connection.lib_version();
        let library = library.map_err(call("tell its version"))?;
        let qemu = self.connection.hyp_version();
        let qemu = qemu.map_err(call("tell QEMU's version"))?;
        Ok((Version::from_libvirt(library), Version::from_libvirt(qemu)))
    }
}

/// What libvirt at a migration's destination makes of a domain that Outram's hook refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// The hook refused it.
    HasHook,
    /// It was started: no hook of ours is called there. It was ended at once.
    LacksHook,
    /// Libvirt refused it for another reason.
    Unclear(String),
}

/// What our hook's messages begin with.
const HOOKS_MARK: &str = "Outram: ";

/// A domain with settings that no version of our hook accepts. Were it started, it would stand still
/// before its first instruction.
fn probe_xml(kind: &str, name: &str) -> String {
    format!(
        "<domain type='{kind}'><name>{name}</name>\
         <metadata><{PREFIX}:{PROBE} xmlns:{PREFIX}='{NAMESPACE}'/></metadata>\
         <memory unit='MiB'>64</memory><vcpu>1</vcpu>\
         <os><type arch='x86_64'>hvm</type></os></domain>"
    )
}

/// Asks a libvirt, of any host, whether Outram's hook is called there.
pub fn look_at_destination(uri: &str) -> Result<Destination, LibvirtError> {
    virt::error::clear_error_callback();
    let connection = Connect::open(Some(uri)).map_err(|error| LibvirtError::Connect {
        uri: uri.to_owned(),
        error,
    })?;
    let name = format!("outram-probe-{}", std::process::id());
    let flags = sys::VIR_DOMAIN_START_PAUSED | sys::VIR_DOMAIN_START_AUTODESTROY;
    let mut said = String::new();
    // A host may have either kind of guests only.
    for kind in ["qemu", "kvm"] {
        match connection.create_domain_xml(&probe_xml(kind, &name), flags) {
            Ok(domain) => {
                domain.destroy().map_err(call("end the probing domain"))?;
                return Ok(Destination::LacksHook);
            }
            Err(error) if error.message().contains(HOOKS_MARK) => {
                return Ok(Destination::HasHook);
            }
            Err(error) => said = error.message().to_owned(),
        }
    }
    Ok(Destination::Unclear(said))
}

/// A version as libvirt counts: major, minor, release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32, pub u32);

impl Version {
    /// libvirt's numbers are `major * 1,000,000 + minor * 1,000 + release`.
    fn from_libvirt(number: u32) -> Self {
        Self(number / 1_000_000, number / 1_000 % 1_000, number % 1_000)
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// Refuses whatever is not the system's QEMU on this host.
pub(crate) fn check_uri(uri: &str) -> Result<(), LibvirtError> {
    let plain = uri.split('?').next().unwrap_or_default();
    let Some((scheme, rest)) = plain.split_once("://") else {
        // An alias: judged by what libvirt says it stands for.
        return Ok(());
    };
    let (driver, transport) = scheme.split_once('+').unwrap_or((scheme, ""));
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    match path {
        _ if driver != "qemu" => Err(LibvirtError::OtherDriver(uri.to_owned())),
        "session" => Err(LibvirtError::Session(uri.to_owned())),
        _ if !host.is_empty() || !matches!(transport, "" | "unix") => {
            Err(LibvirtError::Remote(uri.to_owned()))
        }
        "system" => Ok(()),
        _ => Err(LibvirtError::OtherDriver(uri.to_owned())),
    }
}

/// One domain.
pub struct LibvirtDomain(Domain);

impl LibvirtDomain {
    /// Whether it runs.
    pub fn is_active(&self) -> Result<bool, LibvirtError> {
        self.0
            .is_active()
            .map_err(call("tell whether the domain runs"))
    }

    /// Whether it has a definition beyond its running time.
    pub fn is_persistent(&self) -> Result<bool, LibvirtError> {
        let persistent = self.0.is_persistent();
        persistent.map_err(call("tell whether the domain is persistent"))
    }

    /// Whether a saved state of it will be restored at its next start.
    pub fn has_managed_save(&self) -> Result<bool, LibvirtError> {
        let saved = self.0.has_managed_save(0);
        saved.map_err(call("tell whether the domain has a saved state"))
    }

    /// Its identity.
    pub fn vm_id(&self) -> Result<VmId, LibvirtError> {
        let uuid = self.0.uuid_string().map_err(call("tell the UUID"))?;
        uuid.parse()
            .map_err(|_| LibvirtError::NoDomain(uuid.clone()))
    }

    /// Its name.
    pub fn name(&self) -> Result<String, LibvirtError> {
        self.0.name().map_err(call("tell the domain's name"))
    }

    /// Its definition with everything in it, secrets too: they would be lost on defining it anew.
    pub fn definition(&self) -> Result<String, LibvirtError> {
        self.0
            .xml_desc(sys::VIR_DOMAIN_XML_INACTIVE | sys::VIR_DOMAIN_XML_SECURE)
            .map_err(call("read the domain's XML"))
    }

    /// What runs, as it is now, with everything in it.
    pub fn running_definition(&self) -> Result<String, LibvirtError> {
        self.0
            .xml_desc(sys::VIR_DOMAIN_XML_SECURE)
            .map_err(call("read the running domain's XML"))
    }

    /// Plugs a device into the running domain.
    pub fn attach_device(&self, xml: &str) -> Result<(), LibvirtError> {
        self.0
            .attach_device_flags(xml, sys::VIR_DOMAIN_AFFECT_LIVE)
            .map_err(call("attach the disk to the running domain"))
    }

    /// Asks the running domain to let a device go; it may do so later.
    pub fn detach_device(&self, xml: &str) -> Result<(), LibvirtError> {
        self.0
            .detach_device_flags(xml, sys::VIR_DOMAIN_AFFECT_LIVE)
            .map_err(call("detach the disk from the running domain"))
    }

    /// Replaces our settings in the running domain alone, or removes them.
    pub fn set_running_settings(&self, element: Option<&str>) -> Result<(), LibvirtError> {
        self.change_settings(element, sys::VIR_DOMAIN_AFFECT_LIVE)
    }

    /// Replaces our settings in its definition: `element` is without namespace, as libvirt puts it into
    /// ours.
    pub fn set_settings(&self, element: &str) -> Result<(), LibvirtError> {
        self.change_settings(Some(element), sys::VIR_DOMAIN_AFFECT_CONFIG)
    }

    fn change_settings(&self, element: Option<&str>, flags: u32) -> Result<(), LibvirtError> {
        let set = self.0.set_metadata(
            sys::VIR_DOMAIN_METADATA_ELEMENT as i32,
            element,
            Some(PREFIX),
            Some(NAMESPACE),
            flags,
        );
        set.map_err(call("change the domain's metadata"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    thread_local! {
        static OF_THE_THREAD: SlowToGo = const { SlowToGo };
    }

    static HAS_GONE: AtomicBool = AtomicBool::new(false);

    struct SlowToGo;

    impl Drop for SlowToGo {
        fn drop(&mut self) {
            thread::sleep(Duration::from_millis(300));
            HAS_GONE.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn the_thread_that_asked_has_ended_once_its_answer_is_here() {
        let answer = ask_within(Duration::from_secs(60), || OF_THE_THREAD.with(|_| 7));
        assert_eq!(answer.expect("a thread"), Some(7));
        assert!(HAS_GONE.load(Ordering::Relaxed));
    }

    #[test]
    fn who_hangs_is_not_waited_for() {
        let (_keep, hangs) = mpsc::channel::<()>();
        let answer = ask_within(Duration::from_millis(10), move || hangs.recv());
        assert_eq!(answer.expect("a thread"), None);
        assert!(IS_GIVEN_UP.load(Ordering::Relaxed));
    }

    #[test]
    fn only_the_local_system_is_taken() {
        for uri in [
            "qemu:///system",
            "qemu+unix:///system",
            "qemu:///system?socket=/x",
            "alias",
        ] {
            assert!(check_uri(uri).is_ok(), "{uri}");
        }
        assert!(matches!(
            check_uri("qemu:///session"),
            Err(LibvirtError::Session(_))
        ));
        for uri in [
            "qemu+ssh://root@host/system",
            "qemu://host/system",
            "qemu+tls://h/system",
        ] {
            assert!(
                matches!(check_uri(uri), Err(LibvirtError::Remote(_))),
                "{uri}"
            );
        }
        for uri in [
            "test:///default",
            "xen:///system",
            "lxc:///",
            "qemu:///embed",
        ] {
            assert!(
                matches!(check_uri(uri), Err(LibvirtError::OtherDriver(_))),
                "{uri}"
            );
        }
    }

    #[test]
    fn versions_are_taken_apart() {
        assert_eq!(Version::from_libvirt(9_000_000).to_string(), "9.0.0");
        assert_eq!(Version::from_libvirt(7_002_022).to_string(), "7.2.22");
    }
}
