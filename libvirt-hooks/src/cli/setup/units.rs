//! The units of systemd that backends run as, where no package has brought them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::Setup;
use crate::backend_unit::UNIT_FILE;

/// The unit files, by name.
const UNITS: [(&str, &str); 2] = [
    (
        UNIT_FILE,
        include_str!("../../../systemd/outram-backend@.service"),
    ),
    (
        "outram.slice",
        include_str!("../../../systemd/outram.slice"),
    ),
];

/// Where packages put units.
const PACKAGED: &str = "usr/lib/systemd/system";

/// Where the machine's own units are.
const OWN: &str = "etc/systemd/system";

/// The program that the unit file names.
const PACKAGED_PROGRAM: &str = "/usr/bin/outram-backend";

impl Setup<'_> {
    /// Installs the units unless a package has.
    pub(super) fn units(&mut self, backend: &Path) -> Result<()> {
        let packaged = self.prefix.join(PACKAGED).join(UNIT_FILE);
        if packaged.exists() {
            self.found(&format!("unit {}", packaged.display()));
            return self.unshadow();
        }
        let Some(backend) = backend.to_str().filter(|path| is_plain(path)) else {
            bail!(
                "systemd cannot be told the path {}: install Outram's programs in a folder without blanks and special characters, such as /usr/local/bin",
                backend.display()
            );
        };
        let mut changed = false;
        for (name, text) in UNITS {
            let text = text.replace(PACKAGED_PROGRAM, backend);
            changed |= self.file(&self.own_unit(name), &text)?;
        }
        if changed && !self.dry_run {
            reload_systemd()?;
        }
        Ok(())
    }

    /// Removes what [`Self::units`] installed before the package came: systemd would prefer it. A site's own
    /// version of the package's unit names the package's program.
    fn unshadow(&mut self) -> Result<()> {
        let own = self.own_unit(UNIT_FILE);
        match fs::read_to_string(&own).is_ok_and(|text| starts_another(&text)) {
            true => self.remove_units(),
            false => Ok(()),
        }
    }

    /// Removes the units that [`Self::units`] installed, and none that somebody else has put there.
    pub(super) fn remove_units(&mut self) -> Result<()> {
        let mut changed = false;
        for (name, ours) in UNITS {
            let path = self.own_unit(name);
            match fs::read_to_string(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Ok(found) if is_by_setup(&found, ours) => changed |= self.remove_file(&path)?,
                _ => self.found(&format!(
                    "unit {}, left as it is: it is not as 'outram setup' writes it",
                    path.display()
                )),
            }
        }
        if changed && !self.dry_run {
            reload_systemd()?;
        }
        Ok(())
    }

    fn own_unit(&self, name: &str) -> PathBuf {
        self.prefix.join(OWN).join(name)
    }
}

/// Whether a unit file starts another program than the package's.
fn starts_another(text: &str) -> bool {
    started(text).is_some_and(|program| program != PACKAGED_PROGRAM)
}

/// The program that a unit file starts.
fn started(text: &str) -> Option<&str> {
    let start = text
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="))?;
    start.split_whitespace().next()
}

/// Whether a unit file was written by [`Setup::units`], of this build or, as far as its first line and its program
/// tell, of an earlier one.
fn is_by_setup(found: &str, ours: &str) -> bool {
    let Some(program) = started(found) else {
        return found == ours;
    };
    let is_backend = Path::new(program).file_name() == Path::new(PACKAGED_PROGRAM).file_name();
    let of_earlier = starts_another(found) && found.lines().next() == ours.lines().next();
    is_backend && (of_earlier || found == ours.replace(PACKAGED_PROGRAM, program))
}

/// Whether a path means itself in a unit file.
fn is_plain(path: &str) -> bool {
    path.bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"/._+-".contains(&byte))
}

fn reload_systemd() -> Result<()> {
    let status = Command::new("systemctl")
        .arg("daemon-reload")
        .stdin(Stdio::null())
        .status()
        .context("systemctl could not be run")?;
    if !status.success() {
        bail!("'systemctl daemon-reload' failed: look at 'systemctl status'");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Paths;

    #[test]
    fn a_unit_of_an_earlier_install_is_told_from_a_sites_own() {
        let packaged = UNITS[0].1;
        assert!(!starts_another(packaged));
        let by_setup = packaged.replace(PACKAGED_PROGRAM, "/usr/local/bin/outram-backend");
        assert!(starts_another(&by_setup));
        assert!(!starts_another("[Slice]\n"));
    }

    #[test]
    fn only_what_setup_wrote_is_removed() {
        let [(_, unit), (_, slice)] = UNITS;
        assert!(is_by_setup(unit, unit) && is_by_setup(slice, slice));
        let in_local = unit.replace(PACKAGED_PROGRAM, "/usr/local/bin/outram-backend");
        assert!(is_by_setup(&in_local, unit));
        let of_earlier = in_local.replace("SendSIGKILL=no\n", "");
        assert!(is_by_setup(&of_earlier, unit));
        // A site's own.
        assert!(!is_by_setup(&format!("{unit}Nice=5\n"), unit));
        assert!(!is_by_setup(&format!("{slice}MemoryMax=1G\n"), slice));
        let other = "[Service]\nExecStart=/usr/local/bin/outram-backend launch x\n";
        assert!(!is_by_setup(other, unit));
        let first = unit.lines().next().expect("a line");
        let other = format!("{first}\n[Service]\nExecStart=/opt/other launch x\n");
        assert!(!is_by_setup(&other, unit));
        assert!(!is_by_setup("", slice));
    }

    #[test]
    fn a_sites_own_units_stay_where_setup_is_undone() {
        let prefix = tempfile::tempdir().expect("a directory");
        let mut setup = Setup {
            dry_run: false,
            prefix: prefix.path().to_owned(),
            paths: &Paths::default(),
        };
        fs::create_dir_all(prefix.path().join(OWN)).expect("made");
        for (name, ours) in UNITS {
            let text = format!("{ours}# Of this site.\n");
            fs::write(setup.own_unit(name), text).expect("written");
        }
        setup.remove_units().expect("nothing is removed");
        for (name, _) in UNITS {
            assert!(setup.own_unit(name).exists(), "{name}");
        }
    }
}
