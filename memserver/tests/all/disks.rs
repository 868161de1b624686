//! Far-memory disks: kept while nobody uses them, one claimant at a time, and never another's.

use std::net::SocketAddr;
use std::time::Duration;

use outram_wire::pki::Issued;
use outram_wire::server::data::{Op, Status};
use outram_wire::server::{
    DiskId, DiskShape, Opening, Purpose, Refusal, Reply, Request, SessionSecret, SlabId,
};
use outram_wire::tls::Kind;

use crate::client::{Client, Pki, SLAB, eventually, extent, metric, scrape, server, vm};

const SHAPE: DiskShape = DiskShape {
    bytes: 3 * SLAB,
    part: 0,
    parts: 1,
};

fn disk() -> DiskId {
    DiskId(uuid::Uuid::from_u128(77))
}

fn open(
    server: SocketAddr,
    identity: &Issued,
    secret: u8,
    opening: Opening,
) -> Result<Client, Refusal> {
    let purpose = Purpose::Disk {
        disk: disk(),
        secret: SessionSecret([secret; 32]),
        opening,
    };
    Client::for_purpose(server, identity, purpose)
}

/// A new disk with one slab.
fn created_with_slab(server: SocketAddr, pki: &Pki) -> (Client, SlabId) {
    let mut client = open(server, &pki.client, 1, Opening::Create(SHAPE)).expect("created");
    client.ask(Request::Reserve { bytes: SLAB });
    let slab = client.lease();
    (client, slab)
}

fn refusal(result: Result<Client, Refusal>) -> Refusal {
    result.err().expect("refused")
}

fn claim_of(client: &Client) -> u64 {
    client.welcome.disk.expect("a disk's welcome").claim
}

#[test]
fn a_parked_disk_keeps_its_bytes_for_whoever_has_its_secret() {
    let pki = Pki::new();
    let server = server(&pki, 4, |config| {
        config.lease_timeout = Duration::from_millis(300);
        config.metrics = Some("127.0.0.1:0".parse().expect("an address"));
    });
    let at = server.local_addr();
    let missing = refusal(open(at, &pki.client, 1, Opening::Claim));
    assert_eq!(missing, Refusal::NoSuchDisk { disk: disk() });
    let mut first = open(at, &pki.client, 1, Opening::Create(SHAPE)).expect("created");
    let bytes = 3 * SLAB;
    assert_eq!(
        first.ask(Request::Reserve { bytes }),
        Reply::Reserved { bytes }
    );
    let slab = first.lease();
    first.data().write(slab, 100, b"kept");
    drop(first);
    eventually("the disk is parked", || {
        server.stats().disks[0].parked_s.is_some()
    });
    // Far beyond a guest's lease.
    std::thread::sleep(Duration::from_millis(900));
    let stats = server.stats();
    assert_eq!((stats.disks[0].slabs, stats.leased_bytes), (1, SLAB));
    assert_eq!(stats.reserved_bytes, 3 * SLAB);
    let page = scrape(server.metrics_addr().expect("metrics are served"));
    let series = format!(
        "outram_memserver_disk_leased_bytes{{client=\"client\",disk=\"{}\",parked=\"true\"}}",
        disk()
    );
    assert_eq!(metric(&page, &series), SLAB);
    assert_eq!(
        refusal(open(at, &pki.client, 2, Opening::Claim)),
        Refusal::DiskSecret { disk: disk() }
    );
    // Another host, as after a migration.
    let other = pki.issue(Kind::Client, "other");
    let mut second = open(at, &other, 1, Opening::Claim).expect("claimed");
    assert_eq!(second.welcome.held, [slab]);
    assert_eq!(second.welcome.disk.map(|disk| disk.shape), Some(SHAPE));
    assert_eq!(second.data().read(slab, 100, 4), b"kept");
}

#[test]
fn the_latest_claim_wins_and_the_former_writes_no_more() {
    let pki = Pki::new();
    let server = server(&pki, 4, |_| {});
    let at = server.local_addr();
    let (mut first, slab) = created_with_slab(at, &pki);
    let mut data = first.data();
    data.write(slab, 0, b"before");
    let other = pki.issue(Kind::Client, "other");
    let mut second = open(at, &other, 1, Opening::Claim).expect("claimed");
    let sent = data.send(Op::Write, &[extent(slab, 0, 6)], b"zombie");
    assert!(sent.is_err() || data.is_over());
    assert_eq!(second.data().read(slab, 0, 6), b"before");
    let again = open(
        at,
        &pki.client,
        1,
        Opening::Resume {
            claim: claim_of(&first),
        },
    );
    let Refusal::DiskClaimed { client, .. } = refusal(again) else {
        panic!("the former claim is no more");
    };
    assert_eq!(client.0, "other");
    // Its own connection may be lost without losing the disk; created anew it is not meanwhile.
    assert!(matches!(
        refusal(open(at, &pki.client, 1, Opening::Create(SHAPE))),
        Refusal::DiskInUse { .. }
    ));
    let claim = claim_of(&second);
    let mut third = open(at, &other, 1, Opening::Resume { claim }).expect("resumed");
    assert_eq!(claim_of(&third), claim);
    assert_eq!(third.data().read(slab, 0, 6), b"before");
}

