//! What the tests share: certificates, memory servers, and guests with their backends.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use outram_backend::crash_points::Point;
use outram_tests::hermetic::command::{run, wait_for};
use outram_tests::hermetic::server::{Launch, MemServer};
use outram_tests::small_vmm::client::{Plan, SmallVmm};
use outram_wire::control::{
    CONTROL_VERSION, Envelope, Phase, Reply, Request, Status, read_frame, write_frame,
};
use outram_wire::pki::{self, Kind, Order};
use outram_wire::seal::Seal;
use outram_wire::units::Limit;
use serde_json::{Value, json};

/// The top of the source tree.
pub(crate) fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("."))
}

/// Everything lies on a tmpfs of the sandbox's own, and goes with it.
const ROOT: &str = "/run";

/// Bytes of a page.
pub(crate) const PAGE: u64 = 4096;

/// The smallest limit that is accepted, and what every test tunes down to.
pub(crate) const LEAST: u64 = 16 << 20;

/// The smallest limit of a guest with huge pages.
pub(crate) const LEAST_HUGE: u64 = 64 << 20;

/// Slabs so small that little memory makes many of them.
pub(crate) const SLAB: u64 = 1 << 20;

/// Long enough for anything that works at all on a loaded machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// In which nothing may happen, where nothing is to happen.
pub(crate) const WHILE: Duration = Duration::from_millis(700);

/// The sandbox's furniture.
pub(crate) struct Lab {
    programs: PathBuf,
    next_port: AtomicU16,
}

impl Lab {
    /// Makes the machine's state private and issues certificates. Call it once, in the sandbox.
    pub(crate) fn new() -> Result<Self> {
        run("ip", &["link", "set", "lo", "up"])?;
        run("mount", &["-t", "tmpfs", "-o", "mode=755", "tmpfs", ROOT])?;
        for folder in ["pki", "other-pki"] {
            certificates(&Path::new(ROOT).join(folder), &["127.0.0.1"])?;
        }
        // No settings of this machine's are to matter.
        fs::write(Path::new(ROOT).join("backend.toml"), "")?;
        let vmm = Path::new(env!("CARGO_BIN_EXE_small-vmm"));
        Ok(Self {
            programs: vmm.parent().context("a folder")?.to_owned(),
            next_port: AtomicU16::new(7100),
        })
    }

    /// Path of one of our programs.
    pub(crate) fn program(&self, name: &str) -> Result<PathBuf> {
        let path = self.programs.join(name);
        ensure!(
            path.is_file(),
            "{} is not built: run 'cargo build --workspace' first",
            path.display()
        );
        Ok(path)
    }

    /// An address that nobody else was given.
    pub(crate) fn address(&self) -> String {
        let port = self.next_port.fetch_add(1, Ordering::Relaxed);
        format!("127.0.0.1:{port}")
    }

    /// A file or folder of the lab.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        Path::new(ROOT).join(name)
    }

    /// A memory server that lends a GiB.
    pub(crate) fn server(&self) -> Result<MemServer> {
        self.server_with(&["--memory", "1GiB"])
    }

    /// A memory server with these arguments.
    pub(crate) fn server_with(&self, arguments: &[&str]) -> Result<MemServer> {
        self.server_of(SLAB, arguments)
    }

    /// A memory server with slabs of this size, and these arguments.
    pub(crate) fn server_of(&self, slab_bytes: u64, arguments: &[&str]) -> Result<MemServer> {
        self.server_by(self.program("outram-memserver")?, slab_bytes, arguments)
    }

    /// A memory server that is this program.
    pub(crate) fn server_by(
        &self,
        program: PathBuf,
        slab_bytes: u64,
        arguments: &[&str],
    ) -> Result<MemServer> {
        let address = self.address();
        MemServer::launch(Launch {
            program,
            metrics: self.address(),
            pki: self.path("pki"),
            log: self.path(&format!("memserver-{address}")),
            slab_bytes,
            arguments: arguments.iter().map(|&word| word.to_owned()).collect(),
            address,
        })
    }

    /// Arguments of a backend that every guest's has.
    pub(crate) fn backend_arguments(&self, uuid: &str, ram_bytes: u64) -> Vec<String> {
        let pki = |file: &str| self.path("pki").join(file).display().to_string();
        [
            ("--uuid", uuid.to_owned()),
            ("--name", "small".to_owned()),
            ("--ram", ram_bytes.to_string()),
            ("--config", self.path("backend.toml").display().to_string()),
            ("--run-dir", self.path("outram").display().to_string()),
            ("--tls-ca", pki("ca.pem")),
            ("--tls-cert", pki("client.pem")),
            ("--tls-key", pki("client.key")),
        ]
        .into_iter()
        .flat_map(|(flag, value)| [flag.to_owned(), value])
        .collect()
    }

    /// An UUID that nobody else was given.
    pub(crate) fn uuid(&self) -> String {
        let number = self.next_port.fetch_add(1, Ordering::Relaxed);
        format!("00000000-0000-4000-8000-{number:012}")
    }
}

