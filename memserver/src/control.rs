//! A client's control connection, once TLS stands: hello, then requests until either side ends it.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use outram_wire::causes::with_causes;
use outram_wire::logging::Seldom;
use outram_wire::server::channel::{Channel, ChannelError, EventFd, Received, new_waker};
use outram_wire::server::control::agree_version;
use outram_wire::server::{
    ClientMessage, ClientName, DiskId, Purpose, Refusal, Reply, Request, ServerMessage,
    VERBS_VERSION, Welcome,
};
use outram_wire::units::format_size;
use outram_wire::verbs::{Choice, End, VerbsError};

use crate::ledger::{Caller, Ended, Hold, Ledger, Wish};
use crate::lobby::Place;
use crate::metrics::{Metrics, Outcome, With};
use crate::session::{Holder, Seat};
use crate::verbs::{Answer, MOST_REGISTERED_BYTES, PairError};

/// A client that does not take an answer for so long is left.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// An observer that asks nothing for so long is left; guests are held by their lease.
const OBSERVER_IDLE: Duration = Duration::from_secs(60);

/// What a control connection works with.
pub(crate) struct Desk {
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) metrics: Metrics,
    /// Which RDMA device is used.
    pub(crate) rdma: Choice,
}

/// Serves the client until it goes, or must go. It keeps its place among the callers for as long as it
/// has no session.
pub(crate) fn serve(
    desk: &Desk,
    mut channel: Channel,
    socket: &Arc<TcpStream>,
    place: Place<ClientName>,
    name: &ClientName,
    hello_by: Instant,
) -> Result<(), ChannelError> {
    let (version, purpose) = match await_hello(&mut channel, hello_by)? {
        Ok(agreed) => agreed,
        Err(refusal) => return refuse(channel, refusal),
    };
    let (wish, holder, secret) = match purpose {
        Purpose::Observe => return observe(desk, channel, name, version),
        Purpose::Guest {
            vm,
            secret,
            arrives,
        } => (
            Wish::Guest { vm, arrives },
            Holder::Guest(vm, Seat::First),
            secret,
        ),
        Purpose::Disk {
            disk,
            secret,
            opening,
        } => (Wish::Disk(disk, opening), Holder::Disk(disk), secret),
    };
    let waker = Arc::new(new_waker().map_err(ChannelError::Io)?);
    let caller = Caller {
        wish,
        name,
        secret,
        socket,
        waker: &waker,
    };
    match desk.ledger.admit(&caller) {
        Ok(hold) => {
            drop(place);
            if let Some(slabs) = hold.superseded_slabs {
                desk.metrics.superseded_sessions.inc();
                tracing::warn!(%holder, client = %name, slabs, "a new backend takes the place of one that is gone: its slabs are freed");
            }
            tracing::info!(%holder, client = %name, resumed = hold.resumed, slabs = hold.held.len(), "a backend connected");
            let verbs = version >= VERBS_VERSION && offers_verbs(desk, &hold, socket);
            let served = serve_guest(desk, channel, &hold, &waker, (version, verbs));
            desk.ledger.leave(&hold);
            tracing::info!(%holder, client = %name, "a backend disconnected");
            served
        }
        Err(refusal) => {
            tracing::warn!(%holder, client = %name, %refusal, "a backend is refused");
            refuse(channel, refusal)
        }
    }
}

/// Whether there is a device for the client, and RDMA ready there. A far-memory disk's blocks are
/// written whole or not at all, which a one-sided write does not promise: they go over TCP.
fn offers_verbs(desk: &Desk, hold: &Hold, socket: &TcpStream) -> bool {
    let holder = hold.session.holder;
    if holder.is_disk() || desk.rdma == Choice::Off {
        return false;
    }
    if desk.ledger.terms.slab_bytes > MOST_REGISTERED_BYTES {
        let most = format_size(MOST_REGISTERED_BYTES);
        tracing::info!(%holder, "no RDMA is offered: slabs of more than {most} are not registered with devices");
        return false;
    }
    let local = socket
        .local_addr()
        .map_err(|source| VerbsError::NoPort(source.to_string()));
    let ready = local.and_then(|local| {
        let port = desk.rdma.port(local.ip())?;
        hold.session.prepare_verbs(&port)?;
        Ok(port)
    });
    match ready {
        Ok(port) => {
            tracing::info!(%holder, %port, "RDMA is offered");
            true
        }
        Err(error) => {
            // What is not offered is not held either: it may be a device that is to go.
            hold.session.close_verbs();
            let words = with_causes(&error);
            tracing::info!(%holder, "no RDMA is offered: {words}");
            false
        }
    }
}

