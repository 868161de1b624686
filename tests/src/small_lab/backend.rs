//! A backend's process.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Result, bail};
use outram_backend::crash_points::VARIABLE;
use outram_wire::lost_pages::LostPages;

use super::{LONG, Lab, Wish};
use crate::hermetic::command::wait_for;

/// Starts a backend; returns at once, with the path of its log.
pub(super) fn spawn_backend(
    lab: &Lab,
    uuid: &str,
    wish: &Wish<'_>,
    page_size: &str,
) -> Result<(Child, PathBuf)> {
    let ram_mib: u64 = wish.ram_mib.iter().sum();
    let mut arguments = lab.backend_arguments(uuid, ram_mib << 20);
    if let Some(settings) = wish.settings
        && let Some(flag) = arguments.iter().position(|word| word == "--config")
    {
        arguments[flag + 1] = settings.display().to_string();
    }
    arguments.extend(["--local".to_owned(), wish.limit.to_string()]);
    let most = (ram_mib + wish.hot_plug_mib) << 20;
    arguments.extend(["--max-ram".to_owned(), most.to_string()]);
    arguments.extend(["--page-size".to_owned(), page_size.to_owned()]);
    arguments.extend(["--seal".to_owned(), wish.seal.to_string()]);
    if wish.lost_pages != LostPages::default() {
        arguments.extend(["--lost-pages".to_owned(), wish.lost_pages.to_string()]);
    }
    for server in wish.servers {
        arguments.extend(["--server".to_owned(), (*server).to_owned()]);
    }
    if let Some(bytes) = wish.granularity {
        arguments.extend(["--granularity".to_owned(), bytes.to_string()]);
    }
    if let Some(mib) = wish.disk_mib {
        let key = lab.path(&format!("disk-key-{uuid}"));
        arguments.extend(["--disk-size".to_owned(), format!("{mib}MiB")]);
        arguments.extend(["--disk-key-file".to_owned(), key.display().to_string()]);
        // Left once, as libvirt's hook does: a backend that is started again has to know it.
        let told = lab.path("outram").join(uuid).exists();
        if !told {
            fs::write(&key, "5".repeat(64))?;
        }
    }
    let log = lab.path(&format!("backend-{uuid}"));
    let file = File::options().create(true).append(true).open(&log)?;
    let mut backend = Command::new(match wish.program {
        Some(program) => program.to_owned(),
        None => lab.program("outram-backend")?,
    });
    if let Some(point) = wish.dies_at {
        backend.env(VARIABLE, point.name());
    }
    let backend = backend
        .arg(if wish.supervised { "run" } else { "page" })
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .spawn()?;
    Ok((backend, log))
}

/// Starts a backend and waits until it listens.
pub(super) fn start_backend(
    lab: &Lab,
    uuid: &str,
    wish: &Wish<'_>,
    page_size: &str,
) -> Result<(Child, PathBuf)> {
    let (mut backend, log) = spawn_backend(lab, uuid, wish, page_size)?;
    let dir = lab.path("outram").join(uuid);
    let listening = wait_for("the backend to listen", LONG, || {
        if let Some(status) = backend.try_wait()? {
            bail!("the backend ended with {status}:\n{}", tail(&log));
        }
        // A killed one leaves its socket.
        let connected = UnixStream::connect(dir.join("control.sock"));
        Ok(connected.is_ok().then_some(()))
    });
    if let Err(error) = listening {
        let _ = backend.kill();
        let _ = backend.wait();
        return Err(error);
    }
    Ok((backend, log))
}

/// The end of a log, for messages.
pub(super) fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let first = lines.len().saturating_sub(40);
    format!("its log ends with:\n{}", lines[first..].join("\n"))
}
