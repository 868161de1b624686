//! AppArmor: libvirt confines each QEMU by a profile of its own, which includes the abstraction
//! `libvirt-qemu`; and that must allow what the hand-over needs.
//!
//! Our rules are a file of their own in `abstractions/libvirt-qemu.d`. Newer libvirt includes that
//! folder by itself; for an older one a line in the site's own `local/abstractions/libvirt-qemu`
//! does. libvirt reads both at each start of a domain, so nothing is to be reloaded.

use std::fs;
use std::path::{Path, PathBuf};

use crate::domain_xml::DomainXml;

/// Our rules.
pub const RULES: &str = include_str!("../apparmor/libvirt-qemu.d-outram");

/// The line that includes them where libvirt does not.
pub const INCLUDE_LINE: &str =
    "include if exists <abstractions/libvirt-qemu.d/outram> # by 'outram setup'\n";

const LIBVIRTS_RULES: &str = "etc/apparmor.d/abstractions/libvirt-qemu";
const SITES_RULES: &str = "etc/apparmor.d/local/abstractions/libvirt-qemu";
const OUR_RULES: &str = "etc/apparmor.d/abstractions/libvirt-qemu.d/outram";

/// How a folder is mentioned by libvirt itself.
const OUR_FOLDER: &str = "abstractions/libvirt-qemu.d";

/// The kernel's word on whether AppArmor is in force.
const ENABLED: &str = "/sys/module/apparmor/parameters/enabled";

/// libvirt's AppArmor files below a root.
#[derive(Clone, Debug)]
pub struct AppArmor {
    /// Our rules' place.
    pub rules: PathBuf,
    /// The site's own additions to libvirt's rules.
    pub site: PathBuf,
    libvirts: PathBuf,
}

impl AppArmor {
    /// Those below `root`; `None` where libvirt came without.
    pub fn below(root: &Path) -> Option<Self> {
        let libvirts = root.join(LIBVIRTS_RULES);
        libvirts.is_file().then(|| Self {
            rules: root.join(OUR_RULES),
            site: root.join(SITES_RULES),
            libvirts,
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
}

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
    fn without_libvirts_rules_there_is_nothing_to_do() {
        let root = tempfile::tempdir().expect("a directory");
        assert!(AppArmor::below(root.path()).is_none());
    }
}
