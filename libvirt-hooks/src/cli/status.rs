//! `outram status`: where the memory of guests is, for people and for programs.

use std::io::{IsTerminal, stdout};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use outram_wire::compressed_share::CompressedShare;
use outram_wire::control::{DiskState, DiskStatus, ServerStatus, Status};
use outram_wire::identity::{IdentityStatus, expiry_in_words};
use outram_wire::units::format_size;
use serde::Serialize;

use super::completion::domain_names;
use super::output::{self, now_in_words, parse_delay};
use super::report::{Report, State, all_guests, find_guest, report, reports};
use super::table;
use crate::host::Paths;

/// The arguments of `outram status`.
#[derive(Debug, Args)]
pub struct StatusArguments {
    /// Name or UUID of the domain; all domains with a backend if not given
    #[arg(add = domain_names())]
    domain: Option<String>,
    /// Print JSON: one object for a domain, a list of them without
    #[arg(long)]
    json: bool,
    /// Report again and again until interrupted, every two seconds if none are given
    ///
    /// On a terminal each report replaces the one before. With --json, each is one line.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = parse_watch)]
    watch: Option<Duration>,
}

/// A time between reports; a domain behind `--watch` would be taken for one.
fn parse_watch(text: &str) -> Result<Duration, String> {
    parse_delay(text).map_err(|error| format!("{error}; a domain goes before --watch"))
}

/// Puts the cursor to the top, and clears what stands behind each line's end and below.
const TO_TOP: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K\n";
const CLEAR_BELOW: &str = "\x1b[J";

impl StatusArguments {
    /// Prints the report, or one after another.
    pub fn run(&self, uri: Option<&str>, paths: &Paths) -> Result<bool> {
        let Some(delay) = self.watch else {
            output::write(&self.text(uri, paths)?)?;
            return Ok(true);
        };
        let redraw = !self.json && stdout().is_terminal();
        let mut first = true;
        loop {
            let report = self.text(uri, paths)?;
            let text = if redraw {
                let head = format!("{}, every {} s\n\n", now_in_words(), delay.as_secs_f64());
                let text = (head + &report).replace('\n', CLEAR_LINE);
                format!("{TO_TOP}{text}{CLEAR_BELOW}")
            } else if first || self.json {
                report
            } else {
                format!("\n{report}")
            };
            if !output::write(&text)? {
                return Ok(true);
            }
            first = false;
            thread::sleep(delay);
        }
    }

    fn text(&self, uri: Option<&str>, paths: &Paths) -> Result<String> {
        let Some(name) = &self.domain else {
            let reports: Vec<Report> = reports(&all_guests(paths)?, paths)
                .into_iter()
                .filter(|report| report.state != State::Off)
                .collect();
            return if self.json {
                self.json_of(&reports)
            } else {
                Ok(overview(&reports))
            };
        };
        let report = report(&find_guest(name, uri, paths)?, paths);
        if self.json {
            self.json_of(&report)
        } else {
            Ok(details(&report))
        }
    }

    /// For people and programs, or where many follow each other, in a line.
    fn json_of(&self, report: &impl Serialize) -> Result<String> {
        let json = match self.watch {
            Some(_) => serde_json::to_string(report)?,
            None => serde_json::to_string_pretty(report)?,
        };
        Ok(json + "\n")
    }
}

/// A state in plain words.
fn in_words(state: State) -> &'static str {
    match state {
        State::Waiting => "waiting for QEMU",
        State::Serving => "serving",
        State::Stalled => "stalled: the guest waits for memory, for the reason below",
        State::Stopped => "stopped: memory is lost, the guest stands still where it needs it",
        State::Refused => "refused",
        State::Ending => "ending: memory is being given back",
        State::Silent => "the backend does not answer",
        State::Recovering => "recovering: the backend died and is being started again",
        State::Gone => {
            "backend gone: it ended unexpectedly, the guest stands still where it needs it"
        }
        State::Failed => "failed",
        State::Homing => "coming home, for a live detach",
        State::Released => "released: all of its memory is on this host again",
        State::Off => "no backend: shut off, or it does not use Outram",
    }
}

const HEADINGS: [&str; 7] = ["DOMAIN", "STATE", "RAM", "LIMIT", "LOCAL", "REMOTE", "LOST"];

