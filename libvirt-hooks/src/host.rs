//! Where things are on this host, and what its settings say of servers and certificates.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use outram_wire::server::{AddressError, ServerAddress};
use outram_wire::tls::TlsFiles;
use outram_wire::verbs::Choice;

/// Environment variable with the backend's path; otherwise it is looked for beside our own
/// program, then in `PATH`. libvirtd passes only few variables to its hooks, this not among them.
pub const BACKEND_VARIABLE: &str = "OUTRAM_BACKEND";

/// Environment variable with the path of the backend's settings.
pub const CONFIG_VARIABLE: &str = "OUTRAM_CONFIG";

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

/// What the host's settings say of servers, certificates and RDMA; the rest is the backend's affair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostSettings {
    /// Servers of guests that name none.
    pub servers: Vec<ServerAddress>,
    /// The certificate authority's certificate.
    pub tls_ca: Option<PathBuf>,
    /// This host's certificate.
    pub tls_cert: Option<PathBuf>,
    /// The certificate's key.
    pub tls_key: Option<PathBuf>,
    /// The RDMA device.
    pub rdma: Choice,
}

/// Why the host's settings were not understood.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is no TOML.
    #[error("{path} is not understood: {source}")]
    Toml {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// A value of another type.
    #[error("'{key}' in {path} must be {expected}")]
    Type {
        /// The file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// What it must be.
        expected: &'static str,
    },
    /// A server address that is none.
    #[error("'servers' in {path}: {source}")]
    Address {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: AddressError,
    },
}

impl HostSettings {
    /// The files of this host's identity.
    pub fn tls_files(&self) -> TlsFiles {
        let or = |path: &Option<PathBuf>, name: &str| {
            let usual = || Path::new("/etc/outram/pki").join(name);
            path.clone().unwrap_or_else(usual)
        };
        TlsFiles {
            ca: or(&self.tls_ca, "ca.pem"),
            cert: or(&self.tls_cert, "client.pem"),
            key: or(&self.tls_key, "client.key"),
        }
    }

    /// Reads the settings; a missing file is one without any.
    pub fn read(path: &Path) -> Result<Self, SettingsError> {
        match fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(source) => Err(SettingsError::Read {
                path: path.to_owned(),
                source,
            }),
        }
    }

    fn parse(text: &str, path: &Path) -> Result<Self, SettingsError> {
        let table: toml::Table = text.parse().map_err(|source| SettingsError::Toml {
            path: path.to_owned(),
            source: Box::new(source),
        })?;
        let wrong = |key, expected| SettingsError::Type {
            path: path.to_owned(),
            key,
            expected,
        };
        let file = |key: &'static str| match table.get(key) {
            None => Ok(None),
            Some(toml::Value::String(file)) => Ok(Some(PathBuf::from(file))),
            Some(_) => Err(wrong(key, "a path in quotes")),
        };
        let device = "off, auto or an RDMA device such as \"mlx5_0:1:3\"";
        let rdma = match table.get("rdma") {
            None => Choice::Auto,
            Some(value) => {
                let choice = value.as_str().and_then(|text| text.parse().ok());
                choice.ok_or_else(|| wrong("rdma", device))?
            }
        };
        let list = "a list such as [\"10.0.0.2:7741\"]";
        let mut servers = Vec::new();
        match table.get("servers") {
            None => {}
            Some(toml::Value::Array(values)) => {
                for value in values {
                    let text = value.as_str().ok_or_else(|| wrong("servers", list))?;
                    servers.push(text.parse().map_err(|source| SettingsError::Address {
                        path: path.to_owned(),
                        source,
                    })?);
                }
            }
            Some(_) => return Err(wrong("servers", list)),
        }
        Ok(Self {
            servers,
            tls_ca: file("tls-ca")?,
            tls_cert: file("tls-cert")?,
            tls_key: file("tls-key")?,
            rdma,
        })
    }
}