/// The first message: the version agreed upon and what the connection is for.
fn await_hello(
    channel: &mut Channel,
    hello_by: Instant,
) -> Result<Result<(u32, Purpose), Refusal>, ChannelError> {
    Ok(match channel.receive(hello_by, None)? {
        Received::Message(ClientMessage::Hello(hello)) => {
            agree_version(&hello).map(|version| (version, hello.purpose))
        }
        Received::Message(ClientMessage::Request { .. }) => Err(Refusal::Unexpected {
            expected: "a hello first".to_owned(),
        }),
        Received::TimedOut | Received::Woken => return Err(ChannelError::TimedOut("say hello")),
    })
}

fn refuse(mut channel: Channel, refusal: Refusal) -> Result<(), ChannelError> {
    let deadline = Instant::now() + SEND_TIMEOUT;
    channel.send(&ServerMessage::Refused(refusal), deadline)?;
    channel.close();
    Ok(())
}

fn welcome(desk: &Desk, (version, verbs): (u32, bool), hold: Option<&Hold>) -> ServerMessage {
    let terms = &desk.ledger.terms;
    ServerMessage::Welcome(Welcome {
        version,
        instance: desk.ledger.instance,
        slab_bytes: terms.slab_bytes,
        lease_timeout_ms: u64::try_from(terms.lease_timeout.as_millis()).unwrap_or(u64::MAX),
        resumed: hold.is_some_and(|hold| hold.resumed),
        reserved_bytes: hold.map_or(0, |hold| hold.reserved_bytes),
        held: hold.map_or(Vec::new(), |hold| hold.held.clone()),
        disk: hold.and_then(|hold| hold.disk),
        verbs,
    })
}

fn observe(
    desk: &Desk,
    mut channel: Channel,
    name: &ClientName,
    version: u32,
) -> Result<(), ChannelError> {
    let greeting = welcome(desk, (version, false), None);
    channel.send(&greeting, Instant::now() + SEND_TIMEOUT)?;
    loop {
        let idle_until = Instant::now() + OBSERVER_IDLE;
        let Received::Message(message) = channel.receive(idle_until, None)? else {
            channel.close();
            return Ok(());
        };
        let (id, reply) = match message {
            ClientMessage::Request {
                id,
                request: Request::Stats,
            } => (id, stats(desk, name)),
            ClientMessage::Request {
                id,
                request: Request::DropDisk { disk },
            } => (id, drop_disk(desk, name, disk)),
            ClientMessage::Request { id, .. } => {
                let refusal = Refusal::Unexpected {
                    expected: "a question for statistics or the drop of a disk, from an observer"
                        .to_owned(),
                };
                (id, Reply::Refused(refusal))
            }
            ClientMessage::Hello(_) => return refuse(channel, second_hello()),
        };
        let deadline = Instant::now() + SEND_TIMEOUT;
        channel.send(&ServerMessage::Reply { id, reply }, deadline)?;
    }
}

fn serve_guest(
    desk: &Desk,
    mut channel: Channel,
    hold: &Hold,
    waker: &EventFd,
    spoken: (u32, bool),
) -> Result<(), ChannelError> {
    let greeting = welcome(desk, spoken, Some(hold));
    channel.send(&greeting, Instant::now() + SEND_TIMEOUT)?;
    loop {
        // The lease ends the connection of a client that is silent; this only bounds the wait.
        let until = Instant::now() + desk.ledger.terms.lease_timeout;
        match channel.receive(until, Some(waker))? {
            Received::TimedOut => {}
            Received::Woken => {
                for message in hold.control.take_outbox() {
                    channel.send(&message, Instant::now() + SEND_TIMEOUT)?;
                    if message == ServerMessage::Closing {
                        channel.close();
                        return Ok(());
                    }
                }
            }
            Received::Message(ClientMessage::Hello(_)) => return refuse(channel, second_hello()),
            Received::Message(ClientMessage::Request { id, request }) => {
                let last = request == Request::Goodbye;
                let reply = carry_out(desk, hold, request);
                let over = last || reply == Reply::Refused(Refusal::SessionEnded);
                let deadline = Instant::now() + SEND_TIMEOUT;
                channel.send(&ServerMessage::Reply { id, reply }, deadline)?;
                if over {
                    channel.close();
                    return Ok(());
                }
            }
        }
    }
}