/// All guests, a line each; what is wrong with one below it.
pub fn overview(reports: &[Report]) -> String {
    if reports.is_empty() {
        return "No domain has a backend.\n".to_owned();
    }
    let mut rows = vec![HEADINGS.map(str::to_owned)];
    rows.extend(reports.iter().map(row));
    let laid_out = table::lay_out(&rows);
    let mut text = String::new();
    for (index, line) in laid_out.lines().enumerate() {
        text.push_str(line);
        text.push('\n');
        if let Some(error) = index.checked_sub(1).and_then(|i| reports[i].error.as_ref()) {
            text.push_str(&format!("  {error}\n"));
        }
    }
    text
}

fn row(report: &Report) -> [String; 7] {
    let state = in_words(report.state);
    let state = state.split(':').next().unwrap_or(state).to_owned();
    let Some(status) = &report.status else {
        let none = || "-".to_owned();
        return [
            report.name.clone(),
            state,
            none(),
            none(),
            none(),
            none(),
            none(),
        ];
    };
    [
        report.name.clone(),
        state,
        format_size(status.ram_bytes),
        format_size(status.limit_bytes),
        format_size(status.local_bytes()),
        format_size(status.stored_bytes),
        format_size(status.lost_bytes),
    ]
}

/// One guest in detail.
pub fn details(report: &Report) -> String {
    let mut lines = Lines::default();
    lines.add("domain", &report.name);
    lines.add("uuid", &report.uuid);
    lines.add("state", in_words(report.state));
    if let Some(error) = &report.error {
        lines.add("reason", error);
    }
    if let Some(status) = &report.status {
        add_processes(&mut lines, status);
        add_memory(&mut lines, status);
        add_counters(&mut lines, status);
        for server in &status.servers {
            lines.add("server", &server_in_words(server));
        }
        if let Some(disk) = &status.disk {
            add_disk(&mut lines, disk);
        }
    }
    lines.0
}

/// Lines of a name and a value.
#[derive(Default)]
struct Lines(String);

impl Lines {
    fn add(&mut self, name: &str, value: &str) {
        self.0.push_str(&format!("{:<16}{value}\n", label(name)));
    }
}

/// A value's name; a value without one goes on from the line above.
fn label(name: &str) -> String {
    match name {
        "" => String::new(),
        name => format!("{name}:"),
    }
}

fn add_processes(lines: &mut Lines, status: &Status) {
    let qemu = status.qemu_pid.map_or_else(
        || "not connected".to_owned(),
        |pid| format!("process {pid}"),
    );
    lines.add(
        "backend",
        &format!(
            "process {}, version {}",
            status.backend_pid, status.backend_version
        ),
    );
    if status.takeovers > 0 {
        let times = match status.takeovers {
            1 => "once".to_owned(),
            times => format!("{times} times"),
        };
        let text = format!("{times}, from a process of the backend that had died: see its log");
        lines.add("taken over", &text);
    }
    lines.add("qemu", &qemu);
    lines.add(
        "sealed",
        match status.sealed {
            true => "yes, what leaves this host is encrypted",
            false => "no, memory servers and wires see the guest's memory",
        },
    );
    if let Some(handover) = &status.handover {
        lines.add("hand-over", handover);
    }
    add_identity(lines, &status.identity);
}

/// This host's certificate, where somebody has to look after it.
fn add_identity(lines: &mut Lines, identity: &IdentityStatus) {
    if let Some(expires) = identity.expires_unix_s.filter(|_| identity.expires_soon()) {
        lines.add("certificate", &expiry_in_words(expires));
    }
    if let Some(reason) = &identity.refused {
        let words = format!("NOT TAKEN as it is now, earlier ones are in use: {reason}");
        lines.add("certificate", &words);
    }
}

fn add_memory(lines: &mut Lines, status: &Status) {
    let size = format_size;
    lines.add("ram", &size(status.ram_bytes));
    lines.add(
        "limit",
        &format!("{} ({})", size(status.limit_bytes), status.limit),
    );
    if let Some(bytes) = status.granularity_bytes {
        lines.add("moved in", &size(bytes));
    }
    if let (Some(workers), Some(depth)) = (status.workers, status.queue_depth) {
        lines.add(
            "moved by",
            &format!("{workers} workers, queue depth {depth}"),
        );
    }
    let compressed = match status.compressed_share.unwrap_or_default() {
        share if share == CompressedShare::default() => String::new(),
        share => format!(
            ", {} of pages in {} compressed (up to {share} of the limit)",
            size(status.compressed_held_bytes),
            size(status.compressed_bytes)
        ),
    };
    lines.add(
        "local",
        &format!(
            "{} resident, {} staged{compressed}",
            size(status.resident_bytes),
            size(status.staged_bytes)
        ),
    );
    lines.add(
        "by the kernel",
        &format!(
            "{} in the memfd, {} staging, {} page table, {} backend",
            size(status.kernel_memfd_bytes),
            size(status.kernel_staging_bytes),
            size(status.kernel_table_bytes),
            size(status.kernel_anon_bytes)
        ),
    );
    lines.add(
        "elsewhere",
        &format!(
            "{} on memory servers, {} as same-filled pages",
            size(status.stored_bytes),
            size(status.filled_bytes)
        ),
    );
    if status.lost_bytes > 0 {
        lines.add("lost", &format!("{} for good", size(status.lost_bytes)));
    }
    if status.waiting_faults > 0 {
        lines.add(
            "waiting",
            &format!("{} faults right now", status.waiting_faults),
        );
    }
}

