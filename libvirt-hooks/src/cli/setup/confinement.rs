//! AppArmor's rules for QEMU, where libvirt came with rules of its own.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::Setup;
use crate::apparmor::{self, AppArmor, INCLUDE_LINE, RULES};

impl Setup<'_> {
    /// Puts our rules in force.
    pub(super) fn apparmor(&mut self) -> Result<()> {
        let Some(found) = AppArmor::below(&self.prefix) else {
            return Ok(());
        };
        self.file(&found.rules, RULES)?;
        if found.is_included_by_libvirt() {
            return Ok(());
        }
        let site = site_text(&found.site)?;
        if site.contains(INCLUDE_LINE) {
            self.found(&format!("AppArmor's {}", found.site.display()));
            return Ok(());
        }
        let mut text = site;
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        self.file(&found.site, &(text + INCLUDE_LINE))?;
        Ok(())
    }

    /// Lets libvirt's daemons start the hook: before it is there, for a hook that cannot be started
    /// fails the start of every domain.
    pub(super) fn let_libvirt_start(&mut self, hook: &Path) -> Result<()> {
        self.daemons_may_start(Some(hook))
    }

    /// Takes that back: after the hook is gone.
    pub(super) fn let_libvirt_start_no_hook(&mut self) -> Result<()> {
        self.daemons_may_start(None)
    }

    fn daemons_may_start(&mut self, hook: Option<&Path>) -> Result<()> {
        let Some(found) = AppArmor::below(&self.prefix) else {
            return Ok(());
        };
        for daemon in found.daemons {
            let (there, wanted) = daemon
                .additions(hook)
                .with_context(|| not_readable(&daemon.site))?;
            if there.trim_end() == wanted.trim_end() {
                continue;
            }
            self.file(&daemon.site, &wanted)?;
            let profile = &daemon.profile;
            if self.is_live()
                && apparmor::is_enabled()
                && self.doing(&format!("load AppArmor's profile {}", profile.display()))
            {
                apparmor::load(profile)?;
            }
        }
        Ok(())
    }

    /// Takes them out again; other rules of the site stay.
    pub(super) fn remove_apparmor(&mut self) -> Result<()> {
        let Some(found) = AppArmor::below(&self.prefix) else {
            return Ok(());
        };
        self.remove_file(&found.rules)?;
        if let Some(folder) = found.rules.parent()
            && !self.dry_run
        {
            // It stays where others have rules in it.
            let _ = fs::remove_dir(folder);
        }
        let site = site_text(&found.site)?;
        if site.contains(INCLUDE_LINE) {
            self.file(&found.site, &site.replace(INCLUDE_LINE, ""))?;
        }
        Ok(())
    }
}

/// What others have in such a file is kept.
fn site_text(path: &Path) -> Result<String> {
    apparmor::site_text(path).with_context(|| not_readable(path))
}

fn not_readable(path: &Path) -> String {
    format!(
        "{} cannot be read as text, and is left as it is",
        path.display()
    )
}
