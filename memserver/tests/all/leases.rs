//! What a client may count on: its slabs are its own, empty at first, and kept while it is heard of.

use std::io::Write;
use std::thread;
use std::time::Duration;

use outram_wire::server::control::MAX_SLABS;
use outram_wire::server::data::{self, MAX_PAYLOAD_BYTES, Op, Status};
use outram_wire::server::{
    DiskId, DiskShape, Opening, Purpose, Refusal, Reply, Request, ServerMessage, SessionSecret,
    SlabId,
};

use crate::client::{
    self, Client, Data, Pki, SLAB, eventually, extent, metric, scrape, server, vm,
};

/// Bytes that differ from place to place.
fn pattern(seed: u8, length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| seed ^ ((at * 31) >> 3) as u8)
        .collect()
}

#[test]
fn bytes_come_back_from_where_they_were_put() {
    let pki = Pki::new();
    let server = server(&pki, 4, |_| {});
    let mut client = Client::with_slabs(&server, &pki, 1, 2);
    let (first, second) = (client.lease(), client.lease());
    let (mut writer, mut reader) = (client.data(), client.data());
    let bytes = pattern(7, 300_000);
    writer.write(first, 4096, &bytes);
    writer.write(second, 0, &bytes[..4096]);
    assert_eq!(reader.read(first, 4096, 300_000), bytes);
    assert_eq!(reader.read(second, 0, 4096), bytes[..4096]);
    assert!(
        reader
            .read(second, 4096, 4096)
            .iter()
            .all(|byte| *byte == 0)
    );
    // One request over both slabs, in an order of its own.
    let extents = [extent(second, 100, 50), extent(first, 5000, 70)];
    reader.send(Op::Read, &extents, &[]).expect("sent");
    let (_, both) = reader.reply().expect("answered");
    assert_eq!(both, [&bytes[100..150], &bytes[904..974]].concat());
    server.stop();
}

#[test]
fn the_largest_requests_fit_and_many_may_be_in_flight() {
    let pki = Pki::new();
    let server = server(&pki, 8, |_| {});
    let mut client = Client::with_slabs(&server, &pki, 1, 4);
    let slabs: Vec<SlabId> = (0..4).map(|_| client.lease()).collect();
    let mut data = client.data();
    let bytes = pattern(3, MAX_PAYLOAD_BYTES);
    let whole: Vec<_> = slabs.iter().map(|id| extent(*id, 0, SLAB as u32)).collect();
    data.send(Op::Write, &whole, &bytes).expect("sent");
    let pages: Vec<_> = (0..256u32)
        .map(|page| extent(slabs[page as usize % 4], page * 4096 % SLAB as u32, 4096))
        .collect();
    let single: Vec<u64> = pages
        .iter()
        .map(|page| data.send(Op::Read, &[*page], &[]).expect("sent"))
        .collect();
    assert_eq!(data.reply().expect("answered").0.status, Status::Done);
    for (id, page) in single.into_iter().zip(&pages) {
        let (header, payload) = data.reply().expect("answered");
        let slab = slabs.iter().position(|id| *id == page.slab).expect("ours");
        let at = slab * SLAB as usize + page.offset as usize;
        assert_eq!(header.id, id);
        assert!(payload == bytes[at..at + 4096], "page at {at}");
    }
    data.send(Op::Read, &pages, &[]).expect("sent");
    assert_eq!(data.reply().expect("answered").1.len(), 256 * 4096);
}

