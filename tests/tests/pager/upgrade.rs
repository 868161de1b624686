//! A guest under this build and the one before it, in turns: whatever a process leaves, sends or is
//! sent, the other build's goes on with it. `tests/scripts/build-previous.sh` makes the former.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use outram_tests::hermetic::command::{run, wait_for};
use outram_tests::hermetic::server::MemServer;
use outram_tests::hermetic::suite::Skipped;
use outram_wire::control::{Phase, Status};
use serde_json::json;

use crate::fixture::{Guest, LONG, Lab, SLAB, Wish, demand_sound};
use crate::supervisor::{end, end_all, wait_for_another};

pub(crate) const TESTS: &[crate::Test] = &[
    ("a_guest_is_upgraded_and_goes_back_when_asked", asked),
    ("a_guest_killed_with_its_backend_changes_builds", killed),
    ("a_pager_killed_after_an_upgrade_is_started_again", between),
    (
        "a_guest_with_settings_that_the_other_build_lacks_goes_on_with_this_one",
        newer,
    ),
];

const FILLED: u64 = 14_000;

/// Changes of the build, one after another.
const ROUNDS: usize = 2;

/// The programs of the build before this one.
struct Previous(PathBuf);

impl Previous {
    fn find() -> Result<Self> {
        let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let folder = top.join("target/previous");
        if !folder.join("commit").is_file() {
            let reason =
                "the build before this one is not there: tests/scripts/build-previous.sh makes it";
            return Err(Skipped(reason.to_owned()).into());
        }
        Ok(Self(folder))
    }

    fn program(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

/// A backend's program as a package manager installs it, of one build or the other.
struct Installed {
    path: PathBuf,
    builds: [PathBuf; 2],
    /// Which of them is installed.
    now: usize,
}

impl Installed {
    /// `first` is the build that is installed first.
    fn new(lab: &Lab, previous: &Previous, first: usize) -> Result<Self> {
        let folder = lab.path(&format!("installed-{}", lab.uuid()));
        fs::create_dir(&folder)?;
        let mut installed = Self {
            path: folder.join("outram-backend"),
            builds: [
                previous.program("outram-backend"),
                lab.program("outram-backend")?,
            ],
            now: first,
        };
        installed.put()?;
        Ok(installed)
    }

    /// Puts the other build in the place of the one that is there, which may be running.
    fn change(&mut self) -> Result<()> {
        self.now = 1 - self.now;
        self.put()
    }

    fn put(&mut self) -> Result<()> {
        let new = self.path.with_extension("new");
        // By another process: what a test beside this one starts would have our descriptor for a moment, and no
        // program is run while anybody can write it.
        let paths = [&self.builds[self.now], &new].map(|path| path.display().to_string());
        run("cp", &[&paths[0], &paths[1]])?;
        fs::rename(&new, &self.path)?;
        Ok(())
    }

    /// Whether a process runs the build that is installed.
    fn is_run_by(&self, pid: u32) -> Result<bool> {
        let running = fs::read(format!("/proc/{pid}/exe"))?;
        Ok(running == fs::read(&self.path)?)
    }
}

/// A guest with its pages filled, of a supervised backend; and what its memory servers are.
fn started(lab: &Lab, installed: &Installed, server: &MemServer) -> Result<Guest> {
    let mut guest = Guest::start(lab, &wish(installed, &[&server.address]))?;
    guest.fill(0, FILLED)?;
    ensure!(installed.is_run_by(guest.status()?.backend_pid)?);
    Ok(guest)
}

fn wish<'a>(installed: &'a Installed, servers: &'a [&'a str]) -> Wish<'a> {
    Wish {
        supervised: true,
        program: Some(&installed.path),
        servers,
        ..Wish::default()
    }
}

fn work(guest: &mut Guest, seconds: f64, seed: usize) -> Result<u64> {
    guest.send(
        0,
        "work",
        json!({"page": 0, "pages": FILLED, "seconds": seconds, "write_share": 0.5, "seed": seed}),
    )
}

