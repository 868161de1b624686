//! A second private machine beside the first, for guests to be migrated to: mounts, network and
//! libvirt of its own, joined to the first by one line.
//!
//! It is a process of the same program in further namespaces, which [`serve`]s until its standard
//! input ends.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::{Context, Result, ensure};

use super::command::run;
use super::host::{Host, PKI};
use super::place::Place;

/// Tells a process of ours that it is to be the neighbour; its value is the folder of images.
const NEIGHBOUR: &str = "OUTRAM_NEIGHBOUR";

/// The first machine on the line between the two.
pub const FIRST_ADDRESS: &str = "10.77.0.1";
/// The neighbour on that line.
pub const SECOND_ADDRESS: &str = "10.77.0.2";

const FIRST_END: &str = "line-a";
const SECOND_END: &str = "line-b";

/// The certificate that the neighbour's backends show.
const CERTIFICATE: &str = "neighbour";

/// A running neighbour.
#[derive(Debug)]
pub struct Neighbour {
    child: Child,
    /// The machine.
    pub place: Place,
    outram: String,
}

impl Neighbour {
    /// Starts one, with libvirt but without Outram. There can be one at a time.
    pub fn start(host: &Host, images: &Path) -> Result<Self> {
        let program = std::env::current_exe().context("this program's own path")?;
        let mut child = Command::new("unshare")
            .args(["--mount", "--net", "--uts", "--"])
            .arg(program)
            .env(NEIGHBOUR, images)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("unshare could not be run")?;
        let place = Place::of_process(child.id());
        let stdout = child.stdout.take().context("it is piped")?;
        let neighbour = Self {
            child,
            place,
            outram: host.program("outram")?,
        };
        let mut said = BufReader::new(stdout).lines();
        let mut await_word = |word: &str| -> Result<()> {
            let line = said.next().context("the neighbour ended")??;
            ensure!(line == word, "the neighbour said '{line}'");
            Ok(())
        };
        await_word("apart")?;
        neighbour.join()?;
        await_word("ready")?;
        Ok(neighbour)
    }

    /// Lays the line.
    fn join(&self) -> Result<()> {
        let pid = self.child.id().to_string();
        let address = format!("{FIRST_ADDRESS}/24");
        for arguments in [
            &[
                "link", "add", FIRST_END, "type", "veth", "peer", "name", SECOND_END, "netns", &pid,
            ][..],
            &["address", "add", &address, "dev", FIRST_END],
            &["link", "set", FIRST_END, "up"],
        ] {
            run("ip", arguments)?;
        }
        let mut stdin = self.child.stdin.as_ref().context("it is piped")?;
        writeln!(stdin, "joined").context("telling the neighbour")
    }

    /// Sets Outram up there, with a certificate of its own from the first machine's CA.
    pub fn set_up_outram(&self, host: &Host) -> Result<()> {
        self.place.run_ok(&self.outram, &["setup"])?;
        // An earlier test's neighbour had one, which serves as well.
        if !Path::new(PKI).join(format!("{CERTIFICATE}.pem")).exists() {
            host.outram_ok(&["pki", "issue", "client", CERTIFICATE])?;
        }
        for (from, to) in [
            ("ca.pem", "ca.pem"),
            (&format!("{CERTIFICATE}.pem"), "client.pem"),
            (&format!("{CERTIFICATE}.key"), "client.key"),
        ] {
            let to = self.place.path(Path::new(PKI).join(to));
            std::fs::copy(Path::new(PKI).join(from), &to)
                .with_context(|| format!("{from} to {}", to.display()))?;
        }
        Ok(())
    }

    /// Its libvirt as a client on the first machine names it.
    pub fn uri(&self) -> String {
        let socket = self.place.path("/run/libvirt/libvirt-sock");
        format!("qemu+unix:///system?socket={}", socket.display())
    }

    /// The first machine's libvirt as a client on any of them names it.
    pub fn first_uri() -> String {
        let socket = Place::of_process(std::process::id()).path("/run/libvirt/libvirt-sock");
        format!("qemu+unix:///system?socket={}", socket.display())
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        // The end of its standard input ends it.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
        let _ = run("ip", &["link", "delete", FIRST_END]);
    }
}

/// Serves as the neighbour, where that is what this process is for; to be called first in `main`.
pub fn serve() -> Option<ExitCode> {
    let images = PathBuf::from(std::env::var_os(NEIGHBOUR)?);
    Some(match be_neighbour(&images) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the neighbour failed: {error:#}");
            ExitCode::FAILURE
        }
    })
}

fn be_neighbour(images: &Path) -> Result<()> {
    println!("apart");
    std::io::stdin().read_line(&mut String::new())?;
    run("hostname", &["neighbour"])?;
    let address = format!("{SECOND_ADDRESS}/24");
    run("ip", &["address", "add", &address, "dev", SECOND_END])?;
    run("ip", &["link", "set", SECOND_END, "up"])?;
    let _host = Host::start_neighbour(images)?;
    println!("ready");
    // Until the first machine has no more need of it.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