#[test]
fn requests_of_all_sorts_that_come_together_are_answered_in_order() {
    let pki = Pki::new();
    let server = server(&pki, 4, |_| {});
    let mut client = Client::with_slabs(&server, &pki, 1, 1);
    let slab = client.lease();
    let mut data = client.data();
    let mut truth = pattern(5, 256 * 1024);
    data.write(slab, 0, &truth);
    // Extents of one byte, of pages, and as many as there may be; among them writes and what is refused.
    let mut random = 1u32;
    let mut awaited = Vec::new();
    let mut burst = Vec::new();
    for number in 0..600u32 {
        let mut below = |bound: u32| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) % bound
        };
        let count = [1, 1, 1, 3, 256][below(5) as usize];
        let lengths: &[u32] = if count == 256 {
            &[1, 7]
        } else {
            &[1, 4096, 9000]
        };
        let extents: Vec<_> = (0..count)
            .map(|_| {
                let length = lengths[below(lengths.len() as u32) as usize];
                extent(slab, below(truth.len() as u32 - length), length)
            })
            .collect();
        let ranges = extents.iter().map(|extent| {
            let start = extent.offset as usize;
            start..start + extent.length as usize
        });
        let (op, payload, outcome, answer) = match below(12) {
            0 => {
                let bytes = pattern(number as u8, ranges.clone().map(|range| range.len()).sum());
                let mut rest = &bytes[..];
                for range in ranges {
                    let (here, later) = rest.split_at(range.len());
                    truth[range].copy_from_slice(here);
                    rest = later;
                }
                (Op::Write, bytes, Status::Done, Vec::new())
            }
            1 => {
                let beyond = [extent(slab, SLAB as u32, 1)];
                data::encode_request(Op::Read, number.into(), &beyond, &mut burst).expect("legal");
                awaited.push((number, Status::OutOfRange, Vec::new()));
                continue;
            }
            _ => {
                let bytes = ranges.flat_map(|range| truth[range].to_vec()).collect();
                (Op::Read, Vec::new(), Status::Done, bytes)
            }
        };
        data::encode_request(op, number.into(), &extents, &mut burst).expect("legal");
        burst.extend(payload);
        awaited.push((number, outcome, answer));
    }
    let mut writer = data.socket.try_clone().expect("a second handle");
    let sender = thread::spawn(move || writer.write_all(&burst));
    for (number, status, bytes) in awaited {
        let (header, got) = data.reply().expect("answered");
        assert_eq!((header.id, header.status), (number.into(), status));
        assert!(got == bytes, "other bytes in answer {number}");
    }
    sender.join().expect("no panic").expect("sent");
    server.stop();
}

#[test]
fn a_released_slab_is_given_back_and_the_next_one_is_empty() {
    let pki = Pki::new();
    let server = server(&pki, 1, |_| {});
    let mut client = Client::with_slabs(&server, &pki, 1, 1);
    let slab = client.lease();
    let mut data = client.data();
    data.write(slab, 0, &pattern(1, SLAB as usize));
    client.release(slab);
    assert_eq!(server.stats().leased_bytes, 0);
    data.send(Op::Read, &[extent(slab, 0, 4096)], &[])
        .expect("sent");
    assert_eq!(data.reply().expect("answered").0.status, Status::NotLeased);
    let next = client.lease();
    assert_ne!(next, slab);
    assert!(
        data.read(next, 0, SLAB as u32)
            .iter()
            .all(|byte| *byte == 0)
    );
    let twice = client.ask(Request::Release { slab });
    assert_eq!(twice, Reply::Refused(Refusal::NotLeased { slab }));
}

#[test]
fn no_more_slabs_are_promised_than_a_welcome_can_list() {
    let pki = Pki::new();
    let server = server(&pki, 2 * MAX_SLABS, |_| {});
    let disk = Purpose::Disk {
        disk: DiskId(uuid::Uuid::from_u128(77)),
        secret: SessionSecret([1; 32]),
        opening: Opening::Create(DiskShape {
            bytes: (MAX_SLABS + 1) * SLAB,
            part: 0,
            parts: 1,
        }),
    };
    let address = server.local_addr();
    let mut disk = Client::for_purpose(address, &pki.client, disk).expect("made");
    let refused = disk.ask(Request::Reserve {
        bytes: (MAX_SLABS + 1) * SLAB,
    });
    assert!(
        matches!(refused, Reply::Refused(Refusal::TooMany { .. })),
        "{refused:?}"
    );
    drop(disk);
    let mut client = Client::with_slabs(&server, &pki, 1, MAX_SLABS);
    let more = client.ask(Request::Reserve {
        bytes: MAX_SLABS * SLAB + 1,
    });
    let Reply::Refused(refusal @ Refusal::TooMany { limit, .. }) = more else {
        panic!("not refused: {more:?}");
    };
    assert_eq!(limit, MAX_SLABS);
    assert!(refusal.to_string().contains("--slab-size"), "{refusal}");
    assert_eq!(server.stats().reserved_bytes, MAX_SLABS * SLAB);
    // Another guest is promised the rest.
    Client::with_slabs(&server, &pki, 2, MAX_SLABS);
}

