//! Two tenants of one server: a certificate gives no view of another's slabs, names or sizes, and no
//! say over them.

use outram_memserver::Server;
use outram_wire::pki::Issued;
use outram_wire::server::data::{Op, Status};
use outram_wire::server::{
    DiskId, DiskShape, Opening, Purpose, Refusal, Reply, Request, ServerStats, SessionSecret,
    SlabId,
};
use outram_wire::tls::Kind;

use crate::client::{Client, Data, Pki, SLAB, extent, server, vm};

/// A tenant at work, and the certificate of another under the same CA.
struct Street {
    pki: Pki,
    server: Server,
    victim: Client,
    slab: SlabId,
    data: Data,
    thief: Issued,
}

impl Street {
    fn new() -> Self {
        let pki = Pki::new();
        let server = server(&pki, 8, |_| {});
        let mut victim = Client::with_slabs(&server, &pki, 1, 2);
        let slab = victim.lease();
        let mut data = victim.data();
        data.write(slab, 0, &[0xaa; 4096]);
        let thief = pki.issue(Kind::Client, "thief");
        Self {
            pki,
            server,
            victim,
            slab,
            data,
            thief,
        }
    }

    /// A session of the other tenant's, with a slab of its own.
    fn thief(&self) -> (Client, SlabId) {
        let address = self.server.local_addr();
        let mut thief = Client::connect(address, &self.thief, vm(66), 66).expect("admitted");
        let bytes = SLAB;
        assert_eq!(
            thief.ask(Request::Reserve { bytes }),
            Reply::Reserved { bytes }
        );
        let own = thief.lease();
        (thief, own)
    }

    fn untouched(&mut self) {
        assert_eq!(self.victim.ask(Request::Renew), Reply::Done);
        assert_eq!(self.data.read(self.slab, 0, 4096), [0xaa; 4096]);
    }
}

fn stats(client: &mut Client) -> ServerStats {
    match client.ask(Request::Stats) {
        Reply::Stats(stats) => *stats,
        other => panic!("{other:?} instead of statistics"),
    }
}

#[test]
fn a_session_is_not_resumed_under_another_certificate_even_with_its_secret() {
    let mut street = Street::new();
    let address = street.server.local_addr();
    let taken = Client::connect(address, &street.thief, vm(1), 1).err();
    let Some(refusal @ Refusal::SessionTaken { .. }) = taken else {
        panic!("{taken:?}");
    };
    assert!(!refusal.to_string().contains("client"), "{refusal}");
    // Who says that the guest arrives gets a session of its own, and nothing of the other's.
    let mut beside = Client::arrive(address, &street.thief, vm(1), 1).expect("admitted");
    let welcome = &beside.welcome;
    assert_eq!((welcome.resumed, welcome.held.len()), (false, 0));
    assert_eq!(welcome.reserved_bytes, 0);
    let slab = street.slab;
    let refused = Reply::Refused(Refusal::NotLeased { slab });
    assert_eq!(beside.ask(Request::Release { slab }), refused);
    assert_eq!(beside.ask(Request::Goodbye), Reply::Done);
    street.untouched();
}

#[test]
fn guessed_slabs_are_no_different_from_slabs_that_are_not() {
    let mut street = Street::new();
    let (mut thief, own) = street.thief();
    let mut data = thief.data();
    let nowhere = SlabId(street.slab.0 ^ (1 << 50));
    for slab in [street.slab, nowhere] {
        for (op, payload) in [(Op::Read, &[][..]), (Op::Write, &[0xbb; 4096][..])] {
            data.send(op, &[extent(slab, 0, 4096)], payload)
                .expect("sent");
            let (header, bytes) = data.reply().expect("answered");
            assert_eq!((header.status, bytes.len()), (Status::NotLeased, 0));
        }
        let refused = Reply::Refused(Refusal::NotLeased { slab });
        assert_eq!(thief.ask(Request::Release { slab }), refused);
    }
    assert_eq!(data.read(own, 0, 4096), [0; 4096]);
    street.untouched();
}

#[test]
fn a_used_token_of_another_opens_nothing() {
    let mut street = Street::new();
    let token = street.victim.token();
    let _own = Data::connect(street.server.local_addr(), &token).expect("admitted");
    let _thief = street.thief();
    assert!(Data::connect(street.server.local_addr(), &token).is_err());
    street.untouched();
}

