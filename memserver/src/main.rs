//! `outram-memserver`: lends this machine's idle memory.

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use outram_memserver::{Arguments, Config, Flags, Server};
use outram_wire::causes::with_causes;
use outram_wire::logging;
use outram_wire::units::format_size;
use outram_wire::verbs::Choice;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    logging::start(env!("CARGO_BIN_NAME"));
    match run(&arguments.flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("outram-memserver: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(flags: &Flags) -> anyhow::Result<()> {
    let config = Config::gather(flags.clone())?;
    let (memory, started) = (config.memory_bytes, config.clone());
    raise_descriptor_limit();
    warn_beyond_ram(memory);
    warn_of_device(&config.rdma);
    // Before any thread is there, so that none of them misses a signal's handler.
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).context("signals")?;
    let server = Server::start(config)?;
    tracing::info!(address = %server.local_addr(), memory = %format_size(memory), "lending");
    if let Some(address) = server.metrics_addr() {
        tracing::info!(%address, "metrics");
    }
    tell_service_manager(&[NotifyState::Ready]);
    for signal in signals.forever() {
        if signal == SIGHUP {
            reload(&server, flags, &started);
            continue;
        }
        tracing::info!("stopping: every lease ends");
        tell_service_manager(&[NotifyState::Stopping]);
        break;
    }
    server.stop();
    Ok(())
}

/// Tells systemd, where it started this program; see sd_notify(3).
fn tell_service_manager(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}

/// Reads configuration and certificates again. A mistake in them changes nothing.
fn reload(server: &Server, flags: &Flags, started: &Config) {
    let reloaded = Config::gather(flags.clone())
        .map_err(anyhow::Error::new)
        .and_then(|config| Ok((server.reload(&config)?, config)));
    match reloaded {
        Ok((asked, config)) => {
            warn_beyond_ram(config.memory_bytes);
            let memory = format_size(config.memory_bytes);
            tracing::info!(%memory, slabs_asked_back = asked, "configuration taken");
            let later = started.taken_at_start_alone(&config);
            if !later.is_empty() {
                let settings = later.join(", ");
                tracing::warn!(%settings, "changed, and taken over by another start alone, which the pages here do not outlive");
            }
        }
        Err(error) => tracing::error!("the configuration is not taken: {error:#}"),
    }
}

/// Each connection takes a descriptor; the usual soft limit of 1024 is for programs that select(2).
fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

/// What is lent beyond the machine's RAM is swapped, or ends the server when memory runs out.
fn warn_beyond_ram(memory_bytes: u64) {
    let Some(ram_bytes) = std::fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| ram_bytes(&text))
    else {
        return;
    };
    if memory_bytes > ram_bytes {
        let (memory, ram) = (format_size(memory_bytes), format_size(ram_bytes));
        tracing::warn!(%memory, %ram, "more is lent than this machine has: lower --memory");
    }
}

/// One that comes later is found when a client connects.
fn warn_of_device(rdma: &Choice) {
    if let Err(error) = rdma.check() {
        let words = with_causes(&error);
        tracing::warn!("{words}: until then clients use TCP, and those that demand RDMA wait");
    }
}

fn ram_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_is_read_as_the_kernel_writes_it() {
        let text = "MemTotal:       16374620 kB\nMemFree:         1 kB\n";
        assert_eq!(ram_bytes(text), Some(16_374_620 * 1024));
        assert_eq!(ram_bytes("MemFree: 1 kB\n"), None);
        assert_eq!(ram_bytes("MemTotal: many kB\n"), None);
    }
}
