//! The program itself: its options, its signals, its last words.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use outram_wire::pki::Issued;
use outram_wire::server::{Reply, Request, ServerMessage};

use crate::client::{self, Client, Pki, SLAB, eventually, metric, scrape, vm};

const PROGRAM: &str = env!("CARGO_BIN_EXE_outram-memserver");

struct Process {
    child: Child,
    address: SocketAddr,
    metrics: SocketAddr,
    /// What its log said before it listened.
    said: String,
}

impl Process {
    fn start(pki: &Pki, options: &[&str]) -> Self {
        Self::start_as(Command::new(PROGRAM), pki, options)
    }

    fn start_as(command: Command, pki: &Pki, options: &[&str]) -> Self {
        Self::start_with(command, &pki.server, options)
    }

    fn start_with(mut command: Command, files: &Issued, options: &[&str]) -> Self {
        if command.get_envs().all(|(name, _)| name != "RUST_LOG") {
            command.env("RUST_LOG", "info");
        }
        let mut child = command
            .args(["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"])
            .args(["--slab-size", "1MiB", "--tls-ca"])
            .arg(&files.ca)
            .arg("--tls-cert")
            .arg(&files.cert)
            .arg("--tls-key")
            .arg(&files.key)
            .args(options)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program runs");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let mut said = String::new();
        let mut find = |what: &str| {
            let line = lines.by_ref().map_while(Result::ok).find(|line| {
                said += line;
                line.contains(what)
            });
            let line = line.unwrap_or_else(|| panic!("no '{what}' in its log"));
            let address = line.split("address=").nth(1).expect("an address");
            let address = address.split(' ').next().expect("a word");
            address.parse().expect("an address")
        };
        let (address, metrics) = (find("lending"), find("metrics"));
        // What it says later must not block it.
        std::thread::spawn(move || lines.for_each(drop));
        Self {
            child,
            address,
            metrics,
            said,
        }
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill")
            .args(["-s", name, &self.child.id().to_string()])
            .status();
        assert!(sent.expect("kill runs").success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run(arguments: &[&str]) -> (bool, String) {
    let output = Command::new(PROGRAM).args(arguments).output();
    let output = output.expect("the program runs");
    let both = [output.stdout, output.stderr].concat();
    let text = String::from_utf8(both).expect("text");
    (output.status.success(), text)
}

#[test]
fn a_device_that_is_not_there_is_warned_of() {
    let pki = Pki::new();
    let options = ["--memory", "8MiB", "--rdma", "no_such0:1"];
    let process = Process::start(&pki, &options);
    let said = &process.said;
    assert!(said.contains("WARN"), "{said}");
    let words = "no_such0:1 is asked for, but there is no device no_such0";
    assert!(said.contains(words), "{said}");
    assert!(said.contains("until then clients use TCP"), "{said}");
    let quiet = Process::start(&pki, &["--memory", "8MiB"]);
    assert!(!quiet.said.contains("WARN"), "{}", quiet.said);
}

#[test]
fn a_wish_for_the_log_that_cannot_be_told_is_named() {
    let pki = Pki::new();
    let start = |wish: &str| {
        let mut command = Command::new(PROGRAM);
        command.env("RUST_LOG", wish);
        Process::start_as(command, &pki, &["--memory", "8MiB"])
    };
    for wish in ["", "debug", "outram_memserver=debug,warn"] {
        let process = start(wish);
        assert!(!process.said.contains("RUST_LOG"), "{}", process.said);
    }
    let process = start("outram_memserver=loud");
    let said = &process.said;
    assert!(
        said.contains("RUST_LOG is \"outram_memserver=loud\""),
        "{said}"
    );
    assert!(said.contains("it logs at level info"), "{said}");
}

#[test]
fn the_service_manager_is_told_when_it_serves_and_when_it_stops() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("notify");
    let manager = UnixDatagram::bind(&socket).expect("bound");
    manager
        .set_read_timeout(Some(Duration::from_secs(60)))
        .expect("a time-out");
    let told = || {
        let mut message = [0; 256];
        let length = manager.recv(&mut message).expect("a message in time");
        String::from_utf8_lossy(&message[..length]).into_owned()
    };
    let pki = Pki::new();
    let mut command = Command::new(PROGRAM);
    command.env("NOTIFY_SOCKET", &socket);
    let process = Process::start_as(command, &pki, &["--memory", "1MiB"]);
    assert_eq!(told().trim(), "READY=1");
    process.signal("TERM");
    assert_eq!(told().trim(), "STOPPING=1");
}

#[test]
fn sigterm_ends_it_gracefully() {
    for signal in ["TERM", "INT"] {
        let pki = Pki::new();
        let mut process = Process::start(&pki, &["--memory", "4MiB"]);
        let mut client = Client::connect(process.address, &pki.client, vm(1), 1).expect("in");
        client.ask(Request::Reserve { bytes: SLAB });
        let slab = client.lease();
        let mut data = client.data();
        data.write(slab, 0, &[1; 4096]);
        process.signal(signal);
        let last = client::receive(&mut client.channel).expect("a last word");
        assert_eq!(last, ServerMessage::Closing);
        assert!(data.is_over());
        assert!(process.child.wait().expect("it ends").success());
    }
}

#[test]
fn a_standstill_of_the_server_ends_no_lease() {
    let pki = Pki::new();
    // The lease is longer than stopping the server takes on a busy machine, and shorter than it stands still then.
    let process = Process::start(&pki, &["--memory", "4MiB", "--lease-timeout", "12s"]);
    let mut client = Client::connect(process.address, &pki.client, vm(1), 1).expect("in");
    client.ask(Request::Reserve { bytes: SLAB });
    let slab = client.lease();
    let mut data = client.data();
    data.write(slab, 0, &[7; 4096]);
    process.signal("STOP");
    std::thread::sleep(Duration::from_secs(14));
    process.signal("CONT");
    // Whoever ends leases is sooner awake.
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(client.ask(Request::Renew), Reply::Done);
    assert_eq!(data.read(slab, 0, 4096), [7; 4096]);
    // It ends all the same where its client is not heard of.
    eventually("the lease ends", || {
        metric(
            &scrape(process.metrics),
            "outram_memserver_expired_sessions_total",
        ) == 1
    });
}

#[test]
fn sighup_changes_what_is_lent() {
    let pki = Pki::new();
    let file = pki.dir.path().join("memserver.toml");
    fs::write(&file, "memory = \"4MiB\"\n").expect("written");
    let process = Process::start(&pki, &["--config", file.to_str().expect("text")]);
    let mut client = Client::connect(process.address, &pki.client, vm(1), 1).expect("in");
    client.ask(Request::Reserve { bytes: 2 * SLAB });
    let slabs = [client.lease(), client.lease()];
    // A mistake changes nothing.
    fs::write(&file, "memory = \"lots\"\n").expect("written");
    process.signal("HUP");
    fs::write(&file, "memory = \"1MiB\"\n").expect("written");
    process.signal("HUP");
    eventually("a slab is wanted back", || {
        assert_eq!(client.ask(Request::Renew), Reply::Done);
        client.unasked == [ServerMessage::Vacate { slab: slabs[1] }]
    });
    client.release(slabs[1]);
    let page = scrape(process.metrics);
    assert_eq!(metric(&page, "outram_memserver_memory_bytes"), SLAB);
    assert_eq!(metric(&page, "outram_memserver_leased_bytes"), SLAB);
    eventually("the request is counted", || {
        metric(
            &scrape(process.metrics),
            "outram_memserver_vacate_requests_total",
        ) == 1
    });
}

#[test]
fn sighup_takes_renewed_certificates() {
    let pki = Pki::new();
    let process = Process::start(&pki, &["--memory", "4MiB"]);
    let serial = || {
        let channel = client::channel(process.address, &pki.client).expect("TLS stands");
        channel.peer_certificates()[0].to_vec()
    };
    let before = serial();
    // Half a renewal is a mistake; the server goes on with what it has.
    let renewed = pki.issue(outram_wire::tls::Kind::Server, "renewed");
    fs::copy(&renewed.cert, &pki.server.cert).expect("copied");
    process.signal("HUP");
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert_eq!(serial(), before);
    fs::copy(&renewed.key, &pki.server.key).expect("copied");
    process.signal("HUP");
    eventually("the new certificate is shown", || serial() != before);
}

#[test]
fn a_ca_is_replaced_while_clients_are_at_work() {
    let (old, new) = (Pki::new(), Pki::new());
    // The server's files are its own: what is changed there is not the client's.
    let dir = tempfile::tempdir().expect("a folder");
    let place = |name: &str| dir.path().join(name);
    let own = Issued {
        ca: place("ca.pem"),
        cert: place("server.pem"),
        key: place("server.key"),
    };
    let put = |from: &Path, to: &Path| {
        fs::copy(from, to).expect("copied");
    };
    put(&old.server.ca, &own.ca);
    put(&old.server.cert, &own.cert);
    put(&old.server.key, &own.key);
    let process = Process::start_with(Command::new(PROGRAM), &own, &["--memory", "4MiB"]);
    let gauge = |name: &str| {
        let page = scrape(process.metrics);
        metric(&page, &format!("outram_memserver_certificate_{name}"))
    };
    let mut client = Client::connect(process.address, &old.client, vm(1), 1).expect("in");
    client.ask(Request::Reserve { bytes: SLAB });
    let slab = client.lease();
    let mut data = client.data();
    data.write(slab, 0, &[7; 4096]);
    let expiry = gauge("expiry_timestamp_seconds");

    // First both CAs count. Nobody sends a signal.
    let both = [&old.server.ca, &new.server.ca].map(|ca| fs::read_to_string(ca).expect("text"));
    fs::write(&own.ca, both.concat()).expect("written");
    // A client of either CA: whether the server lets it in.
    let admitted = |client: &Pki, trusted: &Pki| {
        let (client, trusted) = (&client.client, &trusted.server);
        let Ok(mut channel) = client::channel_under(process.address, client, trusted) else {
            return false;
        };
        let hello = client::hello(vm(9), 9);
        let sent = channel.send(&hello, Instant::now() + client::PATIENCE);
        sent.is_ok() && client::receive(&mut channel).is_ok()
    };
    eventually("the new CA counts too", || admitted(&new, &old));
    assert!(admitted(&old, &old));

    // Then the server's certificate; half of it is told, and hurts nobody.
    put(&new.server.cert, &own.cert);
    eventually("the half is told", || gauge("refused") == 1);
    assert!(admitted(&old, &old));
    put(&new.server.key, &own.key);
    eventually("the whole is taken", || admitted(&new, &new));
    assert_eq!(gauge("refused"), 0);
    assert!(gauge("expiry_timestamp_seconds") >= expiry);

    // Last, the old CA goes: who comes with it is refused, who is there stays.
    put(&new.server.ca, &own.ca);
    eventually("the old CA is gone", || !admitted(&old, &new));
    assert!(admitted(&new, &new));
    assert_eq!(client.ask(Request::Renew), Reply::Done);
    assert_eq!(data.read(slab, 0, 4096), [7; 4096]);
    let second = client.data().read(slab, 0, 4096);
    assert_eq!(second, [7; 4096], "data connections are the session's");
}

#[test]
fn metrics_have_these_names() {
    let pki = Pki::new();
    let process = Process::start(&pki, &["--memory", "4MiB"]);
    let mut client = Client::connect(process.address, &pki.client, vm(1), 1).expect("in");
    client.ask(Request::Reserve { bytes: SLAB });
    let page = scrape(process.metrics);
    let vm = vm(1);
    let own = format!("outram_memserver_client_reserved_bytes{{client=\"client\",vm=\"{vm}\"}}");
    assert_eq!(metric(&page, &own), SLAB);
    let mut names: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .collect();
    names.sort_unstable();
    let expected = [
        "outram_memserver_bad_frames counter",
        "outram_memserver_certificate_expiry_timestamp_seconds gauge",
        "outram_memserver_certificate_refused gauge",
        "outram_memserver_client_leased_bytes gauge",
        "outram_memserver_client_reserved_bytes gauge",
        "outram_memserver_connections gauge",
        "outram_memserver_cpu_seconds counter",
        "outram_memserver_data_requests counter",
        "outram_memserver_expired_sessions counter",
        "outram_memserver_expired_slabs counter",
        "outram_memserver_leased_bytes gauge",
        "outram_memserver_leases counter",
        "outram_memserver_memory_bytes gauge",
        "outram_memserver_read_bytes counter",
        "outram_memserver_refused_strangers counter",
        "outram_memserver_released_slabs counter",
        "outram_memserver_reserved_bytes gauge",
        "outram_memserver_spare_bytes gauge",
        "outram_memserver_superseded_sessions counter",
        "outram_memserver_vacate_requests counter",
        "outram_memserver_written_bytes counter",
    ];
    assert_eq!(names, expected);
}

#[test]
fn memory_is_the_systems_until_it_is_written_and_after_it_is_released() {
    let pki = Pki::new();
    let process = Process::start(&pki, &["--memory", "64MiB"]);
    let resident = || {
        let status = fs::read_to_string(format!("/proc/{}/status", process.child.id()));
        let status = status.expect("it runs");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        kib.and_then(|kib| kib.trim().parse::<u64>().ok())
            .expect("a number")
    };
    let mut client = Client::connect(process.address, &pki.client, vm(1), 1).expect("in");
    client.ask(Request::Reserve { bytes: 32 * SLAB });
    let slabs: Vec<_> = (0..32).map(|_| client.lease()).collect();
    let mut data = client.data();
    let before = resident();
    for slab in &slabs {
        data.write(*slab, 0, &vec![7; SLAB as usize]);
    }
    assert!(resident() >= before + 32 * 1024);
    for slab in slabs {
        client.release(slab);
    }
    assert!(resident() < before + 8 * 1024);
}

#[test]
fn mistakes_at_the_start_are_told_with_their_cure() {
    let pki = Pki::new();
    let path = |path: &std::path::Path| path.to_str().expect("text").to_owned();
    let (ca, cert) = (path(&pki.server.ca), path(&pki.server.cert));
    let (key, client_key) = (path(&pki.server.key), path(&pki.client.key));
    let client_cert = path(&pki.client.cert);
    let options = |cert: &str, key: &str, more: &[&str]| {
        let tls = ["--tls-ca", &ca, "--tls-cert", cert, "--tls-key", key];
        let arguments: Vec<&str> = tls.iter().chain(more).copied().collect();
        let (success, text) = run(&arguments);
        assert!(!success, "{text}");
        text
    };
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = taken.local_addr().expect("bound").to_string();
    let typo = pki.dir.path().join("typo.toml");
    fs::write(&typo, "memory = \"1GiB\"\nlisten-on = \"x\"\n").expect("written");
    let whole = ["--listen", "127.0.0.1:0", "--memory", "1GiB"];
    for (text, words) in [
        (options(&cert, &key, &[]), "--listen"),
        (options(&cert, &key, &whole[..2]), "memory is not set"),
        (
            options(&cert, &client_key, &whole),
            "does not fit the certificate",
        ),
        (options(&client_cert, &client_key, &whole), "wrong kind"),
        (
            options("/nonexistent", &key, &whole),
            "make it with 'outram pki'",
        ),
        (
            options(&key, &key, &whole),
            "holds no certificate in PEM form",
        ),
        (
            options(&cert, &key, &["--listen", &taken, "--memory", "1G"]),
            "choose a free port",
        ),
        (options(&cert, &key, &["--memory", "1.5G"]), "is not a size"),
        (
            options(&cert, &key, &["--memory", "1M", "--listen", "127.0.0.1:0"]),
            "less than a slab",
        ),
        (
            options(&cert, &key, &["--config", &path(&typo)]),
            "unknown field `listen-on`",
        ),
    ] {
        assert!(text.contains(words), "'{words}' is not in: {text}");
        assert!(!text.contains("panicked"), "{text}");
    }
}

#[test]
fn help_names_every_option() {
    let (success, text) = run(&["--help"]);
    assert!(success);
    for option in [
        "--config",
        "--listen",
        "--memory",
        "--client-memory",
        "--slab-size",
        "--tls-ca",
        "--tls-cert",
        "--tls-key",
        "--lease-timeout",
        "--metrics",
        "SIGHUP",
    ] {
        assert!(text.contains(option), "{option} is not in:\n{text}");
    }
}
