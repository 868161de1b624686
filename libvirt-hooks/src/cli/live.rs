//! Attaching a domain that runs, and detaching it while it does.
//!
//! Attaching has three steps (settings, backend, disk), each undone where a later one fails.
//! Detaching brings every page home before anything is taken apart, so that it can be called off
//! until then, and leaves nothing behind that the guest needs from there on.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use outram_wire::control::{Phase, Status};
use outram_wire::units::{PageSize, format_size};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::attach::{list, remove_run_dir};
use super::progress::Progress;
use super::report::run_dir;
use crate::apparmor::GuestProfile;
use crate::attachment::{self, AttachRequest, Change, RunningAttachment};
use crate::backend_control::{BackendControl, ControlError, Homecoming};
use crate::domain_xml::DomainXml;
use crate::host::Paths;
use crate::hotplug_slot;
use crate::libvirt::{LibvirtDomain, LibvirtError};
use crate::refusal::{self, Refusal};
use crate::{hook, host_memory, process};
use crate::{metadata, page_size};

/// Between two looks at what is waited for.
const POLL: Duration = Duration::from_millis(200);

/// How long memory may take to come home where an attachment is undone.
const UNDO_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a guest may take to let go of the disk: its own kernel has to agree.
const UNPLUG_TIMEOUT: Duration = Duration::from_secs(120);

/// Until a guest is asked again: it misses what it is asked while it is still taking the disk in.
const UNPLUG_PAUSE: Duration = Duration::from_secs(10);

/// How long a backend may take to end once nothing depends on it.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a backend that has just been handed a guest's memory may be silent.
const HANDED_OVER_TIMEOUT: Duration = Duration::from_secs(60);

/// Why a running domain is not attached or detached.
#[derive(Debug, thiserror::Error)]
pub(super) enum LiveRefusal {
    /// It is attached.
    #[error("domain '{0}' is attached already: 'outram tune {0}' changes its limit")]
    Attached(String),
    /// Its memory cannot be taken over as it is.
    #[error(
        "domain '{name}' cannot be attached while it runs:{}\nTo attach it at its next start instead: outram attach {name} --config …, shut it down, and start it again",
        list(.refusals)
    )]
    Domain {
        /// Its name.
        name: String,
        /// Why not.
        refusals: Vec<Refusal>,
    },
    /// It is not attached.
    #[error("domain '{0}' does not use Outram as it runs; --config changes its definition")]
    NotAttached(String),
    /// Its memory is hugetlbfs's.
    #[error(
        "domain '{0}' has its memory on hugetlbfs, of which all is there once it runs; to attach it at its next start instead: outram attach {0} --config …, shut it down, and start it again"
    )]
    HugePages(String),
    /// The same, while it is to be detached.
    #[error(
        "domain '{0}' has its memory on hugetlbfs, which does not come home while it runs: shut the guest down, then detach it"
    )]
    HugePagesHome(String),
    /// It has a disk in far memory.
    #[error(
        "domain '{0}' has a far-memory disk, which may hold its swap or files and goes with the pager: shut the guest down, then detach it"
    )]
    FarDisk(String),
    /// Interrupted before the point of no return.
    #[error("interrupted: domain '{0}' is served as before, at its limit")]
    Interrupted(String),
    /// Interrupted while it was attached.
    #[error("interrupted: domain '{0}' is as it was before")]
    AttachInterrupted(String),
    /// Another command is at it.
    #[error(
        "another 'outram attach' or 'outram detach' of domain '{0}' is under way: let it end first"
    )]
    UnderWay(String),
    /// Interrupted after that point.
    #[error(
        "interrupted: all memory of domain '{0}' is on this host and no longer paged, but the guest has not let go of the disk yet. It does no harm; run this again later"
    )]
    UnplugInterrupted(String),
    /// It ended meanwhile.
    #[error(
        "domain '{0}' was shut down before it had let go of the disk: nothing of it runs any more; 'outram detach {0} --config' changes its definition"
    )]
    ShutDown(String),
    /// The guest does not let go of the disk.
    #[error(
        "all memory of domain '{0}' is on this host and no longer paged, but the guest has not let go of the disk within {UNPLUG_TIMEOUT:?} (a guest that is just booting, or has no PCI hot-plug, does not). It does no harm; run this again later, or shut the guest down"
    )]
    DiskStays(String),
}

