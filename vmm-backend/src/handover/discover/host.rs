//! Settings of the host that paging depends on: shared-memory THP.
//!
//! Punching one page of a large folio with any reference held zeroes it in place, without an
//! event. So every size must resolve to `never` or `deny`; QEMU asks for huge pages by
//! `madvise`, which makes `advise` as bad as `always`.

use std::io;
use std::path::{Path, PathBuf};

use super::Refusal;

const THP_DIRECTORY: &str = "/sys/kernel/mm/transparent_hugepage";
const SETTING: &str = "shmem_enabled";

/// The chosen word of a setting such as `always inherit [never]`.
fn chosen(text: &str) -> &str {
    text.split_whitespace()
        .find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
        .unwrap_or("")
}

fn read(path: &Path) -> Result<Option<String>, Refusal> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        // A kernel without THP, or without this size, has no such file.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Refusal::Unreadable {
            path: path.to_owned(),
            source,
        }),
    }
}

/// Refuses unless shared-memory THP is off in every size.
pub(super) fn check_shmem_thp() -> Result<(), Refusal> {
    check_shmem_thp_in(Path::new(THP_DIRECTORY))
}

fn check_shmem_thp_in(directory: &Path) -> Result<(), Refusal> {
    let general_path = directory.join(SETTING);
    let Some(general) = read(&general_path)? else {
        return Ok(());
    };
    let general = chosen(&general);
    match general {
        // Overrides every size.
        "deny" => return Ok(()),
        "force" => return Err(refused(general_path, general)),
        _ => {}
    }
    let sizes = per_size_settings(directory)?;
    if sizes.is_empty() && general != "never" {
        return Err(refused(general_path, general));
    }
    for path in sizes {
        let Some(text) = read(&path)? else { continue };
        match chosen(&text) {
            "never" => {}
            "inherit" if general == "never" => {}
            "inherit" => return Err(refused(general_path, general)),
            other => return Err(refused(path, other)),
        }
    }
    Ok(())
}

fn refused(path: PathBuf, setting: &str) -> Refusal {
    Refusal::SharedThp {
        path,
        setting: setting.to_owned(),
    }
}

/// The settings of the single sizes, on kernels that have them.
fn per_size_settings(directory: &Path) -> Result<Vec<PathBuf>, Refusal> {
    let unreadable = |source| Refusal::Unreadable {
        path: directory.to_owned(),
        source,
    };
    let mut settings = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let is_size = path
            .file_name()
            .is_some_and(|name| name.as_encoded_bytes().starts_with(b"hugepages-"));
        let setting = path.join(SETTING);
        if is_size && setting.exists() {
            settings.push(setting);
        }
    }
    settings.sort();
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(general: &str, sizes: &[&str]) -> bool {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join(SETTING), general).expect("a file");
        for (index, size) in sizes.iter().enumerate() {
            let size_directory = directory.path().join(format!("hugepages-{index}kB"));
            std::fs::create_dir(&size_directory).expect("a directory");
            std::fs::write(size_directory.join(SETTING), size).expect("a file");
        }
        check_shmem_thp_in(directory.path()).is_ok()
    }

    #[test]
    fn only_never_and_deny_pass() {
        assert!(verdict("always advise [never] deny", &[]));
        assert!(verdict("[deny] force", &["[always] never"]));
        assert!(verdict("[never]", &["[inherit] never", "[never]"]));
        assert!(!verdict("[advise] never", &[]));
        assert!(!verdict("[within_size] never", &["[inherit]"]));
        assert!(verdict("[within_size] never", &["[never]"]));
        assert!(!verdict("[never]", &["inherit [always]"]));
        assert!(!verdict("never [force]", &["[never]"]));
    }

    #[test]
    fn a_kernel_without_thp_passes() {
        let directory = tempfile::tempdir().expect("a directory");
        assert!(check_shmem_thp_in(directory.path()).is_ok());
    }
}
