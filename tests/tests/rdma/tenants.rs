//! Clients of a real memory server that speak its protocol by themselves: what one that breaks faith
//! reaches over RDMA, and what becomes of the others when one dies.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use outram_tests::hermetic::command::wait_for;
use outram_tests::hermetic::server::MemServer;
use outram_wire::pki::Issued;
use outram_wire::server::data::{MAX_PAYLOAD_BYTES, Op};
use outram_wire::server::{Refusal, Reply, Request, SlabId};
use outram_wire::verbs::{Choice, Domain, Failure, Initiator, PostError, Remote, Stretch};

use crate::at_hand::AtHand;
use crate::client::{Client, extent, vm};
use crate::verbs::{PAGE, completed, content, demand_failure, stretch};
use outram_tests::small_lab::{LONG, Lab, SLAB};

pub(crate) const TESTS: &[crate::Test] = &[
    ("a_slab_given_back_is_out_of_its_clients_reach", given_back),
    ("a_slab_ends_where_its_neighbours_begin", borders),
    ("one_queue_pair_beyond_the_limit_is_refused", crowd),
    ("a_client_killed_amid_requests_harms_nobody", killed),
    ("a_slab_is_made_ready_ahead_of_its_lease", ahead),
];

/// Where a program of [`PESTER`] finds its server.
pub(crate) const PESTER: &str = "OUTRAM_TEST_PESTER";

/// Pages of a slab.
const PAGES: usize = SLAB as usize / PAGE;

/// A client over the real protocol, with a device of its own.
struct Tenant {
    client: Client,
    domain: Domain,
}

/// A slab with its key.
#[derive(Clone, Copy)]
struct Held {
    slab: SlabId,
    remote: Remote,
}

impl Tenant {
    fn new(pki: &Path, address: &str, number: u8) -> Result<Self> {
        let identity = Issued {
            ca: pki.join("ca.pem"),
            cert: pki.join("client.pem"),
            key: pki.join("client.key"),
        };
        let address: SocketAddr = address.parse()?;
        let client = Client::with_verbs(address, &identity, vm(number.into()), number)?;
        ensure!(client.welcome.verbs, "the server offers no RDMA");
        let port = Choice::Auto.port(address.ip())?;
        Ok(Self {
            client,
            domain: Domain::open(&port)?,
        })
    }

    fn of(lab: &Lab, server: &MemServer, number: u8) -> Result<Self> {
        let mut tenant = Self::new(&lab.path("pki"), &server.address, number)?;
        tenant.reserve(1)?;
        Ok(tenant)
    }

    fn reserve(&mut self, slabs: u64) -> Result<()> {
        let bytes = slabs * SLAB;
        match self.client.ask(Request::Reserve { bytes }) {
            Reply::Reserved { .. } => Ok(()),
            other => bail!("{other:?} instead of a reservation"),
        }
    }

    fn lease(&mut self) -> Result<Held> {
        let slab = self.client.lease();
        self.key(slab)
    }

    fn key(&mut self, slab: SlabId) -> Result<Held> {
        match self.client.ask(Request::Key { slab }) {
            Reply::Key { remote } => Ok(Held { slab, remote }),
            other => bail!("{other:?} instead of a key"),
        }
    }

    fn lease_timed(&mut self) -> Result<(Held, Duration)> {
        let began = Instant::now();
        let held = self.lease()?;
        Ok((held, began.elapsed()))
    }

    fn pair(&mut self) -> Result<Initiator> {
        let mut initiator = Initiator::new(&self.domain)?;
        let end = initiator.end();
        match self.client.ask(Request::QueuePair { end }) {
            Reply::QueuePair { end, .. } => initiator.connect(&end)?,
            other => bail!("{other:?} instead of a queue pair"),
        }
        Ok(initiator)
    }

    /// Demands that neither a write nor a read of a slab's first page is carried out.
    fn demand_shut(pairs: [Initiator; 2], remote: Remote, what: &str) -> Result<()> {
        Self::demand_refused(pairs, stretch(remote, 0, PAGE), what)
    }

    /// Demands that neither a write nor a read of this place is carried out, each by one of these queue
    /// pairs: a failure ends one.
    fn demand_refused(pairs: [Initiator; 2], place: Stretch, what: &str) -> Result<()> {
        let [mut writer, mut reader] = pairs;
        let place = [place];
        writer.write(1, &place, &[&vec![0x66; place[0].length as usize]])?;
        demand_failure(&mut writer, Failure::RemoteAccess)
            .with_context(|| format!("a write: {what}"))?;
        reader.read(1, &place)?;
        demand_failure(&mut reader, Failure::RemoteAccess)
            .with_context(|| format!("a read: {what}"))
    }
}

