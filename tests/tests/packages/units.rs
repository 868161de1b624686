//! The units of systemd: understood by it, and as closed as they are meant to be.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::command::run_within;
use tempfile::TempDir;

use super::{Test, need, top};

pub(crate) const TESTS: &[Test] = &[
    ("systemd_understands_every_unit", understood),
    ("units_are_as_closed_as_they_claim", closed),
    (
        "no_unit_lets_go_of_a_running_guests_backend",
        backends_are_kept,
    ),
];

/// Each unit file, and the most that 'systemd-analyze security' may call exposed: 10 is a service
/// without any sandbox. A backend traces QEMU and mounts, as root; the others do neither.
pub(crate) const UNITS: [(&str, &str); 3] = [
    ("memserver/systemd/outram-memserver.service", "1.5"),
    ("libvirt-hooks/systemd/outram-backend@.service", "4.0"),
    ("libvirt-hooks/systemd/outram-metrics.service", "2.0"),
];

const SLICE: &str = "libvirt-hooks/systemd/outram.slice";

/// The units in a folder of their own. Programs that are named by their place after installation
/// are replaced by one that is here, since systemd looks for them.
fn installed() -> Result<(TempDir, Vec<PathBuf>)> {
    let folder = tempfile::tempdir()?;
    let mut paths = Vec::new();
    for unit in UNITS.iter().map(|(unit, _)| *unit).chain([SLICE]) {
        let from = top().join(unit);
        let text = fs::read_to_string(&from).with_context(|| from.display().to_string())?;
        let to = folder.path().join(from.file_name().context("a name")?);
        let text = ["outram-backend", "outram-memserver", "outram"]
            .iter()
            .fold(text, |text, program| {
                text.replace(&format!("/usr/bin/{program} "), "/bin/true ")
            });
        fs::write(&to, text)?;
        paths.push(to);
    }
    Ok((folder, paths))
}

fn understood() -> Result<()> {
    need("systemd-analyze", "systemd")?;
    let (_folder, paths) = installed()?;
    let paths: Vec<String> = paths
        .iter()
        .map(|path| path.display().to_string().replace("@.", "@example."))
        .collect();
    let mut arguments = vec!["verify", "--man=no", "--recursive-errors=no"];
    arguments.extend(paths.iter().map(String::as_str));
    let finished = run_within(super::LIMIT, "systemd-analyze", &arguments)?;
    ensure!(
        finished.success() && finished.said().trim().is_empty(),
        "{}",
        finished.said()
    );
    Ok(())
}

fn closed() -> Result<()> {
    need("systemd-analyze", "systemd")?;
    for (unit, most) in UNITS {
        let path = top().join(unit).display().to_string();
        // In tenths here; with a decimal point in what it prints.
        let threshold = most.replace('.', "");
        let arguments = [
            "security",
            "--offline=yes",
            "--no-pager",
            &format!("--threshold={threshold}"),
            &path,
        ];
        let finished = run_within(super::LIMIT, "systemd-analyze", &arguments)?;
        ensure!(
            finished.success(),
            "{unit} is more exposed than {most}: {}",
            finished.said()
        );
        ensure!(
            finished.said().contains("Overall exposure level"),
            "{unit} was not examined: {}",
            finished.said()
        );
    }
    Ok(())
}

fn backends_are_kept() -> Result<()> {
    let backend = fs::read_to_string(top().join("libvirt-hooks/systemd/outram-backend@.service"))?;
    let slice = fs::read_to_string(top().join(SLICE))?;
    let has = |text: &str, line: &str| text.lines().any(|found| found == line);
    for line in [
        "RefuseManualStop=yes",
        "SendSIGKILL=no",
        "OOMScoreAdjust=-1000",
        "Slice=outram.slice",
        "DefaultDependencies=no",
    ] {
        ensure!(has(&backend, line), "the backend's unit lacks {line}");
    }
    ensure!(
        has(&slice, "DefaultDependencies=no"),
        "the slice is stopped at shutdown, and all in it"
    );
    Ok(())
}