#[test]
fn what_is_reserved_is_not_promised_twice() {
    let pki = Pki::new();
    let server = server(&pki, 4, |_| {});
    let mut first = Client::with_slabs(&server, &pki, 1, 3);
    let mut second = Client::with_slabs(&server, &pki, 2, 0);
    let full = |asked, free| {
        Reply::Refused(Refusal::ServerFull {
            asked_bytes: asked * SLAB,
            free_bytes: free * SLAB,
        })
    };
    let reserve = |slabs| Request::Reserve {
        bytes: slabs * SLAB,
    };
    assert_eq!(second.ask(reserve(2)), full(2, 1));
    let none = Refusal::ReservationExhausted { reserved_bytes: 0 };
    assert_eq!(second.ask(Request::Lease), Reply::Refused(none));
    // Less than a slab is a slab.
    let reply = second.ask(Request::Reserve { bytes: 1 });
    assert_eq!(reply, Reply::Reserved { bytes: SLAB });
    assert_eq!(first.ask(reserve(4)), full(4, 3));
    let huge = second.ask(Request::Reserve { bytes: u64::MAX });
    assert!(matches!(huge, Reply::Refused(Refusal::ServerFull { .. })));
    // What is leased stays reserved.
    first.lease();
    assert_eq!(first.ask(reserve(0)), Reply::Reserved { bytes: SLAB });
    assert_eq!(second.ask(reserve(3)), Reply::Reserved { bytes: 3 * SLAB });
    assert_eq!(server.stats().reserved_bytes, 4 * SLAB);
}

#[test]
fn a_slab_of_another_is_out_of_reach() {
    let pki = Pki::new();
    let server = server(&pki, 4, |_| {});
    let mut owner = Client::with_slabs(&server, &pki, 1, 1);
    let mut other = Client::with_slabs(&server, &pki, 2, 1);
    let slab = owner.lease();
    let own = other.lease();
    let mut data = owner.data();
    data.write(slab, 0, &[0xaa; 4096]);
    let mut thief = other.data();
    let payload = [0xbb; 8192];
    let extents = [extent(own, 0, 4096), extent(slab, 0, 4096)];
    thief.send(Op::Write, &extents, &payload).expect("sent");
    let (header, _) = thief.reply().expect("answered");
    assert_eq!((header.status, header.extent), (Status::NotLeased, 1));
    // Nothing of a refused request happens, and the connection goes on.
    assert_eq!(thief.read(own, 0, 4096), [0; 4096]);
    thief
        .send(Op::Read, &[extent(slab, 0, 1)], &[])
        .expect("sent");
    assert_eq!(thief.reply().expect("answered").0.status, Status::NotLeased);
    let refused = Reply::Refused(Refusal::NotLeased { slab });
    assert_eq!(other.ask(Request::Release { slab }), refused);
    assert_eq!(data.read(slab, 0, 4096), [0xaa; 4096]);
}

#[test]
fn ranges_past_a_slabs_end_are_refused() {
    let pki = Pki::new();
    let server = server(&pki, 4, |_| {});
    let mut client = Client::with_slabs(&server, &pki, 1, 2);
    let slab = client.lease();
    let mut data = client.data();
    let size = SLAB as u32;
    for (offset, length) in [(size, 1), (size - 1, 2), (u32::MAX, 1), (u32::MAX, 4096)] {
        let extents = [extent(slab, 0, 1), extent(slab, offset, length)];
        data.send(Op::Read, &extents, &[]).expect("sent");
        let (header, _) = data.reply().expect("answered");
        assert_eq!((header.status, header.extent), (Status::OutOfRange, 1));
        let payload = vec![1; length as usize + 1];
        data.send(Op::Write, &extents, &payload).expect("sent");
        let (header, _) = data.reply().expect("answered");
        assert_eq!((header.status, header.extent), (Status::OutOfRange, 1));
    }
    assert_eq!(data.read(slab, 0, 1), [0]);
}

