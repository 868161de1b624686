//! The guest's directory: `/run/outram/<uuid>` with its sockets, its state, and the reason of a
//! refusal.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, lchown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use nix::unistd::{Group, User};

/// Name of the folder that the guest's tmpfs is mounted at.
pub(super) const STATE_DIR: &str = "state";

/// The directory.
pub(super) struct RunDir {
    path: PathBuf,
}

/// A socket that somebody may connect to once it has its name: a process that has given up what it does not need
/// can make none.
pub(super) struct Door {
    listener: UnixListener,
    made: PathBuf,
    name: PathBuf,
}

impl Door {
    fn make(name: PathBuf, made: PathBuf) -> anyhow::Result<Self> {
        remove_file(&made)?;
        let listen = || {
            let listener = UnixListener::bind(&made)?;
            fs::set_permissions(&made, fs::Permissions::from_mode(0o600))?;
            Ok::<_, io::Error>(listener)
        };
        let listener = listen().with_context(|| format!("cannot listen at {}", made.display()))?;
        Ok(Self {
            listener,
            made,
            name,
        })
    }

    /// Gives it its name, in place of whatever has it.
    pub(super) fn open(self) -> anyhow::Result<UnixListener> {
        fs::rename(&self.made, &self.name)
            .with_context(|| format!("cannot listen at {}", self.name.display()))?;
        Ok(self.listener)
    }
}

/// What a socket is called before it may be found.
fn made_as(name: &Path) -> PathBuf {
    name.with_extension("new")
}

impl RunDir {
    /// Makes the directory. Refuses where another backend serves the guest.
    pub(super) fn create(path: &Path) -> anyhow::Result<Self> {
        if Self::at(path).is_served() {
            bail!(
                "a backend of this guest runs already in {}: is the guest running?",
                path.display()
            );
        }
        Self::make(path)?;
        let dir = Self::at(path);
        // The control socket tells that a guest was served here until another takes its place.
        for stale in ["error", "vhost.sock"] {
            remove_file(&dir.path.join(stale))?;
        }
        Ok(dir)
    }

    /// Makes the directory where there is none.
    pub(super) fn make(path: &Path) -> anyhow::Result<()> {
        // QEMU, an unprivileged user, walks through it to the socket; it lists nothing.
        let make = |path: &Path, mode| {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(mode)
                .create(path)
        };
        let parent = path.parent().unwrap_or(Path::new("/"));
        make(parent, 0o755)
            .and_then(|()| make(path, 0o711))
            .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o711)))
            .with_context(|| format!("cannot make {}", path.display()))
    }

    /// The directory as it is.
    pub(super) fn at(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
        }
    }

    /// Where the guest's tmpfs is mounted.
    pub(super) fn state(&self) -> PathBuf {
        self.path.join(STATE_DIR)
    }

    /// Whether a backend is at work there.
    pub(super) fn is_served(&self) -> bool {
        UnixStream::connect(self.path.join("control.sock")).is_ok()
    }

    /// Whether a guest was served there by a process that has not cleared up, or is at work still. (A
    /// hook that starts a guest anew removes what was left of an earlier start.)
    pub(super) fn was_served(&self) -> bool {
        self.path.join("control.sock").exists() && self.has_record()
    }

    /// Whether there is a record of a guest.
    pub(super) fn has_record(&self) -> bool {
        self.state().join("record").exists()
    }

    /// Where QEMU connects.
    pub(super) fn vhost_socket(&self) -> PathBuf {
        self.path.join("vhost.sock")
    }

    /// Where whoever comes by that name is met: what the kernel calls the socket ever after.
    pub(super) fn vhost_socket_made(&self) -> PathBuf {
        made_as(&self.vhost_socket())
    }

    /// The socket for QEMU. To a supervisor that `knows_made` names, a socket is known by the one it was made with.
    pub(super) fn make_vhost(&self, knows_made: bool) -> anyhow::Result<Door> {
        let name = self.vhost_socket();
        let made = match knows_made {
            true => made_as(&name),
            false => name.clone(),
        };
        Door::make(name, made)
    }

    /// Makes the socket for QEMU that user's: nobody else may connect.
    pub(super) fn give_vhost(&self, user: Option<&str>) -> anyhow::Result<()> {
        let Some(user) = user else {
            return Ok(());
        };
        let path = self.vhost_socket();
        let (uid, gid) = parse_user(user)?;
        lchown(&path, Some(uid), gid)
            .with_context(|| format!("cannot give {} to {user}", path.display()))
    }

    /// The socket for `outram tune` and `outram status`: root's alone.
    pub(super) fn make_control(&self) -> anyhow::Result<Door> {
        let name = self.path.join("control.sock");
        let made = made_as(&name);
        Door::make(name, made)
    }

    /// Leaves a reason where the hook and `outram status` find it.
    pub(super) fn note_error(&self, reason: &str) {
        if let Err(error) = fs::write(self.path.join("error"), format!("{reason}\n")) {
            tracing::warn!(%error, "the reason cannot be left in the guest's directory");
        }
    }

    /// The backend ends with an error: its reason and log stay.
    pub(super) fn leave_error(&self, reason: &str) {
        self.note_error(reason);
        self.remove_sockets();
    }

    /// The guest ended as it should: nothing stays.
    pub(super) fn remove(&self) {
        self.remove_sockets();
        for name in ["log", "error", "arguments"] {
            if let Err(error) = remove_file(&self.path.join(name)) {
                tracing::warn!("{error:#}");
            }
        }
        if let Err(error) = fs::remove_dir(&self.path) {
            tracing::debug!(%error, "the guest's directory stays");
        }
    }

    /// Removes sockets and what is left of the state, which is unmounted.
    pub(super) fn remove_sockets(&self) {
        for name in ["vhost.sock", "control.sock"] {
            let name = self.path.join(name);
            for path in [made_as(&name), name] {
                if let Err(error) = remove_file(&path) {
                    tracing::warn!("{error:#}");
                }
            }
        }
        // Unmounted by then; holds nothing of its own.
        let _ = fs::remove_dir(self.state());
    }
}

fn remove_file(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// `USER[:GROUP]`, names or numbers; the group is left as it is where none is named.
pub(super) fn parse_user(text: &str) -> anyhow::Result<(u32, Option<u32>)> {
    let (user, group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (text, None),
    };
    let uid = match user.parse() {
        Ok(uid) => uid,
        Err(_) => User::from_name(user)?
            .with_context(|| format!("there is no user '{user}'"))?
            .uid
            .as_raw(),
    };
    let gid = match group {
        None => None,
        Some(group) => Some(match group.parse() {
            Ok(gid) => gid,
            Err(_) => Group::from_name(group)?
                .with_context(|| format!("there is no group '{group}'"))?
                .gid
                .as_raw(),
        }),
    };
    Ok((uid, gid))
}
