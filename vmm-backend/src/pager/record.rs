//! What of a hand-over outlives the process beside the table and the staging area: small files in
//! the state directory, each replaced as a whole, so that whoever reads one reads all of it.
//!
//! | file | what |
//! |---|---|
//! | `record` | the VMM, its userfaultfds, its RAM's places in the table, servers and settings |
//! | `groups` | which slab each group of slots is |
//! | `key` | what the pages' keys are made of, whether they are sealed, and the secret of the sessions with the servers |
//! | `granularity`, `workers`, `queue-depth`, `compressed-share` | how the guest's memory is moved; each only where it was set |
//! | `promises` | what each of several servers is to promise, in the order of the record; where it is not there, equal parts |
//! | `large-folios` | whether shared memory may have come as large folios while the guest ran; only where it was so |
//! | `disk-key` | the key to the far-memory disk, as the domain's metadata has it |
//!
//! Each names its version. The version of the record and the VMM's process are read before all else
//! and stay where they are in every version: a build that does not know the version can tell whether
//! the guest still runs, and then leaves all of it alone.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use outram_wire::seal::Seal;
use outram_wire::server::SessionSecret;
use outram_wire::tuning::Tuning;
use outram_wire::units::{Limit, PageSize, VmId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::state_dir::StateError;
use crate::crash_points::{self, Point};
use crate::engine::seal::{SECRET_BYTES, Secret};
use crate::engine::slots::{GroupPlace, SlabRef};
use crate::handover::{HandedOver, MemfdId, Vmm, Way};

/// Version of `record` and `groups`. Another one is refused.
const RECORD_VERSION: u32 = 1;

/// First bytes of the key's file: what it is, and its version. Then 1 where pages are sealed and 0
/// where not, zero [3], the pages' secret [32] and the sessions' [32].
const KEY_MAGIC: [u8; 12] = *b"OUTRAMKY\x02\0\0\0";

/// Bytes of the key's file.
const KEY_BYTES: usize = 16 + SECRET_BYTES + 32;

/// Name of the file with the disk's key: a backend that is started again finds it here, for the file that
/// the first one was given is gone.
pub(crate) const DISK_KEY: &str = "disk-key";

/// What is secret of a guest.
#[derive(Clone)]
pub(super) struct Keys {
    /// Whether its pages are sealed.
    pub(super) seal: Seal,
    /// What its pages' keys are made of.
    pub(super) secret: Secret,
    /// Of its sessions with the servers.
    pub(super) session: SessionSecret,
}

/// The process whose guest is paged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct VmmId {
    /// Process id.
    pub(super) pid: i32,
    /// Field 22 of `/proc/PID/stat`.
    pub(super) start_time: u64,
}

/// What every version of a record begins with.
#[derive(Deserialize)]
struct Preamble {
    version: u32,
    vmm: VmmId,
}

/// A hand-over, as its successor needs it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    version: u32,
    pub(super) vmm: VmmId,
    pub(super) vm: VmId,
    /// How the userfaultfds were obtained.
    pub(super) way: Way,
    /// Their numbers in the VMM, one a shard.
    pub(super) userfaultfds: Vec<i32>,
    pub(super) page_size: PageSize,
    /// What the RAM may grow to.
    pub(super) most_ram_bytes: u64,
    pub(super) limit: Limit,
    /// Addresses of the servers; slabs name them by their place here.
    pub(super) servers: Vec<String>,
    pub(super) blocks: Vec<BlockRecord>,
    /// Memory backends that are no RAM.
    pub(super) foreign: Vec<FileId>,
}

/// A memfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileId {
    device: u64,
    inode: u64,
}

impl From<MemfdId> for FileId {
    fn from(id: MemfdId) -> Self {
        Self {
            device: id.device,
            inode: id.inode,
        }
    }
}

impl From<FileId> for MemfdId {
    fn from(id: FileId) -> Self {
        Self {
            device: id.device,
            inode: id.inode,
        }
    }
}

/// A block of RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BlockRecord {
    pub(super) memfd: FileId,
    /// Where it starts in the memfd.
    pub(super) file_offset: u64,
    /// Where the VMM has mapped it.
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// In the order of the block's pages, of which they are all.
    pub(super) regions: Vec<RegionRecord>,
}

/// A shard's part of a block: its place in the page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RegionRecord {
    pub(super) first: u32,
    pub(super) count: u32,
}

impl Record {
    /// A hand-over without any RAM yet.
    pub(super) fn new(
        vmm: &Vmm,
        taken: &HandedOver,
        config: &super::PagerConfig,
        servers: Vec<String>,
    ) -> Self {
        Self {
            version: RECORD_VERSION,
            vmm: VmmId {
                pid: vmm.pid,
                start_time: vmm.start_time,
            },
            vm: config.vm,
            way: taken.way,
            userfaultfds: taken.vmm_fd_numbers.clone(),
            page_size: config.page_size,
            most_ram_bytes: config.max_ram_bytes.max(config.ram_bytes),
            limit: config.limit,
            servers,
            blocks: Vec::new(),
            foreign: Vec::new(),
        }
    }
}

