//! The hook against real child processes that stand for the backend, and as the program that
//! libvirt runs.
//!
//! The stand-in is this test program itself, run again by a small script as `stand_in`: it speaks
//! the control protocol and does what its guest's name says.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use outram_libvirt::backend_control::{BackendControl, ControlError};
use outram_libvirt::cli::report::{self, State};
use outram_libvirt::cli::{self, Arguments};
use outram_libvirt::hook::{self, HookError, STAMP_FILE};
use outram_libvirt::host::{Paths, RUN_VARIABLE};
use outram_libvirt::launch::LaunchError;
use outram_libvirt::metadata::{NAMESPACE, PROBE};
use outram_libvirt::process;
use outram_wire::control::{Envelope, Phase, Reply, Request, Status, read_frame, write_frame};
use outram_wire::incoming::Incoming;
use outram_wire::units::{Limit, VmId};
use tempfile::TempDir;

use crate::support;

const UUID: &str = "9a4a7f0e-2f5b-4d55-8a53-0a4e1c7e1234";

/// Long enough for a loaded machine; only what is broken takes so long.
const PATIENCE: Duration = Duration::from_secs(120);

/// Arguments for the stand-in, one a line.
const ARGUMENTS: &str = "STAND_IN_ARGUMENTS";

/// A host of its own below a temporary directory, whose backend is the stand-in.
struct Host {
    dir: TempDir,
    paths: Paths,
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let backend = dir.path().join("outram-backend");
        let program = std::env::current_exe().expect("this program");
        let script = format!(
            "#!/bin/sh\n{ARGUMENTS}=$(tr '\\0' '\\n' <\"$2\") exec '{}' --exact --nocapture hook::stand_in\n",
            program.display()
        );
        fs::write(&backend, script).expect("written");
        fs::set_permissions(&backend, fs::Permissions::from_mode(0o755)).expect("executable");
        let run = dir.path().join("run");
        fs::create_dir(&run).expect("made");
        let paths = Paths {
            run,
            config: dir.path().join("backend.toml"),
            qemu_conf: dir.path().join("qemu.conf"),
            backend: Some(backend),
            systemd: false,
            ..Paths::default()
        };
        Self { dir, paths }
    }

    fn run_dir(&self) -> PathBuf {
        self.paths.run.join(UUID)
    }

    fn control(&self) -> BackendControl {
        BackendControl::of(&self.run_dir()).with_timeout(PATIENCE)
    }

    /// A domain as a user writes it; its name tells the stand-in what to do.
    fn domain(&self, name: &str) -> String {
        let socket = self.run_dir().join("vhost.sock");
        format!(
            "<domain type='qemu'><name>{name}</name><uuid>{UUID}</uuid>\
             <metadata><outram:memory xmlns:outram='https://outram.dev/xmlns/domain/1' \
             local-ratio='0.5'><outram:server address='10.0.0.2:7741'/></outram:memory></metadata>\
             <memory unit='MiB'>64</memory>\
             <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>\
             <os><type arch='x86_64'>hvm</type></os><devices><disk type='vhostuser' device='disk'>\
             <source type='unix' path='{}'/><target dev='vdz'/></disk></devices>\
             <seclabel model='dac'><label>+1234:+56</label></seclabel></domain>",
            socket.display()
        )
    }

    fn prepare(&self, name: &str) -> Result<(), HookError> {
        insist(|| hook::prepare(self.domain(name).as_bytes(), &self.paths))
    }

    fn pid(&self) -> u32 {
        self.control().status().expect("a backend").backend_pid
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.control().stop();
    }
}

/// Prepares a start again where an earlier stand-in, on a loaded machine, did not answer in time.
fn insist(prepare: impl Fn() -> Result<(), HookError>) -> Result<(), HookError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match prepare() {
            Err(HookError::Launch(LaunchError::Unusable(ControlError::Silent(..))))
                if Instant::now() < deadline => {}
            outcome => return outcome,
        }
    }
}