/// Certificates of a server at these addresses, and of a client.
pub(crate) fn certificates(folder: &Path, addresses: &[&str]) -> Result<()> {
    pki::init(folder)?;
    let addresses = addresses
        .iter()
        .map(|&address| address.to_owned())
        .collect();
    for (kind, name, addresses) in [
        (Kind::Server, "memserver", addresses),
        (Kind::Client, "client", Vec::new()),
    ] {
        let order = Order {
            kind,
            name,
            addresses: &addresses,
            days: 2,
        };
        pki::issue(folder, &order)?;
    }
    Ok(())
}

/// A guest as a test wants it.
#[derive(Clone, Debug)]
pub(crate) struct Wish<'a> {
    /// Sizes of its blocks of RAM in MiB.
    pub(crate) ram_mib: &'a [u64],
    /// vCPU threads.
    pub(crate) vcpus: usize,
    /// What it may cost at first.
    pub(crate) limit: u64,
    /// MiB that may be plugged into it.
    pub(crate) hot_plug_mib: u64,
    /// Addresses of its memory servers.
    pub(crate) servers: &'a [&'a str],
    /// Whether its RAM has huge pages, and then, whether all of them are populated at the start.
    pub(crate) huge: Option<bool>,
    /// Whether its pages are sealed.
    pub(crate) seal: Seal,
    /// Whether its pager has a supervisor, which starts it again.
    pub(crate) supervised: bool,
    /// MiB of its far-memory disk, if it is to have one.
    pub(crate) disk_mib: Option<u64>,
    /// The point at which its backend dies.
    pub(crate) dies_at: Option<Point>,
    /// Its backend's program, where that is not this build's.
    pub(crate) program: Option<&'a Path>,
}

impl Default for Wish<'_> {
    fn default() -> Self {
        Self {
            ram_mib: &[64],
            vcpus: 3,
            limit: LEAST,
            hot_plug_mib: 0,
            servers: &[],
            huge: None,
            seal: Seal::On,
            supervised: false,
            disk_mib: None,
            dies_at: None,
            program: None,
        }
    }
}

impl Wish<'_> {
    /// The blocks as the VMM is told them, and the size of their pages as the backend is.
    fn memory(&self) -> (Vec<String>, &'static str) {
        let (kind, page_size) = match self.huge {
            None => ("", "4KiB"),
            Some(false) => (",hugetlb=on,hugetlbsize=2M", "2MiB"),
            Some(true) => (",hugetlb=on,hugetlbsize=2M,prealloc=on", "2MiB"),
        };
        let blocks = self.ram_mib.iter().map(|mib| format!("{mib}M{kind}"));
        (blocks.collect(), page_size)
    }
}

/// A guest with its backend. Both are ended when dropped.
pub(crate) struct Guest {
    /// The VMM.
    pub(crate) vmm: SmallVmm,
    backend: Child,
    /// Its run directory.
    pub(crate) dir: PathBuf,
    log: PathBuf,
    uuid: String,
    least: u64,
    pages: u64,
}

/// A connection to a backend's control socket.
pub(crate) struct Control(UnixStream);

impl Control {
    fn open(dir: &Path) -> Result<Self> {
        let stream = UnixStream::connect(dir.join("control.sock"))?;
        stream.set_read_timeout(Some(LONG))?;
        Ok(Self(stream))
    }

    /// Asks something.
    pub(crate) fn ask(&mut self, request: Request) -> Result<Reply> {
        let version = CONTROL_VERSION;
        write_frame(&mut self.0, &Envelope { version, request })?;
        read_frame(&mut self.0)?.context("the backend closed the connection")
    }