fn write(pair: &mut Initiator, held: Held, page: usize) -> Result<()> {
    let place = [stretch(held.remote, page * PAGE, PAGE)];
    pair.write(1, &place, &[&content(page)])?;
    completed(pair, 1).map(drop)
}

fn read(pair: &mut Initiator, held: Held, page: usize) -> Result<Vec<u8>> {
    pair.read(2, &[stretch(held.remote, page * PAGE, PAGE)])?;
    let (_, bytes) = completed(pair, 1)?.remove(0);
    Ok(bytes)
}

fn demand_content(pair: &mut Initiator, held: Held, page: usize) -> Result<()> {
    ensure!(read(pair, held, page)? == content(page), "page {page}");
    Ok(())
}

/// Has the server read a slab for a TCP connection that takes nothing: for as long as that lasts, the
/// slab is in use there.
fn stall(client: &mut Client, slab: SlabId) -> Result<crate::client::Data> {
    let mut data = client.data();
    let whole = vec![extent(slab, 0, SLAB as u32); MAX_PAYLOAD_BYTES / SLAB as usize];
    // More than any socket's buffers take.
    for _ in 0..16 {
        data.send(Op::Read, &whole, &[])?;
    }
    Ok(data)
}

/// A slab that was given back while the server could not let go of its memory yet: by then it is the
/// key alone that keeps its former client out.
fn lease_and_give_back(
    hostile: &mut Tenant,
    server: &MemServer,
) -> Result<(Held, crate::client::Data)> {
    for _ in 0..20 {
        let held = hostile.lease()?;
        write(&mut hostile.pair()?, held, 0)?;
        let data = stall(&mut hostile.client, held.slab)?;
        // Not long enough is no harm: it is tried again.
        std::thread::sleep(Duration::from_millis(300));
        hostile.client.release(held.slab);
        if server.bytes_leased()? == SLAB {
            return Ok((held, data));
        }
    }
    bail!("the server was never seen at work on a slab that was given back")
}

fn given_back(lab: &Lab) -> Result<()> {
    let _device = AtHand::of(lab)?;
    let server = lab.server_with(&["--memory", "5MiB"])?;
    let mut hostile = Tenant::of(lab, &server, 1)?;
    let pairs = [hostile.pair()?, hostile.pair()?];
    let (former, data) = lease_and_give_back(&mut hostile, &server)?;
    // By queue pairs that are older than the slab.
    Tenant::demand_shut(pairs, former.remote, "given back, and still mapped")?;

    let mut other = Tenant::of(lab, &server, 2)?;
    let (others, mut pair) = (other.lease()?, other.pair()?);
    write(&mut pair, others, 0)?;
    let key = former.remote.key;
    for (remote, what) in [
        (former.remote, "its own former"),
        (
            Remote {
                key,
                ..others.remote
            },
            "another's, by its own key",
        ),
        (others.remote, "another's, by that one's key"),
        (
            Remote {
                key: others.remote.key ^ 1,
                ..others.remote
            },
            "a wrong key",
        ),
        (
            Remote {
                key: key ^ 1,
                ..former.remote
            },
            "a wrong key of its own",
        ),
    ] {
        let pairs = [hostile.pair()?, hostile.pair()?];
        Tenant::demand_shut(pairs, remote, what)?;
        demand_content(&mut pair, others, 0).context(what)?;
    }

    // The memory is the system's again; the next one to lease may get it.
    drop(data);
    wait_for("the slab to be unmapped", LONG, || {
        Ok((server.bytes_leased()? == SLAB).then_some(()))
    })?;
    let mut next = Tenant::new(&lab.path("pki"), &server.address, 3)?;
    next.reserve(3)?;
    let leased: Vec<Held> = (0..3).map(|_| next.lease()).collect::<Result<_>>()?;
    let same = |held: &&Held| held.remote.address == former.remote.address;
    let found = leased.iter().find(same);
    let (nexts, mut their) = (*found.unwrap_or(&leased[0]), next.pair()?);
    for page in 0..PAGES {
        let bytes = read(&mut their, nexts, page)?;
        ensure!(bytes == [0; PAGE], "page {page} holds another's bytes");
    }
    write(&mut their, nexts, 0)?;
    let pairs = [hostile.pair()?, hostile.pair()?];
    Tenant::demand_shut(pairs, former.remote, "leased anew")?;
    demand_content(&mut their, nexts, 0)?;
    demand_content(&mut pair, others, 0)?;
    let place = found.map_or("another address", |_| "the same address");
    println!("a_slab_given_back_is_out_of_its_clients_reach: leased anew at {place}");
    Ok(())
}

/// Bytes between slabs whose mappings touch: a slab begins amid a page, and its mapping ends with one.
const BETWEEN: u64 = PAGE as u64;

