//! One guest's backend from start to end: its directory and sockets, the hand-over when QEMU
//! connects, and the end of its guest.
//!
//! Two processes: the supervisor ([`supervise`]) and the pager ([`run`]), which is all but the former.
//!
//! The pager's main thread watches over the guest's process; one thread serves the vhost-user socket, one
//! the control socket, each control connection has its own. Lock order: `stage` alone, never held
//! while anything waits.

pub(crate) mod config;
mod confinement;
mod control;
mod guest;
mod lender;
mod metrics;
mod run_dir;
mod stage;
mod supervisor;
mod surroundings;
mod termination;

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use outram_wire::causes::with_causes;
use outram_wire::identity::Identity;
use outram_wire::incoming::Incoming;
use outram_wire::scrape::Page;

pub use config::{Config, ConfigError, DiskSettings, Flags};
pub use supervisor::supervise;

use crate::engine::table::State;
use crate::far_disk::{self, DiskTable, FarDisk, FarDiskConfig};
use crate::handover::Powers;
use crate::handover::powers::{self, Errand};
use crate::pager::{self, Orphan, PagerConfig, PreparedPager};
use crate::remote::{RemoteConfig, Timing};
use guest::GuestDoor;
use run_dir::{Door, RunDir};
use stage::{Daemon, Stage};
use supervisor::START_AGAIN;

/// How often the guest's process is looked at.
const WATCH: Duration = Duration::from_millis(50);

/// A refused QEMU gives up within this, or libvirt's hook ends us before.
const REFUSAL_LINGER: Duration = Duration::from_secs(60);

/// Mounts the directory of a new guest's state in the host's own view of the file system, where
/// `supervise` finds it in views that systemd makes, and which outlives these. (What a command with
/// `+` mounts is not seen outside of the unit by itself: systemd 252 gives that a view of its own too.)
pub fn prepare_on_host(flags: Flags) -> anyhow::Result<()> {
    if let Err(error) = enter_host() {
        // The supervisor mounts it then.
        tracing::warn!("{error:#}: where all of the backend is killed, its guest cannot go on");
        return Ok(());
    }
    let likely = flags.likely_dir();
    prepare(flags).inspect_err(|error| leave_reason(&likely, error))
}

/// Removes what is left of a guest that has ended, where [`prepare_on_host`] made it: no process in
/// another view of the file system can. One that lives is left alone.
pub fn tidy(dir: &Path) -> anyhow::Result<()> {
    let name = dir.file_name().and_then(|name| name.to_str());
    let vm = name.and_then(|name| name.parse().ok());
    let vm = vm.with_context(|| format!("{} is no guest's directory", dir.display()))?;
    if let Err(error) = enter_host() {
        tracing::debug!("nothing was mounted there: {error:#}");
        return Ok(());
    }
    let run_dir = RunDir::at(dir);
    let state = run_dir.state();
    if Orphan::find(&state, vm, &Powers::default())?.is_none() {
        if state.exists() {
            Orphan::clear(&state);
        }
        run_dir.remove_sockets();
        // Where the backend left a reason it stays.
        let _ = std::fs::remove_dir(dir);
    }
    Ok(())
}

fn enter_host() -> anyhow::Result<()> {
    let host = File::open("/proc/1/ns/mnt").context("the host's mounts")?;
    move_into_link_name_space(host.as_fd(), Some(LinkNameSpaceType::Mount))
        .context("entering the host's view of its mounts")
}

/// Mounts the directory of a new guest's state; that of a guest that is there already is left alone.
fn prepare(flags: Flags) -> anyhow::Result<()> {
    // Whatever the settings are by now: nothing keeps a supervisor from its guest.
    let dir = RunDir::at(&Config::dir_of(&flags)?);
    let find = || Orphan::find(&dir.state(), flags.uuid, &Powers::default());
    if dir.was_served() || matches!(find(), Ok(Some(_))) {
        return Ok(());
    }
    let disk_bytes = flags.disk_size;
    let config = Config::gather(flags.without_disk())?;
    RunDir::make(&config.dir)?;
    let pager = PagerConfig {
        disk_table_bytes: table_bytes(disk_bytes),
        ..pager_config(&config)
    };
    Ok(pager::prepare_state(&pager, &dir.state())?)
}