    /// Asks something that must be done.
    pub(crate) fn order(&mut self, request: Request) -> Result<()> {
        match self.ask(request)? {
            Reply::Done => Ok(()),
            other => bail!("not done: {other:?}"),
        }
    }

    /// How the guest is.
    pub(crate) fn status(&mut self) -> Result<Status> {
        match self.ask(Request::Status)? {
            Reply::Status(status) => Ok(*status),
            other => bail!("expected a status, not {other:?}"),
        }
    }
}

fn spawn_backend(
    lab: &Lab,
    uuid: &str,
    wish: &Wish<'_>,
    page_size: &str,
) -> Result<(Child, PathBuf)> {
    let ram_mib: u64 = wish.ram_mib.iter().sum();
    let mut arguments = lab.backend_arguments(uuid, ram_mib << 20);
    arguments.extend(["--local".to_owned(), wish.limit.to_string()]);
    let most = (ram_mib + wish.hot_plug_mib) << 20;
    arguments.extend(["--max-ram".to_owned(), most.to_string()]);
    arguments.extend(["--page-size".to_owned(), page_size.to_owned()]);
    arguments.extend(["--seal".to_owned(), wish.seal.to_string()]);
    for server in wish.servers {
        arguments.extend(["--server".to_owned(), (*server).to_owned()]);
    }
    if let Some(mib) = wish.disk_mib {
        let key = lab.path(&format!("disk-key-{uuid}"));
        arguments.extend(["--disk-size".to_owned(), format!("{mib}MiB")]);
        arguments.extend(["--disk-key-file".to_owned(), key.display().to_string()]);
        // Left once, as libvirt's hook does: a backend that is started again has to know it.
        let told = lab.path("outram").join(uuid).exists();
        if !told {
            fs::write(&key, "5".repeat(64))?;
        }
    }
    let log = lab.path(&format!("backend-{uuid}"));
    let file = File::options().create(true).append(true).open(&log)?;
    let mut backend = Command::new(match wish.program {
        Some(program) => program.to_owned(),
        None => lab.program("outram-backend")?,
    });
    if let Some(point) = wish.dies_at {
        backend.env("OUTRAM_CRASH_AT", point.name());
    }
    let backend = backend
        .arg(if wish.supervised { "run" } else { "page" })
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .spawn()?;
    Ok((backend, log))
}

/// Starts a backend and waits until it listens.
fn start_backend(
    lab: &Lab,
    uuid: &str,
    wish: &Wish<'_>,
    page_size: &str,
) -> Result<(Child, PathBuf)> {
    let (mut backend, log) = spawn_backend(lab, uuid, wish, page_size)?;
    let dir = lab.path("outram").join(uuid);
    let listening = wait_for("the backend to listen", LONG, || {
        if let Some(status) = backend.try_wait()? {
            bail!("the backend ended with {status}:\n{}", tail(&log));
        }
        // A killed one leaves its socket.
        let connected = UnixStream::connect(dir.join("control.sock"));
        Ok(connected.is_ok().then_some(()))
    });
    if let Err(error) = listening {
        let _ = backend.kill();
        let _ = backend.wait();
        return Err(error);
    }
    Ok((backend, log))
}

/// Starts a VMM with these blocks of RAM, whether or not its backend listens already.
fn start_vmm(lab: &Lab, uuid: &str, vcpus: usize, blocks: &[String]) -> Result<SmallVmm> {
    let blocks: Vec<&str> = blocks.iter().map(String::as_str).collect();
    SmallVmm::start(&Plan {
        program: &lab.program("small-vmm")?,
        ram: &blocks,
        socket: Some(&lab.path("outram").join(uuid).join("vhost.sock")),
        vcpus,
        user: None,
    })
}

impl Guest {
    /// Starts backend and VMM; returns once the memory is handed over.
    pub(crate) fn start(lab: &Lab, wish: &Wish<'_>) -> Result<Self> {
        let (blocks, page_size) = wish.memory();
        Self::start_told(lab, wish, &blocks, page_size)
    }

    /// An ordinary guest of one memory server.
    pub(crate) fn start_on(lab: &Lab, server: &MemServer) -> Result<Self> {
        let wish = Wish {
            servers: &[&server.address],
            ..Wish::default()
        };
        Self::start(lab, &wish)
    }