/// The slabs that a guest's slots lie in.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Groups {
    version: u32,
    /// Number of the next group.
    next: u32,
    /// Number, server, slab and slots of each.
    groups: Vec<(u32, usize, u64, u32)>,
}

/// The small files of a state directory.
#[derive(Clone, Debug)]
pub(super) struct Records {
    dir: PathBuf,
}

impl Records {
    pub(super) fn of(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
        }
    }

    /// Where one of them is.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Which VMM was handed over, and whether this build knows how the rest is written. `None` where
    /// none was.
    pub(super) fn vmm(&self) -> Result<Option<(VmmId, bool)>, StateError> {
        let preamble: Option<Preamble> = self.read("record")?;
        Ok(preamble.map(|found| (found.vmm, found.version == RECORD_VERSION)))
    }

    pub(super) fn record(&self) -> Result<Record, StateError> {
        let record: Option<Record> = self.read("record")?;
        record.ok_or_else(|| self.unusable("record", "it is not there"))
    }

    pub(super) fn write_record(&self, record: &Record) -> Result<(), StateError> {
        self.write_json("record", record)
    }

    /// From here on there is nothing to take over.
    pub(super) fn remove_record(&self) -> Result<(), StateError> {
        let path = self.dir.join("record");
        fs::remove_file(&path).map_err(|source| StateError::File { path, source })
    }

    /// The groups, and the number of the next one. None were leased where there is no such file.
    pub(super) fn groups(&self) -> Result<(Vec<GroupPlace>, u32), StateError> {
        let Some(found) = self.read::<Groups>("groups")? else {
            return Ok((Vec::new(), 0));
        };
        if found.version != RECORD_VERSION {
            return Err(self.other_version("groups", found.version));
        }
        let places = found
            .groups
            .into_iter()
            .map(|(number, server, slab, slots)| GroupPlace {
                number,
                slab: SlabRef { server, slab },
                slots,
            });
        Ok((places.collect(), found.next))
    }

    pub(super) fn write_groups(&self, places: &[GroupPlace], next: u32) -> Result<(), StateError> {
        let groups = places.iter().map(|place| {
            (
                place.number,
                place.slab.server,
                place.slab.slab,
                place.slots,
            )
        });
        let groups = Groups {
            version: RECORD_VERSION,
            next,
            groups: groups.collect(),
        };
        self.write_json("groups", &groups)
    }

    pub(super) fn tuning(&self) -> Result<Tuning, StateError> {
        Ok(Tuning {
            granularity: self.read("granularity")?,
            workers: self.read("workers")?,
            queue_depth: self.read("queue-depth")?,
            compressed_share: self.read("compressed-share")?,
        })
    }

    /// Each in a file of its own: builds that do not know one of them read the others.
    pub(super) fn write_tuning(&self, tuning: &Tuning) -> Result<(), StateError> {
        let Tuning {
            granularity,
            workers,
            queue_depth,
            compressed_share,
        } = tuning;
        if let Some(granularity) = granularity {
            self.write_json("granularity", granularity)?;
        }
        if let Some(workers) = workers {
            self.write_json("workers", workers)?;
        }
        if let Some(queue_depth) = queue_depth {
            self.write_json("queue-depth", queue_depth)?;
        }
        if let Some(share) = compressed_share {
            self.write_json("compressed-share", share)?;
        }
        Ok(())
    }

    /// What each server was to promise, in bytes, if that was written down.
    pub(super) fn promises(&self) -> Result<Vec<u64>, StateError> {
        Ok(self.read("promises")?.unwrap_or_default())
    }

    /// In a file of its own, like what was tuned.
    pub(super) fn write_promises(&self, bytes: &[u64]) -> Result<(), StateError> {
        self.write_json("promises", &bytes)
    }

    /// Whether large folios may have come, as far as an earlier process knew.
    pub(super) fn large_folios(&self) -> Result<bool, StateError> {
        Ok(self.read("large-folios")?.unwrap_or(false))
    }

    pub(super) fn write_large_folios(&self, may_be: bool) -> Result<(), StateError> {
        self.write_json("large-folios", &may_be)
    }

    pub(super) fn keys(&self) -> Result<Keys, StateError> {
        let path = self.dir.join("key");
        let read = fs::read(&path).map_err(|source| StateError::File { path, source })?;
        let bytes = Zeroizing::new(read);
        let unknown = || self.unusable("key", "it is not as this version of Outram writes it");
        if bytes.len() != KEY_BYTES || !bytes.starts_with(&KEY_MAGIC) {
            return Err(unknown());
        }
        let seal = match bytes[12..16] {
            [0, 0, 0, 0] => Seal::Off,
            [1, 0, 0, 0] => Seal::On,
            _ => return Err(unknown()),
        };
        let mut keys = Keys {
            seal,
            secret: Secret::new([0; SECRET_BYTES]),
            session: SessionSecret([0; 32]),
        };
        keys.secret.copy_from_slice(&bytes[16..48]);
        keys.session.0.copy_from_slice(&bytes[48..]);
        Ok(keys)
    }

    pub(super) fn write_keys(&self, keys: &Keys) -> Result<(), StateError> {
        let mut bytes = Zeroizing::new([0; KEY_BYTES]);
        bytes[..12].copy_from_slice(&KEY_MAGIC);
        bytes[12] = u8::from(keys.seal == Seal::On);
        bytes[16..48].copy_from_slice(&keys.secret[..]);
        bytes[48..].copy_from_slice(&keys.session.0);
        self.write("key", &bytes[..])
    }

    pub(super) fn write_disk_key(&self, text: &str) -> Result<(), StateError> {
        self.write(DISK_KEY, text.as_bytes())
    }

    /// Overwrites the keys: what a tmpfs gives back is zeroed only when somebody else gets it.
    pub(super) fn wipe_keys(&self) -> io::Result<()> {
        for name in ["key", DISK_KEY] {
            match OpenOptions::new().write(true).open(self.dir.join(name)) {
                Ok(mut file) => {
                    let length = file.metadata()?.len();
                    file.write_all(&vec![0; length as usize])?;
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, StateError> {
        let path = self.dir.join(name);
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(|source| StateError::File {
                path: path.clone(),
                source,
            })?,
        };
        let parsed = serde_json::from_slice(&bytes);
        parsed
            .map(Some)
            .map_err(|source| StateError::NotUnderstood { path, source })
    }

    fn write_json(&self, name: &str, value: &impl Serialize) -> Result<(), StateError> {
        let path = self.dir.join(name);
        let bytes = serde_json::to_vec(value)
            .map_err(|source| StateError::NotUnderstood { path, source })?;
        self.write(name, &bytes)
    }

    /// Replaces a file. There is no sync: what has to be survived is a death of this process.
    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), StateError> {
        let (path, next) = (self.dir.join(name), self.dir.join(format!("{name}.next")));
        let written = create(&next)
            .and_then(|mut file| file.write_all(bytes))
            .inspect(|()| crash_points::pass(Point::FileWritten))
            .and_then(|()| fs::rename(&next, &path));
        written.map_err(|source| StateError::File { path, source })
    }

    pub(super) fn unusable(&self, name: &str, why: impl Into<String>) -> StateError {
        StateError::Unusable {
            path: self.dir.join(name),
            why: why.into(),
        }
    }

    pub(super) fn other_version(&self, name: &str, version: u32) -> StateError {
        self.unusable(
            name,
            format!("its format has version {version}, which this build does not know"),
        )
    }
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> (tempfile::TempDir, Records) {
        let dir = tempfile::tempdir().expect("a directory");
        let records = Records::of(dir.path());
        (dir, records)
    }

    #[test]
    fn keys_and_groups_come_back() {
        let (dir, records) = records();
        assert!(records.groups().expect("none").0.is_empty());
        let place = GroupPlace {
            number: 3,
            slab: SlabRef { server: 1, slab: 9 },
            slots: 256,
        };
        records.write_groups(&[place], 5).expect("room");
        assert_eq!(records.groups().expect("written"), (vec![place], 5));
        for seal in [Seal::On, Seal::Off] {
            let keys = Keys {
                seal,
                secret: Secret::new([5; 32]),
                session: SessionSecret([7; 32]),
            };
            records.write_keys(&keys).expect("room");
            let found = records.keys().expect("written");
            assert!(found.seal == seal && found.secret == keys.secret);
            assert!(found.session == keys.session);
        }
        let mut tuning = Tuning::default();
        assert_eq!(records.tuning().expect("none"), tuning);
        tuning.granularity = "64KiB".parse().ok();
        records.write_tuning(&tuning).expect("room");
        tuning.workers = "5".parse().ok();
        tuning.queue_depth = "16".parse().ok();
        tuning.compressed_share = "0.2".parse().ok();
        let others = Tuning {
            granularity: None,
            ..tuning
        };
        records.write_tuning(&others).expect("room");
        assert_eq!(records.tuning().expect("written"), tuning);
        assert!(!records.large_folios().expect("none"));
        for may_be in [true, false] {
            records.write_large_folios(may_be).expect("room");
            assert_eq!(records.large_folios().expect("written"), may_be);
        }
        let mode = std::os::unix::fs::PermissionsExt::mode(
            &fs::metadata(dir.path().join("key"))
                .expect("there")
                .permissions(),
        );
        assert_eq!(mode & 0o777, 0o600);
        fs::write(dir.path().join("key"), b"OUTRAMKY\x03\0\0\0").expect("written");
        assert!(records.keys().is_err());
    }

    #[test]
    fn a_later_version_still_tells_whose_it_is() {
        let (dir, records) = records();
        assert!(records.vmm().expect("none").is_none());
        let text = r#"{"version":2,"vmm":{"pid":7,"start_time":9},"sealed":"yes"}"#;
        fs::write(dir.path().join("record"), text).expect("written");
        let vmm = VmmId {
            pid: 7,
            start_time: 9,
        };
        assert_eq!(records.vmm().expect("readable"), Some((vmm, false)));
        fs::write(dir.path().join("record"), "{").expect("written");
        let error = records.vmm().expect_err("half of it");
        assert!(error.to_string().contains("record"), "{error}");
    }
}