#[test]
fn nothing_of_another_shows_in_statistics_and_numbers() {
    let mut street = Street::new();
    let (mut thief, first) = street.thief();
    let before = stats(&mut thief);
    assert_eq!(before.reserved_bytes, SLAB);
    assert_eq!(before.leased_bytes, SLAB);
    assert_eq!(
        before.memory_bytes,
        (8 - 2) * SLAB,
        "its own, and what is free"
    );
    let clients: Vec<_> = before.clients.iter().map(|client| client.vm).collect();
    assert_eq!(clients, [vm(66)]);
    // What another leases and connects out of its own reservation changes nothing here.
    street.victim.lease();
    let _more = street.victim.data();
    assert_eq!(stats(&mut thief), before);
    thief.ask(Request::Reserve { bytes: 2 * SLAB });
    assert_eq!(thief.lease(), SlabId(first.0 + 1), "its own count goes on");
    street.untouched();
}

#[test]
fn a_disk_of_another_is_not_listed_claimed_or_dropped() {
    let street = Street::new();
    let address = street.server.local_addr();
    let disk = DiskId(uuid::Uuid::from_u128(77));
    let shape = DiskShape {
        bytes: 8 * SLAB,
        part: 0,
        parts: 1,
    };
    let open = |identity: &Issued, secret: u8, opening: Opening| {
        let secret = SessionSecret([secret; 32]);
        let purpose = Purpose::Disk {
            disk,
            secret,
            opening,
        };
        Client::for_purpose(address, identity, purpose)
    };
    let owner = open(&street.pki.client, 1, Opening::Create(shape)).expect("created");
    let claim = owner.welcome.disk.expect("a disk's welcome").claim;
    for opening in [
        Opening::Create(shape),
        Opening::Claim,
        Opening::Resume { claim },
    ] {
        let refusal = open(&street.thief, 2, opening).err().expect("refused");
        assert_eq!(refusal, Refusal::DiskSecret { disk });
    }
    let mut observer =
        Client::for_purpose(address, &street.thief, Purpose::Observe).expect("admitted");
    let shown = stats(&mut observer);
    assert!(shown.disks.is_empty() && shown.clients.is_empty());
    // One that is there and one that never was are refused alike.
    for disk in [disk, DiskId(uuid::Uuid::from_u128(78))] {
        let refused = Reply::Refused(Refusal::NoSuchDisk { disk });
        assert_eq!(observer.ask(Request::DropDisk { disk }), refused);
    }
    let again = open(&street.pki.client, 1, Opening::Claim).expect("claimed");
    let next = again.welcome.disk.expect("a disk's welcome").claim;
    assert!(next.abs_diff(claim) > 1 << 20, "claims are not counted");
}

#[test]
fn one_certificate_has_no_more_than_its_share() {
    let pki = Pki::new();
    let share = |config: &mut outram_memserver::Config| {
        config.client_memory_bytes = Some(3 * SLAB);
    };
    let server = server(&pki, 8, share);
    let mut first = Client::with_slabs(&server, &pki, 1, 2);
    let mut second = Client::with_slabs(&server, &pki, 2, 1);
    let more = second.ask(Request::Reserve { bytes: 2 * SLAB });
    let full = Refusal::ServerFull {
        asked_bytes: 2 * SLAB,
        free_bytes: SLAB,
    };
    assert_eq!(more, Reply::Refused(full));
    assert_eq!(
        stats(&mut first).memory_bytes,
        3 * SLAB,
        "all that it may have"
    );
    // Another certificate has its own.
    let other = pki.issue(Kind::Client, "other");
    let mut other = Client::connect(server.local_addr(), &other, vm(3), 1).expect("admitted");
    let bytes = 3 * SLAB;
    assert_eq!(
        other.ask(Request::Reserve { bytes }),
        Reply::Reserved { bytes }
    );
    // What is given back is to be had again.
    let bytes = SLAB;
    assert_eq!(
        first.ask(Request::Reserve { bytes }),
        Reply::Reserved { bytes }
    );
    let bytes = 2 * SLAB;
    assert_eq!(
        second.ask(Request::Reserve { bytes }),
        Reply::Reserved { bytes }
    );
}