    /// The same as [`Guest::start`] with blocks of RAM as given, and a backend that is told this size of pages.
    pub(crate) fn start_told(
        lab: &Lab,
        wish: &Wish<'_>,
        blocks: &[String],
        page_size: &str,
    ) -> Result<Self> {
        let uuid = lab.uuid();
        let (backend, log) = start_backend(lab, &uuid, wish, page_size)?;
        let mut guest = Self {
            vmm: start_vmm(lab, &uuid, wish.vcpus, blocks)?,
            backend,
            dir: lab.path("outram").join(&uuid),
            log,
            uuid,
            least: wish.huge.map_or(LEAST, |_| LEAST_HUGE),
            pages: (wish.ram_mib.iter().sum::<u64>() << 20) / PAGE,
        };
        let connected = guest.vmm.wait_connected().map(drop);
        connected.with_context(|| guest.log())?;
        Ok(guest)
    }

    /// Starts the VMM, has it do something, and only then starts its backend: the memory is handed
    /// over while the vCPUs run.
    pub(crate) fn start_late(
        lab: &Lab,
        wish: &Wish<'_>,
        before: impl FnOnce(&mut SmallVmm) -> Result<()>,
    ) -> Result<Self> {
        let mut guest = Self::start_unconnected(lab, wish, before)?;
        guest.connect()?;
        Ok(guest)
    }

    /// The same, up to the moment when the VMM is to connect.
    pub(crate) fn start_unconnected(
        lab: &Lab,
        wish: &Wish<'_>,
        before: impl FnOnce(&mut SmallVmm) -> Result<()>,
    ) -> Result<Self> {
        let uuid = lab.uuid();
        let (blocks, page_size) = wish.memory();
        let mut vmm = start_vmm(lab, &uuid, wish.vcpus, &blocks)?;
        let early = vmm.wait_connected();
        ensure!(early.is_err(), "nobody listens yet: {early:?}");
        before(&mut vmm)?;
        let (backend, log) = start_backend(lab, &uuid, wish, page_size)?;
        Ok(Self {
            vmm,
            backend,
            dir: lab.path("outram").join(&uuid),
            log,
            uuid,
            least: wish.huge.map_or(LEAST, |_| LEAST_HUGE),
            pages: (wish.ram_mib.iter().sum::<u64>() << 20) / PAGE,
        })
    }

    /// Starts another backend for the same VMM, once the one before has ended.
    pub(crate) fn attach_again(&mut self, lab: &Lab, wish: &Wish<'_>) -> Result<()> {
        (self.backend, self.log) = start_backend(lab, &self.uuid, wish, wish.memory().1)?;
        self.connect()
    }

    /// Kills the backend (SIGKILL), whatever it is at.
    pub(crate) fn kill_backend(&mut self) -> Result<()> {
        self.backend.kill()?;
        self.backend.wait()?;
        Ok(())
    }

    /// The backend's first process: the supervisor, where there is one.
    pub(crate) fn backend(&mut self) -> &mut Child {
        &mut self.backend
    }

    /// Waits until the backend has died at its point.
    pub(crate) fn wait_death(&mut self) -> Result<()> {
        ensure!(self.dies_within(LONG)?, "it is never reached");
        Ok(())
    }

    /// Whether the backend dies at its point within a time. It must not end otherwise.
    pub(crate) fn dies_within(&mut self, limit: Duration) -> Result<bool> {
        let ended = wait_for("the backend to die", limit, || {
            Ok(self.backend.try_wait()?)
        });
        let Ok(status) = ended else {
            return Ok(false);
        };
        let signal = status.signal();
        let log = || self.log();
        ensure!(
            signal == Some(9),
            "the backend ended with {status}:\n{}",
            log()
        );
        Ok(true)
    }

    /// Starts a backend with the same arguments after the one before was killed. Returns at once.
    pub(crate) fn spawn_backend_again(&mut self, lab: &Lab, wish: &Wish<'_>) -> Result<()> {
        (self.backend, self.log) = spawn_backend(lab, &self.uuid, wish, wish.memory().1)?;
        Ok(())
    }

    /// The same; returns once it serves the guest.
    pub(crate) fn take_over(&mut self, lab: &Lab, wish: &Wish<'_>) -> Result<()> {
        (self.backend, self.log) = start_backend(lab, &self.uuid, wish, wish.memory().1)?;
        self.wait_serving()
    }

    /// Waits until its backend serves it.
    pub(crate) fn wait_serving(&self) -> Result<()> {
        self.wait_status("the guest to be taken over", |status| {
            status.phase != Phase::Waiting
        })?;
        Ok(())
    }

