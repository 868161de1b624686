//! AppArmor: libvirt confines each QEMU by a profile of its own, which includes the abstraction
//! `libvirt-qemu`; and that must allow what the hand-over needs.
//!
//! Our rules are a file of their own in `abstractions/libvirt-qemu.d`. Newer libvirt includes that
//! folder by itself; for an older one a line in the site's own `local/abstractions/libvirt-qemu`
//! does. libvirt reads both at each start of a domain, so nothing is to be reloaded.
//!
//! libvirt's daemon is confined too, and starts programs of the system's own folders alone: where the
//! hook lies elsewhere, as in /usr/local/bin, a line in the site's additions to the daemon's profile
//! lets it. Without, no domain of the host could be started. That profile is to be reloaded.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use outram_wire::units::VmId;

use crate::domain_xml::DomainXml;

/// Our rules.
pub const RULES: &str = include_str!("../apparmor/libvirt-qemu.d-outram");

/// The line that includes them where libvirt does not.
pub const INCLUDE_LINE: &str =
    "include if exists <abstractions/libvirt-qemu.d/outram> # by 'outram setup'\n";

const LIBVIRTS_RULES: &str = "etc/apparmor.d/abstractions/libvirt-qemu";
const SITES_RULES: &str = "etc/apparmor.d/local/abstractions/libvirt-qemu";
const OUR_RULES: &str = "etc/apparmor.d/abstractions/libvirt-qemu.d/outram";

/// Profiles of the daemons that start the hook, below `etc/apparmor.d`, and in its folder `local`
/// the site's additions to them.
const DAEMONS: [&str; 2] = ["usr.sbin.libvirtd", "usr.sbin.virtqemud"];

/// Folders whose programs those profiles let the daemons start.
const PROGRAM_FOLDERS: [&str; 4] = ["/bin", "/sbin", "/usr/bin", "/usr/sbin"];

/// What our lines in the site's additions end with.
const OUR_MARK: &str = " # by 'outram setup'";

/// How a folder is mentioned by libvirt itself.
const OUR_FOLDER: &str = "abstractions/libvirt-qemu.d";

/// The kernel's word on whether AppArmor is in force.
const ENABLED: &str = "/sys/module/apparmor/parameters/enabled";

/// The profiles that the kernel has, a line each: `NAME (MODE)`.
const LOADED: &str = "/sys/kernel/security/apparmor/profiles";

/// Where libvirt writes those of guests.
const GUEST_PROFILES: &str = "/etc/apparmor.d/libvirt";

/// libvirt's AppArmor files below a root.
#[derive(Clone, Debug)]
pub struct AppArmor {
    /// Our rules' place.
    pub rules: PathBuf,
    /// The site's own additions to libvirt's rules.
    pub site: PathBuf,
    libvirts: PathBuf,
    /// The daemons' profiles that are installed.
    pub daemons: Vec<DaemonProfile>,
}

/// The profile of a daemon of libvirt.
#[derive(Clone, Debug)]
pub struct DaemonProfile {
    /// libvirt's file.
    pub profile: PathBuf,
    /// The site's own additions to it.
    pub site: PathBuf,
}

impl DaemonProfile {
    fn below(root: &Path, name: &str) -> Option<Self> {
        let folder = root.join("etc/apparmor.d");
        let profile = folder.join(name);
        profile.is_file().then(|| Self {
            profile,
            site: folder.join("local").join(name),
        })
    }

    /// The site's additions as they are, and as they are to be for the daemon to start the hook
    /// `program`; `None` where the hook is gone.
    pub fn additions(&self, program: Option<&Path>) -> io::Result<(String, String)> {
        let found = site_text(&self.site)?;
        let others = found.lines().filter(|line| !line.ends_with(OUR_MARK));
        let ours = program.and_then(rule_to_start);
        let wanted = others
            .map(str::to_owned)
            .chain(ours)
            .map(|line| line + "\n")
            .collect();
        Ok((found, wanted))
    }
}

/// The line that lets a daemon start a program, unconfined; `None` where libvirt's own rules do.
fn rule_to_start(program: &Path) -> Option<String> {
    let folder = program.parent()?.to_str()?;
    if PROGRAM_FOLDERS.contains(&folder) {
        return None;
    }
    let mut path = String::new();
    for character in program.to_str()?.chars() {
        // What means something in AppArmor's patterns, or ends the quotation.
        if "*?[]{}^\"\\".contains(character) {
            path.push('\\');
        }
        path.push(character);
    }
    Some(format!("\"{path}\" PUx,{OUR_MARK}"))
}