fn pager_config(config: &Config) -> PagerConfig {
    PagerConfig {
        vm: config.vm,
        ram_bytes: config.ram_bytes,
        max_ram_bytes: config.max_ram_bytes,
        page_size: config.page_size,
        limit: config.limit,
        shards: config.shards,
        seal: config.seal,
        lost_pages: config.lost_pages,
        tuning: config.tuning,
        disk_table_bytes: table_bytes(config.disk.as_ref().map(|disk| disk.size_bytes)),
    }
}

fn table_bytes(disk_bytes: Option<u64>) -> u64 {
    disk_bytes.map_or(0, DiskTable::bytes)
}

/// Pages one guest until that guest has ended. Refuses with a reason, which is also
/// left in the file `error` of the guest's directory.
pub fn run(flags: Flags) -> anyhow::Result<()> {
    // A configuration that is not understood may name another directory: nobody would look there.
    let likely = flags.likely_dir();
    let config = Config::gather(flags)
        .map_err(anyhow::Error::from)
        .inspect_err(|error| leave_reason(&likely, error))?;
    surroundings::prepare();
    let dir = RunDir::create(&config.dir)?;
    let knows_made = config.supervisor.is_none() || powers::knows_folios();
    let doors = Doors::make(&dir, knows_made)
        .inspect_err(|error| dir.note_error(&with_causes(error.as_ref())))?;
    let powers = match config.supervisor {
        None => Powers::default(),
        // Before there is any thread but this.
        Some(_) => {
            let socket = std::io::stdin().as_fd().try_clone_to_owned();
            let powers = Powers::lent(socket.context("the socket to the supervisor")?);
            confinement::confine(&readable(&config), &config.dir, &dir.state())
                .context("giving up what this process does not need")?;
            powers
        }
    };
    let result = serve(config, powers.clone(), &dir, doors);
    match &result {
        Ok(()) => dir.remove(),
        Err(error) => {
            note_error(&dir, &powers, &with_causes(error.as_ref()));
            // The guest that it is of is to be found by whoever goes on with it.
            if !dir.has_record() {
                dir.remove_sockets();
            }
        }
    }
    result
}

/// The sockets of a guest's directory.
struct Doors {
    vhost: Door,
    control: Door,
}

impl Doors {
    /// A supervisor that knows of no large folios knows sockets by their names alone.
    fn make(dir: &RunDir, knows_made: bool) -> anyhow::Result<Self> {
        Ok(Self {
            vhost: dir.make_vhost(knows_made)?,
            control: dir.make_control()?,
        })
    }
}

/// Leaves a reason where the hook and `outram status` find it.
fn note_error(dir: &RunDir, powers: &Powers, reason: &str) {
    if powers.are_own() {
        return dir.note_error(reason);
    }
    if let Err(error) = powers.run(&Errand::NoteError(reason.to_owned()), None) {
        tracing::warn!(%error, "the reason cannot be left in the guest's directory");
    }
}

/// Where settings and certificates lie.
fn readable(config: &Config) -> Vec<PathBuf> {
    let tls = &config.tls;
    let files = [&tls.ca, &tls.cert, &tls.key].map(PathBuf::as_path);
    let files = files.into_iter().chain([config.settings_file()]);
    // They may be links to where a machine's certificates are renewed.
    let real = files.clone().filter_map(|file| file.canonicalize().ok());
    let named = files.map(Path::to_owned).chain(real);
    named
        .filter_map(|file| Some(file.parent()?.to_owned()))
        .collect()
}

/// Leaves the reason of a refusal, unless another backend of the guest is at work there.
fn leave_reason(dir: &Path, error: &anyhow::Error) {
    let there = RunDir::at(dir);
    if there.was_served() && !there.is_served() {
        // The sockets stay: they tell that a guest may wait for a process that goes on with it.
        return there.note_error(&format!("{error:#}"));
    }
    match RunDir::create(dir) {
        Ok(dir) => dir.leave_error(&format!("{error:#}")),
        Err(other) => tracing::warn!("the reason cannot be left in a file: {other:#}"),
    }
}

