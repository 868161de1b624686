//! Huge pages of shared memory, which must be off: punching one page out of a huge one that is in
//! use zeroes it in place, and the guest would read zeros.
//! See <https://docs.kernel.org/admin-guide/mm/transhuge.html>.

use std::path::{Path, PathBuf};
use std::{fs, io};

/// Where the kernel shows its settings.
pub const SETTINGS: &str = "/sys/kernel/mm/transparent_hugepage";

/// A file of that name is there for all, and one for each size.
const SETTING: &str = "shmem_enabled";

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

/// A setting that is there and cannot be read: whether it allows huge pages is not known.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}: {source}", path.display())]
pub struct Unreadable {
    /// The setting's file, or the folder of all.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

/// The settings below `settings` that allow huge pages; empty if none does or there are none.
///
/// The one above all sizes counts for those that inherit it, and on kernels that have no sizes to set
/// (before Linux 6.11); 'deny' and 'force' count for all. QEMU asks for huge pages by `madvise`, which makes
/// 'advise' as bad as 'always'.
pub fn find(settings: &Path) -> Result<Vec<HugeShmem>, Unreadable> {
    let path = settings.join(SETTING);
    // A kernel without huge pages has none of it.
    let Some(value) = selected(&path)? else {
        return Ok(Vec::new());
    };
    if value == "deny" {
        return Ok(Vec::new());
    }
    let sizes = sizes(settings)?;
    let counts = match value.as_str() {
        "never" => false,
        "force" => true,
        _ => sizes.is_empty() || sizes.iter().any(|(_, size)| size == "inherit"),
    };
    let own = sizes
        .into_iter()
        .filter(|(_, size)| !matches!(size.as_str(), "never" | "inherit"));
    let above = counts.then_some((path, value));
    let allowing = above.into_iter().chain(own);
    Ok(allowing
        .map(|(path, value)| HugeShmem { path, value })
        .collect())
}

/// The setting of each size, on kernels that have them.
fn sizes(settings: &Path) -> Result<Vec<(PathBuf, String)>, Unreadable> {
    let unreadable = |source| Unreadable {
        path: settings.to_owned(),
        source,
    };
    let mut sizes = Vec::new();
    for entry in fs::read_dir(settings).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let name = entry.file_name();
        let path = entry.path().join(SETTING);
        if name.as_encoded_bytes().starts_with(b"hugepages-")
            && let Some(value) = selected(&path)?
        {
            sizes.push((path, value));
        }
    }
    sizes.sort();
    Ok(sizes)
}

/// The word in brackets; none in a file is as a word that is not known. `None` where there is no such file: the
/// kernel has no huge pages, or not of this size.
fn selected(path: &Path) -> Result<Option<String>, Unreadable> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(Unreadable {
                path: path.to_owned(),
                source,
            });
        }
    };
    let word = text
        .split_whitespace()
        .find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    Ok(Some(word.unwrap_or_default().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(above: &str, sizes: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(dir.path().join(SETTING), above).expect("written");
        for (index, size) in sizes.iter().enumerate() {
            let size_dir = dir.path().join(format!("hugepages-{index}kB"));
            fs::create_dir(&size_dir).expect("made");
            fs::write(size_dir.join(SETTING), size).expect("written");
        }
        dir
    }

    #[test]
    fn only_never_and_deny_pass() {
        let allowing = |above: &str, sizes: &[&str]| -> Vec<String> {
            let found = find(settings(above, sizes).path()).expect("readable");
            found.into_iter().map(|huge| huge.value).collect()
        };
        let none: [&str; 0] = [];
        assert_eq!(allowing("always advise [never] deny", &[]), none);
        assert_eq!(allowing("[deny] force", &["[always] never"]), none);
        assert_eq!(allowing("[never]", &["[inherit] never", "[never]"]), none);
        assert_eq!(allowing("[advise] never", &[]), ["advise"]);
        let inherited = allowing("[within_size] never", &["[inherit]"]);
        assert_eq!(inherited, ["within_size"]);
        assert_eq!(allowing("[within_size] never", &["[never]"]), none);
        assert_eq!(allowing("[never]", &["inherit [always]"]), ["always"]);
        assert_eq!(allowing("never [force]", &["[never]"]), ["force"]);
        let several = allowing("[advise]", &["[inherit]", "[always]", "[inherit]"]);
        assert_eq!(several, ["advise", "always"], "each is named once");
        assert_eq!(allowing("[advise]", &["[always]", "[never]"]), ["always"]);
        assert_eq!(allowing("always never", &[]), [""], "none is chosen");
    }

    #[test]
    fn a_setting_is_told_with_its_cure() {
        let dir = settings("always within_size [advise] never deny force\n", &[]);
        let text = find(dir.path()).expect("readable")[0].to_string();
        assert!(text.contains("shmem_enabled is 'advise'"), "{text}");
        assert!(text.contains("echo never"), "{text}");
    }

    #[test]
    fn a_kernel_without_thp_passes() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(find(dir.path()).expect("readable"), []);
    }

    #[test]
    fn what_cannot_be_read_is_told() {
        let dir = settings("[never]", &[]);
        let size = dir.path().join("hugepages-64kB").join(SETTING);
        fs::create_dir_all(&size).expect("a folder in place of the file");
        let error = find(dir.path()).expect_err("a folder has no word");
        assert_eq!(error.path, size);
    }
}
