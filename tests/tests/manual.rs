//! Help texts, manual pages and shell completions, all made from the command lines' definitions.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::CommandFactory;
use outram_libvirt::foreign::kubevirt::SidecarArguments;
use outram_libvirt::foreign::nova::FilterArguments;
use outram_libvirt::foreign::ovirt::VdsmArguments;
use outram_libvirt::hook_arguments::HookArguments;
use tempfile::TempDir;

/// What `make man` writes.
struct Written(TempDir);

impl Written {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let output = Command::new(env!("CARGO_BIN_EXE_manual"))
            .arg(folder.path())
            .output()
            .expect("the program runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).expect("the folder is there");
        let mut names: Vec<String> = entries
            .map(|entry| entry.expect("an entry").file_name())
            .map(|name| name.to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

/// All pages that a command has: its own and its subcommands'.
fn pages_of(command: &clap::Command, section: &str) -> Vec<String> {
    let own = command.get_display_name().unwrap_or(command.get_name());
    let below = command
        .get_subcommands()
        .filter(|sub| sub.get_name() != "help" && !sub.is_hide_set())
        .flat_map(|sub| pages_of(sub, section));
    [format!("{own}.{section}")]
        .into_iter()
        .chain(below)
        .collect()
}

fn expected_pages(commands: Vec<clap::Command>, section: &str) -> Vec<String> {
    let mut pages: Vec<String> = commands
        .into_iter()
        .flat_map(|mut command| {
            command.build();
            pages_of(&command, section)
        })
        .collect();
    pages.sort();
    pages
}

fn daemons_and_hooks() -> Vec<clap::Command> {
    vec![
        outram_backend::arguments::Arguments::command(),
        outram_memserver::Arguments::command(),
        HookArguments::command(),
        FilterArguments::command(),
        VdsmArguments::command(),
        SidecarArguments::command(),
    ]
}

#[test]
fn every_command_has_a_page_that_renders_without_a_warning() {
    let written = Written::new();
    let users = vec![outram_libvirt::cli::Arguments::command()];
    assert_eq!(written.names("man1"), expected_pages(users, "1"));
    assert_eq!(
        written.names("man8"),
        expected_pages(daemons_and_hooks(), "8")
    );
    for folder in ["man1", "man8"] {
        for name in written.names(folder) {
            let text = rendered(&written.path(&format!("{folder}/{name}")));
            for heading in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS"] {
                let found = text.lines().any(|line| line.contains(heading));
                assert!(found, "{name} has no {heading}:\n{text}");
            }
        }
    }
}

/// A page as groff shows it; whatever groff warns of is a failure.
fn rendered(page: &Path) -> String {
    let output = Command::new("groff")
        // To plain text: no overstriking, no colour.
        .args(["-man", "-Tutf8", "-ww", "-P-cbou"])
        .arg(page)
        .output()
        .expect("groff runs (package groff-base)");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.is_empty(),
        "{}: {said}",
        page.display()
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn every_reference_of_a_page_leads_to_a_page() {
    let written = Written::new();
    for (folder, section) in [("man1", 1), ("man8", 8)] {
        let names = written.names(folder);
        for name in &names {
            let text = fs::read_to_string(written.path(&format!("{folder}/{name}")))
                .expect("the page is text")
                .replace("\\-", "-");
            let end = format!("({section})");
            for line in text.lines().filter(|line| line.ends_with(&end)) {
                let referred = line.trim_end_matches(&end);
                assert!(
                    names.contains(&format!("{referred}.{section}")),
                    "{name} refers to {line}, which is not there"
                );
            }
        }
    }
}

/// What Bash offers for a half-typed line with one of the scripts loaded.
fn bash_offers(script: &Path, words: &[&str]) -> Vec<String> {
    let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
    let last = words.len() - 1;
    let lines = format!(
        "source \"$1\"; complete -p {program} >/dev/null || exit 1
         function=$(complete -p {program} | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
         COMP_WORDS=({}); COMP_CWORD={last}
         $function {program} '{}' '{}'; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        quoted.join(" "),
        words[last],
        words[last - 1],
        program = words[0],
    );
    let programs = Path::new(env!("CARGO_BIN_EXE_manual"))
        .parent()
        .expect("a folder");
    let path = std::env::var("PATH").unwrap_or_default();
    let output = Command::new("bash")
        .args(["-c", &lines, "bash"])
        .arg(script)
        .env("PATH", format!("{}:{path}", programs.display()))
        .output()
        .expect("bash runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let offered = String::from_utf8_lossy(&output.stdout);
    offered.lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_subcommands_and_options() {
    let written = Written::new();
    let outram = written.path("bash/outram");
    assert_eq!(bash_offers(&outram, &["outram", "att"]), ["attach"]);
    assert_eq!(
        bash_offers(&outram, &["outram", "tune", "web1", "--pers"]),
        ["--persist"]
    );
    assert_eq!(
        bash_offers(&outram, &["outram", "completions", "z"]),
        ["zsh"]
    );
    let memserver = written.path("bash/outram-memserver");
    assert_eq!(
        bash_offers(&memserver, &["outram-memserver", "--mem"]),
        ["--memory"]
    );
}

#[test]
fn every_shell_has_a_script_for_every_program_that_people_call() {
    let written = Written::new();
    let plain = ["outram", "outram-backend", "outram-memserver"];
    assert_eq!(written.names("bash"), plain);
    assert_eq!(written.names("zsh"), plain.map(|name| format!("_{name}")));
    assert_eq!(
        written.names("fish"),
        [
            "outram-backend.fish",
            "outram-memserver.fish",
            "outram.fish"
        ]
    );
}

/// The help of a command and of all below it that are shown.
fn all_help(command: &mut clap::Command, path: &str, text: &mut String) {
    text.push_str(&format!(
        "$ {path} --help\n{}\n",
        command.render_long_help()
    ));
    let names: Vec<String> = command
        .get_subcommands()
        .filter(|sub| sub.get_name() != "help" && !sub.is_hide_set())
        .map(|sub| sub.get_name().to_owned())
        .collect();
    for name in names {
        let sub = command.find_subcommand_mut(&name).expect("its subcommand");
        all_help(sub, &format!("{path} {name}"), text);
    }
}

/// `outram`'s own help is recorded beside its tests.
#[test]
fn help_of_daemons_and_hooks_is_as_recorded() {
    let mut text = String::new();
    for command in daemons_and_hooks() {
        let name = command.get_name().to_owned();
        let mut command = command.term_width(100);
        command.build();
        all_help(&mut command, &name, &mut text);
    }
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    let found = lines.join("\n") + "\n";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/help.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, &found).expect("the golden file is written");
    }
    let expected = fs::read_to_string(&path).expect("the golden file");
    assert!(
        expected == found,
        "help differs; UPDATE_GOLDEN=1 records it anew; found:\n{found}"
    );
}
