//! A guest: the small VMM and its backend.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outram_backend::crash_points::Point;
use outram_backend::engine::budget::Budget;
use outram_wire::control::{Phase, Reply, Request, Status};
use outram_wire::granularity::Granularity;
use outram_wire::limits::Sizes;
use outram_wire::lost_pages::LostPages;
use outram_wire::seal::Seal;
use outram_wire::tuning::Tuning;
use outram_wire::units::{Limit, PageSize};
use serde_json::{Value, json};

use super::backend::{spawn_backend, start_backend, tail};
use super::control::Control;
use super::{LEAST, LEAST_HUGE, LONG, Lab, PAGE, WHILE};
use crate::hermetic::command::{wait_answer, wait_for};
use crate::hermetic::server::MemServer;
use crate::small_vmm::client::{Plan, SmallVmm};

/// Pages that a vCPU writes or reads by one command: few enough to be there in time where each takes milliseconds.
const PART: u64 = 1_000;

/// Between two looks at a guest that is to have come to rest.
const BETWEEN_LOOKS: Duration = Duration::from_millis(5);

/// A guest as a test wants it.
#[derive(Clone, Debug)]
pub struct Wish<'a> {
    /// Sizes of its blocks of RAM in MiB.
    pub ram_mib: &'a [u64],
    /// vCPU threads.
    pub vcpus: usize,
    /// What it may cost at first.
    pub limit: u64,
    /// MiB that may be plugged into it.
    pub hot_plug_mib: u64,
    /// Addresses of its memory servers.
    pub servers: &'a [&'a str],
    /// Whether its RAM has huge pages, and then, whether all of them are populated at the start.
    pub huge: Option<bool>,
    /// Whether its pages are sealed.
    pub seal: Seal,
    /// What becomes of it where it uses a page that is lost.
    pub lost_pages: LostPages,
    /// Whether the VMM's command line asks for KVM.
    pub names_kvm: bool,
    /// Whether its pager has a supervisor, which starts it again.
    pub supervised: bool,
    /// MiB of its far-memory disk, if it is to have one.
    pub disk_mib: Option<u64>,
    /// Bytes that are moved together, where its backend is told how many.
    pub granularity: Option<u64>,
    /// The point at which its backend dies.
    pub dies_at: Option<Point>,
    /// Its host's settings, where they are not those of the lab.
    pub settings: Option<&'a Path>,
    /// Its backend's program, where that is not this build's.
    pub program: Option<&'a Path>,
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
            lost_pages: LostPages::Stop,
            names_kvm: false,
            supervised: false,
            disk_mib: None,
            granularity: None,
            dies_at: None,
            settings: None,
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

    fn page_size(&self) -> PageSize {
        self.huge.map_or(PageSize::BASE, |_| PageSize::HUGE)
    }
}

/// A guest with its backend. Both are ended when dropped.
pub struct Guest {
    /// The VMM.
    pub vmm: SmallVmm,
    backend: Child,
    /// Its run directory.
    pub dir: PathBuf,
    log: PathBuf,
    uuid: String,
    page_size: PageSize,
    pages: u64,
}

/// Starts a VMM with these blocks of RAM, whether or not its backend listens already.
fn start_vmm(lab: &Lab, uuid: &str, wish: &Wish<'_>, blocks: &[String]) -> Result<SmallVmm> {
    let blocks: Vec<&str> = blocks.iter().map(String::as_str).collect();
    SmallVmm::start(&Plan {
        program: &lab.program("small-vmm")?,
        ram: &blocks,
        socket: Some(&lab.path("outram").join(uuid).join("vhost.sock")),
        vcpus: wish.vcpus,
        names_kvm: wish.names_kvm,
        user: None,
    })
}

impl Guest {
    /// Starts backend and VMM; returns once the memory is handed over.
    pub fn start(lab: &Lab, wish: &Wish<'_>) -> Result<Self> {
        let (blocks, page_size) = wish.memory();
        Self::start_told(lab, wish, &blocks, page_size)
    }

    /// An ordinary guest of one memory server.
    pub fn start_on(lab: &Lab, server: &MemServer) -> Result<Self> {
        let wish = Wish {
            servers: &[&server.address],
            ..Wish::default()
        };
        Self::start(lab, &wish)
    }

