//! What the tests share: canonical XML, golden files, and the run directory used in domains.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use outram_libvirt::attachment::{self, AttachRequest};
use outram_libvirt::domain_xml::DomainXml;
use outram_wire::control::{Counters, Phase, Status};
use outram_wire::tuning::Tuning;
use outram_wire::units::{Limit, VmId};
use rustix::fs::{FlockOperation, flock};
use xot::{Node, Xot};

/// The run directory that golden domains name.
pub(crate) const RUN: &str = "/run/outram";

/// The golden domains: as virt-install, virt-manager and Nova write them, and by hand.
pub(crate) const DOMAINS: [&str; 8] = [
    "virt-install",
    "virt-manager",
    "nova-plain",
    "numa",
    "tuned",
    "i440fx",
    "backed",
    "odd",
];

/// Has a run directory, which is there, look as one that a supervisor is at work in until this is dropped.
pub(crate) fn supervised(run_dir: &Path) -> File {
    let file = File::open(run_dir).expect("it is there");
    flock(&file, FlockOperation::LockExclusive).expect("nobody else has it");
    file
}

/// A file of `tests/golden`.
pub(crate) fn golden_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name)
}

/// The text of a golden file.
pub(crate) fn golden(name: &str) -> String {
    let path = golden_path(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Compares with a golden file; `UPDATE_GOLDEN=1` writes it anew, for a look at the difference.
pub(crate) fn assert_golden(name: &str, text: &str) {
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(golden_path(name), text).expect("the golden file is written");
    }
    let expected = golden(name);
    assert!(
        expected == text,
        "{name} differs; expected:\n{expected}\nfound:\n{text}"
    );
}

/// To attach with a limit and servers, and with nothing else said.
pub(crate) fn request(limit: Limit, servers: &[&str]) -> AttachRequest {
    let servers = servers.iter();
    AttachRequest {
        limit,
        servers: servers
            .map(|server| server.parse().expect("an address"))
            .collect(),
        seal: None,
        lost_pages: None,
        tuning: Tuning::default(),
        disk: Default::default(),
    }
}

/// To attach with 1 GiB and one server.
pub(crate) fn plain_request() -> AttachRequest {
    request(Limit::LocalBytes(1 << 30), &["10.0.0.2:7741"])
}

/// A golden domain, attached so.
pub(crate) fn attached(name: &str) -> String {
    let mut domain = DomainXml::parse(&golden(name)).expect("a domain");
    attachment::attach(&mut domain, Path::new(RUN), &plain_request()).expect("attached");
    domain.to_text().expect("text")
}

/// XML in one form: attributes sorted, one element a line, white space between elements dropped,
/// prefixes replaced by namespaces.
pub(crate) fn canonical(xml: &str) -> String {
    let mut xot = Xot::new();
    let document = xot.parse(xml).expect("well-formed XML");
    let mut text = String::new();
    write_canonical(&xot, document, 0, &mut text);
    text
}

fn write_canonical(xot: &Xot, node: Node, depth: usize, text: &mut String) {
    let indent = "  ".repeat(depth);
    if xot.is_document(node) {
        for child in xot.children(node) {
            write_canonical(xot, child, depth, text);
        }
    } else if let Some(name) = xot.node_name(node).filter(|_| xot.is_element(node)) {
        let full = |id| {
            let (local, namespace) = xot.name_ns_str(id);
            if namespace.is_empty() {
                local.to_owned()
            } else {
                format!("{{{namespace}}}{local}")
            }
        };
        let mut attributes: Vec<String> = xot
            .attributes(node)
            .iter()
            .map(|(id, value)| format!(" {}={value:?}", full(id)))
            .collect();
        attributes.sort();
        text.push_str(&format!("{indent}{}{}\n", full(name), attributes.concat()));
        for child in xot.children(node) {
            write_canonical(xot, child, depth + 1, text);
        }
    } else if let Some(content) = xot.text_str(node) {
        if !content.trim().is_empty() {
            text.push_str(&format!("{indent}{content:?}\n"));
        }
    } else if let Some(comment) = xot.comment_str(node) {
        text.push_str(&format!("{indent}#{comment:?}\n"));
    }
}

/// A status with made-up figures.
pub(crate) fn status(name: &str, vm: VmId, limit: Limit) -> Status {
    Status {
        vm,
        name: name.to_owned(),
        backend_version: "0.1.0".to_owned(),
        backend_pid: std::process::id(),
        takeovers: 0,
        qemu_pid: None,
        phase: Phase::Waiting,
        detail: None,
        identity: Default::default(),
        sealed: true,
        handover: None,
        ram_bytes: 64 << 20,
        limit,
        limit_bytes: limit.bytes(64 << 20),
        granularity_bytes: Some(4096),
        workers: "2".parse().ok(),
        queue_depth: "8".parse().ok(),
        compressed_share: "0.2".parse().ok(),
        compressed_bytes: 4 << 20,
        compressed_held_bytes: 11 << 20,
        resident_bytes: 24 << 20,
        staged_bytes: 2 << 20,
        stored_bytes: 30 << 20,
        filled_bytes: 3 << 20,
        lost_bytes: 0,
        homing: None,
        unmanaged_bytes: 0,
        waiting_faults: 0,
        kernel_memfd_bytes: 24 << 20,
        kernel_staging_bytes: 4 << 20,
        kernel_table_bytes: 512 << 10,
        kernel_anon_bytes: 5 << 20,
        fixed_anon_bytes: 64 << 20,
        headroom_bytes: 8 << 20,
        counters: Counters::default(),
        latency: BTreeMap::new(),
        servers: Vec::new(),
        disk: None,
    }
}
