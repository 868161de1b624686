//! The command line as people meet it: its help, and its reports.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::{CommandFactory, Parser};
use outram_libvirt::cli::Arguments;
use outram_libvirt::cli::report::{Report, State};
use outram_libvirt::cli::status::{details, overview};
use outram_libvirt::cli::top::screen::{Terms, draw};
use outram_libvirt::cli::top::table::{Column, Sorting, plain, totals};
use outram_libvirt::cli::top::view::{View, Wish};
use outram_libvirt::cli::top::watcher::Line;
use outram_libvirt::host::RUN_VARIABLE;
use outram_wire::control::{Counters, DiskState, DiskStatus, Latency, Phase, ServerStatus, Status};
use outram_wire::server::DiskId;
use outram_wire::units::{Limit, LocalRatio, VmId};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::Color;

use crate::support::{self, assert_golden};

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
        (&["tune", "vm", "--persist"], "--granularity"),
        (
            &["tune", "vm", "--local-ratio", "0.5", "--local", "1G"],
            "cannot be used with",
        ),
        (
            &["tune", "vm", "--granularity", "1MiB"],
            "a power of two from 4 KiB to 256 KiB",
        ),
        (&["tune", "vm", "--workers", "0"], "a number from 1 to 64"),
        (
            &["attach", "vm", "--local-ratio", "0.5", "--queue-depth", "x"],
            "a number from 1 to 64",
        ),
        (&["tune", "vm", "--compressed-share", "1"], "to 0.5"),
        (&["pki", "issue", "server", "s"], "--address"),
        (&["top", "--delay", "0"], "expected seconds"),
        (&["top", "--sort", "x"], "possible values"),
        (&["top", "-n", "0"], "not in"),
        (&["status", "--watch", "web1"], "goes before --watch"),
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
    let both = ["--local-ratio=0.5", "--granularity=64KiB"];
    assert!(Arguments::try_parse_from(["outram", "tune", "x", both[0], both[1]]).is_ok());
    let others = ["--workers=4", "--queue-depth=16"];
    assert!(Arguments::try_parse_from(["outram", "tune", "x", others[0], others[1]]).is_ok());
    assert!(Arguments::try_parse_from(["outram", "tune", "x", "--compressed-share=0"]).is_ok());
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
        us_p90: Some(400),
        us_p99: 900,
        us_p999: Some(2345),
        us_max: 12_345,
    };
    Status {
        backend_pid: 4242,
        takeovers: 0,
        qemu_pid: Some(4343),
        phase: Phase::Stalled,
        identity: outram_wire::identity::IdentityStatus {
            expires_unix_s: Some(1),
            refused: Some("the private key client.key does not fit".to_owned()),
        },
        detail: Some("10.0.0.2:7741: connection refused; trying again".to_owned()),
        handover: Some("/dev/userfaultfd in QEMU".to_owned()),
        unmanaged_bytes: 0,
        waiting_faults: 3,
        lost_bytes: 4096,
        homing: None,
        counters: Counters {
            faults_zero: 1,
            faults_remote: 4711,
            evicted_pages: 9000,
            evicted_clean_pages: 2000,
            fetched_ahead_pages: 700,
            fetched_ahead_used_pages: 600,
            fetched_ahead_unused_pages: 50,
            wire_sent_bytes: 28 << 20,
            wire_received_bytes: 19 << 20,
            stalls_pool: 2,
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
            transport: None,
            slabs: 1,
            reserved_bytes: 64 << 20,
            stored_bytes: 30 << 20,
        }],
        disk: Some(DiskStatus {
            id: DiskId(vm().0),
            size_bytes: 8 << 30,
            state: DiskState::Open,
            connected: Some(true),
            detail: None,
            stored_bytes: 300 << 20,
            leased_slabs: 5,
            reads: 100,
            writes: 200,
            discards: 3,
            errors: 0,
            integrity_failures: 0,
            sent_bytes: 400 << 20,
            received_bytes: 100 << 20,
        }),
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
    let mut text = overview(&reports);
    for report in &reports {
        text.push('\n');
        text.push_str(&details(report));
    }
    text.push('\n');
    text.push_str(&overview(&[]));
    assert_golden("status.txt", &text);
    let json = serde_json::to_string_pretty(&reports[1]).expect("JSON");
    assert_golden("status.json", &(json + "\n"));
}

/// What `outram top` knows of the guests after two looks two seconds apart.
fn lines() -> Vec<Line> {
    let start = Instant::now();
    let mut all = reports();
    let serving = Status {
        phase: Phase::Serving,
        ..support::status("db2", vm(), Limit::LocalBytes(48 << 20))
    };
    all.push(Report {
        uuid: vm().to_string(),
        name: "db2".to_owned(),
        state: State::Serving,
        error: None,
        status: Some(Box::new(serving)),
    });
    all.into_iter()
        .map(|report| {
            let mut line = Line::new(report.clone(), start);
            for look in 1..=8 {
                let mut later = report.clone();
                if let Some(status) = &mut later.status {
                    let counters = &mut status.counters;
                    // More from look to look: by 60 faults, then 120, 180…
                    counters.faults_remote += 30 * look * (look + 1);
                    counters.refaults += 12 * look;
                    counters.waited_us += 800_000 * look;
                    counters.wire_received_bytes += look << 20;
                    counters.wire_sent_bytes += look << 10;
                }
                line.note(later, start + Duration::from_secs(2 * look));
            }
            line
        })
        .collect()
}

fn sorting(by: Column) -> Sorting {
    Sorting {
        by,
        reversed: false,
    }
}

