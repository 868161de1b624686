//! What a backend is told: flags over `/etc/outram/backend.toml`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use outram_wire::compressed_share::CompressedShare;
use outram_wire::disk::{DiskKey, MAX_DISK_BYTES, MIN_DISK_BYTES, is_disk_size};
use outram_wire::granularity::Granularity;
use outram_wire::host_settings::{HostSettings, MAX_SHARDS, SettingsError};
use outram_wire::incoming::Incoming;
use outram_wire::lost_pages::LostPages;
use outram_wire::seal::Seal;
use outram_wire::tls::TlsFiles;
use outram_wire::tuning::{QueueDepth, Tuning, Workers};
use outram_wire::units::{Limit, LocalRatio, PageSize, UnitError, VmId, format_size, parse_size};
use outram_wire::verbs::Choice;

use super::run_dir::STATE_DIR;
use crate::pager::DISK_KEY;
use crate::remote::ServerAddress;

/// Where the settings of a host's backends lie.
pub(super) const DEFAULT_CONFIG: &str = "/etc/outram/backend.toml";

/// Where backends keep their sockets and state.
pub(super) const DEFAULT_RUN_DIR: &str = "/run/outram";

/// Flags of `outram-backend run`.
#[derive(Args, Clone, Debug)]
pub struct Flags {
    /// The guest's libvirt UUID
    #[arg(long, value_name = "UUID")]
    pub uuid: VmId,

    /// The guest's name, for logs and 'outram status'
    #[arg(long, value_name = "NAME")]
    pub name: String,

    /// The guest's RAM as its domain says, hot-pluggable memory not counted
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub ram: u64,

    /// What its RAM may grow to by hot-plug [default: what --ram says]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub max_ram: Option<u64>,
    /// Size of the pages of all of the guest's RAM: 4KiB, or 2MiB where it lies on hugetlbfs
    #[arg(long, value_name = "SIZE", default_value = "4KiB")]
    pub page_size: PageSize,

