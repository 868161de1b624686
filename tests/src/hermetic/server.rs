//! A memory server process, on the private host or wherever a test says.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::command::{COMMAND, wait_for};
use super::host::{Host, PKI};

/// Log of servers on the private host.
const LOG: &str = "/var/log/libvirt/memserver.out";

/// How a memory server is started.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The program.
    pub program: PathBuf,
    /// Where it listens.
    pub address: String,
    /// Where it answers scrapers.
    pub metrics: String,
    /// Folder of `ca.pem`, `memserver.pem` and `memserver.key`.
    pub pki: PathBuf,
    /// Where its log goes.
    pub log: PathBuf,
    /// Bytes of its slabs.
    pub slab_bytes: u64,
    /// Further arguments.
    pub arguments: Vec<String>,
}

impl Launch {
    /// At an address of the private host.
    fn at(host: &Host, address: &str, memory: &str, slab_mib: u64) -> Result<Self> {
        Ok(Self {
            program: host.program("outram-memserver")?.into(),
            address: format!("{address}:{}", host.port()),
            metrics: format!("127.0.0.1:{}", host.port()),
            pki: PKI.into(),
            log: LOG.into(),
            slab_bytes: slab_mib << 20,
            arguments: vec!["--memory".to_owned(), memory.to_owned()],
        })
    }
}

/// A running `outram-memserver`; killed when dropped.
#[derive(Debug)]
pub struct MemServer {
    program: PathBuf,
    arguments: Vec<String>,
    log: PathBuf,
    child: Child,
    /// Where it listens.
    pub address: String,
    metrics: String,
    slab_bytes: u64,
}

impl MemServer {
    /// Starts one that lends at most `memory`, in slabs of `slab_mib`.
    pub fn start(host: &Host, memory: &str, slab_mib: u64) -> Result<Self> {
        Self::start_at(host, "127.0.0.1", memory, slab_mib)
    }

    /// The same at an address of the private host, for others to reach it.
    pub fn start_at(host: &Host, address: &str, memory: &str, slab_mib: u64) -> Result<Self> {
        Self::launch(Launch::at(host, address, memory, slab_mib)?)
    }

    /// One that takes back after `lease_timeout` what clients left without a word.
    pub fn start_with_lease(host: &Host, memory: &str, lease_timeout: &str) -> Result<Self> {
        let mut launch = Launch::at(host, "127.0.0.1", memory, 4)?;
        let lease = ["--lease-timeout".to_owned(), lease_timeout.to_owned()];
        launch.arguments.extend(lease);
        Self::launch(launch)
    }

