//! The vhost-user door: QEMU's first connection hands its guest's memory over; it and the later
//! ones are served as a disk.

use std::os::fd::RawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use anyhow::Context;
use crossbeam_channel::{Sender, bounded};
use outram_wire::causes::with_causes;
use outram_wire::control::{Counters, DiskStatus};
use outram_wire::lost_pages::LostPages;

use super::config::Config;
use super::stage::{Daemon, Stage};
use super::termination::Terminations;
use crate::crash_points::{self, Point};
use crate::device::{self, Device, DeviceConfig, DeviceError};
use crate::far_disk::FarDisk;
use crate::handover::{self, Options, Vmm, Way, discover};
use crate::pager::{Course, HomingError, Orphan, Pager};
use crate::remote::RemoteConfig;
use crate::whole;

/// A front end sends its first message at once.
const FIRST_MESSAGE: Duration = Duration::from_secs(10);

/// How long a QEMU that was told to terminate may see no fault answered.
const TERMINATION_PATIENCE: Duration = Duration::from_secs(2);

/// A QEMU that has not connected again after this has dropped the disk: it does so within a second
/// (`<reconnect timeout='1'/>`) where it means to keep it.
const DROPPED_AFTER: Duration = Duration::from_secs(5);

/// How long memory may take to come home where a hand-over failed at its very end.
const UNDO_TIMEOUT: Duration = Duration::from_secs(60);
/// How often QEMU's memory map is looked at: a guest takes longer to use memory that was plugged, and
/// whoever waits for memory that was unplugged hardly notices.
const FOLLOW_MEMORY: Duration = Duration::from_millis(200);

/// How often QEMU's open files are looked at: some hundred microseconds' work. A device that was plugged is in use
/// hardly sooner, for the guest's kernel has to find it first.
const FOLLOW_FILES: Duration = Duration::from_millis(500);

/// How long the first of these looks is waited for: it takes seconds where there may be large folios in guest RAM.
const FIRST_LOOK: Duration = Duration::from_secs(1);

/// `SIGKILL` in the kernel's mask of pending signals.
const SIGKILL_BIT: u64 = 1 << (libc::SIGKILL - 1);

/// A guest whose memory is served.
pub(super) struct Guest {
    pub(super) vmm: Arc<Vmm>,
    pub(super) way: Way,
    pub(super) pager: Arc<Pager>,
    pub(super) device: Device,
    /// The userfaultfds' numbers in QEMU.
    userfaultfds: Vec<RawFd>,
    disk_link: Mutex<DiskLink>,
    let_go: AtomicBool,
    terminations: Option<Terminations>,
    stuck: Mutex<Option<Stuck>>,
}

/// What QEMU does on the disk's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DiskLink {
    /// It has let go of the disk.
    Gone(Instant),
    /// It has said nothing yet, or is about to connect.
    New,
    /// It has said nothing for longer than it takes.
    Silent,
    /// It has spoken.
    Speaking,
}

/// What is told of a disk whose QEMU has connected and says nothing.
const SILENT_DISK: &str = "QEMU has connected and says nothing: up to version 9.0 it loses a disk whose backend dies \
     while it connects again, and the guest's requests wait for good. Its memory is served. To bring the disk \
     back, shut the guest down (or destroy it) and start it";

/// A QEMU that was told to terminate while the guest waits for a page.
struct Stuck {
    since: Instant,
    answered_faults: u64,
}

impl Guest {
    /// A guest whose memory is served. QEMU is connected, or was a moment ago and nothing is known to the
    /// contrary.
    fn new(
        vmm: Arc<Vmm>,
        way: Way,
        pager: Arc<Pager>,
        device: Device,
        userfaultfds: Vec<RawFd>,
    ) -> Self {
        Self {
            terminations: watch_terminations(&vmm),
            vmm,
            way,
            pager,
            device,
            userfaultfds,
            disk_link: Mutex::new(DiskLink::New),
            let_go: AtomicBool::new(false),
            stuck: Mutex::new(None),
        }
    }

    /// What happened since the start.
    pub(super) fn counters(&self) -> Counters {
        let device = self.device.counters();
        Counters {
            stray_device_accesses: device.stray_device_accesses,
            ..self.pager.counters()
        }
    }

    /// A killed QEMU whose threads wait in faults may not be reapable before they are let go: a
    /// vhost worker waits without heeding the signal, and the process counts as alive.
    pub(super) fn let_go_if_killed(&self) {
        if self.pager.waiting_faults() == 0 || self.let_go.load(Ordering::Relaxed) {
            return;
        }
        if is_being_killed(self.vmm.pid) {
            tracing::info!(
                pid = self.vmm.pid,
                "QEMU is being killed: its waiting threads are let go"
            );
            self.let_go.store(true, Ordering::Relaxed);
            self.pager.let_go();
        }
    }
}