    /// Share of the guest's RAM that may cost host memory, above 0 and at most 1
    #[arg(
        long,
        value_name = "RATIO",
        conflicts_with = "local",
        required_unless_present = "local"
    )]
    pub local_ratio: Option<LocalRatio>,

    /// Host memory that the guest's RAM may cost, such as 512MiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub local: Option<u64>,

    /// A memory server; may be given several times [default: 'servers' of the configuration]
    #[arg(long = "server", value_name = "[tcp://|rdma://]HOST[:PORT]")]
    pub servers: Vec<ServerAddress>,

    /// User and group that QEMU runs as: owner of the vhost-user socket [default: our own]
    #[arg(long, value_name = "USER[:GROUP]")]
    pub socket_user: Option<String>,

    /// The guest's memory arrives from elsewhere: 'restore' of a saved image, or 'migration'
    #[arg(long, value_name = "WAY")]
    pub incoming: Option<Incoming>,

    /// Give the guest a far-memory disk of this size, such as 8GiB, instead of a small read-only one
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "disk_key_file")]
    pub disk_size: Option<u64>,

    /// File with the key to the far-memory disk: 64 hexadecimal digits; removed once it is read
    #[arg(long, value_name = "FILE", requires = "disk_size")]
    pub disk_key_file: Option<PathBuf>,

    /// Whether what leaves the host is sealed (encrypted): 'on', or 'off' where servers and wires may see it
    #[arg(long, value_name = "on|off", default_value_t)]
    pub seal: Seal,

    /// What becomes of the guest where it uses a page that is lost for good: 'stop' stops it there,
    /// 'poison' gives it a memory error, as hardware does (under KVM, Linux 6.6 or newer)
    #[arg(long, value_name = "stop|poison", default_value_t)]
    pub lost_pages: LostPages,

    /// How much of the guest's memory is fetched and evicted together: a power of two from 4KiB (page by
    /// page) to 256KiB [default: 4KiB]
    #[arg(long, value_name = "SIZE")]
    pub granularity: Option<Granularity>,

    /// Threads that evict the guest's memory, 1 to 64 [default: one a shard]
    #[arg(long, value_name = "COUNT")]
    pub workers: Option<Workers>,

    /// How much of its memory is on its way at a time, beside what it waits for, 1 to 64: so many batches of
    /// 256KiB written back, and as many times 32KiB ahead of what it reads in order [default: 8]
    #[arg(long, value_name = "COUNT")]
    pub queue_depth: Option<QueueDepth>,

    /// Share of the limit that may hold evicted pages, compressed, 0 to 0.5 [default: 0, none]
    #[arg(long, value_name = "SHARE")]
    pub compressed_share: Option<CompressedShare>,

    /// Settings of this host's backends; must exist if given
    #[arg(long, value_name = "FILE", help = format!("Settings of this host's backends; must exist if given [default: {DEFAULT_CONFIG}, if it exists]"))]
    pub config: Option<PathBuf>,

    /// Directory of sockets and state [default: /run/outram]
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,

    /// Serve Prometheus metrics at this address; 'outram metrics' needs no address
    #[arg(long, value_name = "ADDR:PORT")]
    pub metrics: Option<SocketAddr>,

    /// Threads that handle faults, each of a part of the guest's RAM [default: 2]
    #[arg(long, value_name = "COUNT")]
    pub shards: Option<u32>,

    /// RDMA device for servers reached by it: auto for that with the address they are reached from, off
    /// for none, or its name, with a port and the index of a GID where it has several, such as
    /// mlx5_0:1:3 [default: auto]
    #[arg(long, value_name = "auto|off|DEVICE")]
    pub rdma: Option<Choice>,

    /// Certificates of the CA that vouches for the memory servers
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,

    /// This host's certificate
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// This host's private key
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// Seconds to wait for QEMU to connect before giving up [default: 120]
    #[arg(long, value_name = "SECONDS")]
    pub connect_timeout: Option<u64>,

    /// The process that starts the pager again where it dies; given by 'run'
    #[arg(long, hide = true)]
    pub supervisor: Option<i32>,

    /// How often the guest was taken over from a pager that died; given by 'run'
    #[arg(long, hide = true, default_value_t)]
    pub takeovers: u32,
}

impl Flags {
    /// The guest's directory, as far as flags alone can tell.
    pub(super) fn likely_dir(&self) -> PathBuf {
        dir(self, &HostSettings::default())
    }

