//! libvirt's hook for QEMU domains: starts a backend with its domain, and only then may fail.
//!
//! libvirt calls it for every domain at every stage (arguments: domain, operation, sub-operation,
//! extra; the domain's XML on stdin), and what it does with the outcome differs:
//!
//! - `prepare` fails the start, with our stderr as the reason;
//! - a failing `reconnect` makes libvirtd kill the running guest, and a line on stdout replaces
//!   the domain's XML at `restore` and `migrate`: so nothing is ever written to stdout, and
//!   everything but `prepare` exits 0 (but for an arrival that cannot be noted, see `remember`);
//! - libvirtd holds a lock meanwhile: libvirt is never called from here.
//!
//! `restore begin` and `migrate begin` come before the `prepare begin` of a guest whose memory arrives
//! from elsewhere: they are remembered for it ([`crate::arrival`]).
//!
//! A domain that does not use Outram is recognised without parsing, so that no mistake of ours
//! can keep it from starting. See <https://libvirt.org/hooks.html>.

use std::io::{Read, Write};
use std::panic::catch_unwind;
use std::path::Path;
use std::process::ExitCode;
use std::{fs, io};

use outram_wire::control::Phase;
use outram_wire::host_settings::{HostSettings, SettingsError};
use outram_wire::incoming::Incoming;
use outram_wire::shmem_thp::{self, HugeShmem, Unreadable};

use crate::apparmor;
use crate::arrival::{self, Caller};
use crate::backend_control::BackendControl;
use crate::domain_xml::{DomainXml, DomainXmlError};
use crate::host::{self, NoBackend, Paths};
use crate::launch::{self, Launch, LaunchError};
use crate::metadata::{self, MetadataError, NAMESPACE_MARK, PROBE};
use crate::page_size;
use crate::refusal::{self, Refusal};
use crate::{process, qemu_user};
use outram_wire::causes::with_causes;

/// The file in the directory of run directories that shows which libvirtd called us last.
pub const STAMP_FILE: &str = "hook-called";

/// Longest XML that is read; libvirt's own limit for a domain's XML is far below.
const XML_MAX_BYTES: u64 = 64 << 20;

