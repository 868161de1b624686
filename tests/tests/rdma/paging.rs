//! Guests whose pages go over RDMA: that they come back as they were, that the server's process has no
//! part in it, and what becomes of them when the server goes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use outram_tests::hermetic::huge_pages::HugePages;
use outram_tests::hermetic::server::MemServer;
use outram_tests::lab_guest::KERNEL_DOES_IT;
use outram_wire::control::{Phase, Status};
use outram_wire::units::PageSize;
use serde_json::json;

use crate::at_hand::AtHand;
use crate::soft_roce::{SoftRoce, without_library};
use outram_tests::small_lab::{Guest, LEAST_HUGE, Lab, PAGE, Wish, demand_sound, halt};

pub(crate) const TESTS: &[crate::Test] = &[
    ONE_SIDED,
    ("huge_pages_go_past_the_servers_process", huge_pages),
    ("a_server_that_dies_is_noticed_over_rdma", server_dies),
    ("a_backend_killed_over_rdma_is_taken_over", backend_dies),
    ("what_the_address_says_is_kept_to", addresses),
    ("without_libibverbs_pages_go_over_tcp", no_library),
];

pub(crate) const ONE_SIDED: crate::Test = ("pages_go_past_the_servers_process", one_sided);

/// Written by every test here: several times what the guest may cost.
pub(crate) const FILLED: u64 = 5_000;

pub(crate) fn guest(lab: &Lab, server: &str) -> Result<Guest> {
    Guest::start(
        lab,
        &Wish {
            servers: &[server],
            ..Wish::default()
        },
    )
}

pub(crate) fn transport(status: &Status) -> &str {
    let server = status.servers.first();
    let transport = server.and_then(|server| server.transport.as_deref());
    transport.unwrap_or("nothing")
}

/// What is wrong with its server, if something is.
pub(crate) fn detail(status: &Status) -> &str {
    let server = status.servers.first();
    let detail = server.and_then(|server| server.detail.as_deref());
    detail.unwrap_or_default()
}

/// Has a vCPU read and write all that was filled for a while; the number of the command.
pub(crate) fn work(guest: &mut Guest, seconds: f64) -> Result<u64> {
    let work = json!({"page": 0, "pages": FILLED, "seconds": seconds, "write_share": 0.5});
    guest.send(1, "work", work)
}

/// Where RDMA fails, if only for a machine that stood still, it is tried again after 15 seconds, then after
/// twice as long each time: five times in this.
const TRIES: Duration = Duration::from_secs(900);

/// Waits until a guest's pages go as they have to, over TCP or over RDMA.
pub(crate) fn wait_transport(guest: &Guest, wanted: &str) -> Result<()> {
    let goes_so = |status: &Status| {
        let is_connected = status.servers.iter().all(|server| server.connected);
        is_connected && transport(status) == wanted
    };
    let what = format!("pages to go over {wanted}");
    guest.wait_status_within(TRIES, &what, goes_so).map(drop)
}

/// Reads all pages that were filled, a few at a time: each command has its own time.
pub(crate) fn verify_all(guest: &mut Guest) -> Result<()> {
    verify_first(guest, FILLED)
}

/// The same of the first so many thousands.
fn verify_first(guest: &mut Guest, pages: u64) -> Result<()> {
    (0..pages)
        .step_by(1000)
        .try_for_each(|page| guest.verify(page, 1000))
}

/// What paging came to: all pages written and read, and what it took.
struct Paged {
    status: Status,
    took: Duration,
    server_cpu: Duration,
}

fn page(guest: &mut Guest, server: &MemServer) -> Result<Paged> {
    let (before, began) = (server.cpu()?, Instant::now());
    guest.fill(0, FILLED)?;
    guest.settle()?;
    verify_all(guest)?;
    let took = began.elapsed();
    Ok(Paged {
        server_cpu: server.cpu()? - before,
        status: guest.status()?,
        took,
    })
}

impl Paged {
    const HEAD: &str = "transport     fetched p50 us   p99 us   fetched/s   written/s   \
                        server's CPU ms per 1000 pages";

    /// Those that were fetched, also where nobody had waited for them (over TCP with a hundredth of framing).
    fn fetched(&self) -> u64 {
        self.status.counters.wire_received_bytes / PAGE
    }

    /// Those that went or came.
    fn pages(&self) -> u64 {
        self.fetched() + self.status.counters.writeback_pages
    }

    fn row(&self, transport: &str) -> Result<String> {
        let latency = self.status.latency.get("remote");
        let latency = latency.context("no page was fetched")?;
        let per_second = |pages: u64| pages as f64 / self.took.as_secs_f64();
        let cpu_ms = self.server_cpu.as_secs_f64() * 1e3;
        Ok(format!(
            "{transport:<14}{:>14}{:>9}{:>12.0}{:>12.0}{:>33.2}",
            latency.us_p50,
            latency.us_p99,
            per_second(self.fetched()),
            per_second(self.status.counters.writeback_pages),
            cpu_ms * 1e3 / self.pages() as f64,
        ))
    }
}