fn second_hello() -> Refusal {
    Refusal::Unexpected {
        expected: "requests, after the hello".to_owned(),
    }
}

fn carry_out(desk: &Desk, hold: &Hold, request: Request) -> Reply {
    let ledger = &desk.ledger;
    let (holder, client) = (hold.session.holder, &hold.client);
    // Before the lease is looked at: a client that takes the session over from now on ends it.
    let epoch = hold.session.epoch();
    let outcome = ledger.renew(hold).and_then(|()| match request {
        Request::Renew => Ok(Reply::Done),
        Request::Reserve { bytes } => {
            let reserved = ledger.reserve(hold, bytes);
            reserved.map(|bytes| Reply::Reserved { bytes })
        }
        Request::Lease => {
            let leased = ledger.lease(hold);
            let outcome = match &leased {
                Ok(_) => Outcome::Granted,
                Err(refusal) => {
                    // A client may ask again and again: the metric tells how often.
                    tracing::debug!(%holder, %client, %refusal, "no slab is leased");
                    Outcome::Refused
                }
            };
            desk.metrics.leases.get_or_create(&With { outcome }).inc();
            leased.map(|slab| Reply::Leased { slab })
        }
        Request::Release { slab } => ledger.release(hold, slab).map(|()| {
            desk.metrics.released_slabs.inc();
            Reply::Done
        }),
        Request::DataToken => {
            let token = ledger.issue_token(hold);
            token.map(|token| Reply::DataToken { token })
        }
        Request::Key { slab } => match hold.session.key(slab) {
            Ok(Some(remote)) => {
                // The next one is likely to be asked for soon.
                ledger.spare.want();
                Ok(Reply::Key { remote })
            }
            Ok(None) => Err(Refusal::NotLeased { slab }),
            Err(error) => Err(no_verbs(hold, &error)),
        },
        Request::QueuePair { end } => open_pair(desk, hold, &end, epoch),
        Request::Stats => Ok(stats(desk, client)),
        Request::DropDisk { .. } => Err(Refusal::Unexpected {
            expected: "the drop of a disk from an observer alone".to_owned(),
        }),
        Request::Goodbye => ledger.end(hold).map(|ended| {
            desk.metrics.released_slabs.inc_by(ended.slabs);
            let Ended { slabs, at_once } = ended;
            tracing::info!(%holder, %client, slabs, at_once, "a session ended");
            Reply::Done
        }),
    });
    outcome.unwrap_or_else(Reply::Refused)
}

fn open_pair(desk: &Desk, hold: &Hold, end: &End, epoch: u64) -> Result<Reply, Refusal> {
    if !end.is_possible() {
        return Err(Refusal::Unexpected {
            expected: "a queue pair's end that there can be".to_owned(),
        });
    }
    let limit = desk.ledger.terms.max_data_connections;
    match hold.session.open_pair(end, epoch, limit) {
        Ok(Answer { end, probe, proof }) => Ok(Reply::QueuePair { end, probe, proof }),
        Err(PairError::Cut) => Err(Refusal::SessionEnded),
        Err(PairError::TooMany) => Err(Refusal::TooMany {
            what: "data connections".to_owned(),
            limit: limit as u64,
        }),
        Err(error) => Err(no_verbs(hold, &error)),
    }
}

fn no_verbs(hold: &Hold, error: &PairError) -> Refusal {
    let (holder, reason) = (hold.session.holder, with_causes(error));
    // Whoever asks may do so as often as it likes.
    static OF_NO_USE: Seldom = Seldom::new();
    if OF_NO_USE.is_due() {
        tracing::warn!(%holder, "RDMA is of no use: {reason}");
    }
    Refusal::NoVerbs { reason }
}

fn drop_disk(desk: &Desk, asker: &ClientName, disk: DiskId) -> Reply {
    match desk.ledger.drop_disk(asker, disk) {
        Ok(slabs) => {
            desk.metrics.released_slabs.inc_by(slabs);
            tracing::info!(%disk, client = %asker, slabs, "a parked disk is dropped");
            Reply::Done
        }
        Err(refusal) => Reply::Refused(refusal),
    }
}

fn stats(desk: &Desk, asker: &ClientName) -> Reply {
    Reply::Stats(Box::new(desk.ledger.stats_for(asker)))
}

/// Whether an error is the client's breach of the protocol, not a connection's ordinary end.
pub(crate) fn is_breach(error: &ChannelError) -> bool {
    matches!(
        error,
        ChannelError::TooLong { .. } | ChannelError::Malformed(_) | ChannelError::Tls(_)
    )
}
