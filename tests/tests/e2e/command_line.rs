//! The command line's live parts against a real guest: `outram top` on a terminal and through a pipe,
//! `status --watch`, completion of domains' names, and a domain as Nova generates it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use nix::pty::{Winsize, openpty};
use nix::sys::signal::Signal;
use outram_tests::hermetic::command::{run, wait_for};
use outram_tests::hermetic::guest::{Guest, Spec};
use outram_tests::hermetic::host::virsh_ok;

use crate::Test;
use crate::fixture::{LONG, Lab, RAM_MIB, SHORT, check, power_off, wait_under_limit};

pub(crate) const TESTS: &[Test] = &[
    ("top_shows_a_working_guest_on_a_terminal_and_in_a_pipe", top),
    ("bash_completes_the_names_of_domains", completion),
    ("output_that_nobody_takes_ends_no_command", unread),
    ("a_domain_of_nova_is_paged_after_the_filter", nova),
];

const ROWS: u16 = 20;
const COLUMNS: u16 = 150;

/// `outram top` on a pseudo-terminal, and what its screen shows.
struct Terminal {
    child: Child,
    keys: File,
    screen: Arc<Mutex<vt100::Parser>>,
}

impl Terminal {
    fn top(lab: &Lab) -> Result<Self> {
        let size = Winsize {
            ws_row: ROWS,
            ws_col: COLUMNS,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let pty = openpty(Some(&size), None).context("a pseudo-terminal")?;
        let end = |end: &OwnedFd| end.try_clone().map(Stdio::from);
        let child = Command::new(lab.host.program("outram")?)
            .args(["top", "--delay", "0.5"])
            .env("TERM", "xterm-256color")
            .env("LC_ALL", "C.UTF-8")
            .stdin(end(&pty.slave)?)
            .stdout(end(&pty.slave)?)
            .stderr(end(&pty.slave)?)
            .spawn()
            .context("outram top")?;
        drop(pty.slave);
        let screen = Arc::new(Mutex::new(vt100::Parser::new(ROWS, COLUMNS, 0)));
        let (mut output, shown) = (File::from(pty.master.try_clone()?), Arc::clone(&screen));
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // Reading fails once the other end is closed.
            while let Ok(read @ 1..) = output.read(&mut buffer) {
                let mut screen = shown.lock().unwrap_or_else(PoisonError::into_inner);
                screen.process(&buffer[..read]);
            }
        });
        let keys = File::from(pty.master);
        Ok(Self {
            child,
            keys,
            screen,
        })
    }

    fn shown(&self) -> String {
        let screen = self.screen.lock().unwrap_or_else(PoisonError::into_inner);
        screen.screen().contents()
    }

    /// Waits until the screen is as wanted.
    fn wait(&self, what: &str, wanted: impl Fn(&str) -> bool) -> Result<String> {
        wait_for(what, LONG, || {
            let shown = self.shown();
            Ok(wanted(&shown).then_some(shown))
        })
        .with_context(|| format!("the screen shows:\n{}", self.shown()))
    }

    fn press(&mut self, keys: &str) -> Result<()> {
        self.keys
            .write_all(keys.as_bytes())
            .context("pressing keys")
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // It has ended, or the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The cells of a guest's row: name, state, RAM, local… (sizes are two words).
fn row<'a>(shown: &'a str, name: &str) -> Vec<&'a str> {
    let line = shown.lines().find(|line| line.starts_with(name));
    line.unwrap_or_default().split_whitespace().collect()
}

fn top(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let guest = lab.attach(
        Spec::new("busy", RAM_MIB),
        &["--local-ratio", "0.3"],
        &server.address,
    )?;
    let mut console = guest.boot()?;
    console.ask("alloc 70", "ALLOCATED", LONG)?;
    console.ask("work 0", "WORKING", LONG)?;
    wait_under_limit(&guest)?;
    in_a_pipe(lab, guest.name())?;
    watched(lab, guest.name())?;

    let mut terminal = Terminal::top(lab)?;
    // Another guest's worth of RAM stands still: faults per second, a wait, a sparkline.
    let works = |shown: &str| {
        let row = row(shown, "busy");
        row.get(1) == Some(&"serving") && shown.contains('%') && shown.contains('█')
    };
    terminal.wait("the working guest", works)?;
    terminal.press("?")?;
    terminal.wait("the help", |shown| shown.contains("reverse the order"))?;
    terminal.press("x")?;
    terminal.press("n")?;
    terminal.wait("the order by name", |shown| shown.contains("sort: NAME"))?;

    server.signal(Signal::SIGSTOP)?;
    // A connection that says nothing is given up after a while: the guest stands still meanwhile.
    let waits = |shown: &str| {
        let share = row(shown, "busy")
            .into_iter()
            .find_map(|cell| cell.strip_suffix('%')?.parse::<f64>().ok());
        share.is_some_and(|share| share >= 90.0)
    };
    terminal.wait("the guest to wait", waits)?;
    server.signal(Signal::SIGCONT)?;
    terminal.press("q")?;
    wait_for("top to end", SHORT, || Ok(terminal.child.try_wait()?))?;
    drop(terminal);

    console.ask("halt", "HALTED", LONG)?;
    power_off(&guest, &mut console, &server)
}