fn serve(config: Config, powers: Powers, dir: &RunDir, doors: Doors) -> anyhow::Result<()> {
    let remote = RemoteConfig {
        addresses: config.servers.clone(),
        identity: Arc::new(Identity::of(config.tls.clone())),
        vm: config.vm,
        secret: outram_wire::server::SessionSecret::random()
            .map_err(std::io::Error::other)
            .context("drawing a secret")?,
        arrives: config.incoming == Some(Incoming::Migration),
        // One for each shard, one for write-back.
        data_connections: config.shards as usize + 1,
        rdma: config.rdma.clone(),
        timing: Timing::default(),
    };
    if let Err(error) = config.rdma.check() {
        let words = with_causes(&error);
        tracing::warn!("{words}: until then pages go over TCP, or wait where RDMA is demanded");
    }
    if let Some(orphan) = Orphan::find(&dir.state(), config.vm, &powers)? {
        return serve_again(config, powers, dir, doors, orphan, &remote);
    }
    if config.takeovers > 0 {
        tracing::info!("the guest has ended meanwhile");
        Orphan::clear(&dir.state());
        return Ok(());
    }
    let prepared = PreparedPager::new(pager_config(&config), &remote, &dir.state())?;
    let disk = match open_disk(&config, &remote, &prepared) {
        Ok(disk) => disk,
        Err(error) => {
            prepared.close();
            return Err(error);
        }
    };
    let daemon = Daemon::new(config, powers, remote.identity, Some(prepared), disk);
    tracing::info!(name = %daemon.config.name, limit = %daemon.config.limit, "waiting for QEMU");
    let daemon = Arc::new(daemon);
    let served = serve_metrics(&daemon)
        .and_then(|metrics| open_doors(Arc::clone(&daemon), dir, doors, metrics));
    // Where QEMU never came, nobody goes on with what was set aside for it. (Who watched has closed it already.)
    if served.is_err() && daemon.end_waiting(Stage::Ending) {
        daemon.close();
    }
    served
}

/// Goes on with a guest whose backend died: its memory first, then all that others may ask for.
fn serve_again(
    config: Config,
    powers: Powers,
    dir: &RunDir,
    doors: Doors,
    orphan: Orphan,
    remote: &RemoteConfig,
) -> anyhow::Result<()> {
    let disk = match &config.disk {
        Some(settings) => {
            let table = DiskTable::new(orphan.disk_table()?, settings.size_bytes)
                .context("the table of the guest's far-memory disk")?;
            let remote = RemoteConfig {
                addresses: orphan.addresses()?,
                ..remote.clone()
            };
            // It waits for no server before the guest uses it again.
            let far = far_disk_config(&config, settings, &remote);
            Some(Arc::new(FarDisk::incoming(far, table)))
        }
        None => None,
    };
    tracing::warn!(name = %config.name, "the guest's backend has died: its memory is taken over");
    let guest = guest::take_over_again(&config, orphan, remote, disk.clone())?;
    let daemon = Arc::new(Daemon::new(
        config,
        powers,
        remote.identity.clone(),
        None,
        disk,
    ));
    guest::serve(&daemon, guest)?;
    let metrics = serve_metrics(&daemon).unwrap_or_else(|error| {
        // The guest comes first; its address may be another's by now.
        tracing::warn!("metrics are served to 'outram metrics' alone: {error:#}");
        None
    });
    open_doors(daemon, dir, doors, metrics)
}

/// Serves metrics, where the settings name an address for them.
fn serve_metrics(daemon: &Arc<Daemon>) -> anyhow::Result<Option<Page>> {
    let address = daemon.config.metrics;
    address
        .map(|address| metrics::serve(address, daemon))
        .transpose()
}

/// Serves QEMU's disk and the control socket until the guest has ended, and metrics meanwhile.
fn open_doors(
    daemon: Arc<Daemon>,
    dir: &RunDir,
    doors: Doors,
    _metrics: Option<Page>,
) -> anyhow::Result<()> {
    let door = doors.vhost.open()?;
    match daemon.powers.are_own() {
        true => dir.give_vhost(daemon.config.socket_user.as_deref())?,
        false => daemon.powers.run(&Errand::GiveSocket, None)?,
    }
    let control = doors.control.open()?;
    let stop = Arc::clone(&daemon.asked_to_stop);
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))
            .context("registering for signals")?;
    }
    GuestDoor::open(door, &daemon)?;
    control::serve(control, &daemon)?;
    watch(&daemon, dir)
}

