//! A domain on the private host.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use outram_wire::control::{CONTROL_VERSION, Envelope, Reply, Request, Status};
use outram_wire::control::{read_frame, write_frame};

use super::command::{run, wait_answer, wait_for};
use super::console::Console;
use super::host::{Acceleration, IMAGES, ODD_RAM_EMULATOR, RUN, virsh_ok};
use super::place::Place;

/// Longest a guest may take to boot: 3 s alone, but hosts are shared and emulation is slow: two
/// minutes were seen with twenty processes at work on two cores.
pub const BOOT_LIMIT: Duration = Duration::from_secs(360);

/// Shorter than libvirt waits after its SIGTERM before it kills a QEMU for good, which is 10 s.
const UNFORCED: Duration = Duration::from_secs(9);

/// Has the kernel boot on its first processor; its init lets the others in.
///
/// QEMU 7.2's emulation reads the code that it translates before it watches it for stores: what one
/// processor stores meanwhile, others never run. While it boots, Linux changes much of its code, in steps
/// that begin with a breakpoint. One boot in 250 came to nothing, both processors for ever in the handler of
/// a breakpoint that guest RAM had no more; translated anew (the monitor's `singlestep on`), it went on. The
/// longer a fetch of code waits for its page, the more often that is.
const BOOTS_ALONE: &str = "maxcpus=1";

/// What kind of guest is wanted.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Its name; its UUID follows from libvirt.
    pub name: String,
    /// RAM in MiB.
    pub memory_mib: u64,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// What stands between `<vcpu>` and `<os>`: memory backing, NUMA…
    pub extra_elements: String,
    /// Further devices.
    pub extra_devices: String,
    /// Whether the balloon reports free pages.
    pub free_page_reporting: bool,
    /// Its initial file system, in [`IMAGES`].
    pub initrd: String,
    /// More of its kernel's command line.
    pub kernel_arguments: String,
    /// Contents of `<metadata>`, where the domain is written by hand.
    pub metadata: String,
    /// Whether it runs on while its memory is taken, whatever its emulator: one whose dirty pages are
    /// looked at one by one, for which it has 128 KiB less RAM. See [`emulator_loses_stores`].
    pub runs_while_taken: bool,
}

impl Spec {
    /// An ordinary guest.
    pub fn new(name: &str, memory_mib: u64) -> Self {
        Self {
            name: name.to_owned(),
            memory_mib,
            vcpus: 2,
            extra_elements: String::new(),
            extra_devices: String::new(),
            free_page_reporting: false,
            initrd: "initrd".to_owned(),
            kernel_arguments: String::new(),
            metadata: String::new(),
            runs_while_taken: false,
        }
    }

    /// The serial line's socket.
    pub fn serial_socket(&self) -> PathBuf {
        PathBuf::from(format!("/var/lib/libvirt/qemu/{}.serial", self.stem()))
    }

    /// Its name as a part of our own files' names: odd names may be too long, or worse.
    fn stem(&self) -> String {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        self.name.chars().filter(|c| plain(*c)).take(32).collect()
    }

    /// The domain as a user of libvirt would write it.
    pub fn xml(&self) -> String {
        let reporting = if self.free_page_reporting {
            " freePageReporting='on'"
        } else {
            ""
        };
        let emulator = match self.runs_while_taken {
            true => format!("<emulator>{ODD_RAM_EMULATOR}</emulator>"),
            false => String::new(),
        };
        format!(
            "<domain type='{kind}'>
  <name>{name}</name>
  <metadata>{metadata}</metadata>
  <memory unit='MiB'>{memory}</memory>
  <vcpu>{vcpus}</vcpu>
  {extra_elements}
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{IMAGES}/vmlinux</kernel>
    <initrd>{IMAGES}/{initrd}</initrd>
    <cmdline>console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off tsc=reliable memhp_default_state=online_movable {BOOTS_ALONE} {kernel_arguments}</cmdline>
  </os>
  <features><acpi/></features>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>restart</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    {emulator}
    <serial type='unix'>
      <source mode='bind' path='{serial}'/>
      <log file='/var/log/libvirt/qemu/{stem}-serial.log' append='on'/>
      <target port='0'/>
    </serial>
    <memballoon model='virtio'{reporting}/>
    {extra_devices}
  </devices>
</domain>
",
            kind = Acceleration::wanted().domain_type(),
            name = self.name.replace('&', "&amp;").replace('<', "&lt;"),
            stem = self.stem(),
            initrd = self.initrd,
            kernel_arguments = self.kernel_arguments,
            metadata = self.metadata,
            memory = self.memory_mib,
            vcpus = self.vcpus,
            extra_elements = self.extra_elements,
            serial = self.serial_socket().display(),
            extra_devices = self.extra_devices,
        )
    }
}