/// Slabs of two clients whose mappings touch: for each border of a slab of the first one's, upper and lower,
/// the slab and the other's beyond it.
fn touching(own: &[Held], others: &[Held]) -> Result<[(Held, Held); 2]> {
    let all = || {
        own.iter()
            .flat_map(|own| others.iter().map(move |other| (*own, *other)))
    };
    let ends_at =
        |lower: Held, upper: Held| lower.remote.address + SLAB + BETWEEN == upper.remote.address;
    let above = all().find(|(own, other)| ends_at(*own, *other));
    let below = all().find(|(own, other)| ends_at(*other, *own));
    let found = above.zip(below).map(|(above, below)| [above, below]);
    found.context("no slab of the one's lies beside the other's")
}

/// A server that registered more than the slab would have the neighbour's bytes read and written.
fn borders(lab: &Lab) -> Result<()> {
    let _device = AtHand::of(lab)?;
    let server = lab.server_with(&["--memory", "16MiB"])?;
    let pki = lab.path("pki");
    let mut hostile = Tenant::new(&pki, &server.address, 1)?;
    let mut neighbour = Tenant::new(&pki, &server.address, 2)?;
    hostile.reserve(4)?;
    neighbour.reserve(4)?;
    let (mut own, mut others) = (Vec::new(), Vec::new());
    // By turns: the kernel puts one mapping beside the other.
    for _ in 0..4 {
        own.push(hostile.lease()?);
        others.push(neighbour.lease()?);
    }
    let [(lower, above), (upper, below)] = touching(&own, &others)?;
    let mut theirs = neighbour.pair()?;
    write(&mut theirs, above, 0)?;
    write(&mut theirs, below, PAGES - 1)?;
    let (start, end) = (upper.remote.address, lower.remote.address + SLAB);
    let slab = SLAB as u32;
    for (key, address, length, what) in [
        (lower.remote.key, end - 8, 9, "a byte beyond the end"),
        (lower.remote.key, end, 8, "right after the end"),
        (lower.remote.key, end - SLAB, slab + 1, "all and a byte"),
        (lower.remote.key, end + BETWEEN, 8, "the neighbour's first"),
        (upper.remote.key, start - 1, 1, "a byte before the start"),
        (
            upper.remote.key,
            start - BETWEEN - 8,
            8,
            "the neighbour's last",
        ),
        (upper.remote.key, start - 1, 9, "across the start"),
        (upper.remote.key, start - 1, slab + 1, "a byte and all"),
    ] {
        let mut pairs = [hostile.pair()?, hostile.pair()?];
        // What is its own is open to it, to the very border.
        for pair in &mut pairs {
            write(pair, lower, PAGES - 1)?;
            write(pair, upper, 0)?;
        }
        let place = Stretch {
            address,
            key,
            length,
        };
        Tenant::demand_refused(pairs, place, what)?;
        // By the connection that was there all along.
        demand_content(&mut theirs, above, 0).context(what)?;
        demand_content(&mut theirs, below, PAGES - 1).context(what)?;
    }
    let mut pair = hostile.pair()?;
    demand_content(&mut pair, lower, PAGES - 1)?;
    demand_content(&mut pair, upper, 0)
}

/// Data connections of a session that a server admits.
const MOST: usize = 80;

fn crowd(lab: &Lab) -> Result<()> {
    let _device = AtHand::of(lab)?;
    let server = lab.server_with(&["--memory", "4MiB"])?;
    let mut bystander = Tenant::of(lab, &server, 2)?;
    let (others, mut theirs) = (bystander.lease()?, bystander.pair()?);
    write(&mut theirs, others, 0)?;
    let mut tenant = Tenant::of(lab, &server, 1)?;
    let held = tenant.lease()?;
    let mut pairs: Vec<Initiator> = (0..MOST).map(|_| tenant.pair()).collect::<Result<_>>()?;
    // All of them are at work at once.
    for (page, pair) in pairs.iter_mut().enumerate() {
        let place = [stretch(held.remote, page * PAGE, PAGE)];
        pair.write(1, &place, &[&content(page)])?;
    }
    for pair in &mut pairs {
        completed(pair, 1)?;
    }
    let end = Initiator::new(&tenant.domain)?.end();
    match tenant.client.ask(Request::QueuePair { end }) {
        Reply::Refused(refusal @ Refusal::TooMany { .. }) => {
            let words = refusal.to_string();
            let wanted = format!("limit is reached: {MOST} data connections");
            ensure!(words.contains(&wanted), "{words}");
        }
        other => bail!("{other:?} instead of a refusal"),
    }
    // Neither its own, each of which reads what another wrote, nor another client's suffer from it.
    for (page, pair) in pairs.iter_mut().rev().enumerate() {
        demand_content(pair, held, page)?;
    }
    demand_content(&mut theirs, others, 0)?;
    demand_content(&mut bystander.pair()?, others, 0)?;
    // With the session's next connection all that was open is ended, and counts no more.
    let mut tenant = Tenant::new(&lab.path("pki"), &server.address, 1)?;
    let held = tenant.key(held.slab)?;
    demand_content(&mut tenant.pair()?, held, MOST - 1)
}

