//! `outram doctor`: each thing that paging needs, whether it is so, and the cure where not.

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::Result;
use clap::Args;

use super::completion::domain_names;
use super::{domain_checks, host_checks, rdma_checks};
use crate::daemons::{Daemon, RELOAD_STAMP};
use crate::hook::STAMP_FILE;
use crate::host::Paths;
use crate::libvirt::{self, Destination, Libvirt, Version};

/// The oldest versions that Outram supports.
const LIBVIRT_OLDEST: Version = Version(9, 0, 0);
const QEMU_OLDEST: Version = Version(7, 2, 0);

/// The arguments of `outram doctor`.
#[derive(Debug, Args)]
pub struct DoctorArguments {
    /// Name or UUID of a domain to check as well
    #[arg(add = domain_names())]
    domain: Option<String>,
    /// Check that the host of this libvirt, such as qemu+ssh://host2/system, calls Outram's hook: a
    /// guest that is migrated to a host without Outram waits there for ever
    ///
    /// It is tried with a domain of 64 MiB that the hook refuses; where there is no hook, the domain
    /// is started paused, and ended at once.
    #[arg(long, value_name = "URI")]
    migrate_to: Option<String>,
}

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As it should be.
    Pass,
    /// Works, or cannot be told, but deserves a look.
    Warn,
    /// Paging will not work.
    Fail,
}

/// One requirement and how it came out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// What is required.
    pub name: String,
    /// How it came out.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What to do about it; empty if nothing.
    pub cure: String,
}

impl Check {
    /// As it should be.
    pub fn pass(name: &str, found: impl Into<String>) -> Self {
        Self::new(name, Verdict::Pass, found, "")
    }

    /// Deserves a look.
    pub fn warn(name: &str, found: impl Into<String>, cure: impl Into<String>) -> Self {
        Self::new(name, Verdict::Warn, found, cure)
    }

    /// Paging will not work.
    pub fn fail(name: &str, found: impl Into<String>, cure: impl Into<String>) -> Self {
        Self::new(name, Verdict::Fail, found, cure)
    }

    fn new(
        name: &str,
        verdict: Verdict,
        found: impl Into<String>,
        cure: impl Into<String>,
    ) -> Self {
        Self {
            name: name.to_owned(),
            verdict,
            found: found.into(),
            cure: cure.into(),
        }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.verdict {
            Verdict::Pass => "pass",
            Verdict::Warn => "warn",
            Verdict::Fail => "FAIL",
        };
        write!(f, "{verdict}  {:<18}{}", self.name, self.found)?;
        if !self.cure.is_empty() {
            write!(f, "\n      {:<18}cure: {}", "", self.cure)?;
        }
        Ok(())
    }
}

impl DoctorArguments {
    /// Prints every check. The result is whether none failed.
    pub fn run(&self, uri: Option<&str>, paths: &Paths) -> Result<bool> {
        // Where systemd starts libvirt's daemon for whoever connects, it is to run by the time it is looked for.
        let libvirt = Libvirt::connect(uri);
        let mut checks = host_checks::kernel();
        checks.extend(host_checks::programs(paths));
        let (settings, check) = host_checks::settings(paths);
        checks.push(check);
        checks.extend(rdma_checks::rdma(&settings.rdma, paths));
        checks.push(host_checks::certificates(&settings, paths.systemd));
        match libvirt {
            Ok(libvirt) => {
                checks.extend(versions(&libvirt));
                if let Some(name) = &self.domain {
                    checks.extend(domain_checks::domain(&libvirt, name, &settings, paths));
                }
            }
            Err(error) => checks.push(Check::fail(
                "libvirt",
                error.to_string(),
                "start libvirtd (or virtqemud), and run this as root",
            )),
        }
        if self.domain.is_none() {
            checks.extend(host_checks::servers(&settings.servers, &settings, None));
        }
        checks.extend(self.migrate_to.as_deref().map(destination));
        for check in &checks {
            say!("{check}");
        }
        let failed = count(&checks, Verdict::Fail);
        let warned = count(&checks, Verdict::Warn);
        say!(
            "{} of {} checks passed, {warned} warn, {failed} failed",
            checks.len() - failed - warned,
            checks.len()
        );
        Ok(failed == 0)
    }
}

fn destination(uri: &str) -> Check {
    let name = "destination";
    match libvirt::look_at_destination(uri) {
        Ok(Destination::HasHook) => Check::pass(name, format!("'{uri}' calls Outram's hook")),
        Ok(Destination::LacksHook) => Check::fail(
            name,
            format!("'{uri}' starts domains without calling Outram's hook"),
            "outram setup on that host",
        ),
        Ok(Destination::Unclear(said)) => Check::fail(
            name,
            format!("'{uri}' does not start a domain by which to tell: {said}"),
            "outram doctor on that host",
        ),
        Err(error) => Check::fail(name, error.to_string(), "name the destination's libvirt"),
    }
}

fn count(checks: &[Check], verdict: Verdict) -> usize {
    checks
        .iter()
        .filter(|check| check.verdict == verdict)
        .count()
}

fn versions(libvirt: &Libvirt) -> Vec<Check> {
    let judge = |name: &str, found: Version, oldest: Version| {
        if found >= oldest {
            Check::pass(name, found.to_string())
        } else {
            Check::fail(
                name,
                found.to_string(),
                format!("upgrade to {oldest} or newer"),
            )
        }
    };
    match libvirt.versions() {
        Ok((library, qemu)) => vec![
            judge("libvirt", library, LIBVIRT_OLDEST),
            judge("QEMU", qemu, QEMU_OLDEST),
        ],
        Err(error) => vec![Check::warn(
            "libvirt",
            error.to_string(),
            "look at libvirtd's log",
        )],
    }
}

/// Whether a daemon of libvirt is known to have seen the hook where it is now: it called the hook,
/// was told to reload, or started later than the hook was installed.
pub fn knows_hook(daemon: &Daemon, paths: &Paths) -> bool {
    let link = paths.hooks.join(super::setup::HOOK_NAME);
    let Ok(installed) = fs::symlink_metadata(&link).and_then(|link| link.modified()) else {
        return false;
    };
    let stamped = |name: &str| is_stamp_of(&paths.run.join(name), daemon, installed);
    stamped(STAMP_FILE)
        || stamped(RELOAD_STAMP)
        || daemon.started_at().is_some_and(|start| start > installed)
}

/// Whether a stamp names this daemon and is newer than the hook.
fn is_stamp_of(stamp: &Path, daemon: &Daemon, installed: std::time::SystemTime) -> bool {
    let newer = fs::metadata(stamp)
        .and_then(|stamp| stamp.modified())
        .is_ok_and(|written| written >= installed);
    newer && fs::read_to_string(stamp).is_ok_and(|text| text.trim() == daemon.stamp())
}
