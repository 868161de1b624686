//! Backends that refuse to start: a status, one clear line, the reason where the hook finds it,
//! and nothing left mounted.

use std::fs;
use std::net::TcpListener;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::command::{COMMAND, Finished, run_within};

use crate::fixture::{Lab, demand_unmounted};

pub(crate) const TESTS: &[crate::Test] = &[
    ("no_server_or_none_in_reach_is_refused", out_of_reach),
    ("a_full_server_is_refused", full),
    ("one_server_under_two_names_is_refused", twice),
    ("certificates_of_strangers_are_refused", strangers),
    ("what_is_asked_wrongly_is_refused", wrong),
    ("who_cannot_serve_metrics_keeps_nothing", no_metrics),
];

const RAM: u64 = 64 << 20;

/// Runs a backend that is to refuse, with settings that come last.
fn refuse(lab: &Lab, uuid: &str, more: &[&str]) -> Result<Finished> {
    let mut arguments = vec!["run".to_owned()];
    let mut common = lab.backend_arguments(uuid, RAM);
    // A setting named again takes the place of the common one.
    for pair in more.chunks(2) {
        if let Some(at) = common.iter().position(|word| word == pair[0]) {
            common.drain(at..at + 2);
        }
    }
    arguments.extend(common);
    arguments.extend(more.iter().map(|&word| word.to_owned()));
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let program = lab.program("outram-backend")?.display().to_string();
    run_within(COMMAND, &program, &words)
}

/// Demands a refusal that says all of `words` in its one line, and what it leaves behind.
fn demand(lab: &Lab, more: &[&str], words: &[&str]) -> Result<()> {
    let uuid = lab.uuid();
    let ended = refuse(lab, &uuid, more)?;
    ensure!(
        ended.code == Some(1),
        "{more:?} ended with {:?}: {}",
        ended.code,
        ended.said()
    );
    let line = own_line(&ended).with_context(|| format!("no reason in: {}", ended.said()))?;
    for word in words {
        ensure!(line.contains(word), "'{word}' is not in: {line}");
    }
    let dir = lab.path("outram").join(&uuid);
    demand_unmounted(&dir)?;
    ensure!(!dir.join("vhost.sock").exists(), "a socket is left");
    let error = fs::read_to_string(dir.join("error")).unwrap_or_default();
    ensure!(
        line.strip_prefix("outram-backend: ") == error.strip_suffix('\n'),
        "'{error}' is not '{line}'"
    );
    Ok(())
}

fn own_line(ended: &Finished) -> Option<&str> {
    let mut lines = ended.stderr.lines();
    lines.rfind(|line| line.starts_with("outram-backend: "))
}

fn out_of_reach(lab: &Lab) -> Result<()> {
    demand(
        lab,
        &["--local-ratio", "0.5"],
        &["no memory server", "--server"],
    )?;
    let nobody = lab.address();
    demand(
        lab,
        &["--local-ratio", "0.5", "--server", &nobody],
        &[&nobody],
    )
}

fn full(lab: &Lab) -> Result<()> {
    let server = lab.server_with(&["--memory", "8MiB"])?;
    let address = server.address.clone();
    demand(
        lab,
        &["--local-ratio", "0.5", "--server", &address],
        &[&address],
    )?;
    ensure!(server.slabs_leased()? == 0, "it keeps what it was refused");
    Ok(())
}

fn twice(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let (address, other) = (
        &server.address,
        server.address.replace("127.0.0.1", "localhost"),
    );
    ensure!(*address != other, "it has one name: {address}");
    let both = [
        "--local-ratio",
        "0.5",
        "--server",
        address,
        "--server",
        &other,
    ];
    demand(lab, &both, &[address, &other, "the same memory server"])?;
    let metrics = server.metrics()?;
    ensure!(
        !metrics.contains("outram_memserver_client_reserved_bytes{"),
        "a session stays behind: {metrics}"
    );
    Ok(())
}

/// The address of its metrics is another's: neither its room nor its disk, which were made by then, stay behind.
fn no_metrics(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let address = &server.address;
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let metrics = taken.local_addr()?.to_string();
    let key = lab.path("disk-key-without-metrics");
    fs::write(&key, "5".repeat(64))?;
    let key = key.display().to_string();
    let wanted = [
        "--local-ratio",
        "0.5",
        "--server",
        address,
        "--metrics",
        &metrics,
        "--disk-size",
        "64MiB",
        "--disk-key-file",
        &key,
    ];
    demand(lab, &wanted, &[&metrics])?;
    let page = server.metrics()?;
    for kept in ["client", "disk"] {
        let sample = format!("outram_memserver_{kept}_reserved_bytes{{");
        ensure!(!page.contains(&sample), "a {kept}'s stays behind: {page}");
    }
    Ok(())
}

fn strangers(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let address = server.address.clone();
    let other = |file: &str| lab.path("other-pki").join(file).display().to_string();
    let base = ["--local-ratio", "0.5", "--server", &address];
    let foreign = [
        "--tls-cert",
        &other("client.pem"),
        "--tls-key",
        &other("client.key"),
    ];
    demand(
        lab,
        &[&base[..], &foreign].concat(),
        &["client.pem", "outram pki"],
    )?;
    // A CA that did not sign the server's.
    demand(
        lab,
        &[&base[..], &["--tls-ca", &other("ca.pem")]].concat(),
        &["other-pki/ca.pem", "outram pki"],
    )?;
    let missing = other("nobody.pem");
    demand(
        lab,
        &[&base[..], &["--tls-cert", &missing]].concat(),
        &["nobody.pem"],
    )
}

fn wrong(lab: &Lab) -> Result<()> {
    let server = lab.server()?;
    let address = server.address.clone();
    demand(
        lab,
        &["--local", "1MiB", "--server", &address],
        &["too small", "16 MiB"],
    )?;
    let uuid = lab.uuid();
    for ratio in ["0", "-1", "1.5", "NaN", "half"] {
        let ratio = format!("--local-ratio={ratio}");
        let ended = refuse(lab, &uuid, &["--server", &address, &ratio])?;
        ensure!(ended.code == Some(2), "{ratio}: {}", ended.said());
        ensure!(ended.stderr.contains("--local-ratio"), "{}", ended.said());
    }
    let config = lab.path("typo.toml");
    fs::write(&config, "\nsevrers = [\"127.0.0.1:1\"]")?;
    let path = config.display().to_string();
    let typo = ["--local-ratio", "0.5", "--config", &path];
    demand(
        lab,
        &typo,
        &[
            "typo.toml is not understood in line 2",
            "sevrers",
            "expected",
        ],
    )
}