fn wait_until(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "{what} takes too long");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_backend_is_started_and_left_running() {
    let host = Host::new();
    host.prepare("ready").expect("started");
    let pid = host.pid();
    assert!(process::is_alive(pid));
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("stat");
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .expect("fields")
        .1
        .split_whitespace()
        .collect();
    assert_eq!(fields[3], pid.to_string(), "it leads a session of its own");
    let mine = fs::read_link("/proc/self/fd/0").ok();
    let open: Vec<PathBuf> = fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("descriptors")
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .collect();
    let pipes = open.iter().filter(|path| path.starts_with("pipe:"));
    assert_eq!(
        pipes.count(),
        0,
        "no pipe of its parent is left: {open:?} {mine:?}"
    );
    let log = fs::read_to_string(host.run_dir().join("log")).expect("a log");
    for argument in [
        "run".to_owned(),
        format!("--uuid={UUID}"),
        "--name=ready".to_owned(),
        "--ram=67108864".to_owned(),
        "--local-ratio=0.5".to_owned(),
        "--server=10.0.0.2:7741".to_owned(),
        format!("--run-dir={}", host.paths.run.display()),
        "--socket-user=1234:56".to_owned(),
    ] {
        assert!(
            log.contains(&format!("argument {argument}\n")),
            "{argument} in {log}"
        );
    }
    assert!(!log.contains("--config"), "{log}");
}

#[test]
fn a_restored_guest_is_told_apart_once() {
    let host = Host::new();
    let told = || fs::read_to_string(host.run_dir().join("log")).expect("a log");
    let note = |incoming| {
        let domain = host.domain("ready");
        hook::note_arrival(domain.as_bytes(), &host.paths, incoming).expect("noted");
    };
    for incoming in [Incoming::Restore, Incoming::Migration] {
        // Each attempt takes the note.
        let arrives = || {
            note(incoming);
            hook::prepare(host.domain("ready").as_bytes(), &host.paths)
        };
        insist(arrives).expect("started");
        let expected = format!("argument --incoming={incoming}\n");
        assert!(told().contains(&expected), "{}", told());
        host.prepare("ready").expect("started again");
        assert!(!told().contains("--incoming"), "{}", told());
    }
    // An arrival that failed before its start leaves nothing to the next one.
    note(Incoming::Restore);
    hook::release(host.domain("ready").as_bytes(), &host.paths);
    host.prepare("ready").expect("started");
    assert!(!told().contains("--incoming"), "{}", told());
}

#[test]
fn a_reason_becomes_the_error_and_stays_for_status() {
    let host = Host::new();
    let error = host.prepare("refusing").expect_err("refused");
    assert_eq!(error.to_string(), "the server is full: ask for less");
    let error = fs::read_to_string(host.run_dir().join("error")).expect("left");
    assert_eq!(error, "the server is full: ask for less\n");
    assert_eq!(
        fs::read_to_string(host.paths.run.join(format!("{UUID}.name"))).expect("left"),
        "refusing"
    );
    let released = hook::release(host.domain("refusing").as_bytes(), &host.paths);
    assert_eq!(
        released.as_deref(),
        Some("the server is full: ask for less")
    );
    host.prepare("ready")
        .expect("a later start is not hindered");
    assert!(!host.run_dir().join("error").exists());
}

#[test]
fn a_silent_end_shows_the_log() {
    let host = Host::new();
    let error = host.prepare("dying").expect_err("ended");
    assert!(
        matches!(error, HookError::Launch(LaunchError::Ended { .. })),
        "{error:?}"
    );
    assert!(error.to_string().contains("last words"), "{error}");
}

#[test]
fn a_backend_that_waits_is_replaced() {
    let host = Host::new();
    host.prepare("ready").expect("started");
    let first = host.pid();
    host.prepare("ready").expect("started again");
    assert!(!process::is_alive(first));
    assert_ne!(host.pid(), first);
}

