//! What the backend's threads share: its configuration, and how far the guest's life has come.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use outram_wire::control::{Counters, HomingStatus, Phase, ServerStatus, Status};
use outram_wire::identity::{Identity, IdentityStatus};
use outram_wire::seal::Seal;
use outram_wire::units::{PageSize, format_size};
use rustls::ClientConfig;

use super::config::Config;
use super::guest::Guest;
use super::lost_pages;
use super::run_dir::STATE_DIR;
use crate::far_disk::FarDisk;
use crate::handover::Powers;
use crate::pager::{Course, DISK_TABLE, HEADROOM_BYTES, MemoryReport, PreparedPager};
use crate::remote;

/// Anonymous memory of a backend that is not counted against its guest's limit: code's data,
/// stacks, connection buffers, and what the eviction policy keeps of a guest with up to 16 GiB resident.
const FIXED_ANON_BYTES: u64 = 64 << 20;

/// The same without the policy, which has the most of it where a guest is larger than that.
const OWN_ANON_BYTES: u64 = 16 << 20;

/// What the eviction policy keeps of a page that was ever in memory, and of one that is: measured by
/// `a_page_that_is_there_costs_eight_bytes_beside_its_arrival`.
const ARRIVAL_BYTES: u64 = 4;
const QUEUED_BYTES: u64 = 8;

/// Anonymous memory of a far-memory disk: buffers of its requests and connections. Its table lies beside
/// the page table.
const DISK_ANON_BYTES: u64 = 32 << 20;

/// How far the guest's life has come.
#[derive(Clone)]
pub(super) enum Stage {
    /// QEMU has not come yet.
    Waiting,
    /// It has, and its memory is being taken over.
    TakingOver,
    /// Its memory is ours to serve.
    Serving(Arc<Guest>),
    /// Its memory was refused, for this reason.
    Refused(String),
    /// It has ended.
    Ending,
}

/// The backend as all its threads see it.
pub(super) struct Daemon {
    pub(super) config: Config,
    /// What QEMU is reached with.
    pub(super) powers: Powers,
    pub(super) asked_to_stop: Arc<AtomicBool>,
    pub(super) asked_to_start_again: AtomicBool,
    identity: Arc<Identity<ClientConfig>>,
    stage: Mutex<Stage>,
    prepared: Mutex<Option<PreparedPager>>,
    pub(super) disk: Option<Arc<FarDisk>>,
}

impl Daemon {
    pub(super) fn new(
        config: Config,
        powers: Powers,
        identity: Arc<Identity<ClientConfig>>,
        prepared: Option<PreparedPager>,
        disk: Option<Arc<FarDisk>>,
    ) -> Self {
        Self {
            config,
            powers,
            asked_to_stop: Arc::default(),
            asked_to_start_again: AtomicBool::new(false),
            identity,
            stage: Mutex::new(Stage::Waiting),
            prepared: Mutex::new(prepared),
            disk,
        }
    }

    pub(super) fn stage(&self) -> Stage {
        lock(&self.stage).clone()
    }

    pub(super) fn set_stage(&self, stage: Stage) {
        *lock(&self.stage) = stage;
    }

    /// Goes on from [`Stage::Waiting`], if that is the stage still.
    pub(super) fn end_waiting(&self, next: Stage) -> bool {
        let mut stage = lock(&self.stage);
        let waits = matches!(*stage, Stage::Waiting);
        if waits {
            *stage = next;
        }
        waits
    }

    /// The pager in waiting; only once.
    pub(super) fn take_prepared(&self) -> Option<PreparedPager> {
        lock(&self.prepared).take()
    }

    /// How many userfaultfds the pager in waiting needs.
    pub(super) fn userfaultfds(&self) -> usize {
        lock(&self.prepared)
            .as_ref()
            .map_or(0, PreparedPager::userfaultfds)
    }

    pub(super) fn take_stop_request(&self) -> bool {
        self.asked_to_stop.swap(false, Ordering::Relaxed)
    }

    /// No guest will come, or none that is served.
    pub(super) fn close(&self) {
        if let Some(prepared) = self.take_prepared() {
            prepared.close();
        }
        // A new one was used by nobody; one that was to come in is still where it was.
        self.end_disk(false);
    }

    fn end_disk(&self, keep: bool) {
        if let Some(disk) = &self.disk {
            disk.end(keep);
        }
    }

    /// The guest's process is gone: everything is given back.
    pub(super) fn end(&self, guest: &Guest) {
        self.set_stage(Stage::Ending);
        // A guest that used its disk to the last was neither saved nor moved: its QEMU crashed or was
        // killed. One whose disk was stopped first may have been, or was shut down or destroyed: the
        // next start knows, and drops what it does not need. Asked before anything takes its time.
        let keep = !guest.device.is_driven();
        guest.pager.end();
        self.end_disk(keep);
    }

