//! The thread that makes data connections of what was agreed for them, beside the control connection:
//! so that a connection which is slow to come up keeps no renewal waiting.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_channel::{Receiver, Sender, bounded};
use outram_wire::server::Token;

use super::connect::Dialer;
use super::session::{Order, Orders};
use super::verbs::{Half, Other};
use super::{DataConn, RemoteError, SessionEvent};
use crate::whole;

/// A connection that is to be made.
pub(super) struct Opening {
    pub(super) role: usize,
    pub(super) agreed: Agreed,
    /// The greeting that it was obtained after.
    pub(super) generation: u64,
}

/// What was agreed for a connection.
pub(super) enum Agreed {
    /// TCP, with this token.
    Token(Token),
    /// RDMA, with these ends of a queue pair.
    Pair(Box<Half>, Other),
}

pub(super) struct Opener {
    pub(super) server: usize,
    pub(super) dialer: Dialer,
    /// The latest greeting: tokens of former ones are void.
    pub(super) generation: Arc<AtomicU64>,
    pub(super) events: Sender<SessionEvent>,
    pub(super) orders: Orders,
}

impl Opener {
    /// Runs until the sender returned is dropped; at most `queued` openings wait.
    pub(super) fn start(self, queued: usize) -> io::Result<Sender<Opening>> {
        let (sender, openings) = bounded(queued);
        let name = format!("server-{}-open", self.server);
        whole::spawn(name, move || self.run(&openings))?;
        Ok(sender)
    }

    fn run(&self, openings: &Receiver<Opening>) {
        for opening in openings {
            if self.is_void(opening.generation) {
                continue;
            }
            let (server, role) = (self.server, opening.role);
            let told = match self.open(opening.agreed) {
                // Its device may be to go meanwhile.
                Ok(_) if self.is_void(opening.generation) => continue,
                Ok(mut conn) => {
                    conn.generation = opening.generation;
                    let is_pair = conn.is_verbs();
                    let event = SessionEvent::DataConnection { server, role, conn };
                    self.events.send(event).is_ok()
                        && (!is_pair || self.orders.give(Order::DataOpened(opening.generation)))
                }
                Err(error) => self
                    .orders
                    .give(Order::DataFailed(role, opening.generation, error)),
            };
            if !told {
                return;
            }
        }
    }

    fn is_void(&self, generation: u64) -> bool {
        self.generation.load(Ordering::Acquire) != generation
    }

    fn open(&self, agreed: Agreed) -> Result<DataConn, RemoteError> {
        match agreed {
            Agreed::Token(token) => self.dialer.data(&token),
            Agreed::Pair(half, other) => {
                let conn = half.join(self.dialer.address.clone(), &other)?;
                Ok(conn.into())
            }
        }
    }
}