    /// Pages of its RAM at the start.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Has the VMM connect its disk again.
    pub(crate) fn connect(&mut self) -> Result<()> {
        let connected = self.vmm.command(json!({"do": "connect"})).map(drop);
        connected.with_context(|| self.log())
    }

    /// Opens a connection for several questions.
    pub(crate) fn control(&self) -> Result<Control> {
        Control::open(&self.dir)
    }

    /// The end of the backend's log.
    pub(crate) fn log(&self) -> String {
        tail(&self.log)
    }

    /// Asks the backend something.
    pub(crate) fn ask(&self, request: Request) -> Result<Reply> {
        let answer = self.control().and_then(|mut control| control.ask(request));
        answer.with_context(|| format!("asking the backend:\n{}", self.log()))
    }

    /// How it is.
    pub(crate) fn status(&self) -> Result<Status> {
        match self.ask(Request::Status)? {
            Reply::Status(status) => Ok(*status),
            other => bail!("expected a status, not {other:?}"),
        }
    }

    /// Sets a limit in bytes.
    pub(crate) fn tune(&self, bytes: u64) -> Result<()> {
        match self.ask(Request::Tune(Limit::LocalBytes(bytes)))? {
            Reply::Done => Ok(()),
            other => bail!("not tuned to {bytes}: {other:?}"),
        }
    }

    /// Waits until its status is as wanted.
    pub(crate) fn wait_status(
        &self,
        what: &str,
        wanted: impl Fn(&Status) -> bool,
    ) -> Result<Status> {
        let mut last = None;
        wait_for(what, LONG, || {
            let status = self.status()?;
            let is_wanted = wanted(&status);
            last = Some(status.clone());
            Ok(is_wanted.then_some(status))
        })
        .with_context(|| format!("{last:#?}\n{}", self.log()))
    }

    /// Tunes down to the least, and waits until it is reached by our count and the kernel's.
    pub(crate) fn squeeze(&self) -> Result<Status> {
        let least = self.least;
        self.tune(least)?;
        self.wait_status("the limit to be reached", |status| {
            let kernel = status.kernel_memfd_bytes + status.kernel_staging_bytes;
            let ours = status.resident_bytes + status.staged_bytes;
            status.limit_bytes == least && kernel <= least && ours <= least
        })
    }

    /// Waits until nothing is on its way to a server.
    pub(crate) fn settle(&self) -> Result<Status> {
        self.wait_status("write-back to end", |status| status.staged_bytes == 0)
    }

    /// Sends a vCPU to work without waiting for it.
    pub(crate) fn send(&mut self, vcpu: usize, action: &str, more: Value) -> Result<u64> {
        self.vmm.send(merged(vcpu, action, more))
    }

    /// Has a vCPU do something and waits for its answer.
    pub(crate) fn command(&mut self, vcpu: usize, action: &str, more: Value) -> Result<Value> {
        let id = self.send(vcpu, action, more)?;
        self.answer(id)
    }

    /// Waits for an answer.
    pub(crate) fn answer(&mut self, id: u64) -> Result<Value> {
        let answer = self.vmm.wait(id, LONG);
        answer.with_context(|| format!("{:#?}\n{}", self.status(), self.log()))
    }

    /// Demands that a command is not answered: its thread waits in a fault.
    pub(crate) fn demand_silence(&mut self, id: u64) -> Result<()> {
        match self.vmm.wait(id, WHILE) {
            Ok(answer) => bail!("was answered: {answer}"),
            Err(_) => Ok(()),
        }
    }

    /// Writes every page of a stretch anew.
    pub(crate) fn fill(&mut self, page: u64, pages: u64) -> Result<()> {
        self.command(0, "fill", json!({"page": page, "pages": pages}))?;
        Ok(())
    }

    /// Reads every page of a stretch and demands that all are right.
    pub(crate) fn verify(&mut self, page: u64, pages: u64) -> Result<()> {
        let found = self.command(0, "verify", json!({"page": page, "pages": pages}))?;
        demand_sound(&found)?;
        ensure!(found["checked"] == pages, "not all were checked: {found}");
        Ok(())
    }

    /// Pages of a stretch that are in the memfd.
    pub(crate) fn present(&mut self, page: u64, pages: u64) -> Result<u64> {
        let found = self.command(0, "present", json!({"page": page, "pages": pages}))?;
        found["present"].as_u64().context("a number")
    }

