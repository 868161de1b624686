//! An identity that is renewed in its place: files that are looked at again whenever a connection is
//! to be made, so that certificates rotate while the program runs.
//!
//! Files that are no good (a renewal half done, a key that does not fit) change nothing: what was
//! good last stays in use, and the reason is kept to be shown. Connections that stand go on as they
//! are. The module does not know who connects to whom, nor where the reason is shown.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::{ClientConfig, ServerConfig};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::causes::with_causes;
use crate::tls::{self, TlsError, TlsFiles};

/// A side of TLS: what files are made into.
pub trait Side: Sized {
    /// The files' contents, and when they expire, in seconds since 1970.
    fn load(files: &TlsFiles) -> Result<(Arc<Self>, i64), TlsError>;
}

impl Side for ServerConfig {
    fn load(files: &TlsFiles) -> Result<(Arc<Self>, i64), TlsError> {
        tls::server_side(files)
    }
}

impl Side for ClientConfig {
    fn load(files: &TlsFiles) -> Result<(Arc<Self>, i64), TlsError> {
        tls::client_side(files)
    }
}

/// How an identity is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdentityStatus {
    /// When the certificate in use expires, in seconds since 1970; `None` where there is none yet.
    pub expires_unix_s: Option<i64>,
    /// Why the files as they are now are not in use, if they are not.
    pub refused: Option<String>,
}

/// Time before a certificate's end from which people are warned: enough to renew it without haste.
pub const WARN_BEFORE_S: i64 = 30 * DAY_S;

const DAY_S: i64 = 24 * 3600;

impl IdentityStatus {
    /// Whether the certificate is about to expire, or has.
    pub fn expires_soon(&self) -> bool {
        expires_soon(self.expires_unix_s)
    }
}

/// Whether a certificate that expires then does so soon, or has.
pub fn expires_soon(unix_s: Option<i64>) -> bool {
    unix_s.is_some_and(|unix_s| unix_s.saturating_sub(now_unix_s()) < WARN_BEFORE_S)
}

/// When a certificate expires, in words.
pub fn expiry_in_words(unix_s: i64) -> String {
    let date = OffsetDateTime::from_unix_timestamp(unix_s);
    let date = date.map_or_else(|_| "some day".to_owned(), |time| time.date().to_string());
    match unix_s.saturating_sub(now_unix_s()) {
        left if left < 0 => format!("expired on {date}"),
        left if left < 2 * DAY_S => format!("expires within {} hours", left / 3600 + 1),
        left => format!("expires on {date}, in {} days", left / DAY_S),
    }
}

fn now_unix_s() -> i64 {
    OffsetDateTime::now_utc().unix_timestamp()
}

/// What a look at the files came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing new.
    None,
    /// What the files hold now is in use.
    Taken,
    /// The files are no good, for this reason; told once for each.
    Refused(String),
}

/// An identity and the files that it comes from.
pub struct Identity<S> {
    files: TlsFiles,
    state: Mutex<State<S>>,
}

struct State<S> {
    side: Option<Arc<S>>,
    /// The files when `side` was made.
    stamp: Option<[Stamp; 3]>,
    status: IdentityStatus,
}

/// What tells that a file was changed or replaced: device, inode, size, change time.
type Stamp = Option<(u64, u64, u64, i64, i64)>;

impl<S: Side> Identity<S> {
    /// The identity in `files`, which must be good.
    pub fn load(files: TlsFiles) -> Result<Self, TlsError> {
        let identity = Self::of(files);
        identity.current()?;
        Ok(identity)
    }

    /// The identity in `files`, whenever they are good: for whoever has to go on without one.
    pub fn of(files: TlsFiles) -> Self {
        let state = State {
            side: None,
            stamp: None,
            status: IdentityStatus::default(),
        };
        Self {
            files,
            state: Mutex::new(state),
        }
    }

    /// What is in use now. An error only where the files were never good.
    pub fn current(&self) -> Result<Arc<S>, TlsError> {
        if let Some(side) = &self.state().side {
            return Ok(side.clone());
        }
        self.read()
    }

    /// Looks at the files again, and takes what they hold if they were changed.
    pub fn refresh(&self) -> Change {
        let known = {
            let state = self.state();
            // Files that were no good are read each time: they may have been at half of a change.
            let good = state.side.is_some() && state.status.refused.is_none();
            state.stamp.filter(|_| good)
        };
        if known.is_some_and(|known| known == self.stamp()) {
            return Change::None;
        }
        let before = self.status();
        match self.read() {
            Ok(_) if known.is_some() || before.refused.is_some() => Change::Taken,
            Ok(_) => Change::None,
            Err(error) => {
                let reason = with_causes(&error);
                match before.refused {
                    Some(known) if known == reason => Change::None,
                    _ => Change::Refused(reason),
                }
            }
        }
    }