/// A defined domain; destroyed and undefined when dropped.
#[derive(Debug)]
pub struct Guest {
    /// How it was asked for.
    pub spec: Spec,
    /// Its UUID.
    pub uuid: String,
    /// The machine it is on.
    pub place: Place,
}

impl Guest {
    /// Defines the domain.
    pub fn define(spec: Spec) -> Result<Self> {
        let file = PathBuf::from(format!("/run/{}.xml", spec.stem()));
        fs::write(&file, spec.xml())?;
        virsh_ok(&["define", &file.display().to_string()])?;
        let uuid = virsh_ok(&["domuuid", &format!("--domain={}", spec.name)])?
            .trim()
            .to_owned();
        Ok(Self::known(spec, uuid))
    }

    /// A domain of this machine that somebody else defined.
    pub fn known(spec: Spec, uuid: String) -> Self {
        let place = Place::here();
        Self { spec, uuid, place }
    }

    /// The same guest as it is, or will be, on another machine.
    pub fn at(&self, place: &Place) -> Self {
        Self {
            spec: self.spec.clone(),
            uuid: self.uuid.clone(),
            place: place.clone(),
        }
    }

    /// The name it was defined with.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Starts it, and waits until its checker is ready.
    pub fn boot(&self) -> Result<Console> {
        self.place.virsh_ok(&["start", &self.uuid])?;
        self.console()
    }

    /// Connects to the running guest's serial line and waits until its checker answers.
    pub fn console(&self) -> Result<Console> {
        let mut console = Console::connect(&self.place.path(self.spec.serial_socket()))?;
        match greet(&mut console) {
            Ok(()) => Ok(console),
            // What went wrong comes first: the rest is long.
            Err(error) => Err(anyhow!("{error:#}\n{}", self.standing())),
        }
    }

    /// What it is at, for the message of a test that fails: its backend's status, and where each of QEMU's
    /// threads waits.
    fn standing(&self) -> String {
        let threads = || -> Result<String> {
            let show = "for task in /proc/$0/task/*; do \
                        grep -E '^(Name|State)|ctxt' $task/status; cat $task/stack; done";
            run("bash", &["-c", show, &self.qemu_pid()?.to_string()])
        };
        let threads = threads().unwrap_or_else(|error| format!("{error:#}"));
        format!("{:?}; QEMU's threads:\n{threads}", self.status())
    }

    /// libvirt's word for its state: `running`, `shut off`, `paused`…
    pub fn state(&self) -> Result<String> {
        Ok(self
            .place
            .virsh_ok(&["domstate", &self.uuid])?
            .trim()
            .to_owned())
    }

    /// Does what takes the guest's memory as it runs (a migration, a live snapshot), and demands
    /// that it run afterwards, where `after` is. The guest stands still meanwhile where its
    /// emulator would lose stores.
    pub fn taken_live<T>(&self, after: &Self, act: impl FnOnce() -> Result<T>) -> Result<T> {
        let still = !self.spec.runs_while_taken && emulator_loses_stores()?;
        if still {
            self.place.virsh_ok(&["suspend", &self.uuid])?;
        }
        let outcome = act()?;
        if still {
            after.place.virsh_ok(&["resume", &after.uuid])?;
        }
        after.wait_state("running", BOOT_LIMIT)?;
        Ok(outcome)
    }

    /// Waits for a state.
    pub fn wait_state(&self, state: &str, limit: Duration) -> Result<()> {
        wait_for(&format!("{} to be {state}", self.name()), limit, || {
            Ok((self.state()? == state).then_some(()))
        })
    }

    /// QEMU's process, as libvirt noted it.
    pub fn qemu_pid(&self) -> Result<u32> {
        let name = self.place.virsh_ok(&["domname", &self.uuid])?;
        let file = format!("/run/libvirt/qemu/{}.pid", name.trim_end());
        let text = fs::read_to_string(self.place.path(&file)).with_context(|| file.clone())?;
        text.trim().parse().with_context(|| file)
    }

    /// The run directory of its backend.
    pub fn run_dir(&self) -> PathBuf {
        self.place.path(Path::new(RUN).join(&self.uuid))
    }

    /// What its backend says of it.
    pub fn status(&self) -> Result<Status> {
        match self.control(Request::Status)? {
            Reply::Status(status) => Ok(*status),
            other => bail!("the backend answered a status request with {other:?}"),
        }
    }