impl AppArmor {
    /// Those below `root`; `None` where libvirt came without.
    pub fn below(root: &Path) -> Option<Self> {
        let libvirts = root.join(LIBVIRTS_RULES);
        libvirts.is_file().then(|| Self {
            rules: root.join(OUR_RULES),
            site: root.join(SITES_RULES),
            libvirts,
            daemons: DAEMONS
                .iter()
                .filter_map(|name| DaemonProfile::below(root, name))
                .collect(),
        })
    }

    /// Whether libvirt includes our folder by itself.
    pub fn is_included_by_libvirt(&self) -> bool {
        read(&self.libvirts).contains(OUR_FOLDER)
    }

    /// What is missing for our rules to be in force, in words; `None` if nothing.
    pub fn lacks(&self) -> Option<String> {
        if read(&self.rules) != RULES {
            let path = self.rules.display();
            return Some(format!("{path} is missing or of another version"));
        }
        let included = self.is_included_by_libvirt() || read(&self.site).contains(OUR_FOLDER);
        (!included).then(|| format!("{} does not include our rules", self.site.display()))
    }

    /// What keeps libvirt's daemon from starting the hook, in words; `None` if nothing.
    pub fn keeps_from(&self, hook: &Path) -> Option<String> {
        let rule = rule_to_start(hook)?;
        let lacking = |daemon: &&DaemonProfile| !read(&daemon.site).contains(&rule);
        let daemon = self.daemons.iter().find(lacking)?;
        Some(format!(
            "{} does not let libvirt start {}: no domain of this host could be started",
            daemon.site.display(),
            hook.display()
        ))
    }
}

/// A file of the site's, to be written again with what others have in it: empty only where there is none.
pub fn site_text(path: &Path) -> io::Result<String> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        read => read,
    }
}

/// What a file says, to be looked at: nothing where it cannot be read.
fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Whether the kernel enforces AppArmor's profiles.
pub fn is_enabled() -> bool {
    read(Path::new(ENABLED)).trim() == "Y"
}

/// What keeps AppArmor from letting this domain's QEMU be paged, in words. libvirt confines QEMU
/// where it is confined itself, and the domain's definition does not say otherwise.
pub fn hindrance(domain: &DomainXml) -> Option<String> {
    if !is_enabled() || !confines(domain) || !parent_is_confined() {
        return None;
    }
    AppArmor::below(Path::new("/"))?.lacks()
}

/// The profile of one guest, which libvirt wrote and loaded when the guest started: perhaps before our
/// rules were in place.
#[derive(Clone, Debug)]
pub struct GuestProfile {
    file: PathBuf,
}

/// Why a guest that runs cannot be let do what the hand-over needs.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// It would be refused the connection to its backend, and wait for it without end.
    #[error(
        "AppArmor confines the guest's QEMU, and its rules do not allow what paging needs: {0}; 'outram setup' puts them in place"
    )]
    Lacks(String),
    /// The kernel was not told.
    #[error("cannot run apparmor_parser, of the package apparmor")]
    NoParser(#[source] io::Error),
    /// The kernel was told, and refused.
    #[error("apparmor_parser does not load {file}: {said}")]
    NotLoaded {
        /// The profile.
        file: PathBuf,
        /// What it said.
        said: String,
    },
}

impl GuestProfile {
    /// That of a guest that runs confined; `None` if it does not.
    pub fn of_running(vm: VmId) -> Option<Self> {
        let name = format!("libvirt-{vm}");
        let in_force = format!("{name} (enforce)");
        let found = read(Path::new(LOADED)).lines().any(|line| line == in_force);
        found.then(|| Self {
            file: Path::new(GUEST_PROFILES).join(name),
        })
    }

    /// Whether our rules are in place for it to be loaded with.
    pub fn check(&self) -> Result<(), ProfileError> {
        let lacking = AppArmor::below(Path::new("/")).and_then(|found| found.lacks());
        lacking.map_or(Ok(()), |lacking| Err(ProfileError::Lacks(lacking)))
    }

    /// Loads it again, with our rules as they are now.
    pub fn renew(&self) -> Result<(), ProfileError> {
        load(&self.file)
    }
}