#[test]
fn a_client_that_is_not_heard_of_loses_its_slabs() {
    let pki = Pki::new();
    // Longer than a busy machine lets the client sleep.
    let lease = Duration::from_secs(12);
    let server = server(&pki, 2, |config| {
        config.lease_timeout = lease;
        config.metrics = Some("127.0.0.1:0".parse().expect("an address"));
    });
    let mut client = Client::with_slabs(&server, &pki, 1, 2);
    let mut data = client.data();
    let slab = client.lease();
    data.write(slab, 0, &[1; 4096]);
    // Renewing keeps everything for longer than the lease.
    for _ in 0..15 {
        std::thread::sleep(lease / 12);
        assert_eq!(client.ask(Request::Renew), Reply::Done);
    }
    assert_eq!(data.read(slab, 0, 1), [1]);
    eventually("the lease ends", || server.stats().clients.is_empty());
    assert!(data.is_over());
    assert!(client.try_ask(Request::Renew).is_err());
    eventually("its memory is free", || server.stats().leased_bytes == 0);
    let mut again = Client::with_slabs(&server, &pki, 1, 2);
    assert!(!again.welcome.resumed && again.welcome.held.is_empty());
    let fresh = again.lease();
    assert_eq!(again.data().read(fresh, 0, 4096), [0; 4096]);
    let page = scrape(server.metrics_addr().expect("asked for"));
    assert_eq!(metric(&page, "outram_memserver_expired_sessions_total"), 1);
    assert_eq!(metric(&page, "outram_memserver_expired_slabs_total"), 1);
}

#[test]
fn a_client_that_returns_finds_its_slabs_and_its_old_connections_ended() {
    let pki = Pki::new();
    let server = server(&pki, 2, |_| {});
    let mut client = Client::with_slabs(&server, &pki, 1, 2);
    let slab = client.lease();
    let mut old = client.data();
    let unused = client.token();
    old.write(slab, 0, &[5; 4096]);
    // A write that has begun, and would land later.
    let mut frame = Vec::new();
    let whole = [extent(slab, 0, 8192)];
    outram_wire::server::data::encode_request(Op::Write, 9, &whole, &mut frame).expect("legal");
    std::io::Write::write_all(&mut old.socket, &frame).expect("sent");
    let address = server.local_addr();
    let mut again = Client::connect(address, &pki.client, vm(1), 1).expect("admitted");
    assert!(again.welcome.resumed);
    assert_eq!(again.welcome.held, [slab]);
    assert_eq!(again.welcome.reserved_bytes, 2 * SLAB);
    assert!(old.is_over());
    assert!(client.try_ask(Request::Renew).is_err());
    assert!(Data::connect(address, &unused).is_err());
    assert_eq!(again.data().read(slab, 0, 4096), [5; 4096]);
}

#[test]
fn a_session_is_nobody_elses() {
    let pki = Pki::new();
    let server = server(&pki, 2, |_| {});
    let mut client = Client::with_slabs(&server, &pki, 1, 2);
    let slab = client.lease();
    let address = server.local_addr();
    let stranger = pki.issue(outram_wire::tls::Kind::Client, "stranger");
    for (identity, secret) in [(&pki.client, 2), (&stranger, 1), (&stranger, 2)] {
        let refused = Client::connect(address, identity, vm(1), secret).err();
        assert!(
            matches!(refused, Some(Refusal::SessionTaken { .. })),
            "{refused:?}"
        );
    }
    assert_eq!(client.data().read(slab, 0, 1), [0]);
}

#[test]
fn a_backend_that_is_gone_keeps_its_guest_from_nothing() {
    let pki = Pki::new();
    let server = server(&pki, 2, |_| {});
    let mut gone = Client::with_slabs(&server, &pki, 1, 2);
    let slabs = [gone.lease(), gone.lease()];
    let mut data = gone.data();
    data.write(slabs[0], 0, &[1; 4096]);
    drop(gone);
    eventually("its end is noticed", || {
        !server.stats().clients[0].connected
    });
    let address = server.local_addr();
    let stranger = pki.issue(outram_wire::tls::Kind::Client, "stranger");
    let refused = Client::connect(address, &stranger, vm(1), 2).err();
    assert!(matches!(refused, Some(Refusal::SessionTaken { .. })));
    let fresh = Client::connect(address, &pki.client, vm(1), 2).expect("admitted");
    assert!(!fresh.welcome.resumed && fresh.welcome.held.is_empty());
    assert!(data.is_over());
    let stats = server.stats();
    assert_eq!((stats.leased_bytes, stats.reserved_bytes), (0, 0));
    // The former secret is worth nothing any more.
    let refused = Client::connect(address, &pki.client, vm(1), 1).err();
    assert!(matches!(refused, Some(Refusal::SessionTaken { .. })));
}

