//! The command line of `outram-libvirt-hook` as people read about it; its manual page is made from
//! this. The hook itself takes whatever libvirt gives it, for later versions may give more.

use clap::{CommandFactory, Parser};

/// Starts the backend of a libvirt domain that uses Outram, and ends it with the domain
///
/// libvirtd calls this at each stage of a domain's life, with the domain's XML on standard input;
/// 'outram setup' installs it in /etc/libvirt/hooks/qemu.d. There is no need to run it by hand.
///
/// It fails in two cases: 'prepare begin' of a domain whose memory Outram cannot page now, and 'restore
/// begin' or 'migrate begin' where it cannot note in /run/outram that a guest arrives. The reason on
/// standard error then is part of virsh's message. Domains without Outram's
/// metadata and disk are not looked at further.
#[derive(Debug, Parser)]
#[command(name = "outram-libvirt-hook", version, max_term_width = 100)]
pub struct HookArguments {
    /// Name of the domain
    domain: String,
    /// Stage of its life, such as prepare, start, started, stopped, release
    operation: String,
    /// Part of the stage, such as begin or end
    sub_operation: String,
    /// What the stage has besides, or -
    extra: String,
}

/// Answers `--help` and `--version`, given alone. (libvirt gives four arguments, of which the first
/// may be anything that a domain can be called.)
pub fn answer(arguments: &[String]) -> Option<String> {
    let [only] = arguments else {
        return None;
    };
    let mut command = HookArguments::command();
    match only.as_str() {
        "-h" | "--help" => Some(command.render_long_help().to_string()),
        "-V" | "--version" => Some(command.render_version()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libvirts_arguments_are_never_taken_for_a_call_for_help() {
        let arguments =
            |list: &[&str]| list.iter().map(|text| text.to_string()).collect::<Vec<_>>();
        assert!(answer(&arguments(&["--help"])).is_some_and(|text| text.contains("Usage")));
        assert!(answer(&arguments(&["--version"])).is_some());
        assert!(answer(&arguments(&["--help", "prepare", "begin", "-"])).is_none());
        assert!(answer(&arguments(&["web1"])).is_none());
        assert!(answer(&[]).is_none());
    }
}