type Counters = BTreeMap<String, u64>;

/// Requests that the server's process has served.
const REQUESTS: &str = "outram_memserver_data_requests_total";

/// How far counters rose, from what they were before.
fn difference((now, before): (Counters, Counters)) -> Counters {
    let rose = |(name, now): (String, u64)| {
        let rose = now - before.get(&name).unwrap_or(&0);
        (name, rose)
    };
    now.into_iter().map(rose).collect()
}

/// A guest whose pages go so from its first moment on: another where a machine stood still just then.
fn guest_at_once_over(lab: &Lab, server: &MemServer, wanted: &str) -> Result<Guest> {
    for _ in 0..3 {
        let guest = guest(lab, &server.address)?;
        let status = guest.status()?;
        if transport(&status) == wanted {
            return Ok(guest);
        }
        guest.end(&[server])?;
    }
    bail!("pages never went over {wanted} at once")
}

fn one_sided(lab: &Lab) -> Result<()> {
    let device = AtHand::of(lab)?;
    let server = lab.server()?;
    let mut near = guest_at_once_over(lab, &server, &device.transport())?;
    let before = device.counters()?;
    let over_rdma = page(&mut near, &server)?;
    ensure!(
        server.metric(REQUESTS)? == 0,
        "the server's process served requests"
    );
    let counted = device.counters()?.zip(before).map(difference);
    if let Some(counted) = &counted {
        // A page that goes or comes is a packet at least, and its answer; none is a message, which a
        // process would have to take.
        let moved = over_rdma.pages();
        ensure!(moved > FILLED / 4, "{moved} pages were moved");
        ensure!(counted["rcvd_pkts"] > moved, "{moved}: {counted:?}");
        let messages = counted["rdma_sends"] + counted["rdma_recvs"];
        ensure!(messages == 0, "{counted:?}");
    }
    read_meanwhile(&mut near, &server, &device.transport())?;
    near.end(&[&server])?;

    let mut far = guest(lab, &format!("tcp://{}", server.address))?;
    wait_transport(&far, "TCP")?;
    let over_tcp = page(&mut far, &server)?;
    ensure!(server.metric(REQUESTS)? > 0, "nothing went over TCP");
    let counted = counted.iter().flatten().filter(|(_, count)| **count > 0);
    let counted: Vec<String> = counted
        .map(|(name, count)| format!("{name} {count}"))
        .collect();
    for line in [
        Paged::HEAD.to_owned(),
        over_rdma.row(&device.transport())?,
        over_tcp.row("TCP")?,
        KERNEL_DOES_IT.to_owned(),
        format!(
            "rxe's counters, but those at 0 (so are rdma_sends and rdma_recvs): {}",
            counted.join(", ")
        ),
    ] {
        println!("pages_go_past_the_servers_process: {line}");
    }
    far.end(&[&server])
}

/// The first stretch of so many pages of which some are elsewhere.
fn first_elsewhere(guest: &mut Guest, stretch: u64) -> Result<u64> {
    let mut page = 0;
    while guest.present(page, stretch)? == stretch {
        page += stretch;
        ensure!(page < FILLED, "nothing was evicted");
    }
    Ok(page)
}

/// What is on the server can be had while its process stands still. Not for long: one that does not renew its
/// lease counts as away after some seconds, and then other pages are read.
fn read_meanwhile(guest: &mut Guest, server: &MemServer, transport: &str) -> Result<()> {
    const MEANWHILE: u64 = 100;
    const BEFORE_AWAY: Duration = Duration::from_secs(3);
    for _ in 0..5 {
        let page = first_elsewhere(guest, MEANWHILE)?;
        halt(server)?;
        let stretch = json!({"page": page, "pages": MEANWHILE});
        let sent = guest.send(0, "verify", stretch)?;
        let in_time = guest.vmm.wait(sent, BEFORE_AWAY);
        server.signal(nix::sys::signal::Signal::SIGCONT)?;
        if let Ok(found) = in_time {
            ensure!(found["checked"] == MEANWHILE, "not all: {found}");
            return demand_sound(&found);
        }
        demand_sound(&guest.answer(sent)?)?;
        wait_transport(guest, transport)?;
    }
    bail!("no page came while the server's process stood still")
}