    /// How it is, by the last look at the files.
    pub fn status(&self) -> IdentityStatus {
        self.state().status.clone()
    }

    fn read(&self) -> Result<Arc<S>, TlsError> {
        // Before the contents: what changes in between is seen by the next look.
        let stamp = self.stamp();
        let read = S::load(&self.files);
        let mut state = self.state();
        match read {
            Ok((side, expires_unix_s)) => {
                state.side = Some(side.clone());
                state.stamp = Some(stamp);
                state.status = IdentityStatus {
                    expires_unix_s: Some(expires_unix_s),
                    refused: None,
                };
                Ok(side)
            }
            Err(error) => {
                state.status.refused = Some(with_causes(&error));
                Err(error)
            }
        }
    }

    fn stamp(&self) -> [Stamp; 3] {
        [&self.files.ca, &self.files.cert, &self.files.key].map(|path| stamp_of(path))
    }

    fn state(&self) -> MutexGuard<'_, State<S>> {
        // Each change under the lock is a few assignments.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S> std::fmt::Debug for Identity<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Identity").field(&self.files).finish()
    }
}

fn stamp_of(path: &Path) -> Stamp {
    let meta = fs::metadata(path).ok()?;
    let (seconds, nanoseconds) = (meta.ctime(), meta.ctime_nsec());
    Some((meta.dev(), meta.ino(), meta.size(), seconds, nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pki::{self, CERTIFICATE_DAYS, Kind, Order};

    fn issue(dir: &Path, name: &str, days: u32) -> TlsFiles {
        let order = Order {
            kind: Kind::Client,
            name,
            addresses: &[],
            days,
        };
        pki::issue(dir, &order).expect("issued").into()
    }

    fn days_left(identity: &Identity<ClientConfig>) -> i64 {
        let expires = identity.status().expires_unix_s.expect("one is in use");
        (expires - now_unix_s() + DAY_S / 2) / DAY_S
    }

    #[test]
    fn an_expiry_is_told_in_days_and_at_last_in_hours() {
        let now = now_unix_s();
        let far = now + 100 * DAY_S + 60;
        assert!(expiry_in_words(far).ends_with(", in 100 days"));
        assert!(!expires_soon(Some(far)) && !expires_soon(None));
        assert_eq!(expiry_in_words(now + 3700), "expires within 2 hours");
        assert!(expiry_in_words(0).starts_with("expired on 1970-01-01"));
        assert!(expires_soon(Some(0)) && expires_soon(Some(now + 29 * DAY_S)));
    }

    #[test]
    fn files_are_taken_as_they_change_and_kept_while_they_are_no_good() {
        let dir = tempfile::tempdir().expect("a folder");
        pki::init(dir.path()).expect("a CA");
        let (files, next) = (issue(dir.path(), "a", 10), issue(dir.path(), "b", 20));
        let identity = Identity::<ClientConfig>::load(files.clone()).expect("good");
        assert_eq!(
            (days_left(&identity), identity.refresh()),
            (10, Change::None)
        );
        let first = identity.current().expect("good");

        // A certificate without its key is half of a renewal.
        fs::copy(&next.cert, &files.cert).expect("copied");
        let Change::Refused(reason) = identity.refresh() else {
            panic!("it is no good");
        };
        assert!(reason.contains("does not fit the certificate"), "{reason}");
        assert_eq!(identity.refresh(), Change::None, "it was told");
        assert_eq!(identity.status().refused, Some(reason));
        assert!(Arc::ptr_eq(&first, &identity.current().expect("kept")));

        fs::copy(&next.key, &files.key).expect("copied");
        assert_eq!(identity.refresh(), Change::Taken);
        assert_eq!(identity.status().refused, None);
        assert_eq!(days_left(&identity), 20);
        assert!(!Arc::ptr_eq(&first, &identity.current().expect("good")));

        fs::remove_file(&files.ca).expect("removed");
        assert!(matches!(identity.refresh(), Change::Refused(_)));
        assert!(identity.current().is_ok());
    }

    #[test]
    fn one_that_was_never_good_is_tried_again() {
        let dir = tempfile::tempdir().expect("a folder");
        pki::init(dir.path()).expect("a CA");
        let files = issue(dir.path(), "a", CERTIFICATE_DAYS);
        let aside = dir.path().join("aside");
        fs::rename(&files.key, &aside).expect("renamed");
        assert!(Identity::<ClientConfig>::load(files.clone()).is_err());
        let identity = Identity::<ClientConfig>::of(files.clone());
        assert!(identity.current().is_err());
        assert_eq!(identity.status().expires_unix_s, None);
        fs::rename(&aside, &files.key).expect("renamed");
        assert!(identity.current().is_ok());
        assert_eq!(identity.status().refused, None);
    }
}
