//! Far-memory disks: objects that outlive whoever uses them.
//!
//! A disk is created, claimed by one backend after the other, parked between them, and dropped when
//! its claimant says goodbye, when it is created anew, or at the operator's word; one that has nothing
//! goes as soon as a guest's session would. The latest claim wins: it ends every connection of the one
//! before, behind the same fence that a guest's new connection waits for, so that no write of the former
//! claimant lands after it. Whoever resumes after a lost connection names its claim, and is refused if
//! that is no longer the latest.

use outram_wire::server::clock::BootTime;
use outram_wire::server::{
    ClientName, DiskId, DiskShape, DiskStats, DiskWelcome, Opening, Refusal,
};

use super::admission::{Caller, Claim, random_number};
use super::{Account, Books, FENCE_TIMEOUT, Ledger};
use crate::session::Holder;

/// What a disk's account has beyond a guest's.
pub(super) struct DiskAccount {
    shape: DiskShape,
    /// The latest claim.
    claim: u64,
    /// Whose it is.
    pub(super) claimant: ClientName,
}

impl DiskAccount {
    pub(super) fn welcome(&self) -> DiskWelcome {
        DiskWelcome {
            claim: self.claim,
            shape: self.shape,
        }
    }
}

impl Ledger {
    /// Opens a disk as its caller wishes.
    pub(super) fn claim_disk(
        &self,
        books: &mut Books,
        caller: &Caller<'_>,
        disk: DiskId,
        opening: &Opening,
    ) -> Result<Claim, Refusal> {
        let holder = Holder::Disk(disk);
        // Not counted: a number would tell how many others come and go.
        let claim = random_number()?;
        if let Some(account) = books.accounts.get_mut(&holder) {
            account.check_claim(caller, disk, opening)?;
        }
        let create = |shape: &DiskShape| DiskAccount {
            shape: *shape,
            claim,
            claimant: caller.name.clone(),
        };
        match (opening, books.accounts.get_mut(&holder)) {
            (Opening::Create(shape), _) => {
                let superseded = books.accounts.remove(&holder);
                let session = self.open_account(books, caller, holder, Some(create(shape)))?;
                Ok(Claim {
                    session,
                    resumed: false,
                    superseded: superseded
                        .map(|account| account.session)
                        .into_iter()
                        .collect(),
                })
            }
            (_, None) => Err(Refusal::NoSuchDisk { disk }),
            (opening, Some(account)) => {
                if let (Opening::Claim, Some(own)) = (opening, &mut account.disk) {
                    own.claim = claim;
                    own.claimant = caller.name.clone();
                }
                Ok(Claim {
                    session: account.begin_resumption(),
                    resumed: true,
                    superseded: Vec::new(),
                })
            }
        }
    }

    /// Drops a disk that nobody uses, at the word of the host that used it last; its slabs.
    pub(crate) fn drop_disk(&self, asker: &ClientName, disk: DiskId) -> Result<u64, Refusal> {
        let holder = Holder::Disk(disk);
        let mut books = self.books();
        // Another host's disk is none that this one knows of.
        let account = books.accounts.get(&holder);
        let account = account.filter(|account| account.name() == asker);
        let account = account.ok_or(Refusal::NoSuchDisk { disk })?;
        if account.control.is_some() || account.resuming {
            let client = account.name().clone();
            return Err(Refusal::DiskInUse { disk, client });
        }
        let dropped = books.accounts.remove(&holder);
        drop(books);
        Ok(dropped.map_or(0, |account| {
            account.session.fence(FENCE_TIMEOUT);
            self.take_back(&account.session)
        }))
    }
}

impl Account {
    fn check_claim(
        &self,
        caller: &Caller<'_>,
        disk: DiskId,
        opening: &Opening,
    ) -> Result<(), Refusal> {
        if self.session.secret != caller.secret {
            return Err(Refusal::DiskSecret { disk });
        }
        if self.resuming {
            return Err(Refusal::SessionBusy);
        }
        let client = || self.name().clone();
        let latest = self.disk.as_ref().map(|own| own.claim);
        match opening {
            Opening::Create(_) if self.control.is_some() => Err(Refusal::DiskInUse {
                disk,
                client: client(),
            }),
            Opening::Resume { claim } if Some(*claim) != latest => Err(Refusal::DiskClaimed {
                disk,
                client: client(),
            }),
            _ => Ok(()),
        }
    }

    pub(super) fn disk_stats(&self, slab_bytes: u64) -> Option<DiskStats> {
        let (Holder::Disk(disk), Some(own)) = (self.session.holder, &self.disk) else {
            return None;
        };
        let parked = self.control.is_none() && !self.resuming;
        let slabs = self.session.slab_count();
        Some(DiskStats {
            disk,
            name: own.claimant.clone(),
            shape: own.shape,
            parked_s: parked.then(|| BootTime::now().since(self.renewed_at).as_secs()),
            slabs,
            leased_bytes: slabs * slab_bytes,
            reserved_bytes: self.reserved_bytes,
        })
    }
}