    /// Anonymous memory that a far-memory disk adds at most.
    fn disk_anon_bytes(&self) -> u64 {
        self.disk.as_ref().map_or(0, |_| DISK_ANON_BYTES)
    }

    /// What the table of a far-memory disk takes, by the kernel's own count.
    fn disk_table_bytes(&self) -> u64 {
        let path = self.config.dir.join(STATE_DIR).join(DISK_TABLE);
        let blocks = self
            .disk
            .as_ref()
            .and_then(|_| std::fs::metadata(path).ok());
        blocks.map_or(0, |found| found.blocks() * 512)
    }

    /// As its files are now, so that a renewal that failed is seen before it is needed.
    fn identity_status(&self) -> IdentityStatus {
        remote::refresh(&self.identity);
        self.identity.status()
    }

    /// Everything known.
    pub(super) fn status(&self) -> Status {
        let stage = self.stage();
        let guest = match &stage {
            Stage::Serving(guest) => Some(guest),
            _ => None,
        };
        // Before the memory is looked at: where all is home, nothing may be told to be elsewhere.
        let homing = guest.and_then(|guest| homing(guest));
        let memory = guest.map(|guest| guest.pager.memory()).unwrap_or_default();
        let servers = match guest {
            Some(guest) => guest.pager.servers(),
            None => lock(&self.prepared)
                .as_ref()
                .map(PreparedPager::servers)
                .unwrap_or_default(),
        };
        let (phase, detail) = phase(&stage, &memory, &servers);
        let hindrance = guest.and_then(|guest| guest.pager.hindrance());
        let (phase, detail) = hindered(phase, detail, hindrance, memory.waiting_faults);
        let limit = guest.map_or(self.config.limit, |guest| guest.pager.limit());
        Status {
            vm: self.config.vm,
            name: self.config.name.clone(),
            backend_version: env!("CARGO_PKG_VERSION").to_owned(),
            backend_pid: std::process::id(),
            takeovers: self.config.takeovers,
            qemu_pid: guest.map(|guest| guest.vmm.pid as u32),
            phase,
            detail,
            identity: self.identity_status(),
            handover: guest.map(|guest| guest.way.to_string()),
            ram_bytes: if memory.ram > 0 {
                memory.ram
            } else {
                self.config.ram_bytes
            },
            limit,
            sealed: self.config.seal == Seal::On,
            limit_bytes: match guest {
                Some(_) => memory.limit,
                None => limit.bytes(self.config.ram_bytes),
            },
            granularity_bytes: Some(match guest {
                Some(guest) => guest.pager.granularity_bytes(),
                None => self.config.tuning.granularity.unwrap_or_default().bytes(),
            }),
            workers: match guest {
                Some(guest) => guest.pager.workers(),
                None => self.config.tuning.workers,
            },
            queue_depth: Some(match guest {
                Some(guest) => guest.pager.queue_depth(),
                None => self.config.tuning.queue_depth.unwrap_or_default(),
            }),
            compressed_share: Some(match guest {
                Some(guest) => guest.pager.compressed_share(),
                None => self.config.tuning.compressed_share.unwrap_or_default(),
            }),
            unmanaged_bytes: memory.unmanaged,
            resident_bytes: memory.resident,
            staged_bytes: memory.staged,
            compressed_bytes: memory.compressed,
            compressed_held_bytes: memory.compressed_held,
            stored_bytes: memory.stored,
            filled_bytes: memory.filled,
            lost_bytes: memory.lost,
            homing,
            waiting_faults: memory.waiting_faults,
            kernel_memfd_bytes: memory.kernel_memfd,
            kernel_staging_bytes: memory.kernel_staging,
            kernel_table_bytes: memory.kernel_table + self.disk_table_bytes(),
            kernel_anon_bytes: anonymous_bytes(),
            fixed_anon_bytes: fixed_anon_bytes(&memory, self.config.page_size)
                + self.disk_anon_bytes(),
            headroom_bytes: HEADROOM_BYTES,
            counters: guest
                .map(|guest| guest.counters())
                .unwrap_or_else(Counters::default),
            latency: guest
                .map(|guest| guest.pager.latencies())
                .unwrap_or_default(),
            servers,
            disk: self.disk.as_ref().map(|disk| {
                let mut status = disk.status();
                if let Some(guest) = guest {
                    guest.tell_disk_link(&mut status);
                }
                status
            }),
        }
    }
}

/// How far a guest's memory has come home, if that is where it goes.
fn homing(guest: &Guest) -> Option<HomingStatus> {
    (guest.pager.course() != Course::Serving).then(|| {
        // The last page may come in between.
        let home = guest.pager.is_home();
        let elsewhere_bytes = if home {
            0
        } else {
            guest.pager.bytes_elsewhere()
        };
        HomingStatus {
            elsewhere_bytes,
            home,
        }
    })
}

