//! Which user and group QEMU will run as: the owner that the backend's socket needs.

use std::fs;
use std::path::Path;

use crate::domain_xml::DomainXml;

/// A user and a group, each by name or number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketUser {
    /// The user.
    pub user: String,
    /// The group.
    pub group: String,
}

impl std::fmt::Display for SocketUser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.user, self.group)
    }
}

/// The user QEMU runs as for this domain: its own label, else libvirt's setting, else what the
/// distribution's libvirt is built with.
pub fn find(domain: &DomainXml, qemu_conf: &Path) -> SocketUser {
    let account = |database: &str, name: &str| {
        fs::read_to_string(database).is_ok_and(|text| {
            text.lines()
                .any(|line| line.split(':').next() == Some(name))
        })
    };
    let default = default_user(
        |name| account("/etc/passwd", name),
        |name| account("/etc/group", name),
    );
    let settings = fs::read_to_string(qemu_conf).unwrap_or_default();
    let configured = SocketUser {
        user: setting(&settings, "user").unwrap_or(default.user),
        group: setting(&settings, "group").unwrap_or(default.group),
    };
    label(domain, &configured).unwrap_or(configured)
}

/// What libvirt is built with: Debian and Ubuntu, Arch, then Fedora, RHEL and SUSE.
fn default_user(has_user: impl Fn(&str) -> bool, has_group: impl Fn(&str) -> bool) -> SocketUser {
    let pair = |user: &str, group: &str| SocketUser {
        user: user.to_owned(),
        group: group.to_owned(),
    };
    [
        ("libvirt-qemu", "kvm"),
        ("libvirt-qemu", "libvirt-qemu"),
        ("qemu", "qemu"),
    ]
    .into_iter()
    .find(|(user, group)| has_user(user) && has_group(group))
    .map_or_else(|| pair("root", "root"), |(user, group)| pair(user, group))
}

/// `name = "value"` in libvirt's configuration syntax.
fn setting(text: &str, name: &str) -> Option<String> {
    text.lines()
        .filter_map(|line| {
            let (key, value) = line.split_once('=')?;
            let value = value.split('#').next().unwrap_or_default().trim();
            let value = value.trim_matches(['"', '\'']);
            (key.trim() == name && !value.is_empty()).then(|| plain_id(value))
        })
        .next_back()
}

/// The domain's own label: `<seclabel model='dac'>` with `<label>user:group</label>`.
fn label(domain: &DomainXml, configured: &SocketUser) -> Option<SocketUser> {
    domain
        .children(domain.domain(), "seclabel")
        .into_iter()
        .filter(|label| domain.attribute(*label, "model") == Some("dac"))
        .find_map(|label| domain.child(label, "label"))
        .map(|label| {
            let text = domain.text(label);
            let text = text.trim();
            let (user, group) = text.split_once(':').unwrap_or((text, ""));
            SocketUser {
                user: plain_id(user),
                group: if group.is_empty() {
                    configured.group.clone()
                } else {
                    plain_id(group)
                },
            }
        })
}

/// libvirt marks a number that is no name with a plus sign.
fn plain_id(text: &str) -> String {
    text.trim().trim_start_matches('+').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(user: &str, group: &str) -> SocketUser {
        SocketUser {
            user: user.to_owned(),
            group: group.to_owned(),
        }
    }

    #[test]
    fn a_static_label_wins() {
        let domain = DomainXml::parse(
            "<domain><seclabel type='none' model='selinux'/>\
             <seclabel type='static' model='dac'><label>+1000:users</label></seclabel></domain>",
        )
        .expect("well-formed");
        assert_eq!(
            label(&domain, &pair("qemu", "qemu")),
            Some(pair("1000", "users"))
        );
    }

    #[test]
    fn the_last_setting_counts_and_comments_do_not() {
        let text = "#user = \"no\"\nuser = \"one\"\n user=\"+64055\" # why\ngroup = \"kvm\"\n";
        assert_eq!(setting(text, "user").as_deref(), Some("64055"));
        assert_eq!(setting(text, "group").as_deref(), Some("kvm"));
        assert_eq!(setting(text, "users"), None);
    }

    #[test]
    fn defaults_follow_the_accounts_that_exist() {
        let all = |_: &str| true;
        assert_eq!(default_user(all, all), pair("libvirt-qemu", "kvm"));
        assert_eq!(default_user(|u| u == "qemu", all), pair("qemu", "qemu"));
        assert_eq!(default_user(|_| false, all), pair("root", "root"));
        assert_eq!(
            default_user(all, |g| g != "kvm"),
            pair("libvirt-qemu", "libvirt-qemu")
        );
    }
}
