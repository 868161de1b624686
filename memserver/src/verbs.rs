//! What a session has of RDMA: a device opened for it, with a protection domain of its own, and the ends
//! of its client's queue pairs. Of what other sessions have registered, its client reaches nothing.

use outram_wire::server::Token;
use outram_wire::units::PAGE_SIZE;
use outram_wire::verbs::{Buffer, Domain, End, Port, Remote, Responder, VerbsError};

/// Largest slab that is registered: newer kernels' soft-RoCE takes the pages of a GiB at once, and no more, and
/// slabs begin and end within one.
pub(crate) const MOST_REGISTERED_BYTES: u64 = (1 << 30) - PAGE_SIZE as u64;

/// The session's RDMA.
pub(crate) struct Lent {
    // Dropped before the domain is.
    pairs: Vec<Pair>,
    domain: Domain,
}

/// One end of a queue pair, with what its peer tries it on.
pub(crate) struct Pair {
    // The queue pair ends before what it may read is gone.
    responder: Responder,
    probe: Buffer,
    proof: Token,
}

/// What a client has to know of a pair.
pub(crate) struct Answer {
    pub(crate) end: End,
    pub(crate) probe: Remote,
    pub(crate) proof: Token,
}

/// Why there is no queue pair.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PairError {
    #[error("there is no RDMA with this client")]
    NoVerbs,
    #[error("the session was taken over")]
    Cut,
    #[error("the client has as many queue pairs as it may have")]
    TooMany,
    #[error("no random numbers")]
    NoRandom(#[from] getrandom::Error),
    #[error(transparent)]
    Verbs(#[from] VerbsError),
}

impl Lent {
    pub(crate) fn open(port: &Port) -> Result<Self, VerbsError> {
        Ok(Self {
            pairs: Vec::new(),
            domain: Domain::open(port)?,
        })
    }

    /// Whether it is of this port, and the device still there.
    pub(crate) fn is_usable(&self, port: &Port) -> bool {
        self.domain.port() == port && self.domain.is_usable()
    }

    pub(crate) fn is_removed(&self) -> bool {
        self.domain.is_removed()
    }

    pub(crate) fn domain(&self) -> Domain {
        self.domain.clone()
    }

    pub(crate) fn keep(&mut self, pair: Pair) {
        self.pairs.push(pair);
    }

    /// Ends all that peers do by them.
    pub(crate) fn end_pairs(&mut self) {
        self.pairs.clear();
    }
}

impl Pair {
    pub(crate) fn new(domain: &Domain, peer: &End) -> Result<Self, PairError> {
        let proof = Token::random()?;
        // A page, so that nothing else of ours is in what the device may read.
        let mut page = vec![0; PAGE_SIZE];
        page[..proof.0.len()].copy_from_slice(&proof.0);
        Ok(Self {
            responder: Responder::new(domain, peer)?,
            probe: Buffer::holding(domain, &page)?,
            proof,
        })
    }

    pub(crate) fn answer(&self) -> Answer {
        Answer {
            end: self.responder.end(),
            probe: self.probe.remote(),
            proof: self.proof,
        }
    }
}
