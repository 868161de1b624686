//! `outram metrics`: backends' metrics, of one guest or all, printed or served to Prometheus.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener};
use std::thread;

use anyhow::{Context, Result};
use clap::Args;
use outram_wire::scrape::Page;

use super::completion::domain_names;
use super::report::{Guest, all_guests, find_guest, run_dir};
use crate::backend_control::ControlError;
use crate::host::Paths;
use crate::launch;
use crate::metrics_page;

/// The arguments of `outram metrics`.
#[derive(Debug, Args)]
pub struct MetricsArguments {
    /// Name or UUID of the domain; all of this host's if not given
    #[arg(add = domain_names())]
    domain: Option<String>,
    /// Serve the metrics of all domains to Prometheus at this address, until interrupted
    #[arg(long, value_name = "ADDR:PORT", conflicts_with = "domain")]
    listen: Option<SocketAddr>,
}

impl MetricsArguments {
    /// Prints the metrics, or serves them.
    pub fn run(&self, uri: Option<&str>, paths: &Paths) -> Result<bool> {
        if let Some(address) = self.listen {
            return serve(address, paths);
        }
        let page = match &self.domain {
            Some(domain) => find_guest(domain, uri, paths)?.control.metrics()?,
            None => page_of_all(paths)?,
        };
        match io::stdout().write_all(page.as_bytes()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
            _ => Ok(true),
        }
    }
}

fn serve(address: SocketAddr, paths: &Paths) -> Result<bool> {
    // What would fail at every scrape is told at once.
    page_of_all(paths)?;
    let listener =
        TcpListener::bind(address).with_context(|| format!("cannot serve metrics at {address}"))?;
    let paths = paths.clone();
    let page = Page::serve_if_any(listener, move || {
        page_of_all(&paths)
            .inspect_err(|error| complain!("outram metrics: {error:#}"))
            .ok()
    })
    .context("serving metrics")?;
    say!("serving metrics at http://{}/metrics", page.address());
    loop {
        thread::park();
    }
}

/// One page of all guests, asked at once: those that do not answer cost their time-out only once.
fn page_of_all(paths: &Paths) -> Result<String> {
    let guests = all_guests(paths)?;
    let answers: Vec<_> = thread::scope(|scope| {
        let asked: Vec<_> = guests
            .iter()
            .map(|guest| scope.spawn(|| guest.control.metrics()))
            .collect();
        asked.into_iter().map(|answer| answer.join().ok()).collect()
    });
    page_of(&guests, answers, paths)
}

/// The page of these guests, from what their backends answered; one who was not asked to the end is down.
fn page_of(
    guests: &[Guest],
    answers: Vec<Option<Result<String, ControlError>>>,
    paths: &Paths,
) -> Result<String> {
    let mut known = Vec::new();
    let mut pages = Vec::new();
    for (guest, answer) in guests.iter().zip(answers) {
        match answer {
            Some(Ok(page)) => {
                known.push(line(guest, true));
                pages.push(page);
            }
            // Whoever may not ask cannot tell whether it answers.
            Some(Err(error @ ControlError::Permission(_))) => return Err(error.into()),
            Some(Err(ControlError::NotRunning(_))) if has_ended(guest, paths) => {}
            _ => known.push(line(guest, false)),
        }
    }
    if !known.is_empty() {
        pages.insert(0, metrics_page::answering(&known));
    }
    Ok(metrics_page::join(&pages))
}

fn line(guest: &Guest, answers: bool) -> (String, String, bool) {
    (guest.vm.to_string(), guest.name.clone(), answers)
}

/// Whether a guest without a backend is off as it should be, rather than without its memory.
fn has_ended(guest: &Guest, paths: &Paths) -> bool {
    let run_dir = run_dir(paths, guest.vm);
    launch::reason(&run_dir).is_none()
        && !launch::is_abandoned(&run_dir)
        && !launch::is_recovering(&run_dir)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use super::*;
    use crate::backend_control::BackendControl;
    use crate::launch::tests::supervised;

    #[test]
    fn a_guest_whose_backend_dies_again_and_again_stays_on_the_page() {
        const UUID: &str = "9a4a7f0e-2f5b-4d55-8a53-0a4e1c7e1234";
        let run = tempfile::tempdir().expect("a directory");
        let run_dir = run.path().join(UUID);
        fs::create_dir(&run_dir).expect("made");
        let _supervisor = supervised(&run_dir);
        let paths = Paths {
            run: run.path().to_owned(),
            ..Paths::default()
        };
        let page = || page_of_all(&paths).expect("a page");
        assert_eq!(page(), "# EOF\n", "one that is being started");
        let pager = UnixListener::bind(run_dir.join("control.sock"));
        drop(pager.expect("it listens until it dies"));
        let line = format!("outram_up{{vm=\"{UUID}\",domain=\"{UUID}\"}} 0\n");
        assert!(page().contains(&line), "{}", page());
    }

    #[test]
    fn whoever_may_not_ask_is_told_so_instead_of_that_guests_are_down() {
        let paths = Paths::default();
        let vm = "9a4a7f0e-2f5b-4d55-8a53-0a4e1c7e1234".parse();
        let guest = Guest {
            vm: vm.expect("a UUID"),
            name: "web1".to_owned(),
            control: BackendControl::of(Path::new("/nowhere")),
        };
        let denied = ControlError::Permission("/nowhere/control.sock".into());
        let page = page_of(&[guest], vec![Some(Err(denied))], &paths);
        let error = page.expect_err("no page").to_string();
        assert!(error.contains("run this as root"), "{error}");
    }
}
