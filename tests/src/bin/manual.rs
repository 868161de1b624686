//! Writes the manual pages and shell completions of all programs, made from their command
//! lines' definitions: `make man` does it, and packages are built with the result.
//!
//! ```text
//! DIR/man1/outram.1, outram-attach.1, …     DIR/bash/outram, …     DIR/zsh/_outram, …
//! DIR/man8/outram-memserver.8, …            DIR/fish/outram.fish, …
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use clap::{Command, CommandFactory, Parser};
use clap_complete::Shell;
use clap_mangen::Man;
use time::OffsetDateTime;

/// What the head of each page says it is part of.
const MANUAL: &str = "Outram";

/// Sections of the manual: commands of users, and programs of the system.
const USERS: &str = "1";
const SYSTEM: &str = "8";

/// Writes the manual pages and shell completions of Outram's programs
#[derive(Debug, Parser)]
struct Arguments {
    /// The folder to write them to
    folder: PathBuf,
}

/// What is another heading here: clap_mangen's for what stands behind the options, which begins with an example,
/// and the line there that begins what follows it.
const HEADINGS: [(&str, &str); 2] = [
    (".SH EXTRA", ".SH EXAMPLE"),
    ("\nExit status:\n", ".SH EXIT STATUS\n"),
];

fn main() -> Result<()> {
    let folder = Arguments::parse().folder;
    let daemons = [
        outram_backend::arguments::Arguments::command(),
        outram_memserver::Arguments::command(),
    ];
    let hooks = [
        outram_libvirt::hook_arguments::HookArguments::command(),
        outram_libvirt::foreign::nova::FilterArguments::command(),
        outram_libvirt::foreign::ovirt::VdsmArguments::command(),
        outram_libvirt::foreign::kubevirt::SidecarArguments::command(),
    ];
    write_pages(&folder, outram_libvirt::cli::Arguments::command(), USERS)?;
    for command in daemons.iter().chain(&hooks) {
        write_pages(&folder, command.clone(), SYSTEM)?;
    }
    for (shell, name) in [
        (Shell::Bash, "bash"),
        (Shell::Zsh, "zsh"),
        (Shell::Fish, "fish"),
    ] {
        let folder = folder.join(name);
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        for command in &daemons {
            let program = command.get_name();
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command.clone(), program, &mut script);
            write_script(&folder, name, program, &script)?;
        }
        write_script(&folder, name, "outram", &printed_script(name)?)?;
    }
    Ok(())
}

/// The day on the pages: of the sources where a package is built, else today.
fn day() -> Result<String> {
    let seconds = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(seconds) => seconds.parse().context("SOURCE_DATE_EPOCH")?,
        Err(_) => SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
    };
    let time = OffsetDateTime::from_unix_timestamp(seconds.try_into()?)?;
    Ok(time.date().to_string())
}

/// Without 'help' among the subcommands: what it says are the pages themselves.
fn without_help(command: Command) -> Command {
    command
        .disable_help_subcommand(true)
        .mut_subcommands(without_help)
}

/// The page of a command, and those of its subcommands.
fn write_pages(folder: &Path, command: Command, section: &str) -> Result<()> {
    let folder = folder.join(format!("man{section}"));
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let mut command = without_help(command);
    command.build();
    write_page(&folder, &command, section)
}

fn write_page(folder: &Path, command: &Command, section: &str) -> Result<()> {
    let name = command.get_display_name().unwrap_or(command.get_name());
    let page = Man::new(command.clone())
        .section(section)
        .date(day()?)
        .source(format!("{MANUAL} {}", env!("CARGO_PKG_VERSION")))
        .manual(MANUAL);
    let mut text = Vec::new();
    page.render(&mut text)?;
    let path = folder.join(format!("{name}.{section}"));
    let text = HEADINGS
        .iter()
        .fold(String::from_utf8(text)?, |text, (theirs, ours)| {
            text.replace(theirs, ours)
        });
    fs::write(&path, text).with_context(|| path.display().to_string())?;
    for sub in command.get_subcommands() {
        if !sub.is_hide_set() {
            write_page(folder, sub, section)?;
        }
    }
    Ok(())
}

/// The script of `outram`, as it prints it itself: it asks the program for domains' names.
fn printed_script(shell: &str) -> Result<Vec<u8>> {
    let outram = std::env::current_exe()?.with_file_name("outram");
    let output = Process::new(&outram)
        .args(["completions", shell])
        .output()
        .with_context(|| format!("{}: run 'cargo build' first", outram.display()))?;
    ensure!(
        output.status.success(),
        "'outram completions {shell}' failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(output.stdout)
}

/// Writes a script under the name by which the shell finds it.
fn write_script(folder: &Path, shell: &str, program: &str, script: &[u8]) -> Result<()> {
    let path = folder.join(match shell {
        "zsh" => format!("_{program}"),
        "fish" => format!("{program}.fish"),
        _ => program.to_owned(),
    });
    fs::write(&path, script).with_context(|| path.display().to_string())
}
