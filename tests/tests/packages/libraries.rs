//! What the programs are linked to: they have to start where there is no RDMA.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::command::run;

use super::{Test, need};

pub(crate) const TESTS: &[Test] = &[("no_program_needs_a_library_of_rdma_to_start", rdma)];

const PROGRAMS: [&str; 4] = [
    "outram",
    "outram-libvirt-hook",
    "outram-backend",
    "outram-memserver",
];

/// They are looked for when a program runs, and may be missing.
const OPTIONAL: [&str; 2] = ["libibverbs", "librdmacm"];

fn rdma() -> Result<()> {
    need("ldd", "libc-bin")?;
    let ours = Path::new(env!("CARGO_BIN_EXE_small-vmm"));
    let folder = ours.parent().context("a program is in a folder")?;
    for program in PROGRAMS {
        let path = folder.join(program).display().to_string();
        // Also what libraries need in turn.
        let needed = run("ldd", &[&path])?;
        ensure!(needed.contains("libc.so"), "{path} needs nothing: {needed}");
        for library in OPTIONAL {
            ensure!(
                !needed.contains(library),
                "{path} needs {library}: {needed}"
            );
        }
    }
    Ok(())
}
