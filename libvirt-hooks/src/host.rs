//! Where things are on this host.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Environment variable with the backend's path; otherwise it is looked for beside our own
/// program, then in `PATH`. libvirtd passes only few variables to its hooks, this not among them.
pub const BACKEND_VARIABLE: &str = "OUTRAM_BACKEND";

/// Environment variable with the path of the backend's settings.
pub const CONFIG_VARIABLE: &str = "OUTRAM_CONFIG";

/// Environment variable with the directory of run directories, for tests beside guests of the host. AppArmor's
/// rules and systemd's units know the usual one only.
pub const RUN_VARIABLE: &str = "OUTRAM_RUN";

const BACKEND_NAME: &str = "outram-backend";

/// The paths of a host; others in tests.
#[derive(Clone, Debug)]
pub struct Paths {
    /// Each guest's run directory lies in it, by UUID.
    pub run: PathBuf,
    /// The backend's settings.
    pub config: PathBuf,
    /// Whether `config` is not the one that the backend reads by itself.
    pub config_is_given: bool,
    /// libvirt's settings for QEMU.
    pub qemu_conf: PathBuf,
    /// libvirt's directory of QEMU hooks.
    pub hooks: PathBuf,
    /// The backend program, if it is not to be looked for.
    pub backend: Option<PathBuf>,
    /// Whether backends are started as units of systemd.
    pub systemd: bool,
}

impl Default for Paths {
    fn default() -> Self {
        Self {
            run: "/run/outram".into(),
            config: "/etc/outram/backend.toml".into(),
            config_is_given: false,
            qemu_conf: "/etc/libvirt/qemu.conf".into(),
            hooks: "/etc/libvirt/hooks/qemu.d".into(),
            backend: None,
            // The test of sd_booted(3).
            systemd: Path::new("/run/systemd/system").is_dir(),
        }
    }
}

impl Paths {
    /// The usual paths, with what the environment overrides.
    pub fn from_environment() -> Self {
        let mut paths = Self::default();
        if let Some(config) = env::var_os(CONFIG_VARIABLE).filter(|path| !path.is_empty()) {
            paths.config = config.into();
            paths.config_is_given = true;
        }
        if let Some(run) = env::var_os(RUN_VARIABLE).filter(|path| !path.is_empty()) {
            paths.run = run.into();
        }
        paths.backend = env::var_os(BACKEND_VARIABLE)
            .filter(|path| !path.is_empty())
            .map(PathBuf::from);
        paths
    }
}

/// Why no backend program can be started.
#[derive(Debug, thiserror::Error)]
pub enum NoBackend {
    /// The variable names something else.
    #[error("{BACKEND_VARIABLE} is '{0}', which is not an executable file: correct or unset it")]
    Variable(PathBuf),
    /// Not found anywhere.
    #[error(
        "{BACKEND_NAME} was not found in {0} nor in PATH: install it beside 'outram', or in a directory of libvirtd's PATH such as /usr/local/bin"
    )]
    NotFound(PathBuf),
}

/// Finds the backend program: the one given, else beside our own, else in `PATH`.
pub fn find_backend(paths: &Paths) -> Result<PathBuf, NoBackend> {
    match &paths.backend {
        Some(given) if is_executable(given) => return Ok(given.clone()),
        Some(given) => return Err(NoBackend::Variable(given.clone())),
        None => {}
    }
    let beside = env::current_exe()
        .ok()
        .and_then(|program| fs::canonicalize(program).ok())
        .and_then(|program| program.parent().map(Path::to_path_buf))
        .unwrap_or_default();
    let path = env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/local/bin:/usr/bin"));
    std::iter::once(beside.clone())
        .chain(env::split_paths(&path))
        .map(|directory| directory.join(BACKEND_NAME))
        .find(|candidate| is_executable(candidate))
        .ok_or(NoBackend::NotFound(beside))
}

/// Whether a path is a file that its owner may execute.
pub fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}
