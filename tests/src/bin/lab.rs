//! `make lab`: a shell, or one command, in the lab guest (see `outram_tests::lab_guest`).

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use outram_tests::lab_guest::{self, Boot, Kernel, LabGuest};

/// Boots this machine's root as an emulated guest that has KVM, and runs a shell or a command in it, in
/// the folder where it was called. What they write is gone afterwards, but for the folder /share.
#[derive(Parser)]
#[command(name = "lab")]
struct Options {
    /// Memory in MiB
    #[arg(long, default_value_t = 4096)]
    memory: u32,
    /// Processors
    #[arg(long, default_value_t = 2)]
    vcpus: u32,
    /// Folder to be /share in the guest, kept afterwards [default: one that is removed]
    #[arg(long)]
    share: Option<std::path::PathBuf>,
    /// What to run instead of a shell
    #[arg(trailing_var_arg = true)]
    command: Vec<String>,
}

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let images = lab_guest::build(&top, Kernel::Ordinary)?;
    let own = tempfile::tempdir()?;
    let share = match &options.share {
        Some(folder) => folder
            .canonicalize()
            .with_context(|| folder.display().to_string())?,
        None => own.path().to_owned(),
    };
    let here = std::env::current_dir()?.display().to_string();
    fs::write(share.join("lab"), script(&here, &options.command))?;
    let guest = LabGuest {
        boot: Boot::Plain,
        memory_mib: options.memory,
        vcpus: options.vcpus,
    };
    Ok(ExitCode::from(guest.run_here(&images, &share)?))
}

fn script(here: &str, command: &[String]) -> String {
    let words: Vec<String> = command.iter().map(|word| quoted(word)).collect();
    let run = match words.is_empty() {
        true => "bash -i".to_owned(),
        false => words.join(" "),
    };
    format!("cd {} && exec {run}\n", quoted(here))
}

/// One word for the shell, whatever is in it.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}