    /// The same without the disk, whose key is read once, by the pager.
    pub(super) fn without_disk(&self) -> Self {
        Self {
            disk_size: None,
            disk_key_file: None,
            ..self.clone()
        }
    }
}

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The host's settings.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// A ratio or size.
    #[error(transparent)]
    Unit(#[from] UnitError),
    /// Too few or too many shards.
    #[error("{0} shards: expected 1 to {MAX_SHARDS}")]
    Shards(u32),
    /// No limit.
    #[error("neither --local-ratio nor --local is given: name what the guest may cost its host")]
    NoLimit,
    /// A disk that cannot be.
    #[error(
        "--disk-size of {0} bytes: expected a multiple of 4096 from {min} to {max}",
        min = format_size(MIN_DISK_BYTES), max = format_size(MAX_DISK_BYTES)
    )]
    DiskSize(u64),
    /// The disk's key file cannot be read.
    #[error("cannot read the disk's key {}", path.display())]
    DiskKeyFile {
        /// Which.
        path: PathBuf,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// The disk's key is none.
    #[error("the disk's key is not understood")]
    DiskKey(#[from] outram_wire::server::SecretError),
    /// RAM that is no whole number of pages.
    #[error("{0} bytes of RAM: expected a multiple of the page size, {size} bytes, above 0", size = .1.bytes())]
    Ram(u64, PageSize),
}

/// Faults of a guest reach the wait-queue lock of one userfaultfd each; two show that sharding
/// works on the smallest host and cost little.
const DEFAULT_SHARDS: u32 = 2;

/// A guest's far-memory disk.
#[derive(Clone, Debug)]
pub struct DiskSettings {
    /// Bytes.
    pub size_bytes: u64,
    /// The key in the domain's metadata.
    pub key: DiskKey,
}

/// Everything a backend is told.
#[derive(Clone, Debug)]
pub struct Config {
    /// What all of it was gathered from.
    flags: Flags,
    /// The guest.
    pub vm: VmId,
    /// Its name.
    pub name: String,
    /// Its RAM at start in bytes.
    pub ram_bytes: u64,
    /// What it may grow to; at least that.
    pub max_ram_bytes: u64,
    /// Size of its pages.
    pub page_size: PageSize,
    /// What it may cost.
    pub limit: Limit,
    /// The memory servers.
    pub servers: Vec<ServerAddress>,
    /// Owner of the vhost-user socket.
    pub socket_user: Option<String>,
    /// Where its memory arrives from, unless this is an ordinary start.
    pub incoming: Option<Incoming>,
    /// Its far-memory disk, if it has one.
    pub disk: Option<DiskSettings>,
    /// Whether what leaves the host is sealed.
    pub seal: Seal,
    /// What becomes of the guest where it uses a page that is lost.
    pub lost_pages: LostPages,
    /// How its memory is moved.
    pub tuning: Tuning,
    /// This guest's directory.
    pub dir: PathBuf,
    /// Where metrics are served.
    pub metrics: Option<SocketAddr>,
    /// Shards.
    pub shards: u32,
    /// This host's identity.
    pub tls: TlsFiles,
    /// How long to wait for QEMU.
    pub connect_timeout: Duration,
    /// Which RDMA device may be used.
    pub rdma: Choice,
    /// Whether `userfaultfd(2)` may be used.
    pub allow_sysctl: bool,
    /// The process that starts this one again where it dies.
    pub supervisor: Option<i32>,
    /// How often the guest was taken over.
    pub takeovers: u32,
}

impl Config {
    /// The guest's directory.
    pub(super) fn dir_of(flags: &Flags) -> Result<PathBuf, ConfigError> {
        match flags.run_dir {
            // Whatever the settings are by now: a guest may depend on this process.
            Some(_) => Ok(flags.likely_dir()),
            None => Ok(dir(flags, &settings_of(flags)?)),
        }
    }

    /// The file of the host's settings.
    pub(super) fn settings_file(&self) -> &Path {
        settings_file(&self.flags)
    }

    /// Whether a pager that is told this would come up.
    pub(super) fn check(flags: &Flags) -> Result<(), ConfigError> {
        Self::gather(flags.without_disk()).map(drop)
    }

    /// Whether a process that is told the same could go on with the guest: the settings may have changed since.
    pub(super) fn check_again(&self) -> Result<(), ConfigError> {
        match Self::check(&self.flags) {
            // The next process reads them before it gives up what this one has.
            Err(ConfigError::Settings(SettingsError::Read { source, path }))
                if source.kind() == std::io::ErrorKind::PermissionDenied =>
            {
                tracing::info!(%source, path = %path.display(), "the settings are not looked at");
                Ok(())
            }
            checked => checked,
        }
    }

    /// Flags over the file that they name, or the default one where it exists.
    pub fn gather(flags: Flags) -> Result<Self, ConfigError> {
        let kept = flags.clone();
        let file = settings_of(&flags)?;
        let dir = dir(&flags, &file);
        let limit = match (flags.local_ratio, flags.local) {
            (Some(ratio), None) => Limit::LocalRatio(ratio),
            (None, Some(bytes)) => Limit::LocalBytes(bytes),
            _ => return Err(ConfigError::NoLimit),
        };
        if flags.ram == 0 || !flags.ram.is_multiple_of(flags.page_size.bytes()) {
            return Err(ConfigError::Ram(flags.ram, flags.page_size));
        }
        let shards = flags.shards.or(file.shards).unwrap_or(DEFAULT_SHARDS);
        if !(1..=MAX_SHARDS).contains(&shards) {
            return Err(ConfigError::Shards(shards));
        }
        let servers = match flags.servers.is_empty() {
            true => file.servers.clone(),
            false => flags.servers,
        };
        let usual = file.tls_files();
        Ok(Self {
            flags: kept,
            vm: flags.uuid,
            name: flags.name,
            ram_bytes: flags.ram,
            max_ram_bytes: flags.max_ram.unwrap_or(0).max(flags.ram),
            page_size: flags.page_size,
            limit,
            servers,
            socket_user: flags.socket_user,
            incoming: flags.incoming,
            seal: flags.seal,
            lost_pages: flags.lost_pages,
            tuning: Tuning {
                granularity: flags.granularity,
                workers: flags.workers,
                queue_depth: flags.queue_depth,
                compressed_share: flags.compressed_share,
            },
            disk: disk(flags.disk_size, flags.disk_key_file, &dir)?,
            dir,
            metrics: flags.metrics.or(file.metrics),
            shards,
            tls: TlsFiles {
                ca: flags.tls_ca.unwrap_or(usual.ca),
                cert: flags.tls_cert.unwrap_or(usual.cert),
                key: flags.tls_key.unwrap_or(usual.key),
            },
            connect_timeout: Duration::from_secs(
                flags
                    .connect_timeout
                    .or(file.connect_timeout)
                    .unwrap_or(120),
            ),
            rdma: flags.rdma.unwrap_or(file.rdma),
            allow_sysctl: file.allow_sysctl,
            supervisor: flags.supervisor,
            takeovers: flags.takeovers,
        })
    }
}

fn settings_of(flags: &Flags) -> Result<HostSettings, SettingsError> {
    let path = settings_file(flags);
    match flags.config {
        Some(_) => HostSettings::read_existing(path),
        None => HostSettings::read(path),
    }
}

/// The file that the settings are read from, if there is one.
fn settings_file(flags: &Flags) -> &Path {
    flags.config.as_deref().unwrap_or(Path::new(DEFAULT_CONFIG))
}

fn dir(flags: &Flags, file: &HostSettings) -> PathBuf {
    let run_dir = flags.run_dir.as_ref().or(file.run_dir.as_ref());
    let run_dir = run_dir.map_or(Path::new(DEFAULT_RUN_DIR), |dir| dir);
    run_dir.join(flags.uuid.to_string())
}

/// The far-memory disk's settings. The key's file is nobody's business any more once it is read; a
/// backend that takes its guest over finds the key in the guest's state directory.
fn disk(
    size_bytes: Option<u64>,
    key_file: Option<PathBuf>,
    dir: &Path,
) -> Result<Option<DiskSettings>, ConfigError> {
    let (Some(size_bytes), Some(path)) = (size_bytes, key_file) else {
        return Ok(None);
    };
    if !is_disk_size(size_bytes) {
        return Err(ConfigError::DiskSize(size_bytes));
    }
    let unread = |source| ConfigError::DiskKeyFile {
        path: path.clone(),
        source,
    };
    let is_missing = |error: &std::io::Error| error.kind() == std::io::ErrorKind::NotFound;
    let kept = dir.join(STATE_DIR).join(DISK_KEY);
    let text = match std::fs::read_to_string(&path) {
        Err(error) if is_missing(&error) && kept.exists() => {
            std::fs::read_to_string(&kept).map_err(unread)?
        }
        read => read.map_err(unread)?,
    };
    let key = text.trim().parse()?;
    match std::fs::remove_file(&path) {
        Err(error) if !is_missing(&error) => return Err(unread(error)),
        _ => {}
    }
    Ok(Some(DiskSettings { size_bytes, key }))
}