#[test]
fn tops_plain_report_is_as_recorded() {
    let mut lines = lines();
    sorting(Column::Wait).sort(&mut lines);
    let text = format!("{}\n\n{}", totals(&lines), plain(&lines));
    assert_golden("top-batch.txt", &text);
}

fn screen_of(view: &View, width: u16, height: u16) -> Buffer {
    let terms = Terms {
        colour: true,
        unicode: true,
    };
    let backend = TestBackend::new(width, height);
    let mut terminal = Terminal::new(backend).expect("a terminal in memory");
    terminal
        .draw(|frame| draw(frame, view, terms))
        .expect("drawn");
    terminal.backend().buffer().clone()
}

fn text_of(buffer: &Buffer) -> String {
    let area = buffer.area;
    let mut text = String::new();
    for y in 0..area.height {
        let line: String = (0..area.width).map(|x| buffer[(x, y)].symbol()).collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn key(code: KeyCode) -> KeyEvent {
    KeyEvent::new(code, KeyModifiers::NONE)
}

#[test]
fn tops_screen_is_as_recorded() {
    let mut view = View::new(sorting(Column::Wait), Duration::from_secs(2));
    let mut text = text_of(&screen_of(&view, 80, 8));
    view.show(lines());
    for width in [160, 80, 40] {
        text.push_str(&format!("--- {width} columns\n"));
        text.push_str(&text_of(&screen_of(&view, width, 12)));
    }
    assert_eq!(view.press(key(KeyCode::Char('?'))), Wish::Draw);
    text.push_str("--- help\n");
    text.push_str(&text_of(&screen_of(&view, 80, 20)));
    assert_golden("top-screen.txt", &text);
    // However small a terminal is, drawing on it is no error.
    for (width, height) in [(1, 1), (10, 3), (3, 40), (0, 0)] {
        screen_of(&view, width, height);
    }
}

#[test]
fn tops_rows_have_the_colour_of_their_state() {
    let mut view = View::new(sorting(Column::Name), Duration::from_secs(2));
    view.show(lines());
    let buffer = screen_of(&view, 160, 12);
    let colour_of = |name: &str| {
        let row = text_of(&buffer)
            .lines()
            .position(|line| line.starts_with(name))
            .expect("its row");
        buffer[(0, row as u16)].fg
    };
    assert_eq!(colour_of("db "), Color::Red, "failed");
    assert_eq!(colour_of("web1"), Color::Yellow, "stalled");
    assert_eq!(colour_of("db2"), Color::Reset, "serving");
}

#[test]
fn tops_keys_sort_scroll_and_end_it() {
    let mut view = View::new(sorting(Column::Name), Duration::from_secs(2));
    view.show(lines());
    let names = |view: &View| -> Vec<String> {
        let lines = view.lines.iter();
        lines.map(|line| line.report.name.clone()).collect()
    };
    let by_name = ["db", "db2", "long-name-of-a-guest", "web1"];
    assert_eq!(names(&view), by_name);
    view.press(key(KeyCode::Char('r')));
    assert_eq!(names(&view).first().map(String::as_str), Some("web1"));
    view.press(key(KeyCode::Char('s')));
    assert_eq!(view.sorting, sorting(Column::Stalls));
    assert_eq!(
        names(&view),
        ["web1", "db2", "db", "long-name-of-a-guest"],
        "the most stalls first, unknown ones last"
    );
    view.press(key(KeyCode::Left));
    assert_eq!(view.sorting.by, Column::Out);
    view.press(key(KeyCode::Char('n')));
    view.press(key(KeyCode::Left));
    assert_eq!(view.sorting.by, Column::Stalls, "around the end");
    for _ in 0..9 {
        view.press(key(KeyCode::Down));
    }
    assert_eq!(view.scrolled, 3, "never past the last guest");
    view.show(Vec::new());
    assert_eq!(view.scrolled, 0);
    assert_eq!(view.press(key(KeyCode::Char(' '))), Wish::Ask);
    view.press(key(KeyCode::Char('?')));
    assert!(view.help);
    assert_eq!(view.press(key(KeyCode::Char('q'))), Wish::Draw, "closes it");
    assert_eq!(view.press(key(KeyCode::Char('q'))), Wish::Quit);
    let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    view.help = true;
    assert_eq!(view.press(control_c), Wish::Quit);
}

#[test]
fn a_scraper_is_told_of_guests_that_cannot_be_looked_up() {
    let dir = tempfile::tempdir().expect("a directory");
    let run = dir.path().join("run");
    let mut server = Command::new(env!("CARGO_BIN_EXE_outram"))
        .args(["metrics", "--listen=127.0.0.1:0"])
        .env(RUN_VARIABLE, &run)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("outram runs");
    let mut line = String::new();
    let mut said = BufReader::new(server.stdout.take().expect("piped"));
    said.read_line(&mut line).expect("read");
    let scrape = || {
        let address = line.trim().strip_prefix("serving metrics at http://")?;
        let mut socket = TcpStream::connect(address.strip_suffix("/metrics")?).ok()?;
        socket.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").ok()?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).ok()?;
        Some(answer)
    };
    let before = scrape();
    // No directory: who is there cannot be told.
    fs::write(&run, "").expect("written");
    let after = scrape();
    server.kill().expect("it runs until then");
    server.wait().expect("ended");
    let is =
        |answer: &Option<String>, status| answer.as_ref().is_some_and(|it| it.contains(status));
    assert!(is(&before, "HTTP/1.1 200 "), "{line}{before:?}");
    assert!(is(&after, "HTTP/1.1 500 "), "{after:?}");
}
