//! The command line as people meet it: its help, and its reports.

mod support;

use clap::{CommandFactory, Parser};
use outram_libvirt::cli::Arguments;
use outram_libvirt::cli::report::{Report, State};
use outram_libvirt::cli::status::{details, table};
use outram_wire::control::{Counters, Latency, Phase, ServerStatus, Status};
use outram_wire::units::{Limit, LocalRatio, VmId};
use support::assert_golden;

/// The help of a command and of all below it.
fn all_help(command: &mut clap::Command, path: &str, text: &mut String) {
    text.push_str(&format!(
        "$ {path} --help\n{}\n",
        command.render_long_help()
    ));
    let names: Vec<String> = command
        .get_subcommands()
        .map(|sub| sub.get_name().to_owned())
        .filter(|name| name != "help")
        .collect();
    for name in names {
        let sub = command
            .find_subcommand_mut(&name)
            .expect("its own subcommand");
        all_help(sub, &format!("{path} {name}"), text);
    }
}

#[test]
fn help_is_as_recorded() {
    let mut command = Arguments::command().term_width(100);
    command.build();
    let mut text = String::new();
    all_help(&mut command, "outram", &mut text);
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    assert_golden("help.txt", &(lines.join("\n") + "\n"));
}

fn refused(arguments: &[&str]) -> String {
    let line = ["outram"].iter().chain(arguments);
    Arguments::try_parse_from(line)
        .expect_err("refused")
        .to_string()
}

#[test]
fn bad_arguments_are_told() {
    for (arguments, word) in [
        (&["attach", "vm"][..], "--local-ratio"),
        (
            &["attach", "vm", "--local-ratio", "0.5", "--local", "1G"],
            "cannot be used with",
        ),
        (&["attach", "vm", "--local-ratio", "2"], "at most 1"),
        (&["attach", "vm", "--local", "1"], "less than one page"),
        (&["attach", "vm", "--local", "x"], "not a size"),
        (
            &["attach", "vm", "--local", "1G", "--server", "h:0"],
            "expected host:port",
        ),
        (&["tune", "vm"], "--local-ratio"),
        (&["pki", "issue", "server", "s"], "--address"),
    ] {
        let text = refused(arguments);
        assert!(text.contains(word), "{arguments:?}: {text}");
    }
}

#[test]
fn odd_domain_names_and_uris_are_taken() {
    for name in ["a b", "näme", "x;rm -rf", "1"] {
        assert!(
            Arguments::try_parse_from(["outram", "-c", "qemu:///system", "detach", name]).is_ok()
        );
    }
    assert!(
        Arguments::try_parse_from(["outram", "status", "-c", "qemu:///system", "--json"]).is_ok()
    );
    assert!(Arguments::try_parse_from(["outram", "detach", "--", "-x"]).is_ok());
}

fn vm() -> VmId {
    "9a4a7f0e-2f5b-4d55-8a53-0a4e1c7e1234"
        .parse()
        .expect("a UUID")
}

fn busy() -> Status {
    let latency = Latency {
        count: 4711,
        us_p50: 180,
        us_p99: 900,
        us_max: 12_345,
    };
    Status {
        backend_pid: 4242,
        qemu_pid: Some(4343),
        phase: Phase::Stalled,
        detail: Some("10.0.0.2:7741: connection refused; trying again".to_owned()),
        handover: Some("/dev/userfaultfd in QEMU".to_owned()),
        waiting_faults: 3,
        lost_bytes: 4096,
        counters: Counters {
            faults_zero: 1,
            faults_remote: 4711,
            evicted_pages: 9000,
            evicted_clean_pages: 2000,
            wire_sent_bytes: 28 << 20,
            wire_received_bytes: 19 << 20,
            stalls_server: 3,
            ..Counters::default()
        },
        latency: [
            ("remote".to_owned(), latency),
            ("zero".to_owned(), Latency::default()),
        ]
        .into(),
        servers: vec![ServerStatus {
            address: "10.0.0.2:7741".to_owned(),
            connected: false,
            detail: Some("connection refused".to_owned()),
            slabs: 1,
            reserved_bytes: 64 << 20,
            stored_bytes: 30 << 20,
        }],
        ..support::status(
            "web1",
            vm(),
            Limit::LocalRatio(LocalRatio::new(0.5).expect("a ratio")),
        )
    }
}

fn reports() -> Vec<Report> {
    let report = |name: &str, state, error: Option<&str>, status: Option<Status>| Report {
        uuid: vm().to_string(),
        name: name.to_owned(),
        state,
        error: error.map(str::to_owned),
        status: status.map(Box::new),
    };
    vec![
        report(
            "db",
            State::Failed,
            Some("10.0.0.2:7741 is full: 1 GiB free, 2 GiB asked"),
            None,
        ),
        report(
            "web1",
            State::Stalled,
            Some("10.0.0.2:7741: connection refused; trying again"),
            Some(busy()),
        ),
        report("long-name-of-a-guest", State::Off, None, None),
    ]
}

#[test]
fn reports_are_as_recorded() {
    let reports = reports();
    let mut text = table(&reports);
    for report in &reports {
        text.push('\n');
        text.push_str(&details(report));
    }
    text.push('\n');
    text.push_str(&table(&[]));
    assert_golden("status.txt", &text);
    let json = serde_json::to_string_pretty(&reports[1]).expect("JSON");
    assert_golden("status.json", &(json + "\n"));
}