#[test]
fn a_backend_with_a_living_qemu_is_left_alone() {
    let host = Host::new();
    host.prepare("serving").expect("started");
    let first = host.pid();
    let error = host.prepare("serving").expect_err("refused");
    assert!(
        matches!(error, HookError::Launch(LaunchError::StillServing { .. })),
        "{error:?}"
    );
    assert_eq!(host.pid(), first);
    assert_eq!(
        hook::release(host.domain("serving").as_bytes(), &host.paths),
        None
    );
    assert!(
        process::is_alive(first),
        "release ends no backend that serves"
    );
}

#[test]
fn a_guest_is_tuned_also_where_libvirt_is_away() {
    let host = Host::new();
    host.prepare("serving").expect("ready");
    let line = ["outram", "tune", UUID, "--local=48MiB", "--workers=3"];
    let arguments = Arguments::try_parse_from(line).expect("arguments");
    let cli::Command::Tune(tune) = arguments.command else {
        panic!("{arguments:?}");
    };
    let nowhere = host.dir.path().join("libvirt-sock");
    let uri = format!("qemu:///system?socket={}", nowhere.display());
    let tuned = tune.run(Some(&uri), &host.paths);
    assert!(tuned.expect("tuned"));
}

#[test]
fn release_ends_a_backend_that_no_qemu_came_to() {
    let host = Host::new();
    host.prepare("ready").expect("started");
    let pid = host.pid();
    let release = || hook::release(host.domain("ready").as_bytes(), &host.paths);
    assert_eq!(release(), None);
    wait_until("the end", || {
        let has_ended = !process::is_alive(pid);
        // On a loaded machine it may not have answered in time.
        if !has_ended {
            release();
        }
        has_ended
    });
}

#[test]
fn release_clears_up_after_a_backend_that_was_killed() {
    let host = Host::new();
    host.prepare("serving").expect("started");
    let pid = host.pid();
    let killed = Command::new("kill").args(["-9", &pid.to_string()]).status();
    assert!(killed.expect("kill runs").success());
    wait_until("the end", || !process::is_alive(pid));
    let guests = report::all_guests(&host.paths).expect("guests");
    // A process that is dying is no longer alive, but its sockets may be open for a moment.
    wait_until("the end to be told", || {
        let reports = report::reports(&guests, &host.paths);
        assert_eq!(reports.len(), 1);
        (reports[0].state, reports[0].name.as_str()) == (State::Gone, "serving")
    });

    let reason = hook::release(host.domain("serving").as_bytes(), &host.paths);
    assert!(
        reason
            .expect("a reason")
            .contains("ended while its guest ran")
    );
    assert!(!host.run_dir().join("control.sock").exists());
    let reports = report::reports(&guests, &host.paths);
    assert_eq!(reports[0].state, State::Failed);
    host.prepare("ready")
        .expect("a later start is not hindered");
}

#[test]
fn a_backend_that_is_being_started_is_told_from_one_that_died() {
    let host = Host::new();
    fs::create_dir(host.run_dir()).expect("made");
    let _supervisor = support::supervised(&host.run_dir());
    let report = || {
        let guests = report::all_guests(&host.paths).expect("guests");
        report::reports(&guests, &host.paths).remove(0)
    };
    let started = report();
    assert_eq!(started.state, State::Waiting);
    let reason = started.error.as_deref();
    assert_eq!(reason, Some("its backend is being started, or ends"));
    let pager = UnixListener::bind(host.run_dir().join("control.sock"));
    drop(pager.expect("it listens until it dies"));
    assert_eq!(report().state, State::Recovering);
}