/// A running domain, as libvirt and its backend know it.
pub(super) struct Running<'a> {
    domain: &'a LibvirtDomain,
    name: &'a str,
    paths: &'a Paths,
    xml: DomainXml,
    control: BackendControl,
    /// AppArmor's, if the guest is confined.
    profile: Option<GuestProfile>,
}

/// A lock that one process has at a time: a file that is there for as long.
struct Alone {
    path: PathBuf,
    _file: File,
}

impl Alone {
    fn take(path: &Path) -> io::Result<Option<Self>> {
        loop {
            let mut options = File::options();
            let options = options.create(true).write(true).mode(0o600);
            let file = options.open(path)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
            // Whoever had it before may have removed it just now.
            let is_there = fs::metadata(path).is_ok_and(|found| {
                file.metadata()
                    .is_ok_and(|ours| (ours.dev(), ours.ino()) == (found.dev(), found.ino()))
            });
            if is_there {
                return Ok(Some(Self {
                    path: path.to_owned(),
                    _file: file,
                }));
            }
        }
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        // One that is left is locked by nobody.
        let _ = fs::remove_file(&self.path);
    }
}

/// An attachment whose every condition is met.
pub(super) struct Prepared {
    attachment: RunningAttachment,
    /// The domain's XML as it will be.
    text: String,
}

impl Prepared {
    /// What changes.
    pub(super) fn changes(&self) -> &[Change] {
        &self.attachment.changes
    }
}

impl<'a> Running<'a> {
    /// Looks at a domain that runs.
    pub(super) fn new(domain: &'a LibvirtDomain, name: &'a str, paths: &'a Paths) -> Result<Self> {
        let xml = DomainXml::parse(&domain.running_definition()?)?;
        let vm = domain.vm_id()?;
        let run_dir = run_dir(paths, vm);
        Ok(Self {
            domain,
            name,
            paths,
            xml,
            control: BackendControl::of(&run_dir),
            profile: GuestProfile::of_running(vm),
        })
    }

    /// Checks all that can be checked before anything is touched.
    pub(super) fn prepare(&self, request: &AttachRequest) -> Result<Prepared> {
        if !refusal::our_disks(&self.xml, &self.paths.run).is_empty() {
            bail!(LiveRefusal::Attached(self.name.to_owned()));
        }
        let mut edited = DomainXml::parse(&self.domain.running_definition()?)?;
        let attachment = attachment::attach_running(&mut edited, &self.paths.run, request)?;
        let refusals = refusal::check(&edited, &self.paths.run)?;
        if !refusals.is_empty() {
            bail!(LiveRefusal::Domain {
                name: self.name.to_owned(),
                refusals,
            });
        }
        demand_small_pages(&edited, LiveRefusal::HugePages(self.name.to_owned()))?;
        if let Some(profile) = &self.profile {
            profile.check()?;
        }
        hotplug_slot::find(&self.xml)?;
        Ok(Prepared {
            attachment,
            text: edited.to_text()?,
        })
    }

    /// Attaches it: settings, backend, disk. Where one fails, those before are undone.
    pub(super) fn attach(&self, prepared: &Prepared) -> Result<()> {
        let _alone = self.be_alone()?;
        let interrupted = on_signals()?;
        if self.disk_after_others()?.is_some() {
            bail!(LiveRefusal::Attached(self.name.to_owned()));
        }
        let settings = &prepared.attachment.settings;
        self.domain.set_running_settings(Some(settings))?;
        let Err(error) = self.attach_backend(prepared, &interrupted) else {
            return Ok(());
        };
        // A disk that stays belongs with the settings: together they can be detached, saved and migrated.
        match self.running_disk() {
            Ok(None) => {
                if let Err(error) = self.domain.set_running_settings(None) {
                    complain!(
                        "warning: the settings stay in the running domain's metadata: {error}"
                    );
                }
            }
            _ => complain!(
                "warning: its disk stays, and the settings with it; once its backend answers, 'outram detach {} --live' takes both away",
                self.name
            ),
        }
        Err(error)
    }