impl Guest {
    /// Leaves its memory to the kernel, now that every page is home, and closes the userfaultfds in
    /// QEMU. Where that last step fails they stay open there: registered for nothing, they do no harm.
    pub(super) fn release(&self) -> Result<(), HomingError> {
        let was = self.pager.course();
        self.pager.release()?;
        if was != Course::Released {
            close_userfaultfds(&self.vmm, &self.userfaultfds);
        }
        tracing::info!(pid = self.vmm.pid, "the guest's memory is released");
        Ok(())
    }

    /// Whether nothing is left to do for the guest: its memory is released and its disk dropped.
    pub(super) fn is_detached(&self) -> bool {
        let link = *lock(&self.disk_link);
        self.pager.course() == Course::Released
            && matches!(link, DiskLink::Gone(since) if since.elapsed() > DROPPED_AFTER)
    }

    /// Whether the backend may end at once where it is asked to.
    pub(super) fn may_be_left(&self) -> bool {
        let link = *lock(&self.disk_link);
        self.pager.course() == Course::Released && matches!(link, DiskLink::Gone(_))
    }

    /// Adds to a disk's status what is known of QEMU's end of it.
    pub(super) fn tell_disk_link(&self, status: &mut DiskStatus) {
        let link = *lock(&self.disk_link);
        status.connected = Some(link == DiskLink::Speaking);
        if link == DiskLink::Silent && status.detail.is_none() {
            status.detail = Some(SILENT_DISK.to_owned());
        }
    }

    /// Waits until QEMU says something, or goes.
    fn wait_for_word(&self, stream: &UnixStream) {
        while let Err(DeviceError::Silent(_)) = device::wait_first_message(stream, FIRST_MESSAGE) {
            if self.note_link(DiskLink::Silent) != DiskLink::Silent {
                tracing::warn!("the disk: {SILENT_DISK}");
            }
        }
    }