/// A program that has as many requests in flight as it may, until it is killed.
pub(crate) fn pester(pki: &Path, address: &str) -> Result<()> {
    let mut tenant = Tenant::new(pki, address, 9)?;
    // What the one before it was killed with.
    for slab in tenant.client.welcome.held.clone() {
        tenant.client.release(slab);
    }
    tenant.reserve(1)?;
    let (held, mut pair) = (tenant.lease()?, tenant.pair()?);
    let whole = [stretch(held.remote, 0, SLAB as usize / 2)];
    let bytes = vec![9; SLAB as usize / 2];
    let mut told = false;
    for id in 0.. {
        let posted = match id % 2 {
            0 => pair.write(id, &whole, &[&bytes]),
            _ => pair.read(id, &whole),
        };
        match posted {
            Ok(()) => {}
            Err(PostError::Full) => {
                if !told {
                    println!("in flight");
                    std::io::stdout().flush()?;
                    told = true;
                }
                pair.complete(|_, _| {})?;
            }
            Err(error) => bail!(error),
        }
    }
    Ok(())
}

fn start_pester(lab: &Lab, server: &MemServer) -> Result<Child> {
    let mut child = Command::new(std::env::current_exe()?)
        .env(PESTER, &server.address)
        .arg(lab.path("pki"))
        .stdout(Stdio::piped())
        .spawn()?;
    let output = child.stdout.take().context("a pipe")?;
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    ensure!(line == "in flight\n", "it said: {line}");
    Ok(child)
}

fn killed(lab: &Lab) -> Result<()> {
    let _device = AtHand::of(lab)?;
    let server = lab.server_with(&["--memory", "4MiB"])?;
    let mut bystander = Tenant::of(lab, &server, 1)?;
    let (held, mut pair) = (bystander.lease()?, bystander.pair()?);
    for round in 0..4 {
        // The next one takes over what the one before had.
        let mut victim = start_pester(lab, &server)?;
        let leased = wait_for("each to have its slab", LONG, || {
            Ok((server.bytes_leased()? == 2 * SLAB).then_some(()))
        });
        write(&mut pair, held, round)?;
        victim.kill()?;
        victim.wait()?;
        demand_content(&mut pair, held, round)?;
        leased?;
    }
    (0..4).try_for_each(|page| demand_content(&mut pair, held, page))
}

/// Leases over RDMA, the first of a server's life and one that was prepared; that only what may be lent
/// is, and that nothing stays behind.
fn ahead(lab: &Lab) -> Result<()> {
    const LARGE: u64 = 64 << 20;
    const SPARE: &str = "outram_memserver_spare_bytes";
    let _device = AtHand::of(lab)?;
    let server = lab.server_of(LARGE, &["--memory", "128MiB"])?;
    ensure!(server.metric(SPARE)? == 0, "nobody has asked for RDMA yet");
    let mut tenant = Tenant::new(&lab.path("pki"), &server.address, 1)?;
    tenant.reserve(2 * LARGE / SLAB)?;
    let (_, cold) = tenant.lease_timed()?;
    wait_for("a slab to be ready", LONG, || {
        Ok((server.metric(SPARE)? == LARGE).then_some(()))
    })?;
    ensure!(server.bytes_leased()? == LARGE, "it counts as leased");
    let (held, warm) = tenant.lease_timed()?;
    println!(
        "a_slab_is_made_ready_ahead_of_its_lease: lease and key of {} MiB took {} ms at first, {} ms \
         of one that was ready: {:.3} of it",
        LARGE >> 20,
        cold.as_millis(),
        warm.as_millis(),
        warm.as_secs_f64() / cold.as_secs_f64()
    );
    ensure!(server.bytes_leased()? == 2 * LARGE, "both are leased");
    let mut pair = tenant.pair()?;
    for page in [0, PAGES, 16 * PAGES] {
        ensure!(read(&mut pair, held, page)? == [0; PAGE], "page {page}");
        write(&mut pair, held, page)?;
        demand_content(&mut pair, held, page)?;
    }
    ensure!(server.metric(SPARE)? == 0, "more is taken than may be lent");
    ensure!(tenant.client.ask(Request::Goodbye) == Reply::Done, "no end");
    wait_for("all to be given back", LONG, || {
        let left = server.metric(SPARE)? + server.bytes_leased()?;
        Ok((left == 0).then_some(()))
    })
}