    /// Keeps others from attaching or detaching the domain as it runs, for as long as it is kept.
    fn be_alone(&self) -> Result<Alone> {
        let name = format!("{}.live", self.domain.vm_id()?);
        let path = self.paths.run.join(name);
        fs::create_dir_all(&self.paths.run)
            .with_context(|| format!("making {}", self.paths.run.display()))?;
        let taken = Alone::take(&path).with_context(|| format!("locking {}", path.display()))?;
        taken.with_context(|| LiveRefusal::UnderWay(self.name.to_owned()))
    }

    /// The disk as libvirt knows it now.
    fn running_disk(&self) -> Result<Option<String>> {
        let now = DomainXml::parse(&self.domain.running_definition()?)?;
        let disk = attachment::running_disk(&now, &self.paths.run);
        Ok(disk.map(|(disk, _)| disk))
    }

    /// The disk, once libvirt has ended what a command asked it for that was killed meanwhile: settings without a
    /// disk are of such a one. libvirt changes one thing of a domain at a time.
    fn disk_after_others(&self) -> Result<Option<String>> {
        if let Some(disk) = self.running_disk()? {
            return Ok(Some(disk));
        }
        if let Some(settings) = metadata::read(&self.xml)? {
            let same = metadata::to_plain_text(&settings)?;
            self.domain.set_running_settings(Some(&same))?;
        }
        self.running_disk()
    }

    fn attach_backend(&self, prepared: &Prepared, interrupted: &AtomicBool) -> Result<()> {
        if let Some(profile) = &self.profile {
            // It may have been loaded before our rules were there.
            profile.renew()?;
        }
        // Just as libvirt's hook does it at a start, and with the same refusals.
        if let Err(error) = hook::prepare(prepared.text.as_bytes(), self.paths) {
            // Its reason is told here and now: nobody looks for it there.
            if let Err(left) = remove_run_dir(self.domain, self.paths) {
                complain!("warning: {left:#}");
            }
            return Err(error.into());
        }
        let attached = match interrupted.load(Ordering::Relaxed) {
            true => Err(LiveRefusal::AttachInterrupted(self.name.to_owned()).into()),
            // From here on it is attached, or not: QEMU waits for the backend.
            false => self.attach_disk(&prepared.attachment.disk),
        };
        if attached.is_err()
            && let Err(error) = self.undo()
        {
            complain!(
                "warning: its backend could not be ended: {error:#}; the guest goes on with it"
            );
        }
        attached
    }

    fn attach_disk(&self, disk: &str) -> Result<()> {
        let plugged = self.domain.attach_device(disk);
        let status = self.status_after_handover();
        match (plugged, status) {
            (Ok(()), Ok(status)) if status.qemu_pid.is_some() => Ok(()),
            (Ok(()), status) => {
                let why = status.map_or_else(|error| error.to_string(), describe);
                if let Err(error) = self.domain.detach_device(disk) {
                    complain!("warning: {error}");
                }
                bail!("QEMU took the disk, but its memory was not handed over: {why}")
            }
            // The backend's own reason says more than QEMU's lost connection.
            (Err(_), Ok(status)) if status.phase == Phase::Refused => {
                bail!(
                    "domain '{}' cannot be attached: {}",
                    self.name,
                    describe(status)
                )
            }
            (Err(error), _) => Err(error.into()),
        }
    }

    /// What the backend says once QEMU took the disk, or would not: on a busy host it has much to do just then, and
    /// where its pager died its supervisor starts another.
    fn status_after_handover(&self) -> Result<Box<Status>, ControlError> {
        let deadline = Instant::now() + HANDED_OVER_TIMEOUT;
        loop {
            match self.control.status() {
                Err(ControlError::Silent(..)) if Instant::now() < deadline => {}
                Err(ControlError::NotRunning(_) | ControlError::Closed(_))
                    if Instant::now() < deadline && !self.control.has_ended() =>
                {
                    sleep(POLL);
                }
                answer => return answer,
            }
        }
    }