#[test]
fn a_domain_without_any_server_is_refused() {
    let host = Host::new();
    let domain = host
        .domain("ready")
        .replace("<outram:server address='10.0.0.2:7741'/>", "");
    let prepare = || hook::prepare_start(domain.as_bytes(), &host.paths);
    assert!(matches!(prepare(), Err(HookError::NoServer(_))));
    let reports = || {
        let guests = report::all_guests(&host.paths).expect("readable");
        report::reports(&guests, &host.paths)
    };
    let refused = &reports()[0];
    assert_eq!((&*refused.name, refused.state), ("ready", State::Failed));
    let detail = refused.error.as_deref().unwrap_or_default();
    assert!(detail.contains("no memory server is named"), "{detail}");
    fs::write(&host.paths.config, "servers = [\"a:0\"]").expect("written");
    let error = prepare().expect_err("a bad address").to_string();
    assert!(error.contains("'a:0'"), "{error}");
    fs::write(&host.paths.config, "servers = [\"a:1\"]").expect("written");
    prepare().expect("the host's servers are used");
    let is_waiting = || reports()[0].state == State::Waiting;
    wait_until("an answer", is_waiting);
    // What is refused beside a backend that is at work is no word of it.
    let broken = domain.replace("local-ratio", "local-ration");
    assert!(hook::prepare_start(broken.as_bytes(), &host.paths).is_err());
    wait_until("an answer", is_waiting);
    assert!(!host.run_dir().join("error").exists());
}

#[test]
fn a_refused_start_is_found_by_its_name_where_libvirt_cannot_be_asked() {
    let host = Host::new();
    let domain = host.domain("other").replace("local-ratio", "local-ration");
    assert!(hook::prepare_start(domain.as_bytes(), &host.paths).is_err());
    for name in ["other", UUID] {
        let found = report::find_guest(name, Some("test:///default"), &host.paths);
        assert_eq!(found.expect("noted").vm.to_string(), UUID);
    }
    assert!(report::find_guest("another", Some("test:///default"), &host.paths).is_err());
}

#[test]
fn a_question_whether_the_hook_is_called_leaves_no_word_of_a_guest() {
    let host = Host::new();
    let question = format!(
        "<domain type='qemu'><name>outram-probe-1</name><uuid>{UUID}</uuid>\
         <metadata><outram:{PROBE} xmlns:outram='{NAMESPACE}'/></metadata></domain>"
    );
    let error = hook::prepare_start(question.as_bytes(), &host.paths).expect_err("refused");
    assert!(error.to_string().contains(PROBE), "{error}");
    let left = report::all_guests(&host.paths).expect("readable");
    assert!(left.is_empty(), "{left:?}");
    let files = fs::read_dir(&host.paths.run).expect("readable").count();
    assert_eq!(files, 0, "not even a name");
}

#[test]
fn a_missing_backend_is_told() {
    let mut host = Host::new();
    host.paths.backend = Some(host.dir.path().join("nothing"));
    assert!(matches!(
        host.prepare("ready"),
        Err(HookError::NoBackend(_))
    ));
}

#[test]
fn a_disk_of_ours_without_settings_is_refused() {
    let host = Host::new();
    let domain = host.domain("ready");
    let start = domain.find("<metadata>").expect("metadata");
    let end = domain.find("<memory ").expect("memory");
    let without = format!("{}{}", &domain[..start], &domain[end..]);
    let error = hook::prepare(without.as_bytes(), &host.paths).expect_err("refused");
    assert!(error.to_string().contains("outram attach"), "{error}");
}

/// Runs the hook program as libvirt does, away from guests of this machine.
fn run_hook(arguments: &[&str], xml: &[u8], run: &Path) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_outram-libvirt-hook"))
        .args(arguments)
        .env(RUN_VARIABLE, run)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the hook starts");
    // A hook that does not read all of it closes the pipe, which is no error.
    let _ = child.stdin.take().expect("stdin").write_all(xml);
    child.wait_with_output().expect("the hook ends")
}

const STAGES: [(&str, &str); 9] = [
    ("prepare", "begin"),
    ("start", "begin"),
    ("started", "begin"),
    ("stopped", "end"),
    ("release", "end"),
    ("migrate", "begin"),
    ("restore", "begin"),
    ("reconnect", "begin"),
    ("attach", "begin"),
];