    /// What it was before.
    fn note_link(&self, link: DiskLink) -> DiskLink {
        std::mem::replace(&mut *lock(&self.disk_link), link)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change under these locks is one assignment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn close_userfaultfds(vmm: &Vmm, numbers: &[RawFd]) {
    match handover::close(vmm, numbers, &Options::default()) {
        Ok(()) => tracing::info!(pid = vmm.pid, "userfaultfds closed in QEMU"),
        Err(error) => {
            let error = with_causes(&error);
            tracing::warn!(pid = vmm.pid, %error, "unused userfaultfds stay open in QEMU");
        }
    }
}

/// Undoes a hand-over that failed at its very end: a guest that ran before is to run on.
fn undo(pager: &Pager, vmm: &Vmm, userfaultfds: &[RawFd]) {
    let deadline = Instant::now() + UNDO_TIMEOUT;
    let outcome = pager.bring_home().and_then(|()| {
        while !pager.is_home() && Instant::now() < deadline && !vmm.has_ended() {
            std::thread::sleep(Duration::from_millis(20));
        }
        pager.release()
    });
    match outcome {
        Ok(()) => {
            close_userfaultfds(vmm, userfaultfds);
            pager.end();
        }
        Err(error) => tracing::error!(%error, "the hand-over cannot be undone"),
    }
}

impl Guest {
    /// A QEMU that was told to terminate cannot while a vCPU waits for a page that does not come:
    /// it is killed, as libvirt would ten seconds later. Nothing wrong is read by that.
    pub(super) fn kill_if_stuck_at_its_end(&self) {
        if !self.terminations.as_ref().is_some_and(Terminations::seen) {
            return;
        }
        let answered_faults = self.pager.stats().answered_faults();
        let waits = self.pager.waiting_faults() > 0;
        let mut stuck = lock(&self.stuck);
        match &*stuck {
            Some(known) if waits && known.answered_faults == answered_faults => {
                if known.since.elapsed() < TERMINATION_PATIENCE {
                    return;
                }
                tracing::warn!(
                    pid = self.vmm.pid,
                    "QEMU was told to terminate and cannot, for the guest waits for a page: killing it"
                );
                if let Err(error) = self.vmm.kill() {
                    tracing::debug!(%error, "QEMU is gone already");
                }
            }
            _ => {
                *stuck = Some(Stuck {
                    since: Instant::now(),
                    answered_faults,
                })
            }
        }
    }
}

/// Looks at something of QEMU's again and again, for as long as the guest lives; says so where it cannot be looked at
/// any more.
fn follow(
    guest: &Weak<Guest>,
    every: Duration,
    trouble: &str,
    mut look: impl FnMut(&Guest) -> std::io::Result<()>,
) {
    let mut was_seen = true;
    while let Some(guest) = guest.upgrade() {
        match look(&guest) {
            Ok(()) => was_seen = true,
            // Its end is noticed elsewhere.
            Err(_) if guest.vmm.has_ended() => return,
            Err(error) if was_seen => {
                was_seen = false;
                tracing::warn!(%error, "{trouble}");
            }
            Err(_) => {}
        }
        drop(guest);
        std::thread::sleep(every);
    }
}

/// Follows memory that is plugged and unplugged. May wait for servers.
fn follow_memory(guest: &Weak<Guest>) {
    let trouble = "QEMU's memory map is not readable: hot-plugged memory is not noticed";
    follow(guest, FOLLOW_MEMORY, trouble, |guest| {
        guest.device.forget(&guest.pager.follow_memory()?);
        Ok(())
    });
}

/// Looks at what QEMU has open. Says when it has looked for the first time.
fn follow_files(guest: &Weak<Guest>, looked: &Sender<()>) {
    let trouble =
        "QEMU's open files cannot be looked at: a disk plugged with cache='none' is not noticed";
    follow(guest, FOLLOW_FILES, trouble, |guest| {
        let seen = guest.pager.follow_files();
        // Nobody waits for more than the first, or for long.
        let _ = looked.try_send(());
        seen
    });
}

/// Whether a process is on its way out.
fn is_being_killed(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
    tells_of_an_end(&status.unwrap_or_default())
}

/// Whether a process's `status` tells of a SIGKILL pending, or of a first thread that has ended before others: one
/// that aborts or crashes has no signal pending, and QEMU's main thread never ends alone.
fn tells_of_an_end(status: &str) -> bool {
    let of = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_default().trim()
    };
    let mask = |name: &str| u64::from_str_radix(of(name), 16).unwrap_or(0);
    of("State:").starts_with(['Z', 'X']) || (mask("ShdPnd:") | mask("SigPnd:")) & SIGKILL_BIT != 0
}

/// The thread that accepts QEMU.
pub(super) struct GuestDoor {
    daemon: Arc<Daemon>,
}

impl GuestDoor {
    /// Starts accepting.
    pub(super) fn open(listener: UnixListener, daemon: &Arc<Daemon>) -> anyhow::Result<()> {
        let door = Self {
            daemon: Arc::clone(daemon),
        };
        let work = move || {
            for connection in listener.incoming() {
                match connection {
                    Ok(stream) => door.admit(stream),
                    Err(error) => {
                        tracing::warn!(%error, "a vhost-user connection was not accepted");
                        std::thread::sleep(Duration::from_millis(100));
                    }
                }
            }
        };
        whole::spawn("vhost-user", work).context("starting a thread")?;
        Ok(())
    }

    /// Takes the guest over on its first connection; serves this one as a disk. A refused QEMU is
    /// cut off each time, until it gives up.
    fn admit(&self, stream: UnixStream) {
        if matches!(self.daemon.stage(), Stage::Waiting) {
            if let Err(error) = device::wait_first_message(&stream, FIRST_MESSAGE) {
                tracing::warn!(%error, "somebody connected to the vhost-user socket and said nothing");
                return;
            }
            if !self.daemon.end_waiting(Stage::TakingOver) {
                return;
            }
            match self.take_over(&stream) {
                Ok(guest) => {
                    if let Err(error) = serve(&self.daemon, guest) {
                        tracing::error!("the guest is left to another process: {error:#}");
                        std::process::abort();
                    }
                }
                Err(error) => {
                    let reason = with_causes(error.as_ref());
                    tracing::error!(%reason, "the guest's memory is refused");
                    self.daemon.set_stage(Stage::Refused(reason));
                }
            }
        }
        if let Stage::Serving(guest) = self.daemon.stage()
            && let Err(error) = serve_disk(&guest, stream)
        {
            tracing::warn!("{error:#}");
        }
    }