    /// Ends the backend of an attachment that failed; whatever has left already comes home.
    fn undo(&self) -> Result<()> {
        let has_memory = match self.status_after_handover() {
            Ok(status) => status.qemu_pid.is_some(),
            Err(ControlError::NotRunning(_)) => false,
            Err(error) => return Err(error.into()),
        };
        if has_memory {
            let homecoming = self.control.bring_home()?;
            let deadline = Instant::now() + UNDO_TIMEOUT;
            while !is_home(&*homecoming.status()?) {
                if Instant::now() > deadline {
                    bail!("its memory does not come home within {UNDO_TIMEOUT:?}");
                }
                sleep(POLL);
            }
            homecoming.release()?;
        }
        self.end_backend()?;
        remove_run_dir(self.domain, self.paths)
    }

    /// Ends a backend that no guest depends on.
    fn end_backend(&self) -> Result<()> {
        let deadline = Instant::now() + END_TIMEOUT;
        while !self.control.has_ended() {
            let is_late = Instant::now() > deadline;
            match self.control.stop() {
                Ok(()) | Err(ControlError::NotRunning(_)) if is_late => {
                    bail!("its backend does not end within {END_TIMEOUT:?}")
                }
                Err(error) if is_late => return Err(error.into()),
                _ => sleep(POLL),
            }
        }
        Ok(())
    }

    /// What `detach` would change.
    pub(super) fn detachment(&self) -> Result<Vec<Change>> {
        demand_no_far_disk(&self.xml, self.name)?;
        let disk = attachment::running_disk(&self.xml, &self.paths.run);
        let settings = metadata::find_element(&self.xml);
        let mut changes: Vec<Change> = disk.into_iter().map(|(_, change)| change).collect();
        if settings.is_some() {
            changes.push(Change {
                sign: '-',
                what: "<outram:memory> in the running domain's <metadata>".to_owned(),
            });
        }
        if changes.is_empty() {
            bail!(LiveRefusal::NotAttached(self.name.to_owned()));
        }
        demand_small_pages(&self.xml, LiveRefusal::HugePagesHome(self.name.to_owned()))?;
        Ok(changes)
    }

    /// Brings everything home, then takes disk, backend and settings away.
    pub(super) fn detach(&self) -> Result<()> {
        let _alone = self.be_alone()?;
        let interrupted = on_signals()?;
        if let Some(disk) = self.disk_after_others()? {
            self.bring_home(&interrupted)?;
            self.unplug(&disk, &interrupted)?;
        }
        self.end_backend()?;
        self.domain.set_running_settings(None)?;
        remove_run_dir(self.domain, self.paths)
    }

    fn bring_home(&self, interrupted: &AtomicBool) -> Result<()> {
        let status = self.control.status().with_context(|| {
            format!(
                "the backend of domain '{}' does not answer, and its memory cannot come home without it",
                self.name
            )
        })?;
        if status.phase == Phase::Released {
            return Ok(());
        }
        demand_room(&status)?;
        let homecoming = self.control.bring_home()?;
        let mut progress = Progress::new("coming home", elsewhere(&status));
        let arrived = self.wait_home(&homecoming, &mut progress, interrupted);
        progress.end();
        arrived?;
        homecoming.release()?;
        Ok(())
    }

