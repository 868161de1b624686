//! The SELinux module compiles. (That it suffices is not shown here: no SELinux guest is booted.)

use std::fs;

use anyhow::{Result, ensure};
use outram_tests::hermetic::command::run_within;

use super::{LIMIT, Test, need, top};

pub(crate) const TESTS: &[Test] = &[("the_selinux_module_compiles", compiles)];

/// First bytes of a policy package, in its byte order: SEMODULE_PACKAGE of libsepol.
const PACKAGE_MAGIC: [u8; 4] = 0xf97c_ff8f_u32.to_le_bytes();

fn compiles() -> Result<()> {
    need("checkmodule", "checkpolicy")?;
    need("semodule_package", "semodule-utils")?;
    let sources = top().join("libvirt-hooks/selinux");
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name).display().to_string();
    let source = |name: &str| sources.join(name).display().to_string();
    let (module, package) = (path("outram.mod"), path("outram.pp"));
    let compile = ["-M", "-m", "-o", &module, &source("outram.te")];
    let bundle = ["-o", &package, "-m", &module, "-f", &source("outram.fc")];
    for (program, arguments) in [
        ("checkmodule", &compile[..]),
        ("semodule_package", &bundle[..]),
    ] {
        let finished = run_within(LIMIT, program, arguments)?;
        ensure!(finished.success(), "{program}: {}", finished.said());
    }
    let bytes = fs::read(&package)?;
    ensure!(
        bytes.starts_with(&PACKAGE_MAGIC),
        "what was made is no policy package"
    );
    // File contexts name only types that the module declares.
    let policy = fs::read_to_string(sources.join("outram.te"))?;
    for line in fs::read_to_string(sources.join("outram.fc"))?.lines() {
        let kind = line.rsplit(':').nth(1).unwrap_or_default();
        ensure!(
            policy.contains(&format!("type {kind};")),
            "'{kind}' is declared nowhere"
        );
    }
    Ok(())
}
