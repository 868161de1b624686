//! The packages, installed and purged in this machine's root under an overlay.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::unistd::Uid;
use outram_tests::hermetic::command::run_within;
use outram_tests::hermetic::suite::Skipped;
use tempfile::TempDir;

use super::{LIMIT, Test, need, top};

pub(crate) const TESTS: &[Test] = &[("packages_install_and_purge_without_a_trace", clean_root)];

/// How long making the packages may take, where cargo-deb is still to be built.
const BUILD_LIMIT: Duration = Duration::from_secs(2400);

const CLEAN_ROOT: &str = include_str!("clean_root.sh");

/// What is installed, at the least.
const INSTALLED: [&str; 8] = [
    "usr/bin/outram",
    "usr/bin/outram-backend",
    "usr/bin/outram-libvirt-hook",
    "usr/bin/outram-memserver",
    "etc/libvirt/hooks/qemu.d/outram",
    "etc/outram/backend.toml",
    "etc/outram/memserver.toml",
    "usr/lib/systemd/system/outram-backend@.service",
];

pub(crate) fn need_root() -> Result<()> {
    if !Uid::effective().is_root() {
        bail!(Skipped("root is needed to install packages".into()));
    }
    need("libvirtd", "libvirt-daemon")?;
    need("dpkg", "dpkg")?;
    Ok(())
}

/// Whether the packages are made. Held while they are: all are made in one folder.
static ARE_MADE: Mutex<bool> = Mutex::new(false);

/// A folder with both packages, made from what is built.
pub(crate) fn packages() -> Result<TempDir> {
    let mut are_made = ARE_MADE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir()?;
    let made = top().join("target/debian");
    let top = top().display().to_string();
    if !*are_made {
        let built = run_within(BUILD_LIMIT, "make", &["-C", &top, "deb", "PROFILE=dev"])?;
        ensure!(built.success(), "make deb: {}", built.said());
        *are_made = true;
    }
    for package in ["outram", "outram-memserver"] {
        let from = newest(&made, &format!("{package}_"))?;
        fs::copy(from, folder.path().join(format!("{package}.deb")))?;
    }
    Ok(folder)
}

fn clean_root() -> Result<()> {
    need_root()?;
    let folder = packages()?;
    let path = folder.path().display().to_string();
    let namespaces = ["--mount", "--pid", "--net", "--fork", "--kill-child"];
    let script = ["bash", "-c", CLEAN_ROOT, "clean_root", &path];
    let finished = run_within(LIMIT, "unshare", &[&namespaces[..], &script].concat())?;
    ensure!(finished.success(), "{}", finished.said());
    let lines: Vec<&str> = finished.stdout.lines().map(str::trim).collect();
    for path in INSTALLED {
        let there = |line: &&str| line.split(' ').next() == Some(path);
        ensure!(lines.iter().any(there), "{path} was not installed");
    }
    let left: Vec<_> = lines.iter().skip_while(|line| **line != "LEFT:").collect();
    ensure!(left.len() == 1, "purging left behind: {left:?}");
    Ok(())
}

/// The file made last whose name starts so.
fn newest(folder: &Path, start: &str) -> Result<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(start) {
            found.push((entry.metadata()?.modified()?, entry.path()));
        }
    }
    let newest = found.into_iter().max();
    Ok(newest
        .with_context(|| format!("no {start}* in {}", folder.display()))?
        .1)
}
