//! AppArmor's rules for QEMU, where libvirt came with rules of its own.

use std::fs;

use anyhow::Result;

use super::Setup;
use crate::apparmor::{AppArmor, INCLUDE_LINE, RULES};

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
        let site = fs::read_to_string(&found.site).unwrap_or_default();
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
        let site = fs::read_to_string(&found.site).unwrap_or_default();
        if site.contains(INCLUDE_LINE) {
            self.file(&found.site, &site.replace(INCLUDE_LINE, ""))?;
        }
        Ok(())
    }
}
