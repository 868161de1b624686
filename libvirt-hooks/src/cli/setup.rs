//! `outram setup`: makes a host ready. Everything is done once; what is there is left as it is.
//! `--remove` undoes it, but for settings and certificates.

mod confinement;
mod losses;
mod units;

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::daemons::{self, RELOAD_STAMP};
use crate::hook::STAMP_FILE;
use crate::host::{self, Paths, is_executable};

/// The hook's program, installed beside `outram`.
pub const HOOK_PROGRAM: &str = "outram-libvirt-hook";

/// The hook's name in libvirt's directory.
pub const HOOK_NAME: &str = "outram";

/// The settings file that setup writes where there is none.
pub const DEFAULT_SETTINGS: &str = "\
# Settings of this host's Outram backends. Unknown keys are errors.
# A line with '#' in front shows what applies without it, or an example.

# Memory servers of domains that name none themselves.
# servers = [\"10.0.0.2:7741\"]

# This host's identity: 'outram pki issue client' makes it.
# tls-ca = \"/etc/outram/pki/ca.pem\"
# tls-cert = \"/etc/outram/pki/client.pem\"
# tls-key = \"/etc/outram/pki/client.key\"

# Threads that handle a guest's faults, 1 to 64.
# shards = 2

# RDMA device: auto, off, or one such as mlx5_0:1:3.
# rdma = \"auto\"

# Seconds that a backend waits for QEMU to connect.
# connect-timeout = 120
";

const SYSCTL_FILE: &str = "etc/sysctl.d/60-outram.conf";
const SYSCTL_SETTING: &str = "vm.unprivileged_userfaultfd = 1\n";
const SYSCTL_LIVE: &str = "/proc/sys/vm/unprivileged_userfaultfd";

/// The arguments of `outram setup`.
#[derive(Debug, Args)]
pub struct SetupArguments {
    /// Show what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Also allow userfaultfd(2) to every user of this host
    ///
    /// Sets vm.unprivileged_userfaultfd=1 and 'allow-sysctl' in the settings. Needed only where a
    /// guest's start was refused because no other way works.
    #[arg(long)]
    allow_sysctl: bool,
    /// Undo what setup did: libvirt starts no backends any more
    ///
    /// Settings and certificates in /etc/outram stay, and so do domains' definitions: those that use Outram will
    /// not start any more, unless 'outram detach' takes it out of them first. They are named, and so are
    /// guests that still run with Outram.
    #[arg(long, conflicts_with = "allow_sysctl")]
    remove: bool,
    /// Set up below this directory, and change nothing of the running system: for packages
    #[arg(long, value_name = "DIR", default_value = "/")]
    prefix: PathBuf,
}

impl SetupArguments {
    /// Makes the host ready.
    pub fn run(&self, uri: Option<&str>, paths: &Paths) -> Result<bool> {
        let mut setup = Setup {
            dry_run: self.dry_run,
            prefix: self.prefix.clone(),
            paths,
        };
        if self.remove {
            if setup.is_live() {
                losses::warn(uri, paths);
            }
            return setup.remove();
        }
        for (dir, mode) in [
            ("etc/outram", 0o755),
            ("etc/outram/pki", 0o700),
            ("etc/libvirt/hooks/qemu.d", 0o755),
        ] {
            setup.directory(dir, mode)?;
        }
        setup.settings(self.allow_sysctl)?;
        let program = hook_program()?;
        setup.let_libvirt_start(&program)?;
        let new_hook = setup.hook(&program)?;
        setup.apparmor()?;
        if self.allow_sysctl {
            setup.sysctl()?;
        }
        if setup.is_live() {
            if paths.systemd {
                setup.units(&host::find_backend(paths)?)?;
            }
            setup.directory("run/outram", 0o755)?;
            setup.reload(new_hook)?;
            say!("'outram doctor' checks the rest.");
        }
        Ok(true)
    }
}

struct Setup<'a> {
    dry_run: bool,
    prefix: PathBuf,
    paths: &'a Paths,
}

