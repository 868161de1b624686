//! What `outram doctor` checks of the host: kernel, programs, settings, certificates, servers.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use outram_wire::host_settings::HostSettings;
use outram_wire::identity::{Identity, expires_soon, expiry_in_words};
use outram_wire::shmem_thp;
use rustls::ClientConfig;

use super::doctor::{Check, Verdict, knows_hook};
use super::setup::HOOK_NAME;
use crate::apparmor::{self, AppArmor};
use crate::backend_unit::{self, UNIT_FILE};
use crate::daemons;
use crate::host::{self, Paths, is_executable};
use crate::observer::{Observer, ObserverError};
use crate::process;
use crate::uffd_probe;
use outram_wire::causes::with_causes;
use outram_wire::server::{ServerAddress, ServerStats};
use outram_wire::tls::TlsFiles;
use outram_wire::units::format_size;

/// The oldest kernel with all that the hand-over needs.
const KERNEL_OLDEST: (u32, u32) = (6, 1);

/// Where Yama says who may trace whom; the file is missing where Yama is not built in.
const PTRACE_SCOPE: &str = "/proc/sys/kernel/yama/ptrace_scope";

/// The security modules that the kernel has in use.
const SECURITY_MODULES: &str = "/sys/kernel/security/lsm";

/// The capabilities that a backend cannot do without, by their bits in capabilities(7).
const NEEDED_CAPABILITIES: [(&str, u32); 3] = [
    ("CAP_IPC_LOCK", 14),
    ("CAP_SYS_PTRACE", 19),
    ("CAP_SYS_ADMIN", 21),
];

/// Those that protect it from the OOM killer and lift the limit of locked memory.
const WANTED_CAPABILITIES: [(&str, u32); 1] = [("CAP_SYS_RESOURCE", 24)];

/// The kernel and its settings.
pub(super) fn kernel() -> Vec<Check> {
    let mut checks = vec![
        kernel_version(),
        userfaultfd(),
        huge_shmem(),
        tracing(),
        capabilities(),
    ];
    checks.extend(landlock());
    checks.extend(kvm());
    checks
}

/// What keeps a backend that a guest or a server got hold of from root's files. Nothing is said where
/// the kernel does not tell which security modules it has.
fn landlock() -> Option<Check> {
    let name = "landlock";
    let modules = fs::read_to_string(SECURITY_MODULES).ok()?;
    let modules = modules.trim();
    Some(if modules.split(',').any(|module| module == name) {
        Check::pass(name, "keeps backends to their own files")
    } else {
        Check::warn(
            name,
            format!(
                "not among the kernel's security modules ({modules}): a backend could open root's files"
            ),
            format!("add lsm={name},{modules} to the kernel's command line and reboot"),
        )
    })
}

