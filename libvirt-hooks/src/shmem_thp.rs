//! Huge pages of shared memory, which must be off: punching one page out of a huge one that is in
//! use zeroes it in place, and the guest would read zeros.
//! See <https://docs.kernel.org/admin-guide/mm/transhuge.html>.

use std::fs;
use std::path::{Path, PathBuf};

/// Where the kernel shows its settings.
pub const SETTINGS: &str = "/sys/kernel/mm/transparent_hugepage";

/// A setting that allows huge pages of shared memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} is '{value}': huge pages of shared memory must be off while guests are paged; run: echo never > {}",
    path.display(), path.display()
)]
pub struct HugeShmem {
    /// The setting's file.
    pub path: PathBuf,
    /// What it is set to.
    pub value: String,
}

/// The settings below `settings` that allow huge pages; empty if none does or there are none.
pub fn find(settings: &Path) -> Vec<HugeShmem> {
    let top = settings.join("shmem_enabled");
    let top_value = selected(&top);
    let mut found = Vec::new();
    let mut judge = |path: PathBuf, value: Option<String>| {
        if let Some(value) = value
            && !matches!(value.as_str(), "never" | "deny" | "inherit")
        {
            found.push(HugeShmem { path, value });
        }
    };
    // A size that inherits is as the top setting, which is judged by itself.
    judge(top, top_value);
    let entries = fs::read_dir(settings).into_iter().flatten().flatten();
    let mut sizes: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("hugepages-")
        })
        .collect();
    sizes.sort();
    for size in sizes {
        let path = size.join("shmem_enabled");
        let value = selected(&path);
        judge(path, value);
    }
    found
}

/// The word in brackets.
fn selected(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let (_, rest) = text.split_once('[')?;
    let (word, _) = rest.split_once(']')?;
    Some(word.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(top: &str, size: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(dir.path().join("shmem_enabled"), top).expect("written");
        let size_dir = dir.path().join("hugepages-64kB");
        fs::create_dir(&size_dir).expect("made");
        fs::write(size_dir.join("shmem_enabled"), size).expect("written");
        dir
    }

    #[test]
    fn off_is_off_for_all_sizes() {
        let dir = settings(
            "always within_size advise [never] deny force\n",
            "always [inherit] within_size advise never\n",
        );
        assert_eq!(find(dir.path()), []);
        assert_eq!(find(&dir.path().join("missing")), []);
    }

    #[test]
    fn each_setting_that_allows_them_is_named() {
        let dir = settings(
            "always within_size [advise] never deny force\n",
            "[always] inherit within_size advise never\n",
        );
        let values: Vec<String> = find(dir.path()).into_iter().map(|h| h.value).collect();
        assert_eq!(values, ["advise", "always"]);
        let text = find(dir.path())[0].to_string();
        assert!(text.contains("shmem_enabled") && text.contains("echo never"));
    }
}