/// Through a pipe there are plain reports, and no codes for a terminal.
fn in_a_pipe(lab: &Lab, name: &str) -> Result<()> {
    let said = lab.host.outram_ok(&["top", "--delay", "1", "-n", "2"])?;
    ensure!(!said.contains('\x1b'), "codes for a terminal: {said:?}");
    let rows: Vec<_> = said.lines().filter(|line| line.starts_with(name)).collect();
    ensure!(
        rows.len() == 2 && rows.iter().all(|row| row.contains("serving")),
        "two reports say: {said}"
    );
    ensure!(
        rows.iter().all(|row| row.contains('%')),
        "the first report has rates, too: {said}"
    );
    Ok(())
}

/// One report a line, until its reader has had enough.
fn watched(lab: &Lab, name: &str) -> Result<()> {
    let mut watch = Command::new(lab.host.program("outram")?)
        .args(["status", name, "--json", "--watch", "0.2"])
        .stdout(Stdio::piped())
        .spawn()?;
    let output = watch.stdout.take().context("its output")?;
    let lines: Vec<String> = BufReader::new(output)
        .lines()
        .take(3)
        .collect::<Result<_, _>>()?;
    // The pipe is closed now: it must end by itself, and quietly.
    let status = wait_for("status --watch to end", SHORT, || Ok(watch.try_wait()?))?;
    ensure!(status.success(), "it ended with {status}");
    ensure!(lines.len() == 3, "only {} reports came", lines.len());
    for line in lines {
        let report: serde_json::Value = serde_json::from_str(&line).context(line)?;
        ensure!(report["state"] == "serving", "the report says: {report}");
    }
    Ok(())
}

fn completion(lab: &Lab) -> Result<()> {
    let _guests = [
        Guest::define(Spec::new("offered-one", 64))?,
        Guest::define(Spec::new("offered-two", 64))?,
    ];
    let lines = "source <(outram completions bash)
        COMP_WORDS=(outram attach off); COMP_CWORD=2
        _clap_complete_outram outram off attach; printf '%s\\n' \"${COMPREPLY[@]}\"";
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("PATH={}:{path}", lab.host.programs().display());
    // Who completes a name waits a second for libvirt, and is offered nothing where that is late.
    wait_for("Bash to offer the domains", SHORT, || {
        let offered = run("env", &[&path, "bash", "-c", lines])?;
        let nothing = offered.trim().is_empty();
        ensure!(
            nothing || offered.lines().eq(["offered-one", "offered-two"]),
            "Bash offers: {offered}"
        );
        Ok((!nothing).then_some(()))
    })
}

/// What it says is lost; what it does is done.
fn unread(lab: &Lab) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let ca = folder.path().join("ca.pem");
    let full = || File::options().write(true).open("/dev/full");
    let made = Command::new(lab.host.program("outram")?)
        .args(["pki", "init", "--dir"])
        .arg(folder.path())
        .stdin(Stdio::null())
        .stdout(full()?)
        .stderr(full()?)
        .status()?;
    ensure!(made.success() && ca.exists(), "{made}");
    Ok(())
}

/// A domain with Nova's metadata, through the filter, as Nova would define it.
fn nova(lab: &Lab) -> Result<()> {
    let server = lab.server("1GiB")?;
    let mut spec = Spec::new("instance-0000002a", 256);
    spec.metadata = format!(
        "<nova:instance xmlns:nova='http://openstack.org/xmlns/libvirt/nova/1.1'>\
           <nova:flavor name='far.small'><nova:extraSpecs>\
             <nova:extraSpec name='outram:local'>0.5</nova:extraSpec>\
             <nova:extraSpec name='outram:servers'>{}</nova:extraSpec>\
           </nova:extraSpecs></nova:flavor>\
         </nova:instance>",
        server.address
    );
    let uuid = "6b1c2f0a-7a51-4d0e-9c1b-0d2f5a3e9b10";
    let name = "<name>instance-0000002a</name>";
    let before = spec
        .xml()
        .replace(name, &format!("{name}<uuid>{uuid}</uuid>"));
    fs::write("/run/nova-before.xml", before)?;
    let filter = lab.host.program("outram-nova-filter")?;
    let lines = "\"$0\" </run/nova-before.xml >/run/nova-after.xml";
    run("bash", &["-c", lines, &filter])?;
    virsh_ok(&["define", "--validate", "/run/nova-after.xml"])?;
    let guest = Guest::known(spec, uuid.to_owned());
    let mut console = guest.boot()?;
    check(&mut console, 60, 3)?;
    let status = wait_under_limit(&guest)?;
    ensure!(
        status.limit_bytes == 128 << 20 && status.counters.evicted_pages > 0,
        "the flavor's wish holds: {status:?}"
    );
    power_off(&guest, &mut console, &server)
}
