//! `outram doctor`: each thing that paging needs, whether it is so, and the cure where not.

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::Result;
use clap::Args;

use super::completion::domain_names;
use super::host_checks;
use crate::daemons::{Daemon, RELOAD_STAMP};
use crate::domain_xml::DomainXml;
use crate::hook::STAMP_FILE;
use crate::host::{HostSettings, Paths};
use crate::libvirt::{Libvirt, Version};
use crate::{metadata, refusal};
use outram_wire::causes::with_causes;

/// The oldest versions that Outram supports.
const LIBVIRT_OLDEST: Version = Version(9, 0, 0);
const QEMU_OLDEST: Version = Version(7, 2, 0);

/// The arguments of `outram doctor`.
#[derive(Debug, Args)]
pub struct DoctorArguments {
    /// Name or UUID of a domain to check as well
    #[arg(add = domain_names())]
    domain: Option<String>,
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
        let mut checks = host_checks::kernel();
        checks.extend(host_checks::programs(paths));
        let (settings, check) = host_checks::settings(paths);
        checks.push(check);
        checks.push(host_checks::certificates(&settings));
        match Libvirt::connect(uri) {
            Ok(libvirt) => {
                checks.extend(versions(&libvirt));
                if let Some(name) = &self.domain {
                    checks.extend(domain(&libvirt, name, &settings, paths));
                }
            }
            Err(error) => checks.push(Check::fail(
                "libvirt",
                error.to_string(),
                "start libvirtd (or virtqemud), and run this as root",
            )),
        }
        if self.domain.is_none() {
            checks.extend(host_checks::servers(&settings.servers));
        }
        for check in &checks {
            println!("{check}");
        }
        let failed = count(&checks, Verdict::Fail);
        let warned = count(&checks, Verdict::Warn);
        println!(
            "{} of {} checks passed, {warned} warn, {failed} failed",
            checks.len() - failed - warned,
            checks.len()
        );
        Ok(failed == 0)
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

/// The domain as its next start would find it.
fn domain(libvirt: &Libvirt, name: &str, host: &HostSettings, paths: &Paths) -> Vec<Check> {
    let read = || -> Result<DomainXml> {
        let definition = libvirt.domain(name)?.definition()?;
        Ok(DomainXml::parse(&definition)?)
    };
    let domain = match read() {
        Ok(domain) => domain,
        Err(error) => {
            let error = with_causes(error.as_ref());
            return vec![Check::fail(
                "domain",
                error,
                "name a domain of 'virsh list --all'",
            )];
        }
    };
    let label = "domain settings";
    let settings = match metadata::read(&domain) {
        Ok(Some(settings)) => settings,
        Ok(None) => {
            let found = "the domain does not use Outram";
            return vec![Check::warn(
                label,
                found,
                format!("outram attach {name} --local-ratio 0.5"),
            )];
        }
        Err(error) => {
            let cure = format!("virsh edit {name}");
            return vec![Check::fail(label, error.to_string(), cure)];
        }
    };
    let mut checks = vec![Check::pass(label, format!("limit: {}", settings.limit))];
    match refusal::check(&domain, &paths.run) {
        Ok(refusals) if refusals.is_empty() => {
            checks.push(Check::pass(
                "domain",
                "has nothing that keeps it from being paged",
            ));
        }
        Ok(refusals) => checks.extend(refusals.iter().map(|refusal| {
            // Each message names its cure itself.
            Check::fail("domain", refusal.to_string(), "")
        })),
        Err(error) => checks.push(Check::fail("domain", with_causes(&error), "")),
    }
    let servers = match settings.servers.is_empty() {
        true => &host.servers,
        false => &settings.servers,
    };
    if servers.is_empty() {
        let cure = format!(
            "outram attach {name} … --server HOST:PORT, or 'servers' in {}",
            paths.config.display()
        );
        checks.push(Check::fail("servers", "none is named", cure));
    }
    checks.extend(host_checks::servers(servers));
    checks
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