    /// Starts one.
    pub fn launch(launch: Launch) -> Result<Self> {
        let mut arguments = launch.arguments;
        let pki = |file: &str| launch.pki.join(file).display().to_string();
        for (flag, value) in [
            ("--listen", launch.address.clone()),
            ("--metrics", launch.metrics.clone()),
            ("--tls-ca", pki("ca.pem")),
            ("--tls-cert", pki("memserver.pem")),
            ("--tls-key", pki("memserver.key")),
            ("--slab-size", launch.slab_bytes.to_string()),
        ] {
            arguments.extend([flag.to_owned(), value]);
        }
        let child = spawn(&launch.program, &arguments, &launch.log)?;
        let mut server = Self {
            program: launch.program,
            arguments,
            log: launch.log,
            child,
            address: launch.address,
            metrics: launch.metrics,
            slab_bytes: launch.slab_bytes,
        };
        server.wait_ready()?;
        Ok(server)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(self.child.id() as i32), signal)
            .with_context(|| format!("{signal} to the memory server"))
    }

    /// Ends it without warning, as a power cut would.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().context("killing the memory server")?;
        self.child.wait().context("reaping the memory server")?;
        Ok(())
    }

    /// Starts it again, empty, at the same address.
    pub fn start_again(&mut self) -> Result<()> {
        self.child = spawn(&self.program, &self.arguments, &self.log)?;
        self.wait_ready()
    }

    /// Asks it to end, and waits for its exit status.
    pub fn terminate(&mut self) -> Result<Option<i32>> {
        self.signal(Signal::SIGTERM)?;
        let child = &mut self.child;
        let status = wait_for("the memory server to end", Duration::from_secs(15), || {
            Ok(child.try_wait()?)
        })?;
        Ok(status.code())
    }

    /// Its metrics as text.
    pub fn metrics(&self) -> Result<String> {
        scrape(&self.metrics)
    }

    /// Sum of the samples of one metric.
    pub fn metric(&self, name: &str) -> Result<u64> {
        Ok(sample(&self.metrics, name)? as u64)
    }

    /// Processor time that it has had, by its own count.
    pub fn cpu(&self) -> Result<Duration> {
        let seconds = sample(&self.metrics, "outram_memserver_cpu_seconds_total")?;
        Ok(Duration::from_secs_f64(seconds))
    }

    /// Slabs that clients hold, by the server's own count.
    pub fn slabs_leased(&self) -> Result<u64> {
        Ok(self.bytes_leased()? / self.slab_bytes)
    }

    /// Bytes of those slabs.
    pub fn bytes_leased(&self) -> Result<u64> {
        self.metric("outram_memserver_leased_bytes")
    }

    fn wait_ready(&mut self) -> Result<()> {
        let (child, log) = (&mut self.child, &self.log);
        let listens = |address: &str| TcpStream::connect(address).is_ok();
        wait_for("the memory server to listen", COMMAND, || {
            if let Some(status) = child.try_wait()? {
                bail!(
                    "the memory server ended with {status}; see {}",
                    log.display()
                );
            }
            // Scrapers are answered after clients are.
            let is_ready = listens(&self.address) && listens(&self.metrics);
            Ok(is_ready.then_some(()))
        })
    }
}

impl Drop for MemServer {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(program: &Path, arguments: &[String], log: &Path) -> Result<Child> {
    let log = File::options()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| log.display().to_string())?;
    Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("{} could not be run", program.display()))
}

/// Attempts to read the metrics: a scraper that stands still for seconds is left without an answer.
const ATTEMPTS: usize = 5;

/// What is answered to scrapers at `address`.
fn scrape(address: &str) -> Result<String> {
    let mut last = String::new();
    for _ in 0..ATTEMPTS {
        let mut socket =
            TcpStream::connect(address).with_context(|| format!("metrics at {address}"))?;
        socket.set_read_timeout(Some(Duration::from_secs(60)))?;
        last = match ask(&mut socket, address) {
            Ok(answer) => answer,
            Err(error) if has_hung_up(&error) => continue,
            Err(error) => return Err(error.into()),
        };
        if let Some((_, body)) = last.split_once("\r\n\r\n") {
            return Ok(body.to_owned());
        }
    }
    bail!("no HTTP answer from the metrics address: {last}");
}

fn ask(socket: &mut TcpStream, address: &str) -> io::Result<String> {
    let request = format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes())?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    Ok(answer)
}

fn has_hung_up(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    matches!(error.kind(), BrokenPipe | ConnectionReset)
}

/// Sum of the samples of one metric of the server that answers scrapers at `address`.
pub fn sample(address: &str, name: &str) -> Result<f64> {
    let text = scrape(address)?;
    sum_samples(&text, name).with_context(|| format!("no metric {name} in:\n{text}"))
}

/// Adds up a metric's samples over all labels; `None` where there is none.
fn sum_samples(text: &str, name: &str) -> Option<f64> {
    let values: Vec<f64> = text
        .lines()
        .filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let value = match rest.strip_prefix('{') {
                Some(labels) => labels.rsplit_once("} ")?.1,
                None => rest.strip_prefix(' ')?,
            };
            value.split_whitespace().next()?.parse().ok()
        })
        .collect();
    (!values.is_empty()).then(|| values.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::sum_samples;

    #[test]
    fn samples_are_summed_over_labels() {
        let text = "# HELP a x\na{vm=\"1\"} 3\na{vm=\"2\"} 4\nab 9\nc 1e3\n";
        assert_eq!(sum_samples(text, "a"), Some(7.0));
        assert_eq!(sum_samples(text, "c"), Some(1000.0));
        assert_eq!(sum_samples(text, "missing"), None);
    }
}
