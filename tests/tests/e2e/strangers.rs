//! Point 7: whoever speaks nonsense to a control socket or a server hurts nobody.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use outram_tests::hermetic::guest::Spec;
use outram_wire::control::{CONTROL_VERSION, MAX_FRAME_BYTES, Phase, Reply, Request};
use outram_wire::control::{Envelope, read_frame, write_frame};
use outram_wire::units::{Limit, LocalRatio};

use crate::Test;
use crate::fixture::{LONG, Lab, RAM_MIB, demand_no_mismatch, power_off};

pub(crate) const TESTS: &[Test] = &[("strangers_hurt_nobody", strangers)];

/// Frames that no client of ours would send: their name, and their bytes.
fn nonsense() -> Vec<(&'static str, Vec<u8>)> {
    let framed = |body: &[u8]| {
        let mut frame = (body.len() as u32).to_le_bytes().to_vec();
        frame.extend_from_slice(body);
        frame
    };
    // Fixed seed: a failure can be repeated.
    let mut state = 0x5eed_u64;
    let random: Vec<u8> = (0..64 * 1024)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect();
    vec![
        ("nothing", Vec::new()),
        ("a truncated length", vec![1, 0]),
        ("a truncated frame", b"\xff\0\0\0{\"version\"".to_vec()),
        ("an oversized frame", u32::MAX.to_le_bytes().to_vec()),
        (
            "a frame just too long",
            (MAX_FRAME_BYTES as u32 + 1).to_le_bytes().to_vec(),
        ),
        ("no JSON", framed(b"\0\xff\xfe garbage")),
        ("other JSON", framed(b"[1,2,3]")),
        ("deeply nested JSON", framed("[".repeat(100_000).as_bytes())),
        (
            "another version",
            framed(b"{\"version\":4000000000,\"request\":\"status\"}"),
        ),
        (
            "an unknown request",
            framed(b"{\"version\":1,\"request\":\"self-destruct\"}"),
        ),
        (
            "a ratio out of range",
            framed(b"{\"version\":1,\"request\":{\"tune\":{\"local-ratio\":-7.0}}}"),
        ),
        ("random bytes", random),
    ]
}

fn strangers(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(
        Spec::new("strangers", RAM_MIB),
        &["--local-ratio", "0.3"],
        &server.address,
    )?;
    let mut console = guest.boot()?;
    console.ask("alloc 60", "ALLOCATED", LONG)?;
    console.ask("work 0", "WORKING", LONG)?;

    let control = guest.run_dir().join("control.sock");
    // Opened and never used: they must not keep others out.
    let idle: Vec<UnixStream> = (0..8)
        .map(|_| UnixStream::connect(&control))
        .collect::<Result<_, _>>()?;
    for (name, bytes) in nonsense() {
        let mut socket = UnixStream::connect(&control)?;
        send_and_hear(&mut socket, &bytes).with_context(|| format!("{name} to the backend"))?;
        let status = guest
            .status()
            .with_context(|| format!("after {name} the backend must answer others"))?;
        ensure!(status.phase == Phase::Serving, "after {name}: {status:?}");

        let mut socket = TcpStream::connect(&server.address)?;
        send_and_hear(&mut socket, &bytes).with_context(|| format!("{name} to the server"))?;
    }
    drop(idle);
    wrong_version_is_refused(&control)?;
    stop_is_refused_while_a_guest_depends(&guest)?;

    console.ask("halt", "HALTED", LONG)?;
    let report = console.ask("verify", "CHECKER", LONG)?;
    demand_no_mismatch(&console, &report)?;
    power_off(&guest, &mut console, &server)
}

/// Sends what the peer takes, and reads its answer if it gives one. That it closes is fine.
fn send_and_hear<S: Read + Write + Timed>(socket: &mut S, bytes: &[u8]) -> Result<()> {
    socket.time_out(Duration::from_millis(300))?;
    // The peer may have closed already: its right.
    let _ = socket.write_all(bytes);
    let mut answer = [0; 4096];
    let _ = socket.read(&mut answer);
    Ok(())
}

/// Sockets of both kinds.
trait Timed {
    fn time_out(&self, limit: Duration) -> std::io::Result<()>;
}

impl Timed for UnixStream {
    fn time_out(&self, limit: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }
}

impl Timed for TcpStream {
    fn time_out(&self, limit: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }
}

fn wrong_version_is_refused(control: &std::path::Path) -> Result<()> {
    let mut socket = UnixStream::connect(control)?;
    socket.time_out(Duration::from_secs(10))?;
    let envelope = Envelope {
        version: CONTROL_VERSION + 1,
        request: Request::Status,
    };
    write_frame(&mut socket, &envelope)?;
    let reply: Option<Reply> = read_frame(&mut socket)?;
    ensure!(
        matches!(&reply, Some(Reply::Refused(text)) if text.contains("version")),
        "another version must be refused in words, not by {reply:?}"
    );
    Ok(())
}

fn stop_is_refused_while_a_guest_depends(
    guest: &outram_tests::hermetic::guest::Guest,
) -> Result<()> {
    let reply = guest.control(Request::Stop)?;
    ensure!(
        matches!(reply, Reply::Refused(_)),
        "stopping under a running guest must be refused, not {reply:?}"
    );
    let too_small = LocalRatio::new(1e-9).context("a legal ratio")?;
    let reply = guest.control(Request::Tune(Limit::LocalRatio(too_small)))?;
    ensure!(
        matches!(reply, Reply::Refused(_)),
        "a limit too small to work with must be refused, not {reply:?}"
    );
    Ok(())
}