/// Pages of 2 MiB are written and read by the device too, and after their backend was killed as well.
fn huge_pages(lab: &Lab) -> Result<()> {
    const RAM_MIB: u64 = 96;
    const PAGES: u64 = 24_000;
    let _device = SoftRoce::on_loopback()?;
    let _pool = HugePages::add((RAM_MIB << 20) / PageSize::HUGE.bytes())?;
    let server = lab.server_of(4 << 20, &["--memory", "1GiB"])?;
    let wish = Wish {
        ram_mib: &[RAM_MIB],
        limit: LEAST_HUGE,
        servers: &[&server.address],
        huge: Some(false),
        ..Wish::default()
    };
    let mut guest = Guest::start(lab, &wish)?;
    wait_transport(&guest, "RDMA (rxe0)")?;
    guest.fill(0, PAGES)?;
    guest.settle()?;
    verify_first(&mut guest, PAGES)?;
    let counters = guest.status()?.counters;
    ensure!(
        counters.faults_remote > 0 && counters.writeback_pages > 0,
        "{counters:?}"
    );
    ensure!(
        server.metric(REQUESTS)? == 0,
        "the server's process served requests"
    );
    guest.kill_backend()?;
    guest.take_over(lab, &wish)?;
    wait_transport(&guest, "RDMA (rxe0)")?;
    verify_first(&mut guest, PAGES)?;
    let counters = guest.status()?.counters;
    ensure!(counters.faults_remote > 0, "{counters:?}");
    guest.end(&[&server])
}

/// What a dead server had is lost, and never answered; what needs none of it goes on.
fn server_dies(lab: &Lab) -> Result<()> {
    let _device = SoftRoce::on_loopback()?;
    let mut server = lab.server()?;
    let mut guest = guest(lab, &server.address)?;
    wait_transport(&guest, "RDMA (rxe0)")?;
    guest.fill(0, FILLED)?;
    guest.settle()?;
    // The first that left: staging has none of it any more.
    let lost = first_elsewhere(&mut guest, 1)?;
    server.kill()?;
    let waiting = guest.send(1, "verify", json!({"page": lost, "pages": 1}))?;
    guest.wait_status("the stall to be told", |status| {
        status.phase == Phase::Stalled && status.waiting_faults > 0
    })?;
    server.start_again()?;
    guest.wait_status("the loss to be told", |status| {
        status.phase == Phase::Stopped && status.lost_bytes > 0
    })?;
    guest.demand_silence(waiting)?;
    let fresh = json!({"page": FILLED, "pages": 1000});
    guest.command(0, "fill", fresh.clone())?;
    demand_sound(&guest.command(0, "verify", fresh)?)?;
    wait_transport(&guest, "RDMA (rxe0)")?;
    guest.kill(&[&server])
}

fn backend_dies(lab: &Lab) -> Result<()> {
    let _device = SoftRoce::on_loopback()?;
    let server = lab.server()?;
    let wish = Wish {
        servers: &[&server.address],
        ..Wish::default()
    };
    let mut guest = Guest::start(lab, &wish)?;
    guest.fill(0, FILLED)?;
    for _ in 0..3 {
        let sent = work(&mut guest, 1.0)?;
        std::thread::sleep(Duration::from_millis(500));
        guest.kill_backend()?;
        guest.take_over(lab, &wish)?;
        demand_sound(&guest.answer(sent)?)?;
    }
    wait_transport(&guest, "RDMA (rxe0)")?;
    verify_all(&mut guest)?;
    guest.connect()?;
    guest.end(&[&server])
}

fn addresses(lab: &Lab) -> Result<()> {
    let _device = SoftRoce::on_loopback()?;
    let server = lab.server()?;
    let demanding = format!("rdma://{}", server.address);
    // By a pager that gave up what it does not need, as on hosts.
    let wish = Wish {
        servers: &[&demanding],
        supervised: true,
        ..Wish::default()
    };
    let mut guest = Guest::start(lab, &wish)?;
    wait_transport(&guest, "RDMA (rxe0)")?;
    guest.fill(0, FILLED)?;
    guest.verify(0, 1000)?;
    guest.end(&[&server])?;
    // Where the server has none, RDMA is refused in words, and 'auto' is TCP.
    let without = lab.server_with(&["--memory", "1GiB", "--rdma", "off"])?;
    let refused = self::guest(lab, &format!("rdma://{}", without.address));
    let error = format!("{:#}", refused.err().context("it was not refused")?);
    ensure!(error.contains("the server offers none"), "{error}");
    let guest = self::guest(lab, &without.address)?;
    wait_transport(&guest, "TCP")?;
    guest.end(&[&without])
}

/// The library is found when a program starts, or it is not.
fn no_library(lab: &Lab) -> Result<()> {
    let _device = SoftRoce::on_loopback()?;
    without_library(|| {
        let server = lab.server()?;
        let mut guest = guest(lab, &server.address)?;
        wait_transport(&guest, "TCP")?;
        guest.fill(0, FILLED)?;
        guest.verify(0, 500)?;
        guest.end(&[&server])
    })
}