/// Why a domain that uses Outram cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// The XML itself.
    #[error(transparent)]
    Xml(#[from] DomainXmlError),
    /// The settings in its metadata.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// The domain has something that Outram cannot page.
    #[error("{}", list(.0))]
    Refused(Vec<Refusal>),
    /// The kernel may put huge pages into shared memory.
    #[error("{}", list(.0))]
    HugeShmem(Vec<HugeShmem>),
    /// Whether it may is not known.
    #[error(transparent)]
    UnreadableShmem(#[from] Unreadable),
    /// AppArmor would keep QEMU from connecting to its backend.
    #[error(
        "AppArmor confines QEMU, and its rules do not allow what paging needs: {0}; 'outram setup' puts them in place"
    )]
    AppArmor(String),
    /// The host's settings.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// No server in either.
    #[error(
        "no memory server is named: add <outram:server address='HOST:PORT'/> to the domain's <outram:memory>, or 'servers' to {0}"
    )]
    NoServer(std::path::PathBuf),
    /// No backend program.
    #[error(transparent)]
    NoBackend(#[from] NoBackend),
    /// The backend did not become ready.
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

fn list(refusals: &[impl ToString]) -> String {
    let texts: Vec<String> = refusals.iter().map(ToString::to_string).collect();
    texts.join("; ")
}

/// The hook program: arguments and XML as libvirt gives them.
pub fn run(arguments: &[String]) -> ExitCode {
    let paths = Paths::from_environment();
    let operation = arguments.get(1).map_or("", String::as_str);
    let sub_operation = arguments.get(2).map_or("", String::as_str);
    leave_stamp(&paths);
    let mut xml = Vec::new();
    // Half an XML is handled as what it is: without our mark in it, it is no business of ours.
    let _ = io::stdin().take(XML_MAX_BYTES).read_to_end(&mut xml);
    if !concerns_us(&xml, &paths) {
        return ExitCode::SUCCESS;
    }
    match (operation, sub_operation) {
        ("prepare", "begin") => match catch_unwind(|| prepare_start(&xml, &paths)) {
            Ok(Ok(())) => ExitCode::SUCCESS,
            Ok(Err(error)) => {
                say(&format!("Outram: {}", with_causes(&error)));
                ExitCode::FAILURE
            }
            // The panic's own message is on stderr already.
            Err(_) => ExitCode::FAILURE,
        },
        ("restore", "begin") => remember(&xml, &paths, Incoming::Restore),
        ("migrate", "begin") => remember(&xml, &paths, Incoming::Migration),
        ("release", "end") => {
            if let Some(text) = release(&xml, &paths) {
                say(&format!("Outram: {text}"));
            }
            ExitCode::SUCCESS
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Writes to stderr; a closed one is no reason to fail.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Whether a domain mentions our namespace or run directory at all.
pub fn concerns_us(xml: &[u8], paths: &Paths) -> bool {
    use std::os::unix::ffi::OsStrExt;
    [NAMESPACE_MARK.as_bytes(), paths.run.as_os_str().as_bytes()]
        .into_iter()
        .any(|mark| xml.windows(mark.len()).any(|window| window == mark))
}

/// Leaves a trace of who called, for `outram doctor`: nothing depends on it.
fn leave_stamp(paths: &Paths) {
    let parent = std::os::unix::process::parent_id();
    if let Some(ticks) = process::start_ticks(parent) {
        let _ = fs::write(paths.run.join(STAMP_FILE), format!("{parent} {ticks}\n"));
    }
}

/// Remembers, for the `prepare` that follows, that the guest's memory arrives from elsewhere.
fn remember(xml: &[u8], paths: &Paths, incoming: Incoming) -> ExitCode {
    match note_arrival(xml, paths, incoming) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!(
                "Outram: cannot note in {} that this guest arrives by {incoming}: {error}",
                paths.run.display()
            ));
            // As a fresh start it would lose what its disk held: this one is not to be begun. libvirt
            // then leaves the saved image, and the guest on the other host, as they are.
            ExitCode::FAILURE
        }
    }
}

/// Notes an arrival. A domain whose XML or settings are no good is left to `prepare`, which refuses
/// it with the reason.
pub fn note_arrival(xml: &[u8], paths: &Paths, incoming: Incoming) -> io::Result<()> {
    let Ok(domain) = DomainXml::parse(&String::from_utf8_lossy(xml)) else {
        return Ok(());
    };
    match (metadata::read(&domain), domain.vm_id()) {
        (Ok(Some(_)), Ok(vm)) => arrival::note(&paths.run, vm, incoming, Caller::of_this_process()),
        _ => Ok(()),
    }
}

/// [`prepare`], for a domain that is being started: where that is refused, word of it is left for 'outram
/// status'. libvirt tells whoever starts a domain, and nobody where that is itself, as the host boots.
pub fn prepare_start(xml: &[u8], paths: &Paths) -> Result<(), HookError> {
    prepare(xml, paths).inspect_err(|error| {
        // By this, 'outram doctor' on another host asks whether the hook is called: there is no such guest.
        if let HookError::Metadata(MetadataError::Element { found, .. }) = error
            && found == PROBE
        {
            return;
        }
        let Ok(domain) = DomainXml::parse(&String::from_utf8_lossy(xml)) else {
            return;
        };
        if let (Ok(vm), Ok(name)) = (domain.vm_id(), domain.name()) {
            launch::note_refusal(&paths.run, vm, &name, &with_causes(error));
        }
    })
}

/// Starts the backend of a domain that uses Outram.
pub fn prepare(xml: &[u8], paths: &Paths) -> Result<(), HookError> {
    let domain = DomainXml::parse(&String::from_utf8_lossy(xml))?;
    let incoming = arrival::take(&paths.run, domain.vm_id()?, Caller::of_this_process());
    if let Some(incoming) = incoming
        && refusal::our_disks(&domain, &paths.run).is_empty()
        && metadata::read(&domain)?.is_some()
    {
        // What arrives is all of its memory: 'attach --live' or 'detach --live' had been ended halfway.
        say(&format!(
            "Outram: domain '{0}' arrives by {incoming} without its disk, and is not paged; 'outram attach {0} --live' does that, 'outram detach {0} --live' removes its settings",
            domain.name()?
        ));
        return Ok(());
    }
    let Some(mut launch) = plan(&domain, paths)? else {
        return Ok(());
    };
    launch.incoming = incoming;
    // Guests on hugetlbfs have none of these.
    let huge = match launch.page_size.is_huge() {
        true => Vec::new(),
        false => shmem_thp::find(Path::new(shmem_thp::SETTINGS))?,
    };
    if !huge.is_empty() {
        return Err(HookError::HugeShmem(huge));
    }
    Ok(launch.start()?)
}

/// What is to be started for a domain; `None` if it does not use Outram.
fn plan(domain: &DomainXml, paths: &Paths) -> Result<Option<Launch>, HookError> {
    let Some(settings) = metadata::read(domain)? else {
        let disks = refusal::our_disks(domain, &paths.run);
        let socket = disks
            .first()
            .and_then(|disk| refusal::vhostuser_socket(domain, *disk));
        return match socket {
            // Without a backend, QEMU would wait for it for ever.
            Some(socket) => Err(HookError::Refused(vec![Refusal::NoSettings(
                socket.to_owned(),
            )])),
            None => Ok(None),
        };
    };
    let refusals = refusal::check(domain, &paths.run)?;
    if !refusals.is_empty() {
        return Err(HookError::Refused(refusals));
    }
    if let Some(lacking) = apparmor::hindrance(domain) {
        return Err(HookError::AppArmor(lacking));
    }
    if settings.servers.is_empty() && HostSettings::read(&paths.config)?.servers.is_empty() {
        return Err(HookError::NoServer(paths.config.clone()));
    }
    Ok(Some(Launch {
        backend: host::find_backend(paths)?,
        run: paths.run.clone(),
        vm: domain.vm_id()?,
        name: domain.name()?,
        ram_bytes: domain.ram_bytes()?,
        max_ram_bytes: domain.max_ram_bytes()?,
        page_size: page_size::find(domain).map_err(|refusal| HookError::Refused(vec![refusal]))?,
        settings,
        socket_user: qemu_user::find(domain, &paths.qemu_conf),
        incoming: None,
        systemd: paths.systemd,
        config: paths.config_is_given.then(|| paths.config.clone()),
    }))
}

/// Ends a backend that no QEMU ever came to, and returns the reason it left, if any.
pub fn release(xml: &[u8], paths: &Paths) -> Option<String> {
    let domain = DomainXml::parse(&String::from_utf8_lossy(xml)).ok()?;
    let vm = domain.vm_id().ok()?;
    arrival::forget(&paths.run, vm);
    let run_dir = paths.run.join(vm.to_string());
    let control = BackendControl::of(&run_dir);
    match control.status() {
        // Should it refuse or be gone, the next start deals with what is left.
        Ok(status) if matches!(status.phase, Phase::Waiting | Phase::Refused) => {
            let _ = control.stop();
        }
        Ok(_) => {}
        Err(_) => launch::clear_abandoned(&run_dir),
    }
    let reason = launch::reason(&run_dir);
    if reason.is_none() {
        // The name is of use only with something to be told of it.
        let _ = fs::remove_file(launch::name_file(&paths.run, vm));
    }
    reason
}
