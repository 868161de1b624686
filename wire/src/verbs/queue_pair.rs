//! A reliable queue pair with its completion queue, from its making to its end.
#![allow(unsafe_code)]

use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rdma_mummy_sys as ibv;

use super::device::{Opened, checked, refused};
use super::{Domain, End, VerbsError};

/// How often an unanswered packet is sent again, and the time between two, 4.096 µs · 2^16 = 268 ms
/// (drivers take up to four times that): a peer that is gone is noticed within two to eight seconds,
/// a lost packet made good long before anybody waits for it in vain. (Soft-RoCE takes the largest
/// number, 7, for 'without end'.)
const RETRIES: u8 = 6;
const TIMEOUT: u8 = 16;

/// Reads that a queue pair takes from its peer at once, if its device does: what common cards have.
const READS: u8 = 16;

/// Routers that a packet may pass.
const HOPS: u8 = 64;

/// A queue pair. Its end, which dropping it is, ends every transfer: none lands later.
pub(super) struct QueuePair {
    pub(super) pair: NonNull<ibv::ibv_qp>,
    pub(super) completions: NonNull<ibv::ibv_cq>,
    pub(super) channel: Option<NonNull<ibv::ibv_comp_channel>>,
    opened: Arc<Opened>,
    first_packet: u32,
}

// SAFETY: its parts belong to this value, and libibverbs lets any thread use them.
unsafe impl Send for QueuePair {}

/// What `QueuePair::new` has made so far, to be undone where the rest fails.
struct Half {
    channel: Option<NonNull<ibv::ibv_comp_channel>>,
    completions: Option<NonNull<ibv::ibv_cq>>,
}

impl Drop for Half {
    fn drop(&mut self) {
        if let Some(completions) = self.completions {
            // SAFETY: no queue pair uses it.
            unsafe { ibv::ibv_destroy_cq(completions.as_ptr()) };
        }
        if let Some(channel) = self.channel {
            // SAFETY: no completion queue uses it any more.
            unsafe { ibv::ibv_destroy_comp_channel(channel.as_ptr()) };
        }
    }
}