    /// Its backend's metrics, as text.
    pub fn metrics(&self) -> Result<String> {
        match self.control(Request::Metrics)? {
            Reply::Metrics(text) => Ok(text),
            other => bail!("the backend answered a request for metrics with {other:?}"),
        }
    }

    /// What its backend says of it, if there is one that answers.
    pub fn status_if_any(&self) -> Option<Status> {
        self.status().ok()
    }

    /// Sends its backend one control message.
    pub fn control(&self, request: Request) -> Result<Reply> {
        let path = self.run_dir().join("control.sock");
        let mut socket = UnixStream::connect(&path).with_context(|| path.display().to_string())?;
        socket.set_read_timeout(Some(Duration::from_secs(60)))?;
        let envelope = Envelope {
            version: CONTROL_VERSION,
            request,
        };
        write_frame(&mut socket, &envelope)?;
        read_frame(&mut socket)?.context("the backend closed the control connection")
    }

    /// Waits until its status is as wanted.
    pub fn wait_status(
        &self,
        what: &str,
        limit: Duration,
        wanted: impl FnMut(&Status) -> bool,
    ) -> Result<Status> {
        wait_answer(what, limit, || self.status(), wanted)
    }

    /// Ends it; it must go by itself, whatever stands still.
    pub fn destroy(&self) -> Result<()> {
        let start = std::time::Instant::now();
        self.place.virsh_ok(&["destroy", &self.uuid])?;
        let took = start.elapsed();
        if took > UNFORCED {
            bail!("virsh destroy took {took:?}: libvirt had to kill QEMU by SIGKILL");
        }
        Ok(())
    }

    /// Waits until its backend has ended.
    pub fn wait_backend_gone(&self, limit: Duration) -> Result<()> {
        wait_for("the backend to end", limit, || {
            Ok(self.status_if_any().is_none().then_some(()))
        })
    }

    /// Waits until nothing is left of its backend, which answers nobody while it cleans up.
    pub fn wait_run_dir_gone(&self, limit: Duration) -> Result<()> {
        let dir = self.run_dir();
        wait_for(&format!("{} to be removed", dir.display()), limit, || {
            Ok((!dir.exists()).then_some(()))
        })
    }
}

/// Waits until the guest's checker answers on a new or reset line.
pub fn greet(console: &mut Console) -> Result<()> {
    let start = std::time::Instant::now();
    let mut asked = 0;
    loop {
        asked += 1;
        console.send(&format!("ping hello-{asked}"))?;
        // Before the checker reads, the kernel may echo or drop what is sent: ask again. An earlier
        // question's answer will do: where guests are slow, each takes longer than the wait.
        let answer = console.expect(&["PONG hello-"], Duration::from_secs(3));
        match answer {
            Ok(_) => break,
            Err(error) if start.elapsed() > BOOT_LIMIT => {
                return Err(error.context("the guest did not boot"));
            }
            Err(_) => {}
        }
    }
    // What is left of the other questions is answered before this one.
    console.send("ping settled")?;
    for _ in 0..asked {
        if console.expect(&["PONG settled"], BOOT_LIMIT).is_ok() {
            return Ok(());
        }
    }
    console
        .expect(&["PONG settled"], BOOT_LIMIT)
        .map(drop)
        .context("the guest does not answer any longer")
}

impl Drop for Guest {
    fn drop(&mut self) {
        // A domain that is off already refuses; the sandbox's end takes what is left.
        let _ = self.place.virsh(&["destroy", &self.uuid]);
        let _ = self.place.virsh(&["undefine", &self.uuid]);
    }
}

/// Whether QEMU sends stale pages of an *emulated* guest that stores while it is moved: before 9.0 it
/// takes 64 dirty bits at a time and leaves the emulator's TLB as it was, so that stores to those
/// pages go unnoticed (mended by QEMU's commit 03bfc2188f). Seen without Outram as well; under KVM
/// the kernel keeps the bits.
pub fn emulator_loses_stores() -> Result<bool> {
    if Acceleration::wanted() == Acceleration::Kvm {
        return Ok(false);
    }
    let said = run("qemu-system-x86_64", &["--version"])?;
    let major = said
        .split_once("version ")
        .and_then(|(_, version)| version.split_once('.'))
        .and_then(|(major, _)| major.parse::<u32>().ok())
        .with_context(|| format!("QEMU's version: {said}"))?;
    Ok(major < 9)
}