fn kernel_version() -> Check {
    let text = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let text = text.trim();
    let mut numbers = text
        .split(|c: char| !c.is_ascii_digit())
        .map(|part| part.parse().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= KERNEL_OLDEST {
        Check::pass("kernel", text)
    } else {
        Check::fail("kernel", text, "boot Linux 6.1 or newer")
    }
}

fn userfaultfd() -> Check {
    let name = "userfaultfd";
    let device = uffd_probe::DEVICE;
    match uffd_probe::missing_features() {
        Ok(missing) if missing.is_empty() => {
            Check::pass(name, format!("{device} has all that is needed"))
        }
        Ok(missing) => Check::fail(
            name,
            format!("the kernel lacks: {}", missing.join(", ")),
            "boot Linux 6.1 or newer",
        ),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Check::fail(
            name,
            format!("{device} is missing"),
            "use a kernel with CONFIG_USERFAULTFD=y; in a container, bring the device in",
        ),
        Err(error) => Check::fail(name, format!("{device}: {error}"), "run this as root"),
    }
}

fn huge_shmem() -> Check {
    let name = "huge pages";
    let found = match shmem_thp::find(Path::new(shmem_thp::SETTINGS)) {
        Ok(found) => found,
        Err(error) => return Check::fail(name, error.to_string(), "run this as root"),
    };
    if found.is_empty() {
        return Check::pass(name, "off for shared memory");
    }
    let settings: Vec<String> = found
        .iter()
        .map(|huge| format!("{} is '{}'", huge.path.display(), huge.value))
        .collect();
    let cures: Vec<String> = found
        .iter()
        .map(|huge| format!("echo never > {}", huge.path.display()))
        .collect();
    Check::fail(name, settings.join(", "), cures.join("; "))
}

fn tracing() -> Check {
    match fs::read_to_string(PTRACE_SCOPE) {
        Ok(scope) if scope.trim() == "3" => Check::fail(
            "ptrace",
            "kernel.yama.ptrace_scope is 3: nobody may trace, so no userfaultfd can be handed over",
            "set kernel.yama.ptrace_scope to 2 or less in sysctl.d and reboot",
        ),
        _ => Check::pass("ptrace", "allowed to root"),
    }
}

fn capabilities() -> Check {
    let name = "capabilities";
    let missing = |wanted: &[(&'static str, u32)]| -> Vec<&'static str> {
        let ours = std::process::id();
        wanted
            .iter()
            .filter(|(_, bit)| !process::has_capability(ours, *bit))
            .map(|(name, _)| *name)
            .collect()
    };
    let needed = missing(&NEEDED_CAPABILITIES);
    let wanted = missing(&WANTED_CAPABILITIES);
    let cure = "run this as root; in a container, allow them";
    if !needed.is_empty() {
        Check::fail(name, format!("missing: {}", needed.join(", ")), cure)
    } else if !wanted.is_empty() {
        let found = format!(
            "missing: {}: the OOM killer may choose backends",
            wanted.join(", ")
        );
        Check::warn(name, found, cure)
    } else {
        Check::pass(
            name,
            "locked memory, tracing, mounting and OOM protection are allowed",
        )
    }
}

/// Where /dev/kvm exists but QEMU's user cannot open it, libvirt asks QEMU for its capabilities
/// anew at each step, and guests are emulated. Nothing is said where it is not there at all.
fn kvm() -> Option<Check> {
    use std::os::unix::fs::MetadataExt;
    let device = fs::metadata("/dev/kvm").ok()?;
    let open_to_others = device.mode() & 0o006 == 0o006;
    let open_to_a_group = device.mode() & 0o060 == 0o060 && device.gid() != 0;
    Some(if open_to_others || open_to_a_group {
        Check::pass("KVM", "/dev/kvm is open to QEMU")
    } else {
        Check::warn(
            "KVM",
            "/dev/kvm is for root only: libvirt's QEMU user cannot use it",
            "chgrp kvm /dev/kvm && chmod 660 /dev/kvm (udev does so on an ordinary host)",
        )
    })
}

/// Our own programs, and whether libvirt calls the hook.
pub(super) fn programs(paths: &Paths) -> Vec<Check> {
    let mut checks = vec![backend(paths), hook(paths)];
    checks.extend(apparmor(paths));
    checks
}

/// Whether libvirt's profiles let QEMU do what the hand-over needs; nothing where AppArmor is off.
fn apparmor(paths: &Paths) -> Option<Check> {
    let name = "AppArmor";
    if !apparmor::is_enabled() {
        return None;
    }
    let found = AppArmor::below(Path::new("/"))?;
    let hook = fs::canonicalize(paths.hooks.join(HOOK_NAME)).ok();
    let keeps_from = hook.and_then(|hook| found.keeps_from(&hook));
    Some(match keeps_from.or_else(|| found.lacks()) {
        None => Check::pass(name, found.rules.display().to_string()),
        Some(lacking) => Check::fail(name, lacking, "outram setup"),
    })
}

fn backend(paths: &Paths) -> Check {
    let name = "outram-backend";
    let path = match host::find_backend(paths) {
        Ok(path) => path,
        Err(error) => return Check::fail(name, error.to_string(), ""),
    };
    let started = paths.systemd.then(backend_unit::program).flatten();
    if let Some(started) = started.filter(|started| !is_same_file(started, &path)) {
        let found = format!(
            "{UNIT_FILE} starts {}, not {}",
            started.display(),
            path.display()
        );
        let cure = "'outram setup'; where a package brought the unit, remove the other program";
        return Check::fail(name, found, cure);
    }
    let output = Command::new(&path)
        .arg("--version")
        .stdin(Stdio::null())
        .output();
    match output {
        Ok(output) if output.status.success() => {
            let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            Check::pass(name, format!("{} ({version})", path.display()))
        }
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            let found = format!("{} ends with {}: {said}", path.display(), output.status);
            Check::fail(name, found, "install Outram's programs anew")
        }
        Err(error) => {
            let found = format!("{}: {error}", path.display());
            Check::fail(name, found, "install Outram's programs anew")
        }
    }
}

/// Whether two paths lead to one file that is there.
fn is_same_file(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    real(one).is_some_and(|one| Some(one) == real(other))
}

fn hook(paths: &Paths) -> Check {
    let name = "hook";
    let link = paths.hooks.join(HOOK_NAME);
    if fs::symlink_metadata(&link).is_err() {
        return Check::fail(
            name,
            format!("{} is missing", link.display()),
            "outram setup",
        );
    }
    if !is_executable(&link) {
        let found = format!(
            "{} is not an executable file, or leads to none",
            link.display()
        );
        return Check::fail(
            name,
            found,
            "outram setup, or install Outram's programs anew",
        );
    }
    let running = daemons::running();
    let unaware: Vec<String> = running
        .iter()
        .filter(|daemon| !knows_hook(daemon, paths))
        .map(|daemon| format!("{} (process {})", daemon.name, daemon.pid))
        .collect();
    if running.is_empty() {
        let found = "installed; no libvirtd or virtqemud is running here";
        return Check::warn(name, found, "start libvirtd");
    }
    if unaware.is_empty() {
        return Check::pass(name, format!("{}, and libvirt calls it", link.display()));
    }
    Check::fail(
        name,
        format!(
            "{} has not looked for hooks since it was installed",
            unaware.join(", ")
        ),
        "systemctl reload libvirtd (or send it SIGHUP)",
    )
}

/// The backends' settings.
pub(super) fn settings(paths: &Paths) -> (HostSettings, Check) {
    let name = "settings";
    let path = paths.config.display();
    match HostSettings::read(&paths.config) {
        Ok(settings) if paths.config.exists() => {
            let check = Check::pass(name, path.to_string());
            (settings, check)
        }
        Ok(settings) => {
            let check = Check::warn(name, format!("{path} is missing"), "outram setup");
            (settings, check)
        }
        Err(error) => {
            let check = Check::fail(name, with_causes(&error), format!("correct {path}"));
            (HostSettings::default(), check)
        }
    }
}

const RENEW: &str = "issue it anew ('outram pki issue' in the CA's directory) and put it in its place: \
     it is taken without a restart";

const MOVE: &str = "move the files to /etc/outram/pki, and name them there in backend.toml, unless a drop-in of \
     outram-backend@.service shows that folder to it";

/// Folders of which a backend that is a service of systemd sees nothing: `ProtectHome=` and `PrivateTmp=` in
/// `outram-backend@.service`, see systemd.exec(5).
const HIDDEN_FROM_SERVICES: [&str; 5] = ["/home", "/root", "/run/user", "/tmp", "/var/tmp"];

/// The first of these files that a service does not see, or is a link to such a one.
fn hidden_from_services(files: &TlsFiles) -> Option<&Path> {
    let is_within = |path: &Path, folder: &str| {
        let resolved = Path::new(folder).canonicalize();
        path.starts_with(folder) || resolved.is_ok_and(|folder| path.starts_with(folder))
    };
    let is_hidden = |path: &&PathBuf| {
        let resolved = path.canonicalize();
        let places = [Some(path.as_path()), resolved.as_deref().ok()];
        let mut places = places.into_iter().flatten();
        places.any(|place| {
            HIDDEN_FROM_SERVICES
                .iter()
                .any(|folder| is_within(place, folder))
        })
    };
    let mut files = [&files.ca, &files.cert, &files.key].into_iter();
    files.find(is_hidden).map(PathBuf::as_path)
}

/// This host's identity: readable, of the CA, and not expired.
pub(super) fn certificates(settings: &HostSettings, systemd: bool) -> Check {
    let files = settings.tls_files();
    match Identity::<ClientConfig>::load(files.clone()) {
        Ok(identity) => {
            let status = identity.status();
            let expires = status.expires_unix_s.map(expiry_in_words);
            let words = format!("{} {}", files.cert.display(), expires.unwrap_or_default());
            let hidden = hidden_from_services(&files).filter(|_| systemd);
            match (status.expires_soon(), hidden) {
                (true, _) => Check::warn("certificates", words, RENEW),
                (false, Some(hidden)) => Check::warn(
                    "certificates",
                    format!("{} is not seen by services of systemd", hidden.display()),
                    MOVE,
                ),
                (false, None) => Check::pass("certificates", words),
            }
        }
        Err(error) => Check::fail(
            "certificates",
            with_causes(&error),
            "outram pki init and outram pki issue client, or copy the files from where the CA is",
        ),
    }
}

/// Whether the servers have what a guest needs.
const ROOM: &str = "room";

/// What a guest needs of its servers together.
pub(super) struct Needs {
    /// Bytes at its next start.
    pub(super) bytes: u64,
    /// Bytes that it has of them as it runs, and gives back before that.
    pub(super) has_bytes: u64,
}

/// Whether each server admits this host, and whether they have together what is wanted.
pub(super) fn servers(
    servers: &[ServerAddress],
    settings: &HostSettings,
    wanted: Option<Needs>,
) -> Vec<Check> {
    let files = settings.tls_files();
    let look = |server: &ServerAddress| {
        let mut observer = Observer::connect(server, &files)?;
        Ok::<_, ObserverError>((observer.stats()?, observer.expires_unix_s()))
    };
    let mut free_bytes = 0;
    let check = |server: &ServerAddress| match look(server) {
        Ok((stats, expires)) => {
            let free = free_of(&stats);
            free_bytes += free;
            let found = format!(
                "{server} has {} of {} free",
                format_size(free),
                format_size(stats.memory_bytes)
            );
            expiring(Check::pass("server", found), expires)
        }
        Err(error) => Check::fail(
            "server",
            with_causes(&error),
            "start outram-memserver there, let its port through the firewall, and have both ends' certificates from one CA",
        ),
    };
    let mut checks: Vec<Check> = servers.iter().map(check).collect();
    checks.extend(wanted.map(|wanted| room(free_bytes, &wanted)));
    checks
}

/// Adds a word about a server's certificate to what was found of it, if that is soon no good.
fn expiring(check: Check, expires: i64) -> Check {
    if check.verdict != Verdict::Pass || !expires_soon(Some(expires)) {
        return check;
    }
    let found = format!(
        "{}; its certificate {}",
        check.found,
        expiry_in_words(expires)
    );
    Check::warn("server", found, RENEW)
}

fn free_of(stats: &ServerStats) -> u64 {
    let lent = stats.reserved_bytes.max(stats.leased_bytes);
    let free = stats.memory_bytes.saturating_sub(lent);
    // It lends whole slabs.
    free - free.checked_rem(stats.slab_bytes).unwrap_or(0)
}

fn room(free_bytes: u64, wanted: &Needs) -> Check {
    let beside = match wanted.has_bytes {
        0 => String::new(),
        has => format!(" beside the {} that it has now", format_size(has)),
    };
    let found = format!(
        "{} are free{beside}, and the guest needs {}",
        format_size(free_bytes),
        format_size(wanted.bytes)
    );
    match free_bytes + wanted.has_bytes < wanted.bytes {
        true => Check::fail(
            ROOM,
            found,
            "another server, a larger --local-ratio, or more --memory there",
        ),
        false => Check::pass(ROOM, found),
    }
}

#[cfg(test)]
mod tests {
    use outram_wire::pki::{self, Kind, Order};

    use super::*;

    #[test]
    fn files_that_services_do_not_see_are_told_of() {
        let usual = HostSettings::default();
        assert_eq!(hidden_from_services(&usual.tls_files()), None);
        let key = PathBuf::from("/root/pki/client.key");
        let settings = HostSettings {
            tls_key: Some(key.clone()),
            ..usual.clone()
        };
        assert_eq!(hidden_from_services(&settings.tls_files()), Some(&*key));
        let hidden = tempfile::tempdir_in("/tmp").expect("a directory");
        let file = |name: &str| Some(hidden.path().join(name));
        let settings = HostSettings {
            tls_ca: file("ca.pem"),
            tls_cert: file("client.pem"),
            tls_key: file("client.key"),
            ..usual
        };
        let files = settings.tls_files();
        assert_eq!(hidden_from_services(&files), Some(&*files.ca));
        let broken = certificates(&settings, true);
        assert_eq!(broken.verdict, Verdict::Fail, "{broken}");
        pki::init(hidden.path()).expect("a CA");
        let order = Order {
            kind: Kind::Client,
            name: "client",
            addresses: &[],
            days: 800,
        };
        pki::issue(hidden.path(), &order).expect("a certificate");
        let check = certificates(&settings, true);
        assert_eq!(check.verdict, Verdict::Warn, "{check}");
        let ca = files.ca.display().to_string();
        assert!(
            check.found.contains(&ca) && check.found.contains("services"),
            "{check}"
        );
        let check = certificates(&settings, false);
        assert_eq!(check.verdict, Verdict::Pass, "{check}");
    }
}