impl QueuePair {
    /// Makes one for so many requests at once; one that makes requests has a channel, which tells of
    /// completions.
    pub(super) fn new(domain: &Domain, requests: u32, channel: bool) -> Result<Self, VerbsError> {
        let opened = domain.0.clone();
        let port = &opened.port;
        let last = io::Error::last_os_error;
        let mut half = Half {
            channel: None,
            completions: None,
        };
        if channel {
            // SAFETY: the context is open for as long as `opened` lives.
            let made = unsafe { ibv::ibv_create_comp_channel(opened.context.as_ptr()) };
            let made = NonNull::new(made).ok_or_else(|| refused(port, "a channel", last()))?;
            half.channel = Some(made);
        }
        let channel = half.channel.map_or(ptr::null_mut(), NonNull::as_ptr);
        let entries = i32::try_from(requests + 1).unwrap_or(i32::MAX);
        let context = opened.context.as_ptr();
        // SAFETY: context and channel are there; no context of ours is kept in the queue.
        let made = unsafe { ibv::ibv_create_cq(context, entries, ptr::null_mut(), channel, 0) };
        let completions =
            NonNull::new(made).ok_or_else(|| refused(port, "a completion queue", last()))?;
        half.completions = Some(completions);
        let mut wanted = ibv::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: completions.as_ptr(),
            recv_cq: completions.as_ptr(),
            srq: ptr::null_mut(),
            cap: ibv::ibv_qp_cap {
                max_send_wr: requests,
                // None is ever posted; some drivers make no queue of nothing.
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: ibv::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: the domain and the completion queue are there, the structure is ours.
        let made = unsafe { ibv::ibv_create_qp(opened.domain.as_ptr(), &raw mut wanted) };
        let pair = NonNull::new(made).ok_or_else(|| refused(port, "a queue pair", last()))?;
        let (channel, _) = (half.channel.take(), half.completions.take());
        let mut random = [0; 4];
        let drawn = getrandom::fill(&mut random);
        let made = Self {
            pair,
            completions,
            channel,
            first_packet: u32::from_le_bytes(random) >> 8,
            opened,
        };
        drawn.map_err(|error| {
            refused(
                &made.opened.port,
                "a random number",
                io::Error::other(error),
            )
        })?;
        made.initialise()?;
        Ok(made)
    }

    /// As its peer has to know it.
    pub(super) fn end(&self) -> End {
        let Opened { port, limits, .. } = &*self.opened;
        // SAFETY: the queue pair lives as long as `self`.
        let number = unsafe { self.pair.as_ref() }.qp_num;
        End {
            gid: port.gid,
            lid: port.lid,
            number,
            first_packet: self.first_packet,
            mtu: limits.mtu,
            reads: limits.reads_taken.clamp(1, READS),
        }
    }

    fn initialise(&self) -> Result<(), VerbsError> {
        let mut to = blank(ibv::ibv_qp_state::IBV_QPS_INIT);
        to.port_num = self.opened.port.number;
        let allowed = ibv::ibv_access_flags::IBV_ACCESS_REMOTE_READ
            | ibv::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
        // One that makes requests takes none.
        to.qp_access_flags = match self.channel {
            Some(_) => 0,
            None => allowed.0,
        };
        let mask = ibv::ibv_qp_attr_mask::IBV_QP_STATE
            | ibv::ibv_qp_attr_mask::IBV_QP_PKEY_INDEX
            | ibv::ibv_qp_attr_mask::IBV_QP_PORT
            | ibv::ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS;
        self.modify(&mut to, mask, "to initialise a queue pair")
    }

    /// Joins it with its peer's. May take a while where the peer's address has to be found out.
    pub(super) fn connect(&self, peer: &End) -> Result<(), VerbsError> {
        let Opened { port, limits, .. } = &*self.opened;
        let mut to = blank(ibv::ibv_qp_state::IBV_QPS_RTR);
        to.path_mtu = limits.mtu.min(peer.mtu);
        to.dest_qp_num = peer.number;
        to.rq_psn = peer.first_packet;
        to.max_dest_rd_atomic = self.end().reads;
        to.min_rnr_timer = 12;
        to.ah_attr.port_num = port.number;
        to.ah_attr.dlid = peer.lid;
        // Of Ethernet every packet carries addresses; of InfiniBand the local identifier does within
        // a subnet.
        to.ah_attr.is_global = u8::from(port.is_ethernet);
        to.ah_attr.grh.dgid.raw = peer.gid.0.octets();
        to.ah_attr.grh.sgid_index = port.gid_index;
        to.ah_attr.grh.hop_limit = HOPS;
        let mask = ibv::ibv_qp_attr_mask::IBV_QP_STATE
            | ibv::ibv_qp_attr_mask::IBV_QP_AV
            | ibv::ibv_qp_attr_mask::IBV_QP_PATH_MTU
            | ibv::ibv_qp_attr_mask::IBV_QP_DEST_QPN
            | ibv::ibv_qp_attr_mask::IBV_QP_RQ_PSN
            | ibv::ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | ibv::ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut to, mask, "to join a queue pair with its peer's")?;
        let mut to = blank(ibv::ibv_qp_state::IBV_QPS_RTS);
        to.sq_psn = self.first_packet;
        to.timeout = TIMEOUT;
        to.retry_cnt = RETRIES;
        to.rnr_retry = RETRIES;
        to.max_rd_atomic = limits.reads_made.clamp(1, READS).min(peer.reads);
        let mask = ibv::ibv_qp_attr_mask::IBV_QP_STATE
            | ibv::ibv_qp_attr_mask::IBV_QP_SQ_PSN
            | ibv::ibv_qp_attr_mask::IBV_QP_TIMEOUT
            | ibv::ibv_qp_attr_mask::IBV_QP_RETRY_CNT
            | ibv::ibv_qp_attr_mask::IBV_QP_RNR_RETRY
            | ibv::ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut to, mask, "to have a queue pair send")
    }

    fn modify(
        &self,
        to: &mut ibv::ibv_qp_attr,
        mask: ibv::ibv_qp_attr_mask,
        what: &'static str,
    ) -> Result<(), VerbsError> {
        let mask = i32::try_from(mask.0).unwrap_or(0);
        // SAFETY: the queue pair lives as long as `self`; the structure is whole.
        let errno = unsafe { ibv::ibv_modify_qp(self.pair.as_ptr(), to, mask) };
        checked(&self.opened.port, what, errno)
    }

    pub(super) fn opened(&self) -> &Opened {
        &self.opened
    }
}

fn blank(state: ibv::ibv_qp_state::Type) -> ibv::ibv_qp_attr {
    // SAFETY: a structure of integers, which may be zero.
    let mut to: ibv::ibv_qp_attr = unsafe { std::mem::zeroed() };
    to.qp_state = state;
    to
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: the queue pair is ours and not used any more.
        let errno = unsafe { ibv::ibv_destroy_qp(self.pair.as_ptr()) };
        debug_assert_eq!(errno, 0, "an own queue pair can be destroyed");
        drop(Half {
            channel: self.channel,
            completions: Some(self.completions),
        });
    }
}

/// The end of a queue pair whose peer reads and writes what is registered in its domain. Nothing is to
/// be done for it; dropping it ends the peer's access by it: what it sent lands before that or never.
pub struct Responder(QueuePair);

impl Responder {
    /// Makes the end that belongs to a peer's.
    pub fn new(domain: &Domain, peer: &End) -> Result<Self, VerbsError> {
        let pair = QueuePair::new(domain, 1, false)?;
        pair.connect(peer)?;
        Ok(Self(pair))
    }

    /// As the peer has to know it.
    pub fn end(&self) -> End {
        self.0.end()
    }
}