#[test]
fn source_and_destination_of_a_migration_have_a_session_each() {
    let pki = Pki::new();
    let server = server(&pki, 4, |_| {});
    let address = server.local_addr();
    let mut source = Client::with_slabs(&server, &pki, 1, 1);
    let kept = source.lease();
    source.data().write(kept, 0, &[1; 4096]);
    let elsewhere = pki.issue(outram_wire::tls::Kind::Client, "elsewhere");
    // Under another certificate, and under the same one for hosts that share theirs.
    for (identity, secret) in [(&elsewhere, 2), (&pki.client, 3)] {
        let mut arrived = Client::arrive(address, identity, vm(1), secret).expect("admitted");
        assert!(!arrived.welcome.resumed && arrived.welcome.held.is_empty());
        let slab_bytes = arrived.welcome.slab_bytes;
        let reply = arrived.ask(Request::Reserve { bytes: slab_bytes });
        assert_eq!(reply, Reply::Reserved { bytes: slab_bytes });
        let slab = arrived.lease();
        arrived.data().write(slab, 0, &[2; 4096]);
        assert_eq!(source.data().read(kept, 0, 4096), [1; 4096]);
        // A third is one too many, however it comes; so is a start by mistake.
        for outcome in [
            Client::arrive(address, identity, vm(1), 9),
            Client::connect(address, identity, vm(1), 9),
            Client::connect(address, &pki.client, vm(1), 9),
        ] {
            let refused = outcome.err();
            assert!(
                matches!(refused, Some(Refusal::SessionTaken { .. })),
                "{refused:?}"
            );
        }
        // Both come back to what is theirs.
        source = Client::connect(address, &pki.client, vm(1), 1).expect("its own");
        assert_eq!(source.welcome.held, [kept]);
        arrived = Client::connect(address, identity, vm(1), secret).expect("its own");
        assert_eq!(arrived.welcome.held, [slab]);
        assert_eq!(arrived.ask(Request::Goodbye), Reply::Done);
        assert_eq!(source.data().read(kept, 0, 4096), [1; 4096]);
    }
    let arrived = Client::arrive(address, &elsewhere, vm(1), 4).expect("admitted");
    assert_eq!(source.ask(Request::Goodbye), Reply::Done);
    // The guest lives there now: it can be migrated back.
    let refused = Client::connect(address, &pki.client, vm(1), 5).err();
    assert!(matches!(refused, Some(Refusal::SessionTaken { .. })));
    assert!(Client::arrive(address, &pki.client, vm(1), 5).is_ok());
    drop(arrived);
}

#[test]
fn an_arrival_takes_the_place_of_a_failed_one_but_never_its_sources() {
    let pki = Pki::new();
    let server = server(&pki, 4, |_| {});
    let address = server.local_addr();
    let mut source = Client::with_slabs(&server, &pki, 1, 1);
    let kept = source.lease();
    source.data().write(kept, 0, &[1; 4096]);
    // The source is cut off for a moment, its destination under the same certificate dies and tries
    // again: twice.
    drop(source);
    let connected = || {
        let clients = server.stats().clients;
        clients.iter().filter(|client| client.connected).count()
    };
    eventually("its end is noticed", || connected() == 0);
    for secret in [2, 3, 4] {
        let arrived = Client::arrive(address, &pki.client, vm(1), secret).expect("admitted");
        assert!(!arrived.welcome.resumed);
        drop(arrived);
        eventually("its end is noticed", || connected() == 0);
        assert_eq!(server.stats().clients.len(), 2);
    }
    let source = Client::connect(address, &pki.client, vm(1), 1).expect("its own");
    assert!(source.welcome.resumed);
    assert_eq!(source.welcome.held, [kept]);
    drop(source);
    eventually("its end is noticed", || connected() == 0);
    // A start of the guest on that host means that neither lives any more.
    let fresh = Client::connect(address, &pki.client, vm(1), 7).expect("admitted");
    assert!(!fresh.welcome.resumed);
    let stats = server.stats();
    assert_eq!((stats.clients.len(), stats.leased_bytes), (1, 0));
}