#[test]
fn unrelated_domains_pass_every_stage_whatever_they_are() {
    let domains: [&[u8]; 5] = [
        b"",
        b"<domain",
        b"\xff\xfe\0\0",
        b"<domain type='lxc'><name>x</name></domain>",
        b"<domain type='kvm'><name>outram</name><description>outram:memory</description></domain>",
    ];
    let run = tempfile::tempdir().expect("a directory");
    for xml in domains {
        for (operation, sub_operation) in STAGES {
            let output = run_hook(&["x", operation, sub_operation, "-"], xml, run.path());
            assert!(output.status.success(), "{operation}: {output:?}");
            assert!(
                output.stdout.is_empty() && output.stderr.is_empty(),
                "{output:?}"
            );
        }
    }
    assert!(run_hook(&[], b"", run.path()).status.success());
    let left: Vec<_> = fs::read_dir(&run).expect("read").flatten().collect();
    assert!(
        left.iter().all(|entry| entry.file_name() == STAMP_FILE),
        "{left:?}"
    );
}

#[test]
fn only_prepare_fails_and_nothing_is_ever_printed_to_stdout() {
    let broken = golden_with_typo();
    let run = tempfile::tempdir().expect("a directory");
    for (operation, sub_operation) in STAGES {
        let arguments = ["x", operation, sub_operation, "-"];
        let output = run_hook(&arguments, broken.as_bytes(), run.path());
        assert_eq!(
            output.status.success(),
            operation != "prepare",
            "{operation}"
        );
        assert!(output.stdout.is_empty(), "{operation}");
        if operation == "prepare" {
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(
                text.contains("local-ration") && text.contains("local-ratio'"),
                "{text}"
            );
        }
    }
    let reason = fs::read_to_string(run.path().join(TYPO_UUID).join("error"));
    assert!(reason.expect("word of it").contains("local-ration"));
}

/// Nobody's.
const TYPO_UUID: &str = "00000000-dead-4000-8000-000000000000";

/// A domain with a typo in its settings.
fn golden_with_typo() -> String {
    format!(
        "<domain type='kvm'><name>x</name><uuid>{TYPO_UUID}</uuid><metadata>\
     <o:memory xmlns:o='https://outram.dev/xmlns/domain/1' local-ration='0.5'/></metadata></domain>"
    )
}

/// Not a test by itself: the process that stands for the backend, which other tests of this file
/// start. Without their arguments it has nothing to do.
#[test]
fn stand_in() {
    let Ok(arguments) = std::env::var(ARGUMENTS) else {
        return;
    };
    for argument in arguments.lines() {
        println!("argument {argument}");
    }
    let value = |name: &str| {
        let prefix = format!("--{name}=");
        arguments
            .lines()
            .find_map(|line| line.strip_prefix(&prefix))
            .expect("given")
            .to_owned()
    };
    let dir = Path::new(&value("run-dir")).join(value("uuid"));
    match value("name").as_str() {
        "refusing" => {
            fs::write(dir.join("error"), "the server is full: ask for less\n").expect("written");
            std::process::exit(1);
        }
        "dying" => {
            println!("last words");
            std::process::exit(3);
        }
        name => serve(&dir, name, value("uuid").parse().expect("a UUID")),
    }
}

/// Answers on the control socket until told to stop.
fn serve(dir: &Path, name: &str, vm: VmId) {
    let listener = UnixListener::bind(dir.join("control.sock")).expect("listens");
    loop {
        let (mut stream, _) = listener.accept().expect("accepts");
        let Ok(Some(envelope)) = read_frame::<Envelope>(&mut stream) else {
            continue;
        };
        let stop = envelope.request == Request::Stop;
        let reply = match envelope.request {
            Request::Status => Reply::Status(Box::new(status(name, vm))),
            _ => Reply::Done,
        };
        let _ = write_frame(&mut stream, &reply);
        if stop {
            std::process::exit(0);
        }
    }
}

fn status(name: &str, vm: VmId) -> Status {
    let serving = name == "serving";
    Status {
        // Its parent, the test, stands for a QEMU that lives.
        qemu_pid: serving.then(std::os::unix::process::parent_id),
        phase: if serving {
            Phase::Serving
        } else {
            Phase::Waiting
        },
        ..support::status(name, vm, Limit::LocalBytes(32 << 20))
    }
}