/// The guest's far-memory disk, if it is to have one: a new one, or the one that it had before it
/// was saved or moved, which is claimed once the guest uses it here.
fn open_disk(
    config: &Config,
    remote: &RemoteConfig,
    prepared: &PreparedPager,
) -> anyhow::Result<Option<Arc<FarDisk>>> {
    let Some(settings) = &config.disk else {
        return Ok(None);
    };
    let words = prepared.keep_disk(&settings.key.to_string())?;
    let table = DiskTable::new(words, settings.size_bytes)?;
    let far = far_disk_config(config, settings, remote);
    let disk = match config.incoming {
        Some(_) => FarDisk::incoming(far, table),
        None => FarDisk::create(far, table)?,
    };
    Ok(Some(Arc::new(disk)))
}

fn far_disk_config(
    config: &Config,
    settings: &DiskSettings,
    remote: &RemoteConfig,
) -> FarDiskConfig {
    FarDiskConfig {
        vm: config.vm,
        size_bytes: settings.size_bytes,
        key: settings.key,
        seal: config.seal,
        remote: RemoteConfig {
            data_connections: far_disk::DATA_CONNECTIONS,
            ..remote.clone()
        },
    }
}

/// Watches over the guest until it has ended, or will not come.
fn watch(daemon: &Daemon, dir: &RunDir) -> anyhow::Result<()> {
    let deadline = Instant::now() + daemon.config.connect_timeout;
    let mut refused_at = None;
    loop {
        std::thread::sleep(WATCH);
        let stage = daemon.stage();
        // Of a hand-over QEMU waits for the end, and would for ever: what is asked for meanwhile is heard then.
        let asked_to_stop = !matches!(stage, Stage::TakingOver) && daemon.take_stop_request();
        match stage {
            Stage::Waiting if asked_to_stop || Instant::now() > deadline => {
                if !daemon.end_waiting(Stage::Ending) {
                    // QEMU has come this very moment.
                    daemon
                        .asked_to_stop
                        .fetch_or(asked_to_stop, Ordering::Relaxed);
                    continue;
                }
                daemon.close();
                if asked_to_stop {
                    tracing::info!("stopped before QEMU came");
                    return Ok(());
                }
                anyhow::bail!(
                    "QEMU did not connect within {} s: did the domain's start fail? See libvirt's log",
                    daemon.config.connect_timeout.as_secs()
                );
            }
            Stage::Waiting | Stage::TakingOver => {}
            Stage::Serving(guest) => {
                if guest.vmm.has_ended() {
                    tracing::info!(pid = guest.vmm.pid, "the guest has ended");
                    daemon.end(&guest);
                    return Ok(());
                }
                if guest.is_detached() || (asked_to_stop && guest.may_be_left()) {
                    tracing::info!(pid = guest.vmm.pid, "the guest has been detached");
                    daemon.end(&guest);
                    return Ok(());
                }
                if asked_to_stop {
                    tracing::warn!(
                        "asked to stop, but the guest's memory depends on this process: shut the guest down instead"
                    );
                }
                if daemon.asked_to_start_again.load(Ordering::Relaxed) {
                    // Whatever is under way is found by the next pager as after any other end.
                    tracing::info!("ends, to be started again: the guest waits a moment");
                    std::process::exit(START_AGAIN);
                }
                guest.let_go_if_killed();
                guest.kill_if_stuck_at_its_end();
            }
            Stage::Refused(reason) => {
                let since = *refused_at.get_or_insert_with(|| {
                    note_error(dir, &daemon.powers, &reason);
                    Instant::now()
                });
                if asked_to_stop || since.elapsed() > REFUSAL_LINGER {
                    daemon.set_stage(Stage::Ending);
                    daemon.close();
                    anyhow::bail!("{reason}");
                }
            }
            Stage::Ending => return Ok(()),
        }
    }
}

/// Pages in a state that nothing may be read from.
fn lost_pages(guest: &guest::Guest) -> u64 {
    guest.pager.stats().pages(State::Lost)
}