    /// The hand-over.
    fn take_over(&self, stream: &UnixStream) -> anyhow::Result<Guest> {
        let vmm = Arc::new(Vmm::of_peer(stream, &self.daemon.powers)?);
        let blocks = vmm.guest_ram()?;
        for block in &blocks {
            tracing::info!(name = %block.name, bytes = block.length, "guest RAM");
        }
        let config = &self.daemon.config;
        if config.lost_pages == LostPages::Poison {
            discover::demand_kvm(vmm.pid)?;
        }
        let options = Options {
            allow_sysctl: config.allow_sysctl,
            ..Options::default()
        };
        let handed_over = handover::take(&vmm, stream, self.daemon.userfaultfds(), &options)?;
        tracing::info!(pid = vmm.pid, way = %handed_over.way, "memory handed over");
        crash_points::pass(Point::AttachInjected);
        let prepared = self
            .daemon
            .take_prepared()
            .context("the guest was taken over before")?;
        let (way, userfaultfds) = (handed_over.way, handed_over.vmm_fd_numbers.clone());
        let started = prepared.start(&vmm, blocks, handed_over);
        // Nothing has been moved: closing them leaves a guest that ran before as it was.
        let pager = Arc::new(started.inspect_err(|_| close_userfaultfds(&vmm, &userfaultfds))?);
        let device = DeviceConfig {
            far_disk: self.daemon.disk.clone(),
            ..DeviceConfig::new(config.vm)
        };
        let device = Device::new(device, Arc::clone(&pager) as _)
            .inspect_err(|_| undo(&pager, &vmm, &userfaultfds))?;
        Ok(Guest::new(vmm, way, pager, device, userfaultfds))
    }
}

fn watch_terminations(vmm: &Vmm) -> Option<Terminations> {
    let terminations = Terminations::watch(vmm);
    terminations
        .inspect_err(|error| {
            tracing::info!(%error, "signals to QEMU are not counted here: 'virsh destroy' of a stopped guest takes 10 s");
        })
        .ok()
}

/// The guest of a backend that died: its memory is served when this returns. Its disk is, once QEMU
/// connects again.
pub(super) fn take_over_again(
    config: &Config,
    orphan: Orphan,
    remote: &RemoteConfig,
    disk: Option<Arc<FarDisk>>,
) -> anyhow::Result<Guest> {
    let (way, userfaultfds) = (orphan.way(), orphan.userfaultfds().to_vec());
    let (vmm, pager) = orphan.take_over(remote, config.lost_pages)?;
    let pager = Arc::new(pager);
    let device = DeviceConfig {
        far_disk: disk,
        ..DeviceConfig::new(config.vm)
    };
    let device = Device::new(device, Arc::clone(&pager) as _)?;
    tracing::info!(pid = vmm.pid, "memory taken over again");
    Ok(Guest::new(vmm, way, pager, device, userfaultfds))
}

/// From here on the guest is served, until it ends. Fails where nobody would follow what is plugged into it.
pub(super) fn serve(daemon: &Daemon, guest: Guest) -> anyhow::Result<()> {
    let guest = Arc::new(guest);
    let followed = Arc::downgrade(&guest);
    whole::spawn("hot-plug", move || follow_memory(&followed)).context("starting a thread")?;
    let followed = Arc::downgrade(&guest);
    let (looked, first_look) = bounded(1);
    whole::spawn("open-files", move || follow_files(&followed, &looked))
        .context("starting a thread")?;
    // Nothing is evicted before where it is taken over: whoever asks is to find it at work.
    let _ = first_look.recv_timeout(FIRST_LOOK);
    daemon.set_stage(Stage::Serving(guest));
    Ok(())
}

fn serve_disk(guest: &Guest, stream: UnixStream) -> anyhow::Result<()> {
    let peer = handover::peer(&stream)?;
    if peer.pid != guest.vmm.pid {
        anyhow::bail!(
            "process {} connected to the vhost-user socket of QEMU {}: it is cut off",
            peer.pid,
            guest.vmm.pid
        );
    }
    guest.note_link(DiskLink::New);
    guest.wait_for_word(&stream);
    guest.note_link(DiskLink::Speaking);
    let served = guest.device.serve(stream);
    guest.note_link(DiskLink::Gone(Instant::now()));
    served.context("the vhost-user connection ended")?;
    tracing::info!("QEMU disconnected the disk");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vmm_on_its_way_out_is_known_by_its_status() {
        let status = |state: &str, pending: &str| {
            format!(
                "Name:\tqemu\nState:\t{state}\nSigPnd:\t{:016x}\nShdPnd:\t{pending}\n",
                0
            )
        };
        let kill = "0000000000000100";
        let none = "0000000000000000";
        assert!(tells_of_an_end(&status("S (sleeping)", kill)));
        assert!(tells_of_an_end(&status("Z (zombie)", none)));
        assert!(!tells_of_an_end(&status("D (disk sleep)", none)));
        assert!(!tells_of_an_end(&status(
            "t (tracing stop)",
            "0000000000004000"
        )));
        assert!(!tells_of_an_end(""));
    }
}