    /// Waits for the backend's end; how it ended.
    pub(crate) fn wait_backend(&mut self) -> Result<ExitStatus> {
        let (backend, log) = (&mut self.backend, &self.log);
        wait_for("the backend to end", LONG, || Ok(backend.try_wait()?)).with_context(|| tail(log))
    }

    /// The VMM's end, after which nothing may be left: no fault that waits, no stray access, no
    /// slab at its servers, no directory.
    pub(crate) fn end(mut self, servers: &[&MemServer]) -> Result<()> {
        let status = self.wait_status("all faults to be answered", |status| {
            status.waiting_faults == 0
        })?;
        let counters = &status.counters;
        ensure!(counters.integrity_failures == 0, "{status:#?}");
        ensure!(counters.stray_device_accesses == 0, "{status:#?}");
        ensure!(status.lost_bytes == 0, "{status:#?}");
        ensure!(status.phase == Phase::Serving, "{status:#?}");
        self.kill(servers)
    }

    /// Kills the VMM (SIGKILL); its backend has to end well and leave nothing.
    pub(crate) fn kill(&mut self, servers: &[&MemServer]) -> Result<()> {
        self.vmm.kill()?;
        let status = self.wait_backend()?;
        ensure!(
            status.success(),
            "the backend ended with {status}:\n{}",
            self.log()
        );
        let log = fs::read_to_string(&self.log)?;
        ensure!(!log.contains("panicked"), "a thread panicked:\n{log}");
        demand_gone(&self.dir)?;
        for server in servers {
            let held = || Ok((server.slabs_leased()? == 0).then_some(()));
            wait_for("the server to get its slabs back", LONG, held)?;
        }
        Ok(())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // The backend first would leave its guest with memory that nobody serves.
        let _ = self.vmm.kill();
        let ended = wait_for("the backend to end", Duration::from_secs(10), || {
            Ok(self.backend.try_wait()?)
        });
        if ended.is_err() {
            let _ = self.backend.kill();
            let _ = self.backend.wait();
        }
    }
}

fn merged(vcpu: usize, action: &str, mut command: Value) -> Value {
    command["do"] = Value::from(action);
    command["vcpu"] = Value::from(vcpu);
    command
}

/// How long the guest stood still, time by time.
#[derive(Default)]
pub(crate) struct Stalls(pub(crate) Vec<Duration>);

impl std::fmt::Display for Stalls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let of = |percent: usize| match sorted.len() {
            0 => 0,
            length => sorted[(length * percent / 100).min(length - 1)].as_millis(),
        };
        write!(
            f,
            "p50 {} ms, p99 {} ms, most {} ms",
            of(50),
            of(99),
            of(100)
        )
    }
}

/// Stops a memory server with SIGSTOP; returns once all of its threads stand still.
pub(crate) fn halt(server: &MemServer) -> Result<()> {
    server.signal(Signal::SIGSTOP)?;
    let tasks = format!("/proc/{}/task", server.pid());
    wait_for("the memory server to stop", LONG, || {
        for task in fs::read_dir(&tasks)? {
            let stat = fs::read_to_string(task?.path().join("stat"))?;
            let (_, rest) = stat.rsplit_once(") ").context("a name")?;
            if !rest.starts_with('T') {
                return Ok(None);
            }
        }
        Ok(Some(()))
    })
}

/// Fails where a report has a page that was not as it should be.
pub(crate) fn demand_sound(report: &Value) -> Result<()> {
    for key in ["mismatches", "stale", "vanished"] {
        let count = report[key].as_u64().unwrap_or(0);
        ensure!(count == 0, "memory came back wrong: {report}");
    }
    Ok(())
}

/// Fails where something of a guest's directory is left, or something mounted in it.
pub(crate) fn demand_gone(dir: &Path) -> Result<()> {
    demand_unmounted(dir)?;
    ensure!(!dir.exists(), "{} is left behind", dir.display());
    Ok(())
}

/// Fails where something is mounted below a guest's directory.
pub(crate) fn demand_unmounted(dir: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let dir = dir.display().to_string();
    let mounted = mounts.lines().find(|line| line.contains(&dir));
    ensure!(mounted.is_none(), "still mounted: {mounted:?}");
    Ok(())
}

fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let first = lines.len().saturating_sub(40);
    format!("its log ends with:\n{}", lines[first..].join("\n"))
}
