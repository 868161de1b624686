//! `outram restart`: another process for a backend, while its guest runs.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use outram_wire::control::{Phase, Status, is_supervised};
use outram_wire::host_settings::HostSettings;

use super::completion::domain_names;
use super::report::{Guest, all_guests, find_guest, run_dir};
use crate::backend_control::ControlError;
use crate::backend_log::BackendLog;
use crate::host::{Paths, find_backend};
use crate::launch;

/// How long the next process may take until it serves the guest: a moment, but on a host that is busy beyond measure.
const TIMEOUT: Duration = Duration::from_secs(60);

/// How often it is asked.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The arguments of `outram restart`.
#[derive(Debug, Args)]
pub struct RestartArguments {
    /// Name or UUID of the domain
    #[arg(add = domain_names(), required_unless_present = "all")]
    domain: Option<String>,
    /// All domains that have a backend, one after another
    #[arg(long, conflicts_with = "domain")]
    all: bool,
}

impl RestartArguments {
    /// Restarts. The result is whether all went well.
    pub fn run(&self, uri: Option<&str>, paths: &Paths) -> Result<bool> {
        // The next process would not come up, and a backend of an earlier version does not look itself.
        HostSettings::read(&paths.config)
            .context("no backend is restarted before this host's settings are correct")?;
        if let Some(domain) = &self.domain {
            say!("{}", restart(&find_guest(domain, uri, paths)?, paths)?);
            return Ok(true);
        }
        let mut all_well = true;
        for guest in all_guests(paths)? {
            let waits_or_is_off = match guest.control.status() {
                Ok(status) => !is_serving(&status),
                Err(ControlError::NotRunning(_)) => {
                    !launch::is_abandoned(&run_dir(paths, guest.vm))
                }
                Err(_) => false,
            };
            if waits_or_is_off {
                continue;
            }
            match restart(&guest, paths) {
                Ok(text) => say!("{text}"),
                Err(error) => {
                    all_well = false;
                    complain!("outram: {error:#}");
                }
            }
        }
        Ok(all_well)
    }
}

/// Whether a guest depends on the backend.
fn is_serving(status: &Status) -> bool {
    matches!(
        status.phase,
        Phase::Serving | Phase::Stalled | Phase::Stopped | Phase::Homing
    )
}

/// What has happened, in words.
fn restart(guest: &Guest, paths: &Paths) -> Result<String> {
    let name = &guest.name;
    let dir = run_dir(paths, guest.vm);
    let before = match guest.control.status() {
        Ok(status) => status,
        Err(error) if launch::has_to_be_started_again(&error, &dir) => {
            launch::start_again(&find_backend(paths)?, &dir, paths.systemd)
                .with_context(|| format!("the backend of domain '{name}' is not started again"))?;
            let now = guest.control.status()?;
            return Ok(format!(
                "Domain '{name}' is served again: {}",
                described(&now)
            ));
        }
        Err(error @ ControlError::NotRunning(_)) => {
            bail!("domain '{name}' has no running backend: {error}; start the domain first")
        }
        Err(error) => bail!("domain '{name}': {error}"),
    };
    let asked = Instant::now();
    let outcome = match is_supervised(&dir) {
        true => guest.control.restart().map_err(anyhow::Error::from),
        // Its supervisor has died. A new one replaces the pager.
        false => find_backend(paths)
            .map_err(anyhow::Error::from)
            .and_then(|backend| Ok(launch::start_again(&backend, &dir, paths.systemd)?)),
    };
    outcome.with_context(|| format!("domain '{name}': {} is not restarted", described(&before)))?;
    let mut silent_since = None;
    loop {
        match guest.control.status() {
            Ok(now) if now.backend_pid != before.backend_pid => {
                let silent = silent_since.map_or(Duration::ZERO, |since: Instant| since.elapsed());
                return Ok(format!(
                    "Domain '{name}': {} took over from {}; nobody answered for {} ms",
                    described(&now),
                    described(&before),
                    silent.as_millis()
                ));
            }
            Ok(_) => {}
            Err(_) => {
                silent_since.get_or_insert_with(Instant::now);
            }
        }
        if asked.elapsed() > TIMEOUT {
            let log = BackendLog::of(&dir);
            bail!(
                "the backend of domain '{name}' did not come back within {TIMEOUT:?}: where the guest needs its memory it waits; the log {log} ends: {}",
                log.tail()
            );
        }
        sleep(POLL_INTERVAL);
    }
}

fn described(status: &Status) -> String {
    format!(
        "backend {} (process {})",
        status.backend_version, status.backend_pid
    )
}
