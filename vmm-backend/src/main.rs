//! `outram-backend`: pages one guest's RAM between its host and memory servers.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use outram_backend::arguments::{Arguments, Command};
use outram_backend::{daemon, handover};
use outram_wire::causes::with_causes;
use outram_wire::logging;

fn main() -> ExitCode {
    let mut given: Vec<OsString> = std::env::args_os().collect();
    let command = match Arguments::parse().command {
        Command::Launch { file } => match from_file(&file) {
            Ok((command, arguments)) => {
                given = arguments;
                command
            }
            Err(failed) => return failed,
        },
        command => command,
    };
    if let Command::Inject { args } = command {
        return handover::injector_main(args);
    }
    logging::start(env!("CARGO_BIN_NAME"));
    let outcome = match command {
        // The program's name and 'run' are not passed on.
        Command::Run(flags) => daemon::supervise(&flags, given.get(2..).unwrap_or_default()),
        Command::Page(flags) => daemon::run(*flags).map(|()| ExitCode::SUCCESS),
        Command::Prepare { file } => match from_file(&file) {
            Ok((Command::Run(flags), _)) => {
                daemon::prepare_on_host(*flags).map(|()| ExitCode::SUCCESS)
            }
            Ok(_) => return not_run(&file),
            Err(failed) => return failed,
        },
        Command::Tidy { dir } => daemon::tidy(&dir).map(|()| ExitCode::SUCCESS),
        Command::Launch { .. } | Command::Inject { .. } => return ExitCode::FAILURE,
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("outram-backend: {}", with_causes(error.as_ref()));
        ExitCode::FAILURE
    })
}

/// What the arguments in a file say.
fn from_file(file: &Path) -> Result<(Command, Vec<OsString>), ExitCode> {
    let arguments = arguments_of(file).map_err(|error| {
        eprintln!("outram-backend: cannot read {}: {error}", file.display());
        ExitCode::FAILURE
    })?;
    match Arguments::parse_from(&arguments).command {
        command @ Command::Run(_) => Ok((command, arguments)),
        _ => Err(not_run(file)),
    }
}

fn not_run(file: &Path) -> ExitCode {
    eprintln!(
        "outram-backend: {} does not say 'run': expected 'run' and its options",
        file.display()
    );
    ExitCode::FAILURE
}

/// The arguments in a file, after this program's name.
fn arguments_of(file: &Path) -> std::io::Result<Vec<OsString>> {
    let text = std::fs::read(file)?;
    let text = text.strip_suffix(b"\0").unwrap_or(&text);
    let arguments = text.split(|byte| *byte == 0);
    let arguments = arguments.map(|argument| OsStr::from_bytes(argument).to_owned());
    Ok(std::iter::once(OsString::from("outram-backend"))
        .chain(arguments)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_in_a_file_may_hold_anything_but_a_nul_byte() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), b"run\0--name=$x \"%i\"\n\\\0\0").expect("written");
        let arguments = arguments_of(file.path()).expect("readable");
        assert_eq!(
            arguments,
            ["outram-backend", "run", "--name=$x \"%i\"\n\\", ""]
        );
    }
}