impl Setup<'_> {
    fn is_live(&self) -> bool {
        self.prefix == Path::new("/")
    }

    fn found(&self, what: &str) {
        say!("found  {what}");
    }

    /// Says what is done, and whether to do it.
    fn doing(&mut self, what: &str) -> bool {
        say!("{}  {what}", if self.dry_run { "would" } else { "done " });
        !self.dry_run
    }

    fn directory(&mut self, dir: &str, mode: u32) -> Result<()> {
        let path = self.prefix.join(dir);
        if path.is_dir() {
            self.found(&format!("directory {}", path.display()));
        } else if self.doing(&format!("make directory {}", path.display())) {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(mode)
                .create(&path)
                .with_context(|| format!("cannot make {}", path.display()))?;
        }
        Ok(())
    }

    /// Makes a file have this text; the result is whether it had another.
    fn file(&mut self, path: &Path, text: &str) -> Result<bool> {
        if fs::read_to_string(path).is_ok_and(|found| found == text) {
            self.found(&format!("file {}", path.display()));
            return Ok(false);
        }
        if self.doing(&format!("write {}", path.display())) {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)
                    .with_context(|| format!("cannot make {}", folder.display()))?;
            }
            write(path, text)?;
        }
        Ok(true)
    }

    /// Removes a file; the result is whether it was there.
    fn remove_file(&mut self, path: &Path) -> Result<bool> {
        if fs::symlink_metadata(path).is_err() {
            return Ok(false);
        }
        if self.doing(&format!("remove {}", path.display())) {
            fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
        Ok(true)
    }

    /// Undoes everything but settings and certificates.
    fn remove(&mut self) -> Result<bool> {
        let link = self.prefix.join("etc/libvirt/hooks/qemu.d").join(HOOK_NAME);
        let ours = fs::read_link(&link)
            .is_ok_and(|target| target.file_name().is_some_and(|name| name == HOOK_PROGRAM));
        let removed = ours && self.remove_file(&link)?;
        if removed || fs::symlink_metadata(&link).is_err() {
            self.let_libvirt_start_no_hook()?;
        }
        self.remove_apparmor()?;
        self.remove_file(&self.prefix.join(SYSCTL_FILE))?;
        if self.is_live() {
            self.remove_units()?;
            if removed {
                self.reload(true)?;
            }
            for stamp in [STAMP_FILE, RELOAD_STAMP] {
                self.remove_file(&self.paths.run.join(stamp))?;
            }
            if !self.dry_run {
                // It stays while there are guests in it.
                let _ = fs::remove_dir(&self.paths.run);
            }
        }
        Ok(true)
    }

    fn settings(&mut self, allow_sysctl: bool) -> Result<()> {
        let path = self.prefix.join("etc/outram/backend.toml");
        let old = match fs::read_to_string(&path) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
        };
        let mut text = old.clone().unwrap_or_else(|| DEFAULT_SETTINGS.to_owned());
        if allow_sysctl {
            let table: toml::Table = text
                .parse()
                .with_context(|| format!("{} is not understood", path.display()))?;
            match table.get("allow-sysctl") {
                Some(toml::Value::Boolean(true)) => {}
                None => text = format!("{}\nallow-sysctl = true\n", text.trim_end()),
                Some(_) => bail!(
                    "{} forbids what --allow-sysctl asks for: set 'allow-sysctl = true' in it, or leave the flag out",
                    path.display()
                ),
            }
        }
        if old.as_ref() == Some(&text) {
            self.found(&format!("settings {}", path.display()));
        } else if self.doing(&format!("write settings {}", path.display())) {
            write(&path, &text)?;
        }
        Ok(())
    }

    /// Links the hook program into libvirt's directory; the result is whether it is new there.
    fn hook(&mut self, program: &Path) -> Result<bool> {
        let other = self.prefix.join("etc/libvirt/hooks/qemu");
        if other.exists() {
            self.found(&format!(
                "hook {}, left as it is: libvirt runs both",
                other.display()
            ));
        }
        let link = self.prefix.join("etc/libvirt/hooks/qemu.d").join(HOOK_NAME);
        match fs::read_link(&link) {
            Ok(target) if target == program => {
                self.found(&format!("hook {}", link.display()));
                return Ok(false);
            }
            Ok(target) if target.file_name() != program.file_name() => bail!(
                "{} is a link to {}, which is not Outram's: remove or rename it first",
                link.display(),
                target.display()
            ),
            Err(_) if link.exists() => bail!(
                "{} exists and is not Outram's link: remove or rename it first",
                link.display()
            ),
            _ => {}
        }
        let what = format!("link hook {} to {}", link.display(), program.display());
        if self.doing(&what) {
            replace_link(program, &link)?;
        }
        Ok(true)
    }

    fn sysctl(&mut self) -> Result<()> {
        let path = self.prefix.join(SYSCTL_FILE);
        if fs::read_to_string(&path).is_ok_and(|text| text == SYSCTL_SETTING) {
            self.found(&format!("sysctl file {}", path.display()));
        } else if self.doing(&format!(
            "write {} (userfaultfd(2) for every user of this host)",
            path.display()
        )) {
            fs::create_dir_all(path.parent().unwrap_or(&self.prefix))
                .with_context(|| format!("cannot make the directory of {}", path.display()))?;
            write(&path, SYSCTL_SETTING)?;
        }
        if !self.is_live() {
            return Ok(());
        }
        let live = fs::read_to_string(SYSCTL_LIVE)
            .with_context(|| format!("cannot read {SYSCTL_LIVE}"))?;
        if live.trim() == "1" {
            self.found("vm.unprivileged_userfaultfd = 1");
        } else if self.doing("set vm.unprivileged_userfaultfd = 1") {
            write(Path::new(SYSCTL_LIVE), "1\n")?;
        }
        Ok(())
    }

    /// A daemon that started or reloaded since the hook was installed knows it already.
    fn reload(&mut self, new_hook: bool) -> Result<()> {
        let running = daemons::running();
        if running.is_empty() {
            self.found("no libvirtd or virtqemud running: it will find the hook when it starts");
        }
        for daemon in running {
            let name = format!("{} (process {})", daemon.name, daemon.pid);
            if !new_hook && super::doctor::knows_hook(&daemon, self.paths) {
                self.found(&format!("{name}, which knows the hook"));
            } else if self.doing(&format!("reload {name}")) {
                daemon
                    .reload()
                    .with_context(|| format!("cannot reload {name}"))?;
                write(&self.paths.run.join(RELOAD_STAMP), &daemon.stamp())?;
            }
        }
        Ok(())
    }
}

/// The hook's program, installed beside this one.
fn hook_program() -> Result<PathBuf> {
    let program = std::env::current_exe()
        .and_then(fs::canonicalize)
        .context("cannot tell where this program is")?
        .with_file_name(HOOK_PROGRAM);
    if !is_executable(&program) {
        bail!(
            "{} is not there: install all of Outram's programs in one directory",
            program.display()
        );
    }
    Ok(program)
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Puts a link in place in one step, so that libvirt never finds half of it.
fn replace_link(target: &Path, link: &Path) -> Result<()> {
    let fresh = link.with_file_name(format!(".{HOOK_NAME}.new"));
    let made = match fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => symlink(target, &fresh).and_then(|()| fs::rename(&fresh, link)),
    };
    made.with_context(|| format!("cannot link {}", link.display()))
}