/// A pager of the build that is installed serves the guest.
fn wait_for_installed(guest: &Guest, installed: &Installed, before: &Status) -> Result<Status> {
    let serves = wait_for(
        "a pager of the other build to serve the guest",
        LONG,
        || {
            let Ok(status) = guest.control().and_then(|mut control| control.status()) else {
                return Ok(None);
            };
            let is_another =
                status.backend_pid != before.backend_pid && status.phase == Phase::Serving;
            Ok((is_another && installed.is_run_by(status.backend_pid)?).then_some(status))
        },
    );
    serves.with_context(|| guest.log())
}

/// Either build's memory server, for either build's pagers.
fn servers(lab: &Lab, previous: &Previous) -> Result<[MemServer; 2]> {
    let arguments = ["--memory", "1GiB"];
    Ok([
        lab.server_by(previous.program("outram-memserver"), SLAB, &arguments)?,
        lab.server()?,
    ])
}

/// For either build first and either build's memory server: changes builds under load, in the way given,
/// again and again.
fn each_way(
    lab: &Lab,
    change: impl Fn(&Lab, &mut Guest, &Installed, &MemServer, &Status) -> Result<()>,
) -> Result<()> {
    let previous = Previous::find()?;
    for (first, server) in servers(lab, &previous)?.iter().enumerate() {
        let mut installed = Installed::new(lab, &previous, first)?;
        let mut guest = started(lab, &installed, server)?;
        for round in 0..ROUNDS {
            let sent = work(&mut guest, 1.0, round)?;
            let before = guest.status()?;
            installed.change()?;
            change(lab, &mut guest, &installed, server, &before)?;
            demand_sound(&guest.answer(sent)?)?;
            guest.verify(0, FILLED)?;
        }
        guest.connect()?;
        guest.end(&[server])?;
    }
    Ok(())
}

/// As `outram restart` and the packages' upgrade do it.
fn asked(lab: &Lab) -> Result<()> {
    each_way(lab, |_, guest, installed, _, before| {
        guest.control()?.restart()?;
        let now = wait_for_installed(guest, installed, before)?;
        ensure!(now.takeovers == 0, "nobody died: {now:?}");
        Ok(())
    })
}

/// All of a backend is killed, and the other build started in its place.
fn killed(lab: &Lab) -> Result<()> {
    each_way(lab, |lab, guest, installed, server, before| {
        end_all(guest, before)?;
        let servers = [server.address.as_str()];
        guest.take_over(lab, &wish(installed, &servers))?;
        wait_for_installed(guest, installed, before).map(drop)
    })
}

/// The former build's program knows an argument of the guest not, and would end at once.
fn newer(lab: &Lab) -> Result<()> {
    let previous = Previous::find()?;
    let server = lab.server()?;
    let mut installed = Installed::new(lab, &previous, 1)?;
    let servers = [server.address.as_str()];
    let wish = Wish {
        granularity: Some(64 << 10),
        ..wish(&installed, &servers)
    };
    let mut guest = Guest::start(lab, &wish)?;
    guest.fill(0, FILLED)?;
    let sent = work(&mut guest, 1.0, 0)?;
    let before = guest.status()?;
    installed.change()?;
    guest.control()?.restart()?;
    wait_for_another(&guest, &before).with_context(|| guest.log())?;
    demand_sound(&guest.answer(sent)?)?;
    guest.verify(0, FILLED)?;
    guest.connect()?;
    guest.end(&[&server])
}

/// The supervisor is still that of the former build when its pager dies.
fn between(lab: &Lab) -> Result<()> {
    each_way(lab, |_, guest, _, _, before| {
        end(before.backend_pid, Signal::SIGKILL)?;
        let now = wait_for_another(guest, before)?;
        end(now.backend_pid, Signal::SIGKILL)?;
        wait_for_another(guest, &now).map(drop)
    })
}
