//! AppArmor: libvirt confines each QEMU by a profile of its own, which includes the abstraction
//! `libvirt-qemu`; and that must allow what the hand-over needs.
//!
//! Our rules are a file of their own in `abstractions/libvirt-qemu.d`. Newer libvirt includes that
//! folder by itself; for an older one a line in the site's own `local/abstractions/libvirt-qemu`
//! does. libvirt reads both at each start of a domain, so nothing is to be reloaded.

use std::fs;
use std::path::{Path, PathBuf};

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

#[cfg(test)]
mod tests {
    use super::*;

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