/// Loads a profile in place of what was loaded under its name.
pub fn load(profile: &Path) -> Result<(), ProfileError> {
    let output = Command::new("apparmor_parser")
        .arg("--replace")
        .arg(profile)
        // A terminal's Ctrl-C is for us to heed.
        .process_group(0)
        .stdin(Stdio::null())
        .output()
        .map_err(ProfileError::NoParser)?;
    if output.status.success() {
        return Ok(());
    }
    Err(ProfileError::NotLoaded {
        file: profile.to_owned(),
        said: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// Whether a domain's definition leaves it to AppArmor.
fn confines(domain: &DomainXml) -> bool {
    !domain
        .children(domain.domain(), "seclabel")
        .into_iter()
        .any(|label| {
            let of_apparmor = matches!(domain.attribute(label, "model"), None | Some("apparmor"));
            of_apparmor && domain.attribute(label, "type") == Some("none")
        })
}

/// Whether the process that called us, libvirt's daemon, has a profile that is enforced.
fn parent_is_confined() -> bool {
    let parent = std::os::unix::process::parent_id();
    read(Path::new(&format!("/proc/{parent}/attr/current"))).contains("(enforce)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_may_be_left_unconfined() {
        for (label, confined) in [
            ("", true),
            ("<seclabel type='none' model='dac'/>", true),
            ("<seclabel type='dynamic' model='apparmor'/>", true),
            ("<seclabel type='none' model='apparmor'/>", false),
            ("<seclabel type='none'/>", false),
        ] {
            let domain = DomainXml::parse(&format!("<domain>{label}</domain>"));
            assert_eq!(confines(&domain.expect("well-formed")), confined, "{label}");
        }
    }

    fn host(libvirts: &str) -> (tempfile::TempDir, AppArmor) {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join(LIBVIRTS_RULES);
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(path, libvirts).expect("written");
        let found = AppArmor::below(root.path()).expect("libvirt's rules");
        for path in [&found.rules, &found.site] {
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        }
        (root, found)
    }

    #[test]
    fn what_is_missing_is_told_until_the_rules_are_in_force() {
        let (_root, found) = host("include <local/abstractions/libvirt-qemu>\n");
        assert!(found.lacks().is_some_and(|text| text.contains("missing")));
        fs::write(&found.rules, RULES).expect("written");
        assert!(found.lacks().is_some_and(|text| text.contains("include")));
        fs::write(&found.site, INCLUDE_LINE).expect("written");
        assert_eq!(found.lacks(), None);
        fs::write(&found.rules, "of another version").expect("written");
        assert!(found.lacks().is_some());
    }

    #[test]
    fn newer_libvirt_needs_no_line() {
        let (_root, found) = host("include if exists <abstractions/libvirt-qemu.d>\n");
        fs::write(&found.rules, RULES).expect("written");
        assert_eq!(found.lacks(), None);
    }

    #[test]
    fn a_daemon_is_let_start_a_hook_of_another_folder() {
        let (root, _) = host("");
        let profile = root.path().join("etc/apparmor.d/usr.sbin.libvirtd");
        fs::write(profile, "include if exists <local/usr.sbin.libvirtd>\n").expect("written");
        let found = AppArmor::below(root.path()).expect("libvirt's rules");
        let [daemon] = &found.daemons[..] else {
            panic!("{:?}", found.daemons);
        };
        fs::write(&daemon.site, "/srv/mine r,").expect("written");
        let ours = Path::new("/usr/bin/outram-libvirt-hook");
        assert_eq!(found.keeps_from(ours), None);
        assert_eq!(
            daemon.additions(Some(ours)).expect("readable").1,
            "/srv/mine r,\n"
        );

        let elsewhere = Path::new("/opt/a{b/outram-libvirt-hook");
        assert!(found.keeps_from(elsewhere).is_some());
        for _ in 0..2 {
            let (_, wanted) = daemon.additions(Some(elsewhere)).expect("readable");
            assert_eq!(
                wanted,
                "/srv/mine r,\n\"/opt/a\\{b/outram-libvirt-hook\" PUx, # by 'outram setup'\n"
            );
            fs::write(&daemon.site, wanted).expect("written");
        }
        assert_eq!(found.keeps_from(elsewhere), None);
        assert_eq!(
            daemon.additions(None).expect("readable").1,
            "/srv/mine r,\n"
        );
    }

    #[test]
    fn without_libvirts_rules_there_is_nothing_to_do() {
        let root = tempfile::tempdir().expect("a directory");
        assert!(AppArmor::below(root.path()).is_none());
    }
}