    fn wait_home(
        &self,
        homecoming: &Homecoming,
        progress: &mut Progress,
        interrupted: &AtomicBool,
    ) -> Result<()> {
        let mut told: Option<String> = None;
        loop {
            let status = homecoming.status()?;
            progress.show(elsewhere(&status));
            if is_home(&status) {
                return Ok(());
            }
            if interrupted.load(Ordering::Relaxed) {
                bail!(LiveRefusal::Interrupted(self.name.to_owned()));
            }
            if status.phase != Phase::Homing {
                bail!(
                    "domain '{}' cannot be detached any more: {}",
                    self.name,
                    describe(status)
                );
            }
            // An outage is waited for; whoever would rather not interrupts.
            if let Some(detail) = status
                .detail
                .as_ref()
                .filter(|detail| told.as_ref() != Some(*detail))
            {
                complain!("\nwaiting: {detail}");
                told = Some(detail.clone());
            }
            // Others may have taken the room meanwhile.
            demand_room(&status).with_context(|| {
                let left = format_size(elsewhere(&status));
                format!("called off with {left} still elsewhere; the guest is served as before")
            })?;
            sleep(POLL);
        }
    }

    /// Has the guest let go of the disk.
    fn unplug(&self, disk: &str, interrupted: &AtomicBool) -> Result<()> {
        let deadline = Instant::now() + UNPLUG_TIMEOUT;
        let mut asked: Option<(Instant, Result<(), LibvirtError>)> = None;
        loop {
            // What libvirt knows of a domain that is shut off is its definition, which may have the disk for good.
            if !self.domain.is_active()? {
                bail!(LiveRefusal::ShutDown(self.name.to_owned()));
            }
            if self.running_disk()?.is_none() {
                return Ok(());
            }
            let is_interrupted = interrupted.load(Ordering::Relaxed);
            if Instant::now() > deadline || is_interrupted {
                let stays = anyhow!(match is_interrupted {
                    true => LiveRefusal::UnplugInterrupted(self.name.to_owned()),
                    false => LiveRefusal::DiskStays(self.name.to_owned()),
                });
                return Err(match asked {
                    Some((_, Err(error))) => anyhow!(error).context(stays),
                    _ => stays,
                });
            }
            if asked
                .as_ref()
                .is_none_or(|(when, _)| when.elapsed() > UNPLUG_PAUSE)
            {
                asked = Some((Instant::now(), self.domain.detach_device(disk)));
            }
            sleep(POLL);
        }
    }
}

/// Sets a flag at Ctrl-C and its kin, instead of ending at once; not at what is ignored, as nohup(1) has it.
fn on_signals() -> Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let heeded = [SIGINT, SIGTERM, SIGHUP].into_iter();
    for signal in heeded.filter(|signal| !process::ignores(*signal)) {
        signal_hook::flag::register(signal, Arc::clone(&interrupted))
            .context("registering for signals")?;
    }
    Ok(interrupted)
}

fn describe(status: Box<Status>) -> String {
    status
        .detail
        .unwrap_or_else(|| format!("the backend is in phase {:?}", status.phase))
}

fn is_home(status: &Status) -> bool {
    status.homing.is_some_and(|homing| homing.home)
}

/// What still has to come home.
fn elsewhere(status: &Status) -> u64 {
    match status.homing {
        Some(homing) => homing.elsewhere_bytes,
        None => status.stored_bytes + status.staged_bytes + status.filled_bytes,
    }
}

/// Refuses a guest on hugetlbfs, whose memory neither leaves nor comes home while it runs.
pub(super) fn demand_small_pages(
    running: &DomainXml,
    refusal: LiveRefusal,
) -> Result<(), LiveRefusal> {
    match page_size::find(running).is_ok_and(PageSize::is_huge) {
        true => Err(refusal),
        false => Ok(()),
    }
}

/// Refuses to take a far-memory disk from a guest that runs: what lies there would be gone.
pub(super) fn demand_no_far_disk(running: &DomainXml, name: &str) -> Result<()> {
    if metadata::read(running)?.is_some_and(|settings| settings.disk.is_some()) {
        bail!(LiveRefusal::FarDisk(name.to_owned()));
    }
    Ok(())
}

/// Refuses where the host could not hold what would come home. What is staged lies here already.
pub(super) fn demand_room(status: &Status) -> Result<(), host_memory::TooLittle> {
    host_memory::check(status.stored_bytes + status.filled_bytes, status.qemu_pid)
}