#[test]
fn created_anew_or_left_for_good_it_is_empty() {
    let pki = Pki::new();
    let server = server(&pki, 4, |_| {});
    let at = server.local_addr();
    let (first, slab) = created_with_slab(at, &pki);
    let former = claim_of(&first);
    drop(first);
    eventually("the disk is parked", || {
        server.stats().disks[0].parked_s.is_some()
    });
    let mut second = open(at, &pki.client, 1, Opening::Create(SHAPE)).expect("created");
    assert!(second.welcome.held.is_empty());
    assert_eq!(server.stats().leased_bytes, 0);
    let stale = refusal(open(at, &pki.client, 1, Opening::Resume { claim: former }));
    assert!(matches!(stale, Refusal::DiskClaimed { .. }), "{stale:?}");
    second.ask(Request::Reserve { bytes: SLAB });
    assert_ne!(second.lease(), slab);
    assert_eq!(second.ask(Request::Goodbye), Reply::Done);
    let stats = server.stats();
    assert!(stats.disks.is_empty(), "{stats:?}");
    assert_eq!((stats.leased_bytes, stats.reserved_bytes), (0, 0));
}

#[test]
fn only_its_last_host_lists_and_drops_a_parked_disk() {
    let pki = Pki::new();
    let server = server(&pki, 4, |_| {});
    let at = server.local_addr();
    let (user, _) = created_with_slab(at, &pki);
    let observer =
        |identity| Client::for_purpose(at, identity, Purpose::Observe).expect("admitted");
    let other = pki.issue(Kind::Client, "other");
    let (mut own, mut strange) = (observer(&pki.client), observer(&other));
    let drop_it = Request::DropDisk { disk: disk() };
    let Reply::Refused(Refusal::DiskInUse { .. }) = own.ask(drop_it.clone()) else {
        panic!("it is in use");
    };
    drop(user);
    eventually("the disk is parked", || {
        server.stats().disks[0].parked_s.is_some()
    });
    let listed = |client: &mut Client| match client.ask(Request::Stats) {
        Reply::Stats(stats) => stats.disks.len(),
        other => panic!("{other:?} instead of statistics"),
    };
    assert_eq!((listed(&mut own), listed(&mut strange)), (1, 0));
    let refused = Reply::Refused(Refusal::NoSuchDisk { disk: disk() });
    assert_eq!(strange.ask(drop_it.clone()), refused);
    assert_eq!(server.stats().leased_bytes, SLAB);
    assert_eq!(own.ask(drop_it.clone()), Reply::Done);
    assert_eq!(server.stats().leased_bytes, 0);
    assert_eq!(own.ask(drop_it), refused);
}

#[test]
fn a_parked_disk_is_dropped_after_its_time_where_one_is_set() {
    let pki = Pki::new();
    let server = server(&pki, 4, |config| {
        config.lease_timeout = Duration::from_millis(200);
        config.parked_disk_timeout = Some(Duration::from_millis(200));
    });
    let at = server.local_addr();
    let (user, _) = created_with_slab(at, &pki);
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(server.stats().disks.len(), 1, "in use, it is not parked");
    drop(user);
    eventually("it is dropped", || server.stats().disks.is_empty());
}

#[test]
fn a_disk_with_nothing_in_it_keeps_no_place_once_it_is_left() {
    let pki = Pki::new();
    let server = server(&pki, 4, |config| {
        config.max_guests = 1;
        config.lease_timeout = Duration::from_millis(200);
    });
    let at = server.local_addr();
    let create = |disk| {
        let purpose = Purpose::Disk {
            disk: DiskId(uuid::Uuid::from_u128(disk)),
            secret: SessionSecret([1; 32]),
            opening: Opening::Create(SHAPE),
        };
        Client::for_purpose(at, &pki.client, purpose)
    };
    let left = create(1).expect("created");
    std::thread::sleep(Duration::from_millis(600));
    assert!(
        matches!(refusal(create(2)), Refusal::TooMany { .. }),
        "it is in use"
    );
    drop(left);
    eventually("it is dropped", || server.stats().disks.is_empty());
    let mut kept = create(2).expect("there is a place");
    // Set aside is enough: nothing is written there yet.
    kept.ask(Request::Reserve { bytes: SLAB });
    drop(kept);
    std::thread::sleep(Duration::from_millis(900));
    assert_eq!(server.stats().disks.len(), 1, "it waits for whoever has it");
}