/// The phase, and in words what is out of the ordinary.
fn phase(
    stage: &Stage,
    memory: &MemoryReport,
    servers: &[ServerStatus],
) -> (Phase, Option<String>) {
    let unreachable = || {
        let down: Vec<String> = servers
            .iter()
            .filter(|server| !server.connected)
            .map(|server| match &server.detail {
                Some(detail) => format!("{} ({detail})", server.address),
                None => server.address.clone(),
            })
            .collect();
        (!down.is_empty()).then(|| format!("out of reach: {}", down.join(", ")))
    };
    match stage {
        Stage::Waiting | Stage::TakingOver => (Phase::Waiting, unreachable()),
        Stage::Refused(reason) => (Phase::Refused, Some(reason.clone())),
        Stage::Ending => (Phase::Ending, None),
        Stage::Serving(guest) if memory.waiting_lost_faults > 0 => {
            let lost = lost_pages(guest);
            let detail = format!(
                "{} accesses wait for pages that are lost for good ({lost} pages in all): the guest is stopped where it needs them; \
                 save what can be saved, then 'virsh destroy' it",
                memory.waiting_lost_faults
            );
            (Phase::Stopped, Some(detail))
        }
        Stage::Serving(guest) if guest.pager.course() == Course::Released => {
            let detail = "all of its memory is on this host and no longer paged; \
                its disk is still attached: 'outram detach --live' takes it out";
            (Phase::Released, Some(detail.to_owned()))
        }
        Stage::Serving(guest) if guest.pager.course() != Course::Serving => {
            (Phase::Homing, unreachable())
        }
        Stage::Serving(guest) if memory.unmanaged > 0 => {
            let aside = format!(
                "{} of hot-plugged memory are not paged and stay local, beyond the limit: {}",
                format_size(memory.unmanaged),
                guest.pager.unmanaged_reasons().join("; ")
            );
            match unreachable() {
                Some(down) if memory.waiting_faults > 0 => {
                    (Phase::Stalled, Some(format!("{down}; {aside}")))
                }
                _ => (Phase::Serving, Some(aside)),
            }
        }
        Stage::Serving(guest) => match unreachable() {
            Some(detail) if memory.waiting_faults > 0 => (Phase::Stalled, Some(detail)),
            detail if memory.lost > 0 => {
                let lost = lost_pages(guest);
                let lost = match guest.pager.stats().poisoned_faults.get() {
                    0 => {
                        format!("{lost} pages are lost for good; nothing has asked for them since")
                    }
                    told => format!(
                        "{lost} pages are lost for good; {told} accesses were answered with a memory error, \
                        which the guest's kernel tells of in its log"
                    ),
                };
                (
                    Phase::Serving,
                    Some(detail.map_or(lost.clone(), |detail| format!("{lost}; {detail}"))),
                )
            }
            None if guest.pager.hindrance().is_none() => (Phase::Serving, shrinking(memory)),
            detail => (Phase::Serving, detail),
        },
    }
}

/// The same where nothing of the guest's memory may be evicted: it waits once it needs room.
fn hindered(
    phase: Phase,
    detail: Option<String>,
    hindrance: Option<String>,
    waiting_faults: u64,
) -> (Phase, Option<String>) {
    match (phase, hindrance) {
        (Phase::Serving | Phase::Stalled, Some(hindrance)) => {
            let words = format!(
                "nothing is evicted, so that the guest waits once it needs room, which a higher limit gives it: {hindrance}"
            );
            let phase = match waiting_faults {
                0 => phase,
                _ => Phase::Stalled,
            };
            let further = detail
                .map(|detail| format!("; {detail}"))
                .unwrap_or_default();
            (phase, Some(words + &further))
        }
        _ => (phase, detail),
    }
}

/// How much is still to leave a guest that was attached while it ran, or whose limit was lowered.
fn shrinking(memory: &MemoryReport) -> Option<String> {
    let local = memory.resident + memory.staged + memory.compressed;
    let over = local.saturating_sub(memory.limit + HEADROOM_BYTES);
    (over > 0).then(|| format!("{} above its limit, on their way out", format_size(over)))
}

/// Anonymous memory that a backend may take beside its guest's limit, without a far-memory disk.
fn fixed_anon_bytes(memory: &MemoryReport, page_size: PageSize) -> u64 {
    let pages = |bytes: u64| bytes / page_size.bytes();
    let policy = ARRIVAL_BYTES * pages(memory.ram) + QUEUED_BYTES * pages(memory.limit);
    FIXED_ANON_BYTES.max(OWN_ANON_BYTES + policy)
}

/// This process's anonymous memory, by the kernel's count.
fn anonymous_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| {
        line.trim()
            .trim_end_matches("kB")
            .trim()
            .parse::<u64>()
            .ok()
    });
    kib.unwrap_or(0) * 1024
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change under these locks is one assignment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