    /// The same as [`Guest::start`] with blocks of RAM as given, and a backend that is told this size of pages.
    pub fn start_told(
        lab: &Lab,
        wish: &Wish<'_>,
        blocks: &[String],
        page_size: &str,
    ) -> Result<Self> {
        let uuid = lab.uuid();
        let (backend, log) = start_backend(lab, &uuid, wish, page_size)?;
        let mut guest = Self {
            vmm: start_vmm(lab, &uuid, wish, blocks)?,
            backend,
            dir: lab.path("outram").join(&uuid),
            log,
            uuid,
            page_size: wish.page_size(),
            pages: (wish.ram_mib.iter().sum::<u64>() << 20) / PAGE,
        };
        let connected = guest.vmm.wait_connected().map(drop);
        if connected.is_err() {
            // One that has refused its guest stays for a minute, for whoever asks why.
            let backend = Pid::from_raw(guest.backend.id() as i32);
            kill(backend, Signal::SIGTERM)?;
        }
        connected.with_context(|| guest.log())?;
        Ok(guest)
    }

    /// Starts the VMM, has it do something, and only then starts its backend: the memory is handed
    /// over while the vCPUs run.
    pub fn start_late(
        lab: &Lab,
        wish: &Wish<'_>,
        before: impl FnOnce(&mut SmallVmm) -> Result<()>,
    ) -> Result<Self> {
        let mut guest = Self::start_unconnected(lab, wish, before)?;
        guest.connect()?;
        Ok(guest)
    }