#[test]
fn a_write_that_is_cut_off_leaves_what_was_there() {
    let pki = Pki::new();
    let server = server(&pki, 4, |_| {});
    let at = server.local_addr();
    let (mut user, slab) = created_with_slab(at, &pki);
    let mut data = user.data();
    let before = vec![1; 300_000];
    data.write(slab, 0, &before);
    let mut frame = Vec::new();
    let whole = [extent(slab, 0, 300_000)];
    outram_wire::server::data::encode_request(Op::Write, 99, &whole, &mut frame).expect("legal");
    frame.extend_from_slice(&[2; 299_999]);
    std::io::Write::write_all(&mut data.socket, &frame).expect("sent");
    drop(data);
    let mut data = user.data();
    eventually("the cut connection has ended", || {
        data.read(slab, 0, 300_000) == before
    });
    std::thread::sleep(Duration::from_millis(100));
    assert!(data.read(slab, 0, 300_000) == before);
    let (header, _) = {
        data.send(Op::Read, &[extent(slab, 0, 1)], &[])
            .expect("sent");
        data.reply().expect("answered")
    };
    assert_eq!(header.status, Status::Done);
}

#[test]
fn a_server_short_of_memory_asks_guests_for_slabs_and_never_a_disk() {
    let pki = Pki::new();
    let server = server(&pki, 6, |_| {});
    let at = server.local_addr();
    let mut user = open(at, &pki.client, 1, Opening::Create(SHAPE)).expect("created");
    user.ask(Request::Reserve { bytes: 3 * SLAB });
    for _ in 0..3 {
        user.lease();
    }
    let mut guest = Client::with_slabs(&server, &pki, 1, 2);
    assert_eq!(guest.welcome.disk, None);
    guest.lease();
    guest.lease();
    assert_eq!(server.stats().clients[0].vm, vm(1));
    assert_eq!(server.set_memory(SLAB), 2);
    assert_eq!(user.ask(Request::Renew), Reply::Done);
    assert!(user.unasked.is_empty(), "{:?}", user.unasked);
}

#[test]
fn what_is_set_aside_for_a_disk_stays_so_where_less_may_be_lent() {
    let pki = Pki::new();
    let server = server(&pki, 6, |_| {});
    let at = server.local_addr();
    let mut user = open(at, &pki.client, 1, Opening::Create(SHAPE)).expect("created");
    let bytes = 3 * SLAB;
    assert_eq!(
        user.ask(Request::Reserve { bytes }),
        Reply::Reserved { bytes }
    );
    user.lease();
    let mut guest = Client::with_slabs(&server, &pki, 1, 3);
    let slabs = [guest.lease(), guest.lease()];
    // Of what is lent all would fit, but not with what the disk may write yet.
    assert_eq!(server.set_memory(4 * SLAB), 1);
    let full = Refusal::ServerFull {
        asked_bytes: SLAB,
        free_bytes: 0,
    };
    assert_eq!(guest.ask(Request::Lease), Reply::Refused(full));
    // Even where nothing may be lent to anybody.
    assert_eq!(server.set_memory(0), 1);
    user.lease();
    user.lease();
    assert!(matches!(
        user.ask(Request::Lease),
        Reply::Refused(Refusal::ReservationExhausted { .. })
    ));
    // Where all may be lent again, nobody is asked any more, and what was given back meanwhile can be leased.
    assert_eq!(server.set_memory(6 * SLAB), 0);
    guest.release(slabs[1]);
    guest.lease();
    guest.lease();
    let mut guest = Client::connect(at, &pki.client, vm(1), 1).expect("resumed");
    assert_eq!(guest.ask(Request::Renew), Reply::Done);
    assert!(guest.unasked.is_empty(), "{:?}", guest.unasked);
}

#[test]
fn memory_that_writes_were_gathered_in_is_there_for_the_next() {
    let pki = Pki::new();
    let server = server(&pki, 4, |_| {});
    let (mut user, slab) = created_with_slab(server.local_addr(), &pki);
    let mut data = user.data();
    // More than there is for one certificate, and each in parts: whole ones that came are not gathered.
    for round in 0..40u8 {
        // One write that ends amid its bytes, and one that does not.
        let mut ending = user.data();
        let sent = ending.send(Op::Write, &[extent(slab, 0, SLAB as u32)], &[0xee; 9000]);
        sent.expect("sent");
        drop(ending);
        data.write(slab, 0, &vec![round; SLAB as usize]);
        assert_eq!(data.read(slab, SLAB as u32 - 1, 1), [round]);
    }
}