fn add_counters(lines: &mut Lines, status: &Status) {
    let c = &status.counters;
    lines.add(
        "faults",
        &format!(
            "{} zero, {} filled, {} staged, {} compressed, {} remote, {} protected, {} lost, {} poisoned",
            c.faults_zero,
            c.faults_filled,
            c.faults_staged,
            c.faults_compressed,
            c.faults_remote,
            c.faults_protected,
            c.faults_lost,
            c.faults_poisoned
        ),
    );
    for (kind, latency) in status.latency.iter().filter(|(_, l)| l.count > 0) {
        lines.add(
            &format!("  {kind}"),
            &format!(
                "{} µs median, {} µs p99, {} µs worst of {}",
                latency.us_p50, latency.us_p99, latency.us_max, latency.count
            ),
        );
    }
    lines.add(
        "evicted",
        &format!(
            "{} pages: {} unchanged, {} same-filled; {} faulted back soon",
            c.evicted_pages, c.evicted_clean_pages, c.evicted_filled_pages, c.refaults
        ),
    );
    lines.add(
        "fetched ahead",
        &format!(
            "{} pages; of those guessed, {} seen used and {} evicted unused",
            c.fetched_ahead_pages, c.fetched_ahead_used_pages, c.fetched_ahead_unused_pages
        ),
    );
    lines.add(
        "wire",
        &format!(
            "{} sent, {} received",
            format_size(c.wire_sent_bytes),
            format_size(c.wire_received_bytes)
        ),
    );
    let trouble = c.stalls_limit
        + c.stalls_pool
        + c.stalls_server
        + c.refused_reads
        + c.integrity_failures
        + c.stray_device_accesses;
    if trouble > 0 {
        lines.add(
            "trouble",
            &format!(
                "{} waits for room, {} waits for a huge page, {} waits for a server, {} reads refused, {} pages failed their check, {} stray device accesses",
                c.stalls_limit,
                c.stalls_pool,
                c.stalls_server,
                c.refused_reads,
                c.integrity_failures,
                c.stray_device_accesses
            ),
        );
    }
}

fn add_disk(lines: &mut Lines, disk: &DiskStatus) {
    let state = match disk.state {
        DiskState::Parked => "kept by its servers, not in use yet".to_owned(),
        DiskState::Open => format!(
            "{} stored in {} slabs",
            format_size(disk.stored_bytes),
            disk.leased_slabs
        ),
        DiskState::Claimed => "in use elsewhere".to_owned(),
        DiskState::Lost => "LOST, requests end in I/O errors".to_owned(),
    };
    let size = format_size(disk.size_bytes);
    lines.add("far disk", &format!("{size}, {state}"));
    lines.add(
        "",
        "volatile: emptied by shutdown, kept by save and migration",
    );
    if let Some(detail) = &disk.detail {
        lines.add("", detail);
    }
    lines.add(
        "  requests",
        &format!(
            "{} reads, {} writes, {} discards; {} failed, {} blocks came back changed",
            disk.reads, disk.writes, disk.discards, disk.errors, disk.integrity_failures
        ),
    );
}

fn server_in_words(server: &ServerStatus) -> String {
    let state = match (&server.detail, server.connected) {
        (_, true) => match &server.transport {
            Some(transport) => format!("connected, pages over {transport}"),
            None => "connected".to_owned(),
        },
        (Some(detail), false) => format!("out of reach ({detail})"),
        (None, false) => "out of reach".to_owned(),
    };
    format!(
        "{} {state}; {} slabs, {} stored of {} reserved",
        server.address,
        server.slabs,
        format_size(server.stored_bytes),
        format_size(server.reserved_bytes)
    )
}
