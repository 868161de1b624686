//! `outram completions`, and what a shell offers for a half-typed command line.
//!
//! The shell's script asks this very program for candidates ([`answer_shell`]), so that it offers
//! the domains that there are. It never waits long for them, and offers none rather than an error.

use std::env;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, CommandFactory, ValueEnum};
use clap_complete::env::Shells;
use clap_complete::{ArgValueCandidates, CompleteEnv, CompletionCandidate};

use super::Arguments;
use crate::libvirt::{Libvirt, ask_within, leave};

/// The environment variable by which a shell's script asks for candidates.
const VARIABLE: &str = "COMPLETE";

/// The program's name in scripts: found in `PATH`, wherever the script was made.
const PROGRAM: &str = "outram";

/// How long a shell's user waits for libvirt at most.
const PATIENCE: Duration = Duration::from_secs(1);

/// A shell that completion scripts can be made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    /// Bash
    Bash,
    /// Zsh
    Zsh,
    /// Fish
    Fish,
}

impl Shell {
    fn name(self) -> &'static str {
        match self {
            Self::Bash => "bash",
            Self::Zsh => "zsh",
            Self::Fish => "fish",
        }
    }
}

/// The arguments of `outram completions`.
#[derive(Debug, Args)]
pub struct CompletionsArguments {
    /// The shell
    shell: Shell,
}

impl CompletionsArguments {
    /// Prints the script.
    pub fn run(&self) -> Result<bool> {
        let mut script = Vec::new();
        Shells::builtins()
            .completer(self.shell.name())
            .with_context(|| format!("no completions can be made for {}", self.shell.name()))?
            .write_registration(VARIABLE, PROGRAM, PROGRAM, PROGRAM, &mut script)?;
        io::stdout()
            .write_all(&script)
            .context("writing the script")?;
        Ok(true)
    }
}

/// Answers a shell that asks for candidates: the status to end with then; nothing otherwise.
pub fn answer_shell() -> Option<ExitCode> {
    let shell = CompleteEnv::with_factory(Arguments::command).var(VARIABLE);
    let directory = env::current_dir().ok();
    match shell.try_complete(env::args_os(), directory.as_deref()) {
        Ok(false) => None,
        Ok(true) => Some(leave(true)),
        Err(error) => error.exit(),
    }
}

/// The names of libvirt's domains as candidates of an argument.
pub fn domain_names() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        names_within(PATIENCE)
            .into_iter()
            .filter(|name| is_plain(name))
            .map(CompletionCandidate::new)
            .collect()
    })
}

/// Asks libvirt in a thread of its own: one that hangs must not hang the shell.
fn names_within(patience: Duration) -> Vec<String> {
    let names = || Libvirt::connect_to_read(None).and_then(|libvirt| libvirt.domain_names());
    // Without a thread there are no candidates, which is no error at a shell's prompt.
    let answer = ask_within(patience, names).ok().flatten();
    answer.and_then(Result::ok).unwrap_or_default()
}

/// Whether a shell takes a name as one word as it stands; Bash does not quote candidates itself.
fn is_plain(name: &str) -> bool {
    !name.starts_with('-')
        && name
            .chars()
            .all(|c| c.is_alphanumeric() || "-_.+@%,".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_need_no_quotes_are_offered() {
        for name in ["web1", "näme-2", "instance-0000001a", "a.b_c"] {
            assert!(is_plain(name), "{name}");
        }
        for name in ["a b", "x;rm", "-x", "$(id)", "it's", "a\\b", "tab\t", "a:b"] {
            assert!(!is_plain(name), "{name}");
        }
    }
}