    /// The same, up to the moment when the VMM is to connect.
    pub fn start_unconnected(
        lab: &Lab,
        wish: &Wish<'_>,
        before: impl FnOnce(&mut SmallVmm) -> Result<()>,
    ) -> Result<Self> {
        let uuid = lab.uuid();
        let (blocks, page_size) = wish.memory();
        let mut vmm = start_vmm(lab, &uuid, wish, &blocks)?;
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
            page_size: wish.page_size(),
            pages: (wish.ram_mib.iter().sum::<u64>() << 20) / PAGE,
        })
    }

    /// Starts another backend for the same VMM, once the one before has ended.
    pub fn attach_again(&mut self, lab: &Lab, wish: &Wish<'_>) -> Result<()> {
        (self.backend, self.log) = start_backend(lab, &self.uuid, wish, wish.memory().1)?;
        self.connect()
    }

    /// Kills the backend (SIGKILL), whatever it is at.
    pub fn kill_backend(&mut self) -> Result<()> {
        self.backend.kill()?;
        self.backend.wait()?;
        Ok(())
    }

    /// The backend's first process: the supervisor, where there is one.
    pub fn backend(&mut self) -> &mut Child {
        &mut self.backend
    }

    /// Waits until the backend has died at its point.
    pub fn wait_death(&mut self) -> Result<()> {
        ensure!(self.dies_within(LONG)?, "it is never reached");
        Ok(())
    }

    /// Whether the backend dies at its point within a time. It must not end otherwise.
    pub fn dies_within(&mut self, limit: Duration) -> Result<bool> {
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
    pub fn spawn_backend_again(&mut self, lab: &Lab, wish: &Wish<'_>) -> Result<()> {
        (self.backend, self.log) = spawn_backend(lab, &self.uuid, wish, wish.memory().1)?;
        Ok(())
    }

    /// The same; returns once it serves the guest.
    pub fn take_over(&mut self, lab: &Lab, wish: &Wish<'_>) -> Result<()> {
        (self.backend, self.log) = start_backend(lab, &self.uuid, wish, wish.memory().1)?;
        self.wait_serving()
    }

    /// Waits until its backend serves it.
    pub fn wait_serving(&self) -> Result<()> {
        self.wait_status("the guest to be taken over", |status| {
            status.phase != Phase::Waiting
        })?;
        Ok(())
    }

    /// Pages of its RAM at the start.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Has the VMM connect its disk again.
    pub fn connect(&mut self) -> Result<()> {
        let connected = self.vmm.command(json!({"do": "connect"})).map(drop);
        connected.with_context(|| self.log())
    }

    /// The backend's process, of which the pager is a thread unless it is supervised.
    pub fn backend_pid(&self) -> u32 {
        self.backend.id()
    }

    /// Opens a connection for several questions.
    pub fn control(&self) -> Result<Control> {
        Control::open(&self.dir)
    }

    /// The end of the backend's log.
    pub fn log(&self) -> String {
        tail(&self.log)
    }

    /// Asks the backend something.
    pub fn ask(&self, request: Request) -> Result<Reply> {
        let answer = self.control().and_then(|mut control| control.ask(request));
        answer.with_context(|| format!("asking the backend:\n{}", self.log()))
    }

    /// How it is.
    pub fn status(&self) -> Result<Status> {
        match self.ask(Request::Status)? {
            Reply::Status(status) => Ok(*status),
            other => bail!("expected a status, not {other:?}"),
        }
    }

    /// Sets a limit in bytes.
    pub fn tune(&self, bytes: u64) -> Result<()> {
        self.order(Request::Tune(Limit::LocalBytes(bytes)))
    }

    /// Has its memory moved so.
    pub fn set_tuning(&self, tuning: Tuning) -> Result<()> {
        self.order(Request::SetTuning(tuning))
    }

    /// See [`Control::order`].
    fn order(&self, request: Request) -> Result<()> {
        let done = self
            .control()
            .and_then(|mut control| control.order(request));
        done.with_context(|| self.log())
    }

    /// Has so much of its memory moved at a time.
    pub fn set_granularity(&self, granularity: Granularity) -> Result<()> {
        self.set_tuning(Tuning {
            granularity: Some(granularity),
            ..Tuning::default()
        })
    }

    /// Waits until its status is as wanted.
    pub fn wait_status(&self, what: &str, wanted: impl Fn(&Status) -> bool) -> Result<Status> {
        self.wait_status_within(LONG, what, wanted)
    }

    /// The same for so long.
    pub fn wait_status_within(
        &self,
        limit: Duration,
        what: &str,
        wanted: impl Fn(&Status) -> bool,
    ) -> Result<Status> {
        wait_answer(what, limit, || self.status(), wanted).with_context(|| self.log())
    }

    /// Size of its pages in the kernel.
    pub fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// The smallest limit that it may have.
    pub fn least(&self) -> u64 {
        match self.page_size.is_huge() {
            true => LEAST_HUGE,
            false => LEAST,
        }
    }

    /// Tunes down to the least, and waits until it is reached by our count and the kernel's.
    pub fn squeeze(&self) -> Result<Status> {
        let least = self.least();
        self.tune(least)?;
        self.wait_status("the limit to be reached", |status| {
            let kernel = status.kernel_memfd_bytes + status.kernel_staging_bytes;
            status.limit_bytes == least && kernel <= least && status.local_bytes() <= least
        })
    }

    /// Waits until nothing is on its way to a server, nor about to be: who waited for a page goes on before its shard
    /// looks what has to leave for it.
    pub fn settle(&self) -> Result<Status> {
        let look_twice = || {
            let before = self.status()?;
            std::thread::sleep(BETWEEN_LOOKS);
            anyhow::Ok([before, self.status()?])
        };
        let is_idle = |status: &Status| status.staged_bytes == 0 && !self.is_pressed(status);
        let moved = |status: &Status| {
            let counters = &status.counters;
            (counters.evicted_pages, counters.writeback_pages)
        };
        let is_at_rest = |[before, now]: &[Status; 2]| {
            is_idle(before) && is_idle(now) && moved(before) == moved(now)
        };
        let looks = wait_answer("write-back to end", LONG, look_twice, is_at_rest);
        let [_, now] = looks.with_context(|| self.log())?;
        Ok(now)
    }

    /// Whether so much of it is resident that some has to leave.
    fn is_pressed(&self, status: &Status) -> bool {
        let sizes = Sizes::of(status.limit_bytes, status.ram_bytes, self.page_size);
        let budget = Budget::new(sizes.budget_pages, self.page_size);
        budget.force(status.resident_bytes / self.page_size.bytes());
        budget.is_pressed()
    }

    /// Sends a vCPU to work without waiting for it.
    pub fn send(&mut self, vcpu: usize, action: &str, more: Value) -> Result<u64> {
        self.vmm.send(merged(vcpu, action, more))
    }

    /// Has a vCPU do something and waits for its answer.
    pub fn command(&mut self, vcpu: usize, action: &str, more: Value) -> Result<Value> {
        let id = self.send(vcpu, action, more)?;
        self.answer(id)
    }

    /// Waits for an answer.
    pub fn answer(&mut self, id: u64) -> Result<Value> {
        let answer = self.vmm.wait(id, LONG);
        answer.with_context(|| format!("{:#?}\n{}", self.status(), self.log()))
    }

    /// Demands that a command is not answered: its thread waits in a fault.
    pub fn demand_silence(&mut self, id: u64) -> Result<()> {
        match self.vmm.wait(id, WHILE) {
            Ok(answer) => bail!("was answered: {answer}"),
            Err(_) => Ok(()),
        }
    }

    /// Writes every page of a stretch anew.
    pub fn fill(&mut self, page: u64, pages: u64) -> Result<()> {
        for (page, pages) in parts(page, pages) {
            self.command(0, "fill", json!({"page": page, "pages": pages}))?;
        }
        Ok(())
    }

    /// Reads every page of a stretch and demands that all are right.
    pub fn verify(&mut self, page: u64, pages: u64) -> Result<()> {
        for (page, pages) in parts(page, pages) {
            let found = self.command(0, "verify", json!({"page": page, "pages": pages}))?;
            demand_sound(&found)?;
            ensure!(found["checked"] == pages, "not all were checked: {found}");
        }
        Ok(())
    }

    /// Pages of a stretch that are in the memfd.
    pub fn present(&mut self, page: u64, pages: u64) -> Result<u64> {
        let found = self.command(0, "present", json!({"page": page, "pages": pages}))?;
        found["present"].as_u64().context("a number")
    }

    /// Waits for the backend's end; how it ended.
    pub fn wait_backend(&mut self) -> Result<ExitStatus> {
        let (backend, log) = (&mut self.backend, &self.log);
        wait_for("the backend to end", LONG, || Ok(backend.try_wait()?)).with_context(|| tail(log))
    }

    /// The VMM's end, after which nothing may be left: no fault that waits, no stray access, no
    /// slab at its servers, no directory.
    pub fn end(mut self, servers: &[&MemServer]) -> Result<()> {
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
    pub fn kill(&mut self, servers: &[&MemServer]) -> Result<()> {
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
        let ended = wait_for("the backend to end", LONG, || {
            Ok(self.backend.try_wait()?)
        });
        if ended.is_err() {
            let _ = self.backend.kill();
            let _ = self.backend.wait();
        }
    }
}

/// A stretch of pages in parts: the first page of each, and how many they are.
fn parts(page: u64, pages: u64) -> impl Iterator<Item = (u64, u64)> {
    let end = page + pages;
    let firsts = (page..end).step_by(PART as usize);
    firsts.map(move |first| (first, PART.min(end - first)))
}

fn merged(vcpu: usize, action: &str, mut command: Value) -> Value {
    command["do"] = Value::from(action);
    command["vcpu"] = Value::from(vcpu);
    command
}

/// Fails where a report has a page that was not as it should be.
pub fn demand_sound(report: &Value) -> Result<()> {
    for key in ["mismatches", "stale", "vanished"] {
        let count = report[key].as_u64().unwrap_or(0);
        ensure!(count == 0, "memory came back wrong: {report}");
    }
    Ok(())
}

/// Fails where something of a guest's directory is left, or something mounted in it.
pub fn demand_gone(dir: &Path) -> Result<()> {
    demand_unmounted(dir)?;
    ensure!(!dir.exists(), "{} is left behind", dir.display());
    Ok(())
}

/// Fails where something is mounted below a guest's directory.
pub fn demand_unmounted(dir: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let dir = dir.display().to_string();
    let mounted = mounts.lines().find(|line| line.contains(&dir));
    ensure!(mounted.is_none(), "still mounted: {mounted:?}");
    Ok(())
}
