//! The hand-over against real processes: the small VMM and QEMU. Needs root, as the backend does.

mod small;

use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use outram_backend::handover::discover::{Refusal, guest_ram};
use outram_backend::handover::{HandoverError, Options, Vmm, Way, close, take};
use serde_json::json;
use small::{PATIENCE, Socket, descriptors, device, options, small_vmm};

const NOBODY: u32 = 65534;
/// So long a hand-over that failed waits for the VMM's end, to tell whether that is why.
const ENDING: Duration = Duration::from_secs(1);

fn only(way: Way) -> Result<Options> {
    Ok(Options {
        ways: vec![way],
        ..options()?
    })
}

fn signal(pid: i32, signal: Signal) -> Result<()> {
    Ok(kill(Pid::from_raw(pid), signal)?)
}

/// The state letter of a process's main thread.
fn state(pid: i32) -> Result<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, rest) = stat.rsplit_once(") ").context("a name")?;
    rest.chars().next().context("a state")
}

fn wait_stopped(pid: i32) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while state(pid)? != 'T' {
        ensure!(Instant::now() < deadline, "it does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

#[test]
fn each_way_leaves_userfaultfds_in_the_vmm() -> Result<()> {
    for (way, user) in [
        (Way::Device, None),
        (Way::PassedDevice, None),
        (Way::PassedDevice, Some(NOBODY)),
    ] {
        let socket = Socket::new()?;
        let mut small = small_vmm(&socket, &["16M"], 1, user)?;
        let (stream, vmm) = socket.accept()?;
        let before = descriptors(vmm.pid)?;
        let handed_over = take(&vmm, &stream, 3, &only(way)?)?;
        assert_eq!(handed_over.way, way);
        assert_eq!(handed_over.uffds.len(), 3);
        assert_eq!(
            descriptors(vmm.pid)?,
            before + 3,
            "{way}: nothing else is left open"
        );
        for &number in &handed_over.vmm_fd_numbers {
            let target = std::fs::read_link(format!("/proc/{}/fd/{number}", vmm.pid))?;
            assert_eq!(target.to_str(), Some("anon_inode:[userfaultfd]"));
        }
        // A backend that starts anew fetches the same ones.
        let again = Vmm::reopen(vmm.pid, vmm.start_time)?;
        assert_eq!(again.fetch_uffds(&handed_over.vmm_fd_numbers)?.len(), 3);
        // The stream is in step: its first message is answered as if nothing had been.
        let (disk, _) = device(vmm, 64)?;
        let serving = std::thread::spawn(move || disk.serve(stream));
        small.wait_connected()?;
        assert_eq!(small.command(json!({"do": "info"}))?["pages"], 4096);
        small.exit()?;
        serving.join().expect("no panic")?;
    }
    Ok(())
}

#[test]
fn an_unprivileged_vmm_falls_back_in_the_stated_order() -> Result<()> {
    let socket = Socket::new()?;
    let _small = small_vmm(&socket, &["16M"], 1, Some(NOBODY))?;
    let (stream, vmm) = socket.accept()?;
    let handed_over = take(&vmm, &stream, 1, &options()?)?;
    assert_eq!(handed_over.way, Way::PassedDevice);
    let before = descriptors(vmm.pid)?;
    let closed = Options {
        ways: vec![Way::Device, Way::Syscall],
        ..options()?
    };
    let error = take(&vmm, &stream, 1, &closed).expect_err("no way is left");
    let HandoverError::NoWay { attempts } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(attempts[0].errno, libc::EACCES);
    let text = error.to_string();
    for part in ["cgroup_device_acl", "--allow-sysctl", "Permission denied"] {
        assert!(text.contains(part), "'{part}' is missing from: {text}");
    }
    assert_eq!(descriptors(vmm.pid)?, before);
    Ok(())
}

#[test]
fn a_private_dev_without_the_device_is_no_obstacle() -> Result<()> {
    let socket = Socket::new()?;
    let chardev = format!("socket,id=c0,path={}", socket.path.display());
    // As libvirt 9.0 starts QEMU: in a mount namespace whose /dev has no userfaultfd.
    let _small = Killed(
        Command::new("unshare")
            .args(["--mount", "sh", "-c"])
            .arg("mount -t tmpfs none /dev && exec \"$0\" \"$@\"")
            .arg(env!("CARGO_BIN_EXE_small-vmm"))
            .args([
                "-object",
                "memory-backend-memfd,id=pc.ram,size=16M,share=on",
            ])
            .args(["-chardev", &chardev])
            .args(["-device", "vhost-user-blk-pci,chardev=c0"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()?,
    );
    let (stream, vmm) = socket.accept()?;
    let error = take(&vmm, &stream, 1, &only(Way::Device)?).expect_err("it is hidden");
    let HandoverError::NoWay { attempts } = error else {
        panic!("{error:?}");
    };
    assert_eq!(attempts[0].errno, libc::ENOENT);
    let handed_over = take(&vmm, &stream, 4, &options()?)?;
    assert_eq!(handed_over.way, Way::PassedDevice);
    Ok(())
}

#[test]
fn an_injector_that_nobody_listens_to_leaves_nothing() -> Result<()> {
    let socket = Socket::new()?;
    let mut small = small_vmm(&socket, &["16M"], 1, None)?;
    let (stream, vmm) = socket.accept()?;
    let before = descriptors(vmm.pid)?;
    for way in ["device", "passed-device"] {
        let mut injector = Command::new(options()?.injector)
            .arg("inject")
            .args([vmm.pid.to_string(), vmm.start_time.to_string()])
            .args(["5000", "16", "false", way])
            .stdin(std::os::fd::OwnedFd::from(stream.try_clone()?))
            .stdout(Stdio::piped())
            .spawn()?;
        // As if the backend had been killed.
        drop(injector.stdout.take());
        ensure!(!injector.wait()?.success(), "it cannot have reported");
        assert_eq!(descriptors(vmm.pid)?, before, "{way}");
    }
    let (disk, _) = device(vmm, 64)?;
    std::thread::spawn(move || disk.serve(stream));
    small.wait_connected()?;
    small.exit()
}

#[test]
fn what_was_handed_over_can_be_closed_again() -> Result<()> {
    let socket = Socket::new()?;
    let mut small = small_vmm(&socket, &["16M"], 1, None)?;
    let (stream, vmm) = socket.accept()?;
    let pid = vmm.pid;
    let before = descriptors(pid)?;
    let handed_over = take(&vmm, &stream, 3, &options()?)?;
    let (disk, _) = device(Vmm::open(pid)?, 64)?;
    std::thread::spawn(move || disk.serve(stream));
    small.wait_connected()?;
    // One more that is none of ours: nothing is closed then.
    let socket_of_its_own = std::fs::read_dir(format!("/proc/{pid}/fd"))?
        .flatten()
        .find(|entry| {
            std::fs::read_link(entry.path())
                .is_ok_and(|to| to.as_os_str().as_encoded_bytes().starts_with(b"socket:"))
        })
        .and_then(|entry| entry.file_name().to_str()?.parse().ok())
        .context("its end of the connection")?;
    let with_a_socket = [handed_over.vmm_fd_numbers[0], socket_of_its_own];
    let error = close(&vmm, &with_a_socket, &options()?).expect_err("it is no userfaultfd");
    assert!(
        matches!(error, HandoverError::Injection { .. }),
        "{error:?}"
    );
    let open = before + 3 + 1;
    ensure!(
        descriptors(pid)? <= open,
        "the hand-over left more than it should"
    );
    let with_ours = descriptors(pid)?;
    // Amid its work, not at a message of ours.
    small.command(json!({"do": "fill", "page": 0, "pages": 4096}))?;
    close(&vmm, &handed_over.vmm_fd_numbers, &options()?)?;
    assert_eq!(descriptors(pid)?, with_ours - 3);
    let found = small.command(json!({"do": "verify", "page": 0, "pages": 4096}))?;
    assert_eq!(found["mismatches"], 0);
    small.exit()
}

#[test]
fn a_hundred_hand_overs_disturb_nothing_at_work() -> Result<()> {
    let socket = Socket::new()?;
    let mut small = small_vmm(&socket, &["16M", "16M"], 2, None)?;
    let (stream, vmm) = socket.accept()?;
    let pid = vmm.pid;
    let ours = stream.try_clone()?;
    let (disk, _) = device(Vmm::open(pid)?, 64)?;
    std::thread::spawn(move || disk.serve(stream));
    small.wait_connected()?;
    small.command(json!({"do": "fill", "page": 0, "pages": 8192}))?;
    let work = |vcpu: u64| {
        json!({"do": "work", "vcpu": vcpu, "page": vcpu * 4096, "pages": 4096,
        "seconds": 4.0, "seed": vcpu + 1})
    };
    let first = small.send(work(0))?;
    let second = small.send(work(1))?;
    let before = descriptors(pid)?;
    for round in 0..100 {
        let way = [Way::Device, Way::PassedDevice][round % 2];
        let handed_over =
            take(&vmm, &ours, 2, &only(way)?).with_context(|| format!("round {round}"))?;
        assert_eq!(handed_over.uffds.len(), 2);
        // Its main thread is busy with this meanwhile, and must never notice.
        if round % 10 == 0 {
            small.command(json!({"do": "info"}))?;
        }
    }
    assert_eq!(descriptors(pid)?, before + 200);
    for id in [first, second] {
        let report = small.wait(id, PATIENCE)?;
        assert_eq!(report["mismatches"], 0, "{report}");
    }
    small.exit()
}

#[test]
fn a_failure_in_the_middle_closes_what_was_opened() -> Result<()> {
    for way in [Way::Device, Way::PassedDevice] {
        let socket = Socket::new()?;
        let mut small = small_vmm(&socket, &["16M"], 1, None)?;
        let (stream, vmm) = socket.accept()?;
        let limit = ["--nofile=24:24", "--pid", &vmm.pid.to_string()].map(str::to_owned);
        ensure!(Command::new("prlimit").args(limit).status()?.success());
        let before = descriptors(vmm.pid)?;
        let error = take(&vmm, &stream, 64, &only(way)?).expect_err("no descriptors are left");
        assert!(error.to_string().contains("max_files"), "{error}");
        assert_eq!(descriptors(vmm.pid)?, before);
        // And the VMM goes on.
        let (disk, _) = device(vmm, 64)?;
        std::thread::spawn(move || disk.serve(stream));
        small.wait_connected()?;
        small.exit()?;
    }
    Ok(())
}

#[test]
fn a_vmm_killed_meanwhile_is_reported_as_gone() -> Result<()> {
    let mut gone = 0;
    for round in 0..20 {
        let socket = Socket::new()?;
        let mut small = small_vmm(&socket, &["16M"], 1, None)?;
        let (stream, vmm) = socket.accept()?;
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(round * 150));
            let killed = Instant::now();
            small.kill().map(|()| killed.elapsed())
        });
        let options = options()?;
        let started = Instant::now();
        let taken = take(&vmm, &stream, 64, &options);
        let (took, has_ended) = (started.elapsed(), vmm.has_ended());
        let ending = killer.join().expect("no panic")?;
        match taken {
            Ok(_) => {}
            // Whichever step met its end.
            Err(HandoverError::VmmGone { .. }) => gone += 1,
            Err(HandoverError::Fetch { .. }) if has_ended => gone += 1,
            // It was killed, and had no processor to end on in time.
            Err(_) if ending > ENDING => {}
            Err(error) if has_ended => panic!("an unclear error: {error}"),
            Err(error) => return Err(error.into()),
        }
        assert!(took < options.timeout);
    }
    assert!(gone > 0, "the kill never came in time");
    Ok(())
}

#[test]
fn a_stopped_vmm_stays_stopped() -> Result<()> {
    let socket = Socket::new()?;
    let mut small = small_vmm(&socket, &["16M"], 1, None)?;
    let (stream, vmm) = socket.accept()?;
    let pid = vmm.pid;
    signal(pid, Signal::SIGSTOP)?;
    wait_stopped(pid)?;
    let handed_over = take(&vmm, &stream, 2, &options()?)?;
    assert_eq!(handed_over.uffds.len(), 2);
    // Let go, it comes back to its stop by itself, once it has a processor.
    wait_stopped(pid)?;
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(state(pid)?, 'T', "the stop survives the hand-over");
    signal(pid, Signal::SIGCONT)?;
    let (disk, _) = device(vmm, 64)?;
    std::thread::spawn(move || disk.serve(stream));
    small.wait_connected()?;
    small.exit()
}

#[test]
fn stops_and_signals_meanwhile_are_survived() -> Result<()> {
    let socket = Socket::new()?;
    let mut small = small_vmm(&socket, &["16M"], 1, None)?;
    let (stream, vmm) = socket.accept()?;
    let pid = vmm.pid;
    let bombing = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let goes_on = Arc::clone(&bombing);
    let bomber = std::thread::spawn(move || {
        while goes_on.load(std::sync::atomic::Ordering::Relaxed) {
            for number in [
                Signal::SIGSTOP,
                Signal::SIGWINCH,
                Signal::SIGCONT,
                Signal::SIGCHLD,
            ] {
                let _ = signal(pid, number);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    });
    for _ in 0..50 {
        take(&vmm, &stream, 1, &options()?)?;
    }
    bombing.store(false, std::sync::atomic::Ordering::Relaxed);
    bomber.join().expect("no panic");
    signal(pid, Signal::SIGCONT)?;
    let (disk, _) = device(vmm, 64)?;
    std::thread::spawn(move || disk.serve(stream));
    small.wait_connected()?;
    small.exit()
}

/// A process that ends with its owner.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process that computes, and is in no system call any more.
fn busy() -> Result<Killed> {
    // Beyond what starting a shell takes, in the kernel's ticks.
    const COMPUTED_TICKS: u64 = 10;
    let process = Killed(
        Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()?,
    );
    let deadline = Instant::now() + PATIENCE;
    loop {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.0.id()))?;
        let (_, rest) = stat.rsplit_once(") ").context("a name")?;
        let user_ticks = rest.split(' ').nth(11).context("its user time")?;
        if user_ticks.parse::<u64>()? >= COMPUTED_TICKS {
            return Ok(process);
        }
        ensure!(Instant::now() < deadline, "it does not compute: {stat}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_main_thread_that_never_waits_is_an_error_in_time() -> Result<()> {
    let busy = busy()?;
    let vmm = Vmm::open(busy.0.id() as i32)?;
    let (stream, _other) = std::os::unix::net::UnixStream::pair()?;
    let impatient = Options {
        timeout: Duration::from_millis(400),
        ..options()?
    };
    let started = Instant::now();
    let error = take(&vmm, &stream, 1, &impatient).expect_err("it is busy");
    assert!(matches!(error, HandoverError::Busy { .. }), "{error}");
    assert!(started.elapsed() < PATIENCE);
    assert_eq!(state(vmm.pid)?, 'R', "it runs on");
    Ok(())
}

#[test]
fn a_traced_vmm_names_its_tracer() -> Result<()> {
    let busy = busy()?;
    let vmm = Vmm::open(busy.0.id() as i32)?;
    // Another injector, which looks in vain for a moment in a system call, and ends with the VMM.
    let mut tracer = Command::new(options()?.injector)
        .arg("inject")
        .args([vmm.pid.to_string(), vmm.start_time.to_string()])
        .args(["600000", "1", "false", "device"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let tracer_line = format!("TracerPid:\t{}\n", tracer.id());
    let deadline = Instant::now() + PATIENCE;
    while !std::fs::read_to_string(format!("/proc/{}/status", vmm.pid))?.contains(&tracer_line) {
        ensure!(Instant::now() < deadline, "it is not traced");
        std::thread::sleep(Duration::from_millis(1));
    }
    let (stream, _other) = std::os::unix::net::UnixStream::pair()?;
    let error = take(&vmm, &stream, 1, &options()?).expect_err("it is traced");
    let text = error.to_string();
    assert!(
        text.contains(&format!("process {} ", tracer.id())),
        "{text}"
    );
    drop(busy);
    tracer.wait()?;
    Ok(())
}

/// QEMU as libvirt starts it, as far as matters: no privileges, sandbox on.
fn qemu(socket: &Socket, more: &[&str]) -> Result<Killed> {
    let chardev = format!("socket,id=c0,path={}", socket.path.display());
    let child = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .args([
            "qemu-system-x86_64",
            "-accel",
            "tcg",
            "-m",
            "128",
            "-display",
            "none",
        ])
        .args(["-nodefaults", "-chardev", &chardev])
        .args(["-device", "vhost-user-blk-pci,chardev=c0"])
        .args(["-sandbox"])
        .arg("on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny")
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("starting QEMU")?;
    Ok(Killed(child))
}

const MEMFD: [&str; 4] = [
    "-object",
    r#"{"qom-type":"memory-backend-memfd","id":"pc.ram","size":134217728,"share":true}"#,
    "-machine",
    "q35,memory-backend=pc.ram",
];

#[test]
fn a_sandboxed_qemu_hands_over_and_boots_from_the_disk() -> Result<()> {
    let socket = Socket::new()?;
    let mut qemu = qemu(&socket, &MEMFD)?;
    let (stream, vmm) = socket.accept()?;
    let handed_over = take(&vmm, &stream, 8, &options()?)?;
    assert_eq!(handed_over.way, Way::PassedDevice);
    let blocks = guest_ram(&vmm)?;
    assert_eq!(blocks.len(), 1);
    assert_eq!(
        (blocks[0].name.as_str(), blocks[0].length),
        ("pc.ram", 128 << 20)
    );
    for _ in 0..20 {
        take(&vmm, &stream, 1, &options()?)?;
    }
    let (disk, ram) = device(vmm, 64)?;
    let counted = Arc::clone(&disk);
    let serving = std::thread::spawn(move || disk.serve(stream));
    // The firmware looks for something to boot on the disk; emulated, beside other guests, it takes its time.
    let deadline = Instant::now() + 5 * PATIENCE;
    while counted.counters().requests == 0 {
        ensure!(qemu.0.try_wait()?.is_none(), "QEMU ended");
        ensure!(Instant::now() < deadline, "the firmware read nothing");
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(qemu);
    serving.join().expect("no panic")?;
    let counters = counted.counters();
    assert_eq!(counters.stray_device_accesses, 0, "{counters:?}");
    assert_eq!(ram.pins.load(std::sync::atomic::Ordering::SeqCst), 0);
    Ok(())
}

/// Whether a refusal is the one expected.
type Expected = fn(&Refusal) -> bool;

#[test]
fn what_paging_would_destroy_is_refused_with_its_cure() -> Result<()> {
    let disk = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR"))?;
    disk.as_file().set_len(1 << 20)?;
    std::os::unix::fs::fchown(disk.as_file(), Some(NOBODY), None)?;
    let direct = format!(
        "driver=file,node-name=d0,filename={},cache.direct=on",
        disk.path().display()
    );
    let blockdev = ["-blockdev", &direct];
    let with_ram = |more: &[&'static str]| [&MEMFD[..], more].concat();
    let cases: Vec<(Vec<&str>, Expected, &str)> = vec![
        (
            vec![],
            |r| matches!(r, Refusal::PrivateMemory(_)),
            "source type='memfd'",
        ),
        (
            vec![
                "-object",
                "memory-backend-memfd,id=pc.ram,size=128M,share=off",
                "-machine",
                "q35,memory-backend=pc.ram",
            ],
            |r| matches!(r, Refusal::PrivateMemory(_)),
            "access mode='shared'",
        ),
        (
            vec![
                "-object",
                "memory-backend-ram,id=pc.ram,size=128M,share=on",
                "-machine",
                "q35,memory-backend=pc.ram",
            ],
            |r| matches!(r, Refusal::PrivateMemory(_)),
            "source type='memfd'",
        ),
        (
            vec![
                "-object",
                "memory-backend-memfd,id=pc.ram,size=128M,share=on,prealloc=on",
                "-machine",
                "q35,memory-backend=pc.ram",
            ],
            |r| matches!(r, Refusal::Preallocated(_)),
            "allocation",
        ),
        (
            [&MEMFD[..], &blockdev[..]].concat(),
            |r| matches!(r, Refusal::DirectDisk(_)),
            "cache='writeback'",
        ),
        (
            with_ram(&[
                "-object",
                "memory-backend-memfd,id=shm,size=128M,share=on",
                "-device",
                "ivshmem-plain,memdev=shm",
            ]),
            |r| matches!(r, Refusal::AmbiguousBackend(_)),
            "another size",
        ),
    ];
    for (more, expected, cure) in cases {
        let socket = Socket::new()?;
        let _qemu = qemu(&socket, &more)?;
        let (_stream, vmm) = socket.accept().with_context(|| format!("{more:?}"))?;
        let refusal = guest_ram(&vmm).expect_err("to be refused");
        assert!(expected(&refusal), "{more:?}: {refusal:?}");
        assert!(refusal.to_string().contains(cure), "{refusal}");
    }
    Ok(())
}

#[test]
fn foreign_memory_is_left_alone() -> Result<()> {
    let socket = Socket::new()?;
    let shm = [
        "-object",
        "memory-backend-memfd,id=shm,size=1M,share=on",
        "-device",
        "ivshmem-plain,memdev=shm",
    ];
    let _qemu = qemu(&socket, &[&MEMFD[..], &shm[..]].concat())?;
    let (_stream, vmm) = socket.accept()?;
    let blocks = guest_ram(&vmm)?;
    assert_eq!(blocks.len(), 1, "{blocks:?}");
    assert_eq!(blocks[0].length, 128 << 20);
    Ok(())
}

#[test]
fn another_process_that_maps_guest_ram_is_named() -> Result<()> {
    let socket = Socket::new()?;
    let _small = small_vmm(&socket, &["16M"], 1, None)?;
    let (_stream, vmm) = socket.accept()?;
    let blocks = guest_ram(&vmm)?;
    let path = format!(
        "/proc/{}/fd/{}",
        std::process::id(),
        blocks[0].memfd.as_raw_fd()
    );
    let object = format!("memory-backend-file,id=m,size=16M,share=on,mem-path={path}");
    let other = Killed(
        Command::new("qemu-system-x86_64")
            .args(["-machine", "none", "-display", "none", "-nodefaults"])
            .args(["-object", &object])
            .stdin(Stdio::null())
            .spawn()?,
    );
    let maps = format!("/proc/{}/maps", other.0.id());
    let deadline = Instant::now() + PATIENCE;
    while !std::fs::read_to_string(&maps)?.contains("/memfd:memory-backend-memfd") {
        ensure!(Instant::now() < deadline, "it maps nothing");
        std::thread::sleep(Duration::from_millis(5));
    }
    let refusal = guest_ram(&vmm).expect_err("somebody else maps it");
    assert!(matches!(refusal, Refusal::OtherMapper(_)), "{refusal:?}");
    assert!(
        refusal.to_string().contains(&other.0.id().to_string()),
        "{refusal}"
    );
    Ok(())
}