#[test]
fn a_goodbye_frees_everything() {
    let pki = Pki::new();
    let server = server(&pki, 2, |_| {});
    let mut client = Client::with_slabs(&server, &pki, 1, 2);
    client.lease();
    client.lease();
    let mut data = client.data();
    assert_eq!(client.ask(Request::Goodbye), Reply::Done);
    let stats = server.stats();
    assert_eq!((stats.leased_bytes, stats.reserved_bytes), (0, 0));
    assert!(stats.clients.is_empty());
    assert!(data.is_over());
    // The name is free for another secret.
    assert!(Client::connect(server.local_addr(), &pki.client, vm(1), 9).is_ok());
}

#[test]
fn lent_memory_that_is_wanted_back_is_asked_for() {
    let pki = Pki::new();
    let server = server(&pki, 4, |_| {});
    let mut large = Client::with_slabs(&server, &pki, 1, 3);
    let mut small = Client::with_slabs(&server, &pki, 2, 1);
    let slabs = [large.lease(), large.lease(), large.lease()];
    small.lease();
    assert_eq!(server.set_memory(2 * SLAB), 2);
    assert_eq!(server.set_memory(2 * SLAB), 0, "asked for already");
    eventually("both are asked for", || {
        large.ask(Request::Renew);
        large.unasked.len() == 2
    });
    let asked: Vec<SlabId> = large
        .unasked
        .drain(..)
        .map(|message| match message {
            ServerMessage::Vacate { slab } => slab,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(asked, [slabs[2], slabs[1]]);
    small.ask(Request::Renew);
    assert!(small.unasked.is_empty());
    // Who comes back is asked again, and what is given back stays back.
    let address = server.local_addr();
    let mut large = Client::connect(address, &pki.client, vm(1), 1).expect("admitted");
    for slab in asked {
        large.release(slab);
    }
    eventually("both are asked for again", || {
        large.ask(Request::Renew);
        large.unasked.len() == 2
    });
    let refused = large.ask(Request::Lease);
    assert!(matches!(
        refused,
        Reply::Refused(Refusal::ReservationExhausted { .. })
    ));
    assert_eq!(server.stats().leased_bytes, 2 * SLAB);
}

#[test]
fn statistics_show_a_clients_own_guests_alone() {
    let pki = Pki::new();
    let server = server(&pki, 4, |_| {});
    let mut client = Client::with_slabs(&server, &pki, 1, 2);
    client.lease();
    let _data = client.data();
    let other = pki.issue(outram_wire::tls::Kind::Client, "other");
    let mut other = Client::connect(server.local_addr(), &other, vm(2), 1).expect("admitted");
    let Reply::Stats(stats) = client.ask(Request::Stats) else {
        panic!("no statistics");
    };
    assert_eq!(stats.clients.len(), 1);
    assert_eq!(stats.clients[0].vm, vm(1));
    assert_eq!(stats.clients[0].slabs, 1);
    assert_eq!(stats.clients[0].data_connections, 1);
    assert_eq!((stats.reserved_bytes, stats.leased_bytes), (2 * SLAB, SLAB));
    let Reply::Stats(stats) = other.ask(Request::Stats) else {
        panic!("no statistics");
    };
    assert_eq!(stats.clients.len(), 1);
    assert_eq!(stats.clients[0].vm, vm(2));
}

#[test]
fn two_writers_of_one_place_leave_one_of_their_bytes() {
    let pki = Pki::new();
    let server = server(&pki, 1, |_| {});
    let mut client = Client::with_slabs(&server, &pki, 1, 1);
    let slab = client.lease();
    let writers = [0x11u8, 0x22].map(|byte| {
        let mut data = client.data();
        std::thread::spawn(move || {
            for _ in 0..50 {
                data.write(slab, 0, &[byte; 20_000]);
            }
        })
    });
    for writer in writers {
        writer.join().expect("each was answered");
    }
    let bytes = client.data().read(slab, 0, 20_000);
    assert!(bytes.iter().all(|byte| matches!(byte, 0x11 | 0x22)));
}

#[test]
fn a_stopping_server_says_so() {
    let pki = Pki::new();
    let server = server(&pki, 1, |_| {});
    let mut client = Client::with_slabs(&server, &pki, 1, 1);
    let mut data = client.data();
    let address = server.local_addr();
    server.stop();
    let last = client::receive(&mut client.channel);
    assert_eq!(last.expect("a last word"), ServerMessage::Closing);
    assert!(client::receive(&mut client.channel).is_err());
    assert!(data.is_over());
    assert!(std::net::TcpStream::connect(address).is_err());
}
